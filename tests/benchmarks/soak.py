"""Trains for half an hour in environments that die and hang, is stopped and resumed again and again, and keeps account.

    python tests/benchmarks/soak.py --minutes 30

16 environments, each in a worker of its own: every 10 s one of them raises, exits, segfaults or is killed, every 30 s one
hangs, and every 5 minutes Ctrl-C stops the run, which is then resumed. The environments number their steps and keep a book
(`tests/faulty_envs.py`, Numbered); the trainer's side writes down what it learns from. At the end the two must agree: every
complete step was learned from once, or stands in the last checkpoint. --debug checks every rollout meanwhile.

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
from itertools import pairwise
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))


def train(args, account):
    """In a process of its own: ver_ppo.main, that writes down the numbers of all steps that it learns from."""
    import ver_ppo

    from tests.faulty_envs import number_of

    learn = ver_ppo.learn

    def learn_and_note(policy, optimizer, rollout, records, *more):
        logs = learn(policy, optimizer, rollout, records, *more)
        numbers = number_of(rollout.obs["number"][rollout.complete.nonzero()[0]].numpy())
        with open(account, "ab") as file:
            pickle.dump(numbers, file)
        return logs

    ver_ppo.learn = learn_and_note
    return ver_ppo.main(args)


def unpickle(path):
    """Everything that was pickled into this file, one after the other."""
    with open(path, "rb") as file:
        while True:
            try:
                yield from pickle.load(file)
            except EOFError:
                return


def saved_numbers(folder):
    """Numbers of the complete steps that the checkpoint holds."""
    import torch
    import ver_ppo

    from tests.faulty_envs import number_of

    options = ver_ppo.parse_options(["--resume", str(folder)])
    spec, policy, _, _, snapshot, collector, (rollout,) = ver_ppo.prepare(options)
    collector.restore(snapshot)
    number_B3 = rollout.obs["number"][torch.from_numpy(rollout.complete[: rollout.size]).nonzero().flatten()]
    return number_of(number_B3.numpy()) if len(number_B3) else []


def read_books(folder):
    """What environments were asked for, and what they must have answered because they were asked for the next step."""
    asked, answered = set(), set()
    for path in folder.iterdir():
        book = array("I", path.read_bytes()).tolist()
        numbers = list(zip(book[::2], book[1::2]))
        asked.update(numbers)
        answered.update(number for number, _ in pairwise(numbers))
    return asked, answered


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
    """The whole run. Returns a list of what went wrong, and the account as a dictionary."""
    books, account, runs = folder / "books", folder / "account", folder / "runs"
    books.mkdir()
    environ = os.environ | {
        "NUMBERED_BOOKS": str(books),
        "NUMBERED_DEATH_SEC": str(death_sec * num_envs),
        "NUMBERED_HANG_SEC": str(hang_sec * num_envs),
    }
    os.environ.update(environ)
    args = ["--env-id", "tests.faulty_envs:Numbered-v0", "--num-envs", str(num_envs), "--num-workers", str(num_envs)]
    args += [
        "--num-steps",
        "64",
        "--total-timesteps",
        str(10**8),
        "--runs-dir",
        str(runs),
        "--eval-episodes",
        "0",
        "--debug",
    ]
    args += ["--max-worker-restarts", "100000", "--env-timeout", "3", "--checkpoint-interval", str(10**8)]
    args += ["--hidden-size", "32", "--norm-adv", "--update-epochs", "4", "--ent-coef", "0", "--vf-coef", "0.01"]
    shared_before, wrong, restarts = set(os.listdir("/dev/shm")), [], 0
    for _ in range(round(minutes / part_minutes)):
        said, status, samples, left = one_part(args, account, 60 * part_minutes, environ)
        (run,) = runs.iterdir()
        args = ["--resume", str(run)]
        again = said.count("started again")
        restarts += again
        quarters = [part.mean(axis=0) for part in np.array_split(np.array(samples), 4)]
        before, after = quarters[1], quarters[3]
        weights = ", ".join(f"{a:.0f} -> {b:.0f} {unit}" for a, b, unit in zip(before, after, ("MiB", "files", "processes")))
        say(f"{again} environments started again; {weights}; exit status {status}, left: {left}")
        if status != 130:
            wrong.append(said[-3000:])
        grown = len(samples) > 120 and (after[0] > before[0] + 20 or after[1] > before[1] + 3)
        if left or grown:
            wrong.append(f"something leaks: {weights}, left: {left}")
        if wrong:
            break
    learned, saved, (asked, answered) = list(unpickle(account)), saved_numbers(run), read_books(books)
    counts = Counter(learned + saved)
    lost, foreign = answered - counts.keys(), counts.keys() - asked
    twice = [number for number, count in counts.items() if count > 1]
    for name, what in (("lost", lost), ("never asked for", foreign), ("twice", twice)):
        wrong += [f"{len(what)} steps {name}, such as {list(what)[:3]}"] * bool(what)
    wrong += [f"shared memory left: {left}"] * bool(left := set(os.listdir("/dev/shm")) - shared_before)
    sums = {"asked": len(asked), "answered": len(answered), "learned": len(learned), "in the checkpoint": len(saved)}
    return wrong, {**sums, "started again": restarts}, run


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
        args = (
            options.minutes,
            options.part_minutes,
            options.death_sec,
            options.hang_sec,
            16,
            Path(folder),
            functools.partial(print, flush=True),
        )
        wrong, sums, run = soak(*args)
        curve = np.array(mean_returns(run))
    tenths = [f"{part.mean():.0f}" for part in np.array_split(curve, 10)]
    print(", ".join(f"{name}: {number}" for name, number in sums.items()), "mean return in ten parts:", *tenths)
    print(*(wrong or ["nothing lost, nothing twice, nothing left"]), sep="\n")
    sys.exit(bool(wrong))
