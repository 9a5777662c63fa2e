"""Whether a population finds the learning rate that it was not told: CartPole, rates drawn over
three decades.

    python tests/benchmarks/evolution.py run      five populations of four, twenty single runs
    python tests/benchmarks/evolution.py table    prints what came out
    python tests/benchmarks/evolution.py picture  draws notebooks/pictures/population.png

In each trial four learning rates are drawn from 10^-4.5 to 10^-1.5; the members of a population
begin with them, and so do four runs on their own. Success is to reach what the tuned default
reaches in as many steps of one run: its mean in notebooks/results/CartPole-v1.json. The best of
four is that whose last hundred training episodes were best. Kept, with every decision, in
notebooks/results/evolution.json, which notebook 7 draws.
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
from results import ROOT, command_of, draw, dump, machine, ver_ppo

MEMBERS = 4
INTERVAL = 8192
FILE = draw.RESULTS / "evolution.json"


def run_together(lines, folder):
    """Run command lines, all at once, to their end; run k in folder/k. Returns of each the mean
    return of the last hundred training episodes, and of the evaluation."""
    pipes = {"cwd": ROOT, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
    commands = [[sys.executable, *shlex.split(line)[1:]] for line in lines]
    processes = [subprocess.Popen(command, **pipes) for command in commands]
    outputs = [process.communicate()[0] for process in processes]
    found = []
    for k, (process, output) in enumerate(zip(processes, outputs)):
        if process.returncode:
            raise RuntimeError(f"{lines[k]}: exit status {process.returncode}\n{output}")
        (run,) = (folder / str(k)).glob("CartPole*")
        recent = np.array(ver_ppo.load_checkpoint(run / "checkpoint.pt")["recent"])
        trained = float(recent[:, 0].mean()) if len(recent) else 0.0
        evaluated = float(output.strip().splitlines()[-1].split("return ")[1].split()[0])
        found.append([trained, evaluated])
    return found


def trial(number):
    """One population, and four runs on their own: learning rates, what each came to, decisions."""
    rates = 10 ** np.random.default_rng(number).uniform(-4.5, -1.5, MEMBERS)
    command = f"{command_of('CartPole-v1')} --eval-episodes 100"
    evolving = command.replace("ver_ppo.py", "-m notebooks.extensions.population")
    with tempfile.TemporaryDirectory() as name:
        alone = Path(name) / "alone"
        together = Path(name) / "together"
        evolving += f" --population {together} --population-size {MEMBERS} --seed {number}"
        evolving += f" --evolve-interval {INTERVAL}"
        single_runs = []
        members = []
        for k, rate in enumerate(rates):
            own = f"--learning-rate {rate} --runs-dir {alone}/{k} --seed {100 * number + k}"
            single_runs.append(f"{command} {own}")
            members.append(f"{evolving} --learning-rate {rate} --member {k}")
        found = {
            "rates": rates.tolist(),
            "alone": run_together(single_runs, alone),
            "population": run_together(members, together),
        }
        print(number, found, flush=True)
        files = [together / str(member) / "decisions.jsonl" for member in range(MEMBERS)]
        lines_of = [file.read_text().splitlines() for file in files]
        found["decisions"] = [[json.loads(line) for line in lines] for lines in lines_of]
    return found


def table():
    """How many of the populations, of the best of four runs, and of all runs reached the tuned
    default's mean return."""
    trials = json.loads(FILE.read_text())["trials"]
    tuned = draw.load_result("CartPole-v1")["runs"]
    goal = np.mean([run["evaluation"]["return"][0] for run in tuned])
    kinds = {  # the best by its training
        "populations, the best member": [max(found["population"])[1] for found in trials],
        "four runs on their own, the best one": [max(found["alone"])[1] for found in trials],
        "single runs": [evaluated for found in trials for _, evaluated in found["alone"]],
    }
    lines = [f"tuned default: mean {goal:.0f} of {len(tuned)} seeds"]
    for name, values in kinds.items():
        returns = ", ".join(f"{value:.0f}" for value in sorted(values))
        reached = sum(value >= goal for value in values)
        lines.append(f"{name}: {reached} of {len(values)} reached it: {returns}")
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


def run_all(trials):
    """All trials, into the file: a line for each list and each decision."""
    found = [trial(1 + number) for number in range(trials)]
    text = dump({"machine": machine(), "trials": found})
    text = re.sub(r"\{[^{}]*\}", lambda found: " ".join(found[0].split()), text)
    FILE.write_text(text + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("run", "table", "picture"))
    parser.add_argument("--trials", type=int, default=5)
    arguments = parser.parse_args()
    if arguments.what == "run":
        run_all(arguments.trials)
    if arguments.what == "picture":
        picture()
    print(table())
