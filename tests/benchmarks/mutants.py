"""Plant small faults in the lesson of ver_ppo.py and in ver_multigpu.py, one at a time, and count
those that the quick tests notice.

    mutants.py                                        writes notebooks/results/mutants.json
    mutants.py --only bootstrap                       only faults with this word in their names

Each fault (a *mutant*, of tests/mutations.py) is planted in a copy of this folder. It is *killed*
if a quick test fails there, or if the tests hang: if they take longer than --limit seconds, and
than four times their usual time. Otherwise it *survives*: either the tests have a hole, or the
mutant changes nothing. The tests of a mutant's own mechanism run first, and all quick tests run if
those pass. Tests that compare texts are left out, because any change of a line can make them fail:
of test_docs.py, only the worked examples run.

Prints the survivors and the score. The result file also names the first test that failed for each
killed mutant. The exit status is 1 if a mutant survives.
"""

import functools
import queue
import re
import shutil
import sys
import tempfile
import time
from pathlib import Path

import harness
from tqdm import tqdm

from tests.mutations import MUTANTS

SLOW = "test_learning.py", "test_reports.py"  # these run last
# compiled files of a mutant must not be found by the next one
QUICK = "-m pytest -q -x -m quick -p no:cacheprovider -k".split()
QUICK += ["not test_docs or test_worked_examples"]
LEFT_OUT = shutil.ignore_patterns(".*", "__pycache__", "runs")


def quick_files():
    """The test files that have quick tests."""
    files = (harness.ROOT / "tests").glob("test_*.py")
    names = sorted(path.name for path in files if "pytest.mark.quick" in path.read_text())
    return sorted(names, key=lambda name: name in SLOW)


def first_failure(checkout, files, limit_sec):
    """Run the quick tests of these files. Returns the name of the first test that fails, what else
    ended the tests, or None if all pass."""
    words = [sys.executable, *QUICK, *(f"tests/{name}" for name in files)]
    try:
        harness.execute(words, checkout, timeout_sec=limit_sec, PYTHONDONTWRITEBYTECODE="1")
    except RuntimeError as error:
        failed = re.search(r"^(?:FAILED|ERROR) ([\w./:]+)", str(error), re.M)
        return failed[1] if failed else str(error).partition(": exit status ")[2].splitlines()[0]
    return None


def killer(mutant, checkouts, limit_sec, bar):
    """Plant a mutant in a free checkout, and run the tests. Returns what kills it, or None if it
    survives, which it prints."""
    checkout = checkouts.get()
    path = checkout / mutant.file
    text = path.read_text()
    try:
        path.write_text(mutant.plant(text))
        found = first_failure(checkout, mutant.tests, limit_sec)
        found = found or first_failure(checkout, quick_files(), limit_sec)
        if not found:
            bar.write(f"survives: {mutant.file}, {mutant.name}")
        return found
    finally:
        path.write_text(text)
        checkouts.put(checkout)
        bar.update()


def run_all(mutants, jobs, limit_sec):
    """Test every mutant. Returns what kills each, or None, in their order. Exits if the quick tests
    fail without a mutant."""
    checkouts = queue.Queue()
    with tempfile.TemporaryDirectory() as folder, tqdm(total=len(mutants)) as bar:
        for job in range(jobs):
            copied = shutil.copytree(harness.ROOT, Path(folder, str(job)), ignore=LEFT_OUT)
            checkouts.put(Path(copied))
        began_at = time.monotonic()
        failed = first_failure(Path(folder, "0"), quick_files(), 3600)
        if failed:
            sys.exit(f"mutants.py: without a mutant, the quick tests already fail: {failed}")
        limit_sec = max(limit_sec, 4 * (time.monotonic() - began_at))
        calls = [functools.partial(killer, each, checkouts, limit_sec, bar) for each in mutants]
        return harness.together(calls, jobs)


if __name__ == "__main__":
    parser = harness.command_line(__doc__)
    parser.add_argument("--jobs", type=int, default=1, help="mutants at the same time")
    parser.add_argument("--only", default="", help="a part of the mutants' names")
    parser.add_argument("--limit", type=float, default=300, help="seconds for the tests")
    args = parser.parse_args()
    mutants = [mutant for mutant in MUTANTS if args.only in mutant.name]
    try:
        for mutant in mutants:
            mutant.plant((harness.ROOT / mutant.file).read_text())
    except ValueError as error:
        sys.exit(f"mutants.py: {error}")
    killers = run_all(mutants, args.jobs, args.limit)
    survivors = [mutant for mutant, found in zip(mutants, killers) if not found]
    killed = [[mutant.name, found] for mutant, found in zip(mutants, killers) if found]
    print(f"{len(killed)} of {len(mutants)} mutants are killed")
    if not args.only:
        planted = {}
        for file in dict.fromkeys(mutant.file for mutant in mutants):
            count = sum(mutant.file == file for mutant in mutants)
            names = [mutant.name for mutant in survivors if mutant.file == file]
            planted[file] = {"mutants": count, "survivors": names}
        harness.keep(args, "mutants", planted=planted, killed=killed)
    sys.exit(bool(survivors))
