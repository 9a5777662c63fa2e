def carry_over(engine, prompt):
    """Decode one answer to the prompt, a list of tokens, in spite of interruptions."""
    tokens = []
    log_probs = []
    versions = []
    ended = False
    while not ended:
        new_tokens, new_log_probs, version, ended = engine(prompt + tokens)
        tokens += new_tokens
        log_probs += new_log_probs
        versions += [version] * len(new_tokens)
    return tokens, log_probs, versions
