"""Attentive probe (Chen et al., "Context Autoencoder", IJCV 2024): one learned query attends to the tokens, then a linear layer."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from medtokenbudget.errors import RequestError
from medtokenbudget.heads.head import TokenHead, register_head, weighted_softmax
from medtokenbudget.tokens import TokenSet


@register_head("attentive-probe")
class AttentiveProbe(TokenHead):
    """Multi-head cross-attention of a learned query, LayerNorm and a linear layer."""

    description = "Attention of one learned query over the kept tokens."

    def __init__(self, dim: int, classes: int, width: int = 128, heads: int = 4) -> None:
        super().__init__(dim, classes)
        if width % heads:
            raise RequestError(f"width must be a multiple of heads, got {width} and {heads}.")
        self.width, self.heads = width, heads
        self.query = nn.Parameter(0.02 * torch.randn(heads, width // heads))
        self.norm = nn.LayerNorm(dim)
        self.key = nn.Linear(dim, width)
        self.value = nn.Linear(dim, width)
        self.output = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, classes))

    def logits(self, kept: TokenSet, generator: torch.Generator | None = None) -> Tensor:
        b, k, _ = kept.tokens.shape
        x = self.norm(kept.tokens)
        keys, values = (layer(x).view(b, k, self.heads, -1).transpose(1, 2) for layer in (self.key, self.value))
        logits = (keys @ self.query.unsqueeze(-1)).squeeze(-1) / math.sqrt(keys.shape[-1])  # [B, heads, K]
        shares = weighted_softmax(logits, kept.weights.unsqueeze(1))
        return self.output((shares.unsqueeze(2) @ values).flatten(1))
