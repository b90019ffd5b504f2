"""Building blocks of the mergers: group means, distances and the selection that a grouping of the patches makes.

All functions are vectorized over the batch and over the groups.
"""

from __future__ import annotations

from abc import abstractmethod
from types import MappingProxyType
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from medtokenbudget.routing.base import Merger
from medtokenbudget.tokens import Selection, TokenBatch

Compared = Literal["patches", "keys"]
"""What a merger compares: the tokens that it merges, or the keys of their block, as ToMe and its successors do in a network."""


class ComparingMerger(Merger):
    """A merger that compares the patches or, with `compare='keys'`, the mean keys of the block that they come from."""

    variants = MappingProxyType({"keys": {"compare": "keys"}})

    def __init__(self, compare: Compared = "patches", minimum: int = 16) -> None:
        super().__init__(minimum)
        self.compare = compare
        if compare == "keys":
            self.requires = ("mean_key",)

    def compared(self, tokens: TokenBatch) -> Tensor:
        if self.compare == "patches":
            return tokens.patches.float()
        assert tokens.mean_key is not None
        return tokens.mean_key.float()


class RoundMerger(ComparingMerger):
    """A merger that removes up to half of the tokens in each round until K are left; `weights` are the group sizes."""

    @abstractmethod
    def merge_round(self, x: Tensor, size: Tensor, r: int, first: int = 0) -> tuple[Tensor, Tensor, Tensor]:
        """Merge r of the tokens x [B, n, D] with sizes [B, n], comparing the features from `first` on.

        Returns:
            The n - r tokens, their sizes, and where each of the n tokens went, int64 [B, n].
        """

    def choose(self, tokens: TokenBatch, k: int, generator: torch.Generator | None = None) -> Selection:
        x, first = tokens.patches.float(), 0
        if self.compare == "keys":
            # Keys as further features of the patches: the keys of merged tokens are then merged like the tokens.
            x, first = torch.cat([x, self.compared(tokens)], -1), tokens.dim
        size = torch.ones(x.shape[:2], device=x.device)
        assignment = torch.arange(tokens.n, device=x.device).repeat(len(x), 1)
        while x.shape[1] > k:
            count = x.shape[1]
            x, size, moved = self.merge_round(x, size, min(count - k, count // 2), first)
            # From a patch to its token before the round, to its token after it.
            assignment = moved.gather(1, assignment)
        return Selection(tokens=x[..., : tokens.dim].to(tokens.patches.dtype), weights=size, assignment=assignment)


def merge(patches: Tensor, assignment: Tensor, k: int, weights: Tensor | None = None) -> Selection:
    """Return the selection whose tokens are the means of the patches [B, N, D] in each of k groups, with the sizes of the groups.

    The assignment [B, N] is -1 for patches in no group, and every group must have a patch. Weights [B, N] are positive; None weighs
    all alike.
    """
    # Shifted by one, because one_hot has no column for -1; the first column is cut off again.
    member = F.one_hot(assignment + 1, k + 1)[..., 1:].float().transpose(1, 2)  # [B, k, N]
    shares = member if weights is None else member * weights.float().unsqueeze(1)
    means = torch.bmm(shares, patches.float()) / shares.sum(2, keepdim=True)
    return Selection(tokens=means.to(patches.dtype), weights=member.sum(2), assignment=assignment)


def squared_distances(patches: Tensor) -> Tensor:
    """Compute squared Euclidean distances between the patches of each image, `[B, N, D]` to `[B, N, N]`; zero on the diagonal."""
    x = patches.float()
    x = x - x.mean(1, keepdim=True)  # the same distances from smaller numbers
    squared = x.square().sum(-1)
    # |x|^2 + |y|^2 - 2 x y needs no [B, N, N, D] tensor, but rounds: it may be just below 0.
    distances = (squared.unsqueeze(2) + squared.unsqueeze(1) - 2 * torch.bmm(x, x.transpose(1, 2))).clamp_min(0)
    distances.diagonal(dim1=1, dim2=2).zero_()
    return distances


def cosine_similarities(patches: Tensor) -> Tensor:
    """Compute cosine similarities between the patches of each image, `[B, N, D]` to `[B, N, N]`."""
    unit = F.normalize(patches.float(), dim=-1)
    return torch.bmm(unit, unit.transpose(1, 2))


def nearest_center(distances: Tensor, centers: Tensor) -> Tensor:
    """Number the nearest of the centers [B, K] for each patch, from distances `[B, N, N]` to `[B, N]`; ties go to the first."""
    return _leading(distances.take_along_dim(centers.unsqueeze(1), 2).argmin(2), centers)


def most_similar(patches: Tensor, kept: Tensor) -> tuple[Tensor, Tensor]:
    """Find the most similar of the patches `kept` [B, K] for each patch: its cosine similarity and its number, both `[B, N]`."""
    similarity, host = cosine_similarities(patches).take_along_dim(kept.unsqueeze(1), 2).max(2)
    return similarity, _leading(host, kept)


def with_rest(patches: Tensor, kept: Tensor, weights: Tensor | None = None) -> Selection:
    """Return the unchanged patches `kept` [B, K - 1], then the mean of all others, weighted by `weights` [B, N]."""
    rest = torch.full(patches.shape[:2], kept.shape[1], device=patches.device)
    return merge(patches, _leading(rest, kept), kept.shape[1] + 1, weights)


def _leading(assignment: Tensor, leaders: Tensor) -> Tensor:
    """Put each of the leaders [B, K] into the group of its number.

    Identical patches are equally near to all leaders among them: only this keeps every group non-empty.
    """
    return assignment.scatter(1, leaders, torch.arange(leaders.shape[1], device=leaders.device).expand_as(leaders))
