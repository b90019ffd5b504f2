"""`Classifiers`: the routed classifiers of a model by method text, as one `nn.Module`.

Its own file because a method text such as `lats:fixed-0.5` may contain a dot, which the keys of `nn.ModuleDict` may not.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import cast

from torch import nn

from medtokenbudget.training.classifier import RoutedClassifier


class Classifiers(nn.Module, Mapping[str, RoutedClassifier]):
    """A read-only mapping from method text to classifier whose values are submodules.

    In state-dict keys `.` is written as `%2E` and `%` as `%25`; everything else in a method text stays as it is.
    """

    def __init__(self, classifiers: Mapping[str, RoutedClassifier]) -> None:
        super().__init__()
        # Not add_module: it rejects dots and the names of nn.Module's own methods.
        self._modules.update({_key(method): classifier for method, classifier in classifiers.items()})
        self._methods = tuple(classifiers)

    def __getitem__(self, method: str) -> RoutedClassifier:
        return cast(RoutedClassifier, self._modules[_key(method)])

    def __iter__(self) -> Iterator[str]:
        return iter(self._methods)

    def __len__(self) -> int:
        return len(self._methods)

    # A mapping compares by content and has no hash; a module is itself alone.
    __eq__ = object.__eq__
    __hash__ = object.__hash__


def _key(method: str) -> str:
    return method.replace("%", "%25").replace(".", "%2E")
