"""What advise.py computes is compared with slow and obvious ways. And it gives its advice."""

import json
import re
import shlex
import time
from collections import deque
from dataclasses import replace

import numpy as np
import pytest

import ver_ppo
from notebooks.extensions import advise
from notebooks.extensions.advise import SAMPLERS, Behaviour, Costs, Machine, Row, compute
from notebooks.extensions.virtual_clock import IdlePolicy, build
from tests.helpers import one_line

FREE = Costs(0.0, 0.0, 0.0)


@pytest.fixture(autouse=True)
def short(monkeypatch):
    """Few steps are enough for these tests."""
    monkeypatch.setattr(advise, "SIMULATED", 1500)


def steady(step_sec, num_envs=8, cpu_share=1.0):
    """A simulator whose steps take equally long."""
    sec_E = [np.full(50, step_sec)] * num_envs
    return Behaviour(sec_E, [np.zeros(50, bool)] * num_envs, cpu_share, 0.0)


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize(
    "workers, cores, cpu_share, rate",
    [
        (1, 4, 1.0, 1),  # a worker steps its environments one after the other
        (4, 1, 1.0, 1),  # four share one core
        (4, 2, 1.0, 2),
        (4, 8, 1.0, 4),
        (4, 1, 0.0, 4),  # waiting needs no core
        (4, 0.5, 1.0, 0.5),  # a share of a core, as of two ranks
    ],
)
def test_rate_of_equal_steps(sampler, workers, cores, cpu_share, rate):
    """Steps of one second, as many as workers and cores allow."""
    found = compute(steady(1.0, cpu_share=cpu_share), FREE, sampler, (8, 64), workers, cores)
    assert found == pytest.approx(rate, rel=0.02)


def test_own_work():
    """Inference and learning take their time, after which the workers go on."""
    costs = Costs(batch_sec=0.5, row_sec=0.25, learning_sec=0.125)
    # in lock-step, a round takes a step, a batch of 8, and learning from 8 steps
    found = compute(steady(1.0), costs, "sync", (8, 64), 8, 16)
    assert found == pytest.approx(8 / (1 + 0.5 + 2 + 1))
    # without waiting, only the collecting process is busy
    found = compute(steady(1e-6), costs, "sync", (8, 64), 8, 16)
    assert found == pytest.approx(8 / (0.5 + 2 + 1), rel=1e-3)


def test_answers_are_sent_together():
    """A worker of eight environments sends four answers at once. So on one core, a batch that takes
    50 ms follows on four steps of 100 ms."""
    costs = Costs(batch_sec=0.05, row_sec=0.0, learning_sec=0.0)
    found = compute(steady(0.1), costs, "ver", (8, 64), 1, 1)
    assert found == pytest.approx(4 / (0.4 + 0.05), rel=0.02)


def test_lock_step_takes_the_slowest():
    """Exactly the longest step of each round."""
    rng = np.random.default_rng(0)
    sec_E = [rng.lognormal(0, 1, 500) for _ in range(8)]
    behaviour = Behaviour(sec_E, [np.zeros(500, bool)] * 8, 0.5, 0.0)
    found = compute(behaviour, FREE, "sync", (8, 512), 8, 16)
    # of all pairs of rounds and beginnings, the mean of the maximum of 8 independent draws
    draws = [rng.choice(sec, 100_000) for sec in sec_E]
    assert found == pytest.approx(8 / np.max(draws, axis=0).mean(), rel=0.05)


def tick_by_tick(took_EK, num_workers, cores, cpu_share, own_sec, until, dt=1e-3):
    """When each environment's steps end, by small steps of time. Every environment gets its next
    action at once, and each action costs `own_sec` of a core. Slow and obvious."""
    queues = [deque() for _ in range(num_workers)]
    left = [None] * num_workers  # environment, seconds on a core, seconds of waiting
    to_send = deque(range(len(took_EK)))
    own_left = own_sec
    steps = [0] * len(took_EK)
    ended = []
    for now in np.arange(0, until, dt):
        if to_send and own_left <= 0:
            e = to_send.popleft()
            queues[e % num_workers].append(e)
            own_left = own_sec
        for worker, queue in enumerate(queues):
            if left[worker] is None and queue:
                e = queue.popleft()
                sec = took_EK[e][steps[e] % len(took_EK[e])]
                left[worker] = [e, sec * cpu_share, sec * (1 - cpu_share)]
        ready = sum(1 for one in left if one and one[1] > 0) + bool(to_send)
        share = dt * min(1, cores / max(1, ready))
        own_left -= share if to_send else 0
        for worker, one in enumerate(left):
            if one:
                one[1 if one[1] > 0 else 2] -= share if one[1] > 0 else dt
                if max(one[1:]) <= 0:
                    left[worker] = None
                    steps[one[0]] += 1
                    ended.append(now)
                    to_send.append(one[0])
    return ended


@pytest.mark.parametrize("workers, cores, cpu_share", [(3, 2, 1.0), (6, 2, 0.5), (4, 1, 0.3)])
def test_shared_cores(workers, cores, cpu_share):
    """As many steps as when the cores are dealt out anew in every millisecond."""
    rng = np.random.default_rng(workers)
    took_EK = rng.lognormal(-1, 0.7, (6, 40))
    own_sec = 0.03
    machine = Machine(
        6, workers, cores, lambda e, step: took_EK[e][step % 40], cpu_share, 0.0, own_sec
    )
    _, rollout, collector = build(machine, 6, 25, IdlePolicy)
    collector.collect(rollout)
    slow = tick_by_tick(took_EK, workers, cores, cpu_share, own_sec, until=1.3 * machine.now)
    assert machine.now == pytest.approx(slow[rollout.capacity - 1], rel=0.02)


def test_ranks_wait_for_the_slowest():
    """Ranks share the cores, and each update waits for the slowest of them."""
    even = compute(steady(1.0), FREE, "ver", (8, 16), 4, 8, ranks=2)
    assert even == pytest.approx(8, rel=0.02)
    rng = np.random.default_rng(0)
    sec_E = [rng.lognormal(0, 1, 500) for _ in range(8)]
    uneven = Behaviour(sec_E, [np.zeros(500, bool)] * 8, 1.0, 0.0)
    one, four = (compute(uneven, FREE, "nover", (8, 16), 8, 64, ranks) for ranks in (1, 4))
    assert 2 * one < four < 3.9 * one


def test_costs_of_inference(tmp_path, monkeypatch):
    """A policy that needs 10 ms for a batch, and 5 ms for each row of it."""
    now = [0.0]
    monkeypatch.setattr(ver_ppo.time, "perf_counter", lambda: now[0])
    line = f"--env-id CartPole-v1 --num-envs 8 --num-workers 1 --device cpu --runs-dir {tmp_path}"
    run = advise.Tried(ver_ppo.parse_options(line.split()))
    step = run.policy.step

    def slow(obs, *more):
        now[0] += 0.01 + 0.005 * len(obs["obs"])
        return step(obs, *more)

    run.policy.step = slow
    batch_sec, row_sec, acting_sec = advise.inference_costs(run)
    assert batch_sec == pytest.approx(0.01)
    assert row_sec == pytest.approx(0.005)
    assert acting_sec == pytest.approx(0.01 + 8 * 0.005)


def test_costs_in_training():
    """Without simulators, choosing actions takes 2 ms. In lock-step it takes 5 ms, 2.5 times as
    long. Learning takes as long as in the median training."""
    rows = [
        Row(sampler, 2, 100, 0.0, (0.3, 0.5, 0.2), acting_sec, learning_sec)
        for sampler, acting_sec, learning_sec in zip(SAMPLERS, (0.005, 0.1, 0.1), (1, 2, 9))
    ]
    costs = advise.costs_in_training(0.004, 0.001, 0.002, rows)
    assert costs == pytest.approx((0.01, 0.0025, 2))


def test_watched_workers_hardly_wait(tmp_path, monkeypatch):
    """Steps take 10 ms, and this process sleeps for 10 ms in every pass. Meanwhile a worker steps
    its other environments, so that it spends little time beside them."""
    monkeypatch.setattr(ver_ppo, "count_cores", lambda: 2)
    line = "--env-id CartPole-v1 --wrappers 'latency(mean_ms=10, spread=0)'"
    line += f" --runs-dir {tmp_path}"
    options = ver_ppo.parse_options([*shlex.split(line), "--num-envs", "8"])
    spec = ver_ppo.describe_env(options)
    found = advise.watch(options, spec, 1.0, lambda: time.sleep(0.01))
    assert found.overhead_sec < 0.002
    assert all(len(sec) > 2 for sec in found.sec_E)


def test_numbers_of_a_simulator():
    """One step in a hundred resets, and takes a hundred times as long."""
    sec = np.full(100, 0.001)
    resets = np.zeros(100, bool)
    sec[50], resets[50] = 0.101, True
    found = Behaviour([sec, 2 * sec], [resets, resets], 0.5, 0.0).numbers()
    right = {"mean_ms": 3, "median_ms": 2, "longest_ms": 202, "resets": 0.01, "cpu_share": 0.5}
    right |= {"resets_time": 0.505, "rare_time": 0.505, "within": 0, "between": np.log(2) / 2}
    assert {name: found[name] for name in right} == pytest.approx(right, abs=1e-12)
    assert found["deviation"] > 4


def row(sampler, rate, workers=2, error=0.0):
    return Row(sampler, workers, rate, error, (0.0, 0.0, 1.0), 1e-4, 1e-4)


@pytest.mark.parametrize(
    "rates, sampler, words",
    [
        ((100, 110, 150, 151), "ver", "1.50 times as fast as sync and 1.36 times as fast as nover"),
        ((100, 149, 150, 151), "ver", "VER gains nothing over nover here"),
        ((100, 100, 100, 100), "ver", "VER gains nothing here"),
        ((100, 110, 150, 200), "ver+overlap", "2.00 times as fast as sync"),
        ((200, 100, 100, 100), "sync", "2.00 times as fast as nover"),
        ((100, 200, 100, 100), "nover", "2.00 times as fast as sync"),
    ],
)
def test_recommended(rates, sampler, words):
    """The simplest command that is not clearly slower than the fastest."""
    rows = [row(name, rate) for name, rate in zip((*SAMPLERS, "ver+overlap"), rates)]
    chosen, reasons = advise.recommend(rows, 2)
    assert chosen.sampler == sampler
    assert words in reasons
    # more workers only if they bring something
    more = [row("ver", rate, workers=4) for rate in (1.02 * rates[2], 2 * max(rates))]
    assert advise.recommend([*rows, more[0]], 2)[0] == chosen
    assert advise.recommend([*rows, more[1]], 2)[0] == more[1]


def test_chance_recommends_nothing():
    """An option must be clearly better than the default, and no sentence contradicts another."""
    rates = {"sync": 104, "nover": 112, "ver": 100, "ver+overlap": 90}
    rows = [row(name, rate, error=0.06) for name, rate in rates.items()]
    chosen, _ = advise.recommend(rows, 2)
    assert chosen.sampler == "ver" and "more --minutes" in advise.doubt(steady(0.1), rows, 4, 10.0)
    rows = [one._replace(error=0.01) for one in rows]
    chosen, reasons = advise.recommend(rows, 2)
    assert chosen.sampler == "nover" and advise.doubt(steady(0.1), rows, 4, 10.0) == ""
    assert "nothing over nover" in reasons and "sync is as fast" not in reasons


def test_doubt():
    """Short trainings mislead if their rates vary, or if they have only a few, long resets."""
    sec = np.append(np.full(99, 0.002), 0.2)  # half of the time is in the reset
    behaviour = Behaviour([sec] * 4, [sec > 0.1] * 4, 1.0, 0.0)
    rows = [row("sync", 60), row("ver", 80)]  # in 20 s, at least 300 steps of each environment
    assert advise.doubt(behaviour, rows, 4, 20.1) == ""
    few = advise.doubt(behaviour, rows, 4, 10.0)
    assert "about 1.5 of them" in few and "more --minutes" in few
    assert advise.doubt(steady(0.002), rows, 4, 10.0) == ""
    varying = [row("sync", 60, error=0.06), row("ver", 80)]
    assert "uncertain" in advise.doubt(behaviour, varying, 4, 20.1)


def test_environments_go_on(tmp_path, monkeypatch):
    """Trainings with equally many workers share their environments, and only the first one has to
    settle. Its seconds, and those of the first cycle, do not count."""
    line = "--env-id CartPole-v1 --num-envs 4 --num-steps 8 --hidden-size 8 --device cpu"
    line += f" --num-workers 2 --runs-dir {tmp_path} --learner-threads 1"
    options = ver_ppo.parse_options([*line.split(), "--eval-episodes", "0"])
    run = advise.Tried(replace(options, total_timesteps=10**12))
    episodes, cycles = [], []
    summarize = ver_ppo.Run.summarize
    monkeypatch.setattr(
        ver_ppo.Run, "summarize", lambda *args: cycles.append(summarize(*args)) or cycles[-1]
    )
    with advise.kept_environments(run, 2):
        for times in ((0.5, 0.5), (0.0, 0.5)):
            cycles.clear()
            for sampler in SAMPLERS:
                before = len(cycles)
                tried = advise.try_one(run, sampler, 2, times, lambda: None)
                episodes.append(run.kept.io["episode"].copy())
            spent = [cycle["time/cycle_sec"] for cycle in cycles]
            assert sum(run.cycle_sec[:-1]) <= 0.5 < sum(run.cycle_sec)
            counted = spent[before:] if times[0] == 0 else spent[-len(run.cycle_sec) :]
            assert counted == run.cycle_sec
            assert tried.rate == pytest.approx(32 * len(run.cycle_sec) / sum(run.cycle_sec))
    assert (np.diff(episodes, axis=0) >= 0).all()  # no environment began again


def test_advice(tmp_path, monkeypatch, capsys):
    """A whole run, on a simulator that sleeps unevenly. The command that it prints is understood,
    and it has written only the file that was asked for."""
    monkeypatch.chdir(tmp_path)
    latency = "latency(mean_ms=2, spread=0.5)"
    line = f"--env-id CartPole-v1 --wrappers '{latency}' --num-envs 4 --num-steps 64 --no-norm-adv"
    line += " --hidden-size 16 --device cpu --learner-threads 1 --minutes 0.2 --cores 8 --ranks 2"
    line += " --file found.json"
    assert advise.main(shlex.split(line)) == 0
    text = capsys.readouterr().out
    (path,) = tmp_path.iterdir()
    found = json.loads(path.read_text())
    assert found["num_envs"] == 4 and len(found["seconds"]) == len(found["resets"]) == 4
    assert [row["sampler"] for row in found["tried"]][:3] == list(SAMPLERS)
    assert len(found["computed"]) >= 3
    behaviour = re.search(r"a step: ([\d.]+) ms on average, (\d+)% of it", text)
    assert 2 < float(behaviour[1]) < 6 and int(behaviour[2]) < 60
    tried = re.findall(r"^(\S+) +(\d+) +([\d,.]+)(?: +\d+%){4}", text, re.M)
    assert ("sync", "4") in [(name, workers) for name, workers, _ in tried]
    assert len(tried) >= 3 and all(float(rate.replace(",", "")) > 0 for *_, rate in tried)
    (command,) = re.findall(r"^ {4}python ver_ppo.py (.*)", text, re.M)
    given = ver_ppo.parse_options(shlex.split(command))
    assert given.wrappers == (latency,) and given.num_envs == 4 and not given.norm_adv
    assert "A million steps take" in text
    larger = re.findall(r"^ {4}(\w+) +\d+ workers: [\d,.]+ steps/s", text, re.M)
    assert larger == list(SAMPLERS)


@pytest.mark.parametrize(
    "more, word",
    [
        ("--minutes 0", "--minutes 0"),
        ("--cores -1", "--cores -1"),
        ("--ranks 0", "--ranks 0"),
        ("--num-workers 0", "worker processes"),
        ("--extensions overlap", "overlap"),
        ("--num-envs 0", "--num-envs 0"),
    ],
)
def test_refused(capsys, more, word):
    """One line, before anything starts."""
    one_line(capsys, ["--env-id", "CartPole-v1", *more.split()], word, advise.main)
