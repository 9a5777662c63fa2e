"""The ten promises of the manual ("What survives what"), each in a section of its own. The ninth,
about ranks, is in test_multigpu.py."""

import contextlib
import itertools
import json
import os
import re
import resource
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from multiprocessing import forkserver
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
import torch

import ver_ppo
from notebooks.extensions import play
from notebooks.extensions.check import check_rollout
from notebooks.extensions.virtual_clock import SPEC, VirtualWorkers, build
from tests import envs
from tests.faulty_envs import FAULTS, PLACES
from tests.helpers import (
    ROOT,
    WHERE,
    alive_in_session,
    differences,
    logged,
    make_spec,
    nobody_left,
    one_line,
    run_folders,
    run_here,
    same,
    saved,
    small,
    start,
    stop,
    wait_until,
)
from tests.soaking import soak

FAULTY = "--env-id tests.faulty_envs:"
CARTPOLE = "--env-id CartPole-v1 --num-workers 0 --total-timesteps"
COUNT_SPEC = make_spec(envs.Count.observation_space, envs.Count.action_space)


@pytest.fixture(scope="module")
def words_of_processes(tmp_path_factory):
    """A file into which all processes print that this one starts: their fork server must be started
    when the file is stderr."""
    path = tmp_path_factory.mktemp("words") / "stderr"
    own = os.dup(2)
    with open(path, "ab") as file:
        os.dup2(file.fileno(), 2)
        try:
            forkserver._forkserver._stop()
            ver_ppo.process_context()
        finally:
            os.dup2(own, 2)
            os.close(own)
    return path


@pytest.fixture
def said(words_of_processes, capfd):
    """A function: everything that this test, and the processes that it has started, have printed.
    """
    before = words_of_processes.stat().st_size

    def read():
        return "".join(capfd.readouterr()) + words_of_processes.read_bytes()[before:].decode()

    return read


@contextlib.contextmanager
def collecting(enough=lambda rows: False, **options):
    """A collector with real worker processes that run some kind of `Count`, and a rollout for it.
    """
    options = ver_ppo.Options(hidden_size=8, **options)
    num_envs = options.num_envs
    policy = ver_ppo.Policy(COUNT_SPEC, options).eval()
    policy.critic.scale.fill_(1.0)  # otherwise all values are 0
    io = ver_ppo.EnvIO(COUNT_SPEC, num_envs)
    size = options.rollout_steps, num_envs, policy.state_shape
    with contextlib.closing(ver_ppo.make_workers(options, "train", COUNT_SPEC, io)) as workers:
        c = ver_ppo.Collector(policy, workers, io, COUNT_SPEC, options, enough)
        yield c, ver_ppo.Rollout(COUNT_SPEC, *size)


def patient(seconds=180):
    """For `enough`: ends a rollout that takes longer than a test may."""
    until = time.monotonic() + seconds
    return lambda rows: time.monotonic() > until


def check_lost_steps(rollout, options):
    """A lost step ends its episode, its reward is the value that was predicted, and it teaches
    nothing: its weight and its advantage are 0. The steps before it have the advantages that they
    would have if the rollout ended there: the lost step contributes its value alone."""
    ver_ppo.add_advantages(rollout, options)
    steps = rollout.complete
    lost = steps[steps["lost"]]
    assert lost["done"].all() and (lost["reward"] == lost["value"]).all()
    assert (lost["weight"] == 0).all() and np.abs(lost["advantage"]).max(initial=0) < 1e-6
    assert (steps["weight"][~steps["lost"]] > 0).all()
    for segment in np.unique(lost["segment"]):
        mine = steps[steps["segment"] == segment]
        for end in np.flatnonzero(mine["lost"]):
            next_value = float(mine["value"][end])
            next_advantage = 0.0
            for step in reversed(mine[:end]):
                if step["done"]:
                    break
                delta = step["reward"] + options.gamma * next_value - step["value"]
                next_advantage = delta + options.gamma * options.gae_lambda * next_advantage
                next_value = float(step["value"])
                assert step["advantage"] == pytest.approx(next_advantage, rel=1e-5, abs=1e-5)
    return len(lost)


# ------------------------------------------------------ 1. A simulator that fails is started again
# First the lost steps: under the virtual clock, in real processes, and with a process that is
# killed at any line. Then Workers, whose processes are puppets here. Then whole runs.


def answer_again(environment):
    """Let an environment answer. If it raises, a new one answers in its place."""
    try:
        environment.answer()
    except Exception:
        environment.env = None
        environment.answer()


class Mortal(gym.Env):
    """Raises in one step of twelve, and in one reset of four after the end of an episode. The
    rewards that it gives are different numbers, noted in `given`; the returns and lengths of its
    episodes are noted in `ended`, and the failures in `crashes`."""

    rng = np.random.default_rng(0)
    given = []
    ended = []
    crashes = Counter()
    rewards = None  # of this episode

    def fail(self, where, probability):
        if self.rng.random() < probability:
            self.crashes[where] += 1
            raise RuntimeError("the simulator is out of paint")

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        if self.rewards is not None:
            self.fail("reset", 1 / 4)
        self.rewards = []
        return self.observe(), {}

    def observe(self):
        return self.np_random.normal(size=4).astype(np.float32)

    def step(self, action):
        self.fail("step", 1 / 12)
        self.given.append(len(self.given) + 1)
        self.rewards.append(self.given[-1])
        terminated = self.rng.random() < 0.1
        if terminated:
            self.ended.append((sum(self.rewards), len(self.rewards)))
        return self.observe(), self.given[-1], terminated, False, {}


Mortal.observation_space = gym.spaces.Box(-np.inf, np.inf, (4,), np.float32)
Mortal.action_space = gym.spaces.Discrete(3)


class MortalWorkers(VirtualWorkers):
    """The shipped environments under the virtual clock. One that raises is started again."""

    def __init__(self, num_envs, duration):
        super().__init__(num_envs, duration)
        rest = ver_ppo.Options(), "train", SPEC, self.io
        self.environments = [ver_ppo.Environment(e, *rest) for e in range(num_envs)]

    def answer(self, e):
        self.steps_N[e] += 1
        answer_again(self.environments[e])


@pytest.mark.parametrize("sampler", ["ver", "nover", "sync", "async"])
@pytest.mark.parametrize("seed", range(2))
def test_lost_steps(monkeypatch, sampler, seed):
    """Whatever fails when: every step that was answered is learned from once, with its reward and
    its episode's numbers, and each failure is one lost step. A finished step whose answer was not
    sent is lost, too: the reset after it has failed. All invariants hold."""
    for name, value in (("given", []), ("ended", []), ("crashes", Counter())):
        monkeypatch.setattr(Mortal, name, value)
    monkeypatch.setattr(Mortal, "rng", np.random.default_rng(seed))
    monkeypatch.setattr(ver_ppo, "make_env", lambda *args: Mortal())
    durations = Mortal.rng.uniform(0.2, 4.0, 64)
    workers = MortalWorkers(4, lambda e, step: durations[(11 * e + step) % 64])
    _, rollout, c = build(workers, 4, 12, sampler=sampler)
    learned = []
    episodes = []
    lost = 0
    lost_first = 0
    for c.version in range(12):
        c.collect(rollout)
        check_rollout(rollout, c.version, lag=12 * (sampler == "async"))
        if sampler != "async":  # its segments are trajectories, and it has weights of its own
            check_lost_steps(rollout, c.options)
        steps = rollout.complete
        learned += steps["reward"][~steps["lost"]].tolist()
        episodes += map(tuple, ver_ppo.Run.combine(None, rollout, {})[2])
        lost += steps["lost"].sum()
        lost_first += (steps["lost"] & steps["first"]).sum()
    # answered, but not taken, or of trajectories that are not finished
    waiting = 4 if sampler != "async" else 4 + 4 * 12
    in_steps, in_resets = Mortal.crashes["step"], Mortal.crashes["reset"]
    assert len(set(learned)) == len(learned) == 12 * 48 - lost
    assert set(learned) <= set(Mortal.given)
    assert 0 <= len(Mortal.given) - in_resets - len(learned) <= waiting
    assert 0 <= in_steps + in_resets - lost <= waiting and lost_first > 0
    assert len(set(episodes)) == len(episodes) and set(episodes) <= set(Mortal.ended)
    assert 0 <= len(Mortal.ended) - in_resets - len(episodes) <= waiting and in_resets > 3


REASONS = {  # what a run says of each fault
    "raise": "RuntimeError: the simulator is out of paint",
    "exit": "died, exit code 7",
    "quit": "SystemExit: the simulator is sold out",
    "segfault": "died, exit code -11",
    "kill": "died, exit code -9",
    "hang": "gave no answer for 300 s (--env-timeout)",
    "observation": "ValueError: observation 'obs' has shape (2,): [nan nan]; it",
    "reward": "ValueError: reward inf",
    "shape": "ValueError: observation 'obs' has shape (1,)",
    "keys": "ValueError: observation 'obs' has shape ()",
}
class Replacing(ver_ppo.InlineWorkers):
    """As InlineWorkers, but an environment that raises starts again at once."""

    def receive(self, timeout_sec):
        answered, self.asked = self.asked, []
        for e in answered:
            try:
                self.environments[e].answer()
            except RuntimeError:
                self.environments[e].env = None  # so that it starts again
                self.environments[e].answer()
        return answered


@pytest.mark.parametrize("crash", ["never", "first", "middle", "reset"])
def test_lost_steps_teach_nothing(crash):
    """Two of four environments crash in every episode: in its first step, in its middle, in the
    reset after it, or never. The learned values are the same: 1 for the last step of an episode,
    gamma and gamma ** 2 for the steps before. (They are read in an environment that never
    crashes.)"""
    options = ver_ppo.Options(
        env_id=f"tests.faulty_envs:Fragile-{crash}-v0",
        num_envs=4,
        num_steps=24,
        num_workers=0,
        hidden_size=16,
        gamma=0.8,
        device="cpu",
    )
    space = gym.spaces.Box(0, 1, (3,), np.float32)
    spec = make_spec(space, gym.spaces.Discrete(1))
    torch.manual_seed(0)
    policy = ver_ppo.make_policy(spec, options)
    optimizer = torch.optim.Adam(policy.parameters(), lr=0.01)
    io = ver_ppo.EnvIO(spec, 4)
    environments = [ver_ppo.Environment(e, options, "train", spec, io) for e in range(4)]
    c = ver_ppo.Collector(policy, Replacing(environments), io, spec, options)
    rollout = ver_ppo.Rollout(spec, 96, 4, policy.state_shape)
    updates = 40
    lost = 0
    for update in range(updates):
        optimizer.param_groups[0]["lr"] = 0.01 * (1 - update / updates)
        c.collect(rollout)
        ver_ppo.add_advantages(rollout, options)
        ver_ppo.ppo_update(policy, optimizer, rollout, options)
        lost += rollout.complete["lost"].sum()
    count_S = rollout["obs"]["obs"].argmax(axis=1)
    whole_S = rollout["env"] == 0
    values = [rollout["value"][whole_S & (count_S == count)].mean() for count in range(3)]
    assert (lost > 400) == (crash != "never")
    np.testing.assert_allclose(values, [0.64, 0.8, 1.0], atol=0.03)


def in_order(text, *parts):
    """Whether these parts come in this order. (Lines of other processes may come in between.)"""
    return re.search(".*".join(map(re.escape, parts)), text, re.DOTALL)


LOST_AT = {"first": 0, "middle": 2, "reset": 4}  # steps before the lost one in its episode


@pytest.mark.parametrize("place", PLACES)
def test_simulators_that_fail(tmp_path, said, place):
    """Ten workers have two environments each. The first one of each fails once, in a way of its
    own, in the first step of an episode, in the middle, or in a reset. That costs it this step, and
    its neighbor at most the step that is in flight. Every other step is there, in order, with its
    own reward. The reasons are printed."""
    failing = [fault for fault in FAULTS if (place, fault) != ("reset", "reward")]
    hanging = FAULTS.index("hang")
    late = patient()
    first_process = None

    def enough(rows):
        """Called in every pass: here, the worker that hangs has been silent for very long."""
        same_process = c.workers.processes[hanging] is first_process
        if (tmp_path / "hang has failed").exists() and same_process:
            c.workers.silent_sec_W[hanging] = np.inf
        return late(rows)

    sizes = {"num_envs": 2 * len(FAULTS), "num_workers": len(FAULTS), "num_steps": 12}
    names = {"env_id": f"tests.faulty_envs:Zoo-{place}-v0", "runs_dir": str(tmp_path)}
    parts = []
    with collecting(enough, sampler="nover", **sizes, **names) as (c, rollout):
        first_process = c.workers.processes[hanging]
        for c.version in range(2):
            c.collect(rollout)
            assert rollout.rows == rollout.capacity, "it waits for ever"
            check_rollout(rollout, c.version)
            check_lost_steps(rollout, c.options)
            parts.append((rollout.records.copy(), rollout["obs"]["obs"].copy()))
    steps, obs = map(np.concatenate, zip(*parts))
    reward = 0.1 * (steps["action"][:, 0] - 1)
    usual = ~steps["done"]
    np.testing.assert_allclose(steps["reward"][usual], reward[usual], atol=1e-6)
    for e in range(c.options.num_envs):
        mine = steps["env"] == e
        count = (obs[mine, 0] * 10).round()
        first = steps["first"][mine]
        lost = steps["lost"][mine]
        assert (count[first] == 0).all() and (np.diff(count)[~first[1:]] == 1).all()
        assert (obs[mine, 1][first].size == np.unique(obs[mine, 1]).size), "an episode, a seed"
        ended = steps["done"][mine] & ~lost
        assert (count[ended] == 4).all() and (steps["episode_stats"][mine][ended, 1] == 5).all()
        if e < len(FAULTS) and FAULTS[e] in failing:
            assert count[lost].tolist() == [LOST_AT[place]], FAULTS[e]
        else:
            assert lost.sum() <= 1
    words = said()
    assert words.count("started again") == len(failing)
    assert [fault for fault in failing if REASONS[fault] not in words] == []
    if place == "middle":
        where = f"environment {FAULTS.index('raise')}, episode 2, step 3:"
        assert in_order(words, where, "\nTraceback", REASONS["raise"])
        assert words.count("Traceback") >= 6  # of `raise`, `quit` and four wrong answers


@pytest.mark.parametrize("lines", [range(1, 200, 22), range(12, 200, 22)])
def test_killed_at_any_line(tmp_path, lines):
    """Each worker is killed at another line of its loop. Nobody waits for ever, and no answer is
    taken twice, or for the answer of another step. Each environment loses at most one step, and all
    other steps are there, in order."""
    names = {"env_id": "tests.faulty_envs:Traced-v0", "exp_name": " ".join(map(str, lines))}
    sizes = {"num_envs": 2 * len(lines), "num_workers": len(lines), "num_steps": 6}
    lost_N = np.zeros(2 * len(lines), int)
    more = {"sampler": "nover", "runs_dir": str(tmp_path), "max_worker_restarts": 100}
    with collecting(patient(), **names, **sizes, **more) as (c, rollout):
        c.workers.has_answered_W[:] = True  # it may be killed before its first answer, too
        before_N = np.full(len(lost_N), -1.0)  # count of each environment's last step
        for c.version in range(2):
            c.collect(rollout)
            assert rollout.rows == rollout.capacity, "it waits for ever"
            check_rollout(rollout, c.version)
            check_lost_steps(rollout, c.options)
            steps = rollout.complete
            usual = ~steps["done"]
            reward = 0.1 * (steps["action"][:, 0] - 1)
            np.testing.assert_allclose(steps["reward"][usual], reward[usual], atol=1e-6)
            count = (rollout["obs"]["obs"][:, 0] * 10).round()
            for e, first, number in zip(steps["env"], steps["first"], count):
                assert number == (0 if first else before_N[e] + 1)
                before_N[e] = number
            lost_N += np.bincount(steps["env"][steps["lost"]], minlength=len(lost_N))
    assert len(list(tmp_path.iterdir())) == len(lines) and lost_N.max() == 1


class Puppet:
    """Stands for a worker's process. A test reads its commands, answers for it and lets it die."""

    def __init__(self, target, args, name, daemon):
        self.inbox, self.outbox, _ = args
        self.pid = 2**30  # there is no such process
        self.exitcode = None
        self.last_words = []  # numbers that it sends while it is being killed

    def start(self):
        self.sentinel, self.life = os.pipe()

    def answer(self, *numbers):
        ver_ppo.send_numbers(self.outbox, numbers)

    def commands(self):
        """The numbers that it has been sent, and has not read."""
        return ver_ppo.read_numbers(self.inbox) if self.inbox.poll() else []

    def die(self):
        if self.exitcode is None:
            if self.last_words:
                self.answer(*self.last_words)
            os.close(self.life)
            self.exitcode = -9

    kill = die

    def join(self, timeout_sec):
        pass


@pytest.fixture
def puppets(monkeypatch):
    """A function that makes Workers whose processes are puppets. Its clock is `ver_ppo.time.now`.
    """
    clock = SimpleNamespace(**vars(time), now=0.0)
    clock.monotonic = lambda: clock.now
    monkeypatch.setattr(ver_ppo, "time", clock)
    context = SimpleNamespace(Pipe=ver_ppo.mp.Pipe, Process=Puppet)
    monkeypatch.setattr(ver_ppo, "process_context", lambda: context)

    def make(num_envs, num_workers, **more):
        options = ver_ppo.Options(num_envs=num_envs, **more)
        rest = options, "train", SPEC, None
        environments = [ver_ppo.Environment(e, *rest) for e in range(num_envs)]
        return ver_ppo.Workers(environments, num_workers)

    return make


def wait(workers, sec):
    """The answers that come while the collector waits for this time, a second in each call."""
    answered = []
    for _ in range(sec):
        ver_ppo.time.now += 1.0
        answered += workers.receive(0)
    return answered


def test_answers_of_a_worker_that_dies(puppets, capsys):
    """The answers that it has sent are taken, also those that it sends while it is being killed.
    The new process is asked for the others, and for nothing else."""
    workers = puppets(4, 1)
    (old,) = workers.processes
    assert old.commands() == [0, 1, 2, 3]
    old.answer(2)
    old.last_words = [0]
    assert workers.receive(0.05) == [2]
    assert wait(workers, 400) == [0]  # it hangs
    assert workers.processes[0] is not old and workers.processes[0].commands() == [1, 3]
    words = "worker 0 (environments [0, 1, 2, 3]) gave no answer for 300 s (--env-timeout)"
    assert f"{words}, exit code -9: started again\n" == capsys.readouterr().err


def test_commands_that_a_dead_worker_has_not_read(puppets):
    """The new process must not read them, too: it would answer twice."""
    workers = puppets(2, 1)
    old = workers.processes[0]
    old.commands()
    old.answer(0, 1)
    assert workers.receive(0.05) == [0, 1]
    workers.send(np.array([1, 0]))
    old.die()
    assert workers.receive(0.05) == [] and workers.processes[0].commands() == [0, 1]


def test_environments_that_owe_nothing_start_later(puppets):
    """With their next action: until then, their row belongs to the collector."""
    workers = puppets(3, 1)
    workers.processes[0].answer(0, 1, 2)
    assert workers.receive(0.05) == [0, 1, 2]
    workers.processes[0].die()
    assert workers.receive(0.05) == [] and workers.processes[0].commands() == []
    workers.send(np.array([1]))
    assert workers.processes[0].commands() == [1]


def test_workers_that_die_together(puppets, capsys):
    """Both are started again, in one call, and answers of a third one are taken."""
    workers = puppets(6, 3)
    for process in workers.processes:
        process.answer(*process.commands())
    assert sorted(workers.receive(0.05)) == list(range(6))
    workers.send(np.arange(6))
    workers.processes[1].answer(4)
    for worker in (0, 2):
        workers.processes[worker].die()
    assert workers.receive(0.05) == [4]
    assert [process.commands() for process in workers.processes] == [[0, 3], [1, 4], [2, 5]]
    assert capsys.readouterr().err.count("started again") == 2


def test_queueing_is_not_hanging(puppets):
    """A worker hangs if it owes an answer, and has given none for --env-timeout. How long each of
    its environments has waited for its turn does not matter."""
    workers = puppets(3, 1)
    (process,) = workers.processes
    for e in range(3):
        assert wait(workers, 250) == []
        process.answer(e)
        assert workers.receive(0.01) == [e]
    assert wait(workers, 1_000) == []  # nobody owes an answer
    assert workers.processes == [process]
    workers.send(np.array([1]))
    assert wait(workers, 299) == [] and workers.processes == [process]
    assert wait(workers, 2) == [] and workers.processes != [process]


def test_a_pause_is_not_hanging(puppets):
    """A cluster suspends a job, or an update takes long: of the time in which nobody waits, one
    second counts."""
    workers = puppets(1, 1)
    (process,) = workers.processes
    process.answer(0)
    assert workers.receive(0.01) == [0]
    workers.send(np.array([0]))
    for _ in range(290):
        ver_ppo.time.now += 10_000.0
        assert workers.receive(0.01) == [] and workers.processes == [process]
    assert wait(workers, 20) == [] and workers.processes != [process]


def test_a_hang_among_busy_workers(puppets):
    """It is found although other workers always have answers, so that nobody ever waits."""
    workers = puppets(2, 2)
    hanging, busy = workers.processes
    busy.answer(1)
    hanging.answer(0)
    workers.receive(0)
    workers.send(np.array([0, 1]))
    for _ in range(302):
        ver_ppo.time.now += 1.0
        busy.answer(1)
        assert workers.receive(0) == [1]
        workers.send(np.array([1]))
    assert workers.processes[0] is not hanging and workers.processes[1] is busy


def test_a_failure_before_the_first_answer(puppets):
    """Ends the run: it would fail again and again."""
    workers = puppets(2, 2)
    workers.processes[0].answer(0)
    workers.receive(0.05)
    workers.processes[1].die()
    words = r"worker 1 \(environments \[1\]\) died, exit code -9, before its first answer"
    with pytest.raises(ver_ppo.EnvironmentFailure, match=words):
        workers.receive(0.05)


def test_failures_of_an_hour(puppets):
    """A failure counts for an hour."""
    workers = puppets(1, 1, max_worker_restarts=2)
    workers.processes[0].answer(0)
    workers.receive(0.05)
    for ver_ppo.time.now in (0.0, 10.0, 3605.0, 3620.0):
        workers.processes[0].die()
        assert workers.receive(0.05) == []
    workers.processes[0].die()
    with pytest.raises(ver_ppo.EnvironmentFailure, match="more than 2 failures within an hour"):
        workers.receive(0.05)


def raising(error):
    raise error


def test_the_end_of_a_worker(monkeypatch, capsys):
    """An environment that raises does not take the answers of those before it with it. Its number,
    episode and step are printed, and all environments of the process are closed, the last first."""
    inbox, commands = ver_ppo.mp.Pipe(duplex=False)
    answers, outbox = ver_ppo.mp.Pipe(duplex=False)
    ver_ppo.send_numbers(commands, [2, 0, 1, 3])
    commands.close()
    closed = []
    environments = {}
    io = {name: [0] * 4 for name in ("started", "began_at", "step_sec")}
    io["episode"] = [7, 8, 9, 10]
    for e in range(4):
        environment = ver_ppo.Environment(e, None, "train", None, io)
        environment.env = SimpleNamespace(close=lambda e=e: closed.append(e))
        environment.step = (lambda: raising(SystemExit("sold out"))) if e == 1 else (lambda: None)
        environment.length = 5
        environments[e] = environment
    monkeypatch.setattr(ver_ppo, "lead_group", lambda: None)
    monkeypatch.setattr(ver_ppo.threading, "Timer", lambda *args: SimpleNamespace(start=int))
    parent = SimpleNamespace(is_alive=lambda: True)
    monkeypatch.setattr(ver_ppo.mp, "parent_process", lambda: parent)
    monkeypatch.setattr(ver_ppo.os, "_exit", lambda status: raising(EOFError(status)))
    with pytest.raises(EOFError, match="1"):
        ver_ppo.worker_process(inbox, outbox, environments)
    assert answers.poll() and ver_ppo.read_numbers(answers) == [2, 0]
    assert closed == [3, 2, 1, 0]
    said = capsys.readouterr().err
    assert said.startswith("environment 1, episode 8, step 5:\nTraceback")
    assert said.endswith("SystemExit: sold out\n")


@pytest.mark.parametrize(
    "image",
    [*[np.full((8, 8, 1), number) for number in (0.5, np.nan, 300)], np.ones((8, 9, 1), "u1")],
)
def test_images_of_another_kind(image):
    """Floats and large integers would lose their value in a table of uint8."""
    space = gym.spaces.Box(0, 255, (8, 8, 1), np.uint8)
    spec = make_spec(space, gym.spaces.Discrete(2))
    right = ver_ppo.read_observation(spec, space, np.full((8, 8, 1), 200, int))
    assert right["obs"].dtype == np.uint8 and (right["obs"] == 200).all()
    with (
        np.errstate(invalid="ignore"),  # NaN as a byte
        pytest.raises(ValueError, match="observation 'obs' has shape"),
    ):
        ver_ppo.read_observation(spec, space, image)


def test_close_raises():
    """It changes nothing."""
    environment = ver_ppo.Environment(3, None, "train", None, None)
    environment.env = SimpleNamespace(close=lambda: raising(RuntimeError("the door is stuck")))
    environment.close()


class Again(ver_ppo.InlineWorkers):
    """All environments in this process. One that raises is started again."""

    def receive(self, timeout_sec):
        answered = self.asked
        self.asked = []
        for e in answered:
            answer_again(self.environments[e])
        return answered


def test_an_evaluation_does_not_count_crashed_episodes(monkeypatch):
    """About every second episode fails in its second step: only the others count."""
    monkeypatch.setattr(ver_ppo, "InlineWorkers", Again)
    made = []
    monkeypatch.setattr(envs.Count, "close", lambda self: None)
    own = ver_ppo.make_env
    monkeypatch.setattr(ver_ppo, "make_env", lambda *args: made.append(1) or own(*args))
    sizes = {"num_envs": 2, "num_workers": 0, "eval_episodes": 10}
    options = ver_ppo.Options(env_id="tests.faulty_envs:Stumbler-v0", **sizes)
    policy = ver_ppo.Policy(COUNT_SPEC, options).eval()
    found = ver_ppo.play_episodes(policy, COUNT_SPEC, options)
    assert found.tolist() == [[6.0, 6]] * 10 and len(made) > 4


def programs_of(folder):
    """The processes that environments have started with a file of this folder."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            found += [path.parent.name] * (f"{folder}/output".encode() in path.read_bytes())
    return found


def test_households(tmp_path):
    """Environments may use multiprocessing. The programs that they start obey SIGTERM: a program
    inherits which signals are ignored and blocked, and workers ignore and block none."""
    names = {"env_id": "tests.faulty_envs:Household-v0", "runs_dir": str(tmp_path)}
    with collecting(patient(), num_envs=2, num_workers=1, num_steps=2, **names) as (c, rollout):
        c.collect(rollout)
    assert (tmp_path / "closed").read_text().split() == [str(-signal.SIGTERM)] * 2
    assert nobody_left() and not programs_of(tmp_path)


def test_what_simulators_leave_behind(tmp_path, said):
    """The programs that an environment has started end with its worker. One environment here
    raises, and hangs when it is closed. Another ends its process, so it cannot be closed."""
    names = {"env_id": "tests.faulty_envs:Household-v0", "runs_dir": str(tmp_path)}
    sizes = {"num_envs": 4, "num_workers": 2, "num_steps": 30, "sampler": "nover"}
    more = {"env_kwargs": ("faults=('raise', 'exit')",), "max_worker_restarts": 100}
    with collecting(patient(), **names, **sizes, **more) as (c, rollout):
        c.collect(rollout)
        assert len(programs_of(tmp_path)) == 4
    words = said()
    assert words.count("started again") == 2
    assert REASONS["raise"] in words and REASONS["exit"] in words
    assert nobody_left() and not programs_of(tmp_path)


@pytest.mark.parametrize("where", ["here", "async"])
def test_a_run_goes_on(tmp_path, said, where):
    """Each environment raises in its 90th step. The run reaches its end, says what happened, counts
    the lost steps, leaves crashed episodes out, and leaves nobody behind."""
    line = f"{FAULTY}Faulty-raise-v0 --num-workers 2 --total-timesteps 768"
    folder = run_here(tmp_path, line, "--extensions", *[*WHERE[where][1:], "check"])
    words = said()
    lost = sum(logged(folder, "ver/lost_steps").values())
    assert 1 <= lost <= 2 * words.count("started again")  # the last ones are not in a rollout
    assert in_order(words, "step 10:", "\nTraceback", REASONS["raise"])
    assert {length for _, length in saved(folder)["recent"]} == {20.0}
    assert saved(folder)["step"] == 768 and nobody_left()


@pytest.mark.parametrize("where", ["here", "overlap"])
def test_too_many_failures(tmp_path, said, where):
    """One more than --max-worker-restarts ends the run: the reason is printed, the exit status is
    1, all updates are saved, and no process is left."""
    line = f"{FAULTY}Faulty-exit-v0 --num-workers 2 --max-worker-restarts 0"
    assert ver_ppo.main(small(tmp_path, *line.split(), *WHERE[where])) == 1
    words = said()
    (folder,) = run_folders(tmp_path)
    reason = r"ver_ppo.py: worker \d \(environments \[\d, \d\]\) died, exit code 7: more than 0 "
    assert re.search(reason + r"failures within an hour \(--max-worker-restarts\)\n", words)
    assert "started again" not in words and "Traceback" not in words
    assert saved(folder)["step"] >= 64 and nobody_left()


def test_an_environment_that_cannot_start(tmp_path, said):
    """The second one cannot be reset: that ends the run at once, with exit status 1."""
    line = f"{FAULTY}Late-v0 --num-workers 2"
    assert ver_ppo.main(small(tmp_path, *line.split())) == 1
    words = said()
    assert "RuntimeError: no licence" in words and "before its first answer\n" in words
    assert "started again" not in words and nobody_left()


def test_an_error_in_this_process(tmp_path):
    """With --num-workers 0, which is for debuggers, the environment's own exception ends the run,
    after a checkpoint."""
    line = f"{FAULTY}Faulty-raise-v0 --num-workers 0"
    with pytest.raises(RuntimeError, match="out of paint") as error:
        ver_ppo.main(small(tmp_path, *line.split()))
    assert any("faulty_envs.py" in str(entry.path) for entry in error.traceback)
    (folder,) = run_folders(tmp_path)
    assert saved(folder)["step"] == 320


# ------------------------------------------------- 2. Signals leave a checkpoint, and no process


@pytest.fixture
def stopped(monkeypatch):
    """A function: lets a signal come in the k-th call of a function of this owner."""

    def stop_in(owner, name, number, times=1):
        calls = itertools.count(1)
        own = getattr(owner, name)

        def call(*args):
            if next(calls) == times:
                os.kill(os.getpid(), number)
            return own(*args)

        monkeypatch.setattr(owner, name, call)

    return stop_in


UPDATE = ver_ppo, "ppo_update"
CHOOSE = ver_ppo.Collector, "observe"  # for each batch of actions, and for bootstrap values


@pytest.mark.parametrize("owner, name", [UPDATE, CHOOSE])
@pytest.mark.parametrize("number", ver_ppo.SIGNALS)
def test_signals(tmp_path, stopped, number, owner, name):
    """A checkpoint, exit status 128 + n, no process. An update is finished first; a rollout is not.
    Afterwards the signals have their former handlers again."""
    handlers = [signal.getsignal(each) for each in ver_ppo.SIGNALS]
    updating = name == "ppo_update"
    stopped(owner, name, number, times=1 if updating else 100)  # the first rollout has 68 at most
    workers = "0" if updating else "1"
    args = small(tmp_path, *f"{CARTPOLE} 640 --num-workers {workers}".split())
    assert ver_ppo.main(args) == 128 + number
    (folder,) = run_folders(tmp_path)
    assert saved(folder)["step"] == 64 * saved(folder)["version"] > 0
    assert not updating or saved(folder)["step"] == 64
    assert [signal.getsignal(each) for each in ver_ppo.SIGNALS] == handlers and nobody_left()


@pytest.fixture
def rude(tmp_path, monkeypatch):
    """Arguments of a run whose environments share this process, and behave as if it were theirs."""
    monkeypatch.chdir(tmp_path)
    before = signal.getsignal(signal.SIGTERM)
    line = "--env-id tests.envs:Rude-v0 --num-workers 0 --num-envs 2 --num-steps 40"
    yield small(tmp_path, *line.split())
    signal.signal(signal.SIGTERM, before)


def test_a_handler_of_the_environment(tmp_path, rude, stopped):
    """With --num-workers 0, the run's own handlers of signals come after the environment's."""
    stopped(*UPDATE, signal.SIGTERM)
    assert ver_ppo.main(rude) == 128 + signal.SIGTERM
    (folder,) = run_folders(tmp_path)
    assert saved(folder)["step"] == 80


def test_what_is_no_exception(tmp_path, rude):
    """Ends such a run, with a checkpoint. Files that the command line names are where they would
    be if the environment had not changed the current folder."""
    more = ["--runs-dir", "runs", "--extensions", "trace(file=trace.json)"]
    with pytest.raises(envs.Rude.Panic):
        ver_ppo.main([*rude, *more])
    (folder,) = run_folders(tmp_path / "runs")
    assert saved(folder)["step"] == 160
    assert json.loads((tmp_path / "trace.json").read_text())


def test_a_signal_in_the_last_update(tmp_path, stopped, capsys):
    """It ends the run like any other: no evaluation, everything saved."""
    stopped(*UPDATE, signal.SIGTERM)
    args = small(tmp_path, *f"{CARTPOLE} 64 --eval-episodes 2".split())
    assert ver_ppo.main(args) == 143
    (folder,) = run_folders(tmp_path)
    assert saved(folder)["step"] == 64 and "evaluation" not in capsys.readouterr().out


def test_nohup(tmp_path, stopped):
    """A SIGHUP that is ignored stays ignored."""
    stopped(*UPDATE, signal.SIGHUP)
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert saved(run_here(tmp_path, f"{CARTPOLE} 128"))["step"] == 128
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("number", [4, 12])  # of eight mini-batches per update
def test_an_error_in_an_update(tmp_path, monkeypatch, number):
    """Whatever interrupts an update, the checkpoint holds the step and the weights before it."""
    own_step, own_update = ver_ppo.minibatch_step, ver_ppo.ppo_update
    calls = itertools.count(1)
    before = []

    def minibatch_step(*args):
        logs = own_step(*args)
        return logs if next(calls) != number else raising(MemoryError("no room"))

    def ppo_update(policy, *args):
        before.append({name: part.clone() for name, part in policy.state_dict().items()})
        return own_update(policy, *args)

    monkeypatch.setattr(ver_ppo, "minibatch_step", minibatch_step)
    monkeypatch.setattr(ver_ppo, "ppo_update", ppo_update)
    args = small(tmp_path, *f"{CARTPOLE} 640 --num-minibatches 4 --checkpoint-interval 64".split())
    assert ver_ppo.main(args) == 1
    (folder,) = run_folders(tmp_path)
    if number < 8:
        assert not (folder / "checkpoint.pt").exists(), "there was no good one"
        return
    assert saved(folder)["step"] == 64
    assert same(saved(folder)["policy"], before[1])


def test_a_job_that_queues_itself_again(tmp_path):
    """The manual's script, with a stand-in for scontrol: SLURM's warning stops the run, which is
    saved, and the job is queued again. The second time it continues to its end."""
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
    job.wait(300)
    assert (tmp_path / "called").read_text() == "requeue 7\n"
    step = saved(folder)["step"]
    again = script.replace("100000000", str(step + 640))
    done = subprocess.run(["bash", "-c", again], cwd=ROOT, env=environment, timeout=300)
    assert done.returncode == 0
    assert saved(folder)["step"] == step + 640
    assert (tmp_path / "called").read_text() == "requeue 7\n", "and not once more"


# ------------------------------------------------- 3. SIGKILL and a power cut leave nothing behind


def killed_by_signals(pid):
    """The SIGNALS that would end this process: it does not block, ignore or catch them."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    masks = [line.split()[1] for line in lines if line[:6] in ("SigBlk", "SigIgn", "SigCgt")]
    safe = np.bitwise_or.reduce([int(mask, 16) for mask in masks])
    return [number.name for number in ver_ppo.SIGNALS if not int(safe) >> number - 1 & 1]


def test_sigkill(tmp_path):
    """Of the main process alone, while one environment hangs and the others compute. All processes
    end, also the programs that environments have started. The checkpoint is whole; no shared memory
    is left. (Before that: a signal to the whole process group would leave the end of the run to the
    main process.)"""
    line = f"{FAULTY}Household-v0 --num-workers 2 --checkpoint-interval 1"
    args = small(tmp_path, *line.split(), "--env-kwargs", "faults=('hang','leave')")
    process = start(["ver_ppo.py", *args])
    try:
        wait_until(lambda: (tmp_path / "hang").exists() and any(tmp_path.glob("*/checkpoint.pt")))
        everybody = alive_in_session(process.pid)
        assert len(everybody) >= 5  # itself, fork server, resource tracker, two workers
        assert len(programs_of(tmp_path)) >= 3
        group = [pid for pid in everybody if os.getpgid(pid) == process.pid]
        assert len(group) == 3 and [killed_by_signals(pid) for pid in group] == [[], [], []]
        process.kill()
        wait_until(lambda: not alive_in_session(process.pid) and not programs_of(tmp_path), 60)
    finally:
        stop([process.pid])
        process.communicate()
    (folder,) = run_folders(tmp_path)
    assert saved(folder)["step"] > 0
    left = [name for name in os.listdir("/dev/shm") if any(f"_{pid}_" in name for pid in everybody)]
    assert left == []


def test_checkpoints_replace_each_other(tmp_path, monkeypatch):
    """A new one is on the disk as a whole before it takes the old one's place. So a power cut
    leaves one of the two. The next checkpoint overwrites a temporary file that is left."""
    path = tmp_path / "checkpoint.pt"
    temporary = tmp_path / "checkpoint.pt.tmp"
    for number in (1, 2):
        ver_ppo.write_checkpoint({"format": ver_ppo.CHECKPOINT_FORMAT, "step": number}, path)
        temporary.write_bytes(b"half a checkpoint" * 10_000)
    order = []
    whole = lambda *_: order.append("fsync") or temporary.stat().st_size
    monkeypatch.setattr(ver_ppo.os, "fsync", whole)
    monkeypatch.setattr(ver_ppo.os, "replace", lambda *_: order.append("replace"))
    ver_ppo.write_checkpoint({"format": ver_ppo.CHECKPOINT_FORMAT, "step": 3}, path)
    assert order == ["fsync", "replace"] and ver_ppo.load_checkpoint(path)["step"] == 2
    assert ver_ppo.load_checkpoint(temporary)["step"] == 3


# ------------------------------------------------------------------------------- 4. A full disk


@contextlib.contextmanager
def small_files(most_bytes):
    """While this lasts, this process can write no file beyond this size, as if the disk were full.
    """
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.mark.parametrize("interval", [1, 1000])
def test_full_disk(tmp_path, capfd, interval):
    """A checkpoint that cannot be written, on the way or at the end, ends the run: one line with
    the system's own reason, exit status 1, no evaluation. The checkpoint before stays, and --resume
    continues from there."""
    folder = run_here(tmp_path, f"{CARTPOLE} 64")
    path = folder / "checkpoint.pt"
    before = path.read_bytes()
    resume = ["--resume", str(folder), "--total-timesteps", "192"]
    more = "--checkpoint-interval", str(interval), "--eval-episodes", "2"
    capfd.readouterr()
    with small_files(len(before) // 2):
        assert ver_ppo.main([*resume, *more]) == 1
    out, err = capfd.readouterr()
    assert err.endswith("ver_ppo.py: [Errno 27] File too large\n")
    assert (out + err).count("too large") == 1
    assert "Traceback" not in out + err and "evaluation" not in out
    assert path.read_bytes() == before
    assert ver_ppo.main(resume) == 0 and saved(folder)["step"] == 192
    assert [*logged(folder, "losses/entropy")] == [64, 128, 192]


def test_full_disk_for_the_curves(tmp_path, monkeypatch, capfd):
    """Curves that cannot be written end the run: one line, exit status 1. The update is saved, if
    there is room for a checkpoint, and the run can be resumed."""
    from torch.utils.tensorboard import SummaryWriter

    full = OSError(28, "No space left on device")
    with monkeypatch.context() as patch:
        patch.setattr(SummaryWriter, "add_scalar", lambda *_: raising(full))
        args = small(tmp_path, *f"{CARTPOLE} 256 --eval-episodes 2".split())
        assert ver_ppo.main(args) == 1
    out, err = capfd.readouterr()
    assert err.endswith("ver_ppo.py: [Errno 28] No space left on device\n")
    assert (out + err).count("No space") == 1 and "Traceback" not in out + err
    (folder,) = run_folders(tmp_path)
    assert saved(folder)["step"] == 64
    assert ver_ppo.main(["--resume", str(folder)]) == 0 and saved(folder)["step"] == 256


# ----------------------------------------------------------------------------------- 5. --resume


def test_resume(tmp_path):
    """A run that is resumed has the weights, optimizer, counters and latest episodes of the
    checkpoint. Its schedule and its curves continue."""
    folder = run_here(tmp_path, f"{CARTPOLE} 256")
    again = Path(shutil.copytree(folder, tmp_path / "again"))
    # nothing is left to do, so the restored state is saved as it is
    assert ver_ppo.main(["--resume", str(again), "--total-timesteps", "256"]) == 0
    assert differences(saved(folder), saved(again)) == []
    before = saved(folder)
    assert ver_ppo.main(["--resume", str(folder), "--total-timesteps", "512"]) == 0
    after = saved(folder)
    assert (after["step"], after["version"]) == (512, 8)
    for content, steps in ((before, 4 * 16), (after, 8 * 16)):  # of the optimizer: 16 per update
        moments = content["optimizer"]["state"].values()
        assert {state["step"].item() for state in moments} == {steps}
    shares = [0.5 * (1 + np.cos(np.pi * update / 8)) for update in range(8)]
    shares[:4] = [0.5 * (1 + np.cos(np.pi * update / 4)) for update in range(4)]
    rates = {64 * k + 64: pytest.approx(2e-3 * share) for k, share in enumerate(shares)}
    assert logged(folder, "charts/learning_rate") == rates


def test_resumed_episodes(monkeypatch):
    """A resumed run plays episodes that it has not played: their numbers begin at its step."""
    io = ver_ppo.EnvIO(COUNT_SPEC, 2, episodes_before=64)
    options = ver_ppo.Options(env_id="tests.envs:Count-v0")
    seeds = []
    monkeypatch.setattr(ver_ppo, "derive_seed", lambda *numbers: seeds.append(numbers) or 7)
    ver_ppo.Environment(1, options, "train", COUNT_SPEC, io).answer()
    assert seeds == [(0, 1, 1, 65)]


def test_resume_begins_a_run(tmp_path, capsys):
    """--resume takes an existing folder. Without a checkpoint in it, a new run begins there."""
    folder = tmp_path / "job"
    command = small(tmp_path, *f"{CARTPOLE} 64".split(), "--resume", str(folder))
    one_line(capsys, command, f"mkdir -p {folder}")
    folder.mkdir()
    for steps in (64, 128):
        assert ver_ppo.main([*command, "--total-timesteps", str(steps)]) == 0
        assert saved(folder)["step"] == steps and run_folders(tmp_path) == [folder]


def test_small_soak(tmp_path):
    """Promises 1 to 5 together, as tests/benchmarks/soak.py proves them for longer: deaths, hangs,
    Ctrl-C, SIGKILL, SIGTERM, --resume. No step is learned twice, none disappears."""
    how = {"death_sec": 0.7, "hang_sec": 8.0, "num_envs": 4, "folder": tmp_path, "say": print}
    wrong, sums, _ = soak(2.5, 3, **how)
    assert not wrong, wrong
    assert sums["started again"] >= 3 and sums["lost"] >= 3 and sums["learned"] > 300


# ------------------------------------------------------------------- 6. A stranger's checkpoint


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A small checkpoint."""
    folder = run_here(tmp_path_factory.mktemp("runs"), f"{CARTPOLE} 64", "--hidden-size", "8")
    return folder / "checkpoint.pt"


@pytest.fixture
def changed(tmp_path, checkpoint):
    """A function: writes the small checkpoint, with changes, into a folder of its own. Returns the
    path."""

    def write(**changes):
        folder = tmp_path / "stranger's"
        folder.mkdir(exist_ok=True)
        content = ver_ppo.load_checkpoint(checkpoint) | changes
        torch.save(content, folder / "checkpoint.pt")
        return folder / "checkpoint.pt"

    return write


@pytest.fixture
def with_options(checkpoint, changed):
    """A function: writes the small checkpoint with these options. Returns the two ways to use it.
    """

    def write(**options):
        path = changed(options=ver_ppo.load_checkpoint(checkpoint)["options"] | options)
        return ["--checkpoint", str(path), "--eval-episodes", "1"], ["--resume", str(path.parent)]

    return write


NAMED = {  # options of a checkpoint that name code
    "env_id": {"env_id": "stranger:X-v0"},
    "env_kwargs": {"env_id": "GymV26Environment-v0", "env_kwargs": ("env_id=stranger:X-v0",)},
    "wrappers": {"wrappers": ("hide(indices=0)", "stranger:X(cmd='touch $(executed)')")},
    "policy": {"policy": "os:system(command=touch executed)"},
    "policy that is a function": {"policy": "ver_ppo:launch"},
    "extensions": {"extensions": ("keep", "stranger:X")},
}


def refusal(capsys, way):
    """The line of a command that is refused."""
    capsys.readouterr()
    assert ver_ppo.main(way) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and error[:-1].isprintable(), error
    return error


@pytest.mark.parametrize("name", NAMED)
def test_strangers_code(tmp_path, monkeypatch, capsys, with_options, name):
    """A text with ":" behind any door, or among the environment's arguments, is refused in one line
    that has the option to repeat. Nothing is imported or executed. A command line with that option
    is obeyed, and one that says something else replaces it."""
    (tmp_path / "stranger.py").write_text("open('executed', 'w')\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    door = name.split()[0]
    option = f"--{door.replace('_', '-')}"
    for way in with_options(**NAMED[name]):
        words = "names more than bare words: if you trust it, give "
        (repeat,) = refusal(capsys, way).split(words)[1:]
        assert refusal(capsys, [*way, "--seed", "7"]).endswith(repeat)
        options = ver_ppo.parse_options([*way, *shlex.split(repeat)])
        assert repeat.startswith(option) and getattr(options, door) == NAMED[name][door]
        replaced = ver_ppo.parse_options([*way, option, "another:Y"])
        assert getattr(replaced, door) in ("another:Y", ("another:Y",))
    if door == "extensions":  # nothing but a training uses them
        play.load_policy(tmp_path / "stranger's")
    else:
        with pytest.raises(ver_ppo.UserError, match="names more than bare words"):
            play.load_policy(tmp_path / "stranger's")
    assert "stranger" not in sys.modules and not (tmp_path / "executed").exists()


def test_strangers_names(capsys, with_options):
    """A refusal cannot write to the terminal what the file likes."""
    for way in with_options(policy="\x1b[2Jstranger:X"):
        assert "stranger:X" in refusal(capsys, way)


def test_own_names_are_no_code(with_options):
    """Names of this project and of Gymnasium need not be repeated."""
    doors = {"wrappers": ("action_delay",), "extensions": ("keep",), "policy": "ver_ppo:Policy"}
    for way in with_options(**doors, env_id="CartPole-v1"):
        options = ver_ppo.parse_options(way)
        assert (options.wrappers, options.extensions) == (("action_delay",), ("keep",))


@pytest.mark.filterwarnings("ignore:The field:UserWarning:tyro")
@pytest.mark.parametrize("kind", [tuple, list, dict.fromkeys])
@pytest.mark.parametrize("door", ver_ppo.DOORS)
def test_options_of_another_kind(tmp_path, monkeypatch, with_options, door, kind):
    """A list inside a list, say, is no way around the refusal."""
    (tmp_path / "stranger.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    several = isinstance(getattr(ver_ppo.Options(), door), tuple)
    text = "env_id=stranger:X" if door == "env_kwargs" else "stranger:X"
    named = (kind([text]),) if several else kind([text])
    for way in with_options(num_workers=0, total_timesteps=1, **{door: named}):
        with contextlib.suppress(Exception):
            ver_ppo.main(way)
        assert "stranger" not in sys.modules


class Code:
    """Executed when it is unpickled by a loader that executes anything."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


def test_hostile_pickles(tmp_path, checkpoint):
    """Code anywhere in the file is refused, and not executed; so are files of other programs."""
    content = ver_ppo.load_checkpoint(checkpoint)
    path = tmp_path / "checkpoint.pt"
    code = Code(tmp_path / "executed")
    bad = [content | {key: thing} for key in content for thing in (code, [code], {"code": code})]
    bad += [content | {"options": {**content["options"], "seed": code}}]
    bad += [code, {"weights": torch.zeros(3)}, [content], None]
    for each in bad:
        torch.save(each, path)
        with pytest.raises(ver_ppo.UserError, match="is not a checkpoint that can be read"):
            ver_ppo.load_checkpoint(path)
    assert not (tmp_path / "executed").exists()


def test_other_formats(capsys, changed):
    """Of another version, format 10 for example: one line says what to do."""
    for number in (None, "rubbish", 1, 10, 99):
        path = changed(format=number)
        words = f"{path} was written by another version (format {number}): continue with that"
        one_line(capsys, ["--checkpoint", str(path)], words)
        one_line(capsys, ["--resume", str(path.parent)], words)


def test_damaged_checkpoints(tmp_path, checkpoint):
    """Cut off anywhere: refused in one line. With any bit changed: refused in one line, or it can
    be read."""
    whole = checkpoint.read_bytes()
    rng = np.random.default_rng(0)
    content = ver_ppo.load_checkpoint(checkpoint)
    path = tmp_path / "checkpoint.pt"
    refused = 0
    for case in range(60):
        damaged = bytearray(whole)
        if case % 2:
            del damaged[rng.integers(len(whole)) :]
        else:
            damaged[rng.integers(len(whole))] ^= 1 << rng.integers(8)
        path.write_bytes(damaged)
        try:
            assert ver_ppo.load_checkpoint(path).keys() == content.keys() and not case % 2
        except ver_ppo.UserError as error:
            assert str(path) in str(error) and "\n" not in str(error)
            refused += 1
    assert refused >= 30


def test_weights_of_another_network(capsys, checkpoint, changed):
    """Are refused in one line."""
    resume = ["--resume", str(checkpoint.parent), "--total-timesteps", "128"]
    one_line(capsys, [*resume, "--hidden-size", "16"], "belongs to another network")
    names = ver_ppo.load_checkpoint(checkpoint)["policy"]
    for weights in ({}, dict.fromkeys(names, 1.0)):
        path = changed(policy=weights)
        command = ["--checkpoint", str(path), "--eval-episodes", "1"]
        one_line(capsys, command, f"{path} belongs to another network")


@pytest.fixture
def adam():
    """A function: Adam of these shapes, after a step."""

    def make(*shapes):
        weights = [torch.nn.Parameter(torch.ones(shape)) for shape in shapes]
        optimizer = torch.optim.Adam(weights, fused=True)
        for weight in weights:
            weight.grad = torch.ones_like(weight)
        optimizer.step()
        return optimizer

    return make


@pytest.mark.parametrize("shapes", [[(3, 2), (2, 3)], [(2, 3), (6,)], [(2, 3)]])
def test_moments_of_another_network(adam, shapes):
    """torch matches them by their order alone. Moments of another shape would make Adam write into
    other memory."""
    kept = adam((2, 3), (3, 2))
    ver_ppo.load_moments(kept, adam((2, 3), (3, 2)).state_dict(), "FILE")
    with pytest.raises(ver_ppo.UserError, match="FILE belongs to another"):
        ver_ppo.load_moments(kept, adam(*shapes).state_dict(), "FILE")


def test_moments_that_share_their_memory(adam):
    """A file may hold a single number in the shape of a weight. Adam gets moments of its own: it
    would write beyond that number."""
    optimizer = adam((50, 40))
    saved = optimizer.state_dict()
    for name in ("exp_avg", "exp_avg_sq"):
        saved["state"][0][name] = torch.full((1,), 0.25).expand(50, 40)
    with contextlib.suppress(ver_ppo.UserError):  # or it refuses them
        ver_ppo.load_moments(optimizer, saved, "FILE")
    (state,) = optimizer.state.values()
    for name in ("exp_avg", "exp_avg_sq"):
        assert state[name].untyped_storage().nbytes() >= 4 * 50 * 40


# --------------------------------------------------------------------- 7. Usual mistakes in options
# test_options.py and test_run.py have more.

MISTAKES = {  # and a word of the answer
    "--num-envs 0": "--num-envs 0: must be a positive number",
    "--num-workers 5": "--num-workers 5: must be at most --num-envs, which is 4",
    "--learning-rate nan": "--learning-rate nan: must be a positive number",
    "--env-id CartPole-v9000": "--env-id CartPole-v9000 cannot be loaded",
    "--env-id no_such_module:Env-v0": "for a file in the current folder, put PYTHONPATH=. before",
    "--extensions keep keep": "is given twice, or after its subclass",
    "--env-id minigird/Empty-v0": "is written as package:Id-v0",
    "--wrappers hidden": "--wrappers hidden cannot be found",
    "--wrappers gymnasium.wrappers:TimeLimit(steps=3)": "TimeLimit(steps=3): ",
    "--wrappers gymnasium.wrappers:TimeLimit(3)": "(KEY=VALUE, ...)",
    "--wrappers builtins:max(x=1)": "--wrappers builtins:max(x=1): ",
    "--wrappers m:f(text='x)": "--wrappers m:f(text='x) cannot be loaded",
    "--policy resnet19": "--policy resnet19 cannot be found",
    "--extensions json:dumps": "must be a subclass of ver_ppo.Run",
    "--resume nowhere": "mkdir -p nowhere lets a new run begin there",
    "--checkpoint nowhere.pt": "there is no checkpoint nowhere.pt",
    "--device cuda:77": "try --device cpu",
}


@pytest.mark.parametrize("line", MISTAKES)
def test_mistakes(tmp_path, monkeypatch, capsys, line):
    """One line names the mistake, before a process starts, and before there is a run folder. (Only
    the trial looks up what belongs to an environment: here in this process.)"""
    monkeypatch.setattr(BaseProcess, "start", lambda process: pytest.fail("a process was started"))
    inline = ["--num-workers", "0"] if line.startswith(("--env-id", "--wrappers")) else []
    args = small(tmp_path, "--env-id", "tests.envs:Count-v0", *inline, *line.split())
    one_line(capsys, args, MISTAKES[line])
    assert run_folders(tmp_path) == []


def test_mistakes_of_an_evaluation(capsys, checkpoint):
    """As in training: one line, with worker processes and without."""
    evaluate = ["--checkpoint", str(checkpoint), "--eval-episodes", "1", "--num-workers"]
    for workers in ("0", "1"):
        for words in ("--wrappers hidden", "--env-id CartPole-v9000"):
            one_line(capsys, [*evaluate, workers, *words.split()], f"{words} cannot be ")


def noted(env, text, number=0):
    """A wrapper that keeps its arguments."""
    env.noted = text, number
    return env


def test_quotation_marks():
    """Commas, brackets and equals signs inside them do not end an argument."""
    for text in ("x, y=1", "a)b(c", "it is", "a=b"):
        for mark in "'\"":
            wrapper = f"tests.test_faults:noted(text={mark}{text}{mark}, number=3)"
            assert ver_ppo.load(wrapper, "--wrappers")(SimpleNamespace()).noted == (text, 3)
    wrapper = "tests.test_faults:noted(text='x, y=1' 2)"
    assert ver_ppo.load(wrapper, "--wrappers")(SimpleNamespace()).noted[1] == 0


@pytest.mark.parametrize(
    "fault, words",
    [
        ("hang", "gave no answer for 1 s (--env-timeout), exit code -9"),
        ("exit", "died, exit code 7); see its output above"),
        ("raise", "cannot be used (RuntimeError: the simulator is out of paint; "),
        ("quit", "cannot be used (SystemExit: the simulator is sold out; "),
    ],
)
def test_an_environment_that_cannot_be_used(tmp_path, monkeypatch, capsys, fault, words):
    """Its trial fails, in a process of its own: one line, no run folder, no process."""
    monkeypatch.setattr(ver_ppo, "CLOSING_SEC", 0.1)
    timeout_sec = 1 if fault == "hang" else 60
    line = f"{FAULTY}Doomed-{fault}-v0 --num-workers 1 --env-timeout {timeout_sec}"
    one_line(capsys, small(tmp_path, *line.split()), words)
    assert not run_folders(tmp_path) and nobody_left()


def test_a_trial_that_hangs_at_the_end(monkeypatch):
    """An environment whose `close` hangs can be used: its trial has answered before that."""
    monkeypatch.setattr(ver_ppo, "CLOSING_SEC", 0.1)
    env_id = "tests.faulty_envs:Clinging-v0"
    options = ver_ppo.Options(env_id=env_id, num_workers=1, env_timeout=60)
    assert ver_ppo.describe_env(options) == COUNT_SPEC and nobody_left()


def test_in_a_thread(checkpoint):
    """A program or a notebook may describe an environment, and load a policy, in any thread."""
    found = []

    def look():
        options = ver_ppo.Options(env_id="tests.envs:Count-v0", num_workers=1)
        found.append(ver_ppo.describe_env(options))
        found.append(play.load_policy(checkpoint.parent))

    thread = threading.Thread(target=look)
    thread.start()
    thread.join(60)
    spec, (policy, options) = found
    assert spec == COUNT_SPEC and policy.choices == [2] and options.env_id == "CartPole-v1"


# ------------------------------------------------------------- 8. Gradients that are not finite


@pytest.mark.parametrize(
    "bad, skipped", [({5}, [0, 0.25, 0, 0]), ({0, 1, 6, 7, 15}, [0.5, 0.5, 0, 0.25])]
)
def test_gradients_that_are_not_finite(tmp_path, monkeypatch, bad, skipped):
    """Such a mini-batch is skipped and counted (a rollout has four, over two epochs); the others
    are learned from."""
    calls, loss = itertools.count(), ver_ppo.ppo_loss

    def spoilt(*args):
        value, logs = loss(*args)
        factor = np.nan if next(calls) in bad else 1
        return value * factor, {name: number * factor for name, number in logs.items()}

    monkeypatch.setattr(ver_ppo, "ppo_loss", spoilt)
    folder = run_here(tmp_path, f"{CARTPOLE} 256", "--num-minibatches", "2")
    assert [*logged(folder, "losses/skipped").values()] == skipped
    for name in ("policy_loss", "value_loss", "entropy", "approx_kl", "ent_coef", "grad_norm"):
        numbers = [*logged(folder, f"losses/{name}").values()]
        assert len(numbers) == 4 and np.isfinite(numbers).all(), name
    assert all(torch.isfinite(weights).all() for weights in saved(folder)["policy"].values())


def test_means_of_an_update():
    """Mini-batches that were skipped count in `skipped` alone, whatever they have logged."""
    losses = 1.0, np.nan, 4.0, np.inf
    skipped = 0.0, 1.0, 0.0, 1.0
    logs = []
    for numbers in zip(losses, skipped):
        names = "losses/policy_loss", "losses/skipped"
        logs.append(dict(zip(names, map(torch.tensor, numbers))))
    assert ver_ppo.mean_logs(logs) == {"losses/policy_loss": 2.5, "losses/skipped": 0.5}
    assert ver_ppo.mean_logs(logs[:1]) == {"losses/policy_loss": 1.0, "losses/skipped": 0.0}
    assert ver_ppo.mean_logs([logs[1], logs[3]])["losses/skipped"] == 1.0


def test_no_gradient_is_finite(tmp_path, monkeypatch, capsys):
    """An update without a single finite gradient ends the run: one line, exit status 1. The
    checkpoint has the weights before it."""
    update, weights = ver_ppo.ppo_update, []

    def spoilt(policy, optimizer, rollout, *more):
        weights.append({name: weight.clone() for name, weight in policy.named_parameters()})
        rollout["advantage"][:] *= np.nan if len(weights) == 3 else 1
        rollout["returns"][:] *= np.nan if len(weights) == 3 else 1
        return update(policy, optimizer, rollout, *more)

    monkeypatch.setattr(ver_ppo, "ppo_update", spoilt)
    assert ver_ppo.main(small(tmp_path, *f"{CARTPOLE} 640".split())) == 1
    error = capsys.readouterr().err
    words = "not one gradient of this update was finite: try a lower --learning-rate"
    assert error.endswith(f"ver_ppo.py: {words}\n") and "Traceback" not in error
    (folder,) = run_folders(tmp_path)
    assert saved(folder)["step"] == 128 and len(weights) == 3
    assert all(same(saved(folder)["policy"][name], weight) for name, weight in weights[-1].items())
    assert all(torch.isfinite(part).all() for part in saved(folder)["policy"].values())


# ---------------------------------------------------------------- 10. Episodes that never end


def test_endless_episodes(tmp_path, capsys, monkeypatch):
    """It is said in training, after ten updates, and in the evaluation, which ends."""
    monkeypatch.setattr(ver_ppo, "MOST_EPISODE_STEPS", 50)
    line = f"{FAULTY}Endless-v0 --num-workers 0 --total-timesteps 704 --eval-episodes 4"
    folder = run_here(tmp_path, line)
    out, err = capsys.readouterr()
    assert out.count("no episode has ended in 640 steps") == 1 and "TimeLimit" in out
    assert "4 episodes are missing: some did not end in 50 steps" in err and "TimeLimit" in err
    assert saved(folder)["step"] == 704
