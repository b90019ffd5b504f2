"""LATS of the paper as a selector: the scorer, its smoothing, and the straight-through path that trains it.

The scorer itself is `routing/lats.py`; here is what turns its scores into a ranking.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from medtokenbudget.config import SIGNALS, LATSConfig, Neighborhood, Padding, RouterConfig
from medtokenbudget.errors import UnknownNameError
from medtokenbudget.routing.lats import LATS, ordered_signals
from medtokenbudget.routing.registry import register
from medtokenbudget.routing.router import smooth_scores, straight_through_topk
from medtokenbudget.routing.selector import Ranker
from medtokenbudget.tokens import TokenBatch


@register("lats")
class LATSSelector(Ranker, nn.Module):
    """Highest smoothed LATS score first.

    dim, hidden, layers, dropout, signals, neighborhood  of the scorer
    smooth, padding, temperature, minimum                of the router; the paper's smoothing pads with zeros
    """

    learns = True
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
        nn.Module.__init__(self)
        Ranker.__init__(self, minimum)
        self.scorer = LATS(dim, hidden, layers, dropout, signals, neighborhood)
        self.smooth = smooth
        self.padding = padding
        self.temperature = temperature
        self.active: tuple[str, ...] | None = None
        self.requires = ("attention_entropy",) if "attention" in self.scorer.signals else ()

    @classmethod
    def from_config(cls, dim: int, lats: LATSConfig, router: RouterConfig) -> LATSSelector:
        return cls(dim, **vars(lats), **vars(router))

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

    def score(self, tokens: TokenBatch, generator: torch.Generator | None = None) -> Tensor:
        """Smoothed scores [B, N] in [0, 1], without dropout and noise whatever the mode."""
        logits = self.scorer.logits(tokens, signals=self.active, dropout=0.0)
        return self.smoothed(torch.sigmoid(logits), tokens.grid)

    def smoothed(self, scores: Tensor, grid: tuple[int, int]) -> Tensor:
        return smooth_scores(scores, grid, self.smooth, self.padding)

    def training_mask(self, scores: Tensor, grid: tuple[int, int], k: int, generator: torch.Generator | None = None) -> Tensor:
        """Straight-through mask [B, N] of raw scores [B, N], smoothed first; noise from `generator`."""
        return straight_through_topk(self.smoothed(scores, grid), k, self.temperature, generator)
