"""Your own images, listed in a table: a column `image`, and any of `image_id, label, mask, group, split`.

The table is a CSV file or a Parquet file, so a manifest can be edited with a spreadsheet or with pandas and read back.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from medtokenbudget.data.manifest import COLUMNS, METADATA_KEY, SPLITS, Manifest, listed
from medtokenbudget.errors import RequestError, first_line
from medtokenbudget.files import atomic_write
from medtokenbudget.progress import say

_NOT_A_NUMBER = {"nan", "<na>"}
"""What programs write into the cell of a missing value; no class, group or file is called so."""
_LIKE_NOTHING = {"na", "n/a", "none", "null"}
"""What may be the name of a class (no abnormality, North America) or a missing value: taken as a name, and said."""
_COLUMNS = "image (required), image_id, label, mask, group and split"


def read_csv(path: Path) -> pd.DataFrame:
    """Read all cells as stripped text, so that a class 'NA' stays a class and ids keep their zeros. Empty cells are ''."""
    try:
        table = pd.read_csv(path, dtype=str, keep_default_na=False, encoding="utf-8-sig")
    except FileNotFoundError:
        raise RequestError(f"{path} does not exist.") from None
    except IsADirectoryError:
        raise RequestError(f"{path} is a folder, not a CSV file.") from None
    except (pd.errors.EmptyDataError, pd.errors.ParserError, UnicodeDecodeError) as error:
        raise RequestError(f"{path} is not a CSV file in UTF-8 ({first_line(error)}).") from None
    table.columns = [str(name).strip() for name in table.columns]
    return table.apply(lambda column: column.str.strip())


def read_table(path: Path) -> tuple[pd.DataFrame, dict[str, Any]]:
    """A CSV or Parquet table as text, and what a manifest's file stores beside its rows (empty if it was lost in editing)."""
    nothing: dict[str, Any] = {}
    table, stored = _read_parquet(path) if path.suffix == ".parquet" else (read_csv(path), nothing)
    # The row numbers that pandas writes unless it is told not to.
    numbers = [name for name in table.columns if name in ("", "Unnamed: 0", "__index_level_0__")]
    return table.drop(columns=numbers), stored


def _read_parquet(path: Path) -> tuple[pd.DataFrame, dict[str, Any]]:
    try:
        found = pq.read_table(path)
        columns = {
            name: ["" if value is None else str(value).strip() for value in found.column(name).to_pylist()]
            for name in found.column_names
        }
    except FileNotFoundError:
        raise RequestError(f"{path} does not exist.") from None
    except (pa.ArrowException, OSError, ValueError) as error:
        raise RequestError(f"{path} is not a readable Parquet file: {first_line(error)}.") from None
    try:
        stored = json.loads((found.schema.metadata or {}).get(METADATA_KEY, b"{}"))
    except ValueError:
        stored = {}
    return pd.DataFrame(columns, dtype=object), stored if isinstance(stored, dict) else {}


def write_csv(manifest: Manifest, path: Path | str, overwrite: bool = True) -> Path:
    """Write all columns of a manifest as CSV, for a spreadsheet; `csv_manifest` reads it back.

    Args:
        manifest: The manifest.
        path: The CSV file; paths below its folder are written relative to it.
        overwrite: Whether a file in its place may be replaced.

    Returns:
        The path.

    Raises:
        RequestError: The file exists and `overwrite` is False.
    """
    target = Path(path)
    if target.exists() and not overwrite:
        raise RequestError(f"{target} already exists. Pass --overwrite to replace it, or choose another --out.")
    rows = manifest.rows_seen_from(target.parent)
    with atomic_write(target) as temporary:
        rows.to_csv(temporary, index=False)
    return target


def csv_manifest(
    path: Path | str, classes: Sequence[str] | None = None, *, allow_unlabeled: bool = False, name: str | None = None
) -> Manifest:
    """Make a manifest of the images listed in a CSV or Parquet file.

    Args:
        path: The file. Relative paths in it start from its folder.
        classes: Class names in order. By default those that an edited manifest still has, otherwise the sorted labels.
        allow_unlabeled: Accept rows without a label.
        name: Name of the data set; the name of the file by default.

    Returns:
        The manifest. Without a column `split` all rows are 'train' and its `split_rule` is 'none'.

    Raises:
        RequestError: The file has problems; the message lists all of them.
    """
    source = Path(path)
    table, stored = read_table(source)
    if classes is None and isinstance(stored.get("classes"), list):
        known = {str(label) for label in table.get("label", []) if label}
        # A label that was typed in by hand is a new class after the old ones.
        classes = [*map(str, stored["classes"]), *sorted(known - set(map(str, stored["classes"])))]
    if name is None and isinstance(stored.get("name"), str):
        name = stored["name"]
    if "image" not in table.columns:
        found = listed(list(table.columns), 8)
        raise RequestError(f"{source} has no column 'image', only {found}. Columns are separated by commas: {_COLUMNS}.")
    if table.empty:
        raise RequestError(f"{source} has no rows.")
    table = _without_nan(table, classes or ())
    folder = source.resolve().parent
    rows = {name: table[name].tolist() if name in table.columns else None for name in COLUMNS}
    unknown = sorted(set(table.columns) - set(COLUMNS))
    faults = [f"unknown columns: {listed(unknown)}; allowed are {_COLUMNS}"] if unknown else []
    faults += _faults(folder, rows, classes, allow_unlabeled)
    if faults:
        raise RequestError(f"{source} has these problems:\n" + "\n".join(f"  {fault}" for fault in faults))
    count = len(table)
    blank = [""] * count
    images = [str(folder / image) for image in table["image"]]
    records = [
        {
            "image_id": image_id or Path(image).stem,
            "image": image,
            "label": label or None,
            "mask": str(folder / mask) if mask else None,
            "group": group or None,
            "split": split or "train",
        }
        for image_id, image, label, mask, group, split in zip(
            rows["image_id"] or blank,
            images,
            rows["label"] or blank,
            rows["mask"] or blank,
            rows["group"] or blank,
            rows["split"] or blank,
        )
    ]
    names = list(classes) if classes else sorted({label for label in rows["label"] or [] if label})
    return Manifest.from_records(
        records,
        names,
        source=f"csv {source.name}",
        split_rule="given" if rows["split"] else "none",
        name=source.stem if name is None else name,
    )


def _without_nan(table: pd.DataFrame, classes: Sequence[str]) -> pd.DataFrame:
    """Empty the cells that say NaN, aloud; a class that is named in `classes` is a class, whatever its name."""
    for column in ("label", "mask", "group"):
        if column in table.columns:
            missing = table[column].str.lower().isin(_NOT_A_NUMBER) & ~table[column].isin([*classes])
            table[column] = table[column].mask(missing, "")
            if count := int(missing.sum()):
                say(f"{count:,} of {len(table):,} rows have NaN as their {column}: taken as no {column}.")
    labels = table["label"] if "label" in table.columns else pd.Series([], dtype=object)
    if like := sorted({label for label in labels if label.lower() in _LIKE_NOTHING and label not in classes}):
        count = int(labels.isin(like).sum())
        say(f"{count:,} rows have the label {listed(like)}: taken as the name of a class. Leave the cell empty for no label.")
    return table


def _faults(folder: Path, rows: dict[str, list[str] | None], classes: Sequence[str] | None, allow_unlabeled: bool) -> list[str]:
    """One line per kind of problem, with row numbers as in a spreadsheet: the first row after the heading is row 2."""

    def where(column: str, wrong: list[bool]) -> str:
        values = rows[column] or []
        return listed([f"row {i + 2}" + (f" ({values[i]})" if values[i] else "") for i, bad in enumerate(wrong) if bad])

    images, labels, masks, splits = (rows[name] or [] for name in ("image", "label", "mask", "split"))
    checks = [
        ("image", "image is empty", [not image for image in images]),
        ("image", "images that do not exist", [bool(image) and not (folder / image).is_file() for image in images]),
        ("mask", "masks that do not exist", [bool(mask) and not (folder / mask).is_file() for mask in masks]),
        (
            "label",
            "label is empty or NaN (fill it in, or pass --allow-unlabeled)",
            [not label and not allow_unlabeled for label in labels],
        ),
        (
            "label",
            f"labels other than {', '.join(classes or [])}",
            [bool(x) and bool(classes) and x not in (classes or []) for x in labels],
        ),
        ("split", f"values of split other than {', '.join(SPLITS)}", [value not in SPLITS for value in splits]),
    ]
    faults = [f"{what}: {where(column, wrong)}" for column, what, wrong in checks if any(wrong)]
    ids = pd.Series([given or Path(image).stem for given, image in zip(rows["image_id"] or [""] * len(images), images)])
    if twice := sorted(set(ids[ids.duplicated()])):
        advice = "" if rows["image_id"] else " (add a column image_id; without it the file name is the id)"
        faults.append(f"image_id used more than once: {listed(twice)}{advice}")
    return faults
