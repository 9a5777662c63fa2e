"""Run trained skills in a chain: fetch an object and bring it to its place (TP-SRL, in VER sections
4 and 6)."""

import math

import numpy as np

from notebooks.environments import pointnav, rearrange
from notebooks.extensions.play import Skill

HANDOFF_M = 0.6  # how far before the object, or its place, Navigate ends


def begin(seed, split="val", far_m=(1.0, 99.0), **camera):
    """Make a flat with a robot, an object and a place for the object. `far_m` is the length of the
    shortest path to the object. The place is at least a meter from the object."""
    env = rearrange.Rearrange("pick", True, split, **camera)
    env.reset(seed=seed, options={"far_m": far_m})
    while not 1.0 <= env.waypoints(env.place).min() < math.inf:  # waypoints lead to the object
        env.place = env.free_point()
    return env


def point_before(env, target_2):
    """The point HANDOFF_M before a target on the robot's shortest path to it."""
    env.goal = target_2
    env.aim(target_2)
    left_m = HANDOFF_M
    points = env.shortest_path()[::-1]
    for near_2, far_2 in zip(points, points[1:]):
        length_m = math.dist(near_2, far_2)
        if left_m <= length_m:
            return near_2 + (far_2 - near_2) * left_m / length_m
        left_m -= length_m
    return env.position


def run_navigate(env, policy, target_2):
    """Navigate to the point where the next skill can begin. Returns whether the robot stopped
    within 0.2 m of it."""
    skill = Skill(policy)
    goal_2 = point_before(env, target_2)
    stopped = False
    observation = env.see(goal_2)
    for _ in range(pointnav.STEP_LIMIT):
        observation, stopped = env.navigate(int(skill.act(observation)[0]), goal_2)
        if stopped:
            break
    return stopped and math.dist(env.position, goal_2) <= pointnav.SUCCESS_M


def run_skill(env, policy, name):
    """Run Pick or Place from the robot's position until it stops. Returns whether the skill
    succeeded."""
    skill = Skill(policy)
    observation, info = env.begin(name)
    ended = False
    while not ended:
        observation, _, terminated, truncated, info = env.step(skill.act(observation))
        ended = terminated or truncated
    env.begin(name)  # folds the arm: the next skill has learned from there
    return bool(info["success"])


def run_chain(env, policies):
    """The planner: run Navigate, Pick, Navigate and Place. If `policies` has no `navigate`, run
    only Pick and Place. The robot does not notice that a skill has failed, but without the object
    it cannot place anything. Returns a list of stages: name, whether everything has succeeded so
    far, path."""
    stages = []
    well = True
    for stage in ("navigate", "pick", "navigate", "place"):
        if stage not in policies:
            continue
        begins = len(env.path) - 1
        if stage == "navigate":
            done = run_navigate(env, policies[stage], env.place if env.holds else env.object)
        else:
            done = run_skill(env, policies[stage], stage)
        well = well and done
        stages.append((stage, well, np.array(env.path[begins:])))
        if stage == "pick" and not env.holds:
            break
    return stages
