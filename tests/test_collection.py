"""Collecting, carry-over and dynamic batching: the shipped code under a virtual clock."""

import copy
import pickle
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import ver_ppo
from notebooks.extensions.check import check_rollout
from notebooks.extensions.virtual_clock import (
    VirtualWorkers,
    assert_nothing_is_lost,
    build,
    observation_of,
    reward_of,
    taken,
)

pytestmark = pytest.mark.quick


def random_table(seed):
    """Workers with random step times, between and within environments, random episode ends and
    random crashes; N and T."""
    rng = np.random.default_rng(seed)
    num_envs = int(rng.integers(1, 7))
    num_steps = int(rng.integers(2, 9))
    spread = rng.choice([0.0, 0.5, 1.5])
    seconds = rng.lognormal(0, 1, (num_envs, 1)) * rng.lognormal(0, spread, (num_envs, 997))
    if seed % 4 == 0:
        seconds = seconds.round() + 1  # many ties
    kinds = [None, "terminated", "truncated", "lost"]
    endings = rng.choice(kinds, (num_envs, 997), p=[0.75, 0.1, 0.1, 0.05])
    workers = VirtualWorkers(
        num_envs,
        lambda e, step: seconds[e, step % 997],
        lambda e, step: endings[e, step % 997],
        inference_sec=rng.choice([0.0, 0.3]),
        start_sec=lambda e: seconds[e, -1],
    )
    return workers, num_envs, num_steps


def test_carry_over():
    """A step in flight at the end belongs to the next rollout, with the action, log-probability,
    value and version that it was sent with. The environments that had answered continue with the
    new policy."""
    workers = VirtualWorkers(3, lambda e, step: [1.0, 1.0, 17.0][e])
    policy, rollout, c = build(workers, 3, 8)
    c.collect(rollout)
    assert c.in_flight_N.tolist() == [False, False, True] and set(c.idle) == {0, 1}
    names = "env segment version first prev_action action log_prob value inference_at sent_at"
    names = names.split()
    in_flight = {name: c.pending[name][2].copy() for name in names}
    state = c.pending["state"][2].copy()
    with torch.no_grad():
        policy.critic.bias += 1.0  # the update
        policy.actor.weight += torch.randn_like(policy.actor.weight)
    c.version = 1
    c.collect(rollout)
    (step,) = np.flatnonzero(rollout["env"] == 2)
    for name, before in in_flight.items():
        np.testing.assert_array_equal(rollout[name][step], before, err_msg=name)
    np.testing.assert_array_equal(rollout["state"][step], state)
    assert rollout["version"][step] == 0
    assert rollout["reward"][step] == pytest.approx(reward_of(2, 0))
    assert (np.delete(rollout["version"], step) == 1).all()
    assert (rollout["sent_at"] < rollout.started_at).sum() == 1


@torch.no_grad()
def step_again(policy, rollout):
    """Compute distributions, values, and memories after each step from the stored inputs."""
    inputs = ver_ppo.to_device(rollout.complete, ver_ppo.INPUTS, torch.device("cpu"))
    return policy.step(*inputs.values())


def test_steps_hold_what_was_known():
    """The policy computes the same again from the stored inputs of every step, and each step of an
    environment begins with the memory after the one before."""
    workers, num_envs, _ = random_table(7)
    policy, rollout, c = build(workers, num_envs, 40)
    c.collect(rollout)
    distribution, value, after = step_again(policy, rollout)
    log_prob = distribution.log_prob(torch.from_numpy(rollout["action"].copy()))
    np.testing.assert_allclose(value, rollout["value"], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(log_prob, rollout["log_prob"], rtol=1e-5, atol=1e-6)
    # actions are drawn from it
    assert log_prob.mean() == pytest.approx(-distribution.entropy().mean().item(), abs=0.1)
    assert num_envs > 1 and rollout["first"].sum() > num_envs + 5
    for e in range(num_envs):
        steps = np.flatnonzero(rollout["env"] == e)
        for earlier, later in zip(steps[:-1], steps[1:]):
            state = torch.from_numpy(rollout["state"][later])
            torch.testing.assert_close(state, after[earlier] * (not rollout["first"][later]))
            assert rollout["prev_action"][later] == rollout["action"][earlier]


@pytest.mark.parametrize("sampler", ["ver", "nover"])
def test_truncation_and_bootstrap_values(sampler):
    """The values after steps, computed by hand with the memory and the last action of the episode.
    The reward of a truncated step contains the discounted value of its final observation. The
    reward of a lost step is the value that was predicted for it. The bootstrap value of an
    environment is the value of the observation after its last step. This holds whether it is idle
    or its next step is in flight, also if `enough` ended the rollout."""
    found = {"truncated": 0, "lost": 0, "idle": 0, "pending": 0}
    for seed in range(12):
        workers, num_envs, num_steps = random_table(seed)
        policy, rollout, c = build(
            workers, num_envs, num_steps, sampler=sampler, num_minibatches=1, gamma=0.9
        )
        rng = np.random.default_rng(seed)
        steps_N = np.zeros(num_envs, int)
        c.enough = lambda *_: rng.random() < 0.02
        for c.version in range(4):
            c.collect(rollout)
            after = step_again(policy, rollout)[2]
            env = rollout["env"][: rollout.rows]
            for k, e in enumerate(env):
                ending = workers.ending(e, steps_N[e])
                expected = reward_of(e, steps_N[e])
                steps_N[e] += 1
                seen = observation_of(e, steps_N[e], final=ending == "truncated")[None]
                action = torch.from_numpy(rollout["action"][[k]])
                inputs = {"obs": torch.from_numpy(seen).float()}, action, torch.tensor([False])
                with torch.no_grad():
                    value = policy.step(*inputs, after[[k]])[1].item()
                if ending == "truncated":
                    expected += 0.9 * value
                if ending == "lost":
                    expected = rollout["value"][k]
                assert rollout["lost"][k] == (ending == "lost")
                assert rollout["done"][k] == (ending is not None)
                assert rollout["reward"][k] == pytest.approx(expected, rel=1e-4, abs=1e-5)
                if ending in found:
                    found[ending] += 1
                if ending is None and e not in env[k + 1 :]:
                    assert rollout.bootstrap[e] == pytest.approx(value, rel=1e-4, abs=1e-5)
                    found["idle" if e in c.idle else "pending"] += 1
    assert min(found.values()) > 10, found


def test_dynamic_batch():
    """A batch is all environments that have answered, in order of arrival, but no more than the
    rollout has room for. After `enough` has ended the rollout, nobody waits for another answer."""
    arrivals = [1.0, 1.0, 1.0, 2.0, 5.0]
    workers = VirtualWorkers(5, lambda e, step: 1.0, start_sec=lambda e: arrivals[e])
    _, rollout, c = build(workers, 5, 4)
    assert c.await_answers(2).tolist() == [0, 1]  # there is room for two
    # nobody waits for environment 3
    assert c.await_answers(5).tolist() == [2] and workers.now == 1.0
    assert c.await_answers(5).tolist() == [3]
    c.arrived += [2, 0, 1]
    assert c.await_answers(1).tolist() == [2]
    assert c.await_answers(5).tolist() == [0, 1]
    c.enough = lambda rows: True
    c.collect(rollout)
    assert rollout.rows == 0 and workers.now == 2.0 and c.waited_sec == 0.0
    c.enough = lambda rows: False
    assert c.await_answers(5).tolist() == [4] and workers.now == 5.0
    c.arrived.append(3)
    workers.send(np.array([1]))
    workers.now = 6.0
    assert c.await_answers(5).tolist() == [3, 1]  # new answers join older ones


def test_sync_waits_for_all():
    """With `sync`, a batch is all environments. While too few have answered, none is taken, and
    `enough` is asked again."""
    arrivals = [1.0, 1.0, 1.0, 2.0, 5.0]
    workers = VirtualWorkers(5, lambda e, step: 1.0, start_sec=lambda e: arrivals[e])
    _, rollout, c = build(workers, 5, 4, sampler="sync")
    asked = []  # when, and at how many steps
    c.enough = lambda rows: asked.append((workers.now, rows))
    c.collect(rollout)
    waiting = [(0.0, 0), (1.0, 0), (2.0, 0), (5.0, 0)]
    assert asked == [*waiting, (6.0, 5), (7.0, 10), (8.0, 15)]
    assert workers.now == 9.0 and rollout.rows == rollout.capacity
    c.arrived += [2, 0, 4, 1, 3]
    assert c.await_answers(20).tolist() == [0, 1, 2, 3, 4]  # the same order in every step


@pytest.mark.parametrize("seed", range(60))
def test_random_speeds(seed):
    """With any speeds, a rollout has exactly T x N steps, and all rollouts together have every step
    once, in order."""
    workers, num_envs, num_steps = random_table(seed)
    _, rollout, c = build(workers, num_envs, num_steps, num_minibatches=1)
    rollouts = []
    for c.version in range(5):
        c.collect(rollout)
        assert rollout.rows == num_envs * num_steps
        check_rollout(rollout, c.version)
        rollouts.append(taken(rollout))
    assert_nothing_is_lost(c, rollouts)


@pytest.mark.parametrize("sampler", ["ver", "nover", "sync", "async"])
@pytest.mark.parametrize("seed", range(5))
def test_early_end(sampler, seed):
    """`enough` ends a rollout before it is full. No step is missing, because the next rollout
    continues from there."""
    workers, num_envs, num_steps = random_table(seed)
    policy, rollout, c = build(workers, num_envs, num_steps, sampler=sampler, num_minibatches=1)
    rng = np.random.default_rng(seed)
    rollouts = []
    c.enough = lambda *_: rng.random() < 0.5 / num_envs / num_steps
    for c.version in range(20):
        c.collect(rollout)
        if rollout.rows:
            check_rollout(rollout, c.version, lag=20 * (sampler == "async"))
        assert sampler != "sync" or rollout.rows % num_envs == 0  # still in lock-step
        rollouts.append(taken(rollout))
    sizes = {len(columns[0]) for columns in rollouts}
    assert min(sizes) < max(sizes) == rollout.capacity
    assert_nothing_is_lost(c, rollouts)


HAND_OVERS = [  # environments that have answered, environments, seconds, whether they are sent
    (1, 1, 0.0019, False),
    (1, 1, 0.0021, True),
    (2, 2, 0.002, False),  # more than 2 ms
    (1, 2, 0.0021, True),
    (1, 3, 0.0021, False),
    (2, 3, 0.0021, True),
    (49, 100, 0.9, False),
    (50, 100, 0.0021, True),
    (100, 100, 0.0, False),
    (1, 100, 1.0, False),  # more than a second
    (1, 100, 1.001, True),
]


@pytest.mark.parametrize("num_answered, num_environments, sec, due", HAND_OVERS)
def test_is_due(num_answered, num_environments, sec, due):
    """A worker sends its answers after 2 ms if at least half of its environments have answered, and
    after a second in any case."""
    assert ver_ppo.is_due(num_answered, num_environments, sec) is due


HAND_OVERS_OF_A_WORKER = [  # environments, those that are asked, seconds of a step, the messages
    # half of its environments, and not half of those that are asked
    (8, [0, 1, 2, 3], 0.003, [[0, 1, 2, 3]]),
    (4, [0, 1, 2, 3], 0.003, [[0, 1], [2, 3]]),
    # the second begins again after each hand-over
    (9, [0, 1, 2, 3, 4], 0.6, [[0, 1], [2, 3], [4]]),
]


@pytest.mark.parametrize("num_envs, asked, step_sec, expected", HAND_OVERS_OF_A_WORKER)
def test_hand_overs_of_a_worker(monkeypatch, num_envs, asked, step_sec, expected):
    """The numbers that the shipped loop of a worker sends, on a virtual clock."""
    now = [0.0]
    sent = []

    def answer():
        now[0] += step_sec

    environments = {e: SimpleNamespace(answer=answer) for e in range(num_envs)}
    requests = iter([asked, []])  # [] is the pipe's end
    monkeypatch.setattr(ver_ppo, "read_numbers", lambda pipe: next(requests))
    monkeypatch.setattr(ver_ppo, "send_numbers", lambda pipe, numbers: sent.append(list(numbers)))
    monkeypatch.setattr(ver_ppo.torch, "set_num_threads", lambda number: None)
    monkeypatch.setattr(ver_ppo, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    ver_ppo.env_worker(None, None, environments)
    assert sent == expected


def copy_by_pickle(table):
    """The object that arrives at the other end of a pipe."""
    return pickle.loads(pickle.dumps(table))


@pytest.mark.parametrize("copy_of", [copy.deepcopy, copy_by_pickle])
def test_copies_of_tables(copy_of):
    """The copy of a table holds the same numbers, and no part of it is the table's own memory."""
    _, rollout, c = build(VirtualWorkers(3, lambda e, step: 1.0), 3, 4)
    c.collect(rollout)
    other = copy_of(rollout)
    assert other.records.tobytes() == rollout.records.tobytes()
    assert (other.rows, other.started_at) == (rollout.rows, rollout.started_at)
    assert not np.shares_memory(other.records, rollout.records)
    rollout["reward"][:] = 5.0
    rollout["obs"]["obs"] = 5.0
    assert not (other["reward"] == 5.0).any() and not (other["obs"]["obs"] == 5.0).any()
    other["reward"][:] = 7.0  # its columns are views of its own memory
    assert (other.records["reward"] == 7.0).all() and (rollout["reward"] == 5.0).all()
    assert other.memory.numpy().tobytes() == other.records.tobytes()
    assert np.shares_memory(other.memory.numpy(), other.records)
    assert np.shares_memory(other["reward"], other.records)


def steps_of(rollout, e):
    """Indices of one environment's steps."""
    return np.flatnonzero(rollout["env"] == e)


def go_back(rollout):
    """Give the last step of environment 0 an older policy than the step before it."""
    last = steps_of(rollout, 0)[-1]
    rollout["version"][last] = rollout["sent_at"][last] = 0


# a way to break each invariant that check_rollout states, and the message that it should cause
CORRUPTIONS = [
    ("1 to S steps", lambda r: setattr(r, "rows", 0)),
    ("at most one step of an environment", lambda r: setattr(r, "started_at", np.inf)),
    ("come from the current policy", lambda r: np.put(r["version"], steps_of(r, 0)[3], 0)),
    ("a later policy cannot have acted", lambda r: np.put(r["version"], steps_of(r, 0)[3], 2)),
    ("must come from one environment", lambda r: np.put(r["env"], steps_of(r, 0)[3], 1)),
    ("must begin where one ended", lambda r: np.put(r["first"], steps_of(r, 0)[3], True)),
    ("must begin where one ended", lambda r: np.put(r["done"], steps_of(r, 0)[3], True)),
    ("must not decrease", go_back),
    ("in time order", lambda r: np.put(r["sent_at"], steps_of(r, 0)[-1], r["sent_at"][0])),
    ("a lost step must end its episode", lambda r: np.put(r["lost"], steps_of(r, 0)[3], True)),
    ("memory must be zero", lambda r: r["state"][np.flatnonzero(r["first"])[0]].fill(1.0)),
    ("log_prob must be finite", lambda r: np.put(r["log_prob"], 3, np.nan)),
    ("value must be finite", lambda r: np.put(r["value"], 3, np.inf)),
    ("reward must be finite", lambda r: np.put(r["reward"], 3, np.inf)),
    ("bootstrap values must be finite", lambda r: np.put(r.bootstrap, 2, np.nan)),
]


@pytest.mark.parametrize("message, corrupt", CORRUPTIONS)
def test_check_rollout_notices(message, corrupt):
    """`check_rollout` notices each broken invariant, and says which one it is."""
    ends = {(0, 12): "terminated", (1, 11): "terminated"}
    workers = VirtualWorkers(
        3, lambda e, step: [1.0, 1.0, 7.5][e], lambda e, step: ends.get((e, step))
    )
    policy, rollout, c = build(workers, 3, 8)
    for c.version in range(2):
        c.collect(rollout)
    check_rollout(rollout, 1)
    check_rollout(rollout, 2, lag=1)
    broken = copy.deepcopy(rollout)
    corrupt(broken)
    with pytest.raises(AssertionError, match=message):
        check_rollout(broken, 1)
