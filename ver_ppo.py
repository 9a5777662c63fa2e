"""VER: train a recurrent policy with Variable Experience Rollout and PPO (Wijmans et al. 2022).

Simulators are slow and uneven, and a trainer that steps N of them in lock-step always waits for the
slowest. VER does not wait: the environments that have answered form the next inference batch. A
rollout ends when S = T x N steps are complete (--num-steps times --num-envs), no matter how many
each environment contributed. Some environments are then still computing a step, which goes into a
later rollout, usually the next. Each environment computes at most one step at a time. So in a
rollout, an older policy chose at most one action of each environment. (Some --extensions allow
more.) The uneven experience is cut into mini-batches of equal size for a recurrent network, and
steps from fast environments are down-weighted.

    python ver_ppo.py --env-id pointnav            trains, shows its progress, evaluates
    python ver_ppo.py --help                       explains every option
    torchrun --nproc-per-node 8 ver_multigpu.py    the same on eight GPUs: it imports this file

The processes and what passes between them (section 2.1, figure 2 of the paper):

      environment worker 0 ... W-1                     main process: collects and learns in turn
    +-----------------------------+                  +-------------------------------------------+
    | read the action in the row  | <== env numbers  | act: choose actions, write them into rows |
    | step that environment       |                  |                                           |
    | write the answer to the row | env numbers ==>  | await_answers: which rows have answers?   |
    +-----------------------------+                  | complete_steps: move them to the rollout  |
              ^ |                                    |   ... until S steps are complete, then    |
      actions | | answers                            | add_advantages, mini-batches, PPO         |
              | v                                    +-------------------------------------------+
    [ EnvIO, shared memory: ] -- observation ---> [ pending, a row    ] --+
    [ a row per environment ] <-- action -------- [ per environment   ]   +--> [ rollout: S steps ]
               |                                                          |
               +-- reward, whether the episode ended ---------------------+

Environment e has row e. A worker steps its environments one after another. Only the numbers of
environments travel through pipes: one pipe to each worker, and one pipe back that all workers
share. Actions, observations and rewards stay in shared memory.

A *step* begins when `act` chooses an action and sends it. From then on it is *in flight*, in its
environment's row of `pending`, until the main process takes the environment's answer: reward,
whether the episode ended, next observation. That completes the step, which moves to the next free
row of the rollout. Then the environment usually gets its next action at once. If the rollout needs
no more of its steps, the environment gets no action, and is *idle* until the next rollout. The
*version* of a policy is the number of updates (one for each rollout) before it. A *segment* is
everything that one environment gave to a rollout, in time order. A segment is cut where an episode
begins, and the parts are *sequences*. If the end of a mini-batch cuts a sequence, each piece is a
sequence of its own.

The last letters of a name are its first dimensions: action_BA is B x A, log_prob_B has B numbers,
and state_B is B recurrent states (for an LSTM of L layers, 2L x H numbers each). The main letters
are N environments, S steps of a rollout, Q sequences, M steps of a mini-batch and B any batch
(env_B: the numbers of B environments). The others are H hidden units, L layers, F features, C
channels, and A dimensions of an action (1 for a simple choice).

The file down to "End of the lesson" is VER: the training loop, tables, collecting, returns,
mini-batches, PPO. The lesson takes these things for granted:

    run                  has the methods that `train` calls
    spec                 what an observation and an action consist of
    workers.send         lets these environments take the actions in their rows
    workers.receive      waits a number of seconds at most, and returns the numbers of the
                         environments that have answered
    policy.step          one step of B environments: the distributions of their next actions (with
                         one log-probability for each environment), the values, and the next
                         recurrent states
    policy.sequences     distributions and values for all steps of a mini-batch, and what its
                         encoders and its core put out
    policy.critic        computes values. `rescale` returns the *scale*, by which errors are
                         divided (`ppo_update` explains it)
    policy.log_ent_coef  the logarithm of the entropy coefficient
    policy.state_shape   the shape of one recurrent state
    policy.auxiliary_loss
                         0, unless the policy has another loss
    policy.keep_bounds   does nothing, unless a weight of the policy has bounds
    optimizer            Adam; its learning rate decays

At first, every environment starts without an action, and its first observation is its answer. An
environment that fails is started again. Its first observation is then the answer to the step in
flight or, if it was idle, to its next action.

After the lesson come the processes that run environments, the policy, the run with its files, and
the command line. Simulators, other networks, and other ways to collect are loaded by name, from
notebooks/ or from files of your own.

Papers: VER; DD-PPO (Wijmans et al. 2020); Sample Factory (Petrenko et al. 2020); The 37
implementation details of PPO (Huang et al. 2022); Time limits in RL (Pardo et al. 2018);
Implementation matters in deep RL (Engstrom et al. 2020); PopArt (van Hasselt et al. 2016).
"""

import ast
import contextlib
import fcntl
import functools
import importlib
import inspect
import json
import math
import multiprocessing.forkserver
import os
import random
import re
import resource
import select
import shlex
import signal
import sys
import threading
import time
import traceback
from array import array
from collections import deque
from dataclasses import asdict, dataclass, field, replace
from io import BytesIO
from pathlib import Path
from typing import Literal

# Set these before torch is imported. With the first, a waiting thread soon goes to sleep, instead
# of using its core in a busy loop. (Beside other programs, an update could take minutes otherwise.)
# With the second, oneDNN, which generates code for each size of a mini-batch, keeps the code of the
# last 64 sizes. (By default it keeps 1,024, about a gigabyte.)
os.environ.setdefault("GOMP_SPINCOUNT", "1000")
os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "64")

import gymnasium as gym
import numpy as np
import torch
import torch.multiprocessing as mp
import tyro
from gymnasium import spaces
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
    # processes among which the environments are divided; 0: all are in the main process (for
    # debuggers, and for exact repetition); auto: about one per core, or more if steps mostly wait
    # (it times a few)
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
    update_epochs: int = 2  # epochs: passes over each rollout
    clip_coef: float = 0.2  # PPO's clipping range of the probability ratio
    # bring each rollout's advantages to mean 0 and deviation 1; otherwise, divide them by the
    # running root mean square of the returns
    norm_adv: bool = True
    ent_coef: float = 5e-3  # entropy coefficient (fixed, unless --target-entropy is given)
    vf_coef: float = 0.5  # weight of the value loss
    max_grad_norm: float = 0.5  # larger gradients are scaled down to this norm

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
    # weights), trace(file=...) (writes a timeline), check (checks every invariant of every rollout)
    extensions: tuple[str, ...] = ()

    device: str = "auto"  # `cpu`, `cuda`, `cuda:1`, ...; auto: CUDA where there is a GPU
    # CPU threads while learning; auto: one per core, at most 4. (Beside other programs that use the
    # cores, 1 can be faster)
    learner_threads: int | Literal["auto"] = "auto"
    # learn the entropy coefficient so that the entropy stays above this (the VER paper uses 0 for
    # continuous actions)
    target_entropy: float | None = None

    eval_episodes: int = 200  # episodes of the evaluation (0: none)
    greedy: bool = False  # evaluate with the most probable action instead of a sampled one
    checkpoint: str | None = None  # run folder or checkpoint file to evaluate, instead of training

    runs_dir: str = "runs"  # where run folders are made
    exp_name: str = "ver"  # in the folder's name: {runs-dir}/{env-id}__{exp-name}__{seed}__{time}
    # about how many steps lie between checkpoints (with many GPUs, steps of each); the last one is
    # always written
    checkpoint_interval: int = 200_000
    # continue the run in this folder, which must exist. Its saved options are used, except those
    # that you give on the command line. If it has no checkpoint yet, a new run begins in it
    resume: str | None = None
    # seconds that a step or a reset may take; then its worker is restarted
    env_timeout: float = 300.0
    max_worker_restarts: int = 10  # training stops after more restarts than this within an hour

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

    The only training loop there is. `run` (after the lesson) holds the policy, its optimizer, the
    collector and the counters. The comments name the function of the lesson behind a method.
    """
    try:
        run.start()  # the environments
        while run.step < run.options.total_timesteps:
            rollout = run.collect()  # filled by Collector.collect; a signal raises Interrupted
            # add_advantages (with many GPUs, older steps also fill up a rollout that ended early)
            to_learn = run.advantages(rollout)
            logs = run.update(to_learn)  # ppo_update
            run.log(rollout, logs)  # also counts run.step and run.version
    finally:
        run.stop()  # ends the environments and saves, also after a signal or an error
    run.evaluate()


# ----------------------------------------------------------------------------------------- Tables


class Table:
    """Named columns of numbers: `table["reward"]` is a column, a numpy array of all rows. A column
    may have fields, which are columns, too: `table["obs"]["depth"]`. All columns lie in one block
    of memory, which processes can share. (A first reading can skip the methods.)
    """

    def __init__(self, num_rows, columns):
        self.dtype = np.dtype(columns, align=True)
        self.memory = torch.zeros(num_rows * self.dtype.itemsize, dtype=torch.uint8)

    def share(self):
        """Move the block to shared memory: a process to which this table is sent then sees the same
        numbers. Returns the table. An array made before still shows the old block, so it is
        dropped: `records` makes a new one."""
        self.memory.share_memory_()
        vars(self).pop("records", None)
        return self

    @functools.cached_property
    def records(self):
        """The memory as a numpy array with one record for each row."""
        return self.memory.numpy().view(self.dtype)

    def __getitem__(self, column):
        return self.records[column]

    def __getstate__(self):  # all but `records`: pickling an array would copy its numbers
        return {name: value for name, value in vars(self).items() if name != "records"}


class EnvIO(Table):
    """One row for each environment, in shared memory: the action sent last, and the last answer.

    At first, a row belongs to the worker. When the worker sends the row's number, the row belongs
    to the process that collects, until that process sends the number back. So no lock is needed:
    nobody reads a row while it is being written. When an episode ends, the worker resets the
    environment at once: the same answer has the end of one episode and the start of the next.
    """

    def __init__(self, spec, num_envs, episodes_before=0):
        obs = np.dtype(spec.obs_fields, align=True)
        columns = [
            ("obs", obs),  # the current observation: a record with a field for each part
            ("final_obs", obs),  # the last one of an episode: after the reset, `obs` is another
            ("action", spec.action_dtype, (spec.action_dims,)),  # sent last
            ("first", bool),  # `obs` begins an episode
            ("reward", np.float32),
            ("terminated", bool),
            ("truncated", bool),  # cut by a time limit; False if also terminated
            # this answer is a start (the first one, or after a failure): `reward`, `terminated` and
            # `truncated` mean nothing. If a step was in flight, it is lost
            ("started", bool),
            ("episode", int),  # number of the episode that `obs` belongs to
            ("episode_stats", float, (len(spec.episode_columns),)),  # of the last whole episode
            ("began_at", float),  # when work on the answer began (perf_counter) ...
            ("step_sec", float),  # ... and how long it took: a step, reset included, or a start
        ]
        super().__init__(num_envs, columns)
        self.share()
        self["episode"][:] = episodes_before


class Steps(Table):
    """A table of steps."""

    def __init__(self, spec, num_rows, state_shape):
        action = spec.action_dtype, (spec.action_dims,)
        columns = [
            # known when the action is sent
            ("obs", np.dtype(spec.obs_fields, align=True)),  # a record with a field for each part
            ("state", np.float32, state_shape),  # the recurrent state before the step
            ("env", int),
            ("version", int),  # of the policy that chose the action
            ("first", bool),  # first step of an episode: it began with a recurrent state of zeros
            ("prev_action", *action),
            ("action", *action),
            ("log_prob", np.float32),
            ("value", np.float32),
            ("inference_at", float),  # when its inference began (time.perf_counter) ...
            ("sent_at", float),  # ... and its action was sent
            # from the environment's answer, when the step moves to a rollout (unused in `pending`)
            ("reward", np.float32),  # if truncated or lost, changed by `complete_steps`
            ("done", bool),  # last step of an episode, or lost
            ("lost", bool),  # the environment failed: the step has no outcome
            # of the whole episode; valid only where `done` and not `lost`
            ("episode_stats", float, (len(spec.episode_columns),)),
            ("began_at", float),  # when the simulator started on the step ...
            ("step_sec", float),  # ... and how long it took
            # for learning
            ("segment", int),  # here the environment's number; extensions may use others
            ("advantage", np.float32),
            ("norm_advantage", np.float32),  # the same, normalized
            ("returns", np.float32),  # targets of the value
            ("weight", np.float32),  # in the loss
        ]
        super().__init__(num_rows, columns)


class Rollout(Steps):
    """Room for S steps, `capacity`. The first `rows` rows hold complete steps, in the order of
    their completion (VER section 2.2)."""

    def __init__(self, spec, capacity, num_envs, state_shape):
        super().__init__(spec, capacity, state_shape)
        self.capacity = capacity
        self.num_envs = num_envs
        self.rows = 0
        # V(observation after a segment's last step); here each environment has one segment
        self.bootstrap = np.zeros(num_envs, np.float32)
        self.started_at = 0.0  # when collecting started (time.perf_counter) ...
        self.ended_at = 0.0  # ... and ended,
        self.waited_sec = 0.0  # and how long it waited for answers

    @property
    def complete(self):
        """The records of the complete steps: a view, so what you write there is in it."""
        return self.records[: self.rows]


INPUTS = "obs", "prev_action", "first", "state"  # what `Policy.step` reads, in this order


def to_device(records, names, device):
    """These columns of records as tensors on this device, by name. A column with fields becomes a
    dictionary of tensors. On a CPU, a tensor shares the column's memory."""
    tensors = {}
    for name in names:
        column = records[name]
        if fields := column.dtype.names:
            tensors[name] = to_device(column, fields, device)
        else:
            tensors[name] = torch.from_numpy(column).to(device)
    return tensors


# ------------------------------------------------------------------------------------- Collecting


class Collector:
    """Collects rollouts with a policy, and remembers what passes from one rollout to the next.

    `enough` is a function of the number of complete steps. It says whether a rollout ends early:
    because a signal came or, in ver_multigpu.py, because other processes have waited long enough.
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
        self.pending = Steps(spec, num_envs, policy.state_shape)
        self.pending["env"][:] = range(num_envs)
        self.pending["segment"][:] = range(num_envs)
        self.in_flight_N = np.zeros(num_envs, bool)
        # environments whose answer is here and not taken yet, in order of arrival: their steps, if
        # any, still count as in flight
        self.arrived = []
        self.idle = np.zeros(0, int)  # environments whose answer was taken, without a new action
        # the state that `policy.step` returned with each environment's latest action
        self.state_N = np.zeros((num_envs, *policy.state_shape), np.float32)
        self.given_N = np.zeros(num_envs, int)  # steps that each has given to this rollout
        self.version = 0  # of the policy; `Run.collect` sets it before each rollout
        self.greedy = False  # take the most probable actions (an evaluation may)
        self.waited_sec = 0.0

    @torch.inference_mode()
    def collect(self, rollout):
        """Collect S steps, from whichever environments deliver them (VER section 2.2); with `nover`
        and `sync`, T from each. A rollout never has more than S. Only `enough` can end the rollout
        with fewer.

        In each round: take the environments that have answered, complete their steps, choose and
        send their next actions. In two cases an environment gets no action, and becomes idle: the
        rollout ended in this round, or with `nover` and `sync` the environment has given its T
        steps. The policy of the next rollout chooses its action. Steps in flight at the end stay
        pending.
        """
        rollout.started_at = time.perf_counter()
        rollout.rows = 0
        self.given_N[:] = 0
        self.waited_sec = 0.0
        self.act(self.idle)  # before the first rollout all are starting, and none is idle
        self.idle = np.zeros(0, int)
        ended = self.has_ended(rollout)
        while not ended:
            env_B = self.await_answers(room=rollout.capacity - rollout.rows)
            stepped_B = env_B[self.in_flight_N[env_B]]  # the others have just started: no step yet
            row_B = rollout.rows + np.arange(len(stepped_B))
            self.complete_steps(rollout, stepped_B, row_B)
            rollout.rows += len(stepped_B)
            ended = self.has_ended(rollout)
            wanted_B = (self.given_N[env_B] < self.options.quota) & (not ended)
            self.act(env_B[wanted_B])
            self.idle = np.append(self.idle, env_B[~wanted_B])
        rollout.bootstrap[:] = self.bootstrap_values()
        rollout.ended_at = time.perf_counter()
        rollout.waited_sec = self.waited_sec

    def has_ended(self, rollout):
        """Whether the rollout ends here: it has S steps, or `enough` says so."""
        return rollout.rows == rollout.capacity or self.enough(rollout.rows)

    def await_answers(self, room):
        """Dynamic batching (VER section 2.1): take the environments that have answered, in order of
        arrival. Returns their numbers.

        At most `room` of them are taken; the steps of the others stay in flight. At least one
        answer is needed, and `sync` needs an answer from every environment. If there are too few,
        this function waits for more, at most 50 ms. If there are still too few, it takes none. Then
        `collect` asks `enough` whether to end the rollout, and otherwise calls this function again.
        """
        needed = self.options.num_envs if self.options.sampler == "sync" else 1
        began_at = time.perf_counter()
        # look for new answers, even if some are left that had no room: this makes batches larger
        self.arrived += self.workers.receive(0)
        if len(self.arrived) < needed:
            self.arrived += self.workers.receive(0.05)
        self.waited_sec += time.perf_counter() - began_at
        if len(self.arrived) < needed:
            return np.zeros(0, int)
        if self.options.sampler == "sync":
            self.arrived.sort()  # all are here: their order need not depend on chance
        env_B = np.array(self.arrived[:room], int)
        self.arrived = self.arrived[room:]
        return env_B

    def observe(self, env_B, obs, first_B):
        """The inputs of these environments' next steps, in copies of their rows of `pending`.

        Those rows still hold the previous step, so `action` there is the previous action. Replaced
        in the copies: the observation, whether an episode begins, the previous action, and the
        recurrent state (zero where an episode begins). `act` writes the copies back, and `values`
        drops them. `obs` is a whole column of EnvIO, with N rows; `first_B` has B entries."""
        step_B = self.pending.records.take(env_B)
        step_B["obs"] = obs[env_B]
        step_B["first"] = first_B
        step_B["prev_action"] = step_B["action"]  # where an episode begins, the policy ignores it
        step_B["state"] = self.state_N[env_B]
        step_B["state"][first_B] = 0.0
        return step_B

    def infer(self, step_B):
        """`Policy.step` of these records. INPUTS are in the order of its arguments."""
        return self.policy.step(*to_device(step_B, INPUTS, self.device).values())

    def act(self, env_B):
        """Choose the next actions of these environments, remember the steps as pending, and send
        the actions."""
        if not len(env_B):
            return
        io = self.io
        inference_at = time.perf_counter()
        step_B = self.observe(env_B, io["obs"], io["first"][env_B])
        distribution, value_B, after_B = self.infer(step_B)
        action_BA = distribution.mode if self.greedy else distribution.sample()
        log_prob_B = distribution.log_prob(action_BA)
        # one copy from the device (a GPU copies slowly), all as float32: discrete actions are
        # exact up to 2**24
        numbers = torch.column_stack([log_prob_B, value_B, action_BA.float(), after_B.flatten(1)])
        numbers = numbers.cpu().numpy()
        state_at = 2 + action_BA.shape[1]  # the first column of the recurrent state

        step_B["log_prob"] = numbers[:, 0]
        step_B["value"] = numbers[:, 1]
        step_B["action"] = numbers[:, 2:state_at]
        step_B["version"] = self.version
        step_B["inference_at"] = inference_at
        step_B["sent_at"] = time.perf_counter()
        self.pending.records[env_B] = step_B
        self.state_N[env_B] = numbers[:, state_at:].reshape(after_B.shape)
        self.in_flight_N[env_B] = True
        io["action"][env_B] = step_B["action"]
        self.workers.send(env_B)

    def complete_steps(self, rollout, env_B, row_B):
        """The answers of these environments complete their pending steps, which move to the rows
        `row_B` of the rollout.

        A pending step may have been sent in an earlier rollout, by an older policy (VER section
        2.2). It keeps the action, log-probability, value and version that it was sent with, and
        counts for this rollout. PPO divides by that old probability. Nothing corrects the old value
        and the old recurrent state.

        A truncated episode would have continued. So the discounted value of the final observation
        is added to its last reward (Pardo et al. 2018). Then GAE can treat terminated and truncated
        episodes in the same way, and one column, `done`, is enough for both. The value is computed
        with the memory of that episode, which `state_N` still holds: `act` comes later.

        If the environment was started again, because its worker had failed, the step is *lost*: it
        has no outcome, and must teach nothing. So its reward becomes its predicted value V, and
        `done` is set. In `compute_advantages`, below, its advantage is then V + 0 - V = 0. The step
        before it finds V as the next value and 0 as the next advantage, as at the end of a rollout.
        """
        io = self.io
        step_B = self.pending.records.take(env_B)
        for column in ("reward", "episode_stats", "began_at", "step_sec"):
            step_B[column] = io[column][env_B]
        lost_B = io["started"][env_B]  # the failed process took the step with it
        step_B["lost"] = lost_B
        truncated_B = io["truncated"][env_B] & ~lost_B
        step_B["done"] = io["terminated"][env_B] | truncated_B | lost_B
        step_B["reward"][lost_B] = step_B["value"][lost_B]
        if truncated_B.any():
            first_B = np.zeros(truncated_B.sum(), bool)  # `final_obs` continues its episode
            value_B = self.values(env_B[truncated_B], io["final_obs"], first_B)
            step_B["reward"][truncated_B] += self.options.gamma * value_B
        rollout.records[row_B] = step_B
        self.given_N[env_B] += 1
        self.in_flight_N[env_B] = False

    def bootstrap_values(self):
        """The value of the observation after each environment's last complete step, N numbers.

        If its next step is in flight, that value was computed when the action was sent. For idle
        environments it is computed now, in one batch, before the policy learns. (If an environment
        gave no step to this rollout, its number is not used.)
        """
        value_N = self.pending["value"].copy()
        if len(self.idle):
            first_B = self.io["first"][self.idle]
            value_N[self.idle] = self.values(self.idle, self.io["obs"], first_B)
        return value_N

    def values(self, env_B, obs, first_B):
        """The policy's value of each environment's observation. Takes the arguments of `observe`.
        """
        _, value_B, _ = self.infer(self.observe(env_B, obs, first_B))
        return value_B.cpu().numpy()


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
    """Weights of steps, 1 at most, so that no environment counts for more than its fair share. VER
    section 4 describes them without a formula. Table A1 gives their maximum, 1, as "Max VER IS"
    (importance sampling).

    The fair share of each environment is S / N steps, T in a full rollout. If an environment gave K
    steps, each of them has the weight min(1, (S / N) / K). Slow environments are not weighted up,
    so the mean weight is at most 1. For a rollout that ended early, S is the number of steps that
    it has. A fair share is at least 1 step, so that single steps keep the weight 1 if there
    are fewer than N steps.

    >>> importance_weights(np.array([0, 0, 0, 0, 1, 2]), num_envs=3)
    array([0.5, 0.5, 0.5, 0.5, 1. , 1. ], dtype=float32)
    """
    given_N = np.bincount(env_S, minlength=num_envs)
    fair = max(1.0, len(env_S) / num_envs)  # steps of each
    weight_N = np.minimum(1.0, fair / np.maximum(given_N, 1))
    return weight_N.astype(np.float32)[env_S]


def add_advantages(rollout, options):
    """Write advantage, return and weight of every complete step into the rollout: GAE, with the
    values that were stored when the policy acted. A lost step has weight 0, so it has no
    gradient."""
    steps = rollout.complete
    steps["advantage"] = compute_advantages(
        steps["segment"],
        steps["reward"],
        steps["value"],
        steps["done"],
        rollout.bootstrap,
        options.gamma,
        options.gae_lambda,
    )
    steps["returns"] = steps["value"] + steps["advantage"]
    steps["weight"] = importance_weights(steps["env"], rollout.num_envs) * ~steps["lost"]


# -------------------------------------------------------------------------- Sequences and packing


def find_sequences(segment_S, first_S):
    """Cut every segment where an episode begins (VER section 2.2). Returns the rows of each
    sequence, in time order.

    >>> find_sequences(np.array([0, 1, 0, 1, 0]), np.array([False, True, True, False, False]))
    [array([0]), array([2, 4]), array([1, 3])]
    """
    order_S = np.argsort(segment_S, kind="stable")  # stable: keeps a segment's steps in order
    changes = np.diff(segment_S[order_S], prepend=-1) != 0  # -1: the first segment begins, too
    begins = np.flatnonzero(changes | first_S[order_S])  # positions in order_S; the first is 0
    return np.split(order_S, begins[1:])


def cut_minibatches(sequences, count):
    """Lay sequences end to end and cut them into `count` mini-batches of equal size (VER section
    2.2, figure 3B). A mini-batch is a list of sequences.

    A sequence that a cut splits continues in the next mini-batch, from the recurrent state that was
    stored with the first step after the cut. If the steps do not divide evenly, some mini-batches
    are a step longer. If there are fewer than `count` steps (the rollout ended early), each step is
    a mini-batch.

    >>> cut_minibatches([np.array([1, 3]), np.array([0, 2, 4, 5])], 2)
    [[array([1, 3]), array([0])], [array([2, 4, 5])]]
    """
    line = np.concatenate(sequences)
    ends = np.cumsum([len(sequence) for sequence in sequences])
    count = min(count, len(line))
    cuts = len(line) * np.arange(count + 1) // count
    minibatches = []
    for low, high in zip(cuts, cuts[1:]):
        inside = ends[(low < ends) & (ends < high)]  # ends of sequences between the two cuts
        minibatches.append(np.split(line[low:high], inside - low))
    return minibatches


def pack(sequences):
    """Arrange the steps of these sequences as a PackedSequence (VER section 2.2, figure 3C).

    Three sequences, longest first:

        a b c d
        e f
        g

    A PackedSequence reads them column by column: a e g | b f | c | d, batch sizes 3 2 1 1. Returns
    the rows in this order, and the batch sizes: how many sequences are still running at each time.
    (`LSTM.sequences`, after the lesson, runs the LSTM over them. On a CPU, it pads them for that.)

    >>> letters = np.array(list("abcdefg"))
    >>> row_M, batch_sizes = pack([np.array([4, 5]), np.array([0, 1, 2, 3]), np.array([6])])
    >>> " ".join(letters[row_M]), batch_sizes.tolist()
    ('a e g b f c d', [3, 2, 1, 1])
    """
    tensors = [torch.from_numpy(sequence) for sequence in sequences]
    # what is packed are row numbers, the longest sequence first
    packed = pack_sequence(tensors, enforce_sorted=False)
    return packed.data, packed.batch_sizes


# -------------------------------------------------------------------------------------------- PPO
# `average(tensors)` averages tensors over all processes that learn together, in place. For a single
# process it does nothing.


def ppo_update(policy, optimizer, rollout, options, average=lambda tensors: None):
    """Learn from a rollout in --update-epochs epochs. Each epoch shuffles the sequences, cuts them
    into --num-minibatches mini-batches, and makes an optimizer step on each. Returns the mean of
    each logged number.
    """
    # one number, the running root mean square of the returns. The critic predicts returns in their
    # own units, and `ppo_loss` divides its errors by the scale, so that rewards of any size are
    # learned equally well. `rescale` changes no value, except at first, from 0. (This is not a part
    # of VER)
    scale = policy.critic.rescale(rollout.complete["returns"], average)
    normalize_advantages(rollout, scale, options, average)
    steps = rollout.complete
    # without a memory (the state is empty), their order does not matter: each step is a sequence
    # of its own, and a mini-batch mixes steps of the whole rollout
    sequences = find_sequences(steps["segment"], steps["first"] | (0 in policy.state_shape))
    columns = to_device(steps, LEARNED, next(policy.parameters()).device)
    logs = []
    for _ in range(options.update_epochs):
        shuffled = [sequences[q] for q in torch.randperm(len(sequences)).tolist()]
        for minibatch in cut_minibatches(shuffled, options.num_minibatches):
            batch = make_batch(columns, minibatch)
            batch["scale"] = scale
            logs.append(minibatch_step(policy, optimizer, batch, options, average))
    return mean_logs(logs)


def normalize_advantages(rollout, scale, options, average):
    """Write the advantages that PPO learns from.

    With --norm-adv, they have mean 0 and deviation 1 over all processes that learn together.
    (Each process counts equally. The importance weights play no part here.)
    Otherwise they are divided by `scale` (`ppo_update`).
    """
    steps = rollout.complete
    advantage_S = steps["advantage"].astype(float)
    mean = 0.0
    divisor = scale
    if options.norm_adv:
        moments = torch.tensor([advantage_S.mean(), (advantage_S**2).mean()], dtype=torch.float64)
        average([moments])
        mean, square = moments.tolist()
        divisor = math.sqrt(max(1e-16, square - mean**2))
    steps["norm_advantage"] = (advantage_S - mean) / divisor


PER_STEP = "prev_action", "action", "first", "log_prob", "norm_advantage", "returns", "weight"
LEARNED = "obs", "state", *PER_STEP  # the columns of a rollout from which PPO learns


def make_batch(columns, sequences):
    """A mini-batch: the packed steps of these sequences, the state before each sequence, and
    `batch_sizes`. `columns` are the LEARNED ones of a rollout, as tensors on the policy's device.
    `row` holds each step's row of the rollout, for extensions."""
    row_M, batch_sizes = pack(sequences)
    index_M = row_M.to(columns["state"].device)
    batch = {name: columns[name].index_select(0, index_M) for name in PER_STEP}
    batch["obs"] = {key: part.index_select(0, index_M) for key, part in columns["obs"].items()}
    # the first Q steps (the first column of `pack`) begin the Q sequences
    batch["state"] = columns["state"].index_select(0, index_M[: batch_sizes[0]])
    batch["batch_sizes"] = batch_sizes
    batch["row"] = row_M.numpy()
    return batch


def minibatch_step(policy, optimizer, batch, options, average):
    """One optimizer step on one mini-batch; none if the gradient is not finite. Returns what to
    log."""
    distribution, value_M, (features_MF, core_MH) = run_sequences(policy, batch)
    loss, logs = ppo_loss(distribution, value_M, batch, policy.log_ent_coef, options)
    # 0, unless the policy adds a loss of its own
    auxiliary_loss = policy.auxiliary_loss(features_MF, core_MH, batch)
    optimizer.zero_grad()
    (loss + auxiliary_loss).backward()
    # frozen weights are not learned, nor is a fixed entropy coefficient
    learned = [weight for weight in policy.parameters() if weight.requires_grad]
    for weight in learned:  # zeros if this loss does not use it: all average the same tensors
        weight.grad = torch.zeros_like(weight) if weight.grad is None else weight.grad
    average([weight.grad for weight in learned])
    # the entropy coefficient is a parameter, too, but its gradient does not count in the norm
    network = [weight for weight in learned if weight is not policy.log_ent_coef]
    norm = nn.utils.clip_grad_norm_(network, options.max_grad_norm)
    finite = torch.isfinite(norm)
    if finite:
        optimizer.step()
    policy.keep_bounds()  # clamps what has bounds, such as the standard deviation of actions
    logs["losses/auxiliary"] = auxiliary_loss.detach()
    logs["losses/grad_norm"] = norm
    logs["losses/skipped"] = (~finite).float()
    return logs


def run_sequences(policy, batch):
    """`Policy.sequences` of a mini-batch."""
    return policy.sequences(
        batch["obs"], batch["prev_action"], batch["first"], batch["state"], batch["batch_sizes"]
    )


def ppo_loss(distribution, value_M, batch, log_ent_coef, options):
    """Clipped PPO objective, value loss (not clipped) and entropy term, every step weighted by
    `batch["weight"]`. Means divide by M. (If the sum of the weights is M / 2, dividing by it would
    count every step of weight 1 twice.) Returns the loss and a dictionary of what to log.

    `batch` holds M old actions, log-probabilities, normalized advantages, returns and weights
    (`make_batch`), and `scale`, by which errors of values are divided (`ppo_update`). Without
    --target-entropy, the entropy coefficient exp(log_ent_coef) is fixed. With it (a first reading
    can skip this), the coefficient is learned under the constraint entropy >= target (VER section
    4): it grows while the mean entropy (without the steps' weights) is below the target.
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
    if options.target_entropy is not None:  # its gradient reaches only the coefficient
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


def mean_logs(logs):
    """The mean of each number over the mini-batches that were not skipped, and the share of the
    skipped ones, `losses/skipped`. (If all were skipped, it is 1, and the means are NaN.)"""
    table = torch.stack([torch.stack(list(log.values())) for log in logs]).cpu()  # one copy
    names = list(logs[0])
    skipped = table[:, names.index("losses/skipped")].bool()  # of each mini-batch
    means = dict(zip(names, table[~skipped].mean(dim=0).tolist()))
    return means | {"losses/skipped": skipped.float().mean().item()}


# End of the lesson
# (next: notebooks/02_rollout_by_hand.ipynb)

# ---------------------------------------------------------------------------- Environment workers
# How a step is simulated: an environment, a process that steps some of them, and what happens when
# such a process fails.

# a terminal that closes sends SIGHUP; SLURM can send SIGUSR1 or 2 before it ends a job (--signal)
SIGNALS = signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2
CLOSING_SEC = 5  # for environments to close, before their process is killed


class UserError(Exception):
    """Something the user can fix; shown as one line, exit status 2. The text may come from a
    stranger's file, so characters that would change the terminal are shown as escapes."""

    def __str__(self):
        return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in super().__str__())


class Interrupted(Exception):
    """Ctrl-C, SIGTERM or another of SIGNALS; the argument is the signal's number."""


class EnvironmentFailure(Exception):
    """Workers, or another process of the run, failed too often or at the start; exit status 1."""


class Environment:
    """One environment and its row of EnvIO. Lives in a worker process; with --num-workers 0, in the
    process that collects. `split`, train or val, chooses its seeds. `offset` is added to the number
    that the environment is told, if others with the same numbers live beside it."""

    def __init__(self, number, options, split, spec, io, offset=0):
        self.number = number
        self.offset = offset
        self.options = options
        self.split = split
        self.spec = spec
        self.io = io
        self.env = None
        self.length = 0

    def answer(self):
        """The first call starts the environment; every later call makes a step. Writes the answer
        to the row. Raises whatever the environment raises, and ValueError if it answers with
        numbers that are not allowed. If it raises, it first prints the environment, the episode and
        the step.

        A start with a step in flight means that the worker's earlier process has failed. That step
        is lost, even if its action was sent after the failure.
        """
        io = self.io
        e = self.number
        began_at = time.perf_counter()
        io["started"][e] = self.env is None
        try:
            if self.env is None:
                self.reset()
            else:
                self.step()
        except BaseException:  # also sys.exit
            print(
                f"environment {e}, episode {io['episode'][e]}, step {self.length}:",
                file=sys.stderr,
                flush=True,
            )
            raise
        io["began_at"][e] = began_at
        io["step_sec"][e] = time.perf_counter() - began_at

    def reset(self):
        """Begin the next episode; make the environment if there is none. In training, it is seeded
        only when it starts, and later resets continue its random numbers (Gymnasium's convention).
        In validation each episode has a seed of its own, so that all policies play the same
        episodes."""
        io = self.io
        e = self.number
        io["episode"][e] += 1
        starts = self.env is None
        seed = None
        if starts or self.split == "val":
            # the first number is 0 in training and 1 in validation, so that they share no seed
            seed = derive_seed(self.split == "val", self.options.seed, e, io["episode"][e])
            # environments may use these generators. (In a worker, those of numpy and torch would
            # otherwise be copies of the fork server's)
            random.seed(seed)
            np.random.seed(seed)
            torch.manual_seed(seed)
        if starts:
            self.env = make_env(self.options, self.split, self.offset + e)
        observation, _ = self.env.reset(seed=seed)
        if starts:
            self.spec.compare(spec_of(self.env), "not like the first environment")
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
        action = to_env_action(self.env.action_space, io["action"][e])
        self.length += 1  # before the step: if that raises, the error names the right step
        observation, reward, terminated, truncated, info = self.env.step(action)
        reward = float(reward)
        booleans = np.array([terminated, truncated]).dtype == bool
        if not (math.isfinite(np.float32(reward)) and booleans):
            raise ValueError(
                f"reward {reward}, terminated {terminated!r}, truncated {truncated!r}: the reward"
                " must be finite, the others True or False"
            )
        self.total_reward += reward
        io["reward"][e] = reward
        io["terminated"][e] = terminated
        io["truncated"][e] = truncated and not terminated
        io["first"][e] = False
        if terminated or truncated:
            metrics = {name: float(info[name]) for name in self.spec.metrics}
            if not np.isfinite([*metrics.values()]).all():
                raise ValueError(f"metrics must be finite numbers: {metrics}")
            io["episode_stats"][e] = [self.total_reward, self.length, *metrics.values()]
            self.write(io["final_obs"], observation)
            self.reset()
        else:
            self.write(io["obs"], observation)

    def write(self, column, observation):
        """Copy an observation into this environment's row of `obs` or `final_obs`."""
        for key, part in read_observation(
            self.spec, self.env.observation_space, observation
        ).items():
            column[key][self.number] = part

    def close(self):
        """Close the environment, if there is one. Ignores errors."""
        with contextlib.suppress(Exception):  # also that of None, which has no `close`
            self.env.close()


def env_worker(inbox, outbox, environments):
    """Step the environments whose numbers arrive in the inbox, and send the numbers of those that
    have answered to the outbox. `environments` maps numbers to Environments. Ends at the end of the
    inbox, when the process that collects closes it or dies."""
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


def send_numbers(pipe, numbers):
    """Write several numbers at once. The operating system writes up to PIPE_BUF bytes in one piece,
    so numbers of different processes do not mix. `check_options` limits the number of environments
    accordingly."""
    os.write(pipe.fileno(), array("i", numbers))


def read_numbers(pipe):
    """Block for at least one number; return all numbers in the pipe, or [] at end of file."""
    return array("i", os.read(pipe.fileno(), 1 << 16)).tolist()


def worker_process(inbox, outbox, environments):
    """Body of a worker process: `env_worker`. If an environment raises, print the error. In any
    case, close the environments at the end."""
    lead_group()
    torch.set_num_threads(1)
    status = 1
    try:
        env_worker(inbox, outbox, environments)
        status = 0
    except BrokenPipeError:  # the process that collects has died
        pass
    except UserError as error:  # it would come again
        print(error, file=sys.stderr)
        status = 2
    except BaseException:  # also sys.exit
        traceback.print_exc()
    if status:  # a simulator that has failed may hang when it is closed
        threading.Timer(CLOSING_SEC, os._exit, [status]).start()
    # in reverse: the OpenGL contexts of later environments may share that of the first
    for environment in reversed(environments.values()):
        environment.close()
    if not mp.parent_process().is_alive():  # it is dead, so it cannot call `end_process`
        os.killpg(0, signal.SIGKILL)
    if status:
        os._exit(status)  # even if a simulator's threads still run


class Workers:
    """The worker processes, seen from the process that collects.

    `send` tells environments to take the action in their row or, the first time, to start. Each of
    them then answers. `receive` returns the environments that have answered. Environment e belongs
    to worker e % W.

    A worker *fails* if its process dies (also after an error, which it prints), or if it owes an
    answer and has given none for --env-timeout. Then a new process takes its place. Environments
    that owe an answer start again at once, and the others when their next action arrives.
    """

    def __init__(self, environments, num_workers):
        self.environments = environments
        self.num_workers = num_workers
        self.options = environments[0].options
        self.context = process_context()
        self.asked_N = np.zeros(len(environments), bool)  # environments that owe an answer
        # seconds since each last got an action, or answered. A gap between two calls of `receive`
        # counts as one second at most, so that a pause of the whole program looks like no hanging
        self.silent_sec_W = np.zeros(num_workers)
        self.looked_at = time.monotonic()
        self.has_answered_W = np.zeros(num_workers, bool)
        self.failed_at = deque(maxlen=self.options.max_worker_restarts + 1)
        # one pipe to each worker: this process writes commands, the worker reads its inbox
        self.inboxes = [None] * num_workers
        self.commands = [None] * num_workers
        # one pipe back: workers write to their common outbox, this process reads answers
        self.answers, self.outbox = mp.Pipe(duplex=False)
        self.poll = select.poll()
        self.poll.register(self.answers, select.POLLIN)
        self.processes = [None] * num_workers
        for worker in range(num_workers):
            self.start(worker)
        self.send(np.arange(len(environments)))

    def start(self, worker):
        """Start a worker's process, with copies of its Environments. None of them has a simulator
        yet: the main process never makes one."""
        mine = {each.number: each for each in self.environments[worker :: self.num_workers]}
        # new, since an earlier process may have left commands in its pipe
        self.inboxes[worker], self.commands[worker] = mp.Pipe(duplex=False)
        process = self.context.Process(
            target=worker_process,
            args=(self.inboxes[worker], self.outbox, mine),
            name=f"{self.environments[0].split} {worker}",  # "train 0", for example
            daemon=True,
        )
        process.start()
        self.processes[worker] = process
        self.poll.register(process.sentinel, select.POLLIN)  # readable when the process ends
        self.silent_sec_W[worker] = -5  # for the process itself to start

    def send(self, env_B):
        """Let these environments answer."""
        self.asked_N[env_B] = True
        worker_B = env_B % self.num_workers
        gap_sec = time.monotonic() - self.looked_at  # `receive` will add it to all
        self.silent_sec_W[worker_B] = np.minimum(self.silent_sec_W[worker_B], -gap_sec)
        for worker in set(worker_B.tolist()):
            send_numbers(self.commands[worker], env_B[worker_B == worker].tolist())

    def receive(self, timeout_sec):
        """Numbers of the environments that have answered; [] if none does within this time. Raises
        EnvironmentFailure if workers fail too often."""
        ready = {descriptor for descriptor, _ in self.poll.poll(1000 * timeout_sec)}
        now = time.monotonic()
        self.silent_sec_W += min(1.0, now - self.looked_at)
        self.looked_at = now
        answered = self.read() if self.answers.fileno() in ready else []
        for worker, process in enumerate(self.processes):
            if process.sentinel in ready:
                answered += self.replace(worker, "died")
        for worker in np.flatnonzero(self.silent_sec_W > self.options.env_timeout):
            if len(self.owed(worker)):
                answered += self.replace(
                    worker, f"gave no answer for {self.options.env_timeout:g} s (--env-timeout)"
                )
        return answered

    def read(self):
        """Numbers of the environments whose answers are in the common pipe."""
        answered = read_numbers(self.answers)
        worker_B = np.array(answered, int) % self.num_workers
        self.asked_N[answered] = False
        self.silent_sec_W[worker_B] = 0.0
        self.has_answered_W[worker_B] = True
        return answered

    def owed(self, worker):
        """Numbers of this worker's environments that owe an answer."""
        env_B = np.flatnonzero(self.asked_N)
        return env_B[env_B % self.num_workers == worker]

    def replace(self, worker, what):
        """Start a new process for a worker that has failed. Returns the environments whose answers
        were in the common pipe."""
        process = self.processes[worker]
        self.poll.unregister(process.sentinel)
        end_process(process, 0)
        # read the pipe before `owed`: environments whose answers are in it must not start again
        answered = self.read() if self.answers.poll() else []
        mine = [each.number for each in self.environments[worker :: self.num_workers]]
        when = "" if self.has_answered_W[worker] else ", before its first answer"
        reason = f"worker {worker} (environments {mine}) {what}, exit code {process.exitcode}{when}"
        self.failed_at.append(time.monotonic())
        if when or process.exitcode == 2 or self.environments[0].split == "trial":
            raise EnvironmentFailure(reason)
        if (
            len(self.failed_at) == self.failed_at.maxlen
            and self.failed_at[-1] - self.failed_at[0] < 3600
        ):
            raise EnvironmentFailure(
                f"{reason}: more than {self.options.max_worker_restarts} failures within an hour"
                " (--max-worker-restarts)"
            )
        tell(f"{reason}: started again")
        self.start(worker)
        self.send(self.owed(worker))
        return answered

    def close(self):
        """End the processes: they leave at the end of their pipe, or are killed after 5 s."""
        until = time.monotonic() + CLOSING_SEC
        for command in self.commands:
            command.close()
        for process in self.processes:
            end_process(process, max(0.0, until - time.monotonic()))


class InlineWorkers:
    """All environments in the process that collects, one after the other: the interface of Workers,
    for debuggers. If an environment raises, the run ends."""

    def __init__(self, environments):
        self.environments = environments
        self.asked = list(range(len(environments)))

    def send(self, env_B):
        self.asked += env_B.tolist()

    def receive(self, timeout_sec):
        answered = self.asked
        self.asked = []
        with torch.inference_mode(False):  # `collect` switches it on
            for e in answered:
                self.environments[e].answer()
        return answered

    def close(self):
        for environment in reversed(self.environments):  # as in `worker_process`
            environment.close()


def make_workers(options, split, spec, io, offset=0):
    """The environments of all rows of `io`, in worker processes or (--num-workers 0) here."""
    environments = [
        Environment(e, options, split, spec, io, offset) for e in range(len(io.records))
    ]
    num_workers = min(count_workers(options, spec), len(environments))
    return Workers(environments, num_workers) if num_workers else InlineWorkers(environments)


def process_context():
    """How processes are started: by a fork server. As with spawn, a process gets nothing of this
    process's state, but torch is imported only once. A signal may reach the whole process group.
    The server blocks it, and the main process decides what happens."""
    mp.current_process().daemon = False  # a process of a Pool is one, and daemons have no children
    files, most_files = resource.getrlimit(resource.RLIMIT_NOFILE)  # each worker needs four
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(files, min(most_files, 8192)), most_files))
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["torch", "gymnasium", "tyro", "tqdm"])
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # the server inherits this
    multiprocessing.resource_tracker.ensure_running()  # unblocks two of them again
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        multiprocessing.forkserver.ensure_running()
    except ChildProcessError:  # the server belongs to another process
        raise UserError(
            "a process forked from one that has trained cannot train: start it with spawn"
        ) from None
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return context


def lead_group():
    """Give this process a group of its own, which holds all that its simulators start. If the main
    process is gone, and this process does not end by itself (a simulator hangs), the group is
    killed.

    This process gets a handler for signals that does nothing. If it ignored or blocked them, the
    programs that its simulators start would inherit that.
    """
    mp.current_process().daemon = False  # daemons may not have children
    for number in SIGNALS:
        signal.signal(number, lambda number, frame: None)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)

    def follow():
        mp.parent_process().join()
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
    process.join(CLOSING_SEC)


def tell(text):
    """Print a line above the progress bar. (ver_multigpu.py hides sys.stderr of most ranks, so they
    print to the real one.)"""
    tqdm.write(text, file=sys.__stderr__ if "RANK" in os.environ else sys.stderr)


# ---------------------------------------------------------------------- Any Gymnasium environment
# This section hides the differences between environments: how they are made, what they observe,
# how they act, and how many processes they need.

INFERENCE_SEC = 150e-6  # about what one step costs the process that collects
LARGE_BOUND = 1e30  # a bound as large as this counts as none
VECTORS = spaces.Box, spaces.MultiBinary, spaces.Discrete, spaces.MultiDiscrete


def make_env(options, split="train", number=0, checked=False):
    """Environment `number` of a split (train or val) as --env-id, --env-kwargs and --wrappers say.
    If `checked`, Gymnasium looks at its first reset and step, and warns or raises.

    Environments that are registered with arguments named `options`, `split` or `number` receive
    these. Other environments differ in their seeds alone.
    """
    registered = load(options.env_id, "--env-id")
    # The ranks of a machine never share a number: simulators may derive a port from it
    number += int(os.environ.get("LOCAL_RANK", "0")) * options.num_envs
    known = {"options": options, "split": split, "number": number}
    arguments = {name: value for name, value in known.items() if name in registered.kwargs}
    arguments |= read_arguments(options.env_kwargs)
    env = gym.make(registered, disable_env_checker=not checked, **arguments)
    for wrapper in options.wrappers:
        env = load(wrapper, "--wrappers")(env)
    return env


@dataclass(frozen=True)
class Spec:
    """What tables and network must know of an environment. Plain data, which also lies in the
    checkpoint."""

    obs: dict  # type, shape, and whether to normalize, of each part of an observation, as stored
    choices: list  # how many choices each dimension of an action has; empty if it is continuous
    action_dims: int  # A, the dimensions of an action
    metrics: list  # names of the scalars in the last info of an episode
    step_sec: float = 0.0  # seconds that a step takes (0: not measured) ...
    cpu_sec: float = 0.0  # ... and how many of them on a CPU
    chosen: list = ()  # KEY=VALUE of arguments that the environment may choose by itself
    parts: dict = field(default_factory=dict)  # the spaces of action and observation, in words

    def compare(self, other, reason):
        """Raise UserError, with this reason and the first difference, if an environment has other
        parts: then a policy for this one cannot act there. (A Spec that was made by hand has none.)
        """
        for name in self.parts and self.parts | other.parts:
            mine, others = (each.parts.get(name, "missing") for each in (self, other))
            if mine != others:
                raise UserError(f"{reason}: {name} is {others}, not {mine}")

    @property
    def obs_fields(self):
        """(name, type, shape) of each part of an observation."""
        return [(key, kind, shape) for key, (kind, shape, _) in self.obs.items()]

    @property
    def action_dtype(self):
        """The type of an action's numbers."""
        return np.dtype(np.int64 if self.choices else np.float32)

    @property
    def episode_columns(self):
        """The numbers that are recorded for each episode."""
        return ("return", "length", *self.metrics)


def spec_of(env):
    """The Spec of an environment that has been reset. (Habitat knows its metrics only then.) The
    parts of the observation are in the order of their names, since a dictionary's order may change
    from run to run. Raises UserError if the action, or every part of the observation, is not
    supported."""
    obs = {}
    parts = {"action": in_words(env.action_space)}
    whole = env.observation_space  # and in place of an observation: it has the same keys
    for key, space, _ in sorted(walk(whole, whole), key=lambda part: part[0]):
        if not isinstance(space, VECTORS) or not spaces.flatdim(space):
            continue  # `tell_losses` says so
        if key in obs:
            raise UserError(f"two parts of the observation have the name {key!r}")
        parts[f"observation {key}"] = in_words(space)
        box = isinstance(space, spaces.Box)
        image = box and image_layout(space.shape) is not None
        large = box and bool(space.low.min() < -30 or space.high.max() > 30)
        kind = "uint8" if image and large and space.dtype == np.uint8 else "float32"
        obs[key] = kind, space.shape if image else (spaces.flatdim(space),), large
    action = env.action_space
    choices = []
    if isinstance(action, spaces.Discrete):
        choices = [int(action.n)]
    elif isinstance(action, spaces.MultiDiscrete):
        choices = action.nvec.ravel().tolist()
    elif not isinstance(action, spaces.Box) or action.dtype.kind != "f":
        raise UserError(f"the action is {action}, not Discrete, MultiDiscrete or a Box of floats")
    if not obs:
        raise UserError(f"no part of the observation holds numbers: {whole}")
    # wrappers may have metadata of their own, and adapters of the old gym have None
    metadata = (env.unwrapped.metadata or {}) | (env.metadata or {})
    return Spec(
        obs,
        choices,
        action_dims=len(choices) or math.prod(action.shape),
        metrics=list(metadata.get("metrics", ())),
        chosen=list(metadata.get("chosen", ())),
        parts=parts,
    )


def in_words(space):
    """The type and the shape of a space, or its choices.

    >>> in_words(spaces.Box(0, 255, (64, 48, 3), np.uint8)), in_words(spaces.Discrete(4))
    ('uint8 (64, 48, 3), channels last', 'Discrete(4)')
    """
    if not isinstance(space, spaces.Box):
        return " ".join(str(space).split())
    layout = image_layout(space.shape)
    order = f", channels {'last' if layout[3] else 'first'}" if layout else ""
    return f"{space.dtype} {space.shape}{order}"


def walk(space, observation, name=""):
    """Walk through nested dictionaries and tuples. Yields the name, space and observation of each
    part. A space that is not nested has the name `obs`.

    >>> tree = spaces.Dict(goal=spaces.Discrete(2), arms=spaces.Tuple([spaces.Discrete(3)]))
    >>> [(name, part) for name, _, part in walk(tree, {"goal": 1, "arms": (2,)})]
    [('goal', 1), ('arms/0', 2)]
    """
    if not isinstance(space, (spaces.Dict, spaces.Tuple)):
        yield name or "obs", space, observation
        return
    keys = space.keys() if isinstance(space, spaces.Dict) else range(len(space))
    for key in keys:
        yield from walk(space[key], observation[key], f"{name}/{key}" if name else str(key))


def read_observation(spec, space, observation):
    """The parts of an observation, as arrays: images as they are, everything else as a vector (by
    Gymnasium's `spaces.flatten`: choices are one-hot there). Raises ValueError for another shape
    than the space has, and for numbers that are not finite or do not fit."""
    parts = {}
    for key, below, part in walk(space, observation):
        if key not in spec.obs:
            continue
        kind, shape, _ = spec.obs[key]
        part = np.asarray(part)
        box = isinstance(below, spaces.Box)
        fits = part.shape == below.shape if box else below.contains(part)
        if fits:
            numbers = part if box else spaces.flatten(below, part)
            parts[key] = np.ascontiguousarray(numbers.reshape(shape), kind)
            exact = kind == "float32" or np.array_equal(parts[key], part)
            fits = exact and np.isfinite(parts[key]).all()
        if not fits:
            raise ValueError(
                f"observation {key!r} has shape {part.shape}: {part}; it is not finite, or does not"
                f" fit {below}"
            )
    return parts


def to_env_action(space, action_A):
    """The policy's numbers as the environment wants them. Discrete: the index plus the space's
    start, as a numpy number. Box: -1..1 is stretched to low..high. With one bound, -1..1 becomes
    the range of width 2 at that bound; with none, it stays. Then it is clipped.

    >>> to_env_action(spaces.Box(0.0, 4.0, (2,)), np.array([0.5, 7.0], np.float32))
    array([3., 4.], dtype=float32)
    >>> to_env_action(spaces.Box(10.0, np.inf, (2,)), np.array([0.0, 7.0], np.float32))
    array([11., 18.], dtype=float32)
    """
    action = action_A.reshape(space.shape)
    if not isinstance(space, spaces.Box):  # Discrete (a numpy number) or MultiDiscrete
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
    """Try one environment, and return its Spec. Raises UserError if it fails, or if a space is not
    supported.

    The trial has a worker process of its own, so nothing that the environment does there can hang,
    kill or change this process. With --num-workers 0 the trial takes place here, as training will.
    """
    answer, outbox = mp.Pipe(duplex=False)
    folder = os.getcwd()
    trial = Trial(options, outbox)
    workers = InlineWorkers([trial]) if options.num_workers == 0 else Workers([trial], 1)
    with contextlib.closing(workers):
        try:
            while not answer.poll():
                workers.send(np.array(workers.receive(0.05), int))
        except EnvironmentFailure as error:
            refuse(options, "env_id", f"cannot be used ({error}); see its output above")
        found = answer.recv()  # before the worker ends: it may still be writing
    os.chdir(folder)  # some environments change it
    if isinstance(found, UserError):
        raise found
    return found


class Trial(Environment):
    """An environment that is tried before the run, as in training. Sends a Spec or a UserError to
    the outbox."""

    def __init__(self, options, outbox):
        super().__init__(0, options, "trial", None, None)
        self.outbox = outbox

    @functools.cached_property
    def calls(self):
        """The calls of the environment, one after the other."""
        return try_env(self)

    def answer(self):
        """Make one call of the environment: --env-timeout limits each."""
        try:
            found = next(self.calls, None)
        except UserError as error:
            found = error
        if found:
            self.outbox.send(found)


def try_env(trial):
    """Start a trial's environment, look at its spaces, and take a step as in training. If
    --num-workers is `auto`, also measure the time of some more steps. Yields None after each call
    of the environment, and at last its Spec. Raises UserError."""
    options = trial.options
    try:
        # a checkpoint is evaluated: the data of the training may be missing
        trial.env = make_env(options, "val" if options.checkpoint else "train", checked=True)
        observation, _ = trial.env.reset(seed=0)
        yield
        trial.spec = spec_of(trial.env)
        tell_losses(trial.spec, trial.env.observation_space, observation)
        trial.io = EnvIO(trial.spec, 1)
        trial.reset()
        yield
        trial.step()
        yield
        if options.num_workers == "auto":
            step_sec, cpu_sec = yield from time_steps(trial)
            trial.spec = replace(trial.spec, step_sec=step_sec, cpu_sec=cpu_sec)
        yield trial.spec
    except UserError:
        raise
    except (Exception, SystemExit) as error:  # whatever the environment's own code raises
        refuse(options, "env_id", f"cannot be used ({first_line(error)}; {places_of(error)[-1]})")


def tell_losses(spec, space, observation):
    """Print what a policy will not see of this observation."""
    for key, below, part in walk(space, observation):
        if key not in spec.obs:
            print(f"observation {key!r} is left out: {below} holds neither numbers nor choices")
        # a time or a coordinate, for example
        elif isinstance(below, spaces.Box) and (largest := np.abs(np.asarray(part)).max()) > 1e6:
            print(
                f"observation {key!r} is large: as float32, numbers that differ by less than"
                f" {np.spacing(np.float32(largest)):.3g} are equal"
            )


def time_steps(trial):
    """Mean seconds of a step with random actions, resets included, and the mean seconds of CPU time
    of a step. Takes a second, and yields every 0.1 s. (The result may be too high: at first,
    simulators load scenes, and agents that act at random end episodes soon.)

    The time in which other programs had the core does not count. Otherwise a simulator on a busy
    machine would look like one that waits for a GPU, and would get too many workers.
    """
    rng = np.random.default_rng(0)
    spec = trial.spec
    steps = 0
    began = np.array([time.perf_counter(), time.process_time(), run_delay_sec()])
    with contextlib.suppress(Exception, SystemExit):  # training survives a failure, too
        for until in began[0] + np.linspace(0.1, 1.0, 10):
            yield
            while time.perf_counter() < until:
                trial.io["action"][0] = (
                    rng.integers(spec.choices)
                    if spec.choices
                    else rng.uniform(-1, 1, spec.action_dims)
                )
                trial.step()
                steps += 1
    ended = np.array([time.perf_counter(), time.process_time(), run_delay_sec()])
    passed_sec, cpu_sec, delay_sec = (ended - began) / max(1, steps)
    return float(max(passed_sec - delay_sec, 1e-9)), float(cpu_sec)


def run_delay_sec():
    """Seconds for which this thread was ready to run but waited for a core. (Linux counts them.)"""
    with contextlib.suppress(OSError):
        return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9
    return 0.0


def count_cores():
    """CPU cores that this process may use. The ranks of torchrun share those of a machine."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return max(1, cores // int(os.environ.get("LOCAL_WORLD_SIZE", 1)))


def count_workers(options, spec):
    """How many worker processes to start. With `auto`, about one for each core if steps keep a CPU
    busy. If steps mostly wait for a GPU or a server, more, up to one for each environment. The
    process that collects needs a share of the cores, too, which is larger if steps are fast."""
    if options.num_workers != "auto":
        return options.num_workers
    waits = max(1.0, spec.step_sec / max(spec.cpu_sec, 1e-6))  # 1 means that a step never waits
    share = spec.step_sec / (spec.step_sec + INFERENCE_SEC)
    return min(options.num_envs, max(1, round(count_cores() * waits * share)))


# ----------------------------------------------------------------------------------------- Policy
# The default network: encoders for any observation, an LSTM, heads for any action.

ACTION_FEATURES = 32  # size of the previous action's embedding
ENT_COEF_RANGE = 1e-4, 1.0  # of a learned entropy coefficient (VER table A1)


def orthogonal(layer, gain=math.sqrt(2)):
    """Orthogonal weights and zero biases, as is usual for PPO (Huang et al. 2022, detail 2)."""
    nn.init.orthogonal_(layer.weight, gain)
    nn.init.zeros_(layer.bias)
    return layer


def image_layout(shape):
    """Channels, height, width of an image, and whether the channels come last; None for other
    shapes. An image has three dimensions. The channels come last, unless the first dimension is
    smaller than both others.

    >>> image_layout((3, 36, 40)), image_layout((8, 8, 111)), image_layout((30, 12))
    ((3, 36, 40, False), (111, 8, 8, True), None)
    """
    if len(shape) != 3:
        return None
    if shape[0] < min(shape[1:]):
        return *shape, False
    return shape[2], *shape[:2], True


class Statistics(nn.Module):
    """Normalizes each of C channels by its mean and deviation in a sample of all rollouts so far
    (DD-PPO section 6).

    Later rollouts weigh less, in proportion to the learning rate: when the policy can only change
    slowly, so do the statistics. A frozen encoder stays in evaluation mode, so its statistics do
    not change.
    """

    def __init__(self, channels):
        super().__init__()
        self.register_buffer("mean_C", torch.zeros(channels))
        self.register_buffer("variance_C", torch.ones(channels))
        self.register_buffer("total_weight", torch.zeros(()))  # of all rollouts so far

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
        self.total_weight += weight
        away_C = mean_C - self.mean_C
        share = weight / self.total_weight.clamp(min=1e-8)  # of these observations among all
        self.mean_C += share * away_C
        self.variance_C *= 1 - share
        self.variance_C += share * (variance_C + (1 - share) * away_C**2)


@torch.no_grad()
def update_statistics(policy, rollout, weight, average):
    """Update the running statistics with 256 steps of the rollout of every rank. This comes after
    learning, so that the policy learns from the same inputs that it acted on. `weight` is the
    learning rate as a share of the first one."""
    readers = [
        module
        for module in policy.modules()
        if isinstance(getattr(module, "normalize", None), Statistics)
    ]
    if not readers:
        return
    some = rollout.complete["obs"][torch.randperm(rollout.rows)[:256].numpy()]
    obs = to_device(some, some.dtype.names, next(policy.parameters()).device)
    for reader in readers:
        if reader.normalize.training:
            reader.normalize.take_in(reader.read(obs), weight, average)


class Input(nn.Module):
    """One part of an observation, as an encoder wants it: B x C numbers, or an image as B x
    channels x height x width. Numbers that may be large (their space has bounds beyond -30..30, or
    none) are normalized. Before that, bytes of an image are scaled to 0..1."""

    def __init__(self, key, spec):
        super().__init__()
        self.key = key
        _, shape, large = spec.obs[key]
        self.layout = image_layout(shape)
        self.channels = self.layout[0] if self.layout else shape[0]
        self.size = self.layout[1:3] if self.layout else ()  # height and width
        self.normalize = Statistics(self.channels) if large else nn.Identity()

    def read(self, obs):
        """The numbers, not yet normalized."""
        x = obs[self.key]
        if x.dtype == torch.uint8:
            x = x / 255
        if self.layout and self.layout[3]:
            x = x.permute(0, 3, 1, 2)
        return x

    def forward(self, obs):
        return self.normalize(self.read(obs))


def cover(size, side):
    """For patches of side x side pixels that cover an image of this size: the zeros to pad it with
    on each side, and the number of patches, both as (vertical, horizontal)."""
    padding = [math.ceil(-length % side / 2) for length in size]
    return padding, [math.ceil(length / side) for length in size]


class SmallCNN(nn.Module):
    """Small CNN for an image of any size -> B x out_features. Its first layers read patches that do
    not overlap: on a CPU that is twice as fast as the usual overlapping 8x8 and 4x4 kernels. With
    channels last in memory it learns in three quarters of the time."""

    def __init__(self, source, out_features):
        super().__init__()
        self.source = source
        self.out_features = out_features
        stride = 4 if min(source.size) >= 32 else 2
        padding, size = cover(source.size, stride)
        padding_2, size_2 = cover(size, stride)
        self.convolutions = nn.Sequential(
            orthogonal(nn.Conv2d(source.channels, 16, stride, stride, padding)),
            nn.ReLU(inplace=True),
            orthogonal(nn.Conv2d(16, 32, stride, stride, padding_2)),
            nn.ReLU(inplace=True),
            orthogonal(nn.Conv2d(32, 32, 3, 1, padding=1)),
            nn.ReLU(inplace=True),
            nn.Flatten(),
        ).to(memory_format=torch.channels_last)
        self.out = orthogonal(nn.Linear(32 * math.prod(size_2), out_features))

    def forward(self, obs):
        return torch.relu(self.out(self.convolutions(self.source(obs))))


class Perceptron(nn.Module):
    """Two-layer perceptron for a vector -> B x out_features."""

    def __init__(self, source, out_features):
        super().__init__()
        self.source = source
        self.out_features = out_features
        self.layers = nn.Sequential(
            orthogonal(nn.Linear(source.channels, out_features)),
            nn.Tanh(),
            orthogonal(nn.Linear(out_features, out_features)),
            nn.Tanh(),
        )

    def forward(self, obs):
        return self.layers(self.source(obs))


class LSTM(nn.LSTM):
    """The core of a policy: the part that remembers. Every core has the members `state_rows`,
    `step` and `sequences`.

    The recurrent state of an environment is a tensor of `state_rows` x H numbers, all zero at an
    episode's start. For an LSTM of L layers, the first L rows are the hidden states, and the next L
    rows are the cell states.
    """

    @property
    def state_rows(self):
        """Rows of the recurrent state."""
        return 2 * self.num_layers

    def step(self, x_BF, state_B):
        """One step of B environments: output B x H and the state after it. nn.LSTM itself would
        take twice as long on a CPU."""
        hidden = []
        cells = []
        out_BH = x_BF
        for layer, weights in enumerate(self.all_weights):
            memory = state_B[:, layer], state_B[:, self.num_layers + layer]
            out_BH, cell_BH = torch.lstm_cell(out_BH, memory, *weights)
            hidden.append(out_BH)
            cells.append(cell_BH)
        return out_BH, torch.stack(hidden + cells, dim=1)

    def sequences(self, x_MF, state_Q, batch_sizes):
        """All M steps of Q sequences, arranged as a PackedSequence: output M x H.

        `state_Q` is the state before each sequence's first step, longest sequence first. On a CPU,
        PyTorch's LSTM is much faster if all sequences have the same length, so all are padded to
        the longest. But if padding makes more than about five times as many steps, it costs more
        than it gains.
        """
        memory = state_Q.transpose(0, 1).contiguous().split(self.num_layers)
        packed = PackedSequence(x_MF, batch_sizes)
        padded_steps = len(batch_sizes) * int(batch_sizes[0])
        if x_MF.device.type != "cpu" or padded_steps > 5 * len(x_MF):
            out, _ = self(packed, memory)
            return out.data
        padded, length_Q = pad_packed_sequence(packed)
        out, _ = self(padded, memory)
        return pack_padded_sequence(out, length_Q).data


class FeedForward(nn.Linear):
    """A layer without memory, in place of the LSTM. Its state is empty, by which `ppo_update`
    knows it."""

    state_rows = 0

    def step(self, x_BF, state_B):
        """As LSTM.step."""
        return torch.tanh(self(x_BF)), state_B

    def sequences(self, x_MF, state_Q, batch_sizes):
        """As LSTM.sequences."""
        return torch.tanh(self(x_MF))


NEWEST_SHARE = 0.05  # how much the newest rollout counts in the running mean square of returns


class Critic(nn.Linear):
    """The value head: B x H -> B values, V = scale * layer(x).

    The layer predicts values in units of `scale`, the running root mean square of the returns. So
    rewards of any size are learned equally well. This takes the place of normalized rewards
    (Engstrom et al. 2020). At first the scale is 0, and so is every value. Every update begins with
    `rescale`, so the scale is above 0 from the first reward on.
    """

    def __init__(self, hidden_size):
        super().__init__(hidden_size, 1)
        orthogonal(self, 1.0)
        self.register_buffer("scale", torch.zeros(()))

    def forward(self, core_BH):
        return self.scale * super().forward(core_BH).squeeze(-1)

    @torch.no_grad()
    def rescale(self, returns_S, average):
        """Move the scale towards the size of these returns. Returns the new scale as a divisor
        (1e-8 at least: as long as all rewards are 0, all errors are 0, too).

        This changes no value (except at the first change, from 0). When the scale grows by a
        factor, the layer is divided by this factor (PopArt, van Hasselt et al. 2016). Otherwise V
        would grow, then the returns, which contain V, and then the scale again. One rollout can at
        most double the scale. Stored values and returns are in the environment's units.
        """
        newest = torch.tensor([(returns_S.astype(float) ** 2).mean()], dtype=torch.float64)
        average([newest])
        old = self.scale.item()
        square = newest.item()
        if old:
            square = min(old**2 + NEWEST_SHARE * (square - old**2), 4 * old**2)
        new = math.sqrt(square) if math.isfinite(square) else old
        self.scale.fill_(new)
        if old:
            self.weight *= old / new
            self.bias *= old / new
        return max(self.scale.item(), 1e-8)


class Policy(nn.Module):
    """Encoders, embedding of the previous action, core, action head and value head (VER section 4).

    `spec` is the environment's `Spec`.

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
            # 0: no action
            self.action_embedding = nn.ModuleList(
                nn.Embedding(1 + n, ACTION_FEATURES) for n in self.choices
            )
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
        observations, reads some of them, and has `out_features`. May raise UserError."""
        encoders = []
        for key in spec.obs:
            source = Input(key, spec)
            if source.layout:
                encoders.append(SmallCNN(source, options.hidden_size))
            else:
                encoders.append(Perceptron(source, options.hidden_size // 2))
        return nn.ModuleList(encoders)

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


# -------------------------------------------------------------------------------------------- Run
# One training: what surrounds the lesson's functions, and the folder that keeps the results.

SEED_OF_LEARNER = 2  # first number of derive_seed; environments have 0 (train) and 1 (val)


class Run:
    """One training: policy, optimizer, collector, counters, and the run folder.

    `RankRun` (many GPUs) and --extensions are subclasses that override some of these members:

        start, stop        start and end the environments
        collector_class    the class that collects
        preemptible        False if another process collects: ranks cannot end its rollouts early
        enough             whether a rollout ends early
        collect            collects a rollout
        advantages         computes advantages, returns and weights; returns the steps to learn from
        average            averages tensors over all processes that learn together
        update             learns from a rollout
        decay              the share of the learning rate that is left
        make_optimizer     makes the optimizer
        restore            loads the checkpoint of --resume
        log, combine, write_scalars, open_folder, save, evaluate, close    write the run's files
    """

    collector_class = Collector
    preemptible = True
    writes = True  # of many ranks, only rank 0 does
    folder = None

    def __init__(self, options):
        """Build all that training needs. Raises UserError and OSError."""
        self.spec, self.policy = build(options)
        self.device = next(self.policy.parameters()).device  # not `auto` or `cuda`, but `cuda:0`
        # with what the environment has chosen, so that the checkpoint says it
        chosen = [each for each in self.spec.chosen if each not in options.env_kwargs]
        self.options = replace(
            options, device=str(self.device), env_kwargs=(*options.env_kwargs, *chosen)
        )
        # before the folder, in case memory is too small
        self.rollout = Rollout(
            self.spec, options.rollout_steps, options.num_envs, self.policy.state_shape
        )
        self.step = 0  # environment steps learned from
        self.version = 0  # updates made
        self.recent = deque(maxlen=100)  # episode_stats of the last episodes
        self.signal = None  # the number of a signal that has come
        self.savable = True  # False during an update, whose weights are not finished
        self.optimizer = self.make_optimizer()
        # read the first rates now: `restore` overwrites them with decayed ones
        self.learning_rates = [group["lr"] for group in self.optimizer.param_groups]
        self.restore()
        self.initial_step = self.step
        self.began_at = time.perf_counter()
        self.lap_at = self.began_at  # when the last update ended
        self.spent_sec = np.zeros(3)  # on waiting for environments, inference and learning
        self.cleanup = contextlib.ExitStack()  # what `stop` does, the last first
        self.open_folder()

    def make_optimizer(self):
        """An optimizer with `param_groups`, `zero_grad`, `step`, `state_dict`, `load_state_dict`.
        """
        weights = self.policy.parameters()
        return torch.optim.Adam(weights, lr=self.options.learning_rate, eps=1e-5, fused=True)

    def restore(self):
        """With --resume, continue from the checkpoint of that folder, if there is one. Raises
        UserError."""
        path = checkpoint_path(self.options.resume)
        if not path.is_file():
            return
        saved = load_weights(self.policy, path, self.spec)
        load_moments(self.optimizer, saved["optimizer"], path)
        self.step = saved["step"]
        self.version = saved["version"]
        if saved["spec"]["metrics"] == self.spec.metrics:  # else they mean something else
            self.recent.extend(saved["recent"])
        if self.options.target_entropy is None:  # fixed: as the options say
            self.policy.log_ent_coef.data.fill_(math.log(max(self.options.ent_coef, 1e-30)))

    def open_folder(self):
        """Make the run folder, or with --resume take it. Also begin the progress bar, and print a
        first line. Raises OSError, and UserError if another run uses the folder."""
        options = self.options
        # microseconds, so that two runs never share a folder
        name = f"{options.env_id}__{options.exp_name}__{options.seed}__{time.time_ns() // 1000}"
        folder = Path(options.resume or Path(options.runs_dir, re.sub("[/:]", "-", name)))
        if self.writes:
            # whole: an environment in this process may change the current folder
            self.folder = folder.expanduser().resolve()
            self.folder.mkdir(parents=True, exist_ok=True)
            self.lock = lock_folder(self.folder)
            from torch.utils.tensorboard import SummaryWriter  # takes a second to import

            write_file(self.folder / "options.json", json.dumps(asdict(options), indent=2).encode())
            self.writer = SummaryWriter(
                self.folder, purge_step=self.step + 1 if self.step else None
            )
        often_sec = 0.1 if os.isatty(2) else 60.0  # a log file gets a line a minute
        self.bar = tqdm(
            total=max(options.total_timesteps, self.step),
            initial=self.step,
            disable=not self.writes,
            unit=" steps",
            dynamic_ncols=True,
            mininterval=often_sec,
        )
        size = sum(weight.numel() for weight in self.policy.parameters())
        seen = [
            f"{key}: {self.spec.parts.get(f'observation {key}', shape)}"
            f"{', normalized' if large else ''}"
            for key, (_, shape, large) in self.spec.obs.items()
        ]
        self.say(
            f"{folder}: {' '.join([options.sampler, *options.extensions])}, {options.num_envs}"
            f" environments, workers: {count_workers(options, self.spec)}, {size:,} parameters on"
            f" {self.device}"
            + (
                ""
                if options.extensions or self.device.type != "cuda"
                else " (faster with --extensions graphs)"
            )
            + f"\nobservation: {'; '.join(seen)}\naction: {self.spec.parts.get('action')}"
        )

    def say(self, text):
        """Print a line above the progress bar."""
        if self.folder:
            with contextlib.suppress(OSError):  # a terminal that has closed
                self.bar.write(text)

    def start(self):
        """Start the environments, then catch signals."""
        options = self.options
        signals = self.cleanup.enter_context(contextlib.ExitStack())  # the last that `stop` ends
        # An environment's seed is made from the number of the episode with which it starts. Numbers
        # go on from run.step in a resumed run, so no seed is used twice
        io = EnvIO(self.spec, options.num_envs, episodes_before=self.step)
        workers = make_workers(options, "train", self.spec, io)
        self.cleanup.callback(workers.close)
        self.cleanup.callback(self.save)
        self.collector = self.collector_class(
            self.policy, workers, io, self.spec, options, self.look
        )
        # with --num-workers 0, this starts the environments. They may set handlers and seeds
        # themselves, so ours come after that
        self.collector.arrived += workers.receive(0)
        signals.enter_context(caught_signals(self.note_signal))
        torch.manual_seed(derive_seed(SEED_OF_LEARNER, options.seed, self.step))

    def stop(self):
        """Save, end the environments, and say where the time went."""
        with self.bar:
            self.cleanup.close()
        shares = 100 * self.spent_sec / (time.perf_counter() - self.began_at)
        self.say(
            f"step {self.step:,}; time: waiting for environments {shares[0]:.0f} %, inference"
            f" {shares[1]:.0f} %, learning {shares[2]:.0f} %"
            " (notebooks/MANUAL.md#where-the-time-goes says what helps)"
        )

    def note_signal(self, number, _frame):
        """Record a signal. It ends training: at once while collecting (that rollout is dropped), or
        after the update that is being made."""
        self.signal = number
        with contextlib.suppress(OSError):  # stderr may be closed
            os.write(2, b"\nstopping, and saving a checkpoint\n")

    def look(self, rows):
        """The collector calls this in every pass: show the progress. Returns whether the rollout,
        which has this many rows, ends early."""
        self.bar.update(max(0, self.step + rows - self.bar.n))
        return self.enough(rows)

    def enough(self, rows):
        """Whether a rollout with this many rows ends early: after a signal."""
        return self.signal is not None

    def collect(self):
        """Collect a rollout. Raises Interrupted after a signal, and EnvironmentFailure."""
        torch.set_num_threads(1)  # the workers want the cores now; `update` sets more
        self.collector.version = self.version
        self.collector.collect(self.rollout)
        if self.signal:
            raise Interrupted(self.signal)
        self.learning_at = time.perf_counter()
        return self.rollout

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
        normalize observations. Returns what to log.
        """
        threads = self.options.learner_threads
        torch.set_num_threads(min(4, count_cores()) if threads == "auto" else threads)
        decay = self.decay()
        for group, rate in zip(self.optimizer.param_groups, self.learning_rates):
            group["lr"] = rate * decay
        self.savable = False
        self.policy.train()  # `update_statistics` works only in training mode
        logs = ppo_update(self.policy, self.optimizer, rollout, self.options, self.average)
        update_statistics(self.policy, rollout, decay, self.average)
        self.policy.eval()
        self.savable = True
        if logs["losses/skipped"] == 1:
            raise FloatingPointError(
                "not one gradient of this update was finite: try a lower --learning-rate"
            )
        return logs

    def log(self, rollout, logs):
        """Count an update and its steps, keep its numbers, now and then write a checkpoint."""
        logs |= self.summarize(rollout)
        steps, logs, episodes = self.combine(rollout, logs)
        self.step += steps
        self.version += 1
        self.recent.extend(episodes)
        logs["charts/SPS_update"] = steps / logs["time/cycle_sec"]
        logs["charts/SPS"] = (self.step - self.initial_step) / (time.perf_counter() - self.began_at)
        if self.recent:
            means = np.mean(self.recent, axis=0)
            metrics = [f"metrics/{name}" for name in self.spec.metrics]
            logs |= dict(zip(["charts/episodic_return", "charts/episodic_length", *metrics], means))
            shown = {
                name: f"{mean:.3g}"
                for name, mean in zip(self.spec.episode_columns, means)
                if name in ("return", "success", "spl")
            }
            self.bar.set_postfix(shown, refresh=False)
        elif self.version == 10:
            self.say(f"no episode has ended in {self.step:,} steps; {TIME_LIMIT_ADVICE}")
        self.bar.update(max(0, self.step - self.bar.n))
        self.write_scalars(logs)
        if self.is_due_every(self.options.checkpoint_interval):
            self.save()

    def is_due_every(self, steps):
        """Whether what happens about every so many steps of one process happens after this update.
        (Counted over many ranks, it would soon be due after every update.)"""
        return not self.version % max(1, round(steps / self.options.rollout_steps))

    def summarize(self, rollout):
        """What to log of a rollout from which the policy has learned: how good the values were, how
        uneven the environments, how old the data, and where the time went."""
        steps = rollout.complete
        given_N = np.bincount(steps["env"], minlength=rollout.num_envs)
        lag_S = self.version - steps["version"]
        returns_S = steps["returns"].astype(float)
        variance = returns_S.var()
        error_S = returns_S - steps["value"]
        now = time.perf_counter()
        cycle_sec = now - self.lap_at
        self.lap_at = now
        rollout_sec = rollout.ended_at - rollout.started_at
        learning_sec = now - self.learning_at
        spent_sec = np.array(
            [rollout.waited_sec, rollout_sec - rollout.waited_sec, learning_sec]
        )
        self.spent_sec += spent_sec
        waiting_share, inference_share, learning_share = spent_sec / cycle_sec
        return {
            "charts/learning_rate": self.optimizer.param_groups[0]["lr"],
            "charts/return_scale": self.policy.critic.scale.item(),
            "losses/explained_variance": 1 - error_S.var() / variance if variance else 0.0,
            "ver/batch_size": len(steps) / len(np.unique(steps["sent_at"])),
            "ver/steps_per_env_min": given_N.min(),
            "ver/steps_per_env_max": given_N.max(),
            "ver/carried_share": (steps["sent_at"] < rollout.started_at).mean(),
            "ver/policy_lag_mean": lag_S.mean(),
            "ver/policy_lag_max": lag_S.max(),
            "ver/importance_weight": steps["weight"].mean(),
            "ver/lost_steps": steps["lost"].sum(),
            "time/cycle_sec": cycle_sec,
            "time/rollout_sec": rollout_sec,
            "time/learning_sec": learning_sec,
            "time/waiting_share": waiting_share,
            "time/inference_share": inference_share,
            "time/learning_share": learning_share,
            "time/env_step_ms": 1000 * steps["step_sec"].mean(),
        }

    def combine(self, rollout, logs):
        """Steps, logs and finished episodes of an update, of all processes that learn together."""
        steps = rollout.complete
        ended_S = steps["done"] & ~steps["lost"]
        return rollout.rows, logs, steps["episode_stats"][ended_S].tolist()

    def write_scalars(self, logs):
        """Add points to TensorBoard's curves. Raises OSError if the disk is full."""
        if self.folder:
            self.folder.mkdir(parents=True, exist_ok=True)  # somebody may have deleted it
            for tag, value in logs.items():
                self.writer.add_scalar(tag, value, self.step)

    def save(self):
        """Write a checkpoint in place of the previous one, unless the weights are those of an
        unfinished update. Returns whether it was written. Raises OSError if that fails, for example
        on a full disk. Then the previous checkpoint is still there."""
        if self.folder is None or not self.savable:
            return False
        self.folder.mkdir(parents=True, exist_ok=True)  # as in `write_scalars`
        content = {
            "format": CHECKPOINT_FORMAT,
            "options": asdict(self.options),
            "spec": asdict(self.spec),
            "policy": self.policy.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "step": self.step,
            "version": self.version,
            "recent": list(self.recent),
        }
        write_checkpoint(content, self.folder / "checkpoint.pt")
        return True

    def evaluate(self, offset=0):
        """Evaluate the policy, in environments with this offset of their numbers."""
        if self.signal:  # it came in the last update
            raise Interrupted(self.signal)
        if self.options.eval_episodes and self.writes:
            means = report_evaluation(self.policy, self.spec, self.options, offset=offset)
            self.write_scalars({f"eval/{name}": mean for name, mean in means.items()})

    def close(self):
        """Finish the files."""
        if self.folder:
            self.lock.close()
            with contextlib.suppress(OSError):  # a full disk was reported already
                self.writer.close()


@contextlib.contextmanager
def caught_signals(handler):
    """While this lasts, Ctrl-C, SIGTERM and so on call the handler. Signals that are ignored, such
    as SIGHUP under nohup, stay ignored. In a thread, Python allows no handlers."""
    caught = [
        number
        for number in SIGNALS
        if threading.current_thread() is threading.main_thread()
        and signal.getsignal(number) != signal.SIG_IGN
    ]
    handlers = {number: signal.signal(number, handler) for number in caught}
    try:
        yield
    finally:
        for number, own in handlers.items():
            signal.signal(number, own)


# ------------------------------------------------------------------------------------- Evaluation

MOST_EPISODE_STEPS = 100_000  # of an episode in an evaluation
TIME_LIMIT_ADVICE = (
    "if episodes need not end by themselves, give them a limit:"
    " --wrappers 'gymnasium.wrappers:TimeLimit(max_episode_steps=1000)'"
)


@torch.inference_mode()
def play_episodes(policy, spec, options, offset=0):
    """Play --eval-episodes validation episodes. Returns their numbers, E x (return, length,
    metrics), with NaN for an episode that does not end; its environment plays no more.

    Each environment plays its share, so that short episodes do not count more than long ones. The
    episodes of environment e are the rows e, e + N, e + 2 N ... For the same --num-envs and
    --eval-episodes they are the same for every policy. (An episode in which the environment dies is
    replaced by a later one: if long ones die more often, those that count are shorter than usual.)
    """
    num_envs = min(options.num_envs, options.eval_episodes)
    device = next(policy.parameters()).device
    options = replace(options, device=str(device), seed=0, sampler="ver")
    share_N = np.bincount(np.arange(options.eval_episodes) % num_envs)
    played_N = np.zeros(num_envs, int)
    found = np.full((options.eval_episodes, len(spec.episode_columns)), np.nan)
    steps_N = np.zeros(num_envs, int)  # of the episode that each environment plays
    io = EnvIO(spec, num_envs)
    own_random_state = torch.random.fork_rng([device] if device.type == "cuda" else [])
    workers = make_workers(options, "val", spec, io, offset)
    bar = tqdm(total=options.eval_episodes, unit=" episodes", delay=20, leave=False)
    with own_random_state, contextlib.closing(workers), bar:
        torch.set_num_threads(1)  # as in training
        torch.manual_seed(options.seed)
        collector = Collector(policy, workers, io, spec, options)
        collector.greedy = options.greedy
        # `complete_steps` is not called here, so `in_flight_N` stays set after the first action
        while (played_N < share_N).any():
            env_B = collector.await_answers(room=num_envs)
            ended_B = collector.in_flight_N[env_B] & io["first"][env_B] & ~io["started"][env_B]
            for e in env_B[ended_B]:
                found[e + num_envs * played_N[e]] = io["episode_stats"][e]
                played_N[e] += 1
                bar.update()
            steps_N[env_B] = np.where(io["first"][env_B], 0, steps_N[env_B] + 1)
            share_N[steps_N >= MOST_EPISODE_STEPS] = 0
            collector.act(env_B[played_N[env_B] < share_N[env_B]])
    return found


def report_evaluation(policy, spec, options, path=None, offset=0):
    """Evaluate, and print the mean +- standard error of every number. Returns the means by name, if
    any episode has ended. `path`: a CSV file for the numbers of each episode."""
    names = spec.episode_columns
    began_at = time.perf_counter()
    found = play_episodes(policy, spec, options, offset)
    sec = time.perf_counter() - began_at
    if path:
        np.savetxt(path, found, fmt="%.6g", delimiter=",", header=",".join(names), comments="")
    found = found[~np.isnan(found[:, 0])]
    missing = options.eval_episodes - len(found)
    if missing:
        tell(
            f"{missing} episodes are missing: some did not end in {MOST_EPISODE_STEPS:,} steps;"
            f" {TIME_LIMIT_ADVICE}"
        )
    if not len(found):
        return {}
    means = found.mean(axis=0)
    errors = found.std(axis=0, ddof=1 if len(found) > 1 else 0) / math.sqrt(len(found))
    parts = [f"{n} {mean:.3f} +- {error:.3f}" for n, mean, error in zip(names, means, errors)]
    print(
        f"evaluation, {len(found)} {'greedy' if options.greedy else 'sampled'} episodes in"
        f" {sec:.0f} s: {', '.join(parts)}"
    )
    return dict(zip(names, means))


# ------------------------------------------------------------------------------------ Checkpoints

CHECKPOINT_FORMAT = 13


def lock_folder(folder):
    """Take a run folder for this process, until the returned file is closed or the process ends.
    Raises UserError if another run has it, and OSError."""
    file = open(os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666), "w")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:  # some file systems have no locks
        if isinstance(error, BlockingIOError):
            raise UserError(f"{folder} is in use by a run that has not ended") from None
    return file


def write_checkpoint(content, path):
    """Replace a file with a checkpoint. Raises OSError."""
    memory = BytesIO()  # torch.save to a file does not say why writing fails
    torch.save(content, memory)
    write_file(path, memory.getbuffer())


def write_file(path, content):
    """Replace a file. After a power cut, the old one or the new one is there, whole. Never writes
    through a symbolic link, which a stranger's folder may have. Raises OSError."""
    temporary = path.with_name(f"{path.name}.tmp")
    if path.parent.is_symlink():
        raise OSError(f"{path.parent} is a symbolic link")
    temporary.unlink(missing_ok=True)
    with open(temporary, "xb") as file:  # a new file
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def load_checkpoint(path):
    """A checkpoint's content, on the CPU; nothing in it is executed. Raises UserError for anything
    but a checkpoint of this program."""
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
        number = content["format"]
    except FileNotFoundError:
        raise UserError(f"there is no checkpoint {path}") from None
    except Exception as error:  # whatever the loader raises for a damaged or hostile file
        raise UserError(
            f"{path} is not a checkpoint that can be read ({type(error).__name__})"
        ) from None
    if number != CHECKPOINT_FORMAT:
        raise UserError(
            f"{path} was written by another version (format {number}): continue with that version,"
            " or start a new run"
        )
    return content


def load_weights(policy, path, spec):
    """Put a checkpoint's weights into the policy; returns its content. Raises UserError if the
    network, or the environment with this Spec, is another one."""
    content = load_checkpoint(path)
    Spec(**content["spec"]).compare(spec, f"the environment is not that of {path}")
    try:
        policy.load_state_dict(content["policy"])
    except RuntimeError as error:
        raise UserError(
            f"{path} belongs to another network or environment:"
            f" {' '.join(str(error).split())[:300]}"
        ) from None
    return content


def load_moments(optimizer, saved, path):
    """Put the optimizer's part of a checkpoint into the optimizer. Raises UserError if it belongs
    to other weights. (torch matches them by their order alone, and Adam's moments of a wrong shape
    would make it write into other memory.)"""
    try:
        optimizer.load_state_dict(saved)
        for weight, state in optimizer.state.items():
            for name in state.keys() & {"exp_avg", "exp_avg_sq"}:
                # a copy, since a stranger's tensor may have another shape, and less memory than its
                # shape says
                state[name] = torch.empty_like(weight).copy_(state[name])
    except (ValueError, KeyError, RuntimeError) as error:
        raise UserError(f"{path} belongs to another optimizer or network: {error}") from None


def checkpoint_path(run):
    """The path of a run's checkpoint. `run` is its folder or the checkpoint file itself. (None
    gives a path without a file.)"""
    path = Path(run or os.devnull).expanduser()
    return path / "checkpoint.pt" if path.is_dir() else path


# ------------------------------------------------------------------------------- The command line
# Four options name code, the *doors*: --env-id with its arguments, --wrappers, --policy and
# --extensions. `check_options` refuses what it can before a process starts.

DOORS = "env_id", "env_kwargs", "wrappers", "policy", "extensions"
BARE_WORD = re.compile(r"[\w/.-]*|\w+=[\w.-]*", re.ASCII)
ALIASES = {
    "pointnav": "notebooks.environments.pointnav:PointNav-v0",
    "habitat": "notebooks.environments.habitat:Habitat-v0",
    "duel": "notebooks.environments.duel:Duel-v0",
    "resnet18": "notebooks.extensions.networks:ResNet18",
    "resnet18_plain": "notebooks.extensions.networks:ResNet18Plain",
    "resnet50": "notebooks.extensions.networks:ResNet50",
    "se_resnext50": "notebooks.extensions.networks:SEResNeXt50",
    "se_resnext101": "notebooks.extensions.networks:SEResNeXt101",
    "controller": "notebooks.extensions.controller:NeuralController",
    "overlap": "notebooks.extensions.overlap:Overlap",
    "async": "notebooks.extensions.overlap:Async",
    "inference": "notebooks.extensions.inference:Inference",
    "graphs": "notebooks.extensions.graphs:Graphs",
    "keep": "notebooks.extensions.series:Keep",
    "evaluate": "notebooks.extensions.series:Evaluate",
    "selfplay": "notebooks.extensions.selfplay:SelfPlay",
    "trace": "notebooks.extensions.trace:Trace",
    "check": "notebooks.extensions.check:Check",
    "clocked": "notebooks.extensions.clocked:Clocked",
    "from_habitat": "notebooks.extensions.from_habitat:HabitatBaselines",
    "latency": "notebooks.extensions.wrappers:Latency",
    "action_delay": "notebooks.extensions.wrappers:ActionDelay",
    "resize": "notebooks.extensions.wrappers:Resize",
    "hide": "notebooks.extensions.wrappers:Hide",
    "transfer": "notebooks.extensions.transfer:Transfer",
}
WHERE = (
    "for a file in the current folder, put PYTHONPATH=. before the command; an environment of a"
    " package is written as package:Id-v0; what only this program or notebook has registered"
    " needs --num-workers 0"
)
# files that look for a name: if an error passed through no others, the name does not exist
FINDERS = "<frozen importlib", importlib.__file__, gym.envs.registration.__file__, __file__
# one KEY=VALUE in brackets. It ends at a comma outside of quotation marks, if another KEY= follows
ARGUMENT = r"""\w+ *=(?:'[^']*'|"[^"]*"|[^,'"]|,(?! *\w+ *=))*"""


def first_line(error):
    """The kind of an error, and the first line of its text."""
    return f"{type(error).__name__}: {error}".splitlines()[0]


def places_of(error):
    """File, line and statement of each call that led to an error, the last one at the end."""
    text = "".join(traceback.format_exception(error))
    return [
        f"{file}:{line}: {statement}"
        for file, line, statement in re.findall(r'File "(.*)", line (\d+).*\n *(.*)', text)
    ]


def read_arguments(items):
    """`KEY=VALUE` of each item as a dictionary. A value is a Python literal, or `true`, `false`,
    `null` as other languages write them; else text. Raises UserError.

    >>> read_arguments(["camera=rgb", "image_size=64", "size=(2, 3)", "fast=true"])
    {'camera': 'rgb', 'image_size': 64, 'size': (2, 3), 'fast': True}
    """
    words = {"true": "True", "false": "False", "null": "None"}
    arguments = {}
    for item in items:
        key, equals, value = (part.strip() for part in item.partition("="))
        if not key or not equals:
            raise UserError(f"{item}: must be KEY=VALUE, as in image_size=64")
        try:
            arguments[key] = ast.literal_eval(words.get(value, value))
        except (ValueError, SyntaxError):
            arguments[key] = value
    return arguments


def find(text, option):
    """The thing that `module:name(key=value, ...)` names, and the arguments in its brackets.

    Imports the module, and returns its attribute of that name. For --env-id, the module registers
    its environments, and Gymnasium's specification of the id is returned. Without a module,
    Gymnasium must know the id. Raises UserError.

    >>> find("math:prod(start=2, name=a/b.pt)", "--policy")
    (<built-in function prod>, {'start': 2, 'name': 'a/b.pt'})
    """
    short, bracket, inside = text.partition("(")
    module, _, name = ALIASES.get(short, short).rpartition(":")
    if not module and option != "--env-id":
        raise UserError(
            f"{option} {text} cannot be found: must be MODULE:NAME, or one of {', '.join(ALIASES)}"
        )
    try:
        home = importlib.import_module(module) if module else None
        found = gym.spec(name) if option == "--env-id" else getattr(home, name)
    except (Exception, SystemExit) as error:  # whatever the module's own code raises
        own = [place for place in places_of(error) if not place.startswith(FINDERS)]
        raise UserError(
            f"{option} {text} cannot be loaded ({first_line(error)}): {[WHERE, *own][-1]}"
        ) from None
    if not bracket:
        return found, {}
    if option == "--env-id":
        raise UserError(f"{option} {text}: give arguments by --env-kwargs KEY=VALUE ...")
    if re.sub(ARGUMENT, "", inside).strip(", ") or not inside.endswith(")"):
        raise UserError(f"{option} {text}: must be {short}(KEY=VALUE, ...)")
    return found, read_arguments(re.findall(ARGUMENT, inside[:-1]))


def load(text, option):
    """The thing that a string names (`find`), with its arguments bound to it. Raises UserError.

    >>> load("math:prod(start=2)", "--policy")([3, 4])
    24
    """
    found, arguments = find(text, option)
    if not arguments:
        return found
    try:
        inspect.signature(found).bind_partial(**arguments)
    except (TypeError, ValueError) as error:  # an argument that it does not take
        raise UserError(f"{option} {text}: {error}") from None
    return functools.partial(found, **arguments)


def extend(run_class, options):
    """The class of a run, with all --extensions. Each is a subclass of `Run`, and its `super()` is
    the extension before it. Arguments in brackets set attributes of the class, which the class must
    annotate. Raises UserError."""
    for text in options.extensions:
        extension, arguments = find(text, "--extensions")
        if not inspect.isclass(extension) or not issubclass(extension, Run):
            raise UserError(f"--extensions {text}: must be a subclass of ver_ppo.Run")
        takes = [name for base in extension.__mro__ for name in inspect.get_annotations(base)]
        unknown = [name for name in arguments if name not in takes]
        if unknown:
            raise UserError(f"--extensions {text}: there is no {unknown[0]}, it takes {takes}")
        try:
            # as `class NAME(extension, run_class)` with these attributes
            run_class = type(run_class.__name__, (extension, run_class), arguments)
        except TypeError:
            raise UserError(
                f"--extensions {text}: is given twice, or after its subclass"
            ) from None
    return run_class


def make_policy(spec, options):
    """The network that --policy names, on its device, in evaluation mode. Only `Run.update`
    switches to training mode, for the update. Raises UserError."""
    options = replace(options, device=str(choose_device(options)))
    policy = load(options.policy, "--policy")(spec, options)
    return policy.eval().to(options.device)


def build(options):
    """The `Spec` of the environment, and a new policy. Raises UserError."""
    options = replace(options, device=str(choose_device(options)))
    spec = describe_env(options)
    torch.manual_seed(options.seed)
    return spec, make_policy(spec, options)


def choose_device(options):
    """The torch device that the options name, with its number. Raises UserError if this machine
    does not have it."""
    usual = "cuda" if torch.cuda.is_available() else "cpu"
    name = usual if options.device == "auto" else options.device
    try:
        one = torch.ones(1, device=name)
        one.item()  # raises for a device without memory
    except (RuntimeError, AssertionError) as error:
        refuse(options, "device", f"cannot be used ({first_line(error)}): try --device cpu")
    return one.device


def refuse(options, name, message):
    """Raise UserError for an option."""
    raise UserError(f"--{name.replace('_', '-')} {getattr(options, name)}: {message}")


RULES = {  # names of options, what must hold, and how to say it
    """total_timesteps num_envs num_steps num_minibatches update_epochs clip_coef
    checkpoint_interval learner_threads learning_rate max_grad_norm env_timeout hidden_size""": (
        lambda value: 0 < value < 1e15,
        "must be a positive number",
    ),
    "seed num_workers eval_episodes max_worker_restarts ent_coef vf_coef lstm_layers": (
        lambda value: 0 <= value < 2**63,
        "must be 0 or more",
    ),
    "gamma gae_lambda": (lambda value: 0 <= value <= 1, "must be within 0..1"),
    "sampler": (lambda value: value in ("ver", "nover", "sync"), "must be ver, nover or sync"),
    "target_entropy": (lambda value: value is None or math.isfinite(value), "must be a number"),
    "resume checkpoint": (lambda value: value != "", "must name a run"),
}


def check_options(options):
    """Raise UserError for an option that cannot work, and say how to fix it."""
    values = {name: value for name, value in vars(options).items() if value != "auto"}
    for names, (holds, rule) in RULES.items():
        for name in values.keys() & names.split():
            if not holds(values[name]):
                refuse(options, name, rule)
    most_envs = select.PIPE_BUF // 4
    if options.num_envs > most_envs:
        refuse(
            options,
            "num_envs",
            f"must be at most {most_envs}: the numbers of all environments must fit into one write"
            " to a pipe",
        )
    if values.get("num_workers", 0) > options.num_envs:
        refuse(options, "num_workers", f"must be at most --num-envs, which is {options.num_envs}")
    if options.num_minibatches > options.rollout_steps:
        refuse(
            options,
            "num_minibatches",
            f"must be at most --num-steps x --num-envs = {options.rollout_steps}",
        )
    if options.norm_adv and options.rollout_steps == 1:
        refuse(
            options,
            "num_steps",
            "normalized, the advantage of a single step is always 0: give more steps, or"
            " --no-norm-adv",
        )
    load(options.policy, "--policy")  # raises for a misspelled name. The trial loads the rest


def launch(options, run_class=Run):
    """Train as the options say. Returns the run folder. Raises UserError."""
    check_options(options)
    with contextlib.closing(extend(run_class, options)(options)) as run:
        train(run)
    return run.folder


def parse_options(argv, kind=Options):
    """Options from the command line. With --resume (a run folder) or --checkpoint (a run folder or
    its checkpoint file), options that are not on the command line are taken from that run, except
    --device. Raises UserError."""
    given = tyro.cli(kind, args=argv)
    if not (given.checkpoint or given.resume):
        return given  # `check_options` refuses an empty name
    if given.checkpoint and given.resume:
        refuse(given, "checkpoint", "give either this (to evaluate) or --resume (to continue)")
    if given.resume and not Path(given.resume).expanduser().is_dir():
        refuse(
            given,
            "resume",
            f"there is no such folder (mkdir -p {given.resume} lets a new run begin there)",
        )
    path = checkpoint_path(given.checkpoint or given.resume)
    if given.resume and not path.exists():
        return given
    saved = {
        name: value
        for name, value in load_checkpoint(path)["options"].items()
        if name in vars(given).keys() - {"device", "resume", "checkpoint"}
    }
    if not "".join(str(value) for name, value in saved.items() if name not in DOORS).isprintable():
        raise UserError(f"{path} is not a checkpoint of this program")
    # the command line again, with the file's options as defaults
    options = tyro.cli(kind, args=argv, default=kind(**saved))
    check_doors(options, given, path)
    return replace(options, checkpoint=str(path)) if given.checkpoint else options


def check_doors(options, given, path):
    """Raise UserError if a checkpoint names code or files, and the command line does not. A bare
    word is safe: it can only be a name of this project, or of Gymnasium, or a plain value."""
    for name in DOORS:
        value = getattr(options, name)
        texts = [value] if isinstance(value, str) else value
        if not all(map(BARE_WORD.fullmatch, texts)) and value != getattr(given, name):
            raise UserError(
                f"{path} names more than bare words: if you trust it, give"
                f" --{name.replace('_', '-')} {shlex.join(texts)}"
            )


LIMIT_ERRORS = EOFError, MemoryError, RuntimeError
LIMITS = {  # words in an error, and what this machine lacks
    "shared memory": "/dev/shm is full or too small (docker: --shm-size)",
    "allocate": "there is not enough memory",
    "MemoryError": "there is not enough memory",
    "Too many open files": "more open files are needed (ulimit -n)",
    "Resource temporarily unavailable": "no more processes can be started (ulimit -u)",
    "can't start new thread": "no more processes can be started (ulimit -u)",
    "unexpected EOF": "no more processes can be started (ulimit -u)",
    "home directory": "there is no such user",
    "AF_UNIX path too long": "the name of the folder for temporary files is too long (TMPDIR)",
}


def limit_of(error):
    """What this machine lacks if it raises this error, in one line; "" for other errors."""
    limits = [limit for words, limit in LIMITS.items() if words in repr(error)]
    return f"{limits[0]} ({first_line(error)})" if limits else ""


def main(argv=None, kind=Options, launch=launch):
    """Run a command line. Returns the exit status: 0 done, 1 failed while running, 2 refused, 128
    plus the number of a signal that stopped it."""
    program = Path(sys.modules[kind.__module__].__file__).name
    try:
        options = parse_options(sys.argv[1:] if argv is None else argv, kind)
        if options.checkpoint:
            check_options(options)
            if not options.eval_episodes:
                refuse(options, "eval_episodes", "must be a positive number with --checkpoint")
            spec, policy = build(options)
            load_weights(policy, options.checkpoint, spec)
            report_evaluation(policy, spec, options)
        else:
            launch(options)
        return 0
    except UserError as error:
        print(f"{program}: {error}", file=sys.stderr)
        return 2
    except Interrupted as error:
        return 128 + error.args[0]
    except KeyboardInterrupt:  # outside of training
        return 128 + signal.SIGINT
    except LIMIT_ERRORS as error:
        if not limit_of(error):
            raise
        tell(f"{program}: {limit_of(error)}")  # of many ranks, only this one may have it
        return 1
    except (EnvironmentFailure, FloatingPointError, OSError) as error:
        print(f"{program}: {limit_of(error) or error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    # otherwise all classes would exist twice, in `__main__` and in `ver_ppo`, where workers look.
    # (python -P leaves this file's folder out)
    sys.path.append(str(Path(__file__).parent))
    from ver_ppo import main

    sys.exit(main())
