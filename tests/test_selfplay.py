"""Self-play: the duel, opponents from snapshots, and a run that learns against itself."""

import math

import numpy as np
import pytest
import torch
from gymnasium.utils.env_checker import check_env

import ver_ppo
from notebooks.environments import duel
from notebooks.extensions import population, selfplay
from notebooks.extensions.play import Agent
from tests.helpers import SMALL, one_line, run_folders, run_here, same, saved, small

LINE = "--env-id duel --num-workers 0 --total-timesteps 320"
SELFPLAY = ["--extensions", "selfplay(every=128, keep=2)"]


def face(env, distance_m=1.5, own_rad=0.0, other_rad=math.pi):
    """Put both robots on a free line of sight along x, at this distance, with these headings."""
    rng = np.random.default_rng(0)
    while True:
        point_2 = rng.uniform(0, env.plan.size)
        both_P2 = np.array([point_2, point_2 + [distance_m, 0]])
        reach = duel.sight(both_P2[0], both_P2[1:], env.plan.boxes_K4)
        if env.plan.is_free(both_P2).all() and np.isfinite(reach).all():
            break
    for robot, place, heading in zip(env.robots, both_P2, (own_rad, other_rad)):
        robot.put(env.plan, place, heading)


class Fixed:
    """An opponent that always does the same, and keeps what it observed."""

    def __init__(self, action):
        self.action = action
        self.seen = []

    def act(self, observation):
        self.seen.append(observation)
        return self.action


def test_duel_is_an_environment():
    """Gymnasium's checker accepts it. The same seed gives the same game."""
    env = duel.Duel(render_mode="rgb_array")
    check_env(env, skip_render_check=True)
    games = []
    for _ in range(2):
        observation, _ = env.reset(seed=3)
        rewards = []
        for step in range(300):
            observation, reward, over, late, info = env.step(step % 4)
            rewards.append(reward)
            if over or late:
                break
        games.append((rewards, {key: part.tolist() for key, part in observation.items()}))
    assert games[0] == games[1]
    assert env.render().ndim == 3
    assert late and info == {"won": 0.5} and step == duel.STEP_LIMIT - 1 or over


@pytest.mark.parametrize(
    "own, reply, rad, reward, won",
    [
        (0, 2, 0.0, 1.0, 1.0),  # hits
        (2, 0, 0.0, -1.0, 0.0),  # is hit
        (0, 0, 0.0, 0.0, 0.5),  # both
        (0, 2, math.radians(11), 0.0, 0.5),  # beside the target
        (0, 2, -math.radians(9), 1.0, 1.0),
    ],
)
def test_shots(own, reply, rad, reward, won):
    """A shot hits if the other robot is seen within 10 degrees."""
    env = duel.Duel()
    env.reset(seed=0)
    env.opponent = Fixed(reply)
    face(env, own_rad=rad)
    _, found, over, _, info = env.step(own)
    assert (found, info["won"], over) == (reward, won, reward != 0 or own == reply == 0)


def test_walls_and_reloading():
    """A wall stops a shot, and hides the other robot. After a shot, a robot must wait."""
    env = duel.Duel()
    env.reset(seed=0)
    env.opponent = Fixed(2)
    face(env, own_rad=math.pi)
    observation, *_ = env.step(0)  # shoots away from the other one
    assert observation["reload"] == 1 and not observation["other"].any()
    face(env)
    waited = 0
    while not env.step(0)[2]:
        waited += 1
        face(env)
    assert waited == duel.RELOAD_STEPS
    face(env)
    wall = np.array([[0.7, -0.1, 0.8, 0.1]]) + np.tile(env.robots[0].position, 2)
    env.plan = type("Plan", (), {"boxes_K4": wall})
    for robot in env.robots:
        robot.reload = 0
    observation, reward, *_ = env.step(0)
    assert env.robots[0].fired and reward == 0 and not observation["other"].any()


def test_both_see_the_same_game():
    """The opponent observes what the agent would observe in its place."""
    env = duel.Duel()
    env.reset(seed=0)
    face(env, own_rad=0.3, other_rad=2.0)
    env.opponent = Fixed(2)
    env.step(3)
    (seen,) = env.opponent.seen
    face(env, own_rad=0.3, other_rad=2.0)
    own, other = env.robots
    for key, part in env.observe(other, own).items():
        np.testing.assert_array_equal(seen[key], part)
    distance, bearing = env.see(other, own)
    expected = 1, distance / 10, math.cos(bearing), math.sin(bearing)
    np.testing.assert_allclose(seen["other"], expected, atol=1e-6)
    assert math.isclose(bearing, math.pi - 2.0, abs_tol=1e-6)


def steps(place):
    """The steps of the snapshots in a folder."""
    return [selfplay.step_of(path) for path in selfplay.snapshots(place)]


def test_snapshots(tmp_path):
    """A run writes its first weights and those after each multiple of `every`. The checkpoint's
    options do not name the wrapper, so the run continues and is evaluated as any other. Snapshots
    of a resumed run stay."""
    folder = run_here(tmp_path, LINE, *SELFPLAY)
    place = folder / "snapshots"
    paths = selfplay.snapshots(place)
    assert steps(place) == [0, 128, 256]
    assert saved(folder)["options"]["wrappers"] == ()
    first = ver_ppo.load_checkpoint(paths[0])["policy"]
    assert not same(first, ver_ppo.load_checkpoint(paths[-1])["policy"])
    args = ["--resume", str(folder), "--total-timesteps", "448", "--extensions"]
    args.append("selfplay(every=128, keep=2)")
    assert ver_ppo.main(args) == 0
    assert steps(place) == [0, 128, 256, 384]
    assert same(first, ver_ppo.load_checkpoint(paths[0])["policy"])


def test_opponents(tmp_path):
    """The opponent of each episode is one of the newest two snapshots. It acts as its policy does,
    with a memory that begins anew in each episode."""
    folder = run_here(tmp_path, LINE, *SELFPLAY)
    place = folder / "snapshots"
    options = ver_ppo.Options(hidden_size=16)
    env = selfplay.Against(duel.Duel(options=options), str(place), keep=2)
    env.reset(seed=0)
    opponents = set()
    for _ in range(30):
        env.reset()
        agent = env.unwrapped.opponent
        opponents.add(id(agent.policy))
        assert not agent.state.any()
        env.step(1)
        assert agent.state.any()
    newest = [selfplay.load_snapshot(path, options) for path in selfplay.snapshots(place)[-2:]]
    assert opponents == {id(policy) for policy in newest}

    env = selfplay.Against(duel.Duel(options=options), str(selfplay.snapshots(place)[-1]))
    env.reset(seed=0)
    replay = Agent(newest[1], env)
    for step in range(20):
        own, other = env.unwrapped.robots
        observation = env.unwrapped.observe(other, own)
        before = other.heading, other.position
        torch.manual_seed(step)
        action = replay.act(observation)
        torch.manual_seed(step)
        _, _, over, *_ = env.step(2)
        turned = math.degrees(other.heading - before[0])
        assert math.isclose(turned, {2: 10, 3: -10}.get(int(action), 0), abs_tol=1e-6)
        if over:
            break


def test_worker_processes(tmp_path):
    """The opponents act in worker processes, also with `overlap`, and every rollout is whole."""
    line = LINE.replace("--num-workers 0", "--num-workers 2")
    folder = run_here(tmp_path, line, "--extensions", "overlap", "check", SELFPLAY[1])
    assert len(selfplay.snapshots(folder / "snapshots")) == 3


def test_runs_that_play_each_other(tmp_path):
    """Runs with the same folder for snapshots have the same opponents."""
    share = tmp_path / "shared"
    for seed in "12":
        more = "--extensions", f"selfplay(every=128, share={share})", "--seed", seed
        run_here(tmp_path / seed, LINE, *more)
    assert steps(share) == [0, 128, 128, 256, 256]
    runs = {path.stem.partition("-")[2] for path in selfplay.snapshots(share)}
    assert len(runs) == 2


def test_members_of_a_population(tmp_path):
    """Members of a population play each other."""
    share = tmp_path / "snapshots"
    for member in "01":
        line = f"{LINE} --population {tmp_path} --population-size 3 --member {member}"
        line += " --preemption none --evolve-interval 128"
        args = [*SMALL.split(), *line.split()]
        assert population.main([*args, "--extensions", f"selfplay(every=128, share={share})"]) == 0
    assert steps(share) == [0, 128, 128, 256, 256]
    names = {path.stem.partition("-")[2] for path in selfplay.snapshots(share)}
    assert names == {path.parent.name for path in tmp_path.glob("?/*/checkpoint.pt")}
    assert len(names) == 2


@pytest.mark.parametrize("share", [True, False])
def test_a_strangers_snapshots(tmp_path, monkeypatch, capsys, share):
    """A snapshot gives its weights. What else it says names nothing: neither in training, in a
    folder that runs share or in a run folder, nor in the tournament. Another network's weights end
    the run."""
    (tmp_path / "stranger.py").write_text("open('executed', 'w')\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    extension = f"selfplay(every=1000{', share=~/shared' if share else ''})"
    folder = run_here(tmp_path / "runs", LINE, "--extensions", extension)
    place = tmp_path / "shared" if share else folder / "snapshots"
    (path,) = selfplay.snapshots(place)
    content = ver_ppo.load_checkpoint(path)
    content["options"] |= {"policy": "stranger:Evil", "wrappers": ("stranger:Evil",)}
    ver_ppo.write_checkpoint(content, path)
    before = path.read_bytes()
    args = ["--resume", str(folder), "--extensions", extension, "--total-timesteps"]
    assert ver_ppo.main([*args, "384"]) == 0
    if not share:
        assert selfplay.main([str(folder), "--eval-episodes", "2"]) == 0
    assert path.read_bytes() == before and not (tmp_path / "executed").exists()
    content["policy"]["critic.weight"] = torch.zeros(1, 17)
    ver_ppo.write_checkpoint(content, path)
    selfplay.load_snapshot.cache_clear()
    assert ver_ppo.main([*args, "448"]) == 2
    assert "belongs to another network" in capsys.readouterr().err


def test_a_strangers_link(tmp_path, capsys):
    """Snapshots stay in the run folder, even if a stranger has planted a link there."""
    folder = run_here(tmp_path / "runs", LINE)
    (tmp_path / "outside").mkdir()
    (folder / "snapshots").symlink_to(tmp_path / "outside")
    args = ["--resume", str(folder), "--total-timesteps", "384", "--extensions", "selfplay"]
    assert ver_ppo.main(args) == 1
    assert "is a symbolic link" in capsys.readouterr().err
    assert not list((tmp_path / "outside").iterdir())


def test_a_start_that_fails(tmp_path, monkeypatch):
    """The checkpoint does not name the wrapper, even if the environments failed at the start."""
    monkeypatch.setattr(duel.Duel, "observe", lambda *_: 1 / 0)
    monkeypatch.setattr(ver_ppo, "describe_env", lambda _: ver_ppo.spec_of(duel.Duel()))
    with pytest.raises(ZeroDivisionError):
        ver_ppo.main(small(tmp_path, *LINE.split(), *SELFPLAY))
    (folder,) = run_folders(tmp_path)
    assert saved(folder)["options"]["wrappers"] == ()


def test_tournament(tmp_path, capsys):
    """The program plays against four snapshots, and films."""
    folder = run_here(tmp_path, LINE, *SELFPLAY)
    film = tmp_path / "film.gif"
    capsys.readouterr()
    args = [str(folder), "--eval-episodes", "4", "--film", str(film)]
    assert selfplay.main(args) == 0
    said = capsys.readouterr().out
    assert said.count("won ") == 4 and "against the snapshot of step 256" in said
    assert film.stat().st_size > 1000


def test_refusals(tmp_path, capsys):
    """Refused in one line."""
    args = small(tmp_path, *LINE.split(), "--extensions")
    one_line(capsys, [*args, "selfplay(every=0)"], "must be 1 or more")
    one_line(capsys, [*args, "selfplay", "overlap"], "name it behind overlap")
    one_line(capsys, [str(tmp_path)], "there is no checkpoint", selfplay.main)
    assert run_folders(tmp_path) == []
