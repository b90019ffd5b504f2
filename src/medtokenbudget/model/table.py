"""Routings and predictions to files, row by row: a table (CSV or Parquet) and optionally the kept tokens (safetensors).

Its own file because a million images must need no more memory than a hundred: at most one row group is buffered.
"""

from __future__ import annotations

import csv
import json
import shutil
import struct
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal, Protocol

import numpy as np

from medtokenbudget.errors import RequestError, WorkError
from medtokenbudget.escaping import csv_cell
from medtokenbudget.files import atomic_write
from medtokenbudget.model.prediction import Prediction, Routing

ROW_GROUP = 64
"""Rows per Parquet row group: with all patches kept a row is a list of 256 numbers, so buffered rows use most of the memory."""
_HEADER_ROOM = 16 * 1024
_NAMES: dict[str, tuple[str, np.dtype[Any]]] = {"fp16": ("F16", np.dtype("<f2")), "fp32": ("F32", np.dtype("<f4"))}
TokenFormat = Literal["fp16", "fp32"]
Kind = Literal["text", "float", "double", "count", "bool", "counts", "floats"]


class Writer(Protocol):
    """Takes answers one after the other."""

    def add(self, answer: Routing) -> None: ...


@dataclass(frozen=True)
class Column:
    """A column of the table: its name, the type of its values and how an answer gives one (None is an empty cell)."""

    name: str
    kind: Kind
    value: Callable[[Any], Any]


def _unfamiliarity() -> list[Column]:
    return [
        Column("unfamiliarity", "float", lambda answer: answer.unfamiliarity),
        Column("unfamiliar", "bool", lambda answer: None if answer.unfamiliarity is None else answer.unfamiliar),
    ]


def _kept(answer: Routing) -> list[int] | None:
    return None if answer.kept is None else answer.kept.tolist()


def prediction_columns(classes: tuple[str, ...]) -> list[Column]:
    """Columns of a table of predictions; the probabilities are `p_<class>`."""

    def probability(name: str) -> Callable[[Prediction], float]:
        return lambda prediction: prediction.probabilities[name]

    return [
        Column("image", "text", lambda answer: answer.image),
        Column("label", "text", lambda answer: answer.label),
        Column("probability", "float", lambda answer: answer.probability),
        *(Column(f"p_{name}", "float", probability(name)) for name in classes),
        *_routed_as(),
        *_unfamiliarity(),
        Column("kept", "counts", _kept),
    ]


def routing_columns() -> list[Column]:
    """Columns of a table of routings; how much of the lesion was kept is empty for an image without a mask."""
    return [
        Column("image", "text", lambda answer: answer.image),
        *_routed_as(),
        *_unfamiliarity(),
        Column("lesion", "count", lambda answer: None if answer.lesion is None else int(answer.lesion.sum())),
        Column("kept_lesion", "count", lambda answer: answer.kept_lesion),
        Column("kept", "counts", _kept),
        Column("scores", "floats", lambda answer: None if answer.scores is None else answer.scores.tolist()),
    ]


def _routed_as() -> list[Column]:
    return [
        Column("selector", "text", lambda answer: answer.selector),
        Column("budget", "double", lambda answer: answer.budget),
        Column("k", "count", lambda answer: answer.k),
        Column("n_patches", "count", lambda answer: answer.n_patches),
    ]


def check_table_path(path: Path) -> None:
    if path.suffix.lower() not in (".csv", ".parquet"):
        raise RequestError(f"The table {path} must end in .csv or .parquet.")


@contextmanager
def table_writer(path: Path, columns: Sequence[Column], metadata: dict[str, str]) -> Iterator[Writer]:
    """Open a writer for the table at `path`; the file appears when the block ends without an error."""
    check_table_path(path)
    with atomic_write(path) as temporary, ExitStack() as stack:
        if path.suffix.lower() == ".csv":
            stream = stack.enter_context(open(temporary, "w", newline="", encoding="utf-8"))
            yield _CsvTable(stream, columns)
        else:
            table = _ParquetTable(temporary, columns, metadata)
            stack.callback(table.close)
            yield table
            table.flush()


class _CsvTable:
    def __init__(self, stream: Any, columns: Sequence[Column]) -> None:
        self.writer, self.columns = csv.writer(stream, lineterminator="\n"), columns
        self.writer.writerow([column.name for column in columns])

    def add(self, answer: Routing) -> None:
        self.writer.writerow([_csv_text(column.value(answer)) for column in self.columns])


def _csv_text(value: Any) -> Any:
    """Nine digits restore a float32 exactly; a list is one cell, separated by spaces."""
    if value is None:
        return ""
    if isinstance(value, list):
        return " ".join(str(_csv_text(item)) for item in value)
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:.9g}" if isinstance(value, float) else csv_cell(value)


class _ParquetTable:
    def __init__(self, path: Path, columns: Sequence[Column], metadata: dict[str, str]) -> None:
        import pyarrow.parquet as pq

        self.columns, self.schema = columns, arrow_schema(columns, metadata)
        self.writer = pq.ParquetWriter(path, self.schema)
        self.rows: list[list[Any]] = []

    def add(self, answer: Routing) -> None:
        self.rows.append([column.value(answer) for column in self.columns])
        if len(self.rows) == ROW_GROUP:
            self.flush()

    def flush(self) -> None:
        import pyarrow as pa

        if self.rows:
            arrays = [pa.array(values, field.type) for values, field in zip(zip(*self.rows), self.schema)]
            self.writer.write_batch(pa.record_batch(arrays, schema=self.schema))
            self.rows.clear()

    def close(self) -> None:
        self.writer.close()


def arrow_schema(columns: Sequence[Column], metadata: dict[str, str]) -> Any:
    """The Parquet schema of these columns."""
    import pyarrow as pa

    kinds = {
        "text": pa.string(),
        "float": pa.float32(),
        "double": pa.float64(),
        "count": pa.int32(),
        "bool": pa.bool_(),
        "counts": pa.list_(pa.int32()),
        "floats": pa.list_(pa.float32()),
    }
    return pa.schema([(column.name, kinds[column.kind]) for column in columns], metadata=metadata)


@contextmanager
def token_writer(path: Path, metadata: dict[str, str], dtype: TokenFormat = "fp16", packed: bool = False) -> Iterator[Writer]:
    """Open a writer for kept tokens: `tokens` [n, K, D] and, for rankers, `indices` [n, K]; row i is row i of the table.

    Where K differs between images (`packed`, for a guarantee), the images follow each other without gaps: `tokens` [sum of K, D],
    `indices` [sum of K] and `counts` [n], the K of each image.

    A safetensors file begins with a header that contains the shapes, and n is known only at the end. So space is reserved for the
    header, tokens are written after it as they come, indices go to a temporary file, and the header is filled in last.
    """
    with atomic_write(path) as temporary, open(temporary, "wb") as stream, tempfile.TemporaryFile(dir=path.parent) as indices:
        writer = _Tokens(stream, indices, metadata, dtype, packed)
        yield writer
        writer.finish()


class _Tokens:
    def __init__(self, stream: BinaryIO, indices: BinaryIO, metadata: dict[str, str], dtype: TokenFormat, packed: bool) -> None:
        self.stream, self.indices, self.metadata, self.dtype = stream, indices, metadata, dtype
        self.counts: list[int] = []
        self.packed, self.shape, self.ranked = packed, (0, 0), True
        stream.write(b" " * (8 + _HEADER_ROOM))

    def add(self, prediction: Routing) -> None:
        if self.counts and not self.packed and prediction.tokens.shape != self.shape:
            raise RequestError(f"{prediction.image} has tokens of shape {prediction.tokens.shape}, earlier images {self.shape}.")
        self.shape, self.ranked = prediction.tokens.shape, prediction.kept is not None
        self.stream.write(np.ascontiguousarray(prediction.tokens, dtype=_NAMES[self.dtype][1]).tobytes())
        if prediction.kept is not None:
            self.indices.write(prediction.kept.astype("<i2").tobytes())
        self.counts.append(len(prediction.tokens))

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
