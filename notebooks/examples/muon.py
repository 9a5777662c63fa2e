"""Another optimizer: Muon (it needs torch 2.9) updates the matrices of encoders and core, Adam all
other weights.

    python ver_ppo.py --env-id CartPole-v1 --extensions notebooks.examples.muon:Muon
"""

import torch

import ver_ppo


class Together(torch.optim.Optimizer):
    """Several optimizers as one, which keeps the group and the state of each."""

    def __init__(self, *parts):
        super().__init__([part.param_groups[0] for part in parts], {})
        self.parts = parts

    def step(self):
        for part, group in zip(self.parts, self.param_groups):
            part.param_groups, part.state = [group], self.state
            part.step()


class Muon(ver_ppo.Run):
    """Learns with two optimizers."""

    def make_optimizer(self):
        matrices, others = [], []
        for name, weight in self.policy.named_parameters():
            inside = name.startswith(("encoders.", "core.")) and weight.ndim == 2
            (matrices if inside else others).append(weight)
        rate = self.options.learning_rate
        like_adam = {"weight_decay": 0.0, "adjust_lr_fn": "match_rms_adamw"}
        muon = torch.optim.Muon(matrices, lr=rate, **like_adam)
        return Together(muon, torch.optim.Adam(others, lr=rate, eps=1e-5))
