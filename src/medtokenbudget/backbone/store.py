"""`FeatureStore`: frozen tokens on disk, read like an array that may be larger than memory.

A store is a folder with `store.json` (the settings that its numbers depend on), `plan.json` (the rows of each shard) and, for each
shard, a file per field (`patches-00003.npy`, ...) and a JSON record, which is published last: a shard without one, or with a file
of another size than it says, is never read. `extract.py` fills a store, `annotations.py` adds what a manifest says.
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
from medtokenbudget.files import atomic_write, read_json, read_sealed, sha256_json, unsealed, write_sealed
from medtokenbudget.runtime import ordered_map, progress
from medtokenbudget.tokens import SEGMENTATION, SIGNALS, TokenBatch

FORMAT = 5
STORE, PLAN = "store.json", "plan.json"
NOT_IDENTITY = ("weights",)
"""Settings that may differ: the file of the weights may be elsewhere by now, and the backbone's fingerprint has its hash."""
Key = tuple[str, str]
"""SHA-256 of an image file, and the name of a view."""
Shards = dict[int, tuple[Key, ...]]
"""Rows by number of the shard."""
RowNumbers = Sequence[int] | np.ndarray | Tensor
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


def read_settings(store: Path) -> dict[str, Any]:
    if not (store / STORE).is_file():
        raise RequestError(f"{store} is not a token store: it has no {STORE}. Create one with `mtb extract`.")
    settings = read_json(store / STORE)
    version = settings.get("format") if isinstance(settings, dict) else None
    if version != FORMAT:
        advice = "Run `mtb extract` to extract it again into a new folder."
        raise RequestError(f"{store} has store format {version!r}, but this version reads format {FORMAT}. {advice}")
    return unsealed(store / STORE, settings, "Restore the file, or extract into another folder.")


def settings_hash(settings: dict[str, Any]) -> str:
    return sha256_json({key: value for key, value in settings.items() if key not in NOT_IDENTITY})


def read_plan(store: Path) -> Shards:
    """Read the rows of each shard by number; empty for a store that was only just begun."""
    if not (store / PLAN).is_file():
        return {}
    # The shards of the same request are planned in the same order again, so finished ones stay.
    plan = read_sealed(store / PLAN, "Delete it and run the same `mtb extract` command again.")
    return {int(number): tuple((image, view) for image, view in rows) for number, rows in plan.items()}


def write_plan(store: Path, shards: Shards) -> None:
    write_sealed(store / PLAN, {str(number): rows for number, rows in sorted(shards.items())}, compact=True)


@dataclass(frozen=True)
class Planned:
    """An image by its SHA-256, and one of its views."""

    image: str
    view: str

    @property
    def key(self) -> Key:
        return self.image, self.view


@dataclass(frozen=True)
class Row(Planned):
    """What a row of the fields shows: an image of (width, height) pixels in a view of this geometry."""

    size: tuple[int, int]
    geometry: Geometry


@dataclass(frozen=True)
class FailedRow(Planned):
    """A planned row that has no tokens, and why."""

    kind: Literal["image", "view", "tokens"]
    """'image' could not be read, 'view' does not exist with this mask, 'tokens' are not finite."""
    reason: str
    mask: str | None = None
    """SHA-256 of the mask that a view was to be made with."""


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

    @property
    def keys(self) -> list[Key]:
        return [row.key for row in self.rows] + [failure.key for failure in self.failures]

    def write(self, store: Path, index: int) -> None:
        values = {
            "rows": [[row.image, row.view, list(row.size), row.geometry.to_json()] for row in self.rows],
            "failures": [vars(failure) for failure in self.failures],
            "batch_size": self.batch_size,
            "settings": self.settings,
            "fields": {name: [field.dtype, field.shape, field.checksums] for name, field in sorted(self.fields.items())},
        }
        write_sealed(record_path(store, index), values, compact=True)

    @staticmethod
    def read(store: Path, index: int) -> Record | None:
        try:
            value = read_sealed(record_path(store, index), "")
            rows = tuple(Row(image, view, (w, h), Geometry.from_json(geometry)) for image, view, (w, h), geometry in value["rows"])
            failures = tuple(FailedRow(**failure) for failure in value["failures"])
            fields = {name: Field(dtype, tuple(shape), tuple(sums)) for name, (dtype, shape, sums) in value["fields"].items()}
            return Record(rows, failures, value["batch_size"], value["settings"], fields)
        # What cannot be read counts as never written: the shard is made again.
        except (RequestError, ValueError, KeyError, TypeError):
            return None


def record_path(store: Path, index: int) -> Path:
    return store / f"shard-{index:05d}.json"


def field_path(store: Path, index: int, name: str) -> Path:
    return store / f"{name}-{index:05d}.npy"


def check_shard(store: Path, index: int, planned: Sequence[Key]) -> tuple[Record | None, list[str]]:
    """Return the record of a finished shard, or None and the names of its files that are missing or not what was written."""
    record = Record.read(store, index)
    if record is None or sorted(record.keys) != sorted(planned):
        return None, [record_path(store, index).name]
    # Sizes only: reading every file of a store would take as long as an epoch. Rows are checked when they are read.
    sizes = {field_path(store, index, name): field.file_bytes for name, field in record.fields.items()}
    broken = [path.name for path, size in sizes.items() if not path.is_file() or path.stat().st_size != size]
    return None if broken else record, broken


def finished_shards(store: Path, shards: Shards) -> dict[int, Record]:
    records = {index: check_shard(store, index, keys)[0] for index, keys in shards.items()}
    return {index: record for index, record in records.items() if record is not None}


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


class MappedField:
    """The file of a field, memory-mapped: nothing is read before it is touched."""

    def __init__(self, store: Path, index: int, name: str, field: Field) -> None:
        self.path, self.field = field_path(store, index, name), field
        try:
            # Torch maps privately and keeps no file open, unlike Python's mmap: a store may have more shards than a process has
            # files. Torch has no read-only memory, but a write would not reach the file.
            memory = torch.from_file(str(self.path), shared=False, size=os.path.getsize(self.path), dtype=torch.uint8)
        except (OSError, RuntimeError):
            raise self._damaged() from None
        if field.row_bytes >= 1 << 16:
            # A page fault reads megabytes around its page otherwise, which a store larger than memory drops before they are used:
            # an epoch over 3.3 GB with 0.9 GB of memory took 460 s instead of 5 s.
            _advise(memory.data_ptr(), memory.data_ptr() + len(memory), "MADV_RANDOM")
        if len(memory) != field.file_bytes or memory[:_HEADER].numpy().tobytes() != field.header:
            raise self._damaged()
        numbers = memory[_HEADER:].numpy()
        self.array = numbers.view(field.dtype).reshape(len(field.checksums), *field.shape)
        self.rows = torch.from_numpy(self.array.reshape(len(field.checksums), -1))
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
        self.path, self.config, self.shards, self.records, self.annotation = path, config, shards, records, annotation
        h, w = config["backbone"]["grid"]
        self.grid: tuple[int, int] = (int(h), int(w))
        self.dim = int(config["backbone"]["dim"])
        places = [(index, place) for index in sorted(records) for place in range(len(records[index].rows))]
        self.stored = [records[index].rows[place] for index, place in places]
        self.failures = [failure for index in sorted(records) for failure in records[index].failures]
        self.missing = [index for index in shards if index not in records]
        # Shard of each row, and its place in the shard.
        self._shard, self._place = np.array(places, np.int64).reshape(-1, 2).T
        if annotation is None:
            self.ids = [row.image for row in self.stored]
            self.views = [row.view for row in self.stored]
            self.errors = [RowError(failure.image, failure.view, failure.reason) for failure in self.failures]
            self.classes: tuple[str, ...] = ()
        else:
            self.ids, self.errors, self.classes = annotation.ids, annotation.errors, annotation.classes
            self.views = [self.stored[row].view for row in annotation.tokens]
            self._shard, self._place = self._shard[annotation.tokens], self._place[annotation.tokens]
            images = set(annotation.images.values())
            self.missing = [index for index in self.missing if any(image in images for image, _ in shards[index])]
        self._maps: dict[tuple[int, str], MappedField] = {}
        self._from_disk = True
        # Kept from epoch to epoch, for as long as they ask for batches of one kind.
        self._pool: tuple[object, _BufferPool] = (None, _BufferPool())

    @classmethod
    def open(cls, path: Path | str, manifest: Manifest | None = None, partial: bool = False) -> FeatureStore:
        """Open a store.

        Args:
            path: Folder of the store.
            manifest: The images to show, with their labels and masks. Lesion patches are computed from the masks the first time.
            partial: Accept a store that is not complete.

        Raises:
            RequestError: There is no such store, or its extraction is not finished.
            WorkError: It is damaged.
        """
        path = Path(path)
        config, shards = read_settings(path), read_plan(path)
        records = finished_shards(path, shards)
        identity = settings_hash(config)
        if others := [record_path(path, index).name for index, record in records.items() if record.settings != identity]:
            raise WorkError(f"{path / STORE} does not describe {listed(others)}: it was changed after they were made. Restore it.")
        store = cls(path, config, shards, records)
        if manifest is not None:
            store = store.annotated(manifest)
        if store.missing and not partial:
            names = listed([record_path(path, index).name for index in store.missing])
            raise RequestError(
                f"The store {path} is incomplete: {len(store.missing)} of {len(shards)} shards are missing or damaged ({names}). "
                "Run the same `mtb extract` command again to resume."
            )
        return store

    def annotated(self, manifest: Manifest) -> FeatureStore:
        annotation = annotate(self.path, self.grid, self.stored, self.failures, manifest)
        return FeatureStore(self.path, self.config, self.shards, self.records, annotation)

    def __len__(self) -> int:
        return len(self.ids)

    def __repr__(self) -> str:
        return f"FeatureStore({str(self.path)!r}, rows={len(self)}, grid={self.grid}, dim={self.dim}, missing={len(self.missing)})"

    @property
    def n(self) -> int:
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
        # By the hashes of the images: the same rows in another order of shards are the same data.
        rows = [self.stored[row].key for row in self.annotation.tokens]
        lesion = hashlib.sha256(np.packbits(self.annotation.lesion).tobytes()).hexdigest()
        about = [list(self.classes), self.ids, self.annotation.label.tolist(), self.annotation.has_mask.tolist(), lesion]
        return sha256_json([settings_hash(self.config), rows, about])

    def _annotation_of(self, name: str) -> Tensor:
        if self.annotation is None:
            raise RequestError(f"Labels and masks of {self.path} come from a manifest: FeatureStore.open(path, manifest).")
        return torch.from_numpy(getattr(self.annotation, name))

    @cached_property
    def label(self) -> Tensor:
        """[n] int64, -1 where unknown."""
        return self._annotation_of("label")

    @cached_property
    def lesion(self) -> Tensor:
        """[n, N] bool."""
        return self._annotation_of("lesion")

    @cached_property
    def covered(self) -> Tensor:
        """[n, N] uint8, how much of each patch the mask covers; 255 is all of it."""
        return self._annotation_of("covered")

    @cached_property
    def has_mask(self) -> Tensor:
        """[n] bool."""
        return self._annotation_of("has_mask")

    @cached_property
    def _rows_of_image(self) -> dict[str, dict[str, int]]:
        rows: dict[str, dict[str, int]] = {}
        for row, (name, view) in enumerate(zip(self.ids, self.views)):
            rows.setdefault(name, {})[view] = row
        return rows

    def rows(self, ids: Sequence[str], view: str | None = IDENTITY, strict: bool = True) -> np.ndarray:
        """Find the row numbers of images in this view, int64 in the order of `ids`; None means all views of each image.

        An image without such a row is a RequestError or, unless `strict`, left out.
        """
        by_view = [self._rows_of_image.get(name, {}) for name in ids]
        rows = [list(one.values()) if view is None else [one[view]] if view in one else [] for one in by_view]
        absent = [name for name, numbers in zip(ids, rows) if not numbers]
        if absent and strict:
            reasons = {error.image_id: f" ({error.reason})" for error in self.errors if view in (None, error.view)}
            names = listed([name + reasons.get(name, "") for name in absent])
            what = "" if view in (None, IDENTITY) else f" with the view '{view}'"
            advice = "Run `mtb extract` with this store to add them, or leave them out."
            if self.missing:
                advice = f"{len(self.missing)} shards are missing: run the same `mtb extract` command again."
            raise RequestError(f"{len(absent)} of {len(ids)} images are not in the store {self.path}{what}: {names}. {advice}")
        return np.asarray([row for numbers in rows for row in numbers], np.int64)

    @cached_property
    def _rows_with(self) -> Counter[str]:
        counts: Counter[str] = Counter()
        for shard in np.unique(self._shard).tolist():
            places = self._place[self._shard == shard].tolist()
            for name, field in self.records[shard].fields.items():
                # A signal that was added later may be missing for images whose files were gone.
                counts[name] += sum(field.checksums[place] is not None for place in places)
        return counts

    def has(self, field: str) -> bool:
        """Tell whether all rows carry this field (a backbone without a class token gives no `cls`)."""
        return len(self) > 0 and self._rows_with[field] == len(self)

    @property
    def signals(self) -> tuple[str, ...]:
        return tuple(name for name in (*SIGNALS, SEGMENTATION) if self.has(name))

    def require_signals(self, names: Sequence[str]) -> None:
        """Raise a MissingSignalError, with what to do, for signals that not all rows carry; other names are ignored."""
        missing = [name for name in (*SIGNALS, SEGMENTATION) if name in names and not self.has(name)]
        if missing:
            count = len(self) - min(self._rows_with[name] for name in missing)
            signals = " ".join(name for name in missing if name in SIGNALS)
            given = [f"`signals` {signals}"] * bool(signals) + ["`segmenter`"] * (SEGMENTATION in missing)
            raise MissingSignalError(
                f"The store {self.path} has no {', '.join(missing)} for {count} of {len(self)} rows. Run its `mtb extract` command "
                f"again with {' and '.join(given)}: the tokens stay, only the signals are added."
            )

    def read(self, rows: RowNumbers, dtype: torch.dtype = torch.float32, signals: Sequence[str] = ()) -> TokenBatch:
        """Read rows as one batch, with tokens in `dtype` and, in addition to the default ones, these signals."""
        index = self._checked(rows, signals)
        if not len(index):
            raise RequestError("There are no rows to read. Pass at least one row number.")
        return self._read(index, dtype, _BufferPool(), signals)

    def batches(
        self,
        rows: RowNumbers,
        batch_size: int,
        generator: torch.Generator | None = None,
        dtype: torch.dtype = torch.float32,
        signals: Sequence[str] = (),
    ) -> Iterator[TokenBatch]:
        """Read rows in batches of `batch_size`, shuffled by `generator` if given; two threads read two batches ahead.

        `signals` are read in addition to the default ones, such as `selector.requires`; names of other fields are ignored.
        """
        order = self._checked(rows, signals)
        if batch_size < 1:
            raise RequestError(f"The batch size must be 1 or more, got {batch_size}.")
        if generator is not None:
            order = order[torch.randperm(len(order), generator=generator).numpy()]
        if self._pool[0] != (batch_size, dtype):
            self._pool = ((batch_size, dtype), _BufferPool())
        pool = self._pool[1]
        parts = (order[start : start + batch_size] for start in range(0, len(order), batch_size))
        return ordered_map(lambda part: self._read(part, dtype, pool, signals), parts, _READERS, _READERS)

    def _checked(self, rows: RowNumbers, signals: Sequence[str]) -> np.ndarray:
        index = np.asarray(rows, np.int64).reshape(-1)
        if len(index) and (index.min() < 0 or index.max() >= len(self)):
            raise RequestError(f"Row numbers must be between 0 and {len(self) - 1}, got {index.min()} to {index.max()}.")
        self.require_signals(signals)
        return index

    def _read(self, rows: np.ndarray, dtype: torch.dtype, pool: _BufferPool, signals: Sequence[str]) -> TokenBatch:
        shards, places = self._shard[rows].tolist(), self._place[rows].tolist()
        sources = [self._map(shard, "patches") for shard in shards]
        fields: dict[str, Any] = {"patches": pool.take((len(rows), *sources[0].field.shape), dtype)}
        # The kernel is told which rows are needed while they come from the disk; in memory, this would cost a fifth of the copy.
        before = _disk_reads()
        if self._from_disk:
            for source, place in zip(sources, places):
                source.announce(place)
        _join_large(sources, places, fields["patches"])
        self._from_disk = before is None or _disk_reads() != before
        small = [name for name in _SMALL if self.has(name)]
        small += [name for name in (*SIGNALS, SEGMENTATION) if name in signals and name not in small]
        for name in small:
            values = _join_small([self._map(shard, name) for shard in shards], places)
            fields[name] = values.to(dtype) if name in _IN_TOKEN_DTYPE else values
        if self.early is not None:
            fields["places"] = _join_small([self._map(shard, "places") for shard in shards], places).long()
        if self.annotation is not None:
            index = torch.from_numpy(rows)
            fields |= {"label": self.label[index], "has_mask": self.has_mask[index], "lesion": self.lesion[index]}
        return TokenBatch(grid=self.grid, image_id=tuple(self.ids[row] for row in rows.tolist()), **fields)

    def _map(self, shard: int, field: str) -> MappedField:
        key = (shard, field)
        if key not in self._maps:
            self._maps[key] = MappedField(self.path, shard, field, self.records[shard].fields[field])
        return self._maps[key]

    def verify(self, manifest: Manifest) -> None:
        """Read every file and every image of the manifest, and compare them with what was extracted."""
        if bad := self.damaged():
            advice = "Delete them and run the same `mtb extract` command again."
            raise WorkError(f"Damaged files in {self.path}: {', '.join(bad)}. {advice}")
        index = FileIndex(self.path)
        images = index.hashes((manifest.image_path(i) for i in range(len(manifest))), again=True)
        index.save()
        known = {row.image for row in self.stored} | {failure.image for failure in self.failures}
        changed = [name for name, image in zip(manifest.ids, images) if image is not None and image not in known]
        if changed:
            raise WorkError(
                f"{len(changed)} of {len(images)} images have changed since {self.path} was extracted: {listed(changed)}. "
                "Run the same `mtb extract` command again to extract them."
            )

    def damaged(self) -> list[str]:
        """Name the files that are not what was written. Reads all of them."""
        bad: list[str] = []
        for index in self.missing:
            if record_path(self.path, index).exists():  # without a record the shard was never finished, which is no damage
                bad += check_shard(self.path, index, self.shards[index])[1]
        for index, record in progress(sorted(self.records.items()), what="Checking", unit="shard"):
            for name, field in record.fields.items():
                try:
                    mapped = MappedField(self.path, index, name, field)
                    for place in range(len(record.rows)):
                        mapped.check(place)
                except WorkError:
                    bad.append(field_path(self.path, index, name).name)
        bad += known_manifests(self.path)[1]
        return bad + (["cache/files.json"] if FileIndex(self.path).damaged else [])


def info(path: Path | str) -> dict[str, Any]:
    """Describe a store in JSON values, with the names of damaged files, for which every file is read.

    Each manifest that the store was opened with has the number of its images and how many are here ("fits" if all are).
    """
    store = FeatureStore.open(path, partial=True)
    views = Counter(row.view for row in store.stored)
    # An image that cannot be read is here too: another extraction would not add it.
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


_madvise = ctypes.CDLL(None).madvise if hasattr(mmap, "MADV_WILLNEED") else None
"""The system's madvise, if there is one; Python's own needs a map that keeps a file open."""
if _madvise is not None:
    _madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def _advise(start: int, end: int, advice: str) -> None:
    """Give the kernel advice about a range of addresses; without it, reading is only slower."""
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


def _join_small(sources: Sequence[MappedField], places: Sequence[int]) -> Tensor:
    """Stack row `places[i]` of `sources[i]`. For rows of a few KiB, where creating arrays costs more than the copy."""
    joined = bytearray().join([source.bytes(place) for source, place in zip(sources, places)])
    for source, place in zip(sources, places):
        source.check(place)
    field = sources[0].field
    return torch.from_numpy(np.frombuffer(joined, field.dtype).reshape(len(sources), *field.shape))


def _join_large(sources: Sequence[MappedField], places: Sequence[int], target: Tensor) -> None:
    """Stack row `places[i]` of `sources[i]` in `target`, in its number format.

    This is one call of torch, which releases the GIL once for all rows, so that two readers do not wait for each other.
    """
    flat = target.view(len(sources), -1)
    wide = [source.wide[place] for source, place in zip(sources, places) if source.wide is not None]
    if len(wide) == len(sources) and sources[0].rows.dtype == flat.dtype and (wide_target := _widened(flat)) is not None:
        torch.stack(wide, out=wide_target)
    else:
        pieces = [piece for source, place in zip(sources, places) for piece in source.rows[place].split(_PIECE)]
        torch.cat(pieces, out=flat.view(-1))
    for source, place in zip(sources, places):  # after the copy, when the rows are in memory
        source.check(place)
