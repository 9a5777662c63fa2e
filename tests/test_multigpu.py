"""Many ranks on the CPU: one is ver_ppo.py, several are one; preemption, stale steps, decisions
taken together."""

import contextlib
import io
import os
import shutil
import signal
import time
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from datetime import timedelta
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.nn.utils import parameters_to_vector

import ver_multigpu
import ver_ppo
from notebooks.extensions.virtual_clock import SPEC, VirtualWorkers, build
from notebooks.extensions.virtual_ranks import simulate
from tests.helpers import (
    WHERE,
    alive_in_session,
    differences,
    free_port,
    rank_environment,
    run_folders,
    same,
    small,
    start,
    stop,
    wait_until,
)


def open_stderr(path):
    """What this process, and those that it starts, print to stderr goes into a file."""
    with open(path, "ab") as file:
        os.dup2(file.fileno(), 2)


def run_rank(function, rank, port, args):
    os.environ.update(rank_environment(rank, 2, port))
    torch.set_num_threads(1)
    return function(rank, *args)


@pytest.fixture(scope="module")
def on_two(tmp_path_factory):
    """on_two(function, *args): the results of function(rank, *args) in two processes, which all
    tests share."""
    folder = tmp_path_factory.mktemp("stderr")
    with contextlib.ExitStack() as stack:
        pools = []
        for rank in range(2):
            of_pool = {"initializer": open_stderr, "initargs": (folder / str(rank),)}
            pool = ProcessPoolExecutor(1, mp_context=get_context("spawn"), **of_pool)
            pools.append(stack.enter_context(pool))

        def call(function, *args):
            port = free_port()
            calls = [
                pool.submit(run_rank, function, rank, port, args) for rank, pool in enumerate(pools)
            ]
            return [each.result(90) for each in calls]

        yield call


def run_main(rank, args, args_1=(), stop_in=0):
    """ver_multigpu.main in one rank, rank 1 with more arguments; it gets SIGTERM twice at the end
    of its update `stop_in`. Returns exit status, what was printed, what it and the processes that
    it has started say of themselves alone, all seeds that were derived, the collectives, and what
    each update learned from and came to."""
    found = SimpleNamespace(seeds=set(), collectives=[], updates=[])
    call = ver_multigpu.Ranks.call
    update = ver_ppo.ppo_update
    step = ver_ppo.minibatch_step
    statistics = ver_ppo.update_statistics
    derive = ver_ppo.derive_seed
    next_rollout = ver_multigpu.RankRun.next_rollout

    def counting_call(ranks, function, *more, **named):
        # the counter: not a collective
        counter = "add", "delete_key"
        found.collectives += [function.__name__] * (function.__name__ not in counter)
        return call(ranks, function, *more, **named)

    def noting_seed(*numbers):
        if numbers[-1] < ver_ppo.TRIAL:
            found.seeds |= {derive(*numbers)} - {derive(ver_multigpu.SEED_OF_RANK, *numbers[1:])}
        return derive(*numbers)

    def watching_step(policy, optimizer, batch, *more):
        found.updates[-1]["learned"] += batch["row"].tolist()
        return step(policy, optimizer, batch, *more)

    def noting_rollout(run, source):
        rollout = next_rollout(run, source)
        found.fresh = rollout.rows
        return rollout

    def watching_update(policy, optimizer, rollout, *more):
        newest = rollout.complete[rollout.rows - found.fresh :]
        steps_N = np.bincount(newest["env"], minlength=rollout.num_envs)
        counts = {"fresh": found.fresh, "stale": sum(rollout["segment"] >= rollout.num_envs)}
        counts |= {
            "different": len(set(zip(rollout["env"], rollout["sent_at"]))),
            "min": min(steps_N),
            "max": max(steps_N),
        }
        found.updates.append({**counts, "learned": []})
        logs = update(policy, optimizer, rollout, *more)
        found.updates[-1]["weights"] = parameters_to_vector(policy.parameters()).tolist()
        return logs

    def stopping_statistics(*args):
        statistics(*args)
        for _ in range(2 * (rank == 1 and len(found.updates) == stop_in)):
            os.kill(os.getpid(), signal.SIGTERM)

    printed = io.StringIO()
    words = Path("/proc/self/fd/2")
    before = words.stat().st_size
    with (
        pytest.MonkeyPatch.context() as patch,
        contextlib.redirect_stdout(printed),
        contextlib.redirect_stderr(printed),
    ):
        patch.setattr(ver_multigpu.RankRun, "next_rollout", noting_rollout)
        patch.setattr(ver_multigpu.Ranks, "call", counting_call)
        patch.setattr(ver_ppo, "derive_seed", noting_seed)
        patch.setattr(ver_ppo, "minibatch_step", watching_step)
        patch.setattr(ver_ppo, "ppo_update", watching_update)
        patch.setattr(ver_ppo, "update_statistics", stopping_statistics)
        found.status = ver_multigpu.main(["--rank-timeout", "30", *args, *(args_1 if rank else ())])
    found.printed, found.said = printed.getvalue(), words.read_bytes()[before:].decode()
    return found


def saved(tmp_path):
    """Content of the only checkpoint there."""
    (folder,) = run_folders(tmp_path)
    return ver_ppo.load_checkpoint(folder / "checkpoint.pt")


# ----------------------------------------------------------------------------- one rank, many ranks


@pytest.mark.parametrize("more", [[], ["--no-norm-adv", "--sampler", "nover"]])
def test_one_rank_is_ver_ppo(tmp_path, more):
    """With one rank everything is as in ver_ppo.py, bit for bit."""
    args = ["--env-id", "CartPole-v1", "--num-workers", "0", "--total-timesteps", "1024", *more]
    assert ver_multigpu.main(small(tmp_path / "many", *args, "--preemption", "none")) == 0
    assert ver_ppo.main(small(tmp_path / "one", *args)) == 0
    assert differences(saved(tmp_path / "one"), saved(tmp_path / "many")) == []


def test_ranks_part_before_evaluating(tmp_path, monkeypatch):
    """Rank 0 may evaluate for longer than the others would wait."""
    together = []
    monkeypatch.setattr(
        ver_ppo.Run, "evaluate", lambda run: together.append(torch.distributed.is_initialized())
    )
    args = small(
        tmp_path,
        "--env-id",
        "CartPole-v1",
        "--num-workers",
        "0",
        "--total-timesteps",
        "64",
        "--preemption",
        "none",
    )
    assert ver_multigpu.main(args) == 0 and together == [False]


def rollout_of(seed):
    """A rollout of one rank, its policy (the same for every seed) and options."""
    durations = np.random.default_rng(seed).uniform(0.3, 3.0, 64)
    ending = lambda e, step: "terminated" if step % 9 == 8 else None
    workers = VirtualWorkers(3, lambda e, step: durations[(7 * e + step) % 64], ending)
    torch.manual_seed(0)
    policy, rollout, c = build(workers, 3, 16, num_minibatches=1, update_epochs=1, norm_adv=True)
    torch.manual_seed(seed)
    for _ in range(2):
        c.collect(rollout)
    ver_ppo.add_advantages(rollout, c.options)
    return policy, rollout, c.options


def step_weights(policy, rollout, options, *average):
    """The weights after one step of gradient descent, and what was logged."""
    logs = ver_ppo.ppo_update(
        policy, torch.optim.SGD(policy.parameters(), lr=1.0), rollout, options, *average
    )
    return parameters_to_vector(policy.parameters()).detach(), logs


def learn_half(rank):
    with contextlib.closing(ver_multigpu.Ranks(60)) as ranks:
        return step_weights(*rollout_of(seed=rank + 1), ranks.average)


def test_halves_are_the_whole(on_two):
    """Two ranks with a rollout each take the step that one process takes with both rollouts:
    gradients, clipping, and the statistics that advantages are normalized by."""
    (weights, logs), (other_weights, other_logs) = on_two(learn_half)
    assert torch.equal(weights, other_weights)
    (policy, one, options), (_, two, _) = rollout_of(seed=1), rollout_of(seed=2)
    half = np.arange(one.capacity)
    size = 2 * one.capacity, 2 * one.num_envs
    whole = ver_ppo.Rollout(SPEC, *size, policy.state_shape, torch.device("cpu"))
    whole.copy(half, one, half)
    whole.copy(one.capacity + half, two, half)
    whole.rows = whole.capacity
    whole["segment"][one.capacity :] += one.num_envs
    before = parameters_to_vector(policy.parameters()).detach().clone()
    expected, whole_logs = step_weights(policy, whole, options)
    torch.testing.assert_close(weights, expected, rtol=1e-5, atol=1e-6)
    assert (expected - before).abs().max() > 1e-3
    assert whole_logs["losses/grad_norm"] == pytest.approx(logs["losses/grad_norm"], rel=1e-4)
    mean_loss = (logs["losses/value_loss"] + other_logs["losses/value_loss"]) / 2
    assert whole_logs["losses/value_loss"] == pytest.approx(mean_loss, rel=1e-4)


class Normed(ver_ppo.Policy):
    """A policy with statistics in buffers, which each rank moves by its own steps."""

    def __init__(self, spec, options):
        super().__init__(spec, options)
        self.norm = torch.nn.BatchNorm1d(self.features)

    def encode(self, obs, prev_action_BA, first_B):
        x_BF = super().encode(obs, prev_action_BA, first_B)
        seen_BF, action_BF = x_BF.tensor_split([self.features], dim=1)
        return torch.cat([self.norm(seen_BF), action_BF], dim=1)


def note_buffers(rank, args):
    """Buffers of `Normed` by the learning of each update, and after it."""
    learned, agreed = [], []
    statistics = ver_ppo.update_statistics
    update = ver_multigpu.RankRun.update

    def buffers_of(policy):
        return [policy.norm.num_batches_tracked.item(), *policy.norm.running_mean.tolist()]

    def noting_statistics(policy, *more):
        statistics(policy, *more)
        learned.append(buffers_of(policy))

    def noting_update(run, rollout):
        logs = update(run, rollout)
        agreed.append(buffers_of(run.policy))
        return logs

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ver_ppo, "update_statistics", noting_statistics)
        patch.setattr(ver_multigpu.RankRun, "update", noting_update)
        status = ver_multigpu.main(args)
    return status, learned, agreed


def test_buffers_are_those_of_rank_0(tmp_path, on_two):
    """Averaged gradients alone would leave the ranks with different buffers. After each update, all
    have those of rank 0."""
    args = ["--env-id", "CartPole-v1", "--num-workers", "0", "--total-timesteps", "640"]
    args += ["--policy", "tests.test_multigpu:Normed"]
    found = on_two(note_buffers, small(tmp_path, *args))
    (status, learned, agreed), (status_1, learned_1, agreed_1) = found
    assert status == status_1 == 0 and len(agreed) >= 5
    assert agreed == agreed_1 == learned
    assert all(one != two for one, two in zip(learned, learned_1)), "they learn from other steps"
    tracked = [number for number, *_ in agreed]
    assert tracked == [16 * (1 + update) for update in range(len(agreed))]
    assert saved(tmp_path)["policy"]["norm.running_mean"].tolist() == agreed[-1][1:]


LATENCY = "latency(mean_ms={}, spread=0)"
OPTIMAL, THRESHOLD, NONE = (["--preemption", how] for how in ("optimal", "threshold", "none"))
MODES = [
    OPTIMAL,
    [*OPTIMAL, "--sampler", "nover"],
    [*THRESHOLD, "--sampler", "sync", "--sync-frac", "0.5"],
]
MODES += [NONE, [*NONE, *WHERE["overlap"]], [*NONE, *WHERE["async"]]]


@pytest.mark.parametrize("more", MODES, ids=" ".join)
def test_preempted_rank(tmp_path, on_two, more):
    """One rank is many times as slow as the other. Whatever is done about it: both learn from
    exactly S steps each time, call as many collectives, and have the same weights after every
    update; if it is preempted, what it has less is stale."""
    preempts, latency = NONE[1] not in more, ["--wrappers", LATENCY.format(2)]
    args = small(
        tmp_path,
        "--env-id",
        "tests.envs:Count-v0",
        "--total-timesteps",
        "800",
        "--debug",
        *more,
        *latency,
    )
    fast, slow = on_two(run_main, args, ["--wrappers", LATENCY.format(40 if preempts else 10)])
    assert fast.status == slow.status == 0, fast.printed
    assert fast.collectives == slow.collectives and "all_reduce" in fast.collectives
    assert len(fast.updates) == len(slow.updates) > 5
    pairs, updates = list(zip(fast.updates, slow.updates)), fast.updates + slow.updates
    for one, other in pairs:
        assert one["weights"] == other["weights"]
    for update in updates:
        assert sorted(update["learned"]) == sorted(2 * list(range(64))), "two epochs"
        assert update["different"] == 64 and update["stale"] == 64 - update["fresh"]
    assert len({tuple(update["weights"]) for update in fast.updates}) == len(fast.updates)
    assert fast.updates[0]["stale"] == slow.updates[0]["stale"] == 0, (
        "there is nothing to fill up with yet"
    )
    assert any(update["stale"] for update in slow.updates) == preempts
    assert more[1] != "threshold" or all(update["fresh"] >= 16 for update in slow.updates), (
        "a quarter"
    )
    assert saved(tmp_path)["step"] == sum(update["fresh"] for update in updates), (
        "only new steps count"
    )
    events = EventAccumulator(str(run_folders(tmp_path)[0])).Reload()
    reductions = {"ver/steps_per_env_min": (min, "min"), "ver/steps_per_env_max": (max, "max")}
    reductions |= (
        {"ranks/stale_share": (lambda one, other: (one + other) / 128, "stale")} if preempts else {}
    )
    for tag, (reduction, name) in reductions.items():
        expected = [reduction(one[name], other[name]) for one, other in pairs]
        assert [event.value for event in events.Scalars(tag)] == expected, tag


# --------------------------------------------------------------------------------------- preemption


def brute_force(step_sec_RN, num_steps, variable, learning_sec):
    """The largest S / (Time(S) + LT) over all S; Time(S) by bisection over how much is there at a
    time."""
    num_ranks, num_envs = step_sec_RN.shape
    steps_S = np.arange(1, num_ranks * num_envs * num_steps + 1)
    low_S = np.zeros(len(steps_S))
    high_S = np.full(len(steps_S), 2 * num_steps * num_envs * step_sec_RN.max())
    for _ in range(60):
        middle_S = (low_S + high_S) / 2
        given_SRN, most = middle_S[:, None, None] / step_sec_RN, num_steps
        if variable:
            given_SRN, most = given_SRN.sum(axis=2, keepdims=True), num_steps * num_envs
        enough = np.minimum(most, given_SRN).sum((1, 2)) >= steps_S - 1e-9
        low_S, high_S = np.where(enough, low_S, middle_S), np.where(enough, middle_S, high_S)
    values = steps_S / (high_S + learning_sec)
    return values.max(), dict(zip(steps_S.tolist(), high_S))


def test_optimal_preemption():
    """Equation 1 against a search over every S, for 1,000 random tables of step times and learning
    times."""
    rng, preempted = np.random.default_rng(0), 0
    for _ in range(1000):
        num_ranks, num_envs, num_steps = rng.integers(1, 6), rng.integers(1, 5), rng.integers(1, 13)
        spread = rng.uniform(0, 1.5)
        variable = rng.random() < 0.5
        learning_sec = rng.choice([0.0, 0.1, 1.0, 10.0])
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
    """Under a virtual clock, where a step can take many times what another takes: deciding by the
    step times of the last rollout comes close to the best S, which is known afterwards only, and is
    much better than waiting for all ranks."""
    rates = {
        how: simulate(16, 4, 64, sampler, how, rollouts=60, seed=1)
        for how in ("optimal", "threshold", "none")
    }
    optimal = rates["optimal"]
    assert 0.93 * optimal["hindsight"] < optimal["rate"] <= optimal["hindsight"]
    assert optimal["rate"] > 1.15 * rates["none"]["rate"]
    assert all(one["rate"] <= one["hindsight"] for one in rates.values())


def test_step_seconds():
    """By hand: until an environment had given its 4 steps, or until the end; a step
    of those that gave none takes as long as the rollout."""
    rollout = ver_ppo.Rollout(SPEC, 12, 3, (2, 8), torch.device("cpu"))
    rollout.rows, rollout.started_at, rollout.ended_at = 7, 100.0, 110.0
    # the last five are of the rollout before
    rollout["env"][:] = [0, 1, 0, 0, 1, 0, 1, 2, 2, 2, 2, 2]
    rollout["began_at"][:7] = [100, 101, 102, 104, 103, 106, 107]
    rollout["step_sec"][:7] = [1, 1, 1, 1, 1, 2, 1]
    found = ver_multigpu.step_seconds(rollout, 4, np.zeros(3)).tolist()
    assert found == pytest.approx([8 / 4, 10 / 3, 10])


def test_first_rollout_decides_nothing(tmp_path, monkeypatch):
    """Environments start in it, so its times are not those of steps: the next one is not preempted;
    those after it may be."""
    limits, begin = [], ver_multigpu.RankRun.begin_rollout

    def noting_begin(run, limit, *more, **named):
        limits.append(limit)
        begin(run, limit, *more, **named)

    monkeypatch.setattr(ver_multigpu.RankRun, "begin_rollout", noting_begin)
    args = small(
        tmp_path, "--env-id", "CartPole-v1", "--num-workers", "0", "--total-timesteps", "256"
    )
    assert ver_multigpu.main(args) == 0
    assert limits[:2] == [ver_multigpu.NO_LIMIT] * 2 and len(limits) == 5 and max(limits[2:]) <= 64


@pytest.mark.parametrize("sampler", ["ver", "nover", "sync"])
def test_what_decides(tmp_path, monkeypatch, sampler):
    """The decision is made by the step times of all ranks, until each environment had given its
    quota, by the mean learning time, and by whether rollouts are variable. Counters are looked at a
    hundred times in the longest rollout. Steps and episodes are those of all ranks."""
    options = ver_multigpu.Options(
        env_id="tests.envs:Count-v0",
        num_envs=3,
        num_steps=2,
        num_minibatches=1,
        num_workers=0,
        device="cpu",
        sampler=sampler,
        runs_dir=str(tmp_path),
    )
    asked = []
    monkeypatch.setattr(
        ver_multigpu, "optimal_preemption", lambda *args: asked.append(args) or (5, 7.0)
    )
    with contextlib.closing(ver_multigpu.RankRun(options)) as run:
        rollout = ver_ppo.Rollout(run.spec, 6, 3, run.policy.state_shape, torch.device("cpu"))
        rollout.rows, rollout.started_at, rollout.ended_at = 5, 100.0, 110.0
        rollout["env"][:] = [0, 0, 1, 1, 2, 9]
        rollout["began_at"][:] = [101, 103, 102, 106, 104, 0]
        rollout["step_sec"][:] = 1.0
        rollout["done"][4] = True
        rollout["episode_stats"][4] = [8.0, 4.0]
        own = {"time/learning_sec": 1.0, "time/rollout_sec": 10.0, "ver/steps_per_env_min": 1}
        other = {"time/learning_sec": 3.0, "time/rollout_sec": 40.0, "ver/steps_per_env_min": 0}
        other_sec_N = np.array([1.0, 2.0, 4.0])
        run.ranks.gather = lambda mine: [mine, (6, other, [[9.0, 5.0]], other_sec_N)]
        run.step = 1  # not the first rollout, which decides nothing
        steps, logs, episodes = run.combine(rollout, own)
        assert (steps, episodes) == (11, [[8.0, 4.0], [9.0, 5.0]])
        assert logs["ver/steps_per_env_min"] == 0 and logs["ranks/rollout_sec"] == 40.0
        assert (run.limit, run.predicted_sec, run.look_sec) == (5, 7.0, 0.4)
    ((step_sec_RN, num_steps, variable, learning_sec),) = asked
    # with a quota of 2, environments 0 and 1 are done after 4 and 7 s; without, nobody is
    own_sec_N = [5.0, 5.0, 10.0] if sampler == "ver" else [2.0, 3.5, 10.0]
    assert step_sec_RN.tolist() == [own_sec_N, other_sec_N.tolist()]
    assert (num_steps, variable, learning_sec) == (2, sampler == "ver", 2.0)


def weights_and_means(rank, runs_dir):
    """All weights and buffers of a run whose policy began in another way on each rank."""
    own = ver_ppo.make_policy

    def make_policy(*args):
        policy = own(*args)
        for tensor in policy.state_dict().values():
            tensor += rank + 1
        return policy

    line = ["--env-id", "CartPole-v1", "--num-workers", "0"]
    options = ver_ppo.parse_options(small(Path(runs_dir), *line), ver_multigpu.Options)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ver_ppo, "make_policy", make_policy)
        with contextlib.closing(ver_multigpu.RankRun(options)) as run:
            return {name: tensor.numpy() for name, tensor in run.policy.state_dict().items()}


def test_all_begin_with_the_weights_of_rank_0(tmp_path, on_two):
    """Averaged gradients keep weights equal only if they are equal at first."""
    state, state_1 = on_two(weights_and_means, str(tmp_path))
    assert all((state[name] == state_1[name]).all() for name in state)
    assert state["log_ent_coef"] == pytest.approx(np.log(5e-3) + 1)


@pytest.mark.parametrize("more_steps, more_updates", [(0, 0), (64, 0), (0, 1)])
def test_all_begin_at_the_same_step(more_steps, more_updates):
    """Ranks that have read different checkpoints are refused: their counters differ."""
    run = SimpleNamespace(
        step=128, version=2, options=ver_ppo.Options(resume="runs/7"), policy=torch.nn.Linear(1, 1)
    )
    ranks = SimpleNamespace(
        gather=lambda mine: [mine, (128 + more_steps, 2 + more_updates)],
        broadcast=lambda tensor: None,
    )
    if not (more_steps or more_updates):
        return ver_multigpu.begin_alike(ranks, run)
    with pytest.raises(ver_ppo.UserError, match="different checkpoints of runs/7"):
        ver_multigpu.begin_alike(ranks, run)


def test_threshold_preemption():
    """60 % of the ranks, rounded up; never none."""
    assert [ver_multigpu.threshold_preemption(n, 0.6) for n in (1, 2, 5, 8, 10)] == [1, 2, 3, 5, 6]
    assert ver_multigpu.threshold_preemption(4, 1.0) == 4


@pytest.mark.parametrize(
    "how, limit, others, most", [("threshold", 1, 1, 3), ("optimal", 12, 7, 4)]
)
def test_enough(tmp_path, how, limit, others, most):
    """threshold: one rank is done, but this one goes on until it has a quarter of its steps
    (DD-PPO). optimal: all ranks together have 12. And it ends when another rank cannot go on."""
    options = ver_multigpu.Options(
        env_id="CartPole-v1", num_envs=2, num_steps=8, preemption=how, runs_dir=str(tmp_path)
    )
    with contextlib.closing(ver_multigpu.RankRun(options)) as run:
        run.begin_rollout(limit, 0.0, 0.0)
        run.ranks.add(0, others)
        for steps in (0, 2, most, most + 1):
            time.sleep(run.look_sec)
            assert run.enough(steps) == (steps > most)
        run.begin_rollout(ver_multigpu.NO_LIMIT, 0.0, 0.0)
        assert not run.enough(0)
        run.ranks.add(0, ver_multigpu.STOP)
        time.sleep(run.look_sec)
        assert run.enough(0)


def content(rollout, step):
    """Everything that is known of a step but its segment."""
    rows = (rollout[name] for name in rollout.dtype.names if name != "segment")
    return [
        column[step].tobytes()
        for column in (*rows, rollout.obs["obs"].numpy(), rollout.state.numpy())
    ]


def test_fill_up(tmp_path, monkeypatch):
    """Whenever rollouts end early, the rank learns from exactly S steps: all the new ones and the
    newest of those it learned from before, contents, advantages and returns unchanged, in time
    order and never joined to new ones."""
    rng, all_steps, known = np.random.default_rng(3), [], {}
    ending = lambda e, step: "terminated" if step % 11 == 10 else None
    workers = VirtualWorkers(3, lambda e, step: [1.0, 1.7, 4.1][e] * rng.uniform(0.5, 2), ending)
    policy, rollout, c = build(workers, 3, 16)
    monkeypatch.setattr(ver_ppo, "build", lambda options: (SPEC, policy))
    given = {"num_envs": 3, "num_steps": 16, "num_workers": 0, "device": "cpu"}
    options = ver_multigpu.Options(**given, runs_dir=str(tmp_path))
    with contextlib.closing(ver_multigpu.RankRun(options)) as run:
        for update in range(40):
            goal = 48 if update == 0 else int(rng.integers(1, 50))
            c.enough = lambda rows: rows >= goal
            c.collect(rollout)
            fresh, c.version = rollout.rows, update + 1
            assert min(goal, 48) <= fresh <= 48
            ver_ppo.check_rollout(rollout, update)
            learned = run.advantages(rollout)
            assert learned.rows == learned.capacity == 48
            newest = slice(48 - fresh, 48)
            given_N = np.bincount(learned["env"][newest], minlength=3)
            fair = max(1.0, fresh / 3)
            weights = [min(1.0, fair / given_N[e]) for e in learned["env"][newest]]
            np.testing.assert_allclose(learned["weight"][newest], weights, rtol=1e-6)
            collected = [content(rollout, index) for index in range(fresh)]
            assert [content(learned, index) for index in range(48 - fresh, 48)] == collected
            all_steps += check_filled_up(learned, fresh, all_steps, known)


def check_filled_up(learned, fresh, all_steps, known):
    """All that a rank learns from. `all_steps`: what it has collected before; `known`: the contents
    of what it has learned from, to which these are added. Returns the fresh steps."""
    numbers = (1000 * (learned["reward"] - learned["env"])).round().astype(int)
    steps = list(zip(learned["env"].tolist(), numbers.tolist()))
    stale = 48 - fresh
    in_order = [*all_steps, *steps[stale:]]
    assert steps == in_order[-48:], "the newest, in time order"
    assert len(set(steps)) == 48, "no step twice"
    assert all(known[steps[index]] == content(learned, index) for index in range(stale))
    sequences = ver_ppo.find_sequences(learned["segment"], learned["first"])
    assert sorted(np.concatenate(sequences)) == list(range(48))
    for sequence in sequences:
        assert len(set(learned["env"][sequence])) == 1 and len(set(sequence >= stale)) == 1
        assert (np.diff([steps[index][1] for index in sequence]) == 1).all()
    known |= {step: content(learned, index) for index, step in enumerate(steps)}
    return steps[stale:]


# ------------------------------------------------------------------------------ decisions, failures


def test_stop_and_resume(tmp_path, on_two):
    """Signals to one rank stop all, with one checkpoint, from which any number of ranks goes on:
    two of them come twice to the same weights. No two environments or learners of the ranks have a
    seed in common."""
    args = [
        "--env-id",
        "CartPole-v1",
        "--num-workers",
        "0",
        "--preemption",
        "none",
        "--total-timesteps",
        "896",
    ]
    ranks = on_two(run_main, small(tmp_path / "first", *args), (), 5)
    assert [rank.status for rank in ranks] == [143, 143]
    assert "stopped at step 640" in ranks[0].printed and ranks[1].printed == ""
    assert saved(tmp_path / "first")["step"] == 640 and saved(tmp_path / "first")["update"] == 5
    for name in ("second", "third"):
        shutil.copytree(tmp_path / "first", tmp_path / name)
    for name in ("first", "second"):
        resumed = on_two(
            run_main, ["--resume", str(run_folders(tmp_path / name)[0]), "--device", "cpu"]
        )
        assert [rank.status for rank in resumed] == [0, 0], resumed[0].printed
        seeds = [rank.seeds for rank in (*ranks, *resumed)]
        assert min(map(len, seeds)) > 5 and len(set.union(*seeds)) == sum(map(len, seeds))
    assert differences(saved(tmp_path / "first"), saved(tmp_path / "second")) == []
    assert saved(tmp_path / "first")["step"] == 896 and saved(tmp_path / "first")["update"] == 7
    (third,) = run_folders(tmp_path / "third")
    assert ver_multigpu.main(["--resume", str(third), "--device", "cpu"]) == 0
    assert saved(tmp_path / "third")["step"] == 896 and saved(tmp_path / "third")["update"] == 9


@pytest.mark.parametrize("workers", ["0", "2"])
@pytest.mark.parametrize(
    "env, words, learned", [("Faulty-raise", "out of paint", True), ("Late", "no licence", False)]
)
def test_failing_environment_of_one_rank(tmp_path, on_two, workers, env, words, learned):
    """An environment that raises in one rank, in a step or at the first reset: all end with status
    1, before their rollouts are complete (here, they would take more than --rank-timeout), the
    message names the rank, all is saved."""
    args = small(
        tmp_path,
        "--env-id",
        "tests.envs:Count-v0",
        "--num-workers",
        workers,
        "--max-worker-restarts",
        "0",
    )
    args += [] if learned else ["--wrappers", LATENCY.format(1000), "--rank-timeout", "20"]
    ranks = on_two(run_main, args, ["--env-id", f"tests.faulty_envs:{env}-v0"])
    assert [rank.status for rank in ranks] == [1, 1], ranks[0].printed
    assert "rank 1: " in ranks[0].printed and ranks[1].printed == ""
    # a worker process prints it itself
    assert words in (ranks[0].printed if workers == "0" else ranks[1].said)
    assert workers == "0" or "rank 1: environment " in ranks[1].said
    assert (saved(tmp_path)["step"] > 0) == learned


TRACE = ["--extensions", "trace(file=/nowhere/trace)"]
REFUSED = [  # arguments of both ranks, of rank 1 alone, and words of the message
    (WHERE["overlap"], [], "--preemption optimal: must be none with an extension"),
    (WHERE["async"], [], "--preemption optimal: must be none with an extension"),
    (["--sync-frac", "0"], [], "--sync-frac"),
    (["--rank-timeout", "0"], [], "--rank-timeout"),
    (["--device", "cuda:1"], [], "--device cuda:1: cannot be used"),
    (["--env-id", "Nowhere-v0"], [], "Nowhere"),
    (
        ["--env-id", "tests.envs:Count-v0"],
        ["--env-id", "tests.faulty_envs:Broken-v0"],
        "no licence",
    ),
    (["--resume", "nowhere"], [], "nowhere"),
    (TRACE, [], "trace: /nowhere/trace cannot be written"),
    ([], TRACE, "trace: /nowhere/trace.1 cannot be written"),
]


@pytest.mark.parametrize("args, args_1, words", REFUSED, ids=lambda value: " ".join(value))
def test_bad_options(tmp_path, on_two, args, args_1, words):
    """One line of one rank, also where only another one refuses; status 2 of all."""
    ranks = on_two(run_main, small(tmp_path, *args), args_1)
    assert [rank.status for rank in ranks] == [2, 2]
    line = ranks[0].printed.split("ver_multigpu.py: ")[1]
    assert words in line and line.count("\n") == 1 and ranks[1].printed == ""


def device_and_seed(rank, runs_dir):
    """Of a run where there is no GPU, by --device auto."""
    options = ver_multigpu.Options(env_id="CartPole-v1", num_workers=0, runs_dir=runs_dir)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: False)
        with contextlib.closing(ver_multigpu.RankRun(options)) as run:
            return run.options.device, run.options.seed


def test_device_of_every_rank(tmp_path, on_two):
    """Every rank knows the device that it has chosen, which simulators are told; `auto` says
    nothing. Only the seed differs."""
    (device, seed), (device_1, seed_1) = on_two(device_and_seed, str(tmp_path))
    assert device == device_1 == "cpu"
    assert (seed, seed_1) == (1, ver_ppo.derive_seed(ver_multigpu.SEED_OF_RANK, 1, 1))


def count_keys(rank, args):
    """After each update: how many keys the store has, and of which rollouts that are over it still
    has the counter; then the exit status."""
    found = []
    log = ver_multigpu.RankRun.log

    def counting_log(run, rollout, logs):
        log(run, rollout, logs)
        store = run.ranks.store
        over = range(run.version - (run.ranks.rank > 0))  # rank 0 deletes them
        kept = [number for number in over if store.check([run.ranks.counter(number)])]
        found.append((store.num_keys(), kept))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ver_multigpu.RankRun, "log", counting_log)
        status = ver_multigpu.main(args)
    return found, status


COUNTED = "--env-id CartPole-v1 --num-workers 0 --num-steps 4 --num-minibatches 1 --update-epochs 1"


@pytest.mark.parametrize("how", [OPTIMAL, THRESHOLD, NONE], ids=" ".join)
def test_store_does_not_grow(tmp_path, how):
    """A counter is deleted when its rollout is over. Otherwise a long run would fill the memory of
    torchrun's agent. Here with one rank."""
    args = small(tmp_path, *COUNTED.split(), "--total-timesteps", "640", *how)
    found, status = count_keys(0, args)
    assert status == 0 and len(found) >= 40
    assert len({count for count, _ in found}) == 1
    assert not any(kept for _, kept in found)


def test_store_of_two_ranks_does_not_grow(tmp_path, on_two):
    """As above. The other rank may have begun to count the next rollout, or rank 0 may still have
    to delete the counter of the last one."""
    args = small(tmp_path, *COUNTED.split(), "--total-timesteps", "640")
    for found, status in on_two(count_keys, args):
        counts = [count for count, _ in found]
        assert status == 0 and len(found) >= 20
        assert max(counts) <= min(counts) + 1
        assert not any(kept for _, kept in found)


def test_options_cannot_be_written(tmp_path, on_two):
    """If rank 0 cannot write options.json into a folder that it has locked already, all ranks
    refuse to begin, in one line. Then the folder is not locked any more."""
    line = "--env-id CartPole-v1 --num-workers 0 --preemption none --total-timesteps"
    assert ver_multigpu.main(small(tmp_path, *line.split(), "64")) == 0
    (folder,) = run_folders(tmp_path)
    (folder / "options.json").unlink()
    (folder / "options.json").mkdir()
    resume = ["--resume", str(folder), "--device", "cpu", "--total-timesteps", "192"]
    ranks = on_two(run_main, resume)
    assert [rank.status for rank in ranks] == [2, 2], ranks[0].printed
    _, said = ranks[0].printed.split("ver_multigpu.py: ")
    assert "cannot be written (Is a directory): choose another place" in said
    assert said.count("\n") == 1 and str(folder) in said and ranks[1].printed == ""
    assert ranks[0].said == ranks[1].said == ""
    (folder / "options.json").rmdir()
    assert [rank.status for rank in on_two(run_main, resume)] == [0, 0]
    assert saved(tmp_path)["step"] == 192 and (folder / "options.json").is_file()


def run_without_checkpoints(rank, args, stop_in):
    """run_main, where the disk is full when a checkpoint is written."""
    write = ver_ppo.write_file

    def full(path, write_to):
        if path.name == "checkpoint.pt":
            raise OSError(28, "No space left on device")
        write(path, write_to)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ver_ppo, "write_file", full)
        return run_main(rank, args, (), stop_in)


@pytest.mark.parametrize(
    "more, stop_in, step",
    [
        (["--checkpoint-interval", "256", *NONE], 0, 256),
        (["--total-timesteps", "384", *NONE], 0, 384),
        (NONE, 4, 512),
        (["--checkpoint-interval", "256", *OPTIMAL, "--num-workers", "2"], 0, None),
    ],
    ids=["now and then", "at the end", "after a signal", "with preemption"],
)
def test_checkpoint_cannot_be_written(tmp_path, on_two, more, stop_in, step):
    """A disk that is full on rank 0 ends all ranks, in one line, with exit status 1."""
    args = small(tmp_path, "--env-id", "CartPole-v1", "--num-workers", "0", *more)
    ranks = on_two(run_without_checkpoints, args, stop_in)
    assert [rank.status for rank in ranks] == [1, 1], ranks[0].printed
    (folder,) = run_folders(tmp_path)
    path = folder / "checkpoint.pt"
    (said,) = [line for line in ranks[0].printed.splitlines() if "ver_multigpu.py: " in line]
    assert f"cannot be written to {path}, the one before stays: " in said
    assert "No space left on device" in said and (step is None or f"of step {step} " in said)
    assert ranks[0].printed.count("cannot be written") == 1
    assert "Traceback" not in ranks[0].printed and ranks[1].printed == ""
    assert ranks[0].said == ranks[1].said == ""
    assert ranks[0].collectives == ranks[1].collectives and not path.exists()


def test_rules_of_ranks(monkeypatch, capsys):
    """What only many ranks forbid."""
    with pytest.raises(ver_ppo.UserError, match="is evaluated by ver_ppo.py"):
        ver_multigpu.Options(checkpoint="cuda")
    monkeypatch.setenv("RANK", "1")
    assert ver_multigpu.main(["--env-id", "CartPole-v1", "--device", "cpu"]) == 2
    assert "RANK is 1, and WORLD_SIZE 1: start with torchrun" in capsys.readouterr().err
    monkeypatch.delenv("RANK")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert ver_multigpu.main(["--env-id", "CartPole-v1", "--device", "cpu"]) == 2
    words = "WORLD_SIZE is set, but not RANK, MASTER_ADDR, MASTER_PORT: start with torchrun"
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("visible, own", [(8, 3), (1, 0), (0, 0)])
def test_own_gpu(monkeypatch, visible, own):
    """Of all GPUs of the machine the one with its number; or the only one that it can see."""
    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: visible)
    assert ver_multigpu.local_gpu() == own


@pytest.mark.parametrize("uuids, refused", [("abcd", False), ("abca", True)])
def test_no_gpu_twice(monkeypatch, uuids, refused):
    """Two ranks on one GPU are refused in all ranks."""
    device = torch.device("cuda:0")
    monkeypatch.setattr(ver_ppo, "choose_device", lambda options: device)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=uuids[0])
    )
    ranks = SimpleNamespace(
        rank=0, size=4, gather=lambda gpu: [gpu, *uuids[1:]], agree=lambda failure: None
    )
    with (
        pytest.raises(ver_ppo.UserError, match="4 ranks need 4 GPUs, and there are 3")
        if refused
        else contextlib.nullcontext()
    ):
        ver_multigpu.check_gpus(ranks, ver_multigpu.Options(device="cuda"))


def test_refusal_of_one_rank(tmp_path):
    """A device that rank 1 alone lacks is refused by all ranks, and said once."""
    port = free_port()
    args = ["ver_multigpu.py", *small(tmp_path, "--env-id", "CartPole-v1"), "--device"]
    processes = []
    try:
        for rank, device in enumerate(("cpu", "cuda:99")):
            processes.append(start([*args, device], **rank_environment(rank, 2, port)))
        said, said_1 = [process.communicate(timeout=60)[0] for process in processes]
        assert [process.returncode for process in processes] == [2, 2]
        assert "ver_multigpu.py: --device cuda:99: cannot be used (" in said
        assert len(said.splitlines()) == 1 and not said_1
        assert not list(tmp_path.iterdir())
    finally:
        stop([process.pid for process in processes])


def test_store_is_opened_once(monkeypatch):
    """A process that trains twice, as a member of a population does, cannot listen to a port
    twice."""
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    for name, value in {"WORLD_SIZE": "1", "RANK": "0", "MASTER_ADDR": "127.0.0.1"}.items():
        monkeypatch.setenv(name, value)
    first, second = ver_multigpu.open_store(20), ver_multigpu.open_store(20)
    first.set("key", "value")
    assert second.get("key") == b"value"


def test_failure_of_one_rank(tmp_path):
    """Out of memory, and an environment that is started again, in rank 1 alone: said once, the
    latter with its rank; rank 0 ends at once."""
    port = free_port()
    line = "--env-id tests.envs:Count-v0 --num-workers 0 --num-minibatches 4 --rank-timeout 60"
    args = ["ver_multigpu.py", *small(tmp_path, *line.split())]
    args_1 = "--env-id tests.faulty_envs:Faulty-raise-v0 --policy tests.envs:Greedy".split()
    processes = []
    try:
        for rank, more in enumerate(([], args_1)):
            processes.append(start([*args, *more], **rank_environment(rank, 2, port)))
        said, said_1 = [process.communicate(timeout=40)[0] for process in processes]
        assert [process.returncode for process in processes] == [1, 1]
        assert "rank 0: another rank has died" in said and "tried to allocate" not in said
        assert said_1.count("you tried to allocate") == 1
        assert said_1.count("rank 1: ") == said_1.count("rank 1: environment ") == 4
    finally:
        stop([process.pid for process in processes])


def test_signal_in_a_long_update(tmp_path):
    """All ranks leave an update that would take minutes before its next optimizer step, and
    save."""
    port = free_port()
    args = small(
        tmp_path, "--env-id", "CartPole-v1", "--num-workers", "0", "--update-epochs", "1000000"
    )
    processes = [
        start(["ver_multigpu.py", *args], **rank_environment(rank, 2, port)) for rank in range(2)
    ]
    try:
        wait_until(lambda: list(tmp_path.glob("*/options.json")))
        time.sleep(5)
        processes[1].terminate()
        texts = [process.communicate(timeout=25)[0] for process in processes]
        assert [process.returncode for process in processes] == [143, 143], texts
        assert saved(tmp_path)["step"] == 0 and saved(tmp_path)["optimizer"]["state"]
    finally:
        stop([process.pid for process in processes])


SLOW = "--env-id tests.envs:Count-v0 --num-workers 0 --checkpoint-interval 128 --rank-timeout 10"
SLOW = [*SLOW.split(), "--wrappers", LATENCY.format(10)]


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_dead_rank_ends_the_others(tmp_path, how):
    """A rank that is killed or stands still: the others end within --rank-timeout, with a
    message."""
    port, command = free_port(), ["ver_multigpu.py", *small(tmp_path, *SLOW)]
    processes = [start(command, **rank_environment(rank, 3, port)) for rank in range(3)]
    try:
        wait_until(lambda: list(tmp_path.glob("*/checkpoint.pt")))
        os.killpg(processes[1].pid, how)
        began = time.monotonic()
        for rank in (0, 2):
            text = processes[rank].communicate(timeout=40)[0]
            assert processes[rank].returncode == 1, text
            assert "another rank has died, or been silent for 10 s" in text, text
            assert "Traceback" not in text, text
        assert time.monotonic() - began < 25
    finally:
        stop([process.pid for process in processes])


def test_torchrun(tmp_path):
    """torchrun --max-restarts: after a rank was killed, all start again and go on from the last
    checkpoint, in the same folder. And when torchrun itself is killed, its ranks notice that its
    key-value store is gone, and end with all their workers."""
    agent = "-m torch.distributed.run --nproc-per-node 2 --max-restarts 1"
    agent = f"{agent} --master-port {free_port()}".split()
    process = start([*agent, "ver_multigpu.py", *small(tmp_path, *SLOW, "--num-workers", "2")])
    ranks = []
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    try:
        wait_until(lambda: list(tmp_path.glob("*/checkpoint.pt")))
        ranks += map(int, children.read_text().split())
        os.kill(ranks[1], signal.SIGKILL)
        wait_until(lambda: len(list(tmp_path.glob("*/events*"))) == 2)
        step = saved(tmp_path)["step"]
        wait_until(lambda: saved(tmp_path)["step"] > step)
        ranks += map(int, children.read_text().split())
        process.kill()
        wait_until(lambda: not any(map(alive_in_session, ranks)), 30)
        text = process.communicate(timeout=10)[0]
        assert len(set(ranks)) == 4 and "has died" in text and "Traceback" not in text, text
    finally:
        stop([process.pid, *ranks])


def test_starts_after_early_deaths():
    """Whoever died before all ranks were there, and whatever it left in the store: all ranks of the
    next start agree on a name that is new; and a rank that waits in vain says so."""
    store, names = torch.distributed.HashStore(), set()
    store.set_timeout(timedelta(seconds=20))
    for early in ([], [1], [2], [1, 2], [0], []):  # ranks that come alone, in a start before
        for rank in early:
            with pytest.raises(RuntimeError):
                store.set_timeout(timedelta(seconds=0.1))
                ver_multigpu.agree_on_start(store, rank, 3, 0.1)
            store.set_timeout(timedelta(seconds=20))
        with ThreadPoolExecutor(3) as pool:
            found = set(
                pool.map(
                    lambda rank: ver_multigpu.agree_on_start(store, rank, 3, 20),
                    np.random.permutation(3),
                )
            )
        assert len(found) == 1 and not found & names
        names |= found


EARLY_DEATH = """
import os, pathlib, sys, threading, time
folder, sys.path[0] = pathlib.Path(sys.argv.pop(1)), os.getcwd()
import ver_multigpu
open_store = ver_multigpu.open_store
def open_and_tell(timeout_sec):
    threading.Timer(3.0, (folder / "rank 0 is there").touch).start()
    return open_store(timeout_sec)
if os.environ["RANK"] == "0":
    ver_multigpu.open_store = open_and_tell
elif not (folder / "rank 1 has died").exists():
    while not (folder / "rank 0 is there").exists():
        time.sleep(0.05)
    (folder / "rank 1 has died").touch()
    os._exit(3)
sys.exit(ver_multigpu.main())
"""


def test_restart_after_an_early_death(tmp_path):
    """torchrun --max-restarts, and rank 1 dies before it has told anybody that it is there: the
    next start goes well."""
    (tmp_path / "early_death.py").write_text(EARLY_DEATH)
    agent = "-m torch.distributed.run --nproc-per-node 2 --max-restarts 1"
    agent = f"{agent} --master-port {free_port()}".split()
    args = "--env-id CartPole-v1 --num-workers 0 --total-timesteps 256 --rank-timeout 20".split()
    command = [
        *agent,
        str(tmp_path / "early_death.py"),
        str(tmp_path),
        *small(tmp_path / "runs", *args),
    ]
    process = start(command)
    try:
        text = process.communicate(timeout=80)[0]
        assert process.returncode == 0 and saved(tmp_path / "runs")["step"] == 256, text
    finally:
        stop([process.pid])


def test_a_restart_only_resumes(tmp_path, monkeypatch):
    """What torchrun's next start appends takes precedence over what began the run: another run that
    was resumed, or the weights of one."""
    line = "--env-id CartPole-v1 --num-workers 0 --preemption none --total-timesteps 64"
    args = small(tmp_path, *line.split())
    assert ver_multigpu.main(args) == 0
    (folder,), store = run_folders(tmp_path), torch.distributed.HashStore()
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setattr(ver_multigpu, "open_store", lambda timeout_sec: store)
    assert ver_multigpu.interrupted_run() == []
    store.set(ver_multigpu.FOLDER_KEY, str(folder))
    began = [*args, "--resume", str(tmp_path / "another"), *ver_multigpu.interrupted_run()]
    assert ver_ppo.parse_options(began, ver_multigpu.Options).resume == str(folder)
    before = saved(tmp_path)["policy"]
    transfer = f"transfer(file={folder / 'checkpoint.pt'}, reset=policy)"
    assert ver_multigpu.main([*args, "--extensions", transfer]) == 0
    assert same(saved(tmp_path)["policy"], before) and run_folders(tmp_path) == [folder]


def test_cores_are_shared(monkeypatch):
    """Ranks on one machine divide its cores."""
    cores = ver_ppo.count_cores()
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert ver_ppo.count_cores() == max(1, cores // 2)
    busy = ver_ppo.EnvSpec(SPEC.observations, SPEC.action, (), step_sec=0.01, cpu_sec=0.01)
    workers, _ = ver_ppo.count_workers(ver_multigpu.Options(num_envs=64), busy)
    assert workers == max(1, cores // 2)
