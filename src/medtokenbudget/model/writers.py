"""File formats of answers, written row by row: a table (CSV or Parquet) and the kept tokens (safetensors).

A million images need no more memory than a hundred: at most one row group is buffered.
"""

from __future__ import annotations

import csv
import json
import shutil
import struct
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO, Literal

import numpy as np
import torch

from medtokenbudget.errors import RequestError, WorkError
from medtokenbudget.escaping import csv_cell
from medtokenbudget.files import atomic_write
from medtokenbudget.model.inference import Prediction, Routing
from medtokenbudget.routing import create_selector
from medtokenbudget.tokens import TokenBatch

ROW_GROUP = 64
"""Rows per Parquet row group: with all patches kept a row is a list of 256 numbers, so buffered rows use most of the memory."""
_HEADER_ROOM = 16 * 1024
_NAMES: dict[str, tuple[str, np.dtype[Any]]] = {"fp16": ("F16", np.dtype("<f2")), "fp32": ("F32", np.dtype("<f4"))}
TokenFormat = Literal["fp16", "fp32"]
Add = Callable[[Routing], None]
"""Takes answers one after the other."""


@dataclass(frozen=True)
class Column:
    """A column of the table: its name, the Arrow type of its values and how an answer gives one (None is an empty cell)."""

    name: str
    kind: str
    value: Callable[[Any], Any]


_IMAGE = Column("image", "string", lambda answer: answer.image)
_ROUTE = [
    Column("selector", "string", lambda answer: answer.selector),
    Column("budget", "float64", lambda answer: answer.budget),
    Column("k", "int32", lambda answer: answer.k),
    Column("n_patches", "int32", lambda answer: answer.n_patches),
    Column("unfamiliarity", "float32", lambda answer: answer.unfamiliarity),
    Column("unfamiliar", "bool_", lambda answer: None if answer.unfamiliarity is None else answer.unfamiliar),
]
_KEPT = Column("kept", "list of int32", lambda answer: None if answer.kept is None else answer.kept.tolist())


def prediction_columns(classes: tuple[str, ...]) -> list[Column]:
    """List the columns of a table of predictions; the probabilities are `p_<class>`."""

    def probability(name: str) -> Callable[[Prediction], float]:
        return lambda prediction: prediction.probabilities[name]

    return [
        _IMAGE,
        Column("label", "string", lambda answer: answer.label),
        Column("probability", "float32", lambda answer: answer.probability),
        *(Column(f"p_{name}", "float32", probability(name)) for name in classes),
        *_ROUTE,
        _KEPT,
    ]


def routing_columns() -> list[Column]:
    """List the columns of a table of routings; how much of the lesion was kept is empty for an image without a mask."""
    return [
        _IMAGE,
        *_ROUTE,
        Column("lesion", "int32", lesion_patches),
        Column("kept_lesion", "int32", lambda answer: answer.kept_lesion),
        Column("center_lesion", "int32", center_lesion),
        _KEPT,
        Column("scores", "list of float32", lambda answer: None if answer.scores is None else answer.scores.tolist()),
    ]


def lesion_patches(answer: Routing) -> int | None:
    """Count the lesion patches of an image; None without a mask."""
    return None if answer.lesion is None else int(answer.lesion.sum())


def center_lesion(answer: Routing) -> int | None:
    """Count the lesion patches that the control `center` would keep; None without a mask."""
    return None if answer.lesion is None else int(answer.lesion[_center(answer.grid)[: answer.k]].sum())


@lru_cache
def _center(grid: tuple[int, int]) -> np.ndarray:
    """Rank all patches of a grid as the selector `center` does."""
    tokens = TokenBatch(torch.zeros(1, grid[0] * grid[1], 1), grid)
    indices = create_selector("center").select(tokens, tokens.n).indices
    assert indices is not None
    return indices[0].numpy()


def check_table_path(path: Path) -> None:
    """Raise a RequestError unless the name of the table says a format that can be written."""
    if path.suffix.lower() not in (".csv", ".parquet"):
        raise RequestError(f"The table {path} must end in .csv or .parquet.")


@contextmanager
def table_writer(path: Path, columns: Sequence[Column], metadata: dict[str, str]) -> Iterator[Add]:
    """Open the table at `path`, and give the function that adds a row; the file appears when the block ends without an error."""
    check_table_path(path)
    with atomic_write(path) as temporary:
        if path.suffix.lower() == ".csv":
            with open(temporary, "w", newline="", encoding="utf-8") as stream:
                table = csv.writer(stream, lineterminator="\n")
                table.writerow([column.name for column in columns])
                yield lambda answer: table.writerow([_csv_text(column.value(answer)) for column in columns])
        else:
            with _parquet_writer(temporary, columns, metadata) as add:
                yield add


def _csv_text(value: Any) -> Any:
    """Nine digits restore a float32 exactly; a list is one cell, separated by spaces."""
    if value is None:
        return ""
    if isinstance(value, list):
        return " ".join(str(_csv_text(item)) for item in value)
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:.9g}" if isinstance(value, float) else csv_cell(value)


@contextmanager
def _parquet_writer(path: Path, columns: Sequence[Column], metadata: dict[str, str]) -> Iterator[Add]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    def kind_of(name: str) -> Any:
        element = getattr(pa, name.removeprefix("list of "))()
        return pa.list_(element) if name.startswith("list of ") else element

    schema = pa.schema([(column.name, kind_of(column.kind)) for column in columns], metadata=metadata)
    rows: list[list[Any]] = []

    def flush() -> None:
        if rows:
            arrays = [pa.array(values, field.type) for values, field in zip(zip(*rows), schema)]
            table.write_batch(pa.record_batch(arrays, schema=schema))
            rows.clear()

    def add(answer: Routing) -> None:
        rows.append([column.value(answer) for column in columns])
        if len(rows) == ROW_GROUP:
            flush()

    with pq.ParquetWriter(path, schema) as table:
        yield add
        flush()


@contextmanager
def token_writer(path: Path, metadata: dict[str, str], dtype: TokenFormat = "fp16", packed: bool = False) -> Iterator[Add]:
    """Open a file of kept tokens, and give the function that adds an image; row i is row i of the table.

    It has `tokens` [n, K, D] and, for rankers, `indices` [n, K]. Where K differs between images (`packed`, for a guarantee), the
    images follow each other without gaps: `tokens` [sum of K, D], `indices` [sum of K] and `counts` [n], the K of each image.

    A safetensors file begins with a header that contains the shapes, and n is known only at the end. So space is reserved for the
    header, tokens are written after it as they come, indices go to a temporary file, and the header is filled in last.
    """
    with atomic_write(path) as temporary, open(temporary, "wb") as stream, tempfile.TemporaryFile(dir=path.parent) as indices:
        tokens = _Tokens(stream, indices, metadata, dtype, packed)
        yield tokens.add
        tokens.finish()


class _Tokens:
    def __init__(self, stream: BinaryIO, indices: BinaryIO, metadata: dict[str, str], dtype: TokenFormat, packed: bool) -> None:
        self.stream, self.indices, self.metadata, self.dtype = stream, indices, metadata, dtype
        self.counts: list[int] = []
        self.packed, self.shape, self.ranked = packed, (0, 0), True
        stream.write(b" " * (8 + _HEADER_ROOM))

    def add(self, answer: Routing) -> None:
        if self.counts and not self.packed and answer.tokens.shape != self.shape:
            raise RequestError(f"{answer.image} has tokens of shape {answer.tokens.shape}, earlier images {self.shape}.")
        self.shape, self.ranked = answer.tokens.shape, answer.kept is not None
        self.stream.write(np.ascontiguousarray(answer.tokens, dtype=_NAMES[self.dtype][1]).tobytes())
        if answer.kept is not None:
            self.indices.write(answer.kept.astype("<i2").tobytes())
        self.counts.append(len(answer.tokens))

    def finish(self) -> None:
        name, kind = _NAMES[self.dtype]
        k, d = self.shape
        n, total = len(self.counts), sum(self.counts)
        rows = [total] if self.packed else [n, k]
        end = total * d * kind.itemsize
        tensors: dict[str, Any] = {"tokens": {"dtype": name, "shape": [*rows, d], "data_offsets": [0, end]}}
        if self.ranked:
            tensors["indices"] = {"dtype": "I16", "shape": rows, "data_offsets": [end, end + total * 2]}
            end += total * 2
            self.indices.seek(0)
            shutil.copyfileobj(self.indices, self.stream, 1 << 20)
        if self.packed:
            tensors["counts"] = {"dtype": "I32", "shape": [n], "data_offsets": [end, end + n * 4]}
            self.stream.write(np.asarray(self.counts, "<i4").tobytes())
        header = json.dumps({"__metadata__": self.metadata, **tensors}).encode()
        if len(header) > _HEADER_ROOM:
            raise WorkError(f"The header of the token file needs {len(header)} bytes, but only {_HEADER_ROOM} are available.")
        self.stream.seek(0)
        self.stream.write(struct.pack("<Q", _HEADER_ROOM) + header.ljust(_HEADER_ROOM))
