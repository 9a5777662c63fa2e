"""Runs the benchmarks, keeps what they have found, and makes the tables of README.md and of the
manual, and their pictures, from that, so that none of these figures is typed.

    python tests/benchmarks/all.py run                              everything below, hours
    python tests/benchmarks/all.py run scaling peers                some of it
    python tests/benchmarks/all.py run peers --arguments "..."      with arguments of its own
    python tests/benchmarks/all.py tables                           writes the tables, draws
    python tests/benchmarks/all.py tables --check                   says whether they are up to date

CHECKPOINT, which some need, is the checkpoint.pt of a run of `pointnav`, --checkpoint FILE.
notebooks/results/NAME.json says by which command, at which commit, when, on which machine and with
which versions. TRAININGS write such files themselves; of the others, the last line of what they
print is kept.
"""

import argparse
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import evolution
import matplotlib
import numpy as np
import rearrange
import results
import throughput
import transfer
from results import draw, header

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "notebooks" / "MANUAL.md"]
MARKS = re.compile(r"(<!-- results: ([\w-]+) -->\n).*?(<!-- end of results -->)", re.DOTALL)
BENCHMARKS = {  # their last line is JSON
    "samplers": "throughput.py --workload a b c d --rounds 3 --rollouts 10",
    "feed-forward": "throughput.py --workload c --modes sync nover ver ver+overlap --feed-forward"
    " --rounds 3 --rollouts 10",
    "latency": "machinery.py latency --rounds 4 --checkpoint CHECKPOINT",
    "parts": "machinery.py parts --rounds 3 --checkpoint CHECKPOINT",
    "ranks": "scaling.py run --modes 'ver optimal' 'sync none' --rounds 2 --rollouts 10",
    "peers": "peers.py --rounds 3 --total-timesteps 50000",
    "peers-computes": "peers.py --rounds 3 --total-timesteps 12288 --simulator computes",
    "peers-sleeps": "peers.py --rounds 3 --total-timesteps 12288 --simulator sleeps",
    "scaling": "scaling.py simulate --ranks 1 2 4 8 16 32 64 128 256",
    "efficiency": "sample_efficiency.py --folder runs/efficiency --jobs 4",
    "equal": "evolution.py equal",
}
TRAININGS = {
    "learned": "results.py train",
    "published": "results.py train published",
    "transfer": "transfer.py --checkpoint CHECKPOINT",
    "rearrange": "rearrange.py --folder runs/rearrange --checkpoint CHECKPOINT",
    "evolution": "evolution.py run",
}


def run(name, checkpoint, arguments):
    """Run a benchmark to its end and keep what it found. Raises CalledProcessError."""
    command = f"python tests/benchmarks/{(BENCHMARKS | TRAININGS)[name]}"
    words = [sys.executable, *shlex.split(command)[1:], *shlex.split(arguments)]
    if "CHECKPOINT" in words and not checkpoint:
        raise SystemExit(f"{name} needs --checkpoint FILE")
    words = [checkpoint if word == "CHECKPOINT" else word for word in words]
    process = subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    last = ""
    for line in process.stdout:
        print(line, end="", flush=True)
        last = line
    if process.wait():
        raise subprocess.CalledProcessError(process.returncode, command)
    if name in BENCHMARKS:
        found = json.loads(last)
        results.keep(name, {"command": command, **results.where_and_when(), "found": found})


# ----------------------------------------------------------------------------------------- Tables


def spread(values, digits=0):
    """Median and range."""
    low, middle, high = (f"{value:,.{digits}f}" for value in np.percentile(values, (0, 50, 100)))
    return f"{middle} ({low}–{high})"


def samplers_table(found):
    """Steps per second of every sampler, beside lock-step and beside what the workload allows."""
    quantities = {
        "steps/s": (0, lambda result: result["sps"]),
        "ratio to `sync`": (2, lambda result: result["over_sync"]),
        "share of its bound": (2, lambda result: result["sps"] / result["bound"]),
    }
    lines = header("", *(f"`{mode}`" for mode in throughput.MODES))
    for workload, measured in found["workloads"].items():
        for words, (digits, quantity) in quantities.items():
            cells = []
            for mode in throughput.MODES:
                values = [quantity(results[mode]) for results in measured["rounds"]]
                cells.append(spread(values, digits))
            lines.append(f"| {workload}: {words} | {' | '.join(cells)} |")
    return lines


def feed_forward_table(found):
    """The same with the LSTM and without, in the same rounds."""
    (measured,) = found["workloads"].values()
    lines = header(
        "", "steps/s with the LSTM", "without", "ratio to `sync` with the LSTM", "without"
    )
    for mode in throughput.MODES:
        names = mode, mode + throughput.FEED_FORWARD
        if mode in measured["rounds"][0]:
            cells = []
            for quantity, digits in (("sps", 0), ("over_sync", 2)):
                for name in names:
                    values = [results[name][quantity] for results in measured["rounds"]]
                    cells.append(spread(values, digits))
            lines.append(f"| `{mode}` | {' | '.join(cells)} |")
    return lines


def latency_table(found):
    """What is left of the rate that the simulators' sleeping allows."""
    lines = header("simulators that sleep 20 ms a step", "share of what the sleeping allows")
    return [*lines, f"| 16, with pointnav's network | {spread(found['share_of_bound'], 3)} |"]


def parts_table(rounds):
    """Where the time of a step goes."""
    lines = header("of training pointnav", "median (range)")
    for key, (words, digits) in PARTS.items():
        values = [found[key] for found in rounds]
        lines.append(f"| {words} | {spread(values, digits)} |")
    return lines


PARTS = {  # of what machinery.py measures: words, digits
    "env_step_ms": ("alone: a step of one environment, ms", 3),
    "forward_ms": ("alone: the policy's part of a step, ms", 3),
    "learn_ms": ("alone: learning from a step, ms", 3),
    "loop_waiting_ms": ("in the loop: waiting, ms a step", 3),
    "loop_inference_ms": ("in the loop: inference, ms a step", 3),
    "loop_learning_ms": ("in the loop: learning, ms a step", 3),
    "rate": ("the loop: steps/s", 0),
    "share": ("as a share of 1 / (environment / cores + policy + learning)", 2),
    "arrange_ms": ("arranging a rollout into packed mini-batches, all epochs: ms", 2),
}


def ranks_table(found):
    """Speed-ups over one rank of real runs."""
    lines = header("ranks", *found["ver optimal"])
    for mode, by_ranks in found.items():
        rates = {ranks: [run["sps"] for run in runs] for ranks, runs in by_ranks.items()}
        one = np.mean(rates.pop("1"))
        cells = [f"1 = {one:.1f} steps/s"]
        cells += [spread(np.array(sps) / one, 2) for sps in rates.values()]
        lines.append(f"| {in_code(mode)} | {' | '.join(cells)} |")
    return lines


def scaling_table(found):
    """Speed-ups over one rank, of simulators that differ."""
    modes = found["heterogeneous"]
    lines = header("ranks", *modes["ver optimal"])
    for mode, by_ranks in modes.items():
        speedups = [f"{at['speedup']:.3g}" for at in by_ranks.values()]
        lines.append(f"| {in_code(mode)} | {' | '.join(speedups)} |")
    return lines


def in_code(mode):
    """The names in a mode of scaling.py, each as code."""
    return ", ".join(f"`{name}`" for name in mode.split())


def efficiency_table(found):
    """Area under the curves of learning, and their ends."""
    modes = list(next(iter(found["CartPole-v1"]["tags"].values())))
    lines = header("", *(f"`{mode}`" for mode in modes))
    for task, of_task in found.items():
        for tag, by_mode in of_task["tags"].items():
            digits = 0 if task == "CartPole-v1" else 3
            for what in ("area", "final"):
                cells = []
                for mode in modes:
                    at = by_mode[mode][what]
                    low, middle, high = (f"{at[key]:.{digits}f}" for key in ("low", "iqm", "high"))
                    cells.append(f"{middle} [{low}, {high}]")
                name = f"{task}, {draw.in_words(tag)}: {what}"
                lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


def peers_table(found):
    """Steps per second of every trainer in one run, and how many times as fast ver_ppo.py is."""
    ours = np.array(by_trainer(found)["ver", "default"])
    lines = header("trainer", "steps/s: median (range)", "the default is … times as fast")
    for (trainer, variant), sps in by_trainer(found).items():
        name = draw.TRAINERS[trainer]
        lines.append(f"| {name}, {variant} | {spread(sps)} | {spread(ours / sps, 2)} |")
    return lines


def by_trainer(found):
    """Steps per second of each round: (trainer, variant) -> list."""
    sps = {}
    for each in found["runs"]:
        sps.setdefault((each["trainer"], each["variant"]), []).append(each["sps"])
    return sps


def with_footer(table, *names):
    """A table of what these files hold, and where it is from."""
    kept = {name: draw.load_result(name) for name in names}
    files = {}
    for name, each in kept.items():
        where = f"By `{each['command']}` at commit {each['commit']}, {each['date']}, on "
        where += f"{each['machine']}, Python {each['python']}"
        files.setdefault(where, []).append(f"results/{name}.json")
    footer = " ".join(f"{where} ({' and '.join(found)})." for where, found in files.items())
    first = kept[names[0]]
    return "\n".join([*table(first.get("found", first)), "", footer])


TABLES = {
    "learned": results.learned_table,
    "commands": results.commands,
    "published": results.published_table,
    "transfer": lambda: with_footer(lambda kept: transfer.table(kept["runs"]), "transfer"),
    "chain": lambda: with_footer(rearrange.chain_table, "rearrange"),
    "far": lambda: with_footer(rearrange.far_table, "rearrange"),
    "equal": lambda: with_footer(evolution.equal_table, "equal"),
    "evolution": lambda: with_footer(
        lambda _: evolution.table(), *(f"evolution-{task}" for task in evolution.TASKS)
    ),
    "samplers": lambda: with_footer(samplers_table, "samplers"),
    "feed-forward": lambda: with_footer(feed_forward_table, "feed-forward"),
    "latency": lambda: with_footer(latency_table, "latency"),
    "parts": lambda: with_footer(parts_table, "parts"),
    "ranks": lambda: with_footer(ranks_table, "ranks"),
    "scaling": lambda: with_footer(scaling_table, "scaling"),
    "efficiency": lambda: with_footer(efficiency_table, "efficiency"),
    "peers": lambda: with_footer(peers_table, "peers"),
    "peers-computes": lambda: with_footer(peers_table, "peers-computes"),
    "peers-sleeps": lambda: with_footer(peers_table, "peers-sleeps"),
}


def write_tables(text):
    """The text of a page, with everything between marks made anew."""
    return MARKS.sub(lambda found: f"{found[1]}{TABLES[found[2]]()}\n{found[3]}", text)


def check_tables():
    """What is wrong with the pages: tables without a place or with several, unknown ones, and pages
    that would change."""
    wrong = []
    texts = {page: page.read_text() for page in PAGES}
    marks = [name for text in texts.values() for _, name, _ in MARKS.findall(text)]
    for name in sorted({*TABLES, *marks}):
        places = marks.count(name)
        if name not in TABLES:
            wrong.append(f"{name}: there is no such table")
        elif places != 1:
            wrong.append(f"{name}: {places} places in the pages")
    if not wrong:
        changed = [page for page, text in texts.items() if write_tables(text) != text]
        wrong = [f"{page}: would change; run all.py tables" for page in changed]
    return wrong


# --------------------------------------------------------------------------------------- Pictures


def draw_pictures():
    """All pictures of the README and of the manual that are drawn, but agent.gif (results.py) and
    habitat.png (picture.py)."""
    matplotlib.use("Agg")
    draw.setup()
    costs = {"inference_sec": 0.05, "learning_sec": 3.0}
    learned = {"depth camera": "pointnav", "blind": "pointnav-blind"}
    figures = {
        "whole": draw.whole(),
        "timeline": draw.compare_samplers(draw.step_times(4, 0.4, 0.6), 8, 3, **costs, height=6.0),
        "pointnav": draw.learning_curves(
            {label: draw.load_result(task) for label, task in learned.items()}
        ),
        "peers": draw.trainer_bars(by_trainer(draw.load_result("peers")["found"])),
        "scaling": draw.scaling_curves(draw.load_result("scaling")["found"]),
        "transfer": draw.transfer_curves(draw.load_result("transfer")["runs"], transfer.TASKS),
        "chain": draw.chain_and_distance(draw.load_result("rearrange")),
        "sample_efficiency": draw.efficiency_curves(draw.load_result("efficiency")["found"]),
        "population": draw.evolution(
            draw.load_result("evolution-CartPole-v1")["trials"][0]["decisions"]
        ),
    }
    for name, figure in figures.items():
        figure.savefig(ROOT / "notebooks" / "pictures" / f"{name}.png", dpi=90)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [*BENCHMARKS, *TRAININGS]
    parser.add_argument("what", choices=("run", "tables"))
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(names))
    parser.add_argument("--checkpoint", default="", help="file that takes CHECKPOINT's place")
    parser.add_argument("--arguments", default="", help="appended to the command; not kept")
    parser.add_argument("--check", action="store_true", help="with `tables`: write nothing")
    options = parser.parse_args()
    if options.check:
        if options.what == "run":
            parser.error("--check goes with `tables`")
        wrong = check_tables()
        print(*(wrong or ["the tables are up to date"]), sep="\n")
        sys.exit(bool(wrong))
    if unknown := set(options.names) - set(names):
        parser.error(f"there is no {', '.join(unknown)}")
    if options.what == "run":
        for chosen in options.names or names:
            run(chosen, options.checkpoint, options.arguments)
    draw_pictures()
    for page in PAGES:
        page.write_text(write_tables(page.read_text()))
