"""Training: rows of a store, heads behind a fixed selector, and the trainer of learned selectors."""

from __future__ import annotations

from medtokenbudget.heads import MLPHead, create_head, list_heads
from medtokenbudget.routing.losses import classification_loss, total_loss
from medtokenbudget.training.classifier import RoutedClassifier

__all__ = [
    "MLPHead",
    "RoutedClassifier",
    "classification_loss",
    "create_head",
    "list_heads",
    "total_loss",
]
