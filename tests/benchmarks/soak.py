"""Trains for half an hour in environments that die and hang, is stopped and resumed again and
again, and keeps account.

    soak.py --minutes 30                            VER
    soak.py --minutes 30 --more "--extensions overlap"

16 environments, each in a worker of its own: every 10 s one of them raises, exits, segfaults or is
killed, every 30 s one hangs, and every 5 minutes Ctrl-C stops the run, which is then resumed. The
environments number their steps and keep a book (`tests/faulty_envs.py`, Numbered); the trainer's
side writes down what it learns from. At the end the two must agree: every step was learned from
once, but for those that were made or in flight since the last update before a stop: two rollouts
(one that is learned from, one that another process collects meanwhile) and a step of each
environment at most, and always the last ones of a book. A step that an environment died in was
learned from as the placeholder that stands for it (made up: no reward, truncated), one for each
start. --debug checks every rollout meanwhile.

Prints one line for each part of the run and the account; exit status 1 if anything is wrong.
"""

import functools
import sys
import tempfile
from pathlib import Path

import harness
import numpy as np

from tests.soaking import soak

if __name__ == "__main__":
    parser = harness.command_line(__doc__)
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--part-minutes", type=float, default=5)
    parser.add_argument("--death-sec", type=float, default=10)
    parser.add_argument("--hang-sec", type=float, default=30)
    parser.add_argument("--more", default="", help="more arguments of the training")
    args = parser.parse_args()
    times = args.minutes, args.part_minutes, args.death_sec, args.hang_sec
    say = functools.partial(print, flush=True)
    with tempfile.TemporaryDirectory() as folder:
        how = {"num_envs": 16, "folder": Path(folder), "say": say, "more": args.more}
        wrong, sums, run = soak(*times, **how)
        _, returns, _ = harness.Trained(run).curves["charts/episodic_return"]
    account = ", ".join(f"{name}: {number}" for name, number in sums.items())
    tenths = [f"{part.mean():.0f}" for part in np.array_split(returns, 10)]
    print(account, "mean return in ten parts:", *tenths)
    print(*(wrong or ["nothing lost, nothing twice"]), sep="\n")
    sys.exit(bool(wrong))
