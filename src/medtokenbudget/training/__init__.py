"""Training: rows of a store, heads behind a fixed selector, and the trainer of learned selectors."""

from __future__ import annotations

from medtokenbudget.heads import MLPHead, create_head, list_heads
from medtokenbudget.heads.head import RoutedClassifier
from medtokenbudget.routing.losses import classification_loss, total_loss

__all__ = [
    "MLPHead",
    "RoutedClassifier",
    "classification_loss",
    "create_head",
    "list_heads",
    "total_loss",
]
