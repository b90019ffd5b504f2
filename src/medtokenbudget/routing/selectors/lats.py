"""LATS of the paper as a selector: the scorer, its smoothing, and the straight-through pass that trains it.

The scorer itself is `routing/lats.py`; here is what turns its scores into a ranking.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from medtokenbudget.config import SIGNALS, Neighborhood, Padding, TrainConfig
from medtokenbudget.errors import RequestError, UnknownNameError
from medtokenbudget.routing.lats import LATS, ordered_signals
from medtokenbudget.routing.learned import LearnedSelector, TrainingPass
from medtokenbudget.routing.losses import scorer_terms
from medtokenbudget.routing.registry import register_selector
from medtokenbudget.routing.router import masked_mean, smooth_scores, straight_through_topk
from medtokenbudget.routing.selector import Ranker
from medtokenbudget.tokens import TokenBatch


@register_selector("lats")
class LATSSelector(LearnedSelector, Ranker):
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
        super().__init__(minimum)
        self.scorer = LATS(dim, hidden, layers, dropout, signals, neighborhood)
        self.smooth = smooth
        self.padding = padding
        self.temperature = temperature
        self.active: tuple[str, ...] | None = None
        self.requires = ("attention_entropy",) if "attention" in self.scorer.signals else ()

    @classmethod
    def from_config(cls, dim: int, config: TrainConfig, classes: int = 2) -> LATSSelector:
        return cls(dim, **vars(config.lats), **vars(config.router))

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
        """Scores [B, N] after the average filter."""
        return smooth_scores(scores, grid, self.smooth, self.padding)

    def training_mask(self, scores: Tensor, grid: tuple[int, int], k: int, generator: torch.Generator | None = None) -> Tensor:
        """Straight-through mask [B, N] of raw scores [B, N], smoothed first; noise from `generator`."""
        return straight_through_topk(self.smoothed(scores, grid), k, self.temperature, generator)

    def training_pass(
        self,
        tokens: TokenBatch,
        budget: float,
        config: TrainConfig,
        generator: torch.Generator | None = None,
        route: bool = True,
    ) -> TrainingPass:
        """Raw scores, the mean under the straight-through mask, and the paper's scorer losses.

        With `route` False the scorer may learn from a sample of `config.patches` patches of each image. Without a generator there
        is no Gumbel noise.
        """
        if route and config.patches:
            raise RequestError("The joint recipe routes whole images, so it learns from all patches: use --patches 0.")
        tokens = tokens.float()
        k = self.count(budget, tokens.n)
        at = None if route else _sample(tokens, config.patches, generator)
        score_logits = self.logits(tokens, generator, at)
        scores = torch.sigmoid(score_logits)
        mask = self.training_mask(scores, tokens.grid, k, generator) if route else None
        with torch.autocast(scores.device.type, enabled=False):
            terms = scorer_terms(
                scores,
                k=k,
                budget=budget,
                weights=config.losses,
                lesion=_at(tokens.lesion, at),
                has_mask=tokens.has_mask,
                cls_attention=_at(tokens.cls_attention, at),
                score_logits=score_logits,
            )
        pooled = None if mask is None else masked_mean(tokens.patches, mask)
        weights = {name: getattr(config.losses, name) for name in terms}
        return TrainingPass(pooled, terms, scores, weights, mask)


def _sample(tokens: TokenBatch, patches: int, generator: torch.Generator | None) -> Tensor | None:
    """Numbers [B, T] of the patches that a step learns from, drawn without replacement; None means all."""
    if not 0 < patches < tokens.n:
        return None
    draw = torch.rand(len(tokens), tokens.n, generator=generator)
    return draw.argsort(1)[:, :patches].to(tokens.patches.device)


def _at(values: Tensor | None, at: Tensor | None) -> Tensor | None:
    return values if values is None or at is None else values.take_along_dim(at, 1)
