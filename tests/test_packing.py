"""Sequences, mini-batches and PackedSequences against slow, obvious oracles."""

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import PackedSequence

import ver_ppo
from notebooks.extensions.virtual_clock import VirtualWorkers, build
from tests.helpers import batch_of

pytestmark = pytest.mark.quick


def random_steps(seed, segments=5, steps=60):
    """Segments and first flags of a rollout, as collecting leaves them."""
    rng = np.random.default_rng(seed)
    return rng.choice(segments, steps, p=rng.dirichlet(np.ones(segments))), rng.random(steps) < 0.15


@pytest.mark.parametrize("seed", range(20))
def test_every_step_once(seed):
    """Every step is in exactly one mini-batch. Their sizes differ by one step at most. No sequence
    crosses a border, and only cuts split sequences. Packing neither loses nor mixes steps."""
    segment_S, first_S = random_steps(seed)
    sequences = ver_ppo.find_sequences(segment_S, first_S)
    num_minibatches = [1, 2, 3, 4, 5, 6, 7, 59][seed % 8]
    sequences = [sequences[q] for q in np.random.default_rng(seed).permutation(len(sequences))]
    minibatches = ver_ppo.cut_minibatches(sequences, num_minibatches)
    sizes = [sum(map(len, minibatch)) for minibatch in minibatches]
    assert len(sizes) == num_minibatches and max(sizes) - min(sizes) == (60 % num_minibatches > 0)
    parts = [part.tolist() for minibatch in minibatches for part in minibatch]
    assert sum(parts, []) == np.concatenate(sequences).tolist()
    assert sorted(sum(parts, [])) == list(range(60))
    assert len(parts) < len(sequences) + num_minibatches
    for part in parts:
        steps = np.flatnonzero(segment_S == segment_S[part[0]]).tolist()
        # one segment, in time order, no gap
        assert part == steps[steps.index(part[0]) :][: len(part)]
        assert not first_S[part[1:]].any()  # an episode begins only where a sequence does
    for minibatch in minibatches:
        step_M, batch_sizes = ver_ppo.pack(minibatch)
        times = [time.tolist() for time in step_M.split(batch_sizes.tolist())]
        packed = [[time[q] for time in times if q < len(time)] for q in range(len(times[0]))]
        assert sorted(packed) == sorted(part.tolist() for part in minibatch)


@pytest.mark.parametrize("options", [{"lstm_layers": 1}, {"lstm_layers": 2}, {"lstm_layers": 0}])
def test_packed_lstm_is_stepping(options):
    """Over packed sequences, the network gives the numbers that it gave step by step while
    collecting, for any order and any cuts. So PPO's first ratios are 1. (Here, the policy of
    carried-over steps had the same weights.) A tail of a cut sequence needs the state before its
    own first step, also if its mini-batch has an earlier sequence of that environment."""
    seconds, endings = [1.0, 1.7, 2.3, 3.1, 6.1], {8: "terminated", 5: "truncated"}
    workers = VirtualWorkers(5, lambda e, step: seconds[e], lambda e, step: endings.get(step % 9))
    policy, rollout, c = build(workers, 5, 12, **options)
    for c.version in range(3):
        c.collect(rollout)
    assert (rollout["sent_at"] < rollout.started_at).any()
    rng = np.random.default_rng(0)
    for count in (1, 2, 2, 5, 5, 12):
        sequences = ver_ppo.find_sequences(rollout["segment"], rollout["first"])
        sequences = [sequences[q] for q in rng.permutation(len(sequences))]
        for minibatch in ver_ppo.cut_minibatches(sequences, count):
            batch = batch_of(rollout, minibatch)
            with torch.no_grad():
                distribution, value_M, _ = ver_ppo.run_sequences(policy, batch)
            step_M = batch["row"]
            assert sorted(step_M) == sorted(np.concatenate(minibatch))
            np.testing.assert_allclose(value_M, rollout["value"][step_M], rtol=1e-4, atol=1e-5)
            np.testing.assert_array_equal(batch["log_prob"], rollout["log_prob"][step_M])
            np.testing.assert_allclose(
                distribution.log_prob(batch["action"]), batch["log_prob"], rtol=1e-4, atol=1e-5
            )


@pytest.mark.parametrize("layers", [1, 2])
def test_padding_changes_nothing(layers):
    """On a CPU, the LSTM pads sequences. Outputs and gradients are those of the PackedSequence,
    which a GPU gets."""
    lengths = torch.tensor([9, 6, 6, 2, 1])
    batch_sizes = (lengths[None] > torch.arange(9)[:, None]).sum(1)
    lstm, x = ver_ppo.LSTM(7, 5, layers), torch.randn(int(lengths.sum()), 7)
    state_Q = torch.randn(5, lstm.state_rows, 5)
    memory = state_Q.transpose(0, 1).contiguous().split(layers)
    gradient, results = torch.randn(len(x), 5), []
    for function in (
        lambda x: lstm(PackedSequence(x, batch_sizes), memory)[0].data,
        lambda x: lstm.sequences(x, state_Q, batch_sizes),
    ):
        inputs = x.clone().requires_grad_()
        out = function(inputs)
        results.append((out, *torch.autograd.grad(out, (inputs, *lstm.parameters()), gradient)))
    torch.testing.assert_close(*results)
