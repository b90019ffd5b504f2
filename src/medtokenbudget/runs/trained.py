"""The classifier that a finished unit left behind: its head, and a learned selector from the checkpoint of its training."""

from __future__ import annotations

from medtokenbudget.runs.run import RunInfo
from medtokenbudget.runs.units import Unit
from medtokenbudget.routing import LearnedSelector, Selector, create_selector, selector_class
from medtokenbudget.tensor_files import load_tensors
from medtokenbudget.training.trainer import split_prefix
from medtokenbudget.training.classifier import RoutedClassifier
from medtokenbudget.heads import create_head


def load_unit(info: RunInfo, unit: Unit, dim: int) -> RoutedClassifier | None:
    """Selector and head (none without class labels) of a finished unit; None for an ablation, which has no training of its own."""
    if unit.method.ablation is not None:
        return None
    folder, method = info.path / "units" / unit.name, info.methods[str(unit.method)]
    config, kind = method.train_config, selector_class(method.selector)
    selector: Selector
    if issubclass(kind, LearnedSelector):
        tensors, _ = load_tensors(folder / "checkpoint.safetensors")
        selector = kind.from_config(dim, config, len(info.classes))
        selector.load_state_dict(split_prefix(tensors, "best/selector."))
    else:
        selector = create_selector(method.selector, minimum=config.router.minimum, **unit.method.options)
    if not info.classes:
        return RoutedClassifier(selector, None).eval()
    head = create_head(method.head, dim, len(info.classes))
    head.load_state_dict(split_prefix(load_tensors(folder / "head.safetensors")[0], "head."))
    return RoutedClassifier(selector, head).eval()
