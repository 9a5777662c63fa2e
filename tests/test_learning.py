"""The loss by hand, the parts of an update, and that something is learned."""

import math
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
import torch
from torch.distributions import Categorical, Independent

import ver_ppo
from notebooks.extensions import networks, play
from notebooks.extensions.virtual_clock import SPEC, VirtualWorkers, build
from tests.helpers import batch_of, make_spec

pytestmark = pytest.mark.quick


def loss_by_hand(logits, value, batch):
    """Loss, policy term, share of clipped ratios and approximate KL, in plain floating-point
    numbers."""
    terms = []
    for m, row in enumerate(logits.tolist()):
        p = [math.exp(x) / sum(map(math.exp, row)) for x in row]
        names = "action", "log_prob", "norm_advantage", "returns", "weight"
        action, log_prob, advantage, returns, weight = (batch[name][m].item() for name in names)
        ratio = p[action] / math.exp(log_prob)
        policy_term = -weight * min(ratio * advantage, max(min(ratio, 1.2), 0.8) * advantage)
        error = (value[m].item() - returns) / batch["scale"]
        value_term, entropy = weight * 0.5 * error**2, -sum(q * math.log(q) for q in p)
        loss = policy_term + 0.7 * value_term - 0.03 * weight * entropy
        terms.append((loss, policy_term, abs(ratio - 1) > 0.2, ratio - 1 - math.log(ratio)))
    return np.mean(terms, axis=0)


def test_ppo_loss_by_hand():
    """Policy, value and entropy terms, and the gradient: by small differences of the loss, so none
    where the ratio has left the range in the direction of its advantage."""
    logits = torch.randn(12, 3).double().requires_grad_()
    value = torch.randn(12).double().requires_grad_()
    action = torch.randint(3, (12, 1))
    log_prob = logits.detach().log_softmax(dim=1).gather(1, action)[:, 0]
    # about half of the ratios leave their range
    batch = {"action": action, "log_prob": log_prob + 0.3 * torch.randn(12)}
    batch |= {name: torch.randn(12).double() for name in ("norm_advantage", "returns")} | {
        "weight": torch.rand(12).double(),
        "scale": 3.0,
    }
    distribution = Independent(Categorical(logits=logits[:, None]), 1)
    options = ver_ppo.Options(clip_coef=0.2, vf_coef=0.7)
    log_ent_coef = torch.tensor(0.03).double().log()
    loss, logs = ver_ppo.ppo_loss(distribution, value, batch, log_ent_coef, options)
    got = [
        loss.item(),
        *(logs[f"losses/{name}"].item() for name in ("policy_loss", "clipfrac", "approx_kl")),
    ]
    np.testing.assert_allclose(got, loss_by_hand(logits, value, batch), rtol=1e-5)
    assert 0 < got[2] < 1
    for tensor, gradient in zip((logits, value), torch.autograd.grad(loss, (logits, value))):
        for index in np.ndindex(*tensor.shape):
            losses = []
            for change in (1e-6, -2e-6):
                tensor.data[index] += change
                losses.append(loss_by_hand(logits, value, batch)[0])
            tensor.data[index] += 1e-6
            assert gradient[index].item() == pytest.approx(
                (losses[0] - losses[1]) / 2e-6, rel=1e-3, abs=1e-7
            )


def learn(policy, optimizer, rollout, options):
    """One update, as `train` learns."""
    ver_ppo.add_advantages(rollout, options)
    return ver_ppo.ppo_update(policy, optimizer, rollout, options)


def kept_batches(monkeypatch):
    """A list of all mini-batches that `ppo_update` makes from now on, and does not learn from."""
    batches = []

    def minibatch_step(policy, optimizer, batch, *rest):
        batches.append(batch)
        return {"losses/skipped": torch.zeros(())}

    monkeypatch.setattr(ver_ppo, "minibatch_step", minibatch_step)
    return batches


@pytest.mark.parametrize("target, grows", [(1.5, True), (0.1, False)])
def test_entropy_constraint(target, grows):
    """The learned coefficient rises while the entropy is below its target, falls while above, and
    keeps its bounds."""
    workers = VirtualWorkers(2, lambda e, step: 1.0)
    policy, rollout, c = build(
        workers, 2, 8, ent_coef=0.01, target_entropy=target, num_minibatches=1
    )
    optimizer = torch.optim.SGD([policy.log_ent_coef], lr=1.0)
    for _ in range(3):
        c.collect(rollout)
        logs = learn(policy, optimizer, rollout, c.options)
    assert (policy.log_ent_coef.item() > math.log(0.01)) == grows
    assert 0.1 < logs["losses/entropy"] < 1.5
    optimizer.param_groups[0]["lr"] = 0.0
    for start, bound in ((3.0, 1.0), (-100.0, 1e-4)):
        policy.log_ent_coef.data.fill_(start)
        learn(policy, optimizer, rollout, c.options)
        assert policy.log_ent_coef.exp().item() == pytest.approx(bound, rel=1e-4)


@pytest.mark.parametrize("bound", [2.0, -5.0])
def test_deviation_has_bounds(bound):
    """An entropy bonus widens the distribution of a continuous action up to a bound, and a
    deviation that falls stops at the other. From there it can still move back."""
    spec = make_spec(gym.spaces.Box(-1, 1, (2,)), gym.spaces.Box(-1, 1, (3,)))
    policy = ver_ppo.Policy(spec, ver_ppo.Options(hidden_size=8))
    optimizer = torch.optim.SGD([policy.log_std_A], lr=1.0)
    towards = 1.0 if bound > 0 else -1.0
    for sign, expected in ((towards, bound), (-towards, bound - towards)):
        for _ in range(10 if sign == towards else 1):
            optimizer.zero_grad()
            distribution, _ = policy.heads(torch.zeros(4, 8))
            (-sign * distribution.entropy().mean()).backward()
            optimizer.step()
            policy.keep_bounds()
        assert policy.log_std_A.tolist() == [expected] * 3


def test_entropy_constraint_is_of_the_plain_mean():
    """The weights of steps do not count: the gradient is coefficient x (mean - target)."""
    logits = torch.tensor([[0.0, 0.0], [0.0, 4.0]])
    each = torch.distributions.Categorical(logits=logits[:, None])
    distribution = torch.distributions.Independent(each, 1)
    zeros = torch.zeros(2)
    batch = {"action": torch.zeros(2, 1), "log_prob": zeros, "norm_advantage": zeros}
    batch |= {"returns": zeros, "weight": torch.tensor([1.0, 0.1]), "scale": 1.0}
    log_ent_coef = torch.tensor(math.log(0.25), requires_grad=True)
    options = ver_ppo.Options(target_entropy=0.1)
    loss, _ = ver_ppo.ppo_loss(distribution, zeros, batch, log_ent_coef, options)
    loss.backward()
    mean = distribution.entropy().mean().item()
    assert log_ent_coef.grad.item() == pytest.approx(0.25 * (mean - 0.1), rel=1e-5)


def test_entropy_coefficient_is_not_clipped():
    """Far from its target the coefficient's gradient is large: the network's is scaled down no more
    than without it."""
    norms, weights = [], []
    for target in (None, 20.0):
        workers = VirtualWorkers(2, lambda e, step: 1.0)
        torch.manual_seed(0)
        policy, rollout, c = build(
            workers, 2, 8, ent_coef=1.0, target_entropy=target, num_minibatches=1, update_epochs=1
        )
        c.collect(rollout)
        norms.append(
            learn(policy, torch.optim.SGD(policy.parameters(), lr=0.1), rollout, c.options)[
                "losses/grad_norm"
            ]
        )
        weights.append(policy.actor.weight.tolist())
    assert norms[0] == norms[1] > 0 and weights[0] == weights[1]


def test_minibatch_step():
    """A step follows the gradient of the whole loss, averaged over two processes and then scaled
    down to the largest norm. A gradient that is not finite moves no weight, and is counted."""
    options = {"num_minibatches": 1, "max_grad_norm": 0.1}
    policy, rollout, c = build(VirtualWorkers(2, lambda e, step: 1.0), 2, 8, **options)
    policy.auxiliary_loss = lambda features_MF, core_MH, batch: core_MH.square().mean()
    c.collect(rollout)
    rollout["norm_advantage"][:] = rollout["weight"][:] = 1.0
    batch = batch_of(rollout, [np.arange(e, 16, 2) for e in range(2)]) | {"scale": 1.0}
    weights = [weight for weight in policy.parameters() if weight.requires_grad]
    optimizer = torch.optim.SGD(weights, lr=1.0)
    step = lambda average: ver_ppo.minibatch_step(policy, optimizer, batch, c.options, average)
    for _ in range(2):
        others = [0.02 * torch.randn_like(weight) for weight in weights]
        distribution, value_M, (_, core_MH) = ver_ppo.run_sequences(policy, batch)
        loss, _ = ver_ppo.ppo_loss(distribution, value_M, batch, policy.log_ent_coef, c.options)
        own = torch.autograd.grad(loss + core_MH.square().mean(), weights)
        means = [(one + other) / 2 for one, other in zip(own, others)]
        norm = math.sqrt(sum(mean.square().sum().item() for mean in means))
        assert norm > 0.2
        expected = [weight - 0.1 / norm * mean for weight, mean in zip(weights, means)]
        logs = step(lambda mine: [one.add_(other).div_(2) for one, other in zip(mine, others)])
        torch.testing.assert_close(weights, expected, rtol=0, atol=1e-6)
        assert logs["losses/grad_norm"].item() == pytest.approx(norm, rel=1e-5)
        assert logs["losses/skipped"] == 0
    batch["norm_advantage"][3] = math.nan
    before = [weight.detach().clone() for weight in weights]
    assert step(lambda mine: None)["losses/skipped"] == 1
    assert all(map(torch.equal, weights, before))


def test_mean_logs():
    """Of the mini-batches that were not skipped."""
    logs = [(0.0, 2.0), (1.0, math.nan), (0.0, 3.0), (0.0, 4.0)]
    logs = [{"losses/skipped": torch.tensor(a), "x": torch.tensor(b)} for a, b in logs]
    assert ver_ppo.mean_logs(logs) == {"losses/skipped": 0.25, "x": 3.0}


def test_epochs(monkeypatch):
    """Each epoch learns from every step once, in --num-minibatches mini-batches of equal size, in
    an order of its own; with --norm-adv from advantages of mean 0 and deviation 1."""
    workers = VirtualWorkers(
        3, lambda e, step: 1.0 + e, lambda e, step: "terminated" if step % 5 == 4 else None
    )
    policy, rollout, c = build(workers, 3, 20, num_minibatches=4, update_epochs=3, norm_adv=True)
    c.collect(rollout)
    batches = kept_batches(monkeypatch)
    learn(policy, torch.optim.SGD(policy.parameters(), lr=1.0), rollout, c.options)
    advantage_S = rollout["advantage"]
    normal_S = (advantage_S - advantage_S.mean()) / advantage_S.std()
    for batch in batches:
        assert len(batch["row"]) == 15
        np.testing.assert_allclose(
            batch["norm_advantage"], normal_S[batch["row"]], rtol=1e-4, atol=1e-5
        )
    epochs = np.stack([batch["row"] for batch in batches]).reshape(3, 60).tolist()
    assert [sorted(steps) for steps in epochs] == [list(range(60))] * 3
    assert epochs[0] != epochs[1] != epochs[2]


def test_units_of_returns():
    """The scale is the running root mean square of the returns. The first returns that are not 0
    count whole, and later ones a twentieth. With several processes, the mean of their squares
    counts. Values are in units of the scale, and stay as they are when it moves."""
    workers = VirtualWorkers(2, lambda e, step: 1.0)
    policy, rollout, c = build(workers, 2, 8, num_minibatches=1)
    policy.critic.scale.data.fill_(0.0)
    inputs = (
        {"obs": torch.randn(5, 4)},
        torch.zeros(5, 1, dtype=torch.int64),
        torch.zeros(5, dtype=torch.bool),
    )
    state = torch.randn(5, *policy.state_shape)
    assert not policy.step(*inputs, state)[1].any()
    policy.critic.bias.data.fill_(0.5)
    rollout.rows, square = 12, None
    for k in range(6):
        rollout["returns"][:] = (k > 0) * np.random.default_rng(k).normal(1000, 1000, 16)
        mine = np.mean(rollout["returns"][:12].astype(float) ** 2)
        other = (k > 0) * 5.0 * k

        def average(tensors):
            tensors[0].add_(other).div_(2)

        value_B = policy.step(*inputs, state)[1].clone()
        policy.critic.rescale(rollout.complete["returns"], average)
        found = policy.critic.scale.item()
        if k > 1:
            now_B = policy.step(*inputs, state)[1]
            torch.testing.assert_close(now_B, value_B, rtol=1e-4, atol=1e-3)
        new = (mine + other) / 2
        square = min(square + 0.05 * (new - square), 4 * square) if square else new
        assert found == pytest.approx(math.sqrt(square), rel=1e-5)
        assert (k == 0) == (found == 0.0)
    assert value_B.any()
    value_B = policy.step(*inputs, state)[1].clone()
    policy.critic.scale.data /= 8
    assert torch.equal(policy.step(*inputs, state)[1], value_B / 8)


@pytest.mark.parametrize("norm_adv", [True, False])
def test_units_of_advantages(norm_adv):
    """With --norm-adv, the mean and the deviation over all processes that learn together; else the
    scale of values. The processes exchange the means of their own numbers."""
    policy, rollout, c = build(VirtualWorkers(2, lambda e, step: 1.0), 2, 8, norm_adv=norm_adv)
    rollout.rows = 12
    both = np.random.default_rng(0).normal(3, 2, (2, 12))
    rollout["advantage"][:12] = both[0]
    mine = torch.tensor([both[0].mean(), (both[0] ** 2).mean()])
    other = torch.tensor([both[1].mean(), (both[1] ** 2).mean()])

    def average(tensors):
        torch.testing.assert_close(tensors[0], mine, rtol=1e-6, atol=0)
        tensors[0].add_(other).div_(2)

    ver_ppo.normalize_advantages(rollout, 5.0, c.options, average)
    unit = (both.mean(), both.std()) if norm_adv else (0.0, 5.0)
    expected = (both[0] - unit[0]) / unit[1]
    np.testing.assert_allclose(rollout["norm_advantage"][:12], expected, rtol=1e-5, atol=1e-6)
    assert not rollout["norm_advantage"][12:].any()


def test_before_the_first_reward(monkeypatch):
    """Where all returns were 0 so far, the unit of values is tiny and nothing is infinite."""
    policy, rollout, c = build(VirtualWorkers(2, lambda e, step: 1.0), 2, 8, num_minibatches=1)
    policy.critic.scale.fill_(0.0)
    rollout.rows = 16
    rollout["segment"][:] = np.arange(16) % 2
    batches = kept_batches(monkeypatch)
    ver_ppo.ppo_update(policy, None, rollout, c.options)
    assert [batch["scale"] for batch in batches] == [1e-8] * c.options.update_epochs
    assert not batches[0]["norm_advantage"].any() and policy.critic.scale == 0


def test_single_steps_without_a_memory(monkeypatch):
    """Without a memory, PPO shuffles single steps: each mini-batch has steps of many
    environments, and all steps are in one mini-batch of each epoch."""
    workers = VirtualWorkers(8, lambda e, step: 1.0)
    policy, rollout, c = build(workers, 8, 16, num_minibatches=4, lstm_layers=0)
    c.collect(rollout)
    batches = kept_batches(monkeypatch)
    learn(policy, None, rollout, c.options)
    rows = np.reshape([batch["row"] for batch in batches], (c.options.update_epochs, 128))
    assert np.array_equal(np.sort(rows), [range(128)] * c.options.update_epochs)
    # 32 steps of sequences would come from 2 or 3 environments
    assert all(len(np.unique(rollout["env"][batch["row"]])) > 4 for batch in batches)
    assert all(batch["batch_sizes"].tolist() == [32] for batch in batches)


def test_one_outlier_in_the_rewards():
    """It at most doubles the unit of returns, which is as it was 60 rollouts later; and numbers
    that float32 can just hold change nothing but the unit."""
    policy, rollout, c = build(VirtualWorkers(2, lambda e, step: 1.0), 2, 8, num_minibatches=1)
    policy.critic.scale.data.fill_(0.0)
    rollout.rows = 16
    units = []
    for k in range(63):
        rollout["returns"][:] = np.random.default_rng(k).normal(20, 5, 16)
        if k == 2:
            rollout["returns"][3] = -1e5
        policy.critic.rescale(rollout.complete["returns"], lambda tensors: None)
        units.append(policy.critic.scale.item())
    assert units[2] == pytest.approx(2 * units[1]) and units[-1] < 1.2 * units[1]
    policy.critic.scale.data.fill_(0.0)
    rollout["returns"][:] = 3e38
    policy.critic.rescale(rollout.complete["returns"], lambda tensors: None)
    assert 1e38 < policy.critic.scale.item() < math.inf


def test_rewards_of_any_size(tmp_path):
    """With rewards 128 times as large, or divided by 128, a run takes the same actions. All weights
    are the same bit for bit, except the scale. With a factor of 100, which is no power of 2, they
    are the same up to rounding. With 0, only the entropy bonus is learned."""
    saved = {}
    for factor in (1, 128, 1 / 128, 100, 0):
        line = "--env-id tests.envs:Cue-v0 --num-workers 0 --learner-threads 1"
        line += " --num-envs 4 --num-steps 16 --hidden-size 8 --total-timesteps 384"
        line += " --eval-episodes 0 --gamma 0.875 --gae-lambda 0.5"
        line += f" --runs-dir {tmp_path / str(factor)}"
        line += f" --wrappers tests.envs:Rewards(factor={factor})"
        assert ver_ppo.main(line.split()) == 0
        (folder,) = (tmp_path / str(factor)).iterdir()
        saved[factor] = ver_ppo.load_checkpoint(folder / "checkpoint.pt")["policy"]
    first = saved[1]["critic.scale"].item()
    for factor, weights in saved.items():
        scale = weights.pop("critic.scale").item() / (factor or 1)
        assert factor == 0 or scale == pytest.approx(first, rel=1e-4)
        for name, weight in weights.items():
            if factor in (128, 1 / 128):
                assert torch.equal(weight, saved[1][name]), name
            if factor == 100:
                torch.testing.assert_close(weight, saved[1][name], rtol=1e-3, atol=1e-4)
    assert not torch.allclose(saved[0]["actor.weight"], saved[1]["actor.weight"], atol=1e-3)


@pytest.mark.parametrize("grows_after, expected", [(10**9, 10.0), (300, 80.0)])
def test_true_values(tmp_path, grows_after, expected):
    """Every value of `Forever` is known, also after its rewards have grown during the run. (With
    this seed, values that move with their unit end at 14.6.)"""
    line = "--env-id tests.envs:Forever-v0 --num-workers 0 --learner-threads 1 --gamma 0.9"
    line += f" --env-kwargs grows_after={grows_after} --num-envs 32 --num-steps 32 --seed 5"
    line += f" --hidden-size 32 --total-timesteps 40000 --eval-episodes 0 --runs-dir {tmp_path}"
    assert ver_ppo.main(line.split()) == 0
    (folder,) = tmp_path.iterdir()
    path = folder / "checkpoint.pt"
    _, policy, _ = play.load_saved(path, trust=True)
    first = torch.ones(1, dtype=torch.bool)
    no_action = torch.zeros(1, 1, dtype=torch.int64)
    no_memory = torch.zeros(1, *policy.state_shape)
    _, value_B, _ = policy.step({"obs": torch.ones(1, 1)}, no_action, first, no_memory)
    assert value_B.item() == pytest.approx(expected, rel=0.1)


def test_bfloat16_is_refused(monkeypatch):
    """Where the CPU would only emulate it."""
    options = ver_ppo.Options(hidden_size=8, device="cpu")
    monkeypatch.setattr(networks, "computes_bf16", lambda device: True)
    assert networks.ResNet18(SPEC, options, bf16=True).bf16
    monkeypatch.setattr(networks, "computes_bf16", lambda device: False)
    with pytest.raises(ver_ppo.UserError, match="cpu has no instructions for bfloat16"):
        networks.ResNet18(SPEC, options, bf16=True)


def test_bfloat16():
    """Only the encoders compute in bf16. Their features are float32 again, and close. So learning
    finds the log-probabilities and values that acting found."""
    policy = networks.ResNet18(SPEC, ver_ppo.Options(hidden_size=8))
    inputs = (
        {"obs": torch.randn(9, 4)},
        torch.randint(3, (9, 1)),
        torch.zeros(9, dtype=torch.bool),
    )
    features = []
    for policy.bf16 in (False, True):
        features.append(policy.encode(*inputs))
    torch.testing.assert_close(*features, rtol=0.05, atol=0.05)
    assert features[1].dtype == torch.float32 and not torch.equal(*features)
    workers = VirtualWorkers(
        3, lambda e, step: 1.0 + e, lambda e, step: "terminated" if step % 5 == 4 else None
    )
    policy, rollout, c = build(workers, 3, 20, networks.ResNet18)
    policy.bf16 = True
    c.collect(rollout)
    sequences = ver_ppo.find_sequences(rollout["segment"], rollout["first"])
    batch = batch_of(rollout, sequences)
    distribution, value, _ = ver_ppo.run_sequences(policy, batch)
    torch.testing.assert_close(
        distribution.log_prob(batch["action"]), batch["log_prob"], rtol=0, atol=2e-3
    )
    torch.testing.assert_close(
        value, torch.from_numpy(rollout["value"])[batch["row"]], rtol=0, atol=2e-3
    )


def test_distributions():
    """Several choices are independent: log-probabilities and entropies add, the mode is each
    one's."""
    spec = make_spec(gym.spaces.Box(-1, 1, (4,)), gym.spaces.MultiDiscrete([3, 4]))
    policy = ver_ppo.Policy(spec, ver_ppo.Options(hidden_size=8))
    core = 100 * torch.randn(50, 8)
    # three choices, and one that is not there; four
    parts = [Categorical(logits=part) for part in policy.actor(core).split([3, 1, 4], 1)[::2]]
    joint = policy.heads(core)[0]
    action = joint.sample()
    torch.testing.assert_close(
        joint.log_prob(action), sum(p.log_prob(a) for p, a in zip(parts, action.T))
    )
    torch.testing.assert_close(joint.entropy(), sum(p.entropy() for p in parts))
    assert joint.mode.tolist() == torch.stack([part.mode for part in parts], 1).tolist()


def test_learning_rate():
    """It follows a cosine from 1 to 0."""
    options = ver_ppo.Options(total_timesteps=1000)
    steps = 0, 500, 1000, 1100
    runs = [SimpleNamespace(step=step, options=options) for step in steps]
    assert [round(ver_ppo.Run.decay(run), 9) for run in runs] == [1, 0.5, 0, 0]
