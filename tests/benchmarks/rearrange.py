"""Chained skills, with and without a base that moves, and emergent navigation (VER section 6).

    python tests/benchmarks/rearrange.py --folder F --checkpoint FILE

Trains four skills, three seeds each, by the command in COMMAND (half an hour), and chains them:
each seed with its like, and with the same PointNav agent, the checkpoint.pt of a run of `pointnav`,
in unseen flats. What comes out is kept in notebooks/results/rearrange.json, of which all.py makes
the manual's tables and picture; what was trained already is not trained again.
"""

import argparse
import json
import shutil
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import numpy as np
from results import draw, header, keep, play, run_command, where_and_when

from notebooks.extensions import chain

COMMAND = "python ver_ppo.py --env-id notebooks.environments.rearrange:{}-v0"
COMMAND += " --target-entropy 0 --ent-coef 1e-3 --total-timesteps {}"
OF_ALL = "python tests/benchmarks/rearrange.py --folder F --checkpoint FILE"
SKILLS = "Pick", "Place", "PickArm", "PlaceArm"
FAR_M = (0.5, 1.0), (1.0, 2.0), (2.0, 3.0), (3.0, 4.0), (4.0, 6.0), (6.0, 9.0)
CHAINS = {"with base": "", "arm alone": "Arm", "with base, no Navigate": ""}
FILE = draw.RESULTS / "rearrange.json"


def train_all(args):
    """Every skill from every seed; what is there already is not trained again."""
    found = {"command": OF_ALL, "own": {}}
    if FILE.exists():
        found = json.loads(FILE.read_text())
    for seed in args.seeds:
        for skill in SKILLS:
            folder = args.folder / f"{skill}_{seed}"
            own = found["own"].setdefault(skill, {})
            if str(seed) not in own or not any(folder.glob("*/checkpoint.pt")):
                shutil.rmtree(folder, ignore_errors=True)  # of an interrupted run
                command = f"{COMMAND.format(skill, args.total_timesteps)} --seed {seed}"
                _, evaluation = run_command(command, str(folder))
                own[str(seed)] = evaluation["success"][0]
                found |= where_and_when()
                keep("rearrange", found)
                print(skill, seed, evaluation, flush=True)


def load(folder, skill, seed):
    """A trained skill."""
    policy, _ = play.load_policy(next((folder / f"{skill}_{seed}").iterdir()))
    return policy


def chains(how, seed, args):
    """The share of episodes in which all went well until the end of each stage, and the first whole
    chain."""
    draw.setup()
    policies = {}
    for name in ("pick", "place"):
        policies[name] = load(args.folder, name.capitalize() + CHAINS[how], seed)
    if "no Navigate" not in how:
        policies["navigate"], _ = play.load_policy(args.checkpoint.parent)
    well = np.zeros((args.episodes, 4 if "navigate" in policies else 2))
    whole = None
    for episode in range(args.episodes):
        env = chain.begin(episode)
        object_2 = env.object.tolist()
        place_2 = env.place.tolist()
        stages = chain.run_chain(env, policies)
        well[episode, : len(stages)] = [done for _, done, _ in stages]
        if whole is None and well[episode].all():
            paths = [[name, np.round(path, 3).tolist()] for name, _, path in stages]
            whole = {
                "boxes": np.round(env.plan.boxes_K4, 3).tolist(),
                "walls": env.plan.num_walls,
                "size": env.plan.size.tolist(),
                "object": object_2,
                "place": place_2,
                "stages": paths,
            }
    return well.mean(axis=0).tolist(), whole


def far(seed, args):
    """Success of Pick, with the base, over the distance from which it starts."""
    draw.setup()
    policy = load(args.folder, "Pick", seed)
    success = []
    for far_m in FAR_M:
        envs = (chain.begin(1000 + episode, far_m=far_m) for episode in range(args.episodes))
        success.append(float(np.mean([chain.run_skill(env, policy, "pick") for env in envs])))
    return success


def chain_all(args):
    """All chains and distances, in two processes."""
    found = json.loads(FILE.read_text())
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        jobs = {}
        for how in CHAINS:
            jobs[how] = [pool.submit(chains, how, seed, args) for seed in args.seeds]
        distances = [pool.submit(far, seed, args) for seed in args.seeds]
        found["episodes"] = args.episodes
        found["far_m"] = FAR_M
        found["far"] = [job.result() for job in distances]
        found["chains"] = {how: [job.result()[0] for job in each] for how, each in jobs.items()}
        wholes = [job.result()[1] for job in jobs["with base"]]
        found["path"] = next((whole for whole in wholes if whole), None)
    keep("rearrange", found | where_and_when())


def spread(values):
    """Mean and range."""
    return f"{np.mean(values):.2f} ({min(values):.2f}–{max(values):.2f})"


def chain_table(found):
    """Success on the skills' own task, and after every stage of the chain."""
    stages = "Navigate", "Pick", "Navigate", "Place"
    lines = header("", "Pick, own task", "Place, own task", *stages)
    for how, suffix in CHAINS.items():
        own = [spread(list(found["own"][name + suffix].values())) for name in ("Pick", "Place")]
        stages = [spread(stage) for stage in zip(*found["chains"][how])]
        if len(stages) == 2:
            own = ["", ""]  # as above
            stages = ["–", stages[0], "–", stages[1]]
        lines.append(f"| {how} | {' | '.join([*own, *stages])} |")
    return lines


def far_table(found):
    """Success of Pick over the distance from which it starts."""
    far_m = [f"{low:g}–{high:g} m" for low, high in found["far_m"]]
    lines = header("", *far_m)
    lines.append(f"| Pick with base | {' | '.join(spread(bin) for bin in zip(*found['far']))} |")
    return lines


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, required=True, help="where its runs are kept")
    parser.add_argument("--checkpoint", type=Path, required=True, help="of a run of `pointnav`")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--episodes", type=int, default=100)
    parser.add_argument("--total-timesteps", type=int, default=300_000)
    arguments = parser.parse_args()
    train_all(arguments)
    chain_all(arguments)
