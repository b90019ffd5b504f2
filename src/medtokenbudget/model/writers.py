"""The file formats of answers: a table (CSV or Parquet) and the kept tokens (safetensors), written row by row."""

from __future__ import annotations

import csv
import json
import shutil
import struct
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from medtokenbudget.config import TokenFormat
from medtokenbudget.errors import WorkError
from medtokenbudget.escaping import csv_cell
from medtokenbudget.files import atomic_write
from medtokenbudget.model.inference import Prediction, Routing
from medtokenbudget.routing import create_selector
from medtokenbudget.tokens import TokenBatch

ROW_GROUP = 64
"""Rows per Parquet row group: with all patches kept a row is a list of 256 numbers, so buffered rows use most of the memory."""
_HEADER_ROOM = 16 * 1024
_DTYPES: dict[str, tuple[str, np.dtype[Any]]] = {"fp16": ("F16", np.dtype("<f2")), "fp32": ("F32", np.dtype("<f4"))}
"""Number format -> its name in safetensors files and in NumPy."""


def table_schema(classes: Sequence[str] | None, metadata: dict[str, str], lesion_files: Sequence[str] = ()) -> Any:
    """Return the Arrow schema of a table: of predictions with these classes (`p_<class>`), or of routings for None."""
    import pyarrow as pa

    route = [("selector", pa.string()), ("budget", pa.float64()), ("k", pa.int32()), ("n_patches", pa.int32())]
    route += [("unfamiliarity", pa.float32()), ("unfamiliar", pa.bool_())]
    image, kept = [("image", pa.string()), ("image_id", pa.string())], ("kept", pa.list_(pa.int32()))
    if classes is not None:
        predicted = [("label", pa.string()), ("probability", pa.float32()), *((f"p_{name}", pa.float32()) for name in classes)]
        return pa.schema([*image, *predicted, *route, kept], metadata)
    lesion = [(name, pa.int32()) for name in ("lesion", "kept_lesion", "center_lesion")]
    found = [(name, pa.list_(pa.int32()) if name == "box" else pa.string()) for name in lesion_files]
    return pa.schema([*image, *route, *lesion, *found, kept, ("scores", pa.list_(pa.float32()))], metadata)


def row_of(answer: Routing) -> dict[str, Any]:
    """Return the cells of an answer by column; None is an empty cell, such as the lesion patches of an image without a mask."""
    row = {name: getattr(answer, name) for name in ("image", "selector", "budget", "k", "n_patches", "unfamiliarity")}
    row |= {
        "image_id": answer.image if answer.source is None else answer.source.image_id,
        "unfamiliar": None if answer.unfamiliarity is None else answer.unfamiliar,
        "kept": None if answer.kept is None else answer.kept.tolist(),
    }
    if isinstance(answer, Prediction):
        probabilities = {f"p_{name}": value for name, value in answer.probabilities.items()}
        return row | {"label": answer.label, "probability": answer.probability, **probabilities}
    lesion = answer.lesion
    return row | {
        "lesion": None if lesion is None else int(lesion.sum()),
        "kept_lesion": answer.kept_lesion,
        "center_lesion": None if lesion is None else int(lesion[_center(answer.grid)[: answer.k]].sum()),
        "scores": None if answer.scores is None else answer.scores.tolist(),
    }


@lru_cache
def _center(grid: tuple[int, int]) -> np.ndarray:
    """Rank all patches of a grid as the control `center` does."""
    tokens = TokenBatch(torch.zeros(1, grid[0] * grid[1], 1), grid)
    indices = create_selector("center").select(tokens, tokens.n).indices
    assert indices is not None
    return indices[0].numpy()


@contextmanager
def table_writer(path: Path, schema: Any) -> Iterator[Callable[[dict[str, Any]], None]]:
    """Open the table at `path`, and give the function that adds a row; the file appears when the block ends without an error."""
    with atomic_write(path) as temporary:
        if path.suffix.lower() == ".csv":
            with open(temporary, "w", newline="", encoding="utf-8") as stream:
                lines = csv.DictWriter(stream, schema.names, lineterminator="\n")
                lines.writeheader()
                yield lambda row: lines.writerow({name: _csv_text(value) for name, value in row.items()})
            return
        import pyarrow as pa
        import pyarrow.parquet as pq

        rows: list[dict[str, Any]] = []
        with pq.ParquetWriter(temporary, schema) as groups:

            def flush() -> None:
                groups.write_batch(pa.RecordBatch.from_pylist(rows, schema))
                rows.clear()

            def add(row: dict[str, Any]) -> None:
                rows.append(row)
                if len(rows) == ROW_GROUP:
                    flush()

            yield add
            if rows:
                flush()


def _csv_text(value: Any) -> Any:
    """Return the text of a cell: nine digits restore a float32 exactly; a list is separated by spaces."""
    if value is None:
        return ""
    if isinstance(value, list):
        return " ".join(str(_csv_text(item)) for item in value)
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:.9g}" if isinstance(value, float) else csv_cell(value)


@contextmanager
def token_writer(path: Path, metadata: dict[str, str], dtype: TokenFormat) -> Iterator[Callable[[Routing], None]]:
    """Open a file of kept tokens, and give the function that adds an image; row i is row i of the table.

    It has `tokens` [n, K, D] and, for rankers, `indices` [n, K]. With a guarantee K differs between images, which then follow each
    other without gaps: `tokens` [sum of K, D], `indices` [sum of K] and `counts` [n], the K of each image.
    """
    packed, (name, kind) = "guarantee" in metadata, _DTYPES[dtype]
    counts: list[int] = []
    dim, ranked = 0, True
    # A safetensors file begins with a header that contains the shapes, and n is known only at the end. So space is reserved for the
    # header, tokens are written after it as they come, indices go to a temporary file, and the header is filled in last.
    with atomic_write(path) as temporary, open(temporary, "wb") as stream, tempfile.TemporaryFile(dir=path.parent) as indices:
        stream.write(b" " * (8 + _HEADER_ROOM))

        def add(answer: Routing) -> None:
            nonlocal dim, ranked
            k, dim = answer.tokens.shape
            counts.append(k)
            stream.write(np.ascontiguousarray(answer.tokens, dtype=kind).tobytes())
            ranked = answer.kept is not None
            if answer.kept is not None:
                indices.write(answer.kept.astype("<i2").tobytes())

        yield add
        rows = [sum(counts)] if packed else [len(counts), counts[0] if counts else 0]
        end = sum(counts) * dim * kind.itemsize
        tensors: dict[str, Any] = {"tokens": {"dtype": name, "shape": [*rows, dim], "data_offsets": [0, end]}}
        if ranked:
            start, end = end, end + sum(counts) * 2
            tensors["indices"] = {"dtype": "I16", "shape": rows, "data_offsets": [start, end]}
            indices.seek(0)
            shutil.copyfileobj(indices, stream, 1 << 20)
        if packed:
            tensors["counts"] = {"dtype": "I32", "shape": [len(counts)], "data_offsets": [end, end + len(counts) * 4]}
            stream.write(np.asarray(counts, "<i4").tobytes())
        header = json.dumps({"__metadata__": metadata, **tensors}).encode()
        if len(header) > _HEADER_ROOM:
            raise WorkError(f"The header of the token file needs {len(header)} bytes, but only {_HEADER_ROOM} are available.")
        stream.seek(0)
        stream.write(struct.pack("<Q", _HEADER_ROOM) + header.ljust(_HEADER_ROOM))
