"""The neural controller (DD-PPO section 6, appendix D). A trained PointNav agent walks where a new
planner tells it to go.

    python ver_ppo.py --env-id notebooks.environments.tasks:Flee-v0 --policy "controller(file=FILE)"

FILE is the checkpoint of a `pointnav` run with the same camera, image_size, --hidden-size and
--lstm-layers. Its weights are frozen. Only the planner learns. At every step, it sets the agent's
goal:

    image -> encoder --+--> planner's LSTM ----+--> value
                       |                       |
    previous action ---+                       v
                       |                     goal
                       |                       |
                       +--> agent's LSTM <-----+ ---> action

The agent is differentiable: PPO's gradient flows through it to the goal.
"""

from pathlib import Path

import torch
from torch import nn

import ver_ppo


class Planner(ver_ppo.Policy):
    """A policy whose `heads` return a goal instead of a distribution: distance in m, and cosine and
    sine of the bearing, not normalized. It has no encoders. It receives the agent's features
    instead of observations."""

    def __init__(self, spec, options, encoders):
        self.seen = encoders  # a list: they are the agent's, not the planner's
        super().__init__(spec, options)
        del self.log_ent_coef  # the agent's is used
        self.actor = ver_ppo.orthogonal(nn.Linear(options.hidden_size, 3), 0.01)

    def make_encoders(self, spec, options):
        return self.seen

    def encode(self, features, prev_action_BA, first_B):
        return torch.cat([*features, self.embed(prev_action_BA, first_B)], dim=1)

    def heads(self, core_BH):
        out_B3 = self.actor(core_BH)
        distance_B1 = nn.functional.elu(out_B3[:, :1]) + 0.75
        direction_B2 = torch.tanh(out_B3[:, 1:])
        goal_B3 = torch.cat([distance_B1, direction_B2], dim=1)
        return goal_B3, self.critic(core_BH)


def reads_goal(encoder):
    """Whether this is the encoder of the observation `goal`."""
    return encoder.source.key == "goal"


class NeuralController(ver_ppo.Policy):
    """A frozen agent and a planner that sets its goals. The agent's weights are loaded by name from
    the checkpoint `file`. The rows of the recurrent state are first the planner's, then the
    agent's.

    Raises UserError if the observation has no goal or no image, or if the agent is missing.
    """

    def __init__(self, spec, options, file=None):
        super().__init__(spec, options)
        seen = [encoder for encoder in self.encoders if not reads_goal(encoder)]
        if not seen or len(seen) == len(self.encoders):
            needs = "images, and the observation `goal` of pointnav, Flee and Explore"
            raise ver_ppo.UserError(f"controller needs {needs}")
        saved = ver_ppo.checkpoint_path(options.resume).is_file() or options.checkpoint
        if not saved:  # else all weights come from there
            self.take_agent(file, spec)
        learns = self.log_ent_coef.requires_grad
        self.requires_grad_(False)
        self.log_ent_coef.requires_grad_(learns)
        self.planner = Planner(spec, options, seen)
        self.rows, hidden = self.state_shape  # of each of the two
        self.state_shape = (2 * self.rows, hidden)

    def train(self, mode=True):
        """As nn.Module.train, but keep the agent's encoders in evaluation mode, so that their
        statistics do not change."""
        super().train(mode)
        self.encoders.eval()
        return self

    def take_agent(self, file, spec):
        """Load the agent's weights. Raises UserError if it belongs to another environment."""
        if not file:
            raise ver_ppo.UserError("controller: give an agent's checkpoint, controller(file=FILE)")
        own = self.log_ent_coef.detach().clone()
        ver_ppo.load_weights(self, Path(file).expanduser(), spec)
        self.log_ent_coef.data.copy_(own)

    @property
    def critic(self):
        """The planner's critic, which learns. (It also computes the agent's values, which are not
        used.)"""
        return self.planner.critic

    def look(self, obs):
        """Compute the features of all observations except the goal, once for planner and agent."""
        with torch.no_grad():
            return [encoder(obs) for encoder in self.planner.seen]

    def encode(self, seen, prev_action_BA, first_B):
        """As Policy.encode, for the agent, with the features of `look` and the planner's goal."""
        features, goal_B3 = seen
        features = iter(features)
        goal = {"goal": goal_B3}
        parts = []
        for encoder in self.encoders:
            parts.append(encoder(goal) if reads_goal(encoder) else next(features))
        return torch.cat([*parts, self.embed(prev_action_BA, first_B)], dim=1)

    def step(self, obs, prev_action_BA, first_B, state_B):
        """As Policy.step. The planner computes goal and value, then the agent chooses the
        action."""
        features = self.look(obs)
        own_B = state_B[:, : self.rows]
        agent_B = state_B[:, self.rows :]
        goal_B3, value_B, own_B = self.planner.step(features, prev_action_BA, first_B, own_B)
        seen = features, goal_B3
        distribution, _, agent_B = super().step(seen, prev_action_BA, first_B, agent_B)
        return distribution, value_B, torch.cat([own_B, agent_B], dim=1)

    def sequences(self, obs, prev_action_MA, first_M, state_Q, batch_sizes):
        """As Policy.sequences; features and core are the planner's."""
        features = self.look(obs)
        own_Q = state_Q[:, : self.rows]
        agent_Q = state_Q[:, self.rows :]
        inputs = (prev_action_MA, first_M)
        goal_M3, value_M, extras = self.planner.sequences(features, *inputs, own_Q, batch_sizes)
        seen = features, goal_M3
        distribution, _, _ = super().sequences(seen, *inputs, agent_Q, batch_sizes)
        return distribution, value_M, extras
