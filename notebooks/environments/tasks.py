"""The two tasks to which DD-PPO transfers its agents (section 6), in PointNav's simulators.

    python ver_ppo.py --env-id notebooks.environments.tasks:Flee-v0
        --extensions "transfer(file=FILE, reset=critic)"

Flee-v0: get as far away from the start as possible. Explore-v0: visit as many places as possible.
FILE is the checkpoint of a `pointnav` run with the same --policy, camera and image_size; the last
two are arguments of the environment, as in PointNav. Importing this file registers both.
"""

import gymnasium as gym
import numpy as np

from notebooks.environments import pointnav
from notebooks.environments.habitat import HabitatEnv


class TransferTask(gym.Wrapper):
    """One of the two tasks. `score` is the geodesic distance from the start in meters, or the
    visited area in square meters. The reward is the increase of the score. A stop ends the episode.

    The spaces are those of PointNav, so that its policies fit. As in the paper, the goal carries no
    information. All arguments except `metric` are PointNav's.
    """

    def __init__(self, metric, **arguments):
        super().__init__(pointnav.make(**arguments))
        self.metric = metric
        self.metadata = {"render_modes": ["rgb_array"], "metrics": (metric,)}
        in_habitat = isinstance(self.unwrapped, HabitatEnv)
        self.habitat = self.unwrapped.habitat_env.sim if in_habitat else None

    def reset(self, *, seed=None, options=None):
        observation, info = self.env.reset(seed=seed, options=options)
        self.start = self.position
        self.places = set()
        self.score = 0.0
        if not self.habitat:
            self.unwrapped.aim(self.start)  # its geodesic distance is then measured to the start
        self.measure()
        return self.without_goal(observation), info

    def step(self, action):
        observation, _, terminated, truncated, _ = self.env.step(action)
        before = self.score
        self.measure()
        reward = self.score - before
        info = {self.metric: self.score}
        return self.without_goal(observation), reward, terminated, truncated, info

    @property
    def position(self):
        """The agent's position in m: x and y. In Habitat: x, height and z."""
        if self.habitat:
            return np.array(self.habitat.get_agent_state().position)
        return self.unwrapped.position

    def measure(self):
        """Update the score."""
        if self.metric == "places_visited":
            square = np.floor(self.position[[0, -1]]).astype(int)  # without the height
            self.places.add(tuple(square))
            self.score = float(len(self.places))
        elif self.habitat:
            self.score = float(self.habitat.geodesic_distance(self.position, self.start))
        else:
            self.score = float(self.unwrapped.geodesic)

    def without_goal(self, observation):
        """The same observation, with a goal that carries no information."""
        return observation | {"goal": np.array([1, 1, 0], np.float32)}


for name, metric in (("Flee", "distance_from_start"), ("Explore", "places_visited")):
    kwargs = {"metric": metric, "options": None, "split": "train", "number": 0}
    gym.register(f"{name}-v0", f"{__name__}:TransferTask", kwargs=kwargs)
