"""Training speed in Habitat, beside habitat-baselines' own VER trainer: same scene, sizes and
settings, in turns.

    python tests/benchmarks/throughput_habitat.py --data FOLDER --scene rooms_s --rounds 3

Needs habitat-sim, habitat-lab and habitat-baselines in this Python, and a folder with
datasets/pointnav/SCENE/v1 and scene_datasets. 4 environments, 128 x 128 depth, T = 32, 2 epochs of
2 mini-batches, hidden size 512, on the CPU. The agents have no stop action, and every episode takes
EPISODE_STEPS: else untrained ones stop after two to four steps, and a reset takes as long as four
steps. Speed is steps per second of wall time between a third of the run and its end, learning
included. Prints one line for each run, then medians and ranges. Run by hand.
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
sys.path.insert(0, str(ROOT))
from notebooks.environments.habitat import QUIET, override_lines  # noqa: E402

SENSORS = "habitat.simulator.agents.main_agent.sim_sensors"
POLICIES = {"cnn": "PointNavBaselinePolicy", "resnet18": "PointNavResNetPolicy"}
EPISODE_STEPS = 100
ENVIRONMENT = os.environ | QUIET | {"OMP_NUM_THREADS": "1"}


def task_settings(data, scene):
    """Where the data are, and how long an episode takes: keys and values of habitat-lab's
    configuration."""
    path = f"{data}/datasets/pointnav/{scene}/v1/{{split}}/{{split}}.json.gz"
    scenes = f"{data}/scene_datasets"
    return {
        "habitat.dataset.data_path": path,
        "habitat.dataset.scenes_dir": scenes,
        "habitat.environment.max_episode_steps": EPISODE_STEPS,
        "~habitat.task.actions.stop": "",  # taken away
    }


def ours(encoder, steps, data, scene, folder, more):
    """Run ver_ppo.py. Returns (time, steps so far) from the end of each update."""
    arguments = f"--env-id pointnav --encoder {encoder} --device cpu --num-envs 4 --num-steps 32"
    arguments += f" --hidden-size 512 --num-minibatches 2 --total-timesteps {steps}"
    arguments += " --eval-episodes 0"
    command = [sys.executable, str(ROOT / "ver_ppo.py"), *arguments.split(), *more]
    command += ["--runs-dir", str(folder), "--env-kwargs", "simulator=habitat", "image_size=128"]
    command += [f"{key}={value}" for key, value in task_settings(data, scene).items()]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    subprocess.run(command, check=True, env=ENVIRONMENT, **quiet)
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (run,) = folder.iterdir()
    updates = EventAccumulator(str(run)).Reload().Scalars("charts/learning_rate")
    return [(update.wall_time, update.step) for update in updates]


def baselines(encoder, steps, data, scene, folder, more):
    """Run habitat-baselines' VER trainer. Returns the same, from the lines that it logs every ten
    updates."""
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
    settings = {f"habitat_baselines.{name}": value for name, value in settings.items()}
    settings["hydra.run.dir"] = folder
    settings["habitat.simulator.habitat_sim_v0.gpu_device_id"] = -1
    for side in ("width", "height"):
        settings[f"{SENSORS}.depth_sensor.{side}"] = 128
    settings[f"~{SENSORS}.rgb_sensor"] = ""
    settings |= task_settings(data, scene)
    command = [sys.executable, "-u", "-m", "habitat_baselines.run"]
    command += ["--config-name=pointnav/ppo_pointnav_example.yaml", *override_lines(settings)]
    pipes = {"capture_output": True, "text": True}
    run = subprocess.run([*command, *more], check=True, env=ENVIRONMENT, **pipes)
    line = re.compile(r"^(\S+ \S+),(\d+) update: .*frames: (\d+)", re.M)
    marks = []
    for day, ms, frames in line.findall(run.stdout + run.stderr):
        marks.append((datetime.fromisoformat(day).timestamp() + int(ms) / 1000, int(frames)))
    return marks


def speed(marks):
    """Steps per second after the first third of the run."""
    _, last_step = marks[-1]
    marks = [(at, step) for at, step in marks if step >= last_step / 3]
    (began_at, first), *_, (ended_at, last) = marks
    return (last - first) / (ended_at - began_at)


TRAINERS = {
    "baselines": (baselines, []),
    "default": (ours, []),
    "one worker": (ours, ["--num-workers", "1"]),
    "no-overlap": (ours, ["--no-overlap"]),
}


def measure(encoder, name, options):
    """Steps per second of one run."""
    trainer, more = TRAINERS[name]
    steps = options.steps if encoder == "cnn" else options.steps // 3
    began_at = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        marks = trainer(encoder, steps, options.data, options.scene, Path(folder), more)
    sec = time.perf_counter() - began_at
    print(f"{encoder} {name}: {speed(marks):.0f} steps/s ({sec:.0f} s)", flush=True)
    return speed(marks)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", required=True)
    parser.add_argument("--scene", default="rooms_s")
    parser.add_argument("--encoders", nargs="+", choices=POLICIES, default=list(POLICIES))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=12_000)
    parser.add_argument("--trainers", nargs="+", choices=TRAINERS, default=list(TRAINERS))
    options = parser.parse_args()
    speeds = {}
    for _ in range(options.rounds):
        for encoder in options.encoders:
            for name in options.trainers:
                speeds.setdefault((encoder, name), []).append(measure(encoder, name, options))
    for (encoder, name), values in speeds.items():
        theirs = speeds.get((encoder, "baselines"), values)
        ratios = [value / base for value, base in zip(values, theirs)]
        rate = f"{median(values):.0f} ({min(values):.0f}-{max(values):.0f}) steps/s"
        spread = f"{median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})"
        print(f"{encoder} {name}: {rate}, {spread} times habitat-baselines")
