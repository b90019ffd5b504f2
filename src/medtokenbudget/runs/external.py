"""External validation: a saved model on images that it has never seen, beside the controls that a good result has to beat.

It writes the files of a run (`run.json`, `results.csv`, `predictions.parquet`, `routing.safetensors`), so that every report works
on it, and `attributes.parquet` with the stratum of each image.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from safetensors.numpy import save

from medtokenbudget.config import HEADLINE_BUDGETS, to_dict
from medtokenbudget.data import Manifest, decode_image, decode_mask
from medtokenbudget.data.appearance import measure
from medtokenbudget.errors import RequestError
from medtokenbudget.runs.calibration import patch_scores
from medtokenbudget.runs.held_out import HeldOut
from medtokenbudget.runs.methods import Method
from medtokenbudget.runs.results import AS_IS, summarize, write_predictions, write_results
from medtokenbudget.runs.run import ATTRIBUTES, MethodInfo, RunInfo, hashes, versions
from medtokenbudget.runs.run import counts as part_counts
from medtokenbudget.runs.units import OF_IMAGES, evaluate_rows
from medtokenbudget.backbone.views import OFF_CENTER
from medtokenbudget.files import atomic_write, write_safetensors
from medtokenbudget.model import MedTokenBudget
from medtokenbudget.progress import progress
from medtokenbudget.routing import Selector, create_selector
from medtokenbudget.routing.conformal import group_mean, lesion_kept
from medtokenbudget.heads import Head

STUDY = "evaluate"
CONTROLS = ("center", "darkness", "random", "oracle")
OWN_METRICS = ("retention", "retention_of_ceiling", "accuracy", "macro_f1", "balanced_accuracy", "ece")


@dataclass(frozen=True)
class Evaluation:
    """What is evaluated, and how.

    Attributes:
        model: The model.
        source: Where it was loaded from.
        images: The images, with labels in the classes of the model.
        original: The manifest with its own labels.
        manifest: Path of this manifest.
        budgets: Token budgets.
        selector: Method of the model; None means its main one.
        own: The model's own validation, rows of a results table; empty if it is not known.
        mapping: How classes of the data became classes of the model.
        seed: Seed of `random`.
    """

    model: MedTokenBudget
    source: str
    images: HeldOut
    original: Manifest
    manifest: Path
    budgets: Sequence[float] = HEADLINE_BUDGETS
    selector: str | None = None
    own: Sequence[Mapping[str, Any]] = ()
    mapping: Mapping[str, str | None] | None = None
    seed: int = 0

    @property
    def method(self) -> str:
        """The method that is evaluated."""
        return self.model.main if self.selector is None else self.selector


def run_evaluation(evaluation: Evaluation, out: Path) -> pd.DataFrame:
    """Evaluate a model and its controls, write the files of the run, and return the tidy results."""
    wrong = [budget for budget in evaluation.budgets if not 0 < budget <= 1]
    if wrong or not evaluation.budgets:
        raise RequestError(f"Budgets must lie in (0, 1], got {', '.join(map(str, wrong)) or 'none'}.")
    frames: list[pd.DataFrame] = []
    tensors: dict[str, np.ndarray] = {}
    views = _views(evaluation.images)
    methods = _methods(evaluation)
    for name, (selector, head) in methods.items():
        for view, rows in views.items():
            frame, found = _evaluate(evaluation, selector, head, rows)
            if frame is None:
                continue
            frames.append(frame.assign(study=STUDY, dataset=evaluation.original.name, view=view, method=name, seed=evaluation.seed))
            if len(frame) == len(rows) * len(evaluation.budgets):
                prefix = "" if view == AS_IS else f"{view}/"
                for key, value in found.items():
                    own = key in OF_IMAGES
                    tensors.setdefault(f"{prefix}{key}" if own else f"{prefix}{key}/{name}/{evaluation.seed}", value)
    classes = evaluation.images.manifest.classes
    predictions = pd.concat(frames, ignore_index=True)
    write_predictions(out / "predictions.parquet", predictions, classes)
    results = summarize(predictions, classes)
    write_results(out / "results.csv", results)
    ids = {view: [evaluation.images.store.ids[row] for row in rows] for view, rows in views.items()}
    about = {"routing": json.dumps({"image_ids": ids, "grid": list(evaluation.images.store.grid)})}
    write_safetensors(out / "routing.safetensors", save(tensors, about))
    attributes = image_attributes(evaluation.images, evaluation.original)
    with atomic_write(out / ATTRIBUTES) as temporary:
        attributes.to_parquet(temporary, index=False)
    _describe(evaluation, out, methods).write()
    return results


def _views(images: HeldOut) -> dict[str, np.ndarray]:
    sets = {AS_IS: images.rows, OFF_CENTER: images.off_center}
    return {name: rows for name, rows in sets.items() if len(rows)}


def _methods(evaluation: Evaluation) -> dict[str, tuple[Selector, Head | None]]:
    """The method and the controls, each with the head that the model has for it."""
    model, main = evaluation.model, model_classifier(evaluation)
    found: dict[str, tuple[Selector, Head | None]] = {evaluation.method: (main.selector, main.head)}
    for name in CONTROLS:
        if name in model.classifiers:
            found.setdefault(name, (model.classifiers[name].selector, model.classifiers[name].head))
        else:
            found.setdefault(name, (create_selector(name, minimum=main.selector.minimum), None))
    return found


def model_classifier(evaluation: Evaluation) -> Any:
    """The routed classifier that is evaluated."""
    return evaluation.model.classifier(evaluation.method)


def _evaluate(
    evaluation: Evaluation, selector: Selector, head: Head | None, rows: np.ndarray
) -> tuple[pd.DataFrame | None, dict[str, np.ndarray]]:
    store, manifest = evaluation.images.store, evaluation.images.manifest
    if "has_mask" in selector.requires:
        rows = rows[store.has_mask.numpy()[rows]]
    if any(name in ("luminance", "attention_entropy", "cls_attention") and not store.has(name) for name in selector.requires):
        return None, {}
    if not len(rows):
        return None, {}
    frame, tensors = evaluate_rows(rows, store, selector, head, evaluation.budgets, evaluation.seed, manifest)
    # Without a head nothing is classified, right or wrong.
    return (frame if head is not None else frame.assign(label=-1)), tensors


def image_attributes(images: HeldOut, original: Manifest) -> pd.DataFrame:
    """The strata of each image, one column per property, None where it was not measured; and the measured numbers."""
    place = {name: i for i, name in enumerate(images.manifest.ids)}
    label = dict(zip(original.ids, original.rows["label"]))

    def row(name: str) -> dict[str, Any]:
        index = place[name]
        path = images.manifest.mask_path(index)
        try:
            found = measure(decode_image(images.manifest.image_path(index)), None if path is None else decode_mask(path))
        except RequestError:
            return {"image_id": name, "class": label.get(name)}
        return {"image_id": name, "class": label.get(name), **found.strata(), **{f"_{k}": v for k, v in asdict(found).items()}}

    rows = []
    with (
        ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool,
        progress(total=len(images.ids), what="Measuring", unit="image") as bar,
    ):
        for found in pool.map(row, images.ids):
            rows.append(found)
            bar.update()
    return pd.DataFrame(rows)


def own_validation(run: Path | None, method: str, budgets: Sequence[float]) -> list[dict[str, Any]]:
    """What the model of a run reached on its own validation images, one row per budget; empty for a model without its run."""
    if run is None:
        return []
    results = RunInfo.read(run).results()
    results = results[(results["view"] == AS_IS) & (results["seed"] == results["seed"].min()) & (results["method"] == method)]
    own = [row for row in results.to_dict("records") if any(np.isclose(row["budget"], budget) for budget in budgets)]
    kept = ("budget", "n", "n_masked", *OWN_METRICS)
    return [{name: None if pd.isna(row.get(name)) else row[name] for name in kept} for row in own]


def kept_promises(evaluation: Evaluation) -> list[dict[str, Any]]:
    """What each guarantee of the method keeps on these images, beside its promise."""
    images, method = evaluation.images, evaluation.method
    guarantees = [one for one in evaluation.model.guarantees if one.selector == method]
    rows = images.rows[images.store.lesion.numpy()[images.rows].any(1)]
    if not guarantees or not len(rows):
        return []
    scores, lesion = patch_scores(images.store, rows, model_classifier(evaluation).selector), images.store.lesion.numpy()[rows]
    named = dict(zip(images.ids, images.groups))
    groups = [named[images.store.ids[row]] for row in rows]
    found = []
    for one in guarantees:
        counts = one.counts(scores)
        kept = lesion_kept(scores, lesion, counts)
        found.append(
            {
                "retention": one.retention,
                "coverage": one.coverage,
                "cap": one.cap,
                "kept": group_mean(kept, groups),
                "reached": group_mean(kept >= one.retention - 1e-9, groups),
                "tokens": group_mean(counts, groups),
                "own_tokens": one.tokens,
                "n": len(rows),
                "groups": len(set(groups)),
            }
        )
    return found


def _describe(evaluation: Evaluation, out: Path, methods: Mapping[str, tuple[Selector, Head | None]]) -> RunInfo:
    model, images = evaluation.model, evaluation.images
    infos = {}
    for name, (selector, head) in methods.items():
        variant = Method.parse(name).variant if name == evaluation.method else ""
        settings = to_dict(model.train_config) if selector.learns else {}
        infos[name] = MethodInfo(selector.name, "none" if head is None else head.name, variant, selector.learns, settings)
    return RunInfo(
        path=out,
        dataset=evaluation.original.name,
        source=evaluation.original.source.split()[0],
        classes=images.manifest.classes,
        manifest=os.path.relpath(evaluation.manifest, out),
        store=os.path.relpath(images.store.path.resolve(), out.resolve()),
        config=to_dict(model.train_config),
        methods=infos,
        main=evaluation.method,
        studies=(
            {
                "name": STUDY,
                "methods": list(methods),
                "seeds": [evaluation.seed],
                "budgets": [float(b) for b in evaluation.budgets],
            },
        ),
        units=(),
        seeds=(evaluation.seed,),
        versions=versions(),
        hashes={"manifest": evaluation.original.hash, "store": images.store.identity, "model": model.fingerprint},
        backbone=images.store.config["backbone"],
        counts=part_counts(images.manifest, images.store),
        files=hashes(out),
        evaluation={
            "model": os.path.relpath(evaluation.source, out) if Path(evaluation.source).exists() else evaluation.source,
            "part": images.part,
            "images": len(images.manifest),
            "unreadable": len(images.manifest) - len(images.rows),
            "mapping": None if evaluation.mapping is None else dict(evaluation.mapping),
            "own": [dict(row) for row in evaluation.own],
            "guarantees": kept_promises(evaluation),
        },
    )
