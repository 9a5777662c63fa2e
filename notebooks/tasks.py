"""The two tasks that DD-PPO's agents were transferred to (section 6), in the simulators of `pointnav`:

    python ver_ppo.py --env-id notebooks.tasks:Flee-v0 --init-from FILE --freeze-encoder --reset-critic

Flee-v0: get as far away from the start as possible. Explore-v0: visit as many places as possible. FILE is the checkpoint
of a `pointnav` run with the same --camera, --image-size and --encoder. Importing this file registers both.
"""

import gymnasium as gym
import numpy as np

from notebooks import pointnav
from notebooks.habitat_env import HabitatEnv


class TransferTask(gym.Wrapper):
    """One of the two tasks. `score` is what an episode is measured by: metres of geodesic distance from its start, or square
    metres visited; the reward is its increase. A stop ends the episode.

    Spaces are those of PointNav, so that its policies fit, and the goal says nothing, as in the paper. The other arguments
    come from `ver_ppo.make_env`. The simulator is the options', as for `pointnav`.
    """

    def __init__(self, metric, options=None, split="train", number=0, render_mode=None):
        builtin = not options or options.simulator != "habitat"
        super().__init__(pointnav.make(options, split) if builtin else HabitatEnv(options, split, number))
        self.metric, self.habitat = metric, None if builtin else self.unwrapped.habitat_env.sim
        self.metadata = {"render_modes": ["rgb_array"], "metrics": (metric,)}

    def reset(self, **arguments):
        observation, info = self.env.reset(**arguments)
        self.start, self.places, self.score = self.position, set(), 0.0
        if not self.habitat:
            self.unwrapped.aim(self.start)  # its geodesic distance is now that to the start
        self.measure()
        return self.without_goal(observation), info

    def step(self, action):
        observation, _, terminated, truncated, _ = self.env.step(action)
        before = self.score
        self.measure()
        return self.without_goal(observation), self.score - before, terminated, truncated, {self.metric: self.score}

    @property
    def position(self):
        """Of the agent in m: x and y, in Habitat x, height and z."""
        return np.array(self.habitat.get_agent_state().position) if self.habitat else self.unwrapped.position

    def measure(self):
        """Update the score."""
        if self.metric == "places_visited":
            self.places.add(tuple(np.floor(self.position[[0, -1]]).astype(int)))  # without the height
            self.score = float(len(self.places))
        elif self.habitat:
            self.score = float(self.habitat.geodesic_distance(self.position, self.start))
        else:
            self.score = float(self.unwrapped.geodesic)

    def without_goal(self, observation):
        """The same observation with a goal that says nothing."""
        return observation | {"goal": np.array([1, 1, 0], np.float32)}


for name, metric in (("Flee", "distance_from_start"), ("Explore", "places_visited")):
    arguments = {"metric": metric, "options": None, "split": "train", "number": 0}
    gym.register(f"{name}-v0", f"{__name__}:TransferTask", kwargs=arguments)
