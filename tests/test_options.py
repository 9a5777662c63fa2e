"""Whatever is combined on the command line: it runs, or it is refused in one line."""

import contextlib
import io
import re
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, Phase, event, given, settings
from hypothesis import strategies as st

import ver_ppo
from tests.helpers import nobody_left, run_folders, saved

INLINE = "env-id pointnav/8/depth pointnav/16/rgb pointnav/33/depth pointnav/64/rgb CartPole-v1"
INLINE += " tests.envs:Everything-v0 tests.envs:Continuous-v0 tests.envs:Cue-v0"
INLINE += """
    num-envs 1 2 3, num-steps 1 2 7 16, sampler ver nover sync
    num-minibatches 1 2 4, update-epochs 1 3
    wrappers latency(mean_ms=0.1) action_delay latency(mean_ms=0.1)+action_delay
    lstm-layers 0 1 2, hidden-size 2 8, norm-adv no
    policy resnet18 resnet18(cpc=True) tests.envs:Wide
    gamma 0 1, gae-lambda 0 1, ent-coef 0 0.1, target-entropy None 0 0.5, vf-coef 0 1
    learning-rate 1e-30 1, max-grad-norm 1e-9 1e9, seed 0 1099511627776, greedy yes
    learner-threads auto 1 2, eval-episodes 0 1 5, checkpoint-interval 1 1000000
    max-worker-restarts 0 3, debug yes
"""
REMOTE = "num-workers 1 2 auto, sampler ver nover sync, extensions overlap async"
BAD = """
    num-envs 0 -3 1025, num-steps 0, num-workers -1 1000, num-minibatches 0 999
    hidden-size 0, lstm-layers -1
    gamma 1.1 nan, clip-coef 0, ent-coef nan -1, learning-rate 0 inf nan, seed -1
    learner-threads 0, env-timeout 0, total-timesteps 0
"""


def table(text):
    """Such a list as a dictionary: names and their values."""
    return {
        name: values
        for name, *values in (part.split() for part in re.split("[,\n]", text) if part.strip())
    }


def some(text):
    """Strategy: some of these options, each with one of its values."""
    return st.fixed_dictionaries(
        {}, optional={name: st.sampled_from(values) for name, values in table(text).items()}
    )


def run(options):
    """Run two updates with these options. Returns the exit status, and what was said on stderr."""
    defaults = {
        "env-id": "pointnav/8/depth",
        "num-envs": "2",
        "num-steps": "4",
        "hidden-size": "8",
        "eval-episodes": "0",
    }
    options = defaults | options
    rollout_steps = int(options["num-envs"]) * int(options["num-steps"])
    args = ["--total-timesteps", str(max(1, 2 * rollout_steps)), "--device", "cpu"]
    options["env-id"], *camera = options["env-id"].split("/")
    if camera:
        args += ["--env-kwargs", "image_size={}".format(camera[0]), "camera={}".format(camera[1])]
    if "wrappers" in options:
        args += ["--wrappers", *options.pop("wrappers").split("+")]
    for name, value in options.items():
        args += {"yes": [f"--{name}"], "no": [f"--no-{name}"]}.get(value, [f"--{name}", value])
    with (
        tempfile.TemporaryDirectory() as folder,
        contextlib.redirect_stderr(io.StringIO()) as errors,
    ):
        status = ver_ppo.main([*args, "--runs-dir", folder])
        folders = run_folders(Path(folder))
        if status == 2:
            assert len(errors.getvalue().strip().splitlines()) == 1 and not folders, (
                errors.getvalue()
            )
        else:
            assert status == 0, errors.getvalue()
            content = saved(folders[0])
            assert content["step"] == 2 * rollout_steps and content["update"] == 2
            assert all(torch.isfinite(weights).all() for weights in content["policy"].values())
    return status, errors.getvalue()


THOROUGH = settings(
    max_examples=15,
    deadline=None,
    derandomize=True,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)


@THOROUGH
@given(some(INLINE))
def test_every_combination_runs_or_is_refused(options):
    """Two updates and exit status 0, or one line and 2, before a run folder is made."""
    event(f"exit status {run({**options, 'num-workers': '0'})[0]}")


@settings(THOROUGH, max_examples=6)
@given(some(INLINE), some(REMOTE))
def test_every_combination_with_processes(inline, remote):
    """The same where environments and inference have processes of their own; none is left."""
    event(f"exit status {run({**inline, **remote})[0]}")
    assert nobody_left()


@pytest.mark.parametrize(
    "name, value", [(name, value) for name, values in table(BAD).items() for value in values]
)
@settings(THOROUGH, max_examples=3)
@given(some(INLINE), some(REMOTE))
def test_a_bad_value_is_refused(name, value, inline, remote):
    """Alone, by its name; and among whatever else is given."""
    status, error = run({name: value})
    assert status == 2 and f"--{name}" in error
    assert run({**inline, **remote, name: value})[0] == 2
