"""Calibration of a saved model: the threshold behind a promise, from images with masks that the model was not trained on."""

from __future__ import annotations

import numpy as np
import torch

from medtokenbudget.errors import RequestError
from medtokenbudget.runs.held_out import HeldOut
from medtokenbudget.backbone import FeatureStore
from medtokenbudget.model import Guarantee, MedTokenBudget
from medtokenbudget.model.inference import evaluating
from medtokenbudget.routing import Ranker, Selector
from medtokenbudget.routing.guarantee import Promise, group_mean, kept_counts, lesion_kept, pick_threshold
from medtokenbudget.training.pooling import BATCH


@torch.no_grad()
def patch_scores(store: FeatureStore, rows: np.ndarray, selector: Selector) -> np.ndarray:
    """Scores `[n, N]` that a selector ranks the patches of rows by.

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
    """The guarantee that calibration images give; the model is not changed.

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
    named = dict(zip(images.ids, images.groups))
    groups = [named[images.store.ids[row]] for row in rows]
    with evaluating(classifier):
        scores = patch_scores(images.store, rows, classifier.selector)
    n = images.store.n
    most = n if cap is None else classifier.selector.count(cap, n)
    minimum = min(classifier.selector.minimum, most)
    found = pick_threshold(promise, scores, lesion, groups, minimum, most)
    counts = kept_counts(scores, found.value, minimum, most)
    return Guarantee(
        retention=promise.retention,
        coverage=promise.coverage,
        cap=cap,
        threshold=found.value,
        minimum=minimum,
        most=most,
        selector=method,
        bound=found.bound,
        kept=group_mean(lesion_kept(scores, lesion, counts), groups),
        tokens=group_mean(np.where(lesion.any(1), counts, np.nan), groups),
        images=found.images,
        groups=found.groups,
        dataset=images.manifest.name,
        data=images.manifest.hash,
        model=model.fingerprint,
    )
