"""Evaluations during training, and of the checkpoints that were kept."""

import csv
import os
import shutil
import signal
import time

import pytest

import ver_ppo
from notebooks.extensions import series
from tests.helpers import logged, one_line, run_folders, run_here, same, saved, small
from ver_ppo import load_checkpoint

LINE = "--env-id CartPole-v1 --num-workers 0 --total-timesteps 320 --checkpoint-interval 128"


def test_series(tmp_path, capsys):
    """Every checkpoint is kept, and evaluated in order. The last line names the best."""
    folder = run_here(tmp_path, LINE, "--extensions", "keep")
    kept = sorted(int(path.stem) for path in (folder / "checkpoints").iterdir())
    assert kept == [128, 256, 320]
    assert [load_checkpoint(folder / f"checkpoints/{step}.pt")["step"] for step in kept] == kept
    assert saved(folder)["step"] == 320
    capsys.readouterr()
    assert series.main([str(folder), "--eval-episodes", "4"]) == 0
    said = capsys.readouterr().out.splitlines()
    rows = read_table(folder / "evaluation/series.csv")
    assert [int(row["step"]) for row in rows] == kept
    assert list(rows[0]) == ["step", "return", "length"]
    best = max(rows, key=lambda row: float(row["return"]))
    assert said[-1].startswith(f"best by return: {folder}/checkpoints/{best['step']}.pt, ")
    assert sum(line.startswith("step ") for line in said) == 3
    for row in rows:  # the mean of its episodes
        episodes = read_table(folder / f"evaluation/{row['step']}.csv")
        returns = [float(episode["return"]) for episode in episodes]
        assert len(returns) == 4 and sum(returns) / 4 == float(row["return"])


def read_table(path):
    """The rows of a CSV file."""
    return list(csv.DictReader(path.read_text().splitlines()))


def test_every_episode_once(tmp_path, capsys):
    """`--eval-episodes all` asks the environment how many episodes it has, and plays each once. A
    run without kept checkpoints has one, its last. Code that the run names needs --trust."""
    line = "--env-id tests.envs:Listed-v0 --num-workers 0 --total-timesteps 64 --num-envs 4"
    folder = run_here(tmp_path, line)
    args = [str(folder), "--eval-episodes", "all"]
    one_line(capsys, args, "names more than bare words", series.main)
    assert series.main([*args, "--trust"]) == 0
    rows = read_table(folder / "evaluation/64.csv")
    assert [float(row["index"]) for row in rows] == list(range(10))
    said = capsys.readouterr().out.splitlines()
    assert said[-1].startswith(f"best by return: {folder}/checkpoint.pt, ")


def test_refusals(tmp_path, capsys):
    """A folder without a checkpoint, an unknown metric, and an environment that does not say how
    many episodes it has are refused in one line."""
    one_line(capsys, [str(tmp_path)], "there is no checkpoint", series.main)
    folder = run_here(tmp_path, LINE, "--extensions", "keep")
    args = [str(folder), "--eval-episodes", "2", "--metric", "spl"]
    one_line(capsys, args, "--metric spl: must be one of return, length", series.main)
    args = [str(folder), "--eval-episodes", "all"]
    one_line(capsys, args, "CartPole-v1 does not say how many", series.main)


def test_evaluations_during_training(tmp_path):
    """Training evaluates about every 100 steps, after each second update of 64 steps. (The last
    update is followed by the usual evaluation.) What it learns is the same."""
    plain = run_here(tmp_path / "plain", LINE)
    line = f"{LINE} --eval-episodes 3 --extensions evaluate(every=100)"
    folder = run_here(tmp_path / "evaluated", line)
    assert list(logged(folder, "eval/return")) == [128, 256, 320]
    assert logged(folder, "eval/length")[128] >= 8  # of CartPole, at least
    one, two = saved(plain), saved(folder)
    assert all(same(one[name], two[name]) for name in ("policy", "optimizer", "recent"))


@pytest.mark.parametrize("source", ["random", "numpy", "torch"])
def test_global_random_numbers(tmp_path, source):
    """Environments that draw from a generator of this process, as the evaluation's own do, draw the
    same in training."""
    line = f"--env-id tests.envs:Drawn-v0 --env-kwargs source={source} --num-workers 0"
    line += " --total-timesteps 320 --extensions"
    plain = run_here(tmp_path / "plain", f"{line} keep")
    folder = run_here(tmp_path / "evaluated", f"{line} evaluate(every=100) --eval-episodes 3")
    one, two = saved(plain), saved(folder)
    assert all(same(one[name], two[name]) for name in ("policy", "optimizer", "recent"))


def test_a_strangers_links(tmp_path, capsys):
    """Neither kept checkpoints nor evaluations leave a run folder in which a stranger has planted
    links."""
    folder = run_here(tmp_path / "runs", LINE, "--extensions", "keep")
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "file").write_text("mine")
    shutil.rmtree(folder / "checkpoints")
    for name in ("checkpoints", "evaluation"):
        (folder / name).symlink_to(outside)
    assert ver_ppo.main(["--resume", str(folder), "--total-timesteps", "448"]) == 1
    assert "is a symbolic link" in capsys.readouterr().err
    (folder / "checkpoints").unlink()
    (folder / "checkpoints").mkdir()
    for name in ("448.pt", "448.pt.tmp", "448.tmp"):
        (folder / "checkpoints" / name).symlink_to(outside / "file")
    assert ver_ppo.main(["--resume", str(folder), "--total-timesteps", "448"]) == 0
    assert [path.name for path in folder.glob("checkpoints/*.pt")] == ["448.pt"]
    assert series.main([str(folder), "--eval-episodes", "2"]) == 1
    assert "is a symbolic link" in capsys.readouterr().err
    assert [path.name for path in outside.iterdir()] == ["file"]
    assert (outside / "file").read_text() == "mine"


def test_a_signal_during_an_evaluation(tmp_path, monkeypatch):
    """It ends the evaluation, and then training, with a checkpoint of all that was learned."""

    def play_episodes(*_):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(30)
        raise AssertionError("nobody stopped it")

    monkeypatch.setattr(ver_ppo, "play_episodes", play_episodes)
    line = f"{LINE} --eval-episodes 3 --extensions evaluate(every=100)"
    assert ver_ppo.main(small(tmp_path, *line.split())) == 128 + signal.SIGTERM
    (folder,) = run_folders(tmp_path)
    assert saved(folder)["step"] == 128


@pytest.mark.parametrize("words", ["evaluate(every=0)", "evaluate --eval-episodes 0"])
def test_no_evaluation(tmp_path, capsys, words):
    """Refused in one line, before training."""
    args = small(tmp_path, *f"{LINE} --eval-episodes 2 --extensions {words}".split())
    one_line(capsys, args, "must be positive")
    assert run_folders(tmp_path) == []
