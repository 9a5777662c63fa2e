def my_preemption(step_sec_2, most, learning_sec):
    first = most * min(step_sec_2)  # the faster rank is done
    last = most * max(step_sec_2)
    steps_of_slower = first / max(step_sec_2)  # by then
    rate_if_preempted = (most + steps_of_slower) / (first + learning_sec)
    rate_if_waited_for = 2 * most / (last + learning_sec)
    return first if rate_if_preempted > rate_if_waited_for else last
