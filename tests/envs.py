"""Small environments for the tests. Importing registers them: `tests.envs:Cue-v0` and so on."""

import math
import os
import random
import signal
import sys

import gymnasium as gym
import numpy as np
import torch
from gymnasium import spaces

import ver_ppo


class Cue(gym.Env):
    """Memory: a cue (0 or 1) is shown in the first observation only. After `delay` steps the action
    must be the cue; then the reward is 1."""

    observation_space = spaces.Box(-1, 1, (2,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self, delay=10, render_mode=None):
        self.delay = delay

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.cue, self.steps = int(self.np_random.integers(2)), 0
        return np.array([2 * self.cue - 1, 0], np.float32), {}

    def step(self, action):
        self.steps += 1
        asked = self.steps > self.delay
        reward = float(asked and action == self.cue)
        return np.array([0, self.steps == self.delay], np.float32), reward, asked, False, {}


class Count(gym.Env):
    """Counts its steps in the observation; truncated after `limit` steps, and never terminated."""

    observation_space = spaces.Box(0, np.inf, (2,), np.float64)
    action_space = spaces.Discrete(3, start=-1)

    def __init__(self, limit=7, render_mode=None):
        self.limit = limit

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps, self.offset = 0, float(self.np_random.random())
        return self.observe(), {}

    def observe(self):
        return np.array([self.steps / 10, self.offset])

    def step(self, action):
        assert self.action_space.contains(action), action
        return self.advance(0.1 * action)

    def advance(self, reward):
        self.steps += 1
        return self.observe(), reward, False, self.steps >= self.limit, {}


class Listed(Count):
    """Ten validation episodes, of which each environment plays its share, as in Habitat."""

    num_episodes = 10
    metadata = {"render_modes": [], "metrics": ("index",)}

    def __init__(self, options=None, split="train", number=0, render_mode=None):
        super().__init__()
        self.stride = options.num_envs if options and split == "val" else 1
        self.index = number - self.stride

    def reset(self, *, seed=None, options=None):
        self.index = (self.index + self.stride) % self.num_episodes
        self.limit = 3 + self.index % 4  # so that they do not end in this order
        return super().reset(seed=seed)

    def step(self, action):
        *answer, info = super().step(action)
        return *answer, info | {"index": self.index}


class Obedient(gym.Wrapper):
    """Raises if the observation before an action did not allow it."""

    def reset(self, **more):
        observation, info = self.env.reset(**more)
        self.mask = observation["mask"]
        return observation, info

    def step(self, action):
        assert self.mask[action], "this action is not allowed"
        observation, *rest = self.env.step(action)
        self.mask = observation["mask"]
        return observation, *rest


class Everything(Count):
    """Every kind of observation, nested; several discrete actions."""

    observation_space = spaces.Dict(
        {
            "camera": spaces.Dict(
                {
                    "rgb": spaces.Box(0, 255, (24, 20, 3), np.uint8),
                    "grey": spaces.Box(0, 255, (16, 16), np.uint8),
                }
            ),
            "first": spaces.Box(0, 255, (3, 36, 40), np.uint8),
            "arm": spaces.Box(-np.inf, np.inf, (2, 3), np.float64),
            "room": spaces.Discrete(4, start=2),
            "switches": spaces.MultiBinary(5),
            "hand": spaces.Tuple(
                [
                    spaces.MultiDiscrete([[2, 3], [1, 4]], start=[[0, 5], [0, -2]]),
                    spaces.Box(0, 255, (9,), np.uint8),
                    spaces.Text(10),
                    spaces.Sequence(spaces.Discrete(3)),
                ]
            ),
            "map": spaces.Graph(spaces.Discrete(2), None),
        }
    )
    action_space = spaces.MultiDiscrete([3, 2, 4])

    def observe(self):
        return self.observation_space.sample()

    def step(self, action):
        assert self.action_space.contains(action), action
        return self.advance(float(action[0]))


class Keys(Count):
    """Observations whose names mean something to a ModuleDict."""

    observation_space = spaces.Dict(
        {
            "a.b": spaces.Box(0, 1, (2,), np.float32),
            "keys": spaces.Box(0, 255, (8, 8), np.uint8),
            "type": spaces.Discrete(3),
        }
    )

    def observe(self):
        return self.observation_space.sample()


class Continuous(Count):
    """Bounded and unbounded continuous actions."""

    action_space = spaces.Box(
        np.array([[0.0, -np.inf]]), np.array([[4.0, np.inf]]), dtype=np.float64
    )

    def step(self, action):
        assert self.action_space.contains(action), action
        return self.advance(float(action[0, 0]) / 4)


class Unsupported(Count):
    """With a space that is not supported."""

    def __init__(self, render_mode=None, **its_spaces):
        super().__init__()
        vars(self).update(its_spaces)

    def observe(self):
        return self.observation_space.sample()


class Drawn(Count):
    """The second number of its observation comes from a global random generator: one when the
    environment is made, and another in each episode."""

    sources = {"random": random.random, "numpy": np.random.random, "torch": lambda: torch.rand(1)}

    def __init__(self, source, render_mode=None):
        super().__init__(limit=3)
        self.draw = lambda: float(self.sources[source]())
        self.made = self.draw()

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.offset = self.draw()
        return self.observe(), {}


class Rude(Count):
    """Does what environments do that share a process with other things: sets a handler for SIGTERM
    when it is made, changes the current folder, and in its 100th step raises what is no
    Exception."""

    class Panic(BaseException):
        pass

    def __init__(self, folder="/", render_mode=None):
        super().__init__()
        self.life = 0
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
        os.chdir(folder)

    def step(self, action):
        self.life += 1
        if self.life == 100:
            raise self.Panic
        return super().step(action)


class Reused(gym.Env):
    """An image in one array, which each step fills again, and which has negative strides."""

    observation_space = spaces.Box(0, 255, (40, 40, 3), np.uint8)
    action_space = spaces.Discrete(2)

    def __init__(self, render_mode=None):
        self.image = np.zeros((40, 40, 3), np.uint8)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        return self.observe(), {}

    def observe(self):
        self.image[:] = 10 * self.steps
        return self.image[::-1]

    def step(self, action):
        assert isinstance(action, np.integer), "as from Gymnasium's own samples"
        self.steps += 1
        return self.observe(), 1.0, self.steps == 20, False, {}

    def render(self):
        return self.image / 255.0


class Unpicklable(spaces.Box):
    def __reduce__(self):
        raise TypeError("cannot be pickled")


class Rich(Count):
    """With a space that cannot be pickled."""

    observation_space = Unpicklable(0, np.inf, (2,), np.float64)


class Told(Count):
    """Keeps the arguments that it receives."""

    def __init__(self, options, split, number, limit, render_mode=None):
        super().__init__(limit)
        self.told = options, split, number, limit


class Forever(gym.Env):
    """The observation never changes. The reward is 1, and 8 after `grows_after` steps. It would
    never end, but is cut every five steps. So in the end, every value is reward / (1 - gamma)."""

    observation_space = spaces.Box(0, 1, (1,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self, grows_after=math.inf):
        self.grows_after = grows_after
        self.steps = 0

    def reset(self, *, seed=None, options=None):
        return np.ones(1, np.float32), {}

    def step(self, action):
        self.steps += 1
        reward = 1.0 if self.steps <= self.grows_after else 8.0
        return np.ones(1, np.float32), reward, False, self.steps % 5 == 0, {}


class Rewards(gym.Wrapper):
    """Rewards of another size."""

    def __init__(self, env, factor):
        super().__init__(env)
        self.factor = factor

    def step(self, action):
        observation, reward, *rest = self.env.step(action)
        return observation, self.factor * reward, *rest


class Blind(gym.Wrapper):
    """Renders nothing."""

    def render(self):
        return None


class WideCore(ver_ppo.FeedForward):
    """A feed-forward core with one more layer."""

    def __init__(self, in_features, hidden, times):
        super().__init__(times * hidden, hidden)
        self.wide = torch.nn.Linear(in_features, times * hidden)

    def forward(self, x):
        return super().forward(torch.relu(self.wide(x)))


class Wide(ver_ppo.Policy):
    """A policy with another core, and an argument of its own."""

    def __init__(self, spec, options, times=2):
        self.times = times
        super().__init__(spec, options)

    def make_core(self, in_features, options):
        return WideCore(in_features, options.hidden_size, self.times)


class Actionless(ver_ppo.Policy):
    """A policy that does not see its previous action. Otherwise a policy without memory could pass
    a message on to itself, by repeating an action."""

    def embed(self, action_BA, unknown_B):
        return super().embed(action_BA, torch.ones_like(unknown_B))


class Normed(ver_ppo.Policy):
    """A policy with buffers of several types: those of a batch normalization before the heads."""

    def __init__(self, spec, options):
        super().__init__(spec, options)
        self.normalize = torch.nn.BatchNorm1d(options.hidden_size)

    def heads(self, core_BH):
        return super().heads(self.normalize(core_BH))


class Uneven(ver_ppo.Policy):
    """A policy with a weight that only the first of several ranks uses."""

    def __init__(self, spec, options):
        super().__init__(spec, options)
        self.extra = torch.nn.Parameter(torch.ones(3))

    def auxiliary_loss(self, features_MF, core_MH, batch):
        return (self.extra**2).sum() if os.environ.get("RANK") == "0" else core_MH.new_zeros(())


class Starts(ver_ppo.Run):
    """An extension that only notes when the environments start."""

    def start(self):
        self.noted = True
        super().start()


class Greedy(ver_ppo.Policy):
    """Asks for more memory than there is, once it has learned from 60 mini-batches."""

    batches = 0

    def sequences(self, *batch):
        self.batches += 1
        if self.batches > 60:
            torch.empty(2**60)
        return super().sequences(*batch)


for name in ("Cue", "Count", "Keys", "Everything", "Continuous", "Drawn", "Rude", "Reused", "Rich"):
    gym.register(f"{name}-v0", f"{__name__}:{name}")
for name, its_spaces in {
    "TextAlone": {"observation_space": spaces.Dict({"speech": spaces.Text(10)})},
    "TupleAction": {"action_space": spaces.Tuple([spaces.Discrete(2), spaces.Discrete(2)])},
    "IntegerAction": {"action_space": spaces.Box(0, 9, (2,), np.int64)},
}.items():
    gym.register(f"{name}-v0", f"{__name__}:Unsupported", kwargs=its_spaces)
own = {"options": None, "split": "train", "number": 0}
gym.register("Listed-v0", f"{__name__}:Listed", kwargs=own)
gym.register("Forever-v0", f"{__name__}:Forever")
gym.register("Scenes-v0", f"{__name__}:Count", kwargs={"limit": 150})
gym.register(
    "Told-v0", f"{__name__}:Told", kwargs={"options": None, "split": "", "number": 0, "limit": 9}
)
gym.register("Autoreset-v0", lambda **kwargs: gym.wrappers.Autoreset(Count(**kwargs)))
