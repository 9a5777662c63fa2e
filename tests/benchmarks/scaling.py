"""Measure how ver_multigpu.py scales with the number of ranks, in real runs on this machine, and
for many more ranks under a virtual clock.

    scaling.py run --modes 'ver optimal' 'sync none' --rounds 2 --rollouts 10         20 minutes
    scaling.py simulate --ranks 1 2 4 8 16 32 64 128 256                               5 minutes

run         Each rank has 8 simulators that sleep 100 ms a step on average, in scenes of 150 steps.
            Some scenes are slower than others (Scenes of simulators.py). The network is so small
            that a few cores can stand for many machines. Counts steps per second of all ranks from
            the third update on.
simulate    Every environment is a stream of step times, without processes. The functions of
            ver_multigpu.py decide when a rollout ends, from the step times of the rollout before.
            `hindsight` has the best S, which is known only afterwards. Averaging gradients costs
            nothing.
"""

import functools

import harness
import numpy as np

from notebooks.extensions.virtual_ranks import simulate

MODES = "ver optimal", "ver none", "sync threshold", "sync none"  # --sampler, --preemption
SEEDS = 4  # simulated streams of step times, equal for any number of ranks
FIRST = 3  # real runs count from the end of this update
NETWORK = "--hidden-size 16 --update-epochs 1 --num-minibatches 1 --learner-threads 1"
RANK = "--env-id simulators:Scenes-v0 --num-envs 8 --num-workers 8 --num-steps 64"
STILL = "--device cpu --eval-episodes 0 --learning-rate 1e-6"


def simulate_all(args):
    """Simulate the speed-ups over one rank: workload -> mode -> ranks -> results."""
    found = {}
    for workload, scenes in {"homogeneous": 0.0, "heterogeneous": 0.5}.items():
        found[workload] = {mode: {} for mode in args.modes}
        for mode in args.modes:
            one = None
            for ranks in sorted({1, *args.ranks}):
                how = ranks, 16, 128, *mode.split(), args.rollouts
                streams = [simulate(*how, seed, scenes=scenes) for seed in range(SEEDS)]
                rate = np.mean([each["rate"] for each in streams])
                one = one or rate
                best = np.mean([each["hindsight"] for each in streams])
                at = {"speedup": rate / one, "of_hindsight": rate / best}
                found[workload][mode][ranks] = at
                print(workload, mode, ranks, at, flush=True)
    harness.keep(args, "scaling", found=found)


def run_all(args):
    """Make the real runs: mode -> ranks -> results of each round."""
    variants = {}
    for ranks in args.ranks:
        for mode in args.modes:
            run = functools.partial(run_ranks, mode, ranks, args.rollouts)
            variants[f"{mode}, {ranks}"] = run
    rounds = harness.by_turns(variants, args.rounds)
    found = {mode: {} for mode in args.modes}
    for mode in args.modes:
        for ranks in args.ranks:
            found[mode][ranks] = [results[f"{mode}, {ranks}"] for results in rounds]
    harness.keep(args, "ranks", found=found)


def run_ranks(mode, ranks, rollouts):
    """Make one run with this number of ranks."""
    sampler, preemption = mode.split()
    how = f"--sampler {sampler} --preemption {preemption}"
    total = f"--total-timesteps {rollouts * ranks * 8 * 64}"
    trained = harness.train(f"{RANK} {NETWORK} {STILL} {how} {total}", ranks=ranks)
    tags = "time/learning_sec", "ranks/stale_share", "ranks/predicted_sec", "ranks/rollout_sec"
    found = {tag.split("/")[1]: trained.mean(tag, FIRST) for tag in tags if tag in trained.curves}
    return {"sps": trained.rate(FIRST), **found}


if __name__ == "__main__":
    parser = harness.command_line(__doc__)
    parser.add_argument("what", choices=["run", "simulate"])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--rounds", type=int, default=2, help="of run")
    parser.add_argument("--rollouts", type=int, default=16, help="of each run")
    args = parser.parse_args()
    {"run": run_all, "simulate": simulate_all}[args.what](args)
