import numpy as np


def minutes_to(steps, values, rate, threshold):
    reached = np.asarray(values) >= threshold
    if not reached.any():
        return np.inf
    after = int(reached.argmax())  # the first point that is high enough
    around = slice(max(after - 1, 0), after + 1)  # it, and the one before if there is one
    step = np.interp(threshold, values[around], steps[around])
    return step / rate / 60
