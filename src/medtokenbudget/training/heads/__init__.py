"""Heads by name: what turns the tokens that a selector kept into class logits."""

from __future__ import annotations

from medtokenbudget.training.heads.abmil import ABMIL
from medtokenbudget.training.heads.attentive_probe import AttentiveProbe
from medtokenbudget.training.heads.clam import CLAMMB, CLAMSB
from medtokenbudget.training.heads.head import Head, TokenHead
from medtokenbudget.training.heads.linear import LinearHead
from medtokenbudget.training.heads.mlp import MLPHead
from medtokenbudget.training.heads.registry import ENTRY_POINT_GROUP, create_head, list_heads, register_head
from medtokenbudget.training.heads.transmil import TransMIL

__all__ = [
    "ABMIL",
    "CLAMMB",
    "CLAMSB",
    "ENTRY_POINT_GROUP",
    "AttentiveProbe",
    "Head",
    "LinearHead",
    "MLPHead",
    "TokenHead",
    "TransMIL",
    "create_head",
    "list_heads",
    "register_head",
]
