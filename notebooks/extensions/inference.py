"""Several processes choose actions (VER section 2.1, "inference workers"; the policy workers of
Sample Factory, Petrenko et al. 2020, section 3.1).

    python ver_ppo.py --env-id pointnav --extensions "inference(workers=2)"

The main process still decides which environments form a batch and into which rows of the rollout
their steps go, so a rollout has exactly S steps. But it does not run the network for them: it hands
the batch to an inference process that is free. That process writes the actions into shared tables,
and answers. Meanwhile the main process hands the next batch to another one.

Any process may serve any environment: the memory of all environments (`state_N`) and their pending
steps lie in shared memory. The weights are shared, too. They change only while no batch is being
computed: at the end of a rollout, the main process waits for the batches that it has handed over.

This may help where the network is slow, and cores or a GPU are free while it runs. On two cores, it
did not: each batch costs two more messages between processes. With two processes, training made
0.74 to 1.03 times the steps per second on four simulators (`python tests/benchmarks/speed.py
inference`). On one GPU, it did not help either: the processes share it. In the shares of time that
a run prints, waiting for an inference process counts as waiting for environments.
"""

import contextlib
import functools
import select
import time

import numpy as np
import torch

import ver_ppo
from notebooks.extensions.overlap import Overlap, death_of, start_process


class Inference(ver_ppo.Run):
    """A run in which `workers` processes choose the actions."""

    workers: int = 2
    preemptible = False

    def __init__(self, options):
        """As Run.__init__."""
        if self.workers < 1:
            raise ver_ppo.UserError("--extensions inference: workers must be 1 or more")
        if options.num_workers == 0:
            reason = "the environments need processes of their own: leave out --num-workers 0"
            raise ver_ppo.UserError(f"--extensions inference: {reason}")
        if isinstance(self, Overlap) or self.collector_class is not ver_ppo.Collector:
            reason = "does not go with another extension that collects"
            raise ver_ppo.UserError(f"--extensions inference: {reason}")
        super().__init__(options)

    def start(self):
        """As Run.start."""
        how = {"count": self.workers, "cleanup": self.cleanup}
        self.collector_class = functools.partial(InferenceCollector, **how)
        super().start()


class InferenceCollector(ver_ppo.Collector):
    """A collector that hands batches to processes, and works while they choose actions. `cleanup`
    ends these processes at the end of the run."""

    def __init__(self, policy, workers, io, spec, options, *more, count, cleanup):
        super().__init__(policy, workers, io, spec, options, *more)
        self.waiting = []  # environments that wait for a free process
        self.busy = {}  # pipe -> the environments of the batch that it computes
        # seconds for which each has computed it. A gap between two calls of `take_actions` counts
        # as one second at most, as in ver_ppo.Workers
        self.busy_sec = {}
        self.looked_at = time.monotonic()
        self.processes = {}  # by pipe
        cleanup.callback(self.close)
        # the weights move to shared memory when they are sent; states and pending steps move now
        state_N = torch.from_numpy(self.state_N).share_memory_()
        self.state_N = state_N.numpy()
        args = policy, io, spec, options, self.pending.share(), state_N
        for _ in range(count):
            process, pipe = start_process(inference_process, *args)
            self.processes[pipe] = process
            # `await_answers` must not sleep when a process has chosen actions
            workers.poll.register(pipe, select.POLLIN)
        self.free = list(self.processes)

    def act(self, env_B):
        """Hand these environments to a process, or let them wait until one is free."""
        self.waiting += env_B.tolist()
        self.hand_over()

    def hand_over(self):
        """Give all environments that wait to a free process, if there is one."""
        if self.waiting and self.free:
            pipe = self.free.pop()
            env_B = np.array(self.waiting)
            self.waiting = []
            self.busy[pipe] = env_B
            self.busy_sec[pipe] = 0.0
            if self.device.type == "cuda":  # the weights must be ready before it reads them
                torch.cuda.synchronize(self.device)
            with contextlib.suppress(ConnectionError):  # `take_actions` notices
                pipe.send((self.version, self.greedy, env_B))

    def take_actions(self, timeout_sec=0.0):
        """Send the actions that the processes have chosen. Raises EnvironmentFailure if one has
        died, or has not answered for --env-timeout."""
        limit_sec = self.options.env_timeout
        now = time.monotonic()
        passed_sec = min(1.0, now - self.looked_at)
        self.looked_at = now
        for pipe, env_B in list(self.busy.items()):
            self.busy_sec[pipe] += passed_sec
            if not pipe.poll(timeout_sec):
                if self.busy_sec[pipe] > limit_sec:
                    reason = f"gave no answer for {limit_sec:g} s (--env-timeout)"
                    raise ver_ppo.EnvironmentFailure(f"an inference process {reason}")
                continue
            try:
                pipe.recv()
            except (EOFError, ConnectionError):
                raise death_of(self.processes[pipe], "an inference process") from None
            del self.busy[pipe]
            self.free.append(pipe)
            self.in_flight_N[env_B] = True
            self.workers.send(env_B)

    def await_answers(self, room):
        """As Collector.await_answers. First send the actions that processes have chosen, and hand
        over the environments that wait."""
        self.take_actions()
        self.hand_over()
        return super().await_answers(room)

    def bootstrap_values(self):
        """Wait until no batch is being computed. Then do as Collector.bootstrap_values.
        Environments that still waited for a free process are now idle: the new policy chooses their
        actions."""
        self.idle = np.append(self.idle, np.array(self.waiting, int))
        self.waiting = []
        while self.busy:
            self.take_actions(timeout_sec=0.05)
        return super().bootstrap_values()

    def close(self):
        """End the processes: they leave when their pipes end."""
        for pipe, process in self.processes.items():
            pipe.close()
            ver_ppo.end_process(process, 5)


def inference_process(pipe, policy, io, spec, options, pending, state_N):
    """Body of an inference process: choose actions for a batch of environments, again and again.
    Ends when the main process closes the pipe or dies."""
    ver_ppo.lead_group()
    torch.set_num_threads(1)
    torch.seed()  # random: which process gets which batch is chance anyway
    collector = ver_ppo.Collector(policy, Reply(pipe), io, spec, options)
    collector.pending = pending
    collector.state_N = state_N.numpy()
    with torch.inference_mode(), contextlib.suppress(EOFError, ConnectionError):
        while True:
            collector.version, collector.greedy, env_B = pipe.recv()
            collector.act(env_B)


class Reply:
    """In place of the workers of an inference process: tell the main process that the actions are
    chosen."""

    def __init__(self, pipe):
        self.pipe = pipe

    def send(self, env_B):
        self.pipe.send(None)
