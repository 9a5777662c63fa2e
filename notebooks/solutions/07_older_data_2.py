import numpy as np


def my_vtrace(ratio_K, reward_K, value_K, done_K, bootstrap, gamma, gae_lambda):
    keep_K = np.minimum(1.0, ratio_K)
    advantage_K = np.zeros(len(ratio_K))
    next_value = bootstrap
    next_kept = 0.0  # the part of the next step's advantage that counts for this step
    for step in reversed(range(len(ratio_K))):
        if done_K[step]:  # nothing follows in this episode
            next_value = 0.0
            next_kept = 0.0
        difference = reward_K[step] + gamma * next_value - value_K[step]
        advantage_K[step] = difference + gamma * gae_lambda * next_kept
        next_value = value_K[step]
        next_kept = keep_K[step] * advantage_K[step]
    target_K = value_K + keep_K * advantage_K
    return target_K, advantage_K
