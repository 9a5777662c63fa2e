from math import ceil

import numpy as np


def my_decision(score, best, others, donor):
    """What a member does: "goes on", "mutates" or "takes over"."""
    ranked = sorted([score, *others], reverse=True)
    few = ceil(0.3 * len(ranked))
    if score not in ranked[-few:]:
        return "goes on"
    if best >= ranked[few - 1]:
        return "goes on"
    lowest = len(ranked) // 5
    deviation = np.std(ranked[: len(ranked) - lowest])
    gap = donor - score
    if gap > 0.5 * deviation and gap > 0.05 * abs(donor):
        return "takes over"
    return "mutates"
