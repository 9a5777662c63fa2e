def my_pack(sequences):
    longest_first = sorted(sequences, key=len, reverse=True)
    packed = []
    batch_sizes = []
    for k in range(len(longest_first[0])):
        batch = [sequence[k] for sequence in longest_first if len(sequence) > k]
        packed += batch
        batch_sizes.append(len(batch))
    return packed, batch_sizes
