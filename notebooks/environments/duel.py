"""A duel of two robots in a generated flat, for self-play (as the duels of Sample Factory, Petrenko
et al. 2020, section 4.3). The robot that hits the other one first wins.

    python ver_ppo.py --env-id duel --extensions selfplay

Importing this file registers `Duel-v0`. Here only one robot learns. The other one, the opponent,
acts inside the environment: at random, or as `opponent` says (notebooks/extensions/selfplay.py).
"""

import math

import gymnasium as gym
import numpy as np

from notebooks.environments.pointnav import (
    AGENT_RADIUS_M,
    DEPTH_RANGE_M,
    NUM_PLANS,
    Body,
    floor_plan,
    ray_boxes,
    sight,
)

STEP_LIMIT = 300
RAYS = 24  # over the half circle in front of a robot
AIM_RAD = math.radians(10)  # a shot hits within this angle
RELOAD_STEPS = 8  # between two shots
PIXELS_M = 24  # pixels for a meter, in the pictures ...
PICTURE_M = 11.5  # ... which are as large as the largest flat
COLORS = (40, 90, 200), (210, 60, 40)  # the robot that learns, and its opponent


class Duel(gym.Env):
    """A duel, as the robot that learns sees it.

    Observation    `rays`: RAYS distances in front of the robot, from left to right, 0..1 for 0..10
                   m
                   `other`: whether the other robot is seen, its distance in units of 10 m, cosine
                   and sine of its bearing. All are 0 if it is behind, or behind a wall
                   `reload`: how long until the robot can shoot again, from 1 to 0
    Actions        shoot, forward 0.25 m, left 10 degrees, right 10 degrees
    Reward         1 for a hit, minus 1 for being hit. Both in the same step are 0
    End            a hit terminates, and the 300th step truncates

    The robots begin where they can see each other, and look anywhere. A shot hits if the other
    robot is seen within 10 degrees. `won` is 1, or 0 for a lost game, or 1/2 if both hit or nobody
    does.
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": 10, "metrics": ("won",)}
    observation_space = gym.spaces.Dict(
        {
            "rays": gym.spaces.Box(0, 1, (RAYS,), np.float32),
            "other": gym.spaces.Box(-1, 1, (4,), np.float32),
            "reload": gym.spaces.Box(0, 1, (1,), np.float32),
        }
    )
    action_space = gym.spaces.Discrete(4)

    def __init__(self, split="train", options=None, render_mode=None):
        self.split = split
        self.options = options  # of the run; they name the network of an opponent
        self.render_mode = render_mode
        self.opponent = None  # has `act(observation)`
        self.robots = Body(), Body()
        self.angle_R = np.pi / 2 - (np.arange(RAYS) + 0.5) / RAYS * np.pi

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        rng = self.np_random
        self.plan = floor_plan(self.split, int(rng.integers(NUM_PLANS[self.split])))
        places = []
        while len(places) < 2:  # that see each other
            points_P2 = rng.uniform(0, self.plan.size, (64, 2))
            points_P2 = points_P2[self.plan.is_free(points_P2, 0.02)]
            distance_P = sight(points_P2[0], points_P2, self.plan.boxes_K4)
            places = points_P2[(distance_P > 1) & np.isfinite(distance_P)][:1]
            places = [points_P2[0], *places]
        for robot, place in zip(self.robots, places):
            robot.put(self.plan, place, rng.uniform(-np.pi, np.pi))
            robot.reload = 0
            robot.fired = False
        self.steps = 0
        return self.observe(*self.robots), {}

    def step(self, action):
        """Both robots act at the same time: they move, and then shoot."""
        self.steps += 1
        own, other = self.robots
        if self.opponent is None:
            reply = self.np_random.integers(4)
        else:
            reply = self.opponent.act(self.observe(other, own))
        for robot, chosen in zip(self.robots, (action, reply)):
            robot.walk(chosen)
            robot.fired = chosen == 0 and robot.reload == 0
            robot.reload = RELOAD_STEPS if robot.fired else max(0, robot.reload - 1)
        won = self.hits(own, other)
        lost = self.hits(other, own)
        info = {"won": 0.5 + 0.5 * (won - lost)}
        over = won or lost
        observation = self.observe(own, other)
        return observation, float(won - lost), over, self.steps >= STEP_LIMIT, info

    def hits(self, robot, other):
        """Whether this robot hits the other one in this step."""
        return bool(robot.fired) and abs(self.see(robot, other)[1]) <= AIM_RAD

    def see(self, robot, other):
        """Distance in m and bearing in -pi..pi of the other robot, infinite if a wall hides it."""
        (distance,) = sight(robot.position, other.position[None], self.plan.boxes_K4)
        if not np.isfinite(distance):
            return np.inf, np.inf
        dx, dy = other.position - robot.position
        return distance, math.remainder(math.atan2(dy, dx) - robot.heading, 2 * math.pi)

    def observe(self, robot, other):
        """The observation of a robot."""
        angle_R = robot.heading + self.angle_R
        ray_R2 = np.stack([np.cos(angle_R), np.sin(angle_R)], axis=1)
        wall_m_R, _ = ray_boxes(robot.position, ray_R2, self.plan.boxes_K4)
        distance, bearing = self.see(robot, other)
        seen = np.zeros(4, np.float32)
        if abs(bearing) <= np.pi / 2:
            seen[:] = 1, min(1, distance / DEPTH_RANGE_M), math.cos(bearing), math.sin(bearing)
        return {
            "rays": np.minimum(1, wall_m_R / DEPTH_RANGE_M).astype(np.float32),
            "other": seen,
            "reload": np.array([robot.reload / RELOAD_STEPS], np.float32),
        }

    def render(self):
        """The flat from above, with both robots, their paths and shots: uint8, H x W x 3."""
        size = int(PICTURE_M * PIXELS_M)
        image = np.full((size, size, 3), 90, np.uint8)
        width, height = (self.plan.size * PIXELS_M).astype(int)
        image[:height, :width] = 240
        y, x = np.ogrid[:size, :size]

        def dot(point_2, radius_m, color):
            center_2 = point_2 * PIXELS_M
            radius = radius_m * PIXELS_M
            x0, y0 = np.maximum(0, center_2 - radius).astype(int)
            x1, y1 = (center_2 + radius).astype(int) + 1
            near_HW = np.hypot(x[:, x0:x1] - center_2[0], y[y0:y1] - center_2[1]) <= radius
            image[y0:y1, x0:x1][near_HW] = color

        for box in self.plan.boxes_K4:
            x0, y0, x1, y1 = np.maximum(0, box * PIXELS_M).astype(int)
            image[y0:y1, x0:x1] = 90
        for robot, color in zip(self.robots, COLORS):
            ahead_2 = np.array([math.cos(robot.heading), math.sin(robot.heading)])
            for point_2 in robot.path[-20:]:
                dot(point_2, 0.04, color)
            dot(robot.position, AGENT_RADIUS_M, color)
            dot(robot.position + AGENT_RADIUS_M * ahead_2, 0.07, (0, 0, 0))
            if robot.fired:
                (reach,), _ = ray_boxes(robot.position, ahead_2[None], self.plan.boxes_K4)
                for meters in np.arange(AGENT_RADIUS_M, min(reach, DEPTH_RANGE_M), 0.1):
                    dot(robot.position + meters * ahead_2, 0.03, color)
        return image


own = {"split": "train", "options": None}
gym.register("Duel-v0", Duel, kwargs=own, order_enforce=False)
