"""What a trained PointNav agent is worth on other tasks: the variants of DD-PPO section 6, on Flee and Explore.

    python tests/benchmarks/transfer.py --checkpoint FILE      FILE: checkpoint.pt of a run of `--env-id pointnav`

Each run is a ver_ppo.py of its own, on the built-in simulator, and ends with the evaluation of 200 validation episodes.
Run by hand; prints one line for each run, then mean (lowest to highest) of the seeds; --json keeps all, with the curves.
"""

import argparse
import tempfile
from pathlib import Path

import numpy as np
from results import dump, read_curves, run_command

TASKS = ("Flee", "Explore")
VARIANTS = {  # what is taken from the checkpoint
    "from scratch": "",
    "frozen encoder, policy anew": "--init-from {} --freeze-encoder --reset-policy",
    "frozen encoder, policy fine-tuned": "--init-from {} --freeze-encoder --reset-critic",
}


def train(task, variant, seed, args):
    """One run: its evaluation's mean return and standard error, and its curves."""
    with tempfile.TemporaryDirectory() as folder:
        line = f"python ver_ppo.py --env-id notebooks.tasks:{task}-v0 --simulator builtin --seed {seed}"
        more = f"--total-timesteps {args.total_timesteps} {VARIANTS[variant].format(args.checkpoint.resolve())}"
        run, evaluation = run_command(f"{line} {more}", folder)
        print(f"{task}, {variant}, seed {seed}: {evaluation}", flush=True)
        return {"seed": seed, "evaluation": evaluation, "curves": read_curves(run)}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--total-timesteps", type=int, default=200_000)
    parser.add_argument("--json", type=Path, help="file to write")
    arguments = parser.parse_args()
    found = {task: {variant: [] for variant in VARIANTS} for task in TASKS}
    for number in arguments.seeds:  # one seed of everything after the other: whatever disturbs, disturbs all
        for task, variants in found.items():
            for variant, runs in variants.items():
                runs.append(train(task, variant, number, arguments))
    for task, variants in found.items():
        for variant, runs in variants.items():
            returns = [run["evaluation"]["return"][0] for run in runs]
            print(f"{task}, {variant}: {np.mean(returns):.2f} ({min(returns):.2f} to {max(returns):.2f})")
    if arguments.json:
        arguments.json.write_text(dump(found) + "\n")
