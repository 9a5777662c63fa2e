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


def gae(columns):
    """Advantages without ratios."""
    return ver_ppo.compute_advantages(**columns, gamma=GAMMA, gae_lambda=LAMBDA)[1]


def advantages_by_definition(c, gae_lambda=LAMBDA):
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
            result[here] = sum((GAMMA * gae_lambda) ** k * deltas[slot] for k, slot in enumerate(later))
    return result


@pytest.mark.parametrize("seed", range(20))
def test_gae_against_definition(seed):
    """Terminated, truncated, carried-over and open records, in any interleaving of the environments."""
    columns = random_rollout(seed)
    got = gae(columns)
    np.testing.assert_allclose(got, advantages_by_definition(columns), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("ending", ["terminated", "truncated"])
def test_nothing_leaks_across_borders(ending):
    """A million planted just beyond each border changes nothing before it."""
    columns = random_rollout(1)
    columns["terminated"] |= columns["truncated"]
    columns["truncated"] = np.zeros_like(columns["truncated"])
    if ending == "truncated":
        columns["truncated"], columns["terminated"] = columns["terminated"], columns["truncated"]
    clean = gae(columns)
    borders = 0
    for e in range(4):
        slots = np.flatnonzero(columns["env"] == e)
        for position in np.flatnonzero(columns[ending][slots][:-1]):
            planted = {name: column.copy() for name, column in columns.items()}
            planted["value"][slots[position + 1]] = planted["reward"][slots[position + 1]] = 1e6
            if ending == "terminated":
                planted["final_value"][slots[position]] = 1e6  # of no meaning for a terminated step
            got = gae(planted)
            np.testing.assert_array_equal(got[slots[: position + 1]], clean[slots[: position + 1]])
            others = columns["env"] != e
            np.testing.assert_array_equal(got[others], clean[others])
            borders += columns["complete"][slots[position]]
    assert borders >= 8


def test_reward_in_an_open_record_is_not_used():
    """What stands in an open slot of an older rollout (reward, end flags) is not read; its value is the bootstrap."""
    columns = random_rollout(2)
    clean = gae(columns)
    still_open = ~columns["complete"]
    columns["reward"][still_open], columns["final_value"][still_open] = 1e6, 1e6
    columns["terminated"][still_open], columns["truncated"][still_open] = True, True
    got = gae(columns)
    np.testing.assert_array_equal(got, clean)
    assert (got[still_open] == 0).all()


def vtrace_by_definition(c, ratio, rho_max, c_max):
    """v_t = V_t + sum over k of gamma^k (lambda^k c_t ... c_{t+k-1}) rho_{t+k} delta_{t+k}, episode by episode, and the
    advantage r_t + gamma (V + lambda (v - V))_{t+1} - V_t."""
    target, advantage = c["value"].astype(float), np.zeros(len(c["env"]))
    for e in np.unique(c["env"]):
        slots = np.flatnonzero(c["env"] == e)
        ended = (c["terminated"] | c["truncated"])[slots]
        for i, here in enumerate(slots[:-1]):
            trace, excess = 1.0, []
            for j in range(i, len(slots) - 1):
                slot, following = slots[j], slots[j + 1]
                follows = c["final_value"][slot] if c["truncated"][slot] else c["value"][following]
                follows = 0.0 if c["terminated"][slot] else follows
                delta = c["reward"][slot] + GAMMA * follows - c["value"][slot]
                excess.append(trace * min(rho_max, ratio[slot]) * delta)
                advantage[here] += delta if j == i else 0.0
                trace *= GAMMA * LAMBDA * min(c_max, ratio[slot])
                if ended[j]:
                    break
            target[here] += sum(excess)
            if len(excess) > 1:  # what follows, as it counts from the next step on
                advantage[here] += GAMMA * LAMBDA * sum(excess[1:]) / (GAMMA * LAMBDA * min(c_max, ratio[here]))
    return target, advantage


@pytest.mark.parametrize("rho_max, c_max", [(1.0, 1.0), (2.0, 0.5), (np.inf, np.inf)])
@pytest.mark.parametrize("seed", range(5))
def test_vtrace_against_definition(seed, rho_max, c_max):
    """Targets and advantages against a scalar loop over the definition, in any interleaving of the environments."""
    columns = random_rollout(seed)
    ratio = np.random.default_rng(seed).lognormal(0, 0.5, len(columns["env"])).astype(np.float32)
    target, advantage = ver_ppo.compute_advantages(
        **columns, ratio=ratio, gamma=GAMMA, gae_lambda=LAMBDA, rho_max=rho_max, c_max=c_max
    )
    expected = vtrace_by_definition(columns, ratio, rho_max, c_max)
    np.testing.assert_allclose(target, expected[0], rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(np.where(columns["complete"], advantage, 0), expected[1], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("gae_lambda", [0.0, 0.9, 1.0])
@pytest.mark.parametrize("maximum", [1.0, np.inf])
def test_vtrace_on_policy_is_gae(gae_lambda, maximum):
    """Where both policies are one, the advantages are those of GAE, and the targets are values plus these."""
    columns = random_rollout(3)
    ones = np.ones(len(columns["env"]), np.float32)
    more = {"gamma": GAMMA, "gae_lambda": gae_lambda, "rho_max": maximum, "c_max": maximum}
    target, advantage = ver_ppo.compute_advantages(**columns, ratio=ones, **more)
    expected = advantages_by_definition(columns, gae_lambda)
    np.testing.assert_allclose(advantage, expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(np.where(columns["complete"], target - columns["value"], 0), expected, rtol=1e-4, atol=1e-5)


def test_open_records_separate_trajectories():
    """Two trajectories of one environment, one after the other with an open record between (async): nothing of the second
    reaches the first but the bootstrap value."""
    columns = random_rollout(4, num_envs=1, steps=30)
    twice = {name: np.concatenate([column, column]) for name, column in columns.items()}
    once = gae(columns)
    np.testing.assert_array_equal(gae(twice), np.tile(once, 2))
    ratio = np.linspace(0.5, 1.5, 31, dtype=np.float32)
    alone = ver_ppo.compute_advantages(**columns, ratio=ratio, gamma=GAMMA, gae_lambda=LAMBDA)
    both = ver_ppo.compute_advantages(**twice, ratio=np.tile(ratio, 2), gamma=GAMMA, gae_lambda=LAMBDA)
    for one, two in zip(alone, both):
        np.testing.assert_array_equal(two, np.tile(one, 2))


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
