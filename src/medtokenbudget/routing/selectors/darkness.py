"""Darkness: the control that keeps the darkest patches. Pigment is dark, so this needs no model.

Its distance to LATS tells what learning adds to the grey value.
"""

from __future__ import annotations

import torch
from torch import Tensor

from medtokenbudget.routing.registry import register_selector
from medtokenbudget.routing.selector import Ranker
from medtokenbudget.tokens import TokenBatch


@register_selector("darkness")
class Darkness(Ranker):
    """Lowest luminance first."""

    requires = ("luminance",)

    def score(self, tokens: TokenBatch, generator: torch.Generator | None = None) -> Tensor:
        assert tokens.luminance is not None
        return -tokens.luminance.float()
