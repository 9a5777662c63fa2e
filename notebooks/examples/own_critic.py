"""A critic with a network of its own. It shares no weight with the actor, has no memory, and sees
each observation by itself.

    python ver_ppo.py --env-id CartPole-v1 --policy notebooks.examples.own_critic:OwnCritic
"""

import torch
from torch import nn

import ver_ppo


class OwnCritic(ver_ppo.Policy):
    """Computes values with encoders and a layer of the critic's own."""

    def __init__(self, spec, options):
        super().__init__(spec, options)
        self.critic_encoders = self.make_encoders(spec, options)
        self.critic_layer = ver_ppo.orthogonal(nn.Linear(self.features, options.hidden_size))

    def value_of(self, obs):
        features_BF = torch.cat([encoder(obs) for encoder in self.critic_encoders], dim=1)
        return self.critic(torch.tanh(self.critic_layer(features_BF)))

    def step(self, obs, *rest):
        distribution, _, after_B = super().step(obs, *rest)
        return distribution, self.value_of(obs), after_B

    def sequences(self, obs, *rest):
        distribution, _, for_auxiliary_loss = super().sequences(obs, *rest)
        return distribution, self.value_of(obs), for_auxiliary_loss
