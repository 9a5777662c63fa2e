"""Real simulators, as they are: how uneven their steps are, and what each sampler makes of them.

    pip install crafter==1.8.3 highway-env "gymnasium[mujoco,box2d]" ale-py opencv-python
    pip install vizdoom
    real.py --rounds 2                          4 minutes for most simulators in each round
    real.py crafter Humanoid --rounds 1         of these alone
    taskset --cpu-list 0 real.py --rounds 1     on one core
    real.py Habitat "Habitat, short episodes" --data FOLDER --rounds 2

notebooks/extensions/advise.py looks at each of them, for longer where resets take much of the time
and are rare. Nothing else may run on the machine. Rounds are added to those that the results have.

`Habitat` and `Habitat, short episodes` need a Python that has Habitat. FOLDER has the PointNav
episodes and scenes of habitat-lab's tests, or others in their place: in
datasets/pointnav/habitat-test-scenes/v1 and scene_datasets. In `Habitat`, there is no stop action,
and an episode has 100 steps. In `Habitat, short episodes`, an untrained agent stops after about
four steps.
"""

import itertools
import json
import os
import shlex
import sys
import tempfile
from pathlib import Path

import harness

ATARI = "gymnasium.wrappers:AtariPreprocessing(grayscale_newaxis=True)"
SIMULATORS = {
    "crafter": "--env-id simulators:Crafter-v0 --num-envs 16 --num-steps 64 --minutes 12",
    "highway intersection": "--env-id highway_env:intersection-v1 --num-envs 16 --num-steps 64"
    " --minutes 9",
    "Hopper": "--env-id Hopper-v5",
    "Humanoid": "--env-id Humanoid-v5",
    "CarRacing": "--env-id CarRacing-v3 --wrappers 'resize(height=48, width=48)' --num-steps 64",
    "Breakout": f"--env-id ale_py:ALE/Breakout-v5 --env-kwargs frameskip=1 --wrappers '{ATARI}'"
    " --num-steps 64",
    "ViZDoom Basic": "--env-id vizdoom.gymnasium_wrapper:VizdoomBasic-v1"
    " --wrappers 'resize(height=60, width=80)' --num-steps 64",
}
HABITAT = "--env-id pointnav --num-envs 8 --num-minibatches 2 --env-kwargs simulator=habitat"
IN_HABITAT = {
    "Habitat": f"{HABITAT} habitat.environment.max_episode_steps=100 '~habitat.task.actions.stop='",
    "Habitat, short episodes": HABITAT,
}


def look_at(name, data):
    """What advise finds of a simulator, without the single steps. It runs in a folder of its own,
    because simulators leave files in the current one. Habitat looks for its `data` there."""
    with tempfile.TemporaryDirectory() as folder:
        if data:
            Path(folder, "data").symlink_to(data)
        path = Path(folder, "found.json")
        words = [sys.executable, "-m", "notebooks.extensions.advise", "--file", str(path)]
        modules = f"{harness.HERE}{os.pathsep}{harness.ROOT}"
        # the last --minutes counts
        words += shlex.split(f"--minutes 3 {(SIMULATORS | IN_HABITAT)[name]}")
        said = harness.execute(words, checkout=folder, PYTHONPATH=modules)
        print(said, flush=True)
        found = json.loads(path.read_text())
    return {name: value for name, value in found.items() if name not in ("seconds", "resets")}


if __name__ == "__main__":
    parser = harness.command_line(__doc__)
    parser.add_argument("names", nargs="*", choices=[[], *SIMULATORS, *IN_HABITAT])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--data", type=os.path.abspath, help="Habitat: scenes and episodes")
    args = parser.parse_args()
    if IN_HABITAT.keys() & args.names and not args.data:
        parser.error("give --data")
    found = harness.kept(args, "real").get("found", {})
    for number, name in itertools.product(range(args.rounds), args.names or SIMULATORS):
        print(f"round {number + 1}: {name}", flush=True)
        looked = look_at(name, args.data)
        by_cores = found.setdefault(name, {})
        by_cores.setdefault(str(looked["cores"]), []).append(looked)
        harness.keep(args, "real", found=found)
