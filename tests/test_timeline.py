"""The page with timelines: its traces come from the shipped code, and a browser shows them."""

import collections
import html
import itertools
import json
import re
import shutil
import subprocess

import pytest

from notebooks.extensions import timeline

BROWSER = next(filter(None, map(shutil.which, ("chromium", "google-chrome", "chrome"))), None)
PAGE = json.loads(timeline.DATA.search(timeline.PAGE.read_text())[2])
MOVES = """
<script>
const shown = [];
function note() {
  for (const cell of document.querySelectorAll("td[data-number]")) {
    shown.push([key(cell.dataset.sampler), cell.dataset.number, cell.textContent]);
  }
}
function move(slider, value) {
  slider.value = value;
  slider.dispatchEvent(new Event("input"));
  note();
}
move(by("time"), 192);
const filling = by("filling").textContent;
for (const radio of document.querySelectorAll("input[type=radio]")) {
  radio.click();
  for (const slider of document.querySelectorAll("#controls input")) {
    for (let value = Number(slider.max); value >= 0; value--) move(slider, value);
  }
  for (const value of [0, 300, 1000]) move(by("time"), value);
}
by("play").click();
const playing = by("play").textContent;
by("play").click();
const bars = document.querySelectorAll("#picture rect").length;
const result = { shown, filling, playing, paused: by("play").textContent, bars };
make("pre", { id: "result" }, document.body, JSON.stringify(result));
</script>
"""


def test_traces_come_from_the_shipped_code(monkeypatch):
    """The page has a trace for every combination of the settings. One in five is made again, and is
    the same as on the page. The command writes the page in this form."""
    settings = list(itertools.product(*timeline.SETTINGS.values()))
    stored = dict(zip(settings, PAGE["traces"].values(), strict=True))
    for setting in settings[::5]:
        assert timeline.trace(*setting) == stored[setting]
    monkeypatch.setattr(timeline, "trace", lambda *setting: stored[setting])
    assert timeline.write() == timeline.PAGE.read_text()


@pytest.mark.parametrize("sampler", timeline.SETTINGS["sampler"])
def test_traces(sampler):
    """Each of the three rollouts has T x N steps. No environment makes two steps at once. `sync`
    and `nover` take T steps of each environment, all from the newest policy. With `ver`, at most
    one step of each environment in a rollout is older."""
    for name, trace in PAGE["traces"].items():
        own, *_, num_envs, num_steps = name.split()
        if own != sampler:
            continue
        given = collections.Counter()
        older = collections.Counter()
        for e, lane in enumerate(trace["lanes"]):
            for step, (begin, sec, rollout, age) in enumerate(lane):
                assert step == 0 or begin >= sum(lane[step - 1][:2])
                given[rollout, e] += 1
                older[rollout, e] += age > 0
                for number, (learns_at, _) in enumerate(trace["learner"]):
                    if begin < learns_at < begin + sec and own != "async":
                        assert rollout != number  # a hatched step goes to a later rollout
        for rollout in range(timeline.UPDATES):
            counts = [given[rollout, e] for e in range(int(num_envs))]
            assert sum(counts) == int(num_envs) * int(num_steps)
            if sampler in ("sync", "nover"):
                assert set(counts) == {int(num_steps)}
            if sampler != "async":
                most = 1 if sampler == "ver" else 0
                assert max(older[rollout, e] for e in range(int(num_envs))) <= most


@pytest.mark.skipif(not BROWSER, reason="there is no Chromium")
def test_in_a_browser(tmp_path):
    """Every control is moved, and the page shows the stored numbers. At second 9, the policy
    learns: answers that have come since second 7 count afterwards."""
    copy = tmp_path / "timeline.html"
    copy.write_text(timeline.PAGE.read_text() + MOVES)
    words = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom"]
    words += [f"--user-data-dir={tmp_path / 'profile'}", copy.as_uri()]
    page = subprocess.run(words, capture_output=True, text=True, timeout=120).stdout
    result = json.loads(html.unescape(re.search(r'<pre id="result">(.*?)</pre>', page)[1]))
    assert (result["playing"], result["paused"]) == ("Pause", "Play")
    assert result["bars"] > 20
    assert result["filling"].startswith("Rollout 2: 0 of 32 steps")
    assert {name.split()[0] for name, _, _ in result["shown"]} == set(timeline.SETTINGS["sampler"])
    assert len({name for name, _, _ in result["shown"]}) >= 4 * 8
    for name, number, words in result["shown"]:
        stored = PAGE["traces"][name]["numbers"][number]
        percent = f"{100 * stored:.0f} %"
        assert words == (percent if number == "waiting" else f"{stored:.2f}")
