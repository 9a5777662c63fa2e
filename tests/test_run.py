"""Whole runs: they learn, can be repeated and resumed, are evaluated, and refuse bad input."""

import itertools
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
import torch
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn

import ver_ppo
from notebooks.extensions import play
from tests.faulty_envs import Faulty, out_of_paint
from tests.helpers import (
    ROOT,
    WHERE,
    differences,
    logged,
    nobody_left,
    one_line,
    run_folders,
    run_here,
    saved,
    small,
)


@pytest.mark.parametrize(
    "env_id",
    [
        "pointnav",
        "tests.envs:Everything-v0",
        "tests.envs:Keys-v0",
        "tests.envs:Continuous-v0",
        "CartPole-v1",
    ],
)
def test_train(tmp_path, env_id):
    """Work happens: weights move, rollouts hold their invariants, TensorBoard and options are
    written."""
    extra = "--env-kwargs camera=rgb image_size=16" if env_id == "pointnav" else "--lstm-layers 2"
    line = f"--env-id {env_id} --num-workers 0 --total-timesteps 256 --debug {extra}"
    folder = run_here(tmp_path, line)
    assert folder.name.startswith(env_id.replace(":", "-") + "__ver__1__")
    assert json.loads((folder / "options.json").read_text())["env_id"] == env_id
    assert saved(folder)["step"] == 256 and saved(folder)["update"] == 4
    fresh = ver_ppo.build(ver_ppo.parse_options(small(tmp_path, *line.split())))[1].state_dict()
    moved = [name for name in fresh if not torch.equal(fresh[name], saved(folder)["policy"][name])]
    assert len(moved) == len(fresh) - 1  # all but the fixed entropy coefficient
    losses = "value_loss policy_loss entropy approx_kl clipfrac ent_coef grad_norm skipped"
    losses += " explained_variance"
    tags = {f"losses/{name}" for name in losses.split()} | {"charts/SPS", "charts/learning_rate"}
    tags |= {f"time/{name}_share" for name in ("waiting", "inference", "learning")} | {
        "ver/batch_size",
        "ver/carried_share",
    }
    tags |= {
        "ver/steps_per_env_min",
        "ver/steps_per_env_max",
        "ver/policy_lag_max",
        "ver/made_up_steps",
    }
    assert tags <= set(EventAccumulator(str(folder)).Reload().Tags()["scalars"])
    assert [*logged(folder, "losses/entropy")] == [64, 128, 192, 256]


def test_workers_are_the_same_environments():
    """Worker processes, several environments each, answer what the same environments answer in the
    main process."""
    options = ver_ppo.Options(env_id="tests.envs:Count-v0", num_envs=5, num_workers=2)
    spec = ver_ppo.describe_env(options)
    ios = [ver_ppo.EnvIO(spec, 5) for _ in range(2)]
    pools = [
        ver_ppo.make_workers(replace(options, num_workers=n), "train", spec, io)
        for n, io in zip((0, 2), ios)
    ]
    assert [type(pool) for pool in pools] == [ver_ppo.InlineWorkers, ver_ppo.Workers]
    try:
        for step in range(20):
            for pool in pools:
                answered = []
                while len(answered) < 5:
                    answered += pool.receive(5.0)
                assert sorted(answered) == [0, 1, 2, 3, 4]
            for name in (
                "obs",
                "final_obs",
                "first",
                "reward",
                "terminated",
                "truncated",
                "episode",
                "episode_stats",
            ):
                one, two = (ver_ppo.flatten(io[name]) for io in ios)
                for key, rows in one.items():
                    np.testing.assert_array_equal(rows, two[key], f"{name} {key}, step {step}")
            for pool, io in zip(pools, ios):
                io["action"][:] = np.arange(5)[:, None] % 3
                pool.send(np.array([3, 1, 0, 2, 4]))
    finally:
        for pool in pools:
            pool.close()
    assert nobody_left()


@pytest.mark.parametrize("env_id", ["pointnav", "tests.envs:Count-v0"])
def test_same_seed_same_run(tmp_path, env_id):
    """With --num-workers 0, the same seed gives the same run bit for bit, and another seed
    another."""
    line = f"--env-id {env_id} --num-workers 0 --total-timesteps 192 --seed"
    one, two, other = (
        saved(run_here(tmp_path / str(k), line, seed)) for k, seed in enumerate("334")
    )
    assert differences(one, two) == []
    assert {"policy", "optimizer", "recent"} >= set(differences(one, other)) >= {"policy"}


STOPS = [
    ("pointnav", "ppo_update", 5, 320),
    ("Pendulum-v1", "Collector.observe", 90, 320),
    ("tests.envs:Count-v0", "Collector.observe", 3, 0),
]


@pytest.mark.parametrize("env_id, function, times, step", STOPS)
def test_resume_is_going_on(tmp_path, monkeypatch, env_id, function, times, step):
    """A stopped run goes on with weights, optimizer and counters, plays episodes that it has not
    played, and continues its curves without a gap. Two resumes from one checkpoint are equal bit
    for bit."""
    *owner, name = function.split(".")  # a function of ver_ppo.py, or of a class there
    owner = getattr(ver_ppo, *owner) if owner else ver_ppo
    calls, original, seed, played = [], getattr(owner, name), ver_ppo.derive_seed, []

    def stopped(*args):
        calls.append(1)
        if len(calls) == times:
            os.kill(os.getpid(), signal.SIGTERM)
        return original(*args)

    def note(*numbers):
        if numbers[-1] < ver_ppo.TRIAL:
            played.append(numbers)
        return seed(*numbers)

    monkeypatch.setattr(ver_ppo, "derive_seed", note)
    args = small(
        tmp_path, *f"--env-id {env_id} --num-workers 0 --total-timesteps 640 --debug".split()
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, stopped)
        assert ver_ppo.main(args) == 128 + signal.SIGTERM
    (first,), before = run_folders(tmp_path), set(played)
    assert saved(first)["step"] == step and saved(first)["update"] == step // 64
    second, third = (Path(shutil.copytree(first, tmp_path / name)) for name in ("second", "third"))
    if step:  # nothing is left to do: what was restored is saved again
        assert ver_ppo.main(["--resume", str(third), "--total-timesteps", str(step)]) == 0
        assert differences(saved(first), saved(third)) == []
    played.clear()
    assert ver_ppo.main(["--resume", str(first)]) == ver_ppo.main(["--resume", str(second)]) == 0
    assert differences(saved(first), saved(second)) == [] and saved(first)["step"] == 640
    assert not step or not before & set(played)
    assert logged(first, "losses/value_loss") == logged(second, "losses/value_loss")
    assert [*logged(first, "losses/value_loss")] == [64 * k for k in range(1, 11)]


@pytest.mark.parametrize("where", WHERE)
def test_resume_with_workers(tmp_path, capsys, where):
    """With worker processes too a run goes on: counters, schedule, the same folder; changed options
    are named."""
    folder = run_here(
        tmp_path,
        "--env-id tests.envs:Count-v0 --num-workers 2 --total-timesteps 256 --debug",
        *WHERE[where],
    )
    assert ver_ppo.main(["--resume", str(folder), "--total-timesteps", "512"]) == 0
    assert "--total-timesteps: 512 (the checkpoint has 256)" in capsys.readouterr().out
    assert saved(folder)["step"] == 512 and saved(folder)["update"] == 8
    rates = {}
    for k in range(8):
        options = ver_ppo.Options(total_timesteps=256 if k < 4 else 512)
        decay = ver_ppo.Run.decay(SimpleNamespace(step=64 * k, options=options))
        rates[64 * k + 64] = pytest.approx(2e-3 * decay)
    assert logged(folder, "charts/learning_rate") == rates
    assert run_folders(tmp_path) == [folder] and nobody_left()


def test_greedy_agents():
    """They repeat themselves: after `reset`, as if they were new. Others sample."""
    spec, policy = ver_ppo.build(ver_ppo.Options(env_id="CartPole-v1", device="cpu"))
    agent = play.Agent(policy, spec, greedy=True)
    observations = np.random.default_rng(0).normal(size=(5, 4)).astype(np.float32)
    acted = []
    for _ in range(3):
        agent.reset()
        acted.append([agent.act(observation) for observation in observations])
    assert acted[0] == acted[1] == acted[2]
    sampled = play.Agent(policy, spec)
    assert {sampled.act(observations[0]) for _ in range(50)} == {0, 1}


@pytest.mark.parametrize("name", ["CartPole-v1", "tests.envs:Everything-v0", "Pendulum-v1"])
def test_export(tmp_path, name):
    """What the manual's `export` writes computes what `Policy.step` does, exactly."""
    manual = (ROOT / "notebooks" / "DOORS.md").read_text()
    codes = re.findall(r"```python\n(.*?)```", manual, re.S)
    (code,) = (code for code in codes if "def export" in code)
    names = {}
    exec(code, names)
    folder = run_here(tmp_path, f"--env-id {name} --total-timesteps 64")
    names["export"](folder, tmp_path / "step.pt2")
    policy, options = play.load_policy(folder)
    spec = ver_ppo.describe_env(options)
    obs = {key: space.sample()[None] for key, space in spec.observations.items()}
    inputs = {key: torch.from_numpy(obs[key].astype(kind)) for key, kind, _ in spec.obs_fields}
    action = torch.from_numpy(np.zeros((1, spec.action_dims), spec.action_dtype))
    state = torch.randn(1, *policy.state_shape)
    given = inputs, action, torch.tensor([False]), state
    found = torch.export.load(tmp_path / "step.pt2").module()(*given)
    for one, other in zip(found, names["Step"](policy)(*given)):
        assert torch.equal(one, other)


def test_folder_or_checkpoint(tmp_path, capsys):
    """Both name a run, for --resume as for --checkpoint. A run that was at its end writes its
    evaluation only once."""
    folder = run_here(tmp_path, "--env-id CartPole-v1 --total-timesteps 64 --eval-episodes 2")
    for place in (folder, folder / "checkpoint.pt"):
        assert ver_ppo.parse_options(["--resume", str(place)]).resume == str(folder)
        assert ver_ppo.main(["--checkpoint", str(place)]) == 0
        assert ver_ppo.main(["--resume", str(place)]) == 0
    assert capsys.readouterr().out.count("evaluation, 2 sampled episodes") == 5
    events = EventAccumulator(str(folder)).Reload()
    assert len(events.Scalars("eval/return")) == 1
    assert events.Scalars("charts/SPS_update")[0].value > 0


def test_hostile_options_are_escaped(tmp_path, capsys):
    """What a checkpoint says of itself cannot write to the terminal what it likes."""
    folder = run_here(tmp_path, "--env-id CartPole-v1 --total-timesteps 64")
    content = saved(folder)
    content["options"]["exp_name"] = content["options"]["env_id"] = "\x1b[2Jwiped"
    ver_ppo.write_checkpoint(content, folder / "checkpoint.pt")
    assert ver_ppo.main(["--resume", str(folder), "--exp-name", "mine"]) == 2
    assert "\x1b" not in capsys.readouterr().out


def test_resume_with_other_options(tmp_path):
    """The weights go on, whatever else changes."""
    folder = run_here(
        tmp_path,
        "--num-workers 0 --total-timesteps 128 --env-kwargs simulator=builtin image_size=16",
    )
    for change in (
        "--env-kwargs image_size=17",
        "--seed 9",
        "--num-steps 8",
        "--num-envs 6",
        "--sampler nover",
        "--ent-coef 0.2",
    ):
        step = saved(folder)["step"]
        args = [
            "--resume",
            str(folder),
            "--total-timesteps",
            str(step + 1),
            "--debug",
            *change.split(),
        ]
        assert ver_ppo.main(args) == 0
        assert saved(folder)["step"] > step
    assert saved(folder)["policy"]["log_ent_coef"].exp() == pytest.approx(0.2)


def test_evaluation(tmp_path, capsys):
    """--checkpoint evaluates: mean and standard error, the same numbers each time, no folder
    made."""
    folder = run_here(tmp_path, "--num-workers 0 --total-timesteps 128 --env-kwargs image_size=16")
    evaluate, lines = ["--checkpoint", str(folder / "checkpoint.pt"), "--eval-episodes"], []
    for how in (["9"], ["9"], ["9", "--greedy"]):
        capsys.readouterr()
        assert ver_ppo.main([*evaluate, *how]) == 0
        lines.append(capsys.readouterr().out.splitlines()[-1])
    numbers = [line.split(": ", 1)[1] for line in lines]
    assert numbers[0] == numbers[1] != numbers[2]
    assert "success" in numbers[0]
    assert "spl" in numbers[0]
    assert " ± " in numbers[0]
    assert lines[0].startswith("evaluation, 9 sampled episodes")
    assert lines[2].startswith("evaluation, 9 greedy episodes")
    assert run_folders(tmp_path) == [folder]


@pytest.mark.parametrize("camera", ["rgb", "depth"])
def test_film(tmp_path, monkeypatch, camera):
    """Of each of three episodes the first steps, as the environment renders them."""
    words = f"image_size=16 camera={camera} simulator=builtin"
    folder = run_here(tmp_path, f"--num-workers 0 --total-timesteps 128 --env-kwargs {words}")
    monkeypatch.setattr(play, "MOST_FRAMES", 4)
    path = tmp_path / "film.gif"
    assert play.main([str(folder), "--film", str(path)]) == 0
    film = Image.open(path)
    assert 3 <= film.n_frames <= 12
    assert (film.size, film.info["loop"], film.info["duration"]) == ((16, 16), 0, 100)
    policy, options = play.load_policy(folder)
    options = replace(options, env_kwargs=(*options.env_kwargs, "render_mode=rgb_array"))
    env = ver_ppo.make_env(options, "val")
    env.reset(seed=0)
    assert np.abs(np.asarray(film.convert("RGB")).astype(int) - env.render()).mean() < 8


@pytest.mark.parametrize("kind", ["gif", "mp4"])
def test_films_of_each_episode(tmp_path, capsys, kind):
    """Are named with what was measured in them."""
    if kind == "mp4":
        imageio = pytest.importorskip("imageio.v2")
        pytest.importorskip("imageio_ffmpeg")
    words = "image_size=16 simulator=builtin"
    folder = run_here(tmp_path, f"--num-workers 0 --total-timesteps 128 --env-kwargs {words}")
    args = [str(folder), "--film", str(tmp_path / f"film.{kind}"), "--episodes", "2", "--each"]
    capsys.readouterr()
    assert play.main(args) == 0
    said = capsys.readouterr().out.splitlines()
    paths = sorted(tmp_path.glob("film*"))
    assert [f"film: {path}" for path in paths] == said
    pattern = rf"film_\d_success=[01]\.00_spl=\d\.\d\d_distance_to_goal=\d+\.\d\d\.{kind}"
    assert len(paths) == 2 and all(re.fullmatch(pattern, path.name) for path in paths)
    if kind == "mp4":
        assert imageio.get_reader(paths[0]).get_data(0).shape[2] == 3
    one_line(capsys, [str(folder), "--film", "film.avi"], "must end in .gif or .mp4", play.main)


def test_nothing_to_film(tmp_path, capsys):
    """An environment that renders nothing, and a folder without a run: one line."""
    line = "--env-id CartPole-v1 --num-workers 0 --total-timesteps 64"
    folder = run_here(tmp_path, f"{line} --wrappers tests.envs:Blind")
    one_line(capsys, [str(folder)], "renders no pictures", play.main)
    one_line(capsys, [str(tmp_path)], "there is no checkpoint", play.main)


def test_evaluation_plays_a_fixed_list(monkeypatch):
    """Each environment plays its share of the episodes, whatever their lengths, with workers as
    without; on a machine with GPUs, none is touched but the policy's."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: pytest.fail("all GPUs were asked for"))
    options = ver_ppo.Options(
        env_id="tests.envs:Count-v0", num_envs=4, eval_episodes=10, hidden_size=8, greedy=True
    )
    spec = ver_ppo.describe_env(options)
    policy = ver_ppo.Policy(spec, options)
    found = [
        ver_ppo.play_episodes(policy, spec, replace(options, num_workers=workers))
        for workers in (0, 2)
    ]
    assert found[0].shape == (10, 2) and (found[0][:, 1] == 7).all()
    np.testing.assert_allclose(np.sort(found[0], axis=0), np.sort(found[1], axis=0))


def test_an_evaluation_is_of_its_own(monkeypatch):
    """The same policy gets the same numbers, whatever --seed trains it and wherever the training's
    random generator stands; and that does not move."""
    options = ver_ppo.Options(env_id="CartPole-v1", num_envs=2, num_workers=0, hidden_size=8)
    options = replace(options, eval_episodes=4)
    spec = ver_ppo.describe_env(options)
    policy = ver_ppo.Policy(spec, options).eval()
    found = []
    for seed in (1, 2):
        torch.manual_seed(10 * seed)
        before = torch.get_rng_state()
        found.append(ver_ppo.play_episodes(policy, spec, replace(options, seed=seed)).tolist())
        assert torch.equal(torch.get_rng_state(), before)
    assert found[0] == found[1]


def test_statistics_follow_learning(tmp_path, monkeypatch):
    """A policy learns with the statistics that it acted with. Then they move, by the share of the
    learning rate that is left."""
    seen = []
    own_update, own_statistics = ver_ppo.ppo_update, ver_ppo.update_statistics

    def mean(policy):
        return policy.encoders[0].normalize.mean_C.tolist()

    def update(policy, *args):
        before = mean(policy)
        logs = own_update(policy, *args)
        assert mean(policy) == before
        seen.append(before)
        return logs

    def statistics(policy, rollout, weight, average):
        before = mean(policy)
        own_statistics(policy, rollout, weight, average)
        seen.append((before, weight))

    monkeypatch.setattr(ver_ppo, "ppo_update", update)
    monkeypatch.setattr(ver_ppo, "update_statistics", statistics)
    run_here(tmp_path, "--env-id CartPole-v1 --num-workers 0 --total-timesteps 256")
    cosine = [0.5 * (1 + math.cos(math.pi * update / 4)) for update in range(4)]
    assert [weight for _, weight in seen[1::2]] == pytest.approx(cosine)
    assert [before for before, _ in seen[1::2]] == seen[::2]
    assert len(set(map(tuple, seen[::2]))) == 4, "they move in every update"


def test_doors(tmp_path):
    """Arguments, wrappers and a policy by name reach workers, evaluation, checkpoint, --resume and
    --checkpoint."""
    line = "--env-id tests.envs:Count-v0 --num-workers 2 --total-timesteps 128 --eval-episodes 2"
    line += " --debug"
    doors = ["--env-kwargs", "limit=5"]
    doors += ["--wrappers", "gymnasium.wrappers:TimeLimit(max_episode_steps=3)"]
    doors += ["--policy", "tests.envs:Wide(times=3)"]
    folder = run_here(tmp_path, line, *doors)
    assert json.loads((folder / "options.json").read_text())["env_kwargs"] == ["limit=5"]
    assert set(logged(folder, "charts/episodic_length").values()) == {3.0}
    assert set(logged(folder, "eval/length").values()) == {3.0}
    assert saved(folder)["policy"]["core.weight"].shape[0] == 16
    assert "core.wide.weight" in saved(folder)["policy"]
    assert saved(folder)["policy"]["core.wide.weight"].shape[0] == 3 * 16
    assert ver_ppo.main(["--resume", str(folder), "--total-timesteps", "256"]) == 0
    assert saved(folder)["step"] == 256
    assert set(logged(folder, "charts/episodic_length").values()) == {3.0}
    options = ver_ppo.parse_options(["--checkpoint", str(folder / "checkpoint.pt"), "--wrappers"])
    assert options.env_kwargs == ("limit=5",)
    assert options.wrappers == ()
    assert options.policy.startswith("tests.envs:Wide")
    assert ver_ppo.make_env(options).unwrapped.limit == 5


class Clocks:
    """In the place of an environment: its steps take this long, and more at the end of an episode;
    a share of that is spent on the CPU, as its clocks show. It may fail at some step."""

    spec = SimpleNamespace(choices=[2, 3], action_dims=2)

    def __init__(self, step_sec, busy, reset_sec=0.0, fails_at=None):
        self.io = {"action": np.zeros((1, 2), int)}
        self.step_sec, self.busy = step_sec, busy
        self.reset_sec, self.fails_at = reset_sec, fails_at
        self.clock, self.cpu, self.steps, self.actions = 0.0, 0.0, 0, set()

    def answer(self):
        if self.steps == self.fails_at:
            raise ver_ppo.EnvironmentFailure("it raised")
        self.steps += 1
        self.actions.add(tuple(self.io["action"][0]))
        took = self.step_sec + self.reset_sec * (self.steps % 40 == 0)
        self.clock += took
        self.cpu += took * self.busy

    def measure(self, monkeypatch, delay=lambda: 0.0):
        """What `time_steps` makes of these clocks, as a specification."""
        monkeypatch.setattr(ver_ppo.time, "perf_counter", lambda: self.clock)
        monkeypatch.setattr(ver_ppo.time, "process_time", lambda: self.cpu)
        monkeypatch.setattr(ver_ppo, "run_delay_sec", delay)
        monkeypatch.setattr(ver_ppo, "count_cores", lambda: 2)
        spaces = {"obs": gym.spaces.Discrete(2)}, gym.spaces.Discrete(2)
        return ver_ppo.EnvSpec(*spaces, (), *ver_ppo.time_steps(self))


@pytest.mark.parametrize(
    "step_sec, busy, workers",
    [
        (20e-6, 1.0, 0),  # very cheap
        (100e-6, 1.0, 1),  # inference takes as long, on the other core
        (200e-6, 1.0, 1),
        (300e-6, 1.0, 1),
        (600e-6, 1.0, 2),  # a core each
        (0.02, 0.99, 2),
        (0.02, 0.0, 16),  # it sleeps
        (0.02, 0.01, 16),
        (0.02, 0.25, 8),
        (0.02, 0.14, 16),  # 14 would do; but two of them would have two environments
        (0.02, 3.0, 1),  # more than one thread
        (5.0, 0.0, 16),
    ],
)
def test_workers_are_counted_by_measuring(monkeypatch, step_sec, busy, workers):
    """By wall and CPU time of some steps, for at most about a second: a process each for simulators
    that wait, one a core for those that compute, none for cheap ones."""
    env = Clocks(step_sec, busy)
    spec = env.measure(monkeypatch)
    assert spec.step_sec == pytest.approx(step_sec)
    assert spec.cpu_sec == pytest.approx(step_sec * busy)
    assert env.clock <= 1.0 + step_sec + 1e-9
    assert env.clock >= 1.0 and len(env.actions) == min(6, env.steps)
    options = ver_ppo.Options(num_envs=16)
    assert ver_ppo.count_workers(options, spec)[0] == workers
    assert ver_ppo.count_workers(replace(options, num_envs=3), spec)[0] == min(workers, 3)
    assert ver_ppo.count_workers(replace(options, num_workers=5), spec)[0] == 5
    monkeypatch.setattr(ver_ppo, "count_cores", lambda: 4)
    assert bool(ver_ppo.count_workers(options, spec)[0]) == bool(workers)


@pytest.mark.parametrize("pushed_aside", [True, False])
def test_a_busy_machine_is_no_simulator_that_waits(monkeypatch, pushed_aside):
    """A step that takes 4 times its CPU time because other programs have the core: the kernel
    counts that as run delay, and it does not count as waiting."""
    env = Clocks(0.005, 0.25)
    spec = env.measure(monkeypatch, delay=lambda: 3 * env.cpu * pushed_aside)
    assert ver_ppo.count_workers(ver_ppo.Options(), spec)[0] == (2 if pushed_aside else 8)


def test_resets_are_measured(monkeypatch):
    """Steps of 1 ms and resets of 2 s that wait, every 40 steps: 51 ms a step, so 16 workers; where
    they compute, one a core."""
    for busy, workers in ((0.0, 16), (1.0, 2)):
        spec = Clocks(0.001, busy, reset_sec=2.0).measure(monkeypatch)
        assert spec.step_sec == pytest.approx(0.051)
        assert ver_ppo.count_workers(ver_ppo.Options(num_envs=16), spec)[0] == workers


def test_measuring_survives_what_training_survives(monkeypatch, tmp_path, capsys):
    """An environment that raises ends the measuring: what was measured until then counts. The run
    goes on, and so does one that cannot be closed."""
    env = Clocks(0.02, 1.0, fails_at=30)
    assert env.measure(monkeypatch).step_sec == pytest.approx(0.02) and env.steps == 30
    monkeypatch.undo()
    line = "--env-id tests.faulty_envs:Faulty-raise-v0 --total-timesteps 64 --num-workers"
    assert saved(run_here(tmp_path / "auto", f"{line} auto"))["step"] == 64
    monkeypatch.setattr(Faulty, "close", lambda self: out_of_paint())
    assert saved(run_here(tmp_path / "0", f"{line} 0"))["step"] == 64
    assert "close() raised RuntimeError('the simulator is out of paint')" in capsys.readouterr().err


def test_run_delay():
    """Two threads on one core: each waits about as long as it runs."""
    if ver_ppo.run_delay_sec() == 0.0:
        pytest.skip("this kernel does not count it")
    done = subprocess.run([sys.executable, "-c", TWO_ON_A_CORE], cwd=ROOT, capture_output=True)
    assert float(done.stdout) > 0.1, done


TWO_ON_A_CORE = """
import os
import time

import ver_ppo

os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
child = os.fork()
begin = ver_ppo.run_delay_sec()
until = time.perf_counter() + 0.5
while time.perf_counter() < until:
    pass
if child:
    print(ver_ppo.run_delay_sec() - begin)
"""


def test_the_bar_moves_while_collecting(tmp_path, monkeypatch):
    """A first rollout may take minutes."""
    seen = []
    own = ver_ppo.tqdm.update
    note = lambda bar, n=1: seen.append(n) or own(bar, n)
    monkeypatch.setattr(ver_ppo.tqdm, "update", note)
    run_here(tmp_path, "--env-id CartPole-v1 --num-workers 0 --total-timesteps 64")
    assert sum(seen) == 64 and max(seen) < 64


def test_first_line(tmp_path, capsys, monkeypatch):
    """What was chosen, and by which figures; an explicit number is not measured."""
    monkeypatch.setattr(ver_ppo, "time_steps", lambda env: [2e-3, 1.9e-3])
    monkeypatch.setattr(ver_ppo, "try_elsewhere", ver_ppo.try_env)
    monkeypatch.setattr(ver_ppo, "count_cores", lambda: 2)
    run_here(tmp_path / "1", "--env-id CartPole-v1 --total-timesteps 64")
    run_here(tmp_path / "2", "--env-id CartPole-v1 --total-timesteps 64 --num-workers 3")
    measured, told = [
        line for line in capsys.readouterr().out.splitlines() if "environments, workers: " in line
    ]
    figures = r"a step takes 2 ms, 1.9 ms of CPU time; 2 cores"
    assert re.search(rf": ver, 4 environments, workers: 2 \({figures}\), ", measured)
    assert "4 environments, workers: 3 (--num-workers), " in told


# what is given, and a word of the answer; numbers out of range are in test_options.py
UNUSABLE = "--env-id tests.faulty_envs:Unusable-v0 --env-kwargs how"
NORMALIZED = "--env-id CartPole-v1 --wrappers gymnasium.wrappers:Normalize"
BAD_INPUT = {
    "--env-id NoSuch-v0": "NoSuch",
    "--env-id no_such_module:Env-v0": "no_such_module",
    "--env-id tests.faulty_envs:Broken-v0": "no licence",
    f"{UNUSABLE}=locked": "the door is locked; ",
    f"{UNUSABLE}=vector": "self.total_reward += float(reward)",
    f"{UNUSABLE}=nan": "reward is nan",
    "--env-id tests.envs:TextAlone-v0": "speech",
    "--env-id tests.envs:TupleAction-v0": "Tuple",
    "--env-id tests.envs:IntegerAction-v0": "Box of floats",
    "--device cuda": "--device cpu",
    "--device abacus": "abacus",
    "--device meta": "meta: cannot be used",
    "--env-id tests.quitter:Env-v0": "--env-id tests.quitter:Env-v0 cannot be found (SystemExit",
    "--env-id minigird/Empty-v0": "write package:Id-v0 for an environment of a package",
    "--wrappers wrap.Noise": "--wrappers wrap.Noise cannot be found",
    "--wrappers FrameStack": "must be MODULE:NAME",
    "--policy tests.envs:Typo": "--policy tests.envs:Typo cannot be found (AttributeError",
    "--checkpoint nowhere.pt": "no checkpoint nowhere.pt",
    "--resume nowhere": "no checkpoint",
    "--policy resnet18 --env-kwargs image_size=32": "64 x 64",
    "--policy resnet18(depth=3)": "takes other arguments, it is ResNet18(spec, options",
    "--extensions no_such_module:Overlap": "no_such_module",
    "--extensions json:dumps": "must be a subclass of ver_ppo.Run",
    "--extensions overlap(speed=3)": "there is no speed, it takes []",
    "--extensions trace(path=3)": "there is no path, it takes ['file']",
    "--extensions overlap async overlap": "is there twice",
    "--extensions trace(file=/nowhere/trace.json)": "/nowhere/trace.json cannot be written",
    "--extensions transfer": "give a checkpoint",
    "--num-minibatches 65": "must be at most --num-steps x --num-envs = 64",
    "--greedy --checkpoint a.pt --resume b": "give either this",
    "--env-id tests.envs:NoSuch-v0": "NoSuch",
    "--env-kwargs colour": "colour: must be KEY=VALUE",
    "--env-kwargs colour=red": "colour",
    "--env-kwargs camera=lidar": "lidar",
    "--env-kwargs image_size=7": "image_size",
    "--env-kwargs simulator=matlab": "matlab",
    "--wrappers no_such_module:Wrapper": "no_such_module",
    "--wrappers gymnasium.wrappers:NoSuch": "NoSuch",
    f"{NORMALIZED}Observation": "RescaleObservation(min_obs=-1, max_obs=1)",
    f"{NORMALIZED}Reward": "leave it out",
    "--wrappers gymnasium.wrappers:TimeLimit": "max_episode_steps",
    "--wrappers gymnasium.wrappers:TimeLimit(steps=3)": "max_episode_steps",
    "--wrappers gymnasium.wrappers:TimeLimit(3)": "(KEY=VALUE, ...)",
    "--wrappers gymnasium.wrappers:TimeLimit(max_episode_steps=3": "(KEY=VALUE, ...)",
    "--policy no_such_module:Policy": "no_such_module",
    "--policy ver_ppo:NoSuch": "NoSuch",
    "--policy ver_ppo:Policy(layers=3)": "Policy(spec, options)",
    "--runs-dir /dev/null/runs": "/dev/null/runs",
}


@pytest.mark.parametrize("line", BAD_INPUT)
def test_bad_input(tmp_path, capsys, monkeypatch, line):
    """One line that says what is wrong, exit status 2, before a folder is made, or any process but
    that of the trial: before that one, too, if a name is misspelt."""
    if line == "--device cuda" and torch.cuda.is_available():
        pytest.skip("this machine has CUDA")
    own = BaseProcess.start
    misspelt = "NoSuch" in line

    def start(process):
        assert process._target is ver_ppo.trial_worker and not misspelt
        own(process)

    monkeypatch.setattr(BaseProcess, "start", start)
    monkeypatch.chdir(ROOT)
    one_line(capsys, small(tmp_path, *line.split()), BAD_INPUT[line])
    assert run_folders(tmp_path) == []


def test_the_device_is_chosen_once(monkeypatch, tmp_path):
    """Everybody gets the number that the main process has chosen: a simulator in another process
    could not know it. On the command line, in a program, and when a checkpoint is evaluated."""
    told = []
    own = ver_ppo.make_env
    note = lambda options, *more: told.append(options.device) or own(options, *more)
    monkeypatch.setattr(ver_ppo, "make_env", note)
    monkeypatch.setattr(ver_ppo, "choose_device", lambda options: torch.device("cpu", 0))
    folder = run_here(tmp_path, "--env-id CartPole-v1 --num-workers 0 --total-timesteps 64")
    options = ver_ppo.parse_options(["--resume", str(folder), "--total-timesteps", "128"])
    assert options.device == "auto"
    ver_ppo.launch(options)
    checkpoint = ["--checkpoint", str(folder / "checkpoint.pt"), "--eval-episodes", "2"]
    assert ver_ppo.main(checkpoint) == 0
    assert len(told) > 10 and set(told) == {"cpu:0", "cpu"}  # torch forgets the 0 of policies


@pytest.mark.parametrize(
    "line, word",
    [("--sampler lidar", "nover"), ("--num-envs four", "int"), ("--speed 3", "--speed")],
)
def test_what_the_parser_refuses(tmp_path, capsys, line, word):
    """Values of another kind and unknown options: exit status 2, and what is accepted."""
    with pytest.raises(SystemExit, match="2"):
        ver_ppo.main(small(tmp_path, *line.split()))
    error = capsys.readouterr().err
    assert line.split()[0] in error
    assert word in error
    assert "Traceback" not in error
    assert run_folders(tmp_path) == []


# sampler, shares of waiting, inference, learning, and of idle workers while waiting; what is said
LIMITS = [
    ("ver", (0.8, 0.1, 0.1, 0.1), "waiting for simulators takes 80 % of the time: try more --num-"),
    ("ver", (0.8, 0.1, 0.1, 0.6), "waiting for simulators takes 80 % of the time: try more --num-"),
    ("sync", (0.7, 0.1, 0.2, 0.6), "waiting for stragglers takes 70 % of the time: try --sampler"),
    ("ver", (0.2, 0.5, 0.3, 0.9), "inference takes 50 % of the time: try a GPU"),
    ("ver", (0.2, 0.3, 0.5, 0.1), "learning takes 50 % of the time: try a GPU"),
    ("ver", (0.2, 0.1, 0.1, 0.1), "all else takes 60 % of the time: try fewer --extensions, or no"),
]


@pytest.mark.parametrize("sampler, shares, words", LIMITS)
def test_what_limits(sampler, shares, words):
    options = ver_ppo.Options(sampler=sampler, device="cpu")
    assert ver_ppo.what_limits(options, *shares).startswith(words)


@pytest.mark.parametrize("device", ["cpu", "cuda", "cuda:1"])
def test_who_has_a_gpu_needs_none(device):
    """Other advice is the same on every device."""
    options = ver_ppo.Options(device=device)
    sizes = "more --num-envs and fewer --num-steps"
    cure = f"a GPU, or {sizes}" if device == "cpu" else sizes
    for shares, what in {(0.2, 0.5, 0.3): "inference", (0.2, 0.3, 0.5): "learning"}.items():
        line = ver_ppo.what_limits(options, *shares, 0.1)
        assert line == f"{what} takes 50 % of the time: try {cure}"
    waits = ver_ppo.what_limits(options, 0.8, 0.1, 0.1, 0.1)
    assert waits.endswith("try more --num-envs, --num-workers, or CPU cores")


@pytest.mark.parametrize("ranks", [None, "1", "2"])
def test_advice_about_ranks_is_for_ranks(monkeypatch, ranks):
    """A process alone waits for no other."""
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    if ranks:
        monkeypatch.setenv("WORLD_SIZE", ranks)
    cure = "ranks that are equally fast" if ranks == "2" else "fewer --extensions, or no --debug"
    line = ver_ppo.what_limits(ver_ppo.Options(), 0.2, 0.1, 0.1, 0.1)
    assert line == f"all else takes 60 % of the time: try {cure}"


def test_what_limits_a_run(tmp_path, capfd):
    """Simulators that sleep, and epochs without end, are found out, in the main process and with
    workers."""
    latency = ["--wrappers", "latency(mean_ms=60, spread=0)"]
    found = {}
    for name, more in {"0": latency, "4": latency, "1": ["--update-epochs", "10"]}.items():
        steps = 768 if name == "1" else 192
        line = f"--env-id CartPole-v1 --total-timesteps {steps} --num-workers {name}"
        run_here(tmp_path / name, line, *more)
        found[name] = re.findall(r"(.*) takes \d+ % of the time", capfd.readouterr().out)
    assert found["0"] == found["4"] == ["waiting for simulators"]
    assert found["1"] == ["learning", "learning"], "after the start, and at the end"


def test_memory_is_flat(tmp_path, monkeypatch):
    """Hundreds of updates later, the process holds no more memory than after the first ones."""
    resident_mib, log = [], ver_ppo.Run.log

    def log_and_weigh(run, *args):
        log(run, *args)
        resident_mib.append(
            int(Path("/proc/self/statm").read_text().split()[1])
            * os.sysconf("SC_PAGE_SIZE")
            / 2**20
        )

    monkeypatch.setattr(ver_ppo.Run, "log", log_and_weigh)
    run_here(
        tmp_path,
        "--env-id tests.envs:Count-v0 --num-workers 0 --num-steps 4 --total-timesteps 3200",
    )
    assert len(resident_mib) == 200
    assert np.mean(resident_mib[-50:]) - np.mean(resident_mib[80:130]) < 4


def test_memory_task(tmp_path):
    """A cue seen at the first step and asked for six steps later: solved with the LSTM, and not
    without."""
    for layers, steps, low, high in ((1, 35_000, 0.95, 1.0), (0, 15_000, 0.35, 0.65)):
        options = ver_ppo.Options(
            env_id="tests.envs:Cue-v0",
            env_kwargs=("delay=6",),
            total_timesteps=steps,
            num_workers=0,
            num_envs=16,
            num_steps=64,
            hidden_size=32,
            learning_rate=3e-3,
            gae_lambda=1.0,
            update_epochs=4,
            num_minibatches=4,
            lstm_layers=layers,
            runs_dir=str(tmp_path),
            exp_name=f"{layers}",
            eval_episodes=0,
            device="cpu",
            learner_threads=1,
        )
        checkpoint = ver_ppo.load_checkpoint(ver_ppo.launch(options) / "checkpoint.pt")
        spec, policy = ver_ppo.build(options)
        policy.load_state_dict(checkpoint["policy"])
        means = ver_ppo.report_evaluation(
            policy, spec, replace(options, eval_episodes=200, greedy=True)
        )
        assert low <= means["eval/return"] <= high


def test_threads_of_learning(monkeypatch):
    """One for each core; one alone for 10 updates, where this thread had to wait for its core: from
    the last time on that it had to."""
    monkeypatch.setattr(ver_ppo, "count_cores", lambda: 3)
    options = ver_ppo.Options()
    learner = ver_ppo.LearnerThreads(options)
    threads = []
    for update in range(33):
        delays = iter([5.0, 5.0 + (update in (1, 14, 18))])  # before and after learning
        monkeypatch.setattr(ver_ppo, "run_delay_sec", lambda: next(delays))
        with learner.chosen():
            threads.append(torch.get_num_threads())
    assert ver_ppo.CROWDED_UPDATES == 10
    assert threads == [3, 3, *[1] * 10, 3, 3, 3, *[1] * 4, *[1] * 10, 3, 3, 3, 3]
    learner.options = replace(options, learner_threads=2)
    monkeypatch.setattr(ver_ppo, "run_delay_sec", lambda: 0.0)
    with learner.chosen():
        assert torch.get_num_threads() == 2


# prints the variable as it is when torch is first imported, and afterwards
SPINS = """
import os
import sys

seen = []


def note(event, args):
    if event == "import" and args[0] == "torch":
        seen.append(os.environ.get("GOMP_SPINCOUNT"))


sys.addaudithook(note)
import {module}

print(seen[0], os.environ["GOMP_SPINCOUNT"])
"""


PROGRAMS = "ver_ppo", "ver_multigpu", "notebooks.extensions.population"


@pytest.mark.parametrize("module, given", [*((name, None) for name in PROGRAMS), ("ver_ppo", "7")])
def test_threads_do_not_spin_for_long(module, given):
    """OpenMP reads its variable once, when torch loads it: 1000, or what the user has set."""
    environment = {name: value for name, value in os.environ.items() if name != "GOMP_SPINCOUNT"}
    if given:
        environment["GOMP_SPINCOUNT"] = given
    command = [sys.executable, "-c", SPINS.format(module=module)]
    more = {"cwd": ROOT, "env": environment, "capture_output": True, "text": True}
    done = subprocess.run(command, **more)
    assert done.stdout.split() == [given or "1000"] * 2, done


QUOTAS = {  # the files of a container, and how many cores they give
    "version 2": ({"cpu.max": "200000 100000\n"}, 2.0),
    "version 2, half a core": ({"cpu.max": "50000 100000\n"}, 0.5),
    "version 2, no limit": ({"cpu.max": "max 100000\n"}, math.inf),
    "version 1": ({"cpu/cpu.cfs_quota_us": "300000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 3.0),
    "version 1, no limit": (
        {"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"},
        math.inf,
    ),
    "nothing there": ({}, math.inf),
    "nonsense": ({"cpu.max": "", "cpu/cpu.cfs_quota_us": "some"}, math.inf),
}


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("container", QUOTAS)
def test_cores_of_a_container(tmp_path, monkeypatch, container, ranks):
    """A container's quota bounds the cores, which the ranks of a machine share; one is always
    there."""
    files, quota = QUOTAS[container]
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert ver_ppo.container_cores(tmp_path) == quota
    own = ver_ppo.container_cores
    monkeypatch.setattr(ver_ppo, "container_cores", lambda: own(tmp_path))
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(6)))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    assert ver_ppo.count_cores() == max(1, int(min(6, quota)) // ranks)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3})
    assert ver_ppo.count_cores() == 1


class Moody(ver_ppo.Policy):
    """Behaves differently in training: with batch normalization and dropout behind its encoders.
    Notes in which mode it acts and learns, which its parts share."""

    noted = []

    def __init__(self, spec, options):
        super().__init__(spec, options)
        self.normal = nn.BatchNorm1d(self.features + ver_ppo.ACTION_FEATURES)
        self.dropout = nn.Dropout(0.5)

    def encode(self, *inputs):
        return self.dropout(self.normal(super().encode(*inputs)))

    def note(self, what):
        (training,) = {module.training for module in self.modules()}
        self.noted.append((what, training))
        return training

    def step(self, *inputs):
        assert not self.note("step")  # in whatever process this is
        return super().step(*inputs)

    def sequences(self, *inputs):
        self.note("sequences")
        return super().sequences(*inputs)


@pytest.mark.parametrize("where", WHERE)
def test_modes_of_a_policy(tmp_path, where):
    """It acts in evaluation mode, in training and in evaluations, and learns in training mode; its
    buffers are in the checkpoint, and go on from there. V-trace looks at it as it acts."""
    line = "--env-id CartPole-v1 --num-minibatches 4 --num-workers"
    line += " 0" if where == "here" else " 1"
    line += " --total-timesteps 192 --eval-episodes 2 --debug --policy tests.test_run:Moody"
    Moody.noted.clear()
    folder = run_here(tmp_path, line, *WHERE[where])
    learned = [training for what, training in Moody.noted if what == "sequences"]
    corrected = [] if where == "here" else [False] * 4
    assert learned == 3 * [*corrected, *[True] * 8]  # two epochs
    phases = [what for what, _ in itertools.groupby(what for what, _ in Moody.noted)]
    # with overlap, another process collects
    turns = ["step", "sequences"] * 3 if where == "here" else ["sequences"]
    assert phases == [*turns, "step"]
    weights = saved(folder)["policy"]
    assert weights["normal.num_batches_tracked"] == 3 * 8
    assert weights["normal.running_mean"].any() and (weights["normal.running_var"] != 1).any()
    Moody.noted.clear()
    assert ver_ppo.main(["--checkpoint", str(folder)]) == 0
    assert Moody.noted and set(Moody.noted) == {("step", False)}
    assert ver_ppo.main(["--resume", str(folder), "--total-timesteps", "256"]) == 0
    assert saved(folder)["policy"]["normal.num_batches_tracked"] == 4 * 8
