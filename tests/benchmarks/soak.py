"""Trains for half an hour in environments that die and hang, is stopped and resumed again and again, and keeps account.

    python tests/benchmarks/soak.py --minutes 30

16 environments, each in a worker of its own: every 10 s one of them raises, exits, segfaults or is killed, every 30 s one
hangs, and every 5 minutes Ctrl-C stops the run, which is then resumed. The environments number their steps and keep a book
(`tests/faulty_envs.py`, Numbered); the trainer's side writes down what it learns from. At the end the two must agree: every
step was learned from once, but for those that were made or in flight since the last update before a stop: one rollout and
a step of each environment at most, and always the last ones of a book. A step that an environment died in was learned from
as the made-up one that stands for it, one for each start. --debug checks every rollout meanwhile.

Prints one line for each part of the run and the account; exit status 1 if anything is wrong. Run by hand.
"""

import argparse
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


def train(args, account):
    """In a process of its own: ver_ppo.main, that writes down the number of every step that it learns from, and whether that
    step was made up."""
    import ver_ppo
    from tests.faulty_envs import number_of

    ppo_update = ver_ppo.ppo_update

    def update_and_note(policy, optimizer, rollout, *more):
        logs = ppo_update(policy, optimizer, rollout, *more)
        new = slice(int(rollout.size))
        numbers, made_up = number_of(rollout.obs["number"][new].numpy()), rollout.step_sec[new] == 0.0
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
    """Compare what one part of the run learned from with its books. Returns what is wrong, and the account."""
    made_up = {number for number, was_made_up in learned if was_made_up}
    known = {number for number, _ in learned}
    asked = {number for book in books for number in book}
    answered = {number for book in books for number in book[:-1]}  # because it was asked for the next step
    left, unanswered = (asked & answered) - known, asked - answered - known
    skipped = set()
    for book in books:
        last = max((index for index, number in enumerate(book) if number in known), default=0)
        skipped |= set(book[:last]) - known
    found = {
        "never asked for": known - made_up - asked,
        "answered and yet made up": answered & made_up,
        "lost: a later one was learned from": skipped,
        "left at the end, too many": left if len(left) > num_envs * (num_steps + 1) else (),
        "left without an answer, too many": unanswered if len(unanswered) > 2 * num_envs else (),
    }
    wrong = [f"{len(numbers)} steps {what}, such as {list(numbers)[:3]}" for what, numbers in found.items() if numbers]
    if not 0 <= restarts - len(made_up) <= len(unanswered):
        wrong.append(f"{restarts} starts, {len(made_up)} made-up steps and {len(unanswered)} left without an answer")
    sums = {"asked": len(asked), "answered": len(answered), "learned": len(learned), "made up": len(made_up)}
    return wrong, Counter(sums | {"left": len(left), "left without an answer": len(unanswered)})


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


def weigh(pid, samples):
    """Append resident MiB and open files of the main process, and the number of all its processes."""
    while True:
        try:
            resident = int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20
            samples.append((resident, len(os.listdir(f"/proc/{pid}/fd")), len(tree_of(pid))))
        except OSError:
            return
        time.sleep(1)


def one_part(args, account, seconds, environ):
    """Train for so many seconds, then Ctrl-C. Returns what it said, its exit status, its weights and whoever is left."""
    command = [sys.executable, __file__, "--train", str(account), *args]
    process = subprocess.Popen(command, cwd=ROOT, env=environ, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    samples, said = [], []
    readers = [
        threading.Thread(target=lambda pipe=pipe: said.append(pipe.read()), daemon=True)
        for pipe in (process.stderr, process.stdout)
    ]
    for thread in (threading.Thread(target=weigh, args=(process.pid, samples), daemon=True), *readers):
        thread.start()
    everybody, until_stopped = set(), samples
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        everybody, until_stopped = tree_of(process.pid), samples.copy()
        process.send_signal(signal.SIGINT)
        process.wait(60)
    for reader in readers:  # they end with the last process that can write
        reader.join(10)
    left = [pid for pid in everybody if tree_of(pid)]
    return "".join(said), process.returncode, until_stopped, left


def soak(minutes, part_minutes, death_sec, hang_sec, num_envs, folder, say):
    """The whole run. Returns a list of what went wrong, the account, and the run folder."""
    books, runs, num_steps = folder / "books", folder / "runs", 64
    books.mkdir()
    environ = os.environ | {
        "NUMBERED_BOOKS": str(books),
        "NUMBERED_DEATH_SEC": str(death_sec * num_envs),
        "NUMBERED_HANG_SEC": str(hang_sec * num_envs),
    }
    args = f"--env-id tests.faulty_envs:Numbered-v0 --num-envs {num_envs} --num-workers {num_envs} --num-steps {num_steps}"
    args += f" --runs-dir {runs} --total-timesteps {10**8} --checkpoint-interval {10**8} --eval-episodes 0 --debug"
    args += " --max-worker-restarts 100000 --env-timeout 3 --hidden-size 32 --norm-adv --update-epochs 4 --ent-coef 0"
    args = [*args.split(), "--vf-coef", "0.01"]
    shared_before, seen, wrong, sums, counts = set(os.listdir("/dev/shm")), set(), [], Counter(), Counter()
    for part in range(round(minutes / part_minutes)):
        account = folder / f"account {part}"
        said, status, samples, left = one_part(args, account, 60 * part_minutes, environ)
        (run,) = runs.iterdir()
        args, restarts = ["--resume", str(run)], said.count("started again")
        quarters = [part.mean(axis=0) for part in np.array_split(np.array(samples), 4)]
        before, after = quarters[1], quarters[3]
        weights = ", ".join(f"{a:.0f} -> {b:.0f} {unit}" for a, b, unit in zip(before, after, ("MiB", "files", "processes")))
        say(f"{restarts} environments started again; {weights}; exit status {status}, left: {left}")
        if status != 130:
            wrong.append(said[-3000:])
        grown = len(samples) > 120 and (after[0] > before[0] + 20 or after[1] > before[1] + 3)
        if left or grown:
            wrong.append(f"something leaks: {weights}, left: {left}")
        mine, seen = [read_book(path) for path in set(books.iterdir()) - seen], set(books.iterdir())
        learned = list(unpickle(account))
        found, part_sums = check_part(learned, mine, restarts, num_envs, num_steps)
        counts.update(number for number, _ in learned)
        wrong, sums = wrong + found, sums + part_sums + Counter({"started again": restarts})
        if wrong:
            break
    twice = [number for number, count in counts.items() if count > 1]
    wrong += [f"{len(twice)} steps twice, such as {twice[:3]}"] * bool(twice)
    shared = set(os.listdir("/dev/shm")) - shared_before
    time.sleep(1)  # names that other programs are about to unlink are gone by then
    shared &= set(os.listdir("/dev/shm"))
    wrong += [f"shared memory left: {shared}"] * bool(shared)
    return wrong, sums, run


def mean_returns(run):
    """The curve of mean returns of the last 100 episodes."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    return [event.value for event in EventAccumulator(str(run)).Reload().Scalars("charts/episodic_return")]


if __name__ == "__main__":
    if sys.argv[1:2] == ["--train"]:
        sys.exit(train(sys.argv[3:], sys.argv[2]))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--part-minutes", type=float, default=5)
    parser.add_argument("--death-sec", type=float, default=10)
    parser.add_argument("--hang-sec", type=float, default=30)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        say = functools.partial(print, flush=True)
        args = options.minutes, options.part_minutes, options.death_sec, options.hang_sec
        wrong, sums, run = soak(*args, num_envs=16, folder=Path(folder), say=say)
        curve = np.array(mean_returns(run))
    tenths = [f"{part.mean():.0f}" for part in np.array_split(curve, 10)]
    print(", ".join(f"{name}: {number}" for name, number in sums.items()), "mean return in ten parts:", *tenths)
    print(*(wrong or ["nothing lost, nothing twice"]), sep="\n")
    sys.exit(bool(wrong))
