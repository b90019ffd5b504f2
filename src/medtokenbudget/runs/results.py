"""The two tables that every number comes from: `predictions.parquet` (one row per image) and `results.csv` (one row per cell).

A cell is one (study, dataset, view, method, seed, budget). This file defines both schemas; `summarize` turns the first table
into the second.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from medtokenbudget import metrics
from medtokenbudget.data.manifest import listed
from medtokenbudget.errors import RequestError
from medtokenbudget.escaping import csv_frame, from_csv_cell
from medtokenbudget.files import atomic_write

AS_IS = "as-is"
"""The value of `view` for images as they are; off-center crops of the same images have `backbone.views.OFF_CENTER`."""
CELL: tuple[str, ...] = ("study", "dataset", "view", "method", "seed", "budget")
METRICS: tuple[str, ...] = (
    "accuracy",
    "macro_f1",
    "balanced_accuracy",
    "retention",
    "retention_mean",
    "retention_of_ceiling",
    "precision",
    "enrichment",
    "ceiling",
    "macro_auroc",
    "ece",
    "purity",
    "lesion_dominated",
    "lesion_mass",
)
RESULT_COLUMNS: tuple[str, ...] = (*CELL, "k", "n", "n_masked", *METRICS)

SCHEMA = pa.schema(
    [
        ("study", pa.string()),
        ("dataset", pa.string()),
        ("view", pa.string()),
        ("method", pa.string()),
        ("seed", pa.int64()),
        ("budget", pa.float64()),
        ("k", pa.int32()),
        ("n_patches", pa.int32()),
        ("image_id", pa.string()),
        ("group", pa.string()),  # null: the image is a group of its own
        ("label", pa.int32()),  # -1: unlabeled
        ("label_name", pa.string()),  # null: unlabeled
        ("predicted", pa.int32()),  # -1: no head
        ("predicted_name", pa.string()),  # null: no head
        ("probabilities", pa.list_(pa.float32())),
        ("lesion", pa.int32()),  # null: no mask; 0: a mask without a lesion patch on the grid
        ("kept_lesion", pa.int32()),  # null: no mask, or a merger
        ("purity", pa.float64()),  # null: no mask, or not a hard merger
        ("lesion_dominated", pa.float64()),  # null: no lesion patch, or not a hard merger
        ("lesion_mass", pa.float64()),  # null: no lesion patch, or not a soft merger
    ]
)
PREDICTION_COLUMNS: tuple[str, ...] = tuple(SCHEMA.names)
_NAMES = {"label_name": "label", "predicted_name": "predicted"}
"""Columns with the class name of a class index, filled in when the table is written."""
_NULLABLE = {"lesion": "Int32", "kept_lesion": "Int32"}


def write_predictions(path: Path | str, frame: pd.DataFrame, classes: Sequence[str]) -> None:
    """Write predictions in the order given; the class names go into the file's metadata. Equal tables are equal bytes."""
    missing = [name for name in PREDICTION_COLUMNS if name not in frame.columns and name not in _NAMES]
    if missing:
        raise RequestError(f"Predictions lack the columns {', '.join(missing)}; expected {', '.join(PREDICTION_COLUMNS)}.")
    known = dict(enumerate(classes))
    frame = frame.copy(deep=False)
    for name, index in _NAMES.items():
        frame[name] = [known.get(int(i)) for i in frame[index]]
    schema = SCHEMA.with_metadata({"classes": json.dumps(list(classes), ensure_ascii=False)})
    table = pa.Table.from_arrays([_to_arrow(frame[field.name], field) for field in schema], schema=schema)
    with atomic_write(path) as temporary:
        pq.write_table(table, temporary, compression="zstd", row_group_size=1 << 16)


def _to_arrow(column: pd.Series[Any], field: pa.Field) -> pa.Array:
    if field.name == "probabilities":
        values = [np.asarray(row, np.float32) for row in column]
        offsets = np.concatenate([[0], np.cumsum([len(row) for row in values])]).astype(np.int32)
        flat = np.concatenate(values) if values else np.zeros(0, np.float32)
        return pa.ListArray.from_arrays(offsets, pa.array(flat, pa.float32()), type=field.type)
    if pa.types.is_string(field.type):
        return pa.array([None if pd.isna(value) else str(value) for value in column], field.type)
    numbers = column.to_numpy(dtype=float, na_value=np.nan)
    if pa.types.is_integer(field.type) and (numbers[~np.isnan(numbers)] % 1 != 0).any():
        raise RequestError(f"Column {field.name} of the predictions contains fractions; expected whole numbers.")
    missing = np.isnan(numbers)
    return pa.array(np.where(missing, 0, numbers).astype(field.type.to_pandas_dtype()), field.type, mask=missing)


def read_predictions(path: Path | str) -> tuple[pd.DataFrame, tuple[str, ...]]:
    """The predictions and the class names; counts that may be missing come as nullable integers."""
    try:
        table = pq.read_table(path)
    except FileNotFoundError:
        raise RequestError(f"{path} does not exist. Run `mtb sweep` or `mtb reproduce` first.") from None
    except (pa.ArrowInvalid, OSError) as error:
        raise RequestError(f"{path} is not a readable Parquet file ({error}). Run `mtb sweep` again.") from None
    metadata = table.schema.metadata or {}
    missing = [name for name in PREDICTION_COLUMNS if name not in table.column_names]
    if missing or b"classes" not in metadata:
        what = f"columns {', '.join(missing)}" if missing else "class names in its metadata"
        raise RequestError(f"{path} has no {what}: another version wrote it. Repeat the run.")
    table = table.select(list(PREDICTION_COLUMNS))
    frame = pd.DataFrame({name: _from_arrow(table.column(name), name) for name in PREDICTION_COLUMNS})
    return frame, tuple(json.loads(metadata[b"classes"]))


def _from_arrow(column: pa.ChunkedArray, name: str) -> Any:
    if name in _NULLABLE:
        missing = column.is_null().to_numpy()
        return pd.arrays.IntegerArray(np.asarray(column.fill_null(0).to_numpy(), np.int32).copy(), np.asarray(missing, bool).copy())
    return column.to_pandas()


def probability_matrix(frame: pd.DataFrame) -> NDArray[np.float64]:
    """The probabilities of all rows as one [n, C] array."""
    return np.stack([np.asarray(row, float) for row in frame["probabilities"]]) if len(frame) else np.zeros((0, 0))


def summarize(predictions: pd.DataFrame, classes: Sequence[str]) -> pd.DataFrame:
    """One row for each cell, in order of first appearance, with every column of `results.csv`.

    `n` counts the labeled images, `n_masked` the images with at least one lesion patch: those retention is measured on.
    """
    cells = predictions.groupby(list(CELL), sort=False, dropna=False)
    rows = [dict(zip(CELL, key)) | summarize_cell(cell, len(classes)) for key, cell in cells]
    return pd.DataFrame(rows, columns=list(RESULT_COLUMNS))


def summarize_cell(cell: pd.DataFrame, classes: int) -> dict[str, float | int]:
    """Every measured column of one cell."""
    if cell["k"].nunique() > 1:
        found = sorted(cell["k"].unique().tolist())
        raise RequestError(
            f"Images of one method and budget keep different numbers of patches ({listed(found)}), so they cannot be in one row of "
            "results. Put images with another token grid into a data set of their own."
        )
    labeled = cell[cell["label"] >= 0]
    label, predicted = labeled["label"].to_numpy(), labeled["predicted"].to_numpy()
    probabilities = probability_matrix(labeled)
    masked = cell[cell["lesion"].notna()]
    ranker = bool(masked["kept_lesion"].notna().any())
    retention = metrics.retention_of_counts(
        masked["kept_lesion"].to_numpy(dtype=float, na_value=np.nan) if ranker else None,
        masked["lesion"].to_numpy(dtype=float),
        masked["k"].to_numpy(),
        masked["n_patches"].to_numpy(),
    )
    return {
        "k": int(cell["k"].iloc[0]),
        "n": len(labeled),
        "n_masked": retention.n,
        "accuracy": metrics.accuracy(label, predicted),
        "macro_f1": metrics.macro_f1(label, predicted, classes),
        "balanced_accuracy": metrics.balanced_accuracy(label, predicted, classes),
        "retention": retention.pooled,
        "retention_mean": retention.mean,
        "retention_of_ceiling": retention.of_ceiling,
        "precision": retention.precision,
        "enrichment": retention.enrichment,
        "ceiling": retention.ceiling,
        "macro_auroc": metrics.macro_auroc(label, probabilities),
        "ece": metrics.expected_calibration_error(label, predicted, probabilities),
        **{name: float(cell[name].mean()) for name in ("purity", "lesion_dominated", "lesion_mass")},
    }


def write_results(path: Path | str, frame: pd.DataFrame) -> None:
    """Write the tidy table; what was not measured is an empty field."""
    missing = [name for name in RESULT_COLUMNS if name not in frame.columns]
    if missing:
        raise RequestError(f"Results lack the columns {', '.join(missing)}; expected {', '.join(RESULT_COLUMNS)}.")
    with atomic_write(path) as temporary:
        csv_frame(frame[list(RESULT_COLUMNS)]).to_csv(temporary, index=False, float_format="%.10g", lineterminator="\n")


def read_results(path: Path | str) -> pd.DataFrame:
    """The tidy table, empty fields as NaN."""
    try:
        frame = pd.read_csv(
            path, dtype={"study": str, "dataset": str, "view": str, "method": str}, keep_default_na=False, na_values=[""]
        )
    except FileNotFoundError:
        raise RequestError(f"{path} does not exist. Run `mtb sweep` or `mtb reproduce` first.") from None
    except (pd.errors.ParserError, pd.errors.EmptyDataError, UnicodeDecodeError) as error:
        raise RequestError(f"{path} is not a readable CSV file ({error}).") from None
    missing = [name for name in RESULT_COLUMNS if name not in frame.columns]
    if missing:
        raise RequestError(f"{path} lacks the columns {', '.join(missing)}: another version wrote it. Repeat the run.")
    texts = {name: frame[name].map(from_csv_cell) for name in ("study", "dataset", "view", "method")}
    try:
        return frame.assign(**texts)[list(RESULT_COLUMNS)].astype(dict.fromkeys(METRICS, float))
    except ValueError as error:
        raise RequestError(f"{path} has a cell that is not a number ({error}). Repeat the run.") from None
