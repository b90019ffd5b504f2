"""Training: losses, curriculum, head."""

from __future__ import annotations

from medtokenbudget.training.curriculum import BudgetCurriculum
from medtokenbudget.training.head import RoutedClassifier, RoutedOutput, RoutingHead, masked_mean
from medtokenbudget.training.losses import (
    budget_deviation,
    classification_loss,
    distillation_loss,
    diversity_loss,
    lesion_loss,
    total_loss,
)

__all__ = [
    "BudgetCurriculum",
    "RoutedClassifier",
    "RoutedOutput",
    "RoutingHead",
    "budget_deviation",
    "classification_loss",
    "distillation_loss",
    "diversity_loss",
    "lesion_loss",
    "masked_mean",
    "total_loss",
]
