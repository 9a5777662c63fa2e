"""What the documentation says is so: the mechanism index, the worked examples, the README's commands."""

import doctest
import re
import shlex
from pathlib import Path

import pytest
import ver_ppo

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()


def mechanism_index():
    """Rows of the index in the module's docstring: mechanism, functions, section, test."""
    lines = ver_ppo.__doc__.splitlines()
    begin = next(i for i, line in enumerate(lines) if line.startswith("Mechanism"))
    return [re.split(r"\s{2,}", line.strip()) for line in lines[begin + 1 :] if line.strip()]


def test_mechanism_index():
    """Every function and every test that the index names exists, and the README's table names the same."""
    rows = mechanism_index()
    assert len(rows) >= 10
    for mechanism, functions, section, test in rows:
        for function in functions.split(", "):
            assert callable(getattr(ver_ppo, function)), function
            assert f"`{function}`" in README, function
        file, name = test.split("::")
        assert f"def {name}(" in (ROOT / "tests" / file).read_text(), test
        assert name in README, name


def test_worked_examples():
    """The examples in the docstrings are true."""
    results = doctest.testmod(ver_ppo)
    assert results.attempted >= 8 and results.failed == 0


def readme_commands():
    """Command lines of the README that start one of the scripts."""
    return [
        line.strip().split("  #")[0].strip()
        for line in README.splitlines()
        if re.match(r" {4}(.*&& )?python ver_ppo.py", line)
    ]


@pytest.mark.parametrize("command", readme_commands())
def test_readme_commands_are_understood(command, monkeypatch):
    """Every option in the README exists and its values are accepted."""
    args = shlex.split(command.split("python ver_ppo.py")[1])
    monkeypatch.setattr(ver_ppo, "load_checkpoint", lambda path: {"options": vars(ver_ppo.Options())})
    if "--help" not in args:
        ver_ppo.validate_options(ver_ppo.parse_options(args))


def test_readme_begins_with_the_two_commands():
    """One line sets up and trains, one line sets up and tests."""
    assert "    pip install -r requirements.txt && python ver_ppo.py --env-id pointnav\n" in README
    assert "    pip install -r requirements.txt && python -m pytest" in README
    assert len(readme_commands()) >= 5


def test_every_option_is_explained():
    """--help says something about every option."""
    source = (ROOT / "ver_ppo.py").read_text()
    for field in ver_ppo.fields(ver_ppo.Options):
        assert re.search(rf"^    {field.name}: .* = .*\n    \"\"\"", source, re.M), field.name


def test_every_public_function_has_a_docstring():
    """Functions and classes say what they do."""
    for name, thing in vars(ver_ppo).items():
        if getattr(thing, "__module__", "") == "ver_ppo" and not name.startswith("_"):
            assert thing.__doc__, name
