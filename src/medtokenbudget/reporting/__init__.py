"""Tables, figures and one HTML page from the results of runs, and the model card of a saved model."""

from __future__ import annotations

import importlib
from typing import Any

_PUBLIC = {"report": "medtokenbudget.reporting.page"}
__all__ = ["report"]


def __getattr__(name: str) -> Any:
    # Imported on first use, so that the model card does not load a plotting library.
    if name in _PUBLIC:
        return getattr(importlib.import_module(_PUBLIC[name]), name)
    raise AttributeError(f"module 'medtokenbudget.reporting' has no attribute '{name}'")
