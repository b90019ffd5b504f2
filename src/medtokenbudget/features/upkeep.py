"""What is inside a store, and how to remove what no manifest needs any more."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from medtokenbudget.data import Manifest
from medtokenbudget.errors import RequestError
from medtokenbudget.features import plan
from medtokenbudget.features.annotations import hashes_of, known_manifests
from medtokenbudget.features.shards import Sidecar, map_shard, shard_path, sidecar_path, write_shard
from medtokenbudget.features.signal_files import found_signals, read_signal, signal_path, write_signal
from medtokenbudget.features.store import FeatureStore
from medtokenbudget.features.views import IDENTITY, view_order
from medtokenbudget.locks import exclusive


def info(path: Path | str) -> dict[str, Any]:
    """Describe a store.

    Args:
        path: Folder of the store.

    Returns:
        JSON values: settings, signals that all rows carry, images, rows by view, failed and missing rows, bytes, and the manifests
        that the store was opened with, each with the number of its images and how many of them are here ("fits" if all are), and
        the names of damaged files, for which every file is read.
    """
    store = FeatureStore.open(path, partial=True)
    views = Counter(row.view for row in store.stored)
    here = {row.image for row in store.stored if row.view == IDENTITY} | {failure.image for failure in store.failures}
    manifests = []
    for one in known_manifests(store.path)[0]:
        present = sum(image in here for image in one["images"].values())
        count = len(one["images"])
        manifests.append(
            {"name": one["name"], "source": one["source"], "hash": one["hash"], "images": count, "present": present}
            | {"fits": present == count}
        )
    return {
        "path": str(store.path),
        "settings": store.config,
        "signals": list(store.signals),
        "images": len({row.image for row in store.stored}),
        "rows": len(store.stored),
        "views": {view: views[view] for view in sorted(views, key=view_order)},
        "failed": len(store.failures),
        "shards": len(store.shards),
        "missing_shards": len(store.missing),
        "bytes": sum(file.stat().st_size for file in store.path.rglob("*") if file.is_file()),
        "manifests": manifests,
        "damaged": store.damaged(),
    }


def prune(path: Path | str, manifests: Sequence[Manifest]) -> tuple[int, int]:
    """Remove the rows of images that are in none of the manifests.

    A shard with rows to keep and rows to remove is written again under a new number. Stopped at any point, the store is as
    it was or as it will be, and the same call finishes the work.

    Args:
        path: Folder of the store.
        manifests: What to keep.

    Returns:
        The number of rows removed, and of bytes freed.

    Raises:
        RequestError: No manifest was given, or the extraction is not finished.
    """
    if not manifests:
        raise RequestError("Name the manifests whose images are to be kept: mtb store prune STORE MANIFEST ...")
    with exclusive(path):
        return _prune(FeatureStore.open(path), manifests)


def _prune(store: FeatureStore, manifests: Sequence[Manifest]) -> tuple[int, int]:
    before = _bytes(store.path)
    kept = {image for manifest in manifests for image in hashes_of(store.path, manifest)[0] if image is not None}
    shards = dict(store.shards)
    obsolete = []
    for index in sorted(store.sidecars):
        sidecar = store.sidecars[index]
        stays = [row for row, entry in enumerate(sidecar.rows) if entry.image in kept]
        failures = [failure for failure in sidecar.failures if failure.image in kept]
        if len(stays) + len(failures) == len(shards[index]):
            continue
        del shards[index]
        obsolete.append(index)
        if stays or failures:
            arrays = map_shard(shard_path(store.path, index))
            tensors = {name: np.ascontiguousarray(array[stays]) for name, array in arrays.items()} if stays else {}
            number = max([*store.shards, *shards]) + 1
            rows = [sidecar.rows[row] for row in stays]
            written = write_shard(store.path, number, rows, tensors, failures, sidecar.batch_size, sidecar.settings)
            shards[number] = tuple(written.keys)
            if stays:
                _copy_signals(store.path, index, sidecar, stays, number, written)
    if obsolete:
        # From here on the new shards count and the old ones do not.
        plan.write_plan(store.path, shards)
    removed = len(store.stored) - sum(len(row.rows) for row in FeatureStore.open(store.path).sidecars.values())
    _remove_unplanned(store.path, shards)
    return removed, before - _bytes(store.path)


def _copy_signals(path: Path, index: int, sidecar: Sidecar, stays: Sequence[int], number: int, written: Sidecar) -> None:
    """Give the shard `number` the signals of the rows `stays` of shard `index`, which it was made from."""
    for name in found_signals(path).get(index, ()):
        file = read_signal(path, index, name, sidecar)
        if file is not None:
            missing = [place for place, row in enumerate(stays) if row in file.missing]
            write_signal(path, number, name, file.map(name).array[list(stays)], written, missing)


def _remove_unplanned(path: Path, shards: plan.Shards) -> None:
    """Delete shards that the plan does not name, sidecars first."""
    planned = {file for index in shards for file in (shard_path(path, index), sidecar_path(path, index))}
    for file in [*sorted(path.glob("shard-*.json")), *sorted(path.glob("shard-*.safetensors"))]:
        if file not in planned:
            file.unlink(missing_ok=True)
    for index, names in found_signals(path).items():
        for name in names if index not in shards else ():
            signal_path(path, index, name).unlink(missing_ok=True)


def _bytes(path: Path) -> int:
    return sum(file.stat().st_size for file in path.rglob("*.*") if file.is_file() and not file.name.startswith("."))
