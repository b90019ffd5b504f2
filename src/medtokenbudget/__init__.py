"""MedTokenBudget: lesion-preserving token routing for dermoscopic image classification.

The same verbs as the command line (`mtb.train`, `mtb.sweep`, `mtb.load`, ...); each is imported when it is first used, so that
`import medtokenbudget` stays light.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

_VERBS: dict[str, str] = {
    "demo": "medtokenbudget.api.demo",
    "extract": "medtokenbudget.features",
    "load": "medtokenbudget.model",
    "overlay": "medtokenbudget.model",
    "reproduce": "medtokenbudget.experiments",
    "sweep": "medtokenbudget.experiments",
    "train": "medtokenbudget.api.train",
}

__all__ = ["__version__", *_VERBS]


def __getattr__(name: str) -> Any:
    if name in _VERBS:
        return getattr(importlib.import_module(_VERBS[name]), name)
    raise AttributeError(f"module 'medtokenbudget' has no attribute '{name}'")


def __dir__() -> list[str]:
    return sorted(__all__)
