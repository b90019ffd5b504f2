"""AttentionEntropy of the paper: the patches whose attention is most focused.

Reads the entropy that was stored with the tokens, so that no N x N attention is kept.
"""

from __future__ import annotations

import torch
from torch import Tensor

from medtokenbudget.routing.registry import register_selector
from medtokenbudget.routing.selector import Ranker
from medtokenbudget.tokens import TokenBatch


@register_selector("attention-entropy")
class AttentionEntropy(Ranker):
    """Most focused attention first, `1 - H / log N`."""

    requires = ("attention_entropy",)

    def score(self, tokens: TokenBatch, generator: torch.Generator | None = None) -> Tensor:
        assert tokens.attention_entropy is not None
        return tokens.attention_entropy.float()
