"""A run among dying and hanging environments which is stopped and resumed, and the account that is
kept of it: for test_faults.py a short one, for benchmarks/soak.py half an hour.

The environments are `Numbered` (faulty_envs.py), which keep a book of the steps they are asked for;
the trainer, a process of its own that runs this module, writes down what it learns from.
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
from collections import Counter
from pathlib import Path

import numpy as np

import ver_ppo

ROOT = Path(__file__).resolve().parents[1]


def train(args, account):
    """In a process of its own: ver_ppo.main, which writes down the number of every step that it
    learns from, and whether that step was made up."""
    from tests.faulty_envs import number_of

    ppo_update = ver_ppo.ppo_update

    def update_and_note(policy, optimizer, rollout, *more):
        logs = ppo_update(policy, optimizer, rollout, *more)
        new = slice(rollout.rows)
        numbers = number_of(rollout.obs["number"][new].numpy())
        made_up = rollout["lost"][new]
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
    command = [sys.executable, "-m", "tests.soaking", str(account), *args]
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


def list_arguments(num_envs, num_steps, runs, more):
    """The command line of the run's first part."""
    words = f"--env-id tests.faulty_envs:Numbered-v0 --num-envs {num_envs} --num-steps {num_steps}"
    words += f" --num-workers {num_envs} --total-timesteps {10**8} --checkpoint-interval {10**8}"
    words += " --eval-episodes 0 --debug --max-worker-restarts 100000 --env-timeout 3"
    words += " --hidden-size 32 --update-epochs 4 --ent-coef 0"
    return [*words.split(), *more.split(), "--runs-dir", str(runs)]


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


def soak(minutes, part_minutes, death_sec, hang_sec, num_envs, folder, say, more=""):
    """The whole run, with `more` options. Returns a list of what went wrong, the account, and the
    run folder."""
    books = folder / "books"
    runs = folder / "runs"
    num_steps = 64
    books.mkdir()
    environ = os.environ | {
        "NUMBERED_BOOKS": str(books),
        "NUMBERED_DEATH_SEC": str(death_sec * num_envs),
        "NUMBERED_HANG_SEC": str(hang_sec * num_envs),
    }
    args = list_arguments(num_envs, num_steps, runs, more)
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
    # a run makes no semaphores: those are of other tests that run at the same time
    shared = {name for name in os.listdir("/dev/shm") if not name.startswith("sem.")}
    orphaned = still_there(list_orphaned, shared - shared_before)
    wrong += [f"shared memory left: {orphaned}"] * bool(orphaned)
    return wrong, sums, run


if __name__ == "__main__":
    sys.exit(train(sys.argv[2:], sys.argv[1]))
