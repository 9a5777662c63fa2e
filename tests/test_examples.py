"""The examples: each file does by its command what it claims."""

import ast
import csv
import importlib
import os
import re
import shlex
import subprocess
import sys
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import ver_multigpu
import ver_ppo
from notebooks.extensions.check import check_rollout
from notebooks.extensions.overlap import Overlap
from notebooks.extensions.virtual_clock import (
    SPEC,
    VirtualWorkers,
    assert_nothing_is_lost,
    build,
    taken,
)
from tests.helpers import ROOT, batch_of, make_spec

HALF = "notebooks.examples.half:Half"
HOME = ROOT / "notebooks" / "examples"
EXAMPLES = {}  # by file name without .py: arguments of its command
for path in sorted(HOME.glob("*.py")):
    told = ast.get_docstring(ast.parse(path.read_text()), clean=False)
    (command,) = re.findall(r"^ {4}python (?:ver_ppo\.py|-m [\w.]+) (.*)", told, re.M)
    EXAMPLES[path.stem] = shlex.split(command)
SIZES = "--num-envs 4 --num-steps 16 --num-minibatches 2 --hidden-size 16 --num-workers 0"
SIZES += " --eval-episodes 2"
SMALL = [*SIZES.split(), "--device", "cpu", "--learner-threads", "1"]


def module(name):
    return importlib.import_module(f"notebooks.examples.{name}")


def run(name, tmp_path, steps, *more, main=ver_ppo.main):
    """Run an example's command, smaller, with success. Returns the run's folder."""
    args = EXAMPLES[name]
    end = ["--total-timesteps", str(steps), "--runs-dir", str(tmp_path)]
    assert main([*args, *SMALL, *end, *more]) == 0
    (folder,) = tmp_path.iterdir()
    return folder


def resume(name, folder, steps):
    """Continue an example's run. Its command names the code again."""
    args = EXAMPLES[name]
    more = ["--resume", str(folder), "--total-timesteps", str(steps)]
    assert ver_ppo.main([*args, *more]) == 0


def new_policy(name):
    """The policy with which an example's run begins."""
    args = EXAMPLES[name]
    _, policy = ver_ppo.build(ver_ppo.parse_options([*args, *SMALL]))
    return policy


def saved(folder):
    return ver_ppo.load_checkpoint(folder / "checkpoint.pt")


def curves(folder):
    """All that TensorBoard has: {tag: [(step, value), ...]}."""
    events = EventAccumulator(str(folder)).Reload()
    return {
        tag: [(event.step, event.value) for event in events.Scalars(tag)]
        for tag in events.Tags()["scalars"]
    }


def example_policy(name, policy_class, **arguments):
    """A policy of an example for the virtual clock's environments, and a batch of what it
    collected, episodes' ends included."""
    ends = {
        (e, t): "truncated" if e % 2 else "terminated"
        for e in range(4)
        for t in range(3 + e, 90, 5)
    }
    workers = VirtualWorkers(4, lambda e, step: 1 + e * 0.37, lambda e, step: ends.get((e, step)))
    made = getattr(module(name), policy_class)
    policy, rollout, c = build(
        workers, 4, 16, lambda spec, options: made(spec, options, **arguments)
    )
    c.collect(rollout)
    ver_ppo.add_advantages(rollout, c.options)
    sequences = ver_ppo.find_sequences(rollout["segment"], rollout["first"])
    order = torch.randperm(len(sequences)).tolist()
    minibatch = ver_ppo.cut_minibatches([sequences[q] for q in order], 2)[0]
    batch = batch_of(rollout, minibatch) | {"scale": 1.0}
    return policy, rollout, minibatch, batch


def test_there_are_nine():
    """Each is short, its command names it, and the manual has it."""
    assert len(EXAMPLES) == 9
    page = (ROOT / "notebooks" / "DOORS.md").read_text()
    assert set(re.findall(r"\(examples/(\w+)\.py\)", page)) == set(EXAMPLES)
    for name, args in EXAMPLES.items():
        _, _, code = (HOME / f"{name}.py").read_text().split('"""', 2)
        assert len(code.strip().splitlines()) <= 34 and max(map(len, code.splitlines())) <= 100
        named = any(f"notebooks.examples.{name}:" in word for word in args)
        assert named or name == "annealed"


def test_logger(tmp_path):
    """It has every number that TensorBoard has; a resumed run goes on behind them."""
    folder = run("csv_log", tmp_path, 192)
    before = (folder / "all.csv").read_text()
    resume("csv_log", folder, 320)
    after = (folder / "all.csv").read_text()
    assert after.startswith(before) and len(after) > len(before)
    found = {}
    for step, tag, value in csv.reader(after.splitlines()):
        found.setdefault(tag, []).append(
            (int(step), pytest.approx(float(value), rel=1e-5, nan_ok=True))
        )
    assert curves(folder) == found
    assert [step for step, _ in found["losses/policy_loss"]] == [64, 128, 192, 256, 320]
    assert [step for step, _ in found["eval/return"]] == [192, 320]


def test_curves_elsewhere(tmp_path):
    """A run without a network: what would be sent has every curve, and the options."""
    pytest.importorskip("wandb", reason="wandb is not installed")
    args = EXAMPLES["weights_biases"]
    offline = {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "WANDB_DIR": str(tmp_path)}
    environment = {**os.environ, **offline}
    end = ["--total-timesteps", "192", "--runs-dir", str(tmp_path / "runs")]
    command = [sys.executable, "ver_ppo.py", *args, *SMALL, *end]
    subprocess.run(command, cwd=ROOT, env=environment, check=True, timeout=300)
    (folder,) = (tmp_path / "runs").iterdir()
    (sent,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    content = sent.read_bytes()
    assert [tag for tag in curves(folder) if tag.encode() not in content] == []
    assert b"num_minibatches" in content


with_muon = pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="Muon needs torch 2.9")


@with_muon
def test_optimizer(tmp_path):
    """Muon has a momentum for each matrix, Adam its own state for all else; both follow the
    schedule; everything moves; a resumed run goes on with these states."""
    folder = run("muon", tmp_path, 192)
    first = saved(folder)
    policy = new_policy("muon")
    learned = {name for name, weight in policy.named_parameters() if weight.requires_grad}
    moved = {
        name
        for name, weight in policy.named_parameters()
        if not torch.equal(weight, first["policy"][name])
    }
    assert learned <= moved
    matrices = {
        name
        for name in learned
        if name.startswith(("encoders.", "core.")) and policy.get_parameter(name).ndim == 2
    }
    assert len(matrices) == 4  # of the vector's encoder, and of the LSTM
    states = list(first["optimizer"]["state"].values())
    assert sum("momentum_buffer" in state for state in states) == len(matrices)
    assert sum("exp_avg" in state for state in states) == len(learned) - len(matrices)
    rate = 2e-3 * 0.5 * (1 + np.cos(np.pi * 128 / 192))
    assert [group["lr"] for group in first["optimizer"]["param_groups"]] == pytest.approx(
        [rate, rate]
    )
    resume("muon", folder, 320)
    for content, updates in ((first, 3), (saved(folder), 5)):
        steps = [
            int(state["step"])
            for state in content["optimizer"]["state"].values()
            if "step" in state
        ]
        assert set(steps) == {updates * 2 * 2}  # --update-epochs, --num-minibatches


@with_muon
def test_optimizer_is_both(tmp_path):
    """It does what Muon and Adam would do apart, also after it was written and read. Another
    optimizer's state is refused."""
    policies = [ver_ppo.Policy(SPEC, ver_ppo.Options(hidden_size=8)) for _ in range(2)]
    policies[1].load_state_dict(policies[0].state_dict())
    both = [dict(policy.named_parameters()) for policy in policies]
    names = [
        name
        for name in both[0]
        if name.startswith(("encoders.", "core.")) and both[0][name].ndim == 2
    ]
    fast = torch.optim.Muon(
        [both[1][name] for name in names], lr=2e-3, weight_decay=0.0, adjust_lr_fn="match_rms_adamw"
    )
    adam = torch.optim.Adam(
        [weight for name, weight in both[1].items() if name not in names], lr=2e-3, eps=1e-5
    )
    make = module("muon").Muon.make_optimizer
    together = make(SimpleNamespace(policy=policies[0], options=ver_ppo.Options()))
    for step in range(4):
        for group in (*together.param_groups, *fast.param_groups, *adam.param_groups):
            group["lr"] = 2e-3 / (1 + step)
        for one, two in zip(policies[0].parameters(), policies[1].parameters()):
            if one.requires_grad:
                one.grad = torch.randn_like(one)
                two.grad = one.grad.clone()
        together.step()
        fast.step()
        adam.step()
        for name in both[0]:
            assert torch.equal(both[0][name], both[1][name]), (step, name)
        if step == 1:
            torch.save(together.state_dict(), tmp_path / "state.pt")
            together = make(SimpleNamespace(policy=policies[0], options=ver_ppo.Options()))
            together.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    together.zero_grad()
    assert all(weight.grad is None for weight in policies[0].parameters())
    usual = torch.optim.Adam(policies[0].parameters())
    for one, two in ((usual, together), (together, usual)):
        with pytest.raises(ValueError, match="different number of parameter groups"):
            one.load_state_dict(two.state_dict())


def test_sampler():
    """A rollout ends with the very step that is the T-th of half of the environments; nothing is
    lost."""
    num_envs, num_steps = 6, 8
    seconds = np.random.default_rng(3).lognormal(0, 0.8, (num_envs, 997))
    workers = VirtualWorkers(num_envs, lambda e, step: seconds[e, step] * (1 + e % 3))
    policy, rollout, usual = build(workers, num_envs, num_steps)
    workers_io = policy, workers, workers.io
    c = module("half").HalfDone(*workers_io, SPEC, usual.options)
    rollouts = []
    for c.version in range(8):
        c.collect(rollout)
        check_rollout(rollout, c.version)
        env = rollout.complete["env"]
        done = [
            (np.bincount(env[:rows], minlength=num_envs) >= num_steps).sum()
            for rows in (len(env), len(env) - 1)
        ]
        assert done == [3, 2] and len(env) < rollout.capacity
        rollouts.append(taken(rollout))
    assert_nothing_is_lost(c, rollouts)
    c.given_N[:] = 0
    assert not c.has_ended(rollout)
    rollout.rows = rollout.capacity
    assert c.has_ended(rollout)  # by fast environments alone
    rollout.rows = 0
    c.enough = lambda rows: True
    assert c.has_ended(rollout)  # after a signal


@pytest.mark.parametrize("who", ["overlap", "rank"])
def test_sampler_in_a_run(who, tmp_path):
    """In the example's command, which has `overlap`, and in ranks without preemption. Each update
    has at least S / 2 steps, and fewer than S: the steps of one worker take 0.5 ms on average,
    those of the other one 25 ms. The two environments of a worker take turns."""
    options = ["--num-workers", "2", "--env-kwargs", "image_size=16"]
    options += ["--seed", "1", "--wrappers", "latency(mean_ms=4, spread=0, between=1.5)"]
    if who == "rank":
        options += ["--extensions", HALF, "--preemption", "none"]
    main = ver_multigpu.main if who == "rank" else ver_ppo.main
    found = curves(run("half", tmp_path, 500, *options, main=main))
    steps = np.diff([0, *(step for step, _ in found["losses/policy_loss"])])
    assert (steps >= 32).all() and (steps < 64).all(), steps
    assert max(value for _, value in found["ver/steps_per_env_max"]) >= 16
    assert max(value for _, value in found["ver/policy_lag_max"]) >= (who == "overlap")


def test_sampler_with_others(tmp_path, capsys):
    """Before or behind `overlap` is the same. Ranks that preempt refuse it."""
    for extensions in ((HALF, "overlap"), ("overlap", HALF)):
        run_class = ver_ppo.extend(ver_ppo.Run, ver_ppo.Options(extensions=extensions))
        assert run_class.collector_class.__name__ == "HalfDone" and run_class.start is Overlap.start
    assert ver_multigpu.main(["--extensions", HALF, "--runs-dir", str(tmp_path), *SMALL]) == 2
    assert "--preemption optimal: must be none" in capsys.readouterr().err


def test_auxiliary_loss():
    """It compares what a slow loop over the sequences compares. What begins an episode is never
    guessed."""
    policy, rollout, minibatch, batch = example_policy("foresight", "Foresight", weight=0.5)
    core_MH = torch.randn(len(batch["row"]), 8)
    found = policy.auxiliary_loss(None, core_MH, batch)
    place = {row: m for m, row in enumerate(batch["row"].tolist())}
    errors = []
    for sequence in minibatch:
        for row, later in zip(sequence, sequence[1:]):
            between = rollout["env"][row + 1 : later] == rollout["env"][row]
            assert rollout["env"][row] == rollout["env"][later] and not between.any()
            assert not rollout["done"][row] and not rollout["first"][later]
            action = policy.embed(torch.from_numpy(rollout["action"][[row]]), torch.tensor([False]))
            guess = policy.guess(torch.cat([core_MH[[place[row]]], action], dim=1))
            errors.append((guess[0] - torch.from_numpy(rollout["obs"]["obs"][later])) ** 2)
    assert 0 < len(errors) < len(place)
    torch.testing.assert_close(found, 0.5 * torch.stack(errors).mean())
    first_M = batch["first"]
    assert first_M.any() and not first_M.all()
    for other, same in ((first_M, True), (~first_M, False)):
        changed = batch | {"obs": {"obs": batch["obs"]["obs"] + 100.0 * other[:, None]}}
        assert torch.equal(policy.auxiliary_loss(None, core_MH, changed), found) == same


def test_auxiliary_loss_of_single_steps():
    """Where no step has a next one, it is 0, and all ranks have gradients alike."""
    policy, _, _, batch = example_policy("foresight", "Foresight")
    single = {name: batch[name][:2] for name in ("action", "first")} | {
        "obs": {"obs": batch["obs"]["obs"][:2]}
    }
    loss = policy.auxiliary_loss(
        None, torch.randn(2, 8), single | {"batch_sizes": torch.tensor([2])}
    )
    loss.backward()
    assert loss == 0 and not policy.guess.weight.grad.any()


def test_auxiliary_loss_falls():
    """PPO updates on one fixed rollout bring it down to a small part of its first value."""
    policy, rollout, _, _ = example_policy("foresight", "Foresight")
    sizes = {"num_envs": 4, "num_steps": 16, "num_minibatches": 1, "update_epochs": 1}
    options = ver_ppo.Options(**sizes)
    rollout["weight"][:] = 0.0  # PPO's own loss is 0
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-2)
    losses = []
    for update in range(80):
        logs = ver_ppo.ppo_update(policy, optimizer, rollout, options)
        losses.append(logs["losses/auxiliary"])
    assert 0 < losses[-1] < 0.33 * losses[0], losses


def test_auxiliary_loss_in_a_run(tmp_path):
    """Its command logs it in each update."""
    found = curves(run("foresight", tmp_path, 192))["losses/auxiliary"]
    assert [step for step, _ in found] == [64, 128, 192]
    assert all(value > 0 for _, value in found)


def test_masked_actions(tmp_path):
    """A run never takes an action that is not allowed; and the same without the mask does. Acting
    and learning agree, so the ratio of the first update is 1."""
    show = "notebooks.examples.masked:ShowMask"
    more = ["--wrappers", show, "tests.envs:Obedient", "--env-kwargs"]
    folder = run("masked", tmp_path / "masked", 640, *more)
    assert saved(folder)["step"] == 640
    assert curves(folder)["losses/approx_kl"][0][1] < 1e-3
    args = EXAMPLES["masked"]
    end = ["--total-timesteps", "640", "--runs-dir", str(tmp_path / "all")]
    with pytest.raises(AssertionError, match="not allowed"):
        ver_ppo.main([*args, *SMALL, *end, *more, "--policy", "ver_ppo:Policy"])


def test_probabilities_of_masked_actions():
    """They are 0; the others keep their proportions, and gradients are finite."""
    spaces = gym.spaces
    observation = spaces.Dict(mask=spaces.MultiBinary(4), place=spaces.Box(-1, 1, (3,)))
    spec = make_spec(observation, spaces.Discrete(4))
    options = ver_ppo.Options(hidden_size=8)
    policy = module("masked").Masked(spec, options)
    policy.actor.weight.data.normal_()
    allowed_BC = torch.tensor([[1, 1, 1, 1], [1, 0, 1, 0], [0, 0, 0, 1]], dtype=torch.int8)
    core_BH = torch.randn(3, 8)
    policy.allowed_BC = allowed_BC > 0
    distribution, _ = policy.heads(core_BH)
    plain, _ = ver_ppo.Policy.heads(policy, core_BH)
    expected_BC = plain.base_dist.probs[:, 0] * allowed_BC
    expected_BC /= expected_BC.sum(dim=1, keepdim=True)
    torch.testing.assert_close(distribution.base_dist.probs[:, 0], expected_BC)
    (
        distribution.entropy().sum() + distribution.log_prob(torch.tensor([[3], [2], [3]])).sum()
    ).backward()
    assert torch.isfinite(policy.actor.weight.grad).all()


def test_a_program_of_ones_own(tmp_path):
    """It has the usual command line, and an option more."""
    more = {"cwd": ROOT, "capture_output": True, "text": True}
    start = [sys.executable, "-m", "notebooks.examples.annealed", *SMALL, "--num-workers", "1"]
    two_updates = ["--total-timesteps", "128", "--runs-dir", str(tmp_path)]
    done = subprocess.run([*start, *EXAMPLES["annealed"], *two_updates], **more)
    assert done.returncode == 0, done.stderr
    (folder,) = tmp_path.iterdir()
    content = saved(folder)
    assert content["options"]["last_ent_coef"] == 1e-4
    assert 1e-4 < content["policy"]["log_ent_coef"].exp() < 4.5e-3
    refused = subprocess.run([*start, "--gamma", "2"], **more)
    assert (refused.returncode, refused.stderr[:21]) == (2, "annealed.py: --gamma ")


def test_core(tmp_path):
    """It trains, and its two ways to compute are one."""
    run("gru", tmp_path, 128)
    core = ver_ppo.load("notebooks.examples.gru:GRU", "--policy")(5, 8)
    x_MF, state_Q = torch.randn(7, 5), torch.randn(3, 1, 8)
    batch_sizes = torch.tensor([3, 2, 2])
    stepped, state = [], state_Q
    for x_BF in x_MF.split(batch_sizes.tolist()):
        out_BH, state = core.step(x_BF, state[: len(x_BF)])
        stepped.append(out_BH)
    torch.testing.assert_close(core.sequences(x_MF, state_Q, batch_sizes), torch.cat(stepped))


def test_critic():
    """Values move the critic's network alone, and actions the rest; acting and learning find the
    same values."""
    policy, rollout, _, batch = example_policy("own_critic", "OwnCritic")
    distribution, value_M, _ = ver_ppo.run_sequences(policy, batch)
    np.testing.assert_allclose(
        value_M.detach(), rollout["value"][batch["row"]], rtol=1e-4, atol=1e-5
    )
    both = {name: weight for name, weight in policy.named_parameters() if weight.requires_grad}
    values = torch.autograd.grad(
        value_M.square().sum(), both.values(), retain_graph=True, allow_unused=True
    )
    chances = distribution.log_prob(batch["action"]).sum()
    actions = torch.autograd.grad(chances, both.values(), allow_unused=True)
    for name, of_value, of_action in zip(both, values, actions):
        assert (of_value is not None) == name.startswith("critic"), name
        assert (of_action is not None) == (not name.startswith("critic")), name
        assert (of_value if of_action is None else of_action).any(), name


def test_critic_in_a_run(tmp_path):
    """Its network learns, in the units of returns, and the statistics of its encoders are those of
    the actor's."""
    folder = run("own_critic", tmp_path, 192)
    weights = saved(folder)["policy"]
    policy = new_policy("own_critic")
    for name in ("critic_encoders.0.layers.0.weight", "critic_layer.weight", "critic.weight"):
        assert not torch.equal(policy.get_parameter(name), weights[name]), name
    assert weights["critic.scale"] > 1
    for name in ("total_weight", "mean_C", "variance_C"):
        assert torch.equal(
            weights[f"critic_encoders.0.source.normalize.{name}"],
            weights[f"encoders.0.source.normalize.{name}"],
        )
    assert weights["critic_encoders.0.source.normalize.total_weight"] > 1
