"""Building blocks of the mergers: group means, distances and the selection that a grouping of the patches makes.

All functions are vectorized over the batch and over the groups.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from medtokenbudget.tokens import Selection


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
