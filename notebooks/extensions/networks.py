"""The papers' networks: residual encoders, and the auxiliary loss CPC|A.

    python ver_ppo.py --env-id pointnav --policy resnet18_plain
    python ver_ppo.py --env-id pointnav --policy "resnet18(cpc=True, bf16=True)" --hidden-size 512

Images go through a backbone. The goal and other vectors go through one linear layer to 32 features,
as in DD-PPO. With `cpc`, the memory learns to predict the observations after the next actions. With
`bf16`, backbones compute in bfloat16, on GPUs and on CPUs that have the instructions. Shapes are as
in ver_ppo.py. In addition: P starts, F futures of each start, T steps ahead, N negatives of each
future.
"""

from pathlib import Path

import torch
from torch import nn

import ver_ppo
from ver_ppo import ACTION_FEATURES, Input, UserError, cover, orthogonal

# ------------------------------------------------------------------------------ Residual encoders

BACKBONES = {  # all of half the usual width and with GroupNorm; `blocks` in the four stages
    "resnet18_plain": {"blocks": (2, 2, 2, 2), "bottleneck": False},  # VER section 3
    "resnet18": {"blocks": (2, 2, 2, 2), "bottleneck": False, "modern": True},  # VER section 4
    "resnet50": {"blocks": (3, 4, 6, 3)},  # DD-PPO section 4, appendix A
    "se_resnext50": {"blocks": (3, 4, 6, 3), "groups": 16, "squeeze": True},
    "se_resnext101": {"blocks": (3, 4, 23, 3), "groups": 16, "squeeze": True},
}


def convolution(channels_in, channels_out, kernel, stride=1, groups=1, dilation=1, padding=None):
    """Convolution without bias, then GroupNorm: batch statistics mislead where experience is
    correlated (DD-PPO, A)."""
    if padding is None:
        padding = dilation * (kernel // 2)
    layer = nn.Conv2d(
        channels_in, channels_out, kernel, stride, padding, dilation, groups, bias=False
    )
    return nn.Sequential(layer, nn.GroupNorm(16, channels_out))


class Block(nn.Module):
    """Residual block (He et al. 2016): 1x1, 3x3, 1x1 convolutions, or without bottleneck 3x3, 3x3.
    `wide` doubles the width, as in ResNeXt, and `groups` is its cardinality. `squeeze` adds squeeze
    and excitation, `modern` layer scale and a dilated second 3x3 kernel (ConvNeXt)."""

    def __init__(self, channels_in, planes, stride, bottleneck, wide, groups, squeeze, modern):
        super().__init__()
        if bottleneck:
            channels_out = 4 * planes
            width = 2 * planes if wide else planes
            first = convolution(channels_in, width, 1)
            middle = convolution(width, width, 3, stride, groups)
            last = convolution(width, channels_out, 1)
            self.layers = nn.Sequential(first, nn.ReLU(), middle, nn.ReLU(), last)
        else:
            channels_out = planes
            first = convolution(channels_in, planes, 3, stride)
            second = convolution(planes, planes, 3, dilation=2 if modern else 1)
            self.layers = nn.Sequential(first, nn.ReLU(), second)
        self.shortcut = nn.Identity()
        if stride > 1 or channels_in != channels_out:
            self.shortcut = convolution(channels_in, channels_out, 1, stride)
        # layer scale: Touvron et al. 2021
        self.scale = nn.Parameter(torch.full((channels_out, 1, 1), 0.1)) if modern else 1.0
        self.squeeze = None
        if squeeze:
            narrow = channels_out // 16
            down = nn.Conv2d(channels_out, narrow, 1)
            up = nn.Conv2d(narrow, channels_out, 1)
            self.squeeze = nn.Sequential(nn.AdaptiveAvgPool2d(1), down, nn.ReLU(), up, nn.Sigmoid())

    def forward(self, x):
        change = self.layers(x)
        if self.squeeze is not None:
            change = change * self.squeeze(change)
        return torch.relu(self.shortcut(x) + change * self.scale)


class ResNet(nn.Module):
    """2x2 average pooling, backbone, compression of its last feature map to about 2,048 numbers in
    `most_channels` channels at most (DD-PPO appendix A), linear layer.

    `modern`: patches of 4x4 pixels come first, and down-sampling comes between the stages (VER
    section 4). As in habitat-baselines: with `groups_first`, only the first block of a stage has
    groups, and without `covers`, the pooling leaves out the last row and column of an odd image.
    """

    def __init__(
        self,
        source,
        out_features,
        blocks,
        bottleneck=True,
        groups=1,
        squeeze=False,
        modern=False,
        groups_first=False,
        covers=True,
        most_channels=512,
    ):
        super().__init__()
        if min(source.size) < 64:
            raise UserError(f"a residual encoder needs images of 64 x 64 at least: {source.size}")
        self.source = source
        self.out_features = out_features
        layers = [nn.AvgPool2d(2, ceil_mode=covers)]
        _, size = cover(source.size, 2)
        if modern:
            padding, size = cover(size, 4)
            layers.append(convolution(source.channels, 32, 4, 4, padding=padding))
        else:
            layers += [convolution(source.channels, 32, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
        channels = 32
        for stage, count in enumerate(blocks):
            planes = 32 * 2**stage
            if modern and stage:
                padding, size = cover(size, 2)
                down = nn.Conv2d(channels, planes, 2, 2, padding)
                layers += [nn.GroupNorm(16, channels), down]
                channels = planes
            for block in range(count):
                stride = 2 if stage and not block and not modern else 1
                of_block = 1 if block and groups_first else groups
                kind = bottleneck, groups > 1, of_block, squeeze, modern
                layers.append(Block(channels, planes, stride, *kind))
                channels = 4 * planes if bottleneck else planes
        self.backbone = nn.Sequential(*layers)
        with torch.no_grad():
            height, width = self.backbone(torch.zeros(1, source.channels, *source.size)).shape[2:]
        compressed = min(most_channels, round(2048 / (height * width)))
        last = nn.Conv2d(channels, compressed, 3, padding=1, bias=False)
        self.compress = nn.Sequential(last, nn.GroupNorm(1, compressed), nn.ReLU(), nn.Flatten())
        self.out = orthogonal(nn.Linear(compressed * height * width, out_features))

    def forward(self, obs):
        return torch.relu(self.out(self.compress(self.backbone(self.source(obs)))))


class Stack(nn.Module):
    """Images of one size (RGB and depth, say), one behind the other: B x channels x height x width.
    """

    def __init__(self, images):
        super().__init__()
        self.images = nn.ModuleList(images)
        self.channels = sum(image.channels for image in images)
        self.size = images[0].size

    def forward(self, obs):
        return torch.cat([image(obs) for image in self.images], dim=1)


class LinearVector(nn.Linear):
    """One linear layer from a vector to 32 features (DD-PPO section 4). The vector is not
    normalized."""

    def __init__(self, source):
        super().__init__(source.channels, 32)
        orthogonal(self)
        self.source = source
        source.normalize = nn.Identity()

    def forward(self, obs):
        return super().forward(self.source(obs))


def computes_bf16(device):
    """Whether a device has instructions for bfloat16: a GPU, or a CPU that says so."""
    if device.startswith("cuda"):
        return True
    flags = set(Path("/proc/cpuinfo").read_text().split())
    return not flags.isdisjoint({"avx512_bf16", "amx_bf16", "bf16"})


class ResNetPolicy(ver_ppo.Policy):
    """The usual policy with residual encoders. Raises UserError for images below 64 x 64."""

    backbone = BACKBONES["resnet18"]

    def __init__(self, spec, options, cpc=False, bf16=False):
        if bf16 and not computes_bf16(options.device):
            raise UserError(f"bf16: this {options.device} has no instructions for bfloat16")
        super().__init__(spec, options)
        if cpc and 0 in self.state_shape:  # PPO would shuffle single steps
            raise UserError("cpc: it predicts from the memory, so it needs --lstm-layers 1 or more")
        self.bf16 = bf16
        self.cpc = ContrastivePrediction(self.features, options.hidden_size) if cpc else None

    def make_encoders(self, spec, options):
        encoders = []
        # images of one size are stacked, but not the image of a goal on the image of the camera
        stacks = {}
        for key in spec.obs:
            source = Input(key, spec)
            if source.layout:
                stacks.setdefault((source.size, "goal" in key), []).append(source)
            else:
                encoders.append(LinearVector(source))
        for images in stacks.values():
            encoders.append(ResNet(Stack(images), options.hidden_size, **self.backbone))
        return nn.ModuleList(encoders)

    def encode(self, obs, prev_action_BA, first_B):
        with torch.autocast(first_B.device.type, torch.bfloat16, enabled=self.bf16):
            features = [encoder(obs).float() for encoder in self.encoders]
        return torch.cat([*features, self.embed(prev_action_BA, first_B)], dim=1)

    def auxiliary_loss(self, features_MF, core_MH, batch):
        if self.cpc is None:
            return super().auxiliary_loss(features_MF, core_MH, batch)
        return CPC_COEF * cpc_loss(self, features_MF, core_MH, batch)


class ResNet18(ResNetPolicy):
    """VER section 4: for rearrangement."""


class ResNet18Plain(ResNetPolicy):
    """VER section 3: for navigation."""

    backbone = BACKBONES["resnet18_plain"]


class ResNet50(ResNetPolicy):
    """DD-PPO section 4, appendix A."""

    backbone = BACKBONES["resnet50"]


class SEResNeXt50(ResNetPolicy):
    """DD-PPO section 4, appendix A."""

    backbone = BACKBONES["se_resnext50"]


class SEResNeXt101(ResNetPolicy):
    """DD-PPO section 4, appendix A."""

    backbone = BACKBONES["se_resnext101"]


# ------------------------------------------------------------------------------------------ CPC|A
# Action-conditional contrastive prediction (Guo et al. 2018; VER section 3)

# as in habitat-baselines: steps ahead, start steps of a sequence, futures of each start, negatives
# of each future, weight in the loss
CPC_HORIZON = 20
CPC_STARTS = 6
CPC_FUTURES = 2
CPC_NEGATIVES = 20
CPC_COEF = 0.1


class ContrastivePrediction(nn.Module):
    """A GRU that starts from the memory and follows the next actions, and a classifier of its
    state. The classifier tells the features that were really seen from others: B x H, B x features
    -> B logits."""

    def __init__(self, features, hidden):
        super().__init__()
        self.future = nn.GRUCell(ACTION_FEATURES, hidden)
        first = nn.Linear(hidden + features, hidden)
        self.classifier = nn.Sequential(first, nn.ReLU(), nn.Linear(hidden, 1))

    def forward(self, memory_BH, features_BF):
        return self.classifier(torch.cat([memory_BH, features_BF], dim=-1)).squeeze(-1)


def cpc_futures(batch_sizes):
    """Draw CPC_STARTS random steps of each packed sequence, and for each of them CPC_FUTURES later
    steps of the same sequence, at most CPC_HORIZON steps later.

    Returns four arrays of positions or counts:

    - P starts
    - P x CPC_HORIZON actions from each start on; beyond the sequence's end, its last action
    - P x CPC_FUTURES, how many steps later the futures are
    - P x CPC_FUTURES futures
    """
    length_Q = (batch_sizes[:, None] > torch.arange(int(batch_sizes[0]))).sum(0)
    begin_of_time = batch_sizes.cumsum(0) - batch_sizes
    long_Q = torch.arange(len(length_Q))[length_Q > 1]
    sequence_P = long_Q.repeat_interleave(CPC_STARTS)[:, None]
    last_P = length_Q[sequence_P] - 1
    time_P = (torch.rand(len(sequence_P), 1) * last_P).long()
    most_P = (last_P - time_P).clamp(max=CPC_HORIZON)
    later_PF = 1 + (torch.rand(len(sequence_P), CPC_FUTURES) * most_P).long()
    action_time_PT = torch.minimum(time_P + torch.arange(CPC_HORIZON), last_P)

    def position(time):
        return begin_of_time[time] + sequence_P

    return position(time_P)[:, 0], position(action_time_PT), later_PF, position(time_P + later_PF)


def cpc_loss(policy, features_MF, core_MH, batch):
    """The loss of CPC|A: the sum of two mean cross-entropies. The GRU starts from the memory after
    a step and follows the next actions. The classifier must tell the features that were then seen
    from CPC_NEGATIVES other features of the mini-batch."""
    device = core_MH.device
    start_P, action_PT, later_PF, future_PF = cpc_futures(batch["batch_sizes"])
    if not len(start_P):  # all ranks average the same gradients, even zeros
        return sum(parameter.sum() for parameter in policy.cpc.parameters()) * 0.0
    most = int(later_PF.max())
    other_PFN = torch.randint(len(core_MH), (*future_PF.shape, CPC_NEGATIVES))
    indices = [start_P, action_PT, later_PF, future_PF, other_PFN]
    start_P, action_PT, later_PF, future_PF, other_PFN = [index.to(device) for index in indices]
    known_M = torch.zeros(len(core_MH), dtype=torch.bool, device=device)
    action_M = policy.embed(batch["action"], known_M)
    memory_PH = core_MH[start_P]
    memories = []
    for action_P in action_PT[:, :most].unbind(1):
        memory_PH = policy.cpc.future(action_M[action_P], memory_PH)
        memories.append(memory_PH)
    index_PFH = (later_PF - 1)[..., None].expand(-1, -1, core_MH.shape[1])
    memory_PFH = torch.stack(memories, dim=1).gather(1, index_PFH)
    positive = policy.cpc(memory_PFH, features_MF[future_PF])
    memory_PFNH = memory_PFH[:, :, None].expand(-1, -1, CPC_NEGATIVES, -1)
    negative = policy.cpc(memory_PFNH, features_MF[other_PFN])
    return nn.functional.softplus(-positive).mean() + nn.functional.softplus(negative).mean()
