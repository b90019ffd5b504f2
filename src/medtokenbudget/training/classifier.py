"""A selector and the head behind it, if it has one, as one module: the routed classifier."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from medtokenbudget.config import TrainConfig
from medtokenbudget.errors import NoHeadError, RequestError
from medtokenbudget.heads import Head
from medtokenbudget.routing import LearnedSelector, Selection, Selector, TokenBatch, TrainingPass


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
        """Return class logits [B, C] and the selection behind them; `generator` is for selectors that draw."""
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
