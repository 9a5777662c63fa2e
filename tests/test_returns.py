"""Advantages, V-trace and importance weights against their definitions."""

import numpy as np
import pytest
import torch

import ver_ppo
from notebooks.extensions.overlap import add_corrected_advantages, vtrace_advantages
from notebooks.extensions.virtual_clock import SPEC

pytestmark = pytest.mark.quick

GAMMA, LAMBDA = 0.97, 0.9


def random_steps(seed, segments=4, steps=80):
    """Steps of several segments, in any interleaving, with ends of episodes, and each segment's
    bootstrap value."""
    rng = np.random.default_rng(seed)
    numbers = {name: rng.normal(size=steps).astype(np.float32) for name in ("reward_S", "value_S")}
    numbers |= {"segment_S": rng.integers(0, segments, steps), "done_S": rng.random(steps) < 0.2}
    return numbers | {"bootstrap": rng.normal(size=segments).astype(np.float32)}


def gae(numbers):
    """The shipped function."""
    return ver_ppo.compute_advantages(**numbers, gamma=GAMMA, gae_lambda=LAMBDA)


def vtrace(numbers, keep_S):
    """The shipped function, on a rollout of these numbers; `keep_S` is the share of each step's
    advantage that is kept."""
    steps = len(numbers["value_S"])
    segments = len(numbers["bootstrap"])
    rollout = ver_ppo.Rollout(SPEC, steps + 7, segments, (0, 8))
    rollout.rows = steps  # it ended early
    for name in ("segment", "reward", "done"):
        rollout.complete[name][:] = numbers[f"{name}_S"]
    rollout.bootstrap[:] = numbers["bootstrap"]
    return vtrace_advantages(rollout, numbers["value_S"], keep_S, GAMMA, LAMBDA)


def rest_of_episode(n, step):
    """The steps from this one on in its segment, as far as its episode goes, each with its temporal
    difference."""
    later = [k for k in range(step, len(n["value_S"])) if n["segment_S"][k] == n["segment_S"][step]]
    values = [*n["value_S"][later[1:]], n["bootstrap"][n["segment_S"][step]]]
    for k, value in zip(later, values):
        yield k, n["reward_S"][k] + (0.0 if n["done_S"][k] else GAMMA * value) - n["value_S"][k]
        if n["done_S"][k]:
            return


def advantages_by_definition(n):
    """A_t = sum over k of (gamma lambda)^k delta_{t+k}: nothing beyond the episode's end counts."""
    return [
        sum((GAMMA * LAMBDA) ** k * delta for k, (_, delta) in enumerate(rest_of_episode(n, step)))
        for step in range(len(n["value_S"]))
    ]


@pytest.mark.parametrize("seed", range(20))
def test_gae_against_definition(seed):
    """Any interleaving of the segments, with and without an end of the episode at a segment's
    end."""
    numbers = random_steps(seed)
    np.testing.assert_allclose(
        gae(numbers), advantages_by_definition(numbers), rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("seed", range(20))
def test_vtrace_keeps_all(seed):
    """V-trace's loop where all of every step's advantage is kept is GAE, bit for bit."""
    numbers = random_steps(seed)
    one_S = np.ones(80, np.float32)
    np.testing.assert_array_equal(vtrace(numbers, one_S), gae(numbers))
    less_S = np.full(80, 0.7, np.float32)
    assert (vtrace(numbers, less_S) != gae(numbers)).any()


WAYS = {
    "GAE": gae,
    "V-trace, all is kept": lambda numbers: vtrace(numbers, np.ones(80)),
    "V-trace": lambda numbers: vtrace(numbers, np.full(80, 0.7)),
}


@pytest.mark.parametrize("way", WAYS)
def test_nothing_leaks_across_borders(way):
    """A million planted just beyond the end of each episode, or of its segment, changes nothing
    before it, and nothing in other segments: neither in GAE nor in V-trace."""
    advantages = WAYS[way]
    numbers = random_steps(1)
    numbers["done_S"][[np.flatnonzero(numbers["segment_S"] == s)[-1] for s in (0, 1)]] = True
    clean = advantages(numbers)
    at_the_end = 0
    for step in np.flatnonzero(numbers["done_S"]):
        planted = {name: column.copy() for name, column in numbers.items()}
        mine = numbers["segment_S"] == numbers["segment_S"][step]
        beyond = np.flatnonzero(mine & (np.arange(80) > step))[:1]
        planted["reward_S"][beyond] = planted["value_S"][beyond] = 1e6
        if not len(beyond):
            planted["bootstrap"][numbers["segment_S"][step]] = 1e6
            at_the_end += 1
        kept = ~mine | (np.arange(80) <= step)
        np.testing.assert_array_equal(advantages(planted)[kept], clean[kept])
    assert at_the_end >= 2 and numbers["done_S"].sum() >= 12


def vtrace_by_definition(n, ratio_S):
    """Targets and advantages of V-trace, episode by episode. A target is
    v_t = V_t + sum over k of gamma^k (lambda^k c_t ... c_{t+k-1}) rho_{t+k} delta_{t+k}.
    An advantage is r_t + gamma (V + lambda (v - V))_{t+1} - V_t. Here rho and c are the ratios, but
    at most 1."""
    excess_S, advantage_S = np.zeros((2, len(ratio_S)))
    for step in reversed(range(len(ratio_S))):
        (_, advantage_S[step]), *later = rest_of_episode(n, step)
        if later:
            advantage_S[step] += GAMMA * LAMBDA * excess_S[later[0][0]]
        trace = 1.0
        for k, delta in rest_of_episode(n, step):
            excess_S[step] += trace * min(1.0, ratio_S[k]) * delta
            trace *= GAMMA * LAMBDA * min(1.0, ratio_S[k])
    return n["value_S"] + excess_S, advantage_S


@torch.no_grad()
def make_rollout(numbers, ratio_S):
    """A rollout of these numbers, its policy and options, and the numbers with the policy's values.
    `ratio_S` says by which factor each action is now more probable than when it was chosen."""
    options = ver_ppo.Options(
        num_envs=4, num_steps=20, gamma=GAMMA, gae_lambda=LAMBDA, lstm_layers=0
    )
    policy = ver_ppo.Policy(SPEC, options)
    policy.critic.scale.fill_(1.0)
    rollout = ver_ppo.Rollout(SPEC, 80, 4, policy.state_shape)
    rollout["obs"]["obs"] = torch.randn(rollout["obs"]["obs"].shape)
    action = torch.randint(3, (80, 1))
    rollout["action"][:] = rollout["prev_action"][:] = action
    inputs = ver_ppo.to_device(rollout.records, ver_ppo.INPUTS, torch.device("cpu"))
    distribution, value, _ = policy.step(*inputs.values())
    rollout["log_prob"][:] = distribution.log_prob(action).numpy() - np.log(ratio_S)
    rollout.bootstrap[:] = numbers["bootstrap"]
    rollout["env"][:] = numbers["segment_S"]
    for name in ("segment", "reward", "value", "done"):
        rollout[name][:] = numbers[f"{name}_S"]
    rollout.rows = 80
    return policy, rollout, options, numbers | {"value_S": value.numpy()}


@pytest.mark.parametrize("seed", range(10))
def test_vtrace_against_definition(seed):
    """Targets and advantages against a scalar loop over the definition, by the values and ratios of
    the policy as it is now."""
    ratio_S = np.random.default_rng(seed).lognormal(0, 0.5, 80)
    policy, rollout, options, numbers = make_rollout(random_steps(seed), ratio_S)
    add_corrected_advantages(policy, rollout, options)
    expected = vtrace_by_definition(numbers, ratio_S)
    found = [rollout["returns"], rollout["advantage"]]
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-4)
    assert (rollout["weight"] == ver_ppo.importance_weights(rollout["segment"], 4)).all()


def test_vtrace_on_policy_is_gae():
    """If both policies are the same, the advantages are those of GAE, and the targets are values
    plus advantages."""
    policy, rollout, options, numbers = make_rollout(random_steps(3), np.ones(80))
    add_corrected_advantages(policy, rollout, options)
    np.testing.assert_allclose(rollout["advantage"], gae(numbers), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(
        rollout["returns"], rollout["advantage"] + numbers["value_S"], rtol=1e-4, atol=1e-5
    )


def test_returns_of_a_rollout():
    """Without V-trace, a rollout gets GAE from the stored values, and importance weights. Lost
    steps get the weight 0. If it ended early, only its first 60 steps get them."""
    numbers = random_steps(4)
    _, rollout, options, _ = make_rollout(numbers, np.ones(80))
    rollout["lost"][::7] = True
    rollout.rows = 60
    ver_ppo.add_advantages(rollout, options)
    numbers = {name: column[:60] for name, column in numbers.items()}
    np.testing.assert_array_equal(rollout["advantage"][:60], gae(numbers))
    returns_S = rollout["advantage"][:60] + numbers["value_S"]
    np.testing.assert_array_equal(rollout["returns"][:60], returns_S)
    weight_S = ver_ppo.importance_weights(numbers["segment_S"], 4)
    weight_S[::7] = 0.0
    np.testing.assert_array_equal(rollout["weight"][:60], weight_S)
    for name in ("advantage", "returns", "weight"):
        assert not rollout[name][60:].any(), name


@pytest.mark.parametrize("seed", range(20))
def test_importance_weights(seed):
    """Weights over an environment's steps add up to min(K_e, S / N), and equal shares weigh 1."""
    rng = np.random.default_rng(seed)
    env_S = rng.choice(5, 100, p=rng.dirichlet(np.ones(5)))
    weight_S = ver_ppo.importance_weights(env_S, 5)
    for e in range(5):
        count = (env_S == e).sum()
        assert weight_S[env_S == e].sum() == pytest.approx(min(count, 100 / 5), rel=1e-5)
    assert weight_S.max() <= 1.0
    assert (ver_ppo.importance_weights(np.arange(100) % 5, 5) == 1).all()
    assert ver_ppo.importance_weights(np.zeros(100, int), 5)[0] == pytest.approx(1 / 5)


def test_weights_of_few_steps():
    """With fewer steps than environments, nothing was sampled too often."""
    assert ver_ppo.importance_weights(np.array([0, 2, 5]), 16).tolist() == [1, 1, 1]
