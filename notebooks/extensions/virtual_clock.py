"""Environment workers under a virtual clock. The shipped collection code runs on them without
processes and without waiting."""

import heapq

import numpy as np
import torch

import ver_ppo
from notebooks.extensions.overlap import Trajectories

SPEC = ver_ppo.Spec({"obs": ("float32", (4,), True)}, choices=[3], action_dims=1, metrics=[])


def draw_factors(rng, sigma, shape=None):
    """Draw log-normal factors of mean 1."""
    return rng.lognormal(-(sigma**2) / 2, sigma, shape)


def step_times(num_envs, sigma_env, sigma_step, seed=9, num_steps=4000):
    """Seconds of each environment's steps: log-normal with mean 1, with these spreads between and
    within environments. N x `num_steps`."""
    rng = np.random.default_rng(seed)
    slow_N1 = draw_factors(rng, sigma_env, (num_envs, 1))
    return slow_N1 * draw_factors(rng, sigma_step, (num_envs, num_steps))


class Clock:
    """The interface of ver_ppo.Workers in simulated time: answers arrive in the order in which
    steps end. `now` is the time in seconds. A batch of actions takes `inference_sec`.

    A subclass says how long a step takes (`duration_of`), and writes the answer (`answer`).
    """

    def __init__(self, inference_sec=0.0):
        self.inference_sec = inference_sec
        self.now = 0.0
        self.events = []  # heap of future answers: (when, environment)

    def send(self, env_B):
        self.now += self.inference_sec
        for e in env_B.tolist():
            heapq.heappush(self.events, (self.now + self.duration_of(e), e))

    def receive(self, timeout_sec):
        if timeout_sec > 0:
            if not self.events:
                raise RuntimeError("nobody will answer: no environment has an action")
            self.now = max(self.now, self.events[0][0])
        answered = []
        while self.events and self.events[0][0] <= self.now + 1e-9:
            _, e = heapq.heappop(self.events)
            answered.append(e)
            self.answer(e)
        return answered


class VirtualWorkers(Clock):
    """Workers with invented environments.

    duration(e, step)    seconds of a step of environment e; step -1 is its start
    ending(e, step)      "terminated", "truncated", "lost" or None

    Rewards and observations identify the environment and the step (`reward_of`, `observation_of`).
    """

    def __init__(
        self,
        num_envs,
        duration,
        ending=lambda e, step: None,
        inference_sec=0.0,
        start_sec=lambda e: 0.0,
    ):
        super().__init__(inference_sec)
        self.io = ver_ppo.EnvIO(SPEC, num_envs)
        self.duration = duration
        self.ending = ending
        self.steps_N = [-1] * num_envs  # each environment's next step
        self.received = []
        self.before_acting = lambda: None  # called when time has passed
        self.spans = []  # (environment, begin, seconds) of each step
        for e in range(num_envs):
            heapq.heappush(self.events, (start_sec(e), e))

    def duration_of(self, e):
        took = self.duration(e, self.steps_N[e])
        self.spans.append((e, self.now, took))
        return took

    def receive(self, timeout_sec):
        answered = super().receive(timeout_sec)
        self.received += answered
        self.before_acting()
        return answered

    def answer(self, e):
        io = self.io
        step = self.steps_N[e]
        ending = self.ending(e, step) if step >= 0 else None
        io["reward"][e] = reward_of(e, step)
        io["step_sec"][e] = self.duration(e, step)
        io["terminated"][e] = ending == "terminated"
        # a lost step has no outcome: what its row holds here means nothing
        io["truncated"][e] = ending in ("truncated", "lost")
        io["started"][e] = step < 0 or ending == "lost"
        io["first"][e] = step < 0 or ending is not None
        io["final_obs"]["obs"][e] = observation_of(e, step + 1, final=True)
        io["obs"]["obs"][e] = observation_of(e, step + 1)
        self.steps_N[e] = step + 1


def reward_of(e, step):
    """The reward of a step. It identifies the environment and the step."""
    return e + step / 1000


def observation_of(e, step, final=False):
    """The observation before a step. `final`: the one that a reset replaced."""
    return np.array([e / 10, np.sin(step), np.cos(step / 7), float(final)])


class VirtualSimulators:
    """The interface of mini_ver.Simulators, on virtual workers. Answers are made by `answer`."""

    def __init__(self, workers, answer):
        self.workers = workers
        self.answer = answer

    def send(self, e, action):
        self.workers.send(np.array([e]))

    def receive(self, wait):
        io = self.workers.io
        return [
            self.answer(
                e,
                torch.tensor(io["obs"]["obs"][e]),
                io["reward"][e].item(),
                bool(io["terminated"][e]),
                bool(io["truncated"][e]),
                torch.tensor(io["final_obs"]["obs"][e]),
            )
            for e in self.workers.receive(float(wait))
        ]


class Zeros:
    """A distribution that always gives B actions of 0."""

    def __init__(self, count):
        self.count = count

    def sample(self):
        return torch.zeros(self.count, 1, dtype=torch.int64)

    def log_prob(self, action_BA):
        return torch.zeros(self.count)


class IdlePolicy(ver_ppo.Policy):
    """A policy that computes nothing and always takes the same action. Collecting is three times as
    fast, for uses in which only the clock matters."""

    def step(self, obs, prev_action_BA, first_B, state_B):
        return Zeros(len(first_B)), torch.zeros(len(first_B)), state_B


def build(workers, num_envs, num_steps, policy_class=ver_ppo.Policy, sampler="ver", **options):
    """Build the shipped policy, rollout and collector on virtual workers. `sampler` is ver, nover,
    sync or async."""
    collector_class = Trajectories if sampler == "async" else ver_ppo.Collector
    sizes = {"num_envs": num_envs, "num_steps": num_steps, "num_workers": 0, "hidden_size": 8}
    known = "ver" if sampler == "async" else sampler
    options = ver_ppo.Options(**sizes, sampler=known, **options)
    policy = policy_class(SPEC, options)
    torch.nn.init.normal_(policy.actor.weight)
    torch.nn.init.ones_(policy.critic.scale)  # otherwise all values are 0
    size = (options.rollout_steps, num_envs, policy.state_shape)
    rollout = ver_ppo.Rollout(SPEC, *size)
    return policy, rollout, collector_class(policy, workers, workers.io, SPEC, options)


def taken(rollout):
    """Copy the columns that identify a rollout's steps: environment, observation, reward, and
    whether the step is an episode's first or last."""
    new = slice(int(rollout.rows))
    obs = rollout["obs"]["obs"]
    names = "env", "reward", "first", "done"
    env, reward, first, done = (rollout[name] for name in names)
    columns = (env, obs, reward, first, done)
    return [column[new].copy() for column in columns]


def assert_nothing_is_lost(c, rollouts):
    """Assert that each environment's steps arrived once, in order and with its own answers, and
    that no environment waits forever. `rollouts` holds the result of `taken` for each rollout."""
    env, obs, reward, first, done = (np.concatenate(parts) for parts in zip(*rollouts))
    coming = [e for _, e in c.workers.events]
    assert sorted([*c.idle, *c.arrived, *coming]) == list(range(len(c.in_flight_N)))
    for e in np.unique(env):
        mine = env == e
        steps = range(mine.sum())
        endings = np.array([str(c.workers.ending(e, step)) for step in steps])
        expected = [observation_of(e, step) for step in steps]
        np.testing.assert_allclose(obs[mine], expected, atol=1e-6)
        assert (done[mine] == (endings != "None")).all()
        assert first[mine].tolist() == [True, *done[mine][:-1]]
        exact = np.isin(endings, ["None", "terminated"])  # the other rewards contain values
        expected = reward_of(e, np.arange(len(steps)))
        np.testing.assert_allclose(reward[mine][exact], expected[exact], rtol=1e-6)


def run(
    sampler,
    duration,
    num_envs,
    num_steps,
    updates,
    inference_sec=0.0,
    learning_sec=0.0,
    learn=lambda rollout: None,
):
    """Collect `updates` rollouts with a sampler, and learn `learning_sec` from each. `learn` is
    called with each rollout. Returns:

    - the number of steps in all rollouts
    - the seconds until the last update is done
    - all steps, as a list of environment, begin and seconds
    - the learning phases, as a list of begin and seconds"""
    workers = VirtualWorkers(num_envs, duration, inference_sec=inference_sec)
    _, rollout, c = build(workers, num_envs, num_steps, IdlePolicy, sampler)
    phases = []
    learned_at = 0.0

    def publish():
        """A policy acts from the end of its update on."""
        c.version = sum(begin + sec <= workers.now + 1e-9 for begin, sec in phases)

    workers.before_acting = publish
    for _ in range(updates):
        publish()
        c.collect(rollout)
        learn(rollout)
        if sampler == "async":  # collecting continues once the learner has taken the rollout
            workers.now = max(workers.now, learned_at)
        phases.append((workers.now, learning_sec))
        learned_at = workers.now + learning_sec
        if sampler != "async":
            workers.now = learned_at
    return updates * rollout.capacity, learned_at, workers.spans, phases
