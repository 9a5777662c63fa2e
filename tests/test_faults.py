"""What survives what: environments that fail, signals, full disks, damaged files, gradients that
are no numbers."""

import contextlib
import errno
import itertools
import json
import os
import re
import resource
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from multiprocessing import forkserver
from pathlib import Path
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
import torch

import ver_ppo
from notebooks.extensions import overlap
from notebooks.extensions.virtual_clock import SPEC, VirtualWorkers, build
from tests import envs
from tests.helpers import (
    ROOT,
    WHERE,
    alive_in_session,
    logged,
    nobody_left,
    one_line,
    run_folders,
    run_here,
    same,
    saved,
    small,
    wait_until,
)
from tests.soaking import soak

ENDINGS = "terminated", "truncated"


class Mortal(gym.Env):
    """Raises in one step of twelve, and in one reset of four after the end of an episode. The
    rewards that it gives are different numbers, noted in `given`; the returns and lengths of its
    episodes are noted in `ended`."""

    rng = np.random.default_rng(0)
    given = []
    ended = []
    rewards = None  # of this episode

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        if self.rewards is not None and self.rng.random() < 1 / 4:
            raise RuntimeError("the simulator cannot wash its brushes")
        self.rewards = []
        return self.observe(), {}

    def observe(self):
        return self.np_random.normal(size=4).astype(np.float32)

    def step(self, action):
        if self.rng.random() < 1 / 12:
            raise RuntimeError("the simulator is out of paint")
        self.given.append(len(self.given) + 1)
        self.rewards.append(self.given[-1])
        terminated = self.rng.random() < 0.1
        if terminated:
            self.ended.append([sum(self.rewards), len(self.rewards)])
        return self.observe(), self.given[-1], terminated, False, {}


class MortalWorkers(VirtualWorkers):
    """The shipped environments under the virtual clock; one that raises is started again. Counts
    the crashes in steps and in resets."""

    def __init__(self, num_envs, duration):
        super().__init__(num_envs, duration)
        self.crashes = Counter()
        rest = ver_ppo.Options(), "train", SPEC, self.io
        self.environments = [ver_ppo.Environment(e, *rest) for e in range(num_envs)]

    def answer(self, e):
        self.steps_N[e] += 1
        try:
            self.environments[e].answer()
        except ver_ppo.EnvironmentFailure as error:
            self.crashes["step" if "out of paint" in str(error) else "reset"] += 1
            self.environments[e].env = None
            self.environments[e].answer()


@pytest.mark.parametrize("sampler", ["ver", "nover", "sync", "async"])
@pytest.mark.parametrize("seed", range(3))
def test_made_up_steps(monkeypatch, sampler, seed):
    """Whatever fails when: every step that was answered is learned from once, with its reward and
    its episode's numbers, also if the reset after it fails. Each crash in a step adds one step,
    truncated, whose reward is the discounted value of what was seen last. All invariants hold."""
    monkeypatch.setattr(Mortal, "rng", np.random.default_rng(seed))
    monkeypatch.setattr(Mortal, "given", [])
    monkeypatch.setattr(Mortal, "ended", [])
    monkeypatch.setattr(ver_ppo, "make_env", lambda *args: Mortal())
    durations = Mortal.rng.uniform(0.2, 4.0, 64)
    workers = MortalWorkers(4, lambda e, step: durations[(11 * e + step) % 64])
    policy, rollout, c = build(workers, 4, 12, sampler=sampler)
    learned = []
    episodes = []
    made_up = 0
    made_up_first = 0
    for c.version in range(12):
        c.collect(rollout)
        ver_ppo.check_rollout(rollout, c.version, lag=12 * (sampler == "async"))
        learned += rollout["reward"][~rollout["lost"]].tolist()
        episodes += ver_ppo.finished_episodes(rollout)
        made_up += rollout["lost"].sum()
        made_up_first += (rollout["lost"] & rollout["first"]).sum()
        for step in np.flatnonzero(rollout["lost"]):
            check_made_up_step(policy, rollout, step)
    # answered, but not taken, or of unfinished trajectories
    waiting = 4 if sampler != "async" else 4 + 4 * 12
    assert len(set(learned)) == len(learned) == 12 * 48 - made_up
    assert set(learned) <= set(Mortal.given)
    assert len(Mortal.given) - len(learned) <= waiting
    lost = workers.crashes["step"]
    assert lost - waiting <= made_up <= lost and made_up > 20 and made_up_first > 0
    ended = [tuple(numbers) for numbers in Mortal.ended]
    episodes = [tuple(numbers) for numbers in episodes]
    assert len(set(episodes)) == len(episodes) and set(episodes) <= set(ended)
    assert len(ended) - len(episodes) <= waiting and workers.crashes["reset"] > 3


@torch.no_grad()
def check_made_up_step(policy, rollout, step):
    """It is the end of its episode, and worth what the policy expects when it sees the same once
    more, also where that begins an episode."""
    obs = {"obs": rollout.obs["obs"][[step]]}
    action = torch.as_tensor(rollout["action"][[step]])
    before = [torch.as_tensor(rollout[name][[step]]) for name in ("prev_action", "first")]
    *_, state = policy.step(obs, *before, rollout.state[[step]])
    value = policy.step(obs, action, torch.tensor([False]), state)[1].item()
    assert rollout["reward"][step] == pytest.approx(0.99 * value, abs=1e-6) and value != 0
    assert rollout["done"][step]


@pytest.mark.parametrize("ending", ENDINGS)
def test_an_evaluation_with_resets_that_fail(ending):
    """Every episode counts, once."""
    env_id = f"tests.faulty_envs:Mayfly-{ending}-raise-v0"
    sizes = {"num_envs": 2, "num_workers": 0, "max_worker_restarts": 10, "eval_episodes": 6}
    options = ver_ppo.Options(env_id=env_id, **sizes)
    spec = ver_ppo.describe_env(options)
    found = ver_ppo.play_episodes(ver_ppo.Policy(spec, options).eval(), spec, options)
    assert found.tolist() == [[16, 3]] * 6


def test_an_evaluation_does_not_count_crashed_episodes():
    """Every second episode raises at its second step, in the evaluation, too: only those that end
    by themselves count."""
    sizes = {"num_envs": 2, "num_workers": 0, "max_worker_restarts": 100, "eval_episodes": 6}
    options = ver_ppo.Options(env_id="tests.faulty_envs:Stumbler-v0", **sizes)
    spec = ver_ppo.describe_env(options)
    found = ver_ppo.play_episodes(ver_ppo.Policy(spec, options).eval(), spec, options)
    assert found.tolist() == [[6.0, 6]] * 6


def test_answers_of_a_worker_that_dies():
    """What it has sent before is taken, and nothing of it is asked again."""
    options = ver_ppo.Options(env_id="tests.envs:Count-v0", num_envs=3, num_workers=1)
    spec = ver_ppo.describe_env(options)
    io = ver_ppo.EnvIO(spec, 3)
    with contextlib.closing(ver_ppo.make_workers(options, "train", spec, io)) as workers:
        wait_until(lambda: io["first"].all() and workers.answers.poll(0.1))
        workers.processes[0].kill()
        workers.processes[0].join()
        answered = workers.replace(0, "killed")
        assert sorted(answered) == [0, 1, 2] and not workers.asked_N.any()
        assert workers.receive(0.3) == []


@pytest.fixture(scope="module")
def words_of_processes(tmp_path_factory):
    """A file into which everybody prints whom this process starts: their fork server must be
    started when it is stderr."""
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
def all_words(words_of_processes, capfd):
    """A function: what this test has printed, and then the processes that it has started."""
    before = words_of_processes.stat().st_size

    def read():
        return "".join(capfd.readouterr()) + words_of_processes.read_bytes()[before:].decode()

    return read


FAULTS = {  # and what is said
    "raise": "out of paint",
    "exit": "exit code 7",
    "quit": "SystemExit: the simulator is sold out",
    "segfault": "exit code -11",
    "hang": "no answer from environments",
    "leak": "MemoryError",
}
CASES = [(fault, "2", "here") for fault in FAULTS] + [("exit", "4", "here"), ("raise", "0", "here")]
CASES += [
    ("quit", "0", "here"),
    ("raise", "0", "overlap"),
    ("hang", "2", "overlap"),
    ("segfault", "2", "async"),
    ("raise", "0", "async"),
]


@pytest.mark.parametrize("fault, workers, where", CASES)
def test_environments_are_started_again(tmp_path, all_words, fault, workers, where):
    """Each environment fails at its 90th step. The run reaches its end, says what happened, counts
    a made-up step for every environment of a worker that is started again, and leaves nobody
    behind."""
    steps, timeout_sec = (480, 2) if fault == "hang" else (960, 60)
    line = f"--env-id tests.faulty_envs:Faulty-{fault}-v0 --num-workers {workers} --debug"
    line += f" --total-timesteps {steps}"
    folder = run_here(
        tmp_path, f"{line} --env-timeout {timeout_sec} --max-worker-restarts 1000", *WHERE[where]
    )
    said, made_up = all_words(), sum(logged(folder, "ver/made_up_steps").values())
    expected = said.count("started again") * 4 / (int(workers) or 4)
    assert FAULTS[fault] in said and made_up <= expected
    # a process that is slow to start looks as if it hung
    assert where != "here" or fault == "hang" or expected - 4 <= made_up
    assert saved(folder)["step"] >= steps and made_up >= 1 and nobody_left()


def test_answers_before_a_failure():
    """An environment that raises does not take the answers of those before it with it."""
    inbox, commands = ver_ppo.mp.Pipe(duplex=False)
    answers, outbox = ver_ppo.mp.Pipe(duplex=False)
    ver_ppo.send_numbers(commands, [2, 0, 1])
    environments = {e: SimpleNamespace(answer=lambda: None) for e in (0, 2)}
    environments[1] = SimpleNamespace(answer=lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        ver_ppo.env_worker(inbox, outbox, environments)
    assert ver_ppo.read_numbers(answers) == [2, 0]


class Killed(BaseException):
    """Stands for the end of the process."""


def kill(*args):
    """Ends the process, so to speak."""
    raise Killed


def alone(env_id, *env_kwargs):
    """What one environment needs: a function that makes it, as another process would; a function
    that sends it an action; and its row."""
    options = ver_ppo.Options(env_id=env_id, env_kwargs=env_kwargs, num_envs=1)
    spec = ver_ppo.describe_env(options)
    io = ver_ppo.EnvIO(spec, 1)
    policy = ver_ppo.Policy(spec, options).eval()
    nobody = SimpleNamespace(send=lambda env_B: None)
    c = ver_ppo.Collector(policy, nobody, io, spec, options)

    def send():
        with torch.inference_mode():
            c.act(np.array([0]))

    return lambda: ver_ppo.Environment(0, options, "train", spec, io), send, io.records[0]


def in_the_middle(first):
    """A function that makes an environment, and its row. Its first process was killed in the middle
    of a step that ends the episode. The observation that was seen last is 3."""
    make, send, row = alone("tests.envs:Count-v0", "limit=2")
    environment = make()
    environment.answer()
    if not first:
        send()
        environment.answer()
    row["obs"]["obs"] = 3.0
    send()
    environment.env.unwrapped.advance = lambda reward: (np.ones(2), 7.0, True, False, {})
    environment.write = kill
    with pytest.raises(Killed):
        environment.answer()
    return make, row


def check_lost_step(row):
    """It has no reward, is truncated at what was seen last, and the next episode has begun."""
    assert not row["terminated"] and row["truncated"] and row["lost"]
    assert row["reward"] == 0 and (row["final_obs"]["obs"] == 3).all()
    assert row["first"] and row["obs"]["obs"][0] == 0


@pytest.mark.parametrize("first", [False, True])
def test_started_in_the_middle(first):
    """What a killed process leaves in flight is truncated at what was seen last, also if that was
    an episode's first observation, and whatever the process had already written."""
    make, row = in_the_middle(first)
    make().answer()
    check_lost_step(row)


@pytest.mark.parametrize("first", [False, True])
def test_started_twice_in_the_middle(first):
    """The same if the next process is killed, too, before it has sent its answer. Its episode was
    never seen, so the step is not truncated at that episode's first observation."""
    make, row = in_the_middle(first)
    make().answer()
    make().answer()
    check_lost_step(row)


def test_an_answer_that_was_not_sent():
    """A process was killed when a step was in the row, but nobody had been told. Its episode would
    go on. The step is lost, and truncated, because the next process begins another episode."""
    make, send, row = alone("tests.envs:Count-v0")
    environment = make()
    environment.answer()
    send()
    environment.answer()
    shown = row["obs"].copy()
    make().answer()
    assert row["lost"] and row["truncated"] and not row["terminated"] and row["reward"] == 0
    assert row["final_obs"] == shown and row["first"] and row["obs"] != shown


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_reset_that_raises(ending):
    """The step before it is in the row, as it was: reward, ending, final observation, episode. The
    environment that is started again does not touch it."""
    make, send, row = alone(f"tests.faulty_envs:Mayfly-{ending}-raise-v0")
    environment = make()
    environment.answer()
    for step in (1, 2):
        send()
        environment.answer()
        assert not row["lost"] and row["reward"] == step and not row["first"]
    send()
    with pytest.raises(ver_ppo.EnvironmentFailure, match="episode 2, step 3:"):
        environment.answer()
    shown = row["obs"]["obs"].copy()
    for _ in range(2):  # the first one is killed, too, before it has sent its answer
        number = row["episode"]
        make().answer()
        assert [row["terminated"], row["truncated"]] == [ending == name for name in ENDINGS]
        assert row["reward"] == 13 and row["episode_stats"].tolist() == [16, 3]
        assert not row["lost"] and row["step_sec"] > 0
        assert row["final_obs"]["obs"][0] == np.float32(0.3)
        assert row["first"] and row["obs"]["obs"][0] == 0 and row["obs"]["obs"][1] != shown[1]
        assert row["episode"] == number + 1


@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("fault, workers", [("raise", 0), ("raise", 2), ("kill", 2)])
def test_resets_that_fail(tmp_path, all_words, ending, fault, workers):
    """Every reset after an episode fails, here or with a worker's process. No step is made up, each
    has its real reward, and each episode its numbers."""
    env_id = f"tests.faulty_envs:Mayfly-{ending}-{fault}-v0"
    sizes = {"num_envs": 2, "num_steps": 6, "num_workers": workers, "max_worker_restarts": 1000}
    options = ver_ppo.Options(env_id=env_id, **sizes)
    spec = ver_ppo.EnvSpec(envs.Count.observation_space, envs.Count.action_space, ())
    policy = ver_ppo.Policy(spec, options).eval()
    policy.critic.scale.fill_(1.0)  # else all values are 0
    io = ver_ppo.EnvIO(spec, 2)
    rollout = ver_ppo.Rollout(spec, 12, 2, policy.state_shape, torch.device("cpu"))
    until = time.monotonic() + 60
    late = lambda rows: time.monotonic() > until
    episodes = 0
    with contextlib.closing(ver_ppo.make_workers(options, "train", spec, io)) as workers:
        c = ver_ppo.Collector(policy, workers, io, spec, options, late)
        for c.version in range(2):
            c.collect(rollout)
            assert rollout.rows == 12, "it waits for ever"
            ver_ppo.check_rollout(rollout, c.version)
            count = (rollout.obs["obs"].numpy()[:, 0] * 10).round()
            done = rollout["done"]
            assert not rollout["lost"].any() and (done == (count == 2)).all()
            np.testing.assert_allclose(rollout["reward"][~done], count[~done] + 1)
            added = rollout["reward"][done] - 13
            assert (np.abs(added) > 1e-4).all() if ending == "truncated" else not added.any()
            assert (np.abs(added) < 2).all(), "gamma times a value"
            finished = ver_ppo.finished_episodes(rollout)
            assert finished == [[16, 3]] * done.sum()
            episodes += len(finished)
    assert 6 <= episodes <= all_words().count("started again") <= episodes + 2


@pytest.mark.parametrize("k", range(1, 200, 11))
def test_killed_at_any_line(tmp_path, k):
    """A worker is killed at the k-th line of its loop. Nobody waits for ever, no answer is taken
    twice or for another step's: of each of its environments one step at most is made up, and
    everything else is as if nothing had been."""
    options = ver_ppo.Options(
        env_id="tests.faulty_envs:Traced-v0",
        exp_name=str(k),
        runs_dir=str(tmp_path),
        num_envs=2,
        num_steps=8,
        num_workers=1,
    )
    spec = ver_ppo.EnvSpec(envs.Count.observation_space, envs.Count.action_space, ())
    policy = ver_ppo.Policy(spec, options)
    io = ver_ppo.EnvIO(spec, 2)
    made_up = 0
    until = time.monotonic() + 60
    rollout = ver_ppo.Rollout(spec, 16, 2, policy.state_shape, torch.device("cpu"))
    with contextlib.closing(ver_ppo.make_workers(options, "train", spec, io)) as workers:
        late = lambda rows: time.monotonic() > until
        c = ver_ppo.Collector(policy, workers, io, spec, options, late)
        for c.version in range(3):
            c.collect(rollout)
            assert rollout.rows == 16, "it waits for ever"
            ver_ppo.check_rollout(rollout, c.version)
            made = rollout["lost"]
            # all values are 0, as no reward has been learned from
            reward = np.where(made, 0.0, 0.1 * (rollout["action"][:, 0] - 1))
            np.testing.assert_allclose(rollout["reward"], reward, atol=1e-6)
            for e in (0, 1):
                mine = rollout["env"] == e
                count = (rollout.obs["obs"].numpy()[mine, 0] * 10).round()
                first = rollout["first"][mine]
                assert (count[first] == 0).all() and (np.diff(count)[~first[1:]] == 1).all()
            made_up += np.bincount(rollout["env"][made], minlength=2)
    assert (tmp_path / "killed").exists() and made_up.max() <= 1


def test_slow_looks_find_who_hangs(capfd):
    """Also if this process looks seldom, because it infers or learns for a long time in between."""
    options = ver_ppo.Options(
        env_id="tests.faulty_envs:Stuck-v0", num_envs=2, num_workers=1, env_timeout=30
    )
    spec = ver_ppo.EnvSpec(envs.Count.observation_space, envs.Count.action_space, ())
    with contextlib.closing(
        ver_ppo.make_workers(options, "train", spec, ver_ppo.EnvIO(spec, 2))
    ) as workers:
        wait_until(lambda: [workers.receive(0.1), not workers.asked_N.any()][1])
        workers.supervisor.timeout_sec = 1.0
        workers.send(np.array([1]))
        for looks in range(20):  # each counts for a tenth of a second at most
            time.sleep(0.3)
            if workers.receive(0):
                break
    assert 8 <= looks < 19 and "no answer from environments [1] for 1 s" in capfd.readouterr().err


def test_refusals_of_the_collecting_process(monkeypatch):
    """Not enough shared memory, say, is told to the main process as what it is."""
    inbox, commands = ver_ppo.mp.Pipe(duplex=False)
    messages, outbox = ver_ppo.mp.Pipe(duplex=False)
    monkeypatch.setattr(ver_ppo, "lead_group", lambda: None)
    monkeypatch.setattr(ver_ppo.shutil, "disk_usage", lambda path: SimpleNamespace(free=100))
    options = ver_ppo.Options(env_id="tests.envs:Count-v0", hidden_size=8)
    spec = ver_ppo.EnvSpec(envs.Count.observation_space, envs.Count.action_space, ())
    with torch.random.fork_rng():
        more = ver_ppo.Collector, [], None, None
        overlap.collector_process(inbox, outbox, spec, options, 0, *more)
    error = messages.recv()
    assert isinstance(error, ver_ppo.UserError) and "MiB of shared memory are needed" in str(error)


@pytest.mark.parametrize("num_envs, timeout_sec", [(4, 0.9), (16, 2.0)])
def test_queueing_is_not_hanging(capfd, num_envs, timeout_sec):
    """Environments share a worker, which takes longer for all than --env-timeout (of sixteen, for
    half of them, too), but for none alone."""
    options = ver_ppo.Options(
        env_id="tests.envs:Count-v0",
        num_envs=num_envs,
        num_steps=1,
        num_minibatches=1,
        num_workers=1,
        wrappers=("latency(mean_ms=300, spread=0)",),
    )
    spec = ver_ppo.describe_env(options)
    policy, io = ver_ppo.Policy(spec, options), ver_ppo.EnvIO(spec, num_envs)
    rollout = ver_ppo.Rollout(spec, num_envs, num_envs, policy.state_shape, torch.device("cpu"))
    with contextlib.closing(ver_ppo.make_workers(options, "train", spec, io)) as workers:
        c = ver_ppo.Collector(policy, workers, io, spec, options)
        while len(c.answered) < num_envs:  # the process has to start
            c.answered += workers.receive(0.1)
        workers.supervisor.timeout_sec = timeout_sec
        workers.supervisor.LOOK_SEC = 0.02
        c.collect(rollout)
    assert "started again" not in capfd.readouterr().err and not rollout["lost"].any()
    assert (rollout["step_sec"] > 0).all()


def test_a_pause_is_not_hanging(start):
    """A run that is stopped for longer than --env-timeout, all its processes, goes on as if nothing
    had been."""
    process, _ = start(f"{COUNT} 2 --env-timeout 2 --wrappers {LATENCY}")
    for number in (signal.SIGSTOP, signal.SIGCONT):  # itself first, the workers last
        for pid in sorted(alive_in_session(process.pid)):
            os.kill(pid, number)
        time.sleep(3)
    process.terminate()
    said = process.communicate(timeout=30)[0]
    assert process.returncode == 143 and "started again" not in said, said


def children_of(folder):
    """Processes that environments have started with this folder in their arguments."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            found += [path.parent.name] * (f"{folder}/output".encode() in path.read_bytes())
    return found


@pytest.mark.parametrize("fault, closings", [("raise", 5), ("exit", 1)])
def test_children_of_environments(tmp_path, capfd, fault, closings):
    """What an environment has started ends with its worker, although it hangs when it is closed, or
    cannot be closed."""
    # nover: each environment gives 112 steps, so dies once
    line = f"--env-id tests.faulty_envs:Parent-{fault}-v0 --num-workers 4 --sampler nover"
    args = small(tmp_path, *line.split(), "--total-timesteps", "448")
    assert ver_ppo.main([*args, "--max-worker-restarts", "1000"]) == 0
    assert capfd.readouterr().err.count("started again") == 4
    wait_until(lambda: not children_of(tmp_path), 10)
    assert nobody_left() and len((tmp_path / "closed").read_text()) >= closings


def test_households(tmp_path):
    """Environments may use multiprocessing, and what they start obeys SIGTERM: programs inherit
    which signals are ignored, and workers ignore none."""
    line = "--env-id tests.faulty_envs:Household-v0 --num-workers 2 --total-timesteps 64"
    line += " --sampler nover"  # each takes a step
    assert saved(run_here(tmp_path, line))["step"] == 64
    seconds = [float(word) for word in (tmp_path / "closed").read_text().split()]
    assert len(seconds) == 5 and max(seconds) < 2  # four, and the one that was looked at
    assert nobody_left() and not children_of(tmp_path)


def test_children_of_a_run_that_is_killed(tmp_path, start):
    """Workers that leave because the main process is gone take along what environments have left
    behind. The process of the trial did so before training began."""
    line = "--env-id tests.faulty_envs:Household-v0 --env-kwargs leaves=True --num-workers 2"
    process, _ = start(f"{line} --total-timesteps 1000000")
    wait_until(lambda: len(children_of(tmp_path)) == 4 and run_folders(tmp_path))
    process.kill()
    wait_until(lambda: not children_of(tmp_path), 10)


class Unclosable(gym.Env):
    """Cannot be closed."""

    def close(self):
        raise RuntimeError("the door is stuck")


def test_close_raises(capsys):
    """It is said, and that is all."""
    environment = ver_ppo.Environment(3, None, "train", None, None)
    environment.env = Unclosable()
    environment.close()
    words = "environment 3: close() raised RuntimeError('the door is stuck')"
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    "image",
    [np.full((8, 8), 0.5), np.full((8, 8), np.nan), np.full((8, 8), 300), np.ones((8, 8), "u1")],
)
def test_images_of_another_kind(image):
    """Floats and large integers would lose their value in a table of uint8."""
    spec = ver_ppo.EnvSpec(gym.spaces.Box(0, 255, (8, 8), np.uint8), gym.spaces.Discrete(2), ())
    io = ver_ppo.EnvIO(spec, 1)
    environment = ver_ppo.Environment(0, None, "train", spec, io)
    if image.dtype == np.uint8:
        environment.write(io["obs"], image)
        assert (io["obs"]["obs"] == 1).all()
        return
    words = f"observation 'obs' is {image}, the observation space Box(0, 255, (8, 8), uint8)"
    with (
        np.errstate(invalid="ignore"),  # NaN as a byte
        pytest.raises(ver_ppo.BadAnswer, match=re.escape(words)),
    ):
        environment.write(io["obs"], image)


CASES = [
    ("raise", "0", "here"),
    ("exit", "1", "here"),
    ("exit", "2", "async"),
    ("raise", "2", "overlap"),
]


@pytest.mark.parametrize("fault, workers, where", CASES)
def test_too_many_restarts(tmp_path, all_words, fault, workers, where):
    """The reason, which environment it was, its step; exit status 1; what was learned is saved;
    nobody is left."""
    line = f"--env-id tests.faulty_envs:Faulty-{fault}-v0 --num-workers {workers}"
    args = small(tmp_path, *line.split(), *WHERE[where])
    assert ver_ppo.main([*args, "--env-timeout", "2", "--max-worker-restarts", "0"]) == 1
    said, (folder,) = all_words(), run_folders(tmp_path)
    assert FAULTS[fault] in said
    assert "more than 0 restarts within an hour (--max-worker-restarts)" in said
    names = {
        "0": ["environment "],
        "1": ["environments [0, 1, 2, 3]"],
        "2": ["environments [", "environment "],
    }[workers]
    assert any(name in said for name in names)
    assert ("episode 5, step 10" in said) == (fault == "raise")
    assert f"continue with: --resume {folder}" in said
    assert saved(folder)["step"] >= 64
    assert nobody_left()


def test_an_environment_that_cannot_be_made_again(tmp_path, monkeypatch, capfd):
    """It is tried as often as any other restart; then the run ends."""
    make_env, calls = ver_ppo.make_env, itertools.count()
    monkeypatch.setattr(
        ver_ppo, "make_env", lambda *args: make_env(*args) if next(calls) < 5 else 1 / 0
    )
    line = "--env-id tests.faulty_envs:Faulty-raise-v0 --num-workers 0 --max-worker-restarts 3"
    assert ver_ppo.main(small(tmp_path, *line.split())) == 1
    said = "".join(capfd.readouterr())
    assert "out of paint" in said
    assert "division by zero" in said
    assert "more than 3 restarts within an hour" in said
    assert said.count("Traceback") == 1, "that of the step that raised"
    assert said.count("ZeroDivisionError") == 3, "a line for each start"


def test_restarts_are_forgotten(monkeypatch):
    """Only the last hour counts."""
    restarts, now = ver_ppo.Restarts(ver_ppo.Options(max_worker_restarts=2)), [0.0]
    monkeypatch.setattr(ver_ppo.time, "monotonic", lambda: now[0])
    for now[0] in (0.0, 10.0, 3605.0, 3620.0):
        restarts.note("reason")
    with pytest.raises(ver_ppo.EnvironmentFailure, match="reason\nmore than 2"):
        restarts.note("reason")


RUBBISH = {
    "observation": ["observation 'obs' is [nan nan], the observation space Box(0.0, inf, (2,)"],
    "reward": ["reward is inf"],
    "shape": ["observation has the shapes {'obs': (1,)}", "the observation space {'obs': (2,)}"],
    "keys": ["observation has the shapes {'another': (2,)}", "the observation space {'obs': (2,)}"],
}


def test_rubbish_of_one_that_cannot_be_closed(tmp_path, all_words):
    """The run ends by it all the same: it does not count as a restart."""
    line = "--env-id tests.faulty_envs:Parent-reward-v0 --num-workers 2"
    assert ver_ppo.main(small(tmp_path, *line.split())) == 1
    said = all_words()
    assert "reward is inf" in said and "started again" not in said and nobody_left()


CASES = [
    *itertools.product(RUBBISH, ("0", "2"), ["here"]),
    ("reward", "2", "overlap"),
    ("observation", "0", "async"),
]


@pytest.mark.parametrize("fault, workers, where", CASES)
def test_rubbish(tmp_path, all_words, fault, workers, where):
    """An answer that is none ends the run: the message names environment, step and key; what was
    learned is saved."""
    line = f"--env-id tests.faulty_envs:Faulty-{fault}-v0 --num-workers {workers}"
    args = small(tmp_path, *line.split(), *WHERE[where])
    assert ver_ppo.main(args) == 1
    said, (folder,) = all_words(), run_folders(tmp_path)
    assert workers == "0" or "died with exit code 3: the answer above is not allowed" in said
    assert all(words in said for words in RUBBISH[fault])
    assert "environment " in said
    assert "episode 5, step 10" in said
    assert "started again" not in said and saved(folder)["step"] >= 64 and nobody_left()


@pytest.fixture
def start(tmp_path):
    """A function that starts a run in a session of its own, and waits for its first checkpoint, and
    until it hangs if it must. Whatever happens, nobody of this session is left after the test."""
    sessions = []

    def start_run(line, *args):
        pipes = {
            "stderr": subprocess.STDOUT,
            "stdout": subprocess.PIPE,
            "text": True,
            "start_new_session": True,
        }
        command = [
            sys.executable,
            "ver_ppo.py",
            *small(tmp_path, *line.split(), *args),
            "--checkpoint-interval",
            "1",
        ]
        process = subprocess.Popen(command, cwd=ROOT, **pipes)
        sessions.append(process.pid)
        wait_until(lambda: any(tmp_path.glob("*/checkpoint.pt")))
        (checkpoint,) = tmp_path.glob("*/checkpoint.pt")
        if "hang" in line:
            wait_until(lambda: time.time() - checkpoint.stat().st_mtime > 2)
        return process, checkpoint.parent

    yield start_run
    for pid in alive_in_session(sessions[0]):
        os.kill(pid, signal.SIGKILL)


LATENCY = "latency(mean_ms=20,spread=0)"
COUNT = "--env-id tests.envs:Count-v0 --num-workers"
HANG = "--env-id tests.faulty_envs:Faulty-hang-v0 --num-workers"
STOPS = [
    ("SIGINT", "here", COUNT),
    ("SIGTERM", "async", HANG),
    ("SIGKILL", "here", COUNT),
    ("SIGKILL", "overlap", COUNT),
]
STOPS += [("SIGKILL", "here", HANG)]


@pytest.mark.parametrize("name, where, line", STOPS)
def test_signals(start, name, where, line):
    """Ctrl-C and SIGTERM, to the whole process group as a terminal sends them: a checkpoint within
    seconds, how to go on, exit status 130 or 143. SIGKILL, to the main process alone. Either way no
    process and no shared memory is left."""
    number = getattr(signal, name)
    process, folder = start(f"{line} 2", *WHERE[where])
    everybody = alive_in_session(process.pid)
    assert len(everybody) >= 5  # itself, fork server, resource tracker, two workers
    os.kill(process.pid, number) if name == "SIGKILL" else os.killpg(process.pid, number)
    said = process.communicate(timeout=30)[0]
    assert process.returncode == (-9 if name == "SIGKILL" else 128 + number), said
    if name != "SIGKILL":
        assert f"continue with: --resume {folder}" in said and "Traceback" not in said
    assert saved(folder)["step"] > 0
    wait_until(lambda: alive_in_session(process.pid) == [], 15)
    assert not [
        file for file in os.listdir("/dev/shm") if any(f"_{pid}_" in file for pid in everybody)
    ]


def test_signal_in_the_last_update(tmp_path, monkeypatch, capsys):
    """It ends the run like any other: status 143, no evaluation, everything saved."""
    update = ver_ppo.ppo_update

    def stopped(*args):
        os.kill(os.getpid(), signal.SIGTERM)
        return update(*args)

    monkeypatch.setattr(ver_ppo, "ppo_update", stopped)
    args = small(tmp_path, *f"{CARTPOLE} 64 --eval-episodes 2".split())
    assert ver_ppo.main(args) == 143
    (folder,) = run_folders(tmp_path)
    assert saved(folder)["step"] == 64 and "evaluation" not in capsys.readouterr().out


def test_second_signal(start):
    """It does not wait for what the run is doing: here, for an environment that hangs in the main
    process."""
    process, _ = start(f"{HANG} 0")
    process.terminate()
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(1)
    process.terminate()
    assert process.wait(10) == -signal.SIGTERM
    process.stdout.close()


CARTPOLE = "--env-id CartPole-v1 --num-workers 0 --total-timesteps"


@pytest.mark.parametrize("interval, step", [(1, 128), (1000, 192)])
@pytest.mark.parametrize(
    "error", [OSError("No space left on device"), RuntimeError("PytorchStreamWriter failed")]
)
def test_full_disk(tmp_path, monkeypatch, capfd, error, interval, step):
    """A checkpoint that cannot be written, on the way or at the end, ends the run: one line, exit
    status 1, no evaluation. The checkpoint before stays. Resuming replaces what the curves say of
    later steps."""

    def fail(content, file):
        file.write(b"half a checkp")
        raise error

    folder = run_here(tmp_path, f"{CARTPOLE} 64")
    path = folder / "checkpoint.pt"
    before = path.read_bytes()
    resume = ["--resume", str(folder), "--total-timesteps", "192"]
    capfd.readouterr()
    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", fail)
        more = "--checkpoint-interval", str(interval), "--eval-episodes", "2"
        assert ver_ppo.main([*resume, *more]) == 1
    out, err = capfd.readouterr()
    words = f"the checkpoint of step {step} cannot be written to {path}, the one before stays"
    assert err.endswith(f"\nver_ppo.py: {words}: {error}\n")
    assert (out + err).count("cannot be written") == 1
    assert "Traceback" not in out + err and "evaluation" not in out
    assert path.read_bytes() == before
    assert not (folder / "checkpoint.tmp").exists()
    assert ver_ppo.main(resume) == 0 and saved(folder)["step"] == 192
    assert [*logged(folder, "losses/entropy")] == [64, 128, 192]


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


def test_the_reason_of_a_full_disk(tmp_path):
    """The system's own reason is told, although torch's writer then fails for another one."""
    content = {"step": 7, "policy": {"weight": torch.zeros(100_000)}}
    path = tmp_path / "checkpoint.pt"
    path.write_bytes(b"good")
    words = f"the checkpoint of step 7 cannot be written to {path}, the one before stays: "
    words = re.escape(words) + ".*File too large"
    with small_files(1000), pytest.raises(OSError, match=words) as error:
        ver_ppo.write_checkpoint(content, path)
    assert "\n" not in str(error.value)
    assert path.read_bytes() == b"good" and list(tmp_path.iterdir()) == [path]


def test_full_disk_for_tensorboard(tmp_path, monkeypatch, capfd):
    """Curves that cannot be written end the run: one line, exit status 1. What was learned is
    saved, if there is room for it, and the run can be resumed."""
    from torch.utils.tensorboard import SummaryWriter

    with monkeypatch.context() as patch:
        patch.setattr(SummaryWriter, "add_scalar", full_disk)
        args = small(tmp_path, *f"{CARTPOLE} 256 --eval-episodes 2".split())
        assert ver_ppo.main(args) == 1
    out, err = capfd.readouterr()
    assert err.endswith("\nver_ppo.py: [Errno 28] No space left on device\n")
    assert (out + err).count("No space left on device") == 1
    assert "Traceback" not in out + err and "evaluation" not in out
    (folder,) = run_folders(tmp_path)
    assert f"stopped at step 64; continue with: --resume {folder}" in out + err
    assert saved(folder)["step"] == 64
    assert ver_ppo.main(["--resume", str(folder)]) == 0 and saved(folder)["step"] == 256


def test_full_disk_for_the_trace(tmp_path, capfd):
    """A trace that cannot be written is reported once; training goes on to the end."""
    folder = run_here(tmp_path, f"{CARTPOLE} 256 --extensions trace(file=/dev/full)")
    assert "".join(capfd.readouterr()).count("the trace ends at step 0: ") == 1
    assert saved(folder)["step"] == 256


def test_a_run_that_has_not_ended(tmp_path, capsys):
    """Nobody else can write into its folder."""
    folder = run_here(tmp_path, f"{CARTPOLE} 64")
    lock = ver_ppo.lock_folder(folder)
    one_line(
        capsys,
        ["--resume", str(folder), "--total-timesteps", "128"],
        f"{folder} belongs to a run that has not ended",
    )
    os.close(lock)
    assert ver_ppo.main(["--resume", str(folder), "--total-timesteps", "128"]) == 0


@pytest.mark.parametrize("resumed", [False, True])
@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_refused_run_lets_its_folder_go(tmp_path, monkeypatch, capsys, call, resumed):
    """If options.json cannot be written: one line with the reason. The folder is locked by then,
    but in a notebook, say, the process goes on, and can use the folder later."""
    args = small(tmp_path, *f"{CARTPOLE} 128".split())
    if resumed:
        folder = run_here(tmp_path, f"{CARTPOLE} 64")
        args = ["--resume", str(folder), "--total-timesteps", "128"]
    open_files = len(os.listdir("/proc/self/fd"))
    with monkeypatch.context() as patch:
        patch.setattr(ver_ppo.os, call, full_disk)
        for _ in range(2):
            words = "cannot be written (No space left on device): choose another place"
            one_line(capsys, args, words)
    assert len(os.listdir("/proc/self/fd")) <= open_files
    folders = run_folders(tmp_path)
    assert len(folders) == (1 if resumed else 2)
    for folder in folders:
        os.close(ver_ppo.lock_folder(folder))
    if resumed:
        assert json.loads((folder / "options.json").read_text())["total_timesteps"] == 64
        assert ver_ppo.main(args) == 0


def test_an_options_file_that_is_in_the_way(tmp_path, capsys):
    """The message names the file; the folder is free afterwards."""
    folder = run_here(tmp_path, f"{CARTPOLE} 64")
    args = ["--resume", str(folder), "--total-timesteps", "128"]
    (folder / "options.tmp").mkdir()
    one_line(capsys, args, f"{folder / 'options.tmp'} cannot be written (Is a directory)")
    (folder / "options.tmp").rmdir()
    assert ver_ppo.main(args) == 0


def test_curves_that_cannot_be_begun(tmp_path, monkeypatch, capsys):
    """One line with the reason; the folder is free afterwards."""
    from torch.utils import tensorboard

    folder = run_here(tmp_path, f"{CARTPOLE} 64")
    args = ["--resume", str(folder), "--total-timesteps", "128"]
    capsys.readouterr()
    with monkeypatch.context() as patch:
        patch.setattr(tensorboard.SummaryWriter, "__init__", full_disk)
        assert ver_ppo.main(args) in (1, 2)
    error = capsys.readouterr().err
    assert "No space left on device" in error and len(error.splitlines()) == 1
    assert ver_ppo.main(args) == 0


def full_disk(*args, **more):
    raise OSError(errno.ENOSPC, "No space left on device")


def test_closed_output(tmp_path):
    """`python ver_ppo.py ... 2>&1 | head`: when nobody reads the output any more, what was learned
    until then is saved."""
    line = f"{CARTPOLE} 1000000 --num-steps 2 --eval-episodes 0 --runs-dir {tmp_path}"
    # as in a terminal, the progress bar writes ten times a second
    program = "import sys, ver_ppo; sys.stderr.isatty = lambda: True; sys.exit(ver_ppo.main())"
    both = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    run = subprocess.Popen([sys.executable, "-c", program, *line.split()], cwd=ROOT, **both)
    text = b""
    while b"return=" not in text:  # the bar shows it after the first update
        part = os.read(run.stdout.fileno(), 100)
        assert part, text
        text += part
    run.stdout.close()
    assert run.wait(60) != 0
    (folder,) = run_folders(tmp_path)
    assert 0 < saved(folder)["step"] < 1_000_000


def test_a_step_is_saved_once(tmp_path, monkeypatch):
    """A signal that comes while a checkpoint is written, and the end of a run just after one, do
    not write it again: torchrun kills after 30 s."""
    written = []
    own = ver_ppo.write_checkpoint
    note = lambda content, path: written.append(content["step"]) or own(content, path)
    monkeypatch.setattr(ver_ppo, "write_checkpoint", note)
    run_here(tmp_path, f"{CARTPOLE} 192 --checkpoint-interval 64")
    assert written == [64, 128, 192]


def test_training_in_a_thread(tmp_path):
    """Is refused in one line: only the main thread can catch signals."""
    found = []
    options = ver_ppo.parse_options(small(tmp_path, *f"{CARTPOLE} 64".split()))

    def train():
        try:
            ver_ppo.launch(options)
        except ver_ppo.UserError as error:
            found.append(str(error))

    thread = threading.Thread(target=train)
    thread.start()
    thread.join()
    assert found == ["training catches signals: it must run in the main thread"]
    assert not list(tmp_path.iterdir())


def test_a_program_without_a_guard(tmp_path):
    """multiprocessing says how to write it, and no process makes a run folder."""
    options = f'env_id="CartPole-v1", num_workers=2, runs_dir={str(tmp_path / "runs")!r}'
    program = tmp_path / "program.py"
    program.write_text(f"import ver_ppo\n\nver_ppo.launch(ver_ppo.Options({options}))\n")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, program], env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.returncode and "if __name__ == '__main__':" in done.stderr
    assert not (tmp_path / "runs").exists()


class Reordered(ver_ppo.Policy):
    """The same weights, in another order."""

    def __init__(self, spec, options):
        super().__init__(spec, options)
        actor = self.actor
        del self.actor
        self.actor = actor


def test_an_optimizer_of_other_weights(tmp_path, capsys):
    """torch tells them by their order: other shapes would be written beyond the end of memory."""
    folder = run_here(tmp_path, f"{CARTPOLE} 64")
    args = ["--resume", str(folder), "--policy", "tests.test_faults:Reordered"]
    reason = "its state does not match the weights"
    one_line(capsys, args, f"belongs to another optimizer or network: {reason}")


def test_full_shared_memory(tmp_path, monkeypatch, capsys):
    """What is needed, what is there, and how to get more; exit status 2."""
    monkeypatch.setattr(ver_ppo.shutil, "disk_usage", lambda path: SimpleNamespace(free=100))
    assert ver_ppo.main(small(tmp_path, *f"{CARTPOLE} 64".split(), *WHERE["overlap"])) == 2
    error = capsys.readouterr().err
    assert "MiB of shared memory are needed and /dev/shm has 0: enlarge it" in error
    assert "/dev/shm has 0: enlarge it (docker run --shm-size)" in error
    assert "Traceback" not in error and nobody_left()


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
    """Mini-batches that were skipped count in `skipped` alone, whatever they have logged. If all
    were skipped, there is no mean."""
    losses = 1.0, np.nan, 4.0, np.inf
    skipped = 0.0, 1.0, 0.0, 1.0
    logs = []
    for numbers in zip(losses, skipped):
        names = "losses/policy_loss", "losses/skipped"
        logs.append(dict(zip(names, map(torch.tensor, numbers))))
    assert ver_ppo.mean_logs(logs) == {"losses/policy_loss": 2.5, "losses/skipped": 0.5}
    assert ver_ppo.mean_logs(logs[:1]) == {"losses/policy_loss": 1.0, "losses/skipped": 0.0}
    with pytest.raises(FloatingPointError, match="not one gradient of this update was finite"):
        ver_ppo.mean_logs([logs[1], logs[3]])


def test_no_gradient_is_finite(tmp_path, monkeypatch, capsys):
    """An update without a single finite gradient ends the run; the checkpoint has the weights
    before it."""
    update, weights = ver_ppo.ppo_update, []

    def spoilt(policy, optimizer, rollout, *more):
        weights.append({name: weight.clone() for name, weight in policy.state_dict().items()})
        rollout["advantage"][:] *= np.nan if len(weights) == 3 else 1
        rollout["returns"][:] *= np.nan if len(weights) == 3 else 1
        return update(policy, optimizer, rollout, *more)

    monkeypatch.setattr(ver_ppo, "ppo_update", spoilt)
    assert ver_ppo.main(small(tmp_path, *f"{CARTPOLE} 640".split())) == 1
    words = "not one gradient of this update was finite: try a lower --learning-rate"
    assert words in capsys.readouterr().err
    (folder,) = run_folders(tmp_path)
    assert saved(folder)["step"] == 128
    assert same(saved(folder)["policy"], weights[-1])
    assert len(weights) == 3


def test_small_soak(tmp_path):
    """A short run of what tests/benchmarks/soak.py does: deaths, hangs, Ctrl-C, --resume; each step
    is learned from once."""
    wrong, sums, _ = soak(
        0.2, 0.1, death_sec=1.0, hang_sec=3, num_envs=4, folder=tmp_path, say=print
    )
    assert not wrong, wrong
    assert sums["started again"] >= 4 and sums["made up"] >= 3 and sums["learned"] > 300


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A small checkpoint."""
    return (
        run_here(tmp_path_factory.mktemp("runs"), f"{CARTPOLE} 64", "--hidden-size", "8")
        / "checkpoint.pt"
    )


def test_damaged_checkpoints(tmp_path, checkpoint):
    """Cut off anywhere: refused in one line. With any bit changed: refused in one line, or it can
    be read."""
    whole, rng, refused = checkpoint.read_bytes(), np.random.default_rng(0), 0
    content, path = ver_ppo.load_checkpoint(checkpoint), tmp_path / "checkpoint.pt"
    for case in range(150):
        damaged = bytearray(whole)
        if case % 3 == 0:
            del damaged[rng.integers(len(whole)) :]
        else:
            damaged[rng.integers(len(whole))] ^= 1 << rng.integers(8)
        path.write_bytes(damaged)
        try:
            assert ver_ppo.load_checkpoint(path).keys() == content.keys() and case % 3
        except ver_ppo.UserError as error:
            assert str(path) in str(error) and "\n" not in str(error)
            refused += 1
    assert refused >= 60


def test_hostile_checkpoints(tmp_path, checkpoint, capsys):
    """Code anywhere in the file is refused in one line, and not executed; so are files of other
    programs and of other versions, and weights and moments of another kind."""
    content, path = ver_ppo.load_checkpoint(checkpoint), tmp_path / "checkpoint.pt"
    code = Code(tmp_path / "executed")
    resume = ["--resume", str(tmp_path)]
    evaluate = ["--checkpoint", str(path)]
    transfer = ["--extensions", f"transfer(file={path})"]
    bad = [{key: thing} for key in content for thing in (code, [code], {"code": code})]
    bad += [{"options": {**content["options"], "seed": code}}]
    bad = [content | change for change in bad]
    bad += [code, {"weights": torch.zeros(3)}, [content], None]
    formats = None, "rubbish", 1, ver_ppo.CHECKPOINT_FORMAT - 1, 99
    versions = [content | {"format": number} for number in formats]
    weights = [{}, {name: 1.0 for name in content["policy"]}]
    weights = [content | {"policy": each} for each in weights]
    moments = [{}, {"state": {}, "param_groups": [{}]}]
    moments = [content | {"optimizer": each} for each in moments]
    cases = [
        (bad, [resume, evaluate, transfer], f"{path} is not a checkpoint that can be read"),
        (versions, [resume, evaluate, transfer], f"{path} was written by another version"),
        (weights, [resume, evaluate], f"{path} belongs to another network or environment"),
        (moments, [resume], f"{path} belongs to another optimizer"),
    ]
    line = "--env-id CartPole-v1 --num-workers 0 --eval-episodes 1 --runs-dir".split()
    line += [str(tmp_path / "runs")]
    for files, ways, words in cases:
        for file in files:
            torch.save(file, path)
            for way in ways:
                one_line(capsys, [*way, *line], words)
    for text in (b"", b"hello"):
        path.write_bytes(text)
        one_line(capsys, evaluate, f"{path} is not a checkpoint that can be read")
    assert not (tmp_path / "executed").exists() and not (tmp_path / "runs").exists()


class Code:
    """Executed when it is unpickled by a loader that executes anything."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


def test_checkpoints_of_other_networks(checkpoint, capsys):
    """Another size, other observations, other actions: refused in one line."""
    for change in ("--hidden-size 16", "--env-id pointnav", "--env-id MountainCar-v0"):
        for how in (
            ["--checkpoint", str(checkpoint), "--eval-episodes", "1"],
            ["--resume", str(checkpoint.parent)],
        ):
            one_line(capsys, [*how, *change.split()], "belongs to another network")


@pytest.fixture
def with_options(tmp_path, checkpoint):
    """A function: writes the small checkpoint with these options into a folder of its own. Returns
    the two ways to use it."""

    def write(**options):
        content = ver_ppo.load_checkpoint(checkpoint)
        path = tmp_path / "checkpoint.pt"
        torch.save(content | {"options": content["options"] | options}, path)
        return ["--checkpoint", str(path), "--eval-episodes", "1"], ["--resume", str(tmp_path)]

    return write


class Own(ver_ppo.Run):
    """An extension that does nothing."""


def shorter(env):
    """A wrapper that is a function."""
    return gym.wrappers.TimeLimit(env, max_episode_steps=5)


EXECUTED = "executed by a checkpoint"  # a file in the working directory
STRANGERS = [  # what a file names behind which door, and what else may stand there
    ("wrappers", [f"pydoc:pipepager(cmd='touch {EXECUTED}')"], ["tests.test_faults:shorter"]),
    ("wrappers", ("functools:partial",), []),
    ("wrappers", ("gymnasium.wrappers:TimeLimit(max_episode_steps=3)", "builtins:print"), []),
    ("wrappers", ("tests.envs:Wide",), ["gymnasium.wrappers:TimeLimit(max_episode_steps=3)"]),
    ("wrappers", ("tests.test_faults:shorter",), ["tests.test_faults:shorter"]),
    ("policy", f"os:system(command=touch {EXECUTED})", ["ver_ppo:Policy"]),
    ("policy", "ver_ppo:launch", ["ver_ppo:Policy"]),
    ("policy", "gymnasium.wrappers:TimeLimit", ["ver_ppo:Policy"]),
    ("policy", "this:Zen", ["ver_ppo:Policy"]),
    ("policy", "xml.dom.minidom:Element", ["ver_ppo:Policy"]),
    ("policy", "test.support:Module", ["ver_ppo:Policy"]),
    ("extensions", ("tests.envs:Wide",), []),
    ("extensions", ("ver_ppo:main",), ["tests.test_faults:Own"]),
    ("extensions", ("tests.test_faults:Own", f"subprocess:run(args=touch {EXECUTED})"), []),
    ("env_id", "os:something", ["CartPole-v1"]),
    ("env_id", "this:CartPole-v1", ["CartPole-v1"]),
]


@pytest.mark.parametrize("name, named, instead", STRANGERS)
def test_strangers_code(tmp_path, monkeypatch, capsys, with_options, name, named, instead):
    """What a checkpoint names as environment, wrapper, policy or extension is refused if it is of
    another kind, or Python's own: one line says which option it is. Nothing is executed, and of
    Python's modules nothing imported. Who gives that option on the command line decides."""
    monkeypatch.chdir(tmp_path)
    for module in ("this", "xml.dom.minidom", "test.support"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    option = f"--{name.replace('_', '-')}"
    ways = with_options(**{name: named})
    for way in ways:
        one_line(capsys, way, f"{option} ")
        one_line(capsys, way, "comes from a file, and is no ")
        one_line(capsys, way, f": if you trust it, give {option} on the command line")
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint.pt"]
    assert not sys.modules.keys() & {"this", "xml.dom.minidom", "test.support"}
    for way in ways:
        assert ver_ppo.main([*way, option, *instead]) == 0
    assert not (tmp_path / EXECUTED).exists()


def test_programs_of_strangers(tmp_path, monkeypatch, capsys, with_options):
    """A module named `__main__` is a program: importing it would run it."""
    package = tmp_path / "modules" / "innocent"
    package.mkdir(parents=True)
    (package / "__main__.py").write_text(f"open({str(tmp_path / EXECUTED)!r}, 'w')\n")
    monkeypatch.syspath_prepend(package.parent)
    for way in with_options(policy="innocent.__main__:Policy"):
        one_line(capsys, way, "--policy ")
    assert not (tmp_path / EXECUTED).exists()


ANOTHER_KIND = [  # options that no run of this program has
    {"policy": 5},
    {"policy": None},
    {"wrappers": None},
    {"wrappers": (5,)},
    {"wrappers": (("ver_ppo:Policy",),)},
    {"env_id": 5},
    {"num_envs": "many"},
    {"learning_rate": None},
    {"policy": "torch:two\nlines"},
    {"policy": "\x1b[31mred:Policy"},
]


@pytest.mark.parametrize("options", ANOTHER_KIND)
def test_options_of_another_kind(capsys, with_options, options):
    """One line says that they cannot be used; a terminal shows it as it is."""
    for way in with_options(**options):
        capsys.readouterr()
        assert ver_ppo.main(way) == 2
        error = capsys.readouterr().err
        assert len(error.splitlines()) == 1 and error[:-1].isprintable()


@pytest.mark.parametrize("options", [5, None, ["--seed"], "left out"])
def test_a_checkpoint_without_options(tmp_path, capsys, checkpoint, options):
    """Is refused in one line."""
    content = ver_ppo.load_checkpoint(checkpoint) | {"options": options}
    if options == "left out":
        del content["options"]
    path = tmp_path / "checkpoint.pt"
    torch.save(content, path)
    one_line(capsys, ["--checkpoint", str(path)], str(path))
    one_line(capsys, ["--resume", str(tmp_path)], str(path))


def test_own_code_is_found_again(tmp_path, capsys):
    """A run with classes of importable modules, and short names, is resumed and evaluated without
    naming them again."""
    line = "--env-id tests.envs:Count-v0 --num-workers 0 --total-timesteps 64"
    line += " --policy tests.envs:Wide(times=3)"
    line += " --wrappers gymnasium.wrappers:TimeLimit(max_episode_steps=3)"
    line += f" --extensions tests.test_faults:Own trace(file={tmp_path / 'trace.json'})"
    folder = run_here(tmp_path, line)
    for more in ([], ["--total-timesteps", "128"]):
        assert ver_ppo.main(["--resume", str(folder), *more]) == 0
    assert ver_ppo.main(["--checkpoint", str(folder), "--eval-episodes", "2"]) == 0
    out = capsys.readouterr().out
    assert "evaluation, 2 sampled episodes" in out and "length 3.000" in out
    content = saved(folder)
    assert content["step"] == 128 and content["policy"]["core.weight"].shape == (16, 48)
