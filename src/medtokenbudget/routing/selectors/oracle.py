"""Oracle: the control that keeps lesion patches first. Its retention is the ceiling at each budget.

It reads the masks of the images that it selects from, so it is a bound, never a method.
"""

from __future__ import annotations

import torch
from torch import Tensor

from medtokenbudget.routing.registry import register_selector
from medtokenbudget.routing.selector import Ranker
from medtokenbudget.tokens import TokenBatch


@register_selector("oracle")
class Oracle(Ranker):
    """Lesion patches first, both groups in raster order; a batch with an image without a mask is refused."""

    requires = ("lesion", "has_mask")

    def score(self, tokens: TokenBatch, generator: torch.Generator | None = None) -> Tensor:
        assert tokens.lesion is not None
        return tokens.lesion.float()
