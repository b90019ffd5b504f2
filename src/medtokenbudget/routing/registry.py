"""Selectors by name: those of this package, and those of other packages through the entry-point group."""

from __future__ import annotations

from typing import Any

from medtokenbudget.registry import Registry
from medtokenbudget.routing.selector import Selector

ENTRY_POINT_GROUP = "medtokenbudget.selectors"

SELECTORS: Registry[Selector] = Registry("selector", Selector, ENTRY_POINT_GROUP)  # type: ignore[type-abstract]

register_selector = SELECTORS.register
list_selectors = SELECTORS.names
selector_class = SELECTORS.get


def create_selector(name: str, **options: Any) -> Selector:
    """Create a selector by name.

    Args:
        name: One of `list_selectors()`.
        options: Options of the selector's class; selectors that learn need `dim`, the embedding dimension.

    Example:
        >>> create_selector("center").count(0.3, 256)
        76
    """
    return SELECTORS.create(name, **options)
