"""VER on many GPUs: decentralized distributed PPO (DD-PPO, Wijmans et al. 2020) with the optimal
preemption of VER.

Every rank is a whole ver_ppo.py: it collects with its own N environments and learns on its own GPU.
To learn, ranks average their gradients, so that they have the same weights after every mini-batch.
Such an update waits for the slowest rank. So the rollouts of all ranks end when waiting longer
would cost more than it brings: when all ranks together have S* complete steps. A rank that has
fewer than its S = T x N steps by then is *preempted*. It fills up with its newest earlier steps.

    torchrun --nproc-per-node 8 ver_multigpu.py --env-id pointnav     eight ranks, one GPU each
    torchrun --nnodes 4 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29500 \\
        ver_multigpu.py ...                                           on each of four nodes

One update of R ranks. `[...]` marks collective operations: all ranks must call them in the same
order, and equally often:

    rank 0   collect ======| wait      [agree] fill up, learn [average] ... [gather]  decide
    rank 1   collect ==========| wait  [agree] fill up, learn [average] ... [gather]  decide
    rank 2   collect ================| [agree] fill up, learn [average] ... [gather]  decide
                                     ^ S* steps of all ranks together are complete: a rank that is
                                       not done is preempted

All ranks add their steps to one counter in a key-value store, and read it at short intervals. (With
--preemption threshold, the counter holds the number of ranks that are done.) All ranks compute the
next rollout's S* from the same numbers, so no rank has to be told. Shapes as in ver_ppo.py; R
ranks, G groups (ranks or single environments, see `optimal_preemption`).
"""

import contextlib
import io
import math
import os
import signal
import sys
import time
import uuid
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Literal

import ver_ppo

# isort: split
# ver_ppo came first, because it sets variables that torch reads when it is imported
import numpy as np
import torch
import torch.distributed as dist

# Not used here, but it must be imported before there is a process group. If a group exists by then,
# the functions of this module keep it as a default argument. The first optimizer would import it
# too late: then the group's threads outlive `leave_group`, and can abort the process at its end
import torch.distributed.nn

from ver_ppo import EnvironmentFailure, Interrupted, UserError

# ---------------------------------------------------------------------------------------- Options


@dataclass(frozen=True)
class Options(ver_ppo.Options):
    """Train with VER on many GPUs (or CPU processes), with averaged gradients (DD-PPO). Start with
    torchrun. To evaluate a checkpoint, use ver_ppo.py. --num-envs and all sizes of a rollout are
    those of one rank. --total-timesteps counts the steps of all ranks."""

    # when the rollouts of all ranks end. optimal: when that gives the most steps per second,
    # learning included (VER); threshold: when --sync-frac of the ranks are done; a rank with less
    # than a quarter of its steps goes on until it has a quarter (DD-PPO); none: when all are done
    preemption: Literal["optimal", "threshold", "none"] = "optimal"
    sync_frac: float = 0.6  # share of the ranks that must be done (only --preemption threshold)
    # give up after waiting this many seconds for another rank; choose more than the longest rollout
    # can take, plus --env-timeout
    rank_timeout: float = 1800.0


# -------------------------------------------------------------------------- What ranks do together

class Ranks:
    """The processes that torchrun started, and their collective operations. Without torchrun, there
    is this process alone.

    All ranks must call the same collectives in the same order. A collective that fails (a rank has
    died), or waits longer than `timeout_sec`, raises RuntimeError. Objects travel by gloo. So do
    tensors, unless each rank has a GPU of its own: then they travel by NCCL.
    """

    def __init__(self, timeout_sec):
        timeout = timedelta(seconds=timeout_sec)
        self.store = dist.HashStore()
        self.rank = 0
        self.size = 1
        if "WORLD_SIZE" in os.environ:
            try:
                self.store, self.rank, self.size = next(dist.rendezvous("env://", timeout=timeout))
                if self.rank >= self.size:
                    raise ValueError(f"RANK {self.rank} is not below WORLD_SIZE")
            except (ValueError, RuntimeError) as error:  # torchrun's variables are missing or wrong
                raise UserError(f"start with torchrun, or without WORLD_SIZE: {error}") from None
        name = name_start(self.store, self.rank, self.size, timeout_sec)
        self.store = dist.PrefixStore(name, self.store)
        # without this, an error of NCCL would end the process without a message
        os.environ.setdefault("TORCH_NCCL_BLOCKING_WAIT", "1")
        dist.init_process_group(
            # NCCL refuses ranks that share a GPU
            "cpu:gloo,cuda:nccl"
            if int(os.environ.get("LOCAL_WORLD_SIZE", "1")) <= torch.cuda.device_count()
            else "gloo",
            timeout=timeout,
            store=self.store,
            rank=self.rank,
            world_size=self.size,
        )

    def average(self, tensors):
        """Average these tensors over all ranks, in place, in one message (DD-PPO section 3). All
        ranks weigh the same. On CPUs this is as fast as DistributedDataParallel, although that one
        sends gradients already during the backward pass."""
        flat = torch.cat([tensor.flatten() for tensor in tensors])
        dist.all_reduce(flat)
        parts = (flat / self.size).split([tensor.numel() for tensor in tensors])
        for tensor, part in zip(tensors, parts):
            tensor.copy_(part.view_as(tensor))

    def broadcast(self, tensors):
        """Overwrite tensors with those of rank 0."""
        for tensor in tensors:
            dist.broadcast(tensor.data, 0)

    def gather(self, thing):
        """The `thing` of every rank, in order of rank."""
        things = [None] * self.size
        dist.all_gather_object(things, thing)
        return things

    def agree(self, failure):
        """If any rank has a failure, all ranks raise it. If several have one, all raise that of the
        lowest rank."""
        for known in self.gather(failure):
            if known:
                raise known


def name_start(store, rank, size, timeout_sec):
    """Agree on a new name for this start of all ranks. The store may hold keys of an earlier start
    (torchrun --max-restarts, or a second training in a process).

    Each rank r except 0 writes the key `rank r`, with a random id of its own, again and again. Rank
    0 deletes all these keys, which may be old, and waits until they are there again. Then it
    answers under each id, with the name of this start.
    """
    own = uuid.uuid4().hex
    others = range(1, size)
    if rank == 0:
        for other in others:
            store.delete_key(f"rank {other}")
        for other in others:
            caller = store.get(f"rank {other}").decode()  # waits until it is there again
            store.set(f"answer to {caller}", own)
        return own
    until = time.monotonic() + timeout_sec
    while not store.check([f"answer to {own}"]) and time.monotonic() < until:
        store.set(f"rank {rank}", own)
        time.sleep(0.05 + size / 1000)  # all ranks together, at most 1,000 times a second
    return store.get(f"answer to {own}").decode()


def leave_group():
    """Leave the process group. A second call does nothing."""
    if dist.is_initialized():
        dist.destroy_process_group()


# ------------------------------------------------------------------------------------- Preemption


def optimal_preemption(step_sec_RN, num_steps, variable, learning_sec):
    """When to end the rollouts of all ranks (VER section 2.3, equation 1). As in the paper, S here
    is a number of steps of all ranks together, Time(S) the time until they are complete, and LT is
    `learning_sec`. S* is the S with the largest S / (Time(S) + LT). Returns S* and Time(S*).

    `step_sec_RN`: every environment's mean seconds per step, inference included. If rollouts are
    `variable`, a *group* is a rank, and gives T x N steps. Otherwise a group is one environment,
    and gives T steps. A group gives steps at a constant rate until it is done.

    Between two times at which groups are done, the number of steps grows linearly. There, the
    quotient S / (Time(S) + LT) either only rises or only falls. So the best time is one at which a
    group is done.

    Here the third rank is not worth waiting for:

    >>> optimal_preemption(np.array([[0.01], [0.01], [0.1]]), 100, True, learning_sec=0.5)
    (210, 1.0)
    """
    rate_RN = 1 / step_sec_RN
    if variable:
        most = num_steps * rate_RN.shape[1]
        rate_G = rate_RN.sum(axis=1)
    else:
        most = num_steps
        rate_G = rate_RN.ravel()
    rate_G = np.sort(rate_G)[::-1]  # the fastest is done first
    done_sec_G = most / rate_G
    others_rate_G = np.maximum(0.0, rate_G.sum() - np.cumsum(rate_G))  # not done by then
    steps_G = most * np.arange(1, len(rate_G) + 1) + done_sec_G * others_rate_G
    best = (steps_G / (done_sec_G + learning_sec)).argmax()
    return int(steps_G[best] + 1e-6), float(done_sec_G[best])


def threshold_preemption(num_ranks, sync_frac):
    """How many ranks must be done before the others are preempted (DD-PPO section 3).

    >>> threshold_preemption(8, sync_frac=0.6)
    5
    """
    return math.ceil(num_ranks * sync_frac - 1e-9)


def step_seconds(rollout, quota, known_N):
    """Every environment's mean seconds per step, until it had given its `quota` or the rollout
    ended.

    With `ver`, hardly any environment reaches its quota. Its first step may have begun before this
    rollout, so the result is too small. Its last step may still be in flight, so the result is too
    large. With many steps these errors nearly cancel. With few steps, there are two corrections.
    First, an environment's time is at least the sum of its simulator's own step times. Second, if
    it gave no step, its seconds per step are at least the last known value (`known_N`), and at
    least the length of this rollout (`mean_seconds`).
    """
    steps = rollout.complete
    given_N = np.bincount(steps["env"], minlength=rollout.num_envs)
    last_N = np.zeros(rollout.num_envs)
    np.maximum.at(last_N, steps["env"], steps["began_at"] + steps["step_sec"])
    spent_N = np.where(given_N >= quota, last_N, rollout.ended_at) - rollout.started_at
    simulated_N = np.bincount(steps["env"], steps["step_sec"], minlength=rollout.num_envs)
    return mean_seconds(np.maximum(spent_N, simulated_N), given_N, known_N)


def mean_seconds(spent_N, given_N, known_N):
    """Seconds per step of environments that gave this many steps in this time. Environments that
    gave none get the second correction of `step_seconds`. Never 0, since rates are computed from
    it."""
    mean_N = spent_N / np.maximum(given_N, 1)
    step_sec_N = np.where(given_N > 0, mean_N, np.maximum(known_N, spent_N))
    return np.maximum(step_sec_N, 1e-9)


def fill_up(learned, rollout):
    """Drop the oldest of the S steps that this rank learned from before, and append a rollout,
    preempted or not, so that there are S again (VER section 2.3).

    The older steps keep their advantages, returns and weights. The older steps of an environment
    follow each other without a gap, so they form one segment. The new steps form a second one. So
    the network starts them from the state with which they were collected, and not from a state that
    it computes again through older steps. The advantages are computed already, so segments are now
    used only to find sequences.
    """
    stale = learned.capacity - rollout.rows
    # (NumPy copies first where both slices overlap)
    learned.records[:stale] = learned.records[rollout.rows :]
    learned.records[stale:] = rollout.complete
    learned["segment"][:stale] = learned.num_envs + learned["env"][:stale]


# ------------------------------------------------------------------------------------------ Train

NO_LIMIT = 1 << 40  # more than any counter reaches
PATIENCE = 2.0  # a rollout ends after this multiple of the predicted seconds
STOP = 1 << 50  # a rank that cannot continue adds this: more than any limit, so all rollouts end
SEED_OF_RANK = 4


class RankRun(ver_ppo.Run):
    """The run of all ranks: rank 0 writes the folder. All ranks add to one counter: of complete
    steps (optimal), or of ranks that are done (threshold). `look` reads the counter. When it has
    reached `limit`, or the time `latest` has passed, each rollout with `min_steps` steps ends."""

    def __init__(self, options):
        self.ranks = Ranks(options.rank_timeout)
        self.writes = self.ranks.rank == 0
        self.learned = None  # with preemption: the S steps that were learned from last, in order
        self.step_sec_N = np.zeros(options.num_envs)  # of this rank's environments, last known
        quarter = max(1, options.rollout_steps // 4)
        # a rollout with fewer steps is not preempted. (0 steps would have no mean advantage.)
        self.min_steps = quarter if options.preemption == "threshold" else 1
        self.limit = NO_LIMIT
        self.predicted_sec = 0.0
        failure = None
        try:
            # preemption needs the usual collector, in this process: it asks `look`
            if options.preemption != "none" and not (
                self.preemptible and self.collector_class is ver_ppo.Collector
            ):
                ver_ppo.refuse(
                    options,
                    "preemption",
                    "must be none with an extension that collects in its own way",
                )
            super().__init__(options)
        except (UserError, OSError) as error:
            failure = error
        self.ranks.agree(failure)
        if len(set(self.ranks.gather(self.step))) > 1:
            raise UserError(f"ranks have read different checkpoints of {options.resume}: try again")
        self.ranks.broadcast(self.policy.state_dict().values())
        # All ranks have the same weights now. From here on, each needs a seed of its own, for its
        # environments and the sampling of actions
        if self.ranks.rank:
            self.options = replace(
                self.options,
                seed=ver_ppo.derive_seed(SEED_OF_RANK, options.seed, self.ranks.rank),
            )

    def average(self, tensors):
        """As Ranks.average. A rank that got a signal says so here, and all leave the update before
        the next optimizer step: torchrun kills those that have not ended after 30 s. A checkpoint
        then holds weights in the middle of an update, and the counters from before this update."""
        stops = tensors[0].new_tensor([float(self.signal is not None)])
        self.ranks.average([*tensors, stops])
        if stops.item():
            self.savable = True  # between two optimizer steps, the weights are whole
            raise Interrupted(self.signal or signal.SIGTERM)

    def look(self, rows):
        """As Run.look. Now and then, look at the counter of all ranks."""
        if time.monotonic() >= self.next_look:
            self.next_look = time.monotonic() + self.look_sec
            self.count(rows)
        return super().look(rows)

    def enough(self, rows):
        """Whether this rank is preempted, got a signal, or another rank cannot continue."""
        return self.signal is not None or self.preempted

    def count(self, rows, done=False):
        """Add to the counter of all ranks, and read it. With `optimal`, add the steps since the
        last time. Otherwise add 1 when this rank is done, and until then 0. With `none` there is no
        limit, and the counter only says that a rank has stopped."""
        if self.options.preemption == "optimal":
            news = rows - self.counted
            self.counted = rows
        else:
            news = int(done)
        total = self.ranks.store.add(f"rollout {self.version}", news)
        due = total >= self.limit or time.monotonic() > self.latest
        self.preempted = total >= STOP or (due and rows >= self.min_steps)

    def collect(self):
        """This rank's rollout, when all ranks have one. Raises Interrupted, EnvironmentFailure or
        OSError if any rank did."""
        self.counted = 0
        self.preempted = False
        self.next_look = 0.0
        # all ranks together look at the counter at most 20,000 times a second
        self.look_sec = max(0.005, self.ranks.size / 20_000)
        # if another rank stalls (it loads a scene, say), the others do not wait for S* steps
        self.latest = time.monotonic() + (PATIENCE * self.predicted_sec or math.inf)
        failure = None
        try:
            rollout = super().collect()
            self.count(rollout.rows, done=True)
        except (Interrupted, EnvironmentFailure, OSError) as error:
            failure = error
            self.ranks.store.add(f"rollout {self.version}", STOP)
        self.ranks.agree(failure)
        self.learning_at = time.perf_counter()
        return rollout

    def advantages(self, rollout):
        """As Run.advantages. With preemption, the steps to learn from are filled up to S."""
        super().advantages(rollout)
        if self.options.preemption == "none":
            return rollout
        if self.learned is None:  # the first rollout has S steps: it has no limit
            self.learned = ver_ppo.Rollout(
                self.spec, rollout.capacity, rollout.num_envs, self.policy.state_shape
            )
            self.learned.rows = rollout.capacity
        fill_up(self.learned, rollout)
        return self.learned

    def update(self, rollout):
        """As Run.update. Then every rank takes the buffers of rank 0."""
        logs = super().update(rollout)
        self.ranks.broadcast(self.policy.buffers())
        return logs

    def log(self, rollout, logs):
        """As Run.log. Raises OSError on all ranks if rank 0 cannot write."""
        failure = None
        try:
            super().log(rollout, logs)
        except OSError as error:
            failure = error
        self.ranks.agree(failure)

    def combine(self, rollout, logs):
        """Steps, logs and episodes of all ranks. Then all ranks make the same decision: when the
        next rollout ends."""
        options = self.options
        own = super().combine(rollout, logs)
        self.step_sec_N = step_seconds(rollout, options.quota, self.step_sec_N)
        parts = self.ranks.gather((*own, self.step_sec_N))
        if self.ranks.rank == 0:
            self.ranks.store.delete_key(f"rollout {self.version}")  # all have left it
        steps_R, logs_R, episodes_R, step_sec_RN = zip(*parts)
        logs = reduce_logs(logs_R)
        logs["ranks/rollout_sec"] = max(part["time/rollout_sec"] for part in logs_R)
        logs["ranks/predicted_sec"] = self.predicted_sec
        if options.preemption != "none":
            logs["ranks/stale_share"] = 1 - sum(steps_R) / options.rollout_steps / len(steps_R)
        decision = self.decide(np.array(step_sec_RN), logs["time/learning_sec"])
        self.limit, self.predicted_sec = decision
        # Interleave the ranks' episodes, as if each rank's had ended evenly over the rollout
        placed = [(k / len(own), each) for own in episodes_R for k, each in enumerate(own)]
        return sum(steps_R), logs, [each for _, each in sorted(placed, key=lambda pair: pair[0])]

    def decide(self, step_sec_RN, learning_sec):
        """When the next rollout ends: the value of the counter, and the predicted seconds."""
        options = self.options
        if options.preemption == "threshold":
            return threshold_preemption(self.ranks.size, options.sync_frac), 0.0
        # The first rollout has no limit. Its times include the start of the environments and cannot
        # be used to predict, so the second rollout has no limit either. (`Run.log` counts the steps
        # after this: if `step` is still `initial_step`, only the first rollout has been made.)
        predictable = self.step > self.initial_step and self.ranks.size > 1
        if options.preemption == "optimal" and predictable:
            return optimal_preemption(
                step_sec_RN, options.num_steps, options.sampler == "ver", learning_sec
            )
        return NO_LIMIT, 0.0

    def evaluate(self):
        """All ranks leave the process group. Then rank 0 evaluates alone."""
        leave_group()
        super().evaluate()


def reduce_logs(logs_R):
    """The logs of all ranks as one. Of names that end in _min, the smallest value; of names that
    end in _max, the largest; of all others, the mean."""
    reduce = {"_min": min, "_max": max}
    logs = {}
    for name in logs_R[0]:
        logs[name] = reduce.get(name[-4:], np.mean)([part[name] for part in logs_R])
    return logs


def launch(options, run_class=RankRun):
    """As ver_ppo.launch, for one of the ranks that torchrun has started."""
    if not 0 < options.sync_frac <= 1:
        ver_ppo.refuse(options, "sync_frac", "must be above 0 and at most 1")
    if not 0 < options.rank_timeout < math.inf:
        ver_ppo.refuse(options, "rank_timeout", "must be a positive number")
    try:
        return ver_ppo.launch(options, run_class)
    finally:
        leave_group()


def main(argv=None, kind=Options, launch=launch):
    """Command line, as ver_ppo.main. On each machine, only the first rank prints. Workers and
    signal handlers of all ranks print, too."""
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    if torch.cuda.is_available():
        # "--device cuda" is this one. With some options of srun, a rank sees only its own GPU
        torch.cuda.set_device(local_rank % torch.cuda.device_count())
    out = io.StringIO() if local_rank else sys.stdout
    err = io.StringIO() if local_rank else sys.stderr
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        return ver_ppo.main(argv, kind, launch)


if __name__ == "__main__":
    from ver_multigpu import main  # as in ver_ppo.py

    sys.exit(main())
