"""Several processes that choose actions."""

import os
import signal
import time
from dataclasses import replace

import numpy as np
import pytest
import torch

import ver_ppo
from notebooks.extensions.check import check_rollout
from notebooks.extensions.overlap import reevaluate
from tests.helpers import (
    differences,
    logged,
    nobody_left,
    one_line,
    run_folders,
    run_here,
    saved,
    small,
)
from tests.test_samplers import collecting


class Slow(ver_ppo.Policy):
    """So slow that environments wait for a free process."""

    def step(self, *inputs):
        time.sleep(0.003)
        return super().step(*inputs)


class Together(ver_ppo.Run):
    """Waits until all environments have started. (Otherwise, collecting begins without those of a
    worker that starts late.)"""

    def start(self):
        super().start()
        c = self.collector
        while len(c.arrived) < self.options.num_envs:
            c.arrived += c.workers.receive(0.05)


TOGETHER = "tests.test_inference:Together"
UNEVEN = "latency(mean_ms=1, spread=1, between=0.5)"


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("sampler", ["ver", "nover", "sync"])
def test_every_value_is_right(count, sampler):
    """Each rollout has exactly S steps and keeps every invariant. Each environment's memory is
    found by the process that serves it: one pass over whole sequences, here, gives the values and
    log-probabilities that were stored. The weights change between rollouts, as in learning, and the
    processes see that. After every second rollout they stay. Then each bootstrap value must be the
    value of that environment's next step."""
    sizes = {"num_envs": 5, "num_steps": 16, "sampler": sampler, "wrappers": (UNEVEN,)}
    extensions = f"inference(workers={count})", TOGETHER
    with collecting(**sizes, extensions=extensions, policy="tests.test_inference:Slow") as run:
        served = 0
        bootstrap = None
        for version in range(5, 13):
            run.version = version
            rollout = run.collect()
            assert rollout.rows == 5 * 16
            c = run.collector
            assert {*c.idle.tolist(), *np.flatnonzero(c.in_flight_N).tolist()} == set(range(5))
            check_rollout(rollout, version)
            if sampler != "ver":
                assert (np.bincount(rollout["env"]) == 16).all()
            value_S, keep_S = reevaluate(run.policy, rollout, run.options)
            # sequences whose memory comes from these weights: later ones of an environment
            sequences = ver_ppo.find_sequences(rollout["segment"], rollout["first"])
            new = [rows for rows in sequences if (rollout["version"][rows] == version).all()]
            new = np.concatenate([rows for rows in new if rollout["first"][rows[0]]])
            np.testing.assert_allclose(value_S[new], rollout["value"][new], atol=1e-5)
            np.testing.assert_allclose(keep_S[new], 1, atol=1e-5)
            served += len(new)
            if bootstrap is not None:
                env, row = np.unique(rollout["env"], return_index=True)
                np.testing.assert_allclose(rollout["value"][row], bootstrap[env], atol=1e-5)
            bootstrap = rollout.bootstrap.copy() if version % 2 else None
            with torch.no_grad():
                for weight in run.policy.parameters():
                    weight *= 1 if version % 2 else 0.97
        assert served > 200


class Greedy(ver_ppo.Run):
    """Takes the most probable action, so no random number is drawn."""

    def start(self):
        super().start()
        self.collector.greedy = True


def test_one_is_as_none(tmp_path):
    """In lock-step and without chance, a run learns the same with one inference process as with
    none, bit for bit."""
    line = "--env-id CartPole-v1 --num-workers 1 --sampler sync --total-timesteps 1000"
    line += " --extensions tests.test_inference:Greedy"
    none = saved(run_here(tmp_path / "none", line))
    one = saved(run_here(tmp_path / "one", f"{line} inference(workers=1)"))
    assert differences(none, one) == []


def test_a_frozen_encoder(tmp_path):
    """The policy goes to another process with a frozen encoder, which learns nothing."""
    line = "--env-kwargs simulator=builtin image_size=16 --num-workers 1 --total-timesteps 128"
    one = run_here(tmp_path / "one", line)
    transfer = f"transfer(file={one / 'checkpoint.pt'}, freeze=True)"
    args = line, "--seed", "5", "--extensions", transfer, "inference(workers=1)"
    before, after = (saved(each)["policy"] for each in (one, run_here(tmp_path / "two", *args)))
    for name, weight in before.items():
        if name.startswith(("encoders.", "core.")):
            assert torch.equal(weight, after[name]) == name.startswith("encoders.0."), name


def test_carried_steps(tmp_path):
    """With one inference process, a run with uneven environments learns from the same kind of steps
    as without: about as many are carried over, and they have similar weights."""
    line = "--env-id CartPole-v1 --num-workers 2 --total-timesteps 1000"
    line += " --wrappers latency(mean_ms=6,spread=1,between=0.5)"
    line += f" --extensions {TOGETHER} check"
    found = {}
    for name, more in {"none": "", "one": "inference(workers=1)"}.items():
        folder = run_here(tmp_path / name, f"{line} {more}")
        tags = "ver/carried_share", "ver/importance_weight"
        found[name] = [np.mean(list(logged(folder, tag).values())) for tag in tags]
    (carried, weight), (carried_none, weight_none) = found["one"], found["none"]
    # in 32 runs on a busy machine, the share was 0.040 to 0.044, and the weight 0.77 to 0.81
    assert carried == pytest.approx(carried_none, abs=0.015)
    assert weight == pytest.approx(weight_none, abs=0.1)


def test_a_process_dies(tmp_path, capfd):
    """The run ends with one line, a checkpoint and no process."""
    line = "--env-id CartPole-v1 --num-workers 1"
    line += " --extensions inference(workers=2) tests.test_inference:Kill"
    assert ver_ppo.main(small(tmp_path, *line.split())) == 1
    assert "an inference process died with exit code -9" in capfd.readouterr().err
    (folder,) = run_folders(tmp_path)
    assert (folder / "checkpoint.pt").exists()
    assert nobody_left()


def test_a_process_hangs(tmp_path, capfd):
    """The run ends with one line after --env-timeout."""
    line = "--env-id CartPole-v1 --num-workers 1"
    line += " --extensions inference(workers=2) tests.test_inference:Stop"
    assert ver_ppo.main(small(tmp_path, *line.split())) == 1
    assert "an inference process gave no answer for 3 s" in capfd.readouterr().err
    assert nobody_left()


def test_a_pause(tmp_path):
    """Of all processes is not hanging: one second of it counts."""
    line = "--env-id CartPole-v1 --num-workers 1 --env-timeout 20 --total-timesteps 640"
    run_here(tmp_path, line, "--extensions", "inference(workers=2)", "tests.test_inference:Pause")


def test_a_start_that_fails(tmp_path, capfd):
    """If the environments fail before the collector is there, the processes end, too."""
    line = "--env-id tests.faulty_envs:Late-v0 --num-workers 4"
    args = small(tmp_path, *line.split(), "--extensions", "inference(workers=4)")
    assert ver_ppo.main(args) == 1
    assert "before its first answer" in capfd.readouterr().err
    assert nobody_left()


class Kill(ver_ppo.Run):
    """Kills the inference processes after two updates."""

    number = signal.SIGKILL

    def collect(self):
        if self.version == 2:
            for process in self.collector.processes.values():
                os.kill(process.pid, self.number)
        return super().collect()


class Stop(Kill):
    """Stops the inference processes, and waits for only 3 s."""

    number = signal.SIGSTOP

    def collect(self):
        if self.version == 2:
            self.collector.options = replace(self.options, env_timeout=3.0)
        return super().collect()


class Pause(ver_ppo.Run):
    """A pause while a process chooses actions."""

    def enough(self, rows):
        if rows == 0:
            self.collector.looked_at -= 1000
        return super().enough(rows)


def test_refusals(tmp_path, capsys):
    """Refused in one line, before training."""
    args = small(tmp_path, "--env-id", "CartPole-v1", "--extensions")
    one_line(capsys, [*args, "inference(workers=0)"], "must be 1 or more")
    one_line(capsys, [*args, "inference", "--num-workers", "0"], "leave out --num-workers 0")
    for others in (["async", "inference"], ["inference", "overlap"], ["overlap", "inference"]):
        one_line(capsys, [*args, *others], "does not go with another extension that collects")
    assert run_folders(tmp_path) == []
