"""The built-in PointNav, the observations and actions of any Gymnasium environment, wrappers."""

import heapq
import math
import time
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

import tests.envs as envs
import ver_ppo
from notebooks.environments import pointnav
from notebooks.extensions import wrappers
from tests.helpers import make_environment, make_spec, one_line, run_folders, small

STOP, FORWARD, LEFT, RIGHT = range(4)


def follow_shortest_path(env):
    """The next action of a walker who knows the plan."""
    if np.hypot(*(env.goal - env.position)) < 0.19:
        return STOP
    ahead = env.waypoints_C2[env.waypoints(env.position).argmin()] - env.position
    error = (math.atan2(ahead[1], ahead[0]) - env.heading + math.pi) % (2 * math.pi) - math.pi
    return FORWARD if abs(error) <= math.radians(5) + 1e-9 else LEFT if error > 0 else RIGHT


def play(env, choose, seed):
    """One episode: its last info, its rewards and how it ended."""
    env.reset(seed=seed)
    rewards = []
    while True:
        _, reward, terminated, truncated, info = env.step(choose(env))
        rewards.append(reward)
        if terminated or truncated:
            return info, rewards, terminated, truncated


@pytest.mark.parametrize("split", ["train", "val"])
def test_oracle(split):
    """A walker on the shortest path always succeeds, with SPL above 0.97."""
    infos = [
        play(pointnav.PointNav(split, image_size=8), follow_shortest_path, seed)[0]
        for seed in range(50)
    ]
    assert all(info["success"] for info in infos)
    assert np.mean([info["spl"] for info in infos]) > 0.97


def grid_distance(plan, start, goal, spacing=0.06):
    """The length of a path that Dijkstra's algorithm finds on a fine grid with 16 neighbors. It is
    at most 2.8 % longer than the shortest path, and as free."""
    size = (plan.size / spacing).astype(int)
    points = np.stack(
        np.meshgrid(*(np.arange(n) * spacing for n in size), indexing="ij"), -1
    ).reshape(-1, 2)
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


@pytest.mark.parametrize("seed", range(3))
def test_geodesic_distance(seed):
    """Exact shortest paths agree with a grid search, within the resolution of the grid."""
    env = pointnav.PointNav()
    env.reset(seed=seed)
    expected = grid_distance(env.plan, env.position, env.goal)
    assert expected / 1.03 - 0.1 <= env.geodesic <= expected + 0.1
    assert env.geodesic >= np.hypot(*(env.goal - env.position)) - 1e-9


def test_rewards():
    """Rewards add up to the distance gained, the slack of 0.01 for each step, and 2.5 SPL. A stop
    terminates."""
    env = pointnav.PointNav()
    info, rewards, terminated, truncated = play(env, follow_shortest_path, 5)
    assert terminated and not truncated
    gained = env.start_geodesic - info["distance_to_goal"]
    assert sum(rewards) == pytest.approx(gained - 0.01 * len(rewards) + 2.5 * info["spl"])
    assert info["spl"] == pytest.approx(env.start_geodesic / max(env.path_m, env.start_geodesic))
    info, rewards, terminated, _ = play(env, lambda env: STOP, 6)
    assert terminated and info["success"] == info["spl"] == 0 and rewards == [pytest.approx(-0.01)]


def test_step_limit_is_truncation():
    """The 500th step truncates and does not terminate."""
    _, rewards, terminated, truncated = play(pointnav.PointNav(image_size=8), lambda env: LEFT, 0)
    assert len(rewards) == 500 and truncated and not terminated


def test_collisions_slide():
    """The agent never enters an obstacle. If it walks into a wall at an angle, it moves along the
    wall."""
    env, rng, slid = pointnav.PointNav(image_size=8), np.random.default_rng(0), 0
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
    """Depth along the optical axis of a wall straight ahead, floor and ceiling; left of the image
    is the agent's left."""
    env = pointnav.PointNav(image_size=64)
    env.reset(seed=0)
    env.plan = pointnav.FloorPlan(np.random.default_rng(0))
    ahead, left = [5.0, -9.0, 6.0, 9.0], [3.0, 0.5, 4.0, 9.0]  # walls at 5 m and at 3 m
    env.plan.boxes_K4 = np.array([ahead, left])
    env.position, env.heading = np.zeros(2), 0.0
    depth_HW = env.observe()["depth"][..., 0] * 10
    assert depth_HW[31, 40] == pytest.approx(5.0) and depth_HW[32, 50] == pytest.approx(5.0)
    assert depth_HW[31, 10] == pytest.approx(3.0)
    assert depth_HW[63, 32] == depth_HW[0, 32] == pytest.approx(1.25 / (63 / 64), rel=1e-5)
    env.goal = np.array([0.0, 2.0])  # to the left
    np.testing.assert_allclose(env.observe()["goal"], [2.0, 0.0, 1.0], atol=1e-6)


def test_splits_are_disjoint():
    """No validation plan equals a training plan, and seeds of the two splits differ."""
    plans = [
        {pointnav.floor_plan(split, i).boxes_K4.tobytes() for i in range(pointnav.NUM_PLANS[split])}
        for split in ("train", "val")
    ]
    assert len(plans[0]) == 256 and len(plans[1]) == 64 and not plans[0] & plans[1]
    seeds = {
        ver_ppo.derive_seed(val, 1, env, episode)
        for val in (0, 1)
        for env in range(16)
        for episode in range(50)
    }
    assert len(seeds) == 1600 and max(seeds) < 2**32


@pytest.mark.parametrize("camera, size", [("depth", 64), ("rgb", 64), ("depth", 17), ("rgb", 128)])
def test_gymnasium_accepts_pointnav(camera, size):
    """Gymnasium's own checker accepts several cameras. The seed alone decides all that happens, and
    the picture is the camera's."""
    env = pointnav.PointNav(camera=camera, image_size=size)
    check_env(env, skip_render_check=True)
    found = []
    for _ in range(2):
        env.reset(seed=3)
        found.append([env.step(action)[0][camera] for action in (FORWARD, LEFT, FORWARD, FORWARD)])
    np.testing.assert_array_equal(*found)
    assert found[0][0].shape == (size, size, 1 if camera == "depth" else 3)
    picture, seen = env.render(), found[0][-1] * (255 if camera == "depth" else 1)
    assert picture.shape == (size, size, 3)
    assert picture.dtype == np.uint8
    assert abs(picture - np.floor(seen)).max() <= 1


def test_parts_of_an_observation(capsys):
    """Nested Dict and Tuple spaces become one level. Images stay as they are, every other part is a
    vector of float32. Parts that hold neither numbers nor choices are left out, with a line that
    names them. Numbers that may be large are marked, to be normalized."""
    environment, io = make_environment("tests.envs:Everything-v0")
    spec = environment.spec
    assert spec.obs == {
        "arm": ("float32", (6,), True),  # no bounds
        "camera/grey": ("float32", (16 * 16,), True),  # two dimensions are no image
        "camera/rgb": ("uint8", (24, 20, 3), True),
        "first": ("uint8", (3, 36, 40), True),
        "hand/0": ("float32", (2 + 3 + 1 + 4,), False),  # choices
        "hand/1": ("float32", (9,), True),  # bytes, but no image
        "room": ("float32", (4,), False),
        "switches": ("float32", (5,), False),
    }
    left_out = [line.split("'")[1] for line in capsys.readouterr().out.splitlines()]
    assert sorted(left_out) == ["hand/2", "hand/3", "map"]
    assert spec.choices == [3, 2, 4] and spec.action_dims == 3
    assert io["action"].shape == (1, 3) and io["action"].dtype == np.int64
    assert io["obs"]["camera/rgb"].dtype == np.uint8
    assert io["obs"]["arm"].dtype == np.float32
    environment.answer()
    assert io["obs"]["room"].sum() == 1


def test_choices_are_one_hot_and_bytes_are_numbers():
    """Each part of an observation equals numbers by hand. Choices may begin with another number
    than 0."""
    space = envs.Everything.observation_space
    spec = make_spec(space, gym.spaces.Discrete(2))
    observation = space.sample()
    observation["room"] = 2 + 3  # the last of four
    observation["arm"] = np.array([[1.5, -2, 3], [4, 5, 6]])
    observation["switches"] = np.array([1, 0, 0, 1, 1], np.int8)
    hand = [np.array([[1, 5 + 2], [0, -2 + 3]]), np.arange(9, dtype=np.uint8)]
    observation["hand"] = (*hand, *observation["hand"][2:])
    parts = ver_ppo.read_observation(spec, space, observation)
    assert parts.keys() == spec.obs.keys()
    assert (parts["camera/rgb"] == observation["camera"]["rgb"]).all()
    assert (parts["camera/grey"] == observation["camera"]["grey"].ravel()).all()
    assert (parts["first"] == observation["first"]).all()
    assert parts["room"].tolist() == [0, 0, 0, 1]
    assert parts["arm"].tolist() == [1.5, -2, 3, 4, 5, 6]
    assert parts["switches"].tolist() == [1, 0, 0, 1, 1]
    # two choices, three, one, four
    assert parts["hand/0"].tolist() == [*[0, 1], *[0, 0, 1], *[1], *[0, 0, 0, 1]]
    assert parts["hand/1"].tolist() == list(range(9))
    kinds = {key: (part.dtype.name, part.shape) for key, part in parts.items()}
    assert kinds == {key: (kind, shape) for key, (kind, shape, _) in spec.obs.items()}


def test_observations_without_a_dictionary():
    """A single part is called `obs`."""
    for space, example, vector in (
        (gym.spaces.Discrete(3, start=-1), -1, [1, 0, 0]),
        (gym.spaces.Box(0, 1, (2,)), [0.25, 1.0], [0.25, 1.0]),
        (gym.spaces.Box(-1, 1, ()), 0.5, [0.5]),
    ):
        spec = make_spec(space, gym.spaces.Discrete(2))
        parts = ver_ppo.read_observation(spec, space, example)
        assert {key: part.tolist() for key, part in parts.items()} == {"obs": vector}


BAD_PARTS = [
    (gym.spaces.Box(-1, 1, (2,)), [0.0, np.nan]),
    (gym.spaces.Box(-1, 1, (2,)), [0.0, -np.inf]),
    (gym.spaces.Box(-1, 1, (2,)), [0.0, 1e39]),  # more than float32 can hold
    (gym.spaces.Box(-1, 1, (2,)), [0.0]),
    (gym.spaces.Box(0, 255, (8, 8, 1), np.uint8), np.full((8, 8, 1), 256)),
    (gym.spaces.Box(0, 255, (8, 8, 1), np.uint8), np.full((8, 8, 1), 0.5)),
    (gym.spaces.Box(0, 255, (8, 8, 1), np.uint8), np.zeros((8, 9, 1), np.uint8)),
    (gym.spaces.Box(0, 1, (8, 8, 3)), np.full((8, 8, 3), np.nan)),
    (gym.spaces.Box(0, 9, (2,), np.int64), [1.0, np.nan]),
    (gym.spaces.Box(0, 9, (2,), np.int64), [[1, 2]]),
    (gym.spaces.Discrete(4), [1, 2]),
    (gym.spaces.Discrete(4, start=2), 1),
    (gym.spaces.Discrete(4, start=2), 6),
    (gym.spaces.Discrete(4), 0.5),
    (gym.spaces.MultiDiscrete([2, 3]), [1, 3]),
    (gym.spaces.MultiBinary(2), [0, 2]),
    (gym.spaces.MultiBinary(2), [1, 0, 1]),
]


@pytest.mark.parametrize("space, part", BAD_PARTS)
def test_observations_that_do_not_fit(space, part):
    """A wrong shape, and numbers that are not finite or do not fit, are an error that names the
    part."""
    space = gym.spaces.Dict({"arm": space})
    spec = make_spec(space, gym.spaces.Discrete(2))
    with pytest.raises(ValueError, match="observation 'arm'"), np.errstate(over="ignore"):
        ver_ppo.read_observation(spec, space, {"arm": part})
    fine = space.sample()
    assert ver_ppo.read_observation(spec, space, fine).keys() == {"arm"}


def test_actions_reach_the_environment_as_it_wants_them():
    """Discrete and MultiDiscrete with a start, and Box scaled to its bounds and clipped there."""
    assert ver_ppo.to_env_action(envs.Count.action_space, np.array([0])) == -1
    action = ver_ppo.to_env_action(envs.Everything.action_space, np.array([2, 0, 3]))
    assert action.tolist() == [2, 0, 3]
    grid = gym.spaces.MultiDiscrete([[2, 3], [1, 4]], start=[[0, 5], [0, -2]])
    action = ver_ppo.to_env_action(grid, np.array([1, 2, 0, 0]))
    assert action.tolist() == [[1, 7], [0, -2]] and action in grid
    box = envs.Continuous.action_space
    np.testing.assert_allclose(ver_ppo.to_env_action(box, np.array([0.0, 5.0])), [[2.0, 5.0]])
    np.testing.assert_allclose(ver_ppo.to_env_action(box, np.array([-3.0, -5.0])), [[0.0, -5.0]])
    most = np.finfo(np.float32).max
    box = gym.spaces.Box(-most, most, (2,))  # is as good as without bounds
    assert ver_ppo.to_env_action(box, np.array([0.5, -3.0])).tolist() == [0.5, -3.0]


def test_environments_are_told_what_they_ask_for():
    """Options, split and number go to environments that are registered with arguments of these
    names."""
    options = ver_ppo.Options(env_id="tests.envs:Told-v0")
    assert ver_ppo.make_env(options, "val", 3).unwrapped.told == (options, "val", 3, 9)
    assert isinstance(
        ver_ppo.make_env(ver_ppo.Options(env_id="tests.envs:Count-v0")).unwrapped, envs.Count
    )


BAD_ARGUMENTS = {  # of PointNav, and a part of the answer
    "simulator=gazebo": "simulator=gazebo: must be auto, builtin or habitat",
    "camera=lidar": "camera=lidar: must be depth or rgb",
    "image_size=7": "image_size=7: must be a whole number within 8..1024",
    "image_size=1025": "within 8..1024",
    "image_size=large": "within 8..1024",
    "image_size=64.0": "within 8..1024",
    "camra=rgb": "camra is no argument of PointNav: simulator, camera, image_size",
    "simulator=builtin habitat.seed=3": "habitat.seed is Habitat's: not with simulator=builtin",
}


@pytest.mark.parametrize("env_id", ["pointnav", "notebooks.environments.tasks:Flee-v0"])
@pytest.mark.parametrize("words", BAD_ARGUMENTS)
def test_bad_arguments_of_pointnav(tmp_path, capsys, env_id, words):
    """Refused in one line that says what can be given, before a run folder is made; the tasks pass
    their arguments on."""
    line = f"--env-id {env_id} --num-workers 0 --env-kwargs {words}"
    one_line(capsys, small(tmp_path, *line.split()), BAD_ARGUMENTS[words])
    assert run_folders(tmp_path) == []


@pytest.mark.parametrize("name", ["Pick", "PlaceArm"])
@pytest.mark.parametrize("words", ["camera=lidar", "image_size=7", "camra=rgb"])
def test_bad_arguments_of_rearrange(tmp_path, capsys, name, words):
    """The robot with an arm refuses them in the same way."""
    line = f"--env-id notebooks.environments.rearrange:{name}-v0 --num-workers 0"
    line += f" --env-kwargs {words}"
    one_line(capsys, small(tmp_path, *line.split()), words.split("=")[0])
    assert run_folders(tmp_path) == []


@pytest.mark.parametrize(
    "name, local_rank, speaks",
    [
        ("MainProcess", "0", True),
        ("trial 0", "0", True),
        ("trial 0", "1", False),
        ("train 0", "0", False),
    ],
)
def test_the_simulator_is_said_once(monkeypatch, capsys, name, local_rank, speaks):
    """auto tries Habitat, and takes the built-in simulator if Habitat is missing. It says so once
    in a process, but not in workers. A simulator that was chosen by name is not said."""
    tried = []

    def missing(config, lines):
        tried.append(config)
        raise ValueError("it is not there")

    monkeypatch.setattr(pointnav, "require_habitat", missing)
    process = SimpleNamespace(name=name)
    monkeypatch.setattr(pointnav.multiprocessing, "current_process", lambda: process)
    monkeypatch.setenv("LOCAL_RANK", local_rank)
    pointnav.choose_simulator.cache_clear()
    pointnav.say_once.cache_clear()
    for words in ((), ("image_size=16",), ("image_size=16", "camera=rgb"), ("simulator=auto",)):
        env = ver_ppo.make_env(ver_ppo.Options(env_kwargs=words))
        assert isinstance(env.unwrapped, pointnav.PointNav)
    assert tried == [pointnav.POINTNAV]
    said = "simulator: built-in (it is not there)\n" if speaks else ""
    assert capsys.readouterr().out == said
    pointnav.choose_simulator.cache_clear()
    ver_ppo.make_env(ver_ppo.Options(env_kwargs=("simulator=builtin",)))
    assert len(tried) == 1 and capsys.readouterr().out == ""


def test_terminated_and_truncated(monkeypatch):
    """If an environment says both, the episode is terminated, because nothing follows."""
    environment, io = make_environment("tests.envs:Count-v0")
    environment.answer()
    monkeypatch.setattr(envs.Count, "advance", lambda self, _: (self.observe(), 1, True, True, {}))
    environment.answer()
    assert io["terminated"][0] and not io["truncated"][0] and io["first"][0]


@pytest.mark.parametrize("env_id", ["tests.envs:Count-v0", "tests.envs:Autoreset-v0"])
def test_resets(env_id):
    """The first answer is no step. At a truncation the final observation is kept apart, and the row
    holds the first one of the next episode. An autoreset wrapper changes nothing."""
    environment, io = make_environment(env_id)
    environment.answer()
    assert io["first"][0] and io["started"][0]
    assert io["step_sec"][0] > 0
    assert io["episode"][0] == 1
    assert io["obs"]["obs"][0, 0] == 0
    offset = io["obs"]["obs"][0, 1].item()
    io["action"][0] = 2
    for step in range(1, 15):
        environment.answer()
        ended = step % 7 == 0
        assert io["truncated"][0] == ended == io["first"][0] and not io["terminated"][0]
        assert not io["started"][0]
        assert io["obs"]["obs"][0, 0].item() == pytest.approx(step % 7 / 10)
        assert io["step_sec"][0] > 0
        if step == 7:
            assert io["final_obs"]["obs"][0].tolist() == [pytest.approx(0.7), pytest.approx(offset)]
            assert io["episode_stats"][0].tolist() == [pytest.approx(0.7), 7]
            assert io["episode"][0] == 2
            assert io["obs"]["obs"][0, 1].item() != offset  # another seed


def crash(*_, **__):
    raise RuntimeError("the simulator has crashed")


@pytest.mark.parametrize("method, steps", [("step", 0), ("step", 3), ("step", 7), ("reset", 6)])
def test_lost_steps(capsys, method, steps):
    """An exception in a step, or in the reset after an episode, reaches the worker as it is, after
    a line that says where it happened. The environment that takes its place answers `started`, and
    begins a new episode."""
    environment, io = make_environment("tests.envs:Count-v0")
    row = io.records[0]
    row["action"] = 2
    for _ in range(1 + steps):
        environment.answer()
    shown = row["obs"].copy()
    setattr(environment.env.unwrapped, method, crash)
    with pytest.raises(RuntimeError, match="has crashed"):
        environment.answer()
    episode = 2 if steps >= 7 or method == "reset" else 1
    step = 1 + steps % 7
    assert capsys.readouterr().err == f"environment 0, episode {episode}, step {step}:\n"
    assert row["episode"] == episode
    stats = row["episode_stats"].copy()
    environment.env.unwrapped.close = crash
    environment.close()  # an error here changes nothing

    other = ver_ppo.Environment(0, environment.options, "train", environment.spec, io)
    began_at = time.perf_counter()
    other.answer()
    assert row["started"]
    assert began_at <= row["began_at"] < row["began_at"] + row["step_sec"] <= time.perf_counter()
    assert row["first"] and row["episode"] == episode + 1
    assert row["obs"]["obs"][0] == 0 and row["obs"] != shown  # another seed
    assert (row["episode_stats"] == stats).all()  # the episode that crashed does not count
    other.answer()
    assert not row["started"] and not row["first"] and row["reward"] == pytest.approx(0.1)


@pytest.mark.parametrize("reward", [np.nan, -np.inf, 1e39, np.ones(3), None])
def test_rewards_that_are_no_numbers(monkeypatch, reward):
    """They are an error, before an episode can end with them."""
    environment, io = make_environment("tests.envs:Count-v0")
    environment.answer()
    monkeypatch.setattr(envs.Count, "advance", lambda *_: (np.zeros(2), reward, True, False, {}))
    with pytest.raises((ValueError, TypeError)), np.errstate(over="ignore"):
        environment.answer()
    assert io["reward"][0] == 0 and io["episode"][0] == 1


def test_latency(monkeypatch):
    """Latency sleeps its mean; its spread is log-normal with this mean."""
    slept = []
    monkeypatch.setattr(ver_ppo.time, "sleep", slept.append)
    for number, sigma in enumerate((0.0, 0.5, 0.8)):
        wrappers = (f"latency(mean_ms=20.0, spread={sigma})",)
        options = ver_ppo.Options(env_id="tests.envs:Count-v0", wrappers=wrappers)
        env = ver_ppo.make_env(options, "train", number)
        env.reset(seed=number)
        slept.clear()
        for _ in range(20000):
            env.step(0)
        assert np.mean(slept) == pytest.approx(0.02, rel=0.03)
        assert np.log(slept).std() == pytest.approx(sigma, abs=0.02)


def test_latency_between_environments(monkeypatch):
    """Each environment has a mean of its own, which its number determines and every episode keeps.
    The means have the mean and the spread that were asked for."""
    slept = []
    monkeypatch.setattr(ver_ppo.time, "sleep", slept.append)
    wrappers = ("latency(mean_ms=20, spread=0, between=0.6)",)
    means = []
    last, _ = make_environment("tests.envs:Count-v0", 999, wrappers=wrappers)
    for number in [0, *range(1000)]:
        io = ver_ppo.EnvIO(last.spec, number + 1)
        environment = ver_ppo.Environment(number, last.options, "train", last.spec, io)
        slept.clear()
        for _ in range(15):  # the start, and two episodes of 7 steps
            environment.answer()
        assert len(slept) == 14 and len(set(slept)) == 1
        means.append(slept[0])
    assert means[0] == means[1] and len(set(means)) == 1000
    assert np.mean(means) == pytest.approx(0.02, rel=0.05)
    assert np.log(means).std() == pytest.approx(0.6, abs=0.04)


def test_latency_has_its_own_seed(monkeypatch):
    """Every environment and every episode sleeps other times, but the same ones for the same seed.
    The environment's own random numbers do not change."""
    slept, offsets = [], []
    monkeypatch.setattr(ver_ppo.time, "sleep", slept.append)
    for number in (0, 1, 0):
        environment, io = make_environment("tests.envs:Count-v0", number, wrappers=("latency",))
        slept.clear()
        for _ in range(15):  # the start, and two episodes of 7 steps
            environment.answer()
        assert len(set(slept)) == len(slept) == 14
        offsets.append([*slept])
    assert offsets[0] == offsets[2] and not set(offsets[0]) & set(offsets[1])
    plain = ver_ppo.make_env(ver_ppo.Options(env_id="tests.envs:Count-v0"))
    slow = ver_ppo.make_env(ver_ppo.Options(env_id="tests.envs:Count-v0", wrappers=("latency",)))
    np.testing.assert_array_equal(plain.reset(seed=7)[0], slow.reset(seed=7)[0])


@pytest.mark.parametrize(
    "words", ["mean_ms=-1", "spread=-0.1", "between=-1", "mean_ms='long'", "sleep=3"]
)
def test_bad_latency(tmp_path, capsys, words):
    """Refused in one line."""
    line = f"--env-id tests.envs:Count-v0 --num-workers 0 --wrappers latency({words})"
    one_line(capsys, small(tmp_path, *line.split()), words.split("=")[0])
    assert run_folders(tmp_path) == []


def test_resize():
    """Each pixel is the mean of those that it covers. Other parts stay as they are."""
    frames = gym.spaces.Box(0, 255, (12, 20, 3), np.uint8)
    space = gym.spaces.Dict({"rgb": frames, "goal": gym.spaces.Box(-1, 1, (2,))})
    env = gym.Env()
    env.observation_space = space
    resized = wrappers.Resize(env, height=6, width=10)
    observation = space.sample()
    shown = resized.observation(observation)
    means = observation["rgb"].reshape(6, 2, 10, 2, 3).mean(axis=(1, 3))
    assert shown in resized.observation_space
    assert np.abs(shown["rgb"] - means).max() <= 0.5
    assert (shown["goal"] == observation["goal"]).all()


def test_resize_rounds_integers():
    """A mean of 2.75 is 3, not 2, for bytes and for depth in millimeters."""
    for kind in (np.uint8, np.uint16, np.int32):
        env = gym.Env()
        env.observation_space = gym.spaces.Box(0, 200, (16, 16, 1), kind)
        image = np.tile(np.array([[2, 3], [3, 3]], kind), (8, 8))[:, :, None]
        resized = wrappers.Resize(env, height=8, width=8).observation(image)
        assert resized.dtype == kind and (resized == 3).all()


def test_hide():
    """The hidden numbers are 0, and the others stay. The environment can be made again from its
    spec."""
    hidden = "hide(indices=(1, 3))"
    options = ver_ppo.Options(env_id="CartPole-v1", wrappers=(hidden,))
    plain = gym.make("CartPole-v1")
    for env in (ver_ppo.make_env(options), gym.make(ver_ppo.make_env(options).spec)):
        whole, _ = plain.reset(seed=3)
        observation, _ = env.reset(seed=3)
        assert observation.tolist() == [whole[0], 0, whole[2], 0]
        assert observation in env.observation_space
