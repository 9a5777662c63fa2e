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
from tests.helpers import logged, make_environment, one_line, run_folders, run_here, saved, small

RESIDUAL = "resnet18_plain", "resnet18", "se_resnext50"
DEPTH = gym.spaces.Box(0, 1, (128, 128, 1), np.float32)
RGB = gym.spaces.Box(0, 255, (128, 128, 3), np.uint8)
GOAL = gym.spaces.Box(-np.inf, np.inf, (3,), np.float32)
NEAR = gym.spaces.Box(-9, 9, (3,), np.float32)


def build(observations, action=gym.spaces.Discrete(4), policy="ver_ppo:Policy", **options):
    """A policy in evaluation mode, in which it acts, and its statistics do not move."""
    spec = ver_ppo.EnvSpec(observations, action, ())
    policy = ver_ppo.make_policy(spec, ver_ppo.Options(policy=policy, **options))
    torch.nn.init.ones_(policy.critic.scale)  # else all values are 0
    return policy


def sample(observations, batch):
    """Random observations, as the network gets them."""
    parts = {
        key: np.stack([space.sample() for _ in range(batch)]) for key, space in observations.items()
    }
    return {
        key: torch.as_tensor(part.astype(np.float32) if part.dtype == float else part)
        for key, part in parts.items()
    }


def count(*shapes):
    """Weights of convolutions (in, out, kernel, groups), each with its GroupNorm."""
    return sum(i // g * o * k * k + 2 * o for i, o, k, g in shapes)


def by_hand(name, channels):
    """Weights up to the last feature map, written down from the papers."""
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
    """Numbers of weights and the shape of the last feature map are those that the papers' figures
    give."""
    images = networks.Stack([ver_ppo.Image("rgb", RGB), ver_ppo.Image("depth", DEPTH)])
    net = networks.ResNet(images, 512, **networks.BACKBONES[name])
    assert sum(p.numel() for p in net.backbone.parameters()) == by_hand(name, 4)
    channels = 256 if name.startswith("resnet18") else 1024
    assert net.backbone(torch.zeros(2, 4, 128, 128)).shape == (2, channels, 2, 2)
    assert net.compress[0].out_channels * 2 * 2 == 2048 == net.out.in_features
    assert net(sample({"rgb": RGB, "depth": DEPTH}, 2)).shape == (2, 512)


def test_first_convolutions():
    """256 x 256 pixels as in DD-PPO: halved by pooling; the last feature map, 4 x 4 pixels, is
    compressed to 128 x 4 x 4."""
    image = ver_ppo.Image("depth", gym.spaces.Box(0, 1, (256, 256, 1), np.float32))
    net = networks.ResNet(image, 512, **networks.BACKBONES["resnet50"])
    assert isinstance(net.backbone[0], torch.nn.AvgPool2d)
    assert net.compress(net.backbone(torch.zeros(1, 1, 256, 256))).shape == (1, 128 * 4 * 4)


ALL = {"rgb": RGB, "depth": DEPTH, "goal": GOAL}
EVERYTHING = ver_ppo.EnvSpec(
    envs.Everything.observation_space, envs.Everything.action_space, ()
).observations
CASES = [
    (ALL, gym.spaces.Discrete(4), policy)
    for policy in ("ver_ppo:Policy", *(f"{name}(cpc=True)" for name in RESIDUAL))
]
CASES += [
    (EVERYTHING, envs.Everything.action_space, "ver_ppo:Policy"),
    ({"goal": GOAL}, envs.Continuous.action_space, "resnet18(cpc=True)"),
]


def test_choices_and_bytes():
    """Choices enter as one-hot vectors, each dimension its own; bytes as 0..1."""
    space = gym.spaces.MultiDiscrete([[2, 3], [1, 4]], start=[[0, 5], [0, -2]])
    vector = ver_ppo.Vector("hand", space, 8)
    vector.layers = torch.nn.Identity()
    hand = np.stack([space.sample() for _ in range(20)])
    parts = (hand - space.start).reshape(20, 4)
    hot = [np.eye(count)[parts[:, i]] for i, count in enumerate([2, 3, 1, 4])]
    assert (vector({"hand": torch.from_numpy(hand)}).numpy() == np.hstack(hot)).all()
    vector = ver_ppo.Vector("ram", gym.spaces.Box(0, 255, (3,), np.uint8), 8)
    vector.layers = torch.nn.Identity()
    assert vector({"ram": torch.tensor([[0, 51, 255]], dtype=torch.uint8)}).tolist() == [
        [0, torch.tensor(0.2).item(), 1]
    ]


@pytest.mark.parametrize("observations, action_space, name", CASES)
def test_gradients_reach_every_weight(observations, action_space, name):
    """Each observation goes through its own encoder (of the papers' networks, RGB and depth of one
    size through one), CPC|A through its GRU."""
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
            of_rgb, of_depth, of_goal = policy.encoders
            read = of_rgb.image, of_depth.image
        else:
            of_goal, of_images = policy.encoders
            read = of_images.image.images
        assert of_goal.key == "goal" and [image.key for image in read] == ["rgb", "depth"]
        other = policy.encode({**obs, "rgb": 255 - obs["rgb"]}, action, first)
        assert not torch.equal(other, policy.encode(obs, action, first))


def test_running_statistics():
    """RGB, and vectors without bounds, are normalized by mean and deviation of all rollouts so far,
    each with its weight; depth, bounded vectors and those of the papers' networks are not."""
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
        learned = SimpleNamespace(obs=obs, rows=8, device=torch.device("cpu"))
        ver_ppo.update_statistics(policy, learned, weight, lambda tensors: None)
        images.append(rgb / 255)
        goals.append(goal.astype(np.float64))

    def normalized(parts):
        """The last part, by mean and deviation of all."""
        axes = tuple(range(parts[0].ndim - 1))
        mean = np.average([part.mean(axis=axes) for part in parts], axis=0, weights=weights)
        square = [((part - mean) ** 2).mean(axis=axes) for part in parts]
        return (parts[-1] - mean) / np.sqrt(np.average(square, axis=0, weights=weights))

    of_rgb, of_depth, of_goal, of_near = policy.encoders
    found = of_rgb.image(obs).permute(0, 2, 3, 1)
    np.testing.assert_allclose(found.numpy(), normalized(images), atol=2e-3)
    found = of_goal.normalize(of_goal.read(obs))
    np.testing.assert_allclose(found.numpy(), normalized(goals), atol=2e-3)
    assert torch.equal(of_depth.image(obs)[:, 0], obs["depth"][..., 0])
    plain = networks.LinearVector("goal", GOAL)
    for encoder in (of_near, plain):
        assert torch.equal(encoder(obs), encoder.layers(obs["goal"]))
    state = policy.state_dict()  # goes from who learns to who acts, and into checkpoints
    learned = dict(policy.named_parameters())
    for encoder in ("0.image", "2"):
        for name in ("mean_C", "variance_C", "rollouts"):
            name = f"encoders.{encoder}.normalize.{name}"
            assert name in state and name not in learned


def test_the_image_of_a_goal_has_an_encoder_of_its_own():
    """It is not stacked on the camera's images, although it has the same size."""
    observations = {"depth": DEPTH, "imagegoal": RGB, "rgb": RGB}
    policy = build(observations, policy="resnet18", hidden_size=16)
    keys = [[image.key for image in each.image.images] for each in policy.encoders]
    assert keys == [["depth", "rgb"], ["imagegoal"]]


def test_statistics_of_a_whole_rollout():
    """256 steps, drawn from the whole rollout, and not from the rows after it."""
    policy = build({"goal": GOAL}, hidden_size=16).train()
    goal = torch.arange(4096.0)[:, None].expand(-1, 3)
    rollout = SimpleNamespace(obs={"goal": goal}, rows=2048, device=torch.device("cpu"))
    ver_ppo.update_statistics(policy, rollout, 1.0, lambda tensors: None)
    (of_goal,) = policy.encoders
    # the mean of 256 numbers within 0..2047, up to four of its standard errors
    assert abs(of_goal.normalize.mean_C[0] - 1023.5) < 4 * 2048 / math.sqrt(12 * 256)


@pytest.mark.parametrize("frozen", ["policy", "encoder"])
def test_statistics_stay_in_evaluation_mode(frozen):
    """While a policy acts, its statistics do not move; if one encoder is in evaluation mode, its
    statistics alone stay."""
    policy = build({"rgb": RGB, "goal": GOAL}, hidden_size=16).train()
    of_rgb, _ = policy.encoders
    (policy if frozen == "policy" else of_rgb).eval()
    before = {name: part.clone() for name, part in policy.named_buffers()}
    obs = {"rgb": torch.full((8, 128, 128, 3), 9, dtype=torch.uint8), "goal": torch.randn(8, 3)}
    rollout = SimpleNamespace(obs=obs, rows=8, device=torch.device("cpu"))
    ver_ppo.update_statistics(policy, rollout, 1.0, lambda tensors: None)
    moved = {name for name, part in policy.named_buffers() if not torch.equal(part, before[name])}
    statistics = {f"encoders.1.normalize.{name}" for name in ("mean_C", "variance_C", "rollouts")}
    assert moved == (set() if frozen == "policy" else statistics)


@pytest.mark.parametrize(
    "bounds, shape, unit",
    [
        ((0, 1e5), (3,), 1e5),
        ((0, 3000), (3,), 3000),
        ((0, math.inf), (3,), 4e-6),  # of any size
        ((0, math.inf), (16, 16, 1), 3000),  # depth in millimetres
        ((0, 1000), (16, 16), 1000),
    ],
)
def test_numbers_of_any_size(bounds, shape, unit):
    """Without bounds, or with bounds beyond 100, numbers come to mean 0 and deviation 1, images as
    vectors; within 100 they stay as they are."""
    rng = np.random.default_rng(0)
    part = torch.from_numpy(rng.uniform(0, unit, (256, *shape)).astype(np.float32))
    rollout = SimpleNamespace(obs={"part": part}, rows=256, device=torch.device("cpu"))
    for high in (bounds[1], 100):
        policy = build({"part": gym.spaces.Box(bounds[0], high, shape)}, hidden_size=16).train()
        ver_ppo.update_statistics(policy, rollout, 1.0, lambda tensors: None)
        (encoder,) = policy.encoders
        reader = encoder.image if len(shape) > 1 else encoder
        found = reader.normalize(reader.read(rollout.obs))
        if high == 100:
            assert found.ravel().tolist() == part.ravel().tolist()
        else:
            assert abs(found.mean()) < 1e-3 and abs(found.std() - 1) < 1e-2


@pytest.mark.parametrize("num_envs, num_steps", [(2, 128), (4, 200), (9, 230)])
def test_statistics_are_of_all_environments(num_envs, num_steps):
    """Also where the rows lie in lock-step order, so that every n-th is of the same environment."""
    policy = build({"goal": GOAL}, hidden_size=16).train()
    env_S = np.tile(np.arange(num_envs), num_steps)
    part = torch.from_numpy(env_S.astype(np.float32))[:, None].expand(-1, 3)
    rollout = SimpleNamespace(obs={"goal": part}, rows=len(env_S), device=torch.device("cpu"))
    ver_ppo.update_statistics(policy, rollout, 1.0, lambda tensors: None)
    statistics = policy.encoders[0].normalize
    assert statistics.mean_C.numpy() == pytest.approx(np.full(3, env_S.mean()), rel=0.2)
    assert statistics.variance_C.numpy() == pytest.approx(np.full(3, env_S.var()), rel=0.3)


@pytest.mark.parametrize("seed", range(10))
def test_cpc_stays_in_its_episode(seed):
    """Starts, actions and futures are of one environment and one episode, in order, at most
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
    """Where the future is position + actions, the loss falls far below chance; with the actions
    shuffled it does not."""
    losses = {}
    for shuffled in (False, True):
        torch.manual_seed(0)
        policy = build({"goal": GOAL}, policy="resnet18(cpc=True)", hidden_size=32)
        optimizer = torch.optim.Adam(policy.parameters(), lr=1e-2)
        batch_sizes = torch.full((12,), 16)
        for update in range(200):
            action = torch.randint(4, (12, 16))
            place = torch.cat([torch.randint(8, (1, 16)), action[:-1]]).cumsum(0) % 8
            features = torch.nn.functional.one_hot(place.flatten(), 32).float() * 2
            memory = torch.nn.functional.one_hot(place.flatten(), 32).float()
            known = action.flatten()[torch.randperm(192)] if shuffled else action.flatten()
            batch = {"action": known[:, None], "batch_sizes": batch_sizes}
            loss = networks.cpc_loss(policy, features, memory, batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        losses[shuffled] = loss.item()
    assert losses[False] < 0.75 * losses[True], losses


def test_no_action_yet():
    """At the start of an episode the previous action has a token of its own."""
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


def test_cpc_trains(tmp_path):
    """In a run its loss is logged, and falls; it goes with the papers' encoders and with
    overlap."""
    folder = run_here(
        tmp_path / "1",
        "--env-id Pendulum-v1 --num-workers 0 --total-timesteps 12800 --debug"
        " --num-minibatches 4 --update-epochs 6 --seed 3 --policy resnet18(cpc=True)",
    )
    losses = [*logged(folder, "losses/auxiliary").values()]
    assert len(losses) == 200 and np.mean(losses[-20:]) < 0.95 * np.mean(losses[:20])
    line = "--env-kwargs simulator=builtin camera=rgb --policy resnet18(cpc=True) --debug"
    folder = run_here(
        tmp_path / "2", f"{line} --num-workers 2 --extensions overlap --total-timesteps 128"
    )
    # two rollouts, the second one at half the learning rate
    assert saved(folder)["policy"]["encoders.1.image.images.0.normalize.rollouts"] == 1.5
    assert len(logged(folder, "losses/auxiliary")) == 2


DELAY, LATENCY = (f"notebooks.extensions.wrappers:{name}" for name in ("ActionDelay", "Latency"))


def test_delayed_actions(tmp_path):
    """The first action of an episode is answered by the first observation; then each is answered by
    what the one before did. (Count: the reward is 0.1 times the action, the observation counts the
    steps, the 7th truncates.)"""
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
    for workers in "02":
        line = f"--env-id tests.envs:Count-v0 --wrappers {DELAY} --num-workers {workers} --debug"
        folder = run_here(tmp_path / workers, f"{line} --total-timesteps 128")
        lengths = logged(folder, "charts/episodic_length")
        assert set(lengths.values()) == {8.0}  # 7, and one that nothing was decided for


class Threads(gym.Env):
    """Notes which thread has done what with which environment."""

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
    """An environment is made, reset, stepped and closed in one thread, which is not the caller's:
    the one that is given is closed, and made anew there."""
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


def test_delayed_environments_are_made_anew():
    """From their spec: arguments and wrappers within are those of the given one; where that cannot
    be, it is said, and no thread is left."""
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
    assert (clipped.env.mean_sec, clipped.env.sigma) == (0.0005, 0.0)
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
    """They go through the same door, in order, in evaluation and worker processes too."""
    line = "--env-id tests.envs:Count-v0 --num-workers 1 --total-timesteps 128 --debug"
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


def test_simulation_beside_inference():
    """With ActionDelay, 30 ms of simulation and 25 ms of inference take the longer of the two."""
    sec = {}
    for delay in (False, True):
        slow = f"{LATENCY}(mean_ms=30.0, spread=0.0)"
        options = ver_ppo.Options(
            env_id="tests.envs:Scenes-v0", wrappers=(slow, DELAY) if delay else (slow,)
        )
        env = ver_ppo.make_env(options)
        env.reset(seed=0)
        env.step(0)
        began = time.perf_counter()
        for _ in range(15):
            time.sleep(0.025)
            env.step(0)
        sec[delay] = (time.perf_counter() - began) / 15
        env.close()
    assert sec[False] > 0.054 and sec[True] < 0.8 * sec[False], sec


def test_transfer(tmp_path, capsys):
    """A new run takes the weights, but for the critic with reset=critic, for all but the encoders
    with reset=policy; a frozen encoder learns nothing, statistics included, also after --resume,
    which does not need the file any more."""
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
    one_line(capsys, [*args, "--extensions", "transfer(file=nowhere.pt)"], "no checkpoint nowhere")
    assert not (tmp_path / "three").exists()

    checkpoint.unlink()
    assert ver_ppo.main(["--resume", str(two), "--total-timesteps", "192"]) == 0
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
