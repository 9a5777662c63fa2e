"""Runs benchmarks, keeps what they have found, and makes the tables of README.md and of the manual,
and pictures of speed, from that, so that none of these figures is typed.

    python tests/benchmarks/all.py run scaling                      one of BENCHMARKS, or several
    python tests/benchmarks/all.py run peers --arguments "..."      with arguments of its own
    python tests/benchmarks/all.py tables                           writes the tables, draws

notebooks/results/NAME.json says by which command, at which commit, when, on which machine and with
which versions. What trainings learn is kept by results.py, in files of the same kind.
"""

import argparse
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import results

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "notebooks" / "MANUAL.md"]
MARKS = re.compile(r"(<!-- results: (\w+) -->\n).*?(<!-- end of results -->)", re.DOTALL)
BENCHMARKS = {  # their last line is JSON
    "scaling": "scaling.py simulate --ranks 1 2 4 8 16 32 64 128 256",
    "peers": "peers.py --rounds 3 --total-timesteps 50000",
}


def run(name, arguments):
    """Run a benchmark to its end and keep what it found. Raises CalledProcessError."""
    command = f"python tests/benchmarks/{BENCHMARKS[name]}"
    words = [sys.executable, *shlex.split(command)[1:], *shlex.split(arguments)]
    process = subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    last = ""
    for line in process.stdout:
        print(line, end="", flush=True)
        last = line
    if process.wait():
        raise subprocess.CalledProcessError(process.returncode, command)
    kept = {"command": command, "found": json.loads(last), **results.where_and_when()}
    (results.draw.RESULTS / f"{name}.json").write_text(results.dump(kept) + "\n")


def scaling_table(found):
    """Speed-ups over one rank, of simulators that differ."""
    lines = []
    for mode, by_ranks in found["heterogeneous"].items():
        if not lines:
            lines += [f"| ranks | {' | '.join(by_ranks)} |", "|---" * (len(by_ranks) + 1) + "|"]
        speedups = [f"{at['speedup']:.3g}" for at in by_ranks.values()]
        sampler, preemption = mode.split()
        lines.append(f"| `{sampler}`, `{preemption}` | {' | '.join(speedups)} |")
    return lines


def peers_table(found):
    """Steps per second of every trainer in one run, and how many times as fast ver_ppo.py is."""
    ours = by_trainer(found)["ver", "default"]
    lines = ["| trainer | steps/s: median (range) | ver_ppo.py is faster by |", "|---|---|---|"]
    for (trainer, variant), sps in by_trainer(found).items():
        ratios = np.array(ours) / sps
        spread = f"{np.median(sps):,.0f} ({min(sps):,.0f}–{max(sps):,.0f})"
        times = f"{np.median(ratios):.2f} ({min(ratios):.2f}–{max(ratios):.2f})"
        name = results.draw.TRAINERS[trainer]
        lines.append(f"| {name}, {variant} | {spread} | {times} |")
    return lines


def by_trainer(found):
    """Steps per second of each round: (trainer, variant) -> list."""
    sps = {}
    for each in found["runs"]:
        sps.setdefault((each["trainer"], each["variant"]), []).append(each["sps"])
    return sps


def with_footer(name, table):
    """The table of a benchmark, and where it is from."""
    kept = results.draw.load_result(name)
    footer = f"By `{kept['command']}` at commit {kept['commit']}, {kept['date']}, on "
    footer += f"{kept['machine']}, Python {kept['python']} (results/{name}.json)."
    return "\n".join([*table(kept["found"]), "", footer])


TABLES = {
    "learned": results.learned_table,
    "commands": results.commands,
    "published": results.published_table,
    "scaling": lambda: with_footer("scaling", scaling_table),
    "peers": lambda: with_footer("peers", peers_table),
}


def write_tables(text):
    """The text of a page, with everything between marks made anew."""
    return MARKS.sub(lambda found: f"{found[1]}{TABLES[found[2]]()}\n{found[3]}", text)


def draw_pictures():
    """What the tables say of speed."""
    draw = results.draw
    draw.setup()
    figures = {
        "peers": draw.trainer_bars(by_trainer(draw.load_result("peers")["found"])),
        "scaling": draw.scaling_curves(draw.load_result("scaling")["found"]),
    }
    for name, figure in figures.items():
        figure.savefig(ROOT / "notebooks" / "pictures" / f"{name}.png", dpi=90)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("run", "tables"))
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(BENCHMARKS))
    parser.add_argument("--arguments", default="", help="appended to the command; not kept")
    options = parser.parse_args()
    if options.what == "run":
        for chosen in options.names or BENCHMARKS:
            run(chosen, options.arguments)
    draw_pictures()
    for page in PAGES:
        page.write_text(write_tables(page.read_text()))
