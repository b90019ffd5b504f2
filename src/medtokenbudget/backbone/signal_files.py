"""One signal of one shard on disk: a safetensors file next to the shard, so that a store can gain signals and keep its tokens.

A file names the rows that it belongs to. One that belongs to other rows, because its shard was made anew, counts as missing.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np

from medtokenbudget.backbone.reading import MappedRows
from medtokenbudget.backbone.shards import Sidecar, map_shard, row_checksum
from medtokenbudget.errors import WorkError
from medtokenbudget.files import sealed, sha256_json, unsealed, write_safetensors

_NAME = re.compile(r"signal-(\d+)-(\w+)\.safetensors")


@dataclass(frozen=True)
class SignalFile:
    """What a file of a signal says about itself.

    Attributes:
        path: The file.
        rows: Hash of the rows of the shard and of the settings that they were made with.
        checksums: CRC-32 of each row.
        missing: Rows without values, because their image was not in the manifest when the signal was added.
    """

    path: Path
    rows: str
    checksums: tuple[int, ...]
    missing: frozenset[int]

    def map(self, name: str) -> MappedRows:
        """The values of the signal `name`, memory-mapped."""
        arrays = map_shard(self.path)
        if name not in arrays or len(arrays[name]) != len(self.checksums):
            raise damaged_signal(self.path)
        return MappedRows(arrays[name])


def signal_path(store: Path, index: int, name: str) -> Path:
    """The file of a signal of a shard."""
    return store / f"signal-{index:05d}-{name}.safetensors"


def rows_hash(sidecar: Sidecar) -> str:
    """What ties a file of a signal to the rows of a shard."""
    return sha256_json([sidecar.settings, [row.key for row in sidecar.rows]])


def write_signal(store: Path, index: int, name: str, values: np.ndarray, sidecar: Sidecar, missing: Sequence[int] = ()) -> None:
    """Publish the values [n, ...] of a signal for the n rows of a shard."""
    from safetensors.numpy import save

    about = {
        "rows": rows_hash(sidecar),
        "checksums": [row_checksum({name: values}, row) for row in range(len(values))],
        "missing": sorted(missing),
    }
    tensors = {name: np.ascontiguousarray(values)}
    # One key, because the library writes several in an order of its own.
    note = {"about": json.dumps(sealed(about))}
    write_safetensors(signal_path(store, index, name), save(tensors, note))


def read_signal(store: Path, index: int, name: str, sidecar: Sidecar) -> SignalFile | None:
    """The file of a signal of a shard; None if there is none for the rows that the shard has now, or if it is damaged."""
    path = signal_path(store, index, name)
    try:
        about = _read_about(path, path.stat().st_mtime_ns)
    except FileNotFoundError:
        return None
    if about is None or about.rows != rows_hash(sidecar) or len(about.checksums) != len(sidecar.rows):
        return None
    return about


@lru_cache(maxsize=4096)
def _read_about(path: Path, changed: int) -> SignalFile | None:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="np") as file:
            about = unsealed(path, json.loads((file.metadata() or {})["about"]), "")
        checksums = tuple(int(value) for value in about["checksums"])
        missing = frozenset(int(row) for row in about["missing"])
        return SignalFile(path, str(about["rows"]), checksums, missing)
    except (SafetensorError, OSError, KeyError, ValueError, TypeError, RecursionError):
        return None


def found_signals(store: Path) -> dict[int, list[str]]:
    """Names of the signals that have a file, by number of the shard."""
    found: dict[int, list[str]] = {}
    for path in sorted(store.glob("signal-*.safetensors")):
        if match := _NAME.fullmatch(path.name):
            found.setdefault(int(match[1]), []).append(match[2])
    return found


def damaged_signal(path: Path) -> WorkError:
    """The error for a file whose values are not what was written."""
    return WorkError(f"{path} is damaged. Delete it and run `mtb extract` with --signals again: only this file is made again.")
