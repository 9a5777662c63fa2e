"""VER in 350 lines, to be read from top to bottom.

    python notebooks/mini_ver.py                    # trains for one to two minutes
    python notebooks/mini_ver.py --sampler sync     # the same in lock-step; nover: in between

An LSTM learns to balance a pole without seeing velocities. Each environment is a thread, and its
steps sleep, as in a simulator that waits for a GPU. Names are those of ver_ppo.py, or similar. That
program does the same with processes and shared memory, for any environment, and survives failures.
"""

import argparse
import queue
import random
import threading
import time
from collections import Counter
from dataclasses import dataclass

import gymnasium as gym
import numpy as np
import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence

N = 16  # environments
T = 64  # steps of each environment in a rollout, on average
S = N * T  # steps of a rollout
H = 64  # size of the LSTM
EPOCHS, MINIBATCHES = 4, 4
GAMMA, GAE_LAMBDA = 0.99, 0.95
LEARNING_RATE, CLIP, ENT_COEF, SCALE = 3e-3, 0.2, 0.005, 20.0  # SCALE: about the size of returns

# ------------------------------------------------------------------------------------ Environments


@dataclass
class Answer:
    """What an environment answers to an action. Its first answer, the start, has only `obs`."""

    env: int  # number of the environment
    obs: torch.Tensor  # the observation for the next action
    reward: float = 0.0
    terminated: bool = False
    truncated: bool = False  # cut by the time limit
    final_obs: torch.Tensor = None  # if the episode has ended: its last observation


class Simulators:
    """N environments, each in a thread. Steps take 5 ms on average; some environments are slower
    than others."""

    def __init__(self, seed=1):
        self.actions = [queue.SimpleQueue() for _ in range(N)]
        self.answers = queue.SimpleQueue()
        self.spans = []  # of all steps: environment, begin, end
        for e in range(N):
            threading.Thread(target=self.simulate, args=(e, seed), daemon=True).start()

    def simulate(self, e, seed):
        env = gym.make("CartPole-v1")
        rng = np.random.default_rng([seed, e])
        mean_sec = 0.005 * rng.lognormal(-0.18, 0.6)
        obs, _ = env.reset(seed=seed * N + e)
        self.answers.put(Answer(e, see(obs)))
        while (action := self.actions[e].get()) is not None:
            begun = time.perf_counter()
            time.sleep(mean_sec * rng.lognormal(-0.32, 0.8))
            final_obs, reward, terminated, truncated, _ = env.step(action)
            obs = env.reset()[0] if terminated or truncated else final_obs
            self.spans.append((e, begun, time.perf_counter()))
            answer = Answer(e, see(obs), reward, terminated, truncated, see(final_obs))
            self.answers.put(answer)

    def send(self, e, action):
        self.actions[e].put(action)

    def receive(self, wait):
        """All answers that are there. If `wait`, at least one."""
        answers = [self.answers.get()] if wait else []
        while not self.answers.empty():
            answers.append(self.answers.get())
        return answers

    def close(self):
        for e in range(N):
            self.send(e, None)


def see(obs):
    """Position and angle, without the two velocities."""
    return torch.tensor([obs[0], obs[2]])


# ------------------------------------------------------------------------------------------ Policy


class Policy(nn.Module):
    """An LSTM, whose state is one tensor: 2 x H for each environment."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(2, H), nn.Tanh())
        self.lstm = nn.LSTM(H, H)
        self.actor = nn.Linear(H, 2)
        self.critic = nn.Linear(H, 1)

    def heads(self, core):
        logits = self.actor(core)
        return torch.distributions.Categorical(logits=logits), SCALE * self.critic(core)[:, 0]

    def step(self, obs_B, state_B):
        """One step of B environments: distribution, values, states after it."""
        h, c = state_B.transpose(0, 1).split(1)
        core, (h, c) = self.lstm(self.encoder(obs_B)[None], (h.contiguous(), c.contiguous()))
        return *self.heads(core[0]), torch.cat([h, c]).transpose(0, 1)

    def sequences(self, obs, state_Q):
        """All steps of Q sequences. `obs` is packed, and the results are in the same order."""
        h, c = state_Q.transpose(0, 1).split(1)
        encoded = PackedSequence(self.encoder(obs.data), obs.batch_sizes)
        core, _ = self.lstm(encoded, (h.contiguous(), c.contiguous()))
        return self.heads(core.data)


# -------------------------------------------------------------------------------------- Collecting


@dataclass
class Step:
    """A step of one environment: what the policy saw and did; then its outcome; then what to learn
    from it."""

    env: int
    obs: torch.Tensor
    state: torch.Tensor  # of the LSTM, before the step
    first: bool  # the step begins an episode
    action: torch.Tensor
    log_prob: torch.Tensor
    value: float
    reward: float = 0.0
    done: bool = False
    advantage: float = 0.0
    returns: float = 0.0
    weight: float = 1.0


class Collector:
    def __init__(self, policy, simulators, sampler="ver"):
        self.policy = policy
        self.simulators = simulators
        self.needed = N if sampler == "sync" else 1  # answers for a batch of actions, at least
        self.quota = S if sampler == "ver" else T  # steps of one environment in a rollout, at most
        self.arrived = []  # answers that are here and not taken yet
        self.pending = {}  # environment: its step in flight
        self.idle = []  # environments whose answer was taken, without a new action
        zeros = torch.zeros(policy.encoder[0].in_features)  # before an environment has started
        self.obs = dict.fromkeys(range(N), zeros)  # the observation for its next action
        self.first = dict.fromkeys(range(N), True)  # environment: whether that begins an episode
        self.state_N = torch.zeros(N, 2, H)  # after each environment's latest action

    @torch.no_grad()
    def collect(self):
        """S steps: with `ver`, from whichever environments deliver them; with `sync` and `nover`, T
        from each. Returns them in order of arrival, and a bootstrap value for each environment."""
        rollout = []
        given = [0] * N
        self.act(self.idle)
        self.idle = []
        while len(rollout) < S:
            answers = self.await_answers(room=S - len(rollout))
            for answer in answers:
                if answer.env in self.pending:
                    rollout.append(self.complete(answer))
                    given[answer.env] += 1
                self.obs[answer.env] = answer.obs
            env_B = [answer.env for answer in answers]
            wanted = [e for e in env_B if given[e] < self.quota and len(rollout) < S]
            self.act(wanted)
            self.idle += [e for e in env_B if e not in wanted]
        return rollout, self.bootstrap_values()

    def await_answers(self, room):
        """Take answers in order of arrival, at most `room`. The others stay in flight."""
        self.arrived += self.simulators.receive(wait=False)
        while len(self.arrived) < self.needed:
            self.arrived += self.simulators.receive(wait=True)
        taken = self.arrived[:room]
        self.arrived = self.arrived[room:]
        return taken

    def act(self, env_B):
        """Choose and send actions. Each step is pending until its answer is taken."""
        if not env_B:
            return
        obs_B = torch.stack([self.obs[e] for e in env_B])
        begins_B = torch.tensor([self.first[e] for e in env_B])
        state_B = self.state_N[env_B].masked_fill(begins_B[:, None, None], 0.0)
        distribution, value_B, self.state_N[env_B] = self.policy.step(obs_B, state_B)
        action_B = distribution.sample()
        log_prob_B = distribution.log_prob(action_B)
        columns = obs_B, state_B, begins_B.tolist(), action_B, log_prob_B, value_B.tolist()
        for e, *row in zip(env_B, *columns):
            self.pending[e] = Step(e, *row)
        for e, action in zip(env_B, action_B.tolist()):
            self.simulators.send(e, action)

    def complete(self, answer):
        """The pending step of this environment, with its outcome. It keeps the probability, value
        and state that it was sent with, also if the policy has learned since."""
        step = self.pending.pop(answer.env)
        step.reward = answer.reward
        step.done = answer.terminated or answer.truncated
        self.first[answer.env] = step.done
        if answer.truncated:  # the episode would have continued
            step.reward += GAMMA * self.value(answer.env, answer.final_obs, first=False)
        return step

    def bootstrap_values(self):
        """The value after each environment's last step. If its next step is in flight, the value
        was computed when its action was sent."""
        return [
            self.pending[e].value
            if e in self.pending
            else self.value(e, self.obs[e], self.first[e])
            for e in range(N)
        ]

    def value(self, e, obs, first):
        state = torch.zeros(2, H) if first else self.state_N[e]
        return self.policy.step(obs[None], state[None])[1].item()


# ---------------------------------------------------------------------------------------- Learning


def add_advantages(rollout, bootstrap):
    """Generalized advantage estimation, backwards; and a weight for each step: together, the K
    steps of one environment count as T at most."""
    next_value = list(bootstrap)
    next_advantage = [0.0] * N
    given = Counter(step.env for step in rollout)
    for step in reversed(rollout):
        e = step.env
        if step.done:
            next_value[e] = next_advantage[e] = 0.0
        delta = step.reward + GAMMA * next_value[e] - step.value
        step.advantage = delta + GAMMA * GAE_LAMBDA * next_advantage[e]
        step.returns = step.value + step.advantage
        step.weight = min(1.0, T / given[e])
        next_value[e] = step.value
        next_advantage[e] = step.advantage


def find_sequences(rollout):
    """The steps of each environment in order, cut where an episode begins."""
    found = []
    latest = {}  # environment: its latest sequence
    for step in rollout:
        if step.first or step.env not in latest:
            latest[step.env] = []
            found.append(latest[step.env])
        latest[step.env].append(step)
    return found


def cut_minibatches(sequences):
    """Lay sequences end to end, and cut them into mini-batches of equally many steps. The rest of a
    sequence that is cut belongs to the next mini-batch. It begins with the state that was stored
    with its first step."""
    minibatches = [[]]
    room = S // MINIBATCHES
    for sequence in sequences:
        while sequence:
            if room == 0:
                minibatches.append([])
                room = S // MINIBATCHES
            minibatches[-1].append(sequence[:room])
            sequence = sequence[room:]
            room -= len(minibatches[-1][-1])
    return minibatches


def ppo_loss(policy, sequences, mean, deviation):
    """PPO's loss of a mini-batch, each step with its weight. Mean and deviation are those of the
    rollout's advantages."""
    longest_first = sorted(sequences, key=len, reverse=True)

    def column(name):
        rows = [torch.tensor([getattr(step, name) for step in one]) for one in longest_first]
        return pack_sequence(rows).data

    obs = pack_sequence([torch.stack([step.obs for step in one]) for one in longest_first])
    state_Q = torch.stack([one[0].state for one in longest_first])
    distribution, value_M = policy.sequences(obs, state_Q)
    ratio_M = (distribution.log_prob(column("action")) - column("log_prob")).exp()
    advantage_M = (column("advantage") - mean) / deviation
    clipped_M = ratio_M.clamp(1 - CLIP, 1 + CLIP)
    objective_M = torch.minimum(ratio_M * advantage_M, clipped_M * advantage_M)
    error_M = (value_M - column("returns")) / SCALE
    loss_M = -objective_M + 0.5 * error_M**2 - ENT_COEF * distribution.entropy()
    return (column("weight") * loss_M).mean()


def update(policy, optimizer, rollout):
    advantages = [step.advantage for step in rollout]
    mean, deviation = np.mean(advantages), np.std(advantages) + 1e-8
    sequences = find_sequences(rollout)
    for _ in range(EPOCHS):
        random.shuffle(sequences)
        for minibatch in cut_minibatches(sequences):
            loss = ppo_loss(policy, minibatch, mean, deviation)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(policy.parameters(), 0.5)
            optimizer.step()


def train(sampler="ver", updates=60, seed=1):
    random.seed(seed)
    torch.manual_seed(seed)
    torch.set_num_threads(1)  # a small network
    policy = Policy()
    optimizer = torch.optim.Adam(policy.parameters(), lr=LEARNING_RATE)
    simulators = Simulators(seed)
    collector = Collector(policy, simulators, sampler)
    collecting_sec = 0.0
    episodes = 0
    for number in range(1, updates + 1):
        began_at = time.perf_counter()
        rollout, bootstrap = collector.collect()
        collecting_sec += time.perf_counter() - began_at
        add_advantages(rollout, bootstrap)
        update(policy, optimizer, rollout)
        episodes += sum(step.done for step in rollout)
        if number % 10 == 0:
            rate = number * S / collecting_sec
            length = 10 * S / max(1, episodes)
            print(f"step {number * S:,}: {rate:,.0f} steps/s, length of episodes {length:.0f}")
            episodes = 0
    simulators.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sampler", default="ver", choices=["sync", "nover", "ver"])
    parser.add_argument("--updates", type=int, default=60, help="each learns from 1,024 steps")
    parser.add_argument("--seed", type=int, default=1)
    train(**vars(parser.parse_args()))
