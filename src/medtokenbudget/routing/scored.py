"""The base of learned selectors that rank by one score per patch: smoothing, and the straight-through pass that trains them.

What a score is made from is up to the selector: `lats` reads each patch alone, `context` its neighborhood as well.
"""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor

from medtokenbudget.config import Padding, TrainConfig
from medtokenbudget.errors import RequestError
from medtokenbudget.routing.learned import LearnedSelector, TrainingPass
from medtokenbudget.routing.losses import scorer_terms
from medtokenbudget.routing.router import masked_mean, smooth_scores, straight_through_topk
from medtokenbudget.routing.selector import Ranker
from medtokenbudget.tokens import TokenBatch


class ScoredRanker(LearnedSelector, Ranker):
    """Keeps the patches with the highest smoothed score. Subclasses write `logits` and `score_logits`.

    Args:
        smooth: Side of the average filter over the score grid.
        padding: How the filter treats the border.
        temperature: Gumbel temperature of the training selection.
        minimum: Fewest patches kept at any budget.
    """

    def __init__(self, smooth: int, padding: Padding, temperature: float, minimum: int) -> None:
        super().__init__(minimum)
        self.smooth = smooth
        self.padding = padding
        self.temperature = temperature

    @classmethod
    def settings(cls, config: TrainConfig) -> tuple[str, ...]:
        terms = ("losses.budget", "losses.diversity", "losses.lesion", "losses.distillation")
        return (*terms, "router.temperature") if config.recipe == "joint" else terms

    @abstractmethod
    def logits(self, tokens: TokenBatch, generator: torch.Generator | None = None, at: Tensor | None = None) -> Tensor:
        """Raw score logits [B, N] (or [B, T] at the patches `at`), with noise in training mode: what the losses see."""

    @abstractmethod
    def score_logits(self, tokens: TokenBatch) -> Tensor:
        """Raw score logits [B, N] without noise whatever the mode."""

    def sample(self, tokens: TokenBatch, patches: int, generator: torch.Generator | None) -> Tensor | None:
        """Numbers [B, T] of the patches that a step learns from, drawn without replacement; None means all."""
        if not 0 < patches < tokens.n:
            return None
        draw = torch.rand(len(tokens), tokens.n, generator=generator)
        return draw.argsort(1)[:, :patches].to(tokens.patches.device)

    def score(self, tokens: TokenBatch, generator: torch.Generator | None = None) -> Tensor:
        """Smoothed scores [B, N] in [0, 1], without dropout and noise whatever the mode."""
        return self.smoothed(torch.sigmoid(self.score_logits(tokens)), tokens.grid)

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
            raise RequestError("The joint recipe routes whole images, so it learns from all patches: patches must be 0.")
        tokens = tokens.float()
        k = self.count(budget, tokens.n)
        at = None if route else self.sample(tokens, config.patches, generator)
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


def _at(values: Tensor | None, at: Tensor | None) -> Tensor | None:
    return values if values is None or at is None else values.take_along_dim(at, 1)
