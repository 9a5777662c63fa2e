"""Many ranks on the CPU: one is ver_ppo.py, several are one; preemption, stale fill, decisions taken together."""

import contextlib
import inspect
import os
import re
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pytest
import torch
import ver_multigpu
import ver_ppo
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from virtual_clock import SPEC, VirtualWorkers, build, collect

from tests.benchmarks import scaling
from tests.test_run import alive_in_group, differences, run_folders, small, wait_until

ROOT = Path(__file__).resolve().parents[1]


def free_port():
    with closing(socket.socket()) as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def rank_environment(rank, size, port):
    """What torchrun tells a rank (but for its agent, which these tests do without)."""
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    return dict(zip(names, map(str, (rank, rank, size, size, "127.0.0.1", port))))


def run_rank(function, rank, size, port, args):
    os.environ.update(rank_environment(rank, size, port))
    torch.set_num_threads(1)
    return function(rank, *args)


def on_ranks(size, function, *args):
    """Results of function(rank, *args) in one process for each rank."""
    port = free_port()
    with ProcessPoolExecutor(size, mp_context=get_context("spawn")) as pool:
        futures = [pool.submit(run_rank, function, rank, size, port, args) for rank in range(size)]
        return [future.result(timeout=120) for future in futures]


def start_ranks(size, arguments_of, **environment):
    """ver_multigpu.py as one process for each rank, each in a group of its own, without torchrun to stop the others."""
    port = free_port()
    return [
        subprocess.Popen(
            [sys.executable, "ver_multigpu.py", *arguments_of(rank)],
            cwd=ROOT,
            env={**os.environ, **rank_environment(rank, size, port), **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        for rank in range(size)
    ]


def outputs(processes, timeout=60):
    """What the ranks have printed, when all have ended; kills who has not after `timeout` seconds."""
    try:
        return [process.communicate(timeout=timeout)[0] for process in processes]
    finally:
        for process in processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)


def logged(folder, tag):
    return [event.value for event in EventAccumulator(str(folder)).Reload().Scalars(tag)]


# ------------------------------------------------------------------------------------------------- one rank, many ranks


@pytest.mark.parametrize("more", [[], ["--norm-adv", "--sampler", "nover"]])
def test_one_rank_is_ver_ppo(tmp_path, more):
    """With one rank everything is as in ver_ppo.py, bit for bit: weights, optimizer, generators, environments."""
    args = ["--env-id", "CartPole-v1", "--num-workers", "0", "--total-timesteps", "1024", "--preemption", "none", *more]
    assert ver_multigpu.main(small(tmp_path / "many", *args)) == 0
    args.remove("--preemption")
    args.remove("none")
    assert ver_ppo.main(small(tmp_path / "one", *args)) == 0
    one, many = (ver_ppo.load_checkpoint(run_folders(tmp_path / name)[0] / "checkpoint.pt") for name in ("one", "many"))
    assert differences(one, many) == []


def rollout_of(seed, num_envs=3, num_steps=16):
    """A rollout of one rank, its policy (the same for every seed) and options."""
    durations = np.random.default_rng(seed).uniform(0.3, 3.0, 64)
    workers = VirtualWorkers(
        num_envs,
        lambda row, step: durations[(7 * row + step) % 64],
        lambda row, step: "terminated" if step % 9 == 8 else None,
    )
    torch.manual_seed(0)
    policy, rollout, collector = build(workers, num_envs, num_steps)
    torch.manual_seed(seed)
    for _ in range(2):
        collect(policy, rollout, collector)
    more = {"num_minibatches": 1, "update_epochs": 1, "norm_adv": True}
    options = ver_ppo.Options(num_envs=num_envs, num_steps=num_steps, hidden_size=8, **more)
    ver_ppo.compute_targets(policy, rollout, np.arange(rollout.size), options)
    return policy, rollout, options


def step_weights(policy, rollout, records, options, average):
    """The weights after one step of gradient descent, and what was logged."""
    optimizer = torch.optim.SGD(policy.parameters(), lr=1.0)
    logs = ver_ppo.learn(policy, optimizer, rollout, records, options, average)
    return torch.nn.utils.parameters_to_vector(policy.parameters()).detach(), logs


def learn_half(rank):
    policy, rollout, options = rollout_of(seed=rank + 1)
    ranks = ver_multigpu.Ranks(60)
    result = step_weights(policy, rollout, np.arange(rollout.size), options, ranks.average)
    ranks.close()
    return result


def test_halves_are_the_whole():
    """Two ranks with a rollout each take the step that one process takes with both rollouts: gradients, clipping, and the
    statistics that advantages are normalized by."""
    (weights, logs), (other_weights, other_logs) = on_ranks(2, learn_half)
    assert torch.equal(weights, other_weights)
    (policy, one, options), (_, two, _) = rollout_of(seed=1), rollout_of(seed=2)
    whole = ver_ppo.Rollout(SPEC, 2 * one.steps, 2 * one.num_envs, policy.state_shape, torch.device("cpu"))
    for target, part, other in zip(whole.columns(), one.columns(), two.columns()):
        target[: one.size], target[one.size : one.size + two.size] = part[: one.size], other[: two.size]
    whole.env[one.size :] += one.num_envs
    before = torch.nn.utils.parameters_to_vector(policy.parameters()).detach().clone()
    expected, whole_logs = step_weights(policy, whole, np.arange(one.size + two.size), options, ver_ppo.average_alone)
    torch.testing.assert_close(weights, expected, rtol=1e-5, atol=1e-6)
    assert (expected - before).abs().max() > 1e-3
    assert whole_logs["losses/grad_norm"] == pytest.approx(logs["losses/grad_norm"], rel=1e-4)
    mean_loss = (logs["losses/value_loss"] + other_logs["losses/value_loss"]) / 2
    assert whole_logs["losses/value_loss"] == pytest.approx(mean_loss, rel=1e-4)


def numbers_of_rank(monkeypatch, rank):
    monkeypatch.setenv("RANK", str(rank))
    options = ver_multigpu.Options(env_id="CartPole-v1", num_envs=3)
    spec = ver_ppo.describe_env(options)
    transfer = ver_ppo.Transfer(spec, 3)
    rows = [ver_ppo.EnvironmentRow(row, options, "train", spec, transfer) for row in range(3)]
    return [row.number for row in rows], [row.delay_rng.random() for row in rows]


def test_environments_of_ranks_are_disjoint(monkeypatch):
    """No two environments of any ranks have a seed in common, nor the emulated simulators' random numbers."""
    numbers, delays = zip(*(numbers_of_rank(monkeypatch, rank) for rank in range(4)))
    assert sorted(sum(numbers, [])) == list(range(12)) and len(set(sum(delays, []))) == 12


def run_and_watch(rank, args):
    """ver_multigpu.main in one rank, rank 1 with slower simulators: exit status, what each update learned from and came to,
    number of collectives."""
    seen, learn, calls, call = [], ver_ppo.learn, [], ver_multigpu.Ranks.call

    def counting(ranks, function, *args, **more):
        calls.append(function.__name__)
        return call(ranks, function, *args, **more)

    def watching(policy, optimizer, rollout, records, options, average):
        steps, fresh = int(rollout.complete[records].sum()), int(rollout.num_complete)
        stale = len(records) - int(rollout.size) if options.sampler != "async" else 0
        seen.append({"steps": steps, "stale": stale, "fresh": fresh})
        logs = learn(policy, optimizer, rollout, records, options, average)
        seen[-1]["weights"] = ver_multigpu.checksum(policy)
        return logs

    ver_ppo.learn, ver_multigpu.CHECK_INTERVAL, ver_multigpu.Ranks.call = watching, 1, counting
    args = [*args, "--sim-latency", "40" if rank else "4", "--sim-latency-spread", "0", "0", "0"]
    status = ver_multigpu.main(args)
    return status, seen, calls


@pytest.mark.parametrize(
    "more, preempts",
    [
        (["--preemption", "optimal"], True),
        (["--preemption", "optimal", "--sampler", "nover"], True),
        (["--preemption", "optimal", "--num-inference-workers", "2", "--num-workers", "4"], True),
        (["--preemption", "threshold", "--sampler", "sync", "--sync-frac", "0.5"], True),
        (["--preemption", "none"], False),
        (["--preemption", "none", "--overlap"], False),
        (["--preemption", "none", "--sampler", "async"], False),
    ],
)
def test_preempted_rank(tmp_path, more, preempts):
    """One rank is ten times as slow as the other. Whatever is done about it: both learn from exactly S steps each time,
    call as many collectives, and have the same weights after every update; if it is preempted, what it has less is stale."""
    args = small(tmp_path, "--env-id", "tests.envs:Count-v0", "--total-timesteps", "1200", *more)
    args += ["--debug"]
    (fast_status, fast, fast_calls), (slow_status, slow, slow_calls) = on_ranks(2, run_and_watch, args)
    assert fast_status == slow_status == 0 and fast_calls == slow_calls and "all_reduce" in fast_calls
    assert len(fast) == len(slow) > 5
    for one, other in zip(fast, slow):
        assert one["steps"] == other["steps"] == 64
        assert one["weights"] == other["weights"]
    assert len({update["weights"] for update in fast}) == len(fast)
    if "async" not in more:
        assert all(update["stale"] == 64 - update["fresh"] for update in fast + slow)
    assert fast[0]["stale"] == slow[0]["stale"] == 0, "there is nothing to fill up with yet"
    assert any(update["stale"] for update in slow) == preempts
    (folder,) = run_folders(tmp_path)
    steps = int(ver_ppo.load_checkpoint(folder / "checkpoint.pt")["progress"]["step"])
    if preempts:
        assert steps == sum(update["fresh"] for update in fast + slow), "only new steps count"
        share = np.mean([[update["stale"] / 64 for update in rank] for rank in (fast, slow)])
        assert np.mean(logged(folder, "ranks/stale_share")) == pytest.approx(share, abs=1e-6)
    else:
        assert steps == 128 * len(fast)


# ---------------------------------------------------------------------------------------------------------- preemption


def brute_force(step_sec_RN, num_steps, variable, learning_sec):
    """The largest S / (Time(S) + LT) over all S; Time(S) by bisection over how much is there at a time."""
    num_ranks, num_envs = step_sec_RN.shape
    steps_S = np.arange(1, num_ranks * num_envs * num_steps + 1)
    low_S, high_S = np.zeros(len(steps_S)), np.full(len(steps_S), 2 * num_steps * num_envs * step_sec_RN.max())
    for _ in range(60):
        middle_S = (low_S + high_S) / 2
        given_SRN = middle_S[:, None, None] / step_sec_RN
        if variable:
            there_S = np.minimum(num_steps * num_envs, given_SRN.sum(2)).sum(1)
        else:
            there_S = np.minimum(num_steps, given_SRN).sum((1, 2))
        enough = there_S >= steps_S - 1e-9
        low_S, high_S = np.where(enough, low_S, middle_S), np.where(enough, middle_S, high_S)
    values = steps_S / (high_S + learning_sec)
    return values.max(), dict(zip(steps_S.tolist(), high_S))


def test_optimal_preemption():
    """Equation 1 against a search over every S, for 1,000 random tables of step times and learning times."""
    rng, preempted = np.random.default_rng(0), 0
    for _ in range(1000):
        num_ranks, num_envs, num_steps = rng.integers(1, 6), rng.integers(1, 5), rng.integers(1, 13)
        spread, variable, learning_sec = rng.uniform(0, 1.5), rng.random() < 0.5, rng.choice([0.0, 0.1, 1.0, 10.0])
        step_sec_RN = rng.lognormal(-2, spread, (num_ranks, num_envs))
        best, time_of = brute_force(step_sec_RN, num_steps, variable, learning_sec)
        steps, sec = ver_multigpu.optimal_preemption(step_sec_RN, num_steps, variable, learning_sec)
        assert 1 <= steps <= num_ranks * num_envs * num_steps
        assert time_of[steps] <= sec + 1e-6 < time_of.get(steps + 1, np.inf) + 2e-6
        assert steps / (time_of[steps] + learning_sec) >= best * (1 - 1 / steps)  # S is whole
        preempted += steps < num_ranks * num_envs * num_steps
    assert 300 < preempted < 1000
    even = np.full((4, 3), 0.05)
    assert ver_multigpu.optimal_preemption(even, 8, True, 1.0) == (96, pytest.approx(0.4))


@pytest.mark.parametrize("sampler", ["ver", "nover"])
def test_preemption_in_hindsight(sampler):
    """Under a virtual clock, where a step can take many times what another takes: deciding by the step times of the last
    rollout comes close to the best S, which is known afterwards only, and is much better than waiting for all ranks."""
    rates = {how: scaling.simulate(16, 4, 64, sampler, how, rollouts=60, seed=1) for how in ("optimal", "threshold", "none")}
    optimal = rates["optimal"]
    assert 0.93 * optimal["hindsight"] < optimal["rate"] <= optimal["hindsight"]
    assert optimal["rate"] > 1.15 * rates["none"]["rate"]
    assert all(one["rate"] <= one["hindsight"] for one in rates.values())


def test_threshold_preemption():
    """60 % of the ranks, rounded up; never none."""
    assert [ver_multigpu.threshold_preemption(n, 0.6) for n in (1, 2, 5, 8, 10)] == [1, 2, 3, 5, 6]
    assert ver_multigpu.threshold_preemption(4, 1.0) == 4


def test_watch_obeys_the_quarter(monkeypatch):
    """DD-PPO: enough ranks are done, but a rank goes on until it has a quarter of its steps."""
    options = ver_multigpu.Options(num_envs=2, num_steps=8, preemption="threshold")
    workers = VirtualWorkers(2, lambda row, step: 1.0)
    _, _, collector = build(workers, 2, 8)
    with closing(ver_multigpu.Ranks(60)) as ranks:
        watch = ver_multigpu.Watch(ranks, collector, options)
        watch.begin_rollout(limit=1, expected_sec=1.0)
        ranks.count(watch.rollout, 1)
        for steps, ends in ((0, False), (3, False), (4, True)):
            collector.steps_N[:] = steps // 2, steps - steps // 2
            watch.add_progress()
            assert bool(collector.preempted) == ends
        watch.stop_all()
        with pytest.raises(ver_multigpu.OtherRankStopped):
            watch.add_progress()


def test_fill_up():
    """Whenever rollouts end early, the rank learns from exactly S steps: all the new ones and the newest of those it learned
    from before, records, advantages and returns unchanged, each environment's in one piece and never joined to new ones."""
    rng = np.random.default_rng(3)
    workers = VirtualWorkers(
        3,
        lambda row, step: [1.0, 1.7, 4.1][row] * rng.uniform(0.5, 2),
        lambda row, step: "truncated" if step % 11 == 10 else None,
    )
    policy, rollout, collector = build(workers, 3, 16, sampler="ver")
    options = ver_ppo.Options(num_envs=3, num_steps=16)
    other = ver_ppo.Rollout(SPEC, 48, 3, policy.state_shape, torch.device("cpu"))
    receive, history, known, all_steps = workers.receive, None, {}, []
    for update in range(40):
        goal = 48 if update == 0 else int(rng.integers(1, 50))

        def preempting(timeout_sec):
            collector.preempted[...] = rollout.num_complete >= goal
            return receive(timeout_sec)

        workers.receive = preempting
        ver_ppo.carry_over(other, rollout, collector)
        ver_ppo.collect_rollout(policy, rollout, collector)
        fresh = int(rollout.num_complete)
        assert min(goal, 48) <= fresh <= 48
        ver_ppo.check_rollout(rollout, fresh)
        ver_ppo.compute_targets(policy, rollout, np.arange(rollout.size), options)
        records, stale, history = ver_multigpu.fill_up(rollout, other, history)
        assert rollout.complete[records].sum() == len(history) == 48 and stale == 48 - fresh
        steps = {(int(rollout.env[s]), round(float(rollout.reward[s]) % 1 * 1000)): s for s in history}
        assert len(steps) == 48, "no step twice"
        new = [slot for slot in range(int(rollout.size)) if rollout.complete[slot]]
        all_steps += [(int(rollout.env[slot]), round(float(rollout.reward[slot]) % 1 * 1000)) for slot in new]
        assert list(steps) == all_steps[-48:], "the newest, in time order"
        for e in range(3):
            mine = sorted(step for env, step in steps if env == e)
            assert mine == list(range(mine[0], mine[-1] + 1)) if mine else True
        for slot in history[:stale]:
            env, step = int(rollout.env[slot]), round(float(rollout.reward[slot]) % 1 * 1000)
            assert known[env, step] == content(rollout, slot)
        order, begin = ver_ppo.find_sequences(rollout.env[records], rollout.first[records], rollout.complete[records])
        for sequence in np.split(records[order], begin[1:]):
            assert len(set(rollout.env[sequence])) == 1 and len(set(sequence >= rollout.size)) == 1
            assert (np.diff(np.round(rollout.reward[sequence] % 1 * 1000)) == 1).all()
        known |= {key: content(rollout, slot) for key, slot in steps.items()}
        rollout, other = other, rollout
        collector.count_update()


def content(rollout, slot):
    """Everything that a record holds."""
    return tuple(np.asarray(column[slot]).tobytes() for column in rollout.columns())


# ------------------------------------------------------------------------------------------------ decisions, failures


def test_every_collective_is_marked():
    """So that a reader can count them."""
    lines = inspect.getsource(ver_multigpu).splitlines()
    collective = re.compile(r"call\(dist\.(?!init)|dist\.(all_|broadcast|barrier|reduce|scatter)")
    assert [line for line in lines if collective.search(line) and "# COLLECTIVE" not in line] == []
    assert sum("# COLLECTIVE" in line for line in lines) == 3


def perturb(rank, args):
    """As run_and_watch, but rank 1 learns something else once."""
    learn = ver_ppo.learn

    def wrong(policy, optimizer, rollout, records, options, average):
        logs = learn(policy, optimizer, rollout, records, options, average)
        if rank == 1:
            policy.actor.bias.data[0] += 1e-6
        return logs

    ver_ppo.learn, ver_multigpu.CHECK_INTERVAL = wrong, 1
    return ver_multigpu.main(args)


def test_different_weights_are_noticed(tmp_path):
    """A bit that differs between the ranks' weights ends the run."""
    args = small(tmp_path, "--env-id", "CartPole-v1", "--num-workers", "0", "--total-timesteps", "2000")
    assert on_ranks(2, perturb, args) == [1, 1]
    (folder,) = run_folders(tmp_path)
    assert not (folder / "checkpoint.pt").exists()


SLOW = ["--env-id", "tests.envs:Count-v0", "--sim-latency", "10", "--num-workers", "2", "--checkpoint-interval", "128"]


@pytest.mark.parametrize("how", ["killed", "silent"])
def test_dead_rank_ends_the_others(tmp_path, how):
    """A rank that is killed or stands still: the others end within --rank-timeout, with a message and their workers."""
    processes = start_ranks(3, lambda rank: small(tmp_path, *SLOW, "--rank-timeout", "12"))
    wait_until(lambda: list(tmp_path.glob("*/checkpoint.pt")))
    os.killpg(processes[1].pid, signal.SIGKILL if how == "killed" else signal.SIGSTOP)
    began = time.monotonic()
    for process in (processes[0], processes[2]):
        text = process.communicate(timeout=40)[0]
        assert process.returncode == 1, text
        assert "another rank has died, or been silent for 12 s" in text or "torchrun or rank 0 has died" in text, text
        assert "Traceback" not in text, text
    assert time.monotonic() - began < 30
    os.killpg(processes[1].pid, signal.SIGKILL)
    outputs(processes)
    wait_until(lambda: not any(alive(process.pid) for process in processes), 15)


def alive(group):
    return alive_in_group(group)


def test_all_end_together(tmp_path):
    """A signal to one rank stops all, with a checkpoint of all; the run then goes on where it was."""
    processes = start_ranks(2, lambda rank: small(tmp_path, *SLOW, "--total-timesteps", "100000"))
    wait_until(lambda: list(tmp_path.glob("*/checkpoint.pt")))
    processes[1].send_signal(signal.SIGTERM)
    texts = outputs(processes)
    assert [process.returncode for process in processes] == [143, 143], texts
    assert "stopped at step" in texts[0] and texts[1] == "", texts
    (folder,) = run_folders(tmp_path)
    saved = ver_ppo.load_checkpoint(folder / "checkpoint.pt")
    step, snapshots = saved["progress"]["step"], saved["collectors"]
    assert step > 0 and len(snapshots) == 2 and not differences(snapshots[0], snapshots[1]) == []
    more = ["--resume", str(folder), "--total-timesteps", str(step + 100)]
    processes = start_ranks(2, lambda rank: more)
    texts = outputs(processes)
    assert [process.returncode for process in processes] == [0, 0], texts
    assert ver_ppo.load_checkpoint(folder / "checkpoint.pt")["progress"]["step"] > step
    (text,) = outputs(start_ranks(1, lambda rank: more))
    assert "the run to resume has 2 ranks, this one 1: give torchrun --nproc-per-node 2" in text


def stop_fifth_update(rank, args):
    """ver_multigpu.main; rank 1 gets SIGTERM in its fifth update."""
    calls, learn = [], ver_ppo.learn

    def interrupted(*more):
        calls.append(1)
        if rank == 1 and len(calls) == 5:
            os.kill(os.getpid(), signal.SIGTERM)
        return learn(*more)

    ver_ppo.learn = interrupted
    return ver_multigpu.main(args)


def run_rank_main(rank, args):
    return ver_multigpu.main(args)


def test_resume_is_going_on(tmp_path):
    """Two ranks, stopped and resumed, come to the weights, environments and generators of two that were not stopped."""
    args = ["--env-id", "CartPole-v1", "--num-workers", "0", "--preemption", "none", "--total-timesteps", "1280"]
    assert on_ranks(2, run_rank_main, small(tmp_path / "whole", *args)) == [0, 0]
    assert on_ranks(2, stop_fifth_update, small(tmp_path / "parts", *args)) == [143, 143]
    (whole,), (parts,) = run_folders(tmp_path / "whole"), run_folders(tmp_path / "parts")
    assert ver_ppo.load_checkpoint(parts / "checkpoint.pt")["progress"]["step"] == 640
    assert on_ranks(2, run_rank_main, ["--resume", str(parts)]) == [0, 0]
    one, two = (ver_ppo.load_checkpoint(folder / "checkpoint.pt") for folder in (whole, parts))
    assert differences(one, two) == []


@pytest.mark.parametrize("workers", ["0", "2"])
@pytest.mark.parametrize(
    "env, words, learned",
    [("faulty_envs:Faulty-raise-v0", "out of paint", True), ("faulty_envs:Late-v0", "no licence", False)],
)
def test_failing_environment_of_one_rank(tmp_path, workers, env, words, learned):
    """An environment that raises in one rank, in a step or at the first reset: all end with status 1, the message names the
    rank, all is saved."""
    args = ["--total-timesteps", "100000", "--num-workers", workers]
    processes = start_ranks(2, lambda rank: small(tmp_path, "--env-id", f"tests.{env if rank else 'envs:Count-v0'}", *args))
    texts = outputs(processes)
    assert [process.returncode for process in processes] == [1, 1], texts
    assert "rank 1: " in texts[0] and words in texts[0] and texts[1] == "", texts
    (folder,) = run_folders(tmp_path)
    assert (ver_ppo.load_checkpoint(folder / "checkpoint.pt")["progress"]["step"] > 0) == learned


@pytest.mark.parametrize(
    "args, words",
    [
        (["--overlap"], "--preemption"),
        (["--sync-frac", "0"], "--sync-frac"),
        (["--device", "cuda:1"], "--device"),
        (["--env-id", "Nowhere-v0"], "Nowhere"),
        (["--resume", "nowhere"], "nowhere"),
    ],
)
def test_bad_options(args, words, capsys):
    """One line, status 2."""
    assert ver_multigpu.main(args) == 2
    line = capsys.readouterr().err.strip().splitlines()[-1]
    assert line.startswith("ver_multigpu.py: ") and words in line


@pytest.mark.parametrize(
    "options, words",
    [
        ({"device": "cuda:1"}, "must be auto, cpu or cuda"),
        ({"checkpoint": "file", "device": "cpu"}, "is evaluated by ver_ppo.py"),
        ({"device": "cuda"}, "2 ranks need as many GPUs, there are 1"),
        ({"rank_timeout": 0.0}, "--rank-timeout"),
    ],
)
def test_rules_of_ranks(options, words, monkeypatch):
    """What only many ranks forbid."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ver_ppo.UserError, match=words):
        ver_ppo.validate_options(ver_multigpu.Options(**options))


def test_bad_options_are_said_once():
    """What all ranks refuse, one says."""
    processes = start_ranks(2, lambda rank: ["--env-id", "Nowhere-v0"])
    texts = outputs(processes)
    assert [process.returncode for process in processes] == [2, 2]
    assert texts[0].count("Nowhere") >= 1 and texts[1] == ""


def test_torchrun_starts_again(tmp_path):
    """torchrun --max-restarts: after a rank was killed, all start again and go on from the last checkpoint, in the same
    folder; the run reaches its end."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--max-restarts", "1"]
    command += ["--master-port", str(free_port()), "ver_multigpu.py", *small(tmp_path, *SLOW), "--total-timesteps", "1500"]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    wait_until(lambda: list(tmp_path.glob("*/checkpoint.pt")))
    os.kill(ranks_of(process)[-1], signal.SIGKILL)
    (text,) = outputs([process], timeout=120)
    assert process.returncode == 0, text
    (folder,) = run_folders(tmp_path)
    saved = ver_ppo.load_checkpoint(folder / "checkpoint.pt")
    assert saved["progress"]["step"] >= 1500
    assert len(list(folder.glob("events*"))) == 2, "it was started twice"


def test_ranks_do_not_outlive_torchrun(tmp_path):
    """torchrun is killed: its ranks notice that its key-value store is gone, and end with all their workers."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(free_port())]
    process = subprocess.Popen(
        [*command, "ver_multigpu.py", *small(tmp_path, *SLOW)], cwd=ROOT, stderr=subprocess.PIPE, text=True
    )
    wait_until(lambda: list(tmp_path.glob("*/checkpoint.pt")))
    groups = ranks_of(process)
    process.kill()
    wait_until(lambda: not any(alive(group) for group in groups), 30)
    assert len(groups) == 2 and "has died" in process.communicate(timeout=10)[1]


def ranks_of(agent):
    """Processes that torchrun has started."""
    found = []
    for status in Path("/proc").glob("[0-9]*/status"):
        with contextlib.suppress(OSError):
            if f"PPid:\t{agent.pid}\n" in status.read_text():
                found.append(int(status.parent.name))
    return sorted(found)


def test_reduce_logs():
    """Means, and extremes of what is an extreme."""
    logs = ver_multigpu.reduce_logs([{"a": 1.0, "b_min": 2, "b_max": 2}, {"a": 3.0, "b_min": 5, "b_max": 5}])
    assert logs == {"a": 2.0, "b_min": 2, "b_max": 5}


def test_cores_are_shared(monkeypatch):
    """Ranks on one machine divide its cores."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    cores = ver_ppo.count_cores()
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert ver_ppo.count_cores() == max(1, cores // 2)
    assert ver_ppo.count_workers(replace(ver_multigpu.Options(), num_envs=64)) == max(1, cores // 2)
