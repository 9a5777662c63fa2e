"""Environments as other people write them, for test_outside.py. Importing this file notes in which
process that happens, if the variable IMPORTED names a file."""

import os
import socket
import time

import gymnasium as gym
import numpy as np
from gymnasium import spaces

if "IMPORTED" in os.environ:
    with open(os.environ["IMPORTED"], "a") as file:
        print(os.getpid(), file=file)


def box(size=1):
    return spaces.Box(-1, 1, (size,), np.float32)


class Parts(gym.Env):
    """Each part of its observation is a vector of the sign of `goal`, the action that is right.

    `parts` are names with sizes ("goal 1, hint 2"), in the order of the dictionary; `actions` is
    the number of actions. In an image, which `pixels` gives the shape of, there is nothing."""

    metadata = {"render_modes": ["rgb_array"]}

    def __init__(self, parts="goal 1, hint 2", actions=2, pixels=(), number=0, render_mode=None):
        sizes = dict(part.split() for part in parts.split(", "))
        pairs = [(name, box(int(size))) for name, size in sizes.items()]
        if pixels:
            pairs.append(("image", spaces.Box(0, 255, pixels, np.uint8)))
        self.observation_space = spaces.Dict(pairs)
        self.action_space = spaces.Discrete(actions + (number == 2))

    def observe(self):
        self.goal = self.np_random.uniform(-1, 1)
        parts = {name: np.zeros(space.shape, space.dtype) for name, space in self.spaces}
        parts["goal"][:] = self.goal
        return parts

    @property
    def spaces(self):
        return self.observation_space.spaces.items()

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        return self.observe(), {}

    def step(self, action):
        reward = float(int(action) == int(self.goal > 0))
        self.steps += 1
        return self.observe(), reward, self.steps == 10, False, {}


class Slow(Parts):
    """A reset takes `reset` seconds, in pieces of 0.1 s."""

    def __init__(self, reset=0.0):
        super().__init__()
        self.reset_sec = reset

    def reset(self, **arguments):
        for _ in range(round(self.reset_sec / 0.1)):
            time.sleep(0.1)
        return super().reset(**arguments)


class Port(Parts):
    """A simulator that listens at a port of its own, which its number gives."""

    def __init__(self, number=0, split="train", first=0):
        super().__init__()
        self.socket = socket.socket()
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(("127.0.0.1", first + number))
        self.socket.listen()

    def close(self):
        self.socket.close()


class Odd(gym.Env):
    """An environment with this observation space. Its observations are all zero, or `value`."""

    action_space = spaces.Discrete(2)

    def __init__(self, space, value=0.0):
        self.observation_space = space
        self.value = value

    def observe(self, space):
        if isinstance(space, spaces.Tuple):
            return tuple(map(self.observe, space))
        if isinstance(space, spaces.Dict):
            return {name: self.observe(part) for name, part in space.items()}
        return np.full(space.shape, self.value, space.dtype)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self.observe(self.observation_space), {}

    def step(self, action):
        return self.observe(self.observation_space), 0.0, True, False, {}


UNLIMITED = spaces.Box(-np.inf, np.inf, (1,), np.float64)
TWICE = spaces.Dict({"a": spaces.Dict(b=box()), "a/b": box()})
EMPTY = spaces.Tuple([box(), spaces.Box(-1, 1, (0,), np.float32)])

gym.register("Parts-v0", Parts)
gym.register("Unlike-v0", Parts, kwargs={"number": 0})
gym.register("Slow-v0", Slow)
gym.register("Port-v0", Port, kwargs={"number": 0, "split": "train"})
gym.register("Far-v0", Odd, kwargs={"space": UNLIMITED, "value": 1.7e9})
gym.register("Near-v0", Odd, kwargs={"space": UNLIMITED, "value": 1.7e3})
gym.register("Twice-v0", Odd, kwargs={"space": TWICE})
gym.register("Empty-v0", Odd, kwargs={"space": EMPTY})
gym.register("Large-v0", Odd, kwargs={"space": spaces.Box(0, 255, (2160, 3840, 3), np.uint8)})
