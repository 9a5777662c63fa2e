"""Emulated simulators: environments whose steps sleep, as unevenly as those of the papers.
Importing registers them.

A step sleeps a mean time, multiplied by three log-normal factors of mean 1: one is drawn for the
environment, one at every reset, one at every step.
"""

import functools
import time

import gymnasium as gym
import numpy as np
from peers import PointNavSteady, pointnav

UNCHECKED = {"disable_env_checker": True}
SIMULATORS = {
    # what sleeps, milliseconds of a step, spreads (sigma): from step to step, between environments
    # and between episodes
    "Rearrangement-v0": (PointNavSteady, 20.0, (0.9, 0.15, 0.2)),
    "RearrangementEven-v0": (PointNavSteady, 20.0, (0.0, 0.0, 0.0)),
    "Navigation-v0": (PointNavSteady, 10.0, (0.45, 0.1, 0.1)),
    "NavigationEven-v0": (PointNavSteady, 10.0, (0.0, 0.0, 0.0)),
    "UnevenCartPole-v0": (
        functools.partial(gym.make, "CartPole-v1", **UNCHECKED),
        1.0,
        (0.5, 0.5, 0.3),
    ),
    "UnevenPointNav-v0": (
        functools.partial(pointnav.PointNav, image_size=32),
        2.0,
        (0.5, 0.5, 0.3),
    ),
    "Scenes-v0": (  # episodes are scenes of 150 steps, some slower than others
        functools.partial(gym.make, "tests.envs:Count-v0", limit=150, **UNCHECKED),
        100.0,
        (0.4, 0.0, 0.5),
    ),
}


class Uneven(gym.Wrapper):
    """What `make` makes, with steps that sleep. Seed and number of the environment decide for how
    long."""

    def __init__(self, make, mean_ms, spread, options, number):
        super().__init__(make())
        self.rng = generator(options.seed if options else 1, number)
        self.spread = spread
        self.mean_sec = mean_ms / 1000 * draw(self.rng, spread[1])
        self.episode_sec = self.mean_sec

    def reset(self, **arguments):
        self.episode_sec = self.mean_sec * draw(self.rng, self.spread[2])
        return self.env.reset(**arguments)

    def step(self, action):
        time.sleep(self.episode_sec * draw(self.rng, self.spread[0]))
        return self.env.step(action)


def generator(seed, number):
    """The random generator of an environment's sleep."""
    return np.random.default_rng([seed, number, 1])


def draw(rng, sigma, size=None):
    """Log-normal factors of mean 1."""
    return rng.lognormal(-sigma * sigma / 2, sigma, size)


for name, (make, mean_ms, spread) in SIMULATORS.items():
    told = {"options": None, "number": 0}
    settings = {"make": make, "mean_ms": mean_ms, "spread": spread, **told}
    gym.register(name, f"{__name__}:Uneven", kwargs=settings)
