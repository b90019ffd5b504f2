"""One shard on disk: a safetensors file with the rows, and a JSON sidecar that marks it as finished.

The sidecar is written last. A shard without a sidecar, or with another size than it says, is incomplete and is never read.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from medtokenbudget.errors import WorkError
from medtokenbudget.features.reading import read_nothing_around
from medtokenbudget.files import atomic_write, read_json, write_json

_DTYPES = {"F16": np.float16, "F32": np.float32, "I64": np.int64, "I32": np.int32, "U8": np.uint8}
_PREFIX = 8
"""Bytes at the start of a safetensors file that contain the length of its header."""
_CACHE_LINE = 64


@dataclass(frozen=True)
class RowError:
    """A planned row that failed, and why."""

    image_id: str
    view: str
    reason: str

    def to_json(self) -> dict[str, str]:
        return {"image_id": self.image_id, "view": self.view, "reason": self.reason}


@dataclass(frozen=True)
class Sidecar:
    """The content of a finished shard.

    Attributes:
        ids: Image id of each row, in the order of the tensors.
        views: View of each row.
        images: SHA-256 of the image file of each row.
        errors: Rows that failed.
        bytes: Size of the safetensors file.
        sha256: Hash of the safetensors file.
        batch_size: Images per forward pass.
    """

    ids: tuple[str, ...]
    views: tuple[str, ...]
    images: tuple[str, ...]
    errors: tuple[RowError, ...]
    bytes: int
    sha256: str
    batch_size: int

    @staticmethod
    def from_json(value: dict[str, Any]) -> Sidecar:
        errors = tuple(RowError(**error) for error in value["errors"])
        ids, views, images = (tuple(value[name]) for name in ("ids", "views", "images"))
        return Sidecar(ids, views, images, errors, value["bytes"], value["sha256"], value["batch_size"])

    def to_json(self) -> dict[str, Any]:
        return {
            "ids": list(self.ids),
            "views": list(self.views),
            "images": list(self.images),
            "errors": [error.to_json() for error in self.errors],
            "bytes": self.bytes,
            "sha256": self.sha256,
            "batch_size": self.batch_size,
        }


def shard_path(store: Path, index: int) -> Path:
    """The safetensors file of a shard."""
    return store / f"shard-{index:05d}.safetensors"


def sidecar_path(store: Path, index: int) -> Path:
    """The JSON file of a shard."""
    return store / f"shard-{index:05d}.json"


def read_sidecar(store: Path, index: int) -> Sidecar | None:
    """The sidecar of a finished shard; None if the shard is missing or incomplete."""
    try:
        size = os.stat(shard_path(store, index)).st_size
        if not sidecar_path(store, index).exists():
            return None
    except FileNotFoundError:
        return None
    try:
        sidecar = Sidecar.from_json(read_json(sidecar_path(store, index)))
    except (ValueError, KeyError, TypeError):
        return None
    return sidecar if sidecar.bytes == size else None


def write_shard(
    store: Path,
    index: int,
    rows: Sequence[tuple[str, str, str]],
    tensors: dict[str, np.ndarray],
    errors: Sequence[RowError],
    batch_size: int,
) -> Sidecar:
    """Write a shard, then its sidecar; `rows` are (image_id, view, hash of the image) along the first axis of the tensors."""
    parts = _encoded(tensors)
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    sidecar = Sidecar(
        ids=tuple(row[0] for row in rows),
        views=tuple(row[1] for row in rows),
        images=tuple(row[2] for row in rows),
        errors=tuple(errors),
        bytes=sum(map(len, parts)),
        sha256=digest.hexdigest(),
        batch_size=batch_size,
    )
    try:
        with atomic_write(shard_path(store, index)) as temporary, open(temporary, "wb") as stream:
            stream.writelines(parts)
        write_json(sidecar_path(store, index), sidecar.to_json())
    except WorkError:
        # Another worker may have written the same bytes and deleted the temporary files in the meantime.
        if read_sidecar(store, index) != sidecar:
            raise
    return sidecar


def _encoded(tensors: dict[str, np.ndarray]) -> list[bytes | memoryview]:
    """A safetensors file in pieces. Spaces after the header, which the format allows, align the largest tensor to a cache line."""
    from safetensors.numpy import save

    if not tensors:  # every row of this shard failed
        return [save({})]
    data = memoryview(save({name: np.ascontiguousarray(value) for name, value in tensors.items()}))
    body = _PREFIX + int.from_bytes(data[:_PREFIX], "little")
    largest = max(tensors, key=lambda name: tensors[name].nbytes)
    start = body + json.loads(bytes(data[_PREFIX:body]))[largest]["data_offsets"][0]
    padding = -start % _CACHE_LINE
    return [(body - _PREFIX + padding).to_bytes(_PREFIX, "little"), data[_PREFIX:body], b" " * padding, data[body:]]


def map_shard(path: Path) -> dict[str, np.ndarray]:
    """The tensors of a shard as read-only memory-mapped arrays: nothing is read before it is used, and nothing is copied."""
    # Unlike Python's mmap, torch keeps no file open: a store may have more shards than a process may open files.
    memory = torch.from_file(str(path), shared=False, size=os.path.getsize(path), dtype=torch.uint8).numpy()
    read_nothing_around(memory)
    body = _PREFIX + int.from_bytes(memory[:_PREFIX].tobytes(), "little")
    header = json.loads(memory[_PREFIX:body].tobytes())
    header.pop("__metadata__", None)
    arrays = {}
    for name, entry in header.items():
        start = body + entry["data_offsets"][0]
        array = np.ndarray(tuple(entry["shape"]), _DTYPES[entry["dtype"]], buffer=memory.data, offset=start)
        array.flags.writeable = False
        arrays[name] = array
    return arrays


def remove_leftovers(store: Path) -> None:
    """Delete the temporary files of interrupted runs; only called for a complete store."""
    for leftover in store.glob(".*.part"):
        leftover.unlink(missing_ok=True)
