"""What the machinery costs: collection against the sleeping of emulated simulators, and training
against its parts.

    python tests/benchmarks/machinery.py latency
    python tests/benchmarks/machinery.py parts --checkpoint FILE

`latency`: 16 environments that sleep 20 ms a step on average (log-normal, sigma 0.8), each in a
process of its own. The bound is what the sleeping alone allows: the sum over environments of 1 /
mean time of a step.
`parts`: the bound is 1 / (environment step / cores + batched forward + learning), each measured
alone in the same run, beside a worker for each core.
With SCRIPT_FOLDER=FOLDER in the environment, the ver_ppo.py of that folder is measured; a
checkpoint must be its own. Run by hand; prints one line for each round and JSON at the end.
"""

import argparse
import json
import time
from dataclasses import replace

import numpy as np
import torch
from peers import EARLIER, make_options, pointnav, ver_ppo

LATENCY_MS = 20.0


def build(options, checkpoint=None):
    """Everything that collects and learns, with its workers started."""
    spec, policy, optimizer = ver_ppo.build(options)
    if checkpoint:
        ver_ppo.load_policy(policy, checkpoint)
    device = next(policy.parameters()).device
    size = options.rollout_steps, options.num_envs, policy.state_shape
    rollout = ver_ppo.Rollout(spec, *size, device)
    io = ver_ppo.EnvIO(spec, options.num_envs)
    workers = ver_ppo.make_workers(options, "train", spec, io)
    collector = ver_ppo.Collector(workers, io, policy, spec, options)
    return policy, optimizer, rollout, collector


def learn(policy, optimizer, rollout, options):
    """One update from all of a rollout."""
    ver_ppo.add_returns(policy, rollout, options)
    ver_ppo.ppo_update(policy, optimizer, rollout, options)


def mean_batch(rollout):
    """Steps whose actions were sent together."""
    return rollout.steps / len(np.unique(rollout.sent_at))


def latency(args):
    """Steps per second of collection as a share of what sleeping alone allows."""
    settings = {"env_id": args.env_id, "device": "cpu", "num_workers": 16}
    options = make_options(LATENCY_MS, **settings)
    policy, _, rollout, collector = build(options, args.checkpoint)
    torch.set_num_threads(1)
    ver_ppo.collect_rollout(policy, rollout, collector)
    shares = []
    nominal = options.num_envs / (LATENCY_MS / 1000)
    for _ in range(args.rounds):
        began_at = time.perf_counter()
        ver_ppo.collect_rollout(policy, rollout, collector)
        rate = rollout.steps / (time.perf_counter() - began_at)
        # the sleeps themselves are measured, inside the workers, in the steps of this very rollout
        steps_N = np.bincount(rollout.env)
        bound = (steps_N / np.bincount(rollout.env, rollout.step_sec)).sum()
        shares.append(rate / bound)
        words = f"nominal {rate / nominal:.3f}; batch {mean_batch(rollout):.1f}"
        print(f"{rate:.0f} steps/s of {bound:.0f} = {rate / bound:.3f}; {words}", flush=True)
    collector.workers.close()
    return {"share_of_bound": shares}


def parts(args):
    """Steps per second of the training loop as a share of the bound made of its parts."""
    rows = []
    cores = ver_ppo.count_cores()
    settings = {"env_id": args.env_id, "device": "cpu", "num_workers": cores}
    options = make_options(learning_rate=1e-5, **settings)
    for _ in range(args.rounds):
        sec = measure_parts(options, cores, options.num_envs // 2, args.checkpoint)
        bound = 1 / (sec["env"] / cores + sec["forward"] + sec["learn"])
        loop, rate, batch = measure_loop(options, cores, args)
        row = {
            "env_step_ms": 1000 * sec["env"],
            "forward_ms": 1000 * sec["forward"],
            "learn_ms": 1000 * sec["learn"],
            "bound": bound,
            "rate": rate,
            "share": rate / bound,
            "arrange_ms": 1000 * sec["arrange"],
            **{f"loop_{name}_ms": 1000 * seconds for name, seconds in loop.items()},
            "batch": batch,
        }
        print(" ".join(f"{name} {value:.4g}" for name, value in row.items()), flush=True)
        rows.append(row)
    return rows


def measure_parts(options, cores, batch, checkpoint=None):
    """Seconds per step of what training consists of, each alone: `env` on one core, `forward` in
    batches of this size, `learn` on all cores, `learn_one_thread`; and `arrange`, seconds of
    packing one rollout's mini-batches."""
    ver_ppo.keep_freed_memory()  # as ver_ppo.Run does
    for index in range(pointnav.NUM_PLANS["train"]):
        pointnav.floor_plan("train", index)  # made once in a whole training: no part of a step
    policy, optimizer, rollout, collector = build(replace(options, num_workers=0), checkpoint)
    torch.set_num_threads(1)
    spent_sec = []
    spent_steps = []
    send = collector.workers.send

    def timed_send(env_B):
        began_at = time.perf_counter()
        send(env_B)
        spent_sec.append(time.perf_counter() - began_at)
        spent_steps.append(len(env_B))

    collector.workers.send = timed_send
    for _ in range(2):
        ver_ppo.collect_rollout(policy, rollout, collector)
    collector.workers.close()
    sec = {
        "env": sum(spent_sec) / sum(spent_steps),
        "forward": time_forward(policy, rollout, batch),
    }
    for name, threads in (("learn_one_thread", 1), ("learn", cores)):
        torch.set_num_threads(threads)
        learning_sec = time_calls(3, lambda: learn(policy, optimizer, rollout, options))
        sec[name] = learning_sec / rollout.steps
    sec["arrange"] = time_calls(1, lambda: arrange(rollout, options))
    return sec


def time_calls(number, function):
    """Seconds of one call, the mean of `number` after one that warms up."""
    function()
    began_at = time.perf_counter()
    for _ in range(number):
        function()
    return (time.perf_counter() - began_at) / number


@torch.inference_mode()
def time_forward(policy, rollout, batch):
    """Seconds per step of the bare forward pass."""
    obs = {key: part[:batch] for key, part in rollout.obs.items()}
    prev_action_BA = torch.from_numpy(np.array(rollout.prev_action[:batch]))
    first_B = torch.zeros(batch, dtype=torch.bool)
    state_B = rollout.state[:batch]

    def forward():
        distribution, _, _ = policy.step(obs, prev_action_BA, first_B, state_B)
        distribution.log_prob(distribution.sample())

    return time_calls(200, forward) / batch


def arrange(rollout, options):
    """Sequences and packed mini-batches of a whole update, as `ver_ppo.ppo_update` makes them."""
    sequences = ver_ppo.find_sequences(rollout.segment, rollout.first)
    cut = options.num_minibatches
    if EARLIER:
        cut = rollout.steps // cut  # it takes their size
    for _ in range(options.update_epochs):
        shuffled = [sequences[q] for q in torch.randperm(len(sequences)).tolist()]
        for minibatch in ver_ppo.cut_minibatches(shuffled, cut):
            ver_ppo.pack(minibatch)


def measure_loop(options, cores, args):
    """--updates cycles of collecting and learning: seconds per step of each phase, steps per
    second, mean batch."""
    policy, optimizer, rollout, collector = build(options, args.checkpoint)
    for update in range(args.updates + 1):
        if update <= 1:  # the first one warms up
            began = time.perf_counter()
            seconds = np.zeros(3)
        torch.set_num_threads(1)
        ver_ppo.collect_rollout(policy, rollout, collector)
        torch.set_num_threads(cores)
        began_at, ended_at, waited_sec = rollout.clock
        learning_at = time.perf_counter()
        learn(policy, optimizer, rollout, options)
        learning_sec = time.perf_counter() - learning_at
        seconds += waited_sec, ended_at - began_at - waited_sec, learning_sec
    steps = args.updates * rollout.steps
    rate = steps / (time.perf_counter() - began)
    collector.workers.close()
    phases = dict(zip(("waiting", "inference", "learning"), seconds / steps))
    return phases, rate, mean_batch(rollout)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("latency", "parts"))
    parser.add_argument("--env-id", default="pointnav")
    plays = "policy that plays; a fresh one stops its episodes early"
    parser.add_argument("--checkpoint", help=plays)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--updates", type=int, default=15)
    arguments = parser.parse_args()
    print(json.dumps({"latency": latency, "parts": parts}[arguments.what](arguments)))
