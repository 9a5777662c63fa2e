"""Make the traces that timeline.html plays. The shipped collection code runs under the virtual
clock with every combination of the settings below.

    python -m notebooks.extensions.timeline     writes the traces into notebooks/timeline.html
"""

import itertools
import json
import re
from pathlib import Path

import numpy as np

from notebooks.extensions.virtual_clock import run, step_times
from ver_ppo import importance_weights

PAGE = Path(__file__).parents[1] / "timeline.html"
DATA = re.compile(
    r'(<script id="traces" type="application/json">\n)(.*?)(\n</script>)', re.DOTALL
)
UNIT_SEC = 0.05  # unit of all times in a trace
SETTINGS = {
    "sampler": ["sync", "nover", "ver", "async"],
    "between": [0.0, 0.4, 0.8],  # log-normal spread (sigma) of step times between environments
    "within": [0.0, 0.4, 0.8],  # and within an environment
    "learning": [1, 4],  # seconds
    "envs": [4, 8],
    "steps": [4, 8],
}
UPDATES = 3
INFERENCE_SEC = 0.05  # of a batch


def trace(sampler, between, within, learning, envs, steps):
    """Collect three rollouts with these settings, and return their trace.

    Each environment has a list of steps, [begin, length, rollout, age]. Times are in units of
    UNIT_SEC. `rollout` is the rollout that contains the step (-1: none of the three). `age` is the
    number of updates between the step's action and that rollout. The trace also has the learning
    phases. Its four numbers are those of two whole cycles, from the beginning of the first update
    to the beginning of the third.
    """
    seconds_NK = step_times(envs, between, within, num_steps=200)
    learned_from = {}  # (environment, step) -> (rollout, age)
    weights = []

    def note(rollout):
        number = len(weights)
        weights.append(importance_weights(rollout["segment"], envs).sum())
        for e, reward, version in zip(rollout["env"], rollout["reward"], rollout["version"]):
            step = round(1000 * (float(reward) - int(e)))  # `virtual_clock.reward_of`
            learned_from[int(e), step] = number, number - int(version)

    costs = {"inference_sec": INFERENCE_SEC, "learning_sec": learning}
    how = sampler, lambda e, k: seconds_NK[e, k], envs, steps, UPDATES
    _, ended_sec, spans, phases = run(*how, **costs, learn=note)
    from_sec = phases[0][0]
    to_sec = phases[-1][0]
    lanes = [[] for _ in range(envs)]
    busy_sec = 0.0
    for e, begin_sec, sec in spans:
        if begin_sec < ended_sec:
            number, age = learned_from.get((e, len(lanes[e])), (-1, 0))
            begin = round(begin_sec / UNIT_SEC)
            end = round((begin_sec + sec) / UNIT_SEC)
            lanes[e].append([begin, end - begin, number, age])
            busy_sec += max(0.0, min(begin_sec + sec, to_sec) - max(begin_sec, from_sec))
    numbers = {
        "steps_per_sec": (UPDATES - 1) * envs * steps / (to_sec - from_sec),
        "weighted_per_sec": sum(weights[1:]) / (to_sec - from_sec),
        "waiting": 1 - busy_sec / (envs * (to_sec - from_sec)),
        "age": np.mean([age for number, age in learned_from.values() if number]),
    }
    return {
        "lanes": lanes,
        "learner": [[round(begin / UNIT_SEC), round(sec / UNIT_SEC)] for begin, sec in phases],
        "numbers": {name: round(float(value), 2) for name, value in numbers.items()},
    }


def traces():
    """All of them, by their settings as text, as in "ver 0.4 0.8 1 4 8"."""
    found = {}
    for setting in itertools.product(*SETTINGS.values()):
        found[" ".join(map(str, setting))] = trace(*setting)
    return found


def data():
    """The page's data as JSON, one line for each trace."""
    lines = [f"{json.dumps(key)}: {compact(one)}" for key, one in traces().items()]
    settings = json.dumps({"settings": SETTINGS, "unit_sec": UNIT_SEC})
    return f'{settings[:-1]}, "traces": {{\n' + ",\n".join(lines) + "\n}}"


def compact(value):
    """JSON without spaces."""
    return json.dumps(value, separators=(",", ":"))


def write():
    """The text of the page, with new data."""
    return DATA.sub(lambda found: found[1] + data() + found[3], PAGE.read_text())


if __name__ == "__main__":
    PAGE.write_text(write())
