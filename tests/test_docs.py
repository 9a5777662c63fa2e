"""What the documentation says is so: the mechanism index, the worked examples, the README's commands."""

import doctest
import operator
import re
from pathlib import Path

import pytest
import ver_multigpu
import ver_ppo

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()


SCRIPTS = pytest.mark.parametrize("script", [ver_ppo, ver_multigpu], ids=lambda script: script.__name__)


def mechanism_index(script):
    """Rows of the index in the module's docstring: mechanism, functions, section, test."""
    lines = script.__doc__.splitlines()
    begin = next(i for i, line in enumerate(lines) if line.startswith("Mechanism"))
    return [re.split(r"\s{2,}", line.strip()) for line in lines[begin + 1 :] if line.strip()]


@SCRIPTS
def test_mechanism_index(script):
    """Every function and every test that the index names exists, and the README's table names the same."""
    rows = mechanism_index(script)
    assert len(rows) >= 6
    for mechanism, functions, section, test in rows:
        for function in functions.split(", "):
            assert callable(operator.attrgetter(function)(script)), function
            assert f"`{function}`" in README, function
        file, name = test.split("::")
        assert f"def {name}(" in (ROOT / "tests" / file).read_text(), test
        assert name in README, name


@SCRIPTS
def test_worked_examples(script):
    """The examples in the docstrings are true."""
    results = doctest.testmod(script)
    assert results.attempted >= 2 and results.failed == 0


def test_every_option_is_explained():
    """--help says something about every option."""
    source = (ROOT / "ver_ppo.py").read_text() + (ROOT / "ver_multigpu.py").read_text()
    for field in ver_ppo.fields(ver_multigpu.Options):
        assert re.search(rf"^    {field.name}: .* = .*\n    \"\"\"", source, re.M), field.name


@SCRIPTS
def test_every_public_function_has_a_docstring(script):
    """Functions and classes say what they do."""
    for name, thing in vars(script).items():
        if getattr(thing, "__module__", "") == script.__name__ and not name.startswith("_"):
            assert thing.__doc__, name
