"""The fields of the rows that an open store shows, from its shards and from the files of its signals.

Their own file because the store says which rows there are, and this says how a field of them is found on disk, checked when it
is read for the first time, and joined to a batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from medtokenbudget.backbone.added_signals import AddedSignals
from medtokenbudget.backbone.reading import BufferPool, Fetching, MappedRows, join_large, join_small, numpy_dtype
from medtokenbudget.backbone.shards import LARGE, Sidecar, damaged, map_shard, row_checksum, shard_path
from medtokenbudget.errors import MissingSignalError, RequestError
from medtokenbudget.tokens import SIGNALS

_TOKENS = (*LARGE, "cls", "mean_key")


class Fields:
    """Fields of rows by name.

    Args:
        path: Folder of the store.
        config: The content of its `store.json`.
        sidecars: The finished shards.
        shard: Shard of each row that the store shows.
        offset: Place of each row in its shard.
    """

    def __init__(
        self, path: Path, config: dict[str, Any], sidecars: Mapping[int, Sidecar], shard: np.ndarray, offset: np.ndarray
    ) -> None:
        self.path, self._config, self._sidecars = path, config, sidecars
        self._shard, self._offset = shard, offset
        self._maps: dict[int, dict[str, MappedRows]] = {}
        # Rows whose checksums were compared in this process: those of the large fields, and those of the small ones.
        self._sound = np.zeros((2, len(shard)), bool)
        self._added = AddedSignals(path, sidecars, shard, offset)
        self._has: dict[str, bool] = {}
        self._fetching = Fetching()

    def __len__(self) -> int:
        return len(self._shard)

    def has(self, field: str) -> bool:
        """Whether all rows carry this field."""
        if field not in self._has:
            in_shards = len(self) > 0 and field in self._of_shard(int(self._shard[0]))
            added = len(self) > 0 and field in SIGNALS and not self._added.rows_without(field, self._of_shard)
            self._has[field] = in_shards or added
        return self._has[field]

    def require_signals(self, names: Sequence[str]) -> None:
        """Raise a MissingSignalError, with what to do, for signals that not all rows carry; other names are not looked at."""
        missing = [name for name in SIGNALS if name in names and not self.has(name)]
        if missing:
            count = max(self._added.rows_without(name, self._of_shard) for name in missing)
            raise MissingSignalError(
                f"The store {self.path} has no {', '.join(missing)} for {count} of {len(self)} rows. Run its `mtb extract` command "
                f"again with --signals {' '.join(missing)}: the tokens stay, only the signals are added."
            )

    def whole(self, field: str) -> Tensor:
        """A small field of all rows, in memory."""
        if not self.has(field):
            raise RequestError(f"Store {self.path} has no {field}, because its backbone does not give it. Choose another backbone.")
        for shard in np.unique(self._shard).tolist():
            part = self._source(shard, field)
            part.announce(0, len(part.array))
        rows = np.arange(len(self))
        sources = [self._source(shard, field) for shard in self._shard.tolist()]
        self._check_sound(rows, large=False)
        self._added.check_sound(rows, field)
        return join_small(sources, self._offset.tolist())

    def gather(self, names: Sequence[str], rows: np.ndarray, pool: BufferPool, dtype: torch.dtype) -> dict[str, Tensor]:
        """Fields [B, ...], tokens in `dtype`, the others as stored."""
        if not len(rows):
            raise RequestError("There are no rows to read. Pass at least one row number.")
        shards = self._shard[rows].tolist()
        places = self._offset[rows].tolist()
        fields = {}
        for name in names:
            sources = [self._source(shard, name) for shard in shards]
            if name in LARGE:
                fields[name] = pool.take((len(rows), *sources[0].array.shape[1:]), numpy_dtype(dtype))
                with self._fetching.of(sources, places):
                    join_large(sources, places, fields[name])
                # Now that they are in memory.
                self._check_sound(rows, large=True)
            else:
                small = join_small(sources, places)
                fields[name] = small.to(dtype) if name in _TOKENS else small
                self._added.check_sound(rows, name)
        self._check_sound(rows, large=False)
        return fields

    def damaged(self) -> list[str]:
        """Names of the files of signals that are not as they were written."""
        return self._added.damaged()

    def _source(self, shard: int, name: str) -> MappedRows:
        """A field of a shard: from the shard itself or from the file of a signal."""
        fields = self._of_shard(shard)
        if name in fields or name not in SIGNALS:
            return fields[name]
        return self._added.source(shard, name)

    def _of_shard(self, shard: int) -> dict[str, MappedRows]:
        if shard not in self._maps:
            path, rows = shard_path(self.path, shard), len(self._sidecars[shard].rows)
            arrays = map_shard(path)
            if rows and not self._fits(arrays, rows):
                raise damaged(path)
            self._maps[shard] = {name: MappedRows(array) for name, array in arrays.items()}
        return self._maps[shard]

    def _fits(self, arrays: dict[str, np.ndarray], rows: int) -> bool:
        """Whether the tensors of a shard have the shapes that the settings and the sidecar say."""
        (h, w), dim = self._config["backbone"]["grid"], self._config["backbone"]["dim"]
        shapes = {"patches": (rows, h * w, dim), "cls": (rows, dim)}
        shapes |= dict.fromkeys(("attention_entropy", "cls_attention", "luminance"), (rows, h * w))
        large = "patches" if self._config["keep"] == "patches" else "tokens"
        return large in arrays and all(
            array.shape == shapes.get(name, array.shape) and len(array) == rows for name, array in arrays.items()
        )

    def _check_sound(self, rows: np.ndarray, large: bool) -> None:
        """Compare the checksums of rows that this process reads for the first time; damage is an error, not a number."""
        sound = self._sound[0 if large else 1]
        for row in rows[~sound[rows]].tolist():
            shard, place = int(self._shard[row]), int(self._offset[row])
            fields = self._of_shard(shard)
            found = row_checksum({name: field.array for name, field in fields.items() if (name in LARGE) == large}, place)
            if found != self._sidecars[shard].checksums[place][0 if large else 1]:
                raise damaged(shard_path(self.path, shard))
            sound[row] = True
