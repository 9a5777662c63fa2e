"""Where a user stands: other people's environments, checkpoints, folders and machines. A mistake is
refused in one line, and nothing is silently different."""

import contextlib
import errno
import io
import itertools
import multiprocessing
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace

import numpy as np
import pytest
import torch
from gymnasium import spaces

import ver_ppo
from notebooks.extensions import play
from tests.helpers import (
    ROOT,
    free_port,
    in_new_process,
    make_environment,
    make_spec,
    nobody_left,
    one_line,
    run_folders,
    run_here,
    saved,
    small,
    wait_until,
)

ENVS = "tests.outside_envs"
PARTS = f"--env-id {ENVS}:Parts-v0"
TWO_UPDATES = "--num-workers 0 --num-minibatches 2 --total-timesteps 128"


# ------------------------------------------------------------------ The environment of a checkpoint

OTHERS = {  # another environment than "goal 1, hint 2" with two actions: what the refusal says
    "parts=goal 1": "observation hint is missing, not float32 (2,)",
    "parts=goal 1, hint 2, wind 3": "observation wind is float32 (3,), not missing",
    "parts=goal 1, hint 3": "observation hint is float32 (3,), not float32 (2,)",
    "parts=goal 1, hind 2": "observation hint is missing, not float32 (2,)",
    "parts=goal 1, action 2": "observation hint is missing, not float32 (2,)",
    "actions=5": "action is Discrete(5), not Discrete(2)",
}


@pytest.fixture(scope="module")
def parts_run(tmp_path_factory):
    """The folder of a run of Parts."""
    return run_here(tmp_path_factory.mktemp("parts"), f"{PARTS} {TWO_UPDATES}")


@pytest.mark.parametrize("change", OTHERS)
@pytest.mark.parametrize("how", ["--checkpoint", "--resume"])
def test_another_environment(parts_run, capsys, change, how):
    """Its parts and its actions are compared by name, type and shape, before a process acts."""
    before = (parts_run / "checkpoint.pt").read_bytes()
    more = ["--env-kwargs", change, "--eval-episodes", "2", "--total-timesteps", "256"]
    one_line(capsys, [how, str(parts_run), *PARTS.split(), *more], OTHERS[change])
    assert (parts_run / "checkpoint.pt").read_bytes() == before


def test_images_with_channels_first(tmp_path, capsys):
    """The same numbers in another shape are another environment."""
    line = f"{PARTS} {TWO_UPDATES} --env-kwargs pixels=(16,16,3)"
    folder = run_here(tmp_path, line)
    other = [*PARTS.split(), "--env-kwargs", "pixels=(3,16,16)", "--eval-episodes", "2"]
    words = "image is uint8 (3, 16, 16), channels first, not uint8 (16, 16, 3), channels last"
    one_line(capsys, ["--checkpoint", str(folder), *other], words)


ALIKE = {  # spaces whose numbers are vectors of the same length for a network
    "float32 (6,)": spaces.Box(-1, 1, (6,), np.float32),
    "float64 (6,)": spaces.Box(-1, 1, (6,), np.float64),
    "float32 (2, 3)": spaces.Box(-1, 1, (2, 3), np.float32),
    "float32 (3, 2)": spaces.Box(-1, 1, (3, 2), np.float32),
    "Discrete(6)": spaces.Discrete(6),
    "MultiDiscrete([2 4])": spaces.MultiDiscrete([2, 4]),
    "MultiBinary(6)": spaces.MultiBinary(6),
}


@pytest.mark.parametrize("mine, other", [*itertools.permutations(ALIKE, 2)])
def test_vectors_of_one_length(mine, other):
    """Each part is compared as the environment has it, not as the network sees it."""
    action = spaces.Discrete(2)
    spec = make_spec(ALIKE[mine], action)
    spec.compare(make_spec(ALIKE[mine], action), "no reason")
    with pytest.raises(ver_ppo.UserError) as caught:
        spec.compare(make_spec(ALIKE[other], action), "reason")
    assert str(caught.value) == f"reason: observation obs is {other}, not {mine}"
    if "float" in mine and "float" in other:
        actions = [make_spec(ALIKE["Discrete(6)"], ALIKE[name]) for name in (mine, other)]
        with pytest.raises(ver_ppo.UserError, match="reason: action is "):
            actions[0].compare(actions[1], "reason")


def test_a_part_named_action():
    """An observation may have it. The action is another thing."""
    specs = [
        make_spec(spaces.Dict(action=spaces.Discrete(3)), spaces.Discrete(n)) for n in (2, 3)
    ]
    with pytest.raises(ver_ppo.UserError, match=r"action is Discrete\(3\), not Discrete\(2\)"):
        specs[0].compare(specs[1], "reason")


def test_bounds_that_differ():
    """They may: scenes have different sizes."""
    low, high = (make_spec(spaces.Box(0, most, (2,)), spaces.Discrete(2)) for most in (1, 100))
    low.compare(high, "no reason")


def test_film_of_another_environment(tmp_path, capsys, parts_run):
    """`play` compares, too."""
    args = [str(parts_run), "--trust", "--env-kwargs", "actions=5", "--film", f"{tmp_path}/a.gif"]
    one_line(capsys, args, "action is Discrete(5), not Discrete(2)", play.main)


def test_order_of_parts(tmp_path):
    """The order of a dictionary may change from run to run. The policy is the same."""
    made = []
    for k, order in enumerate(["goal 1, hint 1", "hint 1, goal 1"]):
        line = f"{PARTS} {TWO_UPDATES}"
        made.append(saved(run_here(tmp_path / str(k), line, "--env-kwargs", f"parts={order}")))
    assert list(made[0]["spec"]["obs"]) == list(made[1]["spec"]["obs"]) == ["goal", "hint"]
    for name, weight in made[0]["policy"].items():
        assert torch.equal(weight, made[1]["policy"][name])


def test_environments_that_differ(tmp_path, capfd):
    """Environment 2 has one action more: a policy for the first one cannot act there."""
    line = f"--env-id {ENVS}:Unlike-v0 --num-workers"
    words = "not like the first environment: action is Discrete(3), not Discrete(2)"
    assert ver_ppo.main(small(tmp_path, *line.split(), "0")) == 2
    assert words in capfd.readouterr().err
    assert ver_ppo.main(small(tmp_path, *line.split(), "1")) == 1
    error = capfd.readouterr().err
    assert "died, exit code 2" in error and "started again" not in error


def test_what_auto_chose_is_saved(tmp_path):
    """A run in the built-in simulator stays there, also on a machine that has Habitat."""
    line = "--env-id pointnav --env-kwargs image_size=8 " + TWO_UPDATES
    folder = run_here(tmp_path, line)
    assert saved(folder)["options"]["env_kwargs"] == ("image_size=8", "simulator=builtin")
    resumed = ver_ppo.parse_options(["--resume", str(folder)])
    assert ver_ppo.Run(resumed).options.env_kwargs == resumed.env_kwargs
    other = ["--env-kwargs", "simulator=habitat"]
    assert ver_ppo.parse_options(["--resume", str(folder), *other]).env_kwargs == (other[1],)


# -------------------------------------------------------- An environment's package and this process

PACKAGES = {  # what an import does, and the words of the refusal
    "os._exit(3)": "its output above",
    "sys.exit('no license')": "(SystemExit: no license): {file}:2: sys.exit('no license')",
    "time.sleep(100)": "gave no answer for 1 s (--env-timeout)",
    "1 / 0": "(ZeroDivisionError: division by zero): {file}:2: 1 / 0",
    "import importlib; importlib.import_module('no.such')": (
        "No module named 'no'): {file}:2: import importlib; importlib.import_module('no.such')"
    ),
    "import gymnasium; gymnasium.make('No-v0')": "): {file}:2: import gymnasium; gymnasium.make",
    "import no_such_module": "No module named 'no_such_module'): {file}:2: import no_such_module",
    "x = (": "(SyntaxError: '(' was never closed (package.py, line 2)): {file}:2: x = (",
}


@pytest.mark.parametrize("code", PACKAGES)
@pytest.mark.parametrize("door", ["--env-id package:X-v0", "--wrappers package:wrap"])
def test_import_that_fails(tmp_path, capfd, monkeypatch, code, door):
    """The refusal names the file and the line. This process goes on, whatever the import does."""
    file = tmp_path / "package.py"
    file.write_text(f"import os, sys, time\n{code}\n")
    monkeypatch.syspath_prepend(tmp_path)
    args = ["--env-id", "CartPole-v1", *door.split(), "--env-timeout", "1", "--num-workers", "1"]
    assert ver_ppo.main(small(tmp_path / "runs", *args)) == 2
    last = capfd.readouterr().err.strip().splitlines()[-1]
    assert last.startswith("ver_ppo.py: ") and PACKAGES[code].format(file=file) in last
    assert "cannot be found" not in last and "package" not in sys.modules
    assert not (tmp_path / "runs").exists() and nobody_left()


def test_import_that_changes_its_process(tmp_path, monkeypatch):
    """Gradients, torch's default type and the standard library are as before, here."""
    file = tmp_path / "rude_package.py"
    file.write_text(
        "import random, time, torch, gymnasium\n"
        "from gymnasium.envs.classic_control import CartPoleEnv\n"
        "torch.set_grad_enabled(False)\n"
        "torch.set_default_dtype(torch.float64)\n"
        "time.sleep = None\n"
        "gymnasium.register('Rude-v0', CartPoleEnv, max_episode_steps=500)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    line = "--env-id rude_package:Rude-v0 --num-workers 1 --total-timesteps 128"
    folder = run_here(tmp_path / "runs", line)
    assert torch.is_grad_enabled() and torch.get_default_dtype() == torch.float32 and time.sleep
    assert "rude_package" not in sys.modules
    assert saved(folder)["version"] == 2


def test_who_imports_the_environment(tmp_path, monkeypatch):
    """The trial and the workers do, in processes of their own, also in an evaluation."""
    monkeypatch.setenv("IMPORTED", str(tmp_path / "imported"))
    code = (
        "import os, sys, ver_ppo; print(os.getpid(), ver_ppo.main(sys.argv[1:]),"
        f" {ENVS!r} in sys.modules)"
    )
    more = ["--num-workers", "1", "--total-timesteps", "64", "--eval-episodes", "2"]
    command = [sys.executable, "-c", code, *small(tmp_path / "runs", *PARTS.split(), *more)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    pid, status, imported = done.stdout.splitlines()[-1].split()
    importers = (tmp_path / "imported").read_text().split()
    assert (status, imported) == ("0", "False")
    assert len(set(importers)) == 3 and pid not in importers  # trial, training, evaluation


def test_environment_of_a_notebook(tmp_path, capsys):
    """What only this process has registered exists in no worker. The refusal says what to do."""
    ver_ppo.gym.register("OnlyHere-v0", "tests.outside_envs:Parts")
    line = "--env-id OnlyHere-v0 --total-timesteps 64"
    one_line(capsys, small(tmp_path, *line.split(), "--num-workers", "1"), "--num-workers 0")
    run_here(tmp_path, line, "--num-workers", "0")


# -------------------------------------------------------------------------- A stranger's checkpoint

SAFE = ["keep", "overlap", "CartPole-v1", "ALE/Pong-v5", "image_size=64", "a.b-c_d/e", ""]
UNSAFE = ["a:b", "a(b=c)", "selfplay(share=x)", "a b", "a,b", "~/a", "\x1b[2J", "é"]
UNSAFE += ["a=/b", "a=b/c"]  # files


@pytest.mark.parametrize("door", ["wrappers", "extensions", "env_kwargs", "policy", "env_id"])
def test_bare_words(door):
    """From a file, only they count. All else must stand on the command line, too."""
    given = ver_ppo.Options()
    for text in SAFE + UNSAFE:
        value = text if door in ("policy", "env_id") else ("keep", text)
        found = replace(given, **{door: value})
        if text in SAFE:
            ver_ppo.check_doors(found, given, "FILE")
        else:
            with pytest.raises(ver_ppo.UserError, match="names more than bare words"):
                ver_ppo.check_doors(found, given, "FILE")
            ver_ppo.check_doors(found, found, "FILE")


def test_text_of_a_file_is_printed_safely(tmp_path, capsys, parts_run):
    """It cannot move the cursor or hide what it says."""
    content = saved(parts_run)
    path = tmp_path / "checkpoint.pt"
    escaped = "\\x1b[2J"
    for change, words in (
        ({"format": "\x1b[2J12\u202e"}, escaped),
        ({"policy": content["policy"] | {"\x1b[2J\u202e": torch.zeros(1)}}, escaped),
        ({"options": content["options"] | {"wrappers": ("\x1b[2J\u202e:X",)}}, escaped),
        ({"options": content["options"] | {"sampler": "\x1b[2J\u202e"}}, "is not a checkpoint"),
    ):
        ver_ppo.write_checkpoint(content | change, path)
        args = ["--checkpoint", str(path), *PARTS.split(), "--eval-episodes", "1"]
        one_line(capsys, args, words)
        assert ver_ppo.main(args) == 2
        printed = capsys.readouterr()
        assert not {"\x1b", "\u202e"} & set(printed.err + printed.out)


def test_sampler_of_a_file(capsys, tmp_path, parts_run):
    """It is one of three."""
    content = saved(parts_run)
    ver_ppo.write_checkpoint(
        content | {"options": content["options"] | {"sampler": "fast"}}, tmp_path / "checkpoint.pt"
    )
    args = ["--checkpoint", str(tmp_path), *PARTS.split(), "--eval-episodes", "1"]
    with pytest.warns(UserWarning, match="sampler"):  # tyro's
        one_line(capsys, args, "--sampler fast: must be ver, nover or sync")


def test_links_in_a_strangers_folder(tmp_path):
    """A run writes new files and moves them: nothing that a link points to is changed."""
    folder = tmp_path / "run"
    folder.mkdir()
    names = "options.json", "options.json.tmp", "checkpoint.pt.tmp", "checkpoint.pt"
    for name in names[:3]:
        (tmp_path / name).write_text("mine")
        (folder / name).symlink_to(tmp_path / name)
    line = f"{PARTS} {TWO_UPDATES} --resume {folder}".split()
    assert ver_ppo.main(small(tmp_path, *line)) == 0
    assert all((tmp_path / name).read_text() == "mine" for name in names[:3])
    assert sorted(path.name for path in folder.iterdir() if "tfevents" not in path.name) == [
        "checkpoint.pt",
        "lock",
        "options.json",
    ]
    (tmp_path / "elsewhere").mkdir()
    (folder / "checkpoints").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="is a symbolic link"):
        ver_ppo.write_file(folder / "checkpoints" / "1.pt", b"x")
    (folder / "lock").unlink()
    (folder / "lock").symlink_to(tmp_path / "new")
    assert ver_ppo.main(small(tmp_path, *line)) == 1
    assert not (tmp_path / "new").exists() and not list((tmp_path / "elsewhere").iterdir())


# --------------------------------------------------------------------------------------------- Time


@contextlib.contextmanager
def started_workers(env_timeout):
    """Workers of two environments, which have both answered for the first time."""
    options = ver_ppo.Options(env_id=f"{ENVS}:Parts-v0", num_envs=2, env_timeout=env_timeout)
    spec = ver_ppo.describe_env(replace(options, num_workers=0))
    io = ver_ppo.EnvIO(spec, 2)
    with contextlib.closing(ver_ppo.make_workers(options, "train", spec, io)) as workers:
        answered = []
        wait_until(lambda: answered.extend(workers.receive(0.05)) or len(answered) == 2)
        yield workers


def test_pause_of_all_processes():
    """A cluster suspends a job: the time in which this process did not run is no silence."""
    with started_workers(env_timeout=5.0) as workers:
        workers.asked_N[0] = True  # it owes an answer, and does not give it
        for _ in range(4):
            workers.looked_at -= 1000  # a pause
            assert workers.receive(0) == []
        assert not workers.failed_at
        workers.has_answered_W[:] = True
        for _ in range(8):  # time that passes in waits counts
            workers.looked_at -= 0.9
            workers.receive(0)
        assert len(workers.failed_at) == 1


def test_limit_of_one_answer(tmp_path):
    """Two resets, a step and the timing of steps take longer than --env-timeout together."""
    line = f"--env-id {ENVS}:Slow-v0 --env-kwargs reset=1.5 --env-timeout 3"
    args = line.split() + ["--total-timesteps", "64", "--num-envs", "2", "--num-steps", "8"]
    folder = run_here(tmp_path, "--total-timesteps 16", *args[:-6], "--num-envs", "1")
    assert saved(folder)["version"] == 1


@pytest.mark.parametrize(
    "line",
    ["CartPole-v1 --env-timeout 0.5", f"{ENVS}:Slow-v0 --env-kwargs reset=0.8 --env-timeout 1.2"],
)
def test_timing_of_steps(tmp_path, line):
    """It takes a second, in answers of 0.1 s or of a step."""
    more = "--num-workers auto --total-timesteps 16 --num-envs 1 --num-steps 16"
    assert saved(run_here(tmp_path, f"--env-id {line}", *more.split()))["version"] == 1


def test_a_long_update_is_no_silence():
    """An action that is sent after it has the whole --env-timeout."""
    with started_workers(env_timeout=1.2) as workers:
        workers.looked_at -= 2  # an update
        os.kill(workers.processes[0].pid, signal.SIGSTOP)  # a step of half a second
        workers.send(np.array([0, 1]))
        until = time.monotonic() + 0.5
        while time.monotonic() < until:
            workers.receive(0.05)
        assert not workers.failed_at
        os.kill(workers.processes[0].pid, signal.SIGCONT)


# ----------------------------------------------------------------------------------- A run's folder


def test_folder_of_one_run(tmp_path, capsys):
    """A second run in the same folder is refused before it writes anything."""
    folder = tmp_path / "job"
    folder.mkdir()
    line = f"{PARTS} {TWO_UPDATES} --resume {folder}".split()
    options = ver_ppo.parse_options(small(tmp_path, *line))
    with contextlib.closing(ver_ppo.Run(options)):
        before = {path: path.read_bytes() for path in folder.iterdir()}
        one_line(capsys, small(tmp_path, *line, "--seed", "2"), "is in use by a run")
        assert {path: path.read_bytes() for path in folder.iterdir()} == before
    assert ver_ppo.main(small(tmp_path, *line)) == 0


def test_folder_after_a_failure(tmp_path, monkeypatch):
    """A run that could not begin does not keep its folder."""
    line = f"{PARTS} {TWO_UPDATES} --resume {tmp_path}".split()

    def fail(*_, **__):
        raise OSError("no bar")

    with monkeypatch.context() as patched:
        patched.setattr(ver_ppo, "tqdm", fail)
        assert ver_ppo.main(small(tmp_path, *line)) == 1
    assert ver_ppo.main(small(tmp_path, *line)) == 0


def test_folder_that_is_deleted(tmp_path, tmp_path_factory, monkeypatch):
    """The next checkpoint makes it again."""
    save = ver_ppo.Run.save

    def delete_first(run):
        if run.version == 2:
            run.folder.rename(tmp_path_factory.mktemp("bin") / "run")
        return save(run)

    monkeypatch.setattr(ver_ppo.Run, "save", delete_first)
    folder = run_here(tmp_path, f"{PARTS} {TWO_UPDATES}")
    assert saved(folder)["version"] == 2


def test_home_folder(tmp_path, capsys, monkeypatch):
    """`~` is the home folder where the shell has not replaced it."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    line = f"{PARTS} {TWO_UPDATES} --runs-dir=~/runs"
    assert ver_ppo.main(small(tmp_path, *line.split())) == 0
    (folder,) = run_folders(tmp_path / "home" / "runs")
    name = f"~/runs/{folder.name}"
    assert ver_ppo.main(["--resume", name, *PARTS.split(), "--total-timesteps", "192"]) == 0
    assert saved(folder)["step"] == 192
    assert ver_ppo.parse_options(["--checkpoint", name, *PARTS.split()]).num_envs == 4
    assert not list(ROOT.glob("~*"))
    assert ver_ppo.main(["--checkpoint", "~nosuchuser/x", *PARTS.split()]) == 1
    assert "there is no such user" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--resume", "--checkpoint"])
def test_empty_names(tmp_path, capsys, option):
    one_line(capsys, small(tmp_path, *PARTS.split(), option, ""), "must name a run")


def test_run_inside_a_run_folder(parts_run, monkeypatch, tmp_path):
    """Without --resume, a checkpoint in the current folder is not continued."""
    monkeypatch.chdir(parts_run)
    assert saved(run_here(tmp_path, f"{PARTS} {TWO_UPDATES}"))["version"] == 2


# ------------------------------------------------------------------------------- A machine's limits


@pytest.mark.parametrize("env_id", [f"{ENVS}:Large-v0", "CartPole-v1"])
def test_rollout_larger_than_the_memory(tmp_path, capsys, env_id):
    """The line says how many bytes. The folder is not made."""
    steps = "1000000000" if env_id == "CartPole-v1" else "128000"
    line = f"--env-id {env_id} --num-workers 0 --num-steps {steps}"
    assert ver_ppo.main(small(tmp_path, *line.split())) == 1
    error = capsys.readouterr().err
    assert "there is not enough memory" in error and ("iB" in error or "bytes" in error)
    assert len(error.strip().splitlines()) == 1 and not list(tmp_path.iterdir())


LIMITED = {
    "ulimit -n": OSError(errno.EMFILE, os.strerror(errno.EMFILE)),
    "ulimit -u": BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN)),
    "/dev/shm": RuntimeError("unable to mmap 8 bytes from file </torch_1>: shared memory"),
    "memory": MemoryError(),
    "TMPDIR": OSError("AF_UNIX path too long"),
}


@pytest.mark.parametrize("limit", LIMITED)
def test_limits_are_named(capsys, limit):
    """One line names the limit. Any other error of these kinds is shown with its traceback."""

    def launch(options):
        raise LIMITED[limit]

    assert ver_ppo.main(["--env-id", "CartPole-v1"], launch=launch) == 1
    error = capsys.readouterr().err
    assert limit in error and len(error.strip().splitlines()) == 1

    def broken(options):
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    with pytest.raises(RuntimeError, match="mat1"):
        ver_ppo.main(["--env-id", "CartPole-v1"], launch=broken)


def soft_limit(name, count):
    """Train with `count` workers, with a low soft limit of open files. Returns the exit status."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (40, hard))
    more = ["--num-workers", str(count), "--num-envs", str(count), "--total-timesteps", "16"]
    return ver_ppo.main(small(name, *PARTS.split(), *more, "--num-steps", "1"))


def test_many_workers_need_many_files(tmp_path):
    """Each worker needs four: a soft limit of the machine is raised."""
    assert in_new_process(soft_limit, tmp_path, 12) == 0


def test_long_tmpdir(tmp_path):
    """Sockets have short names."""
    long = tmp_path / ("x" * 120)
    long.mkdir()
    command = [sys.executable, "ver_ppo.py", *small(tmp_path, *PARTS.split())]
    environment = {**os.environ, "TMPDIR": str(long)}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment)
    assert done.returncode == 1 and "(TMPDIR)" in done.stderr
    assert "Traceback" not in done.stderr


# --------------------------------------------------------------------------- Where launch is called


def train_here(tmp_path, **more):
    options = ver_ppo.parse_options(small(tmp_path, *PARTS.split()))
    return ver_ppo.launch(replace(options, total_timesteps=64, num_workers=1, **more))


def train_in_a_daemon(tmp_path):
    """As in the processes of multiprocessing.Pool."""
    multiprocessing.current_process()._config["daemon"] = True
    return train_here(tmp_path)


def train_then_fork(tmp_path):
    """Train, then train in a process that is forked from this one. Returns the second one's
    error."""
    train_here(tmp_path)
    read, write = os.pipe()
    if not os.fork():
        try:
            train_here(tmp_path)
        except ver_ppo.UserError as error:
            os.write(write, str(error).encode())
        os._exit(0)
    os.close(write)
    os.wait()
    return os.read(read, 1000).decode()


def test_launch_in_a_daemon(tmp_path):
    assert saved(in_new_process(train_in_a_daemon, tmp_path))["step"] == 64


def test_launch_in_a_forked_process(tmp_path):
    """It cannot train beside the threads and the fork server of its parent, and says so."""
    assert "start it with spawn" in in_new_process(train_then_fork, tmp_path)


def test_launch_in_a_thread(tmp_path):
    """Python allows signal handlers only in the main thread."""
    thread = threading.Thread(target=train_here, args=(tmp_path,))
    thread.start()
    thread.join()
    assert saved(*run_folders(tmp_path))["step"] == 64


def test_launch_with_a_simple_stream(tmp_path, monkeypatch):
    """Some programs replace stderr by an object that has only `write` and `flush`."""

    class Stream:
        write = io.StringIO().write

        def flush(self):
            pass

    monkeypatch.setattr(sys, "stderr", Stream())
    monkeypatch.setattr(sys, "stdout", Stream())
    train_here(tmp_path)
    assert saved(*run_folders(tmp_path))["step"] == 64


def test_isolated_script(tmp_path):
    """python -P does not put the script's folder on the path."""
    command = [sys.executable, "ver_ppo.py", *small(tmp_path, *PARTS.split(), *TWO_UPDATES.split())]
    environment = {**os.environ, "PYTHONSAFEPATH": "1"}
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, env=environment)


# -------------------------------------------------------------------- Numbers, devices, small rules


def test_environments_that_live_together(tmp_path):
    """Those of an evaluation during training have other numbers than those of the training."""
    port = free_port()
    line = f"--env-id {ENVS}:Port-v0 --env-kwargs first={port} --num-workers 1 --eval-episodes 3"
    line += " --total-timesteps 192 --extensions evaluate(every=64)"
    folder = run_here(tmp_path, line)
    assert saved(folder)["version"] == 3


def test_numbers_beside_others(tmp_path, monkeypatch):
    """An evaluation during training counts on behind all ranks of the machine. The last one, when
    the training has ended, counts from 0."""
    made = []
    make_env = ver_ppo.make_env
    note = lambda options, split="train", number=0, checked=False: made.append((split, number))
    monkeypatch.setattr(
        ver_ppo, "make_env", lambda *args, **more: (note(*args, **more), make_env(*args, **more))[1]
    )
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    line = f"{PARTS} --num-workers 0 --total-timesteps 128 --extensions evaluate(every=64)"
    run_here(tmp_path, line, "--eval-episodes", "2")
    assert [number for split, number in made if split == "val"] == [8, 9, 0, 1]
    assert [number for split, number in made if split == "train"][-4:] == [0, 1, 2, 3]


class Asks(ver_ppo.Policy):
    """Keeps the device that it was told."""

    def __init__(self, spec, options):
        super().__init__(spec, options)
        self.told = options.device


def test_a_policy_knows_its_device(tmp_path, parts_run):
    """It is told a device, never `auto`."""
    options = ver_ppo.Options(policy=f"{__name__}:Asks", env_id="CartPole-v1", num_workers=0)
    assert ver_ppo.build(options)[1].told == "cpu"
    _, _, run_options = play.load_saved(parts_run / "checkpoint.pt", trust=True)
    spec = ver_ppo.Spec(**saved(parts_run)["spec"])
    again = replace(run_options, device="auto", policy=f"{__name__}:Asks")
    assert ver_ppo.make_policy(spec, again).told == "cpu"


def test_rollout_of_one_step(tmp_path, capsys):
    """Its normalized advantage is always 0, so nothing would be learned."""
    line = f"{PARTS} --num-envs 1 --num-steps 1 --num-minibatches 1 --num-workers 0"
    line += " --total-timesteps 4"
    one_line(capsys, small(tmp_path, *line.split()), "the advantage of a single step is always 0")
    run_here(tmp_path, line, "--no-norm-adv")


class Early(ver_ppo.Run):
    """Ends each rollout after its first batch of steps."""

    def enough(self, rows):
        return super().enough(rows) or rows > 0


def test_fewer_steps_than_minibatches(tmp_path):
    """Each step is then a mini-batch."""
    line = f"{PARTS} --num-workers 0 --num-envs 2 --num-steps 8 --num-minibatches 16"
    folder = run_here(tmp_path, line, "--extensions", f"{__name__}:Early", "--total-timesteps", "6")
    assert saved(folder)["step"] == 6 and saved(folder)["version"] == 3


@pytest.mark.parametrize("number", ["nan", "inf", "-inf"])
def test_target_entropy(tmp_path, capsys, number):
    args = ["--env-id", "CartPole-v1", f"--target-entropy={number}"]
    one_line(capsys, small(tmp_path, *args), "--target-entropy")


def test_two_parts_with_one_name(capsys, tmp_path):
    """`a/b`, and `b` in `a`."""
    args = ["--env-id", f"{ENVS}:Twice-v0", "--num-workers", "0"]
    one_line(capsys, small(tmp_path, *args), "two parts of the observation have the name 'a/b'")


def test_part_without_numbers(capsys):
    """A vector of length 0 is left out."""
    _, io = make_environment(f"{ENVS}:Empty-v0")
    assert io["obs"].dtype.names == ("0",)
    assert "observation '1' is left out" in capsys.readouterr().out


def test_numbers_that_float32_cannot_tell_apart(capsys):
    """Seconds since 1970, coordinates in meters: a line says what is lost."""
    make_environment(f"{ENVS}:Near-v0")
    assert capsys.readouterr().out == ""
    make_environment(f"{ENVS}:Far-v0")
    assert "differ by less than 128 are equal" in capsys.readouterr().out


class Parent(ver_ppo.Run):
    """An extension with an argument."""

    every: int = 1


class Child(Parent):
    """An extension of that extension."""


def test_arguments_of_a_parent(capsys):
    """A subclass takes the arguments of the extension that it changes."""
    options = ver_ppo.Options(extensions=(f"{__name__}:Child(every=3)",))
    assert ver_ppo.extend(ver_ppo.Run, options).every == 3
    with pytest.raises(ver_ppo.UserError, match="there is no evry, it takes \\['every'\\]"):
        ver_ppo.extend(ver_ppo.Run, replace(options, extensions=(f"{__name__}:Child(evry=3)",)))


def test_seconds_of_a_signal():
    """SIGNALS are still caught in the main thread."""
    seen = []
    with ver_ppo.caught_signals(lambda *args: seen.append(args[0])):
        os.kill(os.getpid(), signal.SIGUSR1)
    assert seen == [signal.SIGUSR1]


def test_gradients_of_unused_weights():
    """They are 0, so that all ranks average the same tensors."""
    policy = ver_ppo.build(ver_ppo.Options(env_id="CartPole-v1", num_workers=0))[1]
    policy.unused = torch.nn.Parameter(torch.ones(3))
    averaged = []
    rng = np.random.default_rng(0)
    batch = {
        "obs": {"obs": torch.from_numpy(rng.normal(size=(4, 4)).astype(np.float32))},
        "prev_action": torch.zeros(4, 1, dtype=torch.int64),
        "action": torch.zeros(4, 1, dtype=torch.int64),
        "first": torch.ones(4, dtype=torch.bool),
        "log_prob": torch.zeros(4),
        "norm_advantage": torch.ones(4),
        "returns": torch.ones(4),
        "weight": torch.ones(4),
        "state": torch.zeros(4, *policy.state_shape),
        "batch_sizes": torch.tensor([4]),
        "scale": 1.0,
    }
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.1)
    options = ver_ppo.Options()
    ver_ppo.minibatch_step(policy, optimizer, batch, options, averaged.extend)
    assert any(gradient.shape == (3,) and not gradient.any() for gradient in averaged)
    learned = [weight for weight in policy.parameters() if weight.requires_grad]
    assert len(averaged) == len(learned)
