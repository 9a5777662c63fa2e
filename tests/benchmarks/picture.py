"""Draw the README's pictures from finished runs: learning curves, and one validation episode from above.

python tests/benchmarks/picture.py RUN_FOLDER [RUN_FOLDER ...] --out notebooks/pictures/pointnav.png
python tests/benchmarks/picture.py RUN_FOLDER --curves --title "Habitat" --out notebooks/pictures/habitat.png
"""

import argparse
import sys
from dataclasses import replace
from pathlib import Path

import matplotlib
import matplotlib.pyplot as plt
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import ver_ppo  # noqa: E402

matplotlib.use("Agg")


def draw_episode(folder, seed):
    """A picture from the middle of a validation episode that this run's policy plays greedily, and the episode's result."""
    saved = ver_ppo.load_checkpoint(folder / "checkpoint.pt")
    options = replace(ver_ppo.Options(**saved["options"]), device="cpu")
    spec = ver_ppo.describe_env(options)
    policy = ver_ppo.Policy(spec, options)
    ver_ppo.load_policy(policy, saved, folder)
    env = ver_ppo.make_env(options, "val", "rgb_array")
    observation, _ = env.reset(seed=seed)
    state, action, first = torch.zeros(1, *policy.state_shape), torch.zeros(1, 1, dtype=torch.int64), torch.tensor([True])
    halfway, steps, before = int(1.0 * env.start_geodesic / ver_ppo.FORWARD_M), 0, env.render()
    with torch.inference_mode():
        while True:
            obs = {key: torch.from_numpy(part)[None] for key, part in observation.items()}
            distribution, _, state = policy.step(obs, action, first, state)
            action, first = distribution.mode, torch.tensor([False])
            observation, _, terminated, truncated, info = env.step(action.item())
            steps += 1
            if steps == halfway:
                before = env.render()
            if terminated or truncated:
                return before, info


def draw(folders, out, seed):
    """Success and SPL of all runs against steps on the left, an episode half-way through on the right."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 3.6), gridspec_kw={"width_ratios": [1, 1.35]})
    for index, folder in enumerate(folders):
        events = EventAccumulator(str(folder)).Reload()
        for tag, color in (("metrics/success", "tab:green"), ("metrics/spl", "tab:blue")):
            points = events.Scalars(tag)
            label = tag.split("/")[1] if index == 0 else None
            left.plot([p.step / 1e6 for p in points], [p.value for p in points], color=color, alpha=0.7, lw=1, label=label)
    left.set(
        xlabel="million steps",
        ylabel="last 100 training episodes",
        ylim=(0, 1),
        title=f"built-in PointNav, {len(folders)} seeds",
    )
    left.grid(alpha=0.3)
    left.legend(loc="lower right")
    picture, info = draw_episode(folders[0], seed)
    right.imshow(picture)
    right.axis("off")
    right.set_title(f"unseen floor plan: walked (blue), shortest way left (green), depth; SPL {info['spl']:.2f}", fontsize=9)
    figure.tight_layout()
    figure.savefig(out, dpi=110)


def draw_curves(folder, out, title):
    """Distance to the goal, and success and SPL, against steps."""
    figure, axes = plt.subplots(1, 2, figsize=(9, 3))
    events = EventAccumulator(str(folder)).Reload()
    for axis, names in zip(axes, (("distance_to_goal",), ("success", "spl"))):
        for name in names:
            points = events.Scalars(f"metrics/{name}")
            axis.plot([p.step / 1e6 for p in points], [p.value for p in points], lw=1.2, label=name.replace("_", " "))
        axis.set(xlabel="million steps", ylim=(0, None))
        axis.grid(alpha=0.3)
        axis.legend()
    axes[0].set(ylabel="m at the end of an episode")
    figure.suptitle(f"{title}: mean of the last 100 training episodes")
    figure.tight_layout()
    figure.savefig(out, dpi=100)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--out", required=True)
    parser.add_argument("--seed", type=int, default=12)
    parser.add_argument("--curves", action="store_true")
    parser.add_argument("--title", default="")
    arguments = parser.parse_args()
    if arguments.curves:
        draw_curves(arguments.folders[0], arguments.out, arguments.title)
    else:
        draw(arguments.folders, arguments.out, arguments.seed)
