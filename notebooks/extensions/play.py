"""Load a trained policy and let it act: one robot, one episode, no trainer. As a program, film it:

    python -m notebooks.extensions.play runs/pointnav__ver__1__1700000000 --film film.gif
"""

import contextlib
import itertools
import sys
from dataclasses import dataclass, fields, replace
from pathlib import Path

import numpy as np
import torch
import tyro

import ver_ppo

MOST_FRAMES = 1000  # of an episode that is filmed
FRAMES_SEC = 10


def saved_options(path, trust=False):
    """The options of a checkpoint's run, to evaluate it. With `trust`, the checkpoint may name any
    code, which is then imported. Raises UserError."""
    saved = ver_ppo.load_checkpoint(path)["options"]
    known = {field.name for field in fields(ver_ppo.Options)}  # without those of ver_multigpu
    kept = {name: value for name, value in saved.items() if name in known}
    # extensions change the training alone
    fixed = {"device": "auto", "checkpoint": str(path), "resume": None, "extensions": ()}
    options = ver_ppo.Options(**kept | fixed)
    try:
        ver_ppo.check_doors(options, options if trust else ver_ppo.Options(), path)
    except ver_ppo.UserError as error:
        raise ver_ppo.UserError(f"{error}; here, --trust is enough") from None
    return options


def load_policy(folder, trust=False):
    """The policy and the options of a run, on the CPU. With `trust`, the run may name any code.
    Raises UserError."""
    _, policy, options = load_saved(Path(folder) / "checkpoint.pt", trust)
    return policy, options


def load_saved(path, trust=False):
    """The Spec, the policy and the options of a checkpoint. As `load_policy`."""
    options = replace(saved_options(path, trust), device="cpu")
    return *saved_policy(options, path), options


def saved_policy(options, path):
    """The Spec and the policy of a checkpoint, with the network that the options name. No
    environment is made: the checkpoint holds the Spec. Raises UserError."""
    spec = ver_ppo.Spec(**ver_ppo.load_checkpoint(path)["spec"])
    policy = ver_ppo.make_policy(spec, options)
    ver_ppo.load_weights(policy, path, spec)
    return spec, policy


class Skill:
    """A policy that acts for one robot, with its memory and its last action. With `greedy`, it
    takes the most probable action instead of sampling."""

    def __init__(self, policy, greedy=False):
        self.policy = policy
        self.greedy = greedy
        self.reset()

    def reset(self):
        """Forget everything, because an episode begins."""
        policy = self.policy
        self.state = torch.zeros(1, *policy.state_shape)
        self.first = torch.tensor([True])
        if policy.choices:
            self.action = torch.zeros(1, len(policy.choices), dtype=torch.int64)
        else:
            self.action = torch.zeros(1, len(policy.log_std_A))

    @torch.inference_mode()
    def act(self, observation):
        """Choose the next action."""
        obs = {key: torch.from_numpy(part)[None] for key, part in observation.items()}
        inputs = (obs, self.action, self.first, self.state)
        distribution, _, self.state = self.policy.step(*inputs)
        self.action = distribution.mode if self.greedy else distribution.sample()
        self.first = torch.tensor([False])
        return self.action[0].numpy()


class Agent(Skill):
    """A policy for any environment that it was trained in. It takes the environment's own
    observations and returns the environment's own actions."""

    def __init__(self, policy, env, greedy=False):
        super().__init__(policy, greedy)
        self.env = env
        self.spec = ver_ppo.spec_of(env)

    def act(self, observation):
        space = self.env.observation_space
        parts = ver_ppo.read_observation(self.spec, space, observation)
        return ver_ppo.to_env_action(self.env.action_space, super().act(parts))


def play(policy, env, seed):
    """Play one episode. Yields the environment without its wrappers after every step, with the last
    `info` in `env.info`."""
    env = env.unwrapped
    skill = Skill(policy)
    observation, _ = env.reset(seed=seed)
    ended = False
    while not ended:
        action = skill.act(observation).item()
        observation, _, terminated, truncated, env.info = env.step(action)
        ended = terminated or truncated
        yield env


def frames(env, spec, policy, greedy, seed, metrics):
    """Play an episode of at most MOST_FRAMES steps, and yield the rendered pictures. At the end,
    the dictionary `metrics` has the episode's metrics. Raises UserError."""
    observation, _ = env.reset(seed=seed)
    agent = Agent(policy, env, greedy)  # after the reset, because Habitat then knows its metrics
    spec.compare(agent.spec, "the environment is not that of the run")
    for _ in range(MOST_FRAMES):
        picture = np.asarray(env.render())
        if picture.ndim != 3:
            raise ver_ppo.UserError("this environment renders no pictures")
        if picture.dtype.kind == "f":  # 0..1
            picture = 255 * picture
        yield np.ascontiguousarray(picture, np.uint8)
        observation, _, terminated, truncated, info = env.step(agent.act(observation))
        if terminated or truncated:
            metrics.update({name: float(info[name]) for name in agent.spec.metrics})
            return


def write_film(path, pictures):
    """Write pictures (H x W x 3, bytes) as GIF or MP4, depending on the path's ending. Raises
    UserError."""
    if path.suffix == ".mp4":
        try:
            import imageio.v2
            import imageio_ffmpeg  # noqa: F401
        except ImportError:
            raise ver_ppo.UserError("an MP4 needs: pip install imageio[ffmpeg]") from None
        with imageio.v2.get_writer(path, fps=FRAMES_SEC) as writer:
            for picture in pictures:
                writer.append_data(picture)
        return
    from PIL import Image

    images = (Image.fromarray(picture).quantize() for picture in pictures)
    first = next(images)
    first.save(path, save_all=True, append_images=images, duration=1000 // FRAMES_SEC, loop=0)


def film(options, wrappers=()):
    """Write the films, with these wrappers around the run's own. Returns their paths. Raises
    UserError."""
    if options.episodes < 1:
        raise ver_ppo.UserError(f"--episodes {options.episodes}: must be 1 or more")
    if options.film.suffix not in (".gif", ".mp4"):
        raise ver_ppo.UserError(f"--film {options.film}: must end in .gif or .mp4")
    path = options.film.absolute()  # an environment may change the current folder
    spec, policy, run_options = load_saved(options.run / "checkpoint.pt", options.trust)
    env_kwargs = (*run_options.env_kwargs, "render_mode=rgb_array", *options.env_kwargs)
    wrappers = (*run_options.wrappers, *wrappers)
    run_options = replace(run_options, env_kwargs=env_kwargs, wrappers=wrappers)
    env = ver_ppo.make_env(run_options, "val")
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    measured = [{} for _ in range(options.episodes)]
    how = env, spec, policy, options.greedy
    films = [frames(*how, seed, measured[seed]) for seed in range(options.episodes)]
    with contextlib.closing(env):
        if not options.each:
            write_film(path, itertools.chain.from_iterable(films))
            return [path]
        paths = []
        for number, pictures in enumerate(films):
            one = path.with_stem(f"{path.stem}_{number}")
            write_film(one, pictures)
            numbers = [f"_{name}={value:.2f}" for name, value in measured[number].items()]
            named = "".join([one.stem, *numbers]).replace("/", "-")
            paths.append(one.rename(one.with_stem(named)))
        return paths


@dataclass(frozen=True)
class Options:
    """Film the policy of a run."""

    run: tyro.conf.Positional[Path]  # its folder
    film: Path = Path("film.gif")  # file to write: .gif or .mp4
    episodes: int = 3  # number of validation episodes
    each: bool = False  # write one film for each episode, with its metrics in the name
    greedy: bool = False  # take the most probable actions instead of sampling
    # further arguments of the environment, KEY=VALUE (a map in Habitat's pictures, say)
    env_kwargs: tuple[str, ...] = ()
    trust: bool = False  # import the code that the run names, because it is your own


def main(argv=None):
    """Run the command line. Returns exit status 0, or 2 with one line that gives the reason."""
    options = tyro.cli(Options, args=argv)
    try:
        paths = film(options)
    except ver_ppo.UserError as error:
        print(f"play.py: {error}", file=sys.stderr)
        return 2
    for path in paths:
        print(f"film: {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
