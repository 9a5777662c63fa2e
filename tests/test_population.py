"""Population-based training: decisions, the files that members write and read, and whole runs."""

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import ver_ppo
from notebooks.extensions import population
from notebooks.extensions.population import BOUNDS, Entry, evolve, mutate
from tests.helpers import ROOT, one_line, same, saved, start, stop, wait_until

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
    """A member's decision. By default, its best score is the one that it has now."""
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
    """A member that is not among the worst goes on. Of the worst, a member that is close mutates,
    and the others take over."""
    names = {"g": "goes on", "m": "mutates", "t": "takes over"}
    everybody = entries(*scores)
    for own, letter in zip(everybody, decisions):
        found, donor, options = decide(own, everybody)
        # with these scores the decision depends on the donor that is drawn
        if (own.score, scores) != (460, (500, 480, 460, 100)):
            assert found == names[letter], own
        assert (found, donor, options) == decide(own, everybody[::-1])  # pure, whatever the order
        if found == "goes on":
            assert options == own.options
        if found != "takes over":
            assert donor is None
            assert 1 / 1.5 <= options["learning_rate"] / own.options["learning_rate"] <= 1.5


def slow_rule(own, best, others, size, donor):
    """The paper's rule again, written as in the paper's code: a member without a score has -1e9."""
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
    """In populations of 3 to 20, some members without a score, decisions equal `slow_rule`."""
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
    """A member takes over if its score is lower by more than half a deviation (without the lowest
    fifth of the scores), and by more than 5 % of the donor's. It does not if it was as good as one
    of the best since its last decision."""
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
    """A member without a score counts among the worst. So nothing changes before more than half of
    the population, and at least three members, have a score."""
    for size in range(3, 21):
        for known in range(1, size + 1):
            everybody = entries(*np.linspace(100, 1, known))
            changed = [decide(own, everybody, size=size)[0] == "takes over" for own in everybody]
            assert sum(changed) == max(0, known - size + -(-3 * size // 10)), (size, known)
            assert known > max(2, size // 2) or not any(changed)


def equal_policies(size, spread, populations, looks=10):
    """The share of decisions to take over, although all policies are equal: all returns are drawn
    from one normal distribution with mean 1 and the deviation `spread`. A score is the mean of the
    last 100 episodes. It is computed `looks` times in the 100 episodes of an interval, and the best
    one counts."""
    rng = np.random.default_rng(0)
    new = 100 // looks
    found = []
    for _ in range(populations):
        returns = rng.normal(1.0, spread, (size, 200))
        ends = range(100 + new, 201, new)
        looked = np.stack([returns[:, end - 100 : end].mean(axis=1) for end in ends])
        best = looked.max(axis=0)
        entries = [Entry(member, 0, looked[-1, member], OPTIONS) for member in range(size)]
        for own in entries:
            others = [entry for entry in entries if entry is not own]
            decision, _, _ = evolve(own, best[own.member], others, size, rng)
            found.append(decision == "takes over")
    return float(np.mean(found))


def test_equal_policies():
    """Members that draw their returns from one distribution seldom take over from each other. The
    noisier the returns, the more often they do, because the rule is not a test of significance."""
    for size in (4, 16):
        shares = [equal_policies(size, spread, 1600 // size) for spread in (0.1, 0.2, 0.5)]
        assert shares[0] < 0.003 and shares[1] < 0.08 and shares[2] < 0.22, size
        # without the best score of the interval, there would be more
        assert equal_policies(size, 0.5, 1600 // size, looks=1) > 1.3 * shares[2]


def test_donors_are_the_best():
    """Of ten members, the worst three take over from the best three, from each of them equally
    often. The options are the donor's as often as their own."""
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
    """Options change with probability 0.15, by a factor of 1.1 to 1.5 (1 - gamma: 1.1 to 1.2),
    epochs by one, up as often as down, within their bounds. 0 stays 0."""
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
    """An option outside its bounds does not jump to the bound. It stays, or moves inwards by the
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
    """A small run of a member of three, in this process, with 64 steps in each rollout. Returns the
    exit status."""
    args = f"{LINE} --population {tmp_path}/p --member {number} --total-timesteps {steps} {line}"
    return population.main([*args.split(), "--preemption", "none"])


def decisions(tmp_path, number):
    """The decisions of a member."""
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


def test_taking_over(tmp_path, monkeypatch, donor):
    """A member that is clearly worse continues with the weights and moments of the better one, at
    its own step, without episodes, and with mutated options. It never reads an entry with more
    steps than its own. The next start continues the same run."""
    for step, score in ((128, 500.0), (256, 9999.0)):
        plant(tmp_path, 0, step, donor, score)
        plant(tmp_path, 2, step, donor, score / 2)
    begun = []
    launch = population.launch

    def spying_launch(options):
        content = saved(Path(options.resume)) if options.resume else None
        begun.append((options, content))
        return launch(options)

    monkeypatch.setattr(population, "launch", spying_launch)
    assert member(tmp_path, 1, "--learning-rate 1e-30", steps=192) == 0
    (decided,) = decisions(tmp_path, 1)
    assert (decided["step"], decided["decision"], decided["from"]) == (128, "takes over", 0)
    assert decided["others"] == {"0": [128, 500.0], "2": [128, 250.0]}
    (_, nothing), (options, content) = begun
    assert nothing is None and content["step"] == 128 and content["recent"] == []
    assert same(content["policy"], donor["policy"])
    assert same(content["optimizer"]["state"], donor["optimizer"]["state"])
    for name in BOUNDS:
        assert decided["to"][name] == getattr(options, name) == content["options"][name]
    assert options.learning_rate > 0.5e-2 or options.learning_rate < 2e-30
    assert member(tmp_path, 1, steps=224) == 0
    (run,) = (tmp_path / "p" / "1").glob("CartPole*")
    assert saved(run)["step"] == 256
    assert saved(run)["options"]["learning_rate"] == options.learning_rate


def test_a_pause_after_each_change(tmp_path, donor):
    """A member may change after --evolve-after steps. After each change, and after a restart, it
    learns undisturbed for as many steps."""
    for step in range(128, 769, 128):
        plant(tmp_path, 0, step, donor, 500.0)
        plant(tmp_path, 2, step, donor, 250.0)
    line = "--learning-rate 1e-30 --evolve-after 256"
    assert member(tmp_path, 1, line, steps=576) == 0
    assert [found["step"] for found in decisions(tmp_path, 1)] == [256, 512]
    assert member(tmp_path, 1, line, steps=832) == 0  # starts again at 576
    assert [found["step"] for found in decisions(tmp_path, 1)] == [256, 512]


def test_a_score_needs_episodes(tmp_path, monkeypatch, donor):
    """A member that has not finished 20 episodes since its last change has no score: it writes no
    entry and makes no decision."""
    monkeypatch.setattr(population, "EPISODES", EPISODES)
    assert population.mean_score([[1.0]] * 20, 0) == 1.0
    assert population.mean_score([[1.0]] * 19 + [[float("nan")]], 0) is None
    plant(tmp_path, 0, 128, donor, 500.0)
    plant(tmp_path, 2, 128, donor, 250.0)
    # with random actions, an episode has 22 steps
    assert member(tmp_path, 1, "--learning-rate 1e-30", steps=256) == 0
    assert not list((tmp_path / "p" / "1").glob("*.pt"))
    assert member(tmp_path, 1, "--learning-rate 1e-30", steps=704) == 0
    assert list((tmp_path / "p" / "1").glob("*.pt"))
    assert decisions(tmp_path, 1)[0]["step"] > 256


def test_the_best_score_counts(tmp_path, monkeypatch, donor):
    """The best score of an interval counts in the decision at its end, and not in the next one."""
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


def rewritten(scores):
    """MemberRun.combine, but the last episodes have the next of these scores."""
    combine = population.MemberRun.combine

    def combined(self, rollout, logs):
        steps, logs, _ = combine(self, rollout, logs)
        self.recent.clear()
        return steps, logs, [[next(scores)] * 2] * 3

    return combined


def test_entries_are_deleted(tmp_path, donor):
    """A member keeps its newest two entries, and those that a slower member has not reached, but at
    most 25."""
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
    # member 0 can read the first of them, and will reach the others
    assert publish(9, 15) == [9, 10, 11, 12, 13, 14]
    plant(tmp_path, 0, 1250, donor, 1.0)
    assert publish(15, 16) == [12, 13, 14, 15]
    assert publish(16, 60) == list(range(35, 60))  # it has died


def test_signals_come_first(tmp_path, monkeypatch):
    """A signal during a decision ends the training. The decision stays in the checkpoint."""

    def signalled(run):
        os.kill(os.getpid(), signal.SIGTERM)
        content = saved(run.folder)
        content |= {"recent": [], "options": content["options"] | {"gamma": 0.9}}
        ver_ppo.write_checkpoint(content, run.folder / "checkpoint.pt")
        return {"gamma": 0.9}

    monkeypatch.setattr(population, "publish_and_decide", signalled)
    assert member(tmp_path, 1) == 128 + signal.SIGTERM
    (run,) = (tmp_path / "p" / "1").glob("CartPole*")
    assert saved(run)["step"] == 128 and saved(run)["options"]["gamma"] == 0.9


def test_many_ranks(tmp_path, donor):
    """A member may be many ranks: the first one decides, and all continue from the checkpoint that
    it has changed."""
    plant(tmp_path, 0, 1024, donor, 500.0)
    plant(tmp_path, 2, 1024, donor, 499.0)
    command = "-m torch.distributed.run --standalone --nproc-per-node 2".split()
    command += "-m notebooks.extensions.population --device cpu".split()
    line = LINE.replace("--evolve-interval 128", "--evolve-interval 1024")
    line += f" --population {tmp_path}/p --member 1 --total-timesteps 3072 --preemption none"
    process = start([*command, *line.split()])
    try:
        text = process.communicate(timeout=300)[0]
        assert process.returncode == 0, text
        assert text.count("takes over member 0") == 2, text
        assert "Traceback" not in text, text
    finally:
        stop([process.pid])
    (run,) = (tmp_path / "p" / "1").glob("CartPole*")
    (first, last) = decisions(tmp_path, 1)
    assert saved(run)["step"] >= 3072
    assert saved(run)["options"]["learning_rate"] == last["to"]["learning_rate"]
    assert first["step"] >= 1024 and (first["decision"], first["from"]) == ("takes over", 0)


def spoiled(donor):
    """Entries from which no run can continue, by name: the differences from a good one."""
    options = lambda **changes: {"options": donor["options"] | changes}
    optimizer = lambda **changes: {"optimizer": donor["optimizer"] | changes}
    half = {name: tensor[..., :1] for name, tensor in donor["policy"].items() if tensor.dim()}
    return {
        "another version": {"format": 99},
        "another environment": options(env_id="Other-v0"),
        "other metrics": {"spec": donor["spec"] | {"metrics": ["spl"]}},
        "fewer columns than it says": {"recent": [[]] * 20},
        "episodes that are words": {"recent": [["500", "500"]] * 20},
        "a rate that is a word": options(learning_rate="1e-3"),
        "a rate below 0": options(learning_rate=-1.0),
        "half an epoch": options(update_epochs=1.5),
        "no options": {"options": {}},
        "no moments": {"optimizer": {}},
        "moments that are no moments": optimizer(state="x"),
        "another network": {"policy": donor["policy"] | half},
        "weights that are numbers": {"policy": dict.fromkeys(donor["policy"], 1.0)},
        "other steps than its name says": {"step": 12},
    }


NAMES = list(spoiled({"options": {}, "optimizer": {}, "policy": {}, "spec": {}}))


@pytest.mark.parametrize("name", [*NAMES, "damaged", "no finite score"])
def test_unusable_entries(tmp_path, donor, name):
    """A damaged or foreign entry is skipped with one line. An entry without a finite score has no
    score. Files with other names are not read."""
    changes = spoiled(donor).get(name, {"recent": [[float("nan"), 1.0]] * 20})
    plant(tmp_path, 0, 128, donor, 9999.0, changes)
    plant(tmp_path, 2, 128, donor, 500.0)
    folder = tmp_path / "p" / "0"
    if name == "damaged":
        path = folder / f"{128:012}.pt"
        path.write_bytes(path.read_bytes()[:1000])
    for other in ("notes.pt", "²²²²²²²²²²²².pt", f"{64:012}.tmp"):
        (folder / other).write_text("not an entry")
    options = replace(read_options(donor), population=f"{tmp_path}/p", member=1)
    said = []
    run = SimpleNamespace(options=options, step=128, column=0, say=said.append)
    found = population.read_others(run, donor)
    assert [(entry.member, entry.score) for entry in found] == [(2, 500.0)]
    assert len(said) == (name != "no finite score") and all("skipped: " in line for line in said)


def read_options(content):
    """The options of a member's checkpoint."""
    return population.Options(**content["options"])


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
    """Mistakes in options are refused in one line, before a run folder is made."""
    one_line(
        capsys,
        f"--env-id CartPole-v1 --num-workers 0 --population {tmp_path}/p {line}".split(),
        word,
        population.main,
    )
    assert not list(tmp_path.glob("p/*/CartPole*"))


def test_joining(tmp_path, donor):
    """Each member has a seed of its own. A member that has run before continues its newest run,
    with that run's seed and evolved options. Another run, or another environment, is refused."""
    here = population.Options(population=str(tmp_path), member=1, env_id="CartPole-v1", seed=5)
    joined = population.join(here)
    assert (joined.resume, joined.seed) == (None, ver_ppo.derive_seed(5, 1))
    assert joined.seed != population.join(replace(here, member=2)).seed
    folders = [tmp_path / "1" / name for name in ("older", "newer")]
    for when, folder in enumerate(folders):
        folder.mkdir(parents=True)
        options = donor["options"] | {"seed": 7, "gamma": 0.9 + when / 100}
        torch.save(donor | {"options": options}, folder / "checkpoint.pt")
        os.utime(folder / "checkpoint.pt", (when, when))
    for resume in (None, str(folders[1])):
        joined = population.join(replace(here, resume=resume))
        assert (joined.resume, joined.seed, joined.gamma) == (str(folders[1]), 7, 0.91)
    for resume in (folders[0], tmp_path):
        with pytest.raises(ver_ppo.UserError, match="is not the newest run of this member"):
            population.join(replace(here, resume=str(resume)))
    with pytest.raises(ver_ppo.UserError, match="has learned CartPole-v1"):
        population.join(replace(here, env_id="Acrobot-v1"))


def test_one_process_for_each_number(tmp_path, capsys):
    """While a member is running, another process with its number is refused. Afterwards it may
    continue."""
    here = population.Options(population=str(tmp_path / "p"), member=1)
    with population.only_one(here):
        one_line(
            capsys,
            f"{LINE} --population {tmp_path}/p --member 1".split(),
            "is in use by a run that has not ended",
            population.main,
        )
    assert member(tmp_path, 1, steps=64) == 0


def test_three_processes(tmp_path):
    """Three members, in two working directories. Member 0 is killed, and continues when the same
    command starts it again. Member 2 starts later, and its learning rate is useless. In the end all
    know the cue."""
    line = "--env-id tests.envs:Cue-v0 --env-kwargs delay=1 --num-workers 0 --learner-threads 1"
    line += " --num-envs 4 --num-steps 32 --hidden-size 16 --learning-rate {} --gae-lambda 1"
    line += " --update-epochs 4 --num-minibatches 1 --eval-episodes 0 --total-timesteps 6144"
    line += f" --population {tmp_path}/p --population-size 3 --member {{}} --evolve-interval 1024"
    line += " --preemption none"

    def begin(number):
        rate = [1e-2, 5e-3, 1e-30][number]
        where = tmp_path / f"machine {number % 2}"
        where.mkdir(exist_ok=True)
        program = [sys.executable, "-m", "notebooks.extensions.population"]
        log = open(tmp_path / f"{number}.log", "a")
        how = {"cwd": where, "stdout": log, "stderr": log}
        how["env"] = os.environ | {"PYTHONPATH": str(ROOT)}
        return subprocess.Popen([*program, *line.format(rate, number).split()], **how)

    def published(number):
        return list((tmp_path / "p" / str(number)).glob("*.pt"))

    processes = [begin(0), begin(1)]
    try:
        wait_until(lambda: published(0), 120)
        processes[0].send_signal(signal.SIGKILL)
        processes[0].wait(10)
        assert len(published(0)) < 6
        processes[0] = begin(0)
        wait_until(lambda: published(1), 120)
        processes.append(begin(2))
        for process in processes:
            assert process.wait(300) == 0
    finally:
        for process in processes:
            process.kill()
    for number in range(3):
        (run,) = (tmp_path / "p" / str(number)).glob("tests*")
        content = saved(run)
        assert content["step"] == 6144, (tmp_path / f"{number}.log").read_text()
        assert np.array(content["recent"])[:, 0].mean() > 0.9, number
        for found in decisions(tmp_path, number):
            assert all(step <= found["step"] for step, _ in found["others"].values())
    assert "takes over" in {found["decision"] for found in decisions(tmp_path, 2)}
