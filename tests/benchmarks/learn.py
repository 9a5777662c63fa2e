"""Measure what ver_ppo.py learns.

    learn.py tasks [TASK ...] [--seeds 1 2 3]     what the defaults learn; two hours on two cores
    learn.py published [TASK ...] [--jobs 2]      tasks with published results; five hours
    learn.py minutes [--samplers sync ver]        success over minutes and over steps in a slow,
                                                  uneven simulator (VER figures 4 and 5): samplers
                                                  and seeds, one run at a time; two hours
    learn.py starts                               seconds until an agent of PointNav finds its goal;
                                                  five seeds, ten minutes
    learn.py transfer --checkpoint FILE           how much a trained agent helps on Flee and Explore
                                                  (DD-PPO section 6); 24 runs of two minutes
    learn.py skills --folder F --checkpoint FILE  chained skills, with a base that moves and without
                                                  (VER section 6); half an hour
    learn.py populations [--trials 4]             whether a population finds a good learning rate;
                                                  30 minutes
    learn.py duels --folder F                     games won against earlier copies of oneself
                                                  (Sample Factory section 4.3); ten minutes
    learn.py parts [TASK ...]                     what each part of VER is worth: five seeds
                                                  without it; five hours on one core
    learn.py weights [TASK or SETTING ...]        what the importance weights are worth where
                                                  environments differ; ten seeds

FILE is the checkpoint.pt of a run of `pointnav`. Runs in --folder are not repeated, nor are runs of
minutes, transfer, parts and weights that are in the results. Every run is a training by its command
line.

tasks, published    Keeps the evaluations and the curves. Some tasks need
                    `pip install "gymnasium[box2d,mujoco]" minigrid popgym`.
minutes             PointNav with steps that also sleep, 20 ms on average, and default options:
                    as uneven as the paper's simulators, and more uneven. A run ends when 90 of the
                    last 100 training episodes succeed. Keeps their success and SPL, and the mean
                    importance weight, after each update. Use an otherwise idle machine.
parts, weights      In simulated time: the load of the machine does not matter. studies.py has the
                    tasks, and what was expected; parts.py has the variants.
populations         Each trial draws four learning rates. The members of a population begin with
                    them, and so do four single runs. Eight seeds have the tuned rate. The best of
                    four is the run with the best last hundred training episodes.
"""

import functools
import itertools
import json
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import harness
import numpy as np
import studies
from harness import ver_ppo

from notebooks import draw
from notebooks.extensions import chain, play, selfplay

# ------------------------------------------------------------------------------ Tasks, and others'


class Task(NamedTuple):
    """A task of the tables.

    env_id       the environment
    thousands    thousand steps of training
    options      further options
    words        its name in the tables; {} stands for the environment and the steps
    published    a published result"""

    env_id: str
    thousands: int
    options: str = ""
    words: str = "{}"
    published: str = ""

    @property
    def described(self):
        """Its name in the tables."""
        steps = f"{self.thousands} k" if self.thousands < 1000 else f"{self.thousands // 1000} M"
        return self.words.format(f"`{self.env_id.rpartition(':')[2]}`, {steps}")

    @property
    def arguments(self):
        """Those of its command line."""
        steps = self.thousands * 1000
        return f"--env-id {self.env_id} --total-timesteps {steps} {self.options}".strip()


CUE = "tests.envs:Cue-v0"
POPGYM = "popgym:popgym-"
DOORKEY = "minigrid:MiniGrid-DoorKey-5x5-v0"
BLIND = "--wrappers \"gymnasium.wrappers:FilterObservation(filter_keys=['goal'])\""
NO_VELOCITY = "--wrappers 'hide(indices={})'"
SMALL = "--num-envs 16 --num-minibatches 4 --ent-coef 1e-2"  # the defaults when it was measured
MORE_EPOCHS = "--update-epochs 10 --num-envs 16 --num-steps 64 --num-minibatches 4"
ZOO = f"{MORE_EPOCHS} --gamma 0.9 --learning-rate 1e-3 --ent-coef 0"
CLEANRL = "--num-envs 1 --num-steps 2048 --update-epochs 10 --num-minibatches 32"
CLEANRL += " --learning-rate 3e-4 --ent-coef 0 --lstm-layers 0"
CARTPOLE_WORDS = "`CartPole-v1` without velocities, 100 k"
PENDULUM_WORDS = "`Pendulum-v1` without velocity, 300 k"
TASKS = {  # nearly all with no option but the steps
    "pointnav": Task(
        "pointnav", 2000, words="`pointnav`, 64×64 depth, 64 unseen floor plans, 2 M steps"
    ),
    "pointnav-short": Task(
        "pointnav", 1200, words="`pointnav`, 1.2 M steps (five to seven minutes)"
    ),
    "pointnav-blind": Task("pointnav", 2500, BLIND, "the same without the camera, 2.5 M"),
    "cartpole": Task("CartPole-v1", 150, words="{} (a random agent: 24)"),
    "acrobot": Task("Acrobot-v1", 200, words="{} (random: −491)"),
    "pendulum": Task("Pendulum-v1", 300, words="{} (random: −1,228)"),
    "lunarlander": Task("LunarLander-v3", 300, words="{} (random: −192)"),
    "hopper": Task("Hopper-v5", 300, words="{} (random: 18)"),
    "doorkey": Task(DOORKEY, 300, words="{} (random: 0.041)"),
    "repeat-previous": Task(f"{POPGYM}RepeatPreviousEasy-v0", 600, words="{} (random: −0.513)"),
    "position-only-cartpole": Task(
        f"{POPGYM}PositionOnlyCartPoleEasy-v0", 200, words="{} (random: 0.118)"
    ),
    "memory": Task(
        CUE, 100, words="remembering a cue for 10 steps, 100 k (return: share of right answers)"
    ),
    "memory-feed-forward": Task(
        CUE, 100, "--lstm-layers 0", "remembering a cue without the LSTM (chance: 0.5)"
    ),
}
PACKAGES = {  # that a task needs beside requirements.txt
    "lunarlander": "gymnasium[box2d]",
    "hopper": "gymnasium[mujoco]",
    "doorkey": "minigrid",
    "repeat-previous": "popgym",
    "position-only-cartpole": "popgym",
}
PUBLISHED = {
    f"popgym-{name}": Task(f"{POPGYM}{name}Easy-v0", 1000, SMALL, published=f"{value}, 4 M")
    for name, value in {
        "Autoencode": "−0.469",
        "CountRecall": "−0.835",
        "HigherLower": "0.495",
        "NoisyPositionOnlyPendulum": "0.311",
        "RepeatFirst": "0.811",
        "RepeatPrevious": "0.744",
    }.items()
} | {
    "cartpole-hidden": Task(
        "CartPole-v1",
        100,
        f"{MORE_EPOCHS} --ent-coef 1e-2 {NO_VELOCITY.format('(1, 3)')}",
        CARTPOLE_WORDS,
        "500 ± 0 [1], 100 k",
    ),
    "pendulum-hidden": Task(
        "Pendulum-v1",
        300,
        f"{ZOO} {NO_VELOCITY.format('(2,)')}",
        PENDULUM_WORDS,
        "−218 ± 140 [1], 100 k",
    ),
    "cartpole": Task("CartPole-v1", 150, published="500 ± 0 [1], PPO, 100 k"),
    "acrobot": Task("Acrobot-v1", 200, published="−74 ± 18 [1], PPO, 1 M"),
    "pendulum": Task("Pendulum-v1", 300, published="−172 ± 104 [1], PPO, 100 k"),
    "lunarlander-1m": Task(
        "LunarLander-v3", 1000, SMALL, published="242 ± 32 [1], PPO, version 2, 1 M"
    ),
    "doorkey": Task(DOORKEY, 300, published="0.964 ± 0.006 [1], PPO, 100 k"),
    "hopper-1m": Task("Hopper-v5", 1000, SMALL, published="2,383 ± 272 [2], version 4, 1 M"),
    "hopper-1m-cleanrl": Task(
        "Hopper-v5", 1000, CLEANRL, "{}, as CleanRL learns", "2,383 ± 272 [2], version 4, 1 M"
    ),
    "halfcheetah-1m": Task(
        "HalfCheetah-v5", 1000, SMALL, published="1,443 ± 46 [2], version 4, 1 M"
    ),
}
CURVES = "charts/episodic_return", "charts/episodic_length"
CURVES += "metrics/success", "metrics/spl", "metrics/distance_to_goal"


def learn_tasks(args, tasks):
    """Train these tasks and write a file for each."""
    for name in args.names or tasks:
        arguments = f"{tasks[name].arguments} {args.more}".strip()
        calls = [functools.partial(learn_task, arguments, seed) for seed in args.seeds]
        runs = harness.together(calls, args.jobs)
        harness.keep(args, name, command=f"python ver_ppo.py {arguments}", runs=runs)
        print(name, *(run["evaluation"] for run in runs), sep="\n  ", flush=True)


def learn_task(arguments, seed):
    """Train once, and return the results to keep."""
    with tempfile.TemporaryDirectory() as runs_dir:
        trained = harness.train(f"{arguments} --seed {seed}", runs_dir)
        found = {"seed": seed, "minutes": round(trained.seconds / 60, 2)}
        return found | {"evaluation": trained.evaluation, "curves": trained.thin(CURVES)}


# ------------------------------------------------------------------------ What a minute teaches


class Until(ver_ppo.Run):
    """Train until this share of the last 100 training episodes succeeds, or for `most` steps."""

    success: float = 0.9
    most: int = 250_000

    def log(self, rollout, logs):
        """As Run.log."""
        super().log(rollout, logs)
        column = self.spec.episode_columns.index("success")
        reached = len(self.recent) == 100 and np.mean(self.recent, axis=0)[column] >= self.success
        if reached or self.step >= self.most:
            self.options = replace(self.options, total_timesteps=self.step)


UNTIL = "--env-id pointnav --eval-episodes 0 --extensions 'learn:Until(success={}, most={})'"
UNEVEN = {"as in the paper": harness.PAPER, "more uneven": {"spread": 0.8, "between": 0.6}}
SLEEPING = "--wrappers 'latency(mean_ms=20, spread={spread}, between={between})'"
MINUTES_TAGS = "metrics/success", "metrics/spl", "ver/importance_weight"


def minutes(args):
    """Train each sampler from each seed. All samplers of a seed come before the next seed, so that
    a disturbance of the machine disturbs all of them."""
    found = harness.kept(args, "minutes").get("found", {})
    until = UNTIL.format(0.9, args.steps or 250_000)
    for seed, how, sampler in itertools.product(args.seeds, UNEVEN, args.samplers):
        done = found.setdefault(how, {}).setdefault(sampler, [])
        if seed in [run["seed"] for run in done]:
            continue
        line = f"{until} {SLEEPING.format(**UNEVEN[how])} {harness.SAMPLERS[sampler]} --seed {seed}"
        done.append({"seed": seed, **harness.train(line).over_time(MINUTES_TAGS)})
        harness.keep(args, "minutes", found=found)
        last = {name: values[-1] for name, values in done[-1].items() if name != "seed"}
        print(f"{how}, {sampler}, seed {seed}: {last}", flush=True)


# ----------------------------------------------------------------------- The way to a first agent

STARTS = {
    "the default": "",
    "faster start": "--num-steps 64 --num-minibatches 4 --learning-rate 3e-3",
}
SUCCESSES = 0.5, 0.8, 0.9


def starts(args):
    """Train with each of STARTS. Keep the seconds from the first rollout until the success of the
    last 100 training episodes reaches each of SUCCESSES."""
    found = {how: [] for how in STARTS}
    for seed in args.seeds:
        for how, more in STARTS.items():
            line = f"{UNTIL.format(SUCCESSES[-1], args.steps or 500_000)} --seed {seed} {more}"
            curve = harness.train(line).over_time(["metrics/success"])
            seconds, success = curve["seconds"], curve["metrics/success"]
            passed = {"seed": seed}
            for least in SUCCESSES:
                passed[str(least)] = round(draw.first_reached(seconds, success, least), 2)
            found[how].append(passed)
            print(f"{how}: {passed}", flush=True)
    harness.keep(args, "starts", options=STARTS, found=found)


# --------------------------------------------------------------------------------------- Transfer

TRANSFER_TASKS = "Flee", "Explore"
VARIANTS = {  # how each uses the checkpoint
    "from scratch": "",
    "frozen encoder, new policy": "--extensions 'transfer(file={}, freeze=True, reset=policy)'",
    "frozen encoder, policy fine-tuned": (
        "--extensions 'transfer(file={}, freeze=True, reset=critic)'"
    ),
    "neural controller": "--policy 'controller(file={})'",
}


def transfer(args):
    """Make all missing runs. All variants of a seed run before the next seed, so that a disturbance
    affects all of them."""
    found = harness.kept(args, "transfer").get("runs", {})
    for seed in args.seeds:
        for task in TRANSFER_TASKS:
            for variant, how in VARIANTS.items():
                runs = found.setdefault(task, {}).setdefault(variant, [])
                if seed not in [run["seed"] for run in runs]:
                    line = f"--env-id notebooks.environments.tasks:{task}-v0"
                    line += f" --env-kwargs simulator=builtin --seed {seed}"
                    line += f" --total-timesteps {args.steps or 200_000} {args.more}"
                    trained = harness.train(f"{line} {how.format(args.checkpoint)}")
                    curves = trained.thin(["charts/episodic_return"])
                    evaluation = trained.evaluation
                    runs.append({"seed": seed, "evaluation": evaluation, "curves": curves})
                    harness.keep(args, "transfer", runs=found)
                    print(f"{task}, {variant}, seed {seed}: {evaluation}", flush=True)


# --------------------------------------------------------------------------------- Chained skills

SKILLS = "Pick", "Place", "PickArm", "PlaceArm"
FAR_M = (0.5, 1.0), (1.0, 2.0), (2.0, 3.0), (3.0, 4.0), (4.0, 6.0), (6.0, 9.0)
CHAINS = {"with base": "", "arm alone": "Arm", "with base, no Navigate": ""}


def skills(args):
    """Train every skill from every seed; chain each seed with its like, and with the same PointNav
    agent, in unseen flats."""
    own = {skill: {} for skill in SKILLS}
    for seed in args.seeds:
        for skill in SKILLS:
            line = f"--env-id notebooks.environments.rearrange:{skill}-v0 --target-entropy 0"
            line += f" --ent-coef 1e-3 --total-timesteps {args.steps or 300_000} --seed {seed}"
            trained = harness.train_once(f"{line} {args.more}", args.folder / skill / str(seed))
            own[skill][str(seed)] = round(trained.last("eval/success"), 3)
    found = {"own": own, "episodes": args.episodes, "far_m": FAR_M, "chains": {}}
    found["far"] = for_seeds(args, run_far)
    for how in CHAINS:
        chained = for_seeds(args, run_chains, how)
        found["chains"][how] = [shares for shares, _ in chained]
        if how == "with base":
            found["path"] = next((whole for _, whole in chained if whole), None)
    print(found["far"], found["chains"])
    harness.keep(args, "rearrange", **found)


def for_seeds(args, function, *more):
    """Call a function for each seed, each in a process of its own, and return the results."""
    calls = [functools.partial(harness.apart, function, args, seed, *more) for seed in args.seeds]
    return harness.together(calls, args.jobs)


def load_skill(folder, skill, seed):
    """A trained skill."""
    policy, _ = play.load_policy(folder / skill / str(seed), trust=True)
    return policy


def run_chains(args, seed, how):
    """Compute the share of episodes that succeeded up to each stage, and the first complete
    chain."""
    draw.setup()
    policies = {}
    for name in ("pick", "place"):
        policies[name] = load_skill(args.folder, name.capitalize() + CHAINS[how], seed)
    if "no Navigate" not in how:
        policies["navigate"], _ = play.load_policy(args.checkpoint.parent)
    well = np.zeros((args.episodes, 4 if "navigate" in policies else 2))
    whole = None
    for episode in range(args.episodes):
        env = chain.begin(episode)
        object_2 = env.object.tolist()
        place_2 = env.place.tolist()
        stages = chain.run_chain(env, policies)
        well[episode, : len(stages)] = [done for _, done, _ in stages]
        if whole is None and well[episode].all():
            whole = {
                "boxes": np.round(env.plan.boxes_K4, 3).tolist(),
                "walls": env.plan.num_walls,
                "size": env.plan.size.tolist(),
                "object": object_2,
                "place": place_2,
                "stages": [[name, np.round(path, 3).tolist()] for name, _, path in stages],
            }
    return well.mean(axis=0).tolist(), whole


def run_far(args, seed):
    """Compute the success of Pick, with the base, for each starting distance."""
    draw.setup()
    policy = load_skill(args.folder, "Pick", seed)
    success = []
    for far_m in FAR_M:
        envs = (chain.begin(1000 + episode, far_m=far_m) for episode in range(args.episodes))
        success.append(float(np.mean([chain.run_skill(env, policy, "pick") for env in envs])))
    return success


# ------------------------------------------------------------------------------------ Populations


MEMBERS = 4
TUNED_SEEDS = 8
OF_BOTH = "--num-envs 16 --num-workers 0 --learner-threads 1 --eval-episodes 100 --greedy"
OF_CARTPOLE = "--num-steps 128 --num-minibatches 4"
OF_CUE = "--num-steps 64 --gae-lambda 1 --hidden-size 32 --update-epochs 4 --num-minibatches 2"
# arguments, tuned rate, powers of ten between which rates are drawn, steps between decisions
POPULATIONS = {
    "CartPole-v1": (f"--env-id CartPole-v1 {OF_BOTH} {OF_CARTPOLE}", 2e-3, (-4.5, -1.5), 8192),
    "cue": (f"--env-id {CUE} {OF_BOTH} {OF_CUE}", 3e-3, (-4, -1), 4096),
}


def ends(arguments, **how):
    """Train. Returns the mean returns of the last hundred training episodes and of the
    evaluation."""
    trained = harness.train(arguments, **how)
    return [trained.last("charts/episodic_return"), trained.last("eval/return")]


def run_alone(arguments, rates, first_seed):
    """Make single runs with these learning rates, all at once, and return the `ends` of each."""
    calls = []
    for seed, rate in enumerate(rates, first_seed):
        calls.append(functools.partial(ends, f"{arguments} --learning-rate {rate} --seed {seed}"))
    return harness.together(calls, len(calls))


def run_population(arguments, interval, rates, seed):
    """Train a population that begins with these rates. Returns the `ends` and the decisions of each
    member."""
    with tempfile.TemporaryDirectory() as folder:
        line = f"{arguments} --population {folder} --population-size {MEMBERS} --seed {seed}"
        line += f" --evolve-interval {interval}"
        places = [Path(folder) / str(member) for member in range(MEMBERS)]
        calls = []
        for member, rate in enumerate(rates):
            own = f"{line} --learning-rate {rate} --member {member}"
            how = {"runs_dir": places[member], "script": "-m notebooks.extensions.population"}
            calls.append(functools.partial(ends, own, **how))
        found = harness.together(calls, MEMBERS)
        texts = [(place / "decisions.jsonl").read_text() for place in places]
    return found, [[json.loads(line) for line in text.splitlines()] for text in texts]


def populations(args):
    """Measure both tasks: the tuned rate, then the trials."""
    for name, (own, tuned_rate, powers, interval) in POPULATIONS.items():
        arguments = f"{own} --total-timesteps {args.steps or 150_000}"
        tuned = run_alone(arguments, [tuned_rate] * TUNED_SEEDS, first_seed=1)
        print(name, tuned, flush=True)
        trials = []
        for number in range(1, args.trials + 1):
            rng = np.random.default_rng(number)
            rates = (10 ** rng.uniform(*powers, MEMBERS)).tolist()
            alone = run_alone(arguments, rates, first_seed=100 * number)
            found, decisions = run_population(arguments, interval, rates, seed=number)
            print(name, number, rates, alone, found, flush=True)
            trial = {"rates": rates, "alone": alone, "population": found, "decisions": decisions}
            trials.append(trial)
        harness.keep(args, f"evolution-{name}", tuned=tuned, trials=trials)


# ------------------------------------------------------------------------------------------ Duels


def duels(args):
    """Train each seed by self-play, one at a time. Keep the share of games that the last policy
    wins against the snapshots of 0, 25, 50 and 75 % of its steps (a draw counts half)."""
    extension = '--extensions "selfplay(every=10000)"'
    line = f"--env-id duel {extension} --total-timesteps {args.steps or 300_000}"
    found = {}
    for seed in args.seeds:
        trained = harness.train_once(f"{line} --seed {seed}", args.folder / "duel" / str(seed))
        won = selfplay.tournament(selfplay.Options(trained.folder, eval_episodes=args.episodes))
        found[seed] = {str(step): round(float(share), 3) for step, share in won.items()}
        print(seed, found[seed], flush=True)
    harness.keep(args, "duels", found=found, episodes=args.episodes)


# ----------------------------------------------------------------------------- Parts and weights


def parts(args):
    """Train without each part, and with all."""
    studies.measure(args, "parts", studies.parts_runs(args.names or studies.TASKS))


def weights(args):
    """Train with other weights."""
    studies.measure(args, "weights", studies.weights_runs(args.names))


BENCHMARKS = {
    "tasks": lambda args: learn_tasks(args, TASKS),
    "published": lambda args: learn_tasks(args, PUBLISHED),
    "minutes": minutes,
    "starts": starts,
    "transfer": transfer,
    "skills": skills,
    "populations": populations,
    "duels": duels,
    "parts": parts,
    "weights": weights,
}

if __name__ == "__main__":
    parser = harness.command_line(__doc__)
    parser.add_argument("what", choices=BENCHMARKS)
    parser.add_argument("names", nargs="*", help="tasks, published, parts, weights: of these alone")
    seeds = "1 2 3; minutes, starts, parts: 1 to 5; weights: 1 to 10"
    parser.add_argument("--seeds", type=int, nargs="+", help=seeds)
    how = {"choices": harness.SAMPLERS, "default": harness.COMPARED}
    parser.add_argument("--samplers", nargs="+", **how)
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--folder", type=Path, help="skills, duels: where runs stay")
    parser.add_argument("--checkpoint", type=Path, help="transfer, skills: of a run of `pointnav`")
    parser.add_argument("--trials", type=int, default=4, help="of populations")
    of_each = "skills: of each chain; duels: of each pair"
    parser.add_argument("--episodes", type=int, default=100, help=of_each)
    parser.add_argument("--steps", type=int, help="in place of the benchmark's own number")
    parser.add_argument("--more", default="", help="more arguments for tasks, transfer and skills")
    args = parser.parse_intermixed_args()
    if args.what in ("skills", "duels") and not args.folder:
        parser.error("give --folder")
    if args.what in ("transfer", "skills"):
        if not args.checkpoint:
            parser.error("give --checkpoint")
        args.checkpoint = args.checkpoint.resolve()
    count = {"minutes": 5, "starts": 5, "parts": 5, "weights": 10}.get(args.what, 3)
    args.seeds = args.seeds or list(range(1, count + 1))
    BENCHMARKS[args.what](args)
