"""What ver_ppo.py does on a GPU: ten minutes, one table.

    python tests/benchmarks/gpu.py measure
    python tests/benchmarks/gpu.py table

`measure` runs every row of CASES, one at a time, and writes notebooks/results/gpu.json; the
manual's table is what `table` prints from that. Without a GPU, `--device cpu` goes the same way
(CUDA's kernels and memory, and bfloat16, are left out then).

steps/s     training as it is, logging included: for --seconds, from the fifth update on
collecting  share of the wall time in which the GPU's kernels run (torch's profiler), while one
            rollout is collected
learning    the same, while it is learned from
memory      most that tensors had of the GPU's memory, MiB
difference  between the log-probabilities of actions when they were chosen (one step, `lstm_cell`)
            and in learning from them (sequences, cuDNN) before the first update: the largest, and
            the approximate KL divergence that it makes

At the end the default is trained for --total-timesteps, and evaluated. Run by hand.
"""

import argparse
import contextlib
import json
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import machinery
import numpy as np
import torch
from peers import ROOT, kill_session, run_apart, start_apart, ver_ppo
from results import run_command
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

POINTNAV = "--env-id pointnav --env-kwargs simulator=builtin"
LARGE = f"{POINTNAV} image_size=128 --num-envs 64 --encoder resnet18"
CASES = {  # its arguments
    "default": POINTNAV,
    "overlap": f"{POINTNAV} --overlap",
    "async": f"{POINTNAV} --sampler async",
    "bfloat16": f"{POINTNAV} --bf16",
    "CPC|A": f"{POINTNAV} --cpc",
    "ResNet18, 128×128, 64 environments": LARGE,
    "the same, bfloat16": f"{LARGE} --bf16",
    "one rank": POINTNAV,
    "default, on the CPU": POINTNAV,
}
RESULT = Path(ROOT) / "notebooks" / "results" / "gpu.json"
WARM_UP = 5  # updates


def command_of(case, device):
    """The command line of a case."""
    script = [sys.executable, f"{ROOT}/ver_ppo.py"]
    if case == "one rank":
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        script = [*torchrun, "--nproc-per-node", "1", f"{ROOT}/ver_multigpu.py"]
    return [*script, *CASES[case].split(), "--device", "cpu" if "CPU" in case else device]


def rate(case, device, seconds):
    """Steps per second of training for so long, then Ctrl-C. None if it did not come to that."""
    with tempfile.TemporaryDirectory() as folder, open(Path(folder) / "output", "w+") as output:
        command = command_of(case, device) + ["--runs-dir", folder, "--eval-episodes", "0"]
        process = start_apart(command, folder, output)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(seconds)
        process.send_signal(signal.SIGINT)
        try:
            process.wait(120)
        finally:
            kill_session(process)
        output.seek(0)
        said = output.read()
        runs = [path for path in Path(folder).iterdir() if path.is_dir()]
        events = EventAccumulator(str(runs[0])).Reload() if runs else None
        known = events and "charts/learning_rate" in events.Tags()["scalars"]
        updates = events.Scalars("charts/learning_rate")[WARM_UP - 1 :] if known else []
        if len(updates) < 3:
            print(f"{case}: exit status {process.returncode}\n{said[-2000:]}")
            return None
        first, *_, last = updates
        return (last.step - first.step) / (last.wall_time - first.wall_time)


def profile(work, device):
    """Do it, and wait for the device. Returns the share of the wall time that kernels ran."""
    kinds = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    if device.type != "cuda":
        work()
        return None
    with torch.profiler.profile(activities=kinds) as profiler:
        began_at = time.perf_counter()
        work()
        torch.cuda.synchronize(device)
        wall_sec = time.perf_counter() - began_at
    events = profiler.events()
    kernel_us = sum(each.device_time_total for each in events if each.device_type.name == "CUDA")
    return kernel_us / 1e6 / wall_sec


def inspect(case, device):
    """In a process of its own: one rollout collected and learned from, under the profiler. Prints
    what it finds as one line of JSON."""
    words = command_of(case, device)
    arguments = words[words.index("--env-id") :]
    options = ver_ppo.parse_options([*arguments, "--no-overlap"])
    policy, optimizer, rollout, collector = machinery.build(options)
    where = next(policy.parameters()).device
    with contextlib.closing(collector.workers):
        ver_ppo.collect_rollout(policy, rollout, collector)
        ver_ppo.add_returns(policy, rollout, options)
        found = compare_log_probs(policy, rollout)
        machinery.learn(policy, optimizer, rollout, options)  # makes what is made only once

        def collect():
            ver_ppo.collect_rollout(policy, rollout, collector)

        found["collecting"] = profile(collect, where)
        found["learning"] = profile(
            lambda: machinery.learn(policy, optimizer, rollout, options), where
        )
    if where.type == "cuda":
        found["memory_mib"] = torch.cuda.max_memory_allocated(where) / 2**20
        found["device"] = torch.cuda.get_device_name(where)
    print("\n" + json.dumps(found))


@torch.no_grad()
def compare_log_probs(policy, rollout):
    """How far log-probabilities in learning are from those of acting, by the same weights."""
    steps = rollout.rows[: rollout.size]
    batch = ver_ppo.make_batch(rollout, ver_ppo.find_sequences(steps["segment"], steps["first"]))
    distribution, _, _ = ver_ppo.run_sequences(policy, batch)
    log_ratio = distribution.log_prob(batch["action"]) - batch["log_prob"]
    kl = (log_ratio.exp() - 1 - log_ratio).mean()
    return {"log_prob": log_ratio.abs().max().item(), "approx_kl": kl.item()}


def learn(device, steps):
    """The default, trained to its end: seconds, and what its evaluation found."""
    command = shlex.join([*command_of("default", device), "--total-timesteps", str(steps)])
    with tempfile.TemporaryDirectory() as folder:
        began_at = time.perf_counter()
        _, evaluation = run_command(command, folder)
        seconds = time.perf_counter() - began_at
    return {"steps": steps, "seconds": round(seconds, 1), "evaluation": evaluation}


def measure(args):
    """Every case, then a short training. Writes the result."""
    cases = {}
    for case in args.cases:
        if args.device == "cpu" and "--bf16" in CASES[case]:
            continue
        command = [sys.executable, __file__, "inspect", "--cases", case, "--device", args.device]
        cases[case] = run_apart(command, 600)
        cases[case]["rate"] = rate(case, args.device, args.seconds)
        print(case, json.dumps(cases[case]), flush=True)
    versions = {"torch": torch.__version__, "numpy": np.__version__}
    head = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True
    )
    result = {"commit": head.stdout.strip(), "date": time.strftime("%Y-%m-%d"), **versions}
    result["learned"] = learn(args.device, args.total_timesteps)
    result["cases"] = cases
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    print(table(result))


def table(result):
    """The manual's table."""
    lines = ["| | steps/s | collecting | learning | memory, MiB | difference (KL) |"]
    lines.append("|---|---|---|---|---|---|")
    for case, found in result["cases"].items():
        cells = [case, f"{found['rate']:,.0f}" if found["rate"] else "failed"]
        for name in ("collecting", "learning"):
            cells.append("–" if found[name] is None else f"{found[name]:.2f}")
        cells.append(f"{found['memory_mib']:,.0f}" if "memory_mib" in found else "–")
        cells.append(f"{found['log_prob']:.0e} ({found['approx_kl']:.0e})")
        lines.append(f"| {' | '.join(cells)} |")
    first = next(iter(result["cases"].values()))
    learned = result["learned"]
    spl, error = learned["evaluation"]["spl"]
    where = f"On {first.get('device', 'CPUs')}, torch {result['torch']}, commit {result['commit']}"
    trained = f"{learned['steps']:,} steps by default, in {learned['seconds']:.0f} s"
    return "\n".join([*lines, "", f"{where}. {trained}: SPL {spl:.3f} ± {error:.3f}."])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("measure", "table", "inspect"))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--seconds", type=float, default=20, help="of each case, starting included")
    parser.add_argument("--total-timesteps", type=int, default=300_000, help="of the training")
    parser.add_argument("--out", type=Path, default=RESULT)
    arguments = parser.parse_args()
    if arguments.what == "measure":
        measure(arguments)
    elif arguments.what == "inspect":
        inspect(arguments.cases[0], arguments.device)
    else:
        print(table(json.loads(arguments.out.read_text())))
