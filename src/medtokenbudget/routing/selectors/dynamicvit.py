"""DynamicViT (Rao et al., NeurIPS 2021): a prediction module decides which tokens stay. With SPViT's package token as an option.

Post-backbone form: one prediction module on the final tokens. The backbone is frozen, so there is no distillation from an unpruned
teacher; the ratio loss and the Gumbel-softmax decisions are as published. SPViT (Kong et al., ECCV 2022; `dynamicvit-package`) adds
one token that packages the pruned ones, weighted with their scores; its multi-head selector and latency-aware training are out.
"""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from medtokenbudget.config import TrainConfig
from medtokenbudget.routing.base import Merger, Ranker, register_selector
from medtokenbudget.routing.losses import lesion_term
from medtokenbudget.routing.merging import with_rest
from medtokenbudget.routing.topk import gumbel_noise, masked_mean, rank
from medtokenbudget.routing.trainable import LearnedSelector, TrainingPass
from medtokenbudget.tokens import Selection, TokenBatch

RATIO_WEIGHT = 2.0
"""Weight of the ratio loss in the publication."""


class Predictor(nn.Module):
    """Keep logits [B, N]: local features of each patch and the mean of global features, through a three-layer MLP."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        half = max(dim // 2, 1)
        self.features = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, 2 * half), nn.GELU())
        self.decide = nn.Sequential(
            nn.Linear(2 * half, half), nn.GELU(), nn.Linear(half, max(dim // 4, 1)), nn.GELU(), nn.Linear(max(dim // 4, 1), 2)
        )

    def forward(self, patches: Tensor) -> Tensor:
        local, whole = self.features(patches).chunk(2, dim=-1)
        both = torch.cat([local, whole.mean(1, keepdim=True).expand_as(whole)], dim=-1)
        drop, keep = self.decide(both).float().unbind(-1)
        return keep - drop


class _Pruner(LearnedSelector):
    """What both selectors share: the prediction module and the losses."""

    def __init__(self, dim: int, minimum: int = 16) -> None:
        super().__init__(minimum)
        self.predictor = Predictor(dim)

    @classmethod
    def settings(cls, config: TrainConfig) -> tuple[str, ...]:
        return ("losses.lesion",)

    def decisions(self, logits: Tensor, generator: torch.Generator | None) -> Tensor:
        """Decide which patches to keep, [B, N] of 0 or 1, by the straight-through Gumbel-softmax; no generator, no noise."""
        noisy = logits
        if generator is not None:
            pair = gumbel_noise((2, *logits.shape), generator).to(logits.device)
            # One Gumbel draw for keep and one for drop: a softmax over two is a sigmoid of their difference.
            noisy = logits + pair[0] - pair[1]
        soft = torch.sigmoid(noisy)
        return (noisy > 0).float() + (soft - soft.detach())

    @abstractmethod
    def pool(self, tokens: TokenBatch, mask: Tensor, logits: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return what heads read under the keep decisions: the mean [B, D], and the mask [B, N] for heads that read tokens."""

    def training_pass(
        self, tokens: TokenBatch, budget: float, config: TrainConfig, generator: torch.Generator | None = None, route: bool = True
    ) -> TrainingPass:
        """Give the mean under the keep decisions, the lesion loss and, when routing, the ratio loss `(mean(keep) - budget)^2`."""
        tokens = tokens.float()
        logits = self.predictor(tokens.patches)
        terms = {"lesion": lesion_term(logits, tokens, config.losses.lesion)}
        weights = {"lesion": config.losses.lesion, "ratio": RATIO_WEIGHT}
        if not route:
            return TrainingPass(None, terms, torch.sigmoid(logits), weights)
        mask = self.decisions(logits, generator)
        terms["ratio"] = (mask.mean(1) - self.count(budget, tokens.n) / tokens.n).square().mean()
        pooled, read = self.pool(tokens, mask, logits)
        return TrainingPass(pooled, terms, torch.sigmoid(logits), weights, read)


@register_selector("dynamicvit")
class DynamicViT(_Pruner, Ranker):
    """The K patches with the highest probability to be kept."""

    title = "DynamicViT"
    description = "A prediction module learns which patches to keep."
    color, marker = "#b5495b", "h"

    def score(self, tokens: TokenBatch, generator: torch.Generator | None = None) -> Tensor:
        return torch.sigmoid(self.predictor(tokens.patches.float()))

    def pool(self, tokens: TokenBatch, mask: Tensor, logits: Tensor) -> tuple[Tensor, Tensor | None]:
        # Decisions may drop every patch of an image, whose mean would be 0 / 0: its best patch counts then.
        mask = mask + F.one_hot(logits.argmax(1), logits.shape[1]) * (mask.detach().sum(1, keepdim=True) == 0)
        return masked_mean(tokens.patches, mask), mask


@register_selector("dynamicvit-package")
class DynamicViTPackage(_Pruner, Merger):
    """The K - 1 patches with the highest keep probability p, and the package token `sum(p_i x_i) / sum(p_i)` of the others."""

    title = "DynamicViT + package"
    description = "DynamicViT with the others in one package token."
    color, marker = "#b5495b", "p"

    def choose(self, tokens: TokenBatch, k: int, generator: torch.Generator | None = None) -> Selection:
        keep = torch.sigmoid(self.predictor(tokens.patches.float()))
        return with_rest(tokens.patches, rank(keep.detach())[:, : k - 1], keep.clamp_min(1e-12))

    def pool(self, tokens: TokenBatch, mask: Tensor, logits: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the mean of the kept patches and the package of the others; no tokens, whose number differs between images."""
        rest = (1 - mask) * torch.sigmoid(logits)
        package = rest / rest.sum(1, keepdim=True).clamp_min(1e-6)
        total = torch.bmm((mask + package).unsqueeze(1), tokens.patches).squeeze(1)
        return total / (mask.sum(1, keepdim=True) + 1), None
