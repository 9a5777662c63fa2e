"""The ways to collect: sync, nover, ver and async, in this process and in another one."""

import contextlib
import copy
import itertools
import json
import os
import signal
import time

import numpy as np
import pytest
import torch

import ver_ppo
from notebooks.extensions.check import check_rollout
from notebooks.extensions.overlap import (
    add_corrected_advantages,
    flat_weights,
    reevaluate,
    set_weights,
)
from notebooks.extensions.virtual_clock import (
    SPEC,
    VirtualWorkers,
    assert_nothing_is_lost,
    build,
    taken,
)
from tests.helpers import EXTENSIONS, busy_shares, one_line, run_here, small


def table(seed, num_envs=4, spread=0.8):
    """Step times of virtual environments, which differ between steps and between environments."""
    rng = np.random.default_rng(seed)
    return rng.lognormal(0, spread, (num_envs, 1)) * rng.lognormal(0, spread, (num_envs, 997))


QUICK = pytest.param(0, marks=pytest.mark.quick)


@pytest.mark.parametrize("seed", [QUICK, *range(1, 10)])
def test_nover_and_sync(seed):
    """`sync` and `nover` take T steps from every environment, and carry no step over. `sync` waits
    for the slowest environment in every step, `nover` in every rollout. With `ver`, no environment
    ever waits."""
    num_envs = 4
    num_steps = 12
    rollouts = 4
    took = {}
    seconds = table(seed, num_envs)
    for sampler in ("sync", "nover", "ver"):
        workers = VirtualWorkers(num_envs, lambda e, step: seconds[e, step])
        policy, rollout, c = build(workers, num_envs, num_steps, sampler=sampler)
        steps_N = np.zeros(num_envs, int)
        for c.version in range(rollouts):
            c.collect(rollout)
            check_rollout(rollout, c.version)
            steps_N += np.bincount(rollout["env"], minlength=num_envs)
            if sampler != "ver":
                assert (steps_N == (c.version + 1) * num_steps).all()
                assert (rollout["sent_at"] > rollout.started_at).all()
            if sampler == "sync":
                assert (np.unique(rollout["sent_at"], return_counts=True)[1] == num_envs).all()
        took[sampler] = workers.now
    busy_N = [np.searchsorted(np.cumsum(row), took["ver"] + 1e-6) for row in seconds]
    assert steps_N.tolist() == busy_N
    seconds_NRT = seconds[:, : rollouts * num_steps].reshape(num_envs, rollouts, num_steps)
    assert took["sync"] == pytest.approx(seconds_NRT.max(axis=0).sum())
    assert took["nover"] == pytest.approx(seconds_NRT.sum(axis=2).max(axis=0).sum())
    assert took["ver"] < took["nover"] < took["sync"]


@pytest.mark.quick
def test_equal_speeds_make_all_samplers_alike():
    """If all steps take equally long, every sampler collects the steps that `sync` collects. Only
    their order may differ."""
    endings = {(1, 4): "terminated", (0, 7): "truncated", (2, 11): "terminated"}
    endings[0, 29] = "truncated"
    got = {}
    names = "env first prev_action action log_prob value reward done".split()
    for sampler in ("sync", "nover", "ver", "async"):
        workers = VirtualWorkers(3, lambda e, step: 1.0, lambda e, step: endings.get((e, step)))
        torch.manual_seed(3)
        policy, rollout, c = build(workers, 3, 10, sampler=sampler)
        for _ in range(3):
            c.collect(rollout)
            order = np.argsort(rollout["env"], kind="stable")
            columns = [
                rollout.records[names][order],
                rollout["obs"]["obs"][order],
                rollout["state"][order],
                rollout.bootstrap.copy(),
            ]
            got.setdefault(sampler, []).extend(columns)
    for sampler in ("nover", "ver", "async"):
        for one, two in zip(got["sync"], got[sampler], strict=True):
            np.testing.assert_array_equal(one, two, err_msg=sampler)


@pytest.mark.parametrize("seed", range(10))
def test_trajectories(seed):
    """With async, each step of an environment arrives once and in order, in trajectories of T. The
    bootstrap value of a trajectory is the value with which the next one begins. A trajectory waits
    only for its own environment."""
    num_envs = 4
    num_steps = 5
    seconds = table(seed)
    if seed % 2:
        # many ties: more trajectories are finished at once than a rollout has room for
        seconds = seconds.round() + 1
    kinds = [None, "terminated", "truncated", "lost"]
    rng = np.random.default_rng(seed)
    endings = rng.choice(kinds, (num_envs, 997), p=[0.75, 0.1, 0.1, 0.05])
    times = lambda e, step: seconds[e, step]
    workers = VirtualWorkers(num_envs, times, lambda e, step: endings[e, step])
    policy, rollout, c = build(workers, num_envs, num_steps, sampler="async")
    rollouts = []
    bootstrap_N = [None] * num_envs
    for c.version in range(15):
        c.collect(rollout)
        check_rollout(rollout, c.version, lag=15)
        assert rollout.rows == rollout.capacity
        assert rollout["segment"].tolist() == np.repeat(range(num_envs), num_steps).tolist()
        for segment, step in enumerate(range(0, rollout.capacity, num_steps)):
            e = rollout["env"][step]
            assert bootstrap_N[e] in (None, rollout["value"][step])
            bootstrap_N[e] = rollout.bootstrap[segment]
        add_corrected_advantages(policy, rollout, c.options)
        assert (rollout["weight"] == ~rollout["lost"]).all()
        rollouts.append(taken(rollout))
    assert_nothing_is_lost(c, rollouts)
    env = np.concatenate([columns[0] for columns in rollouts])
    for e, count in enumerate(np.bincount(env)):
        assert seconds[e, :count].sum() <= workers.now + 1e-6
        assert workers.now <= seconds[e, : count + 2 * num_steps].sum() + 1e-6


@pytest.mark.quick
@pytest.mark.parametrize("sampler", ["ver", "async"])
@pytest.mark.parametrize("update", [False, True])
def test_lost_steps_teach_nothing(sampler, update):
    """The advantage and the weight of a lost step are 0. The step before it bootstraps from its
    value. With V-trace, both hold for the values of the present policy."""
    rng = np.random.default_rng(5)
    endings = rng.choice([None, "lost"], (3, 997), p=[0.8, 0.2])
    workers = VirtualWorkers(3, lambda e, step: 1.0 + e, lambda e, step: endings[e, step])
    policy, rollout, c = build(workers, 3, 16, sampler=sampler)
    c.collect(rollout)
    if update:
        with torch.no_grad():
            policy.critic.weight += 0.3
    if update or sampler == "async":
        add_corrected_advantages(policy, rollout, c.options)
        value_S = reevaluate(policy, rollout, c.options)[0]
        assert np.allclose(value_S, rollout["value"], atol=1e-5) != update
    else:
        ver_ppo.add_advantages(rollout, c.options)
        value_S = rollout["value"]
    lost_S = rollout["lost"]
    assert not rollout["weight"][lost_S].any() and rollout["weight"][~lost_S].all()
    np.testing.assert_allclose(rollout["advantage"][lost_S], 0, atol=1e-6)
    np.testing.assert_allclose(rollout["returns"][lost_S], value_S[lost_S], atol=1e-6)
    pairs = 0
    for segment in range(3):
        steps = np.flatnonzero(rollout["segment"] == segment)
        for one, two in zip(steps, steps[1:]):
            if lost_S[two] and not lost_S[one]:
                expected = rollout["reward"][one] + c.options.gamma * value_S[two] - value_S[one]
                assert rollout["advantage"][one] == pytest.approx(expected, abs=1e-5)
                pairs += 1
    assert pairs > 3


def latency(mean_ms, spread):
    """The wrapper that emulates this much simulator time."""
    return (f"latency(mean_ms={mean_ms}, spread={spread})",)


MODES = {
    "ver": {},
    "nover": {"sampler": "nover"},
    "sync": {"sampler": "sync"},
    "overlap": {"extensions": ("overlap",)},
    "overlap, sync": {"extensions": ("overlap",), "sampler": "sync"},
    "overlap, inline environments, more buffers": {
        "extensions": ("overlap",),
        "num_workers": 0,
        "policy": "tests.envs:Normed",
    },
    "async": {"extensions": ("async",)},
    "async, inline environments": {"extensions": ("async",), "num_workers": 0},
}


@contextlib.contextmanager
def collecting(**changes):
    """A run without a folder that has started, as in `train`. Afterwards, no process is left."""
    small = {"env_id": "tests.envs:Count-v0", "num_workers": 3, "hidden_size": 8, "device": "cpu"}
    options = ver_ppo.Options(**small | changes)
    deadline = time.monotonic() + 180

    def enough(*_):
        assert time.monotonic() < deadline, "no rollout comes"

    run_class = ver_ppo.extend(ver_ppo.Run, options)
    run = run_class.__new__(run_class)
    run.spec, run.policy = ver_ppo.build(options)
    vars(run).update(options=options, device=torch.device("cpu"), look=enough)
    vars(run).update(step=400, version=5, signal=None, cleanup=contextlib.ExitStack())
    size = options.rollout_steps, options.num_envs, run.policy.state_shape
    run.rollout = ver_ppo.Rollout(run.spec, *size)
    torch.nn.init.normal_(run.policy.actor.weight)
    torch.nn.init.ones_(run.policy.critic.scale)  # otherwise all values are 0
    with run.cleanup:
        run.start()
        yield run
    assert not torch.multiprocessing.active_children()


def check_episodes(rollout, expected):
    """Assert that each environment's steps (of Count) come once and in order. `expected` has the
    next count of each environment, and the second number of its observations, if it is known."""
    shown = rollout["obs"]["obs"].tolist()
    for e, (count, offset), row in zip(rollout["env"], shown, rollout.records):
        assert expected[e][0] in (None, round(10 * count))
        assert expected[e][1] in (None, offset)
        assert row["first"] == (round(10 * count) == 0)
        assert row["done"] == (round(10 * count) == 6)
        reward = 0.1 * (row["action"].item() - 1)
        assert row["done"] or row["reward"] == pytest.approx(reward)
        expected[e] = (0, None) if row["done"] else (round(10 * count) + 1, offset)


def check_probabilities(policy, rollout, steps):
    """Assert that this policy gives these actions their probabilities, and the states their
    values."""
    names = "action", "log_prob", "value"
    action, log_prob, value = (torch.from_numpy(rollout[name][steps]) for name in names)
    inputs = ver_ppo.to_device(rollout.records[steps], ver_ppo.INPUTS, torch.device("cpu"))
    with torch.no_grad():
        distribution, found, _ = policy.step(*inputs.values())
    torch.testing.assert_close([distribution.log_prob(action), found], [log_prob, value])


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_loses_nothing(mode):
    """Over many rollouts, each environment's steps come once and in order. The policy of the
    recorded version gives each action its probability, and each state its value. (So weights are
    published whole, and in time.)"""
    expected = [(None, None)] * 5
    policies = {}
    lags = []
    started = []  # when each rollout began
    behind = []  # by how many versions each action was too old when it was sent
    elsewhere = "overlap" in mode or "async" in mode  # another process collects
    sizes = {"num_envs": 5, "num_steps": 16, "wrappers": latency(1, 0.8)}
    with collecting(**sizes, **MODES[mode]) as run:
        policy = run.policy
        for run.version in range(5, 17):  # as `Run.log` counts
            rollout = run.collect()
            check_rollout(rollout, run.version, getattr(run, "max_lag", 0))
            assert rollout.rows == 5 * 16
            check_episodes(rollout, expected)
            policies[run.version] = copy.deepcopy(policy.state_dict())
            for used in np.unique(rollout["version"]):
                policy.load_state_dict(policies[used])
                check_probabilities(policy, rollout, np.flatnonzero(rollout["version"] == used))
            policy.load_state_dict(policies[run.version])
            lags.append(run.version - rollout["version"])
            started.append(rollout.started_at)
            newest_S = 4 + np.searchsorted(started, rollout["sent_at"], side="right")
            behind += (newest_S - rollout["version"]).tolist()
            time.sleep(0.02)
            with torch.no_grad():  # an update that changes every probability, also by buffers
                for part in policy.state_dict().values():
                    part += 0.05 * torch.randn_like(part) if part.is_floating_point() else 1
            if elsewhere:
                run.collector.publish(policy, run.version + 1)
    lag = np.concatenate(lags[2:])
    carried = "sync" not in mode and "nover" not in mode
    most = 5 if "async" in mode else ("overlap" in mode) + carried
    assert 0 == lag.min()
    assert lag.any() == (mode not in ("nover", "sync")) and (most < 1 or lag.mean() < most)
    # (`lag` has no limit: a step can be in flight, and a trajectory unfinished, for long)
    assert set(behind) == {0, int(elsewhere)}  # new weights are used within a rollout


def test_weights_are_copied_whole():
    """All weights and buffers reach the policy that acts, with their types and exact values. This
    includes buffers of integers."""
    options = ver_ppo.Options(hidden_size=8, policy="tests.envs:Normed")
    learner, actor = [ver_ppo.make_policy(SPEC, options) for _ in range(2)]
    learner.train()
    for _ in range(3):
        learner.heads(3 + 2 * torch.randn(20, 8))
    learner.normalize.num_batches_tracked += 2**23  # far more updates than any run makes
    for part in [learner.critic.scale, *learner.encoders[0].source.normalize.buffers()]:
        part += torch.rand_like(part)
    expected = {name: part.clone() for name, part in learner.state_dict().items()}
    integers = [name for name, part in expected.items() if not part.is_floating_point()]
    assert integers == ["normalize.num_batches_tracked"]
    before = actor.state_dict()
    assert any(not torch.equal(before[name], expected[name]) for name in integers)
    vector = flat_weights(learner)
    assert vector.shape == (sum(part.numel() for part in expected.values()),)
    set_weights(actor, vector)
    found = actor.state_dict()
    assert found.keys() == expected.keys()
    for name, part in expected.items():
        assert found[name].dtype == part.dtype and torch.equal(found[name], part), name
    for part in learner.state_dict().values():  # the vector is a copy
        part.zero_()
    assert all(torch.equal(found[name], part) for name, part in expected.items())


def write_rows(table, pipe):
    """Body of another process: write into the table, then send a column twice."""
    table["number"][:] = [3, 1, 4]
    table["part"]["x"][1] = 2.5
    pipe.send(table["number"].tolist())
    pipe.recv()
    pipe.send(table["number"].tolist())


def test_shared_tables():
    """Two processes share a table: each sees the numbers that the other one writes."""
    part = np.dtype([("x", np.float32, (2,))], align=True)
    table = ver_ppo.Table(3, [("flag", bool), ("number", int), ("part", part)])
    table["flag"][:] = True
    assert not table.memory.is_shared()
    table.share()
    assert table.memory.is_shared() and table["flag"].all()
    assert "records" not in table.__getstate__()  # otherwise its numbers would be sent, too
    context = ver_ppo.process_context()
    mine, other = context.Pipe()
    process = context.Process(target=write_rows, args=(table, other))
    process.start()
    try:
        assert mine.poll(60) and mine.recv() == [3, 1, 4]
        assert table["number"].tolist() == [3, 1, 4]
        assert table["part"]["x"].tolist() == [[0, 0], [2.5, 2.5], [0, 0]]
        assert table["flag"].all()
        table["number"][2] = 9
        mine.send("look")
        assert mine.poll(60) and mine.recv() == [3, 1, 9]
        process.join(60)
        assert process.exitcode == 0
    finally:
        ver_ppo.end_process(process, 0)


@pytest.mark.parametrize("wait_sec", [0, 0.5])
def test_collecting_process_dies(wait_sec):
    """While the main process waits for a rollout, `look` can end the waiting. The death of the
    collecting process ends the run with its exit code. (After half a second, the process has handed
    a rollout over, and waits.)"""
    with collecting(num_envs=4, num_steps=16, extensions=("overlap",)) as run:
        run.collector.look = lambda rows: True
        assert run.collect().rows == 0
        run.collector.look = run.look
        assert run.collect().rows == 4 * 16
        time.sleep(wait_sec)
        (process,) = torch.multiprocessing.active_children()
        os.kill(process.pid, signal.SIGKILL)
        process.join(10)
        run.collector.publish(run.policy, run.version)  # this does not notice
        died = "the collecting process died with exit code -9"
        with pytest.raises(ver_ppo.EnvironmentFailure, match=died):
            run.collect()  # after half a second, this may be a whole rollout ...
            run.collect()  # ... and this is not


@pytest.mark.parametrize("mode, workers, sampler", [("here", 1, "ver"), ("overlap", 2, "nover")])
def test_trace(tmp_path, mode, workers, sampler):
    """A trace shows each step of each environment, each batch with its size, and each learning
    phase, at the right time. Steps of one worker do not overlap. Inference and learning overlap
    only with `overlap`. (Two workers with `ver` would be left to chance: if one of them starts
    late, its environments may give no step.)"""
    path = tmp_path / "trace.json"
    args = "--env-id tests.envs:Count-v0 --num-envs 4 --num-steps 32 --total-timesteps 640"
    args += f" --num-workers {workers} --hidden-size 16 --eval-episodes 0 --learner-threads 1"
    args += f" --update-epochs 20 --sampler {sampler}"
    # a sleep of 5 ms, because on a loaded machine, a sleep of 1 ms may take 0.2 ms longer
    args = [*args.split(), "--wrappers", *latency(5, 0), "--runs-dir", str(tmp_path)]
    assert ver_ppo.main([*args, "--extensions", *EXTENSIONS[mode], f"trace(file={path})"]) == 0
    lanes = {}
    for event in json.loads(path.read_text()):
        assert event["ph"] == "X"
        span = event["ts"], event["ts"] + event["dur"], event["name"]
        lanes.setdefault(event["pid"], []).append(span)
    batches = lanes.pop("inference")
    learning = lanes.pop("learner")
    assert len(learning) == 5 and lanes.keys() == {f"environment {e}" for e in range(4)}
    sizes = [int(name.split()[-1]) for *_, name in batches]
    assert sum(sizes) == sum(map(len, lanes.values())) == 640
    shortest = min(end - begin for lane in lanes.values() for begin, end, _ in lane)
    assert shortest == pytest.approx(5100, rel=0.1)
    for worker in range(workers):
        own = [lanes[f"environment {e}"] for e in range(worker, 4, workers)]
        steps = sorted(itertools.chain(*own))
        assert all(earlier[1] <= later[0] + 2 for earlier, later in zip(steps, steps[1:]))
    pairs = itertools.product(batches, learning)
    overlaps = [batch for batch, phase in pairs if batch[0] < phase[1] and phase[0] < batch[1]]
    assert bool(overlaps) == (mode == "overlap")


TRACED = "--env-id CartPole-v1 --num-workers 0 --total-timesteps 128"


def test_trace_file(tmp_path, monkeypatch, capsys):
    """What the command line names is replaced, as a whole, and `~` is the home folder. A run
    without an update keeps an old file. A file in no folder, and what is no file, are refused."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "trace.json"
    path.write_text("[\n1]")
    runs = tmp_path / "runs"
    folder = run_here(runs, TRACED, "--extensions", "trace(file=~/trace.json)")
    found = path.read_text()
    assert sum(event["pid"] == "learner" for event in json.loads(found)) == 2
    args = ["--resume", str(folder), "--extensions", "trace(file=~/trace.json)"]
    assert ver_ppo.main(args) == 0
    assert path.read_text() == found and sorted(tmp_path.iterdir()) == [runs, path]
    for file in ("nowhere/trace.json", "/dev/null", "runs"):
        args = small(tmp_path / "none", *TRACED.split(), "--extensions", f"trace(file={file})")
        one_line(capsys, args, "cannot be written")


def test_a_trace_in_the_run_folder(tmp_path, monkeypatch):
    """Without a name, which a stranger's checkpoint cannot give, the trace is in the run folder,
    even if that stranger has planted links. Rank 1, which has no folder, writes none."""
    outside = tmp_path / "outside"
    outside.write_text("mine")
    folder = run_here(tmp_path / "runs", TRACED, "--extensions", "trace")
    path = folder / "trace.json"
    assert len({event["pid"] for event in json.loads(path.read_text())}) == 6
    for name in ("trace.json", "trace.json.tmp", "trace.tmp"):
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(outside)
    assert ver_ppo.main(["--resume", str(folder), "--total-timesteps", "192"]) == 0
    assert json.loads(path.read_text()) and not path.is_symlink()
    assert outside.read_text() == "mine"

    monkeypatch.setattr(ver_ppo.Run, "writes", False)
    monkeypatch.chdir(tmp_path)
    assert ver_ppo.main(small(tmp_path / "1", *TRACED.split(), "--extensions", "trace")) == 0
    assert sorted(each.name for each in tmp_path.iterdir()) == ["outside", "runs"]


def test_a_trace_of_a_killed_run(tmp_path, monkeypatch):
    """Each checkpoint comes with a whole trace so far."""
    path = tmp_path / "trace.json"
    found = []
    log = ver_ppo.Run.log

    def log_and_look(run, *args):
        log(run, *args)
        if path.exists():
            found.append((run.step, len(json.loads(path.read_text()))))

    monkeypatch.setattr(ver_ppo.Run, "log", log_and_look)
    line = f"{TRACED} --total-timesteps 256 --checkpoint-interval 128"
    run_here(tmp_path / "runs", line, "--extensions", f"trace(file={path})")
    steps, sizes = zip(*found)
    assert steps == (128, 192, 256) and sizes[0] == sizes[1] < sizes[2]


def test_double_buffering():
    """Inference takes 6 ms and a step 10 ms. A worker with one environment is idle during
    inference. With two, it steps one environment while the other one's action is computed."""
    busy = {}
    for num_envs in (1, 2):
        sizes = {"num_envs": num_envs, "num_steps": 30, "num_workers": 1}
        with collecting(**sizes, wrappers=latency(10, 0)) as run:
            step = run.policy.step
            run.policy.step = lambda *args: (time.sleep(0.006), step(*args))[1]
            run.collect()
            rollout = run.collect()
        steps = zip(rollout["began_at"], rollout["began_at"] + rollout["step_sec"])
        inferences = zip(rollout["inference_at"], rollout["sent_at"])
        busy[num_envs] = np.median(busy_shares(inferences, steps))
    assert busy[1] == 0, "the time stamps are wrong"
    assert busy[2] > 0.5, busy
