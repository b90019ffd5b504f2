"""The base of learned selectors whose K tokens are mixtures of all patches (TokenLearner, query pooling, slots).

Subclasses only write `attention`; the selection, the training pass and the lesion loss follow from it.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Self

import torch
from torch import Tensor

from medtokenbudget.config import TrainConfig
from medtokenbudget.errors import CountError
from medtokenbudget.routing.learned import LearnedSelector, TrainingPass
from medtokenbudget.routing.losses import lesion_mass_term
from medtokenbudget.routing.router import check_k
from medtokenbudget.routing.selector import Merger
from medtokenbudget.tokens import Selection, TokenBatch, TokenSet


class SoftMerger(LearnedSelector, Merger):
    """K tokens `sum_n A[k, n] x_n`, whose weights A sum to one over the patches.

    The published methods have a fixed number of tokens. Here the tokens are ordered: at a budget of K tokens the first K of `slots`
    are used. A slot that no training budget reached is as it was initialized.

    Args:
        slots: Largest number of tokens.
        minimum: Fewest tokens kept at any budget.
    """

    def __init__(self, slots: int = 256, minimum: int = 16) -> None:
        super().__init__(minimum)
        if slots < 1:
            raise CountError(f"slots must be at least 1, got {slots}.")
        self.slots = slots

    @classmethod
    def from_config(cls, dim: int, config: TrainConfig, classes: int = 2) -> Self:
        return cls(dim, minimum=config.router.minimum)

    @classmethod
    def settings(cls, config: TrainConfig) -> tuple[str, ...]:
        # Trained alone, too, it makes as many tokens as the budget of the epoch asks for.
        return ("losses.lesion", "curriculum.kind", "curriculum.start")

    @abstractmethod
    def attention(self, tokens: TokenBatch, k: int) -> Tensor:
        """Share of each patch in each of the first k tokens, [B, k, N] in fp32; rows sum to one."""

    def extra_terms(self, tokens: TokenBatch, k: int) -> dict[str, Tensor]:
        """Own loss terms beside the lesion loss."""
        return {}

    def select(self, tokens: TokenBatch, k: int, generator: torch.Generator | None = None) -> Selection:
        k = self.count_slots(check_k(k, tokens.n))
        attention = self.attention(self.check(tokens).float(), k)
        shares = attention / attention.sum(1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)
        return Selection(
            tokens=torch.bmm(attention, tokens.patches.float()).to(tokens.patches.dtype),
            weights=shares.sum(2),
            assignment=attention.argmax(1),
            attention=attention,
        )

    def count_slots(self, k: int) -> int:
        """k, if there are as many slots."""
        if k > self.slots:
            raise CountError(
                f"Selector '{self.name}' has {self.slots} slots, so it cannot give {k} tokens. "
                f"Create it with slots={k} or more, or use a smaller budget."
            )
        return k

    def training_pass(
        self,
        tokens: TokenBatch,
        budget: float,
        config: TrainConfig,
        generator: torch.Generator | None = None,
        route: bool = True,
    ) -> TrainingPass:
        """The K tokens' mean, the lesion loss on its attention, and the selector's own terms."""
        tokens = tokens.float()
        k = self.count_slots(self.count(budget, tokens.n))
        attention = self.attention(tokens, k)
        mean = attention.mean(1)
        terms = {"lesion": lesion_mass_term(mean, tokens, config.losses.lesion), **self.extra_terms(tokens, k)}
        weights = {"lesion": config.losses.lesion}
        if not route:
            return TrainingPass(None, terms, mean * tokens.n, weights)
        mixed = Selection(torch.bmm(attention, tokens.patches), attention.sum(2), attention.argmax(1), attention=attention)
        positions = TokenSet.of(mixed, tokens.grid).positions
        return TrainingPass(mixed.pooled(), terms, mean * tokens.n, weights, tokens=mixed.tokens, positions=positions)
