"""A program of its own: an option more, and the same command line.

    python -m notebooks.examples.annealed --env-id CartPole-v1 --last-ent-coef 1e-4

The last lines are as they are because worker processes find the classes under this name.
"""

import functools
import math
import sys
from dataclasses import dataclass

import ver_ppo


@dataclass(frozen=True)
class Options(ver_ppo.Options):
    """Train with an entropy coefficient that decays with the learning rate."""

    last_ent_coef: float = 1e-3  # the entropy coefficient at the end


class Annealed(ver_ppo.Run):
    """Sets the coefficient before every update."""

    def update(self, rollout):
        first = self.options.ent_coef
        last = self.options.last_ent_coef
        coefficient = last + self.decay() * (first - last)
        self.policy.log_ent_coef.data.fill_(math.log(coefficient))
        return super().update(rollout)


launch = functools.partial(ver_ppo.launch, run_class=Annealed)

if __name__ == "__main__":
    # the same file, under its own name
    from notebooks.examples.annealed import Options, launch

    sys.exit(ver_ppo.main(kind=Options, launch=launch))
