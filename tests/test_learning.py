"""The loss by hand, the update, and that something is learned."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
import ver_ppo
from torch.distributions import Categorical
from virtual_clock import VirtualWorkers, build, collect, learn


def loss_inputs(seed=0, steps=12):
    """A mini-batch of random numbers."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(steps, 3, generator=generator, requires_grad=True)
    value = torch.randn(steps, generator=generator, requires_grad=True)
    batch = {
        "action": torch.randint(3, (steps, 1), generator=generator),
        "log_prob": -1 - torch.rand(steps, generator=generator),
        "advantage": torch.randn(steps, generator=generator),
        "return": torch.randn(steps, generator=generator),
        "weight": torch.rand(steps, generator=generator),
    }
    return logits, value, batch


def test_ppo_loss_by_hand():
    """Policy, value and entropy terms, step by step in plain floating-point numbers."""
    options = ver_ppo.Options(clip_coef=0.2, vf_coef=0.5, ent_coef=0.03)
    logits, value, batch = loss_inputs()
    distribution = ver_ppo.MultiCategorical(logits, [3])
    loss, logs = ver_ppo.ppo_loss(distribution, value, batch, torch.tensor(math.log(0.03)), options)
    policy_terms, value_terms, entropies, clipped = [], [], [], 0
    for m in range(len(value)):
        p = torch.softmax(logits[m], 0).tolist()
        ratio = p[batch["action"][m, 0]] / math.exp(batch["log_prob"][m])
        advantage, weight = batch["advantage"][m].item(), batch["weight"][m].item()
        policy_terms.append(-weight * min(ratio * advantage, max(min(ratio, 1.2), 0.8) * advantage))
        value_terms.append(weight * 0.5 * (value[m].item() - batch["return"][m].item()) ** 2)
        entropies.append(weight * -sum(q * math.log(q) for q in p))
        clipped += abs(ratio - 1) > 0.2
    expected = np.mean(policy_terms) + 0.5 * np.mean(value_terms) - 0.03 * np.mean(entropies)
    assert loss.item() == pytest.approx(expected, rel=1e-5)
    assert logs["losses/policy_loss"].item() == pytest.approx(np.mean(policy_terms), rel=1e-4)
    assert logs["losses/clipfrac"].item() == pytest.approx(clipped / len(value)) and 0 < clipped < len(value)


def test_no_gradient_beyond_the_clip_range():
    """A step whose ratio has left the range in the direction of its advantage no longer pushes."""
    options = ver_ppo.Options(vf_coef=0.0, ent_coef=0.0)
    logits, value, batch = loss_inputs()
    distribution = ver_ppo.MultiCategorical(logits, [3])
    batch["log_prob"] = distribution.log_prob(batch["action"]).detach() - 1.0  # ratio e
    for sign, pushes in ((1.0, False), (-1.0, True)):
        batch["advantage"] = torch.full_like(batch["advantage"], sign)
        loss, _ = ver_ppo.ppo_loss(distribution, value, batch, torch.tensor(-1e9), options)
        (gradient,) = torch.autograd.grad(loss, logits, retain_graph=True)
        assert bool(gradient.any()) == pushes


@pytest.mark.parametrize("target, grows", [(1.5, True), (0.1, False)])
def test_entropy_constraint(target, grows):
    """The learned coefficient rises while the entropy is below its target, falls while above, and keeps its bounds."""
    options = ver_ppo.Options(num_envs=2, num_steps=8, hidden_size=8, ent_coef=0.01, target_entropy=target, num_workers=0)
    workers = VirtualWorkers(2, lambda row, step: 1.0)
    policy, rollout, collector = build(workers, 2, 8, ent_coef=0.01, target_entropy=target, num_minibatches=1)
    optimizer = torch.optim.Adam(policy.parameters(), lr=0.0)
    learnable = torch.optim.SGD([policy.log_ent_coef], lr=1.0)
    before = policy.log_ent_coef.item()
    for _ in range(3):
        collect(policy, rollout, collector)
        logs = learn(policy, optimizer, rollout, options)
        learnable.step()
    assert (policy.log_ent_coef.item() > before) == grows
    assert 0.1 < logs["losses/entropy"] < 1.5
    with torch.no_grad():
        policy.log_ent_coef.fill_(3.0)
    learn(policy, optimizer, rollout, options)
    assert policy.log_ent_coef.exp().item() == pytest.approx(1.0)
    with torch.no_grad():
        policy.log_ent_coef.fill_(-100.0)
    learn(policy, optimizer, rollout, options)
    assert policy.log_ent_coef.exp().item() == pytest.approx(1e-4)


def test_ratio_is_one_before_the_first_step():
    """Recomputed over packed sequences, the collected log-probabilities are the same: the first ratio is 1 and the
    approximate KL 0, carried-over records (of the same weights here) included."""
    workers = VirtualWorkers(
        3, lambda row, step: [1.0, 1.7, 6.1][row], lambda row, step: "terminated" if step % 9 == 8 else None
    )
    policy, rollout, collector = build(workers, 3, 20, num_minibatches=4)
    options = ver_ppo.Options(num_envs=3, num_steps=20, num_minibatches=4, update_epochs=1)
    optimizer = torch.optim.Adam(policy.parameters(), lr=0.0)
    for collector.version[...] in range(3):
        collect(policy, rollout, collector)
        logs = learn(policy, optimizer, rollout, options)
        assert logs["losses/clipfrac"] == 0 and abs(logs["losses/approx_kl"]) < 1e-6
    assert rollout.carried > 0 and logs["losses/grad_norm"] > 0


def test_not_a_number_touches_no_weight():
    """A gradient that is not finite is skipped and counted; the third in a row stops the run. No weight moves."""
    workers = VirtualWorkers(2, lambda row, step: 1.0)
    policy, rollout, collector = build(workers, 2, 8)
    optimizer = torch.optim.Adam(policy.parameters())
    collect(policy, rollout, collector)
    options = ver_ppo.Options(num_envs=2, num_steps=8, num_minibatches=1)
    before = {name: p.clone() for name, p in policy.named_parameters()}
    rewards = rollout.reward.copy()
    rollout.reward[3] = np.nan
    assert learn(policy, optimizer, rollout, options)["losses/skipped"] == 1 and policy.skipped == 2
    assert all(torch.equal(before[name], p) for name, p in policy.named_parameters())
    with pytest.raises(FloatingPointError, match="three times in a row: try a lower --learning-rate"):
        learn(policy, optimizer, rollout, options)
    assert all(torch.equal(before[name], p) for name, p in policy.named_parameters())
    rollout.reward[:] = rewards
    assert learn(policy, optimizer, rollout, options)["losses/skipped"] == 0 and policy.skipped == 0
    assert any(not torch.equal(before[name], p) for name, p in policy.named_parameters())


def test_bfloat16():
    """Under autocast (allowed on CUDA only, tried here on the CPU) values and log-probabilities stay close, in float32."""
    workers = VirtualWorkers(2, lambda row, step: 1.0)
    policy, rollout, collector = build(workers, 2, 8)
    policy.bf16 = True
    collect(policy, rollout, collector)
    assert rollout.value.dtype == rollout.state.dtype == torch.float32
    size, first = rollout.size, torch.from_numpy(rollout.first[: rollout.size])
    with torch.no_grad():
        obs = {"obs": rollout.obs["obs"][:size]}
        _, value, _ = policy.step(obs, rollout.prev_action[:size], first, rollout.state[:size])
    torch.testing.assert_close(value, rollout.value[:size], rtol=0.05, atol=0.05)
    assert not torch.equal(value, rollout.value[:size])
    optimizer = torch.optim.Adam(policy.parameters())
    logs = learn(policy, optimizer, rollout, ver_ppo.Options(num_envs=2, num_steps=8))
    assert np.isfinite(list(logs.values())).all()


def test_distributions():
    """Several choices are independent: log-probabilities and entropies add, the mode is each one's."""
    logits = torch.randn(5, 7)
    joint = ver_ppo.MultiCategorical(logits, [3, 4])
    action = joint.sample()
    parts = [Categorical(logits=logits[:, :3]), Categorical(logits=logits[:, 3:])]
    torch.testing.assert_close(joint.log_prob(action), sum(p.log_prob(a) for p, a in zip(parts, action.T)))
    torch.testing.assert_close(joint.entropy(), sum(p.entropy() for p in parts))
    assert joint.mode.tolist() == torch.stack([logits[:, :3].argmax(1), logits[:, 3:].argmax(1)], 1).tolist()


def test_learning_rate():
    """Cosine from the start value to 0."""
    options = ver_ppo.Options(learning_rate=1e-3, total_timesteps=1000)
    assert [round(ver_ppo.learning_rate_at(step, options), 9) for step in (0, 500, 1000, 1100)] == [1e-3, 5e-4, 0, 0]


def cue_success(tmp_path, recurrent, steps):
    """Share of right answers in the memory task after training."""
    options = ver_ppo.Options(
        env_id="tests.envs:Cue-v0", total_timesteps=steps, num_workers=0, num_envs=16, num_steps=64, hidden_size=32,
        learning_rate=3e-3, gae_lambda=1.0, update_epochs=4, norm_adv=True, recurrent=recurrent, runs_dir=str(tmp_path),
        eval_episodes=0, device="cpu", learner_threads=1,
    )  # fmt: skip
    folder = ver_ppo.train(options)
    spec = ver_ppo.describe_env(options)
    policy = ver_ppo.Policy(spec, options)
    ver_ppo.load_policy(policy, ver_ppo.load_checkpoint(folder / "checkpoint.pt"), folder)
    return ver_ppo.evaluate(policy, spec, replace(options, eval_episodes=200, greedy=True))[:, 0].mean()


def test_memory_task(tmp_path):
    """A cue seen at the first step and asked for ten steps later: solved with the LSTM, and not without."""
    assert cue_success(tmp_path, recurrent=True, steps=150_000) > 0.95
    assert cue_success(tmp_path, recurrent=False, steps=50_000) < 0.65
