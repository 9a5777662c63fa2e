"""Small tasks, and tasks with two kinds of environments, for learn.py parts and weights. Importing
this file registers them, as `kinds:Flats-v0` and so on. harness.py puts this folder on the path of
its processes.

In a task with two kinds, an environment's `mean_ms` says how long a step takes on average, which
`--extensions clocked` obeys. The easy kind is kind 0.
"""

import functools

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from notebooks.environments import pointnav
from tests.envs import Cue

EASY, HARD = range(2)


class TwoKinds:
    """Half of the environments are easy, and half are hard.

    keep     an environment keeps its kind: those with even numbers are easy. Otherwise each reset
             draws a kind. In an evaluation, environments always keep their kinds
    ratio    how many times as long a step of the slow kind takes
    slow     the slow kind, hard or easy"""

    fast_ms = 3.0
    kind = EASY

    def set_kinds(self, split, number, keep, ratio, slow):
        self.keeps = keep or split == "val"
        self.kind = number % 2
        self.slow = ("easy", "hard").index(slow)
        self.ratio = ratio

    def draw_kind(self):
        """Begin an episode."""
        if not self.keeps:
            self.kind = int(self.np_random.integers(2))

    @property
    def mean_ms(self):
        """Milliseconds of a step, on average."""
        return self.fast_ms * (self.ratio if self.kind == self.slow else 1)

    def by_kind(self, success):
        """Metrics: twice their means are the success in each kind, if both have half of the
        episodes."""
        return {"easy": success * (self.kind == EASY), "hard": success * (self.kind == HARD)}


@functools.cache
def plans(split, kind):
    """The numbers of the floor plans with 2 x 2 rooms (easy), or with 3 x 3."""
    found = []
    for index in range(pointnav.NUM_PLANS[split]):
        rng = np.random.default_rng([("train", "val").index(split), index])
        columns, rows = rng.integers(2, 4, size=2)  # as FloorPlan draws them
        if columns == rows == (2, 3)[kind]:
            found.append(index)
    return found


class Flats(TwoKinds, pointnav.PointNav):
    """PointNav in small flats (easy) and in large ones."""

    metadata = pointnav.PointNav.metadata | {
        "metrics": ("success", "spl", "distance_to_goal", "easy", "hard")
    }

    def __init__(self, split="train", number=0, keep=True, ratio=10, slow="hard", image_size=64):
        pointnav.PointNav.__init__(self, split, image_size=image_size)
        self.set_kinds(split, number, keep, ratio, slow)

    def draw_plan(self):
        self.draw_kind()
        return int(self.np_random.choice(plans(self.split, self.kind)))

    def step(self, action):
        *answer, info = super().step(action)
        return *answer, info | self.by_kind(info["success"])


class Cues(TwoKinds, Cue):
    """Remember a cue for 2 steps (easy), or for 10."""

    metadata = {"metrics": ("success", "easy", "hard")}

    def __init__(self, split="train", number=0, keep=True, ratio=10, slow="hard"):
        Cue.__init__(self)
        self.set_kinds(split, number, keep, ratio, slow)

    def reset(self, **arguments):
        gym.Env.reset(self, seed=arguments.get("seed"))
        self.draw_kind()
        self.delay = (2, 10)[self.kind]
        return super().reset()

    def step(self, action):
        *answer, _ = super().step(action)
        success = float(answer[1])
        return *answer, {"success": success, **self.by_kind(success)}


class Corridor(gym.Env):
    """Ten places in a row. Every step at the left end gives 2, and every step at the right end 3.
    An episode begins somewhere, and is cut after eight steps, though it would never end. So it is
    always best to go to the right end, and success means that the last step went there."""

    observation_space = spaces.Discrete(10)
    action_space = spaces.Discrete(2)
    metadata = {"metrics": ("success",)}

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.place = int(self.np_random.integers(10))
        self.steps = 0
        return self.place, {}

    def step(self, action):
        self.steps += 1
        self.place = int(np.clip(self.place + (1 if action else -1), 0, 9))
        reward = {0: 2.0, 9: 3.0}.get(self.place, 0.0)
        return self.place, reward, False, self.steps == 8, {"success": float(action)}


own = {"split": "train", "number": 0}
gym.register("Flats-v0", f"{__name__}:Flats", kwargs=own)
gym.register("Cues-v0", f"{__name__}:Cues", kwargs=own)
gym.register("Corridor-v0", f"{__name__}:Corridor")
