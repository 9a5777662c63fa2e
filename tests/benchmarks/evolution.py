"""Whether a population finds the learning rate that nobody has told it: CartPole, rates drawn over three decades.

    python tests/benchmarks/evolution.py run      five populations of four, and twenty runs on their own
    python tests/benchmarks/evolution.py table    prints what came out; `picture` draws notebooks/pictures/population.png

In each trial four learning rates are drawn from 10^-4.5 to 10^-1.5; the members of a population begin with them, and so do
four runs on their own. Success is to reach what the tuned default reaches in as many steps of one run: its mean in
notebooks/results/CartPole-v1.json. The best of four is that whose last hundred training episodes were best. Kept, with every
decision, in notebooks/results/evolution.json, which notebook 7 draws.
"""

import argparse
import json
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

import matplotlib
import matplotlib.pyplot as plt
import numpy as np
from results import ROOT, command_of, draw, dump, machine

import ver_ppo

MEMBERS, INTERVAL = 4, 8192
FILE = draw.RESULTS / "evolution.json"


def run_together(lines, folder):
    """Run command lines of ver_ppo.py, all at once, to their end; run k in folder/k. Returns of each the mean return of the
    last hundred training episodes, and of the evaluation."""
    pipes = {"cwd": ROOT, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
    processes = [subprocess.Popen([sys.executable, *shlex.split(line)[1:]], **pipes) for line in lines]
    outputs, found = [process.communicate()[0] for process in processes], []
    for k, (process, output) in enumerate(zip(processes, outputs)):
        if process.returncode:
            raise RuntimeError(f"{lines[k]}: exit status {process.returncode}\n{output}")
        (run,) = (folder / str(k)).glob("CartPole*")
        recent = np.array(ver_ppo.load_checkpoint(run / "checkpoint.pt")["recent"])
        evaluated = float(output.strip().splitlines()[-1].split("return ")[1].split()[0])
        found.append([float(recent[:, 0].mean()) if len(recent) else 0.0, evaluated])
    return found


def trial(number):
    """One population, and four runs on their own: learning rates, what each came to, decisions."""
    rates = 10 ** np.random.default_rng(number).uniform(-4.5, -1.5, MEMBERS)
    lines = [f"{command_of('CartPole-v1')} --eval-episodes 100 --learning-rate {rate}" for rate in rates]
    with tempfile.TemporaryDirectory() as name:
        alone, together = Path(name) / "alone", Path(name) / "together"
        found = {"rates": rates.tolist()}
        runs = [f"{line} --runs-dir {alone}/{k} --seed {100 * number + k}" for k, line in enumerate(lines)]
        found["alone"] = run_together(runs, alone)
        of = f"--population {together} --population-size {MEMBERS} --evolve-interval {INTERVAL} --seed {number}"
        found["population"] = run_together([f"{line} {of} --member {k}" for k, line in enumerate(lines)], together)
        files = [together / str(member) / "decisions.jsonl" for member in range(MEMBERS)]
        found["decisions"] = [[json.loads(line) for line in file.read_text().splitlines()] for file in files]
    print(number, {name: value for name, value in found.items() if name != "decisions"}, flush=True)
    return found


def table():
    """How many of the populations, of the best of four runs, and of all runs reached the tuned default's mean return."""
    trials, tuned = json.loads(FILE.read_text())["trials"], draw.load_result("CartPole-v1")["runs"]
    goal = np.mean([run["evaluation"]["return"][0] for run in tuned])
    kinds = {
        "populations, the best member": [max(found["population"])[1] for found in trials],  # by its training
        "four runs on their own, the best one": [max(found["alone"])[1] for found in trials],
        "single runs": [evaluated for found in trials for _, evaluated in found["alone"]],
    }
    lines = [f"tuned default: mean {goal:.0f} of {len(tuned)} seeds"]
    for name, values in kinds.items():
        returns = ", ".join(f"{value:.0f}" for value in sorted(values))
        lines.append(f"{name}: {sum(value >= goal for value in values)} of {len(values)} reached it: {returns}")
    return "\n".join(lines)


def picture():
    """Family tree and learning rates of the first population."""
    matplotlib.use("Agg")
    draw.setup()
    decisions = json.loads(FILE.read_text())["trials"][0]["decisions"]
    figure, axes = plt.subplots(1, 2, figsize=(9, 2.8), layout="constrained")
    draw.family_tree(axes[0], decisions)
    axes[0].set_title("weights: colour of the first ancestor")
    draw.schedules(axes[1], decisions, "learning_rate")
    axes[1].legend(frameon=False, fontsize=8)
    figure.savefig(ROOT / "notebooks" / "pictures" / "population.png", dpi=90)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("run", "table", "picture"))
    parser.add_argument("--trials", type=int, default=5)
    arguments = parser.parse_args()
    if arguments.what == "run":
        result = {"machine": machine(), "trials": [trial(1 + number) for number in range(arguments.trials)]}
        FILE.write_text(re.sub(r"\{[^{}]*\}", lambda found: " ".join(found[0].split()), dump(result)) + "\n")
    if arguments.what == "picture":
        picture()
    print(table())
