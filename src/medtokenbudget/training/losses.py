"""The five terms of the paper's objective, each a function of its own, and their weighted sum.

All are computed in fp32 and see the raw scores, before smoothing.
"""

from __future__ import annotations

from contextlib import nullcontext

import torch
from torch import Tensor
from torch.nn import functional as F

from medtokenbudget.config import LossWeights
from medtokenbudget.errors import MissingSignalError, ShapeError

_MARGIN = 1e-7
_UNLABELLED = -1


def classification_loss(logits: Tensor, label: Tensor, weights: Tensor | None = None) -> Tensor:
    """Cross-entropy of logits [B, C] and labels [B], with optional class weights [C]; images labelled -1 do not count."""
    if logits.ndim != 2 or label.shape != logits.shape[:1]:
        raise ShapeError(f"logits must be [B, C] and label [B], got {list(logits.shape)} and {list(label.shape)}.")
    if not bool((label != _UNLABELLED).any()):
        return logits.sum() * 0.0
    return F.cross_entropy(logits.float(), label, weight=weights, ignore_index=_UNLABELLED)


def budget_deviation(k: int, n: int, budget: float) -> float:
    """|K / N - budget|: what rounding and the minimum add. A diagnostic without gradient."""
    return abs(k / n - float(budget))


def diversity_loss(scores: Tensor) -> Tensor:
    """Mean of max(0, cosine) over pairs of different images (Eq. 5), scores [B, N]; zero for a batch of one."""
    b = _checked(scores).shape[0]
    if b < 2:
        return scores.sum() * 0.0
    with torch.autocast(scores.device.type, enabled=False):
        unit = F.normalize(scores.float(), dim=1)
        similarity = (unit @ unit.T).clamp_min(0)
    return (similarity.sum() - similarity.diagonal().sum()) / (b * (b - 1))


def lesion_loss(scores: Tensor, lesion: Tensor, has_mask: Tensor, from_logits: bool = False) -> Tensor:
    """Binary cross-entropy of scores [B, N] and lesion patches [B, N] (Eq. 6), over the patches of the images with a mask [B].

    from_logits  `scores` are logits, which is the stable way; scores in [0, 1] are held off 0 and 1
    """
    if lesion.shape != _checked(scores).shape or has_mask.shape != scores.shape[:1]:
        raise ShapeError(
            f"scores {list(scores.shape)}, lesion {list(lesion.shape)} and has_mask {list(has_mask.shape)} must agree on [B, N]."
        )
    rows = has_mask.bool()
    if not bool(rows.any()):
        return scores.sum() * 0.0
    predicted, target = scores[rows].float(), lesion[rows].float()
    if from_logits:
        return F.binary_cross_entropy_with_logits(predicted, target)
    predicted = predicted.clamp(_MARGIN, 1 - _MARGIN)
    return -(target * predicted.log() + (1 - target) * torch.log1p(-predicted)).mean()


def distillation_loss(scores: Tensor, cls_attention: Tensor) -> Tensor:
    """Mean squared distance of scores [B, N] from the max-normalised class attention [B, N] (Eq. 7)."""
    if cls_attention.shape != _checked(scores).shape:
        raise ShapeError(f"scores {list(scores.shape)} and cls_attention {list(cls_attention.shape)} must agree.")
    attention = cls_attention.float()
    teacher = attention / attention.amax(1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)
    return (scores.float() - teacher).square().mean()


def total_loss(
    logits: Tensor | None,
    scores: Tensor,
    *,
    k: int,
    budget: float,
    label: Tensor | None = None,
    lesion: Tensor | None = None,
    has_mask: Tensor | None = None,
    cls_attention: Tensor | None = None,
    score_logits: Tensor | None = None,
    weights: LossWeights | None = None,
    class_weights: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The paper's objective: the weighted sum, and each term on its own, detached.

    logits        [B, C] of the head, or None when the head is not trained; with `label` [B]
    scores        [B, N] raw scores; `score_logits` [B, N] where known makes the lesion term stable
    k, budget     kept patches and the budget that asked for them
    lesion        [B, N] with `has_mask` [B]; a batch without them has no masks, and its lesion term is zero
    class_weights [C] of the cross-entropy

    A term whose weight is 0 is reported where its inputs are there, and has no gradient.
    """
    weights = LossWeights() if weights is None else weights
    terms: dict[str, Tensor] = {}

    if logits is not None and label is not None:
        with _graph_if(weights.classification):
            terms["classification"] = classification_loss(logits, label, class_weights)
    elif weights.classification:
        raise MissingSignalError("the classification loss needs the head's logits and labels. Set its weight to 0 to do without.")
    terms["budget"] = scores.new_tensor(budget_deviation(k, scores.shape[1], budget))
    with _graph_if(weights.diversity):
        terms["diversity"] = diversity_loss(scores)
    with _graph_if(weights.lesion):
        if lesion is None or has_mask is None:
            terms["lesion"] = scores.sum() * 0.0
        elif score_logits is not None:
            terms["lesion"] = lesion_loss(score_logits, lesion, has_mask, from_logits=True)
        else:
            terms["lesion"] = lesion_loss(scores, lesion, has_mask)
    if cls_attention is not None:
        with _graph_if(weights.distillation):
            terms["distillation"] = distillation_loss(scores, cls_attention)
    elif weights.distillation:
        raise MissingSignalError(
            "the distillation loss needs cls_attention, which this batch does not carry. Set its weight to 0 to train without."
        )

    total = torch.stack([getattr(weights, name) * term for name, term in terms.items()]).sum()
    return total, {"total": total.detach()} | {name: term.detach() for name, term in terms.items()}


def _graph_if(weight: float) -> nullcontext[None] | torch.no_grad:
    return nullcontext() if weight else torch.no_grad()


def _checked(scores: Tensor) -> Tensor:
    if scores.ndim != 2:
        raise ShapeError(f"scores must be [B, N], got {list(scores.shape)}.")
    return scores
