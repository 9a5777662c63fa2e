"""Population-based training: the decision, by tables; what members write and read; whole
populations."""

import json
import os
import signal
import subprocess
import sys
import time
import weakref

import numpy as np
import pytest
import torch

import ver_ppo
from notebooks.extensions import population
from notebooks.extensions.population import BOUNDS, Entry, evolve, mutate
from tests.helpers import ROOT, free_port, one_line, run_here, same, saved, start, stop
from tests.takeovers import equal_policies

EPISODES = population.EPISODES
OPTIONS = {
    "learning_rate": 1e-3,
    "ent_coef": 0.0,
    "clip_coef": 0.2,
    "gamma": 0.99,
    "update_epochs": 2,
}


def entries(*scores):
    """Entries of members 0, 1, ... with these scores; each has a learning rate of its own."""
    return [
        Entry(member, 100, score, OPTIONS | {"learning_rate": 1e-3 * (1 + member)})
        for member, score in enumerate(scores)
    ]


def decide(own, everybody, best=None, size=None, rng=None):
    """A member's decision, if the best score that it has had is the one that it has now."""
    others = [entry for entry in everybody if entry is not own]
    best = own.score if best is None else best
    return evolve(own, best, others, size or len(everybody), rng or np.random.default_rng(3))


@pytest.mark.parametrize(
    "scores, decisions",
    [
        ((5, 5, 5, 5), "gggg"),
        # the third is within half a deviation of the second, and ...
        ((500, 480, 460, 100), "gggt"),
        ((100, 99, 98, 96), "ggmm"),  # within 5 % of all
        ((100, 100, 60, 60), "ggtt"),  # two of four: 30 %, rounded up
        ((100, 80, 60), "ggt"),  # one of three
        ((100, 90, 80, 70, 60, 50, 40, 30), "gggggttt"),  # three of eight
        ((-100, -100, -200, -300), "ggtt"),
        ((1.0, 1.0, 0.0, 0.0), "ggtt"),
        ((0.01, 0.0, 0.0, 0.0), "gggg"),  # as good as the second of the best two
    ],
)
def test_evolve(scores, decisions):
    """What is not among the worst goes on; of the worst, what is close mutates, and the others take
    over."""
    names = {"g": "goes on", "m": "mutates", "t": "takes over"}
    everybody = entries(*scores)
    for own, letter in zip(everybody, decisions):
        found, donor, options = decide(own, everybody)
        # there the draw of the donor decides
        if (own.score, scores) != (460, (500, 480, 460, 100)):
            assert found == names[letter], own
        assert (found, donor, options) == decide(own, everybody[::-1])  # pure, whatever the order
        if found == "goes on":
            assert options == own.options
        if found != "takes over":
            assert donor is None
            assert 1 / 1.5 <= options["learning_rate"] / own.options["learning_rate"] <= 1.5


def slow_rule(own, best, others, size, donor):
    """The paper's rule once more, as its code goes about it: scores of all, -1e9 where there is
    none."""
    scores = {entry.member: entry.score for entry in [*others, own]}
    table = sorted(((scores.get(member, -1e9), -member) for member in range(size)), reverse=True)
    number = -(-3 * size // 10)
    best_ones, worst_ones = table[:number], table[-number:]
    known = sorted(score for score, _ in table if score > -1e9)
    if (own.score, -own.member) not in worst_ones or best >= min(score for score, _ in best_ones):
        return "goes on"
    if len(known) <= max(2, size // 2):
        return "goes on"
    kept = known[len(known) // 5 :]
    mean = sum(kept) / len(kept)
    deviation = (sum((score - mean) ** 2 for score in kept) / len(kept)) ** 0.5
    gap = scores[donor] - own.score
    return "takes over" if gap > 0.5 * deviation and gap > 0.05 * abs(scores[donor]) else "mutates"


def test_evolve_is_the_papers_rule():
    """Populations of 3 to 20, some members without a score: decisions are those of the rule written
    the long way."""
    rng, found = np.random.default_rng(0), []
    for number in range(3000):
        size = int(rng.integers(3, 21))
        spread = 10 ** rng.uniform(-2, 1)
        everybody = entries(*rng.normal(1.0, spread, size))
        present = [entry for entry in everybody if rng.random() < 0.8]
        if not present:
            continue
        own = present[rng.integers(len(present))]
        best = own.score + spread * rng.exponential(0.3)
        decision, donor, _ = decide(own, present, best, size, np.random.default_rng(number))
        others = [entry for entry in present if entry is not own]
        ranked = sorted(present, key=lambda entry: -entry.score)
        drawn = (
            ranked[np.random.default_rng(number).integers(-(-3 * size // 10))]
            if decision != "goes on"
            else own
        )
        assert donor in (None, drawn.member)
        assert decision == slow_rule(own, best, others, size, drawn.member)
        found.append(decision)
    assert min(map(found.count, ("goes on", "mutates", "takes over"))) > 50


def test_significantly_worse():
    """By more than half a deviation of the scores, the lowest fifth left out, and by more than 5 %
    of the other's; and only if it was never as good as one of the best since its last decision."""
    # deviation 33 without, 304 with the crashed ones
    everybody = entries(100, 1, 1, 1, 1, 1, 1, 0, -1000, -1000)
    rng = np.random.default_rng(0)
    found = [decide(everybody[7], everybody, rng=rng)[:2] for _ in range(300)]
    # drawn: the first, or one of score 1
    assert set(found) == {("takes over", 0), ("mutates", None)}
    assert 0.25 < found.count(("takes over", 0)) / 300 < 0.42
    for gap, decision in ((4.9, "mutates"), (5.1, "takes over")):
        everybody = entries(100, 100, 100, 100, 100, 100 - gap, 100 - gap, -1e6)
        assert decide(everybody[6], everybody)[0] == decision
    everybody = entries(*range(10, 0, -1))
    assert decide(everybody[9], everybody, best=7.9)[0] == "takes over"
    assert decide(everybody[9], everybody, best=8.0)[0] == "goes on"  # the third best has 8


def test_quorum():
    """A member without a score is counted among the worst: so nothing changes before more than half
    of the population, and at least three, have one."""
    for size in range(3, 21):
        for known in range(1, size + 1):
            everybody = entries(*np.linspace(100, 1, known))
            changed = [decide(own, everybody, size=size)[0] == "takes over" for own in everybody]
            assert sum(changed) == max(0, known - size + -(-3 * size // 10)), (size, known)
            assert known > max(2, size // 2) or not any(changed)


def test_equal_policies():
    """Members which draw their returns from one distribution seldom take over from each other: not
    at all if an episode is within a tenth of the mean; the more often, the noisier, because nothing
    here is a test of significance."""
    for size in (4, 8, 16):
        shares = [equal_policies(size, spread, 1600 // size) for spread in (0.1, 0.2, 0.5)]
        assert shares[0] < 0.003 and shares[1] < 0.08 and shares[2] < 0.22, size
        # what the best score is for
        assert equal_policies(size, 0.5, 1600 // size, looks=1) > 1.3 * shares[2]


def test_donors_are_the_best():
    """Of ten members, the worst three take over from the best three, each of them from time to
    time; the options are the donor's as often as their own."""
    everybody = entries(*range(10, 0, -1))
    rng = np.random.default_rng(0)
    found = [decide(everybody[9], everybody, rng=rng) for _ in range(400)]
    donors = [donor for _, donor, _ in found]
    assert set(donors) == {0, 1, 2} and min(map(donors.count, {0, 1, 2})) > 100
    # the last one has 1e-2
    own = [0.9e-3 * 10 / 1.5 < options["learning_rate"] for _, _, options in found]
    assert 0.4 < np.mean(own) < 0.6
    assert [decide(own, everybody)[0] for own in everybody].count("goes on") == 7


def test_mutate():
    """Options change with probability 0.15, by a factor of 1.1 to 1.5 (gamma: of what is missing to
    1, 1.1 to 1.2), epochs by one, up as often as down, within their bounds; 0 stays 0."""
    rng, found = np.random.default_rng(0), {name: [] for name in OPTIONS}
    for _ in range(6000):
        for name, value in mutate(OPTIONS, rng).items():
            found[name].append(value)
    assert set(found["ent_coef"]) == {0.0} and set(found["update_epochs"]) == {1, 2, 3}
    for name, largest, distance in (
        ("learning_rate", 1.5, lambda v: v / 1e-3),
        ("clip_coef", 1.5, lambda v: v / 0.2),
        ("gamma", 1.2, lambda v: (1 - v) / 0.01),
    ):
        ratio = np.array([distance(value) for value in found[name]])
        changed = ratio[~np.isclose(ratio, 1)]
        size = np.exp(np.abs(np.log(changed)))
        assert 0.13 < len(changed) / 6000 < 0.17 and 0.45 < (changed > 1).mean() < 0.55
        assert size.min() > 1.0999, name
        assert size.max() < largest + 1e-4, name
        assert abs(size.mean() - (1.1 + largest) / 2) < 0.02, name
    ends = OPTIONS | {"learning_rate": 0.099, "gamma": 0.9999, "update_epochs": 1}
    for _ in range(600):
        ends = mutate(ends, rng)
        assert all(
            low <= ends[name] <= high for name, (low, high) in BOUNDS.items() if name != "ent_coef"
        )


def test_outside_the_bounds():
    """What a user has set beyond a bound does not jump to it: it stays, or moves inwards by the
    usual factor."""
    outside = {
        "learning_rate": 0.3,
        "ent_coef": 0.2,
        "clip_coef": 0.01,
        "gamma": 1.0,
        "update_epochs": 30,
    }
    rng = np.random.default_rng(0)
    changes = [mutate(outside, rng) for _ in range(500)]
    for name, sign in (("learning_rate", -1), ("ent_coef", -1), ("clip_coef", 1)):
        ratio = np.array([options[name] / outside[name] for options in changes]) ** sign
        assert ratio.min() == 1.0 and 1.3 < ratio.max() <= 1.5, name
    assert {options["update_epochs"] for options in changes} == {29, 30}
    assert {options["gamma"] for options in changes} == {1.0}
    low = {
        options["gamma"] for options in [mutate(outside | {"gamma": 0.5}, rng) for _ in range(500)]
    }
    assert min(low) == 0.5 and 0.55 < max(low) < 0.6


LINE = "--env-id CartPole-v1 --num-workers 0 --num-envs 4 --num-steps 16 --hidden-size 16"
LINE += " --eval-episodes 0 --learner-threads 1 --population-size 3 --evolve-interval 128"


@pytest.fixture(autouse=True)
def few_episodes(monkeypatch):
    """Three episodes make a score in the small runs below."""
    monkeypatch.setattr(population, "EPISODES", 3)


def member(tmp_path, number, line="", steps=640):
    """A small run of a member, here, to its end; three members."""
    args = f"{LINE} --population {tmp_path}/p --member {number} --total-timesteps {steps} {line}"
    return population.main(args.split())


def decisions(tmp_path, number):
    """What a member has decided."""
    return [json.loads(line) for line in open(tmp_path / "p" / str(number) / "decisions.jsonl")]


def plant(tmp_path, number, step, content, score, changes=None):
    """Put an entry of a member into the folder: a checkpoint's content, with this score."""
    folder = tmp_path / "p" / str(number)
    folder.mkdir(parents=True, exist_ok=True)
    whole = content | {"step": step, "recent": [[score, score]] * 20} | (changes or {})
    torch.save(whole, folder / f"{step:012}.pt")


@pytest.fixture(scope="module")
def donor(tmp_path_factory):
    """The checkpoint of a member after 128 steps, its learning rate 1e-2."""
    path = tmp_path_factory.mktemp("donor")
    assert member(path, 0, "--learning-rate 1e-2", steps=128) == 0
    (run,) = (path / "p" / "0").glob("CartPole*")
    return saved(run)


def test_taking_over(tmp_path, capsys, donor):
    """One that is clearly worse goes on by weights and moments of the other, at its own step; comes
    back by its number; and never looks at an entry of more experience than its own."""
    for step, score in ((384, 1.0), (512, 500.0), (640, 9999.0)):
        plant(tmp_path, 0, step, donor, score)
        plant(tmp_path, 2, step, donor, score / 2)
    # its last steps decide nothing
    assert member(tmp_path, 1, "--learning-rate 1e-30 --evolve-after 129", steps=256) == 0
    assert not (tmp_path / "p" / "1" / "decisions.jsonl").exists()
    # the same run goes on
    assert member(tmp_path, 1, "--learning-rate 1e-30 --evolve-after 129", steps=384) == 0
    (run,) = (tmp_path / "p" / "1").glob("CartPole*")
    assert saved(run)["step"] == 384 and "takes over" not in capsys.readouterr().out
    assert member(tmp_path, 1, "--learning-rate 1e-30 --evolve-after 128", steps=520) == 0
    (line,) = decisions(tmp_path, 1)
    assert (line["step"], line["decision"], line["from"]) == (512, "takes over", 0)
    assert line["others"] == {"0": [512, 500.0], "2": [512, 250.0]}


def test_takes_over_weights(tmp_path, monkeypatch, donor):
    """What it goes on from: the other's weights and moments, its own step, no episodes, mutated
    options that hold on."""
    plant(tmp_path, 0, 128, donor, 500.0)
    plant(tmp_path, 2, 128, donor, 250.0)
    seen, launch = [], population.launch

    def spying_launch(options):
        if options.resume:
            seen.append((options, saved(tmp_path / "p" / "1" / options.resume.rsplit("/")[-1])))
        return launch(options)

    monkeypatch.setattr(population, "launch", spying_launch)
    assert member(tmp_path, 1, "--learning-rate 1e-30", steps=192) == 0
    ((options, content),) = seen
    (decided,) = decisions(tmp_path, 1)
    assert decided["decision"] == "takes over"
    assert content["step"] == 128
    assert content["recent"] == []
    assert all(
        torch.equal(donor["policy"][name], tensor) for name, tensor in content["policy"].items()
    )
    assert same(content["optimizer"]["state"], donor["optimizer"]["state"])
    (run,) = (tmp_path / "p" / "1").glob("CartPole*")
    for name in BOUNDS:
        assert saved(run)["options"][name] == decided["to"][name] == getattr(options, name)
    assert saved(run)["step"] == 192
    assert options.learning_rate > 0.5e-2 or options.learning_rate < 2e-30


def test_a_pause_after_each_change(tmp_path, donor):
    """After --evolve-after steps it may change; then it learns undisturbed for as many, and again
    after a restart."""
    for step in range(128, 1281, 128):
        plant(tmp_path, 0, step, donor, 500.0)
        plant(tmp_path, 2, step, donor, 250.0)
    line = "--learning-rate 1e-30 --evolve-after 256"
    assert member(tmp_path, 1, line, steps=900) == 0
    assert [found["step"] for found in decisions(tmp_path, 1)] == [256, 512, 768]
    assert member(tmp_path, 1, line, steps=1152) == 0  # restarted at 900
    assert [found["step"] for found in decisions(tmp_path, 1)] == [256, 512, 768]


def test_a_score_needs_episodes(tmp_path, monkeypatch, donor):
    """Without 20 episodes since it last changed, a member has no score: no entry, no decision."""
    monkeypatch.setattr(population, "EPISODES", EPISODES)
    assert population.mean_score([[1.0]] * 20, 0) == 1.0
    assert population.mean_score([[1.0]] * 19 + [[float("nan")]], 0) is None
    plant(tmp_path, 0, 128, donor, 500.0)
    plant(tmp_path, 2, 128, donor, 250.0)
    # random actions: 22 steps an episode
    assert member(tmp_path, 1, "--learning-rate 1e-30", steps=128) == 0
    assert not list((tmp_path / "p" / "1").glob("*.pt"))
    assert member(tmp_path, 1, "--learning-rate 1e-30", steps=1280) == 0
    assert len(list((tmp_path / "p" / "1").glob("*.pt"))) >= 2
    steps = [line["step"] for line in decisions(tmp_path, 1)]
    assert steps and min(steps) > 256 and np.diff(steps).min(initial=999) > 256


def test_the_best_score_counts(tmp_path, monkeypatch, donor):
    """The best score of an interval protects from a takeover in its end, and in the next one it
    does not count."""
    plant(tmp_path, 0, 128, donor, 500.0)
    plant(tmp_path, 2, 128, donor, 250.0)
    given = []

    def spying_evolve(own, best, others, size, rng):
        given.append((own.score, best))
        return "goes on", None, own.options

    monkeypatch.setattr(population, "evolve", spying_evolve)
    scores = iter([5.0, 9.0, 3.0, 4.0, 2.0, 1.0, 7.0, 8.0])
    monkeypatch.setattr(population.MemberRun, "combine", rewritten(scores))
    assert member(tmp_path, 1, steps=320) == 0  # two updates between decisions
    assert given == [(9.0, 9.0), (4.0, 4.0)]
    assert member(tmp_path, 2, steps=128) == 0


def rewritten(scores):
    """MemberRun.combine, after which the last episodes have the next of these scores."""
    combine = population.MemberRun.combine

    def combined(self, rollout, logs):
        steps, logs, _ = combine(self, rollout, logs)
        self.recent.clear()
        return steps, logs, [[next(scores)] * 2] * 3

    return combined


def test_entries_are_deleted(tmp_path, donor):
    """A member keeps its newest two entries, and those which a slower one has still to come to, but
    25 at most."""
    options = population.Options(population=str(tmp_path / "p"), population_size=3, member=1)
    (tmp_path / "p" / "1").mkdir(parents=True)

    def publish(first, last):
        for number in range(first, last):
            population.publish(donor | {"step": 100 * number}, options)
        return [int(path.stem) // 100 for path in population.entries_of(options, 1)]

    assert publish(1, 6) == [4, 5]  # nobody else is there
    plant(tmp_path, 0, 900, donor, 1.0)
    plant(tmp_path, 2, 1200, donor, 1.0)
    assert publish(6, 9) == [7, 8]  # the others have more steps
    # member 0 can read the first of them, and will come to the others
    assert publish(9, 15) == [9, 10, 11, 12, 13, 14]
    plant(tmp_path, 0, 1250, donor, 1.0)
    assert publish(15, 16) == [12, 13, 14, 15]
    assert publish(16, 60) == list(range(35, 60))  # it has died


def test_memory(tmp_path, donor, monkeypatch):
    """Of 12 entries one at a time is in memory, next to the run's own: a score is all that is
    kept."""
    loaded, alive, load = [], [], ver_ppo.load_checkpoint

    def counting_load(path):
        content = load(path)
        loaded.append(weakref.ref(next(iter(content["policy"].values()))))
        alive.append(sum(weights() is not None for weights in loaded))
        return content

    for number in (0, *range(2, 13)):
        plant(tmp_path, number, 128, donor, 500.0)
    monkeypatch.setattr(ver_ppo, "load_checkpoint", counting_load)
    assert member(tmp_path, 1, "--population-size 13", steps=192) == 0
    assert len(alive) >= 14 and max(alive) == 2
    assert decisions(tmp_path, 1)[0]["decision"] == "takes over"


def test_only_its_own_runs(tmp_path, capsys):
    """A member begins with the weights of another run, and goes on with what it has learned itself:
    the same environment."""
    run = run_here(tmp_path / "own", "--env-id CartPole-v1 --num-workers 0 --total-timesteps 64")
    one_line(
        capsys,
        f"{LINE} --population {tmp_path}/p --member 1 --resume {run}".split(),
        "give --extensions transfer(file=...) for its weights",
        population.main,
    )
    line = f"--extensions transfer(file={run / 'checkpoint.pt'}) --learning-rate 1e-30"
    assert member(tmp_path, 1, line, steps=192) == 0
    (own,) = (tmp_path / "p" / "1").glob("CartPole*")
    weights = [saved(each)["policy"]["actor.weight"] for each in (run, own)]
    torch.testing.assert_close(*weights)
    # the same command line again
    assert member(tmp_path, 1, line, steps=256) == 0
    assert saved(own)["step"] == 256
    one_line(
        capsys,
        f"{LINE} --population {tmp_path}/p --member 1 --env-id Acrobot-v1".split(),
        "has learned CartPole-v1",
        population.main,
    )


@pytest.mark.parametrize("decided", [True, False])
def test_signals_come_first(tmp_path, monkeypatch, decided):
    """A signal while it decides ends the training, whatever was decided; the decision stays in the
    checkpoint."""

    def signalled(run):
        os.kill(os.getpid(), signal.SIGTERM)
        if decided:
            content = saved(run.folder.path)
            ver_ppo.write_checkpoint(
                content | {"recent": [], "options": content["options"] | {"gamma": 0.9}},
                run.folder.path / "checkpoint.pt",
            )
            return {"gamma": 0.9}
        return None

    monkeypatch.setattr(population, "publish_and_decide", signalled)
    assert member(tmp_path, 1) == 128 + signal.SIGTERM
    (run,) = (tmp_path / "p" / "1").glob("CartPole*")
    assert saved(run)["step"] == 128 and (saved(run)["options"]["gamma"] == 0.9) == decided


def test_a_full_disk(tmp_path, monkeypatch, capsys, donor):
    """If an entry or the changed checkpoint cannot be written, that is said; nothing is decided,
    training goes on."""
    plant(tmp_path, 0, 128, donor, 500.0)
    plant(tmp_path, 2, 128, donor, 250.0)
    write = ver_ppo.write_checkpoint
    entries_fail = lambda content, path: path.stem.isdigit()
    takeovers_fail = lambda content, path: content["recent"] == []
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


def test_many_ranks(tmp_path, donor):
    """A member may be many ranks: the first decides, and all start again from what it has taken
    over."""
    plant(tmp_path, 0, 2048, donor, 500.0)
    plant(tmp_path, 2, 2048, donor, 499.0)
    command = f"-m torch.distributed.run --nproc-per-node 2 --master-port {free_port()}".split()
    command += "-m notebooks.extensions.population --device cpu".split()
    line = LINE.replace("--evolve-interval 128", "--evolve-interval 2048")
    line += f" --population {tmp_path}/p --member 1 --total-timesteps 6144 --rank-timeout 20"
    process = start([*command, *line.split()])
    try:
        text = process.communicate(timeout=90)[0]
        assert process.returncode == 0, text
        assert text.count("takes over member 0") == 2, text
        assert "Traceback" not in text, text
    finally:
        stop([process.pid])
    (run,) = (tmp_path / "p" / "1").glob("CartPole*")
    (first, last) = decisions(tmp_path, 1)
    assert saved(run)["step"] >= 6144
    assert saved(run)["options"]["learning_rate"] == last["to"]["learning_rate"]
    assert first["step"] >= 2048 and (first["decision"], first["from"]) == ("takes over", 0)


def spoiled(donor):
    """Entries that no run can go on from, by name: what differs from a good one."""
    options = lambda **changes: {"options": donor["options"] | changes}
    optimizer = lambda **changes: {"optimizer": donor["optimizer"] | changes}
    half = {name: tensor[..., :1] for name, tensor in donor["policy"].items() if tensor.dim()}
    return {
        "another version": {"format": 99},
        "another environment": options(env_id="Other-v0"),
        "other numbers of episodes": {"columns": ["return"], "recent": [[500.0]] * 20},
        "fewer columns than it says": {"recent": [[]] * 20},
        "episodes that are words": {"recent": [["500", "500"]] * 20},
        "a rate that is a word": options(learning_rate="1e-3"),
        "a rate below 0": options(learning_rate=-1.0),
        "half an epoch": options(update_epochs=1.5),
        "options missing": {"options": {}},
        "no moments": {"optimizer": {}},
        "moments of nothing": optimizer(state={}),
        "moments that are no moments": optimizer(state="x"),
        "another network": {"policy": donor["policy"] | half},
        "weights missing": {"policy": {}},
        "weights that are numbers": {"policy": dict.fromkeys(donor["policy"], 1.0)},
        "other steps than its name says": {"step": 12},
    }


NAMES = list(spoiled({"options": {}, "optimizer": {}, "policy": {}}))


@pytest.mark.parametrize("name", [*NAMES, "damaged", "a folder", "no finite score"])
def test_unusable_entries(tmp_path, capsys, donor, name):
    """An entry that is damaged or foreign is skipped with one line, and the member decides among
    the rest; what is no entry is not looked at; and one without a finite score has none."""
    for number, score in ((0, 9999.0), (2, 500.0), (3, 250.0)):
        plant(tmp_path, number, 128, donor, score)
    path = tmp_path / "p" / "0" / f"{128:012}.pt"
    if name == "damaged":
        path.write_bytes(path.read_bytes()[:1000])
    elif name == "a folder":
        path.unlink()
        path.mkdir()
    else:
        changes = spoiled(donor).get(name, {"recent": [[float("nan"), 1.0]] * 20})
        plant(tmp_path, 0, 128, donor, 9999.0, changes)
    (tmp_path / "p" / "0" / "notes.pt").write_text("not an entry")
    (tmp_path / "p" / "0" / "²²²²²²²²²²²².pt").write_text("not an entry")
    (tmp_path / "p" / "0" / f"{64:012}.tmp").write_text("half an entry")
    assert member(tmp_path, 1, "--population-size 4 --learning-rate 1e-30", steps=192) == 0
    out = capsys.readouterr().out
    assert out.count("skipped: ") == (name != "no finite score") and "Traceback" not in out, out
    (line,) = decisions(tmp_path, 1)
    assert set(line["others"]) == {"2", "3"}
    assert line["decision"] == "takes over" and line["from"] in (2, 3)


@pytest.mark.parametrize(
    "line, word",
    [
        ("--member 4", "--member 4"),
        ("--member -1", "--member -1"),
        ("--population-size 2 --member 0", "--population-size 2"),
        ("--evolve-interval 0", "--evolve-interval 0"),
        ("--evolve-by success", "return, length are"),
        ("--population /dev/null/x", "/dev/null/x"),
    ],
)
def test_refusals(tmp_path, capsys, line, word):
    """In one line, before anything is written."""
    one_line(
        capsys,
        f"--env-id CartPole-v1 --population {tmp_path}/p {line}".split(),
        word,
        population.main,
    )
    assert not list(tmp_path.glob("p/*/CartPole*"))


def test_a_members_seed(tmp_path):
    """Of each member another one; the same when it comes back, by its command line or by
    --resume."""
    seeds = []
    for line in ("--seed 5", "--seed 5", "--resume"):
        if line == "--resume":
            (run,) = (tmp_path / "p" / "1").glob("CartPole*")
            line = f"--resume {run}"
        assert member(tmp_path, 1, line, steps=64 * (1 + len(seeds))) == 0
        (run,) = (tmp_path / "p" / "1").glob("CartPole*")
        seeds.append(saved(run)["options"]["seed"])
    assert member(tmp_path, 2, "--seed 5", steps=64) == 0
    (other,) = (tmp_path / "p" / "2").glob("CartPole*")
    assert seeds == [ver_ppo.derive_seed(5, 1)] * 3
    assert saved(other)["options"]["seed"] == ver_ppo.derive_seed(5, 2)


def test_one_process_for_each_number(tmp_path, capsys):
    """While a member is running, another process with its number is refused; afterwards it may go
    on."""
    here = population.Options(population=str(tmp_path / "p"), member=1)
    with population.only_one(here):
        one_line(
            capsys,
            f"{LINE} --population {tmp_path}/p --member 1".split(),
            "belongs to a run that has not ended",
            population.main,
        )
    assert member(tmp_path, 1, steps=64) == 0


def test_four_processes(tmp_path):
    """Four members, from two working directories, begin at different times, two with useless
    learning rates; one is killed and comes back by the same command line. In the end all know the
    cue, and nobody has begun anew."""
    line = "--env-id tests.envs:Cue-v0 --env-kwargs delay=5 --num-workers 0 --learner-threads 1"
    line += " --num-envs 4 --num-steps 32 --hidden-size 16 --learning-rate {} --gae-lambda 1"
    line += " --update-epochs 4 --num-minibatches 1 --eval-episodes 0 --total-timesteps 24576"
    line += f" --population {tmp_path}/p --population-size 4 --member {{}} --evolve-interval 2048"
    environment = os.environ | {"PYTHONPATH": str(ROOT)}

    def start(number):
        rate = [3e-3, 1e-6, 5e-3, 1e-30][number]
        where = tmp_path / f"machine {number % 2}"
        where.mkdir(exist_ok=True)
        command = [
            sys.executable,
            "-m",
            "notebooks.extensions.population",
            *line.format(rate, number).split(),
        ]
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
        assert content["step"] == 24576, (tmp_path / f"{number}.log").read_text()
        assert np.array(content["recent"])[:, 0].mean() > 0.9, number
    assert any(
        line["decision"] == "takes over"
        for number in (1, 3)
        for line in decisions(tmp_path, number)
    )
    assert all(
        entry[0] <= line["step"]
        for number in range(4)
        for line in decisions(tmp_path, number)
        for entry in line["others"].values()
    )


def test_an_older_run_of_a_member(tmp_path):
    """--resume with an older run is refused: going on from the newest in its place would be another
    thing than what was asked for."""
    folders = [tmp_path / "0" / name for name in ("older", "newer")]
    for when, folder in enumerate(folders):
        folder.mkdir(parents=True)
        (folder / "checkpoint.pt").touch()
        os.utime(folder / "checkpoint.pt", (when, when))
    options = population.Options(population=str(tmp_path), resume=str(folders[0]))
    with pytest.raises(ver_ppo.UserError, match="is not the newest run of this member"):
        population.join(options)
