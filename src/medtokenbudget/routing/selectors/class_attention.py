"""ClassAttention: the patches that the class token attends to most, as EViT keeps them.

Not among the paper's seven; the teacher of its distillation loss, used as a selector by itself.
"""

from __future__ import annotations

import torch
from torch import Tensor

from medtokenbudget.routing.registry import register_selector
from medtokenbudget.routing.selector import Ranker
from medtokenbudget.tokens import TokenBatch


@register_selector("class-attention")
class ClassAttention(Ranker):
    """Largest head-averaged attention of the class token first."""

    requires = ("cls_attention",)

    def score(self, tokens: TokenBatch, generator: torch.Generator | None = None) -> Tensor:
        assert tokens.cls_attention is not None
        return tokens.cls_attention.float()
