"""Whether a population finds the learning rate that it was not told; and how often its members take
over from each other although they are equal.

    python tests/benchmarks/evolution.py run      populations of four, as many single runs; an hour
    python tests/benchmarks/evolution.py table    prints what came out
    python tests/benchmarks/evolution.py equal    prints how often equal policies take over
    python tests/benchmarks/evolution.py picture  draws notebooks/pictures/population.png

In each trial four learning rates are drawn, for CartPole from 10^-4.5 to 10^-1.5, for the cue,
which needs memory, from 10^-4 to 10^-1; the members of a population begin with them, and so do four
runs on their own. Success is to reach what the tuned default reaches in as many steps of one run:
its mean in notebooks/results/TASK.json. The best of four is that whose last hundred training
episodes were best. Kept, with every decision, in notebooks/results/evolution-TASK.json, of which
notebook 7 draws CartPole's.
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
from results import ROOT, draw, dump, machine, ver_ppo

from notebooks.extensions.population import BOUNDS, Entry, evolve

MEMBERS = 4
OPTIONS = dict.fromkeys(BOUNDS, 0)  # of invented members
SPREADS = (0.1, 0.2, 0.5, 1.0, 2.0)  # standard deviations of returns whose mean is 1
TASKS = {  # learning rates are drawn between these powers of ten; steps between decisions
    "CartPole-v1": (-4.5, -1.5, 8192),
    "cue": (-4, -1, 4096),
}


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
        (checkpoint,) = (folder / str(k)).glob("*/checkpoint.pt")
        recent = np.array(ver_ppo.load_checkpoint(checkpoint)["recent"])
        trained = float(recent[:, 0].mean()) if len(recent) else 0.0
        evaluated = float(output.strip().splitlines()[-1].split("return ")[1].split()[0])
        found.append([trained, evaluated])
    return found


def draw_rates(task, number):
    """The learning rates of a trial, drawn evenly on a logarithmic scale."""
    low, high, _ = TASKS[task]
    return 10 ** np.random.default_rng(number).uniform(low, high, MEMBERS)


def run_alone(task, number):
    """Four runs on their own: what each came to."""
    command = f"{draw.load_result(task)['command']} --eval-episodes 100"
    with tempfile.TemporaryDirectory() as name:
        lines = []
        for k, rate in enumerate(draw_rates(task, number)):
            own = f"--learning-rate {rate} --runs-dir {name}/{k} --seed {100 * number + k}"
            lines.append(f"{command} {own}")
        return run_together(lines, Path(name))


def run_population(task, number):
    """One population: what each member came to, and their decisions."""
    interval = TASKS[task][2]
    command = f"{draw.load_result(task)['command']} --eval-episodes 100"
    command = command.replace("ver_ppo.py", "-m notebooks.extensions.population")
    with tempfile.TemporaryDirectory() as name:
        command += f" --population {name} --population-size {MEMBERS} --seed {number}"
        command += f" --evolve-interval {interval}"
        rates = draw_rates(task, number)
        members = [f"{command} --learning-rate {r} --member {k}" for k, r in enumerate(rates)]
        found = run_together(members, Path(name))
        files = [Path(name) / str(member) / "decisions.jsonl" for member in range(MEMBERS)]
        lines_of = [file.read_text().splitlines() for file in files]
        return found, [[json.loads(line) for line in lines] for lines in lines_of]


def trial(task, number):
    """A population, and four runs on their own, of the same learning rates."""
    alone = run_alone(task, number)
    population, decisions = run_population(task, number)
    rates = draw_rates(task, number).tolist()
    print(task, number, rates, alone, population, flush=True)
    return {"rates": rates, "alone": alone, "population": population, "decisions": decisions}


def equal_policies(size, spread, populations, looks=10):
    """Share of decisions by which a member takes over from another one although all policies are
    equal: returns of episodes are drawn from one normal distribution, of mean 1 and this standard
    deviation. A score is the mean of the last hundred; in the hundred episodes of an interval it
    is looked at so many times, and the best one counts."""
    rng = np.random.default_rng(0)
    new = 100 // looks
    found = []
    for _ in range(populations):
        returns = rng.normal(1.0, spread, (size, 200))
        ends = range(100 + new, 201, new)
        looked = np.stack([returns[:, end - 100 : end].mean(axis=1) for end in ends])
        best = looked.max(axis=0)
        entries = [Entry(member, 0, looked[-1, member], OPTIONS) for member in range(size)]
        for own in entries:
            others = [entry for entry in entries if entry is not own]
            decision, _, _ = evolve(own, best[own.member], others, size, rng)
            found.append(decision == "takes over")
    return float(np.mean(found))


def equal_table():
    """The shares of takeovers among equal policies: a row for each size of the population."""
    lines = ["members  " + "  ".join(f"spread {spread}" for spread in SPREADS)]
    for size in (4, 8, 16):
        shares = [equal_policies(size, spread, 10_000 // size) for spread in SPREADS]
        lines.append(f"{size:7}  " + "  ".join(f"{100 * share:8.1f} %" for share in shares))
    return "\n".join(lines)


def file_of(task):
    """What is kept of a task."""
    return draw.RESULTS / f"evolution-{task}.json"


def load(task):
    """All trials of a task."""
    return json.loads(file_of(task).read_text())["trials"]


def table(task):
    """How many of the populations, of the best of four runs, and of all members and runs reached
    the tuned default's mean return."""
    trials = load(task)
    tuned = draw.load_result(task)["runs"]
    goal = np.mean([run["evaluation"]["return"][0] for run in tuned])
    kinds = {  # the best by its training
        "populations, the best member": [max(found["population"])[1] for found in trials],
        "four runs on their own, the best one": [max(found["alone"])[1] for found in trials],
        "members": [evaluated for found in trials for _, evaluated in found["population"]],
        "single runs": [evaluated for found in trials for _, evaluated in found["alone"]],
    }
    lines = [f"{task}, tuned default: mean {goal:.4g} of {len(tuned)} seeds"]
    for name, values in kinds.items():
        returns = ", ".join(f"{value:.4g}" for value in sorted(values))
        reached = sum(value >= goal for value in values)
        lines.append(f"{name}: {reached} of {len(values)} reached it: {returns}")
    return "\n".join(lines)


def picture():
    """Family tree and learning rates of the first population."""
    matplotlib.use("Agg")
    draw.setup()
    decisions = load("CartPole-v1")[0]["decisions"]
    figure, axes = plt.subplots(1, 2, figsize=(9, 2.8), layout="constrained")
    draw.family_tree(axes[0], decisions)
    axes[0].set_title("weights: number and colour of the first ancestor")
    draw.schedules(axes[1], decisions, "learning_rate")
    axes[1].legend(frameon=False, fontsize=8)
    figure.savefig(ROOT / "notebooks" / "pictures" / "population.png", dpi=90)


def keep(task, trials):
    """All trials, into the task's file: a line for each list and each decision."""
    text = dump({"machine": machine(), "trials": trials})
    text = re.sub(r"\{[^{}]*\}", lambda found: " ".join(found[0].split()), text)
    file_of(task).write_text(text + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("run", "table", "picture", "equal"))
    parser.add_argument("--trials", type=int, default=4)
    arguments = parser.parse_args()
    if arguments.what == "equal":
        print(equal_table())
        sys.exit()
    for task in TASKS:
        if arguments.what == "run":
            keep(task, [trial(task, 1 + number) for number in range(arguments.trials)])
        print(table(task))
    if arguments.what == "picture":
        picture()
