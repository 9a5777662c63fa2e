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
import functools
import io
import math
import os
import signal
import sys
import time
import uuid
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Literal

os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # as in ver_ppo.py, before torch is imported

import numpy as np
import torch
import torch.distributed as dist

import ver_ppo
from ver_ppo import Collector, EnvironmentFailure, Interrupted, RunFolder, UserError

# ---------------------------------------------------------------------------------------- Options


@dataclass(frozen=True)
class Options(ver_ppo.Options):
    """Train with VER on each of many GPUs (or CPU processes) and average their gradients (DD-PPO).
    Start with torchrun. --num-envs and all sizes of a rollout are those of one rank.
    --total-timesteps counts the steps of all ranks."""

    # when the rollouts of all ranks end. optimal: when that gives the most steps per second,
    # learning included (VER); threshold: when --sync-frac of the ranks are done and each of the
    # others has at least a quarter of its steps (DD-PPO); none: when all ranks are done
    preemption: Literal["optimal", "threshold", "none"] = "optimal"
    sync_frac: float = 0.6  # share of the ranks that must be done (only --preemption threshold)
    # give up after waiting this many seconds for another rank; choose more than the longest rollout
    # can take, plus --env-timeout
    rank_timeout: float = 1800.0

    def __post_init__(self):
        super().__post_init__()
        if not 0 < self.sync_frac <= 1:
            ver_ppo.refuse(self, "sync_frac", "must be above 0 and at most 1")
        if not 0 < self.rank_timeout < math.inf:
            ver_ppo.refuse(self, "rank_timeout", "must be a positive number")
        if self.checkpoint:
            ver_ppo.refuse(self, "checkpoint", "is evaluated by ver_ppo.py")


def local_gpu():
    """Number of this rank's GPU. A rank usually sees all GPUs of its machine. With some options of
    srun it sees only its own; then the number is 0."""
    return int(os.environ.get("LOCAL_RANK", "0")) % max(1, torch.cuda.device_count())


class RankFailure(Exception):
    """Another rank has died or is silent; exit status 1."""


# -------------------------------------------------------------------------- What ranks do together


class Ranks:
    """The processes that torchrun started, and their collective operations. Without torchrun, there
    is this process alone.

    All ranks must call the same collectives in the same order. A collective that fails (a rank has
    died), or waits longer than --rank-timeout, raises RankFailure. Objects travel by gloo, tensors
    on GPUs by NCCL.
    """

    def __init__(self, timeout_sec):
        needed = "RANK", "MASTER_ADDR", "MASTER_PORT"
        missing = [name for name in needed if name not in os.environ]
        if "WORLD_SIZE" in os.environ and missing:
            advice = "start with torchrun, or give all that torchrun gives"
            raise UserError(f"WORLD_SIZE is set, but not {', '.join(missing)}: {advice}")
        launchers = "SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"
        copies = max(int(os.environ.get(name, "1")) for name in launchers)
        if copies > 1 and "WORLD_SIZE" not in os.environ:
            advice = "use it to start torchrun instead, once on each machine"
            raise UserError(f"srun or mpirun has started {copies} copies of one run: {advice}")
        self.rank = int(os.environ.get("RANK", "0"))
        self.size = int(os.environ.get("WORLD_SIZE", "1"))
        if not self.rank < self.size:
            both = f"RANK is {self.rank}, and WORLD_SIZE {self.size}"
            raise UserError(f"{both}: start with torchrun, or unset both")
        self.timeout_sec = timeout_sec
        self.store = self.call(open_store, timeout_sec)
        self.start = self.call(agree_on_start, self.store, self.rank, self.size, timeout_sec)
        # without this, an error of NCCL would end the process without a message
        os.environ.setdefault("TORCH_NCCL_BLOCKING_WAIT", "1")
        self.call(
            dist.init_process_group,
            "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo",
            store=dist.PrefixStore(f"start {self.start}", self.store),
            rank=self.rank,
            world_size=self.size,
            timeout=timedelta(seconds=timeout_sec),
        )

    def call(self, function, *args, **more):
        """function(*args, **more), which waits for other ranks."""
        try:
            return function(*args, **more)
        except RuntimeError as error:
            silent = f"been silent for {self.timeout_sec:.0f} s (--rank-timeout)"
            reason = str(error).partition("\n")[0][:200]
            message = f"rank {self.rank}: another rank has died, or {silent}: {reason}"
            raise RankFailure(message) from None

    def average(self, tensors):
        """Average these tensors over all ranks, in place, in one message (DD-PPO section 3). All
        ranks weigh the same. On CPUs this is as fast as DistributedDataParallel, although that one
        sends gradients already during the backward pass."""
        flat = torch.cat([tensor.flatten() for tensor in tensors])
        self.call(dist.all_reduce, flat)
        parts = (flat / self.size).split([tensor.numel() for tensor in tensors])
        for tensor, part in zip(tensors, parts):
            tensor.copy_(part.view_as(tensor))

    def broadcast(self, tensor):
        """Overwrite a tensor with the tensor of rank 0."""
        self.call(dist.broadcast, tensor.data, 0)

    def gather(self, thing):
        """The `thing` of every rank, in order of rank."""
        things = [None] * self.size
        self.call(dist.all_gather_object, things, thing)
        return things

    def agree(self, failure):
        """If any rank has a failure, all ranks raise it. If several have one, all raise that of the
        lowest rank."""
        for known in self.gather(failure):
            if known:
                raise known

    def add(self, version, more):
        """Add to the counter of a rollout, named by its policy's version, and return it. All ranks
        see it at any time: this is not a collective."""
        return self.call(self.store.add, self.counter(version), more)

    def counter(self, version):
        """The key of a rollout's counter in the store."""
        return f"start {self.start} rollout {version}"

    def forget(self, version):
        """Delete the counter of a rollout that all ranks have left."""
        if self.rank == 0:
            self.call(self.store.delete_key, self.counter(version))

    def close(self):
        """Leave the process group. A second call does nothing."""
        if not dist.is_initialized():
            return
        dist.destroy_process_group()
        # gloo's threads may still hold tensors. If one frees them while Python shuts down, the
        # process aborts
        time.sleep(0.1)


def open_store(timeout_sec):
    """The key-value store of torchrun's agent, or of rank 0 if someone else started the ranks."""
    if "WORLD_SIZE" not in os.environ:
        return dist.HashStore()
    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    is_master = os.environ["RANK"] == "0" and not agent
    return connect(os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"], is_master, timeout_sec)


@functools.cache  # a process that trains several times (notebooks/extensions) connects once
def connect(host, port, is_master, timeout_sec):
    """A connection to the store at this address; with `is_master`, the store itself."""
    timeout = timedelta(seconds=timeout_sec)
    return dist.TCPStore(
        host, int(port), is_master=is_master, wait_for_workers=False, timeout=timeout
    )


def agree_on_start(store, rank, size, timeout_sec):
    """A name for this start of all ranks. With --max-restarts the store outlives the ranks, and
    still holds keys of a start that died. Each rank r writes the key `rank r`, with a random id of
    its own, again and again. Rank 0 deletes this key, which may be old, and waits until it is there
    again: then rank r is alive. Rank 0 answers under that id, with the name of this start."""
    own = uuid.uuid4().hex
    until = time.monotonic() + timeout_sec
    if rank == 0:
        for other in range(1, size):
            store.delete_key(f"rank {other}")
            caller = store.get(f"rank {other}").decode()  # waits until it is there again
            store.set(f"answer to {caller}", own)
        return own
    while not store.check([f"answer to {own}"]) and time.monotonic() < until:
        store.set(f"rank {rank}", own)
        time.sleep(0.05 + size / 1000)  # all ranks together, at most 1,000 times a second
    return store.get(f"answer to {own}").decode()


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
    rollout: this makes the result too small. Its last step may be in flight at the rollout's end:
    this makes the result too large. With many steps these two errors nearly cancel. With few steps
    the result can be too small, so there are two corrections. First, an environment's time is at
    least the sum of its simulator's own step times. Second, if it gave no step, its seconds per
    step are at least the last known value (`known_N`), and at least the length of this rollout
    (`mean_seconds`).
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
    learned.copy(np.arange(stale), learned, np.arange(rollout.rows, learned.capacity))
    learned.copy(np.arange(stale, learned.capacity), rollout, np.arange(rollout.rows))
    learned["segment"][:stale] = learned.num_envs + learned["env"][:stale]


# ------------------------------------------------------------------------------------------ Train

NO_LIMIT = 1 << 40  # more than any counter reaches
PATIENCE = 2.0  # a rollout ends after this multiple of the predicted seconds
STOP = 1 << 50  # a rank that cannot continue adds this: more than any limit, so all rollouts end
FOLDER_KEY = "run folder"
SEED_OF_RANK = 4


class RankRun(ver_ppo.Run):
    """The run of all ranks: rank 0 writes the folder. All ranks add to one counter: of complete
    steps (optimal), or of ranks that are done (threshold). `enough` reads the counter. When it has
    reached `limit`, all rollouts end, full or not."""

    # the ranks raise these at the same place; OSError is not among them, because rank 0 alone may
    # raise it, when it writes TensorBoard's curves
    exceptions_that_save = Interrupted, EnvironmentFailure, FloatingPointError

    def __init__(self, options):
        self.ranks = Ranks(options.rank_timeout)
        self.learned = None  # with preemption: the S steps that were learned from last, in order
        self.step_sec_N = np.zeros(options.num_envs)  # of this rank's environments, last known
        quarter = max(1, options.rollout_steps // 4)
        # a rollout with fewer steps is not preempted: 0 steps would have no mean advantage
        self.min_steps = quarter if options.preemption == "threshold" else 1
        # nobody knows how long the first rollout takes: look at the counter as if it were 0.5 s
        self.begin_rollout(limit=NO_LIMIT, predicted_sec=0.0, last_rollout_sec=0.5)
        try:
            self.begin_together(options)  # calls Run.__init__
        except BaseException:
            self.close()
            raise
        # All ranks have the same weights now. From here on, each needs a seed of its own, for its
        # environments and the sampling of actions
        if self.ranks.rank:
            seed = ver_ppo.derive_seed(SEED_OF_RANK, options.seed, self.ranks.rank)
            self.options = replace(self.options, seed=seed)

    def begin_together(self, options):
        """As Run.__init__, with the weights of rank 0. If one rank refuses its options, all ranks
        do. Raises UserError."""
        failure = None
        try:
            check_gpus(self.ranks, options)  # the ranks agree in there: all raise the same
            # preemption needs the usual collector, in this process: it asks `enough`
            usual = type(self).rollouts is ver_ppo.Run.rollouts
            usual = usual and self.collector_class is Collector
            if options.preemption != "none" and not usual:
                advice = "must be none with an extension that collects in its own way"
                ver_ppo.refuse(options, "preemption", advice)
            super().__init__(options)
        except UserError as error:
            failure = error
        self.ranks.agree(failure)
        begin_alike(self.ranks, self)

    def open_folder(self):
        """Rank 0 makes the folder. The RunFolder of other ranks writes and prints nothing."""
        if self.ranks.rank:
            return RunFolder(self.options, self.step, silent=True)
        folder = super().open_folder()
        # where to continue if torchrun starts the ranks again
        self.ranks.store.set(FOLDER_KEY, str(folder.path))
        return folder

    def close(self):
        super().close()
        self.ranks.close()

    def begin_rollout(self, limit, predicted_sec, last_rollout_sec):
        """Start to count from 0. A rank reads the counter about 100 times in a rollout, but at most
        every 5 ms and at least once a second."""
        self.limit = limit
        self.predicted_sec = predicted_sec
        self.latest = math.inf  # when the rollout ends at the latest (time.monotonic)
        self.preempted = False
        self.other_stopped = False
        self.counted = 0
        self.next_look = 0.0
        often_sec = max(0.005, self.ranks.size / 20_000)  # all together, 20,000 times a second
        self.look_sec = min(1.0, max(often_sec, last_rollout_sec / 100))

    def note_signal(self, number, _frame):
        # torchrun may pass on a signal that has come already: a second one changes nothing
        self.signal = number

    def average(self, tensors):
        """As Ranks.average. A rank that got a signal says so here, and all leave the update before
        the next optimizer step: torchrun kills those that have not ended after 30 s. A checkpoint
        then holds weights in the middle of an update, and the counters from before this update."""
        stops = tensors[0].new_tensor([float(self.signal is not None)])
        self.ranks.average([*tensors, stops])
        if stops.item():
            raise Interrupted(self.signal or signal.SIGTERM)

    def enough(self, rows=0):
        """Whether this rank is preempted, got a signal, or another rank cannot continue."""
        if time.monotonic() >= self.next_look:
            self.next_look = time.monotonic() + self.look_sec
            self.count(rows)
        stopped = super().enough()  # without `rows`: the progress bar counts the steps of all ranks
        return stopped or self.preempted or self.other_stopped

    def count(self, rows, done=False):
        """Add to the counter of all ranks, and read it. With `optimal`, add the steps since the
        last time. Otherwise add 1 when this rank is done, and until then 0. With `none` there is no
        limit, and the counter only says that a rank has stopped."""
        if self.options.preemption == "optimal":
            news = rows - self.counted
            self.counted = rows
        else:
            news = int(done)
        total = self.ranks.add(self.version, news)
        is_late = time.monotonic() > self.latest
        self.preempted = (total >= self.limit or is_late) and rows >= self.min_steps
        self.other_stopped = total >= STOP

    def next_rollout(self, source):
        """This rank's rollout, when all ranks have one. Raises what any rank raised."""
        if self.predicted_sec and self.ranks.size > 1:
            # if another rank stalls (it loads a scene, say), the others do not wait for S* steps
            self.latest = time.monotonic() + PATIENCE * self.predicted_sec
        failure = None
        try:
            rollout = super().next_rollout(source)
            self.count(rollout.rows, done=True)
        except (Interrupted, UserError, OSError) as error:
            failure = error
        except EnvironmentFailure as error:
            failure = EnvironmentFailure(f"rank {self.ranks.rank}: {error}")
        if failure:
            self.ranks.add(self.version, STOP)
        self.ranks.agree(failure)
        return rollout

    def advantages(self, rollout):
        """As Run.advantages. With preemption, the steps to learn from are filled up to S."""
        super().advantages(rollout)
        if self.options.preemption == "none":
            return rollout
        if self.learned is None:  # the first rollout has S steps: it has no limit
            size = rollout.capacity, rollout.num_envs, self.policy.state_shape, rollout.device
            self.learned = ver_ppo.Rollout(self.spec, *size)
            self.learned.rows = rollout.capacity
        fill_up(self.learned, rollout)
        return self.learned

    def update(self, rollout):
        """As Run.update. Afterwards all ranks have the buffers of rank 0, too."""
        logs = super().update(rollout)
        for buffer in self.policy.buffers():
            self.ranks.broadcast(buffer)
        return logs

    def combine(self, rollout, logs):
        """Steps, logs and episodes of all ranks. Then all ranks make the same decision: when the
        next rollout ends."""
        options = self.options
        own = super().combine(rollout, logs)
        self.step_sec_N = step_seconds(rollout, options.quota, self.step_sec_N)
        parts = self.ranks.gather((*own, self.step_sec_N))
        self.ranks.forget(self.version)
        steps_R, logs_R, episodes_R, step_sec_RN = zip(*parts)
        logs = reduce_logs(logs_R)
        logs["ranks/rollout_sec"] = max(part["time/rollout_sec"] for part in logs_R)
        logs["ranks/predicted_sec"] = self.predicted_sec
        if options.preemption != "none":
            logs["ranks/stale_share"] = 1 - sum(steps_R) / options.rollout_steps / len(steps_R)
        decision = self.decide(np.array(step_sec_RN), logs["time/learning_sec"])
        self.begin_rollout(*decision, logs["ranks/rollout_sec"])
        return sum(steps_R), logs, sum(episodes_R, [])

    def decide(self, step_sec_RN, learning_sec):
        """When the next rollout ends: the value of the counter, and the predicted seconds."""
        options = self.options
        if options.preemption == "threshold":
            return threshold_preemption(self.ranks.size, options.sync_frac), 0.0
        # The first rollout has no limit. Its times include the start of the environments and cannot
        # be used to predict, so the second rollout has no limit either. (`Run.log` counts the steps
        # after this: if `step` is still `first_step`, only the first rollout has been made.)
        if options.preemption == "optimal" and self.step > self.first_step:
            variable = options.sampler == "ver"
            return optimal_preemption(step_sec_RN, options.num_steps, variable, learning_sec)
        return NO_LIMIT, 0.0

    def save(self):
        """As Run.save: rank 0 writes. Raises OSError on all ranks."""
        failure = None
        try:
            super().save()
        except OSError as error:
            failure = error
        # wait for rank 0: torchrun kills it as soon as another rank exits with an error
        self.ranks.agree(failure)
        # a signal to one rank ends all of them
        signals = [number for number in self.ranks.gather(self.signal) if number]
        if signals:
            self.signal = signals[0]

    def evaluate(self):
        """All ranks leave the process group. Then rank 0 evaluates alone."""
        self.ranks.close()
        if self.ranks.rank == 0:
            super().evaluate()


def reduce_logs(logs_R):
    """The logs of all ranks as one. Of names that end in _min, the smallest value; of names that
    end in _max, the largest; of all others, the mean."""
    reduce = {"_min": min, "_max": max}
    logs = {}
    for name in logs_R[0]:
        logs[name] = reduce.get(name[-4:], np.mean)([part[name] for part in logs_R])
    return logs


def check_gpus(ranks, options):
    """Raise UserError, in all ranks, if one rank does not have the device that --device names, or
    if two ranks have the same GPU."""
    gpu = f"rank {ranks.rank}"
    failure = None
    try:
        device = ver_ppo.choose_device(options)
        if device.type == "cuda":
            gpu = str(torch.cuda.get_device_properties(device).uuid)
    except UserError as error:
        failure = error
    ranks.agree(failure)
    gpu_R = ranks.gather(gpu)
    if len(set(gpu_R)) < ranks.size:
        text = f"{ranks.size} ranks need {ranks.size} GPUs, and there are {len(set(gpu_R))}"
        ver_ppo.refuse(options, "device", f"{text}: try --device cpu")


def begin_alike(ranks, run):
    """Give all ranks the weights of rank 0. Raises UserError if they do not continue from the same
    step."""
    if len(set(ranks.gather((run.step, run.version)))) > 1:
        raise UserError(f"ranks have read different checkpoints of {run.options.resume}: try again")
    for tensor in run.policy.state_dict().values():
        ranks.broadcast(tensor)


launch = functools.partial(ver_ppo.launch, run_class=RankRun)


def interrupted_run():
    """If torchrun has started these ranks before (--max-restarts): the arguments that resume their
    last checkpoint."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return []
    store = open_store(timeout_sec=60)
    if not store.check([FOLDER_KEY]):
        return []
    folder = Path(store.get(FOLDER_KEY).decode())
    if not (folder / "checkpoint.pt").exists():
        return []
    return ["--resume", str(folder)]


def main(argv=None, kind=Options, launch=launch):
    """Command line, as ver_ppo.main. Only the first rank of each machine prints, except failures.
    """
    argv = sys.argv[1:] if argv is None else argv
    local_rank = int(os.environ.get("LOCAL_RANK", "0")) if "RANK" in os.environ else 0
    if torch.cuda.is_available():
        torch.cuda.set_device(local_gpu())  # "--device cuda" is this one
    out = io.StringIO() if local_rank else sys.stdout
    err = io.StringIO() if local_rank else sys.stderr
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            return ver_ppo.main([*argv, *interrupted_run()], kind, launch)
        except RankFailure as error:
            program = Path(sys.modules[kind.__module__].__file__).name
            print(f"{program}: {error}", file=sys.__stderr__)
            return 1


if __name__ == "__main__":
    sys.exit(main())
