"""Whether a population finds the learning rate that it was not told; and how often its members take
over from each other although they are equal.

    python tests/benchmarks/evolution.py run      populations of four, as many single runs; an hour
    python tests/benchmarks/evolution.py equal    prints how often equal policies take over

In each trial four learning rates are drawn, for CartPole from 10^-4.5 to 10^-1.5, for the cue,
which needs memory, from 10^-4 to 10^-1; the members of a population begin with them, and so do four
runs on their own. Success is to reach what the tuned default reaches in as many steps of one run:
its mean in notebooks/results/TASK.json. The best of four is that whose last hundred training
episodes were best. Kept, with every decision, in notebooks/results/evolution-TASK.json, of which
all.py makes the manual's table and picture, and notebook 7 pictures of CartPole's.
"""

import argparse
import json
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from results import ROOT, draw, dump, header, ver_ppo, where_and_when

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


def equal_all():
    """The shares of takeovers among equal policies: size of the population -> spread -> share."""
    found = {}
    for size in (4, 8, 16):
        shares = [equal_policies(size, spread, 10_000 // size) for spread in SPREADS]
        found[size] = dict(zip(SPREADS, shares))
    return found


def equal_table(found):
    """A row for each size of the population."""
    lines = header("members", *map(str, SPREADS))
    for size, shares in found.items():
        cells = [f"{100 * share:.2g} %" for share in shares.values()]
        lines.append(f"| {size} | {' | '.join(cells)} |")
    return lines


def reached(task):
    """What came out of a task's trials: how many of all members and of single runs, and of the best
    of each four, reached the tuned rate's mean return; by name, as words."""
    trials = draw.load_result(f"evolution-{task}")["trials"]
    goal = np.mean([run["evaluation"]["return"][0] for run in draw.load_result(task)["runs"]])
    found = {"trials": str(len(trials)), "the tuned rate reaches": f"{goal:.3g}"}
    for kind, words in {"population": "of populations", "alone": "on their own"}.items():
        groups = [trial[kind] for trial in trials]
        ends = [evaluated for group in groups for _, evaluated in group]
        best = [max(group)[1] for group in groups]  # by its training
        name = "members" if kind == "population" else "runs"
        found[f"reached: {name} {words}"] = f"{sum(end >= goal for end in ends)} of {len(ends)}"
        shown = ", ".join(f"{end:.3g}" for end in best)
        found[f"reached: the best of four {name} {words}"] = (
            f"{sum(end >= goal for end in best)} of {len(best)} ({shown})"
        )
    return found


def table():
    """Both tasks side by side."""
    columns = {task: reached(task) for task in TASKS}
    lines = header("", *TASKS)
    for name in columns["cue"]:
        lines.append(f"| {name} | {' | '.join(column[name] for column in columns.values())} |")
    return lines


def keep(task, trials):
    """All trials, into the task's file: a line for each list and each decision."""
    command = f"python tests/benchmarks/evolution.py run --trials {len(trials)}"
    text = dump({"command": command, **where_and_when(), "trials": trials})
    text = re.sub(r"\{[^{}]*\}", lambda found: " ".join(found[0].split()), text)
    (draw.RESULTS / f"evolution-{task}.json").write_text(text + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("run", "equal"))
    parser.add_argument("--trials", type=int, default=4)
    arguments = parser.parse_args()
    if arguments.what == "equal":
        print(json.dumps(equal_all()))
    else:
        for task in TASKS:
            keep(task, [trial(task, 1 + number) for number in range(arguments.trials)])
