"""Whether a population finds the learning rate that it was not told; and how often its members take
over from each other although they are equal.

    python tests/benchmarks/evolution.py run      populations of four, and single runs; 30 minutes
    python tests/benchmarks/evolution.py equal    prints how often equal policies take over

In each trial four learning rates are drawn, for CartPole from 10^-4.5 to 10^-1.5, for the cue,
which needs memory, from 10^-4 to 10^-1; the members of a population begin with them, and so do four
runs on their own. Success is to come within 2 % of what the tuned rate reaches in as many steps of
one run: the mean of eight seeds. On CartPole all options but the steps are the defaults, and so is
the tuned rate. The best of four is that whose last hundred training episodes were best. Kept, with
every decision, in notebooks/results/evolution-TASK.json, of which all.py makes the manual's table
and picture, and notebook 7 pictures of CartPole's.
"""

import argparse
import json
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import numpy as np
from results import ROOT, draw, dump, header, ver_ppo, where_and_when

from tests.takeovers import equal_policies

MEMBERS = 4
SPREADS = (0.1, 0.2, 0.5, 1.0, 2.0)  # standard deviations of returns whose mean is 1
TUNED_SEEDS = 8
REACHED = 0.98  # of the return of the tuned rate


class Task(NamedTuple):
    """What is learned, and between which powers of ten learning rates are drawn for it."""

    options: str
    tuned_rate: float
    powers: tuple[float, float]
    interval: int  # steps between decisions


OF_BOTH = "--no-overlap --num-workers 0 --learner-threads 1 --eval-episodes 100 --greedy"
CARTPOLE = "--env-id CartPole-v1 --total-timesteps 150000"
CUE = "--env-id tests.envs:Cue-v0 --total-timesteps 150000 --num-steps 64 --gae-lambda 1"
CUE += " --hidden-size 32 --update-epochs 4 --num-minibatches 2"
TASKS = {
    "CartPole-v1": Task(f"{CARTPOLE} {OF_BOTH}", 2e-3, (-4.5, -1.5), 8192),
    "cue": Task(f"{CUE} {OF_BOTH}", 3e-3, (-4, -1), 4096),
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
    rng = np.random.default_rng(number)
    return (10 ** rng.uniform(*TASKS[task].powers, MEMBERS)).tolist()


def run_alone(task, rates, first_seed):
    """Runs on their own with these learning rates: what each came to."""
    with tempfile.TemporaryDirectory() as name:
        lines = []
        for k, rate in enumerate(rates):
            own = f"--learning-rate {rate} --runs-dir {name}/{k} --seed {first_seed + k}"
            lines.append(f"python ver_ppo.py {TASKS[task].options} {own}")
        return run_together(lines, Path(name))


def run_tuned(task):
    """What the tuned rate comes to, with each seed."""
    return run_alone(task, [TASKS[task].tuned_rate] * TUNED_SEEDS, first_seed=1)


def run_population(task, rates, seed):
    """One population, which begins with these rates: what each member came to, and their
    decisions."""
    command = f"python -m notebooks.extensions.population {TASKS[task].options}"
    with tempfile.TemporaryDirectory() as name:
        command += f" --population {name} --population-size {MEMBERS} --seed {seed}"
        command += f" --evolve-interval {TASKS[task].interval}"
        members = [f"{command} --learning-rate {r} --member {k}" for k, r in enumerate(rates)]
        found = run_together(members, Path(name))
        files = [Path(name) / str(member) / "decisions.jsonl" for member in range(MEMBERS)]
        lines_of = [file.read_text().splitlines() for file in files]
        return found, [[json.loads(line) for line in lines] for lines in lines_of]


def trial(task, number):
    """A population, and four runs on their own, of the same learning rates."""
    rates = draw_rates(task, number)
    alone = run_alone(task, rates, first_seed=100 * number)
    population, decisions = run_population(task, rates, seed=number)
    print(task, number, rates, alone, population, flush=True)
    return {"rates": rates, "alone": alone, "population": population, "decisions": decisions}


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
    of each four, reached what the tuned rate reaches; by name, as words."""
    kept = draw.load_result(f"evolution-{task}")
    trials = kept["trials"]
    tuned = np.mean([evaluated for _, evaluated in kept["tuned"]])
    goal = REACHED * tuned
    found = {"trials": str(len(trials)), "the tuned rate reaches": f"{tuned:.3g}"}
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


def keep(task, tuned, trials):
    """All runs, into the task's file: a line for each list and each decision."""
    command = f"python tests/benchmarks/evolution.py run --trials {len(trials)}"
    found = {"command": command, **where_and_when(), "tuned": tuned, "trials": trials}
    text = re.sub(r"\{[^{}]*\}", lambda match: " ".join(match[0].split()), dump(found))
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
            tuned = run_tuned(task)
            print(task, tuned, flush=True)
            keep(task, tuned, [trial(task, 1 + number) for number in range(arguments.trials)])
