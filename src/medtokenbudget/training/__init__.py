"""Training: rows of a store, heads behind a fixed selector, and the trainer of learned selectors."""

from __future__ import annotations

from medtokenbudget.heads import Head, LinearHead, MLPHead, create_head, list_heads, register_head
from medtokenbudget.routing.losses import classification_loss, total_loss
from medtokenbudget.training.classifier import RoutedClassifier

__all__ = [
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
