"""Mobile manipulation in the flats of `pointnav`: a robot with a base and an arm picks an object up and puts it down.

    python ver_ppo.py --env-id notebooks.rearrange:Pick-v0 --target-entropy 0 --total-timesteps 500000

Pick-v0 and Place-v0 begin within the arm's reach of the object, or of the place where it belongs. PickArm-v0 and PlaceArm-v0
are the same without the base: the arm has to do (VER sections 4 and 6). Importing this file registers all four.
"""

import math

import gymnasium as gym
import numpy as np

from notebooks.pointnav import GOAL_SPACE, PointNav, ray_boxes, sight

BASE_M, BASE_RAD, ARM_M, ARM_RAD = 0.15, math.radians(15), 0.1, math.radians(15)  # what one step can do at most
REACH_M, SWING_RAD, GRIP_M, PLACE_M = (0.2, 0.9), math.radians(60), 0.1, 0.15
STARTS_M = 0.35, 0.85  # from the object, or the place, at the start
STOP, STEP_LIMIT = 0.9, 100


class Rearrange(PointNav):
    """A robot that has to hold an object (`pick`), or to have put it where it belongs (`place`), when it stops.

    Observation: `depth` or `rgb` as in PointNav, `goal`: the object (`place`: its place) as distance, cosine and sine of the
    bearing from the base, `arm`: its length in m, its angle to the base in radians, 1 if it holds the object.
    Action, -1..1 each: extend the arm 0.1 m, swing it 15 degrees, close (> 0) or open the gripper, stop (> 0.9), and with
    `base` drive 0.15 m, turn 15 degrees. Closed within 0.1 m of the object, the gripper holds it.
    Reward: decrease of the distance between gripper (`place`: object) and goal - 0.01; 1 for holding the object (`place`:
    having put it down there), -1 for no longer; 2.5 for success at a stop. A stop terminates, the 100th step truncates.
    """

    metadata = PointNav.metadata | {"metrics": ("success",)}

    def __init__(self, skill="pick", base=True, split="train", camera="depth", image_size=64):
        super().__init__(split, camera, image_size)
        self.skill, self.action_space = skill, gym.spaces.Box(-1, 1, (6 if base else 4,), np.float32)
        arm_space = gym.spaces.Box(-np.inf, np.inf, (3,), np.float32)
        self.observation_space = gym.spaces.Dict({**self.observation_space, "goal": GOAL_SPACE, "arm": arm_space})

    def reset(self, *, seed=None, options=None):
        """Begin an episode. `options["far_m"]` = (low, high): that far from the goal by the shortest path, in any direction,
        instead of within reach."""
        far_m = (options or {}).get("far_m")
        self.holds = self.skill == "place"
        while True:
            self.object, self.length, self.swing = np.zeros(2), 0.0, 0.0  # PointNav's reset observes before all is there
            self.place = self.object
            super().reset(seed=seed)  # draws a flat, and in it the goal
            self.object, self.place, rng, seed = self.goal, self.goal, self.np_random, None
            for _ in range(64):  # not every flat has places so far from each other
                if far_m:
                    self.position, self.heading = self.free_point(), rng.uniform(-np.pi, np.pi)
                else:
                    self.position, self.heading = self.within_reach(rng)
                if not far_m or far_m[0] <= self.waypoints(self.position).min() <= far_m[1]:
                    self.path = [self.position]
                    return self.begin(self.skill)

    def free_point(self):
        """Where the robot can stand."""
        points_P2 = self.np_random.uniform(0, self.plan.size, (64, 2))
        return points_P2[self.plan.is_free(points_P2, 0.02)][0]

    def within_reach(self, rng):
        """A free position from which the goal can be grasped, and a heading within 45 degrees of it."""
        while True:
            direction_P = rng.uniform(-np.pi, np.pi, 64)
            offset_P2 = rng.uniform(*STARTS_M, (64, 1)) * np.stack([np.cos(direction_P), np.sin(direction_P)], axis=1)
            points_P2 = self.goal - offset_P2
            free_P = self.plan.is_free(points_P2, 0.02) & np.isfinite(sight(self.goal, points_P2, self.plan.boxes_K4))
            if free_P.any():
                return points_P2[free_P][0], direction_P[free_P][0] + rng.uniform(-np.pi / 4, np.pi / 4)

    def begin(self, skill):
        """Start this skill where the robot stands, with a folded arm. Returns observation and info, as `reset`."""
        self.skill, self.steps, self.length, self.swing = skill, 0, REACH_M[0], 0.0
        self.object = self.gripper if self.holds else self.object
        self.score = self.measure()
        return self.observe(), {}

    def step(self, action):
        extend, swing, grip, stop, *base = np.clip(action, -1, 1).tolist()
        if base:
            self.move(BASE_M * base[0])
            self.heading += BASE_RAD * base[1]
        self.length = min(max(self.length + ARM_M * extend, REACH_M[0]), REACH_M[1])
        self.swing = min(max(self.swing + ARM_RAD * swing, -SWING_RAD), SWING_RAD)
        self.holds = grip > 0 and (self.holds or math.dist(self.gripper, self.object) <= GRIP_M)
        if self.holds:
            self.object = self.gripper
        before, self.score, self.steps = self.score, self.measure(), self.steps + 1
        terminated = stop > STOP
        success = float(terminated and self.done)
        reward = self.score - before - 0.01 + 2.5 * success
        return self.observe(), reward, terminated, self.steps >= STEP_LIMIT, {"success": success}

    @property
    def gripper(self):
        """Where it is; the arm ends at walls."""
        angle = self.heading + self.swing
        direction_2 = np.array([math.cos(angle), math.sin(angle)])
        wall_m = ray_boxes(self.position, direction_2[None], self.plan.boxes_K4)[0][0]
        return self.position + min(self.length, wall_m - 0.05) * direction_2

    @property
    def done(self):
        """Whether the skill has done what it is for."""
        return self.holds if self.skill == "pick" else not self.holds and math.dist(self.object, self.place) <= PLACE_M

    def measure(self):
        """What the reward is the increase of."""
        return float(self.done) - math.dist(
            *((self.gripper, self.object) if self.skill == "pick" else (self.object, self.place))
        )

    def navigate(self, action, goal_2):
        """A step of a PointNav agent towards this goal. Returns what that agent sees then, and whether it has stopped."""
        self.walk(action)
        if self.holds:
            self.object = self.gripper
        return self.see(goal_2), action == 0

    def see(self, goal_2):
        """What a PointNav agent with this goal sees."""
        return super().observe(goal_2)

    def observe(self):
        arm = np.array([self.length, self.swing, self.holds], np.float32)
        return self.see(self.object if self.skill == "pick" else self.place) | {"arm": arm}


def make(skill, base, options=None, split="train", number=0, render_mode=None):
    """One of the environments that are registered here; the camera is the options'."""
    return Rearrange(skill, base, split, *(options.camera, options.image_size) if options else ())


for name, arguments in (
    ("Pick", ("pick", True)),
    ("Place", ("place", True)),
    ("PickArm", ("pick", False)),
    ("PlaceArm", ("place", False)),
):
    kwargs = dict(zip(("skill", "base"), arguments)) | {"options": None, "split": "train"}
    gym.register(f"{name}-v0", f"{__name__}:make", kwargs=kwargs)
