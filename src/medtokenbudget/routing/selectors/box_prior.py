"""Box prior: the control that knows a box around the lesion, as a prompt would give it.

It reads the mask of the image that it selects from, like `oracle`, so it is a bound for box-prompted methods, never a method. PrATo
(Dutta et al., 2025) prunes with such a box inside a promptable segmentation model, which this is not.
"""

from __future__ import annotations

import torch
from torch import Tensor

from medtokenbudget.routing.registry import register_selector
from medtokenbudget.routing.selector import Ranker
from medtokenbudget.tokens import TokenBatch


@register_selector("box-prior")
class BoxPrior(Ranker):
    """Patches by their distance to the lesion's bounding box, measured in box sizes from its center, nearest first.

    The distance is `max(|dx| / (width / 2), |dy| / (height / 2))`: at most 1 inside the box. An image without a lesion patch has
    the whole image as its box. Needs a mask for every image.
    """

    requires = ("lesion", "has_mask")

    def score(self, tokens: TokenBatch, generator: torch.Generator | None = None) -> Tensor:
        assert tokens.lesion is not None
        h, w = tokens.grid
        field = tokens.lesion.bool().view(-1, h, w)
        rows, columns = _offset(field.any(2)), _offset(field.any(1))
        return -torch.maximum(rows.unsqueeze(2), columns.unsqueeze(1)).flatten(1)


def _offset(inside: Tensor) -> Tensor:
    """Distance of each place from the middle of the interval that spans `inside` [B, n], in half lengths of it."""
    n = inside.shape[1]
    inside = inside | ~inside.any(1, keepdim=True)
    places = torch.arange(n, device=inside.device, dtype=torch.float64)
    low = torch.where(inside, places, n).amin(1, keepdim=True)
    high = torch.where(inside, places, -1).amax(1, keepdim=True)
    return (2 * places - low - high).abs() / (high - low + 1)
