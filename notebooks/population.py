"""Decentralized population-based training (Petrenko et al. 2023): runs that learn from each other what to learn with.

    for k in 0 1 2 3; do python ver_ppo.py --population runs/flats --population-size 4 --member $k & done; wait

P runs of ver_ppo.py or ver_multigpu.py, on any machines, share nothing but a folder. Nobody is in charge: each may begin
later, die, and come back by the same command line. After every --evolve-interval steps a member

    saves a checkpoint    ->  and puts a copy of it, its entry, into the folder: weights, options, last 100 episodes
    reads of every other  <-  the newest entry with no more steps than its own
    decides by `evolve`       goes on, or mutates its options, or takes over weights and options of a better one
    goes on from its checkpoint, which then holds what it has decided

    FOLDER/0/000000100352.pt ...          entries of member 0
    FOLDER/0/decisions.jsonl              what it has decided, a line each
    FOLDER/0/pointnav__ver__.../          its run folder
"""

import contextlib
import fcntl
import json
import os
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

import ver_ppo

SHARE = 0.3  # of the population are "the worst", and as many "the best"
CLOSE = 0.05  # share of the best score: who is no further below it does not take over
PROBABILITY = 0.5  # that a mutation changes an option
BOUNDS = {  # of the options that evolve
    "learning_rate": (1e-6, 0.1),
    "ent_coef": (1e-6, 0.1),
    "clip_coef": (0.05, 0.5),
    "gamma": (0.8, 0.9999),
    "update_epochs": (1, 20),
}


@dataclass(frozen=True)
class Entry:
    """A member's score after `step` steps, the mean of --evolve-by over its last episodes, and its options."""

    member: int
    step: int
    score: float
    options: dict  # those in BOUNDS


def mutate(options, rng):
    """Each of the options with probability 1/2: times or divided by 1.1 to 1.5 (gamma: its distance from 1; epochs: one more
    or less), within BOUNDS. What is 0 stays 0. Returns new options."""
    changed = dict(options)
    for name, (low, high) in BOUNDS.items():
        wanted, factor, up = rng.random() < PROBABILITY, rng.uniform(1.1, 1.5), rng.random() < 0.5
        value, factor = options[name], factor if up else 1 / factor
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
    """A member's decision, from its entry and those of others, of equal or less experience (Petrenko et al. 2023):

    - ("goes on", None, options): it is not among the worst 30 %, or nobody is better;
    - ("mutates", None, options): it is, but no further below the best one than the standard deviation of the population's
      scores, or 5 % of the best: its options change a little;
    - ("takes over", member, options): it is clearly worse. Weights and options come from one drawn from the best 30 %, and
      these options change a little.

    A pure function: the same entries and the same state of the random generator, the same decision.
    """
    ranked = sorted([*others, own], key=lambda entry: (-entry.score, entry.member))
    few, gap = max(1, round(SHARE * len(ranked))), ranked[0].score - own.score
    if gap == 0 or own not in ranked[-few:]:
        return "goes on", None, own.options
    if gap <= max(np.std([entry.score for entry in ranked]), CLOSE * abs(ranked[0].score)):
        return "mutates", None, mutate(own.options, rng)
    better = [entry for entry in ranked[:few] if entry.score > own.score]
    donor = better[rng.integers(len(better))]
    return "takes over", donor.member, mutate(donor.options, rng)


def read_entry(content, member, column):
    """The entry that a checkpoint's content is; None if there is no score yet."""
    scores = np.array(content["recent"])[:, column] if content["recent"] else np.array([np.nan])
    known = scores[np.isfinite(scores)]
    options = {name: content["options"][name] for name in BOUNDS}
    return Entry(member, content["step"], float(known.mean()), options) if len(known) else None


def read_others(run):
    """Of every other member the content of the newest entry with no more steps than the run. What cannot be read, or is of
    another environment or network, is skipped with a line."""
    found, shapes = {}, {name: tensor.shape for name, tensor in run.policy.state_dict().items()}
    for member in set(range(run.options.population_size)) - {run.options.member}:
        files = Path(run.options.population).glob(f"{member}/*.pt")
        steps = {int(path.stem): path for path in files if path.stem.isdigit() and int(path.stem) <= run.step}
        try:
            if steps:
                path = steps[max(steps)]
                content = ver_ppo.load_checkpoint(path)
                if {name: tensor.shape for name, tensor in content["policy"].items()} != shapes:
                    raise ver_ppo.UserError(f"{path} is of another network")
                if content["options"].get("env_id") != run.options.env_id or not content["options"].keys() >= BOUNDS.keys():
                    raise ver_ppo.UserError(f"{path} is of another environment or version")
                found[member] = content
        except ver_ppo.UserError as error:
            run.bar.write(f"skipped: {error}")
    return found


class Evolved(Exception):
    """The run's checkpoint was changed: it has to go on from there."""


def review(run):
    """Compare a run that has just saved a checkpoint; of many ranks, rank 0 does it. Raises Evolved in all of them. After a
    signal, training ends as it always does."""
    evolved, ranks = run.folder is not None and publish_and_decide(run), getattr(run, "ranks", None)
    evolved_R, signal_R = zip(*(ranks.gather((evolved, run.signal)) if ranks else [(evolved, run.signal)]))
    if evolved_R[0] and not any(signal_R):
        raise Evolved


def publish_and_decide(run):
    """Publish the newest checkpoint as an entry, read the others', decide, and write what was decided into the checkpoint.
    Returns whether it was changed. If a file cannot be written, says so, and the run goes on as it is."""
    options, checkpoint = run.options, run.folder / "checkpoint.pt"
    folder, column = Path(options.population) / str(options.member), run.spec.episode_columns.index(options.evolve_by)
    try:
        if run.unsaved:
            return False
        content = ver_ppo.load_checkpoint(checkpoint)
        ver_ppo.write_checkpoint(content, folder / f"{run.step:012}.pt")
        own = read_entry(content, options.member, column)
        if not own or not options.evolve_after <= run.step < options.total_timesteps:
            return False
        contents = read_others(run)
        others = [entry for member, other in contents.items() if (entry := read_entry(other, member, column))]
        decision, donor, evolved = evolve(own, others, np.random.default_rng([options.seed, run.step]))
        if donor is not None:  # but its step, and its episodes, are not ours
            content |= {name: contents[donor][name] for name in ("policy", "optimizer")} | {"recent": []}
        if decision != "goes on":
            content["options"] |= evolved
            ver_ppo.write_checkpoint(content, checkpoint)
        note(run, folder, own, others, decision, donor, evolved)
        return decision != "goes on"
    except (OSError, RuntimeError, ver_ppo.UserError) as error:  # a full disk
        run.bar.write(f"not compared with the population at step {run.step}: {str(error).splitlines()[0]}")
        return False


def note(run, folder, own, others, decision, donor, evolved):
    """Print a decision, and keep it in the folder."""
    best = max([own, *others], key=lambda entry: entry.score)
    scores = (
        f"{run.options.evolve_by} {own.score:.4g}, the best of {1 + len(others)} has {best.score:.4g} (member {best.member})"
    )
    whom = "" if donor is None else f" member {donor}"
    news = [f"{name} {own.options[name]:.3g} -> {new:.3g}" for name, new in evolved.items() if new != own.options[name]]
    run.bar.write(f"member {own.member}, step {own.step}: {scores}: {decision}{whom} {', '.join(news)}".rstrip())
    line = asdict(own) | {"others": {entry.member: [entry.step, entry.score] for entry in others}}
    with open(folder / "decisions.jsonl", "a") as file:
        file.write(json.dumps(line | {"decision": decision, "from": donor, "to": evolved}) + "\n")


def join(options):
    """The options of a member: its own folder and seed; if it has been there before, going on from its checkpoint, by the
    options that it had evolved. Raises UserError for a run of another environment, or from elsewhere."""
    folder = Path(options.population) / str(options.member)
    if options.resume and Path(options.resume).resolve().parent != folder.resolve():
        ver_ppo.refuse(options, "resume", "is no run of this member: give --init-from to begin with its weights")
    seed = ver_ppo.derive_seed(options.seed, options.member)
    options = replace(options, runs_dir=str(folder), seed=seed, checkpoint_interval=options.evolve_interval)
    found = sorted(folder.glob("*/checkpoint.pt"), key=os.path.getmtime)
    if not found:
        return options
    saved = ver_ppo.load_checkpoint(found[-1])["options"]
    if saved["env_id"] != options.env_id:
        ver_ppo.refuse(options, "member", f"has learned {saved['env_id']} in {options.population}: give another folder")
    begun = {"resume": str(found[-1].parent), "init_from": None, "reset_critic": False, "reset_policy": False}
    return replace(options, **begun, **{name: saved[name] for name in BOUNDS})


@contextlib.contextmanager
def only_one(options):
    """Around a member's life: nobody else has its number (of many ranks, the first sees to that). Raises UserError."""
    folder = Path(options.population) / str(options.member)
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w") as file:
        try:
            if os.environ.get("RANK", "0") == "0":
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            ver_ppo.refuse(options, "member", f"is running already in {options.population}: give another one")
        except OSError:  # a file system without locks
            pass
        yield


def train_member(options, train):
    """Train as a member of a population, to the end. Returns the exit status."""
    with only_one(options):
        while True:
            try:
                train(join(options))
                return 0
            except Evolved:
                pass
