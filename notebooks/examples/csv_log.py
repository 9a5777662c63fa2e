"""A logger: every number of a run is a line of a CSV file in the run's folder.

    python ver_ppo.py --env-id CartPole-v1 \
        --extensions "notebooks.examples.csv_log:CSV(file=all.csv)"
"""

import csv

import ver_ppo


class CSV(ver_ppo.Run):
    """Keeps step, tag and value of every number."""

    file: str = "numbers.csv"

    def write_scalars(self, logs):
        super().write_scalars(logs)
        if self.folder:  # ranks above 0 write nothing
            with open(self.folder / self.file, "a", newline="") as file:
                csv.writer(file).writerows((self.step, tag, logs[tag]) for tag in logs)
