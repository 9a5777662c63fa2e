"""Draw what a run learned, from its TensorBoard events: the distance to the goal, and success and
SPL, against steps.

    python tests/benchmarks/picture.py RUN_FOLDER --title Habitat --out habitat.png
"""

import argparse

import matplotlib
import matplotlib.pyplot as plt
from results import draw
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator


def draw_curves(folder, out, title):
    """Distance to the goal, and success and SPL, against steps."""
    figure, axes = plt.subplots(1, 2, figsize=(9, 3))
    events = EventAccumulator(folder).Reload()
    for axis, names in zip(axes, (("distance_to_goal",), ("success", "spl"))):
        for line, name in zip(draw.LINES, names):
            points = events.Scalars(f"metrics/{name}")
            steps = [point.step / 1e6 for point in points]
            values = [point.value for point in points]
            axis.plot(steps, values, linestyle=line, lw=1.2, label=draw.in_words(name))
        axis.set(xlabel="million steps", ylim=(0, None))
        axis.legend(frameon=False)
    axes[0].set(ylabel="m at the end of an episode")
    figure.suptitle(f"{title}: mean of the last 100 training episodes")
    figure.tight_layout()
    figure.savefig(out, dpi=100)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder")
    parser.add_argument("--out", required=True)
    parser.add_argument("--title", default="")
    arguments = parser.parse_args()
    matplotlib.use("Agg")
    draw.setup()
    draw_curves(arguments.folder, arguments.out, arguments.title)
