"""Attention-based multiple instance learning (Ilse et al., ICML 2018), the gated form."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from medtokenbudget.heads.head import TokenHead, register_head, weighted_softmax
from medtokenbudget.routing.trainable import GatedAttention
from medtokenbudget.routing.trainable import dropout as drop
from medtokenbudget.tokens import TokenSet


@register_head("abmil")
class ABMIL(TokenHead):
    """One gated attention over the tokens, then a linear layer."""

    description = "Gated attention over the kept tokens."

    def __init__(self, dim: int, classes: int, width: int = 256, attention: int = 128, dropout: float = 0.1) -> None:
        super().__init__(dim, classes)
        self.width, self.attention, self.dropout = width, attention, dropout
        self.features = nn.Linear(dim, width)
        self.attend = GatedAttention(width, attention)
        self.output = nn.Linear(width, classes)

    def logits(self, kept: TokenSet, generator: torch.Generator | None = None) -> Tensor:
        features = drop(F.relu(self.features(kept.tokens)), self.dropout if self.training else 0.0, generator)
        shares = weighted_softmax(self.attend(features).squeeze(-1), kept.weights)
        return self.output(torch.bmm(shares.unsqueeze(1), features).squeeze(1))
