"""Environments that take as long as simulators. Importing this file registers them, as
`simulators:Rearrangement-v0` and so on. harness.py puts this folder on the path of its processes.
"""

import functools
import time

import gymnasium as gym
import numpy as np

from notebooks.environments import pointnav
from notebooks.extensions.wrappers import Latency


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


class Uneven(Latency):
    """The environment of `make`, with steps that sleep as unevenly as the papers' simulators: as in
    Latency, and the steps of one episode may all take longer, by a factor with a sigma of
    `episodes`."""

    def __init__(self, make, mean_ms, spread, between, episodes):
        super().__init__(make(), mean_ms, spread, between)
        self.episodes = episodes

    def reset(self, **arguments):
        first = super().reset(**arguments)
        self.episode_sec = self.own_sec * self.draw(self.episodes)
        return first

    def step(self, action):
        time.sleep(self.episode_sec * self.draw(self.spread))
        return self.env.step(action)


class Crafter(gym.Env):
    """Crafter with Gymnasium's interface. It is registered with the older gym only."""

    observation_space = gym.spaces.Box(0, 255, (64, 64, 3), np.uint8)
    action_space = gym.spaces.Discrete(17)

    def reset(self, seed=None, options=None):
        import crafter  # only this environment needs it

        if seed is not None:
            self.env = crafter.Env(seed=seed)
        return self.env.reset(), {}

    def step(self, action):
        observation, reward, done, _ = self.env.step(action)
        return observation, reward, done, False, {}


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
gym.register("Crafter-v0", Crafter)
for name, (make, mean_ms, (spread, between, episodes)) in SIMULATORS.items():
    sigmas = {"spread": spread, "between": between, "episodes": episodes}
    gym.register(f"{name}-v0", Uneven, kwargs={"make": make, "mean_ms": mean_ms, **sigmas})
