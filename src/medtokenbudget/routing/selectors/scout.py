"""`scout`: a small network that reads the pixels of an image and gives lesion scores, finer than the token grid.

A feature pyramid (FPN, CVPR 2017) on the first stages of EfficientNet-Lite0, or on plain residual blocks (ResNet, CVPR 2016). It
runs on tokens of the backbone 'pixels', whose patches are the pixels themselves. So a scout is saved, exported, calibrated and used
for early routing like any other selector. `training/scouting.py` trains it from images and masks.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from medtokenbudget.config import RouterConfig, TrainConfig
from medtokenbudget.routing.base import register_selector
from medtokenbudget.routing.trainable import ScoredRanker, Sight, evaluating
from medtokenbudget.tokens import TokenBatch

CHANNELS = (16, 32, 48, 64)
"""Channels of the plain one at 1/2, 1/4, 1/8 and 1/16 of the image. Few at 1/2, where one costs four times as much as at 1/4."""
LITE0 = (((1, 16, 1, 3, 1),), ((6, 24, 2, 3, 2),), ((6, 40, 2, 5, 2),), ((6, 80, 3, 3, 2), (6, 112, 3, 5, 1)))
"""EfficientNet-Lite0 down to 1/16 of the image: expansion, channels, blocks, kernel and stride of the parts of each stage."""
PYRAMID = 32
NEAR, COMPACT = 4.0, 2.0
"""How much a likely lesion in the neighborhood adds to the logit of a patch, and what distance takes away. Of 96 other settings the
best was 0.02 points better on training-side lesions that were new to an earlier scout and to the choice (docs/training.md)."""
FAMILIAR = 2
"""Mean and deviation of so many of the coarsest levels tell unfamiliar images. With the last one alone, 3 % more polyps pass."""
_LARGEST_PATCH = 32


class _BatchNorm(nn.Module):
    """Batch normalization without the integer counter of PyTorch's: a saved model holds floating-point tensors only."""

    running_mean: Tensor
    running_var: Tensor

    def __init__(self, channels: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps = eps
        self.weight, self.bias = nn.Parameter(torch.ones(channels)), nn.Parameter(torch.zeros(channels))
        self.register_buffer("running_mean", torch.zeros(channels))
        self.register_buffer("running_var", torch.ones(channels))

    def forward(self, x: Tensor) -> Tensor:
        return F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, self.training, eps=self.eps)


def _conv(inputs: int, outputs: int, kernel: int, stride: int = 1, act: bool = True) -> nn.Sequential:
    convolution = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, bias=False)
    return nn.Sequential(convolution, _BatchNorm(outputs), *([nn.ReLU(inplace=True)] if act else []))


class Residual(nn.Module):
    """Two 3 x 3 convolutions, added to the input. On a CPU they are faster than depthwise ones with three times the channels."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(_conv(channels, channels, 3), _conv(channels, channels, 3, act=False))

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.layers(x))


class _SamePad(nn.Module):
    """The zeros that TensorFlow puts around an input for a convolution of stride 2: more right and below than left and above."""

    def __init__(self, kernel: int) -> None:
        super().__init__()
        self.kernel = kernel

    def forward(self, x: Tensor) -> Tensor:
        pads: list[int] = []
        for size in reversed(x.shape[-2:]):
            total = self.kernel - 2 + size % 2
            pads += [total // 2, total - total // 2]
        return F.pad(x, pads)


def _lite_conv(inputs: int, outputs: int, kernel: int = 1, stride: int = 1, groups: int = 1, act: bool = True) -> nn.Sequential:
    """Return a layer as TensorFlow makes it: with a stride, more is padded right and below."""
    padding = (kernel - 1) // 2 if stride == 1 else 0
    convolution = nn.Conv2d(inputs, outputs, kernel, stride, padding, groups=groups, bias=False)
    before = [_SamePad(kernel)] if stride > 1 else []
    return nn.Sequential(*before, convolution, _BatchNorm(outputs, 1e-3), *([nn.ReLU6(inplace=True)] if act else []))


class _Inverted(nn.Module):
    """An inverted residual: wider by `expansion`, a depthwise convolution, narrow again."""

    def __init__(self, inputs: int, outputs: int, expansion: int, kernel: int, stride: int) -> None:
        super().__init__()
        inner, self.same = inputs * expansion, stride == 1 and inputs == outputs
        self.layers = nn.Sequential(
            *([_lite_conv(inputs, inner)] if expansion > 1 else []),
            _lite_conv(inner, inner, kernel, stride, inner),
            _lite_conv(inner, outputs, act=False),
        )

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.layers(x)
        return x + made if self.same else made


def lite_stages(channels: int) -> list[nn.Sequential]:
    """Return the stages of EfficientNet-Lite0 for images of `channels` channels, to 1/2, 1/4, 1/8 and 1/16 of the image."""
    stages, above = [], 32
    for number, parts in enumerate(LITE0):
        layers: list[nn.Module] = [] if number else [_lite_conv(channels, above, 3, 2)]
        for expansion, size, blocks, kernel, stride in parts:
            for block in range(blocks):
                layers.append(_Inverted(above, size, expansion, kernel, 1 if block else stride))
                above = size
        stages.append(nn.Sequential(*layers))
    return stages


class ScoutNetwork(nn.Module):
    """Images [B, C, H, W], values in [0, 1], to lesion logits [B, H / 2, W / 2].

    Args:
        channels: Channels C of an image.
        width: Number of channels inside, relative to `CHANNELS`; of EfficientNet-Lite0 only the pyramid changes.
        plain: Use residual blocks instead of EfficientNet-Lite0.
    """

    def __init__(self, channels: int = 3, width: float = 1.0, plain: bool = False) -> None:
        super().__init__()
        fine, *sizes = (max(8, 8 * round(width * size / 8)) for size in CHANNELS)
        pyramid = max(8, 8 * round(width * PYRAMID / 8))
        if plain:
            stem = _conv(channels, fine, 3, 2)
            stages = [nn.Sequential(_conv(above, size, 3, 2), Residual(size)) for above, size in zip([fine, *sizes], sizes)]
        else:
            stem, *stages = lite_stages(channels)
            fine, *sizes = (parts[-1][1] for parts in LITE0)
        self.stem, self.stages = stem, nn.ModuleList(stages)
        # What the whole image looks like: skin tone and light decide what is dark.
        self.context = nn.Linear(sizes[-1], pyramid)
        self.lateral = nn.ModuleList(nn.Conv2d(size, pyramid, 1) for size in sizes)
        self.merge = nn.ModuleList(_conv(pyramid, pyramid, 3) for _ in sizes)
        self.reduce = nn.Conv2d(pyramid, fine, 1)
        self.refine = _conv(fine, fine, 3)
        self.logit = nn.Conv2d(fine, 1, 1)

    def forward(self, images: Tensor) -> Tensor:
        return self.decode(self.levels(images))

    def levels(self, images: Tensor) -> list[Tensor]:
        """Return features at 1/2, 1/4, 1/8 and 1/16 of the image."""
        images = 2 * images - 1
        if not torch.compiler.is_compiling():  # faster by a tenth; a graph for any batch size has no memory format
            images = images.contiguous(memory_format=torch.channels_last)
        levels = [self.stem(images)]
        for stage in self.stages:
            levels.append(stage(levels[-1]))
        return levels

    def decode(self, levels: list[Tensor]) -> Tensor:
        """Return the lesion logits from the features."""
        fine, *coarser = levels
        top = self.context(coarser[-1].mean((2, 3)))[:, :, None, None].expand(-1, -1, *coarser[-1].shape[-2:])
        for lateral, merge, level in zip(reversed(self.lateral), reversed(self.merge), reversed(coarser)):
            top = merge(lateral(level) + F.interpolate(top, level.shape[-2:]))
        logits: Tensor = self.logit(self.refine(fine + F.interpolate(self.reduce(top), fine.shape[-2:])))
        return logits.squeeze(1)


def compact(logits: Tensor) -> Tensor:
    """Favor patches near a likely lesion and near the center of mass of all of them, [B, h, w] to [B, h, w].

    Where a lesion is clear, this orders the skin around it. Where nothing is, the center of mass is that of the image.
    """
    lesion = torch.sigmoid(logits).unsqueeze(1)
    near = lesion
    for _ in range(2):
        near = F.avg_pool2d(near, 5, 1, 2, count_include_pad=False)
    h, w = logits.shape[1:]
    place = torch.stack(torch.meshgrid(torch.linspace(-1, 1, h), torch.linspace(-1, 1, w), indexing="ij")).to(logits)
    middle = (lesion * place).sum((2, 3), keepdim=True) / lesion.sum((2, 3), keepdim=True).clamp(min=1e-6)
    distance = ((place - middle) ** 2).sum(1)
    return logits + NEAR * near.squeeze(1) - COMPACT * distance


@register_selector("scout")
class Scout(ScoredRanker):
    """Mean lesion logit of each patch, made compact, largest first, of a network that reads the image itself.

    Args:
        dim: Numbers per patch: 3 p p for patches of p x p pixels.
        width: Number of channels of the network, relative to the default.
        plain: Whether its encoder is plain residual blocks.
    """

    title = "Scout"
    description = "A small network trained from masks scores every patch; it reads the image instead of tokens."
    color, marker = "#b5179e", "P"
    reads_pixels = True
    finer = True

    def __init__(self, dim: int, width: float = 1.0, minimum: int = 16, plain: bool = False) -> None:
        super().__init__(RouterConfig(minimum=minimum, smooth=1))
        # A token of any dimension is p x p cells: of pixels they are the pixels.
        self.patch = max(side for side in range(1, _LARGEST_PATCH + 1) if dim % (side * side) == 0)
        self.width, self.plain = width, plain
        self.network = ScoutNetwork(dim // self.patch**2, width, plain)

    @classmethod
    def from_config(cls, dim: int, config: TrainConfig, classes: int = 2) -> Scout:
        return cls(dim, config.scout.width, config.router.minimum, config.scout.plain)

    @classmethod
    def settings(cls, config: TrainConfig) -> tuple[str, ...]:
        return (*super().settings(config), "scout.width", "scout.plain")

    def images(self, tokens: TokenBatch) -> Tensor:
        """Return the images [B, C, H, W] that the tokens are of."""
        patches = tokens.patches if tokens.pixels is None else tokens.pixels
        return F.pixel_shuffle(patches.float().transpose(1, 2).unflatten(2, tokens.grid), self.patch)

    def fine_logits(self, tokens: TokenBatch) -> Tensor:
        """Return the lesion logits [B, H / 2, W / 2] of every second pixel."""
        fine: Tensor = self.network(self.images(tokens))
        return fine

    def logits(self, tokens: TokenBatch, generator: torch.Generator | None = None, at: Tensor | None = None) -> Tensor:
        patches = _of_patches(self.fine_logits(tokens), tokens.grid)
        return patches if at is None else patches.gather(1, at)

    def see(self, tokens: TokenBatch) -> Sight:
        with evaluating(self.network):  # in training mode the normalization would depend on the other images of the batch
            levels = self.network.levels(self.images(tokens))
            fine = self.network.decode(levels)
        scores = torch.sigmoid(_of_patches(fine, tokens.grid))
        mean, square = (torch.cat([level.pow(power).mean((2, 3)) for level in levels[-FAMILIAR:]], 1) for power in (1, 2))
        spread = (square - mean.square()).clamp(min=1e-6).sqrt()
        seen = torch.cat([mean, spread], 1).unsqueeze(1)
        return Sight(self.smoothed(scores, tokens.grid), torch.sigmoid(fine), TokenBatch(seen, (1, 1)))


def _of_patches(fine: Tensor, grid: tuple[int, int]) -> Tensor:
    """Return the mean logit [B, N] of each patch, made compact."""
    return compact(F.adaptive_avg_pool2d(fine.unsqueeze(1), grid).squeeze(1)).flatten(1)
