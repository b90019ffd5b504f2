"""K-medoids token clustering (Marin et al., "Token Pooling in Vision Transformers", WACV 2023).

Post-backbone form: one clustering of the final tokens, where the paper downsamples after every block. As there, it starts from the
K most significant tokens (class attention) and each cluster is represented by its medoid, an unchanged patch.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from medtokenbudget.config import Count
from medtokenbudget.routing.base import Merger, gather, register_selector
from medtokenbudget.routing.merging import nearest_center, squared_distances
from medtokenbudget.routing.topk import rank
from medtokenbudget.tokens import Selection, TokenBatch


@register_selector("k-medoids")
class KMedoids(Merger):
    """The medoids of K clusters: each patch joins the nearest medoid, then the patch with the smallest summed distance leads.

    The summed distance counts every patch with its class attention, as the paper's weighted variant does.
    """

    title = "K-medoids"
    description = "Represents clusters of patches by their medoids."
    color, marker = "#5a5a9c", "*"
    requires = ("cls_attention",)

    def __init__(self, iterations: Count = 5, minimum: int = 16) -> None:
        super().__init__(minimum)
        self.iterations = iterations

    def choose(self, tokens: TokenBatch, k: int, generator: torch.Generator | None = None) -> Selection:
        assert tokens.cls_attention is not None
        attention = tokens.cls_attention.float()
        distances = squared_distances(tokens.patches)
        medoids = rank(attention)[:, :k]
        for _ in range(self.iterations):
            medoids = update_medoids(distances, nearest_center(distances, medoids), attention, k)
        assignment = nearest_center(distances, medoids)
        sizes = F.one_hot(assignment, k).sum(1).float()
        return Selection(tokens=gather(tokens.patches, medoids).tokens, weights=sizes, assignment=assignment)


def update_medoids(distances: Tensor, assignment: Tensor, weights: Tensor, k: int) -> Tensor:
    """Return the medoid of each group `[B, k]`: the member with the smallest weighted sum of distances to the members."""
    member = F.one_hot(assignment, k).float()  # [B, N, k]
    cost = torch.bmm(distances * weights.unsqueeze(1), member)
    # Only members can lead their group.
    return cost.masked_fill(member == 0, torch.inf).argmin(1)
