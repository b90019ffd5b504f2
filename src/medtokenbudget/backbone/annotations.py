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
from medtokenbudget.files import load_tensors, read_sealed, save_tensors, sha256_file, sha256_json, write_sealed

if TYPE_CHECKING:
    from medtokenbudget.backbone.store import FailedRow, Row

_THREADS = 4


@dataclass(frozen=True)
class RowError:
    """An image of a manifest, or a view of it, that has no tokens, and why."""

    image_id: str
    view: str
    reason: str


def reason(error: Exception, file: Path | str) -> str:
    """Say why a file could not be used, without its folder: a store is shared, and names no place of this machine."""
    return str(error).replace(str(file), Path(file).name)


@dataclass(frozen=True)
class Annotation:
    """The rows of a store that belong to a manifest: images in the manifest's order, the views of an image next to each other."""

    classes: tuple[str, ...]
    """Class names that `label` points to."""
    ids: list[str]
    """Image of each row."""
    tokens: np.ndarray
    """Row of the tokens in the store, [n] int64. Two images with the same content share one."""
    label: np.ndarray
    """[n] int64, -1 where unknown."""
    lesion: np.ndarray
    """[n, N] bool."""
    covered: np.ndarray
    """[n, N] uint8, how much of each patch the mask covers; 255 is all of it."""
    has_mask: np.ndarray
    """[n] bool."""
    errors: list[RowError]
    """Images and views of the manifest without a usable row, with the reason."""
    images: dict[str, str | None]
    """SHA-256 of each image file of the manifest by `image_id`, None if it is unknown."""


def annotate(
    store: Path, grid: tuple[int, int], rows: Sequence[Row], failures: Sequence[FailedRow], manifest: Manifest
) -> Annotation:
    """Find the rows of a manifest's images and compute their lesion patches; hashes and lesion patches are cached in the store.

    An image that is neither in the rows of the store nor among its failures has no row and no error in the annotation.
    """
    n = grid[0] * grid[1]
    cache = store / "cache" / f"{manifest.hash[:16]}.safetensors"
    cached, before = _read_cache(cache, n)
    images, masks = hashes_of(store, manifest, before.get("images"), before.get("masks"))
    rows_of: dict[str, list[int]] = defaultdict(list)
    for number, row in enumerate(rows):
        rows_of[row.image].append(number)
    failures_of: dict[str, list[FailedRow]] = defaultdict(list)
    for failure in failures:
        failures_of[failure.image].append(failure)
    taken: list[tuple[int, int, str | None]] = []  # image of the manifest, row of the store, key of the lesion patches
    wanted: dict[Path, dict[str, Row]] = defaultdict(dict)
    errors: dict[tuple[int, str], str] = {}  # by image of the manifest and view
    for i, (image, mask) in enumerate(zip(images, masks)):
        mask_file = manifest.mask_path(i)
        if image is None:
            errors[i, IDENTITY] = f"{manifest.image_path(i).name} cannot be read."
            continue
        # Off-center rows of an image without a mask were made for another manifest, in which it has one.
        usable = {rows[number].view: number for number in rows_of[image] if mask_file or not is_off_center(rows[number].view)}
        for failure in failures_of[image]:
            # A row that failed once may have been made since, in a later shard.
            if failure.view not in usable and (mask_file or not is_off_center(failure.view)):
                errors[i, failure.view] = failure.reason
        for view in sorted(usable, key=view_order):
            row, key = rows[usable[view]], None
            if mask_file is not None and mask is None:
                errors[i, view] = f"{mask_file.name} cannot be read."
                continue
            if mask_file is not None:
                # With the size of the image: a mask is refused if its aspect ratio is another one.
                key = sha256_json([mask, *row.size, row.geometry.to_json()])
                wanted[mask_file][key] = row
            taken.append((i, usable[view], key))
    lesions, reasons = _lesions(cache.parent, cached, wanted, grid)
    errors |= {(i, rows[number].view): reasons[key] for i, number, key in taken if key in reasons}
    taken = [one for one in taken if one[2] not in reasons]
    about: dict[str, Any] = {"name": manifest.name, "hash": manifest.hash, "source": manifest.source}
    for name, hashes in (("images", images), ("masks", masks)):
        # Kept with the lesion patches, so that a store opens on a machine that has neither images nor masks.
        about[name] = {image_id: digest for image_id, digest in zip(manifest.ids, hashes) if digest is not None}
    if set(lesions) != set(cached) or any(before.get(name) != about[name] for name in ("images", "masks")):
        _write_cache(cache, lesions, n, about)
    nothing = np.zeros((2, n), np.uint8)
    patches = np.array([nothing if key is None else lesions[key] for _, _, key in taken], np.uint8).reshape(-1, 2, n)
    # In the order of the manifest, so that `errors.jsonl` has equal bytes for equal data.
    in_order = sorted(errors, key=lambda place: (place[0], view_order(place[1])))
    return Annotation(
        classes=manifest.classes,
        ids=[manifest.ids[i] for i, _, _ in taken],
        tokens=np.array([number for _, number, _ in taken], np.int64),
        label=manifest.label_index[np.array([i for i, _, _ in taken], np.int64)],
        lesion=patches[:, 0].astype(bool),
        covered=np.ascontiguousarray(patches[:, 1]),
        has_mask=np.array([key is not None for _, _, key in taken], bool),
        errors=[RowError(manifest.ids[i], view, errors[i, view]) for i, view in in_order],
        images=dict(zip(manifest.ids, images)),
    )


def hashes_of(
    store: Path, manifest: Manifest, images: Mapping[str, str] | None = None, masks: Mapping[str, str] | None = None
) -> tuple[list[str | None], list[str | None]]:
    """Hash each image and mask file; for files that are not on this machine, take what `images` and `masks` say by image_id."""
    index, numbers = FileIndex(store), range(len(manifest))

    def hashes(paths: Sequence[Path | None], known: Mapping[str, str]) -> list[str | None]:
        digests = zip(manifest.ids, paths, index.hashes(paths))
        return [digest or (None if path is None else known.get(name)) for name, path, digest in digests]

    of_images = hashes([manifest.image_path(i) for i in numbers], images or {})
    of_masks = hashes([manifest.mask_path(i) for i in numbers], masks or {})
    index.save()
    return of_images, of_masks


def _lesions(
    folder: Path, cached: Mapping[str, np.ndarray], wanted: Mapping[Path, Mapping[str, Row]], grid: tuple[int, int]
) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """Return lesion patches and covered shares, uint8 [2, N], of the `wanted` rows by key, and the reasons where there are none."""
    keys = {key for rows in wanted.values() for key in rows}
    known = dict(cached)
    if not keys <= set(known):  # other manifests may have the same masks
        for path in sorted(folder.glob("*.safetensors")):
            known = {**_read_cache(path, grid[0] * grid[1])[0], **known}
    lesions = {key: known[key] for key in keys & known.keys()}
    reasons: dict[str, str] = {}

    def compute(file: Path) -> None:
        for key, row in wanted[file].items():
            if key not in known:
                try:
                    lesions[key] = mask_patches(file, row, grid)
                except RequestError as error:
                    reasons[key] = reason(error, file)

    with ThreadPoolExecutor(_THREADS, "mtb-mask") as pool:
        list(pool.map(compute, wanted))
    return lesions, reasons


def mask_patches(file: Path, row: Row, grid: tuple[int, int]) -> np.ndarray:
    """Compute what a mask says about the patches of a row: lesion patches and covered shares, uint8 [2, N]."""
    mask = row.geometry.of(mask_of(row.size, file))
    return np.stack([patch_labels(mask, grid, whole=False).astype(np.uint8), covered_shares(mask, grid)])


def _write_cache(path: Path, lesions: Mapping[str, np.ndarray], n: int, about: Mapping[str, Any]) -> None:
    keys = sorted(lesions)
    both = np.array([lesions[key] for key in keys], np.uint8).reshape(-1, 2, n)
    tensors = {name: torch.from_numpy(both[:, i]) for i, name in enumerate(("lesion", "covered"))}
    with suppress(MedTokenBudgetError):  # a store that cannot be written to is read all the same
        save_tensors(path, tensors, {"keys": keys, **about})


def _read_cache(path: Path, n: int) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Read lesion patches by key, and what else the file says; nothing from a missing or damaged file, which is made again."""
    try:
        tensors, about = load_tensors(path)
        both = np.stack([tensors[name].numpy() for name in ("lesion", "covered")], axis=1)
        return (dict(zip(about["keys"], both)), about) if both.shape == (len(about["keys"]), 2, n) else ({}, {})
    except (RequestError, ValueError, KeyError, TypeError):
        return {}, {}


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
            self._known = {key: (size, mtime, digest) for key, (size, mtime, digest) in values.items()}
        except (MedTokenBudgetError, ValueError, TypeError):
            self._changed = self.damaged = True  # a damaged cache is made again

    def hashes(self, paths: Iterable[Path | None], again: bool = False) -> list[str | None]:
        """Hash each file (SHA-256), from the cache where size and mtime are the same unless it is to be read `again`.

        A file that does not exist has the hash that was seen last, or None if it was never seen.
        """
        absolute = [None if path is None else os.path.abspath(path) for path in paths]
        with ThreadPoolExecutor(_THREADS, "mtb-hash") as pool:
            # Each file once, however many rows name it.
            hashes = dict(pool.map(lambda path: (path, self._hash(path, again)), {path for path in absolute if path is not None}))
        return [None if path is None else hashes[path] for path in absolute]

    def _hash(self, path: str, again: bool) -> str | None:
        key = sha256_json(path)[:32]
        known = self._known.get(key)
        try:
            status = os.stat(path)
            if known is not None and not again and known[:2] == (status.st_size, status.st_mtime_ns):
                return known[2]
            entry = (status.st_size, status.st_mtime_ns, sha256_file(path))
        except OSError:
            return None if known is None else known[2]
        if known != entry:
            self._known[key] = entry
            self._changed = True
        return entry[2]

    def save(self) -> None:
        if self._changed:
            with suppress(MedTokenBudgetError):
                write_sealed(self._file, self._known)
                self._changed = False
