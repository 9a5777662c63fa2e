"""Whether a population finds the learning rate that nobody has told it: CartPole, rates drawn over three decades.

    python tests/benchmarks/evolution.py run      five populations of four, and the same twenty runs alone; 15 minutes
    python tests/benchmarks/evolution.py table    prints what came out

In each trial four learning rates are drawn from 10^-4.5 to 10^-1.5; the members of a population begin with them, and so do
four runs on their own. Success is to reach what the tuned default reaches in as many steps of
one run: its mean in notebooks/results/CartPole-v1.json. A population's result is that of the member whose last hundred
training episodes were best. Kept, with every decision, in notebooks/results/evolution.json, which notebook 7 draws.
"""

import argparse
import json
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from results import ROOT, command_of, draw, dump, machine

MEMBERS, INTERVAL = 4, 8192
FILE = draw.RESULTS / "evolution.json"


def run_together(lines):
    """Run command lines of ver_ppo.py, all at once, to their end. Returns the mean returns of their evaluations."""
    pipes = {"cwd": ROOT, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
    processes = [subprocess.Popen([sys.executable, *shlex.split(line)[1:]], **pipes) for line in lines]
    last = [process.communicate()[0].strip().splitlines()[-1] for process in processes]
    assert not any(process.returncode for process in processes), last
    return [float(line.split("return ")[1].split()[0]) for line in last]


def trial(number):
    """One population and its members alone: learning rates, evaluations, decisions."""
    rates = 10 ** np.random.default_rng(number).uniform(-4.5, -1.5, MEMBERS)
    line = f"{command_of('CartPole-v1')} --eval-episodes 100"
    with tempfile.TemporaryDirectory() as folder:
        seeds = [
            f"{line} --runs-dir {folder}/alone --learning-rate {rate} --seed {100 * number + k}"
            for k, rate in enumerate(rates)
        ]
        alone = run_together(seeds)
        line += f" --population {folder}/p --population-size {MEMBERS} --evolve-interval {INTERVAL} --seed {number}"
        population = run_together([f"{line} --learning-rate {rate} --member {k}" for k, rate in enumerate(rates)])
        files = [Path(folder) / "p" / str(member) / "decisions.jsonl" for member in range(MEMBERS)]
        decisions = [[json.loads(line) for line in file.read_text().splitlines()] for file in files]
    best = int(np.argmax([member[-1]["score"] for member in decisions]))
    found = {"rates": rates.tolist(), "alone": alone, "population": population, "best": best, "decisions": decisions}
    print(number, {name: value for name, value in found.items() if name != "decisions"}, flush=True)
    return found


def table():
    """How many of the trials, and of the single runs, reached the tuned default's mean return."""
    trials, tuned = json.loads(FILE.read_text())["trials"], draw.load_result("CartPole-v1")["runs"]
    returns = [run["evaluation"]["return"][0] for run in tuned]
    chosen, alone = [found["population"][found["best"]] for found in trials], sum((found["alone"] for found in trials), [])
    lines = [f"tuned default: mean {np.mean(returns):.0f} of {len(returns)} seeds"]
    for name, values in (("populations, the best member", chosen), ("single runs", alone)):
        reached = sum(value >= np.mean(returns) for value in values)
        lines.append(
            f"{name}: {reached} of {len(values)} reached it; {', '.join(f'{value:.0f}' for value in sorted(values))}"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("run", "table"))
    parser.add_argument("--trials", type=int, default=5)
    arguments = parser.parse_args()
    if arguments.what == "run":
        result = {"machine": machine(), "trials": [trial(1 + number) for number in range(arguments.trials)]}
        FILE.write_text(dump(result) + "\n")
    print(table())
