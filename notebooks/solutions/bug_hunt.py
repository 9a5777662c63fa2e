"""The eight copies of the training loop of notebook 9. Each has one fault.

Read this file only after you have answered: from the middle on, it says which copy has which fault.
"""

import numpy as np
import torch

import ver_multigpu
import ver_ppo
from notebooks.extensions.virtual_clock import SPEC, VirtualWorkers


def alone(tensors):
    """Average tensors over all ranks. There is one, so this changes nothing."""


class TrainingLoop:
    """The loop of `ver_ppo.train` in parts, on the shipped functions. This one is correct.

    A rollout may end early, like that of a preempted rank. Then stale steps fill it up, as in
    `ver_multigpu.RankRun.advantages`.

        rollout       the new steps
        learned       the S steps to learn from: the new steps, after stale ones if any are needed
        policy        the network
        version       updates made
    """

    collector_class = ver_ppo.Collector

    def __init__(self, workers, options, spec=SPEC, policy_class=ver_ppo.Policy):
        self.options = options
        self.policy = policy_class(spec, options)
        self.policy.eval()  # it learns in train mode, and acts in this one, as in `Run.update`
        self.optimizer = torch.optim.Adam(
            self.policy.parameters(), lr=options.learning_rate, eps=1e-5
        )
        size = options.rollout_steps, options.num_envs, self.policy.state_shape
        self.rollout = ver_ppo.Rollout(spec, *size)
        self.learned = ver_ppo.Rollout(spec, *size)
        self.learned.rows = self.learned.capacity
        self.limit = self.rollout.capacity
        self.collector = self.collector_class(
            self.policy, workers, workers.io, spec, options, lambda rows: rows >= self.limit
        )
        self.version = 0
        self.scale = 1.0

    def collect(self, limit=None):
        """Collect a rollout of S steps. With a limit, it ends after that number of steps, as if
        this rank were preempted. (The first rollout must have S steps.)"""
        self.limit = limit or self.rollout.capacity
        self.collector.version = self.version
        self.collector.collect(self.rollout)

    def advantages(self):
        """Compute all that the loss needs: advantages, returns and weights of the new steps. Then
        fill up, and normalize the advantages."""
        self.compute_returns()
        self.fill_up()
        critic = self.policy.critic
        critic.rescale(self.learned.complete["returns"], alone)
        self.scale = max(critic.scale.item(), 1e-8)
        self.normalize()

    def compute_returns(self):
        """Advantages, returns and weights of the new steps."""
        ver_ppo.add_advantages(self.rollout, self.options)

    def fill_up(self):
        """Make S steps to learn from."""
        ver_multigpu.fill_up(self.learned, self.rollout)

    def normalize(self):
        """Bring the advantages to mean 0 and deviation 1."""
        ver_ppo.normalize_advantages(self.learned, self.scale, self.options, alone)

    def sequences(self):
        """The sequences of the steps to learn from."""
        steps = self.learned.complete
        return ver_ppo.find_sequences(steps["segment"], steps["first"])

    def minibatches(self):
        """The mini-batches of one epoch, as `ver_ppo.ppo_update` makes them."""
        sequences = self.sequences()
        columns = ver_ppo.to_device(self.learned.complete, ver_ppo.LEARNED, torch.device("cpu"))
        shuffled = [sequences[q] for q in torch.randperm(len(sequences)).tolist()]
        batches = []
        for minibatch in ver_ppo.cut_minibatches(shuffled, self.options.num_minibatches):
            batch = ver_ppo.make_batch(columns, minibatch)
            batch["scale"] = self.scale
            batches.append(batch)
        return batches

    def learn(self):
        """One update: all epochs. Returns what `ppo_update` would log."""
        self.policy.train()
        logs = []
        for _ in range(self.options.update_epochs):
            for batch in self.minibatches():
                step = self.policy, self.optimizer, batch, self.options, alone
                logs.append(ver_ppo.minibatch_step(*step))
        ver_ppo.update_statistics(self.policy, self.learned, 1.0, alone)
        self.policy.eval()
        self.version += 1
        return ver_ppo.mean_logs(logs)


class ClockedEnvironments(VirtualWorkers):
    """Real environments in this process, whose steps take the time that a virtual clock says. So
    the environments are uneven, and every run is the same."""

    def __init__(self, options, spec, duration):
        super().__init__(options.num_envs, duration)
        self.io = ver_ppo.EnvIO(spec, options.num_envs)
        numbers = range(options.num_envs)
        self.environments = [
            ver_ppo.Environment(e, options, "train", spec, self.io) for e in numbers
        ]

    def answer(self, e):
        self.environments[e].answer()
        self.steps_N[e] += 1


# Do not read on before you have answered.
#
#
#
#
#
#
#
#
#
#
#
#
#
#
#
#
#
#
#
#
#
#
#
#
#
#
#
#
#
#


class CollectorOfA(ver_ppo.Collector):
    """Fault 5: truncated is treated as terminated."""

    def complete_steps(self, rollout, env_B, row_B):
        self.io["terminated"][env_B] |= self.io["truncated"][env_B]
        self.io["truncated"][env_B] = False  # so no V of the final observation is added
        super().complete_steps(rollout, env_B, row_B)


class A(TrainingLoop):
    """Fault 5."""

    collector_class = CollectorOfA


class B(TrainingLoop):
    """Fault 7: the oldest stale steps fill up a rollout, instead of the newest."""

    def fill_up(self):
        stale = self.learned.capacity - self.rollout.rows
        # `ver_multigpu.fill_up` first moves the old steps forward. Here the oldest ones stay
        self.learned.records[stale:] = self.rollout.complete
        self.learned["segment"][:stale] = self.learned.num_envs + self.learned["env"][:stale]


class C(TrainingLoop):
    """Fault 2: the tail of a cut sequence starts from zeros."""

    def minibatches(self):
        begins = [sequence[0] for sequence in self.sequences()]
        batches = super().minibatches()
        for batch in batches:
            first_rows = batch["row"][: len(batch["state"])]  # of each piece
            is_tail = torch.from_numpy(~np.isin(first_rows, begins))
            batch["state"][is_tail] = 0.0  # instead of the state that is stored with this step
        return batches


class D(TrainingLoop):
    """Fault 8: the weights are applied before the advantages are normalized."""

    def normalize(self):
        steps = self.learned.complete
        plain = steps["advantage"].copy()
        steps["advantage"] *= steps["weight"]
        super().normalize()
        steps["advantage"] = plain
        # `ppo_loss` multiplies by the weight. That must not weight the advantages twice
        steps["norm_advantage"] /= steps["weight"]


class CollectorOfE(ver_ppo.Collector):
    """Fault 1: idle environments are bootstrapped from `pending`."""

    def bootstrap_values(self):
        # right for steps in flight; of an idle environment, it is V of the step that is complete
        return self.pending["value"].copy()


class E(TrainingLoop):
    """Fault 1."""

    collector_class = CollectorOfE


class CollectorOfF(ver_ppo.Collector):
    """Fault 3: the memory is not reset where an episode begins."""

    def observe(self, env_B, obs, first_B):
        step_B = super().observe(env_B, obs, first_B)
        step_B["state"] = self.state_N[env_B]  # also where an episode begins
        return step_B


class F(TrainingLoop):
    """Fault 3."""

    collector_class = CollectorOfF


class CollectorOfG(ver_ppo.Collector):
    """Fault 4: a carried step gets a new log-probability, by the policy that learns from it."""

    @torch.inference_mode()
    def collect(self, rollout):
        env_B = np.flatnonzero(self.in_flight_N)
        if len(env_B):
            distribution, _, _ = self.infer(self.pending.records[env_B])
            action_BA = torch.from_numpy(self.pending["action"][env_B])
            self.pending["log_prob"][env_B] = distribution.log_prob(action_BA)
        super().collect(rollout)


class G(TrainingLoop):
    """Fault 4."""

    collector_class = CollectorOfG


class H(TrainingLoop):
    """Fault 6: the next row of the rollout is taken for the next step of the environment."""

    def compute_returns(self):
        super().compute_returns()
        steps = self.rollout.complete
        one_segment_S = np.zeros(len(steps), int)  # as if one environment had given all steps
        columns = [steps[name] for name in ("reward", "value", "done")]
        bootstrap = self.rollout.bootstrap[steps["segment"][-1:]]
        discounts = self.options.gamma, self.options.gae_lambda
        steps["advantage"] = ver_ppo.compute_advantages(
            one_segment_S, *columns, bootstrap, *discounts
        )
        steps["returns"] = steps["value"] + steps["advantage"]


COPIES = {"A": A, "B": B, "C": C, "D": D, "E": E, "F": F, "G": G, "H": H}
FAULTS = {"A": 5, "B": 7, "C": 2, "D": 8, "E": 1, "F": 3, "G": 4, "H": 6}
FOUND_BY = {"ratios": "CG", "million": "AEH", "counter": "BD"}


def open_copy(letter, *arguments, **more):
    """The copy with this letter; "shipped" is the correct loop. Other arguments: TrainingLoop's."""
    loop_class = TrainingLoop if letter == "shipped" else COPIES[letter]
    return loop_class(*arguments, **more)


def cleaned(answer):
    """An answer as a dictionary from letter to number, without the letters that are still None."""
    known = {str(letter).strip().upper(): number for letter, number in dict(answer).items()}
    return {letter: int(number) for letter, number in known.items() if number is not None}


def fault_of_answer(answer, tool):
    """Say why an answer is wrong, for `draw.check_cases`: "" if it has all letters that this tool
    finds, with their numbers, and `None` if there is no answer yet."""
    if not answer:
        return None
    try:
        found = cleaned(answer)
    except (TypeError, ValueError):
        return f'{answer!r} is not a dictionary such as {{"A": 1}}'
    if not found:
        return None
    wrong = [letter for letter, number in found.items() if FAULTS.get(letter) != number]
    if wrong:
        return f"{len(wrong)} of the letters that you give ({len(found)}) have another fault"
    missing = [letter for letter in FOUND_BY[tool] if letter not in found]
    if missing:
        return f"right so far, but this tool finds {len(missing)} more"
    return ""


def fault_of_missed(missed, right):
    """Say why a list of the faults that `check_rollout` misses is wrong: as `fault_of_answer`."""
    if missed is None:
        return None
    try:
        found = {int(number) for number in missed}
    except (TypeError, ValueError):
        return f"{missed!r} is not a list of numbers from 1 to 8"
    differ = len(found ^ set(right))
    return f"{differ} of the eight faults are on the wrong side" if differ else ""
