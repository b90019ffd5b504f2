"""The base of selectors that rank patches by what a classifier of their own looks at: attribution as a router.

The classifier (the probe) sees all patches and learns from labels; the patches that mattered to it are kept, as they are.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from medtokenbudget.config import TrainConfig
from medtokenbudget.errors import MissingSignalError
from medtokenbudget.routing.learned import LearnedSelector, TrainingPass
from medtokenbudget.routing.losses import lesion_term
from medtokenbudget.routing.router import hard_topk, masked_mean
from medtokenbudget.routing.selector import Ranker
from medtokenbudget.tokens import TokenBatch


class ProbeHead(nn.Module):
    """The classifier of a probe: Linear, GELU, Linear. Its gradient is written out, so that ranking needs no backward pass.

    Args:
        dim: Dimension of what it reads.
        classes: Number of classes.
        width: Width of the hidden layer.
    """

    def __init__(self, dim: int, classes: int, width: int) -> None:
        super().__init__()
        self.hidden = nn.Linear(dim, width)
        self.output = nn.Linear(width, classes)

    def forward(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """Logits [B, C], and the gradient [B, dim] of the largest logit, for features [B, dim]; both in fp32."""
        before = self.hidden(features).float()
        logits = self.output(F.gelu(before)).float()
        # d gelu(h) / dh = Phi(h) + h phi(h)
        slope = 0.5 * (1 + torch.erf(before / math.sqrt(2))) + before * torch.exp(-before.square() / 2) / math.sqrt(2 * math.pi)
        return logits, (self.output.weight[logits.argmax(1)] * slope) @ self.hidden.weight


class Probe(LearnedSelector, Ranker):
    """Ranks patches by an attribution of the probe's prediction. Subclasses take `dim` and `classes` and write `attribute`."""

    def __init__(self, minimum: int = 16) -> None:
        super().__init__(minimum)

    @classmethod
    def from_config(cls, dim: int, config: TrainConfig, classes: int = 2) -> Self:
        return cls(dim, classes, minimum=config.router.minimum)  # type: ignore[call-arg, misc]

    @classmethod
    def settings(cls, config: TrainConfig) -> tuple[str, ...]:
        return ("losses.lesion", "losses.classification")

    @abstractmethod
    def attribute(self, patches: Tensor) -> tuple[Tensor, Tensor]:
        """Attribution of each patch [B, N], of any scale, and the probe's class logits [B, C], for patches [B, N, D] in fp32."""

    def score(self, tokens: TokenBatch, generator: torch.Generator | None = None) -> Tensor:
        return self.attribute(tokens.patches.float())[0]

    def training_pass(
        self,
        tokens: TokenBatch,
        budget: float,
        config: TrainConfig,
        generator: torch.Generator | None = None,
        route: bool = True,
    ) -> TrainingPass:
        """The mean of the hard top-K, through which no gradient reaches the probe, the probe's own loss, and the lesion loss.

        Attributions have no natural zero, so the lesion loss sees them relative to their mean in the image.
        """
        tokens = tokens.float()
        scores, logits = self.attribute(tokens.patches)
        relative = scores - scores.mean(1, keepdim=True)
        terms = {"lesion": lesion_term(relative, tokens, config.losses.lesion)}
        weights = {"lesion": config.losses.lesion, "probe": config.losses.classification}
        if config.losses.classification:
            terms["probe"] = self._loss(logits, tokens.label)
        mask = hard_topk(scores.detach(), self.count(budget, tokens.n)).float() if route else None
        pooled = None if mask is None else masked_mean(tokens.patches, mask)
        return TrainingPass(pooled, terms, torch.sigmoid(relative), weights, mask)

    def _loss(self, logits: Tensor, label: Tensor | None) -> Tensor:
        if label is None:
            raise MissingSignalError(
                f"Selector '{self.name}' learns from class labels, which this batch does not have. Label the images."
            )
        if not bool((label >= 0).any()):
            return logits.sum() * 0.0
        return F.cross_entropy(logits.float(), label, ignore_index=-1)
