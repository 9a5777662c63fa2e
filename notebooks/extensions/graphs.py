"""Start all kernels of an inference step at once, on a GPU.

    python ver_ppo.py --env-id pointnav --extensions graphs

A small network's step consists of many small GPU kernels. The CPU needs longer to start them than
the GPU to compute them. A CUDA graph is a recording of such a step, which the GPU replays as a
whole. The results are the same.
"""

import copy

import torch
from torch.distributions import Distribution

import ver_ppo
from notebooks.extensions.inference import Inference
from notebooks.extensions.overlap import Overlap


class Graphs(ver_ppo.Run):
    """The policy's steps are recordings."""

    def __init__(self, options):
        """As Run.__init__."""
        if ver_ppo.choose_device(options).type != "cuda":
            raise ver_ppo.UserError("--extensions graphs: needs a GPU")
        if isinstance(self, (Overlap, Inference)):  # other processes have policies of their own
            reason = "cannot be combined with overlap, async or inference"
            raise ver_ppo.UserError(f"--extensions graphs: {reason}")
        super().__init__(options)
        self.policy.step = RecordedStep(self.policy.step)


class RecordedStep:
    """`Policy.step`, recorded for 1, 2, 4, 8 ... environments. A batch of another size is padded to
    the next of these sizes. Weights may change between replays, because the optimizer changes them
    in place. A result is valid until the next call, so all recordings can share their memory."""

    def __init__(self, step):
        self.step = step
        self.recorded = {}  # by the number of environments: graph, inputs, outputs
        self.memory = None  # the pool of all recordings; the first one makes it

    def __call__(self, obs, *more):
        """As Policy.step."""
        given = [*obs.values(), *more]
        count = len(given[0])
        size = 1 << (count - 1).bit_length()
        if size not in self.recorded:
            # environments that do not exist have zeros
            padded = [part.new_zeros(size, *part.shape[1:]) for part in given]
            own_obs = dict(zip(obs, padded))
            self.recorded[size] = self.record(own_obs, *padded[len(obs) :]), padded
        (graph, outputs), inputs = self.recorded[size]
        for own, part in zip(inputs, given):
            own[:count].copy_(part)
        graph.replay()
        distribution, *others = outputs
        return first_rows(distribution, count), *(part[:count] for part in others)

    def record(self, *inputs):
        """Record a step with these inputs, in which every replay finds its own. Returns the graph
        and the outputs."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # what libraries do at first use must not be recorded
            for _ in range(3):
                self.step(*inputs)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.memory):
            outputs = self.step(*inputs)
            _ = outputs[0].mode  # also records the probabilities, which are computed at first use
        self.memory = graph.pool()
        return graph, outputs


def first_rows(distribution, count):
    """The first distributions of a batch, as views: nothing is computed."""
    part = copy.copy(distribution)
    part._batch_shape = torch.Size([count, *distribution.batch_shape[1:]])
    for name, value in vars(distribution).items():
        if isinstance(value, torch.Tensor):
            setattr(part, name, value[:count])
        elif isinstance(value, Distribution):
            setattr(part, name, first_rows(value, count))
    return part
