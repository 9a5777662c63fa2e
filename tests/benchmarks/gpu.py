"""Measure ver_ppo.py on a GPU: one call of ten minutes, on an otherwise idle machine.

    gpu.py measure                                    writes notebooks/results/gpu.json
    gpu.py measure --device cpu --more "--num-envs 4 --num-steps 8"     a dry run of the same code

sps         steps per second of a training of --steps, logging included, from the fifth update on
collecting  share of the wall time in which kernels run on the GPU (torch's profiler), while VER
            collects one rollout
learning    the same, while the policy learns from that rollout
memory_mib  largest amount of the GPU's memory that tensors had
log_prob    largest difference between the log-probabilities of acting (one step, `lstm_cell`) and
            of learning (sequences, cuDNN), before the first update
approx_kl   the KL divergence of that difference

At the end, the default is trained for --total-timesteps and evaluated. If a measurement fails, the
next one still runs, and the results so far are written after each. (The first programs on a new
machine take up to 20 s to start.) On a CPU, kernels, memory, CUDA graphs and bfloat16 are left out.
tables.py makes the table.
"""

import functools
import time
import traceback

import harness
import torch
from harness import ver_ppo

from notebooks.extensions import networks

POINTNAV = "--env-id pointnav --env-kwargs simulator=builtin"
MANY = "--num-envs 128 --num-minibatches 8"
LONGER = "--total-timesteps 163840"
GRAPHS = "--extensions graphs"
VARIANTS = {
    "default": "",
    f"`{GRAPHS}`": GRAPHS,
    f"`{MANY}`": f"{MANY} {LONGER}",
    f"`{MANY} {GRAPHS}`": f"{MANY} {GRAPHS} {LONGER}",
    "`--policy resnet18`": "--policy resnet18",
    f"`--policy resnet18 {GRAPHS}`": f"--policy resnet18 {GRAPHS}",
    '`--policy "resnet18(bf16=True)"`': "--policy 'resnet18(bf16=True)'",
    '`--policy "resnet18(cpc=True)"`': "--policy 'resnet18(cpc=True)'",
    "`--extensions overlap`": "--extensions overlap",
    "`--extensions async`": "--extensions async",
    '`--extensions "inference(workers=2)"`': "--extensions 'inference(workers=2)'",
    "`--device cpu`": "--device cpu",
    f"`--device cpu {MANY}`": f"--device cpu {MANY} {LONGER}",
    "`--device cpu --policy resnet18`": "--device cpu --policy resnet18",
    "one rank": "",
    f"one rank, `{GRAPHS}`": GRAPHS,
    "two ranks": "",
}
RANKS = {"one rank": 1, "two ranks": 2}  # all on the same GPU


def profile(work, device):
    """Call `work` and wait for the device. Returns the share of the wall time in which kernels ran,
    or None on a CPU."""
    if device.type != "cuda":
        work()
        return None
    kinds = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=kinds) as profiler:
        began_at = time.perf_counter()
        work()
        torch.cuda.synchronize(device)
        wall_sec = time.perf_counter() - began_at
    kernels = [each for each in profiler.events() if each.device_type.name == "CUDA"]
    return sum(each.device_time_total for each in kernels) / 1e6 / wall_sec


def inspect(arguments):
    """In a process of its own: collect rollouts and learn from them, under the profiler."""
    with harness.collecting(arguments) as run:
        rollout = run.collect()
        device = run.device
        run.advantages(rollout)
        found = compare_log_probs(run.policy, rollout)
        harness.learn(run, rollout)  # warm up
        found["collecting"] = profile(run.collect, device)
        found["learning"] = profile(lambda: harness.learn(run, rollout), device)
        if device.type == "cuda":
            found["memory_mib"] = torch.cuda.max_memory_allocated(device) / 2**20
    return found


@torch.no_grad()
def compare_log_probs(policy, rollout):
    """Compare the log-probabilities of learning with those of acting, with the same weights."""
    steps = rollout.complete
    device = next(policy.parameters()).device
    columns = ver_ppo.to_device(steps, ver_ppo.LEARNED, device)
    batch = ver_ppo.make_batch(columns, ver_ppo.find_sequences(steps["segment"], steps["first"]))
    distribution, _, _ = ver_ppo.run_sequences(policy, batch)
    log_ratio = distribution.log_prob(batch["action"]) - batch["log_prob"]
    kl = (log_ratio.exp() - 1 - log_ratio).mean()
    return {"log_prob": log_ratio.abs().max().item(), "approx_kl": kl.item()}


def measure_rate(arguments, steps, ranks):
    """Steps per second of a training, without the first four updates. Some arguments have a number
    of steps of their own."""
    line = f"--total-timesteps {steps} --eval-episodes 0 {arguments}"
    return {"sps": harness.train(line, ranks=ranks).rate(4)}


def learn_default(arguments, steps):
    """Train with the defaults to the end. Returns the seconds and the evaluation."""
    trained = harness.train(f"{arguments} --total-timesteps {steps}")
    return {"steps": steps, "seconds": round(trained.seconds), "evaluation": trained.evaluation}


def attempt(what, call):
    """Call a function and return its result, or {} if it fails. Prints either."""
    try:
        found = call()
    except Exception:
        traceback.print_exc()
        found = {}
    print(f"{what}: {found}", flush=True)
    return found


def measure(args):
    """Measure every variant, then a short training."""
    common = f"{POINTNAV} --device {args.device} {args.more}"
    found = {}
    for name, more in VARIANTS.items():
        arguments = f"{common} {more}"
        if "bf16" in more and not networks.computes_bf16(args.device):
            continue
        if GRAPHS in more and args.device == "cpu":
            continue
        ranks = RANKS.get(name.split(",")[0], 0)
        rate = functools.partial(measure_rate, arguments, args.steps, ranks)
        found[name] = attempt(name, rate)
        if not ranks and "--extensions" not in more:  # extensions change how steps are collected
            inside = functools.partial(harness.apart, inspect, arguments)
            found[name] |= attempt(name, inside)
        harness.keep(args, "gpu", found=found)
    call = functools.partial(learn_default, common, args.total_timesteps)
    harness.keep(args, "gpu", found=found, learned=attempt("learned", call))


if __name__ == "__main__":
    parser = harness.command_line(__doc__)
    parser.add_argument("what", choices=["measure"])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--steps", type=int, default=40_960, help="of each training")
    parser.add_argument("--total-timesteps", type=int, default=200_000, help="of the last one")
    parser.add_argument("--more", default="", help="more arguments of all trainings")
    measure(parser.parse_args())
