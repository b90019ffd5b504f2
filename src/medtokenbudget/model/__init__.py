"""The model: backbone, routed classifiers, classes and preprocessing, saved and loaded as one, and its predictions."""

from __future__ import annotations

from medtokenbudget.model.early import EarlyRouting
from medtokenbudget.model.guarantee import Guarantee
from medtokenbudget.model.inference import ImageSource, Prediction, Routing, expand
from medtokenbudget.model.model import MedTokenBudget, load, route
from medtokenbudget.model.overlays import overlay

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
    "route",
]
