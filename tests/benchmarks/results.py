"""What ver_ppo.py learns: trains, and keeps what came out in small files. all.py makes the tables
of README.md and the manual from them.

    python tests/benchmarks/results.py train              every task below; two hours on two cores
    python tests/benchmarks/results.py train memory --seeds 1    one of them
    python tests/benchmarks/results.py train published    all that others have published figures of
    python tests/benchmarks/results.py film RUN           draws agent.gif: what a trained agent does

A run is the command line in its file, notebooks/results/TASK.json, which also says on what machine
it ran, how long it took, what its evaluation printed, and its curves; PointNav's also the 300
validation episodes, the same for all, that the finished policy played with sampled actions. Some
tasks need `pip install "gymnasium[box2d,mujoco]" minigrid popgym`.
The film is in notebooks/pictures, the manual is notebooks/MANUAL.md.
"""

import argparse
import itertools
import json
import os
import platform
import re
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import matplotlib
import matplotlib.pyplot as plt
import numpy as np
import torch
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
import ver_ppo  # noqa: E402
from notebooks import draw  # noqa: E402
from notebooks.extensions import play  # noqa: E402

CUE = "tests.envs:Cue-v0 --total-timesteps 100000"
TASKS = {  # what it is, arguments, results to show; nearly all with no option but the steps
    "pointnav": (
        "`pointnav`, 64×64 depth, 64 unseen floor plans, 2 M steps",
        "pointnav",
        ("success", "spl"),
    ),
    "pointnav-blind": (
        "the same without the camera, 2.5 M",
        "pointnav --total-timesteps 2500000 --encoder none",
        ("success", "spl"),
    ),
    "cartpole": (
        "`CartPole-v1`, 150 k (a random agent: 24)",
        "CartPole-v1 --total-timesteps 150000",
        ("return",),
    ),
    "acrobot": (
        "`Acrobot-v1`, 200 k (random: −491)",
        "Acrobot-v1 --total-timesteps 200000",
        ("return",),
    ),
    "pendulum": (
        "`Pendulum-v1`, 300 k (random: −1,228)",
        "Pendulum-v1 --total-timesteps 300000",
        ("return",),
    ),
    "lunarlander": (
        "`LunarLander-v3`, 300 k (random: −192)",
        "LunarLander-v3 --total-timesteps 300000",
        ("return",),
    ),
    "hopper": (
        "`Hopper-v5`, 300 k (random: 18)",
        "Hopper-v5 --total-timesteps 300000",
        ("return",),
    ),
    "doorkey": (
        "`MiniGrid-DoorKey-5x5-v0`, 300 k (random: 0.041)",
        "minigrid:MiniGrid-DoorKey-5x5-v0 --total-timesteps 300000",
        ("return",),
    ),
    "repeat-previous": (
        "`popgym-RepeatPreviousEasy-v0`, 600 k (random: −0.513)",
        "popgym:popgym-RepeatPreviousEasy-v0 --total-timesteps 600000",
        ("return",),
    ),
    "position-only-cartpole": (
        "`popgym-PositionOnlyCartPoleEasy-v0`, 200 k (random: 0.118)",
        "popgym:popgym-PositionOnlyCartPoleEasy-v0 --total-timesteps 200000",
        ("return",),
    ),
    "memory": ("a cue, asked for 10 steps later, 100 k; right answers", CUE, ("return",)),
    "memory-feed-forward": (
        "the same without the LSTM (chance: 0.5)",
        f"{CUE} --lstm-layers 0",
        ("return",),
    ),
}
HIDE = "notebooks.extensions.wrappers:Hide"
EPOCHS = "--update-epochs 10 --num-steps 64"
CLEANRL = "--num-envs 1 --num-steps 2048 --update-epochs 10 --num-minibatches 32"
CLEANRL += " --learning-rate 3e-4 --ent-coef 0 --lstm-layers 0"
HIDDEN_PENDULUM = f"{EPOCHS} --gamma 0.9 --learning-rate 1e-3 --ent-coef 0"
GRU = {  # of POPGym's easy tasks, after 4 M steps
    "Autoencode": "−0.469",
    "CountRecall": "−0.835",
    "HigherLower": "0.495",
    "NoisyPositionOnlyPendulum": "0.311",
    "RepeatFirst": "0.811",
    "RepeatPrevious": "0.744",
}
PUBLISHED = {  # task: what it is, arguments, what was published
    f"popgym-{name}": (
        f"`popgym-{name}Easy-v0`, 1 M",
        f"popgym:popgym-{name}Easy-v0 --total-timesteps 1000000",
        f"{value} [1], 4 M",
    )
    for name, value in GRU.items()
} | {
    "cartpole-hidden": (
        "`CartPole-v1` without velocities, 100 k",
        f"CartPole-v1 --total-timesteps 100000 {EPOCHS} --wrappers '{HIDE}(indices=(1, 3))'",
        "500 ± 0 [2], 100 k",
    ),
    "pendulum-hidden": (
        "`Pendulum-v1` without velocity, 300 k",
        f"Pendulum-v1 --total-timesteps 300000 {HIDDEN_PENDULUM} --wrappers '{HIDE}(indices=(2,))'",
        "−218 ± 140 [2], 100 k",
    ),
    "cartpole": ("`CartPole-v1`, 150 k", TASKS["cartpole"][1], "500 ± 0 [2], PPO, 100 k"),
    "acrobot": ("`Acrobot-v1`, 200 k", TASKS["acrobot"][1], "−74 ± 18 [2], PPO, 1 M"),
    "pendulum": ("`Pendulum-v1`, 300 k", TASKS["pendulum"][1], "−172 ± 104 [2], PPO, 100 k"),
    "lunarlander-1m": (
        "`LunarLander-v3`, 1 M",
        "LunarLander-v3 --total-timesteps 1000000",
        "242 ± 32 [2], PPO, version 2, 1 M",
    ),
    "doorkey": (
        "`MiniGrid-DoorKey-5x5-v0`, 300 k",
        TASKS["doorkey"][1],
        "0.964 ± 0.006 [2], PPO, 100 k",
    ),
    "hopper-1m": (
        "`Hopper-v5`, 1 M",
        "Hopper-v5 --total-timesteps 1000000",
        "2,383 ± 272 [3], 1 M",
    ),
    "hopper-1m-cleanrl": (
        "`Hopper-v5`, 1 M, as CleanRL learns",
        f"Hopper-v5 --total-timesteps 1000000 {CLEANRL}",
        "2,383 ± 272 [3], 1 M",
    ),
    "halfcheetah-1m": (
        "`HalfCheetah-v5`, 1 M",
        "HalfCheetah-v5 --total-timesteps 1000000",
        "1,443 ± 46 [3], 1 M",
    ),
}
PACKAGES = {  # that a task needs beside requirements.txt
    "lunarlander": "gymnasium[box2d]",
    "hopper": "gymnasium[mujoco]",
    "doorkey": "minigrid",
    "repeat-previous": "popgym",
    "position-only-cartpole": "popgym",
}
TAGS = (
    "charts/episodic_return",
    "charts/episodic_length",
    "metrics/success",
    "metrics/spl",
    "metrics/distance_to_goal",
)
POINTS = 60  # of a curve
EPISODES = 300


def command_of(task):
    """The command line, without the seed."""
    _, arguments, _ = (TASKS | PUBLISHED)[task]
    return f"python ver_ppo.py --env-id {arguments}"


def run_command(command, folder):
    """Run a command line of ver_ppo.py to its end, in this folder. Returns the run's folder, and
    what its evaluation printed, name -> [mean, standard error]."""
    arguments = shlex.split(command)[1:] + ["--runs-dir", folder]
    done = subprocess.run([sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr[-3000:])
    last_line = done.stdout.strip().splitlines()[-1]
    found = re.findall(r"(\w+) (\S+) ± ([\d.]+)", last_line)
    evaluation = {name: [float(mean), float(error)] for name, mean, error in found}
    return next(Path(folder).iterdir()), evaluation


def train(task, seed):
    """One run from its command to the end: what is kept of it."""
    began_at = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        run, evaluation = run_command(f"{command_of(task)} --seed {seed}", folder)
        minutes = (time.perf_counter() - began_at) / 60
        kept = {"seed": seed, "minutes": round(minutes, 2), "evaluation": evaluation}
        kept["curves"] = read_curves(run)
        if task.startswith("pointnav"):
            kept["episodes"] = play_episodes(run)
    return kept


def read_curves(run):
    """The curves of TensorBoard, a few points of each: tag -> [steps, values]."""
    events = EventAccumulator(str(run)).Reload()
    curves = {}
    for tag in sorted(set(TAGS) & set(events.Tags()["scalars"])):
        points = events.Scalars(tag)
        chosen = np.unique(np.linspace(0, len(points) - 1, POINTS).astype(int))
        steps = [points[i].step for i in chosen]
        curves[tag] = [steps, [round(points[i].value, 4) for i in chosen]]
    return curves


def play_episodes(run):
    """Validation episodes of the finished policy: geodesic distance from start to goal, success and
    SPL of each."""
    draw.setup()  # one thread: the policy sees one observation at a time
    policy, options = play.load_policy(run)
    env = ver_ppo.make_env(options, "val")
    episodes = {"geodesic": [], "success": [], "spl": []}
    for episode in range(EPISODES):
        *_, last = play.play(policy, env, ver_ppo.derive_seed(1, 0, 0, episode))
        episodes["geodesic"].append(round(float(last.start_geodesic), 3))
        for name in ("success", "spl"):
            episodes[name].append(round(float(last.info[name]), 3))
    return episodes


def machine():
    """What these runs ran on."""
    model = platform.processor()
    info = Path("/proc/cpuinfo")
    if info.exists():
        models = re.findall(r"model name\s*: (.*)", info.read_text())
        model = models[0] if models else model
    cores = len(os.sched_getaffinity(0))
    return f"{cores} core{'s' * (cores > 1)} of {model}, torch {torch.__version__}"


def where_and_when():
    """Of which code, when, and on what."""
    git = ["git", "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(git, cwd=ROOT, capture_output=True, text=True, check=True)
    return {
        "commit": commit.stdout.strip(),
        "date": time.strftime("%Y-%m-%d"),
        "machine": machine(),
        "python": platform.python_version(),
    }


def train_all(tasks, seeds):
    """Train and write one file for each task."""
    for task in tasks:
        runs = [train(task, seed) for seed in seeds]
        keep(task, {"command": command_of(task), **where_and_when(), "runs": runs})
        print(task, *(run["evaluation"] for run in runs), sep="\n  ", flush=True)


def keep(name, result):
    """Write what was found to notebooks/results/NAME.json."""
    (draw.RESULTS / f"{name}.json").write_text(dump(result) + "\n")


def dump(result):
    """JSON that shows in a diff what has changed: one line for each list of numbers."""
    text = json.dumps(result, indent=1)
    return re.sub(r"\[[^][{}]*\]", lambda found: " ".join(found[0].split()), text)


def header(*cells):
    """The first two lines of a table."""
    return [f"| {' | '.join(cells)} |", "|---" * len(cells) + "|"]


def found_cells(task, names):
    """The number of seeds, and mean and range over them of what evaluations found under these
    names, as words."""
    runs = draw.load_result(task)["runs"]
    cells = []
    for name in names:
        values = [run["evaluation"][name][0] for run in runs]
        digits = 0 if abs(values[0]) > 20 else 3
        numbers = np.mean(values), min(values), max(values)
        mean, low, high = (f"{number:,.{digits}f}".replace("-", "−") for number in numbers)
        cells.append(f"{draw.in_words(name)} {mean} ({low} to {high})")
    return len(runs), ", ".join(cells)


def learned_table():
    """The README's table."""
    lines = header("task", "seeds", "evaluation: mean (lowest to highest)")
    for task, (words, _, names) in TASKS.items():
        seeds, cells = found_cells(task, names)
        lines.append(f"| {words} | {seeds} | {cells} |")
    commands_are = "[these commands](notebooks/MANUAL.md#commands-of-the-first-table)"
    footer = f"200 episodes for each seed, by {commands_are}. {measured_at(TASKS)}"
    return "\n".join([*lines, "", footer])


def measured_at(tasks):
    """At which commit, and on what, the rows of a table were measured, as words."""
    rows = {}
    for row, task in enumerate(tasks, 1):
        kept = draw.load_result(task)
        where = f"commit {kept['commit']}, {kept['date']}, {kept['machine']}"
        rows.setdefault(where, []).append(str(row))
    if len(rows) == 1:
        return f"Measured at {where}."
    words = []
    for where, numbers in rows.items():
        words.append(f"row{'s' * (len(numbers) > 1)} {', '.join(numbers)} at {where}")
    return f"Measured: {'; '.join(words)}."


def published_table():
    """The manual's table: what others have published, beside what was measured here."""
    lines = header("task, steps", "options", "seeds", "evaluation", "published")
    for task, (words, arguments, published) in PUBLISHED.items():
        seeds, cells = found_cells(task, ("return",))
        options = arguments.split(maxsplit=3)[3:]  # after the environment and the steps
        options = f"`{options[0]}`" if options else ""
        cells = cells.removeprefix("return ")
        lines.append(f"| {words} | {options} | {seeds} | {cells} | {published} |")
    return "\n".join([*lines, "", measured_at(PUBLISHED)])


def commands():
    """The manual's list of what these results were got by."""
    lines = []
    for task in TASKS:
        found = draw.load_result(task)
        seeds = ", ".join(str(run["seed"]) for run in found["runs"])
        words = f"--seed {seeds}"
        if task in PACKAGES:
            words = f"not run by the tests: pip install '{PACKAGES[task]}'; {words}"
        lines.append(f"    {found['command']}  # {words}")
    return "\n".join(lines)


def film(run):
    """Three far goals of validation episodes, reached by the agent of this run folder: its camera,
    and its way on the floor plan, at every third step."""
    matplotlib.use("Agg")
    draw.setup()
    policy, options = play.load_policy(run)
    env = ver_ppo.make_env(options, "val").unwrapped
    figure, (eye, plan) = plt.subplots(1, 2, figsize=(6.4, 3.2), layout="constrained")
    frames = []
    found = 0
    for number in itertools.count():
        moments = []  # of an episode: what the agent sees, the heading, the path so far
        for one in play.play(policy, env, ver_ppo.derive_seed(1, 1, 0, number)):
            moments.append((one.observe()["depth"], one.heading, len(one.path)))
        if not env.info["success"] or env.start_geodesic < 7:
            continue
        path = env.path
        for depth, heading, length in [*moments[::3], *[moments[-1]] * 6]:
            env.path = path[:length]
            draw.moment(eye, plan, env, depth, heading)
            figure.canvas.draw()
            picture = Image.fromarray(np.asarray(figure.canvas.buffer_rgba())).convert("RGB")
            frames.append(picture.quantize(128, Image.Quantize.MAXCOVERAGE))
        found += 1
        if found == 3:
            break
    more = {"save_all": True, "append_images": frames[1:], "duration": 100, "loop": 0}
    frames[0].save(ROOT / "notebooks" / "pictures" / "agent.gif", optimize=True, **more)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("train", "film"))
    parser.add_argument("names", nargs="*", help="what to train (README's tasks), or a run to film")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    arguments = parser.parse_args()
    if arguments.what == "train":
        groups = {"published": list(PUBLISHED)}
        names = [name for given in arguments.names for name in groups.get(given, [given])]
        train_all(names or TASKS, arguments.seeds)
    else:
        film(*arguments.names)
