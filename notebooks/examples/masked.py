"""Actions that are not allowed. Some environments tell which actions make sense in the current
state. `ShowMask` adds this to the observation: `mask` has a 1 for each allowed action. `Masked`
gives all other actions a probability of 0.

    python ver_ppo.py --env-id Taxi-v4 --wrappers notebooks.examples.masked:ShowMask \
        --policy notebooks.examples.masked:Masked
"""

import gymnasium as gym
from torch.distributions import Categorical, Independent

import ver_ppo


class ShowMask(gym.ObservationWrapper):
    """Taxi, with its mask in the observation."""

    def __init__(self, env):
        super().__init__(env)
        mask = gym.spaces.MultiBinary(int(env.action_space.n))
        self.observation_space = gym.spaces.Dict(place=env.observation_space, mask=mask)

    def observation(self, place):
        return {"place": place, "mask": self.unwrapped.action_mask(place)}


class Masked(ver_ppo.Policy):
    """Takes only actions that `mask` allows."""

    def encode(self, obs, *more):
        self.allowed_BC = obs["mask"] > 0
        return super().encode(obs, *more)

    def heads(self, core_BH):
        distribution, value_B = super().heads(core_BH)
        logits_BC = distribution.base_dist.logits.squeeze(1)  # an action has one dimension
        logits_BC = logits_BC.masked_fill(~self.allowed_BC, -1e8)
        each = Categorical(logits=logits_BC[:, None], validate_args=False)
        return Independent(each, 1, validate_args=False), value_B
