"""From a finished sweep to a model that can be loaded, shared and served: LATS with its head, the other heads beside it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pandas as pd

from medtokenbudget.config import BackboneConfig, TrainConfig, preset, train_config_from_dict
from medtokenbudget.data import Manifest
from medtokenbudget.experiments.provenance import relative_to_run
from medtokenbudget.experiments.sweep import Study, require_run, run_studies
from medtokenbudget.experiments.trained import load_unit
from medtokenbudget.experiments.units import Unit
from medtokenbudget.features import FeatureStore
from medtokenbudget.model import MedTokenBudget
from medtokenbudget.report.card import run_card
from medtokenbudget.training.head import RoutedClassifier


def train(manifest: Path | str, store: Path | str, out: Path | str, config: TrainConfig | None = None) -> pd.DataFrame:
    """Train one LATS model, evaluate it beside the controls `center` and `random`, save it in `out/model`; returns the results."""
    config = config or preset("lesion-first")
    study = Study("train", ("lats", "center", "random"), (config.seed,), config.budgets)
    results = run_studies([study], Path(manifest), Path(store), Path(out), config, jobs=1, required=("lats",))
    save_model(out)
    return results


def save_model(run: Path | str) -> Path | None:
    """Save the run's LATS and every other head of its first seed as one model folder; None when the run has no LATS."""
    run = Path(run)
    info = require_run(run)
    seed = info["seeds"][0]
    methods = [name for name in info["variants"] if Unit(name, seed).name in info["units"]]
    main = next((name for name in ("lats:lesion-first", "lats") if name in methods), None)
    if main is None:
        return None
    store = FeatureStore.open(relative_to_run(run, info["store"]))
    manifest = Manifest.read(relative_to_run(run, info["manifest"]))
    classifiers: dict[str, RoutedClassifier] = {}
    for method in (name for name in methods if name != "oracle"):
        loaded = load_unit(run, Unit(method, seed), info, store.dim, len(manifest.classes))
        if loaded is not None:
            classifiers[method] = loaded
    model = MedTokenBudget(
        _backbone(store),
        store.config["backbone"],
        manifest.classes,
        classifiers,
        train_config_from_dict(info["variants"][main]),
        main=main,
        info={"run": {name: info[name] for name in ("dataset", "seeds", "versions", "hashes", "studies")}},
    )
    model.card = run_card(run, model)
    return model.save_pretrained(run / "model")


def _backbone(store: FeatureStore) -> BackboneConfig:
    found = store.config["backbone"]
    config = BackboneConfig(name=found["name"], image_size=found["image_size"], layer=found["layer"], attention=found["attention"])
    return replace(config, weights=None)
