"""Heads by name: those of this package, and those of other packages through the entry-point group."""

from __future__ import annotations

from medtokenbudget.heads.head import Head
from medtokenbudget.registry import Registry

ENTRY_POINT_GROUP = "medtokenbudget.heads"

HEADS: Registry[Head] = Registry("head", Head, ENTRY_POINT_GROUP)  # type: ignore[type-abstract]

register_head = HEADS.register
list_heads = HEADS.names
head_class = HEADS.get


def create_head(name: str, dim: int, classes: int, **options: object) -> Head:
    """Create a head by name.

    Args:
        name: One of `list_heads()`.
        dim: Embedding dimension of the tokens.
        classes: Number of classes.
        options: Further options of the head's class.

    Example:
        >>> create_head("linear", dim=384, classes=8)(torch.zeros(2, 384)).shape
        torch.Size([2, 8])
    """
    return HEADS.create(name, dim=dim, classes=classes, **options)
