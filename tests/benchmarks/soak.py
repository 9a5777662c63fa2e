"""Train for half an hour in environments that die and hang, with stops in between, and check that
no step is lost.

    soak.py --minutes 30                            VER
    soak.py --minutes 30 --more "--extensions overlap"

There are 16 environments, each in a worker of its own. Every 10 s, one of them raises, exits,
segfaults or is killed. Every 30 s, one hangs. Every 5 minutes, Ctrl-C stops the run, and it is
resumed. --debug checks every rollout.

The environments number their steps and record them (`tests/faulty_envs.py`, Numbered). The trainer
records the steps that it learns from. At the end, the two records must agree: the policy learned
from every step once. There are two exceptions:

- Steps that were made or in flight since the last update before a stop. These are at most two
  rollouts (one that the policy learns from, and one that another process collects) and a step of
  each environment. They must be the last steps of a record.
- A step in which an environment died. The policy learned from its placeholder (reward 0,
  truncated), one for each restart.

Prints one line for each part of the run, and the result. The exit status is 1 if anything is wrong.
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
