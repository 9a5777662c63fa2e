"""What learn.py parts and learn.py weights train, and what was expected before the runs.

Every run is in simulated time (`--extensions clocked`), so it does not depend on the load of the
machine, and several run at a time.
"""

import functools
import threading
from typing import NamedTuple

import harness

CLOCKED = "'clocked(mean_ms={}, spread={}, between={}, batch_ms={}, learn_sec={})'"
# the uneven simulators of learn.py minutes. Inference is slow, because larger batches make the runs
# shorter
AS_LATENCY = CLOCKED.format(20, 0.8, 0.6, 5, 0.4)
# for small networks and small rollouts
SMALL = CLOCKED.format(20, 0.8, 0.6, 10, 0.05)
OF_ALL = "--num-workers 0 --learner-threads 1"
OF_SMALL = f"{OF_ALL} --hidden-size 32 --learning-rate 3e-3 --num-minibatches 4"


class Task(NamedTuple):
    """A task of a study.

    words        its name in the tables
    measure      what is compared: a number of the evaluation and of the training curve
    arguments    of its command line
    clocked      the extension that simulates time"""

    words: str
    measure: tuple
    arguments: str
    clocked: str = SMALL


RETURN = "return", "charts/episodic_return"
SUCCESS = "success", "metrics/success"
# two kinds of environments, which say their own mean
EVEN = "--eval-episodes 320"  # as many of each kind
FLATS = Task(
    "small and large flats",
    SUCCESS,
    "--env-id kinds:Flats-v0 --env-kwargs image_size=32 {} "
    f"{OF_ALL} {EVEN} --total-timesteps 200000",
    CLOCKED.format(20, 0.5, 0, 0.8, 0.4),
)
CUES = Task(
    "cues for 2 and for 10 steps",
    SUCCESS,
    "--env-id kinds:Cues-v0 {} "
    f"{OF_SMALL} {EVEN} --num-steps 16 --gae-lambda 1 --total-timesteps 60000",
    CLOCKED.format(20, 0.5, 0, 1.5, 0.05),
)
KINDS = {"flats": FLATS, "cues": CUES}
TASKS = {
    "recall": Task(
        "recall over 10 steps, T = 16",
        RETURN,
        f"--env-id tests.envs:Cue-v0 {OF_SMALL} --num-steps 16 --gae-lambda 1"
        " --total-timesteps 60000",
    ),
    "pole": Task(
        "CartPole without velocities, T = 8",
        RETURN,
        f"--env-id CartPole-v1 --wrappers 'hide(indices=(1, 3))' {OF_SMALL} --num-steps 8"
        " --total-timesteps 30000 --eval-episodes 32",
    ),
    "corridor": Task(
        "a corridor, episodes cut after 8 steps",
        SUCCESS,
        f"--env-id kinds:Corridor-v0 {OF_SMALL} --num-steps 16 --total-timesteps 12000",
    ),
    "cues": CUES._replace(arguments=CUES.arguments.format("")),
    "pointnav": Task(
        "PointNav",
        SUCCESS,
        f"--env-id pointnav --env-kwargs simulator=builtin image_size=32 {OF_ALL}"
        " --total-timesteps 100000",
        AS_LATENCY,
    ),
}


def command(task, extensions="", more=""):
    """The arguments of a run."""
    return f"{task.arguments} --extensions {task.clocked} {extensions} {more}".strip()


# ------------------------------------------------------------------------------------------- Parts


class Part(NamedTuple):
    """A part of VER, and what takes its place.

    part, without    its name, and what is done without it
    extension        that does so
    small            the smallest task in which it should matter
    expected         in the small task, and in PointNav; written before the runs
    crashes          environments crash in 2 % of their steps, also in the runs of the full method
    """

    part: str
    without: str
    extension: str
    small: str
    expected: tuple
    crashes: bool = False


NONE = "no difference"
PARTS = {
    "weights": Part(
        "importance weights",
        "weight 1",
        "Unweighted",
        "cues",
        (
            "a little worse: 9 of 10 steps are from the easy kind",
            f"{NONE}, or a little better: all environments are alike",
        ),
    ),
    "carried-unlearned": Part(
        "carried steps",
        "not learned from",
        "NotLearned",
        "pole",
        ("a little worse: an eighth of the steps is missing", f"{NONE}: below 1 % are carried"),
    ),
    "carried-recomputed": Part(
        "carried steps",
        "their log-probability is computed again",
        "Recomputed",
        "pole",
        (f"{NONE}, or a little worse: they are one update old", NONE),
    ),
    "carried-awaited": Part(
        "carried steps",
        "the rollout waits for them",
        "Waiting",
        "pole",
        (
            "per step no difference; at least 1.5 times as many minutes",
            "per step no difference; 5 % more minutes",
        ),
    ),
    "idle": Part(
        "the idle rule",
        "the old policy chooses the next action of every environment",
        "AtOnce",
        "pole",
        ("per step no difference; a few percent fewer minutes", NONE),
    ),
    "states": Part(
        "stored states",
        "zeros at the beginning of each piece",
        "ZeroStates",
        "recall",
        ("clearly slower, if it learns at all", "a little worse"),
    ),
    "minibatches": Part(
        "equal mini-batches of shuffled sequences",
        "environments are dealt into mini-batches whole",
        "Whole",
        "recall",
        ("a little worse: sizes differ, and the steps of a mini-batch are alike", "a little worse"),
    ),
    "shuffling": Part(
        "shuffling in each epoch",
        "the same cuts in both epochs",
        "SameCuts",
        "recall",
        (NONE, NONE),
    ),
    "truncation": Part(
        "the value of a truncated episode's end",
        "truncated means terminated",
        "Terminating",
        "corridor",
        ("fails: 0.6 in place of 1, since the left end is nearer for half of them", NONE),
    ),
    "bootstrap": Part(
        "two rules for the values at a rollout's end",
        "a new forward pass for all, and the memory moves on",
        "Moving",
        "recall",
        ("worse: one step in 16 is seen twice", NONE),
    ),
    "lost": Part(
        "lost steps teach nothing",
        "a lost step is terminated, with a reward of 0",
        "LostTeach",
        "pole",
        (f"{NONE}: crashes come by chance, so values are lower everywhere", "a little worse"),
        crashes=True,
    ),
}
CRASHING = "full, with crashes"


def parts_runs(names):
    """The runs of these tasks: (task, variant, command line)."""
    runs = []
    for name in names:
        task = TASKS[name]
        crashing = task._replace(clocked=task.clocked.replace(")'", ", crashes=0.02)'"))
        runs.append((name, "full", command(task)))
        for key, part in PARTS.items():
            if name not in (part.small, "pointnav"):
                continue
            if part.crashes:
                runs.append((name, CRASHING, command(crashing)))
            extension = f"parts:{part.extension}"
            runs.append((name, key, command(crashing if part.crashes else task, extension)))
    return runs


# ----------------------------------------------------------------------------------------- Weights

SETTINGS = {  # how kinds differ in speed: arguments of the environment
    "hard 10 times as slow": "",
    "easy 10 times as slow": "slow=easy",
    "hard 3 times as slow": "ratio=3",
    "hard 30 times as slow": "ratio=30",
    "drawn at each reset": "keep=False",
}
MAIN = "hard 10 times as slow"
WEIGHTS = {  # options and extensions of each variant
    "ver": ("", ""),
    "ver, weight 1": ("", "parts:Unweighted"),
    "ver, mean weight 1": ("", "parts:MeanOne"),
    "nover": ("--sampler nover", ""),
    "sync": ("--sampler sync", ""),
    "ver, authors' weights": ("", "parts:AuthorsWeights"),
}
IN_EVERY_SETTING = "ver", "ver, weight 1", "ver, mean weight 1"
EXPECTED = {  # what the variants of a setting should show, written before the runs
    "hard 10 times as slow": "with weights, hard success is a little higher and easy a little "
    "lower than with weight 1; their mean does not differ by more than 0.03. With a mean weight of "
    "1, hard success is highest. nover and sync equal it over steps, and take 4 times as long. The "
    "authors' weights equal ours",
    "easy 10 times as slow": "with weight 1, easy success is lower: it has a tenth of the steps. "
    "Hard success is higher than in the setting above in all variants",
    "hard 3 times as slow": "no difference is seen",
    "hard 30 times as slow": "hard success is lower than at 10; weights help by 0.05 at most",
    "drawn at each reset": "no difference: environments are alike, and nearly all weights are 1",
}


def weights_runs(names):
    """The runs of the weights study: (setting of a task, variant, command line). With names, of
    these tasks, settings (`flats, drawn at each reset`) or variants of a setting alone."""
    runs = []
    for name, task in KINDS.items():
        for setting, kwargs in SETTINGS.items():
            words = "--env-kwargs" if kwargs and "--env-kwargs" not in task.arguments else ""
            own = task._replace(arguments=task.arguments.format(f"{words} {kwargs}"))
            group = f"{name}, {setting}"
            for variant, (options, extension) in WEIGHTS.items():
                wanted = not names or {name, group, f"{group}, {variant}"} & set(names)
                if wanted and (setting == MAIN or variant in IN_EVERY_SETTING):
                    runs.append((group, variant, command(own, extension, options)))
    return runs


# ------------------------------------------------------------------------------------------ Running

TAGS = "charts/episodic_return", "metrics/success", "clock/minutes", "ver/importance_weight"
TAGS += "ver/carried_share", "ver/lost_steps"
POINTS = 40


def measure(args, name, runs):
    """Make all runs that the results do not have yet, --jobs at a time. A run that fails is said,
    and the others go on. Every finished run is kept at once."""
    found = harness.kept(args, name).get("found", {})
    kept = threading.Lock()

    def make(group, variant, line, seed):
        try:
            trained = harness.apart(harness.train_here, f"{line} --seed {seed}")
        except RuntimeError as error:
            print(f"{group}, {variant}, seed {seed}: {error}", flush=True)
            return
        run = {"seed": seed, "evaluation": trained.evaluation, "curves": trained.thin(TAGS, POINTS)}
        run["minutes"] = round(trained.last("clock/minutes"), 3)
        with kept:
            found.setdefault(group, {}).setdefault(variant, []).append(run)
            own = f"python tests/benchmarks/learn.py {name}"
            harness.keep(args, name, command=own, found=found)
        print(f"{group}, {variant}, seed {seed}: {run['evaluation']}", flush=True)

    calls = []
    for seed in args.seeds:
        for group, variant, line in runs:
            done = found.get(group, {}).get(variant, [])
            if seed not in [run["seed"] for run in done]:
                calls.append(functools.partial(make, group, variant, line, seed))
    harness.together(calls, args.jobs)
