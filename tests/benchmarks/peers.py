"""Compare the speed of ver_ppo.py with other trainers of recurrent PPO: environment steps per
second, collecting and learning. Ten minutes for each simulator, on an otherwise idle machine.

    peers.py --sample-factory-python SF/bin/python --sb3-python SB3/bin/python \\
        --pufferlib-python PUF/bin/python --rounds 3
    peers.py ... --simulator computes --total-timesteps 12288      a step also takes 2 ms of a CPU
    peers.py ... --simulator sleeps --total-timesteps 12288        a step also sleeps 20 ms

The peers are Sample Factory (APPO, asynchronous), RecurrentPPO of sb3-contrib, PufferLib, and the
trainers of habitat-baselines (VER, and DD-PPO with double-buffered sampling; see peer_habitat.py).
Each pins its packages, so each needs a virtual environment of its own. A peer without one is not
measured:

    python -m venv SF;  SF/bin/pip install torch==2.13.0
    SF/bin/pip install sample-factory==2.1.1 tyro tqdm
    python -m venv SB3; SB3/bin/pip install torch==2.13.0
    SB3/bin/pip install sb3-contrib==2.9.2 tyro tqdm
    python -m venv PUF; PUF/bin/pip install torch==2.13.0
    PUF/bin/pip install --no-build-isolation pufferlib==3.0.0 tyro tqdm

All trainers have the same environment (PointNavSteady of simulators.py), 16 environments, learning
from 2048 steps in two epochs of two mini-batches, Adam, the same encoders of the observation, an
LSTM of 128, and a CPU. The learning rate is close to 0, so that all play the uniform policy until
the end. Each peer has the fastest of several sampling options on two cores. (For PufferLib, others
were tried only with `sleeps`.) The differences:

- ver_ppo.py also reads the previous action: its LSTM's input has 224 numbers instead of 192.
- Sample Factory, and ver_ppo.py with `overlap`, learn while they collect, from experience of older
  policies. Sample Factory's trajectories have 32 steps, and the others' 128.
- RecurrentPPO sends no gradient of the value into the LSTM.
- PufferLib draws its mini-batches by the size of their advantages, and begins every rollout with an
  empty memory.

Each run is a process of its own, one at a time, and the trainers alternate. The rate counts from
the end of the third rollout to the end of the last one.
"""

import functools
import importlib
import json
import os
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

import gymnasium as gym
import torch
from torch import nn

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1]))
import ver_ppo  # noqa: E402

NUM_ENVS = 16
NUM_STEPS = 128
MINIBATCHES = 2
EPOCHS = 2
HIDDEN = 128
LEARNING_RATE = 1e-6
ROLLOUT_STEPS = NUM_ENVS * NUM_STEPS
WARM_UP_ROLLOUTS = 3
ENV_ID = "simulators:PointNavSteady-v0"
SIMULATORS = {  # wrappers that make a step take longer
    "built-in": (),
    "computes": ("simulators:Busy(cpu_ms=2)",),
    "sleeps": ("latency(mean_ms=20, spread=0.8)",),
}
TWO = "--num_workers=2 --num_envs_per_worker=8 --worker_num_splits=2 --rollout=32"
SIXTEEN = "--num_workers=16 --num_envs_per_worker=1 --worker_num_splits=1 --rollout=32"
VARIANTS = {  # of a peer, on one simulator or on any: a name, and arguments of train_...
    ("sample_factory", "sleeps"): ("16x1-rollout32", {"sampling": SIXTEEN}),
    "sample_factory": ("2x8-rollout32", {"sampling": TWO}),
    ("sb3", "built-in"): ("dummy-2thread", {"processes": False, "threads": 2}),
    ("sb3", "computes"): ("subproc-1thread", {"processes": True, "threads": 1}),
    ("sb3", "sleeps"): ("subproc-2thread", {"processes": True, "threads": 2}),
    "pufferlib": ("2x8", {"workers": 2, "batch_envs": 8}),
    ("pufferlib", "sleeps"): ("4x4", {"workers": 4, "batch_envs": 8}),
    "habitat_ver": ("1-inference-worker", {"trainer": "ver", "threads": 1}),
    "habitat_ddppo": (
        "double-buffered-1thread",
        {"trainer": "ddppo", "threads": 1, "double_buffered": True},
    ),
}
PACKAGES = {
    "sample_factory": ["sample-factory"],
    "sb3": ["stable-baselines3", "sb3-contrib"],
    "pufferlib": ["pufferlib"],
    "habitat_ver": ["habitat-lab", "habitat-baselines"],
    "habitat_ddppo": ["habitat-lab", "habitat-baselines"],
}

# ------------------------------------------------------------------------- In a peer's own process


def make_env(*_, **__):
    """Make the environment as ver_ppo.make_env does, with the wrappers of --simulator, which an
    environment variable tells to all processes. Other trainers' arguments are ignored."""
    env = gym.make(ENV_ID, disable_env_checker=True)
    for wrapper in SIMULATORS[os.environ.get("SIMULATOR", "built-in")]:
        env = ver_ppo.load(wrapper, "--wrappers")(env)
    return env


class ObservationEncoder(nn.Module):
    """The encoders of ver_ppo.Policy: B x (depth, goal) -> B x 192 features."""

    def __init__(self, space):
        super().__init__()
        obs = {key: ("float32", part.shape, False) for key, part in space.items()}
        spec = ver_ppo.Spec(obs, choices=[4], action_dims=1, metrics=[])
        self.depth = ver_ppo.SmallCNN(ver_ppo.Input("depth", spec), HIDDEN)
        self.goal = ver_ppo.Perceptron(ver_ppo.Input("goal", spec), HIDDEN // 2)
        self.out_features = HIDDEN + HIDDEN // 2

    def forward(self, obs):
        return torch.cat([self.depth(obs), self.goal(obs)], dim=1)


# Each trainer trains for at least `steps`. It returns a list of marks, (steps so far, time), one
# for the end of learning from each rollout.


def make_sample_factory_encoder(cfg, obs_space):
    """ObservationEncoder with the methods that Sample Factory needs."""
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
    """Sample Factory's own model, except that its action distribution starts uniform, like the
    others."""
    from sample_factory.model.actor_critic import default_make_actor_critic_func

    policy = default_make_actor_critic_func(cfg, obs_space, action_space)
    ver_ppo.orthogonal(policy.action_parameterization.distribution_linear, 0.01)
    return policy


def train_sample_factory(steps, folder, sampling):
    """Train with APPO, with double-buffered sampling and a learner process (its defaults)."""
    from sample_factory.algo.runners.runner import AlgoObserver
    from sample_factory.algo.utils.context import global_model_factory
    from sample_factory.cfg.arguments import parse_full_cfg, parse_sf_args
    from sample_factory.envs.env_utils import register_env
    from sample_factory.train import make_runner

    register_env("peers", make_env)
    global_model_factory().register_encoder_factory(make_sample_factory_encoder)
    global_model_factory().register_actor_critic_factory(make_sample_factory_policy)
    arguments = f"--algo=APPO --env=peers --train_dir={folder} --experiment=peers --device=cpu"
    arguments += f" --train_for_env_steps={steps} --async_rl=True --serial_mode=False"
    arguments += f" --batch_size={ROLLOUT_STEPS // MINIBATCHES} --num_epochs={EPOCHS}"
    arguments += f" --num_batches_per_epoch={MINIBATCHES} --learning_rate={LEARNING_RATE}"
    arguments += f" --use_rnn=True --rnn_type=lstm --rnn_size={HIDDEN} --recurrence=-1"
    arguments += " --policy_initialization=torch_default --normalize_input=False"
    arguments += f" --normalize_returns=False {sampling}"
    arguments = arguments.split()
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


def sb3_encoder():
    """ObservationEncoder for Stable-Baselines3: the options of a policy that uses it."""
    from stable_baselines3.common.torch_layers import BaseFeaturesExtractor

    class Extractor(BaseFeaturesExtractor):
        def __init__(self, space):
            encoder = ObservationEncoder(space)
            super().__init__(space, encoder.out_features)
            self.encoder = encoder

        def forward(self, obs):
            return self.encoder(obs)

    # the encoder is orthogonal, and channels-last weights cannot be again
    return {"features_extractor_class": Extractor, "ortho_init": False}


def train_sb3(steps, folder, processes, threads):
    """Train with RecurrentPPO, with all environments in the main process, or each in its own."""
    from sb3_contrib import RecurrentPPO
    from stable_baselines3.common.callbacks import BaseCallback
    from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv

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
    sizes = {"n_steps": NUM_STEPS, "batch_size": ROLLOUT_STEPS // MINIBATCHES, "n_epochs": EPOCHS}
    policy = sb3_encoder() | {"net_arch": [], "lstm_hidden_size": HIDDEN}
    policy |= {"shared_lstm": True, "enable_critic_lstm": False}
    more = {"learning_rate": LEARNING_RATE, "policy_kwargs": policy, "seed": 1, "device": "cpu"}
    model = RecurrentPPO("MultiInputLstmPolicy", vec_env, **sizes, **more)
    model.learn(steps, callback=Marker())
    vec_env.close()
    return marks


def make_puffer_env(buf=None, seed=0):
    """Wrap the environment for PufferLib, whose observations are rows of bytes."""
    from pufferlib.emulation import GymnasiumPufferEnv

    return GymnasiumPufferEnv(env_creator=make_env, buf=buf, seed=seed)


def train_pufferlib(steps, folder, workers, batch_envs):
    """Train with PuffeRL, with its LSTM around the encoder. It collects from the workers that have
    answered."""
    import pufferlib.pytorch
    import pufferlib.vector

    class Inner(nn.Module):
        is_continuous = False

        def __init__(self, env):
            super().__init__()
            self.dtype = pufferlib.pytorch.nativize_dtype(env.emulated)
            self.encoder = ObservationEncoder(env.env.observation_space)
            self.actor = ver_ppo.orthogonal(nn.Linear(HIDDEN, env.single_action_space.n), 0.01)
            self.critic = ver_ppo.orthogonal(nn.Linear(HIDDEN, 1), 1.0)

        def encode_observations(self, observations, state=None):
            return self.encoder(pufferlib.pytorch.nativize_tensor(observations, self.dtype))

        def decode_actions(self, hidden):
            return self.actor(hidden), self.critic(hidden)

    how = {"num_envs": NUM_ENVS, "num_workers": workers, "batch_size": batch_envs}
    how |= {"backend": "Multiprocessing", "overwork": True}
    vec_env = pufferlib.vector.make(make_puffer_env, **how)
    try:
        return puffer_marks(Inner(vec_env.driver_env), vec_env, steps, folder)
    finally:
        for process in vec_env.processes:  # otherwise they continue, and each keeps a core busy
            process.kill()


def puffer_marks(inner, vec_env, steps, folder):
    """Train the network `inner`, with an LSTM around its encoder, and return the marks."""
    import pufferlib.models
    from pufferlib.pufferl import PuffeRL

    sizes = {"input_size": inner.encoder.out_features, "hidden_size": HIDDEN}
    inner.encoder.to(memory_format=torch.contiguous_format)  # for the wrapper's initialization
    policy = pufferlib.models.LSTMWrapper(vec_env.driver_env, inner, **sizes)
    inner.encoder.to(memory_format=torch.channels_last)  # as in ver_ppo.py
    config = {"device": "cpu", "seed": 1, "use_rnn": True, "compile": False, "cpu_offload": False}
    config |= {"batch_size": ROLLOUT_STEPS, "bptt_horizon": NUM_STEPS, "update_epochs": EPOCHS}
    config |= {"minibatch_size": ROLLOUT_STEPS // MINIBATCHES, "max_minibatch_size": ROLLOUT_STEPS}
    config |= {"optimizer": "adam", "learning_rate": LEARNING_RATE, "anneal_lr": False}
    config |= {"adam_beta1": 0.9, "adam_beta2": 0.999, "adam_eps": 1e-8, "max_grad_norm": 0.5}
    config |= {"gamma": 0.99, "gae_lambda": 0.95, "clip_coef": 0.2, "vf_coef": 0.5}
    config |= {"vf_clip_coef": 0.2, "ent_coef": 0.005, "prio_alpha": 0.8, "prio_beta0": 0.2}
    config |= {"vtrace_rho_clip": 1.0, "vtrace_c_clip": 1.0, "precision": "float32"}
    config |= {"torch_deterministic": True, "total_timesteps": steps, "data_dir": folder}
    config |= {"checkpoint_interval": 10**9, "env": "peers"}
    trainer = PuffeRL(config, vec_env, policy)
    marks = []
    while trainer.global_step < steps:
        trainer.evaluate()
        trainer.train()
        marks.append((trainer.global_step, time.perf_counter()))
    trainer.utilization.stop()
    return marks


def train_habitat(steps, folder, **settings):
    """Train with habitat-baselines (see peer_habitat.py)."""
    return importlib.import_module("peer_habitat").train(steps, folder, **settings)


def variant_of(trainer, simulator):
    """Name and settings of a peer's variant for a simulator."""
    return VARIANTS.get((trainer, simulator)) or VARIANTS[trainer]


def measure_here(trainer, simulator, steps):
    """Train in this folder, and print the result as one line of JSON."""
    trainers = {
        "sample_factory": train_sample_factory,
        "sb3": train_sb3,
        "pufferlib": train_pufferlib,
    }
    _, settings = variant_of(trainer, simulator)
    marks = trainers.get(trainer, train_habitat)(steps, os.getcwd(), **settings)
    first_step, began_at = marks[WARM_UP_ROLLOUTS - 1]
    last_step, ended_at = marks[-1]
    versions = {name: version(name) for name in ("torch", "gymnasium", *PACKAGES[trainer])}
    sps = (last_step - first_step) / (ended_at - began_at)
    print("\n" + json.dumps({"sps": sps, "versions": versions}))


# ------------------------------------------------------------------------------ In the main process


def measure_peer(python, trainer, args):
    """Run a peer with its own Python."""
    what = trainer, args.simulator, args.total_timesteps
    command = [python, "-c", f"import peers; peers.measure_here{what}"]
    with tempfile.TemporaryDirectory() as folder:
        said = harness.execute(command, folder, SIMULATOR=args.simulator)
    found = json.loads(said.strip().splitlines()[-1])
    print(trainer, found.pop("versions"), flush=True)
    return found


def measure_ours(more, args):
    """Run ver_ppo.py."""
    line = f"--env-id {ENV_ID} --num-envs {NUM_ENVS} --num-steps {NUM_STEPS} --device cpu"
    line += f" --num-minibatches {MINIBATCHES} --update-epochs {EPOCHS} --hidden-size {HIDDEN}"
    line += f" --learning-rate {LEARNING_RATE} --eval-episodes 0 {more}"
    line += f" --total-timesteps {args.total_timesteps}"
    for wrapper in SIMULATORS[args.simulator]:
        line += f" --wrappers '{wrapper}'"
    return {"sps": harness.train(line).rate(WARM_UP_ROLLOUTS)}


def compare(args):
    """Measure all trainers in interleaved rounds."""
    variants = {}
    for variant, more in {"default": "", "overlap": "--extensions overlap"}.items():
        variants[f"ver {variant}"] = functools.partial(measure_ours, more, args)
    for trainer in PACKAGES:
        home = "habitat" if trainer.startswith("habitat") else trainer
        python = getattr(args, f"{home}_python")
        if python:
            variant, _ = variant_of(trainer, args.simulator)
            measure = functools.partial(measure_peer, os.path.abspath(python), trainer, args)
            variants[f"{trainer} {variant}"] = measure
    runs = []
    for results in harness.by_turns(variants, args.rounds):
        for name, found in results.items():
            trainer, variant = name.split()
            runs.append({"trainer": trainer, "variant": variant, **found})
    suffix = "" if args.simulator == "built-in" else f"-{args.simulator}"
    harness.keep(args, f"peers{suffix}", found={"simulator": args.simulator, "runs": runs})


if __name__ == "__main__":
    import harness  # which the peers' environments cannot import

    parser = harness.command_line(__doc__)
    parser.add_argument("--sample-factory-python", help="Python of its virtual environment")
    parser.add_argument("--sb3-python", help="Python of its virtual environment")
    parser.add_argument("--pufferlib-python", help="Python of its virtual environment")
    parser.add_argument("--habitat-python", help="Python that can import habitat_baselines")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--total-timesteps", type=int, default=50_000, help="of each run")
    taken = "what a step takes beside PointNav's own time: 2 ms of a CPU, or 20 ms of sleep"
    parser.add_argument("--simulator", choices=SIMULATORS, default="built-in", help=taken)
    compare(parser.parse_args())
