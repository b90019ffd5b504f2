"""Checks before anything is trained or written: requests that cannot end well.

Every kind of run goes through `check`, so that a mistake costs seconds instead of hours.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Sequence

import torch

from medtokenbudget.backbone import FeatureStore
from medtokenbudget.backbone.backbone import PIXELS
from medtokenbudget.backbone.views import OFF_CENTER
from medtokenbudget.config import CONTROLS, SIGNALS, TrainConfig, given_settings
from medtokenbudget.data import Manifest
from medtokenbudget.data.manifest import listed
from medtokenbudget.errors import RequestError
from medtokenbudget.heads import create_head
from medtokenbudget.routing import selector_class
from medtokenbudget.routing.selectors.lats import ordered_signals
from medtokenbudget.routing.topk import budget_to_k
from medtokenbudget.runs.method import Method, unused_settings
from medtokenbudget.runs.run import Run
from medtokenbudget.runs.studies import Study
from medtokenbudget.runtime import resolve_device, say
from medtokenbudget.tokens import SEGMENTATION
from medtokenbudget.training.rows import check_fits

READS_ROUTED = "no-pruning"
"""The method that reads tokens which were routed before or inside the backbone: all of them."""


def check(run: Run, studies: Sequence[Study], chosen_for_user: Collection[str] = ()) -> None:
    """Reject a run that cannot be trained and evaluated; settings in `chosen_for_user` are the caller's and may go unused."""
    asked = list(dict.fromkeys(Method.parse(text) for study in studies for text in study.methods))
    # An ablation is evaluated with the training of its selector, which must be possible too.
    methods = list(dict.fromkeys(part for method in asked for part in (method.trained_as, method)))
    resolve_device(run.config.device)
    if run.config.recipe == "scout":
        raise RequestError("The recipe 'scout' reads images, not tokens. Train it alone, with `mtb train` and without a store.")
    for method in methods:
        if method.learned:
            check_config(method.config(run.config))
    pixels = [str(method) for method in methods if selector_class(method.selector).reads_pixels]
    if pixels and run.store.config["backbone"]["name"] != PIXELS:
        advice = 'Train it with `mtb train` and `preset="scout"`.'
        raise RequestError(f"{listed(pixels)} reads pixels, but the store has tokens of a transformer. {advice}")
    _check_labels(run.manifest)
    check_fits(run.manifest, run.store)
    for part, use in (("train", "learn from"), ("val", "measure with")):
        if not len(run.manifest.part(part)):
            raise RequestError(
                f"No image of '{run.manifest.name}' is in the part '{part}', so there is nothing to {use}. Add images, or split "
                "them again with `mtb data split`."
            )
    _check_needs(run, methods)
    _check_given(run, studies, asked, chosen_for_user)


def check_config(config: TrainConfig) -> None:
    """Reject settings that no learned selector can be trained with; the range of each number is checked in `config.py`."""
    if config.recipe == "lesion-first" and config.losses.lesion <= 0:
        raise RequestError(
            "Recipe 'lesion-first' learns from lesion masks alone, so `losses.lesion` must be above 0. "
            'Use `preset="paper"` to train without masks.'
        )
    if config.recipe == "joint" and config.patches:
        raise RequestError(f"The joint recipe routes whole images, so `patches` must be 0, got {config.patches}.")
    ordered_signals(config.lats.signals, SIGNALS)
    resolve_device(config.device)


def _check_labels(manifest: Manifest) -> None:
    labeled = manifest.part("train").rows["label"].notna()
    if manifest.classes and not labeled.all():
        missing = "No training image has a label. Put the images into one folder per class, list their labels in a CSV file"
        if labeled.any():
            missing = f"{(~labeled).sum()} of {len(labeled)} training images have no label. Label them in the manifest, remove them"
        raise RequestError(f'{missing}, or train a router from masks alone with `mtb train` and `head="none"`.')


def _check_given(run: Run, studies: Sequence[Study], methods: Sequence[Method], chosen_for_user: Collection[str]) -> None:
    """Reject settings that the user gave and no method of the run would use: nobody would notice that they change nothing."""
    config, given = run.config, given_settings(run.config)
    idle = unused_settings(methods, config, bool(run.manifest.classes))
    for name, applied in (
        ("seed", config.seed in {seed for study in studies for seed in study.seeds}),
        ("budgets", set(config.budgets) <= {budget for study in studies for budget in study.budgets}),
        # A manifest with a selection part needs no further images set aside.
        ("selection_fraction", not len(run.manifest.part("select"))),
    ):
        if name in given and not applied:
            idle[name] = given[name]
    idle = {name: value for name, value in idle.items() if name not in chosen_for_user}
    if idle:
        raise RequestError(
            f"No method of this run ({listed([str(method) for method in methods])}) uses "
            f"{', '.join(f'{name} = {value!r}' for name, value in idle.items())}. "
            f"Leave {'it' if len(idle) == 1 else 'them'} out, or choose a method or preset that does."
        )


def _needs(method: Method, config: TrainConfig) -> set[str]:
    """Return which of 'masks', 'labels' and 'segmentation' nothing of this method can be trained or measured without."""
    kind = selector_class(method.selector)
    needs = {SEGMENTATION} & set(kind.requires)
    if method.config(config).recipe == "lesion-first" if method.learned else "has_mask" in kind.requires:
        needs.add("masks")
    # A selector that is made with the number of classes learns from the labels.
    if method.learned and (method.config(config).recipe == "joint" or "classes" in inspect.signature(kind).parameters):
        needs.add("labels")
    return needs


def _has_training_masks(run: Run) -> bool:
    rows = run.store.rows(run.manifest.part("train").ids, strict=False)
    return bool(run.store.has_mask.numpy()[rows].any())


def available_controls(store: FeatureStore) -> list[str]:
    """Return the controls that a store can serve: the segmenter only where it has its scores."""
    return [name for name in CONTROLS if SEGMENTATION not in selector_class(name).requires or store.has(SEGMENTATION)]


def supported_methods(run: Run, methods: Sequence[str]) -> tuple[str, ...]:
    """Return the methods that the data of a run can serve; a note names the others and what they need."""
    available = {
        "masks": (_has_training_masks(run), "no training image has a lesion mask."),
        "labels": (bool(run.manifest.classes), "no training image has a label."),
        SEGMENTATION: (run.store.has(SEGMENTATION), "the store has no segmenter's scores, which `mtb extract` can add."),
    }
    for need, (there, why) in available.items():
        skipped = [] if there else [text for text in methods if need in _needs(Method.parse(text), run.config)]
        if skipped:
            say(f"Skipping {listed(skipped)}: {why}")
        methods = [text for text in methods if text not in skipped]
    return tuple(methods)


def _check_needs(run: Run, methods: Sequence[Method]) -> None:
    store, config, masks = run.store, run.config, _has_training_masks(run)
    if config.router.minimum > store.n:
        raise RequestError(
            f"router.minimum must be at most {store.n}, the patches of an image in store {store.path}, got {config.router.minimum}."
        )
    if store.fixed_budget is not None:
        _check_routed(run, store.fixed_budget, methods)
    if not run.manifest.classes:
        _check_without_labels(masks, methods, config)
    store.require_signals([name for method in methods for name in method.requires])
    if run.manifest.classes:
        _check_heads(run, methods)
    needy = [str(method) for method in methods if "masks" in _needs(method, config)]
    if needy and not masks:
        raise RequestError(
            f"{listed(needy)} needs lesion masks, but no training image has one. Add masks to the manifest (for example with "
            '`mtb data folder` and `masks`), or train without them: `preset="paper"` with `losses.lesion=0`.'
        )
    if any(method.config(config).views == "off-center" for method in methods) and OFF_CENTER not in store.views:
        raise RequestError(
            f"Training on off-center views was requested, but store {store.path} has none. "
            'Extract them (`mtb extract` with `views="off-center"`), or leave out `views`.'
        )


def _check_routed(run: Run, budget: float, methods: Sequence[Method]) -> None:
    store = run.store
    foreign = [str(method) for method in methods if not selector_class(method.selector).reads_routed]
    if foreign:
        raise RequestError(
            f"{listed(foreign)} chooses among all patches, but store {store.path} has only the {store.per_image} patches that were "
            f"kept before or inside the backbone. Use the method {READS_ROUTED} (with any head), or a store of all patches."
        )
    if tuple(run.config.budgets) != (budget,):
        advice = f"Set `budgets` to {budget:g}."
        raise RequestError(f"Store {store.path} was routed at budget {budget:g}, so there is no other budget. {advice}")


def _check_without_labels(masks: bool, methods: Sequence[Method], config: TrainConfig) -> None:
    if not masks:
        raise RequestError(
            "The images have neither class labels nor lesion masks, so there is nothing to learn from. Add masks "
            "(`mtb data folder` with `masks`) or one folder per class. To route images without training, use `mtb route`."
        )
    needy = [str(method) for method in methods if "labels" in _needs(method, config)]
    if needy:
        raise RequestError(
            f"{listed(needy)} needs class labels, but no training image has one. From masks alone only the recipe lesion-first "
            'learns: use `preset="lesion-first"`.'
        )
    if config.class_balance == "sampler":
        raise RequestError("Without class labels there are no classes to balance: `class_balance` must be 'none'.")


def _check_heads(run: Run, methods: Sequence[Method]) -> None:
    least, patches = min(run.config.budgets), run.store.per_image
    for method in methods:
        # Creating a head draws random weights; the caller's random numbers must not depend on this check.
        with torch.random.fork_rng(devices=[]):
            needs = create_head(method.head, run.store.dim, len(run.manifest.classes)).needs
        k = patches if method.selector == READS_ROUTED else budget_to_k(least, patches, run.config.router.minimum)
        if k < needs:
            raise RequestError(
                f"Head '{method.head}' of {method} needs at least {needs} tokens, but budget {least:g} keeps {k}. "
                "Use a larger budget or `router.minimum`, or another head."
            )
