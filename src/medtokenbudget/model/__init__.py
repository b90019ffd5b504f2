"""The model: backbone, routed classifiers, classes and preprocessing, saved and loaded as one, and its predictions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from medtokenbudget.model.guarantee import Guarantee
from medtokenbudget.model.inference import ImageSource, Prediction, Routing, expand
from medtokenbudget.model.model import MedTokenBudget, load, predict, route
from medtokenbudget.model.overlays import overlay

if TYPE_CHECKING:
    from medtokenbudget.model.early import EarlyRouting

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
]


def __getattr__(name: str) -> Any:
    if name == "EarlyRouting":  # imported when it is first used: most models are not routed early
        from medtokenbudget.model.early import EarlyRouting

        return EarlyRouting
    raise AttributeError(f"module 'medtokenbudget.model' has no attribute '{name}'")
