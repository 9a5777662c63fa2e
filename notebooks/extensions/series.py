"""Evaluate a policy more than once: during its training, or every checkpoint of a finished run.
(DD-PPO and VER choose the checkpoint that is best in validation.)

    python ver_ppo.py --env-id pointnav --extensions "evaluate(every=200000)"
    python ver_ppo.py --env-id pointnav --extensions keep --checkpoint-interval 200000
    python -m notebooks.extensions.series RUN_FOLDER --eval-episodes 100
    python -m notebooks.extensions.series RUN_FOLDER --eval-episodes all

`evaluate` evaluates during training, too, about every 200,000 steps (with many GPUs, steps of
each): `--eval-episodes` episodes, the same each time. Training waits meanwhile. Then it continues
with the random numbers that it would have without the evaluation. TensorBoard shows the means as
eval/... The environments of training stay in memory, and those of the evaluation have other numbers
(`number` of ver_ppo.make_env).

`keep` keeps every checkpoint, and this program evaluates them later.

The folder RUN_FOLDER/evaluation then has series.csv, the means of each checkpoint, and a file
STEP.csv for each, with the numbers of every episode. `all` plays each episode of a validation split
once. The environment must say how many there are (`num_episodes`), as Habitat does. Then row i of
STEP.csv, after the header, is the split's episode i. If no checkpoints were kept, the last one is
evaluated.
"""

import contextlib
import csv
import io
import os
import random
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
import tyro

import ver_ppo
from notebooks.extensions.play import saved_options, saved_policy

USUAL = "spl", "success", "return"  # by which the best is chosen


class Keep(ver_ppo.Run):
    """Keep a copy of each checkpoint: RUN_FOLDER/checkpoints/STEP.pt."""

    def save(self):
        """As Run.save."""
        if not super().save():
            return False
        kept = self.folder / "checkpoints" / f"{self.step}.pt"
        kept.parent.mkdir(exist_ok=True)
        ver_ppo.write_file(kept, (self.folder / "checkpoint.pt").read_bytes())
        return True


class Evaluate(ver_ppo.Run):
    """Evaluate during training, too: about every `every` steps. With many ranks, these are the
    steps of one rank."""

    every: int = 200_000

    def __init__(self, options):
        """As Run.__init__."""
        if self.every < 1 or not options.eval_episodes:
            needed = "`every` and --eval-episodes must be positive"
            raise ver_ppo.UserError(f"--extensions evaluate(every={self.every}): {needed}")
        super().__init__(options)

    def log(self, rollout, logs):
        """As Run.log."""
        super().log(rollout, logs)
        at_end = self.step >= self.options.total_timesteps  # where `train` evaluates
        if at_end or not self.is_due_every(self.every):
            return
        ranks = int(os.environ.get("LOCAL_WORLD_SIZE", 1))  # on this machine
        signals = ver_ppo.caught_signals(self.interrupt)
        with signals, contextlib.suppress(ver_ppo.Interrupted), own_generators():
            # that of RankRun would end the process group
            ver_ppo.Run.evaluate(self, offset=ranks * self.options.num_envs)
        self.lap_at = time.perf_counter()  # this was no part of the next cycle

    def interrupt(self, number, frame):
        """End an evaluation because of a signal. The next `collect` then ends training."""
        self.note_signal(number, frame)
        raise ver_ppo.Interrupted(number)


@contextlib.contextmanager
def own_generators():
    """Keep Python's and numpy's global random numbers for what follows. With --num-workers 0, an
    evaluation's environments seed them in this process. (`play_episodes` keeps torch's.)"""
    python = random.getstate()
    numpy = np.random.get_state()
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


@dataclass(frozen=True)
class Options:
    """Evaluate the checkpoints that `--extensions keep` has kept, or otherwise the last one. Print
    the best."""

    run: tyro.conf.Positional[str]  # run folder
    # episodes for each checkpoint; all: each validation episode once, if their number is limited
    eval_episodes: int | Literal["all"] = 200
    greedy: bool = False  # take the most probable actions instead of sampling
    # metric that chooses the best; default: spl, otherwise success, otherwise return
    metric: str | None = None
    trust: bool = False  # import the code that the run names, because it is your own


def evaluate_series(options):
    """Evaluate a folder's checkpoints in order of their steps, and write the results. Returns the
    path of the best checkpoint. Raises UserError."""
    folder = Path(options.run).absolute()  # an environment may change the current folder
    path_of = {int(path.stem): path for path in folder.glob("checkpoints/*.pt")}
    last = folder / "checkpoint.pt"
    if not path_of:
        path_of[ver_ppo.load_checkpoint(last)["step"]] = last
    first = path_of[min(path_of)]
    run_options = saved_options(first, options.trust)
    if options.eval_episodes == "all":
        count = count_episodes(run_options)
    else:
        count = options.eval_episodes
    run_options = replace(run_options, eval_episodes=count, greedy=options.greedy)
    ver_ppo.check_options(run_options)
    names = ver_ppo.Spec(**ver_ppo.load_checkpoint(first)["spec"]).episode_columns
    metric = options.metric or [name for name in USUAL if name in names][0]
    if metric not in names:
        raise ver_ppo.UserError(f"--metric {metric}: must be one of {', '.join(names)}")
    results = folder / "evaluation"
    results.mkdir(exist_ok=True)
    rows = []
    for step, path in sorted(path_of.items()):
        spec, policy = saved_policy(run_options, path)
        print(f"step {step:,}: ", end="")
        episodes = io.BytesIO()
        means = ver_ppo.report_evaluation(policy, spec, run_options, episodes)
        ver_ppo.write_file(results / f"{step}.csv", episodes.getvalue())
        if means:  # at least one episode has ended
            rows.append({"step": step} | means)
    if not rows:
        raise ver_ppo.UserError("no episode of any checkpoint has ended")
    text = io.StringIO(newline="")
    table = csv.DictWriter(text, rows[0])
    table.writeheader()
    table.writerows(rows)
    ver_ppo.write_file(results / "series.csv", text.getvalue().encode())
    best = max(rows, key=lambda row: row[metric])
    path = path_of[best["step"]]
    print(f"best by {metric}: {path}, {best[metric]:.3f}; every episode: {results}")
    return path


def count_episodes(options):
    """The number of validation episodes. Raises UserError if the environment does not tell it."""
    env = ver_ppo.make_env(options, "val")
    count = getattr(env.unwrapped, "num_episodes", None)
    env.close()
    if count is None:
        reason = f"{options.env_id} does not say how many validation episodes it has"
        raise ver_ppo.UserError(f"--eval-episodes all: {reason} (num_episodes): give a number")
    return count


def main(argv=None):
    """Run the command line. Returns the exit status: 0, 1 if an environment failed or a file cannot
    be written, or 2 if something was refused."""
    options = tyro.cli(Options, args=argv)
    try:
        evaluate_series(options)
    except (ver_ppo.UserError, ver_ppo.EnvironmentFailure, OSError) as error:
        print(f"series.py: {error}", file=sys.stderr)
        return 2 if isinstance(error, ver_ppo.UserError) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
