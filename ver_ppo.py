"""VER: train a recurrent policy with Variable Experience Rollout and PPO (Wijmans et al. 2022), in one file.

Simulators are slow and uneven, and a trainer that steps N of them in lock-step always waits for the slowest. VER does
not: whichever environments have answered form the next inference batch, and a rollout ends when S = T x N steps
(--num-steps times --num-envs) are complete, no matter who contributed how many. A step that is in flight at that moment
counts for the next rollout. The uneven experience is cut into mini-batches of equal size for a recurrent network, fast
environments are weighted down, and at most N of the steps that PPO learns from come from an older policy.

    python ver_ppo.py --env-id pointnav            trains, shows its progress, evaluates on unseen floor plans
    python ver_ppo.py --help                       explains every option
    torchrun --nproc-per-node 8 ver_multigpu.py    the same on eight GPUs: it imports this file

The processes and what passes between them (section 2.1, figure 2 of the paper):

      environment worker 0 ... W-1                     main process: collects and learns by turns
    +------------------------------+  environments   +------------------------------------------------------+
    | take environments that have  | ==============> | await_answers -> complete_steps -> act               |
    | actions, step each, write    |  one pipe, all  |      ... until S steps are complete, then ...        |
    | the answer into its row      |  workers write  | add_returns -> sequences -> mini-batches -> PPO      |
    +------------------------------+                 +------------------------------------------------------+
         |  rows  ^                 <==============        | rows ^            ^ |             ^ |
         v        |                  a pipe each           v      |            | v             | v
    [ EnvIO: one row for each environment, shared memory ]         [ pending: N steps ] -> [ rollout: S steps ]

A *step* begins when inference chooses an action; it is then *in flight*, in the environment's row of `pending`. When its
answer (reward, whether the episode ended) is taken, it is complete and moves to the next free index of the rollout. An
environment that has answered and gets no action because enough steps are complete is *idle*. The *version* of a policy
is the number of updates before it. A *segment* is one environment's (async: one trajectory's) steps of a rollout, in time
order. Cut where episodes begin, segments become *sequences*.

Shapes, at least the first dimensions, stand in the names: N environments, S steps of a rollout, Q sequences, M steps of a
mini-batch, B any batch (env_B: the numbers of B environments), H hidden units, L LSTM layers, A dimensions of an action.
B2LH is B x 2L x H.

The file down to "End of the lesson" is VER, in the order in which a step travels. Each section below it adds something
that a real run needs, can be read alone, and says by which name the lesson calls it. (The simulators are environments like
any other, in notebooks/.) Papers: VER; DD-PPO (Wijmans et al. 2020); Sample Factory (Petrenko et al. 2020).
"""

import contextlib
import ctypes
import importlib
import itertools
import json
import math
import multiprocessing.forkserver
import os
import select
import shutil
import signal
import sys
import time
import traceback
from array import array
from collections import deque
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Literal

import gymnasium as gym
import numpy as np
import torch
import torch.multiprocessing as mp
import tyro
from torch import nn
from torch.distributions import Categorical, Independent, Normal
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from tqdm import tqdm

# ------------------------------------------------------------------------------------------ Options


@dataclass(frozen=True)
class Options:
    """Train a recurrent policy with Variable Experience Rollout (VER) and PPO."""

    # `pointnav`; any Gymnasium id: `CartPole-v1`, `package.module:Id-v0`; any habitat-lab YAML, or a path to one
    env_id: str = "pointnav"
    seed: int = 1  # of the network, the action sampling, the shuffling and the environments
    total_timesteps: int = 2_500_000  # environment steps to train for
    device: str = "auto"  # `cpu`, `cuda`, `cuda:1`, ...; auto: CUDA where there is a GPU

    num_envs: int = 16  # N, environments that run in parallel
    num_steps: int = 128  # T: a rollout is exactly T x N steps, T from each environment on average
    # processes that share the environments; 0: all in the main process (very cheap ones, debuggers, exact repetition);
    # auto: one for each CPU core, or with --sim-latency for each environment, as slow simulators want it
    num_workers: int | Literal["auto"] = "auto"
    max_requests: int = 256  # most answers that are taken at once (idle environments all act in one batch)
    # who gives a rollout's steps. ver: whoever delivers them; nover: each environment T (VER without variable rollouts);
    # sync: each T, in lock-step (DD-PPO); async: without end, in trajectories of T, with V-trace (Sample Factory's APPO)
    sampler: Literal["ver", "nover", "sync", "async"] = "ver"
    overlap: bool = False  # another process collects while this one learns: faster, but experience is one update older

    learning_rate: float = 1e-3  # at the start; decays to 0 along a cosine
    gamma: float = 0.99  # discount factor
    gae_lambda: float = 0.95  # lambda of generalized advantage estimation
    num_minibatches: int = 2  # mini-batches per epoch, all of one size: must divide T x N
    update_epochs: int = 2  # passes over each rollout
    clip_coef: float = 0.2  # PPO's clipping range of the probability ratio
    norm_adv: bool = False  # normalize the advantages of a rollout (DD-PPO: unstable; short control tasks want it)
    ent_coef: float = 1e-2  # entropy coefficient; its first value if --target-entropy is set
    target_entropy: float | None = None  # learn that coefficient so that the entropy stays above this; VER: 0 for Gaussians
    vf_coef: float = 0.5  # weight of the value loss
    max_grad_norm: float = 0.5  # gradients are scaled down to this norm

    # of images: a small CNN; VER's resnet18; DD-PPO's resnet50 and others (all of half the usual width); none: blind
    encoder: Literal["cnn", "resnet18_plain", "resnet18", "resnet50", "se_resnext50", "se_resnext101", "none"] = "cnn"
    recurrent: bool = True  # LSTM, or a feed-forward layer in its place
    hidden_size: int = 128  # H, width of LSTM and encoders
    lstm_layers: int = 1  # L, 1 or 2
    cpc: bool = False  # auxiliary loss CPC|A: the memory must predict what will be seen after the next actions
    bf16: bool = False  # encoders in bfloat16, CUDA only
    learner_threads: int | Literal["auto"] = "auto"  # CPU threads; auto: one, or one a core (at most 4), as it is faster

    simulator: Literal["auto", "builtin", "habitat"] = "auto"  # of pointnav; auto: Habitat where it is there with its data
    habitat_overrides: tuple[str, ...] = ()  # `habitat.environment.max_episode_steps=300 ...`
    check_habitat: bool = False  # say what Habitat needs and what is missing, make one environment and step it
    camera: Literal["depth", "rgb"] = "depth"  # of pointnav
    image_size: int = 64  # of pointnav's camera: height and width in pixels
    action_delay: bool = False  # act by the last observation but one: environments simulate while the policy computes
    sim_latency: float = 0.0  # emulated simulator time in milliseconds that each step sleeps on average
    sim_latency_spread: float = 0.8  # sigma of that log-normal latency
    env_timeout: float = 300.0  # seconds that a step or a reset may take; then its worker is killed, and started again
    max_worker_restarts: int = 10  # an hour, because environments raised, hung or died

    runs_dir: str = "runs"  # where run folders are made
    exp_name: str = "ver"  # part of the run folder's name: {runs-dir}/{env-id}__{exp-name}__{seed}__{time}
    checkpoint_interval: int = 200_000  # steps between checkpoints (one is always written at the end)
    resume: str | None = None  # run folder to continue; its options hold, except those given here
    checkpoint: str | None = None  # checkpoint file to evaluate, instead of training
    init_from: str | None = None  # checkpoint file whose weights a new run starts from, as far as they fit
    freeze_encoder: bool = False  # with --init-from: the image encoders do not learn
    reset_critic: bool = False  # with --init-from: take all weights but the critic's
    reset_policy: bool = False  # with --init-from: take the encoders' weights alone
    controller: str | None = None  # checkpoint file of a PointNav agent, kept as it is; a planner learns where to send it
    # folder of a population of runs: from time to time, the worst take over from the best, and vary their options
    population: str | None = None
    population_size: int = 4  # P, runs in it
    member: int = 0  # number of this run, 0 .. P - 1; started again by it, it goes on
    evolve_interval: int = 100_000  # steps between its checkpoints and comparisons with the others
    evolve_after: int = 0  # steps before the first comparison
    evolve_by: str = "return"  # what is compared, the larger the better: `return`, or a metric, of the last 100 episodes
    eval_episodes: int = 200  # episodes of the evaluation (0: none)
    greedy: bool = False  # evaluate with the most probable action instead of a sampled one
    capture_video: bool = False  # write a gif of three evaluation episodes
    trace: str | None = None  # file for the run's timeline in Chrome's trace format: open it in ui.perfetto.dev
    debug: bool = False  # check every invariant of every rollout

    def __post_init__(self):
        check_options(self)

    @property
    def rollout_steps(self):
        """S, steps of one rollout."""
        return self.num_steps * self.num_envs


# ------------------------------------------------------------------------ Any Gymnasium environment


def make_env(options, split="train", number=0):
    """Environment `number` of a split (train or val) as the options name it. Those that are registered with arguments named
    `options`, `split` or `number` are told these; other environments differ in seeds alone."""
    module, _, name = registered_id(options).rpartition(":")
    if module:
        importlib.import_module(module)
    known = {"options": options, "split": split, "number": number}
    arguments = {key: value for key, value in known.items() if key in gym.spec(name).kwargs}
    if options.capture_video and split == "val":
        arguments["render_mode"] = "rgb_array"

    def make():
        return gym.make(name, disable_env_checker=True, **arguments)

    if options.sim_latency or options.action_delay:
        from notebooks.wrappers import wrap

        return wrap(make, options, number)
    return make()


class EnvSpec:
    """What trainer and network must know of an environment: its spaces, and the scalars that the last info of an episode
    holds (named in the environment's metadata). Plain, so that it can be sent to other processes."""

    def __init__(self, observations, action, metrics):
        self.observations, self.action, self.metrics = flatten(observations), action, tuple(metrics)
        self.episode_columns = "return", "length", *self.metrics  # of episode_stats
        # choices of each action dimension, none for continuous actions; A, the numbers that make one action
        discrete = isinstance(action, gym.spaces.Discrete)
        self.choices = [int(action.n)] if discrete else getattr(action, "nvec", np.zeros(0, int)).ravel().tolist()
        self.action_dims = len(self.choices) or math.prod(action.shape or ())
        self.action_dtype = np.dtype(np.int64 if self.choices else np.float32)
        # (key, type, shape): images of uint8 stay uint8, Discrete is int64, everything else float32
        kinds = {key: np.uint8 if space.dtype == np.uint8 else np.float32 for key, space in self.observations.items()}
        kinds |= {key: np.int64 for key, space in self.observations.items() if isinstance(space, gym.spaces.Discrete)}
        self.obs_shapes = {key: space.shape or () for key, space in self.observations.items()}
        self.obs_fields = [(key, kinds[key], shape) for key, shape in self.obs_shapes.items()]


def flatten(tree, name=""):
    """Nested dictionaries (or Dict spaces) as one flat dictionary; anything else under the key `obs`.

    >>> flatten({"goal": 1, "robot": {"arm": 2}})
    {'goal': 1, 'robot/arm': 2}
    """
    if not isinstance(tree, (dict, gym.spaces.Dict)):
        return {name or "obs": tree}
    parts = [flatten(below, f"{name}/{key}" if name else key) for key, below in tree.items()]
    return {key: leaf for part in parts for key, leaf in part.items()}


def to_env_action(space, action_A):
    """The policy's numbers as the environment wants them. Discrete: index plus the space's start. Box: -1..1 is the range
    low..high where it is bounded, and what lies beyond is clipped.

    >>> to_env_action(gym.spaces.Box(0.0, 4.0, (2,)), np.array([0.5, 7.0], np.float32))
    array([3., 4.], dtype=float32)
    """
    if isinstance(space, gym.spaces.Discrete):
        return int(action_A[0] + space.start)
    action = action_A.reshape(space.shape)
    if isinstance(space, gym.spaces.MultiDiscrete):
        return action.astype(space.dtype) + space.start
    bounded = np.isfinite(space.low) & np.isfinite(space.high)
    low, high = np.where(bounded, space.low, -1), np.where(bounded, space.high, 1)
    return np.clip(low + (action + 1) / 2 * (high - low), space.low, space.high).astype(space.dtype)


def derive_seed(*numbers):
    """A seed made of several numbers: 32 bits, so that every simulator takes it. Other numbers, another one."""
    return int(np.random.SeedSequence(numbers).generate_state(1)[0])


# ------------------------------------------------------------------------------------------- Policy


def orthogonal(layer, gain=math.sqrt(2)):
    """Orthogonal weights and zero biases, as is usual for PPO (Huang et al. 2022, detail 2)."""
    nn.init.orthogonal_(layer.weight, gain)
    nn.init.zeros_(layer.bias)
    return layer


class SmallCNN(nn.Module):
    """Small CNN for images of any size -> B x out_features. Its first layers read patches that do not overlap: on a CPU that
    is twice as fast as the usual overlapping 8x8 and 4x4 kernels. `images` stacks all images along the channels."""

    def __init__(self, images, out_features):
        super().__init__()
        self.images, self.out_features, stride = images, out_features, 4 if min(images.size) >= 32 else 2
        self.convolutions = nn.Sequential(
            orthogonal(nn.Conv2d(images.channels, 16, stride, stride)), nn.ReLU(),
            orthogonal(nn.Conv2d(16, 32, stride, stride)), nn.ReLU(),
            orthogonal(nn.Conv2d(32, 32, 3, 1, padding=1)), nn.ReLU(), nn.Flatten(),
        )  # fmt: skip
        flat_features = 32 * math.prod(size // stride // stride for size in images.size)
        self.out = orthogonal(nn.Linear(flat_features, out_features))

    def forward(self, obs):
        return torch.relu(self.out(self.convolutions(self.images(obs))))


ACTION_FEATURES = 32  # of the previous action's embedding


class Policy(nn.Module):
    """Encoders, embedding of the previous action, LSTM, action head and value head (VER section 4, small).

    The recurrent state of an environment is a 2L x H tensor: the L hidden rows, then the L cell rows. Without recurrence
    L is 0 and the state empty, so that nothing else has to know. The memory is all zeros at an episode's start.
    """

    def __init__(self, spec, options):
        super().__init__()
        hidden, self.choices, self.bf16 = options.hidden_size, spec.choices, options.bf16
        self.encoders = build_encoders(spec, options)
        features = sum(encoder.out_features for encoder in self.encoders.values())
        if self.choices:  # one table: each dimension's part begins with its start token
            offset_A = torch.tensor([0, *np.cumsum([n + 1 for n in self.choices])[:-1]])
            self.register_buffer("token_offset_A", offset_A, persistent=False)
            self.action_embedding = nn.Embedding(sum(self.choices) + len(self.choices), ACTION_FEATURES)
            possible = torch.arange(max(self.choices)) < torch.tensor(self.choices)[:, None]
            self.register_buffer("possible", possible, persistent=False)
        else:
            self.action_embedding = nn.Linear(spec.action_dims, ACTION_FEATURES)
            self.log_std_A = nn.Parameter(torch.full((spec.action_dims,), -0.5))
        in_features = features + ACTION_FEATURES
        self.num_layers = options.lstm_layers if options.recurrent else 0
        self.state_shape = (2 * self.num_layers, hidden)
        self.core = nn.LSTM(in_features, hidden, self.num_layers) if options.recurrent else nn.Linear(in_features, hidden)
        self.actor = orthogonal(nn.Linear(hidden, sum(self.choices) or spec.action_dims), 0.01)
        self.critic = orthogonal(nn.Linear(hidden, 1), 1.0)
        log_ent_coef = torch.tensor(math.log(max(options.ent_coef, 1e-30)))  # learned, and saved, with the network
        self.log_ent_coef = nn.Parameter(log_ent_coef, requires_grad=options.target_entropy is not None)
        self.cpc = ContrastivePrediction(features, hidden) if options.cpc else None

    def embed(self, action_BA, unknown_B):
        """Actions -> B x ACTION_FEATURES; the start token where they are unknown."""
        if self.choices:
            token_BA = torch.where(unknown_B[:, None], 0, action_BA + 1) + self.token_offset_A
            return self.action_embedding(token_BA).sum(1)
        return self.action_embedding(action_BA * ~unknown_B[:, None])

    def encode(self, obs, prev_action_BA, first_B):
        """All that does not depend on memory -> B x in_features. Where `first_B`, the previous action is unknown."""
        with torch.autocast(first_B.device.type, torch.bfloat16, enabled=self.bf16):
            features = [encoder(obs) for encoder in self.encoders.values()]
        return torch.cat([*(part.float() for part in features), self.embed(prev_action_BA, first_B)], dim=1)

    def heads(self, core_BH):
        """Action distribution and value (B) from the core's output."""
        out, value_B = self.actor(core_BH), self.critic(core_BH).squeeze(-1)
        if self.choices:  # one categorical for each action dimension, as wide as the widest
            logits = out.new_full((len(out), *self.possible.shape), -math.inf)
            logits[:, self.possible] = out
            each = Categorical(logits=logits, validate_args=False)
        else:
            each = Normal(out, self.log_std_A.expand_as(out).exp(), validate_args=False)
        return Independent(each, 1, validate_args=False), value_B

    def step(self, obs, prev_action_BA, first_B, state_B2LH):
        """One step of each of B environments: distribution, value_B and the recurrent state after the step. `state_B2LH` is
        zero where `first_B`: `infer` sees to that, so that the rollout stores the very state that was used."""
        x = self.encode(obs, prev_action_BA, first_B)
        if not self.num_layers:
            return *self.heads(torch.tanh(self.core(x))), state_B2LH
        after = []
        for layer, weights in enumerate(self.core.all_weights):  # nn.LSTM spends twice the time on a single step
            memory = state_B2LH[:, layer], state_B2LH[:, self.num_layers + layer]
            x, cell = torch.lstm_cell(x, memory, *weights)
            after.append((x, cell))
        hidden, cells = zip(*after)
        return *self.heads(x), torch.stack([*hidden, *cells], dim=1)

    def sequences(self, obs, prev_action_MA, first_M, state_Q2LH, batch_sizes):
        """All M steps of Q sequences, arranged as a PackedSequence: distribution, value_M, and for auxiliary losses
        (features, core_MH) (VER section 2.2, figure 3C).

        The encoders run once over all steps; the LSTM runs over time with batches that shrink as sequences end.
        `state_Q2LH` is the stored state before each sequence's first step, longest sequence first.
        """
        x = self.encode(obs, prev_action_MA, first_M)
        features = x[:, :-ACTION_FEATURES]  # all but the previous action
        if self.num_layers:
            hidden_LQH, cell_LQH = state_Q2LH.transpose(0, 1).contiguous().split(self.num_layers)
            core_MH = packed_lstm(self.core, x, batch_sizes, hidden_LQH, cell_LQH)  # nn.LSTM, faster
        else:
            core_MH = torch.tanh(self.core(x))
        return *self.heads(core_MH), (features, core_MH)


# ------------------------------------------------------------------------------------ Shared memory


class Shared:
    """A table in memory that processes share: a numpy array of records, whose fields appear as attributes.

    Pickling hands on the memory itself; it would copy numpy arrays, so `__setstate__` makes views in each process.
    """

    def __init__(self, count, fields):
        self.dtype = np.dtype(fields, align=True)
        self.memory = torch.zeros(count * self.dtype.itemsize, dtype=torch.uint8)
        share_memory([self.memory])
        self.__setstate__({})

    def __getstate__(self):
        return {name: value for name, value in vars(self).items() if name not in ("rows", *self.dtype.names)}

    def __setstate__(self, state):
        vars(self).update(state)
        self.rows = self.memory.numpy().view(self.dtype)
        vars(self).update({name: self.rows[name] for name in self.dtype.names})


class EnvIO(Shared):
    """One row for each environment: what it answered last, and the action it shall take next.

    A row belongs to the worker from the moment its number is sent down the worker's pipe until the worker sends it back;
    otherwise to who collects. So no lock is needed: nobody reads a row while it is being written.
    """

    def __init__(self, spec, num_envs, first_episode=0):
        obs = np.dtype(spec.obs_fields, align=True)
        fields = [
            ("obs", obs),
            ("final_obs", obs),  # the last one of a truncated episode: the reset replaces it
            ("action", spec.action_dtype, (spec.action_dims,)),
            ("first", bool),  # `obs` begins an episode
            ("reward", np.float32),
            ("terminated", bool),
            ("truncated", bool),
            ("episode", int),  # number of the episode that `obs` belongs to
            ("episode_stats", float, (2 + len(spec.metrics),)),  # return, length and metrics of the last one
            ("began_at", float),  # when the last step began (time.perf_counter) ...
            ("step_sec", float),  # ... and how long it took, a reset included
        ]
        super().__init__(num_envs, fields)
        self.episode[:] = first_episode


class Rollout(Shared):
    """S complete steps in time order (VER section 2.2), or N pending ones by environment. Observations and memory are
    tensors on `device`, the other columns are fields of the table."""

    def __init__(self, spec, steps, num_envs, state_shape, device, shared=False):
        self.steps, self.num_envs, self.device = steps, num_envs, device
        self.obs = {key: torch.from_numpy(np.zeros((steps, *s), kind)).to(device) for key, kind, s in spec.obs_fields}
        self.state = torch.zeros(steps, *state_shape, device=device)  # recurrent state before the step
        if shared:
            share_memory([*self.obs.values(), self.state])
        self.size = 0  # steps that are complete
        self.bootstrap = np.zeros(num_envs, np.float32)  # of each segment: the value of the state after its last step
        self.clock = (0.0, 0.0, 0.0)  # when collecting began and ended, and how many seconds it waited
        action = spec.action_dtype, (spec.action_dims,)
        fields = [
            ("env", int),
            ("segment", int),  # the environment (async: the trajectory)
            ("version", int),  # of the policy that chose the action
            ("first", bool),  # first step of an episode: the memory was reset before it
            ("prev_action", *action),
            ("action", *action),
            ("log_prob", np.float32),
            ("value", np.float32),
            ("asked_at", float),  # when its inference began (time.perf_counter) ...
            ("sent_at", float),  # ... and its action was sent
            ("reward", np.float32),  # and gamma * V(final observation), if the episode was truncated
            ("done", bool),  # last step of an episode
            ("episode_stats", float, (2 + len(spec.metrics),)),  # where it is done
            ("began_at", float),  # when the environment began the step ...
            ("step_sec", float),  # ... and how long it took
            ("advantage", np.float32),
            ("returns", np.float32),  # targets of the value
            ("weight", np.float32),  # in the loss
        ]
        super().__init__(steps, fields)

    def copy(self, step_B, other, other_B):
        """Copy the steps `other_B` of another rollout to the indices `step_B`."""
        self.rows[step_B] = other.rows[other_B]
        to_B, from_B = torch.from_numpy(step_B).to(self.device), torch.from_numpy(other_B).to(other.device)
        for mine, others in zip((*self.obs.values(), self.state), (*other.obs.values(), other.state)):
            mine.index_copy_(0, to_B, others.index_select(0, from_B).to(self.device))


# ------------------------------------------------------------------------------ Environment workers


def send_numbers(pipe, numbers):
    """One write of several numbers: atomic up to PIPE_BUF bytes, however many processes write to this pipe."""
    os.write(pipe.fileno(), array("i", numbers))


def read_numbers(pipe):
    """The numbers that lie in the pipe, at least one (waits for it); none at the pipe's end."""
    return array("i", os.read(pipe.fileno(), 1 << 16)).tolist()


class Environment:
    """One environment, and its row of EnvIO. Lives in a worker process, or where experience is collected."""

    def __init__(self, number, options, split, spec, io):
        self.number, self.options, self.split, self.spec, self.io = number, options, split, spec, io
        self.env, self.length = None, 0

    def answer(self):
        """Start when asked for the first time, then step."""
        self.start() if self.env is None else self.step()

    def start(self):
        """Make the environment. If a step is in flight (asked of an earlier process that is gone), this answer completes it:
        truncated at the last observation, reward 0."""
        io, e = self.io, self.number
        self.env = make_env(self.options, self.split, e)
        io.reward[e], io.terminated[e], io.truncated[e], io.episode_stats[e] = 0.0, False, True, np.nan
        io.began_at[e], io.step_sec[e] = time.perf_counter(), 0.0
        io.final_obs[e] = io.obs[e]
        self.reset()

    def reset(self):
        """Begin the next episode, from a seed of its own."""
        self.io.episode[self.number] += 1
        seed = derive_seed(self.split == "val", self.options.seed, self.number, self.io.episode[self.number])
        self.length, self.total_reward = 0, 0.0
        self.write(self.io.obs, flatten(self.env.reset(seed=seed)[0]))
        self.io.first[self.number] = True

    def step(self):
        """Take the action that the row holds, write the answer there, and reset if the episode ended.

        The final observation of a truncated episode is written apart, because the reset overwrites the row: its value is
        what the return goes on with. Every episode is reset here, so an autoreset wrapper changes nothing.
        """
        io, e, began, self.length = self.io, self.number, time.perf_counter(), self.length + 1
        observation, reward, terminated, truncated, info = self.env.step(to_env_action(self.spec.action, io.action[e]))
        self.total_reward += float(reward)
        io.reward[e], io.terminated[e], io.truncated[e] = reward, terminated, truncated and not terminated
        io.first[e] = False
        if terminated or truncated:
            io.episode_stats[e] = self.total_reward, self.length, *(info.get(name, np.nan) for name in self.spec.metrics)
            self.write(io.final_obs, flatten(observation))
            self.reset()
        else:
            self.write(io.obs, flatten(observation))
        io.began_at[e], io.step_sec[e] = began, time.perf_counter() - began

    def write(self, rows, leaves):
        """Copy a flat observation into this environment's row of `obs` or `final_obs`."""
        for key, leaf in leaves.items():
            rows[key][self.number] = leaf

    def close(self):
        """Close the environment, if there is one."""
        if self.env is not None:
            self.env.close()


def env_worker(inbox, outbox, environments):
    """Body of a worker process: let these environments answer whenever they are asked to.

    Ends at the end of the pipe, when the process that collects closes it or dies. With several environments this is
    double-buffered sampling (Sample Factory, section 3.2): while the action of one is computed, the worker steps another.
    """
    torch.set_num_threads(1)
    while asked := read_numbers(inbox):
        answered, since = [], time.perf_counter()
        for e in asked:
            environments[e].answer()
            answered.append(e)
            if e == asked[-1] or time.perf_counter() - since > 0.002:  # several cheap answers by one write
                send_numbers(outbox, answered)
                answered, since = [], time.perf_counter()
    for environment in environments.values():
        environment.close()


class Workers:
    """The worker processes, seen from who collects. Environments go out by `send`, when actions for them are in place (at
    first: when they shall start), and come back by `receive`."""

    def __init__(self, environments):
        self.environments, self.num_workers = environments, count_workers(environments[0].options)
        self.context = process_context()
        self.sent_at_N = np.zeros(len(environments))  # when each was asked; 0: it has answered
        self.answers, self.outbox = self.context.Pipe(duplex=False)
        self.pipes = [self.context.Pipe(duplex=False) for _ in range(self.num_workers)]
        self.processes = [self.start(worker) for worker in range(self.num_workers)]
        self.send(np.arange(len(environments)))

    def start(self, worker, body=env_worker, *more):
        """Start a worker's process: it has every W-th environment."""
        mine = {environment.number: environment for environment in self.environments[worker :: self.num_workers]}
        process = self.context.Process(target=body, args=(self.pipes[worker][0], self.outbox, mine, *more), daemon=True)
        process.start()
        return process

    def send(self, env_B):
        """Let these environments answer."""
        self.sent_at_N[env_B] = time.monotonic()
        for worker in set((env_B % self.num_workers).tolist()):
            send_numbers(self.pipes[worker][1], env_B[env_B % self.num_workers == worker].tolist())

    def receive(self, timeout_sec):
        """Numbers of the environments that have answered; [] if none does within this time."""
        ready, _, _ = select.select([self.answers], [], [], timeout_sec)
        answered = read_numbers(self.answers) if ready else []
        self.sent_at_N[answered] = 0.0
        return answered

    def close(self):
        """End the processes: they leave at the end of their pipe; who has not left after 5 s is killed."""
        until = time.monotonic() + 5
        for _, command in self.pipes:
            command.close()
        for process in self.processes:
            process.join(max(0.0, until - time.monotonic()))
            process.kill()


# --------------------------------------------------------------------------------------- Collecting


class Collector:
    """What collecting remembers from one inference batch to the next."""

    def __init__(self, workers, io, policy, spec, options, enough=lambda steps: False):
        num_envs = options.num_envs
        self.workers, self.io, self.options = workers, io, options
        self.enough = enough  # whether a rollout ends early at so many steps (unless told, never)
        self.device = next(policy.parameters()).device
        # each environment's step in flight, and whether there is one
        self.pending = Rollout(spec, num_envs, num_envs, policy.state_shape, self.device)
        self.in_flight_N = np.zeros(num_envs, bool)
        self.answered = []  # environments whose answer has come and was not taken yet, in order of arrival
        self.idle = np.arange(0)  # those whose answer was taken, and who got no action yet
        self.state_N = torch.zeros(num_envs, *policy.state_shape, device=self.device)  # before the next step
        self.prev_action_N = np.zeros_like(self.pending.action)
        self.steps_N = np.zeros(num_envs, int)  # that each environment has completed in this rollout
        self.quota = options.rollout_steps if options.sampler == "ver" else options.num_steps  # most that one may give
        self.version, self.greedy, self.waited_sec = 0, False, 0.0


def await_answers(c, most):
    """Dynamic batching (VER section 2.1): the environments that have answered, at least one, in order of arrival. `sync`
    waits for all. Empty if the rollout shall end first."""
    needed = c.options.num_envs - len(c.idle) if c.options.sampler == "sync" else 1
    began = time.perf_counter()
    c.answered += c.workers.receive(0)
    while len(c.answered) < needed and not c.enough(c.steps_N.sum()):
        c.answered += c.workers.receive(0.05)
    c.waited_sec += time.perf_counter() - began
    taken = min(most, c.options.max_requests) if len(c.answered) >= needed else 0
    env_B, c.answered = c.answered[:taken], c.answered[taken:]
    return np.array(env_B, int)


def infer(policy, c, env_B, source="obs"):
    """One batched step of the policy for these environments: what it saw (observation, memory), and its distribution,
    value_B and memory after the step. Source `final_obs`: at the end of a truncated episode, not the start of the next."""
    rows = getattr(c.io, source)
    obs = {key: torch.from_numpy(rows[key][env_B]).to(c.device) for key in rows.dtype.names}
    first_B = torch.from_numpy(c.io.first[env_B] & (source == "obs")).to(c.device)
    state_B2LH = c.state_N[torch.from_numpy(env_B)] * ~first_B[:, None, None]
    prev_action_BA = torch.from_numpy(c.prev_action_N[env_B]).to(c.device)
    return (obs, state_B2LH), *policy.step(obs, prev_action_BA, first_B, state_B2LH)


def act(policy, c, env_B):
    """Choose the next actions of these environments, remember the steps as pending, and send the actions."""
    if not len(env_B):
        return
    pending = c.pending
    pending.asked_at[env_B], pending.prev_action[env_B] = time.perf_counter(), c.prev_action_N[env_B]
    (obs, state_B2LH), distribution, value_B, after_B2LH = infer(policy, c, env_B)
    action_BA = distribution.mode if c.greedy else distribution.sample()
    index_B = torch.from_numpy(env_B)
    for key, part in obs.items():
        pending.obs[key][index_B] = part
    pending.state[index_B], c.state_N[index_B] = state_B2LH, after_B2LH
    pending.log_prob[env_B], pending.value[env_B] = torch.stack([distribution.log_prob(action_BA), value_B]).cpu().numpy()
    pending.action[env_B] = c.prev_action_N[env_B] = c.io.action[env_B] = action_BA.cpu().numpy()
    pending.env[env_B] = pending.segment[env_B] = env_B
    pending.version[env_B], pending.first[env_B] = c.version, c.io.first[env_B]
    c.in_flight_N[env_B], pending.sent_at[env_B] = True, time.perf_counter()
    c.workers.send(env_B)


def complete_steps(policy, rollout, c, env_B, step_B):
    """The answers of these environments complete their pending steps, which move to the indices `step_B` of the rollout.

    In-flight carry-over (VER section 2.2) is nothing more than this: a pending step may have been sent in an earlier
    rollout, by an older policy. It keeps the action, log-probability, value and version that it was sent with, PPO's ratio
    accounts for its age, and it counts for the rollout in which it is completed. So nothing that was simulated is lost.

    A truncated episode would have gone on: its last reward gets the discounted value of the final observation, computed
    with the memory of that episode (Pardo et al. 2018), which `state_N` still holds. From then on, all ends are alike.
    """
    io = c.io
    rollout.copy(step_B, c.pending, env_B)
    rollout.reward[step_B], rollout.done[step_B] = io.reward[env_B], io.terminated[env_B] | io.truncated[env_B]
    rollout.episode_stats[step_B] = io.episode_stats[env_B]
    rollout.began_at[step_B], rollout.step_sec[step_B] = io.began_at[env_B], io.step_sec[env_B]
    c.steps_N[env_B] += 1
    c.in_flight_N[env_B] = False
    truncated_B = io.truncated[env_B]
    if truncated_B.any():
        _, _, value_B, _ = infer(policy, c, env_B[truncated_B], "final_obs")
        rollout.reward[step_B[truncated_B]] += c.options.gamma * value_B.cpu().numpy()


@torch.inference_mode()
def collect_rollout(policy, rollout, c):
    """Collect exactly S steps (VER section 2.2), from whichever environments deliver them; fewer if there is `enough`.

    Each pass: take the environments that have answered, complete their steps, choose and send their next actions. An
    environment of which no more steps are wanted (the rollout is full; `nover`, `sync`: it gave T) gets no action: it is
    idle until the next rollout, and its next step is the new policy's. What is in flight at the end stays pending.

    The returns need the value of what follows each environment's last step. For a pending step that is the value it was
    sent with; for idle environments, it is computed at the end, in one batch.
    """
    c.steps_N[:], rollout.size, c.waited_sec, began_at = 0, 0, 0.0, time.perf_counter()
    idle, c.idle = c.idle, c.idle[:0]
    act(policy, c, idle)
    while rollout.size < rollout.steps and not c.enough(rollout.size):
        env_B = await_answers(c, most=rollout.steps - rollout.size)
        acted_B = env_B[c.in_flight_N[env_B]]  # the others have just started: no step to complete
        step_B = np.arange(rollout.size, rollout.size + len(acted_B))
        complete_steps(policy, rollout, c, acted_B, step_B)
        rollout.size += len(acted_B)
        wanted_B = (c.steps_N[env_B] < c.quota) & (rollout.size < rollout.steps)
        act(policy, c, env_B[wanted_B])
        c.idle = np.append(c.idle, env_B[~wanted_B])
    rollout.bootstrap[:] = c.pending.value  # of what is in flight; those of idle environments follow
    if len(c.idle):
        rollout.bootstrap[c.idle] = infer(policy, c, c.idle)[2].cpu()
    rollout.clock = began_at, time.perf_counter(), c.waited_sec


def inline_rollouts(policy, spec, options, run):
    """Rollouts without end: this process collects, and whoever takes them learns, by turns (VER appendix A.1)."""
    io = EnvIO(spec, options.num_envs, first_episode=run.step)  # steps >= episodes: none comes twice
    rollout = Rollout(spec, options.rollout_steps, options.num_envs, policy.state_shape, next(policy.parameters()).device)
    with contextlib.closing(make_workers(options, "train", spec, io)) as workers:
        c = Collector(workers, io, policy, spec, options, run.enough)
        for version in itertools.count(run.update):
            c.version = version
            torch.set_num_threads(1)  # the workers want the cores now
            collect_rollout(policy, rollout, c)
            yield rollout


# ---------------------------------------------------------------------------- Sequences and packing


def find_sequences(segment_S, first_S):
    """The steps of every sequence, in time order: a segment, cut where episodes begin (VER section 2.2).

    >>> find_sequences(np.array([0, 1, 0, 1, 0]), np.array([False, True, True, False, False]))
    [array([0]), array([2, 4]), array([1, 3])]
    """
    order_S = np.argsort(segment_S, kind="stable")
    begins_S = first_S[order_S] | (np.diff(segment_S[order_S], prepend=-1) != 0)
    return np.split(order_S, np.flatnonzero(begins_S)[1:])


def cut_minibatches(sequences, size):
    """Lay sequences end to end and cut them into mini-batches of `size` steps (VER section 2.2, figure 3B): lists of
    sequences. One that a cut splits goes on in the next mini-batch, as a sequence that starts from its stored state.

    >>> list(cut_minibatches([np.array([1, 3]), np.array([0, 2, 4, 5])], 3))
    [[array([1, 3]), array([0])], [array([2, 4, 5])]]
    """
    minibatch, room = [], size
    for sequence in sequences:
        while len(sequence):
            minibatch.append(sequence[:room])
            sequence, room = sequence[room:], room - len(minibatch[-1])
            if not room:
                yield minibatch
                minibatch, room = [], size


def pack(sequences):
    """The steps of these sequences as a PackedSequence (VER section 2.2, figure 3C): all first steps, then all second steps
    of those that have one, ... Longest first. Returns them, and how many sequences are still running at each time.

    >>> pack([np.array([7]), np.array([4, 5, 6])])
    (tensor([4, 7, 5, 6]), tensor([2, 1, 1]))
    """
    packed = pack_sequence([torch.from_numpy(sequence) for sequence in sequences], enforce_sorted=False)
    return packed.data, packed.batch_sizes


# ------------------------------------------------------------------------------ Returns and weights


def compute_advantages(segment_S, reward_S, value_S, done_S, bootstrap, gamma, gae_lambda, keep_S=None):
    """Generalized advantage estimation over steps in time order, for all segments at once (DD-PPO section 4).

    Walks backwards and keeps, for each segment, value and advantage of the step that follows: at first the segment's
    bootstrap value and 0, and where an episode is done, 0 and 0. `keep_S`: how much of a step's advantage earlier steps see
    (all, but for async). Returns float32 advantages.

    >>> compute_advantages(*map(np.array, ([0, 0, 1], [1., 1., 1.], [0., 0., 0.], [False, True, False], [9., 4.])), 0.5, 1.0)
    array([1.5, 1. , 3. ], dtype=float32)
    """
    next_value, next_advantage, advantage_S = bootstrap.tolist(), [0.0] * len(bootstrap), np.zeros(len(value_S), np.float32)
    keep_S = np.ones(len(value_S)) if keep_S is None else keep_S
    steps = list(zip(*(column.tolist() for column in (segment_S, reward_S, value_S, done_S, keep_S))))
    for step in range(len(steps) - 1, -1, -1):
        s, reward, value, done, keep = steps[step]
        if done:
            next_value[s] = next_advantage[s] = 0.0
        advantage_S[step] = advantage = reward + gamma * (next_value[s] + gae_lambda * next_advantage[s]) - value
        next_value[s], next_advantage[s] = value, keep * advantage
    return advantage_S


def importance_weights(env_S, num_envs, maximum=1.0):
    """Truncated importance weights for the biased sampling of environments (VER section 4, table A1 "Max VER IS").

    An environment that gave K_e of the S steps was sampled K_e / S of the time instead of 1 / N, so each of its steps
    weighs min(maximum, (S / N) / K_e). Slow environments are not weighted up.

    >>> importance_weights(np.array([0, 0, 0, 0, 1, 2]), num_envs=3)
    array([0.5, 0.5, 0.5, 0.5, 1. , 1. ], dtype=float32)
    """
    steps_N = np.bincount(env_S, minlength=num_envs)
    weight_N = np.minimum(maximum, len(env_S) / num_envs / np.maximum(steps_N, 1))
    return weight_N.astype(np.float32)[env_S]


def add_returns(policy, rollout, options):
    """Write advantage, return and weight of every step into the rollout."""
    if options.sampler == "async":
        return add_corrected_returns(policy, rollout, options)
    new = slice(rollout.size)  # all S, unless it was ended early
    columns = rollout.segment[new], rollout.reward[new], rollout.value[new], rollout.done[new]
    rollout.advantage[new] = compute_advantages(*columns, rollout.bootstrap, options.gamma, options.gae_lambda)
    rollout.returns[new] = rollout.advantage[new] + rollout.value[new]
    rollout.weight[new] = importance_weights(rollout.env[new], rollout.num_envs)


# ---------------------------------------------------------------------------------------------- PPO


def ppo_loss(distribution, value_M, batch, log_ent_coef, options):
    """Clipped PPO objective, value loss (not clipped) and entropy term, every step weighted by `batch["weight"]`.

    `batch` holds M old actions, log-probabilities, advantages, returns and weights. The entropy coefficient
    exp(log_ent_coef) is fixed, or with --target-entropy learned under the constraint entropy >= target (VER section 4):
    it grows while the plain mean of the entropy is below. Returns the loss and a dictionary of what to log.
    """
    weight_M = batch["weight"]
    log_ratio_M = distribution.log_prob(batch["action"]) - batch["log_prob"]
    ratio_M = log_ratio_M.exp()
    clipped_M = ratio_M.clamp(1 - options.clip_coef, 1 + options.clip_coef)
    policy_loss = -(weight_M * torch.minimum(ratio_M * batch["advantage"], clipped_M * batch["advantage"])).mean()
    value_loss = 0.5 * (weight_M * (value_M - batch["returns"]) ** 2).mean()
    entropy_M, ent_coef = distribution.entropy(), log_ent_coef.exp()
    loss = policy_loss + options.vf_coef * value_loss - ent_coef.detach() * (weight_M * entropy_M).mean()
    if options.target_entropy is not None:  # moves the coefficient alone
        loss = loss + ent_coef * (entropy_M.mean().detach() - options.target_entropy)
    with torch.no_grad():
        logs = {
            "losses/policy_loss": policy_loss,
            "losses/value_loss": value_loss,
            "losses/entropy": entropy_M.mean(),
            "losses/approx_kl": (ratio_M - 1 - log_ratio_M).mean(),
            "losses/clipfrac": ((ratio_M - 1).abs() > options.clip_coef).float().mean(),
            "losses/ent_coef": ent_coef,
        }
    return loss, {name: value.detach() for name, value in logs.items()}


def run_sequences(policy, rollout, sequences):
    """The policy on the packed steps of these sequences: their distribution, value_M and (features, core_MH), a batch of
    what the rollout holds of them, and the batch sizes."""
    step_M, batch_sizes = pack(sequences)
    rows_M, device = rollout.rows[step_M.numpy()], next(policy.parameters()).device
    names = "prev_action", "action", "first", "log_prob", "advantage", "returns", "weight"
    batch = {name: torch.from_numpy(rows_M[name].copy()).to(device) for name in names} | {"step": step_M}
    obs = {key: part.index_select(0, step_M.to(part.device)).to(device) for key, part in rollout.obs.items()}
    state_Q2LH = rollout.state[step_M[: batch_sizes[0]]].to(device)  # the first Q steps begin the Q sequences
    results = policy.sequences(obs, batch["prev_action"], batch["first"], state_Q2LH, batch_sizes)
    return *results, batch, batch_sizes


def advantage_scale(rollout, average):
    """Mean and deviation of the advantages of all processes that learn together (--norm-adv)."""
    moments = torch.tensor([(rollout.advantage.astype(float) ** power).mean() for power in (1, 2)])
    average([moments])
    mean, square = moments.tolist()
    return mean, math.sqrt(max(0.0, square - mean**2)) + 1e-8


def minibatch_step(policy, optimizer, rollout, sequences, scale, options, average):
    """One optimizer step on one mini-batch; none if the gradient is not finite. Returns what to log."""
    distribution, value_M, extras, batch, batch_sizes = run_sequences(policy, rollout, sequences)
    batch["advantage"] = (batch["advantage"] - scale[0]) / scale[1]
    loss, logs = ppo_loss(distribution, value_M, batch, policy.log_ent_coef, options)
    if options.cpc:
        logs["losses/cpc"] = prediction_loss = cpc_loss(policy, *extras, batch["action"], batch_sizes)
        loss = loss + CPC_COEF * prediction_loss
    optimizer.zero_grad()
    loss.backward()
    average([parameter.grad for parameter in policy.parameters() if parameter.grad is not None])
    network = [parameter for parameter in policy.parameters() if parameter is not policy.log_ent_coef]
    norm = nn.utils.clip_grad_norm_(network, options.max_grad_norm)
    finite = bool(torch.isfinite(norm))
    if finite:
        optimizer.step()
    if options.target_entropy is not None:
        policy.log_ent_coef.data.clamp_(math.log(1e-4), 0.0)  # 1e-4 .. 1 (VER table A1)
    return {**logs, "losses/grad_norm": norm, "losses/skipped": torch.tensor(float(not finite))}


def ppo_update(policy, optimizer, rollout, options, average=lambda tensors: None):
    """Learn from a rollout: --update-epochs passes over all its steps, each in --num-minibatches mini-batches of equal size,
    made of the sequences in a new random order. Returns the means of what to log.

    `average` averages tensors over all processes that learn together, in place; one alone has nothing to do. Raises
    FloatingPointError if not one mini-batch has a finite gradient.
    """
    sequences, logs = find_sequences(rollout.segment, rollout.first), []
    scale = advantage_scale(rollout, average) if options.norm_adv else (0.0, 1.0)
    for _ in range(options.update_epochs):
        shuffled = [sequences[q] for q in torch.randperm(len(sequences)).tolist()]
        for minibatch in cut_minibatches(shuffled, rollout.steps // options.num_minibatches):
            logs.append(minibatch_step(policy, optimizer, rollout, minibatch, scale, options, average))
    update_statistics(policy, rollout, average)  # of RGB images
    means = {name: torch.stack([log[name].detach() for log in logs]).mean().item() for name in logs[0]}
    if means["losses/skipped"] == 1:
        raise FloatingPointError("not one gradient of this update was finite: try a lower --learning-rate")
    return means


# -------------------------------------------------------------------------------------------- Train


def learning_rate_at(step, options):
    """Cosine from --learning-rate to 0 (VER table A1)."""
    return options.learning_rate * 0.5 * (1 + math.cos(math.pi * min(1.0, step / options.total_timesteps)))


def build(options):
    """The environment's spec, a new policy and its optimizer."""
    spec = describe_env(options)
    torch.manual_seed(options.seed)
    policy = make_policy(spec, options).to(choose_device(options))
    return spec, policy, torch.optim.Adam(policy.parameters(), lr=options.learning_rate, eps=1e-5, fused=True)


def train(options):
    """Train to --total-timesteps, save, evaluate. Returns the run folder."""
    spec, policy, optimizer = build(options)
    with contextlib.closing(Run(options, spec, policy, optimizer)) as run:  # run folder, log, checkpoints: below
        torch.manual_seed(derive_seed(SEED_OF_LEARNER, options.seed, run.step))
        source = rollout_source(policy, spec, options, run)  # here inline_rollouts; --overlap, async: below
        with contextlib.closing(source), run.training():
            while run.step < options.total_timesteps:
                rollout = run.collect(source)
                optimizer.param_groups[0]["lr"] = learning_rate_at(run.step, options)
                with run.learning() as logs:
                    add_returns(policy, rollout, options)
                    logs |= ppo_update(policy, optimizer, rollout, options)
                run.log(rollout, logs)
        run.evaluate()
    return run.folder


# End of the lesson


# --------------------------------------------------------- Collecting while the main process learns
# Adds a process that collects while this one learns: --overlap, and --sampler async (Sample Factory's APPO). The lesson
# calls `rollout_source`, and for async, whose data are older, `add_corrected_returns`.


def rollout_source(policy, spec, options, run):
    """The iterator over rollouts that --sampler and --overlap ask for. Closing it ends its processes."""
    overlaps = options.overlap or options.sampler == "async"
    return (overlapped_rollouts if overlaps else inline_rollouts)(policy, spec, options, run)


def overlapped_rollouts(policy, spec, options, run):
    """Another process fills one of two rollouts while the learner uses the other. With --overlap, gradients are delayed by
    one rollout, as in HTS-RL (Liu et al. 2020; VER appendix E); PPO's ratio accounts for it.

    Rollouts and weights travel through shared CPU memory. Version v of the weights is row v % 2: the next version is written
    to the other row, by which nobody has acted since the update before. Raises EnvironmentFailure if the process ends.
    """
    size = spec, options.rollout_steps, options.num_envs, policy.state_shape, torch.device("cpu")
    rollouts, context = [Rollout(*size, shared=True) for _ in range(2)], process_context()
    weights = torch.stack([nn.utils.parameters_to_vector(policy.parameters()).detach().cpu()] * 2).share_memory_()
    version = torch.tensor(run.update).share_memory_()
    (inbox, commands), (messages, outbox) = context.Pipe(duplex=False), context.Pipe(duplex=False)
    args = inbox, outbox, spec, options, run.step, rollouts, weights, version
    process = context.Process(target=collector_process, args=args)
    process.start()
    inbox.close(), outbox.close()  # only the process has them: when it dies, the messages end
    try:
        send_numbers(commands, [0])
        for number in itertools.cycle([0, 1]):
            while not messages.poll(1.0):
                if run.enough():
                    yield rollouts[number]
            try:
                message = messages.recv()  # size, bootstrap and clock of the rollout, or why there is none
            except EOFError:
                process.join(5)
                message = EnvironmentFailure(f"the collecting process died with exit code {process.exitcode}")
            if isinstance(message, Exception):
                raise message
            vars(rollouts[number]).update(message)
            send_numbers(commands, [1 - number])
            yield rollouts[number]
            with torch.no_grad():
                weights[(version + 1) % 2] = nn.utils.parameters_to_vector(policy.parameters()).cpu()
            version += 1
    finally:
        commands.close()  # it leaves when its pipe ends
        process.join(10)
        process.kill()


def collector_process(inbox, outbox, spec, options, first_episode, rollouts, weights, version):
    """Body of that process: collect into the rollout whose number arrives, until the main process ends the pipe or dies."""
    torch.set_num_threads(1)
    torch.manual_seed(derive_seed(SEED_OF_COLLECTOR, options.seed, first_episode))
    device = choose_device(options)
    policy = make_policy(spec, options).to(device).requires_grad_(False)

    def ended(steps=0):
        return bool(select.select([inbox], [], [], 0)[0])

    def newest_policy():
        if c.version != version:
            c.version = int(version)
            nn.utils.vector_to_parameters(weights[c.version % 2].to(device), policy.parameters())
        return policy

    try:
        io = EnvIO(spec, options.num_envs, first_episode)
        with contextlib.closing(make_workers(options, "train", spec, io)) as workers:
            c = Collector(workers, io, policy, spec, options, ended)
            c.version, trajectories = -1, Trajectories(spec, policy, options)
            while number := read_numbers(inbox):
                rollout = rollouts[number[0]]
                if options.sampler == "async":
                    trajectories.collect(newest_policy, rollout, c)
                else:
                    collect_rollout(newest_policy(), rollout, c)
                if not ended():
                    outbox.send({name: getattr(rollout, name) for name in ("size", "bootstrap", "clock")})
    except Exception as error:
        outbox.send(error if isinstance(error, EnvironmentFailure) else EnvironmentFailure(traceback.format_exc()))


class Trajectories:
    """--sampler async (Sample Factory's APPO, section 3.1): environments never stop, each fills trajectories of T steps by
    the newest weights, and a rollout is the N trajectories that were finished first, whoever they are from."""

    def __init__(self, spec, policy, options):
        device = next(policy.parameters()).device
        self.unfinished = Rollout(spec, options.rollout_steps, options.num_envs, policy.state_shape, device)  # T of each
        self.finished = []  # environments whose trajectory waits to be copied

    @torch.inference_mode()
    def collect(self, newest_policy, rollout, c):
        """Collect one rollout: its segments are trajectories, its bootstrap values those of the steps after them."""
        rollout.size, c.waited_sec, began_at, length = 0, 0.0, time.perf_counter(), c.options.num_steps
        while not c.enough(rollout.size):
            while self.finished and rollout.size < rollout.steps:
                e, segment, steps = self.finished.pop(0), rollout.size // length, np.arange(length)
                rollout.copy(rollout.size + steps, self.unfinished, e * length + steps)
                rollout.segment[rollout.size + steps], rollout.bootstrap[segment] = segment, c.pending.value[e]
                rollout.size += length
            if rollout.size == rollout.steps:
                break
            env_B, policy = await_answers(c, most=len(c.in_flight_N)), newest_policy()
            acted_B = env_B[c.in_flight_N[env_B]]
            complete_steps(policy, self.unfinished, c, acted_B, acted_B * length + c.steps_N[acted_B])
            act(policy, c, env_B)
            full_B = acted_B[c.steps_N[acted_B] == length]
            c.steps_N[full_B], self.finished = 0, [*self.finished, *full_B]
        rollout.clock = began_at, time.perf_counter(), c.waited_sec


@torch.no_grad()
def add_corrected_returns(policy, rollout, options):
    """`add_returns` for data of older policies: V-trace (IMPALA, section 4.1) by what the policy makes of them now.

    A step's ratio is its action's probability now divided by that when it acted; of its advantage, min(1, ratio) counts for
    its value's target and for the steps before it. The advantage itself is not multiplied, because PPO's objective is. Where
    all ratios are 1, this is GAE. All steps weigh 1, because the trajectories are equally long.
    """
    keep_S, value_S = np.zeros((2, rollout.steps), np.float32)
    sequences = find_sequences(rollout.segment, rollout.first)
    for minibatch in cut_minibatches(sequences, rollout.steps // options.num_minibatches):
        distribution, value_M, _, batch, _ = run_sequences(policy, rollout, minibatch)
        ratio_M = (distribution.log_prob(batch["action"]) - batch["log_prob"]).exp()
        value_S[batch["step"]], keep_S[batch["step"]] = value_M.cpu(), ratio_M.clamp(max=1.0).cpu()
    columns = rollout.segment, rollout.reward, value_S, rollout.done, rollout.bootstrap
    rollout.advantage[:] = compute_advantages(*columns, options.gamma, options.gae_lambda, keep_S)
    rollout.returns[:], rollout.weight[:] = value_S + keep_S * rollout.advantage, 1.0


# ----------------------------------------------------------------------------------------- Encoders
# Adds image and vector encoders, among them the papers' residual networks, and running statistics of RGB images. The lesson
# calls `build_encoders`, and `update_statistics` after every update.


def image_layout(space):
    """Channels, height, width of an image (a Box of two or three dimensions, of 8 x 8 pixels at least) and whether the
    channels come last; None for other observations.

    >>> image_layout(gym.spaces.Box(0, 255, (3, 36, 40), np.uint8))
    (3, 36, 40, False)
    """
    if not isinstance(space, gym.spaces.Box) or len(space.shape) not in (2, 3) or sorted(space.shape)[-2] < 8:
        return None
    shape = space.shape if len(space.shape) == 3 else (*space.shape, 1)
    return (shape[2], *shape[:2], True) if shape[2] <= shape[0] else (*shape, False)


class Images(nn.Module):
    """The images of one size (RGB and depth, say), stacked as B x channels x height x width. uint8 is scaled to 0..1; where
    there is any, every channel is normalized by running statistics (DD-PPO section 5), which are parameters without
    gradient: whoever gets the weights gets them too."""

    def __init__(self, spaces):
        super().__init__()
        self.layouts = {key: image_layout(space) for key, space in spaces.items()}
        self.size, self.channels = next(iter(self.layouts.values()))[1:3], sum(layout[0] for layout in self.layouts.values())
        self.normalized = any(space.dtype == np.uint8 for space in spaces.values())
        moments_2C = torch.tensor([[0.0], [1.0]]).repeat(1, self.channels)  # means of value and square
        self.moments_2C = nn.Parameter(moments_2C, requires_grad=False)
        self.rollouts = nn.Parameter(torch.zeros(()), requires_grad=False)  # how many rollouts they are the means of

    def stack(self, obs):
        """The images, not yet normalized."""
        images = [
            obs[key].reshape(*obs[key].shape[:3], -1).permute(0, 3, 1, 2) if layout[3] else obs[key]
            for key, layout in self.layouts.items()
        ]
        images = [image / 255 if image.dtype == torch.uint8 else image for image in images]
        return torch.cat(images, dim=1) if len(images) > 1 else images[0]

    def forward(self, obs):
        if not self.normalized:
            return self.stack(obs)
        mean_C, square_C = self.moments_2C[..., None, None]
        return (self.stack(obs) - mean_C) / (square_C - mean_C**2).clamp(min=1e-4).sqrt()


def image_encoders(policy):
    """Those encoders of a policy that read images."""
    return [encoder for encoder in policy.encoders.values() if hasattr(encoder, "images")]


@torch.no_grad()
def update_statistics(policy, rollout, average):
    """Let the running statistics take in 256 images of a rollout, and those of other ranks. Frozen encoders keep theirs."""
    index = torch.arange(0, rollout.steps, rollout.steps // 256 + 1)
    for encoder in image_encoders(policy):
        images, device = encoder.images, encoder.out.weight.device
        if images.normalized and encoder.out.weight.requires_grad:
            image_BCHW = images.stack({key: rollout.obs[key][index].to(device) for key in images.layouts})
            moments_2C = torch.stack([(image_BCHW**power).mean(dim=(0, 2, 3)) for power in (1, 2)])
            average([moments_2C])
            images.rollouts += 1
            images.moments_2C += (moments_2C - images.moments_2C) / images.rollouts


BACKBONES = {  # all of half the usual width and with GroupNorm; `blocks` in the four stages
    "resnet18_plain": {"blocks": (2, 2, 2, 2), "bottleneck": False},  # VER section 3
    "resnet18": {"blocks": (2, 2, 2, 2), "bottleneck": False, "modern": True},  # VER section 4
    "resnet50": {"blocks": (3, 4, 6, 3)},  # DD-PPO section 4, appendix A
    "se_resnext50": {"blocks": (3, 4, 6, 3), "groups": 16, "squeeze": True},
    "se_resnext101": {"blocks": (3, 4, 23, 3), "groups": 16, "squeeze": True},
}


def convolution(channels_in, channels_out, kernel, stride=1, groups=1, dilation=1, padding=None):
    """Convolution without bias, then GroupNorm: batch statistics mislead where experience is correlated (DD-PPO, A)."""
    padding = dilation * (kernel // 2) if padding is None else padding
    layer = nn.Conv2d(channels_in, channels_out, kernel, stride, padding, dilation, groups, bias=False)
    return nn.Sequential(layer, nn.GroupNorm(16, channels_out))


class Block(nn.Module):
    """Residual block (He et al. 2016): 1x1, 3x3, 1x1 convolutions, or without bottleneck 3x3, 3x3. `groups` is ResNeXt's
    cardinality, `squeeze` adds squeeze and excitation, `modern` layer scale and a dilated second 3x3 kernel (ConvNeXt)."""

    def __init__(self, channels_in, planes, stride, bottleneck, groups, squeeze, modern):
        super().__init__()
        width, channels_out = planes * (2 if groups > 1 else 1), planes * (4 if bottleneck else 1)
        if bottleneck:
            first, middle = convolution(channels_in, width, 1), convolution(width, width, 3, stride, groups)
            self.layers = nn.Sequential(first, nn.ReLU(), middle, nn.ReLU(), convolution(width, channels_out, 1))
        else:
            second = convolution(planes, planes, 3, dilation=2 if modern else 1)
            self.layers = nn.Sequential(convolution(channels_in, planes, 3, stride), nn.ReLU(), second)
        same, narrow = stride == 1 and channels_in == channels_out, channels_out // 16
        self.shortcut = nn.Identity() if same else convolution(channels_in, channels_out, 1, stride)
        self.scale = nn.Parameter(torch.full((channels_out, 1, 1), 0.1)) if modern else 1.0  # Touvron et al. 2021
        excitation = nn.Conv2d(channels_out, narrow, 1), nn.ReLU(), nn.Conv2d(narrow, channels_out, 1), nn.Sigmoid()
        self.squeeze = nn.Sequential(nn.AdaptiveAvgPool2d(1), *excitation) if squeeze else None

    def forward(self, x):
        change = self.layers(x)
        change = change * self.squeeze(change) if self.squeeze is not None else change
        return torch.relu(self.shortcut(x) + change * self.scale)


class ResNet(nn.Module):
    """2x2 average pooling, backbone, compression of its last feature map to about 2,048 numbers (DD-PPO appendix A), linear
    layer. `modern`: patches of 4x4 pixels come first, and down-sampling stands between the stages (VER section 4)."""

    def __init__(self, images, out_features, blocks, bottleneck=True, groups=1, squeeze=False, modern=False):
        super().__init__()
        self.images, self.out_features, channels = images, out_features, 32
        stem = convolution(images.channels, 32, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, 1)
        layers = [nn.AvgPool2d(2), *([convolution(images.channels, 32, 4, 4, padding=0)] if modern else stem)]
        for stage, count in enumerate(blocks):
            planes, stride = 32 * 2**stage, 1 if stage == 0 or modern else 2
            if modern and stage:
                layers += [nn.GroupNorm(16, channels), nn.Conv2d(channels, planes, 2, 2)]
                channels = planes
            for block in range(count):
                layers.append(Block(channels, planes, 1 if block else stride, bottleneck, groups, squeeze, modern))
                channels = 4 * planes if bottleneck else planes
        self.backbone = nn.Sequential(*layers)
        with torch.no_grad():
            height, width = self.backbone(torch.zeros(1, images.channels, *images.size)).shape[2:]
        compressed = min(512, round(2048 / (height * width)))  # smaller images: fewer
        last = nn.Conv2d(channels, compressed, 3, padding=1, bias=False), nn.GroupNorm(1, compressed)
        self.compress = nn.Sequential(*last, nn.ReLU(), nn.Flatten())
        self.out = orthogonal(nn.Linear(compressed * height * width, out_features))

    def forward(self, obs):
        return torch.relu(self.out(self.compress(self.backbone(self.images(obs)))))


class Vector(nn.Module):
    """Two-layer perceptron for a vector, or (beside the papers' encoders) one linear layer to 32 features as in DD-PPO.
    Discrete observations enter as one-hot vectors."""

    def __init__(self, key, space, out_features, linear):
        super().__init__()
        self.key, self.space, self.out_features = key, space, 32 if linear else out_features
        in_features = int(space.n) if isinstance(space, gym.spaces.Discrete) else math.prod(space.shape)
        first, second = orthogonal(nn.Linear(in_features, self.out_features)), nn.Linear(out_features, out_features)
        self.layers = first if linear else nn.Sequential(first, nn.Tanh(), orthogonal(second), nn.Tanh())

    def forward(self, obs):
        vector = obs[self.key]
        if isinstance(self.space, gym.spaces.Discrete):
            vector = nn.functional.one_hot(vector - int(self.space.start), int(self.space.n))
        return self.layers(vector.reshape(len(vector), -1).float())


def build_encoders(spec, options):
    """One encoder for all images of a size, one for each vector: observations -> B x out_features. Raises UserError."""
    hidden, kind, groups, encoders = options.hidden_size, BACKBONES.get(options.encoder), {}, nn.ModuleDict()
    for key, space in spec.observations.items():
        if not (layout := image_layout(space)):
            encoders[key] = Vector(key, space, hidden // 2, linear=kind is not None)
        elif options.encoder != "none":
            groups.setdefault(layout[1:3], {})[key] = space
    for size, group in groups.items():
        if kind and min(size) < 64:
            raise UserError(f"--encoder {options.encoder} needs images of 64 x 64 at least: {list(group)} have {size}")
        encoders[next(iter(group))] = ResNet(Images(group), hidden, **kind) if kind else SmallCNN(Images(group), hidden)
    if not encoders:
        raise UserError(f"--encoder {options.encoder}: nothing is left to observe, choose another one")
    return encoders


# -------------------------------------------------------------------------------------------- CPC|A
# Adds an auxiliary loss, action-conditional contrastive prediction (Guo et al. 2018; VER section 3): --cpc.
# The lesson calls `ContrastivePrediction` and `cpc_loss`.

CPC_HORIZON, CPC_STARTS, CPC_FUTURES, CPC_NEGATIVES, CPC_COEF = 20, 6, 2, 20, 0.1  # as in habitat-baselines


class ContrastivePrediction(nn.Module):
    """From the memory, a GRU follows the actions that were taken next; a classifier tells what was seen then from what was
    not: B x H, B x features -> B logits."""

    def __init__(self, features, hidden):
        super().__init__()
        self.future = nn.GRUCell(ACTION_FEATURES, hidden)
        self.classifier = nn.Sequential(nn.Linear(hidden + features, hidden), nn.ReLU(), nn.Linear(hidden, 1))

    def forward(self, memory_BH, features_BF):
        return self.classifier(torch.cat([memory_BH, features_BF], dim=-1)).squeeze(-1)


def cpc_futures(batch_sizes):
    """What is compared: CPC_STARTS random steps of each packed sequence, and for each CPC_FUTURES later ones of the same
    sequence, CPC_HORIZON steps later at most. Returns P start positions, P x CPC_HORIZON positions of the actions from there
    on (beyond the end: of the last step), how many steps later the P x CPC_FUTURES futures are, and their positions."""
    length_Q = (batch_sizes[:, None] > torch.arange(int(batch_sizes[0]))).sum(0)
    begin_of_time = batch_sizes.cumsum(0) - batch_sizes
    sequence_P = torch.arange(len(length_Q))[length_Q > 1].repeat_interleave(CPC_STARTS)[:, None]
    last_P = length_Q[sequence_P] - 1
    time_P = (torch.rand(len(sequence_P), 1) * last_P).long()
    later_PF = 1 + (torch.rand(len(sequence_P), CPC_FUTURES) * (last_P - time_P).clamp(max=CPC_HORIZON)).long()
    times = time_P, torch.minimum(time_P + torch.arange(CPC_HORIZON), last_P), time_P + later_PF
    start_P, action_PT, future_PF = (begin_of_time[time] + sequence_P for time in times)
    return start_P[:, 0], action_PT, later_PF, future_PF


def cpc_loss(policy, features_MD, core_MH, action_MA, batch_sizes):
    """The memory after a step is followed through the actions taken since; a classifier must tell features seen then from
    CPC_NEGATIVES others of the mini-batch. The mean cross-entropies of both, added."""
    start_P, action_PT, later_PF, future_PF = (index.to(core_MH.device) for index in cpc_futures(batch_sizes))
    if not len(start_P):  # every rank averages the same gradients, be they 0
        return sum(parameter.sum() for parameter in policy.cpc.parameters()) * 0.0
    action_M = policy.embed(action_MA, torch.zeros(len(action_MA), dtype=torch.bool, device=core_MH.device))
    memory_PH, memories = core_MH[start_P], []
    for action_P in action_PT[:, : int(later_PF.max())].unbind(1):
        memory_PH = policy.cpc.future(action_M[action_P], memory_PH)
        memories.append(memory_PH)
    memory_PFH = torch.stack(memories, dim=1).gather(1, (later_PF - 1)[..., None].expand(-1, -1, core_MH.shape[1]))
    other_PFN = torch.randint(len(core_MH), (*future_PF.shape, CPC_NEGATIVES)).to(core_MH.device)
    positive = policy.cpc(memory_PFH, features_MD[future_PF])
    negative = policy.cpc(memory_PFH[:, :, None].expand(-1, -1, CPC_NEGATIVES, -1), features_MD[other_PFN])
    return nn.functional.softplus(-positive).mean() + nn.functional.softplus(negative).mean()


# -------------------------------------------------------------------------------------- Supervision
# Adds workers that are started again when environments raise, hang or die, and --num-workers 0. The lesson calls
# `make_workers`, `count_workers`, `process_context` and `share_memory`.

SIGNALS, EXIT_BAD_ANSWER = (signal.SIGINT, signal.SIGTERM), 3


class UserError(Exception):
    """Something the user can mend; shown as one line, exit status 2."""


class Interrupted(Exception):
    """Ctrl-C or SIGTERM; the argument is the signal's number."""


class EnvironmentFailure(Exception):
    """An environment, or another process, has raised, hung or died; exit status 1."""


class BadAnswer(EnvironmentFailure):
    """NaN, infinity or another shape than the space's: a bug that starting the environment again would hide."""


def process_context():
    """How processes are started: by a fork server, as clean as spawn, which imports torch only once. It and its processes
    ignore signals, which may reach the whole process group: the main process decides."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["torch", "gymnasium", "tyro", "tqdm"])
    handlers = {number: signal.signal(number, signal.SIG_IGN) for number in SIGNALS}
    multiprocessing.forkserver.ensure_running()
    for number, handler in handlers.items():
        signal.signal(number, handler)
    return context


def share_memory(tensors):
    """Move tensors to shared memory, before other processes get to know them. Raises UserError if that is full."""
    needed = sum(tensor.nbytes for tensor in tensors)
    free = shutil.disk_usage("/dev/shm").free if os.path.isdir("/dev/shm") else math.inf
    if needed > free:
        sizes = f"{needed / 2**20:.0f} MiB of shared memory are needed and /dev/shm has {free / 2**20:.0f}"
        raise UserError(f"{sizes}: enlarge it (docker run --shm-size), or take less of --num-envs and --num-steps")
    for tensor in tensors:
        tensor.share_memory_()


def count_cores():
    """CPU cores that this process may use; those of a machine are shared among the ranks that torchrun starts there."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return max(1, cores // int(os.environ.get("LOCAL_WORLD_SIZE", 1)))


def count_workers(options):
    """Worker processes to start: one for each sleeping simulator, else no more than there are CPU cores."""
    auto = options.num_envs if options.sim_latency else min(options.num_envs, count_cores())
    return auto if options.num_workers == "auto" else options.num_workers


class CheckedEnvironment(Environment):
    """An environment whose answers are checked, and whose errors say where they come from."""

    def answer(self):
        try:
            super().answer()
            if not math.isfinite(self.io.reward[self.number]):
                raise BadAnswer(f"reward is {self.io.reward[self.number]}")
        except Exception as error:
            where = f"environment {self.number}, episode {self.io.episode[self.number]}, step {self.length}"
            kind = BadAnswer if isinstance(error, BadAnswer) else EnvironmentFailure
            raise kind(f"{where}:\n{traceback.format_exc()}") from None

    def write(self, rows, leaves):
        if (shapes := {key: np.shape(leaf) for key, leaf in leaves.items()}) != self.spec.obs_shapes:
            raise BadAnswer(f"observation has the shapes {shapes}, the observation space {self.spec.obs_shapes}")
        super().write(rows, leaves)
        for key, row in ((key, rows[key][self.number]) for key in leaves):
            if row.dtype == np.int64 and int(row) not in self.spec.observations[key]:
                raise BadAnswer(f"observation {key!r} is {row}, the observation space {self.spec.observations[key]}")
            if row.dtype == np.float32 and not np.isfinite(row).all():
                raise BadAnswer(f"observation {key!r} is not finite")


def make_workers(options, split, spec, io):
    """All environments of a split, in worker processes or (--num-workers 0) here."""
    environments = [CheckedEnvironment(number, options, split, spec, io) for number in range(options.num_envs)]
    return (SupervisedWorkers if count_workers(options) else InlineWorkers)(environments)


def note_restart(workers, reason):
    """Report a restart. Raises a bad answer, and EnvironmentFailure at more than --max-worker-restarts in an hour."""
    if isinstance(reason, BadAnswer):
        raise reason
    most, now = workers.environments[0].options.max_worker_restarts, time.monotonic()
    workers.restarted_at.append(now)
    if sum(now - at < 3600 for at in workers.restarted_at) > most:
        raise EnvironmentFailure(f"{reason}\nmore than {most} restarts within an hour (--max-worker-restarts)")
    tqdm.write(f"{reason}\nstarted again, with a new episode ({len(workers.restarted_at)} so far)", file=sys.stderr)


class InlineWorkers:
    """All environments where experience is collected: the interface of Workers, a deterministic order. One that raises is
    made anew; one that hangs or crashes is not helped."""

    def __init__(self, environments):
        self.environments, self.answered, self.restarted_at = environments, [], []
        self.send(np.arange(len(environments)))

    def send(self, env_B):
        for e in env_B.tolist():
            while e not in self.answered:
                try:
                    self.environments[e].answer()
                    self.answered.append(e)
                except EnvironmentFailure as error:
                    note_restart(self, error)
                    self.environments[e].env = None

    def receive(self, timeout_sec):
        answered, self.answered = self.answered, []
        return answered

    def close(self):
        for environment in self.environments:
            environment.close()


def guarded_worker(inbox, outbox, environments, last_words):
    """`env_worker`; an exception ends the process at once, whatever threads the simulator has, and leaves its text."""
    try:
        env_worker(inbox, outbox, environments)
    except Exception as error:
        text = str(error).encode()[-len(last_words) :]
        last_words[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        os._exit(EXIT_BAD_ANSWER if isinstance(error, BadAnswer) else 1)


class SupervisedWorkers(Workers):
    """Replaces processes that have died, or whose environment has not answered for --env-timeout. The environments that owe
    an answer then start anew, which is an answer; the others do so when their next action arrives."""

    def __init__(self, environments):
        self.next_check, self.restarted_at, self.timeout_sec = 0.0, [], environments[0].options.env_timeout
        self.heard_at_W = np.zeros(count_workers(environments[0].options))  # when each worker has answered last
        self.last_words = torch.zeros(len(self.heard_at_W), 8000, dtype=torch.uint8).share_memory_()
        super().__init__(environments)

    def start(self, worker):
        return super().start(worker, guarded_worker, self.last_words[worker])

    def receive(self, timeout_sec):
        answered, now = super().receive(timeout_sec), time.monotonic()
        self.heard_at_W[np.array(answered, int) % self.num_workers] = now
        if now > self.next_check:
            self.next_check = now + 0.2
            for worker, process in enumerate(self.processes):
                mine = np.arange(worker, len(self.sent_at_N), self.num_workers)
                since = np.maximum(self.sent_at_N[mine], self.heard_at_W[worker])  # who waits for a sibling is not late
                late = mine[(self.sent_at_N[mine] > 0) & (now - since > self.timeout_sec)]
                if len(late) or process.exitcode is not None:
                    answered += self.replace(worker, mine, late)
        return answered

    def replace(self, worker, mine, late):
        """Start a worker's process again. Returns the environments whose answers it had written."""
        process = self.processes[worker]
        process.kill()
        process.join(5)
        reason = bytes(self.last_words[worker]).rstrip(b"\0").decode(errors="replace")
        reason = reason or f"worker {worker} (environments {mine.tolist()}) died with exit code {process.exitcode}"
        if len(late):
            reason = f"no answer from environments {late.tolist()} for {self.timeout_sec:.0f} s (--env-timeout)"
        note_restart(self, BadAnswer(reason) if process.exitcode == EXIT_BAD_ANSWER else reason)
        answered = super().receive(0)
        while self.pipes[worker][0].poll():
            read_numbers(self.pipes[worker][0])
        self.last_words[worker] = 0
        self.processes[worker] = self.start(worker)
        self.send(mine[self.sent_at_N[mine] > 0])
        return answered


def check_rollout(rollout, version, lag=0):
    """Assert every invariant of a rollout (--debug), collected by a policy of this version or at most `lag` before it."""
    steps = rollout.rows[: rollout.size]
    carried_S = steps["sent_at"] < rollout.clock[0]
    assert 0 < len(steps) <= rollout.steps, "a rollout has at most S steps"
    assert lag or len(set(steps["env"][carried_S])) == carried_S.sum(), "of each environment, one step at most was in flight"
    assert (steps["version"] <= version).all(), "no step comes from a policy that is still to come"
    assert (steps["version"][~carried_S] >= version - lag).all(), "new steps come from the current policy"
    for part in (steps[steps["segment"] == segment] for segment in np.unique(steps["segment"])):
        assert (part["env"] == part["env"][0]).all(), "all steps of a segment are of one environment"
        assert (part["first"][1:] == part["done"][:-1]).all(), "an episode begins only where one ended"
        assert (np.diff(part["version"]) >= 0).all(), "versions do not go back"
        assert (np.diff(part["sent_at"]) > 0).all(), "steps are in time order"
    begins = torch.from_numpy(np.flatnonzero(steps["first"]))
    assert not rollout.state[begins].any(), "memory is zero where an episode begins"
    for name in ("log_prob", "value", "action", "reward"):
        assert np.isfinite(steps[name]).all(), f"{name} is finite"
    assert np.isfinite(rollout.bootstrap).all(), "bootstrap values are finite"


# --------------------------------------------------------------------------------------- Run folder
# Adds what a run leaves behind: options.json, TensorBoard events, checkpoint.pt, a trace, an evaluation, a video; and what
# it does on signals. The lesson calls `Run` and `make_policy`.

CHECKPOINT_FORMAT = 4
SEED_OF_LEARNER, SEED_OF_COLLECTOR = 2, 3  # first numbers of derive_seed; environments have 0 (train) and 1 (val)
TRACE_BYTES = 10_000_000  # more than a viewer likes


def load_checkpoint(path):
    """A checkpoint's content, on the CPU. Raises UserError for anything but a checkpoint of this program."""
    kinds = {"format": int, "options": dict, "policy": dict, "optimizer": dict, "step": int, "update": int, "recent": list}
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
        number, known = content["format"], all(isinstance(content.get(name), kind) for name, kind in kinds.items())
    except FileNotFoundError:
        raise UserError(f"there is no checkpoint {path}") from None
    except Exception as error:  # whatever a damaged or hostile file makes of the loader
        raise UserError(f"{path} is not a checkpoint that can be read ({type(error).__name__})") from None
    if isinstance(number, int) and number != CHECKPOINT_FORMAT:
        raise UserError(f"{path} was written by another version (format {number}): go on with that version, or start anew")
    if not known:
        raise UserError(f"{path} is not a checkpoint of this program")
    return content


def write_checkpoint(content, path):
    """Atomically: a crash leaves the old file or the new one. Raises OSError or RuntimeError (torch) if the disk is full."""
    temporary = path.with_suffix(".tmp")
    try:
        with open(temporary, "wb") as file:
            torch.save(content, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except (OSError, RuntimeError):
        temporary.unlink(missing_ok=True)
        raise


def load_policy(policy, path):
    """Put a checkpoint's weights into the policy; returns its content. Raises UserError if the network is another one."""
    content = load_checkpoint(path)
    try:
        policy.load_state_dict(content["policy"])
    except RuntimeError as error:
        raise UserError(f"{path} belongs to another network or environment: {' '.join(str(error).split())[:300]}") from None
    return content


def start_from(policy, options):
    """Transfer (DD-PPO section 6): take the weights of the checkpoint --init-from, as far as names and shapes agree, but for
    what --reset-critic or --reset-policy name. Raises UserError if its encoders are others."""
    saved, own = load_checkpoint(options.init_from)["policy"], policy.state_dict()
    new = {name for name in own if name not in saved or saved[name].shape != own[name].shape}
    if unfit := [name for name in new if name.startswith("encoders.")]:
        refuse(options, "init_from", f"its encoders are others ({min(unfit)}): give --encoder, --camera, sizes of that run")
    new |= {"log_ent_coef", *(name for name in own if options.reset_critic and name.startswith("critic."))}
    new |= {name for name in own if options.reset_policy and not name.startswith("encoders.")}
    policy.load_state_dict(own | {name: saved[name] for name in own.keys() - new})
    print(f"{len(own) - len(new)} of {len(own)} tensors come from {options.init_from}; new: {', '.join(sorted(new))}")


def make_policy(spec, options):
    """The network that the options name."""
    if not options.controller:
        return Policy(spec, options)
    from notebooks.controller import NeuralController

    return NeuralController(spec, options)


class Run:
    """A run folder, counters, progress bar. What was learned before is put in place first."""

    def __init__(self, options, spec, policy, optimizer):
        self.options, self.spec, self.policy, self.optimizer = options, spec, policy, optimizer
        self.step, self.update, self.recent, self.learning_sec = 0, 0, deque(maxlen=100), {}
        self.signal = self.unsaved = self.trace = self.writer = None
        if options.init_from:
            start_from(policy, options)
        if options.controller and not options.resume:
            policy.load_controller(options.controller)
        if options.resume:
            saved = load_policy(policy, Path(options.resume) / "checkpoint.pt")
            optimizer.load_state_dict(saved["optimizer"])
            self.step, self.update, self.recent = saved["step"], saved["update"], deque(saved["recent"], maxlen=100)
            if options.target_entropy is None:  # fixed: as the options say, not as the checkpoint does
                policy.log_ent_coef.data.fill_(math.log(max(options.ent_coef, 1e-30)))
        for encoder in image_encoders(policy) if options.freeze_encoder else ():
            encoder.requires_grad_(False)
        keep_freed_memory()
        self.saved_step = self.first_step = self.step
        self.open_folder()
        self.began_at = self.logged_at = time.perf_counter()

    def open_folder(self):
        """Make the folder, say what is trained, and where. Raises UserError."""
        options, size = self.options, sum(parameter.numel() for parameter in self.policy.parameters())
        name = f"{options.env_id}__{options.exp_name}__{options.seed}__{int(time.time())}"
        self.folder = Path(options.resume or Path(options.runs_dir) / name.replace("/", "-").replace(":", "-"))
        try:
            self.trace = open(options.trace, "w") if options.trace else None
            self.folder.mkdir(parents=True, exist_ok=bool(options.resume))
            (self.folder / "options.json").write_text(json.dumps(asdict(options), indent=2) + "\n")
        except OSError as error:
            raise UserError(f"{error.filename} cannot be written ({error.strerror}): choose another place") from None
        from torch.utils.tensorboard import SummaryWriter  # takes a second to import

        self.writer = SummaryWriter(self.folder, purge_step=self.step + 1 if options.resume else None)
        self.bar = tqdm(total=max(options.total_timesteps, self.step), initial=self.step, unit=" steps", dynamic_ncols=True)
        how = f"{options.sampler}{' with overlap' * options.overlap}, {options.num_envs} environments"
        how += f" in {count_workers(options)} workers, {size:,} parameters on {next(self.policy.parameters()).device}"
        self.bar.write(f"{self.folder}: {how}")

    def close(self):
        """Finish the files."""
        self.bar.close()
        with contextlib.suppress(OSError):  # a full disk: said before
            if self.trace:
                self.trace.write("\n]\n")
                self.trace.close()
            if self.writer:
                self.writer.close()

    def enough(self, steps=0):
        """Whether a rollout of so many steps shall end early: after a signal."""
        return self.signal is not None

    def collect(self, source):
        """The next rollout. Raises Interrupted if a signal has come."""
        rollout = next(source)
        if self.signal:
            raise Interrupted(self.signal)
        return rollout

    def note_signal(self, number, _frame):
        """Signals are noted, so that training ends where weights are whole; a second one ends it wherever it is."""
        self.signal = number
        for each in SIGNALS:
            signal.signal(each, signal.SIG_DFL)

    @contextlib.contextmanager
    def training(self):
        """Around all training: saves at its end, however it ends."""
        handlers = {number: signal.signal(number, self.note_signal) for number in SIGNALS}
        try:
            yield
            self.save()
        except (Interrupted, EnvironmentFailure, FloatingPointError):
            self.save()
            if not self.unsaved:
                self.bar.write(f"stopped at step {self.step}; go on with: --resume {self.folder}")
            raise
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)

    @contextlib.contextmanager
    def learning(self):
        """Around the learning of one update: sets the number of threads, takes the time. Yields a dictionary to log."""
        began, logs, threads = time.perf_counter(), {}, choose_threads(self.options, self.update, self.learning_sec)
        torch.set_num_threads(threads)
        yield logs
        logs["time/learning_sec"] = sec = time.perf_counter() - began
        self.learning_sec.setdefault(threads, deque(maxlen=2)).append(sec)

    def log(self, rollout, logs):
        """Count an update and its steps, write what to log, and from time to time a checkpoint."""
        self.write(*self.describe(rollout, logs))
        if self.step - self.saved_step >= self.options.checkpoint_interval:
            self.save()
            if self.options.population:
                from notebooks.population import review

                review(self)

    def describe(self, rollout, logs):
        """An update's steps; what to log of it: where the time went, how uneven the environments and how old the data were;
        and the numbers of the episodes that ended."""
        steps, (began_at, ended_at, waited_sec) = rollout.rows[: rollout.size], rollout.clock
        simulated_sec, rollout_sec, learning_sec = steps["step_sec"].sum(), ended_at - began_at, logs["time/learning_sec"]
        cycle_sec, self.logged_at = time.perf_counter() - self.logged_at, time.perf_counter()
        lag_S, steps_N = self.update - steps["version"], np.bincount(steps["env"], minlength=rollout.num_envs)
        if self.options.debug:
            check_rollout(rollout, self.update, 8 if self.options.sampler == "async" else int(self.options.overlap))
        if self.trace and self.trace.tell() < TRACE_BYTES:
            write_trace(self.trace, steps, learning_sec)
        logs = logs | {
            "losses/explained_variance": 1 - (rollout.returns - rollout.value).var() / max(rollout.returns.var(), 1e-12),
            "charts/learning_rate": self.optimizer.param_groups[0]["lr"],
            "time/waiting_share": waited_sec / cycle_sec,
            "time/inference_share": (rollout_sec - waited_sec) / cycle_sec,
            "time/learning_share": learning_sec / cycle_sec,
            "time/rollout_sec": rollout_sec,
            "time/env_step_ms": 1000 * simulated_sec / len(steps),
            "time/worker_idle_share": max(0.0, 1 - simulated_sec / max(1, count_workers(self.options)) / rollout_sec),
            "ver/batch_size": len(steps) / len(np.unique(steps["sent_at"])),
            "ver/steps_per_env_min": steps_N.min(),
            "ver/steps_per_env_max": steps_N.max(),
            "ver/carried_share": (steps["sent_at"] < began_at).mean(),
            "ver/policy_lag_mean": lag_S.mean(),
            "ver/policy_lag_max": lag_S.max(),
            "ver/importance_weight": rollout.weight.mean(),
            "ver/made_up_steps": (steps["step_sec"] == 0.0).sum(),  # by `Environment.start`
        }
        episodes = steps["episode_stats"][steps["done"]]
        return len(steps), logs, episodes[np.isfinite(episodes[:, 0])].tolist()

    def write(self, steps, logs, episodes):
        """Count the steps, write numbers and the means of the last 100 episodes, move the progress bar."""
        self.step, self.update = self.step + steps, self.update + 1
        self.recent.extend(episodes)
        logs["charts/SPS"] = (self.step - self.first_step) / (time.perf_counter() - self.began_at)
        if self.recent:
            tags = "charts/episodic_return", "charts/episodic_length", *(f"metrics/{name}" for name in self.spec.metrics)
            logs |= dict(zip(tags, np.array(self.recent).mean(axis=0)))
            shown = [tag for tag in ("charts/episodic_return", "metrics/success", "metrics/spl") if tag in logs]
            self.bar.set_postfix({tag.split("_")[-1].split("/")[-1]: f"{logs[tag]:.3g}" for tag in shown}, refresh=False)
        self.write_scalars(logs)
        self.bar.update(self.step - self.bar.n)

    def write_scalars(self, logs):
        """Add points to TensorBoard's curves; says so once if that fails (a full disk), and goes on without."""
        try:
            for tag, value in logs.items() if self.writer else ():
                self.writer.add_scalar(tag, value, self.step)
        except OSError as error:
            self.bar.write(f"TensorBoard's curves end at step {self.step}: {error}")
            self.writer = None

    def save(self):
        """Write the checkpoint: only tensors and plain types, so that it loads with weights_only=True and a foreign file can
        execute nothing."""
        content = {"format": CHECKPOINT_FORMAT, "options": asdict(self.options), "policy": self.policy.state_dict()}
        content |= {"optimizer": self.optimizer.state_dict(), "step": self.step, "update": self.update}
        self.saved_step, self.unsaved = self.step, None
        try:
            write_checkpoint(content | {"recent": list(self.recent)}, self.folder / "checkpoint.pt")
        except (OSError, RuntimeError) as error:
            self.unsaved = str(error).splitlines()[0][:200]
            self.bar.write(f"checkpoint of step {self.step} not written, the one before stays: {self.unsaved}")

    def evaluate(self):
        """Evaluate what was learned. Raises OSError if it could not be saved."""
        self.bar.close()
        if self.options.eval_episodes:
            self.write_scalars(report_evaluation(self.policy, self.spec, self.options, self.folder))
        if self.unsaved:
            raise OSError(f"the last checkpoint could not be written: {self.unsaved}")


def write_trace(file, steps, learning_sec):
    """Append steps and the learning from them to a trace in Chrome's format (ui.perfetto.dev, chrome://tracing): each
    environment's steps, each inference batch with its size, each learning phase."""
    sent_at, index, sizes = np.unique(steps["sent_at"], return_index=True, return_counts=True)
    spans = [(f"environment {e}", "step", *span) for e, *span in steps[["env", "began_at", "step_sec"]].tolist()]
    spans += [("inference", f"batch of {n}", a, s - a) for n, a, s in zip(sizes, steps["asked_at"][index], sent_at)]
    for lane, name, began, sec in [*spans, ("learner", "learning", time.perf_counter() - learning_sec, learning_sec)]:
        event = {"name": name, "ph": "X", "pid": lane, "tid": lane, "ts": round(1e6 * began), "dur": round(1e6 * sec)}
        file.write((",\n" if file.tell() else "[\n") + json.dumps(event))


@torch.inference_mode()
def evaluate(policy, spec, options):
    """Play --eval-episodes validation episodes. Returns their numbers, E x (return, length, metrics), and with
    --capture-video, of one environment alone, pictures.

    Each environment plays its share, so that short episodes do not count more than long ones; for the same --num-envs and
    --eval-episodes they are the same for every policy.
    """
    filmed, num_envs = options.capture_video, 1 if options.capture_video else min(options.num_envs, options.eval_episodes)
    sizes = {"num_envs": num_envs, "num_workers": 0 if filmed else min(count_workers(options), num_envs)}
    options = replace(options, **sizes, seed=0, sampler="ver", num_minibatches=1, sim_latency=0.0)
    left_N = options.eval_episodes // num_envs + (np.arange(num_envs) < options.eval_episodes % num_envs)
    io, found, frames, weight = EnvIO(spec, num_envs), [], [], next(policy.parameters())
    generators = torch.random.fork_rng([weight.device] * weight.is_cuda)
    with generators, contextlib.closing(make_workers(options, "val", spec, io)) as workers:
        torch.manual_seed(options.seed)
        c = Collector(workers, io, policy, spec, options)
        c.greedy = options.greedy
        while len(found) < options.eval_episodes:
            env_B = await_answers(c, most=num_envs)
            for e in env_B[c.in_flight_N[env_B] & io.first[env_B] & np.isfinite(io.episode_stats[env_B, 0])]:
                found.append(io.episode_stats[e].tolist())
                left_N[e] -= 1
            if filmed:
                frames.append(workers.environments[0].env.render())
            act(policy, c, env_B[left_N[env_B] > 0])
    return np.array(found), frames


def report_evaluation(policy, spec, options, folder):
    """Evaluate, print mean +- standard error of every number, write the video if asked for. Returns the means to log."""
    began, names = time.perf_counter(), spec.episode_columns
    found, _ = evaluate(policy, spec, replace(options, capture_video=False))
    means, errors = found.mean(axis=0), found.std(axis=0, ddof=len(found) > 1) / math.sqrt(len(found))
    line = ", ".join(f"{name} {mean:.3f} ± {error:.3f}" for name, mean, error in zip(names, means, errors))
    how = "greedy" if options.greedy else "sampled"
    print(f"evaluation, {len(found)} {how} episodes in {time.perf_counter() - began:.0f} s: {line}")
    if options.capture_video:
        from PIL import Image

        _, (*frames, _) = evaluate(policy, spec, replace(options, eval_episodes=3))  # the last one shows a reset
        first, *others = [Image.fromarray(frame).resize(frames[0].shape[1::-1]) for frame in frames]
        first.save(folder / "evaluation.gif", save_all=True, append_images=others, duration=100, loop=0)
        print(f"video: {folder / 'evaluation.gif'}")
    return {f"eval/{name}": mean for name, mean in zip(names, means)}


# -------------------------------------------------------------------------------------------- Speed
# Adds what makes learning on a CPU faster, measured. The lesson calls `packed_lstm`; `Run` the others.


def packed_lstm(lstm, x, batch_sizes, hidden_LQH, cell_LQH):
    """nn.LSTM over a PackedSequence: M x features -> M x H. On a CPU it is spelled out: all first steps, then all second
    steps, ... Learning is a tenth faster by it there, because each step of nn.LSTM's backward pass fills a buffer as large
    as the whole input with zeros."""
    if x.device.type != "cpu":
        return lstm(PackedSequence(x, batch_sizes), (hidden_LQH, cell_LQH))[0].data
    for weights, hidden_QH, cell_QH in zip(lstm.all_weights, hidden_LQH, cell_LQH):
        input_weight, hidden_weight, input_bias, hidden_bias = weights
        outputs, gates_M4H = [], nn.functional.linear(x, input_weight, input_bias + hidden_bias)
        for gates_B4H in gates_M4H.split(batch_sizes.tolist()):
            running = len(gates_B4H)  # the longest sequences come first
            gates_B4H = torch.addmm(gates_B4H, hidden_QH[:running], hidden_weight.T)
            write_BH, keep_BH, new_BH, show_BH = gates_B4H.chunk(4, dim=1)
            cell_QH = keep_BH.sigmoid() * cell_QH[:running] + write_BH.sigmoid() * new_BH.tanh()
            hidden_QH = show_BH.sigmoid() * cell_QH.tanh()
            outputs.append(hidden_QH)
        x = torch.cat(outputs)
    return x


def keep_freed_memory():
    """Tell glibc not to give freed memory back to the kernel: learning is a sixth faster on a CPU, because activations come
    and go with every mini-batch, at a page fault for every 4 KiB."""
    with contextlib.suppress(OSError, AttributeError):  # another C library: nothing to tell
        mallopt, trim_threshold, mmap_threshold = ctypes.CDLL(None).mallopt, -1, -3
        mallopt(mmap_threshold, 1 << 25)  # glibc's maximum
        mallopt(trim_threshold, 1 << 30)


def choose_threads(options, update, learning_sec):
    """CPU threads for an update: what was faster in its last two. On busy cores, threads that wait for each other are many
    times slower than one; so each number is tried twice every 200 updates (but not in the first, which is always slow)."""
    choices = sorted({1, min(4, count_cores())}) if options.learner_threads == "auto" else [options.learner_threads]
    if update % 200 in range(1, 2 * len(choices) + 1):
        return choices[update % len(choices)]
    return min(choices, key=lambda threads: min(learning_sec.get(threads, [0.0])))


# ------------------------------------------------------------------ The command line and its checks
# Adds refusals in one line, before anything is started. The lesson calls `check_options`, `describe_env`, `choose_device`
# and `registered_id`.

SIMULATED = "pointnav", "notebooks.tasks"  # ids that begin so are in both simulators


def refuse(options, name, message):
    """Raise UserError for an option."""
    raise UserError(f"--{name.replace('_', '-')} {getattr(options, name)}: {message}")


def check_options(options):
    """Raise UserError for the first option that cannot work, with the way to mend it."""
    o, most = options, select.PIPE_BUF // 4
    counts = "total_timesteps num_envs num_steps num_minibatches update_epochs max_requests population_size"
    others = "checkpoint_interval evolve_interval learner_threads learning_rate clip_coef max_grad_norm env_timeout"
    for name in f"{counts} {others}".split():
        if not (getattr(o, name) == "auto" or 0 < getattr(o, name) < math.inf):
            refuse(o, name, "must be a positive number")
    amounts = "seed num_workers eval_episodes max_worker_restarts sim_latency sim_latency_spread ent_coef vf_coef"
    for name in f"{amounts} evolve_after".split():
        if not (getattr(o, name) == "auto" or 0 <= getattr(o, name) < 2**63):
            refuse(o, name, "must be 0 or more")
    steps, pointnav = f"--num-steps x --num-envs = {o.rollout_steps}", o.env_id.startswith(SIMULATED)
    habitat = o.env_id.endswith(".yaml") or pointnav and o.simulator != "builtin"
    for holds, name, message in [
        (0 <= o.gamma <= 1, "gamma", "must be within 0..1"),
        (0 <= o.gae_lambda <= 1, "gae_lambda", "must be within 0..1"),
        (o.lstm_layers in (1, 2), "lstm_layers", "must be 1 or 2"),
        (o.hidden_size >= 2, "hidden_size", "must be 2 or more"),
        (8 <= o.image_size <= 1024, "image_size", "must be within 8..1024"),
        (o.num_envs <= most, "num_envs", f"must be at most {most}: one atomic pipe write"),
        (count_workers(o) <= min(o.num_envs, 128), "num_workers", f"must be within 0..{min(o.num_envs, 128)}"),
        (o.rollout_steps <= 10**8, "num_steps", f"is absurd: {steps}"),
        (o.rollout_steps % o.num_minibatches == 0, "num_minibatches", f"must divide {steps}"),
        (o.sampler != "sync" or o.max_requests >= o.num_envs, "max_requests", "must be at least --num-envs with sync"),
        (not o.overlap or o.sampler != "async", "overlap", "is only for the other samplers: async always overlaps"),
        (not (o.checkpoint and o.resume), "checkpoint", "evaluates and --resume trains: give one of them"),
        (not o.checkpoint or o.eval_episodes, "eval_episodes", "must be at least 1 with --checkpoint"),
        (not (o.init_from and (o.resume or o.checkpoint)), "init_from", "begins a run: no --resume, no --checkpoint"),
        (not o.freeze_encoder or o.init_from or o.resume or o.checkpoint, "freeze_encoder", "needs --init-from"),
        (not o.controller or not (o.init_from or o.cpc or o.bf16), "controller", "has no --init-from, --cpc and --bf16"),
        (0 <= o.member < o.population_size, "member", f"must be within 0..{o.population_size - 1}: --population-size"),
        (not o.freeze_encoder or o.encoder != "none", "freeze_encoder", "needs an encoder: --encoder none has no image"),
        (o.init_from or not (o.reset_critic or o.reset_policy), "init_from", "is needed by --reset-..."),
        (o.simulator == "auto" or pointnav, "simulator", "is only for pointnav"),
        (not o.habitat_overrides or habitat, "habitat_overrides", "is only for Habitat"),
    ]:
        if not holds:
            refuse(o, name, message)


def choose_device(options):
    """The torch device that the options name. Raises UserError if this machine does not have it."""
    name = options.device if options.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.empty(1, device=name).device  # with its number
    except (RuntimeError, AssertionError) as error:
        refuse(options, "device", f"cannot be used ({str(error).splitlines()[0]}): try --device cpu")
    if options.bf16 and device.type != "cuda":
        raise UserError(f"--bf16 needs a CUDA device, this run uses {device}: leave it out")
    return device


def describe_env(options):
    """Make one environment, look at its spaces and close it. Raises UserError if that fails, or a space is not supported."""
    spaces = gym.spaces
    try:
        env = make_env(options)
        spec = EnvSpec(env.observation_space, env.action_space, env.metadata.get("metrics", ()))
        env.close()
    except Exception as error:  # whatever the environment's own code raises
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        refuse(options, "env_id", f"cannot be made ({reason}); pointnav, CartPole-v1, module:Id-v0 can")
    for key, space in spec.observations.items():
        if not isinstance(space, (spaces.Box, spaces.Discrete, spaces.MultiBinary)) or 0 in space.shape:
            raise UserError(f"observation {key!r} is {space}: only Dict, Box, Discrete and MultiBinary are supported")
    known = isinstance(spec.action, spaces.Box) and np.issubdtype(spec.action.dtype, np.floating) and spec.action_dims
    if not known and not isinstance(spec.action, (spaces.Discrete, spaces.MultiDiscrete)):
        raise UserError(f"the action is {spec.action}: only Discrete, MultiDiscrete and Box of floats are supported")
    if options.population and options.evolve_by not in spec.episode_columns:
        refuse(options, "evolve_by", f"is not measured here: {', '.join(spec.episode_columns)} are")
    return spec


def registered_id(options):
    """The options' Gymnasium id: pointnav and habitat-lab's YAMLs are registered by files in notebooks/."""
    if options.env_id.endswith(".yaml") or options.env_id == "pointnav" and options.simulator == "habitat":
        return "notebooks.habitat_env:Habitat-v0"
    return "notebooks.pointnav:PointNav-v0" if options.env_id == "pointnav" else options.env_id


def parse_options(argv, kind=Options):
    """Options from the command line; with --resume or --checkpoint, those of that run where none is given here."""
    words = [word for argument in argv for word in argument.split("=", 1)]
    given = {name: value for name, value in zip(words, words[1:]) if name in ("--checkpoint", "--resume")}
    if not given:
        return tyro.cli(kind, args=argv)
    saved = load_checkpoint(given.get("--checkpoint") or Path(given["--resume"]) / "checkpoint.pt")["options"]
    own = "device resume checkpoint trace init_from reset_critic reset_policy population".split()
    saved = {field.name: saved[field.name] for field in fields(kind) if field.name in saved and field.name not in own}
    default = object.__new__(kind)  # unchecked: what is given here may be what makes it work
    vars(default).update(vars(kind()) | saved)
    options = tyro.cli(kind, args=argv, default=default)
    for name, value in saved.items():
        if getattr(options, name) != value and not isinstance(value, list):
            print(f"--{name.replace('_', '-')}: {getattr(options, name)} (the checkpoint has {value})")
    return options


def main(argv=None, kind=Options, train=train):
    """Command line. Exit status 0: done, 1: failed while running, 2: refused, 130 or 143: stopped by a signal."""
    program = Path(sys.modules[kind.__module__].__file__).name
    try:
        options = parse_options(sys.argv[1:] if argv is None else argv, kind)
        if options.check_habitat or options.env_id.startswith(SIMULATED) or options.env_id.endswith(".yaml"):
            from notebooks import habitat_env

            if options.check_habitat:
                return habitat_env.check_habitat(options)
            options = habitat_env.choose_simulator(options)
        options = replace(options, device=str(choose_device(options)))  # its number, for simulators too
        if options.population and not options.checkpoint:
            from notebooks.population import train_member

            return train_member(options, train)
        if not options.checkpoint:
            train(options)
            return 0
        spec, policy, _ = build(options)
        load_policy(policy, options.checkpoint)
        report_evaluation(policy, spec, options, Path(options.checkpoint).parent)
        return 0
    except UserError as error:
        print(f"{program}: {error}", file=sys.stderr)
        return 2
    except (EnvironmentFailure, FloatingPointError, OSError) as error:
        print(f"{program}: {error}", file=sys.stderr)
        return 1
    except (MemoryError, torch.OutOfMemoryError) as error:
        advice = "give more --num-minibatches, or less of --num-envs, --num-steps, --image-size and --hidden-size"
        print(f"{program}: {(str(error) or 'out of memory').splitlines()[0]}: {advice}", file=sys.stderr)
        return 1
    except (Interrupted, KeyboardInterrupt) as error:  # in training; outside of it
        return 128 + (error.args or SIGNALS)[0]


if __name__ == "__main__":
    from ver_ppo import main  # as a module: processes and notebooks/ know its classes by that name

    sys.exit(main())
