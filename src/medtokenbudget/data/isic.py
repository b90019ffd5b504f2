"""ISIC 2019 in its official layout, complete or in part, with the lesion masks of ISIC 2018 Task 1 and HAM10000.

ROOT/ISIC_2019_Training_Input/*.jpg                 ROOT/ISIC2018_Task1_Training_GroundTruth/*_segmentation.png
ROOT/ISIC_2019_Training_GroundTruth.csv             ROOT/HAM10000_segmentations_lesion_tschandl/*_segmentation.png
ROOT/ISIC_2019_Training_Metadata.csv
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal, get_args

import numpy as np
import pandas as pd

from medtokenbudget.data.csv_source import read_csv
from medtokenbudget.data.manifest import Manifest, listed
from medtokenbudget.data.splits import paper_split
from medtokenbudget.data.walk import image_files, require_folder
from medtokenbudget.errors import RequestError, UnknownNameError
from medtokenbudget.progress import say

NAME = "ISIC 2019"
CLASSES = ("MEL", "NV", "BCC", "AK", "BKL", "DF", "VASC", "SCC")
IMAGES = "ISIC_2019_Training_Input"
GROUND_TRUTH = "ISIC_2019_Training_GroundTruth.csv"
METADATA = "ISIC_2019_Training_Metadata.csv"
MASK_FOLDERS = {"isic2018": "ISIC2018_Task1_Training_GroundTruth", "ham10000": "HAM10000_segmentations_lesion_tschandl"}
Matching = Literal["exact", "by-id", "none"]
DOWNSAMPLED = "_downsampled"
"""How ISIC 2019 ends the name of an image that it has made smaller; the mask is called as the original."""
_SEGMENTATION = "_segmentation"


def match_masks(image_ids: Iterable[str], mask_ids: Iterable[str], how: str) -> dict[str, str]:
    """Find the mask of each image by name.

    Args:
        image_ids: Names of the images, without their ending.
        mask_ids: Names of the masks, without `_segmentation.png`.
        how: 'exact' compares the names as they are, like the paper, so images called `..._downsampled` have no mask. 'by-id'
            ignores this suffix. 'none' matches nothing.

    Returns:
        The mask id of each image that has a mask.
    """
    if how not in get_args(Matching):
        raise UnknownNameError.of("mask matching", how, get_args(Matching))
    known = set(mask_ids) if how != "none" else set()
    keys = ((image_id, image_id if how == "exact" else image_id.removesuffix(DOWNSAMPLED)) for image_id in image_ids)
    return {image_id: key for image_id, key in keys if key in known}


def read_ground_truth(path: Path) -> pd.DataFrame:
    """Read the one-hot CSV to a table with the columns `image, label`, in file order."""
    if not path.exists():
        raise RequestError(
            f"{path} does not exist. Pass the folder that contains {path.name} and {IMAGES}, the layout of the official download."
        )
    table = read_csv(path)
    _require(table, ("image", *CLASSES), path)
    names = [name for name in (*CLASSES, "UNK") if name in table.columns]
    values = table[names].apply(pd.to_numeric, errors="coerce").to_numpy(dtype=np.float64)
    bad = ~(np.isin(values, (0.0, 1.0)).all(1) & (values.sum(1) == 1))
    if bad.any():
        rows = listed(table["image"][bad].tolist())
        raise RequestError(
            f"{path}: {bad.sum()} rows do not have exactly one 1 among {', '.join(names)}: {rows}. "
            "Download the official file again."
        )
    labels = np.array(names, dtype=object)[values.argmax(1)]
    if (unknown := labels == "UNK").any():
        rows = listed(table["image"][unknown].tolist())
        raise RequestError(
            f"{path}: {unknown.sum()} rows have the class UNK, which is not one of the eight classes: {rows}. Remove them."
        )
    _check_unique(table["image"], path)
    return pd.DataFrame({"image": table["image"], "label": labels})


def read_lesions(path: Path) -> dict[str, str]:
    """Read the lesion id of each image that has one from the metadata CSV."""
    if not path.exists():
        raise RequestError(
            f"{path} does not exist. Download it to the folder of {GROUND_TRUTH}: it says which images show the same lesion."
        )
    table = read_csv(path)
    _require(table, ("image", "lesion_id"), path)
    _check_unique(table["image"], path)
    return {image: lesion for image, lesion in zip(table["image"], table["lesion_id"]) if lesion}


def isic_manifest(
    root: Path | str,
    masks: str = "by-id",
    mask_sources: Sequence[str] | None = None,
    *,
    ignore_unlabeled: bool = False,
    name: str = NAME,
) -> Manifest:
    """Make a manifest of the downloaded images, in the order of the CSV, with the paper's split.

    The split is drawn over all rows of the CSV, so an image is in the same part however many images were downloaded. A group is a
    lesion; an image without a lesion_id is its own group.

    Args:
        root: Folder with the official files.
        masks: How masks are found: 'by-id', 'exact' or 'none'; see `match_masks`.
        mask_sources: 'isic2018', 'ham10000' or both; the first one that has a mask of an image is used. By default 'exact' uses
            ISIC 2018 alone, like the paper, and 'by-id' every mask folder in `root`.
        ignore_unlabeled: Leave out images that have no row in the CSV, instead of raising an error.
        name: Name of the data set.

    Returns:
        The manifest, with the `split_rule` 'paper'.

    Raises:
        RequestError: Files are missing or not as in the official download.
    """
    top = require_folder(Path(root), "Pass the folder that contains the official ISIC 2019 files.")
    truth = read_ground_truth(top / GROUND_TRUTH)
    lesions = read_lesions(top / METADATA)
    files = _images(top)
    unlabeled = sorted(set(files) - set(truth["image"]))
    if unlabeled and not ignore_unlabeled:
        names = listed([files[image].name for image in unlabeled], 3)
        raise RequestError(
            f"These images in {top / IMAGES} have no row in {GROUND_TRUTH}: {names}. Remove them, or pass --ignore-unlabeled."
        )
    sources = _mask_sources(top, masks, mask_sources)
    found: dict[str, Path] = {}
    for kind in reversed(sources):
        folder = {path.stem.removesuffix(_SEGMENTATION): path for path in _unpacked(top / MASK_FOLDERS[kind])}
        if not folder:
            raise RequestError(
                f"{top / MASK_FOLDERS[kind]} contains no masks. Unpack the archive of that name there, "
                "or choose another source with --mask-sources."
            )
        found |= {image: folder[mask] for image, mask in match_masks(truth["image"], folder, masks).items()}
    records = [
        {
            "image_id": image,
            "image": str(files[image]),
            "label": label,
            "mask": str(found[image]) if image in found else None,
            "group": lesions.get(image, image),
            "split": split,
        }
        for image, label, split in zip(truth["image"], truth["label"], paper_split(len(truth)))
        if image in files
    ]
    if sources and not any(record["mask"] for record in records):
        say(f"None of the {len(records):,} images has a mask in {' or '.join(MASK_FOLDERS[kind] for kind in sources)}.")
    source = f"isic 2019, masks {masks} from {'+'.join(sources) or 'nowhere'}"
    return Manifest.from_records(records, CLASSES, source=source, split_rule="paper", name=name)


def _images(top: Path) -> dict[str, Path]:
    folder = require_folder(top / IMAGES, f"In the official layout it is next to {GROUND_TRUTH}.")
    files = {path.stem: path for path in _unpacked(folder)}
    if not files:
        raise RequestError(f"{folder} contains no images. Unpack ISIC_2019_Training_Input.zip there.")
    return files


def _unpacked(folder: Path) -> list[Path]:
    """The images of a folder, or of the folder of the same name inside it, which unpacking an official archive may create."""
    inner = folder / folder.name
    return image_files(inner if inner.is_dir() else folder)


def _mask_sources(top: Path, how: str, asked: Sequence[str] | None) -> list[str]:
    if how == "none":
        return []
    if asked is None:
        wanted = ["isic2018"] if how == "exact" else [name for name, folder in MASK_FOLDERS.items() if (top / folder).is_dir()]
        if not wanted:
            raise RequestError(
                f"{top} contains no mask folder ({' or '.join(MASK_FOLDERS.values())}). Download one, or pass --masks none."
            )
    else:
        wanted = list(asked)
    for name in wanted:
        if name not in MASK_FOLDERS:
            raise UnknownNameError.of("mask source", name, MASK_FOLDERS)
        require_folder(top / MASK_FOLDERS[name], f"Download it, or leave '{name}' out of --mask-sources.")
    return wanted


def _require(table: pd.DataFrame, columns: Sequence[str], path: Path) -> None:
    missing = [name for name in columns if name not in table.columns]
    if missing:
        raise RequestError(f"{path} lacks the columns {', '.join(missing)}. Download the official file again.")


def _check_unique(images: pd.Series, path: Path) -> None:
    twice = sorted(set(images[images.duplicated()]))
    if twice:
        raise RequestError(f"{path} has more than one row for {listed(twice)}. Download the official file again.")
