"""Attention-based multiple instance learning (Ilse et al., ICML 2018), the gated form."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from medtokenbudget.heads.head import TokenHead, register_head, weighted_softmax
from medtokenbudget.routing.trainable import GatedAttention
from medtokenbudget.tokens import TokenSet


class GatedPooling(TokenHead):
    """Pools the tokens by gated attention, in one or more branches. Subclasses add the classifier `output`."""

    output: nn.Linear

    def __init__(self, dim: int, classes: int, width: int, attention: int, dropout: float, branches: int = 1) -> None:
        super().__init__(dim, classes)
        self.width, self.attention, self.dropout = width, attention, dropout
        self.features = nn.Linear(dim, width)
        self.attend = GatedAttention(width, attention, branches)

    def attended(self, kept: TokenSet, generator: torch.Generator | None) -> tuple[Tensor, Tensor, Tensor]:
        """Return features [B, K, width], attention logits [B, branches, K] and class logits [B, C]."""
        features = self.drop(F.relu(self.features(kept.tokens)), generator)
        attention = self.attend(features).transpose(1, 2)
        shares = weighted_softmax(attention, kept.weights.unsqueeze(1))
        return features, attention, self.bag(torch.bmm(shares, features))

    def bag(self, pooled: Tensor) -> Tensor:
        """Compute logits [B, C] of the pooled features [B, branches, width]."""
        return self.output(pooled.squeeze(1))

    def logits(self, kept: TokenSet, generator: torch.Generator | None = None) -> Tensor:
        return self.attended(kept, generator)[2]


@register_head("abmil")
class ABMIL(GatedPooling):
    """One gated attention over the tokens, then a linear layer."""

    description = "Gated attention over the kept tokens."

    def __init__(self, dim: int, classes: int, width: int = 256, attention: int = 128, dropout: float = 0.1) -> None:
        super().__init__(dim, classes, width, attention, dropout)
        self.output = nn.Linear(width, classes)
