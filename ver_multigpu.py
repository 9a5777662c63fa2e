"""VER on many GPUs: decentralized distributed PPO (DD-PPO, Wijmans et al. 2020) with the optimal preemption of VER.

Every rank is a whole ver_ppo.py: it collects with its own N environments and learns on its own GPU. All that ranks do
together is averaging their gradients, so that they have the same weights after every mini-batch. A synchronous update waits
for the rank that collects slowest; so the rollout of all ranks ends when going on would cost more than it brings, and a rank
that has less than S steps by then fills up with its newest steps of before.

    torchrun --nproc-per-node 8 ver_multigpu.py --env-id pointnav        eight ranks on this machine, one GPU each
    torchrun --nnodes 4 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29500 ver_multigpu.py ...    on each node

One update of R ranks; `[...]` marks what all do together, as often on every rank, whatever it collected:

    rank 0   collect ==========| wait      [agree] fill up, learn [average] [average] ... [report]  decide
    rank 1   collect ==============| wait  [agree] fill up, learn [average] [average] ... [report]  decide
    rank 2   collect ====================| [agree] fill up, learn [average] [average] ... [report]  decide
                                         ^ S* steps of all ranks together are complete: who is not done is preempted

Every rank counts its steps in a key-value store, which it looks at every few milliseconds. What the next rollout's S* is,
all compute from the same numbers, so nobody has to be told. Shapes as in ver_ppo.py; R ranks, G groups of environments.

Mechanism                          Function               Paper        Test (tests/)
gradients averaged over ranks      Ranks.average          DD-PPO 3     test_multigpu.py::test_halves_are_the_whole
optimal preemption, equation 1     optimal_preemption     VER 2.3      test_multigpu.py::test_optimal_preemption
preemption threshold               threshold_preemption   DD-PPO 3     test_multigpu.py::test_threshold_preemption
early end of a rollout             Watch                  DD-PPO C     test_multigpu.py::test_preempted_rank
stale fill                         fill_up                VER 2.3      test_multigpu.py::test_fill_up
decisions taken together           Ranks.agree            -            test_multigpu.py::test_all_end_together
"""

import contextlib
import io
import math
import os
import signal
import sys
import time
import zlib
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

import ver_ppo
from ver_ppo import EnvironmentFailure, Interrupted, StopSignal, UserError

# ----------------------------------------------------------------------------------------------------------------------
# Options
# ----------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Options(ver_ppo.Options):
    """Train with VER on each of many GPUs (or CPU processes) and average their gradients (DD-PPO). Start with torchrun.

    --num-envs and all sizes of a rollout are those of one rank, --total-timesteps counts the steps of all ranks."""

    preemption: Literal["optimal", "threshold", "none"] = "optimal"
    """when the rollout of all ranks ends. optimal: when S / (Time(S) + learning time) is largest (VER); threshold: when
    --sync-frac of the ranks are done (DD-PPO); none: when all are done"""
    sync_frac: float = 0.6
    """--preemption threshold: share of the ranks that ends the rollout of the others, if they have a quarter of it"""
    rank_timeout: float = 600.0
    """seconds to wait for the other ranks at most; longer than any rollout may take"""

    @property
    def first_env(self):
        return int(os.environ.get("RANK", 0)) * self.num_envs

    @property
    def all_envs(self):
        return int(os.environ.get("WORLD_SIZE", 1)) * self.num_envs

    @property
    def num_buffers(self):
        return 1 if self.preemption == "none" and not self.overlap else 2  # the steps to fill up with are in the other one

    @property
    def more_rules(self):
        cuda = self.device != "cpu" and torch.cuda.is_available()
        local_ranks, gpus = int(os.environ.get("LOCAL_WORLD_SIZE", 1)), torch.cuda.device_count()
        return [
            (0 < self.sync_frac <= 1, "sync_frac", "must be within 0..1"),
            (0 < self.rank_timeout < math.inf, "rank_timeout", "must be a positive number"),
            (
                self.preemption == "none" or not self.overlapping,
                "preemption",
                "ends rollouts that are waited for: give --preemption none with --overlap and --sampler async",
            ),
            (self.device in ("auto", "cpu", "cuda"), "device", "must be auto, cpu or cuda: each rank has a GPU of its own"),
            (not cuda or local_ranks <= gpus, "device", f"{local_ranks} ranks need as many GPUs, there are {gpus}: try cpu"),
            (not self.checkpoint, "checkpoint", "is evaluated by ver_ppo.py"),
        ]


class RankFailure(Exception):
    """Another rank has died, is silent or has other weights; exit status 1."""


class OtherRankStopped(Interrupted):
    """Another rank has failed or was interrupted, and waits for us to say so."""


# ----------------------------------------------------------------------------------------------------------------------
# What ranks do together
# ----------------------------------------------------------------------------------------------------------------------


class Ranks:
    """The processes that torchrun started (without it, this one) and what they do together.

    Every rank must come to the same collectives in the same order. Objects travel by gloo, tensors on GPUs by NCCL. A
    collective that fails (a rank has died) or waits longer than --rank-timeout raises RankFailure.
    """

    def __init__(self, timeout_sec):
        self.rank, self.size = (int(os.environ.get(name, value)) for name, value in (("RANK", 0), ("WORLD_SIZE", 1)))
        self.timeout_sec = timeout_sec
        self.store = self.call(open_store, timeout_sec)
        self.start = (self.store.add("arrivals", 1) - 1) // self.size  # --max-restarts: the store outlives the ranks
        os.environ.setdefault("TORCH_NCCL_BLOCKING_WAIT", "1")  # or an error of NCCL would end the process without a word
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        store = dist.PrefixStore(f"start {self.start}", self.store)
        group = {"rank": self.rank, "world_size": self.size, "timeout": timedelta(seconds=timeout_sec)}
        self.call(dist.init_process_group, backend, store=store, **group)

    def call(self, function, *args, **more):
        """function(*args, **more), which waits for other ranks."""
        try:
            return function(*args, **more)
        except RuntimeError as error:
            reason = str(error).splitlines()[0][:200]
            silent = f"another rank has died, or been silent for {self.timeout_sec:.0f} s (--rank-timeout)"
            raise RankFailure(f"rank {self.rank}: {silent}: {reason}") from None

    def average(self, tensors):
        """Average these tensors over all ranks, in place, in one message (DD-PPO section 3): all ranks weigh the same.

        As fast as DistributedDataParallel, which hides the message behind the backward pass, on CPUs.
        """
        flat = torch.cat([tensor.flatten() for tensor in tensors])
        self.call(dist.all_reduce, flat)  # COLLECTIVE
        for tensor, part in zip(tensors, (flat / self.size).split([tensor.numel() for tensor in tensors])):
            tensor.copy_(part.view_as(tensor))

    def gather(self, what, thing=None):
        """The `thing` of every rank, in order of rank. Raises RankFailure if not all ranks have come to the same `what`."""
        things = [None] * self.size
        self.call(dist.all_gather_object, things, (what, thing))  # COLLECTIVE
        if any(other != what for other, _ in things):
            raise RankFailure(f"rank {self.rank} is at {what!r}, others at {sorted({other for other, _ in things})}")
        return [thing for _, thing in things]

    def agree(self, failure, report=None):
        """Every rank's report. If one rank has a failure, all raise it: of several, the one of the lowest rank."""
        failures, reports = zip(*self.gather("agreement", (failure, report)))
        for known in failures:
            if known and not isinstance(known, OtherRankStopped):
                raise known
        return reports

    def share_weights(self, policy):
        """Give rank 0's weights to all ranks."""
        for parameter in policy.parameters():
            self.call(dist.broadcast, parameter.data, 0)  # COLLECTIVE

    def count(self, rollout, more):
        """Add to the counter of a rollout, which all ranks see at any time, and return it. Not a collective."""
        try:
            return self.store.add(f"start {self.start} rollout {rollout}", more)
        except RuntimeError as error:
            raise RankFailure(f"rank {self.rank}: torchrun or rank 0 has died ({type(error).__name__})") from None

    def close(self):
        """Part from the other ranks."""
        dist.destroy_process_group()
        time.sleep(0.1)  # gloo's threads free tensors under Python's lock: one that is late aborts an interpreter that ends


def open_store(timeout_sec):
    """The key-value store of torchrun's agent, or of rank 0 if someone else started the ranks."""
    if "WORLD_SIZE" not in os.environ:
        return dist.HashStore()
    leads = os.environ["RANK"] == "0" and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return dist.TCPStore(*address, is_master=leads, wait_for_workers=False, timeout=timedelta(seconds=timeout_sec))


CHECK_INTERVAL = 100  # updates between two comparisons of all ranks' weights


def checksum(policy):
    """Of all weights, bit by bit."""
    return zlib.crc32(nn.utils.parameters_to_vector(policy.parameters()).detach().cpu().numpy())


# ----------------------------------------------------------------------------------------------------------------------
# Preemption
# ----------------------------------------------------------------------------------------------------------------------

NO_LIMIT = 1 << 40  # more than any counter reaches
STOP = 1 << 50  # what a rank adds that cannot go on


def optimal_preemption(step_sec_RN, num_steps, variable, learning_sec):
    """When to end the rollout of all ranks: S and Time(S) that maximize S / (Time(S) + LT) (VER section 2.3, equation 1).

    `step_sec_RN`: every environment's mean seconds per step, inference included. A group of environments gives steps at a
    constant rate until it has given all it may: with `variable` rollouts a rank is a group and gives T x N, else each
    environment is one and gives T. So what is collected by a time is concave in it, and the best time is one of those at
    which a group is done. Differs from habitat-baselines: there the search ends where the first rank is done, and a rollout
    ends at the predicted time instead of after S steps.

    >>> optimal_preemption(np.array([[0.01], [0.01], [0.1]]), 100, True, learning_sec=0.5)  # do not wait for the third rank
    (210, 1.0)
    """
    rate_RN = 1 / np.maximum(step_sec_RN, 1e-9)
    rate_G, most = (rate_RN.sum(axis=1), num_steps * rate_RN.shape[1]) if variable else (rate_RN.ravel(), num_steps)
    rate_G = np.sort(rate_G)[::-1]  # the fastest is done first
    done_sec_G = most / rate_G
    others_rate_G = np.maximum(0.0, rate_G.sum() - np.cumsum(rate_G))  # of those that are not done by then
    steps_G = most * np.arange(1, len(rate_G) + 1) + done_sec_G * others_rate_G
    best = (steps_G / (done_sec_G + learning_sec)).argmax()
    return int(steps_G[best] + 1e-6), float(done_sec_G[best])


def threshold_preemption(num_ranks, sync_frac):
    """How many ranks must be done before the others are preempted (DD-PPO section 3).

    >>> threshold_preemption(8, 0.6)
    5
    """
    return math.ceil(num_ranks * sync_frac - 1e-9)


def step_seconds(collector):
    """Every environment's mean seconds per step in this rollout, which has just ended: of the time in which it was asked for
    steps. Those that were in flight count neither at the begin nor at the end, which evens out."""
    gave_all_N = collector.steps_N >= collector.quota
    spent_N = np.where(gave_all_N, collector.completed_at_N, time.perf_counter()) - collector.began
    return np.maximum(spent_N, 1e-9) / np.maximum(collector.steps_N, 1)


class Watch(StopSignal):
    """What a rank looks at every few milliseconds while it collects: signals, and a counter that all ranks add to.

    With --preemption optimal it counts complete steps, with threshold the ranks that are done. When it reaches `limit`, this
    rank's rollout ends as it is, if it has at least `min_steps`. A rank that cannot go on adds STOP: then all come to agree.
    """

    second_ends = False  # torchrun may pass on a signal that has reached this rank already

    def __init__(self, ranks, collector, options):
        self.ranks, self.collector, self.counts_steps = ranks, collector, options.preemption == "optimal"
        self.min_steps = options.rollout_steps // 4 if options.preemption == "threshold" else 1
        self.rollout = 0
        self.begin_rollout(NO_LIMIT, 0.5)

    def __exit__(self, *failure):
        super().__exit__()
        if any(failure):  # the first rank to end makes torchrun send SIGTERM to the others, which are as good as done
            signal.signal(signal.SIGTERM, signal.SIG_IGN)

    def begin_rollout(self, limit, expected_sec):
        """Count from 0. Looking costs a hundredth of the expected time at most."""
        self.rollout, self.limit, self.counted, self.next_look = self.rollout + 1, limit, 0, 0.0
        self.collector.poll_sec = min(1.0, max(0.005, expected_sec / 100))

    def check(self):
        """Raises Interrupted after a signal, OtherRankStopped if another rank cannot go on."""
        super().check()
        if time.perf_counter() >= self.next_look:
            self.next_look = time.perf_counter() + self.collector.poll_sec
            self.add_progress()

    def add_progress(self, done=False):
        """Count what has been collected since the last time, or that this rank is done."""
        steps = int(self.collector.steps_N.sum())
        news = steps - self.counted if self.counts_steps else int(done)
        count, self.counted = self.ranks.count(self.rollout, news), steps
        if count >= STOP:
            raise OtherRankStopped(0)
        if count >= self.limit and steps >= self.min_steps:
            self.collector.preempted[...] = True

    def stop_all(self):
        """This rank cannot go on."""
        self.ranks.count(self.rollout, STOP)


def fill_up(rollout, previous, history):
    """Fill a preempted rollout up to S complete steps with the newest ones that this rank learned from before (VER section
    2.3). They are copied as they are, with the advantages and returns they had. They come from the previous rollout, or from
    older ones if that was preempted too.

    `history`: those S steps, slots of the buffer `previous` in time order. Returns the records to learn from, how many of
    these are stale (the last ones), and the new history. The stale steps stand behind each environment's open record, so
    they form sequences of their own.
    """
    fresh, missing = np.arange(rollout.size), rollout.steps - int(rollout.num_complete)
    stale = rollout.size + np.arange(missing)
    if missing:
        for old, new in zip(previous.columns(), rollout.columns()):
            new[stale] = old[history[-missing:]]
    return np.append(fresh, stale), missing, np.append(stale, fresh[rollout.complete[fresh]])


# ----------------------------------------------------------------------------------------------------------------------
# Train
# ----------------------------------------------------------------------------------------------------------------------


class RankRun(ver_ppo.Run):
    """The run of all ranks: rank 0 logs, and writes everybody's checkpoint."""

    def __init__(self, ranks, options, progress):
        self.ranks, self.leads, self.folder, self.unsaved = ranks, ranks.rank == 0, None, None
        if self.leads:
            super().__init__(options, progress)
            ranks.store.set(FOLDER_KEY, str(self.folder))  # where to go on if torchrun starts us again
        self.step = self.saved_step = progress["step"]
        self.learning_sec = {}

    def save(self, policy, optimizer, collector, options):
        snapshots = self.ranks.gather("checkpoint", collector.snapshot())
        if self.leads:
            self.write(policy, optimizer, snapshots, options)
        self.ranks.gather("checkpoint written")  # or the first to leave would make torchrun end who is still writing
        self.saved_step = self.step

    def log(self, step, *args):
        if self.leads:
            super().log(step, *args)
        self.step = step

    def say(self, text):
        if self.leads:
            super().say(text)

    def finish(self, *args):
        if self.leads:
            super().finish(*args)

    def close(self):
        if self.leads:
            super().close()


class DistributedUpdate:
    """The update of ver_ppo.py on all ranks: a rollout that ends for all at once, averaged gradients, common decisions."""

    def __init__(self, ranks, watch, rollouts):
        self.ranks, self.watch, self.rollouts, self.history, self.predicted_sec = ranks, watch, rollouts, None, 0.0

    def update(self, run, policy, optimizer, source, collector, options):
        """One cycle of a rank. Returns the new steps of all ranks, what to log, and the results of all ranks' episodes."""
        began = time.perf_counter()
        rollout, records, reports = self.collect(policy, source, collector, options)
        rollout_sec = time.perf_counter() - began
        with ver_ppo.learning_phase(run, optimizer, collector, options) as logs:
            logs |= ver_ppo.compute_targets(policy, rollout, records, options)
            if options.preemption != "none":
                previous = next(other for other in self.rollouts if other is not rollout)
                records, stale, self.history = fill_up(rollout, previous, self.history)
                logs["ranks/stale_share"] = stale / rollout.steps
            logs |= ver_ppo.learn(policy, optimizer, rollout, records, options, self.ranks.average)
        logs["ranks/rollout_sec"], logs["ranks/predicted_sec"] = rollout_sec, self.predicted_sec
        sec = time.perf_counter() - began
        logs |= ver_ppo.describe_rollout(rollout, records, collector, options, logs["time/learning_sec"], sec)
        logs = reduce_logs(self.ranks.gather("logs", logs))
        self.decide(reports, logs, options)
        return sum(report["steps"] for report in reports), logs, sum((report["results"] for report in reports), [])

    def collect(self, policy, source, collector, options):
        """This rank's rollout and its records, and what every rank reports of its own. Raises what any rank raised."""
        failure = report = None
        try:
            rollout, records = next(source)
            self.watch.add_progress(done=True)
            report = {
                "steps": int(rollout.complete[records].sum()),
                "results": ver_ppo.episode_results(rollout, records),
                "step_sec": step_seconds(collector) if self.watch.counts_steps and not collector.resumed else None,
                "save": self.watch.save_wanted,
                "checksum": checksum(policy) if collector.version % CHECK_INTERVAL == 0 else 0,
            }
        except (Interrupted, EnvironmentFailure) as error:
            failure = error
            if isinstance(error, EnvironmentFailure):
                failure = EnvironmentFailure(f"rank {self.ranks.rank}: {error}")
            self.watch.stop_all()
        reports = self.ranks.agree(failure, report)
        self.watch.save_wanted = any(report["save"] for report in reports)
        if len({report["checksum"] for report in reports}) > 1:
            raise RankFailure(f"the ranks' weights differ after {collector.version} updates")
        if options.debug:
            ver_ppo.check_collected(rollout, records, collector.version, report["steps"])
        return rollout, records, reports

    def decide(self, reports, logs, options):
        """When the next rollout ends: the same numbers, so the same decision on every rank."""
        limit, self.predicted_sec, expected_sec = NO_LIMIT, 0.0, logs["ranks/rollout_sec"]
        if options.preemption == "threshold":
            limit = threshold_preemption(self.ranks.size, options.sync_frac)
        if options.preemption == "optimal" and not any(report["step_sec"] is None for report in reports):
            step_sec_RN, learning_sec = np.array([report["step_sec"] for report in reports]), logs["time/learning_sec"]
            variable = options.sampler == "ver"
            limit, self.predicted_sec = optimal_preemption(step_sec_RN, options.num_steps, variable, learning_sec)
        self.watch.begin_rollout(limit, expected_sec)


def reduce_logs(logs_R):
    """One dictionary of logs for all ranks: means, smallest of `..._min`, largest of `..._max`."""
    functions = {"_min": min, "_max": max}
    return {name: functions.get(name[-4:], np.mean)([logs[name] for logs in logs_R]) for name in logs_R[0]}


def train(options):
    """Train on all ranks to the end; rank 0 evaluates. Returns the run folder on rank 0."""
    with contextlib.closing(Ranks(options.rank_timeout)) as ranks:
        if options.trace and ranks.rank:
            options = replace(options, trace=f"{options.trace}.{ranks.rank}")
        failure = None
        try:
            spec, policy, optimizer, progress, snapshot, collector, rollouts = ver_ppo.prepare(
                options, ranks.rank, ranks.size
            )
            run = RankRun(ranks, options, progress)
        except UserError as error:
            failure = error
        ranks.agree(failure)
        ranks.share_weights(policy)
        if ranks.rank:  # the weights were drawn alike, the actions must not be
            torch.manual_seed(ver_ppo.episode_seed("train", options.seed, options.first_env, 0))
        with contextlib.closing(run):
            run.introduce(policy, options, ranks.size)
            watch = collector.stop = Watch(ranks, collector, options)
            distributed = DistributedUpdate(ranks, watch, rollouts)
            ver_ppo.run_updates(run, policy, optimizer, collector, rollouts, spec, options, snapshot, distributed.update)
            run.finish(policy, spec, options)
    return run.folder


FOLDER_KEY = "run folder"


def interrupted_run():
    """If torchrun has started these ranks before (--max-restarts): the arguments that resume their last checkpoint."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return []
    store = open_store(timeout_sec=60)
    folder = Path(store.get(FOLDER_KEY).decode()) if store.check([FOLDER_KEY]) else Path()
    return ["--resume", str(folder)] if (folder / "checkpoint.pt").exists() else []


def main(argv=None):
    """Command line, as ver_ppo.main. What all ranks of a machine would print, the first of them prints."""
    argv, local_rank = sys.argv[1:] if argv is None else argv, int(os.environ.get("LOCAL_RANK", 0))
    if torch.cuda.is_available():  # "--device cuda" means this one; validate_options refuses ranks that have none
        torch.cuda.set_device(local_rank % torch.cuda.device_count())
    with contextlib.ExitStack() as stack:
        if local_rank:
            stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
            stack.enter_context(contextlib.redirect_stderr(io.StringIO()))
        try:
            return ver_ppo.main([*argv, *interrupted_run()], Options, train)
        except RankFailure as error:
            print(f"ver_multigpu.py: {error}", file=sys.__stderr__)
            return 1


if __name__ == "__main__":
    sys.exit(main())
