"""The adapter to Habitat: against a recording of the real thing everywhere, against the real thing where it is installed.

The real one is tried if habitat_sim and habitat import and $HABITAT_DATA names a folder with datasets/pointnav/*/v1 and
scene_datasets (its train and val episodes lie in one scene).
"""

import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType
from types import SimpleNamespace as Namespace

import gymnasium as gym
import numpy as np
import pytest

import ver_ppo
from notebooks import habitat_env
from tests.test_run import one_line, run_folders, small

SPACES = {  # habitat-lab 0.3.320260507, pointnav_habitat_test.yaml, 16 x 16 depth; and the category of ObjectNav
    "depth": gym.spaces.Box(0.0, 1.0, (16, 16, 1), np.float32),
    "pointgoal_with_gps_compass": gym.spaces.Box(-3.4028234663852886e38, 3.4028234663852886e38, (2,), np.float32),
    "objectgoal": gym.spaces.Box(0, 20, (1,), np.int64),
}
RECORDED = {
    "goal": [7.753975868225098, 0.4732854664325714],
    "reward": 0.2046940231323242,
    "info": {"distance_to_goal": 8.944997787475586, "success": 0.0, "spl": 0.0, "distance_to_goal_reward": 0.21469402},
}


class RecordedTask:
    """What `make_gym_from_config` gives: old gym API, whose episodes last 5 steps at most, and end by action 0."""

    def __init__(self, config, dataset):
        self.dataset, self.seeds = dataset, []
        self.observation_space, self.action_space = Namespace(spaces=SPACES), Namespace(n=4)
        self.habitat_env = self.unwrapped = self
        self._max_episode_steps, self.task = 5, Namespace(is_episode_active=True)
        self.metrics = dict.fromkeys(RECORDED["info"])

    def get_metrics(self):
        return self.metrics

    def seed(self, seed):
        self.seeds.append(seed)

    def observe(self):
        return {
            "depth": np.zeros((16, 16, 1), np.float32),
            "pointgoal_with_gps_compass": np.array(RECORDED["goal"], np.float32),
            "objectgoal": np.array([7]),
        }

    def reset(self):
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
def recorded(monkeypatch):
    """habitat_sim and habitat, with 36 episodes."""

    def get_config(path, overrides):
        split = next(line for line in overrides if line.startswith("habitat.dataset.split=")).split("=")[1]
        dataset = Namespace(type="PointNav-v1", split=split, data_path=__file__, scenes_dir=__file__)
        return Namespace(habitat=Namespace(dataset=dataset, path=path, overrides=overrides))

    habitat, maker = ModuleType("habitat"), ModuleType("habitat.gym")
    habitat.get_config, habitat.logger = get_config, Namespace(setLevel=lambda level: None)
    habitat.make_dataset = lambda kind, config: Namespace(episodes=list(range(36)))
    maker.make_gym_from_config = RecordedTask
    for module in (habitat, maker, ModuleType("habitat_sim")):
        monkeypatch.setitem(sys.modules, module.__name__, module)


def make(number=0, split="train", **options):
    return ver_ppo.make_env(ver_ppo.Options(simulator="habitat", **options), split, number)


def test_spaces_and_measures(recorded):
    """A polar goal becomes [distance, cos, sin], a category Discrete, scalars metrics; five results, not four."""
    spec = ver_ppo.describe_env(ver_ppo.Options(simulator="habitat"))
    assert spec.metrics == tuple(RECORDED["info"]) and sorted(spec.observations) == ["depth", "goal", "objectgoal"]
    env = make()
    assert env.observation_space["objectgoal"] == gym.spaces.Discrete(21) and env.action_space == gym.spaces.Discrete(4)
    observation, _ = env.reset(seed=1)
    distance, angle = RECORDED["goal"]
    np.testing.assert_allclose(observation["goal"], [distance, np.cos(angle), -np.sin(angle)], rtol=1e-6)
    assert observation in env.observation_space and observation["objectgoal"] == 7
    observation, reward, terminated, truncated, info = env.step(1)
    assert reward == RECORDED["reward"] and info == pytest.approx(RECORDED["info"]) and not (terminated or truncated)
    assert habitat_env.scalars({"a": {"b": 3, "c": True}, "map": np.zeros(2)}) == {"a/b": 3.0, "a/c": 1.0}


def test_step_limit_truncates(recorded):
    """The step limit truncates; a stop terminates, in the last step too."""
    env = make()
    for last, ends in ((1, (False, True)), (0, (True, False))):
        env.reset(seed=1)
        for action in (1, 2, 3, 1, last):
            *_, terminated, truncated, _ = env.step(action)
        assert (terminated, truncated) == ends


@pytest.mark.parametrize("num_envs", [1, 5, 36])
def test_episodes(recorded, num_envs):
    """Environments share out the validation episodes; each has all training episodes. A reset's seed reaches the task."""
    envs = [make(number, "val", num_envs=num_envs).unwrapped for number in range(num_envs)]
    shares = [env.gym_env.dataset.episodes for env in envs]
    assert sorted(sum(shares, [])) == list(range(36)) and max(map(len, shares)) - min(map(len, shares)) <= 1
    env = make(0, "train", num_envs=num_envs).unwrapped
    assert env.gym_env.dataset.episodes == list(range(36))
    for seed in (3, 3, 4):
        env.reset(seed=seed)
    assert env.gym_env.seeds[0] == env.gym_env.seeds[1] != env.gym_env.seeds[2]
    assert make(40, "val", num_envs=64).unwrapped.gym_env.dataset.episodes == [4], "more environments than episodes"


def test_configuration(recorded):
    """The camera, the split, how habitat-lab shall choose episodes and, last, what the user overrides."""
    options = ver_ppo.Options(simulator="habitat", camera="rgb", image_size=32, habitat_overrides=("a=b",), device="cuda:2")
    seeds, iterator = set(), "habitat.environment.iterator_options"
    for split, number in (("train", 0), ("train", 1), ("val", 0), ("val", 1)):
        config = habitat_env.habitat_config(options, split, number).habitat
        sensors = "habitat.simulator.agents.main_agent.sim_sensors"
        assert f"{sensors}.rgb_sensor.width=32" in config.overrides and f"~{sensors}.depth_sensor" in config.overrides
        assert f"habitat.dataset.split={split}" in config.overrides and config.overrides[-1] == "a=b"
        assert "habitat.simulator.habitat_sim_v0.gpu_device_id=2" in config.overrides
        chosen = {"train": ["shuffle=True", "max_scene_repeat_episodes=50"], "val": ["shuffle=False"]}[split]
        assert all(f"{iterator}.{choice}" in config.overrides for choice in chosen)
        seeds |= {line for line in config.overrides if line.startswith("habitat.seed=")}
    assert len(seeds) == 4
    task = ver_ppo.Options(env_id="benchmark/nav/objectnav/objectnav_mp3d.yaml")
    assert habitat_env.habitat_config(task, "val").habitat.path == task.env_id


def test_simulator_is_chosen(recorded, capsys):
    """auto takes Habitat where it is, and says so; --check-habitat says what is there."""
    assert habitat_env.choose_simulator(ver_ppo.Options()).simulator == "habitat"
    assert "simulator: Habitat" in capsys.readouterr().out
    assert ver_ppo.main(["--check-habitat"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("ok: ") and "objectgoal" in line and "spl" in line
    one_line(capsys, ["--num-workers", "0"], "--num-workers 0")
    sys.modules["habitat"].get_config = lambda *args: {}["no such key"]
    assert "configuration cannot be loaded" in habitat_env.missing_for_habitat(ver_ppo.Options())
    assert ver_ppo.main(["--check-habitat"]) == 1
    assert "MISSING" in capsys.readouterr().out


@pytest.mark.skipif(importlib.util.find_spec("habitat_sim") is not None, reason="Habitat is installed here")
def test_habitat_is_missing(capsys, tmp_path):
    """auto takes the built-in simulator and says why; asked for by name, Habitat is refused in one line with the way out."""
    assert habitat_env.choose_simulator(ver_ppo.Options()).simulator == "builtin"
    assert "simulator: built-in (habitat_sim cannot be imported" in capsys.readouterr().out
    task = "--env-id notebooks.tasks:Flee-v0 --simulator habitat"
    for line in ("--simulator habitat", "--env-id objectnav.yaml", "--habitat-overrides a=b", task):
        one_line(capsys, small(tmp_path, *line.split()), "conda")
    assert ver_ppo.main(["--check-habitat"]) == 1
    assert "MISSING: habitat_sim cannot be imported" in capsys.readouterr().out


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
    """Check, train with all invariants checked, resume, evaluate, film, transfer."""
    assert ver_ppo.main(["--check-habitat", *real_args()]) == 0
    args = small(tmp_path, *"--simulator habitat --image-size 32 --num-workers 2 --debug --total-timesteps 512".split())
    assert ver_ppo.main([*args, "--eval-episodes", "4", "--capture-video", *real_args()]) == 0
    said = capfd.readouterr().out
    assert "evaluation, 4 sampled episodes" in said and "spl" in said and "distance_to_goal" in said
    (folder,) = run_folders(tmp_path)
    assert (folder / "evaluation.gif").exists()
    assert ver_ppo.main(["--resume", str(folder), "--total-timesteps", "1024"]) == 0
    line = "--simulator habitat --image-size 32 --num-workers 2 --freeze-encoder --reset-critic --total-timesteps 256"
    args = small(tmp_path / "transfer", *line.split(), "--init-from", str(folder / "checkpoint.pt"))
    assert ver_ppo.main([*args, *real_args()]) == 0


@REAL
def test_real_seeds_repeat_a_run():
    """Two environments with the same number and seeds see and get the same."""
    options = ver_ppo.parse_options(["--simulator", "habitat", "--image-size", "32", "--num-envs", "1", *real_args()])
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
