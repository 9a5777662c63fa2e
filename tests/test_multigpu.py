"""Many ranks on the CPU: one rank is ver_ppo.py, two ranks learn as one; preemption; what ends all
ranks."""

import contextlib
import functools
import io
import os
import shutil
import signal
import time
import weakref
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from datetime import timedelta
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import distributed as dist
from torch.nn.utils import parameters_to_vector

import ver_multigpu
import ver_ppo
from notebooks.extensions.check import check_rollout
from notebooks.extensions.virtual_clock import SPEC, VirtualWorkers, build
from notebooks.extensions.virtual_ranks import simulate
from tests.helpers import (
    CHECKED,
    WHERE,
    alive_in_session,
    differences,
    free_port,
    in_new_process,
    logged,
    one_line,
    rank_environment,
    run_folders,
    saved,
    small,
    start,
    stop,
    wait_until,
)

HERE = "--env-id CartPole-v1 --num-workers 0".split()
TWO_UPDATES = ["--total-timesteps", "256"]
OPTIMAL, THRESHOLD, NONE = (["--preemption", how] for how in ("optimal", "threshold", "none"))
LATENCY = "latency(mean_ms={}, spread=0)"

# ----------------------------------------------------------------------------------- Two processes


def begin_rank(rank, port, path):
    """Make this process a rank, as torchrun does. Its stderr goes to a file, with that of the
    processes that it starts."""
    with open(path, "ab") as file:
        os.dup2(file.fileno(), 2)
    os.environ.update(rank_environment(rank, 2, port), TORCHELASTIC_USE_AGENT_STORE="True")
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def on_two(tmp_path_factory):
    """on_two(function, *args): the results of function(rank, *args) in two processes.

    All tests share the processes and their key-value store. So every training sees the keys of the
    trainings before it, as after a restart by torchrun."""
    folder = tmp_path_factory.mktemp("stderr")
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with contextlib.ExitStack() as stack:
        pools = []
        for rank in range(2):
            how = {"mp_context": get_context("spawn"), "initializer": begin_rank}
            pool = ProcessPoolExecutor(1, **how, initargs=(rank, store.port, folder / str(rank)))
            pools.append(stack.enter_context(pool))

        def call(function, *args):
            calls = [pool.submit(function, rank, *args) for rank, pool in enumerate(pools)]
            return [each.result(300) for each in calls]

        yield call


def around(patch, owner, name, wrapper):
    """Let wrapper(own, *args) take the place of a function, own(*args)."""
    own = getattr(owner, name)
    patch.setattr(owner, name, lambda *args: wrapper(own, *args))


class Watcher:
    """Watches a training in one of two ranks, and sends signals to it.

    status, error   the exit status of main, or the exception that it has raised
    printed, said   the output of main, and the stderr of all processes of this rank
    seeds           all seeds that were made, except those of the trial
    collectives     the names of the collective operations, in order
    rows, limits    the steps of the last rollout, and the limit of each
    updates         for each update, its rows, and the weights after each step of the optimizer

    `signals` is a list of (rank, place, k, signal): this rank gets the signal while it is
    collecting or learning (place), after k updates.
    """

    def __init__(self, rank, signals):
        self.rank = rank
        self.signals = signals
        self.status = None
        self.error = None
        self.seeds = set()
        self.collectives = []
        self.limits = []
        self.updates = []

    def install(self, patch):
        """Watch the functions of a training."""
        around(patch, ver_ppo, "derive_seed", self.derive_seed)
        around(patch, ver_ppo, "minibatch_step", self.minibatch_step)
        around(patch, ver_ppo, "ppo_update", self.ppo_update)
        around(patch, ver_multigpu.RankRun, "collect", self.collect)
        around(patch, ver_multigpu.RankRun, "enough", self.enough)
        for name in ("average", "broadcast", "gather"):
            collective = functools.partial(self.collective, name)
            around(patch, ver_multigpu.Ranks, name, collective)

    def pass_by(self, place, updates):
        """Send the signals of this moment."""
        for rank, where, after, number in self.signals:
            if (rank, where, after) == (self.rank, place, updates):
                os.kill(os.getpid(), number)

    def derive_seed(self, own, *numbers):
        seed = own(*numbers)
        if numbers[0] != ver_multigpu.SEED_OF_RANK:
            self.seeds.add(seed)
        return seed

    def collective(self, name, own, *args):
        self.collectives.append(name)
        return own(*args)

    def enough(self, own, run, rows):
        self.pass_by("collecting", len(self.updates))
        return own(run, rows)

    def collect(self, own, run):
        self.limits.append(run.limit)
        try:
            return own(run)
        finally:
            self.rows = run.rollout.rows

    def minibatch_step(self, own, policy, optimizer, batch, *more):
        logs = own(policy, optimizer, batch, *more)
        newest = self.updates[-1]
        newest["learned"] += batch["row"].tolist()
        newest["weights"].append(parameters_to_vector(policy.parameters()).tolist())
        self.pass_by("learning", len(self.updates) - 1)
        return logs

    def ppo_update(self, own, policy, optimizer, rollout, *more):
        fresh = rollout.complete[rollout.rows - self.rows :]
        steps_N = np.bincount(fresh["env"], minlength=rollout.num_envs)
        newest = {"fresh": len(fresh), "learned": [], "weights": []}
        newest["stale"] = sum(rollout["segment"] >= rollout.num_envs)
        newest["different"] = len(set(zip(rollout["env"], rollout["sent_at"])))
        newest["min"] = min(steps_N)
        newest["max"] = max(steps_N)
        self.updates.append(newest)
        return own(policy, optimizer, rollout, *more)


def run_main(rank, args, args_1=(), signals=(), write=ver_ppo.write_checkpoint):
    """Call ver_multigpu.main in one of two ranks. Returns the Watcher. Rank 1 gets more arguments,
    `args_1`. The function `write` takes the place of ver_ppo.write_checkpoint."""
    watcher = Watcher(rank, signals)
    printed = io.StringIO()
    stderr = Path("/proc/self/fd/2")
    before = stderr.stat().st_size
    with (
        pytest.MonkeyPatch.context() as patch,
        contextlib.redirect_stdout(printed),
        contextlib.redirect_stderr(printed),
    ):
        watcher.install(patch)
        patch.setattr(ver_ppo, "write_checkpoint", write)
        try:
            watcher.status = ver_multigpu.main(["--rank-timeout", "60", *args, *args_1 * rank])
        except Exception as error:
            watcher.error = str(error)
    watcher.printed = printed.getvalue()
    watcher.said = stderr.read_bytes()[before:].decode()
    return watcher


def message(rank):
    """The message with which a rank has ended."""
    return rank.printed.partition("ver_multigpu.py: ")[2]


def checkpoint(tmp_path):
    """The content of the only checkpoint in this folder."""
    (folder,) = run_folders(tmp_path)
    return saved(folder)


@contextlib.contextmanager
def rank_run(tmp_path, **options):
    """A RankRun of one rank."""
    defaults = {"env_id": "CartPole-v1", "num_workers": 0, "device": "cpu", "rank_timeout": 60.0}
    options = ver_multigpu.Options(**defaults | options, runs_dir=str(tmp_path))
    try:
        with contextlib.closing(ver_multigpu.RankRun(options)) as run:
            yield run
    finally:
        ver_multigpu.leave_group()


# ----------------------------------------------------------------------------- One rank, many ranks


@pytest.mark.parametrize("how, more", [(OPTIMAL, []), (NONE, ["--no-norm-adv"])])
def test_one_rank_is_ver_ppo(tmp_path, how, more):
    """With one rank everything is as in ver_ppo.py, bit for bit."""
    args = [*HERE, "--total-timesteps", "640", *more]
    assert ver_multigpu.main(small(tmp_path / "many", *args, *how)) == 0
    assert ver_ppo.main(small(tmp_path / "one", *args)) == 0
    assert differences(checkpoint(tmp_path / "one"), checkpoint(tmp_path / "many")) == []


def test_ranks_part_before_evaluating(tmp_path, monkeypatch):
    """Rank 0 may evaluate for longer than the others would wait."""
    together = []
    evaluate = lambda run: together.append(dist.is_initialized())
    monkeypatch.setattr(ver_ppo.Run, "evaluate", evaluate)
    assert ver_multigpu.main(small(tmp_path, *HERE, "--total-timesteps", "64")) == 0
    assert together == [False]


def group_outlives():
    """Whether a process group still exists after `leave_group`. Call this in a new process, where
    no optimizer has been made yet."""
    ver_multigpu.Ranks(60)
    group = weakref.ref(dist.group.WORLD)
    torch.optim.Adam([torch.nn.Parameter(torch.ones(1))])
    assert group() is not None
    ver_multigpu.leave_group()
    return group() is not None


def test_leaving_the_group():
    """Then nothing in Python refers to the process group, so its threads end."""
    assert not in_new_process(group_outlives)


def rollout_of(seed):
    """A rollout of one rank, its policy (the same for every seed), and options."""
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
    """The weights after one step of gradient descent, and the logs."""
    optimizer = torch.optim.SGD(policy.parameters(), lr=1.0)
    logs = ver_ppo.ppo_update(policy, optimizer, rollout, options, *average)
    return parameters_to_vector(policy.parameters()).detach(), logs


def learn_half(rank):
    try:
        return step_weights(*rollout_of(seed=rank + 1), ver_multigpu.Ranks(60).average)
    finally:
        ver_multigpu.leave_group()


def test_halves_are_the_whole(on_two):
    """Two ranks with a rollout each take the step that one process takes with both rollouts. This
    holds for gradients, for clipping, and for the statistics that normalize advantages."""
    (weights, logs), (other_weights, other_logs) = on_two(learn_half)
    assert torch.equal(weights, other_weights)
    policy, one, options = rollout_of(seed=1)
    _, two, _ = rollout_of(seed=2)
    size = 2 * one.capacity, 2 * one.num_envs
    whole = ver_ppo.Rollout(SPEC, *size, policy.state_shape)
    whole.records[:] = np.concatenate([one.records, two.records])
    whole.rows = whole.capacity
    whole["segment"][one.capacity :] += one.num_envs
    before = parameters_to_vector(policy.parameters()).detach().clone()
    expected, whole_logs = step_weights(policy, whole, options)
    torch.testing.assert_close(weights, expected, rtol=1e-5, atol=1e-6)
    assert (expected - before).abs().max() > 1e-3
    assert whole_logs["losses/grad_norm"] == pytest.approx(logs["losses/grad_norm"], rel=1e-4)
    mean_loss = (logs["losses/value_loss"] + other_logs["losses/value_loss"]) / 2
    assert whole_logs["losses/value_loss"] == pytest.approx(mean_loss, rel=1e-4)


def note_buffers(rank, args):
    """The means of a batch normalization when each update has learned, and after the update."""
    learned = []
    agreed = []
    statistics = ver_ppo.update_statistics
    update = ver_multigpu.RankRun.update

    def watching_statistics(policy, *more):
        statistics(policy, *more)
        learned.append(policy.normalize.running_mean.tolist())

    def watching_update(run, rollout):
        logs = update(run, rollout)
        agreed.append(run.policy.normalize.running_mean.tolist())
        return logs

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ver_ppo, "update_statistics", watching_statistics)
        patch.setattr(ver_multigpu.RankRun, "update", watching_update)
        status = ver_multigpu.main(["--rank-timeout", "60", *args])
    return status, learned, agreed


def test_a_weight_that_one_rank_does_not_use(tmp_path, on_two):
    """Its gradient is 0 there, so all ranks average the same tensors and learn the same."""
    ranks = on_two(run_main, small(tmp_path, *HERE, "--policy", "tests.envs:Uneven", *TWO_UPDATES))
    assert [rank.status for rank in ranks] == [0, 0], [rank.error for rank in ranks]
    assert ranks[0].updates[-1]["weights"] == ranks[1].updates[-1]["weights"]
    assert not checkpoint(tmp_path)["policy"]["extra"].equal(torch.ones(3))


def test_an_extension_that_only_starts_something(tmp_path, on_two):
    """It goes with preemption: the collector is the usual one."""
    args = small(tmp_path, *HERE, *OPTIMAL, *TWO_UPDATES, "--extensions", "tests.envs:Starts")
    assert [rank.status for rank in on_two(run_main, args)] == [0, 0]


def test_world_size_without_rank(tmp_path, capsys, monkeypatch):
    """As left over from another program: one line."""
    monkeypatch.setenv("WORLD_SIZE", "1")
    one_line(capsys, small(tmp_path, *HERE), "RANK expected", ver_multigpu.main)


RANKS = {  # torchrun's variables, and the reason of the refusal
    "RANK=5 WORLD_SIZE=2": "RANK 5 is not below WORLD_SIZE",
    "RANK=0 WORLD_SIZE=two": "invalid literal",
    "RANK=1 WORLD_SIZE=2 MASTER_ADDR=nosuchhost.invalid": "nosuchhost.invalid",
}


@pytest.mark.parametrize("variables", RANKS)
def test_wrong_ranks(tmp_path, capsys, monkeypatch, variables):
    """By hand, without torchrun: one line, after --rank-timeout at most."""
    here = f"MASTER_ADDR=127.0.0.1 MASTER_PORT={free_port()} {variables}"
    for variable in here.split():
        monkeypatch.setenv(*variable.split("="))
    store = ver_multigpu.dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), None, True)
    args = small(tmp_path, *HERE, "--rank-timeout", "2")
    one_line(capsys, args, RANKS[variables], ver_multigpu.main)
    del store


def test_checkpoints_of_many_ranks(tmp_path, monkeypatch):
    """--checkpoint-interval counts the steps of one rank, so they do not become more frequent."""
    with rank_run(tmp_path, num_envs=2, num_steps=8, checkpoint_interval=64) as run:
        run.step = 10**6  # of many ranks
        due = []
        for run.version in range(1, 13):
            due.append(run.is_due_every(run.options.checkpoint_interval))
    assert [k for k, each in enumerate(due, 1) if each] == [4, 8, 12]


def test_buffers_are_those_of_rank_0(tmp_path, on_two):
    """Averaged gradients alone would leave the ranks with different buffers. After each update, all
    have those of rank 0."""
    args = [*HERE, "--total-timesteps", "640", "--policy", "tests.envs:Normed"]
    found = on_two(note_buffers, small(tmp_path, *args))
    (status, learned, agreed), (status_1, learned_1, agreed_1) = found
    assert status == status_1 == 0
    assert len(agreed) >= 5
    assert agreed == agreed_1 == learned
    assert all(one != two for one, two in zip(learned, learned_1)), "they learn from other steps"
    assert checkpoint(tmp_path)["policy"]["normalize.running_mean"].tolist() == agreed[-1]


def begin(rank, runs_dir):
    """A run whose policy began in another way on each rank: its weights and buffers, its device and
    its seed."""
    own = ver_ppo.make_policy

    def make_policy(*args):
        policy = own(*args)
        for tensor in policy.state_dict().values():
            tensor += rank + 1
        return policy

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ver_ppo, "make_policy", make_policy)
        patch.setattr(torch.cuda, "is_available", lambda: False)
        with rank_run(runs_dir, device="auto") as run:
            state = {name: tensor.numpy() for name, tensor in run.policy.state_dict().items()}
            return state, run.options.device, run.options.seed


def test_how_ranks_begin(tmp_path, on_two):
    """All begin with the weights of rank 0, because averaged gradients keep weights equal only if
    they are equal at first. Every rank knows its device; only the seeds differ."""
    (state, device, seed), (state_1, device_1, seed_1) = on_two(begin, tmp_path)
    assert all((state[name] == state_1[name]).all() for name in state)
    assert state["log_ent_coef"] == pytest.approx(np.log(5e-3) + 1)
    assert device == device_1 == "cpu"
    assert (seed, seed_1) == (1, ver_ppo.derive_seed(ver_multigpu.SEED_OF_RANK, 1, 1))


MODES = [
    [*OPTIMAL, *CHECKED["here"]],
    [*OPTIMAL, *CHECKED["here"], "--sampler", "nover"],
    [*THRESHOLD, *CHECKED["here"], "--sampler", "sync", "--sync-frac", "0.5"],
    [*NONE, *CHECKED["here"]],
    [*NONE, *CHECKED["overlap"]],
    [*NONE, *CHECKED["async"]],
]


@pytest.mark.parametrize("more", MODES, ids=" ".join)
def test_preempted_rank(tmp_path, on_two, more):
    """One rank is many times as slow as the other. In every mode, both learn from exactly S steps,
    call the same collectives, and have the same weights after every update. A preempted rank fills
    up with stale steps."""
    preempts = NONE[1] not in more
    line = "--env-id tests.envs:Count-v0 --num-workers 2 --total-timesteps 800 --wrappers"
    args = small(tmp_path, *more, *line.split(), LATENCY.format(1))
    fast, slow = on_two(run_main, args, ["--wrappers", LATENCY.format(60 if preempts else 5)])
    assert fast.status == slow.status == 0, fast.printed
    assert fast.collectives == slow.collectives
    assert {"average", "broadcast", "gather"} == set(fast.collectives)
    assert len(fast.updates) == len(slow.updates) > 5
    pairs = list(zip(fast.updates, slow.updates))
    updates = fast.updates + slow.updates
    for one, other in pairs:
        assert one["weights"] == other["weights"]
    for update in updates:
        assert sorted(update["learned"]) == sorted(2 * list(range(64))), "two epochs"
        assert update["different"] == 64
        assert update["stale"] == 64 - update["fresh"]
    assert len({tuple(update["weights"][-1]) for update in fast.updates}) == len(fast.updates)
    first = fast.updates[0]["stale"], slow.updates[0]["stale"]
    assert first == (0, 0), "there is nothing to fill up with yet"
    assert any(update["stale"] for update in slow.updates) == preempts
    if OPTIMAL[1] in more:
        # in the first rollout, environments start: its times are not those of steps
        assert fast.limits[:2] == [ver_multigpu.NO_LIMIT] * 2
        assert fast.limits == slow.limits
        assert max(fast.limits[2:]) <= 128
    if THRESHOLD[1] in more:
        assert all(update["fresh"] >= 16 for update in slow.updates), "a quarter"
    steps = sum(update["fresh"] for update in updates)
    assert checkpoint(tmp_path)["step"] == steps, "only new steps count"
    expected = {
        "ver/steps_per_env_min": [min(one["min"], other["min"]) for one, other in pairs],
        "ver/steps_per_env_max": [max(one["max"], other["max"]) for one, other in pairs],
    }
    if preempts:
        shares = [(one["stale"] + other["stale"]) / 128 for one, other in pairs]
        expected["ranks/stale_share"] = shares
    (folder,) = run_folders(tmp_path)
    for tag, values in expected.items():
        assert list(logged(folder, tag).values()) == values, tag


# -------------------------------------------------------------------- Collectives, one of two ranks


@pytest.mark.quick
def test_average_and_agree(monkeypatch):
    """An average is the mean over all ranks. Of several failures, all ranks raise the first."""
    ranks = object.__new__(ver_multigpu.Ranks)
    ranks.size = 2
    monkeypatch.setattr(dist, "all_reduce", lambda flat: flat.add_(torch.arange(5.0)))
    tensors = [torch.ones(2, 2), torch.full((1,), 3.0)]
    ranks.average(tensors)
    assert [tensor.tolist() for tensor in tensors] == [[[0.5, 1.0], [1.5, 2.0]], [3.5]]
    ranks.gather = lambda failure: [None, OSError("of rank 1"), OSError("of rank 2")]
    with pytest.raises(OSError, match="of rank 1"):
        ranks.agree(None)


@pytest.mark.quick
def test_signal_to_another_rank(tmp_path):
    """Its gradients say so, and this rank leaves the update with them."""
    with rank_run(tmp_path) as run:
        run.average([torch.ones(2)])  # no rank got one
        run.ranks.average = lambda tensors: tensors[-1].fill_(0.5)
        with pytest.raises(ver_ppo.Interrupted) as caught:
            run.average([torch.ones(2)])
    assert caught.value.args == (signal.SIGTERM,)


# --------------------------------------------------------------------------------------- Preemption


def brute_force(step_sec_RN, num_steps, variable, learning_sec):
    """The largest S / (Time(S) + LT) over all S, and Time(S). Time(S) is found by bisection over
    the number of steps that are complete at a time."""
    num_ranks, num_envs = step_sec_RN.shape
    steps_S = np.arange(1, num_ranks * num_envs * num_steps + 1)
    low_S = np.zeros(len(steps_S))
    high_S = np.full(len(steps_S), 2 * num_steps * num_envs * step_sec_RN.max())
    for _ in range(60):
        middle_S = (low_S + high_S) / 2
        given_SRN = middle_S[:, None, None] / step_sec_RN
        most = num_steps
        if variable:
            given_SRN = given_SRN.sum(axis=2, keepdims=True)
            most = num_steps * num_envs
        enough = np.minimum(most, given_SRN).sum((1, 2)) >= steps_S - 1e-9
        low_S = np.where(enough, low_S, middle_S)
        high_S = np.where(enough, middle_S, high_S)
    values = steps_S / (high_S + learning_sec)
    return values.max(), dict(zip(steps_S.tolist(), high_S))


@pytest.mark.quick
def test_optimal_preemption():
    """Equation 1 against a search over every S, for random step times and learning times."""
    rng = np.random.default_rng(0)
    preempted = 0
    for _ in range(500):
        num_ranks = rng.integers(1, 6)
        num_envs = rng.integers(1, 5)
        num_steps = rng.integers(1, 13)
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
    assert 150 < preempted < 500
    even = np.full((4, 3), 0.05)
    assert ver_multigpu.optimal_preemption(even, 8, True, 1.0) == (96, pytest.approx(0.4))


@pytest.mark.quick
@pytest.mark.parametrize("sampler", ["ver", "nover"])
def test_preemption_in_hindsight(sampler):
    """Under a virtual clock, where a step can take many times as long as another. The decision is
    made by the step times of the last rollout. It comes close to the best S, which is known only
    afterwards, and is much better than waiting for all ranks."""
    rates = {}
    for how in ("optimal", "threshold", "none"):
        rates[how] = simulate(16, 4, 64, sampler, how, rollouts=60, seed=1)
    optimal = rates["optimal"]
    assert 0.93 * optimal["hindsight"] < optimal["rate"] <= optimal["hindsight"]
    assert optimal["rate"] > 1.15 * rates["none"]["rate"]
    assert all(one["rate"] <= one["hindsight"] for one in rates.values())


@pytest.mark.quick
def test_step_seconds():
    """By hand. The time counts until an environment has given its 4 steps, or until the rollout
    ends. It is at least the sum of the simulator's own step times. If an environment gave no step,
    its seconds per step are the rollout's length, or the last known value if that is larger."""
    rollout = ver_ppo.Rollout(SPEC, 12, 3, (2, 8))
    rollout.rows = 7
    rollout.started_at = 100.0
    rollout.ended_at = 110.0
    # the last five are of the rollout before
    rollout["env"][:] = [0, 1, 0, 0, 1, 0, 1, 2, 2, 2, 2, 2]
    rollout["began_at"][:7] = [100, 101, 102, 104, 103, 106, 107]
    rollout["step_sec"][:7] = [1, 1, 1, 1, 1, 2, 1]
    found = ver_multigpu.step_seconds(rollout, 4, np.zeros(3)).tolist()
    assert found == pytest.approx([8 / 4, 10 / 3, 10])
    rollout["step_sec"][:7] = [1, 1, 1, 1, 1, 2, 12]
    found = ver_multigpu.step_seconds(rollout, 4, np.full(3, 30.0)).tolist()
    assert found == pytest.approx([8 / 4, 14 / 3, 30])


@pytest.mark.quick
def test_recent_episodes_are_those_of_all_ranks(tmp_path, monkeypatch):
    """The last 100 episodes of an update come from all ranks, in proportion to how many each has
    finished."""
    monkeypatch.setattr(ver_multigpu.RankRun, "decide", lambda *_: (ver_multigpu.NO_LIMIT, 0.0))
    with rank_run(tmp_path, num_envs=2, num_steps=2, num_minibatches=1) as run:
        run.ranks.gather = lambda own: [
            (4, {**own[1]}, [[float(rank), 1.0 + k] for k in range(count)], own[3])
            for rank, count in enumerate((300, 100, 0, 1))
        ]
        rollout = ver_ppo.Rollout(run.spec, 4, 2, run.policy.state_shape)
        rollout.rows = 4
        logs = {"time/rollout_sec": 1.0, "time/learning_sec": 1.0}
        _, _, episodes = run.combine(rollout, logs)
    assert len(episodes) == 401
    for rank, count in enumerate((300, 100, 0, 1)):  # the order of each rank stays
        own = [length for found, length in episodes if found == rank]
        assert own == [1.0 + k for k in range(count)]
    recent = [rank for rank, _ in episodes[-100:]]
    assert [recent.count(rank) for rank in range(4)] == [75, 25, 0, 0]
    run.ranks.gather = lambda own: [(4, own[1], [[-float(k), 1.0]], own[3]) for k in range(200)]
    with rank_run(tmp_path / "many", num_envs=2, num_steps=2, num_minibatches=1) as many:
        many.ranks.gather = run.ranks.gather
        _, _, episodes = many.combine(rollout, logs)
    assert [-found for found, _ in episodes] == list(range(200))  # not by their returns


@pytest.mark.quick
def test_reduce_logs():
    """Of the smallest values the smallest, of the largest the largest, of all others the mean."""
    one = {"ver/steps_per_env_min": 2, "ver/policy_lag_max": 1, "losses/entropy": 0.5}
    two = {"ver/steps_per_env_min": 1, "ver/policy_lag_max": 4, "losses/entropy": 1.5}
    expected = {"ver/steps_per_env_min": 1, "ver/policy_lag_max": 4, "losses/entropy": 1.0}
    assert ver_multigpu.reduce_logs([one, two]) == expected


@pytest.mark.quick
@pytest.mark.parametrize("sampler", ["ver", "nover", "sync"])
def test_what_decides(tmp_path, monkeypatch, sampler):
    """All ranks decide by the step times of all, the mean learning time, and whether rollouts are
    variable. Steps and episodes are those of all ranks."""
    asked = []
    preemption = lambda *args: asked.append(args) or (5, 7.0)
    monkeypatch.setattr(ver_multigpu, "optimal_preemption", preemption)
    sizes = {"num_envs": 3, "num_steps": 2, "num_minibatches": 1}
    with rank_run(tmp_path, env_id="tests.envs:Count-v0", sampler=sampler, **sizes) as run:
        rollout = ver_ppo.Rollout(run.spec, 6, 3, run.policy.state_shape)
        rollout.rows = 5
        rollout.started_at = 100.0
        rollout.ended_at = 110.0
        rollout["env"][:] = [0, 0, 1, 1, 2, 9]
        rollout["began_at"][:] = [101, 103, 102, 106, 104, 0]
        rollout["step_sec"][:] = 1.0
        rollout["done"][3:5] = True
        rollout["lost"][3] = True  # this episode has no end, so it does not count
        rollout["episode_stats"][4] = [8.0, 4.0]
        own = {"time/learning_sec": 1.0, "time/rollout_sec": 10.0, "ver/steps_per_env_min": 1}
        other = {"time/learning_sec": 3.0, "time/rollout_sec": 40.0, "ver/steps_per_env_min": 0}
        other_sec_N = np.array([1.0, 2.0, 4.0])
        run.ranks.gather = lambda mine: [mine, (6, other, [[9.0, 5.0]], other_sec_N)]
        run.ranks.size = 2
        run.step = 1  # not the first rollout, which decides nothing
        steps, logs, episodes = run.combine(rollout, own)
        assert (steps, episodes) == (11, [[8.0, 4.0], [9.0, 5.0]])
        assert logs["ver/steps_per_env_min"] == 0
        assert logs["ranks/rollout_sec"] == 40.0
        assert logs["ranks/stale_share"] == pytest.approx(1 / 12)
        assert (run.limit, run.predicted_sec) == (5, 7.0)
    ((step_sec_RN, num_steps, variable, learning_sec),) = asked
    # with a quota of 2, environments 0 and 1 are done after 4 and 7 s; without, nobody is
    own_sec_N = [5.0, 5.0, 10.0] if sampler == "ver" else [2.0, 3.5, 10.0]
    assert step_sec_RN.tolist() == [own_sec_N, other_sec_N.tolist()]
    assert (num_steps, variable, learning_sec) == (2, sampler == "ver", 2.0)


@pytest.mark.quick
def test_one_rank_is_not_preempted(tmp_path):
    """Nobody waits for it, however slow it is."""
    with rank_run(tmp_path) as run:
        run.step = 1
        assert run.decide(np.ones((1, 32)), 1.0) == (ver_multigpu.NO_LIMIT, 0.0)


@pytest.mark.quick
def test_first_rollout_predicts_nothing(tmp_path):
    """Its times include the start of the environments. Those of the second rollout predict."""
    with rank_run(tmp_path) as run:
        run.ranks.size = 2
        step_sec_RN = np.array([[0.01] * 32, [1.0] * 32])
        assert run.decide(step_sec_RN, 1.0) == (ver_multigpu.NO_LIMIT, 0.0)
        run.step = 1
        assert run.decide(step_sec_RN, 1.0) == (4136, pytest.approx(1.28))


@pytest.mark.quick
def test_threshold_preemption():
    """60 % of the ranks, rounded up; never none."""
    assert [ver_multigpu.threshold_preemption(n, 0.6) for n in (1, 2, 5, 8, 10)] == [1, 2, 3, 5, 6]
    assert ver_multigpu.threshold_preemption(4, 1.0) == 4


LIMITS = [
    # threshold: one rank is done, but this one continues until it has a quarter of its steps
    ("threshold", 1, 0.0, 1, [0, 2, 3], 4),
    # optimal: with 5 steps of this rank, all ranks together have 12
    ("optimal", 12, 0.0, 7, [0, 2, 4], 5),
    # the rollout takes too long, but it has no step yet
    ("optimal", 12, 1e-6, 0, [0], 1),
    # there is no limit, but another rank cannot continue
    ("none", ver_multigpu.NO_LIMIT, 0.0, 0, [0, 4], 0),
]


@pytest.mark.quick
@pytest.mark.parametrize("how, limit, predicted_sec, others, too_few, rows", LIMITS)
def test_enough(tmp_path, monkeypatch, how, limit, predicted_sec, others, too_few, rows):
    """When a rollout ends early. The other ranks have added `others` to the counter."""

    def asking(run):
        run.ranks.store.add("rollout 0", others)
        for few in too_few:
            time.sleep(run.look_sec)
            assert not run.look(few)
        if how == "none":
            run.ranks.store.add("rollout 0", ver_multigpu.STOP)
        time.sleep(run.look_sec)
        assert run.look(rows)
        return SimpleNamespace(rows=rows)

    monkeypatch.setattr(ver_ppo.Run, "collect", asking)
    with rank_run(tmp_path, num_envs=2, num_steps=8, preemption=how) as run:
        run.limit = limit
        run.predicted_sec = predicted_sec
        run.counted = 3  # in the rollout before
        run.collect()
        own = rows if how == "optimal" else 1  # all its steps, or that it is done
        expected = others + own + (how == "none") * ver_multigpu.STOP
        assert run.ranks.store.add("rollout 0", 0) == expected


@pytest.mark.quick
def test_waiting_is_not_learning(tmp_path, monkeypatch):
    """The learning time begins when all ranks have collected. It decides when rollouts end."""
    agreed_at = []
    monkeypatch.setattr(ver_ppo.Run, "collect", lambda run: SimpleNamespace(rows=1))
    with rank_run(tmp_path) as run:
        run.ranks.agree = lambda failure: agreed_at.append(time.perf_counter())
        run.collect()
        assert run.learning_at >= agreed_at[0]


def content(rollout, step):
    """All that is known of a step, except its segment."""
    columns = [rollout[name] for name in rollout.dtype.names if name != "segment"]
    return [column[step].tobytes() for column in columns]


@pytest.mark.quick
def test_fill_up(tmp_path, monkeypatch):
    """Whenever rollouts end, the rank learns from exactly S steps: all the new ones, and the newest
    of those that it learned from before. These keep their contents, advantages and returns. All are
    in time order, and no sequence joins old steps to new ones."""
    rng = np.random.default_rng(3)
    all_steps = []
    known = {}
    ending = lambda e, step: "terminated" if step % 11 == 10 else None
    workers = VirtualWorkers(3, lambda e, step: [1.0, 1.7, 4.1][e] * rng.uniform(0.5, 2), ending)
    policy, rollout, c = build(workers, 3, 16)
    monkeypatch.setattr(ver_ppo, "build", lambda options: (SPEC, policy))
    with rank_run(tmp_path, num_envs=3, num_steps=16) as run:
        for update in range(40):
            goal = 48 if update == 0 else int(rng.integers(1, 50))
            c.enough = lambda rows: rows >= goal
            c.collect(rollout)
            fresh = rollout.rows
            c.version = update + 1
            assert min(goal, 48) <= fresh <= 48
            check_rollout(rollout, update)
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
    """Check all that a rank learns from. `all_steps` are the steps that it has collected before.
    `known` has the contents of the steps that it has learned from; new ones are added. Returns the
    fresh steps."""
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
        assert len(set(learned["env"][sequence])) == 1
        assert len(set(sequence >= stale)) == 1
        assert (np.diff([steps[index][1] for index in sequence]) == 1).all()
    known |= {step: content(learned, index) for index, step in enumerate(steps)}
    return steps[stale:]


# ------------------------------------------------------------------------------ What ends all ranks


def test_stop_and_resume(tmp_path, on_two):
    """A signal to one rank ends all, with one checkpoint. Any number of ranks can continue from it.
    If two ranks continue twice, they come to the same weights. No two environments or learners of
    the ranks have a seed in common."""
    args = [*HERE, *NONE, "--total-timesteps", "896"]
    stopped = [(1, "collecting", 5, signal.SIGTERM)]
    ranks = on_two(run_main, small(tmp_path / "first", *args), [], stopped)
    assert [rank.status for rank in ranks] == [143, 143]
    assert "step 640; time:" in ranks[0].printed
    assert ranks[1].printed == ""
    begun = checkpoint(tmp_path / "first")
    assert (begun["step"], begun["version"]) == (640, 5)
    for name in ("second", "third"):
        shutil.copytree(tmp_path / "first", tmp_path / name)
    for name in ("first", "second"):
        (folder,) = run_folders(tmp_path / name)
        resumed = on_two(run_main, ["--resume", str(folder), "--device", "cpu"])
        assert [rank.status for rank in resumed] == [0, 0], resumed[0].printed
        seeds = [rank.seeds for rank in (*ranks, *resumed)]
        assert min(map(len, seeds)) == 5  # of four environments, and of the learner
        assert len(set.union(*seeds)) == sum(map(len, seeds))
    ended = checkpoint(tmp_path / "first")
    assert differences(ended, checkpoint(tmp_path / "second")) == []
    assert (ended["step"], ended["version"]) == (896, 7)
    (folder,) = run_folders(tmp_path / "third")
    assert ver_multigpu.main(["--resume", str(folder), "--device", "cpu"]) == 0
    alone = checkpoint(tmp_path / "third")
    assert (alone["step"], alone["version"]) == (896, 9)


ALL = {0: signal.SIGUSR1, 1: signal.SIGHUP}


@pytest.mark.parametrize("signals", [ALL, {1: signal.SIGINT}], ids=["all", "one"])
def test_signal_in_a_long_update(tmp_path, on_two, signals):
    """All ranks leave a long update before the next step of the optimizer. The checkpoint has the
    weights of that moment, and the counters from before the update."""
    args = small(tmp_path, *HERE, "--update-epochs", "300")
    asked = [(rank, "learning", 0, number) for rank, number in signals.items()]
    ranks = on_two(run_main, args, [], asked)
    known = [128 + signals.get(rank, signal.SIGTERM) for rank in range(2)]
    assert [rank.status for rank in ranks] == known, ranks[0].printed
    (weights,) = ranks[0].updates[0]["weights"]
    assert ranks[1].updates[0]["weights"] == [weights]
    content = checkpoint(tmp_path)
    assert (content["step"], content["version"]) == (0, 0)
    assert {each["step"].item() for each in content["optimizer"]["state"].values()} == {1}
    learned = [tensor.flatten() for name, tensor in content["policy"].items() if is_weight(name)]
    assert torch.cat(learned).tolist() == weights


def is_weight(name):
    """Whether this entry of a policy's state is a parameter, and not a buffer."""
    return not name.endswith(("scale", "mean_C", "variance_C", "total_weight"))


def test_signal_to_all_while_collecting(tmp_path, on_two):
    """As a job's end: every rank gets the signal. The checkpoint has the last whole update."""
    asked = [(rank, "collecting", 3, signal.SIGUSR2) for rank in range(2)]
    ranks = on_two(run_main, small(tmp_path, *HERE), [], asked)
    assert [rank.status for rank in ranks] == [140, 140]
    content = checkpoint(tmp_path)
    steps = sum(update["fresh"] for rank in ranks for update in rank.updates)
    assert (content["step"], content["version"]) == (steps, 3)


FAILING = [("Faulty-raise", "out of paint", True), ("Late", "no licence", False)]


@pytest.mark.parametrize("env, words, learned", FAILING)
def test_failing_environment_of_one_rank(tmp_path, on_two, env, words, learned):
    """If workers of one rank fail, all ranks end with status 1 and one message, before their
    rollouts are complete. The training so far is saved."""
    line = "--env-id tests.envs:Count-v0 --num-workers 2 --max-worker-restarts 0 --wrappers"
    args = small(tmp_path, *line.split(), LATENCY.format(25 if learned else 300))
    more = ["--env-id", f"tests.faulty_envs:{env}-v0"]
    if learned:  # rank 1 is faster: when it fails, rank 0 is far from the end of its rollout
        more += ["--wrappers", LATENCY.format(1)]
    ranks = on_two(run_main, args, more)
    assert [rank.status for rank in ranks] == [1, 1], ranks[0].printed
    reason = "more than 0 failures within an hour" if learned else "before its first answer"
    assert reason in message(ranks[0])
    assert message(ranks[0]).count("\n") == 1
    assert ranks[1].printed == ""
    assert words in ranks[1].said  # the worker process prints its error
    assert ranks[0].rows < 64
    assert (checkpoint(tmp_path)["step"] > 0) == learned


@pytest.mark.parametrize("more", [OPTIMAL, NONE], ids=" ".join)
def test_error_of_one_rank(tmp_path, on_two, more):
    """An error that only one rank has, as out of memory. It says so. The other rank notices at
    once that it has gone, although it would wait for a minute."""
    on_two(int)  # the two processes must have started before the time is measured
    begun_at = time.monotonic()
    args = small(tmp_path, *HERE, *more)
    ranks = on_two(run_main, args, ["--policy", "tests.envs:Greedy"])
    assert time.monotonic() - begun_at < 40
    assert ranks[1].status == 1 and "you tried to allocate" in ranks[1].said
    assert "onnection" in ranks[0].error
    assert len(ranks[0].updates) == 4  # after 60 mini-batches, in the fourth update
    assert not list(tmp_path.glob("*/checkpoint.pt"))


NO_TRACE = ["--extensions", "trace(file=/nowhere/trace)"]
BROKEN = ["--env-id", "tests.faulty_envs:Broken-v0"]
REFUSED = [  # arguments of both ranks, of rank 1 alone, and words of the message
    (WHERE["overlap"], [], "--preemption optimal: must be none with an extension"),
    (["--sync-frac", "0"], [], "--sync-frac"),
    (["--rank-timeout", "0"], [], "--rank-timeout"),
    (["--resume", "nowhere"], [], "nowhere"),
    (["--env-id", "tests.envs:Count-v0"], BROKEN, "no licence"),
    ([], ["--device", "cuda:99"], "--device cuda:99: cannot be used"),
    ([], NO_TRACE, "trace: /nowhere/trace.1 cannot be written"),
]


@pytest.mark.parametrize("args, args_1, words", REFUSED, ids=[words for _, _, words in REFUSED])
def test_refused_options(tmp_path, on_two, args, args_1, words):
    """If a rank refuses an option, all end with status 2 and one line."""
    line = "--num-workers 0 --total-timesteps 64".split()
    ranks = on_two(run_main, small(tmp_path, *line, *args), args_1)
    assert [rank.status for rank in ranks] == [2, 2]
    assert words in message(ranks[0])
    assert message(ranks[0]).count("\n") == 1
    assert ranks[1].printed == ""


def test_different_checkpoints(tmp_path, on_two):
    """Ranks that continue from different steps are refused."""
    assert ver_multigpu.main(small(tmp_path / "one", *HERE, "--total-timesteps", "64")) == 0
    (folder,) = run_folders(tmp_path / "one")
    another = tmp_path / "another"
    another.mkdir()
    args = small(tmp_path, *HERE, "--total-timesteps", "128", "--resume", str(folder))
    ranks = on_two(run_main, args, ["--resume", str(another)])
    assert [rank.status for rank in ranks] == [2, 2]
    assert f"different checkpoints of {folder}: try again" in message(ranks[0])


def full_disk(content, path):
    raise OSError(28, "No space left on device")


FULL_DISK = [  # more arguments, signals, and the exit statuses
    (["--checkpoint-interval", "256"], [], [1, 1]),
    (["--total-timesteps", "384", *NONE], [], [1, 0]),
    (NONE, [(1, "collecting", 4, signal.SIGTERM)], [1, 143]),
]


@pytest.mark.parametrize(
    "more, signals, statuses", FULL_DISK, ids=["now and then", "at the end", "after a signal"]
)
def test_full_disk(tmp_path, on_two, more, signals, statuses):
    """If the disk of rank 0 is full, all ranks end, and one line says why."""
    ranks = on_two(run_main, small(tmp_path, *HERE, *more), [], signals, full_disk)
    assert [rank.status for rank in ranks] == statuses, ranks[0].printed
    assert ranks[0].printed.count("No space left on device") == 1
    assert message(ranks[0]).count("\n") == 1
    assert ranks[1].printed == ""
    assert "Traceback" not in ranks[0].printed + ranks[0].said + ranks[1].said
    assert ranks[0].collectives == ranks[1].collectives
    assert not list(tmp_path.glob("*/checkpoint.pt"))


def test_folder_cannot_be_made(tmp_path, on_two):
    """If rank 0 cannot make the run folder, all ranks end before they train. One line says why."""
    (tmp_path / "file").touch()
    ranks = on_two(run_main, small(tmp_path / "file", *HERE))
    assert [rank.status for rank in ranks] == [1, 1]
    assert "Not a directory" in message(ranks[0])
    assert message(ranks[0]).count("\n") == 1
    assert ranks[1].printed == ""
    assert not ranks[0].limits + ranks[1].limits


def count_keys(rank, args):
    """The number of keys in the store after each update, then the exit status."""
    found = []
    log = ver_multigpu.RankRun.log

    def counting_log(run, rollout, logs):
        log(run, rollout, logs)
        found.append(run.ranks.store.num_keys())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ver_multigpu.RankRun, "log", counting_log)
        status = ver_multigpu.main(["--rank-timeout", "60", *args])
    return found, status


@pytest.mark.parametrize("how", [OPTIMAL, THRESHOLD, NONE], ids=" ".join)
def test_store_does_not_grow(tmp_path, on_two, how):
    """A counter is deleted when its rollout is over. Otherwise a long run would fill the memory of
    torchrun's agent. (One rank may count the next rollout already while the other still counts
    keys.)"""
    line = "--num-steps 4 --num-minibatches 1 --update-epochs 1 --total-timesteps 640"
    for found, status in on_two(count_keys, small(tmp_path, *HERE, *line.split(), *how)):
        assert status == 0
        assert len(found) >= 20
        assert max(found) <= min(found) + 1


@pytest.mark.parametrize("visible, own", [(8, 3), (1, 0)])
def test_own_gpu(monkeypatch, capsys, visible, own):
    """`--device cuda` is the GPU with the rank's number, or the only one that it can see."""
    chosen = []
    for name, value in rank_environment(3, 8, free_port()).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: visible)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    assert ver_multigpu.main(["--sync-frac", "0"]) == 2  # refused before it uses the GPU
    assert chosen == [own]
    assert capsys.readouterr().err == ""  # only the first rank of a machine prints


def test_cores_are_shared(monkeypatch):
    """Ranks on one machine divide its cores."""
    cores = ver_ppo.count_cores()
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert ver_ppo.count_cores() == max(1, cores // 2)
    busy = ver_ppo.Spec(SPEC.obs, SPEC.choices, 1, [], step_sec=0.01, cpu_sec=0.01)
    workers = ver_ppo.count_workers(ver_multigpu.Options(num_envs=64), busy)
    assert workers == max(1, cores // 2)


@pytest.mark.quick
def test_starts_after_early_deaths():
    """Some ranks die before all are there, and leave their keys in the store. All ranks of the next
    start agree on a name that is new. A rank that waits in vain raises an error."""
    store = dist.HashStore()
    names = set()
    for early in ([], [1], [2], [1, 2], [0], []):  # ranks that come alone, in a start before
        store.set_timeout(timedelta(seconds=0.1))
        for rank in early:
            with pytest.raises(RuntimeError):
                ver_multigpu.name_start(store, rank, 3, 0.1)
        store.set_timeout(timedelta(seconds=20))
        with ThreadPoolExecutor(3) as pool:
            name = lambda rank: ver_multigpu.name_start(store, rank, 3, 20)
            found = set(pool.map(name, np.random.permutation(3)))
        assert len(found) == 1
        assert not found & names
        names |= found


SLOW = "--env-id tests.envs:Count-v0 --num-workers 0 --checkpoint-interval 128 --rank-timeout 15"
SLOW = [*SLOW.split(), "--wrappers", LATENCY.format(10)]


def test_silent_rank(tmp_path):
    """If a rank stands still, the other one ends soon after --rank-timeout. (Nobody tells it, as if
    the two were on different machines.)"""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    command = ["ver_multigpu.py", *small(tmp_path, *SLOW)]
    ranks = []
    try:
        for rank in range(2):
            given = rank_environment(rank, 2, store.port)
            ranks.append(start(command, **given, TORCHELASTIC_USE_AGENT_STORE="True"))
        wait_until(lambda: list(tmp_path.glob("*/checkpoint.pt")))
        ranks[1].send_signal(signal.SIGSTOP)
        text, _ = ranks[0].communicate(timeout=120)
        assert ranks[0].returncode == 1, text
        assert "RuntimeError" in text
        assert checkpoint(tmp_path)["step"] >= 128
    finally:
        stop([rank.pid for rank in ranks])


def test_torchrun(tmp_path):
    """torchrun --max-restarts, with --resume FOLDER. After rank 0 was killed, all start again and
    continue from its last checkpoint. And when torchrun itself is killed, its ranks notice that its
    key-value store is gone, and end."""
    agent = "-m torch.distributed.run --standalone --nproc-per-node 2 --max-restarts 1"
    folder = tmp_path / "run"
    folder.mkdir()
    args = small(tmp_path, *SLOW, "--resume", str(folder))
    process = start([*agent.split(), "ver_multigpu.py", *args])
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    ranks = []
    try:
        wait_until((folder / "checkpoint.pt").exists)
        ranks += map(int, children.read_text().split())
        os.kill(ranks[0], signal.SIGKILL)
        wait_until(lambda: len(list(folder.glob("events*"))) == 2)
        step = saved(folder)["step"]
        wait_until(lambda: saved(folder)["step"] > step)
        ranks += map(int, children.read_text().split())
        process.kill()
        wait_until(lambda: not any(map(alive_in_session, ranks)))
        text, _ = process.communicate(timeout=10)
        assert len(set(ranks)) == 4, text
    finally:
        stop([process.pid, *ranks])
