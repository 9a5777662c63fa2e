"""How many steps per second every sampler trains at, beside what the workload allows: Table 1 of the paper on one machine.

    python tests/benchmarks/throughput.py --workload a b c d --rounds 3 --json throughput.json

a  rearrangement: 16 simulators that sleep 20 ms a step, so unevenly that `sync`, learning included, keeps 39 % of the rate
   that it has when they are even, and `nover` comes to 1/1.31 of `ver` (174 of 442 and 327 of 428 steps/s in the paper)
b  navigation: milder; `ver` is 1.6 to 2 times as fast as `sync`
c  the built-in PointNav without emulated latency: the CPU does everything
d  CartPole-v1, once with --num-workers 0 (what suits cheap environments), once with workers

PointNav is PointNavSteady of peers.py, and the learning rate is close to 0, so that episodes keep their length. --rollouts
holds for a and b; the rollouts of c and d are short and four times as many. With --feed-forward every mode also runs without
LSTM (Table A2). Each run is a process of its own; a round is every mode once, so that modes are compared side by side.

mean      steps per second from the end of the third update to the end of the last, learning and logging included
max       the fastest 4 updates in a row. A single one would say little: where learning overlaps with collecting, updates
          can follow one another as fast as they are learned, because their rollouts were collected before
x sync    ratio to `sync` (with the same network) in the same round
learning  share of the time in which something is learned
lag       how many updates older than the learner the policy was that chose the actions learned from: mean / largest
bound     without overlap 1 / (c + l), with overlap 1 / max(c, l), of the seconds per step of collecting, c, and learning, l.
          a, b: c is the mean time that a simulator took for a step in `ver`, sleep and all, / N. c, d: environment / cores
          + forward, each measured alone in every round by machinery.py; with overlap all share the cores, so a step takes
          at least (environment + forward + learning on one thread) / cores. l is the fastest learning of the round

The spreads of a and b were chosen by --calibrate, which starts nothing. For --seed 1 it says: a: `sync` 0.39 of its rate
without spread, ver / nover 1.29, ver / sync 3.0, learning 31 % of the cycle without spread; b: 0.64, 1.17, 1.8, 22 %.

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
from types import SimpleNamespace

import machinery
import numpy as np
import torch
from peers import ENV_ID, run_apart

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import ver_ppo  # noqa: E402

MODES = {  # the options that make each mode
    "sync": {"sampler": "sync"},
    "nover": {"sampler": "nover"},
    "ver": {},
    "nover+overlap": {"sampler": "nover", "overlap": True},
    "ver+overlap": {"overlap": True},
    "async": {"sampler": "async"},
}
EVEN, FEED_FORWARD = " without spread", " feed-forward"  # what is added to a mode's name
POINTNAV = {"env_id": f"peers:{ENV_ID}", "num_envs": 16, "num_steps": 128}
WORKLOADS = {
    "a rearrangement": {**POINTNAV, "sim_latency": 20.0, "sim_latency_spread": (0.9, 0.15, 0.2), "update_epochs": 16},
    "b navigation": {**POINTNAV, "sim_latency": 10.0, "sim_latency_spread": (0.45, 0.1, 0.1), "update_epochs": 5},
    "c pointnav": POINTNAV,
    "d cartpole, one process": {"env_id": "CartPole-v1", "num_workers": 0},
    "d cartpole, workers": {"env_id": "CartPole-v1"},
}
PAPER = {("sync", "sync" + EVEN): 174 / 442, ("ver", "nover"): 428 / 327, ("ver", "sync"): 428 / 174, ("ver", "async"): 1.0}
WARM_UP, WINDOW = 3, 4  # updates


def list_rows(workload, args):
    """Name -> options of every run of a round. `parts` measures what the bound is made of, where nothing sleeps."""
    settings = {**WORKLOADS[workload], "seed": args.seed, "learning_rate": 1e-6, "device": "cpu", "eval_episodes": 0}
    rows = {mode: {**settings, **MODES[mode]} for mode in args.modes}
    if "sim_latency" not in settings:
        rows["parts"] = settings
    elif "sync" in args.modes:
        rows["sync" + EVEN] = {**rows["sync"], "sim_latency_spread": (0.0, 0.0, 0.0)}
    if args.feed_forward:
        rows |= {name + FEED_FORWARD: {**settings, "recurrent": False} for name, settings in rows.items()}
    return rows


def check_rows(rows):
    """Exit if one of them asks for what ver_ppo.py refuses or does not know, before anything is started."""
    for name, settings in rows.items():
        try:
            ver_ppo.validate_options(ver_ppo.Options(**settings))
        except (TypeError, ver_ppo.UserError) as error:
            raise SystemExit(f"{name} cannot run with this ver_ppo.py: {error}") from None


def environment_delays(options):
    """The factor by which each of the N emulated simulators is slower than --sim-latency, drawn as training draws it."""
    spec = ver_ppo.describe_env(options)
    transfer = ver_ppo.Transfer(spec, options.num_envs)
    rows = range(options.num_envs)
    return np.array([ver_ppo.EnvironmentRow(row, options, "train", spec, transfer).env_delay for row in rows])


# In the process of one run


def measure_parts(options, _):
    """Seconds per step of collection and learning, measured alone."""
    cores = ver_ppo.count_cores()
    sec = machinery.measure_parts(options, cores, batch=options.num_envs)
    collection_sec = sec["env"] / min(cores, max(1, ver_ppo.count_workers(options))) + sec["forward"]
    core_sec = (sec["env"] + sec["forward"] + sec["learn_one_thread"]) / cores
    return {"collection_sec": collection_sec, "learning_sec": sec["learn"], "core_sec": core_sec}


def measure_training(options, rollouts):
    """ver_ppo.train as it is: rates, time spent in learning, and what sleeping allows."""
    marks, log = [], ver_ppo.Run.log

    def log_and_mark(run, step, scalars, *rest):
        log(run, step, scalars, *rest)
        marks.append((step, time.perf_counter(), scalars))

    ver_ppo.Run.log = log_and_mark
    rollouts *= 1 if options.sim_latency else 4
    ver_ppo.train(replace(options, total_timesteps=rollouts * options.rollout_steps, runs_dir=os.getcwd()))
    steps, seconds, scalars = zip(*marks[WARM_UP - 1 :])
    windows = zip(steps, seconds, steps[WINDOW:], seconds[WINDOW:])
    learning_sec = sum(logged["time/learning_sec"] for logged in scalars[1:])
    result = {
        "sps": (steps[-1] - steps[0]) / (seconds[-1] - seconds[0]),
        "sps_max": max((last - first) / (ended - began) for first, began, last, ended in windows),
        "learning_sec": learning_sec / (steps[-1] - steps[0]),
        "learning_share": learning_sec / (seconds[-1] - seconds[0]),
        "lag_mean": float(np.mean([logged["ver/policy_lag_mean"] for logged in scalars[1:]])),
        "lag_max": float(max(logged["ver/policy_lag_max"] for logged in scalars[1:])),
    }
    if options.sim_latency:  # all N simulators at work all the time
        result["collection_sec"] = np.mean([logged["time/env_step_ms"] for logged in scalars[1:]]) / 1000 / options.num_envs
    return result


# In the main process


def run_round(rows, number, args):
    """Run every row once, each in a process of its own; returns name -> result."""
    results = {}
    for name, settings in rows.items():
        what = "parts" if name.startswith("parts") else "training"
        command = [sys.executable, str(Path(__file__).resolve()), "--measure", what, "--options", json.dumps(settings)]
        results[name] = run_apart([*command, "--rollouts", str(args.rollouts)], args.timeout)
        shown = " ".join(f"{key} {value:.4g}" for key, value in results[name].items())
        print(f"round {number}: {name}: {shown}", flush=True)
    return results


def compare_round(results, rows):
    """Add each run's bound and its ratio to `sync` of the same network."""
    for name, run in ((name, result) for name, result in results.items() if "sps" in result):
        suffix = FEED_FORWARD if name.endswith(FEED_FORWARD) else ""
        alike = [result for other, result in results.items() if other.endswith(FEED_FORWARD) == bool(suffix)]
        learning_sec = min(result["learning_sec"] for result in alike)
        ver = run if EVEN in name else results.get("ver" + suffix, run)
        parts = results.get("parts" + suffix, ver)  # where simulators sleep, a run knows how long
        overlapped = rows[name].get("overlap") or rows[name].get("sampler") == "async"
        sec = max(parts["collection_sec"], learning_sec, parts.get("core_sec", 0.0)) if overlapped else None
        run["bound"] = 1 / (sec or parts["collection_sec"] + learning_sec)
        if sync := results.get("sync" + suffix):
            run["over_sync"] = run["sps"] / sync["sps"]
    return results


def show(values, digits=0):
    """Median and range."""
    low, median, high = (f"{value:.{digits}f}" for value in (min(values), np.median(values), max(values)))
    return f"{median} ({low}-{high})"


def print_table(workload, rounds):
    """One line for each mode: medians over the rounds, and ranges; then the paper's ratios, if the modes are there."""
    print(f"\n{workload}: median of {len(rounds)} rounds (range)")
    heads = ("mean steps/s", "max", "x sync", "bound", "share of bound", "learning", "lag")
    print(f"{'':34}" + "".join(f"{head:>20}" for head in heads))
    for name in (name for name, result in rounds[0].items() if "sps" in result):
        column = {key: [results[name][key] for results in rounds] for key in rounds[0][name]}
        share = [rate / bound for rate, bound in zip(column["sps"], column["bound"])]
        over_sync = show(column["over_sync"], 2) if "over_sync" in column else "-"
        cells = (show(column["sps"]), f"{np.median(column['sps_max']):.0f}", over_sync, f"{np.median(column['bound']):.0f}",
                 show(share, 2), f"{np.median(column['learning_share']):.2f}",
                 f"{np.mean(column['lag_mean']):.2f} / {max(column['lag_max']):.0f}")  # fmt: skip
        print(f"{name:34}" + "".join(f"{cell:>20}" for cell in cells))
    for (over, under), paper in PAPER.items() if workload.startswith("a") else ():
        if over in rounds[0] and under in rounds[0]:
            ratios = [results[over]["sps"] / results[under]["sps"] for results in rounds]
            print(f"{over} / {under}: {show(ratios, 2)}; in the paper {paper:.2f}")
    print(flush=True)


def compare(args):
    """All rounds of all workloads; returns every result, and leaves the file --json whole after each workload."""
    machine = {"cores": ver_ppo.count_cores(), "processor": platform.machine(), "python": platform.python_version()}
    report = {"machine": {**machine, "torch": torch.__version__, "numpy": np.__version__}, "workloads": {}}
    for workload in (name for name in WORKLOADS if name[0] in args.workload):
        rows = list_rows(workload, args)
        check_rows(rows)
        rounds = [compare_round(run_round(rows, number + 1, args), rows) for number in range(args.rounds)]
        print_table(workload, rounds)
        report["workloads"][workload] = {"options": rows, "rounds": rounds}
        if args.json:
            args.json.write_text(json.dumps(report, indent=2) + "\n")
    return report


# Calibration

OVERHEAD_MS = {"even": 3.2, "sync": 2.3, "nover": 1.2, "ver": 1.2}  # of N steps beside the sleeping, on two cores
LEARNING_MS = 0.041  # of one step and epoch, on two cores


def simulate_collection(env_delay_N, spread, steps=128, episode_steps=48, rollouts=200, seed=0):
    """How long collection takes, in multiples of what it takes without spread, where sleeping is all that there is.

    `sync` waits at every step for the slowest of N environments, `nover` once in a rollout for the one whose T steps take
    longest, `ver` for none: its rate is the sum of their rates. Episodes end with probability 1 / episode_steps.

    >>> simulate_collection(np.array([0.5, 1.5]), (0.0, 0.0, 0.0))
    {'even': 1.0, 'sync': 1.5, 'nover': 1.5, 'ver': 0.75}
    """
    rng, shape = np.random.default_rng(seed), (len(env_delay_N), rollouts * steps)

    def draw(sigma):
        return ver_ppo.EnvironmentRow.draw_delay(SimpleNamespace(delay_rng=rng), np.full(shape, sigma))

    episode = (rng.random(shape) < 1 / episode_steps).cumsum(axis=1)
    delay_NT = env_delay_N[:, None] * np.take_along_axis(draw(spread[2]), episode, axis=1) * draw(spread[0])
    rollout_NR = delay_NT.reshape(len(env_delay_N), rollouts, steps).mean(axis=2)
    slowest, longest = delay_NT.max(axis=0).mean(), rollout_NR.max(axis=0).mean()
    return {"even": 1.0, "sync": float(slowest), "nover": float(longest), "ver": float(1 / (1 / env_delay_N).mean())}


def calibrate(args):
    """Print what a and b should come to."""
    for workload, settings in list(WORKLOADS.items())[:2]:
        options = ver_ppo.Options(**settings, seed=args.seed)
        slower = simulate_collection(environment_delays(options), options.sim_latency_spread)
        learning_ms = LEARNING_MS * options.update_epochs * options.num_envs
        cycle_ms = {mode: options.sim_latency * slower[mode] + OVERHEAD_MS[mode] + learning_ms for mode in slower}
        print(f"{workload}: spread {options.sim_latency_spread}, {options.update_epochs} epochs; even: sync without spread")
        for mode, ms in cycle_ms.items():
            times = f"collecting x {slower[mode]:.2f}, learning {learning_ms / ms:.0%} of the cycle"
            ratios = ", ".join(f"{other_ms / ms:.2f} x {other}" for other, other_ms in cycle_ms.items())
            print(f"  {mode:5} {times}: {1000 * options.num_envs / ms:4.0f} steps/s, {ratios}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", nargs="+", choices="abcd", default=list("abcd"))
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rollouts", type=int, default=15, help=f"of each run, the warm-up of {WARM_UP} included")
    parser.add_argument("--feed-forward", action="store_true", help="every mode without LSTM, too")
    parser.add_argument("--seed", type=int, default=1, help="decides which simulators are slow")
    parser.add_argument("--timeout", type=float, default=900.0, help="seconds after which a run is given up")
    parser.add_argument("--json", type=Path, help="file to write")
    parser.add_argument("--calibrate", action="store_true", help="print what the spreads of a and b were chosen by")
    parser.add_argument("--measure", choices=("training", "parts"), help=argparse.SUPPRESS)
    parser.add_argument("--options", type=json.loads, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rollouts < WARM_UP + WINDOW:
        parser.error(f"--rollouts must be at least {WARM_UP + WINDOW}")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends as by Ctrl-C: no run is left behind
    if arguments.measure:
        measure = {"training": measure_training, "parts": measure_parts}[arguments.measure]
        print("\n" + json.dumps(measure(ver_ppo.Options(**arguments.options), arguments.rollouts)))
    elif arguments.calibrate:
        calibrate(arguments)
    else:
        results = compare(arguments)
        if not arguments.json:
            print(json.dumps(results))
