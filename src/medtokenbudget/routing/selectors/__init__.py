"""The selectors, registered by name when this package is imported: one published method per file, one-line signals in `simple`.

Every file in this folder is imported, so a new method is one new file.
"""

from __future__ import annotations

import pkgutil
from importlib import import_module

from medtokenbudget.routing.selectors.context import ContextScorer, ContextSelector
from medtokenbudget.routing.selectors.lats import LATS, LATSSelector

__all__ = ["LATS", "ContextScorer", "ContextSelector", "LATSSelector"]

for _module in pkgutil.iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")
