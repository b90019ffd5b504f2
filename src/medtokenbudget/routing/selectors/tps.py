"""TPS, joint token pruning and squeezing (Wei et al., CVPR 2023), with the class attention of its variant eTPS.

Post-backbone form: the published module works inside the network, at several blocks; here it is applied once to the final tokens.
"""

from __future__ import annotations

import torch

from medtokenbudget.routing.base import Merger, register_selector
from medtokenbudget.routing.merging import merge, most_similar
from medtokenbudget.routing.topk import rank
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

    def choose(self, tokens: TokenBatch, k: int, generator: torch.Generator | None = None) -> Selection:
        assert tokens.cls_attention is not None
        kept = rank(tokens.cls_attention.float())[:, :k]
        similarity, host = most_similar(tokens.patches, kept)
        weights = similarity.scatter(1, kept, torch.ones_like(similarity)).exp()
        return merge(tokens.patches, host, k, weights)
