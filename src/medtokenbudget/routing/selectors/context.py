"""The context scorer as a selector: `mtb train --selector context`.

The scorer itself is `routing/context.py`; what turns its scores into a ranking is `routing/scored.py`.
"""

from __future__ import annotations

from typing import Any, Self

import torch
from torch import Tensor

from medtokenbudget.config import Padding, TrainConfig
from medtokenbudget.routing.context import ContextScorer
from medtokenbudget.routing.registry import register_selector
from medtokenbudget.routing.scored import ScoredRanker
from medtokenbudget.tokens import TokenBatch

TURNS = 8


@register_selector("context")
class ContextSelector(ScoredRanker):
    """Keeps the patches with the highest score of a small convolutional network over the token grid.

    Args:
        dim: Embedding dimension D of the tokens.
        channels: Width of the blocks.
        blocks: Number of blocks.
        kernel: Side of the convolutions, in patches.
        expansion: Width of the MLP of a block, in multiples of `channels`.
        dropout: Dropout of what a block adds.
        turns: Whether training shows the blocks the token grid flipped and turned at random.
        smooth: Side of the average filter over the score grid; 1 is none.
        padding: How the filter treats the border.
        temperature: Gumbel temperature of the training selection.
        minimum: Fewest patches kept at any budget.
    """

    def __init__(
        self,
        dim: int,
        channels: int = 128,
        blocks: int = 3,
        kernel: int = 5,
        expansion: int = 2,
        dropout: float = 0.0,
        turns: bool = True,
        smooth: int = 1,
        padding: Padding = "exclude",
        temperature: float = 0.5,
        minimum: int = 16,
    ) -> None:
        super().__init__(smooth, padding, temperature, minimum)
        self.scorer = ContextScorer(dim, channels, blocks, kernel, expansion, dropout)
        self.turns = turns

    @classmethod
    def from_config(cls, dim: int, config: TrainConfig, classes: int = 2) -> Self:
        router = {name: getattr(config.router, name) for name in ("padding", "temperature", "minimum")}
        own = {name: value for name, value in vars(config.context).items() if name != "min_steps"}
        return cls(dim, **own, **router)

    @classmethod
    def settings(cls, config: TrainConfig) -> tuple[str, ...]:
        padding = ("router.padding",) if config.context.smooth > 1 else ()
        return (*super().settings(config), "context", *padding)

    def min_steps(self, config: TrainConfig) -> int:
        return min(config.min_steps, config.context.min_steps)

    def options(self) -> dict[str, Any]:
        scorer = self.scorer
        return {
            "channels": scorer.channels,
            "blocks": len(scorer.blocks),
            "kernel": scorer.kernel,
            "expansion": scorer.expansion,
            "dropout": scorer.dropout,
            "turns": self.turns,
            "smooth": self.smooth,
            "padding": self.padding,
            "temperature": self.temperature,
            "minimum": self.minimum,
        }

    def sample(self, tokens: TokenBatch, patches: int, generator: torch.Generator | None) -> Tensor | None:
        """All patches: the blocks need every neighbor, so a sample would save nothing."""
        return None

    def logits(self, tokens: TokenBatch, generator: torch.Generator | None = None, at: Tensor | None = None) -> Tensor:
        """Raw score logits [B, N] (or [B, T] at the patches `at`); in training mode with dropout and a random turn of the grid."""
        turn = int(torch.randint(TURNS, (1,), generator=generator)) if self.turns and self.training else 0
        found = self.scorer.logits(tokens, generator, self.scorer.dropout if self.training else 0.0, turn)
        return found if at is None else found.take_along_dim(at, 1)

    def score_logits(self, tokens: TokenBatch) -> Tensor:
        return self.scorer.logits(tokens)
