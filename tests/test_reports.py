"""Situations from public bug reports: what a run does when its environment, its user or its cluster
does something unusual."""

import gymnasium as gym
import numpy as np
import pytest
import torch

import ver_multigpu
import ver_ppo
from notebooks.extensions import play
from tests.helpers import one_line, small


def test_a_local_rank_alone(tmp_path, monkeypatch, capsys):
    """It silences nobody."""
    monkeypatch.setenv("LOCAL_RANK", "1")
    args = small(tmp_path, "--env-id", "CartPole-v1", "--gamma", "2")
    one_line(capsys, args, "must be within 0..1", ver_multigpu.main)


def test_an_environment_in_this_folder():
    """From another folder, the refusal says how Python finds it."""
    with pytest.raises(ver_ppo.UserError, match="PYTHONPATH=. before the command"):
        ver_ppo.find("my_envs_that_nobody_has:Mine-v0", "--env-id")


def test_weights_of_few_steps():
    """With fewer steps than environments nothing was sampled too often."""
    assert ver_ppo.importance_weights(np.array([0, 2, 5]), 16).tolist() == [1, 1, 1]


def test_entropy_of_unequal_choices():
    """Its gradient is a number, however large its weight."""
    spec = ver_ppo.EnvSpec(gym.spaces.Discrete(2), gym.spaces.MultiDiscrete([2, 5]), ())
    policy = ver_ppo.Policy(spec, ver_ppo.Options(hidden_size=8))
    distribution, _ = policy.heads(torch.randn(4, 8))
    (1000.0 * distribution.entropy().sum()).backward()
    assert torch.isfinite(policy.actor.weight.grad).all()


def test_a_film_of_no_episode(tmp_path, capsys):
    """Is refused in one line."""
    one_line(capsys, [str(tmp_path), "--episodes", "0"], "must be 1 or more", play.main)
