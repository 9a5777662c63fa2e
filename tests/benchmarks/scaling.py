"""How ver_multigpu.py scales with the number of ranks: real runs on this machine, and many more
ranks under a virtual clock.

    python tests/benchmarks/scaling.py run --ranks 1 2 4 8 --rounds 2
    python tests/benchmarks/scaling.py simulate --ranks 1 2 4 8 16 32 64

run: simulators that sleep 100 ms a step on average (log-normal, sigma 0.4) in scenes of 150 steps,
some slower than others (sigma 0.5 between scenes: Scenes of uneven.py), and a network so small that
two cores are not the limit; so a few cores stand for many machines. A round is every mode with
every number of ranks. Prints steps per second of all ranks from the third update on, and their
ratio to one rank in the same mode. (Both end with a line of JSON.)

simulate: no processes, no time. Every environment is a stream of step times; when a rollout ends is
decided by the functions that ver_multigpu.py decides by, from the step times of the rollout before.
Beside them `hindsight`: the best S, known only afterwards. Averaging gradients is taken to cost
nothing.
"""

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
from notebooks.extensions.virtual_ranks import simulate  # noqa: E402

MODES = {
    "ver optimal": ("ver", "optimal"),
    "ver none": ("ver", "none"),
    "sync threshold": ("sync", "threshold"),
    "sync none": ("sync", "none"),
}
SEEDS = 4  # of simulated streams of step times, the same for any number of ranks

# ----------------------------------------------------------------------------------- Virtual clock


def simulate_all(args):
    """Speed-ups over one rank: workload (homogeneous, heterogeneous) -> mode -> ranks -> found."""
    results = {}
    for workload, scenes in (("homogeneous", 0.0), ("heterogeneous", args.scenes)):
        for mode, (sampler, preemption) in MODES.items():
            more = {"scenes": scenes, "learning_sec": args.learning_sec}
            how = (16, 128, sampler, preemption, args.rollouts)
            one = None
            for ranks in sorted({1, *args.ranks}):
                found = [simulate(ranks, *how, seed, **more) for seed in range(SEEDS)]
                rate = np.mean([each["rate"] for each in found])
                one = one or rate
                speedup = rate / one
                of_best = rate / np.mean([each["hindsight"] for each in found])
                at = results.setdefault(workload, {}).setdefault(mode, {})
                at[ranks] = {"speedup": speedup, "of_hindsight": of_best}
                words = f"{speedup:6.1f} times one rank, {of_best:.3f} of the best S in hindsight"
                print(f"{workload:14} {mode:15} {ranks:4} ranks: {words}", flush=True)
    return results


# --------------------------------------------------------------------------------------- Real runs


def run_ranks(ranks, sampler, preemption, args, seed):
    """Steps per second of one real run, from its third update to its last."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    total = args.rollouts * ranks * args.num_envs * args.num_steps
    words = (
        f"-m torch.distributed.run --nproc-per-node {ranks} --master-port {port} ver_multigpu.py"
    )
    words += f" --env-id uneven:Scenes-v0 --num-workers {args.num_envs} --num-envs {args.num_envs}"
    words += f" --num-steps {args.num_steps} --total-timesteps {total} --hidden-size 16"
    words += " --update-epochs 1 --num-minibatches 1 --eval-episodes 0 --learner-threads 1"
    words += f" --device cpu --seed {seed} --sampler {sampler} --preemption {preemption}"
    words += " --learning-rate 1e-6"
    environ = os.environ | {"PYTHONPATH": str(Path(__file__).resolve().parent)}  # for uneven.py
    how = {"capture_output": True, "text": True, "timeout": args.timeout, "env": environ}
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, *words.split(), "--runs-dir", folder]
        log = subprocess.run(command, cwd=ROOT, **how)
        if log.returncode:
            raise RuntimeError(log.stderr[-3000:])
        (run,) = Path(folder).iterdir()
        events = EventAccumulator(str(run)).Reload()
    found = {}
    for tag in (
        "time/learning_sec",
        "ranks/stale_share",
        "ranks/predicted_sec",
        "ranks/rollout_sec",
    ):
        if tag in events.Tags()["scalars"]:
            values = [event.value for event in events.Scalars(tag)][2:]
            found[tag.split("/")[1]] = float(np.mean(values))
    _, _, first, *_, last = events.Scalars("charts/SPS")
    rate = (last.step - first.step) / (last.wall_time - first.wall_time)
    return {"sps": rate, **found}


def run_all(args):
    """Every mode and number of ranks, interleaved; the ratios to one rank."""
    results = {}
    fewest = args.ranks[0]
    for number in range(1, args.rounds + 1):
        for ranks in args.ranks:
            for mode in args.modes:
                found = run_ranks(ranks, *MODES[mode], args, seed=number)
                results.setdefault(mode, {}).setdefault(ranks, []).append(found)
                ratio = found["sps"] / np.mean([one["sps"] for one in results[mode][fewest]])
                shown = " ".join(f"{name} {value:.4g}" for name, value in found.items())
                words = f"{mode:15} {ranks} ranks: {ratio:.2f} times {fewest}; {shown}"
                print(f"round {number}: {words}", flush=True)
    for mode, by_ranks in results.items():
        one = np.mean([found["sps"] for found in by_ranks[fewest]])
        for ranks, runs in by_ranks.items():
            rates = [found["sps"] for found in runs]
            ratio = f"{np.mean(rates) / one:.2f} ({min(rates) / one:.2f}-{max(rates) / one:.2f})"
            words = f"{np.mean(rates):7.1f} steps/s = {ratio} times {fewest}"
            print(f"{mode:15} {ranks} ranks: {words}")
    return results


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["run", "simulate"])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--modes", nargs="+", choices=list(MODES), default=list(MODES))
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--rollouts", type=int, default=16)
    parser.add_argument("--num-envs", type=int, default=8)
    parser.add_argument("--num-steps", type=int, default=64)
    parser.add_argument("--scenes", type=float, default=0.5, help="simulate: sigma between scenes")
    mean = "simulate: in mean step times"
    parser.add_argument("--learning-sec", type=float, default=20.0, help=mean)
    parser.add_argument("--timeout", type=float, default=600)
    args = parser.parse_args()
    results = run_all(args) if args.what == "run" else simulate_all(args)
    print(json.dumps(results))


if __name__ == "__main__":
    main()
