"""Answers to files, row by row: a table (CSV or Parquet), the kept tokens (safetensors), overlays and a list of what failed.

A million images need no more memory than a hundred: at most one row group is buffered.
"""

from __future__ import annotations

import csv
import json
import shutil
import struct
import tempfile
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO, Literal, Protocol

import numpy as np
import torch

from medtokenbudget.data import decode_mask
from medtokenbudget.errors import MedTokenBudgetError, RequestError, WorkError
from medtokenbudget.escaping import csv_cell
from medtokenbudget.files import append_line, atomic_write, remove, write_encoded
from medtokenbudget.locks import exclusive
from medtokenbudget.metrics import Retention, retention_of_counts
from medtokenbudget.model.inference import ImageSource, Prediction, Routing
from medtokenbudget.model.overlays import overlay
from medtokenbudget.progress import progress
from medtokenbudget.routing import create_selector
from medtokenbudget.tokens import TokenBatch

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


_IMAGE = Column("image", "text", lambda answer: answer.image)
_ROUTE = [
    Column("selector", "text", lambda answer: answer.selector),
    Column("budget", "double", lambda answer: answer.budget),
    Column("k", "count", lambda answer: answer.k),
    Column("n_patches", "count", lambda answer: answer.n_patches),
    Column("unfamiliarity", "float", lambda answer: answer.unfamiliarity),
    Column("unfamiliar", "bool", lambda answer: None if answer.unfamiliarity is None else answer.unfamiliar),
]
_KEPT = Column("kept", "counts", lambda answer: None if answer.kept is None else answer.kept.tolist())


def prediction_columns(classes: tuple[str, ...]) -> list[Column]:
    """List the columns of a table of predictions; the probabilities are `p_<class>`."""

    def probability(name: str) -> Callable[[Prediction], float]:
        return lambda prediction: prediction.probabilities[name]

    return [
        _IMAGE,
        Column("label", "text", lambda answer: answer.label),
        Column("probability", "float", lambda answer: answer.probability),
        *(Column(f"p_{name}", "float", probability(name)) for name in classes),
        *_ROUTE,
        _KEPT,
    ]


def routing_columns() -> list[Column]:
    """List the columns of a table of routings; how much of the lesion was kept is empty for an image without a mask."""
    return [
        _IMAGE,
        *_ROUTE,
        Column("lesion", "count", lesion_patches),
        Column("kept_lesion", "count", lambda answer: answer.kept_lesion),
        Column("center_lesion", "count", center_lesion),
        _KEPT,
        Column("scores", "floats", lambda answer: None if answer.scores is None else answer.scores.tolist()),
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

        self.columns, self.schema = columns, _arrow_schema(columns, metadata)
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


def _arrow_schema(columns: Sequence[Column], metadata: dict[str, str]) -> Any:
    """Return the Parquet schema of these columns."""
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


@dataclass(frozen=True)
class Outputs:
    """Where answers go.

    Attributes:
        table: Table to write, `.csv` or `.parquet`.
        columns: Its columns.
        metadata: What the table and the tokens say about where they come from.
        errors: File that lists the images that could not be read.
        tokens: Safetensors file for the kept tokens, optional.
        tokens_dtype: Number format of these tokens.
        overlays: Folder for one overlay picture per image, optional.
    """

    table: Path
    columns: Sequence[Column]
    metadata: dict[str, str]
    errors: Path
    tokens: Path | None = None
    tokens_dtype: TokenFormat = "fp16"
    overlays: Path | None = None


@dataclass
class Summary:
    """What was written, and how much of the lesion was kept where there is a mask.

    Attributes:
        done: Number of images in the table.
        failed: Number of images that could not be read.
        errors: File with the reasons; None if there were none.
        unfamiliar: Number of images that are unlike the training images of the model; None if it cannot tell.
        masks_failed: Number of masks that could not be used; their images are in the table all the same.
        mask_reason: Why the first of them could not; empty if all could.
        reason: Why the first image could not be read; empty if all could.
        masks: Number of masks that could be used, also by methods that merge patches, which measure nothing.
        measured: Lesion patches, those kept, those that `center` keeps, and K, of each measured image: 16 bytes per image.
    """

    done: int = 0
    failed: int = 0
    errors: Path | None = None
    unfamiliar: int | None = None
    masks_failed: int = 0
    mask_reason: str = ""
    reason: str = ""
    masks: int = 0
    measured: array[int] = field(default_factory=lambda: array("i"))

    def add(self, source: ImageSource, answer: Routing | None) -> None:
        """Count an image."""
        if answer is None:
            self.failed += 1
            self.reason = self.reason or source.reason
            return
        self.done += 1
        if answer.unfamiliarity is not None:
            self.unfamiliar = (self.unfamiliar or 0) + answer.unfamiliar
        if source.mask_reason:
            self.masks_failed += 1
            self.mask_reason = self.mask_reason or source.mask_reason
        self.measure(lesion_patches(answer), answer.kept_lesion, center_lesion(answer), answer.k)

    def measure(self, lesion: int | None, kept: int | None, center: int | None, k: int) -> None:
        """Count the cells of a row, if its image has a mask and its method keeps patches."""
        self.masks += lesion is not None
        if lesion is not None and kept is not None and center is not None:
            self.measured.extend((lesion, kept, center, k))

    def retention(self, grid: tuple[int, int]) -> dict[str, Retention]:
        """Measure the router and the controls on the same images; empty if none has a mask."""
        if not self.measured:
            return {}
        lesion, kept, center, k = np.asarray(self.measured).reshape(-1, 4).T
        n = np.full(len(lesion), grid[0] * grid[1])
        counts = {"router": kept, "center": center, "random": lesion * k / n}
        return {name: retention_of_counts(values, lesion, k, n) for name, values in counts.items()}

    def require_images(self, errors: Path) -> None:
        """Raise a WorkError if not a single image could be read."""
        if not self.done:
            reason = self.reason or "There are no images."
            raise WorkError(f"No image could be read ({self.failed} failed). First error: {reason} All errors are in {errors}.")


def write_rows(
    answers: Iterable[tuple[ImageSource, Routing | None]],
    outputs: Outputs,
    note: Callable[[str, str], None],
    advance: Callable[[], Any],
    first: int = 0,
    empty: bool = False,
) -> Summary:
    """Write every answer as it comes. The table appears last, so whoever sees it finds the rest too.

    Args:
        answers: What `MedTokenBudget.answers` yields.
        outputs: Where to write; `errors` is only named in the message.
        note: Called with the name and the reason for each image that could not be read, or whose mask could not.
        advance: Called for every image.
        first: Number of the first overlay.
        empty: Whether a table without rows is written if no image could be read; otherwise that is an error.
    """
    summary = Summary()
    with ExitStack() as stack:
        writers = [stack.enter_context(table_writer(outputs.table, outputs.columns, outputs.metadata))]
        if outputs.tokens is not None:
            # With a guarantee K differs from image to image.
            packed = "guarantee" in outputs.metadata
            writers.append(stack.enter_context(token_writer(outputs.tokens, outputs.metadata, outputs.tokens_dtype, packed)))
        for source, answer in answers:
            advance()
            if answer is None:
                note(source.name, source.reason)
            else:
                if outputs.overlays is not None:
                    path = outputs.overlays / f"{first + summary.done:06d}-{Path(answer.image).stem}.png"
                    _save_overlay(path, source, answer, note)
                for writer in writers:
                    writer.add(answer)
            if source.mask_reason:
                note(source.name, f"Routed, but its mask cannot be used: {source.mask_reason}")
            summary.add(source, answer)
        if not empty:
            summary.require_images(outputs.errors)
    return summary


def _save_overlay(path: Path, source: ImageSource, answer: Routing, note: Callable[[str, str], None]) -> None:
    """Draw the kept patches; a mask that cannot be read is reported, and the overlay is drawn without it."""
    mask = None
    try:
        mask = None if source.mask is None else decode_mask(source.mask)
    except MedTokenBudgetError as error:
        note(source.name, f"Drawn, but its mask could not be read: {error}")
    picture = overlay(source, answer, mask)
    write_encoded(path, lambda stream: picture.save(stream, format="PNG"))


def write_table(answers: Iterable[tuple[ImageSource, Routing | None]], outputs: Outputs, what: str) -> Summary:
    """Write one table with a progress bar named `what`, and list what could not be read.

    Raises:
        WorkError: If no image could be read; no table is written then.
    """
    check_table_path(outputs.table)
    errors = outputs.errors
    with exclusive(outputs.table.parent, name=f".{outputs.table.stem}.lock"), progress(what=what, unit="image") as bar:
        remove(errors)
        summary = write_rows(
            answers, outputs, lambda image, reason: append_line(errors, {"image": image, "reason": reason}), bar.update
        )
    summary.errors = errors if errors.exists() else None
    return summary
