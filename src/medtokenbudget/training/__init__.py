"""Training: losses, curriculum, heads and the trainer."""

from __future__ import annotations

from medtokenbudget.heads import Head, LinearHead, MLPHead, create_head, list_heads, register_head
from medtokenbudget.routing.losses import classification_loss, total_loss
from medtokenbudget.training.classifier import RoutedClassifier
from medtokenbudget.training.curriculum import BudgetCurriculum

__all__ = [
    "BudgetCurriculum",
    "Head",
    "LinearHead",
    "MLPHead",
    "RoutedClassifier",
    "classification_loss",
    "create_head",
    "list_heads",
    "register_head",
    "total_loss",
]
