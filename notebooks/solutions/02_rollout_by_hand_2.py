import numpy as np


def my_collect(collector, rollout):
    """Collect one rollout."""
    rollout.rows = 0
    collector.given_N[:] = 0
    idle_B = collector.idle
    collector.idle = np.arange(0)
    collector.act(idle_B)  # by the new policy
    while rollout.rows < rollout.capacity:
        env_B = collector.await_answers(rollout.capacity - rollout.rows)
        acted_B = env_B[collector.in_flight_N[env_B]]
        row_B = rollout.rows + np.arange(len(acted_B))
        collector.complete_steps(rollout, acted_B, row_B)
        rollout.rows += len(acted_B)
        wanted_B = collector.given_N[env_B] < collector.options.quota
        wanted_B &= rollout.rows < rollout.capacity
        collector.act(env_B[wanted_B])
        collector.idle = np.append(collector.idle, env_B[~wanted_B])
    rollout.bootstrap[:] = collector.pending["value"]
    if len(collector.idle):
        first_B = collector.io["first"][collector.idle]
        value_B = collector.values(collector.idle, collector.io["obs"], first_B)
        rollout.bootstrap[collector.idle] = value_B
