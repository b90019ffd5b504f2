"""`Manifest`: a table with one row per image, the same for every source, and its Parquet file.

The file also stores the class names, the source and hashes of the content, so that damage and edits are noticed.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
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
SPLITS = ("train", "select", "val")
SOURCES = ("isic", "kvasir", "folder", "csv", "synthetic")
Split = Literal["train", "select", "val"]
METADATA_KEY = b"medtokenbudget"
"""Where the Parquet file stores what is not a column."""
_VERSION = 2


class ManifestError(RequestError):
    """The rows or the file are not a valid manifest."""


@dataclass(frozen=True)
class Manifest:
    """A data set: one row per image, and what is known about all of them.

    Attributes:
        rows: Table with the columns `image_id, image, label, mask, group, split`. A label is a class name. Label, mask and group
            are None if unknown. Images of one group (a lesion, a patient) belong in the same part of a split.
        classes: Class names, in the order of the class indices.
        root: Folder that relative paths start from; None for the working directory.
        source: Where the rows come from, such as 'isic 2019, masks by-id from isic2018'.
        split_rule: How the rows were split, such as 'grouped'.
        name: The user's own name of the data set, shown in results and reports.

    Example:
        >>> manifest = Manifest.from_records([{"image_id": "a", "image": "a.jpg", "label": "MEL"}], ["MEL", "NV"])
        >>> len(manifest), manifest.label_index.tolist()
        (1, [0])
    """

    rows: pd.DataFrame
    classes: tuple[str, ...]
    root: Path | None = None
    source: str = "unknown"
    split_rule: str = "given"
    name: str = "unnamed"

    def __post_init__(self) -> None:
        missing = [name for name in COLUMNS if name not in self.rows.columns]
        if missing:
            raise ManifestError(f"A manifest needs the columns {', '.join(COLUMNS)}. Missing: {', '.join(missing)}.")
        rows = self.rows.loc[:, list(COLUMNS)].reset_index(drop=True).astype(object)
        rows = rows.where(rows.notna(), None)
        for name in COLUMNS:
            rows[name] = pd.Series([None if value is None else str(value) for value in rows[name]], dtype=object)
        object.__setattr__(self, "rows", rows)
        object.__setattr__(self, "classes", tuple(str(name) for name in self.classes))
        object.__setattr__(self, "name", " ".join(self.name.split()))
        check_name(self.name)
        faults = _faults(rows, self.classes)
        if faults:
            raise ManifestError("These rows are not a valid manifest:\n" + "\n".join(f"  {fault}" for fault in faults))

    @classmethod
    def from_records(cls, records: Iterable[dict[str, Any]], classes: Sequence[str], **fields: Any) -> Manifest:
        """Make a manifest from one dictionary per image.

        Args:
            records: Dictionaries with `image_id` and `image`, and optionally `label`, `mask`, `group` and `split` ('train' by
                default).
            classes: Class names, in the order of the class indices.
            **fields: Other fields of the manifest, such as `name` and `root`.
        """
        blank = {"label": None, "mask": None, "group": None, "split": "train"}
        rows = [{**blank, **record} for record in records]
        return cls(pd.DataFrame(rows, columns=list(COLUMNS), dtype=object), tuple(classes), **fields)

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def ids(self) -> list[str]:
        """The `image_id` of every row."""
        return self.rows["image_id"].tolist()

    @property
    def groups(self) -> list[str]:
        """The group of each image; an image without one is a group of its own."""
        return [image_id if group is None else group for image_id, group in zip(self.ids, self.rows["group"])]

    @cached_property
    def label_index(self) -> np.ndarray:
        """The class index of every row, `[n]` int64, -1 for an image without a label."""
        place = {name: index for index, name in enumerate(self.classes)}
        return np.array([-1 if label is None else place[label] for label in self.rows["label"]], dtype=np.int64)

    def image_path(self, index: int) -> Path:
        """Return the path of the image in a row."""
        return self._path(str(self.rows["image"].iat[index]))

    def mask_path(self, index: int) -> Path | None:
        """Return the path of the mask in a row, or None if the image has no mask."""
        mask = self.rows["mask"].iat[index]
        return None if mask is None else self._path(str(mask))

    def _path(self, stored: str) -> Path:
        return Path(stored) if self.root is None else self.root / stored

    def part(self, name: str) -> Manifest:
        """Take the rows of one part of the split: 'train', 'select' or 'val'."""
        if name not in SPLITS:
            raise ManifestError(f"Unknown part '{name}'. The parts of a manifest are {', '.join(SPLITS)}.")
        return self.take(np.flatnonzero((self.rows["split"] == name).to_numpy(dtype=bool)))

    def without_labels(self) -> Manifest:
        """Copy the manifest without class labels, for a router that learns from masks alone."""
        return replace(self, rows=self.rows.assign(label=None), classes=())

    def take(self, rows: Sequence[int] | np.ndarray) -> Manifest:
        """Take the rows with these numbers, in this order."""
        return replace(self, rows=self.rows.iloc[np.asarray(rows, dtype=np.int64)])

    def with_columns(self, split_rule: str | None = None, **columns: Sequence[str | None]) -> Manifest:
        """Copy the manifest with other values in the given columns."""
        changed = self.rows.assign(**{name: pd.Series(list(values), dtype=object) for name, values in columns.items()})
        return replace(self, rows=changed, split_rule=split_rule or self.split_rule)

    @property
    def hash(self) -> str:
        """Hash of classes and rows; it does not change if all files move together to another folder."""
        return sha256_json([list(self.classes), self._content(COLUMNS)])

    @property
    def data_hash(self) -> str:
        """Hash of images, labels and masks; it does not depend on groups and split."""
        return sha256_json([list(self.classes), self._content(("image_id", "image", "label", "mask"))])

    @property
    def split_hash(self) -> str:
        """Hash of the part of every image."""
        return sha256_json(self._content(("image_id", "split")))

    def _content(self, names: Sequence[str]) -> list[list[str | None]]:
        columns = [self._below_root(name) if name in ("image", "mask") else list(self.rows[name]) for name in names]
        return [list(row) for row in zip(*columns)]

    def _below_root(self, name: str) -> list[str | None]:
        """Make the paths of a column relative to their deepest common folder."""
        paths = [None if value is None else os.path.abspath(self._path(value)) for value in self.rows[name]]
        folders = {os.path.dirname(path) for path in paths if path is not None}
        common = os.path.commonpath(folders) if folders else ""
        return [None if path is None else Path(path).relative_to(common).as_posix() for path in paths]

    def write(self, path: Path | str, overwrite: bool = True) -> Path:
        """Write the manifest to a Parquet file.

        Paths inside the folder of the file are stored relative to it, all others as absolute paths.

        Args:
            path: The file to write.
            overwrite: Whether a different manifest at `path` may be replaced.

        Returns:
            The path.

        Raises:
            ManifestError: The file exists with another content and `overwrite` is False.
        """
        target = Path(path)
        folder = Path(os.path.abspath(target.parent))
        columns = {name: self.rows[name].tolist() for name in COLUMNS}
        for name in ("image", "mask"):
            columns[name] = [None if value is None else _relative(self._path(value), folder) for value in columns[name]]
        metadata = {
            "version": _VERSION,
            "classes": list(self.classes),
            "name": self.name,
            "source": self.source,
            "split_rule": self.split_rule,
            "hash": self.hash,
        }
        metadata["file_hash"] = _file_hash(columns, metadata)
        if not overwrite and target.exists() and _stored_hash(target) != metadata["file_hash"]:
            raise ManifestError(
                f"{target} already exists and is different. Pass --overwrite to replace it (with --keep-split {target} its images "
                "keep their part), or choose another --out."
            )
        schema = pa.schema(
            [pa.field(name, pa.string()) for name in COLUMNS], metadata={METADATA_KEY: json.dumps(metadata).encode()}
        )
        table = pa.table([pa.array(columns[name], pa.string()) for name in COLUMNS], schema=schema)
        with atomic_write(target) as temporary:
            pq.write_table(table, temporary)
        return target

    @classmethod
    def read(cls, path: Path | str) -> Manifest:
        """Read a manifest from a Parquet file and check its hash.

        Raises:
            ManifestError: The file does not exist, is not a manifest, has another format version, or was damaged or edited.
        """
        source = Path(path)
        columns, metadata = _read_table(source)
        if _file_hash(columns, metadata) != metadata.get("file_hash"):
            raise ManifestError(f"{source} was edited or damaged after `mtb data` wrote it. {_valid_again(source)}")
        rows = pd.DataFrame({name: pd.Series(values, dtype=object) for name, values in columns.items()})
        root = Path(os.path.abspath(source.parent))
        return cls(rows, tuple(metadata["classes"]), root, metadata["source"], metadata["split_rule"], metadata["name"])


def _read_table(source: Path) -> tuple[dict[str, list[str | None]], dict[str, Any]]:
    if not source.exists():
        raise ManifestError(f"{source} does not exist. Create a manifest with `mtb data {'|'.join(SOURCES)} ... --out {source}`.")
    if source.is_dir():
        raise ManifestError(
            f"{source} is a folder, but a manifest is a file. Create one with `mtb data folder {source} --out M.parquet`."
        )
    try:
        table = pq.read_table(source)
        metadata = json.loads((table.schema.metadata or {})[METADATA_KEY])
        # Here, because text that is not UTF-8 is noticed only now.
        columns = {name: table.column(name).to_pylist() for name in table.column_names if name in COLUMNS}
    except KeyError:
        if "image" in table.column_names:
            raise ManifestError(
                f"{source} was written by another program and is not a manifest yet. {_valid_again(source)}"
            ) from None
        raise ManifestError(
            f"{source} is a Parquet file, but not a manifest. Create one with `mtb data ... --out M.parquet`."
        ) from None
    except (pa.ArrowException, OSError, ValueError) as error:
        reason = first_line(error).rstrip(".")
        raise ManifestError(f"{source} is not a manifest or is damaged ({reason}). Create it again with `mtb data`.") from None
    if not isinstance(metadata, dict):
        raise ManifestError(f"{source} is damaged. Create it again with `mtb data`.")
    if (version := metadata.get("version")) != _VERSION:
        kind = str(metadata.get("source", "")).split(" ")[0]
        command = f"mtb data {kind if kind in SOURCES else '|'.join(SOURCES)} ... --out {source}"
        raise ManifestError(
            f"{source} has manifest format {version}, but this version reads format {_VERSION}. Run `{command}` again."
        )
    if missing := [name for name in COLUMNS if name not in columns]:
        raise ManifestError(f"{source} lacks the columns {', '.join(missing)}. {_valid_again(source)}")
    return columns, metadata


def _file_hash(columns: dict[str, list[Any]], metadata: dict[str, Any]) -> str:
    return sha256_json([*(metadata.get(name) for name in ("classes", "name", "source", "split_rule")), columns])


def _stored_hash(path: Path) -> str | None:
    """Hash what a manifest's file holds now, which its metadata need not tell after an edit; None if it is not a manifest."""
    try:
        return _file_hash(*_read_table(path))
    except ManifestError:
        return None


def _valid_again(path: Path) -> str:
    return f"If you edited it on purpose, run `mtb data csv {path} --out {path} --overwrite` to check it and make it valid again."


def check_name(name: str) -> None:
    """Reject a name that a table or a file cannot show; sources that take long call this first."""
    if not name or not name.isprintable() or "|" in name:
        raise ManifestError(f"{name!r} cannot be the name of a data set. Pass a --name that is not empty and has no '|'.")


def _faults(rows: pd.DataFrame, classes: tuple[str, ...]) -> list[str]:
    ids = rows["image_id"]
    known = set(classes)
    wrong: list[tuple[str, list[Any]]] = [
        ("image_id is empty in the rows", [i for i, value in enumerate(ids) if not value]),
        ("image is empty in the rows", [i for i, value in enumerate(rows["image"]) if not value]),
        ("image_id used more than once", sorted({str(value) for value in ids[ids.duplicated()] if value})),
        (f"labels other than {', '.join(classes)}", sorted({v for v in rows["label"] if v is not None and v not in known})),
        (f"values of split other than {', '.join(SPLITS)}", sorted({str(v) for v in rows["split"] if v not in SPLITS})),
    ]
    unwritable = [repr(v) for name in COLUMNS for v in rows[name] if v is not None and not _is_utf8(v)]
    wrong.append(("file names that are not valid UTF-8 (rename these files)", unwritable))
    faults = [f"{what}: {listed(values)}" for what, values in wrong if values]
    if len(known) != len(classes):
        faults.append(f"class names used more than once: {listed(sorted({name for name in classes if classes.count(name) > 1}))}")
    return faults


def listed(values: Sequence[Any], limit: int = 5) -> str:
    """List the first few values as text, and the number of the others: 'a, b and 3 more'."""
    text = ", ".join(str(value) for value in values[:limit])
    return text if len(values) <= limit else f"{text} and {len(values) - limit:,} more"


def _is_utf8(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _relative(path: Path, folder: Path) -> str:
    absolute = Path(os.path.abspath(path))
    return absolute.relative_to(folder).as_posix() if absolute.is_relative_to(folder) else str(absolute)
