"""`FeatureStore`: frozen tokens on disk, read like an array that may be larger than memory.

This file only reads; `extract.py` fills a store, and `shards.py` defines the file format.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from medtokenbudget.data.manifest import Manifest, listed
from medtokenbudget.errors import RequestError, WorkError
from medtokenbudget.features import plan
from medtokenbudget.features.reading import BufferPool, Fetching, MappedRows, join_large, join_small, numpy_dtype, prefetched
from medtokenbudget.features.shards import RowError, Sidecar, map_shard, read_sidecar, shard_path
from medtokenbudget.features.views import IDENTITY
from medtokenbudget.files import sha256_file, sha256_json
from medtokenbudget.tokens import Selection, TokenBatch

_SMALL = ("cls", "attention_entropy", "cls_attention", "luminance", "lesion")
_LARGE = ("patches", "tokens")
_TOKENS = (*_LARGE, "cls")
_SHOWN = 5


class FeatureStore:
    """Rows of frozen tokens. A row is one view of one image; rows are in the order of the manifest.

    Attributes:
        ids: Image id of each row.
        views: View of each row, such as 'identity' or 'off-center'.
        grid: Rows and columns (h, w) of the patches.
        dim: Dimension D of a token.
        classes: Names of the class indices in `label`.
        config: The content of `store.json`.
        errors: Rows that failed, with the reason.
        missing: Numbers of the shards that are not extracted yet.

    Example:
        >>> store = FeatureStore.open("stores/photos")  # doctest: +SKIP
        >>> store.read([0, 1]).patches.shape  # doctest: +SKIP
        torch.Size([2, 256, 192])
    """

    def __init__(self, path: Path, config: dict[str, Any], sidecars: dict[int, Sidecar]) -> None:
        self.path = path
        self.config = config
        self.grid: tuple[int, int] = (int(config["backbone"]["grid"][0]), int(config["backbone"]["grid"][1]))
        self.dim = int(config["backbone"]["dim"])
        self.classes: tuple[str, ...] = tuple(config["classes"])
        self.missing = [index for index in range(config["shards"]) if index not in sidecars]
        present = sorted(sidecars)
        self.ids: list[str] = [name for index in present for name in sidecars[index].ids]
        self.views: list[str] = [view for index in present for view in sidecars[index].views]
        self.errors: list[RowError] = [error for index in present for error in sidecars[index].errors]
        counts = [len(sidecars[index].ids) for index in present]
        self._shard = np.repeat(np.asarray(present, np.int64), counts)
        self._offset = np.concatenate([np.arange(count) for count in counts] or [np.arange(0)])
        self._sidecars = sidecars
        self._maps: dict[int, dict[str, MappedRows]] = {}
        # Kept between epochs as long as batch size and type stay the same.
        self._pool: tuple[object, BufferPool] = (None, BufferPool())
        self._fetching = Fetching()

    @classmethod
    def open(cls, path: Path | str, expect: dict[str, Any] | None = None, partial: bool = False) -> FeatureStore:
        """Open a store.

        Args:
            path: Folder of the store.
            expect: Values that `store.json` must have, such as `{"data": manifest.data_hash}`.
            partial: Accept an incomplete store.

        Returns:
            The open store.

        Raises:
            RequestError: The folder is not a store, or the store is incomplete.
            MismatchError: The store does not have the expected values.
        """
        path = Path(path)
        config = plan.read_config(path)
        if expect is not None:
            plan.check(
                f"The store {path}", expect, config, "Use the store that was extracted with these settings, or extract a new one."
            )
        found = {index: read_sidecar(path, index) for index in range(config["shards"])}
        store = cls(path, config, {index: sidecar for index, sidecar in found.items() if sidecar is not None})
        if store.missing and not partial:
            raise RequestError(
                f"The store {path} is incomplete: {len(store.missing)} of {config['shards']} shards are missing. "
                "Run the same `mtb extract` command again to resume."
            )
        return store

    def __len__(self) -> int:
        return len(self.ids)

    def __repr__(self) -> str:
        return f"FeatureStore({str(self.path)!r}, rows={len(self)}, grid={self.grid}, dim={self.dim}, missing={len(self.missing)})"

    @property
    def n(self) -> int:
        """Number of patches N."""
        return self.grid[0] * self.grid[1]

    @property
    def identity(self) -> str:
        """Hash of the data and of all settings of the extraction."""
        return sha256_json(self.config)

    @cached_property
    def _row_of(self) -> dict[tuple[str, str], int]:
        return {key: row for row, key in enumerate(zip(self.ids, self.views))}

    @cached_property
    def _rows_of_id(self) -> dict[str, list[int]]:
        rows: dict[str, list[int]] = {}
        for row, name in enumerate(self.ids):
            rows.setdefault(name, []).append(row)
        return rows

    def rows(self, ids: Sequence[str], view: str | None = IDENTITY, strict: bool = True) -> np.ndarray:
        """Row numbers of images.

        Args:
            ids: Image ids.
            view: The view; None for all views of each image.
            strict: Raise an error for images without such a row, instead of leaving them out.

        Returns:
            Row numbers, int64, in the order of `ids`.

        Raises:
            RequestError: With `strict`, if an image has no such row.
        """
        if view is None:
            found: list[list[int]] = [self._rows_of_id.get(name, []) for name in ids]
        else:
            one = [self._row_of.get((name, view)) for name in ids]
            found = [[] if row is None else [row] for row in one]
        absent = [name for name, rows in zip(ids, found) if not rows]
        if absent and strict:
            raise RequestError(self._absent(absent, len(ids), view))
        return np.asarray([row for rows in found for row in rows], np.int64)

    def _absent(self, absent: list[str], of: int, view: str | None) -> str:
        reasons = {error.image_id: error.reason for error in self.errors if view in (None, error.view)}
        shown = [f"{name} ({reasons[name]})" if name in reasons else name for name in absent[:_SHOWN]]
        more = f" and {len(absent) - _SHOWN} more" if len(absent) > _SHOWN else ""
        what = "" if view in (None, IDENTITY) else f" with the view '{view}'"
        advice = "Extract a store from the manifest that contains them."
        if self.missing:
            advice = f"{len(self.missing)} shards are missing: run the same `mtb extract` command again."
        return f"{len(absent)} of {of} images are not in the store {self.path}{what}: {'; '.join(shown)}{more}. {advice}"

    def _shard_rows(self, shard: int) -> dict[str, MappedRows]:
        if shard not in self._maps:
            self._maps[shard] = {name: MappedRows(array) for name, array in map_shard(shard_path(self.path, shard)).items()}
        return self._maps[shard]

    def has(self, field: str) -> bool:
        """Whether the rows carry this field (a backbone without a class token gives no `cls`)."""
        return len(self) > 0 and field in self._shard_rows(int(self._shard[0]))

    def _whole(self, field: str) -> Tensor:
        """A small field of all rows, in memory."""
        if not self.has(field):
            raise RequestError(f"The store {self.path} has no '{field}', because its backbone does not provide it.")
        parts = [self._shard_rows(shard)[field] for shard, sidecar in sorted(self._sidecars.items()) if sidecar.ids]
        for part in parts:
            part.announce(0, len(part.array))
        return _typed(field, torch.from_numpy(np.concatenate([part.array for part in parts])))

    @cached_property
    def label(self) -> Tensor:
        """Class index of every row, [n] int64, -1 if unknown."""
        return self._whole("label")

    @cached_property
    def lesion(self) -> Tensor:
        """Lesion patches of every row, [n, N] bool."""
        return self._whole("lesion")

    @cached_property
    def has_mask(self) -> Tensor:
        """Whether a row has a mask, [n] bool."""
        return self._whole("has_mask")

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

    def read(self, rows: Sequence[int] | np.ndarray | Tensor, dtype: torch.dtype = torch.float32) -> TokenBatch:
        """Read rows as one batch, with tokens in `dtype`."""
        return self._read(self._checked(rows), dtype, BufferPool())

    def batches(
        self,
        rows: Sequence[int] | np.ndarray | Tensor,
        batch_size: int,
        generator: torch.Generator | None = None,
        prefetch: int = 2,
        dtype: torch.dtype = torch.float32,
    ) -> Iterator[TokenBatch]:
        """Read rows in batches.

        Args:
            rows: Row numbers.
            batch_size: Rows per batch; the last batch may be smaller.
            generator: Shuffles the rows, if given.
            prefetch: Batches that two threads read ahead; 0 uses no threads.
            dtype: Type of the tokens.

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
        return prefetched(lambda part: self._read(part, dtype, pool), parts, prefetch)

    def read_routed(self, rows: Sequence[int] | np.ndarray | Tensor, dtype: torch.dtype = torch.float32) -> Selection:
        """Read rows of a store that was extracted with `--keep routed`, as the selector gave them."""
        if self.config["keep"] != "routed":
            raise RequestError(f"Store {self.path} contains all patches, not routed tokens. Use `read`.")
        index = self._checked(rows)
        fields = self._gather(("tokens", "indices", "weights"), index, BufferPool(), dtype)
        indices = fields["indices"].long()
        n = self.grid[0] * self.grid[1]
        places = torch.arange(indices.shape[1]).expand_as(indices)
        assignment = torch.full((len(index), n), -1, dtype=torch.long).scatter_(1, indices, places)
        return Selection(fields["tokens"], fields["weights"], assignment, assignment >= 0, indices)

    def verify(self, manifest: Manifest | None = None) -> None:
        """Compare every shard with its stored hash and, if a manifest is given, every image file too.

        Raises:
            WorkError: Shards are damaged, or images have changed since the extraction.
        """
        damaged = [
            shard_path(self.path, index).name
            for index, sidecar in sorted(self._sidecars.items())
            if sha256_file(shard_path(self.path, index)) != sidecar.sha256
        ]
        if damaged:
            raise WorkError(
                f"Damaged shards in {self.path}: {', '.join(damaged)}. Delete them and run the same `mtb extract` command again."
            )
        if manifest is not None:
            self._verify_images(manifest)

    def _verify_images(self, manifest: Manifest) -> None:
        stored = {name: image for sidecar in self._sidecars.values() for name, image in zip(sidecar.ids, sidecar.images)}
        paths = {name: manifest.image_path(i) for i, name in enumerate(manifest.ids) if name in stored}
        changed = [name for name, path in paths.items() if not path.is_file() or sha256_file(path) != stored[name]]
        if changed:
            raise WorkError(
                f"{len(changed)} of {len(paths)} images have changed since {self.path} was extracted: {listed(changed, _SHOWN)}. "
                "Restore them, or extract a new store."
            )

    def _checked(self, rows: Sequence[int] | np.ndarray | Tensor) -> np.ndarray:
        index = np.asarray(rows, np.int64).reshape(-1)
        if len(index) and (index.min() < 0 or index.max() >= len(self)):
            raise RequestError(f"Row numbers must be between 0 and {len(self) - 1}, got {index.min()} to {index.max()}.")
        return index

    def _read(self, rows: np.ndarray, dtype: torch.dtype, pool: BufferPool) -> TokenBatch:
        if self.config["keep"] != "patches":
            raise RequestError(f"Store {self.path} contains only routed tokens. Use `read_routed`.")
        names = ("patches", *(name for name in _SMALL if self.has(name)))
        fields = self._gather(names, rows, pool, dtype)
        index = torch.from_numpy(rows)
        return TokenBatch(
            grid=self.grid,
            image_id=tuple(self.ids[row] for row in rows.tolist()),
            label=self.label[index],
            has_mask=self.has_mask[index],
            **{name: _typed(name, value) for name, value in fields.items()},
        )

    def _gather(self, names: Sequence[str], rows: np.ndarray, pool: BufferPool, dtype: torch.dtype) -> dict[str, Tensor]:
        """Fields [B, ...], tokens in `dtype`, the others as stored."""
        if not len(rows):
            raise RequestError("There are no rows to read. Pass at least one row number.")
        shards = [self._shard_rows(shard) for shard in self._shard[rows].tolist()]
        places = self._offset[rows].tolist()
        fields = {}
        for name in names:
            sources = [shard[name] for shard in shards]
            if name in _LARGE:
                fields[name] = pool.take((len(rows), *sources[0].array.shape[1:]), numpy_dtype(dtype))
                with self._fetching.of(sources, places):
                    join_large(sources, places, fields[name])
            else:
                small = join_small(sources, places)
                fields[name] = small.to(dtype) if name in _TOKENS else small
        return fields


def _typed(field: str, value: Tensor) -> Tensor:
    return value.bool() if field in ("lesion", "has_mask") else value
