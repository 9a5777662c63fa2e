"""What a trained PointNav agent is worth on other tasks: the variants of DD-PPO section 6, on Flee
and Explore.

    python tests/benchmarks/transfer.py --checkpoint FILE    FILE: of a run of `pointnav`

Each run is a ver_ppo.py of its own, on the built-in simulator, and ends with the evaluation of 200
validation episodes. What came out is kept in notebooks/results/transfer.json, of which all.py makes
the manual's table and picture; runs that are there already are not repeated. Two minutes each.
"""

import argparse
import json
import tempfile
from pathlib import Path

import numpy as np
from results import draw, header, keep, read_curves, run_command, where_and_when

TASKS = {"Flee": "m from the start", "Explore": "m² seen"}
VARIANTS = {  # what is taken from the checkpoint
    "from scratch": "",
    "frozen encoder, policy anew": "--init-from {} --freeze-encoder --reset policy",
    "frozen encoder, policy fine-tuned": "--init-from {} --freeze-encoder --reset critic",
    "neural controller": (
        "--init-from {} --policy notebooks.extensions.controller:NeuralController"
    ),
}
FILE = draw.RESULTS / "transfer.json"
COMMAND = "python tests/benchmarks/transfer.py --checkpoint FILE"


def train(task, variant, seed, args):
    """One run: its evaluation's mean return and standard error, and its curves."""
    line = f"python ver_ppo.py --env-id notebooks.environments.tasks:{task}-v0"
    line += f" --env-kwargs simulator=builtin --seed {seed}"
    line += f" --total-timesteps {args.total_timesteps}"
    if VARIANTS[variant]:
        line += " " + VARIANTS[variant].format(args.checkpoint.resolve())
    with tempfile.TemporaryDirectory() as folder:
        run, evaluation = run_command(line, folder)
        print(f"{task}, {variant}, seed {seed}: {evaluation}", flush=True)
        tag = "charts/episodic_return"
        return {"seed": seed, "evaluation": evaluation, "curves": {tag: read_curves(run)[tag]}}


def train_all(args):
    """All that is missing; one seed of everything after the other, so that whatever disturbs,
    disturbs all."""
    found = {"command": COMMAND, "runs": {}}
    if FILE.exists():
        found = json.loads(FILE.read_text())
    for seed in args.seeds:
        for task in TASKS:
            for variant in args.variants:
                runs = found["runs"].setdefault(task, {}).setdefault(variant, [])
                if seed not in [run["seed"] for run in runs]:
                    runs.append(train(task, variant, seed, args))
                    keep("transfer", found | where_and_when())


def table(runs):
    """Mean and range of the seeds' evaluations."""
    lines = header("", *(f"{task}: {what}" for task, what in TASKS.items()))
    for variant in VARIANTS:
        cells = []
        for task in TASKS:
            means = [run["evaluation"]["return"][0] for run in runs[task][variant]]
            cells.append(f"{np.mean(means):.1f} ({min(means):.1f} to {max(means):.1f})")
        lines.append(f"| {variant} | {' | '.join(cells)} |")
    return lines


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--total-timesteps", type=int, default=200_000)
    train_all(parser.parse_args())
