"""Transfer to another task (DD-PPO section 6): start from the weights of another run.

    python ver_ppo.py --env-id notebooks.environments.tasks:Flee-v0
        --extensions "transfer(file=runs/.../checkpoint.pt, freeze=True, reset=critic)"
"""

import functools
from pathlib import Path

import ver_ppo

RESETS = "nothing", "critic", "policy"


class Transfer(ver_ppo.Run):
    """Start a new run from the weights of the checkpoint `file`, where names and shapes agree.

    `reset` names weights that are not loaded: `nothing`, `critic`, or `policy`, which is everything
    except the encoders. With `freeze`, the encoders of images do not learn, and their statistics do
    not change. A resumed run loads nothing."""

    file: str | None = None
    freeze: bool = False
    reset: str = "nothing"

    def restore(self):
        if self.reset not in RESETS:
            raise ver_ppo.UserError(f"transfer: reset={self.reset}: must be one of {RESETS}")
        if not ver_ppo.checkpoint_path(self.options.resume).is_file():
            if not self.file:
                raise ver_ppo.UserError("transfer: give a checkpoint: transfer(file=FILE)")
            start_from(self.policy, Path(self.file).expanduser(), self.reset)
        super().restore()
        if self.freeze:
            for encoder in image_encoders(self.policy):
                freeze(encoder)


def freeze(encoder):
    """Stop an encoder from learning. It stays in evaluation mode even if its policy changes the
    mode, so its statistics do not change either."""
    encoder.requires_grad_(False).eval()
    encoder.train = functools.partial(stay, encoder)  # a lambda could not go to another process


def stay(encoder, mode=True):
    """In place of `train`: keep the mode."""
    return encoder


def image_encoders(policy):
    """The encoders of a policy that read images."""
    return [encoder for encoder in policy.encoders if encoder.source.layout]


def start_from(policy, path, reset):
    """Load the weights of a checkpoint into a policy. Raises UserError if the checkpoint lacks
    encoders, or other weights that do not learn."""
    saved = ver_ppo.load_checkpoint(path)["policy"]
    own = policy.state_dict()
    may_differ = "log_ent_coef", "critic.scale"
    learned = {name for name, weight in policy.named_parameters() if weight.requires_grad}
    fixed = {name for name in own.keys() - learned if not name.endswith(may_differ)}
    new = {name for name in own if name not in saved or saved[name].shape != own[name].shape}
    if reset == "critic":
        new |= {name for name in own if name.startswith("critic.")}
    if reset == "policy":
        new |= {name for name in own if not name.startswith("encoders.")} - fixed
    unfit = [name for name in new if name in fixed or name.startswith("encoders.")]
    if unfit:
        advice = "give the --policy, --env-kwargs and sizes of that run"
        reason = f"its network is another one ({min(unfit)})"
        raise ver_ppo.UserError(f"transfer: {path}: {reason}: {advice}")
    new |= {"log_ent_coef"}
    taken = {name: saved[name] for name in own.keys() - new}
    policy.load_state_dict(own | taken)
    print(f"{len(taken)} of {len(own)} tensors come from {path}; new: {sorted(new)}")
