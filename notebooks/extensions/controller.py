"""The neural controller (DD-PPO section 6, appendix D): a trained PointNav agent as the legs of a
new one.

    python ver_ppo.py --env-id notebooks.environments.tasks:Flee-v0 --init-from FILE
        --policy notebooks.extensions.controller:NeuralController --hidden-size 128

FILE is the checkpoint of a `pointnav` run with the same camera, image_size, --encoder,
--hidden-size and --lstm-layers. Its weights stay as they are. What learns is a planner, which tells
the agent at every step where to go:

    image -> encoder --+--> planner's LSTM ----+--> value
                       |                       |
    previous action ---+                       v
                       |                     goal
                       |                       |
                       +--> agent's LSTM <-----+ ---> action

The agent is differentiable: PPO's gradient flows through it to the goal.
"""

import copy

import torch
from torch import nn

import ver_ppo


class Planner(ver_ppo.Policy):
    """A policy whose `heads` give a goal instead of a distribution: distance in m, cosine and sine
    of the bearing (of any length). It has no encoders: it gets features, a dictionary like the
    observations, with the goal or without."""

    def __init__(self, spec, options):
        blind = copy.copy(spec)
        blind.observations = {k: space for k, space in spec.observations.items() if k != "goal"}
        super().__init__(blind, options)
        self.seen = list(self.encoders)
        del self.encoders, self.log_ent_coef  # the agent's encoders and coefficient are used
        self.actor = ver_ppo.orthogonal(nn.Linear(options.hidden_size, 3), 0.01)

    def encode(self, features, prev_action_BA, first_B):
        parts = [features[key] for key in self.seen]
        return torch.cat([*parts, self.embed(prev_action_BA, first_B)], dim=1)

    def heads(self, core_BH):
        out_B3 = self.actor(core_BH)
        distance_B1 = nn.functional.elu(out_B3[:, :1]) + 0.75
        direction_B2 = torch.tanh(out_B3[:, 1:])
        goal_B3 = torch.cat([distance_B1, direction_B2], dim=1)
        return goal_B3, self.critic(core_BH)


class NeuralController(ver_ppo.Policy):
    """A frozen agent, whose weights --init-from takes from its checkpoint by their names, and a
    planner that sets its goals. The rows of the recurrent state are the planner's, then the
    agent's.

    Raises UserError if there is no goal to be set, no image, or no agent.
    """

    def __init__(self, spec, options):
        check(spec, options)
        super().__init__(spec, options)
        learns = self.log_ent_coef.requires_grad
        self.requires_grad_(False)
        self.log_ent_coef.requires_grad_(learns)
        self.planner = Planner(spec, options)
        self.rows, hidden = self.state_shape  # of each of the two
        self.state_shape = (2 * self.rows, hidden)

    @property
    def critic(self):
        """The one that learns is the planner's. (The agent's values, which nobody uses, are made
        by it, too.)"""
        return self.planner.critic

    def look(self, obs):
        """What planner and agent see, computed once for both: the features of everything but the
        goal, by their observation's key."""
        with torch.no_grad():
            return {key: self.encoders[key](obs) for key in self.planner.seen}

    def encode(self, features, prev_action_BA, first_B):
        """The agent's: as Policy.encode, but for what `look` has computed."""
        parts = [
            encoder(features) if key == "goal" else features[key]
            for key, encoder in self.encoders.items()
        ]
        return torch.cat([*parts, self.embed(prev_action_BA, first_B)], dim=1)

    def step(self, obs, prev_action_BA, first_B, state_B):
        """As Policy.step: the planner's goal and value, then what the agent does about the goal."""
        seen = self.look(obs)
        own_B = state_B[:, : self.rows]
        agent_B = state_B[:, self.rows :]
        goal_B3, value_B, own_B = self.planner.step(seen, prev_action_BA, first_B, own_B)
        seen["goal"] = goal_B3
        distribution, _, agent_B = super().step(seen, prev_action_BA, first_B, agent_B)
        return distribution, value_B, torch.cat([own_B, agent_B], dim=1)

    def sequences(self, obs, prev_action_MA, first_M, state_Q, batch_sizes):
        """As Policy.sequences; features and core are the planner's."""
        seen = self.look(obs)
        own_Q = state_Q[:, : self.rows]
        agent_Q = state_Q[:, self.rows :]
        inputs = (prev_action_MA, first_M)
        goal_M3, value_M, extras = self.planner.sequences(seen, *inputs, own_Q, batch_sizes)
        seen["goal"] = goal_M3
        distribution, _, _ = super().sequences(seen, *inputs, agent_Q, batch_sizes)
        return distribution, value_M, extras


def check(spec, options):
    """Raise UserError for what a neural controller cannot work with."""
    if not (options.init_from or options.resume or options.checkpoint):
        raise ver_ppo.UserError("NeuralController: its agent comes from --init-from FILE")
    if options.cpc or options.bf16 or options.reset != "nothing":
        raise ver_ppo.UserError("NeuralController has no --cpc, --bf16 and --reset: leave them out")
    if options.encoder == "none" or "goal" not in spec.observations:
        needs = "images, and the observation `goal` of pointnav, Flee and Explore"
        raise ver_ppo.UserError(f"NeuralController needs {needs}")
