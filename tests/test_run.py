"""Whole runs: they can be repeated and resumed, are evaluated, and refuse bad input."""

import ctypes
import itertools
import json
import math
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn

import ver_ppo
from notebooks.extensions import export, play
from tests.helpers import (
    CHECKED,
    ROOT,
    differences,
    in_new_process,
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
    line = f"--env-id {env_id} --num-workers 0 --total-timesteps 256 {extra} --extensions check"
    folder = run_here(tmp_path, line)
    assert folder.name.startswith(env_id.replace(":", "-") + "__ver__1__")
    assert json.loads((folder / "options.json").read_text())["env_id"] == env_id
    assert saved(folder)["step"] == 256 and saved(folder)["version"] == 4
    fresh = ver_ppo.build(ver_ppo.parse_options(small(tmp_path, *line.split())))[1].state_dict()
    moved = [name for name in fresh if not torch.equal(fresh[name], saved(folder)["policy"][name])]
    assert len(moved) == len(fresh) - 1  # all but the fixed entropy coefficient
    losses = "value_loss policy_loss entropy approx_kl clipfrac ent_coef grad_norm skipped"
    losses += " explained_variance"
    tags = {f"losses/{name}" for name in losses.split()}
    tags |= {f"time/{name}_share" for name in ("waiting", "inference", "learning")}
    tags |= {"charts/SPS", "charts/SPS_update", "charts/learning_rate", "charts/return_scale"}
    counted = "batch_size carried_share steps_per_env_min steps_per_env_max policy_lag_max"
    tags |= {f"ver/{name}" for name in f"{counted} importance_weight lost_steps".split()}
    assert tags <= set(EventAccumulator(str(folder)).Reload().Tags()["scalars"])
    assert [*logged(folder, "losses/entropy")] == [64, 128, 192, 256]


def test_workers_are_the_same_environments():
    """Worker processes with several environments each give the same answers as these environments
    in the main process."""
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
            for name in set(ios[0].dtype.names) - {"began_at", "step_sec"}:
                columns = [io[name] for io in ios]
                if name in ("obs", "final_obs"):
                    columns = [column["obs"] for column in columns]
                np.testing.assert_array_equal(*columns, f"{name}, step {step}")
            for pool, io in zip(pools, ios):
                io["action"][:] = np.arange(5)[:, None] % 3
                pool.send(np.array([3, 1, 0, 2, 4]))
    finally:
        for pool in pools:
            pool.close()
    assert nobody_left()


@pytest.mark.parametrize("env_id", ["pointnav", "tests.envs:Count-v0"])
def test_same_seed_same_run(tmp_path, env_id):
    """With --num-workers 0, the same seed gives the same run bit for bit, and another seed gives
    another run."""
    line = f"--env-id {env_id} --num-workers 0 --total-timesteps 192 --seed"
    folders = [run_here(tmp_path / str(k), line, seed) for k, seed in enumerate("334")]
    one, two, other = map(saved, folders)
    assert differences(one, two) == []
    assert {"policy", "optimizer", "recent"} >= set(differences(one, other)) >= {"policy"}


def test_sync_is_exactly_repeatable(tmp_path):
    """Worker processes answer in any order, but `sync` waits for all of them and sorts. So its runs
    are equal bit for bit, also to one without worker processes."""
    line = "--env-id CartPole-v1 --wrappers latency(mean_ms=1,spread=1) --sampler sync"
    line += " --total-timesteps 384 --num-workers"
    folders = [run_here(tmp_path / str(k), line, n) for k, n in enumerate(["2", "2", "0"])]
    one, two, without = map(saved, folders)
    assert one["version"] == 6 and one["recent"]
    assert differences(one, two) == []
    assert differences(one, without) == []


STOPS = [
    ("pointnav", "ppo_update", 5, 320),
    ("Pendulum-v1", "Collector.observe", 90, 320),
    ("tests.envs:Count-v0", "Collector.observe", 3, 0),
]


@pytest.mark.parametrize("env_id, function, times, step", STOPS)
def test_resume_continues(tmp_path, monkeypatch, env_id, function, times, step):
    """A stopped run continues with its weights, optimizer and counters, plays only episodes that it
    has not played, and continues its curves without a gap. Two runs that continue from one
    checkpoint are equal bit for bit."""
    *owner, name = function.split(".")  # a function of ver_ppo.py, or of a class there
    owner = getattr(ver_ppo, *owner) if owner else ver_ppo
    calls, original, seed, played = [], getattr(owner, name), ver_ppo.derive_seed, []

    def stopped(*args):
        calls.append(1)
        if len(calls) == times:
            os.kill(os.getpid(), signal.SIGTERM)
        return original(*args)

    def note(*numbers):
        played.append(numbers)
        return seed(*numbers)

    monkeypatch.setattr(ver_ppo, "derive_seed", note)
    line = f"--env-id {env_id} --num-workers 0 --total-timesteps 640"
    args = small(tmp_path, *line.split(), *CHECKED["here"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, stopped)
        assert ver_ppo.main(args) == 128 + signal.SIGTERM
    (first,), before = run_folders(tmp_path), set(played)
    assert saved(first)["step"] == step and saved(first)["version"] == step // 64
    second, third = (Path(shutil.copytree(first, tmp_path / name)) for name in ("second", "third"))
    own = ["--env-id", env_id] if ":" in env_id else []
    if step:  # nothing is left to do: the run restores a checkpoint and saves it again
        assert ver_ppo.main(["--resume", str(third), "--total-timesteps", str(step), *own]) == 0
        assert differences(saved(first), saved(third)) == []
    played.clear()
    for folder in (first, second):
        assert ver_ppo.main(["--resume", str(folder), *own]) == 0
    assert differences(saved(first), saved(second)) == [] and saved(first)["step"] == 640
    assert not step or not before & set(played)
    assert logged(first, "losses/value_loss") == logged(second, "losses/value_loss")
    assert [*logged(first, "losses/value_loss")] == [64 * k for k in range(1, 11)]


@pytest.mark.parametrize("where", CHECKED)
def test_resume_with_workers(tmp_path, where):
    """A run with worker processes continues, too: counters, schedule, the same folder."""
    line = "--env-id CartPole-v1 --num-workers 2 --total-timesteps 256"
    folder = run_here(tmp_path, line, *CHECKED[where])
    assert ver_ppo.main(["--resume", str(folder), "--total-timesteps", "512"]) == 0
    assert saved(folder)["step"] == 512 and saved(folder)["version"] == 8
    rates = {}
    for k in range(8):
        options = ver_ppo.Options(total_timesteps=256 if k < 4 else 512)
        decay = ver_ppo.Run.decay(SimpleNamespace(step=64 * k, options=options))
        rates[64 * k + 64] = pytest.approx(2e-3 * decay)
    assert logged(folder, "charts/learning_rate") == rates
    assert run_folders(tmp_path) == [folder] and nobody_left()


def test_resume_a_folder(tmp_path, capsys):
    """It must exist. If it has no checkpoint, a new run begins in it. If it has one, the command
    continues it with the saved options, except those on the command line."""
    folder = tmp_path / "job"
    line = f"--env-id CartPole-v1 --num-workers 0 --total-timesteps 64 --resume {folder}"
    command = small(tmp_path / "runs", *line.split())
    one_line(capsys, command, f"there is no such folder (mkdir -p {folder} lets a new run begin")
    assert not (tmp_path / "runs").exists() and not folder.exists()
    folder.mkdir()
    assert ver_ppo.main(command) == 0
    assert saved(folder)["step"] == 64 and not (tmp_path / "runs").exists()
    assert json.loads((folder / "options.json").read_text())["num_steps"] == 16
    # the same command: nothing is left to do
    before = saved(folder)
    assert ver_ppo.main(command) == 0
    assert differences(before, saved(folder)) == []
    # all other options come from the checkpoint
    assert ver_ppo.main(["--resume", str(folder), "--total-timesteps", "128", "--seed", "7"]) == 0
    options = saved(folder)["options"]
    assert saved(folder)["step"] == 128 and len(logged(folder, "charts/SPS")) == 2
    assert (options["num_steps"], options["seed"], options["env_id"]) == (16, 7, "CartPole-v1")
    one_line(capsys, ["--resume", str(folder / "checkpoint.pt")], "there is no such folder")
    # a checkpoint that is older than the curves, as after SIGKILL: no step has two points
    ver_ppo.write_checkpoint(before, folder / "checkpoint.pt")
    assert ver_ppo.main(["--resume", str(folder), "--total-timesteps", "192"]) == 0
    assert [*logged(folder, "charts/SPS")] == [64, 128, 192]


def test_greedy_agents():
    """After `reset`, a greedy agent repeats itself, as if it were new. Other agents sample."""
    options = ver_ppo.Options(env_id="CartPole-v1", num_workers=0, device="cpu")
    _, policy = ver_ppo.build(options)
    env = ver_ppo.make_env(options)
    agent = play.Agent(policy, env, greedy=True)
    observations = np.random.default_rng(0).normal(size=(5, 4)).astype(np.float32)
    acted = []
    for _ in range(3):
        agent.reset()
        acted.append([agent.act(observation) for observation in observations])
    assert acted[0] == acted[1] == acted[2]
    sampled = play.Agent(policy, env)
    assert {sampled.act(observations[0]) for _ in range(50)} == {0, 1}


@pytest.mark.parametrize("name", ["CartPole-v1", "pointnav", "Pendulum-v1"])
def test_export(tmp_path, name):
    """`export` writes a file that computes exactly what `Policy.step` does."""
    folder = run_here(tmp_path, f"--env-id {name} --num-workers 0 --total-timesteps 64")
    export.export(folder, tmp_path / "step.pt2")
    policy, options = play.load_policy(folder)
    spec = ver_ppo.describe_env(options)
    obs = {key: torch.rand(1, *shape) for key, _, shape in spec.obs_fields}
    action = torch.from_numpy(np.zeros((1, spec.action_dims), spec.action_dtype))
    state = torch.randn(1, *policy.state_shape)
    given = obs, action, torch.tensor([False]), state
    found = torch.export.load(tmp_path / "step.pt2").module()(*given)
    for one, other in zip(found, export.Step(policy)(*given)):
        assert torch.equal(one, other)


def test_folder_or_checkpoint(tmp_path, capsys):
    """--checkpoint accepts both. --resume of a run at its end evaluates again, and writes that."""
    line = "--env-id CartPole-v1 --num-workers 0 --total-timesteps 64 --eval-episodes 2"
    folder = run_here(tmp_path, line)
    for place in (folder, folder / "checkpoint.pt"):
        assert ver_ppo.main(["--checkpoint", str(place)]) == 0
    assert ver_ppo.main(["--resume", str(folder)]) == 0
    assert capsys.readouterr().out.count("evaluation, 2 sampled episodes") == 4
    events = EventAccumulator(str(folder)).Reload()
    assert len(events.Scalars("eval/return")) == 2
    assert events.Scalars("charts/SPS_update")[0].value > 0
    given = ["--checkpoint", str(folder), "--eval-episodes", "0"]
    one_line(capsys, given, "--eval-episodes 0: must be a positive number with --checkpoint")


def test_a_checkpoint_needs_no_environment(tmp_path, monkeypatch):
    """The Spec lies in the checkpoint. So a policy is loaded without making an environment, on a
    machine that need not have the simulator."""
    line = "--env-id tests.envs:Everything-v0 --num-workers 0 --total-timesteps 64"
    folder = run_here(tmp_path, line)
    given = ["--checkpoint", str(folder), "--env-id", "tests.envs:Everything-v0"]
    options = ver_ppo.parse_options(given)
    expected = ver_ppo.describe_env(options)
    for name in ("make_env", "describe_env", "try_env"):
        monkeypatch.setattr(ver_ppo, name, lambda *_: pytest.fail("an environment was made"))
    spec, policy, _ = play.load_saved(options.checkpoint, trust=True)
    assert spec == expected and spec.choices == [3, 2, 4] and not policy.training
    weights = saved(folder)["policy"]
    assert all(torch.equal(part, weights[name]) for name, part in policy.state_dict().items())
    assert ver_ppo.Spec(**saved(folder)["spec"]) == spec
    assert play.load_policy(folder, trust=True)[0].choices == [3, 2, 4]


def test_resume_with_other_options(tmp_path):
    """The run continues with its weights, whatever else changes."""
    line = "--num-workers 0 --total-timesteps 128 --env-kwargs simulator=builtin image_size=16"
    folder = run_here(tmp_path, line)
    changes = "--seed 9 --num-steps 8", "--num-envs 6"
    for change in (*changes, "--sampler nover --ent-coef 0.2"):
        step = saved(folder)["step"]
        args = ["--resume", str(folder), "--total-timesteps", str(step + 1), *CHECKED["here"]]
        assert ver_ppo.main([*args, *change.split()]) == 0
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
    assert " +- " in numbers[0]  # a terminal need not know ±
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
    """Their names contain the metrics of the episode."""
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
    """One line for an environment that renders nothing, for a folder without a run, and for a run
    that names code."""
    line = "--env-id CartPole-v1 --num-workers 0 --total-timesteps 64"
    folder = run_here(tmp_path, f"{line} --wrappers tests.envs:Blind")
    one_line(capsys, [str(folder)], "--trust is enough", play.main)
    one_line(capsys, [str(folder), "--trust"], "renders no pictures", play.main)
    one_line(capsys, [str(tmp_path)], "there is no checkpoint", play.main)


def test_evaluation_plays_a_fixed_list(monkeypatch):
    """Each environment plays its share of the episodes, whatever their lengths, with and without
    workers. On a machine with GPUs, only the policy's own is touched."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: pytest.fail("all GPUs were asked for"))
    sizes = {"num_envs": 4, "num_workers": 0, "eval_episodes": 10, "hidden_size": 8}
    options = ver_ppo.Options(env_id="tests.envs:Count-v0", greedy=True, **sizes)
    spec = ver_ppo.describe_env(options)
    policy = ver_ppo.Policy(spec, options)
    found = []
    for workers in (0, 2):
        with_workers = replace(options, num_workers=workers)
        found.append(ver_ppo.play_episodes(policy, spec, with_workers))
    assert found[0].shape == (10, 2) and (found[0][:, 1] == 7).all()
    np.testing.assert_allclose(np.sort(found[0], axis=0), np.sort(found[1], axis=0))


def test_an_evaluation_is_of_its_own(monkeypatch):
    """The same policy gets the same numbers, whatever --seed trains it and wherever the training's
    random generator stands. The evaluation does not move that generator."""
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
        return policy.encoders[0].source.normalize.mean_C.tolist()

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


def test_doors(tmp_path, capsys):
    """Arguments, wrappers and a policy by name reach workers, evaluation, checkpoint, --resume and
    --checkpoint. A checkpoint's names of modules count only if the command line has them, too."""
    line = "--num-workers 2 --total-timesteps 128 --eval-episodes 2"
    named = {
        "--env-id": "tests.envs:Count-v0",
        "--wrappers": "gymnasium.wrappers:TimeLimit(max_episode_steps=3)",
        "--policy": "tests.envs:Wide(times=3)",
    }
    doors = [word for item in named.items() for word in item]
    kept = ["--env-kwargs", "limit=5", *CHECKED["here"]]
    folder = run_here(tmp_path, line, *doors, *kept)
    assert json.loads((folder / "options.json").read_text())["env_kwargs"] == ["limit=5"]
    assert set(logged(folder, "charts/episodic_length").values()) == {3.0}
    assert set(logged(folder, "eval/length").values()) == {3.0}
    assert saved(folder)["policy"]["core.weight"].shape[0] == 16
    assert saved(folder)["policy"]["core.wide.weight"].shape[0] == 3 * 16
    resume = ["--resume", str(folder), "--total-timesteps", "256"]
    given = [*resume]
    for option, text in named.items():  # each message says which option to repeat
        capsys.readouterr()
        assert ver_ppo.main(given) == 2
        error = capsys.readouterr().err
        assert len(error.splitlines()) == 1
        repeat = shlex.split(error.split("if you trust it, give ")[1])
        assert repeat == [option, text]
        given += repeat
    assert ver_ppo.main(given) == 0
    assert saved(folder)["step"] == 256
    assert set(logged(folder, "charts/episodic_length").values()) == {3.0}
    evaluate = ["--checkpoint", str(folder / "checkpoint.pt"), *doors]
    options = ver_ppo.parse_options([*evaluate, "--wrappers"])
    assert options.env_kwargs == ("limit=5",)
    assert options.wrappers == ()
    assert options.policy == named["--policy"]
    assert ver_ppo.make_env(options).unwrapped.limit == 5


class Clocks:
    """In place of an environment: its steps take `step_sec`, and the last one of an episode of 40
    takes `reset_sec` more. A share `busy` of that is CPU time. Its clocks show both. Step
    `fails_at` raises."""

    spec = SimpleNamespace(choices=[2, 3], action_dims=2)

    def __init__(self, step_sec, busy, reset_sec=0.0, fails_at=None):
        self.io = {"action": np.zeros((1, 2), int)}
        self.step_sec = step_sec
        self.busy = busy
        self.reset_sec = reset_sec
        self.fails_at = fails_at
        self.clock = 0.0
        self.cpu = 0.0
        self.steps = 0
        self.actions = set()

    def step(self):
        if self.steps == self.fails_at:
            raise RuntimeError("it raised")
        self.steps += 1
        self.actions.add(tuple(self.io["action"][0]))
        took = self.step_sec + self.reset_sec * (self.steps % 40 == 0)
        self.clock += took
        self.cpu += took * self.busy

    def measure(self, monkeypatch, delay=lambda: 0.0):
        """What `time_steps` makes of these clocks, as a Spec."""
        monkeypatch.setattr(ver_ppo.time, "perf_counter", lambda: self.clock)
        monkeypatch.setattr(ver_ppo.time, "process_time", lambda: self.cpu)
        monkeypatch.setattr(ver_ppo, "run_delay_sec", delay)
        monkeypatch.setattr(ver_ppo, "count_cores", lambda: 2)
        calls = ver_ppo.time_steps(self)
        try:
            while True:
                next(calls)
        except StopIteration as end:
            return ver_ppo.Spec({}, [2, 3], 2, [], *end.value)


@pytest.mark.parametrize(
    "step_sec, busy, workers",
    [
        (20e-6, 1.0, 1),  # very cheap
        (100e-6, 1.0, 1),  # inference takes as long, on the other core
        (200e-6, 1.0, 1),
        (300e-6, 1.0, 1),
        (600e-6, 1.0, 2),  # a core each
        (0.02, 0.99, 2),
        (0.02, 0.0, 16),  # it sleeps
        (0.02, 0.01, 16),
        (0.02, 0.25, 8),
        (0.02, 0.14, 14),
        (0.02, 3.0, 2),  # more than one thread
        (5.0, 0.0, 16),
    ],
)
def test_workers_are_counted_by_measuring(monkeypatch, step_sec, busy, workers):
    """By wall time and CPU time of the steps of about a second: up to a process each for simulators
    that wait, one per core for simulators that compute. At least one."""
    env = Clocks(step_sec, busy)
    spec = env.measure(monkeypatch)
    assert spec.step_sec == pytest.approx(step_sec)
    assert spec.cpu_sec == pytest.approx(step_sec * busy)
    assert env.clock <= 1.0 + step_sec + 1e-9
    assert env.clock >= 1.0 and len(env.actions) == min(6, env.steps)
    options = ver_ppo.Options(num_envs=16)
    assert ver_ppo.count_workers(options, spec) == workers
    assert ver_ppo.count_workers(replace(options, num_envs=3), spec) == min(workers, 3)
    for given in (0, 5):
        assert ver_ppo.count_workers(replace(options, num_workers=given), spec) == given


@pytest.mark.parametrize("pushed_aside", [True, False])
def test_a_busy_machine_is_no_simulator_that_waits(monkeypatch, pushed_aside):
    """A step may take 4 times its CPU time because other programs have the core. The kernel counts
    that as run delay, and it does not count as waiting."""
    env = Clocks(0.005, 0.25)
    spec = env.measure(monkeypatch, delay=lambda: 3 * env.cpu * pushed_aside)
    assert ver_ppo.count_workers(ver_ppo.Options(), spec) == (2 if pushed_aside else 8)


def test_resets_are_measured(monkeypatch):
    """With steps of 1 ms, and resets of 2 s every 40 steps, a step takes 51 ms. So there are 16
    workers if the resets wait, and one per core if they compute."""
    for busy, workers in ((0.0, 16), (1.0, 2)):
        spec = Clocks(0.001, busy, reset_sec=2.0).measure(monkeypatch)
        assert spec.step_sec == pytest.approx(0.051)
        assert ver_ppo.count_workers(ver_ppo.Options(num_envs=16), spec) == workers


def test_measuring_survives_what_training_survives(monkeypatch, tmp_path):
    """An environment that raises ends the measuring. The steps before it count, and the run
    begins."""
    env = Clocks(0.02, 1.0, fails_at=30)
    assert env.measure(monkeypatch).step_sec == pytest.approx(0.02) and env.steps == 30
    monkeypatch.undo()
    line = "--env-id tests.faulty_envs:Faulty-raise-v0 --total-timesteps 64 --num-workers auto"
    assert saved(run_here(tmp_path, line))["step"] == 64


def test_run_delay():
    """Two processes on one core: each waits about as long as it runs."""
    if ver_ppo.run_delay_sec() == 0.0:
        pytest.skip("this kernel does not count it")
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    other = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        began_sec = ver_ppo.run_delay_sec()
        until = time.perf_counter() + 0.5
        while time.perf_counter() < until:
            pass
        assert ver_ppo.run_delay_sec() - began_sec > 0.1
    finally:
        os.sched_setaffinity(0, cores)
        other.kill()
        other.wait()


def test_the_bar_moves_while_collecting(tmp_path, monkeypatch):
    """A first rollout may take minutes. It moves the bar in every pass."""
    seen = []
    own = ver_ppo.tqdm.update
    note = lambda bar, n=1: seen.append(n) or own(bar, n)
    monkeypatch.setattr(ver_ppo.tqdm, "update", note)
    run_here(tmp_path, "--env-id CartPole-v1 --num-workers 0 --total-timesteps 64")
    assert sum(seen) == 64 and max(seen) < 64


# options, and a part of the answer; numbers out of range are in test_options.py
UNUSABLE = "--env-id tests.faulty_envs:Unusable-v0 --env-kwargs how"
LIMIT = "--wrappers gymnasium.wrappers:TimeLimit"
BAD_INPUT = {
    "--env-id NoSuch-v0": "NoSuch",
    "--env-id no_such_module:Env-v0": "no_such_module",
    "--env-id tests.envs:NoSuch-v0": "NoSuch",
    "--env-id tests.quitter:Env-v0": "--env-id tests.quitter:Env-v0 cannot be loaded (SystemExit",
    "--env-id minigird/Empty-v0": "is written as package:Id-v0",
    "--env-id tests.faulty_envs:Broken-v0": "no licence",
    "--env-id tests.envs:TextAlone-v0": "no part of the observation holds numbers",
    "--env-id tests.envs:TupleAction-v0": "Tuple",
    "--env-id tests.envs:IntegerAction-v0": "Box of floats",
    f"{UNUSABLE}=locked": "the door is locked; ",
    f"{UNUSABLE}=vector": "reward = float(reward)",
    f"{UNUSABLE}=nan": "reward nan",
    "--env-kwargs colour": "colour: must be KEY=VALUE",
    "--env-kwargs colour=red": "colour",
    "--extensions overlap async overlap": "is given twice, or after its subclass",
    "--wrappers wrap.Noise": "must be MODULE:NAME, or one of pointnav, ",
    "--wrappers FrameStack": "must be MODULE:NAME",
    "--wrappers no_such_module:Wrapper": "no_such_module",
    "--wrappers gymnasium.wrappers:NoSuch": "NoSuch",
    LIMIT: "max_episode_steps",
    f"{LIMIT}(steps=3)": f"{LIMIT}(steps=3): ",
    f"{LIMIT}(3)": "(KEY=VALUE, ...)",
    f"{LIMIT}(max_episode_steps=3": "(KEY=VALUE, ...)",
    "--policy no_such_module:Policy": "no_such_module",
    "--policy ver_ppo:NoSuch": "NoSuch",
    "--policy tests.envs:Typo": "--policy tests.envs:Typo cannot be loaded (AttributeError",
    "--policy ver_ppo:Policy(layers=3)": "--policy ver_ppo:Policy(layers=3): ",
    "--policy resnet18(depth=3)": "--policy resnet18(depth=3): ",
    "--policy resnet18 --env-kwargs image_size=32": "64 x 64",
    "--extensions no_such_module:Overlap": "no_such_module",
    "--extensions json:dumps": "must be a subclass of ver_ppo.Run",
    "--extensions overlap(speed=3)": "there is no speed, it takes []",
    "--extensions trace(path=3)": "there is no path, it takes ['file']",
    "--extensions trace(file=/nowhere/trace.json)": "/nowhere/trace.json cannot be written",
    "--extensions transfer": "give a checkpoint",
    "--device cuda": "--device cpu",
    "--device abacus": "abacus",
    "--device meta": "meta: cannot be used",
    "--num-minibatches 65": "must be at most --num-steps x --num-envs = 64",
    "--num-workers 5": "--num-workers 5: must be at most --num-envs, which is 4",
    "--checkpoint nowhere.pt": "no checkpoint nowhere.pt",
    "--resume nowhere": "no such folder",
    "--greedy --checkpoint a.pt --resume b": "give either this",
}


@pytest.mark.parametrize("line", BAD_INPUT)
def test_bad_input(tmp_path, capsys, monkeypatch, line):
    """One line names the mistake, exit status 2. Before it, no folder is made and no process is
    started."""
    if line == "--device cuda" and torch.cuda.is_available():
        pytest.skip("this machine has CUDA")
    monkeypatch.setattr(BaseProcess, "start", lambda process: pytest.fail("it started a process"))
    monkeypatch.chdir(ROOT)
    args = small(tmp_path, "--num-workers", "0", *line.split())
    one_line(capsys, args, BAD_INPUT[line])
    assert run_folders(tmp_path) == []


MISTAKES = {  # the trial's process is started, or not
    "--env-id tests.faulty_envs:Broken-v0": ("no licence", 1),
    "--env-id tests.envs:TextAlone-v0": ("no part of the observation holds numbers", 1),
    "--policy ver_ppo:NoSuch": ("NoSuch", 0),
    "--wrappers gymnasium.wrappers:NoSuch": ("NoSuch", 1),
    "--gamma 2": ("--gamma 2.0: must be within 0..1", 0),
}


@pytest.mark.parametrize("line", MISTAKES)
def test_bad_input_with_workers(tmp_path, capsys, monkeypatch, line):
    """The same if environments have processes: only the trial's process is started, which loads all
    that belongs to the environment, and none at all for other mistakes."""
    started = []
    own = BaseProcess.start
    note = lambda process: started.append(process._target) or own(process)
    monkeypatch.setattr(BaseProcess, "start", note)
    word, count = MISTAKES[line]
    one_line(capsys, small(tmp_path, "--num-workers", "2", *line.split()), word)
    assert started == [ver_ppo.worker_process] * count
    assert run_folders(tmp_path) == [] and nobody_left()


def test_the_device_is_chosen_once(monkeypatch, tmp_path):
    """Every environment gets the device that the main process has chosen, because a simulator in
    another process could not know it. This is so on the command line, in a program, and when a
    checkpoint is evaluated."""
    told = []
    own = ver_ppo.make_env
    note = lambda options, *more, **how: told.append(options.device) or own(options, *more, **how)
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
    """Values of another kind, and unknown options: exit status 2. The message says which values are
    accepted."""
    with pytest.raises(SystemExit, match="2"):
        ver_ppo.main(small(tmp_path, *line.split()))
    error = capsys.readouterr().err
    assert line.split()[0] in error
    assert word in error
    assert "Traceback" not in error
    assert run_folders(tmp_path) == []


def test_where_the_time_goes(tmp_path, capsys):
    """The last line of a run tells slow environments and long epochs apart. So do its logs."""
    slow = ["--wrappers", "latency(mean_ms=60, spread=0)", "--num-workers", "4"]
    for name, more in {"waiting": slow, "learning": ["--update-epochs", "30"]}.items():
        line = "--env-id CartPole-v1 --num-workers 0 --total-timesteps 128"
        folder = run_here(tmp_path / name, line, *more)
        told = capsys.readouterr().out.splitlines()[-1]
        assert told.startswith("step 128; time: ") and "MANUAL.md#where-the-time-goes" in told
        shares = re.findall(r"(waiting|inference|learning)\D* (\d+) %", told)
        found = {word: int(share) for word, share in shares}
        assert max(found, key=found.get) == name and sum(found.values()) <= 101, told
        logs = {word: logged(folder, f"time/{word}_share")[128] for word in found}
        assert max(logs, key=logs.get) == name and sum(logs.values()) <= 1


PR_SET_THP_DISABLE = 41  # of linux/prctl.h


def weigh(tmp_path):
    """Run 200 updates in this process, which must be new. Returns how many MiB of memory it had
    after each update, swapped out or not, without mapped files."""
    held_mib = []
    log = ver_ppo.Run.log
    # otherwise, one written byte can count as a huge page of 2 MiB
    ctypes.CDLL(None).prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0)

    def log_and_weigh(run, *args):
        log(run, *args)
        memory = Path("/proc/self/smaps_rollup").read_text()
        held_kib = re.findall(r"^(?:Pss_Anon|Pss_Shmem|Swap): +(\d+) kB", memory, re.M)
        held_mib.append(sum(map(int, held_kib)) / 1024)

    ver_ppo.Run.log = log_and_weigh
    line = "--env-id tests.envs:Count-v0 --num-workers 0 --num-envs 1 --num-steps 8"
    run_here(tmp_path, f"{line} --num-minibatches 2 --update-epochs 1 --total-timesteps 1600")
    return held_mib


def test_memory_is_flat(tmp_path):
    """Hundreds of updates later, the process holds no more memory than after the first ones. The
    process is new, because leftovers of other tests can change its memory by some MiB."""
    held_mib = in_new_process(weigh, tmp_path)
    assert len(held_mib) == 200
    assert np.mean(held_mib[-50:]) - np.mean(held_mib[80:130]) < 1


@pytest.mark.parametrize("layers, steps, low, high", [(1, 14_000, 0.95, 1.0), (0, 2_000, 0.3, 0.7)])
def test_memory_task(tmp_path, layers, steps, low, high):
    """A cue seen at the first step and asked for three steps later: solved with the LSTM. Without
    it, and without the previous action, all cues look the same when they are asked for."""
    options = ver_ppo.Options(
        env_id="tests.envs:Cue-v0",
        env_kwargs=("delay=3",),
        policy="tests.envs:Actionless",
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
        eval_episodes=0,
        device="cpu",
        learner_threads=1,
    )
    folder = ver_ppo.launch(options)
    spec, policy, _ = play.load_saved(folder / "checkpoint.pt", trust=True)
    evaluation = replace(options, eval_episodes=200, greedy=True)
    means = ver_ppo.report_evaluation(policy, spec, evaluation)
    assert low <= means["return"] <= high


def test_threads_of_learning(monkeypatch):
    """One for each core, at most four, or as many as the option says."""
    threads = []
    note = lambda *_: threads.append(torch.get_num_threads()) or {"losses/skipped": 0.0}
    monkeypatch.setattr(ver_ppo, "ppo_update", note)
    monkeypatch.setattr(ver_ppo, "update_statistics", lambda *_: None)
    run = SimpleNamespace(options=ver_ppo.Options(), average=None, decay=lambda: 0.5)
    run.policy = torch.nn.Linear(1, 1)
    run.optimizer = torch.optim.SGD(run.policy.parameters(), lr=1.0)
    run.learning_rates = [4.0]
    for cores in (1, 3, 9):
        monkeypatch.setattr(ver_ppo, "count_cores", lambda: cores)
        ver_ppo.Run.update(run, None)
    assert run.optimizer.param_groups[0]["lr"] == 2.0
    run.options = replace(run.options, learner_threads=2)
    ver_ppo.Run.update(run, None)
    assert threads == [1, 3, 4, 2]


# prints variables as they are when torch is first imported, and ends
VARIABLES = {"GOMP_SPINCOUNT": "1000", "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64"}
IMPORTS = """
import os
import sys


def note(event, args):
    if event == "import" and args[0] == "torch":
        print(*[os.environ.get(name) for name in {names}])
        sys.exit()


sys.addaudithook(note)
import {module}
"""


@pytest.mark.parametrize("module", ["ver_ppo", "ver_multigpu", "notebooks.extensions.population"])
@pytest.mark.parametrize("given", [None, "7"])
def test_variables_that_torch_reads(module, given):
    """They are set before torch is imported, unless the user has set them. (oneDNN reads its own at
    the first computation. So it is enough if ver_ppo.py sets it.)"""
    environment = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    expected = dict(VARIABLES)
    if module != "ver_ppo":
        del expected["ONEDNN_PRIMITIVE_CACHE_CAPACITY"]
    if given:
        expected = dict.fromkeys(expected, given)
        environment |= expected
    code = IMPORTS.format(module=module, names=list(expected))
    more = {"cwd": ROOT, "env": environment, "capture_output": True, "text": True}
    done = subprocess.run([sys.executable, "-c", code], **more)
    assert done.stdout.split() == list(expected.values()), done


def test_cores(monkeypatch):
    """The ranks of a machine share its cores. One is always there."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(6)))
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert ver_ppo.count_cores() == 6
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert ver_ppo.count_cores() == 1
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3})
    assert ver_ppo.count_cores() == 1


class Moody(ver_ppo.Policy):
    """Behaves differently in training, because it has batch normalization and dropout behind its
    encoders. Notes the mode in which it acts and learns. All its parts must be in the same mode."""

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


@pytest.mark.parametrize("where", CHECKED)
def test_modes_of_a_policy(tmp_path, where):
    """It acts in evaluation mode, in training and in evaluations, and learns in training mode. Its
    buffers are in the checkpoint, and continue from there. V-trace evaluates it in the mode in
    which it acts."""
    line = "--env-id CartPole-v1 --num-minibatches 4 --num-workers"
    line += " 0" if where == "here" else " 1"
    line += " --total-timesteps 192 --eval-episodes 2"
    own = ["--policy", "tests.test_run:Moody"]
    Moody.noted.clear()
    folder = run_here(tmp_path, line, *own, *CHECKED[where])
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
    assert ver_ppo.main(["--checkpoint", str(folder), *own]) == 0
    assert Moody.noted and set(Moody.noted) == {("step", False)}
    assert ver_ppo.main(["--resume", str(folder), "--total-timesteps", "256", *own]) == 0
    assert saved(folder)["policy"]["normal.num_batches_tracked"] == 4 * 8
