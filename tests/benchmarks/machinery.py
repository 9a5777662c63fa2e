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
from dataclasses import replace
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
    workers = collector.workers = ver_ppo.start_workers(options, "train", spec, collector.transfer)
    return policy, workers, collector, rollout


def collect(policy, rollout, collector):
    """One rollout as ver_ppo.inline_rollouts collects it; what it took is counted from 0."""
    for name in rollout.SPENT:
        getattr(rollout, name)[...] = 0
    ver_ppo.carry_over(rollout, rollout, collector)
    ver_ppo.collect_rollout(policy, rollout, collector)


def learn(policy, optimizer, rollout, options):
    """One update from all of a rollout."""
    records = np.arange(rollout.size)
    ver_ppo.compute_targets(policy, rollout, records, options)
    ver_ppo.learn(policy, optimizer, rollout, records, options)


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
    cores = torch.get_num_threads()
    options = ver_ppo.Options(env_id=args.env_id)
    for _ in range(args.rounds):
        sec = measure_parts(options, cores, options.num_envs // 2, args.checkpoint)
        bound = 1 / (sec["env"] / cores + sec["forward"] + sec["learn"])
        loop, rate, batch = measure_loop(options, cores, args)
        row = {
            "env_step_ms": 1000 * sec["env"], "forward_ms": 1000 * sec["forward"], "learn_ms": 1000 * sec["learn"],
            "bound": bound, "rate": rate, "share": rate / bound, "arrange_ms": 1000 * sec["arrange"],
            **{f"loop_{name}_ms": 1000 * seconds for name, seconds in loop.items()}, "batch": batch,
        }  # fmt: skip
        print(" ".join(f"{name} {value:.4g}" for name, value in row.items()), flush=True)
        rows.append(row)
    return rows


def measure_parts(options, cores, batch, checkpoint=None):
    """Seconds per step of what training consists of, each alone: `env` on one core, `forward` in batches of this size,
    `learn` on all cores, `learn_one_thread`; and `arrange`, seconds of packing one rollout's mini-batches."""
    ver_ppo.keep_freed_memory()  # as ver_ppo.train does
    for index in range(ver_ppo.NUM_PLANS["train"]):
        ver_ppo.floor_plan("train", index)  # made once in a whole training: no part of a step
    options = replace(options, num_workers=0, sim_latency=0.0)
    policy, workers, collector, rollout = build(options, checkpoint=checkpoint)
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-5)
    torch.set_num_threads(1)
    spent_sec, spent_steps, send = [], [], workers.send

    def timed_send(rows):
        began = time.perf_counter()
        send(rows)
        spent_sec.append(time.perf_counter() - began)
        spent_steps.append(len(rows))

    workers.send = timed_send
    for _ in range(2):
        collect(policy, rollout, collector)
    workers.close()
    sec = {"env": sum(spent_sec) / sum(spent_steps), "forward": time_forward(policy, rollout, batch)}
    records = np.arange(rollout.size)
    for name, threads in (("learn_one_thread", 1), ("learn", cores)):
        torch.set_num_threads(threads)
        calls_sec = time_calls(3, lambda: learn(policy, optimizer, rollout, options))
        sec[name] = calls_sec / options.rollout_steps
    return {**sec, "arrange": time_calls(1, lambda: arrange(rollout, records, options))}


def time_calls(number, function):
    """Seconds of one call, the mean of `number` after one that warms up."""
    function()
    began = time.perf_counter()
    for _ in range(number):
        function()
    return (time.perf_counter() - began) / number


@torch.inference_mode()
def time_forward(policy, rollout, batch):
    """Seconds per step of the bare forward pass."""
    obs = {key: part[:batch] for key, part in rollout.obs.items()}
    first = torch.zeros(batch, dtype=torch.bool)

    def forward():
        distribution, _, _ = policy.step(obs, rollout.prev_action[:batch], first, rollout.state[:batch])
        distribution.log_prob(distribution.sample())

    return time_calls(200, forward) / batch


def arrange(rollout, records, options):
    """Sequences and packed mini-batches of a whole update, as `ver_ppo.learn` makes them."""
    columns = (getattr(rollout, name)[records] for name in ("env", "first", "complete"))
    order_S, begin_Q = ver_ppo.find_sequences(*columns)
    for _ in range(options.update_epochs):
        permutation_Q = torch.randperm(len(begin_Q)).numpy()
        for minibatch in ver_ppo.cut_minibatches(order_S, begin_Q, permutation_Q, options.num_minibatches):
            ver_ppo.pack_sequences(*minibatch)


def measure_loop(options, cores, args):
    """--updates cycles of collecting and learning: seconds per step of each phase, steps per second, mean batch."""
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
        learn(policy, optimizer, rollout, options)
        spent = {"waiting": rollout.waiting_sec, "inference": rollout.inference_sec}
        for name, sec in {**spent, "learning": time.perf_counter() - learning}.items():
            seconds[name] += float(sec) * (update > 0)
    steps = args.updates * options.rollout_steps
    rate = steps / (time.perf_counter() - began)
    workers.close()
    loop = {name: sec / steps for name, sec in seconds.items()}
    return loop, rate, float(rollout.served / rollout.batches)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("latency", "parts"))
    parser.add_argument("--env-id", default="pointnav")
    parser.add_argument("--checkpoint", help="policy that plays; a fresh one stops its episodes early")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--updates", type=int, default=15)
    arguments = parser.parse_args()
    print(json.dumps({"latency": latency, "parts": parts}[arguments.what](arguments)))
