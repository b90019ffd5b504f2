"""NormBased of the paper: the patches with the largest L2 norm.

The signal is confounded in backbones with high-norm artefact tokens; that is part of what the baseline shows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from medtokenbudget.routing.registry import register_selector
from medtokenbudget.routing.selector import Ranker
from medtokenbudget.routing.signals import feature_norm
from medtokenbudget.tokens import TokenBatch


@register_selector("norm")
class Norm(Ranker):
    """Largest feature norm first."""

    def score(self, tokens: TokenBatch, generator: torch.Generator | None = None) -> Tensor:
        return feature_norm(tokens.patches)
