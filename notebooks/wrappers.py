"""Two wrappers around environments of ver_ppo.py: emulated simulator time (--sim-latency) and --action-delay."""

import time
from concurrent.futures import ThreadPoolExecutor

import gymnasium as gym
import numpy as np


def wrap(make, options, number):
    """Make environment `number` within the wrappers that the options ask for."""

    def make_slow():
        return Latency(make(), options, number) if options.sim_latency else make()

    return ActionDelay(make_slow) if options.action_delay else make_slow()


class Latency(gym.Wrapper):
    """--sim-latency: every step sleeps for a log-normal time, as if a GPU or a server did the work."""

    def __init__(self, env, options, number):
        super().__init__(env)
        self.mean_sec, self.sigma = options.sim_latency / 1000, options.sim_latency_spread
        self.rng = np.random.default_rng([options.seed, number, 1])

    def step(self, action):
        time.sleep(self.mean_sec * self.rng.lognormal(-(self.sigma**2) / 2, self.sigma))
        return self.env.step(action)


class ActionDelay(gym.Wrapper):
    """--action-delay: an action is answered by what the one before did, so that the environment acts while the policy
    computes the next one (VER section 4). The first step of an episode shows the first observation again; its last action is
    never carried out. One thread does everything, as OpenGL wants it."""

    def __init__(self, make):
        self.thread = ThreadPoolExecutor(max_workers=1)
        super().__init__(self.thread.submit(make).result())

    def reset(self, **arguments):
        first, info = self.thread.submit(self.env.reset, **arguments).result()
        self.ahead = self.thread.submit(lambda: (first, 0.0, False, False, info))
        return first, info

    def step(self, action):
        answer = self.ahead.result()
        if not (answer[2] or answer[3]):
            self.ahead = self.thread.submit(self.env.step, action)
        return answer

    def close(self):
        self.thread.submit(self.env.close).result()
        self.thread.shutdown()
