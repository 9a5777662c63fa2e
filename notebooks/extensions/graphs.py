"""Start all kernels of an inference step at once, on a GPU.

    python ver_ppo.py --env-id pointnav --extensions graphs

A small network's step consists of many small GPU kernels. The CPU needs longer to start them than
the GPU to compute them. A CUDA graph is a recording of such a step, which the GPU replays as a
whole. The results are the same.
"""

import torch

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
    """`Policy.step`, recorded once for each number of environments. Weights may change between
    replays, because the optimizer changes them in place. A result is valid until the next call."""

    def __init__(self, step):
        self.step = step
        self.recorded = {}  # by the number of environments: graph, inputs, outputs

    def __call__(self, obs, *more):
        """As Policy.step."""
        size = len(more[0])
        if size not in self.recorded:
            self.recorded[size] = self.record(obs, *more)
        graph, inputs, outputs = self.recorded[size]
        for own, given in zip(inputs, [*obs.values(), *more]):
            own.copy_(given)
        graph.replay()
        return outputs

    def record(self, obs, *more):
        """Record a step with copies of these inputs, in which every replay finds its inputs."""
        obs = {key: part.clone() for key, part in obs.items()}
        more = [part.clone() for part in more]
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # what libraries do at first use must not be recorded
            for _ in range(3):
                self.step(obs, *more)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outputs = self.step(obs, *more)
            _ = outputs[0].mode  # also records the probabilities, which are computed at first use
        return graph, [*obs.values(), *more], outputs
