def my_cut(sequences, count):
    total = sum(len(sequence) for sequence in sequences)
    minibatches = [[] for _ in range(count)]
    dealt = 0
    previous = None
    for sequence in sequences:
        for k, index in enumerate(sequence):
            number = dealt * count // total  # of the mini-batch that this step belongs to
            if k == 0 or number != previous:  # a sequence begins, or a mini-batch does
                minibatches[number].append([])
            minibatches[number][-1].append(index)
            previous = number
            dealt += 1
    return minibatches
