"""Self-play: an agent that learns against earlier copies of itself (as the duels of Sample Factory,
Petrenko et al. 2020, sections 3.5 and 4.3).

    python ver_ppo.py --env-id duel --extensions selfplay
    python -m notebooks.extensions.selfplay RUN_FOLDER --film duel.gif

The extension writes a snapshot of the policy into RUN_FOLDER/snapshots, at the beginning and after
every 50,000 steps: `selfplay(every=50000, keep=10)`. In each episode, the opponent is one of the
newest 10 snapshots, drawn at random. It acts inside the environment, in the worker process, with a
memory of its own. So it does not change how experience is collected, and only the agent's own steps
are learned from. Runs with the same `share` play each other, such as the members of a population
(one command for each member, --member 0, 1, 2 and 3):

    python -m notebooks.extensions.population --env-id duel --population runs/duels --member 0
        --preemption none --extensions "selfplay(share=runs/duels/snapshots)"

Such runs must have the same network. A snapshot gives an opponent its weights, and nothing else:
the options of the run that plays against it name the network.

The environment must have an attribute `opponent`, and call `opponent.act(observation)` in each
step. It must also keep the argument `options`, which it gets from `ver_ppo.make_env`, as an
attribute (notebooks/environments/duel.py). As a program, this file lets the policy of a run play
against the snapshots of 0, 25, 50 and 75 % of its steps. The evaluation at the end of the run is
against an opponent that acts at random.
"""

import functools
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import gymnasium as gym
import tyro

import ver_ppo
from notebooks.extensions import play


def snapshots(place):
    """The paths of a folder's snapshots, in order of their steps; or only `place`, if it is a
    file."""
    if place.is_file():
        return [place]
    return sorted(place.glob("*.pt"), key=step_of)


def step_of(path):
    """The step at which a snapshot was written. Its name is STEP-RUN.pt."""
    return int(path.stem.partition("-")[0])


@functools.lru_cache(maxsize=32)
def load_snapshot(path, options):
    """Load the weights of a snapshot into the network that these options name, on the CPU. Whatever
    else the file says is not used, since a stranger may have written it."""
    _, policy = play.saved_policy(replace(options, device="cpu"), path)
    return policy


class Against(gym.Wrapper):
    """In each episode, the opponent is one of the newest `keep` snapshots in `place`, or the one
    snapshot that `place` is."""

    def __init__(self, env, place, keep=10):
        super().__init__(env)
        self.place = Path(place)
        self.keep = keep

    def reset(self, **arguments):
        """Begin an episode, with an opponent that has no memory of the one before."""
        observation, info = self.env.reset(**arguments)
        paths = snapshots(self.place)[-self.keep :]
        path = paths[self.np_random.integers(len(paths))]
        policy = load_snapshot(path, self.unwrapped.options)
        self.unwrapped.opponent = play.Agent(policy, self.env)
        return observation, info


class SelfPlay(ver_ppo.Run):
    """The opponents of the environments are snapshots of this run."""

    every: int = 50_000  # steps between two snapshots
    keep: int = 10  # how many of the newest are opponents
    share: str = ""  # a folder for the snapshots of several runs

    def __init__(self, options):
        """As Run.__init__."""
        if self.every < 1 or self.keep < 1:
            raise ver_ppo.UserError("--extensions selfplay: every and keep must be 1 or more")
        if type(self).start is not SelfPlay.start:  # it would not be called
            raise ver_ppo.UserError("--extensions selfplay: name it behind overlap and async")
        super().__init__(options)

    def start(self):
        """As Run.start, with environments whose opponents are snapshots."""
        if self.folder is None:
            raise ver_ppo.UserError("--extensions selfplay: use ver_ppo.py, with one process")
        self.place = self.folder / "snapshots"
        if self.share:
            self.place = Path(self.share).expanduser().resolve()
        self.place.mkdir(parents=True, exist_ok=True)
        if not snapshots(self.place):
            self.snapshot()
        own = self.options
        wrapper = f"{__name__}:Against(place={str(self.place)!r}, keep={self.keep})"
        self.options = replace(own, wrappers=(*own.wrappers, wrapper))
        try:
            super().start()
        finally:
            self.options = own  # those of the checkpoint

    def log(self, rollout, logs):
        """As Run.log. Write a snapshot when a multiple of `every` steps has passed."""
        before = self.step
        super().log(rollout, logs)
        if self.step // self.every > before // self.every:
            self.snapshot()

    def snapshot(self):
        """Write the present weights, as a checkpoint of this run that cannot be continued."""
        content = {"format": ver_ppo.CHECKPOINT_FORMAT, "policy": self.policy.state_dict()}
        content |= {"options": asdict(self.options), "spec": asdict(self.spec)}
        ver_ppo.write_checkpoint(content, self.place / f"{self.step}-{self.folder.name}.pt")


@dataclass(frozen=True)
class Options:
    """Let the policy of a run play against the snapshots of 0, 25, 50 and 75 % of its steps."""

    run: tyro.conf.Positional[Path]  # its folder
    eval_episodes: int = 400  # games against each
    film: Path | None = None  # film of three games against the snapshot of 75 %: .gif or .mp4
    trust: bool = False  # import the code that the run names, because it is your own


def tournament(options):
    """Play. Returns the share of games won (a draw counts half) by the snapshot's steps. Raises
    UserError."""
    checkpoint = options.run / "checkpoint.pt"
    spec, policy, run_options = play.load_saved(checkpoint, options.trust)
    run_options = replace(run_options, eval_episodes=options.eval_episodes)
    paths = snapshots(options.run.absolute() / "snapshots")
    if not paths:
        raise ver_ppo.UserError(f"{options.run} has no snapshots")
    won = {}
    for quarter in range(4):
        path = paths[quarter * len(paths) // 4]
        wrapper = f"{__name__}:Against(place={str(path)!r})"
        against = replace(run_options, wrappers=(*run_options.wrappers, wrapper))
        print(f"against the snapshot of step {step_of(path):,}: ", end="", flush=True)
        won[step_of(path)] = ver_ppo.report_evaluation(policy, spec, against)["won"]
    if options.film:
        play.film(play.Options(options.run, options.film, trust=options.trust), (wrapper,))
    return won


def main(argv=None):
    """Run the command line. Returns exit status 0, or 2 with one line that gives the reason."""
    try:
        tournament(tyro.cli(Options, args=argv))
    except ver_ppo.UserError as error:
        print(f"selfplay.py: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
