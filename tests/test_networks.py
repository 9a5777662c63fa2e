"""Encoders of the papers, running statistics, CPC|A, delayed actions, transfer."""

import threading
import time
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
import torch

import ver_ppo
from notebooks import wrappers
from tests import envs
from tests.test_environment import make_environment
from tests.test_run import logged, one_line, run_folders, run_here, saved, small

DEPTH = gym.spaces.Box(0, 1, (128, 128, 1), np.float32)
RGB = gym.spaces.Box(0, 255, (128, 128, 3), np.uint8)
GOAL = gym.spaces.Box(-np.inf, np.inf, (3,), np.float32)


def build(observations, action=gym.spaces.Discrete(4), **options):
    options = ver_ppo.Options(env_id="pointnav", simulator="builtin", **options)
    return ver_ppo.Policy(ver_ppo.EnvSpec(observations, action, ()), options)


def sample(observations, batch):
    """Random observations, as the network gets them."""
    parts = {key: np.stack([space.sample() for _ in range(batch)]) for key, space in observations.items()}
    return {key: torch.as_tensor(part.astype(np.float32) if part.dtype == float else part) for key, part in parts.items()}


def count(*shapes):
    """Weights of convolutions (in, out, kernel, groups), each with its GroupNorm."""
    return sum(i // g * o * k * k + 2 * o for i, o, k, g in shapes)


def by_hand(name, channels):
    """Weights up to the last feature map, written down from the papers."""
    if name == "resnet18":  # patches of 4x4; stages of 2 blocks of two 3x3; before three stages GroupNorm and 2x2 stride 2
        stages = sum(2 * (count((c, c, 3, 1), (c, c, 3, 1)) + c) for c in (32, 64, 128, 256))
        return count((channels, 32, 4, 1)) + stages + sum(2 * c + 4 * c * 2 * c + 2 * c for c in (32, 64, 128))
    if name == "resnet18_plain":  # 7x7; stages of 2 blocks of two 3x3; the first of three stages halves, beside a 1x1
        pairs = sum(count((c, c, 3, 1), (c, c, 3, 1)) for c in (32, 64, 128, 256))
        halving = sum(count((c, 2 * c, 3, 1), (2 * c, 2 * c, 3, 1), (c, 2 * c, 1, 1)) for c in (32, 64, 128))
        return count((channels, 32, 7, 1)) + pairs + count((32, 32, 3, 1), (32, 32, 3, 1)) + halving
    blocks = {"resnet50": (3, 4, 6, 3), "se_resnext50": (3, 4, 6, 3), "se_resnext101": (3, 4, 23, 3)}[name]
    wide, groups, squeeze = (1, 1, 0) if name == "resnet50" else (2, 16, 1)
    total, channels = count((channels, 32, 7, 1)), 32
    for planes, number in zip((32, 64, 128, 256), blocks):  # blocks of 1x1, 3x3, 1x1; the first changes the channels
        out, width = 4 * planes, planes * wide
        first = count((channels, width, 1, 1), (channels, out, 1, 1)) + (number - 1) * count((out, width, 1, 1))
        block = count((width, width, 3, groups), (width, out, 1, 1)) + squeeze * (2 * out * (out // 16) + out // 16 + out)
        total, channels = total + first + number * block, out
    return total


@pytest.mark.parametrize("name", ver_ppo.BACKBONES)
def test_backbones_by_hand(name):
    """Numbers of weights and the shape of the last feature map are those that the papers' figures give."""
    net = ver_ppo.ResNet(ver_ppo.Images({"rgb": RGB, "depth": DEPTH}), 512, **ver_ppo.BACKBONES[name])
    assert sum(p.numel() for p in net.backbone.parameters()) == by_hand(name, 4)
    channels = 256 if name.startswith("resnet18") else 1024
    assert net.backbone(torch.zeros(2, 4, 128, 128)).shape == (2, channels, 2, 2)
    assert net.compress[0].out_channels * 2 * 2 == 2048 == net.out.in_features
    assert net(sample({"rgb": RGB, "depth": DEPTH}, 2)).shape == (2, 512)


def test_first_convolutions():
    """256 x 256 pixels as in DD-PPO: halved by pooling; the last feature map, 4 x 4 pixels, is compressed to 128 x 4 x 4."""
    images = ver_ppo.Images({"depth": gym.spaces.Box(0, 1, (256, 256, 1), np.float32)})
    net = ver_ppo.ResNet(images, 512, **ver_ppo.BACKBONES["resnet50"])
    assert isinstance(net.backbone[0], torch.nn.AvgPool2d)
    assert net.compress(net.backbone(torch.zeros(1, 1, 256, 256))).shape == (1, 128 * 4 * 4)


ALL, EVERYTHING = {"rgb": RGB, "depth": DEPTH, "goal": GOAL}, ver_ppo.flatten(envs.Everything.observation_space)
CASES = [(ALL, gym.spaces.Discrete(4), encoder) for encoder in ("cnn", "resnet18_plain", "resnet18", "se_resnext50", "none")]
CASES += [(EVERYTHING, envs.Everything.action_space, "cnn"), ({"goal": GOAL}, envs.Continuous.action_space, "cnn")]


@pytest.mark.parametrize("observations, action_space, encoder", CASES)
def test_gradients_reach_every_weight(observations, action_space, encoder):
    """RGB and depth of one size go through one encoder, other observations through their own, CPC|A through its GRU."""
    policy = build(observations, action_space, encoder=encoder, hidden_size=16, cpc=True, lstm_layers=2)
    obs, sizes, first = sample(observations, 6), torch.tensor([2, 2, 2]), torch.tensor([True] * 2 + [False] * 4)
    action = torch.tensor(np.stack([np.ravel(action_space.sample()) for _ in range(6)]))
    action = action.float() if action.is_floating_point() else action
    distribution, value, memory = policy.sequences(obs, action, first, torch.randn(2, *policy.state_shape), sizes)
    loss = distribution.log_prob(action).sum() + value.sum() + ver_ppo.cpc_loss(policy, *memory, action, sizes)
    loss.backward()
    assert [name for name, p in policy.named_parameters() if p.requires_grad and (p.grad is None or not p.grad.any())] == []
    if observations is ALL:
        assert set(policy.encoders) == ({"goal"} if encoder == "none" else {"rgb", "goal"})
        other = policy.encode({**obs, "rgb": 255 - obs["rgb"]}, action, first)
        assert torch.equal(other, policy.encode(obs, action, first)) == (encoder == "none")


def test_nothing_to_observe():
    """A blind agent without a goal is refused."""
    with pytest.raises(ver_ppo.UserError, match="nothing is left to observe"):
        build({"depth": DEPTH}, encoder="none")


def test_running_statistics():
    """RGB is normalized by mean and deviation of all rollouts so far, channel by channel; depth alone is not."""
    policy, rng, seen = build({"rgb": RGB, "depth": DEPTH}, hidden_size=16), np.random.default_rng(0), []
    for k in (0, 1, 2):
        rgb = rng.integers(50 * k, 50 * k + 90, (8, 128, 128, 3), dtype=np.uint8)
        obs = {"rgb": torch.from_numpy(rgb), "depth": torch.from_numpy(rng.random((8, 128, 128, 1), np.float32))}
        ver_ppo.update_statistics(policy, SimpleNamespace(steps=8, obs=obs, device="cpu"), lambda tensors: None)
        seen.append(np.concatenate([rgb / 255, obs["depth"]], axis=3))
    everything = np.concatenate(seen)
    expected = (seen[-1] - everything.mean(axis=(0, 1, 2))) / everything.std(axis=(0, 1, 2))
    images = policy.encoders["rgb"].images
    np.testing.assert_allclose(images(obs).permute(0, 2, 3, 1).numpy(), expected, atol=2e-3)
    assert torch.equal(ver_ppo.Images({"depth": DEPTH})(obs)[:, 0], obs["depth"][..., 0])
    names = [name for name, _ in policy.named_parameters()]  # these go from who learns to who acts
    assert {"encoders.rgb.images.moments_2C", "encoders.rgb.images.rollouts"} <= set(names)


@pytest.mark.parametrize("seed", range(10))
def test_cpc_stays_in_its_episode(seed):
    """Starts, actions and futures are of one environment and one episode, in order, at most CPC_HORIZON steps apart."""
    rng = np.random.default_rng(seed)
    env, first = rng.integers(4, size=200), rng.random(200) < rng.choice([0.02, 0.3])
    steps, batch_sizes = ver_ppo.pack(ver_ppo.find_sequences(env, first))
    steps, episode, time_of = steps.numpy(), np.zeros(200, int), np.zeros(200, int)
    for e in range(4):
        episode[env == e] = 1000 * e + first[env == e].cumsum()
    for number in set(episode):
        time_of[episode == number] = np.arange((episode == number).sum())
    start, actions, later, future = (part.numpy() for part in ver_ppo.cpc_futures(batch_sizes))
    assert len(start) and (episode[steps[future]] == episode[steps[start]][:, None]).all()
    assert (time_of[steps[future]] - time_of[steps[start]][:, None] == later).all()
    assert later.min() >= 1 and later.max() <= ver_ppo.CPC_HORIZON
    for step in range(ver_ppo.CPC_HORIZON):
        needed = later.max(axis=1) > step  # the action `step` steps after the start leads to a future
        assert (time_of[steps[actions[needed, step]]] == time_of[steps[start[needed]]] + step).all()
        assert (episode[steps[actions[needed, step]]] == episode[steps[start[needed]]]).all()


def test_cpc_learns_to_predict_by_the_actions():
    """Where the future is position + actions, the loss falls far below chance; with the actions shuffled it does not."""
    losses = {}
    for shuffled in (False, True):
        torch.manual_seed(0)
        policy = build({"goal": GOAL}, hidden_size=32, cpc=True, encoder="none")
        optimizer, batch_sizes = torch.optim.Adam(policy.parameters(), lr=1e-2), torch.full((12,), 16)
        for update in range(200):
            action = torch.randint(4, (12, 16))
            place = torch.cat([torch.randint(8, (1, 16)), action[:-1]]).cumsum(0) % 8
            features = torch.nn.functional.one_hot(place.flatten(), 16).float() * 2
            memory = torch.nn.functional.one_hot(place.flatten(), 32).float()
            known = action.flatten()[torch.randperm(192)] if shuffled else action.flatten()
            loss = ver_ppo.cpc_loss(policy, features, memory, known[:, None], batch_sizes)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        losses[shuffled] = loss.item()
    assert losses[False] < 0.75 * losses[True], losses


def test_cpc_trains(tmp_path):
    """In a run its loss is logged, and falls; it goes with the papers' encoders and with overlap."""
    folder = run_here(tmp_path / "1", "--env-id Pendulum-v1 --num-workers 0 --total-timesteps 1600 --cpc --debug")
    losses = [*logged(folder, "losses/cpc").values()]
    assert len(losses) == 25 and np.mean(losses[-5:]) < np.mean(losses[:5])
    line = "--simulator builtin --camera rgb --image-size 64 --encoder resnet18 --cpc --num-workers 2 --overlap --debug"
    folder = run_here(tmp_path / "2", f"{line} --total-timesteps 128")
    assert len(logged(folder, "losses/cpc")) == saved(folder)["policy"]["encoders.rgb.images.rollouts"] == 2


def test_delayed_actions(tmp_path):
    """The first action of an episode is answered by the first observation; then each is answered by what the one before did.
    (Count: the reward is 0.1 times the action, the observation counts the steps, the 7th truncates.)"""
    environment, io = make_environment("tests.envs:Count-v0", action_delay=True)
    environment.answer()
    actions, answers = [2, 0, 1, 2, 2, 0, 1, 2, 0, 1], []
    for io.action[0] in actions:
        environment.answer()
        answers.append((io.reward[0].item(), round(io.obs["obs"][0, 0].item() * 10), bool(io.truncated[0])))
    carried_out = [None, *actions[:7], None, actions[8]]
    rewards = [0.0 if action is None else 0.1 * (action - 1) for action in carried_out]
    assert [answer[0] for answer in answers] == pytest.approx(rewards, abs=1e-6)
    assert [answer[1] for answer in answers] == [0, 1, 2, 3, 4, 5, 6, 0, 0, 1]
    assert [answer[2] for answer in answers] == [False] * 7 + [True] + [False] * 2
    for workers in "02":
        line = f"--env-id tests.envs:Count-v0 --num-workers {workers} --action-delay --total-timesteps 128 --debug"
        folder = run_here(tmp_path / workers, line)
        assert set(logged(folder, "charts/episodic_length").values()) == {8.0}  # 7, and one that nothing was decided for


def test_delayed_environments_live_in_one_thread():
    """An environment is made, reset, stepped and closed in one thread, which is not the caller's."""
    seen = []

    class Threads(gym.Env):
        def __init__(self):
            seen.append(("make", threading.get_ident()))

        def reset(self, **_):
            return seen.append(("reset", threading.get_ident())), {}

        def step(self, action):
            return seen.append(("step", threading.get_ident())), 0.0, False, False, {}

        def close(self):
            seen.append(("close", threading.get_ident()))

    env = wrappers.ActionDelay(Threads)
    env.reset(seed=0)
    env.step(0)
    env.close()
    names, threads = zip(*seen)
    assert names == ("make", "reset", "step", "close") and len({*threads, threading.get_ident()}) == 2


def test_simulation_beside_inference():
    """With --action-delay, 30 ms of simulation and 25 ms of inference take the longer of the two."""
    sec = {}
    for delay in (False, True):
        options = ver_ppo.Options(
            env_id="tests.envs:Scenes-v0", action_delay=delay, sim_latency=30.0, sim_latency_spread=0.0
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
    """--init-from takes the weights, but for the critic with --reset-critic, for all but the encoders with --reset-policy; a
    frozen encoder learns nothing, statistics included, also after --resume."""
    line = "--simulator builtin --camera rgb --image-size 16 --num-workers 0"
    checkpoint = run_here(tmp_path / "one", f"{line} --total-timesteps 64") / "checkpoint.pt"
    line += f" --init-from {checkpoint} --freeze-encoder --seed 5"
    two = run_here(tmp_path / "two", f"{line} --reset-critic --total-timesteps 128")
    assert "tensors come from" in capsys.readouterr().out
    assert ver_ppo.main(["--resume", str(two), "--total-timesteps", "192"]) == 0 and saved(two)["step"] == 192
    before, after = ver_ppo.load_checkpoint(checkpoint)["policy"], saved(two)["policy"]
    same = {name for name in before if torch.equal(before[name], after[name])}
    assert {name for name in before if name.startswith("encoders.rgb.")} <= same
    assert not {name for name in same if name.startswith(("actor", "core", "encoders.goal"))}
    assert not torch.allclose(before["critic.weight"], after["critic.weight"], atol=0.05)
    three = run_here(tmp_path / "reset", f"{line} --reset-policy --learning-rate 1e-30 --total-timesteps 64")
    reset = saved(three)["policy"]
    taken = {name for name in before if torch.equal(before[name], reset[name])}
    assert {name for name in before if name.startswith("encoders.")} <= taken
    assert not {name for name in taken if name.endswith("weight") and not name.startswith("encoders.")}
    for change in ("--hidden-size 24", "--camera depth", "--encoder resnet18 --image-size 64"):
        one_line(capsys, small(tmp_path / "three", *line.split(), *change.split()), "its encoders are others")
    assert not (tmp_path / "three").exists() and run_folders(tmp_path / "two") == [two]
