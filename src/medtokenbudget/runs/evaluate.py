"""Evaluation of a saved model, or of a table of kept patches, on images that it has never seen.

It is compared with the controls that a good result has to beat. The evaluation writes the files of a run, so that every
report works on it, and `attributes.parquet` with the stratum of each image. Its images (`HeldOut`) also calibrate a guarantee.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from medtokenbudget.backbone import FeatureStore, extract
from medtokenbudget.backbone.annotations import hashes_of, known_manifests, mask_patches
from medtokenbudget.backbone.backbone import PIXELS
from medtokenbudget.backbone.views import IDENTITY, OFF_CENTER
from medtokenbudget.config import BackboneConfig, ExtractConfig, to_dict
from medtokenbudget.data import Manifest, decode_image, decode_mask, patch_order
from medtokenbudget.data.manifest import listed
from medtokenbudget.data.strata import STRATA, column_strata, measure, stratum_order
from medtokenbudget.errors import MismatchError, RequestError, UnknownNameError, first_line
from medtokenbudget.files import atomic_write, read_json
from medtokenbudget.heads.head import RoutedClassifier
from medtokenbudget.metrics import agreement
from medtokenbudget.model import Guarantee, MedTokenBudget
from medtokenbudget.routing import Ranker, Selector, budget_to_k, create_selector, list_selectors
from medtokenbudget.routing.conformal import (
    Promise,
    group_mean,
    groups_needed,
    kept_counts,
    lesion_kept,
    pick_threshold,
    relative_scores,
)
from medtokenbudget.routing.trainable import ScoredRanker, evaluating
from medtokenbudget.runs.method import Method
from medtokenbudget.runs.preflight import available_controls
from medtokenbudget.runs.run import AS_IS, ATTRIBUTES, FILE, Run, routing_name, write_tables
from medtokenbudget.runs.sweep import evaluate_views, known_columns, lesion_patches
from medtokenbudget.runtime import progress, say
from medtokenbudget.training.pooled import BATCH

Part = Literal["auto", "val", "select", "train", "all"]
STUDY = "evaluate"
SEED = 0
"""Seed of the control `random`."""
_OPTIONAL_SIGNALS = ("luminance", "attention_entropy", "cls_attention")
"""A control that reads one of these is left out where the store does not have it."""
_EMBEDDED_PATCH = 14
"""Side of a patch of the embedded backbone, in pixels."""
ANNOTATOR = "One annotator"
"""The human line among the methods."""
OWN_METRICS = ("retention", "retention_of_ceiling", "accuracy", "macro_f1", "balanced_accuracy", "ece")


@dataclass(frozen=True)
class HeldOut:
    """Images that were asked for, with their tokens: rows of the original images and of their off-center crops in the store.

    An image that could not be read has no row.
    """

    manifest: Manifest
    store: FeatureStore
    rows: np.ndarray
    off_center: np.ndarray
    part: str

    def groups_of(self, rows: np.ndarray) -> list[str]:
        known = dict(zip(self.manifest.ids, self.manifest.groups))
        return [known[self.store.ids[row]] for row in rows]


def held_out(
    model: MedTokenBudget,
    manifest: Manifest,
    store: FeatureStore | Path | str | None,
    tokens: Path,
    part: Part = "auto",
    run: Run | None = None,
    identity: str | None = None,
) -> HeldOut:
    """Open the images of a manifest for a model, which must not have been trained on them.

    Without a `store` their tokens are extracted into `tokens`. The part 'auto' is the validation images of the manifest that the
    model was trained with (`identity`, if `manifest` has other labels than it was written with), and all images of any other
    manifest. Training images of `run`, which the model is in, are refused.
    """
    if part == "auto":
        trained_with = model.info.get("run", {}).get("hashes", {}).get("manifest")
        # A router without a head was trained with the same manifest without its labels.
        part = "val" if trained_with in (identity or manifest.hash, manifest.without_labels().hash) else "all"
    wanted = manifest if part == "all" else manifest.part(part)
    if not len(wanted):
        raise RequestError(f"The manifest has no images in the part '{part}'. Choose another `part`, or `part=\"all\"`.")
    if store is None:
        opened = extract(wanted, tokens, model.backbone_config, ExtractConfig(device=str(model.device)))
    else:
        opened = store if isinstance(store, FeatureStore) else FeatureStore.open(store)
    model.require_store(opened)
    if store is not None:
        opened = opened.annotated(wanted)
    images = _images_of(wanted, opened, part)
    if run is not None:
        _check_unseen(opened, {opened.ids[row] for row in images.rows}, run)
    return images


def _images_of(wanted: Manifest, opened: FeatureStore, part: str) -> HeldOut:
    rows = opened.rows(wanted.ids, strict=False)
    if not len(rows):
        opened.rows(wanted.ids)  # says which images are missing, and why
    if left_out := {error.image_id: error.reason for error in opened.errors if error.view == IDENTITY}:
        reason = next(iter(left_out.values()))
        say(f"{len(left_out):,} of {len(wanted):,} images are left out, they or their masks cannot be used. The first: {reason}")
    return HeldOut(wanted, opened, rows, opened.rows(wanted.ids, view=OFF_CENTER, strict=False), part)


def run_of(folder: Path) -> Run | None:
    return Run(folder.parent) if folder.name == "model" and (folder.parent / FILE).is_file() else None


def _check_unseen(store: FeatureStore, names: set[str], run: Run) -> None:
    """Reject images that the model was trained on, recognized by their content; a run that is out of reach cannot be asked."""
    trained = _trained_on(run)
    if not trained or store.annotation is None:
        return
    seen = sorted(name for name in names if store.annotation.images.get(name) in trained)
    if seen:
        raise RequestError(
            f"The model was trained on {len(seen)} of the {len(names)} images: {listed(seen)}. Results on them would say nothing "
            'about new images. Use other images, or `part="val"`.'
        )


def _trained_on(run: Run) -> set[str]:
    """Return the SHA-256 of the image files that the model of a run was trained on; none if manifest or store are out of reach."""
    try:
        manifest = run.manifest
    except RequestError:
        return set()
    if not run.store_path.is_dir():
        return set()
    cached = [one["images"] for one in known_manifests(run.store_path)[0] if one["hash"] == run.hashes.get("manifest")]
    # From the files themselves where they are here: a cache that is damaged or gone must not open the door to training images.
    images = dict(zip(manifest.ids, hashes_of(run.store_path, manifest, cached[0] if cached else None)[0]))
    ids = [name for part in ("train", "select") for name in manifest.part(part).ids]
    return {image for name in ids if (image := images[name]) is not None}


def read_mapping(path: Path | str) -> dict[str, str | None]:
    values: Any = read_json(Path(path))
    if not isinstance(values, dict) or not all(value is None or isinstance(value, str) for value in values.values()):
        raise RequestError(f'{path} must be a JSON object from class names to class names or null, such as {{"nevus": "NV"}}.')
    return values


def in_classes_of(manifest: Manifest, classes: Sequence[str], mapping: Mapping[str, str | None] | None = None) -> Manifest:
    """Translate the labels of a manifest into the classes of a model, none for a router without a head.

    A class that `mapping` leads to None is left out of the classification.
    """
    labels = manifest.rows["label"]
    given = dict(mapping or {})
    if not classes:
        if given:
            raise RequestError("The model is a router without classes, so there is nothing to map them to. Leave out `classes`.")
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
            f"such as {{{example}}}, and pass it as `classes`."
        )
    translated = [None if label is None else given.get(label, label) for label in labels]
    return replace(manifest, rows=manifest.rows.assign(label=pd.Series(translated, dtype=object)), classes=tuple(classes))


def evaluate_model(
    run: Run,
    model: MedTokenBudget,
    images: HeldOut,
    original: Manifest,
    method: str,
    budgets: Sequence[float],
    about: dict[str, Any],
    trained: bool = False,
    by: Sequence[str] = (),
) -> None:
    """Evaluate a method of a model and the controls on images labeled in its classes, and write the files of the run.

    `original` is the manifest with its own labels; `about` is what `run.json` records in addition to the images. With `trained`
    the run is that of the training itself, and these are its validation images. `by` are columns that become strata.
    """
    wrong = [budget for budget in budgets if not 0 < budget <= 1]
    if wrong or not budgets:
        raise RequestError(f"Budgets must lie in (0, 1], got {', '.join(map(str, wrong)) or 'none'}.")
    classifiers = {method: model.classifier(method)}
    for name in available_controls(images.store):
        # With the minimum of the model, so that it keeps as many patches at small budgets.
        control = create_selector(name, minimum=classifiers[method].selector.minimum)
        if control.reads_patches and images.store.config["backbone"]["name"] == PIXELS:
            continue  # on pixels it would be another method than the one of this name on tokens
        classifiers.setdefault(name, model.classifiers.get(name) or RoutedClassifier(control, None))
    views = {view: rows for view, rows in ((AS_IS, images.rows), (OFF_CENTER, images.off_center)) if len(rows)}
    annotators = _write_tables(run, images, original, by, views, classifiers, budgets)
    methods = {name: _about(classifier) for name, classifier in classifiers.items()}
    methods[method]["variant"] = Method.parse(method).variant
    for name, classifier in classifiers.items():
        methods[name]["config"] = to_dict(model.train_config) if classifier.selector.learns else {}
    if not trained:
        about = {"unfamiliar": _unfamiliar(model, images), "guarantees": _kept_promises(model, images, method)} | about
    hashes = {"manifest": original.hash, "model": model.fingerprint}
    _finish(run, images, methods, method, budgets, hashes, None if trained else about | {"annotators": annotators})


def _finish(
    run: Run,
    images: HeldOut,
    methods: dict[str, Any],
    main: str,
    budgets: Sequence[float],
    hashes: dict[str, str],
    about: dict[str, Any] | None,
) -> None:
    study = {"name": STUDY, "methods": list(methods), "seeds": [SEED], "budgets": list(map(float, budgets))}
    asked = len(images.manifest)
    counts = {"part": images.part, "images": asked, "unreadable": asked - len(images.rows)}
    run.finish(
        methods=methods,
        main=main,
        studies=[study],
        units=[],
        seeds=[SEED],
        hashes={**hashes, "store": images.store.identity},
        evaluation=None if about is None else counts | about,
    )


@torch.no_grad()
def _unfamiliar(model: MedTokenBudget, images: HeldOut) -> int | None:
    if model.familiarity is None:
        return None
    distances = [model.unfamiliarity(batch.to(model.device)) for batch in images.store.batches(images.rows, 64)]
    return sum(int((one > 1).sum()) for one in distances if one is not None)


def _about(classifier: RoutedClassifier) -> dict[str, Any]:
    head = "none" if classifier.head is None else classifier.head.name
    return {"selector": classifier.selector.name, "head": head, "variant": "", "learned": classifier.selector.learns, "config": {}}


def _write_tables(
    run: Run,
    images: HeldOut,
    original: Manifest,
    by: Sequence[str],
    views: Mapping[str, np.ndarray],
    classifiers: Mapping[str, RoutedClassifier],
    budgets: Sequence[float],
    given: Sequence[pd.DataFrame] = (),
    orders: Mapping[str, np.ndarray] = MappingProxyType({}),
) -> list[dict[str, Any]]:
    """Evaluate classifiers and write the tables of a run, after those `given` with their patch `orders`.

    Returns what the rankings keep of the lesion by each annotator, where several are known.
    """
    store, manifest = images.store, images.manifest
    people = {view: _annotators(images, rows) for view, rows in views.items()}
    frames, routing = list(given), dict(orders)
    for name, classifier in classifiers.items():
        if any(signal in _OPTIONAL_SIGNALS and not store.has(signal) for signal in classifier.selector.requires):
            continue
        of_method, tensors, read = evaluate_views(classifier, name, SEED, store, manifest, views, budgets)
        frames += of_method
        for view in read:
            # Orders of fewer images (the oracle reads only those with a mask) would not fit the rows of the file.
            if len(read[view]) == len(views[view]):
                for key, value in tensors[view].items():
                    routing.setdefault(routing_name(view, key, name, SEED), value)
    predictions = pd.concat(frames, ignore_index=True).assign(study=STUDY)
    ids = {view: [store.ids[row] for row in rows] for view, rows in views.items()}
    write_tables(run.path, predictions, manifest.classes, routing, ids, store.grid)
    with atomic_write(run.path / ATTRIBUTES) as temporary:
        _image_attributes(images, original, by).to_parquet(temporary, index=False)
    return _against_annotators(people, predictions, routing)


def _annotators(images: HeldOut, rows: np.ndarray) -> dict[int, tuple[np.ndarray, np.ndarray]]:
    """Return lesion patches and patch orders, `[A, N]` each, of the annotators who marked a lesion patch; by place in `rows`.

    An image with fewer than two such annotators has none.
    """
    store, place = images.store, {name: i for i, name in enumerate(images.manifest.ids)}

    def of(row: int) -> tuple[np.ndarray, np.ndarray] | None:
        if not (files := images.manifest.annotator_paths(place[store.ids[row]])) or store.annotation is None:
            return None
        stored = store.stored[int(store.annotation.tokens[row])]
        patches = [mask_patches(file, stored, store.grid) for file in files]
        marked = [(lesion.astype(bool), covered) for lesion, covered in patches if lesion.any()]
        if len(marked) < 2:
            return None
        return np.stack([lesion for lesion, _ in marked]), np.stack([patch_order(*one, store.grid) for one in marked])

    with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:
        return {at: found for at, found in enumerate(pool.map(of, rows)) if found is not None}


def _against_annotators(
    people: Mapping[str, Mapping[int, tuple[np.ndarray, np.ndarray]]],
    predictions: pd.DataFrame,
    routing: Mapping[str, np.ndarray],
) -> list[dict[str, Any]]:
    """Measure rankings against each annotator, after the human line: what the mask of one annotator keeps of another's lesion."""
    measured: list[dict[str, Any]] = []
    cells = predictions.drop_duplicates(["view", "method", "budget"])
    for view, of_image in people.items():
        lesions = [lesion for lesion, _ in of_image.values()]
        for number, (method, rows) in enumerate(cells[cells["view"] == view].groupby("method", sort=False) if lesions else ()):
            name, k = routing_name(view, "order", str(method), SEED), rows["k"].to_numpy()
            # The human line once, before the first method.
            found = {} if number else {ANNOTATOR: agreement([order for _, order in of_image.values()], lesions, k, between=True)}
            if name in routing:
                found[str(method)] = agreement([routing[name][[at]] for at in of_image], lesions, k)
            about = {"view": view, "n": len(lesions)}
            for which, values in found.items():
                pairs = zip(rows["budget"], *values)
                measured += [{**about, "method": which, "budget": b, "retention": r, "share": s} for b, r, s in pairs]
    if human := [one for one in measured if one["view"] == AS_IS and one["method"] == ANNOTATOR]:
        shares = ", ".join(f"{one['share']:.1%} at budget {one['budget']:g}" for one in human)
        say(f"Of the ceiling of another's lesion, the mask of one annotator keeps {shares} ({human[0]['n']:,} images).")
    return measured


def _image_attributes(images: HeldOut, original: Manifest, by: Sequence[str] = (), read_images: bool = True) -> pd.DataFrame:
    """Return the strata of each image, one column per property, None where it was not measured; and the measured numbers."""
    place = {name: i for i, name in enumerate(images.manifest.ids)}
    label = dict(zip(original.ids, original.rows["label"]))
    columns = column_strata(images.manifest.take([place[images.store.ids[row]] for row in images.rows]), by)

    def row(name: str) -> dict[str, Any]:
        known = {"image_id": name, "class": label.get(name)}
        if not read_images:
            return known
        mask = images.manifest.mask_path(place[name])
        try:
            look = measure(decode_image(images.manifest.image_path(place[name])), None if mask is None else decode_mask(mask))
        except RequestError:
            return known
        # With an underscore: the numbers behind the strata, which are no strata themselves.
        return {**known, **look.strata(), **{f"_{key}": value for key, value in asdict(look).items()}}

    ids = [images.store.ids[row] for row in images.rows]
    with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:
        measured = pd.DataFrame(list(progress(pool.map(row, ids), total=len(ids), what="Measuring", unit="image")))
    return pd.concat([measured, pd.DataFrame(columns, dtype=object)], axis=1)


def own_validation(run: Run | None, method: str, budgets: Sequence[float]) -> list[dict[str, Any]]:
    """Return what the model of a run reached on its own validation images by budget; nothing for a model without its run."""
    if run is None:
        return []
    results = run.results
    results = results[(results["view"] == AS_IS) & (results["seed"] == results["seed"].min()) & (results["method"] == method)]
    measured = [row for row in results.to_dict("records") if any(np.isclose(row["budget"], budget) for budget in budgets)]
    columns = ("budget", "n", "n_masked", *OWN_METRICS)
    return [{name: None if pd.isna(row.get(name)) else row[name] for name in columns} for row in measured]


def _kept_promises(model: MedTokenBudget, images: HeldOut, method: str) -> list[dict[str, Any]]:
    guarantees = [one for one in model.guarantees if one.selector == method]
    rows = images.rows[images.store.lesion.numpy()[images.rows].any(1)]
    if not guarantees or not len(rows):
        return []
    scores = patch_scores(images.store, rows, model.classifier(method).selector)
    lesion, groups = images.store.lesion.numpy()[rows], images.groups_of(rows)
    measured = []
    for one in guarantees:
        counts = one.counts(scores)
        kept = lesion_kept(scores, lesion, counts)
        reached = group_mean(kept >= one.retention - 1e-9, groups)
        means = {"kept": group_mean(kept, groups), "reached": reached, "tokens": group_mean(counts, groups)}
        promised = {"retention": one.retention, "coverage": one.coverage, "cap": one.cap, "own_tokens": one.tokens}
        measured.append({**promised, **means, "n": len(rows), "groups": len(set(groups))})
    return measured


@dataclass(frozen=True)
class KeptPatches:
    """What a method kept, from a table: `kept` is budget -> `[n, K]` patch numbers, in the order of the table's `names`.

    `probabilities` is budget -> `[n, C]`, empty without columns `p_<class>`; `scores` is `[n, N]` or None.
    """

    method: str
    grid: tuple[int, int]
    names: list[str]
    kept: dict[float, np.ndarray]
    probabilities: dict[float, np.ndarray]
    scores: np.ndarray | None


def read_kept(path: Path | str, manifest: Manifest, view: str = AS_IS) -> KeptPatches:
    """Read the rows of one view in a table of kept patches (docs/protocol.md), such as `mtb route` writes.

    Every image of the manifest needs a row. A table without the column `view` is about original images.
    """
    source = Path(path)

    def refuse(what: str) -> RequestError:
        return RequestError(f"{source} {what}")

    try:
        table = pq.read_table(source)
    except (pa.ArrowException, OSError, ValueError) as error:
        raise refuse(f"is not a readable Parquet file ({first_line(error)}).") from None
    key = next((name for name in ("image_id", "image") if name in table.column_names), None)
    if key is None or "kept" not in table.column_names:
        raise refuse(f"needs the columns image_id and kept (a list of patch numbers), but it has {', '.join(table.column_names)}.")
    if source.stem in list_selectors() or set(":+|/") & set(source.stem):
        raise refuse(
            "gives the method its name, but a method of this package has this name, or it contains one of : + | /. Rename the file."
        )
    frame = given = table.to_pandas()
    if "view" in frame:
        if foreign := sorted(set(frame["view"].astype(str)) - {AS_IS, OFF_CENTER}):
            raise refuse(f"has the view {listed(foreign)}. Views are {AS_IS} and {OFF_CENTER}.")
        frame = given = frame[frame["view"] == view]
    if frame.empty:
        raise refuse(f"has no rows of the view {view}. Original images ({AS_IS}) are always judged.")
    if frame["kept"].isna().any():
        raise refuse("has rows without kept patches. Methods that merge patches keep none and cannot be judged by this table.")
    paths = {os.path.abspath(manifest.image_path(row)): name for row, name in enumerate(manifest.ids)} if key == "image" else {}
    frame["image_id"] = [paths.get(os.path.abspath(name), name) for name in frame[key].astype(str)]
    grid = _grid_of(table, frame, refuse)
    n, counts = grid[0] * grid[1], frame["kept"].map(len)
    shares = frame["budget"] if "budget" in frame else counts / n
    frame, names = frame[frame["image_id"].isin(manifest.ids)], manifest.ids
    kept: dict[float, np.ndarray] = {}
    probabilities: dict[float, np.ndarray] = {}
    columns = [name for name in frame.columns if name.startswith("p_")]
    if columns and sorted(columns) != sorted(f"p_{name}" for name in manifest.classes):
        raise refuse(f"has {', '.join(columns)}, but the classes of the manifest are {', '.join(manifest.classes) or 'none'}.")
    # Rounded, because shares that were computed differ in their last bit.
    for _, rows in frame.groupby(shares.loc[frame.index].round(9)):
        if (sizes := sorted(set(counts[rows.index]))) != sizes[:1] or not sizes[0]:
            raise refuse(f"keeps {listed(sizes)} patches at one budget. Every image must keep the same number, at least 1.")
        if twice := sorted(set(rows["image_id"][rows["image_id"].duplicated()])):
            raise refuse(f"has more than one row for {listed(twice)} at one budget. Name the budgets in a column `budget`.")
        of_image = rows.set_index("image_id")
        if missing := [name for name in names if name not in of_image.index]:
            raise refuse(f"has no row for {len(missing):,} of {len(names):,} images of the manifest: {listed(missing)}.")
        patches = np.stack(of_image.loc[names, "kept"].map(np.asarray).tolist())
        if patches.dtype.kind not in "iu" or patches.min() < 0 or patches.max() >= n or (np.diff(np.sort(patches)) == 0).any():
            raise refuse(f"must keep different patches from 0 to {n - 1} of a grid of {grid[0]} x {grid[1]}, counted row by row.")
        # The smallest decimal that gives this K, unless the budget that the table names does.
        stated = float(shares[rows.index[0]])
        budget = stated if 0 < stated <= 1 and budget_to_k(stated, n, 1) == sizes[0] else math.ceil(1e6 * sizes[0] / n) / 1e6
        kept[budget] = patches
        if columns:
            values = of_image.loc[names, [f"p_{name}" for name in manifest.classes]].to_numpy(float)
            if not (np.abs(values.sum(1) - 1) < 1e-3).all() or (values < 0).any():
                raise refuse("has probabilities that are negative or do not sum to 1 for each image.")
            probabilities[budget] = values
    if not kept:
        raise refuse(f"has no image of the manifest: it has {listed(list(dict.fromkeys(given[key])), 3)}.")
    first = frame.drop_duplicates("image_id").set_index("image_id").loc[names]
    scores = np.stack(first["scores"].tolist()) if "scores" in first and first["scores"].notna().all() else None
    return KeptPatches(source.stem, grid, names, dict(sorted(kept.items())), probabilities, scores)


def _grid_of(table: pa.Table, frame: pd.DataFrame, refuse: Callable[[str], RequestError]) -> tuple[int, int]:
    """Return the grid that a table states in its metadata, or a square one of its numbers of patches."""
    stated = (table.schema.metadata or {}).get(b"grid")
    if stated is not None:
        rows, columns = json.loads(stated)
        return int(rows), int(columns)
    scored = "scores" in frame and frame["scores"].notna().all()
    patches = set(frame["n_patches"]) if "n_patches" in frame else set(frame["scores"].map(len)) if scored else set()
    side = math.isqrt(int(next(iter(patches)))) if len(patches) == 1 else 0
    if side**2 not in patches:
        raise refuse("does not say its grid. Add a column n_patches (such as 256), or the metadata key grid (such as [16, 16]).")
    return side, side


def has_off_center(path: Path | str) -> bool:
    """Tell whether a table of kept patches has rows of off-center views."""
    return "view" in pq.read_schema(path).names and OFF_CENTER in pq.read_table(path, columns=["view"])["view"].to_pylist()


def images_of_table(
    table: KeptPatches, manifest: Manifest, store: FeatureStore | Path | str | None, tokens: Path, part: str, off_center: bool
) -> HeldOut:
    """Open the images of a table of kept patches; without a `store`, the embedded backbone reads them on the grid of the table."""
    if store is None:
        side = table.grid[0]
        if table.grid != (side, side):
            raise RequestError(f"The grid of the table is {table.grid[0]} x {table.grid[1]}. Pass a `store` with this grid.")
        config = ExtractConfig(views="off-center" if off_center else "none")
        opened = extract(manifest, tokens, BackboneConfig("embedded", image_size=_EMBEDDED_PATCH * side), config)
    else:
        opened = (store if isinstance(store, FeatureStore) else FeatureStore.open(store)).annotated(manifest)
        if tuple(opened.grid) != table.grid:
            what = f"The grid of the store {opened.path}"
            advice = "Leave out `store` to read the images on the grid of the table."
            raise MismatchError.between(what, {"grid": table.grid}, {"grid": tuple(opened.grid)}, advice)
    return _images_of(manifest, opened, part)


def evaluate_kept(run: Run, tables: Mapping[str, KeptPatches], images: HeldOut, original: Manifest, by: Sequence[str]) -> None:
    """Judge tables of kept patches by view next to the controls, which keep as many, and write the files of the run."""
    store, method, budgets = images.store, tables[AS_IS].method, list(tables[AS_IS].kept)
    rows = {view: images.rows if view == AS_IS else images.off_center for view in tables}
    frames: list[pd.DataFrame] = []
    orders: dict[str, np.ndarray] = {}
    for view, table in tables.items():
        frames += _judge_kept(table, view, rows[view], images, orders)
    classifiers = {name: RoutedClassifier(create_selector(name, minimum=1), None) for name in available_controls(store)}
    annotators = _write_tables(run, images, original, by, rows, classifiers, budgets, frames, orders)
    foreign = {"selector": method, "head": "none", "variant": "", "learned": False, "config": {}}
    methods = {method: foreign, **{name: _about(classifier) for name, classifier in classifiers.items()}}
    about = {"guarantees": [], "annotators": annotators, "model": f"the table {method}", "mapping": None, "own": []}
    _finish(run, images, methods, method, budgets, {"manifest": original.hash}, about)


def _judge_kept(
    table: KeptPatches, view: str, rows: np.ndarray, images: HeldOut, orders: dict[str, np.ndarray]
) -> Iterator[pd.DataFrame]:
    """Yield the predictions of a table at each budget, and add its ranking and scores to `orders`."""
    store, method = images.store, table.method
    place = {name: index for index, name in enumerate(table.names)}
    # The store may have other images between those of the table, and lacks what could not be read.
    at = [place[store.ids[row]] for row in rows]
    lesion, masked = store.lesion.numpy()[rows].astype(bool), store.has_mask.numpy()[rows]
    for budget, patches in table.kept.items():
        probability = table.probabilities.get(budget, np.zeros((len(table.names), 0)))[at].astype(np.float32)
        classified = probability.shape[1] > 0
        measured = {
            "view": view,
            "method": method,
            "seed": SEED,
            "label": store.label.numpy()[rows] if classified else -1,
            "budget": budget,
            "k": patches.shape[1],
            "predicted": probability.argmax(1) if classified else -1,
            "probabilities": list(probability),
            "kept_lesion": np.where(masked, np.take_along_axis(lesion, patches[at], 1).sum(1), np.nan),
            **dict.fromkeys(("purity", "lesion_dominated", "lesion_mass"), np.nan),
        }
        yield pd.DataFrame(known_columns(store, rows, images.manifest) | measured)
    orders |= {routing_name(view, name, method, SEED): value for name, value in lesion_patches(store, rows).items()}
    most = table.kept[max(table.kept)][at]
    if all((np.sort(most[:, : few.shape[1]]) == np.sort(few[at])).all() for few in table.kept.values()):  # a ranking
        # The patches that no budget kept follow by number: nothing is known of their order.
        rest = np.ones((len(rows), store.n), bool)
        np.put_along_axis(rest, most, False, 1)
        order = np.concatenate([most, np.nonzero(rest)[1].reshape(len(rows), -1)], 1).astype(np.int16)
        orders[routing_name(view, "order", method, SEED)] = order
    if table.scores is not None:
        orders[routing_name(view, "scores", method, SEED)] = table.scores[at].astype(np.float16)


@torch.no_grad()
def patch_scores(store: FeatureStore, rows: np.ndarray, selector: Selector) -> np.ndarray:
    """Compute the scores `[n, N]` that a selector ranks the patches of rows by; they must depend on the image alone."""
    if not isinstance(selector, Ranker) or selector.stochastic:
        raise RequestError(
            f"Selector '{selector.name}' does not rank patches by a score of its own, so no threshold can be calibrated for it. "
            "Choose a method that ranks patches, such as lats or center."
        )
    return np.concatenate([selector.score(selector.check(batch)).double().numpy() for batch in store.batches(rows, BATCH)])


def calibrated(
    model: MedTokenBudget,
    images: HeldOut,
    promise: Promise,
    selector: str | None = None,
    cap: float | None = None,
    by: str | None = None,
) -> Guarantee:
    """Compute the guarantee that calibration images give; the model is not changed.

    The groups of the manifest (lesions, patients) are the exchangeable units: the loss of a group is the mean over its images. With
    `by` each value of a stratum has a threshold, and the lowest keeps the promise for all of them: what a new image is need not be
    known.
    """
    method = model.main if selector is None else selector
    classifier = model.classifier(method)
    if model.fixed_budget is not None:
        raise RequestError(f"The backbone of this model runs at budget {model.fixed_budget:g} alone, so it cannot be calibrated.")
    rows = images.rows[images.store.has_mask.numpy()[images.rows]]
    lesion = images.store.lesion.numpy()[rows]
    if not lesion.any():
        raise RequestError(
            f"None of the {len(images.rows)} images has a mask with a lesion on the token grid, so nothing can be promised. Add "
            "masks to the manifest, for example with `mtb data folder` and `masks`."
        )
    groups = images.groups_of(rows)
    with evaluating(classifier):
        scores = patch_scores(images.store, rows, classifier.selector)
    # Where all probabilities of an image are low, one threshold on them would keep little of its lesion.
    if relative := isinstance(classifier.selector, ScoredRanker):
        scores = relative_scores(scores)
    n = images.store.n
    most = n if cap is None else classifier.selector.count(cap, n)
    minimum = min(classifier.selector.minimum, most)
    threshold = pick_threshold(promise, scores, lesion, groups, minimum, most)
    # Too few groups cannot promise this much, whatever they keep: such a part is shown, and not promised.
    parts = {} if by is None else _parts(images, rows, lesion, by)
    enough = {value: inside for value, inside in parts.items() if len({groups[i] for i in inside}) >= groups_needed(promise)}
    if by is not None and not enough:
        raise RequestError(f"No {by} has the {groups_needed(promise)} groups that {promise} needs. Add images, or promise less.")
    for inside in enough.values():
        one = pick_threshold(promise, scores[inside], lesion[inside], [groups[i] for i in inside], minimum, most)
        bound = max(threshold.bound, one.bound)
        threshold = replace(threshold, value=min(threshold.value, one.value), bound=bound)
    counts = kept_counts(scores, threshold.value, minimum, most)
    retained = lesion_kept(scores, lesion, counts)

    def part(value: str, inside: np.ndarray) -> dict[str, Any]:
        named = [groups[i] for i in inside]
        measured = {"kept": group_mean(retained[inside], named), "tokens": group_mean(counts[inside], named)}
        return {"value": value, "images": len(inside), "groups": len(set(named)), **measured, "promised": value in enough}

    rule: dict[str, Any] = {"threshold": threshold.value, "relative": relative, "minimum": minimum, "most": most, "cap": cap}
    rule |= {name: getattr(threshold, name) for name in ("bound", "images", "groups")}
    rule |= {"selector": method, "model": model.fingerprint, "dataset": images.manifest.name, "data": images.manifest.hash}
    return Guarantee(
        **asdict(promise),
        **rule,
        kept=group_mean(retained, groups),
        # Over the images that have a share to keep, like `kept`.
        tokens=group_mean(np.where(lesion.any(1), counts, np.nan), groups),
        by=by,
        parts=tuple(part(value, inside) for value, inside in parts.items()),
    )


def check_stratum(by: str | None, manifest: Manifest) -> None:
    known = ("class", "size", *STRATA, *manifest.further)
    if by is not None and by not in known:
        raise UnknownNameError.of("stratum", by, known, "to calibrate `by`")


def _parts(images: HeldOut, rows: np.ndarray, lesion: np.ndarray, by: str) -> dict[str, np.ndarray]:
    """Return the calibration images with a lesion patch by the value of a stratum: class, size, one of `STRATA`, or a column."""
    sizes = lesion.sum(1)
    if by == "size":
        # Equal quartiles, of many lesions of one size, would leave parts empty.
        edges = np.unique(np.quantile(sizes[sizes > 0], (0.25, 0.5, 0.75)))
        quarter = np.searchsorted(edges, sizes)
        spans = {number: sizes[(quarter == number) & (sizes > 0)] for number in range(len(edges) + 1)}
        names = {number: f"{span.min()} to {span.max()} patches" for number, span in spans.items() if len(span)}
        values: list[str | None] = [names.get(number) for number in quarter]
        order = list(names.values())
    else:
        column = () if by == "class" or by in STRATA else (by,)
        known = _image_attributes(replace(images, rows=rows), images.manifest, column, read_images=by in STRATA)
        values = [None if pd.isna(value) else str(value) for value in known[f"{by} (column)" if column else by]]
        order = stratum_order(by, {value for value in values if value is not None})
    found = {name: np.flatnonzero([value == name for value in values] & (sizes > 0)) for name in order}
    if not (found := {name: inside for name, inside in found.items() if len(inside)}):
        raise RequestError(f"The {by} of none of the {len(rows)} images is known, so nothing can be calibrated by it.")
    return found
