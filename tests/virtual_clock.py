"""Environment workers under a virtual clock: the shipped collection code runs on them without processes and without time."""

import contextlib
import heapq
import os

import numpy as np
import torch
from gymnasium import spaces

import ver_ppo

SPEC = ver_ppo.Spec({"obs": spaces.Box(-np.inf, np.inf, (4,), np.float32)}, spaces.Discrete(3), ())


class VirtualWorkers:
    """Same interface as ver_ppo.Workers. `duration(row, step)` says how long each step takes, `ending(row, step)` how it
    ends: "terminated", "truncated" or None. Rewards and observations tell which step of which environment they are."""

    def __init__(self, num_envs, duration, ending=lambda row, step: None, inference_sec=0.0, start_sec=lambda row: 0.0):
        self.transfer, self.duration, self.ending = ver_ppo.Transfer(SPEC, num_envs), duration, ending
        self.now, self.inference_sec, self.events = 0.0, inference_sec, []
        self.steps_N, self.received, self.spans = [-1] * num_envs, [], []
        for row in range(num_envs):
            heapq.heappush(self.events, (start_sec(row), row))

    def send(self, rows):
        self.now += self.inference_sec
        for row in rows:
            took = self.duration(row, self.steps_N[row])
            self.spans.append((row, self.now, took))
            heapq.heappush(self.events, (self.now + took, row))

    def check(self):
        pass

    def receive(self, timeout_sec):
        if timeout_sec > 0 and self.events:
            self.now = max(self.now, self.events[0][0])
        rows = []
        while self.events and self.events[0][0] <= self.now + 1e-9:
            rows.append(heapq.heappop(self.events)[1])
            self.answer(rows[-1])
        self.received += rows
        return rows

    def answer(self, row):
        out, step = self.transfer, self.steps_N[row]
        ending = self.ending(row, step) if step >= 0 else None
        out.reward[row], out.step_sec[row] = reward_of(row, step), self.duration(row, step)
        out.terminated[row], out.truncated[row] = ending == "terminated", ending == "truncated"
        out.first[row] = step < 0 or ending is not None
        out.final_obs["obs"][row] = observation_of(row, step + 1, final=True)
        self.steps_N[row] = step + 1
        out.obs["obs"][row] = observation_of(row, step + 1)


def reward_of(row, step):
    """The reward of an environment's step: tells both."""
    return row + step / 1000


def observation_of(row, step, final=False):
    """The observation before an environment's step (or the one that the reset replaced)."""
    return torch.tensor([row / 10, np.sin(step), np.cos(step / 7), float(final)])


def build(workers, num_envs, num_steps, **options):
    """Policy, rollout and collector of the shipped code on virtual workers."""
    options = ver_ppo.Options(num_envs=num_envs, num_steps=num_steps, num_workers=0, hidden_size=8, **options)
    policy = ver_ppo.Policy(SPEC, options)
    torch.nn.init.normal_(policy.actor.weight)
    device = torch.device("cpu")
    collector = ver_ppo.Collector(workers, workers.transfer, policy, SPEC, options, device, ver_ppo.StopSignal())
    return policy, ver_ppo.Rollout(SPEC, options.rollout_steps, num_envs, policy.state_shape, device), collector


def collect(policy, rollout, collector):
    """One rollout as ver_ppo.inline_rollouts collects it."""
    ver_ppo.carry_over(rollout, rollout, collector)
    ver_ppo.collect_rollout(policy, rollout, collector)


def learn(policy, optimizer, rollout, options):
    """One update from all of a rollout, as ver_ppo.update learns; returns what to log."""
    records = np.arange(rollout.size)
    logs = ver_ppo.compute_targets(policy, rollout, records, options)
    return logs | ver_ppo.learn(policy, optimizer, rollout, records, options)


class AsyncLearner:
    """What stands in for the learner of --sampler async: `collect_trajectories` announces finished trajectories to it, and
    calls its `check` wherever it looks for a signal."""

    def __init__(self, pool, collector):
        self.pool, self.collector = pool, collector
        self.read_end, self.finished = (os.fdopen(fd, mode, buffering=0) for fd, mode in zip(os.pipe(), ("rb", "wb")))
        os.set_blocking(self.read_end.fileno(), False)

    def announced(self):
        """The numbers of the trajectories that were finished since the last call."""
        with contextlib.suppress(BlockingIOError):
            return ver_ppo.read_numbers(self.read_end)
        return []


class VirtualLearner(AsyncLearner):
    """Learns from N finished trajectories at a time, while collecting goes on, gives them back afterwards, and ends it all
    after so many updates."""

    def __init__(self, workers, pool, collector, learning_sec, updates):
        super().__init__(pool, collector)
        self.workers, self.learning_sec, self.updates = workers, learning_sec, updates
        self.waiting, self.phases, self.learning = [], [], None  # the trajectories that are being learned from

    def check(self):
        self.waiting += self.announced()
        learned_at = sum(self.phases[-1]) if self.learning else np.inf
        if self.learning and not self.pool.free_P.any():  # environments wait for the learner, and time goes on
            until = [time for time, _ in self.workers.events[:1]] + [learned_at]
            self.workers.now = max(self.workers.now, min(until))
        if self.workers.now >= learned_at:
            self.pool.free_P[self.learning], self.learning = True, None
            self.collector.version += 1
            if len(self.phases) == self.updates:
                raise ver_ppo.Interrupted(0)
        if not self.learning and len(self.waiting) >= self.pool.num_envs:
            self.learning, self.waiting = self.waiting[: self.pool.num_envs], self.waiting[self.pool.num_envs :]
            self.phases.append((self.workers.now, self.learning_sec))


def run(sampler, duration, num_envs, num_steps, updates, inference_sec=0.0, learning_sec=0.0):
    """Collect with a sampler, and learn for `learning_sec`, so many times. Returns the steps that were learned from, the
    seconds that it took, and what happened when: the steps (environment, begin, seconds) and the learning (begin, seconds).
    """
    workers = VirtualWorkers(num_envs, duration, inference_sec=inference_sec)
    policy, rollout, collector = build(workers, num_envs, num_steps, sampler=sampler)
    if sampler == "async":
        pool = ver_ppo.Trajectories(SPEC, rollout.steps, num_envs, policy.state_shape, torch.device("cpu"))
        learner = collector.stop = VirtualLearner(workers, pool, collector, learning_sec, updates)
        with contextlib.suppress(ver_ppo.Interrupted):
            ver_ppo.collect_trajectories([policy, policy], pool, collector, learner.finished)
        phases = learner.phases
    else:
        phases = []
        for _ in range(updates):
            collect(policy, rollout, collector)
            phases.append((workers.now, learning_sec))
            workers.now += learning_sec
            collector.count_update()
    return updates * rollout.steps, sum(phases[-1]), workers.spans, phases
