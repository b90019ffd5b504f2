"""Heads by name: what turns the tokens that a selector kept into class logits."""

from __future__ import annotations

from medtokenbudget.training.heads.head import Head
from medtokenbudget.training.heads.linear import LinearHead
from medtokenbudget.training.heads.mlp import MLPHead
from medtokenbudget.training.heads.registry import ENTRY_POINT_GROUP, create_head, list_heads, register_head

__all__ = ["ENTRY_POINT_GROUP", "Head", "LinearHead", "MLPHead", "create_head", "list_heads", "register_head"]
