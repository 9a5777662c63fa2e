"""Whatever is combined on the command line: it runs, or it is refused in one line."""

import contextlib
import io
import tempfile
from pathlib import Path

import torch
import ver_ppo
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from tests.test_run import children, run_folders

INLINE = {
    "env-id": ["pointnav", "CartPole-v1", "tests.envs:Everything-v0", "tests.envs:Continuous-v0", "tests.envs:Cue-v0"],
    "num-envs": ["1", "2", "3"],
    "num-steps": ["1", "2", "7", "16"],
    "sampler": ["ver", "nover", "sync"],
    "min-requests": ["1", "2"],
    "max-requests": ["2", "3", "256"],
    "num-minibatches": ["1", "2", "4"],
    "update-epochs": ["1", "3"],
    "lstm-layers": ["1", "2"],
    "hidden-size": ["2", "8"],
    "gamma": ["0", "1"],
    "gae-lambda": ["0", "1"],
    "ent-coef": ["0", "0.1"],
    "target-entropy": ["None", "0", "0.5"],
    "vf-coef": ["0", "1"],
    "learning-rate": ["1e-30", "1e3"],
    "max-grad-norm": ["1e-9", "1e9"],
    "seed": ["0", "1099511627776"],
    "image-size": ["8", "16", "33"],
    "camera": ["depth", "rgb"],
    "sim-latency": ["0", "0.1"],
    "learner-threads": ["auto", "1", "2"],
    "eval-episodes": ["0", "1", "5"],
    "checkpoint-interval": ["1", "1000000"],
    "max-worker-restarts": ["0", "3"],
    "recurrent": ["no"],
    "norm-adv": ["yes"],
    "greedy": ["yes"],
    "debug": ["yes"],
}
REMOTE = {
    "num-workers": ["1", "2", "auto"],
    "envs-per-worker": ["1", "2", "auto"],
    "sampler": ["ver", "nover", "sync", "async"],
    "overlap": ["yes"],
    "num-inference-workers": ["1", "2"],
}
BAD = {
    "num-envs": ["0", "1025"],
    "num-workers": ["-1", "1000"],
    "num-inference-workers": ["0", "65"],
    "min-requests": ["0", "1000"],
    "num-minibatches": ["0", "5"],
    "hidden-size": ["1"],
    "lstm-layers": ["3"],
    "gamma": ["1.1", "nan"],
    "clip-coef": ["0"],
    "ent-coef": ["nan", "-1"],
    "learning-rate": ["0", "inf"],
    "seed": ["-1"],
    "image-size": ["7"],
    "learner-threads": ["0"],
    "env-timeout": ["0"],
    "bf16": ["yes"],
}


def choices(options):
    """Strategy: some of these options, each with one of its values."""
    return st.fixed_dictionaries({}, optional={name: st.sampled_from(values) for name, values in options.items()})


def one(options):
    """Strategy: one of these options."""
    return st.sampled_from([{name: value} for name, values in options.items() for value in values])


def run(options):
    """Run two updates with these options. Returns the exit status."""
    options = {"num-envs": "2", "num-steps": "4", "hidden-size": "8", "image-size": "8", "eval-episodes": "0"} | options
    rollout_steps = int(options["num-envs"]) * int(options["num-steps"])
    args = ["--total-timesteps", str(2 * rollout_steps or 1), "--device", "cpu"]
    for name, value in options.items():
        args += {"yes": [f"--{name}"], "no": [f"--no-{name}"]}.get(value, [f"--{name}", value])
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stderr(io.StringIO()) as errors:
        status = ver_ppo.main([*args, "--runs-dir", folder])
        folders = run_folders(Path(folder))
        if status == 2:
            assert len(errors.getvalue().strip().splitlines()) == 1 and not folders, errors.getvalue()
        else:
            assert status == 0, errors.getvalue()
            saved = ver_ppo.load_checkpoint(folders[0] / "checkpoint.pt")
            assert saved["progress"]["step"] == 2 * rollout_steps and saved["collectors"][0]["version"] == 2
            assert all(torch.isfinite(weights).all() for weights in saved["policy"].values())
    return status


THOROUGH = settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))


@THOROUGH
@given(choices(INLINE))
def test_every_combination_runs_or_is_refused(options):
    """Two updates and exit status 0, or one line and 2, before a run folder is made."""
    event(f"exit status {run({**options, 'num-workers': '0'})}")


@settings(THOROUGH, max_examples=15)
@given(choices(INLINE), choices(REMOTE))
def test_every_combination_with_processes(inline, remote):
    """The same where environments and inference have processes of their own; none is left."""
    event(f"exit status {run({**inline, **remote})}")
    assert children() == []


@settings(THOROUGH, max_examples=100)
@given(choices(INLINE), choices(REMOTE), one(BAD))
def test_a_bad_value_is_refused(inline, remote, bad):
    """Among whatever else is given."""
    assert run({**inline, **remote, **bad}) == 2
