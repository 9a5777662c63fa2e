"""Encoders of the papers, running statistics, CPC|A, delayed actions, transfer."""

import time

import gymnasium as gym
import numpy as np
import pytest
import torch
import ver_ppo

from tests.test_environment import make_row
from tests.test_run import logged_values, run_folders, small

DEPTH = gym.spaces.Box(0, 1, (128, 128, 1), np.float32)
RGB = gym.spaces.Box(0, 255, (128, 128, 3), np.uint8)
GOAL = gym.spaces.Box(-np.inf, np.inf, (3,), np.float32)


def build(observations, action=gym.spaces.Discrete(4), **options):
    options = ver_ppo.Options(env_id="pointnav", simulator="builtin", **options)
    return ver_ppo.Policy(ver_ppo.Spec(observations, action, ()), options), options


def sample(observations, batch):
    obs = {key: torch.stack([torch.as_tensor(space.sample()) for _ in range(batch)]) for key, space in observations.items()}
    return {key: part.to(ver_ppo.observation_dtype(observations[key])) for key, part in obs.items()}


def count(*shapes):
    """Weights of convolutions (in, out, kernel, groups), each with its GroupNorm."""
    return sum(i // g * o * k * k + 2 * o for i, o, k, g in shapes)


def bottleneck_stage(blocks, channels, planes, wide, groups, squeeze):
    """Weights of a stage of 1x1, 3x3, 1x1 blocks whose first one changes the number of channels."""
    out, width = 4 * planes, planes * wide
    se = (2 * out * (out // 16) + out // 16 + out) * squeeze
    total = 0
    for _ in range(blocks):
        total += count((channels, width, 1, 1), (width, width, 3, groups), (width, out, 1, 1)) + se
        total += count((channels, out, 1, 1)) if channels != out else 0
        channels = out
    return total


def by_hand(name, channels):
    """Weights up to the last feature map, written down from the papers."""
    if name == "resnet18":  # patches of 4x4; stages of 2 blocks of two 3x3; before three stages GroupNorm and 2x2 stride 2
        stages = sum(2 * (count((c, c, 3, 1), (c, c, 3, 1)) + c) for c in (32, 64, 128, 256))
        return count((channels, 32, 4, 1)) + stages + sum(2 * c + 4 * c * 2 * c + 2 * c for c in (32, 64, 128))
    blocks = {"resnet50": (3, 4, 6, 3), "se_resnext50": (3, 4, 6, 3), "se_resnext101": (3, 4, 23, 3)}[name]
    wide, groups, squeeze = (1, 1, 0) if name == "resnet50" else (2, 16, 1)
    total, into = count((channels, 32, 7, 1)), 32
    for stage, number in enumerate(blocks):
        total += bottleneck_stage(number, into, 32 * 2**stage, wide, groups, squeeze)
        into = 128 * 2**stage
    return total


@pytest.mark.parametrize("name", ver_ppo.BACKBONES)
def test_backbones_by_hand(name):
    """Numbers of weights and the shape of the last feature map are those that the papers' figures give."""
    images = ver_ppo.Images({"rgb": RGB, "depth": DEPTH})
    net = ver_ppo.ResNet(images, 512, ver_ppo.BACKBONES[name])
    assert sum(p.numel() for p in net.backbone.parameters()) == by_hand(name, 4)
    channels = 256 if name == "resnet18" else 1024
    assert net.backbone(torch.zeros(2, 4, 128, 128)).shape == (2, channels, 2, 2)
    assert net.compress[0].out_channels * 2 * 2 == 2048 == net.out.in_features
    assert net({"rgb": torch.zeros(2, 128, 128, 3, dtype=torch.uint8), "depth": torch.zeros(2, 128, 128, 1)}).shape == (
        2,
        512,
    )


def test_first_convolutions():
    """256 x 256 pixels as in DD-PPO: halved by pooling; the last feature map, 4 x 4 pixels, is compressed to 128 x 4 x 4."""
    images = ver_ppo.Images({"depth": gym.spaces.Box(0, 1, (256, 256, 1), np.float32)})
    net = ver_ppo.ResNet(images, 512, ver_ppo.BACKBONES["resnet50"])
    assert isinstance(net.backbone[0], torch.nn.AvgPool2d)
    assert net.compress(net.backbone(torch.zeros(1, 1, 256, 256))).shape == (1, 128 * 4 * 4)


@pytest.mark.parametrize("encoder", ["cnn", "resnet18", "se_resnext50", "none"])
def test_gradients_reach_every_weight(encoder):
    """RGB and depth of one size go through one encoder, the goal through its own, CPC|A through its GRU."""
    observations = {"rgb": RGB, "depth": DEPTH, "goal": GOAL}
    policy, options = build(observations, encoder=encoder, hidden_size=16, cpc=True, lstm_layers=2)
    assert list(policy.encoders) == (["goal"] if encoder == "none" else ["rgb", "goal"])
    obs = sample(observations, 6)
    action, sizes = torch.randint(4, (6, 1)), torch.tensor([2, 2, 2])
    first = torch.tensor([True] * 2 + [False] * 4)
    distribution, value, memory = policy.sequences(obs, action, first, torch.randn(2, *policy.state_shape), sizes)
    loss = distribution.log_prob(action).sum() + value.sum() + ver_ppo.cpc_loss(policy, *memory, action, sizes)
    loss.backward()
    dead = [name for name, p in policy.named_parameters() if p.requires_grad and (p.grad is None or not p.grad.any())]
    assert dead == []
    if encoder == "none":
        blind = policy.encode({**obs, "rgb": 255 - obs["rgb"]}, action, first)
        assert torch.equal(blind, policy.encode(obs, action, first))


def test_nothing_to_observe():
    """A blind agent without a goal is refused."""
    with pytest.raises(ver_ppo.UserError, match="nothing is left to observe"):
        build({"depth": DEPTH}, encoder="none")


def test_running_statistics():
    """RGB is normalized by mean and deviation of all rollouts so far, channel by channel; depth alone is not."""
    images, rng = ver_ppo.Images({"rgb": RGB, "depth": DEPTH}), np.random.default_rng(0)
    batches = [rng.integers(50 * k, 50 * k + 90, (8, 128, 128, 3), dtype=np.uint8) for k in (0, 1, 2)]
    depths = [rng.random((8, 128, 128, 1), np.float32) for _ in batches]
    for rgb, depth in zip(batches, depths):
        images.observe({"rgb": torch.from_numpy(rgb), "depth": torch.from_numpy(depth)}, ver_ppo.average_alone)
    everything = np.concatenate([np.concatenate(batches) / 255, np.concatenate(depths)], axis=3)
    mean, deviation = everything.mean(axis=(0, 1, 2)), everything.std(axis=(0, 1, 2))
    out = images({"rgb": torch.from_numpy(batches[0]), "depth": torch.from_numpy(depths[0])})
    expected = (everything[:8] - mean) / deviation
    np.testing.assert_allclose(out.permute(0, 2, 3, 1).numpy(), expected, atol=2e-3)
    only = ver_ppo.Images({"depth": DEPTH})
    assert not only.normalized and torch.equal(
        only({"depth": torch.from_numpy(depths[0])})[:, 0], torch.from_numpy(depths[0])[..., 0]
    )


def test_statistics_reach_those_who_act(tmp_path):
    """They are learned in a run, saved, and go with the weights to inference workers; frozen encoders keep them."""
    args = small(tmp_path, "--simulator", "builtin", "--camera", "rgb", "--image-size", "16", "--total-timesteps", "256")
    assert ver_ppo.main([*args, "--num-inference-workers", "2", "--num-workers", "2"]) == 0
    (folder,) = run_folders(tmp_path)
    saved = ver_ppo.load_checkpoint(folder / "checkpoint.pt")["policy"]
    assert saved["encoders.rgb.images.rollouts"] == 4 and 0.1 < saved["encoders.rgb.images.moments_2C"][0].min() < 0.9
    policy, _ = build({"rgb": RGB, "goal": GOAL}, hidden_size=16)
    names = [name for name, _ in policy.named_parameters()]  # these are what is published and checked
    assert "encoders.rgb.images.moments_2C" in names


@pytest.mark.parametrize("seed", range(20))
def test_cpc_stays_in_its_episode(seed):
    """Starts, actions and futures are of one environment and one episode, in order, at most CPC_HORIZON steps apart."""
    rng = np.random.default_rng(seed)
    env = rng.integers(4, size=200)
    first = rng.random(200) < rng.choice([0.02, 0.3])
    order, begin = ver_ppo.find_sequences(env, first, np.ones(200, bool))
    ((slots, begins),) = ver_ppo.cut_minibatches(order, begin, rng.permutation(len(begin)), 1)
    slots, batch_sizes, _ = ver_ppo.pack_sequences(slots, begins)
    episode = np.zeros(200, int)
    for e in range(4):
        episode[env == e] = 1000 * e + first[env == e].cumsum()
    time_of = np.zeros(200, int)
    for number in set(episode):
        time_of[episode == number] = np.arange((episode == number).sum())
    start, actions, later, future = (part.numpy() for part in ver_ppo.cpc_futures(batch_sizes))
    assert len(start) and (episode[slots[future]] == episode[slots[start]][:, None]).all()
    assert (time_of[slots[future]] - time_of[slots[start]][:, None] == later).all()
    assert later.min() >= 1 and later.max() <= ver_ppo.CPC_HORIZON
    for step in range(ver_ppo.CPC_HORIZON):
        needed = later.max(axis=1) > step  # the action `step` steps after the start leads to a future
        assert (time_of[slots[actions[needed, step]]] == time_of[slots[start[needed]]] + step).all()
        assert (episode[slots[actions[needed, step]]] == episode[slots[start[needed]]]).all()


def test_cpc_learns_to_predict_by_the_actions():
    """Where the future is position + actions, the loss falls far below chance; with the actions shuffled it does not."""
    losses = {}
    for shuffled in (False, True):
        torch.manual_seed(0)
        policy, _ = build({"goal": GOAL}, hidden_size=32, cpc=True, encoder="none")
        optimizer, batch_sizes = torch.optim.Adam(policy.parameters(), lr=3e-3), torch.full((12,), 16)
        for update in range(250):
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


@pytest.mark.parametrize(
    "env_id, more", [("pointnav", ["--encoder", "resnet18", "--simulator", "builtin"]), ("Pendulum-v1", ["--predict-std"])]
)
def test_cpc_trains(tmp_path, env_id, more):
    """In a run its loss is logged, and falls."""
    args = small(tmp_path, "--env-id", env_id, "--image-size", "64", "--num-workers", "0", *more)
    assert ver_ppo.main([*args, "--total-timesteps", "1600", "--cpc", "--debug"]) == 0
    (folder,) = run_folders(tmp_path)
    losses = logged_values(folder, "losses/cpc")
    assert len(losses) == 25 and np.mean(losses[-5:]) < np.mean(losses[:5])


def test_predicted_deviation():
    """With --predict-std it depends on the state; without, it does not."""
    space, observations = gym.spaces.Box(-1, 1, (2,)), {"goal": GOAL}
    for predicted in (False, True):
        policy, _ = build(observations, space, hidden_size=16, predict_std=predicted)
        torch.nn.init.normal_(policy.actor.weight)
        distribution, _ = policy.heads(torch.randn(5, 16))
        deviations = distribution.base_dist.scale
        assert (deviations.std(dim=0) > 0.01).all() == predicted and torch.isfinite(distribution.entropy()).all()


def delayed_answers(actions, **more):
    """Rewards, observations and ends that a row gives to these actions with --action-delay."""
    row, transfer = make_row("tests.envs:Count-v0", action_delay=True, **more)
    row.start(0, [])
    answers = []
    for action in actions:
        transfer.action[0] = action
        row.answer()
        answers.append((float(transfer.reward[0]), transfer.obs["obs"][0, 0].item() * 10, bool(transfer.truncated[0])))
    return answers


def test_delayed_actions():
    """The first action of an episode is answered by the first observation; then each is answered by what the one before did.
    (Count: the reward is 0.1 times the action, the observation counts the steps, the 7th truncates.)"""
    actions = [2, 0, 1, 2, 2, 0, 1, 2, 0, 1]
    answers = delayed_answers(actions)
    done = [None, *actions[:7], None, actions[8]]
    expected_reward = [0.0 if action is None else 0.1 * (action - 1) for action in done]
    assert [answer[0] for answer in answers] == pytest.approx(expected_reward, abs=1e-6)
    assert [round(answer[1]) for answer in answers] == [0, 1, 2, 3, 4, 5, 6, 0, 0, 1]
    assert [answer[2] for answer in answers] == [False] * 7 + [True] + [False] * 2


def test_simulation_beside_inference():
    """With --action-delay, a worker simulates 30 ms while inference takes 25 ms: a step takes the longer of the two."""
    sec = {}
    for delay in (False, True):
        options = ver_ppo.Options(
            env_id="tests.envs:Scenes-v0", num_envs=1, num_workers=1, action_delay=delay, sim_latency=30.0,
            sim_latency_spread=(0.0, 0.0, 0.0),
        )  # fmt: skip
        spec = ver_ppo.describe_env(options)
        transfer = ver_ppo.Transfer(spec, 1)
        workers = ver_ppo.Workers(options, "train", spec, transfer, [(0, [])])
        try:
            for step in range(22):
                if step == 2:
                    began = time.perf_counter()
                while not workers.receive(5.0):
                    pass
                time.sleep(0.025)
                workers.send([0])
            sec[delay] = (time.perf_counter() - began) / 20
        finally:
            workers.close()
    assert sec[False] > 0.054 and sec[True] < 0.8 * sec[False], sec


def test_delayed_actions_in_a_run(tmp_path):
    """Workers that simulate ahead give what environments in the main process give, and resuming works."""
    for workers in ("0", "2"):
        args = small(tmp_path / workers, "--env-id", "tests.envs:Count-v0", "--num-workers", workers, "--action-delay")
        assert ver_ppo.main([*args, "--total-timesteps", "256", "--debug"]) == 0
        (folder,) = run_folders(tmp_path / workers)
        lengths = logged_values(folder, "charts/episodic_length")
        assert set(lengths) == {8.0}  # 7 steps, and one in which nothing has been decided yet
        assert ver_ppo.main(["--resume", str(folder), "--total-timesteps", "512"]) == 0


@pytest.mark.parametrize("task", ["flee", "explore"])
def test_transfer_tasks(task):
    """Rewards add up to the metric, the goal says nothing, spaces are PointNav's."""
    env = ver_ppo.make_env(ver_ppo.Options(env_id=task, simulator="builtin", image_size=16), "train")
    pointnav = ver_ppo.make_env(ver_ppo.Options(simulator="builtin", image_size=16), "train")
    assert env.observation_space == pointnav.observation_space and env.action_space == pointnav.action_space
    rng, (name,) = np.random.default_rng(0), env.metadata["metrics"]
    for seed in range(5):
        observation, _ = env.reset(seed=seed)
        start, places, total = env.unwrapped.position, {tuple(np.floor(env.unwrapped.position))}, 0.0
        for _ in range(60):
            observation, reward, terminated, truncated, info = env.step(int(rng.choice([1, 1, 1, 2, 3])))
            total += reward
            places.add(tuple(np.floor(env.unwrapped.position)))
            assert observation["goal"].tolist() == [1, 1, 0] and not terminated
        straight = np.hypot(*(env.unwrapped.position - start))
        if task == "flee":
            assert info[name] == pytest.approx(total) and info[name] >= straight - 1e-6
        else:
            assert info[name] == len(places) == total + 1
        assert env.step(0)[2]
    assert ver_ppo.describe_env(ver_ppo.Options(env_id=task, simulator="builtin")).metrics == (name,)


def test_transfer(tmp_path, capsys):
    """--init-from takes the weights, but for the critic with --reset-critic; a frozen encoder does not learn."""
    args = small(tmp_path / "one", "--simulator", "builtin", "--image-size", "16", "--num-workers", "0")
    assert ver_ppo.main([*args, "--total-timesteps", "64"]) == 0
    (one,) = run_folders(tmp_path / "one")
    checkpoint = str(one / "checkpoint.pt")
    args = small(tmp_path / "two", "--env-id", "flee", "--simulator", "builtin", "--image-size", "16", "--num-workers", "0")
    args += ["--init-from", checkpoint, "--freeze-encoder", "--reset-critic", "--total-timesteps", "128", "--seed", "5"]
    assert ver_ppo.main(args) == 0
    assert "tensors come from" in capsys.readouterr().out
    (two,) = run_folders(tmp_path / "two")
    before, after = (ver_ppo.load_checkpoint(run / "checkpoint.pt")["policy"] for run in (one, two))
    same = {name for name in before if torch.equal(before[name], after[name])}
    assert {name for name in before if name.startswith("encoders.depth.")} <= same
    assert not {name for name in same if name.startswith(("actor", "core", "encoders.goal"))}
    assert not torch.allclose(before["critic.weight"], after["critic.weight"], atol=0.05)
    assert ver_ppo.main(["--resume", str(two), "--total-timesteps", "192"]) == 0
    assert ver_ppo.main([*args, "--hidden-size", "24"]) == 2
    assert "its encoders are others" in capsys.readouterr().err
    assert ver_ppo.main([*args, "--encoder", "resnet18"]) == 2
    assert "64 x 64" in capsys.readouterr().err
    assert ver_ppo.main([*SHORT, "--freeze-encoder"]) == 2 and "--freeze-encoder" in capsys.readouterr().err


SHORT = small("runs", "--env-id", "CartPole-v1")
