"""Whole runs: reproducible, resumable, evaluated, and what happens to bad input and failing environments."""

import json
import multiprocessing.process
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import ver_ppo
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

ROOT = Path(__file__).resolve().parents[1]
SMALL = [
    "--num-envs",
    "4",
    "--num-steps",
    "16",
    "--hidden-size",
    "16",
    "--eval-episodes",
    "0",
    "--device",
    "cpu",
    "--learner-threads",
    "1",
]


def small(tmp_path, *args):
    """Arguments of a small run in this folder."""
    return [*SMALL, "--runs-dir", str(tmp_path), *args]


def run_folders(tmp_path):
    return sorted(path for path in tmp_path.iterdir() if path.is_dir())


def same(one, two):
    """Whether two checkpoints hold the same weights, optimizer state, generators, environments and results."""
    if isinstance(one, torch.Tensor):
        return torch.equal(one, two)
    if isinstance(one, dict):
        return one.keys() == two.keys() and all(same(one[key], two[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(two) and all(map(same, one, two))
    return one == two or (one != one and two != two)


def logged_values(folder, tag):
    """The curve of a tag in TensorBoard."""
    return [event.value for event in EventAccumulator(str(folder)).Reload().Scalars(tag)]


def differences(one, two):
    return [key for key in one if key != "options" and not same(one[key], two[key])]


def children():
    """Processes that this test's process has started and that still live."""
    me, found = os.getpid(), []
    for status in Path("/proc").glob("[0-9]*/status"):
        try:
            lines = dict(line.split(":\t", 1) for line in status.read_text().splitlines() if ":\t" in line)
        except OSError:
            continue
        command = (status.parent / "cmdline").read_bytes()
        if int(lines["PPid"]) == me and b"forkserver" not in command and b"resource_tracker" not in command:
            found.append(command)
    return found


def alive_in_group(group):
    """Processes of this group that have not ended (a zombie has; who adopts it may be slow to notice)."""
    alive = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, its_group = path.read_text().rsplit(")", 1)[1].split()[:3]
        except OSError:
            continue
        if int(its_group) == group and state != "Z":
            alive.append(path.parent.name)
    return alive


def wait_until(condition, seconds=60):
    """Until this function returns something true. Machines that run tests are slow now and then."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.05)


def fill_disk(*args, **more):
    """In the place of whatever writes."""
    raise OSError("No space left on device")


def is_collecting(process):
    """Whether this run's processes are there: itself, fork server, resource tracker, two workers."""
    return len(alive_in_group(process.pid)) >= 5


@pytest.mark.parametrize("env_id", ["pointnav", "tests.envs:Everything-v0", "tests.envs:Continuous-v0", "CartPole-v1"])
def test_train(tmp_path, env_id):
    """Work happens: weights move, rollouts hold their invariants, TensorBoard and options are written."""
    extra = ["--camera", "rgb", "--image-size", "16"] if env_id == "pointnav" else ["--lstm-layers", "2"]
    args = small(tmp_path, "--env-id", env_id, "--num-workers", "0", "--total-timesteps", "256", "--debug", *extra)
    assert ver_ppo.main(args) == 0
    (folder,) = run_folders(tmp_path)
    assert folder.name.startswith(env_id.replace(":", "-") + "__ver__1__")
    options = ver_ppo.parse_options(args)
    assert json.loads((folder / "options.json").read_text())["env_id"] == env_id
    saved = ver_ppo.load_checkpoint(folder / "checkpoint.pt")
    assert saved["progress"]["step"] == 256 and saved["collectors"][0]["version"] == 4
    torch.manual_seed(options.seed)
    fresh = ver_ppo.Policy(ver_ppo.describe_env(options), options).state_dict()
    moved = [name for name in fresh if not torch.equal(fresh[name], saved["policy"][name])]
    assert len(moved) == len(fresh) - 1  # all but the fixed entropy coefficient
    events = EventAccumulator(str(folder)).Reload()
    tags = {
        *(f"charts/{name}" for name in ("SPS", "learning_rate")),
        *(
            f"losses/{name}"
            for name in ("value_loss", "policy_loss", "entropy", "approx_kl", "clipfrac", "explained_variance")
        ),
        *(f"time/{name}_share" for name in ("waiting", "inference", "learning")),
        *(f"ver/{name}" for name in ("batch_size", "steps_per_env_min", "steps_per_env_max", "carried_share")),
    }
    assert tags <= set(events.Tags()["scalars"])
    assert [event.step for event in events.Scalars("losses/entropy")] == [64, 128, 192, 256]


@pytest.mark.parametrize("start_method", ["forkserver", "spawn"])
def test_workers_are_the_same_environments(tmp_path, start_method):
    """Worker processes, several environments each, answer what the same environments answer in the main process."""
    options = ver_ppo.Options(env_id="tests.envs:Count-v0", num_envs=5, num_workers=2)
    spec = ver_ppo.describe_env(options)
    transfers = [ver_ppo.Transfer(spec, 5) for _ in range(2)]
    inline = ver_ppo.InlineWorkers(options, "train", spec, transfers[0], [(0, [])] * 5)
    workers = ver_ppo.Workers(options, "train", spec, transfers[1], [(0, [])] * 5, start_method)
    try:
        for step in range(20):
            answered = {pool: [] for pool in (inline, workers)}
            for pool, rows in answered.items():
                while len(rows) < 5:
                    rows += pool.receive(5.0)
                assert sorted(rows) == [0, 1, 2, 3, 4]
            for part in ("obs", "final_obs", "host"):
                for name, one in getattr(transfers[0], part).items():
                    if name not in ("step_sec", "step_began"):
                        assert torch.equal(one, getattr(transfers[1], part)[name]), (step, name)
            for pool, transfer in zip((inline, workers), transfers):
                transfer.action[:] = np.arange(5)[:, None] % 3
                pool.send([3, 1, 0, 2, 4])
    finally:
        workers.close()
    assert children() == []


def test_a_process_that_cannot_be_started(monkeypatch):
    """The others that were started before it are ended."""
    options = ver_ppo.Options(env_id="tests.envs:Count-v0", num_envs=4, num_workers=4)
    spec, start, calls = ver_ppo.describe_env(options), multiprocessing.process.BaseProcess.start, []

    def start_three(process):
        calls.append(process)
        if len(calls) == 4:
            raise OSError("Too many open files")
        start(process)

    monkeypatch.setattr(multiprocessing.process.BaseProcess, "start", start_three)
    with pytest.raises(OSError, match="Too many"):
        ver_ppo.Workers(options, "train", spec, ver_ppo.Transfer(spec, 4), [(0, [])] * 4)
    assert len(calls) == 4 and not any(process.is_alive() for process in calls[:3])


@pytest.mark.parametrize("env_id", ["pointnav", "tests.envs:Count-v0"])
def test_same_seed_same_run(tmp_path, env_id):
    """With --num-workers 0, the same seed gives the same run bit for bit, and another seed another."""
    for seed in ("3", "3", "4"):
        args = small(tmp_path / seed, "--env-id", env_id, "--num-workers", "0", "--total-timesteps", "320", "--seed", seed)
        assert ver_ppo.main(args) == 0
        time.sleep(1.1)  # run folders are named by the second
    one, two = (ver_ppo.load_checkpoint(folder / "checkpoint.pt") for folder in run_folders(tmp_path / "3"))
    assert differences(one, two) == []
    other = ver_ppo.load_checkpoint(run_folders(tmp_path / "4")[0] / "checkpoint.pt")
    assert "policy" in differences(one, other)


@pytest.mark.parametrize("env_id", ["pointnav", "Pendulum-v1", "tests.envs:Count-v0"])
@pytest.mark.parametrize("function, times, step", [("learn", 5, 320), ("infer", 90, 256), ("infer", 3, 0)])
def test_resume_is_going_on(tmp_path, env_id, function, times, step):
    """A run that was interrupted and resumed equals one that was not, in the middle of episodes and of rollouts too."""
    args = small(tmp_path / "whole", "--env-id", env_id, "--num-workers", "0", "--total-timesteps", "640")
    assert ver_ppo.main(args) == 0
    (whole,) = run_folders(tmp_path / "whole")

    calls, original = [], getattr(ver_ppo, function)

    def interrupted(*args):
        calls.append(1)
        if len(calls) == times:
            os.kill(os.getpid(), signal.SIGTERM)
        return original(*args)

    args = small(tmp_path / "parts", "--env-id", env_id, "--num-workers", "0", "--total-timesteps", "640", "--debug")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ver_ppo, function, interrupted)
        assert ver_ppo.main(args) == 128 + signal.SIGTERM
    (parts,) = run_folders(tmp_path / "parts")
    assert ver_ppo.load_checkpoint(parts / "checkpoint.pt")["progress"]["step"] - step in (0, 64)
    assert ver_ppo.main(["--resume", str(parts)]) == 0
    assert run_folders(tmp_path / "parts") == [parts]
    one, two = (ver_ppo.load_checkpoint(folder / "checkpoint.pt") for folder in (whole, parts))
    assert differences(one, two) == []
    curves = [EventAccumulator(str(folder)).Reload().Scalars("losses/value_loss") for folder in (whole, parts)]
    assert [(e.step, e.value) for e in curves[0]] == [(e.step, e.value) for e in curves[1]]


def test_resume_with_workers(tmp_path, capsys):
    """With worker processes too a run goes on: counters, schedule, the same folder; changed options are named."""
    args = small(tmp_path, "--env-id", "tests.envs:Count-v0", "--num-workers", "2", "--total-timesteps", "256")
    assert ver_ppo.main(args) == 0
    (folder,) = run_folders(tmp_path)
    assert ver_ppo.main(["--resume", str(folder), "--total-timesteps", "512"]) == 0
    assert "--total-timesteps: 512 (the checkpoint has 256)" in capsys.readouterr().out
    saved = ver_ppo.load_checkpoint(folder / "checkpoint.pt")
    assert saved["progress"]["step"] == 512 and saved["collectors"][0]["version"] == 8
    steps = [event.step for event in EventAccumulator(str(folder)).Reload().Scalars("charts/SPS")]
    assert steps == [64 * k for k in range(1, 9)]


def test_evaluation(tmp_path, capsys):
    """--checkpoint evaluates: mean and standard error, the same numbers each time, no folder made; video on demand."""
    args = small(tmp_path, "--num-workers", "0", "--total-timesteps", "128", "--image-size", "16")
    assert ver_ppo.main(args) == 0
    (folder,) = run_folders(tmp_path)
    checkpoint = str(folder / "checkpoint.pt")
    lines = []
    for how in ([], [], ["--greedy"]):
        capsys.readouterr()
        assert ver_ppo.main(["--checkpoint", checkpoint, "--eval-episodes", "9", *how]) == 0
        lines.append(capsys.readouterr().out.splitlines()[-1])
    assert [line.split(" in ")[1].split(": ", 1)[1] for line in lines[:2]] * 2 == [
        line.split(": ", 1)[1] for line in lines[:2]
    ] * 2
    assert lines[0].startswith("evaluation, 9 sampled episodes") and lines[2].startswith("evaluation, 9 greedy episodes")
    assert "success" in lines[0] and "spl" in lines[0] and " ± " in lines[0]
    assert ver_ppo.main(["--checkpoint", checkpoint, "--eval-episodes", "2", "--capture-video"]) == 0
    from PIL import Image

    video = Image.open(folder / "evaluation.gif")
    assert video.n_frames >= 6 and video.size[0] > 200
    assert run_folders(tmp_path) == [folder]


def test_evaluation_plays_a_fixed_list(tmp_path):
    """Each environment plays its share of the episodes, whatever their lengths, with workers as without."""
    options = ver_ppo.Options(env_id="tests.envs:Count-v0", num_envs=4, eval_episodes=10, hidden_size=8, greedy=True)
    spec = ver_ppo.describe_env(options)
    policy = ver_ppo.Policy(spec, options)
    results = [ver_ppo.evaluate(policy, spec, replace(options, num_workers=workers)) for workers in (0, 2)]
    assert results[0].shape == (10, 2) and (results[0][:, 1] == 7).all()
    np.testing.assert_allclose(np.sort(results[0], axis=0), np.sort(results[1], axis=0))


BAD_INPUT = {
    "unknown id": (["--env-id", "NoSuch-v0"], "NoSuch"),
    "unknown module": (["--env-id", "no_such_module:Env-v0"], "no_such_module"),
    "cannot be made": (["--env-id", "tests.faulty_envs:Broken-v0"], "no licence"),
    "observation space": (["--env-id", "tests.envs:TextObservation-v0"], "speech"),
    "action space": (["--env-id", "tests.envs:TupleAction-v0"], "Tuple"),
    "indivisible": (["--num-minibatches", "7"], "must divide"),
    "negative": (["--num-envs", "-3"], "--num-envs -3"),
    "zero": (["--num-steps", "0"], "--num-steps 0"),
    "absurd": (["--num-steps", "999999999"], "absurd"),
    "not a number": (["--learning-rate", "nan"], "--learning-rate nan"),
    "infinite": (["--learning-rate", "inf"], "--learning-rate inf"),
    "gamma": (["--gamma", "1.5"], "--gamma 1.5"),
    "workers": (["--num-workers", "99"], "--num-workers 99"),
    "no cuda": (["--device", "cuda"], "--device cpu"),
    "no such device": (["--device", "abacus"], "abacus"),
    "bf16": (["--bf16"], "CUDA"),
    "missing checkpoint": (["--checkpoint", "nowhere.pt"], "no checkpoint nowhere.pt"),
    "missing run": (["--resume", "nowhere"], "no checkpoint"),
    "camera": (["--camera", "lidar"], "lidar"),
    "overlap": (["--sampler", "async", "--overlap"], "--overlap"),
    "both": (["--envs-per-worker", "2", "--num-workers", "2"], "--envs-per-worker"),
    "inference": (["--num-inference-workers", "2", "--num-workers", "0"], "--num-inference-workers"),
    "lock-step": (["--sampler", "sync", "--max-requests", "2"], "--max-requests"),
    "trace": (["--trace", "/nowhere/trace.json"], "--trace"),
}


@pytest.mark.parametrize("case", BAD_INPUT)
def test_bad_input(tmp_path, capsys, monkeypatch, case):
    """One line that says what is wrong and how to mend it, exit status 2, before any process or folder is made."""
    args, words = BAD_INPUT[case]
    if case == "no cuda" and torch.cuda.is_available():
        pytest.skip("this machine has CUDA")
    monkeypatch.setattr(ver_ppo, "start_workers", lambda *args: pytest.fail("a process was started"))
    monkeypatch.chdir(ROOT)
    assert ver_ppo.main(small(tmp_path, *args)) == 2
    error = capsys.readouterr().err
    assert words in error and len(error.strip().splitlines()) == 1 and "Traceback" not in error
    assert run_folders(tmp_path) == []


def test_foreign_checkpoints(tmp_path, capsys):
    """Another network's checkpoint, a damaged one, pickled code, an unrelated file: refused in one line."""
    assert ver_ppo.main(small(tmp_path, "--num-workers", "0", "--total-timesteps", "64", "--env-id", "CartPole-v1")) == 0
    (folder,) = run_folders(tmp_path)
    good = folder / "checkpoint.pt"
    cases = {"damaged": good.read_bytes()[: good.stat().st_size // 2], "text": b"hello", "empty": b""}
    for name, content in cases.items():
        (tmp_path / name).write_bytes(content)
    torch.save({"weights": torch.zeros(3)}, tmp_path / "unrelated")

    class Code:
        def __reduce__(self):
            return os.system, (f"touch {tmp_path}/executed",)

    torch.save(Code(), tmp_path / "code")
    for name in (*cases, "unrelated", "code"):
        capsys.readouterr()
        assert ver_ppo.main(["--checkpoint", str(tmp_path / name), "--eval-episodes", "1"]) == 2
        error = capsys.readouterr().err
        assert name in error and len(error.strip().splitlines()) == 1
    assert not (tmp_path / "executed").exists()
    capsys.readouterr()
    assert ver_ppo.main(["--checkpoint", str(good), "--hidden-size", "32", "--eval-episodes", "1"]) == 2
    error = capsys.readouterr().err
    assert "belongs to another network" in error and len(error.strip().splitlines()) == 1
    assert ver_ppo.main(["--resume", str(folder), "--num-envs", "5"]) == 2
    assert "--num-envs" in capsys.readouterr().err


def test_unwritable_run_folder(tmp_path, capsys):
    """A file where the runs should go: one line, exit status 2."""
    (tmp_path / "file").write_text("")
    assert ver_ppo.main(small(tmp_path / "file", "--total-timesteps", "64")) == 2
    error = capsys.readouterr().err
    assert "--runs-dir" in error and len(error.strip().splitlines()) == 1


REMOTE = {  # ways to collect in other processes
    "overlap": ["--overlap"],
    "async": ["--sampler", "async"],
    "two inference workers": ["--num-inference-workers", "2"],
}
FAULTS = {"raise": "out of paint", "observation": "observation 'obs' is not finite", "reward": "reward is inf"}


CASES = [(fault, workers, "here") for fault in FAULTS for workers in ("0", "2")]
CASES += [("raise", "2", "overlap"), ("raise", "0", "overlap"), ("reward", "2", "async"), ("observation", "0", "async")]
CASES += [("raise", "2", "two inference workers")]


@pytest.mark.parametrize("fault, workers, where", CASES)
def test_environment_fails(tmp_path, capsys, fault, workers, where):
    """The traceback, the environment's number and its step; exit status 1; the checkpoint so far stays; nobody is left."""
    args = small(
        tmp_path, "--env-id", f"tests.faulty_envs:Faulty-{fault}-v0", "--num-workers", workers, "--checkpoint-interval", "64"
    ) + [*REMOTE.get(where, []), "--max-worker-restarts", "0"]
    assert ver_ppo.main(args) == 1
    error = capsys.readouterr().err
    assert FAULTS[fault] in error and "environment " in error and "step 10" in error and "Traceback" in error
    (folder,) = run_folders(tmp_path)
    assert ver_ppo.load_checkpoint(folder / "checkpoint.pt")["progress"]["step"] >= 64
    assert children() == []


@pytest.mark.parametrize("workers, where", [("1", "here"), ("2", "here"), ("1", "overlap"), ("2", "async")])
def test_worker_dies(tmp_path, capsys, workers, where):
    """A worker that exits is reported with its environments and exit code, the last one as any other."""
    args = small(tmp_path, "--env-id", "tests.faulty_envs:Faulty-exit-v0", "--num-workers", workers, *REMOTE.get(where, []))
    args += ["--max-worker-restarts", "0"]
    assert ver_ppo.main(args) == 1
    error = capsys.readouterr().err
    environments = {"1": ["[0, 1, 2, 3]"], "2": ["[0, 2]", "[1, 3]"]}[workers]
    assert "worker" in error and "died with exit code 7" in error and any(rows in error for rows in environments)
    assert children() == []


@pytest.mark.parametrize("where", ["here", *REMOTE])
def test_environment_hangs(tmp_path, capsys, where):
    """No answer within --env-timeout ends the run, and the hanging process with it."""
    args = small(tmp_path, "--env-id", "tests.faulty_envs:Faulty-hang-v0", "--num-workers", "2", "--env-timeout", "2")
    args += [*REMOTE.get(where, []), "--max-worker-restarts", "0"]
    began = time.monotonic()
    assert ver_ppo.main(args) == 1
    assert time.monotonic() - began < 30
    assert "no answer from environments [" in capsys.readouterr().err
    assert children() == []


SIGNALS = [(number, latency_ms, "here") for number in (signal.SIGINT, signal.SIGTERM) for latency_ms in ("0", "4000")]
SIGNALS += [(signal.SIGINT, "4000", "overlap"), (signal.SIGTERM, "0", "async")]
SIGNALS += [(signal.SIGTERM, "0", "overlap"), (signal.SIGINT, "0", "two inference workers")]
SIGNALS += [(signal.SIGTERM, "0", "hanging environments")]


@pytest.mark.parametrize("number, latency_ms, where", SIGNALS)
def test_signals(tmp_path, number, latency_ms, where):
    """Ctrl-C and SIGTERM: a checkpoint within seconds, the message how to go on, exit status 130 or 143, nobody left."""
    shared_before = set(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else set()
    command = [sys.executable, "ver_ppo.py", *small(tmp_path, "--num-workers", "2", "--image-size", "16")]
    command += ["--sim-latency", latency_ms, "--checkpoint-interval", "1", *REMOTE.get(where, [])]
    command += ["--env-id", "tests.faulty_envs:Faulty-hang-v0"] if where == "hanging environments" else []
    process = subprocess.Popen(
        command, cwd=ROOT, stderr=subprocess.STDOUT, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    wait_until(lambda: is_collecting(process) and (latency_ms != "0" or any(tmp_path.glob("*/checkpoint.pt"))))
    if where == "hanging environments":
        time.sleep(3)
    os.killpg(process.pid, number)  # as a terminal does: to the whole group
    errors, _ = process.communicate(timeout=20)
    assert process.returncode == 128 + number, errors
    assert "stopped at step" in errors and "--resume" in errors and "Traceback" not in errors
    (folder,) = run_folders(tmp_path)
    assert ver_ppo.load_checkpoint(folder / "checkpoint.pt")["progress"]["step"] > 0 or latency_ms != "0"
    wait_until(lambda: alive_in_group(process.pid) == [], 10)
    if shared_before:
        assert {name for name in os.listdir("/dev/shm") if "torch" in name} <= shared_before


@pytest.mark.parametrize("where", ["here", *REMOTE])
def test_killed_main_process_takes_its_workers_along(tmp_path, where):
    """After SIGKILL the workers see the end of their command pipe and leave by themselves."""
    command = [sys.executable, "ver_ppo.py", *small(tmp_path, "--num-workers", "2", "--image-size", "16")]
    command += ["--checkpoint-interval", "1", *REMOTE.get(where, [])]
    process = subprocess.Popen(
        command, cwd=ROOT, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL, start_new_session=True
    )
    wait_until(lambda: is_collecting(process) and any(tmp_path.glob("*/checkpoint.pt")))
    process.kill()
    process.wait()
    wait_until(lambda: alive_in_group(process.pid) == [], 5)


def test_memory_is_flat(tmp_path):
    """Hundreds of updates later, the process holds no more memory than after the first ones."""
    resident_mib, log = [], ver_ppo.Run.log

    def log_and_weigh(run, *args):
        log(run, *args)
        resident_mib.append(int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ver_ppo.Run, "log", log_and_weigh)
        args = small(tmp_path, "--num-workers", "0", "--image-size", "16", "--total-timesteps", str(64 * 400))
        assert ver_ppo.main(args) == 0
    assert len(resident_mib) == 400
    assert np.mean(resident_mib[-50:]) - np.mean(resident_mib[150:200]) < 4


@pytest.mark.parametrize("error", [OSError("No space left on device"), RuntimeError("PytorchStreamWriter failed")])
def test_full_disk(tmp_path, monkeypatch, capfd, error):
    """A checkpoint that cannot be written is reported, the one before stays, nothing else is left, training goes on."""
    assert ver_ppo.main(small(tmp_path, "--num-workers", "0", "--total-timesteps", "64", "--env-id", "CartPole-v1")) == 0
    (folder,) = run_folders(tmp_path)
    before, save, failures = (folder / "checkpoint.pt").read_bytes(), torch.save, [error, error]

    def fail_twice(content, file):
        if failures:
            file.write(b"half a checkp")
            raise failures.pop()
        save(content, file)

    monkeypatch.setattr(torch, "save", fail_twice)
    assert ver_ppo.main(["--resume", str(folder), "--total-timesteps", "192", "--checkpoint-interval", "1"]) == 0
    said = capfd.readouterr()
    assert (said.out + said.err).count("not written, the one before stays") == 2
    assert ver_ppo.load_checkpoint(folder / "checkpoint.pt")["progress"]["step"] == 192
    assert (folder / "checkpoint.pt").read_bytes() != before and not (folder / "checkpoint.tmp").exists()


def test_failed_write_keeps_the_checkpoint(tmp_path, monkeypatch):
    """Whatever happens while a checkpoint is written, the one before is whole."""
    path, policy = tmp_path / "checkpoint.pt", torch.nn.Linear(1, 1)
    optimizer = torch.optim.Adam(policy.parameters())
    ver_ppo.save_checkpoint(path, policy, optimizer, [], ver_ppo.Options(), {})
    before = path.read_bytes()

    def crash(content, file):
        file.write(b"half a checkp")
        raise OSError("No space left on device")

    monkeypatch.setattr(torch, "save", crash)
    with pytest.raises(OSError):
        ver_ppo.save_checkpoint(path, policy, optimizer, [], ver_ppo.Options(), {})
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]


def test_full_disk_for_tensorboard(tmp_path, monkeypatch, capfd):
    """Curves that cannot be written are reported once; training goes on to the end."""
    from torch.utils.tensorboard import SummaryWriter

    monkeypatch.setattr(SummaryWriter, "add_scalar", fill_disk)
    args = small(
        tmp_path, "--num-workers", "0", "--total-timesteps", "256", "--env-id", "CartPole-v1", "--eval-episodes", "2"
    )
    assert ver_ppo.main(args) == 0
    said = capfd.readouterr()
    assert (said.out + said.err).count("TensorBoard's curves end at step 64: No space left on device") == 1
    (folder,) = run_folders(tmp_path)
    assert ver_ppo.load_checkpoint(folder / "checkpoint.pt")["progress"]["step"] == 256


def test_out_of_memory(capsys):
    """One line that says what to lower."""

    def too_much(options):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    assert ver_ppo.main(["--env-id", "CartPole-v1"], train=too_much) == 1
    error = capsys.readouterr().err
    assert "Tried to allocate 2.00 GiB.: give more --num-minibatches, or less of --num-envs" in error


@pytest.mark.parametrize("where", ["here", "overlap"])
def test_checkpoint_on_demand(tmp_path, where):
    """SIGUSR1, also to the whole process group: a checkpoint now, and training goes on. With --debug, a line says where
    collecting stands."""
    command = [
        sys.executable,
        "ver_ppo.py",
        *small(tmp_path, "--env-id", "tests.envs:Count-v0", "--num-workers", "2", "--debug"),
    ]
    command += ["--sim-latency", "5", *REMOTE.get(where, [])]
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True, start_new_session=True)
    wait_until(lambda: is_collecting(process))
    steps = []
    for _ in range(2):
        os.killpg(process.pid, signal.SIGUSR1)
        wait_until(lambda: any(tmp_path.glob("*/checkpoint.pt")))
        (checkpoint,) = tmp_path.glob("*/checkpoint.pt")
        steps.append(ver_ppo.load_checkpoint(checkpoint)["progress"]["step"])
        checkpoint.unlink()
    process.send_signal(signal.SIGTERM)
    errors = process.communicate(timeout=20)[1]
    assert process.returncode == 143 and 0 < steps[0] < steps[1]
    assert "collecting: " in errors and "requests, environments [" in errors
    wait_until(lambda: alive_in_group(process.pid) == [], 5)


@pytest.mark.parametrize("sampler", ["ver", "nover", "sync"])
@pytest.mark.parametrize("calls", [5, 19, 38, 60, 83])
def test_resume_keeps_every_record(tmp_path, sampler, calls):
    """Stopped and resumed anywhere, with environments that end their share at different times, a run learns from the same
    steps as one that was not: held records, which are only bootstrap values, included."""
    infer, learned = ver_ppo.infer, []

    def stop_at(number):
        count = iter(range(10**9))

        def counted(*args):
            if next(count) == number:
                os.kill(os.getpid(), signal.SIGTERM)
            return infer(*args)

        return counted

    def note(rollout, records, *more):
        complete = records[rollout.complete[records]]
        names = ("env", "reward", "target", "advantage", "first", "version")
        learned[-1].append([getattr(rollout, name)[complete].tolist() for name in names])
        return describe(rollout, records, *more)

    describe = ver_ppo.describe_rollout
    args = ["--env-id", "tests.envs:Count-v0", "--num-workers", "0", "--total-timesteps", "320", "--sampler", sampler]
    args += ["--max-requests", "4" if sampler == "sync" else "3", "--debug"]
    for stop in (None, calls):
        learned.append([])
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ver_ppo, "infer", stop_at(stop))
            patch.setattr(ver_ppo, "describe_rollout", note)
            status = ver_ppo.main(small(tmp_path / str(stop), *args))
            if status:
                assert status == 128 + signal.SIGTERM
                (folder,) = run_folders(tmp_path / str(stop))
                assert ver_ppo.main(["--resume", str(folder)]) == 0
    whole, parts = ([column for rollout in rollouts for column in rollout] for rollouts in learned)
    if sampler == "sync":
        assert whole == parts
    assert len(parts) == len(whole) == 5 * 6 and all(len(column) == 64 for column in parts)
    steps = [list(zip(*rollout[:2])) for rollout in learned[1]]
    assert sum(len(rollout) for rollout in steps) == 320


def test_resume_with_another_environment(tmp_path):
    """What belongs to the old environment is dropped; the weights go on."""
    args = small(tmp_path, "--simulator", "builtin", "--image-size", "16", "--num-workers", "0", "--total-timesteps", "128")
    assert ver_ppo.main(args) == 0
    (folder,) = run_folders(tmp_path)
    for change in (
        ["--image-size", "17"],
        ["--env-id", "flee"],
        ["--seed", "9"],
        ["--num-steps", "8"],
        ["--sampler", "nover"],
    ):
        saved = ver_ppo.load_checkpoint(folder / "checkpoint.pt")["progress"]["step"]
        assert ver_ppo.main(["--resume", str(folder), "--total-timesteps", str(saved + 64), "--debug", *change]) == 0
