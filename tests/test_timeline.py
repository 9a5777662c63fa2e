"""The page with timelines computes what the shipped code does, and a browser shows it."""

import html
import itertools
import json
import re
import shutil
import subprocess

import numpy as np
import pytest

import ver_ppo
from notebooks.extensions.advise import Machine
from notebooks.extensions.virtual_clock import IdlePolicy, build, run, step_times
from tests.helpers import ROOT
from ver_ppo import importance_weights

PAGE = (ROOT / "notebooks" / "timeline.html").read_text()
RULES = re.search(r'<script id="rules">(.*?)</script>', PAGE, re.DOTALL)[1]
BROWSER = next(filter(None, map(shutil.which, ("chromium", "google-chrome", "chrome"))), None)
SAMPLERS = "sync", "nover", "ver", "async"
UPDATES = 3
MOVES = """
<script>
const shown = [];
function note() {
  for (const cell of document.querySelectorAll("td[data-number]")) {
    const { sampler, number } = cell.dataset;
    shown.push([share(traces[sampler].numbers[number], number), cell.textContent]);
  }
}
function move(slider, value) {
  slider.value = value;
  slider.dispatchEvent(new Event("input"));
  note();
}
const filling = by("filling").textContent;
for (const radio of document.querySelectorAll("input[type=radio]")) {
  radio.click();
  for (const value of [0, 300, 1000]) move(by("time"), value);
}
for (const slider of document.querySelectorAll("#controls input")) {
  for (const value of [slider.max, slider.min]) move(slider, value);
}
for (const kind of KINDS) {
  by("kind").value = kind;
  by("kind").dispatchEvent(new Event("change"));
  note();
}
move(by("envs"), 4);
move(by("steps"), 8);
by("kind").value = KINDS[0];
by("kind").dispatchEvent(new Event("change"));
document.querySelector("#bars rect[stroke]").dispatchEvent(new Event("click"));
by("play").click();
const playing = by("play").textContent;
by("play").click();
const bars = document.querySelectorAll("#picture rect").length;
const step = by("step").textContent;
const result = { shown, filling, playing, paused: by("play").textContent, bars, step };
make("pre", { id: "result" }, document.body, JSON.stringify(result));
</script>
"""


@pytest.fixture(scope="module")
def call():
    """Call a function of the page's rules."""
    mini_racer = pytest.importorskip("py_mini_racer", reason="mini-racer is not installed")
    context = mini_racer.MiniRacer()
    context.eval(RULES)

    def call(name, *args):
        words = ", ".join(map(json.dumps, args))
        return json.loads(context.eval(f"JSON.stringify({name}({words}))"))

    return call


def of_the_code(sampler, seconds_NK, num_steps, inference_sec, learning_sec):
    """What the shipped code does with these step times: [begin, seconds, rollout, age] of the steps
    of each environment, the learning phases, and the page's numbers."""
    num_envs = len(seconds_NK)
    learned_from = {}  # (environment, step) -> (rollout, age)
    weights = []

    def note(rollout):
        number = len(weights)
        weights.append(importance_weights(rollout["segment"], num_envs).sum())
        for e, reward, version in zip(rollout["env"], rollout["reward"], rollout["version"]):
            step = round(1000 * (float(reward) - int(e)))  # `virtual_clock.reward_of`
            learned_from[int(e), step] = number, number - int(version)

    costs = {"inference_sec": inference_sec, "learning_sec": learning_sec}
    how = sampler, lambda e, k: seconds_NK[e, k], num_envs, num_steps, UPDATES
    _, ended_sec, spans, phases = run(*how, **costs, learn=note)
    from_sec = phases[0][0]
    to_sec = phases[-1][0]
    lanes = [[] for _ in range(num_envs)]
    busy_sec = 0.0
    for e, begin_sec, sec in spans:
        if begin_sec < ended_sec:
            lanes[e].append([begin_sec, sec, *learned_from.get((e, len(lanes[e])), (-1, 0))])
            busy_sec += max(0.0, min(begin_sec + sec, to_sec) - max(begin_sec, from_sec))
    numbers = {
        "steps_per_sec": (UPDATES - 1) * num_envs * num_steps / (to_sec - from_sec),
        "weighted_per_sec": sum(weights[1:]) / (to_sec - from_sec),
        "waiting": 1 - busy_sec / (num_envs * (to_sec - from_sec)),
        "age": np.mean([age for number, age in learned_from.values() if number]),
    }
    return lanes, phases, numbers


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_the_page_computes_what_the_code_does(call, sampler):
    """Every step begins at the same moment, with the same policy, and goes to the same rollout."""
    spreads = (0.0, 0.4, 0.8)
    settings = itertools.product(spreads, spreads, (1, 4), (4, 8), (4, 8))
    for between, within, learning_sec, num_envs, num_steps in settings:
        seconds_NK = step_times(num_envs, between, within, num_steps=200)
        lanes, phases, numbers = of_the_code(sampler, seconds_NK, num_steps, 0.05, learning_sec)
        how = {"sampler": sampler, "seconds": seconds_NK.tolist(), "steps": num_steps}
        how |= {"inference": 0.05, "learning": learning_sec, "workers": num_envs}
        found = call("simulate", how)
        assert numbers == pytest.approx(found["numbers"], rel=1e-6)  # weights are float32
        assert np.ravel(found["learner"]) == pytest.approx(np.ravel(phases), abs=1e-9)
        for own, lane in zip(found["lanes"], lanes, strict=True):
            rows = [[step[name] for name in ("begin", "sec", "rollout", "age")] for step in own]
            assert np.ravel(rows) == pytest.approx(np.ravel(lane), abs=1e-9)


@pytest.mark.parametrize("sampler", ["sync", "nover", "ver"])
def test_environments_share_workers(call, monkeypatch, sampler):
    """As in the computation of advise.py, on a machine with a core for everything. But the page's
    workers send each answer at once."""
    monkeypatch.setattr(ver_ppo, "is_due", lambda *_: True)
    seconds_NK = step_times(6, 0.4, 0.6, num_steps=200)
    machine = Machine(6, 2, 99, lambda e, k: seconds_NK[e, k], 1.0, 0.05, 0.0)
    _, rollout, collector = build(machine, 6, 8, IdlePolicy, sampler)
    ended_at = []
    for _ in range(UPDATES):
        collector.collect(rollout)
        ended_at.append(machine.now)
        machine.work(3.0)
    how = {"sampler": sampler, "seconds": seconds_NK.tolist(), "steps": 8, "workers": 2}
    found = call("simulate", how | {"inference": 0.05, "learning": 3})
    assert [begin for begin, _ in found["learner"]] == pytest.approx(ended_at, rel=0.03)


def test_step_times(call):
    """The environments' mean is exactly 1 s. More environments leave the others' times as they
    are, up to this unit."""
    kinds = "log-normal times", "a long reset now and then", "one slow environment"
    for kind in kinds:
        for between, spread in ((0, 0), (0.4, 0.8), (1.2, 1.5)):
            how = {"kind": kind, "between": between, "spread": spread}
            four, nine = (call("stepTimes", how | {"envs": envs}) for envs in (4, 9))
            for times in (four, nine):
                assert np.mean(times["seconds"]) == pytest.approx(1)
            np.testing.assert_allclose(
                np.multiply(four["seconds"], four["unit"]),
                np.multiply(nine["seconds"][:4], nine["unit"]),
            )
    plain = call("stepTimes", {"kind": kinds[0], "between": 0, "spread": 0.8, "envs": 16})
    logs = np.log(plain["seconds"])
    assert logs.std() == pytest.approx(0.8, rel=0.03)
    assert abs(logs.mean(axis=1) - logs.mean()).max() < 0.15
    resets = np.array(call("stepTimes", {"kind": kinds[1], "envs": 16})["seconds"]) > 10
    assert resets.mean() == pytest.approx(1 / 150, rel=0.3)


def test_lock_step_suffers_most_from_unequal_environments(call):
    """With more spread, lock-step makes fewer steps, and `ver` does not."""
    for draw in range(1, 6):
        rates = {"sync": [], "ver": []}
        for between in (0, 0.4, 0.8, 1.2):
            how = {"kind": "log-normal times", "between": between, "spread": 0, "draw": draw}
            seconds = call("stepTimes", how | {"envs": 4})["seconds"]
            run_with = {"seconds": seconds, "steps": 8, "inference": 0.05, "learning": 4}
            for sampler, found in rates.items():
                trace = call("simulate", run_with | {"sampler": sampler, "workers": 4})
                found.append(trace["numbers"]["steps_per_sec"])
        assert (np.diff(rates["sync"]) < 0).all()
        assert rates["ver"][-1] > 1.5 * rates["sync"][-1]


def test_files(call, tmp_path):
    """Step times come from a run's trace, in order of time, and from advise.py."""
    events = [
        {"name": "step", "pid": "environment 1", "ts": 2000, "dur": 500},
        {"name": "step", "pid": "environment 0", "ts": 0, "dur": 1000},
        {"name": "batch of 2", "pid": "inference", "ts": 0, "dur": 7},
        {"name": "step", "pid": "environment 1", "ts": 1000, "dur": 250},
    ]
    own = call("readTimes", json.dumps(events))
    assert sorted(own) == [[0.00025, 0.0005], [0.001]]
    assert call("readTimes", json.dumps({"seconds": [[1, 2], [3]], "costs": {}})) == [[1, 2], [3]]
    how = {"kind": "your own", "own": own, "envs": 5, "between": 0, "spread": 0}
    times = call("stepTimes", how)
    assert len(times["seconds"]) == 5
    assert np.mean([np.mean(lane) for lane in times["seconds"]]) == pytest.approx(1)


@pytest.mark.skipif(not BROWSER, reason="there is no Chromium")
def test_in_a_browser(tmp_path):
    """Every control is moved, and the page shows the computed numbers. It opens while the policy
    learns from the first rollout, and tells about a step."""
    copy = tmp_path / "timeline.html"
    copy.write_text(PAGE + MOVES)
    words = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom"]
    words += [f"--user-data-dir={tmp_path / 'profile'}", copy.as_uri()]
    page = subprocess.run(words, capture_output=True, text=True, timeout=120).stdout
    result = json.loads(html.unescape(re.search(r'<pre id="result">(.*?)</pre>', page)[1]))
    assert (result["playing"], result["paused"]) == ("Pause", "Play")
    assert result["bars"] > 20
    assert result["filling"].startswith("Rollout 1: 32 of 32 steps, the learner learns from it")
    assert result["step"].startswith("Environment 0, step 1,")
    assert len(result["shown"]) > 300
    assert all(number == words for number, words in result["shown"])
