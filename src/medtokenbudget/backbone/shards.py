"""The files of a store, read and written: settings, plan, shards of rows with their sidecars, and signals that shards gained.

A store is a folder with `store.json` (the settings that its numbers depend on), `plan.json` (which rows belong to which shard) and
two files for each shard: the rows as safetensors, and a JSON sidecar. This is what a crash, another machine and a later version
meet: the sidecar is published last, so a shard without one, or with another size than it says, was never finished and is never
read. A signal that a finished shard gained is a file next to it, so that a store can gain signals and keep its tokens.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import mmap
import os
import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from medtokenbudget.backbone.views import Geometry
from medtokenbudget.errors import MismatchError, RequestError, WorkError
from medtokenbudget.files import (
    atomic_write,
    dotted,
    read_json,
    read_sealed,
    sealed,
    sha256_json,
    unsealed,
    write_safetensors,
    write_sealed,
)

FORMAT = 4
STORE, PLAN = "store.json", "plan.json"
NOT_IDENTITY = ("weights",)
"""Settings that may differ: the file of the weights may be elsewhere by now, and the backbone's fingerprint has its hash."""
LARGE = ("patches", "tokens")
"""Fields whose rows have a checksum of their own; the other fields of a row share one."""
Key = tuple[str, str]
"""SHA-256 of an image file, and the name of a view."""
Shards = dict[int, tuple[Key, ...]]
"""Rows by number of the shard."""
_DTYPES = {"F16": np.float16, "F32": np.float32, "I64": np.int64, "I32": np.int32, "U8": np.uint8}
_PREFIX = 8
"""Bytes at the start of a safetensors file that contain the length of its header."""
_CACHE_LINE = 64
_SIDE = 4096
"""No token grid has more rows or columns."""


def read_settings(store: Path) -> dict[str, Any]:
    """Read `store.json`, with a message if this is no store, one of another version, or a damaged one."""
    if not (store / STORE).is_file():
        raise RequestError(
            f"{store} is not a token store: it has no store.json. Create one with `mtb extract MANIFEST --store {store}`."
        )
    settings = read_json(store / STORE)
    if not isinstance(settings, dict) or settings.get("format") != FORMAT:
        version = settings.get("format") if isinstance(settings, dict) else None
        raise RequestError(
            f"{store} has store format {version!r}, but this version reads format {FORMAT}. "
            f"Run `mtb extract MANIFEST --store NEW` to extract it again into a new folder."
        )
    settings = unsealed(store / STORE, settings, "Restore the file, or extract into another folder.")
    if faults := _faults(settings):
        raise RequestError(f"{store / STORE} is damaged: {'; '.join(faults)}. Restore the file, or extract into another folder.")
    return settings


_KINDS: dict[str, tuple[type, ...]] = {
    "backbone": (dict,),
    "weights": (str, type(None)),
    "keep": (str,),
    "dtype": (str,),
    "precision": (str,),
    "view_seed": (int,),
    "shard_size": (int,),
    "batch_size": (int,),
    "backbone.name": (str,),
    "backbone.weights": (str,),
    "backbone.layer": (int,),
    "backbone.attention": (str,),
    "backbone.grid": (list,),
    "backbone.dim": (int,),
    "backbone.image_size": (int,),
}


def _faults(settings: dict[str, Any]) -> list[str]:
    """Say what is wrong with the values of `store.json`."""
    backbone = settings.get("backbone")
    inner = backbone if isinstance(backbone, dict) else {}
    values = {**settings, **{f"backbone.{key}": value for key, value in inner.items()}}
    faults = [
        f"{name} must be {' or '.join('null' if kind is type(None) else kind.__name__ for kind in kinds)}"
        for name, kinds in _KINDS.items()
        if not isinstance(values.get(name, ...), kinds) or isinstance(values.get(name), bool)
    ]
    grid = values.get("backbone.grid")
    if isinstance(grid, list) and not (len(grid) == 2 and all(type(side) is int and 0 < side <= _SIDE for side in grid)):
        faults.append("backbone.grid must be two positive numbers")
    if values.get("keep") not in ("patches", "routed"):
        faults.append("keep must be 'patches' or 'routed'")
    return faults


def settings_hash(settings: dict[str, Any]) -> str:
    """Hash of the settings that the numbers depend on; every shard records it."""
    return sha256_json({key: value for key, value in settings.items() if key not in NOT_IDENTITY})


def check_same(what: str, expected: dict[str, Any], found: dict[str, Any], advice: str) -> None:
    """Reject `found` where it differs from `expected`, showing each difference; keys that `expected` lacks are not looked at."""
    wanted, has = dotted(json.loads(json.dumps(expected, default=str))), dotted(found)
    if any(has.get(key) != value for key, value in wanted.items()):
        raise MismatchError.between(what, wanted, {key: has.get(key) for key in wanted}, advice)


def routed_early(fingerprint: dict[str, Any]) -> bool:
    """Whether a backbone with this fingerprint gives the tokens of kept patches alone."""
    return fingerprint.get("route") is not None


def read_plan(store: Path) -> Shards:
    """Read the rows of each shard by number; empty for a store that was only just begun."""
    if not (store / PLAN).is_file():
        return {}
    # The shards of the same request are planned in the same order again, so those that are finished stay.
    values = read_sealed(store / PLAN, "Delete it and run the same `mtb extract` command again.")
    try:
        shards = {int(number): tuple((str(image), str(view)) for image, view in rows) for number, rows in values.items()}
        # So that the file, which was just read, bounds the number of shards to look for.
        if not all(shards.values()) or min(shards, default=0) < 0:
            raise ValueError("a shard without rows")
        return shards
    except (AttributeError, TypeError, ValueError):
        raise RequestError(f"{store / PLAN} is damaged. Extract into another folder, or restore the file.") from None


def write_plan(store: Path, shards: Shards) -> None:
    """Write which rows belong to which shard."""
    write_sealed(store / PLAN, {str(number): rows for number, rows in sorted(shards.items())}, compact=True)


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
class FailedRow:
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
    failures: tuple[FailedRow, ...]
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
        failures = tuple(FailedRow(**failure) for failure in value["failures"])
        return Sidecar(
            rows, checksums, failures, int(value["bytes"]), str(value["sha256"]), int(value["batch_size"]), str(value["settings"])
        )

    def to_json(self) -> dict[str, Any]:
        rows = [[row.image, row.view, list(row.size), row.geometry.to_json()] for row in self.rows]
        return {**vars(self), "rows": rows, "failures": [vars(failure) for failure in self.failures]}

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


def signal_path(store: Path, index: int, name: str) -> Path:
    """The file of a signal that a finished shard gained."""
    return store / f"signal-{index:05d}-{name}.safetensors"


def finished_shards(store: Path, shards: Shards) -> dict[int, Sidecar]:
    """Read the sidecars of the planned shards that are finished, by number."""
    sidecars = {index: read_sidecar(store, index, keys) for index, keys in shards.items()}
    return {index: sidecar for index, sidecar in sidecars.items() if sidecar is not None}


def read_sidecar(store: Path, index: int, planned: Sequence[Key] | None = None) -> Sidecar | None:
    """Read the sidecar of a finished shard.

    None if the shard is missing, half written, of another size than it says, or if its rows are not those that were `planned`.
    """
    try:
        size = os.stat(shard_path(store, index)).st_size
        sidecar = Sidecar.from_json(read_sealed(sidecar_path(store, index), ""))
    except (FileNotFoundError, RequestError, ValueError, KeyError, TypeError):
        return None
    if planned is not None and sorted(sidecar.keys) != sorted(planned):
        return None
    return sidecar if sidecar.bytes == size else None


def write_shard(
    store: Path,
    index: int,
    rows: Sequence[Row],
    tensors: dict[str, np.ndarray],
    failures: Sequence[FailedRow],
    batch_size: int,
    settings: str,
) -> Sidecar:
    """Publish a shard, then its sidecar. `rows` describe the tensors' first axis."""
    parts = _encode(tensors)
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    large = {name: array for name, array in tensors.items() if name in LARGE}
    small = {name: array for name, array in tensors.items() if name not in LARGE}
    sidecar = Sidecar(
        rows=tuple(rows),
        checksums=tuple((row_checksum(large, row), row_checksum(small, row)) for row in range(len(rows))),
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


def _encode(tensors: dict[str, np.ndarray]) -> list[bytes | memoryview]:
    """Encode a safetensors file in pieces. Spaces after the header, which the format allows, align the largest tensor."""
    from safetensors.numpy import save

    if not tensors:  # every row of this shard failed
        return [save({})]
    data = memoryview(save({name: np.ascontiguousarray(value) for name, value in tensors.items()}))
    body = _PREFIX + int.from_bytes(data[:_PREFIX], "little")
    largest = max(tensors, key=lambda name: tensors[name].nbytes)
    start = body + json.loads(bytes(data[_PREFIX:body]))[largest]["data_offsets"][0]
    padding = -start % _CACHE_LINE
    return [(body - _PREFIX + padding).to_bytes(_PREFIX, "little"), data[_PREFIX:body], b" " * padding, data[body:]]


@dataclass(frozen=True)
class SignalFile:
    """What the file of a signal says about itself.

    Attributes:
        path: The file.
        name: Name of the signal.
        rows: Hash of the rows of the shard and of the settings that they were made with.
        checksums: CRC-32 of each row.
        missing: Rows without values, because their image was not in the manifest when the signal was added.
    """

    path: Path
    name: str
    rows: str
    checksums: tuple[int, ...]
    missing: frozenset[int]

    def map(self) -> np.ndarray:
        """The values of the rows, memory-mapped."""
        arrays = map_shard(self.path)
        if self.name not in arrays or len(arrays[self.name]) != len(self.checksums):
            raise damaged(self.path)
        return arrays[self.name]

    def is_whole(self) -> bool:
        """Read all values and compare them with their checksums."""
        try:
            values = {self.name: self.map()}
        except WorkError:
            return False
        return all(row_checksum(values, row) == checksum for row, checksum in enumerate(self.checksums))


def read_signal(store: Path, index: int, name: str, sidecar: Sidecar) -> SignalFile | None:
    """Read what the file of a signal says.

    None if there is none, if it is damaged, or if it belongs to other rows, because its shard was made anew.
    """
    path = signal_path(store, index, name)
    try:
        file = _read_signal(path, name, path.stat().st_mtime_ns)
    except FileNotFoundError:
        return None
    if file is None or file.rows != _rows_hash(sidecar) or len(file.checksums) != len(sidecar.rows):
        return None
    return file


@lru_cache(maxsize=4096)
def _read_signal(path: Path, name: str, changed: int) -> SignalFile | None:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="np") as file:
            about = unsealed(path, json.loads((file.metadata() or {})["about"]), "")
        checksums = tuple(int(value) for value in about["checksums"])
        missing = frozenset(int(row) for row in about["missing"])
        return SignalFile(path, name, str(about["rows"]), checksums, missing)
    except (SafetensorError, OSError, KeyError, ValueError, TypeError, RecursionError):
        return None


def write_signal(store: Path, index: int, name: str, values: np.ndarray, sidecar: Sidecar, missing: Sequence[int] = ()) -> None:
    """Publish the values [n, ...] of a signal for the n rows of a shard."""
    from safetensors.numpy import save

    about = {
        "rows": _rows_hash(sidecar),
        "checksums": [row_checksum({name: values}, row) for row in range(len(values))],
        "missing": sorted(missing),
    }
    # One key, because the library writes several in an order of its own.
    note = {"about": json.dumps(sealed(about))}
    write_safetensors(signal_path(store, index, name), save({name: np.ascontiguousarray(values)}, note))


def _rows_hash(sidecar: Sidecar) -> str:
    """What ties the file of a signal to the rows of a shard."""
    return sha256_json([sidecar.settings, [row.key for row in sidecar.rows]])


def signal_names(store: Path) -> dict[int, list[str]]:
    """Names of the signals that have a file, by number of the shard."""
    names: dict[int, list[str]] = {}
    for path in sorted(store.glob("signal-*.safetensors")):
        if match := re.fullmatch(r"signal-(\d+)-(\w+)\.safetensors", path.name):
            names.setdefault(int(match[1]), []).append(match[2])
    return names


def row_checksum(fields: Mapping[str, np.ndarray], row: int) -> int:
    """CRC-32 of a row of some fields, with their names and types: a header that calls floats integers changes every number."""
    value = 0
    for name in sorted(fields):
        array = fields[name]
        value = zlib.crc32(f"{name}{array.dtype.str}{array.shape[1:]}".encode(), value)
        value = zlib.crc32(np.ascontiguousarray(array[row]).reshape(-1).view(np.uint8).data, value)
    return value


def damaged(path: Path) -> WorkError:
    """The error for a shard or a file of a signal whose content is not what was written."""
    if path.name.startswith("signal"):
        advice = "run `mtb extract` with --signals again: only this file is made again."
    else:
        advice = "run the same `mtb extract` again: only this shard is made again."
    return WorkError(f"{path} is damaged. Delete it and {advice}")


def map_shard(path: Path) -> dict[str, np.ndarray]:
    """Map the tensors of a file as read-only arrays: nothing is read before it is touched, nothing is copied.

    Raises:
        WorkError: The header of the file is damaged.
    """
    # Torch maps privately and keeps no file open, unlike Python's mmap: a store may have more shards than a process has files.
    memory = torch.from_file(str(path), shared=False, size=os.path.getsize(path), dtype=torch.uint8).numpy()
    # A page fault reads megabytes around its page otherwise, which a store larger than memory drops before they are needed.
    advise(memory.ctypes.data, memory.ctypes.data + memory.nbytes, "MADV_RANDOM")
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


_madvise = ctypes.CDLL(None).madvise if hasattr(mmap, "MADV_WILLNEED") else None
"""The system's madvise, if there is one; Python's own needs a map that keeps a file open."""
if _madvise is not None:
    _madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def advise(start: int, end: int, advice: str) -> None:
    """Give the kernel advice about a range of addresses. It is optional: without it, reading is only slower."""
    if _madvise is not None:
        start -= start % mmap.PAGESIZE
        _madvise(start, end - start, getattr(mmap, advice))
