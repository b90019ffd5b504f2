"""One shard on disk: a safetensors file of rows and the JSON sidecar that makes it count.

Its own file because the format is what a crash, another machine and a later version meet: the sidecar is published last, so
that a shard without one, or with another size than it says, was never finished and is never read.
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
"""Bytes that hold the length of the header of a safetensors file."""
_CACHE_LINE = 64


@dataclass(frozen=True)
class RowError:
    """A planned row that is not in the tensors, and why."""

    image_id: str
    view: str
    reason: str

    def to_json(self) -> dict[str, str]:
        return {"image_id": self.image_id, "view": self.view, "reason": self.reason}


@dataclass(frozen=True)
class Sidecar:
    """What a finished shard holds: the rows in the order of its tensors, the SHA-256 of the image file of each, what failed, and
    the proof that the shard itself is whole."""

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
    return store / f"shard-{index:05d}.safetensors"


def sidecar_path(store: Path, index: int) -> Path:
    return store / f"shard-{index:05d}.json"


def read_sidecar(store: Path, index: int) -> Sidecar | None:
    """The sidecar of a finished shard; None when the shard is missing, half written or of another size than it says."""
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
    """Publish a shard, then its sidecar. `rows` are the (image_id, view, hash of the image) of the tensors' first axis."""
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
        # Another worker may have published the same bytes and swept the temporary files meanwhile.
        if read_sidecar(store, index) != sidecar:
            raise
    return sidecar


def _encoded(tensors: dict[str, np.ndarray]) -> list[bytes | memoryview]:
    """A safetensors file in pieces. Spaces after its header, which the format allows, put the largest tensor on a cache line."""
    from safetensors.numpy import save

    if not tensors:  # no row of this shard could be made
        return [save({})]
    data = memoryview(save({name: np.ascontiguousarray(value) for name, value in tensors.items()}))
    body = _PREFIX + int.from_bytes(data[:_PREFIX], "little")
    largest = max(tensors, key=lambda name: tensors[name].nbytes)
    start = body + json.loads(bytes(data[_PREFIX:body]))[largest]["data_offsets"][0]
    padding = -start % _CACHE_LINE
    return [(body - _PREFIX + padding).to_bytes(_PREFIX, "little"), data[_PREFIX:body], b" " * padding, data[body:]]


def map_shard(path: Path) -> dict[str, np.ndarray]:
    """The tensors of a shard as read-only arrays over a memory map: nothing is read before it is touched, nothing is copied."""
    # Torch maps privately and keeps no file open, unlike Python's mmap: a store may have more shards than a process has files.
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
    """Delete the temporary files that killed runs left behind; only called when every shard is there."""
    for leftover in store.glob(".*.part"):
        leftover.unlink(missing_ok=True)
