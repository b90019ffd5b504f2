"""The model: backbone, routed classifiers, classes and preprocessing, saved and loaded as one, and its predictions."""

from __future__ import annotations

from medtokenbudget.model.drawing import overlay
from medtokenbudget.model.early import EarlyRouting
from medtokenbudget.model.guarantee import Guarantee
from medtokenbudget.model.prediction import Prediction, Routing
from medtokenbudget.model.routed import MedTokenBudget, load
from medtokenbudget.model.sources import Failure, Source, expand

__all__ = ["EarlyRouting", "Failure", "Guarantee", "MedTokenBudget", "Prediction", "Routing", "Source", "expand", "load", "overlay"]
