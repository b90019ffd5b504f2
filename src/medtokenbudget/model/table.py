"""Predictions to files, row by row: a table (CSV or Parquet) and optionally the kept tokens (safetensors).

Its own file because a million images must need no more memory than a hundred: at most one row group is buffered.
"""

from __future__ import annotations

import csv
import json
import shutil
import struct
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, BinaryIO, Literal, Protocol

import numpy as np

from medtokenbudget.errors import RequestError, WorkError
from medtokenbudget.escaping import csv_cell
from medtokenbudget.files import atomic_write
from medtokenbudget.model.prediction import Prediction

ROW_GROUP = 64
"""Rows per Parquet row group: with all patches kept a row is a list of 256 numbers, so buffered rows use most of the memory."""
_HEADER_ROOM = 16 * 1024
_NAMES: dict[str, tuple[str, np.dtype[Any]]] = {"fp16": ("F16", np.dtype("<f2")), "fp32": ("F32", np.dtype("<f4"))}
TokenFormat = Literal["fp16", "fp32"]


class Writer(Protocol):
    def add(self, prediction: Prediction) -> None: ...


def columns(classes: tuple[str, ...]) -> list[str]:
    """Names of the table's columns; the probabilities are `p_<class>`."""
    return ["image", "label", "probability", *(f"p_{name}" for name in classes), "selector", "budget", "k", "n_patches", "kept"]


def _row(prediction: Prediction) -> list[Any]:
    kept = None if prediction.kept is None else prediction.kept.tolist()
    values = [prediction.image, prediction.label, prediction.probability, *prediction.probabilities.values()]
    return [*values, prediction.selector, prediction.budget, prediction.k, prediction.n_patches, kept]


def check_table_path(path: Path) -> None:
    if path.suffix.lower() not in (".csv", ".parquet"):
        raise RequestError(f"The table {path} must end in .csv or .parquet.")


@contextmanager
def table_writer(path: Path, classes: tuple[str, ...], metadata: dict[str, str]) -> Iterator[Writer]:
    """Open a writer for the table at `path`; the file appears when the block ends without an error."""
    check_table_path(path)
    with atomic_write(path) as temporary, ExitStack() as stack:
        if path.suffix.lower() == ".csv":
            stream = stack.enter_context(open(temporary, "w", newline="", encoding="utf-8"))
            yield _CsvTable(stream, classes)
        else:
            table = _ParquetTable(temporary, classes, metadata)
            stack.callback(table.close)
            yield table
            table.flush()


class _CsvTable:
    def __init__(self, stream: Any, classes: tuple[str, ...]) -> None:
        self.writer = csv.writer(stream, lineterminator="\n")
        self.writer.writerow(columns(classes))

    def add(self, prediction: Prediction) -> None:
        *values, kept = _row(prediction)
        # Nine digits restore a float32 exactly; `kept` is a list inside one cell, separated by spaces.
        plain = [f"{value:.9g}" if isinstance(value, float) else csv_cell(value) for value in values]
        self.writer.writerow([*plain, "" if kept is None else " ".join(map(str, kept))])


class _ParquetTable:
    def __init__(self, path: Path, classes: tuple[str, ...], metadata: dict[str, str]) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        kinds = {"image": pa.string(), "label": pa.string(), "selector": pa.string(), "budget": pa.float64()}
        kinds |= {"k": pa.int32(), "n_patches": pa.int32(), "kept": pa.list_(pa.int32())}
        self.schema = pa.schema([(name, kinds.get(name, pa.float32())) for name in columns(classes)], metadata=metadata)
        self.writer = pq.ParquetWriter(path, self.schema)
        self.rows: list[list[Any]] = []

    def add(self, prediction: Prediction) -> None:
        self.rows.append(_row(prediction))
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


@contextmanager
def token_writer(path: Path, metadata: dict[str, str], dtype: TokenFormat = "fp16") -> Iterator[Writer]:
    """Open a writer for kept tokens: `tokens` [n, K, D] and, for rankers, `indices` [n, K]; row i is row i of the table.

    A safetensors file begins with a header that contains the shapes, and n is known only at the end. So space is reserved for the
    header, tokens are written after it as they come, indices go to a temporary file, and the header is filled in last.
    """
    with atomic_write(path) as temporary, open(temporary, "wb") as stream, tempfile.TemporaryFile(dir=path.parent) as indices:
        writer = _Tokens(stream, indices, metadata, dtype)
        yield writer
        writer.finish()


class _Tokens:
    def __init__(self, stream: BinaryIO, indices: BinaryIO, metadata: dict[str, str], dtype: TokenFormat) -> None:
        self.stream, self.indices, self.metadata, self.dtype = stream, indices, metadata, dtype
        self.count, self.shape, self.ranked = 0, (0, 0), True
        stream.write(b" " * (8 + _HEADER_ROOM))

    def add(self, prediction: Prediction) -> None:
        if self.count and prediction.tokens.shape != self.shape:
            raise RequestError(f"{prediction.image} has tokens of shape {prediction.tokens.shape}, earlier images {self.shape}.")
        self.shape, self.ranked = prediction.tokens.shape, prediction.kept is not None
        self.stream.write(np.ascontiguousarray(prediction.tokens, dtype=_NAMES[self.dtype][1]).tobytes())
        if prediction.kept is not None:
            self.indices.write(prediction.kept.astype("<i2").tobytes())
        self.count += 1

    def finish(self) -> None:
        name, kind = _NAMES[self.dtype]
        k, d = self.shape
        size = self.count * k * d * kind.itemsize
        tensors: dict[str, Any] = {"tokens": {"dtype": name, "shape": [self.count, k, d], "data_offsets": [0, size]}}
        if self.ranked:
            end = size + self.count * k * 2
            tensors["indices"] = {"dtype": "I16", "shape": [self.count, k], "data_offsets": [size, end]}
            self.indices.seek(0)
            shutil.copyfileobj(self.indices, self.stream, 1 << 20)
        header = json.dumps({"__metadata__": self.metadata, **tensors}).encode()
        if len(header) > _HEADER_ROOM:
            raise WorkError(f"The header of the token file needs {len(header)} bytes, but only {_HEADER_ROOM} are available.")
        self.stream.seek(0)
        self.stream.write(struct.pack("<Q", _HEADER_ROOM) + header.ljust(_HEADER_ROOM))
