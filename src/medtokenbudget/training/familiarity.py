"""`Familiarity`: the distance of an image's tokens to the training images, with a limit that held-out training images set.

A router gives scores to anything. This is what lets a model say that an image is unlike all that it was trained on.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from medtokenbudget.backbone import FeatureStore
from medtokenbudget.tokens import TokenBatch
from medtokenbudget.training.rows import generator

RANK = 32
"""Directions with a variance of their own; what lies outside of them shares one."""
STRANGEST = 0.1
"""Share of the patches that may be stranger than what an image is judged by: hair, ink and bubbles are strange too."""
FOLDS = 5
LEVEL = 0.99
"""Share of held-out training images that lie within the limit."""
FEWEST = 20
"""Training images below which a distance would mean nothing."""
_BATCH = 64


class Gaussian(nn.Module):
    """Mean and covariance of vectors [D], the covariance as in probabilistic PCA: `rank` directions, one variance for the rest."""

    center: Tensor
    basis: Tensor
    deviation: Tensor
    rest: Tensor

    def __init__(self, dim: int, rank: int) -> None:
        super().__init__()
        self.register_buffer("center", torch.zeros(dim))
        self.register_buffer("basis", torch.zeros(dim, rank))
        self.register_buffer("deviation", torch.ones(rank))
        self.register_buffer("rest", torch.ones(1))

    def forward(self, values: Tensor) -> Tensor:
        """Return the Mahalanobis distance [...] of vectors [..., D]."""
        offset = values - self.center
        inside = offset @ self.basis
        # The basis is orthonormal, so what it leaves out is the difference of the squared lengths.
        outside = (offset.square().sum(-1) - inside.square().sum(-1)).clamp(min=0)
        return ((inside / self.deviation).square().sum(-1) + outside / self.rest.square()).sqrt()

    def fit(self, moments: Sequence[Tensor]) -> Gaussian:
        """Take mean and covariance from `moments_of` vectors."""
        n, total, products = moments
        center = total / n
        covariance = (products - n * center.outer(center)) / (n - 1).clamp(min=1)
        variance, directions = torch.linalg.eigh(covariance)
        # Largest first. Rounding may leave small variances below 0.
        variance, directions = variance.flip(0).clamp(min=1e-12), directions.flip(1)
        rank = self.basis.shape[1]
        rest = variance[rank:].mean() if rank < len(variance) else variance.min()
        self.center.copy_(center)
        self.basis.copy_(directions[:, :rank])
        self.deviation.copy_(variance[:rank].sqrt())
        self.rest.copy_(rest.sqrt().view(1))
        return self


def moments_of(values: Tensor) -> list[Tensor]:
    """Return number, sum and sum of products of vectors [n, D]: what a covariance needs, whatever the number of vectors.

    In double precision: the covariance is a small difference of large sums.
    """
    values = values.double()
    return [torch.tensor(float(len(values)), dtype=torch.float64), values.sum(0), values.T @ values]


def add_moments(parts: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    return [sum(entries[1:], entries[0]) for entries in zip(*parts)]


class Familiarity(nn.Module):
    """Distance of an image to the training images in units of a limit: above 1 the image is unlike them.

    Two Mahalanobis distances are combined as a weighted geometric mean: of the whole image (its class token; without one, the mean
    of its patches), and of its strangest patches (the 90th percentile over the patches).
    """

    weight: Tensor
    limit: Tensor

    def __init__(self, dim: int, rank: int = RANK) -> None:
        super().__init__()
        self.image, self.patch = Gaussian(dim, rank), Gaussian(dim, rank)
        self.register_buffer("weight", torch.full((2,), 0.5))
        self.register_buffer("limit", torch.ones(1))

    @torch.no_grad()
    def forward(self, tokens: TokenBatch) -> Tensor:
        """Return the unfamiliarity [B]: above 1 for images that are unlike the training images."""
        return self.combined(self.distances(tokens)) / self.limit

    def distances(self, tokens: TokenBatch) -> Tensor:
        """Return the distances [B, 2] of the whole image and of its strangest patches."""
        patches = self.patch(tokens.patches.float())
        # Not `quantile`, which exported graphs do not have.
        strangest = patches.topk(max(1, math.ceil(STRANGEST * tokens.n)), dim=1).values[:, -1]
        return torch.stack([self.image(whole(tokens)), strangest], -1)

    def combined(self, distances: Tensor) -> Tensor:
        return (distances.clamp(min=1e-6).log() * self.weight).sum(-1).exp()


def whole(tokens: TokenBatch) -> Tensor:
    """Return what stands for a whole image, [B, D]: its class token, or the mean of its patches for backbones without one."""
    return tokens.patches.float().mean(1) if tokens.cls is None else tokens.cls.float()


@dataclass(frozen=True)
class Features:
    """Features [n, 1, D] of images in memory, read like a store."""

    ids: Sequence[str]
    values: Tensor

    @property
    def dim(self) -> int:
        return self.values.shape[2]

    def batches(self, rows: np.ndarray, size: int) -> Iterator[TokenBatch]:
        for part in torch.from_numpy(rows).split(size):
            yield TokenBatch(self.values[part], (1, 1))


@torch.no_grad()
def fit_familiarity(
    store: FeatureStore | Features, rows: np.ndarray, seed: int = 0, rank: int = RANK, level: float = LEVEL
) -> Familiarity | None:
    """Fit on the images `rows` of a store; the limit is the quantile `level` of images that were held out, in five folds.

    All views of an image are in one fold. None if there are fewer than 20 images, too few for any distance.
    """
    images, place = np.unique(np.asarray(store.ids)[rows], return_inverse=True)
    if len(images) < FEWEST:
        return None
    # By image, not by row: views of one image in two folds would make every image familiar.
    fold_of_image = torch.randperm(len(images), generator=generator(seed, "familiarity", 0)) % FOLDS
    folds = [rows[(fold_of_image[torch.from_numpy(place)] == fold).numpy()] for fold in range(FOLDS)]
    moments = [_moments(store, part) for part in folds]
    rank = min(rank, (len(images) - math.ceil(len(images) / FOLDS)) // 2, store.dim)
    held_out = []
    for fold, part in enumerate(folds):
        fitted = _fitted(store.dim, rank, [*moments[:fold], *moments[fold + 1 :]])
        held_out += [fitted.distances(batch) for batch in store.batches(part, _BATCH)]
    distances = torch.cat(held_out)
    fitted = _fitted(store.dim, rank, moments)
    # Each distance counts by how little it varies among images that are like the training images.
    spread = distances.clamp(min=1e-6).log().std(0).clamp(min=1e-6)
    fitted.weight.copy_((1 / spread) / (1 / spread).sum())
    fitted.limit.copy_(torch.quantile(fitted.combined(distances), level).view(1))
    return fitted


def _moments(store: FeatureStore | Features, rows: np.ndarray) -> tuple[list[Tensor], list[Tensor]]:
    batches = store.batches(rows, _BATCH)
    parts = [(moments_of(whole(batch)), moments_of(batch.patches.float().flatten(0, 1))) for batch in batches]
    images, patches = zip(*parts)
    return add_moments(images), add_moments(patches)


def _fitted(dim: int, rank: int, moments: Sequence[tuple[list[Tensor], list[Tensor]]]) -> Familiarity:
    fitted, (images, patches) = Familiarity(dim, rank), zip(*moments)
    fitted.image.fit(add_moments(images))
    fitted.patch.fit(add_moments(patches))
    return fitted
