"""Heads that read the mean of the kept tokens: the paper's MLP, and a linear probe as its control."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from medtokenbudget.errors import RequestError
from medtokenbudget.heads.head import Head, register_head
from medtokenbudget.routing.layers import dropout as drop


@register_head("mlp")
class MLPHead(Head):
    """Linear, LayerNorm, GELU, Dropout, Linear, LayerNorm, GELU, Linear; 231,560 parameters at D = 768 and 8 classes."""

    description = "The paper's MLP on the mean of the kept tokens."

    def __init__(self, dim: int, classes: int, hidden: Sequence[int] = (256, 128), dropout: float = 0.1) -> None:
        super().__init__(dim, classes)
        if len(hidden) != 2 or min(hidden) < 1:
            raise RequestError(f"`hidden` must be two widths of at least 1, got {tuple(hidden)}.")
        self.hidden, self.dropout = tuple(hidden), dropout
        self.first = nn.Linear(dim, hidden[0])
        self.first_norm = nn.LayerNorm(hidden[0])
        self.second = nn.Linear(hidden[0], hidden[1])
        self.second_norm = nn.LayerNorm(hidden[1])
        self.output = nn.Linear(hidden[1], classes)

    def logits(self, pooled: Tensor, generator: torch.Generator | None = None) -> Tensor:
        x = F.gelu(self.first_norm(self.first(pooled)))
        x = drop(x, self.dropout if self.training else 0.0, generator)
        return self.output(F.gelu(self.second_norm(self.second(x))))


@register_head("linear")
class LinearHead(Head):
    """One linear layer: the control that shows how much of the accuracy is the head's."""

    description = "One linear layer on the mean of the kept tokens."

    def __init__(self, dim: int, classes: int) -> None:
        super().__init__(dim, classes)
        self.output = nn.Linear(dim, classes)

    def logits(self, pooled: Tensor, generator: torch.Generator | None = None) -> Tensor:
        return self.output(pooled)
