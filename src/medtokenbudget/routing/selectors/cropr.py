"""Cropr (Bergner et al., CVPR 2025, "Token Cropr"): cross-attention pruning, the pruner inside SLIM (Bozkurt et al., 2025).

A learned query attends to the tokens; an auxiliary head predicts the class from what it gathers, and its loss alone trains the
scores. The module is the published one for classification: no projections, one query, an MLP behind the attention. Post-backbone
form: one module on the final tokens, without last-layer fusion. SLIM as a whole is a slide encoder.
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
    """The K patches with the largest dot product with the query (the sum over queries), as in the publication at inference.

    Args:
        dim: Embedding dimension D of the tokens.
        classes: Classes of the auxiliary head.
        queries: Learned queries; the publication has one for classification.
        ratio: Width of the MLP behind the attention, times D.
        minimum: Fewest patches kept at any budget.
    """

    def __init__(self, dim: int, classes: int = 2, queries: int = 1, ratio: int = 4, minimum: int = 16) -> None:
        super().__init__(minimum)
        self.classes, self.queries, self.ratio = classes, queries, ratio
        self.query = nn.Parameter(nn.init.trunc_normal_(torch.empty(queries, dim), std=dim**-0.5))
        self.mlp = nn.Sequential(nn.LayerNorm(dim, eps=1e-6), nn.Linear(dim, ratio * dim), nn.GELU(), nn.Linear(ratio * dim, dim))
        self.auxiliary = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, classes))
        # A dot product has no threshold; the lesion loss, which is not part of the publication, needs one.
        self.threshold = nn.Parameter(torch.zeros(()))

    @classmethod
    def from_config(cls, dim: int, config: TrainConfig, classes: int = 2) -> Cropr:
        return cls(dim, classes, minimum=config.router.minimum)

    @classmethod
    def settings(cls, config: TrainConfig) -> tuple[str, ...]:
        return ("losses.lesion", "losses.classification")

    def logits(self, patches: Tensor) -> Tensor:
        """Dot products of each query with the patches, which are keys and values themselves: [B, queries, N] in fp32."""
        return (self.query @ patches.transpose(1, 2)).float()

    def score(self, tokens: TokenBatch, generator: torch.Generator | None = None) -> Tensor:
        return self.logits(tokens.patches.float()).sum(1)

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
        score = logits.sum(1)
        above = score - self.threshold
        terms = {"lesion": lesion_term(above, tokens, config.losses.lesion)}
        weights = {"lesion": config.losses.lesion, "auxiliary": config.losses.classification}
        if config.losses.classification:
            terms["auxiliary"] = self._auxiliary_loss(tokens, logits)
        mask = hard_topk(score.detach(), self.count(budget, tokens.n)).float() if route else None
        pooled = None if mask is None else masked_mean(tokens.patches, mask)
        return TrainingPass(pooled, terms, torch.sigmoid(above), weights, mask)

    def _auxiliary_loss(self, tokens: TokenBatch, logits: Tensor) -> Tensor:
        if tokens.label is None:
            raise MissingSignalError("Selector 'cropr' learns from class labels, which this batch does not have. Label the images.")
        shares = (logits / math.sqrt(self.query.shape[1])).softmax(-1)
        gathered = torch.bmm(shares, tokens.patches)  # [B, queries, D]
        predicted = self.auxiliary((gathered + self.mlp(gathered)).mean(1))
        if not bool((tokens.label >= 0).any()):
            return predicted.sum() * 0.0
        return F.cross_entropy(predicted.float(), tokens.label, ignore_index=-1)
