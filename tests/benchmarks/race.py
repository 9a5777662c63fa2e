"""Return per minute: what agents are worth after five minutes on this machine, with this trainer
and with others, each with the settings that its own authors recommend for the task.

    race.py --sample-factory-python SF/bin/python --sb3-python SB3/bin/python \\
        --cleanrl-python CRL/bin/python --cleanrl PATH --seeds 1 2 3
    race.py ... --tasks Hopper LunarLander --trainers ver sb3 --seeds 4 5

Each run takes five minutes from the start of its command, all alone on the machine: three and a
half hours for three seeds of everything. Runs that the results have are not repeated. A learning
rate may decay until the last step. So before its first run of a task, each trainer runs for a
minute, from which the number of steps in five minutes is predicted.

All environments are wrapped in `Recorded`, so returns are counted in the same way for all: those of
the training's own episodes, exploration included.

- ver_ppo.py has its defaults. On Hopper-v4, it is also run with options for continuous control.
- Hopper-v4, LunarLander: Sample Factory has its authors' options for MuJoCo and, for LunarLander,
  those of their example for Gymnasium; Stable-Baselines3's PPO has those of RL Baselines3 Zoo;
  CleanRL is ppo_continuous_action.py and ppo.py as they are (at PATH, a checkout of it).
- CartPole without velocities: Sample Factory has its example's options with an LSTM, and
  RecurrentPPO of sb3-contrib those of the Zoo. CleanRL has no trainer for it.
- PointNav: nobody recommends options. Both have their defaults, the encoders of ver_ppo.Policy, and
  16 environments.

Virtual environments, beside those of peers.py:

    python -m venv SB3; SB3/bin/pip install torch==2.13.0
    SB3/bin/pip install rl_zoo3 sb3-contrib==2.9.2 "gymnasium[box2d,mujoco]" tyro tqdm
    SF/bin/pip install "gymnasium[mujoco]==0.29.1" Box2D pygame
    python -m venv CRL; CRL/bin/pip install torch==2.13.0
    CRL/bin/pip install "gymnasium[mujoco]==0.29.1" Box2D pygame tyro tensorboard
"""

import functools
import os
import runpy
import sys
import tempfile
import time
from pathlib import Path

import gymnasium as gym
import numpy as np
from gymnasium.envs.registration import WrapperSpec

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1]))

SECONDS = 300  # of a run
PILOT_SEC = 60
WINDOW_SEC = 10
LAST_SEC = 30  # the result is the mean over these

# ---------------------------------------------------------------------------------------- The task


class Recorded(gym.Wrapper):
    """Writes one line for each episode into a file in the folder RECORD: the time at its end, its
    steps, and its return (of PointNav, whether it succeeded)."""

    def __init__(self, env):
        super().__init__(env)
        self.file = None

    def reset(self, **arguments):
        self.steps = 0
        self.total = 0.0
        return self.env.reset(**arguments)

    def step(self, action):
        observation, reward, terminated, truncated, info = self.env.step(action)
        self.steps += 1
        self.total += float(reward)
        if terminated or truncated:
            value = info.get("success", self.total)
            # opened here: the process that made this environment may have been forked since
            self.file = self.file or open(f"{os.environ['RECORD']}/{os.getpid()}-{id(self)}", "a")
            self.file.write(f"{time.time()} {self.steps} {value}\n")
            self.file.flush()
        return observation, reward, terminated, truncated, info


class NoVelocities(gym.ObservationWrapper):
    """CartPole without its velocities, as in RL Baselines3 Zoo: they are 0."""

    def observation(self, observation):
        return observation * np.float32([1, 0, 1, 0])


LUNAR_LANDER = "LunarLander-v3" if "LunarLander-v3" in gym.registry else "LunarLander-v2"
TASKS = {
    "PointNav": "RacePointNav-v0",
    "LunarLander": LUNAR_LANDER,
    "Hopper": "Hopper-v4",
    "CartPole without velocities": "CartPoleNoVel-v1",
}


def register():
    """Make the environments of TASKS known to Gymnasium, all of them recorded."""
    gym.register(TASKS["PointNav"], "notebooks.environments.pointnav:PointNav")
    cartpole = "gymnasium.envs.classic_control.cartpole:CartPoleEnv"
    gym.register(TASKS["CartPole without velocities"], cartpole, max_episode_steps=500)
    for env_id in TASKS.values():
        wrappers = ["NoVelocities", "Recorded"] if env_id == "CartPoleNoVel-v1" else ["Recorded"]
        specs = tuple(WrapperSpec(name, f"race:{name}", {}) for name in wrappers)
        gym.registry[env_id].additional_wrappers = specs


# ------------------------------------------------------------------------- In a peer's own process


def make(env_id, *_, **__):
    """Make an environment. Sample Factory's other arguments are ignored."""
    return gym.make(env_id)


def train_sample_factory(task, steps, seed):
    """Train with the command lines of Sample Factory's own examples."""
    from peers import make_sample_factory_encoder
    from sample_factory.algo.utils.context import global_model_factory
    from sample_factory.cfg.arguments import parse_full_cfg, parse_sf_args
    from sample_factory.envs.env_utils import register_env
    from sample_factory.train import run_rl

    register_env(TASKS[task], make)
    line = f"--env={TASKS[task]} --train_for_env_steps={steps} --seed={seed} --device=cpu"
    line += " --experiment=race --train_dir=."
    gymnasium = " --num_envs_per_worker=20 --policy_workers_per_policy=2 --batch_size=512"
    gymnasium += " --reward_scale=0.1 --with_vtrace=False --experiment_summaries_interval=10"
    if task == "LunarLander":
        line += f"{gymnasium} --use_rnn=False --recurrence=1"
    if task == "CartPole without velocities":
        line += f"{gymnasium} --use_rnn=True"
    if task == "PointNav":
        # the encoders' weights are orthogonal already
        line += " --use_rnn=True --rnn_type=lstm --policy_initialization=torch_default"
        line += " --num_workers=2 --num_envs_per_worker=8"
        global_model_factory().register_encoder_factory(make_sample_factory_encoder)
    parser, _ = parse_sf_args(line.split())
    if task == "Hopper":
        from sf_examples.mujoco.mujoco_params import mujoco_override_defaults

        mujoco_override_defaults(None, parser)
    run_rl(parse_full_cfg(parser, line.split()))


def train_sb3(task, steps, seed):
    """Train with RL Baselines3 Zoo, or PointNav with RecurrentPPO's defaults."""
    if task == "PointNav":
        return train_sb3_pointnav(steps, seed)
    algorithm = "ppo_lstm" if task == "CartPole without velocities" else "ppo"
    line = f"train --algo {algorithm} --env {TASKS[task]} --gym-packages race -n {steps}"
    line += f" --seed {seed} --eval-freq -1 --log-folder . --device cpu"
    sys.argv = line.split()
    from rl_zoo3.train import train

    register()  # again: the Zoo has registered its own CartPole without velocities
    train()


def train_sb3_pointnav(steps, seed):
    """Train with RecurrentPPO's defaults."""
    from peers import sb3_encoder
    from sb3_contrib import RecurrentPPO
    from stable_baselines3.common.vec_env import SubprocVecEnv

    vec_env = SubprocVecEnv([functools.partial(make, TASKS["PointNav"])] * 16)
    how = {"policy_kwargs": sb3_encoder(), "seed": seed, "device": "cpu"}
    RecurrentPPO("MultiInputLstmPolicy", vec_env, **how).learn(steps)


def train_cleanrl(task, steps, seed, folder):
    """Run the script of CleanRL as it is."""
    script = {"LunarLander": "ppo", "Hopper": "ppo_continuous_action"}[task]
    line = f"{script} --env-id {TASKS[task]} --total-timesteps {steps} --seed {seed} --no-cuda"
    sys.argv = line.split()
    runpy.run_path(str(Path(folder, "cleanrl", f"{script}.py")), run_name="__main__")


# ------------------------------------------------------------------------------ In the main process

NONE = {("cleanrl", "PointNav"), ("cleanrl", "CartPole without velocities")}  # has no trainer
NONE |= {("ver_continuous", task) for task in TASKS if task != "Hopper"}  # not continuous
OURS = {  # variants of this trainer: their options
    "ver": "",
    "ver_continuous": "--num-envs 8 --num-steps 256 --num-minibatches 8 --update-epochs 5"
    " --learning-rate 1e-3 --ent-coef 0",
}


def commands(args):
    """Each trainer's function of task, steps and seed, which returns the words of its command."""

    def ours(options):
        def words(task, steps, seed):
            line = f"--env-id race:{TASKS[task]} --total-timesteps {steps} --seed {seed} {options}"
            line += " --device cpu --eval-episodes 0"
            return [sys.executable, str(harness.ROOT / "ver_ppo.py"), *line.split()]

        return words

    def peer(python, function, *more):
        def words(*what):
            code = f"import race; race.{function}{(*what, *more)}"
            return [os.path.abspath(python), "-c", code]

        return words

    found = {name: ours(options) for name, options in OURS.items()}
    if args.sample_factory_python:
        found["sample_factory"] = peer(args.sample_factory_python, "train_sample_factory")
    if args.sb3_python:
        found["sb3"] = peer(args.sb3_python, "train_sb3")
    if args.cleanrl_python:
        found["cleanrl"] = peer(args.cleanrl_python, "train_cleanrl", os.path.abspath(args.cleanrl))
    return found


def measure(words, seconds):
    """Run a command for this long, in a folder of its own. Returns its episodes as a table, in the
    order of time: seconds since its start, steps, value."""
    with tempfile.TemporaryDirectory() as folder:
        record = Path(folder, "record")
        record.mkdir()
        modules = f"{HERE}{os.pathsep}{harness.ROOT}"
        more = {"PYTHONPATH": modules, "RECORD": str(record), "WANDB_MODE": "offline"}
        began_at = time.time()
        harness.execute(words, checkout=folder, seconds=seconds, **more)
        lines = [line.split() for path in record.iterdir() for line in path.open()]
    episodes = np.array(sorted([float(part) for part in line] for line in lines))
    episodes[:, 0] -= began_at
    return episodes[episodes[:, 0] <= seconds]


def steps_in(words, task, seconds):
    """Predict how many steps a trainer makes in this time, by a run of a minute."""
    at, steps, _ = measure(words(task, 10**8, 1), PILOT_SEC).T
    late = at > PILOT_SEC / 2
    rate = steps[late].sum() / (PILOT_SEC / 2)
    return int(steps[~late].sum() + rate * (seconds - PILOT_SEC / 2))


def windows(episodes, length):
    """The mean value of the episodes that ended in each window, or None."""
    at, _, values = episodes.T
    number = (at // length).astype(int)
    parts = [values[number == k] for k in range(SECONDS // length)]
    return [round(float(part.mean()), 3) if len(part) else None for part in parts]


if __name__ != "__main__":
    register()
else:
    import harness

    parser = harness.command_line(__doc__)
    parser.add_argument("--sample-factory-python", help="Python of its virtual environment")
    parser.add_argument("--sb3-python", help="Python of its virtual environment")
    parser.add_argument("--cleanrl-python", help="Python of its virtual environment")
    parser.add_argument("--cleanrl", help="folder of a checkout of CleanRL")
    parser.add_argument("--tasks", nargs="*", choices=TASKS, default=list(TASKS))
    parser.add_argument("--trainers", nargs="*", help="these alone")
    parser.add_argument("--seeds", nargs="*", type=int, default=[1, 2, 3])
    args = parser.parse_args()
    found = harness.kept(args, "race").get("found", {})
    for seed in args.seeds:
        for task in args.tasks:
            for name, words in commands(args).items():
                if name not in (args.trainers or [name]) or (name, task) in NONE:
                    continue
                kept = found.setdefault(task, {}).setdefault(name, {"seeds": {}})
                if str(seed) in kept["seeds"]:
                    continue
                if "asked" not in kept:
                    kept["asked"] = steps_in(words, task, SECONDS)
                episodes = measure(words(task, kept["asked"], seed), SECONDS)
                at, steps, values = episodes.T
                last = float(values[at > at.max() - LAST_SEC].mean())
                curve = windows(episodes, WINDOW_SEC)
                kept["seeds"][str(seed)] = {
                    "steps": int(steps.sum()),
                    "last": round(last, 3),
                    "curve": curve,
                }
                print(f"{task}, seed {seed}: {name}: {last:.3f} after {steps.sum():,.0f} steps")
                harness.keep(args, "race", found=found)
