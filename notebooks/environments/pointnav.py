"""PointGoal navigation, the environment `pointnav` of ver_ppo.py: in generated floor plans, with
numpy alone, or in Habitat where that is installed with its data.

    python ver_ppo.py --env-id pointnav --env-kwargs camera=rgb image_size=128 simulator=builtin

The arguments are those of `make` at the end. Importing this file registers `PointNav-v0`.
"""

import functools
import itertools
import math
import multiprocessing
import os

import gymnasium as gym
import numpy as np

from notebooks.environments.habitat import GOAL_SPACE, POINTNAV, HabitatEnv, require_habitat

FORWARD_M = 0.25
TURN_RAD = math.radians(10)
SUCCESS_M = 0.2
STEP_LIMIT = 500
AGENT_RADIUS_M = 0.18
CAMERA_HEIGHT_M = 1.25
CEILING_M = 2.5
DEPTH_RANGE_M = 10.0
NUM_PLANS = {"train": 256, "val": 64}  # a data set of floor plans, as Habitat has one of scenes
GROW = np.array([-1.0, -1.0, 1.0, 1.0])  # boxes + m * GROW: by m meters on every side


def ray_boxes(origin_2, direction_R2, boxes_K4):
    """How far each ray flies before it enters a box, in multiples of its direction vector, and
    which box that is.

    Camera, collisions and line of sight are all this one function. Slab test: a ray is inside a box
    while it is inside the box's x-interval and its y-interval. `boxes_K4` holds x0, y0, x1, y1;
    origins inside a box do not see that box.

    >>> ray_boxes(np.zeros(2), np.array([[1.0, 0.1]]), np.array([[2.0, -1.0, 3.0, 1.0]]))[0]
    array([2.])
    """
    inverse_2R = 1.0 / (
        direction_R2.T + 1e-12
    )  # the shift keeps a ray along an axis from computing 0 * inf
    # written out like this, it is six times as fast as a broadcast in three dimensions
    x0_KR = (boxes_K4[:, 0] - origin_2[0])[:, None] * inverse_2R[0]
    y0_KR = (boxes_K4[:, 1] - origin_2[1])[:, None] * inverse_2R[1]
    x1_KR = (boxes_K4[:, 2] - origin_2[0])[:, None] * inverse_2R[0]
    y1_KR = (boxes_K4[:, 3] - origin_2[1])[:, None] * inverse_2R[1]
    enter_KR = np.maximum(np.minimum(x0_KR, x1_KR), np.minimum(y0_KR, y1_KR))
    leave_KR = np.minimum(np.maximum(x0_KR, x1_KR), np.maximum(y0_KR, y1_KR))
    enter_KR[(enter_KR >= leave_KR) | (enter_KR < 0)] = np.inf
    box_R = enter_KR.argmin(axis=0)
    return enter_KR[box_R, np.arange(len(box_R))], box_R


def sight(point_2, targets_P2, boxes_K4):
    """Distance in meters from a point to every target in straight line of sight, infinite to the
    others."""
    offset_P2 = targets_P2 - point_2
    reach_P, _ = ray_boxes(point_2, offset_P2, boxes_K4)
    return np.where(reach_P >= 1, np.hypot(*offset_P2.T), np.inf)


def overlaps(box, boxes_K4):
    """Whether a box (or point, as a box without size) overlaps each of the boxes; broadcasts."""
    return ((box[..., :2] < boxes_K4[:, 2:]) & (box[..., 2:] > boxes_K4[:, :2])).all(axis=-1)


def wall_pieces(rng, start, end):
    """The pieces of a wall from `start` to `end` beside its doorway. One wall in five has no
    doorway.
    """
    if rng.random() < 0.2:
        return [(start, end)]
    width = rng.uniform(0.8, 1.3)
    door = rng.uniform(start + 0.3, end - 0.3 - width)
    return [(start, door), (door + width, end)]


class FloorPlan:
    """Rooms with doorways and furniture, all boxes as high as the room, and shortest paths between
    any two points.

    The agent is a square of half-width AGENT_RADIUS_M, so it is a point among boxes grown by that
    much (`blocked_K4`). A shortest path among boxes bends only at their corners: distances between
    all corners that see each other (`distance_CC`, completed by Floyd-Warshall) answer every query.
    (Paths keep 1 cm away from the corners, so that rounding cannot block them: distances are up to
    about 3 cm too long.)
    """

    def __init__(self, rng):
        columns, rows = rng.integers(2, 4, size=2)
        x = np.concatenate([[0], np.cumsum(rng.uniform(2.4, 3.8, columns))])
        y = np.concatenate([[0], np.cumsum(rng.uniform(2.4, 3.8, rows))])
        width = x[-1]
        depth = y[-1]
        self.size = np.array([width, depth])
        boxes = [
            [-1, -1, 0, depth + 1],
            [width, -1, width + 1, depth + 1],
            [0, -1, width, 0],
            [0, depth, width, depth + 1],
        ]
        for i, j in itertools.product(range(1, columns), range(rows)):
            boxes += [[x[i] - 0.08, a, x[i] + 0.08, b] for a, b in wall_pieces(rng, y[j], y[j + 1])]
        for j, i in itertools.product(range(1, rows), range(columns)):
            boxes += [[a, y[j] - 0.08, b, y[j] + 0.08] for a, b in wall_pieces(rng, x[i], x[i + 1])]
        self.num_walls = len(boxes)
        for i, j in itertools.product(range(columns), range(rows)):
            center = rng.uniform([x[i], y[j]], [x[i + 1], y[j + 1]])
            half = rng.uniform(0.15, 0.5, 2)
            box = np.concatenate([center - half, center + half])
            if not overlaps(
                box + 0.6 * GROW, np.array(boxes)
            ).any():  # leaves a passage on every side
                boxes.append(box.tolist())
        self.boxes_K4 = np.array(boxes)
        self.blocked_K4 = self.boxes_K4 + AGENT_RADIUS_M * GROW
        corners_K42 = (self.blocked_K4 + 0.01 * GROW)[:, [[0, 1], [0, 3], [2, 1], [2, 3]]]
        corners_C2 = corners_K42.reshape(-1, 2)
        inside_C = ((corners_C2 > 0) & (corners_C2 < self.size)).all(axis=1)
        self.corners_C2 = corners_C2[inside_C & self.is_free(corners_C2)]
        straight_CC = [
            sight(corner_2, self.corners_C2, self.blocked_K4) for corner_2 in self.corners_C2
        ]
        self.distance_CC = np.stack(straight_CC)
        for via in range(len(self.distance_CC)):
            detour_CC = self.distance_CC[:, via, None] + self.distance_CC[via]
            np.minimum(self.distance_CC, detour_CC, out=self.distance_CC)
        self.palette_K3 = rng.uniform(90, 255, (len(boxes), 3))

    def is_free(self, points_P2, margin=0.0):
        """Which points the agent's center may stand on."""
        return ~overlaps(np.tile(points_P2, 2)[:, None], self.blocked_K4 + margin * GROW).any(
            axis=1
        )


@functools.lru_cache(maxsize=sum(NUM_PLANS.values()))
def floor_plan(split, index):
    """Floor plan number `index` of the split: training and validation plans come from disjoint
    random streams."""
    return FloorPlan(np.random.default_rng([("train", "val").index(split), index]))


def check_camera(camera, image_size):
    """Raise ValueError for a camera that there is not."""
    if camera not in ("depth", "rgb"):
        raise ValueError(f"camera={camera}: must be depth or rgb")
    if not isinstance(image_size, int) or not 8 <= image_size <= 1024:
        raise ValueError(f"image_size={image_size}: must be a whole number within 8..1024")


class Body:
    """A robot's body: `position` and `heading` in a `plan`, and the `path` that it has walked
    there, whose length is `path_m`."""

    def put(self, plan, position, heading):
        """Put it somewhere, and begin a path."""
        self.plan = plan
        self.position = position
        self.heading = heading
        self.path_m = 0.0
        self.path = [position]

    def walk(self, action):
        """Move forward, or turn left or right."""
        if action == 1:
            self.move()
        elif action >= 2:
            self.heading += TURN_RAD if action == 2 else -TURN_RAD

    def move(self, meters=FORWARD_M):
        """Move one step forward. At an obstacle, the rest of the step slides along its side."""
        way_2 = meters * np.array([math.cos(self.heading), math.sin(self.heading)])
        for _ in range(2):
            (reach,), (box,) = ray_boxes(self.position, way_2[None], self.plan.blocked_K4)
            share = min(1.0, max(0.0, reach - 1e-3))
            self.position = self.position + share * way_2
            self.path_m += share * math.hypot(*way_2)
            x0, _, x1, _ = self.plan.blocked_K4[box]
            # along the side that the agent touches
            along_2 = [1, 0] if x0 < self.position[0] < x1 else [0, 1]
            way_2 = (1 - share) * way_2 * along_2
            if reach > 1.0 or not way_2.any():
                break
        self.path.append(self.position)


class PointNav(Body, gym.Env):
    """PointGoal navigation (DD-PPO section 4) in the built-in simulator. The agent must reach a
    point that it knows in its own polar coordinates.

    Observation    `depth`: float32, H x W x 1, 0..1 for 0..10 m along the optical axis; or
                   `rgb`: uint8, H x W x 3. The camera sees 90 degrees.
                   `goal`: distance in m, cosine and sine of the bearing
    Actions        stop, forward 0.25 m, left 10 degrees, right 10 degrees
    Reward         decrease of the geodesic distance, minus 0.01. A successful stop, within 0.2 m of
                   the goal, adds 2.5 * SPL
    End            a stop terminates, and the 500th step truncates

    The seed of `reset` determines the floor plan and the episode.
    """

    metadata = {
        "render_modes": ["rgb_array"],
        "render_fps": 10,
        "metrics": ("success", "spl", "distance_to_goal"),
    }
    render_mode = "rgb_array"

    def __init__(self, split="train", camera="depth", image_size=64):
        check_camera(camera, image_size)
        self.split = split
        self.camera = camera
        self.action_space = gym.spaces.Discrete(4)
        if camera == "depth":
            image = gym.spaces.Box(0, 1, (image_size, image_size, 1), np.float32)
        else:
            image = gym.spaces.Box(0, 255, (image_size, image_size, 3), np.uint8)
        self.observation_space = gym.spaces.Dict({camera: image, "goal": GOAL_SPACE})
        # slopes of the rays: 1..-1 is 90 degrees, left and up are positive
        self.slope_W = 1 - (np.arange(image_size) + 0.5) / image_size * 2
        slope_H1 = self.slope_W[:, None]
        to_plane = np.where(slope_H1 < 0, CAMERA_HEIGHT_M, CEILING_M - CAMERA_HEIGHT_M)
        plane_m_H1 = np.minimum(to_plane / np.abs(slope_H1).clip(1e-9), DEPTH_RANGE_M)
        self.plane_m_H1 = plane_m_H1.astype(np.float32)  # of floor and ceiling
        floor_rgb = [120.0, 100.0, 80.0]
        ceiling_rgb = [230.0, 230.0, 240.0]
        self.plane_rgb_H13 = np.where(slope_H1[..., None] < 0, floor_rgb, ceiling_rgb)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        rng = self.np_random
        self.plan = floor_plan(self.split, self.draw_plan())
        self.geodesic = np.inf
        while not 1.0 <= self.geodesic < np.inf:
            points_P2 = rng.uniform(0, self.plan.size, (64, 2))
            self.position, self.goal = points_P2[self.plan.is_free(points_P2, 0.02)][:2]
            self.aim(self.goal)
        self.put(self.plan, self.position, rng.uniform(-np.pi, np.pi))
        self.start_geodesic = self.geodesic
        self.steps = 0
        return self.observe(), {}

    def draw_plan(self):
        """Draw the number of the next episode's floor plan."""
        return int(self.np_random.integers(NUM_PLANS[self.split]))

    def step(self, action):
        self.steps += 1
        before = self.geodesic
        self.walk(action)
        if action == 1:
            self.geodesic = self.waypoints(self.position).min()
        terminated = action == 0
        success = float(terminated and np.hypot(*(self.goal - self.position)) <= SUCCESS_M)
        spl = success * self.start_geodesic / max(self.path_m, self.start_geodesic)
        reward = before - self.geodesic - 0.01 + 2.5 * spl
        info = {"success": success, "spl": spl, "distance_to_goal": self.geodesic}
        return self.observe(), reward, terminated, self.steps >= STEP_LIMIT, info

    def aim(self, point_2):
        """Measure `geodesic` to this point from now on."""
        self.waypoints_C2 = np.vstack([self.plan.corners_C2, point_2])
        straight_C = sight(point_2, self.plan.corners_C2, self.plan.blocked_K4)
        self.beyond_C = np.append((straight_C + self.plan.distance_CC).min(axis=1), 0.0)
        self.geodesic = self.waypoints(self.position).min()

    def waypoints(self, position_2):
        """Length of the shortest path to the goal through each point in sight. The points are the
        corners and, last, the goal itself."""
        return sight(position_2, self.waypoints_C2, self.plan.blocked_K4) + self.beyond_C

    def shortest_path(self):
        """Points of the shortest path from the agent to the goal."""
        points = [self.position]
        beyond = np.inf
        while beyond > 0:
            length_C = np.where(self.beyond_C < beyond, self.waypoints(points[-1]), np.inf)
            via = length_C.argmin()
            points.append(self.waypoints_C2[via])
            beyond = self.beyond_C[via]
        return points

    def observe(self, goal=None):
        """The agent's observation, with its own goal or another one. One ray per image column gives
        the depth of the wall. Floor and ceiling are planes."""
        cos = math.cos(self.heading)
        sin = math.sin(self.heading)
        ray_W2 = np.stack([cos - sin * self.slope_W, sin + cos * self.slope_W], axis=1)
        wall_m_W, box_W = ray_boxes(self.position, ray_W2, self.plan.boxes_K4)
        depth_m_HW = np.minimum(self.plane_m_H1, wall_m_W.astype(np.float32))
        image = depth_m_HW[..., None] / DEPTH_RANGE_M
        if self.camera == "rgb":
            is_wall_HW1 = (wall_m_W < self.plane_m_H1)[..., None]
            color = np.where(is_wall_HW1, self.plan.palette_K3[box_W], self.plane_rgb_H13)
            image = (color / (1 + 0.15 * DEPTH_RANGE_M * image)).astype(np.uint8)
        offset = (self.goal if goal is None else goal) - self.position
        distance = np.hypot(*offset)
        bearing = math.atan2(offset[1], offset[0]) - self.heading
        goal_3 = np.array([distance, math.cos(bearing), math.sin(bearing)], np.float32)
        return {self.camera: image, "goal": goal_3}

    def render(self):
        """The camera's picture: uint8, H x W x 3."""
        image = self.observe()[self.camera]
        return image if self.camera == "rgb" else (image * 255).astype(np.uint8).repeat(3, axis=2)


# ----------------------------------------------------------------------------------- PointNav-v0


def make(
    options=None,
    split="train",
    number=0,
    render_mode=None,
    simulator="auto",
    camera="depth",
    image_size=64,
    **overrides,
):
    """Make PointNav in the built-in simulator or in Habitat.

    simulator    builtin, habitat or auto. auto chooses Habitat if it is installed with its data,
                 unless the run has --num-workers 0
    camera       depth or rgb, with `image_size` x `image_size` pixels
    overrides    keys with a dot for Habitat's configuration, such as habitat.dataset.data_path.
                 They require Habitat

    Raises ValueError for other values, and the errors of HabitatEnv if Habitat is required and
    missing.
    """
    if simulator not in ("auto", "builtin", "habitat"):
        raise ValueError(f"simulator={simulator}: must be auto, builtin or habitat")
    check_camera(camera, image_size)
    if unknown := [key for key in overrides if "." not in key]:
        known = "simulator, camera, image_size and Habitat's own keys, with a dot, are"
        raise ValueError(f"{unknown[0]} is no argument of PointNav: {known}")
    if overrides and simulator == "builtin":
        raise ValueError(f"{min(overrides)} is Habitat's: not with simulator=builtin")
    if simulator == "auto":
        workerless = bool(options) and options.num_workers == 0
        simulator = "habitat" if overrides else choose_simulator(workerless)
    chosen = (f"simulator={simulator}",)  # goes into the run's checkpoint
    if simulator == "builtin":
        env = PointNav(split, camera, image_size)
        env.metadata = env.metadata | {"chosen": chosen}
        return env
    overrides = camera_overrides(camera, image_size) | overrides
    env = HabitatEnv(POINTNAV, options, split, number, render_mode, **overrides)
    env.chosen = chosen
    return env


@functools.lru_cache
def choose_simulator(workerless):
    """What simulator=auto means here, with worker processes or without, found out once a process
    and said once a run."""
    why_not = "--num-workers 0: Habitat needs worker processes" if workerless else None
    try:
        require_habitat(POINTNAV, ())
    except ImportError:
        why_not = "no Habitat: python -m notebooks.environments.habitat says why"
    except (ValueError, FileNotFoundError) as error:
        why_not = error
    # not in worker processes, nor in each of many ranks
    speaks = multiprocessing.current_process().name in ("MainProcess", "trial 0")
    if speaks and os.environ.get("LOCAL_RANK", "0") == "0":
        say_once(f"simulator: built-in ({why_not})" if why_not else "simulator: Habitat")
    return "builtin" if why_not else "habitat"


@functools.lru_cache
def say_once(line):
    """Print this line, but once a process: an evaluation may ask again."""
    print(line)


def camera_overrides(camera, image_size):
    """The keys of Habitat's configuration that give the agent this camera alone."""
    sensors = "habitat.simulator.agents.main_agent.sim_sensors"
    unused = "rgb" if camera == "depth" else "depth"
    return {
        f"{sensors}.{camera}_sensor.width": image_size,
        f"{sensors}.{camera}_sensor.height": image_size,
        f"~{sensors}.{unused}_sensor": None,
    }


gym.register("PointNav-v0", make, kwargs={"options": None, "split": "train", "number": 0})
