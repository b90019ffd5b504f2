"""The gated attention of attention-based multiple instance learning (Ilse et al., ICML 2018), for heads and selectors."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class GatedAttention(nn.Module):
    """Attention logits [B, K, branches] of features h [B, K, dim]: `w . (tanh(V h) * sigmoid(U h))` (Eq. 9).

    Args:
        dim: Dimension of the features.
        width: Width of the attention.
        branches: Attention maps.
    """

    def __init__(self, dim: int, width: int, branches: int = 1) -> None:
        super().__init__()
        self.value = nn.Linear(dim, width)
        self.gate = nn.Linear(dim, width)
        self.output = nn.Linear(width, branches)

    def forward(self, features: Tensor) -> Tensor:
        return self.output(torch.tanh(self.value(features)) * torch.sigmoid(self.gate(features)))
