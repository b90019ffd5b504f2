"""`Familiarity`: how far an image's tokens are from those of the training images, with a limit that held-out training images set.

A router gives scores to anything. This is what lets a model say that an image is unlike all that it was trained on.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor, nn

from medtokenbudget.features import FeatureStore
from medtokenbudget.tokens import TokenBatch
from medtokenbudget.training.seeds import generator

RANK = 32
"""Directions with a variance of their own; what lies outside of them shares one."""
FOLDS = 5
LEVEL = 0.99
"""Share of held-out training images that lie within the limit."""
FEWEST = 20
"""Training images below which a distance would mean nothing."""
_BATCH = 64


class Familiarity(nn.Module):
    """Mahalanobis distance of an image's token statistics to those of the training images, in units of its limit.

    The statistics are the mean and the standard deviation of each feature over the patches, [2D]. Their covariance is that of
    probabilistic PCA: the largest directions have their own variance, all others the mean of the rest.

    Args:
        dim: Embedding dimension D of the tokens.
        rank: Number of directions.
    """

    center: Tensor
    basis: Tensor
    deviation: Tensor
    rest: Tensor
    limit: Tensor

    def __init__(self, dim: int, rank: int = RANK) -> None:
        super().__init__()
        self.register_buffer("center", torch.zeros(2 * dim))
        self.register_buffer("basis", torch.zeros(2 * dim, rank))
        self.register_buffer("deviation", torch.ones(rank))
        self.register_buffer("rest", torch.ones(1))
        self.register_buffer("limit", torch.ones(1))

    @property
    def rank(self) -> int:
        """Number of directions."""
        return self.basis.shape[1]

    @torch.no_grad()
    def forward(self, tokens: TokenBatch) -> Tensor:
        """Unfamiliarity [B]: 0 at the mean of the training images, above 1 for images that are unlike them."""
        return self.distance(statistics(tokens)) / self.limit

    def distance(self, values: Tensor) -> Tensor:
        """Mahalanobis distance [B] of statistics [B, 2D]."""
        offset = values - self.center
        inside = offset @ self.basis
        # The basis is orthonormal, so what it leaves out is the difference of the squared lengths.
        outside = (offset.square().sum(-1) - inside.square().sum(-1)).clamp(min=0)
        return ((inside / self.deviation).square().sum(-1) + outside / self.rest.square()).sqrt()

    def _fit(self, values: Tensor) -> Familiarity:
        """Take center and directions from statistics [n, 2D]."""
        values = values.double()
        center = values.mean(0)
        _, lengths, directions = torch.linalg.svd(values - center, full_matrices=False)
        variance = lengths.square() / (len(values) - 1)
        largest = variance[: self.rank].clamp(min=1e-12)
        rest = (variance[self.rank :].sum() / max(1, values.shape[1] - self.rank)).clamp(min=1e-12)
        for name, found in {
            "center": center,
            "basis": directions[: self.rank].T,
            "deviation": largest.sqrt(),
            "rest": rest.sqrt().view(1),
        }.items():
            getattr(self, name).copy_(found)
        return self


def statistics(tokens: TokenBatch) -> Tensor:
    """Mean and standard deviation of each feature over the patches, [B, 2D]."""
    patches = tokens.patches.float()
    return torch.cat([patches.mean(1), patches.std(1)], -1)


def fit_familiarity(store: FeatureStore, rows: np.ndarray, seed: int = 0) -> Familiarity | None:
    """Fit on the images `rows` of a store; the limit is the 99th percentile of images that were held out, in five folds.

    All views of an image are in one fold.

    Returns:
        None if there are fewer than 20 images, too few for any distance.
    """
    names = np.asarray(store.ids)[rows]
    images, place = np.unique(names, return_inverse=True)
    if len(images) < FEWEST:
        return None
    values = torch.cat([statistics(batch) for batch in store.batches(rows, _BATCH)])
    folds = (torch.randperm(len(images), generator=generator(seed, "familiarity", 0)) % FOLDS)[torch.from_numpy(place)]
    rank = min(RANK, (len(images) - math.ceil(len(images) / FOLDS)) // 2)
    held_out = torch.zeros(len(values))
    for fold in range(FOLDS):
        out = folds == fold
        held_out[out] = Familiarity(store.dim, rank)._fit(values[~out]).distance(values[out])
    fitted = Familiarity(store.dim, rank)._fit(values)
    fitted.limit.copy_(torch.quantile(held_out, LEVEL).view(1))
    return fitted
