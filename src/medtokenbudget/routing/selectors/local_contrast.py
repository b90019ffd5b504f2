"""LocalContrast of the paper: the patches that differ most from their neighbors.

The default neighborhood is the paper's 1D raster order; the true 2D ones are options.
"""

from __future__ import annotations

import torch
from torch import Tensor

from medtokenbudget.config import Neighborhood
from medtokenbudget.routing.registry import register_selector
from medtokenbudget.routing.selector import Ranker
from medtokenbudget.routing.signals import local_contrast
from medtokenbudget.tokens import TokenBatch


@register_selector("local-contrast")
class LocalContrast(Ranker):
    """Largest mean cosine dissimilarity to the neighbors first."""

    def __init__(self, neighborhood: Neighborhood = "raster", minimum: int = 16) -> None:
        super().__init__(minimum)
        self.neighborhood = neighborhood

    def score(self, tokens: TokenBatch, generator: torch.Generator | None = None) -> Tensor:
        return local_contrast(tokens.patches, tokens.grid, self.neighborhood)
