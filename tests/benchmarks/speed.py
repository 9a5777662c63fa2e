"""Measure how many steps per second ver_ppo.py makes, and the cost of its parts. Use an otherwise
idle machine.

    speed.py samplers                     every sampler (table 1 of the VER paper); an hour
    speed.py uneven                       collecting for uneven simulators: `nover` and `ver` beside
                                          `sync`, computed and, in three cells, run; 20 minutes
    speed.py parts                        where the time of a step goes on four simulators, with the
                                          default options, and the share of its bound that a run
                                          reaches; ten minutes
    speed.py inference                    with processes that choose actions, on the simulators of
                                          `parts`; ten minutes
    speed.py workers                      the choice of --num-workers auto, beside other numbers;
                                          five minutes
    speed.py books                        the collector's own work for a batch, beside the network;
                                          a few seconds
    speed.py clocked                      simulated time (`--extensions clocked`) beside real time,
                                          with the same durations of steps; ten minutes
    speed.py habitat --data FOLDER        beside habitat-baselines' own VER trainer, on one scene;
                                          half an hour
    speed.py versions --variant "FOLDER ARGUMENTS" --variant ...
                                          the ver_ppo.py of several folders, alternating

There are 16 environments, T = 128 and 4 mini-batches. The learning rate is close to 0, so that
episodes keep their length. In each round, every variant runs once, in a process of its own. Its
rate counts from the end of the fifth update to the end of the last one, including learning and
logging. The workloads of `samplers`:

a  rearrangement: 16 simulators that sleep 20 ms a step, as unevenly as the paper's. `sync` keeps
   0.39 of its rate with even simulators, and `nover` reaches 1 / 1.31 of `ver`
b  navigation: less uneven, 10 ms
c  the built-in PointNav without sleeping, so the CPU does everything
d  CartPole-v1, with --num-workers 0, which suits cheap environments, and with workers

`uneven` measures collecting alone, from the second to the fourth rollout of 32 environments. They
sleep 50 ms a step on average, as the wrapper `latency` says. For five seeds and each pair of
spreads, the rates are computed: the shipped collector runs under a virtual clock, where only sleeps
take time. For two seeds and three pairs, CartPole also runs with the same sleeps.

`clocked` trains CartPole with 32 environments whose steps sleep, and again in simulated time, where
inference and learning cost what they have cost in the real run.

`habitat` needs habitat-baselines in this Python. FOLDER has datasets/pointnav/SCENE/v1 and
scene_datasets. There are 4 environments, 128 x 128 depth, T = 32 and a hidden size of 512. The
agents have no stop action, so every episode takes 100 steps. Untrained agents would stop after two
to four steps, and a reset takes as long as four steps.
"""

import functools
import itertools
import os
import re
import shlex
import sys
import tempfile
import time
from datetime import datetime

import gymnasium as gym
import harness
import numpy as np
import torch
from harness import COMPARED, PAPER, SAMPLERS, ver_ppo

from notebooks.environments import pointnav
from notebooks.environments.habitat import QUIET, override_lines
from notebooks.extensions import virtual_clock
from notebooks.extensions.wrappers import Latency

CORES = ver_ppo.count_cores()
NUM_ENVS = 16
ROLLOUT_STEPS = NUM_ENVS * 128
COMMON = "--num-envs 16 --num-steps 128 --num-minibatches 4 --device cpu --eval-episodes 0"
STILL = f"{COMMON} --learning-rate 1e-6"
WORKLOADS = {
    "a rearrangement": "--env-id simulators:Rearrangement-v0 --num-workers 16 --update-epochs 6",
    "b navigation": "--env-id simulators:Navigation-v0 --num-workers 16",
    "c pointnav": f"--env-id simulators:PointNavSteady-v0 --num-workers {CORES}",
    "d cartpole, one process": "--env-id CartPole-v1 --num-workers 0",
    "d cartpole, workers": f"--env-id CartPole-v1 --num-workers {CORES}",
}


def measure(arguments):
    """Train, and return the steps per second."""
    return {"sps": harness.train(arguments).rate()}


def samplers(args):
    """Measure every sampler on every workload."""
    found = {}
    for workload, own in WORKLOADS.items():
        if workload[0] not in args.workloads:
            continue
        flags = f"{STILL} {own}"
        sleeps = "simulators:" in own and "Steady" not in own
        steps = args.rollouts * ROLLOUT_STEPS * (1 if sleeps else 4)
        options = {mode: f"{flags} {how}" for mode, how in SAMPLERS.items()}
        if sleeps:
            options["sync without spread"] = options["sync"].replace("-v0", "Even-v0")
        variants = {}
        for name, arguments in options.items():
            total = f"--total-timesteps {steps}"
            variants[name] = functools.partial(measure, f"{arguments} {total}")
        rounds = harness.by_turns(variants, args.rounds)
        found[workload] = {"options": options, "rounds": rounds}
        harness.keep(args, "samplers", found={"workloads": found})


# ----------------------------------------------------------------------------------- Parts, alone


def measure_alone(arguments, batch, workers=0):
    """Measure the parts of training alone in this process, in seconds per step: `env` on one core
    (or in worker processes, for simulators that sleep), `forward` in batches of this size, `learn`
    on all cores. `arrange` is the seconds for packing one rollout's mini-batches."""
    for index in range(pointnav.NUM_PLANS["train"]):
        pointnav.floor_plan("train", index)  # made once in a training, so not a part of a step
    with harness.collecting(f"{arguments} --num-workers {workers}") as run:
        run.collect()
        rollout = run.collect()
        learn = functools.partial(harness.learn, run, rollout)
        found = {"env_sec": float(rollout["step_sec"].mean())}
        found["forward_sec"] = time_forward(run.policy, rollout, batch)
        torch.set_num_threads(CORES)
        found["learn_sec"] = time_calls(3, learn) / rollout.rows
        found["arrange_sec"] = time_calls(1, lambda: arrange(rollout, run.options))
    return found


def time_calls(number, function):
    """Seconds of a call: the mean of `number` calls after one that warms up."""
    function()
    began_at = time.perf_counter()
    for _ in range(number):
        function()
    return (time.perf_counter() - began_at) / number


@torch.inference_mode()
def time_forward(policy, rollout, batch):
    """Seconds per step of the bare forward pass."""
    inputs = ver_ppo.to_device(rollout.records[:batch].copy(), ver_ppo.INPUTS, "cpu")

    def forward():
        distribution, _, _ = policy.step(*inputs.values())
        distribution.log_prob(distribution.sample())

    return time_calls(200, forward) / batch


def arrange(rollout, options):
    """Make the sequences and packed mini-batches of an update, as `ver_ppo.ppo_update` does."""
    sequences = ver_ppo.find_sequences(rollout["segment"], rollout["first"])
    for _ in range(options.update_epochs):
        shuffled = [sequences[q] for q in torch.randperm(len(sequences)).tolist()]
        for minibatch in ver_ppo.cut_minibatches(shuffled, options.num_minibatches):
            ver_ppo.pack(minibatch)


SLEEPS = "latency(mean_ms=20, spread=0.8)"
KINDS_OF_PARTS = {  # wrappers of PointNav; worker processes; simulators that run at once
    "built-in PointNav": ([], 0, CORES),
    "0.5 ms of a CPU more": (["simulators:Busy(cpu_ms=0.5)"], 0, CORES),
    "2 ms of a CPU more": (["simulators:Busy(cpu_ms=2)"], 0, CORES),
    "20 ms of sleep more": ([SLEEPS], 32, 32),
}
OF_PARTS = "--env-id simulators:PointNavSteady-v0 --device cpu --eval-episodes 0"
OF_PARTS += " --learning-rate 1e-6"


def parts(args):
    """Measure training with the default options as a share of its bound. The bound is 1 / (seconds
    of a simulator's step / simulators that run at once + policy + learning), each measured
    alone."""
    found = {}
    for kind, (wrapper, workers, at_once) in KINDS_OF_PARTS.items():
        flags = f"{OF_PARTS} --wrappers {shlex.join(wrapper)}"
        options = ver_ppo.parse_options(shlex.split(flags))
        steps = (harness.WARM_UP + args.rollouts) * options.rollout_steps
        alone = harness.apart, measure_alone, flags, options.num_envs // 2, workers
        variants = {
            "alone": functools.partial(*alone),
            "loop": functools.partial(measure_loop, f"{flags} --total-timesteps {steps}"),
        }
        found[kind] = []
        for results in harness.by_turns(variants, args.rounds):
            alone = results["alone"]
            loop = results["loop"]
            bound = 1 / (alone["env_sec"] / at_once + alone["forward_sec"] + alone["learn_sec"])
            row = {
                "env_step_ms": 1000 * alone["env_sec"],
                "forward_ms": 1000 * alone["forward_sec"],
                "learn_ms": 1000 * alone["learn_sec"],
                "arrange_ms": 1000 * alone["arrange_sec"],
                "bound": bound,
                "rate": loop.pop("sps"),
            }
            row["share"] = row["rate"] / bound
            print(kind, row, flush=True)
            found[kind].append(row | loop)
        harness.keep(args, "parts", found=found)


def measure_loop(arguments):
    """Train: steps per second, milliseconds per step of each phase, and the mean batch."""
    trained = harness.train(arguments)
    found = {"sps": trained.rate(), "batch": trained.mean("ver/batch_size")}
    cycle_ms = 1000 * trained.per_step("time/cycle_sec")
    for name in ("waiting", "inference", "learning"):
        found[f"loop_{name}_ms"] = trained.mean(f"time/{name}_share") * cycle_ms
    return found


def inference(args):
    """Measure trainings on the simulators of `parts`, with processes that choose actions (as many
    as the name says) and without."""
    found = {}
    steps = (harness.WARM_UP + args.rollouts) * 32 * 128  # of the default rollout
    for kind, (wrapper, _, _) in KINDS_OF_PARTS.items():
        flags = f"{OF_PARTS} --wrappers {shlex.join(wrapper)} --total-timesteps {steps}"
        variants = {"0": functools.partial(measure_loop, flags)}
        for count in (1, 2):
            how = f"{flags} --extensions 'inference(workers={count})'"
            variants[str(count)] = functools.partial(measure_loop, how)
        print(kind, flush=True)
        found[kind] = harness.by_turns(variants, args.rounds)
        harness.keep(args, "inference", found=found)


# --------------------------------------------------------------------------- Uneven environments

BETWEEN = 0.0, 0.3, 0.6, 1.0  # spreads (sigma) of the environments' means
SPREADS = 0.0, 0.4, 0.8  # and of the steps of one environment
CELLS = list(itertools.product(BETWEEN, SPREADS))
RUN = (0.0, 0.8), (0.3, 0.4), (0.6, 0.8)  # of them: between, spread
UNEVEN_ENVS = 32
MEAN_MS = 50


def sleeps(seed, num_envs, between, spread):
    """The seconds that the first 6,000 steps of each environment sleep in a run of this seed."""
    sec_NK = np.empty((num_envs, 6000))
    for e in range(num_envs):
        env = Latency(gym.Env(), MEAN_MS, spread, between)
        env.reset(seed=ver_ppo.derive_seed(False, seed, e, 1))
        sec_NK[e] = [env.own_sec * env.draw(spread) for _ in sec_NK[e]]
    return sec_NK


def compute_rates(seed, num_envs, between, spread):
    """Steps per second of every sampler's collecting, from the second to the fourth rollout, and
    "weighted", those of `ver` times their mean importance weight."""
    sec_NK = sleeps(seed, num_envs, between, spread)
    found = {}
    weights = []

    def learn(rollout):
        weights.append(ver_ppo.importance_weights(rollout["env"], num_envs).mean())

    for sampler in COMPARED:
        weights.clear()
        size = num_envs, 128, 4
        arguments = sampler, lambda e, k: sec_NK[e, k], *size
        steps, _, _, phases = virtual_clock.run(*arguments, learn=learn)
        (first_sec, _), *_, (last_sec, _) = phases
        found[sampler] = steps * 3 / 4 / (last_sec - first_sec)
    found["weighted"] = found["ver"] * np.mean(weights[1:])
    return found


def run_rate(sampler, seed, between, spread):
    """Steps per second of real collecting, from the second to the fourth rollout."""
    sleep = f"latency(mean_ms={MEAN_MS}, spread={spread}, between={between})"
    flags = f"--env-id CartPole-v1 --sampler {sampler} --seed {seed} --wrappers '{sleep}'"
    flags += f" --num-workers {UNEVEN_ENVS} --device cpu"
    with harness.collecting(flags) as run:
        rollouts = []
        for _ in range(4):
            rollout = run.collect()
            rollouts.append((rollout.rows, rollout.ended_at - rollout.started_at))
    steps, seconds = np.sum(rollouts[1:], axis=0)
    return steps / seconds


def uneven(args):
    """Compute the rates for every pair of spreads, and run three pairs."""
    cells = []
    for cell in CELLS:
        computed = [compute_rates(seed, UNEVEN_ENVS, *cell) for seed in range(1, 6)]
        cells.append({"cell": cell, "computed": computed, "run": []})
        print(cells[-1], flush=True)
    paper = [compute_rates(seed, 16, **PAPER) for seed in range(1, 6)]
    for found in cells:
        for seed in (1, 2) if found["cell"] in RUN else ():
            calls = {mode: (run_rate, mode, seed, *found["cell"]) for mode in COMPARED}
            found["run"].append({mode: harness.apart(*call) for mode, call in calls.items()})
            print(found["cell"], found["run"], flush=True)
    harness.keep(args, "uneven", cells=cells, paper={"cell": PAPER, "computed": paper})


# ----------------------------------------------------------------------------- Workers, versions

SLEEP = "--wrappers 'latency(mean_ms=20, spread=0)'"
KINDS = {  # slow ones have short rollouts, to fill some
    "CartPole-v1": "--env-id CartPole-v1",
    "built-in pointnav": "--env-id simulators:PointNavSteady-v0",
    "sleeps 20 ms": f"--env-id CartPole-v1 --num-steps 8 {SLEEP}",
    "computes 20 ms": "--env-id CartPole-v1 --num-steps 8 --wrappers 'simulators:Busy(cpu_ms=20)'",
}


def measure_rate(arguments, seconds, **how):
    """Steps per second of a training that lasts `seconds`, including its start."""
    endless = "--total-timesteps 1000000000000 --checkpoint-interval 1000000000000"
    return {"sps": harness.train(f"{arguments} {endless}", seconds=seconds, **how).rate()}


def workers(args):
    """Print, for four environments, the measured times, the chosen number of workers, and the rates
    of other numbers."""
    for kind, own in KINDS.items():
        flags = f"{STILL} {own}"
        options = ver_ppo.parse_options(shlex.split(flags))
        spec = ver_ppo.describe_env(options)
        chosen = ver_ppo.count_workers(options, spec)
        times = f"{1000 * spec.step_sec:.2g} ms, {1000 * spec.cpu_sec:.2g} ms of CPU time"
        print(f"{kind}: a step takes {times}; chosen: {chosen}", flush=True)
        variants = {}
        for number in dict.fromkeys([chosen, 0, CORES, NUM_ENVS]):
            how = f"{flags} --num-workers {number}"
            name = f"{kind}, {number} workers"
            variants[name] = functools.partial(measure_rate, how, args.seconds)
        harness.by_turns(variants, 1)


def versions(args):
    """Alternate between the ver_ppo.py of several folders. The first one is the base."""
    variants = {}
    for text in args.variant:
        folder, _, arguments = text.partition(" ")
        how = arguments, args.seconds
        variants[text] = functools.partial(measure_rate, *how, checkout=folder)
    harness.by_turns(variants, args.rounds)


class Ready:
    """A policy that has its answer ready for a batch of this size. So only the collector works."""

    def __init__(self, policy, batch):
        self.parameters = policy.parameters
        self.state_shape = policy.state_shape
        self.mode = torch.zeros(batch, 1, dtype=torch.int64)
        self.number_B = torch.zeros(batch)
        self.answer = self, self.number_B, torch.zeros(batch, *self.state_shape)

    def step(self, *inputs):
        return self.answer

    def sample(self):
        return self.mode

    def log_prob(self, action_BA):
        return self.number_B


class Mute:
    """Workers without environments."""

    def send(self, env_B):
        pass


@torch.inference_mode()
def books(args):
    """The collector's own work for a batch of PointNav: its steps are completed, and the next
    actions are sent. The fastest of many repetitions, since other processes can only add time."""
    torch.set_num_threads(1)
    for batch in (1, 8, 32):
        words = f"--env-id pointnav --env-kwargs simulator=builtin --num-envs {batch} --device cpu"
        options = ver_ppo.parse_options(words.split())
        spec, policy = ver_ppo.build(options)
        policy = Ready(policy, batch)
        io = ver_ppo.EnvIO(spec, batch)
        collector = ver_ppo.Collector(policy, Mute(), io, spec, options)
        rollout = ver_ppo.Rollout(spec, batch, batch, policy.state_shape)
        env_B = np.arange(batch)

        def both():
            collector.act(env_B)
            collector.complete_steps(rollout, env_B, env_B)

        fastest = min(time_calls(20, both) for _ in range(100 * args.rounds))
        print(f"batch of {batch}: {1e6 * fastest:.0f} microseconds")


# --------------------------------------------------------------------------------- Simulated time

UNEVEN_MS = "mean_ms=20, spread=0.8, between=0.6"
OF_CLOCKED = "--env-id CartPole-v1 --num-envs 32 --num-steps 32 --hidden-size 64"
OF_CLOCKED += " --learning-rate 1e-6 --eval-episodes 0 --learner-threads 1"


def clocked(args):
    """Compare the steps per second of real and of simulated runs of each sampler and seed."""
    found = {sampler: [] for sampler in COMPARED}
    for seed, sampler in itertools.product(range(1, args.rounds + 1), COMPARED):
        line = f"{OF_CLOCKED} --sampler {sampler} --seed {seed}"
        line += f" --total-timesteps {args.rollouts * 1024}"
        real = harness.train(f"{line} --num-workers 32 --wrappers 'latency({UNEVEN_MS})'")
        inference_sec = real.mean("time/inference_share") * real.mean("time/cycle_sec")
        batches = 1024 / real.mean("ver/batch_size")
        costs = {"batch_ms": round(1000 * inference_sec / batches, 3)}
        costs["learn_sec"] = round(real.mean("time/learning_sec"), 4)
        words = ", ".join(f"{name}={value}" for name, value in costs.items())
        extension = f"--extensions 'clocked({UNEVEN_MS}, {words})'"
        simulated = harness.train(f"{line} --num-workers 0 {extension}")
        steps, minutes, _ = simulated.curves["clock/minutes"][:, harness.WARM_UP - 1 :]
        sps = (steps[-1] - steps[0]) / (60 * (minutes[-1] - minutes[0]))
        rates = {"real": round(real.rate(), 1), "simulated": round(float(sps), 1)}
        found[sampler].append({"seed": seed, **rates, **costs})
        print(f"{sampler}: {found[sampler][-1]}", flush=True)
    harness.keep(args, "clocked", found=found)


# --------------------------------------------------------------------------------------- Habitat

SENSORS = "habitat.simulator.agents.main_agent.sim_sensors"
NETWORKS = {  # ours, habitat-baselines'
    "cnn": ("", "PointNavBaselinePolicy"),
    "resnet18": ("--policy resnet18", "PointNavResNetPolicy"),
}
ALONE = {"OMP_NUM_THREADS": "1", **QUIET}
OURS_IN_HABITAT = {"VER": "", "`overlap`": "--extensions overlap"}
OURS = "--env-id pointnav --device cpu --num-envs 4 --num-steps 32 --hidden-size 512"
OURS += " --num-minibatches 2 --eval-episodes 0 --env-kwargs simulator=habitat image_size=128"


def habitat(args):
    """Measure both networks, in interleaved rounds."""
    path = f"{args.data}/datasets/pointnav/{args.scene}/v1/{{split}}/{{split}}.json.gz"
    task = {
        "habitat.dataset.data_path": path,
        "habitat.dataset.scenes_dir": f"{args.data}/scene_datasets",
        "habitat.environment.max_episode_steps": 100,
        "~habitat.task.actions.stop": "",  # taken away
    }
    variants = {}
    for network, (policy, theirs) in NETWORKS.items():
        steps = args.steps if network == "cnn" else args.steps // 3
        variants[f"{network} baselines"] = functools.partial(measure_theirs, theirs, steps, task)
        for name, how in OURS_IN_HABITAT.items():
            flags = " ".join([OURS, *(f"'{key}={value}'" for key, value in task.items())])
            flags += f" {policy} {how} --total-timesteps {steps}"
            variants[f"{network} {name}"] = functools.partial(measure_ours, flags)
    harness.keep(args, "habitat", found=harness.by_turns(variants, args.rounds))


def measure_ours(arguments):
    """Steps per second after the first third of the run."""
    trained = harness.train(arguments, **ALONE)
    updates = trained.curves["charts/learning_rate"].shape[1]
    return {"sps": trained.rate(updates // 3)}


def measure_theirs(policy, steps, task):
    """The same of habitat-baselines' VER trainer, from the lines that it logs every ten updates."""
    with tempfile.TemporaryDirectory() as folder:
        settings = f"trainer_name=ver num_environments=4 total_num_steps={steps}"
        settings += f" rl.policy.main_agent.name={policy} rl.ppo.hidden_size=512"
        settings += " rl.ppo.num_steps=32 rl.ppo.ppo_epoch=2 rl.ppo.num_mini_batch=2"
        settings += " num_checkpoints=1 load_resume_state_config=False"
        settings += f" tensorboard_dir={folder}/tb checkpoint_folder={folder}/ckpt"
        settings += f" video_dir={folder}/video log_file={folder}/log"
        lines = [f"habitat_baselines.{setting}" for setting in settings.split()]
        lines += [f"hydra.run.dir={folder}", "habitat.simulator.habitat_sim_v0.gpu_device_id=-1"]
        lines += [f"{SENSORS}.depth_sensor.width=128", f"{SENSORS}.depth_sensor.height=128"]
        lines += [f"~{SENSORS}.rgb_sensor", *override_lines(task)]
        words = [sys.executable, "-u", "-m", "habitat_baselines.run"]
        words += ["--config-name=pointnav/ppo_pointnav_example.yaml", *lines]
        said = harness.execute(words, **ALONE)
    marks = []
    for day, ms, frames in re.findall(r"^(\S+ \S+),(\d+) update: .*frames: (\d+)", said, re.M):
        marks.append((datetime.fromisoformat(day).timestamp() + int(ms) / 1000, int(frames)))
    (began_at, first), *_, (ended_at, last) = marks[len(marks) // 3 :]
    return {"sps": (last - first) / (ended_at - began_at)}


BENCHMARKS = {
    "samplers": samplers,
    "uneven": uneven,
    "parts": parts,
    "inference": inference,
    "workers": workers,
    "books": books,
    "clocked": clocked,
    "habitat": habitat,
    "versions": versions,
}

if __name__ == "__main__":
    parser = harness.command_line(__doc__)
    of_run = "updates of each run; the first five do not count. c, d: four times as many"
    parser.add_argument("what", choices=BENCHMARKS)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rollouts", type=int, default=10, help=of_run)
    parser.add_argument("--workloads", nargs="+", choices="abcd", default=list("abcd"))
    timed = "workers, versions: of a run"
    parser.add_argument("--seconds", type=float, default=20.0, help=timed)
    parser.add_argument("--variant", action="append", help="versions: folder and arguments")
    parser.add_argument("--data", type=os.path.abspath, help="habitat: scenes and episodes")
    parser.add_argument("--scene", default="rooms_s", help="habitat")
    parser.add_argument("--steps", type=int, default=12_000, help="habitat: of a run")
    args = parser.parse_args()
    for what, needed in {"versions": "variant", "habitat": "data"}.items():
        if args.what == what and not getattr(args, needed):
            parser.error(f"give --{needed}")
    BENCHMARKS[args.what](args)
