"""Checks before anything is trained or written: requests that cannot end well.

Every kind of run goes through this file, so that a mistake costs seconds instead of hours.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

import torch

from medtokenbudget.backbone import FeatureStore
from medtokenbudget.backbone.views import OFF_CENTER
from medtokenbudget.config import SIGNALS, TrainConfig, given_settings
from medtokenbudget.data import Manifest
from medtokenbudget.data.manifest import listed
from medtokenbudget.devices import resolve_device
from medtokenbudget.errors import RequestError
from medtokenbudget.heads import create_head
from medtokenbudget.progress import say
from medtokenbudget.routing import selector_class
from medtokenbudget.routing.selectors.lats import ordered_signals
from medtokenbudget.routing.topk import budget_to_k
from medtokenbudget.runs.method import Method, unused_settings
from medtokenbudget.training.rows import check_fits

if TYPE_CHECKING:
    from medtokenbudget.runs.sweep import Sources, Study, Unit

READS_ROUTED = "no-pruning"
"""The method that reads tokens which were routed before or inside the backbone: all of them."""


def check_config(config: TrainConfig) -> None:
    """Reject settings that no learned selector can be trained with; the range of each number is checked in `config.py`."""
    if config.recipe == "lesion-first" and config.losses.lesion <= 0:
        raise RequestError(
            "Recipe 'lesion-first' learns from lesion masks alone, so losses.lesion must be above 0. "
            "Use the preset 'paper' to train without masks."
        )
    if config.recipe == "joint" and config.patches:
        raise RequestError(f"The joint recipe routes whole images, so patches must be 0, got {config.patches}.")
    ordered_signals(config.lats.signals, SIGNALS)
    resolve_device(config.device)


def check_given(studies: Sequence[Study], sources: Sources, config: TrainConfig, own: Collection[str] = ()) -> None:
    """Reject settings that the user gave and no method of the run would use: nobody would notice that they change nothing.

    Args:
        own: Settings that the caller chose, not the user.
    """
    methods = list(dict.fromkeys(Method.parse(text) for study in studies for text in study.methods))
    idle = unused_settings(methods, config, bool(sources.manifest.classes))
    given = given_settings(config)
    for name, applied in (
        ("seed", config.seed in {seed for study in studies for seed in study.seeds}),
        ("budgets", set(config.budgets) <= {budget for study in studies for budget in study.budgets}),
        ("selection_fraction", not len(sources.manifest.part("select"))),
    ):
        if name in given and not applied:
            idle[name] = given[name]
    idle = {name: value for name, value in idle.items() if name not in own}
    if idle:
        raise RequestError(
            f"No method of this run ({listed([str(method) for method in methods])}) uses "
            f"{', '.join(f'{name} = {value!r}' for name, value in idle.items())}. "
            f"Leave {'it' if len(idle) == 1 else 'them'} out, or choose a method or preset that does."
        )


def check_data(manifest: Manifest, store: FeatureStore) -> None:
    """Reject data that nothing can be trained on."""
    labeled = manifest.part("train").rows["label"].notna()
    alone = "or train a router from masks alone with `mtb train --head none`"
    if manifest.classes and not labeled.any():
        raise RequestError(
            f"No training image has a label. Put the images into one folder per class, list their labels in a CSV file, {alone}."
        )
    if manifest.classes and not labeled.all():
        raise RequestError(
            f"{(~labeled).sum()} of {len(labeled)} training images have no label. Label them in the manifest, remove them, {alone}."
        )
    check_fits(manifest, store)
    for part, use in (("train", "learn from"), ("val", "measure with")):
        if not len(manifest.part(part)):
            raise RequestError(
                f"No image of '{manifest.name}' is in the part '{part}', so there is nothing to {use}. Add images, or split them "
                "again: `mtb data split MANIFEST --split grouped --out FILE`."
            )


def _needs_masks(method: Method, config: TrainConfig) -> bool:
    """Tell whether nothing can be trained or measured of this method without lesion masks."""
    if method.learned:
        return method.config(config).recipe == "lesion-first"
    return "has_mask" in selector_class(method.selector).requires


def _needs_labels(method: Method, config: TrainConfig) -> bool:
    """Tell whether nothing of this method can be trained without class labels."""
    if not method.learned:
        return False
    return method.config(config).recipe == "joint" or "classes" in inspect.signature(selector_class(method.selector)).parameters


def _has_training_masks(sources: Sources) -> bool:
    rows = sources.store.rows(sources.manifest.part("train").ids, strict=False)
    return bool(sources.store.has_mask.numpy()[rows].any())


def supported_methods(sources: Sources, methods: Sequence[str], config: TrainConfig) -> tuple[str, ...]:
    """Return the methods that this data can serve; a note names those that need masks or labels where there are none."""
    left = list(methods)
    for available, needs, what in (
        (_has_training_masks(sources), _needs_masks, "no training image has a lesion mask"),
        (bool(sources.manifest.classes), _needs_labels, "no training image has a label"),
    ):
        skipped = [] if available else [text for text in left if needs(Method.parse(text), config)]
        if skipped:
            say(f"Skipping {listed(skipped)}: {what}.")
        left = [text for text in left if text not in skipped]
    return tuple(left)


def check_needs(sources: Sources, units: Sequence[Unit], config: TrainConfig) -> None:
    """Reject methods that need masks, labels, views or signals that the data does not have, and more patches than there are."""
    store, methods = sources.store, list(dict.fromkeys(unit.method for unit in units))
    masks = _has_training_masks(sources)
    if config.router.minimum > store.n:
        raise RequestError(
            f"router.minimum must be at most {store.n}, the patches of an image in store {store.path}, got {config.router.minimum}."
        )
    if store.fixed_budget is not None:
        _check_routed(store.fixed_budget, store, methods, config)
    if not sources.manifest.classes:
        _check_without_labels(masks, methods, config)
    store.require_signals([name for method in methods for name in method.requires])
    if sources.manifest.classes:
        _check_heads(store, len(sources.manifest.classes), methods, config)
    needy = [str(method) for method in methods if _needs_masks(method, config)]
    if needy and not masks:
        raise RequestError(
            f"{listed(needy)} needs lesion masks, but no training image has one. Add masks to the manifest (for example "
            "`mtb data folder IMAGES --masks MASKS`), or train without them: preset 'paper' with losses.lesion = 0."
        )
    if any(method.config(config).views == "off-center" for method in methods) and OFF_CENTER not in store.views:
        raise RequestError(
            f"Training on off-center views was requested, but store {store.path} has none. "
            "Run `mtb extract` with --views off-center, or leave out `views`."
        )


def _check_routed(budget: float, store: FeatureStore, methods: Sequence[Method], config: TrainConfig) -> None:
    """Reject methods and budgets that a store of early routed tokens cannot serve."""
    foreign = [str(method) for method in methods if not selector_class(method.selector).reads_routed]
    if foreign:
        raise RequestError(
            f"{listed(foreign)} chooses among all patches, but store {store.path} has only the {store.per_image} patches that were "
            f"kept before or inside the backbone. Use the method {READS_ROUTED} (with any head), or a store of all patches."
        )
    if tuple(config.budgets) != (budget,):
        raise RequestError(
            f"Store {store.path} was routed at budget {budget:g}, so there is no other budget. Set budgets to {budget:g}."
        )


def _check_without_labels(masks: bool, methods: Sequence[Method], config: TrainConfig) -> None:
    """Reject a run without labels that has no masks or learns from labels: it can measure retention alone."""
    if not masks:
        raise RequestError(
            "The images have neither class labels nor lesion masks, so there is nothing to learn from. Add masks "
            "(`mtb data folder IMAGES --masks MASKS`) or one folder per class. To route images without training, use `mtb route`."
        )
    needy = [str(method) for method in methods if _needs_labels(method, config)]
    if needy:
        raise RequestError(
            f"{listed(needy)} needs class labels, but no training image has one. From masks alone only the recipe lesion-first "
            "learns: use the preset 'lesion-first'."
        )
    if config.class_balance == "sampler":
        raise RequestError("Without class labels there are no classes to balance: class_balance must be 'none'.")


def _check_heads(store: FeatureStore, classes: int, methods: Sequence[Method], config: TrainConfig) -> None:
    """Reject heads that cannot read as few tokens as the smallest budget keeps."""
    least = min(config.budgets)
    for method in methods:
        # Creating a head draws random weights; the caller's random numbers must not depend on this check.
        with torch.random.fork_rng(devices=[]):
            needs = create_head(method.head, store.dim, classes).needs
        k = store.per_image if method.selector == READS_ROUTED else budget_to_k(least, store.per_image, config.router.minimum)
        if k < needs:
            raise RequestError(
                f"Head '{method.head}' of {method} needs at least {needs} tokens, but budget {least:g} keeps {k}. "
                "Use a larger budget or router.minimum, or another head."
            )
