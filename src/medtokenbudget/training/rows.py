"""Which rows of a store a training uses for what, their order in an epoch, and the seeded noise.

Views are used for training images only; the off-center views of validation images are evaluated on their own.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from medtokenbudget.backbone import FeatureStore
from medtokenbudget.backbone.views import IDENTITY, OFF_CENTER
from medtokenbudget.config import TrainConfig
from medtokenbudget.data import Manifest
from medtokenbudget.data.manifest import listed, require_two_groups
from medtokenbudget.errors import MismatchError, RequestError
from medtokenbudget.runtime import say

SPLIT_SEED = 42


def generator(seed: int, purpose: str, *steps: int) -> torch.Generator:
    """Create a generator that depends only on its arguments, so that a resumed run needs no saved generator state."""
    text = f"{seed}/{purpose}/{'/'.join(map(str, steps))}"
    # Hashed, because seeds that differ in few bits would give streams that look alike. 63 bits: torch takes signed numbers.
    value = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1
    return torch.Generator().manual_seed(value)


@dataclass(frozen=True)
class TrainingRows:
    """Row numbers of a store.

    Attributes:
        train: Original images that a selector learns from: under lesion-first only those with a mask.
        views: Their further views.
        head: What heads behind a fixed selector learn from. No epoch is chosen there, so the selection part cut from training is
            included.
        select: What the epoch is chosen on: original images and, for retention, also the views that are trained on.
        validation: What is reported.
        off_center: The off-center views of the validation images.
    """

    train: np.ndarray
    views: np.ndarray
    head: np.ndarray
    select: np.ndarray
    validation: np.ndarray
    off_center: np.ndarray

    @classmethod
    def of(cls, manifest: Manifest, store: FeatureStore, config: TrainConfig) -> TrainingRows:
        """Find the rows of a training under `config.protocol`; the strict one cuts its selection part from training, by group."""
        check_fits(manifest, store)
        if not len(manifest.part("train")):
            raise RequestError("The manifest has no training images. Split it with `mtb data split`.")
        if config.protocol == "strict" and not len(manifest.part("select")):
            manifest = _with_selection(manifest, config.selection_fraction)
        train, select, validation = (manifest.part(name).ids for name in ("train", "select", "val"))
        head = [*train, *select]
        if config.protocol == "paper":
            if config.selection_metric == "retention":
                raise RequestError(
                    "The paper's protocol chooses the epoch on validation images, whose masks are for evaluation only. "
                    'Use `selection_metric="accuracy"` or `protocol="strict"`.'
                )
            train, select = head, validation
        kinds: set[str] = {OFF_CENTER} if config.views == "off-center" else set()
        if config.views == "all":
            kinds = set(store.views) - {IDENTITY}
        # Lesion-first learns from masks alone; the joint recipe also from the labels of images without one.
        usable = np.ones(len(store), bool) if config.recipe == "joint" else store.has_mask.numpy()
        original, views = _originals(store, train), _views(store, train, kinds)
        return cls(
            train=original[usable[original]],
            views=views[usable[views]],
            head=np.concatenate([_originals(store, head), _views(store, head, kinds)]),
            # Where retention chooses the epoch, views count too: else it would prefer scorers that keep the image center.
            select=np.concatenate(
                [_originals(store, select), _views(store, select, kinds if config.selection_metric == "retention" else set())]
            ),
            validation=_originals(store, validation),
            off_center=_views(store, validation, {OFF_CENTER}),
        )

    def of_epoch(self, store: FeatureStore, config: TrainConfig, epoch: int) -> np.ndarray:
        """Return every image once unchanged and, where it has views, once in one of them, shuffled anew for the epoch."""
        drawn = draw_views(np.asarray(store.ids)[self.views], generator(config.seed, "views", epoch))
        rows = np.concatenate([self.train, self.views[drawn]])
        return rows[epoch_order(store.label.numpy()[rows], config, epoch, len(store.classes)).numpy()]


def _with_selection(manifest: Manifest, share: float) -> Manifest:
    """Hold a share of the training part out as 'select', for this training alone."""
    split = manifest.rows["split"].to_numpy(dtype=object, copy=True)
    train = np.flatnonzero(split == "train")
    groups = np.asarray(manifest.groups, dtype=object)[train].tolist()
    require_two_groups(groups)
    split[train[held_out(manifest.label_index[train], groups, share, SPLIT_SEED)]] = "select"
    return manifest.with_columns(split=split)


def held_out(labels: np.ndarray, groups: Sequence[str], share: float, seed: int) -> np.ndarray:
    """Choose about a share of every class, whole groups at a time: labels and groups `[n]` to `[n]` bool.

    A greedy assignment: the largest groups come first, in random order among equals, and each goes to the part that lacks most
    of what the group contains. Unlike a hash of the group, the choice changes when images are added.
    """
    names, group_of = np.unique(np.asarray(groups, dtype=str), return_inverse=True)
    kinds, label_of = np.unique(labels, return_inverse=True)
    counts = np.zeros((len(names), len(kinds)))
    np.add.at(counts, (group_of, label_of), 1)
    target = np.outer([1 - share, share], counts.sum(0))
    shuffled = np.random.default_rng(seed).permutation(len(names))
    filled = np.zeros_like(target)
    chosen = np.zeros(len(names), dtype=bool)
    for group in shuffled[np.argsort(-counts[shuffled].sum(1), kind="stable")]:
        need = ((target - filled) / target) @ counts[group]
        room = (target - filled).sum(1)
        # Rounded, because sums in another order must not decide between parts that need a group equally.
        chosen[group] = (round(need[1], 9), room[1]) > (round(need[0], 9), room[0])
        filled[int(chosen[group])] += counts[group]
    return chosen[group_of]


def draw_views(names: np.ndarray, noise: torch.Generator) -> np.ndarray:
    """Draw one of the places at which each name occurs; `names` are the images of all views."""
    # Places of one name are next to each other in this order, so a draw is a start and an offset.
    order = np.argsort(names, kind="stable")
    _, first, count = np.unique(names[order], return_index=True, return_counts=True)
    shares = torch.rand(len(first), generator=noise, dtype=torch.float64).numpy()
    return order[first + (shares * count).astype(np.int64)]


def check_fits(manifest: Manifest, store: FeatureStore) -> None:
    """Reject a store that was opened with other classes, labels or masks than the manifest's; it may hold more images."""
    advice = f"Open it with this manifest: FeatureStore.open({str(store.path)!r}, manifest)."
    if store.classes != manifest.classes:
        raise MismatchError.between(f"Store {store.path}", {"classes": manifest.classes}, {"classes": store.classes}, advice)
    place = {name: index for index, name in enumerate(manifest.ids)}
    rows = [(row, place[name]) for row, name in enumerate(store.ids) if name in place and store.views[row] == IDENTITY]
    if not rows:
        raise RequestError(
            f"Store {store.path} has none of the images of this manifest. "
            f"Add them with `mtb extract` and {store.path} as its `store`."
        )
    row, at = np.asarray(rows).T
    for what, differs in (
        ("labels", store.label.numpy()[row] != manifest.label_index[at]),
        ("masks", store.has_mask.numpy()[row] != manifest.rows["mask"].notna().to_numpy()[at]),
    ):
        if differs.any():
            names = listed([manifest.ids[i] for i in at[differs]], 3)
            raise MismatchError(f"The {what} of {differs.sum()} images differ between manifest and store: {names}. {advice}")


@lru_cache
def _say_left_out(store: Path, count: int, reason: str) -> None:
    """Say it once for a store: every part of every training asks."""
    say(f"{count} images could not be extracted and are skipped (see {store / 'errors.jsonl'}). The first: {reason}")


def _originals(store: FeatureStore, ids: list[str]) -> np.ndarray:
    failed = {error.image_id: error.reason for error in store.errors if error.view == IDENTITY}
    if any(name in failed for name in ids):
        _say_left_out(store.path, len(failed), next(iter(failed.values())))
    return np.asarray(store.rows([name for name in ids if name not in failed]), dtype=np.int64)


def _views(store: FeatureStore, ids: list[str], kinds: set[str]) -> np.ndarray:
    wanted = set(ids)
    rows = [i for i, (name, view) in enumerate(zip(store.ids, store.views)) if view in kinds and name in wanted]
    return np.asarray(rows, dtype=np.int64)


def class_weights(label: np.ndarray, classes: int) -> Tensor:
    """Compute weights inverse to the class frequencies, mean 1 over the images; classes that do not occur get 0."""
    counts = np.bincount(label, minlength=classes).astype(np.float64)
    present = counts > 0
    weights = np.where(present, len(label) / (present.sum() * np.maximum(counts, 1)), 0.0)
    return torch.tensor(weights, dtype=torch.float32)


def epoch_order(label: np.ndarray, config: TrainConfig, epoch: int, classes: int) -> Tensor:
    """Order the images of one epoch: shuffled, or drawn so that the classes come equally often."""
    noise = generator(config.seed, "order", epoch)
    if config.class_balance == "sampler":
        weights = class_weights(label, classes)[torch.from_numpy(label)]
        return torch.multinomial(weights, len(label), replacement=True, generator=noise)
    return torch.randperm(len(label), generator=noise)


def require_labels(label: np.ndarray) -> None:
    if (missing := int((label < 0).sum())) > 0:
        raise RequestError(f"{missing} training images have no label. Label them in the manifest, or remove them.")
