"""The notebooks run from top to bottom, and what they predict is computed; what is committed was
run, and is small. And the tasks in their folder."""

import inspect
import itertools
import os
import re
import subprocess
import sys
import tempfile
from fractions import Fraction

import matplotlib.pyplot as plt
import nbformat
import numpy as np
import pytest
import torch
from jupyter_client import AsyncKernelManager
from matplotlib.colors import to_rgb
from nbclient import NotebookClient

import ver_ppo
from notebooks import draw
from notebooks.environments.pointnav import PointNav
from notebooks.extensions import virtual_clock
from notebooks.solutions import bug_hunt
from tests.helpers import ROOT, nobody_left

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
EACH = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def check_outputs(notebook):
    """Every prediction was compared and holds; no cell has failed or warned."""
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    kinds, names = ({output.get(field) for output in outputs} for field in ("output_type", "name"))
    printed = "".join(output.get("text", "") for output in outputs)
    assert "error" not in kinds and "stderr" not in names, printed
    assert printed.count("\N{CHECK MARK}") >= 2
    assert "display_data" in kinds  # pictures


ANSWER = re.compile(r"<summary>Answer.*?</summary>\n\n(.*?)\n\n", re.DOTALL)


def check_answers(cells, shortened):
    """A number in the folded answer behind a guess is the one that is computed, as exactly as it is
    written. After "About" 10 % are allowed, and "0.2 to 0.3" is a range. Numbers are not compared
    if they depend on the machine, as their answer says, or if training was shortened before."""
    folds = [ANSWER.search(cell.source) for cell in cells]
    guessed = 0
    for k, cell in enumerate(cells):
        if re.search(r"^guess\w* = None", cell.source, re.M):
            guessed = k
        printed = "".join(output.get("text", "") for output in cell.get("outputs", []))
        values = [float(value) for value in re.findall(r"^computed: (\S+)", printed, re.M)]
        if not values:
            continue
        said = next(fold[1].replace(",", "") for fold in folds[guessed:] if fold)
        if "machine" in said or any(later in shortened for later in cells[: k + 1]):
            continue
        if among := re.match(r"([\d.]+) to ([\d.]+)", said):
            assert float(among[1]) <= min(values) and max(values) <= float(among[2]), said
            continue
        numbers = re.findall(r"\d+/\d+|\d+(?:\.\d+)?", said)
        assert len(numbers) >= len(values), said
        for value, number in zip(values, numbers):
            right = float(Fraction(number))
            places = len(number.partition(".")[2])
            rounding = min(0.5 * 10**-places, 0.02 * right)
            margin = 0.1 * right if said.startswith("About") else rounding
            assert abs(value - right) <= margin + 1e-9, f"computed {value}: {said}"


EXERCISE = re.compile(r"# Exercise (\d+): write your answer")
SOLUTION = re.compile(
    r"<details><summary>Solution (\d+)</summary>\n\n```python\n(.*?)```\n\n"
    r"The usual mistake.*?```python\n(.*?)```\n\n</details>",
    re.DOTALL,
)
SOLUTION_FILE = re.compile(r"Solution (\d+): \[(solutions/\w+\.py)\]\(\2\)")


def spoiled(solution, *changes):
    """A solution in a file with one text in it replaced by another, once for each change."""
    right = (ROOT / "notebooks" / "solutions" / f"{solution}.py").read_text()
    assert all(right.count(old) == 1 for old, _ in changes)
    return [right.replace(old, new) for old, new in changes]


# V-trace by its definition
VTRACE = """def my_vtrace(ratio_K, reward_K, value_K, done_K, bootstrap, gamma, gae_lambda):
    found = []
    future_K = [*value_K[1:], bootstrap]
    for begin in range(len(ratio_K)):
        advantage, product = 0.0, 1.0
        for k in range(begin, len(ratio_K)):
            product *= min(1, ratio_K[k]) if k > begin else 1
            difference = reward_K[k] + (0 if done_K[k] else gamma * future_K[k]) - value_K[k]
            advantage += (gamma * gae_lambda) ** (k - begin) * product * difference
            if done_K[k]:
                break
        found.append((value_K[begin] + min(1, ratio_K[begin]) * advantage, advantage))
    return list(zip(*found))"""
TRUNCATED_PRODUCT = VTRACE.replace("min(1, ratio_K[k])", "ratio_K[k]")
TRUNCATED_PRODUCT = TRUNCATED_PRODUCT.replace("* product", "* min(1, product)")  # not each ratio
# what a student may write in place of what lies in such a file, and the check must notice:
# mistakes by notebook and exercise
MINUTES = "import numpy as np\ndef minutes_to(steps, values, rate, threshold):\n    "
MISTAKES = {
    ("02_rollout_by_hand", "2"): spoiled(
        "02_rollout_by_hand_2",
        # forgets what is in flight
        ("rollout.rows = 0\n", "rollout.rows = 0\n    collector.in_flight_N[:] = False\n"),
        # takes all answers, more than S
        ("rollout.capacity - rollout.rows", "len(collector.given_N)"),
        # acts when the rollout is full
        ("wanted_B &= rollout.rows < rollout.capacity", "pass"),
        # acts when an environment has given its quota
        ("collector.given_N[env_B] < collector.options.quota", "np.ones(len(env_B), bool)"),
        # idle environments: V of their last step, nothing, or no action ever again
        ("rollout.bootstrap[collector.idle] = value_B", "pass"),
        ("= value_B", "= 0.0"),
        ("collector.act(idle_B)", "pass"),
        # the memory sees twice what is in flight
        (
            'collector.pending["value"]',
            'collector.values(np.arange(3), collector.io["obs"], collector.io["first"])',
        ),
        # an environment's start counts as a step
        ("env_B[collector.in_flight_N[env_B]]", "env_B"),
        # the quota is that of all rollouts
        ("collector.given_N[:] = 0", "pass"),
        # learns from what is in flight, and again when it is complete
        (
            "    rollout.bootstrap[:] =",
            "    flies_B = np.flatnonzero(collector.in_flight_N)\n"
            "    rollout.records[: len(flies_B)] = collector.pending.records[flies_B]\n"
            "    rollout.bootstrap[:] =",
        ),
    ),
    ("03_packing", "2"): [
        """  # whole sequences
def my_cut(sequences, count):
    borders = [len(sequences) * b // count for b in range(count + 1)]
    return [sequences[low:high] for low, high in zip(borders, borders[1:])]""",
        """  # forgets where sequences begin
def my_cut(sequences, count):
    return [[part] for part in np.array_split(np.concatenate(sequences), count)]""",
        """  # leaves the rest of the division out
def my_cut(sequences, count):
    size = sum(map(len, sequences)) // count
    where = np.repeat(range(len(sequences)), [len(sequence) for sequence in sequences])
    line = np.concatenate(sequences)
    parts = [slice(size * b, size * (b + 1)) for b in range(count)]
    return [[line[part][where[part] == q] for q in np.unique(where[part])] for part in parts]""",
        """  # an empty sequence where the cut falls between two
def my_cut(sequences, count):
    line = np.concatenate(sequences)
    ends = np.cumsum([len(sequence) for sequence in sequences])
    cuts = [len(line) * b // count for b in range(count + 1)]
    return [
        np.split(line[low:high], ends[(low <= ends) & (ends <= high)] - low)
        for low, high in zip(cuts, cuts[1:])
    ]""",
        """  # a sequence for each step
def my_cut(sequences, count):
    parts = np.array_split(np.concatenate(sequences), count)
    return [[[index] for index in part] for part in parts]""",
    ],
    ("03_packing", "3"): [
        """  # sequence by sequence
def my_pack(sequences):
    longest_first = sorted(sequences, key=len, reverse=True)
    return np.concatenate(longest_first), [len(sequence) for sequence in longest_first]""",
        """  # as they come
def my_pack(sequences):
    longest = max(len(sequence) for sequence in sequences)
    batches = [[each[k] for each in sequences if len(each) > k] for k in range(longest)]
    return sum(batches, []), [len(batch) for batch in batches]""",
        """  # by index within a step
def my_pack(sequences):
    longest = max(len(sequence) for sequence in sequences)
    batches = [sorted(each[k] for each in sequences if len(each) > k) for k in range(longest)]
    return sum(batches, []), [len(batch) for batch in batches]""",
        """  # padded: the last step again and again
def my_pack(sequences):
    longest_first = sorted(sequences, key=len, reverse=True)
    longest = len(longest_first[0])
    batches = [[each[min(k, len(each) - 1)] for each in longest_first] for k in range(longest)]
    return sum(batches, []), [len(batch) for batch in batches]""",
    ],
    ("04_returns_and_ppo", "1"): [
        """  # all rollouts end with 0
def my_advantages(segment_S, reward_S, value_S, done_S, bootstrap, gamma, gae_lambda):
    columns = segment_S, reward_S, value_S, done_S, np.zeros(len(bootstrap))
    return ver_ppo.compute_advantages(*columns, gamma, gae_lambda)""",
        """  # the next step of the rollout
def my_advantages(segment_S, reward_S, value_S, done_S, bootstrap, gamma, gae_lambda):
    columns = np.zeros(len(segment_S), int), reward_S, value_S, done_S, bootstrap[segment_S[-1:]]
    return ver_ppo.compute_advantages(*columns, gamma, gae_lambda)""",
        """  # at an end, the advantage behind it still counts
def my_advantages(segment_S, reward_S, value_S, done_S, bootstrap, gamma, gae_lambda):
    advantage_S = np.zeros(len(segment_S))
    next_value = list(bootstrap)
    next_advantage = [0.0] * len(bootstrap)
    for step in reversed(range(len(segment_S))):
        segment = segment_S[step]
        follows = 0.0 if done_S[step] else next_value[segment]
        difference = reward_S[step] + gamma * follows - value_S[step]
        advantage_S[step] = difference + gamma * gae_lambda * next_advantage[segment]
        next_value[segment] = value_S[step]
        next_advantage[segment] = advantage_S[step]
    return advantage_S""",
        """  # ends do not matter
def my_advantages(segment_S, reward_S, value_S, done_S, *more):
    return ver_ppo.compute_advantages(segment_S, reward_S, value_S, 0 * done_S, *more)""",
        """  # without lambda
def my_advantages(*columns):
    return ver_ppo.compute_advantages(*columns[:-1], 1.0)""",
    ],
    ("06_optimal_preemption", "1"): [
        """  # as soon as one is done, which S / Time(S) says
def my_preemption(step_sec_2, most, learning_sec):
    return most * min(step_sec_2)""",
        """  # when all are done
def my_preemption(step_sec_2, most, learning_sec):
    return most * max(step_sec_2)""",
        """  # if the rest takes less time than learning
def my_preemption(step_sec_2, most, learning_sec):
    first, last = most * np.sort(step_sec_2)
    return last if last - first < learning_sec else first""",
        """  # forgets what the slower one has by then
def my_preemption(step_sec_2, most, learning_sec):
    first, last = most * np.sort(step_sec_2)
    waiting = 2 * most / (last + learning_sec)
    return first if most / (first + learning_sec) > waiting else last""",
        """  # rank 0 is taken for the faster one
def my_preemption(step_sec_2, most, learning_sec):
    _, end_sec = ver_multigpu.optimal_preemption(
        np.sort(step_sec_2)[:, None], most, True, learning_sec
    )
    return min(end_sec, most * step_sec_2[0])""",
    ],
    ("07_older_data", "2"): spoiled(
        "07_older_data_2",
        # not truncated; as PPO clips; only the ratios above 1
        ("np.minimum(1.0, ratio_K)", "ratio_K"),
        ("np.minimum(1.0, ratio_K)", "np.clip(ratio_K, 0.8, 1.2)"),
        ("np.minimum(1.0, ratio_K)", "np.maximum(1.0, ratio_K)"),
        # the step's own c: not in the target; with lambda (c in place of rho); in the advantage
        ("value_K + keep_K * advantage_K", "value_K + advantage_K"),
        ("value_K + keep_K * advantage_K", "value_K + gae_lambda * keep_K * advantage_K"),
        ("return target_K, advantage_K", "return target_K, keep_K * advantage_K"),
        # what follows is not corrected; is corrected by the ratio of the step before it
        ("= keep_K[step] * advantage_K[step]", "= advantage_K[step]"),
        ("= keep_K[step] * advantage_K[step]", "= keep_K[step - 1] * advantage_K[step]"),
        # the next step's target is in the difference, too
        ("= value_K[step]\n", "= value_K[step] + keep_K[step] * advantage_K[step]\n"),
        # at an episode's end, the next episode's value or advantage still counts
        ("            next_value = 0.0\n", ""),
        ("            next_kept = 0.0\n", ""),
        # a segment's end is taken for an episode's end; there is no lambda; the two are swapped
        ("next_value = bootstrap", "next_value = 0.0"),
        ("gamma * gae_lambda * next_kept", "gamma * next_kept"),
        ("return target_K, advantage_K", "return advantage_K, target_K"),
    )
    + [TRUNCATED_PRODUCT],
    ("08_language_models", "1"): spoiled(
        "08_language_models_1",
        # forgets what was decoded; passes it without the prompt
        ("engine(prompt + tokens)", "engine(prompt)"),
        ("engine(prompt + tokens)", "engine(tokens or prompt)"),
        # the version of the last piece for all; of the first; one for each piece; one more for each
        ("versions += [version] * len(new_tokens)", "versions = [version] * len(tokens)"),
        ("[version] * len(new_tokens)", "[*versions, version][:1] * len(new_tokens)"),
        ("[version] * len(new_tokens)", "[version]"),
        ("[version] * len(new_tokens)", "range(version, version + len(new_tokens))"),
        # stops at the first interruption, keeps the last piece's log-probabilities only
        ("while not ended", "for _ in range(1)"),
        ("log_probs += new_log_probs", "log_probs = new_log_probs"),
        # the prompt counts as part of the answer
        ("return tokens", "return prompt + tokens"),
    ),
    ("08_language_models", "2"): spoiled(
        "08_language_models_2",
        # forgets the running, those accepted, both, or those learned from; is off by a batch
        (" - accepted - running", " - accepted"),
        (" - accepted - running", " - running"),
        (" - accepted - running", ""),
        ("(eta + version + 1) * B", "(eta + 1) * B"),
        ("(eta + version + 1) * B", "(eta + version) * B"),
        # lets one answer too many begin; only asks whether any may
        (" - accepted - running", " - accepted - running + 1"),
        ("return (eta", "return accepted + running < (eta"),
    ),
    ("11_population", "1"): spoiled(
        "11_population_1",
        # 30 % rounded down, to the nearest, of the others; more or fewer are among the best
        ("ceil(0.3 * len(ranked))", "max(1, int(0.3 * len(ranked)))"),
        ("ceil(0.3 * len(ranked))", "round(0.3 * len(ranked))"),
        ("ceil(0.3 * len(ranked))", "ceil(0.3 * len(others))"),
        ("best >= ranked[few - 1]", "best >= ranked[few]"),
        ("best >= ranked[few - 1]", "best >= ranked[0]"),
        # its present score counts, not its best one; the donor's; the rest of the rule only
        ("best >= ranked[few - 1]", "score >= ranked[few - 1]"),
        ("best >= ranked[few - 1]", "best >= donor"),
        ("score not in ranked[-few:]", "False"),
        # one difference is enough; only one is asked for
        ("0.5 * deviation and gap", "0.5 * deviation or gap"),
        ("gap > 0.5 * deviation and", ""),
        (" and gap > 0.05 * abs(donor)", ""),
        # a whole deviation; of all scores, without the highest, of a sample, without the member
        ("0.5 * deviation", "deviation"),
        ("len(ranked) // 5", "0"),
        ("ranked[: len(ranked) - lowest]", "ranked[lowest:]"),
        ("lowest])", "lowest], ddof=1)"),
        ("np.std(ranked[: len(ranked) - lowest])", "np.std(others)"),
        ("len(ranked) // 5", "ceil(len(ranked) / 5)"),
        # 5 % of its own score; of a negative score
        ("abs(donor)", "abs(score)"),
        ("abs(donor)", "donor"),
        # never takes over; never mutates
        ('return "takes over"', 'return "mutates"'),
        ('return "mutates"', 'return "takes over"'),
    ),
    ("05_does_it_pay", "1"): [
        # as if curves only rose; from point to point; the last time; as if they never fell; seconds
        f"{MINUTES}return np.interp(threshold, values, steps) / rate / 60",
        f"{MINUTES}return min(steps[values >= threshold], default=np.inf) / rate / 60",
        f"{MINUTES}return max(steps[values <= threshold], default=0) / rate / 60",
        f"{MINUTES}return np.interp(threshold, np.maximum.accumulate(values), steps) / rate / 60",
        f"{MINUTES}return np.interp(threshold, values, steps, right=np.inf) / rate",
    ],
}


FEWER_STEPS = {  # of training in these notebooks, where their checks do not ask for more
    "00_five_changes": {"UPDATES = 5": "UPDATES = 2"},
    "14_transfer": {
        "--total-timesteps 25000": "--total-timesteps 2048",
        "--total-timesteps 8192": "--total-timesteps 1024",
    },
    "11_population": {"STEPS = 16_896": "STEPS = 6_144"},
    "12_chained_skills": {
        "Pick-v0 --total-timesteps 16000 {arm}": "Pick-v0 --total-timesteps 2048 {arm}",
        "Place-v0 --total-timesteps 30000 {arm}": "Place-v0 --total-timesteps 2048 {arm}",
        "pointnav --total-timesteps 30000 {camera}": "pointnav --total-timesteps 2048 {camera}",
        "for flat in range(20)": "for flat in range(8)",
        "for flat in range(100):\n    env = chain.begin(flat": (
            "for flat in range(20):\n    env = chain.begin(flat"
        ),
        "for flat in range(100):\n        env = chain.begin(1000 + flat, far_m": (
            "for flat in range(8):\n        env = chain.begin(1000 + flat, far_m"
        ),
    },
    "06_optimal_preemption": {
        "--total-timesteps 800": "--total-timesteps 500",
    },
    "08_language_models": {"range(30)": "range(3)"},
    "09_bug_hunt": {"UPDATES = 40": "UPDATES = 2", "range(1, 9)": "range(1, 5)"},
    "10_train_pointnav": {
        # with --num-workers 0, all runs learn the same: the notebook's checks are free of chance
        "--total-timesteps 25000 {latency}": "--total-timesteps 9000 --num-workers 0 {latency}",
        "latency(mean_ms=10,": "latency(mean_ms=0.1,",
    },
    "15_selfplay": {"games=300": "games=100", "None, 200": "None, 80"},
}


OTHERS = {  # more answers, by notebook and exercise, and what the check must say of each
    ("08_language_models", "1"): {
        # changes its input; arrays
        """def carry_over(engine, prompt):
    size = len(prompt)
    columns = [], []
    while True:
        tokens, log_probs, version, ended = engine(prompt)
        prompt += tokens
        columns[0].extend(log_probs)
        columns[1].extend(version for _ in tokens)
        if ended:
            return np.array(prompt[size:]), *map(np.array, columns)""": "right",
    },
    ("08_language_models", "2"): {
        # so many that begin that the next one would be too old
        """def may_begin(accepted, running, version, B, eta):
    return max(0.0, B * version + (1 + eta) * B - (accepted + running))""": "right",
    },
    ("09_bug_hunt", "1"): {
        "by_ratios = {'A': None, 'B': None}": "no answer yet",
        "by_ratios = {'c': '2', 'G': 4, 'H': None}": "right",
        "by_ratios = {'C': 2, 'G': 4, 'A': 3}": "not yet",
        "by_ratios = 'C2, G4'": "not yet",
    },
    ("09_bug_hunt", "2"): {"by_million = by_ratios | {'A': 5, 'E': 1, 'H': 6}": "right"},
    ("09_bug_hunt", "4"): {
        "missed = {8, 7, 6, 5, 4, 2, 1}": "right",
        "missed = range(1, 9)": "not yet",
        "missed = 3": "not yet",
    },
    ("06_optimal_preemption", "1"): {  # clears its input
        """def my_preemption(step_sec_2, most, learning_sec):
    _, end_sec = ver_multigpu.optimal_preemption(step_sec_2[:, None], most, True, learning_sec)
    step_sec_2[:] = 0
    return end_sec""": "right",
    },
    ("06_optimal_preemption", "2"): {
        # from a line of all steps; clears its input
        """def learned_from(rollouts, total):
    line = sum(rollouts, [])
    ends = np.cumsum([len(fresh) for fresh in rollouts])
    for fresh in rollouts:
        fresh.clear()
    return [line[end - total : end] for end in ends]""": "right",
        # only from the rollout before
        """def learned_from(rollouts, total):
    pairs = zip([[0] * total, *rollouts], rollouts)
    return [([0] * total + before + fresh)[-total:] for before, fresh in pairs]""": "not yet",
    },
    ("01_straggler_effect", "1"): {  # changes the table it is given
        """def lockstep_seconds(seconds_NK, updates, inference_sec, learning_sec):
    seconds_NK += inference_sec
    return seconds_NK.max(axis=0).sum() + updates * learning_sec""": "right"
    },
    ("01_straggler_effect", "3"): {"answer = 32, 32.0, 10": "right", "answer = 'ten'": "not yet"},
    ("02_rollout_by_hand", "2"): {
        "my_collect = ver_ppo.Collector.collect": "right",
        # one by one
        """def my_collect(collector, rollout):
    idle, collector.idle = collector.idle, []
    rollout.rows = 0
    collector.given_N[:] = 0
    for e in idle[::-1]:
        collector.act(np.array([e]))
    while rollout.rows < rollout.capacity:
        answered = collector.await_answers(rollout.capacity - rollout.rows)
        for e in answered[::-1]:  # within a pass, the order of the rows is free
            if collector.in_flight_N[e]:
                collector.complete_steps(rollout, np.array([e]), np.array([rollout.rows]))
                rollout.rows += 1
        for e in answered:
            if rollout.rows < rollout.capacity and collector.given_N[e] < collector.options.quota:
                collector.act(np.array([e]))
            else:
                collector.idle.append(e)
    for e in range(3):
        values = collector.pending["value"][[e]]
        if not collector.in_flight_N[e]:
            first = collector.io["first"][[e]]
            values = collector.values(np.array([e]), collector.io["obs"], first)
        rollout.bootstrap[e] = values[0]""": "right",
        # these do something, or say that they did, and no environment gets an action
        "def my_collect(collector, rollout):\n    rollout.rows = 12": "not yet",
        "def my_collect(collector, rollout):\n    rollout.bootstrap[:] = 0": "not yet",
        "def my_collect(collector, rollout):\n    collector.await_answers(12)": "not yet",
        "def my_collect(collector, rollout):\n    return rollout": "not yet",
        """def my_collect(collector, rollout):
    while True:
        collector.await_answers(12)""": "not yet",
    },
    ("03_packing", "1"): {"answer = [10, 7, 4, 3]": "not yet", "answer = 3, 2, 1, 1": "right"},
    ("03_packing", "2"): {
        "my_cut = ver_ppo.cut_minibatches": "right",
        # pops from its argument
        """def my_cut(sequences, count):
    total = sum(map(len, sequences))
    minibatches = []
    for b in range(count):
        room = total * (b + 1) // count - total * b // count
        minibatches.append([])
        while room > 0:
            sequence = sequences.pop(0)
            minibatches[b].append(sequence[:room])
            if len(sequence) > room:
                sequences.insert(0, sequence[room:])
            room -= len(minibatches[b][-1])
    return minibatches""": "right",
    },
    ("03_packing", "3"): {
        "my_pack = ver_ppo.pack": "right",
        # pops from its argument
        """def my_pack(sequences):
    sequences.sort(key=len, reverse=True)
    packed = []
    batch_sizes = []
    while sequences:
        packed += [sequence[len(batch_sizes)] for sequence in sequences]
        batch_sizes.append(len(sequences))
        while sequences and len(sequences[-1]) == len(batch_sizes):
            sequences.pop()
    return packed, batch_sizes""": "right",
        "my_pack = lambda sequences: np.concatenate(sequences)": "not yet",
    },
    ("03_packing", "4"): {"answer = 'ABCDFG'": "not yet", "answer = 'a, d, f'": "right"},
    ("05_does_it_pay", "2"): {
        "answer = 9": "not yet",
        "answer = [18]": "right",
        "answer = 16": "not yet",
    },
    ("03_packing", "5"): {"answer = 'DFGX'": "not yet", "answer = ['g', 'F', 'd']": "right"},
    ("04_returns_and_ppo", "1"): {"my_advantages = ver_ppo.compute_advantages": "right"},
    ("04_returns_and_ppo", "2"): {  # with a pocket calculator; on paper; without γ; without λ
        "answer = [round(final_value * share, 3) for share in (0.876, 0.931, 0.99)]": "right",
        "answer = 0.174, 0.185, 0.196": "right",
        "answer = [final_value * share for share in (0.884, 0.940, 1)]": "not yet",
        "answer = [final_value * share for share in (0.970, 0.980, 0.99)]": "not yet",
    },
    ("07_older_data", "1"): {  # not truncated; swapped; as an array
        "answer = [0.7, 1.12, 0.56, 0.728], [1, 1.6, 0.8, 1.04]": "not yet",
        "answer = [1, 1, 0.5, 0.5], [0.7, 0.7, 0.35, 0.35]": "not yet",
        "answer = np.array([[0.7, 0.7, 0.35, 0.35], [1, 1, 0.5, 0.5]])": "right",
    },
    ("07_older_data", "2"): {
        VTRACE: "right",
        "my_vtrace = shipped_vtrace": "right",
        "my_vtrace = lambda *_: None": "no answer yet",
        "my_vtrace = lambda ratio_K, *_: ratio_K": "not yet",
    },
    ("11_population", "1"): {
        # by places, from the worst; clears its input
        """def my_decision(score, best, others, donor):
    scores = np.sort([*others, score])
    few = -(-3 * len(scores) // 10)
    worse = sum(other < score for other in others)
    others.clear()
    if worse >= few or best >= scores[-few]:
        return "goes on"
    least = max(scores[len(scores) // 5 :].std() / 2, abs(donor) / 20)
    return "mutates" if donor - score <= least else "takes over"
""": "right",
        # in words of one's own
        "my_decision = lambda *_: 'continues'": "not yet",
        "my_decision = lambda *_: None": "no answer yet",
    },
    ("10_train_pointnav", "1"): {
        # changes its input; the goal from the shortest path, lengths from arrays
        """def my_spl(walked, shortest, stopped):
    def length(points):
        total = 0.0
        while len(points) > 1:
            total += float(np.linalg.norm(np.array(points.pop()) - points[-1]))
        return total
    success = stopped and np.linalg.norm(np.array(walked[-1]) - shortest[-1]) <= 0.2
    best = length(shortest)
    return success * best / max(length(walked), best)""": "right",
        # no matter whether it said stop; how near it came; whether it was near on its way
        """def my_spl(walked, shortest, stopped):
    p, l = (np.hypot(*np.diff(points, axis=0).T).sum() for points in (walked, shortest))
    return l / max(p, l) * (np.hypot(*np.subtract(walked[-1], shortest[-1])) <= 0.2)""": "not yet",
        """def my_spl(walked, shortest, stopped):
    p, l = (np.hypot(*np.diff(points, axis=0).T).sum() for points in (walked, shortest))
    return stopped * l / max(p, l)""": "not yet",
        """def my_spl(walked, shortest, stopped):
    p, l = (np.hypot(*np.diff(points, axis=0).T).sum() for points in (walked, shortest))
    near = any(np.hypot(*np.subtract(point, shortest[-1])) <= 0.2 for point in walked)
    return (stopped and near) * l / max(p, l)""": "not yet",
        # the straight distance; steps of 0.25 m
        """def my_spl(walked, shortest, stopped):
    p = np.hypot(*np.diff(walked, axis=0).T).sum()
    l = np.hypot(*np.subtract(shortest[0], shortest[-1]))
    return stopped * (np.hypot(*np.subtract(walked[-1], shortest[-1])) <= 0.2) * l / max(p, l)""": (
            "not yet"
        ),
        """def my_spl(walked, shortest, stopped):
    p = 0.25 * (len(walked) - 1)
    l = np.hypot(*np.diff(shortest, axis=0).T).sum()
    return stopped * (np.hypot(*np.subtract(walked[-1], shortest[-1])) <= 0.2) * l / max(p, l)""": (
            "not yet"
        ),
        # only whether it succeeded; two numbers
        """def my_spl(walked, shortest, stopped):
    return float(stopped and np.hypot(*np.subtract(walked[-1], shortest[-1])) <= 0.2)""": "not yet",
        "my_spl = lambda walked, shortest, stopped: (1.0, 1.0)": "not yet",
    },
    ("12_chained_skills", "1"): {
        # by the length so far
        """def my_point_before(path, before_m):
    points = np.array(path)
    along_m = np.append(0, np.cumsum(np.hypot(*np.diff(points, axis=0).T)))
    return [np.interp(along_m[-1] - before_m, along_m, column) for column in points.T]""": "right",
        # pops from its argument
        """def my_point_before(path, before_m):
    point = path.pop()
    while path:
        step = path[-1] - point
        length_m = np.linalg.norm(step)
        if length_m >= before_m:
            return tuple(point + step * before_m / length_m)
        before_m -= length_m
        point = path.pop()
    return point""": "right",
        # straight toward the robot; from the robot; stops at the last corner; no short path; no
        # remainder
        """def my_point_before(path, before_m):
    robot, target = path[0], path[-1]
    return target + (robot - target) * min(1, before_m / math.dist(robot, target))""": "not yet",
        """def my_point_before(path, before_m):
    step = path[1] - path[0]
    return path[0] + step * min(1, before_m / np.linalg.norm(step))""": "not yet",
        """def my_point_before(path, before_m):
    corner, target = path[-2:]
    return target + (corner - target) * min(1, before_m / math.dist(corner, target))""": "not yet",
        """def my_point_before(path, before_m):
    for near, far in zip(path[::-1], path[-2::-1]):
        length_m = math.dist(near, far)
        if before_m <= length_m:
            return near + (far - near) * before_m / length_m
        before_m -= length_m""": "not yet",
        """def my_point_before(path, before_m):
    for near, far in zip(path[::-1], path[-2::-1]):
        length_m = math.dist(near, far)
        if before_m <= length_m:
            return near + (far - near) * before_m / length_m
    return path[0]""": "not yet",
    },
    ("13_extras", "1"): {"answer = [8]": "right", "answer = 'eight'": "not yet"},
    ("13_extras", "2"): {  # rounded; without λ
        "answer = -np.round(lost_value, 3) * np.array([0.884, 0.940, 1])": "right",
        "answer = [-lost_value * 0.99**k for k in (2, 1, 0)]": "not yet",
    },
    ("14_transfer", "1"): {
        "answer = ['f', 'b c d e f', 'c-d-e-f']": "right",
        "answer = 'F', 'ABCDEF', 'CDEF'": "not yet",  # nothing is frozen
        "answer = 'F', 'BCDEF', 'BCDEF'": "not yet",  # resets the encoder of the goal, too
        "answer = 'EF', 'BCDEF', 'CDEF'": "not yet",  # resets the actor, too
        "answer = 'BCDEF'": "not yet",
    },
    ("15_selfplay", "1"): {
        # only ever turns left
        """def robot(observation):
    seen, distance, cosine, sine = observation["other"]
    return 0 if seen and abs(sine) < np.sin(np.radians(10)) else 2""": "not yet",
    },
}


def with_answers(cells, name):
    """The cells of a notebook with each exercise (the reader's cell, its check, the solution)
    answered several times: not at all, by the usual mistake, which the check must notice, right,
    and as `OTHERS` has it; and right once more after the last cell, as by a reader who runs all
    before answering. And what the checks must say, in this order."""
    cells = iter(cells)
    answered = []
    verdicts = []
    afterwards = []
    for cell in cells:
        exercise = EXERCISE.match(cell.source)
        answered.append(cell)
        if not exercise:
            continue
        check = next(cells)
        solution = next(cells).source.strip()
        if in_file := SOLUTION_FILE.match(solution):
            number, path = in_file.groups()
            right = (ROOT / "notebooks" / path).read_text()
            mistakes = MISTAKES[name, number]
        else:
            number, right, *mistakes = SOLUTION.fullmatch(solution).groups()
        assert number == exercise[1] and mistakes
        sources = {"": "no answer yet"} | dict.fromkeys(mistakes, "not yet")
        sources |= OTHERS.get((name, number), {})
        for answer, verdict in (sources | {right: "right"}).items():
            answered += [nbformat.v4.new_code_cell(source) for source in (answer, check.source)]
            verdicts.append(verdict)
        afterwards += [nbformat.v4.new_code_cell(source) for source in (right, check.source)]
    return answered + afterwards, verdicts + ["right"] * (len(afterwards) // 2)


@EACH
def test_notebook_runs(path, request):
    """As a reader runs it: in its folder, with a fresh kernel; within some minutes (two at most are
    promised, on a machine that is not slow or busy). Exercises are answered, wrong and right, and
    guesses are revealed. Some train for less long, but not with --whole: the committed outputs are
    those of all steps."""
    notebook = nbformat.read(path, as_version=4)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    shortened = []
    fewer_steps = {} if request.config.getoption("--whole") else FEWER_STEPS.get(path.stem, {})
    for steps, fewer in fewer_steps.items():
        (cell,) = [cell for cell in code if steps in cell.source]
        cell.source = cell.source.replace(steps, fewer)
        shortened.append(cell)
    exercises = [cell for cell in notebook.cells if EXERCISE.match(cell.source)]
    assert len(exercises) >= (2 if path.stem < "10" else 1)  # the appendix has fewer
    notebook.cells, verdicts = with_answers(notebook.cells, path.stem)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = []
    reveal = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from notebooks import draw"
    reveal += "; draw.compare_guess.__defaults__ = (True,)"
    notebook.cells.insert(0, nbformat.v4.new_code_cell(reveal))
    where = {"metadata": {"path": str(path.parent)}}
    # the kernel uses socket files, because another process might take its port first. Their paths
    # must be short
    with tempfile.TemporaryDirectory(dir="/tmp") as sockets:
        kernel = AsyncKernelManager(transport="ipc", ip=f"{sockets}/kernel")
        client = NotebookClient(notebook, kernel, timeout=600, resources=where)
        client.execute(cleanup_kc=True)  # ends the kernel
    assert nobody_left()
    check_outputs(notebook)
    check_answers(notebook.cells, shortened)
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    printed = "".join(output.get("text", "") for output in outputs)
    assert re.findall("exercise: (no answer yet|not yet|right)", printed) == verdicts
    assert "your code raises" not in printed, "mistakes are noticed by what they find"


def test_check(capsys):
    """What is right, whatever its form; what is wrong is told, and does not stop a notebook."""
    pair = np.array([1, 2]), np.array([3.0])
    right = [(8, 8), ([8], 8), (8, np.array([8])), ([0.5, 1], [0.5, 1 + 1e-7]), ([], [])]
    right += [("dgf", "DFG"), (["G", "F", "D"], "DFG"), (lambda: 8, 8)]
    right += [(([1, 2], [3]), pair), ([np.array([1, 2]), 3], pair), (torch.tensor([1, 2]), [1, 2])]
    for answer, known in right:
        draw.check(answer, known)
        assert capsys.readouterr().out == "exercise: right\n", answer
    wrong = [(9, 8), ([8, 8], 8), ([], 8), ([[1], [2, 3]], [1, 2]), ("eight", 8), ({8}, 8)]
    wrong += [(np.nan, 8), ([1, None], [1, 2]), ("DFGA", "DFG"), ("DF", "DFG"), (3, "DFG")]
    wrong += [([1, 2, 3], pair), (3, pair), (([1], [2, 3]), pair), (([1, 2], [4]), pair)]
    wrong += [(lambda: 1 / 0, 8), (lambda: [][1], pair), (torch.ones(1, requires_grad=True), 8)]
    for answer, known in wrong:
        draw.check(answer, known)
        assert capsys.readouterr().out.startswith("exercise: not yet: "), answer
    for answer in (None, [None, None], lambda: None, lambda: [None]):
        draw.check(answer, pair)
        assert capsys.readouterr().out == "exercise: no answer yet\n"
    draw.check(lambda: 1 / 0, 8)
    assert "ZeroDivisionError" in capsys.readouterr().out


def test_check_cases(capsys):
    """The first fault of a reader's function is told."""
    answers = {"": "right", None: "no answer yet", "it is 9": "not yet: it is 9; think again"}
    for fault, verdict in answers.items():
        draw.check_cases(lambda case: fault if case else "", [(0,), (1,), (0,)])
        assert capsys.readouterr().out.startswith(f"exercise: {verdict}")
    draw.check_cases(lambda: 1 / 0, [()])
    assert "not yet: your code raises" in capsys.readouterr().out


def looks(handle):
    """How an entry of a legend looks without colour, and its grey, of 255."""
    if hasattr(handle, "get_hatch"):
        kind, color = handle.get_hatch(), handle.get_facecolor()
    else:
        kind, color = (handle.get_marker(), handle._unscaled_dash_pattern), handle.get_color()
    return str(kind), 255 * np.dot(to_rgb(color), (0.299, 0.587, 0.114))


def test_legends_in_grey():
    """Any two entries of a legend differ by line, marker or hatch, or else their greys do."""
    learned = {task: draw.load_result(task) for task in ("pointnav", "pointnav-blind")}
    transfer = draw.load_result("transfer")["runs"]
    decisions = draw.load_result("evolution-CartPole-v1")["trials"][0]["decisions"]
    seconds_NK = draw.step_times(2, 0.4, 0.6)
    curve = [[0, 10], [0.0, 2.0]]
    curves = {"clock/minutes": curve, "charts/episodic_return": curve}
    run = {"minutes": 2.0, "curves": curves}
    figures = {
        "compare_samplers": draw.compare_samplers(seconds_NK, 4, 2, 0.05, 1.0),
        "scaling_curves": draw.scaling_curves(draw.load_result("scaling")["found"]),
        "learning_curves": draw.learning_curves(learned),
        "minutes_curves": draw.minutes_curves(draw.load_result("minutes")["found"]),
        "transfer_curves": draw.transfer_curves(transfer, dict.fromkeys(transfer, "return")),
        "evolution": draw.evolution(decisions),
        "chain_view": draw.chain_and_distance(draw.load_result("rearrange")),
        "parts_panels": draw.parts_panels({"states": ("charts/episodic_return", ([run], [run]))}),
        "race_panels": draw.race_panels(draw.load_result("race")["found"]),
    }
    functions = inspect.getmembers(draw, inspect.isfunction)
    own = {name for name, function in functions if ".legend(" in inspect.getsource(function)}
    assert own == {*figures, "legend"}  # whose colours are the notebooks'
    for name, figure in figures.items():
        found = [*figure.legends, *(axis.get_legend() for axis in figure.axes)]
        entries = [list(map(looks, legend.legend_handles)) for legend in found if legend]
        assert entries, name
        for of_legend in entries:
            for (kind, grey), (other, its_grey) in itertools.combinations(of_legend, 2):
                assert kind != other or abs(grey - its_grey) >= 40, name
        plt.close(figure)


def test_compare_guess(capsys):
    """How far off a guess is; no guess stops a notebook."""
    for guess, value, said in (
        (None, 2.0, "no guess yet: write one above, or set reveal=True here\n"),
        (3, 2.0, "computed: 2 s; your guess: 3, 1.50 times as much\n"),
        ([1.0], np.float32(2), "[1.0] is not a number: your guess should be one\n"),
        (np.array(1), 0, "computed: 0 s; your guess: 1, +1\n"),
        (-1, 1.25, "computed: 1.25 s; your guess: -1, -2.25\n"),
        ("two", 2, "'two' is not a number: your guess should be one\n"),
    ):
        draw.compare_guess(guess, value, "s")
        assert capsys.readouterr().out == said
    draw.compare_guess(None, 2.0, "s", reveal=True)
    assert capsys.readouterr().out == "computed: 2 s\n"


def test_first_cell(tmp_path):
    """All notebooks begin by the same cell: it finds the repository from its root, from its folder
    of notebooks, and elsewhere it fetches it."""
    cells = [nbformat.read(path, as_version=4).cells[1] for path in NOTEBOOKS]
    (source,) = {cell.source for cell in cells}
    (tmp_path / "first_cell.py").write_text(f'{source}\nprint(find_spec("ver_ppo").origin)')
    command = [sys.executable, tmp_path / "first_cell.py"]
    fetched = tmp_path / "ver-readable"
    # without this, git refuses to clone a repository that belongs to another user
    config = tmp_path / "gitconfig"
    config.write_text("[safe]\n\tdirectory = *\n")
    more = os.environ | {"VER_REPOSITORY": str(ROOT), "GIT_CONFIG_GLOBAL": str(config)}
    for folder, found in ((ROOT, ROOT), (ROOT / "notebooks", ROOT), (tmp_path, fetched)):
        done = subprocess.run(command, cwd=folder, env=more, capture_output=True, text=True)
        assert done.stdout.strip() == str(found / "ver_ppo.py"), done.stderr


@EACH
def test_committed_outputs(path):
    """The outputs in the repository are those of a whole run, and small."""
    notebook = nbformat.read(path, as_version=4)
    check_outputs(notebook)
    counts = [cell.execution_count for cell in notebook.cells if cell.cell_type == "code"]
    assert counts == list(range(1, len(counts) + 1)), "run from top to bottom, once"
    assert path.stat().st_size < 500_000


def test_notebooks_import():
    """Nothing that the scripts define is defined in a notebook (except in notebook 0, which builds
    a small VER of its own), and the links between the notebooks lead somewhere."""
    shipped = set(re.findall(r"^(?:def|class) (\w+)", (ROOT / "ver_ppo.py").read_text(), re.M))
    shipped |= set(
        re.findall(r"^(?:def|class) (\w+)", (ROOT / "ver_multigpu.py").read_text(), re.M)
    )
    numbers = range(len(NOTEBOOKS))
    assert [path.name[:2] for path in NOTEBOOKS] == [f"{number:02}" for number in numbers]
    for path in NOTEBOOKS:
        cells = nbformat.read(path, as_version=4).cells
        code = "\n".join(cell.source for cell in cells if cell.cell_type == "code")
        own = set(re.findall(r"^(?:def|class) (\w+)", code, re.M))
        assert not shipped & own or path.name.startswith("00"), path
        for link in re.findall(r"\]\(([\w/.]+\.ipynb)\)", "\n".join(cell.source for cell in cells)):
            assert (path.parent / link).exists(), link


def first_rollout(cells, letter):
    """The columns of a copy's first rollout in the bug hunt's laboratory, but for times."""
    copy = cells["open_copy"](letter)
    copy.collect()
    copy.advantages()
    times = {"inference_at", "sent_at", "began_at"}
    columns = {name: copy.learned[name] for name in set(copy.learned.dtype.names) - times}
    return columns | {"bootstrap": copy.rollout.bootstrap}


def test_bug_hunt():
    """Each copy has its fault and no other one, the tools that should find it do, and the shipped
    loop passes all of them."""
    cells = {}
    for cell in nbformat.read(ROOT / "notebooks" / "09_bug_hunt.ipynb", as_version=4).cells[2:]:
        trains = "train_copy(" in cell.source or "curves" in cell.source
        if cell.cell_type == "code" and not trains:
            exec(cell.source.replace("draw.setup()", ""), cells)
    plt.close("all")
    # what is different in a first rollout, with the same random numbers
    targets = {"advantage", "norm_advantage", "returns"}
    differs = {"A": targets | {"reward"}, "D": {"norm_advantage"}, "H": targets}
    differs |= {"E": targets | {"bootstrap"}, "B": set(), "C": set(), "G": set()}
    shipped = first_rollout(cells, "shipped")
    for letter, names in differs.items():
        found = first_rollout(cells, letter)
        assert {name for name in shipped if (found[name] != shipped[name]).any()} == names, letter
    begins = shipped["first"]
    assert not shipped["state"][begins].any()
    assert first_rollout(cells, "F")["state"][first_rollout(cells, "F")["first"]].any()
    # what each tool finds
    wrong = {}
    kinds = "carried", "behind carried", "tail", "other"
    for letter, errors in cells["errors"].items():
        wrong[letter] = [kind for kind in kinds if (errors[kind] > 1e-4) != (kind in kinds[:2])]
    assert wrong == dict.fromkeys("ABDEFH", []) | {"C": ["tail"], "G": ["carried"]}
    expected = cells["reached"]("shipped")
    for letter, counts in cells["counts"].items():
        wrong[letter] = [place for place in expected if counts[place] != expected[place]]
    assert wrong.pop("H") and cells["counts"]["H"]["end: idle"][1] > 0  # other environments
    assert wrong == dict.fromkeys("BCDFG", []) | {"A": ["truncated: final"], "E": ["end: idle"]}
    for letter in (*"ABCDEFGH", "shipped"):
        _, advantage_S, pull_S = cells["count_steps"](letter)
        assert (advantage_S == 1).all() == (letter not in "EH")
        assert (pull_S == 0).all() == (letter not in "DEH")
        used = np.flatnonzero(cells["used"](letter))
        assert used.tolist() == [*(range(11) if letter == "B" else range(13, 24)), *range(24, 31)]
    says = "memory must be zero where an episode begins"
    assert cells["said"] == dict.fromkeys("ABCDEFGH", "nothing") | {"F": says}
    assert cells["check_says"]("shipped") == "nothing"
    # the letters of the check are those that the tools find; check_rollout finds F
    assert "".join(sorted("".join(bug_hunt.FOUND_BY.values()))) == "ABCDEGH"
    assert sorted(bug_hunt.FAULTS.values()) == list(range(1, 9))
    for number, letter in enumerate("ECFGAHBD", 1):
        assert bug_hunt.FAULTS[letter] == number
        assert f"Fault {number}" in bug_hunt.COPIES[letter].__doc__


def test_bug_hunt_is_training():
    """The correct loop of the bug hunt learns what the shipped functions learn, bit for bit."""
    learned = []
    for by_parts in (True, False):
        torch.manual_seed(5)
        options = ver_ppo.Options(num_envs=3, num_steps=8, num_minibatches=4, hidden_size=8)
        workers = virtual_clock.VirtualWorkers(3, lambda e, step: (1.0, 1.7, 3.6)[e])
        loop = bug_hunt.open_copy("shipped", workers, options)
        for _ in range(3):
            loop.collect()
            if by_parts:
                loop.advantages()
                loop.learn()
                continue
            ver_ppo.add_advantages(loop.rollout, options)
            loop.policy.train()
            ver_ppo.ppo_update(loop.policy, loop.optimizer, loop.rollout, options)
            ver_ppo.update_statistics(loop.policy, loop.rollout, 1.0, bug_hunt.alone)
            loop.policy.eval()
            loop.version += 1
        learned.append(torch.cat([weight.flatten() for weight in loop.policy.parameters()]))
    assert torch.equal(*learned)


@pytest.mark.parametrize("task", ["Flee", "Explore"])
def test_transfer_tasks(task):
    """Rewards add up to the metric, the goal says nothing, spaces are PointNav's."""
    env_id = f"notebooks.environments.tasks:{task}-v0"
    options = ver_ppo.Options(env_id=env_id, env_kwargs=("simulator=builtin", "image_size=16"))
    env, plain = ver_ppo.make_env(options, "val", 3), PointNav("val", image_size=16)
    assert env.observation_space == plain.observation_space
    assert env.action_space == plain.action_space
    rng, (name,), inner = np.random.default_rng(0), env.metadata["metrics"], env.unwrapped
    for seed in range(5):
        observation, _ = env.reset(seed=seed)
        plain.reset(seed=seed)
        assert inner.plan is plain.plan and observation["goal"].tolist() == [1, 1, 0]
        start, places, total = inner.position, {tuple(np.floor(inner.position))}, 0.0
        for _ in range(60):
            observation, reward, terminated, truncated, info = env.step(
                int(rng.choice([1, 1, 1, 2, 3]))
            )
            total += reward
            places.add(tuple(np.floor(inner.position)))
            assert observation["goal"].tolist() == [1, 1, 0] and not terminated
        if task == "Flee":
            assert info[name] == pytest.approx(total)
            assert info[name] >= np.hypot(*(inner.position - start)) - 1e-6
        else:
            assert info[name] == len(places) == total + 1
        assert env.step(0)[2]


def test_transfer_command(tmp_path):
    """The command in their file: ver_ppo.py runs as a script, and in worker processes, while the
    tasks import it."""
    small = "--num-envs 2 --num-steps 8 --total-timesteps 16 --hidden-size 16 --device cpu"
    small += " --env-kwargs image_size=16"
    args = f"--num-workers 0 --eval-episodes 0 --runs-dir {tmp_path / 'pointnav'} {small}"
    assert ver_ppo.main([*args.split(), "simulator=builtin"]) == 0
    (checkpoint,) = tmp_path.glob("pointnav/*/checkpoint.pt")
    command = "ver_ppo.py --env-id notebooks.environments.tasks:Flee-v0"
    command += f" --extensions transfer(file={checkpoint},freeze=True,reset=critic)"
    command += f" --num-workers 1 --eval-episodes 2 --runs-dir {tmp_path / 'flee'} {small}"
    done = subprocess.run(
        [sys.executable, *command.split()], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("simulator: ") == 1, "by the main process, once"
    assert "tensors come from" in done.stdout
    assert re.search(r"distance_from_start [\d.]+ \+-", done.stdout)
