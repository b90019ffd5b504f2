"""The context scorer: one score per patch from the patch and its neighborhood, since a lesion is a region.

The paper's scorer (`routing/lats.py`) judges each patch alone. Here depthwise convolutions over the token grid let every patch see
the patches around it; three blocks of 5 x 5 reach six patches far in each direction.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from medtokenbudget.config import ContextConfig
from medtokenbudget.errors import RequestError, ShapeError
from medtokenbudget.routing.layers import dropout as drop
from medtokenbudget.tokens import TokenBatch

INITIAL_SCALE = 0.1
"""A new block adds this share of what it computes, so that deep scorers start close to a linear one."""


class ContextBlock(nn.Module):
    """`x + scale * MLP(LayerNorm(DepthwiseConvolution(x)))` over a grid [B, h, w, C], with zeros beyond the border."""

    def __init__(self, channels: int, kernel: int, expansion: int) -> None:
        super().__init__()
        self.look = nn.Conv2d(channels, channels, kernel, padding=kernel // 2, groups=channels)
        self.norm = nn.LayerNorm(channels)
        self.up = nn.Linear(channels, expansion * channels)
        self.down = nn.Linear(expansion * channels, channels)
        self.scale = nn.Parameter(torch.full((channels,), INITIAL_SCALE))

    def forward(self, x: Tensor, dropout: float = 0.0, generator: torch.Generator | None = None) -> Tensor:
        seen = self.look(x.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)
        made = self.down(F.gelu(self.up(self.norm(seen))))
        return x + self.scale * drop(made, dropout, generator)


class ContextScorer(nn.Module):
    """Score logits [B, N] of a `TokenBatch` on any grid; 258,305 parameters at D = 384, 233,729 at D = 192.

    Args:
        dim: Embedding dimension D.
        channels: Width C of the blocks.
        blocks: Number of blocks.
        kernel: Side of the convolutions, in patches; odd.
        expansion: Width of the MLP of a block, in multiples of C.
        dropout: Dropout of what a block adds.
    """

    def __init__(
        self, dim: int, channels: int = 128, blocks: int = 3, kernel: int = 5, expansion: int = 2, dropout: float = 0.0
    ) -> None:
        super().__init__()
        if min(dim, channels, blocks, expansion) < 1:
            raise RequestError(
                f"`dim`, `channels`, `blocks` and `expansion` must be at least 1, got {dim}, {channels}, {blocks} and {expansion}."
            )
        if kernel < 1 or kernel % 2 == 0:
            raise RequestError(f"The side of the convolutions, `kernel`, must be odd, got {kernel}.")
        if not 0 <= dropout < 1:
            raise RequestError(f"`dropout` must be in [0, 1), got {dropout}.")
        self.dim, self.channels, self.kernel, self.expansion, self.dropout = dim, channels, kernel, expansion, dropout
        self.input = nn.Linear(dim, channels)
        self.blocks = nn.ModuleList(ContextBlock(channels, kernel, expansion) for _ in range(blocks))
        self.output = nn.Linear(channels, 1)

    @classmethod
    def from_config(cls, dim: int, config: ContextConfig) -> ContextScorer:
        return cls(dim, config.channels, config.blocks, config.kernel, config.expansion, config.dropout)

    def logits(self, tokens: TokenBatch, generator: torch.Generator | None = None, dropout: float = 0.0, turn: int = 0) -> Tensor:
        """Scores before the sigmoid, [B, N] in fp32.

        Args:
            tokens: The batch.
            generator: Source of the dropout noise; torch's own if None.
            dropout: Dropout of what a block adds.
            turn: Which of the eight flips and turns of the grid the blocks see (`turned`); the scores are in the order of the
                patches all the same.
        """
        if tokens.dim != self.dim:
            raise ShapeError(f"This scorer reads tokens of dimension {self.dim}, but the batch has {tokens.dim}.")
        x = self.input(tokens.patches.float()).unflatten(1, tokens.grid)
        x = turned(x, turn)
        for block in self.blocks:
            x = block(x, dropout, generator)
        return turned_back(self.output(x), turn).flatten(1).float()


def turned(field: Tensor, turn: int) -> Tensor:
    """A field [B, h, w, C] flipped upside down (bit 0 of `turn`), left to right (bit 1), then transposed (bit 2)."""
    flips = [axis for bit, axis in ((1, 1), (2, 2)) if turn & bit]
    field = field.flip(flips) if flips else field
    return field.transpose(1, 2) if turn & 4 else field


def turned_back(field: Tensor, turn: int) -> Tensor:
    """The inverse of `turned`."""
    field = field.transpose(1, 2) if turn & 4 else field
    flips = [axis for bit, axis in ((1, 1), (2, 2)) if turn & bit]
    return field.flip(flips) if flips else field
