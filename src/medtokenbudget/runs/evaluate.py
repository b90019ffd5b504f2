"""Evaluation: a selector and a head on rows of a store, and a saved model on images that it has never seen.

The evaluation of a saved model stands beside the controls that a good result has to beat. It writes the files of a run, so that
every report works on it, and `attributes.parquet` with the stratum of each image. Its images (`HeldOut`) also calibrate a
guarantee.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd
import torch

from medtokenbudget.backbone import FeatureStore, extract
from medtokenbudget.backbone.annotations import hashes_of, known_manifests
from medtokenbudget.backbone.views import IDENTITY, OFF_CENTER
from medtokenbudget.config import CONTROLS, HEADLINE_BUDGETS, ExtractConfig, to_dict
from medtokenbudget.data import Manifest, decode_image, decode_mask
from medtokenbudget.data.manifest import listed
from medtokenbudget.data.strata import measure
from medtokenbudget.errors import MismatchError, RequestError
from medtokenbudget.files import atomic_write, read_json
from medtokenbudget.heads import Head
from medtokenbudget.model import Guarantee, MedTokenBudget
from medtokenbudget.model.inference import evaluating
from medtokenbudget.model.model import comparable
from medtokenbudget.progress import progress, say
from medtokenbudget.routing import Ranker, Selector, create_selector
from medtokenbudget.routing.conformal import Promise, group_mean, kept_counts, lesion_kept, pick_threshold
from medtokenbudget.runs.method import Method
from medtokenbudget.runs.run import AS_IS, ATTRIBUTES, FILE, OF_IMAGES, MethodInfo, RunInfo, routing_name, write_tables
from medtokenbudget.training.pooled import BATCH, pool_and_judge, probabilities, token_probabilities

Part = Literal["auto", "val", "select", "train", "all"]
STUDY = "evaluate"
_OPTIONAL_SIGNALS = ("luminance", "attention_entropy", "cls_attention")
"""A control that reads one of these is left out where the store does not have it."""
OWN_METRICS = ("retention", "retention_of_ceiling", "accuracy", "macro_f1", "balanced_accuracy", "ece")


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
    """Evaluate a selector and a head on rows of a store at every budget.

    Returns:
        One row per image and budget with the columns of `predictions.parquet` that describe the image and its prediction (class
        -1 without a head), and the patch orders and scores of the selector with the lesion patches of the images.
    """
    pooled, evidence = pool_and_judge(store, rows, selector, budgets, seed)
    if head is None:
        probability = np.zeros((len(rows), len(budgets), 0), np.float32)
    elif head.reads == "tokens":
        probability = token_probabilities(head, store, rows, selector, budgets, seed)
    else:
        probability = probabilities(head, pooled)
    predicted = probability.argmax(-1) if head is not None else np.full(probability.shape[:2], -1)
    ids = [store.ids[row] for row in rows]
    groups = manifest.rows.set_index("image_id")["group"].reindex(ids).to_numpy()
    lesion = np.where(store.has_mask.numpy()[rows], store.lesion.numpy()[rows].sum(1).astype(float), np.nan)
    frames = [
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
        for index, budget in enumerate(budgets)
    ]
    routing = {name: getattr(store, name).numpy()[rows].astype(np.uint8) for name in OF_IMAGES}
    routing |= {name: value for name in ("order", "scores") if (value := getattr(evidence, name)) is not None}
    return pd.concat(frames, ignore_index=True), routing


# Images that a model has not seen -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class HeldOut:
    """Images with their tokens.

    Attributes:
        manifest: The images that were asked for.
        store: Their tokens, opened with this manifest.
        rows: Rows of the original images; an image that could not be read has none.
        off_center: Rows of their off-center crops, where the store has them.
        part: The part of the manifest that they are.
    """

    manifest: Manifest
    store: FeatureStore
    rows: np.ndarray
    off_center: np.ndarray
    part: str

    @property
    def ids(self) -> list[str]:
        """Return the image of each row."""
        return [self.store.ids[row] for row in self.rows]

    @property
    def groups(self) -> list[str]:
        """Return the group of each row; an image without one is a group of its own."""
        return self.groups_of(self.rows)

    def groups_of(self, rows: np.ndarray) -> list[str]:
        """Return the groups of some of the rows."""
        known = dict(zip(self.manifest.ids, self.manifest.groups))
        return [known[self.store.ids[row]] for row in rows]


def held_out(
    model: MedTokenBudget,
    manifest: Manifest | Path | str,
    store: FeatureStore | Path | str | None,
    tokens: Path,
    part: Part = "auto",
    run: Path | None = None,
    identity: str | None = None,
) -> HeldOut:
    """Open the images of a manifest for a model.

    Args:
        model: The model.
        manifest: The images.
        store: Their tokens; None extracts them with the model's backbone into `tokens`.
        tokens: Folder of the store that is filled then.
        part: Which images. 'auto' takes the validation images of the manifest that the model was trained with, and all images of
            any other manifest.
        run: The run directory that the model is in, if it is in one; its training images are refused.
        identity: Hash of the manifest as it was written, if `manifest` has other labels than that.

    Raises:
        RequestError: The images cannot be used, or the model was trained on some of them.
        MismatchError: The store is of another backbone.
    """
    opened = manifest if isinstance(manifest, Manifest) else Manifest.read(manifest)
    if part == "auto":
        trained_with = model.info.get("run", {}).get("hashes", {}).get("manifest")
        part = "val" if trained_with == (identity or opened.hash) else "all"
    wanted = opened if part == "all" else opened.part(part)
    if not len(wanted):
        raise RequestError(f"The manifest has no images in the part '{part}'. Choose another one with --part, or --part all.")
    if store is None:
        opened_store = extract(wanted, tokens, model.backbone_config, ExtractConfig(device=str(model.device)))
    else:
        opened_store = store if isinstance(store, FeatureStore) else FeatureStore.open(store)
    _check_backbone(model, opened_store)
    if store is not None:
        opened_store = opened_store.annotated(wanted)
    rows = opened_store.rows(wanted.ids, strict=False)
    if not len(rows):
        opened_store.rows(wanted.ids)  # says which images are missing, and why
    if left_out := {error.image_id: error.reason for error in opened_store.errors if error.view == IDENTITY}:
        reason = next(iter(left_out.values()))
        say(f"{len(left_out):,} of {len(wanted):,} images are left out, they or their masks cannot be used. The first: {reason}")
    _check_unseen(opened_store, {opened_store.ids[row] for row in rows}, run)
    return HeldOut(wanted, opened_store, rows, opened_store.rows(wanted.ids, view=OFF_CENTER, strict=False), part)


def run_of(folder: Path) -> Path | None:
    """Return the run directory of a model folder, if it is in one."""
    return folder.parent if folder.name == "model" and (folder.parent / FILE).is_file() else None


def _check_backbone(model: MedTokenBudget, store: FeatureStore) -> None:
    expected, stored = comparable(model.backbone_fingerprint), comparable(store.config["backbone"])
    if expected != stored:
        raise MismatchError.between(
            f"The store {store.path}",
            expected,
            stored,
            "The model reads tokens of its own backbone and grid: leave out --store to extract them, or pass a store of it.",
        )
    if store.config["keep"] != "patches":
        raise RequestError(f"Store {store.path} contains only routed tokens, but the model reads all patches. Leave out --store.")


def _check_unseen(store: FeatureStore, names: set[str], run: Path | None) -> None:
    """Reject images that the model was trained on, recognized by their content; a run that is out of reach cannot be asked."""
    trained = None if run is None else _trained_on(run)
    if not trained or store.annotation is None:
        return
    seen = sorted(name for name in names if store.annotation.images.get(name) in trained)
    if seen:
        raise RequestError(
            f"The model was trained on {len(seen)} of the {len(names)} images: {listed(seen)}. Results on them would say nothing "
            "about new images. Use other images, or --part val."
        )


def _trained_on(run: Path) -> set[str]:
    """Return the SHA-256 of the image files that the model of a run was trained on; none if manifest or store are out of reach."""
    info = RunInfo.read(run)
    try:
        manifest = Manifest.read(info.manifest_path)
    except RequestError:
        return set()
    if not info.store_path.is_dir():
        return set()
    cached = [one["images"] for one in known_manifests(info.store_path)[0] if one["hash"] == info.hashes.get("manifest")]
    # From the files themselves where they are here: a cache that is damaged or gone must not open the door to training images.
    images = dict(zip(manifest.ids, hashes_of(info.store_path, manifest, cached[0] if cached else None)[0]))
    ids = [name for part in ("train", "select") for name in manifest.part(part).ids]
    return {image for name in ids if (image := images[name]) is not None}


# Classes of other data ------------------------------------------------------------------------------------------------


def read_mapping(path: Path | str) -> dict[str, str | None]:
    """Read a mapping file: a JSON object from a class of the data to a class of the model, or null to leave the class out."""
    values: Any = read_json(Path(path))
    if not isinstance(values, dict) or not all(value is None or isinstance(value, str) for value in values.values()):
        raise RequestError(f'{path} must be a JSON object from class names to class names or null, such as {{"nevus": "NV"}}.')
    return values


def in_classes_of(manifest: Manifest, classes: Sequence[str], mapping: Mapping[str, str | None] | None = None) -> Manifest:
    """Translate the labels of a manifest into the classes of a model.

    Args:
        manifest: The images, with labels of their own or without.
        classes: Classes of the model; empty for a router without a head, for which labels do not matter.
        mapping: Class of the data to class of the model, None to leave its images out of the classification.

    Returns:
        The same images with labels in `classes`; an image that is left out has none.

    Raises:
        RequestError: A label has no counterpart, the mapping names classes that do not exist, or the model has none.
    """
    labels = manifest.rows["label"]
    given = dict(mapping or {})
    if not classes:
        if given:
            raise RequestError("The model is a router without classes, so there is nothing to map them to. Leave out --classes.")
        return manifest.without_labels()
    strangers = [name for name in given if name not in manifest.classes]
    if strangers:
        raise RequestError(
            f"The mapping names {listed(strangers)}, but the classes of the data are {', '.join(manifest.classes) or 'none'}."
        )
    targets = sorted({name for name in given.values() if name is not None and name not in classes})
    if targets:
        raise RequestError(f"The mapping leads to {listed(targets)}, but the classes of the model are {', '.join(classes)}.")
    present = dict.fromkeys(label for label in labels if label is not None)
    unknown = [name for name in present if name not in given and name not in classes]
    if unknown:
        example = ", ".join(f'"{name}": null' for name in unknown[:3])
        raise RequestError(
            f"The model does not know these classes of the data: {listed(unknown)}. It knows {', '.join(classes)}. Write a "
            f"JSON file that maps each of them to a class of the model, or to null to leave it out, "
            f"such as {{{example}}}, for --classes FILE."
        )
    translated = [None if label is None else given.get(label, label) for label in labels]
    return replace(manifest, rows=manifest.rows.assign(label=pd.Series(translated, dtype=object)), classes=tuple(classes))


# The evaluation of a saved model --------------------------------------------------------------------------------------


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
        """Return the method that is evaluated."""
        return self.model.main if self.selector is None else self.selector

    def classifiers(self) -> dict[str, tuple[Selector, Head | None]]:
        """Return the method and the controls, each with the head that the model has for it."""
        main = self.model.classifier(self.method)
        pairs: dict[str, tuple[Selector, Head | None]] = {self.method: (main.selector, main.head)}
        for name in CONTROLS:
            if name in self.model.classifiers:
                pairs.setdefault(name, (self.model.classifiers[name].selector, self.model.classifiers[name].head))
            else:
                pairs.setdefault(name, (create_selector(name, minimum=main.selector.minimum), None))
        return pairs


def run_evaluation(evaluation: Evaluation, out: Path) -> pd.DataFrame:
    """Evaluate a model and its controls, write the files of the run, and return the tidy results."""
    wrong = [budget for budget in evaluation.budgets if not 0 < budget <= 1]
    if wrong or not evaluation.budgets:
        raise RequestError(f"Budgets must lie in (0, 1], got {', '.join(map(str, wrong)) or 'none'}.")
    images, seed = evaluation.images, evaluation.seed
    store, manifest = images.store, images.manifest
    views = {view: rows for view, rows in ((AS_IS, images.rows), (OFF_CENTER, images.off_center)) if len(rows)}
    classifiers = evaluation.classifiers()
    frames: list[pd.DataFrame] = []
    routing: dict[str, np.ndarray] = {}
    for name, (selector, head) in classifiers.items():
        if any(signal in _OPTIONAL_SIGNALS and not store.has(signal) for signal in selector.requires):
            continue
        for view, all_rows in views.items():
            rows = all_rows[store.has_mask.numpy()[all_rows]] if "has_mask" in selector.requires else all_rows
            if not len(rows):
                continue
            frame, tensors = evaluate_rows(rows, store, selector, head, evaluation.budgets, seed, manifest)
            if head is None:
                frame = frame.assign(label=-1)  # nothing is classified, right or wrong
            frames.append(frame.assign(study=STUDY, dataset=manifest.name, view=view, method=name, seed=seed))
            if len(rows) == len(all_rows):
                for key, value in tensors.items():
                    routing.setdefault(routing_name(view, key, name, seed), value)
    ids = {view: [store.ids[row] for row in rows] for view, rows in views.items()}
    results = write_tables(out, pd.concat(frames, ignore_index=True), manifest.classes, routing, ids, store.grid)
    attributes = _image_attributes(images, evaluation.original)
    with atomic_write(out / ATTRIBUTES) as temporary:
        attributes.to_parquet(temporary, index=False)
    _describe(evaluation, out, classifiers).write()
    return results


def _image_attributes(images: HeldOut, original: Manifest) -> pd.DataFrame:
    """Return the strata of each image, one column per property, None where it was not measured; and the measured numbers."""
    place = {name: i for i, name in enumerate(images.manifest.ids)}
    label = dict(zip(original.ids, original.rows["label"]))

    def row(name: str) -> dict[str, Any]:
        known = {"image_id": name, "class": label.get(name)}
        mask = images.manifest.mask_path(place[name])
        try:
            look = measure(decode_image(images.manifest.image_path(place[name])), None if mask is None else decode_mask(mask))
        except RequestError:
            return known
        return {**known, **look.strata(), **{f"_{key}": value for key, value in asdict(look).items()}}

    rows = []
    with (
        ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool,
        progress(total=len(images.ids), what="Measuring", unit="image") as bar,
    ):
        for measured in pool.map(row, images.ids):
            rows.append(measured)
            bar.update()
    return pd.DataFrame(rows)


def own_validation(run: Path | None, method: str, budgets: Sequence[float]) -> list[dict[str, Any]]:
    """Return what the model of a run reached on its own validation images by budget; nothing for a model without its run."""
    if run is None:
        return []
    results = RunInfo.read(run).results()
    results = results[(results["view"] == AS_IS) & (results["seed"] == results["seed"].min()) & (results["method"] == method)]
    own = [row for row in results.to_dict("records") if any(np.isclose(row["budget"], budget) for budget in budgets)]
    kept = ("budget", "n", "n_masked", *OWN_METRICS)
    return [{name: None if pd.isna(row.get(name)) else row[name] for name in kept} for row in own]


def _kept_promises(evaluation: Evaluation) -> list[dict[str, Any]]:
    """Measure what each guarantee of the method keeps on these images, beside its promise."""
    images, method = evaluation.images, evaluation.method
    guarantees = [one for one in evaluation.model.guarantees if one.selector == method]
    rows = images.rows[images.store.lesion.numpy()[images.rows].any(1)]
    if not guarantees or not len(rows):
        return []
    scores = patch_scores(images.store, rows, evaluation.model.classifier(method).selector)
    lesion, groups = images.store.lesion.numpy()[rows], images.groups_of(rows)
    measured = []
    for one in guarantees:
        counts = one.counts(scores)
        kept = lesion_kept(scores, lesion, counts)
        measured.append(
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
    return measured


def _describe(evaluation: Evaluation, out: Path, classifiers: Mapping[str, tuple[Selector, Head | None]]) -> RunInfo:
    model, images, seed = evaluation.model, evaluation.images, evaluation.seed
    methods = {}
    for name, (selector, head) in classifiers.items():
        variant = Method.parse(name).variant if name == evaluation.method else ""
        settings = to_dict(model.train_config) if selector.learns else {}
        methods[name] = MethodInfo(selector.name, "none" if head is None else head.name, variant, selector.learns, settings)
    budgets = [float(budget) for budget in evaluation.budgets]
    return RunInfo.of(
        out,
        images.manifest,
        evaluation.manifest,
        images.store,
        config=to_dict(model.train_config),
        methods=methods,
        main=evaluation.method,
        studies=({"name": STUDY, "methods": list(methods), "seeds": [seed], "budgets": budgets},),
        units=(),
        seeds=(seed,),
        hashes={"manifest": evaluation.original.hash, "store": images.store.identity, "model": model.fingerprint},
        evaluation={
            "model": os.path.relpath(evaluation.source, out) if Path(evaluation.source).exists() else evaluation.source,
            "part": images.part,
            "images": len(images.manifest),
            "unreadable": len(images.manifest) - len(images.rows),
            "mapping": None if evaluation.mapping is None else dict(evaluation.mapping),
            "own": [dict(row) for row in evaluation.own],
            "guarantees": _kept_promises(evaluation),
        },
    )


# Calibration ----------------------------------------------------------------------------------------------------------


@torch.no_grad()
def patch_scores(store: FeatureStore, rows: np.ndarray, selector: Selector) -> np.ndarray:
    """Compute the scores `[n, N]` that a selector ranks the patches of rows by.

    Raises:
        RequestError: It does not rank patches by a score that depends on the image alone.
    """
    if not isinstance(selector, Ranker) or selector.stochastic:
        raise RequestError(
            f"Selector '{selector.name}' does not rank patches by a score of its own, so no threshold can be calibrated for it. "
            "Choose a method that ranks patches, such as lats or center."
        )
    return np.concatenate([selector.score(selector.check(batch)).double().numpy() for batch in store.batches(rows, BATCH)])


def calibrated(
    model: MedTokenBudget, images: HeldOut, promise: Promise, selector: str | None = None, cap: float | None = None
) -> Guarantee:
    """Compute the guarantee that calibration images give; the model is not changed.

    The groups of the manifest (lesions, patients) are the exchangeable units: the loss of a group is the mean over its images.
    """
    method = model.main if selector is None else selector
    classifier = model.classifier(method)
    if model.fixed_budget is not None:
        raise RequestError(
            f"The backbone of this model runs at its only budget, {model.fixed_budget:g}, so it cannot be calibrated."
        )
    rows = images.rows[images.store.has_mask.numpy()[images.rows]]
    lesion = images.store.lesion.numpy()[rows]
    if not lesion.any():
        raise RequestError(
            f"None of the {len(images.rows)} images has a mask with a lesion on the token grid, so nothing can be promised. Add "
            "masks to the manifest, for example with `mtb data folder IMAGES --masks MASKS`."
        )
    groups = images.groups_of(rows)
    with evaluating(classifier):
        scores = patch_scores(images.store, rows, classifier.selector)
    n = images.store.n
    most = n if cap is None else classifier.selector.count(cap, n)
    minimum = min(classifier.selector.minimum, most)
    threshold = pick_threshold(promise, scores, lesion, groups, minimum, most)
    counts = kept_counts(scores, threshold.value, minimum, most)
    return Guarantee(
        retention=promise.retention,
        coverage=promise.coverage,
        cap=cap,
        threshold=threshold.value,
        minimum=minimum,
        most=most,
        selector=method,
        bound=threshold.bound,
        kept=group_mean(lesion_kept(scores, lesion, counts), groups),
        tokens=group_mean(np.where(lesion.any(1), counts, np.nan), groups),
        images=threshold.images,
        groups=threshold.groups,
        dataset=images.manifest.name,
        data=images.manifest.hash,
        model=model.fingerprint,
    )
