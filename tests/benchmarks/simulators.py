"""Environments that take as long as simulators. Importing this file registers them, as
`simulators:Rearrangement-v0` and so on. harness.py puts this folder on the path of its processes.
"""

import functools
import time

import gymnasium as gym
import numpy as np

from notebooks.environments import pointnav


class PointNavSteady(pointnav.PointNav):
    """PointNav that turns left in place of eleven of twelve `stop` actions.

    The uniform policy would end every episode after four steps, and we would measure resets. Here
    its episodes last 48 steps on average, like those of a trained agent.
    """

    def step(self, action):
        return super().step(2 if action == 0 and self.np_random.random() > 1 / 12 else action)


class Busy(gym.Wrapper):
    """Every step keeps a core busy for `cpu_ms` milliseconds of CPU time."""

    def __init__(self, env, cpu_ms):
        super().__init__(env)
        self.cpu_sec = cpu_ms / 1000

    def step(self, action):
        until = time.thread_time() + self.cpu_sec
        while time.thread_time() < until:
            pass
        return self.env.step(action)


class Uneven(gym.Wrapper):
    """The environment of `make`, with steps that sleep as unevenly as the papers' simulators. A
    step sleeps `mean_ms`, multiplied by three log-normal factors of mean 1. One factor is drawn for
    the environment, one at every reset, and one at every step. The seed and the environment's
    number determine them."""

    def __init__(self, make, mean_ms, spread, options, number):
        super().__init__(make())
        self.rng = np.random.default_rng([options.seed if options else 1, number, 1])
        self.step_spread, own_spread, self.episode_spread = spread
        self.mean_sec = mean_ms / 1000 * self.draw(own_spread)
        self.episode_sec = self.mean_sec

    def draw(self, sigma):
        """Draw a log-normal factor of mean 1."""
        return self.rng.lognormal(-sigma * sigma / 2, sigma)

    def reset(self, **arguments):
        self.episode_sec = self.mean_sec * self.draw(self.episode_spread)
        return self.env.reset(**arguments)

    def step(self, action):
        time.sleep(self.episode_sec * self.draw(self.step_spread))
        return self.env.step(action)


CARTPOLE = functools.partial(gym.make, "CartPole-v1", disable_env_checker=True)
# episodes are scenes, some slower than others
SCENES = functools.partial(gym.make, "tests.envs:Count-v0", limit=150, disable_env_checker=True)
SIMULATORS = {
    # what sleeps, milliseconds of a step, spreads (sigma): from step to step, between environments
    # and between episodes
    "Rearrangement": (PointNavSteady, 20.0, (0.9, 0.15, 0.2)),
    "RearrangementEven": (PointNavSteady, 20.0, (0.0, 0.0, 0.0)),
    "Navigation": (PointNavSteady, 10.0, (0.45, 0.1, 0.1)),
    "NavigationEven": (PointNavSteady, 10.0, (0.0, 0.0, 0.0)),
    "UnevenCartPole": (CARTPOLE, 1.0, (0.5, 0.5, 0.3)),
    "Scenes": (SCENES, 100.0, (0.4, 0.0, 0.5)),
}
gym.register("PointNavSteady-v0", PointNavSteady)
for name, (make, mean_ms, spread) in SIMULATORS.items():
    settings = {"make": make, "mean_ms": mean_ms, "spread": spread, "options": None, "number": 0}
    gym.register(f"{name}-v0", Uneven, kwargs=settings)
