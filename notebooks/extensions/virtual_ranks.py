"""Many ranks under a virtual clock, without processes. The same functions as in ver_multigpu.py
decide when a rollout ends."""

import numpy as np

import ver_multigpu

SYNC_FRAC = 0.6  # of --preemption threshold


def simulate(
    num_ranks,
    num_envs,
    num_steps,
    sampler,
    preemption,
    rollouts,
    seed,
    scenes=0.5,
    steps=0.4,
    learning_sec=20.0,
):
    """Compute the steps per second of all ranks, and `hindsight`, the same with the best S of each
    rollout.

    A step takes about a second. `scenes` and `steps` are the log-normal spreads between scenes and
    between the steps of a scene. In every rollout, half of the environments change their scene.
    Averaging gradients costs nothing.
    """
    rng = np.random.default_rng(seed)
    variable = sampler == "ver"
    most = num_steps * (6 if variable else 1)  # steps of one environment in one rollout
    most_of_one = num_steps * (num_envs if variable else 1)  # that a rank may take from one
    size = num_ranks, num_envs
    scene_RN = rng.lognormal(0, scenes, size)
    residual_RN = scene_RN * rng.random(size)  # seconds until a step in flight is complete
    clock = 0.0
    best_sec = 0.0
    collected = 0
    limit = None  # the first rollout is never preempted
    latest_sec = np.inf
    step_sec_RN = np.zeros(size)
    for rollout in range(rollouts):
        changes_RN = rng.random(size) < 0.5
        scene_RN = np.where(changes_RN, rng.lognormal(0, scenes, size), scene_RN)
        spread_RNK = rng.lognormal(-(steps**2) / 2, steps, (*size, most))
        duration_RNK = spread_RNK * scene_RN[:, :, None]
        arrival_RS, env_RS, arrival_RNK = arrivals(residual_RN, duration_RNK, sampler, num_steps)
        in_order = np.sort(arrival_RS.ravel())
        end_R = arrival_RS[:, -1]  # of each rank's rollout
        if limit is not None and preemption == "optimal":
            end_sec = min(in_order[limit - 1], latest_sec)
            end_R = np.minimum(end_R, np.maximum(end_sec, arrival_RS[:, 0]))
        if limit is not None and preemption == "threshold":
            quarter_R = arrival_RS[:, arrival_RS.shape[1] // 4 - 1]
            end_R = np.minimum(end_R, np.maximum(np.sort(end_R)[limit - 1], quarter_R))
        there_RS = arrival_RS <= end_R[:, None]
        ranks = zip(arrival_RS, env_RS, there_RS, end_R, step_sec_RN)
        step_sec_RN = np.array([step_seconds(*rank, most_of_one) for rank in ranks])
        if preemption == "optimal":
            limit, predicted_sec = ver_multigpu.optimal_preemption(
                step_sec_RN, num_steps, variable, learning_sec
            )
            latest_sec = ver_multigpu.PATIENCE * predicted_sec
        elif preemption == "threshold":
            limit = ver_multigpu.threshold_preemption(num_ranks, SYNC_FRAC)
        update_sec = end_R.max() + learning_sec
        next_RN = np.where(arrival_RNK > end_R[:, None, None], arrival_RNK, np.inf).min(axis=2)
        left_RN = np.maximum(0.0, next_RN - update_sec)
        residual_RN = np.where(np.isinf(next_RN), duration_RNK[:, :, 0], left_RN)
        if rollout >= 2:
            clock += update_sec
            collected += there_RS.sum()
            best_rate = (np.arange(1, in_order.size + 1) / (in_order + learning_sec)).max()
            best_sec += there_RS.sum() / best_rate
    return {"rate": collected / clock, "hindsight": collected / best_sec}


def arrivals(residual_RN, duration_RNK, sampler, num_steps):
    """Compute when steps are complete. Returns three arrays:

    - the times of the S steps of each rank's rollout, in order: R x S
    - the environments of these steps: R x S
    - the times of all K steps of every environment: R x N x K"""
    num_ranks, num_envs = residual_RN.shape
    if sampler == "sync":  # each step of all takes as long as the slowest
        slowest_R1K = duration_RNK.max(axis=1, keepdims=True)
        duration_RNK = np.broadcast_to(slowest_R1K, duration_RNK.shape)
        last_R1 = residual_RN.max(axis=1, keepdims=True)
        residual_RN = np.broadcast_to(last_R1, residual_RN.shape)
    since_RNK = np.cumsum(duration_RNK, axis=2) - duration_RNK[:, :, :1]
    arrival_RNK = residual_RN[:, :, None] + since_RNK
    if sampler != "ver":
        arrival_RNK = arrival_RNK[:, :, :num_steps]
    flat = arrival_RNK.reshape(num_ranks, -1)
    order_RS = np.argsort(flat, axis=1, kind="stable")[:, : num_steps * num_envs]
    arrival_RS = np.take_along_axis(flat, order_RS, axis=1)
    return arrival_RS, order_RS // arrival_RNK.shape[2], arrival_RNK


def step_seconds(arrival_S, env_S, there_S, end_sec, known_N, most_of_one):
    """As ver_multigpu.step_seconds for one rank, without the simulators' own measurements."""
    steps_N = np.bincount(env_S[there_S], minlength=len(known_N))
    last_N = np.zeros(len(known_N))
    np.maximum.at(last_N, env_S[there_S], arrival_S[there_S])
    spent_N = np.where(steps_N >= most_of_one, last_N, end_sec)
    return ver_multigpu.mean_seconds(spent_N, steps_N, known_N)
