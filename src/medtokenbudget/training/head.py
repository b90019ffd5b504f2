"""The classifier behind a selector: the MLP head of the paper, and the two ways tokens reach it.

In training the straight-through mask is applied to all patches; at inference the kept ones are gathered. Both means are equal.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from medtokenbudget.errors import RequestError, ShapeError
from medtokenbudget.routing import LATSSelector, Selection, Selector, TokenBatch
from medtokenbudget.routing.dropout import dropout as drop


class RoutingHead(nn.Module):
    """MLP from a pooled token [B, D] to class logits [B, C]; 231,560 parameters at D = 768 and 8 classes."""

    def __init__(self, dim: int, classes: int, hidden: Sequence[int] = (256, 128), dropout: float = 0.1) -> None:
        super().__init__()
        if min(dim, classes, *hidden) < 1:
            raise RequestError(f"dim, classes and hidden must be at least 1, got {dim}, {classes} and {tuple(hidden)}.")
        first, second = hidden
        self.dim = dim
        self.dropout = dropout
        self.first = nn.Linear(dim, first)
        self.first_norm = nn.LayerNorm(first)
        self.second = nn.Linear(first, second)
        self.second_norm = nn.LayerNorm(second)
        self.output = nn.Linear(second, classes)

    def forward(self, pooled: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Logits [..., C] of pooled tokens [..., D]; `generator` feeds the dropout in training mode."""
        if pooled.shape[-1] != self.dim:
            raise ShapeError(f"this head reads tokens of dimension {self.dim}, got {pooled.shape[-1]}.")
        x = F.gelu(self.first_norm(self.first(pooled.to(self.first.weight.dtype))))
        x = drop(x, self.dropout if self.training else 0.0, generator)
        return self.output(F.gelu(self.second_norm(self.second(x))))


@dataclass(frozen=True)
class RoutedOutput:
    """What a training step needs.

    logits        [B, C] of the head
    scores        [B, N] raw scores in [0, 1]
    score_logits  [B, N] the same before the sigmoid
    mask          [B, N] straight-through mask, exactly k ones an image
    k             kept patches
    """

    logits: Tensor
    scores: Tensor
    score_logits: Tensor
    mask: Tensor
    k: int


class RoutedClassifier(nn.Module):
    """A selector and the head that reads what it keeps."""

    def __init__(self, selector: Selector, head: RoutingHead) -> None:
        super().__init__()
        self.selector = selector
        self.head = head

    def forward(self, tokens: TokenBatch, budget: float, generator: torch.Generator | None = None) -> Tensor:
        """Class logits [B, C] of the mean of the K kept tokens, gathered."""
        return self.route(tokens, budget, generator)[0]

    def route(self, tokens: TokenBatch, budget: float, generator: torch.Generator | None = None) -> tuple[Tensor, Selection]:
        """Class logits [B, C] and the selection behind them; `generator` is for selectors that draw."""
        selection = self.selector.select_budget(tokens, budget, generator)
        return self.head(selection.pooled()), selection

    def training_forward(self, tokens: TokenBatch, budget: float, generator: torch.Generator | None = None) -> RoutedOutput:
        """The differentiable pass. Dropout and Gumbel noise come from `generator`; without one there is no Gumbel noise."""
        if not isinstance(self.selector, LATSSelector):
            raise RequestError(f"selector '{self.selector.name}' does not learn. Train a head on its pooled tokens instead.")
        tokens = tokens.float()
        k = self.selector.count(budget, tokens.n)
        score_logits = self.selector.logits(tokens, generator)
        scores = torch.sigmoid(score_logits)
        mask = self.selector.training_mask(scores, tokens.grid, k, generator)
        logits = self.head(masked_mean(tokens.patches, mask), generator)
        return RoutedOutput(logits, scores, score_logits, mask, k)


def masked_mean(patches: Tensor, mask: Tensor) -> Tensor:
    """Sum of the patches [B, N, D] under a mask [B, N] over the mask's mass, [B, D] in fp32."""
    with torch.autocast(patches.device.type, enabled=False):
        total = torch.bmm(mask.float().unsqueeze(1), patches.float()).squeeze(1)
        return total / mask.float().sum(1, keepdim=True)
