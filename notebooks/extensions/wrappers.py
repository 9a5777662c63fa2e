"""Wrappers for --wrappers: emulated simulator time, actions that arrive one step late, smaller
images, and observations of which a part is hidden.

    python ver_ppo.py --wrappers "latency(mean_ms=20, spread=0.8)"
    python ver_ppo.py --wrappers action_delay
    python ver_ppo.py --wrappers "resize(height=84, width=84)"
    python ver_ppo.py --wrappers "hide(indices=(1, 3))"

Like Gymnasium's own wrappers, they record their arguments. So `gymnasium.make(env.spec)` can make a
wrapped environment again.
"""

import copy
import math
import time
from concurrent.futures import ThreadPoolExecutor

import gymnasium as gym
import numpy as np
import torch
from gymnasium.utils import RecordConstructorArgs

from ver_ppo import image_layout


class Latency(gym.Wrapper, RecordConstructorArgs):
    """Make every step sleep, standing in for a GPU or a server. The time is log-normal, `mean_ms`
    milliseconds on average over all environments. `spread` is the sigma of one environment's steps,
    and `between` that of the environments' means. The seed of the first reset determines this
    environment's mean. (ver_ppo.py makes that seed from the environment's number.) The seed of each
    reset determines the factors of the steps that follow. Raises ValueError for negative or
    infinite arguments."""

    def __init__(self, env, mean_ms=20.0, spread=0.8, between=0.0):
        arguments = {"mean_ms": mean_ms, "spread": spread, "between": between}
        RecordConstructorArgs.__init__(self, **arguments)
        gym.Wrapper.__init__(self, env)
        for name, value in arguments.items():
            if not isinstance(value, (int, float)) or not 0 <= value < math.inf:
                raise ValueError(f"{name}={value}: must be a number, 0 or more")
        self.mean_sec = mean_ms / 1000  # of all environments ...
        self.own_sec = None  # ... and of this one
        self.spread = spread
        self.between = between
        self.rng = np.random.default_rng()

    def draw(self, sigma):
        """Draw a log-normal factor of mean 1."""
        return self.rng.lognormal(-(sigma**2) / 2, sigma)

    def reset(self, *, seed=None, options=None):
        if seed is not None:
            self.rng = np.random.default_rng([seed, 1])  # differs from the environment's
        if self.own_sec is None:
            self.own_sec = self.mean_sec * self.draw(self.between)
        return self.env.reset(seed=seed, options=options)

    def step(self, action):
        time.sleep(self.own_sec * self.draw(self.spread))
        return self.env.step(action)


class ActionDelay(gym.Wrapper, RecordConstructorArgs):
    """Answer each action with the result of the action before it. So the environment acts while the
    policy computes the next action (VER section 4). The first step of an episode shows the first
    observation again. The last action of an episode is never executed.

    An OpenGL context belongs to the thread that made it. So the environment is closed and made
    again from its spec, in a thread that does all further work with it. Raises ValueError if that
    fails: put wrappers that do not record their arguments outside of this one.
    """

    def __init__(self, env):
        RecordConstructorArgs.__init__(self)
        spec = env.spec
        env.close()
        if spec is None:
            raise ValueError("ActionDelay needs an environment that gymnasium.make has made")
        self.thread = ThreadPoolExecutor(max_workers=1)
        try:
            made = self.thread.submit(gym.make, spec).result()
        except Exception as error:  # the environment's own code may raise anything
            self.thread.shutdown()
            raise ValueError(f"ActionDelay cannot make the environment again: {error}") from error
        gym.Wrapper.__init__(self, made)

    def reset(self, **arguments):
        first, info = self.thread.submit(self.env.reset, **arguments).result()
        self.ahead = self.thread.submit(lambda: (first, 0.0, False, False, info))
        return first, info

    def step(self, action):
        observation, reward, terminated, truncated, info = self.ahead.result()
        observation = copy.deepcopy(observation)  # the next step may write into the same array
        if not (terminated or truncated):
            self.ahead = self.thread.submit(self.env.step, action)
        return observation, reward, terminated, truncated, info

    def render(self):
        """The picture after all actions so far, including the one that is not answered yet."""
        return self.thread.submit(self.env.render).result()

    def close(self):
        self.thread.submit(self.env.close).result()
        self.thread.shutdown()


def layout_of(space):
    """`ver_ppo.image_layout` of a space; None if it is no image."""
    return image_layout(space.shape) if isinstance(space, gym.spaces.Box) else None


class Resize(gym.ObservationWrapper, RecordConstructorArgs):
    """Scale every image of an observation (also in a Dict or Tuple) to this height and width.
    Each new pixel is the mean of the old pixels that it covers."""

    def __init__(self, env, height=84, width=84):
        RecordConstructorArgs.__init__(self, height=height, width=width)
        gym.ObservationWrapper.__init__(self, env)
        self.size = height, width
        self.observation_space = self.resize_space(env.observation_space)

    def resize_space(self, space):
        if isinstance(space, gym.spaces.Dict):
            return gym.spaces.Dict({k: self.resize_space(part) for k, part in space.items()})
        if isinstance(space, gym.spaces.Tuple):
            return gym.spaces.Tuple([self.resize_space(part) for part in space])
        if layout_of(space) is None:
            return space
        shape = self.resize(space, space.low).shape
        return gym.spaces.Box(space.low.min(), space.high.max(), shape, space.dtype)

    def observation(self, observation):
        return self.resize(self.env.observation_space, observation)

    def resize(self, space, part):
        """A part of an observation, scaled if it is an image of this space."""
        if isinstance(space, gym.spaces.Dict):
            return {key: self.resize(below, part[key]) for key, below in space.items()}
        if isinstance(space, gym.spaces.Tuple):
            return tuple(self.resize(below, each) for below, each in zip(space, part))
        layout = layout_of(space)
        if layout is None:
            return part
        channels, height, width, channels_last = layout
        image = torch.as_tensor(part, dtype=torch.float32)
        if channels_last:
            image = image.reshape(height, width, channels).movedim(-1, 0)
        image = torch.nn.functional.interpolate(image[None], self.size, mode="area")[0]
        if channels_last:
            image = image.movedim(0, -1).reshape(*self.size, *space.shape[2:])
        if np.issubdtype(space.dtype, np.integer):
            image = image.round()
        return image.numpy().astype(space.dtype)


class Hide(gym.ObservationWrapper, RecordConstructorArgs):
    """Set the numbers at these indices of a vector observation to 0. Without CartPole's velocities,
    indices 1 and 3, the task needs a memory."""

    def __init__(self, env, indices):
        RecordConstructorArgs.__init__(self, indices=indices)
        gym.ObservationWrapper.__init__(self, env)
        space = env.observation_space
        self.shown = np.ones(space.shape, space.dtype)
        self.shown[list(indices)] = 0

    def observation(self, observation):
        return observation * self.shown
