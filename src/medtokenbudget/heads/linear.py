"""A linear probe: the control that shows how much of the accuracy is the head's."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from medtokenbudget.heads.head import Head
from medtokenbudget.heads.registry import register_head


@register_head("linear")
class LinearHead(Head):
    """One linear layer."""

    def __init__(self, dim: int, classes: int) -> None:
        super().__init__(dim, classes)
        self.output = nn.Linear(dim, classes)

    def logits(self, pooled: Tensor, generator: torch.Generator | None = None) -> Tensor:
        return self.output(pooled)
