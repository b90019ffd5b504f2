"""What people say about the images of a store: labels and lesion patches of a manifest, in the row order that training sees.

Tokens depend on pixels alone and are found by the hash of the image file. Lesion patches are computed here, from the masks that the
manifest names, and cached in the store under the manifest's hash; a mask that another manifest used before is not read again.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from medtokenbudget.backbone.shards import FailedRow, Row
from medtokenbudget.backbone.views import IDENTITY, is_off_center, view_order
from medtokenbudget.data import Manifest, covered_shares, mask_of, patch_labels
from medtokenbudget.errors import MedTokenBudgetError, RequestError
from medtokenbudget.files import read_sealed, sha256_file, sha256_json, write_sealed
from medtokenbudget.tensor_files import load_tensors, save_tensors

_HASHERS = 4
"""Threads."""


@dataclass(frozen=True)
class RowError:
    """An image of a manifest, or a view of it, that has no tokens, and why."""

    image_id: str
    view: str
    reason: str

    def to_json(self) -> dict[str, str]:
        return {"image_id": self.image_id, "view": self.view, "reason": self.reason}


def reason(error: Exception, file: Path | str) -> str:
    """Say why a file could not be used, without its folder: a store is shared, and names no place of this machine."""
    return str(error).replace(str(file), Path(file).name)


@dataclass(frozen=True)
class Annotation:
    """The rows of a store that belong to a manifest: images in the manifest's order, the views of an image beside each other.

    Attributes:
        classes: Class names that `label` points to.
        ids: Image of each row.
        tokens: Row of the tokens in the store, `[n]` int64. Two images with the same content share one.
        label: `[n]` int64, -1 where unknown.
        lesion: `[n, N]` bool.
        covered: `[n, N]` uint8, how much of each patch the mask covers; 255 is all of it.
        has_mask: `[n]` bool.
        errors: Images and views of the manifest without a usable row, with the reason.
        images: SHA-256 of each image file of the manifest by `image_id`, None if it is unknown.
    """

    classes: tuple[str, ...]
    ids: list[str]
    tokens: np.ndarray
    label: np.ndarray
    lesion: np.ndarray
    covered: np.ndarray
    has_mask: np.ndarray
    errors: list[RowError]
    images: dict[str, str | None]


@dataclass(frozen=True)
class _Wanted:
    """A mask as one row sees it: the file, its hash, the size of the image and the view."""

    file: Path
    mask: str
    row: Row

    @property
    def key(self) -> str:
        width, height = self.row.size
        return sha256_json([self.mask, width, height, self.row.geometry.to_json()])


def annotate(
    store: Path, grid: tuple[int, int], rows: Sequence[Row], failures: Sequence[FailedRow], manifest: Manifest
) -> Annotation:
    """Find the rows of a manifest's images and compute their lesion patches.

    Args:
        store: Folder of the store; hashes and lesion patches are cached in it.
        grid: (h, w) of the tokens.
        rows: Every row of the store.
        failures: Rows that could not be made.
        manifest: The images with their labels and masks.

    Returns:
        The annotation. An image that is neither in the store nor among its failures has no row and no error in it.
    """
    cache = _Cache(store, manifest, grid[0] * grid[1])
    images, masks = hashes_of(store, manifest, cache.images, cache.masks)
    at: dict[str, list[int]] = {}
    for number, row in enumerate(rows):
        at.setdefault(row.image, []).append(number)
    failed: dict[str, list[FailedRow]] = {}
    for failure in failures:
        failed.setdefault(failure.image, []).append(failure)
    ids: list[str] = []
    places: list[int] = []
    source: list[int] = []
    wanted: list[_Wanted | None] = []
    errors: list[RowError] = []
    for i, image_id in enumerate(manifest.ids):
        image, mask, mask_file = images[i], masks[i], manifest.mask_path(i)
        if image is None:
            errors.append(RowError(image_id, IDENTITY, f"{manifest.image_path(i).name} cannot be read."))
            continue
        found = sorted(at.get(image, []), key=lambda number: view_order(rows[number].view))
        have = {rows[number].view for number in found}
        errors += [
            RowError(image_id, f.view, f.reason)
            for f in failed.get(image, [])
            if f.view not in have and not (mask_file is None and is_off_center(f.view))
        ]
        if mask_file is not None and mask is None:
            errors += [RowError(image_id, rows[number].view, f"{mask_file.name} cannot be read.") for number in found]
            continue
        for number in found:
            if mask_file is None and is_off_center(rows[number].view):
                continue  # made for another manifest, in which the image has a mask
            ids.append(image_id)
            places.append(number)
            source.append(i)
            wanted.append(None if mask_file is None or mask is None else _Wanted(mask_file, mask, rows[number]))
    lesion, reasons = cache.lesions([one for one in wanted if one is not None], grid)
    good = np.array([one is None or one.key not in reasons for one in wanted], bool)
    errors += [
        RowError(name, one.row.view, reasons[one.key]) for name, one in zip(ids, wanted) if one is not None and one.key in reasons
    ]
    kept = [i for i, fine in enumerate(good) if fine]
    nothing = np.zeros((2, grid[0] * grid[1]), np.uint8)
    patches = [nothing if one is None else lesion[one.key] for one in (wanted[i] for i in kept)]
    both = np.stack(patches) if patches else np.zeros((0, *nothing.shape), np.uint8)
    cache.save(dict(zip(manifest.ids, zip(images, masks))), manifest)
    return Annotation(
        classes=manifest.classes,
        ids=[ids[i] for i in kept],
        tokens=np.asarray(places, np.int64)[kept],
        label=manifest.label_index[np.asarray(source, np.int64)[kept]],
        lesion=both[:, 0].astype(bool),
        covered=np.ascontiguousarray(both[:, 1]),
        has_mask=np.array([wanted[i] is not None for i in kept], bool),
        errors=_in_order(errors, manifest.ids),
        images=dict(zip(manifest.ids, images)),
    )


def hashes_of(
    store: Path, manifest: Manifest, images: Mapping[str, str] | None = None, masks: Mapping[str, str] | None = None
) -> tuple[list[str | None], list[str | None]]:
    """SHA-256 of each image and mask file; for files that are not on this machine, what `images` and `masks` say by image_id."""
    index = FileIndex(store)
    numbers = range(len(manifest))
    found = index.hashes(manifest.image_path(i) for i in numbers)
    found_masks = index.hashes(manifest.mask_path(i) for i in numbers)
    index.save()
    named = zip(manifest.ids, found, found_masks, manifest.rows["mask"])
    both = [
        (image or (images or {}).get(name), None if path is None else mask or (masks or {}).get(name))
        for name, image, mask, path in named
    ]
    return [image for image, _ in both], [mask for _, mask in both]


def _in_order(errors: list[RowError], ids: list[str]) -> list[RowError]:
    place = {name: i for i, name in enumerate(ids)}
    unique = {(error.image_id, error.view): error for error in errors}
    return sorted(unique.values(), key=lambda error: (place[error.image_id], view_order(error.view)))


class _Cache:
    """Lesion patches by mask and view, in one file for each manifest."""

    def __init__(self, store: Path, manifest: Manifest, n: int) -> None:
        self._n = n
        self._folder = store / "cache"
        self._file = self._folder / f"{manifest.hash[:16]}.safetensors"
        found = _read(self._file, n)
        self._lesions, about = found if found is not None else ({}, {})
        self._stored = set(self._lesions) if found is not None else None
        self.images: dict[str, str] = about.get("images", {})
        self.masks: dict[str, str] = about.get("masks", {})
        self._used: dict[str, np.ndarray] = {}

    def lesions(self, wanted: Sequence[_Wanted], grid: tuple[int, int]) -> tuple[dict[str, np.ndarray], dict[str, str]]:
        """Lesion patches and covered shares, uint8 [2, N], by key, and the reasons for those that cannot be had."""
        keys = {one.key for one in wanted}
        if not keys <= set(self._lesions):
            for other in sorted(self._folder.glob("*.safetensors")):
                found = _read(other, self._n)
                self._lesions = {**(found[0] if found else {}), **self._lesions}
        by_mask: dict[tuple[str, Path], dict[str, Row]] = {}
        for one in wanted:
            if one.key not in self._lesions:
                by_mask.setdefault((one.mask, one.file), {})[one.key] = one.row
        reasons: dict[str, str] = {}
        with ThreadPoolExecutor(min(4, os.cpu_count() or 1), "mtb-mask") as pool:
            for made, failed in pool.map(lambda job: _patches(job[0][1], job[1], grid), by_mask.items()):
                self._lesions |= made
                reasons |= failed
        self._used = {key: self._lesions[key] for key in keys if key not in reasons}
        return self._used, reasons

    def save(self, hashes: Mapping[str, tuple[str | None, str | None]], manifest: Manifest) -> None:
        """Write the file unless it says the same; a store that cannot be written to is read all the same."""
        images = {name: image for name, (image, _) in hashes.items() if image is not None}
        masks = {name: mask for name, (_, mask) in hashes.items() if mask is not None}
        if self._stored == set(self._used) and images == self.images and masks == self.masks:
            return
        keys = sorted(self._used)
        both = np.stack([self._used[key] for key in keys], axis=1) if keys else np.zeros((2, 0, self._n), np.uint8)
        about = {
            "keys": keys,
            "images": images,
            "masks": masks,
            "name": manifest.name,
            "hash": manifest.hash,
            "source": manifest.source,
        }
        try:
            save_tensors(self._file, dict(zip(("lesion", "covered"), torch.from_numpy(both))), about)
        except MedTokenBudgetError:
            return


def _read(path: Path, n: int) -> tuple[dict[str, np.ndarray], dict[str, Any]] | None:
    """What `_Cache.lesions` gives, and what else the file says; None for a file that is missing or damaged: it is made again."""
    try:
        tensors, about = load_tensors(path)
        both = np.stack([tensors[name].numpy() for name in ("lesion", "covered")], axis=1)
        if both.shape != (len(about["keys"]), 2, n):
            return None
        return dict(zip(about["keys"], both)), about
    except (RequestError, ValueError, KeyError, TypeError):
        return None


def known_manifests(store: Path) -> tuple[list[dict[str, Any]], list[str]]:
    """Name, source, hash and images (image_id to SHA-256) of the manifests that this store was opened with, and damaged files."""
    known: list[dict[str, Any]] = []
    damaged: list[str] = []
    for path in sorted((store / "cache").glob("*.safetensors")):
        try:
            known.append(load_tensors(path)[1])
        except RequestError:
            damaged.append(f"cache/{path.name}")
    return known, damaged


def _patches(file: Path, rows: Mapping[str, Row], grid: tuple[int, int]) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    made: dict[str, np.ndarray] = {}
    failed: dict[str, str] = {}
    for key, row in rows.items():
        try:
            mask = row.geometry.of(mask_of(row.size, file))
            made[key] = np.stack([patch_labels(mask, grid, whole=False).astype(np.uint8), covered_shares(mask, grid)])
        except RequestError as error:
            failed[key] = reason(error, file)
    return made, failed


class FileIndex:
    """Caches file hashes by path, size and mtime in the store's `cache/files.json`, so that unchanged files are not read again.

    The paths themselves are hashed, because stores are shared. The cache can be deleted at any time; it only saves time.

    Args:
        store: The folder of the store; `cache/files.json` in it is read now and written by `save`.
    """

    def __init__(self, store: Path) -> None:
        self._file = store / "cache" / "files.json"
        self._known: dict[str, tuple[int, int, str]] = {}
        self._changed = self.damaged = False
        try:
            values = read_sealed(self._file, "") if self._file.is_file() else {}
            self._known = {str(key): (int(size), int(mtime), str(digest)) for key, (size, mtime, digest) in values.items()}
        except (MedTokenBudgetError, ValueError, TypeError, AttributeError):
            self._changed = self.damaged = True  # a damaged cache is made again

    def hashes(self, paths: Iterable[Path | None], again: bool = False) -> list[str | None]:
        """Hash each file (SHA-256), from the cache where size and mtime are the same.

        Args:
            paths: Files; None stays None.
            again: Read every file, whatever is remembered.

        Returns:
            One hash per path. A file that is not there has the hash that was seen last, or None if it was never seen.
        """
        absolute = [None if path is None else os.path.abspath(path) for path in paths]
        with ThreadPoolExecutor(_HASHERS, "mtb-hash") as pool:
            hashes = dict(pool.map(lambda path: (path, self._hash(path, again)), {path for path in absolute if path is not None}))
        return [None if path is None else hashes[path] for path in absolute]

    def _hash(self, path: str, again: bool) -> str | None:
        key = sha256_json(path)[:32]
        known = self._known.get(key)
        try:
            status = os.stat(path)
            if known is not None and not again and known[:2] == (status.st_size, status.st_mtime_ns):
                return known[2]
            digest = sha256_file(path)
        except OSError:
            return None if known is None else known[2]
        if known != (status.st_size, status.st_mtime_ns, digest):
            self._known[key] = (status.st_size, status.st_mtime_ns, digest)
            self._changed = True
        return digest

    def save(self) -> None:
        """Write the cache if it changed; a store that cannot be written to is read all the same."""
        if not self._changed:
            return
        try:
            write_sealed(self._file, self._known)
            self._changed = False
        except MedTokenBudgetError:
            return
