"""Checks before anything is trained or written: requests that cannot end well, or that would spoil an earlier run.

Every kind of run goes through this file, so that a mistake costs seconds instead of hours.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence

import torch

from medtokenbudget.config import SIGNALS, TrainConfig, to_dict
from medtokenbudget.data import Manifest
from medtokenbudget.data.manifest import listed
from medtokenbudget.devices import resolve_device
from medtokenbudget.errors import MismatchError, RequestError
from medtokenbudget.experiments.methods import Method
from medtokenbudget.experiments.run import FILE
from medtokenbudget.experiments.sources import Sources
from medtokenbudget.experiments.units import Plan, Unit, read_state
from medtokenbudget.features import FeatureStore
from medtokenbudget.features.views import OFF_CENTER
from medtokenbudget.files import dotted, read_json
from medtokenbudget.progress import say
from medtokenbudget.routing import selector_class
from medtokenbudget.routing.lats import ordered_signals
from medtokenbudget.routing.router import budget_to_k
from medtokenbudget.training.heads import create_head
from medtokenbudget.training.parts import check_fits

READS_ROUTED = "no-pruning"
"""The method that reads tokens which were routed before or inside the backbone: all of them."""


def check_config(config: TrainConfig) -> None:
    """Reject settings that no training can run with, all at once."""
    faults = [
        f"{name} must be at least 1, got {getattr(config, name)}"
        for name in ("epochs", "head_epochs", "batch_size", "evaluate_every")
        if getattr(config, name) < 1
    ]
    wrong = [budget for budget in (*config.budgets, config.selection_budget) if not 0 < budget <= 1]
    if wrong or not config.budgets:
        faults.append(f"budgets must lie in (0, 1], got {listed(wrong) or 'none'}")
    if config.recipe == "lesion-first" and config.losses.lesion <= 0:
        faults.append(
            "recipe 'lesion-first' learns from lesion masks alone, so losses.lesion must be above 0 (or use --preset paper)"
        )
    if config.recipe == "joint" and config.patches:
        faults.append("the joint recipe routes whole images, so patches must be 0")
    faults += [
        f"{part}.smooth must be odd and at least 1, got {smooth}"
        for part, smooth in (("router", config.router.smooth), ("context", config.context.smooth))
        if smooth < 1 or smooth % 2 == 0
    ]
    if faults:
        raise RequestError("Invalid training settings: " + "; ".join(faults) + ".")
    ordered_signals(config.lats.signals, SIGNALS)
    resolve_device(config.device)


def check_data(manifest: Manifest, store: FeatureStore) -> None:
    """Reject data that nothing can be trained on."""
    if manifest.classes:
        _check_labels(manifest)
    check_fits(manifest, store)
    for part, use in (("train", "learn from"), ("val", "measure with")):
        if not len(manifest.part(part)):
            raise RequestError(
                f"No image of '{manifest.name}' is in the part '{part}', so there is nothing to {use}. Add images, or split them "
                "again: `mtb data split MANIFEST --split grouped --out FILE`."
            )


def _check_labels(manifest: Manifest) -> None:
    labeled = manifest.part("train").rows["label"].notna()
    alone = "or train a router from masks alone with `mtb train --head none`"
    if not labeled.any():
        raise RequestError(
            f"No training image has a label. Put the images into one folder per class, list their labels in a CSV file, {alone}."
        )
    if not labeled.all():
        raise RequestError(
            f"{(~labeled).sum()} of {len(labeled)} training images have no label. Label them in the manifest, remove them, {alone}."
        )


def needs_masks(method: Method, config: TrainConfig) -> bool:
    """Whether nothing can be trained or measured of this method without lesion masks."""
    if method.learned:
        return method.config(config).recipe == "lesion-first"
    return "has_mask" in selector_class(method.selector).requires


def needs_labels(method: Method, config: TrainConfig) -> bool:
    """Whether nothing of this method can be trained without class labels."""
    if not method.learned:
        return False
    return method.config(config).recipe == "joint" or "classes" in inspect.signature(selector_class(method.selector)).parameters


def has_training_masks(sources: Sources) -> bool:
    """Whether any training image has a lesion mask."""
    rows = sources.store.rows(sources.manifest.part("train").ids, strict=False)
    return bool(sources.store.has_mask.numpy()[rows].any())


def that_fit(sources: Sources, methods: Sequence[str], config: TrainConfig) -> tuple[str, ...]:
    """The methods that this data can serve; those that need masks or labels are skipped, with a note, where there are none."""
    left = list(methods)
    for has, needs, what in (
        (has_training_masks(sources), needs_masks, "no training image has a lesion mask"),
        (bool(sources.manifest.classes), needs_labels, "no training image has a label"),
    ):
        skipped = [] if has else [text for text in left if needs(Method.parse(text), config)]
        if skipped:
            say(f"Skipping {listed(skipped)}: {what}.")
        left = [text for text in left if text not in skipped]
    return tuple(left)


def _check_routed(budget: float, store: FeatureStore, units: Sequence[Unit], config: TrainConfig) -> None:
    """Reject methods and budgets that a store of early routed tokens cannot serve."""
    foreign = list(dict.fromkeys(str(u.method) for u in units if not selector_class(u.method.selector).reads_routed))
    if foreign:
        raise RequestError(
            f"{listed(foreign)} chooses among all patches, but store {store.path} has only the {store.per_image} patches that were "
            f"kept before or inside the backbone. Use --methods {READS_ROUTED} (with any head), or a store of all patches."
        )
    if tuple(config.budgets) != (budget,):
        raise RequestError(
            f"Store {store.path} was routed at budget {budget:g}, so there is no other budget. Use --budgets {budget:g}."
        )


def check_needs(sources: Sources, units: Sequence[Unit], config: TrainConfig) -> None:
    """Reject methods that need masks, labels, views or signals that the data does not have."""
    if sources.store.fixed_budget is not None:
        _check_routed(sources.store.fixed_budget, sources.store, units, config)
    if not sources.manifest.classes:
        _check_without_labels(sources, units, config)
    sources.store.require_signals([name for unit in units for name in unit.method.requires])
    if sources.manifest.classes:
        _check_heads(sources, units, config)
    if not has_training_masks(sources):
        needy = list(dict.fromkeys(str(unit.method) for unit in units if needs_masks(unit.method, config)))
        if needy:
            raise RequestError(
                f"{listed(needy)} needs lesion masks, but no training image has one. Add masks to the manifest (for example "
                "`mtb data folder IMAGES --masks MASKS`), or train without them: --preset paper --losses.lesion 0."
            )
    if any(unit.method.config(config).views == "off-center" for unit in units) and OFF_CENTER not in sources.store.views:
        raise RequestError(
            f"Training on off-center views was requested, but store {sources.store.path} has none. "
            "Run `mtb extract` with --views off-center, or leave out --views."
        )


def _check_without_labels(sources: Sources, units: Sequence[Unit], config: TrainConfig) -> None:
    """A run without labels measures retention alone, so it needs masks, and methods that learn from nothing else."""
    if not has_training_masks(sources):
        raise RequestError(
            "The images have neither class labels nor lesion masks, so there is nothing to learn from. Add masks "
            "(`mtb data folder IMAGES --masks MASKS`) or one folder per class. To route images without training, use `mtb route`."
        )
    needy = list(dict.fromkeys(str(unit.method) for unit in units if needs_labels(unit.method, config)))
    if needy:
        raise RequestError(
            f"{listed(needy)} needs class labels, but no training image has one. From masks alone only the recipe lesion-first "
            "learns: use --preset lesion-first."
        )
    if config.class_balance == "sampler":
        raise RequestError("Without class labels there are no classes to balance: use --class-balance none.")
    if config.selection_metric == "accuracy" and any(unit.method.learned for unit in units):
        raise RequestError("Without class labels the epoch is chosen by retention: use --selection-metric retention.")


def _check_heads(sources: Sources, units: Sequence[Unit], config: TrainConfig) -> None:
    """Reject heads that cannot read as few tokens as the smallest budget keeps."""
    store, classes = sources.store, len(sources.manifest.classes)
    for name in dict.fromkeys(unit.method.head for unit in units):
        with torch.random.fork_rng(devices=[]):
            needs = create_head(name, store.dim, classes).needs
        for method in (unit.method for unit in units if unit.method.head == name):
            least = min(config.budgets)
            k = store.per_image if method.selector == READS_ROUTED else budget_to_k(least, store.per_image, config.router.minimum)
            if k < needs:
                raise RequestError(
                    f"Head '{name}' of {method} needs at least {needs} tokens, but budget {least:g} keeps {k}. "
                    "Use a larger budget or --router.minimum, or another head."
                )


def check_run(plan: Plan, units: Sequence[Unit], sources: Sources) -> None:
    """Reject a run directory whose results were made with other options, or with units that this command leaves out."""
    info = read_json(plan.out / FILE) if (plan.out / FILE).exists() else {}
    if not isinstance(info, dict):
        raise RequestError(f"{plan.out / FILE} is damaged: expected a JSON object. Delete it and run the same command again.")
    dropped = sorted(set(info.get("units", ())) - {unit.name for unit in units})
    if dropped:
        raise RequestError(
            f"{plan.out} contains results of {listed(dropped)}, which this command leaves out. Add them, or use another --out."
        )
    for unit in units:
        state = read_state(plan.folder(unit))
        if state.get("status") == "done" and state.get("identity") != plan.identity(unit, sources):
            wanted, found = dotted(to_dict(plan.config)), dotted(info.get("config", {}))
            advice = "Use the same options to resume, or another --out."
            if not info or wanted == found:
                raise MismatchError(
                    f"{unit.method} with seed {unit.seed} in {plan.out} was made with other data or options. {advice}"
                )
            raise MismatchError.between(f"The run in {plan.out}", wanted, {name: found.get(name) for name in wanted}, advice)
