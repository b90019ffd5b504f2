"""One shard on disk: a safetensors file with the rows, and a JSON sidecar that marks it as finished.

Its own file because the format is what a crash, another machine and a later version meet: the sidecar is published last, so
a shard without one, or with another size than it says, was never finished and is never read.
"""

from __future__ import annotations

import hashlib
import json
import os
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from medtokenbudget.backbone.reading import read_nothing_around
from medtokenbudget.backbone.views import Geometry
from medtokenbudget.errors import RequestError, WorkError
from medtokenbudget.files import atomic_write, read_sealed, write_sealed

LARGE = ("patches", "tokens")
"""Fields whose rows have a checksum of their own; the others of a row share one."""
Key = tuple[str, str]
"""SHA-256 of an image file, and the name of a view."""
_DTYPES = {"F16": np.float16, "F32": np.float32, "I64": np.int64, "I32": np.int32, "U8": np.uint8}
_PREFIX = 8
"""Bytes at the start of a safetensors file that contain the length of its header."""
_CACHE_LINE = 64


def reason(error: Exception, file: Path | str) -> str:
    """Why a file could not be used, without its folder: a store is shared, and names no place of this machine."""
    return str(error).replace(str(file), Path(file).name)


@dataclass(frozen=True)
class RowError:
    """An image of a manifest, or a view of it, that has no tokens, and why."""

    image_id: str
    view: str
    reason: str

    def to_json(self) -> dict[str, str]:
        return {"image_id": self.image_id, "view": self.view, "reason": self.reason}


@dataclass(frozen=True)
class Failure:
    """A planned row that is not in the tensors, and why.

    Attributes:
        image: SHA-256 of the image file.
        view: Name of the view.
        kind: 'image' could not be read, 'view' does not exist with this mask, 'tokens' are not finite.
        reason: A sentence for people.
        mask: SHA-256 of the mask that a view was to be made with.
    """

    image: str
    view: str
    kind: Literal["image", "view", "tokens"]
    reason: str
    mask: str | None = None

    @property
    def key(self) -> Key:
        return self.image, self.view


@dataclass(frozen=True)
class Row:
    """What a row of the tensors shows: an image by its SHA-256, its (width, height), a view, and the view's geometry."""

    image: str
    view: str
    size: tuple[int, int]
    geometry: Geometry

    @property
    def key(self) -> Key:
        return self.image, self.view


@dataclass(frozen=True)
class Sidecar:
    """What a finished shard holds.

    Attributes:
        rows: The rows in the order of the tensors.
        checksums: CRC-32 of the large fields and of the small fields of each row, with their names and types.
        failures: Planned rows that could not be made.
        bytes: Size of the shard.
        sha256: Hash of the shard.
        batch_size: Images in one forward pass; smaller than requested if memory ran out.
        settings: Hash of the settings in `store.json` that the shard was made with.
    """

    rows: tuple[Row, ...]
    checksums: tuple[tuple[int, int], ...]
    failures: tuple[Failure, ...]
    bytes: int
    sha256: str
    batch_size: int
    settings: str

    @staticmethod
    def from_json(value: dict[str, Any]) -> Sidecar:
        rows = tuple(Row(str(i), str(v), (int(w), int(h)), Geometry.from_json(g)) for i, v, (w, h), g in value["rows"])
        checksums = tuple((int(large), int(small)) for large, small in value["checksums"])
        if len(checksums) != len(rows):
            raise ValueError("as many checksums as rows")
        failures = tuple(Failure(**failure) for failure in value["failures"])
        return Sidecar(
            rows, checksums, failures, int(value["bytes"]), str(value["sha256"]), int(value["batch_size"]), str(value["settings"])
        )

    def to_json(self) -> dict[str, Any]:
        return {
            "rows": [[row.image, row.view, list(row.size), row.geometry.to_json()] for row in self.rows],
            "checksums": [list(pair) for pair in self.checksums],
            "failures": [vars(failure) for failure in self.failures],
            "bytes": self.bytes,
            "sha256": self.sha256,
            "batch_size": self.batch_size,
            "settings": self.settings,
        }

    @property
    def keys(self) -> list[Key]:
        """Every row that the shard was to hold, made or not."""
        return [*(row.key for row in self.rows), *(failure.key for failure in self.failures)]


def shard_path(store: Path, index: int) -> Path:
    """The safetensors file of a shard."""
    return store / f"shard-{index:05d}.safetensors"


def sidecar_path(store: Path, index: int) -> Path:
    """The JSON file of a shard."""
    return store / f"shard-{index:05d}.json"


def read_sidecar(store: Path, index: int, planned: Sequence[Key] | None = None) -> Sidecar | None:
    """The sidecar of a finished shard; None if the shard is missing, half written, of another size than it says, or if its rows
    are not those that were `planned`."""
    try:
        size = os.stat(shard_path(store, index)).st_size
        if not sidecar_path(store, index).exists():
            return None
    except FileNotFoundError:
        return None
    try:
        sidecar = Sidecar.from_json(read_sealed(sidecar_path(store, index), ""))
    except (RequestError, ValueError, KeyError, TypeError):
        return None
    if planned is not None and sorted(sidecar.keys) != sorted(planned):
        return None
    return sidecar if sidecar.bytes == size else None


def write_shard(
    store: Path,
    index: int,
    rows: Sequence[Row],
    tensors: dict[str, np.ndarray],
    failures: Sequence[Failure],
    batch_size: int,
    settings: str,
) -> Sidecar:
    """Publish a shard, then its sidecar. `rows` describe the tensors' first axis."""
    parts = _encoded(tensors)
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    sidecar = Sidecar(
        rows=tuple(rows),
        checksums=tuple(_checksums(tensors, row) for row in range(len(rows))),
        failures=tuple(failures),
        bytes=sum(map(len, parts)),
        sha256=digest.hexdigest(),
        batch_size=batch_size,
        settings=settings,
    )
    with atomic_write(shard_path(store, index)) as temporary, open(temporary, "wb") as stream:
        stream.writelines(parts)
    write_sealed(sidecar_path(store, index), sidecar.to_json())
    return sidecar


def _checksums(tensors: dict[str, np.ndarray], row: int) -> tuple[int, int]:
    large = {name: array for name, array in tensors.items() if name in LARGE}
    small = {name: array for name, array in tensors.items() if name not in LARGE}
    return row_checksum(large, row), row_checksum(small, row)


def row_checksum(fields: Mapping[str, np.ndarray], row: int) -> int:
    """CRC-32 of a row of some fields, with their names and types: a header that calls floats integers changes every number."""
    value = 0
    for name in sorted(fields):
        array = fields[name]
        value = zlib.crc32(f"{name}{array.dtype.str}{array.shape[1:]}".encode(), value)
        value = zlib.crc32(np.ascontiguousarray(array[row]).reshape(-1).view(np.uint8).data, value)
    return value


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
    """The tensors of a shard as read-only arrays over a memory map: nothing is read before it is touched, nothing is copied.

    Raises:
        WorkError: The header of the file is damaged.
    """
    # Torch maps privately and keeps no file open, unlike Python's mmap: a store may have more shards than a process has files.
    memory = torch.from_file(str(path), shared=False, size=os.path.getsize(path), dtype=torch.uint8).numpy()
    read_nothing_around(memory)
    try:
        body = _PREFIX + int.from_bytes(memory[:_PREFIX].tobytes(), "little")
        header = json.loads(memory[_PREFIX:body].tobytes())
        header.pop("__metadata__", None)
        arrays = {}
        for name, entry in header.items():
            start = body + entry["data_offsets"][0]
            array = np.ndarray(tuple(entry["shape"]), _DTYPES[entry["dtype"]], buffer=memory.data, offset=start)
            array.flags.writeable = False
            arrays[name] = array
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError, MemoryError, OverflowError):
        raise damaged(path) from None
    return arrays


def damaged(path: Path) -> WorkError:
    """The error for a shard whose content is not what was written."""
    return WorkError(f"{path} is damaged. Delete it and run the same `mtb extract` again: only this shard is made again.")
