"""How many steps per second every sampler trains at, beside what the workload allows: Table 1 of
the paper on one machine. And how fast a version is beside another one.

    python tests/benchmarks/throughput.py --workload a b c d --rounds 3 --json throughput.json
    python tests/benchmarks/throughput.py --workload a c --modes sync ver --compare FOLDER
    python tests/benchmarks/throughput.py pairs --compare FOLDER --modes ver ver+overlap async

a  rearrangement: 16 simulators that sleep 20 ms a step, so unevenly that `sync`, learning included,
   keeps 39 % of the rate that it has when they are even, and `nover` comes to 1/1.31 of `ver` (174
   of 442 and 327 of 428 steps/s in the paper)
b  navigation: milder; `ver` is 1.6 to 2 times as fast as `sync`
c  the built-in PointNav without sleeping: the CPU does everything
d  CartPole-v1, once with --num-workers 0 (what suits cheap environments), once with workers

PointNav is PointNavSteady of peers.py (a and b: as uneven.py makes it sleep), and the learning rate
is close to 0, so that episodes keep their length. The number of workers is given, not measured:
16 in a and b, one a core in c. --rollouts holds for a and b; the rollouts of c and d are short and
four times as many. With --feed-forward every mode also runs without LSTM (Table A2). Each run is a
process of its own; a round is every mode once.

mean      steps per second from the end of the fifth update to the end of the last, learning and
          logging included
max       the fastest 4 updates in a row. A single one would say little: where learning overlaps
          with collecting, updates can follow one another as fast as they are learned, because
          their rollouts were collected before
x sync    ratio to `sync` (with the same network) in the same round
learning  share of the time in which something is learned
lag       how many updates older than the learner the policy was that chose the actions learned
          from: mean / largest
bound     without overlap 1 / (c + l), with overlap 1 / max(c, l), of the seconds per step of
          collecting, c, and learning, l. a, b: c is the mean time that a simulator took for a step
          in `ver`, sleep and all, / N. c, d: environment / cores + forward, each measured alone in
          every round by machinery.py; with overlap all share the cores, so a step takes at least
          (environment + forward + learning on one thread) / cores. l is the fastest learning of
          the round

--script-folder measures the ver_ppo.py of another folder (no bound of c and d then). --compare
FOLDER runs this repository's and the one of FOLDER by turns, mode by mode: both rates, their ratio,
and the resident memory of both main processes at the end of the last update.
`pairs` does so more finely, and on workload c unless told otherwise: both trainings live, and each
is stopped (SIGSTOP) while the other one goes on for --seconds, --turns times. The learner's threads
are given, too: one where learning overlaps with collecting, else one a core. Of these pairs it
shows the mean ratio of steps per second, its standard error, and the median.

Run by hand on an idle machine. Prints one line for each run (`pairs`: each pair) and a table for
each workload; JSON at the end, or in --json.
"""

import argparse
import contextlib
import json
import os
import platform
import signal
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import machinery
import numpy as np
import torch
from peers import (
    ENV_ID,
    ROOT,
    kill_session,
    make_options,
    run_apart,
    signal_session,
    start_apart,
    ver_ppo,
)

CORES = ver_ppo.count_cores()
MODES = {  # the options that make each mode
    "sync": {"sampler": "sync"},
    "nover": {"sampler": "nover"},
    "ver": {},
    "nover+overlap": {"sampler": "nover", "overlap": True},
    "ver+overlap": {"overlap": True},
    "async": {"sampler": "async"},
}
EVEN = " without spread"  # is added to a mode's name
FEED_FORWARD = " feed-forward"
COMMON = {"learning_rate": 1e-6, "device": "cpu", "eval_episodes": 0, "overlap": False}
POINTNAV = {"num_envs": 16, "num_steps": 128}
SLEEPING = {**POINTNAV, "num_workers": 16}
WORKLOADS = {
    "a rearrangement": {**SLEEPING, "env_id": "uneven:Rearrangement-v0", "update_epochs": 6},
    "b navigation": {**SLEEPING, "env_id": "uneven:Navigation-v0", "update_epochs": 2},
    "c pointnav": {**POINTNAV, "env_id": f"peers:{ENV_ID}", "num_workers": CORES},
    "d cartpole, one process": {"env_id": "CartPole-v1", "num_workers": 0},
    "d cartpole, workers": {"env_id": "CartPole-v1", "num_workers": CORES},
}
PAPER = {
    ("sync", "sync" + EVEN): 174 / 442,
    ("ver", "nover"): 428 / 327,
    ("ver", "sync"): 428 / 174,
    ("ver", "async"): 1.0,
}
WARM_UP = 5  # updates; in the first ones the number of threads is tried out
WINDOW = 4
FOREVER = 10**12  # steps


def sleeps(env_id):
    """Whether it is an emulated simulator."""
    return env_id.startswith("uneven:")


def list_rows(workload, args):
    """Name -> options of every run of a round. `parts` measures what the bound is made of, where
    nothing sleeps."""
    settings = {**WORKLOADS[workload], **COMMON}
    env_id = settings["env_id"]
    rows = {mode: {**settings, **MODES[mode]} for mode in args.modes}
    if args.compare:
        pass
    elif sleeps(env_id) and "sync" in args.modes:
        rows["sync" + EVEN] = rows["sync"] | {"env_id": env_id.replace("-v0", "Even-v0")}
    elif not sleeps(env_id) and args.script_folder == ROOT:
        rows["parts"] = settings
    if args.feed_forward:
        others = {name + FEED_FORWARD: {**rows[name], "lstm_layers": 0} for name in rows}
        rows |= others
    return rows


# In the process of one run


def measure_parts(options, _):
    """Seconds per step of collection and learning, measured alone."""
    sec = machinery.measure_parts(options, CORES, batch=options.num_envs)
    processes = max(1, options.num_workers)
    return {
        "collection_sec": sec["env"] / min(CORES, processes) + sec["forward"],
        "learning_sec": sec["learn"],
        "core_sec": (sec["env"] + sec["forward"] + sec["learn_one_thread"]) / CORES,
    }


def train(options, note):
    """ver_ppo.train as it is; calls `note(run, logs)` after every update."""
    write = ver_ppo.Run.write

    def write_and_note(run, steps, logs, *more):
        write(run, steps, logs, *more)
        note(run, logs)

    ver_ppo.Run.write = write_and_note
    ver_ppo.train(replace(options, runs_dir=os.getcwd()))


def measure_training(options, rollouts):
    """Rates, time spent in learning, what sleeping allows, and resident memory."""
    marks = []
    if not sleeps(options.env_id):
        rollouts *= 4
    options = replace(options, total_timesteps=rollouts * options.rollout_steps)
    train(options, lambda run, logs: marks.append((run.step, time.perf_counter(), logs)))
    steps, seconds, logs = zip(*marks[WARM_UP - 1 :])
    trained = steps[-1] - steps[0]
    trained_sec = seconds[-1] - seconds[0]
    windows = zip(steps, seconds, steps[WINDOW:], seconds[WINDOW:])

    def values(name):
        return np.array([update[name] for update in logs[1:]])

    learning_sec = values("time/learning_sec").sum()
    result = {
        "sps": trained / trained_sec,
        "sps_max": max((last - first) / (ended - began) for first, began, last, ended in windows),
        "learning_sec": learning_sec / trained,
        "learning_share": learning_sec / trained_sec,
        "lag_mean": values("ver/policy_lag_mean").mean(),
        "lag_max": float(values("ver/policy_lag_max").max()),
        "resident_mib": resident_mib("self"),
    }
    if sleeps(options.env_id):  # all N simulators at work all the time
        step_sec = values("time/env_step_ms").mean() / 1000
        result["collection_sec"] = step_sec / options.num_envs
    return result


def train_forever(options, _):
    """Train until the process is killed, and write a line to the file `marks` after each update:
    the steps so far, and when."""
    with open("marks", "w", buffering=1) as file:

        def note(run, _):
            file.write(f"{run.step} {time.perf_counter()}\n")

        endless = {"total_timesteps": FOREVER, "checkpoint_interval": FOREVER}
        train(replace(options, **endless), note)


def resident_mib(pid):
    """Resident memory of a process."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


# In the main process


def command_of(what, settings, *more):
    """The command that measures `training`, `parts` or `forever`, by the options in `settings`."""
    script = str(Path(__file__).resolve())
    options = json.dumps(settings)
    return [sys.executable, script, "--measure", what, "--options", options, *more]


def run(name, settings, folder, number, args):
    """One run, by the ver_ppo.py of this folder, in a process of its own; returns its result."""
    os.environ["SCRIPT_FOLDER"] = folder
    what = "parts" if name.startswith("parts") else "training"
    command = command_of(what, settings, "--rollouts", str(args.rollouts))
    result = run_apart(command, args.timeout)
    place = f" ({folder})" if args.compare else ""
    words = [f"{key} {value:.4g}" for key, value in result.items()]
    print(f"round {number}: {name}{place}:", *words, flush=True)
    return result


def add_bounds(results, rows):
    """Add each run's bound and its ratio to `sync` of the same network."""
    for name, found in results.items():
        if "sps" not in found:
            continue
        suffix = FEED_FORWARD if name.endswith(FEED_FORWARD) else ""
        alike = [
            results[other] for other in results if other.endswith(FEED_FORWARD) == bool(suffix)
        ]
        learning_sec = min(result["learning_sec"] for result in alike)
        ver = found if EVEN in name else results.get("ver" + suffix, found)
        parts = results.get("parts" + suffix, ver)  # where simulators sleep, a run knows how long
        collection_sec = parts.get("collection_sec", np.nan)
        sec = collection_sec + learning_sec
        if rows[name].get("overlap") or rows[name].get("sampler") == "async":
            sec = max(collection_sec, learning_sec, parts.get("core_sec", 0.0))
        found["bound"] = 1 / sec
        if sync := results.get("sync" + suffix):
            found["over_sync"] = found["sps"] / sync["sps"]
    return results


def show(values, digits=0):
    """Median and range."""
    low, median, high = np.percentile(values, (0, 50, 100))
    return f"{median:.{digits}f} ({low:.{digits}f}-{high:.{digits}f})"


def print_line(name, cells):
    """One line of a table."""
    print(f"{name:34}" + "".join(f"{cell:>22}" for cell in cells))


def print_table(workload, rounds):
    """One line for each mode: medians over the rounds, and ranges; then the paper's ratios, if the
    modes are there."""
    heads = "mean steps/s", "max", "x sync", "bound", "share of bound", "learning", "lag"
    print_line(f"{workload}, {len(rounds)} rounds", heads)
    for name, first in rounds[0].items():
        if "sps" not in first:
            continue
        column = {key: [results[name][key] for results in rounds] for key in first}
        share = [rate / bound for rate, bound in zip(column["sps"], column["bound"])]
        cells = [
            show(column["sps"]),
            f"{np.median(column['sps_max']):.0f}",
            show(column["over_sync"], 2) if "over_sync" in column else "-",
            f"{np.median(column['bound']):.0f}",
            show(share, 2),
            f"{np.median(column['learning_share']):.2f}",
            f"{np.mean(column['lag_mean']):.2f} / {max(column['lag_max']):.0f}",
        ]
        print_line(name, cells)
    for (over, under), paper in PAPER.items():
        if workload.startswith("a") and over in rounds[0] and under in rounds[0]:
            ratios = [results[over]["sps"] / results[under]["sps"] for results in rounds]
            print(f"{over} / {under}: {show(ratios, 2)}; in the paper {paper:.2f}")
    print(flush=True)


def print_comparison(workload, rounds):
    """One line for each mode: the rates of both scripts and their ratio, median and range, and the
    medians of memory."""
    heads = "this, steps/s", "the other", "ratio", "this, MiB", "the other"
    print_line(f"{workload}, {len(rounds)} rounds", heads)
    for name in rounds[0]:
        rates_R2 = np.array([[result["sps"] for result in results[name]] for results in rounds])
        mib_R2 = np.array([[each["resident_mib"] for each in results[name]] for results in rounds])
        this_R, other_R = rates_R2.T
        memory = [f"{mib:.0f}" for mib in np.median(mib_R2, axis=0)]
        print_line(name, [show(this_R), show(other_R), show(this_R / other_R, 3), *memory])
    print(flush=True)


def measure_rounds(workload, args):
    """All rounds of a workload: prints their table, returns every result."""
    rows = list_rows(workload, args)
    folders = (ROOT, args.compare) if args.compare else (args.script_folder,)
    rounds = []
    for number in range(1, args.rounds + 1):
        results = {}
        for name, settings in rows.items():
            results[name] = [run(name, settings, folder, number, args) for folder in folders]
        if not args.compare:
            results = add_bounds({name: result for name, (result,) in results.items()}, rows)
        rounds.append(results)
    print()
    print_results = print_comparison if args.compare else print_table
    print_results(workload, rounds)
    return {"options": rows, "rounds": rounds}


# Both versions alive, by turns


class StoppedRun:
    """A training without end that goes on only during its turns. Raises RuntimeError, with the end
    of its output, if it ends all the same."""

    def __init__(self, settings, script_folder, folder):
        os.environ["SCRIPT_FOLDER"] = script_folder
        folder.mkdir()
        self.marks = folder / "marks"
        self.output = folder / "output"
        with open(self.output, "w") as output:
            self.process = start_apart(command_of("forever", settings), folder, output)
        self.steps = 0  # at the last update of the turn before ...
        self.unlearned_sec = 0.0  # ... and how long that turn still went on

    def turn(self, seconds, updates=1):
        """Go on for so many seconds, and until there are so many updates. Returns the steps per
        second since the last update of the turn before, not counting the time that it was stopped.
        """
        began_at = time.perf_counter()
        signal_session(self.process, signal.SIGCONT)
        lines = []
        while time.perf_counter() < began_at + seconds or len(lines) < updates:
            time.sleep(0.02)
            if self.process.poll() is not None:
                raise RuntimeError(f"a training ended:\n{self.output.read_text()[-3000:]}")
            if self.marks.exists():
                lines = self.marks.read_text().splitlines()
                lines = [line for line in lines if float(line.split()[1]) > began_at]
        signal_session(self.process, signal.SIGSTOP)
        ended_at = time.perf_counter()
        steps, marked_at = map(float, lines[-1].split())
        rate = (steps - self.steps) / (self.unlearned_sec + marked_at - began_at)
        self.steps = steps
        self.unlearned_sec = ended_at - marked_at
        return rate

    def close(self):
        """End it."""
        kill_session(self.process)


def measure_pairs(workload, args):
    """A turn of this version and one of the other, --turns times for each mode: prints the ratio of
    their steps per second, returns all rates."""
    found = {}
    for mode in args.modes:
        overlapped = MODES[mode].get("overlap") or mode == "async"
        threads = 1 if overlapped else min(4, CORES)  # given, so that both have as many
        settings = WORKLOADS[workload] | COMMON | MODES[mode] | {"learner_threads": threads}
        with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
            runs = []
            for number, script_folder in enumerate((ROOT, args.compare)):
                stopped = StoppedRun(settings, script_folder, Path(name) / str(number))
                runs.append(stack.enter_context(contextlib.closing(stopped)))
                stopped.turn(0.0, WARM_UP)
            rate_T2 = alternate(mode, runs, args)
            mib_2 = [resident_mib(stopped.process.pid) for stopped in runs]
        ratio_T = rate_T2[:, 0] / rate_T2[:, 1]
        error = ratio_T.std(ddof=1) / np.sqrt(args.turns)
        ratio = f"{ratio_T.mean():.3f} ± {error:.3f}, median {np.median(ratio_T):.3f}"
        means = "{:.0f} and {:.0f} steps/s".format(*rate_T2.mean(axis=0))
        memory = "{:.0f} and {:.0f} MiB".format(*mib_2)
        size = f"{settings['num_workers']} workers, {args.turns} pairs"
        print(f"{workload}, {mode}, {size}: ratio {ratio}; {means}; {memory}", flush=True)
        found[mode] = {"options": settings, "sps": rate_T2.tolist(), "resident_mib": mib_2}
    return found


def alternate(mode, runs, args):
    """--turns pairs of turns of two runs, which begin by turns: steps per second, T x 2."""
    rate_T2 = np.zeros((args.turns, 2))
    for turn, rate_2 in enumerate(rate_T2):
        for which in (turn % 2, 1 - turn % 2):
            rate_2[which] = runs[which].turn(args.seconds)
        this, other = rate_2
        words = f"{this:.0f} and {other:.0f} steps/s, ratio {this / other:.3f}"
        print(f"pair {turn + 1}: {mode}: {words}", flush=True)
    return rate_T2


def measure_all(args):
    """All workloads; returns every result, and leaves the file --json whole after each one."""
    machine = {
        "cores": CORES,
        "processor": platform.machine(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
    }
    report = {"machine": machine, "workloads": {}}
    measure = measure_pairs if args.what == "pairs" else measure_rounds
    for workload in WORKLOADS:
        if workload[0] in args.workload:
            report["workloads"][workload] = measure(workload, args)
            if args.json:
                args.json.write_text(json.dumps(report, indent=2) + "\n")
    return report


def parse_arguments():
    """Those of the command line, checked."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    folder = {"type": os.path.abspath}
    of_pairs = "pairs: how many of each mode"
    of_turns = "pairs: how long each of both goes on"
    of_run = f"of each run, the warm-up of {WARM_UP} included"
    parser.add_argument("what", nargs="?", choices=("rounds", "pairs"), default="rounds")
    parser.add_argument("--workload", nargs="+", choices="abcd")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--turns", type=int, default=12, help=of_pairs)
    parser.add_argument("--seconds", type=float, default=6.0, help=of_turns)
    parser.add_argument("--rollouts", type=int, default=15, help=of_run)
    without = "every mode without LSTM, too"
    parser.add_argument("--feed-forward", action="store_true", help=without)
    given_up = "seconds after which a run is given up"
    parser.add_argument("--timeout", type=float, default=900.0, help=given_up)
    parser.add_argument("--json", type=Path, help="file to write")
    measured = "whose ver_ppo.py is measured"
    parser.add_argument("--script-folder", **folder, default=ROOT, help=measured)
    other = "folder of another ver_ppo.py, to be measured by turns"
    parser.add_argument("--compare", **folder, help=other)
    parser.add_argument("--measure", choices=MEASURES, help=argparse.SUPPRESS)
    parser.add_argument("--options", type=json.loads, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rollouts < WARM_UP + WINDOW:
        parser.error(f"--rollouts must be at least {WARM_UP + WINDOW}")
    if args.what == "pairs" and (not args.compare or args.turns < 2):
        parser.error("pairs needs --compare FOLDER, and --turns 2 at least")
    args.workload = args.workload or ("c" if args.what == "pairs" else "abcd")
    return args


MEASURES = {"training": measure_training, "parts": measure_parts, "forever": train_forever}

if __name__ == "__main__":
    arguments = parse_arguments()
    # ends as by Ctrl-C: no run is left behind
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    if arguments.measure:
        options = make_options(**arguments.options)
        print("\n" + json.dumps(MEASURES[arguments.measure](options, arguments.rollouts)))
    else:
        results = measure_all(arguments)
        if not arguments.json:
            print(json.dumps(results))
