"""LATS of the paper as a selector: the scorer and its signals, which can be switched off after training.

The scorer itself is `routing/lats.py`; what turns its scores into a ranking is `routing/scored.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from medtokenbudget.config import SIGNALS, Neighborhood, Padding, TrainConfig
from medtokenbudget.errors import UnknownNameError
from medtokenbudget.routing.lats import LATS, ordered_signals
from medtokenbudget.routing.registry import register_selector
from medtokenbudget.routing.scored import ScoredRanker
from medtokenbudget.tokens import TokenBatch


@register_selector("lats")
class LATSSelector(ScoredRanker):
    """Keeps the patches with the highest smoothed LATS score.

    Args:
        dim: Embedding dimension D of the tokens.
        hidden: Width of the scoring MLP.
        layers: Hidden layers of the scoring MLP.
        dropout: Dropout after each hidden layer.
        signals: Auxiliary signals beside the patch embedding.
        neighborhood: Neighbors of the local contrast.
        smooth: Side of the average filter over the score grid.
        padding: How the filter treats the border; the paper pads with zeros.
        temperature: Gumbel temperature of the training selection.
        minimum: Fewest patches kept at any budget.
    """

    ablations = ("no-attention", "no-norm", "no-contrast", "no-signals")

    def __init__(
        self,
        dim: int,
        hidden: int = 256,
        layers: int = 4,
        dropout: float = 0.1,
        signals: Sequence[str] = SIGNALS,
        neighborhood: Neighborhood = "raster",
        smooth: int = 3,
        padding: Padding = "zero",
        temperature: float = 0.5,
        minimum: int = 16,
    ) -> None:
        super().__init__(smooth, padding, temperature, minimum)
        self.scorer = LATS(dim, hidden, layers, dropout, signals, neighborhood)
        self.active: tuple[str, ...] | None = None
        self.requires = ("attention_entropy",) if "attention" in self.scorer.signals else ()

    @classmethod
    def from_config(cls, dim: int, config: TrainConfig, classes: int = 2) -> LATSSelector:
        return cls(dim, **vars(config.lats), **vars(config.router))

    @classmethod
    def settings(cls, config: TrainConfig) -> tuple[str, ...]:
        padding = ("router.padding",) if config.router.smooth > 1 else ()
        return (*super().settings(config), "lats", "router.smooth", *padding, "patches")

    def options(self) -> dict[str, Any]:
        scorer = self.scorer
        return {
            "hidden": scorer.output.in_features,
            "layers": len(scorer.norms),
            "dropout": scorer.dropout,
            "signals": list(scorer.signals),
            "neighborhood": scorer.neighborhood,
            "smooth": self.smooth,
            "padding": self.padding,
            "temperature": self.temperature,
            "minimum": self.minimum,
        }

    def toggle(self, signals: Sequence[str] | None) -> LATSSelector:
        """Keep only `signals` on at call time (the others enter as zeros); None switches all on again."""
        self.active = None if signals is None else ordered_signals(signals, self.scorer.signals)
        return self

    def ablate(self, name: str | None) -> LATSSelector:
        """Switch off one signal ('no-norm', ...) or all of them ('no-signals') after training; None switches all on again."""
        if name is None:
            return self.toggle(None)
        if name not in self.ablations:
            raise UnknownNameError.of("ablation", name, self.ablations)
        off = name.removeprefix("no-")
        return self.toggle([signal for signal in self.scorer.signals if off not in (signal, "signals")])

    def logits(self, tokens: TokenBatch, generator: torch.Generator | None = None, at: Tensor | None = None) -> Tensor:
        """Raw score logits [B, N] (or [B, T] at the patches `at`), with dropout in training mode: what the losses see."""
        return self.scorer.logits(tokens, generator, self.active, at=at)

    def score_logits(self, tokens: TokenBatch) -> Tensor:
        return self.scorer.logits(tokens, signals=self.active, dropout=0.0)
