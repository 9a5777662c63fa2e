"""A run among environments that die and hang. Signals stop it, --resume continues it, and an
account is kept of its steps. test_faults.py makes a short run, benchmarks/soak.py a long one.

The environments are `Numbered` (faulty_envs.py), which keep a book of the steps they are asked for.
The extension `Account` writes down the steps that the run learns from.
"""

import contextlib
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from array import array
from collections import Counter, defaultdict
from pathlib import Path

import numpy as np

import ver_ppo
from tests.faulty_envs import number_of
from tests.helpers import stop

ROOT = Path(__file__).resolve().parents[1]
STOPS = signal.SIGINT, signal.SIGKILL, signal.SIGTERM  # what ends the parts of a run, in turn
NUM_STEPS = 64


class Account(ver_ppo.Run):
    """Append a record of each update to a file: the step at which the update ends, and the steps
    that it learned from. Each of these is a tuple: number, lost or not, last of its episode or not.
    """

    file: str = ""

    def log(self, rollout, logs):
        """As Run.log, which may write a checkpoint. So a checkpoint has no update that is not in
        the account."""
        steps = rollout.complete
        numbers = number_of(steps["obs"]["number"])
        learned = list(zip(numbers, steps["lost"].tolist(), steps["done"].tolist()))
        with open(self.file, "ab") as file:
            pickle.dump((self.step + rollout.rows, learned), file)
        super().log(rollout, logs)


def unpickle(path):
    """Everything that was pickled into this file, one after the other."""
    with open(path, "ab+") as file:
        file.seek(0)
        while True:
            try:
                yield pickle.load(file)
            except (EOFError, pickle.UnpicklingError):  # the last one may be cut off
                return


def has_lost(account):
    """Whether a step of this account is lost."""
    return any(lost for _, steps in unpickle(account) for _, lost, _ in steps)


def read_books(paths):
    """The steps that each environment was asked for. Returns a list of lives for each environment,
    in order. A life is a list of numbers."""
    lives = defaultdict(list)
    for path in sorted(paths, key=lambda path: int(path.name.split("-")[1])):
        e = int(path.name.split("-")[0])
        numbers = array("I", path.read_bytes()).tolist()
        if numbers:
            lives[e].append([(e, *pair) for pair in zip(numbers[::2], numbers[1::2])])
    return lives


def check_order(learned):
    """The steps of one environment that are out of order. Each step must follow the step before it.
    If that step ended an episode, the next one must begin another."""
    wrong = []
    before = None
    for number, lost, done in learned:
        e, seed, step = number
        follows = step == 0 if before is None or before[1] else (e, seed, step - 1) == before[0]
        if not follows or (lost and not done):
            wrong.append(number)
        before = number, done
    return wrong


def check_environment(learned, lives):
    """Compare the steps of one environment that the run has learned from with its books. Returns
    the wrong steps, by kind, and a Counter of the steps.

    - The environment was asked for every step. (A lost one may have missed its worker, which died.)
    - A lost step is the last one of a life, so the environment was never asked for another.
    - The last step of a life is lost, except in the last life.
    - If the run has not learned from a step, it has not learned from any later one. When the run
      was stopped, these steps were in flight, or in a rollout that was not complete.
    """
    lost = {number for number, was_lost, _ in learned if was_lost}
    known = {number for number, _, _ in learned}
    asked = [number for life in lives for number in life]
    answered = {number for life in lives for number in life[:-1]}
    missing = [number for number in asked if number not in known]
    survived = [life[-1] for life in lives[:-1] if life[-1] in known - lost]
    unasked = lost - set(asked)
    wrong = {
        "out of order": check_order(learned),
        "never asked for": known - lost - set(asked),
        "lost, although answered": lost & answered,
        "left out, although a later one was learned": set(missing) - set(asked[-len(missing) :]),
        "not lost, although the environment died": survived if len(survived) > len(unasked) else (),
    }
    sums = {"asked": len(asked), "learned": len(known), "lost": len(lost), "missing": len(missing)}
    return wrong, Counter(sums)


def check_part(updates, books, most_missing):
    """Compare the updates of one part of the run with its books. Returns a list of mistakes, and
    the sums."""
    lives = read_books(books)
    learned = defaultdict(list)
    for _, steps in updates:
        for number, *ends in steps:
            learned[number[0]].append((number, *ends))
    found = []
    sums = Counter()
    for e in sorted(lives.keys() | learned.keys()):
        wrong, counted = check_environment(learned[e], lives[e])
        sums += counted
        for what, numbers in wrong.items():
            if numbers:
                found.append(f"{len(numbers)} steps {what}, such as {list(numbers)[:3]}")
    if sums["missing"] > most_missing:
        found.append(f"{sums['missing']} steps are missing, {most_missing} may be")
    return found, sums


def check_counters(updates, began, saved, stopped_by, interval):
    """Compare the counters of a part with its updates. The steps must continue from the step at
    which this part began, and the checkpoint must hold the last update. After SIGKILL it may be
    older, by at most `interval` steps and a rollout. Returns a list of mistakes."""
    wrong = []
    for ended, steps in updates:
        if ended != began + len(steps):
            wrong.append(f"an update of {len(steps)} steps after step {began} ends at {ended}")
        began = ended
    unsaved = began - saved
    most_rows = max(len(steps) for _, steps in updates)
    allowed = interval + most_rows if stopped_by == signal.SIGKILL else 0
    if not 0 <= unsaved <= allowed:
        wrong.append(f"the last update ends at step {began}, the checkpoint has {saved}")
    return wrong


def tree_of(pid):
    """All living processes below this one, and itself."""
    parents = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent = path.read_text().rsplit(")", 1)[1].split()[:2]
        except OSError:
            continue
        if state != "Z":
            parents[int(path.parent.name)] = int(parent)
    found = {pid}
    while more := {child for child, parent in parents.items() if parent in found} - found:
        found |= more
    return found & set(parents)


def list_orphaned(names):
    """Select the names of shared memory that no living process has mapped. (Other programs, such as
    other tests, use shared memory, too.)"""
    mapped = set()
    for path in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):
            lines = path.read_text().splitlines()
            mapped |= {int(line.split()[4]) for line in lines if "/dev/shm/" in line}
    orphaned = set()
    for name in names:
        with contextlib.suppress(FileNotFoundError):
            # by its number, for a semaphore is mapped under another name
            if os.stat(f"/dev/shm/{name}").st_ino not in mapped:
                orphaned.add(name)
    return orphaned


def still_there(look, found):
    """Call `look` with its own result again and again, for 10 s. Returns the last result."""
    until = time.monotonic() + 10
    while (found := look(found)) and time.monotonic() < until:
        time.sleep(0.1)
    return found


def weigh(pid, samples):
    """Append resident MiB and open files of the main process, and the number of all its
    processes."""
    while True:
        try:
            pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
            resident_mib = pages * os.sysconf("SC_PAGE_SIZE") / 2**20
            samples.append((resident_mib, len(os.listdir(f"/proc/{pid}/fd")), len(tree_of(pid))))
        except OSError:
            return
        time.sleep(1)


def one_part(command, account, seconds, number, environ):
    """Train for `seconds` after the first update. Then wait until the run has learned from a lost
    step, 60 s at most, and send a signal. The whole process group gets it, as from a terminal, but
    SIGKILL goes to the main process alone. Returns the output of the run, its exit status, the
    samples of `weigh` and the processes that are left."""
    pipes = {"stderr": subprocess.STDOUT, "stdout": subprocess.PIPE, "text": True}
    process = subprocess.Popen(command, cwd=ROOT, env=environ, start_new_session=True, **pipes)
    samples = []
    said = []
    threads = [
        threading.Thread(target=weigh, args=(process.pid, samples), daemon=True),
        threading.Thread(target=lambda: said.append(process.stdout.read()), daemon=True),
    ]
    for thread in threads:
        thread.start()
    until = time.monotonic() + 200
    while not account.exists() and process.poll() is None and time.monotonic() < until:
        time.sleep(0.05)
    everything = set()
    until_stopped = samples
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        until = time.monotonic() + 60
        while not has_lost(account) and process.poll() is None and time.monotonic() < until:
            time.sleep(0.05)
        everything = tree_of(process.pid)
        until_stopped = samples.copy()
        (os.kill if number == signal.SIGKILL else os.killpg)(process.pid, number)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGABRT)  # it prints where it is, see PYTHONFAULTHANDLER
            process.wait()
    for thread in threads:  # the reader ends with the last process that can write
        thread.join(10)
    # a process has closed its files a moment before it is gone
    left = still_there(lambda pids: [pid for pid in pids if tree_of(pid)], everything)
    stop([process.pid])
    return "".join(said), process.returncode, until_stopped, left


def make_command(num_envs, folder, interval, extensions):
    """The command line of every part, without `Account`. It begins a run in this folder, and
    continues that run the next time."""
    words = f"ver_ppo.py --env-id tests.faulty_envs:Numbered-v0 --resume {folder / 'run'}"
    words += f" --num-envs {num_envs} --num-workers {num_envs} --num-steps {NUM_STEPS}"
    words += f" --total-timesteps {10**8} --checkpoint-interval {interval}"
    words += " --max-worker-restarts 100000 --env-timeout 20 --eval-episodes 0"
    words += " --hidden-size 32 --update-epochs 4 --ent-coef 0"
    return [sys.executable, *words.split(), "--extensions", *extensions, "check"]


def check_leaks(samples, left):
    """Compare memory, files and processes in the second quarter of a part with the last quarter.
    Returns both in words, and a list of mistakes."""
    quarters = [part.mean(axis=0) for part in np.array_split(np.array(samples), 4)]
    before = quarters[1]
    after = quarters[3]
    units = "MiB", "files", "processes"
    words = [f"{a:.0f} -> {b:.0f} {unit}" for a, b, unit in zip(before, after, units)]
    found = f"{', '.join(words)}, left: {left}"
    grown = len(samples) > 120 and (after[0] > before[0] + 20 or after[1] > before[1] + 3)
    return found, [f"something leaks: {found}"] * bool(left or grown)


def soak(part_sec, parts, death_sec, hang_sec, num_envs, folder, say, extensions=()):
    """Make the whole run, with these `extensions`. Returns a list of mistakes, the sums, and the
    run folder."""
    books = folder / "books"
    run = folder / "run"
    books.mkdir()
    run.mkdir()
    environ = os.environ | {
        "PYTHONFAULTHANDLER": "1",
        "NUMBERED_BOOKS": str(books),
        "NUMBERED_DEATH_SEC": str(death_sec * num_envs),
        "NUMBERED_HANG_SEC": str(hang_sec * num_envs),
    }
    interval = 2 * num_envs * NUM_STEPS
    command = make_command(num_envs, folder, interval, extensions)
    # in flight, and in a rollout that is not complete; with extensions, in two of them, and in
    # trajectories
    most_missing = num_envs * ((3 if extensions else 1) * NUM_STEPS + 1)
    shared_before = set(os.listdir("/dev/shm"))
    read = set()
    wrong = []
    sums = Counter()
    counts = Counter()
    step = 0
    for part in range(parts):
        number = STOPS[part % len(STOPS)]
        account = folder / f"account {part}"
        more = f"tests.soaking:Account(file={account})"
        said, status, samples, left = one_part([*command, more], account, part_sec, number, environ)
        restarts = said.count("started again")
        words, leaks = check_leaks(samples, left)
        say(f"{restarts} workers started again; exit status {status}; {words}")
        killed = number == signal.SIGKILL
        # a collecting process that is slow to end is killed, and leaves tqdm's lock to the tracker
        leaked = "leaked" in said and not extensions
        if status != (-number if killed else 128 + number) or leaked:
            wrong.append(said[-3000:])
            break
        new = set(books.iterdir()) - read
        read |= new
        updates = list(unpickle(account))
        saved = ver_ppo.load_checkpoint(run / "checkpoint.pt")["step"]
        found, part_sums = check_part(updates, new, most_missing)
        wrong += leaks + found + check_counters(updates, step, saved, number, interval)
        for ended, steps in updates:
            if ended <= saved:  # the others are undone
                counts.update(number for number, *_ in steps)
        sums += part_sums + Counter({"started again": restarts})
        step = saved
        if wrong:
            break
    twice = [number for number, count in counts.items() if count > 1]
    wrong += [f"{len(twice)} steps twice, such as {twice[:3]}"] * bool(twice)
    if sum(counts.values()) != step:
        wrong.append(f"{sum(counts.values())} steps were learned, the checkpoint has {step}")
    # a run makes no semaphores: those belong to other tests that run at the same time
    shared = {name for name in os.listdir("/dev/shm") if not name.startswith("sem.")}
    orphaned = still_there(list_orphaned, shared - shared_before)
    wrong += [f"shared memory left: {orphaned}"] * bool(orphaned)
    return wrong, sums, run
