"""The loss of a training step: the head's classification term and the selector's own terms, weighted and summed."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional as F

from medtokenbudget.errors import ShapeError

_UNLABELED = -1


def classification_loss(logits: Tensor, label: Tensor, weights: Tensor | None = None) -> Tensor:
    """Cross-entropy of logits [B, C] and labels [B], with optional class weights [C]; images labelled -1 do not count."""
    if logits.ndim != 2 or label.shape != logits.shape[:1]:
        raise ShapeError(f"Logits must be [B, C] and label [B], got {list(logits.shape)} and {list(label.shape)}.")
    if not bool((label != _UNLABELED).any()):
        return logits.sum() * 0.0
    return F.cross_entropy(logits.float(), label, weight=weights, ignore_index=_UNLABELED)


def total_loss(terms: Mapping[str, Tensor], weights: Mapping[str, float]) -> Tensor:
    """Weighted sum of the terms; a term without a weight counts once."""
    return torch.stack([weights.get(name, 1.0) * term for name, term in terms.items()]).sum()
