"""One unit of a sweep: one method with one seed, trained and evaluated at every budget on every view of the validation images.

A unit is idempotent: it writes its folder `units/METHOD-SEED` and records in `unit.json` that it is done, or why it failed.
"""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from safetensors.numpy import save

from medtokenbudget.config import TrainConfig, to_dict
from medtokenbudget.data import Manifest
from medtokenbudget.errors import MedTokenBudgetError, RequestError
from medtokenbudget.runs.methods import DEFAULT_HEAD, Method
from medtokenbudget.runs.results import AS_IS, write_predictions
from medtokenbudget.runs.run import content_hash
from medtokenbudget.runs.sources import Sources, open_sources
from medtokenbudget.backbone import FeatureStore
from medtokenbudget.backbone.views import OFF_CENTER
from medtokenbudget.files import append_line, read_sealed, sha256_json, write_json, write_safetensors, write_sealed
from medtokenbudget.progress import say
from medtokenbudget.routing import Selector, create_selector
from medtokenbudget.tensor_files import save_tensors
from medtokenbudget.training.trainer import module_tensors
from medtokenbudget.heads import Head
from medtokenbudget.training.rows import Parts, make_parts
from medtokenbudget.training.pooled import OnEpoch, PooledHead, epoch_judge, probabilities, token_probabilities
from medtokenbudget.training.pooled import Evidence, pool_and_judge, pool_to_file
from medtokenbudget.training.trainer import train_selector

FILES = ("head.safetensors", "images.json", "predictions.parquet", "routing.safetensors")
"""What a finished unit leaves in its folder; `unit.json` has their hashes."""
OF_TRAINING = ("checkpoint.safetensors", "metrics.jsonl")
"""What it also leaves if it trained; `unit.json` has their hashes too."""
OF_IMAGES = ("lesion", "has_mask", "covered")
"""What `routing.safetensors` holds once for all methods; everything else is of one method."""


@dataclass(frozen=True)
class Unit:
    """A method and a seed."""

    method: Method
    seed: int

    @property
    def name(self) -> str:
        """Name of the unit's folder."""
        return f"{str(self.method).replace(':', '~')}-{self.seed}"

    @property
    def owner(self) -> Unit:
        """The unit whose training this one uses: itself, unless it is an ablation."""
        return Unit(self.method.trained_as, self.seed)

    @property
    def sibling(self) -> Unit:
        """The same method with the default head, where a selector that is trained without its head may be found."""
        return Unit(replace(self.method, head=DEFAULT_HEAD), self.seed)


@dataclass(frozen=True)
class Plan:
    """What every unit of a run shares."""

    manifest: Path
    store: Path
    out: Path
    config: TrainConfig
    dataset: str

    @property
    def sources(self) -> Sources:
        """The manifest and the store, opened once per process."""
        return open_sources(self.manifest, self.store)

    def folder(self, unit: Unit) -> Path:
        """Where the unit keeps its files."""
        return self.out / "units" / unit.name

    def unit_config(self, unit: Unit) -> TrainConfig:
        """The training settings of the unit."""
        return unit.method.config(replace(self.config, seed=unit.seed))

    def waits(self, unit: Unit) -> bool:
        """Whether the unit uses the training of another: an ablation, or a head behind a selector that is trained without one."""
        shares_selector = unit.method.learned and unit != unit.sibling and self.unit_config(unit).recipe != "joint"
        return unit != unit.owner or shares_selector

    def identity(self, unit: Unit, sources: Sources | None = None) -> str:
        """Hash of everything that decides the unit's result."""
        config = to_dict(self.unit_config(unit))
        config.pop("device")
        sources = sources or self.sources
        return sha256_json([config, str(unit.method), self.dataset, sources.manifest.hash, sources.store.identity])


def status(plan: Plan, unit: Unit) -> str:
    """'done', 'failed' or 'missing'; a unit of another configuration, or with a damaged file, counts as missing."""
    folder = plan.folder(unit)
    if not (folder / "unit.json").exists():
        return "missing"
    state = read_state(folder)
    if state.get("identity") != plan.identity(unit):
        return "missing"
    if state.get("status") == "done" and (damaged := _damaged(folder, state.get("files", {}))):
        say(f"{damaged} is missing or damaged; {unit.method} with seed {unit.seed} runs again.")
        return "missing"
    return str(state.get("status", "missing"))


def read_state(folder: Path) -> dict[str, Any]:
    """The content of `unit.json`; one that is damaged counts as empty, so that the unit runs again."""
    try:
        return read_sealed(folder / "unit.json", "")
    except RequestError:
        return {}


def _damaged(folder: Path, files: dict[str, str]) -> Path | None:
    """The first file that is not what the unit wrote."""
    for name in dict.fromkeys((*FILES, *files)):
        path = folder / name
        if not path.is_file() or content_hash(path) != files.get(name):
            return path
    return None


def run_unit(plan: Plan, unit: Unit, threads: int = 0, on_epoch: OnEpoch | None = None) -> str:
    """Run one unit unless it is done; a failure is recorded with its reason and does not stop the other units."""
    if threads:
        torch.set_num_threads(threads)
    if status(plan, unit) == "done":
        return "done"
    folder = plan.folder(unit)
    state: dict[str, Any] = {"method": str(unit.method), "seed": unit.seed, "identity": plan.identity(unit)}
    try:
        _work(plan, unit, folder, on_epoch)
        written = [folder / name for name in (*FILES, *OF_TRAINING) if name in FILES or (folder / name).is_file()]
        state |= {"status": "done", "files": {path.name: content_hash(path) for path in written}}
    except MedTokenBudgetError as error:
        state |= {"status": "failed", "error": str(error)}
    except MemoryError:
        state |= {"status": "failed", "error": "Out of memory. Run the same command again with fewer --jobs."}
    except Exception as error:  # a third-party selector may raise anything; the other units go on
        state |= {"status": "failed", "error": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()}
    write_sealed(folder / "unit.json", state)
    return str(state["status"])


def _work(plan: Plan, unit: Unit, folder: Path, on_epoch: OnEpoch | None) -> None:
    manifest, store, config = plan.sources.manifest, plan.sources.store, plan.unit_config(unit)
    selector: Selector
    if unit.method.learned:
        # An ablation trains in the folder of its owner; a finished checkpoint there is used as it is.
        names = (unit.method.selector, unit.method.head)
        sibling = plan.folder(unit.sibling)
        trained = train_selector(manifest, store, plan.folder(unit.owner), config, *names, on_epoch, sibling)
        selector, head, parts = trained.selector.ablate(unit.method.ablation), trained.head, trained.parts
    else:
        parts = make_parts(manifest, store, config)
        selector = create_selector(unit.method.selector, minimum=config.router.minimum, **unit.method.options)
        head = None
        if manifest.classes:
            judge = epoch_judge(store, parts.select, selector, config)
            pooled_head = PooledHead(unit.method.head, store.dim, len(manifest.classes), config, on_epoch, judge)
            head = _train_baseline(plan, pooled_head, selector, parts, store, folder)
    head_tensors = {} if head is None else module_tensors(head, "head.")
    save_tensors(folder / "head.safetensors", head_tensors, {"method": str(unit.method)})
    frames: list[pd.DataFrame] = []
    tensors: dict[str, np.ndarray] = {}
    ids: dict[str, list[str]] = {}
    for view, rows in evaluation_sets(store, parts, selector).items():
        frame, found = evaluate_rows(rows, store, selector, head, config.budgets, config.seed, manifest)
        frames.append(frame.assign(study="", dataset=plan.dataset, view=view, method=str(unit.method), seed=unit.seed))
        tensors |= {f"{view}|{name}": value for name, value in found.items()}
        ids[view] = [store.ids[row] for row in rows]
    write_predictions(folder / "predictions.parquet", pd.concat(frames, ignore_index=True), manifest.classes)
    write_json(folder / "images.json", ids)
    write_safetensors(folder / "routing.safetensors", save(tensors))


def _train_baseline(plan: Plan, trainer: PooledHead, selector: Selector, parts: Parts, store: FeatureStore, folder: Path) -> Head:
    config, rows = trainer.config, parts.head
    if "has_mask" in selector.requires:
        rows = rows[store.has_mask.numpy()[rows]]
    label = store.label.numpy()[rows]
    if selector.stochastic or trainer.head.reads == "tokens":
        history = trainer.train_on_store(store, rows, label, selector, config.budgets)
    else:
        key = sha256_json([store.identity, selector.name, selector.options(), rows.tolist(), list(config.budgets)])[:16]
        path = plan.out / "pooled" / f"{selector.name}-{key}.npy"
        history = trainer.train_on_file(pool_to_file(path, store, rows, selector, config.budgets), label)
    (folder / "metrics.jsonl").unlink(missing_ok=True)
    for row in history:
        append_line(folder / "metrics.jsonl", row)
    return trainer.head


def evaluation_sets(store: FeatureStore, parts: Parts, selector: Selector) -> dict[str, np.ndarray]:
    """Validation rows by view: the images as they are, and their off-center crops where the store has them."""
    sets = {AS_IS: parts.validation, OFF_CENTER: parts.off_center}
    if "has_mask" in selector.requires:
        sets = {name: rows[store.has_mask.numpy()[rows]] for name, rows in sets.items()}
    return {name: rows for name, rows in sets.items() if len(rows)}


@torch.no_grad()
def evaluate_rows(
    rows: np.ndarray,
    store: FeatureStore,
    selector: Selector,
    head: Head | None,
    budgets: Sequence[float],
    seed: int,
    manifest: Manifest,
) -> tuple[pd.DataFrame, dict[str, np.ndarray]]:
    """What a selector keeps of rows of a store at every budget and what a head reads from it, and its patch orders and scores."""
    pooled, evidence = pool_and_judge(store, rows, selector, budgets, seed)
    if head is None:
        found = np.zeros((len(rows), len(budgets), 0), np.float32)
    elif head.reads == "tokens":
        found = token_probabilities(head, store, rows, selector, budgets, seed)
    else:
        found = probabilities(head, pooled)
    frame = predictions_frame(rows, store, found, evidence, budgets, manifest)
    tensors = {name: getattr(store, name).numpy()[rows].astype(np.uint8) for name in OF_IMAGES}
    if evidence.order is not None:
        tensors["order"] = evidence.order
    if evidence.scores is not None:
        tensors["scores"] = evidence.scores
    return frame, tensors


def predictions_frame(
    rows: np.ndarray,
    store: FeatureStore,
    probability: np.ndarray,
    evidence: Evidence,
    budgets: Sequence[float],
    manifest: Manifest,
) -> pd.DataFrame:
    """One row per image and budget, with the columns of `predictions.parquet` that describe the image and its prediction.

    `probability` is [n, T, C]; without classes (C = 0) the predicted class is -1.
    """
    ids = [store.ids[row] for row in rows]
    groups = manifest.rows.set_index("image_id")["group"].reindex(ids).to_numpy()
    lesion = np.where(store.has_mask.numpy()[rows], store.lesion.numpy()[rows].sum(1).astype(float), np.nan)
    predicted = probability.argmax(-1) if probability.shape[-1] else np.full(probability.shape[:2], -1)
    frames = []
    for index, budget in enumerate(budgets):
        frames.append(
            pd.DataFrame(
                {
                    "budget": budget,
                    "k": evidence.k[index],
                    "n_patches": store.n,
                    "image_id": ids,
                    "group": groups,
                    "label": store.label.numpy()[rows],
                    "predicted": predicted[:, index],
                    "probabilities": list(probability[:, index].astype(np.float32)),
                    "lesion": lesion,
                    "kept_lesion": evidence.kept_lesion[:, index],
                    "purity": evidence.purity[:, index],
                    "lesion_dominated": evidence.dominated[:, index],
                    "lesion_mass": evidence.mass[:, index],
                }
            )
        )
    return pd.concat(frames, ignore_index=True)
