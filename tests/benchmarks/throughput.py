"""How many steps per second every sampler trains at, beside what the workload allows: Table 1 of the paper on one machine.

    python tests/benchmarks/throughput.py --workload a b c d --rounds 3 --json throughput.json
    python tests/benchmarks/throughput.py --workload a c --modes sync ver async --compare FOLDER --rounds 3

a  rearrangement: 16 simulators that sleep 20 ms a step, so unevenly that `sync`, learning included, keeps 39 % of the rate
   that it has when they are even, and `nover` comes to 1/1.31 of `ver` (174 of 442 and 327 of 428 steps/s in the paper)
b  navigation: milder; `ver` is 1.6 to 2 times as fast as `sync`
c  the built-in PointNav without sleeping: the CPU does everything
d  CartPole-v1, once with --num-workers 0 (what suits cheap environments), once with workers

PointNav is PointNavSteady of peers.py (a and b: as uneven.py makes it sleep), and the learning rate is close to 0, so that
episodes keep their length. --rollouts holds for a and b; the rollouts of c and d are short and four times as many. With
--feed-forward every mode also runs without LSTM (Table A2). Each run is a process of its own; a round is every mode once.

mean      steps per second from the end of the fifth update to the end of the last, learning and logging included
max       the fastest 4 updates in a row. A single one would say little: where learning overlaps with collecting, updates
          can follow one another as fast as they are learned, because their rollouts were collected before
x sync    ratio to `sync` (with the same network) in the same round
learning  share of the time in which something is learned
lag       how many updates older than the learner the policy was that chose the actions learned from: mean / largest
bound     without overlap 1 / (c + l), with overlap 1 / max(c, l), of the seconds per step of collecting, c, and learning, l.
          a, b: c is the mean time that a simulator took for a step in `ver`, sleep and all, / N. c, d: environment / cores
          + forward, each measured alone in every round by machinery.py; with overlap all share the cores, so a step takes
          at least (environment + forward + learning on one thread) / cores. l is the fastest learning of the round

--script-folder measures the ver_ppo.py of another folder (no bound of c and d then). --compare FOLDER runs this repository's
and the one of FOLDER by turns, mode by mode: both rates, their ratio, and the resident memory of both main processes at the
end of the last update.

Run by hand on an idle machine. Prints one line for each run and a table for each workload; JSON at the end, or in --json.
"""

import argparse
import json
import os
import platform
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path

import machinery
import numpy as np
import torch
from peers import ENV_ID, run_apart, ver_ppo

ROOT = str(Path(__file__).resolve().parents[2])
MODES = {  # the options that make each mode
    "sync": {"sampler": "sync"},
    "nover": {"sampler": "nover"},
    "ver": {},
    "nover+overlap": {"sampler": "nover", "overlap": True},
    "ver+overlap": {"overlap": True},
    "async": {"sampler": "async"},
}
EVEN, FEED_FORWARD = " without spread", " feed-forward"  # what is added to a mode's name
POINTNAV = {"num_envs": 16, "num_steps": 128}
WORKLOADS = {
    "a rearrangement": {**POINTNAV, "env_id": "uneven:Rearrangement-v0", "num_workers": 16, "update_epochs": 16},
    "b navigation": {**POINTNAV, "env_id": "uneven:Navigation-v0", "num_workers": 16, "update_epochs": 5},
    "c pointnav": {**POINTNAV, "env_id": f"peers:{ENV_ID}"},
    "d cartpole, one process": {"env_id": "CartPole-v1", "num_workers": 0},
    "d cartpole, workers": {"env_id": "CartPole-v1"},
}
PAPER = {("sync", "sync" + EVEN): 174 / 442, ("ver", "nover"): 428 / 327, ("ver", "sync"): 428 / 174, ("ver", "async"): 1.0}
WARM_UP, WINDOW = 5, 4  # updates; in the first ones the number of threads is tried out


def sleeps(env_id):
    """Whether it is an emulated simulator."""
    return env_id.startswith("uneven:")


def list_rows(workload, args):
    """Name -> options of every run of a round. `parts` measures what the bound is made of, where nothing sleeps."""
    settings = {**WORKLOADS[workload], "learning_rate": 1e-6, "device": "cpu", "eval_episodes": 0}
    rows = {mode: {**settings, **MODES[mode]} for mode in args.modes}
    if sleeps(settings["env_id"]):
        even = {"sync" + EVEN: {**settings, "sampler": "sync", "env_id": settings["env_id"].replace("-v0", "Even-v0")}}
        rows |= even if "sync" in args.modes and not args.compare else {}
    elif not args.compare and args.script_folder == ROOT:
        rows["parts"] = settings
    if args.feed_forward:
        rows |= {name + FEED_FORWARD: {**settings, "recurrent": False} for name, settings in rows.items()}
    return rows


# In the process of one run


def measure_parts(options, _):
    """Seconds per step of collection and learning, measured alone."""
    cores = ver_ppo.count_cores()
    sec = machinery.measure_parts(options, cores, batch=options.num_envs)
    collection_sec = sec["env"] / min(cores, max(1, ver_ppo.count_workers(options))) + sec["forward"]
    core_sec = (sec["env"] + sec["forward"] + sec["learn_one_thread"]) / cores
    return {"collection_sec": collection_sec, "learning_sec": sec["learn"], "core_sec": core_sec}


def measure_training(options, rollouts):
    """ver_ppo.train as it is: rates, time spent in learning, what sleeping allows, and resident memory."""
    name, marks = "write" if hasattr(ver_ppo.Run, "describe") else "log", []  # log: so a version to compare with calls it
    write = getattr(ver_ppo.Run, name)

    def write_and_mark(run, steps, logs, *more):
        write(run, steps, logs, *more)
        marks.append((run.step, time.perf_counter(), logs))

    setattr(ver_ppo.Run, name, write_and_mark)
    rollouts *= 1 if sleeps(options.env_id) else 4
    ver_ppo.train(replace(options, total_timesteps=rollouts * options.rollout_steps, runs_dir=os.getcwd()))
    steps, seconds, logs = zip(*marks[WARM_UP - 1 :])
    windows = zip(steps, seconds, steps[WINDOW:], seconds[WINDOW:])
    names = "time/learning_sec", "time/env_step_ms", "ver/policy_lag_mean", "ver/policy_lag_max"
    learning_sec, step_ms, lag_means, lag_maxs = (np.array([update[name] for update in logs[1:]]) for name in names)
    result = {
        "sps": (steps[-1] - steps[0]) / (seconds[-1] - seconds[0]),
        "sps_max": max((last - first) / (ended - began) for first, began, last, ended in windows),
        "learning_sec": learning_sec.sum() / (steps[-1] - steps[0]),
        "learning_share": learning_sec.sum() / (seconds[-1] - seconds[0]),
        "lag_mean": lag_means.mean(),
        "lag_max": float(lag_maxs.max()),
        "resident_mib": int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20,
    }
    if sleeps(options.env_id):  # all N simulators at work all the time
        result["collection_sec"] = step_ms.mean() / 1000 / options.num_envs
    return result


# In the main process


def run(name, settings, folder, number, args):
    """One run, by the ver_ppo.py of this folder, in a process of its own; returns its result."""
    os.environ["SCRIPT_FOLDER"] = folder
    what = "parts" if name.startswith("parts") else "training"
    command = [sys.executable, str(Path(__file__).resolve()), "--measure", what, "--options", json.dumps(settings)]
    result = run_apart([*command, "--rollouts", str(args.rollouts)], args.timeout)
    place = f" ({folder})" if args.compare else ""
    print(f"round {number}: {name}{place}:", *(f"{key} {value:.4g}" for key, value in result.items()), flush=True)
    return result


def add_bounds(results, rows):
    """Add each run's bound and its ratio to `sync` of the same network."""
    for name, found in ((name, result) for name, result in results.items() if "sps" in result):
        suffix = FEED_FORWARD if name.endswith(FEED_FORWARD) else ""
        alike = [result for other, result in results.items() if other.endswith(FEED_FORWARD) == bool(suffix)]
        learning_sec = min(result["learning_sec"] for result in alike)
        ver = found if EVEN in name else results.get("ver" + suffix, found)
        parts = results.get("parts" + suffix, ver)  # where simulators sleep, a run knows how long
        collection_sec = parts.get("collection_sec", np.nan)
        overlapped = rows[name].get("overlap") or rows[name].get("sampler") == "async"
        sec = max(collection_sec, learning_sec, parts.get("core_sec", 0.0)) if overlapped else collection_sec + learning_sec
        found["bound"] = 1 / sec
        if sync := results.get("sync" + suffix):
            found["over_sync"] = found["sps"] / sync["sps"]
    return results


def show(values, digits=0):
    """Median and range."""
    low, median, high = (f"{value:.{digits}f}" for value in (min(values), np.median(values), max(values)))
    return f"{median} ({low}-{high})"


def print_line(name, cells):
    """One line of a table."""
    print(f"{name:34}" + "".join(f"{cell:>22}" for cell in cells))


def print_table(workload, rounds):
    """One line for each mode: medians over the rounds, and ranges; then the paper's ratios, if the modes are there."""
    heads = "mean steps/s", "max", "x sync", "bound", "share of bound", "learning", "lag"
    print_line(f"{workload}, {len(rounds)} rounds", heads)
    for name in (name for name, result in rounds[0].items() if "sps" in result):
        column = {key: [results[name][key] for results in rounds] for key in rounds[0][name]}
        share = [rate / bound for rate, bound in zip(column["sps"], column["bound"])]
        over_sync = show(column["over_sync"], 2) if "over_sync" in column else "-"
        cells = (show(column["sps"]), f"{np.median(column['sps_max']):.0f}", over_sync, f"{np.median(column['bound']):.0f}",
                 show(share, 2), f"{np.median(column['learning_share']):.2f}",
                 f"{np.mean(column['lag_mean']):.2f} / {max(column['lag_max']):.0f}")  # fmt: skip
        print_line(name, cells)
    for (over, under), paper in PAPER.items() if workload.startswith("a") else ():
        if over in rounds[0] and under in rounds[0]:
            ratios = [results[over]["sps"] / results[under]["sps"] for results in rounds]
            print(f"{over} / {under}: {show(ratios, 2)}; in the paper {paper:.2f}")
    print(flush=True)


def print_comparison(workload, rounds):
    """One line for each mode: the rates of both scripts and their ratio, median and range, and the medians of memory."""
    heads = "this, steps/s", "the other", "ratio", "this, MiB", "the other"
    print_line(f"{workload}, {len(rounds)} rounds", heads)
    for name in rounds[0]:
        rates_R2 = np.array([[result["sps"] for result in results[name]] for results in rounds])
        mib_R2 = np.array([[result["resident_mib"] for result in results[name]] for results in rounds])
        memory = (f"{mib:.0f}" for mib in np.median(mib_R2, axis=0))
        print_line(name, (*map(show, rates_R2.T), show(rates_R2[:, 0] / rates_R2[:, 1], 3), *memory))
    print(flush=True)


def measure_all(args):
    """All rounds of all workloads; returns every result, and leaves the file --json whole after each workload."""
    machine = {"cores": ver_ppo.count_cores(), "processor": platform.machine(), "python": platform.python_version()}
    report = {"machine": {**machine, "torch": torch.__version__, "numpy": np.__version__}, "workloads": {}}
    for workload in (name for name in WORKLOADS if name[0] in args.workload):
        rows, rounds = list_rows(workload, args), []
        for number in range(1, args.rounds + 1):
            folders = (ROOT, args.compare) if args.compare else (args.script_folder,)
            runs = {name: [run(name, rows[name], folder, number, args) for folder in folders] for name in rows}
            rounds.append(runs if args.compare else add_bounds({name: result for name, (result,) in runs.items()}, rows))
        print()
        (print_comparison if args.compare else print_table)(workload, rounds)
        report["workloads"][workload] = {"options": rows, "rounds": rounds}
        if args.json:
            args.json.write_text(json.dumps(report, indent=2) + "\n")
    return report


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", nargs="+", choices="abcd", default=list("abcd"))
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rollouts", type=int, default=15, help=f"of each run, the warm-up of {WARM_UP} included")
    parser.add_argument("--feed-forward", action="store_true", help="every mode without LSTM, too")
    parser.add_argument("--timeout", type=float, default=900.0, help="seconds after which a run is given up")
    parser.add_argument("--json", type=Path, help="file to write")
    parser.add_argument("--script-folder", type=os.path.abspath, default=ROOT, help="whose ver_ppo.py is measured")
    parser.add_argument("--compare", type=os.path.abspath, help="folder of another ver_ppo.py, to be measured by turns")
    parser.add_argument("--measure", choices=("training", "parts"), help=argparse.SUPPRESS)
    parser.add_argument("--options", type=json.loads, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rollouts < WARM_UP + WINDOW:
        parser.error(f"--rollouts must be at least {WARM_UP + WINDOW}")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends as by Ctrl-C: no run is left behind
    if arguments.measure:
        measure = {"training": measure_training, "parts": measure_parts}[arguments.measure]
        print("\n" + json.dumps(measure(ver_ppo.Options(**arguments.options), arguments.rollouts)))
    else:
        results = measure_all(arguments)
        if not arguments.json:
            print(json.dumps(results))
