"""Networks of habitat-baselines as test cases: their observations, weights drawn by name, and their
answers in 36 steps.

    python -m tests.habitat_baselines     records the answers; needs habitat-baselines

The recording is tests/habitat_baselines.json.gz: numbers and names.
"""

import base64
import gzip
import json
import math
import tempfile
import zlib
from pathlib import Path
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import torch

RECORDING = Path(__file__).with_name("habitat_baselines.json.gz")
STEPS = 36
ENVS = 3
RGB = "u1", (64, 64, 3)
DEPTH = "f4", (64, 64, 1)
LARGE = "f4", (128, 128, 1)
GOAL = {"pointgoal_with_gps_compass": ("f4", (2,))}
OBJECT = {"objectgoal": ("i8", (1,)), "compass": ("angle", (1,)), "gps": ("f4", (2,))}
ARM = {
    "articulated_agent_arm_depth": DEPTH,
    "is_holding": ("f4", (1,)),
    "joint": ("f4", (7,)),
    "obj_start_sensor": ("f4", (3,)),
}
LOG = {"use_log_std": True, "use_softplus": False, "clamp_std": True, "use_std_param": True}
SOFTPLUS = {"use_log_std": False, "use_softplus": True, "clamp_std": True, "use_std_param": False}
PLAIN = {"use_log_std": False, "use_softplus": False, "clamp_std": True, "use_std_param": True}
CASES = {  # observations, backbone, core, its layers, how continuous actions deviate
    "depth": ({"depth": DEPTH} | GOAL, "resnet18", "LSTM", 2, None),
    "large": ({"depth": LARGE} | GOAL, "resnet50", "LSTM", 2, None),
    "rgb": ({"rgb": RGB} | GOAL, "resnet18", "GRU", 1, None),
    "rgb and depth": ({"depth": DEPTH, "rgb": RGB} | GOAL, "se_resneXt50", "LSTM", 2, None),
    "resneXt50": ({"depth": DEPTH} | GOAL, "resneXt50", "LSTM", 1, None),
    "se_resnet50": ({"depth": DEPTH} | GOAL, "se_resnet50", "GRU", 2, None),
    "se_resneXt101": ({"depth": DEPTH} | GOAL, "se_resneXt101", "LSTM", 2, None),
    "blind": (GOAL, "resnet18", "GRU", 1, None),
    "goal in space": ({"pointgoal_with_gps_compass": ("f4", (3,))}, "resnet18", "LSTM", 1, None),
    "ObjectNav": ({"depth": DEPTH, "rgb": RGB} | OBJECT, "resnet50", "LSTM", 2, None),
    "ObjectNav, depth": ({"depth": DEPTH} | OBJECT, "resnet18", "GRU", 1, None),
    "ImageNav": ({"rgb": RGB, "imagegoal": RGB}, "resnet18", "LSTM", 2, None),
    "an instance": ({"rgb": RGB, "instance_imagegoal": RGB} | OBJECT, "resnet18", "GRU", 2, None),
    "arm": (ARM, "resnet18", "LSTM", 2, LOG),
    "arm, softplus": (ARM, "resnet18", "LSTM", 1, SOFTPLUS),
    "arm, plain": (ARM, "resnet18", "GRU", 1, PLAIN),
    "arm, by state": (ARM, "resnet18", "LSTM", 1, LOG | {"use_std_param": False, "tanh": False}),
}
BOUNDS = {"min_std": 1e-6, "max_std": 1.0, "min_log_std": -5.0, "max_log_std": 2.0}


def space_of(kind, shape):
    """The space of an observation, as habitat-lab has it."""
    if kind == "u1":
        return gym.spaces.Box(0, 255, shape, np.uint8)
    if kind == "i8":
        return gym.spaces.Box(0, 20, shape, np.int64)
    if kind == "angle":
        return gym.spaces.Box(-np.pi, np.pi, shape, np.float32)
    low, high = (0.0, 1.0) if len(shape) == 3 else (-3e38, 3e38)
    return gym.spaces.Box(low, high, shape, np.float32)


def action_space_of(case):
    *_, deviation = CASES[case]
    low = np.array([-20.0, 0.0, -1.0], np.float32)
    return gym.spaces.Box(low, -low + 1) if deviation else gym.spaces.Discrete(4)


def spaces_of(case):
    """The spaces of a case's observations, in the order of their names, as habitat-lab has them."""
    observations, *_ = CASES[case]
    return {key: space_of(*observations[key]) for key in sorted(observations)}


def steps_of(case):
    """36 steps of three environments: observations, previous actions, where episodes begin."""
    rng = np.random.default_rng(zlib.crc32(case.encode()))
    observations, *_ = CASES[case]
    steps = []
    for step in range(STEPS):
        obs = {}
        for key in sorted(observations):
            kind, shape = observations[key]
            if kind == "u1":
                obs[key] = rng.integers(0, 256, (ENVS, *shape), dtype=np.uint8)
            elif kind == "i8":
                obs[key] = rng.integers(0, 21, (ENVS, *shape))
            else:
                high = np.pi if kind == "angle" else 1.0
                obs[key] = rng.uniform(-high if len(shape) == 1 else 0, high, (ENVS, *shape))
                obs[key] = obs[key].astype(np.float32)
        dims = action_space_of(case).shape
        action = rng.normal(size=(ENVS, *dims)) if dims else rng.integers(0, 4, (ENVS, 1))
        first = rng.random(ENVS) < (1.0 if step == 0 else 0.1)
        steps.append((obs, action.astype(np.float32 if dims else np.int64), first))
    return steps


def weights_of(shapes):
    """Weights drawn by their names, of sizes with which signals neither die nor explode."""
    weights = {}
    for key, shape in shapes.items():
        rng = np.random.RandomState(zlib.crc32(key.encode()))
        drawn = rng.standard_normal(shape)
        if key.endswith("_var"):
            drawn = 0.002 + 0.02 * rng.random_sample(shape)  # some below the lower bound
        elif key.endswith("_count"):
            drawn = np.full(shape, 8192.0)
        elif key.endswith("_mean"):
            drawn = 0.3 + 0.1 * drawn
        elif len(shape) > 1:
            drawn = drawn * math.sqrt(2 / math.prod(shape[1:]))
        elif key.endswith("weight"):
            drawn = 1 + 0.2 * drawn
        else:
            drawn = 0.2 * drawn
        weights[key] = torch.tensor(drawn, dtype=torch.float32)
    return weights


def deviation_config(deviation):
    """Their configuration of continuous actions."""
    tanh = deviation.get("tanh", True)
    plain = {key: value for key, value in deviation.items() if key != "tanh"}
    return plain | BOUNDS | {"action_activation": "tanh" if tanh else "", "log_std_init": 0.0}


def config_of(case):
    """What their configuration says of a case."""
    *_, deviation = CASES[case]
    policy = {"action_dist": deviation_config(deviation)} if deviation else {}
    return {"habitat_baselines": {"rl": {"policy": {"main_agent": policy}}}}


def their_policy(case):
    """A case as a network of habitat-baselines, with the weights drawn by name."""
    from gym import spaces
    from habitat_baselines.rl.ddppo.policy.resnet_policy import PointNavResNetPolicy

    _, backbone, rnn, layers, deviation = CASES[case]
    ours = spaces_of(case)
    theirs = {
        key: spaces.Box(space.low, space.high, space.shape, space.dtype)
        for key, space in ours.items()
    }
    action = action_space_of(case)
    config = None
    if deviation:
        action = spaces.Box(action.low, action.high, action.shape, np.float32)
        dist = SimpleNamespace(**deviation_config(deviation))
        config = SimpleNamespace(action_distribution_type="gaussian", action_dist=dist)
    else:
        action = spaces.Discrete(4)
    policy = PointNavResNetPolicy(
        spaces.Dict(theirs),
        action,
        hidden_size=32,
        num_recurrent_layers=layers,
        rnn_type=rnn,
        backbone=backbone,
        normalize_visual_inputs="rgb" in ours,
        policy_config=config,
    ).eval()
    shapes = {key: tuple(weight.shape) for key, weight in policy.state_dict().items()}
    policy.load_state_dict(weights_of(shapes))
    return policy, shapes


def their_steps(case, policy):
    """What their network answers in each step: a distribution, values, and the step's action."""
    state = torch.zeros(ENVS, policy.net.num_recurrent_layers, 32)
    for obs, action, first in steps_of(case):
        inputs = {key: torch.from_numpy(value) for key, value in obs.items()}
        masks = torch.from_numpy(~first)[:, None]
        action = torch.from_numpy(action)
        features, state, _ = policy.net(inputs, state, action, masks)
        yield policy.action_distribution(features), policy.critic(features), action


@torch.no_grad()
def their_answers(case):
    """Shapes of their weights, and 36 x 3 x (logits, or means and deviations; value)."""
    policy, shapes = their_policy(case)
    answers = []
    for distribution, value, _ in their_steps(case, policy):
        if hasattr(distribution, "logits"):
            parts = [distribution.logits, value]
        else:
            parts = [distribution.mean, distribution.stddev, value]
        answers.append(torch.cat(parts, dim=1).numpy())
    return shapes, np.array(answers)


def their_gradients(case):
    """The gradient of the sum of all log-probabilities and values: name -> tensor. Running
    statistics appear with their values."""
    policy, _ = their_policy(case)
    steps = their_steps(case, policy)
    sum((dist.log_probs(action) + value).sum() for dist, value, action in steps).backward()
    return policy.state_dict() | {name: each.grad for name, each in policy.named_parameters()}


def their_files(folder):
    """Small checkpoints with a configuration, but without weights, by the real OmegaConf and yacs,
    as text (base64)."""
    from omegaconf import OmegaConf
    from yacs.config import CfgNode

    config = config_of("arm")
    files = {}
    for kind, node in (("omegaconf", OmegaConf.create(config)), ("yacs", CfgNode(config))):
        path = Path(folder) / f"{kind}.pth"
        torch.save({"state_dict": {}, "config": node}, path)
        files[kind] = base64.b64encode(path.read_bytes()).decode()
    return files


def load():
    """The recording: {case: (shapes, answers)}, and {kind: bytes of a file}."""
    found = json.loads(gzip.decompress(RECORDING.read_bytes()))
    cases = {}
    for case, (shapes, answers) in found["cases"].items():
        cases[case] = {key: tuple(shape) for key, shape in shapes.items()}, np.array(answers)
    return cases, {kind: base64.b64decode(text) for kind, text in found["files"].items()}


if __name__ == "__main__":
    torch.set_num_threads(1)
    cases = {}
    for case in CASES:
        shapes, answers = their_answers(case)
        print(case, answers.shape, np.abs(answers).mean(axis=(0, 1)).round(3))
        cases[case] = shapes, np.round(answers.astype(float), 6).tolist()
    with tempfile.TemporaryDirectory() as folder:
        files = their_files(folder)
    text = json.dumps({"cases": cases, "files": files}, separators=(",", ":"))
    RECORDING.write_bytes(gzip.compress(text.encode(), mtime=0))
    print(f"{RECORDING.name}: {RECORDING.stat().st_size:,} bytes")
