"""EViT (Liang et al., ICLR 2022, "Not All Patches are What You Need"): attentive tokens stay, the others are fused into one.

Post-backbone form: EViT reorganizes tokens inside the network, at several blocks; here it is done once, on the final tokens, with
the class attention of the chosen block.
"""

from __future__ import annotations

import torch

from medtokenbudget.routing.base import Merger, register_selector
from medtokenbudget.routing.merging import with_rest
from medtokenbudget.routing.topk import rank
from medtokenbudget.tokens import Selection, TokenBatch


@register_selector("evit")
class EViT(Merger):
    """The K - 1 patches with the highest class attention a, and the fused token `sum(a_i x_i) / sum(a_i)` of all others."""

    title = "EViT"
    description = "Keeps the most attended patches, fuses all others into one token."
    color, marker = "#2a7f7f", "P"
    requires = ("cls_attention",)
    ranks_by = "cls_attention"

    def choose(self, tokens: TokenBatch, k: int, generator: torch.Generator | None = None) -> Selection:
        assert tokens.cls_attention is not None
        attention = tokens.cls_attention.float()
        order = rank(attention)
        # Weights far below fp32's precision would make a group of zero mass.
        weights = attention.clamp_min(torch.finfo(torch.float32).tiny ** 0.5)
        return with_rest(tokens.patches, order[:, : k - 1], weights)
