"""Training in simulated time."""

import numpy as np
import pytest
import torch

import ver_ppo
from notebooks.extensions import wrappers
from notebooks.extensions.clocked import Clocked, ClockedWorkers
from notebooks.extensions.virtual_clock import VirtualWorkers
from tests.helpers import logged, one_line, run_here, same, saved, small

COUNT = "--env-id tests.envs:Count-v0 --num-workers 0 --total-timesteps 320"
UNEVEN = "clocked(mean_ms=20, spread=0.8, between=0.6, crashes=0.02)"


def started(num_envs=4, seed=1, **times):
    """Environments that have started, under a clock that begins now."""
    line = f"--env-id tests.envs:Count-v0 --num-workers 0 --num-envs {num_envs} --seed {seed}"
    options = ver_ppo.parse_options(line.split())
    spec = ver_ppo.describe_env(options)
    io = ver_ppo.EnvIO(spec, num_envs)
    inline = ver_ppo.make_workers(options, "train", spec, io)
    inline.receive(0)
    extension = type("Times", (Clocked,), times)
    return ClockedWorkers(inline.environments, extension)


def drawn(workers, steps):
    """The seconds of these environments' next steps, N x steps."""
    num_envs = len(workers.environments)
    return np.array([[workers.duration_of(e) for _ in range(steps)] for e in range(num_envs)])


@pytest.mark.parametrize("sampler", ["sync", "nover", "ver"])
def test_repeats(tmp_path, sampler):
    """Two runs give the same checkpoint, bit for bit, and the same simulated minutes. A run with
    another seed does not."""
    found = []
    for name, seed in (("one", 1), ("two", 1), ("three", 2)):
        line = f"{COUNT} --sampler {sampler} --seed {seed}"
        found.append(run_here(tmp_path / name, line, "--extensions", UNEVEN, "check"))
    one, two, three = (saved(folder) for folder in found)
    assert same(one["policy"], two["policy"]) and same(one["optimizer"], two["optimizer"])
    assert same(one["recent"], two["recent"])
    assert not same(one["policy"], three["policy"])
    minutes = [logged(folder, "clock/minutes") for folder in found]
    assert minutes[0] == minutes[1] != minutes[2]


def test_sync_by_hand(tmp_path):
    """In lock-step, simulated time is the sum of the slowest steps, and of what inference and
    learning cost."""
    costs = "batch_ms=3, learn_sec=0.5"
    extension = f"clocked(between=0.6, {costs})"
    folder = run_here(tmp_path, f"{COUNT} --sampler sync", "--extensions", extension)
    seconds = drawn(started(between=0.6), steps=80).max(axis=0).sum()
    seconds += 80 * 0.003 + 5 * 0.5  # 5 rollouts of 16 steps
    assert logged(folder, "clock/minutes")[320] == pytest.approx(seconds / 60, rel=1e-6)
    assert logged(folder, "clock/SPS")[320] == pytest.approx(320 / seconds, rel=1e-6)


def test_order_of_answers():
    """Answers arrive as under the virtual clock with the same durations, and each has made one
    step."""
    times = {"spread": 0.8, "between": 0.6, "batch_ms": 4.0}
    seconds = drawn(started(**times), steps=200)
    real = started(**times)
    virtual = VirtualWorkers(4, lambda e, step: seconds[e, step], inference_sec=0.004)
    assert sorted(virtual.receive(0)) == [0, 1, 2, 3]
    rng = np.random.default_rng(0)
    answered = [0, 1, 2, 3]
    waiting = []
    for _ in range(300):
        waiting += answered
        chosen = [e for e in waiting if rng.random() < 0.7]
        waiting = [e for e in waiting if e not in chosen]
        for workers in (real, virtual):
            workers.send(np.array(chosen, int))
        timeout_sec = rng.choice([0.0, 0.05])
        answered = real.receive(timeout_sec)
        assert answered == virtual.receive(timeout_sec)
        assert real.now == pytest.approx(virtual.now)
        for e in answered:
            step = virtual.steps_N[e] - 1
            assert real.environments[e].io["step_sec"][e] == seconds[e, step]
            assert real.environments[e].length == (step + 1) % 7  # episodes of 7 steps


def test_durations_of_latency(monkeypatch):
    """The durations are those for which `latency` sleeps, step by step."""
    slept = []
    monkeypatch.setattr(wrappers.time, "sleep", slept.append)
    times = {"mean_ms": 20, "spread": 0.8, "between": 0.6}
    workers = started(seed=3, **times)
    for e, environment in enumerate(workers.environments):
        env = wrappers.Latency(environment.env, **times)
        env.reset(seed=ver_ppo.derive_seed(0, 3, e, 1))
        for _ in range(20):
            env.step(np.int64(0))
    np.testing.assert_allclose(drawn(workers, 20).ravel(), slept)


def test_means():
    """Environments take several means in turn, or say their own."""
    workers = started(mean_ms=(3, 30), spread=0.0)
    np.testing.assert_allclose(drawn(workers, 2)[:, 0], [0.003, 0.03, 0.003, 0.03])
    workers.environments[1].env.unwrapped.mean_ms = 70.0
    np.testing.assert_allclose(drawn(workers, 2)[:, 1], [0.003, 0.07, 0.003, 0.03])
    alike = drawn(started(num_envs=40, mean_ms=8.0, spread=0.5), 200)
    assert alike.mean() == pytest.approx(0.008, rel=0.03)
    assert np.log(alike).std(axis=1).mean() == pytest.approx(0.5, rel=0.05)


def test_crashes(tmp_path):
    """A share of the steps is lost, and the environment starts again. Action sampling goes on from
    torch's own generator, although a start seeds it."""
    workers = started(crashes=0.1)
    io = workers.environments[0].io
    torch.manual_seed(5)
    state = torch.get_rng_state()
    lost = 0
    for _ in range(500):
        before = io["episode"].copy()
        workers.send(np.arange(4))
        while workers.events:
            for e in workers.receive(1.0):
                if io["started"][e]:
                    lost += 1
                    assert io["first"][e] and io["episode"][e] == before[e] + 1
    assert 140 < lost < 260
    assert torch.equal(state, torch.get_rng_state())
    folder = run_here(tmp_path, COUNT, "--extensions", "clocked(crashes=0.2)", "check")
    assert 320 * 0.1 < sum(logged(folder, "ver/lost_steps").values()) < 320 * 0.3


def test_refusals(tmp_path, capsys):
    """Worker processes, extensions that collect elsewhere, and numbers that make no sense."""
    line = COUNT.split()

    def refused(word, *args):
        one_line(capsys, small(tmp_path, *line, *args), word)

    refused("--num-workers 0", "--num-workers", "1", "--extensions", "clocked")
    refused("without overlap", "--extensions", "overlap", "clocked")
    refused("without overlap", "--extensions", "clocked", "async")
    for wrong in ("mean_ms=-1", "mean_ms=(3, x)", "mean_ms=()", "spread=(1, 2)", "learn_sec=inf"):
        refused("must be a number, 0 or more", "--extensions", f"clocked({wrong})")
    assert list(tmp_path.iterdir()) == []
