"""Decentralized population-based training (Petrenko et al. 2023): runs that learn from each other
what to learn with.

    for k in 0 1 2 3; do python -m notebooks.extensions.population --population runs/flats \\
        --population-size 4 --member $k & done; wait

P runs, on any machines, share nothing but a folder. None is in charge: each may begin later, die,
and come back by the same command line. A run is one process, or many ranks: torchrun ... -m
notebooks.extensions.population ... After every --evolve-interval steps a member

    saves a checkpoint    ->  and puts a copy of it, its entry, into the folder: weights, options,
                              last 100 episodes
    reads of every other  <-  the newest entry with no more steps than its own
    decides by `evolve`       goes on, or mutates its options, or takes over weights and options of
                              a better one
    goes on from its checkpoint, which then holds what it has decided

    FOLDER/0/000000100352.pt ...          entries of member 0
    FOLDER/0/decisions.jsonl              what it has decided, a line each
    FOLDER/0/pointnav__ver__.../          its run folder
"""

import contextlib
import fcntl
import json
import math
import os
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

import ver_multigpu
import ver_ppo

SHARE = 0.3  # of the population are "the worst", and as many "the best"
CLOSE = 0.05  # share of the best score: a member no further below it does not take over
PROBABILITY = 0.5  # that a mutation changes an option
BOUNDS = {  # of the options that evolve
    "learning_rate": (1e-6, 0.1),
    "ent_coef": (1e-6, 0.1),
    "clip_coef": (0.05, 0.5),
    "gamma": (0.8, 0.9999),
    "update_epochs": (1, 20),
}


@dataclass(frozen=True)
class Options(ver_multigpu.Options):
    """Train one member of a population of runs: from time to time, the worst take over from the
    best, and vary their options."""

    population: str = "runs/population"  # its folder, which all members see
    population_size: int = 4  # P, runs in it
    member: int = 0  # number of this run, 0 .. P - 1; started again by it, it goes on
    evolve_interval: int = 100_000  # steps between its checkpoints and comparisons with the others
    evolve_after: int = 0  # steps before the first comparison
    # what is compared, the larger the better: `return`, or a metric, of the last 100 episodes
    evolve_by: str = "return"

    def __post_init__(self):
        super().__post_init__()
        numbers = f"0..{self.population_size - 1}: --population-size"
        rules = [
            (self.population_size > 0, "population_size", "must be a positive number"),
            (0 < self.evolve_interval < math.inf, "evolve_interval", "must be a positive number"),
            (self.evolve_after >= 0, "evolve_after", "must be 0 or more"),
            (0 <= self.member < self.population_size, "member", f"must be within {numbers}"),
            (not self.checkpoint, "checkpoint", "is evaluated by ver_ppo.py"),
        ]
        ver_ppo.check_rules(self, rules)


@dataclass(frozen=True)
class Entry:
    """A member's score after `step` steps, the mean of --evolve-by over its last episodes, and its
    options."""

    member: int
    step: int
    score: float
    options: dict  # those in BOUNDS


def mutate(options, rng):
    """Each of the options with probability 1/2: times or divided by 1.1 to 1.5 (gamma: its distance
    from 1; epochs: one more or less), within BOUNDS. What is 0 stays 0. Returns new options."""
    changed = dict(options)
    for name, (low, high) in BOUNDS.items():
        wanted = rng.random() < PROBABILITY
        factor = rng.uniform(1.1, 1.5)
        up = rng.random() < 0.5
        if not up:
            factor = 1 / factor
        value = options[name]
        if name == "gamma":
            value = 1 - (1 - value) * factor
        elif name == "update_epochs":
            value += 1 if up else -1
        else:
            value *= factor
        if wanted and options[name]:
            changed[name] = min(max(value, low), high)
    return changed


def evolve(own, others, rng):
    """A member's decision, from its entry and those of others, of equal or less experience
    (Petrenko et al. 2023):

    - ("goes on", None, options): it is not among the worst 30 %, or none is better;
    - ("mutates", None, options): it is, but no further below the best one than the standard
      deviation of the population's scores, or 5 % of the best: its options change a little;
    - ("takes over", member, options): it is clearly worse. Weights and options come from one drawn
      from the best 30 %, and these options change a little.

    A pure function: the same entries and the same state of the random generator, the same decision.
    """
    ranked = sorted([*others, own], key=lambda entry: (-entry.score, entry.member))
    few = max(1, round(SHARE * len(ranked)))
    best_score = ranked[0].score
    gap = best_score - own.score
    if gap == 0 or own not in ranked[-few:]:
        return "goes on", None, own.options
    deviation = np.std([entry.score for entry in ranked])
    if gap <= max(deviation, CLOSE * abs(best_score)):
        return "mutates", None, mutate(own.options, rng)
    better = [entry for entry in ranked[:few] if entry.score > own.score]
    donor = better[rng.integers(len(better))]
    return "takes over", donor.member, mutate(donor.options, rng)


def read_entry(content, member, column):
    """The entry that a checkpoint's content is; None if there is no score yet."""
    scores = np.array([episode[column] for episode in content["recent"]])
    known = scores[np.isfinite(scores)]
    if not len(known):
        return None
    options = {name: content["options"][name] for name in BOUNDS}
    return Entry(member, content["step"], float(known.mean()), options)


def read_others(run):
    """Of every other member the content of the newest entry with no more steps than the run. What
    cannot be read, or is of another environment or network, is skipped with a line."""
    options = run.options
    found = {}
    for member in set(range(options.population_size)) - {options.member}:
        files = Path(options.population).glob(f"{member}/*.pt")
        steps = {int(path.stem): path for path in files if path.stem.isdigit()}
        past = [step for step in steps if step <= run.step]
        if past:
            try:
                found[member] = read_other(run, steps[max(past)])
            except ver_ppo.UserError as error:
                run.bar.write(f"skipped: {error}")
    return found


def read_other(run, path):
    """The content of another member's entry. Raises UserError if it is of no use."""
    content = ver_ppo.load_checkpoint(path)
    own = {name: weight.shape for name, weight in run.policy.state_dict().items()}
    if {name: weight.shape for name, weight in content["policy"].items()} != own:
        raise ver_ppo.UserError(f"{path} is of another network")
    options = content["options"]
    same = options.get("env_id") == run.options.env_id and options.keys() >= BOUNDS.keys()
    if not same or content["columns"] != list(run.spec.episode_columns):
        raise ver_ppo.UserError(f"{path} is of another environment or version")
    return content


class Evolved(Exception):
    """The run's checkpoint was changed: it has to go on from there."""


class MemberRun(ver_multigpu.RankRun):
    """A member's run: compares itself with the others after each checkpoint."""

    def __init__(self, ranks, options, spec, *args):
        if options.evolve_by not in spec.episode_columns:
            measured = ", ".join(spec.episode_columns)
            ver_ppo.refuse(options, "evolve_by", f"is not measured here: {measured} are")
        super().__init__(ranks, options, spec, *args)

    def log(self, rollout, logs):
        """As RankRun.log. Raises Evolved in all ranks if rank 0 has decided to change the
        checkpoint; after a signal, training ends as it always does."""
        super().log(rollout, logs)
        if self.saved_step < self.step:
            return
        evolved = self.ranks.rank == 0 and publish_and_decide(self)
        evolved_R, signal_R = zip(*self.ranks.gather((evolved, self.signal)))
        if evolved_R[0] and not any(signal_R):
            raise Evolved


def publish_and_decide(run):
    """Publish the newest checkpoint as an entry, read the others', decide, and write what was
    decided into the checkpoint. Returns whether it was changed. If a file cannot be written, says
    so, and the run goes on as it is."""
    if run.unsaved:
        return False
    options = run.options
    checkpoint = run.folder / "checkpoint.pt"
    folder = Path(options.population) / str(options.member)
    column = run.spec.episode_columns.index(options.evolve_by)
    try:
        content = ver_ppo.load_checkpoint(checkpoint)
        ver_ppo.write_checkpoint(content, folder / f"{run.step:012}.pt")
        own = read_entry(content, options.member, column)
        if not own or not options.evolve_after <= run.step < options.total_timesteps:
            return False
        contents = read_others(run)
        entries = [read_entry(other, member, column) for member, other in contents.items()]
        others = [entry for entry in entries if entry]
        rng = np.random.default_rng([options.seed, run.step])
        decision, donor, evolved = evolve(own, others, rng)
        if donor is not None:  # but its step, and its episodes, are not ours
            content["policy"] = contents[donor]["policy"]
            content["optimizer"] = contents[donor]["optimizer"]
            content["recent"] = []
        if decision != "goes on":
            content["options"] |= evolved
            ver_ppo.write_checkpoint(content, checkpoint)
        note(run, folder, own, others, decision, donor, evolved)
        return decision != "goes on"
    except (OSError, RuntimeError, ver_ppo.UserError) as error:  # a full disk
        reason = str(error).splitlines()[0]
        run.bar.write(f"not compared with the population at step {run.step}: {reason}")
        return False


def note(run, folder, own, others, decision, donor, evolved):
    """Print a decision, and keep it in the folder."""
    best = max([own, *others], key=lambda entry: entry.score)
    known = f"the best of {1 + len(others)} has {best.score:.4g} (member {best.member})"
    whom = "" if donor is None else f" member {donor}"
    news = []
    for name, new in evolved.items():
        if new != own.options[name]:
            news.append(f"{name} {own.options[name]:.3g} -> {new:.3g}")
    said = f"{run.options.evolve_by} {own.score:.4g}, {known}: {decision}{whom} {', '.join(news)}"
    run.bar.write(f"member {own.member}, step {own.step}: {said}".rstrip())
    line = asdict(own)
    line["others"] = {entry.member: [entry.step, entry.score] for entry in others}
    line |= {"decision": decision, "from": donor, "to": evolved}
    with open(folder / "decisions.jsonl", "a") as file:
        file.write(json.dumps(line) + "\n")


def join(options):
    """The options of a member: its own folder and seed; if it has been there before, going on from
    its checkpoint, by the options that it had evolved. Raises UserError for a run of another
    environment, or from elsewhere."""
    folder = Path(options.population) / str(options.member)
    if options.resume and Path(options.resume).resolve().parent != folder.resolve():
        advice = "is no run of this member: give --init-from to begin with its weights"
        ver_ppo.refuse(options, "resume", advice)
    options = replace(
        options,
        runs_dir=str(folder),
        seed=ver_ppo.derive_seed(options.seed, options.member),
        checkpoint_interval=options.evolve_interval,
    )
    found = sorted(folder.glob("*/checkpoint.pt"), key=os.path.getmtime)
    if not found:
        return options
    saved = ver_ppo.load_checkpoint(found[-1])["options"]
    if saved["env_id"] != options.env_id:
        learned = f"has learned {saved['env_id']} in {options.population}"
        ver_ppo.refuse(options, "member", f"{learned}: give another folder")
    evolved = {name: saved[name] for name in BOUNDS}
    resume = str(found[-1].parent)
    return replace(options, resume=resume, init_from=None, reset="nothing", **evolved)


@contextlib.contextmanager
def only_one(options):
    """Around a member's life: no other process has its number (of many ranks, the first sees to
    that). Raises UserError."""
    folder = Path(options.population) / str(options.member)
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w") as file:
        try:
            if os.environ.get("RANK", "0") == "0":
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            running = f"is running already in {options.population}: give another one"
            ver_ppo.refuse(options, "member", running)
        except OSError:  # a file system without locks
            pass
        yield


def train(options):
    """Train until the end, or until the member's checkpoint is changed: raises Evolved."""
    return ver_multigpu.train(options, MemberRun)


def train_member(options):
    """Train as a member of a population, to the end."""
    with only_one(options):
        while True:
            try:
                return train(join(options))
            except Evolved:
                pass


def main(argv=None):
    """Command line, as ver_multigpu.main."""
    return ver_multigpu.main(argv, Options, train_member)


if __name__ == "__main__":
    from notebooks.extensions.population import main  # as a module: processes know its classes

    sys.exit(main())
