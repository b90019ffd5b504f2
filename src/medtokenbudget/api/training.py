"""From data to a model that can be loaded, shared and served: the router with its head, and the heads of the controls beside it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np
import pandas as pd

from medtokenbudget.backbone import FeatureStore
from medtokenbudget.backbone.backbone import located
from medtokenbudget.config import DEFAULT_SELECTOR, BackboneConfig, TrainConfig, given_settings, preset
from medtokenbudget.data import Manifest
from medtokenbudget.errors import RequestError
from medtokenbudget.jobs import Execution
from medtokenbudget.locks import exclusive
from medtokenbudget.model import MedTokenBudget, load
from medtokenbudget.model.folder import ROUTER
from medtokenbudget.reporting.card import run_card
from medtokenbudget.routing import selector_class
from medtokenbudget.runs.method import Method, method_of
from medtokenbudget.runs.preflight import READS_ROUTED
from medtokenbudget.runs.run import RunInfo
from medtokenbudget.runs.sweep import Sources, Study, Unit, load_unit, run_studies
from medtokenbudget.training.classifier import RoutedClassifier
from medtokenbudget.training.familiarity import fit_familiarity
from medtokenbudget.training.rows import make_parts

CONTROLS = ("center", "random")
HeadChoice = Literal["auto", "none"]


def train_router(
    manifest: Manifest | Path | str,
    store: FeatureStore | Path | str,
    out: Path | str,
    config: TrainConfig | None = None,
    selector: str = DEFAULT_SELECTOR,
    head: HeadChoice = "auto",
) -> pd.DataFrame:
    """Train one router and its head, evaluate it beside the controls `center` and `random`, and save it in `out/model`.

    Args:
        head: 'none' trains the router from masks alone and saves it without a head; so does 'auto' if no image has a label.

    Returns:
        The tidy results, also written to `out/results.csv`.
    """
    config = config or preset("lesion-first")
    sources = Sources.of(_labels_as_asked(manifest, head), store, out)
    if sources.store.fixed_budget is None:
        method = str(method_of(selector, config))
        methods: tuple[str, ...] = (method, *CONTROLS)
    else:  # routed already: only the head is left to train
        if "budgets" not in given_settings(config):
            config = replace(config, budgets=(sources.store.fixed_budget,))
        method, methods = READS_ROUTED, (READS_ROUTED,)
    study = Study("train", methods, (config.seed,), config.budgets)
    results = run_studies([study], sources, out, config, Execution(jobs=1), required=(method,))
    save_model(out)
    return results


def _labels_as_asked(manifest: Manifest | Path | str, head: HeadChoice) -> Manifest | Path | str:
    """The manifest without its labels if there are none to learn from or none are wanted; otherwise the manifest as it came."""
    if head not in ("auto", "none"):
        raise RequestError(f"`head` must be 'auto' or 'none', got '{head}'.")
    opened = manifest if isinstance(manifest, Manifest) else Manifest.read(manifest)
    if opened.classes and (head == "none" or opened.rows["label"].isna().all()):
        return opened.without_labels()
    return manifest


def save_model(run: Path | str) -> Path | None:
    """Save the main method of a run and its other classifiers, all of the first seed, as one model folder.

    Returns:
        The folder, or None if the run has no learned method.
    """
    info = RunInfo.read(run)
    if info.main is None:
        return None
    with exclusive(info.path):
        return _model_of(info, info.main).save_pretrained(info.path / "model")


def _model_of(info: RunInfo, main: str) -> MedTokenBudget:
    sources = Sources.of(info.manifest_path, info.store_path)
    store = sources.store
    classifiers: dict[str, RoutedClassifier] = {}
    for method in map(Method.parse, info.methods):
        unit = Unit(method, info.seeds[0])
        # A selector that reads masks (the oracle) cannot predict.
        if unit.name in info.units and "has_mask" not in selector_class(method.selector).requires:
            loaded = load_unit(info, unit, store.dim)
            if loaded is not None:
                classifiers[str(method)] = loaded
    recorded = ("dataset", "seeds", "versions", "hashes", "studies")
    about = {name: getattr(info, name) for name in recorded} | {"masks": info.counts["train"]["masks"]}
    familiarity = fit_familiarity(store, _seen(sources, info.methods[main].train_config), info.seeds[0])
    model = MedTokenBudget(
        _backbone(store),
        store.config["backbone"],
        info.classes,
        classifiers,
        info.methods[main].train_config,
        main=main,
        info={"run": about},
        scout=None if store.early is None else load(store.path / ROUTER),
        familiarity=familiarity,
    )
    model.card = run_card(info.path, model)
    return model


def _seen(sources: Sources, config: TrainConfig) -> np.ndarray:
    """Rows of the images and views that the main method was trained on: without labels or under lesion-first those with a mask."""
    parts = make_parts(sources.manifest, sources.store, config)
    rows = np.concatenate([parts.train, parts.train_views])
    return rows if config.recipe == "joint" else rows[sources.store.has_mask.numpy()[rows]]


def _backbone(store: FeatureStore) -> BackboneConfig:
    found, weights = store.config["backbone"], store.config["weights"]
    config = BackboneConfig(
        name=found["name"],
        weights=None if weights is None else Path(weights),
        image_size=found["image_size"],
        layer=found["layer"],
        attention=found["attention"],
    )
    return located(config, found["weights"])
