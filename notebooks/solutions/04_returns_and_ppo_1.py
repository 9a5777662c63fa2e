import numpy as np


def my_advantages(segment_S, reward_S, value_S, done_S, bootstrap, gamma, gae_lambda):
    advantage_S = np.zeros(len(segment_S))
    # value and advantage of each segment's next step; at first, of what follows its last step
    next_value = list(bootstrap)
    next_advantage = [0.0] * len(bootstrap)
    for step in reversed(range(len(segment_S))):
        segment = segment_S[step]
        if done_S[step]:  # nothing follows in this episode
            next_value[segment] = 0.0
            next_advantage[segment] = 0.0
        difference = reward_S[step] + gamma * next_value[segment] - value_S[step]
        advantage_S[step] = difference + gamma * gae_lambda * next_advantage[segment]
        next_value[segment] = value_S[step]
        next_advantage[segment] = advantage_S[step]
    return advantage_S
