"""Collection, carry-over and dynamic batching: the shipped code under a virtual clock."""

import copy

import numpy as np
import pytest
import torch
import ver_ppo
from virtual_clock import SPEC, VirtualWorkers, build, collect, observation_of, reward_of


def random_table(seed):
    """Workers with random step times, between and within environments, and random episode ends."""
    rng = np.random.default_rng(seed)
    num_envs, num_steps = int(rng.integers(1, 7)), int(rng.integers(2, 9))
    speed_N = rng.lognormal(0, 1, num_envs)
    seconds = speed_N[:, None] * rng.lognormal(0, rng.choice([0.0, 0.5, 1.5]), (num_envs, 997))
    if seed % 4 == 0:
        seconds[:] = seconds.round() + 1  # many ties
    ends = rng.choice([None, "terminated", "truncated"], (num_envs, 997), p=[0.8, 0.1, 0.1])
    workers = VirtualWorkers(
        num_envs, lambda row, step: seconds[row, step % 997], lambda row, step: ends[row, step % 997],
        inference_sec=rng.choice([0.0, 0.3]), start_sec=lambda row: seconds[row, -1],
    )  # fmt: skip
    return workers, num_envs, num_steps, ends


@pytest.mark.parametrize("part", range(10))
def test_random_speeds(part):
    """Under 200 random speed tables: exactly T x N complete steps, and over all rollouts every step once, in order."""
    for seed in range(20 * part, 20 * part + 20):
        workers, num_envs, num_steps, ends = random_table(seed)
        policy, rollout, collector = build(workers, num_envs, num_steps, max_requests=1 + seed % 9)
        seen = [[] for _ in range(num_envs)]
        for version in range(5):
            collector.version[...] = version
            collect(policy, rollout, collector)
            ver_ppo.check_rollout(rollout)
            complete = np.flatnonzero(rollout.complete)
            assert len(complete) == num_envs * num_steps
            assert rollout.carried <= num_envs
            for slot in complete:
                seen[rollout.env[slot]].append(rollout.reward[slot])
        for row, rewards in enumerate(seen):
            np.testing.assert_allclose(rewards, [reward_of(row, step) for step in range(len(rewards))], rtol=1e-6)


def test_fast_environments_give_more():
    """Contributions follow the speeds, and nobody waits: the virtual time is what the speeds allow."""
    seconds = np.array([1.0, 2.0, 4.0, 8.0])
    workers = VirtualWorkers(4, lambda row, step: seconds[row])
    policy, rollout, collector = build(workers, 4, 30)
    for _ in range(3):
        collect(policy, rollout, collector)
    count_N = np.bincount(rollout.env[rollout.complete])
    assert np.abs(count_N - 120 / seconds / (1 / seconds).sum()).max() <= 1.5
    assert workers.now == pytest.approx(3 * 120 / (1 / seconds).sum(), abs=8)


def test_equal_speeds_are_lockstep():
    """With equal speeds, VER trains on the very batch that a lock-step loop collects."""
    ends = {(1, 4): "terminated", (0, 7): "truncated", (2, 11): "terminated"}
    workers = VirtualWorkers(3, lambda row, step: 1.0, lambda row, step: ends.get((row, step)))
    policy, rollout, collector = build(workers, 3, 10)
    torch.manual_seed(5)
    got = []
    for _ in range(2):
        collect(policy, rollout, collector)
        assert rollout.carried == 0
        order = np.flatnonzero(rollout.complete)
        got.append(
            {name: np.asarray(getattr(rollout, name))[order] for name in ("reward", "action", "log_prob", "value", "env")}
        )

    torch.manual_seed(5)
    state, prev_action = torch.zeros(3, *policy.state_shape), torch.zeros(3, 1, dtype=torch.int64)
    first, step = torch.ones(3, dtype=torch.bool), 0
    for columns in got:
        expected = {name: [] for name in columns}
        for _ in range(10):
            obs = torch.stack([observation_of(row, step) for row in range(3)])
            with torch.no_grad():
                distribution, value, after = policy.step({"obs": obs}, prev_action, first, state)
            action = distribution.sample()
            expected["reward"] += [reward_of(row, step) for row in range(3)]
            expected["action"] += action.tolist()
            expected["log_prob"] += distribution.log_prob(action).tolist()
            expected["value"] += value.tolist()
            expected["env"] += [0, 1, 2]
            first = torch.tensor([(row, step) in ends for row in range(3)])
            state, prev_action = after * ~first[:, None, None], action
            step += 1
        with torch.no_grad():  # the bootstrap values: their actions are drawn but never sent
            obs = torch.stack([observation_of(row, step) for row in range(3)])
            policy.step({"obs": obs}, prev_action, first, state)[0].sample()
        for name in columns:
            np.testing.assert_allclose(columns[name], expected[name], rtol=1e-5, atol=1e-6, err_msg=name)


def test_carry_over():
    """What is in flight at the end keeps its action, log-probability, value and version; the rest is computed anew."""
    workers = VirtualWorkers(3, lambda row, step: [1.0, 1.0, 17.0][row])
    policy, rollout, collector = build(workers, 3, 8)
    collector.version[...] = 0
    collect(policy, rollout, collector)
    slow = np.flatnonzero((rollout.env == 2) & ~rollout.complete)[-1]
    before = {name: getattr(rollout, name)[slow].clone() for name in ("action", "log_prob", "value", "state", "prev_action")}
    held_back = np.flatnonzero(collector.held_N).tolist()
    with torch.no_grad():
        policy.critic.bias += 1.0  # the update
    collector.version[...] = 1
    collect(policy, rollout, collector)
    ver_ppo.check_rollout(rollout)
    assert rollout.carried == 1 and rollout.env[0] == 2 and rollout.version[0] == 0
    for name, old in before.items():
        assert torch.equal(getattr(rollout, name)[0], old), name
    assert rollout.complete[0] and rollout.reward[0] == reward_of(2, 0)
    assert held_back == [0, 1] and (rollout.version[1 : rollout.size] == 1).all()


def test_records_hold_what_was_known():
    """Every record can be computed again from what it stores, and states follow each other along each environment."""
    workers, num_envs, num_steps, _ = random_table(7)
    policy, rollout, collector = build(workers, num_envs, 40)
    collect(policy, rollout, collector)
    size = rollout.size
    first = torch.from_numpy(rollout.first[:size])
    with torch.no_grad():
        distribution, value, after = policy.step(
            {"obs": rollout.obs["obs"][:size]}, rollout.prev_action[:size], first, rollout.state[:size]
        )
    torch.testing.assert_close(value, rollout.value[:size])
    torch.testing.assert_close(distribution.log_prob(rollout.action[:size]), rollout.log_prob[:size])
    for row in range(num_envs):
        slots = np.flatnonzero(rollout.env[:size] == row)
        for earlier, later in zip(slots[:-1], slots[1:]):
            expected = torch.zeros_like(after[0]) if rollout.first[later] else after[earlier]
            torch.testing.assert_close(rollout.state[later], expected)
            assert torch.equal(rollout.prev_action[later], rollout.action[earlier])


def test_truncation_value():
    """A truncated record gets the value of the final observation, under the memory and last action of its own episode."""
    workers = VirtualWorkers(2, lambda row, step: 1.0, lambda row, step: "truncated" if step % 5 == 4 else None)
    policy, rollout, collector = build(workers, 2, 12)
    collect(policy, rollout, collector)
    cut = np.flatnonzero(rollout.complete & rollout.truncated)
    assert len(cut) == 4
    for slot in cut:
        row, step = rollout.env[slot], (rollout.env[:slot] == rollout.env[slot]).sum()
        one = slice(slot, slot + 1)
        with torch.no_grad():
            _, _, after = policy.step(
                {"obs": rollout.obs["obs"][one]},
                rollout.prev_action[one],
                torch.tensor([bool(rollout.first[slot])]),
                rollout.state[one],
            )
            final = {"obs": observation_of(row, step + 1, final=True)[None]}
            value = policy.step(final, rollout.action[one], torch.tensor([False]), after)[1]
        torch.testing.assert_close(rollout.final_value[one], value)
    assert not rollout.final_value[: rollout.size][torch.from_numpy(~rollout.truncated[: rollout.size])].any()


def test_dynamic_batch():
    """A batch is everything that waits, in order, up to the limits; a wait for more ends after half an inference."""
    arrivals = [1.0, 1.0, 1.0, 2.0, 5.0]
    workers = VirtualWorkers(5, lambda row, step: 1.0, start_sec=lambda row: arrivals[row])
    policy, rollout, collector = build(workers, 5, 4, max_requests=2)

    def batch(limit):
        ver_ppo.await_requests(collector)
        return ver_ppo.take_requests(collector, limit).tolist()

    assert batch(5) == [0, 1]  # --max-requests
    assert batch(5) == [2]  # all that is left: no wait for environment 3
    assert workers.now == 1.0
    assert batch(5) == [3]
    ver_ppo.note_requests(collector, [2, 0, 1])
    collector.max_requests = 5
    assert batch(1) == [2]  # what the rollout still lacks; first come, first served
    collector.min_requests = 3
    assert batch(5) == [0, 1, 4]  # worth a short wait


@pytest.mark.parametrize("sampler, missing", [("ver", [0, 1]), ("sync", [0, 1]), ("sync", [1])])
def test_nobody_answers(sampler, missing, monkeypatch):
    """A wait without enough answers ends with an error that says who was awaited; lock-step needs everyone's."""
    monkeypatch.setattr(ver_ppo, "GRACE_SEC", 0)
    workers = VirtualWorkers(2, lambda row, step: 1.0)
    policy, rollout, collector = build(workers, 2, 4, env_timeout=0.05, sampler=sampler)
    workers.events = [event for event in workers.events if event[1] not in missing]
    message = f"no request for 0 s .* environments {missing} to answer".replace("[", r"\[")
    with pytest.raises(ver_ppo.EnvironmentFailure, match=message):
        ver_ppo.await_requests(collector)


def slots_of(rollout, environment):
    """Slots of one environment's records."""
    return np.flatnonzero(rollout.env[: rollout.size] == environment)


def end_twice(rollout):
    """Let a record be terminated and truncated at once."""
    rollout.terminated[0] = rollout.truncated[0] = rollout.first[slots_of(rollout, rollout.env[0])[1]] = True


CORRUPTIONS = {  # one way to break each invariant that check_rollout states, by the message that it should cause
    "exactly": lambda r: r.complete.__setitem__(slots_of(r, 0)[0], False),
    "alone is open": lambda r: r.complete.__setitem__(slots_of(r, 0)[[0, -1]], [False, True]),
    "an episode begins": lambda r: r.first.__setitem__(slots_of(r, 1)[3], True),
    "versions do not go back": lambda r: r.version.__setitem__(slots_of(r, 2)[0], 5),
    "current policy": lambda r: r.version.__setitem__(slice(r.carried, r.size), 0),
    "older policies": lambda r: r.version.__setitem__(slice(None), 1),
    "ends in one way": end_twice,
    "memory is zero": lambda r: r.state.__setitem__(int(np.flatnonzero(r.first[: r.size])[0]), 1.0),
    "log_prob is finite": lambda r: r.log_prob.__setitem__(0, float("nan")),
    "reward is finite": lambda r: r.reward.__setitem__(0, float("inf")),
}


@pytest.mark.parametrize("message", CORRUPTIONS)
def test_check_rollout_notices(message):
    """Each broken invariant is noticed, by its own message."""
    ends = {(0, 12): "terminated", (1, 11): "terminated"}
    workers = VirtualWorkers(3, lambda row, step: [1.0, 1.0, 7.5][row], lambda row, step: ends.get((row, step)))
    policy, rollout, collector = build(workers, 3, 8)
    for collector.version[...] in range(2):
        collect(policy, rollout, collector)
    ver_ppo.check_rollout(rollout)
    broken = copy.deepcopy(rollout)
    CORRUPTIONS[message](broken)
    with pytest.raises(AssertionError, match=message):
        ver_ppo.check_rollout(broken)


def test_buffers_are_allocated_once():
    """Each observation has one slot on the device and one row in shared memory, and collecting allocates no more."""
    workers = VirtualWorkers(4, lambda row, step: 1.0 + row)
    policy, rollout, collector = build(workers, 4, 16)
    assert len(rollout.obs["obs"]) == 4 * 16 + 4 and len(workers.transfer.obs["obs"]) == 4
    for buffers in (workers.transfer, rollout, collector):
        buffers.share()
    assert all(tensor.is_shared() for tensor in (*rollout.obs.values(), *rollout.host.values(), collector.state_N))
    pointers = [column.data_ptr() for column in rollout.columns() if isinstance(column, torch.Tensor)]
    for _ in range(3):
        collect(policy, rollout, collector)
    assert pointers == [column.data_ptr() for column in rollout.columns() if isinstance(column, torch.Tensor)]
    assert SPEC.action_numbers == rollout.action.shape[1]
