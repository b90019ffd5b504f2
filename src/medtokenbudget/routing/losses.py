"""The terms of the paper's objective, each a function of its own, and their weighted sum.

All are computed in fp32. The terms of the scorer see the raw scores, before smoothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext

import torch
from torch import Tensor
from torch.nn import functional as F

from medtokenbudget.config import LossWeights
from medtokenbudget.errors import MissingSignalError, ShapeError
from medtokenbudget.tokens import TokenBatch, check_axes

_MARGIN = 1e-7
_UNLABELED = -1


def classification_loss(logits: Tensor, label: Tensor, weights: Tensor | None = None) -> Tensor:
    """Compute the cross-entropy of logits [B, C] and labels [B], with class weights [C]; images labeled -1 do not count."""
    if logits.ndim != 2 or label.shape != logits.shape[:1]:
        raise ShapeError(f"Logits must be [B, C] and label [B], got {list(logits.shape)} and {list(label.shape)}.")
    # Zero, but with a graph: `backward` of a batch without labels must not fail.
    if not bool((label != _UNLABELED).any()):
        return logits.sum() * 0.0
    return F.cross_entropy(logits.float(), label, weight=weights, ignore_index=_UNLABELED)


def budget_deviation(k: int, n: int, budget: float) -> float:
    """Compute |K / N - budget|: what rounding and the minimum K add. A diagnostic without gradient."""
    return abs(k / n - float(budget))


def diversity_loss(scores: Tensor) -> Tensor:
    """Average max(0, cosine) over pairs of different images (Eq. 5), scores [B, N]; zero for a batch of one."""
    b, _ = check_axes("scores", "[B, N]", scores)
    if b < 2:
        return scores.sum() * 0.0
    with torch.autocast(scores.device.type, enabled=False):
        unit = F.normalize(scores.float(), dim=1)
        similarity = (unit @ unit.T).clamp_min(0)
    return (similarity.sum() - similarity.diagonal().sum()) / (b * (b - 1))


def lesion_loss(score_logits: Tensor, lesion: Tensor, has_mask: Tensor) -> Tensor:
    """Compute the binary cross-entropy of score logits and lesion patches, both [B, N] (Eq. 6), over the images with a mask [B]."""
    _check_agree("Scores", score_logits, lesion, has_mask)
    rows = has_mask.bool()
    if not bool(rows.any()):
        return score_logits.sum() * 0.0
    # From logits: the log of a sigmoid near 0 or 1 would lose its digits.
    return F.binary_cross_entropy_with_logits(score_logits[rows].float(), lesion[rows].float())


def lesion_mass_loss(attention: Tensor, lesion: Tensor, has_mask: Tensor) -> Tensor:
    """Average `-log(attention on lesion patches)`: the lesion loss of tokens that are mixtures of all patches.

    The attention [B, N] is the share of each patch in the mean of the tokens; images without a lesion patch do not count.
    """
    _check_agree("Attention", attention, lesion, has_mask)
    rows = has_mask.bool() & lesion.bool().any(1)
    if not bool(rows.any()):
        return attention.sum() * 0.0
    mass = (attention[rows].float() * lesion[rows].float()).sum(1)
    # Attention on the lesion may round to 0, whose log is -inf.
    return -mass.clamp_min(_MARGIN).log().mean()


def lesion_term(
    values: Tensor, tokens: TokenBatch, weight: float, loss: Callable[[Tensor, Tensor, Tensor], Tensor] = lesion_loss
) -> Tensor:
    """Compute a lesion loss of what it reads, [B, N], on a batch: zero without masks, without gradient if its weight is 0."""
    with _graph_if(weight):
        if tokens.lesion is None or tokens.has_mask is None:
            return values.sum() * 0.0
        return loss(values, tokens.lesion, tokens.has_mask)


def distillation_loss(scores: Tensor, cls_attention: Tensor) -> Tensor:
    """Compute the mean squared distance of scores [B, N] from the max-normalized class attention [B, N] (Eq. 7)."""
    if cls_attention.shape != check_axes("scores", "[B, N]", scores):
        raise ShapeError(f"Scores {list(scores.shape)} and cls_attention {list(cls_attention.shape)} must agree.")
    attention = cls_attention.float()
    # Attention that underflows to 0 everywhere is no NaN.
    teacher = attention / attention.amax(1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)
    return (scores.float() - teacher).square().mean()


def scorer_terms(
    scores: Tensor,
    *,
    score_logits: Tensor,
    k: int,
    budget: float,
    weights: LossWeights,
    lesion: Tensor | None = None,
    has_mask: Tensor | None = None,
    cls_attention: Tensor | None = None,
) -> dict[str, Tensor]:
    """Compute the terms of the paper's objective that depend on the scores alone, unweighted.

    Scores [B, N] are raw ones in [0, 1]; their logits make the lesion term numerically stable. A term whose weight is 0 is reported
    where its inputs are known, without gradient. Without masks the lesion term is zero.
    """
    terms = {"budget": scores.new_tensor(budget_deviation(k, scores.shape[1], budget))}
    with _graph_if(weights.diversity):
        terms["diversity"] = diversity_loss(scores)
    with _graph_if(weights.lesion):
        if lesion is None or has_mask is None:
            terms["lesion"] = scores.sum() * 0.0
        else:
            terms["lesion"] = lesion_loss(score_logits, lesion, has_mask)
    if cls_attention is not None:
        with _graph_if(weights.distillation):
            terms["distillation"] = distillation_loss(scores, cls_attention)
    elif weights.distillation:
        raise MissingSignalError(
            "The distillation loss needs the attention of a class token, which this store does not have. "
            "Set `losses.distillation=0` to train without it."
        )
    return terms


def total_loss(terms: Mapping[str, Tensor], weights: Mapping[str, float]) -> Tensor:
    """Sum the weighted terms; a term without a weight counts once."""
    return torch.stack([weights.get(name, 1.0) * term for name, term in terms.items()]).sum()


def _graph_if(weight: float) -> nullcontext[None] | torch.no_grad:
    return nullcontext() if weight else torch.no_grad()


def _check_agree(name: str, values: Tensor, lesion: Tensor, has_mask: Tensor) -> None:
    if lesion.shape != check_axes(name.lower(), "[B, N]", values) or has_mask.shape != values.shape[:1]:
        raise ShapeError(
            f"{name} {list(values.shape)}, lesion {list(lesion.shape)} and has_mask {list(has_mask.shape)} must agree on [B, N]."
        )
