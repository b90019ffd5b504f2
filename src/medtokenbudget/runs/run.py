"""A run directory: the two tables that every number comes from, and `run.json`, which says what they were made from.

`predictions.parquet` has one row per image and cell, `results.csv` one row per cell; a cell is one (study, dataset, view, method,
seed, budget). `summarize` turns the first table into the second. `run.json` holds settings, versions, seeds and hashes but no
clock: two equal runs write equal bytes.
"""

from __future__ import annotations

import json
import os
import platform
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
from safetensors.numpy import save

from medtokenbudget import measures
from medtokenbudget.backbone import FeatureStore
from medtokenbudget.config import HEADLINE_BUDGET, TrainConfig, train_config_from_dict
from medtokenbudget.data import Manifest
from medtokenbudget.data.manifest import listed
from medtokenbudget.errors import RequestError
from medtokenbudget.escaping import csv_frame, from_csv_cell
from medtokenbudget.files import atomic_write, read_json, read_lines, sha256_file, unsealed, write_safetensors, write_sealed
from medtokenbudget.measures import NOT_MEASURED, Cell
from medtokenbudget.progress import say
from medtokenbudget.training.trainer import log_hash

FILE = "run.json"
FORMAT_VERSION = 3
RESULTS, PREDICTIONS, ROUTING, METRICS, ATTRIBUTES = FILES = (
    "results.csv",
    "predictions.parquet",
    "routing.safetensors",
    "metrics.jsonl",
    "attributes.parquet",
)
"""What a report reads; `run.json` has the hashes."""
PACKAGES = ("medtokenbudget", "torch", "timm", "numpy", "pandas", "pyarrow", "scipy", "safetensors", "pillow")
_AGAIN = "Delete it and run the command that made the run again; finished trainings are kept."

# The two tables ------------------------------------------------------------------------------------------------------

AS_IS = "as-is"
"""The value of `view` for original images; off-center crops of the same images have `backbone.views.OFF_CENTER`."""
CELL: tuple[str, ...] = ("study", "dataset", "view", "method", "seed", "budget")
RESULT_COLUMNS: tuple[str, ...] = (*CELL, "k", "n", "n_masked", *measures.METRICS)

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
_TEXTS = ("study", "dataset", "view", "method")
_NAMES = {"label_name": "label", "predicted_name": "predicted"}
"""Columns with the class name of a class index, filled in when the table is written."""
_NULLABLE = ("lesion", "kept_lesion")


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
    table = pa.Table.from_arrays([_to_arrow(frame[entry.name], entry) for entry in schema], schema=schema)
    with atomic_write(path) as temporary:
        pq.write_table(table, temporary, compression="zstd", row_group_size=1 << 16)


def _to_arrow(column: pd.Series[Any], entry: pa.Field) -> pa.Array:
    if entry.name == "probabilities":
        values = [np.asarray(row, np.float32) for row in column]
        offsets = np.concatenate([[0], np.cumsum([len(row) for row in values])]).astype(np.int32)
        flat = np.concatenate(values) if values else np.zeros(0, np.float32)
        return pa.ListArray.from_arrays(offsets, pa.array(flat, pa.float32()), type=entry.type)
    if pa.types.is_string(entry.type):
        return pa.array([None if pd.isna(value) else str(value) for value in column], entry.type)
    numbers = column.to_numpy(dtype=float, na_value=np.nan)
    missing = np.isnan(numbers)
    if pa.types.is_integer(entry.type) and (numbers[~missing] % 1 != 0).any():
        raise RequestError(f"Column {entry.name} of the predictions contains fractions; expected whole numbers.")
    return pa.array(np.where(missing, 0, numbers).astype(entry.type.to_pandas_dtype()), entry.type, mask=missing)


def read_predictions(path: Path | str) -> tuple[pd.DataFrame, tuple[str, ...]]:
    """Read the predictions and the class names; counts that may be missing come as nullable integers."""
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
    frame = pd.DataFrame({name: _from_arrow(table.column(name), name) for name in PREDICTION_COLUMNS})
    return frame, tuple(json.loads(metadata[b"classes"]))


def _from_arrow(column: pa.ChunkedArray, name: str) -> Any:
    if name not in _NULLABLE:
        return column.to_pandas()
    missing = column.is_null().to_numpy()
    return pd.arrays.IntegerArray(np.asarray(column.fill_null(0).to_numpy(), np.int32).copy(), np.asarray(missing, bool).copy())


def summarize(predictions: pd.DataFrame, classes: Sequence[str]) -> pd.DataFrame:
    """Summarize each cell in one row, in order of first appearance, with every column of `results.csv`.

    `n` counts the labeled images, `n_masked` the images with at least one lesion patch: those retention is measured on.
    """
    cells = predictions.groupby(list(CELL), sort=False, dropna=False)
    rows = [dict(zip(CELL, key)) | _summarize_cell(cell, len(classes)) for key, cell in cells]
    return pd.DataFrame(rows, columns=list(RESULT_COLUMNS))


def _summarize_cell(cell: pd.DataFrame, classes: int) -> dict[str, float | int]:
    if cell["k"].nunique() > 1:
        kept = listed(sorted(cell["k"].unique().tolist()))
        raise RequestError(
            f"Images of one method and budget keep different numbers of patches ({kept}), so "
            "they cannot be in one row of results. Put images with another token grid into a data set of their own."
        )
    measured = Cell(cell, classes)
    counts = {"k": int(cell["k"].iloc[0]), "n": len(measured.label), "n_masked": measured.retention.n}
    return counts | {name: metric.formula(measured) for name, metric in measures.METRICS.items()}


def write_results(path: Path | str, frame: pd.DataFrame) -> None:
    """Write the tidy table; what was not measured is an empty field."""
    missing = [name for name in RESULT_COLUMNS if name not in frame.columns]
    if missing:
        raise RequestError(f"Results lack the columns {', '.join(missing)}; expected {', '.join(RESULT_COLUMNS)}.")
    with atomic_write(path) as temporary:
        csv_frame(frame[list(RESULT_COLUMNS)]).to_csv(temporary, index=False, float_format="%.10g", lineterminator="\n")


def read_results(path: Path | str) -> pd.DataFrame:
    """Read the tidy table, empty fields as NaN."""
    try:
        # A method or a data set may be called "NA" or "nan": only an empty field is missing.
        frame = pd.read_csv(path, dtype=dict.fromkeys(_TEXTS, str), keep_default_na=False, na_values=[""])
    except FileNotFoundError:
        raise RequestError(f"{path} does not exist. Run `mtb sweep` or `mtb reproduce` first.") from None
    except (pd.errors.ParserError, pd.errors.EmptyDataError, UnicodeDecodeError) as error:
        raise RequestError(f"{path} is not a readable CSV file ({error}).") from None
    missing = [name for name in RESULT_COLUMNS if name not in frame.columns]
    if missing:
        raise RequestError(f"{path} lacks the columns {', '.join(missing)}: another version wrote it. Repeat the run.")
    texts = {name: frame[name].map(from_csv_cell) for name in _TEXTS}
    try:
        return frame.assign(**texts)[list(RESULT_COLUMNS)].astype(dict.fromkeys(measures.METRICS, float))
    except ValueError as error:
        raise RequestError(f"{path} has a cell that is not a number ({error}). Repeat the run.") from None


_HEADLINE = {"accuracy": "accuracy", "macro_f1": "macro F1", "retention": "retention", "retention_of_ceiling": "of ceiling"}


def headline(results: pd.DataFrame, budget: float = HEADLINE_BUDGET) -> str:
    """Write every method on the original images at one budget as lines of plain text, as the mean over seeds.

    Args:
        results: `results.csv` as a table.
        budget: Token budget; if it was not measured, the nearest one is shown.
    """
    rows = results[results["view"] == AS_IS]
    if rows.empty:
        return "No results."
    nearest = min(rows["budget"].unique(), key=lambda measured: (abs(measured - budget), measured))
    rows = rows[rows["budget"] == nearest]
    table = rows.groupby("method", sort=False)[list(_HEADLINE)].mean()
    width = max(22, 2 + max(len(str(method)) for method in table.index))
    lines = [f"{'budget ' + format(nearest, 'g'):<{width}}" + "".join(f"{name:>12}" for name in _HEADLINE.values())]
    for method, row in table.iterrows():
        cells = [NOT_MEASURED if pd.isna(value) else f"{value:.1%}" for value in row]
        lines.append(f"{method!s:<{width}}" + "".join(f"{cell:>12}" for cell in cells))
    counts = rows.groupby("method", sort=False)["n"].max()
    fewer = "".join(f"; {method} classified {n:,}" for method, n in counts.items() if n < counts.max())
    lines.append(f"n = {int(counts.max()):,} images, {int(rows['n_masked'].max()):,} with a lesion mask{fewer}")
    return "\n".join(lines)


# Patch orders --------------------------------------------------------------------------------------------------------

OF_IMAGES = ("lesion", "has_mask", "covered")
"""What `routing.safetensors` holds once for all methods; everything else is of one method."""


def routing_name(view: str, name: str, method: str, seed: int) -> str:
    """Return the name of a tensor in `routing.safetensors`."""
    prefix = "" if view == AS_IS else f"{view}/"
    return f"{prefix}{name}" if name in OF_IMAGES else f"{prefix}{name}/{method}/{seed}"


def write_tables(
    out: Path,
    predictions: pd.DataFrame,
    classes: Sequence[str],
    routing: dict[str, np.ndarray],
    image_ids: Mapping[str, Sequence[str]],
    grid: Sequence[int],
) -> pd.DataFrame:
    """Write `predictions.parquet`, `results.csv` and `routing.safetensors` of a run, and return the results.

    Args:
        routing: Patch orders and scores by `routing_name`.
        image_ids: The images of their rows, by view.
    """
    write_predictions(out / PREDICTIONS, predictions, classes)
    results = summarize(predictions, classes)
    write_results(out / RESULTS, results)
    # One key: safetensors does not keep the order of several.
    about = {"routing": json.dumps({"image_ids": image_ids, "grid": list(grid)})}
    write_safetensors(out / ROUTING, save(routing, about))
    return results


# run.json ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class MethodInfo:
    """One method of a run: its parts and the settings it was trained with."""

    selector: str
    head: str
    variant: str
    learned: bool
    config: dict[str, Any]

    @property
    def train_config(self) -> TrainConfig:
        """Return the settings as a typed configuration."""
        return train_config_from_dict(self.config)


@dataclass(frozen=True)
class RunInfo:
    """The content of a run's `run.json`.

    Attributes:
        path: The run directory (not stored).
        dataset: Name of the data set, as the user calls it.
        source: Kind of source that the manifest came from (isic, kvasir, folder, csv, synthetic).
        classes: Class names in the order of the logits.
        manifest: Path of the manifest, relative to the run directory.
        store: Path of the token store, relative to the run directory.
        config: Common training settings.
        methods: Method text to its parts and settings.
        main: The method that becomes the saved model and the headline of the report; None if no selector was trained.
        studies: Name, methods, seeds and budgets of each study.
        units: Finished units (a method with a seed).
        seeds: Seeds of the finished units.
        versions: Versions of Python and the packages that results depend on.
        hashes: Of the manifest, the split and the store.
        backbone: What the tokens came from.
        counts: Images, masks and classes of each part.
        files: Hash of each file that a report reads.
        command: The command line that made the run, if it was made from the command line.
        evaluation: Of `mtb evaluate`: the model, its own validation, how classes were matched. None for a run that trained.
    """

    path: Path
    dataset: str
    source: str
    classes: tuple[str, ...]
    manifest: str
    store: str
    config: dict[str, Any]
    methods: dict[str, MethodInfo]
    main: str | None
    studies: tuple[dict[str, Any], ...]
    units: tuple[str, ...]
    seeds: tuple[int, ...]
    versions: dict[str, str]
    hashes: dict[str, str]
    backbone: dict[str, Any]
    counts: dict[str, Any]
    files: dict[str, str]
    command: str | None = None
    evaluation: dict[str, Any] | None = None
    format_version: int = field(default=FORMAT_VERSION)

    @classmethod
    def of(cls, out: Path, manifest: Manifest, manifest_path: Path, store: FeatureStore, **facts: Any) -> RunInfo:
        """Describe a run whose tables are written: what follows from the images and their tokens, and the other `facts`."""
        return cls(
            path=out,
            dataset=manifest.name,
            source=manifest.source.split()[0],
            classes=manifest.classes,
            manifest=os.path.relpath(manifest_path.resolve(), out.resolve()),
            store=os.path.relpath(store.path.resolve(), out.resolve()),
            versions=versions(),
            backbone=store.config["backbone"],
            counts=counts(manifest, store),
            files=hashes(out),
            **facts,
        )

    @classmethod
    def read(cls, run: Path | str) -> RunInfo:
        """Read and check `run.json` of a run directory.

        Raises:
            RequestError: There is no such file, another version wrote it, or it is damaged.
        """
        path = Path(run)
        if not (path / FILE).is_file():
            what = "does not exist" if not path.exists() else f"is not a run directory: it has no {FILE}"
            raise RequestError(f"{path} {what}. Make a run with `mtb train`, `mtb sweep` or `mtb reproduce`.")
        values = read_json(path / FILE)
        if not isinstance(values, dict):
            raise RequestError(f"{path / FILE} is damaged: expected a JSON object. {_AGAIN}")
        written_by = values.get("format_version", 1)
        if written_by != FORMAT_VERSION:
            made = f"`{values['command']}`" if isinstance(values.get("command"), str) else "the command that made it"
            raise RequestError(
                f"{path} has run format version {written_by}; this version reads {FORMAT_VERSION}. "
                f"Run {made} again with a new --out."
            )
        return cls(path=path, **_checked(path / FILE, unsealed(path / FILE, values, _AGAIN)))

    def write(self) -> None:
        """Write `run.json`; equal content gives equal bytes."""
        values = asdict(self)
        del values["path"]
        write_sealed(self.path / FILE, values)

    def file(self, name: str) -> Path:
        """Return the path of one of `FILES`.

        Raises:
            RequestError: The file is missing, or its content is not what the run wrote.
        """
        path = self.path / name
        if not path.is_file() or content_hash(path) != self.files.get(name):
            what = "is damaged: its content does not match its hash in run.json" if path.is_file() else "does not exist"
            made = f"`{self.command}`" if self.command else "the command that made the run"
            raise RequestError(f"{path} {what}. Run {made} again; finished trainings are kept.")
        return path

    def predictions(self) -> tuple[pd.DataFrame, tuple[str, ...]]:
        """Read `predictions.parquet`, and the class names."""
        return read_predictions(self.file(PREDICTIONS))

    def results(self) -> pd.DataFrame:
        """Read `results.csv`, which is made again from the predictions if it is missing or damaged."""
        path = self.path / RESULTS
        if not path.is_file() or content_hash(path) != self.files.get(RESULTS):
            table = summarize(*self.predictions())
            say(f"{path} is missing or damaged. It is made again from {PREDICTIONS}.")
            write_results(path, table)
        return read_results(path)

    @property
    def manifest_path(self) -> Path:
        """Return where the manifest is, seen from anywhere."""
        return (self.path / self.manifest).resolve()

    @property
    def store_path(self) -> Path:
        """Return where the token store is, seen from anywhere."""
        return (self.path / self.store).resolve()


def _json_types() -> dict[str, tuple[type, ...]]:
    """Return what JSON makes of each field of `RunInfo`, from its annotation: of a tuple a list, of a mapping a dict."""
    types = {}
    for name, hint in get_type_hints(RunInfo).items():
        choices = get_args(hint) if isinstance(hint, UnionType) else (hint,)
        origins = [get_origin(choice) or choice for choice in choices]
        types[name] = tuple(list if origin is tuple else origin for origin in origins)
    del types["path"]
    return types


def _checked(file: Path, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of `RunInfo` out of parsed JSON."""
    types = _json_types()
    wrong = [name for name, allowed in types.items() if not isinstance(values.get(name), allowed)]
    unknown = [name for name in values if name not in types]
    parts = {entry.name for entry in fields(MethodInfo)}
    methods = values.get("methods")
    if isinstance(methods, dict) and any(not isinstance(m, dict) or set(m) != parts for m in methods.values()):
        wrong.append("methods")
    if wrong or unknown:
        raise RequestError(f"{file} is damaged: check {', '.join(dict.fromkeys([*wrong, *unknown]))}. {_AGAIN}")
    tuples = {name: tuple(values[name]) for name, allowed in types.items() if list in allowed}
    return {**values, **tuples, "methods": {text: MethodInfo(**entry) for text, entry in values["methods"].items()}}


def content_hash(path: Path) -> str:
    """Hash a file of a run or of a unit; that of a log leaves out the clock, so that equal runs have equal hashes."""
    return log_hash(read_lines(path)) if path.suffix == ".jsonl" else sha256_file(path)


def hashes(run: Path) -> dict[str, str]:
    """Hash each of `FILES` that a run has."""
    return {name: content_hash(run / name) for name in FILES if (run / name).is_file()}


def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that a result depends on."""
    installed = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            installed[name] = version(name)
        except PackageNotFoundError:
            installed[name] = "not installed"
    return installed


def counts(manifest: Manifest, store: FeatureStore) -> dict[str, Any]:
    """Count images, masks and classes of each part, and the lesion sizes of the validation masks: the supplement's two tables."""
    parts: dict[str, Any] = {}
    for part in ("train", "select", "val"):
        rows = store.rows(manifest.part(part).ids, strict=False)
        label, masked = store.label.numpy()[rows], store.has_mask.numpy()[rows]
        parts[part] = {
            "images": len(rows),
            "masks": int(masked.sum()),
            "classes": {name: int((label == index).sum()) for index, name in enumerate(manifest.classes)},
            "masked_classes": {name: int((label[masked] == index).sum()) for index, name in enumerate(manifest.classes)},
            "lesion_patches": store.lesion.numpy()[rows[masked]].sum(1).astype(int).tolist() if part == "val" else None,
        }
    return parts


def record_command(run: Path, name: str, arguments: Sequence[str]) -> None:
    """Record in `run.json` the command line that made the run, of paths elsewhere only the last name: runs are shared."""
    replace(RunInfo.read(run), command=shlex.join(["mtb", name, *map(_short, arguments)])).write()


def _short(argument: str) -> str:
    option, equals, value = argument.partition("=") if argument.startswith("--") else ("", "", argument)
    path = Path(value)
    return f"{option}{equals}{path.name}" if path.is_absolute() or ".." in path.parts else argument
