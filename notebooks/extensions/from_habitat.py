"""Continue with a checkpoint of habitat-baselines: this turns the file into a run folder, whose
policy is the same network.

    ln -s .../habitat-lab/data data
    python -m notebooks.extensions.from_habitat ckpt.99.pth [options]

reads the weights and the configuration from the file, makes a run folder at step 0, and prints it:

    python ver_ppo.py --checkpoint FOLDER --eval-episodes 994   evaluates
    python ver_ppo.py --resume FOLDER                           continues training

Both refuse at first, since a checkpoint may name bare words only, and print the options to repeat:
--policy and, for a task of your own, --env-kwargs.

The policy acts as it did there: equal logits, means, deviations and values for equal observations.
Sizes follow from the shapes of the weights. The task and the options in `TAKEN` follow from the
configuration in the file; options on the command line replace them. Nothing in the file is
executed, and the run does not need it again. *There*, below, is habitat-baselines.
"""

import contextlib
import json
import math
import pickletools
import sys
import zlib
from collections import OrderedDict
from dataclasses import fields, replace
from pathlib import Path

import torch
import tyro
from torch import nn
from torch.distributions import Independent, Normal
from torch.nn.utils.rnn import PackedSequence

import ver_ppo
from notebooks.extensions import networks
from ver_ppo import UserError

# ------------------------------------------------------------------------------------- The network

BACKBONES = {  # by the names that they have there
    "resnet18": {"blocks": (2, 2, 2, 2), "bottleneck": False},
    "resnet50": {"blocks": (3, 4, 6, 3)},
    "resneXt50": {"blocks": (3, 4, 6, 3), "groups": 16},
    "se_resnet50": {"blocks": (3, 4, 6, 3), "squeeze": True},
    "se_resneXt50": {"blocks": (3, 4, 6, 3), "groups": 16, "squeeze": True},
    "se_resneXt101": {"blocks": (3, 4, 23, 3), "groups": 16, "squeeze": True},
}
# Observations with one linear layer: their names here (`environments/habitat.py` calls a polar goal
# `goal`), and the layers' names there. Their order is that of the core's inputs
LINEAR = {
    "goal": "tgt_embeding",
    "proximity": "proximity_embedding",
    "objectgoal": "obj_categories_embedding",
    "compass": "compass_embedding",
    "gps": "gps_embedding",
}
IMAGE_GOALS = "imagegoal", "instance_imagegoal"
LEAST_VARIANCE = 1e-2  # of normalized images that are loaded


class Plain(nn.Module):
    """Numbers that enter the core as they are."""

    def __init__(self, source):
        super().__init__()
        self.source = source
        self.out_features = source.channels
        source.normalize = nn.Identity()

    def forward(self, obs):
        return self.source(obs)


class GRU(nn.GRU):
    """A core with one row of state for each layer."""

    @property
    def state_rows(self):
        return self.num_layers

    def step(self, x_BF, state_B):
        out_1BH, after = self(x_BF[None], state_B.transpose(0, 1).contiguous())
        return out_1BH[0], after.transpose(0, 1)

    def sequences(self, x_MF, state_Q, batch_sizes):
        packed = PackedSequence(x_MF, batch_sizes)
        out, _ = self(packed, state_Q.transpose(0, 1).contiguous())
        return out.data


CORES = {"LSTM": ver_ppo.LSTM, "GRU": GRU}
DEVIATIONS = {"log": torch.exp, "softplus": nn.functional.softplus, "plain": torch.clone}


class HabitatBaselines(networks.ResNetPolicy):
    """PointNavResNetPolicy of habitat-baselines.

    `backbone`: a name in BACKBONES, or None, which sees no images. `normalize`: normalize images by
    running statistics. `rnn`: LSTM or GRU. `cpc`: add the auxiliary loss CPC|A.

    For continuous actions: the deviation is a function of a learned number, `std` (log: exp of it;
    softplus of it; plain: itself), and this number stays within `low` and `high` if they are given.
    `by_state`: the number depends on the observation. `tanh` is applied to the mean.
    """

    log_std_range = -math.inf, math.inf  # `heads` has the bounds

    def __init__(
        self,
        spec,
        options,
        backbone=None,
        normalize=False,
        rnn="LSTM",
        std="log",
        low=None,
        high=None,
        by_state=False,
        tanh=True,
        cpc=False,
    ):
        self.backbone = BACKBONES.get(backbone)
        self.normalized = normalize
        self.rnn = rnn
        self.std = std
        self.bounds = low, high
        self.by_state = by_state
        self.tanh = tanh
        super().__init__(spec, options, cpc)
        if by_state:
            self.actor = nn.Linear(options.hidden_size, 2 * spec.action_dims)
            self.log_std_A.requires_grad_(False)  # not used

    def make_encoders(self, spec, options):
        images = []
        plain = []
        linear = {}
        goals = {}
        for key in spec.obs:
            source = ver_ppo.Input(key, spec)
            if key in IMAGE_GOALS:
                goals[key] = self.make_resnet([source], options)
            elif key in LINEAR:
                linear[key] = networks.LinearVector(source)
            elif source.layout:
                images.append(source)
            else:
                plain.append(Plain(source))
        camera = [self.make_resnet(images, options)] if images and self.backbone else []
        by_layer = [linear[key] for key in LINEAR if key in linear]
        by_image = [goals[key] for key in IMAGE_GOALS if key in goals]
        return nn.ModuleList([*camera, *plain, *by_layer, *by_image])

    def make_resnet(self, images, options):
        """An encoder of images, which are stacked in the order of their names."""
        for image in images:
            image.normalize = nn.Identity()
            if self.normalized:
                image.normalize = ver_ppo.Statistics(image.channels)
        kind = {"groups_first": True, "covers": False, "most_channels": 2048, **self.backbone}
        return networks.ResNet(networks.Stack(images), options.hidden_size, **kind)

    def make_core(self, in_features, options):
        return CORES[self.rnn](in_features, options.hidden_size, options.lstm_layers)

    def heads(self, core_BH):
        if self.choices:
            return super().heads(core_BH)
        mean = self.actor(core_BH)
        learned = self.log_std_A
        if self.by_state:
            mean, learned = mean.chunk(2, dim=-1)
        if self.tanh:
            mean = torch.tanh(mean)
        if self.bounds != (None, None):
            learned = learned.clamp(*self.bounds)
        std = DEVIATIONS[self.std](learned).expand_as(mean)
        each = Normal(mean, std, validate_args=False)
        return Independent(each, 1, validate_args=False), self.critic(core_BH)


# ---------------------------------------------------------------------------------------- The file


class Inert:
    """In place of a class or function that the file names: keeps the state that it is given."""

    def __init__(self, *args, **kwargs):
        pass

    def __setstate__(self, state):
        self.state = state[0] if isinstance(state, tuple) else state


class InertDict:
    """The same, in place of a class that is filled like a dictionary."""

    def __new__(cls, *args):
        return OrderedDict()


class InertList:
    """The same, in place of a class that is filled like a list."""

    def __new__(cls, *args):
        return []


FILLED = {
    "collections.deque": InertList,
    "collections.defaultdict": InertDict,
    "yacs.config.CfgNode": InertDict,
    "habitat.config.default.Config": InertDict,
}


def foreign_names(path):
    """The classes and functions that a file names, beyond those that torch allows."""
    try:
        return set(torch.serialization.get_unsafe_globals_in_checkpoint(path))
    except ValueError:  # a file of torch < 1.6, which has five pickles, one after the other
        with open(path, "rb") as file:
            opcodes = [each for _ in range(5) for each in pickletools.genops(file)]
        named = [value for code, value, _ in opcodes if code.name == "GLOBAL"]
        names = {name.replace(" ", ".").replace("__builtin__", "builtins") for name in named}
        return names - torch._weights_only_unpickler._get_allowed_globals().keys()


def read(path):
    """The weights in a checkpoint of habitat-baselines, and its configuration as plain dictionaries
    ({} if there is none). Nothing in the file is executed. Raises UserError."""
    try:
        inert = []
        for name in foreign_names(path):
            stand_in = FILLED.get(name) or type("Inert", (Inert,), {})
            inert.append((stand_in, name))
        with torch.serialization.safe_globals(inert):
            saved = torch.load(path, map_location="cpu", weights_only=True)
        found = saved["state_dict"]
        config = plain(saved.get("config")) or {}
        prefix = "actor_critic."  # before version 0.3
        weights = {key.removeprefix(prefix): weight for key, weight in found.items()}
        return {key: weight for key, weight in weights.items() if torch.is_tensor(weight)}, config
    except Exception as error:  # damaged and hostile files raise many kinds
        reason = ver_ppo.first_line(error)[:200]
        raise UserError(f"{path} is not a checkpoint of habitat-baselines ({reason})") from None


def plain(node):
    """Nodes of OmegaConf, yacs or argparse as dictionaries, lists and values."""
    if isinstance(node, Inert):
        state = getattr(node, "state", {})
        if "_content" not in state and "_val" not in state:
            return plain(dict(state))
        return plain(state.get("_content", state.get("_val")))
    if isinstance(node, dict):
        return {plain(key): plain(value) for key, value in node.items()}
    if isinstance(node, (list, tuple)):
        return [plain(each) for each in node]
    return node


# ------------------------------------------------------------------------------------- The weights


def arguments_of(weights, config):
    """The arguments of HabitatBaselines, --hidden-size and --lstm-layers. Raises UserError for a
    network of another kind."""
    try:
        rows, hidden = weights["net.state_encoder.rnn.weight_hh_l0"].shape
    except KeyError:
        raise UserError("its network is not a PointNavResNetPolicy: it has no core `rnn`") from None
    arguments = {"rnn": "LSTM" if rows == 4 * hidden else "GRU"}
    layers = sum(".rnn.weight_hh" in key for key in weights)
    backbone = backbone_of(weights)
    if backbone:
        arguments["backbone"] = backbone
    arguments["normalize"] = any("running_mean_and_var" in key for key in weights)
    if "action_distribution.mu_maybe_std.weight" in weights:
        arguments |= deviation_of(weights, config)
    return arguments, hidden, layers


def backbone_of(weights):
    """The name of the backbone in these weights, of the camera's or a goal's image; None if there
    is none."""
    stage = ".backbone.layer3."
    found = [key.partition(stage) for key in weights if stage in key]
    if not found:
        return None
    stem = found[0][0] + stage
    blocks = {rest.split(".")[0] for _, _, rest in found}
    middle = weights.get(f"{stem}0.convs.3.weight")
    if middle is None:
        raise UserError(f"its backbone is not one of {', '.join(BACKBONES)}: it may be of CLIP")
    squeeze = "se_" if f"{stem}0.se.excite.0.weight" in weights else ""
    kind = "resneXt" if middle.shape[0] > middle.shape[1] else "resnet"
    depth = {2: "18", 6: "50", 23: "101"}.get(len(blocks), "?")
    name = f"{squeeze}{kind}{depth}"
    if name not in BACKBONES:
        raise UserError(f"its backbone {name} is not one of {', '.join(BACKBONES)}")
    return name


def deviation_of(weights, config):
    """The arguments for continuous actions."""
    try:
        policy = config["habitat_baselines"]["rl"]["policy"]
        if "action_dist" not in policy:  # since version 0.3, of each agent
            policy = next(iter(policy.values()))
        given = policy["action_dist"]
    except (KeyError, TypeError, AttributeError, StopIteration):
        raise UserError("its configuration does not have `action_dist`") from None
    std = "log" if given["use_log_std"] else "softplus" if given["use_softplus"] else "plain"
    name = "log_std" if std == "log" else "std"
    found = {"std": std, "tanh": given["action_activation"] == "tanh"}
    found["by_state"] = "action_distribution.std" not in weights
    if given["clamp_std"]:
        bounds = [float(given[f"min_{name}"]), float(given[f"max_{name}"])]
        if std == "softplus":  # there, the bounds are of the deviation itself
            bounds = [math.log(math.expm1(bound)) for bound in bounds]
        found |= dict(zip(("low", "high"), bounds))
    return found


@torch.no_grad()
def take(policy, weights):
    """Put these weights into a policy. Raises UserError unless their names and sizes are those of
    the policy."""
    left = {key: each for key, each in weights.items() if not key.startswith("aux_loss_modules.")}

    def pop(*prefixes):
        keys = [key for prefix in prefixes for key in left if key.startswith(prefix)]
        return [left.pop(key) for key in keys]

    for encoder in policy.encoders:
        if isinstance(encoder, networks.ResNet):
            take_images(encoder, pop)
        elif not isinstance(encoder, Plain):
            key = encoder.source.key
            layer = pop(f"net.{LINEAR[key]}.")
            if key == "objectgoal" and layer:  # a table: a linear layer of one-hot vectors
                layer = [layer[0].T, torch.zeros(encoder.out_features)]
            put(encoder, layer, key)
    put(policy.core, pop("net.state_encoder.rnn."), "core")
    put(policy.action_embedding, pop("net.prev_action_embedding."), "previous action")
    for parameter in pop("action_distribution.std"):
        policy.log_std_A.copy_(parameter)
    put(policy.actor, pop("action_distribution."), "actor")
    put(policy.critic, pop("critic."), "critic")
    policy.critic.scale.fill_(1.0)  # values are in the environment's units
    if left:
        name = min(left)
        raise UserError(f"the environment or the network here has nothing for {name}")


def take_images(encoder, pop):
    """The weights of an encoder of images, and its running statistics."""
    images = encoder.source.images
    goal = images[0].key
    stem = f"net.{goal}" if goal in IMAGE_GOALS else "net.visual"
    running = pop(f"{stem}_encoder.running_mean_and_var.")
    put(encoder, pop(f"{stem}_encoder.", f"{stem}_fc."), stem)
    if not running:
        return
    means, variances, count = running
    sizes = [image.channels for image in images]
    parts = zip(images, means.flatten().split(sizes), variances.flatten().split(sizes))
    for image, mean_C, variance_C in parts:
        image.normalize.mean_C.copy_(mean_C)
        image.normalize.variance_C.copy_(variance_C.clamp(min=LEAST_VARIANCE))
        # there, images are counted; a rollout here has 4,096, by default
        image.normalize.total_weight.fill_(count.item() / 4096)


def put(module, theirs, name):
    """Copy weights into a module's parameters, in order. Raises UserError for other sizes."""
    own = list(module.parameters())
    if [each.numel() for each in own] != [each.numel() for each in theirs]:
        shapes = [tuple(each.shape) for each in own], [tuple(each.shape) for each in theirs]
        different = [pair for pair in zip(*shapes) if math.prod(pair[0]) != math.prod(pair[1])]
        needed, there = different[0] if different else (len(own), len(theirs))
        raise UserError(f"{name}: the network here needs {needed}, the file has {there}")
    for parameter, weight in zip(own, theirs):
        parameter.copy_(weight.reshape(parameter.shape))


# --------------------------------------------------------------------------------- Task and options

TAKEN = {  # our options, and the keys of `habitat_baselines` whose numbers they take
    "num_envs": "num_environments",
    "num_steps": "rl.ppo.num_steps",
    "gamma": "rl.ppo.gamma",
    "gae_lambda": "rl.ppo.tau",
    "learning_rate": "rl.ppo.lr",
    "clip_coef": "rl.ppo.clip_param",
    "update_epochs": "rl.ppo.ppo_epoch",
    "num_minibatches": "rl.ppo.num_mini_batch",
    "ent_coef": "rl.ppo.entropy_coef",
    "vf_coef": "rl.ppo.value_loss_coef",
    "max_grad_norm": "rl.ppo.max_grad_norm",
    "norm_adv": "rl.ppo.use_normalized_advantage",
    "total_timesteps": "total_num_steps",
}
HEADER = "# @package _global_\n"  # for Hydra: the keys below begin at the root


def lower(node):
    """The same dictionary with keys in lower case, as they are since version 0.2.2."""
    if not isinstance(node, dict):
        return node
    return {str(key).lower(): lower(value) for key, value in node.items()}


def options_of(config):
    """Our options, by their configuration. Its values become numbers, so no text of the file is
    printed."""
    found = {}
    baselines = config.get("habitat_baselines") or lower(config)
    for ours, theirs in TAKEN.items():
        value = baselines
        for key in theirs.split("."):
            value = value.get(key, {}) if isinstance(value, dict) else {}
        if value not in ({}, None, -1):
            found[ours] = type(getattr(ver_ppo.Options, ours))(value)
    return found


def task_file(config, stem, folder):
    """Write the task's part of their configuration as a file for `--env-id habitat`; JSON is YAML.
    Its name has a checksum, so that no file of another run is replaced. Returns its path."""
    text = HEADER + json.dumps({"habitat": config["habitat"]}, indent=1) + "\n"
    path = Path(folder).expanduser().absolute() / f"{stem}.{zlib.crc32(text.encode()):08x}.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


class Converted(ver_ppo.Run):
    """A run that begins with `weights`. Weights of another network are refused before a folder is
    made."""

    weights = None

    def restore(self):
        take(self.policy, self.weights)


def convert(path, argv):
    """Make a run of a checkpoint and these arguments. Returns its folder. Raises UserError."""
    weights, config = read(path)
    arguments, hidden, layers = arguments_of(weights, config)
    words = ", ".join(f"{key}={value}" for key, value in arguments.items())
    theirs = options_of(config) | {"hidden_size": hidden, "lstm_layers": layers}
    theirs |= {"policy": f"from_habitat({words})", "env_id": "habitat"}
    options = tyro.cli(ver_ppo.Options, args=argv, default=ver_ppo.Options(**theirs))
    if options.env_id == "habitat" and "config" not in ver_ppo.read_arguments(options.env_kwargs):
        if "habitat" not in config:
            advice = "give --env-kwargs config=FILE"
            raise UserError(f"{path} has no task that habitat-lab 0.3 knows: {advice}")
        task = task_file(config, path.stem, options.runs_dir)
        options = replace(options, env_kwargs=(f"config={task}", *options.env_kwargs))
    ver_ppo.check_options(options)
    converted = type("Converted", (Converted,), {"weights": weights})
    with contextlib.closing(converted(options)) as run:
        run.save()
    for field in fields(options):
        value = getattr(options, field.name)
        if value != field.default:
            print(f"--{field.name.replace('_', '-')} {value}")
    return run.folder


def main(argv=None):
    """Run the command line. Returns the exit status."""
    words = sys.argv[1:] if argv is None else argv
    if not words or words[0].startswith("-"):
        print(__doc__.strip(), file=sys.stderr)
        return 2
    try:
        print(convert(Path(words[0]).expanduser(), words[1:]))
        return 0
    except UserError as error:
        print(f"from_habitat.py: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    # as a module: --policy knows the classes by its name
    from notebooks.extensions.from_habitat import main

    sys.exit(main())
