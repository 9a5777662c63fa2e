"""Recorded inference steps (--extensions graphs)."""

import contextlib
import functools
import types

import numpy as np
import pytest
import torch

import ver_ppo
from notebooks.extensions import graphs
from tests.helpers import one_line, run_folders, run_here, small

LINE = "--env-id tests.envs:Cue-v0 --num-workers 0 --total-timesteps 256 --extensions graphs"
on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


class Repeated(graphs.RecordedStep):
    """Computes a step again where a GPU would replay it. Its results take the old ones' places."""

    def record(self, *inputs):
        outputs = self.step(*inputs)
        _ = outputs[0].mode
        repeat = functools.partial(self.repeat, inputs, outputs)
        return types.SimpleNamespace(replay=repeat), outputs

    def repeat(self, inputs, outputs):
        found = self.step(*inputs)
        _ = found[0].mode
        for old, new in zip(outputs[1:], found[1:]):
            old.copy_(new)
        for name, new in vars(found[0].base_dist).items():
            if isinstance(new, torch.Tensor):
                getattr(outputs[0].base_dist, name).copy_(new)


@pytest.mark.parametrize(
    "name", ["pointnav", "MountainCarContinuous-v0", "tests.envs:Everything-v0"]
)
@torch.inference_mode()
def test_batches_are_padded(name):
    """A batch of any size gives what the step gives, samples included, from few recordings."""
    spec, policy = ver_ppo.build(ver_ppo.Options(env_id=name, device="cpu"))
    rng = np.random.default_rng(0)
    step = Repeated(policy.step)
    for size in (3, 1, 5, 8, 7, 2, 1, 9):
        inputs = draw_inputs(spec, policy, size, rng)
        expected, *others = policy.step(*inputs)
        found, *more = step(*inputs)
        torch.testing.assert_close(more, others)
        assert found.batch_shape == expected.batch_shape
        torch.testing.assert_close(found.mode, expected.mode)
        torch.testing.assert_close(found.entropy(), expected.entropy())
        torch.manual_seed(size)
        action = found.sample()
        torch.manual_seed(size)
        torch.testing.assert_close(action, expected.sample())
        torch.testing.assert_close(found.log_prob(action), expected.log_prob(action))
    assert sorted(step.recorded) == [1, 2, 4, 8, 16]


def draw_inputs(spec, policy, size, rng):
    """Random inputs of `Policy.step`."""
    device = next(policy.parameters()).device
    obs = {}
    for key, kind, shape in spec.obs_fields:
        numbers = rng.integers(0, 2, (size, *shape)).astype(kind)
        obs[key] = torch.from_numpy(numbers).to(device)
    first = torch.rand(size, device=device) < 0.5
    state = torch.randn(size, *policy.state_shape, device=device)
    state = state.masked_fill(first[:, None, None], 0.0)
    action = torch.zeros(size, spec.action_dims, dtype=torch.int64, device=device)
    if not spec.choices:
        action = torch.randn(size, spec.action_dims, device=device)
    return obs, action, first, state


@on_gpu
@torch.inference_mode()
def test_a_recording_follows_the_weights():
    """A recorded step gives what the step gives, for each number of environments, also after the
    weights have changed. So does its distribution."""
    options = ver_ppo.Options(env_id="pointnav", env_kwargs=("simulator=builtin",), device="cuda")
    spec, policy = ver_ppo.build(options)
    rng = np.random.default_rng(0)
    step = graphs.RecordedStep(policy.step)
    for size in (3, 1, 3, 8, 1, 3):
        for weight in policy.parameters():
            weight.add_(torch.randn_like(weight), alpha=0.1)
        policy.critic.scale.fill_(2.0 + size)
        inputs = draw_inputs(spec, policy, size, rng)
        expected, *others = policy.step(*inputs)
        found, *more = step(*inputs)
        torch.testing.assert_close(more, others)
        torch.testing.assert_close(found.base_dist.logits, expected.base_dist.logits)
        torch.testing.assert_close(found.base_dist.probs, expected.base_dist.probs)
        torch.manual_seed(size)
        drawn = found.sample()
        torch.manual_seed(size)
        torch.testing.assert_close(drawn, expected.sample())
    assert sorted(step.recorded) == [1, 4, 8]


@on_gpu
def test_a_run(tmp_path):
    """Every rollout is whole, and the log-probabilities of acting are those of learning."""
    line = LINE.replace("--extensions graphs", "--device cuda --extensions graphs check")
    run_here(tmp_path, line)


@pytest.mark.parametrize("extensions", ["", "check"])
@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
def test_hint(tmp_path, monkeypatch, device, extensions):
    """The first line of a run on a GPU recommends the extension, unless there are others."""
    words = small(tmp_path, *f"--env-id tests.envs:Cue-v0 --extensions {extensions}".split())
    options = ver_ppo.parse_options(words)
    said = []
    monkeypatch.setattr(ver_ppo.Run, "say", lambda self, text: said.append(text))
    with contextlib.closing(ver_ppo.extend(ver_ppo.Run, options)(options)) as run:
        run.device = torch.device(device)
        run.open_folder()
    hint = "faster with --extensions graphs"
    assert (hint in said[-1]) == (device == "cuda:0" and not extensions)


def test_refusals(tmp_path, capsys):
    """Refused in one line, before anything is written."""
    one_line(capsys, small(tmp_path, *LINE.split()), "graphs: needs a GPU")
    assert run_folders(tmp_path) == []


@pytest.mark.parametrize("other", ["overlap", "async", "inference"])
def test_other_processes(tmp_path, capsys, monkeypatch, other):
    """Other processes have policies of their own, which would not be recorded."""
    monkeypatch.setattr(ver_ppo, "choose_device", lambda options: torch.device("cuda"))
    line = LINE.replace("--num-workers 0", "--num-workers 1")
    for order in (["graphs", other], [other, "graphs"]):
        args = small(tmp_path, *line.replace("graphs", " ".join(order)).split())
        one_line(capsys, args, "graphs: cannot be combined")
