"""Cropr (Bergner et al., CVPR 2025, "Token Cropr"): cross-attention pruning, the pruner inside SLIM (Bozkurt et al., 2025).

A learned query attends to the tokens; an auxiliary head predicts the class from what it gathers, and its loss alone trains the
scores. The module is the published one for classification: no projections, one query, an MLP behind the attention. Post-backbone
form: one module on the final tokens, without last-layer fusion. SLIM as a whole is a slide encoder.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from medtokenbudget.routing.base import register_selector
from medtokenbudget.routing.trainable import Probe
from medtokenbudget.tokens import TokenBatch


@register_selector("cropr")
class Cropr(Probe):
    """The K patches with the largest dot product with the query (the sum over queries), as in the publication at inference."""

    title = "Cropr"
    description = "Learned queries, trained by an auxiliary classifier, score the patches."
    color, marker = "#94651f", "h"
    term = "auxiliary"

    def __init__(self, dim: int, classes: int = 2, queries: int = 1, ratio: int = 4, minimum: int = 16) -> None:
        super().__init__(minimum)
        self.classes, self.queries, self.ratio = classes, queries, ratio
        self.query = nn.Parameter(nn.init.trunc_normal_(torch.empty(queries, dim), std=dim**-0.5))
        self.mlp = nn.Sequential(nn.LayerNorm(dim, eps=1e-6), nn.Linear(dim, ratio * dim), nn.GELU(), nn.Linear(ratio * dim, dim))
        self.auxiliary = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, classes))
        # A dot product has no threshold; the lesion loss, which is not part of the publication, needs one.
        self.threshold = nn.Parameter(torch.zeros(()))

    def products(self, patches: Tensor) -> Tensor:
        """Return the dot products of each query with the patches, which are keys and values themselves: [B, queries, N] in fp32."""
        return (self.query @ patches.transpose(1, 2)).float()

    def score(self, tokens: TokenBatch, generator: torch.Generator | None = None) -> Tensor:
        # Ranking needs neither the MLP nor the auxiliary head.
        return self.products(tokens.patches.float()).sum(1)

    def relative(self, scores: Tensor) -> Tensor:
        return scores - self.threshold

    def attribute(self, patches: Tensor) -> tuple[Tensor, Tensor]:
        products = self.products(patches)
        # The scale is for the softmax alone: it does not change the ranking.
        shares = (products / math.sqrt(self.query.shape[1])).softmax(-1)
        gathered = torch.bmm(shares, patches)  # [B, queries, D]
        return products.sum(1), self.auxiliary((gathered + self.mlp(gathered)).mean(1))
