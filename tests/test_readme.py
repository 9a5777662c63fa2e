"""What the README and the manual say is so: links lead somewhere, commands run, the first table
comes from the result files, the glossary names every metric, the example learns."""

import os
import re
import shlex
import subprocess
import sys

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import ver_multigpu
import ver_ppo
from notebooks.extensions import population
from tests.helpers import ROOT

NAMES = (
    *("MANUAL", "DOORS", "MEASURED", "HABITAT"),  # the manual's four pages
    *("README", "QUESTIONS", "COURSE", "DETAILS", "GLOSSARY"),
)
OF_NOTEBOOKS = [f"notebooks/{name}.md" for name in NAMES]
PAGES = {path: (ROOT / path).read_text() for path in ("README.md", *OF_NOTEBOOKS)}
README = PAGES["README.md"]
MANUAL = "\n".join(PAGES[path] for path in OF_NOTEBOOKS[:4])  # it has four pages
# converted checkpoints: see test_from_habitat.py
MANUAL, _, _ = MANUAL.partition("\n## From habitat-baselines\n")
COMMANDS = re.findall(r"^ {4}((?:pip|python|torchrun|tensorboard) .*)", README + MANUAL, re.M)
ONLY_READ = "# not run by the tests|-m pytest|^pip install -r requirements.txt$"
RUN = [command for command in COMMANDS if not re.search(ONLY_READ, command)]
SHORT = ["--num-steps", "16", "--total-timesteps", "1", "--eval-episodes", "2"]  # one small rollout


def arguments(command):
    """What stands behind the script's name, without the comment."""
    return shlex.split(
        re.split(r"ver_ppo\.py|ver_multigpu\.py|-m [\w.]+", command.split("  #")[0])[1]
    )


def read_events(path):
    """TensorBoard's curves of the only run there."""
    (events,) = path.rglob("events*")
    return EventAccumulator(str(events.parent)).Reload()


def test_first_commands():
    """One command trains. Two show what VER is about: they differ in the sampler alone. Then one
    that trains in two processes, and one that sets up and tests."""
    install, one, sync, ver, two, test = COMMANDS[:6]
    assert install == "pip install -r requirements.txt"
    assert one == "python ver_ppo.py --env-id pointnav"
    assert sync.replace("--sampler sync", "--sampler ver") == ver != sync
    assert two == "torchrun --nproc-per-node 2 ver_multigpu.py --env-id pointnav"
    assert test == f"{install} && python -m pytest tests -n 3"


@pytest.mark.parametrize("page", PAGES)
def test_links(page):
    """Every link to a file, a heading or an anchor leads there."""
    links = re.findall(r"\]\(((?!http)[^)]+)\)", PAGES[page])
    assert links
    for link in links:
        file, _, heading = link.partition("#")
        path = (ROOT / page).parent / file if file else ROOT / page
        assert path.exists(), link
        if re.fullmatch(r"L\d+", heading):
            continue  # a line of code: see test_docs.py
        text = path.read_text() if heading else ""
        titles = re.findall(r"^#+ (.*)", text, re.M)
        known = [re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in titles]
        assert heading in ("", *known, *re.findall(r'<a id="([\w-]+)">', text)), link


def test_every_command_is_run_or_says_why_not(tmp_path, monkeypatch):
    """All commands are of a kind that a test below runs, or are marked; those are understood, too.
    So are the benchmarks'."""
    kinds = r"ver_ppo\.py|^torchrun|^python -m notebooks\.extensions\.population"
    assert len(RUN) >= 15 and all(re.search(kinds, command) for command in RUN)
    marked = [
        command
        for command in COMMANDS
        if "# not run" in command and re.search(r"ver_\w+\.py", command)
    ]
    assert len(marked) >= 4
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "job").mkdir(parents=True)  # where a job's new run begins
    for command in marked:  # else: UserError, or tyro's SystemExit
        ver_ppo.parse_options(
            arguments(command),
            ver_multigpu.Options if "ver_multigpu" in command else ver_ppo.Options,
        )
    # footers of tables name the program that was run, as it was then
    own_words = re.sub(r"<!-- results.*?end of results -->", "", MANUAL, flags=re.S)
    programs = re.findall(r"`python (tests/benchmarks/\w+\.py)([^`]*)`", own_words)
    assert len(programs) >= 5
    for file, options in programs:
        what = re.findall(r"^ ([a-z]+)", options)  # run, train, ...
        for word in [*what, *re.findall(r"--[a-z0-9-]+", options)]:
            assert f'"{word}"' in (ROOT / file).read_text(), (file, word)


@pytest.fixture(scope="module")
def earlier_run(tmp_path_factory):
    """The folder of a pointnav run, for the commands that need one."""
    path = tmp_path_factory.mktemp("earlier")
    args = ["--env-id", "pointnav", "--num-workers", "1", "--runs-dir", str(path)]
    assert ver_ppo.main([*args, *SHORT]) == 0
    return next(path.iterdir())


@pytest.mark.parametrize("command", [c for c in RUN if "ver_ppo.py" in c and "corridor:" not in c])
def test_command_runs(command, tmp_path, monkeypatch, request):
    """The line as it stands, but for the number of steps and where it writes."""
    monkeypatch.chdir(tmp_path)
    args = arguments(command)
    if "runs/" in command:
        earlier = str(request.getfixturevalue("earlier_run"))
        args = [re.sub(r"runs/pointnav__ver__1__\d+", earlier, arg) for arg in args]
    if "--help" in args:
        with pytest.raises(SystemExit, match="0"):
            ver_ppo.main(args)
    elif "--checkpoint" in args:
        assert ver_ppo.main([*args, "--eval-episodes", "2"]) == 0
    elif "--resume" in args:
        assert ver_ppo.main([*args, "--total-timesteps", "512", "--eval-episodes", "2"]) == 0
    else:
        assert ver_ppo.main([*args, "--runs-dir", str(tmp_path / "runs"), *SHORT]) == 0
        assert read_events(tmp_path / "runs").Scalars("charts/SPS")


def test_population_command_runs(tmp_path, monkeypatch):
    """The same for a member of a population."""
    (command,) = (command for command in RUN if "extensions.population" in command)
    monkeypatch.chdir(tmp_path)
    assert population.main([*arguments(command), *SHORT]) == 0
    assert read_events(tmp_path / "runs").Scalars("charts/SPS")


def test_torchrun_command_runs(tmp_path):
    """The same for several ranks."""
    (command,) = (command for command in RUN if command.startswith("torchrun"))
    launch = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        *shlex.split(command)[1:],
    ]
    done = subprocess.run(
        [*launch, "--runs-dir", str(tmp_path), *SHORT],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "evaluation, 2 sampled episodes" in done.stdout


def test_tables():
    """Each table, and each list of commands, is what the result files give."""
    command = [sys.executable, "tests/benchmarks/tables.py", "--check"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_metrics_glossary(tmp_path):
    """Every tag that a run writes is explained, and every tag that is explained is written by some
    run."""
    table = re.split(r"\n##+ ", MANUAL.split("\n## Metrics\n")[1])[0]
    first_cells = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    common = [
        *SHORT,
        "--total-timesteps",
        "512",
        "--num-workers",
        "0",
        "--env-kwargs",
        "image_size=16",
    ]
    assert ver_ppo.main([*common, "--runs-dir", str(tmp_path / "one")]) == 0
    assert ver_multigpu.main([*common, "--runs-dir", str(tmp_path / "many")]) == 0
    tags = {
        tag for name in ("one", "many") for tag in read_events(tmp_path / name).Tags()["scalars"]
    }
    written = {re.sub(r"^(metrics|eval)/.*", r"\1/*", tag) for tag in tags}
    assert written == set(re.findall(r"`([\w/*]+)`", " ".join(first_cells)))


def test_questions(capsys):
    """The program of the questions runs, and prints what stands in its comment."""
    (program,) = re.findall(r"```python\n(.*?)```", PAGES["notebooks/QUESTIONS.md"], re.S)
    exec(program, {})
    (printed,) = capsys.readouterr().out.splitlines()
    assert np.fromstring(printed.strip("[]"), sep=" ").round(3).tolist() == [0.294] + [0.235] * 3


def test_own_environment(tmp_path, monkeypatch):
    """The manual's example works by the command below it, and learns."""
    (tmp_path / "corridor.py").write_text(
        re.search(r"```python\n(import gym[^`]*class Corridor.*?)```", MANUAL, re.S)[1]
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert ver_ppo.main(arguments(next(command for command in RUN if "corridor:" in command))) == 0
    assert read_events(tmp_path / "runs").Scalars("eval/arrived")[-1].value > 0.9


def test_as_a_library(tmp_path):
    """The manual's lines train, load what they have trained, and act, in a file of their own."""
    lines = r"```python\n(from notebooks.extensions.play import Agent.*?)```"
    text = re.search(lines, MANUAL, re.S)[1]
    assert "total_timesteps=50_000" in text
    small = "total_timesteps=512, num_steps=16, num_workers=0"
    small += ', device="cpu", eval_episodes=2'
    (tmp_path / "use.py").write_text(text.replace("total_timesteps=50_000", small))
    more = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "use.py"]
    done = subprocess.run(command, cwd=tmp_path, env=more, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    # CartPole's shortest episodes
    assert float(done.stdout.strip().splitlines()[-1]) >= 8, done.stdout
