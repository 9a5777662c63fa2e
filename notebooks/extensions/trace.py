"""Write a run's timeline. Open it in ui.perfetto.dev or chrome://tracing.

    python ver_ppo.py --env-id pointnav --extensions "trace(file=trace.json)"
"""

import io
import json
import os
import time
from pathlib import Path

import numpy as np

import ver_ppo

MOST_BYTES = 10_000_000  # more than a viewer likes


class Trace(ver_ppo.Run):
    """Write each environment's steps, each inference batch with its size, and each learning phase,
    with every checkpoint. With many ranks, rank 1 writes `FILE.1`, and so on. Without `file`, only
    rank 0 writes: `trace.json` in the run folder."""

    file: str = ""
    path = None

    def open_folder(self):
        """As Run.open_folder. Refuses a file that cannot be written."""
        self.trace = io.StringIO()
        if self.file:
            rank = os.environ.get("RANK", "0")
            # whole: an environment may change the current folder
            file = Path(self.file).expanduser().resolve()
            self.path = file if rank == "0" else file.with_name(f"{file.name}.{rank}")
            other = self.path.exists() and not self.path.is_file()  # a folder or a device
            if other or not os.access(self.path.parent, os.W_OK):
                raise ver_ppo.UserError(f"trace: {self.path} cannot be written")
        super().open_folder()
        if self.folder and not self.file:
            self.path = self.folder / "trace.json"

    def log(self, rollout, logs):
        """As Run.log, and add an update to the trace."""
        if self.path and self.trace.tell() < MOST_BYTES:
            write_trace(self.trace, rollout.complete, self.learning_at)
        super().log(rollout, logs)

    def save(self):
        """As Run.save, and write the trace. A run without an update keeps an old file."""
        written = super().save()
        if self.trace.tell():
            ver_ppo.write_file(self.path, f"{self.trace.getvalue()}\n]\n".encode())
        return written


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
