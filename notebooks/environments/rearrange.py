"""Mobile manipulation in the flats of `pointnav`. A robot with a base and an arm picks up an object
and puts it down.

    python ver_ppo.py --env-id notebooks.environments.rearrange:Pick-v0 --target-entropy 0

Pick-v0 begins within the arm's reach of the object, and Place-v0 within reach of the place where
the object belongs. In PickArm-v0 and PlaceArm-v0 the base cannot move (VER sections 4 and 6). The
arguments are camera and image_size, as for PointNav. Importing this file registers all four.
"""

import math

import gymnasium as gym
import numpy as np

from notebooks.environments.habitat import GOAL_SPACE
from notebooks.environments.pointnav import PointNav, ray_boxes, sight

# the largest movement in one step
BASE_M = 0.15
BASE_RAD = math.radians(15)
ARM_M = 0.1
ARM_RAD = math.radians(15)

REACH_M = (0.2, 0.9)
SWING_RAD = math.radians(60)
GRIP_M = 0.1
PLACE_M = 0.15
STARTS_M = (0.35, 0.85)  # distance from the object or the place at the start
STOP = 0.9
STEP_LIMIT = 100


class Rearrange(PointNav):
    """A robot that must hold an object when it stops (`pick`), or must have put the object into its
    place (`place`).

    Observation    `depth` or `rgb`, as in PointNav
                   `goal`: the object, or with `place` its place, as distance in m, cosine and sine
                   of the bearing from the base
                   `arm`: length in m, angle to the base in radians, 1 if it holds the object
    Action         numbers in -1..1: extend the arm by 0.1 m, swing it by 15 degrees, close the
                   gripper (> 0) or open it, stop (> 0.9). With `base` also: drive 0.15 m, turn 15
                   degrees. A gripper that closes within 0.1 m of the object holds it
    Reward         decrease of the distance from the gripper (`place`: from the object) to the goal,
                   minus 0.01. Holding the object (`place`: having put it down in its place) adds 1,
                   losing that again subtracts 1, and success at a stop adds 2.5
    End            a stop terminates, and the 100th step truncates
    """

    metadata = PointNav.metadata | {"metrics": ("success",)}

    def __init__(
        self,
        skill="pick",
        base=True,
        split="train",
        camera="depth",
        image_size=64,
        render_mode=None,
    ):
        super().__init__(split, camera, image_size)
        self.skill = skill
        self.action_space = gym.spaces.Box(-1, 1, (6 if base else 4,), np.float32)
        arm_space = gym.spaces.Box(-np.pi, np.pi, (3,), np.float32)
        spaces = {**self.observation_space, "goal": GOAL_SPACE, "arm": arm_space}
        self.observation_space = gym.spaces.Dict(spaces)

    def reset(self, *, seed=None, options=None):
        """Begin an episode. With `options["far_m"]` = (low, high), the shortest path to the goal
        has a length in this range, instead of beginning within reach."""
        far_m = (options or {}).get("far_m")
        self.holds = self.skill == "place"
        while True:
            self.object = np.zeros(2)  # PointNav's reset needs these for its observation
            self.place = self.object
            self.length = 0.0
            self.swing = 0.0
            super().reset(seed=seed)  # draws a flat and a goal in it
            seed = None
            self.object = self.goal
            self.place = self.goal
            for _ in range(64):  # not every flat has places so far from each other
                if far_m:
                    self.position = self.free_point()
                    self.heading = self.np_random.uniform(-np.pi, np.pi)
                else:
                    self.position, self.heading = self.within_reach()
                if not far_m or far_m[0] <= self.waypoints(self.position).min() <= far_m[1]:
                    self.path = [self.position]
                    return self.begin(self.skill)

    def free_point(self):
        """Where the robot can stand."""
        points_P2 = self.np_random.uniform(0, self.plan.size, (64, 2))
        return points_P2[self.plan.is_free(points_P2, 0.02)][0]

    def within_reach(self):
        """A free position from which the goal can be grasped, and a heading within 45 degrees of
        it."""
        rng = self.np_random
        while True:
            bearing_P = rng.uniform(-np.pi, np.pi, 64)
            direction_P2 = np.stack([np.cos(bearing_P), np.sin(bearing_P)], axis=1)
            points_P2 = self.goal - rng.uniform(*STARTS_M, (64, 1)) * direction_P2
            free_P = self.plan.is_free(points_P2, 0.02)
            free_P &= np.isfinite(sight(self.goal, points_P2, self.plan.boxes_K4))
            if free_P.any():
                heading = bearing_P[free_P][0] + rng.uniform(-np.pi / 4, np.pi / 4)
                return points_P2[free_P][0], heading

    def begin(self, skill):
        """Start this skill where the robot stands, with a folded arm. Returns observation and info,
        as `reset`."""
        self.skill = skill
        self.steps = 0
        self.length = REACH_M[0]
        self.swing = 0.0
        if self.holds:
            self.object = self.gripper
        self.score = self.measure()
        return self.observe(), {}

    def step(self, action):
        extend, swing, grip, stop, *base = np.clip(action, -1, 1).tolist()
        if base:
            drive, turn = base
            self.move(BASE_M * drive)
            self.heading += BASE_RAD * turn
        self.length = min(max(self.length + ARM_M * extend, REACH_M[0]), REACH_M[1])
        self.swing = min(max(self.swing + ARM_RAD * swing, -SWING_RAD), SWING_RAD)
        self.holds = grip > 0 and (self.holds or math.dist(self.gripper, self.object) <= GRIP_M)
        if self.holds:
            self.object = self.gripper
        self.steps += 1
        before = self.score
        self.score = self.measure()
        terminated = stop > STOP
        success = float(terminated and self.done)
        reward = self.score - before - 0.01 + 2.5 * success
        truncated = self.steps >= STEP_LIMIT
        return self.observe(), reward, terminated, truncated, {"success": success}

    @property
    def gripper(self):
        """Where it is; the arm ends at walls."""
        angle = self.heading + self.swing
        direction_2 = np.array([math.cos(angle), math.sin(angle)])
        (wall_m,), _ = ray_boxes(self.position, direction_2[None], self.plan.boxes_K4)
        return self.position + min(self.length, wall_m - 0.05) * direction_2

    @property
    def done(self):
        """Whether the skill has reached its aim."""
        if self.skill == "pick":
            return self.holds
        return not self.holds and math.dist(self.object, self.place) <= PLACE_M

    def measure(self):
        """The quantity whose increase is the reward."""
        if self.skill == "pick":
            left_m = math.dist(self.gripper, self.object)
        else:
            left_m = math.dist(self.object, self.place)
        return float(self.done) - left_m

    def navigate(self, action, goal_2):
        """Make a step of a PointNav agent with this goal. Returns the agent's next observation, and
        whether it has stopped."""
        self.walk(action)
        if self.holds:
            self.object = self.gripper
        return self.see(goal_2), action == 0

    def see(self, goal_2):
        """The observation of a PointNav agent with this goal."""
        return super().observe(goal_2)

    def observe(self):
        arm = np.array([self.length, self.swing, self.holds], np.float32)
        return self.see(self.object if self.skill == "pick" else self.place) | {"arm": arm}


for name, skill, base in (
    ("Pick", "pick", True),
    ("Place", "place", True),
    ("PickArm", "pick", False),
    ("PlaceArm", "place", False),
):
    kwargs = {"skill": skill, "base": base, "split": "train"}
    gym.register(f"{name}-v0", f"{__name__}:Rearrange", kwargs=kwargs)
