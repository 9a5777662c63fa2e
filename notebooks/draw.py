"""Shared drawing code of the notebooks and of the README's pictures. It contains nothing that they
teach."""

import json
import sys
import traceback
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import torch
from matplotlib.patches import Patch, Rectangle

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "notebooks" / "results"  # written by tests/benchmarks
sys.path.insert(0, str(ROOT))  # for notebooks, which run in their own folder
from notebooks.environments.rearrange import STARTS_M  # noqa: E402
from notebooks.extensions import virtual_clock  # noqa: E402
from notebooks.extensions.virtual_clock import step_times  # noqa: E402, F401

# Okabe and Ito's colors: they differ for the color-blind, and on white and on grey
BLUE = "#0072B2"
ORANGE = "#E69F00"
GREEN = "#009E73"
RED = "#D55E00"
PURPLE = "#CC79A7"
SKY = "#56B4E9"
GREY = "#8C8C8C"
DARK = "#444444"
COLORS = (BLUE, ORANGE, GREEN, RED, PURPLE, SKY)
HATCH = "////"  # of bars whose color, seen in grey, is that of others
LINES = ("-", "--", "-.", ":", (0, (6, 1, 1, 1, 1, 1)))  # curves differ without their colors, too
MEMBERS = (("-", "o"), ("--", "s"), ("-.", "^"), (":", "D"))  # of a population: line, marker
TRAINERS = {  # of tests/benchmarks/peers.py
    "ver": "ver_ppo.py",
    "sample_factory": "Sample Factory 2.1.1",
    "sb3": "RecurrentPPO, sb3-contrib 2.9.2",
    "pufferlib": "PufferLib 3.0.0",
    "habitat_ver": "VER of habitat-baselines 0.3.320260507",
    "habitat_ddppo": "DD-PPO of habitat-baselines 0.3.320260507",
}
RACE_MINUTES = 5
RACERS = {  # of tests/benchmarks/race.py
    "ver": "ver_ppo.py",
    "ver_continuous": "ver_ppo.py, other options",
    "sample_factory": "Sample Factory",
    "sb3": "Stable-Baselines3",
    "cleanrl": "CleanRL",
}
ROUNDED = {"precision": 4, "suppress": True, "threshold": 12, "edgeitems": 4}  # as printed
SAMPLERS = {"sync": GREY, "nover": ORANGE, "ver": BLUE, "async": PURPLE}
IN_FLIGHT = "in flight when learning begins: counts for a later rollout"
HATCHES = {"learning": HATCH, IN_FLIGHT: "\\\\\\\\"}  # bars differ in grey, too


def setup():
    """Choose a style that is legible on light and dark pages, and seed torch's random numbers."""
    parameters = {
        "figure.facecolor": "white",
        "savefig.facecolor": "white",
        "figure.dpi": 96,
        "font.size": 10,
        "axes.grid": False,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.prop_cycle": plt.cycler(color=COLORS),
    }
    plt.rcParams.update(parameters)
    torch.manual_seed(0)
    torch.set_num_threads(1)


def alike(right, answer, tolerance):
    """Whether two arrays have the same shape, and the same numbers within a relative tolerance."""
    return right.shape == answer.shape and np.allclose(answer, right, rtol=tolerance, atol=1e-6)


def match(predicted, computed, tolerance=1e-6):
    """Compare numbers that were predicted with those that were computed, and print one line.
    Raises AssertionError, with both, if they differ by more than this relative tolerance."""
    predicted = np.asarray(predicted)
    computed = np.asarray(computed)
    with np.printoptions(**ROUNDED):
        both = f"predicted {predicted}\ncomputed  {computed}"
    assert alike(predicted, computed, tolerance), both
    numbers = "1 number" if predicted.size == 1 else f"{predicted.size} numbers"
    within = f", within {tolerance:.0%}" if tolerance >= 0.01 else ""
    print(f"\N{CHECK MARK} {numbers}{within}")


def fault(answer, right, tolerance):
    """Say why an answer is wrong, or return "" if it is right. If `right` is a text, the answer's
    letters are compared, in any order and case. A tuple is compared part by part."""
    if isinstance(right, str):
        letters = sorted({letter for letter in str(answer).upper() if letter.isalpha()})
        return "" if set(letters) == set(right) else f"your letters are {''.join(letters)}"
    if isinstance(right, tuple):
        parts = list(answer) if np.iterable(answer) else [answer]
        if len(parts) != len(right):
            return f"your answer should have {len(right)} parts"
        faults = [fault(*pair, tolerance) for pair in zip(parts, right)]
        return "; ".join(f"part {k}: {why}" for k, why in enumerate(faults, 1) if why)
    try:
        answer = np.asarray(answer, float)
    except (TypeError, ValueError, RuntimeError):
        return f"{answer!r} is neither a number nor a table of numbers"
    right = np.asarray(right, float)
    if answer.size == right.size == 1:  # [8] is 8
        answer = answer.reshape(right.shape)
    if answer.shape != right.shape:
        return f"the right answer has another shape than yours, {answer.shape}"
    with np.printoptions(**ROUNDED):
        return "" if alike(right, answer, tolerance) else f"your answer is {answer}"


def check(answer, right, tolerance=1e-6):
    """Print whether the reader's answer to an exercise is right, and if not, why: a wrong one must
    not stop *Run all*. An answer may also be a function without arguments that finds it. `None`, or
    a list of nothing else, is not an answer yet."""

    def fault_of():
        found = answer() if callable(answer) else answer
        parts = found if isinstance(found, list) and found else [found]
        return None if all(part is None for part in parts) else fault(found, right, tolerance)

    check_cases(fault_of, [()])


def check_cases(fault_of, cases):
    """As `check`, for a function that the reader wrote. `fault_of(*case)` calls that function. It
    returns the reason why the result is wrong, "" if it is right, or None if there is no answer
    yet."""
    for case in cases:
        try:
            why = fault_of(*case)
        except Exception:
            print(f"exercise: not yet: your code raises\n{traceback.format_exc()}")
            return
        if why is None:
            print("exercise: no answer yet")
            return
        if why:
            print(f"exercise: not yet: {why}; think again, the solution is below")
            return
    print("exercise: right")


def compare_guess(guess, value, unit, reveal=False):
    """Print how far the reader's guess is from the computed value. Without a guess (`None`), the
    value stays hidden unless `reveal` is true. A wrong guess never stops *Run all*."""
    computed = f"computed: {value:.4g} {unit}"
    if guess is None:
        print(computed if reveal else "no guess yet: write one above, or set reveal=True here")
        return
    try:
        guess = float(guess)
    except (TypeError, ValueError):
        print(f"{guess!r} is not a number: your guess should be one")
        return
    distance = f"{guess - value:+.4g}"
    if guess > 0 and value > 0:
        distance = f"{guess / value:.2f} times as much"
    print(f"{computed}; your guess: {guess:.4g}, {distance}")


def ink_on(color):
    """A color for text on this background."""
    return "white" if color in (BLUE, GREEN, RED, DARK) else "black"


def legend(axis, colors, hatched=(), **more):
    """Add a legend to an axis. `colors` is a dictionary from word to color, and `hatched` the
    colors that have a hatch."""
    handles = []
    for word, color in colors.items():
        hatch = HATCH if color in hatched else None
        handles.append(Patch(facecolor=color, edgecolor="white", lw=0, hatch=hatch, label=word))
    axis.legend(handles=handles, frameon=False, **more)


def timeline(axis, num_envs, steps, phases, title, marks_in_flight=True):
    """Draw the steps of every environment and the learner's phases over time. A step is
    (environment, begin, seconds), and a phase is (begin, seconds)."""
    names = {
        "simulating a step": BLUE,
        IN_FLIGHT: ORANGE,
        "learning": DARK,
    }
    step, in_flight, learning = names.values()
    spans = {}  # by lane and color: drawing is many times as fast as bar by bar
    for env, begin, sec in steps:
        crosses = marks_in_flight and any(begin <= phase < begin + sec for phase, _ in phases)
        spans.setdefault((env, in_flight if crosses else step), []).append((begin, sec))
    for (env, color), lane in spans.items():
        look = {"facecolor": color, "edgecolor": "white", "lw": 0.5}
        look["hatch"] = HATCHES[IN_FLIGHT] if color == in_flight else None
        axis.broken_barh(lane, (env - 0.4, 0.8), **look)
    look = {"facecolor": learning, "hatch": HATCHES["learning"], "edgecolor": "white"}
    axis.broken_barh(phases, (num_envs - 0.4, 0.8), **look)
    axis.set(ylim=(num_envs + 0.6, -0.6), yticks=range(num_envs + 1), xlabel="seconds")
    lanes = [f"environment {env}" for env in range(num_envs)]
    axis.set_yticklabels([*lanes, "learner"], fontsize=9)
    axis.set_title(title, fontsize=10, loc="left")
    return names


def lanes(axis, spans, title):
    """Draw bars with a word in each. `spans`: lane -> list of (begin, seconds, word, color)."""
    for lane, bars in enumerate(spans.values()):
        for begin, sec, word, color in bars:
            axis.broken_barh([(begin, sec)], (lane - 0.4, 0.8), facecolor=color, edgecolor="white")
            style = {"ha": "center", "va": "center", "fontsize": 8, "color": ink_on(color)}
            axis.text(begin + sec / 2, lane, word, clip_on=True, **style)
    axis.set(yticks=range(len(spans)), yticklabels=list(spans), ylim=(len(spans) - 0.5, -0.5))
    axis.set_title(title, fontsize=10, loc="left")


def compare_samplers(
    seconds_NK,
    num_steps,
    updates,
    inference_sec,
    learning_sec,
    height=8.0,
    numbers=True,
    samplers=tuple(SAMPLERS),
):
    """Draw the timelines of samplers on the same step times, below each other: figure 1 of the VER
    paper, computed. Without `numbers`, a title is only the sampler's name."""
    size = {"figsize": (9, height), "layout": "constrained"}
    figure, axes = plt.subplots(len(samplers), 1, sharex=True, **size)
    num_envs = len(seconds_NK)
    costs = {"inference_sec": inference_sec, "learning_sec": learning_sec}
    for axis, sampler in zip(axes, samplers):
        arguments = sampler, lambda e, k: seconds_NK[e, k], num_envs, num_steps, updates
        learned, sec, steps, phases = virtual_clock.run(*arguments, **costs)
        title = sampler
        if numbers:
            title += f": {learned} steps in {sec:.0f} seconds, {learned / sec:.1f} a second"
        begun = [step for step in steps if step[1] < sec]
        colors = timeline(axis, num_envs, begun, phases, title, marks_in_flight=sampler != "async")
        axis.axvline(sec, color="black", lw=1)
        axis.set_xlabel("seconds" if axis is axes[-1] else "")
    handles = []
    for name, color in colors.items():
        look = {"facecolor": color, "hatch": HATCHES.get(name), "edgecolor": "white"}
        handles.append(Patch(label=name, **look))
    figure.legend(handles=handles, ncol=3, loc="outside lower center")
    return figure


def whole():
    """Draw the whole algorithm, with the names of its functions."""
    figure, axis = plt.subplots(figsize=(10, 5.4), layout="constrained")
    axis.set(xlim=(0, 100), ylim=(0, 54), xticks=[], yticks=[])
    axis.spines[:].set_visible(False)
    colors = (BLUE, SKY, GREEN, PURPLE)  # of the environments

    def title(x, y, what, functions=""):
        axis.text(x, y, what, fontsize=11, weight="bold")
        axis.text(x, y - 2.4, functions, fontsize=9, family="monospace", color=DARK)

    def block(x, y, width, height, color, text=""):
        axis.add_patch(Rectangle((x, y), width, height, facecolor=color, edgecolor="white"))
        style = {"ha": "center", "va": "center", "fontsize": 9, "color": ink_on(color)}
        axis.text(x + width / 2, y + height / 2, text, **style)

    def words(x, y, text):
        axis.text(x, y, text, fontsize=9, va="top")

    def arrow(start, end, text="", place=(0, 0)):
        style = {"arrowstyle": "-|>", "color": DARK, "lw": 1.5}
        axis.annotate("", end, start, arrowprops=style)
        mono = {"family": "monospace", "color": DARK}
        axis.text(*place, text, fontsize=9, ha="center", va="center", **mono)

    title(0, 51.5, "environments", "env_worker")
    lengths = ((3, 2, 4, 3, 3), (6, 4, 5), (9, 7), (4, 11))  # of their steps: uneven
    for env, (color, steps) in enumerate(zip(colors, lengths)):
        x = 0.0
        for length in steps:
            block(x, 42 - 4 * env, length - 0.4, 3, color)
            x += length
    words(0, 29, "N simulators in processes;\nsteps take different times")

    title(33, 51.5, "collector: pending steps", "Collector.collect")
    names = ("obs", "state", "action", "log π", "V", "version")
    for column, name in enumerate(names):
        axis.text(35 + 4.15 * column, 46, name, fontsize=8, ha="center")
    kinds = (ORANGE, ORANGE, "#DDDDDD", ORANGE)
    for env, (color, kind) in enumerate(zip(colors, kinds)):
        block(31.4, 42 - 4 * env, 1.2, 3, color)
        for column in range(len(names)):
            block(33 + 4.15 * column, 42 - 4 * env, 3.95, 3, kind)
    axis.text(58.5, 43.5, "in flight", fontsize=9, va="center")
    axis.text(58.5, 35.5, "idle", fontsize=9, va="center")
    words(33, 29, "one row for each environment:\nwhat is known when its action is chosen")

    title(74, 51.5, "rollout", "Rollout")
    order = (0, 3, 0, 1, 0, 2, 1, 0, 3, 1, 0, 2)  # environments, as their steps were completed
    for index, env in enumerate(order):
        block(74 + 4 * (index % 6), 41.5 - 4 * (index // 6), 3.8, 3.6, colors[env], str(index))
    words(74, 36, "exactly S = T·N complete steps,\nmore of the faster environments")

    title(74, 21.5, "returns", "add_advantages")
    words(74, 17, "GAE stops where an episode ends.\nAt the rollout's end, it bootstraps")

    title(42, 21.5, "sequences, mini-batches", "find_sequences  cut_minibatches  pack")
    pieces = (((2, 2), (0, 4)), ((0, 1), (1, 3), (3, 2)))  # (environment, steps): two mini-batches
    for row, sequences in enumerate(pieces):
        x = 42
        for env, length in sequences:
            for step in range(length):
                block(x + 2.6 * step, 12.4 - 4 * row, 2.4, 3, colors[env])
            x += 2.6 * length + 0.8
    what = "sequences (steps of one environment and\nepisode) are shuffled, laid end to end, and"
    words(42, 6.6, f"{what}\ncut into equal mini-batches: here the two rows")

    title(3, 21.5, "learning", "ppo_update  ppo_loss")
    block(3, 10, 24, 6.5, DARK, "encoder → LSTM → π, V")
    words(3, 8.6, "many processes (ranks) average gradients;\na slow rank stops collecting early")
    functions = "Ranks.average  optimal_preemption"
    axis.text(3, 2, functions, fontsize=9, family="monospace", color=DARK)

    arrow((19, 44), (31, 44), "await_answers", (24.8, 45.6))
    arrow((31, 31.5), (19, 31.5), "act", (24.8, 33.1))
    arrow((59, 39.3), (73, 39.3), "complete_steps", (66, 41))
    arrow((86, 30.5), (86, 24.5))
    arrow((73, 13.5), (64, 13.5))
    arrow((41, 13.5), (28, 13.5), "make_batch", (34.5, 15.1))
    arrow((24.8, 17), (24.8, 30.5))
    axis.text(25.6, 25, "new\nweights", fontsize=9, va="center")
    return figure


def cells(axis, row, columns, colors, texts, size=9, hatched=()):
    """Draw a row of squares, each with a color and a text, such as the steps of a rollout.
    `hatched` has the colors with a hatch."""
    for column, color, text in zip(columns, colors, texts):
        look = {"facecolor": color, "edgecolor": "white"}
        style = {"ha": "center", "va": "center", "fontsize": size, "color": ink_on(color)}
        if color in hatched:
            look["hatch"] = HATCH
            style["bbox"] = {"facecolor": color, "lw": 0, "pad": 1}  # no lines behind the text
        axis.add_patch(Rectangle((column, row), 0.94, 0.9, **look))
        axis.text(column + 0.47, row + 0.43, text, **style)


def grid_for_cells(axis, columns, rows):
    """Prepare an axis for `cells`, with row 0 at the top."""
    axis.set(xlim=(-0.1, columns), ylim=(rows, -0.1), aspect="equal", xticks=[], yticks=[])
    axis.spines[:].set_visible(False)


def band(axis, x, values_KX, color, label, line="-"):
    """Draw the mean of K seeds, and the range from the lowest to the highest."""
    values_KX = np.asarray(values_KX)
    axis.plot(x, values_KX.mean(axis=0), linestyle=line, color=color, label=label)
    low_X = values_KX.min(axis=0)
    high_X = values_KX.max(axis=0)
    axis.fill_between(x, low_X, high_X, color=color, alpha=0.2, lw=0)


def in_words(tag):
    """The name of a metric or an evaluation's number, as words."""
    return tag.split("/")[-1].replace("_", " ").replace("spl", "SPL")


def load_result(task):
    """Read the results of tests/benchmarks with this name."""
    return json.loads((RESULTS / f"{task}.json").read_text())


def curves(result, tag):
    """A curve of all K seeds at the steps of the first seed: X steps, K x X values."""
    found = [run["curves"][tag] for run in result["runs"]]
    steps_X = np.array(found[0][0])
    return steps_X, np.stack([np.interp(steps_X, *curve) for curve in found])


def scaling_curves(found):
    """Draw the steps per second of R ranks, divided by R times the rate of one rank, as in figure 4
    of the DD-PPO paper. `found` has the results of tests/benchmarks/scaling.py: workload -> mode ->
    ranks."""
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.4), sharey=True, layout="constrained")
    for axis, (workload, modes) in zip(axes, found.items()):
        for mode, by_ranks in modes.items():
            sampler, preemption = mode.split()
            line = "o--" if preemption == "none" else "s-"
            ranks = [int(number) for number in by_ranks]
            shares = [at["speedup"] / number for number, at in zip(ranks, by_ranks.values())]
            axis.plot(ranks, shares, line, color=SAMPLERS[sampler], label=mode)
        axis.set(title=f"{workload} simulators", xscale="log", xlabel="ranks", ylim=(0, 1.05))
        axis.set(xticks=ranks, xticklabels=ranks)
        axis.minorticks_off()
    axes[0].set(ylabel="steps per second and rank,\nrelative to one rank alone")
    axes[1].legend(frameon=False, loc="lower left")
    return figure


def learning_curves(results):
    """Draw success and SPL over steps. `results`: label -> result of `load_result`."""
    figure, axes = plt.subplots(1, 2, figsize=(9, 3), sharey=True, layout="constrained")
    for axis, tag in zip(axes, ("success", "spl")):
        for color, line, (label, result) in zip(COLORS, LINES, results.items()):
            steps, values_KX = curves(result, f"metrics/{tag}")
            band(axis, steps / 1e6, values_KX, color, label, line)
        title = f"{in_words(tag)}, last 100 training episodes"
        axis.set(xlabel="million steps", ylim=(0, 1), title=title)
    axes[0].legend(frameon=False, loc="lower right")
    return figure


def first_reached(x, values, height):
    """The x at which a curve first reaches a height, or inf if it never does. Between its points,
    the curve is a straight line. Nothing is known before its first point, so a height that is
    reached there counts from there."""
    reached = np.asarray(values) >= height
    if not reached.any():
        return np.inf
    after = int(reached.argmax())
    around = slice(max(after - 1, 0), after + 1)  # this point, and the one before if there is one
    return float(np.interp(height, values[around], x[around]))


MINUTES = ("seconds", "success"), ("steps", "success")


def minutes_curves(found, panels=MINUTES):
    """Draw success over minutes and over steps, as in figures 4 and 5 of the VER paper, with a row
    for each kind of simulators and a thin line for each seed. `found`: kind -> sampler -> results
    of learn.py for each seed. A line ends where its run ended, at a success of 0.9."""
    axis_of = {"seconds": (60, "minutes"), "steps": (1000, "thousand steps")}
    rows = len(found)
    size = {"figsize": (4.2 * len(panels), 2.6 * rows), "squeeze": False, "sharey": True}
    figure, axes_RC = plt.subplots(rows, len(panels), **size, layout="constrained")
    for axes, (kind, runs) in zip(axes_RC, found.items()):
        for axis, (over, metric) in zip(axes, panels):
            unit, words = axis_of[over]
            for line, (sampler, seeds) in zip(LINES, runs.items()):
                look = {"color": SAMPLERS[sampler.partition("+")[0]], "ls": line, "lw": 1}
                for label, run in zip([sampler, *[None] * len(seeds)], seeds):
                    x_X = np.array(run[over]) / unit
                    axis.plot(x_X, run[f"metrics/{metric}"], label=label, **look)
            axis.set(xlabel=words, ylabel=in_words(metric), title=kind, xlim=(0, None), ylim=(0, 1))
        axes[-1].legend(frameon=False, loc="lower right")
    return figure


def parts_panels(panels, columns=4):
    """Draw a training curve with and without each part of VER over simulated minutes. `panels`:
    title -> tag of the curve, and the results of learn.py parts for each seed, with it and without
    it."""
    rows = -(-len(panels) // columns)
    size = {"figsize": (3.1 * columns, 2.4 * rows), "squeeze": False}
    figure, axes_RC = plt.subplots(rows, columns, **size, layout="constrained")
    for axis in axes_RC.flat[len(panels) :]:
        axis.axis("off")
    for axis, (title, (tag, both)) in zip(axes_RC.flat, panels.items()):
        labels = "full method", "without it"
        for runs, color, line, label in zip(both, (BLUE, ORANGE), LINES, labels):
            if runs:
                minutes_X, values_KX = over_minutes(runs, tag)
                band(axis, minutes_X, values_KX, color, label, line)
        axis.set_title(title, fontsize=8)
        axis.set(xlabel="simulated minutes", ylabel=in_words(tag), xlim=(0, None), ylim=(0, None))
    axes_RC.flat[0].legend(frameon=False, fontsize=8)
    return figure


def race_panels(found):
    """Draw the value of the training's episodes over minutes: a panel for each task of race.py, a
    line for each trainer."""
    looks = dict(zip(RACERS, zip((BLUE, GREEN, ORANGE, GREY, PURPLE), LINES)))
    figure, axes = plt.subplots(1, len(found), figsize=(10, 2.6), layout="constrained")
    for axis, (task, by_trainer) in zip(axes, found.items()):
        for trainer, kept in by_trainer.items():
            curves = [run["curve"] for run in kept["seeds"].values()]
            values_KX = np.array(curves, float)  # None, a window without an episode, becomes NaN
            minutes = np.linspace(0, RACE_MINUTES, values_KX.shape[1] + 1)[1:]
            seen_X = ~np.isnan(values_KX).any(axis=0)
            color, line = looks[trainer]
            band(axis, minutes[seen_X], values_KX[:, seen_X], color, RACERS[trainer], line)
        axis.set_title(task, fontsize=9)
        axis.set(xlabel="minutes", xlim=(0, RACE_MINUTES))
    axes[0].set_ylabel("success or return")
    most = max(axes, key=lambda axis: len(axis.lines))  # has all trainers
    figure.legend(*most.get_legend_handles_labels(), loc="outside lower center", ncols=5)
    return figure


def over_minutes(runs, tag, points=60):
    """A curve of all K seeds over simulated minutes, as far as all of them go: X minutes, K x X
    values."""
    minutes_X = np.linspace(0, min(run["minutes"] for run in runs), points)
    values = []
    for run in runs:
        clock = run["curves"]["clock/minutes"]
        steps, heights = run["curves"][tag]
        values.append(np.interp(minutes_X, np.interp(steps, *clock), heights))
    return minutes_X, np.stack(values)


def transfer_curves(runs, tasks):
    """Draw the return over steps, with a panel for each task and a curve for each variant, as in
    figure 5 of the DD-PPO paper."""
    figure, axes = plt.subplots(1, len(tasks), figsize=(9, 3.4), layout="constrained")
    for axis, (task, what) in zip(axes, tasks.items()):
        for color, line, (variant, found) in zip(COLORS, LINES, runs[task].items()):
            steps, values_KX = curves({"runs": found}, "charts/episodic_return")
            band(axis, steps / 1e3, values_KX, color, variant, line)
        title = f"{task}, last 100 training episodes"
        axis.set(xlabel="thousand steps", ylabel=what, title=title)
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, ncol=3, frameon=False, loc="outside lower center")
    return figure


def family_tree(axis, decisions):
    """Draw which member of a population copied which. Each member has a lane. Its color and number
    show the member from whose first weights its weights descend. An arrow is a takeover, and a dot
    is a mutation. `decisions` has a list for each member, in order of steps."""
    # member -> (since this step, whose weights)
    ancestor = {member: [(0, member)] for member in range(len(decisions))}

    def weights_of(member, step):
        return [whose for since, whose in ancestor[member] if since <= step][-1]

    lines = [line for member in decisions for line in member]
    for line in sorted(lines, key=lambda line: (line["step"], line["member"])):
        step = line["step"]
        member = line["member"]
        if line["decision"] == "takes over":
            donor = line["from"]
            their_step = line["others"][str(donor)][0]
            ancestor[member].append((step, weights_of(donor, their_step)))
            arrow = {"arrowstyle": "->", "color": DARK, "lw": 1}
            axis.annotate("", (step, member), (their_step, donor), arrowprops=arrow)
        elif line["decision"] == "mutates":
            axis.plot(step, member, "o", color="white", mec=DARK, ms=5, zorder=3)
    last = max(member[-1]["step"] for member in decisions)
    for member, since in ancestor.items():
        ends = [*(step for step, _ in since[1:]), last]
        named = None
        for (begin, whose), end in zip(since, ends):
            lane = {"color": COLORS[whose], "lw": 5, "solid_capstyle": "butt"}
            axis.plot([begin, end], [member, member], **lane)
            if whose != named:
                beside = {"xytext": (2, 5), "textcoords": "offset points", "fontsize": 8}
                beside["bbox"] = {"facecolor": "white", "lw": 0, "pad": 0.3}  # above arrows
                axis.annotate(str(whose), (begin, member), zorder=4, **beside)
            named = whose
    limits = (len(decisions) - 0.5, -0.5)
    axis.set(yticks=range(len(decisions)), ylim=limits, ylabel="member", xlabel="steps")


def member_curve(axis, member, steps, values):
    """Draw a curve of a population's member, with its own color, line style and marker. Later
    members have thinner lines, so that equal curves are all visible."""
    line_style, marker = MEMBERS[member % len(MEMBERS)]
    every = 1 + len(steps) // 6
    width = max(4.5 - 1.3 * member, 1)
    marks = {"marker": marker, "markersize": width + 3, "markevery": (member % every, every)}
    look = {"color": COLORS[member], "linestyle": line_style, "label": f"member {member}"}
    axis.plot(steps, values, lw=width, **look, **marks)


def schedules(axis, decisions, name):
    """Draw how an option evolved in each member, on a logarithmic scale."""
    for number, member in enumerate(decisions):
        steps = [0]
        values = [member[0]["options"][name]]
        for line in member:  # before the decision, and after it
            steps += [line["step"], line["step"]]
            values += [line["options"][name], line["to"][name]]
        member_curve(axis, number, steps, values)
    axis.set(yscale="log", xlabel="steps", ylabel=in_words(name))


def evolution(decisions):
    """Draw the family tree and the learning rates of a population."""
    figure, axes = plt.subplots(1, 2, figsize=(9, 2.8), layout="constrained")
    family_tree(axes[0], decisions)
    axes[0].set_title("weights: number and color of the first ancestor")
    schedules(axes[1], decisions, "learning_rate")
    axes[1].legend(frameon=False, fontsize=8)
    return figure


# --------------------------------------------------------------------------------------- PointNav


def flat(axis, boxes_K4, num_walls, size):
    """Draw the walls and furniture of a floor plan, and a bar of 1 m below it."""
    width, depth = size
    edge_4 = np.array([width, depth, width, depth]) + 0.1  # of the outer walls, a strip is drawn
    for box, (x0, y0, x1, y1) in enumerate(np.clip(boxes_K4, -0.1, edge_4)):
        color = DARK if box < num_walls else "#B0B0B0"
        axis.add_patch(Rectangle((x0, y0), x1 - x0, y1 - y0, color=color, lw=0))
    axis.plot([0, 1], [-0.5, -0.5], color="black", lw=3, solid_capstyle="butt")
    axis.text(1.15, -0.5, "1 m", va="center", fontsize=9)
    axis.set(xlim=(-0.1, width + 0.1), ylim=(-0.9, depth + 0.1), aspect="equal")
    axis.set(xticks=[], yticks=[])
    axis.spines[:].set_visible(False)


def chain_view(axis, found):
    """Draw a complete chain from above: the path of each skill, the object's first position (ring)
    and its place (square)."""
    looks = ((BLUE, "-"), (ORANGE, "o-"), (SKY, "--"), (PURPLE, "^-"))
    flat(axis, found["boxes"], found["walls"], found["size"])
    for number, ((color, line), (name, path)) in enumerate(zip(looks, found["stages"]), 1):
        axis.plot(*np.array(path).T, line, color=color, ms=4, lw=2, label=f"{number} {name}")
    axis.plot(*found["object"], "o", mfc="none", mec="black", ms=10, mew=1.5)
    axis.plot(*found["place"], "s", mfc="none", mec="black", ms=10, mew=1.5)
    axis.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1, 1))


def chain_and_distance(found):
    """Draw a complete chain, and the success of Pick for each starting distance. `found` has the
    results of the benchmark."""
    shape = {"figsize": (9, 2.6), "gridspec_kw": {"width_ratios": [1.3, 1]}}
    figure, axes = plt.subplots(1, 2, layout="constrained", **shape)
    chain_view(axes[0], found["path"])
    middle_m = [np.mean(bin_m) for bin_m in found["far_m"]]
    band(axes[1], middle_m, found["far"], BLUE, "Pick with base")
    axes[1].axvspan(*STARTS_M, color=GREY, alpha=0.3, lw=0)
    axes[1].set(xlabel="meters to the object (grey: in training)", ylabel="success of Pick")
    axes[1].set(ylim=(0, 1.02), xlim=(0, None))
    return figure


def plan_view(axis, env):
    """Draw a floor plan from above. The shortest path is broad and light. The agent's path is thin
    and dark, from the dot to the cross. A ring marks the goal."""
    start = env.path[0]
    end = env.path[-1]
    flat(axis, env.plan.boxes_K4, env.plan.num_walls, env.plan.size)
    env.position = start
    axis.plot(*np.array(env.shortest_path()).T, color=SKY, lw=5, solid_capstyle="round")
    env.position = end
    axis.plot(*np.array(env.path).T, color=BLUE, lw=1.5)
    axis.plot(*env.goal, "o", mfc="none", mec=RED, ms=15, mew=2.5)
    axis.plot(*start, "o", color=BLUE, ms=6)
    axis.plot(*end, "x", color="black", ms=8, mew=2)


def moment(eye, plan, env, depth_HW1, heading):
    """Draw a moment of an episode: the camera's picture (near is dark), and the agent's path and
    heading from above."""
    for axis in (eye, plan):
        axis.clear()
    eye.imshow(depth_HW1[..., 0] ** 0.5, cmap="gray", vmin=0, vmax=1)
    eye.set(xticks=[], yticks=[], title="what it sees: depth")
    plan_view(plan, env)
    position = env.path[-1]
    for turn in (-np.pi / 4, np.pi / 4):
        way = 0.8 * np.array([np.cos(heading + turn), np.sin(heading + turn)])
        plan.plot(*np.array([position, position + way]).T, color=ORANGE, lw=2)
    plan.set_title("where it is: unknown to it")
