"""What people say about the images of a store: labels and lesion patches of a manifest, in the row order that training sees.

Tokens depend on pixels alone and are found by the hash of the image file. Lesion patches are computed here, from the masks that the
manifest names, and cached in the store under the manifest's hash; a mask that another manifest used before is not read again.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from medtokenbudget.backbone.views import IDENTITY, is_off_center, view_order
from medtokenbudget.data import Manifest, covered_shares, mask_of, patch_labels
from medtokenbudget.errors import MedTokenBudgetError, RequestError
from medtokenbudget.files import read_sealed, sha256_file, sha256_json, write_sealed
from medtokenbudget.tensor_files import load_tensors, save_tensors

if TYPE_CHECKING:
    from medtokenbudget.backbone.store import FailedRow, Row

_THREADS = 4


@dataclass(frozen=True)
class RowError:
    """An image of a manifest, or a view of it, that has no tokens, and why."""

    image_id: str
    view: str
    reason: str

    def to_json(self) -> dict[str, str]:
        return dict(vars(self))


def reason(error: Exception, file: Path | str) -> str:
    """Say why a file could not be used, without its folder: a store is shared, and names no place of this machine."""
    return str(error).replace(str(file), Path(file).name)


@dataclass(frozen=True)
class Annotation:
    """The rows of a store that belong to a manifest: images in the manifest's order, the views of an image next to each other.

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
    n = grid[0] * grid[1]
    cache = store / "cache" / f"{manifest.hash[:16]}.safetensors"
    lesions, about = _read(cache, n) or ({}, {})
    before = (set(lesions), about.get("images"), about.get("masks"))
    images, masks = hashes_of(store, manifest, about.get("images", {}), about.get("masks", {}))
    rows_of: dict[str, list[int]] = defaultdict(list)
    for number, row in enumerate(rows):
        rows_of[row.image].append(number)
    failures_of: dict[str, list[FailedRow]] = defaultdict(list)
    for failure in failures:
        failures_of[failure.image].append(failure)
    taken: list[tuple[int, int, str | None]] = []  # image of the manifest, row of the store, key of the lesion patches
    wanted: dict[Path, dict[str, Row]] = defaultdict(dict)
    errors: list[RowError] = []
    for i, image_id in enumerate(manifest.ids):
        image, mask, mask_file = images[i], masks[i], manifest.mask_path(i)
        if image is None:
            errors.append(RowError(image_id, IDENTITY, f"{manifest.image_path(i).name} cannot be read."))
            continue
        # Off-center rows of an image without a mask were made for another manifest, in which it has one.
        usable = {rows[number].view: number for number in rows_of[image] if mask_file or not is_off_center(rows[number].view)}
        for failure in failures_of[image]:
            if failure.view not in usable and (mask_file or not is_off_center(failure.view)):
                errors.append(RowError(image_id, failure.view, failure.reason))
        for view in sorted(usable, key=view_order):
            if mask_file is None:
                taken.append((i, usable[view], None))
            elif mask is None:
                errors.append(RowError(image_id, view, f"{mask_file.name} cannot be read."))
            else:
                row = rows[usable[view]]
                key = sha256_json([mask, *row.size, row.geometry.to_json()])
                taken.append((i, usable[view], key))
                wanted[mask_file][key] = row
    lesions, reasons = _lesions(cache.parent, lesions, wanted, grid)
    errors += [RowError(manifest.ids[i], rows[number].view, reasons[key]) for i, number, key in taken if key in reasons]
    taken = [one for one in taken if one[2] not in reasons]
    hashes = [{name: one for name, one in zip(manifest.ids, values) if one is not None} for values in (images, masks)]
    if before != (set(lesions), *hashes):
        _write(cache, lesions, n, dict(zip(("images", "masks"), hashes)), manifest)
    nothing = np.zeros((2, n), np.uint8)
    patches = np.array([nothing if key is None else lesions[key] for _, _, key in taken], np.uint8).reshape(-1, 2, n)
    order = {name: i for i, name in enumerate(manifest.ids)}
    unique = {(error.image_id, error.view): error for error in errors}
    return Annotation(
        classes=manifest.classes,
        ids=[manifest.ids[i] for i, _, _ in taken],
        tokens=np.array([number for _, number, _ in taken], np.int64),
        label=manifest.label_index[np.array([i for i, _, _ in taken], np.int64)],
        lesion=patches[:, 0].astype(bool),
        covered=np.ascontiguousarray(patches[:, 1]),
        has_mask=np.array([key is not None for _, _, key in taken], bool),
        errors=sorted(unique.values(), key=lambda error: (order[error.image_id], view_order(error.view))),
        images=dict(zip(manifest.ids, images)),
    )


def hashes_of(
    store: Path, manifest: Manifest, images: Mapping[str, str] | None = None, masks: Mapping[str, str] | None = None
) -> tuple[list[str | None], list[str | None]]:
    """Hash each image and mask file; for files that are not on this machine, take what `images` and `masks` say by image_id."""
    index, numbers = FileIndex(store), range(len(manifest))
    image_hashes = index.hashes(manifest.image_path(i) for i in numbers)
    mask_hashes = index.hashes(manifest.mask_path(i) for i in numbers)
    index.save()
    return (
        [found or (images or {}).get(name) for name, found in zip(manifest.ids, image_hashes)],
        [
            None if path is None else found or (masks or {}).get(name)
            for name, found, path in zip(manifest.ids, mask_hashes, manifest.rows["mask"])
        ],
    )


def _lesions(
    folder: Path, cached: dict[str, np.ndarray], wanted: Mapping[Path, Mapping[str, Row]], grid: tuple[int, int]
) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """Return lesion patches and covered shares, uint8 [2, N], by key, and the reasons for those that cannot be had.

    Args:
        folder: The cache, in which other manifests may have the same masks.
        cached: Those that are known already.
        wanted: Rows by mask file and key.
        grid: (h, w) of the tokens.
    """
    keys = {key for rows in wanted.values() for key in rows}
    if not keys <= set(cached):
        for path in sorted(folder.glob("*.safetensors")):
            other = _read(path, grid[0] * grid[1])
            cached = {**(other[0] if other else {}), **cached}

    def compute(job: tuple[Path, Mapping[str, Row]]) -> dict[str, np.ndarray | str]:
        file, rows = job
        values: dict[str, np.ndarray | str] = {}
        for key, row in rows.items():
            if key not in cached:
                try:
                    mask = row.geometry.of(mask_of(row.size, file))
                    values[key] = np.stack([patch_labels(mask, grid, whole=False).astype(np.uint8), covered_shares(mask, grid)])
                except RequestError as error:
                    values[key] = reason(error, file)
        return values

    lesions: dict[str, np.ndarray] = {key: cached[key] for key in keys & cached.keys()}
    reasons: dict[str, str] = {}
    with ThreadPoolExecutor(_THREADS, "mtb-mask") as pool:
        for values in pool.map(compute, wanted.items()):
            lesions |= {key: value for key, value in values.items() if not isinstance(value, str)}
            reasons |= {key: value for key, value in values.items() if isinstance(value, str)}
    return lesions, reasons


def _write(path: Path, lesions: Mapping[str, np.ndarray], n: int, hashes: Mapping[str, Any], manifest: Manifest) -> None:
    keys = sorted(lesions)
    both = np.array([lesions[key] for key in keys], np.uint8).reshape(-1, 2, n)
    tensors = {name: torch.from_numpy(both[:, i]) for i, name in enumerate(("lesion", "covered"))}
    about = {"keys": keys, **hashes, "name": manifest.name, "hash": manifest.hash, "source": manifest.source}
    with suppress(MedTokenBudgetError):  # a store that cannot be written to is read all the same
        save_tensors(path, tensors, about)


def _read(path: Path, n: int) -> tuple[dict[str, np.ndarray], dict[str, Any]] | None:
    """Read lesion patches by key, and what else the file says; None for a file that is missing or damaged: it is made again."""
    try:
        tensors, about = load_tensors(path)
        both = np.stack([tensors[name].numpy() for name in ("lesion", "covered")], axis=1)
        return (dict(zip(about["keys"], both)), about) if both.shape == (len(about["keys"]), 2, n) else None
    except (RequestError, ValueError, KeyError, TypeError):
        return None


def known_manifests(store: Path) -> tuple[list[dict[str, Any]], list[str]]:
    """Return name, source, hash and images (image_id to SHA-256) of the manifests of this store, and the damaged files of them."""
    known: list[dict[str, Any]] = []
    damaged: list[str] = []
    for path in sorted((store / "cache").glob("*.safetensors")):
        try:
            known.append(load_tensors(path)[1])
        except RequestError:
            damaged.append(f"cache/{path.name}")
    return known, damaged


class FileIndex:
    """Caches file hashes by path, size and mtime in the store's `cache/files.json`, so that unchanged files are not read again.

    The paths themselves are hashed, because stores are shared. The cache can be deleted at any time; it only saves time.
    """

    def __init__(self, store: Path) -> None:
        self._file = store / "cache" / "files.json"
        self._known: dict[str, tuple[int, int, str]] = {}
        self._changed = self.damaged = False
        try:
            values = read_sealed(self._file, "") if self._file.is_file() else {}
            self._known = {str(key): (int(size), int(mtime), str(digest)) for key, (size, mtime, digest) in values.items()}
        except (MedTokenBudgetError, ValueError, TypeError):
            self._changed = self.damaged = True  # a damaged cache is made again

    def hashes(self, paths: Iterable[Path | None], again: bool = False) -> list[str | None]:
        """Hash each file (SHA-256), from the cache where size and mtime are the same.

        Args:
            paths: Files; None stays None.
            again: Read every file, whatever is remembered.

        Returns:
            One hash per path. A file that does not exist has the hash that was seen last, or None if it was never seen.
        """
        absolute = [None if path is None else os.path.abspath(path) for path in paths]
        with ThreadPoolExecutor(_THREADS, "mtb-hash") as pool:
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
        if self._changed:
            with suppress(MedTokenBudgetError):
                write_sealed(self._file, self._known)
                self._changed = False
