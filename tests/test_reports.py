"""Small rules, of which each has surprised a user of a trainer like this one."""

import warnings
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
import torch

import ver_multigpu
import ver_ppo
from notebooks.extensions import play
from notebooks.extensions import wrappers as own_wrappers
from notebooks.extensions.virtual_clock import SPEC
from tests import envs
from tests.helpers import make_environment, make_spec, one_line, run_here, saved

pytestmark = pytest.mark.quick


def test_values_of_other_languages():
    """`false` is not a text, which would count as true."""
    items = ["a=true", "b=false", "c=null", "d=True", "e=none", "f = false ", " g = a.pt"]
    found = ver_ppo.read_arguments(items)
    assert list(found.values()) == [True, False, None, True, "none", False, "a.pt"]
    assert list(found) == list("abcdefg")


def test_half_bounded_actions():
    """-1..1 is a range of 2 next to the bound, so that learning can move the action."""
    for space, expected in [
        (gym.spaces.Box(10, np.inf, (3,)), [10, 11, 12]),
        (gym.spaces.Box(-np.inf, 4, (3,)), [2, 3, 4]),
        (gym.spaces.Box(-np.inf, np.inf, (3,)), [-1, 0, 1]),
        (gym.spaces.Box(-3e38, 3e38, (3,)), [-1, 0, 1]),
    ]:
        action = np.array([-1, 0, 1], np.float32)
        assert ver_ppo.to_env_action(space, action).tolist() == expected


def test_seeds_have_31_bits():
    """A simulator in C keeps them in an int."""
    seeds = [ver_ppo.derive_seed(1, k) for k in range(1000)]
    assert 2**30 < max(seeds) < 2**31 and min(seeds) >= 0


def test_ranks_of_a_machine_count_on(monkeypatch):
    """Simulators derive ports from `number`, so two ranks never share one."""
    seen = []
    gym.register("Seen-v0", lambda number: seen.append(number) or gym.Env(), kwargs={"number": 0})
    monkeypatch.setenv("LOCAL_RANK", "2")
    ver_ppo.make_env(ver_ppo.Options(env_id="Seen-v0", num_envs=8), number=3)
    assert seen == [19]


def test_entropy_of_unequal_choices():
    """Its gradient is a number, however large its weight."""
    spec = make_spec(gym.spaces.Discrete(2), gym.spaces.MultiDiscrete([2, 5]))
    policy = ver_ppo.Policy(spec, ver_ppo.Options(hidden_size=8))
    distribution, _ = policy.heads(torch.randn(4, 8))
    (1000.0 * distribution.entropy().sum()).backward()
    assert torch.isfinite(policy.actor.weight.grad).all()


def test_seconds_of_a_rank_that_gives_no_step():
    """An environment without a step takes as long as it did before, or as the rollout. One step of
    8 s takes 8 s, although the rollout lasted 3 s."""
    rollout = ver_ppo.Rollout(SPEC, 4, 3, (2, 8))
    rollout.rows = 1
    rollout.started_at = 100.0
    rollout.ended_at = 103.0
    rollout["env"][0] = 1
    rollout["began_at"][0] = 94.0
    rollout["step_sec"][0] = 8.0
    found = ver_multigpu.step_seconds(rollout, 4, np.array([20.0, 0.1, 0.0]))
    assert found.tolist() == [20.0, 8.0, 3.0]


def test_a_film_of_no_episode(tmp_path, capsys):
    """Is refused in one line."""
    one_line(capsys, [str(tmp_path), "--episodes", "0"], "must be 1 or more", play.main)


# ------------------------------------------------------------------------------- Random numbers


def first_answers(split, seed, number, started, source, episodes=2):
    """What an environment draws from a global generator: when it is made, and in each episode."""
    env_id = "tests.envs:Drawn-v0"
    environment, io = make_environment(env_id, number, env_kwargs=(f"source={source}",), seed=seed)
    environment.split = split
    io["episode"][:] = started
    drawn = []
    for _ in range(3 * episodes - 2):
        environment.answer()
        drawn.append(float(io["obs"]["obs"][number, 1]))
    return [environment.env.unwrapped.made, *dict.fromkeys(drawn)]


@pytest.mark.parametrize("source", envs.Drawn.sources)
def test_global_random_generators(source):
    """Environments that use them draw other numbers in each split, with each --seed, in each
    environment, after each start and in each episode; and the same ones if all that is equal."""
    hows = [("train", 1, 0, 0), ("val", 1, 0, 0), ("train", 2, 0, 0), ("train", 1, 1, 0)]
    hows.append(("train", 1, 0, 5))  # started again
    found = [first_answers(*how, source) for how in hows]
    numbers = sum(found, [])
    assert len(numbers) == len(set(numbers)) == 3 * len(hows)
    assert found == [first_answers(*how, source) for how in hows]


@pytest.mark.parametrize("source", envs.Drawn.sources)
def test_global_random_generators_of_workers(source):
    """Processes inherit no random numbers from the fork server."""
    how = {"env_id": "tests.envs:Drawn-v0", "env_kwargs": (f"source={source}",), "num_envs": 4}
    drawn = []
    for split in ("train", "val"):
        options = ver_ppo.Options(**how, num_workers=2)
        spec = ver_ppo.describe_env(options)
        io = ver_ppo.EnvIO(spec, 4)
        workers = ver_ppo.make_workers(options, split, spec, io)
        answered = []
        while len(answered) < 4:
            answered += workers.receive(1.0)
        drawn += io["obs"]["obs"][:, 1].tolist()
        workers.close()
    assert len(set(drawn)) == 8


def test_which_resets_have_a_seed(monkeypatch):
    """In training the first one after a start, so that an environment over a data set goes on from
    item to item. In validation every one, so that all policies play the same episodes."""
    seeds = []
    own = envs.Count.reset
    note = lambda env, *, seed=None, options=None: seeds.append(seed) or own(env, seed=seed)
    monkeypatch.setattr(envs.Count, "reset", note)
    found = {}
    for split, started in (("train", 0), ("val", 0), ("train", 3)):
        environment, io = make_environment("tests.envs:Count-v0")
        environment.split = split
        io["episode"][:] = started
        seeds.clear()
        for _ in range(15):
            environment.answer()
        found[split, started] = list(seeds)
    assert [seed is None for seed in found["train", 0]] == [False, True, True]
    assert len(set(found["val", 0])) == 3 and None not in found["val", 0]
    starts = [seeds[0] for seeds in found.values()]
    assert len(set(starts)) == 3  # a resumed run repeats no episode


# --------------------------------------------------------------------------------- Observations


def test_what_is_an_image():
    """Three dimensions: the channels come first if that axis alone is the smallest."""
    images = {(84, 84, 4): (4, 84, 84, True), (4, 84, 84): (4, 84, 84, False)}
    images |= {(8, 8, 111): (111, 8, 8, True), (7, 7, 3): (3, 7, 7, True)}
    images |= {(3, 3, 3): (3, 3, 3, True), (3, 9, 3): (3, 3, 9, True)}
    for shape, layout in images.items():
        assert ver_ppo.image_layout(shape) == layout
    for shape in [(30, 12), (84, 84), (5,), (), (2, 3, 4, 5)]:
        assert ver_ppo.image_layout(shape) is None


def test_how_an_observation_is_read(tmp_path, capsys):
    """The first lines of a run say it."""
    run_here(tmp_path, "--env-id tests.envs:Everything-v0 --num-workers 0 --total-timesteps 64")
    lines = capsys.readouterr().out.splitlines()
    (line,) = [each for each in lines if each.startswith("observation: ")]
    assert "camera/rgb: uint8 (24, 20, 3), channels last, normalized; " in line
    assert "first: uint8 (3, 36, 40), channels first, normalized; " in line
    assert "room: Discrete(4, start=2); " in line
    assert "arm: float64 (2, 3), normalized; " in line
    assert "action: MultiDiscrete([3 2 4])" in lines


@pytest.mark.parametrize("dtype", [np.uint8, np.float32, np.float64])
@pytest.mark.parametrize("high, large", [(1, False), (30, False), (31, True), (255, True)])
def test_what_is_normalized(dtype, high, large):
    """All numbers with bounds beyond -30..30, of any type, in vectors and images. Others reach the
    network as they are."""
    for shape in [(8,), (12, 12, 2)]:
        spec = make_spec(gym.spaces.Box(0, high, shape, dtype), gym.spaces.Discrete(2))
        source = ver_ppo.Input("obs", spec)
        assert isinstance(source.normalize, ver_ppo.Statistics) == large
        kind, _, marked = spec.obs["obs"]
        assert marked == large
        if not large:
            ones = torch.ones(1, *shape, dtype=getattr(torch, kind))
            assert source({"obs": ones}).unique().tolist() == [1.0]


def test_metadata_of_a_wrapper():
    """Does not hide the metrics of the environment."""
    env = gym.Wrapper(envs.Listed())
    env.metadata = {"render_fps": 30}
    assert ver_ppo.spec_of(env).metrics == ["index"]


def test_resize_in_a_tuple():
    """Images of a Tuple are resized, too."""
    env = gym.Env()
    image = gym.spaces.Box(0, 255, (12, 20, 3), np.uint8)
    env.observation_space = gym.spaces.Tuple([image, gym.spaces.Discrete(3)])
    resized = own_wrappers.Resize(env, height=6, width=10)
    seen = resized.observation(env.observation_space.sample())
    assert seen in resized.observation_space and seen[0].shape == (6, 10, 3)


def test_a_space_that_cannot_be_pickled(tmp_path):
    """Is never pickled."""
    line = "--env-id tests.envs:Rich-v0 --num-workers 1 --total-timesteps 64"
    assert saved(run_here(tmp_path, line))["step"] == 64


# --------------------------------------------------------------------------- Answers and actions


@pytest.mark.parametrize("flags", [({}, False), (False, {}), (0.3, False), (1, 0), (True, None)])
def test_flags_that_are_none(monkeypatch, flags):
    """`terminated` and `truncated` are True or False. Numpy's count, too."""
    environment, io = make_environment("tests.envs:Count-v0")
    environment.answer()
    monkeypatch.setattr(envs.Count, "advance", lambda *_: (np.zeros(2), 0.0, *flags, {}))
    with pytest.raises(ValueError, match="the others True or False"):
        environment.answer()
    flags = np.True_, np.False_
    environment.answer()
    assert io["terminated"][0] and not io["truncated"][0]


@pytest.mark.parametrize("metric", [np.nan, np.inf])
def test_metrics_that_are_no_numbers(monkeypatch, metric):
    """Are an error, like rewards."""
    environment, io = make_environment("tests.envs:Listed-v0")
    environment.answer()
    info = {"index": metric}
    monkeypatch.setattr(envs.Listed, "step", lambda *_: (np.zeros(2), 0.0, True, False, info))
    with pytest.raises(ValueError, match="metrics must be finite numbers: {'index': "):
        environment.answer()


def test_gymnasium_checks_the_trial():
    """It warns of what is unusual. (What it refuses, the trial refuses.)"""
    options = ver_ppo.Options(env_id="tests.envs:Count-v0", num_workers=0)
    with pytest.warns(UserWarning, match="reward"), pytest.MonkeyPatch.context() as patch:
        strange = lambda env, action: (env.observe(), "1", False, False, {})
        patch.setattr(envs.Count, "step", strange)
        ver_ppo.describe_env(options)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for env_id in ("pointnav", "CartPole-v1", "notebooks.environments.rearrange:Pick-v0"):
            ver_ppo.describe_env(ver_ppo.Options(env_id=env_id, num_workers=0))


def test_the_range_of_actions_is_each_environments_own():
    """Environments may differ in it."""
    for number in range(3):
        environment, io = make_environment("tests.envs:Continuous-v0", number)
        environment.answer()
        taken = []
        space = gym.spaces.Box(-1 - number, 1 + number, environment.env.action_space.shape)
        environment.env = SimpleNamespace(
            action_space=space,
            observation_space=environment.env.observation_space,
            step=lambda action: taken.append(action) or (None, 0.0, False, False, {}),
        )
        environment.write = lambda *_: None
        io["action"][number] = 1.0
        environment.answer()
        assert (taken[0] == 1 + number).all()


def test_discrete_actions():
    """Are numpy's integers, as in Gymnasium's own samples."""
    action = ver_ppo.to_env_action(gym.spaces.Discrete(3, start=-1), np.array([2]))
    assert isinstance(action, np.int64) and action == 1 and action.item() == 1


def test_delayed_actions_with_one_array():
    """The observation that is late is not overwritten by the next one."""
    env_id = "tests.envs:Reused-v0"
    env = ver_ppo.make_env(ver_ppo.Options(env_id=env_id, wrappers=("action_delay",)))
    seen = [env.reset(seed=1)[0].max()]
    for _ in range(20):
        observation = env.step(np.int64(0))[0]
        env.thread.submit(lambda: None).result()  # the next step is done
        seen.append(observation.max())
    env.close()
    assert seen == [0, *range(0, 200, 10)]


# ----------------------------------------------------------------------------------------- Films


def test_a_film(tmp_path):
    """In a folder that is made, of pictures that are numbers from 0 to 1, by a policy whose
    observations have negative strides."""
    line = "--env-id tests.envs:Reused-v0 --num-workers 0 --total-timesteps 64 --eval-episodes 0"
    folder = run_here(tmp_path, line)
    film = tmp_path / "new" / "film.gif"
    args = [str(folder), "--film", str(film), "--episodes", "1", "--trust"]
    assert play.main(args) == 0
    assert film.stat().st_size > 0
    spec, policy, options = play.load_saved(folder / "checkpoint.pt", trust=True)
    env = ver_ppo.make_env(options, "val")
    pictures = [*play.frames(env, spec, policy, False, 0, {})]
    assert len(pictures) == 20 and {picture.dtype for picture in pictures} == {np.dtype(np.uint8)}
    assert [picture.max() for picture in pictures] == [*range(0, 200, 10)]
