"""The small program collects and learns as the lesson does."""

import ast
import subprocess
import sys

import nbformat
import numpy as np
import pytest
import torch
from torch import nn

import ver_ppo
from notebooks import mini_ver
from notebooks.extensions.virtual_clock import SPEC, VirtualSimulators, VirtualWorkers, step_times
from tests.helpers import ROOT, batch_of

SAMPLERS = "sync", "nover", "ver"


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Rollouts of 6 x 5 steps."""
    for name, value in {"N": 6, "T": 5, "S": 30, "H": 8, "MINIBATCHES": 3}.items():
        monkeypatch.setattr(mini_ver, name, value)


def make_workers():
    """Uneven environments, whose episodes end in different ways."""
    sec_NK = step_times(6, 0.6, 0.7, num_steps=500)
    endings = ["terminated", "truncated"]

    def ending(e, step):
        return endings[step % 2] if step % (4 + e) == 3 else None

    return VirtualWorkers(6, lambda e, step: sec_NK[e, step], ending, start_sec=lambda e: e / 3)


class AsShipped(nn.Module):
    """The small program's policy with the interface of ver_ppo.Policy."""

    def __init__(self, policy):
        super().__init__()
        self.policy = policy
        self.state_shape = 2, mini_ver.H

    def step(self, obs_B, prev_action_BA, first_B, state_B):
        distribution, value_B, after_B = self.policy.step(obs_B["obs"], state_B)
        return Column(distribution), value_B, after_B

    def sequences(self, obs, prev_action, first, state_Q, batch_sizes):
        packed = nn.utils.rnn.PackedSequence(obs["obs"], batch_sizes)
        distribution, value_M = self.policy.sequences(packed, state_Q)
        return Column(distribution), value_M, (None, None)


class Column:
    """A distribution whose actions are a column."""

    def __init__(self, distribution):
        self.distribution = distribution

    def sample(self):
        return self.distribution.sample()[:, None]

    def log_prob(self, action_B1):
        return self.distribution.log_prob(action_B1[:, 0])

    def entropy(self):
        return self.distribution.entropy()


def make_policy():
    policy = mini_ver.Policy()
    policy.encoder = nn.Sequential(nn.Linear(4, mini_ver.H), nn.Tanh())
    policy.actor = nn.Linear(mini_ver.H, 3)
    return policy


def collect_both(sampler):
    """The same policy collects with both programs. Yields their rollouts, pair by pair."""
    policy = make_policy()
    small = mini_ver.Collector(policy, VirtualSimulators(make_workers(), mini_ver.Answer), sampler)
    workers = make_workers()
    sizes = {"num_envs": 6, "num_steps": 5, "num_workers": 0, "sampler": sampler}
    options = ver_ppo.Options(**sizes, num_minibatches=3)
    shape = 2, mini_ver.H
    rollout = ver_ppo.Rollout(SPEC, 30, 6, shape)
    shipped = ver_ppo.Collector(AsShipped(policy), workers, workers.io, SPEC, options)
    for seed in range(12):
        torch.manual_seed(seed)
        shipped.collect(rollout)
        ver_ppo.add_advantages(rollout, options)
        torch.manual_seed(seed)
        steps, bootstrap = small.collect()
        mini_ver.add_advantages(steps, bootstrap)
        if sampler == "sync":  # the shipped one sorts each batch
            steps.sort(key=lambda step: step.env)
            steps = [steps[t + 5 * e] for t in range(5) for e in range(6)]
        yield policy, rollout, steps, bootstrap, options


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_the_same_rollouts(sampler):
    """Step for step, with what is carried over, what is truncated, and both kinds of bootstrap
    values. (With `sync`, actions are drawn in another order.)"""
    carried = 0
    for _, rollout, steps, bootstrap, _ in collect_both(sampler):
        names = ["env", "first", "done", "value", "reward", "advantage", "returns", "weight"]
        for name in names + ["log_prob", "action"] * (sampler != "sync"):
            ours = [float(getattr(step, name)) for step in steps]
            np.testing.assert_allclose(ours, rollout[name].ravel(), rtol=1e-4, atol=1e-5)
        for name, shipped in [("obs", rollout["obs"]["obs"]), ("state", rollout["state"])]:
            ours = torch.stack([getattr(step, name) for step in steps])
            torch.testing.assert_close(ours, torch.from_numpy(shipped))
        np.testing.assert_allclose(bootstrap, rollout.bootstrap, rtol=1e-4, atol=1e-5)
        carried += len(set(rollout["env"])) < 6 or rollout["weight"].min() < 1
    assert (carried > 0) == (sampler == "ver")


@pytest.mark.parametrize("sampler", SAMPLERS[1:])
def test_the_same_gradients(sampler, monkeypatch):
    """Of every mini-batch, when both cut the same sequences in the same order."""
    *_, (policy, rollout, steps, _, options) = collect_both(sampler)
    monkeypatch.setattr(mini_ver, "ENT_COEF", options.ent_coef)
    monkeypatch.setattr(mini_ver, "CLIP", options.clip_coef)
    options = ver_ppo.replace(options, vf_coef=1.0, norm_adv=True)
    ver_ppo.normalize_advantages(rollout, 1.0, options, lambda tensors: None)
    for step in steps:  # a policy that has learned since
        step.log_prob = step.log_prob - 0.3
    rollout["log_prob"][:] -= 0.3
    found = ver_ppo.find_sequences(rollout["segment"], rollout["first"])
    ours = {id(one[0]): one for one in mini_ver.find_sequences(steps)}
    assert len(ours) == len(found)
    in_order = [ours[id(steps[rows[0]])] for rows in found]
    minibatches = mini_ver.cut_minibatches(in_order)
    assert [sum(map(len, one)) for one in minibatches] == [10, 10, 10]
    advantages = [step.advantage for step in steps]
    log_ent_coef = torch.tensor(options.ent_coef).log()
    for small, rows in zip(minibatches, ver_ppo.cut_minibatches(found, 3)):
        assert [[steps[row] for row in one] for one in rows] == small
        loss = mini_ver.ppo_loss(policy, small, np.mean(advantages), np.std(advantages))
        batch = batch_of(rollout, rows) | {"scale": mini_ver.SCALE}
        outputs = ver_ppo.run_sequences(AsShipped(policy), batch)
        shipped, _ = ver_ppo.ppo_loss(*outputs[:2], batch, log_ent_coef, options)
        torch.testing.assert_close(loss, shipped, rtol=1e-4, atol=1e-6)
        weights = list(policy.parameters())
        pairs = zip(torch.autograd.grad(loss, weights), torch.autograd.grad(shipped, weights))
        for one, other in pairs:
            torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-6)


def test_an_environment_that_starts_late():
    """The others fill the first rollout without it."""
    workers = VirtualWorkers(6, lambda e, step: 1.0, start_sec=lambda e: 1000.0 * (e == 0))
    simulators = VirtualSimulators(workers, mini_ver.Answer)
    steps, bootstrap = mini_ver.Collector(make_policy(), simulators).collect()
    assert len(steps) == 30 and {step.env for step in steps} == {1, 2, 3, 4, 5}
    assert len(bootstrap) == 6


def functions_of(text):
    """The functions of a program by name, the last of each, without comments and docstrings."""
    found = {}
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef):
            has_words = ast.get_docstring(node) is not None
            body = ast.Module(node.body[has_words:], type_ignores=[])
            found[node.name] = ast.dump(node.args), ast.unparse(body)
    return found


def test_the_notebook_ends_with_the_file():
    """After the five changes, every function of the notebook's program is the file's."""
    notebook = nbformat.read(ROOT / "notebooks" / "00_five_changes.ipynb", as_version=4)
    cells = [cell.source for cell in notebook.cells if cell.cell_type == "code"]
    built = {}
    for cell in cells:
        built |= functions_of(cell)
    names = "act complete value await_answers collect bootstrap_values update".split()
    names += ["cut_minibatches", "add_advantages"]
    shipped = functions_of((ROOT / "notebooks" / "mini_ver.py").read_text())
    for name in names:
        assert built[name] == shipped[name], name


def test_it_learns(tmp_path):
    """The program, as a reader starts it: more than a random agent's 24 steps, after a moment."""
    command = [sys.executable, ROOT / "notebooks" / "mini_ver.py", "--updates", "20"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    *_, last = done.stdout.splitlines()
    assert last.startswith("step 20,480: ") and float(last.split()[-1]) > 40
    assert not list(tmp_path.iterdir())
