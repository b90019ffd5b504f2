"""Building blocks of the mergers: group means, distances and the selection that a grouping of the patches makes.

All functions are vectorized over the batch and over the groups.
"""

from __future__ import annotations

from abc import abstractmethod
from types import MappingProxyType
from typing import Literal, get_args

import torch
from torch import Tensor
from torch.nn import functional as F

from medtokenbudget.errors import UnknownNameError
from medtokenbudget.routing.base import Merger
from medtokenbudget.routing.topk import check_k
from medtokenbudget.tokens import Selection, TokenBatch

Compared = Literal["patches", "keys"]
"""What a merger compares: the tokens that it merges, or the keys of their block, as ToMe and its successors do in a network."""


class ComparingMerger(Merger):
    """A merger that compares the patches or, with `compare='keys'`, the mean keys of the block that they come from.

    Args:
        compare: 'patches' or 'keys'.
        minimum: Fewest tokens kept at any budget.
    """

    variants = MappingProxyType({"keys": {"compare": "keys"}})

    def __init__(self, compare: Compared = "patches", minimum: int = 16) -> None:
        super().__init__(minimum)
        if compare not in get_args(Compared):
            raise UnknownNameError.of("compare", str(compare), get_args(Compared))
        self.compare = compare
        if compare == "keys":
            self.requires = ("mean_key",)

    def compared(self, tokens: TokenBatch) -> Tensor:
        """What is compared, [B, N, D] or [B, N, d] in fp32."""
        if self.compare == "patches":
            return tokens.patches.float()
        assert tokens.mean_key is not None
        return tokens.mean_key.float()

    def with_compared(self, tokens: TokenBatch) -> tuple[Tensor, int]:
        """The patches with what is compared beside them, so that both are merged, and the feature where it begins."""
        if self.compare == "patches":
            return tokens.patches.float(), 0
        return torch.cat([tokens.patches.float(), self.compared(tokens)], -1), tokens.dim


class RoundMerger(ComparingMerger):
    """A merger that removes up to half of the tokens in each round until K are left; `weights` are the group sizes."""

    @abstractmethod
    def merge_round(self, x: Tensor, size: Tensor, r: int, first: int) -> tuple[Tensor, Tensor, Tensor]:
        """Merge r of the tokens x [B, n, D] with sizes [B, n], comparing the features from `first` on.

        Returns:
            The n - r tokens, their sizes, and where each of the n tokens went, int64 [B, n].
        """

    def select(self, tokens: TokenBatch, k: int, generator: torch.Generator | None = None) -> Selection:
        k = check_k(k, tokens.n)
        x, first = self.with_compared(self.check(tokens))
        size = torch.ones(x.shape[:2], device=x.device)
        assignment = torch.arange(tokens.n, device=x.device).repeat(len(x), 1)
        while x.shape[1] > k:
            count = x.shape[1]
            x, size, moved = self.merge_round(x, size, min(count - k, count // 2), first)
            assignment = moved.gather(1, assignment)
        return Selection(tokens=x[..., : tokens.dim].to(tokens.patches.dtype), weights=size, assignment=assignment)


def group_means(patches: Tensor, assignment: Tensor, k: int, weights: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Weighted mean of the patches in each group.

    Args:
        patches: `[B, N, D]`.
        assignment: `[B, N]` group of each patch, -1 for patches in no group.
        k: Number of groups; every group must have a patch.
        weights: `[B, N]` positive weight of each patch; None weights all alike.

    Returns:
        The means `[B, k, D]` in fp32, and the number of patches in each group `[B, k]`.
    """
    member = F.one_hot(assignment + 1, k + 1)[..., 1:].float().transpose(1, 2)  # [B, k, N]
    shares = member if weights is None else member * weights.float().unsqueeze(1)
    means = torch.bmm(shares, patches.float()) / shares.sum(2, keepdim=True)
    return means, member.sum(2)


def merge(patches: Tensor, assignment: Tensor, k: int, weights: Tensor | None = None) -> Selection:
    """The selection whose tokens are the group means; arguments as in `group_means`."""
    means, sizes = group_means(patches, assignment, k, weights)
    return Selection(tokens=means.to(patches.dtype), weights=sizes, assignment=assignment)


def squared_distances(patches: Tensor) -> Tensor:
    """Squared Euclidean distances between the patches of each image, `[B, N, D]` to `[B, N, N]`; zero on the diagonal."""
    x = patches.float()
    x = x - x.mean(1, keepdim=True)  # the same distances from smaller numbers
    squared = x.square().sum(-1)
    distances = (squared.unsqueeze(2) + squared.unsqueeze(1) - 2 * torch.bmm(x, x.transpose(1, 2))).clamp_min(0)
    distances.diagonal(dim1=1, dim2=2).zero_()
    return distances


def cosine_similarities(patches: Tensor) -> Tensor:
    """Cosine similarities between the patches of each image, `[B, N, D]` to `[B, N, N]`."""
    unit = F.normalize(patches.float(), dim=-1)
    return torch.bmm(unit, unit.transpose(1, 2))


def nearest_center(distances: Tensor, centers: Tensor) -> Tensor:
    """Which of the centers each patch is nearest to.

    Args:
        distances: `[B, N, N]` distances between the patches.
        centers: `[B, K]` patch indices of the centers.

    Returns:
        `[B, N]` numbers of the centers; a center belongs to itself, ties go to the first center.
    """
    to_centers = distances.take_along_dim(centers.unsqueeze(1), 2)  # [B, N, K]
    numbers = torch.arange(centers.shape[1], device=centers.device).expand_as(centers)
    # Identical patches are at distance zero from one another's center: only this keeps every group non-empty.
    return to_centers.argmin(2).scatter(1, centers, numbers)


def with_rest(patches: Tensor, kept: Tensor, weights: Tensor | None = None) -> Selection:
    """The patches `kept` [B, K - 1] as they are, then one token that is the mean of all others, weighted by `weights` [B, N]."""
    b, n, _ = patches.shape
    places = torch.arange(kept.shape[1], device=patches.device).expand_as(kept)
    rest = torch.full((b, n), kept.shape[1], device=patches.device)
    return merge(patches, rest.scatter(1, kept, places), kept.shape[1] + 1, weights)
