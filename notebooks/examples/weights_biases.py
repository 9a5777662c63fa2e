"""TensorBoard's curves and the options are sent to Weights & Biases (`pip install wandb`).

    python ver_ppo.py --env-id CartPole-v1 \
        --extensions "notebooks.examples.weights_biases:WandB(project=mine)"
"""

import os
from dataclasses import asdict

import wandb

import ver_ppo


class WandB(ver_ppo.Run):
    """Sends all curves and options to Weights & Biases."""

    project: str = "ver"

    def open_folder(self):
        if os.environ.get("RANK", "0") == "0":  # of many ranks, only rank 0 writes
            wandb.init(project=self.project, config=asdict(self.options), sync_tensorboard=True)
        super().open_folder()

    def close(self):
        super().close()
        wandb.finish()
