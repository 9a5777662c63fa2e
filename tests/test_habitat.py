"""The adapter to Habitat: against a recording of the real thing everywhere, against the real thing where it is installed.

The real one is tried if habitat_sim and habitat import and $HABITAT_DATA names a folder with datasets/pointnav/*/v1 and
scene_datasets (its train and val episodes lie in one scene).
"""

import importlib.util
import os
import sys
import types
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import ver_ppo

from tests.test_run import run_folders, small

F32 = 3.4028234663852886e38
RECORDED = {  # habitat-lab 0.3.320260507, pointnav_habitat_test.yaml, 16 x 16 depth
    "spaces": {"depth": (0.0, 1.0, (16, 16, 1), np.float32), "pointgoal_with_gps_compass": (-F32, F32, (2,), np.float32)},
    "goal": [7.753975868225098, 0.4732854664325714],
    "reward": 0.2046940231323242,
    "info": {"distance_to_goal": 8.944997787475586, "success": 0.0, "spl": 0.0, "distance_to_goal_reward": 0.21469402},
}


class Namespace(types.SimpleNamespace):
    """A configuration, or a space of the old gym: attributes."""


class RecordedTask:
    """What `make_gym_from_config` gives: old gym API, whose episodes last 5 steps at most, and end by action 0."""

    def __init__(self, config, dataset):
        self.dataset, self.played = dataset, []
        self.observation_space = Namespace(
            spaces={
                key: Namespace(low=np.full(shape, low), high=np.full(shape, high), shape=shape, dtype=np.dtype(dtype))
                for key, (low, high, shape, dtype) in RECORDED["spaces"].items()
            }
            | {"objectgoal": Namespace(low=np.array([0]), high=np.array([20]), shape=(1,), dtype=np.dtype(np.int64))}
        )
        self.action_space = Namespace(n=4)
        self.habitat_env = self.unwrapped = self
        self._max_episode_steps, self.task = 5, Namespace(is_episode_active=True)
        self.metrics = dict.fromkeys(RECORDED["info"])

    def get_metrics(self):
        return self.metrics

    def seed(self, seed):
        self.seeded = seed

    def observe(self):
        return {
            "depth": np.zeros((16, 16, 1), np.float32),
            "pointgoal_with_gps_compass": np.array(RECORDED["goal"], np.float32),
            "objectgoal": np.array([7]),
        }

    def reset(self):
        self.played.append(self.current_episode)
        self._elapsed_steps, self.task.is_episode_active, self.metrics = 0, True, RECORDED["info"]
        return self.observe()

    def step(self, action):
        self._elapsed_steps += 1
        self.task.is_episode_active = action != 0
        done = action == 0 or self._elapsed_steps >= 5
        return self.observe(), RECORDED["reward"], done, RECORDED["info"] | {"map": np.zeros((3, 3))}

    def close(self):
        pass


@pytest.fixture
def recorded(monkeypatch, request):
    """habitat_sim and habitat with as many scenes of 12 episodes as the test asks for."""
    num_scenes = getattr(request, "param", 3)

    class Dataset:
        def __init__(self, config=None):
            scenes = config.content_scenes if config else []
            self.episodes = [Namespace(scene_id=scene, episode_id=k) for scene in scenes for k in range(12)]

        def get_scenes_to_load(self, config):
            return [f"scene{k}" for k in range(num_scenes)]

    def get_config(path, overrides):
        split = next(line for line in overrides if line.startswith("habitat.dataset.split=")).split("=")[1]
        dataset = Namespace(content_scenes=["*"], type="PointNav-v1", split=split, data_path=__file__, scenes_dir=__file__)
        return Namespace(habitat=Namespace(dataset=dataset, overrides=overrides))

    import contextlib

    habitat = types.ModuleType("habitat")
    habitat.get_config, habitat.logger = get_config, Namespace(setLevel=lambda level: None)
    habitat.make_dataset = lambda kind, config=None: Dataset(config)
    habitat.config = Namespace(read_write=contextlib.nullcontext)
    habitat.__version__ = "0.3"
    maker = types.ModuleType("habitat.gym")
    maker.make_gym_from_config = RecordedTask
    simulator = types.ModuleType("habitat_sim")
    simulator.__version__, simulator.built_with_bullet = "0.3", True
    for module in (habitat, maker, simulator):
        monkeypatch.setitem(sys.modules, module.__name__, module)


def make(number=0, split="train", **options):
    return ver_ppo.HabitatEnv(ver_ppo.Options(simulator="habitat", **options), split, number)


def test_spaces_and_measures(recorded):
    """A polar goal becomes [distance, cos, sin], a category Discrete, scalars metrics; five results, not four."""
    env = make(num_envs=1)
    assert env.metadata["metrics"] == tuple(RECORDED["info"])
    assert list(env.observation_space) == ["depth", "goal", "objectgoal"]
    assert env.observation_space["objectgoal"] == gym.spaces.Discrete(21) and env.action_space == gym.spaces.Discrete(4)
    observation, _ = env.reset(seed=1, options={"episode": 0})
    distance, angle = RECORDED["goal"]
    np.testing.assert_allclose(observation["goal"], [distance, np.cos(angle), -np.sin(angle)], rtol=1e-6)
    assert observation in env.observation_space and observation["objectgoal"] == 7
    observation, reward, terminated, truncated, info = env.step(1)
    assert reward == RECORDED["reward"] and info == pytest.approx(RECORDED["info"]) and not (terminated or truncated)


def test_step_limit_truncates(recorded):
    """The step limit truncates; a stop terminates, in the last step too."""
    env = make(num_envs=1)
    for last, ends in ((1, (False, True)), (0, (True, False))):
        env.reset(seed=1)
        for action in (1, 2, 3, 1, last):
            *_, terminated, truncated, _ = env.step(action)
        assert (terminated, truncated) == ends


@pytest.mark.parametrize("recorded", [1, 3, 7], indirect=True)
@pytest.mark.parametrize("num_envs", [1, 2, 4, 8])
def test_every_environment_has_its_own_scenes(recorded, num_envs, request):
    """All scenes are used; none by two environments if there are enough; those who share one share its episodes out."""
    num_scenes = request.node.callspec.params["recorded"]
    envs = [make(number, "val", num_envs=num_envs) for number in range(num_envs)]
    scenes = [{episode.scene_id for episodes in env.by_scene for episode in episodes} for env in envs]
    assert set.union(*scenes) == {f"scene{k}" for k in range(num_scenes)}
    if num_envs <= num_scenes:
        assert sum(map(len, scenes)) == num_scenes
    episodes = [(e.scene_id, e.episode_id) for env in envs for part in env.by_scene for e in part]
    assert len(set(episodes)) == len(episodes) == 12 * num_scenes


def test_episodes_can_be_repeated(recorded):
    """Episode and seed decide what is played; validation plays every episode once; training stays in a scene for a while."""
    one, two = make(num_envs=1), make(num_envs=1)
    for episode in range(120):
        one.reset(seed=episode, options={"episode": episode})
    for episode in range(119, -1, -1):
        two.reset(seed=episode, options={"episode": episode})
    names = [(episode.scene_id, episode.episode_id) for episode in one.gym_env.played]
    assert names == [(episode.scene_id, episode.episode_id) for episode in two.gym_env.played[::-1]]
    assert sum(a[0] != b[0] for a, b in zip(names, names[1:])) == 2 and len(set(names)) > 20
    validation = make(num_envs=1, split="val")
    for episode in range(36):
        validation.reset(seed=0, options={"episode": episode})
    assert len({(e.scene_id, e.episode_id) for e in validation.gym_env.played}) == 36


def test_configuration(recorded):
    """The camera, the split and, last, what the user overrides."""
    options = ver_ppo.Options(simulator="habitat", camera="rgb", image_size=32, habitat_overrides=("a=b",))
    overrides = ver_ppo.habitat_config(options, "val").habitat.overrides
    sensors = "habitat.simulator.agents.main_agent.sim_sensors"
    assert f"{sensors}.rgb_sensor.width=32" in overrides and f"~{sensors}.depth_sensor" in overrides
    assert "habitat.dataset.split=val" in overrides and overrides[-1] == "a=b"


def test_simulator_is_chosen(recorded, capsys):
    """auto takes Habitat where it is, and says so; --check-habitat says what is there."""
    assert ver_ppo.choose_simulator(ver_ppo.Options()).simulator == "habitat"
    assert "simulator: Habitat" in capsys.readouterr().out
    assert ver_ppo.main(["--check-habitat"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["ok"] * 3 and "objectgoal" in lines[2]
    with pytest.raises(ver_ppo.UserError, match="--num-workers 0"):
        ver_ppo.choose_simulator(ver_ppo.Options(num_workers=0))
    sys.modules["habitat"].get_config = lambda *args: {}["no such key"]
    assert "configuration cannot be loaded" in ver_ppo.missing_for_habitat(ver_ppo.Options())
    assert ver_ppo.main(["--check-habitat"]) == 1
    assert "MISSING" in capsys.readouterr().out


@pytest.mark.skipif(importlib.util.find_spec("habitat_sim") is not None, reason="Habitat is installed here")
def test_habitat_is_missing(capsys, tmp_path):
    """auto takes the built-in simulator and says why; asked for by name, Habitat is refused in one line with the way out."""
    assert ver_ppo.choose_simulator(ver_ppo.Options()).simulator == "builtin"
    assert "simulator: built-in (habitat_sim cannot be imported" in capsys.readouterr().out
    for args in (["--simulator", "habitat"], ["--env-id", "benchmark/nav/objectnav/objectnav_mp3d.yaml"]):
        assert ver_ppo.main(small(tmp_path, *args)) == 2
        error = capsys.readouterr().err
        assert "conda" in error and "--check-habitat" in error and len(error.strip().splitlines()) == 1
    assert ver_ppo.main(["--check-habitat"]) == 1
    assert "MISSING  packages" in capsys.readouterr().out


DATA = os.environ.get("HABITAT_DATA", "")
REAL = pytest.mark.skipif(
    not DATA or importlib.util.find_spec("habitat_sim") is None, reason="needs habitat_sim, habitat and $HABITAT_DATA"
)


def real_args():
    """Where the data are."""
    scene = sorted(path.name for path in Path(DATA, "datasets/pointnav").iterdir())[-1]
    path = f"{DATA}/datasets/pointnav/{scene}/v1/{{split}}/{{split}}.json.gz"
    return [
        "--habitat-overrides",
        f"habitat.dataset.data_path='{path}'",
        f"habitat.dataset.scenes_dir={DATA}/scene_datasets",
    ]


@REAL
def test_real_habitat(tmp_path, capfd):
    """Check, train with all invariants checked, be stopped, resume in the middle of episodes, evaluate, film, transfer."""
    assert ver_ppo.main(["--check-habitat", *real_args()]) == 0
    args = small(tmp_path, "--simulator", "habitat", "--image-size", "32", "--num-workers", "2", "--debug")
    assert ver_ppo.main([*args, "--total-timesteps", "512", "--eval-episodes", "4", "--capture-video", *real_args()]) == 0
    said = capfd.readouterr().out
    assert "evaluation, 4 sampled episodes" in said and "spl" in said and "distance_to_goal" in said
    (folder,) = run_folders(tmp_path)
    assert (folder / "evaluation.gif").exists()
    assert ver_ppo.main(["--resume", str(folder), "--total-timesteps", "1024"]) == 0
    args = small(tmp_path / "flee", "--env-id", "flee", "--simulator", "habitat", "--image-size", "32", "--num-workers", "2")
    args += ["--init-from", str(folder / "checkpoint.pt"), "--freeze-encoder", "--total-timesteps", "256"]
    assert ver_ppo.main([*args, *real_args()]) == 0


@REAL
def test_real_episodes_can_be_repeated():
    """The same episode, seed and actions give the same observations, rewards and positions."""
    options = ver_ppo.parse_options(["--simulator", "habitat", "--image-size", "32", "--num-envs", "1", *real_args()])
    env, runs = ver_ppo.make_env(options, "train"), []
    for _ in range(2):
        observation, _ = env.reset(seed=5, options={"episode": 3})
        steps = [observation["goal"], observation["depth"]]
        for action in [1, 2, 1, 1, 3, 1, 1, 1]:
            observation, reward, *_ = env.step(action)
            steps += [observation["goal"], observation["depth"], reward, env.position]
        runs.append(steps)
    env.close()
    assert all(np.array_equal(a, b) for a, b in zip(*runs))
