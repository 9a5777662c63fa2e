"""Checkpoints of habitat-baselines: their networks give the same answers here, and become runs. All
machines compare with a recording, and those that have habitat-baselines with that, too."""

import contextlib
import itertools
import json
import pickle
import re
import sys
from argparse import Namespace
from types import ModuleType

import gymnasium as gym
import numpy as np
import pytest
import torch

import ver_ppo
from notebooks.environments import habitat
from notebooks.extensions import from_habitat, networks
from notebooks.extensions.play import Skill
from tests import habitat_baselines as theirs
from tests.helpers import ROOT, logged, make_spec, one_line, run_folders, run_here, saved
from ver_ppo import UserError

RECORDED, FILES = theirs.load()


def shown(case):
    """The observation space of a case in the adapter, the functions that convert the observations,
    and their names here."""
    polar = [key for key in habitat.POLAR if key in theirs.CASES[case][0]]
    parts = {key: habitat.show(key, space, polar) for key, space in theirs.spaces_of(case).items()}
    names = {key: "goal" if key in polar else key for key in parts}
    space = gym.spaces.Dict({names[key]: space for key, (space, _) in parts.items()})
    converters = {key: convert for key, (_, convert) in parts.items()}
    return space, converters, names


def converted(case, weights):
    """A case's policy, with the weights of a file."""
    spec = make_spec(shown(case)[0], theirs.action_space_of(case))
    arguments, hidden, layers = from_habitat.arguments_of(weights, theirs.config_of(case))
    options = ver_ppo.Options(hidden_size=hidden, lstm_layers=layers)
    policy = from_habitat.HabitatBaselines(spec, options, **arguments).eval()
    from_habitat.take(policy, weights)
    return policy


def our_steps(case, policy):
    """The policy's answer in each step: a distribution, values, and the step's action."""
    space, converters, names = shown(case)
    spec = make_spec(space, theirs.action_space_of(case))
    state = torch.zeros(theirs.ENVS, *policy.state_shape)
    for obs, action, first in theirs.steps_of(case):
        rows = []
        for e in range(theirs.ENVS):
            own = {names[key]: converters[key](values[e]) for key, values in obs.items()}
            rows.append(ver_ppo.read_observation(spec, space, own))
        inputs = {key: torch.from_numpy(np.stack([row[key] for row in rows])) for key in spec.obs}
        first_B = torch.from_numpy(first)
        action = torch.from_numpy(action)
        state = state * ~first_B[:, None, None]
        distribution, value_B, state = policy.step(inputs, action, first_B, state)
        yield distribution, value_B, action


@torch.no_grad()
def difference(case, policy):
    """The largest difference between the policy's answers and the recording. Deep networks are
    slow, so they make only the first 8 of the 36 steps."""
    _, answers = RECORDED[case]
    _, backbone, *_ = theirs.CASES[case]
    count = theirs.STEPS if backbone == "resnet18" else 8
    found = []
    for distribution, value_B, _ in itertools.islice(our_steps(case, policy), count):
        each = distribution.base_dist
        parts_of = [each.logits[:, 0]] if policy.choices else [each.mean, each.stddev]
        found.append(torch.cat([*parts_of, value_B[:, None]], dim=1).numpy())
    return np.abs(np.array(found) - answers[:count]).max()


@pytest.mark.parametrize("case", RECORDED)
def test_it_answers_as_it_did(case):
    """Logits, or means and deviations, and values equal the recording. Episodes begin between. Only
    images are normalized."""
    shapes, _ = RECORDED[case]
    policy = converted(case, theirs.weights_of(shapes))
    assert difference(case, policy) < 3e-5
    normalized = [each for each in policy.modules() if isinstance(each, ver_ppo.Statistics)]
    assert bool(normalized) == ("rgb" in theirs.CASES[case][0])


MUTANTS = {  # a fault, and a case that it changes
    "images in another order": "rgb and depth",
    "starts of episodes ignored": "depth",
    "no tanh": "arm",
    "values in another unit": "depth",
    "the goal's sign": "depth",
    "no lower bound of the variance": "rgb",
    "groups in every block": "resneXt50",
    "deviations without bounds": "arm, softplus",
}


@pytest.mark.parametrize("fault", MUTANTS)
def test_faults_are_noticed(monkeypatch, fault):
    """The comparison is not blind."""
    case = MUTANTS[fault]
    shapes, _ = RECORDED[case]
    weights = theirs.weights_of(shapes)
    if fault == "groups in every block":
        make = networks.ResNet.__init__
        no_groups = lambda *args, groups_first, **more: make(*args, **more)
        monkeypatch.setattr(networks.ResNet, "__init__", no_groups)
        with pytest.raises(UserError):
            converted(case, weights)
        return
    if fault == "images in another order":
        forward = lambda stack, obs: torch.cat([image(obs) for image in stack.images[::-1]], dim=1)
        monkeypatch.setattr(networks.Stack, "forward", forward)
    if fault == "the goal's sign":
        monkeypatch.setattr(habitat, "polar_goal", lambda value: [value[0], *np.cos(value[1:]), 0])
    if fault == "no lower bound of the variance":
        monkeypatch.setattr(from_habitat, "LEAST_VARIANCE", 0.0)
    policy = converted(case, weights)
    if fault == "values in another unit":
        policy.critic.scale.fill_(7.0)
    if fault == "starts of episodes ignored":
        step = policy.step
        policy.step = lambda obs, action, first, state: step(obs, action, first & False, state)
    if fault == "no tanh":
        policy.tanh = False
    if fault == "deviations without bounds":
        policy.bounds = None, None
    assert difference(case, policy) > 1e-2


@pytest.mark.parametrize("case", ["depth", *(case for case in RECORDED if "arm" in case)])
def test_it_plays(case):
    """A robot acts with the policy, whatever the size of its layers."""
    policy = converted(case, theirs.weights_of(RECORDED[case][0]))
    space, *_ = shown(case)
    spec = make_spec(space, theirs.action_space_of(case))
    skill = Skill(policy)
    for _ in range(2):
        action = skill.act(ver_ppo.read_observation(spec, space, space.sample()))
        assert action.shape == (spec.action_dims,)


@pytest.mark.parametrize("case", ["depth", "rgb", "blind", "arm, by state"])
def test_learning_is_acting(case):
    """The core has the same output over whole sequences as step by step."""
    shapes, _ = RECORDED[case]
    policy = converted(case, theirs.weights_of(shapes))
    features = policy.features + ver_ppo.ACTION_FEATURES
    x_MF = torch.randn(7, features)
    state_Q = torch.randn(3, *policy.state_shape)
    batch_sizes = torch.tensor([3, 2, 2])
    stepped = []
    state = state_Q
    for x_BF in x_MF.split(batch_sizes.tolist()):
        out_BH, state = policy.core.step(x_BF, state[: len(x_BF)])
        stepped.append(out_BH)
    found = policy.core.sequences(x_MF, state_Q, batch_sizes)
    torch.testing.assert_close(found, torch.cat(stepped))


# ---------------------------------------------------------------------------------------- the files


@contextlib.contextmanager
def module_with(name, *classes):
    """While this lasts, there is a module of this name, and these classes seem to be in it."""
    module = ModuleType(name)
    for each in classes:
        each.__module__ = name
        setattr(module, each.__name__, each)
    with pytest.MonkeyPatch.context() as patch:
        parts = name.split(".")
        for count in range(1, len(parts)):
            patch.setitem(sys.modules, ".".join(parts[:count]), ModuleType(parts[count - 1]))
        patch.setitem(sys.modules, name, module)
        yield


class DictConfig:
    """Like OmegaConf's class in a file: a dictionary of nodes in `_content`."""

    def __init__(self, content):
        self._metadata = {"ref_type": dict}
        self._content = content


class AnyNode:
    """Like OmegaConf's class: a value in `_val`."""

    def __init__(self, value):
        self._val = value


class CfgNode(dict):
    """Like the class of yacs: a dictionary with a state of its own."""


def nodes(value, branch, leaf):
    """A configuration made of nodes."""
    if isinstance(value, dict):
        return branch({key: nodes(each, branch, leaf) for key, each in value.items()})
    return leaf(value)


CONFIG = theirs.config_of("arm") | {"habitat": {"seed": 100, "task": {"type": "RearrangePick"}}}


def saved_file(path, kind, weights):
    """A checkpoint as some version of habitat-baselines wrote it."""
    state = {"state_dict": weights}
    omegaconf = nodes(CONFIG, DictConfig, AnyNode)
    if kind == "actor_critic":
        state["state_dict"] = {f"actor_critic.{key}": each for key, each in weights.items()}
    if kind in ("omegaconf", "actor_critic", "legacy"):
        state["config"] = omegaconf
    if kind == "yacs":
        state["config"] = nodes(CONFIG, CfgNode, lambda value: value)
    if kind == "namespace":
        state["config"] = Namespace(**CONFIG)
    if kind == "resume":
        state |= {"config": omegaconf, "optim_state": {}, "requeue_stats": {"count_checkpoints": 3}}
    with (
        module_with("omegaconf.dictconfig", DictConfig),
        module_with("omegaconf.nodes", AnyNode),
        module_with("yacs.config", CfgNode),
    ):
        torch.save(state, path, _use_new_zipfile_serialization=kind != "legacy")


KINDS = "omegaconf", "actor_critic", "legacy", "yacs", "namespace", "resume", "no configuration"


@pytest.mark.parametrize("kind", KINDS)
def test_files(tmp_path, kind):
    """Weights and configuration are found in every kind of file."""
    weights = theirs.weights_of(RECORDED["arm"][0])
    path = tmp_path / "ckpt.0.pth"
    saved_file(path, kind, weights)
    found, config = from_habitat.read(path)
    assert found.keys() == weights.keys()
    assert all(torch.equal(found[key], weights[key]) for key in weights)
    assert config == ({} if kind == "no configuration" else CONFIG)
    if config:
        arguments, hidden, layers = from_habitat.arguments_of(found, config)
        assert (hidden, layers, arguments["rnn"]) == (32, 2, "LSTM")
        assert arguments["backbone"] == "resnet18"
        assert (arguments["std"], arguments["low"], arguments["high"]) == ("log", -5.0, 2.0)


@pytest.mark.parametrize("kind", FILES)
def test_real_configurations(tmp_path, kind):
    """Files that OmegaConf and yacs themselves have written."""
    path = tmp_path / "ckpt.0.pth"
    path.write_bytes(FILES[kind])
    assert from_habitat.read(path) == ({}, theirs.config_of("arm"))


class Hostile:
    """Would write a file when it is loaded."""

    def __init__(self, path, how):
        self.path = path
        self.how = how

    def __reduce__(self):
        if self.how == "open":
            return open, (str(self.path), "w")
        if self.how == "system":
            import os

            return os.system, (f"touch {self.path}",)
        return exec, (f"open({str(self.path)!r}, 'w')",)


@pytest.mark.parametrize("how", ["open", "system", "exec"])
@pytest.mark.parametrize("zipped", [True, False])
def test_hostile_files(tmp_path, capsys, how, zipped):
    """Nothing in them is executed."""
    hostile = Hostile(tmp_path / "executed", how)
    content = {"state_dict": {"net.a": torch.zeros(1)}, "config": hostile}
    path = tmp_path / "ckpt.0.pth"
    torch.save(content, path, _use_new_zipfile_serialization=zipped)
    one_line(capsys, [str(path)], "from_habitat.py: ", from_habitat.main)
    path.write_bytes(pickle.dumps(hostile))
    one_line(capsys, [str(path)], "is not a checkpoint of habitat-baselines", from_habitat.main)
    assert not hostile.path.exists()


# ---------------------------------------------------------------------------------------- as a run

SMALL = "--env-id pointnav --env-kwargs simulator=builtin --num-workers 0 --num-envs 2"
SMALL += " --num-steps 8 --num-minibatches 1 --device cpu --total-timesteps 32"


def test_a_run(tmp_path, capsys):
    """The run's policy has the file's weights. It is evaluated and continued without the file."""
    weights = theirs.weights_of(RECORDED["depth"][0])
    path = tmp_path / "ckpt.7.pth"
    saved_file(path, "no configuration", weights)
    args = [*SMALL.split(), "--runs-dir", str(tmp_path / "runs")]
    assert from_habitat.main([str(path), *args]) == 0
    (folder,) = run_folders(tmp_path / "runs")
    assert capsys.readouterr().out.splitlines()[-1] == str(folder)
    path.unlink()
    first = saved(folder)
    assert first["step"] == first["version"] == 0
    assert first["spec"]["metrics"] == ["success", "spl", "distance_to_goal"]
    assert torch.equal(first["policy"]["critic.weight"], weights["critic.fc.weight"])
    repeated = ["--policy", first["options"]["policy"]]  # it is no bare word
    for way in ("--checkpoint", "--resume"):
        assert ver_ppo.main([way, str(folder)]) == 2
        assert f"give --policy '{repeated[1]}'" in capsys.readouterr().err
    assert ver_ppo.main(["--checkpoint", str(folder), *repeated, "--eval-episodes", "1"]) == 0
    assert ver_ppo.main(["--resume", str(folder), *repeated, "--eval-episodes", "0"]) == 0
    last = saved(folder)
    assert last["step"] == 32 and last["options"]["policy"].startswith("from_habitat(rnn=LSTM")
    assert not torch.equal(last["policy"]["critic.weight"], weights["critic.fc.weight"])


REFUSED = {
    "another core": "it has no core `rnn`",
    "another backbone": "its backbone resnet? is not one of",
    "another task": "net.visual: the network here needs (32, 1, 7, 7), the file has (32, 4, 7, 7)",
    "another size": "needs",
    "something left": "has nothing for net.heading_embedding.bias",
    "CLIP": "it may be of CLIP",
    "no task": "has no task that habitat-lab 0.3 knows: give --env-kwargs config=FILE",
    "no deviation": "does not have `action_dist`",
}


@pytest.mark.parametrize("reason", REFUSED)
def test_refusals(tmp_path, capsys, reason):
    """The converter refuses the file in one line, and makes no folder."""
    case = {"no deviation": "arm", "another task": "ObjectNav"}.get(reason, "depth")
    weights = theirs.weights_of(RECORDED[case][0])
    if reason == "another core":
        weights = {key: each for key, each in weights.items() if ".rnn." not in key}
    if reason == "another backbone":
        third = "net.visual_encoder.backbone.layer3."
        weights |= {f"{third}2.convs.0.weight": weights[f"{third}1.convs.0.weight"]}
    if reason == "another size":
        weights["critic.fc.weight"] = torch.zeros(1, 33)
    if reason == "something left":
        weights["net.heading_embedding.bias"] = torch.zeros(32)
    if reason == "CLIP":
        third = "net.visual_encoder.backbone.layer3.0"
        weights = {key: each for key, each in weights.items() if "backbone" not in key}
        weights[f"{third}.conv1.weight"] = torch.zeros(1)
    path = tmp_path / "ckpt.0.pth"
    saved_file(path, "no configuration", weights)
    args = [str(path), *SMALL.split(), "--runs-dir", str(tmp_path / "runs")]
    if reason == "no task":
        args = [args[0], *args[5:]]  # without --env-id
    one_line(capsys, args, REFUSED[reason], from_habitat.main)
    assert not list(tmp_path.glob("runs/*"))


def test_task_and_options(tmp_path):
    """Options with the same meaning are taken over. The task becomes a file, which no other run
    replaces."""
    ppo = {"num_steps": 64, "lr": 1e-4, "tau": 0.9, "use_normalized_advantage": False}
    config = {
        "habitat": {"seed": 7, "environment": {"max_episode_steps": 10}},
        "habitat_baselines": {"num_environments": 6, "total_num_steps": 2e6, "rl": {"ppo": ppo}},
    }
    assert from_habitat.options_of(config) == {
        "num_envs": 6,
        "num_steps": 64,
        "gae_lambda": 0.9,
        "learning_rate": 1e-4,
        "norm_adv": False,
        "total_timesteps": 2_000_000,
    }
    old = {"NUM_ENVIRONMENTS": 6, "TOTAL_NUM_STEPS": 2e6, "RL": {"PPO": ppo}, "TASK_CONFIG": {}}
    assert from_habitat.options_of(old) == from_habitat.options_of(config)
    ppo["use_normalized_advantage"] = "\x1b[2J"  # a stranger's text, which would be printed
    assert from_habitat.options_of(config)["norm_adv"] is True
    config["habitat_baselines"]["total_num_steps"] = -1.0  # updates are counted instead
    assert "total_timesteps" not in from_habitat.options_of(config)
    path = from_habitat.task_file(config, "ckpt.3", tmp_path)
    first, *rest = path.read_text().splitlines(keepends=True)
    assert first == "# @package _global_\n"
    assert json.loads("".join(rest)) == {"habitat": config["habitat"]}
    config["habitat"]["seed"] = 8
    assert from_habitat.task_file(config, "ckpt.3", tmp_path) != path


def test_a_constant_learning_rate(tmp_path, monkeypatch):
    """The extension in HABITAT.md works as printed."""
    page = (ROOT / "notebooks" / "HABITAT.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", page, re.S)
    (tmp_path / "constant.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    line = "--env-id CartPole-v1 --num-workers 0 --total-timesteps 192 --learning-rate 0.01"
    folder = run_here(tmp_path / "runs", line, "--extensions", "constant:Constant")
    rates = logged(folder, "charts/learning_rate")
    assert list(rates.values()) == pytest.approx([0.01] * 3)


def test_live():
    """The recording is what habitat-baselines answers."""
    pytest.importorskip("habitat_baselines", reason="habitat-baselines is not installed")
    for case, (shapes, answers) in RECORDED.items():
        there, found = theirs.their_answers(case)
        assert there == shapes
        np.testing.assert_allclose(found, answers, atol=1e-5)


@pytest.mark.parametrize("case", RECORDED)
def test_live_gradients(case):
    """A loss has the same gradient in both networks: up to 3e-6 of its norm, and up to 1.3e-2 in
    deep networks. (There, rounding moves an activation near 0 to the other side of a ReLU.)"""
    pytest.importorskip("habitat_baselines", reason="habitat-baselines is not installed")
    shapes, _ = RECORDED[case]
    policy = converted(case, theirs.weights_of(shapes))
    steps = our_steps(case, policy)
    sum((dist.log_prob(action) + value).sum() for dist, value, action in steps).backward()
    expected = converted(case, theirs.their_gradients(case))  # their gradients, laid out as ours
    for encoder in policy.encoders:
        if isinstance(encoder, networks.LinearVector) and encoder.source.key == "objectgoal":
            encoder.bias.requires_grad_(False)  # their table of categories has none
    for own, theirs_of_it in zip(policy.parameters(), expected.parameters()):
        if own.requires_grad:
            assert (own.grad - theirs_of_it).norm() < 0.03 * theirs_of_it.norm()
