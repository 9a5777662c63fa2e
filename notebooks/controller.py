"""The neural controller (DD-PPO section 6, appendix D): a trained PointNav agent as the legs of a new one.

    python ver_ppo.py --env-id notebooks.tasks:Flee-v0 --controller FILE --hidden-size 128

FILE is the checkpoint of a `pointnav` run with the same --camera, --image-size, --encoder, --hidden-size and --lstm-layers.
Its weights stay as they are. What learns is a planner, which tells it at every step where to go:

    image -> encoder --+--> planner's LSTM ----+--> value
                       |                       |
    previous action ---+                       v
                       |                     goal
                       |                       |
                       +--> controller's LSTM <+ ---> action

The controller is differentiable: PPO's gradient flows through it to the goal. Trained by ver_ppo.py as it stands.
"""

import copy

import torch
from torch import nn

import ver_ppo


class Given(nn.Module):
    """In place of an encoder, whose features were computed before, once for planner and controller."""

    def __init__(self, key, out_features):
        super().__init__()
        self.key, self.out_features = key, out_features

    def forward(self, obs):
        return obs[self.key]


class Planner(ver_ppo.Policy):
    """A policy whose `heads` give a goal instead of a distribution: distance in m, cosine and sine of the bearing (of any
    length)."""

    def __init__(self, spec, options):
        super().__init__(spec, options)
        self.actor = ver_ppo.orthogonal(nn.Linear(options.hidden_size, 3), 0.01)

    def heads(self, core_BH):
        out_B3 = self.actor(core_BH)
        distance_B1, direction_B2 = nn.functional.elu(out_B3[:, :1]) + 0.75, torch.tanh(out_B3[:, 1:])
        return torch.cat([distance_B1, direction_B2], dim=1), self.critic(core_BH).squeeze(-1)


class NeuralController(nn.Module):
    """Frozen image encoders, a planner and a frozen controller: the interface of ver_ppo.Policy. The recurrent state is the
    planner's, then the controller's: 4L x H. Raises UserError if there is no goal to be set."""

    def __init__(self, spec, options):
        super().__init__()
        if "goal" not in spec.observations or options.encoder == "none":
            raise ver_ppo.UserError("--controller needs images, and the observation `goal` of pointnav, Flee and Explore")
        self.controller, seen = ver_ppo.Policy(spec, options), copy.copy(spec)
        seen.observations = {key: space for key, space in spec.observations.items() if key != "goal"}
        self.planner, self.encoders = Planner(seen, options), nn.ModuleDict()
        for key, encoder in self.planner.encoders.items():
            self.encoders[key] = self.controller.encoders[key]
            self.controller.encoders[key] = self.planner.encoders[key] = Given(key, encoder.out_features)
        self.encoders.requires_grad_(False), self.controller.requires_grad_(False)
        layers, hidden = self.controller.state_shape
        self.state_shape = 2 * layers, hidden

    @property
    def log_ent_coef(self):
        """The planner's."""
        return self.planner.log_ent_coef

    def run(self, method, obs, prev_action_BA, first_B, state_B2LH, *more):
        """`step` or `sequences`: the planner's goal, then what the controller does about it."""
        with torch.no_grad():
            obs = obs | {key: encoder(obs) for key, encoder in self.encoders.items()}
        own_B2LH, controller_B2LH = state_B2LH.chunk(2, dim=1)
        goal_B3, value_B, after = getattr(self.planner, method)(obs, prev_action_BA, first_B, own_B2LH, *more)
        inputs = obs | {"goal": goal_B3}, prev_action_BA, first_B, controller_B2LH
        distribution, _, controller_after = getattr(self.controller, method)(*inputs, *more)
        return distribution, value_B, after, controller_after

    def step(self, *inputs):
        """As Policy.step."""
        distribution, value_B, *after = self.run("step", *inputs)
        return distribution, value_B, torch.cat(after, dim=1)

    def sequences(self, *inputs):
        """As Policy.sequences."""
        return self.run("sequences", *inputs)[:3]

    def load_controller(self, path):
        """Take encoders and controller from a checkpoint. Raises UserError if they do not fit."""
        saved, own = ver_ppo.load_checkpoint(path)["policy"], self.state_dict()
        saved = {name if name in own else f"controller.{name}": tensor for name, tensor in saved.items()}
        fixed = {name for name in own if not name.startswith("planner.")}
        if unfit := [name for name in fixed if name not in saved or saved[name].shape != own[name].shape]:
            message = (
                f"--controller {path}: its network is another one ({min(unfit)}): give the --encoder, --camera and sizes"
            )
            raise ver_ppo.UserError(f"{message} of that run")
        self.load_state_dict(own | {name: saved[name] for name in fixed})
