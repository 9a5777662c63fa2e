"""VER: train a recurrent policy with Variable Experience Rollout and PPO (Wijmans et al. 2022), in one file.

Simulators are slow and uneven, and a trainer that steps N of them in lock-step always waits for the slowest. VER never
waits: whichever environments have answered form the next inference batch, and a rollout ends when T x N steps (--num-steps
times --num-envs) are complete, no matter who contributed how many. What is still being simulated at that moment is carried
over into the next rollout. The uneven experience is cut into mini-batches of equal size for a recurrent network, fast
environments are weighted down, and PPO learns from data that (all but N steps at most) comes from the current policy, or
with --overlap from the one before it.

    python ver_ppo.py --env-id pointnav            trains, shows its progress, evaluates on unseen floor plans
    python ver_ppo.py --help                       explains every option
    torchrun --nproc-per-node 8 ver_multigpu.py    the same on eight GPUs: it imports this file

The processes and what passes between them (section 2.1, figure 2 of the paper):

      environment worker 0 ... W-1                  main process: inference worker and learner by turns
    +------------------------------+   row numbers   +------------------------------------------------------+
    | take rows that have actions, | ==============> | take_requests -> complete -> infer -> write -> send  |
    | step, write the answer into  |  one pipe, all  |      ... until S records are complete, then ...      |
    | the environment's own row    |  workers write  | returns -> sequences -> packed mini-batches -> PPO   |
    +------------------------------+                 +------------------------------------------------------+
         |  rows  ^                 <==============        | rows ^                      | slots
         v        |                  a pipe each           v      |                      v
    [ transfer: one row for each environment, CPU shared memory ]        [ rollout: S + N slots, training device ]

--sampler chooses the alternatives that the paper compares with (sync, nover, async), by the same functions. With --overlap,
async or several --num-inference-workers, the upper half of the right box runs in processes of its own (`inference_process`),
on the same buffers in shared memory, while the main process learns or waits.

To read for the algorithm alone, some 950 lines: docstrings of `Policy` and `Shared`; `encode`, `heads`, `step`,
`sequences`, `remember`; `Transfer`, `Rollout`; `EnvironmentRow.reset`, `answer`, `step`; `worker_process`;
`Collector.__init__`, `in_flight`; from `await_requests` to `infer`; from `collect_rollout` to `carry_over`;
`inline_rollouts`; the sections "Sequences and packing" to "Loss and update"; `update`, `run_updates`; last `check_rollout`
and `check_records`, which say what a rollout must be. Leave out at first what concerns `lost`, `absent`, `preempted`,
`resumed`, `trace`, `history`, `sim_latency`, `action_delay`, `render`, async, V-trace and CPC|A.

Words: a *row* is an environment's place in `Transfer`. A *record* is one step, in a *slot* of the rollout: inference opens
it (observation, memory, action, value), the environment's answer completes it (reward, and whether the episode ended). An
open record is *in flight* if its action was sent; else it is *held*, and only its value counts, as bootstrap. *Carried*:
opened in an earlier rollout. *Lost*: its environment had to be started again before it answered. The *version* of a policy
is the number of updates before it. `records`, as an argument: slots, each environment's in time order. *Positions* count in
`records` (but for async and many ranks these are all slots in use, and the two are the same).

Shapes, at least the first dimensions, stand in the names: N environments, S steps of a rollout (T x N; the buffer has N
slots more, for open records), Q sequences, M steps of a mini-batch, B any batch, H hidden units, L LSTM layers, A action
numbers; in PointNav K boxes, R rays, C corners, P points, H x W pixels; in the pool of --sampler async P trajectories; in
CPC|A P starts, T steps ahead, F futures, N negatives, D features. B2LH is B x 2L x H. Columns of S entries may have the
open records' N more.

Papers: VER; DD-PPO (Wijmans et al. 2020); SF, Sample Factory (Petrenko et al. 2020); IMPALA (Espeholt et al. 2018).

Mechanism                          Function               Paper        Test (tests/)
dynamic batching                   take_requests          VER 2.1      test_collection.py::test_dynamic_batch
inference, new records             infer, write_records   VER 2.1      test_collection.py::test_records_hold_what_was_known
variable rollout, exactly T x N    collect_rollout        VER 2.2      test_collection.py::test_random_speeds
in-flight carry-over               carry_over             VER 2.2      test_collection.py::test_carry_over
T steps each; lock-step            claim_slots            VER 2.2      test_samplers.py::test_nover_and_sync
double-buffered sampling           worker_process         SF 3.2       test_samplers.py::test_double_buffering
several inference workers          claim_slots            VER 2.1      test_samplers.py::test_every_mode_loses_nothing
overlap, delayed gradients         remote_rollouts        VER E        test_samplers.py::test_every_mode_loses_nothing
asynchronous trajectories          collect_trajectories   SF 3.1       test_samplers.py::test_trajectories
sequences, shuffled and cut        cut_minibatches        VER 2.2      test_packing.py::test_every_step_once
PackedSequence                     pack_sequences         VER 2.2      test_packing.py::test_packed_lstm_is_stepping
returns at every kind of border    compute_advantages     DD-PPO 4     test_returns.py::test_gae_against_definition
V-trace                            compute_advantages     IMPALA 4.1   test_returns.py::test_vtrace_against_definition
truncated importance weights       importance_weights     VER 4        test_returns.py::test_importance_weights
clipped objective                  ppo_loss               DD-PPO 2     test_learning.py::test_ppo_loss_by_hand
learned entropy coefficient        ppo_loss               VER 4        test_learning.py::test_entropy_constraint
action-conditional prediction      cpc_loss               VER 4        test_networks.py::test_cpc_stays_in_its_episode
residual encoders                  ResNet                 DD-PPO A     test_networks.py::test_backbones_by_hand
running statistics of RGB          Images.observe         DD-PPO 5     test_networks.py::test_running_statistics
acting by the observation before   EnvironmentRow.step_delayed  VER 4  test_networks.py::test_delayed_actions
transfer to other tasks            start_from             DD-PPO 6     test_networks.py::test_transfer
Habitat through Gymnasium's API    HabitatEnv             -            test_habitat.py::test_spaces_and_measures
dead and hanging environments      Workers.check          -            test_faults.py::test_lost_steps_only
going on after a stop              Collector.restore      -            test_run.py::test_resume_is_going_on
all invariants of a rollout        check_rollout          VER 2.2      test_collection.py::test_check_rollout_notices
timeline of a run                  Trace                  -            test_samplers.py::test_trace
"""

import contextlib
import copy
import ctypes
import functools
import itertools
import json
import math
import multiprocessing.connection
import multiprocessing.forkserver
import os
import select
import shutil
import signal
import sys
import time
import traceback
import zipfile
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
from torch.nn.utils.rnn import PackedSequence
from tqdm import tqdm

# ----------------------------------------------------------------------------------------------------------------------
# Options
# ----------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Options:
    """Train a recurrent policy with Variable Experience Rollout (VER) and PPO."""

    env_id: str = "pointnav"
    """`pointnav`, `flee` or `explore`; any Gymnasium id: `CartPole-v1`, `package.module:Id-v0`; any habitat-lab YAML:
    `benchmark/nav/objectnav/objectnav_mp3d.yaml`, or a path"""
    simulator: Literal["auto", "builtin", "habitat"] = "auto"
    """of pointnav, flee and explore; auto: Habitat where it is installed and has the data set, else the built-in one"""
    habitat_overrides: tuple[str, ...] = ()
    """changes to the habitat-lab configuration: `habitat.environment.max_episode_steps=300 ...`"""
    check_habitat: bool = False
    """say what Habitat needs and what is missing, make one environment and step it; nothing else"""
    exp_name: str = "ver"
    """part of the run folder's name: {runs-dir}/{env-id}__{exp-name}__{seed}__{time}"""
    seed: int = 1
    """of the network, the action sampling, the shuffling and the environments"""
    total_timesteps: int = 2_500_000
    """environment steps to train for"""
    device: str = "auto"
    """`cpu`, `cuda`, `cuda:1`, ...; auto: CUDA where there is a GPU"""

    action_delay: bool = False
    """pi(a_t | s_t-1): environments act by the last observation but one, so that they simulate while the policy computes"""
    camera: str = "depth"
    """pointnav, flee, explore: `depth` or `rgb`"""
    image_size: int = 64
    """pointnav, flee, explore: height and width of the camera image in pixels"""
    num_envs: int = 16
    """N, environments that run in parallel"""
    num_workers: int | Literal["auto"] = "auto"
    """processes that share the environments; 0: all in the main process (very cheap ones, debuggers, exact repetition);
    auto: one for each CPU core, or one for each environment with --sim-latency. Slow simulators want one each"""
    sim_latency: float = 0.0
    """emulated simulator time in milliseconds that each step sleeps on average"""
    sim_latency_spread: tuple[float, float, float] = (0.8, 0.0, 0.0)
    """sigma of the log-normal latency: from step to step, between environments, between episodes"""
    envs_per_worker: int | Literal["auto"] = "auto"
    """another way to give --num-workers. From two on, a worker steps one environment while inference computes the action of
    another (double-buffered sampling)"""
    env_timeout: float = 300.0
    """seconds that a step or a reset may take; then its worker process is killed, and started again"""
    max_worker_restarts: int = 10
    """worker processes that may be started again within an hour, because an environment raised, hung or died"""

    sampler: Literal["ver", "nover", "sync", "async"] = "ver"
    """how experience is collected. ver: T x N steps from whoever delivers them; nover: T steps from each environment, not
    in lock-step (VER without variable rollouts); sync: T steps from each, in lock-step (DD-PPO); async: without end, in
    trajectories of T steps, corrected by V-trace (Sample Factory's APPO)"""
    overlap: bool = False
    """another process collects the next rollout while this one learns: faster where simulators leave the learner's processor
    idle, for experience that is one update older (async always does so)"""
    num_inference_workers: int = 1
    """processes that serve inference requests; with 1 and no overlap, the main process itself"""
    num_steps: int = 128
    """T: a rollout is exactly T x N steps, T from each environment on average"""
    min_requests: int = 1
    """smaller batches wait for more requests, half an inference time at most (can pay on a GPU, never did on a CPU)"""
    max_requests: int = 256
    """largest inference batch: bounds the memory"""

    learner_threads: int | Literal["auto"] = "auto"
    """CPU threads while learning; auto: one, or one for each core (at most 4), whatever was faster when last tried: where
    other programs are busy, threads that wait for each other are many times slower than one alone"""
    learning_rate: float = 1e-3
    """at the start; decays to 0 along a cosine"""
    gamma: float = 0.99
    """discount factor"""
    gae_lambda: float = 0.95
    """lambda of generalized advantage estimation"""
    num_minibatches: int = 2
    """mini-batches per epoch, all of one size"""
    update_epochs: int = 2
    """passes over each rollout"""
    clip_coef: float = 0.2
    """PPO's clipping range of the probability ratio"""
    norm_adv: bool = False
    """normalize the advantages of a rollout (DD-PPO found it unstable, short control tasks want it)"""
    ent_coef: float = 1e-2
    """entropy coefficient; its first value if --target-entropy is set"""
    target_entropy: float | None = None
    """learn the entropy coefficient (within 1e-4 .. 1) such that the entropy stays above this; VER uses 0 for Gaussians"""
    vf_coef: float = 0.5
    """weight of the value loss"""
    max_grad_norm: float = 0.5
    """gradients are scaled down to this norm"""

    encoder: Literal["cnn", "resnet18", "resnet50", "se_resnext50", "se_resnext101", "none"] = "cnn"
    """of images: a small CNN; VER's resnet18; DD-PPO's resnet50, se_resnext50 and se_resnext101 (all of half the usual
    width); none: blind"""
    recurrent: bool = True
    """LSTM, or a feed-forward layer in its place"""
    hidden_size: int = 128
    """H, width of LSTM and encoders"""
    lstm_layers: int = 1
    """L, 1 or 2"""
    predict_std: bool = False
    """continuous actions: the standard deviation depends on the state; else each action number has one"""
    cpc: bool = False
    """auxiliary loss CPC|A: the memory must predict what will be seen after the next actions"""
    bf16: bool = False
    """bfloat16 autocast, CUDA only"""

    runs_dir: str = "runs"
    """where run folders are made"""
    checkpoint_interval: int = 200_000
    """steps between checkpoints (one is always written at the end)"""
    resume: str | None = None
    """run folder to continue; its options hold, except those given here"""
    checkpoint: str | None = None
    """checkpoint file to evaluate, instead of training"""
    init_from: str | None = None
    """checkpoint file whose weights a new run starts from, as far as they fit"""
    freeze_encoder: bool = False
    """with --init-from: the image encoders do not learn"""
    reset_critic: bool = False
    """with --init-from: take all weights but the critic's"""
    eval_episodes: int = 200
    """episodes of the evaluation (0: none)"""
    greedy: bool = False
    """evaluate with the most probable action instead of a sampled one"""
    capture_video: bool = False
    """write a gif of three evaluation episodes"""
    trace: str | None = None
    """file for the run's timeline in Chrome's trace format: open it in ui.perfetto.dev or chrome://tracing"""
    debug: bool = False
    """check every invariant of every rollout, and say every 10 s where collecting stands"""

    @property
    def rollout_steps(self):
        """S, complete steps of one rollout."""
        return self.num_steps * self.num_envs

    # the next four are different in ver_multigpu.py

    @property
    def first_env(self):
        """Number of this process's first environment among those of all ranks (ver_multigpu.py)."""
        return 0

    @property
    def all_envs(self):
        """Environments of all ranks."""
        return self.num_envs

    @property
    def num_buffers(self):
        """Rollout buffers: two where one is learned from, or copied from, while the other is filled."""
        return 2 if self.overlap else 1

    @property
    def more_rules(self):
        """Further rules for `validate_options`: (whether it holds, option, what to do)."""
        return []

    @property
    def overlapping(self):
        """Whether learning and collecting go on at the same time."""
        return self.overlap or self.sampler == "async"

    @property
    def remote(self):
        """Whether processes of their own serve inference requests."""
        return self.overlapping or self.num_inference_workers > 1


class UserError(Exception):
    """Something the user can mend; shown as one line, exit status 2."""


class Interrupted(Exception):
    """Ctrl-C or SIGTERM; the argument is the signal's number."""


SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)  # for the main process; may reach the whole process group


class StopSignal:
    """Notes SIGINT and SIGTERM while it is entered, so that a run ends where its state is whole, between two batches.

    A second one finds the handlers from before, which end the run wherever it is. SIGUSR1 asks for a checkpoint.
    """

    number, save_wanted = None, False
    second_ends = True  # not in ver_multigpu.py: torchrun may pass on a signal that has already come

    def __enter__(self):
        self.handlers = {number: signal.signal(number, self.note) for number in SIGNALS}

    def __exit__(self, *_):
        for number, handler in self.handlers.items():
            signal.signal(number, handler)

    def note(self, number, _frame):
        if number == signal.SIGUSR1:
            self.save_wanted = True
        else:
            self.number = number
            if self.second_ends:
                for stop in (signal.SIGINT, signal.SIGTERM):
                    signal.signal(stop, self.handlers[stop])

    def check(self):
        """Raises Interrupted if a signal has come."""
        if self.number is not None:
            raise Interrupted(self.number)


class EnvironmentFailure(Exception):
    """Environments raised, hung or died too often, one gave a bad answer, or another process has died; exit status 1."""


TINY, HUGE = math.ulp(0.0), sys.float_info.max
RANGES = {  # smallest and largest value of single options; "auto" is always allowed
    **dict.fromkeys(("total_timesteps", "num_steps", "num_minibatches", "update_epochs", "checkpoint_interval"), (1, HUGE)),
    **dict.fromkeys(("learning_rate", "clip_coef", "max_grad_norm", "env_timeout"), (TINY, HUGE)),
    **dict.fromkeys(("eval_episodes", "max_worker_restarts", "sim_latency", "ent_coef", "vf_coef"), (0, HUGE)),
    **dict.fromkeys(("gamma", "gae_lambda"), (0, 1)),
    "num_envs": (1, select.PIPE_BUF // 4),  # one atomic pipe write
    "num_workers": (0, HUGE),
    "seed": (0, 2**63 - 1),
    "envs_per_worker": (1, HUGE),
    "num_inference_workers": (1, 64),
    "learner_threads": (1, 256),
    "min_requests": (1, HUGE),
    "hidden_size": (2, HUGE),
    "lstm_layers": (1, 2),
    "image_size": (8, 1024),
}


def validate_options(options):
    """Raise UserError for the first option that cannot work, with the way to mend it, before anything is started."""
    o = options
    for name, (low, high) in RANGES.items():
        value = getattr(o, name)
        words = {TINY: "a positive number", 0: "0 or more"}.get(low, f"{low} or more")
        words = f"within {low}..{high}" if high < HUGE else words
        require(o, [(value == "auto" or low <= value <= high, name, f"must be {words}")])
    steps = f"--num-steps x --num-envs = {o.rollout_steps}"
    needs_habitat = "is only for --simulator habitat or a habitat-lab YAML"
    writable = not o.trace or os.access(Path(o.trace).parent, os.W_OK) and not os.path.isdir(o.trace)
    rules = [
        (all(0 <= sigma < 10 for sigma in o.sim_latency_spread), "sim_latency_spread", "must be three numbers within 0..10"),
        (o.camera in ("depth", "rgb"), "camera", "must be depth or rgb"),
        (writable, "trace", "cannot be written: name a file in a folder that exists"),
        (o.num_workers == "auto" or o.num_workers <= o.num_envs, "num_workers", f"must be within 0..{o.num_envs}"),
        (
            o.envs_per_worker == "auto" or o.envs_per_worker <= o.num_envs and o.num_workers == "auto",
            "envs_per_worker",
            f"must be within 1..{o.num_envs}, without --num-workers",
        ),
        (
            not o.remote or count_workers(o) <= 128,  # the fork server passes on no more than 250 file descriptors
            "envs_per_worker",
            "must leave at most 128 workers where other processes serve requests",
        ),
        (
            o.num_inference_workers == 1 or o.num_workers != 0,
            "num_inference_workers",
            "needs environments in processes of their own: give --num-workers",
        ),
        (not o.overlap or o.sampler != "async", "overlap", "is only for the other samplers: async always overlaps"),
        (o.sampler != "sync" or o.max_requests >= o.num_envs, "max_requests", "must be at least --num-envs with sync"),
        (
            o.min_requests <= min(o.max_requests, o.num_envs),
            "min_requests",
            "must be within 1..--max-requests and --num-envs",
        ),
        (o.rollout_steps % o.num_minibatches == 0, "num_minibatches", f"must divide {steps}"),
        (o.rollout_steps <= 10**8, "num_steps", f"is absurd: {steps}"),
        (not (o.checkpoint and o.resume), "checkpoint", "evaluates and --resume trains: give one of them"),
        (not o.checkpoint or o.eval_episodes, "eval_episodes", "must be at least 1 with --checkpoint"),
        (
            not o.init_from or not (o.resume or o.checkpoint),
            "init_from",
            "begins a run: leave out --resume and --checkpoint",
        ),
        (not o.freeze_encoder or o.init_from or o.resume, "freeze_encoder", "needs trained encoders: give --init-from"),
        (not o.freeze_encoder or o.encoder != "none", "freeze_encoder", "needs an encoder: --encoder none has no image"),
        (not o.reset_critic or o.init_from, "reset_critic", "needs --init-from"),
        (o.simulator == "auto" or o.env_id in SIMULATED, "simulator", "is only for pointnav, flee and explore"),
        (not o.habitat_overrides or may_use_habitat(o), "habitat_overrides", needs_habitat),
    ]
    require(o, rules + o.more_rules)
    device = choose_device(o)
    if o.bf16 and device.type != "cuda":
        raise UserError(f"--bf16 needs a CUDA device, this run uses {device}: leave it out")


def require(options, rules):
    """Raise UserError for the first rule (whether it holds, option, what to do) that does not hold."""
    for holds, name, message in rules:
        if not holds:
            raise UserError(f"--{name.replace('_', '-')} {getattr(options, name)}: {message}")


def count_workers(options):
    """Worker processes to start: one for each sleeping simulator, else no more than there are CPU cores."""
    if options.num_workers != "auto":
        return options.num_workers
    if options.envs_per_worker != "auto":
        return math.ceil(options.num_envs / options.envs_per_worker)
    return options.num_envs if options.sim_latency else min(options.num_envs, count_cores())


def count_cores():
    """CPU cores that this process may use; those of a machine are shared among the ranks that torchrun starts there."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return max(1, cores // int(os.environ.get("LOCAL_WORLD_SIZE", 1)))


def choose_device(options):
    """The torch device that the options name. Raises UserError if this machine does not have it."""
    name = options.device if options.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.empty(1, device=name).device  # with its number
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"--device {options.device} cannot be used ({reason}): try --device cpu") from None
    return device


# ----------------------------------------------------------------------------------------------------------------------
# Environments: built-in PointNav
# ----------------------------------------------------------------------------------------------------------------------

FORWARD_M, TURN_RAD, SUCCESS_M, STEP_LIMIT = 0.25, math.radians(10), 0.2, 500
AGENT_RADIUS_M, CAMERA_HEIGHT_M, CEILING_M, DEPTH_RANGE_M = 0.18, 1.25, 2.5, 10.0
NUM_PLANS = {"train": 256, "val": 64}  # a data set of floor plans, as Habitat has a data set of scenes
GOAL_SPACE = gym.spaces.Box(-np.inf, np.inf, (3,), np.float32)  # distance in m, cos and sin of the bearing


def ray_boxes(origin_2, direction_R2, boxes_K4):
    """How far each ray flies before it enters a box, in multiples of its direction vector, and which box that is.

    Camera, collisions and line of sight are all this one function. Slab test: a ray is inside a box while it is inside
    the box's x-interval and its y-interval. `boxes_K4` holds x0, y0, x1, y1; origins inside a box do not see that box.

    >>> ray_boxes(np.zeros(2), np.array([[1.0, 0.1]]), np.array([[2.0, -1.0, 3.0, 1.0]]))[0]
    array([2.])
    """
    inverse_2R = 1.0 / (direction_R2.T + 1e-12)  # the shift keeps a ray along an axis from computing 0 * inf
    x0_KR, y0_KR, x1_KR, y1_KR = (
        (boxes_K4[:, side] - origin_2[side % 2])[:, None] * inverse_2R[side % 2] for side in range(4)
    )
    enter_KR = np.maximum(np.minimum(x0_KR, x1_KR), np.minimum(y0_KR, y1_KR))
    leave_KR = np.minimum(np.maximum(x0_KR, x1_KR), np.maximum(y0_KR, y1_KR))
    enter_KR[(enter_KR >= leave_KR) | (enter_KR < 0)] = np.inf
    box_R = enter_KR.argmin(axis=0)
    return enter_KR[box_R, np.arange(len(box_R))], box_R


def inflate(boxes_K4, margin):
    """Boxes grown by `margin` metres on every side."""
    return boxes_K4 + margin * np.array([-1.0, -1.0, 1.0, 1.0])


def overlaps(box, boxes_K4):
    """Whether a box (or point, as a box without size) overlaps each of the boxes; broadcasts."""
    return (
        (box[..., 0] < boxes_K4[:, 2])
        & (box[..., 2] > boxes_K4[:, 0])
        & (box[..., 1] < boxes_K4[:, 3])
        & (box[..., 3] > boxes_K4[:, 1])
    )


def wall_pieces(rng, start, end):
    """What a wall from `start` to `end` leaves standing beside its doorway (one wall in five has none)."""
    if rng.random() < 0.2:
        return [(start, end)]
    width = rng.uniform(0.8, 1.3)
    door = rng.uniform(start + 0.3, end - 0.3 - width)
    return [(start, door), (door + width, end)]


class FloorPlan:
    """Rooms with doorways and furniture, all boxes as high as the room, and shortest paths between any two points.

    The agent is a square of half-width AGENT_RADIUS_M, so it is a point among boxes grown by that much (`blocked_K4`).
    A shortest path among boxes bends only at their corners: distances between all corners that see each other
    (`distance_CC`, completed by Floyd-Warshall) answer every query exactly.
    """

    def __init__(self, rng):
        columns, rows = rng.integers(2, 4, size=2)
        x = np.concatenate([[0], np.cumsum(rng.uniform(2.4, 3.8, columns))])
        y = np.concatenate([[0], np.cumsum(rng.uniform(2.4, 3.8, rows))])
        self.size = np.array([x[-1], y[-1]])
        boxes = [[-1, -1, 0, y[-1] + 1], [x[-1], -1, x[-1] + 1, y[-1] + 1], [0, -1, x[-1], 0], [0, y[-1], x[-1], y[-1] + 1]]
        for i in range(1, columns):
            for j in range(rows):
                boxes += [[x[i] - 0.08, a, x[i] + 0.08, b] for a, b in wall_pieces(rng, y[j], y[j + 1])]
        for j in range(1, rows):
            for i in range(columns):
                boxes += [[a, y[j] - 0.08, b, y[j] + 0.08] for a, b in wall_pieces(rng, x[i], x[i + 1])]
        self.num_walls = len(boxes)
        for i in range(columns):
            for j in range(rows):
                center, half = rng.uniform([x[i], y[j]], [x[i + 1], y[j + 1]]), rng.uniform(0.15, 0.5, 2)
                box = np.concatenate([center - half, center + half])
                if not overlaps(inflate(box, 0.6), np.array(boxes)).any():  # leaves a passage on every side
                    boxes.append(box.tolist())
        self.boxes_K4 = np.array(boxes)
        self.blocked_K4 = inflate(self.boxes_K4, AGENT_RADIUS_M)
        corners_C2 = inflate(self.blocked_K4, 0.01)[:, [[0, 1], [0, 3], [2, 1], [2, 3]]].reshape(-1, 2)
        inside_C = ((corners_C2 > 0) & (corners_C2 < self.size)).all(axis=1)
        self.corners_C2 = corners_C2[inside_C & self.is_free(corners_C2)]
        self.distance_CC = np.stack([self.straight(corner_2) for corner_2 in self.corners_C2])
        for via in range(len(self.distance_CC)):
            np.minimum(self.distance_CC, self.distance_CC[:, via, None] + self.distance_CC[via], out=self.distance_CC)
        self.palette_K3 = rng.uniform(90, 255, (len(boxes), 3))

    def is_free(self, points_P2, margin=0.0):
        """Which points the agent's centre may stand on."""
        return ~overlaps(np.tile(points_P2, 2)[:, None], inflate(self.blocked_K4, margin)).any(axis=1)

    def straight(self, point_2):
        """Distance in metres from the point to every corner in straight line of sight, infinite to the others."""
        offset_C2 = self.corners_C2 - point_2
        reach_C, _ = ray_boxes(point_2, offset_C2, self.blocked_K4)
        return np.where(reach_C >= 1, np.hypot(*offset_C2.T), np.inf)


@functools.lru_cache(maxsize=sum(NUM_PLANS.values()))
def floor_plan(split, index):
    """Floor plan number `index` of the split: training and validation plans come from disjoint random streams."""
    return FloorPlan(np.random.default_rng([("train", "val").index(split), index]))


class PointNav(gym.Env):
    """PointGoal navigation (DD-PPO section 4): reach a point given in the agent's own polar coordinates.

    Observation: `depth` (float32, 0..1 = 0..10 m along the optical axis, H x W x 1) or `rgb` (uint8, H x W x 3), 90 degrees
    wide, and `goal` = [distance in m, cos, sin of its bearing]. Actions: stop, forward 0.25 m, left 10, right 10 degrees.
    Reward: decrease of geodesic distance - 0.01, and 2.5 * SPL at a successful stop (within 0.2 m). A stop terminates, the
    500th step truncates. The seed of `reset` decides the floor plan and the episode.
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": 10, "metrics": ("success", "spl", "distance_to_goal")}

    def __init__(self, split="train", camera="depth", image_size=64, render_mode=None):
        self.split, self.camera, self.render_mode = split, camera, render_mode
        image = {
            "depth": gym.spaces.Box(0, 1, (image_size, image_size, 1), np.float32),
            "rgb": gym.spaces.Box(0, 255, (image_size, image_size, 3), np.uint8),
        }[camera]
        self.observation_space = gym.spaces.Dict({camera: image, "goal": GOAL_SPACE})
        self.action_space = gym.spaces.Discrete(4)
        slope = (np.arange(image_size) + 0.5) / image_size * 2 - 1  # of the rays: -1..1 is 90 degrees
        self.column_slope_W = -slope
        to_plane = np.where(slope > 0, CAMERA_HEIGHT_M, CEILING_M - CAMERA_HEIGHT_M)
        self.plane_m_H1 = np.minimum(to_plane / np.abs(slope).clip(1e-9), DEPTH_RANGE_M).astype(np.float32)[:, None]
        self.plane_rgb_H13 = np.where(slope[:, None, None] > 0, [120.0, 100.0, 80.0], [230.0, 230.0, 240.0])

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        rng = self.np_random
        self.plan = floor_plan(self.split, int(rng.integers(NUM_PLANS[self.split])))
        self.geodesic = np.inf
        while not 1.0 <= self.geodesic < np.inf:
            points_P2 = rng.uniform(0, self.plan.size, (64, 2))
            self.position, self.goal = points_P2[self.plan.is_free(points_P2, 0.02)][:2]
            self.aim(self.goal)
            self.start_geodesic = self.geodesic
        self.heading = rng.uniform(-np.pi, np.pi)
        self.steps, self.path_m, self.path = 0, 0.0, [self.position]
        return self.observe(), {}

    def step(self, action):
        self.steps += 1
        if action == 1:
            self.move()
        elif action >= 2:
            self.heading += TURN_RAD if action == 2 else -TURN_RAD
        previous = self.geodesic
        self.geodesic = self.waypoints(self.position).min() if action == 1 else previous
        terminated = action == 0
        success = float(terminated and np.hypot(*(self.goal - self.position)) <= SUCCESS_M)
        spl = success * self.start_geodesic / max(self.path_m, self.start_geodesic)
        info = {"success": success, "spl": spl, "distance_to_goal": self.geodesic}
        return self.observe(), previous - self.geodesic - 0.01 + 2.5 * spl, terminated, self.steps >= STEP_LIMIT, info

    def aim(self, point_2):
        """Measure `geodesic` to this point from now on."""
        self.waypoints_C2 = np.vstack([self.plan.corners_C2, point_2])
        self.beyond_C = np.append((self.plan.straight(point_2) + self.plan.distance_CC).min(axis=1), 0.0)
        self.geodesic = self.waypoints(self.position).min()

    def move(self):
        """One step forward; at an obstacle the rest of the way slides along its side."""
        way_2 = FORWARD_M * np.array([math.cos(self.heading), math.sin(self.heading)])
        for _ in range(2):
            reach_1, box_1 = ray_boxes(self.position, way_2[None], self.plan.blocked_K4)
            share = min(1.0, max(0.0, reach_1[0] - 1e-3))
            self.position = self.position + share * way_2
            self.path_m += share * math.hypot(*way_2)
            if reach_1[0] > 1.0:
                break
            box_4 = self.plan.blocked_K4[box_1[0]]
            beside_x = not box_4[0] < self.position[0] < box_4[2]  # it touches a side that faces along x
            way_2 = (1 - share) * way_2 * ([0, 1] if beside_x else [1, 0])
            if not way_2.any():
                break
        self.path.append(self.position)

    def waypoints(self, position_2):
        """Length of the shortest path to the goal through each point in sight (corners, and last the goal itself)."""
        offset_C2 = self.waypoints_C2 - position_2
        reach_C, _ = ray_boxes(position_2, offset_C2, self.plan.blocked_K4)
        return np.where(reach_C >= 1, np.hypot(*offset_C2.T) + self.beyond_C, np.inf)

    def observe(self):
        """What the agent perceives: one ray per image column gives the wall's depth; floor and ceiling are planes."""
        cos, sin = math.cos(self.heading), math.sin(self.heading)
        ray_W2 = np.stack([cos - sin * self.column_slope_W, sin + cos * self.column_slope_W], axis=1)
        wall_m_W, box_W = ray_boxes(self.position, ray_W2, self.plan.boxes_K4)
        if self.camera == "depth":
            image = np.minimum(self.plane_m_H1, wall_m_W.astype(np.float32))[..., None] / DEPTH_RANGE_M
        else:
            wall_HW1 = (wall_m_W < self.plane_m_H1)[..., None]
            color = np.where(wall_HW1, self.plan.palette_K3[box_W], self.plane_rgb_H13)
            shade = 1 / (1 + 0.15 * np.minimum(self.plane_m_H1, wall_m_W))
            image = (color * shade[..., None]).astype(np.uint8)
        offset = self.goal - self.position
        distance, bearing = np.hypot(*offset), math.atan2(offset[1], offset[0]) - self.heading
        return {self.camera: image, "goal": np.array([distance, math.cos(bearing), math.sin(bearing)], np.float32)}

    def render(self):
        """The plan from above (40 pixels per metre): walls, furniture, shortest path, path so far, goal, agent; beside
        it what the camera sees. uint8, height x width x 3."""
        scale, margin = 40, 8
        extent = (self.plan.size * scale).astype(int)
        picture = np.full((*extent[::-1] + 2 * margin, 3), 255, np.uint8)
        for box, (x0, y0, x1, y1) in enumerate((self.plan.boxes_K4 * scale + margin).round().clip(0).astype(int)):
            picture[y0:y1, x0:x1] = 60 if box < self.plan.num_walls else 170

        def draw(points, radius, color):
            for x, y in (np.asarray(points) * scale + margin).astype(int):
                picture[y - radius : y + radius + 1, x - radius : x + radius + 1] = color

        draw(between(self.shortest_path()), 1, (120, 200, 120))
        draw(between(self.path), 1, (60, 60, 220))
        draw([self.goal], 5, (40, 160, 40))
        ahead = self.position + 0.3 * np.array([math.cos(self.heading), math.sin(self.heading)])
        draw(between([self.position, ahead]), 1, (220, 60, 40))
        draw([self.position], 4, (220, 60, 40))
        picture = picture[::-1]  # y points up
        view = self.observe()[self.camera]
        view = np.broadcast_to((view * 255).astype(np.uint8) if self.camera == "depth" else view, (*view.shape[:2], 3))
        zoom = max(1, len(picture) // len(view))
        view = view.repeat(zoom, axis=0).repeat(zoom, axis=1)[: len(picture)]
        framed = np.full((len(picture), view.shape[1] + margin, 3), 255, np.uint8)
        framed[: len(view), margin:] = view
        return np.concatenate([picture, framed], axis=1)

    def shortest_path(self):
        """Points of the shortest path from here to the goal."""
        points, beyond = [self.position], np.inf
        while beyond > 0:
            via = np.where(self.beyond_C < beyond, self.waypoints(points[-1]), np.inf).argmin()
            points, beyond = [*points, self.waypoints_C2[via]], self.beyond_C[via]
        return points


def between(points, spacing=0.02):
    """Points every `spacing` metres along a polyline."""
    pairs = zip(points[:-1], points[1:])
    return [a + (b - a) * t for a, b in pairs for t in np.arange(0, 1, spacing / max(np.hypot(*(b - a)), spacing))]


class TransferTask(gym.Wrapper):
    """The tasks that DD-PPO's agents were transferred to (section 6), in either simulator: `flee`, as far from the start as
    possible (reward: increase of the geodesic distance in m), and `explore`, as many places as possible (reward: 1 for
    every new square metre). Spaces are those of PointNav; the goal is a dummy, as in the paper. A stop ends the episode.
    """

    def __init__(self, env, task):
        super().__init__(env)
        self.flees = task == "flee"
        self.metric = "distance_from_start" if self.flees else "places_visited"
        self.metadata = {"render_modes": ["rgb_array"], "metrics": (self.metric,)}

    def reset(self, **more):
        observation, info = self.env.reset(**more)
        self.env.unwrapped.aim(self.env.unwrapped.position)
        self.places, self.score = set(), 0.0
        self.measure()
        return self.without_goal(observation), info

    def step(self, action):
        observation, _, terminated, truncated, _ = self.env.step(action)
        before = self.score
        self.measure()
        return self.without_goal(observation), self.score - before, terminated, truncated, {self.metric: self.score}

    def measure(self):
        """Metres from the start, or square metres visited."""
        if self.flees:
            self.score = float(self.env.unwrapped.geodesic)
        else:
            self.places.add(tuple(np.floor(self.env.unwrapped.position[[0, -1]]).astype(int)))  # without the height
            self.score = float(len(self.places))

    def without_goal(self, observation):
        """The same observation with a goal that says nothing."""
        return observation | {"goal": np.array([1, 1, 0], np.float32)}


# ----------------------------------------------------------------------------------------------------------------------
# Environments: Habitat
# ----------------------------------------------------------------------------------------------------------------------

SIMULATED = ("pointnav", "flee", "explore")  # tasks that both simulators have
HABITAT_POINTNAV = "benchmark/nav/pointnav/pointnav_habitat_test.yaml"
EPISODES_PER_SCENE = 50  # in a row while training: loading a scene takes seconds
POLAR = ("pointgoal_with_gps_compass", "pointgoal")  # observations [distance in m, angle]


def uses_habitat(options):
    """Whether the options name an environment of Habitat."""
    return options.env_id.endswith(".yaml") or (options.env_id in SIMULATED and options.simulator == "habitat")


def may_use_habitat(options):
    """The same before --simulator auto has been resolved."""
    return uses_habitat(options) or (options.env_id in SIMULATED and options.simulator == "auto")


def habitat_config(options, split):
    """habitat-lab's configuration: that of the task, what our options say, and last --habitat-overrides."""
    for name in ("MAGNUM_LOG", "HABITAT_SIM_LOG"):  # a page for each simulator otherwise
        os.environ.setdefault(name, "quiet")
    import habitat

    habitat.logger.setLevel("WARNING")
    device = choose_device(options)
    gpu = device.index if device.type == "cuda" else -1
    overrides = [f"habitat.dataset.split={split}", f"habitat.simulator.habitat_sim_v0.gpu_device_id={gpu}"]
    if options.env_id in SIMULATED:
        sensors, size = "habitat.simulator.agents.main_agent.sim_sensors", options.image_size
        overrides += [f"{sensors}.{options.camera}_sensor.{side}={size}" for side in ("width", "height")]
        overrides.append(f"~{sensors}.{'rgb' if options.camera == 'depth' else 'depth'}_sensor")
    path = HABITAT_POINTNAV if options.env_id in SIMULATED else options.env_id
    return habitat.get_config(path, [*overrides, *options.habitat_overrides])


def habitat_episodes(options):
    """The files of training and validation episodes."""
    return [habitat_config(options, split).habitat.dataset.data_path.format(split=split) for split in ("train", "val")]


def missing_for_habitat(options):
    """Why the options' environment cannot be had from Habitat, and how to mend it; None if it can."""
    try:
        import habitat_sim  # noqa: F401

        files = habitat_episodes(options)
    except ImportError as error:
        advice = "install habitat-sim from conda (aihabitat-nightly) or from source, then pip install habitat-lab"
        return f"{error.name} cannot be imported ({error}): {advice}"
    except Exception as error:  # a file or key that is not there, a syntax error: whatever the parser raises
        reason = " ".join(str(error).split())[:200]
        return f"its configuration cannot be loaded ({reason}): look at --env-id and --habitat-overrides"
    advice = "download it, or name its place by --habitat-overrides habitat.dataset.data_path=..."
    absent = [path for path in files if not os.path.exists(path)]
    return f"data set {absent[0]} is not there: {advice}" if absent else None


def choose_simulator(options):
    """The options with --simulator auto resolved, and said. Raises UserError if Habitat is asked for and not there."""
    if not may_use_habitat(options):
        return options
    reason = missing_for_habitat(options)
    if reason and (uses_habitat(options) or options.habitat_overrides):
        raise UserError(f"no Habitat: {reason}; python ver_ppo.py --check-habitat says more")
    if not uses_habitat(options):
        print(f"simulator: {f'built-in ({reason})' if reason else 'Habitat'}")
        options = replace(options, simulator="builtin" if reason else "habitat")
    if uses_habitat(options) and options.num_workers == 0:
        raise UserError("--num-workers 0: several simulators of Habitat in the main process would end it: give at least 1")
    return options


def to_gymnasium_space(space):
    """A space of the old gym as Gymnasium's; one whole number in a Box (an object's category) as Discrete."""
    if hasattr(space, "spaces"):
        return gym.spaces.Dict({key: to_gymnasium_space(part) for key, part in space.spaces.items()})
    if hasattr(space, "n"):
        return gym.spaces.Discrete(int(space.n))
    if space.shape == (1,) and np.issubdtype(space.dtype, np.integer):
        return gym.spaces.Discrete(int(space.high[0] - space.low[0]) + 1, start=int(space.low[0]))
    return gym.spaces.Box(space.low, space.high, space.shape, space.dtype)


class HabitatEnv(gym.Env):
    """A habitat-lab task as a Gymnasium environment; numbers are those of habitat-lab 0.3 (old gym API, four results).

    Environment `number` of all gets scenes of its own; where there are more environments than scenes, those that share one
    share its episodes out. `reset` takes the episode's number, so that an episode can be repeated: training stays in a scene
    for EPISODES_PER_SCENE episodes, drawn by the seed; validation plays its episodes in order, scenes by turns. A polar goal
    becomes `goal` = [distance, cos, sin], as in PointNav. Reaching the step limit truncates; whatever else ends an episode
    terminates it. Every scalar that the task measures is a metric.
    """

    def __init__(self, options, split, number=0, render_mode=None):
        import habitat
        from habitat.gym import make_gym_from_config

        config = habitat_config(options, split).habitat
        scenes = list(config.dataset.content_scenes)
        if "*" in scenes:
            scenes = sorted(habitat.make_dataset(config.dataset.type).get_scenes_to_load(config.dataset))
        if scenes:
            with habitat.config.read_write(config):
                config.dataset.content_scenes = scenes[number :: options.all_envs] or [scenes[number % len(scenes)]]
        dataset = habitat.make_dataset(config.dataset.type, config=config.dataset)
        if not dataset.episodes:
            raise ValueError(f"split {split} has no episodes")
        num_scenes = max(1, len(scenes))
        sharers = len(range(number % num_scenes, options.all_envs, num_scenes))  # environments that have this scene
        self.by_scene = {}
        for episode in dataset.episodes[number // num_scenes % len(dataset.episodes) :: sharers]:
            self.by_scene.setdefault(episode.scene_id, []).append(episode)
        self.by_scene = list(self.by_scene.values())
        self.gym_env = make_gym_from_config(config, dataset)
        self.habitat_env, self.split, self.render_mode = self.gym_env.unwrapped.habitat_env, split, render_mode
        self.action_space = to_gymnasium_space(self.gym_env.action_space)
        space = to_gymnasium_space(self.gym_env.observation_space)
        self.observation_space = gym.spaces.Dict(
            {"goal" if key in POLAR else key: GOAL_SPACE if key in POLAR else part for key, part in space.spaces.items()}
        )

    @property
    def metadata(self):
        """The metrics' names: known once there is an episode."""
        if not scalars(self.habitat_env.get_metrics()):
            self.reset(seed=0)
        return {"render_modes": ["rgb_array"], "metrics": tuple(scalars(self.habitat_env.get_metrics()))}

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        number = (options or {}).get("episode", 0)
        if self.split == "train":
            episodes = self.by_scene[number // EPISODES_PER_SCENE % len(self.by_scene)]
            episode = episodes[int(self.np_random.integers(len(episodes)))]
        else:
            episodes = self.by_scene[number % len(self.by_scene)]
            episode = episodes[number // len(self.by_scene) % len(episodes)]
        self.habitat_env.current_episode = episode
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

    def aim(self, point_3):
        """Measure `geodesic` to this point from now on."""
        self.target = point_3

    @property
    def position(self):
        """Of the agent, x, height, y in m."""
        return np.array(self.habitat_env.sim.get_agent_state().position)

    @property
    def geodesic(self):
        """Metres from the agent to the point that `aim` was given."""
        return self.habitat_env.sim.geodesic_distance(self.position, self.target)

    def render(self):
        """Everything that the sensors and the map show, side by side."""
        return self.gym_env.render("rgb_array")

    def close(self):
        self.gym_env.close()


def scalars(info):
    """The numbers in nested measures, flat.

    >>> scalars({"spl": 0.5, "collisions": {"count": 3, "is_collision": False}, "map": np.zeros((2, 2))})
    {'spl': 0.5, 'collisions/count': 3.0, 'collisions/is_collision': 0.0}
    """
    return {key: float(value) for key, value in flatten(info).items() if isinstance(value, (int, float, np.number))}


def check_habitat(options):
    """Say line by line what Habitat needs, what is there, and how to mend what is missing. Returns the exit status."""
    if options.env_id in SIMULATED:
        options = replace(options, simulator="habitat")

    def packages():
        import habitat
        import habitat_sim

        bullet = "with" if habitat_sim.built_with_bullet else "without"
        return f"habitat-sim {habitat_sim.__version__} ({bullet} Bullet), habitat-lab {habitat.__version__}"

    def data_set():
        paths = [*habitat_episodes(options), habitat_config(options, "train").habitat.dataset.scenes_dir]
        for path in paths:
            if not os.path.exists(path):
                raise FileNotFoundError(f"{path} is not there")
        return ", ".join(paths)

    def steps():
        env, began = make_env(options, "train"), time.perf_counter()
        env.reset(seed=0)
        for _ in range(100):
            if any(env.step(env.action_space.sample())[2:4]):
                env.reset(seed=0)
        sec, spaces, metrics = time.perf_counter() - began, flatten(env.observation_space), env.metadata["metrics"]
        env.close()
        return f"{100 / sec:.0f} steps/s; observations {list(spaces)}, {env.action_space}, measures {list(metrics)}"

    install = "conda install habitat-sim withbullet headless -c conda-forge -c aihabitat-nightly; pip install habitat-lab"
    download = "python -m habitat_sim.utils.datasets_download --uids habitat_test_pointnav_dataset habitat_test_scenes"
    elsewhere = "habitat.dataset.data_path=... habitat.dataset.scenes_dir=..."
    checks = {
        "packages": (packages, install),
        "data set": (data_set, f"{download}; or --habitat-overrides {elsewhere}"),
        "100 steps": (steps, "without a GPU EGL_PLATFORM=surfaceless and Mesa's libEGL; see what was printed above"),
    }
    for name, (check, advice) in checks.items():
        try:
            print(f"ok       {name}: {check()}")
        except Exception as error:  # whatever packages and drivers raise
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            print(f"MISSING  {name}: {reason}\n         to mend it: {advice}")
            return 1
    return 0


# ----------------------------------------------------------------------------------------------------------------------
# Environments: any Gymnasium environment
# ----------------------------------------------------------------------------------------------------------------------


def make_env(options, split, render_mode=None, number=0):
    """Environment `number` (of all ranks) that the options name. `split` (train or val) decides about floor plans or scenes
    and episodes; other environments differ in seeds."""
    try:
        if uses_habitat(options):
            env = HabitatEnv(options, split, number, render_mode)
        elif options.env_id in SIMULATED:
            env = PointNav(split, options.camera, options.image_size, render_mode)
        else:
            more = {"render_mode": render_mode} if render_mode else {}  # not all environments take it
            return gym.make(options.env_id, disable_env_checker=True, **more)
        return TransferTask(env, options.env_id) if options.env_id in ("flee", "explore") else env
    except Exception as error:  # whatever the environment's own code raises
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise UserError(
            f"--env-id {options.env_id} cannot be made ({reason}); pointnav, CartPole-v1, module:Id-v0 can"
        ) from error


@dataclass(frozen=True)
class Spec:
    """What trainer and network must know of an environment; plain, so that it can be sent to worker processes."""

    observations: dict[str, gym.Space]  # nested Dict spaces are flat here: {"robot/arm": Box(7,)}
    action: gym.Space
    metrics: tuple[str, ...]  # scalars that the last info of an episode holds, named in the environment's metadata

    @property
    def discrete_actions(self):
        """Choices of each action number, empty for continuous actions."""
        if isinstance(self.action, gym.spaces.Discrete):
            return [int(self.action.n)]
        return self.action.nvec.ravel().tolist() if isinstance(self.action, gym.spaces.MultiDiscrete) else []

    @property
    def action_numbers(self):
        """A, numbers that make one action."""
        return len(self.discrete_actions) or math.prod(self.action.shape)


def flatten(tree, name="", join="/"):
    """Nested dictionaries (or Dict spaces) as one flat dictionary; anything else under the key `obs`.

    >>> flatten({"goal": 1, "robot": {"arm": 2}})
    {'goal': 1, 'robot/arm': 2}
    """
    if not isinstance(tree, (dict, gym.spaces.Dict)):
        return {name or "obs": tree}
    return {
        key: leaf for child, below in tree.items() for key, leaf in flatten(below, name + join * bool(name) + child).items()
    }


def describe_env(options):
    """Make one environment, look at its spaces and close it. Raises UserError for a space that is not supported."""
    env = make_env(options, "train", "rgb_array" if options.capture_video else None)
    observations, action = flatten(env.observation_space), env.action_space
    spec = Spec(observations, action, tuple(env.metadata.get("metrics", ())))
    env.close()
    spaces = gym.spaces
    for key, space in observations.items():
        if not isinstance(space, (spaces.Box, spaces.Discrete, spaces.MultiBinary)) or 0 in (space.shape or ()):
            raise UserError(f"observation {key!r} is {space}: only Dict, Box, Discrete and MultiBinary are supported")
    if not isinstance(action, (spaces.Box, spaces.Discrete, spaces.MultiDiscrete)) or not spec.action_numbers:
        raise UserError(f"the action is {action}: only Discrete, MultiDiscrete and Box are supported")
    if isinstance(action, spaces.Box) and not np.issubdtype(action.dtype, np.floating):
        raise UserError(f"the action is {action}: a Box of actions must be of floating-point numbers")
    return spec


def to_env_action(space, action_A):
    """The policy's numbers as the environment wants them. Discrete: index plus the space's start. Box: -1..1 is the range
    low..high where it is bounded, and what lies beyond is clipped.

    >>> to_env_action(gym.spaces.Box(0.0, 4.0, (2,)), np.array([0.5, 7.0], np.float32))
    array([3., 4.], dtype=float32)
    """
    if isinstance(space, gym.spaces.Discrete):
        return int(action_A[0] + space.start)
    if isinstance(space, gym.spaces.MultiDiscrete):
        return action_A.reshape(space.shape).astype(space.dtype) + space.start
    action = action_A.reshape(space.shape)
    bounded = np.isfinite(space.low) & np.isfinite(space.high)
    low, high = np.where(bounded, space.low, -1), np.where(bounded, space.high, 1)
    return np.clip(low + (action + 1) / 2 * (high - low), space.low, space.high).astype(space.dtype)


def episode_seed(split, seed, env, episode):
    """Seed of one episode: 32 bits, so that every simulator takes it; independent streams for training and validation."""
    return int(np.random.SeedSequence([("train", "val").index(split), seed, env, episode]).generate_state(1)[0])


# ----------------------------------------------------------------------------------------------------------------------
# Policy
# ----------------------------------------------------------------------------------------------------------------------


def is_image(space):
    """Whether an image encoder reads this observation: height x width (x channels), of at least 8 x 8 pixels."""
    shape = np.array(space.shape)
    return isinstance(space, gym.spaces.Box) and len(shape) in (2, 3) and np.sort(shape)[-2] >= 8


def image_layout(space):
    """Channels, height and width of an image observation, and whether the channels come last.

    >>> image_layout(gym.spaces.Box(0, 255, (3, 36, 40), np.uint8))
    (3, 36, 40, False)
    """
    shape = space.shape if len(space.shape) == 3 else (*space.shape, 1)
    last = len(space.shape) == 2 or shape[2] < shape[0]
    return (shape[2], *shape[:2], True) if last else (*shape, False)


def orthogonal(layer, gain=math.sqrt(2)):
    """Orthogonal weights and zero biases, as is usual for PPO (Huang et al. 2022, detail 2)."""
    nn.init.orthogonal_(layer.weight, gain)
    nn.init.zeros_(layer.bias)
    return layer


class Images(nn.Module):
    """The images of one size (RGB and depth, say), stacked as channels. uint8 is scaled from 0..255, bounded floats from
    low..high to 0..1; where there is uint8, every channel is normalized by running statistics (DD-PPO section 5), which
    `observe` gathers. They are parameters without gradient: whoever gets the weights gets them too."""

    def __init__(self, spaces):
        super().__init__()
        self.layouts = {key: image_layout(space) for key, space in spaces.items()}
        self.size, self.channels = next(iter(self.layouts.values()))[1:3], sum(layout[0] for layout in self.layouts.values())
        bounds = {key: (float(space.low.min()), float(space.high.max())) for key, space in spaces.items()}
        self.ranges = {key: pair if np.isfinite(pair).all() else (0.0, 1.0) for key, pair in bounds.items()}
        self.normalized = any(space.dtype == np.uint8 for space in spaces.values())
        moments_2C = torch.tensor([[0.0], [1.0]]).repeat(1, self.channels)  # means of value and square
        self.moments_2C = nn.Parameter(moments_2C, requires_grad=False)
        self.rollouts = nn.Parameter(torch.zeros(()), requires_grad=False)  # how many rollouts they are the means of

    def stack(self, obs):
        """B x channels x height x width, 0..1"""
        parts = []
        for key, (channels, *_, channels_last) in self.layouts.items():
            image = obs[key].unsqueeze(-1) if obs[key].dim() == 3 else obs[key]
            image = image.permute(0, 3, 1, 2) if channels_last else image  # stays channels-last in memory: fast
            low, high = self.ranges[key]
            parts.append(image.float() if (low, high) == (0.0, 1.0) else (image.float() - low) / (high - low))
        return torch.cat(parts, dim=1) if len(parts) > 1 else parts[0]

    def forward(self, obs):
        """B x channels x height x width, normalized"""
        image_BCHW = self.stack(obs)
        if not self.normalized:
            return image_BCHW
        mean_C, square_C = self.moments_2C.unsqueeze(-1).unsqueeze(-1)
        return (image_BCHW - mean_C) / (square_C - mean_C**2).clamp(min=1e-4).sqrt()

    @torch.no_grad()
    def observe(self, obs, average):
        """Let the statistics take in the images of another rollout, of all ranks."""
        image_BCHW = self.stack(obs)
        moments_2C = torch.stack([image_BCHW.mean(dim=(0, 2, 3)), (image_BCHW**2).mean(dim=(0, 2, 3))])
        average([moments_2C])
        self.rollouts += 1
        self.moments_2C += (moments_2C - self.moments_2C) / self.rollouts


class SmallCNN(nn.Module):
    """Small CNN for images of any size. Its first layers read patches that do not overlap: on a CPU that is twice as fast
    as the usual overlapping 8x8 and 4x4 kernels."""

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
        """Images -> B x out_features"""
        return torch.relu(self.out(self.convolutions(self.images(obs))))


@dataclass(frozen=True)
class Backbone:
    """One row of the table of residual networks, all of half the usual width and with GroupNorm."""

    blocks: tuple[int, int, int, int]  # in the four stages
    bottleneck: bool = True  # 1x1, 3x3, 1x1 convolutions; else 3x3, 3x3
    groups: int = 1  # of the 3x3 convolution: ResNeXt's cardinality
    squeeze: bool = False  # squeeze and excitation
    modern: bool = False  # patch-ify stem, down-sampling between the stages, layer scale, dilation


BACKBONES = {
    "resnet18": Backbone((2, 2, 2, 2), bottleneck=False, modern=True),  # VER section 4
    "resnet50": Backbone((3, 4, 6, 3)),  # DD-PPO section 4, appendix A
    "se_resnext50": Backbone((3, 4, 6, 3), groups=16, squeeze=True),
    "se_resnext101": Backbone((3, 4, 23, 3), groups=16, squeeze=True),
}


def convolution(channels_in, channels_out, kernel, stride=1, groups=1, dilation=1, padding=None):
    """Convolution without bias, then GroupNorm: batch statistics mislead where experience is correlated (DD-PPO, A)."""
    padding = dilation * (kernel // 2) if padding is None else padding
    layer = nn.Conv2d(channels_in, channels_out, kernel, stride, padding, dilation, groups, bias=False)
    return nn.Sequential(layer, nn.GroupNorm(16, channels_out))


class Block(nn.Module):
    """Residual block (He et al. 2016), with the extras of its backbone: ResNeXt's groups, squeeze and excitation, and as in
    ConvNeXt layer scale; its second 3x3 kernel sees 5x5 pixels by dilation."""

    def __init__(self, kind, channels_in, planes, stride):
        super().__init__()
        channels_out = 4 * planes if kind.bottleneck else planes
        if kind.bottleneck:
            width = planes * (2 if kind.groups > 1 else 1)
            layers = [convolution(channels_in, width, 1), nn.ReLU(), convolution(width, width, 3, stride, kind.groups)]
            layers += [nn.ReLU(), convolution(width, channels_out, 1)]
        else:
            layers = [convolution(channels_in, planes, 3, stride), nn.ReLU()]
            layers += [convolution(planes, planes, 3, dilation=2 if kind.modern else 1)]
        self.layers = nn.Sequential(*layers)
        same = stride == 1 and channels_in == channels_out
        self.shortcut = nn.Identity() if same else convolution(channels_in, channels_out, 1, stride)
        self.scale = nn.Parameter(torch.full((channels_out, 1, 1), 0.1)) if kind.modern else None  # Touvron et al. 2021
        narrow = channels_out // 16
        self.squeeze = nn.Sequential(
            nn.AdaptiveAvgPool2d(1), nn.Conv2d(channels_out, narrow, 1), nn.ReLU(),
            nn.Conv2d(narrow, channels_out, 1), nn.Sigmoid(),
        ) if kind.squeeze else None  # fmt: skip

    def forward(self, x):
        """B x channels x height x width"""
        change = self.layers(x)
        if self.squeeze is not None:
            change = change * self.squeeze(change)
        if self.scale is not None:
            change = change * self.scale
        return torch.relu(self.shortcut(x) + change)


class ResNet(nn.Module):
    """2x2 average pooling, backbone, compression of its last feature map to about 2,048 numbers (DD-PPO appendix A), linear
    layer."""

    def __init__(self, images, out_features, kind):
        super().__init__()
        self.images, self.out_features = images, out_features
        channels, layers = 32, [nn.AvgPool2d(2)]
        if kind.modern:  # patches of 4x4 pixels (VER section 4)
            layers += [convolution(images.channels, channels, 4, 4, padding=0)]
        else:
            layers += [convolution(images.channels, channels, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
        for stage, blocks in enumerate(kind.blocks):
            planes, stride = 32 * 2**stage, 1 if stage == 0 else 2
            if kind.modern and stage:
                layers += [nn.GroupNorm(16, channels), nn.Conv2d(channels, planes, 2, 2)]
                channels, stride = planes, 1
            for block in range(blocks):
                layers.append(Block(kind, channels, planes, stride if block == 0 else 1))
                channels = 4 * planes if kind.bottleneck else planes
        self.backbone = nn.Sequential(*layers)
        with torch.no_grad():
            height, width = self.backbone(torch.zeros(1, images.channels, *images.size)).shape[2:]
        compressed = min(512, round(2048 / (height * width)))  # smaller images: fewer
        self.compress = nn.Sequential(
            nn.Conv2d(channels, compressed, 3, padding=1, bias=False), nn.GroupNorm(1, compressed), nn.ReLU(), nn.Flatten()
        )
        self.out = orthogonal(nn.Linear(compressed * height * width, out_features))

    def forward(self, obs):
        """Images -> B x out_features"""
        return torch.relu(self.out(self.compress(self.backbone(self.images(obs)))))


class Vector(nn.Module):
    """Two-layer perceptron for a vector, or (beside the papers' encoders) one linear layer to 32 features as in DD-PPO.
    Discrete observations enter as one-hot vectors."""

    def __init__(self, key, space, out_features, linear):
        super().__init__()
        self.key, self.choices = key, int(space.n) if isinstance(space, gym.spaces.Discrete) else 0
        self.start = int(space.start) if self.choices else 0
        in_features = self.choices or math.prod(space.shape)
        self.out_features = 32 if linear else out_features
        self.layers = orthogonal(nn.Linear(in_features, self.out_features)) if linear else nn.Sequential(
            orthogonal(nn.Linear(in_features, out_features)), nn.Tanh(),
            orthogonal(nn.Linear(out_features, out_features)), nn.Tanh(),
        )  # fmt: skip

    def forward(self, obs):
        """The observation, B x any shape -> B x features"""
        vector = obs[self.key]
        if self.choices:
            vector = nn.functional.one_hot(vector - self.start, self.choices)
        return self.layers(vector.reshape(len(vector), -1).float())


def build_encoders(spec, options):
    """One encoder for all images of a size, and one for each vector, by name."""
    hidden, kind, groups, encoders = options.hidden_size, BACKBONES.get(options.encoder), {}, nn.ModuleDict()
    for key, space in spec.observations.items():
        if is_image(space) and options.encoder != "none":
            groups.setdefault(image_layout(space)[1:3], {})[key] = space
    for key, space in spec.observations.items():
        if not is_image(space):
            encoders[key] = Vector(key, space, hidden // 2, linear=kind is not None)
        elif group := groups.pop(image_layout(space)[1:3], None):  # the first image of its size brings the others along
            images = Images(group)
            if kind and min(images.size) < 64:
                raise UserError(f"--encoder {options.encoder} needs images of 64 x 64 at least: {key!r} has {images.size}")
            encoders[key] = ResNet(images, hidden, kind) if kind else SmallCNN(images, hidden)
    if not encoders:
        raise UserError(f"--encoder {options.encoder}: nothing is left to observe, choose another one")
    return encoders


class MultiCategorical:
    """Independent categorical distributions over several action numbers; one number is Gymnasium's Discrete."""

    def __init__(self, logits, choices):
        self.parts = [Categorical(logits=part, validate_args=False) for part in logits.split(choices, dim=-1)]

    @property
    def mode(self):
        """B x A most probable action numbers"""
        return torch.stack([part.logits.argmax(-1) for part in self.parts], -1)

    def sample(self):
        """B x A action numbers"""
        return torch.stack([part.sample() for part in self.parts], -1)

    def log_prob(self, action_BA):
        """B log-probabilities"""
        return sum(part.log_prob(action) for part, action in zip(self.parts, action_BA.unbind(-1)))

    def entropy(self):
        """B entropies"""
        return sum(part.entropy() for part in self.parts)


ACTION_FEATURES = 32  # of the previous action's embedding


class Policy(nn.Module):
    """Encoders, embedding of the previous action, LSTM, action head and value head (VER section 4, small).

    The recurrent state of an environment is a 2L x H tensor: the L hidden rows, then the L cell rows. Without recurrence
    L is 0 and the state empty, so that nothing else has to know. The actor's memory is all zeros at an episode's start.
    """

    def __init__(self, spec, options):
        super().__init__()
        hidden, self.choices = options.hidden_size, spec.discrete_actions
        if options.predict_std and self.choices:
            raise UserError("--predict-std is for continuous actions: leave it out")
        self.encoders = build_encoders(spec, options)
        features = sum(encoder.out_features for encoder in self.encoders.values())
        if self.choices:  # entry 0 is the start token, one table for all action numbers
            offset = torch.tensor([0, *np.cumsum([n + 1 for n in self.choices])[:-1]])
            self.register_buffer("token_offset_A", offset, persistent=False)
            self.action_embedding = nn.Embedding(sum(self.choices) + len(self.choices), ACTION_FEATURES)
        else:
            self.action_embedding = nn.Linear(spec.action_numbers, ACTION_FEATURES)
            self.log_std_A = None if options.predict_std else nn.Parameter(torch.full((spec.action_numbers,), -0.5))
        in_features = features + ACTION_FEATURES
        self.num_layers = options.lstm_layers if options.recurrent else 0
        self.state_shape = (2 * self.num_layers, hidden)
        self.core = nn.LSTM(in_features, hidden, self.num_layers) if options.recurrent else nn.Linear(in_features, hidden)
        self.log_ent_coef = nn.Parameter(  # learned, and saved, with the network
            torch.tensor(math.log(max(options.ent_coef, 1e-30))), options.target_entropy is not None
        )
        self.bf16 = options.bf16
        self.skipped = 0  # mini-batches in a row whose gradient was not finite, as `update_policy` counts them
        outputs = sum(self.choices) or spec.action_numbers * (2 if options.predict_std else 1)
        self.actor = orthogonal(nn.Linear(hidden, outputs), 0.01)
        self.critic = orthogonal(nn.Linear(hidden, 1), 1.0)
        self.cpc = ContrastivePrediction(features, hidden) if options.cpc else None

    def embed(self, action_BA, unknown_B):
        """Actions -> B x ACTION_FEATURES; the start token where they are unknown."""
        if self.choices:
            token_BA = torch.where(unknown_B[:, None], 0, action_BA + 1) + self.token_offset_A
            return self.action_embedding(token_BA).sum(1)
        return self.action_embedding(action_BA * ~unknown_B[:, None])

    def encode(self, obs, prev_action_BA, first_B):
        """Everything that does not depend on memory -> B x features. Where `first_B`, the previous action is unknown."""
        features = [encoder(obs) for encoder in self.encoders.values()]
        return torch.cat([*features, self.embed(prev_action_BA, first_B)], dim=1)

    def observe(self, obs, index_B, average):
        """Let the image encoders' statistics take in some of these observations, and those of the other ranks."""
        for encoder in self.image_encoders():
            if encoder.images.normalized and encoder.out.weight.requires_grad:  # one that is frozen stays as it is
                encoder.images.observe({key: obs[key][index_B] for key in encoder.images.layouts}, average)

    def image_encoders(self):
        """Those encoders that read images."""
        return [encoder for encoder in self.encoders.values() if hasattr(encoder, "images")]

    def heads(self, core_BH):
        """Action distribution and value (B) from the core's output."""
        with torch.autocast(core_BH.device.type, enabled=False):
            core_BH = core_BH.float()
            out, value_B = self.actor(core_BH), self.critic(core_BH).squeeze(-1)
        if self.choices:
            return MultiCategorical(out, self.choices), value_B
        if self.log_std_A is None:  # --predict-std
            mean_BA, change_BA = out.chunk(2, dim=1)
            log_std_BA = (change_BA - 0.5).clamp(-5.0, 2.0)
        else:
            mean_BA, log_std_BA = out, self.log_std_A.expand_as(out)
        normal = Normal(mean_BA, log_std_BA.exp(), validate_args=False)
        return Independent(normal, 1, validate_args=False), value_B

    def step(self, obs, prev_action_BA, first_B, state_B2LH):
        """One step of each of B environments: distribution, value_B and the recurrent state after the step.

        `state_B2LH` is zero where `first_B`: `infer` resets it, once, because the record must hold what was used.
        """
        x = self.encode(obs, prev_action_BA, first_B)
        if not self.num_layers:
            return *self.heads(torch.tanh(self.core(x))), state_B2LH
        weights, after = self.core.all_weights, []
        for layer in range(self.num_layers):  # nn.LSTM spends twice the time on a single step
            memory = state_B2LH[:, layer], state_B2LH[:, self.num_layers + layer]
            x, cell = torch.lstm_cell(x, memory, *weights[layer])
            after.append((x, cell))
        return *self.heads(x), torch.stack([*(h for h, _ in after), *(c for _, c in after)], dim=1).to(state_B2LH.dtype)

    def sequences(self, obs, prev_action_M, first_M, state_Q2LH, batch_sizes):
        """All M steps of Q sequences, arranged as a PackedSequence: distribution, value_M, and what --cpc learns from
        (VER section 2.2, figure 3C).

        The encoder runs once over all steps; the LSTM runs over time with batches that shrink as sequences end.
        `state_Q2LH` is the stored state before each sequence's first step, longest sequence first.
        """
        x = self.encode(obs, prev_action_M, first_M)
        core_MH = self.remember(x, state_Q2LH, batch_sizes)
        seen = x[:, :-ACTION_FEATURES]  # all but the previous action, which would give the answer away
        return *self.heads(core_MH), (seen.float(), core_MH.float())

    def remember(self, x, state_Q2LH, batch_sizes):
        """The core over packed sequences: M x features -> M x H."""
        if not self.num_layers:
            return torch.tanh(self.core(x))
        state = state_Q2LH.transpose(0, 1).to(x.dtype).contiguous()
        hidden_LQH, cell_LQH = state[: self.num_layers], state[self.num_layers :]
        if x.device.type == "cpu":
            for weights, hidden_QH, cell_QH in zip(self.core.all_weights, hidden_LQH, cell_LQH):
                x = packed_lstm(x, batch_sizes, hidden_QH, cell_QH, *weights)
            return x
        return self.core(PackedSequence(x, batch_sizes), (hidden_LQH, cell_LQH))[0].data


class ContrastivePrediction(nn.Module):
    """What CPC|A (Guo et al. 2018) learns beside the policy: from the memory, a GRU follows the actions that were taken
    next, and a classifier tells what was seen then from what was not."""

    def __init__(self, features, hidden):
        super().__init__()
        self.future = nn.GRUCell(ACTION_FEATURES, hidden)
        self.classifier = nn.Sequential(nn.Linear(hidden + features, hidden), nn.ReLU(), nn.Linear(hidden, 1))

    def forward(self, memory_BH, features_BF):
        """Logits (B) of these features having been seen in the future of this memory."""
        return self.classifier(torch.cat([memory_BH, features_BF], dim=-1)).squeeze(-1)


def packed_lstm(x, batch_sizes, hidden_QH, cell_QH, input_weight, hidden_weight, input_bias, hidden_bias):
    """One layer of nn.LSTM over a PackedSequence, spelled out: all first steps, then all second steps of the sequences that
    are that long, ... On a CPU learning is a tenth faster by it, because each step of nn.LSTM's backward pass fills a buffer
    of the size of the whole input with zeros. Returns M x H outputs."""
    outputs = []
    gates_M4H = nn.functional.linear(x, input_weight, input_bias + hidden_bias)
    for gates_B4H in gates_M4H.split(batch_sizes.tolist()):
        running = len(gates_B4H)  # the longest sequences come first
        gates_B4H = torch.addmm(gates_B4H, hidden_QH[:running], hidden_weight.T)
        write_BH, keep_BH, new_BH, show_BH = gates_B4H.chunk(4, dim=1)
        cell_QH = keep_BH.sigmoid() * cell_QH[:running] + write_BH.sigmoid() * new_BH.tanh()
        hidden_QH = show_BH.sigmoid() * cell_QH.tanh()
        outputs.append(hidden_QH)
    return torch.cat(outputs)


# ----------------------------------------------------------------------------------------------------------------------
# Shared memory and rollout buffer
# ----------------------------------------------------------------------------------------------------------------------


def observation_dtype(space):
    """uint8 stays uint8 (images are stored as they come), Discrete is int64, everything else float32."""
    if isinstance(space, gym.spaces.Discrete):
        return torch.int64
    return torch.uint8 if space.dtype == np.uint8 else torch.float32


def observation_buffers(spec, rows, device="cpu"):
    """Zeroed tensors for `rows` observations, one for each key."""
    return {
        key: torch.zeros(rows, *space.shape, dtype=observation_dtype(space), device=device)
        for key, space in spec.observations.items()
    }


def action_dtype(spec):
    """int64 for choices, float32 for continuous actions."""
    return torch.int64 if spec.discrete_actions else torch.float32


# int64(3): a tensor of three zeros; int64(3) - 1: of three -1; int64(()): a single number
int64, boolean, float64 = (functools.partial(torch.zeros, dtype=kind) for kind in (torch.int64, torch.bool, torch.float64))


class Shared:
    """Tensors that several processes can work on: after `share`, pickling hands on the memory itself and not a copy.

    Tensors that are set as attributes stay tensors. Those given to __init__ by keyword appear as numpy arrays of that name,
    which read and write single entries several times faster (one without dimensions must be written in place: `x += 1`,
    `x[...] = 0`). Pickling would copy a numpy array: each process makes its own views.
    """

    def __init__(self, **host):
        self.host = host
        self.view()

    def view(self):
        """Make the numpy arrays."""
        vars(self).update({name: tensor.numpy() for name, tensor in self.host.items()})

    def share(self):
        """Move everything to shared memory, before other processes get to know it. Raises UserError if that is full."""
        values = [leaf for value in vars(self).values() for leaf in (value.values() if isinstance(value, dict) else [value])]
        tensors = [tensor for tensor in values if isinstance(tensor, torch.Tensor) and not tensor.is_shared()]
        if needed := sum(tensor.nbytes for tensor in tensors):
            free = shutil.disk_usage("/dev/shm").free if os.path.isdir("/dev/shm") else math.inf
            if needed > free:
                sizes = f"{needed / 2**20:.0f} MiB of shared memory are needed and /dev/shm has {free / 2**20:.0f}"
                raise UserError(f"{sizes}: enlarge it (docker run --shm-size), or take less of --num-envs and --num-steps")
        for tensor in tensors:
            tensor.share_memory_()
        self.view()

    def __getstate__(self):
        return {name: value for name, value in vars(self).items() if name not in self.host}

    def __setstate__(self, state):
        vars(self).update(state)
        self.view()


class Transfer(Shared):
    """One row for each environment in CPU shared memory: what it observed last, and the action it shall take next.

    A row belongs to the worker from the moment its number is sent down the worker's pipe until the worker announces it;
    otherwise it belongs to whoever serves its request. So no lock is needed: nobody reads an observation or an answer while
    it is being written.
    """

    def __init__(self, spec, num_envs):
        self.obs = observation_buffers(spec, num_envs)
        self.final_obs = observation_buffers(spec, num_envs)  # the observation that a reset replaced, if truncated
        super().__init__(
            action=torch.zeros(num_envs, spec.action_numbers, dtype=action_dtype(spec)),
            first=boolean(num_envs),
            reward=torch.zeros(num_envs),
            terminated=boolean(num_envs),
            truncated=boolean(num_envs),
            episode=int64(num_envs),  # number of the episode that `obs` belongs to
            result=float64(num_envs, 2 + len(spec.metrics)),  # of the episode that ended last: return, length, metrics
            step_began=float64(num_envs),  # when the last step began, by perf_counter
            step_sec=float64(num_envs),  # what it took, a reset included
            sent_at=float64(num_envs),  # when the action was sent (or the start was asked for); 0 once there is an answer
            lost=boolean(num_envs),  # `obs` does not answer `action`: the environment was started (again) in between
        )


class Rollout(Shared):
    """Linear buffer of step records (VER section 2.2).

    S + N slots: when a rollout ends, S records are complete and each environment has at most one that is open. Records that
    were carried over come first, then the others as inference writes them; so those of one environment are in time order.
    What the network reads and writes lives on the training device; what the host decides by (whose record, is it complete,
    ...) lives in numpy.
    """

    SPENT = ("waiting_sec", "inference_sec", "simulation_sec", "batches", "served")  # counted until `describe_rollout` asks

    def __init__(self, spec, steps, num_envs, state_shape, device, slots=None, **more):
        slots = slots or steps + num_envs
        self.steps, self.num_envs, self.device = steps, num_envs, device
        self.carried = 0  # this many records, the first ones, were in flight when the previous rollout ended
        self.obs = observation_buffers(spec, slots, device)
        self.state = torch.zeros(slots, *state_shape, device=device)  # recurrent state before the step
        self.prev_action = torch.zeros(slots, spec.action_numbers, dtype=action_dtype(spec), device=device)
        self.action = torch.zeros_like(self.prev_action)
        self.log_prob = torch.zeros(slots, device=device)
        self.value = torch.zeros(slots, device=device)
        self.final_value = torch.zeros(slots, device=device)  # value of the final observation, where truncated
        super().__init__(
            env=int64(slots),
            version=int64(slots),  # of the policy that chose the action
            first=boolean(slots),  # first step of an episode: the memory was reset before it
            reward=torch.zeros(slots),
            terminated=boolean(slots),
            truncated=boolean(slots),
            lost=boolean(slots),  # the environment was lost after this step: returns go on with final_value, as if truncated
            complete=boolean(slots),
            result=float64(slots, 2 + len(spec.metrics)),  # of the episode, where one ended
            advantage=torch.zeros(slots),
            target=torch.zeros(slots),  # of the value: the return
            size=int64(()),  # slots in use
            num_complete=int64(()),
            policy_version=int64(()),  # of the policy that collects this rollout
            **{name: float64(()) for name in self.SPENT},
            **more,
        )

    def begin_of(self, slot):
        """The first slot of the rollout or trajectory that this one is in."""
        return 0

    def columns(self):
        """Every tensor and array that has one entry for each slot (of a Rollout), always in the same order."""
        values = [*self.obs.values(), *(v for v in vars(self).values() if isinstance(v, (torch.Tensor, np.ndarray)))]
        return [column for column in values if column.ndim]

    def begin_with(self, version, columns, carried=None):
        """Begin a rollout, collected with this version of the policy, with the records in these columns. The first `carried`
        of them (None: all) were in flight when the rollout before ended."""
        size = len(columns[0])
        for new, old in zip(self.columns(), columns):
            new[:size] = old
        self.complete[size:] = False
        self.num_complete[...] = np.count_nonzero(self.complete)
        self.size[...] = size
        self.carried = size if carried is None else carried
        self.policy_version[...] = version


class Trajectories(Rollout):
    """Pool of P trajectories for --sampler async: T + 1 slots each, T complete records and one for the bootstrap value.

    3 N of them: N are being filled, N wait, and N are being learned from. When all are taken, environments wait.
    """

    def __init__(self, spec, steps, num_envs, state_shape, device):
        self.length = steps // num_envs + 1
        slots = 3 * num_envs * self.length
        super().__init__(spec, steps, num_envs, state_shape, device, slots, free_P=~boolean(3 * num_envs))

    def begin_of(self, slot):
        return slot // self.length * self.length

    def is_last(self, slots):
        """Whether these slots (-1: none) hold the T-th record of their trajectory."""
        return slots % self.length == self.length - 2


# ----------------------------------------------------------------------------------------------------------------------
# Environment workers
# ----------------------------------------------------------------------------------------------------------------------


class EnvironmentRow:
    """One environment, and its row in the transfer tensors. Lives in a worker process, or where requests are served."""

    def __init__(self, row, options, split, spec, transfer, frames=None):
        self.row, self.options, self.split, self.spec, self.out = row, options, split, spec, transfer
        self.observations = {
            field: {key: part.numpy() for key, part in getattr(transfer, field).items()} for field in ("obs", "final_obs")
        }
        self.frames = frames  # a list that collects pictures, or None
        self.number = options.first_env + row
        self.env = make_env(options, split, None if frames is None else "rgb_array", self.number)
        self.delay_rng = np.random.default_rng([options.seed, self.number, 1])
        self.env_delay = self.draw_delay(options.sim_latency_spread[1])

    def start(self, episode, actions):
        """Begin `episode` and repeat these actions of it: seed and actions determine an environment's state. The answer to
        the last one is what the stopped run was waiting for."""
        self.episode = episode - 1
        self.reset()
        lost = True  # without actions, the first observation: no answer to anything
        for number, action_A in enumerate(actions):
            self.out.sent_at[self.row] = time.perf_counter()  # --env-timeout is for each of them
            self.step(action_A)
            lost = number + 1 < len(actions)
            if self.out.first[self.row]:  # too early: the simulator is not deterministic, go on from its new episode
                break
        self.out.lost[self.row] = lost

    def reset(self):
        """The next episode, from a seed of its own."""
        self.episode += 1
        self.length, self.total_reward = 0, 0.0
        self.episode_delay = self.draw_delay(self.options.sim_latency_spread[2])
        seed = episode_seed(self.split, self.options.seed, self.number, self.episode)
        more = {"options": {"episode": self.episode}} if uses_habitat(self.options) else {}
        self.observation, _ = self.env.reset(seed=seed, **more)
        self.delayed, self.ahead = None, None
        self.render()
        self.write("obs", self.observation)
        self.out.first[self.row], self.out.episode[self.row] = True, self.episode

    def answer(self):
        """Take the action that the row holds, and put the answer there."""
        began = time.perf_counter()
        if self.options.sim_latency and not self.options.action_delay:
            self.sleep()
        self.step(self.out.action[self.row])
        self.out.lost[self.row] = False
        self.out.step_began[self.row], self.out.step_sec[self.row] = began, time.perf_counter() - began

    def step(self, action_A):
        """Step, write the answer into the row, and reset if the episode ended.

        The final observation of a truncated episode is written apart, because the reset overwrites the row: its value
        is what the return goes on with. Every episode is reset here, so an autoreset wrapper changes nothing.
        """
        out, row = self.out, self.row
        self.length += 1
        action = to_env_action(self.spec.action, action_A)
        if self.options.action_delay:
            observation, reward, terminated, truncated, info = self.step_delayed(action)
        else:
            observation, reward, terminated, truncated, info = self.env.step(action)
        self.render()
        self.total_reward += float(reward)
        if not math.isfinite(reward):
            raise BadAnswer(f"reward is {reward}")
        out.reward[row], out.first[row] = reward, False
        out.terminated[row], out.truncated[row] = terminated, truncated and not terminated
        if terminated or truncated:
            out.result[row] = [self.total_reward, self.length, *(info.get(name, np.nan) for name in self.spec.metrics)]
            if out.truncated[row]:
                self.write("final_obs", observation)
            self.reset()
        else:
            self.write("obs", observation)

    def step_delayed(self, action):
        """Answer to the action before this one; to the first of an episode, the first observation again. An episode's last
        action is never carried out."""
        self.simulate_ahead()
        answer = self.ahead or (self.observation, 0.0, False, False, {})
        self.ahead, self.delayed = None, action
        return answer

    def simulate_ahead(self):
        """With --action-delay the next action is known before its turn: the environment acts while the policy computes the
        action after it (VER section 4). Called whenever there is time."""
        if self.options.action_delay and self.delayed is not None and self.ahead is None:
            if self.options.sim_latency:
                self.sleep()
            self.ahead = self.env.step(self.delayed)

    def write(self, field, observation):
        """Copy an observation into the row. Raises BadAnswer if it is not one of the observation space, or not finite."""
        leaves, targets = flatten(observation), self.observations[field]
        if leaves.keys() != targets.keys():
            raise BadAnswer(f"observation has {sorted(leaves)}, the observation space {sorted(targets)}")
        for key, leaf in leaves.items():
            target = targets[key]
            if np.shape(leaf) != target.shape[1:]:
                raise BadAnswer(f"observation {key!r} has shape {np.shape(leaf)}, the observation space {target.shape[1:]}")
            target[self.row] = leaf
            if target.dtype == np.float32 and not np.isfinite(target[self.row]).all():
                raise BadAnswer(f"observation {key!r} is not finite")
            if target.dtype == np.int64 and int(leaf) not in self.spec.observations[key]:
                raise BadAnswer(f"observation {key!r} is {leaf}, the observation space {self.spec.observations[key]}")

    def draw_delay(self, sigma):
        """Log-normal factor of mean 1."""
        return self.delay_rng.lognormal(-sigma * sigma / 2, sigma)

    def sleep(self):
        """The simulator time that --sim-latency emulates: sleeping, as if a GPU or a server did the work."""
        sec = self.options.sim_latency / 1000 * self.env_delay * self.episode_delay
        time.sleep(sec * self.draw_delay(self.options.sim_latency_spread[0]))

    def render(self):
        """Keep a picture for the video, if one was asked for."""
        if self.frames is not None:
            self.frames.append(self.env.render())

    def failure(self):
        """What the user is told of the exception that is being handled."""
        where = f"environment {self.row}, episode {getattr(self, 'episode', 0)}, step {getattr(self, 'length', 0)}"
        return f"{where}:\n{traceback.format_exc()}"


class BadAnswer(ValueError):
    """An environment returned NaN, infinity or another shape than its space: a bug that starting it again would hide."""


ANNOUNCE_SEC = 0.002  # answers of one worker go out by one write until they have taken this long together


def worker_process(group, commands, rows, options, split, spec, transfer, starts):
    """Body of a worker process: step the environments `rows` whenever actions for them arrive. The first command for a row
    starts its environment.

    Ends when the main process closes the command pipe or dies (end of file either way). With several rows this is double-
    buffered sampling (Sample Factory, section 3.2) whenever inference is slow: while one row's action is being computed,
    the worker steps another.
    """
    row, environments = rows[0], {}
    try:
        while wanted := read_numbers(commands):
            answered, since = [], time.perf_counter()
            for row in wanted:
                if row in environments:
                    environments[row].answer()
                else:
                    environments[row] = EnvironmentRow(row, options, split, spec, transfer)
                    environments[row].start(*starts[row])
                answered.append(row)
                if time.perf_counter() - since > ANNOUNCE_SEC or row == wanted[-1]:
                    transfer.sent_at[answered] = 0.0
                    write_numbers(group.announce, answered)
                    answered, since = [], time.perf_counter()
            for row in wanted:
                environments[row].simulate_ahead()
    except Exception as error:
        text = environments[row].failure() if row in environments else f"environment {row}:\n{traceback.format_exc()}"
        group.note_error(row, text)
        os._exit(EXIT_BAD_ANSWER if isinstance(error, BadAnswer) else 1)  # at once, whatever threads the simulator has
    for environment in environments.values():
        environment.env.close()


EXIT_BAD_ANSWER = 3
PAST_FAILURE = 2  # so many episodes further it begins anew: what has failed may be the reset to the next one


class Restarts:
    """Counts environments that had to be started again, and ends the run when there are too many."""

    def __init__(self, most):
        self.most, self.total, self.at_sec = most, 0, deque()

    def note(self, reason):
        """Report one. Raises EnvironmentFailure if there were more than --max-worker-restarts within an hour."""
        now = time.perf_counter()
        self.total += 1
        self.at_sec.append(now)
        while now - self.at_sec[0] > 3600:
            self.at_sec.popleft()
        if len(self.at_sec) > self.most:
            limit = f"more than {self.most} restarts within an hour (--max-worker-restarts)"
            raise EnvironmentFailure(f"{reason}\n{limit}" if self.most else reason)
        tqdm.write(f"{reason}\nstarted again, with a new episode ({self.total} so far)", file=sys.stderr)


def write_numbers(pipe, numbers):
    """One write of several numbers: atomic up to PIPE_BUF bytes, however many processes write to this pipe."""
    os.write(pipe.fileno(), array("i", numbers))


def read_numbers(pipe, most=1 << 14):
    """The numbers that lie in the pipe, at least one; [] at its end. Waits for the other side, for ever if need be:
    the main process never does (it polls first), and the others have nothing else to do."""
    return array("i", os.read(pipe.fileno(), 4 * most)).tolist()


class ProcessGroup:
    """Processes that one starts, hears of through one common pipe, and ends by closing their command pipes.

    A process announces what it has done as a number, and a failure as -1 - number; the text lies in `error`.
    """

    def __init__(self, num_numbers, start_method=None):
        # The fork server is as clean as spawn (no CUDA context, no threads are inherited) but imports torch only once.
        methods = mp.get_all_start_methods()
        self.context = mp.get_context(start_method or ("forkserver" if "forkserver" in methods else "spawn"))
        self.context.set_forkserver_preload(["torch", "gymnasium", "tyro", "tqdm"])
        if self.context.get_start_method() == "forkserver":  # it reaps the processes that we kill: no signal may end it
            handlers = {number: signal.signal(number, signal.SIG_IGN) for number in SIGNALS[1:]}
            multiprocessing.forkserver.ensure_running()
            for number, handler in handlers.items():
                signal.signal(number, handler)
        self.announced, self.announce = self.context.Pipe(duplex=False)
        # several may wake for the same numbers: who comes too late must not wait
        os.set_blocking(self.announced.fileno(), False)
        self.error = torch.zeros(num_numbers, 8192, dtype=torch.uint8).share_memory_()
        self.commands = []
        self.watch()

    def __getstate__(self):  # what another process can use
        return {name: value for name, value in vars(self).items() if name not in ("processes", "context", "poller")}

    def __setstate__(self, state):
        vars(self).update(state)
        self.watch()

    def watch(self):
        """Be ready to hear of announcements, and of the processes that will be started here."""
        self.processes, self.poller = [], select.poll()
        self.poller.register(self.announced, select.POLLIN)

    def start(self, name, function, commands, *args):
        """Start function(group, commands, *args) in a new process."""
        group = copy.copy(self)
        group.commands = []  # who held the writing ends could not see the end of its own pipe
        args = (function, group, commands, *args)
        process = self.context.Process(target=process_body, args=args, name=name, daemon=True)
        try:
            process.start()
        except BaseException:
            self.close()
            raise
        self.processes.append(process)
        self.poller.register(process.sentinel, select.POLLIN)

    def note_error(self, number, text):
        """Called in a process: leave its last words."""
        encoded = torch.frombuffer(bytearray(text.encode()[-8000:]), dtype=torch.uint8)
        self.error[number, : len(encoded)] = encoded

    def fail(self, number, text):
        """Called in a process: announce its failure."""
        self.note_error(number, text)
        write_numbers(self.announce, [-1 - number])

    def receive(self, timeout_sec):
        """Numbers that were announced; waits for the first at most `timeout_sec` and then returns [].

        Raises EnvironmentFailure if one is a failure or a process has died.
        """
        if timeout_sec < 0.01:  # poll() counts whole milliseconds
            ready = select.select([self.announced.fileno()], [], [], timeout_sec)[0]
        else:
            ready = [descriptor for descriptor, _ in self.poller.poll(timeout_sec * 1000)]
        numbers = []
        if self.announced.fileno() in ready:
            with contextlib.suppress(BlockingIOError):
                numbers = read_numbers(self.announced)
        elif ready:
            multiprocessing.connection.wait([process.sentinel for process in self.processes], timeout=5)
            self.check()
        for number in numbers:
            if number < 0:
                raise EnvironmentFailure(self.failure(-1 - number))
        return numbers

    def failure(self, number):
        """The text that `fail` left."""
        return bytes(self.error[number]).rstrip(b"\0").decode(errors="replace")

    def check(self):
        """Raises EnvironmentFailure if a process has died, with its own last words if there are any."""
        for process in self.processes:
            if process.exitcode is not None:
                words = [self.failure(number) for number in self.error.any(dim=1).nonzero().flatten().tolist()]
                raise EnvironmentFailure(words[0] if words else f"{process.name} died with exit code {process.exitcode}")

    def close(self):
        """End all processes: they leave at the end of their command pipe; who has not left after 5 s is killed."""
        for command in self.commands:
            command.close()
        deadline = time.monotonic() + 5
        for process in self.processes:
            process.join(max(0.0, deadline - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join(5)


def process_body(function, group, *args):
    """What all processes have in common. Signals may reach the whole process group: the main process decides."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    torch.set_num_threads(1)
    function(group, *args)


class Workers(ProcessGroup):
    """The worker processes, seen from who serves requests. Row numbers go out by `send` and come back by `receive`.

    Whoever has started them also supervises them (`check`): a process that has died, or whose environment has not answered
    for --env-timeout, is replaced by a fresh one that goes on with other episodes.
    """

    def __init__(self, options, split, spec, transfer, starts, start_method=None):
        super().__init__(options.num_envs, start_method)
        transfer.share()
        self.num_workers, self.transfer, self.timeout_sec = count_workers(options), transfer, options.env_timeout
        self.restarts, self.next_check = Restarts(options.max_worker_restarts), 0.0
        self.args, self.inboxes = (options, split, spec, transfer), []
        for worker in range(self.num_workers):
            inbox, command = self.context.Pipe(duplex=False)
            self.inboxes.append(inbox)  # kept: commands outlive the process that they were for
            self.commands.append(command)
            self.start_worker(worker, starts)
        self.send(range(options.num_envs))  # all shall start

    def __getstate__(self):  # what another process can use: it does not supervise
        return {name: value for name, value in super().__getstate__().items() if name not in ("inboxes", "args")}

    def rows_of(self, worker):
        """The environments of a worker."""
        return list(range(worker, len(self.transfer.sent_at), self.num_workers))

    def start_worker(self, worker, starts):
        """Start a worker's process."""
        rows = self.rows_of(worker)
        name, starts = f"worker {worker} (environments {rows})", {row: starts[row] for row in rows}
        self.start(name, worker_process, self.inboxes[worker], rows, *self.args, starts)

    def send(self, rows):
        """Tell the workers that the actions of these rows are in place, or that their environments shall start."""
        by_worker = {}
        for row in rows:
            by_worker.setdefault(row % self.num_workers, []).append(row)
        self.transfer.sent_at[list(rows)] = time.perf_counter()
        for worker, mine in by_worker.items():
            write_numbers(self.commands[worker], mine)

    def receive(self, timeout_sec):
        """Rows that have answered; looks after the processes once a second."""
        rows = super().receive(timeout_sec)
        if self.processes and time.perf_counter() > self.next_check:
            self.next_check = time.perf_counter() + 1.0
            self.check()
        return rows

    def check(self):
        """Replace the processes that have died or hang. Raises EnvironmentFailure if that happens too often, or if an
        environment gave a bad answer."""
        sent_at_N = self.transfer.sent_at.copy()  # read once: workers set it to 0 at any time
        overdue_N = (sent_at_N > 0) & (time.perf_counter() - sent_at_N > self.timeout_sec)
        for worker in range(self.num_workers):
            process, rows = self.processes[worker], self.rows_of(worker)
            overdue = [row for row in rows if overdue_N[row]]
            if overdue and process.exitcode is None:
                process.kill()
                process.join(5)
            if process.exitcode is not None:
                words = [self.failure(row) for row in rows if self.error[row].any()]
                reason = words[0] if words else f"{process.name} died with exit code {process.exitcode}"
                if overdue:
                    doing = f"{overdue} in episodes {self.transfer.episode[overdue].tolist()}"
                    reason = f"no answer from environments {doing} for {self.timeout_sec:.0f} s (--env-timeout)"
                if process.exitcode == EXIT_BAD_ANSWER:
                    raise EnvironmentFailure(reason)
                self.restarts.note(reason)
                self.replace(worker)

    def replace(self, worker):
        """A fresh process for a worker. Environments that owe an answer give the first observation of another episode; the
        others start when their next action arrives. Whatever has been answered is not touched."""
        process, rows = self.processes[worker], self.rows_of(worker)
        self.poller.unregister(process.sentinel)
        self.error[rows] = 0
        while self.inboxes[worker].poll():
            read_numbers(self.inboxes[worker])
        owed = [row for row in rows if self.transfer.sent_at[row] > 0]
        self.start_worker(worker, {row: (int(self.transfer.episode[row]) + PAST_FAILURE, []) for row in rows})
        self.processes[worker] = self.processes.pop()  # the new one, in the place of the old one
        if owed:
            self.send(owed)

    def close(self):
        for inbox in self.inboxes:
            inbox.close()
        super().close()


class InlineWorkers:
    """All environments where requests are served (--num-workers 0): same interface as Workers, deterministic order. One that
    raises is made anew; one that hangs or kills its process cannot be helped."""

    def __init__(self, options, split, spec, transfer, starts, frames=None):
        self.answered, self.restarts, self.transfer = [], Restarts(options.max_worker_restarts), transfer
        self.make = lambda row: EnvironmentRow(row, options, split, spec, transfer, frames)
        self.environments = [self.make(row) for row in range(options.num_envs)]
        self.not_started = list(enumerate(starts))

    def serve(self, row, *start):
        """Let an environment start (with `start`) or answer. Raises EnvironmentFailure as Workers.check does."""
        try:
            self.environments[row].start(*start) if start else self.environments[row].answer()
            self.answered.append(row)
        except Exception as error:
            reason = self.environments[row].failure()
            if isinstance(error, BadAnswer):
                raise EnvironmentFailure(reason) from None
            self.restarts.note(reason)
            self.environments[row] = self.make(row)
            self.serve(row, int(self.transfer.episode[row]) + PAST_FAILURE, [])

    def send(self, rows):
        """Step these environments now."""
        for row in rows:
            self.serve(row)

    def receive(self, timeout_sec):
        """Rows that have answered since the last call; the first call starts all of them."""
        while self.not_started:
            row, start = self.not_started.pop(0)
            self.serve(row, *start)
        rows, self.answered = self.answered, []
        return rows

    def check(self):
        """Nothing here can die by itself."""

    def close(self):
        for environment in self.environments:
            environment.env.close()


def start_workers(options, split, spec, transfer, starts=None, frames=None):
    """Environments of one split, in worker processes or (--num-workers 0) here. `starts`: (episode, actions to repeat)."""
    starts = starts or [(0, [])] * options.num_envs
    if count_workers(options):
        return Workers(options, split, spec, transfer, starts)
    return InlineWorkers(options, split, spec, transfer, starts, frames)


# ----------------------------------------------------------------------------------------------------------------------
# Dynamic batching and inference
# ----------------------------------------------------------------------------------------------------------------------

GRACE_SEC = 60  # after --env-timeout; workers should have been replaced by then
REPLAY_LIMIT = 10_000  # actions; an episode that is longer starts anew when a run is resumed
HEARTBEAT_SEC = 10.0  # --debug


class Collector(Shared):
    """What collection remembers from one inference batch to the next; shared by all who serve requests.

    `lock` guards it for moments only, never during inference or a wait for requests. `infer` reads the state and the action
    before an environment's next step without it: they belong to whoever serves that environment's request.
    """

    def __init__(self, workers, transfer, policy, spec, options, device, stop):
        num_envs, self.stop = options.num_envs, stop
        self.workers, self.transfer, self.timeout_sec = workers, transfer, options.env_timeout
        self.min_requests, self.max_requests = options.min_requests, options.max_requests
        self.lock_step = options.sampler == "sync"  # nothing is inferred before all have answered
        # most steps of one environment
        self.quota = options.rollout_steps if options.sampler == "ver" else options.num_steps
        self.alone = options.num_inference_workers == 1
        self.poll_sec = 1.0  # longest wait between two calls of stop.check()
        self.next_beat_sec = 0.0 if options.debug else math.inf
        self.lock, self.trace = contextlib.nullcontext(), None
        self.rollout = None  # the buffer that this process fills; None where others do
        self.resumed = False  # the current rollout began before a stop: its times say nothing
        self.inference_sec = 1e-3  # of one batch, running mean
        self.state_N = torch.zeros(num_envs, *policy.state_shape, device=device)  # before the environment's next step
        self.prev_action_N = torch.zeros(num_envs, spec.action_numbers, dtype=action_dtype(spec), device=device)
        super().__init__(
            open_slot_N=int64(num_envs) - 1,  # the slot of each environment's open record; -1: none
            held_N=boolean(num_envs),  # its open record is a bootstrap value: no action was sent
            absent_N=boolean(num_envs),  # it is held in a resumed run, and is still repeating its actions
            steps_N=int64(num_envs),  # complete steps in this rollout
            request_N=int64(num_envs),  # order of those that have answered and wait for inference; 0: does not wait
            requests=int64(()),  # so far
            version=int64(()),  # of the policy: updates so far
            began=float64(()),  # when this rollout began; this and the next two for ver_multigpu.py
            completed_at_N=float64(num_envs),  # when each environment's last step was
            preempted=boolean(()),  # this rollout shall end as it is
            served_at=float64(()) + time.perf_counter(),  # when requests were taken last, or a rollout began
            episode_N=int64(num_envs),  # for checkpoints: what a resumed run must repeat
            sent_N=int64(num_envs),  # actions since that episode began ...
            history_NTA=torch.zeros(num_envs, REPLAY_LIMIT, spec.action_numbers, dtype=action_dtype(spec)),  # ... and which
        )

    def __getstate__(self):
        return super().__getstate__() | {"stop": None}

    def count_update(self):
        """The policy that acts has learned."""
        self.version += 1

    def snapshot(self):
        """What `restore` needs, for a checkpoint: tensors and plain types."""
        with self.lock:
            return {
                "version": int(self.version),
                "environments": self.environments(),
                "records": self.records_to_keep(),
                "state": self.state_N.cpu().clone(),
                "prev_action": self.prev_action_N.cpu().clone(),
                "torch_rng": torch.get_rng_state(),
                "cuda_rng": torch.cuda.get_rng_state(self.state_N.device) if self.state_N.is_cuda else None,
            }

    def in_flight(self):
        """Slots of the open records whose actions were sent, in time order: those that are not mere bootstrap values."""
        return np.sort(self.open_slot_N[(self.open_slot_N >= 0) & ~self.held_N])

    def records_to_keep(self):
        """The records that nothing has been learned from yet, as arguments of `Rollout.begin_with`, and whose are held: all
        of an unfinished rollout, those in flight of one that has been learned from. None where other processes collect."""
        if self.rollout is None:
            return None
        unlearned = self.rollout.policy_version == self.version  # else the weights have learned from it
        slots = np.arange(self.rollout.size) if unlearned else self.in_flight()
        held = torch.from_numpy(self.held_N & unlearned)
        carried = self.rollout.carried if unlearned else None
        return [torch.as_tensor(column[slots]).cpu() for column in self.rollout.columns()], carried, held

    def skip_episodes(self):
        """A resumed run shall begin new episodes everywhere, past the one that failed."""
        self.episode_N += PAST_FAILURE
        self.sent_N[:] = 0

    def environments(self):
        """For each environment its episode and the actions sent in it; past REPLAY_LIMIT, the next episode and none."""
        too_long_N = self.sent_N > REPLAY_LIMIT
        lengths = np.where(too_long_N, 0, self.sent_N)
        episodes = (self.episode_N + too_long_N).tolist()
        return [
            (episode, torch.from_numpy(actions[:n].copy()))
            for episode, actions, n in zip(episodes, self.history_NTA, lengths)
        ]

    def restore(self, saved):
        """Go on from a snapshot, in the middle of its rollout; the workers will repeat the episodes' actions."""
        self.version[...] = saved["version"]
        rollout = self.rollout
        if rollout:
            rollout.policy_version[...] = self.version
        if rollout and saved["records"]:
            columns, carried, held = saved["records"]
            rollout.begin_with(self.version, columns, carried)
            env, complete = rollout.env[: rollout.size], rollout.complete[: rollout.size]
            self.open_slot_N[env[~complete]] = np.flatnonzero(~complete)
            self.steps_N[:] = np.bincount(env[complete], minlength=len(self.steps_N))
            self.held_N[:] = self.absent_N[:] = held
            self.resumed = bool(complete.any())
        self.state_N.copy_(saved["state"])
        self.prev_action_N.copy_(saved["prev_action"])
        for row, (episode, actions) in enumerate(saved["environments"]):
            self.episode_N[row], self.sent_N[row] = episode, len(actions)
            self.history_NTA[row, : len(actions)] = actions
        torch.set_rng_state(saved["torch_rng"])
        if saved["cuda_rng"] is not None:
            torch.cuda.set_rng_state(saved["cuda_rng"], self.state_N.device)


def await_requests(collector):
    """Wait until there are requests: dynamic batching (VER section 2.1) takes whatever has come; `sync` waits for all.

    If there are fewer than --min-requests, it waits for more, at most half of what a batch takes: up to there one batch of
    all is cheaper than two small ones. Where several processes serve requests, it returns after 5 ms even without any,
    because another one may have ended the rollout; in a rollout that is preempted, after `poll_sec`. Returns the seconds it
    took. Raises EnvironmentFailure if no request comes within --env-timeout and a minute, Interrupted after Ctrl-C or
    SIGTERM.
    """
    began = time.perf_counter()
    receive(collector, 0)
    while missing_requests(collector):
        receive(collector, collector.poll_sec if collector.alone else 0.005)
        limit_sec = collector.timeout_sec + GRACE_SEC
        if missing_requests(collector) and time.perf_counter() - collector.served_at > limit_sec:
            message = f"no request for {limit_sec:.0f} s (--env-timeout and {GRACE_SEC}): {progress_of(collector)}"
            raise EnvironmentFailure(message)
        if collector.preempted or not collector.alone:
            break
    deadline = time.perf_counter() + collector.inference_sec / 2
    while np.count_nonzero(collector.request_N) < collector.min_requests and time.perf_counter() < deadline:
        receive(collector, max(0.0, deadline - time.perf_counter()))
    return time.perf_counter() - began


def missing_requests(collector):
    """Whether inference must go on waiting: for a first request, or in lock-step for all environments that are not held."""
    needed = np.count_nonzero(~collector.held_N) if collector.lock_step else 1
    return np.count_nonzero(collector.request_N) < needed


def receive(collector, timeout_sec):
    """Note the requests of environments that have answered. Raises Interrupted if a signal has come, even if workers have
    failed too: the signal may have killed them."""
    try:
        rows = collector.workers.receive(timeout_sec)
    finally:
        collector.stop.check()
    if rows:
        with collector.lock:
            collector.absent_N[rows] = False
            note_requests(collector, [row for row in rows if not collector.held_N[row]])  # carry_over will note the others
    if time.perf_counter() > collector.next_beat_sec:
        collector.next_beat_sec = time.perf_counter() + HEARTBEAT_SEC
        tqdm.write(f"collecting: {progress_of(collector)}", file=sys.stderr)


def progress_of(collector):
    """Where collecting stands, in words."""
    awaited = np.flatnonzero((collector.request_N == 0) & ~collector.held_N).tolist()
    steps, requests = int(collector.steps_N.sum()), np.count_nonzero(collector.request_N)
    return f"{steps} steps since the rollout began, {requests} requests, environments {awaited} to answer"


def note_requests(collector, rows):
    """These rows wait for inference, behind all who wait already."""
    collector.request_N[rows] = collector.requests + 1 + np.arange(len(rows))
    collector.requests += len(rows)


def take_requests(collector, limit):
    """The rows of all outstanding requests in order of arrival, at most `limit` and --max-requests; none if too few."""
    rows = np.flatnonzero(collector.request_N)
    if missing_requests(collector):
        return rows[:0]
    rows = rows[np.argsort(collector.request_N[rows])][: min(limit, collector.max_requests)]
    collector.request_N[rows] = 0
    collector.served_at[...] = time.perf_counter()
    return rows


def infer(policy, collector, rows, source="obs"):
    """One batched step of the policy for these rows: ((observation, state, previous action) before it, distribution,
    value_B, state after it). The `source` `final_obs` asks about the end of a truncated episode, not the start of the next.
    """
    index_B, device = torch.from_numpy(rows), collector.state_N.device
    obs = {key: part[index_B].to(device) for key, part in getattr(collector.transfer, source).items()}
    first_B = torch.from_numpy(collector.transfer.first[rows] & (source == "obs")).to(device)
    index_B = index_B.to(device)
    state_B, prev_action_B = collector.state_N[index_B] * ~first_B[:, None, None], collector.prev_action_N[index_B]
    with autocast(policy, device):
        return (obs, state_B, prev_action_B), *policy.step(obs, prev_action_B, first_B, state_B)


def autocast(policy, device):
    """bfloat16 arithmetic where --bf16 asks for it."""
    return torch.autocast(device.type, torch.bfloat16, enabled=policy.bf16)


# ----------------------------------------------------------------------------------------------------------------------
# Collection and carry-over
# ----------------------------------------------------------------------------------------------------------------------


@torch.inference_mode()
def collect_rollout(policy, rollout, collector):
    """Collect exactly S complete steps (VER section 2.2), from whichever environments deliver them; fewer if preempted.

    Each pass: take the answered rows, complete their open records with the reward that arrived, infer, write new open
    records, send the actions. The new records of the last pass only serve as bootstrap values: their actions are not
    sent, and the updated policy will compute them again. In the same way --sampler nover and sync hold back the action of
    an environment that has given T steps. Several processes may run this at once (--num-inference-workers). Raises
    EnvironmentFailure.
    """
    collector.began[...] = collector.served_at[...] = time.perf_counter()
    while rollout.num_complete < rollout.steps and not collector.preempted:
        waiting_sec = await_requests(collector)
        began = time.perf_counter()
        with collector.lock:
            rows = take_requests(collector, limit=rollout.steps - rollout.num_complete)  # each may complete one record
            closed, slots = claim_slots(rollout, collector, rows)
            sent_B = ~collector.held_N[rows]
        if len(rows):
            bootstrap_truncated(policy, rollout, collector, rows, closed)
            action_BA, after_B = write_records(policy, rollout, collector, rows, slots, rollout.policy_version)
            if sent_B.all():  # nearly always
                send_actions(collector, rows, action_BA, after_B)
            elif sent_B.any():
                mask_B = torch.from_numpy(sent_B)
                send_actions(collector, rows[sent_B], action_BA[mask_B], after_B[mask_B])
        account(rollout, collector, len(rows), waiting_sec, began)


def claim_slots(rollout, collector, rows):
    """Complete the rows' records and give each row a slot for its next one. Returns the completed slots (-1: none) and the
    new ones. Under the lock: whoever completes the S-th record ends the rollout, once."""
    closed, lost = complete_records(rollout, collector, rows)
    begin, slots = int(rollout.size), collector.open_slot_N[rows]  # the slot of a lost step is used again
    rollout.size += np.count_nonzero(~lost)
    slots[~lost] = np.arange(begin, rollout.size)
    collector.open_slot_N[rows] = slots
    # an action is held if the rollout is complete, or (nover, sync) its environment has given T steps
    collector.held_N[rows] = (rollout.num_complete == rollout.steps) | (collector.steps_N[rows] >= collector.quota)
    if not lost.any():
        slots = slice(begin, int(rollout.size))  # the same, indexed faster
    return closed, slots


def complete_records(rollout, collector, rows):
    """Put the rewards and end flags that arrived into the rows' open records. Returns for each row the slot that was
    completed, -1 if none was, and whether the step asked of it is lost.

    A row without an open record completes none: it brings the first observation of all, or was held, and its answer was
    counted in the rollout before. One whose environment had to be started again brings the first observation of another
    episode: its open record never gets an answer, and its slot is used again.
    """
    closed = collector.open_slot_N[rows]
    # rare: an environment was started again, so its open record gets no answer
    lost = collector.transfer.lost[rows] & (closed >= 0)
    for slot, row in zip(closed[lost], rows[lost]):
        cut_off(rollout, slot, row)
    closed[lost] = -1
    # all others: the answer completes the record
    done_slots, done_rows, transfer = closed[closed >= 0], rows[closed >= 0], collector.transfer
    for name in ("reward", "terminated", "truncated", "result"):
        getattr(rollout, name)[done_slots] = getattr(transfer, name)[done_rows]
    rollout.complete[done_slots] = True
    rollout.num_complete += len(done_slots)
    collector.steps_N[done_rows] += 1
    collector.completed_at_N[done_rows] = time.perf_counter()
    rollout.simulation_sec += transfer.step_sec[done_rows].sum()
    if collector.trace:
        for row, began, sec in zip(done_rows, transfer.step_began[done_rows], transfer.step_sec[done_rows]):
            collector.trace.span("environments", row, "step", began, sec)
    return closed, lost


def cut_off(rollout, slot, row):
    """The step of this open record is lost: for the returns, the step before it ends as if truncated, with the record's
    value. If it is lost again before it is answered, the record is of another episode already, and nothing changes."""
    begin = rollout.begin_of(slot)
    earlier = begin + np.flatnonzero(rollout.env[begin:slot] == row)
    if len(earlier) and not any(ended[earlier[-1]] for ended in (rollout.terminated, rollout.truncated, rollout.lost)):
        rollout.lost[earlier[-1]] = True
        rollout.final_value[earlier[-1]] = rollout.value[slot]


def bootstrap_truncated(policy, rollout, collector, rows, closed):
    """A truncated episode would have gone on: its last record gets the value of the final observation, computed with the
    memory of that episode (Pardo et al. 2018), which `state_N` still holds."""
    truncated = collector.transfer.truncated[rows] & (closed >= 0)
    if truncated.any():
        _, _, value_B, _ = infer(policy, collector, rows[truncated], "final_obs")
        rollout.final_value[closed[truncated]] = value_B


def write_records(policy, rollout, collector, rows, slots, version):
    """Infer, and write one new open record for each row; returns their actions and the recurrent states after the step."""
    (obs, state_B, prev_action_B), distribution, value_B, after_B = infer(policy, collector, rows)
    action_BA = distribution.sample()
    for key, part in obs.items():
        rollout.obs[key][slots] = part
    rollout.state[slots], rollout.prev_action[slots] = state_B, prev_action_B
    rollout.value[slots], rollout.action[slots] = value_B, action_BA
    rollout.log_prob[slots] = distribution.log_prob(action_BA)
    rollout.final_value[slots], rollout.lost[slots] = 0.0, False
    rollout.env[slots], rollout.version[slots], rollout.complete[slots] = rows, version, False
    rollout.first[slots] = collector.transfer.first[rows]
    return action_BA, after_B


def send_actions(collector, rows, action_BA, after_B):
    """Send the actions of these rows: only now does the actor's memory move on."""
    index_B = torch.from_numpy(rows).to(action_BA.device)
    action = action_BA.cpu().numpy()
    collector.transfer.action[rows] = action
    with collector.lock:  # a checkpoint sees memory and actions of the same moment
        collector.state_N[index_B], collector.prev_action_N[index_B] = after_B, action_BA
        begins = collector.transfer.first[rows]  # from here on, for checkpoints: what a resumed run must repeat
        collector.sent_N[rows[begins]] = 0
        collector.episode_N[rows] = collector.transfer.episode[rows]
        collector.history_NTA[rows, np.minimum(collector.sent_N[rows], REPLAY_LIMIT - 1)] = action
        collector.sent_N[rows] += 1
        synchronize(action_BA.device)  # the next request of these rows may be served by another process
    collector.workers.send(rows.tolist())


def account(rollout, collector, batch_size, waiting_sec, began):
    """Note what one pass took, for the log and for the trace."""
    sec = time.perf_counter() - began
    with collector.lock:
        rollout.waiting_sec += waiting_sec
        rollout.inference_sec += sec
        rollout.batches += batch_size > 0
        rollout.served += batch_size
    if batch_size:
        collector.inference_sec += 0.1 * (sec - collector.inference_sec)
        if collector.trace:
            collector.trace.span("inference", os.getpid(), f"batch of {batch_size}", began, sec)


def carry_over(previous, rollout, collector):
    """Begin a rollout with the records whose actions were sent and whose answers nobody has taken (VER section 2.2,
    "Inflight actions"). An answer may be there already, too late for the last pass: its request waits, before those that
    are added here.

    They keep the action, log-probability, value and version of the policy that acted, and PPO's ratio accounts for its age;
    so nothing that was simulated is lost. Records that are held are dropped: they were only bootstrap values, and their
    environments wait for inference again, by the new policy. `previous` may be the same buffer. Called between two
    rollouts, when nobody serves requests.
    """
    slots, held = collector.in_flight(), np.flatnonzero(collector.held_N)
    rollout.begin_with(collector.version, [column[slots] for column in previous.columns()])
    collector.open_slot_N[held] = -1  # their last answers are counted; their rows still hold what to infer from
    collector.open_slot_N[rollout.env[: len(slots)]] = np.arange(len(slots))
    collector.held_N[:] = False
    collector.steps_N[:] = 0
    note_requests(collector, held[~collector.absent_N[held]])
    collector.preempted[...] = collector.resumed = False


@torch.inference_mode()
def collect_trajectories(actors, pool, collector, finished):
    """--sampler async: collect without end into trajectories of T steps (Sample Factory's APPO, section 3.1).

    Before every batch the newest weights are taken. The numbers of finished trajectories go down the pipe `finished`, the
    learner gives them back by `pool.free_P`; while none is free, environments that need one wait.
    """
    while True:
        waiting_sec = await_requests(collector)
        began = time.perf_counter()
        with collector.lock:
            version = int(collector.version)
            rows, closed, slots = claim_trajectory_slots(pool, collector, take_requests(collector, collector.max_requests))
        if not len(rows):
            time.sleep(0.001)
            continue
        policy = actors[version % 2]
        bootstrap_truncated(policy, pool, collector, rows, closed)
        action_BA, after_B = write_records(policy, pool, collector, rows, slots, version)
        full = np.flatnonzero(pool.is_last(closed))
        for name in ("value", "env", "first", "version", "complete"):  # the last slot: bootstrap value, never complete
            column = getattr(pool, name)
            column[closed[full] + 1] = column[slots[full]]
        send_actions(collector, rows, action_BA, after_B)  # from here on another process may complete the new records
        account(pool, collector, len(rows), waiting_sec, began)
        if len(full):
            synchronize(pool.device)
            write_numbers(finished, closed[full] // pool.length)


def claim_trajectory_slots(pool, collector, rows):
    """Complete the rows' records and give each row its next slot, in a new trajectory if the last one is full. Rows for
    which none is free go on waiting. Returns the others, their completed slots (-1: none) and their new ones. Under the
    lock."""
    before = collector.open_slot_N[rows]
    begins = (before < 0) | pool.is_last(before) & ~collector.transfer.lost[rows]
    free = np.flatnonzero(pool.free_P)
    served = ~begins | (np.cumsum(begins) <= len(free))
    note_requests(collector, rows[~served])
    rows, begins, before = rows[served], begins[served], before[served]
    closed, lost = complete_records(pool, collector, rows)
    slots, new = np.where(lost, before, closed + 1), free[: begins.sum()]
    slots[begins], pool.free_P[new] = new * pool.length, False
    collector.open_slot_N[rows] = slots
    return rows, closed, slots


def synchronize(device):
    """What this process has written to CUDA memory is there for the others to read."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def check_collected(rollout, records, version, steps):
    """Every invariant of what was collected, whatever the sampler (--debug)."""
    check_trajectories(rollout, records, version) if isinstance(rollout, Trajectories) else check_rollout(rollout, steps)


def check_rollout(rollout, steps=None):
    """Every invariant of a finished rollout, with S complete steps unless `steps` says otherwise. Raises an AssertionError
    that names the broken one."""
    size, env, complete = int(rollout.size), rollout.env, rollout.complete
    version, used = rollout.policy_version, np.arange(len(env)) < size
    expected = rollout.steps if steps is None else steps
    assert complete[used].sum() == expected and not complete[~used].any(), "exactly T x N records are complete"
    for e in range(rollout.num_envs):
        slots = np.flatnonzero(used & (env == e))
        check_records(rollout, slots, f"environment {e}")
        assert (slots < rollout.carried).sum() <= 1, f"environment {e}: one record at most was in flight"
    fresh = used & (np.arange(len(env)) >= rollout.carried)
    assert (rollout.version[fresh] == version).all(), "new records come from the current policy"
    older = rollout.version[: rollout.carried] < max(1, version)  # two overlapping rollouts are collected by version 0
    again = rollout.first[: rollout.carried]  # after a loss, its slot took the first record of a new episode
    assert (older | again).all(), "carried records come from older policies"


def check_records(rollout, slots, whose):
    """Invariants of successive records of one environment, of which the last one is open."""
    complete, first, terminated, truncated, lost, version = (
        getattr(rollout, name)[slots] for name in ("complete", "first", "terminated", "truncated", "lost", "version")
    )
    assert complete[:-1].all() and not complete[-1:].any(), f"{whose}: its last record alone is open"
    assert (first[1:] == (terminated | truncated | lost)[:-1]).all(), f"{whose}: an episode begins only where one ended"
    assert (np.diff(version) >= 0).all(), f"{whose}: versions do not go back"
    assert not (terminated & truncated)[complete].any(), f"{whose}: an episode ends in one way"
    state = rollout.state[slots].flatten(1)
    begins = torch.from_numpy(first & complete).to(state.device)
    assert not state[begins].any(), f"{whose}: memory is zero where an episode begins"
    for name in ("log_prob", "value", "final_value", "action"):
        assert torch.isfinite(getattr(rollout, name)[slots]).all(), f"{whose}: {name} is finite"
    assert np.isfinite(rollout.reward[slots][complete]).all(), f"{whose}: reward is finite"


def check_trajectories(pool, records, version):
    """Every invariant of finished trajectories (--sampler async). Raises AssertionError as check_rollout does."""
    for slots in records.reshape(-1, pool.length):
        whose = f"trajectory {slots[0] // pool.length}"
        check_records(pool, slots, whose)
        assert (pool.env[slots] == pool.env[slots[0]]).all(), f"{whose}: all records are of one environment"
        assert pool.version[slots].max() <= version, f"{whose}: no record comes from a policy that is still to come"
        assert not pool.free_P[slots[0] // pool.length], f"{whose}: nobody writes to it"


# ----------------------------------------------------------------------------------------------------------------------
# Inference workers
# ----------------------------------------------------------------------------------------------------------------------


class InferenceWorkers(ProcessGroup):
    """Processes that serve requests while this one learns or waits (--num-inference-workers, --overlap, --sampler async).

    They act by copies of the weights in shared memory: version v is copy v % 2. `publish` writes the other copy, by which
    nobody has acted since the update before, and then counts the version up.
    """

    def __init__(self, policy, rollouts, collector, spec, options, starts):
        super().__init__(options.num_inference_workers)
        self.policy, self.collector, self.num_workers = policy, collector, options.num_inference_workers
        weights = nn.utils.parameters_to_vector(policy.parameters()).detach()
        self.weights = torch.stack([weights, weights]).share_memory_()
        collector.lock = SharedLock(self.context)
        commands, command = self.context.Pipe(duplex=False)  # one for all: whoever is free reads the next command
        self.commands = [command]
        for worker in range(self.num_workers):
            args = (worker, self.weights, rollouts, collector, spec, options, None if collector.workers else starts)
            self.start(f"inference worker {worker}", inference_process, commands, *args)
        commands.close()

    def __getstate__(self):  # what its processes need
        private = ("policy", "collector", "weights")
        return {name: value for name, value in super().__getstate__().items() if name not in private}

    def publish(self):
        """Let inference act by the weights that were just learned."""
        with torch.no_grad():
            self.weights[(self.collector.version + 1) % 2] = nn.utils.parameters_to_vector(self.policy.parameters())
        synchronize(self.weights.device)
        with self.collector.lock:
            self.collector.version += 1

    def collect(self, previous, rollouts, number):
        """Begin to collect into the rollout of this number; what is in flight comes from the previous one. Returns it."""
        carry_over(previous, rollouts[number], self.collector)
        synchronize(previous.device)
        write_numbers(self.commands[0], [number] * self.num_workers)
        return rollouts[number]

    def await_numbers(self, count):
        """The next announcements, at least `count`. Raises EnvironmentFailure, and Interrupted after Ctrl-C or SIGTERM."""
        numbers = []
        while len(numbers) < count:
            try:
                received = self.receive(self.collector.poll_sec)
                if self.collector.workers:
                    self.collector.workers.check()
            finally:
                self.collector.stop.check()
            numbers += received
            limit_sec = self.collector.timeout_sec + 1.5 * GRACE_SEC  # inference workers give up before, if they can
            if not received and time.perf_counter() - self.collector.served_at > limit_sec:
                message = f"inference has stood still for {limit_sec:.0f} s: {progress_of(self.collector)}"
                raise EnvironmentFailure(message)
        return numbers


class SharedLock:
    """A lock between processes that is held for moments: whoever has read the one byte in a pipe holds it. Unlike a named
    semaphore it leaves nothing behind, however the processes end. Raises EnvironmentFailure where the holder must have died.
    """

    def __init__(self, context):
        self.reader, self.writer = context.Pipe(duplex=False)
        os.set_blocking(self.reader.fileno(), False)
        self.__exit__()

    def __enter__(self):
        while True:
            try:
                return os.read(self.reader.fileno(), 1)
            except BlockingIOError:
                if not self.reader.poll(30):
                    raise EnvironmentFailure("an inference worker has died in the middle of its work") from None

    def __exit__(self, *_):
        os.write(self.writer.fileno(), b"x")


class EndOfPipe:
    """In an inference worker: Interrupted as soon as the main process has closed the command pipe, or has died."""

    def __init__(self, commands):
        self.poller = select.poll()
        self.poller.register(commands, select.POLLHUP)

    def check(self):
        """Raises Interrupted if there will be no more commands."""
        if self.poller.poll(0):
            raise Interrupted(0)


def inference_process(group, commands, worker, weights, rollouts, collector, spec, options, starts):
    """Body of an inference worker: collect whenever a command arrives, by the very functions that run inline otherwise."""
    collector.stop = EndOfPipe(commands)
    collector.trace = Trace(options.trace) if options.trace else None
    actors = [Policy(spec, options).to(weights.device).requires_grad_(False) for _ in weights]
    for actor, vector in zip(actors, weights):
        nn.utils.vector_to_parameters(vector, actor.parameters())  # as views: they change with what is published
    if weights.is_cuda:
        torch.cuda.set_device(weights.device)
    number = RANGES["num_inference_workers"][1] * (1 + int(collector.version)) + worker
    torch.manual_seed(episode_seed("train", options.seed, options.first_env, number))
    with contextlib.ExitStack() as stack:
        try:
            if collector.workers is None:
                collector.workers = start_workers(options, "train", spec, collector.transfer, starts)
                stack.enter_context(contextlib.closing(collector.workers))
            if options.sampler == "async":
                collect_trajectories(actors, rollouts[0], collector, group.announce)
            while command := read_numbers(commands, 1):
                rollout = rollouts[command[0]]
                collect_rollout(actors[rollout.policy_version % 2], rollout, collector)
                synchronize(rollout.device)
                write_numbers(group.announce, [worker])
        except Interrupted:
            pass
        except Exception as error:
            group.fail(worker, str(error) if isinstance(error, EnvironmentFailure) else traceback.format_exc())
    if collector.trace:
        collector.trace.flush()


def inline_rollouts(policy, rollouts, collector):
    """This process is inference worker and learner by turns (VER appendix A.1): yields rollouts and their records."""
    buffers = itertools.cycle([*rollouts[1:], rollouts[0]])  # here the same one again and again, two in ver_multigpu.py
    while True:
        torch.set_num_threads(1)  # the workers want the cores now
        collector.workers.check()  # `receive` would not see who has died before all answers are read
        rollout = collector.rollout
        collect_rollout(policy, rollout, collector)
        yield rollout, np.arange(rollout.size)  # the caller learns and counts the update: then a new policy collects
        collector.rollout = next(buffers)
        carry_over(rollout, collector.rollout, collector)


def remote_rollouts(inference, rollouts, overlap):
    """Inference workers collect. With `overlap` they fill one of two buffers while the learner uses the other: its gradients
    are delayed by one rollout (as in HTS-RL, Liu et al. 2020; PPO's ratio accounts for it)."""
    numbers = itertools.cycle(range(len(rollouts)))
    rollout = inference.collect(rollouts[-1], rollouts, next(numbers))
    while True:
        inference.await_numbers(inference.num_workers)
        finished = rollout
        if overlap:  # the next one is collected while this one is learned from, so by the policy before
            rollout = inference.collect(finished, rollouts, next(numbers))
        yield finished, np.arange(finished.size)
        if not overlap:
            rollout = inference.collect(finished, rollouts, next(numbers))


def finished_trajectories(inference, pool):
    """--sampler async: yields the N trajectories that were finished first, whoever they are from, again and again."""
    finished = []
    while True:
        finished += inference.await_numbers(pool.num_envs - len(finished))
        numbers, finished = np.array(finished[: pool.num_envs]), finished[pool.num_envs :]
        yield pool, (numbers[:, None] * pool.length + np.arange(pool.length)).ravel()
        pool.free_P[numbers] = True


# ----------------------------------------------------------------------------------------------------------------------
# Sequences and packing
# ----------------------------------------------------------------------------------------------------------------------


def find_sequences(env_S, first_S, complete_S):
    """Positions of the complete records, environment by environment in time order, and where in that order the Q sequences
    begin: with an environment's first record in the rollout, with an episode (VER section 2.2), and after an open record,
    with which a trajectory of --sampler async ends. (The arguments include open records; S of their entries are complete.)

    >>> env, first = np.array([0, 1, 0, 1, 0]), np.array([False, True, True, False, False])
    >>> find_sequences(env, first, np.array([True, True, True, True, False]))  # the last record is open
    (array([0, 2, 1, 3]), array([0, 1, 2]))
    """
    order = np.argsort(env_S, kind="stable")
    complete, new_env = complete_S[order], np.diff(env_S[order], prepend=-1) != 0
    after_open = np.append(False, ~complete[:-1])
    begins = new_env | first_S[order] | after_open
    return order[complete], np.flatnonzero(begins[complete])


def cut_minibatches(order_S, begin_Q, permutation_Q, num_minibatches):
    """Lay the shuffled sequences end to end and cut them into mini-batches of equal size (VER section 2.2, figure 3B).

    Returns a list of (positions_M, begin_Q): the second says where in the mini-batch sequences begin. A sequence that a cut
    splits goes on in the next mini-batch, as a sequence that starts from its stored recurrent state.

    >>> cut_minibatches(np.array([0, 2, 1, 3]), np.array([0, 1, 2]), [2, 0, 1], 2)
    [(array([1, 3]), array([0])), (array([0, 2]), array([0, 1]))]
    """
    sequences = np.split(order_S, begin_Q[1:])
    shuffled = [sequences[q] for q in permutation_Q]
    positions_S = np.concatenate(shuffled)
    begins_S = np.concatenate([np.arange(len(sequence)) == 0 for sequence in shuffled])
    minibatches = []
    for positions_M, begins_M in zip(np.split(positions_S, num_minibatches), np.split(begins_S, num_minibatches)):
        begins_M[0] = True
        minibatches.append((positions_M, np.flatnonzero(begins_M)))
    return minibatches


def pack_sequences(positions_M, begin_Q):
    """Arrange sequences as a PackedSequence (VER section 2.2, figure 3C): all first steps, then all second steps, ...

    Returns the positions in that order, the number of sequences that are still running at each time, and the positions of
    the sequences' first steps (their stored states start the LSTM), longest sequence first.

    >>> pack_sequences(np.array([7, 4, 5, 6]), np.array([0, 1]))
    (array([4, 7, 5, 6]), tensor([2, 1, 1]), array([4, 7]))
    """
    length_Q = np.diff(begin_Q, append=len(positions_M))
    longest_first_Q = np.argsort(-length_Q, kind="stable")
    rank_Q = np.argsort(longest_first_Q)  # the inverse permutation
    time_M = np.arange(len(positions_M)) - np.repeat(begin_Q, length_Q)
    by_time_M = np.lexsort((np.repeat(rank_Q, length_Q), time_M))  # the last key counts first
    batch_sizes = torch.from_numpy(np.bincount(time_M))
    return positions_M[by_time_M], batch_sizes, positions_M[begin_Q[longest_first_Q]]


# ----------------------------------------------------------------------------------------------------------------------
# Returns and weights
# ----------------------------------------------------------------------------------------------------------------------


def compute_advantages(
    env, complete, reward, value, terminated, truncated, final_value, gamma, gae_lambda, ratio=1.0, rho_max=1.0, c_max=1.0
):
    """Value targets and advantages over the linear buffer; all arrays have one entry for each slot, in time order.

    Walks backwards. For each environment `next_value` is the value of its following step, and `next_excess` by how much that
    step's target exceeds its value (in plain GAE, that step's advantage). An open record has its value and excess 0: the
    bootstrap. *terminated*: nothing follows. *truncated*: the final observation's value follows, with excess 0. Returns
    float32 targets and advantages; those of open records are their value and 0.

    Without `ratio` this is generalized advantage estimation: advantage = delta + gamma * lambda * next advantage. With
    `ratio`, an action's probability under the policy that learns divided by that under the one that acted, it is V-trace
    (Espeholt et al. 2018, section 4.1): a temporal difference counts min(rho_max, ratio) for the target, and what follows a
    step counts min(c_max, ratio). The step's own advantage is not multiplied by its ratio, because PPO's objective is.
    """
    num_envs = int(env.max()) + 1
    next_value, next_excess = [0.0] * num_envs, [0.0] * num_envs
    rho_S, c_S = (np.broadcast_to(np.minimum(maximum, ratio), value.shape) for maximum in (rho_max, c_max))
    columns = (env, complete, reward, value, terminated, truncated, final_value, rho_S, c_S)
    slots = list(zip(*(column.tolist() for column in columns)))
    target_S, advantage_S = np.array(value, np.float32), np.zeros(len(slots), np.float32)
    for slot in range(len(slots) - 1, -1, -1):
        e, is_complete, r, v, is_terminated, is_truncated, v_final, rho, c = slots[slot]
        if is_complete:
            if is_terminated or is_truncated:  # what the walk has seen last is another episode
                next_value[e], next_excess[e] = v_final if is_truncated else 0.0, 0.0
            delta = r + gamma * next_value[e] - v
            advantage_S[slot] = delta + gamma * gae_lambda * next_excess[e]
            next_excess[e] = rho * delta + gamma * gae_lambda * c * next_excess[e]
            target_S[slot] = v + next_excess[e]
        else:
            next_excess[e] = 0.0  # only its value is known
        next_value[e] = v
    return target_S, advantage_S


def importance_weights(env_S, complete_S, num_envs, maximum=1.0):
    """Truncated importance weights for the biased sampling of environments (VER section 4, table A1 "Max VER IS").

    An environment that gave K_e of the S steps was sampled K_e / S of the time instead of 1 / N, so each of its steps
    weighs min(maximum, (S / N) / K_e). Slow environments are not weighted up.

    >>> importance_weights(np.array([0, 0, 0, 0, 1, 2]), np.ones(6, bool), num_envs=3)
    array([0.5, 0.5, 0.5, 0.5, 1. , 1. ], dtype=float32)
    """
    count_N = np.bincount(env_S[complete_S], minlength=num_envs)
    weight_N = np.minimum(maximum, count_N.sum() / num_envs / np.maximum(count_N, 1))
    return weight_N.astype(np.float32)[env_S]


# ----------------------------------------------------------------------------------------------------------------------
# Loss and update
# ----------------------------------------------------------------------------------------------------------------------

ENT_COEF_BOUNDS = (1e-4, 1.0)  # VER table A1


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
    value_loss = 0.5 * (weight_M * (value_M - batch["return"]) ** 2).mean()
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


CPC_HORIZON, CPC_STARTS, CPC_FUTURES, CPC_NEGATIVES, CPC_COEF = 20, 6, 2, 20, 0.1  # as in habitat-baselines


def cpc_futures(batch_sizes):
    """What CPC|A compares: steps of packed sequences, and later steps of the same sequence, so never across the end of an
    episode. Of each sequence CPC_STARTS random steps, and for each CPC_FUTURES random later ones, CPC_HORIZON steps at most.

    Returns P start positions, P x CPC_HORIZON positions of the actions from there on (beyond the end: of the last step), and
    how many steps later the futures are, P x CPC_FUTURES, with their positions.
    """
    length_Q = (batch_sizes[:, None] > torch.arange(int(batch_sizes[0]))).sum(0)
    begin_of_time = batch_sizes.cumsum(0) - batch_sizes
    sequence_P = torch.arange(len(length_Q))[length_Q > 1].repeat_interleave(CPC_STARTS)[:, None]
    last_P = length_Q[sequence_P] - 1
    time_P = (torch.rand(len(sequence_P), 1) * last_P).long()
    later_PF = 1 + (torch.rand(len(sequence_P), CPC_FUTURES) * (last_P - time_P).clamp(max=CPC_HORIZON)).long()
    action_time_PT = torch.minimum(time_P + torch.arange(CPC_HORIZON), last_P)
    start_P, action_PT, future_PF = (
        begin_of_time[time] + sequence_P for time in (time_P, action_time_PT, time_P + later_PF)
    )
    return start_P[:, 0], action_PT, later_PF, future_PF


def cpc_loss(policy, features_MD, core_MH, action_MA, batch_sizes):
    """Action-conditional contrastive prediction over packed sequences (Guo et al. 2018; VER section 4 adds it to PPO).

    The memory after a step is followed through the actions taken since; then a classifier must tell the features that were
    seen from CPC_NEGATIVES others of the same mini-batch. Returns the two mean cross-entropies, added.
    """
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


def compute_targets(policy, rollout, records, options):
    """Write advantage and value target of these records (slots, each environment's in time order) into the rollout.
    Returns, for the log, the share of the targets' variance that the values explain."""
    names = ("env", "complete", "reward", "terminated", "truncated")
    columns = {name: getattr(rollout, name)[records] for name in names}
    for name in ("value", "final_value"):
        columns[name] = getattr(rollout, name)[torch.from_numpy(records).to(rollout.device)].cpu().numpy()
    columns["truncated"] = columns["truncated"] | rollout.lost[records]  # both go on with final_value
    complete_S, discounts = columns["complete"], {"gamma": options.gamma, "gae_lambda": options.gae_lambda}
    if options.sampler == "async":
        columns["ratio"], columns["value"] = off_policy(policy, rollout, records, columns["value"], options)
    target_S, advantage_S = compute_advantages(**columns, **discounts)
    rollout.advantage[records], rollout.target[records] = advantage_S, target_S
    error = (target_S - columns["value"])[complete_S].var() / max(target_S[complete_S].var(), 1e-12)
    return {"losses/explained_variance": 1 - float(error)}


def average_alone(tensors):
    """Average these tensors over all processes that learn together: nothing to do in a run of one (ver_multigpu.py has)."""


def learn(policy, optimizer, rollout, records, options, average=average_alone):
    """Update the policy from these records of a rollout: --update-epochs passes over all mini-batches; then the running
    statistics of images take in some of them. `average` works in place on a list of tensors. Returns what to log.

    Mini-batches whose gradient is not finite are skipped; raises FloatingPointError at the third in a row.
    """
    env_S, complete_S, advantage_S = rollout.env[records], rollout.complete[records], rollout.advantage[records]
    weight_S = importance_weights(env_S, complete_S, rollout.num_envs)
    if options.sampler == "async":
        weight_S[:] = 1.0  # trajectories of T steps, all alike
    if options.norm_adv:
        moments = torch.tensor([(advantage_S[complete_S].astype(float) ** power).mean() for power in (1, 2)])
        average([moments])  # of all ranks, which normalize alike
        mean, square = moments.tolist()
        advantage_S = (advantage_S - np.float32(mean)) / np.float32(math.sqrt(max(0.0, square - mean**2)) + 1e-8)
    targets = {"advantage": advantage_S, "return": rollout.target[records], "weight": weight_S}
    targets = {name: torch.from_numpy(column).to(rollout.device) for name, column in targets.items()}
    order_S, begin_Q = find_sequences(env_S, rollout.first[records], complete_S)  # positions in `records` from here on
    logs = []
    for _ in range(options.update_epochs):
        permutation_Q = torch.randperm(len(begin_Q)).numpy()
        for minibatch in cut_minibatches(order_S, begin_Q, permutation_Q, options.num_minibatches):
            packed = pack_sequences(*minibatch)
            logs.append(update_policy(policy, optimizer, rollout, records, targets, packed, options, average))
    sample = torch.from_numpy(records[:: len(records) // 256 + 1]).to(rollout.device)
    policy.observe(rollout.obs, sample, average)
    means = {name: torch.stack([log[name] for log in logs]).mean().item() for name in logs[0]}
    return {**means, "ver/importance_weight": float(weight_S[complete_S].mean())}


@torch.no_grad()
def off_policy(policy, rollout, records, value_S, options):
    """What V-trace needs to know of the policy as it is before this update: the probability ratio of every action, and its
    values, instead of those that were collected, `value_S`. Open records keep ratio 1 and their value."""
    ratio_S, value_S = np.ones_like(value_S), value_S.copy()
    order_S, begin_Q = find_sequences(rollout.env[records], rollout.first[records], rollout.complete[records])
    for minibatch in cut_minibatches(order_S, begin_Q, np.arange(len(begin_Q)), options.num_minibatches):
        positions_M, *_ = packed = pack_sequences(*minibatch)
        distribution, value_M, _, batch = run_sequences(policy, rollout, records, packed)
        value_S[positions_M] = value_M.cpu()
        ratio_S[positions_M] = (distribution.log_prob(batch["action"]) - batch["log_prob"]).exp().cpu()
    return ratio_S, value_S


def run_sequences(policy, rollout, records, packed):
    """The policy on packed sequences: distribution and value_M of their steps, (features, memory), and what the buffer holds
    of these steps."""
    positions_M, batch_sizes, start_Q = packed
    slot_M, slot_Q = (torch.from_numpy(records[positions]).to(rollout.device) for positions in (positions_M, start_Q))
    batch = {name: getattr(rollout, name)[slot_M] for name in ("action", "log_prob", "prev_action")}
    obs = {key: part[slot_M] for key, part in rollout.obs.items()}
    first_M = torch.from_numpy(rollout.first[records[positions_M]]).to(rollout.device)
    with autocast(policy, rollout.device):
        return *policy.sequences(obs, batch["prev_action"], first_M, rollout.state[slot_Q], batch_sizes), batch


def update_policy(policy, optimizer, rollout, records, targets, packed, options, average):
    """One optimizer step on one packed mini-batch; none if the gradient is not finite."""
    positions_M, batch_sizes, _ = packed
    distribution, value_M, memory, batch = run_sequences(policy, rollout, records, packed)
    index_M = torch.from_numpy(positions_M).to(rollout.device)
    batch |= {name: column[index_M] for name, column in targets.items()}
    loss, logs = ppo_loss(distribution, value_M, batch, policy.log_ent_coef, options)
    if policy.cpc:
        prediction_loss = cpc_loss(policy, *memory, batch["action"], batch_sizes)
        loss, logs["losses/cpc"] = loss + CPC_COEF * prediction_loss, prediction_loss.detach()
    optimizer.zero_grad()
    loss.backward()
    average([parameter.grad for parameter in policy.parameters() if parameter.grad is not None])
    norm = nn.utils.clip_grad_norm_(policy.parameters(), options.max_grad_norm)
    finite = bool(torch.isfinite(norm))
    policy.skipped = 0 if finite else policy.skipped + 1
    if policy.skipped == 3:
        reason = f"loss {loss.item()}, gradient norm {norm.item()}, three times in a row"
        raise FloatingPointError(f"{reason}: try a lower --learning-rate")
    if finite:
        optimizer.step()
    if policy.log_ent_coef.requires_grad:
        policy.log_ent_coef.data.clamp_(*(math.log(bound) for bound in ENT_COEF_BOUNDS))
    return {**logs, "losses/grad_norm": norm.detach(), "losses/skipped": torch.tensor(float(not finite))}


# ----------------------------------------------------------------------------------------------------------------------
# Run folder, logging, checkpoints, evaluation
# ----------------------------------------------------------------------------------------------------------------------

CHECKPOINT_FORMAT = 3


def save_checkpoint(path, policy, optimizer, snapshots, options, progress):
    """Write everything that a run needs to go on, atomically: a crash leaves the old file or the new one, both whole.

    Only tensors and plain types, so that it loads with weights_only=True and a foreign file can execute nothing.
    `snapshots`: one of each rank's collector. Environments are saved as seed and actions (`EnvironmentRow.start` repeats
    them).
    """
    content = {
        "format": CHECKPOINT_FORMAT,
        "options": asdict(options),
        "policy": policy.state_dict(),
        "optimizer": optimizer.state_dict(),
        "progress": progress,
        "collectors": snapshots,
    }
    temporary = path.with_suffix(".tmp")
    try:
        with open(temporary, "wb") as file:
            torch.save(content, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)  # half of it, if the disk is full


def load_checkpoint(path):
    """A checkpoint's content, on the CPU. Raises UserError for anything but a checkpoint of this program."""
    try:
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()  # torch.load does not look at the checksums
        content = None if damaged else torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise UserError(f"there is no checkpoint {path}") from None
    except Exception as error:  # whatever a damaged or hostile file makes of the loader
        raise UserError(f"{path} is not a checkpoint that can be read ({type(error).__name__})") from None
    if damaged:
        raise UserError(f"{path} is damaged: the checksum of {damaged} is wrong")
    kinds = {"format": int, "options": dict, "policy": dict, "optimizer": dict, "progress": dict, "collectors": list}
    if not isinstance(content, dict) or not all(isinstance(content.get(name), kind) for name, kind in kinds.items()):
        raise UserError(f"{path} is not a checkpoint of this program")
    if content["format"] != CHECKPOINT_FORMAT:
        other = f"was written by another version (format {content['format']} instead of {CHECKPOINT_FORMAT})"
        raise UserError(f"{path} {other}: go on with that version, or start anew")
    return content


OF_ENVIRONMENTS = {"env_id", "simulator", "habitat_overrides", "camera", "image_size", "seed", "action_delay"}


def load_run(policy, optimizer, options, rank=0, num_ranks=1):
    """Progress and this rank's collector snapshot of the run to resume; its weights and optimizer state are put in place.
    Raises UserError."""
    path = Path(options.resume) / "checkpoint.pt"
    saved = load_checkpoint(path)
    load_policy(policy, saved, path)
    if options.target_entropy is None:  # fixed: as the options say, not as the checkpoint does
        policy.log_ent_coef.data.fill_(math.log(max(options.ent_coef, 1e-30)))
    optimizer.load_state_dict(saved["optimizer"])
    if len(saved["collectors"]) != num_ranks:
        ranks = len(saved["collectors"])
        raise UserError(f"the run to resume has {ranks} ranks, this one {num_ranks}: give torchrun --nproc-per-node {ranks}")
    snapshot = saved["collectors"][rank]
    snapshot["environments"] = [(episode, actions.numpy()) for episode, actions in snapshot["environments"]]
    changed = {name for name, value in asdict(options).items() if saved["options"].get(name) != value}
    if changed & {"num_steps", "sampler", *OF_ENVIRONMENTS}:
        snapshot["records"] = None  # a rollout is made differently now
    if changed & OF_ENVIRONMENTS:  # and what was done would now mean something else
        snapshot["environments"] = [(episode + 1, actions[:0]) for episode, actions in snapshot["environments"]]
        saved["progress"]["recent"] = []
    if len(snapshot["environments"]) != options.num_envs:
        raise UserError(f"--num-envs {options.num_envs}: the run to resume has {len(snapshot['environments'])}")
    return saved["progress"], snapshot


def load_policy(policy, content, path):
    """Put a checkpoint's weights into the policy. Raises UserError if they belong to another network."""
    try:
        policy.load_state_dict(content["policy"])
    except RuntimeError as error:
        difference = " ".join(str(error).split())[:300]
        raise UserError(f"{path} belongs to another network or environment: {difference}") from None


def start_from(policy, options):
    """Transfer (DD-PPO section 6): take the weights of the checkpoint --init-from, as far as names and shapes agree; with
    --reset-critic but for the critic. Raises UserError if its encoders are others."""
    saved, own = load_checkpoint(options.init_from)["policy"], policy.state_dict()
    new = {"log_ent_coef", *(name for name in own if options.reset_critic and name.startswith("critic."))}
    new |= {name for name in own if name not in saved or saved[name].shape != own[name].shape}
    if unfit := sorted(name for name in new if name.startswith("encoders.")):
        reason = f"its encoders are others ({unfit[0]})"
        raise UserError(f"--init-from {options.init_from}: {reason}: give the --encoder, --camera and sizes of that run")
    policy.load_state_dict(own | {name: saved[name] for name in own.keys() - new})
    print(f"{len(own) - len(new)} of {len(own)} tensors come from {options.init_from}; new: {', '.join(sorted(new))}")


SHOWN_METRICS = ("success", "spl")  # beside the progress bar, if the environment has them


class Run:
    """A run folder (options.json, TensorBoard events, checkpoint.pt), the counters, and the progress bar."""

    def __init__(self, options, progress):
        self.step, self.recent = progress["step"], deque(progress["recent"], maxlen=100)
        env_name = options.env_id.replace("/", "-").replace(":", "-")
        name = f"{env_name}__{options.exp_name}__{options.seed}__{int(time.time())}"
        self.folder = Path(options.resume or Path(options.runs_dir) / name)
        try:
            self.folder.mkdir(parents=True, exist_ok=bool(options.resume))
            (self.folder / "options.json").write_text(json.dumps(asdict(options), indent=2) + "\n")
        except OSError as error:
            reason = f"the run folder {self.folder} cannot be written ({error.strerror})"
            raise UserError(f"{reason}: choose another --runs-dir") from None
        from torch.utils.tensorboard import SummaryWriter  # takes a second to import

        self.writer = SummaryWriter(self.folder, purge_step=self.step + 1 if options.resume else None)
        total = math.ceil(options.total_timesteps / options.rollout_steps) * options.rollout_steps
        self.bar = tqdm(total=total, initial=self.step, unit=" steps", dynamic_ncols=True, smoothing=0.1)
        self.began, self.first_step, self.saved_step = time.perf_counter(), self.step, self.step
        self.learning_sec = {}  # of the last two updates with so many threads
        self.unsaved = None  # why the last checkpoint could not be written

    def introduce(self, policy, options, num_ranks=1):
        """Say what is trained, and where."""
        size = sum(p.numel() for p in policy.parameters())
        how = options.sampler + " with overlap" * options.overlap
        workers = f"{options.num_envs} environments in {count_workers(options)} workers"
        workers += f" on each of {num_ranks} ranks" * (num_ranks > 1)
        self.say(f"{self.folder}: {how}, {workers}, {size:,} parameters on {next(policy.parameters()).device}")

    def say(self, text):
        """Print a line above the progress bar."""
        self.bar.write(text)

    def finish(self, policy, spec, options):
        """Evaluate what was learned. Raises OSError if it could not be saved."""
        self.bar.close()
        if options.eval_episodes:
            self.write_scalars(report_evaluation(policy, spec, options, self.folder), self.step)
        if self.unsaved:
            raise OSError(f"the last checkpoint could not be written: {self.unsaved}")

    def close(self):
        """End the progress bar's line and write the last events."""
        self.bar.close()
        with contextlib.suppress(OSError):  # said before
            if self.writer:
                self.writer.close()

    def save(self, policy, optimizer, collector, options):
        """Write the checkpoint."""
        self.write(policy, optimizer, [collector.snapshot()], options)

    def write(self, policy, optimizer, snapshots, options):
        """Write the checkpoint, with the snapshots of all ranks."""
        progress, self.unsaved = {"step": self.step, "recent": list(self.recent)}, None
        try:
            save_checkpoint(self.folder / "checkpoint.pt", policy, optimizer, snapshots, options, progress)
        except (OSError, RuntimeError) as error:  # torch.save raises either when a disk is full
            self.unsaved = str(error).splitlines()[0][:200]
            self.say(f"checkpoint of step {self.step} not written, the one before stays: {self.unsaved}")
        self.saved_step = self.step

    def write_scalars(self, scalars, step):
        """Add points to TensorBoard's curves; says so once if that fails (a full disk), and goes on without."""
        try:
            for tag, value in scalars.items() if self.writer else ():
                self.writer.add_scalar(tag, value, step)
        except OSError as error:
            self.say(f"TensorBoard's curves end at step {step}: {error}")
            self.writer = None

    def give_up(self, *state):
        """Write the checkpoint, and say how to go on from it."""
        self.save(*state)
        if not self.unsaved:
            self.say(f"stopped at step {self.step}; go on with: --resume {self.folder}")

    def log(self, step, scalars, results, metrics):
        """Count the steps, write scalars and the mean result of the last 100 episodes, move the progress bar."""
        self.step = step
        self.recent.extend(results)
        scalars["charts/SPS"] = (step - self.first_step) / (time.perf_counter() - self.began)
        shown = {}
        if self.recent:
            means = np.array(self.recent).mean(axis=0)
            scalars |= {"charts/episodic_return": means[0], "charts/episodic_length": means[1]}
            scalars |= {f"metrics/{name}": mean for name, mean in zip(metrics, means[2:])}
            shown = {"return": means[0]} | {name: mean for name, mean in zip(metrics, means[2:]) if name in SHOWN_METRICS}
        self.write_scalars(scalars, step)
        self.bar.total = max(self.bar.total, step)
        self.bar.set_postfix({name: f"{value:.3g}" for name, value in shown.items()}, refresh=False)
        self.bar.update(step - self.bar.n)


class Trace:
    """Timeline of a run in Chrome's trace event format, for ui.perfetto.dev. Every process appends its own spans to the
    same file, whole lines by one write each; all clocks are the one of perf_counter. Ends after TRACE_SPANS spans."""

    LANES = ("environments", "inference", "learner")

    def __init__(self, path):
        self.file, self.lines, self.left = open(path, "ab", buffering=0), [], TRACE_SPANS

    def begin(self):
        """Empty the file and name the lanes."""
        self.file.truncate(0)
        names = [{"ph": "M", "name": "process_name", "pid": i, "args": {"name": n}} for i, n in enumerate(self.LANES)]
        self.file.write(("[\n" + ",\n".join(map(json.dumps, names))).encode())
        return self

    def span(self, lane, thread, name, began_sec, duration_sec):
        """Something that took a while, in a lane's thread (environment, or process)."""
        place = f'"pid": {self.LANES.index(lane)}, "tid": {thread}'
        when = f'"ts": {1e6 * began_sec:.0f}, "dur": {1e6 * duration_sec:.0f}'
        self.lines.append(f',\n{{"ph": "X", "name": "{name}", {place}, {when}}}')
        if len(self.lines) >= 1000:
            self.flush()

    def flush(self):
        """Append what has been noted."""
        lines, self.lines = self.lines[: max(0, self.left)], []
        self.left -= len(lines)
        self.file.write("".join(lines).encode())

    def close(self):
        """Make the file valid JSON."""
        self.flush()
        self.file.write(b"\n]\n")
        self.file.close()


TRACE_SPANS = 100_000  # of each process; about 10 MB, and more than a viewer likes


def describe_rollout(rollout, records, collector, options, learning_sec, cycle_sec):
    """What to log of one cycle: where the time went, batch sizes, how uneven the environments and how old the data were."""
    complete = records[rollout.complete[records]]
    lag = collector.version - rollout.version[complete]
    steps_N = np.bincount(rollout.env[complete], minlength=rollout.num_envs)
    with collector.lock:
        spent = {name: getattr(rollout, name).item() for name in rollout.SPENT}
        for name in spent:
            getattr(rollout, name)[...] = 0
    rollout_sec = (spent["waiting_sec"] + spent["inference_sec"]) / options.num_inference_workers
    logs = {
        "time/waiting_share": spent["waiting_sec"] / options.num_inference_workers / cycle_sec,
        "time/inference_share": spent["inference_sec"] / options.num_inference_workers / cycle_sec,
        "time/learning_share": learning_sec / cycle_sec,
        "time/rollout_sec": rollout_sec,
        "time/env_step_ms": 1000 * spent["simulation_sec"] / max(1, spent["served"]),
        "ver/batch_size": spent["served"] / max(1, spent["batches"]),
        "ver/steps_per_env_min": steps_N.min(),
        "ver/steps_per_env_max": steps_N.max(),
        "ver/carried_share": rollout.carried / rollout.steps,
        "ver/policy_lag_mean": lag.mean(),
        "ver/policy_lag_max": lag.max(),
    }
    if collector.workers:
        logs["time/restarts"] = collector.workers.restarts.total
    if workers := count_workers(options):
        logs["time/worker_idle_share"] = max(0.0, 1 - spent["simulation_sec"] / max(rollout_sec, 1e-9) / workers)
    return logs


def episode_results(rollout, records):
    """Results of the episodes that ended in these records: lists of return, length, metrics."""
    last = records[rollout.complete[records] & (rollout.terminated | rollout.truncated)[records]]
    return rollout.result[last].tolist()


@torch.inference_mode()
def evaluate(policy, spec, options, frames=None):
    """Play --eval-episodes validation episodes and return their results: E x (return, length, metrics).

    Each environment plays its share of the episodes, so that short ones do not count more than long ones; for the same
    --num-envs and --eval-episodes these are the same episodes for every policy. `frames`, a list, collects pictures of one
    environment.
    """
    num_envs = 1 if frames is not None else min(options.num_envs, options.eval_episodes)
    num_workers = 0 if frames is not None else min(count_workers(options), num_envs)
    options = Options(**{field.name: getattr(options, field.name) for field in fields(Options)})  # of one rank alone
    options = replace(
        options, seed=0, num_envs=num_envs, num_workers=num_workers, sim_latency=0.0, sampler="ver", num_inference_workers=1
    )
    left_N = options.eval_episodes // num_envs + (np.arange(num_envs) < options.eval_episodes % num_envs)
    device, results = next(policy.parameters()).device, []
    transfer = Transfer(spec, num_envs)
    with torch.random.fork_rng(), contextlib.closing(start_workers(options, "val", spec, transfer, None, frames)) as workers:
        torch.manual_seed(options.seed)
        stop = StopSignal()  # never entered: signals end us at once
        collector = Collector(workers, transfer, policy, spec, options, device, stop)
        while len(results) < options.eval_episodes:
            await_requests(collector)
            rows = take_requests(collector, limit=num_envs)
            for row in rows[transfer.first[rows] & ~transfer.lost[rows] & (collector.open_slot_N[rows] >= 0)]:
                results.append(transfer.result[row].tolist())
                left_N[row] -= 1
            if len(rows := rows[left_N[rows] > 0]):
                act(policy, collector, rows, options.greedy)
    return np.array(results)


def act(policy, collector, rows, greedy):
    """Compute and send the actions of these rows without recording anything."""
    _, distribution, _, after_B = infer(policy, collector, rows)
    send_actions(collector, rows, distribution.mode if greedy else distribution.sample(), after_B)
    collector.open_slot_N[rows] = 0  # any but -1: an answer is awaited


def report_evaluation(policy, spec, options, folder):
    """Evaluate, print mean +- standard error of every result, and write the video if one was asked for. Returns the means,
    to log."""
    began = time.perf_counter()
    results = evaluate(policy, spec, options)
    names = ("return", "length", *spec.metrics)
    means, errors = results.mean(axis=0), results.std(axis=0, ddof=len(results) > 1) / math.sqrt(len(results))
    how = "greedy" if options.greedy else "sampled"
    line = ", ".join(f"{name} {mean:.3f} ± {error:.3f}" for name, mean, error in zip(names, means, errors))
    print(f"evaluation, {len(results)} {how} episodes in {time.perf_counter() - began:.0f} s: {line}")
    if options.capture_video:
        frames, path = [], folder / "evaluation.gif"
        evaluate(policy, spec, replace(options, eval_episodes=3), frames)
        try:
            write_gif(path, frames[:-1])  # the last one shows the reset after the third episode
            print(f"video: {path}")
        except OSError as error:
            print(f"video {path} not written: {error}")
    return {f"eval/{name}": mean for name, mean in zip(names, means)}


def write_gif(path, frames):
    """Write pictures (uint8, height x width x 3, of any sizes) as an animation, 10 a second."""
    from PIL import Image

    height, width = (max(frame.shape[axis] for frame in frames) for axis in (0, 1))
    padded = [np.pad(f, [(0, height - f.shape[0]), (0, width - f.shape[1]), (0, 0)], constant_values=255) for f in frames]
    first, *others = [Image.fromarray(frame) for frame in padded]
    first.save(path, save_all=True, append_images=others, duration=100, loop=0)


# ----------------------------------------------------------------------------------------------------------------------
# Train
# ----------------------------------------------------------------------------------------------------------------------


def learning_rate_at(step, options):
    """Cosine from --learning-rate to 0 (VER table A1)."""
    return options.learning_rate * 0.5 * (1 + math.cos(math.pi * min(1.0, step / options.total_timesteps)))


def keep_freed_memory():
    """Tell glibc not to give freed memory back to the kernel after every update: learning is a sixth faster on a CPU.

    The network's activations come and go with every mini-batch, and each return costs a page fault for every 4 KiB.
    """
    with contextlib.suppress(OSError, AttributeError):  # another C library: nothing to tell
        mallopt, trim_threshold, mmap_threshold = ctypes.CDLL(None).mallopt, -1, -3
        mallopt(mmap_threshold, 1 << 25)  # glibc's maximum
        mallopt(trim_threshold, 1 << 30)


def count_learner_threads(options, learning_sec, version):
    """CPU threads for this update. `learning_sec` says what the last two updates with so many threads took, of which the
    slower one may have been disturbed. Each number is tried again every 500 updates (the very first says nothing: it is
    always slow).

    >>> count_learner_threads(Options(), {1: [0.3, 0.3], min(4, count_cores()): [9.0, 0.2]}, 7) == min(4, count_cores())
    True
    """
    if options.learner_threads != "auto":
        return options.learner_threads
    choices = sorted({1, min(4, count_cores())})
    if version % 500 <= len(choices):
        return choices[version % 500 - 1]
    return min(choices, key=lambda threads: min(learning_sec.get(threads, [0.0])))


@contextlib.contextmanager
def learning_phase(run, optimizer, collector, options):
    """Around all learning of one update: sets the number of threads and the learning rate, takes the time. Yields what to
    log, as a dictionary to be added to."""
    began = time.perf_counter()
    threads = count_learner_threads(options, run.learning_sec, int(collector.version))
    torch.set_num_threads(threads)
    learning_rate = learning_rate_at(run.step, options)
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
    logs = {"charts/learning_rate": learning_rate}
    yield logs
    logs["time/learning_sec"] = learning_sec = time.perf_counter() - began
    run.learning_sec.setdefault(threads, deque(maxlen=2)).append(learning_sec)
    if collector.trace:
        collector.trace.span("learner", os.getpid(), "learning", began, learning_sec)


def update(run, policy, optimizer, source, collector, options):
    """One cycle: wait for a rollout and learn from it. Returns the steps it has, what to log, and its episodes' results."""
    began = time.perf_counter()
    rollout, records = next(source)
    if options.debug:
        check_collected(rollout, records, collector.version, options.rollout_steps)
    with learning_phase(run, optimizer, collector, options) as logs:
        logs |= compute_targets(policy, rollout, records, options)
        logs |= learn(policy, optimizer, rollout, records, options)
    logs |= describe_rollout(rollout, records, collector, options, logs["time/learning_sec"], time.perf_counter() - began)
    return options.rollout_steps, logs, episode_results(rollout, records)


def allocate(policy, spec, options, device):
    """All buffers: transfer rows, collector and rollouts, in shared memory if other processes serve requests."""
    transfer = Transfer(spec, options.num_envs)
    collector = Collector(None, transfer, policy, spec, options, device, StopSignal())
    kind = Trajectories if options.sampler == "async" else Rollout
    sizes = (spec, options.rollout_steps, options.num_envs, policy.state_shape, device)
    rollouts = [kind(*sizes) for _ in range(options.num_buffers)]
    if options.remote:
        for buffers in (transfer, collector, *rollouts):
            buffers.share()
    else:
        collector.rollout = rollouts[0]
    return collector, rollouts


@contextlib.contextmanager
def collection(policy, collector, rollouts, spec, options, starts):
    """Start all processes that collecting needs. Yields an iterator over (rollout, records to learn from), and a function
    that gives the weights to those who act; ends the processes."""
    with contextlib.ExitStack() as stack:
        trace = stack.enter_context(contextlib.closing(Trace(options.trace).begin())) if options.trace else None
        if count_workers(options) or not options.remote:
            workers = start_workers(options, "train", spec, collector.transfer, starts)
            collector.workers = stack.enter_context(contextlib.closing(workers))
        inference = None
        if options.remote:
            inference = InferenceWorkers(policy, rollouts, collector, spec, options, starts)
            stack.enter_context(contextlib.closing(inference))
        collector.trace = trace  # only now: other processes open the file themselves
        if inference is None:
            yield inline_rollouts(policy, rollouts, collector), collector.count_update
        elif options.sampler == "async":
            yield finished_trajectories(inference, rollouts[0]), inference.publish
        else:
            yield remote_rollouts(inference, rollouts, options.overlap), inference.publish


def run_updates(run, policy, optimizer, collector, rollouts, spec, options, snapshot, update=update):
    """Start the environments, collect and learn until --total-timesteps, and save; a signal or a failure ends it early."""
    if snapshot:
        collector.restore(snapshot)
    starts = snapshot and snapshot["environments"]
    with collector.stop:
        try:
            with collection(policy, collector, rollouts, spec, options, starts) as (source, publish):
                try:
                    while run.step < options.total_timesteps:
                        steps, logs, results = update(run, policy, optimizer, source, collector, options)
                        publish()  # counts the update; where other processes act, they get the weights
                        run.log(run.step + steps, logs, results, spec.metrics)
                        if collector.stop.save_wanted or run.step - run.saved_step >= options.checkpoint_interval:
                            collector.stop.save_wanted = False
                            run.save(policy, optimizer, collector, options)
                    collector.stop.check()
                    run.save(policy, optimizer, collector, options)
                except (Interrupted, FloatingPointError) as error:
                    # saved while processes still run: whoever sent the signal may be impatient
                    if isinstance(error, FloatingPointError):
                        collector.rollout = None  # it was learned from in part: go on without it
                    run.give_up(policy, optimizer, collector, options)
                    raise
        except EnvironmentFailure:  # when all processes have ended: one that died may have held the lock
            collector.lock = contextlib.nullcontext()
            collector.skip_episodes()
            run.give_up(policy, optimizer, collector, options)
            raise


def prepare(options, rank=0, num_ranks=1):
    """Everything that can be refused before a process starts: the environment's spec, policy and optimizer, progress and
    collector snapshot (None in a new run), collector and rollout buffers. Raises UserError."""
    spec, device = describe_env(options), choose_device(options)
    keep_freed_memory()
    torch.manual_seed(options.seed)
    policy = Policy(spec, options).to(device)
    optimizer = torch.optim.Adam(policy.parameters(), lr=options.learning_rate, eps=1e-5, fused=True)
    progress, snapshot = {"step": 0, "recent": []}, None
    if options.init_from:
        start_from(policy, options)
    if options.freeze_encoder:
        for encoder in policy.image_encoders():
            encoder.requires_grad_(False)
    if options.resume:
        progress, snapshot = load_run(policy, optimizer, options, rank, num_ranks)
    return spec, policy, optimizer, progress, snapshot, *allocate(policy, spec, options, device)


def train(options):
    """Train to the end, evaluate, return the run folder."""
    spec, policy, optimizer, progress, snapshot, collector, rollouts = prepare(options)
    with contextlib.closing(Run(options, progress)) as run:
        run.introduce(policy, options)
        run_updates(run, policy, optimizer, collector, rollouts, spec, options, snapshot)
        run.finish(policy, spec, options)
    return run.folder


def parse_options(argv, kind=Options):
    """Options from the command line; with --resume or --checkpoint, those of that run where none is given here."""
    given = tyro.cli(kind, args=argv)
    path = given.checkpoint or (given.resume and Path(given.resume) / "checkpoint.pt")
    if not path:
        return given
    known = {field.name for field in fields(kind)}
    saved = {name: value for name, value in load_checkpoint(path)["options"].items() if name in known}
    saved |= {"resume": None, "checkpoint": None, "trace": None, "init_from": None, "reset_critic": False}
    saved["freeze_encoder"] &= given.checkpoint is None
    options = tyro.cli(kind, args=argv, default=kind(**saved))
    for name, value in asdict(options).items():
        if value != saved.get(name, value) and name not in ("resume", "checkpoint"):
            print(f"--{name.replace('_', '-')}: {value} (the checkpoint has {saved[name]})")
    return options


def main(argv=None, kind=Options, train=train):
    """Command line. Exit status 0: done, 1: failed while running, 2: refused, 130 or 143: stopped by a signal."""
    program = Path(sys.modules[kind.__module__].__file__).name
    try:
        options = parse_options(argv, kind)
        validate_options(options)
        if options.check_habitat:
            return check_habitat(options)
        options = choose_simulator(options)
        if not options.checkpoint:
            train(options)
            return 0
        spec = describe_env(options)
        policy = Policy(spec, options).to(choose_device(options))
        load_policy(policy, load_checkpoint(options.checkpoint), options.checkpoint)
        report_evaluation(policy, spec, options, Path(options.checkpoint).parent)
        return 0
    except UserError as error:
        print(f"{program}: {error}", file=sys.stderr)
        return 2
    except (EnvironmentFailure, FloatingPointError, OSError) as error:
        print(f"{program}: {error}", file=sys.stderr)
        return 1
    except (MemoryError, torch.OutOfMemoryError) as error:
        reason = str(error).splitlines()[0] if str(error) else "out of memory"
        advice = "more --num-minibatches, or less of --num-envs, --num-steps, --image-size and --hidden-size"
        print(f"{program}: {reason}: give {advice}", file=sys.stderr)
        return 1
    except Interrupted as error:
        return 128 + error.args[0]
    except KeyboardInterrupt:  # outside of training
        return 128 + signal.SIGINT


if __name__ == "__main__":
    sys.exit(main())
