"""Environments that raise, die and hang are started again, and not one complete step is lost."""

import os
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import ver_ppo
from virtual_clock import VirtualWorkers, build, collect, learn, observation_of, reward_of

from tests.benchmarks import soak
from tests.test_run import REMOTE, children, fill_disk, logged_values, run_folders, same, small


class LosingWorkers(VirtualWorkers):
    """Now and then an environment is started again instead of answering; its steps are numbered on from the next hundred."""

    def __init__(self, *args, seed, **more):
        super().__init__(*args, **more)
        self.rng, self.given, self.losses = np.random.default_rng(seed), [], 0

    def answer(self, row):
        step, out = self.steps_N[row], self.transfer
        out.lost[row] = step < 0 or self.rng.random() < 0.08
        if step >= 0 and not out.lost[row]:
            self.given.append((row, step))
        super().answer(row)
        if out.lost[row] and step >= 0:
            self.losses += 1
            self.steps_N[row] = step // 100 * 100 + 100
            out.first[row], out.terminated[row], out.truncated[row], out.reward[row] = True, False, False, 1e6
            out.obs["obs"][row] = observation_of(row, self.steps_N[row])


@pytest.mark.parametrize("sampler", ["ver", "nover", "sync"])
@pytest.mark.parametrize("seed", range(10))
def test_lost_steps_only(seed, sampler):
    """Whatever is lost when: every step that was answered is learned from once, with its own reward, all invariants hold,
    and returns before a loss go on with the value that stood in the lost record."""
    rng = np.random.default_rng(seed)
    durations = rng.uniform(0.2, 4.0, 64)
    workers = LosingWorkers(
        4,
        lambda row, step: durations[(11 * row + step) % 64],
        lambda row, step: [None, "terminated", "truncated"][step % 3] if step % 9 == 8 else None,
        seed=seed,
    )
    policy, rollout, collector = build(workers, 4, 12, sampler=sampler)
    options = ver_ppo.Options(num_envs=4, num_steps=12, hidden_size=8, num_minibatches=1)
    optimizer, learned = torch.optim.Adam(policy.parameters(), lr=1e-3), []
    for collector.version[...] in range(12):
        collect(policy, rollout, collector)
        ver_ppo.check_rollout(rollout)
        learn(policy, optimizer, rollout, options)
        for slot in np.flatnonzero(rollout.complete):
            row, number = int(rollout.env[slot]), rollout.reward[slot] - int(rollout.env[slot])
            step = round(float(number) * 1000)
            assert rollout.reward[slot] == pytest.approx(reward_of(row, step))
            learned.append((row, step))
            check_return(rollout, slot, options)
    assert len(set(learned)) == len(learned) == 12 * 48 and set(learned) <= set(workers.given)
    assert len(set(workers.given) - set(learned)) <= 4, "but for what waits to be completed"
    assert workers.losses > 20


def test_lost_twice(monkeypatch):
    """An environment is lost, and lost again before its first step of the next episode: the return of the step before goes
    on with the value that stood in the record that was lost first, not with one of another episode."""
    workers = LosingWorkers(2, lambda row, step: 1.0, seed=0)
    answers = iter([1.0] * 6 + [0.0, 1.0] * 2 + [1.0] * 100)  # 0: lost; the two environments answer by turns
    monkeypatch.setattr(workers, "rng", SimpleNamespace(random=lambda: next(answers)))
    policy, rollout, collector = build(workers, 2, 12)
    calls, cut_off = [], ver_ppo.cut_off

    def noting(rollout, slot, row):
        calls.append((int(slot), int(row), rollout.value[slot].item()))
        cut_off(rollout, slot, row)

    monkeypatch.setattr(ver_ppo, "cut_off", noting)
    collect(policy, rollout, collector)
    ver_ppo.check_rollout(rollout)
    (slot, row, value), (again, _, other) = calls
    assert slot == again and value != other and workers.losses == 2
    before = np.flatnonzero((rollout.env == row) & (np.arange(len(rollout.env)) < slot))[-1]
    assert rollout.lost[before] and rollout.final_value[before].item() == value


def check_return(rollout, slot, options):
    """The advantage of a step before a loss: one temporal difference, to the value of the lost record."""
    if rollout.lost[slot]:
        following = rollout.final_value[slot].item()
        assert following != 0
        expected = rollout.reward[slot] + options.gamma * following - rollout.value[slot].item()
        assert rollout.advantage[slot] == pytest.approx(expected, rel=1e-4)


CASES = [(fault, workers, "here") for fault in ("raise", "exit", "segfault", "hang", "leak") for workers in ("2", "4")]
CASES += [("raise", "0", "here"), ("raise", "0", "overlap"), ("exit", "2", "overlap"), ("hang", "2", "async")]
CASES += [("segfault", "2", "two inference workers"), ("raise", "2", "async")]


@pytest.mark.parametrize("fault, workers, where", CASES)
def test_environments_are_started_again(tmp_path, capfd, fault, workers, where):
    """Each environment fails at its 90th step. The run reaches its end, says what happened, and leaves nobody behind."""
    args = small(tmp_path, "--env-id", f"tests.faulty_envs:Faulty-{fault}-v0", "--num-workers", workers, "--debug")
    args += ["--total-timesteps", "1280", "--env-timeout", "2", "--max-worker-restarts", "1000", *REMOTE.get(where, [])]
    assert ver_ppo.main(args) == 0
    said = {
        "raise": "out of paint",
        "exit": "exit code 7",
        "segfault": "exit code -11",
        "hang": "no answer from environments",
        "leak": "MemoryError",
    }
    (folder,) = run_folders(tmp_path)
    if (workers, where) != ("0", "overlap"):  # there the collector process says it, and counts
        assert said[fault] in capfd.readouterr().err
        assert logged_values(folder, "time/restarts")[-1] >= 4 / max(1, int(workers)) * 2
    assert children() == []


def test_too_many_restarts(tmp_path, capsys):
    """The third within an hour ends the run, with the reason; all that was learned is saved."""
    args = small(
        tmp_path, "--env-id", "tests.faulty_envs:Faulty-raise-v0", "--num-workers", "2", "--max-worker-restarts", "2"
    )
    assert ver_ppo.main(args) == 1
    error = capsys.readouterr().err
    assert "out of paint" in error and "more than 2 restarts within an hour (--max-worker-restarts)" in error
    (folder,) = run_folders(tmp_path)
    assert ver_ppo.load_checkpoint(folder / "checkpoint.pt")["progress"]["step"] > 0
    assert children() == []


def test_restarts_are_forgotten(monkeypatch):
    """Only the last hour counts."""
    now = [0.0]
    monkeypatch.setattr(ver_ppo.time, "perf_counter", lambda: now[0])
    restarts = ver_ppo.Restarts(2)
    for now[0] in (0.0, 10.0, 3605.0, 3620.0):
        restarts.note("reason")
    with pytest.raises(ver_ppo.EnvironmentFailure, match="more than 2"):
        restarts.note("reason")
    assert restarts.total == 5


@pytest.mark.parametrize("workers", ["0", "2"])
@pytest.mark.parametrize(
    "fault, words",
    [
        ("observation", "observation 'obs' is not finite"),
        ("reward", "reward is inf"),
        ("shape", "observation 'obs' has shape (1,), the observation space (2,)"),
        ("keys", "observation has ['another'], the observation space ['obs']"),
    ],
)
def test_rubbish(tmp_path, capsys, fault, words, workers):
    """An answer that is none ends the run at once: the message names environment, step and key; the checkpoint is kept."""
    args = small(tmp_path, "--env-id", f"tests.faulty_envs:Faulty-{fault}-v0", "--num-workers", workers)
    assert ver_ppo.main([*args, "--checkpoint-interval", "64"]) == 1
    error = capsys.readouterr().err
    assert words in error and "environment " in error and "step 10" in error and "started again" not in error
    (folder,) = run_folders(tmp_path)
    assert ver_ppo.load_checkpoint(folder / "checkpoint.pt")["progress"]["step"] >= 64
    assert children() == []


def test_small_soak(tmp_path):
    """Half a minute of tests/benchmarks/soak.py: deaths, hangs, Ctrl-C; each complete step is learned from once."""
    wrong, sums, run = soak.soak(0.6, 0.3, death_sec=1.5, hang_sec=4, num_envs=4, folder=tmp_path, say=print)
    assert not wrong, wrong
    assert (
        sums["started again"] >= 5
        and sums["learned"] > 500
        and sums["answered"] <= sums["learned"] + sums["in the checkpoint"]
    )


def test_last_checkpoint_is_not_written(tmp_path, monkeypatch, capsys):
    """Training that could not be saved at its end has failed: exit status 1, after the evaluation."""
    monkeypatch.setattr(ver_ppo, "save_checkpoint", fill_disk)
    args = small(
        tmp_path, "--env-id", "CartPole-v1", "--num-workers", "0", "--total-timesteps", "64", "--eval-episodes", "2"
    )
    assert ver_ppo.main(args) == 1
    said = capsys.readouterr()
    assert "evaluation, 2 sampled" in said.out and "last checkpoint could not be written: No space left" in said.err


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A small checkpoint, of a run that was stopped in the middle of a rollout."""
    folder = tmp_path_factory.mktemp("runs")
    args = small(folder, "--env-id", "tests.faulty_envs:Faulty-reward-v0", "--num-workers", "0", "--hidden-size", "8")
    assert ver_ppo.main(args) == 1
    return run_folders(folder)[0] / "checkpoint.pt"


def test_damaged_checkpoints(tmp_path, checkpoint):
    """Cut off anywhere, or with any bit changed: refused in one line, or it was a bit that says nothing (padding, dates)."""
    whole, rng, refused = checkpoint.read_bytes(), np.random.default_rng(0), 0
    content, path = ver_ppo.load_checkpoint(checkpoint), tmp_path / "checkpoint.pt"
    for case in range(150):
        damaged = bytearray(whole)
        if case % 3 == 0:
            del damaged[rng.integers(len(whole)) :]
        else:
            damaged[rng.integers(len(whole))] ^= 1 << rng.integers(8)
        path.write_bytes(damaged)
        try:
            assert same(ver_ppo.load_checkpoint(path), content)
        except ver_ppo.UserError as error:
            assert str(path) in str(error) and "\n" not in str(error)
            refused += 1
    assert refused > 100


def test_hostile_checkpoints(tmp_path, checkpoint, capsys):
    """Code anywhere in the file is refused, and not executed; so are other types and another version."""
    content, path = ver_ppo.load_checkpoint(checkpoint), tmp_path / "checkpoint.pt"
    code = Code(tmp_path / "executed")
    bad = [{key: thing} for key in content for thing in (code, None, "rubbish", [code], {"code": code}, torch.zeros(2), 99)]
    bad += [{"options": {**content["options"], "seed": code}}, {"progress": {**content["progress"], "recent": [code]}}]
    for change in bad:
        torch.save({**content, **change}, path)
        for how in (["--checkpoint", str(path)], ["--resume", str(tmp_path)]):
            capsys.readouterr()
            assert ver_ppo.main(how) == 2, change
            error = capsys.readouterr().err
            assert str(path) in error and len(error.strip().splitlines()) == 1, error
            assert ("another version" in error) == (type(change.get("format")) is int)
    assert not (tmp_path / "executed").exists()


class Code:
    """Executed when it is unpickled by a loader that executes anything."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)
