"""`FeatureStore`: frozen tokens on disk, read like an array that may be larger than memory.

A store is a folder with `store.json` (the settings that its numbers depend on), `plan.json` (which rows belong to which shard) and,
for each shard, a file per field (`patches-00003.npy`, `cls_attention-00003.npy`, ...) and a JSON record. The record is published
last: a shard without one, or with a file of another size than it says, was never finished and is never read. A signal that a shard
gains later is one more file and a new record. `extract.py` fills a store, `annotations.py` adds what a manifest says.
"""

from __future__ import annotations

import ctypes
import hashlib
import math
import mmap
import os
import weakref
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from medtokenbudget.backbone.annotations import Annotation, FileIndex, RowError, annotate, known_manifests
from medtokenbudget.backbone.attention import DEFAULT
from medtokenbudget.backbone.views import IDENTITY, Geometry, view_order
from medtokenbudget.data.manifest import Manifest, listed
from medtokenbudget.errors import MissingSignalError, RequestError, WorkError
from medtokenbudget.files import atomic_write, check_same, read_json, read_sealed, sha256_json, unsealed, write_sealed
from medtokenbudget.jobs import ordered_map
from medtokenbudget.progress import progress
from medtokenbudget.tokens import SIGNALS, TokenBatch

FORMAT = 5
STORE, PLAN = "store.json", "plan.json"
NOT_IDENTITY = ("weights",)
"""Settings that may differ: the file of the weights may be elsewhere by now, and the backbone's fingerprint has its hash."""
Key = tuple[str, str]
"""SHA-256 of an image file, and the name of a view."""
Shards = dict[int, tuple[Key, ...]]
"""Rows by number of the shard."""
_LISTED = 5
_SMALL = ("cls", *DEFAULT, "luminance")
"""Fields that every batch has, if the store has them."""
_IN_TOKEN_DTYPE = ("patches", "cls", "mean_key")
_HEADER = 128
"""Bytes before the numbers of a .npy file, of ours always the same: a multiple of the cache line."""
_READERS = 2
"""Threads; one core cannot use the full bandwidth of the memory."""
_PIECE = 1 << 15
"""Elements; torch would spread a longer copy over its threads, which the training needs at the same time."""
_WIDE = torch.complex128
"""The longest element type, 16 bytes: a row of 256 patches of 1,024 halves is then one piece."""

# What is written ------------------------------------------------------------------------------------------------------


def read_settings(store: Path) -> dict[str, Any]:
    """Read `store.json`, with a message if this is no store, one of another version, or a damaged one."""
    if not (store / STORE).is_file():
        raise RequestError(f"{store} is not a token store: it has no {STORE}. Create one with `mtb extract`.")
    settings = read_json(store / STORE)
    version = settings.get("format") if isinstance(settings, dict) else None
    if version != FORMAT:
        raise RequestError(
            f"{store} has store format {version!r}, but this version reads format {FORMAT}. "
            "Run `mtb extract` to extract it again into a new folder."
        )
    return unsealed(store / STORE, settings, "Restore the file, or extract into another folder.")


def settings_hash(settings: dict[str, Any]) -> str:
    """Hash the settings that the numbers depend on; every shard records it."""
    return sha256_json({key: value for key, value in settings.items() if key not in NOT_IDENTITY})


def read_plan(store: Path) -> Shards:
    """Read the rows of each shard by number; empty for a store that was only just begun."""
    if not (store / PLAN).is_file():
        return {}
    # The shards of the same request are planned in the same order again, so finished ones stay.
    values = read_sealed(store / PLAN, "Delete it and run the same `mtb extract` command again.")
    try:
        shards = {int(number): tuple((str(image), str(view)) for image, view in rows) for number, rows in values.items()}
        # A shard has rows, so the file, which was just read, bounds the number of shards to look for.
        if not all(shards.values()) or min(shards, default=0) < 0:
            raise ValueError("a shard without rows")
        return shards
    except (TypeError, ValueError):
        raise RequestError(f"{store / PLAN} is damaged. Extract into another folder, or restore the file.") from None


def write_plan(store: Path, shards: Shards) -> None:
    """Write which rows belong to which shard."""
    write_sealed(store / PLAN, {str(number): rows for number, rows in sorted(shards.items())}, compact=True)


@dataclass(frozen=True)
class Row:
    """What a row of the fields shows: an image by its SHA-256, its (width, height), a view, and the view's geometry."""

    image: str
    view: str
    size: tuple[int, int]
    geometry: Geometry

    @property
    def key(self) -> Key:
        return self.image, self.view


@dataclass(frozen=True)
class FailedRow:
    """A planned row that has no tokens, and why."""

    image: str
    view: str
    kind: Literal["image", "view", "tokens"]
    """'image' could not be read, 'view' does not exist with this mask, 'tokens' are not finite."""
    reason: str
    mask: str | None = None
    """SHA-256 of the mask that a view was to be made with."""

    @property
    def key(self) -> Key:
        return self.image, self.view


@dataclass(frozen=True)
class Field:
    """One field of a shard: type and shape of a row, and the CRC-32 of each row; None for a row without values.

    A checksum per row, not per file: training compares it when it reads a row for the first time, and a row is a part of a file
    that may not fit into memory.
    """

    dtype: str
    shape: tuple[int, ...]
    checksums: tuple[int | None, ...]

    @property
    def row_bytes(self) -> int:
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize

    @property
    def file_bytes(self) -> int:
        return _HEADER + len(self.checksums) * self.row_bytes

    @property
    def header(self) -> bytes:
        """The header of the .npy file. Not numpy's, whose padding depends on its version: it is compared byte by byte."""
        shape = (len(self.checksums), *self.shape)
        text = f"{{'descr': '{self.dtype}', 'fortran_order': False, 'shape': {shape}, }}"
        return b"\x93NUMPY\x01\x00" + (_HEADER - 10).to_bytes(2, "little") + text.encode().ljust(_HEADER - 11) + b"\n"


@dataclass(frozen=True)
class Record:
    """What a finished shard holds."""

    rows: tuple[Row, ...]
    failures: tuple[FailedRow, ...]
    batch_size: int
    """Images in one forward pass; smaller than requested if memory ran out."""
    settings: str
    """Hash of the settings in `store.json` that the shard was made with."""
    fields: dict[str, Field]

    def to_json(self) -> dict[str, Any]:
        return {
            "rows": [[row.image, row.view, list(row.size), row.geometry.to_json()] for row in self.rows],
            "failures": [vars(failure) for failure in self.failures],
            "batch_size": self.batch_size,
            "settings": self.settings,
            "fields": {name: [field.dtype, field.shape, field.checksums] for name, field in sorted(self.fields.items())},
        }

    @staticmethod
    def from_json(value: dict[str, Any]) -> Record:
        rows = tuple(Row(str(i), str(v), (int(w), int(h)), Geometry.from_json(g)) for i, v, (w, h), g in value["rows"])
        failures = tuple(FailedRow(**failure) for failure in value["failures"])
        fields = {name: Field(dtype, tuple(shape), tuple(sums)) for name, (dtype, shape, sums) in value["fields"].items()}
        if any(len(field.checksums) != len(rows) for field in fields.values()):
            raise ValueError("as many checksums as rows")
        return Record(rows, failures, int(value["batch_size"]), str(value["settings"]), fields)

    @property
    def keys(self) -> list[Key]:
        """Every row that the shard was to hold, made or not."""
        return [*(row.key for row in self.rows), *(failure.key for failure in self.failures)]


def record_path(store: Path, index: int) -> Path:
    """Return the JSON file of a shard."""
    return store / f"shard-{index:05d}.json"


def field_path(store: Path, index: int, name: str) -> Path:
    """Return the file of a field of a shard."""
    return store / f"{name}-{index:05d}.npy"


def read_record(store: Path, index: int, planned: Sequence[Key] | None = None) -> Record | None:
    """Read the record of a shard; None if it is missing or damaged, or if its rows are not those that were `planned`."""
    try:
        record = Record.from_json(read_sealed(record_path(store, index), ""))
    except (RequestError, ValueError, KeyError, TypeError):
        return None
    return record if planned is None or sorted(record.keys) == sorted(planned) else None


def broken_files(store: Path, index: int, record: Record) -> list[str]:
    """Name the files of a shard that are missing, or that have another size than its record says."""
    paths = {field_path(store, index, name): field.file_bytes for name, field in record.fields.items()}
    return [path.name for path, size in paths.items() if not path.is_file() or path.stat().st_size != size]


def finished_shards(store: Path, shards: Shards) -> dict[int, Record]:
    """Read the records of the planned shards that are finished, by number."""
    records = {index: read_record(store, index, keys) for index, keys in shards.items()}
    return {index: record for index, record in records.items() if record is not None and not broken_files(store, index, record)}


def write_field(store: Path, index: int, name: str, values: np.ndarray, missing: Sequence[int] = ()) -> Field:
    """Publish the values [n, ...] of a field for the n rows of a shard; rows `missing` have none."""
    values = np.ascontiguousarray(values)
    without = set(missing)
    checksums = tuple(None if row in without else zlib.crc32(values[row].data) for row in range(len(values)))
    field = Field(values.dtype.str, values.shape[1:], checksums)
    with atomic_write(field_path(store, index, name)) as temporary, open(temporary, "wb") as stream:
        stream.write(field.header)
        stream.write(values.data)
    return field


def read_field(store: Path, index: int, name: str, record: Record) -> np.ndarray:
    """Map the values [n, ...] of a field."""
    rows = _Mapped(field_path(store, index, name), record.fields[name]).rows
    return rows.numpy().reshape(len(rows), *record.fields[name].shape)


# What is read ---------------------------------------------------------------------------------------------------------


class FeatureStore:
    """Rows of frozen tokens; a row is one view of one image.

    A store knows images by the hash of their file. Opened with a manifest, it shows the images of the manifest in its order, with
    their labels and lesion patches; opened alone, `ids` are the hashes and there are no annotations.

    Attributes:
        ids: Image of each row.
        views: View of each row.
        grid: (h, w) of the patches.
        dim: Their dimension D.
        classes: Names that `label` points to; empty without a manifest.
        config: The content of `store.json`.
        errors: Images and views of the manifest that have no row, with the reason.
        missing: Numbers of planned shards that are not extracted yet, as far as they concern the manifest.

    Example:
        >>> manifest = Manifest.read("isic.parquet")  # doctest: +SKIP
        >>> store = FeatureStore.open("stores/isic", manifest)  # doctest: +SKIP
        >>> batch = store.read(store.rows(manifest.part("val").ids))  # doctest: +SKIP
    """

    def __init__(
        self, path: Path, config: dict[str, Any], shards: Shards, records: dict[int, Record], annotation: Annotation | None = None
    ) -> None:
        self.path = path
        self.config = config
        self.grid: tuple[int, int] = (int(config["backbone"]["grid"][0]), int(config["backbone"]["grid"][1]))
        self.dim = int(config["backbone"]["dim"])
        self.shards = shards
        self.records = records
        self.annotation = annotation
        finished = sorted(records)
        self.stored: list[Row] = [row for index in finished for row in records[index].rows]
        self.failures: list[FailedRow] = [failure for index in finished for failure in records[index].failures]
        self.missing = [index for index in shards if index not in records]
        # Shard of each row, and its place in the shard.
        shard = np.repeat(np.asarray(finished, np.int64), [len(records[index].rows) for index in finished])
        place = np.concatenate([np.empty(0, np.int64), *(np.arange(len(records[index].rows)) for index in finished)])
        if annotation is None:
            self.ids: list[str] = [row.image for row in self.stored]
            self.views: list[str] = [row.view for row in self.stored]
            self.errors = [RowError(failure.image, failure.view, failure.reason) for failure in self.failures]
            self.classes: tuple[str, ...] = ()
        else:
            self.ids = annotation.ids
            self.views = [self.stored[row].view for row in annotation.tokens]
            self.errors = annotation.errors
            self.classes = annotation.classes
            shard, place = shard[annotation.tokens], place[annotation.tokens]
            images = set(annotation.images.values())
            self.missing = [index for index in self.missing if any(image in images for image, _ in shards[index])]
        self._shard, self._place = shard, place
        self._maps: dict[tuple[int, str], _Mapped] = {}
        self._rows_without: dict[str, int] = {}
        self._from_disk = True
        # Kept from epoch to epoch, for as long as they ask for batches of one kind.
        self._pool: tuple[object, _BufferPool] = (None, _BufferPool())

    @classmethod
    def open(
        cls, path: Path | str, manifest: Manifest | None = None, expect: dict[str, Any] | None = None, partial: bool = False
    ) -> FeatureStore:
        """Open a store.

        Args:
            path: Folder of the store.
            manifest: The images to show, with their labels and masks. Lesion patches are computed from the masks the first time.
            expect: What must agree with `store.json`.
            partial: Accept a store that is not complete.

        Returns:
            The store.

        Raises:
            RequestError: There is no such store, or its extraction is not finished.
            MismatchError: It was made with other settings than `expect` says.
            WorkError: It is damaged.
        """
        path = Path(path)
        config = read_settings(path)
        if expect is not None:
            check_same(f"The store {path}", expect, config, "Use the store that was extracted with these settings, or extract one.")
        shards = read_plan(path)
        records = finished_shards(path, shards)
        identity = settings_hash(config)
        if others := [record_path(path, index).name for index, record in records.items() if record.settings != identity]:
            raise WorkError(
                f"{path / STORE} does not describe {listed(others, _LISTED)}: it was changed after they were made. Restore it."
            )
        store = cls(path, config, shards, records)
        if manifest is not None:
            store = store.annotated(manifest)
        if store.missing and not partial:
            names = listed([record_path(path, index).name for index in store.missing], _LISTED)
            raise RequestError(
                f"The store {path} is incomplete: {len(store.missing)} of {len(shards)} shards are missing or damaged ({names}). "
                "Run the same `mtb extract` command again to resume."
            )
        return store

    def annotated(self, manifest: Manifest) -> FeatureStore:
        """Show the same tokens through another manifest."""
        annotation = annotate(self.path, self.grid, self.stored, self.failures, manifest)
        return FeatureStore(self.path, self.config, self.shards, self.records, annotation)

    def __len__(self) -> int:
        return len(self.ids)

    def __repr__(self) -> str:
        return f"FeatureStore({str(self.path)!r}, rows={len(self)}, grid={self.grid}, dim={self.dim}, missing={len(self.missing)})"

    @property
    def n(self) -> int:
        """Number of patches N."""
        return self.grid[0] * self.grid[1]

    @property
    def early(self) -> dict[str, Any] | None:
        """How the tokens were routed before or inside the backbone (way, budget, k, ...); None for a plain backbone."""
        route: dict[str, Any] | None = self.config["backbone"].get("route")
        return route

    @property
    def fixed_budget(self) -> float | None:
        """The budget of tokens that were routed before or inside the backbone; None where all patches are there."""
        return None if self.early is None else float(self.early["budget"])

    @property
    def per_image(self) -> int:
        """Patch tokens of each row: N, or K if they were routed before or inside the backbone."""
        return self.n if self.early is None else int(self.early["k"])

    @cached_property
    def identity(self) -> str:
        """Hash of what the rows were made from and how, and of their annotations; other images in the store do not change it."""
        if self.annotation is None:
            return sha256_json([settings_hash(self.config), [row.key for row in self.stored], []])
        rows = [self.stored[row].key for row in self.annotation.tokens]
        lesion = hashlib.sha256(np.packbits(self.annotation.lesion).tobytes()).hexdigest()
        about = [list(self.classes), self.ids, self.annotation.label.tolist(), self.annotation.has_mask.tolist(), lesion]
        return sha256_json([settings_hash(self.config), rows, about])

    @cached_property
    def _rows_of_image(self) -> dict[str, dict[str, int]]:
        """Row numbers by image and view."""
        rows: dict[str, dict[str, int]] = {}
        for row, (name, view) in enumerate(zip(self.ids, self.views)):
            rows.setdefault(name, {})[view] = row
        return rows

    def rows(self, ids: Sequence[str], view: str | None = IDENTITY, strict: bool = True) -> np.ndarray:
        """Find the row numbers of images.

        Args:
            ids: Image ids.
            view: The view; None for all views of each image.
            strict: Raise an error for images without such a row, instead of leaving them out.

        Returns:
            Row numbers, int64, in the order of `ids`.

        Raises:
            RequestError: With `strict`, if an image has no such row.
        """
        by_view = [self._rows_of_image.get(name, {}) for name in ids]
        rows = [list(one.values()) if view is None else [one[view]] if view in one else [] for one in by_view]
        absent = [name for name, numbers in zip(ids, rows) if not numbers]
        if absent and strict:
            raise RequestError(self._absent_message(absent, len(ids), view))
        return np.asarray([row for numbers in rows for row in numbers], np.int64)

    def _absent_message(self, absent: list[str], of: int, view: str | None) -> str:
        reasons = {error.image_id: error.reason for error in self.errors if view in (None, error.view)}
        names = "; ".join(f"{name} ({reasons[name]})" if name in reasons else name for name in absent[:_LISTED])
        more = f" and {len(absent) - _LISTED} more" if len(absent) > _LISTED else ""
        what = "" if view in (None, IDENTITY) else f" with the view '{view}'"
        advice = "Run `mtb extract` with this store to add them, or leave them out."
        if self.missing:
            advice = f"{len(self.missing)} shards are missing: run the same `mtb extract` command again."
        return f"{len(absent)} of {of} images are not in the store {self.path}{what}: {names}{more}. {advice}"

    def has(self, field: str) -> bool:
        """Tell whether all rows carry this field (a backbone without a class token gives no `cls`)."""
        return len(self) > 0 and self._count_rows_without(field) == 0

    @cached_property
    def signals(self) -> tuple[str, ...]:
        """The signals that all rows carry."""
        return tuple(name for name in SIGNALS if self.has(name))

    def require_signals(self, names: Sequence[str]) -> None:
        """Raise a MissingSignalError, with what to do, for signals that not all rows carry; other names are ignored."""
        missing = [name for name in SIGNALS if name in names and not self.has(name)]
        if missing:
            count = max(map(self._count_rows_without, missing))
            raise MissingSignalError(
                f"The store {self.path} has no {', '.join(missing)} for {count} of {len(self)} rows. Run its `mtb extract` command "
                f"again with `signals` {' '.join(missing)}: the tokens stay, only the signals are added."
            )

    def _count_rows_without(self, field: str) -> int:
        if field not in self._rows_without:
            count = 0
            for shard in np.unique(self._shard).tolist():
                places = self._place[self._shard == shard].tolist()
                recorded = self.records[shard].fields.get(field)
                count += len(places) if recorded is None else sum(recorded.checksums[place] is None for place in places)
            self._rows_without[field] = count
        return self._rows_without[field]

    def _annotations(self) -> Annotation:
        if self.annotation is None:
            raise RequestError(f"Labels and masks of {self.path} come from a manifest: FeatureStore.open(path, manifest).")
        return self.annotation

    @cached_property
    def label(self) -> Tensor:
        """[n] int64, -1 where unknown."""
        return torch.from_numpy(self._annotations().label)

    @cached_property
    def lesion(self) -> Tensor:
        """[n, N] bool."""
        return torch.from_numpy(self._annotations().lesion)

    @cached_property
    def covered(self) -> Tensor:
        """[n, N] uint8, how much of each patch the mask covers; 255 is all of it."""
        return torch.from_numpy(self._annotations().covered)

    @cached_property
    def has_mask(self) -> Tensor:
        """[n] bool."""
        return torch.from_numpy(self._annotations().has_mask)

    @cached_property
    def luminance(self) -> Tensor:
        """Mean gray value of every patch, [n, N] in [0, 1]."""
        return self._whole("luminance")

    @cached_property
    def attention_entropy(self) -> Tensor:
        """Attention entropy of every patch (Eq. 1), [n, N]."""
        return self._whole("attention_entropy")

    @cached_property
    def cls_attention(self) -> Tensor:
        """Attention of the class token to every patch, [n, N]."""
        return self._whole("cls_attention")

    @cached_property
    def cls(self) -> Tensor:
        """Class token of every row, [n, D]."""
        return self._whole("cls")

    def _whole(self, field: str) -> Tensor:
        """Read a small field of all rows into memory."""
        if not self.has(field):
            raise RequestError(f"Store {self.path} has no {field}, because its backbone does not give it. Choose another backbone.")
        return _join_small([self._map(shard, field) for shard in self._shard.tolist()], self._place.tolist())

    def read(
        self, rows: Sequence[int] | np.ndarray | Tensor, dtype: torch.dtype = torch.float32, signals: Sequence[str] = ()
    ) -> TokenBatch:
        """Read rows as one batch, with tokens in `dtype` and, in addition to the default ones, these signals."""
        return self._read(self._checked(rows), dtype, _BufferPool(), signals)

    def batches(
        self,
        rows: Sequence[int] | np.ndarray | Tensor,
        batch_size: int,
        generator: torch.Generator | None = None,
        prefetch: int = 2,
        dtype: torch.dtype = torch.float32,
        signals: Sequence[str] = (),
    ) -> Iterator[TokenBatch]:
        """Read rows in batches.

        Args:
            rows: Row numbers.
            batch_size: Rows per batch; the last batch may be smaller.
            generator: Shuffles the rows, if given.
            prefetch: Batches that two threads read ahead; 0 uses no threads.
            dtype: Type of the tokens.
            signals: Signals to read in addition to the default ones, such as `selector.requires`; names of other fields are
                ignored.

        Yields:
            The batches.
        """
        order = self._checked(rows)
        if batch_size < 1:
            raise RequestError(f"The batch size must be 1 or more, got {batch_size}.")
        if generator is not None:
            order = order[torch.randperm(len(order), generator=generator).numpy()]
        if self._pool[0] != (batch_size, dtype):
            self._pool = ((batch_size, dtype), _BufferPool())
        pool = self._pool[1]
        parts = (order[start : start + batch_size] for start in range(0, len(order), batch_size))
        self.require_signals(signals)
        return ordered_map(lambda part: self._read(part, dtype, pool, signals), parts, prefetch, min(prefetch, _READERS))

    def _checked(self, rows: Sequence[int] | np.ndarray | Tensor) -> np.ndarray:
        index = np.asarray(rows, np.int64).reshape(-1)
        if len(index) and (index.min() < 0 or index.max() >= len(self)):
            raise RequestError(f"Row numbers must be between 0 and {len(self) - 1}, got {index.min()} to {index.max()}.")
        return index

    def _read(self, rows: np.ndarray, dtype: torch.dtype, pool: _BufferPool, signals: Sequence[str]) -> TokenBatch:
        if not len(rows):
            raise RequestError("There are no rows to read. Pass at least one row number.")
        self.require_signals(signals)
        shards, places = self._shard[rows].tolist(), self._place[rows].tolist()
        sources = [self._map(shard, "patches") for shard in shards]
        fields: dict[str, Any] = {"patches": pool.take((len(rows), *sources[0].field.shape), dtype)}
        # The kernel is told which rows are needed while they come from the disk; in memory, this would cost a fifth of the copy.
        before = _disk_reads()
        if self._from_disk:
            for one, place in zip(sources, places):
                one.announce(place)
        _join_large(sources, places, fields["patches"])
        self._from_disk = before is None or _disk_reads() != before
        small = [name for name in _SMALL if self.has(name)]
        small += [name for name in SIGNALS if name in signals and name not in small]
        for name in small:
            values = _join_small([self._map(shard, name) for shard in shards], places)
            fields[name] = values.to(dtype) if name in _IN_TOKEN_DTYPE else values
        if self.early is not None:
            fields["places"] = _join_small([self._map(shard, "places") for shard in shards], places).long()
        if self.annotation is not None:
            index = torch.from_numpy(rows)
            fields |= {"label": self.label[index], "has_mask": self.has_mask[index], "lesion": self.lesion[index]}
        return TokenBatch(grid=self.grid, image_id=tuple(self.ids[row] for row in rows.tolist()), **fields)

    def _map(self, shard: int, field: str) -> _Mapped:
        """Map a field of a shard, once."""
        key = (shard, field)
        if key not in self._maps:
            self._maps[key] = _Mapped(field_path(self.path, shard, field), self.records[shard].fields[field])
        return self._maps[key]

    def verify(self, manifest: Manifest | None = None) -> None:
        """Read every file and compare it with its checksums; with a manifest, also read every image again.

        Args:
            manifest: Its images must have the content that the store was made from.

        Raises:
            WorkError: Files are damaged, or images changed.
        """
        if bad := self.damaged():
            raise WorkError(
                f"Damaged files in {self.path}: {', '.join(bad)}. Delete them and run the same `mtb extract` command again."
            )
        if manifest is None:
            return
        index = FileIndex(self.path)
        images = index.hashes((manifest.image_path(i) for i in range(len(manifest))), again=True)
        index.save()
        known = {row.image for row in self.stored} | {failure.image for failure in self.failures}
        changed = [name for name, image in zip(manifest.ids, images) if image is not None and image not in known]
        if changed:
            raise WorkError(
                f"{len(changed)} of {len(images)} images have changed since {self.path} was extracted: {listed(changed, _LISTED)}. "
                "Run the same `mtb extract` command again to extract them."
            )

    def damaged(self) -> list[str]:
        """Name the files that are not as they were written. Reads all of them."""
        bad: list[str] = []
        for index in self.missing:
            if record_path(self.path, index).exists():  # without a record the shard was never finished, which is no damage
                record = read_record(self.path, index, self.shards[index])
                bad += [record_path(self.path, index).name] if record is None else broken_files(self.path, index, record)
        with progress(total=len(self.records), what="Checking", unit="shard") as bar:
            for index, record in sorted(self.records.items()):
                for name, field in record.fields.items():
                    try:
                        mapped = _Mapped(field_path(self.path, index, name), field)
                        for place in range(len(record.rows)):
                            mapped.check(place)
                    except WorkError:
                        bad.append(field_path(self.path, index, name).name)
                bar.update()
        bad += known_manifests(self.path)[1]
        return bad + (["cache/files.json"] if FileIndex(self.path).damaged else [])


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
        count, present = len(one["images"]), sum(image in here for image in one["images"].values())
        about = {key: one[key] for key in ("name", "source", "hash")}
        manifests.append({**about, "images": count, "present": present, "fits": present == count})
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


# How rows reach a batch: joined without Python between them, in reused buffers -----------------------------------------


class _Mapped:
    """The file of a field, memory-mapped: nothing is read before it is touched.

    Raises:
        WorkError: The file is not the one that was recorded.
    """

    def __init__(self, path: Path, field: Field) -> None:
        self.path, self.field = path, field
        try:
            # Torch maps privately and keeps no file open, unlike Python's mmap: a store may have more shards than a process has
            # files. Torch has no read-only memory, but a write would not reach the file.
            memory = torch.from_file(str(path), shared=False, size=os.path.getsize(path), dtype=torch.uint8)
        except (OSError, RuntimeError):
            raise self._damaged() from None
        if field.row_bytes >= 1 << 16:
            # A page fault reads megabytes around its page otherwise, which a store larger than memory drops before they are used:
            # an epoch over 3.3 GB with 0.9 GB of memory took 460 s instead of 5 s.
            _advise(memory.data_ptr(), memory.data_ptr() + len(memory), "MADV_RANDOM")
        if len(memory) != field.file_bytes or memory[:_HEADER].numpy().tobytes() != field.header:
            raise self._damaged()
        numbers = memory[_HEADER:].numpy()
        self.rows = torch.from_numpy(numbers.view(field.dtype).reshape(len(field.checksums), -1))
        """[n, elements]"""
        self.wide = _widened(self.rows)
        self._memory, self._size, self._start = numbers.data, field.row_bytes, self.rows.data_ptr()
        self._sound = bytearray(len(field.checksums))

    def announce(self, place: int) -> None:
        """Ask the kernel to fetch a row in one piece, before it is used: from a disk five times as fast as page by page."""
        _advise(self._start + place * self._size, self._start + (place + 1) * self._size, "MADV_WILLNEED")

    def bytes(self, place: int) -> memoryview:
        return self._memory[place * self._size : (place + 1) * self._size]

    def check(self, place: int) -> None:
        """Compare the checksum of a row that is read for the first time: damage is an error, not a number."""
        if not self._sound[place]:
            if self.field.checksums[place] not in (None, zlib.crc32(self.bytes(place))):
                raise self._damaged()
            self._sound[place] = True

    def _damaged(self) -> WorkError:
        return WorkError(f"{self.path} is damaged. Delete it and run the same `mtb extract` again: only this shard is made again.")


_madvise = ctypes.CDLL(None).madvise if hasattr(mmap, "MADV_WILLNEED") else None
"""The system's madvise, if there is one; Python's own needs a map that keeps a file open."""
if _madvise is not None:
    _madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def _advise(start: int, end: int, advice: str) -> None:
    """Give the kernel advice about a range of addresses. It is optional: without it, reading is only slower."""
    if _madvise is not None:
        start -= start % mmap.PAGESIZE
        _madvise(start, end - start, getattr(mmap, advice))


def _disk_reads() -> int | None:
    """Return a counter that grows when this thread waits for a page or reads from the disk; None if the system has none."""
    try:
        import resource

        usage = resource.getrusage(resource.RUSAGE_THREAD)
    except (ImportError, AttributeError):
        return None
    return usage.ru_majflt + usage.ru_inblock


class _BufferPool:
    """Reuses memory once the last tensor over it is gone, and never before.

    A new buffer of many megabytes costs a page fault every 4 KiB, which is as expensive as the copy itself. As long as a caller
    keeps a batch, the pool allocates new buffers.
    """

    def __init__(self) -> None:
        self._free: dict[Any, list[np.ndarray]] = {}

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Give an uninitialized tensor of `shape`."""
        free = self._free.setdefault((shape, dtype), [])
        try:
            memory = free.pop()
        except IndexError:
            # By numpy, which asks for huge pages; copies into memory that torch allocated were slower.
            memory = np.empty(shape, torch.empty(0, dtype=dtype).numpy().dtype)
        # Only the storage of the tensor references this view, so it is deleted with the last tensor over the storage.
        view = memory.view()
        weakref.finalize(view, free.append, memory).atexit = False
        return torch.from_numpy(view)


def _widened(rows: Tensor) -> Tensor | None:
    """View rows [n, ...] in elements of 16 bytes, for copies; None if they do not start at multiples of 16."""
    fits = rows.data_ptr() % _WIDE.itemsize == 0 and rows.shape[1] * rows.itemsize % _WIDE.itemsize == 0
    return rows.view(_WIDE) if fits else None


def _join_small(sources: Sequence[_Mapped], places: Sequence[int]) -> Tensor:
    """Stack row `places[i]` of `sources[i]`. For rows of a few KiB, where creating arrays costs more than the copy."""
    joined = bytearray().join([one.bytes(place) for one, place in zip(sources, places)])
    for one, place in zip(sources, places):
        one.check(place)
    field = sources[0].field
    return torch.from_numpy(np.frombuffer(joined, field.dtype).reshape(len(sources), *field.shape))


def _join_large(sources: Sequence[_Mapped], places: Sequence[int], target: Tensor) -> None:
    """Stack row `places[i]` of `sources[i]` in `target`, in its number format.

    This is one call of torch, which releases the GIL once for all rows, so that two readers do not wait for each other.
    """
    flat = target.view(len(sources), -1)
    whole = _widened(flat)
    wide = [one.wide[place] for one, place in zip(sources, places) if one.wide is not None]
    if sources[0].rows.dtype != flat.dtype:
        pieces = [piece for one, place in zip(sources, places) for piece in one.rows[place].split(_PIECE)]
        torch.cat(pieces, out=flat.view(-1))
    elif whole is not None and len(wide) == len(sources):
        torch.stack(wide, out=whole)
    else:
        torch.stack([one.rows[place] for one, place in zip(sources, places)], out=flat)
    for one, place in zip(sources, places):  # after the copy, when the rows are in memory
        one.check(place)
