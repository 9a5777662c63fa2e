"""Decentralized population-based training (Petrenko et al. 2023): several runs copy weights and
options from each other.

    for k in 0 1 2 3; do python -m notebooks.extensions.population --population runs/flats \\
        --population-size 4 --member $k & done; wait

P runs, the members, run on any machines and share only a folder. No member is in charge. Each may
start later, die, and be started again with the same command. A member is one process, or many
ranks: torchrun ... -m notebooks.extensions.population ... After every --evolve-interval steps, a
member

    saves a checkpoint        and, once it has a score, puts a copy into the folder as its entry:
                              weights, options, last 100 episodes
    reads the others          of each other member, the newest entry with no more steps than its own
    decides by `evolve`       to continue, to mutate its options, or to take over the weights and
                              options of a better member
    continues                 from its checkpoint, which now contains the decision

    FOLDER/0/000000100352.pt ...          the last entries of member 0
    FOLDER/0/decisions.jsonl              its decisions, one line each
    FOLDER/0/pointnav__ver__.../          its run folder

The rule is the paper's. The numbers below are from the paper's published code.
"""

import contextlib
import json
import math
import os
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path

os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # as in ver_ppo.py, before torch is imported

import numpy as np
import torch

import ver_multigpu
import ver_ppo

SHARE = 0.3  # "the worst" and "the best" are this share of the population, rounded up
OUTLIERS = 0.2  # share of the lowest scores that the deviation leaves out, such as crashed members'
# a member takes over another's weights only if its score is lower by more than both of these
DEVIATIONS = 0.5  # standard deviations of the scores
CLOSE = 0.05  # share of the other member's score
EPISODES = 20  # that a member must finish after its last change to have a score
PROBABILITY = 0.15  # that a mutation changes an option
KEPT = 25  # most entries that a member keeps for slower members
ENTRY = "[0-9]" * 12 + ".pt"  # file name of an entry: its number of steps
BOUNDS = {  # of the options that evolve
    "learning_rate": (1e-6, 0.1),
    "ent_coef": (1e-6, 0.1),
    "clip_coef": (0.05, 0.5),
    "gamma": (0.8, 0.9999),
    "update_epochs": (1, 20),
}


@dataclass(frozen=True)
class Options(ver_multigpu.Options):
    """Train one member of a population. At intervals, the worst members copy from the best and vary
    their options."""

    population: str = "runs/population"  # folder that all members see
    population_size: int = 4  # P, number of members
    member: int = 0  # number of this run, 0 .. P - 1; the same number continues it
    evolve_interval: int = 100_000  # steps between checkpoints, each with a comparison
    # steps that a member learns undisturbed at the start, after each change and after a restart
    evolve_after: int = 0
    # score, larger is better: mean `return` of the last 100 episodes, or of a metric
    evolve_by: str = "return"


@dataclass(frozen=True)
class Entry:
    """A member's score after `step` steps, the mean of --evolve-by over its last episodes, and its
    options."""

    member: int
    step: int
    score: float
    options: dict  # those in BOUNDS


def mutate(options, rng):
    """Change each option with probability 0.15, within BOUNDS. Returns new options.

    An option is multiplied or divided by 1.1 to 1.5. For gamma, 1 - gamma is, by 1.1 to 1.2. The
    number of epochs changes by 1. An option outside its bounds moves inwards or stays. An option
    that is 0 stays 0."""
    changed = dict(options)
    for name, (low, high) in BOUNDS.items():
        value = options[name]
        if not value or rng.random() >= PROBABILITY:
            continue
        factor = rng.uniform(1.1, 1.2 if name == "gamma" else 1.5)
        up = rng.random() < 0.5
        if not up:
            factor = 1 / factor
        if name == "gamma":
            wanted = 1 - (1 - value) * factor
        elif name == "update_epochs":
            wanted = value + 1 if up else value - 1
        else:
            wanted = value * factor
        changed[name] = min(max(wanted, min(low, value)), max(high, value))
    return changed


def evolve(own, best, others, size, rng):
    """Decide what a member does (Petrenko et al. 2023). `own` is its entry, `best` its best score
    since the last decision, `others` the entries of members with no more steps, `size` the number
    of members. Returns one of:

    - ("goes on", None, options): the member is not among the worst 30 %, or `best` is as high as a
      score that is now among the best 30 %. Members without a score count among the worst, so no
      member changes before most members have a score.
    - ("mutates", None, options): it is close to a member drawn from the best 30 %. Close means
      within half a standard deviation of the scores (without the lowest fifth), or within 5 %. Its
      options are mutated.
    - ("takes over", member, options): it is significantly worse than that member, and gets its
      weights. The options are a mutation of the other's or, as often, of its own.

    A pure function: the same entries and generator state give the same decision.
    """
    ranked = sorted([*others, own], key=lambda entry: (-entry.score, entry.member))
    few = math.ceil(SHARE * size)
    top = ranked[:few]
    if ranked.index(own) < size - few or best >= top[-1].score:
        return "goes on", None, own.options
    donor = top[rng.integers(few)]
    lowest = math.floor(OUTLIERS * len(ranked))
    scores = [entry.score for entry in ranked[: len(ranked) - lowest]]
    gap = donor.score - own.score
    if gap <= max(DEVIATIONS * np.std(scores), CLOSE * abs(donor.score)):
        return "mutates", None, mutate(own.options, rng)
    source = donor if rng.random() < 0.5 else own
    return "takes over", donor.member, mutate(source.options, rng)


def evolving(options):
    """The part of a checkpoint's options that evolves."""
    return {name: options[name] for name in BOUNDS}


def mean_score(recent, column):
    """The mean of a column of the last episodes, or None if too few episodes have ended."""
    scores = np.array([episode[column] for episode in recent])
    known = scores[np.isfinite(scores)]
    return float(known.mean()) if len(known) >= EPISODES else None


def read_entry(content, member, column):
    """The entry of a checkpoint's content, or None if it has no score yet."""
    score = mean_score(content["recent"], column)
    if score is None:
        return None
    return Entry(member, content["step"], score, evolving(content["options"]))


def folder_of(options, member):
    """A member's own folder, within the population's folder."""
    return Path(options.population) / str(member)


def other_members(options):
    """Numbers of all other members."""
    return [member for member in range(options.population_size) if member != options.member]


def entries_of(options, member):
    """The files of a member's entries, the newest last."""
    return sorted(folder_of(options, member).glob(ENTRY))


def outline(value):
    """Names, types and shapes of a part of a checkpoint. They must equal those of the part that it
    will replace."""
    if isinstance(value, torch.Tensor):
        return value.shape, value.dtype
    if isinstance(value, dict):
        return {name: outline(part) for name, part in value.items()}
    return type(value)


def read_other(run, own_content, path):
    """Read another member's entry. Raises UserError if the run could not continue from it; a
    damaged file may raise anything."""
    content = ver_ppo.load_checkpoint(path)
    options = evolving(content["options"])
    ver_ppo.check_options(replace(run.options, **options))
    fits = [
        content["step"] == int(path.stem),
        content["spec"]["metrics"] == own_content["spec"]["metrics"],
        content["options"]["env_id"] == run.options.env_id,
        outline(options) == outline(evolving(own_content["options"])),
        outline(content["policy"]) == outline(own_content["policy"]),
        outline(content["optimizer"]["state"]) == outline(own_content["optimizer"]["state"]),
    ]
    if not all(fits):
        raise ver_ppo.UserError("is of another environment, network or version")
    return content


def read_others(run, own_content):
    """Read of each other member the newest entry with no more steps than the run. An entry that
    cannot be used is skipped with a line. Only one checkpoint at a time is in memory."""
    options = run.options
    found = []
    for member in other_members(options):
        past = [path for path in entries_of(options, member) if int(path.stem) <= run.step]
        if not past:
            continue
        path = past[-1]
        try:
            entry = read_entry(read_other(run, own_content, path), member, run.column)
        except Exception as error:  # a damaged or hostile entry may raise anything
            run.say(f"skipped: {path} ({ver_ppo.first_line(error)})")
            continue
        if entry:
            found.append(entry)
    return found


class Evolved(Exception):
    """The run's checkpoint was changed. The run must continue from it, with the options in the
    argument."""


class MemberRun(ver_multigpu.RankRun):
    """A member's run. It compares itself with the others after each checkpoint."""

    def __init__(self, options):
        self.best = -math.inf  # score since the last decision
        super().__init__(options)

    def restore(self):
        options = self.options
        columns = self.spec.episode_columns
        if options.evolve_by not in columns:
            measured = ", ".join(columns)
            ver_ppo.refuse(options, "evolve_by", f"is not measured here: {measured} are")
        self.column = columns.index(options.evolve_by)
        super().restore()

    def log(self, rollout, logs):
        """As RankRun.log. Raises Evolved in all ranks if rank 0 has changed the checkpoint, which
        `stop` then does not replace. After a signal, training ends instead, and the next start
        continues from the changed checkpoint."""
        super().log(rollout, logs)
        score = mean_score(self.recent, self.column)
        if score is not None:
            self.best = max(self.best, score)
        if not self.is_due_every(self.options.checkpoint_interval):
            return
        own = publish_and_decide(self) if self.ranks.rank == 0 else None
        (evolved, *_), signal_R = zip(*self.ranks.gather((own, self.signal)))
        self.savable = not evolved
        if any(signal_R):
            raise ver_ppo.Interrupted(max(filter(None, signal_R)))
        if evolved:
            raise Evolved(evolved)


def publish(content, options):
    """Write a checkpoint's content into the member's folder as its newest entry, and delete old
    entries. Raises OSError.

    The newest two entries stay. So do entries that the slowest member has not reached yet, because
    it reads only entries with no more steps than its own. But at most KEPT entries stay: otherwise
    a dead member would fill the disk."""
    folder = folder_of(options, options.member)
    ver_ppo.write_checkpoint(content, folder / f"{content['step']:012}.pt")
    own = entries_of(options, options.member)
    entries_of_others = [entries_of(options, member) for member in other_members(options)]
    slowest = min((paths[-1].name for paths in entries_of_others if paths), default=own[-1].name)
    newer = sum(path.name > slowest for path in own)  # the slowest can also read one more
    for path in own[: -min(max(newer + 1, 2), KEPT)]:
        path.unlink(missing_ok=True)


def publish_and_decide(run):
    """Publish the newest checkpoint as an entry, read the others' entries, decide, and write the
    decision into the checkpoint. Returns the new options if the checkpoint was changed, and
    otherwise None."""
    options = run.options
    checkpoint = run.folder / "checkpoint.pt"
    content = ver_ppo.load_checkpoint(checkpoint)
    own = read_entry(content, options.member, run.column)
    if not own:
        return None
    publish(content, options)
    best = run.best
    run.best = -math.inf
    waits = run.step - run.initial_step < options.evolve_after
    if waits or run.step >= options.total_timesteps:
        return None
    others = read_others(run, content)
    rng = np.random.default_rng([options.seed, run.step])
    decision, donor, evolved = evolve(own, best, others, options.population_size, rng)
    if donor is not None:
        take_over(run, content, next(other for other in others if other.member == donor))
    if decision != "goes on":
        content["options"] |= evolved
        content["recent"] = []  # these scores belong to other weights or options
        ver_ppo.write_checkpoint(content, checkpoint)
    note(run, own, others, decision, donor, evolved)
    return evolved if decision != "goes on" else None


def take_over(run, content, donor):
    """Copy the weights and moments of another member's entry into the run's checkpoint, and keep
    its step. Raises UserError if the entry no longer exists."""
    path = folder_of(run.options, donor.member) / f"{donor.step:012}.pt"
    theirs = read_other(run, content, path)
    content["policy"] = theirs["policy"]
    content["optimizer"]["state"] = theirs["optimizer"]["state"]


def note(run, own, others, decision, donor, evolved):
    """Print a decision, and append it to the member's decisions.jsonl."""
    best = max([own, *others], key=lambda entry: entry.score)
    known = f"the best of {1 + len(others)} has {best.score:.4g} (member {best.member})"
    whom = "" if donor is None else f" member {donor}"
    news = []
    for name, new in evolved.items():
        if new != own.options[name]:
            news.append(f"{name} {own.options[name]:.3g} -> {new:.3g}")
    said = f"{run.options.evolve_by} {own.score:.4g}, {known}: {decision}{whom} {', '.join(news)}"
    run.say(f"member {own.member}, step {own.step}: {said}".rstrip())
    line = asdict(own)
    line["others"] = {entry.member: [entry.step, entry.score] for entry in others}
    line |= {"decision": decision, "from": donor, "to": evolved}
    with open(folder_of(run.options, own.member) / "decisions.jsonl", "a") as file:
        file.write(json.dumps(line) + "\n")


def join(options):
    """Complete a member's options: its folder and its seed. A member that has run before resumes
    from its newest checkpoint, with that run's seed and evolved options. Raises UserError if that
    checkpoint belongs to another environment, or if --resume names another run."""
    folder = folder_of(options, options.member)
    found = sorted(folder.glob("*/checkpoint.pt"), key=os.path.getmtime)
    newest = found[-1].parent if found else None
    if options.resume and (not newest or Path(options.resume).resolve() != newest.resolve()):
        advice = "leave it out; --extensions transfer(file=...) takes the weights of another run"
        ver_ppo.refuse(options, "resume", f"is not the newest run of this member: {advice}")
    options = replace(
        options,
        runs_dir=str(folder),
        seed=ver_ppo.derive_seed(options.seed, options.member),
        # steps of one rank
        checkpoint_interval=max(1, options.evolve_interval // int(os.environ.get("WORLD_SIZE", 1))),
    )
    if not newest:
        return options
    saved = ver_ppo.load_checkpoint(found[-1])["options"]
    if saved["env_id"] != options.env_id:
        learned = f"has learned {saved['env_id']} in {options.population}"
        ver_ppo.refuse(options, "member", f"{learned}: give another folder")
    kept = evolving(saved) | {"seed": saved["seed"]}
    return replace(options, resume=str(newest), **kept)


@contextlib.contextmanager
def only_one(options):
    """Around a member's whole training: refuse a second process with the same number. With many
    ranks, rank 0 holds the lock. Raises UserError, also if the folder cannot be used."""
    folder = folder_of(options, options.member)
    lock = None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if os.environ.get("RANK", "0") == "0":
            lock = ver_ppo.lock_folder(folder)
    except OSError as error:
        ver_ppo.refuse(options, "population", f"cannot be written ({error.strerror})")
    try:
        yield
    finally:
        if lock is not None:
            lock.close()


def check_member(options):
    """Raise UserError for an option that cannot work."""
    if options.population_size < 3:
        ver_ppo.refuse(options, "population_size", "must be 3 or more")
    if not 0 < options.evolve_interval < math.inf:
        ver_ppo.refuse(options, "evolve_interval", "must be a positive number")
    if options.evolve_after < 0:
        ver_ppo.refuse(options, "evolve_after", "must be 0 or more")
    if not 0 <= options.member < options.population_size:
        numbers = f"0..{options.population_size - 1}"
        ver_ppo.refuse(options, "member", f"must be within {numbers}: --population-size")


def launch(options):
    """Train until the end, or until the member's checkpoint is changed: raises Evolved."""
    return ver_multigpu.launch(options, MemberRun)


def launch_member(options):
    """Train as a member of a population, to the end. Raises UserError."""
    check_member(options)
    evolved = {}
    with only_one(options):
        while True:
            try:
                return launch(replace(join(options), **evolved))
            except Evolved as error:  # rank 0 sent them: files may appear late elsewhere
                (evolved,) = error.args


def main(argv=None):
    """Command line, as ver_multigpu.main."""
    return ver_multigpu.main(argv, Options, launch_member)


if __name__ == "__main__":
    from notebooks.extensions.population import main  # as a module: processes know its classes

    sys.exit(main())
