"""The built-in PointNav, and everything that Gymnasium environments may bring."""

import heapq
import math

import gymnasium as gym
import numpy as np
import pytest
import torch
import ver_ppo
from gymnasium.utils.env_checker import check_env

import tests.envs as envs

STOP, FORWARD, LEFT, RIGHT = range(4)


def follow_shortest_path(env):
    """What a walker who knows the plan does next."""
    if np.hypot(*(env.goal - env.position)) < 0.19:
        return STOP
    ahead = env.shortest_path()[1] - env.position
    error = (math.atan2(ahead[1], ahead[0]) - env.heading + math.pi) % (2 * math.pi) - math.pi
    return FORWARD if abs(error) <= math.radians(5) + 1e-9 else LEFT if error > 0 else RIGHT


def play(env, choose, seed):
    """One episode: its infos, rewards and how it ended."""
    env.reset(seed=seed)
    rewards = []
    while True:
        _, reward, terminated, truncated, info = env.step(choose(env))
        rewards.append(reward)
        if terminated or truncated:
            return info, rewards, terminated, truncated


@pytest.mark.parametrize("split", ["train", "val"])
def test_oracle(split):
    """Who follows the shortest path always succeeds, with SPL above 0.97."""
    infos = [play(ver_ppo.PointNav(split), follow_shortest_path, seed)[0] for seed in range(100)]
    assert all(info["success"] for info in infos)
    assert np.mean([info["spl"] for info in infos]) > 0.97


def grid_distance(plan, start, goal, spacing=0.04):
    """Dijkstra on a fine grid with 16 neighbours: at most 2.8 % longer than the shortest path, and free as it."""
    size = (plan.size / spacing).astype(int)
    points = np.stack(np.meshgrid(*(np.arange(n) * spacing for n in size), indexing="ij"), -1).reshape(-1, 2)
    free = plan.is_free(points).reshape(size)
    moves = [(i, j) for i in range(-2, 3) for j in range(-2, 3) if math.gcd(i, j) == 1]
    begin, end = (tuple((point / spacing).round().astype(int)) for point in (start, goal))
    best, queue = {begin: 0.0}, [(0.0, begin)]
    while queue:
        length, cell = heapq.heappop(queue)
        if cell == end:
            return length
        if length > best[cell]:
            continue
        for i, j in moves:
            other = (cell[0] + i, cell[1] + j)
            middle = (round(cell[0] + i / 2), round(cell[1] + j / 2))
            if 0 <= other[0] < size[0] and 0 <= other[1] < size[1] and free[other] and free[middle]:
                candidate = length + spacing * math.hypot(i, j)
                if candidate < best.get(other, math.inf):
                    best[other] = candidate
                    heapq.heappush(queue, (candidate, other))
    return math.inf


@pytest.mark.parametrize("seed", range(4))
def test_geodesic_distance(seed):
    """Exact shortest paths agree with a grid search, within what the grid can resolve."""
    env = ver_ppo.PointNav()
    env.reset(seed=seed)
    expected = grid_distance(env.plan, env.position, env.goal)
    assert env.geodesic <= expected + 0.1 and env.geodesic >= expected / 1.03 - 0.1
    assert env.geodesic >= np.hypot(*(env.goal - env.position)) - 1e-9


def test_rewards():
    """Rewards add up to the distance gained, the slack of 0.01 for each step, and 2.5 SPL."""
    env = ver_ppo.PointNav()
    info, rewards, terminated, truncated = play(env, follow_shortest_path, 5)
    assert terminated and not truncated
    gained = env.start_geodesic - info["distance_to_goal"]
    assert sum(rewards) == pytest.approx(gained - 0.01 * len(rewards) + 2.5 * info["spl"])
    assert info["spl"] == pytest.approx(env.start_geodesic / max(env.path_m, env.start_geodesic))
    info, rewards, terminated, _ = play(env, lambda env: STOP, 6)
    assert terminated and info["success"] == info["spl"] == 0 and rewards == [pytest.approx(-0.01)]


def test_step_limit_is_truncation():
    """The 500th step truncates and does not terminate."""
    env = ver_ppo.PointNav()
    info, rewards, terminated, truncated = play(env, lambda env: LEFT, 0)
    assert len(rewards) == 500 and truncated and not terminated


def test_collisions_slide():
    """Nobody ever enters an obstacle; who walks along a wall at an angle moves on along it."""
    env, rng = ver_ppo.PointNav(), np.random.default_rng(0)
    slid = 0
    for seed in range(10):
        env.reset(seed=seed)
        for _ in range(200):
            before = env.position
            env.step(int(rng.choice([FORWARD, FORWARD, FORWARD, LEFT, RIGHT])))
            assert env.plan.is_free(env.position[None])[0] and np.isfinite(env.geodesic)
            moved = env.position - before
            assert np.hypot(*moved) <= 0.25 + 1e-9
            slid += 0 < np.hypot(*moved) < 0.24 and min(abs(moved)) < 1e-9
    assert slid > 20


def test_camera():
    """Depth along the optical axis of a wall straight ahead, floor and ceiling; left of the image is the agent's left."""
    env = ver_ppo.PointNav(image_size=64)
    env.reset(seed=0)
    env.plan = ver_ppo.FloorPlan(np.random.default_rng(0))
    env.plan.boxes_K4 = np.array([[5.0, -9.0, 6.0, 9.0], [3.0, 0.5, 4.0, 9.0]])  # a wall at 5 m; on the left one at 3 m
    env.position, env.heading = np.zeros(2), 0.0
    depth_HW = env.observe()["depth"][..., 0] * 10
    assert depth_HW[31, 40] == pytest.approx(5.0) and depth_HW[32, 50] == pytest.approx(5.0)
    assert depth_HW[31, 10] == pytest.approx(3.0)
    assert depth_HW[63, 32] == pytest.approx(1.25 / (63 / 64), rel=1e-5)
    assert depth_HW[0, 32] == pytest.approx(1.25 / (63 / 64), rel=1e-5)
    env.goal = np.array([0.0, 2.0])  # to the left
    np.testing.assert_allclose(env.observe()["goal"], [2.0, 0.0, 1.0], atol=1e-6)


def test_ray_boxes_against_marching():
    """The slab test finds the first box as small steps along the ray do."""
    rng = np.random.default_rng(0)
    low = rng.uniform(-5, 5, (12, 2))
    boxes = np.concatenate([low, low + rng.uniform(0.2, 1.5, (12, 2))], axis=1)
    origin = np.array([0.0, 0.0])
    boxes = boxes[~ver_ppo.overlaps(np.zeros(4), boxes)]
    directions = rng.normal(size=(50, 2))
    reach_R, box_R = ver_ppo.ray_boxes(origin, directions, boxes)
    for direction, reach, box in zip(directions, reach_R, box_R):
        marched = np.arange(0, 20, 0.002)[:, None] * direction
        inside = ver_ppo.overlaps(np.tile(marched, 2)[:, None], boxes)
        if np.isfinite(reach):
            at = inside.any(axis=1).argmax()
            assert abs(at * 0.002 - reach) < 0.004 and inside[at, box]
        else:
            assert not inside.any()


def test_splits_are_disjoint():
    """No validation plan equals a training plan, and seeds of the two splits differ."""
    train = {ver_ppo.floor_plan("train", i).boxes_K4.tobytes() for i in range(ver_ppo.NUM_PLANS["train"])}
    val = {ver_ppo.floor_plan("val", i).boxes_K4.tobytes() for i in range(ver_ppo.NUM_PLANS["val"])}
    assert len(train) == 256 and len(val) == 64 and not train & val
    seeds = [[ver_ppo.episode_seed(split, 1, env, k) for env in range(16) for k in range(50)] for split in ("train", "val")]
    assert len(set(seeds[0])) == 800 and not set(seeds[0]) & set(seeds[1])


@pytest.mark.filterwarnings("ignore:.*A Box observation space")  # the goal's distance has no bound
@pytest.mark.parametrize("camera, size", [("depth", 64), ("rgb", 64), ("depth", 17), ("rgb", 128)])
def test_gymnasium_accepts_pointnav(camera, size):
    """Gymnasium's own checker, for several cameras; the seed alone decides what happens."""
    check_env(ver_ppo.PointNav(camera=camera, image_size=size, render_mode="rgb_array"), skip_render_check=True)
    results = []
    for _ in range(2):
        env = ver_ppo.PointNav(camera=camera, image_size=size)
        env.reset(seed=3)
        results.append([env.step(action)[0][camera] for action in (FORWARD, LEFT, FORWARD, FORWARD)])
    np.testing.assert_array_equal(*results)
    assert results[0][0].shape == (size, size, 1 if camera == "depth" else 3)


def test_plan_view():
    """The picture from above shows walls, path, goal and agent, and the camera's view beside the plan."""
    env = ver_ppo.PointNav(render_mode="rgb_array")
    env.reset(seed=1)
    for _ in range(3):
        env.step(follow_shortest_path(env))
    picture = env.render()
    assert picture.dtype == np.uint8 and picture.ndim == 3 and picture.shape[2] == 3
    colors = {tuple(color) for color in picture.reshape(-1, 3)}
    assert {(60, 60, 60), (40, 160, 40), (220, 60, 40), (120, 200, 120)} <= colors


def test_spaces_are_flattened():
    """Nested Dict spaces become one level; uint8 stays uint8, float64 becomes float32."""
    spec = ver_ppo.describe_env(ver_ppo.Options(env_id="tests.envs:Everything-v0"))
    assert list(spec.observations) == ["arm", "camera/grey", "camera/rgb", "first", "room", "switches"]
    buffers = ver_ppo.observation_buffers(spec, 4)
    assert buffers["camera/rgb"].dtype == torch.uint8 and buffers["camera/rgb"].shape == (4, 24, 20, 3)
    assert buffers["arm"].dtype == torch.float32 and buffers["room"].dtype == torch.int64
    assert spec.discrete_actions == [3, 2, 4] and spec.action_numbers == 3
    images = {key for key, space in spec.observations.items() if ver_ppo.is_image(space)}
    assert images == {"camera/grey", "camera/rgb", "first"}


def test_actions_reach_the_environment_as_it_wants_them():
    """Discrete with a start, MultiDiscrete, and Box scaled to its bounds and clipped there."""
    assert ver_ppo.to_env_action(envs.Count.action_space, np.array([0])) == -1
    box = envs.Continuous.action_space
    np.testing.assert_allclose(ver_ppo.to_env_action(box, np.array([0.0, 5.0])), [[2.0, 5.0]])
    np.testing.assert_allclose(ver_ppo.to_env_action(box, np.array([-3.0, -5.0])), [[0.0, -5.0]])


def make_row(env_id, **options):
    options = ver_ppo.Options(env_id=env_id, num_envs=1, **options)
    spec = ver_ppo.describe_env(options)
    transfer = ver_ppo.Transfer(spec, 1)
    return ver_ppo.EnvironmentRow(0, options, "train", spec, transfer), transfer


@pytest.mark.parametrize("env_id", ["tests.envs:Count-v0", "tests.envs:Autoreset-v0"])
def test_resets(env_id):
    """At a truncation the final observation is kept apart and the row holds the next episode's first; an autoreset
    wrapper changes nothing."""
    row, transfer = make_row(env_id)
    row.start(0, [])
    assert transfer.first[0] and transfer.obs["obs"][0, 0] == 0
    offset = transfer.obs["obs"][0, 1].item()
    for step in range(1, 15):
        row.step(np.array([2]))
        ended = step % 7 == 0
        assert transfer.truncated[0] == ended and not transfer.terminated[0] and transfer.first[0] == ended
        assert transfer.obs["obs"][0, 0].item() == pytest.approx(step % 7 / 10)
        if step == 7:
            assert transfer.final_obs["obs"][0].tolist() == [pytest.approx(0.7), pytest.approx(offset)]
            assert transfer.result[0].tolist() == [pytest.approx(0.7), 7]
            assert transfer.episode[0] == 1
            assert transfer.obs["obs"][0, 1].item() != offset  # another seed


def test_start_repeats_an_episode():
    """An environment is restored from its episode number and its actions."""
    row, transfer = make_row("pointnav")
    actions = [np.array([a]) for a in (1, 2, 1, 1, 3, 1)]
    row.start(4, actions)
    expected = {key: part.clone() for key, part in transfer.obs.items()}
    other, copied = make_row("pointnav")
    other.start(4, actions[:3])
    for action in actions[3:]:
        other.step(action)
    assert all(torch.equal(copied.obs[key], part) for key, part in expected.items())


def test_latency():
    """--sim-latency sleeps its mean; its spread is log-normal with mean 1 at each level."""
    row, _ = make_row("tests.envs:Count-v0", sim_latency=20.0, sim_latency_spread=(0.8, 0.5, 0.3))
    for sigma in (0.0, 0.5, 0.8):
        draws = np.array([row.draw_delay(sigma) for _ in range(20000)])
        assert draws.mean() == pytest.approx(1, abs=0.03) and np.log(draws).std() == pytest.approx(sigma, abs=0.02)
    assert {
        make_row("tests.envs:Count-v0", seed=seed, sim_latency_spread=(0, 0.5, 0))[0].env_delay for seed in range(3)
    } != {1.0}


def test_every_action_and_observation_has_a_policy_input():
    """Gradients reach every parameter: no encoder, embedding or head is left out."""
    for env_id in ("tests.envs:Everything-v0", "tests.envs:Continuous-v0", "pointnav", "CartPole-v1"):
        options = ver_ppo.Options(env_id=env_id, hidden_size=16)
        spec = ver_ppo.describe_env(options)
        policy = ver_ppo.Policy(spec, options)
        obs = {
            key: torch.stack([torch.as_tensor(space.sample()) for _ in range(6)]) for key, space in spec.observations.items()
        }
        obs = {key: part.to(ver_ppo.observation_dtype(spec.observations[key])) for key, part in obs.items()}
        obs = {key: torch.where(torch.isfinite(part), part, 0) for key, part in obs.items()}
        action = torch.zeros(6, spec.action_numbers, dtype=ver_ppo.action_dtype(spec)) + 1
        distribution, value, _ = policy.sequences(
            obs, action, torch.tensor([False] * 5 + [True]), torch.randn(2, *policy.state_shape), torch.tensor([2, 2, 2])
        )
        (distribution.log_prob(action).sum() + value.sum()).backward()
        missing = [name for name, p in policy.named_parameters() if p.requires_grad and (p.grad is None or not p.grad.any())]
        assert missing == [], env_id


def test_gym_space_kinds_are_complete():
    """Environments with one unsupported space are refused by name."""
    for env_id, word in (("TextObservation", "speech"), ("TupleAction", "action")):
        with pytest.raises(ver_ppo.UserError, match=word):
            ver_ppo.describe_env(ver_ppo.Options(env_id=f"tests.envs:{env_id}-v0"))
    assert isinstance(gym.make("tests.envs:Count-v0").unwrapped, envs.Count)
