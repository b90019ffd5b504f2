"""The classifier that a finished unit left behind: its head, and the scorer of LATS from the checkpoint of its training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from medtokenbudget.config import train_config_from_dict
from medtokenbudget.experiments.units import Unit
from medtokenbudget.experiments.variants import TOGGLES
from medtokenbudget.routing import LATSSelector, Selector, create
from medtokenbudget.training import checkpoints as ck
from medtokenbudget.training.head import RoutedClassifier, RoutingHead


def load_unit(run: Path, unit: Unit, info: dict[str, Any], dim: int, classes: int) -> RoutedClassifier | None:
    """Selector and head of a unit of the run that `info` (its `run.json`) describes; None for a toggle, which has none."""
    selector_name, _, change = unit.method.partition(":")
    if change in TOGGLES:
        return None
    folder = run / "units" / unit.name
    config = train_config_from_dict(info["variants"][unit.method])
    selector: Selector
    if selector_name == "lats":
        tensors, _ = ck.load_tensors(folder / "checkpoint.safetensors")
        selector = LATSSelector.from_config(dim, config.lats, config.router)
        selector.scorer.load_state_dict(ck.split_prefix(tensors, "best/scorer."))
    else:
        selector = create(selector_name, minimum=config.router.minimum)
    head = RoutingHead(dim, classes)
    head.load_state_dict(ck.split_prefix(ck.load_tensors(folder / "head.safetensors")[0], "head."))
    return RoutedClassifier(selector, head).eval()
