"""What every sampler learns from equally many steps: curves of CartPole and PointNav, five seeds
(figure 5 of the paper).

    python tests/benchmarks/sample_efficiency.py --folder runs/efficiency --jobs 2

The simulators are emulated to be uneven (uneven.py), or the samplers would hardly differ. Every run
is ver_ppo.py as the command line starts it, with the flags in TASKS, MODES and COMMON, two at a
time: most of it is sleeping. A finished run lies under FOLDER/TASK-STEPS/MODE/SEED and is not
repeated, so this can be interrupted and started again (choose another folder after a change of
flags or of the code). Needs about an hour on two cores.

The curves are TensorBoard's, means of the last 100 training episodes, interpolated on a grid of
steps that all runs share. Printed at the end, for each mode: area under the curve (its mean over
the grid) and final value, each as the interquartile mean over the seeds and its bootstrapped 95 %
interval (Agarwal et al. 2021), and whether the area of `ver` lies within the interval of `sync`;
then the same and the curves as JSON, of which all.py makes the manual's table and picture.
"""

import argparse
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
from peers import kill_session
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

SCRIPT = Path(__file__).resolve().parents[2] / "ver_ppo.py"
COMMON = "--device cpu --learner-threads 1 --eval-episodes 0 --no-overlap"
TASKS = {  # flags, what is read from the events, steps
    "CartPole-v1": (
        "--env-id uneven:UnevenCartPole-v0 --num-envs 8 --num-workers 4 --num-steps 32"
        " --num-minibatches 1 --update-epochs 10 --ent-coef 0"
        " --gamma 0.98 --gae-lambda 0.8",
        ("charts/episodic_return",),
        100_000,
    ),
    "pointnav": (
        "--env-id uneven:UnevenPointNav-v0 --num-workers 16",
        ("metrics/success", "metrics/spl"),
        300_000,
    ),
}
MODES = {
    "sync": "--sampler sync",
    "nover": "--sampler nover",
    "ver": "--sampler ver",
    "ver+overlap": "--sampler ver --overlap",
    "async": "--sampler async",
}
GRID = 50  # points of a curve
RESAMPLES = 2000


# Runs


def steps_of(task, args):
    """Steps of each run of a task."""
    _, _, steps = TASKS[task]
    return args.steps or steps


def place(task, mode, seed, args):
    """The folder of a finished run."""
    return args.folder / f"{task}-{steps_of(task, args)}" / mode / str(seed)


def list_runs(args):
    """(folder, command) of every run that is not finished, seed by seed: an interruption leaves
    whole seeds."""
    runs = []
    for task in args.tasks:
        flags, _, _ = TASKS[task]
        for seed in range(1, args.seeds + 1):
            for mode in args.modes:
                words = f"--seed {seed} --total-timesteps {steps_of(task, args)} {COMMON}"
                words += f" {flags} {MODES[mode]}"
                folder = place(task, mode, seed, args)
                if not folder.exists():
                    runs.append((folder, [sys.executable, str(SCRIPT), *shlex.split(words)]))
    return runs


def train(runs, jobs, timeout_sec):
    """Carry out these runs, `jobs` at a time. Raises RuntimeError if one fails or outlives the
    timeout; ends the others."""
    waiting = list(runs)
    running = []
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                folder, command = waiting.pop(0)
                running.append((folder, start(folder, command), time.monotonic()))
            time.sleep(0.2)
            for run in list(running):
                folder, process, began_at = run
                sec = time.monotonic() - began_at
                if sec > timeout_sec:
                    raise RuntimeError(f"{folder}: still running after {timeout_sec:.0f} s")
                if process.poll() is not None:
                    running.remove(run)
                    finish(folder, process)
                    print(f"{folder}: {sec:.0f} s, {len(waiting)} to start", flush=True)
    finally:
        for _, process, _ in running:
            kill_session(process)


def unfinished(folder):
    """Where a run is until it has finished."""
    return folder.with_name(f"{folder.name}.unfinished")


def start(folder, command):
    """Start one run, in a session of its own."""
    shutil.rmtree(unfinished(folder), ignore_errors=True)
    unfinished(folder).mkdir(parents=True)
    command = [*command, "--runs-dir", str(unfinished(folder))]
    environ = os.environ | {"PYTHONPATH": str(Path(__file__).resolve().parent)}  # for uneven.py
    with open(unfinished(folder) / "output", "w") as output:
        pipes = {"stdout": output, "stderr": subprocess.STDOUT}
        return subprocess.Popen(command, start_new_session=True, env=environ, **pipes)


def finish(folder, process):
    """Give a run's folder its final name. Raises RuntimeError if the run failed."""
    if process.returncode:
        kill_session(process)
        text = (unfinished(folder) / "output").read_text()
        raise RuntimeError(f"{folder}: exit status {process.returncode}\n{text[-3000:]}")
    (run_folder,) = (path for path in unfinished(folder).iterdir() if path.is_dir())
    run_folder.rename(folder)
    shutil.rmtree(unfinished(folder))


# Curves


def read_curve(folder, tag, grid_G):
    """One run's curve at these steps; before the first value there is, that value."""
    points = EventAccumulator(str(folder)).Reload().Scalars(tag)
    return np.interp(grid_G, [point.step for point in points], [point.value for point in points])


def interquartile_mean(values, axis=0):
    """Mean of what is left when a quarter of the values, rounded down, is dropped at either end.

    >>> interquartile_mean(np.array([100.0, 1.0, 2.0, 6.0, -100.0]))
    3.0
    """
    count = values.shape[axis]
    middle = range(count // 4, count - count // 4)
    result = np.sort(values, axis=axis).take(middle, axis=axis).mean(axis=axis)
    return result if result.ndim else float(result)


def estimate(values_KX):
    """Interquartile mean over the K seeds, and its 95 % interval: percentiles over seeds that are
    drawn with replacement."""
    rng = np.random.default_rng(0)
    drawn_RK = rng.integers(len(values_KX), size=(RESAMPLES, len(values_KX)))
    means_RX = interquartile_mean(values_KX[drawn_RK], axis=1)
    low, high = np.percentile(means_RX, (2.5, 97.5), axis=0)
    mean = np.asarray(interquartile_mean(values_KX))
    found = {"iqm": mean, "low": low, "high": high}
    return {name: np.round(values, 4).tolist() for name, values in found.items()}


def summarize(args):
    """task -> tag -> mode -> curve, area and final value, each as `estimate` gives them."""
    report = {}
    for task in args.tasks:
        flags, tags, _ = TASKS[task]
        grid_G = np.linspace(0, steps_of(task, args), GRID + 1)[1:]
        found = {tag: {} for tag in tags}
        for tag in tags:
            for mode in args.modes:
                folders = [place(task, mode, seed, args) for seed in range(1, args.seeds + 1)]
                curve_KG = np.stack([read_curve(folder, tag, grid_G) for folder in folders])
                found[tag][mode] = {
                    "curve": estimate(curve_KG),
                    "area": estimate(curve_KG.mean(axis=1)),
                    "final": estimate(curve_KG[:, -1]),
                }
        flags = f"{COMMON} {flags}"
        report[task] = {"flags": flags, "steps": grid_G.tolist(), "tags": found}
    return report


def show(estimated):
    """What `estimate` gave, in words."""
    return "{iqm:.3f} [{low:.3f}, {high:.3f}]".format(**estimated)


def print_table(report, seeds):
    """Area under the curve and final value of every mode, and whether `ver` learns like `sync`."""
    for task, results in report.items():
        for tag, modes in results["tags"].items():
            print(f"\n{task} {tag}: interquartile mean [95 % interval] of {seeds} seeds")
            for mode, result in modes.items():
                print(f"  {mode:12} area {show(result['area']):28} final {show(result['final'])}")
            if {"ver", "sync"} <= modes.keys():
                ver = modes["ver"]["area"]
                sync = modes["sync"]["area"]
                within = "within" if sync["low"] <= ver["iqm"] <= sync["high"] else "not within"
                print(f"  area of ver: {within} the interval of sync")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    kept = "where runs are kept"
    parser.add_argument("--folder", type=Path, required=True, help=kept)
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, help="of each run, in place of those in TASKS")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time")
    given_up = "seconds after which a run is given up"
    parser.add_argument("--timeout", type=float, default=1800.0, help=given_up)
    arguments = parser.parse_args()
    # ends as by Ctrl-C: no run is left behind
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    train(list_runs(arguments), arguments.jobs, arguments.timeout)
    report = summarize(arguments)
    print_table(report, arguments.seeds)
    print(json.dumps(report))
