"""ATC, agglomerative token clustering (Haurum et al., ECCV 2024): the two closest clusters merge until K are left.

Post-backbone form: one hierarchical clustering of the final tokens, on their cosine distances or, with `compare='keys'`, on those
of the keys of their block; the paper clusters the keys of several blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from medtokenbudget.routing.base import register_selector
from medtokenbudget.routing.merging import Compared, ComparingMerger, cosine_similarities, merge
from medtokenbudget.tokens import Selection, TokenBatch

Linkage = Literal["average", "complete", "single"]


@register_selector("atc")
class ATC(ComparingMerger):
    """K clusters by agglomeration; a token is the mean of its cluster. `linkage` is the mean, largest or smallest distance of
    patches.
    """

    title = "ATC"
    description = "Merges the closest pair of clusters until K are left."
    color, marker = "#8a3ea0", "*"

    def __init__(self, linkage: Linkage = "average", compare: Compared = "patches", minimum: int = 16) -> None:
        super().__init__(compare, minimum)
        self.linkage = linkage

    def choose(self, tokens: TokenBatch, k: int, generator: torch.Generator | None = None) -> Selection:
        return self._selections(tokens, [k])[0]

    def pooled(self, tokens: TokenBatch, budgets: Sequence[float], generator: torch.Generator | None = None) -> Tensor:
        selections = self._selections(self.check(tokens), [self.count(budget, tokens.n) for budget in budgets])
        return torch.stack([selection.pooled() for selection in selections], dim=1)

    def _selections(self, tokens: TokenBatch, counts: Sequence[int]) -> list[Selection]:
        leaders = agglomerate(1 - cosine_similarities(self.compared(tokens)), counts, self.linkage)
        return [merge(tokens.patches, numbered(leaders[k]), k) for k in counts]


def numbered(leaders: Tensor) -> Tensor:
    """Number clusters [B, N], which are named by their first patch, in the order of it."""
    leads = torch.zeros_like(leaders).scatter_(1, leaders, 1)
    return (leads.cumsum(1) - 1).gather(1, leaders)


def agglomerate(distances: Tensor, counts: Sequence[int], linkage: Linkage) -> dict[int, Tensor]:
    """Find the first patch of each patch's cluster `[B, N]` with K clusters left, for each K of `counts`: distances `[B, N, N]`.

    Every step merges one pair in each image of the batch, so that all images end at the same step, and updates the distances to
    the new cluster by the recurrence of Lance and Williams instead of computing them again.
    """
    b, n, _ = distances.shape
    image = torch.arange(b, device=distances.device)
    distances = distances.clone()
    distances.diagonal(dim1=1, dim2=2).fill_(torch.inf)
    size = torch.ones(b, n, device=distances.device)
    leader = torch.arange(n, device=distances.device).repeat(b, 1)
    leaders = {n: leader}
    for left in range(n - 1, min(counts) - 1, -1):
        first = distances.amin(2).argmin(1)
        second = distances[image, first].argmin(1)
        # Distances are symmetric, so the first row with the minimum is before the second.
        one, two = distances[image, first], distances[image, second]
        if linkage == "average":
            a, c = size[image, first].unsqueeze(1), size[image, second].unsqueeze(1)
            joined = (a * one + c * two) / (a + c)
        else:
            joined = torch.maximum(one, two) if linkage == "complete" else torch.minimum(one, two)
        joined[image, first] = torch.inf
        joined[image, second] = torch.inf
        distances[image, first] = joined
        distances[image, :, first] = joined
        distances[image, second] = torch.inf
        distances[image, :, second] = torch.inf
        size[image, first] += size[image, second]
        leader = torch.where(leader == second.unsqueeze(1), first.unsqueeze(1), leader)
        if left in counts:
            leaders[left] = leader
    return leaders
