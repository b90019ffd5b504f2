"""The model: backbone, routed classifiers, classes and preprocessing, saved and loaded as one, and its predictions."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from medtokenbudget.model.inference import ImageSource, Prediction, Routing, expand
from medtokenbudget.model.model import MedTokenBudget, load, predict, route
from medtokenbudget.model.overlays import overlay
from medtokenbudget.routing.conformal import Guarantee

if TYPE_CHECKING:
    from medtokenbudget.model.early import EarlyRouting
    from medtokenbudget.model.wrapping import unwrap, wrap

__all__ = [
    "EarlyRouting",
    "Guarantee",
    "ImageSource",
    "MedTokenBudget",
    "Prediction",
    "Routing",
    "expand",
    "load",
    "overlay",
    "predict",
    "route",
    "unwrap",
    "wrap",
]

_LATER = {"EarlyRouting": "early", "wrap": "wrapping", "unwrap": "wrapping"}
"""Imported when they are first used: most models run on all patches."""


def __getattr__(name: str) -> Any:
    if name in _LATER:
        return getattr(importlib.import_module(f"medtokenbudget.model.{_LATER[name]}"), name)
    raise AttributeError(f"module 'medtokenbudget.model' has no attribute '{name}'")
