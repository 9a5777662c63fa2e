"""Encoders of the papers, running statistics, CPC|A, delayed actions, transfer."""

import math
import threading
import time
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
import torch

import ver_ppo
from notebooks.extensions import networks, wrappers
from tests import envs
from tests.helpers import (
    busy_shares,
    logged,
    make_environment,
    make_spec,
    one_line,
    run_folders,
    run_here,
    saved,
    small,
)

RESIDUAL = "resnet18_plain", "resnet18", "se_resnext50"
DEPTH = gym.spaces.Box(0, 1, (128, 128, 1), np.float32)
RGB = gym.spaces.Box(0, 255, (128, 128, 3), np.uint8)
GOAL = gym.spaces.Box(-np.inf, np.inf, (3,), np.float32)
NEAR = gym.spaces.Box(-9, 9, (3,), np.float32)


def shown(obs, rows=None):
    """A rollout with these observations (a tensor for each part), complete up to `rows`."""
    obs = {key: part.numpy() for key, part in obs.items()}
    fields = [(key, part.dtype, part.shape[1:]) for key, part in obs.items()]
    steps = np.zeros(len(next(iter(obs.values()))), [("obs", fields)])
    for key, part in obs.items():
        steps["obs"][key] = part
    complete = steps[:rows]
    return SimpleNamespace(complete=complete, rows=len(complete))


def build(observations, action=gym.spaces.Discrete(4), policy="ver_ppo:Policy", **options):
    """A policy in evaluation mode, as when it acts. Its encoders are in the order of the
    observations' names."""
    spec = make_spec(gym.spaces.Dict(observations), action)
    policy = ver_ppo.make_policy(spec, ver_ppo.Options(policy=policy, **options))
    torch.nn.init.ones_(policy.critic.scale)  # else all values are 0
    return policy


def inputs(**observations):
    """The inputs of encoders for these observations, by name."""
    spec = make_spec(gym.spaces.Dict(observations), gym.spaces.Discrete(4))
    return {key: ver_ppo.Input(key, spec) for key in observations}


def as_tensors(observations, samples):
    """Samples of observations, as the network gets them."""
    space = gym.spaces.Dict(observations)
    spec = make_spec(space, gym.spaces.Discrete(4))
    parts = [ver_ppo.read_observation(spec, space, each) for each in samples]
    return {key: torch.from_numpy(np.stack([part[key] for part in parts])) for key in spec.obs}


def sample(observations, batch):
    """Random observations, as the network gets them."""
    space = gym.spaces.Dict(observations)
    return as_tensors(observations, [space.sample() for _ in range(batch)])


def count(*shapes):
    """Weights of convolutions (in, out, kernel, groups), each with its GroupNorm."""
    return sum(i // g * o * k * k + 2 * o for i, o, k, g in shapes)


def by_hand(name, channels):
    """The number of weights up to the last feature map, from the papers."""
    if name == "resnet18":
        # patches of 4x4; stages of 2 blocks of two 3x3; before three stages GroupNorm, 2x2 stride 2
        stages = sum(2 * (count((c, c, 3, 1), (c, c, 3, 1)) + c) for c in (32, 64, 128, 256))
        between = sum(2 * c + 4 * c * 2 * c + 2 * c for c in (32, 64, 128))
        return count((channels, 32, 4, 1)) + stages + between
    if name == "resnet18_plain":
        # 7x7; stages of 2 blocks of two 3x3; the first of three stages halves, beside a 1x1
        pairs = sum(count((c, c, 3, 1), (c, c, 3, 1)) for c in (32, 64, 128, 256))
        halving = sum(
            count((c, 2 * c, 3, 1), (2 * c, 2 * c, 3, 1), (c, 2 * c, 1, 1)) for c in (32, 64, 128)
        )
        return count((channels, 32, 7, 1)) + pairs + count((32, 32, 3, 1), (32, 32, 3, 1)) + halving
    blocks = {
        "resnet50": (3, 4, 6, 3),
        "se_resnext50": (3, 4, 6, 3),
        "se_resnext101": (3, 4, 23, 3),
    }[name]
    wide, groups, squeeze = (1, 1, 0) if name == "resnet50" else (2, 16, 1)
    total, channels = count((channels, 32, 7, 1)), 32
    for planes, number in zip(
        (32, 64, 128, 256), blocks
    ):  # blocks of 1x1, 3x3, 1x1; the first changes the channels
        out, width = 4 * planes, planes * wide
        first = count((channels, width, 1, 1), (channels, out, 1, 1)) + (number - 1) * count(
            (out, width, 1, 1)
        )
        block = count((width, width, 3, groups), (width, out, 1, 1)) + squeeze * (
            2 * out * (out // 16) + out // 16 + out
        )
        total, channels = total + first + number * block, out
    return total


@pytest.mark.parametrize("name", networks.BACKBONES)
def test_backbones_by_hand(name):
    """The number of weights and the shape of the last feature map follow the papers' figures."""
    images = networks.Stack([*inputs(rgb=RGB, depth=DEPTH).values()])
    net = networks.ResNet(images, 512, **networks.BACKBONES[name])
    assert sum(p.numel() for p in net.backbone.parameters()) == by_hand(name, 4)
    channels = 256 if name.startswith("resnet18") else 1024
    assert net.backbone(torch.zeros(2, 4, 128, 128)).shape == (2, channels, 2, 2)
    assert net.compress[0].out_channels * 2 * 2 == 2048 == net.out.in_features
    assert net(sample({"rgb": RGB, "depth": DEPTH}, 2)).shape == (2, 512)


def test_first_convolutions():
    """As in DD-PPO, pooling halves 256 x 256 pixels. The last feature map, 4 x 4 pixels, is
    compressed to 128 x 4 x 4."""
    image = inputs(depth=gym.spaces.Box(0, 1, (256, 256, 1), np.float32))["depth"]
    net = networks.ResNet(image, 512, **networks.BACKBONES["resnet50"])
    assert isinstance(net.backbone[0], torch.nn.AvgPool2d)
    assert net.compress(net.backbone(torch.zeros(1, 1, 256, 256))).shape == (1, 128 * 4 * 4)


ALL = {"rgb": RGB, "depth": DEPTH, "goal": GOAL}
EVERYTHING = envs.Everything.observation_space.spaces
CASES = [
    (ALL, gym.spaces.Discrete(4), policy)
    for policy in ("ver_ppo:Policy", *(f"{name}(cpc=True)" for name in RESIDUAL))
]
CASES += [
    (EVERYTHING, envs.Everything.action_space, "ver_ppo:Policy"),
    ({"goal": GOAL}, envs.Continuous.action_space, "resnet18(cpc=True)"),
]


def test_choices_and_bytes():
    """Choices enter as one-hot vectors, one for each dimension. Bytes enter as numbers."""
    space = gym.spaces.MultiDiscrete([[2, 3], [1, 4]], start=[[0, 5], [0, -2]])
    hands = [space.sample() for _ in range(20)]
    found = as_tensors({"hand": space}, [{"hand": hand} for hand in hands])
    parts = np.stack([np.ravel(hand - space.start) for hand in hands])
    hot = [np.eye(count)[parts[:, i]] for i, count in enumerate([2, 3, 1, 4])]
    reader = inputs(hand=space)["hand"]
    assert (reader(found).numpy() == np.hstack(hot)).all()
    ram = {"ram": gym.spaces.Box(0, 255, (3,), np.uint8)}
    found = as_tensors(ram, [{"ram": np.array([0, 51, 255], np.uint8)}])
    assert inputs(**ram)["ram"].read(found).tolist() == [[0, 51, 255]]


@pytest.mark.parametrize("observations, action_space, name", CASES)
def test_gradients_reach_every_weight(observations, action_space, name):
    """Each observation has its own encoder. (In the papers' networks, RGB and depth of one size
    share one.) The gradient of CPC|A reaches its GRU."""
    policy = build(observations, action_space, name, hidden_size=16, lstm_layers=2)
    obs = sample(observations, 6)
    sizes = torch.tensor([2, 2, 2])
    first = torch.tensor([True] * 2 + [False] * 4)
    action = torch.tensor(np.stack([np.ravel(action_space.sample()) for _ in range(6)]))
    action = action.float() if action.is_floating_point() else action
    distribution, value, memory = policy.sequences(
        obs, action, first, torch.randn(2, *policy.state_shape), sizes
    )
    batch = {"action": action, "batch_sizes": sizes}
    loss = distribution.log_prob(action).sum() + value.sum() + policy.auxiliary_loss(*memory, batch)
    loss.backward()
    learning = {name: p for name, p in policy.named_parameters() if p.requires_grad}
    assert [name for name, p in learning.items() if p.grad is None or not p.grad.any()] == []
    if observations is ALL:
        if name == "ver_ppo:Policy":
            of_depth, of_goal, of_rgb = policy.encoders
            read = of_depth.source, of_rgb.source
        else:
            of_goal, of_images = policy.encoders
            read = of_images.source.images
        assert of_goal.source.key == "goal"
        assert [image.key for image in read] == ["depth", "rgb"]
        other = policy.encode({**obs, "rgb": 255 - obs["rgb"]}, action, first)
        assert not torch.equal(other, policy.encode(obs, action, first))


def test_running_statistics():
    """RGB, and vectors without bounds, are normalized by mean and deviation of all rollouts so far,
    each with its weight. Depth, bounded vectors and the vectors of the papers' networks are not."""
    policy = build({"rgb": RGB, "depth": DEPTH, "goal": GOAL, "near": NEAR}, hidden_size=16)
    policy.train()
    rng = np.random.default_rng(0)
    images, goals = [], []
    weights = 1.0, 0.5, 0.25
    for k, weight in enumerate(weights):
        rgb = rng.integers(50 * k, 50 * k + 90, (8, 128, 128, 3), dtype=np.uint8)
        depth = rng.random((8, 128, 128, 1), np.float32)
        # far from 0 and close together: their squares would differ in the seventh digit
        goal = rng.normal([1e4, -3.0, 0.0], [1.0, 0.1, 50.0], (8, 3)).astype(np.float32)
        obs = {"rgb": rgb, "depth": depth, "goal": goal, "near": goal}
        obs = {key: torch.from_numpy(part) for key, part in obs.items()}
        ver_ppo.update_statistics(policy, shown(obs), weight, lambda tensors: None)
        images.append(rgb / 255)
        goals.append(goal.astype(np.float64))

    def normalized(parts):
        """The last part, normalized by the mean and deviation of all parts."""
        axes = tuple(range(parts[0].ndim - 1))
        mean = np.average([part.mean(axis=axes) for part in parts], axis=0, weights=weights)
        square = [((part - mean) ** 2).mean(axis=axes) for part in parts]
        return (parts[-1] - mean) / np.sqrt(np.average(square, axis=0, weights=weights))

    of_depth, of_goal, of_near, of_rgb = policy.encoders
    found = of_rgb.source(obs).permute(0, 2, 3, 1)
    np.testing.assert_allclose(found.numpy(), normalized(images), atol=2e-3)
    found = of_goal.source(obs)
    np.testing.assert_allclose(found.numpy(), normalized(goals), atol=2e-3)
    assert torch.equal(of_depth.source(obs)[:, 0], obs["depth"][..., 0])
    plain = networks.LinearVector(inputs(goal=GOAL)["goal"])
    for encoder in (of_near, plain):
        assert torch.equal(encoder.source(obs), obs["goal"])
    state = policy.state_dict()  # is copied to the policy that acts, and saved in checkpoints
    learned = dict(policy.named_parameters())
    for encoder in (1, 3):
        for name in ("mean_C", "variance_C", "total_weight"):
            name = f"encoders.{encoder}.source.normalize.{name}"
            assert name in state and name not in learned


def test_the_image_of_a_goal_has_an_encoder_of_its_own():
    """It is not stacked on the camera's images, although it has the same size."""
    observations = {"depth": DEPTH, "imagegoal": RGB, "rgb": RGB}
    policy = build(observations, policy="resnet18", hidden_size=16)
    keys = [[image.key for image in each.source.images] for each in policy.encoders]
    assert keys == [["depth", "rgb"], ["imagegoal"]]


def test_statistics_of_a_whole_rollout():
    """256 steps, drawn from the whole rollout, and not from the rows after it."""
    policy = build({"goal": GOAL}, hidden_size=16).train()
    goal = torch.arange(4096.0)[:, None].expand(-1, 3)
    rollout = shown({"goal": goal}, rows=2048)
    ver_ppo.update_statistics(policy, rollout, 1.0, lambda tensors: None)
    (of_goal,) = policy.encoders
    # the mean of 256 numbers within 0..2047, up to four of its standard errors
    assert abs(of_goal.source.normalize.mean_C[0] - 1023.5) < 4 * 2048 / math.sqrt(12 * 256)


@pytest.mark.parametrize("frozen", ["policy", "encoder"])
def test_statistics_stay_in_evaluation_mode(frozen):
    """The statistics do not move while the policy acts. If one encoder is in evaluation mode, only
    its statistics stay."""
    policy = build({"rgb": RGB, "goal": GOAL}, hidden_size=16).train()
    _, of_rgb = policy.encoders
    (policy if frozen == "policy" else of_rgb).eval()
    before = {name: part.clone() for name, part in policy.named_buffers()}
    obs = {"rgb": torch.full((8, 128, 128, 3), 9, dtype=torch.uint8), "goal": torch.randn(8, 3)}
    ver_ppo.update_statistics(policy, shown(obs), 1.0, lambda tensors: None)
    moved = {name for name, part in policy.named_buffers() if not torch.equal(part, before[name])}
    names = "mean_C", "variance_C", "total_weight"
    of_goal = {f"encoders.0.source.normalize.{name}" for name in names}
    assert moved == (set() if frozen == "policy" else of_goal)


@pytest.mark.parametrize(
    "bounds, shape, unit",
    [
        ((0, 1e5), (3,), 1e5),
        ((0, 3000), (3,), 3000),
        ((0, math.inf), (3,), 4e-6),  # of any size
        ((0, math.inf), (16, 16, 1), 3000),  # depth in millimetres
        ((0, 1000), (16 * 16,), 1000),
    ],
)
def test_numbers_of_any_size(bounds, shape, unit):
    """Without bounds, or with bounds beyond 30, numbers are brought to mean 0 and deviation 1, in
    images and vectors. Within 30 they stay as they are."""
    rng = np.random.default_rng(0)
    part = torch.from_numpy(rng.uniform(0, unit, (256, *shape)).astype(np.float32))
    obs = {"part": part}
    for high in (bounds[1], 30):
        policy = build({"part": gym.spaces.Box(bounds[0], high, shape)}, hidden_size=16).train()
        ver_ppo.update_statistics(policy, shown(obs), 1.0, lambda tensors: None)
        (encoder,) = policy.encoders
        found = encoder.source(obs)
        if high == 30:
            assert found.ravel().tolist() == part.ravel().tolist()
        else:
            assert abs(found.mean()) < 1e-3 and abs(found.std() - 1) < 1e-2


@pytest.mark.parametrize("num_envs, num_steps", [(2, 128), (4, 200), (9, 230)])
def test_statistics_are_of_all_environments(num_envs, num_steps):
    """Also if rows are in lock-step order, so that every n-th one belongs to the same environment.
    """
    policy = build({"goal": GOAL}, hidden_size=16).train()
    env_S = np.tile(np.arange(num_envs), num_steps)
    part = torch.from_numpy(env_S.astype(np.float32))[:, None].expand(-1, 3)
    ver_ppo.update_statistics(policy, shown({"goal": part}), 1.0, lambda tensors: None)
    statistics = policy.encoders[0].source.normalize
    assert statistics.mean_C.numpy() == pytest.approx(np.full(3, env_S.mean()), rel=0.2)
    assert statistics.variance_C.numpy() == pytest.approx(np.full(3, env_S.var()), rel=0.3)


def test_cpc_needs_a_memory():
    """Without one, PPO learns from single steps, which have no later steps to predict."""
    with pytest.raises(ver_ppo.UserError, match="--lstm-layers 1"):
        build({"goal": GOAL}, policy="resnet18(cpc=True)", hidden_size=8, lstm_layers=0)


@pytest.mark.parametrize("seed", range(10))
def test_cpc_stays_in_its_episode(seed):
    """Starts, actions and futures belong to one episode of one environment, in order, at most
    CPC_HORIZON steps apart."""
    rng = np.random.default_rng(seed)
    env, first = rng.integers(4, size=200), rng.random(200) < rng.choice([0.02, 0.3])
    steps, batch_sizes = ver_ppo.pack(ver_ppo.find_sequences(env, first))
    steps, episode, time_of = steps.numpy(), np.zeros(200, int), np.zeros(200, int)
    for e in range(4):
        episode[env == e] = 1000 * e + first[env == e].cumsum()
    for number in set(episode):
        time_of[episode == number] = np.arange((episode == number).sum())
    start, actions, later, future = (part.numpy() for part in networks.cpc_futures(batch_sizes))
    assert len(start) and (episode[steps[future]] == episode[steps[start]][:, None]).all()
    assert (time_of[steps[future]] - time_of[steps[start]][:, None] == later).all()
    assert later.min() >= 1 and later.max() <= networks.CPC_HORIZON
    for step in range(networks.CPC_HORIZON):
        # where the action `step` steps after the start leads to a future
        needed = later.max(axis=1) > step
        assert (time_of[steps[actions[needed, step]]] == time_of[steps[start[needed]]] + step).all()
        assert (episode[steps[actions[needed, step]]] == episode[steps[start[needed]]]).all()


def test_cpc_learns_to_predict_by_the_actions():
    """The next place is the place plus the action, modulo 8. The loss falls far below chance. If
    the actions are shuffled, it stays at chance."""
    losses = {}
    for shuffled in (False, True):
        torch.manual_seed(0)
        eight = gym.spaces.Discrete(8)
        policy = build({"goal": GOAL}, eight, policy="resnet18(cpc=True)", hidden_size=32)
        optimizer = torch.optim.Adam(policy.parameters(), lr=1e-2)
        found = []
        for update in range(200):
            action = torch.randint(8, (3, 48))  # 48 sequences of 3 steps
            place = torch.cat([torch.randint(8, (1, 48)), action[:-1]]).cumsum(0) % 8
            memory = torch.nn.functional.one_hot(place.flatten(), 32).float()
            known = action.flatten()[torch.randperm(144)] if shuffled else action.flatten()
            batch = {"action": known[:, None], "batch_sizes": torch.full((3,), 48)}
            loss = networks.cpc_loss(policy, 2 * memory, memory, batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            found.append(loss.item())
        losses[shuffled] = np.mean(found[-20:])
    assert losses[False] < 0.65 * losses[True], losses
    assert losses[True] == pytest.approx(2 * math.log(2), rel=0.05)  # a coin's answers


def test_no_action_yet():
    """At the start of an episode, a token of its own stands for the previous action."""
    policy = build({"goal": GOAL})
    action_BA = torch.arange(4)[:, None]
    known_BF = policy.embed(action_BA, torch.zeros(4, dtype=torch.bool))
    token_BF = policy.embed(action_BA, torch.ones(4, dtype=torch.bool))
    assert (token_BF == token_BF[0]).all()
    assert (known_BF != token_BF).any(dim=1).all()


@pytest.mark.parametrize("steps", [2, 40])
def test_cpc_loss_is_a_mean(steps):
    """A classifier that always answers 1 has the same loss in short sequences as in long ones."""
    policy = build({"goal": GOAL}, policy="resnet18(cpc=True)", hidden_size=8)
    policy.cpc.forward = lambda memory, features: torch.ones(memory.shape[:-1])
    batch_sizes = torch.full((steps,), 3)
    batch = {"action": torch.zeros(3 * steps, 1, dtype=torch.int64), "batch_sizes": batch_sizes}
    memory, features = torch.randn(3 * steps, 8), torch.randn(3 * steps, 8)
    loss = networks.cpc_loss(policy, features, memory, batch)
    assert loss.item() == pytest.approx(np.log1p(np.exp(-1)) + np.log1p(np.exp(1)))


def walks(num_envs, num_steps, places):
    """A rollout of environments that walk around a ring of places, and the places they see. An
    action goes 1 to 4 places ahead. All rewards are 0."""
    observation = {"place": gym.spaces.Box(0, 1, (places,), np.float32)}
    policy = build(observation, policy="resnet18(cpc=True)", hidden_size=32)
    spec = make_spec(gym.spaces.Dict(observation), gym.spaces.Discrete(4))
    steps = num_envs * num_steps
    rollout = ver_ppo.Rollout(spec, steps, num_envs, policy.state_shape)
    rollout.rows = steps
    action = torch.randint(4, (num_steps, num_envs))
    start = torch.randint(places, (1, num_envs))
    place = torch.cat([start, 1 + action[:-1]]).cumsum(0) % places
    rollout["env"][:] = rollout["segment"][:] = np.tile(np.arange(num_envs), num_steps)
    rollout["action"][:] = action.reshape(steps, 1)
    rollout["prev_action"][num_envs:] = rollout["action"][:-num_envs]
    rollout["first"][:num_envs] = True
    return policy, rollout, torch.eye(places)[place.flatten()]


@pytest.mark.parametrize("shuffled", [False, True])
def test_cpc_loss_falls(shuffled):
    """PPO updates on one fixed rollout bring the loss down if the future follows from the past. If
    new random steps have each observation in every update, nothing can be predicted, and the loss
    stays where it begins."""
    policy, rollout, seen = walks(num_envs=8, num_steps=8, places=64)
    one_step = {"num_minibatches": 1, "update_epochs": 1, "ent_coef": 0.0}
    options = ver_ppo.Options(num_envs=8, num_steps=8, **one_step)
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-2)
    losses = []
    for update in range(120):
        order = torch.randperm(64) if shuffled else torch.arange(64)
        rollout["obs"]["place"] = seen[order]
        logs = ver_ppo.ppo_update(policy, optimizer, rollout, options)
        losses.append(logs["losses/auxiliary"])
    share = np.mean(losses[-10:]) / losses[0]
    assert share > 0.9 if shuffled else share < 0.33, losses


def test_cpc_in_a_run(tmp_path):
    """It goes with the papers' encoders and with overlap, and its loss is logged."""
    line = "--env-kwargs simulator=builtin camera=rgb image_size=64 --policy resnet18(cpc=True)"
    line += " --num-workers 2 --extensions overlap check --total-timesteps 128"
    folder = run_here(tmp_path, line)
    # two rollouts, the second one at half the learning rate
    assert saved(folder)["policy"]["encoders.1.source.images.0.normalize.total_weight"] == 1.5
    assert len(logged(folder, "losses/auxiliary")) == 2


DELAY, LATENCY = (f"notebooks.extensions.wrappers:{name}" for name in ("ActionDelay", "Latency"))


def test_delayed_actions(tmp_path):
    """The answer to the first action of an episode is the first observation. The answer to each
    later action is the result of the action before it. (Count: the reward is 0.1 times the action,
    the observation counts the steps, the 7th truncates.)"""
    environment, io = make_environment("tests.envs:Count-v0", wrappers=(DELAY,))
    environment.answer()
    actions, answers = [2, 0, 1, 2, 2, 0, 1, 2, 0, 1], []
    for io["action"][0] in actions:
        environment.answer()
        steps = round(io["obs"]["obs"][0, 0].item() * 10)
        answers.append((io["reward"][0].item(), steps, bool(io["truncated"][0])))
    carried_out = [None, *actions[:7], None, actions[8]]
    rewards = [0.0 if action is None else 0.1 * (action - 1) for action in carried_out]
    assert [answer[0] for answer in answers] == pytest.approx(rewards, abs=1e-6)
    assert [answer[1] for answer in answers] == [0, 1, 2, 3, 4, 5, 6, 0, 0, 1]
    assert [answer[2] for answer in answers] == [False] * 7 + [True] + [False] * 2
    line = f"--env-id tests.envs:Count-v0 --wrappers {DELAY} --num-workers 2 --extensions check"
    folder = run_here(tmp_path, f"{line} --total-timesteps 128")
    lengths = logged(folder, "charts/episodic_length")
    assert set(lengths.values()) == {8.0}  # 7 steps, and the first answer


class Threads(gym.Env):
    """Records which thread has done what with which environment."""

    seen = []

    def note(self, what):
        self.seen.append((what, id(self), threading.get_ident()))

    def __init__(self, render_mode=None):
        self.note("make")

    def reset(self, **_):
        self.note("reset")
        return 0, {}

    def step(self, action):
        self.note("step")
        return 0, 0.0, False, False, {}

    def render(self):
        self.note("render")

    def close(self):
        self.note("close")


def test_delayed_environments_live_in_one_thread():
    """The wrapper closes the environment that it is given, and makes it again in another thread.
    That thread resets, steps and closes it."""
    Threads.seen.clear()
    gym.register("Threads-v0", Threads)
    env = wrappers.ActionDelay(gym.make("Threads-v0", disable_env_checker=True))
    env.reset(seed=0)
    env.step(0)
    env.render()
    env.close()
    (made, closed), own = Threads.seen[:2], Threads.seen[2:]
    assert made == ("make", made[1], threading.get_ident()) and closed == ("close", *made[1:])
    names, environments, threads = zip(*own)
    assert names == ("make", "reset", "step", "render", "close")
    assert len(set(environments)) == 1 and len({*threads, threading.get_ident()}) == 2


def test_delayed_environments_are_made_again():
    """The new environment has the same arguments and inner wrappers. If an environment cannot be
    made again, the wrapper raises, and leaves no thread."""
    clip, limit = "ClipReward(min_reward=0, max_reward=0.05)", "TimeLimit(max_episode_steps=4)"
    gymnasium = [f"gymnasium.wrappers:{name}" for name in (clip, limit)]
    around = (f"{LATENCY}(mean_ms=0.5, spread=0.0)", *gymnasium, DELAY)
    words = {"env_kwargs": ("limit=11",), "wrappers": around}
    env = ver_ppo.make_env(ver_ppo.Options(env_id="tests.envs:Told-v0", **words), "val", 3)
    options, split, number, limit = env.unwrapped.told
    assert (split, number, limit) == ("val", 3, 11) and options.env_kwargs == ("limit=11",)
    clipped = env.env
    assert isinstance(clipped, gym.wrappers.ClipReward)
    assert isinstance(clipped.env, wrappers.Latency)
    assert (clipped.env.mean_sec, clipped.env.spread) == (0.0005, 0.0)
    env.reset(seed=0)
    answers = [env.step(1) for _ in range(5)]
    assert [answer[1] for answer in answers] == [0.0] + [0.05] * 4
    assert [answer[3] for answer in answers] == [False] * 4 + [True]
    env.close()
    before = threading.active_count()
    with pytest.raises(ValueError, match="gymnasium.make"):
        wrappers.ActionDelay(envs.Count())
    unrecorded = gym.Wrapper(gym.make("tests.envs:Count-v0"))
    with pytest.raises(
        ValueError, match="cannot make the environment again: .*RecordConstructorArgs"
    ):
        wrappers.ActionDelay(unrecorded)
    assert threading.active_count() == before


def test_wrappers_of_gymnasium(tmp_path, capsys):
    """--wrappers takes Gymnasium's wrappers, in order, also in worker processes and evaluations."""
    line = "--env-id tests.envs:Count-v0 --num-workers 1 --total-timesteps 128 --extensions check"
    line += " --eval-episodes 3 --wrappers"
    args = [
        "gymnasium.wrappers:TimeLimit(max_episode_steps=5)",
        "gymnasium.wrappers:ClipReward(min_reward=0, max_reward=0.05)",
        DELAY,
    ]
    folder = run_here(tmp_path, line, *args)
    assert set(logged(folder, "charts/episodic_length").values()) == {6.0}  # and the delayed one
    assert 0 < max(logged(folder, "charts/episodic_return").values()) <= 0.05 * 5 + 1e-6
    assert "length 6.000" in capsys.readouterr().out


def test_simulation_beside_inference(monkeypatch):
    """With ActionDelay, the environment simulates a step (30 ms) while the policy computes the next
    action (25 ms). Without ActionDelay, the environment waits."""
    simulated = []  # begin and end of each simulated step
    step = wrappers.Latency.step

    def timed_step(env, action):
        began_at = time.perf_counter()
        answer = step(env, action)
        simulated.append((began_at, time.perf_counter()))
        return answer

    monkeypatch.setattr(wrappers.Latency, "step", timed_step)
    shares = {}
    for delay in (False, True):
        slow = f"{LATENCY}(mean_ms=30.0, spread=0.0)"
        options = ver_ppo.Options(
            env_id="tests.envs:Scenes-v0", wrappers=(slow, DELAY) if delay else (slow,)
        )
        env = ver_ppo.make_env(options)
        env.reset(seed=0)
        env.step(0)
        inferences = []
        for _ in range(15):
            began_at = time.perf_counter()
            time.sleep(0.025)
            inferences.append((began_at, time.perf_counter()))
            env.step(0)
        env.close()  # waits for the last step
        assert len(simulated) == 16
        shares[delay] = busy_shares(inferences, simulated)
        simulated.clear()
    assert max(shares[False]) == 0 and np.median(shares[True]) > 0.5, shares


def test_transfer(tmp_path, capsys):
    """A new run takes the weights: with reset=critic all except the critic, with reset=policy only
    the encoders. A frozen encoder learns nothing, and its statistics stay, also after --resume,
    which does not need the file."""
    line = "--env-kwargs simulator=builtin camera=rgb image_size=16 --num-workers 0"
    checkpoint = run_here(tmp_path / "one", f"{line} --total-timesteps 64") / "checkpoint.pt"
    before = ver_ppo.load_checkpoint(checkpoint)["policy"]
    line += " --seed 5"

    def transfer(more):
        return "--extensions", f"transfer(file={checkpoint}, freeze=True{more})"

    two = run_here(tmp_path / "two", f"{line} --total-timesteps 128", *transfer(", reset=critic"))
    assert "tensors come from" in capsys.readouterr().out
    lines = f"{line} --learning-rate 1e-30 --total-timesteps 64"
    three = run_here(tmp_path / "reset", lines, *transfer(", reset=policy"))
    depth = "--env-kwargs simulator=builtin image_size=16"
    large = "--env-kwargs simulator=builtin camera=rgb --policy resnet18"
    for change in ("--hidden-size 24", depth, large):
        args = small(tmp_path / "three", *line.split(), *change.split(), *transfer(""))
        one_line(capsys, args, "its network is another one (encoders.")
    args = small(tmp_path / "three", *line.split())
    one_line(capsys, [*args, "--extensions", "transfer"], "give a checkpoint")
    one_line(capsys, [*args, *transfer(", reset=some")], "must be one of")
    one_line(capsys, [*args, "--extensions", "transfer(file=nowhere.pt)"], "nowhere.pt")
    assert not (tmp_path / "three").exists()

    checkpoint.unlink()
    repeated = ["--extensions", *saved(two)["options"]["extensions"]]
    assert ver_ppo.main(["--resume", str(two), "--total-timesteps", "192", *repeated]) == 0
    assert saved(two)["step"] == 192
    after = saved(two)["policy"]
    same = {name for name in before if torch.equal(before[name], after[name])}
    assert {name for name in before if name.startswith("encoders.1.")} <= same
    assert not {name for name in same if name.startswith(("actor", "core", "encoders.0"))}
    assert not torch.allclose(before["critic.weight"], after["critic.weight"], atol=0.05)
    reset = saved(three)["policy"]
    taken = {name for name in before if torch.equal(before[name], reset[name])}
    assert {name for name in before if name.startswith("encoders.")} <= taken
    others = {name for name in taken if not name.startswith("encoders.")}
    assert not {name for name in others if name.endswith("weight")}
    assert run_folders(tmp_path / "two") == [two]


def image_input(shape):
    """A part of an observation that is an image, as an encoder reads it."""
    space = gym.spaces.Dict(image=gym.spaces.Box(-1, 1, shape))
    return ver_ppo.Input("image", make_spec(space, gym.spaces.Discrete(2)))


def count_unseen(encoder, shape):
    """How many numbers of an image do not reach an encoder's output."""
    seen = torch.zeros(shape)
    for _ in range(3):
        image = torch.randn(2, *shape, requires_grad=True)
        encoder({"image": image}).square().sum().backward()
        seen += image.grad.abs().sum(0)
    return int((seen == 0).sum())


@pytest.mark.parametrize("channels", [1, 3])
def test_every_pixel_is_seen(channels):
    """By the small CNN: all heights from 3 to 130, and as many widths."""
    for height in range(3, 131):
        shape = height, 3 + 7 * height % 128, channels
        encoder = ver_ppo.SmallCNN(image_input(shape), 32)
        assert count_unseen(encoder, shape) == 0, shape


@pytest.mark.parametrize("name", networks.BACKBONES)
def test_every_pixel_is_seen_by_residual_encoders(name):
    """Also where sides do not divide by the strides."""
    for shape in [(64, 65, 1), (84, 84, 1), (100, 127, 1)]:
        encoder = networks.ResNet(image_input(shape), 16, **networks.BACKBONES[name])
        assert count_unseen(encoder, shape) == 0, shape
