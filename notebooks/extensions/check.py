"""Check every invariant of every rollout, for the development of samplers and environments.

    python ver_ppo.py --env-id CartPole-v1 --extensions overlap check
"""

import numpy as np

import ver_ppo


class Check(ver_ppo.Run):
    """Check each rollout after the update. A broken invariant raises AssertionError, which ends the
    run."""

    def log(self, rollout, logs):
        """As Run.log."""
        check_rollout(rollout, self.version, lag=getattr(self, "max_lag", 0))
        super().log(rollout, logs)


def check_rollout(rollout, version, lag=0):
    """Assert every invariant of a rollout. The policy that collected it has this version, or one
    that is at most `lag` updates older."""
    steps = rollout.complete
    carried_S = steps["sent_at"] < rollout.started_at
    carried = steps["env"][carried_S]
    new_version = steps["version"][~carried_S]
    assert 0 < len(steps) <= rollout.capacity, "a rollout must have 1 to S steps"
    once = "at most one step of an environment can be carried over"
    assert lag or len(set(carried)) == len(carried), once
    assert (steps["version"] <= version).all(), "a later policy cannot have acted"
    assert (new_version >= version - lag).all(), "new steps must come from the current policy"
    for segment in np.unique(steps["segment"]):
        part = steps[steps["segment"] == segment]
        begins = part["first"][1:]
        assert (part["env"] == part["env"][0]).all(), "a segment must come from one environment"
        assert (begins == part["done"][:-1]).all(), "an episode must begin where one ended"
        assert (np.diff(part["version"]) >= 0).all(), "versions of a segment must not decrease"
        assert (np.diff(part["sent_at"]) > 0).all(), "steps must be in time order"
    assert steps["done"][steps["lost"]].all(), "a lost step must end its episode"
    assert not steps["state"][steps["first"]].any(), "memory must be zero where an episode begins"
    for name in ("log_prob", "value", "action", "reward"):
        assert np.isfinite(steps[name]).all(), f"{name} must be finite"
    assert np.isfinite(rollout.bootstrap).all(), "bootstrap values must be finite"
