"""The classifier that a finished unit left behind: its head, and the scorer of LATS from the checkpoint of its training."""

from __future__ import annotations

from medtokenbudget.experiments.run import RunInfo
from medtokenbudget.experiments.units import Unit
from medtokenbudget.routing import LATSSelector, Selector, create
from medtokenbudget.training import checkpoints as ck
from medtokenbudget.training.head import RoutedClassifier, RoutingHead


def load_unit(info: RunInfo, unit: Unit, dim: int) -> RoutedClassifier | None:
    """Selector and head of a finished unit; None for an ablation, which has no training of its own."""
    if unit.method.ablation is not None:
        return None
    folder = info.path / "units" / unit.name
    config = info.methods[str(unit.method)].train_config
    selector: Selector
    if unit.method.learned:
        tensors, _ = ck.load_tensors(folder / "checkpoint.safetensors")
        selector = LATSSelector.from_config(dim, config.lats, config.router)
        selector.scorer.load_state_dict(ck.split_prefix(tensors, "best/scorer."))
    else:
        selector = create(unit.method.selector, minimum=config.router.minimum)
    head = RoutingHead(dim, len(info.classes))
    head.load_state_dict(ck.split_prefix(ck.load_tensors(folder / "head.safetensors")[0], "head."))
    return RoutedClassifier(selector, head).eval()
