"""Advantages and importance weights against their definitions."""

import numpy as np
import pytest
import ver_ppo

GAMMA, LAMBDA = 0.97, 0.9


def random_rollout(seed, num_envs=4, steps=80):
    """A buffer with episodes that end in both ways, carried records and one open record for each environment."""
    rng = np.random.default_rng(seed)
    env = np.concatenate([rng.integers(0, num_envs, steps), rng.permutation(num_envs)])
    size = steps + num_envs
    ended = rng.random(size) < 0.2
    terminated = ended & (rng.random(size) < 0.5)
    return {
        "env": env,
        "complete": np.arange(size) < steps,
        "reward": rng.normal(size=size).astype(np.float32),
        "value": rng.normal(size=size).astype(np.float32),
        "terminated": terminated,
        "truncated": ended & ~terminated,
        "final_value": rng.normal(size=size).astype(np.float32),
    }


def advantages_by_definition(c):
    """A_t = sum over k of (gamma lambda)^k delta_{t+k}, episode by episode: nothing beyond the episode's end counts."""
    result = np.zeros(len(c["env"]))
    for e in np.unique(c["env"]):
        slots = np.flatnonzero(c["env"] == e)
        deltas, episode_of, episode = {}, {}, 0
        for here, following in zip(slots[:-1], slots[1:]):
            if c["terminated"][here]:
                follows = 0.0
            elif c["truncated"][here]:
                follows = c["final_value"][here]
            else:
                follows = c["value"][following]
            deltas[here] = c["reward"][here] + GAMMA * follows - c["value"][here]
            episode_of[here] = episode
            episode += bool(c["terminated"][here] or c["truncated"][here])
        for here in deltas:
            later = [slot for slot in deltas if slot >= here and episode_of[slot] == episode_of[here]]
            result[here] = sum((GAMMA * LAMBDA) ** k * deltas[slot] for k, slot in enumerate(later))
    return result


@pytest.mark.parametrize("seed", range(20))
def test_gae_against_definition(seed):
    """Terminated, truncated, carried-over and open records, in any interleaving of the environments."""
    columns = random_rollout(seed)
    got = ver_ppo.compute_advantages(**columns, gamma=GAMMA, gae_lambda=LAMBDA)
    np.testing.assert_allclose(got, advantages_by_definition(columns), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("ending", ["terminated", "truncated"])
def test_nothing_leaks_across_borders(ending):
    """A million planted just beyond each border changes nothing before it."""
    columns = random_rollout(1)
    columns["terminated"] |= columns["truncated"]
    columns["truncated"] = np.zeros_like(columns["truncated"])
    if ending == "truncated":
        columns["truncated"], columns["terminated"] = columns["terminated"], columns["truncated"]
    clean = ver_ppo.compute_advantages(**columns, gamma=GAMMA, gae_lambda=LAMBDA)
    borders = 0
    for e in range(4):
        slots = np.flatnonzero(columns["env"] == e)
        for position in np.flatnonzero(columns[ending][slots][:-1]):
            planted = {name: column.copy() for name, column in columns.items()}
            planted["value"][slots[position + 1]] = planted["reward"][slots[position + 1]] = 1e6
            if ending == "terminated":
                planted["final_value"][slots[position]] = 1e6  # of no meaning for a terminated step
            got = ver_ppo.compute_advantages(**planted, gamma=GAMMA, gae_lambda=LAMBDA)
            np.testing.assert_array_equal(got[slots[: position + 1]], clean[slots[: position + 1]])
            others = columns["env"] != e
            np.testing.assert_array_equal(got[others], clean[others])
            borders += columns["complete"][slots[position]]
    assert borders >= 8


def test_reward_in_an_open_record_is_not_used():
    """What stands in an open slot of an older rollout (reward, end flags) is not read; its value is the bootstrap."""
    columns = random_rollout(2)
    clean = ver_ppo.compute_advantages(**columns, gamma=GAMMA, gae_lambda=LAMBDA)
    still_open = ~columns["complete"]
    columns["reward"][still_open], columns["final_value"][still_open] = 1e6, 1e6
    columns["terminated"][still_open], columns["truncated"][still_open] = True, True
    got = ver_ppo.compute_advantages(**columns, gamma=GAMMA, gae_lambda=LAMBDA)
    np.testing.assert_array_equal(got, clean)
    assert (got[still_open] == 0).all()


@pytest.mark.parametrize("seed", range(20))
def test_importance_weights(seed):
    """Weights over an environment's steps add up to min(K_e, S / N), and equal shares weigh 1."""
    rng = np.random.default_rng(seed)
    num_envs, steps = 5, 100
    env_S = rng.choice(num_envs, steps, p=rng.dirichlet(np.ones(num_envs)))
    complete_S = np.ones(steps, bool)
    weight_S = ver_ppo.importance_weights(env_S, complete_S, num_envs)
    for e in range(num_envs):
        count = (env_S == e).sum()
        assert weight_S[env_S == e].sum() == pytest.approx(min(count, steps / num_envs), rel=1e-5)
    assert weight_S.max() <= 1.0
    equal = ver_ppo.importance_weights(np.arange(steps) % num_envs, complete_S, num_envs)
    assert (equal == 1).all()
    assert ver_ppo.importance_weights(np.zeros(steps, int), complete_S, num_envs)[0] == pytest.approx(1 / num_envs)
