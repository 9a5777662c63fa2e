"""Helpers that several test files share: small runs and their files, processes in sessions of their
own."""

import contextlib
import itertools
import os
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import forkserver, get_context, resource_tracker
from pathlib import Path

import gymnasium as gym
import numpy as np
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import ver_ppo

ROOT = Path(__file__).resolve().parents[1]
SMALL = "--num-envs 4 --num-steps 16 --hidden-size 16 --eval-episodes 0 --device cpu"
SMALL += " --learner-threads 1"
EXTENSIONS = {"here": [], "overlap": ["overlap"], "async": ["async"]}  # who collects
WHERE = {name: ["--extensions", *given] if given else [] for name, given in EXTENSIONS.items()}
# the same, and every rollout is checked
CHECKED = {name: ["--extensions", *given, "check"] for name, given in EXTENSIONS.items()}


def small(tmp_path, *args):
    """Arguments of a small run in this folder."""
    return [*SMALL.split(), "--total-timesteps", "100000", "--runs-dir", str(tmp_path), *args]


def run_folders(tmp_path):
    return sorted(path for path in tmp_path.iterdir() if path.is_dir())


def run_here(tmp_path, line, *args):
    """A small run in this process, which must succeed. Returns its folder."""
    assert ver_ppo.main(small(tmp_path, *line.split(), *args)) == 0
    (folder,) = run_folders(tmp_path)
    return folder


def one_line(capsys, args, word, main=ver_ppo.main):
    """This command must be refused: exit status 2, one line with this word in it."""
    capsys.readouterr()
    assert main(args) == 2
    error = capsys.readouterr().err
    assert word in error, error
    assert len(error.strip().splitlines()) == 1, error
    assert "Traceback" not in error, error


def saved(folder):
    """The checkpoint's content."""
    return ver_ppo.load_checkpoint(folder / "checkpoint.pt")


def same(one, two):
    """Whether two checkpoints, or parts of them, are equal bit for bit."""
    if isinstance(one, torch.Tensor):
        return torch.equal(one, two)
    if isinstance(one, dict):
        return one.keys() == two.keys() and all(same(one[key], two[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(two) and all(map(same, one, two))
    return one == two or (one != one and two != two)


def differences(one, two):
    return [key for key in one if key != "options" and not same(one[key], two[key])]


def logged(folder, tag):
    """The values of a tag in TensorBoard, by step. No step may have two."""
    events = EventAccumulator(str(folder)).Reload().Scalars(tag)
    assert len({event.step for event in events}) == len(events)
    return {event.step: event.value for event in events}


def processes():
    """Parent and session of every process that has not ended. (A zombie has ended. The process that
    adopts it may be slow to notice.)"""
    found = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, parent, _, session = path.read_text().rsplit(")", 1)[1].split()[:4]
            found |= {int(path.parent.name): (int(parent), int(session))} if state != "Z" else {}
    return found


def alive_in_session(session):
    """The numbers of the processes of this session that have not ended."""
    return [pid for pid, (_, its_session) in processes().items() if its_session == session]


def nobody_left(seconds=20):
    """Whether all processes that this one and its fork server have started end within this time."""
    servers = {forkserver._forkserver._forkserver_pid, resource_tracker._resource_tracker._pid}
    deadline, left = time.monotonic() + seconds, [None]
    while left and time.monotonic() < deadline:
        left = [
            pid
            for pid, (parent, _) in processes().items()
            if parent in {os.getpid(), *servers} - {None}
        ]
        left = set(left) - servers
    return not left


def wait_until(condition, seconds=180):
    """Wait until this function returns something true. (A machine that runs tests may be slow.)"""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.05)


def busy_shares(spans, others):
    """For each span of time (begin, end), the share of it that `others` cover. These are spans,
    too, and must not overlap each other."""
    began, ended = np.array([*others]).T
    return [
        (np.minimum(ended, end) - np.maximum(began, begin)).clip(0).sum() / (end - begin)
        for begin, end in spans
    ]


def make_spec(observation_space, action_space, metrics=()):
    """The Spec of an environment with these spaces."""
    env = gym.Env()
    env.metadata = {"metrics": metrics}
    env.observation_space = observation_space
    env.action_space = action_space
    return ver_ppo.spec_of(env)


def batch_of(rollout, sequences):
    """A mini-batch of these sequences, on a CPU."""
    columns = ver_ppo.to_device(rollout.complete, ver_ppo.LEARNED, torch.device("cpu"))
    return ver_ppo.make_batch(columns, sequences)


def make_environment(env_id, number=0, **options):
    """An environment, not yet started, and the table that has its row."""
    options = ver_ppo.Options(env_id=env_id, num_envs=number + 1, num_workers=0, **options)
    spec = ver_ppo.describe_env(options)
    io = ver_ppo.EnvIO(spec, number + 1)
    return ver_ppo.Environment(number, options, "train", spec, io), io


def free_port():
    with contextlib.closing(socket.socket()) as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def rank_environment(rank, size, port):
    """The environment variables that torchrun gives a rank, except those of its agent."""
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    return dict(zip(names, map(str, (rank, rank, size, size, "127.0.0.1", port))))


def in_new_process(function, *args):
    """Call `function` in a new process. Returns its result."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(function, *args).result()


def start(command, **environment):
    """A process in a session of its own, which prints into a pipe."""
    pipes = {
        "stdout": subprocess.PIPE,
        "stderr": subprocess.STDOUT,
        "text": True,
        "start_new_session": True,
    }
    return subprocess.Popen(
        [sys.executable, *command], cwd=ROOT, env={**os.environ, **environment}, **pipes
    )


def stop(sessions):
    """Kill all processes that are left of these sessions."""
    for pid in itertools.chain(*map(alive_in_session, sessions)):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
