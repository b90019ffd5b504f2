"""Selectors by name: those of this package, and those of other packages through the entry-point group.

A plugin that cannot be loaded is named in a warning and left out; it never stops the others.
"""

from __future__ import annotations

import inspect
import sys
import warnings
from collections.abc import Callable
from importlib import metadata
from typing import Any, TypeVar

from medtokenbudget.errors import MedTokenBudgetWarning, RequestError, UnknownNameError
from medtokenbudget.routing.selector import Selector

ENTRY_POINT_GROUP = "medtokenbudget.selectors"

_SELECTORS: dict[str, type[Selector]] = {}
_seen_entry_points: set[tuple[str, str]] = set()
_scanned_path: list[str] = []

S = TypeVar("S", bound=type[Selector])


def register(name: str) -> Callable[[S], S]:
    """Class decorator: makes a selector known as `name` to every sweep, table, figure and test matrix."""

    def decorate(selector: S) -> S:
        if not (isinstance(selector, type) and issubclass(selector, Selector)):
            raise RequestError(f"selector '{name}' must be a subclass of medtokenbudget.routing.Selector, got {selector!r}.")
        taken = _SELECTORS.get(name)
        if taken is not None and (taken.__module__, taken.__qualname__) != (selector.__module__, selector.__qualname__):
            raise RequestError(f"selector '{name}' is already registered by {taken.__module__}.{taken.__qualname__}.")
        selector.name = name
        _SELECTORS[name] = selector
        return selector

    return decorate


def available() -> list[str]:
    """Names of all selectors, sorted."""
    _load_entry_points()
    return sorted(_SELECTORS)


def selector_class(name: str) -> type[Selector]:
    """The class registered as `name`."""
    if name not in _SELECTORS:
        _load_entry_points()
    if name not in _SELECTORS:
        raise UnknownNameError.of("selector", name, _SELECTORS)
    return _SELECTORS[name]


def create(name: str, **options: Any) -> Selector:
    """A selector by name. Options are those of its class; selectors that learn need `dim`, the embedding dimension."""
    selector = selector_class(name)
    try:
        inspect.signature(selector).bind(**options)
    except TypeError as error:
        raise RequestError(f"selector '{name}' cannot be made with {options}: {error}.") from None
    return selector(**options)


def _load_entry_points() -> None:
    if _scanned_path == sys.path:
        return
    _scanned_path[:] = sys.path
    for entry in metadata.entry_points(group=ENTRY_POINT_GROUP):
        if (entry.name, entry.value) in _seen_entry_points:
            continue
        _seen_entry_points.add((entry.name, entry.value))
        try:
            register(entry.name)(entry.load())
        except Exception as error:  # whatever another package's import may raise
            warnings.warn(
                f"selector '{entry.name}' of {entry.value} could not be loaded and is left out: {type(error).__name__}: {error}",
                MedTokenBudgetWarning,
                stacklevel=3,
            )
