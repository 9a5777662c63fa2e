"""Mobile manipulation: each task can be done, nothing else counts as success, and the planner
chains the skills."""

import math

import numpy as np
import pytest
import torch
from gymnasium.utils.env_checker import check_env

import ver_ppo
from notebooks.environments import pointnav, rearrange
from notebooks.extensions import chain, play
from tests.helpers import run_here, saved


class Arm:
    """Does a skill, from the observation alone: turns the arm to the goal, reaches for it, closes
    or opens the gripper, and stops."""

    def __init__(self, name):
        self.name = name

    def act(self, observation):
        (distance, cos, sin), (length, swing, holds) = observation["goal"], observation["arm"]
        angle = math.atan2(sin, cos)
        goal_2 = (distance * cos, distance * sin)
        gripper_2 = (length * math.cos(swing), length * math.sin(swing))
        reached = math.dist(goal_2, gripper_2) < 0.09
        if self.name == "pick":
            closed, stopped = reached or holds, holds
        else:
            closed, stopped = holds and not reached, not holds
        move = (distance - length) / rearrange.ARM_M, (angle - swing) / rearrange.ARM_RAD
        return np.array([*move, 1 if closed else -1, 1 if stopped else -1, 0, 0], np.float32)


class Legs:
    """Follows the shortest path to the planner's goal."""

    def __init__(self, env):
        self.env = env

    def act(self, observation):
        env, distance = self.env, observation["goal"][0]
        if distance < 0.15:
            return [0]
        angle = math.atan2(observation["goal"][2], observation["goal"][1]) + env.heading
        goal_2 = env.position + distance * np.array([math.cos(angle), math.sin(angle)])
        env.goal = goal_2
        env.aim(goal_2)
        offset = env.shortest_path()[1] - env.position
        turn = (math.atan2(offset[1], offset[0]) - env.heading + math.pi) % (2 * math.pi) - math.pi
        return [1 if abs(turn) < math.radians(5.1) else 2 if turn > 0 else 3]


def small(skill="pick", base=True):
    return rearrange.Rearrange(skill, base, "val", image_size=8)


@pytest.mark.filterwarnings("ignore:.*infinity")  # of Gymnasium's checker: a goal may be anywhere
@pytest.mark.parametrize("name", ["Pick", "Place", "PickArm", "PlaceArm"])
def test_skills(name):
    """Each skill is a Gymnasium environment. The arm alone can do it, within reach. The rewards add
    up to the gain."""
    env_id = f"notebooks.environments.rearrange:{name}-v0"
    env = ver_ppo.make_env(ver_ppo.Options(env_id=env_id, env_kwargs=("image_size=8",)), "val")
    assert env.unwrapped.split == "val" and env.observation_space["depth"].shape == (8, 8, 1)
    check_env(env.unwrapped, skip_render_check=True)
    for seed in range(50):
        (observation, _) = env.reset(seed=seed)
        skill = Arm(env.unwrapped.skill)
        total = 0.0
        ended = False
        begun = env.unwrapped.measure()
        assert rearrange.STARTS_M[0] <= observation["goal"][0] <= rearrange.STARTS_M[1]
        while not ended:
            action = skill.act(observation)[: env.action_space.shape[0]]
            observation, reward, terminated, truncated, info = env.step(action)
            total, ended = total + reward, terminated or truncated
        assert info["success"] == 1.0 and env.unwrapped.steps < 20
        gained = env.unwrapped.measure() - begun - 0.01 * env.unwrapped.steps + 2.5
        assert total == pytest.approx(gained)


def test_only_by_doing():
    """Stopping without the object, or with it in the wrong place, is not a success. A gripper that
    opens loses the object."""
    cases = ("pick", 1), ("pick", -1), ("place", 1), ("place", -1)  # the last: put down here
    for skill, grip in cases:
        env = small(skill)
        env.reset(seed=0)
        _, reward, terminated, _, info = env.step(np.array([0, 0, grip, 1, 0, 0]))
        assert terminated and info["success"] == 0.0 and reward == pytest.approx(-0.01)
        assert env.holds == (skill == "place" and grip == 1)
    env = small("pick")
    env.reset(seed=0)
    env.object = env.gripper
    env.score = env.measure()
    gained = [env.step(np.array([0, 0, grip, -1, 0, 0]))[1] for grip in (1, -1, 1)]
    # what lies within reach can be grasped again
    assert gained == pytest.approx([0.99, -1.01, 0.99])
    # it comes along
    assert not env.step(np.array([0, 0, 1, -1, 1, 1]))[2]
    assert math.dist(env.object, env.gripper) == 0


def test_the_arm_ends_at_walls():
    """The gripper never reaches into a wall or a piece of furniture."""
    env, rng = small(), np.random.default_rng(0)
    for seed in range(20):
        env.reset(seed=seed)
        for _ in range(20):
            env.step(
                np.array([1, rng.uniform(-1, 1), -1, -1, rng.uniform(-1, 1), rng.uniform(-1, 1)])
            )
            assert not pointnav.overlaps(np.tile(env.gripper, 2), env.plan.boxes_K4).any()


@pytest.mark.parametrize("navigate", [True, False])
def test_chain(monkeypatch, navigate):
    """With skills that never fail, the chain fetches the object and brings it to its place.
    Navigate ends 0.6 m before its target. Without Navigate, the arm cannot reach."""
    monkeypatch.setattr(chain, "Skill", lambda skill: skill)
    whole = 0
    for seed in range(12):
        env = chain.begin(seed, image_size=8)
        object_2, place_2 = env.object, env.place
        assert env.waypoints(env.position).min() >= 1 and math.dist(object_2, place_2) > 0
        policies = {"pick": Arm("pick"), "place": Arm("place")}
        if navigate:
            policies["navigate"] = Legs(env)
        stages = chain.run_chain(env, policies)
        names = [name for name, _, _ in stages]
        whole_chain = ["navigate", "pick", "navigate", "place"]
        assert names == (whole_chain[: len(stages)] if navigate else ["pick"])
        if navigate:
            assert math.dist(stages[0][2][-1], object_2) < 0.6 + 0.25
            assert all(
                math.dist(one[2][-1], other[2][0]) < 1e-9 for one, other in zip(stages, stages[1:])
            )
        if stages[-1][0] == "place" and stages[-1][1]:
            whole += 1
            assert math.dist(env.object, place_2) <= rearrange.PLACE_M and not env.holds
    assert whole >= 6 if navigate else whole == 0


def test_skill_runs(tmp_path):
    """A policy trained by ver_ppo.py acts in the chain. Its memory begins empty with each skill."""
    line = "--env-id notebooks.environments.rearrange:Pick-v0 --env-kwargs image_size=16"
    folder = run_here(tmp_path, f"{line} --num-workers 0 --total-timesteps 128")
    policy, options = play.load_policy(folder, trust=True)
    assert options.env_kwargs == ("image_size=16",) and options.device == "cpu"
    weights = saved(folder)["policy"]
    assert all(torch.equal(weights[name], tensor) for name, tensor in policy.state_dict().items())
    env = chain.begin(0, image_size=16)
    success = chain.run_skill(env, policy, "pick")
    assert env.holds or not success
    assert (env.length, env.swing) == (rearrange.REACH_M[0], 0.0)  # folded
    skill = chain.Skill(policy)
    assert not skill.state.any() and skill.act(env.observe()).shape == (6,) and skill.state.any()
