"""Sequences, mini-batches and PackedSequences against slow, obvious oracles."""

import numpy as np
import pytest
import torch
import ver_ppo
from torch.nn.utils.rnn import PackedSequence
from virtual_clock import SPEC


def random_buffer(seed, num_envs=5, steps=60):
    """Environment, first flags and completeness of a buffer as collection leaves it."""
    rng = np.random.default_rng(seed)
    env_S = rng.choice(num_envs, steps + num_envs, p=rng.dirichlet(np.ones(num_envs)))
    env_S[steps:] = rng.permutation(num_envs)  # the open records
    first_S, complete_S = rng.random(len(env_S)) < 0.15, np.arange(len(env_S)) < steps
    return env_S, first_S, complete_S


@pytest.mark.parametrize("seed", range(20))
def test_every_step_once(seed):
    """Every complete step lies in exactly one mini-batch, all are of one size, and no sequence crosses a border."""
    env_S, first_S, complete_S = random_buffer(seed)
    order_S, begin_Q = ver_ppo.find_sequences(env_S, first_S, complete_S)
    num_minibatches = [1, 2, 3, 4, 5, 6][seed % 6]
    permutation_Q = np.random.default_rng(seed).permutation(len(begin_Q))
    minibatches = ver_ppo.cut_minibatches(order_S, begin_Q, permutation_Q, num_minibatches)
    assert len(minibatches) == num_minibatches
    assert {len(slots_M) for slots_M, _ in minibatches} == {complete_S.sum() // num_minibatches}
    seen = np.concatenate([slots_M for slots_M, _ in minibatches])
    assert sorted(seen) == np.flatnonzero(complete_S).tolist()
    for slots_M, begins in minibatches:
        for sequence in np.split(slots_M, begins[1:]):
            slots = np.flatnonzero(complete_S & (env_S == env_S[sequence[0]]))
            at = slots.tolist().index(sequence[0])
            assert sequence.tolist() == slots[at : at + len(sequence)].tolist()  # one environment, in time order, no gap
            assert not first_S[sequence[1:]].any()  # an episode begins only where a sequence does


def test_sequences_are_shuffled():
    """The order of the sequences is the permutation's, and only cuts split them."""
    env_S, first_S, complete_S = random_buffer(3)
    order_S, begin_Q = ver_ppo.find_sequences(env_S, first_S, complete_S)
    whole = [sequence.tolist() for sequence in np.split(order_S, begin_Q[1:])]
    permutation_Q = np.random.default_rng(0).permutation(len(whole))
    (slots_M, begins), = ver_ppo.cut_minibatches(order_S, begin_Q, permutation_Q, 1)  # fmt: skip
    assert [sequence.tolist() for sequence in np.split(slots_M, begins[1:])] == [whole[q] for q in permutation_Q]
    for slots_M, begins in ver_ppo.cut_minibatches(order_S, begin_Q, permutation_Q, 4):
        parts = [sequence.tolist() for sequence in np.split(slots_M, begins[1:])]
        assert all(part in whole for part in parts[1:-1])


@pytest.mark.parametrize("seed", range(10))
def test_pack_sequences(seed):
    """The packed order is all first steps, then all second steps, ..., longest sequence first: as torch packs."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 9, rng.integers(1, 8))
    slots_M = rng.permutation(100)[: lengths.sum()]
    begin_Q = np.cumsum([0, *lengths[:-1]])
    got, batch_sizes, begin_slots_Q = ver_ppo.pack_sequences(slots_M, begin_Q)
    sequences = sorted(np.split(slots_M, begin_Q[1:]), key=len, reverse=True)
    expected = torch.nn.utils.rnn.pack_sequence([torch.from_numpy(sequence) for sequence in sequences])
    assert got.tolist() == expected.data.tolist() and batch_sizes.tolist() == expected.batch_sizes.tolist()
    assert begin_slots_Q.tolist() == [sequence[0] for sequence in sequences]


@pytest.mark.parametrize("options", [{"lstm_layers": 1}, {"lstm_layers": 2}, {"recurrent": False}])
def test_packed_lstm_is_stepping(options):
    """The network over packed sequences gives what stepping gave, record by record, whatever the cuts."""
    env_S, first_S, complete_S = random_buffer(11)
    policy = ver_ppo.Policy(SPEC, ver_ppo.Options(hidden_size=16, **options))
    torch.nn.init.normal_(policy.actor.weight)
    size = len(env_S)
    obs, action, first = torch.randn(size, 4), torch.randint(3, (size, 1)), torch.from_numpy(first_S)
    value, log_prob = torch.zeros(size), torch.zeros(size)
    state, prev_action = torch.zeros(size, *policy.state_shape), torch.zeros(size, 1, dtype=torch.int64)
    current, previous = torch.randn(5, *policy.state_shape), torch.randint(3, (5, 1))
    with torch.no_grad():
        for slot in range(size):
            e, one = env_S[slot], slice(slot, slot + 1)
            state[slot], prev_action[slot] = current[e] * ~first[slot], previous[e]
            distribution, value[one], after = policy.step({"obs": obs[one]}, prev_action[one], first[one], state[one])
            log_prob[one], current[e], previous[e] = distribution.log_prob(action[one]), after[0], action[slot]
    order_S, begin_Q = ver_ppo.find_sequences(env_S, first_S, complete_S)
    for num_minibatches in (1, 2, 5, 12):
        permutation_Q = np.random.default_rng(num_minibatches).permutation(len(begin_Q))
        for minibatch in ver_ppo.cut_minibatches(order_S, begin_Q, permutation_Q, num_minibatches):
            slots_M, batch_sizes, begin_slots_Q = ver_ppo.pack_sequences(*minibatch)
            with torch.no_grad():
                distribution, value_M, _ = policy.sequences(
                    {"obs": obs[slots_M]}, prev_action[slots_M], first[slots_M], state[begin_slots_Q], batch_sizes
                )
            torch.testing.assert_close(value_M, value[slots_M], rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(distribution.log_prob(action[slots_M]), log_prob[slots_M], rtol=1e-4, atol=1e-5)


def test_trajectories_are_sequences_of_their_own():
    """Behind an open record another trajectory begins, in whichever order the two were finished."""
    env, first = np.array([3, 3, 3, 3, 3, 3, 1, 1]), np.zeros(8, bool)
    complete = np.array([True, True, False, True, True, False, True, False])
    order_S, begin_Q = ver_ppo.find_sequences(env, first, complete)
    assert order_S.tolist() == [6, 0, 1, 3, 4] and begin_Q.tolist() == [0, 1, 3]


def test_packed_lstm_is_torchs():
    """What runs on a CPU gives the outputs and gradients of nn.LSTM on the same PackedSequence, which runs on a GPU."""
    lengths = torch.tensor([9, 6, 6, 2, 1])
    batch_sizes = (lengths[None] > torch.arange(9)[:, None]).sum(1)
    lstm, x = torch.nn.LSTM(7, 5), torch.randn(int(lengths.sum()), 7)
    hidden, cell, gradient = torch.randn(5, 5), torch.randn(5, 5), torch.randn(len(x), 5)
    results = []
    for function in (
        lambda x: lstm(PackedSequence(x, batch_sizes), (hidden[None], cell[None]))[0].data,
        lambda x: ver_ppo.packed_lstm(x, batch_sizes, hidden, cell, *lstm.all_weights[0]),
    ):
        inputs = x.clone().requires_grad_()
        out = function(inputs)
        results.append((out, *torch.autograd.grad(out, (inputs, *lstm.parameters()), gradient)))
    for one, two in zip(*results):
        torch.testing.assert_close(one, two)


def test_arranging_is_fast():
    """A rollout of 128 x 16 steps is arranged far within the paper's 10 ms (generous here: the machine may be busy)."""
    import time

    env_S, first_S, complete_S = random_buffer(0, num_envs=16, steps=2048)
    times = []
    for _ in range(5):
        began = time.perf_counter()
        order_S, begin_Q = ver_ppo.find_sequences(env_S, first_S, complete_S)
        for _ in range(3):
            for minibatch in ver_ppo.cut_minibatches(order_S, begin_Q, torch.randperm(len(begin_Q)).numpy(), 2):
                ver_ppo.pack_sequences(*minibatch)
        times.append(time.perf_counter() - began)
    assert min(times) < 0.01
