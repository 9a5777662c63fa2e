"""The command line. Any combination of options runs, or is refused in one line. Names of code and
their arguments are read."""

import contextlib
import io
import random
import re
import tempfile
from pathlib import Path

import pytest
import torch

import ver_ppo
from tests.helpers import nobody_left, run_folders, saved

# PointNav's image size, its camera, and a policy that needs such images
INLINE = "env-id pointnav/8/depth pointnav/16/rgb pointnav/33/depth pointnav/64/rgb CartPole-v1"
INLINE += " pointnav/64/rgb/resnet18 pointnav/64/depth/resnet18(cpc=True)"
INLINE += " tests.envs:Everything-v0 tests.envs:Continuous-v0 tests.envs:Cue-v0"
INLINE += """
    num-envs 1 2 3, num-steps 1 2 7 16, sampler ver nover sync
    num-minibatches 1 2 4, update-epochs 1 3
    wrappers latency(mean_ms=0.1) action_delay latency(mean_ms=0.1)+action_delay
    lstm-layers 0 1 2, hidden-size 2 8, norm-adv no
    policy tests.envs:Wide
    gamma 0 1, gae-lambda 0 1, ent-coef 0 0.1, target-entropy None 0 0.5, vf-coef 0 1
    learning-rate 1e-30 1, max-grad-norm 1e-9 1e9, seed 0 1099511627776, greedy yes
    learner-threads auto 1 2, eval-episodes 0 1 5, checkpoint-interval 1 1000000
    max-worker-restarts 0 3, extensions check
"""
REMOTE = "num-workers 1 2 auto, sampler ver nover sync, extensions overlap async overlap+check"
BAD = """
    num-envs 0 -3 1025, num-steps 0, num-workers -1 4, num-minibatches 0 999
    hidden-size 0, lstm-layers -1
    gamma 1.1 nan, clip-coef 0, ent-coef nan -1, learning-rate 0 inf nan, seed -1
    learner-threads 0, env-timeout 0, total-timesteps 0
"""


def table(text):
    """Such a list as a dictionary: names and their values."""
    parts = [part.split() for part in re.split("[,\n]", text) if part.strip()]
    return {name: values for name, *values in parts}


def some(seed, *texts):
    """About half of these options, each with one of its values. Later texts win."""
    rng = random.Random(seed)
    chosen = {}
    for text in texts:
        for name, values in table(text).items():
            if rng.random() < 0.5:
                chosen[name] = rng.choice(values)
    return chosen


def run(options):
    """Run two updates with these options. Returns the exit status and the text on stderr."""
    defaults = "env-id pointnav/8/depth, num-envs 2, num-steps 4, hidden-size 8, eval-episodes 0"
    defaults += ", num-minibatches 2, learner-threads 1"
    options = {name: values[0] for name, values in table(defaults).items()} | options
    rollout_steps = int(options["num-envs"]) * int(options["num-steps"])
    args = ["--total-timesteps", str(max(1, 2 * rollout_steps)), "--device", "cpu"]
    options["env-id"], *more = options["env-id"].split("/")
    if more:
        args += ["--env-kwargs", f"image_size={more[0]}", f"camera={more[1]}"]
    if more[2:]:  # it is slow
        options |= {"policy": more[2], "eval-episodes": "0"}
    for name in options.keys() & {"wrappers", "extensions"}:
        args += [f"--{name}", *options.pop(name).split("+")]
    for name, value in options.items():
        args += {"yes": [f"--{name}"], "no": [f"--no-{name}"]}.get(value, [f"--{name}", value])
    errors = io.StringIO()
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stderr(errors):
        status = ver_ppo.main([*args, "--runs-dir", folder])
        folders = run_folders(Path(folder))
        told = errors.getvalue()
        if status == 2:
            assert len(told.strip().splitlines()) == 1 and not folders, told
        else:
            assert status == 0, told
            content = saved(folders[0])
            assert content["step"] == 2 * rollout_steps and content["version"] == 2
            assert all(torch.isfinite(weights).all() for weights in content["policy"].values())
    return status, told


@pytest.mark.parametrize("seed", range(12))
def test_every_combination_runs_or_is_refused(seed):
    """Two updates and exit status 0; or one line and 2, before a run folder is made."""
    run({**some(seed, INLINE), "num-workers": "0"})


@pytest.mark.parametrize("seed", range(4))
def test_every_combination_with_processes(seed):
    """The same if environments and inference have processes of their own. None of them is left."""
    run({"num-workers": "1", **some(seed, INLINE, REMOTE)})
    assert nobody_left()


BAD_VALUES = [(name, value) for name, values in table(BAD).items() for value in values]


@pytest.mark.parametrize("name, value", BAD_VALUES)
def test_a_bad_value_is_refused(name, value):
    """Alone, by its name; and among any other options."""
    status, error = run({name: value})
    assert status == 2 and f"--{name}" in error
    for seed in range(2):
        assert run({**some(seed, INLINE, REMOTE), name: value})[0] == 2


ARGUMENTS = {  # the text between the brackets, and its arguments
    "mean_ms=20": {"mean_ms": 20},
    "mean_ms=20, spread=0.5": {"mean_ms": 20, "spread": 0.5},
    "mean_ms=20,spread=0.5": {"mean_ms": 20, "spread": 0.5},
    "mean_ms = 20 , spread = 0.5": {"mean_ms": 20, "spread": 0.5},
    "indices=(1,3)": {"indices": (1, 3)},
    "indices=(1, 3), height=84": {"indices": (1, 3), "height": 84},
    "sizes=[1, 2], names={'a': 1, 'b': 2}": {"sizes": [1, 2], "names": {"a": 1, "b": 2}},
    "size=(2, (3, 4)), fast=true": {"size": (2, (3, 4)), "fast": True},
    "fast=false, slow=False, none=null": {"fast": False, "slow": False, "none": None},
    "file=runs/a b/checkpoint.pt": {"file": "runs/a b/checkpoint.pt"},
    "file=a,b.pt, height=3": {"file": "a,b.pt", "height": 3},
    "text='a, b=c'": {"text": "a, b=c"},
    'text="it\'s, b=c", height=3': {"text": "it's, b=c", "height": 3},
    "text='(1'": {"text": "(1"},
    "text=')', height=3": {"text": ")", "height": 3},
    "formula=a==b": {"formula": "a==b"},
    "number=-1e-3, text=e3": {"number": -1e-3, "text": "e3"},
}


@pytest.mark.parametrize("inside", ARGUMENTS)
def test_arguments_in_brackets(inside):
    """A comma separates arguments if KEY= follows it, outside quotation marks."""
    found, arguments = ver_ppo.find(f"builtins:dict({inside})", "--policy")
    assert found is dict and arguments == ARGUMENTS[inside]


BAD_BRACKETS = "()  (3)  (height)  (=3)  (height=3  (height=3)x  (height='3)  (3,height=3)"


@pytest.mark.parametrize("after", BAD_BRACKETS.split())
def test_brackets_that_cannot_be_read(after):
    """The message shows their form."""
    with pytest.raises(ver_ppo.UserError, match=r"must be builtins:dict\(KEY=VALUE, ...\)"):
        ver_ppo.find(f"builtins:dict{after}", "--policy")


def test_arguments_of_an_environment():
    """--env-kwargs takes one KEY=VALUE in each word. Brackets are not for --env-id."""
    words = ["limit=5", "name=a=b", "size=(2, 3)", "text='5'", "path=a,b"]
    read = {"limit": 5, "name": "a=b", "size": (2, 3), "text": "5", "path": "a,b"}
    assert ver_ppo.read_arguments(words) == read
    for word in ("limit", "=5", ""):
        with pytest.raises(ver_ppo.UserError, match="must be KEY=VALUE"):
            ver_ppo.read_arguments([word])
    with pytest.raises(ver_ppo.UserError, match="give arguments by --env-kwargs KEY=VALUE"):
        ver_ppo.find("tests.envs:Count-v0(limit=5)", "--env-id")


@pytest.mark.parametrize("short", ver_ppo.ALIASES)
def test_short_names(short):
    """The thing that each of them names exists."""
    option = "--env-id" if ver_ppo.ALIASES[short].endswith("-v0") else "--policy"
    found, arguments = ver_ppo.find(short, option)
    assert found is not None and arguments == {}
