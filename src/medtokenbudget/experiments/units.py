"""One unit of a sweep: one method with one seed, trained and evaluated at every budget on every validation set of the store.

A unit is idempotent: it writes its folder `units/METHOD-SEED` and says in `unit.json` that it is done, or why it failed.
"""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from safetensors.numpy import save_file

from medtokenbudget.config import TrainConfig, to_dict
from medtokenbudget.data import Manifest
from medtokenbudget.errors import MedTokenBudgetError
from medtokenbudget.experiments.results import write_predictions
from medtokenbudget.experiments.variants import Variant, variant
from medtokenbudget.features import FeatureStore
from medtokenbudget.files import append_line, read_json, sha256_json, write_json, write_safetensors
from medtokenbudget.routing import Selector, create
from medtokenbudget.training import checkpoints as ck
from medtokenbudget.training.head import RoutingHead
from medtokenbudget.training.heads import PooledHead, probabilities
from medtokenbudget.training.parts import Parts, make_parts
from medtokenbudget.training.pooling import Evidence, pool_and_judge, pool_to_file
from medtokenbudget.training.trainer import Trained, train_lats


@dataclass(frozen=True)
class Unit:
    """A method (with its variant) and a seed."""

    method: str
    seed: int

    @property
    def name(self) -> str:
        return f"{self.method.replace(':', '~')}-{self.seed}"


@dataclass(frozen=True)
class Plan:
    """What every unit of a run shares."""

    manifest: Path
    store: Path
    out: Path
    config: TrainConfig
    dataset: str

    def folder(self, unit: Unit) -> Path:
        return self.out / "units" / unit.name

    def identity(self, unit: Unit) -> str:
        """Hash of all that decides the unit's result."""
        config = to_dict(variant(unit.method, replace(self.config, seed=unit.seed)).config)
        config.pop("device")
        manifest, store = _sources(self.manifest, self.store)
        return sha256_json([config, unit.method, self.dataset, manifest, store])


@lru_cache
def _sources(manifest: Path, store: Path) -> tuple[str, str]:
    """Hashes of the manifest and of the store; read once, since every unit asks."""
    return Manifest.read(manifest).hash, FeatureStore.open(store).identity


def status(plan: Plan, unit: Unit) -> str:
    """'done', 'failed' or 'missing'; a unit of another configuration counts as missing."""
    path = plan.folder(unit) / "unit.json"
    if not path.exists():
        return "missing"
    state = read_json(path)
    return str(state["status"]) if state.get("identity") == plan.identity(unit) else "missing"


def run_unit(plan: Plan, unit: Unit, threads: int = 0) -> str:
    """Run one unit unless it is done; a failure is written down with its reason and does not stop the others."""
    if threads:
        torch.set_num_threads(threads)
    if status(plan, unit) == "done":
        return "done"
    folder = plan.folder(unit)
    state: dict[str, Any] = {"method": unit.method, "seed": unit.seed, "identity": plan.identity(unit)}
    try:
        _work(plan, unit, folder)
        state |= {"status": "done"}
    except MedTokenBudgetError as error:
        state |= {"status": "failed", "error": str(error)}
    except Exception as error:  # a third-party selector may raise anything; the other units go on
        state |= {"status": "failed", "error": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()}
    write_json(folder / "unit.json", state)
    return str(state["status"])


def _work(plan: Plan, unit: Unit, folder: Path) -> None:
    manifest, store = Manifest.read(plan.manifest), FeatureStore.open(plan.store)
    chosen = variant(unit.method, replace(plan.config, seed=unit.seed))
    selector: Selector
    if chosen.selector == "lats":
        trained = _trained_lats(plan, chosen, unit, manifest, store)
        selector, head, parts = trained.selector.toggle(chosen.signals), trained.head, trained.parts
    else:
        parts = make_parts(manifest, store, chosen.config)
        selector = create(chosen.selector, minimum=chosen.config.router.minimum)
        head = _train_baseline(plan, chosen, selector, parts, store, folder, len(manifest.classes))
    ck.save_tensors(folder / "head.safetensors", ck.module_tensors(head, "head."), {"method": unit.method})
    frames: list[pd.DataFrame] = []
    tensors: dict[str, np.ndarray] = {}
    ids: dict[str, list[str]] = {}
    for dataset, rows in evaluation_sets(plan.dataset, store, parts, selector).items():
        frame, found = _evaluate(dataset, rows, store, selector, head, chosen.config, manifest)
        frames.append(frame.assign(study="", method=unit.method, seed=unit.seed))
        tensors |= {f"{dataset}|{name}": value for name, value in found.items()}
        ids[dataset] = [store.ids[row] for row in rows]
    write_predictions(folder / "predictions.parquet", pd.concat(frames, ignore_index=True), manifest.classes)
    write_json(folder / "images.json", ids)
    write_safetensors(folder / "routing.safetensors", lambda target: save_file(tensors, target))


def _trained_lats(plan: Plan, chosen: Variant, unit: Unit, manifest: Manifest, store: FeatureStore) -> Trained:
    """Train in the folder of the method that owns the training; a finished checkpoint there is used as it is."""
    return train_lats(manifest, store, plan.folder(Unit(chosen.trained_as, unit.seed)), chosen.config)


def _train_baseline(
    plan: Plan, chosen: Variant, selector: Selector, parts: Parts, store: FeatureStore, folder: Path, classes: int
) -> RoutingHead:
    config, rows = chosen.config, parts.head
    if "has_mask" in selector.requires:
        rows = rows[store.has_mask.numpy()[rows]]
    label = store.label.numpy()[rows]
    trainer = PooledHead(store.dim, classes, config)
    if selector.stochastic:
        history = trainer.train_on_store(store, rows, label, selector, config.budgets)
    else:
        key = sha256_json([store.identity, chosen.selector, rows.tolist(), list(config.budgets), config.router.minimum])[:16]
        path = plan.out / "pooled" / f"{chosen.selector}-{key}.npy"
        history = trainer.train_on_file(pool_to_file(path, store, rows, selector, config.budgets), label)
    (folder / "metrics.jsonl").unlink(missing_ok=True)
    for row in history:
        append_line(folder / "metrics.jsonl", row)
    return trainer.head


def evaluation_sets(dataset: str, store: FeatureStore, parts: Parts, selector: Selector) -> dict[str, np.ndarray]:
    """Validation rows by data set name: the images as they are, and their off-center views where the store has them."""
    sets = {dataset: parts.validation, f"{dataset}@off-center": parts.off_center}
    if "has_mask" in selector.requires:
        sets = {name: rows[store.has_mask.numpy()[rows]] for name, rows in sets.items()}
    return {name: rows for name, rows in sets.items() if len(rows)}


@torch.no_grad()
def _evaluate(
    dataset: str,
    rows: np.ndarray,
    store: FeatureStore,
    selector: Selector,
    head: RoutingHead,
    config: TrainConfig,
    manifest: Manifest,
) -> tuple[pd.DataFrame, dict[str, np.ndarray]]:
    pooled, evidence = pool_and_judge(store, rows, selector, config.budgets, config.seed)
    frame = predictions_frame(dataset, rows, store, probabilities(head, pooled), evidence, config.budgets, manifest)
    tensors = {"lesion": store.lesion.numpy()[rows].astype(np.uint8), "has_mask": store.has_mask.numpy()[rows].astype(np.uint8)}
    if evidence.order is not None:
        tensors["order"] = evidence.order
    if evidence.scores is not None:
        tensors["scores"] = evidence.scores
    return frame, tensors


def predictions_frame(
    dataset: str,
    rows: np.ndarray,
    store: FeatureStore,
    probability: np.ndarray,
    evidence: Evidence,
    budgets: Sequence[float],
    manifest: Manifest,
) -> pd.DataFrame:
    """One row for each image and budget, in the columns of `predictions.parquet` less study, method and seed."""
    ids = [store.ids[row] for row in rows]
    groups = manifest.rows.set_index("image_id")["group"].reindex(ids).to_numpy()
    lesion = np.where(store.has_mask.numpy()[rows], store.lesion.numpy()[rows].sum(1).astype(float), np.nan)
    frames = []
    for index, budget in enumerate(budgets):
        frames.append(
            pd.DataFrame(
                {
                    "dataset": dataset,
                    "budget": budget,
                    "k": evidence.k[index],
                    "n_patches": store.n,
                    "image_id": ids,
                    "group": groups,
                    "label": store.label.numpy()[rows],
                    "predicted": probability[:, index].argmax(-1),
                    "probabilities": list(probability[:, index].astype(np.float32)),
                    "lesion": lesion,
                    "kept_lesion": evidence.kept_lesion[:, index],
                    "purity": evidence.purity[:, index],
                }
            )
        )
    return pd.concat(frames, ignore_index=True)
