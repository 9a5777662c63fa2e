"""What the README says is so: its commands run, its table comes from the result files, its glossary names every metric, its
example learns."""

import re
import shlex
import subprocess
import sys

import pytest
import ver_multigpu
import ver_ppo
from conftest import ROOT
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from test_docs import README
from test_multigpu import free_port
from test_run import run_folders

sys.path.append(str(ROOT / "tests" / "benchmarks"))
import results  # noqa: E402

COMMANDS = re.findall(r"^ {4}((?:pip|python|torchrun|tensorboard|sbatch) .*)", README, re.M)
SCRIPTS = [command for command in COMMANDS if re.search(r"(python ver_ppo|torchrun .* ver_multigpu)\.py", command)]
RUN = [command for command in COMMANDS if "# not run by the tests" not in command and "-m pytest" not in command]
SHORT = ["--total-timesteps", "1", "--eval-episodes", "2"]  # one rollout


def arguments(command):
    """What stands behind the script's name, without the comment."""
    return shlex.split(re.split(r"(?:ver_ppo|ver_multigpu)\.py", command.split("  #")[0])[1])


def run_folder(path):
    """The only run folder there."""
    (folder,) = run_folders(path)
    return folder


@pytest.mark.parametrize("command", SCRIPTS)
def test_readme_commands_are_understood(command, monkeypatch):
    """Every option in the README exists and its values are accepted."""
    kind, args = ver_multigpu.Options if "ver_multigpu" in command else ver_ppo.Options, arguments(command)
    monkeypatch.setattr(ver_ppo, "load_checkpoint", lambda path: {"options": vars(kind())})
    if "--help" not in args:
        ver_ppo.validate_options(ver_ppo.parse_options(args, kind))


def test_readme_begins_with_the_two_commands():
    """One line sets up and trains, one line sets up and tests."""
    assert "    pip install -r requirements.txt && python ver_ppo.py --env-id pointnav\n" in README
    assert "    pip install -r requirements.txt && python -m pytest" in README
    assert len(SCRIPTS) >= 5


@pytest.fixture(scope="module")
def earlier_run(tmp_path_factory):
    """A run of pointnav, for the commands that need one."""
    path = tmp_path_factory.mktemp("earlier")
    assert ver_ppo.main(["--env-id", "pointnav", "--runs-dir", str(path), *SHORT]) == 0
    return run_folder(path)


@pytest.mark.parametrize("command", [command for command in RUN if "ver_ppo.py" in command])
def test_command_runs(command, tmp_path, monkeypatch, request):
    """The line as it stands, but for the number of steps and where it writes."""
    monkeypatch.chdir(tmp_path)
    args = arguments(command)
    if "runs/" in command:
        earlier = str(request.getfixturevalue("earlier_run"))
        args = [re.sub(r"^runs/pointnav__ver__1__\d+", earlier, arg) for arg in args]
    if "--help" in args:
        with pytest.raises(SystemExit, match="0"):
            ver_ppo.main(args)
    elif "--checkpoint" in args:
        assert ver_ppo.main([*args, "--eval-episodes", "2"]) == 0
    elif "--resume" in args:
        assert ver_ppo.main([*args, "--total-timesteps", "4096", "--eval-episodes", "2"]) == 0
    elif "corridor" not in command:  # test_own_environment
        assert ver_ppo.main([*args, "--runs-dir", str(tmp_path / "runs"), *SHORT]) == 0
        assert (run_folder(tmp_path / "runs") / "checkpoint.pt").exists()


@pytest.mark.parametrize("command", [command for command in RUN if command.startswith("torchrun")])
def test_torchrun_command_runs(command, tmp_path):
    """The same for several ranks."""
    args = [*shlex.split(command.split("  #")[0])[1:], "--runs-dir", str(tmp_path), "--total-timesteps", "1"]
    launch = [sys.executable, "-m", "torch.distributed.run", "--master-port", str(free_port())]
    done = subprocess.run([*launch, *args, "--eval-episodes", "2"], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "evaluation, 2 sampled episodes" in done.stdout


def test_every_command_is_run_or_says_why_not():
    """All commands are of a kind that a test runs, or are marked; those of the benchmarks have these options."""
    assert len(RUN) >= 15
    for command in RUN:
        assert "ver_ppo.py" in command or command.startswith("torchrun"), command
    benchmarks = re.findall(r"`python (tests/benchmarks/\w+\.py)([^`]*)`", README)
    assert len(benchmarks) >= 8
    for file, arguments in benchmarks:
        source = (ROOT / file).read_text()
        for option in re.findall(r"--[a-z0-9-]+", arguments):
            assert f'"{option}"' in source, (file, option)


@pytest.mark.parametrize("what", ["table", "commands"])
def test_results_table(what):
    """The table, and the commands, are those that the result files give."""
    found = re.search(rf"<!-- .*results.py {what} -->\n(.*?)<!-- end of", README, re.S)[1]
    assert found.strip("\n") == getattr(results, what)()


def documented_tags():
    """The tags in the first column of the glossary."""
    table = README.split("### What the metrics mean")[1].split("###")[0]
    first_cells = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    return set(re.findall(r"`([\w/*]+)`", " ".join(first_cells)))


def test_metrics_glossary(tmp_path):
    """Every tag that a run writes is explained, and every tag that is explained is written by some run."""
    common = ["--num-envs", "2", "--num-steps", "64", "--image-size", "16", "--hidden-size", "8", "--total-timesteps", "512"]
    common += ["--eval-episodes", "1", "--device", "cpu"]
    assert ver_ppo.main([*common, "--cpc", "--num-workers", "1", "--runs-dir", str(tmp_path / "one")]) == 0
    assert ver_multigpu.main([*common, "--num-workers", "0", "--runs-dir", str(tmp_path / "many")]) == 0
    folders = [run_folder(tmp_path / name) for name in ("one", "many")]
    tags = {tag for folder in folders for tag in EventAccumulator(str(folder)).Reload().Tags()["scalars"]}
    written = {re.sub(r"^(metrics|eval)/.*", r"\1/*", tag) for tag in tags}
    assert written == documented_tags()


def test_own_environment(tmp_path, monkeypatch):
    """The README's example works by the command below it, and learns."""
    (tmp_path / "corridor.py").write_text(re.search(r"```python\n(.*?)```", README, re.S)[1])
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    command = next(command for command in COMMANDS if "corridor:" in command)
    assert ver_ppo.main(arguments(command)) == 0
    arrived = EventAccumulator(str(run_folder(tmp_path / "runs"))).Reload().Scalars("eval/arrived")[-1].value
    assert arrived > 0.9
