"""Heads by name: what turns the tokens that a selector kept into class logits."""

from __future__ import annotations

from medtokenbudget.heads.abmil import ABMIL
from medtokenbudget.heads.attentive_probe import AttentiveProbe
from medtokenbudget.heads.clam import CLAMMB, CLAMSB
from medtokenbudget.heads.head import ENTRY_POINT_GROUP, Head, TokenHead, create_head, list_heads, register_head
from medtokenbudget.heads.mlp import LinearHead, MLPHead
from medtokenbudget.heads.transmil import TransMIL

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
