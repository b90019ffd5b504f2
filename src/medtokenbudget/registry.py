"""Classes by name, for selectors and heads: from this package, and from other packages through an entry-point group.

A plug-in that fails to load is named in a warning and skipped; it never stops the others.
"""

from __future__ import annotations

import inspect
import sys
import warnings
from collections.abc import Callable
from importlib import metadata
from typing import Any, Generic, TypeVar, cast, get_type_hints

from medtokenbudget.config import check_values
from medtokenbudget.errors import MedTokenBudgetWarning, RequestError, UnknownNameError

T = TypeVar("T")
C = TypeVar("C", bound=type)


class Registry(Generic[T]):
    """Subclasses of `base` by name, which becomes their attribute `name`; `kind` ('selector', 'head') is for messages."""

    def __init__(self, kind: str, base: type[T], group: str) -> None:
        self.kind, self.base, self.group = kind, base, group
        self._classes: dict[str, type[T]] = {}
        self._seen: set[tuple[str, str]] = set()
        self._scanned: list[str] = []

    def register(self, name: str) -> Callable[[C], C]:
        """Return a class decorator that makes a class known as `name`."""

        def decorate(entry: C) -> C:
            what = f"{self.kind.capitalize()} '{name}'"
            if not (isinstance(entry, type) and issubclass(entry, self.base)):
                raise RequestError(f"{what} must be a subclass of {_full_name(self.base)}, got {entry!r}.")
            taken = self._classes.get(name)
            # A cell of a notebook that is run again defines the same class anew.
            if taken is not None and _full_name(taken) != _full_name(entry):
                raise RequestError(f"{what} is already registered by {_full_name(taken)}.")
            entry.name = name  # type: ignore[attr-defined]
            self._classes[name] = entry
            return cast(C, entry)

        return decorate

    def unregister(self, name: str) -> None:
        self._classes.pop(name, None)

    def names(self) -> list[str]:
        """Return all registered names, those of installed packages too, in alphabetical order."""
        self._load_entry_points()
        return sorted(self._classes)

    def get(self, name: str) -> type[T]:
        if name not in self._classes:
            self._load_entry_points()
        if name not in self._classes:
            raise UnknownNameError.of(self.kind, name, self._classes)
        return self._classes[name]

    def create(self, name: str, **options: Any) -> T:
        """Create an instance; its options must fit the annotations of the constructor, such as `Count`."""
        entry = self.get(name)
        try:
            # Bound first: a TypeError inside the constructor is a defect and must show its traceback.
            inspect.signature(entry).bind(**options)
        except TypeError as error:
            raise RequestError(f"{self.kind.capitalize()} '{name}' cannot be created with {options}: {error}.") from None
        try:
            hints = get_type_hints(entry.__init__, include_extras=True)
        except (NameError, AttributeError):  # another package may import the names of its annotations for type checkers only
            hints = {}
        check_values({option: (value, hints[option]) for option, value in options.items() if option in hints})
        return entry(**options)

    def options(self, instance: T, *given: str) -> dict[str, Any]:
        """Return the options, all but those `given`, with which `create` builds an instance again, as JSON values."""
        names = [name for name in inspect.signature(type(instance)).parameters if name not in given]
        if missing := [name for name in names if not hasattr(instance, name)]:
            raise RequestError(
                f"{self.kind.capitalize()} '{instance.name}' does not store its option(s) {', '.join(missing)}, so it "  # type: ignore[attr-defined]
                "cannot be saved. Keep each option as an attribute of the same name, or override options()."
            )
        values = {name: getattr(instance, name) for name in names}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}

    def _load_entry_points(self) -> None:
        # A notebook may add a folder with plug-ins later.
        if self._scanned == sys.path:
            return
        self._scanned[:] = sys.path
        for entry in metadata.entry_points(group=self.group):
            if (entry.name, entry.value) in self._seen:
                continue
            self._seen.add((entry.name, entry.value))
            try:
                self.register(entry.name)(entry.load())
            except Exception as error:  # another package's import may raise anything
                why = f"{type(error).__name__}: {error}"
                message = f"Skipping {self.kind} '{entry.name}' of {entry.value}, which failed to load: {why}"
                warnings.warn(message, MedTokenBudgetWarning, stacklevel=3)


def _full_name(entry: type) -> str:
    return f"{entry.__module__}.{entry.__qualname__}"
