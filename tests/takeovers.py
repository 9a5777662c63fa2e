"""A simulation: how often members of a population take over from each other although they are
equal. test_population.py tests a part of it, and benchmarks/learn.py records all of it."""

import numpy as np

from notebooks.extensions.population import BOUNDS, Entry, evolve

OPTIONS = dict.fromkeys(BOUNDS, 0)  # of invented members


def equal_policies(size, spread, populations, looks=10):
    """The share of decisions to take over, although all policies are equal: all returns are drawn
    from one normal distribution with mean 1 and the deviation `spread`. A score is the mean of the
    last 100 episodes. It is computed `looks` times in the 100 episodes of an interval, and the best
    one counts."""
    rng = np.random.default_rng(0)
    new = 100 // looks
    found = []
    for _ in range(populations):
        returns = rng.normal(1.0, spread, (size, 200))
        ends = range(100 + new, 201, new)
        looked = np.stack([returns[:, end - 100 : end].mean(axis=1) for end in ends])
        best = looked.max(axis=0)
        entries = [Entry(member, 0, looked[-1, member], OPTIONS) for member in range(size)]
        for own in entries:
            others = [entry for entry in entries if entry is not own]
            decision, _, _ = evolve(own, best[own.member], others, size, rng)
            found.append(decision == "takes over")
    return float(np.mean(found))
