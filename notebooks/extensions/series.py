"""Keep every checkpoint of a run, and evaluate them as a series. (DD-PPO and VER choose the
checkpoint that is best in validation.)

    python ver_ppo.py --env-id pointnav --extensions keep --checkpoint-interval 200000
    python -m notebooks.extensions.series RUN_FOLDER --eval-episodes 100
"""

import csv
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import tyro

import ver_ppo

USUAL = "spl", "success", "return"  # by which the best is chosen


class Keep(ver_ppo.Run):
    """Each checkpoint that is written is kept, too: RUN_FOLDER/checkpoints/STEP.pt."""

    def open_folder(self):
        folder = super().open_folder()
        write = folder.write_checkpoint

        def write_and_keep(content):
            write(content)
            if folder.path is None:  # a rank above 0
                return
            kept = folder.path / "checkpoints" / f"{content['step']}.pt"
            kept.parent.mkdir(exist_ok=True)
            written = (folder.path / "checkpoint.pt").read_bytes()
            ver_ppo.write_file(kept, lambda file: file.write(written))

        folder.write_checkpoint = write_and_keep
        return folder


@dataclass(frozen=True)
class Options:
    """Evaluate the checkpoints that `--extensions keep` has kept; name the best."""

    run: tyro.conf.Positional[str]  # run folder
    eval_episodes: int = 200  # of each checkpoint
    greedy: bool = False  # with the most probable actions instead of sampled ones
    # by which the best is chosen; default: the first of spl, success and return that there is
    metric: str | None = None


def evaluate_series(options):
    """Evaluate a folder's checkpoints, in order of their steps, and write series.csv. Returns the
    path of the best. Raises UserError."""
    kept = sorted(Path(options.run).glob("checkpoints/*.pt"), key=lambda path: int(path.stem))
    if not kept:
        raise ver_ppo.UserError(f"{options.run} has no checkpoints: train with --extensions keep")
    words = ["--checkpoint", str(kept[0]), "--eval-episodes", str(options.eval_episodes)]
    run_options = replace(ver_ppo.parse_options(words), greedy=options.greedy)
    spec, policy = ver_ppo.build(run_options)
    names = spec.episode_columns
    metric = options.metric or [name for name in USUAL if name in names][0]
    if metric not in names:
        raise ver_ppo.UserError(f"--metric {metric}: must be one of {', '.join(names)}")
    rows = []
    for path in kept:
        ver_ppo.load_policy(policy, path)
        print(f"step {int(path.stem):,}: ", end="")
        means = ver_ppo.report_evaluation(policy, spec, run_options)
        if not means:  # no episode has ended
            continue
        rows.append({"step": int(path.stem)} | {tag.partition("/")[2]: means[tag] for tag in means})
    if not rows:
        raise ver_ppo.UserError("no episode of any checkpoint has ended")
    with open(Path(options.run) / "series.csv", "w", newline="") as file:
        table = csv.DictWriter(file, rows[0])
        table.writeheader()
        table.writerows(rows)
    best = max(rows, key=lambda row: row[metric])
    path = Path(options.run) / "checkpoints" / f"{best['step']}.pt"
    print(f"best by {metric}: {path}, {best[metric]:.3f}")
    return path


def main(argv=None):
    """Run the command line. Returns the exit status: 0, or 1 if an environment failed, 2 if
    something was refused."""
    options = tyro.cli(Options, args=argv)
    try:
        evaluate_series(options)
    except (ver_ppo.UserError, ver_ppo.EnvironmentFailure) as error:
        print(f"series.py: {error}", file=sys.stderr)
        return 2 if isinstance(error, ver_ppo.UserError) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
