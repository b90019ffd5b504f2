"""Which rows of a store are for what (training, choosing the epoch, reporting), their order in an epoch, and the seeded noise.

Views are used for training images only; the off-center views of validation images are evaluated on their own.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from medtokenbudget.backbone import FeatureStore
from medtokenbudget.backbone.views import IDENTITY, OFF_CENTER
from medtokenbudget.config import TrainConfig
from medtokenbudget.data import Manifest, cut_selection
from medtokenbudget.data.manifest import listed
from medtokenbudget.errors import MismatchError, RequestError
from medtokenbudget.progress import say

SPLIT_SEED = 42


def generator(seed: int, purpose: str, *steps: int, device: torch.device | str = "cpu") -> torch.Generator:
    """Create a generator that depends only on its arguments, so that a resumed run needs no saved generator state."""
    text = f"{seed}/{purpose}/{'/'.join(map(str, steps))}"
    value = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1
    return torch.Generator(device=device).manual_seed(value)


@dataclass(frozen=True)
class Parts:
    """Row numbers of a store.

    Attributes:
        train: Original training images.
        train_views: Their further views.
        head: What heads on pooled tokens learn from. No epoch is chosen there, so the selection part cut from training is included.
        select: What the epoch is chosen on: original images and, for retention, also the views that are trained on.
        validation: What is reported.
        off_center: The off-center views of the validation images.
    """

    train: np.ndarray
    train_views: np.ndarray
    head: np.ndarray
    select: np.ndarray
    validation: np.ndarray
    off_center: np.ndarray


class ViewDraw:
    """Draws one view of each image that has any: each epoch sees every image once unchanged and once as a random view."""

    def __init__(self, store: FeatureStore, rows: np.ndarray) -> None:
        names = np.asarray(store.ids)[rows]
        order = np.argsort(names, kind="stable")
        self.rows = len(rows)
        self._sorted = rows[order]
        _, self._first, self._count = np.unique(names[order], return_index=True, return_counts=True)

    def __len__(self) -> int:
        return len(self._first)

    def draw(self, noise: torch.Generator) -> np.ndarray:
        """A row for each image."""
        shares = torch.rand(len(self), generator=noise, dtype=torch.float64).numpy()
        return self._sorted[self._first + (shares * self._count).astype(np.int64)]


def make_parts(manifest: Manifest, store: FeatureStore, config: TrainConfig) -> Parts:
    """Rows for a training under `config.protocol`; the strict protocol cuts its selection part from training, by group."""
    check_fits(manifest, store)
    if not len(manifest.part("train")):
        raise RequestError("The manifest has no training images. Split it with `mtb data split`.")
    if config.protocol == "strict" and not len(manifest.part("select")):
        manifest = cut_selection(manifest, config.selection_fraction, SPLIT_SEED, balanced=True)
    train, select, validation = (manifest.part(name) for name in ("train", "select", "val"))
    if config.protocol == "paper":
        train_ids, select_ids = train.ids + select.ids, validation.ids
        if config.selection_metric == "retention":
            raise RequestError(
                "The paper's protocol chooses the epoch on validation images, whose masks are for evaluation only. "
                "Use --selection-metric accuracy or --protocol strict."
            )
    else:
        train_ids, select_ids = train.ids, select.ids
    kinds = _kinds(store, config)
    select_kinds = kinds if config.selection_metric == "retention" else ()
    head_ids = [*train_ids, *select_ids] if config.protocol == "strict" else train_ids
    return Parts(
        train=_rows(store, train_ids, IDENTITY),
        train_views=_present(store, train_ids, kinds),
        head=np.concatenate([_rows(store, head_ids, IDENTITY), _present(store, head_ids, kinds)]),
        select=np.concatenate([_rows(store, select_ids, IDENTITY), _present(store, select_ids, select_kinds)]),
        validation=_rows(store, validation.ids, IDENTITY),
        off_center=_present(store, validation.ids, (OFF_CENTER,)),
    )


def check_fits(manifest: Manifest, store: FeatureStore) -> None:
    """Reject a store that was opened with other classes, labels or masks than the manifest's; it may hold more images."""
    advice = f"Open it with this manifest: FeatureStore.open({str(store.path)!r}, manifest)."
    if store.classes != manifest.classes:
        wanted, found = {"classes": manifest.classes}, {"classes": store.classes}
        raise MismatchError.between(f"Store {store.path}", wanted, found, advice)
    place = {name: index for index, name in enumerate(manifest.ids)}
    rows = [(row, place[name]) for row, name in enumerate(store.ids) if name in place and store.views[row] == IDENTITY]
    if not rows:
        raise RequestError(
            f"Store {store.path} has none of the images of this manifest. "
            f"Run `mtb extract MANIFEST --store {store.path}` to add them."
        )
    row, at = np.asarray(rows).T
    masked = manifest.rows["mask"].notna().to_numpy()[at]
    for what, differs in (
        ("labels", store.label.numpy()[row] != manifest.label_index[at]),
        ("masks", store.has_mask.numpy()[row] != masked),
    ):
        if differs.any():
            names = listed([manifest.ids[i] for i in at[differs]], 3)
            raise MismatchError(f"The {what} of {differs.sum()} images differ between manifest and store: {names}. {advice}")


@lru_cache
def _say_left_out(store: Path, count: int, reason: str) -> None:
    """Once for a store: every part of every training asks."""
    say(f"{count} images could not be extracted and are skipped (see {store / 'errors.jsonl'}). The first: {reason}")


def _rows(store: FeatureStore, ids: list[str], view: str) -> np.ndarray:
    """Rows of the images; those whose extraction failed are left out and counted aloud."""
    failed = {error.image_id: error.reason for error in store.errors if error.view == view}
    left_out = [name for name in ids if name in failed]
    if left_out:
        _say_left_out(store.path, len(failed), next(iter(failed.values())))
    return np.asarray(store.rows([name for name in ids if name not in failed], view), dtype=np.int64)


def _present(store: FeatureStore, ids: list[str], views: tuple[str, ...]) -> np.ndarray:
    wanted, kinds = set(ids), set(views)
    rows = [i for i, (name, view) in enumerate(zip(store.ids, store.views)) if view in kinds and name in wanted]
    return np.asarray(rows, dtype=np.int64)


def _kinds(store: FeatureStore, config: TrainConfig) -> tuple[str, ...]:
    """Return the views that a training uses beside the original images."""
    if config.views == "all":
        return tuple(sorted(set(store.views) - {IDENTITY}))
    return (OFF_CENTER,) if config.views == "off-center" else ()


def class_weights(label: np.ndarray, classes: int) -> Tensor:
    """Weights inverse to the class frequencies, mean 1 over the images; classes that do not occur get 0."""
    counts = np.bincount(label, minlength=classes).astype(np.float64)
    present = counts > 0
    weights = np.where(present, len(label) / (present.sum() * np.maximum(counts, 1)), 0.0)
    return torch.tensor(weights, dtype=torch.float32)


def epoch_order(label: np.ndarray, config: TrainConfig, epoch: int, classes: int) -> Tensor:
    """Positions of one epoch's images: shuffled, or drawn so that the classes come equally often."""
    noise = generator(config.seed, "order", epoch)
    if config.class_balance == "sampler":
        weights = class_weights(label, classes)[torch.from_numpy(label)]
        return torch.multinomial(weights, len(label), replacement=True, generator=noise)
    return torch.randperm(len(label), generator=noise)


def require_labels(label: np.ndarray, what: str) -> None:
    """Reject images without a label."""
    if len(label) and int(label.min()) < 0:
        count = int((label < 0).sum())
        raise RequestError(f"{count} {what} images have no label. Label them in the manifest, or remove them.")
