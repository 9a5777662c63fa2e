"""The adapter to Habitat: everywhere with a recording of Habitat, and with Habitat itself where it
is installed.

Tests with Habitat itself need habitat_sim, habitat, and a folder with datasets/pointnav/*/v1 and
scene_datasets (its train and val episodes are in one scene). The folder is $HABITAT_DATA, or
../shared/habitat/data.
"""

import ast
import importlib.util
import os
import subprocess
import sys
import threading
from pathlib import Path
from types import ModuleType
from types import SimpleNamespace as Namespace

import gymnasium as gym
import numpy as np
import pytest

import ver_ppo
from notebooks.environments import habitat, pointnav
from tests.helpers import ROOT, WHERE, one_line, run_folders, small

# habitat-lab 0.3.320260507, pointnav_habitat_test.yaml, 16 x 16 depth; and ObjectNav's category
SPACES = {
    "depth": gym.spaces.Box(0.0, 1.0, (16, 16, 1), np.float32),
    "pointgoal_with_gps_compass": gym.spaces.Box(
        -3.4028234663852886e38, 3.4028234663852886e38, (2,), np.float32
    ),
    "objectgoal": gym.spaces.Box(0, 20, (1,), np.int64),
}
RECORDED = {
    "goal": [7.753975868225098, 0.4732854664325714],
    "reward": 0.2046940231323242,
    "info": {
        "distance_to_goal": 8.944997787475586,
        "success": 0.0,
        "spl": 0.0,
        "distance_to_goal_reward": 0.21469402,
    },
}
METRICS = ["distance_to_goal", "success", "spl"]


class RecordedTask:
    """In place of the result of `make_gym_from_config`, with the interface of the old gym. An
    episode ends at action 0, or after 5 steps."""

    def __init__(self, config, dataset):
        self.config, self.dataset, self.seeds = config, dataset, []
        self.thread = threading.current_thread()
        self.observation_space = Namespace(spaces=SPACES | config.more_spaces)
        self.action_space = config.action_space
        self.actions = []
        self.habitat_env = self.unwrapped = self
        self._max_episode_steps, self.task = 5, Namespace(is_episode_active=True)
        self.metrics = dict.fromkeys(RECORDED["info"])

    def get_metrics(self):
        return self.metrics

    def seed(self, seed):
        self.seeds.append(seed)

    def observe(self):
        more = {key: np.array(value) for key, value in self.config.more_values.items()}
        return more | {
            "depth": np.zeros((16, 16, 1), np.float32),
            "pointgoal_with_gps_compass": np.array(RECORDED["goal"], np.float32),
            "objectgoal": np.array([7]),
        }

    def reset(self):
        # as OpenGL demands
        assert threading.current_thread() is self.thread, "made in another thread"
        self._elapsed_steps, self.task.is_episode_active, self.metrics = 0, True, RECORDED["info"]
        return self.observe()

    def step(self, action):
        self._elapsed_steps += 1
        self.actions.append(action)
        stops = isinstance(self.action_space, Namespace) and action == 0
        self.task.is_episode_active = not stops
        done = stops or self._elapsed_steps >= 5
        return (
            self.observe(),
            RECORDED["reward"],
            done,
            RECORDED["info"] | {"map": np.zeros((3, 3))},
        )

    def close(self):
        pass


def fresh_caches():
    """Forget whether Habitat is installed."""
    habitat.require_habitat.cache_clear()
    pointnav.choose_simulator.cache_clear()
    pointnav.say_once.cache_clear()


@pytest.fixture(autouse=True)
def fresh():
    """Every test looks again whether Habitat is installed, and so do the tests of other files."""
    fresh_caches()
    yield
    fresh_caches()


@pytest.fixture
def recorded(monkeypatch):
    """While a test lasts, this process has a habitat_sim and a habitat with 36 episodes. Returns a
    dictionary by which the test can change them."""

    def describe_env(options):
        *_, spec = ver_ppo.try_env(ver_ppo.Environment(0, options, "train", None, None))
        return spec

    monkeypatch.setattr(ver_ppo, "describe_env", describe_env)

    def get_config(path, overrides):
        splits = [line for line in overrides if line.startswith("habitat.dataset.split=")]
        split = splits[0].split("=")[1]
        names = [line.split("=")[1] for line in overrides if "content_scenes=" in line]
        scenes = ast.literal_eval(names[-1]) if names else ["*"]
        paths = {"data_path": __file__, "scenes_dir": __file__, "content_scenes": scenes}
        dataset = Namespace(type="PointNav-v1", split=split, **paths)
        task = {"task": Namespace(lab_sensors={}), "action_space": Namespace(n=4)}
        task |= {"more_spaces": {}, "more_values": {}} | recording
        return Namespace(habitat=Namespace(dataset=dataset, path=path, overrides=overrides, **task))

    class Dataset:
        """36 episodes, three in each of twelve scenes."""

        def __init__(self, kind, config=None):
            self.scenes = config.content_scenes if config else []
            everything = "*" in self.scenes
            self.episodes = [e for e in range(36) if everything or f"room {e // 3}" in self.scenes]

        def get_scenes_to_load(self, config):
            return [f"room {number}" for number in range(12)]

    recording = {}
    lab, maker = ModuleType("habitat"), ModuleType("habitat.gym")
    lab.get_config, lab.logger = get_config, Namespace(setLevel=lambda level: None)
    lab.make_dataset = Dataset
    maker.make_gym_from_config = RecordedTask
    for module in (lab, maker, ModuleType("habitat_sim"), ModuleType("gym")):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return recording


def make(number=0, split="train", env_kwargs=(), **options):
    env_kwargs = ("simulator=habitat", *env_kwargs)
    return ver_ppo.make_env(ver_ppo.Options(env_kwargs=env_kwargs, **options), split, number)


def test_spaces_and_measures(recorded):
    """A polar goal becomes [distance, cos, sin], a category becomes Discrete, and scalars become
    metrics. A step has five results instead of four."""
    spec = ver_ppo.describe_env(ver_ppo.Options(env_kwargs=("simulator=habitat",), num_workers=1))
    assert spec.metrics == METRICS
    assert {key: shape for key, _, shape in spec.obs_fields} == {
        "depth": (16, 16, 1),
        "goal": (3,),
        "objectgoal": (21,),
    }
    env = make()
    assert env.observation_space["objectgoal"] == gym.spaces.Discrete(21)
    assert env.action_space == gym.spaces.Discrete(4)
    observation, _ = env.reset(seed=1)
    distance, angle = RECORDED["goal"]
    np.testing.assert_allclose(
        observation["goal"], [distance, np.cos(angle), -np.sin(angle)], rtol=1e-6
    )
    assert observation in env.observation_space and observation["objectgoal"] == 7
    observation, reward, terminated, truncated, info = env.step(1)
    assert reward == RECORDED["reward"]
    assert info == {name: RECORDED["info"][name] for name in METRICS}
    assert not (terminated or truncated)
    assert habitat.scalars({"a": {"b": 3, "c": True}, "map": np.zeros(2)}) == {
        "a/b": 3.0,
        "a/c": 1.0,
    }


def test_delayed_actions(recorded):
    """Only the thread that has made the simulator uses it, also to read its metrics."""
    given = {"env_kwargs": ("simulator=habitat",), "wrappers": ("action_delay",)}
    options = ver_ppo.Options(num_workers=1, **given)
    assert ver_ppo.describe_env(options).metrics == METRICS


def test_step_limit_truncates(recorded):
    """The step limit truncates. A stop terminates, also in the last step."""
    env = make()
    for last, ends in ((1, (False, True)), (0, (True, False))):
        env.reset(seed=1)
        for action in (1, 2, 3, 1, last):
            *_, terminated, truncated, _ = env.step(action)
        assert (terminated, truncated) == ends


@pytest.mark.parametrize("num_envs", [1, 5, 36])
def test_episodes(recorded, num_envs):
    """Environments divide the validation episodes and the training scenes: together they have all
    of them. A reset's seed reaches the task."""
    envs = [make(number, "val", num_envs=num_envs).unwrapped for number in range(num_envs)]
    shares = [env.gym_env.dataset.episodes for env in envs]
    assert sorted(sum(shares, [])) == list(range(36))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1
    envs = [make(number, "train", num_envs=num_envs).unwrapped for number in range(num_envs)]
    shares = [env.gym_env.dataset.episodes for env in envs]
    assert set(sum(shares, [])) == set(range(36))
    assert min(map(len, shares)) > 0
    env = envs[0]
    for seed in (3, 3, 4):
        env.reset(seed=seed)
    assert env.gym_env.seeds[0] == env.gym_env.seeds[1] != env.gym_env.seeds[2]
    assert make(40, "val", num_envs=64).unwrapped.gym_env.dataset.episodes == [4], (
        "more environments than episodes"
    )


def test_configuration(recorded):
    """The overrides set the camera, the split, and how habitat-lab chooses episodes. The user's own
    come last."""
    words = ("camera=rgb", "image_size=32", "a.b=c")
    seeds, iterator = set(), "habitat.environment.iterator_options"
    for split, number in (("train", 0), ("train", 1), ("val", 0), ("val", 1)):
        config = make(number, split, words, device="cuda:2").unwrapped.gym_env.config
        assert config.path == habitat.POINTNAV
        sensors = "habitat.simulator.agents.main_agent.sim_sensors"
        assert f"{sensors}.rgb_sensor.width=32" in config.overrides
        assert f"~{sensors}.depth_sensor" in config.overrides
        assert f"habitat.dataset.split={split}" in config.overrides
        assert "a.b=c" in config.overrides
        assert "habitat.simulator.habitat_sim_v0.gpu_device_id=2" in config.overrides
        chosen = {
            "train": ["shuffle=True", "max_scene_repeat_episodes=50"],
            "val": ["shuffle=False"],
        }[split]
        assert all(f"{iterator}.{choice}" in config.overrides for choice in chosen)
        seeds |= {line for line in config.overrides if line.startswith("habitat.seed=")}
    assert len(seeds) == 4


def test_own_configurations(recorded):
    """--env-id habitat takes any configuration. --env-kwargs overrides its keys, in Hydra's syntax.
    """
    path = "benchmark/nav/objectnav/objectnav_mp3d.yaml"
    words = f"config={path} habitat.environment.max_episode_steps=300 habitat.task.a=[1,2]"
    words += " habitat.task.b=True ~habitat.task.sensors=None"
    words += " habitat.dataset.data_path=/d/{split}.gz"
    options = ver_ppo.Options(env_id="habitat", env_kwargs=tuple(words.split()))
    config = ver_ppo.make_env(options, "val", 2).unwrapped.gym_env.config
    assert config.path == path and config.overrides[0] == "habitat.dataset.split=val"
    assert config.overrides[-1].startswith("habitat.seed=")
    assert config.overrides[-6:-1] == [
        "habitat.environment.max_episode_steps=300",
        "habitat.task.a=[1, 2]",
        "habitat.task.b=True",
        "~habitat.task.sensors",
        "habitat.dataset.data_path='/d/{split}.gz'",
    ]
    # as habitat-lab's own command line wants it
    assert habitat.override_lines({"a.b": "'/d/{split}.gz'"}) == ["a.b='/d/{split}.gz'"]
    with pytest.raises(ValueError, match="camera is no argument"):
        habitat.HabitatEnv(camera="rgb")


def test_scenes_of_environments():
    """Together the environments have all scenes. Each has sixteen, if there are that many. Which
    ones depends on the seed."""
    for num_scenes, num_envs in ((1, 4), (12, 4), (72, 4), (500, 32)):
        scenes = [f"room {number}" for number in range(num_scenes)]
        shares = [habitat.share_scenes(scenes, num_envs, number, 1) for number in range(num_envs)]
        assert set(sum(shares, [])) == set(scenes)
        assert min(map(len, shares)) > min(num_scenes, 16) / 2
        assert max(map(len, shares)) <= max(16, -(-num_scenes // num_envs))
        assert shares == [habitat.share_scenes(scenes, num_envs, e, 1) for e in range(num_envs)]
    assert shares[0] != habitat.share_scenes(scenes, 32, 0, 2)
    assert habitat.share_scenes(scenes, 32, 33, 1) == shares[1]  # of a second rank


def test_given_scenes(recorded):
    """Environments also divide scenes that the user names."""
    given = "habitat.dataset.content_scenes=['room 3','room 4']"
    env = make(0, "train", (given,), num_envs=2).unwrapped
    assert set(env.gym_env.dataset.episodes) <= {9, 10, 11, 12, 13, 14}


def test_a_given_seed(recorded):
    """A given seed changes the seeds of all environments, and they stay different."""
    seeds = {}
    for words in ((), ("habitat.seed=3",), ("habitat.seed=4",)):
        for number in (0, 1):
            config = make(number, "train", words).unwrapped.gym_env.config
            (*_, seed) = [line for line in config.overrides if line.startswith("habitat.seed=")]
            seeds[words, number] = seed
    assert len(set(seeds.values())) == 6


CONTINUOUS = {  # low and high bound of a task; the policy's numbers; the numbers that arrive
    # a base's velocity, and a part of an arm. The simulator clips the velocity to -1..1
    "base": ([-20.0, 0.0, -1.0], [20.0, 1.0, 1.0], [-30.0, -0.5, 2.0], [-20.0, 0.0, 1.0]),
    # recorded from velocity_control: degrees a second, and metres a second
    "velocity_control": ([-10.0, 0.0], [10.0, 0.25], [7.0, 0.5], [7.0, 0.25]),
}


@pytest.mark.parametrize("task", CONTINUOUS)
def test_actions_reach_the_task(recorded, task):
    """The policy's numbers are clipped to the declared bounds, and not stretched over them."""
    low, high, given, arrives = (np.array(each, np.float32) for each in CONTINUOUS[task])
    recorded["action_space"] = gym.spaces.Box(low, high, dtype=np.float32)
    env = make().unwrapped
    assert env.action_space == gym.spaces.Box(-np.inf, np.inf, low.shape, np.float32)
    env.reset(seed=1)
    within = np.full(low.shape, 0.2, np.float32)
    for sent, expected in ((within, within), (given, arrives)):
        env.step(ver_ppo.to_env_action(env.action_space, sent))
        np.testing.assert_allclose(env.gym_env.actions[-1], expected, rtol=1e-6)
    spec = ver_ppo.spec_of(env)
    assert spec.action_dims == len(low) and not spec.choices


VECTOR = gym.spaces.Box(-100, 100, (2,), np.float32)
ANGLE = gym.spaces.Box(-np.pi, np.pi, (1,), np.float32)


def test_goals_and_angles(recorded):
    """A second polar goal keeps its name, one in space has four numbers, and one with Cartesian
    coordinates stays as it is. A compass and a heading become cosine and sine."""
    recorded["more_spaces"] = {"pointgoal": VECTOR, "compass": ANGLE, "heading": ANGLE}
    recorded["more_values"] = {"pointgoal": [2.0, 0.5], "compass": [3.0], "heading": [-1.0]}
    env = make().unwrapped
    observation, _ = env.reset(seed=1)
    assert observation in env.observation_space
    np.testing.assert_allclose(observation["pointgoal"], [2, np.cos(0.5), -np.sin(0.5)], rtol=1e-6)
    np.testing.assert_allclose(observation["compass"], [np.cos(3), np.sin(3)], rtol=1e-6)
    np.testing.assert_allclose(observation["heading"], [np.cos(1), -np.sin(1)], rtol=1e-6)
    assert observation["goal"][0] == pytest.approx(RECORDED["goal"][0])

    recorded["more_spaces"] = {"pointgoal": gym.spaces.Box(-100, 100, (3,), np.float32)}
    recorded["more_values"] = {"pointgoal": [2.0, 0.5, 1.0]}
    env = make().unwrapped
    observation, _ = env.reset(seed=1)
    assert observation in env.observation_space
    direction = [np.sin(1) * np.cos(0.5), -np.sin(1) * np.sin(0.5), np.cos(1)]
    np.testing.assert_allclose(observation["pointgoal"], [2, *direction], rtol=1e-6)

    sensor = Namespace(goal_format="CARTESIAN")
    recorded["task"] = Namespace(lab_sensors={"pointgoal_sensor": sensor})
    observation, _ = make().reset(seed=1)
    assert observation["pointgoal"].tolist() == [2.0, 0.5, 1.0]


def test_without_a_run(recorded):
    """Like any Gymnasium environment, it is made without options, and made again from its spec."""
    env = gym.make("Habitat-v0", split="val", **{"habitat.seed": 3})
    assert env.unwrapped.gym_env.config.overrides[-1] == "habitat.seed=3"
    assert env.unwrapped.gym_env.dataset.episodes == list(range(36))
    again = gym.make(env.spec)
    assert again.unwrapped.gym_env.config.overrides == env.unwrapped.gym_env.config.overrides


@pytest.mark.parametrize(
    "task, metric", [("Flee", "distance_from_start"), ("Explore", "places_visited")]
)
def test_transfer_tasks(recorded, monkeypatch, task, metric):
    """Flee and Explore in Habitat compute the score from its simulator. The goal carries no
    information."""
    position = [0.5, 1.0, 0.5]
    sim = Namespace(
        get_agent_state=lambda: Namespace(position=position),
        geodesic_distance=lambda a, b: sum(abs(a - b)),
    )
    monkeypatch.setattr(RecordedTask, "sim", sim, raising=False)
    words = ("simulator=habitat",)
    options = ver_ppo.Options(env_id=f"notebooks.environments.tasks:{task}-v0", env_kwargs=words)
    env = ver_ppo.make_env(options, "val")
    observation, _ = env.reset(seed=0)
    assert observation["goal"].tolist() == [1, 1, 0] and env.metadata["metrics"] == (metric,)
    for position[:], reward in (
        ([0.5, 1.0, 2.5], {"Flee": 2.0, "Explore": 1.0}),
        ([0.5, 9.0, 2.5], {"Flee": 8.0, "Explore": 0.0}),
    ):
        observation, found, *_, info = env.step(1)
        assert found == reward[task]
        assert list(info) == [metric]
        assert observation["goal"].tolist() == [1, 1, 0]


def test_simulator_is_chosen(recorded, capsys):
    """auto chooses Habitat if it is installed, and prints that. The check prints the task's spaces
    and metrics."""
    assert isinstance(ver_ppo.make_env(ver_ppo.Options()).unwrapped, habitat.HabitatEnv)
    assert capsys.readouterr().out == "simulator: Habitat\n"
    builtin = ver_ppo.make_env(ver_ppo.Options(env_kwargs=("simulator=builtin",))).unwrapped
    assert isinstance(builtin, pointnav.PointNav) and capsys.readouterr().out == ""
    assert habitat.main([]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("ok: ") and "objectgoal" in line and "spl" in line
    asked = ["--num-workers", "0", "--env-kwargs", "simulator=habitat"]
    one_line(capsys, asked, "--num-workers 0")
    assert make(num_workers=0, num_envs=1), "one simulator does no harm"
    fresh_caches()
    sys.modules["habitat"].get_config = lambda *args: {}["no such key"]
    with pytest.raises(ValueError, match="configuration cannot be loaded"):
        habitat.require_habitat(habitat.POINTNAV, ())
    assert habitat.main([]) == 1
    assert "MISSING" in capsys.readouterr().out
    assert isinstance(ver_ppo.make_env(ver_ppo.Options()).unwrapped, pointnav.PointNav)
    assert "simulator: built-in (its configuration cannot be loaded" in capsys.readouterr().out


def test_without_workers(recorded, capsys, tmp_path):
    """With --num-workers 0, auto chooses the built-in simulator, and prints that once. Keys of
    Habitat's configuration require Habitat."""
    line = "--env-id pointnav --num-workers 0 --total-timesteps 64 --eval-episodes 1"
    line += " --env-kwargs image_size=8"
    assert ver_ppo.main(small(tmp_path, *line.split(), *WHERE["overlap"])) == 0
    said = [text for text in capsys.readouterr().out.splitlines() if "simulator: " in text]
    assert said == ["simulator: built-in (--num-workers 0: Habitat needs worker processes)"]
    for split, num_envs in (("train", 1), ("train", 4), ("val", 1), ("val", 4)):
        options = ver_ppo.Options(num_workers=0, num_envs=num_envs)
        assert isinstance(ver_ppo.make_env(options, split).unwrapped, pointnav.PointNav)
    for num_workers in ("auto", 1, 4):
        options = ver_ppo.Options(num_workers=num_workers)
        assert isinstance(ver_ppo.make_env(options).unwrapped, habitat.HabitatEnv)
    asked = "--num-workers 0 --env-kwargs habitat.seed=3"
    one_line(capsys, small(tmp_path, *asked.split()), "give at least 1")


@pytest.mark.parametrize("chosen", [{}, {name: "verbose" for name in habitat.QUIET}])
def test_quiet(monkeypatch, chosen):
    """The log levels are set before habitat_sim is imported. Levels that were set already stay."""
    found = {}

    class Finder:  # every import asks it
        def find_spec(self, name, path=None, target=None):
            if name == "habitat_sim":
                found.update({key: os.environ.get(key) for key in habitat.QUIET})
                raise ImportError(name=name)

    for name in habitat.QUIET:
        monkeypatch.setenv(name, "restored after the test")
        monkeypatch.delenv(name)
    for name, value in chosen.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delitem(sys.modules, "habitat_sim", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Finder(), *sys.meta_path])
    pointnav.choose_simulator(workerless=False)
    assert found == habitat.QUIET | chosen


def data_set(kind, **paths):
    """Make configurations name this data set."""
    get_config = sys.modules["habitat"].get_config

    def elsewhere(path, overrides):
        config = get_config(path, overrides)
        vars(config.habitat.dataset).update(type=kind, **paths)
        return config

    sys.modules["habitat"].get_config = elsewhere


def test_data_are_missing(recorded, capsys):
    """Without its data set, auto does not choose Habitat. If Habitat is required, one line names
    the missing path and the cure."""
    data_set("PointNav-v1", data_path="nowhere/habitat-test-scenes/{split}.json.gz")
    assert isinstance(ver_ppo.make_env(ver_ppo.Options()).unwrapped, pointnav.PointNav)
    missing = "data set PointNav-v1: nowhere/habitat-test-scenes/train.json.gz is missing"
    assert f"built-in ({missing}" in capsys.readouterr().out
    with pytest.raises(FileNotFoundError, match=f"{missing}: .*datasets_download"):
        make()


def test_a_configuration_of_habitat_baselines(recorded, tmp_path, monkeypatch):
    """The configuration is loaded without its parts for the trainer. Its defaults may be in files
    beside it."""
    path = tmp_path / "mine.yaml"
    path.write_text(
        "# @package _global_\n\ndefaults:\n  - /benchmark/nav/pointnav: pointnav_habitat_test\n"
        "  - /habitat_baselines: habitat_baselines_rl_config_base\n  - beside\n  - _self_\n\n"
        "habitat_baselines:\n  rl:\n    ppo:\n      lr: 1.0\n\nhabitat:\n  seed: 3\n"
    )
    (tmp_path / "beside.yaml").write_text("a: b\n")
    seen = []
    get_config = sys.modules["habitat"].get_config

    def noting_get_config(config, overrides):
        text = Path(config).read_text()
        beside = (Path(config).parent / "beside.yaml").read_text()
        seen.append((text, beside))
        return get_config(config, overrides)

    monkeypatch.setattr(sys.modules["habitat"], "get_config", noting_get_config)
    ver_ppo.make_env(ver_ppo.Options(env_id="habitat", env_kwargs=(f"config={path}",)), "val")
    ((text, beside),) = set(seen)
    assert text.splitlines()[0] == "# @package _global_" and beside == "a: b\n"
    assert "habitat_baselines" not in text and "lr" not in text
    assert "  - /benchmark/nav/pointnav: pointnav_habitat_test\n  - beside\n" in text
    assert text.endswith("habitat:\n  seed: 3\n")


def test_typo_in_braces(recorded):
    data_set("PointNav-v1", data_path="here/{splot}.json.gz")
    with pytest.raises(ValueError, match="configuration cannot be loaded .*splot"):
        make()


@pytest.mark.parametrize("part", ["data_path", "scenes_dir"])
@pytest.mark.parametrize("kind", ["ObjectNav-v1", "RearrangeDataset-v0"])
def test_other_data_are_missing(recorded, capsys, tmp_path, kind, part):
    """For another task, the line names its data set and path, and not the download for PointNav."""
    data_set(kind, **{part: "nowhere/here"})
    line = "--env-id habitat --env-kwargs config=benchmark/nav/objectnav/objectnav_mp3d.yaml"
    assert ver_ppo.main(small(tmp_path, *line.split())) == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert f"data set {kind}: nowhere/here is missing: see " in said
    assert "DATASETS.md" in said and "datasets_download" not in said


def test_the_check_fails(recorded, capsys):
    """If the environment cannot be made or stepped, the check prints one line and exits with 1. For
    bad arguments it exits with 2."""
    sys.modules["habitat.gym"].make_gym_from_config = lambda config, dataset: {}["no display"]
    assert habitat.main(["habitat.seed=3"]) == 1
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("FAILED: 'no display'") and "EGL_PLATFORM" in line
    assert habitat.main(["habitat.seed"]) == 2 and "KEY=VALUE" in capsys.readouterr().err


@pytest.mark.skipif(
    importlib.util.find_spec("habitat_sim") is not None, reason="Habitat is installed here"
)
def test_habitat_is_missing(capsys, tmp_path):
    """auto chooses the built-in simulator, and prints the reason. If Habitat is required, one line
    says how to install it."""
    assert isinstance(ver_ppo.make_env(ver_ppo.Options()).unwrapped, pointnav.PointNav)
    assert "simulator: built-in (no Habitat: " in capsys.readouterr().out
    ver_ppo.make_env(ver_ppo.Options(num_workers=0))
    assert capsys.readouterr().out == "", "the line is printed only once"
    task = "--env-id notebooks.environments.tasks:Flee-v0 --env-kwargs simulator=habitat"
    own = "--env-id habitat --env-kwargs config=objectnav.yaml"
    for line in (
        "--env-kwargs simulator=habitat",
        "--env-id habitat",
        own,
        "--env-kwargs a.b=c",
        task,
    ):
        one_line(capsys, small(tmp_path, *line.split()), "conda")
    assert habitat.main([]) == 1
    assert "MISSING: habitat_sim cannot be imported" in capsys.readouterr().out


DATA = os.environ.get("HABITAT_DATA", str(ROOT.parent / "shared" / "habitat" / "data"))
REAL = pytest.mark.skipif(
    not Path(DATA).is_dir() or importlib.util.find_spec("habitat_sim") is None,
    reason="needs habitat_sim, habitat and $HABITAT_DATA",
)


def real_args():
    """Where the data are: for --env-kwargs."""
    scene = sorted(path.name for path in Path(DATA, "datasets/pointnav").iterdir())[-1]
    path = f"{DATA}/datasets/pointnav/{scene}/v1/{{split}}/{{split}}.json.gz"
    return [
        f"habitat.dataset.data_path={path}",
        f"habitat.dataset.scenes_dir={DATA}/scene_datasets",
    ]


@REAL
def test_real_habitat(tmp_path, capfd):
    """Check, train with all invariants checked, evaluate, film, resume, transfer."""
    assert habitat.main(real_args()) == 0
    env_kwargs = ["--env-kwargs", "simulator=habitat", "image_size=32", *real_args()]
    args = small(tmp_path, *"--num-workers 2 --extensions check --total-timesteps 512".split())
    assert ver_ppo.main([*args, "--eval-episodes", "4", *env_kwargs]) == 0
    said = capfd.readouterr().out
    assert "evaluation, 4 sampled episodes" in said and "spl" in said and "distance_to_goal" in said
    (folder,) = run_folders(tmp_path)
    command = ["-m", "notebooks.extensions.play", str(folder), "--film", str(tmp_path / "film.gif")]
    subprocess.run([sys.executable, *command], cwd=ROOT, check=True)
    assert (tmp_path / "film.gif").exists()
    assert ver_ppo.main(["--resume", str(folder), "--total-timesteps", "1024"]) == 0
    args = small(tmp_path / "transfer", *"--num-workers 2 --total-timesteps 256".split())
    transfer = f"transfer(file={folder / 'checkpoint.pt'}, freeze=True, reset=critic)"
    assert ver_ppo.main([*args, *env_kwargs, "--extensions", transfer]) == 0


@REAL
def test_real_seeds_repeat_a_run():
    """Two environments with the same number and seeds give the same observations and rewards."""
    env_kwargs = ("simulator=habitat", "image_size=32", *real_args())
    options = ver_ppo.Options(env_kwargs=env_kwargs, num_envs=1)
    runs = []
    for _ in range(2):
        env = ver_ppo.make_env(options, "train")
        observation, _ = env.reset(seed=5)
        steps = [observation["goal"], observation["depth"]]
        for action in [1, 2, 1, 1, 3, 1, 1, 1]:
            observation, reward, *_ = env.step(action)
            steps += [observation["goal"], observation["depth"], reward]
        env.close()
        runs.append(steps)
    assert all(np.array_equal(a, b) for a, b in zip(*runs))
