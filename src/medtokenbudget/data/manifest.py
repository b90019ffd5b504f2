"""`Manifest`: a table with one row per image, the same for every source, and its Parquet file.

The file also stores the class names, the source and hashes of the content, so that damage and edits are noticed.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from medtokenbudget.errors import RequestError, first_line
from medtokenbudget.files import atomic_write, sha256_json

COLUMNS = ("image_id", "image", "label", "mask", "group", "split")
ANNOTATORS = "annotator_masks"
"""A further column with the masks that several annotators drew of one image; `mask` is then their majority."""
BETWEEN = "|"
"""Between the paths of `ANNOTATORS`."""
SPLITS = ("train", "select", "val")
SOURCES = ("isic", "kvasir", "folder", "csv", "synthetic")
METADATA_KEY = b"medtokenbudget"
"""Where the Parquet file stores what is not a column."""
_VERSION = 3


class ManifestError(RequestError):
    """The rows or the file are not a valid manifest."""


@dataclass(frozen=True)
class SplitRule:
    """How the rows of a manifest were split.

    'given' means that the data came with a split, 'none' that they have none. `fold`, counted from 0, and `folds` are those of
    'kfold' and of 'center', which leaves one center out. `select` is the share of the training part that was set aside for model
    selection, and `kept` says that images kept the part that they have in an older manifest.

    Example:
        >>> str(SplitRule("kfold", fold=2, folds=4, select=0.1))
        'kfold 2/4, select 0.1'
    """

    kind: Literal["paper", "grouped", "kfold", "center", "given", "none"]
    fold: int = 0
    folds: int = 0
    select: float = 0.0
    kept: bool = False

    def __str__(self) -> str:
        notes = [f"{self.kind} {self.fold}/{self.folds}" if self.folds else self.kind]
        notes += [f"select {self.select:g}"] if self.select else []
        notes += ["kept from an older manifest"] if self.kept else []
        return ", ".join(notes)


@dataclass(frozen=True)
class Manifest:
    """A data set: one row per image, and what is known about all of them.

    Attributes:
        rows: Table with the columns `image_id, image, label, mask, group, split`. A label is a class name. Label, mask and group
            are None if unknown. Images of one group (a lesion, a patient) belong in the same part of a split. Further columns,
            as text, describe the images; results can be shown by them.
        classes: Class names, in the order of the class indices.
        root: Folder that relative paths start from; None for the working directory.
        source: Where the rows come from, such as 'isic 2019, masks by-id from isic2018'.
        split_rule: How the rows were split.
        name: The user's name of the data set, shown in results and reports.

    Example:
        >>> manifest = Manifest.from_records([{"image_id": "a", "image": "a.jpg", "label": "MEL"}], ["MEL", "NV"])
        >>> len(manifest), manifest.label_index.tolist()
        (1, [0])
    """

    rows: pd.DataFrame
    classes: tuple[str, ...]
    root: Path | None = None
    source: str = "unknown"
    split_rule: SplitRule = SplitRule("given")
    name: str = "unnamed"

    def __post_init__(self) -> None:
        if missing := [name for name in COLUMNS if name not in self.rows.columns]:
            raise ManifestError(f"A manifest needs the columns {', '.join(COLUMNS)}. Missing: {', '.join(missing)}.")
        rows = self.rows.loc[:, [*COLUMNS, *self.further]].reset_index(drop=True).astype(object)
        # NaN of any kind becomes None, so that no code has to look for both.
        rows = rows.where(rows.notna(), None)
        for name in rows.columns:
            rows[name] = pd.Series([None if value is None else str(value) for value in rows[name]], dtype=object)
        object.__setattr__(self, "rows", rows)
        object.__setattr__(self, "classes", tuple(str(name) for name in self.classes))
        object.__setattr__(self, "name", " ".join(self.name.split()))
        check_name(self.name)
        if faults := _faults(rows, self.classes):
            raise ManifestError("These rows are not a valid manifest:\n" + "\n".join(f"  {fault}" for fault in faults))

    @classmethod
    def from_records(cls, records: Iterable[dict[str, Any]], classes: Sequence[str], **fields: Any) -> Manifest:
        """Make a manifest from one dictionary per image.

        Each has `image_id` and `image`, and optionally `label`, `mask`, `group`, `split` ('train' by default) and further columns.
        `fields` are further fields of the manifest, such as `name` and `root`.
        """
        rows = [{"split": "train", **record} for record in records]
        columns = list(dict.fromkeys([*COLUMNS, *(name for row in rows for name in row)]))
        return cls(pd.DataFrame(rows, columns=columns, dtype=object), tuple(classes), **fields)

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def ids(self) -> list[str]:
        return self.rows["image_id"].tolist()

    @property
    def further(self) -> list[str]:
        return [str(name) for name in self.rows.columns if name not in COLUMNS]

    @property
    def groups(self) -> list[str]:
        return [image_id if group is None else group for image_id, group in zip(self.ids, self.rows["group"])]

    @cached_property
    def label_index(self) -> np.ndarray:
        """The class index of every row, `[n]` int64, -1 for an image without a label."""
        place = {name: index for index, name in enumerate(self.classes)}
        return np.array([-1 if label is None else place[label] for label in self.rows["label"]], dtype=np.int64)

    @property
    def crossing(self) -> np.ndarray:
        """Which validation images show a group (a lesion, a patient) that other parts show too, `[n]` bool."""
        validation = (self.rows["split"] == "val").to_numpy(dtype=bool)
        groups = self.rows["group"]
        # Images without a group stand alone: two of them never share one.
        return np.asarray(validation & groups.notna() & groups.isin(set(groups[~validation].dropna())), dtype=bool)

    def image_path(self, index: int) -> Path:
        return self._path(str(self.rows["image"].iat[index]))

    def mask_path(self, index: int) -> Path | None:
        mask = self.rows["mask"].iat[index]
        return None if mask is None else self._path(str(mask))

    def annotator_paths(self, index: int) -> list[Path]:
        """Return the paths of the masks by several annotators in a row; empty where they are not known."""
        stored = self.rows[ANNOTATORS].iat[index] if ANNOTATORS in self.rows else None
        return [] if stored is None else [self._path(path) for path in str(stored).split(BETWEEN)]

    def _path(self, stored: str) -> Path:
        return Path(stored) if self.root is None else self.root / stored

    def part(self, name: str) -> Manifest:
        if name not in SPLITS:
            raise ManifestError(f"Unknown part '{name}'. The parts of a manifest are {', '.join(SPLITS)}.")
        return self.take(np.flatnonzero((self.rows["split"] == name).to_numpy(dtype=bool)))

    def without_labels(self) -> Manifest:
        """Copy the manifest without class labels, for a router that learns from masks alone."""
        return replace(self, rows=self.rows.assign(label=None), classes=())

    def take(self, rows: Sequence[int] | np.ndarray) -> Manifest:
        """Take the rows with these numbers, in this order."""
        return replace(self, rows=self.rows.iloc[np.asarray(rows, dtype=np.int64)])

    def with_columns(self, split_rule: SplitRule | None = None, **columns: Iterable[str | None]) -> Manifest:
        changed = self.rows.assign(**{name: pd.Series(list(values), dtype=object) for name, values in columns.items()})
        return replace(self, rows=changed, split_rule=split_rule or self.split_rule)

    @property
    def hash(self) -> str:
        return sha256_json([list(self.classes), self._content(COLUMNS)])

    @property
    def data_hash(self) -> str:
        return sha256_json([list(self.classes), self._content(("image_id", "image", "label", "mask"))])

    @property
    def split_hash(self) -> str:
        return sha256_json(self._content(("image_id", "split")))

    def _content(self, names: Sequence[str]) -> list[list[str | None]]:
        """Return the rows, with paths relative to the deepest common folder of their column."""
        columns = []
        for name in names:
            values: list[str | None] = self.rows[name].tolist()
            if name in ("image", "mask"):
                paths = [None if value is None else os.path.abspath(self._path(value)) for value in values]
                # So that the same data in another place has the same hash.
                folders = {os.path.dirname(path) for path in paths if path is not None}
                common = os.path.commonpath(folders) if folders else ""
                values = [None if path is None else Path(path).relative_to(common).as_posix() for path in paths]
            columns.append(values)
        return [list(row) for row in zip(*columns)]

    def write(self, path: Path | str, overwrite: bool = True) -> Path:
        """Write the manifest to a Parquet file and return its path.

        Paths inside the folder of the file are stored relative to it, all others as absolute paths. Without `overwrite`, a file of
        another content at `path` is a ManifestError.
        """
        target = Path(path)
        folder = Path(os.path.abspath(target.parent))

        def stored(value: str | None) -> str | None:
            if value is None:
                return None
            # Not `resolve`: links to data on another disk stay links.
            absolute = Path(os.path.abspath(self._path(value)))
            return absolute.relative_to(folder).as_posix() if absolute.is_relative_to(folder) else str(absolute)

        columns = {name: self.rows[name].tolist() for name in (*COLUMNS, *self.further)}
        columns |= {name: [stored(value) for value in columns[name]] for name in ("image", "mask")}
        if several := columns.get(ANNOTATORS):
            columns[ANNOTATORS] = [value and BETWEEN.join(map(str, map(stored, value.split(BETWEEN)))) for value in several]
        metadata: dict[str, Any] = {
            "version": _VERSION,
            "classes": list(self.classes),
            "name": self.name,
            "source": self.source,
            "split_rule": asdict(self.split_rule),
            "further": self.further,
            "hash": self.hash,
        }
        metadata["file_hash"] = _file_hash(columns, metadata)
        if not overwrite and target.exists() and not _holds(target, metadata["file_hash"]):
            advice = "Pass `overwrite` to replace it (with `keep_split` its images keep their part), or choose another `out`."
            raise ManifestError(f"{target} already exists and is different. {advice}")
        schema = pa.schema([(name, pa.string()) for name in columns], metadata={METADATA_KEY: json.dumps(metadata).encode()})
        with atomic_write(target) as temporary:
            pq.write_table(pa.table(columns, schema=schema), temporary)
        return target

    @classmethod
    def read(cls, path: Path | str) -> Manifest:
        """Read a manifest from a Parquet file; one that was damaged or edited is a ManifestError."""
        source = Path(path)
        columns, metadata = _read_table(source)
        if _file_hash(columns, metadata) != metadata.get("file_hash"):
            raise ManifestError(f"{source} was edited or damaged after `mtb data` wrote it. {_VALID_AGAIN}")
        rows = pd.DataFrame({name: pd.Series(values, dtype=object) for name, values in columns.items()})
        return cls(
            rows,
            tuple(metadata["classes"]),
            root=Path(os.path.abspath(source.parent)),
            source=metadata["source"],
            split_rule=SplitRule(**metadata["split_rule"]),
            name=metadata["name"],
        )


_VALID_AGAIN = (
    "If you edited it on purpose, read it with `mtb data csv`, which checks it and makes it valid again. "
    "Otherwise create it again with `mtb data`, or restore a copy."
)


def _read_table(source: Path) -> tuple[dict[str, list[str | None]], dict[str, Any]]:
    if not source.exists():
        raise ManifestError(f"{source} does not exist. Create a manifest with `mtb data {'|'.join(SOURCES)}`.")
    if source.is_dir():
        raise ManifestError(f"{source} is a folder, but a manifest is a file. Create one with `mtb data folder`.")
    try:
        table = pq.read_table(source)
        metadata = dict(json.loads((table.schema.metadata or {})[METADATA_KEY]))
        # Inside the `try`, because text that is not UTF-8 is noticed only when it becomes Python's.
        columns = {name: table.column(name).to_pylist() for name in table.column_names}
    except KeyError:
        if "image" in table.column_names:
            raise ManifestError(f"{source} was written by another program and is not a manifest yet. {_VALID_AGAIN}") from None
        raise ManifestError(f"{source} is a Parquet file, but not a manifest. Create one with `mtb data`.") from None
    except (pa.ArrowException, OSError, ValueError, TypeError) as error:
        reason = first_line(error).rstrip(".")
        raise ManifestError(f"{source} is not a manifest or is damaged ({reason}). Create it again with `mtb data`.") from None
    if (version := metadata.get("version")) != _VERSION:
        kind = str(metadata.get("source", "")).split(" ")[0]
        command = f"mtb data {kind if kind in SOURCES else '|'.join(SOURCES)}"
        advice = f"Run `{command}` again."
        raise ManifestError(f"{source} has manifest format {version}, but this version reads format {_VERSION}. {advice}")
    if missing := [name for name in COLUMNS if name not in columns]:
        raise ManifestError(f"{source} lacks the columns {', '.join(missing)}. {_VALID_AGAIN}")
    return columns, metadata


def _file_hash(columns: dict[str, list[Any]], metadata: dict[str, Any]) -> str:
    return sha256_json([*(metadata.get(name) for name in ("classes", "name", "source", "split_rule")), columns])


def _holds(path: Path, file_hash: str) -> bool:
    """Tell whether a file is a manifest with this content; the hash in its metadata would not tell after an edit."""
    try:
        return _file_hash(*_read_table(path)) == file_hash
    except ManifestError:
        return False


def check_name(name: str) -> None:
    """Reject a name that a table or a file cannot show; sources that take long call this first."""
    if not name or not name.isprintable() or "|" in name:
        raise ManifestError(f"{name!r} cannot be the name of a data set. Choose a `name` that is not empty and has no '|'.")


def require_two_groups(groups: Sequence[str]) -> None:
    """Reject a training part of which no selection part can be cut without splitting a group."""
    if len(set(groups)) < 2:
        advice = "Add images, or set nothing aside."
        raise RequestError(f"Cannot cut a selection part: the training part has fewer than two groups. {advice}")


def _faults(rows: pd.DataFrame, classes: tuple[str, ...]) -> list[str]:
    ids = rows["image_id"]
    wrong: list[tuple[str, list[Any]]] = [
        ("image_id is empty in the rows", [i for i, value in enumerate(ids) if not value]),
        ("image is empty in the rows", [i for i, value in enumerate(rows["image"]) if not value]),
        ("image_id used more than once", sorted({value for value in ids[ids.duplicated()] if value})),
        (f"labels other than {', '.join(classes)}", sorted(set(rows["label"].dropna()) - set(classes))),
        (f"values of split other than {', '.join(SPLITS)}", sorted(map(str, set(rows["split"]) - set(SPLITS)))),
        (
            "file names that are not valid UTF-8 (rename these files)",
            # Python holds bytes of a file name that are not text as lone surrogates, which no Parquet file can store.
            [repr(value) for name in rows for value in rows[name].dropna() if value != value.encode(errors="ignore").decode()],
        ),
        ("class names used more than once", sorted({name for name in classes if classes.count(name) > 1})),
    ]
    return [f"{what}: {listed(values)}" for what, values in wrong if values]


def listed(values: Sequence[Any], limit: int = 5) -> str:
    """List the first few values as text, and the number of the others: 'a, b and 3 more'."""
    text = ", ".join(str(value) for value in values[:limit])
    return text if len(values) <= limit else f"{text} and {len(values) - limit:,} more"
