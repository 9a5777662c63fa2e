"""Load what was trained, and let it act: one robot, one episode, no trainer."""

from dataclasses import fields
from pathlib import Path

import numpy as np
import torch

import ver_ppo


def load_policy(folder):
    """Policy and options of a finished run, on the CPU. Raises UserError."""
    path = Path(folder) / "checkpoint.pt"
    saved = ver_ppo.load_checkpoint(path)["options"]
    known = {field.name for field in fields(ver_ppo.Options)}  # not ver_multigpu's, say
    kept = {name: value for name, value in saved.items() if name in known}
    options = ver_ppo.Options(**kept | {"device": "cpu"})
    policy = ver_ppo.make_policy(ver_ppo.describe_env(options), options)
    ver_ppo.load_policy(policy, path)
    return policy, options


class Skill:
    """A policy that acts for one robot: its memory, empty at first, and its last action."""

    def __init__(self, policy):
        self.policy = policy
        self.state = torch.zeros(1, *policy.state_shape)
        self.first = torch.tensor([True])
        if policy.choices:
            self.action = torch.zeros(1, len(policy.choices), dtype=torch.int64)
        else:
            self.action = torch.zeros(1, policy.actor.out_features)

    @torch.inference_mode()
    def act(self, observation):
        """The next action, sampled."""
        obs = {key: torch.from_numpy(part)[None] for key, part in observation.items()}
        inputs = (obs, self.action, self.first, self.state)
        distribution, _, self.state = self.policy.step(*inputs)
        self.action = distribution.sample()
        self.first = torch.tensor([False])
        return self.action[0].numpy()


class Agent(Skill):
    """A policy in the environment that it has learned in, of any kind: takes observations as they
    come, and gives actions as that environment wants them. `spec` is what `describe_env` says of
    it."""

    def __init__(self, policy, spec):
        super().__init__(policy)
        self.spec = spec

    def act(self, observation):
        leaves = self.spec.leaves(observation)
        rows = {key: np.asarray(leaves[key], kind) for key, kind, _ in self.spec.obs_fields}
        return ver_ppo.to_env_action(self.spec.action, super().act(rows))


def play(policy, env, seed):
    """Play one episode: yields the environment, without wrappers, after every step; its last `info`
    is in `env.info`."""
    env = env.unwrapped
    skill = Skill(policy)
    observation, _ = env.reset(seed=seed)
    ended = False
    while not ended:
        action = skill.act(observation).item()
        observation, _, terminated, truncated, env.info = env.step(action)
        ended = terminated or truncated
        yield env
