"""Trains for half an hour in environments that die and hang, is stopped and resumed again and
again, and keeps account.

    python tests/benchmarks/soak.py --minutes 30

16 environments, each in a worker of its own: every 10 s one of them raises, exits, segfaults or is
killed, every 30 s one hangs, and every 5 minutes Ctrl-C stops the run, which is then resumed. The
environments number their steps and keep a book (`tests/faulty_envs.py`, Numbered); the trainer's
side writes down what it learns from. At the end the two must agree: every step was learned from
once, but for those that were made or in flight since the last update before a stop: two rollouts
(one that is learned from, one that another process collects meanwhile) and a step of each
environment at most, and always the last ones of a book. A step that an environment died in was
learned from as the placeholder that stands for it (made up: no reward, truncated), one for each
start. --debug checks every rollout meanwhile.

Prints one line for each part of the run and the account; exit status 1 if anything is wrong. Run by
hand.
"""

import argparse
import contextlib
import functools
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
import time
from array import array
from collections import Counter
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
import ver_ppo  # noqa: E402


def train(args, account):
    """In a process of its own: ver_ppo.main, which writes down the number of every step that it
    learns from, and whether that step was made up."""
    from tests.faulty_envs import number_of

    ppo_update = ver_ppo.ppo_update

    def update_and_note(policy, optimizer, rollout, *more):
        logs = ppo_update(policy, optimizer, rollout, *more)
        new = slice(rollout.size)
        numbers = number_of(rollout.obs["number"][new].numpy())
        made_up = rollout.step_sec[new] == 0.0
        with open(account, "ab") as file:
            pickle.dump(list(zip(numbers, made_up.tolist())), file)
        return logs

    ver_ppo.ppo_update = update_and_note
    return ver_ppo.main(args)


def unpickle(path):
    """Everything that was pickled into this file, one after the other."""
    with open(path, "ab+") as file:
        file.seek(0)
        while True:
            try:
                yield from pickle.load(file)
            except EOFError:
                return


def read_book(path):
    """The steps that an environment was asked for in one life, in order."""
    numbers = array("I", path.read_bytes()).tolist()
    return list(zip(numbers[::2], numbers[1::2]))


def check_part(learned, books, restarts, num_envs, num_steps):
    """Compare what one part of the run learned from with its books. Returns what is wrong, and the
    account."""
    made_up = {number for number, was_made_up in learned if was_made_up}
    known = {number for number, _ in learned}
    asked = {number for book in books for number in book}
    # because it was asked for the next step
    answered = {number for book in books for number in book[:-1]}
    left = (asked & answered) - known
    most = num_envs * (2 * num_steps + 1)
    unanswered = asked - answered - known
    # in flight at the end, or died with, by a placeholder that was not learned from any more
    open_steps = num_envs + restarts - len(made_up)
    skipped = set()
    for book in books:
        last = max((index for index, number in enumerate(book) if number in known), default=0)
        skipped |= set(book[:last]) - known
    found = {
        "never asked for": known - made_up - asked,
        "answered and yet made up": answered & made_up,
        "lost: a later one was learned from": skipped,
        "left at the end, too many": left if len(left) > most else (),
        "left without an answer, too many": unanswered if len(unanswered) > open_steps else (),
    }
    wrong = []
    for what, numbers in found.items():
        if numbers:
            wrong.append(f"{len(numbers)} steps {what}, such as {list(numbers)[:3]}")
    if not 0 <= restarts - len(made_up) <= len(unanswered):
        rest = f"{len(made_up)} made-up steps and {len(unanswered)} left without an answer"
        wrong.append(f"{restarts} starts, {rest}")
    sums = {
        "asked": len(asked),
        "answered": len(answered),
        "learned": len(learned),
        "made up": len(made_up),
        "left": len(left),
        "left without an answer": len(unanswered),
    }
    return wrong, Counter(sums)


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
    """Those of these names of shared memory that no living process has mapped: other programs, such
    as other tests, have theirs."""
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
    """What `look` finds of these again and again, for 10 s."""
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


def one_part(args, account, seconds, environ):
    """Train for so many seconds from the first update on, then Ctrl-C. Returns what it said, its
    exit status, its weights and the processes that are left."""
    command = [sys.executable, __file__, "--train", str(account), *args]
    pipes = {"stderr": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    process = subprocess.Popen(command, cwd=ROOT, env=environ, **pipes)
    samples = []
    said = []

    def read(pipe):
        said.append(pipe.read())

    threads = [threading.Thread(target=weigh, args=(process.pid, samples), daemon=True)]
    for pipe in (process.stderr, process.stdout):
        threads.append(threading.Thread(target=read, args=(pipe,), daemon=True))
    for thread in threads:
        thread.start()
    everything = set()
    until_stopped = samples
    until = time.monotonic() + 60
    while not account.exists() and time.monotonic() < until:
        time.sleep(0.1)
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        everything = tree_of(process.pid)
        until_stopped = samples.copy()
        process.send_signal(signal.SIGINT)
        process.wait(60)
    for thread in threads:  # the readers end with the last process that can write
        thread.join(10)
    # a process has closed its files a moment before it is gone
    left = still_there(lambda pids: [pid for pid in pids if tree_of(pid)], everything)
    return "".join(said), process.returncode, until_stopped, left


def list_arguments(num_envs, num_steps, runs):
    """The command line of the run's first part."""
    words = f"--env-id tests.faulty_envs:Numbered-v0 --num-envs {num_envs} --num-steps {num_steps}"
    words += f" --num-workers {num_envs} --total-timesteps {10**8} --checkpoint-interval {10**8}"
    words += " --eval-episodes 0 --debug --max-worker-restarts 100000 --env-timeout 3"
    words += " --hidden-size 32 --update-epochs 4 --ent-coef 0"
    return [*words.split(), "--runs-dir", str(runs)]


def check_leaks(samples, left):
    """Whether memory, files or processes have grown within a part: the second quarter's means and
    the last one's. Returns them in words, and what is wrong."""
    quarters = [part.mean(axis=0) for part in np.array_split(np.array(samples), 4)]
    before = quarters[1]
    after = quarters[3]
    units = "MiB", "files", "processes"
    words = [f"{a:.0f} -> {b:.0f} {unit}" for a, b, unit in zip(before, after, units)]
    found = f"{', '.join(words)}, left: {left}"
    grown = len(samples) > 120 and (after[0] > before[0] + 20 or after[1] > before[1] + 3)
    return found, [f"something leaks: {found}"] * bool(left or grown)


def soak(minutes, part_minutes, death_sec, hang_sec, num_envs, folder, say):
    """The whole run. Returns a list of what went wrong, the account, and the run folder."""
    books = folder / "books"
    runs = folder / "runs"
    num_steps = 64
    books.mkdir()
    environ = os.environ | {
        "NUMBERED_BOOKS": str(books),
        "NUMBERED_DEATH_SEC": str(death_sec * num_envs),
        "NUMBERED_HANG_SEC": str(hang_sec * num_envs),
    }
    args = list_arguments(num_envs, num_steps, runs)
    shared_before = set(os.listdir("/dev/shm"))
    trial = ver_ppo.derive_seed(False, 1, 0, ver_ppo.TRIAL + 1)  # of --seed 1
    read = set()
    wrong = []
    sums = Counter()
    counts = Counter()
    for part in range(round(minutes / part_minutes)):
        account = folder / f"account {part}"
        said, status, samples, left = one_part(args, account, 60 * part_minutes, environ)
        (run,) = runs.iterdir()
        args = ["--resume", str(run)]
        restarts = said.count("started again")
        words, leaks = check_leaks(samples, left)
        say(f"{restarts} environments started again; exit status {status}; {words}")
        if status != 130:
            wrong.append(said[-3000:])
        new = set(books.iterdir()) - read
        read |= new
        learned = list(unpickle(account))
        mine = [book for book in map(read_book, new) if (trial, 0) not in book]
        found, part_sums = check_part(learned, mine, restarts, num_envs, num_steps)
        counts.update(number for number, _ in learned)
        sums += part_sums + Counter({"started again": restarts})
        wrong += leaks + found
        if wrong:
            break
    twice = [number for number, count in counts.items() if count > 1]
    wrong += [f"{len(twice)} steps twice, such as {twice[:3]}"] * bool(twice)
    # what a killed program leaves is unlinked a moment later
    orphaned = still_there(list_orphaned, set(os.listdir("/dev/shm")) - shared_before)
    wrong += [f"shared memory left: {orphaned}"] * bool(orphaned)
    return wrong, sums, run


def mean_returns(run):
    """The curve of mean returns of the last 100 episodes."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run)).Reload()
    return [event.value for event in events.Scalars("charts/episodic_return")]


if __name__ == "__main__":
    if sys.argv[1:2] == ["--train"]:
        sys.exit(train(sys.argv[3:], sys.argv[2]))
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--part-minutes", type=float, default=5)
    parser.add_argument("--death-sec", type=float, default=10)
    parser.add_argument("--hang-sec", type=float, default=30)
    options = parser.parse_args()
    times = options.minutes, options.part_minutes, options.death_sec, options.hang_sec
    with tempfile.TemporaryDirectory() as folder:
        say = functools.partial(print, flush=True)
        wrong, sums, run = soak(*times, num_envs=16, folder=Path(folder), say=say)
        curve = np.array(mean_returns(run))
    tenths = [f"{part.mean():.0f}" for part in np.array_split(curve, 10)]
    account = ", ".join(f"{name}: {number}" for name, number in sums.items())
    print(account, "mean return in ten parts:", *tenths)
    print(*(wrong or ["nothing lost, nothing twice"]), sep="\n")
    sys.exit(bool(wrong))
