"""Will VER pay on my simulator? Watch it, try the samplers, and recommend a command.

    python -m notebooks.extensions.advise --env-id MY_ENV
    python -m notebooks.extensions.advise --env-id MY_ENV --cores 16 --ranks 4

The options are those of ver_ppo.py. It takes two to three minutes, and prints

- how the simulator behaves: the time of a step, and how uneven it is
- a table of short trainings, one after the other, with each sampler and two numbers of workers
- a command, why, and how long a million steps take with it
- with --cores or --ranks, the steps per second of the shipped collector on such a machine. They are
  computed. The column `computed` has the same computation for this machine, so it shows how far to
  trust it.

In the computation, a worker steps its environments one after the other, with the durations that
were watched. A step needs a core for a part of its time, and waits for the rest. All processes that
need a core at the same moment get equal shares of the cores. The costs of inference and learning
are those of the trainings.
"""

import contextlib
import itertools
import json
import shlex
import sys
import time
from collections import deque
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
from tqdm import tqdm

import ver_ppo
from notebooks.extensions.virtual_clock import IdlePolicy, VirtualWorkers, build

WATCHED = 8  # environments, if there are as many; more if there are many cores
WORTH = 1.05  # a command that is faster by less than this is not worth its options
SIMULATED = 10_000  # steps of each computation, about
ROUNDING_SEC = 1e-12  # less time than this is none
FEWEST_STEPS = 4  # T of a short training
FEWEST_RESETS = 3  # of each environment in a training, if they take much time
SAMPLERS = "sync", "nover", "ver"  # that can be computed
BAR = "{l_bar}{bar}| {n_fmt}/{total_fmt} s"


@dataclass(frozen=True)
class Options(ver_ppo.Options):
    """Watch a simulator, try the samplers on it, and recommend a command."""

    minutes: float = 2.0  # of watching and training; starting and computing take up to one more
    cores: int | None = None  # also compute the rate of a machine with this many CPU cores
    ranks: int = 1  # that share these cores, each with a GPU of its own
    file: str | None = None  # JSON file for all times and results


class Bar(tqdm):
    """A progress bar of seconds."""

    def __init__(self, minutes):
        super().__init__(total=round(60 * minutes), bar_format=BAR)

    def tick(self):
        """Show how much time has passed."""
        self.update(min(self.total, round(time.time() - self.start_t)) - self.n)

    def is_full(self):
        """Whether the time is over."""
        return self.n == self.total

    def say(self, text):
        """Show this text beside the bar."""
        self.set_description(text)
        self.tick()


# ---------------------------------------------------------------------------------------- Watching


class Behaviour(NamedTuple):
    """How a simulator behaves.

    sec_E           for each environment that was watched, the seconds of its steps, resets included
    resets_E        for each of them, which of its steps include a reset
    cpu_share       the share of a step in which it keeps a core busy
    overhead_sec    seconds that a worker spends on each step beside the simulator"""

    sec_E: list
    resets_E: list
    cpu_share: float
    overhead_sec: float

    @property
    def step_sec(self):
        """The mean seconds of a step, resets included."""
        return np.concatenate(self.sec_E).mean()

    def numbers(self):
        """The times in a few numbers. Spreads (sigma) are deviations of logarithms, and `rare` is
        the longest percent of the steps."""
        sec_S = np.concatenate(self.sec_E)
        resets_S = np.concatenate(self.resets_E)
        plain_E = [np.log(sec[~reset]) for sec, reset in zip(self.sec_E, self.resets_E)]
        rare_sec = np.sort(sec_S)[-len(sec_S) // 100 :]
        found = {
            "mean_ms": 1000 * sec_S.mean(),
            "median_ms": 1000 * np.median(sec_S),
            "longest_ms": 1000 * sec_S.max(),
            "cpu_share": self.cpu_share,
            "deviation": sec_S.std() / sec_S.mean(),  # in units of the mean
            "within": np.sqrt(np.mean([log_S.var() for log_S in plain_E if len(log_S)])),
            "between": np.std([np.log(sec.mean()) for sec in self.sec_E]),
            "resets": resets_S.mean(),  # share of the steps that include one ...
            "resets_time": sec_S[resets_S].sum() / sec_S.sum(),  # ... and their share of the time
            "rare_time": rare_sec.sum() / sec_S.sum(),
        }
        return {name: float(value) for name, value in found.items()}

    def describe(self):
        """The same in words."""
        return (
            "a step: {mean_ms:.3g} ms on average, {cpu_share:.0%} of it on a CPU;"
            " median {median_ms:.3g} ms, longest {longest_ms:.3g} ms\n"
            "uneven steps: deviation {deviation:.2f} times the mean; sigma {within:.2f} within an"
            " environment (without resets), {between:.2f} between {number} environments\n"
            "rare steps: {resets:.1%} of them include a reset, and take {resets_time:.0%} of the"
            " time; the longest 1 % take {rare_time:.0%}"
        ).format(number=len(self.sec_E), **self.numbers())


def watch(options, spec, seconds, look):
    """Let a few environments act at random for some seconds, with a worker for each core: cores
    that are all busy are slower than one that is alone. After an answer, the next action follows at
    once, and meanwhile a worker steps its other environments. Returns the environments' Behaviour.
    """
    rng = np.random.default_rng(0)
    cores = ver_ppo.count_cores()
    num_envs = min(options.num_envs, max(WATCHED, 2 * cores))
    num_workers = min(cores, max(1, num_envs // 2))
    options = replace(options, num_envs=num_envs, num_workers=num_workers)
    io = ver_ppo.EnvIO(spec, num_envs)
    found = [[] for _ in range(num_envs)]
    with contextlib.closing(ver_ppo.make_workers(options, "train", spec, io)) as workers:

        def act(e):
            if spec.choices:
                io["action"][e] = rng.integers(spec.choices)
            else:
                io["action"][e] = rng.uniform(-1, 1, spec.action_dims)
            workers.send(np.array([e]))

        starting = num_envs
        while starting:
            starting -= len(workers.receive(0.05))
            look()
        began_at = time.perf_counter()
        ended_at_W = np.zeros(num_workers)  # when each worker's last answers came
        for e in range(num_envs):
            act(e)
        while time.perf_counter() - began_at < seconds or not all(found):
            for e in workers.receive(0.05):
                found[e].append((io["step_sec"][e], io["first"][e]))
                ended_at_W[e % num_workers] = time.perf_counter()
                act(e)
            look()
    sec_E = [np.array([sec for sec, _ in steps]) for steps in found]
    resets_E = [np.array([first for _, first in steps]) for steps in found]
    steps = sum(map(len, sec_E))
    passed_sec = (ended_at_W - began_at).sum()
    overhead_sec = max(0.0, passed_sec - sum(map(np.sum, sec_E))) / steps
    cpu_share = min(1.0, spec.cpu_sec / spec.step_sec)
    return Behaviour(sec_E, resets_E, cpu_share, overhead_sec)


# ----------------------------------------------------------------------------------------- Trying


class Tried(ver_ppo.Run):
    """A short training, which writes no files."""

    writes = False
    kept = None  # a collector, whose environments go on from one training to the next

    def begin(self, settling_sec, seconds, tick):
        """Prepare a training whose first seconds do not count, nor the cycle before them, in which
        environments may start. `tick` is called in every pass."""
        self.settling_sec = settling_sec
        self.seconds = seconds
        self.tick = tick
        # the end of the first cycle, unless environments go on from an earlier training
        self.lap_at = time.perf_counter()
        self.started_at = None if settling_sec else self.lap_at
        self.spent_sec[:] = 0
        self.cycle_sec = []  # of the cycles that count

    def start(self):
        """As Run.start."""
        if self.kept is None:
            super().start()
        else:
            self.collector = self.kept
            self.collector.options = self.options
            self.cleanup.enter_context(ver_ppo.caught_signals(self.note_signal))

    def look(self, rows):
        """As Run.look."""
        self.tick()
        return super().look(rows)

    def log(self, rollout, logs):
        """As Run.log. Ends the training when its time is over."""
        super().log(rollout, logs)
        if self.started_at is None:
            self.started_at = self.lap_at
        elif self.lap_at >= self.started_at + self.settling_sec:
            self.cycle_sec.append(logs["time/cycle_sec"])
        if not self.cycle_sec:
            self.spent_sec[:] = 0
        elif sum(self.cycle_sec) > self.seconds:
            self.options = replace(self.options, total_timesteps=self.step)


class Row(NamedTuple):
    """A short training: steps per second, and by what share of it chance may have moved it (a
    standard error); the shares of waiting for environments, inference and learning; the seconds of
    choosing actions for a batch, and of learning for each step."""

    sampler: str
    workers: int
    rate: float
    error: float
    shares: tuple
    acting_sec: float
    learning_sec: float


def with_sampler(options, sampler, workers):
    """These options with another sampler, such as `nover` or `ver+overlap`."""
    name, *more = sampler.split("+")
    return replace(options, sampler=name, num_workers=workers, extensions=tuple(more))


def acting_sec(rollout):
    """Seconds of choosing the actions of a batch: the median of the rollout's steps."""
    steps = rollout.complete
    return float(np.median(steps["sent_at"] - steps["inference_at"]))


def try_one(run, sampler, workers, times, tick):
    """Train with this sampler and this many workers, from the same weights as before. `times` are
    the seconds that do not count, and those that do. Returns a Row."""
    before = run.options
    weights = {name: part.clone() for name, part in run.policy.state_dict().items()}
    run.options = with_sampler(before, sampler, workers)
    run.begin(*times, tick)
    try:
        ver_ppo.train(run)
    finally:
        run.options = before
        run.policy.load_state_dict(weights)
        run.optimizer = run.make_optimizer()
    cycles = len(run.cycle_sec)
    passed_sec = sum(run.cycle_sec)
    steps = cycles * run.options.rollout_steps
    error = 1.0  # of a single cycle, nothing is known
    if cycles > 1:
        error = np.std(run.cycle_sec) / np.mean(run.cycle_sec) / np.sqrt(cycles - 1)
    shares = tuple(run.spent_sec / passed_sec)
    own_sec = acting_sec(run.rollout), run.spent_sec[2] / steps
    return Row(sampler, workers, steps / passed_sec, float(error), shares, *own_sec)


@contextlib.contextmanager
def kept_environments(run, num_workers):
    """The trainings of `run` share environments and this many workers, which start only once."""
    options = replace(run.options, num_workers=num_workers)
    io = ver_ppo.EnvIO(run.spec, options.num_envs)
    with contextlib.closing(ver_ppo.make_workers(options, "train", run.spec, io)) as workers:
        run.kept = ver_ppo.Collector(run.policy, workers, io, run.spec, options, run.look)
        yield
        run.kept = None


# -------------------------------------------------------------------------------------- Computing


class Machine(VirtualWorkers):
    """Workers that share the cores of a machine, in simulated time. Worker w has the environments
    w, w + W, and so on. As in ver_ppo.env_worker, it steps those that it was asked for one after
    the other, and may send several answers at once."""

    def __init__(self, num_envs, num_workers, cores, duration, cpu_share, batch_sec, row_sec):
        """`duration(e, step)` is in seconds. The process that collects needs a core, too:
        `batch_sec` for each batch of actions, and `row_sec` for each of its rows."""
        super().__init__(num_envs, duration)
        self.cores = cores
        self.cpu_share = cpu_share
        self.batch_sec = batch_sec
        self.row_sec = row_sec
        # for each worker: environments in its inbox; those that it has read and not stepped; those
        # whose answers it has not sent
        self.inboxes = [deque() for _ in range(num_workers)]
        self.asked = [deque() for _ in range(num_workers)]
        self.unsent = [[] for _ in range(num_workers)]
        self.since_W = np.zeros(num_workers)  # when each last read its inbox, or sent answers
        self.stepping = [None] * num_workers  # the environment that it steps now
        # seconds that each process still needs a core, and then waits. The last is the collecting
        # process
        self.cpu_sec_P = np.zeros(num_workers + 1)
        self.wait_sec_P = np.zeros(num_workers + 1)
        self.answered = []

    def send(self, env_B):
        self.work(self.batch_sec + self.row_sec * len(env_B))
        for e in env_B.tolist():
            self.inboxes[e % len(self.inboxes)].append(e)

    def receive(self, timeout_sec):
        starts = super().receive(0)
        while timeout_sec > 0 and not starts and not self.answered:
            self.pass_time()
        answered = starts + self.answered
        self.answered = []
        return answered

    def work(self, seconds):
        """Let the process that collects keep a core busy for this many seconds."""
        self.cpu_sec_P[-1] = seconds
        while self.cpu_sec_P[-1] > 0:
            self.pass_time()

    def pass_time(self):
        """Let time pass until a process has done a part of its work."""
        for worker, asked in enumerate(self.asked):
            if self.stepping[worker] is None and not asked and self.inboxes[worker]:
                asked.extend(self.inboxes[worker])
                self.inboxes[worker].clear()
                self.since_W[worker] = self.now
            if self.stepping[worker] is None and asked:
                e = self.stepping[worker] = asked.popleft()
                took = self.duration(e, self.steps_N[e])
                self.cpu_sec_P[worker] = took * self.cpu_share
                self.wait_sec_P[worker] = took * (1 - self.cpu_share)
        on_core_P = self.cpu_sec_P > 0
        waits_P = (self.wait_sec_P > 0) & ~on_core_P
        speed = min(1.0, self.cores / max(1, on_core_P.sum()))  # of each that needs a core
        sec = min([*(self.cpu_sec_P[on_core_P] / speed), *self.wait_sec_P[waits_P]])
        self.now += sec
        self.cpu_sec_P[on_core_P] -= sec * speed
        self.wait_sec_P[waits_P] -= sec
        for left_P in (self.cpu_sec_P, self.wait_sec_P):
            left_P[left_P < ROUNDING_SEC] = 0.0
        for worker, e in enumerate(self.stepping):
            if e is not None and self.cpu_sec_P[worker] == self.wait_sec_P[worker] == 0:
                self.stepping[worker] = None
                self.answer(e)
                self.unsent[worker].append(e)
                self.send_answers(worker)

    def send_answers(self, worker):
        """Let a worker that has just answered send its answers, if it does so now."""
        unsent = self.unsent[worker]
        num_environments = len(range(worker, len(self.steps_N), len(self.asked)))
        passed_sec = self.now - self.since_W[worker]
        if not self.asked[worker] or ver_ppo.is_due(len(unsent), num_environments, passed_sec):
            self.answered += unsent
            unsent.clear()
            self.since_W[worker] = self.now


class Instant:
    """Workers whose environments answer at once, `count` at a time."""

    def __init__(self, num_envs, count):
        self.ready = deque(range(num_envs))
        self.count = count

    def send(self, env_B):
        self.ready.extend(env_B.tolist())

    def receive(self, timeout_sec):
        return [self.ready.popleft() for _ in range(min(self.count, len(self.ready)))]


class Costs(NamedTuple):
    """Seconds of the process that collects and learns: for a batch of actions, for each of its
    rows, and of learning for each step."""

    batch_sec: float
    row_sec: float
    learning_sec: float


def inference_costs(run):
    """Seconds that the shipped collector needs for a batch of actions, and for each of its rows.
    Measured with the run's policy, without simulators, in batches of 1 and of N. Also returns the
    `acting_sec` of a batch of N."""
    num_envs = run.options.num_envs
    options = replace(run.options, sampler="ver")
    size = 4 * num_envs, num_envs, run.policy.state_shape
    rollout = ver_ppo.Rollout(run.spec, *size)
    row_sec = {}
    for count in (1, num_envs):
        io = ver_ppo.EnvIO(run.spec, num_envs)
        collector = ver_ppo.Collector(
            run.policy, Instant(num_envs, count), io, run.spec, options, lambda rows: False
        )
        collector.collect(rollout)  # the first one is slower
        took = []
        for _ in range(3):
            collector.collect(rollout)
            took.append(rollout.ended_at - rollout.started_at)
        # at the end, the values of the last `count` environments are computed, too
        row_sec[count] = np.median(took) / (rollout.capacity + count)
    # a batch of B rows takes batch_sec + B row_sec
    saved_sec = max(0.0, row_sec[1] - row_sec[num_envs])
    batch_sec = saved_sec / max(1 - 1 / num_envs, 0.5)
    return batch_sec, max(0.0, row_sec[1] - batch_sec), acting_sec(rollout)


def costs_in_training(batch_sec, row_sec, alone_sec, rows):
    """The Costs of these trainings, from what `inference_costs` returns. In a training, inference
    is slower than without simulators. How much slower is measured in the first Row, `sync`, where
    each batch has N rows."""
    factor = rows[0].acting_sec / alone_sec
    learning_sec = float(np.median([row.learning_sec for row in rows]))
    return Costs(factor * batch_sec, factor * row_sec, learning_sec)


def cycle_seconds(behaviour, costs, sampler, size, num_workers, cores, seed):
    """Seconds of each cycle, computed. `size` is N and T."""
    num_envs, num_steps = size
    rng = np.random.default_rng(seed)
    # environment e repeats the times of one that was watched, from a step of its own
    sec_E = [sec + behaviour.overhead_sec for sec in behaviour.sec_E]
    begin_N = rng.integers(0, 2**31, num_envs)

    def duration(e, step):
        sec = sec_E[e % len(sec_E)]
        return sec[(begin_N[e] + step) % len(sec)]

    own_sec = costs.batch_sec, costs.row_sec
    machine = Machine(num_envs, num_workers, cores, duration, behaviour.cpu_share, *own_sec)
    _, rollout, collector = build(machine, num_envs, num_steps, IdlePolicy, sampler)
    ended_at = [0.0]
    for _ in range(1 + max(2, SIMULATED // rollout.capacity)):
        collector.collect(rollout)
        machine.work(costs.learning_sec * rollout.capacity)
        ended_at.append(machine.now)
    return np.diff(ended_at)[1:]  # in the first one, all begin at once


def compute(behaviour, costs, sampler, size, num_workers, cores, ranks=1):
    """Steps per second of a machine, computed. Its ranks share the cores, and each update waits for
    the slowest rank."""
    how = behaviour, costs, sampler, size, num_workers, cores / ranks
    sec_RU = [cycle_seconds(*how, seed) for seed in range(ranks)]
    return ranks * np.prod(size) / np.max(sec_RU, axis=0).mean()


# --------------------------------------------------------------------------------------- Advising


def command_of(options):
    """The command that trains with these options."""
    words = ["python ver_ppo.py"]
    for field in fields(ver_ppo.Options):
        value = getattr(options, field.name)
        name = field.name.replace("_", "-")
        if value == field.default:
            continue
        if isinstance(value, bool):
            words.append(f"--{name}" if value else f"--no-{name}")
        else:
            several = value if isinstance(value, tuple) else (value,)
            words.append(f"--{name} {shlex.join(map(str, several))}")
    return " ".join(words)


def recommend(rows, usual):
    """The row to use, and why. It is the simplest one that is not clearly slower than the fastest
    one. `usual` is the number of workers that `auto` chooses."""
    # from the simplest one on
    names = "ver", "nover", "sync", "ver+overlap"
    order = sorted(rows, key=lambda row: (names.index(row.sampler), row.workers != usual))
    best = max(rows, key=lambda row: row.rate)

    def is_clearly_slower(row):
        chance = 2 * np.hypot(row.error, best.error)
        return best.rate > row.rate * max(WORTH, 1 + chance)

    chosen = next(row for row in order if not is_clearly_slower(row))
    fastest = {row.sampler: row for row in sorted(rows, key=lambda row: row.rate)}
    waits = [f"{fastest[name].shares[0]:.0%} with {name}" for name in SAMPLERS]
    beside = [
        f"{chosen.rate / fastest[name].rate:.2f} times as fast as {name}"
        for name in ("sync", "nover")
        if name != chosen.sampler
    ]
    reasons = [
        f"Measured here, it is {' and '.join(beside)}.",
        f"The share of time in which training waits for environments is {', '.join(waits)}.",
    ]
    gained = {name: fastest["ver"].rate / fastest[name].rate for name in ("sync", "nover")}
    if gained["sync"] < WORTH and chosen.sampler == "ver+overlap":
        reasons.append("Without overlap, VER gains nothing here.")
    elif gained["sync"] < WORTH and chosen.sampler != "nover":
        reasons.append("VER gains nothing here: sync is as fast, and can be repeated exactly.")
    elif gained["nover"] < WORTH:
        reasons.append("VER gains nothing over nover here.")
    return chosen, " ".join(reasons)


def doubt(behaviour, rows, num_envs, seconds):
    """A sentence that says why trainings of this many seconds may mislead, or nothing. If there are
    few resets, one training may have most of them by chance, and looks slow."""
    numbers = behaviour.numbers()
    num_steps = seconds * min(row.rate for row in rows) / num_envs  # of each environment
    num_resets = num_steps * numbers["resets"]
    if numbers["resets_time"] > WORTH - 1 and num_resets < FEWEST_RESETS:
        return (
            f"Do not trust these rates yet: resets take {numbers['resets_time']:.0%} of the time,"
            f" but in the slowest training, an environment had only about {num_resets:.1f} of them."
            " By chance, one training may have more of them than another: give it more --minutes."
        )
    if max(row.error for row in rows) > WORTH - 1:
        return "Some rates are uncertain (column +-): give it more --minutes."
    return ""


def check(options):
    """Raises UserError for options that make no sense here."""
    for name in ("minutes", "cores", "ranks"):
        value = getattr(options, name)
        if value is not None and not value > 0:
            ver_ppo.refuse(options, name, "must be a positive number")
    if options.num_workers == 0:
        ver_ppo.refuse(options, "num_workers", "worker processes are tried here")
    if options.extensions:
        ver_ppo.refuse(options, "extensions", "are not tried here, but `overlap` is")


def allot(run, seconds, num_workers, step_sec):
    """Shorten the rollouts, so that a training of this many seconds makes a few of them."""
    options = run.options
    collected = seconds / 4 * num_workers / step_sec  # about, in a quarter of this time
    fitting = max(FEWEST_STEPS, round(collected / options.num_envs))
    num_steps = min(options.num_steps, fitting)
    run.options = replace(options, num_steps=num_steps)
    size = run.options.rollout_steps, options.num_envs, run.policy.state_shape
    run.rollout = ver_ppo.Rollout(run.spec, *size)


def other_number(behaviour, costs, run, usual, cores):
    """A number of workers to try beside the usual one: the fastest one as computed, or half as
    many if there are no more environments."""
    size = run.options.num_envs, run.options.num_steps
    numbers = {min(many * usual, size[0]) for many in (2, 4, 8)} - {usual}
    if not numbers:
        return usual // 2
    return max(sorted(numbers), key=lambda W: compute(behaviour, costs, "ver", size, W, cores))


def try_samplers(run, workers, seconds, bar):
    """Make a short training with each sampler and this many workers. Returns their Rows."""
    rows = []
    with kept_environments(run, workers):
        for sampler in SAMPLERS:
            bar.say(f"trying {sampler} with {workers} workers")
            # environments that start together have their resets together for a while
            settling_sec = 0.0 if rows else seconds / 2
            rows.append(try_one(run, sampler, workers, (settling_sec, seconds), bar.tick))
    return rows


def try_overlap(run, workers, seconds, bar):
    """The same with `--extensions overlap`, which starts environments of its own."""
    bar.say(f"trying ver with overlap and {workers} workers")
    options = with_sampler(run.options, "ver+overlap", workers)
    own = ver_ppo.extend(Tried, options)(options)  # the extension makes another class
    return try_one(own, "ver+overlap", workers, (seconds / 2, seconds), bar.tick)


def launch(options):
    """Watch, try, compute and advise. Raises UserError and EnvironmentFailure."""
    ver_ppo.check_options(options)
    check(options)
    cores = ver_ppo.count_cores()
    with Bar(options.minutes) as bar:
        bar.say("watching the simulator")
        endless = {"total_timesteps": 10**12, "eval_episodes": 0, "num_workers": "auto"}
        run = Tried(replace(options, **endless))
        usual = ver_ppo.count_workers(options, run.spec)
        # two numbers of workers have three trainings each, and half of the time of one to settle.
        # `overlap` has one. As much time goes into watching, and into computing
        seconds = 60 * options.minutes / (2 * 3.5 + 1.5 + 2)
        behaviour = watch(run.options, run.spec, seconds, bar.tick)
        bar.write(f"{options.env_id}: {options.num_envs} environments, {cores} cores")
        bar.write(behaviour.describe())
        allot(run, seconds, usual, behaviour.step_sec)
        without_simulators = inference_costs(run)
        rows = try_samplers(run, usual, seconds, bar)
        costs = costs_in_training(*without_simulators, rows)
        other = other_number(behaviour, costs, run, usual, cores)
        if bar.is_full():
            bar.write("Time is short, so only one number of workers is tried. Try --minutes 10.")
        elif other:
            rows += try_samplers(run, other, seconds, bar)
        rows.append(try_overlap(run, usual, seconds, bar))
        lengths = sorted({run.options.num_steps, options.num_steps})  # T, as tried and as wanted
        computed = {}
        for row, num_steps in itertools.product(rows, lengths):
            bar.say("computing")
            if row.sampler in SAMPLERS:
                size = options.num_envs, num_steps
                how = row.sampler, size, row.workers, cores
                computed[row, num_steps] = compute(behaviour, costs, *how)
        larger = []
        if options.cores or options.ranks > 1:
            larger = describe_machine(behaviour, costs, options, options.cores or cores, bar)
    if options.file:
        write(options, behaviour, costs, rows, computed)
    print_table(rows, computed, lengths)
    chosen, reasons = recommend(rows, usual)
    minutes = 1e6 / chosen.rate / 60
    takes = f"{minutes:.0f} minutes" if minutes < 120 else f"{minutes / 60:.0f} hours"
    workers = options.num_workers if chosen.workers == usual else chosen.workers
    print(f"\n    {command_of(with_sampler(options, chosen.sampler, workers))}\n")
    doubts = doubt(behaviour, rows, options.num_envs, seconds)
    print(f"{reasons} A million steps take {takes}. {doubts}".rstrip())
    for line in larger:
        print(line)


def write(options, behaviour, costs, rows, computed):
    """Write everything to --file. Raises OSError."""
    found = {
        "env_id": options.env_id,
        "num_envs": options.num_envs,
        "cores": ver_ppo.count_cores(),
        "seconds": [sec.tolist() for sec in behaviour.sec_E],  # of each environment's steps
        "resets": [resets.tolist() for resets in behaviour.resets_E],
        "behaviour": behaviour.numbers(),
        "overhead_sec": behaviour.overhead_sec,
        "costs": costs._asdict(),
        "tried": [row._asdict() for row in rows],
        "computed": [
            {"sampler": row.sampler, "workers": row.workers, "num_steps": num_steps, "rate": rate}
            for (row, num_steps), rate in computed.items()
        ],
    }
    Path(options.file).expanduser().write_text(json.dumps(found, indent=1))


def show(rate):
    """Steps per second as text."""
    return f"{rate:,.1f}" if rate < 100 else f"{rate:,.0f}"


def print_table(rows, computed, lengths):
    """Print the measured rates, and beside them the computed ones for rollouts of these lengths."""
    heads = [f"computed, T = {num_steps}" for num_steps in lengths]
    print(f"trained with T = {lengths[0]}")
    line = "{:12} {:>7} {:>9} {:>5} {:>8} {:>10} {:>9}" + "  {:>17}" * len(heads)
    shares = "waiting", "inference", "learning"
    print(line.format("sampler", "workers", "steps/s", "+-", *shares, *heads))
    for row in rows:
        others = [show(computed[row, T]) if (row, T) in computed else "" for T in lengths]
        shares = [f"{share:.0%}" for share in (row.error, *row.shares)]
        print(line.format(row.sampler, row.workers, show(row.rate), *shares, *others))


def describe_machine(behaviour, costs, options, cores, bar):
    """Lines with the computed rates of a machine with this many cores, and the best number of
    workers for each sampler."""
    share = max(1, cores // options.ranks)  # of one rank
    numbers = sorted({min(options.num_envs, number) for number in (share, 2 * share, 4 * share)})
    size = options.num_envs, options.num_steps
    lines = [f"computed for {cores} cores and {options.ranks} ranks, workers of each rank:"]
    for sampler in SAMPLERS:
        rates = {}
        for number in numbers:
            bar.say("computing")
            how = sampler, size, number, cores, options.ranks
            rates[number] = compute(behaviour, costs, *how)
        best = max(rates, key=rates.get)
        lines.append(f"    {sampler:6} {best:3} workers: {show(rates[best])} steps/s")
    return lines


def main(argv=None):
    """Run a command line. Returns the exit status, as ver_ppo.main."""
    return ver_ppo.main(argv, Options, launch)


if __name__ == "__main__":
    # otherwise the classes would exist twice, as in ver_ppo.py
    from notebooks.extensions import advise

    sys.exit(advise.main())
