"""The tasks of habitat-lab as Gymnasium environments. They need habitat-sim and habitat-lab.

    python -m notebooks.environments.habitat [KEY=VALUE ...]   checks the installation, steps a task
    python ver_ppo.py --env-id habitat --env-kwargs config=CONFIG habitat.seed=3

CONFIG is one of habitat-lab's configurations, such as
`benchmark/nav/objectnav/objectnav_mp3d.yaml`, or the path of a YAML file. Keys with a dot override
its values. Without CONFIG, the task is the PointNav of habitat-lab's own tests. Importing this file
registers `Habitat-v0`.
"""

import contextlib
import functools
import io
import math
import os
import re
import sys
import tempfile
import time
from pathlib import Path

import gymnasium as gym
import numpy as np

POINTNAV = "benchmark/nav/pointnav/pointnav_habitat_test.yaml"
FARTHEST_M = 30  # the distance to a goal in habitat-lab's data sets is at most this
GOAL_SPACE = gym.spaces.Box(-FARTHEST_M, FARTHEST_M, (3,), np.float32)  # m, cos, sin of bearing
POLAR = ("pointgoal_with_gps_compass", "pointgoal")  # observations [distance in m, angle]
ANGLES = ("compass", "heading")  # observations of one angle
SCENE_EPISODES = 50  # training episodes in a scene before the next: loading takes seconds
MIN_SCENES = 16  # for each environment, if there are that many

CONDA = "conda install habitat-sim withbullet headless -c conda-forge -c aihabitat-nightly"
INSTALL = f"{CONDA}; pip install habitat-lab"
TEST_SCENES = "habitat-test-scenes"  # in the path of POINTNAV's data set: these can be downloaded
DATA_SETS = "habitat_test_pointnav_dataset habitat_test_scenes"
DOWNLOAD = f"python -m habitat_sim.utils.datasets_download --uids {DATA_SETS}"
TABLE = "see https://github.com/facebookresearch/habitat-lab/blob/main/DATASETS.md"
ELSEWHERE = "--env-kwargs habitat.dataset.data_path=... habitat.dataset.scenes_dir=..."
# simulator and plugins read this when imported; otherwise they write dozens of lines a run
QUIET = {"MAGNUM_LOG": "quiet", "HABITAT_SIM_LOG": "quiet", "GLOG_minloglevel": "2"}

# ----------------------------------------------------------------------------------- Configuration


def override_lines(overrides):
    """Keys and values as habitat-lab's configuration (Hydra) takes them. Raises ValueError for a
    key without a dot.

    >>> override_lines({"habitat.seed": None, "~habitat.task.sensors": None})
    ['habitat.seed=null', '~habitat.task.sensors']
    >>> override_lines({"+habitat/task/measurements@habitat.task.measurements.top_down_map": "a"})
    ['+habitat/task/measurements@habitat.task.measurements.top_down_map=a']
    """
    lines = []
    for key, value in overrides.items():
        if "." not in key:
            example = "habitat.environment.max_episode_steps=300"
            raise ValueError(f"{key} is no argument, and no key of a configuration as {example}")
        text = "null" if value is None else str(value)
        if "{" in text:  # habitat-lab's {split} in a path: Hydra reads braces only in quotes
            text = "'" + text.strip("'\"") + "'"
        lines.append(key if key.startswith("~") else f"{key}={text}")  # ~ takes a key away
    return lines


def without_trainer(text):
    """A configuration without the parts for habitat-baselines: its key `habitat_baselines`, and the
    entries for it among the defaults. habitat-lab alone could not load them.

    >>> lines = ["defaults:", " - /habitat_baselines: base", " - /task: nav"]
    >>> lines += ["habitat_baselines:", " rl: 1", "habitat:", " seed: 2"]
    >>> without_trainer("\\n".join(lines)).split("\\n")
    ['defaults:', ' - /task: nav', 'habitat:', ' seed: 2']
    """
    kept = []
    inside = False
    for line in text.splitlines(keepends=True):
        if line[0] not in " #-\n":  # a key at the top
            inside = line.startswith("habitat_baselines:")
        if not inside and not re.match(r"\s*-.*habitat_baselines", line):
            kept.append(line)
    return "".join(kept)


def load_config(config, lines):
    """habitat-lab's configuration with these overrides. A file may be one of habitat-baselines.
    Raises ImportError without habitat-lab, and whatever its parser raises."""
    import habitat

    habitat.logger.setLevel("WARNING")
    path = Path(config)
    text = path.read_text() if path.is_file() else ""
    if "habitat_baselines" not in text:
        return habitat.get_config(config, lines)
    with tempfile.TemporaryDirectory() as folder:
        for other in path.absolute().parent.iterdir():  # its defaults may be beside it
            if other.name != path.name:
                (Path(folder) / other.name).symlink_to(other)
        own = Path(folder) / path.name
        own.write_text(without_trainer(text))
        return habitat.get_config(str(own), lines)


@functools.lru_cache
def require_habitat(config, lines):
    """Raise ImportError, ValueError or FileNotFoundError if the packages, the configuration or its
    data are missing: one line, with the way out. `lines`: a tuple of overrides. Habitat is imported
    here first, and quietly."""
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    try:
        import habitat_sim  # noqa: F401

        with contextlib.redirect_stderr(io.StringIO()):  # it says that it is not maintained
            import gym  # noqa: F401
        splits = [f"habitat.dataset.split={split}" for split in ("train", "val")]
        data = [load_config(config, [split, *lines]).habitat.dataset for split in splits]
        paths = [part.data_path.format(split=part.split) for part in data]
    except ImportError as error:
        raise ImportError(f"{error.name} cannot be imported ({error}): {INSTALL}") from None
    except Exception as error:  # a file or a key is missing, the syntax is wrong: many types
        reason = " ".join(str(error).split())[:200]
        where = f"look at {config} and the keys with a dot in --env-kwargs"
        raise ValueError(f"its configuration cannot be loaded ({reason}): {where}") from None
    way_out = DOWNLOAD if TEST_SCENES in paths[0] else TABLE
    for path in (*paths, data[0].scenes_dir):
        if not os.path.exists(path):
            missing = f"data set {data[0].type}: {path} is missing"
            raise FileNotFoundError(f"{missing}: {way_out}; or {ELSEWHERE}")


def own_lines(options, split):
    """Overrides that a run's options give every environment: the split, the GPU that draws, and
    how episodes are chosen. Validation plays its episodes in order."""
    trains = split == "train"
    device = options.device if options else "cpu"
    gpu = device.removeprefix("cuda:") if device.startswith("cuda:") else -1
    iterator = "habitat.environment.iterator_options"
    return [
        f"habitat.dataset.split={split}",
        f"habitat.simulator.habitat_sim_v0.gpu_device_id={gpu}",
        f"{iterator}.shuffle={trains}",
        f"{iterator}.max_scene_repeat_episodes={SCENE_EPISODES if trains else -1}",
    ]


def seed_line(options, split, number, given):
    """The override with the seed of environment `number`. A seed that the user has `given` changes
    the seeds of all environments, and they stay different."""
    seed = [int(split != "train"), options.seed if options else 0, number, int(given)]
    return f"habitat.seed={np.random.SeedSequence(seed).generate_state(1)[0] >> 1}"


def share_scenes(scenes, num_envs, number, seed):
    """The scenes of environment `number` of N, in training.

    Episodes take memory and time to load, and a training split may have millions. So the
    environments divide the scenes, in a random order that repeats until each has MIN_SCENES:
    with fewer, an environment would show the policy too little.

    >>> shares = [share_scenes(list("abcdefg"), 3, number, seed=1) for number in range(3)]
    >>> sorted(set(sum(shares, [])))
    ['a', 'b', 'c', 'd', 'e', 'f', 'g']
    """
    rng = np.random.default_rng(seed)
    count = max(min(MIN_SCENES, len(scenes)), math.ceil(len(scenes) / num_envs))
    repeats = math.ceil(count * num_envs / len(scenes))
    order = np.concatenate([rng.permutation(len(scenes)) for _ in range(repeats)])
    mine = order[number % num_envs :: num_envs][:count]
    return [scenes[index] for index in sorted(set(mine.tolist()))]


def scenes_line(dataset, options, number):
    """The override with the training scenes of environment `number`; `dataset` is that part of
    habitat-lab's configuration."""
    import habitat

    scenes = list(dataset.content_scenes)
    if "*" in scenes:
        scenes = habitat.make_dataset(dataset.type).get_scenes_to_load(dataset)
    mine = share_scenes(scenes, options.num_envs, number, options.seed)
    return f"habitat.dataset.content_scenes={mine}"


# ------------------------------------------------------------------------------------- Environment


def is_polar(task, key):
    """Whether a goal has polar coordinates, as habitat-lab's own configurations have."""
    sensor = task.task.lab_sensors.get(f"{key}_sensor")
    return getattr(sensor, "goal_format", "POLAR") == "POLAR"


def polar_goal(value):
    """[distance, cos, sin] of a polar goal [distance, angle], as in PointNav. A goal in space has a
    third number, the angle from the vertical. Its direction then has three, as in
    habitat-baselines.

    >>> polar_goal([2.0, 0.0]), polar_goal([2.0, 0.0, math.pi / 2])[:3]
    ([2.0, 1.0, -0.0], [2.0, 1.0, -0.0])
    """
    distance, angle, *vertical = value
    if not vertical:
        return [distance, math.cos(-angle), math.sin(-angle)]
    level = math.sin(vertical[0])
    direction_3 = [level * math.cos(-angle), level * math.sin(-angle), math.cos(vertical[0])]
    return [distance, *direction_3]


def cosine_and_sine(value):
    """Of an angle. The angle itself would jump from pi to -pi."""
    return [math.cos(value[0]), math.sin(value[0])]


def floats(function):
    """A function whose result is an array of float32."""
    return lambda value: np.array(function(value), np.float32)


def show(key, space, polar):
    """How a part of an observation is shown: its space in Gymnasium, and a function that converts
    its values. A goal in `polar` coordinates and an angle become cosines and sines. One whole
    number in a Box (an object's category) becomes a choice."""
    if key in polar:
        shape = (space.shape[0] + 1,)
        return gym.spaces.Box(-FARTHEST_M, FARTHEST_M, shape, np.float32), floats(polar_goal)
    if key in ANGLES and space.shape == (1,):
        return gym.spaces.Box(-1, 1, (2,), np.float32), floats(cosine_and_sine)
    if space.shape == (1,) and np.issubdtype(space.dtype, np.integer):
        low = int(space.low[0])
        high = int(space.high[0])
        return gym.spaces.Discrete(high - low + 1, start=low), lambda value: int(value[0])
    return gym.spaces.Box(space.low, space.high, space.shape, space.dtype), lambda value: value


def scalars(measures, prefix=""):
    """The numbers in nested measures, flat, without rewards, which are of the last step alone.

    >>> scalars({"collisions": {"count": 3}, "map": "not a number", "spl_reward": 0.1})
    {'collisions/count': 3.0}
    """
    found = {}
    for key, value in measures.items():
        if isinstance(value, dict):
            found |= scalars(value, f"{prefix}{key}/")
        elif isinstance(value, (int, float, np.number)) and not key.endswith("_reward"):
            found[f"{prefix}{key}"] = float(value)
    return found


class HabitatEnv(gym.Env):
    """A habitat-lab task as a Gymnasium environment; written for habitat-lab 0.3, whose
    environments have the old gym's interface, with four results.

    A polar goal becomes `goal` = [distance, cos, sin], as in PointNav. Continuous actions reach the
    task as they are, clipped to the bounds that it declares. Those bounds say nothing about useful
    sizes: a base's velocity is declared as -20..20, and its simulator clips it to -1..1. Reaching
    the step limit truncates an episode, and any other end terminates it. Every scalar that the task
    measures is a metric. `options` (of a run) give the GPU, the seed and the number of
    environments, which divide training scenes and validation episodes. Raises ImportError,
    ValueError or FileNotFoundError, which say how to fix it, if something is missing.
    """

    render_mode = "rgb_array"
    chosen = ()  # see pointnav.make

    def __init__(
        self,
        config=POINTNAV,
        options=None,
        split="train",
        number=0,
        render_mode=None,
        **overrides,
    ):
        lines = override_lines(overrides)
        require_habitat(config, tuple(lines))
        if options and options.num_workers == 0 and options.num_envs > 1:
            reason = "several simulators of Habitat in the main process would end it"
            raise ValueError(f"--num-workers 0: {reason}: give at least 1")
        import habitat
        from habitat.gym import make_gym_from_config

        lines = [*own_lines(options, split), *lines]
        if options or "habitat.seed" not in overrides:
            lines.append(seed_line(options, split, number, overrides.get("habitat.seed") or 0))
        if options and split == "train":
            scenes_of = load_config(config, lines).habitat.dataset
            lines.append(scenes_line(scenes_of, options, number))
        task = load_config(config, lines).habitat
        dataset = habitat.make_dataset(task.dataset.type, config=task.dataset)
        self.num_episodes = len(dataset.episodes)
        if split == "val":  # environments share the episodes out
            num_envs = options.num_envs if options else 1
            share = slice(number % num_envs % self.num_episodes, None, num_envs)
            dataset.episodes = dataset.episodes[share]
        self.gym_env = make_gym_from_config(task, dataset)
        self.habitat_env = self.gym_env.unwrapped.habitat_env
        self.declared = self.gym_env.action_space
        if hasattr(self.declared, "n"):
            self.action_space = gym.spaces.Discrete(int(self.declared.n))
        else:  # without bounds, so that nobody scales to them
            shape = self.declared.shape
            self.action_space = gym.spaces.Box(-np.inf, np.inf, shape, np.float32)
        shown = self.gym_env.observation_space.spaces
        polar = [key for key in POLAR if key in shown and is_polar(task, key)]
        self.names = {key: "goal" for key in polar[:1]}  # as PointNav calls it
        self.parts = {key: show(key, space, polar) for key, space in shown.items()}
        spaces = {self.names.get(key, key): space for key, (space, _) in self.parts.items()}
        self.observation_space = gym.spaces.Dict(spaces)

    @property
    def metadata(self):
        """The metrics' names: known after the first reset."""
        metrics = tuple(scalars(self.habitat_env.get_metrics()))
        return {"render_modes": ["rgb_array"], "metrics": metrics, "chosen": self.chosen}

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.gym_env.seed(int(self.np_random.integers(2**31)))
        return self.convert(self.gym_env.reset()), {}

    def step(self, action):
        if isinstance(self.action_space, gym.spaces.Box):
            action = np.clip(action, self.declared.low, self.declared.high)
        observation, reward, done, info = self.gym_env.step(action)
        past_limit = self.habitat_env._elapsed_steps >= self.habitat_env._max_episode_steps
        truncated = done and past_limit and self.habitat_env.task.is_episode_active
        terminated = done and not truncated
        return self.convert(observation), float(reward), terminated, truncated, scalars(info)

    def convert(self, observation):
        """An observation as the observation space says."""
        converted = {}
        for key, value in observation.items():
            _, convert = self.parts[key]
            converted[self.names.get(key, key)] = convert(value)
        return converted

    def render(self):
        return self.gym_env.render("rgb_array")

    def close(self):
        self.gym_env.close()


# ------------------------------------------------------------------------------------------- Check


def main(argv=None):
    """Check whether Habitat and its data are there, make one environment and step it. The arguments
    are HabitatEnv's, as KEY=VALUE. Returns the exit status."""
    words = sys.argv[1:] if argv is None else argv
    try:
        arguments = dict(word.split("=", 1) for word in words)
    except ValueError:
        print("habitat.py: arguments must be KEY=VALUE, such as config=FILE", file=sys.stderr)
        return 2
    config = arguments.pop("config", POINTNAV)
    try:
        require_habitat(config, tuple(override_lines(arguments)))
    except (ImportError, ValueError, FileNotFoundError) as error:
        print(f"MISSING: {error}")
        return 1
    try:
        env = HabitatEnv(config, **arguments)
        env.reset(seed=0)
        began = time.perf_counter()
        for _ in range(100):
            *_, terminated, truncated, _ = env.step(env.action_space.sample())
            if terminated or truncated:
                env.reset(seed=0)
        rate = 100 / (time.perf_counter() - began)
    except Exception as error:  # whatever packages and drivers raise
        software = "without a GPU: EGL_PLATFORM=surfaceless and Mesa's libEGL"
        print(f"FAILED: {error}; see above; {software}")
        return 1
    spaces = f"observations {list(env.observation_space)}, {env.action_space}"
    print(f"ok: {rate:.0f} steps/s; {spaces}, measures {list(env.metadata['metrics'])}")
    env.close()
    return 0


gym.register("Habitat-v0", HabitatEnv, kwargs={"options": None, "split": "train", "number": 0})

if __name__ == "__main__":
    sys.exit(main())
