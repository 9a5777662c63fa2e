"""Another sampler: a rollout ends when half of the environments have given `--num-steps` steps.
Many ranks need `--preemption none`.

    python ver_ppo.py --env-id pointnav --extensions notebooks.examples.half:Half overlap
"""

import ver_ppo


class HalfDone(ver_ppo.Collector):
    """Waits for no more than half of the environments."""

    def has_ended(self, rollout):
        done_N = self.given_N >= self.options.num_steps
        return super().has_ended(rollout) or 2 * done_N.sum() >= len(done_N)


class Half(ver_ppo.Run):
    """Collects with HalfDone."""

    collector_class = HalfDone
