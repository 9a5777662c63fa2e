"""Training speed in Habitat, beside habitat-baselines' own VER trainer: same scene, sizes and settings, in turns.

    python tests/benchmarks/habitat.py --data FOLDER --scene rooms_s --rounds 3

Needs habitat-sim, habitat-lab and habitat-baselines in this Python, and a folder with datasets/pointnav/SCENE/v1 and
scene_datasets. 4 environments, 128 x 128 depth, T = 32, 2 epochs of 2 mini-batches, hidden size 512, on the CPU. Speed is
steps per second of wall time between a third of the run and its end, learning included. Prints one line for each run, then
medians and ranges. Run by hand.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from datetime import datetime
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parents[2]
SENSORS = "habitat.simulator.agents.main_agent.sim_sensors"
POLICIES = {"cnn": "PointNavBaselinePolicy", "resnet18": "PointNavResNetPolicy"}
ONE = ["--num-workers", "1"]  # of two cores: the other one infers and learns
QUIET = {"MAGNUM_LOG": "quiet", "HABITAT_SIM_LOG": "quiet", "OMP_NUM_THREADS": "1"}


def habitat_overrides(data, scene):
    """Where the data are, quoted for habitat-lab's configuration."""
    path = f"{data}/datasets/pointnav/{scene}/v1/{{split}}/{{split}}.json.gz"
    return [f"habitat.dataset.data_path='{path}'", f"habitat.dataset.scenes_dir={data}/scene_datasets"]


def ours(encoder, steps, data, scene, folder, more):
    """Run ver_ppo.py. Returns (time, steps so far) from the end of each update."""
    command = [sys.executable, str(ROOT / "ver_ppo.py"), "--encoder", encoder, "--simulator", "habitat", "--device", "cpu"]
    command += "--num-envs 4 --num-steps 32 --image-size 128 --hidden-size 512 --eval-episodes 0".split()
    command += ["--total-timesteps", str(steps), "--runs-dir", str(folder), *more]
    command += ["--habitat-overrides", *habitat_overrides(data, scene)]
    subprocess.run(command, check=True, env=os.environ | QUIET, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (run,) = folder.iterdir()
    return [(event.wall_time, event.step) for event in EventAccumulator(str(run)).Reload().Scalars("charts/learning_rate")]


def baselines(encoder, steps, data, scene, folder, more):
    """Run habitat-baselines' VER trainer. Returns the same, from the lines that it logs every ten updates."""
    command = [sys.executable, "-u", "-m", "habitat_baselines.run", "--config-name=pointnav/ppo_pointnav_example.yaml"]
    settings = {
        "trainer_name": "ver",
        "num_environments": 4,
        "rl.ppo.num_steps": 32,
        "rl.ppo.ppo_epoch": 2,
        "rl.ppo.num_mini_batch": 2,
        "rl.ppo.hidden_size": 512,
        "rl.policy.main_agent.name": POLICIES[encoder],
        "total_num_steps": steps,
        "num_checkpoints": 1,
        "load_resume_state_config": False,
        "tensorboard_dir": folder / "tb",
        "checkpoint_folder": folder / "ckpt",
        "video_dir": folder / "video",
        "log_file": folder / "log",
    }
    command += [f"habitat_baselines.{name}={value}" for name, value in settings.items()] + [f"hydra.run.dir={folder}"]
    command += ["habitat.simulator.habitat_sim_v0.gpu_device_id=-1", f"~{SENSORS}.rgb_sensor"]
    command += [f"{SENSORS}.depth_sensor.{side}=128" for side in ("width", "height")] + habitat_overrides(data, scene)
    run = subprocess.run([*command, *more], check=True, env=os.environ | QUIET, capture_output=True, text=True)
    line = re.compile(r"^(\S+ \S+),(\d+) update: .*frames: (\d+)", re.M)
    return [
        (datetime.fromisoformat(day).timestamp() + int(ms) / 1000, int(frames))
        for day, ms, frames in line.findall(run.stdout + run.stderr)
    ]


def speed(marks):
    """Steps per second after the first third of the run."""
    marks = [mark for mark in marks if mark[1] >= marks[-1][1] / 3]
    return (marks[-1][1] - marks[0][1]) / (marks[-1][0] - marks[0][0])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True)
    parser.add_argument("--scene", default="rooms_s")
    parser.add_argument("--encoders", nargs="+", default=["cnn", "resnet18"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=12_000)
    parser.add_argument("--trainers", nargs="+", default=["baselines", "default", "one worker", "one worker, overlap"])
    options = parser.parse_args()
    trainers = {"baselines": (baselines, []), "default": (ours, [])}
    trainers |= {"one worker": (ours, ONE), "one worker, overlap": (ours, [*ONE, "--overlap"])}
    speeds = {}
    for round_ in range(options.rounds):
        for encoder in options.encoders:
            for name in options.trainers:
                with tempfile.TemporaryDirectory() as folder:
                    began = time.perf_counter()
                    steps = options.steps if encoder == "cnn" else options.steps // 3
                    trainer, more = trainers[name]
                    marks = trainer(encoder, steps, options.data, options.scene, Path(folder), more)
                speeds.setdefault((encoder, name), []).append(speed(marks))
                print(f"{encoder} {name}: {speed(marks):.0f} steps/s ({time.perf_counter() - began:.0f} s)", flush=True)
    for (encoder, name), values in speeds.items():
        ratios = [value / base for value, base in zip(values, speeds.get((encoder, "baselines"), values))]
        spread = f"{median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f}) times habitat-baselines"
        print(f"{encoder} {name}: {median(values):.0f} ({min(values):.0f}-{max(values):.0f}) steps/s, {spread}")
