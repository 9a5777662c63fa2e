"""Collect in another process while the main process learns.

    python ver_ppo.py --env-id pointnav --extensions overlap
    python ver_ppo.py --env-id pointnav --extensions async --learning-rate 1e-3

`overlap` collects the next rollout, with any --sampler, while the policy learns from this one
(HTS-RL, Liu et al. 2020; VER appendix E). With `async`, environments never stop and fill
trajectories of T steps (Sample Factory's APPO, Petrenko et al. 2020). In both, steps can be older
than the policy that learns, and V-trace (Espeholt et al. 2018) corrects the returns. With many
GPUs, each rank overlaps. Use --preemption none there, because the collecting process cannot be told
to stop early.
"""

import contextlib
import itertools
import time

import numpy as np
import torch

import ver_ppo
from ver_ppo import EnvironmentFailure

SEED_OF_COLLECTOR = 3  # first number of ver_ppo.derive_seed


def flat_weights(policy):
    """Copy all weights and buffers of a policy into one vector."""
    return torch.cat([part.flatten().float() for part in policy.state_dict().values()])


def set_weights(policy, vector):
    """Copy a vector of `flat_weights` back into a policy."""
    parts = list(policy.state_dict().values())
    for part, numbers in zip(parts, vector.split([part.numel() for part in parts])):
        part.copy_(numbers.view(part.shape))


def start_process(body, *args):
    """Start a process that runs `body(pipe, *args)`. Returns the process and this side's end of the
    pipe. Each side has only its own end, so the pipe ends if the other side dies."""
    context = ver_ppo.process_context()
    pipe, other_end = context.Pipe()
    process = context.Process(target=body, args=(other_end, *args))
    process.start()
    other_end.close()
    return process, pipe


def death_of(process, name):
    """The error that says how this process died."""
    process.join(5)
    return EnvironmentFailure(f"{name} died with exit code {process.exitcode}")


class Overlap(ver_ppo.Run):
    """Another process collects the next rollout while the policy learns from this one."""

    preemptible = False
    max_lag = 1  # updates that the policy that acts may be behind (for --extensions check)

    def start(self):
        """As Run.start, with a process that collects."""
        seed = ver_ppo.derive_seed(ver_ppo.SEED_OF_LEARNER, self.options.seed, self.step)
        torch.manual_seed(seed)
        self.cleanup.enter_context(ver_ppo.caught_signals(self.note_signal))
        # without rows, because it gets those that the process has filled
        self.rollout = ver_ppo.Rollout(self.spec, 0, 0, self.policy.state_shape)
        self.collector = CollectingProcess(self)
        self.cleanup.callback(self.collector.close)
        self.cleanup.callback(self.save)

    def advantages(self, rollout):
        """As Run.advantages, but corrected for older steps."""
        add_corrected_advantages(self.policy, rollout, self.options)
        return rollout

    def update(self, rollout):
        """As Run.update. Then the collecting process gets the new weights."""
        logs = super().update(rollout)
        self.collector.publish(self.policy, self.version + 1)
        return logs


class CollectingProcess:
    """A collector in a process of its own, as `Run.collect` sees it.

    The process fills one of two rollouts while the learner uses the other. Until an update ends, it
    acts with the weights from before it. Then it acts with the new ones, also in the middle of a
    rollout. So the longer an update takes, the more of a rollout is one update old.

    Through the pipe, this process sends weights with their version, and None to ask for a rollout.
    The other process sends rollouts, or the error that ends the run. PyTorch moves tensors that are
    sent to shared memory.
    """

    def __init__(self, run):
        self.look = run.look
        self.version = run.version
        args = run.spec, run.options, run.step, run.collector_class
        self.process, self.pipe = start_process(collector_process, *args)
        self.publish(run.policy, run.version)
        self.pipe.send(None)

    def collect(self, rollout):
        """Wait for the next rollout, which takes the place of this one, and let the process fill
        the other one. If `look` ends the waiting, the rollout is empty. Raises EnvironmentFailure
        if the process has failed."""
        rollout.rows = 0
        while not self.pipe.poll(0.05):
            if self.look(0):
                return
        try:
            answer = self.pipe.recv()
            if isinstance(answer, Exception):
                raise answer
            self.pipe.send(None)
        except (EOFError, ConnectionError):
            raise death_of(self.process, "the collecting process") from None
        vars(rollout).clear()  # also the view of the earlier memory
        vars(rollout).update(vars(answer))

    def publish(self, policy, version):
        """Send the weights of this version. (`collect` notices if the process has died.)"""
        with contextlib.suppress(ConnectionError):
            self.pipe.send((version, flat_weights(policy).cpu()))

    def close(self):
        """End the process, which leaves when its pipe ends."""
        self.pipe.close()
        ver_ppo.end_process(self.process, 10)


def collector_process(pipe, spec, options, step, collector_class):
    """Body of the collecting process: fill two rollouts in turn, each when the main process asks
    for it. Ends when the main process closes the pipe or dies."""
    ver_ppo.lead_group()
    torch.set_num_threads(1)
    torch.manual_seed(ver_ppo.derive_seed(SEED_OF_COLLECTOR, options.seed, step))

    def act_with(version, weights):
        collector.version = version
        set_weights(policy, weights.to(collector.device))

    def take_weights(rows):
        """The collector calls this in every pass. Raises EOFError at the end of the pipe."""
        while pipe.poll():
            act_with(*pipe.recv())

    policy = ver_ppo.make_policy(spec, options)
    size = options.rollout_steps, options.num_envs, policy.state_shape
    try:
        rollouts = [ver_ppo.Rollout(spec, *size).share() for _ in range(2)]
        io = ver_ppo.EnvIO(spec, options.num_envs, episodes_before=step)
        workers = ver_ppo.make_workers(options, "train", spec, io)
        collector = collector_class(policy, workers, io, spec, options, take_weights)
        with contextlib.closing(workers), contextlib.suppress(EOFError, ConnectionError):
            for rollout in itertools.cycle(rollouts):
                while news := pipe.recv():
                    act_with(*news)
                collector.collect(rollout)
                pipe.send(rollout)
    except (EnvironmentFailure, *ver_ppo.LIMIT_ERRORS) as error:
        if not (isinstance(error, EnvironmentFailure) or ver_ppo.limit_of(error)):
            raise
        pipe.send(error)


class Trajectories(ver_ppo.Collector):
    """Collect as Sample Factory does (its section 3.1). Environments never stop. Each fills
    trajectories of T steps with the newest weights. A rollout consists of the first N finished
    trajectories, from any environments."""

    def __init__(self, policy, workers, io, spec, options, *more):
        super().__init__(policy, workers, io, spec, options, *more)
        size = options.rollout_steps, policy.state_shape
        self.unfinished = ver_ppo.Steps(spec, *size)  # T steps of each environment
        self.finished = []  # environments whose trajectory waits to be copied

    @torch.inference_mode()
    def collect(self, rollout):
        """Collect one rollout. Its segments are trajectories, and each bootstrap value is the value
        of the step after a trajectory."""
        rollout.started_at = time.perf_counter()
        rollout.rows = 0
        self.waited_sec = 0.0
        self.hand_over(rollout)
        while not self.has_ended(rollout):
            env_B = self.await_answers(room=self.options.num_envs)
            stepped_B = env_B[self.in_flight_N[env_B]]
            row_B = stepped_B * self.options.num_steps + self.given_N[stepped_B]
            self.complete_steps(self.unfinished, stepped_B, row_B)
            self.act(env_B)
            full_B = stepped_B[self.given_N[stepped_B] == self.options.num_steps]
            self.given_N[full_B] = 0
            self.finished += full_B.tolist()
            self.hand_over(rollout)
        rollout.ended_at = time.perf_counter()
        rollout.waited_sec = self.waited_sec

    def hand_over(self, rollout):
        """Copy finished trajectories into the rollout, while there is room."""
        steps = self.options.num_steps
        while self.finished and rollout.rows < rollout.capacity:
            e = self.finished.pop(0)
            segment = rollout.rows // steps
            first_row = rollout.rows
            rollout.rows += steps
            rollout.records[first_row : rollout.rows] = self.unfinished.records[e * steps :][:steps]
            rollout["segment"][first_row : rollout.rows] = segment
            rollout.bootstrap[segment] = self.pending["value"][e]


class Async(Overlap):
    """As Overlap, but environments never stop. The importance weights count the steps of each
    trajectory. Trajectories are equally long, so all steps weigh the same, even if fast
    environments gave more of them."""

    collector_class = Trajectories
    max_lag = 8  # the trajectory of a slow environment takes several updates


@torch.no_grad()
def reevaluate(policy, rollout, options):
    """Compute the inputs of V-trace for steps of older policies (IMPALA, section 4.1). Returns
    value_S, the current policy's values, and keep_S = min(1, ratio). The ratio is the action's
    probability now, divided by its probability when it was chosen."""
    value_S = np.zeros(rollout.rows, np.float32)
    keep_S = np.zeros(rollout.rows, np.float32)
    steps = rollout.complete
    sequences = ver_ppo.find_sequences(steps["segment"], steps["first"])
    columns = ver_ppo.to_device(steps, ver_ppo.LEARNED, next(policy.parameters()).device)
    for minibatch in ver_ppo.cut_minibatches(sequences, options.num_minibatches):
        batch = ver_ppo.make_batch(columns, minibatch)
        distribution, value_M, _ = ver_ppo.run_sequences(policy, batch)
        ratio_M = (distribution.log_prob(batch["action"]) - batch["log_prob"]).exp()
        found = torch.stack([value_M, ratio_M.clamp(max=1.0)]).cpu()  # one download
        value_S[batch["row"]] = found[0]
        keep_S[batch["row"]] = found[1]
    return value_S, keep_S


def vtrace_advantages(rollout, value_S, keep_S, gamma, gae_lambda):
    """As ver_ppo.compute_advantages, but only the share `keep_S` of a step's advantage counts for
    the steps before it. If keep_S is 1 everywhere, this is GAE."""
    steps = rollout.complete
    value_S = value_S.astype(float)
    advantage_S = np.zeros(len(steps))
    next_value = rollout.bootstrap.astype(float)
    next_kept = np.zeros(len(next_value))  # of the next step's advantage
    for step in reversed(range(len(steps))):
        segment = steps["segment"][step]
        if steps["done"][step]:
            next_value[segment] = 0.0
            next_kept[segment] = 0.0
        delta = steps["reward"][step] + gamma * next_value[segment] - value_S[step]
        advantage_S[step] = delta + gamma * gae_lambda * next_kept[segment]
        next_value[segment] = value_S[step]
        next_kept[segment] = keep_S[step] * advantage_S[step]
    return advantage_S.astype(np.float32)


def add_corrected_advantages(policy, rollout, options):
    """As ver_ppo.add_advantages, with V-trace. Only a share of each step's advantage (keep_S of
    `reevaluate`) counts for the target of its value and for the steps before it. The advantage
    itself is not multiplied by a ratio, because PPO's objective does that. As its reward, a lost
    step gets the current policy's value. So its advantage is 0, as without V-trace."""
    value_S, keep_S = reevaluate(policy, rollout, options)
    steps = rollout.complete
    lost_S = steps["lost"]
    steps["reward"][lost_S] = value_S[lost_S]
    discounts = options.gamma, options.gae_lambda
    advantage_S = vtrace_advantages(rollout, value_S, keep_S, *discounts)
    steps["advantage"] = advantage_S
    steps["returns"] = value_S + keep_S * advantage_S
    # with async, segments are trajectories
    steps["weight"] = ver_ppo.importance_weights(steps["segment"], rollout.num_envs) * ~lost_S
