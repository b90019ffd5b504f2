"""`Manifest`: one row an image, whatever the source, and its Parquet file.

The file carries the class names, where the rows come from and hashes of the content, so that a damaged or edited one is noticed.
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
_KEY = b"medtokenbudget"
_VERSION = 2
_SHOWN = 5


class ManifestError(RequestError):
    """Rows that do not make a manifest, or a file that is not one."""


@dataclass(frozen=True)
class Manifest:
    """Who, where, label, mask, group, split.

    `rows` has the columns `image_id, image, label, mask, group, split`; label (a class name), mask and group are None where there
    is none. Relative paths are relative to `root`. `source` says where the rows come from, `split_rule` how they were split,
    and `name` is what the user calls the data set: results and reports show it.
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
            raise ManifestError(f"a manifest has the columns {', '.join(COLUMNS)}; missing here: {', '.join(missing)}.")
        rows = self.rows.loc[:, list(COLUMNS)].reset_index(drop=True).astype(object)
        rows = rows.where(rows.notna(), None)
        for name in COLUMNS:
            rows[name] = pd.Series([_text(value) for value in rows[name]], dtype=object)
        object.__setattr__(self, "rows", rows)
        object.__setattr__(self, "classes", tuple(str(name) for name in self.classes))
        object.__setattr__(self, "name", " ".join(self.name.split()))
        check_name(self.name)
        faults = _faults(rows, self.classes)
        if faults:
            raise ManifestError("these rows do not make a manifest:\n" + "\n".join(f"  {fault}" for fault in faults))

    @classmethod
    def from_records(cls, records: Iterable[dict[str, Any]], classes: Sequence[str], **fields: Any) -> Manifest:
        """A manifest from one dictionary an image; mask, group and label may be left out, split is 'train' when it is."""
        blank = {"label": None, "mask": None, "group": None, "split": "train"}
        rows = [{**blank, **record} for record in records]
        return cls(pd.DataFrame(rows, columns=list(COLUMNS), dtype=object), tuple(classes), **fields)

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def ids(self) -> list[str]:
        return self._column("image_id")

    @property
    def groups(self) -> list[str]:
        """The group of each image; an image without one is a group of its own."""
        return [image_id if group is None else group for image_id, group in zip(self.ids, self._column("group"))]

    @cached_property
    def label_index(self) -> np.ndarray:
        """Index into `classes`, `[n]` int64, -1 for an image without a label."""
        place = {name: index for index, name in enumerate(self.classes)}
        return np.array([-1 if label is None else place[label] for label in self.rows["label"]], dtype=np.int64)

    def image_path(self, index: int) -> Path:
        return self._path(str(self.rows["image"].iat[index]))

    def mask_path(self, index: int) -> Path | None:
        mask = self.rows["mask"].iat[index]
        return None if mask is None else self._path(str(mask))

    def _column(self, name: str) -> list[Any]:
        return self.rows[name].tolist()

    def _path(self, stored: str) -> Path:
        return Path(stored) if self.root is None else self.root / stored

    def part(self, name: str) -> Manifest:
        """The rows of one part: 'train', 'select' or 'val'."""
        if name not in SPLITS:
            raise ManifestError(f"there is no part '{name}': a manifest has {', '.join(SPLITS)}.")
        return self.take(np.flatnonzero((self.rows["split"] == name).to_numpy(dtype=bool)))

    def take(self, rows: Sequence[int] | np.ndarray) -> Manifest:
        """The rows at these positions, in this order."""
        return replace(self, rows=self.rows.iloc[np.asarray(rows, dtype=np.int64)])

    def with_columns(self, split_rule: str | None = None, **columns: Sequence[str | None]) -> Manifest:
        """The same images with other values in some columns."""
        changed = self.rows.assign(**{name: pd.Series(list(values), dtype=object) for name, values in columns.items()})
        return replace(self, rows=changed, split_rule=split_rule or self.split_rule)

    @property
    def hash(self) -> str:
        """Of everything but where the folder that all files have in common lies."""
        return sha256_json([list(self.classes), self._content(COLUMNS)])

    @property
    def data_hash(self) -> str:
        """Of images, labels and masks: the same whatever the split."""
        return sha256_json([list(self.classes), self._content(("image_id", "image", "label", "mask"))])

    @property
    def split_hash(self) -> str:
        """Of who is in which part."""
        return sha256_json(self._content(("image_id", "split")))

    def _content(self, names: Sequence[str]) -> list[list[str | None]]:
        columns = [self._below_root(name) if name in ("image", "mask") else list(self.rows[name]) for name in names]
        return [list(row) for row in zip(*columns)]

    def _below_root(self, name: str) -> list[str | None]:
        """Paths of a column as seen from the folder that they have in common: the same wherever that folder lies."""
        paths = [None if value is None else os.path.abspath(self._path(value)) for value in self.rows[name]]
        folders = {os.path.dirname(path) for path in paths if path is not None}
        common = os.path.commonpath(folders) if folders else ""
        return [None if path is None else Path(path).relative_to(common).as_posix() for path in paths]

    def write(self, path: Path | str) -> Path:
        """Write the Parquet file; paths inside its folder are stored relative to it, the others absolute."""
        target = Path(path)
        folder = Path(os.path.abspath(target.parent))
        columns = {name: self._column(name) for name in COLUMNS}
        columns["image"] = [_relative(self.image_path(i), folder) for i in range(len(self))]
        columns["mask"] = [None if (mask := self.mask_path(i)) is None else _relative(mask, folder) for i in range(len(self))]
        metadata = {
            "version": _VERSION,
            "classes": list(self.classes),
            "name": self.name,
            "source": self.source,
            "split_rule": self.split_rule,
            "hash": self.hash,
            "file_hash": _file_hash(list(self.classes), self.name, self.source, self.split_rule, columns),
        }
        schema = pa.schema([pa.field(name, pa.string()) for name in COLUMNS], metadata={_KEY: json.dumps(metadata).encode()})
        table = pa.table([pa.array(columns[name], pa.string()) for name in COLUMNS], schema=schema)
        with atomic_write(target) as temporary:
            pq.write_table(table, temporary)
        return target

    @classmethod
    def read(cls, path: Path | str) -> Manifest:
        """Read a Parquet file and verify its hashes."""
        source = Path(path)
        table, metadata = _read_table(source)
        columns = {name: table.column(name).to_pylist() for name in COLUMNS}
        stored = [metadata.get(name) for name in ("classes", "name", "source", "split_rule")]
        if _file_hash(*stored, columns) != metadata.get("file_hash"):
            raise ManifestError(
                f"{source} is damaged or edited: its rows do not have the hash that was stored with them. Make it anew."
            )
        rows = pd.DataFrame({name: pd.Series(values, dtype=object) for name, values in columns.items()})
        root = Path(os.path.abspath(source.parent))
        return cls(rows, tuple(metadata["classes"]), root, metadata["source"], metadata["split_rule"], metadata["name"])


def _read_table(source: Path) -> tuple[pa.Table, dict[str, Any]]:
    if not source.exists():
        raise ManifestError(f"{source} does not exist. Make a manifest with `mtb data {'|'.join(SOURCES)} ... --out {source}`.")
    if source.is_dir():
        raise ManifestError(f"{source} is a folder; a manifest is a Parquet file. Make one with `mtb data ... --out M.parquet`.")
    try:
        table = pq.read_table(source)
        metadata = json.loads((table.schema.metadata or {})[_KEY])
    except KeyError:
        raise ManifestError(
            f"{source} is a Parquet file but not a manifest. Make one with `mtb data ... --out M.parquet`."
        ) from None
    except (pa.ArrowException, OSError, ValueError) as error:
        first = first_line(error)
        raise ManifestError(f"{source} is not a manifest or is damaged ({first}). Make it anew with `mtb data ...`.") from None
    _check_version(source, metadata)
    if missing := [name for name in COLUMNS if name not in table.column_names]:
        raise ManifestError(f"{source} is damaged: the columns {', '.join(missing)} are missing. Run `mtb data` again.")
    return table, metadata


def _check_version(path: Path, metadata: dict[str, Any]) -> None:
    found = metadata.get("version")
    if found == _VERSION:
        return
    kind = str(metadata.get("source", "")).split(" ")[0]
    command = f"mtb data {kind if kind in SOURCES else '|'.join(SOURCES)} ... --out {path}"
    raise ManifestError(f"{path} has manifest format {found}, but this version reads format {_VERSION}. Run `{command}` again.")


def check_name(name: str) -> None:
    """Reject a name that a table or a file cannot show; sources that take long call this first."""
    if not name or not name.isprintable() or "|" in name:
        raise ManifestError(f"{name!r} cannot be the name of a data set. Pass --name with at least one character and no '|'.")


def _file_hash(*parts: Any) -> str:
    return sha256_json(parts)


def _faults(rows: pd.DataFrame, classes: tuple[str, ...]) -> list[str]:
    ids = rows["image_id"]
    known = set(classes)
    found: list[tuple[str, list[Any]]] = [
        ("rows without an image_id: rows", [i for i, value in enumerate(ids) if not value]),
        ("rows without an image: rows", [i for i, value in enumerate(rows["image"]) if not value]),
        ("image_id given to more than one row", sorted({str(value) for value in ids[ids.duplicated()] if value})),
        (f"labels that are none of {', '.join(classes)}", sorted({v for v in rows["label"] if v is not None and v not in known})),
        (f"values of split that are none of {', '.join(SPLITS)}", sorted({str(v) for v in rows["split"] if v not in SPLITS})),
    ]
    unwritable = [repr(v) for name in COLUMNS for v in rows[name] if v is not None and not _is_text(v)]
    found.append(("names that are not text in UTF-8 (rename these files)", unwritable))
    faults = [f"{what}: {listed(values)}" for what, values in found if values]
    if len(known) != len(classes):
        faults.append(f"class names given twice: {listed(sorted({name for name in classes if classes.count(name) > 1}))}")
    return faults


def listed(values: Sequence[Any], shown: int = _SHOWN) -> str:
    """The first few values and how many more there are."""
    text = ", ".join(str(value) for value in values[:shown])
    return text if len(values) <= shown else f"{text} and {len(values) - shown:,} more"


def _is_text(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _text(value: Any) -> str | None:
    return None if value is None else str(value)


def _relative(path: Path, folder: Path) -> str:
    absolute = Path(os.path.abspath(path))
    return absolute.relative_to(folder).as_posix() if absolute.is_relative_to(folder) else str(absolute)
