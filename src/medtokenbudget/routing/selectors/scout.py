"""`scout`: a small network that reads the pixels of an image and gives lesion scores, finer than the token grid.

A feature pyramid of residual blocks (ResNet, CVPR 2016; FPN, CVPR 2017). It runs on tokens of the backbone 'pixels', whose patches
are the pixels themselves, or 'glance', whose patches are pixels and frozen features: the pixels say where the lesion ends, the
features what it is. So a scout is saved, exported, calibrated and used for early routing like any other selector.
`training/scouting.py` trains it from images and masks.
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
"""Channels at 1/2, 1/4, 1/8 and 1/16 of the image. Few at 1/2: there a channel costs four times as much as at 1/4."""
PYRAMID = 32
NEAR, COMPACT = 4.0, 2.0
"""How much a likely lesion in the neighborhood adds to the logit of a patch, and what distance takes away. Of 96 other settings the
best is 0.02 points better on training-side lesions that are new to the scout and to the choice (docs/training.md)."""
EMBEDDED = 192
"""Features of one block of the embedded backbone. Mean and deviation of the last block's tell unfamiliar images."""
_LARGEST_PATCH = 32


class _BatchNorm(nn.Module):
    """Batch normalization without the integer counter of PyTorch's: a saved model holds floating-point tensors only."""

    running_mean: Tensor
    running_var: Tensor

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(channels)), nn.Parameter(torch.zeros(channels))
        self.register_buffer("running_mean", torch.zeros(channels))
        self.register_buffer("running_var", torch.ones(channels))

    def forward(self, x: Tensor) -> Tensor:
        return F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, self.training)


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


class _Semantic(nn.Module):
    """Two layers on the features of each patch by itself."""

    def __init__(self, features: int, hidden: int, outputs: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(features)
        self.inner, self.outer = nn.Linear(features, hidden), nn.Linear(hidden, outputs)

    def forward(self, features: Tensor) -> Tensor:
        inner = F.gelu(self.inner(self.norm(features.movedim(1, -1))))
        mixed: Tensor = self.outer(inner).movedim(-1, 1)
        return mixed


class ScoutNetwork(nn.Module):
    """Images [B, C, H, W] and features [B, D, h, w] of them to lesion logits [B, H / 2, W / 2].

    Args:
        channels: Channels C of an image.
        width: Number of channels inside, relative to `CHANNELS`.
        features: Dimension D of the features; 0 for none.
    """

    def __init__(self, channels: int = 3, width: float = 1.0, features: int = 0) -> None:
        super().__init__()
        fine, *sizes = (max(8, 8 * round(width * size / 8)) for size in CHANNELS)
        pyramid = max(8, 8 * round(width * PYRAMID / 8))
        self.stem = _conv(channels, fine, 3, 2)
        self.stages = nn.ModuleList(
            nn.Sequential(_conv(above, size, 3, 2), Residual(size)) for above, size in zip([fine, *sizes], sizes)
        )
        # What the whole image looks like: skin tone and light decide what is dark.
        self.context = nn.Linear(sizes[-1], pyramid)
        self.semantic = _Semantic(features, 2 * pyramid, pyramid) if features else None
        self.lateral = nn.ModuleList(nn.Conv2d(size, pyramid, 1) for size in sizes)
        self.merge = nn.ModuleList(_conv(pyramid, pyramid, 3) for _ in sizes)
        self.reduce = nn.Conv2d(pyramid, fine, 1)
        self.refine = _conv(fine, fine, 3)
        self.logit = nn.Conv2d(fine, 1, 1)

    def forward(self, images: Tensor, features: Tensor | None = None) -> Tensor:
        if not torch.compiler.is_compiling():  # faster by a tenth; a graph for any batch size has no memory format
            images = images.contiguous(memory_format=torch.channels_last)
        fine = x = self.stem(images)
        levels = []
        for stage in self.stages:
            x = stage(x)
            levels.append(x)
        top = self.context(x.mean((2, 3)))[:, :, None, None].expand(-1, -1, *x.shape[-2:])
        if self.semantic is not None and features is not None:
            top = top + F.adaptive_avg_pool2d(self.semantic(features), x.shape[-2:])
        for lateral, merge, level in zip(reversed(self.lateral), reversed(self.merge), reversed(levels)):
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
        dim: Numbers per patch: 3 p p for patches of p x p pixels, then those of their features.
        width: Number of channels of the network, relative to the default.
        side: Side p of a patch in pixels; None means that there are no features.
    """

    title = "Scout"
    description = "A small network trained from masks scores every patch; it reads the image instead of tokens."
    color, marker = "#b5179e", "P"
    reads_pixels = True
    finer = True

    def __init__(self, dim: int, width: float = 1.0, minimum: int = 16, side: int | None = None) -> None:
        super().__init__(RouterConfig(minimum=minimum, smooth=1))
        if side is not None and dim >= 3 * side * side:
            self.patch, self.numbers = side, 3 * side * side
        else:  # a token of any dimension is p x p cells: of pixels they are the pixels
            self.patch, self.numbers = max(side for side in range(1, _LARGEST_PATCH + 1) if dim % (side * side) == 0), dim
        self.width, self.side = width, side
        self.network = ScoutNetwork(self.numbers // self.patch**2, width, dim - self.numbers)

    @classmethod
    def from_config(cls, dim: int, config: TrainConfig, classes: int = 2) -> Scout:
        return cls(dim, config.scout.width, config.router.minimum, config.scout.image_size // 16)

    @classmethod
    def settings(cls, config: TrainConfig) -> tuple[str, ...]:
        return (*super().settings(config), "scout.width", "scout.image_size")

    def images(self, tokens: TokenBatch) -> tuple[Tensor, Tensor | None]:
        """Return the images [B, C, H, W] that the tokens are of, and their features [B, D, h, w] if there are any."""
        patches = tokens.patches if tokens.pixels is None else tokens.pixels
        cells = patches.float().transpose(1, 2).unflatten(2, tokens.grid)
        images = F.pixel_shuffle(cells[:, : self.numbers], self.patch)
        return images, cells[:, self.numbers :] if cells.shape[1] > self.numbers else None

    def fine_logits(self, tokens: TokenBatch) -> Tensor:
        """Return the lesion logits [B, H / 2, W / 2] of every second pixel."""
        fine: Tensor = self.network(*self.images(tokens))
        return fine

    def logits(self, tokens: TokenBatch, generator: torch.Generator | None = None, at: Tensor | None = None) -> Tensor:
        patches = _of_patches(self.fine_logits(tokens), tokens.grid)
        return patches if at is None else patches.gather(1, at)

    def see(self, tokens: TokenBatch) -> Sight:
        with evaluating(self.network):  # in training mode the normalization would depend on the other images of the batch
            fine = self.fine_logits(tokens)
        scores = torch.sigmoid(_of_patches(fine, tokens.grid))
        images, features = self.images(tokens)
        values = images if features is None else features[:, -EMBEDDED:]
        mean = values.mean((2, 3))
        spread = (values.square().mean((2, 3)) - mean.square()).clamp(min=1e-6).sqrt()
        seen = torch.cat([mean, spread], 1).unsqueeze(1)
        return Sight(self.smoothed(scores, tokens.grid), torch.sigmoid(fine), TokenBatch(seen, (1, 1)))


def _of_patches(fine: Tensor, grid: tuple[int, int]) -> Tensor:
    """Return the mean logit [B, N] of each patch, made compact."""
    return compact(F.adaptive_avg_pool2d(fine.unsqueeze(1), grid).squeeze(1)).flatten(1)
