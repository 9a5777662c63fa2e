"""Make the tables of README.md and of the manual, and their pictures, from notebooks/results, so
that none of these figures is typed. Takes seconds.

    tables.py                          writes the text between <!-- results: NAME --> and
                                       <!-- end of results -->, and the line numbers in links to
                                       functions; draws the pictures
    tables.py --check                  writes nothing, and tells whether the tables are up to date
    tables.py show NAME                prints one table: parts, weights, minutes, ...
    tables.py film RUN_FOLDER          draws agent.gif, with a trained PointNav agent
"""

import ast
import functools
import inspect
import itertools
import re
import sys
import textwrap

import harness
import learn
import matplotlib
import matplotlib.pyplot as plt
import numpy as np
import speed
import studies
from harness import COMPARED, ROOT, SAMPLERS, spread, ver_ppo
from PIL import Image

from notebooks import draw
from notebooks.extensions import play

PAGES = [ROOT / "README.md", ROOT / "tests" / "README.md"]
PAGES += [
    ROOT / "notebooks" / f"{name}.md" for name in ("MANUAL", "MEASURED", "HABITAT", "DETAILS")
]
LINK = re.compile(r"\[`([\w.]+)`\]\(([\w/.]+\.py)#L\d+\)")
MARKS = re.compile(r"(<!-- results: ([\w-]+) -->\n).*?(<!-- end of results -->)", re.DOTALL)
PICTURES = ROOT / "notebooks" / "pictures"


def table(head, rows):
    """The lines of a table with these cells."""
    lines = [f"| {' | '.join(cells)} |" for cells in (head, *rows)]
    return [lines[0], "|---" * len(head) + "|", *lines[1:]]


def in_code(names):
    """Format each of these names as code."""
    return [f"`{name}`" for name in names]


def mean_and_range(values, digits, to="–"):
    """Mean, lowest and highest, as text."""
    numbers = np.mean(values), min(values), max(values)
    mean, low, high = (f"{number:,.{digits}f}".replace("-", "−") for number in numbers)
    return f"{mean} ({low}{to}{high})"


# ------------------------------------------------------------------------------- What was learned


def found_cells(task, names):
    """Two cells: the number of seeds, and the mean and range of the evaluations' numbers with these
    names."""
    runs = draw.load_result(task)["runs"]
    cells = []
    for name in names:
        values = [run["evaluation"][name][0] for run in runs]
        words = mean_and_range(values, 0 if abs(values[0]) > 20 else 3, " to ")
        cells.append(f"{draw.in_words(name)} {words}")
    return str(len(runs)), ", ".join(cells)


IN_README = "pointnav", "pointnav-blind", "cartpole", "lunarlander", "hopper", "doorkey", "memory"


def measured_at(tasks):
    """Commit, date and machine of each row of a table, as a sentence."""
    rows = {}
    for row, task in enumerate(tasks, 1):
        kept = draw.load_result(task)
        where = f"commit {kept['commit']}, {kept['date']}, {kept['machine']}"
        rows.setdefault(where, []).append(str(row))
    if len(rows) == 1:
        return f"Measured at {where}."
    words = []
    for where, numbers in rows.items():
        words.append(f"row{'s' * (len(numbers) > 1)} {', '.join(numbers)} at {where}")
    return f"Measured: {'; '.join(words)}."


def tasks_table(names):
    """What was learned of these tasks."""
    rows = []
    for name in names:
        task = learn.TASKS[name]
        shown = ["success", "spl"] if task.env_id == "pointnav" else ["return"]
        rows.append([task.described, *found_cells(name, shown)])
    return table(["task", "seeds", "evaluation: mean (lowest to highest)"], rows)


def readme_table():
    """The README's table."""
    here = "[these commands](notebooks/MEASURED.md#what-the-defaults-learn)"
    footer = f"200 episodes for each seed, by {here}, which have six more tasks."
    return [*tasks_table(IN_README), "", footer]


DEFAULT_STEPS = " --total-timesteps 2000000"  # need not be given


def commands():
    """The commands of these tables."""
    lines = []
    for name, task in learn.TASKS.items():
        command = f"python ver_ppo.py {task.arguments}".replace(DEFAULT_STEPS, "")
        if name in learn.PACKAGES:
            command += f"  # not run by the tests: pip install '{learn.PACKAGES[name]}'"
        lines.append(f"    {command}")
    return lines


def published_table():
    """Published results beside ours, except those of POPGym and of the tasks in other tables."""
    rows = []
    for name, task in learn.PUBLISHED.items():
        if name not in learn.TASKS and not task.env_id.startswith(learn.POPGYM):
            _, cells = found_cells(name, ["return"])
            rows.append([task.described, cells.removeprefix("return "), task.published])
    return table(["task, steps", "evaluation", "published"], rows)


def minutes_table(kept):
    """For both kinds of simulators and every sampler: speed, and minutes and steps to a success of
    0.8. Mean and range of the seeds."""
    rows = []
    for how, samplers in kept["found"].items():
        for sampler, runs in samplers.items():
            cells = [mean_and_range([run["steps"][-1] / run["seconds"][-1] for run in runs], 0)]
            for over, unit, digits in (("seconds", 60, 1), ("steps", 1000, 0)):
                curves = [(run[over], run["metrics/success"]) for run in runs]
                reached = [draw.first_reached(*curve, 0.8) / unit for curve in curves]
                cells.append(mean_and_range(reached, digits))
            rows.append([how, f"`{sampler}`", *cells])
    heads = ["minutes to 0.8", "thousand steps to 0.8"]
    return table(["simulators", "", "steps/s", *heads], rows)


def starts_table(kept):
    """Seconds to each success."""
    rows = []
    for how, runs in kept["found"].items():
        cells = [mean_and_range([run[str(least)] for run in runs], 0) for least in learn.SUCCESSES]
        rows.append([how, *cells])
    return table(["", *(f"to success {least}" for least in learn.SUCCESSES)], rows)


# --------------------------------------------------------------------------------- Parts, weights


def with_error(values, digits=2, sign=""):
    """Mean and standard error of numbers, as text."""
    words = f"{np.mean(values):{sign}.{digits}f}"
    if len(values) > 1:
        words += f" ± {np.std(values, ddof=1) / len(values) ** 0.5:.{digits}f}"
    return words.replace("-", "−")


def numbers_of(runs, task):
    """The results of these runs, by seed: the evaluation, the mean of the training curve, and the
    simulated minutes."""
    name, tag = task.measure
    found = {}
    for run in runs:
        numbers = run["evaluation"][name][0], mean_of_curve(run, tag), run["minutes"]
        found[run["seed"]] = np.array(numbers)
    return found


def mean_of_curve(run, tag):
    """The mean of a training curve over its steps."""
    steps, values = run["curves"][tag]
    return np.trapezoid(values, steps) / (steps[-1] - steps[0])


def compared(full, without, digits):
    """Two cells and the number of seeds: the evaluation and the training curve, full and without,
    with their difference. Only seeds count that both have, because the differences of the same seed
    vary less."""
    seeds = sorted(full.keys() & without.keys())
    cells = []
    for index in range(2):
        pairs = np.array([[full[seed][index], without[seed][index]] for seed in seeds])
        before, after = pairs.mean(axis=0)
        difference = with_error(pairs[:, 1] - pairs[:, 0], digits, "+")
        cells.append(f"{before:.{digits}f} → {after:.{digits}f} ({difference})")
    return cells, len(seeds)


def with_and_without(kept, name, key):
    """The results of the full method and of the method without a part in a task, each by seed."""
    full = studies.CRASHING if studies.PARTS[key].crashes else "full"
    runs = kept["found"][name]
    return [numbers_of(runs[variant], studies.TASKS[name]) for variant in (full, key)]


def parts_table(small, pointnav):
    """What the full method and the method without each part have learned, in the part's small task
    and in PointNav, beside what was expected."""
    rows = []
    for key, part in studies.PARTS.items():
        full, without = with_and_without(small, part.small, key)
        cells, seeds = compared(full, without, 0 if part.small == "pole" else 3)
        minutes = [np.mean([found[2] for found in both.values()]) for both in (full, without)]
        full, without = with_and_without(pointnav, "pointnav", key)
        change = [without[seed][0] - full[seed][0] for seed in sorted(full.keys() & without.keys())]
        what = [part.part, part.without, studies.TASKS[part.small].words, str(seeds)]
        times = f"{minutes[1] / minutes[0]:.2f}"
        here, there = part.expected
        rows.append([*what, *cells, times, here, with_error(np.array(change), 3, "+"), there])
    head = ["part", "in its place", "small task", "seeds", "evaluation", "training curve"]
    head += ["minutes: ratio", "expected"]
    head += ["PointNav: difference in success, five seeds", "expected in PointNav"]
    return [*table(head, rows), "", measured_at(["parts"])]


DETAILS_OF_PARTS = {  # words or links of DETAILS.md
    "lost": "lost steps teach nothing",
    "truncation": "truncated episodes ([not only VER's](#not-only-vers))",
    "carried-recomputed": "[5](#carried-log-probability)",
    "idle": "[7](#idle)",
    "bootstrap": "[8](#bootstrap-state)",
    "states": "[12](#cut-state)",
    "minibatches": "equal mini-batches ([12](#cut-state))",
    "shuffling": "[13](#shuffle)",
    "weights": "[16](#weights)",
}


def worth_table(small, pointnav):
    """What training loses without each part, in its small task and in PointNav. First the part of
    which it loses the largest share."""
    rows = {}
    for key, detail in DETAILS_OF_PARTS.items():
        part = studies.PARTS[key]
        digits = 0 if part.small == "pole" else 2
        cells = []
        for kept, name, places in ((small, part.small, digits), (pointnav, "pointnav", 2)):
            full, without = with_and_without(kept, name, key)
            pairs = np.array([(full[s][0], without[s][0]) for s in full.keys() & without.keys()])
            cells.append((pairs[:, 0].mean(), with_error(pairs[:, 1] - pairs[:, 0], places, "+")))
            if name == part.small:
                share = (pairs[:, 0] - pairs[:, 1]).mean() / pairs[:, 0].mean()
        (before, here), (_, there) = cells
        task = f"{studies.TASKS[part.small].words}: {before:.{digits}f}"
        rows[share, key] = [detail, part.without, task, here, there]
    head = ["detail", "without it", "small task: result with it"]
    head += ["difference", "difference in PointNav"]
    return table(head, [rows[key] for key in sorted(rows, reverse=True)])


def weights_table(kept):
    """The success of all variants in all settings, in both kinds of environments, beside what was
    expected. Differences are those to `ver`; not of the training curve if the sampler differs,
    because the share of easy episodes in it does, too."""
    rows = []
    for name, setting in itertools.product(studies.KINDS, studies.SETTINGS):
        group = f"{name}, {setting}"
        variants = kept["found"].get(group, {})
        expected = studies.EXPECTED[setting]
        full = by_kind(variants.get("ver", []))
        for variant, (options, _) in studies.WEIGHTS.items():
            if variant not in variants:
                continue
            runs = variants[variant]
            found = by_kind(runs)
            seeds = sorted(found.keys() & full.keys())
            pairs = np.array([found[seed] - full[seed] for seed in seeds])
            numbers = np.array([*found.values()])
            cells = [with_error(numbers[:, index]) for index in range(3)]
            differs = ["", ""]
            if seeds and variant != "ver":
                differs = [with_error(pairs[:, index], 3, "+") for index in (0, 3)]
            if "--sampler" in options:
                differs[1] = ""
            weight = np.mean([np.mean(run["curves"]["ver/importance_weight"][1]) for run in runs])
            minutes = np.mean([run["minutes"] for run in runs])
            own = [str(len(runs)), *cells, *differs, f"{weight:.2f}", f"{minutes:.1f}"]
            rows.append([group, variant, *own, expected])
            expected = ""
    head = ["environments", "", "seeds", "success", "in the easy kind", "in the hard kind"]
    head += ["difference", "of the training curve", "mean weight", "minutes", "expected"]
    rows = table(head, rows)
    return [*rows, "", measured_at(["weights"])]


def by_kind(runs):
    """Success by seed: of all episodes of the evaluation, of each kind, and of the training."""
    found = {}
    for run in runs:
        success, easy, hard = (run["evaluation"][name][0] for name in ("success", "easy", "hard"))
        curve = mean_of_curve(run, "metrics/success")
        found[run["seed"]] = np.array([success, 2 * easy, 2 * hard, curve])
    return found


# ------------------------------------------------------------------------------------------ Speed


def samplers_table(kept):
    """Steps per second in lock-step, and the other samplers as multiples of them."""
    rows = []
    for workload, measured in kept["found"]["workloads"].items():
        rates = {
            mode: np.array([results[mode]["sps"] for results in measured["rounds"]])
            for mode in SAMPLERS
        }
        sync = rates.pop("sync")
        rows.append([workload, spread(sync), *(spread(own / sync, 2) for own in rates.values())])
    _, *others = SAMPLERS
    return table(["", "`sync`: steps/s", *in_code(others)], rows)


def uneven_table(kept):
    """How many times as fast as `sync` the others are, computed: mean and range of the seeds."""
    rows = []
    for found in kept["cells"]:
        row = [f"{spread:g}" for spread in found["cell"]]
        for name in ("nover", "ver", "weighted"):
            ratios = [rates[name] / rates["sync"] for rates in found["computed"]]
            row.append(mean_and_range(ratios, 1))
        rows.append(row)
    return table(["`between`", "`spread`", "`nover`", "`ver`", "`ver`, weighted"], rows)


def best_rate(looked, sampler):
    """The highest steps per second that advise.py measured with a sampler."""
    return max(tried["rate"] for tried in looked["tried"] if tried["sampler"] == sampler)


def real_table(kept):
    """How uneven real simulators are, and steps per second with each sampler."""
    rows = []
    for name, by_cores in kept["found"].items():
        for cores, rounds in by_cores.items():
            numbers = [looked["behaviour"] for looked in rounds]
            mean_ms, longest_ms, deviation, resets = (
                np.mean([found[key] for found in numbers])
                for key in ("mean_ms", "longest_ms", "deviation", "resets_time")
            )
            how = f"{mean_ms:.3g}, {longest_ms:,.0f}", f"{deviation:.1f}", f"{resets:.0%}"
            # with the better of two numbers of workers
            sync, *others = (
                np.array([best_rate(looked, sampler) for looked in rounds])
                for sampler in ("sync", "nover", "ver", "ver+overlap")
            )
            ratios = [spread(rates / sync, 2) for rates in others]
            rows.append([name, cores, *how, spread(sync, 0 if sync.min() > 100 else 1), *ratios])
    head = ["simulator", "cores", "ms of a step: mean, longest", "deviation", "resets"]
    return table([*head, "`sync`: steps/s", "`nover`", "`ver`", "`ver` + `overlap`"], rows)


def predictions_table(kept):
    """Computed steps per second by measured ones: each round, with both numbers of workers. Rounds
    that were measured before the computation changed have no computed rates, and are left out."""
    rows = []
    for name, by_cores in kept["found"].items():
        for cores, rounds in by_cores.items():
            ratios = {sampler: [] for sampler in COMPARED}
            for looked in [each for each in rounds if "computed" in each]:
                tried = {(one["sampler"], one["workers"]): one["rate"] for one in looked["tried"]}
                as_tried = min(one["num_steps"] for one in looked["computed"])  # T
                for one in looked["computed"]:
                    if one["num_steps"] == as_tried:
                        measured = tried[one["sampler"], one["workers"]]
                        ratios[one["sampler"]].append(f"{one['rate'] / measured:.2f}")
            if all(ratios.values()):
                rows.append([name, cores, *map(", ".join, ratios.values())])
    return table(["simulator", "cores", "`sync`", "`nover`", "`ver`"], rows)


def ranks_table(kept):
    """Speed-ups of real runs over one rank."""
    rows = []
    for mode, by_ranks in kept["found"].items():
        sps = {ranks: np.array([run["sps"] for run in runs]) for ranks, runs in by_ranks.items()}
        one = sps.pop("1")
        speedups = [spread(rates / one, 2) for rates in sps.values()]  # round by round
        rows.append([", ".join(in_code(mode.split())), f"1 = {one.mean():.1f} steps/s", *speedups])
    return table(["ranks", *by_ranks], rows)


def by_trainer(kept):
    """Steps per second of each round, as (trainer, variant) -> list."""
    sps = {}
    for run in kept["found"]["runs"]:
        sps.setdefault((run["trainer"], run["variant"]), []).append(run["sps"])
    return sps


def peers_table():
    """Steps per second of every trainer with each simulator, and in brackets the range of the
    factors by which ver_ppo.py is faster."""
    cells = {}
    for name in ("peers", "peers-computes", "peers-sleeps"):
        every = by_trainer(draw.load_result(name))
        ours = np.array(every["ver", "default"])
        for (trainer, variant), sps in every.items():
            words = draw.TRAINERS[trainer] + (f", {variant}" if trainer == "ver" else "")
            factors = ours / sps
            cell = f"{np.median(sps):,.0f} ({factors.min():.2f}–{factors.max():.2f})"
            cells.setdefault(words, []).append(cell)
    rows = [[words, *row] for words, row in cells.items()]
    return table(["trainer", "PointNav", "and 2 ms of computing", "and 20 ms of sleep"], rows)


def race_table(kept):
    """What the training's last episodes are worth after five minutes, and after how many steps."""
    rows = []
    for task, by_trainer in kept["found"].items():
        cells = []
        for trainer in draw.RACERS:
            if trainer not in by_trainer:
                cells.append("–")
                continue
            runs = by_trainer[trainer]["seeds"].values()
            steps = np.mean([run["steps"] for run in runs]) / 1000
            digits = 2 if task == "PointNav" else 0
            last = mean_and_range([run["last"] for run in runs], digits, " to ")
            cells.append(f"{last}; {steps:,.0f} k")
        rows.append([task, *cells])
    return table(["task", *draw.RACERS.values()], rows)


def habitat_table(kept):
    """Steps per second in Habitat, and the ratio to habitat-baselines."""
    rows = []
    for network, words in {"cnn": "small CNN", "resnet18": "ResNet18"}.items():
        theirs = np.array([results[f"{network} baselines"]["sps"] for results in kept["found"]])
        sps = [spread(theirs)]
        ratios = ["1"]
        for name in speed.OURS_IN_HABITAT:
            own = np.array([results[f"{network} {name}"]["sps"] for results in kept["found"]])
            sps.append(spread(own))
            ratios.append(spread(own / theirs, 2))
        rows.append([f"{words}: steps/s", *sps])
        rows.append([f"{words}: ratio", *ratios])
    return table(["", "habitat-baselines", *speed.OURS_IN_HABITAT], rows)


def gpu_table(kept):
    """The speed of every variant on a GPU, and what the default has learned there."""
    rows = [[variant, f"{found['sps']:,.0f}"] for variant, found in kept["found"].items()]
    lines = table(["", "steps/s"], rows)
    if learned := kept.get("learned"):
        spl, error = learned["evaluation"]["spl"]
        words = f"{learned['steps']:,} steps by default in {learned['seconds']} s"
        lines += ["", f"{words}: SPL {spl:.3f} ± {error:.3f}."]
    return lines


def options_table():
    """All options, with the defaults and the comments of `ver_ppo.Options`."""
    rows = []
    comment = []
    for line in inspect.getsource(ver_ppo.Options).partition("@property")[0].splitlines():
        before, _, after = line.strip().partition("# ")
        if after.startswith("---"):  # a heading
            continue
        if after:
            comment.append(after)
        if found := re.match(r"(\w+): ", before):
            default = getattr(ver_ppo.Options(), found[1])
            default = "" if default in (None, ()) else f"`{default}`"
            rows.append([f"`--{found[1].replace('_', '-')}`", default, " ".join(comment)])
        if found or not after:
            comment = []
    return table(["option", "default", "meaning"], rows)


# ------------------------------------------------------------------------------------------ Pages


def with_footer(make, *names):
    """The table of these files, with its footer."""
    every = [draw.load_result(name) for name in names]
    files = {}
    for name, kept in zip(names, every):
        where = f"By `{kept['command']}`"
        files.setdefault(where, []).append(f"results/{name}.json")
    footer = " ".join(f"{where} ({' and '.join(found)})." for where, found in files.items())
    return [*make(*every), "", footer]


OF_FILES = {  # name: what makes the table, of which files
    "minutes": (minutes_table, "minutes"),
    "starts": (starts_table, "starts"),
    "samplers": (samplers_table, "samplers"),
    "ranks": (ranks_table, "ranks"),
    "habitat": (habitat_table, "habitat"),
    "gpu": (gpu_table, "gpu"),
    "uneven": (uneven_table, "uneven"),
    "race": (race_table, "race"),
    "real": (real_table, "real"),
    "predictions": (predictions_table, "real"),
    "parts": (parts_table, "parts", "parts-pointnav"),
    "worth": (worth_table, "parts", "parts-pointnav"),
    "weights": (weights_table, "weights"),
}
LEARNED = {
    "learned": readme_table,
    "learned-more": lambda: tasks_table([task for task in learn.TASKS if task not in IN_README]),
    "commands": commands,
    "published": published_table,
    "peers": peers_table,
    "options": options_table,
}


def make_table(name):
    """The text of a table, by its name."""
    lines = LEARNED[name]() if name in LEARNED else with_footer(*OF_FILES[name])
    return "\n".join(lines) + "\n"


@functools.cache
def lines_of(path):
    """The first lines of a file's functions, methods and classes. The keys are their names, with
    and without the module's name in front."""
    found = {}

    def look(body, prefix):
        for each in body:
            if isinstance(each, (ast.FunctionDef, ast.ClassDef)):
                found[prefix + each.name] = found[f"{path.stem}.{prefix}{each.name}"] = each.lineno
                look(each.body, f"{prefix}{each.name}.")

    look(ast.parse(path.read_text()).body, "")
    return found


def write_page(page):
    """The text of a page, with new tables between the marks, and with the current line numbers in
    its links to functions."""

    def write_link(found):
        name, path = found.groups()
        return f"[`{name}`]({path}#L{lines_of((page.parent / path).resolve())[name]})"

    text = LINK.sub(write_link, page.read_text())
    return MARKS.sub(lambda found: found[1] + make_table(found[2]) + found[3], text)


def check_tables():
    """A list of problems of the pages: a table without its place, or a table that would change."""
    texts = {page: page.read_text() for page in PAGES}
    marks = sorted(name for text in texts.values() for _, name, _ in MARKS.findall(text))
    known = sorted({*LEARNED, *OF_FILES})
    if marks != known:
        return [f"the pages have places for {marks}; there are {known}"]
    changed = [page for page, text in texts.items() if write_page(page) != text]
    return [f"{page}: would change; run tables.py" for page in changed]


# --------------------------------------------------------------------------------------- Pictures


def draw_pictures():
    """Draw all pictures of the pages, except the film."""
    costs = {"inference_sec": 0.05, "learning_sec": 3.0}
    figures = {
        "whole": draw.whole(),
        "timeline": draw.compare_samplers(
            draw.step_times(4, 0.4, 0.6), 8, 3, **costs, height=3.6, samplers=("sync", "ver")
        ),
        "scaling": draw.scaling_curves(draw.load_result("scaling")["found"]),
        "chain": draw.chain_and_distance(draw.load_result("rearrange")),
        "minutes": draw.minutes_curves(draw.load_result("minutes")["found"]),
        "parts": parts_figure(),
        "race": draw.race_panels(draw.load_result("race")["found"]),
    }
    for name, figure in figures.items():
        figure.savefig(PICTURES / f"{name}.png", dpi=90)


def parts_figure():
    """Draw the training with and without each part, in its small task."""
    found = draw.load_result("parts")["found"]
    panels = {}
    for key, part in studies.PARTS.items():
        _, tag = studies.TASKS[part.small].measure
        runs = found.get(part.small, {})
        both = runs.get(studies.CRASHING if part.crashes else "full", []), runs.get(key, [])
        panels[textwrap.fill(f"{part.part}: {part.without}", 40)] = tag, both
    return draw.parts_panels(panels)


def film(run):
    """Film the agent of this run folder while it reaches three far goals of validation episodes:
    its camera, and its path on the floor plan, at every third step."""
    policy, options = play.load_policy(run)
    env = ver_ppo.make_env(options, "val").unwrapped
    figure, (eye, plan) = plt.subplots(1, 2, figsize=(6.4, 3.2), layout="constrained")
    frames = []
    found = 0
    for number in itertools.count():
        moments = []  # of an episode: observation, heading, length of the path
        for one in play.play(policy, env, ver_ppo.derive_seed(1, 1, 0, number)):
            moments.append((one.observe()["depth"], one.heading, len(one.path)))
        if not env.info["success"] or env.start_geodesic < 7:
            continue
        path = env.path
        for depth, heading, length in [*moments[::3], *[moments[-1]] * 6]:
            env.path = path[:length]
            draw.moment(eye, plan, env, depth, heading)
            figure.canvas.draw()
            picture = Image.fromarray(np.asarray(figure.canvas.buffer_rgba())).convert("RGB")
            frames.append(picture.quantize(128, Image.Quantize.MAXCOVERAGE))
        found += 1
        if found == 3:
            break
    more = {"save_all": True, "append_images": frames[1:], "duration": 100, "loop": 0}
    frames[0].save(PICTURES / "agent.gif", optimize=True, **more)


if __name__ == "__main__":
    parser = harness.command_line(__doc__)
    parser.add_argument("what", nargs="?", choices=["show", "film"])
    parser.add_argument("which", nargs="?", help="show: a table; film: a run folder")
    parser.add_argument("--check", action="store_true", help="write nothing")
    args = parser.parse_args()
    matplotlib.use("Agg")
    draw.setup()
    if args.what == "show":
        print(make_table(args.which))
    elif args.what == "film":
        film(args.which)
    elif args.check:
        wrong = check_tables()
        print(*(wrong or ["the tables are up to date"]), sep="\n")
        sys.exit(bool(wrong))
    else:
        draw_pictures()
        for page in PAGES:
            page.write_text(write_page(page))
