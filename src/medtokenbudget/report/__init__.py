"""From the results of a run to tables, figures and one page; from a model to its card; from a prediction to a picture."""

from __future__ import annotations

import importlib
from typing import Any

_PUBLIC = {"report": "medtokenbudget.report.build"}
__all__ = ["report"]


def __getattr__(name: str) -> Any:
    # Imported on first use: the overlay of one picture must not load a plotting library.
    if name in _PUBLIC:
        return getattr(importlib.import_module(_PUBLIC[name]), name)
    raise AttributeError(f"module 'medtokenbudget.report' has no attribute '{name}'")
