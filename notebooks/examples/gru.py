"""Another core: a GRU in place of the LSTM.

    python ver_ppo.py --env-id CartPole-v1 --policy notebooks.examples.gru:GRUPolicy

A core has `state_rows`, `step` and `sequences`.
"""

from torch import nn
from torch.nn.utils.rnn import PackedSequence

import ver_ppo


class GRU(nn.GRU):
    """A core with one row of state: the GRU's hidden units."""

    state_rows = 1

    def step(self, x_BF, state_B):
        out_1BH, after_1BH = self(x_BF[None], state_B.transpose(0, 1).contiguous())
        return out_1BH[0], after_1BH.transpose(0, 1)

    def sequences(self, x_MF, state_Q, batch_sizes):
        packed = PackedSequence(x_MF, batch_sizes)
        out, _ = self(packed, state_Q.transpose(0, 1).contiguous())
        return out.data


class GRUPolicy(ver_ppo.Policy):
    """The usual policy, with a GRU in place of the LSTM."""

    def make_core(self, in_features, options):
        return GRU(in_features, options.hidden_size)
