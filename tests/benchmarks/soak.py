"""Train for half an hour in environments that die and hang, stop the run and continue it again and
again, and check that no step is learned twice and none disappears.

    soak.py --minutes 30                              VER
    soak.py --minutes 30 --extensions overlap

There are 16 environments, each in a worker of its own. Every 10 s, one of them raises, exits,
segfaults or is killed. Every 30 s, one hangs. Every 5 minutes, Ctrl-C, SIGKILL or SIGTERM ends the
run, in turn, and --resume continues it. `--extensions check` checks every rollout.

The environments number their steps and record them (`tests/faulty_envs.py`, Numbered). The run
records the steps that it learns from (`tests/soaking.py`, Account). At the end of each part, the
two records must agree: the policy learned from every step once, in order. There are two exceptions:

- Steps that were in flight, or in a rollout that was not complete, when the part ended. They are
  the last ones that their environment was asked for.
- Lost steps, in which an environment died. Each is in a rollout, marked as lost.

The next part begins with the step, and the account, of the last checkpoint. Ctrl-C and SIGTERM save
every update; SIGKILL undoes those since the last checkpoint.

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
    parser.add_argument("--extensions", nargs="*", default=[], help="of the training")
    args = parser.parse_args()
    part_sec = 60 * args.part_minutes
    parts = round(args.minutes / args.part_minutes)
    say = functools.partial(print, flush=True)
    with tempfile.TemporaryDirectory() as folder:
        how = {"num_envs": 16, "folder": Path(folder), "say": say, "extensions": args.extensions}
        wrong, sums, run = soak(part_sec, parts, args.death_sec, args.hang_sec, **how)
        _, returns, _ = harness.Trained(run).curves["charts/episodic_return"]
    account = ", ".join(f"{name}: {number}" for name, number in sums.items())
    tenths = [f"{part.mean():.0f}" for part in np.array_split(returns, 10)]
    print(account, "mean return in ten parts:", *tenths)
    print(*(wrong or ["nothing disappeared, nothing twice"]), sep="\n")
    sys.exit(bool(wrong))
