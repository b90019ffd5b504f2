"""TPS, joint token pruning and squeezing (Wei et al., CVPR 2023), with the class attention of its variant eTPS.

Post-backbone form: the published module works inside the network, at several blocks; here it is applied once to the final tokens.
"""

from __future__ import annotations

import torch

from medtokenbudget.routing.base import Merger, register_selector
from medtokenbudget.routing.merging import cosine_similarities, merge
from medtokenbudget.routing.topk import check_k, rank
from medtokenbudget.tokens import Selection, TokenBatch


@register_selector("tps")
class TPS(Merger):
    """The K patches with the highest class attention; every other patch is squeezed into the most similar of them.

    A kept patch x_j becomes the mean of itself and of the pruned patches x_i matched to it, weighted with `exp(cos(x_i, x_j))`; its
    own weight is `exp(1)`.
    """

    title = "TPS"
    description = "Keeps the most attended patches, squeezes the others into the most similar of them."
    color, marker = "#4f6d2f", "P"
    requires = ("cls_attention",)

    def select(self, tokens: TokenBatch, k: int, generator: torch.Generator | None = None) -> Selection:
        k = check_k(k, tokens.n)
        attention = self.read(tokens, "cls_attention")
        kept = rank(attention)[:, :k]
        similarity, host = cosine_similarities(tokens.patches).take_along_dim(kept.unsqueeze(1), 2).max(2)
        numbers = torch.arange(k, device=kept.device).expand_as(kept)
        return merge(
            tokens.patches,
            host.scatter(1, kept, numbers),
            k,
            similarity.scatter(1, kept, torch.ones_like(similarity)).exp(),
        )
