"""Write a run's timeline. Open it in ui.perfetto.dev or chrome://tracing.

    python ver_ppo.py --env-id pointnav --extensions "trace(file=trace.json)"
"""

import contextlib
import json
import os
import time
from pathlib import Path

import numpy as np

import ver_ppo

MOST_BYTES = 10_000_000  # more than a viewer likes


class Trace(ver_ppo.Run):
    """Write each environment's steps, each inference batch with its size, and each learning phase.
    With many ranks, rank 1 writes `FILE.1`, and so on."""

    file: str = "trace.json"
    trace = None  # opened at the first update, so a run without an update keeps an old file

    def open_folder(self):
        """As Run.open_folder. Refuses a file that cannot be written, or is not a trace."""
        rank = os.environ.get("RANK", "0")
        file = Path(self.file).absolute()  # an environment may change the current folder
        self.path = file if rank == "0" else file.with_name(f"{file.name}.{rank}")
        try:
            if os.path.isfile(self.path) and not is_trace(self.path):
                raise ver_ppo.UserError(f"trace: {self.path} exists, and is not a trace")
            open(self.path, "a").close()
        except OSError as error:
            reason = f"{self.path} cannot be written ({error.strerror})"
            raise ver_ppo.UserError(f"trace: {reason}") from None
        super().open_folder()

    def log(self, rollout, logs):
        """As Run.log, and add an update to the trace. Raises OSError if the disk is full."""
        if not self.trace:
            self.trace = open(self.path, "w")
        if self.trace.tell() < MOST_BYTES:
            write_trace(self.trace, rollout.complete, self.learning_at)
        super().log(rollout, logs)

    def close(self):
        super().close()
        if self.trace:
            with contextlib.suppress(OSError):  # a full disk: said before
                self.trace.write("\n]\n")
                self.trace.close()


def is_trace(path):
    """Whether a file is empty or begins like a trace. (Its name may come from a stranger's
    checkpoint, so no other file is overwritten.)"""
    with open(path, errors="replace") as file:
        return file.read(2) in ("", "[\n")


def write_trace(file, steps, learning_at):
    """Append steps, and the learning phase that ends now, in Chrome's trace format."""
    spans = []  # lane, name, begin, seconds
    for e, began_at, sec in steps[["env", "began_at", "step_sec"]].tolist():
        spans.append((f"environment {e}", "step", began_at, sec))
    batches = np.unique(steps["sent_at"], return_index=True, return_counts=True)
    for sent_at, index, size in zip(*batches):
        began_at = steps["inference_at"][index]
        spans.append(("inference", f"batch of {size}", began_at, sent_at - began_at))
    spans.append(("learner", "learning", learning_at, time.perf_counter() - learning_at))
    for lane, name, began_at, sec in spans:
        event = {"name": name, "ph": "X", "pid": lane, "tid": lane}
        event |= {"ts": round(1e6 * began_at), "dur": round(1e6 * sec)}
        file.write(",\n" if file.tell() else "[\n")
        file.write(json.dumps(event))
