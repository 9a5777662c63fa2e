"""Situations from public bug reports: what a run does when its environment, its user or its cluster
does something unusual."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
import torch

import ver_multigpu
import ver_ppo
from notebooks.extensions import play
from notebooks.extensions.virtual_clock import SPEC
from tests.helpers import ROOT, one_line, run_folders, run_here, saved, small, wait_until

FAULTY = "tests.faulty_envs:"
CARTPOLE = "--env-id CartPole-v1 --num-workers 0 --total-timesteps"


def test_a_trial_that_hangs(tmp_path, capsys):
    """The run is refused after --env-timeout, and leaves no folder."""
    line = f"--env-id {FAULTY}Stuck-v0 --num-workers 1 --env-timeout 3"
    one_line(capsys, small(tmp_path, *line.split()), "gave no answer within 3 s (--env-timeout)")
    assert not run_folders(tmp_path)


def test_a_trial_that_dies(tmp_path, capsys):
    """A crash of the simulator at its first step does not take the main process with it."""
    line = "--env-id tests.test_reports:Deadly-v0 --num-workers 1"
    one_line(capsys, small(tmp_path, *line.split()), "its process died (exit code 7)")


class Deadly(gym.Env):
    """Ends its process in its first step."""

    observation_space = gym.spaces.Box(-1, 1, (2,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        return np.zeros(2, np.float32), {}

    def step(self, action):
        os._exit(7)


gym.register("Deadly-v0", f"{__name__}:Deadly")


@pytest.mark.parametrize("workers", [0, 1])
def test_an_environment_that_meddles(tmp_path, monkeypatch, workers):
    """The current folder, torch's default type, gradients and random generator stay the trainer's,
    although the environment changes its own: the run is where the user wanted it, and learns. (With
    --num-workers 0 the environment's current folder stays, since it may look for its files there.)
    """
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    line = f"--env-id {FAULTY}Meddler-v0 --total-timesteps 192 --num-workers {workers}"
    args = small(tmp_path, *line.split(), "--debug")
    args[args.index("--runs-dir") + 1] = "runs"
    assert ver_ppo.main(args) == 0
    (folder,) = [path for path in (tmp_path / "runs").iterdir() if path.name.startswith("tests")]
    assert saved(folder)["step"] == 192
    assert workers == 0 or os.getcwd() == str(tmp_path)
    assert torch.get_default_dtype() is torch.float32 and torch.is_grad_enabled()


@pytest.mark.parametrize("workers", [0, 2])
def test_an_environment_that_never_could_be_made(tmp_path, capfd, workers):
    """The second one finds its port in use: that ends the run at once, without restarts."""
    line = f"--env-id {FAULTY}Occupied-v0 --num-envs 2 --num-workers {workers}"
    assert ver_ppo.main(small(tmp_path, *line.split())) == 1
    said = "".join(capfd.readouterr())
    assert "started again" not in said and "Traceback" not in said
    assert "could not start" in said if workers else "cannot be made (OSError: the port" in said


def test_evaluation_of_endless_episodes(tmp_path, capsys, monkeypatch):
    """It is said while training, and the evaluation ends."""
    monkeypatch.setattr(ver_ppo, "MOST_EPISODE_STEPS", 50)
    line = f"--env-id {FAULTY}Endless-v0 --num-workers 0 --total-timesteps 1024"
    folder = run_here(tmp_path, line, "--eval-episodes", "4")
    out, err = capsys.readouterr()
    assert "no episode has ended in 704 steps" in out and "TimeLimit" in out
    assert "4 episodes are missing: some did not end in 50 steps" in err
    assert saved(folder)["step"] == 1024


@pytest.mark.parametrize("name", ["SIGHUP", "SIGUSR1", "SIGUSR2"])
def test_other_signals(tmp_path, monkeypatch, name):
    """A closed terminal and SLURM's warnings save, as SIGTERM does."""
    number = getattr(signal, name)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup it is ignored
    update = ver_ppo.ppo_update

    def stopped(*args):
        os.kill(os.getpid(), number)
        return update(*args)

    monkeypatch.setattr(ver_ppo, "ppo_update", stopped)
    assert ver_ppo.main(small(tmp_path, *f"{CARTPOLE} 640".split())) == 128 + number
    (folder,) = run_folders(tmp_path)
    assert saved(folder)["step"] == 64


def test_nohup(tmp_path, monkeypatch):
    """A SIGHUP that is ignored stays ignored."""
    own = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    update = ver_ppo.ppo_update
    hang_up = lambda *args: os.kill(os.getpid(), signal.SIGHUP) or update(*args)
    monkeypatch.setattr(ver_ppo, "ppo_update", hang_up)
    try:
        assert saved(run_here(tmp_path, f"{CARTPOLE} 128"))["step"] == 128
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, own)


def test_runs_of_the_same_second(tmp_path, monkeypatch):
    """Each has its folder."""
    monkeypatch.setattr(time, "time", lambda: 1_000_000.5)
    names = [ver_ppo.make_folder(ver_ppo.Options(runs_dir=str(tmp_path))).name for _ in range(3)]
    assert names == [f"pointnav__ver__1__1000000{end}" for end in ("", "_2", "_3")]


def test_a_run_folder_that_the_user_names(tmp_path, capsys):
    """--resume makes it, if it is clear that a new run is meant; the same command continues it."""
    folder = tmp_path / "mine"
    args = small(tmp_path, "--resume", str(folder), *f"{CARTPOLE} 64".split())
    for steps in ("64", "128"):
        assert ver_ppo.main([*args, "--total-timesteps", steps]) == 0
        assert saved(folder)["step"] == int(steps) and run_folders(tmp_path) == [folder]
    one_line(capsys, ["--resume", str(tmp_path / "typo")], "give --env-id, too")
    assert run_folders(tmp_path) == [folder]


def test_values_of_other_languages():
    """`false` is no text that counts as true."""
    found = [ver_ppo.read_value(text) for text in ("true", "false", "null", "True", "none")]
    assert found == [True, False, None, True, "none"]


def test_half_bounded_actions():
    """-1..1 is a range of 2 next to the bound, so that learning can move the action."""
    for space, expected in [
        (gym.spaces.Box(10, np.inf, (3,)), [10, 11, 12]),
        (gym.spaces.Box(-np.inf, 4, (3,)), [2, 3, 4]),
        (gym.spaces.Box(-np.inf, np.inf, (3,)), [-1, 0, 1]),
        (gym.spaces.Box(-3e38, 3e38, (3,)), [-1, 0, 1]),
    ]:
        action = np.array([-1, 0, 1], np.float32)
        assert ver_ppo.to_env_action(space, action).tolist() == expected


def test_seeds_have_31_bits():
    """A simulator in C keeps them in an int."""
    assert max(ver_ppo.derive_seed(1, k) for k in range(1000)) < 2**31


def test_a_daemon_cannot_train(monkeypatch):
    """As in a multiprocessing.Pool: one line that says what else to use."""
    monkeypatch.setattr(type(ver_ppo.mp.current_process()), "daemon", True)
    with pytest.raises(ver_ppo.UserError, match="ProcessPoolExecutor"):
        ver_ppo.check_process(ver_ppo.Options())
    ver_ppo.check_process(ver_ppo.Options(num_workers=0))


@pytest.mark.parametrize(
    "observations, words",
    [
        (gym.spaces.Box(-1, 1, (0,)), "a dimension of size 0"),
        (gym.spaces.Dict(a=gym.spaces.Box(-1, 1, (3, 0))), "a dimension of size 0"),
        (gym.spaces.Discrete(10**9), "too many choices"),
    ],
)
def test_spaces_that_cannot_be_learned_from(observations, words):
    spec = ver_ppo.EnvSpec(observations, gym.spaces.Discrete(2), ())
    with pytest.raises(ver_ppo.UserError, match=words):
        ver_ppo.check_spaces(spec)


def test_metrics_of_other_shapes():
    """One name without a comma is one name; a metric of shape (1,) is a number; what is missing, or
    has the name of one of ours, is refused."""
    env = gym.Env()
    env.metadata = {"metrics": ("success")}
    assert ver_ppo.metrics_of(env) == ("success",)
    spec = ver_ppo.EnvSpec(gym.spaces.Discrete(2), gym.spaces.Discrete(2), ("success",))
    assert ver_ppo.read_metrics({"success": np.ones(1)}, spec) == [1.0]
    for info in ({}, {"success": np.ones(2)}, {"success": "yes"}):
        with pytest.raises(ver_ppo.BadAnswer, match="success"):
            ver_ppo.read_metrics(info, spec)
    spec = ver_ppo.EnvSpec(gym.spaces.Discrete(2), gym.spaces.Discrete(2), ("length",))
    with pytest.raises(ver_ppo.UserError, match="a name is twice there or reserved"):
        ver_ppo.check_spaces(spec)


def test_record_video_is_refused(tmp_path, capsys):
    """All environments would write the same files."""
    wrapper = "tests.test_reports:RecordVideo"
    args = small(tmp_path, *f"{CARTPOLE} 64 --wrappers {wrapper}".split())
    one_line(capsys, args, "notebooks.extensions.play RUN_FOLDER")


class RecordVideo(gym.Wrapper):
    """Has the name of Gymnasium's, which needs a package more."""


def test_ranks_of_a_machine_count_on(monkeypatch):
    """Simulators derive ports from `number`."""
    seen = []
    gym.register("Seen-v0", lambda number: seen.append(number) or gym.Env(), kwargs={"number": 0})
    monkeypatch.setenv("LOCAL_RANK", "2")
    ver_ppo.make_env(ver_ppo.Options(env_id="Seen-v0", num_envs=8), number=3)
    assert seen == [19]


@pytest.mark.parametrize("name", ["SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"])
def test_copies_without_torchrun(tmp_path, monkeypatch, capsys, name):
    """srun and mpirun would train the same run twice."""
    monkeypatch.setenv(name, "2")
    args = small(tmp_path, *f"{CARTPOLE} 64".split())
    one_line(capsys, args, "has started 2 copies of one run", ver_multigpu.main)


def test_a_local_rank_alone(tmp_path, monkeypatch, capsys):
    """It silences nobody."""
    monkeypatch.setenv("LOCAL_RANK", "1")
    args = small(tmp_path, *f"{CARTPOLE} 0".split())
    one_line(capsys, args, "must be a positive number", ver_multigpu.main)


def test_a_long_folder_for_temporary_files(tmp_path):
    """One line, before there is a run folder."""
    long = tmp_path / ("long" * 25)
    long.mkdir()
    runs = tmp_path / "runs"
    line = f"ver_ppo.py --env-id CartPole-v1 --num-workers 1 --runs-dir {runs}"
    environment = {**os.environ, "TMPDIR": str(long)}
    command = [sys.executable, *line.split()]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 2 and "export TMPDIR=/tmp" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1 and not runs.exists()


def test_an_environment_in_this_folder(tmp_path):
    """From another folder, the refusal says how Python finds it."""
    with pytest.raises(ver_ppo.UserError, match="PYTHONPATH=. before the command"):
        ver_ppo.find("my_envs_that_nobody_has:Mine-v0", "--env-id")


def test_weights_of_few_steps():
    """With fewer steps than environments nothing was sampled too often."""
    assert ver_ppo.importance_weights(np.array([0, 2, 5]), 16).tolist() == [1, 1, 1]


def test_entropy_of_unequal_choices():
    """Its gradient is a number, however large its weight."""
    spec = ver_ppo.EnvSpec(gym.spaces.Discrete(2), gym.spaces.MultiDiscrete([2, 5]), ())
    policy = ver_ppo.Policy(spec, ver_ppo.Options(hidden_size=8))
    distribution, _ = policy.heads(torch.randn(4, 8))
    (1000.0 * distribution.entropy().sum()).backward()
    assert torch.isfinite(policy.actor.weight.grad).all()


def test_seconds_of_a_rank_that_gives_no_step():
    """An environment without a step takes as long as it did, or as the rollout; one step of 8 s
    takes 8 s, although the rollout lasted 3."""
    rollout = ver_ppo.Rollout(SPEC, 4, 3, (2, 8), torch.device("cpu"))
    rollout.rows = 1
    rollout.started_at = 100.0
    rollout.ended_at = 103.0
    rollout["env"][0] = 1
    rollout["began_at"][0] = 94.0
    rollout["step_sec"][0] = 8.0
    found = ver_multigpu.step_seconds(rollout, 4, np.array([20.0, 0.1, 0.0]))
    assert found.tolist() == [20.0, 8.0, 3.0]


def test_a_job_that_queues_itself_again(tmp_path):
    """The manual's script, with a stand-in for scontrol: SLURM's warning stops the run, which is
    saved, and the job is queued again; the second time it continues to its end."""
    page = (ROOT / "notebooks" / "MANUAL.md").read_text()
    (script,) = [code for code in re.findall(r"```bash\n(.*?)```", page, re.S) if "requeue" in code]
    line = f"{CARTPOLE} 100000000"
    args = " ".join(small(tmp_path, *line.split(), "--checkpoint-interval", "640"))
    command = "python ver_ppo.py --env-id pointnav"
    assert command in script
    script = script.replace(command, f"{sys.executable} ver_ppo.py {args}")
    (tmp_path / "scontrol").write_text(f"#!/bin/sh\necho $* >> {tmp_path / 'called'}\n")
    (tmp_path / "scontrol").chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "SCRATCH": str(tmp_path), "SLURM_JOB_ID": "7"}
    folder = tmp_path / "runs" / "7"
    job = subprocess.Popen(["bash", "-c", script], cwd=ROOT, env=environment)
    wait_until((folder / "checkpoint.pt").exists)
    job.send_signal(signal.SIGUSR1)
    job.wait(60)
    assert (tmp_path / "called").read_text() == "requeue 7\n"
    step = saved(folder)["step"]
    again = script.replace("100000000", str(step + 640))
    done = subprocess.run(["bash", "-c", again], cwd=ROOT, env=environment, timeout=60)
    assert done.returncode == 0
    assert saved(folder)["step"] == step + 640
    assert (tmp_path / "called").read_text() == "requeue 7\n", "and not once more"


def test_a_slow_checkpoint_preempts_nobody(tmp_path):
    """How long a rollout may last counts from its beginning: what comes before it, such as writing
    a checkpoint, is not a part of it. Then a rank that has waited for long enough ends it."""
    line = f"{CARTPOLE} 640 --num-envs 2".split()
    options = ver_ppo.parse_options(small(tmp_path, *line), ver_multigpu.Options)
    with contextlib.closing(ver_multigpu.RankRun(options)) as run:
        two = {"rank": 0, "size": 2, "add": lambda *more: 0, "agree": lambda failure: None}
        alone, run.ranks = run.ranks, SimpleNamespace(**two)
        run.begin_rollout(limit=1000, predicted_sec=0.2, last_rollout_sec=0.0)
        time.sleep(0.5)  # the checkpoint
        asked = []

        def source():
            for wait_sec in (0.0, 0.5):
                time.sleep(wait_sec)
                asked.append(run.enough(rows=4))
            yield SimpleNamespace(rows=4)

        run.next_rollout(source())
        run.ranks = alone
    assert asked == [False, True]


def test_second_signals(tmp_path, monkeypatch):
    """A terminal that closes may send two SIGHUP: both are one reason to stop. A second SIGTERM
    would end the process at once."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup it is ignored
    update = ver_ppo.ppo_update
    handlers = []

    def stopped(*args):
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGHUP)
        handlers.append(signal.getsignal(signal.SIGTERM))
        return update(*args)

    monkeypatch.setattr(ver_ppo, "ppo_update", stopped)
    assert ver_ppo.main(small(tmp_path, *f"{CARTPOLE} 640".split())) == 128 + signal.SIGHUP
    (folder,) = run_folders(tmp_path)
    assert saved(folder)["step"] == 64 and handlers == [signal.SIG_DFL]


def test_a_film_of_no_episode(tmp_path, capsys):
    """Is refused in one line."""
    one_line(capsys, [str(tmp_path), "--episodes", "0"], "must be 1 or more", play.main)
