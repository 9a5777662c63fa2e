"""The ways to collect: sync, nover, ver and async, inline and in other processes, with and without overlap."""

import contextlib
import json
import os
import signal
import time

import numpy as np
import pytest
import torch
import ver_ppo
from virtual_clock import SPEC, AsyncLearner, VirtualWorkers, build, collect, reward_of


def table(seed, num_envs=4, spread=0.8):
    """Step times of virtual environments: between steps and between environments."""
    rng = np.random.default_rng(seed)
    return rng.lognormal(0, spread, (num_envs, 1)) * rng.lognormal(0, spread, (num_envs, 997))


@pytest.mark.parametrize("seed", range(10))
def test_nover_and_sync(seed):
    """Both take T steps from every environment and carry nothing over; lock-step pays for the slowest of each step, nover
    for the slowest environment of each rollout, ver for neither."""
    num_envs, num_steps, rollouts, took = 4, 12, 4, {}
    seconds = table(seed, num_envs)
    for sampler in ("sync", "nover", "ver"):
        # -1: the first observation; a held-back environment steps again from the next rollout's start
        workers = VirtualWorkers(num_envs, lambda row, step: seconds[row, step], start_sec=lambda row: 0.0)
        policy, rollout, collector = build(workers, num_envs, num_steps, sampler=sampler)
        batches, serve = [], ver_ppo.write_records

        def counting(policy, rollout, collector, rows, *rest):
            batches.append(len(rows))
            return serve(policy, rollout, collector, rows, *rest)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ver_ppo, "write_records", counting)
            for collector.version[...] in range(rollouts):
                collect(policy, rollout, collector)
                ver_ppo.check_rollout(rollout)
                if sampler != "ver":
                    assert (np.bincount(rollout.env[rollout.complete]) == num_steps).all()
                    assert rollout.carried == 0
        if sampler == "sync":
            assert batches == [num_envs] * rollouts * (num_steps + 1)
        took[sampler] = workers.now
    steps = [range(k * num_steps, (k + 1) * num_steps) for k in range(rollouts)]
    assert took["sync"] == pytest.approx(sum(seconds[:, step].max() for part in steps for step in part))
    assert took["nover"] == pytest.approx(sum(seconds[:, list(part)].sum(axis=1).max() for part in steps))
    assert took["ver"] < took["nover"] < took["sync"]


def test_equal_speeds_make_all_samplers_alike():
    """With equal speeds, sync, nover and ver write the very same rollouts."""
    got = {}
    for sampler in ("sync", "nover", "ver"):
        ends = {(1, 4): "terminated", (0, 7): "truncated", (2, 11): "terminated"}
        workers = VirtualWorkers(3, lambda row, step: 1.0, lambda row, step: ends.get((row, step)))
        torch.manual_seed(3)
        policy, rollout, collector = build(workers, 3, 10, sampler=sampler)
        for _ in range(3):
            collect(policy, rollout, collector)
        got[sampler] = [np.asarray(column[: rollout.size]) for column in rollout.columns()]
    for sampler in ("sync", "nover"):
        for one, two in zip(got[sampler], got["ver"]):
            np.testing.assert_array_equal(one, two)


class Learner(AsyncLearner):
    """Looks at finished trajectories, gives them back, and ends it all."""

    def __init__(self, pool, collector, count):
        super().__init__(pool, collector)
        self.count, self.seen = count, []

    def check(self):
        for number in self.announced():
            slots = number * self.pool.length + np.arange(self.pool.length)
            ver_ppo.check_trajectories(self.pool, slots, self.collector.version)
            self.seen.append((self.pool.env[slots].copy(), self.pool.reward[slots].copy(), self.pool.value[slots].clone()))
            self.pool.free_P[number] = True
            self.collector.version += 1
        if len(self.seen) >= self.count:
            raise ver_ppo.Interrupted(0)


@pytest.mark.parametrize("seed", range(10))
def test_trajectories(seed):
    """async: every environment's steps, each once and in order, in trajectories of T; the slot after them holds the value
    that the next trajectory begins with; nothing waits for anything but its own environment."""
    num_envs, num_steps = 4, 5
    seconds = table(seed, num_envs)
    ends = np.random.default_rng(seed).choice([None, "terminated", "truncated"], (num_envs, 997), p=[0.8, 0.1, 0.1])
    workers = VirtualWorkers(num_envs, lambda row, step: seconds[row, step], lambda row, step: ends[row, step])
    policy, _, collector = build(workers, num_envs, num_steps, sampler="async")
    pool = ver_ppo.Trajectories(SPEC, num_envs * num_steps, num_envs, policy.state_shape, torch.device("cpu"))
    learner = collector.stop = Learner(pool, collector, 60)
    with pytest.raises(ver_ppo.Interrupted):
        ver_ppo.collect_trajectories([policy, policy], pool, collector, learner.finished)
    rewards, bootstrap = [[] for _ in range(num_envs)], [None] * num_envs
    for env, reward, value in learner.seen:
        assert bootstrap[env[0]] is None or value[0] == bootstrap[env[0]]
        bootstrap[env[0]] = value[-1]
        rewards[env[0]] += reward[:-1].tolist()
    for row, got in enumerate(rewards):
        np.testing.assert_allclose(got, [reward_of(row, step) for step in range(len(got))], rtol=1e-6)
        assert seconds[row, : len(got)].sum() <= workers.now + 1e-6
        assert seconds[row, : len(got) + 2 * num_steps].sum() >= workers.now - 1e-6


def test_trajectories_wait_for_the_learner():
    """When no trajectory is free, environments that need a new one wait, and go on as soon as one is given back."""
    workers = VirtualWorkers(2, lambda row, step: 1.0)
    policy, _, collector = build(workers, 2, 3, sampler="async")
    pool = ver_ppo.Trajectories(SPEC, 6, 2, policy.state_shape, torch.device("cpu"))
    pool.free_P[:] = [True, True, True, False, False, False]
    for _ in range(4):
        ver_ppo.await_requests(collector)
        rows, closed, slots = ver_ppo.claim_trajectory_slots(pool, collector, ver_ppo.take_requests(collector, 2))
        if len(rows) == 2:
            workers.send(rows.tolist())
    assert rows.tolist() == [0] and slots.tolist() == [8] and closed.tolist() == [2]  # the third, and last free, one
    assert ver_ppo.take_requests(collector, 2).tolist() == [1]
    ver_ppo.note_requests(collector, np.array([1]))
    pool.free_P[4] = True
    rows, closed, slots = ver_ppo.claim_trajectory_slots(pool, collector, ver_ppo.take_requests(collector, 2))
    assert rows.tolist() == [1] and slots.tolist() == [16] and closed.tolist() == [6]
    assert pool.complete[[2, 6]].all() and not pool.free_P.any()


MODES = {
    "ver": {},
    "two inference workers": {"num_inference_workers": 2},
    "three inference workers, nover": {"num_inference_workers": 3, "sampler": "nover"},
    "overlap": {"overlap": True},
    "overlap, sync": {"overlap": True, "sampler": "sync"},
    "overlap, inline environments": {"overlap": True, "num_workers": 0},
    "overlap, two inference workers": {"overlap": True, "num_inference_workers": 2},
    "async": {"sampler": "async"},
    "async, two inference workers": {"sampler": "async", "num_inference_workers": 2},
    "async, inline environments": {"sampler": "async", "num_workers": 0},
}


@contextlib.contextmanager
def collecting(**changes):
    """Everything that collects, as train() starts it: yields policy, collector, source of rollouts, publish."""
    options = ver_ppo.Options(**{"env_id": "tests.envs:Count-v0", "num_workers": 3, "env_timeout": 20.0} | changes)
    spec = ver_ppo.describe_env(options)
    policy = ver_ppo.Policy(spec, options)
    torch.nn.init.normal_(policy.actor.weight)
    collector, rollouts = ver_ppo.allocate(policy, spec, options, torch.device("cpu"))
    collector.stop = ver_ppo.StopSignal()
    with ver_ppo.collection(policy, collector, rollouts, spec, options, None) as (source, publish):
        yield policy, collector, source, publish


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_loses_nothing(mode):
    """Over many rollouts, the environments' steps come each once and in order, whoever serves them; and each action has the
    probability that the policy of the recorded version gives it (weights are published whole, and in time)."""
    num_envs, num_steps, policies, lags = 5, 16, {}, []
    continuing = [None] * num_envs  # what the next observation of each environment has to be
    options = {"num_envs": num_envs, "num_steps": num_steps, "hidden_size": 8, "sim_latency": 1.0}
    with collecting(**options, **MODES[mode]) as (policy, collector, source, publish):
        for version in range(12):
            rollout, records = next(source)
            if MODES[mode].get("sampler") == "async":
                ver_ppo.check_trajectories(rollout, records, version)
            else:
                ver_ppo.check_rollout(rollout)
            policies[version] = {name: weight.clone() for name, weight in policy.state_dict().items()}
            records = records[rollout.complete[records]]
            assert len(records) == num_envs * num_steps
            for slot in records:
                row, (count, offset) = rollout.env[slot], rollout.obs["obs"][slot].tolist()
                assert bool(rollout.first[slot]) == (count == 0)
                assert continuing[row] is None or continuing[row] == (pytest.approx(count), offset if count else None)
                ends = round(10 * count) == 6
                assert bool(rollout.truncated[slot]) == ends and rollout.reward[slot] == pytest.approx(
                    0.1 * (rollout.action[slot].item() - 1)
                )
                continuing[row] = (0.0, None) if ends else (count + 0.1, offset)
            for used in np.unique(rollout.version[records]):
                slots = records[rollout.version[records] == used]
                index = torch.from_numpy(slots)
                policy.load_state_dict(policies[used])
                with torch.no_grad():
                    first = torch.from_numpy(rollout.first[slots])
                    distribution, value, _ = policy.step(
                        {"obs": rollout.obs["obs"][index]}, rollout.prev_action[index], first, rollout.state[index]
                    )
                torch.testing.assert_close(distribution.log_prob(rollout.action[index]), rollout.log_prob[index])
                torch.testing.assert_close(value, rollout.value[index])
            lags.append(version - rollout.version[records])
            policy.load_state_dict(policies[version])
            with torch.no_grad():  # an update that changes every probability
                for weight in policy.parameters():
                    weight += 0.05 * torch.randn_like(weight)
            publish()
    lag = np.concatenate(lags[2:])
    if "overlap" in mode:
        assert lag.min() == 1 and np.median(lag) == 1
    elif "async" in mode:
        assert 0 <= lag.min() and 0 < lag.mean() and lag.max() <= 5
    else:
        assert lag.min() == 0 and np.median(lag) == 0 and lag.max() <= 1
    assert not collector.workers or all(p.exitcode is not None for p in getattr(collector.workers, "processes", []))


@pytest.mark.parametrize("mode", ["overlap", "async, two inference workers"])
def test_inference_worker_dies(mode):
    """The death of an inference worker ends the run with its name and exit code, in seconds."""
    with collecting(num_envs=4, num_steps=16, **MODES[mode]) as (policy, collector, source, publish):
        next(source)
        os.kill(publish.__self__.processes[-1].pid, signal.SIGKILL)
        began = time.monotonic()
        with pytest.raises(ver_ppo.EnvironmentFailure, match="inference worker . died with exit code -9"):
            for _ in range(1000):
                next(source)
        assert time.monotonic() - began < 10


def spans(path):
    """A trace's events by process name: (name, thread, begin, end) in seconds, in order of time."""
    events = json.loads(path.read_text())
    names = {event["pid"]: event["args"]["name"] for event in events if event["ph"] == "M"}
    found = {name: [] for name in names.values()}
    for event in (event for event in events if event["ph"] == "X"):
        begin = event["ts"] / 1e6
        found[names[event["pid"]]].append((event["name"], event["tid"], begin, begin + event["dur"] / 1e6))
    return {name: sorted(items, key=lambda item: item[2]) for name, items in found.items()}


def overlap_sec(ones, others):
    """Seconds during which a span of each list is under way."""
    return sum(max(0.0, min(a[3], b[3]) - max(a[2], b[2])) for a in ones for b in others)


@pytest.mark.parametrize("mode", ["ver", "overlap", "async"])
def test_trace(tmp_path, mode):
    """--trace shows each step of each environment, each batch with its size, each learning phase, at the right time: steps
    of one environment do not overlap, batches and learning do with --overlap and async only."""
    path = tmp_path / "trace.json"
    args = ["--env-id", "tests.envs:Count-v0", "--num-envs", "4", "--num-steps", "32", "--total-timesteps", "640"]
    args += ["--num-workers", "2", "--hidden-size", "16", "--eval-episodes", "0", "--learner-threads", "1"]
    args += ["--sim-latency", "1", "--runs-dir", str(tmp_path), "--trace", str(path), "--update-epochs", "20"]
    args += {"ver": [], "overlap": ["--overlap"], "async": ["--sampler", "async"]}[mode]
    assert ver_ppo.main(args) == 0
    found = spans(path)
    steps, batches, learning = found["environments"], found["inference"], found["learner"]
    assert len(learning) == 5 and len(steps) >= 640 and {thread for _, thread, *_ in steps} == {0, 1, 2, 3}
    sizes = [int(name.split()[-1]) for name, *_ in batches]
    assert len(steps) <= sum(sizes) <= len(steps) + 2 * 4 * 5 + 8 and max(sizes) <= 4
    assert np.mean([end - begin for *_, begin, end in steps]) == pytest.approx(1.1e-3, rel=0.5)
    for row in range(4):
        mine = [span for span in steps if span[1] == row]
        assert all(earlier[3] <= later[2] + 2e-6 for earlier, later in zip(mine[:-1], mine[1:]))
    assert (overlap_sec(batches, learning) > 0) == (mode != "ver")
    assert overlap_sec(steps, learning) > 0 or mode == "ver"


def test_double_buffering():
    """While inference takes 6 ms and a step 10 ms, a worker with one environment idles a third of its time or more; with
    two, it steps one environment while the other's action is being computed, and idles much less."""
    idle = {}
    for envs_per_worker in (1, 2):
        options = {"num_envs": envs_per_worker, "num_steps": 60, "num_workers": "auto", "envs_per_worker": envs_per_worker}
        options |= {"sim_latency": 10.0, "sim_latency_spread": (0.0, 0.0, 0.0)}
        with collecting(**options) as (policy, collector, source, publish):
            assert len(collector.workers.processes) == 1
            step = policy.step
            policy.step = lambda *args: (time.sleep(0.006), step(*args))[1]
            for _ in range(2):
                rollout, records = next(source)
                logs = ver_ppo.describe_rollout(rollout, records, collector, ver_ppo.Options(num_workers=1), 0.0, 1.0)
        idle[envs_per_worker] = logs["time/worker_idle_share"]
    assert idle[1] > 0.3 and idle[2] < idle[1] / 2, idle  # 0.38 and less than 0.1 on a machine that does nothing else


def test_shared_memory_is_full(tmp_path, capsys, monkeypatch):
    """One line that says how much is needed, before any process or folder is made."""
    monkeypatch.setattr(ver_ppo, "start_workers", lambda *args: pytest.fail("a process was started"))
    monkeypatch.setattr(ver_ppo.shutil, "disk_usage", lambda path: type("Usage", (), {"free": 2**20}))
    assert ver_ppo.main(["--overlap", "--runs-dir", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert "--shm-size" in error and len(error.strip().splitlines()) == 1 and not list(tmp_path.iterdir())
