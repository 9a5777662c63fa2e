"""Everything that touches a device, on a stand-in for a GPU that computes with real numbers.

The stand-in is a tensor that says it is on the device `meta`, and holds an ordinary tensor which
does the computing. So the results there must be those of the CPU. A mixture of both devices raises,
as on a GPU. Every copy from one to the other is counted, and every wait for a number.

It does not reach other processes. So the extensions `overlap` and `async` are tested by their
parts. Nor does it reach autocast and CUDA's own kernels: here, an LSTM consists of smaller
operators.
"""

import contextlib
import functools
from collections import Counter

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

import ver_ppo
from notebooks.extensions import overlap
from tests import envs

aten = torch.ops.aten
FAR = torch.device("meta")
INDEXING = (
    aten.index.Tensor,
    aten.index_put.default,
    aten.index_put_.default,
    aten._index_put_impl_.default,
)
WAITING = aten.nonzero.default, aten.masked_select.default, aten._local_scalar_dense.default
counts = Counter()  # copies to the device (up), copies back (down), waits (wait)


class Far(torch.Tensor):
    """A tensor on the other device; `near` are its numbers."""

    @staticmethod
    def __new__(cls, near):
        layout = {"strides": near.stride(), "storage_offset": near.storage_offset()}
        # a view of a weight is not an inference tensor
        with torch.inference_mode(near.is_inference()):
            return torch.Tensor._make_wrapper_subclass(
                cls, near.size(), **layout, dtype=near.dtype, device=FAR
            )

    def __init__(self, near):
        self.near = near

    @classmethod
    def __torch_dispatch__(cls, operator, types, args=(), kwargs=None):
        return compute(operator, args, kwargs or {})


class Border(TorchDispatchMode):
    """Sees tensors that are made on the other device or go there."""

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        return compute(operator, args, kwargs or {})


def compute(operator, args, kwargs):
    """An operator on tensors of both kinds: checked, counted, and computed on the CPU."""
    composite = torch._C._dispatch_has_kernel_for_dispatch_key(
        operator.name(), "CompositeImplicitAutograd"
    )
    if composite and torch.is_inference_mode_enabled():  # elsewhere it comes in its parts anyway
        with Border():
            return operator.decompose(*args, **kwargs)
    leaves = tree_leaves((args, kwargs))
    far = [leaf for leaf in leaves if isinstance(leaf, Far)]
    near = [
        leaf
        for leaf in leaves
        if isinstance(leaf, torch.Tensor) and not isinstance(leaf, Far) and leaf.dim()
    ]
    onto = kwargs.get("device")
    goes_far = onto is not None and torch.device(onto) == FAR
    comes_back = onto is not None and not goes_far
    near_args, near_kwargs = tree_map(
        lambda leaf: leaf.near if isinstance(leaf, Far) else leaf, (args, kwargs)
    )
    if goes_far:
        near_kwargs["device"] = torch.device("cpu")

    if operator is aten._to_copy.default:
        counts["up"] += goes_far and not far
        counts["down"] += comes_back and bool(far)
        result = operator(*near_args, **near_kwargs)
        return Far(result) if goes_far or (far and not comes_back) else result
    if operator is aten.copy_.default:
        target, source = args[:2]
        counts["up"] += isinstance(target, Far) and not isinstance(source, Far)
        counts["down"] += isinstance(source, Far) and not isinstance(target, Far)
        operator(*near_args, **near_kwargs)
        return target
    if not far and not goes_far:
        return operator(*args, **kwargs)
    counts["wait"] += operator in WAITING
    # a CPU index goes up by itself; a mask is a list whose length must be waited for
    if operator in INDEXING:
        indices = [index for index in args[1] if index is not None]
        counts["up"] += any(not isinstance(index, Far) for index in indices)
        counts["wait"] += any(index.dtype == torch.bool for index in indices)
        near = [leaf for leaf in near if not any(leaf is index for index in indices)]
    if far and near:
        raise RuntimeError(f"{operator}: expected all tensors to be on the same device")
    result = operator(*near_args, **near_kwargs)
    known = {id(leaf.near): leaf for leaf in far}  # of operators in place

    def send(part):
        if not isinstance(part, torch.Tensor):
            return part
        return known[id(part)] if id(part) in known else Far(part)

    return tree_map(send, result)


@pytest.fixture
def far_device(monkeypatch):
    """The other device, while a test runs."""
    monkeypatch.setattr(torch, "autocast", lambda *args, **kwargs: contextlib.nullcontext())
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    with Border():
        yield FAR
    torch.__future__.set_swap_module_params_on_conversion(before)


def start(device, more):
    """Make policy, optimizer and collector on a device, and a rollout."""
    words = "--num-envs 3 --num-steps 8 --num-minibatches 4 --hidden-size 8 --num-workers 0"
    words = f"{words} {more}".split()
    options = ver_ppo.tyro.cli(ver_ppo.Options, args=words)
    spec = ver_ppo.describe_env(options)
    torch.manual_seed(1)
    policy = ver_ppo.make_policy(spec, options)
    torch.nn.init.ones_(policy.critic.scale)  # else all values are 0
    policy.to(device)
    # Adam would make much of a gradient that is nothing but rounding
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.01)
    size = options.rollout_steps, options.num_envs, policy.state_shape
    rollout = ver_ppo.Rollout(spec, *size)
    io = ver_ppo.EnvIO(spec, options.num_envs)
    envs.Everything.observation_space.seed(0)
    workers = ver_ppo.make_workers(options, "train", spec, io)
    return policy, optimizer, rollout, ver_ppo.Collector(policy, workers, io, spec, options)


def learn(policy, optimizer, rollout, options, add_advantages=ver_ppo.add_advantages):
    """Advantages, one update, and the running statistics, in the modes of `Run.update`."""
    add_advantages(rollout, options)
    policy.train()
    ver_ppo.ppo_update(policy, optimizer, rollout, options)
    ver_ppo.update_statistics(policy, rollout, 1.0, lambda tensors: None)
    policy.eval()


def parts_of(policy):
    """All weights and buffers."""
    return [*policy.parameters(), *policy.buffers()]


def near(tensor):
    """A tensor's numbers, wherever it is."""
    return (tensor.near if isinstance(tensor, Far) else tensor).detach().numpy()


def assert_same(mine, other, atol=1e-5):
    """Two policies and their rollouts hold the same numbers."""
    for one, two in zip(parts_of(mine[0]), parts_of(other[0]), strict=True):
        np.testing.assert_allclose(near(one), near(two), rtol=1e-4, atol=atol)
    np.testing.assert_array_equal(mine[2]["obs"], other[2]["obs"])
    for name in (
        "env",
        "state",
        "action",
        "log_prob",
        "value",
        "reward",
        "done",
        "advantage",
        "norm_advantage",
        "returns",
        "weight",
    ):
        np.testing.assert_allclose(mine[2][name], other[2][name], rtol=1e-3, atol=1e-4)


TASKS = {
    "choices": "--env-id CartPole-v1",
    "no memory": "--env-id CartPole-v1 --lstm-layers 0 --no-norm-adv",
    "every observation": "--env-id tests.envs:Everything-v0 --lstm-layers 2 --target-entropy 0.5",
    "continuous": "--env-id tests.envs:Continuous-v0 --target-entropy 0",
    "depth": "--env-id pointnav --env-kwargs simulator=builtin image_size=16",
    "colours": "--env-id pointnav --env-kwargs simulator=builtin image_size=16 camera=rgb",
    "residual": "--env-id pointnav --env-kwargs simulator=builtin image_size=64"
    " --policy resnet18(cpc=True) --update-epochs 1",
}


@pytest.mark.parametrize("task", TASKS)
def test_far_is_near(far_device, task):
    """Collecting and learning twice gives the same results on both devices. There are steps that
    were in flight, truncated episodes, every kind of observation and action."""
    both = [start(device, TASKS[task]) for device in (far_device, torch.device("cpu"))]
    for policy, optimizer, rollout, c in both:
        envs.Everything.observation_space.seed(0)
        torch.manual_seed(2)
        for c.version in range(2):
            c.collect(rollout)
            learn(policy, optimizer, rollout, c.options)
    assert all(isinstance(part, Far) for part in parts_of(both[0][0]))
    # two ways to compute an LSTM differ by rounding, which this network multiplies
    assert_same(*both, atol=1e-4 if task == "residual" else 1e-5)


@pytest.mark.parametrize("task", TASKS)
def test_corrected_advantages(far_device, task):
    """V-trace is the same on both devices."""
    both = []
    for device in (far_device, torch.device("cpu")):
        policy, optimizer, rollout, c = start(device, TASKS[task])
        envs.Everything.observation_space.seed(0)
        torch.manual_seed(2)
        c.collect(rollout)
        corrected = functools.partial(overlap.add_corrected_advantages, policy)
        learn(policy, optimizer, rollout, c.options, corrected)
        both.append((policy, optimizer, rollout))
    assert_same(*both)


@pytest.mark.parametrize("task", TASKS)
def test_copies_are_counted(far_device, task):
    """Each array is a copy of its own.

    Collecting copies up, for each inference batch, the parts of the observation, the previous
    action, whether an episode begins, and the memory. It copies one array down. Learning copies the
    rollout up once: the same, and 5 columns more. Then it copies up the list of rows for each
    mini-batch, and with CPC|A 5 lists of places more. It waits once for each mini-batch, for the
    gradient's norm. An update waits twice for the scale of values, and copies one array down, with
    the logs. V-trace copies up as learning does, copies one array down for each mini-batch, and
    never waits.
    """
    policy, optimizer, rollout, c = start(far_device, TASKS[task])
    calls = Counter()

    def counted(name, function):
        def call(*inputs):
            calls[name] += 1
            return function(*inputs)

        return call

    policy.step = counted("inference", policy.step)
    c.workers.send = counted("send", c.workers.send)
    c.complete_steps = counted("complete", c.complete_steps)
    c.collect(rollout)
    counts.clear()
    calls.clear()
    c.collect(rollout)
    assert calls["inference"] >= calls["send"] == c.options.num_steps, calls
    assert calls["complete"] == c.options.num_steps, calls
    inputs = len(rollout["obs"].dtype.names) + 3
    assert counts == Counter(up=inputs * calls["inference"], down=calls["inference"]), counts

    counts.clear()
    ver_ppo.add_advantages(rollout, c.options)
    ver_ppo.ppo_update(policy, optimizer, rollout, c.options)
    minibatches = c.options.num_minibatches * c.options.update_epochs
    ups = inputs + 5 + minibatches * (6 if getattr(policy, "cpc", None) else 1)
    assert counts == Counter(up=ups, down=1, wait=minibatches + 2), counts
    counts.clear()
    overlap.reevaluate(policy, rollout, c.options)
    minibatches = c.options.num_minibatches
    assert counts == Counter(up=inputs + 5 + minibatches, down=minibatches), counts


class Operations(TorchDispatchMode):
    """Counts the operations that PyTorch dispatches."""

    def __enter__(self):
        self.count = 0
        return super().__enter__()

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        self.count += 1
        return operator(*args, **(kwargs or {}))


@pytest.mark.parametrize("task", TASKS)
@torch.no_grad()
def test_operations_are_counted(task):
    """`act` adds at most 15 operations to the policy's own; completing steps needs at most one."""
    policy, _, rollout, c = start(torch.device("cpu"), TASKS[task])
    c.workers.send = lambda env_B: None
    env_B = np.arange(3)
    c.act(env_B)
    step_B = c.observe(env_B, c.io["obs"], c.io["first"])
    operations = Operations()
    with operations:
        distribution, _, _ = c.infer(step_B)
        distribution.log_prob(distribution.sample())
    own = operations.count
    with operations:
        c.act(env_B)
    assert operations.count - own <= 15
    with operations:
        c.complete_steps(rollout, env_B, env_B)
    assert operations.count <= 1


def test_evaluation(far_device):
    """Validation episodes are played."""
    policy, _, _, c = start(far_device, TASKS["every observation"])
    spec = ver_ppo.describe_env(c.options)
    found = ver_ppo.play_episodes(policy, spec, ver_ppo.replace(c.options, eval_episodes=3))
    assert np.isfinite(found).all()


def test_a_mixture_raises(far_device):
    """The stand-in refuses a mixture, as a GPU does."""
    far = torch.zeros(2, 3, device=far_device)
    with pytest.raises(RuntimeError, match="same device"):
        far + torch.zeros(2, 3)
    counts.clear()
    assert (far[torch.tensor([1])].cpu() == 0).all()
    assert far.sum().item() == 0
    assert not far[far > 0].numel()
    assert counts == Counter(up=1, down=1, wait=2)
