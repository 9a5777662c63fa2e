"""Small rules, of which each has surprised a user of a trainer like this one."""

import gymnasium as gym
import numpy as np
import pytest
import torch

import ver_multigpu
import ver_ppo
from notebooks.extensions import play
from notebooks.extensions.virtual_clock import SPEC
from tests.helpers import make_spec, one_line

pytestmark = pytest.mark.quick


def test_values_of_other_languages():
    """`false` is not a text, which would count as true."""
    items = ["a=true", "b=false", "c=null", "d=True", "e=none"]
    found = ver_ppo.read_arguments(items).values()
    assert list(found) == [True, False, None, True, "none"]


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
    seeds = [ver_ppo.derive_seed(1, k) for k in range(1000)]
    assert 2**30 < max(seeds) < 2**31 and min(seeds) >= 0


def test_ranks_of_a_machine_count_on(monkeypatch):
    """Simulators derive ports from `number`, so two ranks never share one."""
    seen = []
    gym.register("Seen-v0", lambda number: seen.append(number) or gym.Env(), kwargs={"number": 0})
    monkeypatch.setenv("LOCAL_RANK", "2")
    ver_ppo.make_env(ver_ppo.Options(env_id="Seen-v0", num_envs=8), number=3)
    assert seen == [19]


def test_weights_of_few_steps():
    """With fewer steps than environments, nothing was sampled too often."""
    assert ver_ppo.importance_weights(np.array([0, 2, 5]), 16).tolist() == [1, 1, 1]


def test_entropy_of_unequal_choices():
    """Its gradient is a number, however large its weight."""
    spec = make_spec(gym.spaces.Discrete(2), gym.spaces.MultiDiscrete([2, 5]))
    policy = ver_ppo.Policy(spec, ver_ppo.Options(hidden_size=8))
    distribution, _ = policy.heads(torch.randn(4, 8))
    (1000.0 * distribution.entropy().sum()).backward()
    assert torch.isfinite(policy.actor.weight.grad).all()


def test_seconds_of_a_rank_that_gives_no_step():
    """An environment without a step takes as long as it did before, or as the rollout. One step of
    8 s takes 8 s, although the rollout lasted 3 s."""
    rollout = ver_ppo.Rollout(SPEC, 4, 3, (2, 8), torch.device("cpu"))
    rollout.rows = 1
    rollout.started_at = 100.0
    rollout.ended_at = 103.0
    rollout["env"][0] = 1
    rollout["began_at"][0] = 94.0
    rollout["step_sec"][0] = 8.0
    found = ver_multigpu.step_seconds(rollout, 4, np.array([20.0, 0.1, 0.0]))
    assert found.tolist() == [20.0, 8.0, 3.0]


def test_a_film_of_no_episode(tmp_path, capsys):
    """Is refused in one line."""
    one_line(capsys, [str(tmp_path), "--episodes", "0"], "must be 1 or more", play.main)
