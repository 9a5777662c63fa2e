"""Measure how ver_multigpu.py scales with the number of ranks, in real runs on this machine, and
for many more ranks under a virtual clock.

    scaling.py run --modes 'ver optimal' 'sync none' --rounds 2 --rollouts 10         20 minutes
    scaling.py simulate --ranks 1 2 4 8 16 32 64 128 256                               5 minutes
    scaling.py talk --ranks 2 8 64                                                     5 minutes
    scaling.py kill --ranks 2 8                                                        2 minutes

run         Each rank has 8 simulators that sleep 100 ms a step on average, in scenes of 150 steps.
            Some scenes are slower than others (Scenes of simulators.py). The network is so small
            that a few cores can stand for many machines. Counts steps per second of all ranks from
            the third update on.
simulate    Every environment is a stream of step times, without processes. The functions of
            ver_multigpu.py decide when a rollout ends, from the step times of the rollout before.
            `hindsight` has the best S, which is known only afterwards. Averaging gradients costs
            nothing.
talk        The operations of all ranks together, on this machine, without a training: what one
            `agree`, `gather` and `average` (of PointNav's gradient), and one look at the counter
            take. An update has three of the first two, and an average for each mini-batch.
kill        Rank 1 of a training is killed in an update. Measures the time until no rank is left,
            and the age of the checkpoint then.
"""

import functools
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import harness
import numpy as np
import torch
from torch.distributed import TCPStore

import ver_multigpu
from notebooks.extensions.virtual_ranks import simulate
from tests.helpers import rank_environment

MODES = "ver optimal", "ver none", "sync threshold", "sync none"  # --sampler, --preemption
SEEDS = 4  # simulated streams of step times, equal for any number of ranks
FIRST = 3  # real runs count from the end of this update
NETWORK = "--hidden-size 16 --update-epochs 1 --num-minibatches 1 --learner-threads 1"
RANK = "--env-id simulators:Scenes-v0 --num-envs 8 --num-workers 8 --num-steps 64"
STILL = "--device cpu --eval-episodes 0 --learning-rate 1e-6"
REPEATS = 20  # of each operation
GRADIENT = 220_726  # PointNav's default policy
OPERATIONS = ["agree", "gather", "average", "counter"]


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


def talk_all(args):
    """Time the operations: ranks -> operation -> median in milliseconds."""
    found = {}
    for size in args.ranks:
        store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        # torch's own `spawn` would wait for ranks that wait for a rank that has failed
        code = "import scaling; scaling.talk()"
        words = [sys.executable, "-c", code]
        calls = []
        for rank in range(size):
            given = rank_environment(rank, size, store.port)
            given |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "OMP_NUM_THREADS": "1"}
            given["PYTHONPATH"] = f"{harness.HERE}{os.pathsep}{harness.ROOT}"
            calls.append(functools.partial(harness.execute, words, **given))
        said = harness.together(calls, size)
        found[size] = dict(zip(OPERATIONS, map(float, said[0].split())))
        print(size, found[size], flush=True)
        harness.keep(args, "talk", found=found)


def talk():
    """Time the operations as one of the ranks, and print each one's median in milliseconds."""
    ranks = ver_multigpu.Ranks(timeout_sec=600)
    logs = {f"a number of {k}": 1.0 for k in range(30)}
    own = 4096, logs, [np.zeros(4, np.float32)] * 20, np.ones(32)
    gradient = torch.ones(GRADIENT)
    calls = {
        "agree": lambda: ranks.agree(None),
        "gather": lambda: ranks.gather(own),
        "average": lambda: ranks.average([gradient]),
        "counter": lambda: ranks.store.add("rollout 0", 1),
    }
    for name in OPERATIONS:
        times = []
        for _ in range(REPEATS):
            ranks.agree(None)
            began_at = time.perf_counter()
            calls[name]()
            times.append(1000 * (time.perf_counter() - began_at))
        if ranks.rank == 0:
            print(f"{np.median(times):.3f}")
    ver_multigpu.leave_group()


def kill_all(args):
    """Kill a rank of each training: ranks -> results of each round."""
    found = {size: [kill(size) for _ in range(args.rounds)] for size in args.ranks}
    harness.keep(args, "kill", found=found)


def kill(size):
    """Kill rank 1 while it learns. Returns two times in seconds: until all ranks have ended, and
    the age of the checkpoint when the rank was killed."""
    with tempfile.TemporaryDirectory() as folder:
        line = f"--nproc-per-node {size} ver_multigpu.py --env-id pointnav --num-envs 4"
        line += " --num-workers 1 --update-epochs 10 --checkpoint-interval 1"
        line += f" --runs-dir {folder} {STILL}"
        words = [sys.executable, "-m", "torch.distributed.run", "--standalone", *shlex.split(line)]
        how = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        process = subprocess.Popen(words, cwd=harness.ROOT, start_new_session=True, **how)
        try:
            while not list(Path(folder).glob("*/checkpoint.pt")):
                time.sleep(0.1)
            (checkpoint,) = Path(folder).glob("*/checkpoint.pt")
            time.sleep(5)  # most of the time, it learns
            children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
            ranks = children.read_text().split()
            age_sec = time.time() - checkpoint.stat().st_mtime
            os.kill(int(ranks[1]), signal.SIGKILL)
            began_at = time.perf_counter()
            process.wait(300)
            return {"ended_sec": time.perf_counter() - began_at, "age_sec": age_sec}
        finally:
            harness.end(process)


if __name__ == "__main__":
    parser = harness.command_line(__doc__)
    parser.add_argument("what", choices=["run", "simulate", "talk", "kill"])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--rounds", type=int, default=2, help="of run and kill")
    parser.add_argument("--rollouts", type=int, default=16, help="of each run")
    args = parser.parse_args()
    what = {"run": run_all, "simulate": simulate_all, "talk": talk_all, "kill": kill_all}
    what[args.what](args)
