"""The neural controller: the planner's goal reaches the agent, learning equals acting, and only the
planner learns."""

import warnings

import pytest
import torch

import ver_ppo
from notebooks.extensions.controller import NeuralController
from tests.helpers import one_line, run_here, saved, small

WORDS = ("simulator=builtin", "image_size=16")
COLORS = (*WORDS, "camera=rgb")  # colors are normalized
LINE = f"--env-kwargs {' '.join(COLORS)} --num-workers 0"


def build(words=WORDS, **options):
    """Options, Spec, and a policy with random weights."""
    # as if evaluated: all weights come from a checkpoint
    given = {"env_kwargs": words, "policy": "controller", "checkpoint": "FILE", "device": "cpu"}
    options = ver_ppo.Options(num_workers=0, hidden_size=16, **given, **options)
    spec, policy = ver_ppo.build(options)
    assert isinstance(policy, NeuralController)
    torch.nn.init.ones_(policy.critic.scale)  # else all values are 0
    return options, spec, policy


def observations(size):
    """Random observations of pointnav."""
    return {"depth": torch.rand(size, 16, 16, 1), "goal": torch.rand(size, 3)}


def test_goal_is_the_planners():
    """The environment's goal changes nothing. Each number of the planner's goal changes the action.
    """
    _, _, policy = build()
    obs, state = observations(5), torch.randn(5, *policy.state_shape)
    inputs = torch.ones(5, 1, dtype=torch.int64), torch.zeros(5, dtype=torch.bool), state
    before = policy.step(obs, *inputs)[0].base_dist.logits
    assert torch.equal(
        before, policy.step(obs | {"goal": torch.rand(5, 3)}, *inputs)[0].base_dist.logits
    )
    for component in range(3):
        policy.planner.actor.bias.data[component] += 1.0
        after = policy.step(obs, *inputs)[0].base_dist.logits
        assert not torch.allclose(before, after, atol=1e-6)
        before = after
    goal_B3, _ = policy.planner.heads(torch.randn(100, 16) * 100)
    assert goal_B3[:, 0].min() >= -0.25 and goal_B3[:, 1:].abs().max() <= 1  # elu(x) + 0.75, tanh


@pytest.mark.parametrize("layers", [1, 2, 0])
def test_controller_is_the_agent(layers):
    """With the same goal, the controller's distribution equals that of the PointNav agent whose
    weights it has."""
    options, spec, policy = build(lstm_layers=layers)
    agent = ver_ppo.Policy(spec, options)
    policy.load_state_dict(policy.state_dict() | agent.state_dict())
    obs = observations(4)
    action = torch.zeros(4, 1, dtype=torch.int64)
    first = torch.tensor([True, False, False, False])
    own, state = torch.zeros(2, 4, *agent.state_shape)
    for _ in range(3):
        both = torch.cat([own, state], dim=1)
        distribution, _, after = policy.step(obs, action, first, both)
        goal, _, _ = policy.planner.step([agent.encoders[0](obs)], action, first, own)
        expected, _, state = agent.step(obs | {"goal": goal}, action, first, state)
        assert torch.allclose(distribution.base_dist.logits, expected.base_dist.logits, atol=1e-6)
        own, controller_state = after.chunk(2, dim=1)
        assert torch.allclose(controller_state, state, atol=1e-6)
        obs = observations(4)
        action = distribution.sample()
        first = torch.zeros(4, dtype=torch.bool)


def test_learning_is_acting():
    """Packed sequences give the same values and log-probabilities as single steps. Gradients reach
    only the planner."""
    _, _, policy = build()
    length, batch_sizes = [4, 2, 1], torch.tensor([3, 2, 1, 1])
    steps = [observations(int(size)) for size in batch_sizes]
    actions = [torch.randint(4, (int(size), 1)) for size in batch_sizes]
    start = torch.randn(3, *policy.state_shape)
    state, values, logits = start, [], []
    for obs, action in zip(steps, actions):
        distribution, value, state = policy.step(
            obs, action, torch.zeros(len(action), dtype=torch.bool), state[: len(action)]
        )
        values.append(value), logits.append(distribution.base_dist.logits)
    obs = {key: torch.cat([step[key] for step in steps]) for key in steps[0]}
    packed = policy.sequences(
        obs, torch.cat(actions), torch.zeros(sum(length), dtype=torch.bool), start, batch_sizes
    )
    assert torch.allclose(packed[1], torch.cat(values), atol=1e-5)
    assert torch.allclose(packed[0].base_dist.logits, torch.cat(logits), atol=1e-5)
    packed[0].log_prob(torch.zeros(sum(length), 1, dtype=torch.int64)).sum().backward()
    moved = {
        name
        for name, parameter in policy.named_parameters()
        if parameter.grad is not None and parameter.grad.any()
    }
    assert {"planner.actor.weight", "planner.core.weight_hh_l0"} <= moved
    assert all(name.startswith("planner.") for name in moved)


@pytest.mark.parametrize("env_id", ["pointnav", "duel", "tasks:Flee-v0", "rearrange:Pick-v0"])
def test_no_warnings(env_id):
    """Gymnasium's checks of a first reset and step, which each run makes, find nothing."""
    words = () if env_id in ("duel", "rearrange:Pick-v0") else WORDS
    env_id = f"notebooks.environments.{env_id}" if ":" in env_id else env_id
    env = ver_ppo.make_env(ver_ppo.Options(env_id=env_id, env_kwargs=words), checked=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        env.reset(seed=0)
        env.step(env.action_space.sample())
    env.close()


FLEE = "--env-id notebooks.environments.tasks:Flee-v0"


def test_controller(tmp_path, capsys, monkeypatch):
    """A whole run from a PointNav agent's checkpoint changes only the planner, with overlap too. It
    continues and is evaluated without that file. Files that do not fit are refused."""
    agent = run_here(tmp_path / "one", f"{LINE} --total-timesteps 64") / "checkpoint.pt"
    before = ver_ppo.load_checkpoint(agent)["policy"]
    before["log_ent_coef"] = torch.tensor(1e-3).log()
    fresh = build(COLORS)[2].state_dict()
    one_line(
        capsys,
        small(tmp_path / "none", *f"{LINE} {FLEE} --policy controller".split()),
        "give an agent's checkpoint",
    )
    monkeypatch.setenv("HOME", str(agent.parent))
    line = f"{LINE} {FLEE} --policy controller(file={agent})"
    for how in ("--extensions overlap", "--policy controller(file=~/checkpoint.pt)"):
        lines = f"{line} {how} --learning-rate 1e-2 --ent-coef 1e-3 --total-timesteps 128"
        run = run_here(tmp_path / how.split()[0], lines)
        after = saved(run)["policy"]
        for name, tensor in before.items():
            assert torch.equal(tensor, after[name]), name
        assert not torch.equal(after["planner.actor.weight"], fresh["planner.actor.weight"])
    capsys.readouterr()
    for change, words in {
        "--hidden-size 24": "belongs to another network",
        "--env-kwargs simulator=builtin camera=rgb image_size=32": "rgb is uint8 (32, 32, 3)",
        "--env-id CartPole-v1 --env-kwargs": "the observation `goal`",
        "--wrappers gymnasium.wrappers:FilterObservation(filter_keys=['goal'])": "needs images",
    }.items():
        one_line(capsys, small(tmp_path / "none", *line.split(), *change.split()), words)
    assert not (tmp_path / "none").exists()
    agent.unlink()
    repeated = [*FLEE.split(), "--policy", saved(run)["options"]["policy"]]  # no bare words
    assert ver_ppo.main(["--resume", str(run), *repeated, "--total-timesteps", "192"]) == 0
    assert saved(run)["step"] == 192
    evaluation = ["--checkpoint", str(run), *repeated, "--eval-episodes", "2"]
    assert ver_ppo.main(evaluation) == 0
    assert "evaluation, 2 sampled episodes" in capsys.readouterr().out
