"""Write one step of a policy to a file, for programs without this repository.

    python -c "from notebooks.extensions.export import export; export('RUN_FOLDER')"

Such a program loads it with `torch.export.load("step.pt2").module()`, and needs only torch. It
calls it with obs, prev_action, first and state. `obs` has a tensor for each part of the
observation, with a first dimension of 1. `first` is True at the first step of an episode, and the
state is then zero. In the next call, pass the returned state, and the action as the policy chose
it. For the environment, convert the action as `ver_ppo.to_env_action` does.
"""

import numpy as np
import torch

from notebooks.extensions.play import load_policy
from ver_ppo import Spec, load_checkpoint


class Step(torch.nn.Module):
    """Logits (of a Box: means), value, and the state after the step."""

    def __init__(self, policy):
        super().__init__()
        self.policy = policy

    def forward(self, obs, prev_action, first, state):
        distribution, value, after = self.policy.step(obs, prev_action, first, state)
        each = distribution.base_dist
        return each.logits if self.policy.choices else each.mean, value, after


def export(folder, path="step.pt2"):
    """Write one step of the policy of this run to `path`."""
    policy, _ = load_policy(folder)
    spec = Spec(**load_checkpoint(f"{folder}/checkpoint.pt")["spec"])
    obs = {}
    for key, kind, shape in spec.obs_fields:
        obs[key] = torch.from_numpy(np.zeros((1, *shape), kind))
    action = torch.from_numpy(np.zeros((1, spec.action_dims), spec.action_dtype))
    inputs = obs, action, torch.tensor([True]), torch.zeros(1, *policy.state_shape)
    torch.export.save(torch.export.export(Step(policy), inputs), path)
