"""Train in simulated time: no step waits, and the machine's load changes no number of a run.

    python ver_ppo.py --env-id pointnav --num-workers 0
        --extensions "clocked(mean_ms=20, spread=0.8, between=0.6)"

The shipped code collects and learns, in one process. Environments step at once, but their answers
arrive in the order in which simulated steps end. Inference and learning take as long as the
arguments say. TensorBoard shows the simulated minutes and the steps per simulated second as
clock/minutes and clock/SPS. (charts/SPS and time/... stay real.) The environments' starts take no
time, as with `latency`.

Two runs with the same options give the same checkpoint, bit for bit, on the same machine. The
durations of an environment's steps depend on its number and --seed alone. So all samplers meet the
same ones, and they are those of `--wrappers "latency(mean_ms=20, spread=0.8, between=0.6)"`. Not
with `overlap` and `async`: they learn while they collect. With --resume, the clock begins at 0
again.
"""

import contextlib
import inspect
import math
from dataclasses import replace

import numpy as np
import torch

import ver_ppo
from notebooks.extensions.overlap import Overlap
from notebooks.extensions.virtual_clock import Clock, draw_factors


class Clocked(ver_ppo.Run):
    """Train in simulated time.

    mean_ms     milliseconds of a step; or of several kinds of environments, such as (3, 30): then
                environment e is of kind e % 2
    spread      sigma of the log-normal factors of one environment's steps
    between     sigma of the log-normal factors of the environments' means
    batch_ms    what inference costs, for a batch of any size
    learn_sec   what learning from a rollout costs
    crashes     share of the steps in which an environment fails, so that the step is lost

    An environment with an attribute `mean_ms` says itself how long a step takes on average.
    """

    mean_ms: float | tuple = 20.0
    spread: float = 0.8
    between: float = 0.0
    batch_ms: float = 0.8
    learn_sec: float = 0.4
    crashes: float = 0.0

    def __init__(self, options):
        """As Run.__init__. Raises UserError for numbers that make no sense, and with worker
        processes, which would run in real time."""
        for name in inspect.get_annotations(Clocked):
            value = getattr(self, name)
            several = name == "mean_ms" and isinstance(value, tuple)
            numbers = value if several else (value,)
            if not numbers or not all(is_time(number) for number in numbers):
                raise ver_ppo.UserError(f"clocked: {name}={value}: must be a number, 0 or more")
        if options.num_workers != 0 or isinstance(self, Overlap):
            needed = "needs --num-workers 0, and goes without overlap and async"
            raise ver_ppo.UserError(f"clocked: {needed}: simulated time has one process")
        if options.learner_threads == "auto":  # it would depend on the machine's load
            options = replace(options, learner_threads=1)
        super().__init__(options)

    def start(self):
        """As Run.start. All environments have started when the clock begins."""
        super().start()
        inline = self.collector.workers
        self.clock = ClockedWorkers(inline.environments, self)
        self.collector.workers = self.clock

    def log(self, rollout, logs):
        """As Run.log, after the simulated time that learning takes."""
        self.clock.now += self.learn_sec
        steps = self.step + rollout.rows - self.initial_step
        logs["clock/minutes"] = self.clock.now / 60
        logs["clock/SPS"] = steps / max(self.clock.now, 1e-9)
        super().log(rollout, logs)


def is_time(number):
    """Whether this can be a duration or a share."""
    return isinstance(number, (int, float)) and 0 <= number < math.inf


class ClockedWorkers(Clock):
    """Environments of this process, whose answers arrive in simulated time. `times` has the numbers
    of Clocked."""

    def __init__(self, environments, times):
        super().__init__(times.batch_ms / 1000)
        self.environments = environments
        self.spread = times.spread
        self.crashes = times.crashes
        self.rng_N = []
        self.own_ms_N = []  # each environment's mean
        mean_K = np.atleast_1d(times.mean_ms)
        for e, environment in enumerate(environments):
            # as Latency draws, from the seed with which this environment has started
            started = environment.io["episode"][e]
            seed = ver_ppo.derive_seed(0, environment.options.seed, e, started)
            rng = np.random.default_rng([seed, 1])
            self.rng_N.append(rng)
            self.own_ms_N.append(mean_K[e % len(mean_K)] * draw_factors(rng, times.between))
        self.took_N = np.zeros(len(environments))  # seconds of the step in flight

    def duration_of(self, e):
        """Draw the seconds of the step that environment e begins now."""
        mean_ms = getattr(self.environments[e].env.unwrapped, "mean_ms", self.own_ms_N[e])
        self.took_N[e] = mean_ms / 1000 * draw_factors(self.rng_N[e], self.spread)
        return self.took_N[e]

    def answer(self, e):
        """Make the step whose time has passed; or, if the environment crashes, start it again."""
        environment = self.environments[e]
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.inference_mode(False))  # `collect` switches it on
            if self.crashes and self.rng_N[e].random() < self.crashes:
                environment.close()
                environment.env = None
                stack.enter_context(torch.random.fork_rng([]))  # because a start seeds torch
            environment.answer()
        environment.io["step_sec"][e] = self.took_N[e]
