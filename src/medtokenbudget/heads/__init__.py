"""Heads by name: what turns the tokens that a selector kept into class logits. Every file in this folder is imported."""

from __future__ import annotations

import pkgutil
from importlib import import_module

from medtokenbudget.heads.head import Head, LinearHead, MLPHead, RoutedClassifier, TokenHead, create_head, list_heads, register_head

__all__ = [
    "Head",
    "LinearHead",
    "MLPHead",
    "RoutedClassifier",
    "TokenHead",
    "create_head",
    "list_heads",
    "register_head",
]

for _module in pkgutil.iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")
