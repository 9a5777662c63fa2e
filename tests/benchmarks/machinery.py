"""What the machinery costs: collection against the sleeping of emulated simulators, and training against its parts.

    python tests/benchmarks/machinery.py latency      python tests/benchmarks/machinery.py parts --checkpoint FILE

`latency`: 16 environments that sleep 20 ms a step on average (log-normal, sigma 0.8). The bound is what the sleeping
alone allows: the sum over environments of 1 / mean time of a step.
`parts`: the bound is 1 / (environment step / cores + batched forward + learning), each measured alone in the same run.
Run by hand; prints one line for each round and JSON at the end.
"""

import argparse
import json
import sys
import time
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import ver_ppo  # noqa: E402


def build(options, checkpoint=None):
    spec = ver_ppo.describe_env(options)
    policy = ver_ppo.Policy(spec, options)
    if checkpoint:
        ver_ppo.load_policy(policy, ver_ppo.load_checkpoint(checkpoint), checkpoint)
    collector, (rollout,) = ver_ppo.allocate(policy, spec, options, torch.device("cpu"))
    collector.stop = ver_ppo.StopSignal()
    workers = collector.workers = ver_ppo.start_workers(options, "train", spec, collector.transfer)
    return policy, workers, collector, rollout


def collect(policy, rollout, collector):
    """One rollout as ver_ppo.inline_rollouts collects it; what it took is counted from 0."""
    for name in rollout.SPENT:
        getattr(rollout, name)[...] = 0
    ver_ppo.carry_over(rollout, rollout, collector)
    ver_ppo.collect_rollout(policy, rollout, collector)


def latency(args):
    """Steps per second of collection as a share of what sleeping alone allows."""
    options = ver_ppo.Options(env_id=args.env_id, sim_latency=20.0, sim_latency_spread=(0.8, 0.0, 0.0))
    policy, workers, collector, rollout = build(options, checkpoint=args.checkpoint)
    torch.set_num_threads(1)
    collect(policy, rollout, collector)
    shares = []
    for _ in range(args.rounds):
        # the sleeps themselves are measured, inside the workers, from the answers of this very rollout
        slept_N, steps_N = np.zeros(options.num_envs), np.zeros(options.num_envs)
        complete = ver_ppo.complete_records

        def counting(rollout, collector, rows):
            slept_N[rows] += collector.transfer.step_sec[rows]
            steps_N[rows] += 1
            return complete(rollout, collector, rows)

        ver_ppo.complete_records = counting
        began = time.perf_counter()
        collect(policy, rollout, collector)
        sec = time.perf_counter() - began
        ver_ppo.complete_records = complete
        bound = (steps_N / slept_N).sum()
        rate = options.rollout_steps / sec
        shares.append(rate / bound)
        nominal = options.num_envs / (options.sim_latency / 1000)
        batch = rollout.served / rollout.batches
        print(f"{rate:.0f} steps/s of {bound:.0f} = {rate / bound:.3f}; nominal {rate / nominal:.3f}; batch {batch:.1f}")
    workers.close()
    return {"share_of_bound": shares}


def parts(args):
    """Steps per second of the training loop as a share of the bound made of its parts."""
    rows = []
    ver_ppo.keep_freed_memory()
    cores = torch.get_num_threads()
    for _ in range(args.rounds):
        options = ver_ppo.Options(env_id=args.env_id, num_workers=0)
        policy, workers, collector, rollout = build(options, checkpoint=args.checkpoint)
        torch.set_num_threads(1)
        spent = []
        send = workers.send

        def timed_send(rows):
            began = time.perf_counter()
            send(rows)
            spent.append(time.perf_counter() - began)

        workers.send = timed_send
        for _ in range(2):
            collect(policy, rollout, collector)
        env_sec = sum(spent) / (len(spent) * options.num_envs)
        half = options.num_envs // 2
        obs = {key: part[:half] for key, part in rollout.obs.items()}
        first = torch.zeros(half, dtype=torch.bool)
        with torch.inference_mode():
            began = time.perf_counter()
            for _ in range(200):
                distribution, _, _ = policy.step(obs, rollout.prev_action[:half], first, rollout.state[:half])
                distribution.log_prob(distribution.sample())
        forward_sec = (time.perf_counter() - began) / 200 / half
        torch.set_num_threads(cores)
        optimizer = torch.optim.Adam(policy.parameters(), lr=1e-5)
        ver_ppo.learn(policy, optimizer, rollout, np.arange(rollout.size), options)
        began = time.perf_counter()
        for _ in range(3):
            ver_ppo.learn(policy, optimizer, rollout, np.arange(rollout.size), options)
        learn_sec = (time.perf_counter() - began) / 3 / options.rollout_steps
        began = time.perf_counter()
        order_S, begin_Q = ver_ppo.find_sequences(
            *(getattr(rollout, name)[: rollout.size] for name in ("env", "first", "complete"))
        )
        for _ in range(options.update_epochs):
            for minibatch in ver_ppo.cut_minibatches(
                order_S, begin_Q, torch.randperm(len(begin_Q)).numpy(), options.num_minibatches
            ):
                ver_ppo.pack_sequences(*minibatch)
        arrange_ms = 1000 * (time.perf_counter() - began)
        workers.close()
        bound = 1 / (env_sec / cores + forward_sec + learn_sec)

        options = ver_ppo.Options(env_id=args.env_id)
        policy, workers, collector, rollout = build(options, checkpoint=args.checkpoint)
        optimizer = torch.optim.Adam(policy.parameters(), lr=1e-5)
        seconds = {"waiting": 0.0, "inference": 0.0, "learning": 0.0}
        for update in range(args.updates + 1):
            if update == 1:
                began = time.perf_counter()
            torch.set_num_threads(1)
            collect(policy, rollout, collector)
            torch.set_num_threads(cores)
            learning = time.perf_counter()
            ver_ppo.learn(policy, optimizer, rollout, np.arange(rollout.size), options)
            spent = {"waiting": rollout.waiting_sec, "inference": rollout.inference_sec}
            for name, sec in {**spent, "learning": time.perf_counter() - learning}.items():
                seconds[name] += float(sec) * (update > 0)
        rate = args.updates * options.rollout_steps / (time.perf_counter() - began)
        workers.close()
        steps = args.updates * options.rollout_steps
        row = {
            "env_step_ms": 1000 * env_sec, "forward_ms": 1000 * forward_sec, "learn_ms": 1000 * learn_sec, "bound": bound,
            "rate": rate, "share": rate / bound, "arrange_ms": arrange_ms,
            **{f"loop_{name}_ms": 1000 * sec / steps for name, sec in seconds.items()},
            "batch": float(rollout.served / rollout.batches),
        }  # fmt: skip
        print(" ".join(f"{name} {value:.4g}" for name, value in row.items()), flush=True)
        rows.append(row)
    return rows


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("latency", "parts"))
    parser.add_argument("--env-id", default="pointnav")
    parser.add_argument("--checkpoint", help="policy that plays; a fresh one stops its episodes early")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--updates", type=int, default=15)
    arguments = parser.parse_args()
    print(json.dumps({"latency": latency, "parts": parts}[arguments.what](arguments)))
