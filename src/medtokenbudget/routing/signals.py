"""The three signals that LATS reads in addition to the patch embedding: attention entropy, feature norm and local contrast.

Pure functions over frozen tokens, in fp32 whatever the input; the single-signal selectors rank by the very same functions.
"""

from __future__ import annotations

from typing import get_args

import torch
from torch import Tensor

from medtokenbudget.config import Neighborhood
from medtokenbudget.errors import UnknownNameError
from medtokenbudget.tokens import check_axes, check_grid

# Half of each neighborhood, as (rows down, columns right): every pair is met once and counts for both of its patches.
_PAIRS: dict[str, tuple[tuple[int, int], ...]] = {
    "raster": ((0, 1),),
    "grid4": ((0, 1), (1, 0)),
    "grid8": ((0, 1), (1, 0), (1, 1), (1, -1)),
}


def feature_norm(patches: Tensor) -> Tensor:
    """Divide the L2 norm of each patch by the largest norm of its image (Eq. 2): [B, N, D] to [B, N] in [0, 1]."""
    check_axes("patches", "[B, N, D]", patches)
    norms = torch.linalg.vector_norm(patches, dim=-1, dtype=torch.float32)
    largest = norms.amax(1, keepdim=True)
    # An image of zeros has norms of 0, not NaN.
    return norms / largest.clamp_min(torch.finfo(norms.dtype).tiny)


def local_contrast(patches: Tensor, grid: tuple[int, int], neighborhood: Neighborhood = "raster") -> Tensor:
    """Average the cosine dissimilarity of each patch to its neighbors (Eq. 3, 4): [B, N, D] to [B, N] in [0, 2].

    'raster' is the paper's 1D order, in which the end of a row touches the start of the next. 'grid4' and 'grid8' are the true
    2D neighborhoods, which end at the border. A patch without neighbors has contrast 0; a zero patch is dissimilar (1) to all.
    """
    b, n, _ = check_axes("patches", "[B, N, D]", patches)
    check_grid(grid, n)
    if neighborhood not in _PAIRS:
        raise UnknownNameError.of("neighborhood", str(neighborhood), get_args(Neighborhood))
    # The raster order is a grid of one row: its neighbors are left and right alone.
    h, w = (1, n) if neighborhood == "raster" else grid
    field = patches.float().reshape(b, h, w, -1)
    inverse = torch.linalg.vector_norm(field, dim=-1).clamp_min(torch.finfo(torch.float32).tiny).reciprocal()
    total = torch.zeros_like(inverse)
    count = torch.zeros_like(inverse[:1])
    for down, right in _PAIRS[neighborhood]:
        here, there = _shifted(h, w, down, right)
        # Shifted views instead of gathered neighbors.
        cosine = torch.linalg.vecdot(field[here], field[there]) * inverse[here] * inverse[there]
        for side in (here, there):
            total[side] += 1 - cosine
            count[side] += 1
    return (total / count.clamp_min(1)).flatten(1)


def border_contrast(patches: Tensor, grid: tuple[int, int]) -> Tensor:
    """Measure how unlike the border of its image each patch is: [B, N, D] to [B, N] in [0, 2].

    1 - the mean cosine to the third of the border patches that are most similar to it. Not to all: a lesion that touches the
    border must not count as background, nor two kinds of background against each other.
    """
    check_grid(grid, check_axes("patches", "[B, N, D]", patches)[1])
    h, w = grid
    border = torch.ones(h, w, dtype=torch.bool, device=patches.device)
    # A grid of one or two rows is all border.
    border[1:-1, 1:-1] = False
    unit = torch.nn.functional.normalize(patches.float(), dim=-1)
    cosine = unit @ unit[:, border.flatten()].transpose(1, 2)
    return 1 - cosine.topk(max(1, cosine.shape[2] // 3), dim=2).values.mean(2)


def _shifted(h: int, w: int, down: int, right: int) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
    """Return the two windows of a [B, h, w, ...] field that lie (down, right) apart."""
    here = slice(None), slice(0, max(h - down, 0)), slice(max(-right, 0), max(w - max(right, 0), 0))
    there = slice(None), slice(down, h), slice(max(right, 0), max(w - max(-right, 0), 0))
    return here, there
