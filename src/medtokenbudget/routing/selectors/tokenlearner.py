"""TokenLearner (Ryoo et al., NeurIPS 2021): K learned spatial attention maps, one token each.

The form of its version 1.1: an MLP gives every patch one logit for each map, and a softmax over the patches makes the map. Behind a
frozen backbone there are no further transformer blocks and no TokenFuser.
"""

from __future__ import annotations

from torch import Tensor, nn

from medtokenbudget.config import Count
from medtokenbudget.routing.base import register_selector
from medtokenbudget.routing.trainable import SoftMerger
from medtokenbudget.tokens import TokenBatch


@register_selector("tokenlearner")
class TokenLearner(SoftMerger):
    """Tokens `sum_n softmax_n(MLP_k(x_n)) x_n`."""

    title = "TokenLearner"
    description = "Mixes all patches into K tokens by learned attention maps."
    color, marker = "#8a3ea0", "8"

    def __init__(self, dim: int, hidden: int = 64, slots: Count = 256, minimum: int = 16) -> None:
        super().__init__(slots, minimum)
        self.hidden = hidden
        self.maps = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, hidden), nn.GELU(), nn.Linear(hidden, slots))

    def attention(self, tokens: TokenBatch, k: int) -> Tensor:
        return self.maps(tokens.patches)[..., :k].float().softmax(1).transpose(1, 2)
