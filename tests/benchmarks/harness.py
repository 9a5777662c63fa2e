"""Shared code of the benchmarks: run trainings as separate processes, read their curves, alternate
between variants, and keep results in files.

A benchmark writes its results, with command, commit, date and machine, to
notebooks/results/NAME.json, or to another folder with --results. tables.py makes the tables of
README.md and of the manual from these files. To measure an earlier commit, check it out elsewhere:

    git worktree add /tmp/before COMMIT
    python tests/benchmarks/speed.py versions --variant ". --env-id pointnav" \\
        --variant "/tmp/before --env-id pointnav"
"""

import argparse
import contextlib
import json
import multiprocessing
import os
import platform
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import replace
from io import StringIO
from pathlib import Path

import numpy as np
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(ROOT))
import ver_ppo  # noqa: E402
from tests.helpers import processes, stop  # noqa: E402
from tests.soaking import tree_of  # noqa: E402

RESULTS = ROOT / "notebooks" / "results"
SAMPLERS = {  # the options that make each
    "sync": "--sampler sync",
    "nover": "--sampler nover",
    "ver": "--sampler ver",
    "nover+overlap": "--sampler nover --extensions overlap",
    "ver+overlap": "--sampler ver --extensions overlap",
    "async": "--extensions async",
}
COMPARED = "sync", "nover", "ver"  # where only these matter
# spreads of `latency` with which 16 environments give the ratios of the VER paper's table 1 (one
# GPU): 174, 327 and 428 steps/s for these three
PAPER = {"spread": 0.6, "between": 0.1}
WARM_UP = 5  # updates that do not count

# -------------------------------------------------------------------------------------- Processes

LIVE = []  # processes that `execute` waits for


def execute(words, checkout=ROOT, seconds=None, timeout_sec=7200.0, **environment):
    """Run a command in a session of its own, and return its output. With `seconds`, it gets a
    Ctrl-C after that time, and another minute to end. In any case, none of its processes is left.

    Raises RuntimeError, with the end of its output, if it fails or outlives the timeout.
    """
    environ = os.environ | {"PYTHONPATH": str(HERE)} | environment  # for simulators.py
    with tempfile.TemporaryFile("w+") as output:
        how = {"stdout": output, "stderr": subprocess.STDOUT, "start_new_session": True}
        process = subprocess.Popen(words, cwd=checkout, env=environ, **how)
        LIVE.append(process)
        try:
            status = process.wait(seconds or timeout_sec)
        except subprocess.TimeoutExpired:
            status = f"none after {timeout_sec:.0f} s"
            if seconds:
                process.send_signal(signal.SIGINT)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(60)
                status = 0
        finally:
            end(process)
            LIVE.remove(process)
        output.seek(0)
        said = output.read()
    if status:
        raise RuntimeError(f"{shlex.join(words)}: exit status {status}\n{said[-3000:]}")
    return said


def end(process):
    """Kill a process that leads a session, its session, and the sessions of its children. (torchrun
    gives each rank a session.)"""
    known = processes()
    sessions = {known[pid][1] for pid in tree_of(process.pid) if pid in known}
    stop({process.pid, *sessions})
    process.wait()


def together(calls, at_once):
    """Call functions, at most `at_once` at the same time, and return their results. If a call
    fails, or after Ctrl-C, the processes that they wait for are ended."""
    with ThreadPoolExecutor(at_once) as pool:
        futures = [pool.submit(call) for call in calls]
        try:
            return [future.result() for future in futures]
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            for process in LIVE.copy():
                end(process)
            raise


def apart(function, *arguments):
    """Call a benchmark's function in a fresh process, and return its result. The process is a copy
    of a server that has imported the benchmark, so it starts at once."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("forkserver")) as pool:
        return pool.submit(function, *arguments).result()


# -------------------------------------------------------------------------------------- Trainings


class Trained:
    """A finished training.

    folder     its run folder
    said       its output
    seconds    how long it took
    curves     TensorBoard's curves: tag -> 3 x K (steps, values, times of writing)"""

    def __init__(self, folder, said="", seconds=0.0):
        self.folder = folder
        self.said = said
        self.seconds = seconds
        self.curves = {}
        events = EventAccumulator(str(folder), {"scalars": 0}).Reload()  # 0: every point
        for tag in events.Tags()["scalars"]:
            points = [(each.step, each.value, each.wall_time) for each in events.Scalars(tag)]
            self.curves[tag] = np.array(points).T

    @property
    def evaluation(self):
        """The results of its evaluation: name -> [mean, standard error]."""
        line = re.search(r"evaluation, \d+ .*", self.said)[0]
        found = re.findall(r"(\w+) (\S+) \+- ([\d.]+)", line)
        return {name: [float(mean), float(error)] for name, mean, error in found}

    def rate(self, first=WARM_UP):
        """Steps per second from the end of update `first` to the end of the last one. Raises
        RuntimeError if there are too few updates."""
        none = np.zeros((3, 0))
        steps, _, written_at = self.curves.get("charts/learning_rate", none)[:, first - 1 :]
        if len(steps) < 2:
            raise RuntimeError(f"less than {first + 1} updates: train for longer\n{self.said}")
        return float((steps[-1] - steps[0]) / (written_at[-1] - written_at[0]))

    def mean(self, tag, first=WARM_UP):
        """Mean of a tag's values in the updates after `first`."""
        return float(self.curves[tag][1, first:].mean())

    def per_step(self, tag):
        """As `mean`, for a tag that is logged for a whole update, divided by its steps."""
        steps, _, _ = self.curves[tag]
        return self.mean(tag) / float(np.diff(steps).mean())

    def last(self, tag):
        """The last value of a tag, or 0 if it has none."""
        return float(self.curves[tag][1, -1]) if tag in self.curves else 0.0

    def over_time(self, tags):
        """The points of these curves, one for each update: "steps", "seconds" since the first
        rollout began, and the values of each tag."""
        steps, _, written_at = self.curves["charts/learning_rate"]
        first_sec = sum(self.curves[f"time/{part}_sec"][1, 0] for part in ("rollout", "learning"))
        seconds = written_at - written_at[0] + first_sec
        found = {"steps": steps.astype(int).tolist(), "seconds": seconds.round(2).tolist()}
        for tag in tags:
            own_steps, values, _ = self.curves[tag]  # no values before the first episode has ended
            found[tag] = np.interp(steps, own_steps, values).round(4).tolist()
        return found

    def thin(self, tags, points=60):
        """A few points of each existing curve: tag -> [steps, values]."""
        found = {}
        for tag in sorted(set(tags) & set(self.curves)):
            steps, values, _ = self.curves[tag]
            chosen = np.unique(np.linspace(0, len(steps) - 1, points).astype(int))
            found[tag] = [steps[chosen].astype(int).tolist(), values[chosen].round(4).tolist()]
        return found


def train(arguments, runs_dir=None, ranks=0, script=None, **how):
    """Train with this command line in a process of its own, or with torchrun in `ranks` processes.
    Without `runs_dir`, no file is left. `how` has arguments of `execute`."""
    script = script or ("ver_multigpu.py" if ranks else "ver_ppo.py")
    launcher = f"-m torch.distributed.run --standalone --nproc-per-node {ranks} " if ranks else ""
    words = [sys.executable, *shlex.split(f"{launcher}{script} {arguments}")]
    with contextlib.ExitStack() as stack:
        runs_dir = Path(runs_dir or stack.enter_context(tempfile.TemporaryDirectory()))
        began_at = time.perf_counter()
        said = execute([*words, "--runs-dir", str(runs_dir)], **how)
        seconds = time.perf_counter() - began_at
        (folder,) = (path for path in runs_dir.iterdir() if path.is_dir())
        return Trained(folder, said, seconds)


def train_here(arguments):
    """As `train`, in this process. No file is left."""
    said = StringIO()
    with tempfile.TemporaryDirectory() as runs_dir:
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            began_at = time.perf_counter()
            status = ver_ppo.main([*shlex.split(arguments), "--runs-dir", runs_dir])
            seconds = time.perf_counter() - began_at
        if status:
            raise RuntimeError(f"{arguments}: exit status {status}\n{said.getvalue()[-3000:]}")
        (folder,) = Path(runs_dir).iterdir()
        return Trained(folder, said.getvalue(), seconds)


def train_once(arguments, place, **how):
    """As `train`, and move the run to `place`. A finished run that is already there is reused."""
    if not place.exists():
        unfinished = place.with_name(f"{place.name}.unfinished")
        shutil.rmtree(unfinished, ignore_errors=True)
        trained = train(arguments, unfinished, **how)
        trained.folder.rename(place)
        unfinished.rmdir()
        print(f"{place}: {trained.seconds:.0f} s", flush=True)
    return Trained(place)


@contextlib.contextmanager
def collecting(arguments):
    """Make the ver_ppo.Run of a command line in this process, and start it."""
    options = ver_ppo.parse_options(shlex.split(arguments))
    with tempfile.TemporaryDirectory() as runs_dir, contextlib.ExitStack() as stack:
        run = ver_ppo.Run(replace(options, runs_dir=runs_dir))
        stack.enter_context(contextlib.closing(run))
        run.start()
        stack.callback(run.stop)
        yield run


def learn(run, rollout):
    """Make one update of a run from a rollout."""
    run.update(run.advantages(rollout))


# ----------------------------------------------------------------------------------- Measurements


def spread(values, digits=0):
    """Median and range of numbers, as text. A single number has no range."""
    if len(values) == 1:
        return f"{values[0]:,.{digits}f}"
    low, middle, high = (f"{value:,.{digits}f}" for value in np.percentile(values, (0, 50, 100)))
    return f"{middle} ({low}–{high})"


def by_turns(variants, rounds):
    """Measure all variants in each round, so that a disturbance affects all of them. `variants`:
    name -> function that returns a dictionary of numbers. Returns the dictionaries of each round.
    Prints the medians of `sps` and their ratios to the first variant."""
    found = []
    for number in range(1, rounds + 1):
        results = {}
        for name, measure in variants.items():
            results[name] = measure()
            numbers = [f"{key} {value:.4g}" for key, value in results[name].items()]
            print(f"round {number}: {name}:", *numbers, flush=True)
        found.append(results)
    names = [name for name in variants if "sps" in found[0][name]]
    for name in names:
        sps = [results[name]["sps"] for results in found]
        ratios = [results[name]["sps"] / results[names[0]]["sps"] for results in found]
        print(f"{name}: {spread(sps)} steps/s, {spread(ratios, 2)} times the first", flush=True)
    return found


# ---------------------------------------------------------------------------------------- Results


def machine():
    """The machine of this process, as text."""
    info = Path("/proc/cpuinfo")
    models = re.findall(r"model name\s*: (.*)", info.read_text()) if info.exists() else []
    model = models[0] if models else platform.processor()
    cores = len(os.sched_getaffinity(0))
    gpu = f"{torch.cuda.get_device_name()}, " if torch.cuda.is_available() else ""
    return f"{gpu}{cores} core{'s' * (cores > 1)} of {model}, torch {torch.__version__}"


def where_and_when():
    """The commit, the date, the machine and the version of Python."""
    git = ["git", "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(git, cwd=ROOT, capture_output=True, text=True).stdout.strip()
    return {
        "commit": commit or "unknown",
        "date": time.strftime("%Y-%m-%d"),
        "machine": machine(),
        "python": platform.python_version(),
    }


def keep(args, name, **found):
    """Write results and this program's command line to NAME.json, with one line for each list of
    numbers. Paths of this machine are left out."""
    words = ["PATH" if "/" in word else word for word in sys.argv[1:]]
    command = f"python tests/benchmarks/{Path(sys.argv[0]).name} {shlex.join(words)}".strip()
    text = json.dumps({"command": command, **where_and_when(), **found}, indent=1)
    text = re.sub(r"(\[|\{)[^][{}]*(\]|\})", lambda inner: " ".join(inner[0].split()), text)
    args.results.mkdir(parents=True, exist_ok=True)
    (args.results / f"{name}.json").write_text(text + "\n")


def kept(args, name):
    """Read the results of a name, or {} if there are none."""
    path = args.results / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else {}


def command_line(doc):
    """Make the parser of a benchmark's command line. From now on, SIGTERM ends it like Ctrl-C, so
    that no process is left behind. (A job in the background of a script ignores Ctrl-C, and so
    would its own processes.)"""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=doc, formatter_class=raw)
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder for the results")
    return parser
