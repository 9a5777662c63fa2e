"""Small realistic faults of ver_ppo.py's lesson and of ver_multigpu.py, for benchmarks/mutants.py.

A mutant replaces a text that its file has exactly once. The lists below hold three texts for each
mutant: what is wrong, the original and its replacement. test_docs.py checks that every mutant can
still be planted.
"""

from dataclasses import dataclass

COLLECTING = [
    # ------------------------------------------------------------------- when an environment acts
    (
        "nover and sync have no quota",
        'return self.rollout_steps if self.sampler == "ver" else self.num_steps',
        "return self.rollout_steps",
    ),
    (
        "one step more than the quota is allowed",
        "self.given_N[env_B] < self.options.quota",
        "self.given_N[env_B] <= self.options.quota",
    ),
    (
        "steps given to earlier rollouts count against the quota",
        "self.given_N[:] = 0",
        "pass",
    ),
    (
        "an environment's steps are not counted",
        "self.given_N[env_B] += 1",
        "self.given_N[env_B] = 1",
    ),
    (
        "actions are still sent after the rollout has ended",
        "(self.given_N[env_B] < self.options.quota) & (not ended)",
        "self.given_N[env_B] < self.options.quota",
    ),
    (
        "environments that became idle in earlier rounds are forgotten",
        "self.idle = np.append(self.idle, env_B[~wanted_B])",
        "self.idle = env_B[~wanted_B]",
    ),
    (
        "idle environments stay idle after they got an action",
        "self.idle = np.zeros(0, int)\n        ended",
        "ended",
    ),
    (
        "steps in flight are sent again by the next policy",
        "self.act(self.idle)  # before",
        "self.act(np.append(self.idle, np.flatnonzero(self.in_flight_N)))  # before",
    ),
    (
        "nobody asks whether a rollout ends early",
        "return rollout.rows == rollout.capacity or self.enough(rollout.rows)",
        "return rollout.rows == rollout.capacity",
    ),
    (
        "a start counts as a step",
        "stepped_B = env_B[self.in_flight_N[env_B]]",
        "stepped_B = env_B",
    ),
    (
        "a step that was completed stays in flight",
        "self.in_flight_N[env_B] = False",
        "pass",
    ),
    # -------------------------------------------------------------------------- dynamic batching
    (
        "more answers are taken than the rollout has room for",
        "env_B = np.array(self.arrived[:room], int)",
        "env_B = np.array(self.arrived, int)",
    ),
    (
        "answers beyond the room are forgotten",
        "self.arrived = self.arrived[room:]",
        "self.arrived = []",
    ),
    (
        "the newest answers are taken first",
        "env_B = np.array(self.arrived[:room], int)\n",
        "self.arrived.reverse()\n        env_B = np.array(self.arrived[:room], int)\n",
    ),
    (
        "nobody looks for new answers while older ones wait",
        "self.arrived += self.workers.receive(0)",
        "self.arrived += [] if self.arrived else self.workers.receive(0)",
    ),
    (
        "sync does not wait for all environments",
        'needed = self.options.num_envs if self.options.sampler == "sync" else 1',
        "needed = 1",
    ),
    (
        "the order of a lock-step depends on chance",
        "self.arrived.sort()",
        "pass",
    ),
    # ------------------------------------------------------------------ what the policy is given
    (
        "the previous action is a step too old",
        'step_B["prev_action"] = step_B["action"]',
        "pass",
    ),
    (
        "memory passes from an episode to the next",
        'step_B["state"][first_B] = 0.0',
        "pass",
    ),
    (
        "memory is that of a step before",
        'step_B["state"] = self.state_N[env_B]',
        "pass",
    ),
    (
        "memory is never kept",
        "self.state_N[env_B] = numbers[:, state_at:].reshape(after_B.shape)",
        'self.state_N[env_B] = step_B["state"]',
    ),
    (
        "the policy sees final observations",
        'self.observe(env_B, io["obs"], io["first"][env_B])',
        'self.observe(env_B, io["final_obs"], io["first"][env_B])',
    ),
    (
        "training takes the most probable actions",
        "distribution.mode if self.greedy else distribution.sample()",
        "distribution.mode",
    ),
    # ------------------------------------------------------------------------ what a step stores
    (
        "the memory after a step is stored with it",
        "self.pending.records[env_B] = step_B",
        'step_B["state"] = after_B\n        self.pending.records[env_B] = step_B',
    ),
    (
        "a step does not know that it begins an episode",
        'step_B["first"] = first_B',
        'step_B["first"] = False',
    ),
    (
        "the action itself is stored as the previous one",
        'step_B["action"] = numbers[:, 2:state_at]',
        'step_B["action"] = step_B["prev_action"] = numbers[:, 2:state_at]',
    ),
    (
        "the version of the policy is not stored",
        'step_B["version"] = self.version',
        "pass",
    ),
    (
        "a carried step gets the version of the present policy",
        "rollout.records[row_B] = step_B",
        'step_B["version"] = self.version\n        rollout.records[row_B] = step_B',
    ),
    (
        "a carried step gets a log-probability of the present policy",
        "rollout.records[row_B] = step_B\n",
        "if len(env_B):\n"
        "            now, _, _ = self.infer(step_B)\n"
        '            step_B["log_prob"] = now.log_prob(torch.from_numpy(step_B["action"]))\n'
        "        rollout.records[row_B] = step_B\n",
    ),
    # --------------------------------------------------------------------------- ends of episodes
    (
        "a truncated step does not end its episode",
        'io["terminated"][env_B] | truncated_B | lost_B',
        'io["terminated"][env_B] | lost_B',
    ),
    (
        "a lost step does not end its episode",
        'io["terminated"][env_B] | truncated_B | lost_B',
        'io["terminated"][env_B] | truncated_B',
    ),
    (
        "a lost step can be truncated",
        'io["truncated"][env_B] & ~lost_B',
        'io["truncated"][env_B]',
    ),
    (
        "the reward of a lost step is 0",
        'step_B["reward"][lost_B] = step_B["value"][lost_B]',
        'step_B["reward"][lost_B] = 0.0',
    ),
    (
        "a truncated episode's value is that of the next episode's first observation",
        'self.values(env_B[truncated_B], io["final_obs"], first_B)',
        'self.values(env_B[truncated_B], io["obs"], first_B)',
    ),
    (
        "a truncated episode's value is computed without memory",
        "first_B = np.zeros(truncated_B.sum(), bool)",
        "first_B = np.ones(truncated_B.sum(), bool)",
    ),
    (
        "a truncated episode's value is not discounted",
        "+= self.options.gamma * value_B",
        "+= value_B",
    ),
    # --------------------------------------------------------------------------- bootstrap values
    (
        "idle environments bootstrap from the value of their last step",
        "if len(self.idle):",
        "if False:",
    ),
    (
        "idle environments bootstrap from final observations",
        'self.values(self.idle, self.io["obs"], first_B)',
        'self.values(self.idle, self.io["final_obs"], first_B)',
    ),
    (
        "idle environments bootstrap without memory",
        'first_B = self.io["first"][self.idle]',
        "first_B = np.ones(len(self.idle), bool)",
    ),
    (
        "steps in flight do not bootstrap",
        'value_N = self.pending["value"].copy()',
        'value_N = np.zeros_like(self.pending["value"])',
    ),
]
RETURNS = [
    (
        "a lost step keeps its weight",
        ' * ~steps["lost"]',
        "",
    ),
    (
        "the advantage flows through an episode's end",
        "next_advantage[segment] = 0.0",
        "pass",
    ),
    (
        "the value flows through an episode's end",
        "next_value[segment] = 0.0",
        "pass",
    ),
    (
        "the advantage is not discounted",
        "delta + gamma * gae_lambda * next_advantage[segment]",
        "delta + gae_lambda * next_advantage[segment]",
    ),
    (
        "lambda is 1",
        "delta + gamma * gae_lambda * next_advantage[segment]",
        "delta + gamma * next_advantage[segment]",
    ),
    (
        "the next value is not discounted",
        "reward_S[step] + gamma * next_value[segment]",
        "reward_S[step] + next_value[segment]",
    ),
    (
        "segments share the advantage that follows",
        "next_advantage[segment] = advantage_S[step]",
        "next_advantage[:] = advantage_S[step]",
    ),
    (
        "segments do not bootstrap",
        "next_value = bootstrap.astype(float)",
        "next_value = np.zeros(len(bootstrap))",
    ),
    (
        "the target of a value is its advantage",
        'steps["returns"] = steps["value"] + steps["advantage"]',
        'steps["returns"] = steps["advantage"]',
    ),
    (
        "slow environments are weighted up",
        "np.minimum(1.0, fair / np.maximum(given_N, 1))",
        "fair / np.maximum(given_N, 1)",
    ),
    (
        "single steps of a short rollout are weighted down",
        "fair = max(1.0, len(env_S) / num_envs)",
        "fair = len(env_S) / num_envs",
    ),
    (
        "the fair share is that of the environments that gave steps",
        "fair = max(1.0, len(env_S) / num_envs)",
        "fair = max(1.0, len(env_S) / (given_N > 0).sum())",
    ),
]
SEQUENCES = [
    (
        "steps of a segment may change their order",
        'order_S = np.argsort(segment_S, kind="stable")',
        "order_S = np.argsort(segment_S)",
    ),
    (
        "a sequence goes on into the next episode",
        "np.flatnonzero(changes | first_S[order_S])",
        "np.flatnonzero(changes)",
    ),
    (
        "sequences are cut where steps of other rows begin episodes",
        "np.flatnonzero(changes | first_S[order_S])",
        "np.flatnonzero(changes | first_S)",
    ),
    (
        "steps that do not divide evenly are dropped",
        "cuts = len(line) * np.arange(count + 1) // count",
        "cuts = len(line) // count * np.arange(count + 1)",
    ),
    (
        "a sequence that ends at a cut leaves an empty one",
        "inside = ends[(low < ends) & (ends < high)]",
        "inside = ends[(low <= ends) & (ends < high)]",
    ),
    (
        "sequences are packed one after the other",
        "return packed.data, packed.batch_sizes",
        "return torch.cat(tensors), packed.batch_sizes",
    ),
    (
        "sequences begin with the memory of other steps",
        "index_M[: batch_sizes[0]]",
        "index_M[-batch_sizes[0] :]",
    ),
]
LEARNING = [
    (
        "sequences are not shuffled",
        "torch.randperm(len(sequences)).tolist()",
        "range(len(sequences))",
    ),
    (
        "there is only one epoch",
        "for _ in range(options.update_epochs):",
        "for _ in range(1):",
    ),
    (
        "one rollout may move the scale of values without limit",
        "square = min(old**2 + NEWEST_SHARE * (square - old**2), 4 * old**2)",
        "square = old**2 + NEWEST_SHARE * (square - old**2)",
    ),
    (
        "the bias does not follow the scale of values",
        "self.bias *= old / new",
        "pass",
    ),
    (
        "each process has its own scale of values",
        "average([newest])",
        "pass",
    ),
    (
        "advantages keep their mean",
        "(advantage_S - mean) / divisor",
        "advantage_S / divisor",
    ),
    (
        "the deviation of advantages is their root mean square",
        "math.sqrt(max(1e-16, square - mean**2))",
        "math.sqrt(max(1e-16, square))",
    ),
    (
        "each process normalizes its own advantages",
        "average([moments])",
        "pass",
    ),
    (
        "without --norm-adv, advantages keep their unit",
        "divisor = scale",
        "divisor = 1.0",
    ),
    (
        "gradients of mini-batches add up",
        "optimizer.zero_grad()",
        "pass",
    ),
    (
        "the policy's own loss is not learned",
        "(loss + auxiliary_loss).backward()",
        "loss.backward()",
    ),
    (
        "gradients are not averaged over processes",
        "average([weight.grad for weight in learned])",
        "pass",
    ),
    (
        "gradients are clipped before they are averaged",
        "average([weight.grad for weight in learned])",
        "nn.utils.clip_grad_norm_(learned, options.max_grad_norm)\n"
        "    average([weight.grad for weight in learned])",
    ),
    (
        "the entropy coefficient's gradient counts in the norm",
        "[weight for weight in learned if weight is not policy.log_ent_coef]",
        "learned",
    ),
    (
        "gradients are not clipped",
        "norm = nn.utils.clip_grad_norm_(network, options.max_grad_norm)",
        "norm = nn.utils.clip_grad_norm_(network, math.inf)",
    ),
    (
        "a gradient that is not finite is learned",
        "if finite:",
        "if True:",
    ),
    (
        "skipped mini-batches are those that were learned",
        "(~finite).float()",
        "finite.float()",
    ),
    (
        "bounds of weights are not kept",
        "policy.keep_bounds()  # clamps",
        "pass  # clamps",
    ),
    (
        "the ratio is upside down",
        'distribution.log_prob(batch["action"]) - batch["log_prob"]',
        'batch["log_prob"] - distribution.log_prob(batch["action"])',
    ),
    (
        "ratios are clipped only from below",
        "ratio_M.clamp(1 - options.clip_coef, 1 + options.clip_coef)",
        "ratio_M.clamp(min=1 - options.clip_coef)",
    ),
    (
        "the larger objective counts",
        "torch.minimum(ratio_M * advantage_M, clipped_M * advantage_M)",
        "torch.maximum(ratio_M * advantage_M, clipped_M * advantage_M)",
    ),
    (
        "the policy gets worse",
        "policy_loss = -(weight_M * objective_M).mean()",
        "policy_loss = (weight_M * objective_M).mean()",
    ),
    (
        "weights do not count in the policy's loss",
        "policy_loss = -(weight_M * objective_M).mean()",
        "policy_loss = -objective_M.mean()",
    ),
    (
        "the policy's loss is divided by the sum of the weights",
        "policy_loss = -(weight_M * objective_M).mean()",
        "policy_loss = -(weight_M * objective_M).sum() / weight_M.sum()",
    ),
    (
        "weights do not count in the loss of values",
        "value_loss = 0.5 * (weight_M * error_M**2).mean()",
        "value_loss = 0.5 * (error_M**2).mean()",
    ),
    (
        "errors of values are in the environment's unit",
        '(value_M - batch["returns"]) / batch["scale"]',
        'value_M - batch["returns"]',
    ),
    (
        "weights do not count in the entropy bonus",
        "entropy_bonus = (weight_M * entropy_M).mean()",
        "entropy_bonus = entropy_M.mean()",
    ),
    (
        "entropy is punished",
        "- ent_coef.detach() * entropy_bonus",
        "+ ent_coef.detach() * entropy_bonus",
    ),
    (
        "the entropy bonus moves its own coefficient",
        "- ent_coef.detach() * entropy_bonus",
        "- ent_coef * entropy_bonus",
    ),
    (
        "the entropy coefficient moves away from its target",
        "(entropy_M.mean().detach() - options.target_entropy)",
        "(options.target_entropy - entropy_M.mean().detach())",
    ),
    (
        "skipped mini-batches count in the logs",
        "table[~skipped].mean(dim=0)",
        "table.mean(dim=0)",
    ),
]
RANKS = [
    (
        "gradients of ranks add up",
        "(flat / self.size)",
        "flat",
    ),
    (
        "the failure of the highest rank is raised",
        "for known in self.gather(failure):",
        "for known in reversed(self.gather(failure)):",
    ),
    (
        "a rank does not leave an update when another one got a signal",
        "if stops.item():",
        "if self.signal is not None:",
    ),
    (
        "rank 0 answers keys of an earlier start",
        'store.delete_key(f"rank {other}")',
        "pass",
    ),
    # ------------------------------------------------------------------------------- S* and Time
    (
        "the slowest group is done first",
        "rate_G = np.sort(rate_G)[::-1]",
        "rate_G = np.sort(rate_G)",
    ),
    (
        "groups that are done still give steps",
        "np.maximum(0.0, rate_G.sum() - np.cumsum(rate_G))",
        "rate_G.sum()",
    ),
    (
        "learning takes no time",
        "(steps_G / (done_sec_G + learning_sec)).argmax()",
        "(steps_G / done_sec_G).argmax()",
    ),
    (
        "a rank gives as many steps as one environment",
        "most = num_steps * rate_RN.shape[1]",
        "most = num_steps",
    ),
    (
        "S* is rounded down by a whole step",
        "int(steps_G[best] + 1e-6)",
        "int(steps_G[best] - 1e-6)",
    ),
    (
        "too few ranks must be done",
        "math.ceil(num_ranks * sync_frac - 1e-9)",
        "math.floor(num_ranks * sync_frac)",
    ),
    (
        "rounding errors ask for one rank more",
        "math.ceil(num_ranks * sync_frac - 1e-9)",
        "math.ceil(num_ranks * sync_frac + 1e-9)",
    ),
    # ------------------------------------------------------------------------------- step seconds
    (
        "environments that were done early seem slow",
        "np.where(given_N >= quota, last_N, rollout.ended_at)",
        "np.where(given_N > quota, last_N, rollout.ended_at)",
    ),
    (
        "a step's time ends when it begins",
        'steps["began_at"] + steps["step_sec"]',
        'steps["began_at"]',
    ),
    (
        "an environment without a step forgets its last known time",
        "np.maximum(known_N, spent_N)",
        "spent_N",
    ),
    # ------------------------------------------------------------------------------------ fill up
    (
        "the newest of the old steps are dropped",
        "learned.records[:stale] = learned.records[rollout.rows :]",
        "pass",
    ),
    (
        "new steps take the place of the oldest ones",
        "learned.records[stale:] = rollout.complete",
        "learned.records[: rollout.rows] = rollout.complete",
    ),
    (
        "old steps join new ones in one segment",
        'learned.num_envs + learned["env"][:stale]',
        'learned["env"][:stale]',
    ),
    (
        "old steps of all environments are one segment",
        'learned.num_envs + learned["env"][:stale]',
        "learned.num_envs",
    ),
    # ---------------------------------------------------------------------------- when to preempt
    (
        "a rank without a quarter of its steps is preempted",
        'quarter if options.preemption == "threshold" else 1',
        "1",
    ),
    (
        "a rank without a step is preempted",
        'quarter if options.preemption == "threshold" else 1',
        'quarter if options.preemption == "threshold" else 0',
    ),
    (
        "steps are counted again at each look",
        "news = rows - self.counted",
        "news = rows",
    ),
    (
        "steps of the rollout before count as counted",
        "self.counted = 0",
        "pass",
    ),
    (
        "a rank counts as done before it is",
        "news = int(done)",
        "news = 1",
    ),
    (
        "a rank that is done is not counted",
        "self.count(rollout.rows, done=True)",
        "self.count(rollout.rows)",
    ),
    (
        "nobody notices that another rank stalls",
        "or time.monotonic() > self.latest",
        "",
    ),
    (
        "without a prediction, rollouts end at once",
        "(PATIENCE * self.predicted_sec or math.inf)",
        "PATIENCE * self.predicted_sec",
    ),
    (
        "a rank does not end when another one cannot continue",
        "self.preempted = total >= STOP or (due and rows >= self.min_steps)",
        "self.preempted = due and rows >= self.min_steps",
    ),
    (
        "the start of environments predicts the second rollout",
        "predictable = self.step > self.initial_step and self.ranks.size > 1",
        "predictable = self.ranks.size > 1",
    ),
    (
        "one rank preempts itself",
        "predictable = self.step > self.initial_step and self.ranks.size > 1",
        "predictable = self.step > self.initial_step",
    ),
    (
        "rollouts of every sampler count as variable",
        'step_sec_RN, options.num_steps, options.sampler == "ver", learning_sec',
        "step_sec_RN, options.num_steps, True, learning_sec",
    ),
    (
        "a rank decides by its own learning time",
        'logs["time/learning_sec"])',
        'own[1]["time/learning_sec"])',
    ),
    # --------------------------------------------------------------------------- logs of all ranks
    (
        "the largest value of all ranks is a mean",
        '{"_min": min, "_max": max}',
        '{"_min": min}',
    ),
    (
        "the share of old steps is that of one rank",
        "1 - sum(steps_R) / options.rollout_steps / len(steps_R)",
        "1 - steps_R[0] / options.rollout_steps",
    ),
    (
        "only the steps of rank 0 count",
        "return sum(steps_R), logs",
        "return steps_R[0], logs",
    ),
]


@dataclass(frozen=True)
class Mutant:
    """A fault of a file: `original`, a text of that file, becomes `replacement`."""

    file: str
    tests: tuple[str, ...]  # the files with the tests of this mechanism
    name: str  # what is wrong
    original: str
    replacement: str

    def plant(self, text):
        """The file's text with the fault. Raises ValueError if the file does not have the original
        exactly once."""
        count = text.count(self.original)
        if count != 1:
            reason = f"must occur once, and occurs {count} times: {self.original!r}"
            raise ValueError(f"{self.file}, mutant {self.name!r}: {reason}")
        return text.replace(self.original, self.replacement)


COLLECTORS = "test_samplers.py", "test_collection.py"
MUTANTS = [Mutant("ver_ppo.py", COLLECTORS, *each) for each in COLLECTING]
MUTANTS += [Mutant("ver_ppo.py", ("test_returns.py",), *each) for each in RETURNS]
MUTANTS += [Mutant("ver_ppo.py", ("test_packing.py",), *each) for each in SEQUENCES]
MUTANTS += [Mutant("ver_ppo.py", ("test_learning.py",), *each) for each in LEARNING]
MUTANTS += [Mutant("ver_multigpu.py", ("test_multigpu.py",), *each) for each in RANKS]
