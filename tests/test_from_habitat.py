"""Checkpoints of habitat-baselines: networks answer as they did there, and become runs. Against a
recording everywhere, against habitat-baselines itself where it is installed."""

import contextlib
import json
import math
import pickle
import sys
from argparse import Namespace
from types import ModuleType, SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
import torch

import ver_ppo
from notebooks.environments import habitat
from notebooks.extensions import from_habitat, networks
from tests import habitat_baselines as theirs
from tests.helpers import one_line, run_folders, saved
from ver_ppo import UserError

RECORDED = theirs.load()


def shown(case):
    """The spaces that the adapter shows, and the functions that convert what is observed."""
    polar = [key for key in habitat.POLAR if key in theirs.CASES[case][0]]
    parts = {key: habitat.show(key, space, polar) for key, space in theirs.spaces_of(case).items()}
    return parts, dict.fromkeys(polar, "goal")


def converted(case, weights):
    """A case's policy, with the weights of a file."""
    parts, names = shown(case)
    spaces = {names.get(key, key): space for key, (space, _) in parts.items()}
    action = theirs.action_space_of(case)
    spec = ver_ppo.EnvSpec(gym.spaces.Dict(spaces), action, ())
    arguments, hidden, layers = from_habitat.arguments_of(weights, theirs.config_of(case))
    options = ver_ppo.Options(hidden_size=hidden, lstm_layers=layers)
    policy = from_habitat.HabitatBaselines(spec, options, **arguments).eval()
    from_habitat.take(policy, weights)
    policy.critic.scale.fill_(7.0)  # the unit of the loss alone
    return policy


@torch.no_grad()
def answers_of(case, policy):
    """What the policy answers, as the recording has it."""
    parts, names = shown(case)
    state = torch.zeros(theirs.ENVS, *policy.state_shape)
    answers = []
    for obs, action, first in theirs.steps_of(case):
        inputs = {}
        for key, values in obs.items():
            _, convert = parts[key]
            value = np.stack([np.asarray(convert(value)) for value in values])
            value = value[:, None] if value.ndim == 1 else value  # choices: one column
            inputs[names.get(key, key)] = torch.from_numpy(value)
        first_B = torch.from_numpy(first)
        state = state * ~first_B[:, None, None]
        distribution, value_B, state = policy.step(inputs, torch.from_numpy(action), first_B, state)
        each = distribution.base_dist
        parts_of = [each.logits[:, 0]] if policy.choices else [each.mean, each.stddev]
        answers.append(torch.cat([*parts_of, value_B[:, None]], dim=1).numpy())
    return np.array(answers)


@pytest.mark.parametrize("case", RECORDED)
def test_it_answers_as_it_did(case):
    """Logits, or means and deviations, and values of 36 steps, with starts of episodes between.
    Acting and learning agree."""
    shapes, answers = RECORDED[case]
    policy = converted(case, theirs.weights_of(shapes))
    found = answers_of(case, policy)
    np.testing.assert_allclose(found, answers, atol=3e-5)
