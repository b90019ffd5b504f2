"""The bases of every head and heads by name: `Head` reads the mean of the kept tokens, `TokenHead` the tokens themselves."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from medtokenbudget.errors import CountError, NonFiniteError, RequestError, ShapeError
from medtokenbudget.registry import Registry
from medtokenbudget.tokens import Selection, TokenSet


class Head(nn.Module, ABC):
    """Pooled tokens to class logits.

    Subclasses take `dim` and `classes` first, keep their other options as attributes, and write `logits`. A head that `reads`
    'tokens' reads all kept tokens, at least `needs` of them, instead of their mean. Title and description are for tables and text.
    """

    name: ClassVar[str] = ""
    title: ClassVar[str] = ""
    description: ClassVar[str] = ""
    reads: ClassVar[Literal["mean", "tokens"]] = "mean"
    needs: int = 1

    def __init__(self, dim: int, classes: int) -> None:
        super().__init__()
        if min(dim, classes) < 1:
            raise RequestError(f"`dim` and `classes` must be at least 1, got {dim} and {classes}.")
        self.dim, self.classes = dim, classes

    @abstractmethod
    def logits(self, pooled: Any, generator: torch.Generator | None = None) -> Tensor:
        """Compute logits [..., C] of pooled tokens [..., D]; `generator` feeds the dropout in training mode."""

    def forward(self, pooled: Any, generator: torch.Generator | None = None) -> Tensor:
        if pooled.shape[-1] != self.dim:
            raise ShapeError(f"This head reads tokens of dimension {self.dim}, got {pooled.shape[-1]}.")
        return self.logits(pooled.to(next(self.parameters()).dtype), generator)

    def read(self, selection: Selection, grid: tuple[int, int]) -> Tensor:
        return self(selection.pooled())

    def training_step(self, kept: Any, label: Tensor, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor | None]:
        """Compute the logits [B, C] of what the head reads, and the head's own loss in addition to the classification, or None.

        Labels [B] are class indices, -1 where unknown.
        """
        return self(kept, generator), None

    def options(self) -> dict[str, Any]:
        """Return the arguments that build this head again, all but `dim` and `classes`, as JSON values."""
        return HEADS.options(self, "dim", "classes")


class TokenHead(Head):
    """Tokens with weights and positions to class logits. Subclasses write `logits` of a `TokenSet`."""

    reads: ClassVar[Literal["mean", "tokens"]] = "tokens"

    @abstractmethod
    def logits(self, kept: TokenSet, generator: torch.Generator | None = None) -> Tensor:
        """Compute logits [B, C] of the tokens; one with weight 0 must not count."""

    def forward(self, kept: TokenSet, generator: torch.Generator | None = None) -> Tensor:
        return self.logits(self.check(kept), generator)

    def read(self, selection: Selection, grid: tuple[int, int]) -> Tensor:
        return self(TokenSet.of(selection, grid))

    def check(self, kept: TokenSet) -> TokenSet:
        if not isinstance(kept, TokenSet):
            advice = "Pass a TokenSet, for example TokenSet.of(selection, grid)."
            raise ShapeError(f"Head '{self.name}' reads tokens, not their mean. {advice}")
        if kept.tokens.shape[-1] != self.dim:
            raise ShapeError(f"This head reads tokens of dimension {self.dim}, got {kept.tokens.shape[-1]}.")
        if kept.k < self.needs:
            advice = "Use a larger budget or another head."
            raise CountError(f"Head '{self.name}' needs at least {self.needs} tokens, got {kept.k}. {advice}")
        if not bool(torch.isfinite(kept.tokens).all()):
            raise NonFiniteError(f"Head '{self.name}' got tokens with NaN or infinite values. Extract these images again.")
        return kept


def weighted_softmax(logits: Tensor, weights: Tensor) -> Tensor:
    """Compute `w_i exp(l_i) / sum_j w_j exp(l_j)` of logits [..., K], also differentiable where a weight is 0."""
    weights = weights.expand_as(logits)
    top = logits.detach().masked_fill(weights <= 0, -torch.inf).amax(-1, keepdim=True)
    # Tokens that do not count may have larger logits: held, so that their zero times infinity is not NaN.
    shares = weights * (logits - top).clamp(max=20).exp()
    return shares / shares.sum(-1, keepdim=True)


HEADS: Registry[Head] = Registry("head", Head, "medtokenbudget.heads")  # type: ignore[type-abstract]

register_head = HEADS.register
list_heads = HEADS.names


def create_head(name: str, dim: int, classes: int, **options: object) -> Head:
    """Create a head by name.

    Example:
        >>> create_head("linear", dim=384, classes=8)(torch.zeros(2, 384)).shape
        torch.Size([2, 8])
    """
    return HEADS.create(name, dim=dim, classes=classes, **options)
