"""Recorded inference steps (--extensions graphs)."""

import numpy as np
import pytest
import torch

import ver_ppo
from notebooks.extensions import graphs
from tests.helpers import one_line, run_folders, run_here, small

LINE = "--env-id tests.envs:Cue-v0 --num-workers 0 --total-timesteps 256 --extensions graphs"
on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


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
        obs = {}
        for key, kind, shape in spec.obs_fields:
            obs[key] = torch.from_numpy(rng.random((size, *shape)).astype(kind)).to("cuda")
        first = torch.rand(size, device="cuda") < 0.5
        state = torch.randn(size, *policy.state_shape, device="cuda")
        state = state.masked_fill(first[:, None, None], 0.0)
        inputs = obs, torch.randint(0, 4, (size, 1), device="cuda"), first, state
        expected, *others = policy.step(*inputs)
        found, *more = step(*inputs)
        torch.testing.assert_close(more, others)
        torch.testing.assert_close(found.base_dist.logits, expected.base_dist.logits)
        torch.testing.assert_close(found.base_dist.probs, expected.base_dist.probs)
        torch.manual_seed(size)
        drawn = found.sample()
        torch.manual_seed(size)
        torch.testing.assert_close(drawn, expected.sample())
    assert len(step.recorded) == 3


@on_gpu
def test_a_run(tmp_path):
    """Every rollout is whole, and the log-probabilities of acting are those of learning."""
    line = LINE.replace("--extensions graphs", "--device cuda --extensions graphs check")
    run_here(tmp_path, line)


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
