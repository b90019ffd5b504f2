"""`Run`: a run directory, the two tables that every number comes from, and `run.json`, which says what they were made from.

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
from functools import cached_property, lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import NoneType
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
from safetensors.numpy import save

from medtokenbudget import files, measures
from medtokenbudget.backbone import FeatureStore
from medtokenbudget.config import HEADLINE_BUDGET, TrainConfig, to_dict, train_config_from_dict
from medtokenbudget.data import Manifest
from medtokenbudget.data.manifest import listed
from medtokenbudget.errors import RequestError
from medtokenbudget.escaping import csv_frame, from_csv_cell
from medtokenbudget.measures import NOT_MEASURED, Cell
from medtokenbudget.model.model import MedTokenBudget, load
from medtokenbudget.runtime import say
from medtokenbudget.training.trainer import log_hash

FILE = "run.json"
FORMAT_VERSION = 3
FILES = ("results.csv", "predictions.parquet", "routing.safetensors", "metrics.jsonl", "attributes.parquet")
"""What a report reads; `run.json` has the hashes."""
RESULTS, PREDICTIONS, ROUTING, METRICS, ATTRIBUTES = FILES
PACKAGES = ("medtokenbudget", "torch", "timm", "numpy", "pandas", "pyarrow", "scipy", "safetensors", "pillow")
_AGAIN = "Delete it and run the command that made the run again; finished trainings are kept."
_FACTS: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("dataset", "source", "manifest", "store"), (str,)),
    **dict.fromkeys(("classes", "studies", "units", "seeds"), (list,)),
    **dict.fromkeys(("config", "methods", "versions", "hashes", "backbone", "counts", "files"), (dict,)),
    **dict.fromkeys(("main", "command"), (str, NoneType)),
    "evaluation": (dict, NoneType),
}
"""What `run.json` holds, and of which JSON type it is."""
_OF_A_METHOD = {"selector", "head", "variant", "learned", "config"}


class Run:
    """What `mtb.train`, `mtb.sweep`, `mtb.reproduce` and `mtb.evaluate` leave behind.

    Attributes:
        dataset: Name of the data set, as the user calls it.
        source: Kind of source that the manifest came from (isic, kvasir, folder, csv, synthetic).
        classes: Class names in the order of the logits.
        settings: Common training settings; `config` has them as a `TrainConfig`.
        methods: Each method by its text: selector, head, variant, whether it learned, and its own settings.
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

    Example:
        >>> run = mtb.Run("runs/first")
        >>> run.main
        'lats:lesion-first'
        >>> sorted(set(run.results["method"]))
        ['border-contrast', 'center', 'darkness', 'lats:lesion-first', 'random']
        >>> run.model.main
        'lats:lesion-first'
    """

    path: Path
    manifest_path: Path
    store_path: Path
    in_memory: bool = False
    dataset: str
    source: str
    classes: tuple[str, ...]
    settings: dict[str, Any]
    methods: dict[str, dict[str, Any]]
    main: str | None
    studies: list[dict[str, Any]]
    units: list[str]
    seeds: list[int]
    versions: dict[str, str]
    hashes: dict[str, str]
    backbone: dict[str, Any]
    counts: dict[str, Any]
    files: dict[str, str]
    command: str | None
    evaluation: dict[str, Any] | None

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        facts = _read_facts(self.path)
        self.manifest_path, self.store_path = ((self.path / facts.pop(name)).resolve() for name in ("manifest", "store"))
        self._take(facts)

    @classmethod
    def begin(cls, path: Path | str, manifest: Manifest | Path | str, store: FeatureStore | Path | str, config: TrainConfig) -> Run:
        """Open what a run is made from; nothing is written. A manifest in memory belongs into the run directory."""
        opened = manifest if isinstance(manifest, Manifest) else Manifest.read(manifest)
        tokens = store.annotated(opened) if isinstance(store, FeatureStore) else FeatureStore.open(Path(store).resolve(), opened)
        run = cls.__new__(cls)
        run.path, run.manifest, run.store, run.config = Path(path).resolve(), opened, tokens, config
        at = run.path / "manifest.parquet" if isinstance(manifest, Manifest) else Path(manifest)
        run.manifest_path, run.store_path, run.in_memory = at.resolve(), tokens.path.resolve(), isinstance(manifest, Manifest)
        return run

    def __reduce__(self) -> tuple[Any, ...]:
        """Send a run to a worker process as its paths."""
        content = self.manifest.hash, self.store.identity
        return _begin_once, (self.path, self.manifest_path, self.store_path, self.config, *content)

    def __repr__(self) -> str:
        seeds = ", ".join(map(str, self.seeds))
        return f"Run({str(self.path)!r}: {', '.join(self.methods)} on {self.dataset}, seeds {seeds})"

    def __str__(self) -> str:
        return f"{self!r}\n{headline(self.results)}"

    def _repr_html_(self) -> str:
        columns = ["method", "view", "budget", "accuracy", "macro_f1", "retention", "retention_of_ceiling", "n", "n_masked"]
        html: str = self.results[columns].to_html(index=False, float_format=lambda value: f"{value:.3f}", na_rep="")
        return html

    @cached_property
    def manifest(self) -> Manifest:
        """The manifest of its images."""
        return Manifest.read(self.manifest_path)

    @cached_property
    def store(self) -> FeatureStore:
        """The tokens of its images."""
        return FeatureStore.open(self.store_path, self.manifest)

    @cached_property
    def config(self) -> TrainConfig:
        """The common training settings."""
        return train_config_from_dict(self.settings)

    @cached_property
    def results(self) -> pd.DataFrame:
        """`results.csv`: one row per study, view, method, seed and budget."""
        path = self.path / RESULTS
        if not path.is_file() or content_hash(path) != self.files.get(RESULTS):
            table = summarize(self.predictions, self.classes)
            say(f"{path} is missing or damaged. It is made again from {PREDICTIONS}.")
            write_results(path, table)
        return read_results(path)

    @cached_property
    def predictions(self) -> pd.DataFrame:
        """`predictions.parquet`: one row per image in each of these cells."""
        return read_predictions(self.file(PREDICTIONS))[0]

    @cached_property
    def model(self) -> MedTokenBudget:
        """The model of the main method, with the classifiers of the other methods."""
        return load(self.path)

    def report(self, out: Path | str | None = None, pictures: bool = True) -> Path:
        """Write the tables, the figures and `report.html`; see `mtb.report`."""
        from medtokenbudget.reporting.page import build

        return build([self.path], out, pictures).page

    def file(self, name: str) -> Path:
        """Return the path of one of `FILES`."""
        path = self.path / name
        if not path.is_file() or content_hash(path) != self.files.get(name):
            what = "is damaged: its content does not match its hash in run.json" if path.is_file() else "does not exist"
            made = f"`{self.command}`" if self.command else "the command that made the run"
            raise RequestError(f"{path} {what}. Run {made} again; finished trainings are kept.")
        return path

    def finish(self, **facts: Any) -> None:
        """Write `run.json` of a run whose tables are written: what follows from images and tokens, and the other `facts`."""
        facts |= {
            "dataset": self.manifest.name,
            "source": self.manifest.source.split()[0],
            "classes": self.manifest.classes,
            "config": to_dict(self.config),
            "backbone": self.store.config["backbone"],
            "versions": versions(),
            "counts": counts(self.manifest, self.store),
            "files": hashes(self.path),
        }
        # Through JSON, so that a run in memory is the same as one that was read.
        self._take(json.loads(json.dumps(facts, sort_keys=True, default=str)))
        for name in ("results", "predictions", "model"):  # read before the files were written again
            vars(self).pop(name, None)
        self._write()

    def _take(self, facts: Mapping[str, Any]) -> None:
        vars(self).update({"command": None, "evaluation": None} | {name: facts[name] for name in _FACTS if name in facts})
        self.settings, self.classes = vars(self).pop("config"), tuple(self.classes)

    def record_command(self, name: str, arguments: Sequence[str]) -> None:
        """Record in `run.json` the command line that made the run, of paths elsewhere only the last name: runs are shared."""
        self.command = shlex.join(["mtb", name, *map(_short, arguments)])
        self._write()

    def _write(self) -> None:
        here = self.path.resolve()
        facts = {name: vars(self)[name] for name in _FACTS if name not in ("config", "manifest", "store")}
        facts |= {"config": self.settings, "format_version": FORMAT_VERSION}
        facts |= {"manifest": os.path.relpath(self.manifest_path, here), "store": os.path.relpath(self.store_path, here)}
        files.write_sealed(self.path / FILE, facts)


@lru_cache(maxsize=1)
def _begin_once(path: Path, manifest: Path, store: Path, config: TrainConfig, *content: str) -> Run:
    """Open a run in a worker process once. The content is part of the key: a worker may outlive a sweep."""
    return Run.begin(path, manifest, store, config)


def _read_facts(path: Path) -> dict[str, Any]:
    """Read and check `run.json`; what a later version added is left out."""
    if not (path / FILE).is_file():
        if (path / files.LOCK).exists():  # a sweep writes run.json with its first finished unit
            with files.exclusive(path):
                pass
        what = "does not exist" if not path.exists() else f"is not a run directory: it has no {FILE}"
        raise RequestError(f"{path} {what}. Make a run with `mtb train`, `mtb sweep` or `mtb reproduce`.")
    values = files.read_json(path / FILE)
    if not isinstance(values, dict):
        raise RequestError(f"{path / FILE} is damaged: expected a JSON object. {_AGAIN}")
    written_by = values.get("format_version", 1)
    if written_by != FORMAT_VERSION:
        made = f"`{values['command']}`" if isinstance(values.get("command"), str) else "the command that made it"
        advice = f"Run {made} again with a new `out`."
        raise RequestError(f"{path} has run format version {written_by}; this version reads {FORMAT_VERSION}. {advice}")
    values = files.unsealed(path / FILE, values, _AGAIN)
    facts = {name: values.get(name) for name in _FACTS}
    wrong = [name for name, allowed in _FACTS.items() if not isinstance(facts[name], allowed)]
    entries = facts["methods"].values() if isinstance(facts["methods"], dict) else ()
    if not all(isinstance(entry, dict) and entry.keys() >= _OF_A_METHOD for entry in entries):
        wrong.append("methods")
    if wrong:
        raise RequestError(f"{path / FILE} is damaged: check {', '.join(wrong)}. {_AGAIN}")
    return facts


def content_hash(path: Path) -> str:
    """Hash a file of a run or of a unit; that of a log leaves out the clock, so that equal runs have equal hashes."""
    return log_hash(files.read_lines(path)) if path.suffix == ".jsonl" else files.sha256_file(path)


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
    """Count images, masks and classes of each part, the lesion sizes of the validation masks (the supplement's two tables), and the
    validation images that show a lesion that is trained on too."""
    crossing = manifest.crossing
    leaks = {"images": int(crossing.sum()), "groups": int(manifest.rows["group"][crossing].nunique())}
    parts: dict[str, Any] = {"crossing": leaks}
    for part in ("train", "select", "val"):
        of_part = manifest.part(part)
        rows = store.rows(of_part.ids, strict=False)
        if not len(rows):  # a scout is trained on images, without their tokens
            counted = {"images": len(of_part), "masks": int(of_part.rows["mask"].notna().sum())}
            parts[part] = {**counted, "classes": {}, "masked_classes": {}, "lesion_patches": None}
            continue
        label, masked = store.label.numpy()[rows], store.has_mask.numpy()[rows]
        parts[part] = {
            "images": len(rows),
            "masks": int(masked.sum()),
            "classes": {name: int((label == index).sum()) for index, name in enumerate(manifest.classes)},
            "masked_classes": {name: int((label[masked] == index).sum()) for index, name in enumerate(manifest.classes)},
            "lesion_patches": store.lesion.numpy()[rows[masked]].sum(1).astype(int).tolist() if part == "val" else None,
        }
    return parts


def _short(argument: str) -> str:
    option, equals, value = argument.partition("=") if argument.startswith("--") else ("", "", argument)
    path = Path(value)
    return f"{option}{equals}{path.name}" if path.is_absolute() or ".." in path.parts else argument


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
    known = dict(enumerate(classes))
    frame = frame.assign(**{name: frame[index].astype(int).map(known.get) for name, index in _NAMES.items()})
    table = pa.Table.from_pandas(frame, SCHEMA, preserve_index=False)
    # Instead of what pandas would note: its version, which is not a fact of the table.
    table = table.replace_schema_metadata({"classes": json.dumps(list(classes), ensure_ascii=False)})
    with files.atomic_write(path) as temporary:
        pq.write_table(table, temporary, compression="zstd", row_group_size=1 << 16)


def read_predictions(path: Path | str) -> tuple[pd.DataFrame, tuple[str, ...]]:
    """Read the predictions and the class names; counts that may be missing come as nullable integers.

    A column that the version which wrote the file did not have is empty; one that this version does not know is kept.
    """
    try:
        table = pq.read_table(path)
    except FileNotFoundError:
        raise RequestError(f"{path} does not exist. Run `mtb sweep` or `mtb reproduce` first.") from None
    except (pa.ArrowInvalid, OSError) as error:
        raise RequestError(f"{path} is not a readable Parquet file ({error}). Run `mtb sweep` again.") from None
    metadata = table.schema.metadata or {}
    if b"classes" not in metadata:
        raise RequestError(f"{path} has no class names in its metadata, so it is not a table of predictions. Repeat the run.")
    for entry in SCHEMA:
        if entry.name not in table.column_names:
            table = table.append_column(entry, pa.nulls(len(table), entry.type))
    table = table.select(list(dict.fromkeys((*PREDICTION_COLUMNS, *table.column_names))))
    frame = table.to_pandas()
    for name in _NULLABLE:
        frame[name] = table.column(name).to_pandas(types_mapper={pa.int32(): pd.Int32Dtype()}.get)
    return frame, tuple(json.loads(metadata[b"classes"]))


def summarize(predictions: pd.DataFrame, classes: Sequence[str]) -> pd.DataFrame:
    """Summarize each cell in one row, in order of first appearance, with every column of `results.csv`.

    `n` counts the labeled images, `n_masked` the images with at least one lesion patch: those retention is measured on.
    """
    rows = []
    for key, of_cell in predictions.groupby(list(CELL), sort=False, dropna=False):
        if of_cell["k"].nunique() > 1:
            kept = listed(sorted(of_cell["k"].unique().tolist()))
            raise RequestError(
                f"Images of one method and budget keep different numbers of patches ({kept}), so "
                "they cannot be in one row of results. Put images with another token grid into a data set of their own."
            )
        cell = Cell(of_cell, len(classes))
        counts = {"k": int(of_cell["k"].iloc[0]), "n": len(cell.label), "n_masked": cell.retention.n}
        measured = {name: metric.formula(cell) for name, metric in measures.METRICS.items()}
        rows.append(dict(zip(CELL, key)) | counts | measured)
    return pd.DataFrame(rows, columns=list(RESULT_COLUMNS))


def write_results(path: Path | str, frame: pd.DataFrame) -> None:
    """Write the tidy table; what was not measured is an empty field."""
    with files.atomic_write(path) as temporary:
        csv_frame(frame).to_csv(temporary, index=False, float_format="%.10g", lineterminator="\n")


def read_results(path: Path | str) -> pd.DataFrame:
    """Read the tidy table, empty fields and columns of later versions as NaN; unknown columns are kept."""
    try:
        # A method or a data set may be called "NA" or "nan": only an empty field is missing.
        frame = pd.read_csv(path, dtype=dict.fromkeys(_TEXTS, str), keep_default_na=False, na_values=[""])
    except FileNotFoundError:
        raise RequestError(f"{path} does not exist. Run `mtb sweep` or `mtb reproduce` first.") from None
    except (pd.errors.ParserError, pd.errors.EmptyDataError, UnicodeDecodeError) as error:
        raise RequestError(f"{path} is not a readable CSV file ({error}).") from None
    if missing := [name for name in CELL if name not in frame.columns]:
        raise RequestError(f"{path} has no {', '.join(missing)}, so it is not a table of results. Repeat the run.")
    frame = frame.reindex(columns=list(dict.fromkeys((*RESULT_COLUMNS, *frame.columns))))
    try:
        texts = {name: frame[name].map(from_csv_cell) for name in _TEXTS}
        return frame.assign(**texts).astype(dict.fromkeys(measures.METRICS, float))
    except ValueError as error:
        raise RequestError(f"{path} has a cell that is not a number ({error}). Repeat the run.") from None


_HEADLINE = {"accuracy": "accuracy", "macro_f1": "macro F1", "retention": "retention", "retention_of_ceiling": "of ceiling"}


def headline(results: pd.DataFrame, budget: float = HEADLINE_BUDGET) -> str:
    """Write every method on the original images at the measured budget nearest to `budget` as plain text, mean over seeds."""
    rows = results[results["view"] == AS_IS]
    if rows.empty:
        return "No results."
    # Of two budgets that are equally near, the smaller one.
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
    masks = f"{int(rows['n_masked'].max()):,}"
    # Without a head or labels nothing is classified, but the masked images are measured.
    n = f"{int(counts.max()):,} images, {masks} with a lesion mask{fewer}" if counts.max() else f"{masks} images with a lesion mask"
    lines.append(f"n = {n}")
    return "\n".join(lines)


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
) -> None:
    """Write the two tables and `routing.safetensors`: patch orders and scores by `routing_name`, with the images of their rows."""
    write_predictions(out / PREDICTIONS, predictions, classes)
    write_results(out / RESULTS, summarize(predictions, classes))
    # One key: safetensors does not keep the order of several.
    about = {"routing": json.dumps({"image_ids": image_ids, "grid": list(grid)})}
    files.write_bytes(out / ROUTING, save(routing, about))
