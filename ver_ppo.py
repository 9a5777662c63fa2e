"""VER: train a recurrent policy with Variable Experience Rollout and PPO (Wijmans et al. 2022).

Simulators are slow and uneven, and a trainer that steps N of them in lock-step always waits for the
slowest. VER does not: whichever environments have answered form the next inference batch, and a
rollout ends when S = T x N steps (--num-steps times --num-envs) are complete, no matter which
environments contributed how many. A step that is in flight at that moment counts for the next
rollout. The uneven experience is cut into mini-batches of equal size for a recurrent network, fast
environments are weighted down, and (without --overlap and async) at most N of the steps that PPO
learns from come from an older policy.

    python ver_ppo.py --env-id pointnav            trains, shows its progress, evaluates
    python ver_ppo.py --help                       explains every option
    torchrun --nproc-per-node 8 ver_multigpu.py    the same on eight GPUs: it imports this file

The processes and what passes between them (section 2.1, figure 2 of the paper):

      environment worker 0 ... W-1                  main process: collects and learns by turns
    +---------------------------+  environments   +---------------------------------------------+
    | take environments that    | ==============> | await_answers -> complete_steps -> act      |
    | have actions, step each,  |  one pipe, all  |    ... until S steps are complete, then ... |
    | write answers into rows   |  workers write  | add_returns -> sequences -> mini-batches    |
    +---------------------------+                 |    -> PPO                                   |
         |  rows  ^               <============== +---------------------------------------------+
         v        |               a pipe each          | rows ^             ^ |            ^ |
                                                       v      |             | v            | v
    [ EnvIO: one row for each environment, shared memory ]   [ pending: N ] -> [ rollout: S steps ]

A *step* begins when inference chooses an action; it is then *in flight*, in the environment's row
of `pending`. When its answer (reward, whether the episode ended) is taken, it is complete and moves
to the next free index of the rollout. An environment whose answer was taken and that gets no action
because enough steps are complete is *idle*. The *version* of a policy is the number of updates
before it. A *segment* is one environment's (async: one trajectory's) steps of a rollout, in time
order. Cut where episodes begin, segments become *sequences*.

Shapes, at least the first dimensions, stand in the names: N environments, S steps of a rollout,
Q sequences, M steps of a mini-batch, B any batch (env_B: the numbers of B environments), H hidden
units, L layers, F features, A dimensions of an action. action_BA is B x A, log_prob_B B numbers.

The file down to "End of the lesson" is VER, in the order in which a step travels; what is drawn
here is --no-overlap, the papers' order (on CPUs, another process collects). Each section after that
adds something that a real run needs, can be read alone, and names its functions that the lesson
calls. (The simulators are environments like any other, in notebooks/environments/.) Papers: VER;
DD-PPO (Wijmans et al. 2020); Sample Factory (Petrenko et al. 2020).
"""

import ast
import contextlib
import copy
import ctypes
import errno
import fcntl
import functools
import importlib
import inspect
import itertools
import json
import math
import multiprocessing.forkserver
import os
import select
import shutil
import signal
import sys
import threading
import time
import traceback
from array import array
from collections import deque
from dataclasses import asdict, dataclass, field, fields, replace
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

# ---------------------------------------------------------------------------------------- Options


@dataclass(frozen=True)
class Options:
    """Train a recurrent policy with Variable Experience Rollout (VER) and PPO."""

    # `pointnav`, `habitat`, or any Gymnasium id: `CartPole-v1`, `package.module:Id-v0`
    env_id: str = "pointnav"
    env_kwargs: tuple[str, ...] = ()  # KEY=VALUE ...: the environment's own keyword arguments
    # around each environment, in this order: "MODULE:NAME(KEY=VALUE, ...)" ...
    wrappers: tuple[str, ...] = ()
    total_timesteps: int = 2_000_000  # environment steps to train for
    seed: int = 1  # of the network, the action sampling, the shuffling and the environments
    device: str = "auto"  # `cpu`, `cuda`, `cuda:1`, ...; auto: CUDA where there is a GPU

    policy: str = "ver_ppo:Policy"  # MODULE:CLASS of another network with the same interface
    hidden_size: int = 128  # H, width of the LSTM and the encoders
    lstm_layers: int = 1  # 1 or 2; 0: a feed-forward layer in place of the LSTM
    # of images: a small CNN; VER's resnet18; DD-PPO's resnet50 and others; none: blind
    encoder: Literal[
        "cnn", "resnet18_plain", "resnet18", "resnet50", "se_resnext50", "se_resnext101", "none"
    ] = "cnn"

    num_envs: int = 16  # N, environments that run in parallel
    num_steps: int = 128  # T: a rollout is T x N steps, T from each environment on average
    # processes that share the environments; 0: all are in the process that collects (debuggers and
    # exact repetition: --no-overlap, too); auto: as many as keep the CPU cores busy, judged by
    # the time that a few steps take
    num_workers: int | Literal["auto"] = "auto"
    max_requests: int = 256  # most answers taken at once (idle environments all act in one batch)
    # which steps make a rollout. ver: whichever come first; nover: T of each environment (VER
    # without variable rollouts); sync: T of each, in lock-step (DD-PPO); async: without end, in
    # trajectories of T (Sample Factory's APPO)
    sampler: Literal["ver", "nover", "sync", "async"] = "ver"
    # another process collects the next rollout while this one learns: faster; data are an update
    # older, which the returns account for (the default: where there are two CPU cores, and no GPU)
    overlap: bool = field(default_factory=lambda: overlap_pays())

    learning_rate: float = 2e-3  # at the start; decays to 0 along a cosine
    gamma: float = 0.99  # discount factor
    gae_lambda: float = 0.95  # lambda of generalized advantage estimation
    num_minibatches: int = 4  # mini-batches per epoch, equally large
    update_epochs: int = 2  # passes over each rollout
    clip_coef: float = 0.2  # PPO's clipping range of the probability ratio
    # each rollout's advantages are brought to mean 0 and deviation 1; else divided by the root mean
    # square of the returns
    norm_adv: bool = True
    ent_coef: float = 1e-2  # entropy coefficient; its first value if --target-entropy is set
    # learn that coefficient so that the entropy stays above this (VER: 0, for Gaussians)
    target_entropy: float | None = None
    vf_coef: float = 0.5  # weight of the value loss
    max_grad_norm: float = 0.5  # gradients are scaled down to this norm

    # --- beyond the lesson: learning
    cpc: bool = False  # auxiliary loss CPC|A: the memory must predict what the next actions show
    bf16: bool = False  # encoders in bfloat16, CUDA only
    learner_threads: int | Literal["auto"] = "auto"  # CPU threads; auto: measured, at most 4

    # --- transfer
    init_from: str | None = None  # checkpoint file whose weights a new run starts from
    freeze_encoder: bool = False  # with --init-from: the image encoders do not learn
    # with --init-from: what begins anew; policy: all but the encoders
    reset: Literal["nothing", "critic", "policy"] = "nothing"

    # --- evaluation
    eval_episodes: int = 200  # episodes of the evaluation (0: none)
    greedy: bool = False  # evaluate with the most probable action instead of a sampled one
    capture_video: bool = False  # write a gif of three evaluation episodes
    checkpoint: str | None = None  # checkpoint file to evaluate, instead of training

    # --- run
    runs_dir: str = "runs"  # where run folders are made
    exp_name: str = "ver"  # in the folder's name: {runs-dir}/{env-id}__{exp-name}__{seed}__{time}
    checkpoint_interval: int = 200_000  # steps between checkpoints (the last is always written)
    resume: str | None = None  # run folder to continue, with its options, except those given here
    env_timeout: float = 300.0  # seconds a step may take; then its worker is started again
    max_worker_restarts: int = 10  # per hour, after environments that raised, hung or died
    trace: str | None = None  # file for the run's timeline: open it in ui.perfetto.dev
    debug: bool = False  # check every invariant of every rollout

    def __post_init__(self):
        check_options(self)

    @property
    def rollout_steps(self):
        """S, steps of one rollout."""
        return self.num_steps * self.num_envs

    @property
    def overlaps(self):
        """Whether another process collects while the main process learns."""
        return self.overlap or self.sampler == "async"


# ----------------------------------------------------------------------------------------- Policy

ACTION_FEATURES = 32  # of the previous action's embedding
NEWEST_SHARE = 0.05  # of the newest rollout in the mean square of returns (`return_scale`)


def orthogonal(layer, gain=math.sqrt(2)):
    """Orthogonal weights and zero biases, as is usual for PPO (Huang et al. 2022, detail 2)."""
    nn.init.orthogonal_(layer.weight, gain)
    nn.init.zeros_(layer.bias)
    return layer


class LSTM(nn.LSTM):
    """The core of a policy: what remembers. Any core has the same three members.

    The recurrent state of an environment is a tensor of `state_rows` x H numbers, all zero at an
    episode's start; here first the hidden rows of all layers, then their cell rows.
    """

    @property
    def state_rows(self):
        """Rows of the recurrent state."""
        return 2 * self.num_layers

    def step(self, x_BF, state_B):
        """One step of B environments: output B x H and the state after it."""
        hidden = []
        cells = []
        below = x_BF
        for layer, weights in enumerate(self.all_weights):  # nn.LSTM takes twice the time here
            memory = state_B[:, layer], state_B[:, self.num_layers + layer]
            hidden_BH, cell_BH = torch.lstm_cell(below, memory, *weights)
            hidden.append(hidden_BH)
            cells.append(cell_BH)
            below = hidden_BH
        return hidden_BH, torch.stack(hidden + cells, dim=1)

    def sequences(self, x_MF, state_Q, batch_sizes):
        """All M steps of Q sequences, arranged as a PackedSequence: output M x H.

        `state_Q` is the state before each sequence's first step, longest sequence first.
        """
        hidden_LQH, cell_LQH = state_Q.transpose(0, 1).contiguous().split(self.num_layers)
        return packed_lstm(self, x_MF, batch_sizes, hidden_LQH, cell_LQH)  # nn.LSTM, faster


class FeedForward(nn.Linear):
    """In the place of the LSTM, without memory: its state is empty, so nothing else has to know."""

    state_rows = 0

    def step(self, x_BF, state_B):
        """As LSTM.step."""
        return torch.tanh(self(x_BF)), state_B

    def sequences(self, x_MF, state_Q, batch_sizes):
        """As LSTM.sequences."""
        return torch.tanh(self(x_MF))


class Critic(nn.Linear):
    """The value head: B x H -> B values. Its linear layer finds them in units of `scale`, how large
    returns are, which travels with the weights. When it changes, all values change with it."""

    def __init__(self, hidden_size):
        super().__init__(hidden_size, 1)
        orthogonal(self, 1.0)
        # 0 until a first reward is seen: so are the values
        self.scale = nn.Parameter(torch.zeros(()), requires_grad=False)

    def forward(self, core_BH):
        return self.scale * super().forward(core_BH).squeeze(-1)


class Policy(nn.Module):
    """Encoders, embedding of the previous action, core, action head and value head (VER section 4).

    Another policy needs what the trainer uses: `step`, `sequences`, `state_shape`, `log_ent_coef`,
    `encoders`, and `critic`, a `Critic`, which gives its values. For another core alone, override
    `make_core`. `spec` (`EnvSpec`) says what an environment gives and takes: `observations`, its
    parts by name; `choices`, the numbers of choices of each action dimension, none if actions are
    continuous; `obs_fields`, (name, type, shape) of each part; `action_dims`, which is A; and
    `episode_columns`: return, length and metrics of an episode.
    """

    def __init__(self, spec, options):
        super().__init__()
        self.choices = spec.choices
        self.bf16 = options.bf16
        self.encoders = build_encoders(spec, options)
        features = sum(encoder.out_features for encoder in self.encoders.values())
        if self.choices:  # one table; choices 2, 3: rows start, 0, 1, start, 0, 1, 2
            parts = [1 + n for n in self.choices]
            offset_A = torch.tensor([0, *np.cumsum(parts)[:-1]])
            self.register_buffer("token_offset_A", offset_A, persistent=False)
            self.action_embedding = nn.Embedding(sum(parts), ACTION_FEATURES)
            # logits become a table: a row for each dimension, padded to the widest; these are used
            # (of choices 2, 3: all of two rows of three but the end of the first)
            possible = torch.arange(max(self.choices)) < torch.tensor(self.choices)[:, None]
            self.table_shape = possible.shape
            self.register_buffer("used", possible.flatten().nonzero()[:, 0], persistent=False)
        else:
            self.action_embedding = nn.Linear(spec.action_dims, ACTION_FEATURES)
            self.log_std_A = nn.Parameter(torch.full((spec.action_dims,), -0.5))
        self.core = self.make_core(features + ACTION_FEATURES, options)
        self.state_shape = (self.core.state_rows, options.hidden_size)
        outputs = sum(self.choices) or spec.action_dims
        self.actor = orthogonal(nn.Linear(options.hidden_size, outputs), 0.01)
        self.critic = Critic(options.hidden_size)
        log_ent_coef = torch.tensor(math.log(max(options.ent_coef, 1e-30)))
        learned = options.target_entropy is not None
        self.log_ent_coef = nn.Parameter(log_ent_coef, requires_grad=learned)
        self.cpc = ContrastivePrediction(features, options.hidden_size) if options.cpc else None

    def make_core(self, in_features, options):
        """What remembers: a module with the three members of `LSTM`."""
        if options.lstm_layers:
            return LSTM(in_features, options.hidden_size, options.lstm_layers)
        return FeedForward(in_features, options.hidden_size)

    def embed(self, action_BA, unknown_B):
        """Actions -> B x ACTION_FEATURES; where they are unknown, the start token or zeros."""
        if self.choices:
            token_BA = torch.where(unknown_B[:, None], 0, action_BA + 1) + self.token_offset_A
            return self.action_embedding(token_BA).sum(1)
        return self.action_embedding(action_BA * ~unknown_B[:, None])

    def encode(self, obs, prev_action_BA, first_B):
        """All that does not depend on memory -> B x in_features of the core. Where `first_B`, the
        previous action is unknown."""
        with torch.autocast(first_B.device.type, torch.bfloat16, enabled=self.bf16):
            features = [encoder(obs).float() for encoder in self.encoders.values()]
        return torch.cat([*features, self.embed(prev_action_BA, first_B)], dim=1)

    def heads(self, core_BH):
        """Action distribution and value_B from the core's output."""
        out = self.actor(core_BH)
        if self.choices:  # one categorical for each action dimension
            logits = out.new_full((len(out), self.table_shape.numel()), -math.inf)
            logits = logits.index_copy(1, self.used, out).view(-1, *self.table_shape)
            each = Categorical(logits=logits, validate_args=False)
        else:
            each = Normal(out, self.log_std_A.expand_as(out).exp(), validate_args=False)
        return Independent(each, 1, validate_args=False), self.critic(core_BH)

    def step(self, obs, prev_action_BA, first_B, state_B):
        """One step of each of B environments: distribution, value_B and the state after the step.

        `state_B` is zero where `first_B`: `observe` sees to that, so that the rollout stores the
        very state that was used.
        """
        x_BF = self.encode(obs, prev_action_BA, first_B)
        core_BH, after_B = self.core.step(x_BF, state_B)
        return *self.heads(core_BH), after_B

    def sequences(self, obs, prev_action_MA, first_M, state_Q, batch_sizes):
        """All M steps of Q sequences, arranged as a PackedSequence: distribution, value_M, and for
        auxiliary losses (features, core_MH) (VER section 2.2, figure 3C).

        The encoders run once over all steps; the core runs over time with batches that shrink as
        sequences end. `state_Q` is the stored state before each sequence's first step.
        """
        x_MF = self.encode(obs, prev_action_MA, first_M)
        core_MH = self.core.sequences(x_MF, state_Q, batch_sizes)
        features = x_MF[:, :-ACTION_FEATURES]  # all but the previous action
        return *self.heads(core_MH), (features, core_MH)


# ---------------------------------------------------------------------------------- Shared memory


class Shared:
    """A table in memory that processes share: a numpy array of records, one for each row.

    Its columns are attributes: `table.reward` is the field `reward` of all rows. Pickling hands on
    the memory itself, but would copy numpy arrays: so each process makes its own views.
    """

    def __init__(self, count, columns):
        self.dtype = np.dtype(columns, align=True)
        self.memory = torch.zeros(count * self.dtype.itemsize, dtype=torch.uint8)
        share_memory([self.memory])
        self.make_views()

    def make_views(self):
        """Look at the memory as `rows`, and at each column of them under its own name."""
        self.rows = self.memory.numpy().view(self.dtype)
        for name in self.dtype.names:
            setattr(self, name, self.rows[name])

    def __getstate__(self):
        views = {"rows", *self.dtype.names}
        return {name: value for name, value in vars(self).items() if name not in views}

    def __setstate__(self, state):
        vars(self).update(state)
        self.make_views()


class EnvIO(Shared):
    """One row for each environment: what it answered last, and the action it must take next.

    A row belongs to the worker from the moment its number is sent down the worker's pipe until the
    worker sends it back; otherwise to the process that collects. So no lock is needed: nobody reads
    a row while it is being written.
    """

    def __init__(self, spec, num_envs, first_episode=0):
        obs = np.dtype(spec.obs_fields, align=True)
        columns = [
            ("obs", obs),
            ("final_obs", obs),  # the last one of an episode: the reset replaces it
            ("action", spec.action_dtype, (spec.action_dims,)),  # the one that was sent last
            ("first", bool),  # `obs` begins an episode
            ("reward", np.float32),
            ("terminated", bool),
            ("truncated", bool),
            ("episode", int),  # number of the episode that `obs` belongs to
            ("episode_stats", float, (len(spec.episode_columns),)),  # of the last whole episode
            ("began_at", float),  # when the environment began its last step (perf_counter) ...
            ("step_sec", float),  # ... and how long it took, a reset included
        ]
        super().__init__(num_envs, columns)
        self.episode[:] = first_episode


class Rollout(Shared):
    """S complete steps in time order (VER section 2.2), or N pending ones by environment.

    Observations and recurrent states are tensors on `device`, all else is columns of the table.
    `delayed`: another process fills it, by policies that are older than the one which learns.
    """

    def __init__(self, spec, steps, num_envs, state_shape, device, delayed=False):
        self.delayed = delayed
        self.steps = steps
        self.num_envs = num_envs
        self.device = device
        self.obs = {}
        for key, kind, shape in spec.obs_fields:
            self.obs[key] = torch.from_numpy(np.zeros((steps, *shape), kind)).to(device)
        self.state = torch.zeros(steps, *state_shape, device=device)  # before the step
        if delayed:
            share_memory([*self.obs.values(), self.state])
        self.size = 0  # steps that are collected: the first ones of the table
        # steps that PPO uses: `size`; with many GPUs S, once `fill_up` has added earlier ones
        self.learned = 0
        # value after each segment's last step: N segments (async has N trajectories, too)
        self.bootstrap = np.zeros(num_envs, np.float32)
        self.clock = (0.0, 0.0, 0.0)  # when collecting began and ended, seconds that it waited
        action = spec.action_dtype, (spec.action_dims,)
        columns = [
            ("env", int),
            ("segment", int),  # the environment (async: the trajectory)
            ("version", int),  # of the policy that chose the action
            ("first", bool),  # first step of an episode: the memory was reset before it
            ("prev_action", *action),
            ("action", *action),
            ("log_prob", np.float32),
            ("value", np.float32),
            ("inference_at", float),  # when its inference began (time.perf_counter) ...
            ("sent_at", float),  # ... and its action was sent
            ("reward", np.float32),  # with gamma * V(final observation), if it was truncated
            ("done", bool),  # last step of an episode
            ("episode_stats", float, (len(spec.episode_columns),)),  # where it is done
            ("began_at", float),  # when the environment began the step ...
            ("step_sec", float),  # ... and how long it took
            ("advantage", np.float32),
            ("returns", np.float32),  # targets of the value
            ("weight", np.float32),  # in the loss
        ]
        super().__init__(steps, columns)

    def copy(self, step_B, other, other_B):
        """Copy the steps `other_B` of another rollout to the indices `step_B`."""
        self.rows[step_B] = other.rows[other_B]
        # `upload`, below: numpy arrays -> tensors on a device
        (to_B,) = upload([step_B], self.device)
        (from_B,) = upload([other_B], other.device)
        mine = [*self.obs.values(), self.state]
        others = [*other.obs.values(), other.state]
        for target, source in zip(mine, others):
            target.index_copy_(0, to_B, source.index_select(0, from_B).to(self.device))

    def to(self, device):
        """The same table, with observations and states on this device."""
        there = copy.copy(self)
        there.device = device
        there.obs = {key: part.to(device) for key, part in self.obs.items()}
        there.state = self.state.to(device)
        return there


# ---------------------------------------------------------------------------- Environment workers


def send_numbers(pipe, numbers):
    """One write of several numbers: atomic up to PIPE_BUF bytes, however many processes write."""
    os.write(pipe.fileno(), array("i", numbers))


def read_numbers(pipe):
    """The numbers that lie in the pipe, at least one (waits for it); none at the pipe's end."""
    return array("i", os.read(pipe.fileno(), 1 << 16)).tolist()


class Environment:
    """One environment and its row of EnvIO. Lives in a worker process, or where one collects."""

    def __init__(self, number, options, split, spec, io):
        self.number = number
        self.options = options
        self.split = split
        self.spec = spec
        self.io = io
        self.env = None
        self.length = 0

    def answer(self):
        """Start when asked for the first time, then step."""
        if self.env is None:
            self.start()
        else:
            self.step()

    def start(self):
        """Make the environment. Only `obs` and `first` of this answer matter. (After a crash, it
        also completes the step that was lost, with reward 0: truncated at the observation in this
        row; terminated if that is already the next episode's first one.)"""
        io = self.io
        e = self.number
        self.env = make_env(self.options, self.split, e)
        io.reward[e] = 0.0
        io.terminated[e] = io.first[e]
        io.truncated[e] = not io.first[e]
        io.episode_stats[e] = np.nan
        io.began_at[e] = time.perf_counter()
        io.step_sec[e] = 0.0
        io.final_obs[e] = io.obs[e]
        self.reset()

    def reset(self):
        """Begin the next episode, from a seed of its own."""
        self.io.episode[self.number] += 1
        episode = self.io.episode[self.number]
        # first number 0: train, 1: val; SEED_OF_LEARNER and others are for other generators
        seed = derive_seed(self.split == "val", self.options.seed, self.number, episode)
        observation, _ = self.env.reset(seed=seed)
        self.length = 0
        self.total_reward = 0.0
        self.write(self.io.obs, self.spec.leaves(observation))
        self.io.first[self.number] = True

    def step(self):
        """Take the action that the row holds, write the answer there, reset if the episode ended.

        The final observation of a truncated episode is written apart, because the reset overwrites
        the row: its value is what the return goes on with. Every episode is reset here, so an
        autoreset wrapper changes nothing.
        """
        io = self.io
        e = self.number
        began_at = time.perf_counter()
        action = to_env_action(self.spec.action, io.action[e])
        self.length += 1  # before the step: if that raises, the error names the right one
        observation, reward, terminated, truncated, info = self.env.step(action)
        self.total_reward += float(reward)
        io.reward[e] = reward
        io.terminated[e] = terminated
        io.truncated[e] = truncated and not terminated
        io.first[e] = False
        if terminated or truncated:
            io.episode_stats[e] = [self.total_reward, self.length, *self.metrics(info)]
            self.write(io.final_obs, self.spec.leaves(observation))
            self.reset()
        else:
            self.write(io.obs, self.spec.leaves(observation))
        io.began_at[e] = began_at
        io.step_sec[e] = time.perf_counter() - began_at

    def metrics(self, info):
        """What the last info of an episode says of the environment's metrics."""
        return [float(info[name]) for name in self.spec.metrics]

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

    Ends at the end of the pipe, when the process that collects closes it or dies. With several
    environments this is double-buffered sampling (Sample Factory, section 3.2): while the actions
    of one half are computed, the worker steps the other.
    """
    torch.set_num_threads(1)
    while asked := read_numbers(inbox):
        answered = []
        since = time.perf_counter()
        try:
            for e in asked:
                environments[e].answer()
                answered.append(e)
                half_done = 2 * len(answered) >= len(environments)
                if half_done and time.perf_counter() - since > 0.002:  # cheap answers: one write
                    send_numbers(outbox, answered)
                    answered = []
                    since = time.perf_counter()
        finally:  # if one raises, those before it have answered (none: nothing is written)
            send_numbers(outbox, answered)
    for environment in reversed(environments.values()):  # the first one's OpenGL context last
        environment.close()


class Workers:
    """The worker processes, seen from the process that collects. Environments go out by `send`,
    when actions for them are in place (at first: when they must start), and come back by
    `receive`."""

    def __init__(self, environments, num_workers):
        self.environments = environments
        self.num_workers = num_workers
        self.context = process_context()
        # when each was asked to answer (time.monotonic), 0: it has answered; for `Supervision`
        self.asked_at_N = np.zeros(len(environments))
        self.answers, self.outbox = self.context.Pipe(duplex=False)
        self.pipes = [self.context.Pipe(duplex=False) for _ in range(self.num_workers)]
        self.processes = [self.start(worker) for worker in range(self.num_workers)]
        self.send(np.arange(len(environments)))

    def start(self, worker, body=env_worker, *more):
        """Start a worker's process: it has every W-th environment. (Another body: Supervision.)"""
        mine = {each.number: each for each in self.environments[worker :: self.num_workers]}
        inbox, _ = self.pipes[worker]
        arguments = (inbox, self.outbox, mine, *more)
        process = self.context.Process(target=body, args=arguments, daemon=True)
        process.start()
        return process

    def send(self, env_B):
        """Let these environments answer."""
        self.asked_at_N[env_B] = time.monotonic()
        worker_B = env_B % self.num_workers
        for worker in set(worker_B.tolist()):
            _, command = self.pipes[worker]
            send_numbers(command, env_B[worker_B == worker].tolist())

    def receive(self, timeout_sec):
        """Numbers of the environments that have answered; [] if none does within this time."""
        ready, _, _ = select.select([self.answers], [], [], timeout_sec)
        answered = read_numbers(self.answers) if ready else []
        self.asked_at_N[answered] = 0.0
        return answered

    def close(self):
        """End the processes: they leave at the end of their pipe, or are killed after 5 s."""
        until = time.monotonic() + 5
        for _, command in self.pipes:
            command.close()
        for process in self.processes:
            end_process(process, max(0.0, until - time.monotonic()))


# ------------------------------------------------------------------------------------- Collecting


class Collector:
    """What collecting remembers from one inference batch to the next."""

    def __init__(self, workers, io, policy, spec, options, enough=lambda steps: False):
        num_envs = options.num_envs
        self.workers = workers
        self.io = io
        self.options = options
        # steps of a rollout -> whether it ends early: with many GPUs, when waiting for this
        # process costs too much, or when the run must end; alone, never
        self.enough = enough
        self.device = next(policy.parameters()).device
        # each environment's step in flight, and whether there is one
        self.pending = Rollout(spec, num_envs, num_envs, policy.state_shape, self.device)
        self.pending.env[:] = range(num_envs)
        self.pending.segment[:] = range(num_envs)
        self.in_flight_N = np.zeros(num_envs, bool)
        self.answered = []  # environments that have answered and were not taken, in this order
        self.idle = np.arange(0)  # environments that were taken and got no action yet
        # recurrent state after each environment's latest action, its step complete or not
        self.state_N = torch.zeros(num_envs, *policy.state_shape, device=self.device)
        self.steps_N = np.zeros(num_envs, int)  # that each has completed in this rollout
        # the most steps that an environment may give to a rollout
        self.quota = options.rollout_steps if options.sampler == "ver" else options.num_steps
        self.version = 0
        self.greedy = False
        self.waited_sec = 0.0


def await_answers(c, most, collected=0):
    """Dynamic batching (VER section 2.1): the environments that have answered, at least one, in
    order of arrival, at most `most` of them: others stay in flight. `sync` waits for all. Empty if
    the rollout, which has `collected` steps, must end first."""
    # check_options sees to it that sync may take all at once
    needed = c.options.num_envs if c.options.sampler == "sync" else 1
    began_at = time.perf_counter()
    c.answered += c.workers.receive(0)
    while len(c.answered) < needed and not c.enough(collected):
        c.answered += c.workers.receive(0.05)  # then it asks again whether there is enough
    c.waited_sec += time.perf_counter() - began_at
    taken = min(most, c.options.max_requests) if len(c.answered) >= needed else 0
    env_B = np.array(c.answered[:taken], int)
    c.answered = c.answered[taken:]
    return env_B


def observe(c, env_B, final=False):
    """What the policy acts on in these environments: their numbers, as a tensor, and the arguments
    of `Policy.step`. With `final`, at the end of a truncated episode instead of at the start of the
    next one."""
    rows = c.io.final_obs if final else c.io.obs
    first_B = c.io.first[env_B] & (not final)  # it is about the next episode then
    arrays = [env_B, c.pending.action[env_B], first_B]
    arrays += [rows[key][env_B] for key in rows.dtype.names]
    index_B, prev_action_BA, first_B, *parts = upload(arrays, c.device)
    obs = dict(zip(rows.dtype.names, parts))
    state_B = c.state_N[index_B] * ~first_B[:, None, None]
    return index_B, (obs, prev_action_BA, first_B, state_B)


def values(policy, c, env_B, final=False):
    """The policy's values of what these environments show now (or showed at the end)."""
    _, inputs = observe(c, env_B, final)
    _, value_B, _ = policy.step(*inputs)
    return value_B.cpu().numpy()


def act(policy, c, env_B):
    """Choose the next actions of these environments, remember the steps as pending, and send the
    actions."""
    if not len(env_B):
        return
    pending = c.pending
    pending.inference_at[env_B] = time.perf_counter()
    index_B, inputs = observe(c, env_B)
    distribution, value_B, after_B = policy.step(*inputs)
    action_BA = distribution.mode if c.greedy else distribution.sample()
    log_prob_B = distribution.log_prob(action_BA)
    # one download: float32 holds the numbers of 16 million choices
    chosen = torch.column_stack([log_prob_B, value_B, action_BA.float()]).cpu().numpy()

    obs, _, _, state_B = inputs
    for key, part in obs.items():
        pending.obs[key][index_B] = part
    pending.state[index_B] = state_B
    pending.first[env_B] = c.io.first[env_B]
    pending.prev_action[env_B] = pending.action[env_B]  # still the action before
    pending.log_prob[env_B] = chosen[:, 0]
    pending.value[env_B] = chosen[:, 1]
    pending.action[env_B] = chosen[:, 2:]
    pending.version[env_B] = c.version
    c.state_N[index_B] = after_B
    c.in_flight_N[env_B] = True

    c.io.action[env_B] = pending.action[env_B]
    pending.sent_at[env_B] = time.perf_counter()
    c.workers.send(env_B)


def complete_steps(policy, rollout, c, env_B, step_B):
    """The answers of these environments complete their pending steps, which move to the indices
    `step_B` of the rollout.

    In-flight carry-over (VER section 2.2) is nothing more than this: a pending step may have been
    sent in an earlier rollout, by an older policy. It keeps the action, log-probability, value and
    version that it was sent with, PPO's ratio accounts for its age, and it counts for the rollout
    in which it is completed. So nothing that was simulated is lost.

    A truncated episode would have gone on: its last reward gets the discounted value of the final
    observation, computed with the memory of that episode (Pardo et al. 2018), which `state_N` still
    holds. From then on, all ends are alike.
    """
    io = c.io
    rollout.copy(step_B, c.pending, env_B)
    rollout.reward[step_B] = io.reward[env_B]
    rollout.done[step_B] = io.terminated[env_B] | io.truncated[env_B]
    rollout.episode_stats[step_B] = io.episode_stats[env_B]
    rollout.began_at[step_B] = io.began_at[env_B]
    rollout.step_sec[step_B] = io.step_sec[env_B]
    c.steps_N[env_B] += 1
    c.in_flight_N[env_B] = False
    truncated_B = io.truncated[env_B]
    if truncated_B.any():
        value_B = values(policy, c, env_B[truncated_B], final=True)
        rollout.reward[step_B[truncated_B]] += c.options.gamma * value_B


def is_full(rollout, c):
    """Whether the rollout ends here: it has S steps, or there is `enough`."""
    return rollout.size == rollout.steps or c.enough(rollout.size)


@torch.inference_mode()
def collect_rollout(policy, rollout, c):
    """Collect a rollout until it `is_full` (VER section 2.2): exactly S steps, from whichever
    environments deliver them; fewer only if there is `enough`.

    Each pass: take the environments that have answered, complete their steps, choose and send their
    next actions. An environment of which no more steps are wanted (the rollout is full; `nover`,
    `sync`: it gave T) gets no action: it is idle until the next rollout, and its next step is the
    new policy's. What is in flight at the end stays pending.

    The returns need the value of what follows each environment's last step. For a pending step that
    is the value it was sent with; for idle environments, it is computed at the end, in one batch.
    """
    began_at = time.perf_counter()
    rollout.size = 0
    c.steps_N[:] = 0
    c.waited_sec = 0.0
    idle_B = c.idle
    c.idle = np.arange(0)
    act(policy, c, idle_B)
    full = is_full(rollout, c)  # `enough` may hold at once
    while not full:
        env_B = await_answers(c, rollout.steps - rollout.size, rollout.size)
        acted_B = env_B[c.in_flight_N[env_B]]  # the others have just started: no step to complete
        step_B = rollout.size + np.arange(len(acted_B))
        complete_steps(policy, rollout, c, acted_B, step_B)
        rollout.size += len(acted_B)
        full = is_full(rollout, c)
        wanted_B = (c.steps_N[env_B] < c.quota) & (not full)
        act(policy, c, env_B[wanted_B])
        c.idle = np.append(c.idle, env_B[~wanted_B])
    rollout.learned = rollout.size
    rollout.bootstrap[:] = c.pending.value  # right for what is in flight
    if len(c.idle):
        rollout.bootstrap[c.idle] = values(policy, c, c.idle)
    rollout.clock = (began_at, time.perf_counter(), c.waited_sec)


def inline_rollouts(policy, spec, options, run):
    """Rollouts without end: this process collects one, and whoever takes it learns, by turns (VER
    appendix A.1)."""
    device = next(policy.parameters()).device
    # a run that goes on needs new episodes, so new seeds: there were at most run.step before
    io = EnvIO(spec, options.num_envs, first_episode=run.step)
    rollout = Rollout(spec, options.rollout_steps, options.num_envs, policy.state_shape, device)
    with contextlib.closing(make_workers(options, "train", spec, io)) as workers:
        c = Collector(workers, io, policy, spec, options, run.enough)
        for version in itertools.count(run.update):
            c.version = version
            torch.set_num_threads(1)  # the workers want the cores now; learning takes more
            collect_rollout(policy, rollout, c)
            yield rollout


# -------------------------------------------------------------------------- Sequences and packing


def find_sequences(segment_S, first_S):
    """The steps of every sequence, in time order: a segment, cut where episodes begin (VER section
    2.2).

    >>> find_sequences(np.array([0, 1, 0, 1, 0]), np.array([False, True, True, False, False]))
    [array([0]), array([2, 4]), array([1, 3])]
    """
    order_S = np.argsort(segment_S, kind="stable")
    changes = np.diff(segment_S[order_S], prepend=-1) != 0
    begins = np.flatnonzero(changes | first_S[order_S])  # in the order of order_S; the first is 0
    return np.split(order_S, begins[1:])


def cut_minibatches(sequences, count):
    """Lay sequences end to end and cut them into `count` mini-batches of equal size (VER section
    2.2, figure 3B): lists of sequences. One that a cut splits goes on in the next mini-batch, as a
    sequence that starts from its stored state. (If the size is no whole number, some are a step
    longer.)

    >>> cut_minibatches([np.array([1, 3]), np.array([0, 2, 4, 5])], 2)
    [[array([1, 3]), array([0])], [array([2, 4, 5])]]
    """
    line = np.concatenate(sequences)
    ends = np.cumsum([len(sequence) for sequence in sequences])
    cuts = len(line) * np.arange(count + 1) // count
    minibatches = []
    for low, high in zip(cuts, cuts[1:]):
        inside = ends[(low < ends) & (ends < high)]
        minibatches.append(np.split(line[low:high], inside - low))
    return minibatches


def pack(sequences):
    """The steps of these sequences as a PackedSequence (VER section 2.2, figure 3C): all first
    steps, then all second steps of those that have one, ... Longest first. Returns them, and how
    many sequences are still running at each time.

    >>> pack([np.array([7]), np.array([4, 5, 6])])
    (tensor([4, 7, 5, 6]), tensor([2, 1, 1]))
    """
    tensors = [torch.from_numpy(sequence) for sequence in sequences]
    packed = pack_sequence(tensors, enforce_sorted=False)
    return packed.data, packed.batch_sizes


# ---------------------------------------------------------------------------- Returns and weights


def compute_advantages(
    segment_S, reward_S, value_S, done_S, bootstrap, gamma, gae_lambda, keep_S=None
):
    """Generalized advantage estimation over steps in time order, for all segments at once (DD-PPO
    section 4).

    Walks backwards and keeps, for each segment, value and advantage of the step that follows: at
    first the segment's bootstrap value and 0, and where an episode is done, 0 and 0. `keep_S`: what
    share of a step's advantage earlier steps see: all, or for older data less (`reevaluate`).
    Returns advantages.

    >>> segment, reward, value = np.array([0, 0, 1]), np.ones(3), np.zeros(3)
    >>> done, bootstrap = np.array([False, True, False]), np.array([9.0, 4.0])
    >>> compute_advantages(segment, reward, value, done, bootstrap, gamma=0.5, gae_lambda=1.0)
    array([1.5, 1. , 3. ], dtype=float32)
    """
    keep_S = np.ones(len(value_S)) if keep_S is None else keep_S
    columns = segment_S, reward_S, value_S, done_S, keep_S
    steps = list(zip(*(column.tolist() for column in columns)))
    advantage_S = np.zeros(len(steps), np.float32)
    next_value = bootstrap.tolist()
    next_advantage = [0.0] * len(bootstrap)
    for step in reversed(range(len(steps))):
        segment, reward, value, done, keep = steps[step]
        if done:
            next_value[segment] = 0.0
            next_advantage[segment] = 0.0
        future = next_value[segment] + gae_lambda * next_advantage[segment]
        advantage = reward + gamma * future - value
        advantage_S[step] = advantage
        next_value[segment] = value
        next_advantage[segment] = keep * advantage
    return advantage_S


def importance_weights(env_S, num_envs, maximum=1.0):
    """Truncated importance weights for the biased sampling of environments (VER section 4, table A1
    "Max VER IS").

    An environment that gave K_e of the S steps was sampled K_e / S of the time instead of 1 / N, so
    each of its steps weighs min(maximum, (S / N) / K_e). Slow environments are not weighted up, so
    the mean weight is 1 at most.

    >>> importance_weights(np.array([0, 0, 0, 0, 1, 2]), num_envs=3)
    array([0.5, 0.5, 0.5, 0.5, 1. , 1. ], dtype=float32)
    """
    steps_N = np.bincount(env_S, minlength=num_envs)
    weight_N = np.minimum(maximum, len(env_S) / num_envs / np.maximum(steps_N, 1))
    return weight_N.astype(np.float32)[env_S]


def add_returns(policy, rollout, options):
    """Write advantage, return and weight of every collected step into the rollout: GAE with the
    stored values; if older policies collected it, corrected by what the policy finds now.
    The weights count segments: environments, or async's trajectories. These are equally long, so
    with async all steps weigh the same, even where fast environments gave more trajectories."""
    steps = rollout.rows[: rollout.size]
    value_S = steps["value"]
    keep_S = np.ones_like(value_S)
    if rollout.delayed:
        value_S, keep_S = reevaluate(policy, rollout, options)
    columns = steps["segment"], steps["reward"], value_S, steps["done"], rollout.bootstrap
    advantage_S = compute_advantages(*columns, options.gamma, options.gae_lambda, keep_S)
    steps["advantage"] = advantage_S
    steps["returns"] = value_S + keep_S * advantage_S
    steps["weight"] = importance_weights(steps["segment"], rollout.num_envs)


# -------------------------------------------------------------------------------------------- PPO


def ppo_loss(distribution, value_M, batch, log_ent_coef, options):
    """Clipped PPO objective, value loss (not clipped) and entropy term, every step weighted by
    `batch["weight"]`.

    `batch` holds M old actions, log-probabilities, advantages, returns and weights, and `scale`,
    the unit in which values are learned. The entropy coefficient exp(log_ent_coef) is fixed, or
    with --target-entropy learned under the constraint entropy >= target (VER section 4): it grows
    while the plain mean of the entropy is below. Returns the loss and a dictionary of what to log.
    """
    weight_M = batch["weight"]
    advantage_M = batch["advantage"]
    log_ratio_M = distribution.log_prob(batch["action"]) - batch["log_prob"]
    ratio_M = log_ratio_M.exp()
    clipped_M = ratio_M.clamp(1 - options.clip_coef, 1 + options.clip_coef)
    objective_M = torch.minimum(ratio_M * advantage_M, clipped_M * advantage_M)
    policy_loss = -(weight_M * objective_M).mean()
    error_M = (value_M - batch["returns"]) / batch["scale"]
    value_loss = 0.5 * (weight_M * error_M**2).mean()
    entropy_M = distribution.entropy()
    entropy_bonus = (weight_M * entropy_M).mean()
    ent_coef = log_ent_coef.exp()
    loss = policy_loss + options.vf_coef * value_loss - ent_coef.detach() * entropy_bonus
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


def make_batch(rollout, sequences):
    """A mini-batch: what the rollout holds of the packed steps of these sequences, on its device;
    the state before each sequence; the batch sizes; and each step's index in the rollout."""
    step_M, batch_sizes = pack(sequences)
    step_M = step_M.numpy()
    rows_M = rollout.rows[step_M]
    names = "prev_action", "action", "first", "log_prob", "advantage", "returns", "weight"
    columns = [rows_M[name].copy() for name in names]
    index_M, *columns = upload([step_M, *columns], rollout.device)
    batch = dict(zip(names, columns))
    batch["obs"] = {key: part.index_select(0, index_M) for key, part in rollout.obs.items()}
    # the first Q steps begin the Q sequences
    batch["state"] = rollout.state.index_select(0, index_M[: batch_sizes[0]])
    batch["batch_sizes"] = batch_sizes
    batch["step"] = step_M
    return batch


def run_sequences(policy, batch):
    """`Policy.sequences` of a mini-batch."""
    inputs = batch["obs"], batch["prev_action"], batch["first"], batch["state"]
    return policy.sequences(*inputs, batch["batch_sizes"])


def minibatch_step(policy, optimizer, batch, options, average):
    """One optimizer step on one mini-batch; none if the gradient is not finite. `average`: as in
    `ppo_update`. Returns what to log."""
    distribution, value_M, (features, core_MH) = run_sequences(policy, batch)
    loss, logs = ppo_loss(distribution, value_M, batch, policy.log_ent_coef, options)
    if options.cpc:
        prediction_loss = cpc_loss(policy, features, core_MH, batch)
        loss = loss + CPC_COEF * prediction_loss
        logs["losses/cpc"] = prediction_loss.detach()
    optimizer.zero_grad()
    loss.backward()
    average([weight.grad for weight in policy.parameters() if weight.grad is not None])
    network = [weight for weight in policy.parameters() if weight is not policy.log_ent_coef]
    norm = nn.utils.clip_grad_norm_(network, options.max_grad_norm)
    finite = torch.isfinite(norm)
    if finite:
        optimizer.step()
    if options.target_entropy is not None:
        policy.log_ent_coef.data.clamp_(math.log(1e-4), 0.0)  # 1e-4 .. 1 (VER table A1)
    logs["losses/grad_norm"] = norm
    logs["losses/skipped"] = (~finite).float()
    return logs


def advantage_scale(rollout, average):
    """Mean and deviation of the advantages, of all processes that learn together (--norm-adv)."""
    advantage_S = rollout.advantage[: rollout.learned].astype(float)
    moments = torch.tensor([advantage_S.mean(), (advantage_S**2).mean()])
    average([moments])
    mean, square = moments.tolist()
    return mean, math.sqrt(max(1e-16, square - mean**2))


@torch.no_grad()
def return_scale(policy, rollout, average):
    """The unit in which values are learned: the running root mean square of the returns, after it
    has taken in those of a rollout, of all processes that learn together. So rewards of any size
    are learned alike, as if they were normalized (Engstrom et al. 2020), but what is stored and
    logged stays in the environment's units. (PopArt would rescale the critic's layer whenever the
    scale moves; after the first rewards, that is mostly by a few per cent.)"""
    returns_S = rollout.returns[: rollout.learned].astype(float)
    scale = policy.critic.scale
    square = torch.full_like(scale, (returns_S**2).mean())
    average([square])
    share = torch.where(scale > 0, NEWEST_SHARE, 1.0)
    mean_square = torch.lerp(scale**2, square, share)
    scale.copy_(torch.where(mean_square.isfinite(), mean_square.sqrt(), scale))
    return scale.clamp(min=1e-8)  # without any reward: 0 / 1e-8


def ppo_update(policy, optimizer, rollout, options, average=lambda tensors: None):
    """Learn from a rollout: --update-epochs passes over all its steps, each in --num-minibatches
    mini-batches, made of the sequences in a new random order. Returns the means of what to log.

    `average` averages tensors over all processes that learn together, in place; one alone has
    nothing to do. Raises FloatingPointError if not one mini-batch has a finite gradient.
    """
    steps = rollout.rows[: rollout.learned]
    sequences = find_sequences(steps["segment"], steps["first"])
    scale = return_scale(policy, rollout, average)
    mean = 0.0
    deviation = scale
    if options.norm_adv:
        mean, deviation = advantage_scale(rollout, average)
    logs = []
    for _ in range(options.update_epochs):
        shuffled = [sequences[q] for q in torch.randperm(len(sequences)).tolist()]
        for minibatch in cut_minibatches(shuffled, options.num_minibatches):
            batch = make_batch(rollout, minibatch)
            batch["advantage"] = (batch["advantage"] - mean) / deviation
            batch["scale"] = scale
            logs.append(minibatch_step(policy, optimizer, batch, options, average))
    table = torch.stack([torch.stack(list(log.values())) for log in logs])
    means = dict(zip(logs[0], table.mean(dim=0).cpu().tolist()))  # one download
    if means["losses/skipped"] == 1:
        reason = "not one gradient of this update was finite"
        raise FloatingPointError(f"{reason}: try a lower --learning-rate")
    # mean and deviation of observations: after learning, which must see what acting saw
    weight = optimizer.param_groups[0]["lr"] / options.learning_rate
    update_statistics(policy, rollout, weight, average)
    return means


# ------------------------------------------------------------------------------------------ Train


def learning_rate_at(step, options):
    """Cosine from --learning-rate to 0 (VER table A1)."""
    progress = min(1.0, step / options.total_timesteps)
    return options.learning_rate * 0.5 * (1 + math.cos(math.pi * progress))


def build(options):
    """The environment's spec, a new policy and its optimizer."""
    spec = describe_env(options)
    torch.manual_seed(options.seed)
    policy = make_policy(spec, options).to(choose_device(options))
    optimizer = torch.optim.Adam(
        policy.parameters(), lr=options.learning_rate, eps=1e-5, fused=True
    )
    return spec, policy, optimizer


def train(options):
    """Train to --total-timesteps, save, evaluate. Returns the run folder."""
    spec, policy, optimizer = build(options)
    with contextlib.closing(Run(options, spec, policy, optimizer)) as run:  # folder, log: below
        torch.manual_seed(derive_seed(SEED_OF_LEARNER, options.seed, run.step))
        # here inline_rollouts; with --overlap and async, another process collects: below
        source = rollout_source(policy, spec, options, run)
        with contextlib.closing(source), run.training():
            while run.step < options.total_timesteps:
                rollout = run.collect(source)  # next(source)
                optimizer.param_groups[0]["lr"] = learning_rate_at(run.step, options)
                with run.learning() as logs:
                    add_returns(policy, rollout, options)
                    logs |= ppo_update(policy, optimizer, rollout, options)
                run.log(rollout, logs)  # and count the steps
        run.evaluate()
    return run.folder


# End of the lesson


# ---------------------------------------------------------------------- Any Gymnasium environment
# Adds what an environment may be: its id, arguments and wrappers, its spaces, its actions, and how
# many processes suit it. The lesson calls `make_env`, `describe_env`, `to_env_action`,
# `derive_seed` and `overlap_pays`.

CHEAP_STEP_SEC = 50e-6  # faster steps are not worth the two messages to another process
LARGE_IMAGE = 128  # pixels
TRIAL = 2**60  # number of the episode before that of `describe_env`: no run gets that far
MAX_WORKERS = 128
MAX_THREADS = 256  # far more end the process without a word


def make_env(options, split="train", number=0):
    """Environment `number` of a split (train or val) as --env-id, --env-kwargs and --wrappers say.

    Those that are registered with arguments named `options`, `split` or `number` are told these;
    other environments differ in their seeds alone.
    """
    spec = load(options.env_id)
    known = {"options": options, "split": split, "number": number}
    arguments = {name: value for name, value in known.items() if name in spec.kwargs}
    if options.capture_video and split == "val":
        arguments["render_mode"] = "rgb_array"
    arguments |= read_arguments(options.env_kwargs)
    env = gym.make(spec, disable_env_checker=True, **arguments)
    for wrapper in options.wrappers:
        env = load(wrapper)(env)
    return env


class EnvSpec:
    """What trainer and network must know of an environment: its spaces, the scalars that the last
    info of an episode holds (named in the environment's metadata), and the seconds that a step
    takes, on the clock and of a CPU. Plain, so that it can be sent to other processes."""

    def __init__(self, observations, action, metrics, step_sec=0.0, cpu_sec=0.0):
        leaves = flatten(observations)
        spaces = gym.spaces
        # numbers and choices; texts and graphs, say, are left out
        kinds = spaces.Box, spaces.MultiBinary, spaces.Discrete, spaces.MultiDiscrete
        self.observations = {k: space for k, space in leaves.items() if isinstance(space, kinds)}
        self.left_out = {k: space for k, space in leaves.items() if k not in self.observations}
        self.left_out_paths = tuple(f"{key}/" for key in self.left_out)
        self.action = action
        self.metrics = tuple(metrics)
        self.episode_columns = ("return", "length", *self.metrics)  # of episode_stats
        self.step_sec = step_sec
        self.cpu_sec = cpu_sec
        self.choices = count_choices(action)
        self.action_dims = len(self.choices) or math.prod(action.shape or ())  # A
        self.action_dtype = np.dtype(np.int64 if self.choices else np.float32)
        self.obs_shapes = {key: space.shape or () for key, space in self.observations.items()}
        self.obs_fields = []  # (key, type, shape)
        for key, space in self.observations.items():
            kind = np.float32
            if space.dtype == np.uint8:  # images stay what they are
                kind = np.uint8
            if count_choices(space):
                kind = np.int64
            self.obs_fields.append((key, kind, self.obs_shapes[key]))

    def leaves(self, observation):
        """The parts of an observation that are not left out, by their keys."""
        parts = flatten(observation)
        paths = self.left_out_paths  # what is below them is left out, too
        return {key: parts[key] for key in parts if not f"{key}/".startswith(paths)}


def count_choices(space):
    """The number of choices of each dimension of a space; none if it holds numbers.

    >>> count_choices(gym.spaces.Discrete(4)), count_choices(gym.spaces.MultiDiscrete([[2, 3]]))
    ([4], [2, 3])
    """
    if isinstance(space, gym.spaces.Discrete):
        return [int(space.n)]
    return getattr(space, "nvec", np.zeros(0, int)).ravel().tolist()


def flatten(tree, name=""):
    """Nested dictionaries and tuples (or spaces of that kind) as one flat dictionary; anything else
    under the key `obs`.

    >>> flatten({"goal": 1, "robot": {"arms": (2, 3)}})
    {'goal': 1, 'robot/arms/0': 2, 'robot/arms/1': 3}
    """
    if isinstance(tree, (tuple, gym.spaces.Tuple)):
        tree = dict(enumerate(tree))
    if not isinstance(tree, (dict, gym.spaces.Dict)):
        return {name or "obs": tree}
    leaves = {}
    for key, below in tree.items():
        leaves |= flatten(below, f"{name}/{key}" if name else str(key))
    return leaves


def to_env_action(space, action_A):
    """The policy's numbers as the environment wants them. Discrete: index plus the space's start.
    Box: -1..1 is the range low..high where it is bounded, and what lies beyond is clipped.

    >>> to_env_action(gym.spaces.Box(0.0, 4.0, (2,)), np.array([0.5, 7.0], np.float32))
    array([3., 4.], dtype=float32)
    """
    if isinstance(space, gym.spaces.Discrete):
        return int(action_A[0] + space.start)
    action = action_A.reshape(space.shape)
    if isinstance(space, gym.spaces.MultiDiscrete):
        return action.astype(space.dtype) + space.start
    bounded = np.isfinite(space.low) & np.isfinite(space.high)
    low = np.where(bounded, space.low, -1)
    high = np.where(bounded, space.high, 1)
    scaled = low + (action + 1) / 2 * (high - low)
    return np.clip(scaled, space.low, space.high).astype(space.dtype)


def derive_seed(*numbers):
    """A seed made of several numbers: 32 bits, so that every simulator takes it."""
    return int(np.random.SeedSequence(numbers).generate_state(1)[0])


def describe_env(options):
    """Make one environment, look at its spaces, take a step as in training, with --num-workers auto
    time some more, and close it. Raises UserError if that fails or lasts longer than --env-timeout,
    if a space is not supported, or if there is nothing to film for --capture-video."""
    film = options.capture_video
    try:
        with time_limit(options.env_timeout):
            env = make_env(options, "val" if film else "train")
        with contextlib.closing(env):
            metrics = (env.metadata or {}).get("metrics", ())  # None: adapters of old gym
            check_wrappers(env)
            spec = EnvSpec(env.observation_space, env.action_space, metrics)
            check_spaces(spec)
            announce(spec, options)
            trial = CheckedEnvironment(0, options, "train", spec, EnvIO(spec, 1, TRIAL))
            trial.env = env
            for take in (trial.reset, trial.step):
                with time_limit(options.env_timeout):
                    take()
            if options.num_workers == "auto":
                spec.step_sec, spec.cpu_sec = time_steps(env)
            if film and np.ndim(env.render()) != 3:
                raise UserError(f"--capture-video: {options.env_id} renders no pictures")
    except UserError:
        raise
    except (Exception, SystemExit) as error:  # whatever the environment's own code raises
        given = [*options.env_kwargs, *options.wrappers]
        if film:
            given.append("--capture-video")
        doors = " ".join(["", *given])
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        frames = traceback.extract_tb(error.__traceback__)
        where = [frame for frame in frames if frame.name != "give_up"][-1]
        reason += f"; {where.filename}:{where.lineno}: {where.line}"
        refuse(options, "env_id", f"cannot be used{doors and f' with{doors}'} ({reason})")
    return spec


@contextlib.contextmanager
def time_limit(sec):
    """Raise TimeoutError if what stands inside takes longer, as soon as Python code runs again.
    Signals are the main thread's: in another one there is no limit."""

    def give_up(_number, _frame):
        raise TimeoutError(f"no answer for {sec:g} s (--env-timeout)")

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handler = signal.signal(signal.SIGALRM, give_up)
    signal.setitimer(signal.ITIMER_REAL, min(sec, 1e8))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)


def check_wrappers(env):
    """Raise UserError for wrappers of Gymnasium that keep running statistics."""
    instead = {
        "NormalizeObservation": "gymnasium.wrappers:RescaleObservation(min_obs=-1, max_obs=1), or,"
        " without bounds, nothing: such vectors are normalized",
        "NormalizeReward": "nothing: rewards of any size are learned alike",
    }
    while isinstance(env, gym.Wrapper):
        name = type(env).__name__
        if name in instead:
            why = "keeps statistics, which evaluation and --resume would begin anew"
            raise UserError(f"the wrapper {name} {why}; use {instead[name]}")
        env = env.env


def check_spaces(spec):
    """Raise UserError for a space that is not supported."""
    spaces = gym.spaces
    if not spec.observations:
        raise UserError(f"no observation holds numbers or choices: {list(spec.left_out)}")
    for key, space in spec.observations.items():
        if 0 in space.shape:
            raise UserError(f"observation {key!r} is {space}, which holds nothing: leave it out")
    continuous = isinstance(spec.action, spaces.Box)
    known = continuous and np.issubdtype(spec.action.dtype, np.floating) and spec.action_dims
    if not known and not isinstance(spec.action, (spaces.Discrete, spaces.MultiDiscrete)):
        kinds = "Discrete, MultiDiscrete and Box of floats"
        raise UserError(f"the action is {spec.action}: only {kinds} are supported")


def announce(spec, options):
    """Say what is left out of the observations, and which images are larger than need be."""
    for key, space in spec.left_out.items():
        kind = type(space).__name__
        print(f"observation {key!r} is left out: {kind} is neither numbers nor choices")
    for key, space in spec.observations.items():
        layout = image_layout(space)
        if layout and max(layout[1:3]) > LARGE_IMAGE and options.encoder == "cnn":
            size = f"{layout[1]} x {layout[2]}"
            print(f"observation {key!r} is an image of {size}: for a smaller one, {RESIZE}")


def time_steps(env):
    """Mean seconds of a step by random actions, on the clock and of this process's CPU time: of 500
    steps, or as many as fit into a second."""
    spent_2 = np.zeros(2)
    steps = 0
    ended = True
    env.action_space.seed(0)
    until = time.perf_counter() + 1.0
    while steps < 500 and time.perf_counter() < until:
        if ended:
            env.reset(seed=0)
        action = env.action_space.sample()
        before_2 = np.array([time.perf_counter(), time.process_time()])
        _, _, terminated, truncated, _ = env.step(action)
        after_2 = np.array([time.perf_counter(), time.process_time()])
        spent_2 += after_2 - before_2
        steps += 1
        ended = terminated or truncated
    return (spent_2 / steps).tolist()


def count_cores():
    """CPU cores that this process may use; torchrun's ranks share those of a machine."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return max(1, cores // int(os.environ.get("LOCAL_WORLD_SIZE", 1)))


def overlap_pays():
    """Whether --overlap is on where nothing is said: measured on two CPU cores (with one, there is
    nothing to overlap; on a GPU it has not been measured)."""
    return count_cores() > 1 and not torch.cuda.is_available()


def count_workers(options, spec):
    """Worker processes to start. auto: none for very cheap steps; else as many as keep the cores
    busy: one a core if a step is computed on the CPU, more the more of its time it waits for
    something else (a GPU, a server), up to one for each environment."""
    if options.num_workers != "auto":
        return options.num_workers
    cheap_sec = CHEAP_STEP_SEC
    if options.overlap and count_cores() == 2:  # busy with collecting and learning
        cheap_sec *= 4
    if spec.step_sec < cheap_sec:
        return 0
    waits = spec.step_sec / max(spec.cpu_sec, 1e-6)  # 1: never
    return min(options.num_envs, MAX_WORKERS, max(1, round(count_cores() * waits)))


# ------------------------------------------------------- Collecting while the main process learns
# Adds a process that collects while this one learns: --overlap, and --sampler async (Sample
# Factory's APPO). The lesson calls `rollout_source`, and for these data, which are older,
# `reevaluate`.


def rollout_source(policy, spec, options, run):
    """The iterator over rollouts that --sampler and --overlap ask for. Closing it ends its
    processes."""
    if options.overlaps:
        return overlapped_rollouts(policy, spec, options, run)
    return inline_rollouts(policy, spec, options, run)


def flat_weights(policy):
    """All weights of a policy as one vector, whatever their layout in memory."""
    return torch.cat([weight.detach().flatten() for weight in policy.parameters()])


def overlapped_rollouts(policy, spec, options, run):
    """Another process fills one of two rollouts while the learner uses the other, and acts by the
    newest weights that there are. With --overlap most of a rollout is by the policy one update
    before, as in HTS-RL (Liu et al. 2020; VER appendix E).

    Rollouts and weights travel through shared CPU memory. Version v of the weights is row v % 2,
    which the process uses without a copy, and which version v + 2 will overwrite, at the end of an
    update. Before that update began, the process had handed its rollout over, and version v + 1 was
    there, which it has used since then: so nobody acts by a row while it is written. (Its number
    follows the weights by microseconds, far longer than any processor holds a store back.) Raises
    EnvironmentFailure if the process ends.
    """
    size = spec, options.rollout_steps, options.num_envs, policy.state_shape, torch.device("cpu")
    rollouts = [Rollout(*size, delayed=True) for _ in range(2)]
    device = next(policy.parameters()).device
    weights = flat_weights(policy).cpu()
    weights = torch.stack([weights, weights]).share_memory_()
    version = torch.tensor(run.update).share_memory_()
    context = process_context()
    inbox, commands = context.Pipe(duplex=False)
    messages, outbox = context.Pipe(duplex=False)
    args = inbox, outbox, spec, options, run.step, rollouts, weights, version
    process = context.Process(target=collector_process, args=args)
    process.start()
    inbox.close()  # only the process has these ends: when it dies, the messages end
    outbox.close()
    try:
        send_numbers(commands, [0])
        for number in itertools.cycle([0, 1]):
            while process.exitcode is None and not messages.poll(1.0):
                if run.enough():
                    yield rollouts[number]
            try:
                if not messages.poll():
                    raise EOFError
                message = messages.recv()  # what is new of the rollout, or why there is none
                if isinstance(message, Exception):
                    raise message
                send_numbers(commands, [1 - number])
            except (EOFError, BrokenPipeError):
                process.join(5)
                reason = f"the collecting process died with exit code {process.exitcode}"
                raise EnvironmentFailure(reason) from None
            vars(rollouts[number]).update(message)
            yield rollouts[number].to(device)
            weights[(version + 1) % 2] = flat_weights(policy).cpu()
            version += 1
    finally:
        commands.close()  # it leaves when its pipe ends
        end_process(process, 10)


def collector_process(inbox, outbox, spec, options, first_episode, rollouts, weights, version):
    """Body of that process: collect into the rollout whose number arrives, until the main process
    ends the pipe or dies."""
    lead_group()
    torch.set_num_threads(1)
    torch.manual_seed(derive_seed(SEED_OF_COLLECTOR, options.seed, first_episode))

    def ended(steps=0):
        ready, _, _ = select.select([inbox], [], [], 0)
        return bool(ready)

    def step_by_newest_weights(*inputs):
        if c.version != version:
            c.version = int(version)
            newest = weights[c.version % 2].to(device)
            nn.utils.vector_to_parameters(newest, policy.parameters())
        return step(*inputs)

    try:
        device = choose_device(options)
        policy = make_policy(spec, options).to(device).requires_grad_(False)
        step = policy.step
        policy.step = step_by_newest_weights
        io = EnvIO(spec, options.num_envs, first_episode)
        with contextlib.closing(make_workers(options, "train", spec, io)) as workers:
            c = Collector(workers, io, policy, spec, options, ended)
            c.version = -1
            collect = collect_rollout
            if options.sampler == "async":
                collect = Trajectories(spec, policy, options).collect
            while numbers := read_numbers(inbox):
                rollout = rollouts[numbers[0]]
                collect(policy, rollout, c)
                if not ended():
                    news = "size", "learned", "bootstrap", "clock"
                    outbox.send({name: getattr(rollout, name) for name in news})
    except (EnvironmentFailure, UserError) as error:
        outbox.send(error)
    except Exception:
        outbox.send(EnvironmentFailure(traceback.format_exc()))


class Trajectories:
    """--sampler async (Sample Factory's APPO, section 3.1): environments never stop, each fills
    trajectories of T steps by the newest weights, and a rollout is the N trajectories that were
    finished first, no matter by which environments."""

    def __init__(self, spec, policy, options):
        device = next(policy.parameters()).device
        size = spec, options.rollout_steps, options.num_envs, policy.state_shape, device
        self.unfinished = Rollout(*size)  # T steps of each environment
        self.finished = []  # environments whose trajectory waits to be copied

    @torch.inference_mode()
    def collect(self, policy, rollout, c):
        """Collect one rollout: its segments are trajectories, its bootstrap values those of the
        steps after them."""
        began_at = time.perf_counter()
        rollout.size = 0
        c.waited_sec = 0.0
        self.hand_over(rollout, c)
        while not is_full(rollout, c):
            env_B = await_answers(c, most=c.options.num_envs)
            acted_B = env_B[c.in_flight_N[env_B]]
            step_B = acted_B * c.options.num_steps + c.steps_N[acted_B]
            complete_steps(policy, self.unfinished, c, acted_B, step_B)
            act(policy, c, env_B)
            full_B = acted_B[c.steps_N[acted_B] == c.options.num_steps]
            c.steps_N[full_B] = 0
            self.finished += full_B.tolist()
            self.hand_over(rollout, c)
        rollout.learned = rollout.size
        rollout.clock = (began_at, time.perf_counter(), c.waited_sec)

    def hand_over(self, rollout, c):
        """Copy finished trajectories into the rollout, while there is room."""
        time_T = np.arange(c.options.num_steps)
        while self.finished and rollout.size < rollout.steps:
            e = self.finished.pop(0)
            step_T = rollout.size + time_T
            segment = rollout.size // len(time_T)
            rollout.copy(step_T, self.unfinished, e * len(time_T) + time_T)
            rollout.segment[step_T] = segment
            rollout.bootstrap[segment] = c.pending.value[e]
            rollout.size += len(time_T)


@torch.no_grad()
def reevaluate(policy, rollout, options):
    """What V-trace needs of steps that older policies collected (IMPALA, section 4.1): value_S, the
    policy's values now; and keep_S, min(1, ratio), the ratio being the action's probability now
    divided by that when it was chosen.

    So much of a step's advantage counts for its value's target and for the steps before it. The
    advantage itself is not multiplied, because PPO's objective is. Where all ratios are 1, this is
    GAE.
    """
    value_S = np.zeros(rollout.size, np.float32)
    keep_S = np.zeros(rollout.size, np.float32)
    steps = rollout.rows[: rollout.size]
    sequences = find_sequences(steps["segment"], steps["first"])
    for minibatch in cut_minibatches(sequences, options.num_minibatches):
        batch = make_batch(rollout, minibatch)
        distribution, value_M, _ = run_sequences(policy, batch)
        ratio_M = (distribution.log_prob(batch["action"]) - batch["log_prob"]).exp()
        found = torch.stack([value_M, ratio_M.clamp(max=1.0)]).cpu()  # one download
        value_S[batch["step"]] = found[0]
        keep_S[batch["step"]] = found[1]
    return value_S, keep_S


# --------------------------------------------------------------------------------------- Encoders
# Adds image and vector encoders, among them the papers' residual networks, and running statistics
# of what they read. The lesson calls `build_encoders`, and `update_statistics` after every update.


def image_layout(space):
    """Channels, height, width of an image (a Box of two or three dimensions, of 8 x 8 pixels at
    least) and whether the channels come last; None for other observations.

    >>> image_layout(gym.spaces.Box(0, 255, (3, 36, 40), np.uint8))
    (3, 36, 40, False)
    """
    box = isinstance(space, gym.spaces.Box) and len(space.shape) in (2, 3)
    if not box or sorted(space.shape)[-2] < 8:
        return None
    shape = space.shape if len(space.shape) == 3 else (*space.shape, 1)
    return (shape[2], *shape[:2], True) if shape[2] <= shape[0] else (*shape, False)


class Statistics(nn.Module):
    """Normalizes each of C channels by its mean and deviation in all rollouts so far (DD-PPO
    section 6), each of which counts as much as it is learned from: a policy whose learning rate has
    decayed could not follow if they still moved. They are parameters without gradient, which travel
    with the weights."""

    def __init__(self, channels):
        super().__init__()
        self.mean_C = nn.Parameter(torch.zeros(channels), requires_grad=False)
        self.variance_C = nn.Parameter(torch.ones(channels), requires_grad=False)
        self.rollouts = nn.Parameter(torch.zeros(()), requires_grad=False)  # sum of their weights

    def forward(self, x):
        """`x`: B x C, or B x C x height x width."""
        shape = self.mean_C.shape + (1,) * (x.dim() - 2)
        deviation_C = self.variance_C.clamp(min=1e-6).sqrt()
        x = (x - self.mean_C.view(shape)) / deviation_C.view(shape)
        return x.clamp(-10, 10)  # what was constant so far may change

    def take_in(self, x, weight, average):
        """Let them be of these observations, too, and of those of other ranks."""
        x = x.transpose(0, 1).flatten(1).clamp(-1e15, 1e15)  # so that squares are finite
        mean_C = x.mean(dim=1)
        average([mean_C])
        variance_C = ((x - mean_C[:, None]) ** 2).mean(dim=1)
        average([variance_C])
        self.rollouts += weight
        away_C = mean_C - self.mean_C
        share = weight / self.rollouts.clamp(min=1e-8)  # of these observations among all
        self.mean_C += share * away_C
        self.variance_C += share * (variance_C + (1 - share) * away_C**2 - self.variance_C)


class Images(nn.Module):
    """The images of one size (RGB and depth, say), stacked as B x channels x height x width. uint8
    is scaled to 0..1; where there is any, every channel is normalized."""

    def __init__(self, spaces):
        super().__init__()
        self.layouts = {key: image_layout(space) for key, space in spaces.items()}
        layouts = list(self.layouts.values())
        self.size = layouts[0][1:3]
        self.channels = sum(layout[0] for layout in layouts)
        bytes_there = any(space.dtype == np.uint8 for space in spaces.values())
        self.normalize = Statistics(self.channels) if bytes_there else nn.Identity()

    def read(self, obs):
        """The images, not yet normalized."""
        images = []
        for key, (_, _, _, channels_last) in self.layouts.items():
            image = obs[key] / 255 if obs[key].dtype == torch.uint8 else obs[key]
            if channels_last:
                image = image.reshape(*image.shape[:3], -1).permute(0, 3, 1, 2)
            images.append(image)
        return torch.cat(images, dim=1) if len(images) > 1 else images[0]

    def forward(self, obs):
        return self.normalize(self.read(obs))


def image_encoders(policy):
    """Those encoders of a policy that read images."""
    return [encoder for encoder in policy.encoders.values() if hasattr(encoder, "images")]


@torch.no_grad()
def update_statistics(policy, rollout, weight, average):
    """Let the running statistics take in 256 steps of a rollout, and those of other ranks. Frozen
    encoders keep theirs. `weight`: the learning rate as a share of the first one."""
    some = slice(0, rollout.learned, rollout.learned // 256 + 1)
    obs = {key: part[some] for key, part in rollout.obs.items()}
    for encoder in policy.encoders.values():
        reader = getattr(encoder, "images", encoder)
        normalize = getattr(reader, "normalize", None)
        learns = any(parameter.requires_grad for parameter in encoder.parameters())
        if isinstance(normalize, Statistics) and learns:
            normalize.take_in(reader.read(obs), weight, average)


class SmallCNN(nn.Module):
    """Small CNN for images of any size -> B x out_features. Its first layers read patches that do
    not overlap: on a CPU that is twice as fast as the usual overlapping 8x8 and 4x4 kernels. With
    channels last in memory it learns in three quarters of the time."""

    def __init__(self, images, out_features):
        super().__init__()
        self.images = images
        self.out_features = out_features
        stride = 4 if min(images.size) >= 32 else 2
        convolutions = nn.Sequential(
            orthogonal(nn.Conv2d(images.channels, 16, stride, stride)),
            nn.ReLU(inplace=True),
            orthogonal(nn.Conv2d(16, 32, stride, stride)),
            nn.ReLU(inplace=True),
            orthogonal(nn.Conv2d(32, 32, 3, 1, padding=1)),
            nn.ReLU(inplace=True),
            nn.Flatten(),
        )
        self.convolutions = convolutions.to(memory_format=torch.channels_last)
        flat_features = 32 * math.prod(size // stride // stride for size in images.size)
        self.out = orthogonal(nn.Linear(flat_features, out_features))

    def forward(self, obs):
        return torch.relu(self.out(self.convolutions(self.images(obs))))


BACKBONES = {  # all of half the usual width and with GroupNorm; `blocks` in the four stages
    "resnet18_plain": {"blocks": (2, 2, 2, 2), "bottleneck": False},  # VER section 3
    "resnet18": {"blocks": (2, 2, 2, 2), "bottleneck": False, "modern": True},  # VER section 4
    "resnet50": {"blocks": (3, 4, 6, 3)},  # DD-PPO section 4, appendix A
    "se_resnext50": {"blocks": (3, 4, 6, 3), "groups": 16, "squeeze": True},
    "se_resnext101": {"blocks": (3, 4, 23, 3), "groups": 16, "squeeze": True},
}


def convolution(channels_in, channels_out, kernel, stride=1, groups=1, dilation=1, padding=None):
    """Convolution without bias, then GroupNorm: batch statistics mislead where experience is
    correlated (DD-PPO, A)."""
    if padding is None:
        padding = dilation * (kernel // 2)
    layer = nn.Conv2d(
        channels_in, channels_out, kernel, stride, padding, dilation, groups, bias=False
    )
    return nn.Sequential(layer, nn.GroupNorm(16, channels_out))


class Block(nn.Module):
    """Residual block (He et al. 2016): 1x1, 3x3, 1x1 convolutions, or without bottleneck 3x3, 3x3.
    `groups` is ResNeXt's cardinality, `squeeze` adds squeeze and excitation, `modern` layer scale
    and a dilated second 3x3 kernel (ConvNeXt)."""

    def __init__(self, channels_in, planes, stride, bottleneck, groups, squeeze, modern):
        super().__init__()
        if bottleneck:
            channels_out = 4 * planes
            width = 2 * planes if groups > 1 else planes
            first = convolution(channels_in, width, 1)
            middle = convolution(width, width, 3, stride, groups)
            last = convolution(width, channels_out, 1)
            self.layers = nn.Sequential(first, nn.ReLU(), middle, nn.ReLU(), last)
        else:
            channels_out = planes
            first = convolution(channels_in, planes, 3, stride)
            second = convolution(planes, planes, 3, dilation=2 if modern else 1)
            self.layers = nn.Sequential(first, nn.ReLU(), second)
        self.shortcut = nn.Identity()
        if stride > 1 or channels_in != channels_out:
            self.shortcut = convolution(channels_in, channels_out, 1, stride)
        # layer scale: Touvron et al. 2021
        self.scale = nn.Parameter(torch.full((channels_out, 1, 1), 0.1)) if modern else 1.0
        self.squeeze = None
        if squeeze:
            narrow = channels_out // 16
            down = nn.Conv2d(channels_out, narrow, 1)
            up = nn.Conv2d(narrow, channels_out, 1)
            self.squeeze = nn.Sequential(nn.AdaptiveAvgPool2d(1), down, nn.ReLU(), up, nn.Sigmoid())

    def forward(self, x):
        change = self.layers(x)
        if self.squeeze is not None:
            change = change * self.squeeze(change)
        return torch.relu(self.shortcut(x) + change * self.scale)


class ResNet(nn.Module):
    """2x2 average pooling, backbone, compression of its last feature map to about 2,048 numbers
    (DD-PPO appendix A), linear layer. `modern`: patches of 4x4 pixels come first, and down-sampling
    stands between the stages (VER section 4)."""

    def __init__(
        self, images, out_features, blocks, bottleneck=True, groups=1, squeeze=False, modern=False
    ):
        super().__init__()
        self.images = images
        self.out_features = out_features
        layers = [nn.AvgPool2d(2)]
        if modern:
            layers.append(convolution(images.channels, 32, 4, 4, padding=0))
        else:
            layers += [convolution(images.channels, 32, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
        channels = 32
        for stage, count in enumerate(blocks):
            planes = 32 * 2**stage
            if modern and stage:
                layers += [nn.GroupNorm(16, channels), nn.Conv2d(channels, planes, 2, 2)]
                channels = planes
            for block in range(count):
                stride = 2 if stage and not block and not modern else 1
                layers.append(Block(channels, planes, stride, bottleneck, groups, squeeze, modern))
                channels = 4 * planes if bottleneck else planes
        self.backbone = nn.Sequential(*layers)
        with torch.no_grad():
            height, width = self.backbone(torch.zeros(1, images.channels, *images.size)).shape[2:]
        compressed = min(512, round(2048 / (height * width)))  # smaller images: fewer
        last = nn.Conv2d(channels, compressed, 3, padding=1, bias=False)
        self.compress = nn.Sequential(last, nn.GroupNorm(1, compressed), nn.ReLU(), nn.Flatten())
        self.out = orthogonal(nn.Linear(compressed * height * width, out_features))

    def forward(self, obs):
        return torch.relu(self.out(self.compress(self.backbone(self.images(obs)))))


class Vector(nn.Module):
    """Two-layer perceptron for a vector, which is normalized if any of its numbers has no bound; or
    (beside the papers' encoders) one linear layer to 32 features as in DD-PPO. Choices enter as
    one-hot vectors, bytes as 0..1."""

    def __init__(self, key, space, out_features, linear):
        super().__init__()
        self.key = key
        self.space = space
        self.out_features = 32 if linear else out_features
        self.choices = count_choices(space)
        self.in_features = sum(self.choices) or math.prod(space.shape)
        if self.choices:  # where the one-hot part of each dimension begins
            begin_D = np.cumsum([0, *self.choices[:-1]]) - np.ravel(space.start)
            self.register_buffer("begin_D", torch.from_numpy(begin_D), persistent=False)
        box = isinstance(space, gym.spaces.Box)
        unbounded = box and (space.low.min() < -1e6 or space.high.max() > 1e6)
        normalized = unbounded and not linear
        self.normalize = Statistics(self.in_features) if normalized else nn.Identity()
        self.layers = orthogonal(nn.Linear(self.in_features, self.out_features))
        if not linear:
            second = orthogonal(nn.Linear(out_features, out_features))
            self.layers = nn.Sequential(self.layers, nn.Tanh(), second, nn.Tanh())

    def read(self, obs):
        """The numbers, not yet normalized."""
        vector = obs[self.key].reshape(len(obs[self.key]), -1)
        if self.choices:
            hot_BF = vector.new_zeros(len(vector), self.in_features, dtype=torch.float32)
            return hot_BF.scatter_(1, vector + self.begin_D, 1.0)
        if vector.dtype == torch.uint8:
            vector = vector / 255
        return vector.float()

    def forward(self, obs):
        return self.layers(self.normalize(self.read(obs)))


def encoder_name(key):
    """An observation's key as a name that nn.ModuleDict takes: without a dot, and none of its own.

    >>> [encoder_name(key) for key in ("depth", "hand.pose", "type")]
    ['depth', 'hand·pose', 'type_']
    """
    name = key.replace(".", "·")
    return f"{name}_" if not name or hasattr(nn.ModuleDict(), name) else name


def build_encoders(spec, options):
    """One encoder for all images of a size, one for each vector: observations -> B x out_features.
    Raises UserError."""
    hidden = options.hidden_size
    backbone = BACKBONES.get(options.encoder)
    encoders = nn.ModuleDict()
    groups = {}  # images by their size
    for key, space in spec.observations.items():
        layout = image_layout(space)
        if not layout:
            vector = Vector(key, space, hidden // 2, linear=backbone is not None)
            encoders[encoder_name(key)] = vector
        elif options.encoder != "none":
            groups.setdefault(layout[1:3], {})[key] = space
    for size, group in groups.items():
        name = encoder_name(next(iter(group)))
        if not backbone:
            encoders[name] = SmallCNN(Images(group), hidden)
        elif min(size) >= 64:
            encoders[name] = ResNet(Images(group), hidden, **backbone)
        else:
            refuse(
                options, "encoder", f"needs images of 64 x 64 at least: {list(group)} have {size}"
            )
    if not encoders:
        refuse(options, "encoder", "nothing is left to observe, choose another one")
    return encoders


# ------------------------------------------------------------------------------------------ CPC|A
# Adds an auxiliary loss, action-conditional contrastive prediction (Guo et al. 2018; VER section
# 3): --cpc. The lesson calls `ContrastivePrediction`, `cpc_loss` and `CPC_COEF`.

# as in habitat-baselines: how many steps ahead, start steps of a sequence, futures and negatives of
# each, weight in the loss
CPC_HORIZON = 20
CPC_STARTS = 6
CPC_FUTURES = 2
CPC_NEGATIVES = 20
CPC_COEF = 0.1


class ContrastivePrediction(nn.Module):
    """From the memory, a GRU follows the actions that were taken next; a classifier tells what was
    seen then from what was not: B x H, B x features -> B logits."""

    def __init__(self, features, hidden):
        super().__init__()
        self.future = nn.GRUCell(ACTION_FEATURES, hidden)
        first = nn.Linear(hidden + features, hidden)
        self.classifier = nn.Sequential(first, nn.ReLU(), nn.Linear(hidden, 1))

    def forward(self, memory_BH, features_BF):
        return self.classifier(torch.cat([memory_BH, features_BF], dim=-1)).squeeze(-1)


def cpc_futures(batch_sizes):
    """What is compared: CPC_STARTS random steps of each packed sequence, and for each CPC_FUTURES
    later ones of the same sequence, CPC_HORIZON steps later at most.

    Returns P start positions, P x CPC_HORIZON positions of the actions from there on (beyond the
    end: of the last step), how many steps later the P x CPC_FUTURES futures are, and their
    positions.
    """
    length_Q = (batch_sizes[:, None] > torch.arange(int(batch_sizes[0]))).sum(0)
    begin_of_time = batch_sizes.cumsum(0) - batch_sizes
    long_Q = torch.arange(len(length_Q))[length_Q > 1]
    sequence_P = long_Q.repeat_interleave(CPC_STARTS)[:, None]
    last_P = length_Q[sequence_P] - 1
    time_P = (torch.rand(len(sequence_P), 1) * last_P).long()
    most_P = (last_P - time_P).clamp(max=CPC_HORIZON)
    later_PF = 1 + (torch.rand(len(sequence_P), CPC_FUTURES) * most_P).long()
    action_time_PT = torch.minimum(time_P + torch.arange(CPC_HORIZON), last_P)

    def position(time):
        return begin_of_time[time] + sequence_P

    return position(time_P)[:, 0], position(action_time_PT), later_PF, position(time_P + later_PF)


def cpc_loss(policy, features_MF, core_MH, batch):
    """The memory after a step is followed through the actions taken since; a classifier must tell
    features seen then from CPC_NEGATIVES others of the mini-batch. The mean cross-entropies of
    both, added."""
    device = core_MH.device
    start_P, action_PT, later_PF, future_PF = cpc_futures(batch["batch_sizes"])
    if not len(start_P):  # every rank averages the same gradients, be they 0
        return sum(parameter.sum() for parameter in policy.cpc.parameters()) * 0.0
    most = int(later_PF.max())
    other_PFN = torch.randint(len(core_MH), (*future_PF.shape, CPC_NEGATIVES))
    indices = [start_P, action_PT, later_PF, future_PF, other_PFN]
    indices = upload([index.numpy() for index in indices], device)
    start_P, action_PT, later_PF, future_PF, other_PFN = indices
    known_M = torch.zeros(len(core_MH), dtype=torch.bool, device=device)
    action_M = policy.embed(batch["action"], known_M)
    memory_PH = core_MH[start_P]
    memories = []
    for action_P in action_PT[:, :most].unbind(1):
        memory_PH = policy.cpc.future(action_M[action_P], memory_PH)
        memories.append(memory_PH)
    index_PFH = (later_PF - 1)[..., None].expand(-1, -1, core_MH.shape[1])
    memory_PFH = torch.stack(memories, dim=1).gather(1, index_PFH)
    positive = policy.cpc(memory_PFH, features_MF[future_PF])
    memory_PFNH = memory_PFH[:, :, None].expand(-1, -1, CPC_NEGATIVES, -1)
    negative = policy.cpc(memory_PFNH, features_MF[other_PFN])
    return nn.functional.softplus(-positive).mean() + nn.functional.softplus(negative).mean()


# ------------------------------------------------------------------------------------ Supervision
# Adds workers that are started again when environments raise, hang or die, and --num-workers 0.
# The lesson calls `make_workers`, `process_context`, `share_memory` and `end_process`.

SIGNALS = signal.SIGINT, signal.SIGTERM
CLOSING_SEC = 5


class UserError(Exception):
    """Something the user can mend; shown as one line, exit status 2."""


class Interrupted(Exception):
    """Ctrl-C or SIGTERM; the argument is the signal's number."""


class EnvironmentFailure(Exception):
    """An environment, or another process, has raised, hung or died; exit status 1."""


class BadAnswer(EnvironmentFailure):
    """NaN, infinity or another shape than the space's: starting again would hide a bug."""


def process_context():
    """How processes are started: by a fork server, as clean as spawn, which imports torch only
    once. It and its processes ignore signals, which may reach the whole process group: the main
    process decides."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["torch", "gymnasium", "tyro", "tqdm"])
    handlers = {number: signal.signal(number, signal.SIG_IGN) for number in SIGNALS}
    multiprocessing.forkserver.ensure_running()
    for number, handler in handlers.items():
        signal.signal(number, handler)
    return context


def lead_group():
    """Give this process a group of its own, to which belongs what its simulators start. If the
    process that started it is gone, and it does not end by itself (a simulator hangs), the group is
    killed."""

    def follow():
        multiprocessing.parent_process().join()
        time.sleep(CLOSING_SEC)
        os.killpg(0, signal.SIGKILL)

    os.setpgrp()
    threading.Thread(target=follow, daemon=True).start()


def end_process(process, timeout_sec):
    """Let a process end within this time, else kill it; and kill what it has started and left
    behind, which is in its process group."""
    process.join(timeout_sec)
    process.kill()
    with contextlib.suppress(OSError):  # nothing is left
        os.killpg(process.pid, signal.SIGKILL)
    process.join(5)


def share_memory(tensors):
    """Move tensors to shared memory, before other processes get to know them. Raises UserError if
    that is full."""
    needed = sum(tensor.nbytes for tensor in tensors)
    free = shutil.disk_usage("/dev/shm").free if os.path.isdir("/dev/shm") else math.inf
    if needed > free:
        needs = f"{needed / 2**20:.0f} MiB of shared memory are needed"
        advice = "enlarge it (docker run --shm-size), or take less of --num-envs and --num-steps"
        raise UserError(f"{needs} and /dev/shm has {free / 2**20:.0f}: {advice}")
    for tensor in tensors:
        tensor.share_memory_()


class CheckedEnvironment(Environment):
    """An environment whose answers are checked, and whose errors say where they come from."""

    def answer(self):
        io = self.io
        e = self.number
        try:
            super().answer()
        except (Exception, SystemExit) as error:
            where = f"environment {e}, episode {io.episode[e]}, step {self.length}"
            kind = BadAnswer if isinstance(error, BadAnswer) else EnvironmentFailure
            raise kind(f"{where}:\n{traceback.format_exc()}") from None

    def step(self):
        super().step()
        reward = self.io.reward[self.number]
        if not math.isfinite(reward):
            raise BadAnswer(f"reward is {reward}")

    def metrics(self, info):
        try:
            return super().metrics(info)
        except (KeyError, TypeError, ValueError) as error:
            names = list(self.spec.metrics)
            reason = f"{type(error).__name__}: {error}"
            raise BadAnswer(f"the last info does not hold {names} as numbers ({reason})") from None

    def write(self, rows, leaves):
        shapes = {key: np.shape(leaf) for key, leaf in leaves.items()}
        known = self.spec.obs_shapes
        if shapes != known:
            raise BadAnswer(f"observation has the shapes {shapes}, the observation space {known}")
        super().write(rows, leaves)
        for key, leaf in leaves.items():
            row = rows[key][self.number]
            given = np.asarray(leaf).dtype
            wanted = row.dtype
            fits = given == wanted or np.can_cast(given, wanted, "same_kind")
            if not fits and not np.array_equal(row, leaf):
                raise BadAnswer(f"observation {key!r} is {given}, which does not fit in {wanted}")
            if wanted.kind == "i" and row not in self.spec.observations[key]:
                space = self.spec.observations[key]
                raise BadAnswer(f"observation {key!r} is {row}, the observation space {space}")
            if wanted.kind == "f" and not np.isfinite(row).all():
                raise BadAnswer(f"observation {key!r} is not finite")

    def close(self):
        try:
            super().close()
        except (Exception, SystemExit) as error:
            tell(f"environment {self.number}: close() raised {error!r}")
        self.env = None


def make_workers(options, split, spec, io, inline=False):
    """All environments of a split, in worker processes or (--num-workers 0, or `inline`) here."""
    numbers = range(options.num_envs)
    environments = [CheckedEnvironment(e, options, split, spec, io) for e in numbers]
    num_workers = count_workers(options, spec)
    if num_workers and not inline:
        return SupervisedWorkers(environments, num_workers)
    return InlineWorkers(environments)


def tell(text):
    """Print to stderr what an environment has done; ranks say which of them it was."""
    rank = os.environ.get("RANK")
    if rank is None:
        tqdm.write(text, file=sys.stderr)
    else:
        tqdm.write(f"rank {rank}: {text}", file=sys.__stderr__)  # sys.stderr is rank 0's alone


def note_restart(workers, reason):
    """Report a restart. Raises a bad answer, and EnvironmentFailure at more than
    --max-worker-restarts in an hour."""
    if isinstance(reason, BadAnswer):
        raise reason
    most = workers.environments[0].options.max_worker_restarts
    now = time.monotonic()
    lines = str(reason).splitlines()
    error = lines[-1]
    known = len(lines) > 1 and any(error == other for _, other in workers.restarts)
    workers.restarts.append((now, error))
    if sum(now - at < 3600 for at, _ in workers.restarts) > most:
        option = "--max-worker-restarts"
        raise EnvironmentFailure(f"{reason}\nmore than {most} restarts within an hour ({option})")
    count = len(workers.restarts)
    if known:  # its traceback has been seen
        reason = f"{lines[0]} {error}"
    tell(f"{reason}\nstarted again, with a new episode ({count} so far)")


class InlineWorkers:
    """All environments where experience is collected: the interface of Workers, a deterministic
    order. One that raises is made anew; one that hangs or crashes is not helped."""

    def __init__(self, environments):
        self.environments = environments
        self.answered = []
        self.restarts = []  # (when, the last line of why)
        self.send(np.arange(len(environments)))

    def send(self, env_B):
        for e in env_B.tolist():
            while e not in self.answered:
                try:
                    self.environments[e].answer()
                    self.answered.append(e)
                except EnvironmentFailure as error:
                    self.environments[e].close()
                    note_restart(self, error)

    def receive(self, timeout_sec):
        answered = self.answered
        self.answered = []
        return answered

    def close(self):
        for environment in self.environments:
            environment.close()


def guarded_worker(inbox, outbox, environments, last_words):
    """`env_worker` in a process group of its own. An exception leaves whether it was a bad answer,
    and its text, and ends the process, whatever threads the simulators have."""
    lead_group()
    try:
        env_worker(inbox, outbox, environments)
    except Exception as error:
        last_words[0] = isinstance(error, BadAnswer)
        text = str(error).encode()[1 - len(last_words) :]
        last_words[1 : 1 + len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        signal.alarm(CLOSING_SEC)  # then the process ends: a simulator may hang here
        for environment in reversed(environments.values()):
            environment.close()
        os._exit(1)


class SupervisedWorkers(Workers):
    """Replaces processes that have died, or whose environment has not answered for --env-timeout.
    The environments that owe an answer then start anew, which is an answer; the others do so when
    their next action arrives."""

    def __init__(self, environments, num_workers):
        self.timeout_sec = environments[0].options.env_timeout
        self.next_check = 0.0
        self.received_at = time.monotonic()
        self.restarts = []  # (when, the last line of why)
        self.heard_at_W = np.zeros(num_workers)  # when each worker has answered last
        self.last_words = torch.zeros(num_workers, 8000, dtype=torch.uint8).share_memory_()
        super().__init__(environments, num_workers)

    def start(self, worker):
        return super().start(worker, guarded_worker, self.last_words[worker])

    def receive(self, timeout_sec):
        answered = super().receive(timeout_sec)
        now = time.monotonic()
        # a long time without a look, in which this process was stopped, or has learned, counts a
        # tenth of the limit at most
        surplus = now - self.received_at - self.timeout_sec / 10
        self.received_at = now
        if surplus > 0:
            self.asked_at_N[self.asked_at_N > 0] += surplus
        self.heard_at_W[np.array(answered, int) % self.num_workers] = now
        if now > self.next_check:
            self.next_check = now + 0.2
            for worker, process in enumerate(self.processes):
                mine = np.arange(worker, len(self.asked_at_N), self.num_workers)
                # an environment that waits for a sibling is not late
                since = np.maximum(self.asked_at_N[mine], self.heard_at_W[worker])
                owes = self.asked_at_N[mine] > 0
                late = mine[owes & (now - since > self.timeout_sec)]
                if len(late) or process.exitcode is not None:
                    answered += self.replace(worker, mine, late)
        return answered

    def replace(self, worker, mine, late):
        """Start a worker's process again. Returns the environments whose answers it had written."""
        process = self.processes[worker]
        end_process(process, 0)
        bad_answer, *text = self.last_words[worker].tolist()
        reason = bytes(text).rstrip(b"\0").decode(errors="replace")
        if not reason:
            who = f"worker {worker} (environments {mine.tolist()})"
            reason = f"{who} died with exit code {process.exitcode}"
        if len(late):
            who = f"environments {late.tolist()}"
            reason = f"no answer from {who} for {self.timeout_sec:.0f} s (--env-timeout)"
        note_restart(self, BadAnswer(reason) if bad_answer else reason)
        answered = super().receive(0)
        inbox, _ = self.pipes[worker]
        while inbox.poll():
            read_numbers(inbox)
        self.last_words[worker] = 0
        self.processes[worker] = self.start(worker)
        self.send(mine[self.asked_at_N[mine] > 0])
        return answered


def check_rollout(rollout, version, lag=0):
    """Assert every invariant of a rollout (--debug), collected by a policy of this version or at
    most `lag` before it."""
    steps = rollout.rows[: rollout.size]
    began_at, _, _ = rollout.clock
    carried_S = steps["sent_at"] < began_at
    carried = steps["env"][carried_S]
    new_version = steps["version"][~carried_S]
    assert 0 < len(steps) <= rollout.steps, "a rollout has at most S steps"
    assert lag or len(set(carried)) == len(carried), "one step at most was in flight in each"
    assert (steps["version"] <= version).all(), "no step is by a policy that is still to come"
    assert (new_version >= version - lag).all(), "new steps come from the current policy"
    for segment in np.unique(steps["segment"]):
        part = steps[steps["segment"] == segment]
        begins = part["first"][1:]
        assert (part["env"] == part["env"][0]).all(), "steps of a segment are of one environment"
        assert (begins == part["done"][:-1]).all(), "an episode begins only where one ended"
        assert (np.diff(part["version"]) >= 0).all(), "versions do not go back"
        assert (np.diff(part["sent_at"]) > 0).all(), "steps are in time order"
    begins = torch.from_numpy(np.flatnonzero(steps["first"]))
    assert not rollout.state[begins].any(), "memory is zero where an episode begins"
    for name in ("log_prob", "value", "action", "reward"):
        assert np.isfinite(steps[name]).all(), f"{name} is finite"
    assert np.isfinite(rollout.bootstrap).all(), "bootstrap values are finite"


# ------------------------------------------------------------------------------------- Run folder
# Adds what a run leaves behind: options.json, TensorBoard events, checkpoint.pt, a trace, an
# evaluation, a video; and what it does on signals. The lesson calls `Run`, `make_policy`
# and `SEED_OF_LEARNER`.

CHECKPOINT_FORMAT = 7
# what reads earlier formats
READ_BY = {4: "commit 2b88288", 5: "commit f6503bf", 6: "commit d3fae65"}
# first numbers of derive_seed; environments have 0 (train) and 1 (val)
SEED_OF_LEARNER = 2
SEED_OF_COLLECTOR = 3
TRACE_BYTES = 10_000_000  # more than a viewer likes
MOST_FRAMES = 1000  # of an episode that is filmed


def load_checkpoint(path):
    """A checkpoint's content, on the CPU. Raises UserError for anything but a checkpoint of this
    program."""
    kinds = {
        "format": int,
        "options": dict,
        "policy": dict,
        "optimizer": dict,
        "step": int,
        "update": int,
        "columns": list,
        "recent": list,
    }
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
        number = content["format"]
        known = all(isinstance(content.get(name), kind) for name, kind in kinds.items())
        known = known and content["step"] >= 0 and content["update"] >= 0
        known = known and all(torch.is_tensor(weight) for weight in content["policy"].values())
    except FileNotFoundError:
        raise UserError(f"there is no checkpoint {path}") from None
    except Exception as error:  # whatever a damaged or hostile file makes of the loader
        kind = type(error).__name__
        raise UserError(f"{path} is not a checkpoint that can be read ({kind})") from None
    if isinstance(number, int) and number != CHECKPOINT_FORMAT:
        advice = f"go on with {READ_BY.get(number, 'that version')}, or start anew"
        raise UserError(f"{path} was written by another version (format {number}): {advice}")
    if not known:
        raise UserError(f"{path} is not a checkpoint of this program")
    return content


def write_checkpoint(content, path):
    """Atomically: a crash leaves the old file or the new one. Raises OSError or RuntimeError
    (torch) if the disk is full."""
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
    """Put a checkpoint's weights into the policy; returns its content. Raises UserError if the
    network is another one."""
    content = load_checkpoint(path)
    try:
        policy.load_state_dict(content["policy"])
    except RuntimeError as error:
        reason = " ".join(str(error).split())[:300]
        raise UserError(f"{path} belongs to another network or environment: {reason}") from None
    return content


def start_from(policy, options):
    """Transfer (DD-PPO section 6): take the weights of the checkpoint --init-from, as far as names
    and shapes agree, but for what --reset names. Raises UserError if encoders, or other weights
    that do not learn, are not among them."""
    saved = load_checkpoint(options.init_from)["policy"]
    own = policy.state_dict()
    weights = dict(policy.named_parameters())
    may_differ = "log_ent_coef", "critic.scale"
    fixed = {name for name in weights if not weights[name].requires_grad}
    fixed = {name for name in fixed if not name.endswith(may_differ)}
    new = {name for name in own if name not in saved or saved[name].shape != own[name].shape}
    if options.reset == "critic":
        new |= {name for name in own if name.startswith("critic.")}
    if options.reset == "policy":
        new |= {name for name in own if not name.startswith("encoders.")} - fixed
    unfit = [name for name in new if name in fixed or name.startswith("encoders.")]
    if unfit:
        advice = "give the --encoder, --env-kwargs and sizes of that run"
        refuse(options, "init_from", f"its network is another one ({min(unfit)}): {advice}")
    new |= {"log_ent_coef"}
    taken = {name: saved[name] for name in own.keys() - new}
    policy.load_state_dict(own | taken)
    print(f"{len(taken)} of {len(own)} tensors come from {options.init_from}; new: {sorted(new)}")


def make_policy(spec, options):
    """The network that --policy names. Raises UserError."""
    network = load(options.policy)
    try:
        inspect.signature(network).bind(spec, options)
    except TypeError as error:
        refuse(options, "policy", f"must be made of (spec, options) ({error})")
    return network(spec, options)


def new_folder(path):
    """Make a folder of this name; if there is one (of a run that began in the same second), with
    `_2` behind it, or the next number that is free. Raises OSError."""
    names = [path.name, *(f"{path.name}_{number}" for number in range(2, 100))]
    for name in names:
        with contextlib.suppress(FileExistsError):
            path.with_name(name).mkdir(parents=True)
            return path.with_name(name)
    raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))


def lock_folder(folder):
    """Lock a folder, until the descriptor that is returned is closed or this process ends. Raises
    UserError if another process has locked it."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise UserError(f"{folder} belongs to a run that has not ended: wait for it") from None
    except OSError:  # a file system without locks
        pass
    return descriptor


class Run:
    """A run folder, counters, progress bar. What was learned before is put in place first."""

    def __init__(self, options, spec, policy, optimizer):
        self.options = options
        self.spec = spec
        self.policy = policy
        self.optimizer = optimizer
        self.step = 0
        self.update = 0
        self.recent = deque(maxlen=100)  # episode_stats of the last episodes
        self.cycles = deque(maxlen=100)  # (seconds, SHARES) of the last updates
        self.learning_sec = {}  # number of threads -> what the last two updates took
        self.signal = None
        self.unsaved = None  # why the last checkpoint could not be written
        self.trace = None
        self.writer = None
        self.lock = None
        if options.init_from:
            start_from(policy, options)
        if options.resume:
            self.restore(load_policy(policy, Path(options.resume) / "checkpoint.pt"))
        if options.freeze_encoder:
            for encoder in image_encoders(policy):
                encoder.requires_grad_(False)
        keep_freed_memory()
        self.saved_step = self.step
        self.first_step = self.step
        self.open_folder()
        self.began_at = time.perf_counter()
        self.logged_at = self.began_at

    def restore(self, saved):
        """Go on from a checkpoint's content, whose weights are in place. Raises UserError."""
        self.step = saved["step"]
        self.update = saved["update"]
        columns = list(self.spec.episode_columns)
        try:
            self.optimizer.load_state_dict(saved["optimizer"])
            if saved["columns"] == columns:  # else they mean something else
                recent = np.array(saved["recent"], float).reshape(-1, len(columns))
                self.recent.extend(recent.tolist())
        except Exception as error:  # whatever a damaged or hostile file makes of torch and numpy
            reason = f"the optimizer, or episodes, cannot be read ({type(error).__name__})"
            raise UserError(f"{self.options.resume}/checkpoint.pt: {reason}") from None
        if self.options.target_entropy is None:  # fixed: as the options say
            self.policy.log_ent_coef.data.fill_(math.log(max(self.options.ent_coef, 1e-30)))

    def open_folder(self):
        """Make the folder, say what is trained, and where. Raises UserError."""
        options = self.options
        name = f"{options.env_id}__{options.exp_name}__{options.seed}__{int(time.time())}"
        name = name.replace("/", "-").replace(":", "-")
        try:
            if options.resume:
                self.folder = Path(options.resume)
                self.lock = lock_folder(self.folder)
            self.open_trace()
            if not options.resume:
                self.folder = new_folder(Path(options.runs_dir) / name)
                self.lock = lock_folder(self.folder)
            (self.folder / "options.json").write_text(json.dumps(asdict(options), indent=2) + "\n")
        except OSError as error:
            reason = f"{error.filename} cannot be written ({error.strerror})"
            raise UserError(f"{reason}: choose another place") from None
        from torch.utils.tensorboard import SummaryWriter  # takes a second to import

        purge_step = self.step + 1 if options.resume else None
        self.writer = SummaryWriter(self.folder, purge_step=purge_step)
        total = max(options.total_timesteps, self.step)
        self.bar = tqdm(total=total, initial=self.step, unit=" steps", dynamic_ncols=True)
        self.bar.write(f"{self.folder}: {self.headline()}")

    def open_trace(self):
        """Open the file that --trace names. Raises UserError."""
        try:
            if self.options.trace:
                self.trace = open(self.options.trace, "w")
        except OSError as error:
            refuse(self.options, "trace", f"cannot be written ({error.strerror})")

    def headline(self):
        """The run's first line: what was chosen, and by which figures."""
        options = self.options
        how = f"{options.sampler} {'with' if options.overlaps else 'without'} overlap"
        how += f", {options.num_envs} environments in {count_workers(options, self.spec)} workers"
        if options.num_workers == "auto":
            times = f"{1000 * self.spec.step_sec:.2g} ms, {1000 * self.spec.cpu_sec:.2g} of a CPU"
            how += f" (a step takes {times}; {count_cores()} cores)"
        weights = list(self.policy.parameters())
        size = sum(weight.numel() for weight in weights)
        return f"{how}, {size:,} parameters on {weights[0].device}"

    def close(self):
        """Finish the files."""
        self.bar.close()
        with contextlib.suppress(OSError):  # a full disk: said before
            if self.trace:
                self.trace.write("\n]\n")
                self.trace.close()
            if self.writer:
                self.writer.close()
        if self.lock is not None:
            os.close(self.lock)

    def enough(self, steps=0):
        """Whether a rollout of so many steps ends early: after a signal."""
        return self.signal is not None

    def collect(self, source):
        """The next rollout. Raises Interrupted if a signal has come."""
        rollout = next(source)
        if self.signal:
            raise Interrupted(self.signal)
        return rollout

    def note_signal(self, number, _frame):
        """Signals are noted, so that training ends where weights are whole; a second one ends it
        wherever it is."""
        self.signal = number
        for each in SIGNALS:
            signal.signal(each, signal.SIG_DFL)

    @contextlib.contextmanager
    def training(self):
        """Around all training: saves at its end, however it ends."""
        handlers = {number: signal.signal(number, self.note_signal) for number in SIGNALS}
        try:
            yield
            if self.signal:  # it came in the last update
                raise Interrupted(self.signal)
            self.save()
            if self.cycles:
                cycle_sec, shares = zip(*self.cycles)
                means = np.average(shares, axis=0, weights=cycle_sec)
                self.bar.write(what_limits(self.options, *means))
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
        """Around the learning of one update: sets the number of threads, takes the time. Yields a
        dictionary to log."""
        began_at = time.perf_counter()
        logs = {}
        threads = choose_threads(self.options, self.update, self.learning_sec)
        torch.set_num_threads(threads)
        yield logs
        learning_sec = time.perf_counter() - began_at
        logs["time/learning_sec"] = learning_sec
        self.learning_sec.setdefault(threads, deque(maxlen=2)).append(learning_sec)

    def log(self, rollout, logs):
        """Count an update and its steps, write what to log, and from time to time a checkpoint."""
        steps, logs, episodes = self.describe(rollout, logs)
        shares = [logs[f"time/{name}_share"] for name in SHARES]
        self.cycles.append((logs["time/cycle_sec"], shares))
        self.write(steps, logs, episodes)
        if self.step - self.saved_step >= self.options.checkpoint_interval:
            self.save()

    def describe(self, rollout, logs):
        """An update's steps; what to log of it: where the time went, how uneven the environments
        and how old the data were; and the numbers of the episodes that ended."""
        options = self.options
        if options.debug:
            # async: the trajectory of a slow environment takes several updates
            lag = 8 if options.sampler == "async" else int(rollout.delayed)
            check_rollout(rollout, self.update, lag)
        steps = rollout.rows[: rollout.size]
        learning_sec = logs["time/learning_sec"]
        if self.trace:
            self.write_trace(steps, learning_sec)
        began_at, ended_at, waited_sec = rollout.clock
        rollout_sec = ended_at - began_at
        now = time.perf_counter()
        cycle_sec = now - self.logged_at
        self.logged_at = now
        simulated_sec = steps["step_sec"].sum()
        workers = count_workers(options, self.spec)
        busy_share = simulated_sec / max(1, workers) / rollout_sec
        if workers == 0:  # what the simulators take is not the network's
            waited_sec += simulated_sec
        lag_S = self.update - steps["version"]
        steps_N = np.bincount(steps["env"], minlength=rollout.num_envs)
        learned = rollout.rows[: rollout.learned]
        error_S = learned["returns"] - learned["value"]
        logs = logs | {
            "losses/explained_variance": 1 - error_S.var() / max(learned["returns"].var(), 1e-12),
            "charts/learning_rate": self.optimizer.param_groups[0]["lr"],
            "charts/return_scale": self.policy.critic.scale.item(),
            "time/waiting_share": waited_sec / cycle_sec,
            "time/inference_share": (rollout_sec - waited_sec) / cycle_sec,
            "time/learning_share": learning_sec / cycle_sec,
            "time/cycle_sec": cycle_sec,
            "time/rollout_sec": rollout_sec,
            "time/env_step_ms": 1000 * simulated_sec / len(steps),
            "time/worker_idle_share": max(0.0, 1 - busy_share),
            "ver/batch_size": len(steps) / len(np.unique(steps["sent_at"])),
            "ver/steps_per_env_min": steps_N.min(),
            "ver/steps_per_env_max": steps_N.max(),
            "ver/carried_share": (steps["sent_at"] < began_at).mean(),
            "ver/policy_lag_mean": lag_S.mean(),
            "ver/policy_lag_max": lag_S.max(),
            "ver/importance_weight": learned["weight"].mean(),
            "ver/made_up_steps": (steps["step_sec"] == 0.0).sum(),  # by `Environment.start`
        }
        episodes = steps["episode_stats"][steps["done"]]
        return len(steps), logs, episodes[np.isfinite(episodes[:, 0])].tolist()

    def write(self, steps, logs, episodes):
        """Count the steps, write numbers and the means of the last 100 episodes, move the progress
        bar."""
        self.step += steps
        self.update += 1
        self.recent.extend(episodes)
        logs["charts/SPS"] = (self.step - self.first_step) / (time.perf_counter() - self.began_at)
        if self.recent:
            metrics = [f"metrics/{name}" for name in self.spec.metrics]
            tags = ["charts/episodic_return", "charts/episodic_length", *metrics]
            logs |= dict(zip(tags, np.array(self.recent).mean(axis=0)))
            shown = {"return": "charts/episodic_return"}
            shown |= {"success": "metrics/success", "spl": "metrics/spl"}
            postfix = {word: f"{logs[tag]:.3g}" for word, tag in shown.items() if tag in logs}
            self.bar.set_postfix(postfix, refresh=False)
        self.write_scalars(logs)
        self.bar.update(self.step - self.bar.n)

    def write_scalars(self, logs):
        """Add points to TensorBoard's curves; says so once if that fails (a full disk), and goes on
        without."""
        if not self.writer:
            return
        try:
            for tag, value in logs.items():
                self.writer.add_scalar(tag, value, self.step)
        except OSError as error:
            self.bar.write(f"TensorBoard's curves end at step {self.step}: {error}")
            self.writer = None

    def write_trace(self, steps, learning_sec):
        """Add an update to the trace; says so if that fails (a full disk), and goes on without."""
        try:
            if self.trace.tell() < TRACE_BYTES:
                write_trace(self.trace, steps, learning_sec)
        except OSError as error:
            self.bar.write(f"the trace ends at step {self.step}: {error}")
            self.trace = None

    def save(self):
        """Write the checkpoint: only tensors and plain types, so that it loads with
        weights_only=True and a foreign file can execute nothing."""
        content = {
            "format": CHECKPOINT_FORMAT,
            "options": asdict(self.options),
            "policy": self.policy.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "step": self.step,
            "update": self.update,
            "columns": list(self.spec.episode_columns),
            "recent": list(self.recent),
        }
        self.saved_step = self.step
        self.unsaved = None
        try:
            write_checkpoint(content, self.folder / "checkpoint.pt")
        except (OSError, RuntimeError) as error:
            self.unsaved = str(error).splitlines()[0][:200]
            what = f"checkpoint of step {self.step} not written, the one before stays"
            self.bar.write(f"{what}: {self.unsaved}")

    def evaluate(self):
        """Evaluate what was learned. Raises OSError if it could not be saved."""
        self.bar.close()
        if self.options.eval_episodes:
            self.write_scalars(report_evaluation(self.policy, self.spec, self.options, self.folder))
        if self.unsaved:
            raise OSError(f"the last checkpoint could not be written: {self.unsaved}")


SHARES = "waiting", "inference", "learning", "worker_idle"


def what_limits(options, waiting, inference, learning, worker_idle):
    """One line that says what takes most of the time, by the shares that are logged as time/...,
    and what helps.

    >>> what_limits(Options(sampler="sync", overlap=False), 0.7, 0.1, 0.2, 0.6)
    'stragglers limit the speed: 70 % waiting, workers idle 60 % of it: try --sampler ver'
    """
    collecting = waiting + inference if options.overlaps else max(waiting, inference)
    if learning >= collecting:
        what = "learning limits"
        advice = "a GPU, or fewer --update-epochs" if options.overlaps else "--overlap, or a GPU"
        why = f"{learning:.0%} of the time: try {advice}"
    elif inference >= waiting:
        what = "inference limits"
        why = f"{inference:.0%} of the time: try more --num-envs in a batch, or a GPU"
    elif worker_idle > 0.5 and options.sampler in ("sync", "nover"):
        what = "stragglers limit"
        why = f"{waiting:.0%} waiting, workers idle {worker_idle:.0%} of it: try --sampler ver"
    else:
        what = "simulators limit"
        why = f"{waiting:.0%} of the time: try more --num-envs, --num-workers, or CPU cores"
    return f"{what} the speed: {why}".replace("%", " %")


def write_trace(file, steps, learning_sec):
    """Append steps and the learning from them to a trace in Chrome's format (ui.perfetto.dev,
    chrome://tracing): each environment's steps, each inference batch with its size, each learning
    phase."""
    spans = []  # lane, name, begin, seconds
    for e, began_at, sec in steps[["env", "began_at", "step_sec"]].tolist():
        spans.append((f"environment {e}", "step", began_at, sec))
    batches = np.unique(steps["sent_at"], return_index=True, return_counts=True)
    for sent_at, index, size in zip(*batches):
        began_at = steps["inference_at"][index]
        spans.append(("inference", f"batch of {size}", began_at, sent_at - began_at))
    spans.append(("learner", "learning", time.perf_counter() - learning_sec, learning_sec))
    for lane, name, began_at, sec in spans:
        event = {"name": name, "ph": "X", "pid": lane, "tid": lane}
        event |= {"ts": round(1e6 * began_at), "dur": round(1e6 * sec)}
        file.write(",\n" if file.tell() else "[\n")
        file.write(json.dumps(event))


@torch.inference_mode()
def evaluate(policy, spec, options, show=None):
    """Play --eval-episodes validation episodes. Returns their numbers, E x (return, length,
    metrics). With `show`, which gets the pictures, one environment plays.

    Each environment plays its share, so that short episodes do not count more than long ones; for
    the same --num-envs and --eval-episodes they are the same for every policy.
    """
    filmed = show is not None
    num_envs = 1 if filmed else min(options.num_envs, options.eval_episodes)
    num_workers = min(count_workers(options, spec), num_envs)
    sizes = {"num_envs": num_envs, "num_workers": num_workers, "num_minibatches": 1}
    options = replace(options, **sizes, seed=0, sampler="ver", capture_video=filmed)
    share, rest = divmod(options.eval_episodes, num_envs)
    left_N = share + (np.arange(num_envs) < rest)
    io = EnvIO(spec, num_envs)
    found = []
    device = next(policy.parameters()).device
    generators = torch.random.fork_rng([device] if device.type == "cuda" else [])
    workers = make_workers(options, "val", spec, io, inline=filmed)
    bar = tqdm(total=options.eval_episodes, unit=" episodes", delay=20, leave=False)
    with generators, contextlib.closing(workers), bar:
        torch.manual_seed(options.seed)
        c = Collector(workers, io, policy, spec, options)
        c.greedy = options.greedy
        while len(found) < options.eval_episodes:
            env_B = await_answers(c, most=num_envs)
            whole_B = np.isfinite(io.episode_stats[env_B, 0])  # not one that was started again
            for e in env_B[c.in_flight_N[env_B] & io.first[env_B] & whole_B]:
                found.append(io.episode_stats[e].tolist())
                left_N[e] -= 1
                bar.update()
            act_B = env_B[left_N[env_B] > 0]
            if filmed and len(act_B) and workers.environments[0].length < MOST_FRAMES:
                show(workers.environments[0].env.render())
            act(policy, c, act_B)
    return np.array(found)


def report_evaluation(policy, spec, options, folder):
    """Evaluate, print mean +- standard error of every number, write the video if asked for.
    Returns the means to log."""
    began_at = time.perf_counter()
    found = evaluate(policy, spec, options)
    sec = time.perf_counter() - began_at
    means = found.mean(axis=0)
    errors = found.std(axis=0, ddof=len(found) > 1) / math.sqrt(len(found))
    names = spec.episode_columns
    parts = [f"{n} {mean:.3f} ± {error:.3f}" for n, mean, error in zip(names, means, errors)]
    how = "greedy" if options.greedy else "sampled"
    print(f"evaluation, {len(found)} {how} episodes in {sec:.0f} s: {', '.join(parts)}")
    if options.capture_video:
        write_video(policy, spec, options, folder / "evaluation.gif")
    return {f"eval/{name}": mean for name, mean in zip(names, means)}


def write_video(policy, spec, options, path):
    """Film three validation episodes, at most MOST_FRAMES steps of each, into a gif."""
    from PIL import Image
    from PIL.GifImagePlugin import getdata, getheader

    sizes = []
    with open(path, "wb") as file:

        def show(frame_HWC):  # written at once: a thousand frames may be a gigabyte
            picture = Image.fromarray(frame_HWC)
            sizes.append(picture.size)
            picture = picture.resize(sizes[0]).quantize()
            if len(sizes) == 1:
                header, _ = getheader(picture.copy(), info={"loop": 0})
                file.write(b"".join(header))
            file.write(b"".join(getdata(picture, duration=100, include_color_table=True)))

        evaluate(policy, spec, replace(options, eval_episodes=3), show)
        file.write(b";")
    print(f"video: {path}")


# ------------------------------------------------------------------------------------------ Speed
# Adds what makes learning on a CPU faster, measured, and copies to a GPU few. The lesson calls
# `packed_lstm` and `upload`; `Run` calls the others.


def upload(arrays, device):
    """numpy arrays as tensors on a device. To a GPU they go in one copy, because each takes as long
    there as one of the network's kernels."""
    tensors = [torch.from_numpy(numbers) for numbers in arrays]
    if device.type == "cpu":
        return tensors
    sizes = [-(-tensor.nbytes // 8) * 8 for tensor in tensors]  # each begins at a whole word
    staged = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=device.type == "cuda")
    for part, numbers in zip(staged.split(sizes), arrays):
        part.numpy()[: numbers.nbytes] = numbers.ravel().view(np.uint8)
    parts = staged.to(device, non_blocking=True).split(sizes)
    sent = []
    for part, tensor in zip(parts, tensors):
        sent.append(part[: tensor.nbytes].view(tensor.dtype).view(tensor.shape))
    return sent


def packed_lstm(lstm, x_MF, batch_sizes, hidden_LQH, cell_LQH):
    """nn.LSTM over a PackedSequence: M x features -> M x H. On a CPU it is spelled out: all first
    steps, then all second steps, ... Learning is a tenth faster by it there, because each step of
    nn.LSTM's backward pass fills a buffer as large as the whole input with zeros."""
    if x_MF.device.type != "cpu":
        packed, _ = lstm(PackedSequence(x_MF, batch_sizes), (hidden_LQH, cell_LQH))
        return packed.data
    for weights, hidden_QH, cell_QH in zip(lstm.all_weights, hidden_LQH, cell_LQH):
        input_weight, hidden_weight, input_bias, hidden_bias = weights
        gates_M4H = nn.functional.linear(x_MF, input_weight, input_bias + hidden_bias)
        outputs = []
        for gates_B4H in gates_M4H.split(batch_sizes.tolist()):
            running = len(gates_B4H)  # the longest sequences come first
            gates_B4H = torch.addmm(gates_B4H, hidden_QH[:running], hidden_weight.T)
            write_BH, keep_BH, new_BH, show_BH = gates_B4H.chunk(4, dim=1)
            kept_BH = keep_BH.sigmoid() * cell_QH[:running]
            cell_QH = kept_BH + write_BH.sigmoid() * new_BH.tanh()
            hidden_QH = show_BH.sigmoid() * cell_QH.tanh()
            outputs.append(hidden_QH)
        x_MF = torch.cat(outputs)
    return x_MF


def keep_freed_memory():
    """Tell glibc not to give freed memory back to the kernel: learning is a sixth faster on a CPU,
    because activations come and go with every mini-batch, at a page fault for every 4 KiB."""
    trim_threshold = -1
    mmap_threshold = -3
    with contextlib.suppress(OSError, AttributeError):  # another C library: nothing to tell
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(mmap_threshold, 1 << 25)  # glibc's maximum
        mallopt(trim_threshold, 1 << 30)


def choose_threads(options, update, learning_sec):
    """CPU threads for an update: the number that was faster in its last two. On busy cores, threads
    that wait for each other are many times slower than one; so each number is tried twice every 200
    updates (but not in the first, which is always slow)."""
    if options.learner_threads != "auto":
        return options.learner_threads
    choices = sorted({1, min(4, count_cores())})
    if update % 200 in range(1, 2 * len(choices) + 1):
        return choices[update % len(choices)]
    return min(choices, key=lambda threads: min(learning_sec.get(threads, [0.0])))


# ---------------------------------------------------------------- The command line and its checks
# Adds refusals in one line, before anything is started, and the three doors to code elsewhere:
# --env-id with its arguments, --wrappers, --policy. The lesson calls `check_options` and
# `choose_device`; all that a string names is found by `load`.

ALIASES = {
    "pointnav": "notebooks.environments.pointnav:PointNav-v0",
    "habitat": "notebooks.environments.habitat:Habitat-v0",
}
LATENCY = '--wrappers "notebooks.extensions.wrappers:Latency(mean_ms=20, spread=0.8)"'
RESIZE = '--wrappers "notebooks.extensions.wrappers:Resize(height=84, width=84)"'
POPULATION = "python -m notebooks.extensions.population"
MOVED = {  # options of before, and how the same is said now
    "action-delay": "--wrappers notebooks.extensions.wrappers:ActionDelay",
    "camera": "--env-kwargs camera=rgb",
    "check-habitat": "python -m notebooks.environments.habitat",
    "controller": "--policy notebooks.extensions.controller:NeuralController --init-from FILE",
    "evolve-after": POPULATION,
    "evolve-by": POPULATION,
    "evolve-interval": POPULATION,
    "habitat-overrides": "--env-kwargs habitat.environment.max_episode_steps=300",
    "image-size": "--env-kwargs image_size=128",
    "member": POPULATION,
    "population": POPULATION,
    "population-size": POPULATION,
    "recurrent": "--lstm-layers 0",
    "reset-critic": "--reset critic",
    "reset-policy": "--reset policy",
    "sim-latency": LATENCY,
    "sim-latency-spread": LATENCY,
    "simulator": "--env-kwargs simulator=builtin",
}


def read_value(text):
    """A Python literal, else the text itself.

    >>> [read_value(text) for text in ("64", "(64, 64)", "None", "depth")]
    [64, (64, 64), None, 'depth']
    """
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def read_arguments(items):
    """`KEY=VALUE` of each item as a dictionary. Raises UserError.

    >>> read_arguments(["camera=rgb", "image_size=64"])
    {'camera': 'rgb', 'image_size': 64}
    """
    arguments = {}
    for item in items:
        key, equals, value = item.partition("=")
        if not key or not equals:
            raise UserError(f"{item}: must be KEY=VALUE, as in image_size=64")
        arguments[key] = read_value(value)
    return arguments


def load(text):
    """What `module:name` names: imports the module, and returns its attribute of that name, or
    Gymnasium's specification of the environment that it registers by that id (without a module:
    one that Gymnasium knows). With `(key=value, ...)` behind it, these arguments are bound to it.
    Raises UserError.

    >>> load("math:prod(start=2)")([3, 4])
    24
    """
    path, bracket, rest = ALIASES.get(text, text).partition("(")
    module, _, name = path.rpartition(":")
    try:
        home = importlib.import_module(module) if module else None
        found = getattr(home, name) if hasattr(home, name) else gym.spec(name)
    except (Exception, SystemExit) as error:  # whatever the module's own code raises
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        advice = "" if module else ": an environment of a package is named package:Id-v0"
        raise UserError(f"{text} cannot be found ({reason}){advice}") from None
    if not bracket:
        return found
    try:
        call = ast.parse(f"_({rest}", mode="eval").body
        arguments = {word.arg: read_value(ast.unparse(word.value)) for word in call.keywords}
        bound = functools.partial(found, **arguments)
        inspect.signature(bound)  # raises for an argument that it does not take
        if call.args:
            raise ValueError
    except (SyntaxError, AttributeError, TypeError, ValueError):
        takes = f"{name}{inspect.signature(found)}"
        raise UserError(f"{text}: must be {path}(KEY=VALUE, ...); it is {takes}") from None
    return bound


def refuse(options, name, message):
    """Raise UserError for an option."""
    raise UserError(f"--{name.replace('_', '-')} {getattr(options, name)}: {message}")


def check_rules(options, rules):
    """Raise UserError for the first rule, (holds, option's name, advice), that does not hold."""
    for holds, name, advice in rules:
        if not holds:
            refuse(options, name, advice)


def check_options(options):
    """Raise UserError for the first option that cannot work, with the way to mend it."""
    o = options
    positive = "total_timesteps num_envs num_steps num_minibatches update_epochs max_requests"
    positive += " checkpoint_interval learner_threads learning_rate clip_coef max_grad_norm"
    positive += " env_timeout"
    for name in positive.split():
        if not (getattr(o, name) == "auto" or 0 < getattr(o, name) < math.inf):
            refuse(o, name, "must be a positive number")
    amounts = "seed num_workers eval_episodes max_worker_restarts ent_coef vf_coef"
    for name in amounts.split():
        if not (getattr(o, name) == "auto" or 0 <= getattr(o, name) < 2**63):
            refuse(o, name, "must be 0 or more")
    most_envs = select.PIPE_BUF // 4
    most_workers = min(o.num_envs, MAX_WORKERS)
    steps = f"--num-steps x --num-envs = {o.rollout_steps}"
    begins = bool(o.init_from)
    goes_on = bool(o.resume or o.checkpoint)
    rules = [
        (0 <= o.gamma <= 1, "gamma", "must be within 0..1"),
        (0 <= o.gae_lambda <= 1, "gae_lambda", "must be within 0..1"),
        (o.lstm_layers in (0, 1, 2), "lstm_layers", "must be 0, 1 or 2"),
        (o.hidden_size >= 2, "hidden_size", "must be 2 or more"),
        (
            o.learner_threads == "auto" or o.learner_threads <= MAX_THREADS,
            "learner_threads",
            f"must be at most {MAX_THREADS}",
        ),
        (
            o.target_entropy is None or math.isfinite(o.target_entropy),
            "target_entropy",
            "must be a finite number",
        ),
        (o.exp_name.isprintable(), "exp_name", "must be text that can be printed"),
        (o.num_envs <= most_envs, "num_envs", f"must be at most {most_envs}: one pipe write"),
        (
            o.num_workers == "auto" or o.num_workers <= most_workers,
            "num_workers",
            f"must be within 0..{most_workers}",
        ),
        (o.rollout_steps <= 10**8, "num_steps", f"is absurd: {steps}"),
        (o.num_minibatches <= o.rollout_steps, "num_minibatches", f"must be at most {steps}"),
        (
            o.sampler != "sync" or o.max_requests >= o.num_envs,
            "max_requests",
            "must be at least --num-envs with sync",
        ),
        (not (o.checkpoint and o.resume), "checkpoint", "evaluates and --resume trains: give one"),
        (
            not o.checkpoint or o.eval_episodes,
            "eval_episodes",
            "must be at least 1 with --checkpoint",
        ),
        (
            not (begins and goes_on),
            "init_from",
            "begins a run: no --resume, no --checkpoint",
        ),
        (not o.freeze_encoder or begins or goes_on, "freeze_encoder", "needs --init-from"),
        (
            not o.freeze_encoder or o.encoder != "none",
            "freeze_encoder",
            "needs an encoder: --encoder none has no image",
        ),
        (o.reset == "nothing" or begins, "reset", "needs --init-from"),
    ]
    check_rules(options, rules)


def choose_device(options):
    """The torch device that the options name. Raises UserError if this machine does not have it."""
    name = options.device
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        one = torch.ones(1, device=name)
        one.item()  # raises for a device without memory
        device = one.device  # with its number
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        refuse(options, "device", f"cannot be used ({reason}): try --device cpu")
    if options.bf16 and device.type != "cuda":
        raise UserError(f"--bf16 needs a CUDA device, this run uses {device}: leave it out")
    return device


def parse_options(argv, kind=Options):
    """Options from the command line; with --resume or --checkpoint, those of that run where none is
    given here. Raises UserError."""
    names = {field.name for field in fields(kind)}
    words = [word for argument in argv for word in argument.split("=", 1)]
    for word in words:
        name = word.removeprefix("--").removeprefix("no-").replace("_", "-")
        if word.startswith("--") and name in MOVED and name.replace("-", "_") not in names:
            raise UserError(f"{word} is no option any more: {MOVED[name]}")
    places = ("--checkpoint", "--resume")
    given = {name: value for name, value in zip(words, words[1:]) if name in places}
    if not given:
        return tyro.cli(kind, args=argv)
    path = given.get("--checkpoint") or Path(given["--resume"]) / "checkpoint.pt"
    saved = load_checkpoint(path)["options"]
    own = "device resume checkpoint trace init_from reset".split()
    saved = {name: saved[name] for name in saved if name in names and name not in own}
    before = []  # as if they stood before what is given here
    for name, value in saved.items():
        option = name.replace("_", "-")
        if isinstance(value, bool):
            before.append(f"--{option}" if value else f"--no-{option}")
        elif isinstance(value, (tuple, list)):
            before += [f"--{option}", *map(str, value)]
        else:
            before.append(f"--{option}={value}")
    options = tyro.cli(kind, args=[*before, *argv])
    doors = [options.env_id, *options.wrappers, options.policy]
    print(f"{path} names code that is imported: {', '.join(doors)}")
    for name, value in saved.items():
        if getattr(options, name) != value:
            option = name.replace("_", "-")
            print(f"--{option}: {getattr(options, name)} (the checkpoint has {value})")
    return options


def failure_text(error):
    """What to say of an error that ends a run. Raises it if it is none that can be expected, so
    that its traceback is seen."""
    if isinstance(error, (EnvironmentFailure, FloatingPointError, OSError)):
        return str(error)
    text = str(error) or "out of memory"
    signs = "out of memory", "can't allocate memory"  # of a GPU; of the CPU
    known = isinstance(error, RuntimeError) and any(sign in text for sign in signs)
    if not known and not isinstance(error, MemoryError):
        raise error
    advice = "give more --num-minibatches, or less of --num-envs, --num-steps and sizes"
    return f"{text.splitlines()[0]}: {advice}"


def main(argv=None, kind=Options, train=train):
    """Command line. Exit status 0: done, 1: failed while running, 2: refused, 130 or 143: stopped
    by a signal."""
    program = Path(sys.modules[kind.__module__].__file__).name
    try:
        options = parse_options(sys.argv[1:] if argv is None else argv, kind)
        # with its number, for simulators too
        options = replace(options, device=str(choose_device(options)))
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
    except (Interrupted, KeyboardInterrupt) as error:  # in training; outside of it
        return 128 + (error.args or SIGNALS)[0]
    except (EnvironmentFailure, FloatingPointError, OSError, MemoryError, RuntimeError) as error:
        print(f"{program}: {failure_text(error)}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    from ver_ppo import (
        main,  # as a module: other processes and files know its classes by it
    )

    sys.exit(main())
