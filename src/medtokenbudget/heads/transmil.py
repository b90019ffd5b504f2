"""TransMIL (Shao et al., NeurIPS 2021): two transformer layers, a convolutional position encoding and a class token.

With at most some hundred tokens the attention is exact, where the publication approximates it (Nystrom) and adds a convolution
over the values, and the tokens are where they are on the grid, where the publication makes the sequence square. It is narrower: 128
instead of 512.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from medtokenbudget.errors import RequestError
from medtokenbudget.heads.head import TokenHead, register_head, weighted_softmax
from medtokenbudget.tokens import TokenSet


class WeightedAttention(nn.Module):
    """Multi-head self-attention in which every token has a weight."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.output = nn.Linear(width, width)

    def forward(self, x: Tensor, weights: Tensor) -> Tensor:
        """x [B, L, width], weights [B, L] to the change of x."""
        b, length, width = x.shape
        q, k, v = self.qkv(self.norm(x)).view(b, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        shares = weighted_softmax(q @ k.transpose(-2, -1) / math.sqrt(width // self.heads), weights[:, None, None])
        return self.output((shares @ v).transpose(1, 2).reshape(b, length, width))


class PositionEncoding(nn.Module):
    """PPEG: the sum of depthwise convolutions of sides 7, 5 and 3 over the grid, added to the tokens."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.convolutions = nn.ModuleList(nn.Conv2d(width, width, side, padding=side // 2, groups=width) for side in (7, 5, 3))

    def forward(self, x: Tensor, weights: Tensor, positions: Tensor, grid: tuple[int, int]) -> Tensor:
        """x [B, K, width] at `positions` [B, K, 2]; places without a token are zero, tokens that share a place are added."""
        b, _, width = x.shape
        # A merged token is at the mean position of its patches: it takes the nearest place.
        rows = positions[..., 0].round().long().clamp(0, grid[0] - 1)
        columns = positions[..., 1].round().long().clamp(0, grid[1] - 1)
        place = (rows * grid[1] + columns).unsqueeze(-1).expand_as(x)
        canvas = x.new_zeros(b, grid[0] * grid[1], width).scatter_add(1, place, x * weights.unsqueeze(-1))
        field = canvas.transpose(1, 2).view(b, width, *grid)
        encoded = torch.stack([convolution(field) for convolution in self.convolutions]).sum(0)
        return x + encoded.flatten(2).transpose(1, 2).gather(1, place)


@register_head("transmil")
class TransMIL(TokenHead):
    """Linear, ReLU, class token, attention, position encoding, attention, LayerNorm and a linear layer on the class token."""

    description = "Two transformer layers over the kept tokens with positions on the grid."

    def __init__(self, dim: int, classes: int, width: int = 128, heads: int = 4, dropout: float = 0.1) -> None:
        super().__init__(dim, classes)
        if width % heads:
            raise RequestError(f"width must be a multiple of heads, got {width} and {heads}.")
        self.width, self.heads, self.dropout = width, heads, dropout
        self.features = nn.Linear(dim, width)
        self.class_token = nn.Parameter(0.02 * torch.randn(1, 1, width))
        self.first, self.second = WeightedAttention(width, heads), WeightedAttention(width, heads)
        self.position = PositionEncoding(width)
        self.norm = nn.LayerNorm(width)
        self.output = nn.Linear(width, classes)

    def logits(self, kept: TokenSet, generator: torch.Generator | None = None) -> Tensor:
        features = self.drop(F.relu(self.features(kept.tokens)), generator)
        x = torch.cat([self.class_token.expand(len(kept), -1, -1), features], 1)
        # The class token always counts.
        weights = F.pad(kept.weights, (1, 0), value=1.0)
        x = x + self.first(x, weights)
        x = torch.cat([x[:, :1], self.position(x[:, 1:], kept.weights, kept.positions, kept.grid)], 1)
        x = x + self.second(x, weights)
        return self.output(self.norm(x[:, 0]))
