"""Several processes choose actions (VER section 2.1, "inference workers"; the policy workers of
Sample Factory, Petrenko et al. 2020, section 3.1).

    python ver_ppo.py --env-id pointnav --extensions "inference(workers=2)"

The main process still decides which environments form a batch and into which rows of the rollout
their steps go, so a rollout has exactly S steps. But it does not run the network for them: it hands
the batch to an inference process that is free. That process writes the actions into shared tables,
and answers. Meanwhile the main process hands the next batch to another one.

No environment belongs to an inference process. Its memory, `state_N`, and its pending step lie in
shared tables, where the process that serves it next finds them. The weights are shared, too. They
change only while no batch is being computed: at the end of a rollout, the main process waits for
the batches that it has handed over.

This can help where the network is slow and cores or a GPU are free while it runs. Each batch also
makes two more ways between processes, about 0.1 ms.
"""

import contextlib
import functools

import numpy as np
import torch

import ver_ppo

SEED_OF_INFERENCE = 4  # first number of ver_ppo.derive_seed


class Inference(ver_ppo.Run):
    """A run in which `workers` processes choose the actions."""

    workers: int = 2

    def __init__(self, options):
        """As Run.__init__."""
        if self.workers < 1:
            raise ver_ppo.UserError("--extensions inference: workers must be 1 or more")
        if options.num_workers == 0:
            reason = "the environments need processes of their own: leave out --num-workers 0"
            raise ver_ppo.UserError(f"--extensions inference: {reason}")
        if self.collector_class is not ver_ppo.Collector:
            reason = f"does not go with {self.collector_class.__name__}, another way of collecting"
            raise ver_ppo.UserError(f"--extensions inference: {reason}")
        super().__init__(options)

    def start(self):
        """As Run.start."""
        self.collector_class = functools.partial(InferenceCollector, count=self.workers)
        super().start()
        self.cleanup.callback(self.collector.close)


class InferenceCollector(ver_ppo.Collector):
    """A collector that hands batches to processes, and goes on while they choose actions."""

    def __init__(self, policy, workers, io, spec, options, *more, count):
        super().__init__(policy, workers, io, spec, options, *more)
        self.waiting = []  # environments that wait for a free process
        self.busy = {}  # pipe -> the environments of the batch that it computes
        self.processes = {}  # by pipe
        shared = self.pending, self.state_N
        context = ver_ppo.process_context()
        for number in range(count):
            pipe, other_end = context.Pipe()
            # a resumed run begins with later episodes, so it gets other random numbers
            seed = ver_ppo.derive_seed(SEED_OF_INFERENCE, options.seed, number, io["episode"].max())
            # tensors that are sent move to shared memory, so all processes see the same weights
            args = other_end, seed, policy, io, spec, options, shared
            process = context.Process(target=inference_process, args=args, daemon=True)
            process.start()
            other_end.close()  # only the process has it now: if it dies, the pipe ends
            self.processes[pipe] = process
            workers.poll.register(pipe)  # so that `await_answers` does not sleep while one answers
        self.free = list(self.processes)

    def act(self, env_B):
        """Hand these environments to a process, or let them wait until one is free."""
        self.waiting += env_B.tolist()
        if self.waiting and self.free:
            pipe = self.free.pop()
            self.busy[pipe] = np.array(self.waiting)
            self.waiting = []
            with contextlib.suppress(ConnectionError):  # `take_actions` notices
                pipe.send((self.version, self.greedy, self.busy[pipe]))

    def take_actions(self, timeout_sec=0.0):
        """Send the actions that the processes have chosen. Raises EnvironmentFailure if one has
        died."""
        for pipe in list(self.busy):
            if not pipe.poll(timeout_sec):
                continue
            try:
                pipe.recv()
            except (EOFError, ConnectionError):
                process = self.processes[pipe]
                process.join(5)
                reason = f"an inference process died with exit code {process.exitcode}"
                raise ver_ppo.EnvironmentFailure(reason) from None
            env_B = self.busy.pop(pipe)
            self.free.append(pipe)
            self.in_flight_N[env_B] = True
            self.workers.send(env_B)

    def await_answers(self, room):
        """As Collector.await_answers. First send what has been chosen, and hand over what waits."""
        self.take_actions()
        self.act(np.zeros(0, int))
        return super().await_answers(room)

    def bootstrap_values(self):
        """As Collector.bootstrap_values, when no batch is being computed any more. Environments
        that waited for a free process are now idle: the new policy chooses their actions."""
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


def inference_process(pipe, seed, policy, io, spec, options, shared):
    """Body of an inference process: choose actions for a batch of environments, again and again.
    Ends when the main process closes the pipe or dies."""
    ver_ppo.lead_group()
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    collector = ver_ppo.Collector(policy, Reply(pipe), io, spec, options)
    collector.pending, collector.state_N = shared
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
