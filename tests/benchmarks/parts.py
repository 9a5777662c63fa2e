"""VER without one of its parts, as --extensions (`parts:Unweighted` and so on), for learn.py parts
and weights. The scripts stay as they are."""

from unittest import mock

import numpy as np
import torch

import ver_ppo
from ver_ppo import Collector, Run

# ----------------------------------------------------------------------------- Importance weights


class Unweighted(Run):
    """Every step weighs 1, except lost ones."""

    def advantages(self, rollout):
        super().advantages(rollout)
        steps = rollout.complete
        steps["weight"] = ~steps["lost"]
        return rollout


class MeanOne(Run):
    """The weight T / K, also above 1. So each environment counts equally, and the mean is 1."""

    def advantages(self, rollout):
        super().advantages(rollout)
        steps = rollout.complete
        given_N = np.bincount(steps["env"], minlength=rollout.num_envs)
        fair = len(steps) / np.count_nonzero(given_N)
        steps["weight"] = fair / given_N[steps["env"]] * ~steps["lost"]
        return rollout


class AuthorsWeights(Run):
    """As in the VER authors' code, which also counts the step after each environment's last one:
    min(1, (T + 1) / (K + 1)). (The paper gives no formula.)"""

    def advantages(self, rollout):
        super().advantages(rollout)
        steps = rollout.complete
        given_N = np.bincount(steps["env"], minlength=rollout.num_envs)
        fair = len(steps) / rollout.num_envs + 1
        weight_N = np.minimum(1.0, fair / (given_N + 1))
        steps["weight"] = weight_N[steps["env"]] * ~steps["lost"]
        return rollout


# ---------------------------------------------------------------------------------- Carried steps


class NotLearned(Run):
    """Steps whose action an older policy chose teach nothing."""

    def advantages(self, rollout):
        super().advantages(rollout)
        steps = rollout.complete
        steps["weight"] *= steps["version"] == self.version
        return rollout


class Recomputed(Run):
    """The log-probability of a carried step is that of the policy which learns, so its ratio is
    1."""

    @torch.no_grad()
    def advantages(self, rollout):
        super().advantages(rollout)
        steps = rollout.complete
        row_B = np.flatnonzero(steps["version"] < self.version)
        if len(row_B):
            distribution, _, _ = self.collector.infer(steps[row_B])
            action = torch.from_numpy(steps["action"][row_B])
            steps["log_prob"][row_B] = distribution.log_prob(action)
        return rollout


class WaitingCollector(Collector):
    """Sends no more actions than the rollout has room for. So no step is in flight at its end."""

    def collect(self, rollout):
        self.rollout = rollout
        super().collect(rollout)

    def act(self, env_B):
        room = self.rollout.capacity - self.rollout.rows - self.in_flight_N.sum()
        self.idle = np.append(self.idle, env_B[room:])
        super().act(env_B[:room])


class Waiting(Run):
    """A rollout waits for all steps in flight."""

    collector_class = WaitingCollector


# --------------------------------------------------------------- The end of a rollout, and states


class AtOnceCollector(Collector):
    """The old policy chooses the next actions of the environments that would be idle."""

    def collect(self, rollout):
        super().collect(rollout)
        with torch.inference_mode():
            self.act(self.idle)
        self.idle = np.zeros(0, int)


class AtOnce(Run):
    """Environments are never idle."""

    collector_class = AtOnceCollector


class MovingCollector(Collector):
    """The value after every environment's last step comes from another forward pass over its newest
    observation, and its memory moves on."""

    def bootstrap_values(self):
        io = self.io
        pending = self.pending
        flying = self.in_flight_N
        step_N = self.observe(np.arange(len(flying)), io["obs"], io["first"])
        # the row of a step in flight belongs to its worker, but `pending` has the same observation
        for column in ("obs", "first"):
            step_N[column][flying] = pending[column][flying]
        step_N["state"][flying] = self.state_N[flying]
        _, value_N, after_N = self.infer(step_N)
        self.state_N[:] = after_N
        return value_N.numpy()


class Moving(Run):
    """One rule for the values at a rollout's end, in place of two."""

    collector_class = MovingCollector


class ZeroStates(Run):
    """Every piece of a sequence begins with a memory of zeros."""

    def advantages(self, rollout):
        super().advantages(rollout)
        rollout["state"][:] = 0.0
        return rollout


# ----------------------------------------------------------------------------------- Mini-batches


class Whole(Run):
    """Environments are dealt into mini-batches whole."""

    def update(self, rollout):
        def deal(sequences, count):
            """The first environments in this order belong to the first mini-batch, and so on."""
            mine = {}
            for sequence in sequences:
                mine.setdefault(rollout["env"][sequence[0]], []).append(sequence)
            dealt = np.array_split(np.arange(len(mine)), count)
            groups = list(mine.values())
            return [sum((groups[e] for e in part), []) for part in dealt if len(part)]

        with mock.patch.object(ver_ppo, "cut_minibatches", deal):
            return super().update(rollout)


class SameCuts(Run):
    """Every epoch has the mini-batches of the first one."""

    def update(self, rollout):
        cut = ver_ppo.cut_minibatches
        first = []

        def cut_once(sequences, count):
            if not first:
                first.extend(cut(sequences, count))
            return first

        with mock.patch.object(ver_ppo, "cut_minibatches", cut_once):
            return super().update(rollout)


# ----------------------------------------------------------------------------- Ends and lost steps


class TerminatingCollector(Collector):
    """A truncated episode counts as terminated."""

    def complete_steps(self, rollout, env_B, row_B):
        io = self.io
        io["terminated"][env_B] |= io["truncated"][env_B]
        io["truncated"][env_B] = False
        super().complete_steps(rollout, env_B, row_B)


class Terminating(Run):
    """No value of the final observation is added."""

    collector_class = TerminatingCollector


class LostTeach(Run):
    """A lost step is terminated, has the reward 0, and counts like any other."""

    def advantages(self, rollout):
        steps = rollout.complete
        steps["reward"][steps["lost"]] = 0.0
        super().advantages(rollout)
        steps["weight"] = ver_ppo.importance_weights(steps["env"], rollout.num_envs)
        return rollout
