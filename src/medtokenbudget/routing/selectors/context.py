"""The context scorer: one score per patch from the patch and its neighborhood, since a lesion is a region.

The paper's scorer (`lats.py`) judges each patch alone. Here depthwise convolutions over the token grid let every patch see
the patches around it; three blocks of 5 x 5 reach six patches far in each direction.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from medtokenbudget.config import ContextConfig, RouterConfig, TrainConfig
from medtokenbudget.errors import RequestError, ShapeError
from medtokenbudget.routing.base import register_selector
from medtokenbudget.routing.trainable import ScoredRanker, with_options
from medtokenbudget.routing.trainable import dropout as drop
from medtokenbudget.tokens import TokenBatch

TURNS = 8
"""Flips and turns of a grid."""
INITIAL_SCALE = 0.1
"""A new block adds this share of what it computes, so that deep scorers start close to a linear one."""


class ContextBlock(nn.Module):
    """`x + scale * MLP(LayerNorm(DepthwiseConvolution(x)))` over a grid [B, h, w, C], with zeros beyond the border."""

    def __init__(self, channels: int, kernel: int, expansion: int) -> None:
        super().__init__()
        # Names of parameters are part of saved models.
        self.look = nn.Conv2d(channels, channels, kernel, padding=kernel // 2, groups=channels)
        self.norm = nn.LayerNorm(channels)
        self.up = nn.Linear(channels, expansion * channels)
        self.down = nn.Linear(expansion * channels, channels)
        self.scale = nn.Parameter(torch.full((channels,), INITIAL_SCALE))

    def forward(self, x: Tensor, dropout: float = 0.0, generator: torch.Generator | None = None) -> Tensor:
        # Channels last, because norm and MLP work on the last axis; only the convolution wants them first.
        context = self.look(x.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)
        change = self.down(F.gelu(self.up(self.norm(context))))
        return x + self.scale * drop(change, dropout, generator)


class ContextScorer(nn.Module):
    """Score logits [B, N] of a `TokenBatch` on any grid; 258,305 parameters at D = 384, 233,729 at D = 192."""

    def __init__(self, dim: int, config: ContextConfig | None = None) -> None:
        super().__init__()
        self.config = config = config or ContextConfig()
        if dim < 1:
            raise RequestError(f"`dim` must be at least 1, got {dim}.")
        self.dim = dim
        self.input = nn.Linear(dim, config.channels)
        self.blocks = nn.ModuleList(ContextBlock(config.channels, config.kernel, config.expansion) for _ in range(config.blocks))
        self.output = nn.Linear(config.channels, 1)

    def logits(self, tokens: TokenBatch, generator: torch.Generator | None = None, dropout: float = 0.0, turn: int = 0) -> Tensor:
        """Compute the scores before the sigmoid, [B, N] in fp32.

        `turn` says which of the eight flips and turns of the grid the blocks see (`turned`); the scores are in the order of the
        patches all the same.
        """
        if tokens.dim != self.dim:
            raise ShapeError(f"This scorer reads tokens of dimension {self.dim}, but the batch has {tokens.dim}.")
        x = turned(self.input(tokens.patches.float()).unflatten(1, tokens.grid), turn)
        for block in self.blocks:
            x = block(x, dropout, generator)
        return turned_back(self.output(x), turn).flatten(1).float()


def turned(field: Tensor, turn: int) -> Tensor:
    """Return a field [B, h, w, C] flipped upside down (bit 0 of `turn`), left to right (bit 1), then transposed (bit 2)."""
    flips = [axis for bit, axis in ((1, 1), (2, 2)) if turn & bit]
    field = field.flip(flips) if flips else field
    return field.transpose(1, 2) if turn & 4 else field


def turned_back(field: Tensor, turn: int) -> Tensor:
    field = field.transpose(1, 2) if turn & 4 else field
    flips = [axis for bit, axis in ((1, 1), (2, 2)) if turn & bit]
    return field.flip(flips) if flips else field


@register_selector("context")
class ContextSelector(ScoredRanker):
    """Keeps the patches with the highest score of a small convolutional network over the token grid.

    The scorer has a smoothing of its own: the blocks see the neighborhood themselves. `options` replace fields of `config` or
    `router`: `create_selector("context", dim=384, blocks=2)`.
    """

    title = "Context (joint)"
    description = "A small network scores every patch by its neighborhood."
    color, marker = "#cc79a7", "H"
    line = "--"

    def __init__(self, dim: int, config: ContextConfig | None = None, router: RouterConfig | None = None, **options: Any) -> None:
        config = config or ContextConfig()
        router = router or RouterConfig(padding="exclude")
        scorer, smoothing = with_options(self.name, options, config, router, training_only=("min_steps",))
        super().__init__(replace(smoothing, smooth=scorer.smooth))
        self.scorer = ContextScorer(dim, scorer)

    @classmethod
    def from_config(cls, dim: int, config: TrainConfig, classes: int = 2) -> Self:
        return cls(dim, config.context, config.router)

    @classmethod
    def settings(cls, config: TrainConfig) -> tuple[str, ...]:
        padding = ("router.padding",) if config.context.smooth > 1 else ()
        return (*super().settings(config), "context", *padding)

    def min_steps(self, config: TrainConfig) -> int:
        return min(config.min_steps, config.context.min_steps)

    def options(self) -> dict[str, Any]:
        scorer = {name: value for name, value in vars(self.scorer.config).items() if name != "min_steps"}
        return {**scorer, **vars(self.router)}

    def sample(self, tokens: TokenBatch, patches: int, generator: torch.Generator | None) -> Tensor | None:
        """Take all patches: the blocks need every neighbor, so a sample would save nothing."""
        return None

    def logits(self, tokens: TokenBatch, generator: torch.Generator | None = None, at: Tensor | None = None) -> Tensor:
        """Give raw score logits [B, N] (or [B, T] at the patches `at`); in training mode with dropout and a random turn."""
        turn = int(torch.randint(TURNS, (1,), generator=generator)) if self.scorer.config.turns and self.training else 0
        logits = self.scorer.logits(tokens, generator, self.scorer.config.dropout if self.training else 0.0, turn)
        return logits if at is None else logits.take_along_dim(at, 1)
