"""What is written down is so: the table of mechanisms, the worked examples, the options' help; and
the code stays small."""

import ast
import doctest
import inspect
import operator
import re
import subprocess
import sys
from dataclasses import fields

import pytest

import ver_multigpu
import ver_ppo
from notebooks import draw
from notebooks.environments import duel, habitat, pointnav, rearrange, tasks
from notebooks.extensions import (
    chain,
    check,
    clocked,
    controller,
    graphs,
    inference,
    networks,
    overlap,
    play,
    population,
    selfplay,
    series,
    trace,
    transfer,
    virtual_clock,
    virtual_ranks,
    wrappers,
)
from tests.helpers import ROOT
from tests.mutations import MUTANTS

pytestmark = pytest.mark.quick

SOURCE = (ROOT / "ver_ppo.py").read_text()
DETAILS = (ROOT / "notebooks" / "DETAILS.md").read_text()
MECHANISMS = (ROOT / "tests" / "README.md").read_text()
LINK = re.compile(r"\[`([\w.]+)`\]\(([\w/.]+\.py)#L(\d+)\)")
# name, path and line of each link to a function, a class or a test
LINKS = [
    (name, (ROOT / folder / path).resolve(), line)
    for folder, page in (("notebooks", DETAILS), ("tests", MECHANISMS))
    for name, path, line in LINK.findall(page)
]
ENVIRONMENTS = [duel, habitat, pointnav, rearrange, tasks]
EXTENSIONS = [chain, check, clocked, controller, graphs, inference, networks, overlap, play]
EXTENSIONS += [population, series, selfplay, trace, transfer, virtual_clock]
EXTENSIONS += [virtual_ranks, wrappers]
BESIDE = [draw, *ENVIRONMENTS, *EXTENSIONS]  # the scripts
MODULES = pytest.mark.parametrize(
    "module", [ver_ppo, ver_multigpu, *BESIDE], ids=lambda module: module.__name__
)


def test_links_to_code():
    """Every link of the details and of the mechanisms leads to the line that defines the function,
    class or test that it names."""
    assert len(LINKS) > 150
    modules = {
        module.__name__.split(".")[-1]: module for module in (ver_ppo, ver_multigpu, *BESIDE)
    }
    wrong = []
    for name, path, line in LINKS:
        lines = path.read_text().splitlines()
        last = name.split(".")[-1]
        first = int(line)
        if path.parent.name != "tests":
            thing = operator.attrgetter(name.removeprefix(f"{path.stem}."))(modules[path.stem])
            assert callable(thing), name
            _, first = inspect.getsourcelines(thing)  # of its decorators, if it has any
        defined = re.match(rf" *(def|class) {last}\b", lines[int(line) - 1])
        if not defined or not first <= int(line) <= first + 2:
            wrong.append(f"{name} in {path}")
    assert wrong == [], "run python tests/benchmarks/tables.py"


def test_details():
    """Twenty, numbered in order; each has an anchor, lines of our code that are there, our
    functions, the silent failure, a test, and the authors' lines where their code differs."""
    anchors = re.findall(r'^<a id="([\w-]+)"></a>\n### (\d+)\. ', DETAILS, re.M)
    assert [int(number) for _, number in anchors] == list(range(1, 21))
    assert len({anchor for anchor, _ in anchors}) == 20
    files = ["ver_ppo.py", "ver_multigpu.py", "notebooks/extensions/networks.py"]
    ours = {line.strip() for name in files for line in (ROOT / name).read_text().splitlines()}
    for detail in re.split(r"\n### \d+\. ", DETAILS.split("\n## Not only VER's")[0])[1:]:
        code = re.search(r"```python\n(.*?)```", detail, re.S)[1]
        assert {line.strip() for line in code.splitlines()} <= ours, code
        parts = dict(re.findall(r"^- \*\*(.+?)\*\*(.+?)(?=\n- \*\*|\n\n|\Z)", detail, re.M | re.S))
        assert list(parts)[-3:] == ["Here.", "Silent failure.", "Test."]
        assert ".py#L" in parts["Here."]
        assert re.match(r"\s\[`test_\w+`\]", parts["Test."])
        _, differs, theirs = detail.partition("<details><summary>The authors' code</summary>")
        if differs:
            assert re.search(r"\.py:\d+", theirs) and re.search(r"\bRan\b", theirs), detail
    assert DETAILS.count("<details>") == 7
    for key in re.findall(r"\]\[([\w-]+)\]\W", re.sub(r"```.*?```", "", DETAILS, flags=re.S)):
        assert f"\n[{key}]: https://github.com/" in DETAILS, key


def test_mechanisms():
    """The table of mechanisms has a row for each, with a function and a test."""
    table = MECHANISMS.split("| mechanism | function | paper | test |\n|---|---|---|---|\n")[1]
    rows = table.split("\n\n")[0].splitlines()
    assert len(rows) >= 40
    assert len({row.split("|")[1] for row in rows}) == len(rows)
    for row in rows:
        _, name, function, _, test, _ = row.split("|")
        assert re.search(r"\.py#L\d+", function) and re.search(r"`test_\w+`", test), name


def test_members_of_a_run():
    """The manual's table for extensions, and Run's own list, have members that there are."""
    page = (ROOT / "notebooks" / "DOORS.md").read_text()
    _, section = page.split("\n### Extensions of your own\n")
    table = section.split("\n\n")[1]
    cells = [line.split("|")[1] for line in table.splitlines()[2:]]
    told = re.findall(r"`(\w+)(?:\([\w, ]*\))?`", " ".join(cells))
    assert len(told) == len(set(told)) >= 7
    lists = re.findall(r"^ {4}((?:\w+, )*\w+) {4}", inspect.getdoc(ver_ppo.Run), re.M)
    listed = ", ".join(lists).split(", ")
    assert len(lists) >= 10 and set(told) <= set(listed)
    assert [name for name in listed if not hasattr(ver_ppo.Run, name)] == []


def test_worked_examples():
    """The examples in the docstrings are true."""
    attempted = 0
    for module in (ver_ppo, ver_multigpu, pointnav):
        results = doctest.testmod(module)
        assert results.failed == 0
        attempted += results.attempted
    assert attempted >= 10


def test_every_option_is_explained(capsys):
    """Each has a comment on its line or right above it, which --help shows."""
    source = SOURCE + (ROOT / "ver_multigpu.py").read_text()
    for field in fields(ver_multigpu.Options):
        on_its_line = rf"^    {field.name}: [^#\n]+  # \S+"
        above = rf"^    # \S.*\n    {field.name}: "
        assert re.search(f"{on_its_line}|{above}", source, re.M), field.name
    with pytest.raises(SystemExit, match="0"):
        ver_ppo.main(["--help"])
    words = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "discount factor" in words
    assert "processes among which the environments are divided" in words


@MODULES
def test_every_public_function_has_a_docstring(module):
    """Functions and classes say what they do."""
    own = {
        name: thing
        for name, thing in vars(module).items()
        if getattr(thing, "__module__", "") == module.__name__
    }
    assert [
        name
        for name, thing in own.items()
        if callable(thing) and not name.startswith("_") and not thing.__doc__
    ] == []
    assert module.__doc__


FOLDERS = {  # what the files of a folder may import of the project
    ".": {"ver_ppo", "ver_multigpu"},  # the second imports itself
    "notebooks/environments": {"notebooks.environments", "ver_ppo"},
    "notebooks/extensions": {
        "notebooks.environments",
        "notebooks.extensions",
        "ver_ppo",
        "ver_multigpu",
    },
    "notebooks": {
        "notebooks.environments",
        "notebooks.extensions",
        "notebooks.draw",
        "notebooks.mini_ver",
        "notebooks.solutions",
        "ver_ppo",
        "ver_multigpu",
    },
}


@pytest.mark.parametrize("folder", FOLDERS)
def test_arrows_run_one_way(folder):
    """Scripts know no add-on, environments no extension, and nothing outside tests/ imports
    tests/."""
    for path in [*(ROOT / folder).glob("*.py"), *(ROOT / folder).glob("*.ipynb")]:
        text = path.read_text().replace('\\n"', "").replace('    "', "")  # of a notebook: its cells
        found = re.findall(
            r"^\s*(?:from|import) ((?:notebooks|tests|ver_ppo|ver_multigpu)\b[\w.]*)", text, re.M
        )
        found += [
            f"notebooks.{name}"
            for name in re.findall(r"^\s*from notebooks import (\w+)", text, re.M)
        ]
        for name in set(found) - {"notebooks"}:
            assert any((name + ".").startswith(f"{room}.") for room in FOLDERS[folder]), (
                path.name,
                name,
            )


def test_style():
    """Every line fits into 100 columns, no name is unused or unknown, imports are in order."""
    command = [sys.executable, "-m", "ruff", "check", "--no-cache", "--output-format", "concise"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_mutants():
    """Every fault of benchmarks/mutants.py can be planted, and leaves code that Python can read."""
    texts = {mutant.file: (ROOT / mutant.file).read_text() for mutant in MUTANTS}
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS) >= 60
    for mutant in MUTANTS:
        before = texts[mutant.file].split("\n\n\n")  # functions and classes
        after = mutant.plant(texts[mutant.file]).split("\n\n\n")
        (changed,) = [part for part, old in zip(after, before, strict=True) if part != old]
        compile(changed, mutant.name, "exec")


def defined(source):
    """The names of the functions, classes and constants of a piece of code."""
    names = set()
    for node in ast.parse(source).body:
        if isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
        elif hasattr(node, "name"):
            names.add(node.name)
    return names


def test_lesson():
    """Its end is marked. It uses no name that is defined below it, and the members of workers and
    policies that its first lines announce."""
    lesson, rest = SOURCE.split("\n# End of the lesson\n")
    nodes = list(ast.walk(ast.parse(lesson)))
    used = {node.id for node in nodes if isinstance(node, ast.Name)}
    assert used & defined(rest) == set()
    members = {"workers": set(), "policy": set()}
    for node in nodes:
        if isinstance(node, ast.Attribute):
            owner = ast.unparse(node.value).removeprefix("self.")
            members.get(owner, set()).add(node.attr)
    assert members["workers"] == {"send", "receive"}
    said = {"step", "sequences"}
    others = {"parameters", "state_shape", "critic", "log_ent_coef", "auxiliary_loss"}
    assert members["policy"] == said | others | {"keep_bounds"}
