"""`FeatureStore`: frozen tokens on disk, read like an array that may be larger than memory.

`shards.py` has the files, `extract.py` fills them, `annotations.py` adds what a manifest says. The second half of this chapter
makes reading fast: rows are joined without Python between them, in reused buffers, by threads that read ahead.
"""

from __future__ import annotations

import hashlib
import math
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from medtokenbudget.backbone.annotations import Annotation, FileIndex, RowError, annotate, known_manifests
from medtokenbudget.backbone.shards import (
    LARGE,
    STORE,
    FailedRow,
    Row,
    Shards,
    Sidecar,
    advise,
    check_same,
    damaged,
    finished_shards,
    map_shard,
    read_plan,
    read_settings,
    read_signal,
    row_checksum,
    settings_hash,
    shard_path,
    sidecar_path,
    signal_names,
    signal_path,
)
from medtokenbudget.backbone.stored_signals import DEFAULT
from medtokenbudget.backbone.views import IDENTITY, view_order
from medtokenbudget.data.manifest import Manifest, listed
from medtokenbudget.errors import MissingSignalError, RequestError, WorkError
from medtokenbudget.files import sha256_file, sha256_json
from medtokenbudget.progress import progress
from medtokenbudget.tokens import SIGNALS, TokenBatch

P = TypeVar("P")
T = TypeVar("T")
_SMALL = ("cls", *DEFAULT, "luminance")
"""Fields that every batch has, if the store has them."""
_IN_TOKEN_DTYPE = (*LARGE, "cls", "mean_key")
_LISTED = 5
_READERS = 2
"""Threads; one core cannot use the full bandwidth of the memory."""
_PIECE = 1 << 15
"""Elements; torch would spread a longer copy over its threads, which the training needs at the same time."""
_WIDE = torch.complex128
"""The longest element type, 16 bytes: a row of 256 patches of 1,024 halves is then one piece."""


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
        self, path: Path, config: dict[str, Any], shards: Shards, sidecars: dict[int, Sidecar], annotation: Annotation | None = None
    ) -> None:
        self.path = path
        self.config = config
        self.grid: tuple[int, int] = (int(config["backbone"]["grid"][0]), int(config["backbone"]["grid"][1]))
        self.dim = int(config["backbone"]["dim"])
        self.shards = shards
        self.sidecars = sidecars
        self.annotation = annotation
        finished = sorted(sidecars)
        self.stored: list[Row] = [row for index in finished for row in sidecars[index].rows]
        self.failures: list[FailedRow] = [failure for index in finished for failure in sidecars[index].failures]
        self.missing = [index for index in shards if index not in sidecars]
        places = [(index, place) for index in finished for place in range(len(sidecars[index].rows))]
        shard, offset = np.asarray(places, np.int64).reshape(-1, 2).T.copy()
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
            shard, offset = shard[annotation.tokens], offset[annotation.tokens]
            images = set(annotation.images.values())
            self.missing = [index for index in self.missing if any(image in images for image, _ in shards[index])]
        # Shard of each row, and its place in the tensors of the shard.
        self._shard, self._offset = shard, offset
        self._maps: dict[int, dict[str, MappedRows]] = {}
        self._rows_without: dict[str, int] = {}
        self._sound: dict[str, np.ndarray] = {}
        self._fetching = Fetching()
        # Kept from epoch to epoch, for as long as they ask for batches of one kind.
        self._pool: tuple[object, BufferPool] = (None, BufferPool())

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
        sidecars = finished_shards(path, shards)
        identity = settings_hash(config)
        if others := [shard_path(path, index).name for index, sidecar in sidecars.items() if sidecar.settings != identity]:
            raise WorkError(
                f"{path / STORE} does not describe {listed(others, _LISTED)}: it was changed after they were made. Restore it."
            )
        store = cls(path, config, shards, sidecars)
        if manifest is not None:
            store = store.annotated(manifest)
        if store.missing and not partial:
            names = listed([sidecar_path(path, index).name for index in store.missing], _LISTED)
            raise RequestError(
                f"The store {path} is incomplete: {len(store.missing)} of {len(shards)} shards are missing or damaged ({names}). "
                "Run the same `mtb extract` command again to resume."
            )
        return store

    def annotated(self, manifest: Manifest) -> FeatureStore:
        """Show the same tokens through another manifest."""
        annotation = annotate(self.path, self.grid, self.stored, self.failures, manifest)
        return FeatureStore(self.path, self.config, self.shards, self.sidecars, annotation)

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
        absent = [name for name, found in zip(ids, rows) if not found]
        if absent and strict:
            raise RequestError(self._absent_message(absent, len(ids), view))
        return np.asarray([row for found in rows for row in found], np.int64)

    def _absent_message(self, absent: list[str], of: int, view: str | None) -> str:
        reasons = {error.image_id: error.reason for error in self.errors if view in (None, error.view)}
        names = "; ".join(f"{name} ({reasons[name]})" if name in reasons else name for name in absent[:_LISTED])
        more = f" and {len(absent) - _LISTED} more" if len(absent) > _LISTED else ""
        what = "" if view in (None, IDENTITY) else f" with the view '{view}'"
        advice = f"Run `mtb extract MANIFEST --store {self.path}` to add them, or leave them out."
        if self.missing:
            advice = f"{len(self.missing)} shards are missing: run the same `mtb extract` command again."
        return f"{len(absent)} of {of} images are not in the store {self.path}{what}: {names}{more}. {advice}"

    def has(self, field: str) -> bool:
        """Whether all rows carry this field (a backbone without a class token gives no `cls`)."""
        return len(self) > 0 and self._count_rows_without(field) == 0

    @cached_property
    def signals(self) -> tuple[str, ...]:
        """The signals that all rows carry, see `backbone/stored_signals.py`."""
        return tuple(name for name in SIGNALS if self.has(name))

    def require_signals(self, names: Sequence[str]) -> None:
        """Raise a MissingSignalError, with what to do, for signals that not all rows carry; other names are not looked at."""
        missing = [name for name in SIGNALS if name in names and not self.has(name)]
        if missing:
            count = max(map(self._count_rows_without, missing))
            raise MissingSignalError(
                f"The store {self.path} has no {', '.join(missing)} for {count} of {len(self)} rows. Run its `mtb extract` command "
                f"again with --signals {' '.join(missing)}: the tokens stay, only the signals are added."
            )

    def _count_rows_without(self, field: str) -> int:
        if field not in self._rows_without:
            absent = 0
            for shard in np.unique(self._shard).tolist():
                if field in self._fields_of(shard):
                    continue
                places = self._offset[self._shard == shard].tolist()
                file = read_signal(self.path, shard, field, self.sidecars[shard]) if field in SIGNALS else None
                absent += len(places) if file is None else sum(place in file.missing for place in places)
            self._rows_without[field] = absent
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
        """A small field of all rows, in memory."""
        if not self.has(field):
            raise RequestError(f"Store {self.path} has no {field}, because its backbone does not give it. Choose another backbone.")
        for shard in np.unique(self._shard).tolist():
            mapped = self._map(shard, field)
            mapped.announce(0, len(mapped.array))
        sources = [self._map(shard, field) for shard in self._shard.tolist()]
        values = join_small(sources, self._offset.tolist())
        self._check_sound(field, np.arange(len(self)), sources)
        return values

    def read(
        self, rows: Sequence[int] | np.ndarray | Tensor, dtype: torch.dtype = torch.float32, signals: Sequence[str] = ()
    ) -> TokenBatch:
        """Read rows as one batch, with tokens in `dtype` and, beside the default ones, these signals."""
        return self._read(self._checked(rows), dtype, BufferPool(), signals)

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
            signals: Signals to read beside the default ones, such as `selector.requires`; names of other fields are ignored.

        Yields:
            The batches.
        """
        order = self._checked(rows)
        if batch_size < 1:
            raise RequestError(f"The batch size must be 1 or more, got {batch_size}.")
        if generator is not None:
            order = order[torch.randperm(len(order), generator=generator).numpy()]
        if self._pool[0] != (batch_size, dtype):
            self._pool = ((batch_size, dtype), BufferPool())
        pool = self._pool[1]
        parts = (order[start : start + batch_size] for start in range(0, len(order), batch_size))
        self.require_signals(signals)
        return ordered_map(lambda part: self._read(part, dtype, pool, signals), parts, prefetch, min(prefetch, _READERS))

    def _checked(self, rows: Sequence[int] | np.ndarray | Tensor) -> np.ndarray:
        index = np.asarray(rows, np.int64).reshape(-1)
        if len(index) and (index.min() < 0 or index.max() >= len(self)):
            raise RequestError(f"Row numbers must be between 0 and {len(self) - 1}, got {index.min()} to {index.max()}.")
        return index

    def _read(self, rows: np.ndarray, dtype: torch.dtype, pool: BufferPool, signals: Sequence[str]) -> TokenBatch:
        if not len(rows):
            raise RequestError("There are no rows to read. Pass at least one row number.")
        self.require_signals(signals)
        names = ["patches"] if self.early is None else ["tokens", "indices"]
        names += [name for name in _SMALL if self.has(name)]
        names += [name for name in SIGNALS if name in signals and name not in names]
        shards, places = self._shard[rows].tolist(), self._offset[rows].tolist()
        fields: dict[str, Any] = {}
        for name in names:
            sources = [self._map(shard, name) for shard in shards]
            if name in LARGE:
                fields[name] = pool.take((len(rows), *sources[0].array.shape[1:]), dtype)
                with self._fetching.of(sources, places):
                    join_large(sources, places, fields[name])
            else:
                values = join_small(sources, places)
                fields[name] = values.to(dtype) if name in _IN_TOKEN_DTYPE else values
            self._check_sound(name, rows, sources)  # after the copy, when the rows are in memory
        if self.early is not None:
            fields["patches"], fields["places"] = fields.pop("tokens"), fields.pop("indices").long()
        if self.annotation is not None:
            index = torch.from_numpy(rows)
            fields |= {"label": self.label[index], "has_mask": self.has_mask[index], "lesion": self.lesion[index]}
        return TokenBatch(grid=self.grid, image_id=tuple(self.ids[row] for row in rows.tolist()), **fields)

    def _map(self, shard: int, field: str) -> MappedRows:
        """Map a field of a shard: from the shard itself, or from the file of a signal that it gained."""
        fields = self._fields_of(shard)
        if field not in fields:
            file = read_signal(self.path, shard, field, self.sidecars[shard])
            if file is None:
                raise MissingSignalError(
                    f"Store {self.path} has no {field} any more. Run its `mtb extract` again with --signals {field}."
                )
            array = file.map()
            fields[field] = MappedRows(array, RowChecks(file.path, {field: array}, file.checksums))
        return fields[field]

    def _fields_of(self, shard: int) -> dict[str, MappedRows]:
        """Map the fields of a shard once, and make sure that they have the shapes that settings and sidecar say."""
        if shard not in self._maps:
            path, sidecar = shard_path(self.path, shard), self.sidecars[shard]
            arrays, count, large = map_shard(path), len(sidecar.rows), "patches" if self.early is None else "tokens"
            shapes = {"patches": (self.n, self.dim), "cls": (self.dim,)}
            shapes |= dict.fromkeys((*DEFAULT, "luminance"), (self.n,))
            fits = all(array.shape == (count, *shapes.get(name, array.shape[1:])) for name, array in arrays.items())
            if count and not (fits and large in arrays):
                raise damaged(path)
            groups = [{name: array for name, array in arrays.items() if (name in LARGE) == is_large} for is_large in (True, False)]
            checks = [RowChecks(path, group, [pair[i] for pair in sidecar.checksums]) for i, group in enumerate(groups)]
            self._maps[shard] = {name: MappedRows(array, checks[name not in LARGE]) for name, array in arrays.items()}
        return self._maps[shard]

    def _check_sound(self, field: str, rows: np.ndarray, sources: Sequence[MappedRows]) -> None:
        """Compare the checksums of rows that this process reads for the first time; damage is an error, not a number."""
        sound = self._sound.setdefault(field, np.zeros(len(self), bool))
        for i in np.flatnonzero(~sound[rows]).tolist():
            sources[i].checks.check(int(self._offset[rows[i]]))
        sound[rows] = True

    def verify(self, manifest: Manifest | None = None) -> None:
        """Read every file and compare it with its hash; with a manifest, also read every image again.

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
        # Without a sidecar a shard was never finished, which is no damage.
        bad = [file.name for index in self.missing if (file := sidecar_path(self.path, index)).exists()]
        with progress(total=len(self.sidecars), what="Checking", unit="shard") as bar:
            for index, sidecar in sorted(self.sidecars.items()):
                if sha256_file(shard_path(self.path, index)) != sidecar.sha256:
                    bad.append(shard_path(self.path, index).name)
                bar.update()
        for index, names in signal_names(self.path).items():
            for name in names if index in self.sidecars else ():
                signal = read_signal(self.path, index, name, self.sidecars[index])
                if signal is None or not signal.is_whole():
                    bad.append(signal_path(self.path, index, name).name)
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


class MappedRows:
    """The rows of one memory-mapped tensor `[n, ...]` of a shard.

    Attributes:
        array: The tensor as an array.
        flat: The same for torch, `[n, elements]`.
        wide: The same in elements of 16 bytes, for copies; None if rows do not start at multiples of 16.
        checks: The checksums of the rows.
    """

    def __init__(self, array: np.ndarray, checks: RowChecks) -> None:
        self.array, self.checks = array, checks
        flat = array.reshape(len(array), math.prod(array.shape[1:]))
        flat.flags.writeable = True  # torch has no read-only memory; the mapping is private, so a write would not reach the file
        self.flat = torch.from_numpy(flat)
        self.wide = _widened(self.flat)
        self._size = self.flat.shape[1] * array.itemsize
        self._memory = flat.reshape(-1).view(np.uint8).data

    def bytes(self, row: int) -> memoryview:
        return self._memory[row * self._size : (row + 1) * self._size]

    def announce(self, first: int, last: int) -> None:
        """Ask the kernel to fetch the rows `first` to `last - 1` in one piece, before they are used."""
        address = self.flat.data_ptr()
        advise(address + first * self._size, address + last * self._size, "MADV_WILLNEED")


class RowChecks:
    """The checksums of the rows of some arrays of a file, each of which is compared once."""

    def __init__(self, path: Path, arrays: Mapping[str, np.ndarray], expected: Sequence[int]) -> None:
        self._path, self._arrays, self._expected = path, arrays, expected
        self._sound = np.zeros(len(expected), bool)

    def check(self, row: int) -> None:
        """Raise a WorkError if this row is not what was written."""
        if not self._sound[row]:
            if row_checksum(self._arrays, row) != self._expected[row]:
                raise damaged(self._path)
            self._sound[row] = True


class Fetching:
    """Announces rows while reading comes from the disk; for rows in memory this would cost a fifth of the copy."""

    def __init__(self) -> None:
        self.from_disk = True

    @contextmanager
    def of(self, rows: Sequence[MappedRows], places: Sequence[int]) -> Iterator[None]:
        """Surround the reading of row `places[i]` of `rows[i]`."""
        before = _disk_reads()
        if self.from_disk:
            for one, place in zip(rows, places):
                one.announce(place, place + 1)
        yield
        self.from_disk = before is None or _disk_reads() != before


def _disk_reads() -> int | None:
    """A counter that grows when this thread waits for a page or reads from the disk; None if the system has none."""
    try:
        import resource

        usage = resource.getrusage(resource.RUSAGE_THREAD)
    except (ImportError, AttributeError):
        return None
    return usage.ru_majflt + usage.ru_inblock


class BufferPool:
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


def _widened(flat: Tensor) -> Tensor | None:
    fits = flat.data_ptr() % _WIDE.itemsize == 0 and flat.shape[1] * flat.itemsize % _WIDE.itemsize == 0
    return flat.view(_WIDE) if fits else None


def join_small(rows: Sequence[MappedRows], places: Sequence[int]) -> Tensor:
    """Stack row `places[i]` of `rows[i]`. For rows of a few KiB, where creating arrays costs more than the copy."""
    joined = bytearray().join([one.bytes(place) for one, place in zip(rows, places)])
    array = rows[0].array
    return torch.from_numpy(np.frombuffer(joined, array.dtype).reshape(len(rows), *array.shape[1:]))


def join_large(rows: Sequence[MappedRows], places: Sequence[int], target: Tensor) -> None:
    """Stack row `places[i]` of `rows[i]` in `target`, in its number format.

    This is one call of torch, which releases the GIL once for all rows, so that two readers do not wait for each other.
    """
    flat = target.view(len(rows), -1)
    if rows[0].flat.dtype != flat.dtype:
        pieces = [piece for one, place in zip(rows, places) for piece in one.flat[place].split(_PIECE)]
        torch.cat(pieces, out=flat.view(-1))
        return
    whole = _widened(flat)
    sources = [one.wide[place] for one, place in zip(rows, places) if one.wide is not None]
    if whole is not None and len(sources) == len(rows):
        torch.stack(sources, out=whole)
    else:
        torch.stack([one.flat[place] for one, place in zip(rows, places)], out=flat)


def ordered_map(function: Callable[[P], T], parts: Iterable[P], ahead: int, threads: int) -> Iterator[T]:
    """Yield `function(part)` in order, computed by threads up to `ahead` parts before they are needed; 0 uses no threads."""
    if ahead < 1:
        yield from map(function, parts)
        return
    pool = ThreadPoolExecutor(threads, thread_name_prefix="mtb-ahead")
    waiting: deque[Future[T]] = deque()
    try:
        for part in parts:
            waiting.append(pool.submit(function, part))
            if len(waiting) > ahead:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)
