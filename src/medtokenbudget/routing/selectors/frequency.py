"""Frequency-aware token reduction (Lee et al., NeurIPS 2025): high-frequency tokens stay, the others become one DC token.

The paper splits the attention into its mean, `11'/n`, and the high-pass rest `A - 11'/n`, and keeps the tokens with the largest
share of the rest. Summed over the tokens that attend, the mean is the same for every token, so the ranking is that of the
received attention. Post-backbone form: once, on the final tokens; the paper reduces at several blocks and reweights the attention
of the next ones.
"""

from __future__ import annotations

import torch

from medtokenbudget.routing.base import Merger, register_selector
from medtokenbudget.routing.merging import with_rest
from medtokenbudget.routing.topk import rank
from medtokenbudget.tokens import Selection, TokenBatch


@register_selector("frequency")
class Frequency(Merger):
    """The K - 1 patches that receive the most attention, and the mean of all others (DC token)."""

    title = "Frequency"
    description = "Keeps the patches that receive the most attention, averages all others."
    color, marker = "#94651f", "P"
    requires = ("received_attention",)
    ranks_by = "received_attention"

    def choose(self, tokens: TokenBatch, k: int, generator: torch.Generator | None = None) -> Selection:
        assert tokens.received_attention is not None
        return with_rest(tokens.patches, rank(tokens.received_attention.float())[:, : k - 1])
