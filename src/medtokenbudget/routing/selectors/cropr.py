"""Cropr (Bergner et al., CVPR 2025, "Token Cropr"): cross-attention pruning, the pruner inside SLIM (Bozkurt et al., 2025).

Learned queries attend to the tokens; an auxiliary head predicts the class from what they gather, and its loss alone trains the
scores. Post-backbone form: one module on the final tokens, without last-layer fusion. SLIM as a whole is a slide encoder.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from medtokenbudget.config import TrainConfig
from medtokenbudget.errors import MissingSignalError
from medtokenbudget.routing.learned import LearnedSelector, TrainingPass
from medtokenbudget.routing.losses import lesion_term
from medtokenbudget.routing.registry import register_selector
from medtokenbudget.routing.router import hard_topk, masked_mean
from medtokenbudget.routing.selector import Ranker
from medtokenbudget.tokens import TokenBatch


@register_selector("cropr")
class Cropr(LearnedSelector, Ranker):
    """The K patches with the largest dot product of their key with the mean query, as in the publication at inference.

    Args:
        dim: Embedding dimension D of the tokens.
        classes: Classes of the auxiliary head.
        queries: Learned queries.
        width: Dimension of queries and keys.
        minimum: Fewest patches kept at any budget.
    """

    def __init__(self, dim: int, classes: int = 2, queries: int = 8, width: int = 64, minimum: int = 16) -> None:
        super().__init__(minimum)
        self.classes, self.queries, self.width = classes, queries, width
        self.query = nn.Parameter(torch.randn(queries, width))
        self.norm = nn.LayerNorm(dim)
        self.key = nn.Linear(dim, width)
        self.mix = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, width), nn.GELU())
        self.auxiliary = nn.Linear(width, classes)

    @classmethod
    def from_config(cls, dim: int, config: TrainConfig, classes: int = 2) -> Cropr:
        return cls(dim, classes, minimum=config.router.minimum)

    def logits(self, patches: Tensor) -> Tensor:
        """Attention logits of each query, [B, queries, N] in fp32."""
        keys = self.key(self.norm(patches))
        return (self.query @ keys.transpose(1, 2)).float() / math.sqrt(self.width)

    def score(self, tokens: TokenBatch, generator: torch.Generator | None = None) -> Tensor:
        return self.logits(tokens.patches.float()).mean(1)

    def training_pass(
        self,
        tokens: TokenBatch,
        budget: float,
        config: TrainConfig,
        generator: torch.Generator | None = None,
        route: bool = True,
    ) -> TrainingPass:
        """The mean of the hard top-K, through which no gradient reaches the scores, and the loss of the auxiliary head."""
        tokens = tokens.float()
        logits = self.logits(tokens.patches)
        score = logits.mean(1)
        terms = {"lesion": lesion_term(score, tokens, config.losses.lesion)}
        weights = {"lesion": config.losses.lesion, "auxiliary": config.losses.classification}
        if config.losses.classification:
            terms["auxiliary"] = self._auxiliary_loss(tokens, logits)
        mask = hard_topk(score.detach(), self.count(budget, tokens.n)).float() if route else None
        pooled = None if mask is None else masked_mean(tokens.patches, mask)
        return TrainingPass(pooled, terms, torch.sigmoid(score), weights, mask)

    def _auxiliary_loss(self, tokens: TokenBatch, logits: Tensor) -> Tensor:
        if tokens.label is None:
            raise MissingSignalError("Selector 'cropr' learns from class labels, which this batch does not have. Label the images.")
        gathered = torch.bmm(logits.softmax(-1), self.norm(tokens.patches))  # [B, queries, D]
        predicted = self.auxiliary(self.mix(gathered).mean(1))
        if not bool((tokens.label >= 0).any()):
            return predicted.sum() * 0.0
        return F.cross_entropy(predicted.float(), tokens.label, ignore_index=-1)
