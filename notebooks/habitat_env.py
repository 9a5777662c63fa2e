"""The tasks of habitat-lab as Gymnasium environments: what `--env-id SOME.yaml` and `--simulator habitat` of ver_ppo.py make, where
habitat-sim and habitat-lab are installed."""

import math
import os
import time
from dataclasses import replace

import gymnasium as gym
import numpy as np
from notebooks.pointnav import GOAL_SPACE

from ver_ppo import UserError, derive_seed, flatten

HABITAT_POINTNAV = "benchmark/nav/pointnav/pointnav_habitat_test.yaml"
POLAR = ("pointgoal_with_gps_compass", "pointgoal")  # observations [distance in m, angle]
INSTALL = "conda install habitat-sim withbullet headless -c conda-forge -c aihabitat-nightly; pip install habitat-lab"
DOWNLOAD = "python -m habitat_sim.utils.datasets_download --uids habitat_test_pointnav_dataset habitat_test_scenes"
ELSEWHERE = "--habitat-overrides habitat.dataset.data_path=... habitat.dataset.scenes_dir=..."


def habitat_config(options, split, number=0):
    """habitat-lab's configuration: that of the task, what our options say, and last --habitat-overrides. An environment stays
    in a scene for 50 training episodes, because loading one takes seconds; validation plays its episodes in order."""
    for name in ("MAGNUM_LOG", "HABITAT_SIM_LOG"):  # a page for each simulator otherwise
        os.environ.setdefault(name, "quiet")
    import habitat

    habitat.logger.setLevel("WARNING")
    trains, gpu = split == "train", options.device[5:] if options.device.startswith("cuda:") else -1
    overrides = [f"habitat.dataset.split={split}", f"habitat.simulator.habitat_sim_v0.gpu_device_id={gpu}"]
    overrides.append(f"habitat.seed={derive_seed(not trains, options.seed, number)}")
    overrides.append(f"habitat.environment.iterator_options.shuffle={trains}")
    overrides.append(f"habitat.environment.iterator_options.max_scene_repeat_episodes={50 if trains else -1}")
    if not options.env_id.endswith(".yaml"):
        sensors, unused = "habitat.simulator.agents.main_agent.sim_sensors", {"rgb": "depth", "depth": "rgb"}[options.camera]
        overrides += [f"{sensors}.{options.camera}_sensor.{side}={options.image_size}" for side in ("width", "height")]
        overrides.append(f"~{sensors}.{unused}_sensor")
    path = options.env_id if options.env_id.endswith(".yaml") else HABITAT_POINTNAV
    return habitat.get_config(path, [*overrides, *options.habitat_overrides])


def missing_for_habitat(options):
    """Why the options' environment cannot be had from Habitat, and how to mend it; None if it can."""
    try:
        import habitat_sim  # noqa: F401

        data = [habitat_config(options, split).habitat.dataset for split in ("train", "val")]
    except ImportError as error:
        return f"{error.name} cannot be imported ({error}): {INSTALL}"
    except Exception as error:  # a file or key that is not there, a syntax error: whatever the parser raises
        reason = " ".join(str(error).split())[:200]
        return f"its configuration cannot be loaded ({reason}): look at --env-id and --habitat-overrides"
    files = [*(part.data_path.format(split=part.split) for part in data), data[0].scenes_dir]
    absent = [path for path in files if not os.path.exists(path)]
    return f"data set {absent[0]} is not there: {DOWNLOAD}; or {ELSEWHERE}" if absent else None


def choose_simulator(options):
    """The options with --simulator auto resolved, and said. Raises UserError if Habitat is asked for and not there."""
    task = options.env_id.endswith(".yaml")
    wanted = task or options.simulator == "habitat" or options.habitat_overrides
    if not wanted and options.simulator == "builtin":
        return options
    reason = missing_for_habitat(options)
    if reason and wanted:
        raise UserError(f"no Habitat: {reason}")
    if not reason and options.num_workers == 0:
        raise UserError("--num-workers 0: several simulators of Habitat in the main process would end it: give at least 1")
    print(f"simulator: {f'built-in ({reason})' if reason else 'Habitat'}")
    return options if task else replace(options, simulator="builtin" if reason else "habitat")


def to_gymnasium_space(space):
    """A space of the old gym as Gymnasium's; one whole number in a Box (an object's category) as Discrete."""
    if hasattr(space, "spaces"):
        parts = {key: to_gymnasium_space(part) for key, part in space.spaces.items()}
        return gym.spaces.Dict({"goal" if k in POLAR else k: GOAL_SPACE if k in POLAR else p for k, p in parts.items()})
    if hasattr(space, "n"):
        return gym.spaces.Discrete(int(space.n))
    if space.shape == (1,) and np.issubdtype(space.dtype, np.integer):
        return gym.spaces.Discrete(int(space.high[0] - space.low[0]) + 1, start=int(space.low[0]))
    return gym.spaces.Box(space.low, space.high, space.shape, space.dtype)


def scalars(measures):
    """The numbers in nested measures, flat: {"collisions": {"count": 3}, "map": an array} -> {"collisions/count": 3.0}."""
    return {key: float(value) for key, value in flatten(measures).items() if isinstance(value, (int, float, np.number))}


class HabitatEnv(gym.Env):
    """A habitat-lab task as a Gymnasium environment; numbers are those of habitat-lab 0.3 (old gym API, four results).

    A polar goal becomes `goal` = [distance, cos, sin], as in PointNav. Reaching the step limit truncates; whatever else ends
    an episode terminates it. Every scalar that the task measures is a metric.
    """

    render_mode = "rgb_array"

    def __init__(self, options, split="train", number=0, render_mode=None):
        import habitat
        from habitat.gym import make_gym_from_config

        config = habitat_config(options, split, number).habitat
        dataset = habitat.make_dataset(config.dataset.type, config=config.dataset)
        if split == "val":  # environments share the episodes out
            dataset.episodes = dataset.episodes[number % len(dataset.episodes) :: options.num_envs]
        self.gym_env = make_gym_from_config(config, dataset)
        self.habitat_env = self.gym_env.unwrapped.habitat_env
        self.action_space = to_gymnasium_space(self.gym_env.action_space)
        self.observation_space = to_gymnasium_space(self.gym_env.observation_space)

    @property
    def metadata(self):
        """The metrics' names: known once there is an episode."""
        if not scalars(self.habitat_env.get_metrics()):
            self.gym_env.reset()
        return {"render_modes": ["rgb_array"], "metrics": tuple(scalars(self.habitat_env.get_metrics()))}

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.gym_env.seed(int(self.np_random.integers(2**31)))
        return self.convert(self.gym_env.reset()), {}

    def step(self, action):
        observation, reward, done, info = self.gym_env.step(action)
        past_limit = self.habitat_env._elapsed_steps >= self.habitat_env._max_episode_steps
        truncated = done and past_limit and self.habitat_env.task.is_episode_active
        return self.convert(observation), float(reward), done and not truncated, truncated, scalars(info)

    def convert(self, observation):
        """As the observation space says."""
        converted = {}
        for key, value in flatten(observation).items():
            if key in POLAR:
                key, value = "goal", np.array([value[0], math.cos(-value[1]), math.sin(-value[1])], np.float32)
            elif isinstance(self.observation_space[key.split("/")[0]], gym.spaces.Discrete):
                value = int(value[0])
            converted[key] = value
        return converted

    def render(self):
        return self.gym_env.render("rgb_array")

    def close(self):
        self.gym_env.close()


def check_habitat(options):
    """Say what Habitat needs and what is missing; make one environment and step it. Returns the exit status."""
    if reason := missing_for_habitat(options):
        print(f"MISSING: {reason}")
        return 1
    try:
        env, began = HabitatEnv(options, "train"), time.perf_counter()
        env.reset(seed=0)
        for _ in range(100):
            if any(env.step(env.action_space.sample())[2:4]):
                env.reset(seed=0)
    except Exception as error:  # whatever packages and drivers raise
        print(f"FAILED: {error}; see above. Without a GPU: EGL_PLATFORM=surfaceless and Mesa's libEGL")
        return 1
    rate, metrics = 100 / (time.perf_counter() - began), list(env.metadata["metrics"])
    print(f"ok: {rate:.0f} steps/s; observations {list(env.observation_space)}, {env.action_space}, measures {metrics}")
    return 0


gym.register("Habitat-v0", HabitatEnv, kwargs={"options": None, "split": "train", "number": 0})
