"""The base of every selector that learns: it gives a training pass and its own loss terms, the trainer does the rest.

The trainer supplies classification, schedules, seeds, checkpoints, resuming and the choice of the epoch.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Self

import torch
from torch import Tensor, nn

from medtokenbudget.config import TrainConfig
from medtokenbudget.errors import UnknownNameError
from medtokenbudget.routing.selector import Selector
from medtokenbudget.tokens import TokenBatch, TokenSet


@dataclass(frozen=True)
class TrainingPass:
    """What one training pass of a selector gives.

    Attributes:
        pooled: [B, D] what the head reads, with a gradient to the selector; None if the selector was asked to train alone.
        terms: The selector's own loss terms by name, unweighted.
        weights: Weight of each term in the total loss; a term without one counts once.
        scores: [B, N] scores of the patches (or [B, T] of a sample of them), for monitoring.
        mask: [B, N] differentiable mask of the kept patches, where the selector has one.
        tokens: [B, K, D] the tokens themselves, for selectors that make new ones; heads that read tokens need this or `mask`.
        positions: [B, K, 2] row and column of those tokens on the grid.
    """

    pooled: Tensor | None
    terms: Mapping[str, Tensor]
    scores: Tensor
    weights: Mapping[str, float] = field(default_factory=dict)
    mask: Tensor | None = None
    tokens: Tensor | None = None
    positions: Tensor | None = None

    def token_set(self, tokens: TokenBatch) -> TokenSet | None:
        """What heads that read tokens see of the batch `tokens`; None if this pass does not say."""
        if self.tokens is not None and self.positions is not None:
            return TokenSet(self.tokens, torch.ones_like(self.tokens[..., 0]), self.positions, tokens.grid)
        return None if self.mask is None else TokenSet.under(self.mask, tokens.patches, tokens.grid)


class LearnedSelector(Selector, nn.Module):
    """A selector with parameters. Its class takes `dim`, the embedding dimension, first.

    Subclasses call `super().__init__(minimum)` before they add modules.
    """

    learns: ClassVar[bool] = True

    def __init__(self, minimum: int = 16) -> None:
        nn.Module.__init__(self)
        Selector.__init__(self, minimum)

    @classmethod
    @abstractmethod
    def from_config(cls, dim: int, config: TrainConfig, classes: int = 2) -> Self:
        """A selector for tokens of dimension `dim` with the settings of a training; `classes` is for those that also classify."""

    @classmethod
    def settings(cls, config: TrainConfig) -> tuple[str, ...]:
        """Dotted names of what it reads of `config` beside what every training does; 'router' stands for all of that part.

        A setting that no method of a run reads is refused. Override this to have more refused than `lats` and `context`.
        """
        return ("patches", "router", "curriculum", "losses")

    def min_steps(self, config: TrainConfig) -> int:
        """Fewest steps that its training takes on small data sets."""
        return config.min_steps

    @abstractmethod
    def training_pass(
        self,
        tokens: TokenBatch,
        budget: float,
        config: TrainConfig,
        generator: torch.Generator | None = None,
        route: bool = True,
    ) -> TrainingPass:
        """The differentiable pass of a training step.

        Args:
            tokens: A batch in fp32, with labels and lesion patches where known.
            budget: Token budget of this step.
            config: Settings of the training (loss weights, sampled patches, ...).
            generator: Source of all noise, so that a resumed training repeats it.
            route: False trains the selector alone, from its own terms; `pooled` is then None.
        """

    def ablate(self, name: str | None) -> Self:
        """Switch off the part called `name` (one of `ablations`) of a trained selector; None switches all on again."""
        if name is not None:
            raise UnknownNameError.of(f"ablation of {self.name}", name, self.ablations)
        return self
