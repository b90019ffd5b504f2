"""MedTokenBudget: lesion-preserving token routing for dermoscopic image classification.

The verbs of the command line (`mtb.extract`, `mtb.train`, `mtb.sweep`, `mtb.load`, ...) and the types they speak. Each name is
imported when it is first used, so that `import medtokenbudget` stays light.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from medtokenbudget.api import Run, calibrate, demo, evaluate, evaluate_kept, extract, report, reproduce, sweep, train
    from medtokenbudget.backbone import FeatureStore
    from medtokenbudget.config import TrainConfig, preset
    from medtokenbudget.data import Manifest
    from medtokenbudget.heads import create_head, list_heads, register_head
    from medtokenbudget.metrics import lesion_retention
    from medtokenbudget.model import EarlyRouting, MedTokenBudget, load, overlay, predict, route, unwrap, wrap
    from medtokenbudget.routing import create_selector, list_selectors, register_selector
    from medtokenbudget.tokens import Selection, TokenBatch

__version__ = "0.2.0"

__all__ = [
    "EarlyRouting",
    "FeatureStore",
    "Manifest",
    "MedTokenBudget",
    "Run",
    "Selection",
    "TokenBatch",
    "TrainConfig",
    "__version__",
    "calibrate",
    "create_head",
    "create_selector",
    "demo",
    "evaluate",
    "evaluate_kept",
    "extract",
    "lesion_retention",
    "list_heads",
    "list_selectors",
    "load",
    "overlay",
    "predict",
    "preset",
    "register_head",
    "register_selector",
    "report",
    "reproduce",
    "route",
    "sweep",
    "train",
    "unwrap",
    "wrap",
]

_MODULES: dict[str, tuple[str, ...]] = {
    "api": ("Run", "calibrate", "demo", "evaluate", "evaluate_kept", "extract", "report", "reproduce", "sweep", "train"),
    "config": ("TrainConfig", "preset"),
    "data": ("Manifest",),
    "backbone": ("FeatureStore",),
    "metrics": ("lesion_retention",),
    "model": ("EarlyRouting", "MedTokenBudget", "load", "overlay", "predict", "route", "unwrap", "wrap"),
    "routing": ("create_selector", "list_selectors", "register_selector"),
    "tokens": ("Selection", "TokenBatch"),
    "heads": ("create_head", "list_heads", "register_head"),
}
_HOMES = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(f"medtokenbudget.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'medtokenbudget' has no attribute '{name}'")


def __dir__() -> list[str]:
    return sorted(__all__)
