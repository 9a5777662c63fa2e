"""How fast ver_ppo.py trains next to other trainers of recurrent PPO: environment steps per second,
collecting and learning.

    python tests/benchmarks/peers.py --sample-factory-python SF/bin/python \\
        --sb3-python SB3/bin/python --rounds 3

The peers are Sample Factory (APPO, asynchronous), RecurrentPPO of sb3-contrib, and, where it can be
imported, the trainers of habitat-baselines (VER, and DD-PPO with double-buffered sampling; see
peer_habitat.py). All pin packages, so each lives in a virtual environment of its own (leave one out
and it is not measured):

    python -m venv SF;  SF/bin/pip install torch==2.13.0
    SF/bin/pip install sample-factory==2.1.1 tyro tqdm
    python -m venv SB3; SB3/bin/pip install torch==2.13.0
    SB3/bin/pip install sb3-contrib==2.9.2 tyro tqdm

The same for all: environment class (PointNavSteady below), 16 environments, learning from 2048
steps in two epochs of two mini-batches, Adam, the modules that encode the observation, an LSTM of
128, CPU. The learning rate is close to 0, so that all play the uniform policy until the end. What
differs: ver_ppo.py also reads the previous action (an LSTM input of 224 numbers instead of 192);
it and Sample Factory learn while they collect, from experience of older policies, and Sample
Factory's trajectories of 32 steps are shorter than the others' 128; RecurrentPPO sends no gradient
of the value into the LSTM. With `--simulator` the environment's steps take longer.

Each run is a process of its own, one at a time, trainers by turns; its rate counts from the end of
the third rollout to the end of the last. Peers run the variant that suits the simulator (BEST);
with --all-variants all, and the one with the best median counts. Run by hand on an idle machine (a
busy core stalls the threads of torch); prints one line for each run, then JSON.
"""

import argparse
import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import fields
from importlib.metadata import version
from pathlib import Path

import gymnasium as gym
import numpy as np
import torch
from torch import nn

ROOT = str(Path(__file__).resolve().parents[2])
sys.path.insert(0, os.environ.get("SCRIPT_FOLDER", ROOT))  # throughput.py sets it
import ver_ppo  # noqa: E402

# a version to compare with, whose options and modules have other names
EARLIER = "sim_latency" in {field.name for field in fields(ver_ppo.Options)}
pointnav = importlib.import_module(
    "notebooks.pointnav" if EARLIER else "notebooks.environments.pointnav"
)

NUM_ENVS = 16
NUM_STEPS = 128
MINIBATCHES = 2
EPOCHS = 2
HIDDEN = 128
LEARNING_RATE = 1e-6
ROLLOUT_STEPS = NUM_ENVS * NUM_STEPS
WARM_UP_ROLLOUTS = 3
ENV_ID = "PointNavSteady-v0"
LATENCY_SPREAD = 0.8  # sigma of a simulator's emulated time
SIMULATORS = {  # wrappers that make a step take longer
    "built-in": (),
    "computes": ("peers:Busy(cpu_ms=2)",),
    "sleeps": (f"notebooks.extensions.wrappers:Latency(mean_ms=20, spread={LATENCY_SPREAD})",),
}

VARIANTS = {  # keyword arguments of the functions train_... below
    "ver": {"default": {}, "no-overlap": {"overlap": False}},
    "sample_factory": {
        "16x1-rollout32": {
            "num_workers": 16,
            "num_envs_per_worker": 1,
            "worker_num_splits": 1,
            "rollout": 32,
        },
        "2x8-rollout32": {"num_workers": 2, "num_envs_per_worker": 8, "rollout": 32},
        "4x4-rollout32": {"num_workers": 4, "num_envs_per_worker": 4, "rollout": 32},
        "2x8-rollout128": {"num_workers": 2, "num_envs_per_worker": 8, "rollout": 128},
        "4x4-rollout128": {"num_workers": 4, "num_envs_per_worker": 4, "rollout": 128},
    },
    "sb3": {  # one thread leaves the other core to the environments' processes, two learn faster
        "dummy-2thread": {"processes": False, "threads": 2},
        "dummy-1thread": {"processes": False, "threads": 1},
        "subproc-2thread": {"processes": True, "threads": 2},
        "subproc-1thread": {"processes": True, "threads": 1},
    },
    "habitat_ver": {
        "1-inference-worker": {"trainer": "ver", "threads": 1, "inference_workers": 1},
        "2-inference-workers": {"trainer": "ver", "threads": 2, "inference_workers": 2},
    },
    "habitat_ddppo": {
        "double-buffered-1thread": {"trainer": "ddppo", "threads": 1, "double_buffered": True},
        "double-buffered-2thread": {"trainer": "ddppo", "threads": 2, "double_buffered": True},
    },
}
BEST = {  # which variant of a peer suits a simulator, tried on two cores
    "built-in": {"sample_factory": "2x8-rollout32", "sb3": "dummy-2thread"},
    "computes": {"sample_factory": "2x8-rollout32", "sb3": "subproc-1thread"},
    "sleeps": {"sample_factory": "16x1-rollout32", "sb3": "subproc-2thread"},
}
PACKAGES = {
    "ver": [],
    "sample_factory": ["sample-factory"],
    "sb3": ["stable-baselines3", "sb3-contrib"],
    "habitat_ver": ["habitat-lab", "habitat-baselines"],
    "habitat_ddppo": ["habitat-lab", "habitat-baselines"],
}


class PointNavSteady(pointnav.PointNav):
    """PointNav that turns left instead of eleven `stop`s out of twelve.

    The uniform policy would end every episode after four steps and the trainers would be compared
    at resetting; so its episodes last 48 steps on average, as those of a trained agent do.
    """

    def step(self, action):
        return super().step(2 if action == 0 and self.np_random.random() > 1 / 12 else action)


class Busy(gym.Wrapper):
    """Every step keeps a core busy for so many milliseconds of CPU time."""

    def __init__(self, env, cpu_ms):
        super().__init__(env)
        self.cpu_sec = cpu_ms / 1000

    def step(self, action):
        until = time.thread_time() + self.cpu_sec
        while time.thread_time() < until:
            pass
        return self.env.step(action)


# this file is imported twice: as the program, and as `peers` by gym.make
if ENV_ID not in gym.registry:
    gym.register(ENV_ID, entry_point="peers:PointNavSteady")


def wrappers():
    """Those of --simulator, which all processes of a run know from their environment."""
    return SIMULATORS[os.environ.get("SIMULATOR", "built-in")]


def make_env(*_, **__):
    """The environment just as ver_ppo.make_env makes it, wrappers included. Other trainers'
    arguments are ignored."""
    env = gym.make(f"peers:{ENV_ID}", disable_env_checker=True)
    for wrapper in wrappers():
        env = ver_ppo.load(wrapper)(env)
    return env


def make_options(latency_ms=0.0, **settings):
    """ver_ppo.Options, in the words that this version has for them. With `latency_ms`, steps sleep
    for so many milliseconds on average."""
    if EARLIER:
        settings |= {"sim_latency": latency_ms, "sim_latency_spread": LATENCY_SPREAD}
        if settings.get("lstm_layers") == 0:
            settings |= {"recurrent": False, "lstm_layers": 1}
    elif latency_ms:
        arguments = f"mean_ms={latency_ms}, spread={LATENCY_SPREAD}"
        settings["wrappers"] = (f"notebooks.extensions.wrappers:Latency({arguments})",)
    return ver_ppo.Options(**settings)


class ObservationEncoder(nn.Module):
    """The encoders of ver_ppo.Policy, for the peers: B x (depth, goal) -> B x 192 features."""

    def __init__(self, space):
        super().__init__()
        self.depth = ver_ppo.SmallCNN(ver_ppo.Images({"depth": space["depth"]}), HIDDEN)
        self.goal = ver_ppo.Vector("goal", space["goal"], HIDDEN // 2, linear=False)
        self.out_features = HIDDEN + HIDDEN // 2

    def forward(self, obs):
        return torch.cat([self.depth(obs), self.goal(obs)], dim=1)


# Trainers: train for at least `steps`, return a mark (steps so far, time) from the end of learning
# from each rollout.


def train_ver(steps, folder, **options):
    """ver_ppo.train as it is, logging and checkpoint included."""
    marks = []
    write = ver_ppo.Run.write

    def write_and_mark(run, *update):
        write(run, *update)
        marks.append((run.step, time.perf_counter()))

    ver_ppo.Run.write = write_and_mark
    settings = {
        "env_id": f"peers:{ENV_ID}",
        "total_timesteps": steps,
        "device": "cpu",
        "runs_dir": folder,
        "eval_episodes": 0,
        "num_envs": NUM_ENVS,
        "num_steps": NUM_STEPS,
        "num_minibatches": MINIBATCHES,
        "update_epochs": EPOCHS,
        "hidden_size": HIDDEN,
        "learning_rate": LEARNING_RATE,
    }
    if wrappers():
        settings["wrappers"] = wrappers()
    options = make_options(**settings, **options)
    ver_ppo.train(options)
    return marks


def make_sample_factory_encoder(cfg, obs_space):
    """ObservationEncoder with the methods that Sample Factory asks for."""
    from sample_factory.model.encoder import Encoder

    class SampleFactoryEncoder(Encoder):
        def __init__(self):
            super().__init__(cfg)
            self.encoder = ObservationEncoder(obs_space)

        def forward(self, obs_dict):
            return self.encoder(obs_dict)

        def get_out_size(self):
            return self.encoder.out_features

    return SampleFactoryEncoder()


def make_sample_factory_policy(cfg, obs_space, action_space):
    """Sample Factory's own model, except that its action distribution starts uniform, as the
    others' does."""
    from sample_factory.model.actor_critic import default_make_actor_critic_func

    policy = default_make_actor_critic_func(cfg, obs_space, action_space)
    ver_ppo.orthogonal(policy.action_parameterization.distribution_linear, 0.01)
    return policy


def train_sample_factory(steps, folder, **sampling):
    """APPO with double-buffered sampling and the learner in a process of its own (its defaults)."""
    from sample_factory.algo.runners.runner import AlgoObserver
    from sample_factory.algo.utils.context import global_model_factory
    from sample_factory.cfg.arguments import parse_full_cfg, parse_sf_args
    from sample_factory.envs.env_utils import register_env
    from sample_factory.train import make_runner

    register_env(ENV_ID, make_env)
    global_model_factory().register_encoder_factory(make_sample_factory_encoder)
    global_model_factory().register_actor_critic_factory(make_sample_factory_policy)
    settings = {
        "algo": "APPO",
        "env": ENV_ID,
        "train_dir": folder,
        "experiment": "peers",
        "device": "cpu",
        "train_for_env_steps": steps,
        "async_rl": True,
        "serial_mode": False,
        "worker_num_splits": 2,  # double-buffered
        "batch_size": ROLLOUT_STEPS // MINIBATCHES,
        "num_batches_per_epoch": MINIBATCHES,
        "num_epochs": EPOCHS,
        "use_rnn": True,
        "rnn_type": "lstm",
        "rnn_size": HIDDEN,
        "recurrence": -1,
        "policy_initialization": "torch_default",
        "normalize_input": False,
        "normalize_returns": False,
        "learning_rate": LEARNING_RATE,
        **sampling,
    }
    arguments = [f"--{name}={value}" for name, value in settings.items()]
    parser, _ = parse_sf_args(arguments)
    _, runner = make_runner(parse_full_cfg(parser, arguments))
    marks = []

    class Marker(AlgoObserver):
        def on_training_step(self, runner, training_iteration_since_resume):
            steps = training_iteration_since_resume * ROLLOUT_STEPS  # each learns from a rollout's
            marks.append((steps, time.perf_counter()))

    runner.register_observer(Marker())
    if runner.init() or runner.run():
        raise RuntimeError("Sample Factory reports a failure")
    return marks


def train_sb3(steps, folder, processes, threads):
    """RecurrentPPO; the environments in the main process, or in a process each."""
    from sb3_contrib import RecurrentPPO
    from stable_baselines3.common.callbacks import BaseCallback
    from stable_baselines3.common.torch_layers import BaseFeaturesExtractor
    from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv

    class Extractor(BaseFeaturesExtractor):
        def __init__(self, space):
            encoder = ObservationEncoder(space)
            super().__init__(space, encoder.out_features)
            self.encoder = encoder

        def forward(self, obs):
            return self.encoder(obs)

    torch.set_num_threads(threads)
    marks = []

    class Marker(BaseCallback):
        def mark(self):
            if self.num_timesteps:
                marks.append((self.num_timesteps, time.perf_counter()))

        def _on_step(self):
            return True

        _on_rollout_start = mark  # a rollout starts where the learning from the one before ends
        _on_training_end = mark

    kind = SubprocVecEnv if processes else DummyVecEnv
    vec_env = kind([make_env] * NUM_ENVS)
    policy = {
        "features_extractor_class": Extractor,
        "net_arch": [],
        "ortho_init": False,  # the encoder is, and channels-last weights cannot be made so again
        "lstm_hidden_size": HIDDEN,
        "shared_lstm": True,
        "enable_critic_lstm": False,
    }
    model = RecurrentPPO(
        "MultiInputLstmPolicy",
        vec_env,
        learning_rate=LEARNING_RATE,
        n_steps=NUM_STEPS,
        batch_size=ROLLOUT_STEPS // MINIBATCHES,
        n_epochs=EPOCHS,
        policy_kwargs=policy,
        seed=1,
        device="cpu",
    )
    model.learn(steps, callback=Marker())
    vec_env.close()
    return marks


def train_habitat(steps, folder, **settings):
    """habitat-baselines' trainers, see peer_habitat.py."""
    return importlib.import_module("peer_habitat").train(steps, folder, **settings)


def measure(trainer, variant, steps):
    """In the trainer's own process and working directory: train, and print the result as one line
    of JSON."""
    trainers = {"ver": train_ver, "sample_factory": train_sample_factory, "sb3": train_sb3}
    train = trainers.get(trainer, train_habitat)
    marks = train(steps, os.getcwd(), **VARIANTS[trainer][variant])
    first_step, began_at = marks[WARM_UP_ROLLOUTS - 1]
    last_step, ended_at = marks[-1]
    packages = ("torch", "gymnasium", "numpy", *PACKAGES[trainer])
    result = {
        "trainer": trainer,
        "variant": variant,
        "sps": (last_step - first_step) / (ended_at - began_at),
        "steps": last_step,
        "versions": {name: version(name) for name in packages},
    }
    print("\n" + json.dumps(result))


def start_apart(command, folder, output):
    """Start a command in this folder, as a session of its own."""
    pipes = {"stdout": output, "stderr": subprocess.STDOUT}
    return subprocess.Popen(command, start_new_session=True, cwd=folder, **pipes)


def run_apart(command, timeout_sec):
    """Run a command in a folder and a session of its own and return the JSON of the last line
    that it printed.

    Raises RuntimeError, with the end of its output, if it fails, prints no JSON or outlives
    `timeout_sec`.
    """
    with tempfile.TemporaryDirectory() as folder, open(Path(folder) / "output", "w+") as output:
        process = start_apart(command, folder, output)
        try:
            status = process.wait(timeout_sec)
        except subprocess.TimeoutExpired:
            status = f"none after {timeout_sec:.0f} s"
        finally:
            if process.poll() != 0:
                kill_session(process)
        output.seek(0)
        text = output.read()
    lines = [line for line in text.splitlines() if line.startswith("{")]
    if status or not lines:
        raise RuntimeError(f"{' '.join(command[1:])}: exit status {status}\n{text[-3000:]}")
    return json.loads(lines[-1])


def signal_session(process, number):
    """Send a signal to all processes of the session that a process leads."""
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended
            session = int(path.read_text().rsplit(")", 1)[1].split()[3])
            if session == process.pid:
                os.kill(int(path.parent.name), number)


def kill_session(process):
    """End a process and its session: a trainer that fails or hangs leaves its worker processes
    behind, which are in it."""
    signal_session(process, signal.SIGKILL)
    process.wait()


def start(python, trainer, variant, args):
    """Run one trainer in a subprocess and return its result. Raises RuntimeError if it fails or
    outlives --timeout."""
    command = [python, str(Path(__file__).resolve()), "--trainer", trainer, "--variant", variant]
    command += ["--total-timesteps", str(args.total_timesteps)]
    return run_apart(command, args.timeout)


def list_runs(args):
    """(Python, trainer, variant) of every run of a round."""
    pythons = {
        "ver": sys.executable,
        "sample_factory": args.sample_factory_python,
        "sb3": args.sb3_python,
        "habitat_ver": args.habitat_python,
        "habitat_ddppo": args.habitat_python,
    }
    runs = []
    for trainer, python in pythons.items():
        variants = list(VARIANTS[trainer])
        if trainer != "ver" and not args.all_variants:
            variants = [BEST[args.simulator].get(trainer, variants[0])]
        if python:
            runs += [(python, trainer, variant) for variant in variants]
    return runs


def compare(args):
    """Interleaved rounds of all trainers; returns every run's result, and the ratios of our
    variants to each peer's best."""
    results = []
    sps = {}
    for number in range(1, args.rounds + 1):
        for python, trainer, variant in list_runs(args):
            result = start(python, trainer, variant, args)
            results.append(result)
            sps.setdefault((trainer, variant), []).append(result["sps"])
            print(f"round {number}: {trainer} {variant}: {result['sps']:.0f} steps/s", flush=True)
    summary = []
    for peer in dict.fromkeys(trainer for trainer, _ in sps if trainer != "ver"):
        best = max((run for run in sps if run[0] == peer), key=lambda run: np.median(sps[run]))
        for ours in VARIANTS["ver"]:
            ratios = [our_sps / its_sps for our_sps, its_sps in zip(sps["ver", ours], sps[best])]
            found = {"ver": ours, "peer": peer, "variant": best[1], "ratios": ratios}
            summary.append(found | {"median": np.median(ratios)})
            spread = f"{np.median(ratios):.2f}, {min(ratios):.2f} to {max(ratios):.2f}"
            print(f"ver {ours} / {peer} {best[1]}: median {spread}")
    cores = os.cpu_count()
    return {
        "simulator": args.simulator,
        "steps": args.total_timesteps,
        "cores": cores,
        "ratios": summary,
        "runs": results,
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    own = "Python of its virtual environment"
    baselines = "Python that can import habitat_baselines"
    parser.add_argument("--sample-factory-python", type=os.path.abspath, help=own)
    parser.add_argument("--sb3-python", type=os.path.abspath, help=own)
    parser.add_argument("--habitat-python", type=os.path.abspath, help=baselines)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--total-timesteps", type=int, default=100_000, help="of each run")
    given_up = "seconds after which a run is given up"
    parser.add_argument("--timeout", type=float, default=900.0, help=given_up)
    taken = "what a step takes beside PointNav's own time: 2 ms of a CPU, or 20 ms of sleep"
    parser.add_argument("--simulator", choices=SIMULATORS, default="built-in", help=taken)
    best = "try all variants of the peers and keep the best"
    parser.add_argument("--all-variants", action="store_true", help=best)
    parser.add_argument("--trainer", choices=VARIANTS, help=argparse.SUPPRESS)
    parser.add_argument("--variant", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    warm_up = WARM_UP_ROLLOUTS * ROLLOUT_STEPS
    if arguments.total_timesteps <= warm_up:
        parser.error(f"--total-timesteps must exceed the warm-up of {warm_up}")
    if arguments.trainer:
        measure(arguments.trainer, arguments.variant, arguments.total_timesteps)
    else:
        # ends as by Ctrl-C: no trainer is left behind
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        os.environ["SIMULATOR"] = arguments.simulator
        print(json.dumps(compare(arguments)))
