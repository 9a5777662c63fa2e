"""Load what was trained, and let it act: one robot, one episode, no trainer. Or film it:

    python -m notebooks.extensions.play runs/pointnav__ver__1__1700000000 --gif film.gif
"""

import sys
from dataclasses import dataclass, fields, replace
from pathlib import Path

import numpy as np
import torch
import tyro

import ver_ppo

MOST_FRAMES = 1000  # of an episode that is filmed


def load_policy(folder, trust=False):
    """Policy and options of a finished run, on the CPU. `trust`: load whatever code the run names,
    as `ver_ppo.check_foreign` explains. Raises UserError."""
    path = Path(folder) / "checkpoint.pt"
    saved = ver_ppo.load_checkpoint(path)["options"]
    known = {field.name for field in fields(ver_ppo.Options)}  # not ver_multigpu's, say
    kept = {name: value for name, value in saved.items() if name in known}
    options = ver_ppo.Options(**kept | {"device": "cpu", "resume": str(folder)})
    if not trust:
        ver_ppo.check_foreign(options.env_id, "env_id")
        ver_ppo.check_foreign(options.policy, "policy")
        for text in options.wrappers:
            ver_ppo.check_foreign(text, "wrappers")
    policy = ver_ppo.make_policy(ver_ppo.describe_env(options), options)
    ver_ppo.load_policy(policy, path)
    return policy, options


class Skill:
    """A policy that acts for one robot: its memory, empty at first, and its last action. `greedy`:
    it takes the most probable actions in place of sampled ones."""

    def __init__(self, policy, greedy=False):
        self.policy = policy
        self.greedy = greedy
        self.reset()

    def reset(self):
        """Forget everything: another episode begins."""
        policy = self.policy
        self.state = torch.zeros(1, *policy.state_shape)
        self.first = torch.tensor([True])
        if policy.choices:
            self.action = torch.zeros(1, len(policy.choices), dtype=torch.int64)
        else:
            self.action = torch.zeros(1, policy.actor.out_features)

    @torch.inference_mode()
    def act(self, observation):
        """The next action."""
        obs = {key: torch.from_numpy(part)[None] for key, part in observation.items()}
        inputs = (obs, self.action, self.first, self.state)
        distribution, _, self.state = self.policy.step(*inputs)
        self.action = distribution.mode if self.greedy else distribution.sample()
        self.first = torch.tensor([False])
        return self.action[0].numpy()


class Agent(Skill):
    """A policy in the environment that it has learned in, of any kind: takes observations as they
    come, and gives actions as that environment wants them. `spec` is what `describe_env` says of
    it."""

    def __init__(self, policy, spec, greedy=False):
        super().__init__(policy, greedy)
        self.spec = spec

    def act(self, observation):
        leaves = self.spec.leaves(observation)
        rows = {key: np.asarray(leaves[key], kind) for key, kind, _ in self.spec.obs_fields}
        return ver_ppo.to_env_action(self.spec.action, super().act(rows))


def play(policy, env, seed):
    """Play one episode: yields the environment, without wrappers, after every step; its last `info`
    is in `env.info`."""
    env = env.unwrapped
    skill = Skill(policy)
    observation, _ = env.reset(seed=seed)
    ended = False
    while not ended:
        action = skill.act(observation).item()
        observation, _, terminated, truncated, env.info = env.step(action)
        ended = terminated or truncated
        yield env


def frames(folder, episodes=3, trust=False):
    """Play validation episodes of a run, at most MOST_FRAMES steps of each: yields the pictures
    that the environment renders. Raises UserError."""
    policy, options = load_policy(folder, trust)
    options = replace(options, env_kwargs=(*options.env_kwargs, "render_mode=rgb_array"))
    agent_spec = ver_ppo.describe_env(options)
    env = ver_ppo.make_env(options, "val")
    agent = Agent(policy, agent_spec)
    for seed in range(episodes):
        agent.reset()
        observation, _ = env.reset(seed=seed)
        for _ in range(MOST_FRAMES):
            picture = env.render()
            if np.ndim(picture) != 3:
                raise ver_ppo.UserError(f"{options.env_id} renders no pictures")
            yield picture
            observation, _, terminated, truncated, _ = env.step(agent.act(observation))
            if terminated or truncated:
                break
    env.close()


def film(folder, path, episodes=3, trust=False):
    """Write a gif of some validation episodes of a run. Raises UserError."""
    from PIL import Image

    if episodes < 1:
        raise ver_ppo.UserError(f"--episodes {episodes}: must be 1 or more")
    pictures = (Image.fromarray(frame).quantize() for frame in frames(folder, episodes, trust))
    first = next(pictures)
    first.save(path, save_all=True, append_images=pictures, duration=100, loop=0)


@dataclass(frozen=True)
class Options:
    """Film what a run has learned."""

    run: tyro.conf.Positional[Path]  # its folder
    gif: Path = Path("film.gif")  # where to write the film
    episodes: int = 3  # of the validation split
    trust: bool = False  # load whatever code the run names: it is your own


def main(argv=None):
    """Command line. Exit status 0, or 2 with one line that says why."""
    options = tyro.cli(Options, args=argv)
    try:
        film(options.run, options.gif, options.episodes, options.trust)
    except ver_ppo.UserError as error:
        print(f"play.py: {error}", file=sys.stderr)
        return 2
    print(f"film: {options.gif}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
