"""The bases of every head and heads by name: `Head` reads the mean of the kept tokens, `TokenHead` the tokens themselves.

Heads that read the mean train on pooled tokens, which are computed once; heads that read tokens select them again in every step.
`RoutedClassifier` is a selector and a head as one module.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from medtokenbudget.config import TrainConfig
from medtokenbudget.errors import CountError, NoHeadError, NonFiniteError, RequestError, ShapeError
from medtokenbudget.registry import Registry
from medtokenbudget.routing import LearnedSelector, Selector, TrainingPass
from medtokenbudget.routing.trainable import dropout
from medtokenbudget.tokens import Selection, TokenBatch, TokenSet


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
    dropout: float = 0.0

    def __init__(self, dim: int, classes: int) -> None:
        super().__init__()
        if min(dim, classes) < 1:
            raise RequestError(f"`dim` and `classes` must be at least 1, got {dim} and {classes}.")
        self.dim, self.classes = dim, classes

    @abstractmethod
    def logits(self, pooled: Any, generator: torch.Generator | None = None) -> Tensor:
        """Compute logits [..., C] of pooled tokens [..., D]; `generator` feeds the dropout in training mode."""

    def drop(self, x: Tensor, generator: torch.Generator | None) -> Tensor:
        """Apply the head's own `dropout` in training mode."""
        return dropout(x, self.dropout, generator) if self.training else x

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
    """Compute `w_i exp(l_i) / sum_j w_j exp(l_j)` of logits [..., K], also differentiable where a weight is 0.

    The weights [..., K] are broadcast to the logits; at least one is above 0 in each row.
    """
    weights = weights.expand_as(logits)
    # The largest logit of those that count, as in any stable softmax.
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
        x = self.drop(x, generator)
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


class RoutedClassifier(nn.Module):
    """A selector and the head that reads what it keeps; a router that was trained from masks alone has no head.

    In training a learned selector gives the head a differentiable mean of all patches; at inference the kept patches are gathered.
    Without noise both means are equal.
    """

    head: Head | None

    def __init__(self, selector: Selector, head: Head | None) -> None:
        super().__init__()
        self.selector = selector
        self.head = head
        self.history: list[dict[str, Any]] = []
        """One row per epoch of its training, as in `metrics.jsonl`; empty for a classifier that was loaded."""

    @property
    def required_head(self) -> Head:
        """The head, for those who need class logits; a router without one raises a NoHeadError."""
        if self.head is None:
            raise NoHeadError(
                f"The router '{self.selector.name}' has no head, because it was trained without class labels: it keeps patches, "
                "but predicts no class. Use `mtb route` or `model.route`, or train a head on labeled images with `mtb train`."
            )
        return self.head

    def forward(self, tokens: TokenBatch, budget: float, generator: torch.Generator | None = None) -> Tensor:
        return self.route(tokens, budget, generator)[0]

    def route(self, tokens: TokenBatch, budget: float, generator: torch.Generator | None = None) -> tuple[Tensor, Selection]:
        selection = self.selector.select_budget(tokens, budget, generator)
        return self.required_head.read(selection, tokens.grid), selection

    def training_pass(
        self, tokens: TokenBatch, budget: float, config: TrainConfig, generator: torch.Generator | None = None
    ) -> tuple[Tensor, TrainingPass]:
        """Return class logits [B, C] and the selector's training pass; dropout and noise come from `generator`."""
        if not isinstance(self.selector, LearnedSelector):
            raise RequestError(f"Selector '{self.selector.name}' does not learn. Train a head on its pooled tokens instead.")
        step = self.selector.training_pass(tokens.float(), budget, config, generator)
        if step.pooled is None:
            raise RequestError(f"Selector '{self.selector.name}' gives no pooled tokens, so it cannot be trained with its head.")
        head = self.required_head
        kept = step.token_set(tokens.float()) if head.reads == "tokens" else step.pooled
        if kept is None:
            raise RequestError(
                f"Selector '{self.selector.name}' gives no tokens in its training pass, so head '{head.name}', "
                "which reads tokens, cannot be trained with it. Use a head that reads the mean, such as mlp."
            )
        label = tokens.label if tokens.label is not None else torch.full((len(tokens),), -1, device=tokens.patches.device)
        logits, term = head.training_step(kept, label, generator)
        return logits, step if term is None else replace(step, terms={**step.terms, "head": term})
