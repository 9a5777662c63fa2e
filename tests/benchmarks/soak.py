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
import functools
import sys
import tempfile
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
from tests.soaking import soak  # noqa: E402


def mean_returns(run):
    """The curve of mean returns of the last 100 episodes."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run)).Reload()
    return [event.value for event in events.Scalars("charts/episodic_return")]


if __name__ == "__main__":
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
