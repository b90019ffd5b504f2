"""Heads with seeded weights, and kept tokens for them to read."""

from __future__ import annotations

from typing import Any

import torch

from medtokenbudget.heads import create_head
from medtokenbudget.routing import create_selector
from medtokenbudget.tokens import TokenSet
from tests.routing.batches import tokens_of


def head_of(name: str, classes: int = 3, **options: Any) -> Any:
    torch.manual_seed(0)
    return create_head(name, dim=32, classes=classes, **options).eval()


def kept_of(k: int = 20, batch: int = 3) -> TokenSet:
    tokens = tokens_of(batch)
    return TokenSet.of(create_selector("norm").select(tokens, k), tokens.grid)
