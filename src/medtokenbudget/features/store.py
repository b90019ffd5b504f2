"""`FeatureStore`: frozen tokens on disk, read like an array that may be larger than memory.

Reading only; what fills a store stands in `extract.py`, the file format in `shards.py`.
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
    """Rows of frozen tokens; a row is one view of one image. Row numbers follow the order of extraction.

    ids, views   the image and the view of each row
    grid, dim    (h, w) of the patches, and their dimension D
    classes      names that `label` points to
    config       what `store.json` says
    errors       planned rows that failed, with the reason
    missing      numbers of the shards that are not extracted yet
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
        # Kept from epoch to epoch, for as long as they ask for batches of one kind.
        self._pool: tuple[object, BufferPool] = (None, BufferPool())
        self._fetching = Fetching()

    @classmethod
    def open(cls, path: Path | str, expect: dict[str, Any] | None = None, partial: bool = False) -> FeatureStore:
        """Open a store. What `expect` says must agree with its `store.json`; `partial` admits one that is not complete."""
        path = Path(path)
        config = plan.read_config(path)
        if expect is not None:
            plan.check(f"the store {path}", expect, config, "Use the store that belongs to these settings, or extract one.")
        found = {index: read_sidecar(path, index) for index in range(config["shards"])}
        store = cls(path, config, {index: sidecar for index, sidecar in found.items() if sidecar is not None})
        if store.missing and not partial:
            raise RequestError(
                f"the store {path} is not complete: {len(store.missing)} of {config['shards']} shards are missing. "
                "Run the same `mtb extract` again: it goes on from there."
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
        """Hash of what the tokens were made from and how."""
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
        """Row numbers of a view of these images, in their order; `view` None gives all views of each.

        Images that have no such row are an error, or are left out when `strict` is False.
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
        advice = "Leave them out, or extract a store of a manifest that has them."
        if self.missing:
            advice = f"{len(self.missing)} shards are missing: run the same `mtb extract` again first."
        return f"{len(absent)} of {of} images are not in the store {self.path}{what}: {'; '.join(shown)}{more}. {advice}"

    def _shard_rows(self, shard: int) -> dict[str, MappedRows]:
        if shard not in self._maps:
            self._maps[shard] = {name: MappedRows(array) for name, array in map_shard(shard_path(self.path, shard)).items()}
        return self._maps[shard]

    def has(self, field: str) -> bool:
        """Whether the rows carry this field (a backbone without a class token gives no `cls`)."""
        return len(self) > 0 and field in self._shard_rows(int(self._shard[0]))

    def _whole(self, field: str) -> Tensor:
        """One small field of all rows, in memory."""
        if not self.has(field):
            raise RequestError(f"the store {self.path} has no {field}: its backbone does not give it.")
        parts = [self._shard_rows(shard)[field] for shard, sidecar in sorted(self._sidecars.items()) if sidecar.ids]
        for part in parts:
            part.announce(0, len(part.array))
        return _typed(field, torch.from_numpy(np.concatenate([part.array for part in parts])))

    @cached_property
    def label(self) -> Tensor:
        """[n] int64, -1 where unknown."""
        return self._whole("label")

    @cached_property
    def lesion(self) -> Tensor:
        """[n, N] bool."""
        return self._whole("lesion")

    @cached_property
    def has_mask(self) -> Tensor:
        """[n] bool."""
        return self._whole("has_mask")

    @cached_property
    def luminance(self) -> Tensor:
        """[n, N] in [0, 1]."""
        return self._whole("luminance")

    @cached_property
    def attention_entropy(self) -> Tensor:
        """[n, N]."""
        return self._whole("attention_entropy")

    @cached_property
    def cls_attention(self) -> Tensor:
        """[n, N]."""
        return self._whole("cls_attention")

    @cached_property
    def cls(self) -> Tensor:
        """[n, D]."""
        return self._whole("cls")

    def read(self, rows: Sequence[int] | np.ndarray | Tensor, dtype: torch.dtype = torch.float32) -> TokenBatch:
        """The rows as one batch, tokens in `dtype`."""
        return self._read(self._checked(rows), dtype, BufferPool())

    def batches(
        self,
        rows: Sequence[int] | np.ndarray | Tensor,
        batch_size: int,
        generator: torch.Generator | None = None,
        prefetch: int = 2,
        dtype: torch.dtype = torch.float32,
    ) -> Iterator[TokenBatch]:
        """The rows batch by batch, shuffled when a generator is given, made up to `prefetch` batches ahead by two threads."""
        order = self._checked(rows)
        if batch_size < 1:
            raise RequestError(f"batch_size must be 1 or more, got {batch_size}.")
        if generator is not None:
            order = order[torch.randperm(len(order), generator=generator).numpy()]
        if self._pool[0] != (batch_size, dtype):
            self._pool = ((batch_size, dtype), BufferPool())
        pool = self._pool[1]
        parts = (order[start : start + batch_size] for start in range(0, len(order), batch_size))
        return prefetched(lambda part: self._read(part, dtype, pool), parts, prefetch)

    def read_routed(self, rows: Sequence[int] | np.ndarray | Tensor, dtype: torch.dtype = torch.float32) -> Selection:
        """The routed tokens of a store that was extracted with `--keep routed`, as the selector gave them."""
        if self.config["keep"] != "routed":
            raise RequestError(f"the store {self.path} holds all patches, not routed tokens: use `read`.")
        index = self._checked(rows)
        fields = self._gather(("tokens", "indices", "weights"), index, BufferPool(), dtype)
        indices = fields["indices"].long()
        n = self.grid[0] * self.grid[1]
        places = torch.arange(indices.shape[1]).expand_as(indices)
        assignment = torch.full((len(index), n), -1, dtype=torch.long).scatter_(1, indices, places)
        return Selection(fields["tokens"], fields["weights"], assignment, assignment >= 0, indices)

    def verify(self, manifest: Manifest | None = None) -> None:
        """Read every shard and compare it with the hash in its sidecar; with a manifest, also its images with theirs."""
        damaged = [
            shard_path(self.path, index).name
            for index, sidecar in sorted(self._sidecars.items())
            if sha256_file(shard_path(self.path, index)) != sidecar.sha256
        ]
        if damaged:
            raise WorkError(f"damaged in {self.path}: {', '.join(damaged)}. Delete them and run the same `mtb extract` again.")
        if manifest is not None:
            self._verify_images(manifest)

    def _verify_images(self, manifest: Manifest) -> None:
        stored = {name: image for sidecar in self._sidecars.values() for name, image in zip(sidecar.ids, sidecar.images)}
        paths = {name: manifest.image_path(i) for i, name in enumerate(manifest.ids) if name in stored}
        changed = [name for name, path in paths.items() if not path.is_file() or sha256_file(path) != stored[name]]
        if changed:
            raise WorkError(
                f"{listed(changed, _SHOWN)}: {len(changed)} of {len(paths)} images are not those that {self.path} was made from. "
                "Bring them back, or extract into a new folder."
            )

    def _checked(self, rows: Sequence[int] | np.ndarray | Tensor) -> np.ndarray:
        index = np.asarray(rows, np.int64).reshape(-1)
        if len(index) and (index.min() < 0 or index.max() >= len(self)):
            raise RequestError(f"row numbers must lie in 0..{len(self) - 1}, got {index.min()}..{index.max()}.")
        return index

    def _read(self, rows: np.ndarray, dtype: torch.dtype, pool: BufferPool) -> TokenBatch:
        if self.config["keep"] != "patches":
            raise RequestError(f"the store {self.path} holds routed tokens only: use `read_routed`.")
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
            raise RequestError("there are no rows to read: name at least one.")
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
