"""What --num-workers auto measures and chooses, beside what other numbers come to.

    python tests/benchmarks/workers.py --seconds 4

Four environments: CartPole, the built-in PointNav (PointNavSteady of peers.py, whose episodes keep
their length), one whose steps sleep 20 ms, and one whose steps need 20 ms of a CPU. One line for
each: the milliseconds of a step on the clock and of a CPU, as ver_ppo.describe_env measures them,
the chosen number, and steps per second, collecting and learning by turns, with --num-workers 0, one
for each core, one for each of 16 environments, and the chosen number. Run by hand on an idle
machine.
"""

import argparse
import contextlib
import time
from dataclasses import replace

import machinery
import torch
from peers import ENV_ID, ver_ppo

SLEEP = "notebooks.extensions.wrappers:Latency(mean_ms=20, spread=0)"
FEW = {"num_steps": 8}  # steps of a rollout from each environment: slow ones fill few rollouts
KINDS = {
    "CartPole-v1": {"env_id": "CartPole-v1"},
    "built-in pointnav": {"env_id": f"peers:{ENV_ID}"},
    "sleeps 20 ms": {"env_id": "CartPole-v1", "wrappers": (SLEEP,), **FEW},
    "computes 20 ms": {"env_id": "CartPole-v1", "wrappers": ("peers:Busy(cpu_ms=20)",), **FEW},
}


def measure(options, seconds):
    """Steps per second, from the second rollout on."""
    policy, optimizer, rollout, collector = machinery.build(options)
    torch.set_num_threads(1)
    steps = 0
    with contextlib.closing(collector.workers):
        ver_ppo.collect_rollout(policy, rollout, collector)
        began_at = time.perf_counter()
        while time.perf_counter() < began_at + seconds:
            machinery.learn(policy, optimizer, rollout, options)
            ver_ppo.collect_rollout(policy, rollout, collector)
            steps += rollout.steps
        return steps / (time.perf_counter() - began_at)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=4.0, help="of each training")
    arguments = parser.parse_args()
    for name, settings in KINDS.items():
        options = ver_ppo.Options(device="cpu", **settings)
        spec = ver_ppo.describe_env(options)
        chosen = ver_ppo.count_workers(options, spec)
        times = f"{1000 * spec.step_sec:.3g} ms, {1000 * spec.cpu_sec:.3g} of a CPU"
        print(f"{name}: a step takes {times}; chosen {chosen}; steps/s", end="", flush=True)
        for number in sorted({0, ver_ppo.count_cores(), options.num_envs, chosen}):
            rate = measure(replace(options, num_workers=number), arguments.seconds)
            print(f", {number} workers {rate:.0f}", end="", flush=True)
        print()
