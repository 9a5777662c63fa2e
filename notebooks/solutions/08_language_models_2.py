def may_begin(accepted, running, version, B, eta):
    """How many answers may begin now."""
    # Answer k, counted from 0, is learned from by version k // B, so its lag is k // B - version.
    # The answers with k // B = eta + version are the last ones that may begin.
    return (eta + version + 1) * B - accepted - running
