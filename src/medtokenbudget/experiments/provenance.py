"""`run.json`: what a run was made from (configuration, versions, seeds, hashes of data, weights and split), without a clock.

Every number of a report can be traced to it; two equal runs write equal bytes.
"""

from __future__ import annotations

import os
import platform
import shlex
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from medtokenbudget.config import to_dict
from medtokenbudget.data import Manifest
from medtokenbudget.experiments.variants import variant
from medtokenbudget.features import FeatureStore
from medtokenbudget.files import read_json, write_json

if TYPE_CHECKING:
    from medtokenbudget.experiments.sweep import Study
    from medtokenbudget.experiments.units import Plan, Unit

PACKAGES = ("medtokenbudget", "torch", "timm", "numpy", "pandas", "pyarrow", "scipy", "scikit-learn", "safetensors", "pillow")


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that a result depends on."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found


def write_run(plan: Plan, studies: Sequence[Study], manifest: Manifest, done: Sequence[Unit]) -> None:
    """Write `run.json` of a sweep or of a reproduction."""
    store = FeatureStore.open(plan.store)
    write_json(
        plan.out / "run.json",
        {
            "dataset": plan.dataset,
            "classes": list(manifest.classes),
            "manifest": os.path.relpath(plan.manifest, plan.out),
            "store": os.path.relpath(plan.store, plan.out),
            "config": to_dict(plan.config),
            "variants": {unit.method: to_dict(variant(unit.method, plan.config).config) for unit in done},
            "studies": [
                {"name": s.name, "methods": list(s.methods), "seeds": list(s.seeds), "budgets": list(s.budgets)} for s in studies
            ],
            "units": [unit.name for unit in done],
            "seeds": sorted({unit.seed for unit in done}),
            "versions": versions(),
            "hashes": {"manifest": manifest.hash, "split": manifest.split_hash, "store": store.identity},
            "backbone": store.config["backbone"],
            "counts": counts(manifest, store),
        },
    )


def note_command(run: Path, name: str, arguments: Sequence[str]) -> None:
    """Write down in `run.json` with which command the run was made, as it was typed."""
    write_json(run / "run.json", {**read_json(run / "run.json"), "command": shlex.join(["mtb", name, *arguments])})


def counts(manifest: Manifest, store: FeatureStore) -> dict[str, Any]:
    """Images, masks and classes of each part, and the lesion sizes of the validation masks: the supplement's two tables."""
    parts: dict[str, Any] = {}
    for part in ("train", "select", "val"):
        rows = store.rows(manifest.part(part).ids, strict=False)
        label, masked = store.label.numpy()[rows], store.has_mask.numpy()[rows]
        parts[part] = {
            "images": len(rows),
            "masks": int(masked.sum()),
            "classes": {name: int((label == index).sum()) for index, name in enumerate(manifest.classes)},
            "masked_classes": {name: int((label[masked] == index).sum()) for index, name in enumerate(manifest.classes)},
            "lesion_patches": store.lesion.numpy()[rows[masked]].sum(1).astype(int).tolist() if part == "val" else None,
        }
    return parts


def relative_to_run(run: Path, recorded: str) -> Path:
    """A path of `run.json` seen from anywhere."""
    return (Path(run) / recorded).resolve()
