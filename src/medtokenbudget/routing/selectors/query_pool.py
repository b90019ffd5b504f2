"""Query pooling: K learned queries attend to the patches. The token sparsification inside MedSpaformer (Ye et al., AAAI 2026).

Only that mechanism: MedSpaformer as a whole is a transformer for medical time series with several granularities and a label
encoder. Values are the patches themselves, so that the tokens stay in the space that heads read.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from medtokenbudget.config import Count
from medtokenbudget.routing.base import register_selector
from medtokenbudget.routing.trainable import SoftMerger
from medtokenbudget.tokens import TokenBatch


@register_selector("query-pool")
class QueryPool(SoftMerger):
    """Tokens `sum_n softmax_n(q_k . W x_n / sqrt(width)) x_n` with learned queries q."""

    title = "Query pool"
    description = "Mixes all patches into K tokens by attention of learned queries."
    color, marker = "#4f6d2f", "8"

    def __init__(self, dim: int, width: int = 64, slots: Count = 256, minimum: int = 16) -> None:
        super().__init__(slots, minimum)
        self.width = width
        self.queries = nn.Parameter(torch.randn(slots, width))
        self.keys = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, width))

    def attention(self, tokens: TokenBatch, k: int) -> Tensor:
        logits = self.queries[:k] @ self.keys(tokens.patches).transpose(1, 2) / math.sqrt(self.width)
        return logits.float().softmax(-1)
