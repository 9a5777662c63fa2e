"""Population-based training: the decision, by tables; what members write and read; whole populations."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
from conftest import ROOT

import ver_ppo
from notebooks.extensions import population
from notebooks.extensions.population import BOUNDS, Entry, evolve, mutate
from tests.test_multigpu import free_port, start, stop
from tests.test_run import one_line, run_here, same, saved

OPTIONS = {"learning_rate": 1e-3, "ent_coef": 0.0, "clip_coef": 0.2, "gamma": 0.99, "update_epochs": 2}


def entries(*scores):
    """Entries of members 0, 1, ... with these scores; each has a learning rate of its own."""
    return [
        Entry(member, 100, score, OPTIONS | {"learning_rate": 1e-3 * (1 + member)}) for member, score in enumerate(scores)
    ]


@pytest.mark.parametrize(
    "scores, decisions",
    [
        ((7,), ("goes on",)),  # nobody else is there
        ((5, 5, 5, 5), ("goes on",) * 4),
        ((500, 480, 460, 100), ("goes on", "goes on", "goes on", "takes over")),
        ((500, 500, 100, 100), ("goes on", "goes on", "goes on", "takes over")),  # equals: by their number
        ((100, 96), ("goes on", "mutates")),  # 5 % of the best
        ((100, 90, 80, 70), ("goes on", "goes on", "goes on", "takes over")),  # the deviation is 11
        ((100, 60, 60, 60, 60, 60, 60), (*["goes on"] * 5, "takes over", "takes over")),  # of seven, two
        ((-100, -200), ("goes on", "takes over")),
        ((10, 9, 8, 1, 1), ("goes on", "goes on", "goes on", "takes over", "takes over")),
        ((1.0, 0.0, 1.0, 0.0), ("goes on", "goes on", "goes on", "takes over")),
    ],
)
def test_evolve(scores, decisions):
    """Whoever is not among the worst goes on; of the worst, who is close to the best mutates, and the others take over."""
    everybody = entries(*scores)
    for own, decision in zip(everybody, decisions):
        others, rng = [entry for entry in everybody if entry is not own], np.random.default_rng(3)
        found, donor, options = evolve(own, others, rng)
        assert found == decision, own
        assert (found, donor, options) == evolve(own, others[::-1], np.random.default_rng(3))  # pure, whatever the order
        if found == "goes on":
            assert options == own.options
        if found == "takes over":
            best = sorted(scores, reverse=True)[: max(1, round(0.3 * len(scores)))]
            assert scores[donor] in best
            ratio = options["learning_rate"] / everybody[donor].options["learning_rate"]
            assert 1 / 1.5 <= ratio <= 1.5
        else:
            assert donor is None
            assert all(options[name] == own.options[name] or found == "mutates" for name in OPTIONS)
            assert 1 / 1.5 <= options["learning_rate"] / own.options["learning_rate"] <= 1.5


def test_donors_are_the_best():
    """Of ten members, the worst three take over from the best three, each of them from time to time."""
    everybody = entries(*range(10, 0, -1))
    rng = np.random.default_rng(0)
    donors = [evolve(everybody[9], everybody[:9], rng)[1] for _ in range(100)]
    assert set(donors) == {0, 1, 2} and min(map(donors.count, {0, 1, 2})) > 20
    assert [evolve(own, [e for e in everybody if e is not own], rng)[0] for own in everybody].count("goes on") == 7


def test_mutate():
    """Half of the options change, by a factor of 1.1 to 1.5 (gamma: of what is missing to 1), epochs by one, up as often as
    down, within their bounds; 0 stays 0."""
    rng, found = np.random.default_rng(0), {name: [] for name in OPTIONS}
    for _ in range(2000):
        for name, value in mutate(OPTIONS, rng).items():
            found[name].append(value)
    assert set(found["ent_coef"]) == {0.0} and set(found["update_epochs"]) == {1, 2, 3}
    for name, distance in (
        ("learning_rate", lambda v: v / 1e-3),
        ("clip_coef", lambda v: v / 0.2),
        ("gamma", lambda v: (1 - v) / 0.01),
    ):
        ratio = np.array([distance(value) for value in found[name]])
        changed = ratio[~np.isclose(ratio, 1)]
        size = np.exp(np.abs(np.log(changed)))
        assert 0.45 < len(changed) / 2000 < 0.55 and 0.45 < (changed > 1).mean() < 0.55
        assert size.min() > 1.0999 and size.max() < 1.5001 and abs(size.mean() - 1.3) < 0.02, name
    ends = OPTIONS | {"learning_rate": 0.099, "gamma": 0.9999, "update_epochs": 1}
    for _ in range(200):
        ends = mutate(ends, rng)
        assert all(low <= ends[name] <= high for name, (low, high) in BOUNDS.items() if name != "ent_coef")


LINE = "--env-id CartPole-v1 --num-workers 0 --num-envs 4 --num-steps 16 --hidden-size 16 --eval-episodes 0"
LINE += " --learner-threads 1 --population-size 2 --evolve-interval 128"


def member(tmp_path, number, line="", steps=640):
    """A small run of a member, here, to its end; two members."""
    args = f"{LINE} --population {tmp_path}/p --member {number} --total-timesteps {steps} {line}"
    return population.main(args.split())


def decisions(tmp_path, number):
    """What a member has decided."""
    return [json.loads(line) for line in open(tmp_path / "p" / str(number) / "decisions.jsonl")]


def test_taking_over(tmp_path, capsys):
    """One that is clearly worse goes on by weights, moments and options of the other, at its own step; comes back by its
    number; and never looks at an entry of more experience than its own."""
    assert member(tmp_path, 0, "--learning-rate 1e-2") == 0
    folder, entry = tmp_path / "p" / "0", lambda step: tmp_path / "p" / "0" / f"{step:012}.pt"
    assert sorted(folder.glob("*.pt")) == [entry(step) for step in (128, 256, 384, 512, 640)]
    for step, score in ((384, 1.0), (512, 500.0), (640, 9999.0)):
        torch.save(ver_ppo.load_checkpoint(entry(step)) | {"recent": [[score, score]]}, entry(step))
    assert member(tmp_path, 1, "--learning-rate 1e-30 --evolve-after 129", steps=256) == 0  # its last steps decide nothing
    assert not (tmp_path / "p" / "1" / "decisions.jsonl").exists()
    assert member(tmp_path, 1, "--learning-rate 1e-30 --evolve-after 129", steps=384) == 0  # the same run goes on
    (run,) = (tmp_path / "p" / "1").glob("CartPole*")
    assert saved(run)["step"] == 384 and "takes over" not in capsys.readouterr().out
    assert member(tmp_path, 1, "--learning-rate 1e-30 --evolve-after 400", steps=520) == 0
    (line,) = decisions(tmp_path, 1)
    assert (line["step"], line["decision"], line["from"], line["others"]) == (512, "takes over", 0, {"0": [512, 500.0]})


def test_takes_over_weights(tmp_path, monkeypatch):
    """What it goes on from: the other's weights and moments, its own step, no episodes, mutated options that hold on."""
    assert member(tmp_path, 0, "--learning-rate 1e-2", steps=256) == 0
    for path in (tmp_path / "p" / "0").glob("*.pt"):
        torch.save(ver_ppo.load_checkpoint(path) | {"recent": [[500.0, 500.0]]}, path)
    donor = ver_ppo.load_checkpoint(tmp_path / "p" / "0" / f"{128:012}.pt")
    seen, train = [], population.train

    def spying_train(options):
        if options.resume:
            seen.append((options, saved(tmp_path / "p" / "1" / options.resume.rsplit("/")[-1])))
        return train(options)

    monkeypatch.setattr(population, "train", spying_train)
    assert member(tmp_path, 1, "--learning-rate 1e-30", steps=192) == 0
    ((options, content),) = seen
    (decided,) = decisions(tmp_path, 1)
    assert decided["decision"] == "takes over" and content["step"] == 128 and content["recent"] == []
    assert all(torch.equal(donor["policy"][name], tensor) for name, tensor in content["policy"].items())
    assert same(content["optimizer"], donor["optimizer"])
    (run,) = (tmp_path / "p" / "1").glob("CartPole*")
    for name in BOUNDS:
        assert saved(run)["options"][name] == decided["to"][name] == getattr(options, name)
    assert 0.5e-2 < options.learning_rate < 2e-2 and saved(run)["step"] == 192


def test_only_its_own_runs(tmp_path, capsys):
    """A member begins by --init-from, and goes on with what it has learned itself: the same environment."""
    run = run_here(tmp_path / "own", "--env-id CartPole-v1 --num-workers 0 --total-timesteps 64")
    one_line(capsys, f"{LINE} --population {tmp_path}/p --member 1 --resume {run}".split(), "give --init-from", population.main)
    assert member(tmp_path, 1, f"--init-from {run / 'checkpoint.pt'}", steps=192) == 0
    assert member(tmp_path, 1, f"--init-from {run / 'checkpoint.pt'}", steps=256) == 0  # the same command line again
    (own,) = (tmp_path / "p" / "1").glob("CartPole*")
    assert saved(own)["step"] == 256
    one_line(capsys, f"{LINE} --population {tmp_path}/p --member 1 --env-id Acrobot-v1".split(), "has learned CartPole-v1", population.main)


@pytest.mark.parametrize("decided", [True, False])
def test_signals_come_first(tmp_path, monkeypatch, decided):
    """A signal while it decides ends the training, whatever was decided."""

    def signalled(run):
        os.kill(os.getpid(), signal.SIGTERM)
        return decided

    monkeypatch.setattr(population, "publish_and_decide", signalled)
    assert member(tmp_path, 1) == 128 + signal.SIGTERM
    (run,) = (tmp_path / "p" / "1").glob("CartPole*")
    assert saved(run)["step"] == 128


def test_a_full_disk(tmp_path, monkeypatch, capsys):
    """If an entry or the changed checkpoint cannot be written, that is said; nothing is decided, training goes on."""
    assert member(tmp_path, 0, "--learning-rate 1e-2", steps=128) == 0
    (path,) = (tmp_path / "p" / "0").glob("*.pt")
    torch.save(ver_ppo.load_checkpoint(path) | {"recent": [[500.0, 500.0]]}, path)
    write = ver_ppo.write_checkpoint
    entries_fail, takeovers_fail = lambda content, path: path.stem.isdigit(), lambda content, path: content["recent"] == []
    for number, fails in enumerate((entries_fail, takeovers_fail)):

        def full(content, path, fails=fails):
            if fails(content, path):
                raise OSError(28, "No space left on device")
            write(content, path)

        monkeypatch.setattr(ver_ppo, "write_checkpoint", full)
        capsys.readouterr()
        assert member(tmp_path, 1, steps=192 * (number + 1)) == 0
        out = capsys.readouterr().out
        assert "not compared with the population" in out and "No space left" in out, number
        assert not (tmp_path / "p" / "1" / "decisions.jsonl").exists()


def test_many_ranks(tmp_path):
    """A member may be many ranks: the first decides, and all start again from what it has taken over."""
    assert member(tmp_path, 0, "--learning-rate 1e-2", steps=128) == 0
    (path,) = (tmp_path / "p" / "0").glob("*.pt")
    torch.save(ver_ppo.load_checkpoint(path) | {"recent": [[500.0, 500.0]]}, path)
    command = f"-m torch.distributed.run --nproc-per-node 2 --master-port {free_port()}".split()
    command += "-m notebooks.extensions.population --device cpu".split()
    process = start(
        [*command, *f"{LINE} --population {tmp_path}/p --member 1 --total-timesteps 512 --rank-timeout 20".split()]
    )
    try:
        text = process.communicate(timeout=90)[0]
        assert process.returncode == 0 and text.count("takes over member 0") == 3 and "Traceback" not in text, text
    finally:
        stop([process.pid])
    (run,) = (tmp_path / "p" / "1").glob("CartPole*")
    (first, *_) = decisions(tmp_path, 1)
    assert (
        saved(run)["step"] == 512
        and saved(run)["options"]["learning_rate"] == decisions(tmp_path, 1)[-1]["to"]["learning_rate"]
    )
    assert (first["step"], first["decision"], first["from"]) == (128, "takes over", 0)


def test_unreadable_entries(tmp_path, capsys):
    """Entries that are damaged, foreign, half written, of another network or environment are skipped with a line; what is no
    entry is not looked at; and one without a finite score has none."""
    assert member(tmp_path, 0, steps=128) == 0
    folder = tmp_path / "p" / "0"
    good = folder / f"{128:012}.pt"
    other = run_here(tmp_path / "other", "--env-id CartPole-v1 --num-workers 0 --hidden-size 8 --total-timesteps 64")
    cases = {
        "can be read": lambda: good.write_bytes(good.read_bytes()[:1000]),
        "another network": lambda: shutil.copy(other / "checkpoint.pt", good),
    }
    whole = ver_ppo.load_checkpoint(good)
    cases["not a checkpoint of"] = lambda: torch.save({"format": 5}, good)
    cases["another environment"] = lambda: torch.save(whole | {"options": whole["options"] | {"env_id": "Other-v0"}}, good)
    cases[""] = lambda: torch.save(whole | {"recent": [[float("nan"), 1.0]]}, good)
    for number, (words, spoil) in enumerate(cases.items()):
        spoil()
        (folder / "notes.pt").write_text("not an entry")
        (folder / f"{64:012}.tmp").write_text("half an entry")
        capsys.readouterr()
        assert member(tmp_path, 1, steps=256 * (number + 1)) == 0
        out = capsys.readouterr().out
        assert ("skipped: " in out) == bool(words) and words in out and "Traceback" not in out, out
        assert out.count("skipped: ") <= 2 and "best of 1 has" in out


@pytest.mark.parametrize(
    "line, word",
    [
        ("--member 4", "--member 4"),
        ("--member -1", "--member -1"),
        ("--population-size 0 --member 0", "--population-size 0"),
        ("--evolve-interval 0", "--evolve-interval 0"),
        ("--evolve-by success", "return, length are"),
    ],
)
def test_refusals(tmp_path, capsys, line, word):
    """In one line, before anything is written."""
    one_line(capsys, f"--env-id CartPole-v1 --population {tmp_path}/p {line}".split(), word, population.main)
    assert not list(tmp_path.glob("p/*/CartPole*"))


def test_one_process_for_each_number(tmp_path, capsys):
    """While a member is running, another process with its number is refused; afterwards it may go on."""
    here = population.Options(population=str(tmp_path / "p"), member=1)
    with population.only_one(here):
        one_line(capsys, f"{LINE} --population {tmp_path}/p --member 1".split(), "running already", population.main)
    assert member(tmp_path, 1, steps=64) == 0


def test_four_processes(tmp_path):
    """Four members, from two working directories, begin at different times, two with useless learning rates; one is killed
    and comes back by the same command line. In the end all know the cue, and nobody has begun anew."""
    line = "--env-id tests.envs:Cue-v0 --num-workers 0 --learner-threads 1 --num-envs 4 --num-steps 32 --hidden-size 16"
    line += " --learning-rate {} --gae-lambda 1 --update-epochs 4 --num-minibatches 1 --norm-adv --eval-episodes 0"
    line += f" --total-timesteps 32768 --population {tmp_path}/p --population-size 4 --member {{}} --evolve-interval 4096"
    environment = os.environ | {"PYTHONPATH": str(ROOT)}

    def start(number):
        rate = [3e-3, 1e-6, 5e-3, 1e-30][number]
        where = tmp_path / f"machine {number % 2}"
        where.mkdir(exist_ok=True)
        command = [sys.executable, "-m", "notebooks.extensions.population", *line.format(rate, number).split()]
        log = open(tmp_path / f"{number}.log", "a")
        return subprocess.Popen(command, cwd=where, stdout=log, stderr=log, env=environment)

    processes = []
    for number in range(4):
        processes.append(start(number))
        time.sleep(1.0)
    until = time.monotonic() + 120
    while not list((tmp_path / "p" / "2").glob("*.pt")) and time.monotonic() < until:
        time.sleep(0.05)
    processes[2].send_signal(signal.SIGKILL)
    processes[2].wait(10)
    reached = len(list((tmp_path / "p" / "2").glob("*.pt")))
    assert 0 < reached < 10
    processes[2] = start(2)
    for process in processes:
        assert process.wait(300) == 0
    for number in range(4):
        (run,) = (tmp_path / "p" / str(number)).glob("tests*")
        content = saved(run)
        assert content["step"] == 32768, (tmp_path / f"{number}.log").read_text()
        assert np.array(content["recent"])[:, 0].mean() > 0.9, number
    assert any(line["decision"] == "takes over" for number in (1, 3) for line in decisions(tmp_path, number))
    assert all(
        entry[0] <= line["step"]
        for number in range(4)
        for line in decisions(tmp_path, number)
        for entry in line["others"].values()
    )
