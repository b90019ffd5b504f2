"""Center: the control that keeps the patches nearest the image center, with no model at all.

Dermoscopy is taken with the lesion in the middle; a router must be told from this prior.
"""

from __future__ import annotations

import torch
from torch import Tensor

from medtokenbudget.routing.registry import register_selector
from medtokenbudget.routing.selector import Ranker
from medtokenbudget.tokens import TokenBatch


@register_selector("center")
class Center(Ranker):
    """Smallest distance to the center of the grid first, in patches, ties by index."""

    def score(self, tokens: TokenBatch, generator: torch.Generator | None = None) -> Tensor:
        h, w = tokens.grid
        # Twice the distance from the center: whole numbers, so that equal distances tie exactly.
        rows = 2 * torch.arange(h, device=tokens.patches.device) - (h - 1)
        columns = 2 * torch.arange(w, device=tokens.patches.device) - (w - 1)
        squared = rows.square().unsqueeze(1) + columns.square().unsqueeze(0)
        return -squared.flatten().double().expand(len(tokens), -1)
