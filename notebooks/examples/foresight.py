"""An auxiliary loss: the policy learns to predict the next vector observation from its memory and
the action. `losses/auxiliary` shows the error.

    python ver_ppo.py --env-id CartPole-v1 \
        --policy "notebooks.examples.foresight:Foresight(weight=0.2)"
"""

import torch
from torch import nn

import ver_ppo


class Foresight(ver_ppo.Policy):
    """Learns what the next step will show."""

    def __init__(self, spec, options, weight=0.1):
        super().__init__(spec, options)
        self.weight = weight
        sources = [encoder.source for encoder in self.encoders]
        self.seen = [source for source in sources if not source.layout][:1]  # a list: no submodule
        known = options.hidden_size + ver_ppo.ACTION_FEATURES
        self.guess = nn.Linear(known, self.seen[0].channels)

    def auxiliary_loss(self, features_MF, core_MH, batch):
        # at time t, n = sizes[t] sequences are still running, and take n rows. So the next step of
        # the same sequence is n rows further down. A sequence never continues beyond an episode
        sizes = batch["batch_sizes"]
        later_K = torch.arange(sizes[0], len(core_MH))  # all but the first step of each
        before_K = later_K - sizes[:-1].repeat_interleave(sizes[1:])
        action_MF = self.embed(batch["action"], torch.zeros_like(batch["first"]))
        guess_KF = self.guess(torch.cat([core_MH, action_MF], dim=1)[before_K])
        (source,) = self.seen
        seen_KF = source(batch["obs"])[later_K]
        return self.weight * ((guess_KF - seen_KF) ** 2).sum() / max(1, seen_KF.numel())
