"""VER: train a recurrent policy with Variable Experience Rollout and PPO (Wijmans et al. 2022).

Simulators are slow and uneven, and a trainer that steps N of them in lock-step always waits for the
slowest. VER does not wait: the environments that have answered form the next inference batch. A
rollout ends when S = T x N steps are complete (--num-steps times --num-envs), no matter how many
each environment contributed. Some environments are then still computing a step, which goes into the
next rollout. So at most one step of each environment in a rollout was chosen by an older policy.
(Some --extensions allow more.) The uneven experience is cut into mini-batches of equal size for a
recurrent network, and steps from fast environments are down-weighted.

    python ver_ppo.py --env-id pointnav            trains, shows its progress, evaluates
    python ver_ppo.py --help                       explains every option
    torchrun --nproc-per-node 8 ver_multigpu.py    the same on eight GPUs: it imports this file

The processes and what passes between them (section 2.1, figure 2 of the paper):

      environment worker 0 ... W-1                     main process: collects and learns in turn
    +-----------------------------+                  +-------------------------------------------+
    | read the action in the row  | <== row numbers  | act: choose actions, write them into rows |
    | step that environment       |                  |                                           |
    | write the answer to the row | row numbers ==>  | await_answers: which rows have answers?   |
    +-----------------------------+                  | complete_steps: move them to the rollout  |
              ^ |                                    |   ... until S steps are complete, then    |
      actions | | answers                            | add_advantages, mini-batches, PPO         |
              | v                                    +-------------------------------------------+
    [ EnvIO, shared memory: ] -- observation ---> [ pending, a row    ] --+
    [ a row per environment ] <-- action -------- [ per environment   ]   +--> [ rollout: S steps ]
               |                                                          |
               +-- reward, whether the episode ended ---------------------+

Only row indices travel through pipes: one pipe to each worker, and one pipe back that all workers
share. Actions, observations and rewards stay in shared memory.

A *step* begins when inference chooses an action and sends it. From then on it is *in flight*, in
its environment's row of `pending`, until the main process takes the environment's answer: reward,
whether the episode ended, next observation. That completes the step, which moves to the next free
row of the rollout. Then the environment usually gets its next action at once. But if this rollout
wants no more of its steps, it gets none, and is *idle* until the next rollout. The *version* of a
policy is the number of updates before it. A *segment* is everything that one environment gave to a
rollout, in time order. A segment is cut where an episode begins, and the parts are *sequences*.

The last letters of a name are the dimensions: action_BA is B x A, log_prob_B has B numbers. If
there are more dimensions, only the first ones are named: state_B is B x rows x H. The main letters
are N environments, S steps of a rollout, Q sequences, M steps of a mini-batch and B any batch
(env_B: the indices of B environments). The others are H hidden units, L layers, F features (with
or without those of the previous action), C channels, and A dimensions of an action.

Errors: UserError means something that the user can fix. EnvironmentFailure means that an
environment raised, hung or died. BadAnswer is a kind of EnvironmentFailure: an environment returned
something that is not allowed, such as NaN.

The file down to "End of the lesson" is VER: options, the training loop, and its parts in the order
in which a step needs them. Each section after that adds something that a real run needs, can be
read alone, and begins with a list of the functions that the lesson calls. Simulators, other
networks, and other ways to collect are loaded by name, from notebooks/ or from files of your own.

Papers: VER; DD-PPO (Wijmans et al. 2020); Sample Factory (Petrenko et al. 2020); The 37
implementation details of PPO (Huang et al. 2022); Time limits in RL (Pardo et al. 2018);
Implementation matters in deep RL (Engstrom et al. 2020).
"""

import ast
import contextlib
import ctypes
import fcntl
import functools
import importlib
import inspect
import itertools
import json
import math
import multiprocessing.forkserver
import os
import re
import select
import shutil
import signal
import sys
import threading
import time
import traceback
from array import array
from collections import deque
from dataclasses import asdict, dataclass, fields, replace
from io import BytesIO
from pathlib import Path
from typing import Literal

# must be set before torch is imported; `LearnerThreads` (under Speed) says why
os.environ.setdefault("GOMP_SPINCOUNT", "1000")

import gymnasium as gym
import numpy as np
import torch
import torch.multiprocessing as mp
import tyro
from torch import nn
from torch.distributions import Categorical, Independent, Normal
from torch.nn.utils.rnn import (
    PackedSequence,
    pack_padded_sequence,
    pack_sequence,
    pad_packed_sequence,
)
from tqdm import tqdm

# ---------------------------------------------------------------------------------------- Options


@dataclass(frozen=True)
class Options:
    """Train a recurrent policy with Variable Experience Rollout (VER) and PPO."""

    # `pointnav` (the built-in navigation task), `habitat` (the simulator), or any Gymnasium id:
    # `CartPole-v1`, `package.module:Id-v0`
    env_id: str = "pointnav"
    total_timesteps: int = 2_000_000  # environment steps to train for
    seed: int = 1  # random seed of the network, action sampling, shuffling and the environments

    num_envs: int = 32  # N, environments that run in parallel
    num_steps: int = 128  # T: a rollout is T x N steps, T from each environment on average
    # processes that share the environments; 0: all are in the main process (for debuggers, and for
    # exact repetition); auto: as many as keep the CPU cores busy, judged by timing some steps, and
    # 0 if a step is cheaper than a message to another process
    num_workers: int | Literal["auto"] = "auto"
    # which steps make a rollout. ver: whichever come first; nover: T of each environment (VER
    # without variable rollouts); sync: T of each, in lock-step (DD-PPO)
    sampler: Literal["ver", "nover", "sync"] = "ver"

    hidden_size: int = 128  # H, width of the LSTM and the encoders
    lstm_layers: int = 1  # 0: a feed-forward layer in place of the LSTM

    learning_rate: float = 2e-3  # at the start; decays to 0 along a cosine
    gamma: float = 0.99  # discount factor
    gae_lambda: float = 0.95  # lambda of generalized advantage estimation
    num_minibatches: int = 8  # mini-batches per epoch, equally large
    update_epochs: int = 2  # passes over each rollout
    clip_coef: float = 0.2  # PPO's clipping range of the probability ratio
    # bring each rollout's advantages to mean 0 and deviation 1; otherwise, divide them by the
    # running root mean square of the returns
    norm_adv: bool = True
    ent_coef: float = 5e-3  # entropy coefficient; its first value if --target-entropy is set
    vf_coef: float = 0.5  # weight of the value loss
    max_grad_norm: float = 0.5  # gradients are scaled down to this norm

    # --------------------------------------------------------------------- beyond the lesson
    env_kwargs: tuple[str, ...] = ()  # KEY=VALUE ...: the environment's own keyword arguments
    # wrappers around each environment, the innermost first: "MODULE:NAME(KEY=VALUE, ...)" ..., or
    # action_delay (actions come a step late), latency(mean_ms=20) (steps sleep),
    # resize(height=84, width=84) (smaller images), hide(indices=(1,3)) (sets these entries to 0)
    wrappers: tuple[str, ...] = ()
    # another network: "MODULE:CLASS(KEY=VALUE, ...)", or resnet18, resnet50 (of the papers),
    # controller(file=...) (a planner that steers a trained agent)
    policy: str = "ver_ppo:Policy"
    # subclasses of `Run` that change the training, each on top of the one before:
    # "MODULE:CLASS(KEY=VALUE, ...)" ..., or overlap (collects while it learns), async (environments
    # never stop), keep (keeps all checkpoints), transfer(file=...) (starts from another run's
    # weights), trace(file=...) (writes a timeline)
    extensions: tuple[str, ...] = ()

    device: str = "auto"  # `cpu`, `cuda`, `cuda:1`, ...; auto: CUDA where there is a GPU
    # CPU threads while learning; auto: one per core, at most 4, but only one thread if other
    # programs use the cores
    learner_threads: int | Literal["auto"] = "auto"
    # learn the entropy coefficient so that the entropy stays above this (the VER paper uses 0 for
    # continuous actions)
    target_entropy: float | None = None

    eval_episodes: int = 200  # episodes of the evaluation (0: none)
    greedy: bool = False  # evaluate with the most probable action instead of a sampled one
    checkpoint: str | None = None  # run folder or checkpoint file to evaluate, instead of training

    runs_dir: str = "runs"  # where run folders are made
    exp_name: str = "ver"  # in the folder's name: {runs-dir}/{env-id}__{exp-name}__{seed}__{time}
    checkpoint_interval: int = 200_000  # steps between checkpoints (the last is always written)
    # continue the run in this folder. Its saved options are used, except those that you give on the
    # command line. If it has no checkpoint yet, give --env-id, too: then a new run begins in it
    resume: str | None = None
    env_timeout: float = 300.0  # seconds a step may take; then its worker is restarted
    max_worker_restarts: int = 10  # training stops after more restarts than this within an hour
    debug: bool = False  # check every invariant of every rollout

    def __post_init__(self):
        check_options(self)

    @property
    def rollout_steps(self):
        """S, steps of one rollout."""
        return self.num_steps * self.num_envs

    @property
    def quota(self):
        """The most steps that one environment may give to a rollout."""
        return self.rollout_steps if self.sampler == "ver" else self.num_steps


# ------------------------------------------------------------------------------------------ Train


def train(run):
    """Collect a rollout, compute its advantages, update the policy; repeat to --total-timesteps.

    The only training loop there is. `run` has the policy, its optimizer and the counters, see `Run`
    at the end of the lesson. `source` is the generator `rollouts_in_turn`.
    """
    with run.training() as source:  # saves at the end, also after a signal or an error
        while run.step < run.options.total_timesteps:
            rollout = run.next_rollout(source)  # Collector.collect
            with run.learning() as logs:
                to_learn = run.advantages(rollout)  # add_advantages; returns the same rollout
                logs.update(run.update(to_learn))  # ppo_update
            run.log(rollout, logs)  # also counts run.step and run.version
    run.evaluate()


# ----------------------------------------------------------------------------------------- Policy

ACTION_FEATURES = 32  # size of the previous action's embedding
ENT_COEF_RANGE = 1e-4, 1.0  # of a learned entropy coefficient (VER table A1)


def orthogonal(layer, gain=math.sqrt(2)):
    """Orthogonal weights and zero biases, as is usual for PPO (Huang et al. 2022, detail 2)."""
    nn.init.orthogonal_(layer.weight, gain)
    nn.init.zeros_(layer.bias)
    return layer


class LSTM(nn.LSTM):
    """The core of a policy: the part that remembers. Every core has the members `state_rows`,
    `step` and `sequences`.

    The recurrent state of an environment is a tensor of `state_rows` x H numbers, all zero at an
    episode's start. For an LSTM of L layers, the first L rows are the hidden states, and the next L
    rows are the cell states. `lstm_step` and `lstm_sequences`, in the section Speed after the
    lesson, compute the same as `nn.LSTM`, faster on a CPU.
    """

    @property
    def state_rows(self):
        """Rows of the recurrent state."""
        return 2 * self.num_layers

    def step(self, x_BF, state_B):
        """One step of B environments: output B x H and the state after it."""
        return lstm_step(self, x_BF, state_B)

    def sequences(self, x_MF, state_Q, batch_sizes):
        """All M steps of Q sequences, arranged as a PackedSequence: output M x H.

        `state_Q` is the state before each sequence's first step, longest sequence first.
        """
        hidden, cell = state_Q.transpose(0, 1).contiguous().split(self.num_layers)
        return lstm_sequences(self, PackedSequence(x_MF, batch_sizes), (hidden, cell))


class FeedForward(nn.Linear):
    """A layer without memory, in place of the LSTM. Its state is empty, so no other code needs to
    know the difference."""

    state_rows = 0

    def step(self, x_BF, state_B):
        """As LSTM.step."""
        return torch.tanh(self(x_BF)), state_B

    def sequences(self, x_MF, state_Q, batch_sizes):
        """As LSTM.sequences."""
        return torch.tanh(self(x_MF))


class Critic(nn.Linear):
    """The value head: B x H -> B values.

    Its linear layer predicts values in units of `scale`, the typical size of returns. At first the
    scale is 0, and so is every value. Every update begins with a new scale (`update_value_scale`),
    so the scale is above 0 from the first reward on.
    """

    def __init__(self, hidden_size):
        super().__init__(hidden_size, 1)
        orthogonal(self, 1.0)
        self.register_buffer("scale", torch.zeros(()))

    def forward(self, core_BH):
        return self.scale * super().forward(core_BH).squeeze(-1)


class Policy(nn.Module):
    """Encoders, embedding of the previous action, core, action head and value head (VER section 4).

    `spec` (`EnvSpec`, after the lesson) describes the environment. `spec.observations` holds the
    space of each part of an observation, and `spec.obs_fields` the name, type and shape of each
    part. An action consists of A = `spec.action_dims` numbers of type `spec.action_dtype`. If it is
    discrete, `spec.choices` says how many choices each dimension has. `spec.episode_columns` names
    the numbers that are recorded for each episode: return, length, metrics.

    The trainer uses these members: `step`, `sequences`, `auxiliary_loss`, `keep_bounds`,
    `state_shape`, `log_ent_coef`, and `critic`, a `Critic`, which computes all values. To change
    one part of the policy, override `make_encoders`, `make_core`, `heads` or `auxiliary_loss`.
    """

    log_std_range = -5.0, 2.0  # of a continuous action, as in habitat-baselines

    def __init__(self, spec, options):
        super().__init__()
        # how many choices each dimension of the action has; empty if the action is continuous
        self.choices = spec.choices
        self.encoders = self.make_encoders(spec, options)
        self.features = sum(encoder.out_features for encoder in self.encoders)
        if self.choices:
            tables = [nn.Embedding(1 + n, ACTION_FEATURES) for n in self.choices]  # 0: no action
            self.action_embedding = nn.ModuleList(tables)
            # each of the A dimensions has a row of logits. All rows have the same length, the
            # largest number of choices. The mask hides the logits that a dimension does not use
            most = max(self.choices)
            used = torch.arange(most) < torch.tensor(self.choices)[:, None]
            # with -inf, the gradient of the entropy would be NaN
            mask = torch.full(used.shape, -1e8).masked_fill(used, 0.0)
            self.register_buffer("mask", mask, persistent=False)
            outputs = mask.numel()
        else:
            outputs = spec.action_dims
            self.action_embedding = nn.Linear(spec.action_dims, ACTION_FEATURES)
            self.log_std_A = nn.Parameter(torch.full((spec.action_dims,), -0.5))
        self.core = self.make_core(self.features + ACTION_FEATURES, options)
        self.state_shape = (self.core.state_rows, options.hidden_size)
        self.actor = orthogonal(nn.Linear(options.hidden_size, outputs), 0.01)
        self.critic = Critic(options.hidden_size)
        # the entropy coefficient of `ppo_loss`: it is learned if there is a --target-entropy
        learned = options.target_entropy is not None
        log_ent_coef = torch.tensor(math.log(max(options.ent_coef, 1e-30)))  # math.log(0) raises
        self.log_ent_coef = nn.Parameter(log_ent_coef, requires_grad=learned)

    def make_encoders(self, spec, options):
        """The modules that turn observations into features (an nn.ModuleList): each takes all
        observations, reads some of them, and has `out_features`. Raises UserError."""
        return build_encoders(spec, options.hidden_size)

    def make_core(self, in_features, options):
        """The memory: a module with the three members of `LSTM`."""
        if options.lstm_layers:
            return LSTM(in_features, options.hidden_size, options.lstm_layers)
        return FeedForward(in_features, options.hidden_size)

    def embed(self, action_BA, unknown_B):
        """Previous actions -> B x ACTION_FEATURES. At an episode's first step (`unknown_B` is true)
        there is no previous action. If actions are discrete, row 0 of the table is used. Otherwise
        zeros take the place of the action."""
        if self.choices:
            token_BA = torch.where(unknown_B[:, None], 0, action_BA + 1)
            columns = zip(self.action_embedding, token_BA.unbind(1))
            return sum(table(token_B) for table, token_B in columns)
        return self.action_embedding(action_BA * ~unknown_B[:, None])

    def encode(self, obs, prev_action_BA, first_B):
        """The input of the core, B x in_features: all features that need no memory. Where `first_B`
        is true, there is no previous action."""
        features = [encoder(obs) for encoder in self.encoders]
        return torch.cat([*features, self.embed(prev_action_BA, first_B)], dim=1)

    def heads(self, core_BH):
        """Action distribution and value_B from the core's output."""
        out = self.actor(core_BH)
        if self.choices:  # one categorical for each action dimension
            logits = out.view(-1, *self.mask.shape) + self.mask
            each = Categorical(logits=logits, validate_args=False)
        else:
            each = Normal(out, self.log_std_A.expand_as(out).exp(), validate_args=False)
        return Independent(each, 1, validate_args=False), self.critic(core_BH)

    def step(self, obs, prev_action_BA, first_B, state_B):
        """One step of each of B environments: distribution, value_B and the state after the step.

        `state_B` must be zero where `first_B` is true. `Collector.observe` sees to that, so that
        the rollout stores exactly the state that was used.
        """
        x_BF = self.encode(obs, prev_action_BA, first_B)
        core_BH, after_B = self.core.step(x_BF, state_B)
        return *self.heads(core_BH), after_B

    def sequences(self, obs, prev_action_MA, first_M, state_Q, batch_sizes):
        """All M steps of Q sequences, arranged as a PackedSequence. Returns distribution, value_M,
        and the pair (features_MF, core_MH), for auxiliary losses (VER section 2.2, figure 3C).

        The encoders run once over all steps; the core runs over time with batches that shrink as
        sequences end. `state_Q` is the stored state before each sequence's first step.
        """
        x_MF = self.encode(obs, prev_action_MA, first_M)
        core_MH = self.core.sequences(x_MF, state_Q, batch_sizes)
        features_MF = x_MF[:, : self.features]  # all but the previous action
        return *self.heads(core_MH), (features_MF, core_MH)

    def auxiliary_loss(self, features_MF, core_MH, batch):
        """An additional loss on a mini-batch (`make_batch`), added to PPO's: here none."""
        return core_MH.new_zeros(())

    @torch.no_grad()
    def keep_bounds(self):
        """After every step of the optimizer: bring parameters back into their bounds. The standard
        deviation of actions needs an upper bound: if the environment clips actions, a wider
        distribution costs nothing, and an entropy bonus would widen it forever."""
        if self.log_ent_coef.requires_grad:
            self.log_ent_coef.clamp_(*map(math.log, ENT_COEF_RANGE))
        if not self.choices:
            self.log_std_A.clamp_(*self.log_std_range)


# ----------------------------------------------------------------------------------------- Tables


class Table:
    """Named columns of numbers: `table["reward"]` is a column, a numpy array of all rows.

    All columns lie in one block of memory, which processes can share. Call `share` before you send
    the table to another process.
    """

    def __init__(self, num_rows, columns):
        self.dtype = np.dtype(columns, align=True)
        self.memory = torch.zeros(num_rows * self.dtype.itemsize, dtype=torch.uint8)
        self.make_view()

    def make_view(self):
        """Make `records`, the memory as a numpy array with one record for each row."""
        self.records = self.memory.numpy().view(self.dtype)

    def share(self):
        """Move the memory to where other processes can see it, before they get the table. Raises
        UserError if there is not enough."""
        share_memory([self.memory])
        self.make_view()

    def __getitem__(self, column):
        return self.records[column]

    def __getstate__(self):  # without `records`: in a pickle, its numbers would be copied
        return {name: value for name, value in vars(self).items() if name != "records"}

    def __setstate__(self, state):
        vars(self).update(state)
        self.make_view()


class EnvIO(Table):
    """One row for each environment, in shared memory: the action sent last, and the last answer.

    A row belongs to the worker from the moment its number is sent down the worker's pipe until the
    worker sends the number back. Otherwise it belongs to the process that collects. So no lock is
    needed: nobody reads a row while it is being written.

    `unfinished` is set when an action is sent, and cleared once the outcome of the step is in the
    row, before the reset. If a new worker finds it set, the old worker died before it had finished
    that step.
    """

    def __init__(self, spec, num_envs, first_episode=0):
        obs = np.dtype(spec.obs_fields, align=True)
        columns = [
            ("obs", obs),  # the current observation: a record with a field for each part
            ("final_obs", obs),  # the last one of an episode, since the reset overwrites `obs`
            ("action", spec.action_dtype, (spec.action_dims,)),  # sent last
            ("first", bool),  # `obs` begins an episode
            ("reward", np.float32),
            ("terminated", bool),
            ("truncated", bool),
            ("unfinished", bool),  # the environment has not taken the step yet, or crashed in it
            ("lost", bool),  # this answer was made up after a crash (`lose_step`)
            ("episode", int),  # number of the episode that `obs` belongs to
            ("episode_stats", float, (len(spec.episode_columns),)),  # of the last whole episode
            ("began_at", float),  # when the simulator started on its last step (perf_counter) ...
            ("step_sec", float),  # ... and how long it took, a reset included
        ]
        super().__init__(num_envs, columns)
        self.share()
        self["episode"][:] = first_episode


class Steps(Table):
    """A table of steps. Observations and recurrent states are tensors on `device`; all else is in
    columns."""

    def __init__(self, spec, num_rows, state_shape, device):
        self.device = device
        self.obs = {}
        for key, kind, shape in spec.obs_fields:
            self.obs[key] = torch.from_numpy(np.zeros((num_rows, *shape), kind)).to(device)
        self.state = torch.zeros(num_rows, *state_shape, device=device)  # before the step
        action = spec.action_dtype, (spec.action_dims,)
        columns = [
            # from inference
            ("env", int),
            ("version", int),  # of the policy that chose the action
            ("first", bool),  # first step of an episode: it began with a recurrent state of zeros
            ("prev_action", *action),
            ("action", *action),
            ("log_prob", np.float32),
            ("value", np.float32),
            ("inference_at", float),  # when its inference began (time.perf_counter) ...
            ("sent_at", float),  # ... and its action was sent
            # from the environment's answer, when the step moves to a rollout; unused in `pending`
            ("reward", np.float32),  # plus gamma * V(final observation), if truncated here
            ("done", bool),  # last step of an episode
            ("lost", bool),  # the environment crashed: this step was made up
            # of the whole episode; valid only at its last step (`done`)
            ("episode_stats", float, (len(spec.episode_columns),)),
            ("began_at", float),  # when the simulator started on the step ...
            ("step_sec", float),  # ... and how long it took
            # for learning
            # the number of the step's segment: in this file, the environment's number. In
            # ver_multigpu.py, once all advantages are computed, `fill_up` adds older steps. They
            # get other numbers, so that they are not joined to the new steps
            ("segment", int),
            ("advantage", np.float32),
            ("norm_advantage", np.float32),  # the same, normalized
            ("returns", np.float32),  # targets of the value
            ("weight", np.float32),  # in the loss
        ]
        super().__init__(num_rows, columns)

    def copy(self, row_B, other, other_B):
        """Copy the rows `other_B` of another table of steps into the rows `row_B`."""
        self.records[row_B] = other.records[other_B]
        to_B = to_device(row_B, self.device)
        from_B = to_device(other_B, other.device)
        mine = [*self.obs.values(), self.state]
        others = [*other.obs.values(), other.state]
        for target, source in zip(mine, others):
            target.index_copy_(0, to_B, source.index_select(0, from_B).to(self.device))


class Rollout(Steps):
    """Room for S steps, `capacity`. The first `rows` of them are complete, in time order (VER
    section 2.2)."""

    def __init__(self, spec, capacity, num_envs, state_shape, device):
        super().__init__(spec, capacity, state_shape, device)
        self.capacity = capacity
        self.num_envs = num_envs
        self.rows = 0
        # V(observation after the environment's last step in this rollout), for each environment
        self.bootstrap = np.zeros(num_envs, np.float32)
        self.started_at = 0.0  # when collecting started (time.perf_counter) ...
        self.ended_at = 0.0  # ... and ended,
        self.waited_sec = 0.0  # and how long it waited for answers

    @property
    def complete(self):
        """The records of the complete steps: a view, so writing to it fills the rollout."""
        return self.records[: self.rows]


def to_device(array, device):
    """A numpy array as a tensor on this device. On a CPU it shares the array's memory."""
    return torch.from_numpy(array).to(device)


# ---------------------------------------------------------------------------- Environment workers


def send_numbers(pipe, numbers):
    """Write several numbers at once. The operating system writes up to PIPE_BUF bytes in one piece,
    so numbers of different processes do not mix. `check_options` limits the number of environments
    accordingly."""
    os.write(pipe.fileno(), array("i", numbers))


def read_numbers(pipe):
    """Block for at least one number; return all numbers in the pipe, or [] at end of file."""
    return array("i", os.read(pipe.fileno(), 1 << 16)).tolist()


class Environment:
    """One environment and its row of EnvIO. Lives in a worker process; with --num-workers 0, in the
    process that collects. `split`, train or val, chooses its seeds."""

    def __init__(self, number, options, split, spec, io):
        self.number = number
        self.options = options
        self.split = split
        self.spec = spec
        self.io = io
        self.env = None
        self.length = 0

    def answer(self):
        """The first call starts the environment; every later call makes a step. Raises
        EnvironmentFailure, which says where the environment raised, or gave something that is not
        allowed."""
        try:
            if self.env is None:
                self.start()
            else:
                self.step()
        except (Exception, SystemExit) as error:
            raise failure_of(self, error) from None

    def start(self):
        """Make the environment, and answer with its first observation.

        A worker that dies takes all its environments with it. Some of them may have finished their
        step, but the worker had not sent their numbers yet. If an environment still owes an answer,
        a new worker makes it again. The answer, with the first observation of a new episode, also
        completes the step in flight. What happens to that step depends on how far the old
        environment had got:

            it did not finish the step                   the step is lost
            it did, and the episode had not ended        lost, since the episode cannot continue
            it did, and the step ended the episode       kept (the reset crashed, for example)

        *Lost* means that a made-up answer takes the place of the true one: reward 0, and the
        episode is truncated at the observation seen last. The step stays in the rollout.

        Two special cases. At the very first start there is no step, and nobody reads what
        `lose_step` writes. If the environment owed no answer when its worker died, it starts only
        when its next action arrives. That action was chosen for the old episode, which is gone, so
        this new step is lost.
        """
        io = self.io
        e = self.number
        ended = io["terminated"][e] or io["truncated"][e]  # says nothing if the step is unfinished
        if io["unfinished"][e] or not ended:
            lose_step(io, e)
        self.env = make_env(self.options, self.split, self.number)
        self.reset()

    def reset(self):
        """Begin the next episode, from a seed of its own."""
        io = self.io
        e = self.number
        io["episode"][e] += 1
        # the first number is 0 in training and 1 in validation, so that they never share a seed
        numbers = int(self.split == "val"), self.options.seed, e, io["episode"][e]
        observation, _ = self.env.reset(seed=derive_seed(*numbers))
        self.length = 0
        self.total_reward = 0.0
        self.write(io["obs"], observation)
        io["first"][e] = True

    def step(self):
        """Take the action that the row holds, write the answer there, reset if the episode ended.

        The final observation of an episode is written to `final_obs`, because the reset overwrites
        `obs`, and because the value of a truncated episode's end is computed from it. The reset
        comes at once, so an autoreset wrapper finds nothing to do.
        """
        io = self.io
        e = self.number
        began_at = time.perf_counter()
        action = to_env_action(self.spec.action, io["action"][e])
        self.length += 1  # before the step: if that raises, the error names the right step
        observation, reward, terminated, truncated, info = self.env.step(action)
        self.total_reward += float(reward)
        io["reward"][e] = reward
        check_reward(io["reward"][e])
        io["terminated"][e] = terminated
        io["truncated"][e] = truncated and not terminated
        io["first"][e] = False
        ended = terminated or truncated
        if ended:
            metrics = read_metrics(info, self.spec)
            io["episode_stats"][e] = [self.total_reward, self.length, *metrics]
        self.write(io["final_obs" if ended else "obs"], observation)
        io["began_at"][e] = began_at
        io["step_sec"][e] = time.perf_counter() - began_at  # without the reset, which may crash
        io["lost"][e] = False
        io["unfinished"][e] = False  # from here on, a crash in the reset does not lose the step
        if ended:
            self.reset()
            io["step_sec"][e] = time.perf_counter() - began_at  # with the reset

    def write(self, column, observation):
        """Copy an observation into this environment's row of `obs` or `final_obs`. Raises BadAnswer
        if it is not in the observation space."""
        leaves = self.spec.leaves(observation)
        check_shapes(leaves, self.spec)
        for key, leaf in leaves.items():
            column[key][self.number] = leaf
            check_numbers(column[key][self.number], leaf, key, self.spec)

    def close(self):
        """Close the environment, if there is one. An error is printed, and changes nothing."""
        try:
            if self.env is not None:
                self.env.close()
        except (Exception, SystemExit) as error:
            tell(f"environment {self.number}: close() raised {error!r}")
        self.env = None


def env_worker(inbox, outbox, environments):
    """Body of a worker process: step the environments whose numbers arrive in the inbox, and send
    the numbers of those that have answered to the outbox.

    `environments` maps numbers to Environments. Ends at the end of the inbox, when the process that
    collects closes it or dies.
    """
    torch.set_num_threads(1)
    while asked := read_numbers(inbox):
        answered = []
        since = time.perf_counter()
        try:
            for e in asked:
                environments[e].answer()
                answered.append(e)
                if is_due(len(answered), len(environments), time.perf_counter() - since):
                    send_numbers(outbox, answered)
                    answered = []
                    since = time.perf_counter()
        finally:  # the rest; if an environment raises, those before it have answered
            if answered:
                send_numbers(outbox, answered)


def is_due(num_answered, num_environments, sec):
    """Whether a worker should send the answers that it has now, before it steps its other
    environments. Asked after every answer.

    The worker has `num_environments`, and `num_answered` answers that are not sent yet. `sec` is
    the time since it began, or since it last sent answers. Once 2 ms have passed, it sends as soon
    as half of its environments have answered. Inference then computes their next actions while
    the worker steps the other half: double-buffered sampling (Sample Factory, section 3.2). After a
    second it sends whatever it has; otherwise it would seem to hang.
    """
    return sec > 1.0 or (sec > 0.002 and 2 * num_answered >= num_environments)


class Workers:
    """The worker processes, seen from the process that collects.

    `send` tells environments to take the action in their row or, the first time, to start. Each of
    them then answers. `receive` returns the environments that have answered. Environment e belongs
    to worker e % W. A worker that dies or hangs is replaced (`Supervisor`).
    """

    def __init__(self, environments, num_workers):
        self.environments = environments
        self.num_workers = num_workers
        self.context = process_context()
        self.asked_N = np.zeros(len(environments), bool)  # environments that owe an answer
        # one pipe to each worker: this process writes commands, the worker reads its inbox
        pipes = [self.context.Pipe(duplex=False) for _ in range(num_workers)]
        self.inboxes, self.commands = zip(*pipes)
        # one pipe back: workers write to their common outbox, this process reads answers
        self.answers, self.outbox = self.context.Pipe(duplex=False)
        self.poll = select.poll()
        self.poll.register(self.answers, select.POLLIN)
        self.supervisor = Supervisor(environments[0].options, num_workers)
        self.processes = [self.start(worker) for worker in range(num_workers)]
        self.send(np.arange(len(environments)))

    def start(self, worker):
        """Start a worker's process, which has every W-th environment: `guarded_worker` runs
        `env_worker`, reports errors, and closes the environments.

        The worker gets copies of the Environments. The main process never makes a simulator: in its
        own Environments, `env` stays None. So a worker that replaces another one also gets copies
        without a simulator, and makes its own.
        """
        mine = {each.number: each for each in self.environments[worker :: self.num_workers]}
        arguments = self.inboxes[worker], self.outbox, mine
        process = self.context.Process(target=guarded_worker, args=arguments, daemon=True)
        process.start()
        return process

    def send(self, env_B):
        """Let these environments answer."""
        self.asked_N[env_B] = True
        worker_B = env_B % self.num_workers
        for worker in set(worker_B.tolist()):
            send_numbers(self.commands[worker], env_B[worker_B == worker].tolist())

    def receive(self, timeout_sec):
        """Numbers of the environments that have answered; [] if none does within this time."""
        answered = self.read(timeout_sec)
        for worker, reason in self.supervisor.find_failed(self):
            answered += self.replace(worker, reason)
        return answered

    def read(self, timeout_sec):
        """As `receive`, but no worker is replaced."""
        ready = self.poll.poll(1000 * timeout_sec)
        answered = read_numbers(self.answers) if ready else []
        self.asked_N[answered] = False
        self.supervisor.note_answers(answered)
        return answered

    def replace(self, worker, reason):
        """Start a new process for a worker. The environments that still owe an answer start again
        there. Returns the environments whose answers were in the common pipe."""
        end_process(self.processes[worker], 0)
        self.supervisor.note_restart(worker, reason)
        # read the pipe before `owed`: environments whose answers are in it must not start again
        answered = self.read(0)
        inbox = self.inboxes[worker]
        while inbox.poll():  # commands that the old process had not read yet
            read_numbers(inbox)
        self.processes[worker] = self.start(worker)
        self.send(self.owed(worker))
        return answered

    def owed(self, worker):
        """Numbers of this worker's environments that owe an answer."""
        env_B = np.flatnonzero(self.asked_N)
        return env_B[env_B % self.num_workers == worker]

    def close(self):
        """End the processes: they leave at the end of their pipe, or are killed after 5 s."""
        until = time.monotonic() + 5
        for command in self.commands:
            command.close()
        for process in self.processes:
            end_process(process, max(0.0, until - time.monotonic()))


# ------------------------------------------------------------------------------------- Collecting


class Collector:
    """Collects rollouts with a policy, and remembers what passes from one rollout to the next.

    `enough` is a function of the number of complete steps. It says whether a rollout ends early.
    There are two reasons: a signal came, or (only with many GPUs) the other processes should not
    wait any longer for this one. The second is preemption, in ver_multigpu.py.
    """

    def __init__(self, policy, workers, io, spec, options, enough=lambda rows: False):
        num_envs = options.num_envs
        self.policy = policy
        self.workers = workers
        self.io = io
        self.options = options
        self.enough = enough
        self.device = next(policy.parameters()).device
        # row e: the step of environment e, if it has one in flight
        self.pending = Steps(spec, num_envs, policy.state_shape, self.device)
        self.pending["env"][:] = range(num_envs)
        self.pending["segment"][:] = range(num_envs)
        self.in_flight_N = np.zeros(num_envs, bool)
        # environments that have answered, in order of arrival; until their answers are taken, their
        # steps are still in flight
        self.answered = []
        self.idle = np.zeros(0, int)  # environments whose answer was taken, without a new action
        # recurrent state after each environment's latest action, also while that step is in flight
        self.state_N = torch.zeros(num_envs, *policy.state_shape, device=self.device)
        self.given_N = np.zeros(num_envs, int)  # steps that each has given to this rollout
        self.version = 0
        self.greedy = False
        self.waited_sec = 0.0

    @torch.inference_mode()
    def collect(self, rollout):
        """Collect exactly S steps, from whichever environments deliver them (VER section 2.2).
        The rollout has fewer only if `enough` says so.

        Each pass: take the environments that have answered, complete their steps, choose and send
        their next actions. In two cases an environment gets no action, and becomes idle: the
        rollout became full in this pass, or with `nover` and `sync` the environment has given its T
        steps. The policy of the next rollout chooses its action. Steps in flight at the end stay
        pending.
        """
        rollout.started_at = time.perf_counter()
        rollout.rows = 0
        self.given_N[:] = 0
        self.waited_sec = 0.0
        self.act(self.idle)  # before the first rollout all are starting, and none is idle
        self.idle = np.zeros(0, int)
        full = self.is_full(rollout)
        while not full:
            env_B = self.await_answers(room=rollout.capacity - rollout.rows)
            stepped_B = env_B[self.in_flight_N[env_B]]  # the others have just started: no step yet
            row_B = rollout.rows + np.arange(len(stepped_B))
            self.complete_steps(rollout, stepped_B, row_B)
            rollout.rows += len(stepped_B)
            full = self.is_full(rollout)
            wanted_B = (self.given_N[env_B] < self.options.quota) & (not full)
            self.act(env_B[wanted_B])
            self.idle = np.append(self.idle, env_B[~wanted_B])
        rollout.bootstrap[:] = self.bootstrap_values()
        rollout.ended_at = time.perf_counter()
        rollout.waited_sec = self.waited_sec

    def is_full(self, rollout):
        """Whether the rollout ends here: it has S steps, or `enough` says so."""
        return rollout.rows == rollout.capacity or self.enough(rollout.rows)

    def await_answers(self, room):
        """Dynamic batching (VER section 2.1): take the environments that have answered, in order of
        arrival. Returns their numbers.

        At most `room` of them are taken; the steps of the others stay in flight. At least one
        answer is needed, and `sync` needs an answer from every environment. If there are too few,
        this function waits for more, at most 50 ms. If there are still too few, it takes none, and
        the caller can ask again.
        """
        needed = self.options.num_envs if self.options.sampler == "sync" else 1
        began_at = time.perf_counter()
        # always look for new answers, even if some of the last call are left over
        self.answered += self.workers.receive(0)
        if len(self.answered) < needed:
            self.answered += self.workers.receive(0.05)
        self.waited_sec += time.perf_counter() - began_at
        if len(self.answered) < needed:
            return np.zeros(0, int)
        env_B = np.array(self.answered[:room], int)
        self.answered = self.answered[room:]
        return env_B

    def observe(self, env_B, obs, first_B):
        """The arguments of `Policy.step` for these environments: observation, previous action,
        whether an episode begins, recurrent state.

        `obs` is the column of EnvIO from which the observations are taken.
        """
        shown = {key: to_device(obs[key][env_B], self.device) for key in obs.dtype.names}
        # `pending` holds each environment's latest action, which led to these observations
        prev_action_BA = to_device(self.pending["action"][env_B], self.device)
        first_B = to_device(first_B, self.device)
        state_B = self.state_N[to_device(env_B, self.device)]
        # no memory at an episode's start
        state_B = state_B.masked_fill(first_B[:, None, None], 0.0)
        return shown, prev_action_BA, first_B, state_B

    def act(self, env_B):
        """Choose the next actions of these environments, remember the steps as pending, and send
        the actions."""
        if not len(env_B):
            return
        io = self.io
        pending = self.pending
        pending["inference_at"][env_B] = time.perf_counter()
        inputs = self.observe(env_B, io["obs"], io["first"][env_B])
        distribution, value_B, after_B = self.policy.step(*inputs)
        action_BA = distribution.mode if self.greedy else distribution.sample()
        log_prob_B = distribution.log_prob(action_BA)
        # one copy from the device; float32 is exact for choices up to 2**24
        chosen = torch.column_stack([log_prob_B, value_B, action_BA.float()]).cpu().numpy()

        obs, _, _, state_B = inputs
        index_B = to_device(env_B, self.device)
        for key, part in obs.items():
            pending.obs[key][index_B] = part
        pending.state[index_B] = state_B
        pending["first"][env_B] = io["first"][env_B]
        pending["prev_action"][env_B] = pending["action"][env_B]
        pending["log_prob"][env_B] = chosen[:, 0]
        pending["value"][env_B] = chosen[:, 1]
        pending["action"][env_B] = chosen[:, 2:]
        pending["version"][env_B] = self.version
        self.state_N[index_B] = after_B
        self.in_flight_N[env_B] = True

        io["action"][env_B] = pending["action"][env_B]
        io["unfinished"][env_B] = True
        pending["sent_at"][env_B] = time.perf_counter()
        self.workers.send(env_B)

    def complete_steps(self, rollout, env_B, row_B):
        """The answers of these environments complete their pending steps, which move to the rows
        `row_B` of the rollout.

        This is all there is to in-flight carry-over (VER section 2.2): a pending step may have been
        sent in an earlier rollout, by an older policy. It keeps the action, log-probability, value
        and version that it was sent with (PPO divides by that old probability), and it counts for
        the rollout in which it is completed. So nothing that was simulated is lost.

        A truncated episode would have continued. Its last reward gets the discounted value of the
        final observation (Pardo et al. 2018), computed with the memory of that episode, which
        `state_N` still holds. So GAE can treat terminated and truncated episodes alike, and one
        column, `done`, is enough for both.
        """
        io = self.io
        rollout.copy(row_B, self.pending, env_B)
        for column in ("reward", "lost", "episode_stats", "began_at", "step_sec"):
            rollout[column][row_B] = io[column][env_B]
        rollout["done"][row_B] = io["terminated"][env_B] | io["truncated"][env_B]
        self.given_N[env_B] += 1
        self.in_flight_N[env_B] = False
        truncated_B = io["truncated"][env_B]
        if truncated_B.any():
            first_B = np.zeros(truncated_B.sum(), bool)  # `final_obs` continues its episode
            value_B = self.values(env_B[truncated_B], io["final_obs"], first_B)
            rollout["reward"][row_B[truncated_B]] += self.options.gamma * value_B

    def bootstrap_values(self):
        """The value of what follows each environment's last step, N numbers.

        If its next step is in flight, that value was computed when the action was sent. For idle
        environments it is computed now, in one batch; `state_N` stays as it is. (An environment
        that is still starting has given no step, and its value is not used.)
        """
        value_N = self.pending["value"].copy()
        if len(self.idle):
            first_B = self.io["first"][self.idle]
            value_N[self.idle] = self.values(self.idle, self.io["obs"], first_B)
        return value_N

    def values(self, env_B, obs, first_B):
        """The policy's value of each environment's observation. Takes the arguments of `observe`.
        """
        _, value_B, _ = self.policy.step(*self.observe(env_B, obs, first_B))
        return value_B.cpu().numpy()


def rollouts_in_turn(run):
    """Yield rollouts without end. This process alternates: it collects a rollout here, and then the
    code that asked for it learns from it (VER appendix A.1)."""
    policy = run.policy
    options = run.options
    device = next(policy.parameters()).device
    # The seed of an episode is made from its number. A resumed run must not repeat an episode, so
    # its episode numbers begin at run.step. That counts the steps of all environments together. One
    # environment has begun far fewer episodes, so no number is used twice
    io = EnvIO(run.spec, options.num_envs, first_episode=run.step)
    capacity = options.rollout_steps
    rollout = Rollout(run.spec, capacity, options.num_envs, policy.state_shape, device)
    # `make_workers` returns `Workers`, or `InlineWorkers` (no processes) if --num-workers is 0.
    # `auto` chooses 0 if a step takes less than 50 microseconds
    with contextlib.closing(make_workers(options, "train", run.spec, io)) as workers:
        collector = run.collector_class(policy, workers, io, run.spec, options, run.enough)
        while True:
            collector.version = run.version
            torch.set_num_threads(1)  # the workers want the cores now; `Run.learning` sets more
            collector.collect(rollout)
            yield rollout


# ---------------------------------------------------------------------------- Returns and weights


def compute_advantages(segment_S, reward_S, value_S, done_S, bootstrap, gamma, gae_lambda):
    """Generalized advantage estimation over steps in time order, for all segments at once (DD-PPO
    section 4). Returns advantages.

    Walks backwards, and keeps for each segment the value and the advantage of the step that
    follows. At first these are the segment's bootstrap value and 0. Where an episode is done, no
    step follows: 0 and 0.

    >>> segment, reward, value = np.array([0, 0, 1]), np.ones(3), np.zeros(3)
    >>> done, bootstrap = np.array([False, True, False]), np.array([9.0, 4.0])
    >>> compute_advantages(segment, reward, value, done, bootstrap, gamma=0.5, gae_lambda=1.0)
    array([1.5, 1. , 3. ], dtype=float32)
    """
    reward_S = reward_S.astype(float)
    value_S = value_S.astype(float)
    advantage_S = np.zeros(len(value_S))
    next_value = bootstrap.astype(float)
    next_advantage = np.zeros(len(bootstrap))
    for step in reversed(range(len(value_S))):
        segment = segment_S[step]
        if done_S[step]:
            next_value[segment] = 0.0
            next_advantage[segment] = 0.0
        delta = reward_S[step] + gamma * next_value[segment] - value_S[step]
        advantage_S[step] = delta + gamma * gae_lambda * next_advantage[segment]
        next_value[segment] = value_S[step]
        next_advantage[segment] = advantage_S[step]
    return advantage_S.astype(np.float32)


def importance_weights(env_S, num_envs):
    """Truncated importance weights for the biased sampling of environments. VER section 4 describes
    them without a formula. Their maximum is in table A1, as "Max VER IS" (importance sampling).

    An environment that gave K_e of the S steps was sampled K_e / S of the time instead of 1 / N.
    Therefore each of its steps has the weight min(1, (S / N) / K_e). Slow environments are not
    weighted up, so the mean weight is at most 1. S is here the number of steps that the rollout
    really has. With many GPUs, it may be below N. Then 1 takes the place of S / N, so that an
    environment with one step has weight 1.

    >>> importance_weights(np.array([0, 0, 0, 0, 1, 2]), num_envs=3)
    array([0.5, 0.5, 0.5, 0.5, 1. , 1. ], dtype=float32)
    """
    given_N = np.bincount(env_S, minlength=num_envs)
    fair = max(1.0, len(env_S) / num_envs)  # steps of each
    weight_N = np.minimum(1.0, fair / np.maximum(given_N, 1))
    return weight_N.astype(np.float32)[env_S]


def add_advantages(rollout, options):
    """Write advantage, return and weight of every complete step into the rollout: GAE, with the
    values that were stored when the policy acted."""
    steps = rollout.complete
    columns = [steps[name] for name in ("segment", "reward", "value", "done")]
    discounts = options.gamma, options.gae_lambda
    steps["advantage"] = compute_advantages(*columns, rollout.bootstrap, *discounts)
    steps["returns"] = steps["value"] + steps["advantage"]
    steps["weight"] = importance_weights(steps["env"], rollout.num_envs)


# -------------------------------------------------------------------------- Sequences and packing


def find_sequences(segment_S, first_S):
    """Cut every segment where an episode begins (VER section 2.2). Returns the steps of each
    sequence, in time order.

    >>> find_sequences(np.array([0, 1, 0, 1, 0]), np.array([False, True, True, False, False]))
    [array([0]), array([2, 4]), array([1, 3])]
    """
    order_S = np.argsort(segment_S, kind="stable")  # stable: keeps a segment's steps in order
    changes = np.diff(segment_S[order_S], prepend=-1) != 0  # -1: the first segment begins, too
    begins = np.flatnonzero(changes | first_S[order_S])  # positions in order_S; the first is 0
    return np.split(order_S, begins[1:])


def cut_minibatches(sequences, count):
    """Lay sequences end to end and cut them into `count` mini-batches of equal size, lists of
    sequences (VER section 2.2, figure 3B).

    A sequence split by a cut continues in the next mini-batch, as a sequence that starts from its
    stored state. If the steps do not divide evenly, some mini-batches are a step longer.

    >>> cut_minibatches([np.array([1, 3]), np.array([0, 2, 4, 5])], 2)
    [[array([1, 3]), array([0])], [array([2, 4, 5])]]
    """
    line = np.concatenate(sequences)
    ends = np.cumsum([len(sequence) for sequence in sequences])
    cuts = len(line) * np.arange(count + 1) // count
    minibatches = []
    for low, high in zip(cuts, cuts[1:]):
        inside = ends[(low < ends) & (ends < high)]  # where sequences end in this mini-batch
        minibatches.append(np.split(line[low:high], inside - low))
    return minibatches


def pack(sequences):
    """Arrange the steps of these sequences as a PackedSequence (VER section 2.2, figure 3C).

    Three sequences, longest first:

        a b c d
        e f
        g

    A PackedSequence reads them column by column: a e g | b f | c | d, batch sizes 3 2 1 1. Returns
    the steps in this order, and the batch sizes: how many sequences are still running at each time.

    >>> letters = np.array(list("abcdefg"))
    >>> step_M, batch_sizes = pack([np.array([4, 5]), np.array([0, 1, 2, 3]), np.array([6])])
    >>> " ".join(letters[step_M]), batch_sizes.tolist()
    ('a e g b f c d', [3, 2, 1, 1])
    """
    tensors = [torch.from_numpy(sequence) for sequence in sequences]
    packed = pack_sequence(tensors, enforce_sorted=False)  # it returns them sorted
    return packed.data, packed.batch_sizes


# -------------------------------------------------------------------------------------------- PPO
# `average(tensors)` averages tensors over all processes that learn together, in place. For a single
# process it does nothing.

NEWEST_SHARE = 0.05  # how much the newest rollout counts in the running mean square of returns


@torch.no_grad()
def update_value_scale(critic, rollout, average):
    """Move the critic's scale towards the size of this rollout's returns.

    The scale is the running root mean square of the returns. So rewards of any size are learned
    equally well, as if they were normalized (Engstrom et al. 2020). Stored values and returns stay
    in the environment's units, so they need no conversion when the scale changes. Learning
    divides by the scale: errors in the value loss always, and advantages only without --norm-adv.
    One outlier can at most double the scale. (The critic multiplies its output by the scale. So if
    the scale grows by 10 %, all values that the network computes grow by 10 %, too. The optimizer
    steps that follow bring them back.)
    """
    returns_S = rollout.complete["returns"].astype(float)
    newest = torch.tensor([(returns_S**2).mean()], dtype=torch.float64)
    average([newest])
    square = critic.scale.item() ** 2
    if square == 0:
        square = newest.item()
    else:
        square = min(square + NEWEST_SHARE * (newest.item() - square), 4 * square)
    if math.isfinite(square):
        critic.scale.fill_(math.sqrt(square))


def normalize_advantages(rollout, scale, options, average):
    """Write the advantages that PPO learns from.

    With --norm-adv, they have mean 0 and deviation 1 over the rollouts of all processes that learn
    together. Otherwise they are divided by the scale of values.
    """
    steps = rollout.complete
    advantage_S = steps["advantage"].astype(float)
    mean = 0.0
    deviation = scale
    if options.norm_adv:
        moments = torch.tensor([advantage_S.mean(), (advantage_S**2).mean()], dtype=torch.float64)
        average([moments])
        mean, square = moments.tolist()
        deviation = math.sqrt(max(1e-16, square - mean**2))
    steps["norm_advantage"] = (advantage_S - mean) / deviation


def ppo_loss(distribution, value_M, batch, log_ent_coef, options):
    """Clipped PPO objective, value loss (not clipped) and entropy term, every step weighted by
    `batch["weight"]`. Returns the loss and a dictionary of what to log.

    `batch` holds M old actions, log-probabilities, normalized advantages, returns and weights, and
    `scale`, the unit in which values are learned. Without --target-entropy, the entropy coefficient
    exp(log_ent_coef) is fixed. With it, the coefficient is learned under the constraint entropy >=
    target (VER section 4): it grows while the mean entropy (without the steps' weights) is below
    the target.
    """
    weight_M = batch["weight"]
    advantage_M = batch["norm_advantage"]
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
    """A mini-batch on the rollout's device: its packed steps, the state before each sequence, and
    `batch_sizes`. `row` holds each step's row of the rollout, for extensions."""
    row_M, batch_sizes = pack(sequences)
    names = "prev_action", "action", "first", "log_prob", "norm_advantage", "returns", "weight"
    batch = {name: to_device(rollout[name][row_M.numpy()], rollout.device) for name in names}
    index_M = row_M.to(rollout.device)
    batch["obs"] = {key: part.index_select(0, index_M) for key, part in rollout.obs.items()}
    # the first Q steps begin the Q sequences
    batch["state"] = rollout.state.index_select(0, index_M[: batch_sizes[0]])
    batch["batch_sizes"] = batch_sizes
    batch["row"] = row_M.numpy()
    return batch


def run_sequences(policy, batch):
    """`Policy.sequences` of a mini-batch."""
    inputs = batch["obs"], batch["prev_action"], batch["first"], batch["state"]
    return policy.sequences(*inputs, batch["batch_sizes"])


def minibatch_step(policy, optimizer, batch, options, average):
    """One optimizer step on one mini-batch; none if the gradient is not finite. Returns what to
    log."""
    distribution, value_M, (features_MF, core_MH) = run_sequences(policy, batch)
    loss, logs = ppo_loss(distribution, value_M, batch, policy.log_ent_coef, options)
    auxiliary_loss = policy.auxiliary_loss(features_MF, core_MH, batch)
    optimizer.zero_grad()
    (loss + auxiliary_loss).backward()
    learned = [weight for weight in policy.parameters() if weight.grad is not None]
    average([weight.grad for weight in learned])
    # the entropy coefficient is not a part of the network: its gradient does not count in the norm
    network = [weight for weight in learned if weight is not policy.log_ent_coef]
    norm = nn.utils.clip_grad_norm_(network, options.max_grad_norm)
    finite = torch.isfinite(norm)
    if finite:
        optimizer.step()
    policy.keep_bounds()
    logs["losses/auxiliary"] = auxiliary_loss.detach()
    logs["losses/grad_norm"] = norm
    logs["losses/skipped"] = (~finite).float()
    return logs


def ppo_update(policy, optimizer, rollout, options, average=lambda tensors: None):
    """Learn from a rollout in --update-epochs passes. Each pass shuffles the sequences, cuts them
    into --num-minibatches mini-batches, and makes an optimizer step on each. Returns the mean of
    each logged number (`mean_logs`, which raises FloatingPointError if no mini-batch has a finite
    gradient).
    """
    update_value_scale(policy.critic, rollout, average)
    # before the first reward, all returns and values are 0, and any unit will do
    scale = max(policy.critic.scale.item(), 1e-8)
    normalize_advantages(rollout, scale, options, average)
    steps = rollout.complete
    sequences = find_sequences(steps["segment"], steps["first"])
    logs = []
    for _ in range(options.update_epochs):
        shuffled = [sequences[q] for q in torch.randperm(len(sequences)).tolist()]
        for minibatch in cut_minibatches(shuffled, options.num_minibatches):
            batch = make_batch(rollout, minibatch)
            batch["scale"] = scale
            logs.append(minibatch_step(policy, optimizer, batch, options, average))
    return mean_logs(logs)


# -------------------------------------------------------------------------------------------- Run


class Run:
    """One training: policy, optimizer, counters, and the folder that keeps them.

    `RankRun` (many GPUs) and --extensions are subclasses that override some of these members:

        rollouts           the iterator over rollouts, here `rollouts_in_turn`
        collector_class    the class that collects
        enough             whether a rollout ends early
        next_rollout       takes the next rollout from the iterator
        advantages         computes advantages, returns and weights; returns the steps to learn from
        average            averages tensors over all processes that learn together
        update             learns from a rollout
        decay              the share of the learning rate that is left
        make_optimizer     makes the optimizer
        max_lag            how many updates the acting policy may be behind the learning one
        note_signal        records a signal that ends training
        restore            loads the checkpoint of --resume
        open_folder, log, combine, save, evaluate, close    write logs and checkpoints
    """

    collector_class = Collector
    max_lag = 0  # carried-over steps are an exception: they may be older
    exceptions_that_save = Exception  # after which a checkpoint is written
    folder = None

    def __init__(self, options):
        """Build all that training needs. Raises UserError."""
        check_process(options)
        self.spec, self.policy = build(options)
        device = next(self.policy.parameters()).device  # not `auto` or `cuda`, but `cuda:0`, say
        self.options = replace(options, device=str(device))
        self.step = 0  # environment steps learned from
        self.version = 0  # updates made
        self.recent = deque(maxlen=100)  # episode_stats of the last episodes
        self.num_workers, _ = count_workers(self.options, self.spec)
        self.stopwatch = Stopwatch()
        self.signal = None
        self.threads = LearnerThreads(self.options)
        self.optimizer = self.make_optimizer()
        # read the first rates now: `restore` overwrites them with decayed ones
        self.learning_rates = [group["lr"] for group in self.optimizer.param_groups]
        self.restore()
        tune_malloc()
        self.first_step = self.step
        self.saved_step = None  # of the last checkpoint that this process has written
        self.folder = self.open_folder()

    def make_optimizer(self):
        """An optimizer with `param_groups`, `zero_grad`, `step`, `state_dict`, `load_state_dict`.
        """
        weights = self.policy.parameters()
        return torch.optim.Adam(weights, lr=self.options.learning_rate, eps=1e-5, fused=True)

    def restore(self):
        """With --resume, continue from the checkpoint of that folder, if there is one. Raises
        UserError."""
        path = resumed_checkpoint(self.options)
        if path:
            restore_run(self, path)

    def open_folder(self):
        """Make the run folder, and print a first line about the training. Raises UserError."""
        folder = RunFolder(self.options, self.step)
        folder.say(f"{folder.path}: {headline(self.options, self.spec, self.policy)}")
        return folder

    @contextlib.contextmanager
    def training(self):
        """Around all training: yield the iterator over rollouts, and save, whatever ends it."""
        torch.manual_seed(derive_seed(SEED_OF_LEARNER, self.options.seed, self.step))
        with contextlib.closing(self.rollouts()) as source, caught_signals(self.note_signal):
            try:
                yield source  # here the body of the `with` in `train` runs
                self.save()
                if self.signal:  # it came in the last update
                    raise Interrupted(self.signal)  # so there is no evaluation
            except self.exceptions_that_save:
                self.save()
                if self.step:
                    how = f"continue with: --resume {self.folder.path}"
                    self.folder.say(f"stopped at step {self.step}; {how}")
                raise
            finally:
                self.folder.say(self.stopwatch.advice(self.options))

    def note_signal(self, number, _frame):
        """Record the first signal. It ends training: after the update that is being made, or at
        once while collecting (that rollout is dropped). A second Ctrl-C or SIGTERM kills the
        process. Any other second signal changes nothing: a terminal that closes may send two."""
        if self.signal:
            return
        self.signal = number
        with contextlib.suppress(OSError):  # stderr may be closed
            os.write(2, b"\nstopping; a second Ctrl-C or SIGTERM ends the program at once\n")
        for each in (signal.SIGINT, signal.SIGTERM):
            signal.signal(each, signal.SIG_DFL)

    def rollouts(self):
        """The iterator over rollouts, without end. Closing it ends its processes."""
        return rollouts_in_turn(self)

    def enough(self, rows=0):
        """Whether a rollout with this many rows ends early, because of a signal. `collect` calls
        this in every pass, so this function also moves the progress bar."""
        self.folder.progress(self.step + rows)
        return self.signal is not None

    def next_rollout(self, source):
        """The next rollout. Raises Interrupted after a signal: the rollout may be empty then."""
        rollout = next(source)
        if self.signal:
            raise Interrupted(self.signal)
        return rollout

    @contextlib.contextmanager
    def learning(self):
        """Around the learning of one update: set the number of threads, and yield a dictionary for
        logs, to which the time is added at the end."""
        began_at = time.perf_counter()
        logs = {}
        with self.threads.chosen():
            yield logs
        logs["time/learning_sec"] = time.perf_counter() - began_at

    def advantages(self, rollout):
        """Compute the advantages, returns and weights. Returns the steps to learn from."""
        add_advantages(rollout, self.options)
        return rollout

    def average(self, tensors):
        """Average these tensors over all processes that learn together, in place. Here there is
        only one, so this does nothing."""

    def decay(self):
        """The share of the learning rate that is left: a cosine from 1 to 0 (VER table A1)."""
        progress = min(1.0, self.step / self.options.total_timesteps)
        return 0.5 * (1 + math.cos(math.pi * progress))

    def update(self, rollout):
        """Update the policy from a rollout. Then update the running statistics with which encoders
        normalize observations. Returns what to log."""
        decay = self.decay()
        for group, rate in zip(self.optimizer.param_groups, self.learning_rates):
            group["lr"] = rate * decay
        self.policy.train()  # `update_statistics` works only in training mode
        logs = ppo_update(self.policy, self.optimizer, rollout, self.options, self.average)
        update_statistics(self.policy, rollout, decay, self.average)
        self.policy.eval()
        return logs | {"charts/learning_rate": self.optimizer.param_groups[0]["lr"]}

    def log(self, rollout, logs):
        """Count an update and its steps, keep its numbers, now and then write a checkpoint."""
        if self.options.debug:
            check_rollout(rollout, self.version, self.max_lag)
        logs |= summarize_rollout(rollout, self.version)
        logs |= self.stopwatch.lap(rollout, logs["time/learning_sec"], self.num_workers)
        logs["charts/return_scale"] = self.policy.critic.scale.item()
        steps, logs, episodes = self.combine(rollout, logs)
        self.step += steps
        self.version += 1
        self.recent.extend(episodes)
        logs["charts/SPS_update"] = steps / logs["time/cycle_sec"]
        logs["charts/SPS"] = (self.step - self.first_step) / self.stopwatch.passed_sec()
        logs |= mean_episode(self.recent, self.spec)
        self.stopwatch.remember(logs)
        self.folder.say(self.stopwatch.early_advice(self))
        self.folder.progress(self.step, logs)
        self.folder.write_scalars(logs, self.step)
        interval = self.options.checkpoint_interval
        if self.step // interval > (self.step - steps) // interval:  # passes a multiple of it
            self.save()

    def combine(self, rollout, logs):
        """Steps, logs and finished episodes of an update, of all processes that learn together."""
        return rollout.rows, logs, finished_episodes(rollout)

    def save(self):
        """Write a checkpoint in place of the previous one, unless this process has written one at
        this step. Raises OSError if that fails, for example on a full disk. Then the previous
        checkpoint is still there."""
        if self.saved_step == self.step:
            return
        self.folder.write_checkpoint(run_state(self))
        self.saved_step = self.step

    def evaluate(self):
        """Evaluate the policy."""
        self.folder.close_bar()
        if self.options.eval_episodes:
            means = report_evaluation(self.policy, self.spec, self.options)
            # not if a finished run was resumed: its log has an evaluation already
            if self.step > self.first_step:
                self.folder.write_scalars(means, self.step)

    def close(self):
        """Finish the files."""
        if self.folder:
            self.folder.close()


# End of the lesson

# ---------------------------------------------------------------------- Any Gymnasium environment
# Adds environments of any kind: ids, arguments and wrappers, spaces, actions, and the number of
# processes that suits them. The lesson calls `make_env`, `to_env_action`, `derive_seed` and
# `count_workers`.

CHEAP_STEP_SEC = 50e-6  # faster steps are not worth the two messages to another process
INFERENCE_SEC = 150e-6  # about what one step costs the process that collects
TRIAL = 2**60  # `describe_env` counts episodes from here: no run gets that far
MAX_WORKERS = 128
LARGE_BOUND = 1e30  # a bound as large as this counts as none
MOST_CHOICES = 100_000  # the most choices of an observation, which enters as a one-hot vector


def make_env(options, split="train", number=0):
    """Environment `number` of a split (train or val) as --env-id, --env-kwargs and --wrappers say.

    Environments that are registered with arguments named `options`, `split` or `number` receive
    these. Other environments differ in their seeds alone.
    """
    registered = load(options.env_id, "--env-id")
    # The ranks of a machine never share a number: simulators may derive a port from it
    number += int(os.environ.get("LOCAL_RANK", "0")) * options.num_envs
    known = {"options": options, "split": split, "number": number}
    arguments = {name: value for name, value in known.items() if name in registered.kwargs}
    arguments |= read_arguments(options.env_kwargs)
    env = gym.make(registered, disable_env_checker=True, **arguments)
    for wrapper in options.wrappers:
        env = load(wrapper, "--wrappers")(env)
    return env


class EnvSpec:
    """What trainer and network must know of an environment. Plain, so that it can be sent to other
    processes.

        observations       the space of each part of an observation, by its name
        obs_fields         (name, type, shape) of each part
        leaves             finds these parts in an observation
        action             the space of actions
        action_dims        A, the dimensions of an action
        action_dtype       the type of its numbers
        choices            how many choices each dimension has; empty if actions are continuous
        metrics            names of the scalars in the last info of an episode, from the
                           environment's metadata
        episode_columns    return, length and metrics of an episode
        step_sec, cpu_sec  seconds that a step takes, and how many of them on a CPU
    """

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
    if isinstance(space, gym.spaces.MultiDiscrete):
        return space.nvec.ravel().tolist()
    return []


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
        more = flatten(below, f"{name}/{key}" if name else str(key))
        twice = leaves.keys() & more.keys()
        if twice:
            raise UserError(f"two parts of the observation have the name {min(twice)!r}")
        leaves |= more
    return leaves


def to_env_action(space, action_A):
    """The policy's numbers as the environment wants them. Discrete: index plus the space's start.
    Box: -1..1 is stretched to the range low..high. With one bound alone, -1..1 is moved next to the
    bound; with none, it stays. Numbers beyond the bounds are clipped.

    >>> to_env_action(gym.spaces.Box(0.0, 4.0, (2,)), np.array([0.5, 7.0], np.float32))
    array([3., 4.], dtype=float32)
    >>> to_env_action(gym.spaces.Box(10.0, np.inf, (2,)), np.array([0.0, 7.0], np.float32))
    array([11., 18.], dtype=float32)
    """
    if isinstance(space, gym.spaces.Discrete):
        return int(action_A[0] + space.start)
    action = action_A.reshape(space.shape)
    if isinstance(space, gym.spaces.MultiDiscrete):
        return action.astype(space.dtype) + space.start
    has_low = space.low > -LARGE_BOUND
    has_high = space.high < LARGE_BOUND
    # with a lower bound; with an upper bound alone; with none
    low = np.select([has_low, has_high], [space.low, space.high - 2], -1)
    high = np.where(has_low & has_high, space.high, low + 2)
    scaled = low + (action + 1) / 2 * (high - low)
    return np.clip(scaled, space.low, space.high).astype(space.dtype)


def derive_seed(*numbers):
    """A seed made of several numbers. It has 31 bits, so that every simulator accepts it, even one
    that stores seeds in a signed C int."""
    return int(np.random.SeedSequence(numbers).generate_state(1)[0] >> 1)


def describe_env(options):
    """Try one environment, and return its EnvSpec. Raises UserError if it fails, or if a space is
    not supported.

    The trial has a process of its own, so nothing that the environment does there can hang, kill or
    change this process. With --num-workers 0 the trial takes place here, as training will.
    """
    trial = Environment(0, options, "train", spec=None, io=None)
    if options.num_workers == 0:
        with TorchState(options, TRIAL).in_place(), contextlib.closing(trial):
            found = try_env(trial)
    else:
        found = try_elsewhere(trial)
    for key, space in found.left_out.items():
        kind = type(space).__name__
        print(f"observation {key!r} is left out: {kind} is neither numbers nor choices")
    for key, shape in found.obs_shapes.items():
        if len(shape) > 3:
            advice = "to treat it as an image, add a wrapper that reduces it to 3 dimensions"
            print(f"observation {key!r} of shape {shape} is read as a plain vector: {advice}")
    return found


def try_elsewhere(trial):
    """As `try_env`, in a process of its own."""
    options = trial.options
    context = process_context()
    answer, outbox = context.Pipe(duplex=False)
    how = {"args": (trial, outbox), "name": "trial", "daemon": True}
    process = context.Process(target=trial_worker, **how)
    process.start()
    outbox.close()  # so that the pipe ends if that process dies
    closing_sec = 0.0
    try:
        if not answer.poll(options.env_timeout):
            limit = f"within {options.env_timeout:.0f} s (--env-timeout)"
            refuse(options, "env_id", f"a reset and a step gave no answer {limit}")
        found = answer.recv()
        closing_sec = CLOSING_SEC
    except EOFError:
        process.join(CLOSING_SEC)
        reason = f"its process died (exit code {process.exitcode})"
        advice = "see its output above; with --num-workers 0 it runs in this process"
        refuse(options, "env_id", f"cannot be used: {reason}; {advice}")
    finally:
        end_process(process, closing_sec)
    if isinstance(found, UserError):
        raise found
    return found


def trial_worker(trial, outbox):
    """Body of the process of a trial: send an EnvSpec or a UserError, then close the environment.
    """
    lead_group()
    torch.set_num_threads(1)
    with contextlib.closing(trial):
        try:
            found = try_env(trial)
        except UserError as error:
            found = error
        outbox.send(found)


def try_env(trial):
    """Make one environment, look at its spaces, and take a step as in training. If --num-workers is
    `auto`, also measure the time of some more steps. Returns its EnvSpec; raises UserError.

    `trial` is an Environment without `spec` and `io`: these follow once the spaces are known.
    """
    options = trial.options
    try:
        env = make_env(options)
        trial.env = env
        # first a reset: Habitat knows its metrics only after it
        env.reset(seed=derive_seed(0, options.seed, 0, TRIAL))
        check_wrappers(env)
        spec = EnvSpec(env.observation_space, env.action_space, metrics_of(env))
        check_spaces(spec)
        trial.spec = spec
        trial.io = EnvIO(spec, 1, TRIAL)
        trial.reset()
        trial.step()
        if options.num_workers == "auto":
            spec.step_sec, spec.cpu_sec = time_steps(trial)
    except UserError:
        raise
    except (Exception, SystemExit) as error:  # whatever the environment's own code raises
        given = "".join(f" {each}" for each in (*options.env_kwargs, *options.wrappers))
        given = given and f" with{given}"
        refuse(options, "env_id", f"cannot be used{given} ({where_raised(error)})")
    return spec


def where_raised(error):
    """An error in one line: its kind, its text, and the line of code that raised it."""
    where = traceback.extract_tb(error.__traceback__)[-1]
    return f"{first_line(error)}; {where.filename}:{where.lineno}: {where.line}"


def first_line(error):
    """The kind of an error, and the first line of its text."""
    return f"{type(error).__name__}: {error}".splitlines()[0]


def metrics_of(env):
    """The names in the environment's metadata["metrics"]; one name alone is accepted, too."""
    metrics = (env.metadata or {}).get("metrics", ())  # adapters of the old gym have None
    return (metrics,) if isinstance(metrics, str) else tuple(metrics)


def check_wrappers(env):
    """Raise UserError for wrappers of Gymnasium that do not work here: those that keep running
    statistics, and RecordVideo."""
    instead = {
        "NormalizeObservation": "use gymnasium.wrappers:RescaleObservation(min_obs=-1, max_obs=1),"
        " or leave it out if there are no bounds: such vectors are normalized",
        "NormalizeReward": "leave it out: rewards of any size are learned equally well",
    }
    while isinstance(env, gym.Wrapper):
        name = type(env).__name__
        if name in instead:
            why = "keeps statistics, which evaluation and --resume would start from zero"
            raise UserError(f"the wrapper {name} {why}; {instead[name]}")
        if name == "RecordVideo":
            why = "of every environment would write the same files"
            how = "python -m notebooks.extensions.play RUN_FOLDER films episodes after training"
            raise UserError(f"the wrapper {name} {why}; {how}")
        env = env.env


def check_spaces(spec):
    """Raise UserError for a space that is not supported."""
    spaces = gym.spaces
    if not spec.observations:
        raise UserError(f"no observation holds numbers or choices: {list(spec.left_out)}")
    for key, space in spec.observations.items():
        if 0 in spec.obs_shapes[key]:
            raise UserError(f"observation {key!r} is {space}: a dimension of size 0 holds nothing")
        if sum(count_choices(space)) > MOST_CHOICES:
            advice = "use a wrapper that gives numbers"
            raise UserError(f"observation {key!r} is {space}: too many choices: {advice}")
    names = spec.episode_columns
    if len(set(names)) < len(names):
        raise UserError(f'metadata["metrics"] is {spec.metrics}: a name is twice there or reserved')
    continuous = isinstance(spec.action, spaces.Box)
    known = continuous and np.issubdtype(spec.action.dtype, np.floating) and spec.action_dims
    if not known and not isinstance(spec.action, (spaces.Discrete, spaces.MultiDiscrete)):
        kinds = "Discrete, MultiDiscrete and Box of floats"
        raise UserError(f"the action is {spec.action}: only {kinds} are supported")


def time_steps(trial):
    """Mean seconds of a step with random actions, resets included, and the mean seconds of CPU time
    of a step. Takes a second. If the environment fails, this stops earlier and does not
    raise, because training can continue after a failure, too. (The result may be too high: at
    first, simulators load scenes, and agents that act at random end episodes soon.)

    The time in which other programs had the core does not count. Otherwise a simulator on a busy
    machine would look like one that waits for a GPU, and would get too many workers.
    """
    rng = np.random.default_rng(0)
    dims = trial.spec.action_dims
    steps = 0
    began = np.array([time.perf_counter(), time.process_time(), run_delay_sec()])
    with contextlib.suppress(EnvironmentFailure):
        while time.perf_counter() < began[0] + 1.0:
            choices = trial.spec.choices
            trial.io["action"][0] = rng.integers(choices) if choices else rng.uniform(-1, 1, dims)
            trial.answer()
            steps += 1
    ended = np.array([time.perf_counter(), time.process_time(), run_delay_sec()])
    step_sec, cpu_sec, delay_sec = (ended - began) / max(1, steps)
    # Subtract the delay, but stay above the CPU time. (With several threads, the CPU time can be
    # larger than the time that passed.)
    undisturbed_sec = max(step_sec - delay_sec, min(cpu_sec, step_sec))
    return float(undisturbed_sec), float(cpu_sec)


def count_cores():
    """CPU cores that this process may use, as its affinity and its container's quota say. The ranks
    of torchrun share those of a machine."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    cores = min(cores, container_cores())
    return max(1, int(cores) // int(os.environ.get("LOCAL_WORLD_SIZE", 1)))


def container_cores(root=Path("/sys/fs/cgroup")):
    """The CPU quota of the container that this process runs in, in cores: what `docker --cpus`
    and Kubernetes set. Infinity if there is no quota. Reads cgroup version 2, otherwise version 1.
    """
    with contextlib.suppress(OSError, ValueError):
        quota, period = (root / "cpu.max").read_text().split()
        return int(quota) / int(period)  # ValueError: the quota is "max"
    with contextlib.suppress(OSError, ValueError):
        quota = int((root / "cpu" / "cpu.cfs_quota_us").read_text())
        period = int((root / "cpu" / "cpu.cfs_period_us").read_text())
        return quota / period if quota > 0 else math.inf
    return math.inf


def count_workers(options, spec):
    """How many worker processes to start, and why.

    auto: none if steps are very cheap. Otherwise about one for each core if a step keeps a CPU
    busy, and more, up to one for each environment, if it mostly waits for a GPU or a server. This
    process needs a share of the cores, too, which is larger if steps are fast.
    """
    if options.num_workers != "auto":
        return options.num_workers, "--num-workers"
    step = f"a step takes {1000 * spec.step_sec:.2g} ms"
    if spec.step_sec < CHEAP_STEP_SEC:
        return 0, f"{step}: less than a message to another process"
    cores = count_cores()
    waits = spec.step_sec / max(spec.cpu_sec, 1e-6)  # 1 means that a step never waits
    share = spec.step_sec / (spec.step_sec + INFERENCE_SEC)
    most = min(options.num_envs, MAX_WORKERS)
    workers = min(most, max(1, round(cores * waits * share)))
    if waits > 2 and workers > options.num_envs / 2:
        workers = most  # else some would have two environments, and be half as fast as the rest
    return workers, f"{step}, {1000 * spec.cpu_sec:.2g} ms of CPU time; {cores} cores"


# --------------------------------------------------------------------------------------- Encoders
# Adds image and vector encoders, and running statistics of what they read. The lesson calls
# `build_encoders`, and `update_statistics` after every update.


def image_layout(space):
    """Channels, height, width of an image (a Box of two or three dimensions, of 8 x 8 pixels at
    least) and whether the channels come last; None for other observations.

    >>> image_layout(gym.spaces.Box(0, 255, (3, 36, 40), np.uint8))
    (3, 36, 40, False)
    """
    if not isinstance(space, gym.spaces.Box) or len(space.shape) not in (2, 3):
        return None
    shape = space.shape if len(space.shape) == 3 else (*space.shape, 1)
    channels_last = shape[2] <= shape[0]
    channels, height, width = (shape[2], *shape[:2]) if channels_last else shape
    return (channels, height, width, channels_last) if min(height, width) >= 8 else None


def may_be_large(space):
    """Whether the numbers of a space may be so large that they must be normalized: they have no
    bounds, or bounds beyond 100. (Bytes are scaled to 0..1, choices are one-hot.)

    >>> may_be_large(gym.spaces.Box(0, 3000, (4,))), may_be_large(gym.spaces.Box(-5, 5, (4,)))
    (True, False)
    """
    if not isinstance(space, gym.spaces.Box) or space.dtype == np.uint8:
        return False
    return bool(space.low.min() < -100 or space.high.max() > 100)


class Statistics(nn.Module):
    """Normalizes each of C channels by its mean and deviation in all rollouts so far (DD-PPO
    section 6).

    A rollout's weight is the share of the learning rate that is left. So the statistics move more
    and more slowly, and a policy with a small learning rate can follow them. They do not move in
    evaluation mode, which is how an encoder is frozen.
    """

    def __init__(self, channels):
        super().__init__()
        self.register_buffer("mean_C", torch.zeros(channels))
        self.register_buffer("variance_C", torch.ones(channels))
        self.register_buffer("rollouts", torch.zeros(()))  # sum of their weights

    def forward(self, x):
        """`x`: B x C, or B x C x height x width."""
        shape = self.mean_C.shape + (1,) * (x.dim() - 2)
        deviation_C = self.variance_C.clamp(min=1e-12).sqrt()
        x = (x - self.mean_C.view(shape)) / deviation_C.view(shape)
        return x.clamp(-10, 10)  # a number that was constant has deviation 0 when it first changes

    def take_in(self, x, weight, average):
        """Update the statistics with these observations, and with those of other ranks."""
        x = x.transpose(0, 1).flatten(1).clamp(-1e15, 1e15)  # so that squares are finite
        mean_C = x.mean(dim=1)
        average([mean_C])
        variance_C = ((x - mean_C[:, None]) ** 2).mean(dim=1)
        average([variance_C])
        self.rollouts += weight
        away_C = mean_C - self.mean_C
        share = weight / self.rollouts.clamp(min=1e-8)  # of these observations among all
        self.mean_C += share * away_C
        self.variance_C *= 1 - share
        self.variance_C += share * (variance_C + (1 - share) * away_C**2)


@torch.no_grad()
def update_statistics(policy, rollout, weight, average):
    """Update the running statistics with 256 steps of the rollout of every rank. This comes after
    learning from it, because the policy must see the same in acting and in learning. `weight` is
    the learning rate as a share of the first one."""
    modules = list(policy.modules())
    readers = [each for each in modules if isinstance(getattr(each, "normalize", None), Statistics)]
    if not readers:
        return
    some = torch.randperm(rollout.rows)[:256].to(rollout.device)
    obs = {key: part[some] for key, part in rollout.obs.items()}
    for reader in readers:
        if reader.normalize.training:
            reader.normalize.take_in(reader.read(obs), weight, average)


class Image(nn.Module):
    """An image as B x channels x height x width. uint8 is scaled to 0..1. Both uint8 and numbers
    that `may_be_large` are normalized."""

    def __init__(self, key, space):
        super().__init__()
        self.key = key
        self.channels, height, width, self.channels_last = image_layout(space)
        self.size = height, width
        normalized = space.dtype == np.uint8 or may_be_large(space)
        self.normalize = Statistics(self.channels) if normalized else nn.Identity()

    def read(self, obs):
        """The image, not yet normalized."""
        image = obs[self.key]
        if image.dtype == torch.uint8:
            image = image / 255
        if self.channels_last:
            image = image.reshape(*image.shape[:3], -1).permute(0, 3, 1, 2)
        return image

    def forward(self, obs):
        return self.normalize(self.read(obs))


class SmallCNN(nn.Module):
    """Small CNN for an image of any size -> B x out_features. Its first layers read patches that do
    not overlap: on a CPU that is twice as fast as the usual overlapping 8x8 and 4x4 kernels. With
    channels last in memory it learns in three quarters of the time."""

    def __init__(self, image, out_features):
        super().__init__()
        self.image = image
        self.out_features = out_features
        stride = 4 if min(image.size) >= 32 else 2
        convolutions = nn.Sequential(
            orthogonal(nn.Conv2d(image.channels, 16, stride, stride)),
            nn.ReLU(inplace=True),
            orthogonal(nn.Conv2d(16, 32, stride, stride)),
            nn.ReLU(inplace=True),
            orthogonal(nn.Conv2d(32, 32, 3, 1, padding=1)),
            nn.ReLU(inplace=True),
            nn.Flatten(),
        )
        self.convolutions = convolutions.to(memory_format=torch.channels_last)
        flat_features = 32 * math.prod(size // stride // stride for size in image.size)
        self.out = orthogonal(nn.Linear(flat_features, out_features))

    def forward(self, obs):
        return torch.relu(self.out(self.convolutions(self.image(obs))))


class Vector(nn.Module):
    """Two-layer perceptron for a vector, which is normalized if it `may_be_large`. Choices enter as
    one-hot vectors, bytes as 0..1."""

    def __init__(self, key, space, out_features):
        super().__init__()
        self.key = key
        self.out_features = out_features
        self.choices = count_choices(space)
        self.in_features = sum(self.choices) or math.prod(space.shape)
        if self.choices:  # choice c of dimension d is at index begin_D[d] + c of the one-hot vector
            begin_D = np.cumsum([0, *self.choices[:-1]]) - np.ravel(space.start)
            self.register_buffer("begin_D", torch.from_numpy(begin_D), persistent=False)
        self.normalize = Statistics(self.in_features) if may_be_large(space) else nn.Identity()
        first = orthogonal(nn.Linear(self.in_features, out_features))
        second = orthogonal(nn.Linear(out_features, out_features))
        self.layers = nn.Sequential(first, nn.Tanh(), second, nn.Tanh())

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


def build_encoders(spec, hidden_size):
    """An encoder for each part of an observation: observations -> B x out_features."""
    encoders = []
    for key, space in spec.observations.items():
        if image_layout(space):
            encoders.append(SmallCNN(Image(key, space), hidden_size))
        else:
            encoders.append(Vector(key, space, hidden_size // 2))
    return nn.ModuleList(encoders)


# ------------------------------------------------------------------------------------ Supervision
# Adds checks of what environments answer, workers that are replaced when environments raise, hang
# or die, --num-workers 0, and signals. The lesson calls `failure_of`, `lose_step`, `check_reward`,
# `read_metrics`, `check_shapes`, `check_numbers`, `tell`, `make_workers`, `guarded_worker`,
# `Supervisor`, `process_context`, `share_memory`, `end_process`, `check_process`, `caught_signals`,
# `Interrupted` and `check_rollout`.

# a terminal that closes sends SIGHUP; SLURM can send SIGUSR1 or 2 before it ends a job (--signal)
SIGNALS = signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2
CLOSING_SEC = 5
BAD_ANSWER_STATUS = 3  # with which a worker process exits
NOT_MADE_STATUS = 4


class UserError(Exception):
    """Something the user can fix; shown as one line, exit status 2."""


class Interrupted(Exception):
    """Ctrl-C, SIGTERM or another of SIGNALS; the argument is the signal's number."""


class EnvironmentFailure(Exception):
    """An environment, or another process, has raised, hung or died; exit status 1."""


class NotMade(EnvironmentFailure):
    """The environment cannot be made. If its worker has never answered, training ends. Otherwise
    the worker is started again."""


class BadAnswer(EnvironmentFailure):
    """NaN, infinity, or a shape different from the space's: starting again would hide a bug."""


def process_context():
    """How processes are started: by a fork server. As with spawn, a process gets nothing of this
    process's state, but torch is imported only once. A signal may reach the whole process group.
    The fork server ignores it, and the main process decides what happens. Raises UserError."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["torch", "gymnasium", "tyro", "tqdm"])
    with caught_signals(signal.SIG_IGN):
        try:
            multiprocessing.forkserver.ensure_running()
        except OSError as error:  # the name of a socket may have at most 107 characters
            advice = "a shorter folder for temporary files may help: export TMPDIR=/tmp"
            raise UserError(f"processes cannot be started ({error}): {advice}") from None
    return context


def lead_group():
    """Give this process a group of its own, which holds all that its simulators start. If the main
    process is gone, and this process does not end by itself (a simulator hangs), the group is
    killed.

    This process gets a handler for signals that does nothing. If it ignored them by SIG_IGN, as the
    fork server does, the programs that its simulators start would inherit that.
    """
    multiprocessing.current_process().daemon = False  # daemons may not have children
    for number in SIGNALS:
        signal.signal(number, lambda number, frame: None)

    def follow():
        multiprocessing.parent_process().join()
        time.sleep(CLOSING_SEC)
        os.killpg(0, signal.SIGKILL)

    os.setpgrp()
    threading.Thread(target=follow, daemon=True).start()


def end_process(process, timeout_sec):
    """Let a process end within this time, otherwise kill it. Then kill the processes that it has
    started and left behind, which are in its process group."""
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
        advice = "enlarge it (docker run --shm-size), or use a smaller --num-envs or --num-steps"
        raise UserError(f"{needs} and /dev/shm has {free / 2**20:.0f}: {advice}")
    for tensor in tensors:
        tensor.share_memory_()


def tell(text):
    """Print a line about an environment to stderr; ranks add their number."""
    rank = os.environ.get("RANK")
    if rank is None:
        tqdm.write(text, file=sys.stderr)
    else:
        # not sys.stderr: only the first rank of a machine prints there
        tqdm.write(f"rank {rank}: {text}", file=sys.__stderr__)


def failure_of(environment, error):
    """An environment's error as an EnvironmentFailure (NotMade, BadAnswer) that says where it
    happened. Called while the error is being handled."""
    name = f"environment {environment.number}"
    if environment.env is None:
        return NotMade(f"{name} cannot be made ({where_raised(error)})")
    kind = BadAnswer if isinstance(error, BadAnswer) else EnvironmentFailure
    episode = environment.io["episode"][environment.number]
    place = f"{name}, episode {episode}, step {environment.length}"
    return kind(f"{place}:\n{traceback.format_exc()}")


def lose_step(io, e):
    """Complete a step that was lost when its environment crashed: no reward, truncated at the
    observation that was seen last. (If it were terminated, the policy would learn a value of 0
    there.)"""
    io["reward"][e] = 0.0
    io["terminated"][e] = False
    io["truncated"][e] = True
    io["final_obs"][e] = io["obs"][e]
    io["lost"][e] = True
    io["began_at"][e] = time.perf_counter()
    io["step_sec"][e] = 0.0
    # mark the step as finished, so that a second crash before the answer does not change this row
    io["unfinished"][e] = False


def check_reward(reward):
    """Raise BadAnswer if a reward, as the table has kept it, is not finite."""
    if not math.isfinite(reward):
        raise BadAnswer(f"reward is {reward}")


def read_metrics(info, spec):
    """The metrics in the last info of an episode, as numbers. Raises BadAnswer if one is missing or
    is not a number."""
    try:
        return [float(np.asarray(info[name]).item()) for name in spec.metrics]
    except (KeyError, ValueError, TypeError) as error:
        named = f'metadata["metrics"] is {spec.metrics}'
        raise BadAnswer(f"{named}; the last info is {info} ({error!r})") from None


def check_shapes(leaves, spec):
    """Raise BadAnswer if the parts of an observation have other names or shapes than its space."""
    shapes = {key: np.shape(leaf) for key, leaf in leaves.items()}
    known = spec.obs_shapes
    if shapes != known:
        raise BadAnswer(f"observation has the shapes {shapes}, the observation space {known}")


def check_numbers(kept, leaf, key, spec):
    """Raise BadAnswer if a part of an observation is not finite, if its copy in the table differs
    (its type does not fit the space), or if a choice is outside of the space."""
    space = spec.observations[key]
    good = np.isfinite(kept).all() if kept.dtype.kind == "f" else np.array_equal(kept, leaf)
    if not good or (kept.dtype.kind == "i" and kept not in space):
        raise BadAnswer(f"observation {key!r} is {leaf}, the observation space {space}")


def make_workers(options, split, spec, io):
    """All environments of a split, in worker processes or (--num-workers 0) here."""
    numbers = range(options.num_envs)
    environments = [Environment(e, options, split, spec, io) for e in numbers]
    num_workers, _ = count_workers(options, spec)
    if num_workers:
        return Workers(environments, num_workers)
    return InlineWorkers(environments)


class Restarts:
    """Counts the environments and workers that were started again. Raises EnvironmentFailure if
    they are more than --max-worker-restarts in an hour."""

    def __init__(self, options):
        self.most = options.max_worker_restarts
        self.count = 0
        self.recent = deque(maxlen=self.most + 1)  # when (time.monotonic)

    def note(self, reason):
        self.count += 1
        self.recent.append(time.monotonic())
        if len(self.recent) > self.most and self.recent[-1] - self.recent[0] < 3600:
            limit = f"more than {self.most} restarts within an hour (--max-worker-restarts)"
            raise EnvironmentFailure(f"{reason}\n{limit}")
        tell(f"{reason}\nstarted again, with a new episode ({self.count} so far)")


class TorchState:
    """The global settings of torch that an environment's code could change: the random generator,
    the default type, and whether gradients are recorded. Environments in the trainer's process have
    settings of their own."""

    def __init__(self, options, episode):
        seed = derive_seed(SEED_OF_INLINE, options.seed, episode)
        generator = torch.Generator().manual_seed(seed)
        # random state, default type, whether gradients are recorded
        self.state = generator.get_state(), torch.get_default_dtype(), True

    @contextlib.contextmanager
    def in_place(self):
        """While this lasts, these settings take the place of the trainer's."""
        # `collect` runs in inference mode: switch it off while environments run
        with torch.inference_mode(False):
            own = self.exchange(self.state)
            try:
                yield
            finally:
                self.state = self.exchange(own)

    def exchange(self, state):
        """Set this state; return the one that was."""
        before = torch.get_rng_state(), torch.get_default_dtype(), torch.is_grad_enabled()
        random_state, default_type, with_gradients = state
        torch.set_rng_state(random_state)
        torch.set_default_dtype(default_type)
        torch.set_grad_enabled(with_gradients)
        return before


class InlineWorkers:
    """All environments in the process that collects: the interface of Workers, in a deterministic
    order. An environment that raises is re-created; hangs and crashes are not handled."""

    def __init__(self, environments):
        options = environments[0].options
        self.environments = environments
        self.answered = []
        self.restarts = Restarts(options)
        self.state = TorchState(options, int(environments[0].io["episode"][0]))
        self.has_started = False
        self.send(np.arange(len(environments)))
        self.has_started = True

    def send(self, env_B):
        with self.state.in_place():
            for e in env_B.tolist():
                self.answer(e)

    def answer(self, e):
        """Let an environment answer; if it raises, again, until it has answered."""
        while e not in self.answered:
            try:
                self.environments[e].answer()
                self.answered.append(e)
            except EnvironmentFailure as error:
                hopeless = BadAnswer if self.has_started else (BadAnswer, NotMade)
                if isinstance(error, hopeless):
                    raise
                self.environments[e].close()
                self.restarts.note(error)

    def receive(self, timeout_sec):
        answered = self.answered
        self.answered = []
        return answered

    def close(self):
        for environment in self.environments:
            environment.close()


def guarded_worker(inbox, outbox, environments):
    """`env_worker` in a process group of its own; at the end, close the environments. An exception
    is printed and ends the process, whatever threads the simulators have."""
    lead_group()
    status = 1
    try:
        env_worker(inbox, outbox, environments)
        status = 0
    except EnvironmentFailure as error:
        tell(str(error))
        statuses = {BadAnswer: BAD_ANSWER_STATUS, NotMade: NOT_MADE_STATUS}
        status = statuses.get(type(error), status)
    except BrokenPipeError:  # the process that collects has died
        pass
    if status:  # a simulator may hang when it is closed
        threading.Timer(CLOSING_SEC, os._exit, [status]).start()
    # in reverse: the OpenGL contexts of later environments may share that of the first
    for environment in reversed(environments.values()):
        environment.close()
    if not multiprocessing.parent_process().is_alive():  # nobody is left for `end_process`
        os.killpg(0, signal.SIGKILL)
    if status:
        os._exit(status)


class Supervisor:
    """Finds worker processes that have died, or were silent for --env-timeout. `Workers.replace`
    starts them again.

    The environments that owe an answer then start again, and their start is the answer. The other
    environments of the worker start when their next action arrives, and that step is lost.
    """

    LOOK_SEC = 0.2

    def __init__(self, options, num_workers):
        self.timeout_sec = options.env_timeout
        self.restarts = Restarts(options)
        self.looked_at = time.monotonic()
        self.num_workers = num_workers
        # of workers that owe an answer: seconds without one
        self.silent_sec_W = np.zeros(num_workers)
        self.has_answered_W = np.zeros(num_workers, bool)

    def note_answers(self, answered):
        """The workers of these environments are alive."""
        worker_B = np.array(answered, int) % self.num_workers
        self.silent_sec_W[worker_B] = 0.0
        self.has_answered_W[worker_B] = True

    def note_restart(self, worker, reason):
        """A worker starts again. Raises EnvironmentFailure if that happens too often."""
        self.restarts.note(reason)
        self.silent_sec_W[worker] = 0.0

    def find_failed(self, workers):
        """Look at the workers, five times a second at most. Returns those that have failed, each
        with the reason. Raises EnvironmentFailure if starting one again would not help."""
        passed_sec = time.monotonic() - self.looked_at
        if passed_sec < self.LOOK_SEC:
            return []
        self.looked_at += passed_sec
        # the time since the last look counts, but at most a tenth of the limit: this process may
        # have been paused meanwhile, or busy with learning, and not have looked
        self.silent_sec_W += min(passed_sec, self.timeout_sec / 10)
        failed = []
        for worker, process in enumerate(workers.processes):
            owed = workers.owed(worker).tolist()
            if not owed:
                self.silent_sec_W[worker] = 0.0
            if process.exitcode is not None:
                mine = list(range(worker, len(workers.environments), self.num_workers))
                who = f"worker {worker} (environments {mine})"
                reason = f"{who} died with exit code {process.exitcode}"
                if process.exitcode == BAD_ANSWER_STATUS:
                    raise BadAnswer(f"{reason}: the answer above is not allowed")
                if process.exitcode == NOT_MADE_STATUS and not self.has_answered_W[worker]:
                    raise NotMade(f"{who} could not start: the reason is above")
                failed.append((worker, reason))
            elif self.silent_sec_W[worker] > self.timeout_sec:
                limit = f"{self.timeout_sec:.0f} s (--env-timeout)"
                failed.append((worker, f"no answer from environments {owed} for {limit}"))
        return failed


def check_process(options):
    """Training catches signals and starts processes. Raise UserError if this thread or process may
    not do that. (If a program trains outside of `if __name__ == "__main__":`, multiprocessing says
    so.)"""
    if threading.current_thread() is not threading.main_thread():
        raise UserError("training catches signals: it must run in the main thread")
    if mp.current_process().daemon and options.num_workers != 0:
        advice = "use concurrent.futures.ProcessPoolExecutor, or num_workers=0"
        raise UserError(f"training starts processes, which multiprocessing.Pool forbids: {advice}")


@contextlib.contextmanager
def caught_signals(handler):
    """While this lasts, Ctrl-C, SIGTERM and so on call the handler. A SIGHUP that is ignored, as
    under nohup, stays ignored."""
    caught = set(SIGNALS)
    if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
        caught.remove(signal.SIGHUP)
    handlers = {number: signal.signal(number, handler) for number in caught}
    try:
        yield
    finally:
        for number, own in handlers.items():
            signal.signal(number, own)


def check_rollout(rollout, version, lag=0):
    """With --debug: assert every invariant of a rollout. The policy that collected it has this
    version, or one that is at most `lag` updates older."""
    steps = rollout.complete
    carried_S = steps["sent_at"] < rollout.started_at
    carried = steps["env"][carried_S]
    new_version = steps["version"][~carried_S]
    assert 0 < len(steps) <= rollout.capacity, "a rollout must have 1 to S steps"
    once = "at most one step of an environment can be carried over"
    assert lag or len(set(carried)) == len(carried), once
    assert (steps["version"] <= version).all(), "a later policy cannot have acted"
    assert (new_version >= version - lag).all(), "new steps must come from the current policy"
    for segment in np.unique(steps["segment"]):
        part = steps[steps["segment"] == segment]
        begins = part["first"][1:]
        assert (part["env"] == part["env"][0]).all(), "a segment must come from one environment"
        assert (begins == part["done"][:-1]).all(), "an episode must begin where one ended"
        assert (np.diff(part["version"]) >= 0).all(), "versions of a segment must not decrease"
        assert (np.diff(part["sent_at"]) > 0).all(), "steps must be in time order"
    begins = torch.from_numpy(np.flatnonzero(steps["first"]))
    assert not rollout.state[begins].any(), "memory must be zero where an episode begins"
    for name in ("log_prob", "value", "action", "reward"):
        assert np.isfinite(steps[name]).all(), f"{name} must be finite"
    assert np.isfinite(rollout.bootstrap).all(), "bootstrap values must be finite"


# ----------------------------------------------------------------------------- Logs and evaluation
# Adds reports on a run: where the time goes, how uneven the environments and how old the data are,
# and an evaluation. The lesson calls `mean_logs`, `summarize_rollout`, `finished_episodes`,
# `mean_episode`, `Stopwatch`, `headline` and `report_evaluation`.


def mean_logs(logs):
    """The mean of each log over the mini-batches of an update, except those that were skipped.
    Raises FloatingPointError if all were skipped."""
    table = torch.stack([torch.stack(list(log.values())) for log in logs]).cpu()  # one copy
    names = list(logs[0])
    skipped = table[:, names.index("losses/skipped")].bool()  # of each mini-batch
    if skipped.all():
        reason = "not one gradient of this update was finite"
        raise FloatingPointError(f"{reason}: try a lower --learning-rate")
    means = dict(zip(names, table[~skipped].mean(dim=0).tolist()))
    return means | {"losses/skipped": skipped.float().mean().item()}


def summarize_rollout(rollout, version):
    """What to log of a rollout from which the policy of this version learns: how good the values
    were, how uneven the environments, and how old the data."""
    steps = rollout.complete
    lag_S = version - steps["version"]
    given_N = np.bincount(steps["env"], minlength=rollout.num_envs)
    returns_S = steps["returns"].astype(float)
    variance = returns_S.var()
    error_S = returns_S - steps["value"]
    return {
        "losses/explained_variance": 1 - error_S.var() / variance if variance else 0.0,
        "ver/batch_size": len(steps) / len(np.unique(steps["sent_at"])),
        "ver/steps_per_env_min": given_N.min(),
        "ver/steps_per_env_max": given_N.max(),
        "ver/carried_share": (steps["sent_at"] < rollout.started_at).mean(),
        "ver/policy_lag_mean": lag_S.mean(),
        "ver/policy_lag_max": lag_S.max(),
        "ver/importance_weight": steps["weight"].mean(),
        "ver/made_up_steps": steps["lost"].sum(),
    }


def finished_episodes(rollout):
    """The numbers (`episode_columns`) of the episodes that ended in a rollout, not by a crash."""
    steps = rollout.complete
    return steps["episode_stats"][steps["done"] & ~steps["lost"]].tolist()


def mean_episode(recent, spec):
    """What to log of the last episodes, if there are any."""
    if not recent:
        return {}
    metrics = [f"metrics/{name}" for name in spec.metrics]
    tags = ["charts/episodic_return", "charts/episodic_length", *metrics]
    return dict(zip(tags, np.array(recent).mean(axis=0)))


ADVICE_AFTER_UPDATES = 10
MOST_EPISODE_STEPS = 100_000  # of an episode in an evaluation
TIME_LIMIT_ADVICE = (
    "if episodes need not end by themselves, give them a limit:"
    " --wrappers 'gymnasium.wrappers:TimeLimit(max_episode_steps=1000)'"
)


class Stopwatch:
    """Where the time of a run goes."""

    SHARES = "waiting", "inference", "learning", "worker_idle"

    def __init__(self):
        self.began_at = time.perf_counter()
        self.lap_at = self.began_at
        self.cycles = deque(maxlen=100)  # (seconds, shares) of the last updates
        self.updates = -1  # the first one does not count

    def passed_sec(self):
        """Seconds since the run began."""
        return time.perf_counter() - self.began_at

    def lap(self, rollout, learning_sec, workers):
        """End an update. Returns what to log of its time."""
        now = time.perf_counter()
        cycle_sec = now - self.lap_at
        self.lap_at = now
        rollout_sec = rollout.ended_at - rollout.started_at
        waited_sec = rollout.waited_sec
        simulated_sec = rollout.complete["step_sec"].sum()
        busy_share = simulated_sec / max(1, workers) / rollout_sec
        if workers == 0:  # the simulators run in this process: not inference, but waiting
            waited_sec += simulated_sec
        return {
            "time/waiting_share": waited_sec / cycle_sec,
            "time/inference_share": (rollout_sec - waited_sec) / cycle_sec,
            "time/learning_share": learning_sec / cycle_sec,
            "time/cycle_sec": cycle_sec,
            "time/rollout_sec": rollout_sec,
            "time/env_step_ms": 1000 * simulated_sec / rollout.rows,
            "time/worker_idle_share": max(0.0, 1 - busy_share),
        }

    def remember(self, logs):
        """Keep the times of an update for `advice`, except the first one, in which environments
        start."""
        shares = [logs[f"time/{name}_share"] for name in self.SHARES]
        if self.updates >= 0:
            self.cycles.append((logs["time/cycle_sec"], shares))
        self.updates += 1

    def early_advice(self, run):
        """After ten updates: the advice, and whether episodes end at all. Otherwise nothing."""
        if self.updates != ADVICE_AFTER_UPDATES:
            return ""
        advice = self.advice(run.options)
        if not run.recent:
            advice += f"\nno episode has ended in {run.step:,} steps; {TIME_LIMIT_ADVICE}"
        return advice

    def advice(self, options):
        """One line that says what took most of the time in the last hundred updates."""
        if not self.cycles:
            return ""
        cycle_sec, shares = zip(*self.cycles)
        return what_limits(options, *np.average(shares, axis=0, weights=cycle_sec))


def what_limits(options, waiting, inference, learning, worker_idle):
    """One line that says what takes most of the time, by the shares that are logged as time/...,
    and what helps.

    >>> what_limits(Options(sampler="sync", device="cpu"), 0.7, 0.1, 0.2, 0.6)
    'waiting for stragglers takes 70 % of the time: try --sampler ver'
    """
    sizes = "more --num-envs and fewer --num-steps"
    faster = sizes if options.device.startswith("cuda") else f"a GPU, or {sizes}"
    ranks = int(os.environ.get("WORLD_SIZE", 1)) > 1
    rest = "ranks that are equally fast" if ranks else "fewer --extensions, or no --debug"
    parts = [
        (learning, "learning", faster),
        (inference, "inference", faster),
        (waiting, "waiting for simulators", "more --num-envs, --num-workers, or CPU cores"),
        (1 - waiting - inference - learning, "all else", rest),
    ]
    if worker_idle > 0.5 and options.sampler in ("sync", "nover"):
        parts[2] = waiting, "waiting for stragglers", "--sampler ver"
    share, what, cure = max(parts)
    return f"{what} takes {share:.0%} of the time: try {cure}".replace("%", " %")


def headline(options, spec, policy):
    """The first line of a run: what it has chosen, and why."""
    workers, why = count_workers(options, spec)
    how = " ".join([options.sampler, *options.extensions])
    weights = list(policy.parameters())
    size = f"{sum(weight.numel() for weight in weights):,} parameters on {weights[0].device}"
    return f"{how}, {options.num_envs} environments, workers: {workers} ({why}), {size}"


@torch.inference_mode()
def play_episodes(policy, spec, options):
    """Play --eval-episodes validation episodes. Returns their numbers, E x (return, length,
    metrics), with NaN for an episode that does not end; its environment plays no more.

    Each environment plays its share, so that short episodes do not count more than long ones. The
    episodes of environment e are the rows e, e + N, e + 2 N ... For the same --num-envs and
    --eval-episodes they are the same for every policy. (An episode in which the environment dies is
    replaced by a later one: if long ones die more often, those that count are shorter than usual.)
    """
    num_envs = min(options.num_envs, options.eval_episodes)
    num_workers = min(count_workers(options, spec)[0], num_envs)
    # one mini-batch, because `check_options` refuses more mini-batches than steps
    sizes = {"num_envs": num_envs, "num_workers": num_workers, "num_minibatches": 1}
    device = next(policy.parameters()).device
    options = replace(options, **sizes, device=str(device), seed=0, sampler="ver")
    share, rest = divmod(options.eval_episodes, num_envs)
    share_N = share + (np.arange(num_envs) < rest)
    played_N = np.zeros(num_envs, int)
    found = np.full((options.eval_episodes, len(spec.episode_columns)), np.nan)
    io = EnvIO(spec, num_envs)
    own_random_state = torch.random.fork_rng([device] if device.type == "cuda" else [])
    workers = make_workers(options, "val", spec, io)
    bar = tqdm(total=options.eval_episodes, unit=" episodes", delay=20, leave=False)
    steps_N = np.zeros(num_envs, int)  # of the episode that each environment plays
    ended_at = time.monotonic()  # of the last episode, or of the last warning that none ends
    with own_random_state, contextlib.closing(workers), bar:
        torch.set_num_threads(1)  # as in training
        torch.manual_seed(options.seed)
        collector = Collector(policy, workers, io, spec, options)
        collector.greedy = options.greedy
        # no step is kept: here `in_flight_N` says only if an environment has had its first action
        while (played_N < share_N).any():
            env_B = collector.await_answers(room=num_envs)
            ended_B = collector.in_flight_N[env_B] & io["first"][env_B] & ~io["lost"][env_B]
            steps_N[env_B] += 1
            for e in env_B[ended_B]:
                found[e + num_envs * played_N[e]] = io["episode_stats"][e]
                played_N[e] += 1
                bar.update()
            steps_N[env_B[io["first"][env_B]]] = 0
            share_N[steps_N >= MOST_EPISODE_STEPS] = 0
            if ended_B.any():
                ended_at = time.monotonic()
            if time.monotonic() > ended_at + 60:
                ended_at = time.monotonic()
                tell(f"no episode has ended for a minute; the longest has {steps_N.max():,} steps")
                tell(TIME_LIMIT_ADVICE)
            collector.act(env_B[played_N[env_B] < share_N[env_B]])
    return found


def report_evaluation(policy, spec, options, path=None):
    """Evaluate, and print the mean +- standard error of every number. Returns the means to log, if
    any episode has ended. `path`: a CSV file for the numbers of each episode."""
    names = spec.episode_columns
    began_at = time.perf_counter()
    found = play_episodes(policy, spec, options)
    sec = time.perf_counter() - began_at
    if path:
        np.savetxt(path, found, fmt="%.6g", delimiter=",", header=",".join(names), comments="")
    found = found[~np.isnan(found[:, 0])]
    missing = options.eval_episodes - len(found)
    if missing:
        tell(f"{missing} episodes are missing: some did not end in {MOST_EPISODE_STEPS:,} steps")
        tell(TIME_LIMIT_ADVICE)
    if not len(found):
        return {}
    means = found.mean(axis=0)
    errors = found.std(axis=0, ddof=1 if len(found) > 1 else 0) / math.sqrt(len(found))
    parts = [f"{n} {mean:.3f} ± {error:.3f}" for n, mean, error in zip(names, means, errors)]
    how = "greedy" if options.greedy else "sampled"
    print(f"evaluation, {len(found)} {how} episodes in {sec:.0f} s: {', '.join(parts)}")
    return {f"eval/{name}": mean for name, mean in zip(names, means)}


# ------------------------------------------------------------------------------------- Run folder
# Adds the files that a run leaves behind: options.json, TensorBoard's curves, checkpoint.pt. The
# lesson calls `RunFolder`, `resumed_checkpoint`, `restore_run`, `run_state` and `SEED_OF_LEARNER`.

CHECKPOINT_FORMAT = 10
# first number of derive_seed; environments have 0 (train) and 1 (val), overlap.py 3, ver_multigpu 4
SEED_OF_LEARNER = 2
SEED_OF_INLINE = 5


def load_checkpoint(path):
    """A checkpoint's content, on the CPU; nothing in it is executed. Raises UserError for anything
    but a checkpoint of this program."""
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
        number = content["format"]
    except FileNotFoundError:
        raise UserError(f"there is no checkpoint {path}") from None
    except Exception as error:  # whatever the loader raises for a damaged or hostile file
        kind = type(error).__name__
        raise UserError(f"{path} is not a checkpoint that can be read ({kind})") from None
    if number != CHECKPOINT_FORMAT:
        advice = "continue with that version, or start a new run"
        raise UserError(f"{path} was written by another version (format {number}): {advice}")
    return content


def write_file(path, write):
    """Write a file with the function `write`, atomically: a crash leaves the old file or the new
    one. Raises OSError, if the disk is full, say."""
    temporary = path.with_suffix(".tmp")
    try:
        with open(temporary, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def write_checkpoint(content, path):
    """Write a checkpoint atomically. Raises OSError with a reason that needs no traceback."""
    try:
        memory = BytesIO()  # torch hides the reason why a file cannot be written
        torch.save(content, memory)
        write_file(path, lambda file: file.write(memory.getbuffer()))
    except (OSError, RuntimeError) as error:
        reason = str(error).splitlines()[0][:200]
        what = f"the checkpoint of step {content['step']} cannot be written to {path}"
        raise OSError(f"{what}, the one before stays: {reason}") from None


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


def run_state(run):
    """The content of a run's checkpoint: only tensors and plain types, so that it loads with
    weights_only=True."""
    return {
        "format": CHECKPOINT_FORMAT,
        "options": asdict(run.options),
        "policy": run.policy.state_dict(),
        "optimizer": run.optimizer.state_dict(),
        "step": run.step,
        "update": run.version,
        "columns": list(run.spec.episode_columns),
        "recent": list(run.recent),
    }


def resumed_checkpoint(options):
    """The path of the checkpoint that --resume continues from, or None if it does not exist."""
    path = Path(options.resume or "") / "checkpoint.pt"
    return path if options.resume and path.exists() else None


def restore_run(run, path):
    """Continue a run from a checkpoint. Raises UserError."""
    saved = load_policy(run.policy, path)
    run.step = saved["step"]
    run.version = saved["update"]
    try:
        run.optimizer.load_state_dict(saved["optimizer"])
        check_moments(run.optimizer)
    except (ValueError, KeyError) as error:
        raise UserError(f"{path} belongs to another optimizer or network: {error}") from None
    if saved["columns"] == list(run.spec.episode_columns):  # else they mean something else
        run.recent.extend(saved["recent"])
    if run.options.target_entropy is None:  # fixed: as the options say
        run.policy.log_ent_coef.data.fill_(math.log(max(run.options.ent_coef, 1e-30)))


def check_moments(optimizer):
    """Raise ValueError if an optimizer's state belongs to other weights. torch matches the saved
    state to the weights by their order alone. If a saved tensor is larger than the weight at its
    place, the optimizer would write past the end of the weight."""
    for weight, state in optimizer.state.items():
        for part in state.values():
            same_kind = torch.is_tensor(part) and part.dim() == weight.dim()
            if same_kind and part.shape != weight.shape:
                raise ValueError("its state does not match the weights")


def lock_folder(folder):
    """Lock a folder, by a file in it, until the descriptor that is returned is closed or this
    process ends. Raises UserError if someone else has locked it."""
    descriptor = os.open(Path(folder) / "lock", os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise UserError(f"{folder} belongs to a run that has not ended: wait for it") from None
    except OSError:  # a file system without locks
        pass
    return descriptor


def make_folder(options):
    """A new folder in --runs-dir. Runs that begin in the same second get a number. Raises OSError.
    """
    name = f"{options.env_id}__{options.exp_name}__{options.seed}__{int(time.time())}"
    name = name.replace("/", "-").replace(":", "-")
    home = Path(options.runs_dir)
    home.mkdir(parents=True, exist_ok=True)
    for k in itertools.count(1):
        path = home / (name if k == 1 else f"{name}_{k}")
        with contextlib.suppress(FileExistsError):
            path.mkdir()
            return path


class RunFolder:
    """The folder of a run: its lock, options.json, TensorBoard's curves, checkpoints; and the
    progress bar. With `silent`, as on ranks above 0, nothing is written or shown."""

    path = None
    lock = None
    writer = None

    def __init__(self, options, step, silent=False):
        """Make the folder, or with --resume take it. Raises UserError."""
        self.bar = None
        if silent:
            return
        text = json.dumps(asdict(options), indent=2) + "\n"
        # the errors below name this, until the folder exists
        self.path = Path(options.resume or options.runs_dir)
        from torch.utils.tensorboard import SummaryWriter  # takes a second to import

        try:
            if options.resume:
                self.path.mkdir(parents=True, exist_ok=True)
            else:
                self.path = make_folder(options)
            self.lock = lock_folder(self.path)
            write_file(self.path / "options.json", lambda file: file.write(text.encode()))
            purge_step = step + 1 if options.resume else None
            self.writer = SummaryWriter(self.path, purge_step=purge_step)
        except OSError as error:
            self.close()
            reason = f"{error.filename or self.path} cannot be written ({error.strerror})"
            raise UserError(f"{reason}: choose another place") from None
        total = max(options.total_timesteps, step)
        often_sec = 0.1 if sys.stderr.isatty() else 60.0  # a log file gets a line a minute
        how = {"unit": " steps", "dynamic_ncols": True, "mininterval": often_sec}
        self.bar = tqdm(total=total, initial=step, **how)

    def say(self, text):
        """Print a line above the progress bar."""
        if self.bar is not None and text:
            self.bar.write(text)

    def progress(self, step, logs=None):
        """Move the progress bar to a step, and show some of the logs of that step."""
        if self.bar is None:
            return
        if logs:
            shown = {"return": "charts/episodic_return"}
            shown |= {"success": "metrics/success", "spl": "metrics/spl"}
            postfix = {word: f"{logs[tag]:.3g}" for word, tag in shown.items() if tag in logs}
            self.bar.set_postfix(postfix, refresh=False)
        self.bar.update(max(0, step - self.bar.n))

    def write_scalars(self, logs, step):
        """Add points to TensorBoard's curves. Raises OSError if the disk is full."""
        if self.writer is not None:
            for tag, value in logs.items():
                self.writer.add_scalar(tag, value, step)

    def write_checkpoint(self, content):
        """Replace the checkpoint. Raises OSError, and the one before stays."""
        if self.path is not None:
            write_checkpoint(content, self.path / "checkpoint.pt")

    def close_bar(self):
        """End the progress bar: what follows is not training."""
        if self.bar is not None:
            self.bar.close()

    def close(self):
        """Finish the files, and let the folder go."""
        self.close_bar()
        if self.writer is not None:
            with contextlib.suppress(OSError):  # a full disk: said before
                self.writer.close()
        if self.lock is not None:
            os.close(self.lock)
            self.lock = None


# ------------------------------------------------------------------------------------------ Speed
# Makes learning on a CPU faster (measured). The lesson calls `lstm_step`, `lstm_sequences`,
# `LearnerThreads` and `tune_malloc`.

CROWDED_UPDATES = 10


def lstm_step(lstm, x_BF, state_B):
    """One step of an LSTM: output B x H and the state after it. nn.LSTM itself would take twice as
    long on a CPU."""
    hidden = []
    cells = []
    out_BH = x_BF
    for layer, weights in enumerate(lstm.all_weights):
        memory = state_B[:, layer], state_B[:, lstm.num_layers + layer]
        out_BH, cell_BH = torch.lstm_cell(out_BH, memory, *weights)
        hidden.append(out_BH)
        cells.append(cell_BH)
    return out_BH, torch.stack(hidden + cells, dim=1)


def lstm_sequences(lstm, packed, memory):
    """An nn.LSTM over a PackedSequence: output M x H. On a CPU, PyTorch's LSTM is much faster if
    all sequences have the same length, so all are padded to the longest. But if padding makes more
    than about five times as many steps, it costs more than it gains."""
    padded_steps = len(packed.batch_sizes) * int(packed.batch_sizes[0])
    if packed.data.device.type != "cpu" or padded_steps > 5 * len(packed.data):
        out, _ = lstm(packed, memory)
        return out.data
    padded, length_Q = pad_packed_sequence(packed)
    out, _ = lstm(padded, memory)
    return pack_padded_sequence(out, length_Q).data


class LearnerThreads:
    """How many threads learn: one for each core, at most 4.

    Threads wait for each other many times in an update, so one that has lost its core to another
    program holds all of them up. Then one thread alone is faster. So after an update in which the
    main thread had to wait for its core for a tenth of the time, one thread makes the next 10
    updates. (The run's own workers also use the cores while they finish their last steps, but for
    less than a tenth of the time.) With GOMP_SPINCOUNT=1000, a thread that waits for another one
    soon sleeps, instead of using its core in a busy loop. Otherwise, the first such update could
    take minutes.
    """

    def __init__(self, options):
        self.options = options
        self.single = 0  # how many of the next updates one thread makes

    @contextlib.contextmanager
    def chosen(self):
        """Around an update: set the number of threads, and see whether they had their cores."""
        threads = self.options.learner_threads
        if threads == "auto":
            threads = 1 if self.single else min(4, count_cores())
        torch.set_num_threads(threads)
        began_at = time.perf_counter()
        delay_before_sec = run_delay_sec()
        yield
        waited_sec = run_delay_sec() - delay_before_sec
        self.single = max(0, self.single - 1)
        if waited_sec > 0.1 * (time.perf_counter() - began_at):
            self.single = CROWDED_UPDATES


def run_delay_sec():
    """Seconds for which this thread was ready to run but waited for a core. (Linux counts them.)"""
    try:
        return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9
    except OSError:
        return 0.0


def tune_malloc():
    """Tell glibc not to give freed memory back to the kernel. Otherwise learning takes 1.1 times as
    long on a CPU: activations come and go with every mini-batch, and new memory costs a page fault
    for every 4 KiB. Also limit the cache of oneDNN, which computes the LSTM on a CPU, and generates
    code for each size of a mini-batch. It keeps the code of the last 64 sizes (by default 1,024,
    which take about a gigabyte)."""
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "64")
    trim_threshold = -1
    mmap_threshold = -3
    with contextlib.suppress(OSError, AttributeError):  # another C library has no such function
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(mmap_threshold, 1 << 25)  # glibc's maximum
        mallopt(trim_threshold, 1 << 30)


# ---------------------------------------------------------------- The command line and its checks
# Checks all options before anything starts, and reports a bad one in one line. Also loads the code
# that is named in four options, the *doors*: --env-id with its arguments, --wrappers, --policy,
# --extensions. `find` finds it. The lesson calls `check_options` and `build`.

ALIASES = {
    "pointnav": "notebooks.environments.pointnav:PointNav-v0",
    "habitat": "notebooks.environments.habitat:Habitat-v0",
    "resnet18": "notebooks.extensions.networks:ResNet18",
    "resnet18_plain": "notebooks.extensions.networks:ResNet18Plain",
    "resnet50": "notebooks.extensions.networks:ResNet50",
    "se_resnext50": "notebooks.extensions.networks:SEResNeXt50",
    "se_resnext101": "notebooks.extensions.networks:SEResNeXt101",
    "controller": "notebooks.extensions.controller:NeuralController",
    "overlap": "notebooks.extensions.overlap:Overlap",
    "async": "notebooks.extensions.overlap:Async",
    "keep": "notebooks.extensions.series:Keep",
    "trace": "notebooks.extensions.trace:Trace",
    "from_habitat": "notebooks.extensions.from_habitat:HabitatBaselines",
    "latency": "notebooks.extensions.wrappers:Latency",
    "action_delay": "notebooks.extensions.wrappers:ActionDelay",
    "resize": "notebooks.extensions.wrappers:Resize",
    "hide": "notebooks.extensions.wrappers:Hide",
    "transfer": "notebooks.extensions.transfer:Transfer",
}


def read_value(text):
    """A Python literal, or `true`, `false`, `null` as other languages write them; else the text
    itself.

    >>> [read_value(text) for text in ("64", "(64, 64)", "None", "depth", "false")]
    [64, (64, 64), None, 'depth', False]
    """
    words = {"true": True, "false": False, "null": None}
    if text in words:
        return words[text]
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
        arguments[key.strip()] = read_value(value)
    return arguments


def find(text, option):
    """The thing that `module:name(key=value, ...)` names, and the arguments in its brackets.

    Imports the module, and returns its attribute of that name. For --env-id, the module registers
    its environments, and Gymnasium's specification of the id is returned. Without a module,
    Gymnasium must know the id. Raises UserError.

    >>> find("math:prod(start=2, name=a/b.pt)", "--policy")
    (<built-in function prod>, {'start': 2, 'name': 'a/b.pt'})
    """
    short, bracket, rest = text.partition("(")
    path = ALIASES.get(short, short)
    module, _, name = path.rpartition(":")
    try:
        advice = "must be MODULE:NAME"
        if option == "--env-id":
            advice = "write package:Id-v0 for an environment of a package; if your own program"
            advice += " registers it, use --num-workers 0"
        home = importlib.import_module(module) if module else None
        found = gym.spec(name) if option == "--env-id" else getattr(home, name)
    except (Exception, SystemExit) as error:  # whatever the module's own code raises
        reason = first_line(error)
        if isinstance(error, ModuleNotFoundError):
            advice += "; a file in this folder is found with PYTHONPATH=. before the command"
        raise UserError(f"{option} {text} cannot be found ({reason}): {advice}") from None
    if not bracket:
        return found, {}
    if option == "--env-id":
        raise UserError(f"{option} {text}: give arguments by --env-kwargs KEY=VALUE ...")
    if not re.fullmatch(r"\w+ *=.*\)", rest):
        raise UserError(f"{option} {text}: must be {short}(KEY=VALUE, ...)")
    # a comma separates arguments where another KEY= follows
    return found, read_arguments(re.split(r", *(?=\w+ *=)", rest[:-1]))


def load(text, option):
    """The thing that a string names (`find`), with its arguments bound to it. Raises UserError.

    >>> load("math:prod(start=2)", "--policy")([3, 4])
    24
    """
    found, arguments = find(text, option)
    if not arguments:
        return found
    bound = functools.partial(found, **arguments)
    try:
        inspect.signature(bound)  # raises for an argument that it does not take
    except (TypeError, ValueError):
        takes = f"{found.__name__}{inspect.signature(found)}"
        raise UserError(f"{option} {text}: takes other arguments, it is {takes}") from None
    return bound


def extend(run_class, options):
    """The class of a run, with all --extensions. Each is a subclass of `Run`, and its `super()` is
    the extension before it. Arguments in brackets set attributes of the class, which the class must
    annotate. Raises UserError."""
    for text in options.extensions:
        extension, arguments = find(text, "--extensions")
        if not inspect.isclass(extension) or not issubclass(extension, Run):
            raise UserError(f"--extensions {text}: must be a subclass of ver_ppo.Run")
        takes = list(inspect.get_annotations(extension))
        unknown = [name for name in arguments if name not in takes]
        if unknown:
            raise UserError(f"--extensions {text}: there is no {unknown[0]}, it takes {takes}")
        try:
            # as `class NAME(extension, run_class)` with these attributes
            run_class = type(run_class.__name__, (extension, run_class), arguments)
        except TypeError:
            reason = "is there twice, or must come earlier"
            raise UserError(f"--extensions {text}: {reason}") from None
    return run_class


def make_policy(spec, options):
    """The network that --policy names, in evaluation mode. Only `Run.update` switches to training
    mode, for the update. Raises UserError."""
    return load(options.policy, "--policy")(spec, options).eval()


def build(options):
    """The `EnvSpec` of the environment, and a new policy on its device. Raises UserError."""
    device = choose_device(options)
    options = replace(options, device=str(device))
    # a misspelled name is refused before a process starts
    load(options.env_id, "--env-id")
    for wrapper in options.wrappers:
        load(wrapper, "--wrappers")
    load(options.policy, "--policy")
    spec = describe_env(options)
    torch.manual_seed(options.seed)
    return spec, make_policy(spec, options).to(device)


def launch(options, run_class=Run):
    """Train as the options say. Returns the run folder. Raises UserError."""
    extended_class = extend(run_class, options)
    # absolute, because an environment in this process may change the current folder
    paths = {"runs_dir": os.path.abspath(options.runs_dir)}
    if options.resume:
        paths["resume"] = os.path.abspath(options.resume)
    options = replace(options, **paths)
    with contextlib.closing(extended_class(options)) as run:
        train(run)
    return run.folder.path


def refuse(options, name, message):
    """Raise UserError for an option."""
    raise UserError(f"--{name.replace('_', '-')} {getattr(options, name)}: {message}")


POSITIVE = "total_timesteps", "num_envs", "num_steps", "num_minibatches", "update_epochs"
POSITIVE += "clip_coef", "checkpoint_interval", "learner_threads", "learning_rate"
POSITIVE += "max_grad_norm", "env_timeout", "hidden_size"
NOT_NEGATIVE = "seed", "num_workers", "eval_episodes", "max_worker_restarts", "ent_coef"
NOT_NEGATIVE += "vf_coef", "lstm_layers"
FRACTIONS = "gamma", "gae_lambda"


def check_options(options):
    """Raise UserError for an option that cannot work, and say how to fix it."""
    values = {name: value for name, value in vars(options).items() if value != "auto"}
    for name in values.keys() & POSITIVE:
        if not 0 < values[name] < math.inf:
            refuse(options, name, "must be a positive number")
    for name in values.keys() & NOT_NEGATIVE:
        if not 0 <= values[name] < 2**63:
            refuse(options, name, "must be 0 or more")
    for name in FRACTIONS:
        if not 0 <= values[name] <= 1:
            refuse(options, name, "must be within 0..1")
    most_envs = select.PIPE_BUF // 4
    if options.num_envs > most_envs:
        reason = "the numbers of all environments must fit into one write to a pipe"
        refuse(options, "num_envs", f"must be at most {most_envs}: {reason}")
    most_workers = min(options.num_envs, MAX_WORKERS)
    if values.get("num_workers", 0) > most_workers:
        refuse(options, "num_workers", f"must be within 0..{most_workers}")
    if options.num_minibatches > options.rollout_steps:
        steps = f"--num-steps x --num-envs = {options.rollout_steps}"
        refuse(options, "num_minibatches", f"must be at most {steps}")


def choose_device(options):
    """The torch device that the options name, with its number. Raises UserError if this machine
    does not have it."""
    name = options.device
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        one = torch.ones(1, device=name)
        one.item()  # raises for a device without memory
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        refuse(options, "device", f"cannot be used ({reason}): try --device cpu")
    return one.device


DOORS = {"env_id": gym.Env, "wrappers": gym.Wrapper, "policy": nn.Module, "extensions": Run}


def check_foreign(text, name):
    """Raise UserError if a name in a checkpoint is not one of this project's short names, not a
    class of the expected kind, and not the id of a Gymnasium environment.

    To learn the kind, the module is imported. So it must not be one of Python's own modules, some
    of which do something when they are imported.
    """
    option = "--" + name.replace("_", "-")
    if not isinstance(text, str) or not text.isprintable():
        raise UserError(f"{option} {text!a} comes from a file, and names nothing")
    short, _, _ = text.partition("(")
    module, colon, _ = short.rpartition(":")
    if short in ALIASES or (name == "env_id" and not colon):
        return
    found = None  # stays None for Python's own modules: they are not imported, and refused below
    parts = module.split(".")
    if parts[0] not in {*sys.stdlib_module_names, "test"} and "__main__" not in parts:
        found, _ = find(text, option)
    known = isinstance(found, gym.envs.registration.EnvSpec)  # Gymnasium's: a registered name
    if not known and not (inspect.isclass(found) and issubclass(found, DOORS[name])):
        kind = DOORS[name].__name__
        advice = f"if you trust it, give {option} on the command line"
        raise UserError(f"{option} {text!a} comes from a file, and is no {kind}: {advice}")


def unchecked(kind):
    """The same options, but not checked yet: values from a checkpoint may still replace them."""
    own = {"__post_init__": lambda self: None, "__doc__": kind.__doc__}
    return dataclass(frozen=True)(type(kind.__name__, (kind,), own))


def names_environment(argv):
    """Whether a command line has --env-id."""
    return any(re.match("--env[-_]id\\b", word) for word in argv)


def parse_options(argv, kind=Options):
    """Options from the command line. With --resume or --checkpoint (a run folder or its checkpoint
    file), options that are not on the command line are taken from that run. Raises UserError."""
    # the command line alone; if there is a file, this is only for comparison
    given = tyro.cli(unchecked(kind), args=argv)
    if not (given.checkpoint or given.resume):
        return kind(**asdict(given))
    if given.checkpoint and given.resume:
        refuse(given, "checkpoint", "give either this (to evaluate) or --resume (to continue)")
    path = Path(given.checkpoint or given.resume)
    if path.is_dir():
        path = path / "checkpoint.pt"
    if given.resume and path.exists() and path.name != "checkpoint.pt":
        raise UserError(f"--resume {given.resume}: give a run folder")
    if given.resume and not path.exists():
        # a misspelled folder is not a new run, and commands that continue one rarely have --env-id
        if not names_environment(argv):
            advice = "give --env-id, too, to begin a run there"
            raise UserError(f"there is no checkpoint {path}: {advice}")
        return kind(**asdict(given))
    # absolute, as `launch` makes folders: an environment in this process may change the current one
    checkpoint = {"checkpoint": str(path.absolute())}
    place = checkpoint if given.checkpoint else {"resume": str(path.parent)}
    names = {field.name for field in fields(kind)} - {"device", "resume", "checkpoint"}
    try:
        saved = load_checkpoint(path)["options"]
        saved = {name: value for name, value in saved.items() if name in names}
        # with the file's options as defaults
        options = replace(tyro.cli(kind, args=argv, default=kind(**saved)), **place)
        doors = {name: getattr(options, name) for name in DOORS}
        doors = {k: [text] if isinstance(text, str) else list(text) for k, text in doors.items()}
    except (KeyError, AttributeError, TypeError):
        raise UserError(f"the options in the checkpoint {path} cannot be read") from None
    named = [text for texts in doors.values() for text in texts]
    print(f"{path} names code that is imported: {ascii(named)[1:-1]}")
    for name, texts in doors.items():
        # the command line or the default says the same as the file: this is trusted
        if getattr(options, name) == getattr(given, name):
            continue
        for text in texts:
            check_foreign(text, name)
    for name, value in saved.items():
        if getattr(options, name) != value:
            option = name.replace("_", "-")
            print(f"--{option}: {getattr(options, name)!a} (the checkpoint has {value!a})")
    return options


def main(argv=None, kind=Options, launch=launch):
    """Run a command line. Returns the exit status: 0 done, 1 failed while running, 2 refused, 128
    plus the number of a signal that stopped it."""
    program = Path(sys.modules[kind.__module__].__file__).name
    try:
        options = parse_options(sys.argv[1:] if argv is None else argv, kind)
        if options.checkpoint:
            spec, policy = build(options)
            load_policy(policy, options.checkpoint)
            report_evaluation(policy, spec, options)
        else:
            launch(options)
        return 0
    except UserError as error:
        # a file may have chosen a part of this text, and must not control the terminal
        text = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in str(error))
        print(f"{program}: {text}", file=sys.stderr)
        return 2
    except Interrupted as error:
        return 128 + error.args[0]
    except KeyboardInterrupt:  # outside of training
        return 128 + signal.SIGINT
    except (EnvironmentFailure, FloatingPointError, OSError) as error:
        print(f"{program}: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    # otherwise all classes would exist twice, in `__main__` and in `ver_ppo`, where workers look
    from ver_ppo import main

    sys.exit(main())
