"""ISIC 2019 in its official layout, complete or partly downloaded, with the lesion masks of ISIC 2018 Task 1 and HAM10000.

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
_DOWNSAMPLED = "_downsampled"
_SEGMENTATION = "_segmentation"


def match_masks(image_ids: Iterable[str], mask_ids: Iterable[str], how: str) -> dict[str, str]:
    """The mask id of each image that has one.

    `exact` compares names as they are, as the paper did, and so misses the files called `..._downsampled`; `by-id` compares
    without that suffix.
    """
    if how not in get_args(Matching):
        raise UnknownNameError.of("way of matching masks", how, get_args(Matching))
    known = set(mask_ids) if how != "none" else set()
    keys = ((image_id, image_id if how == "exact" else image_id.removesuffix(_DOWNSAMPLED)) for image_id in image_ids)
    return {image_id: key for image_id, key in keys if key in known}


def read_ground_truth(path: Path) -> pd.DataFrame:
    """Columns `image, label` in file order, from the one-hot CSV."""
    if not path.exists():
        raise RequestError(f"{path} does not exist. Give the folder that holds {path.name} and {IMAGES}, as ISIC 2019 comes.")
    table = read_csv(path)
    _require(table, ("image", *CLASSES), path)
    names = [name for name in (*CLASSES, "UNK") if name in table.columns]
    values = table[names].apply(pd.to_numeric, errors="coerce").to_numpy(dtype=np.float64)
    bad = ~(np.isin(values, (0.0, 1.0)).all(1) & (values.sum(1) == 1))
    if bad.any():
        rows = listed(table["image"][bad].tolist())
        raise RequestError(
            f"{path}: {bad.sum()} rows do not have a single 1 among {', '.join(names)}: {rows}. Fetch the official file."
        )
    labels = np.array(names, dtype=object)[values.argmax(1)]
    if (unknown := labels == "UNK").any():
        rows = listed(table["image"][unknown].tolist())
        raise RequestError(f"{path}: {unknown.sum()} rows are of the class UNK, which is none of the eight: {rows}.")
    _refuse_twice(table["image"], path)
    return pd.DataFrame({"image": table["image"], "label": labels})


def read_lesions(path: Path) -> dict[str, str]:
    """The lesion of each image that has one, from the metadata CSV."""
    if not path.exists():
        raise RequestError(
            f"{path} does not exist. It comes beside {GROUND_TRUTH} and tells which images show one lesion: fetch it."
        )
    table = read_csv(path)
    _require(table, ("image", "lesion_id"), path)
    _refuse_twice(table["image"], path)
    return {image: lesion for image, lesion in zip(table["image"], table["lesion_id"]) if lesion}


def isic_manifest(
    root: Path | str,
    masks: str = "by-id",
    mask_sources: Sequence[str] | None = None,
    *,
    ignore_unlabeled: bool = False,
    name: str = NAME,
) -> Manifest:
    """The images that are there, in the order of the CSV, with the paper's split.

    The split is drawn over all rows of the CSV and then restricted, so that an image never changes side. Without `mask_sources`,
    `exact` takes ISIC 2018 alone, as the paper did, and `by-id` every mask folder that is there. The first source that has a
    mask wins. A group is a lesion; an image without a lesion_id is its own.
    """
    top = require_folder(Path(root), "Pass the folder that holds the official ISIC 2019 files.")
    truth = read_ground_truth(top / GROUND_TRUTH)
    lesions = read_lesions(top / METADATA)
    files = _images(top)
    unlabeled = sorted(set(files) - set(truth["image"]))
    if unlabeled and not ignore_unlabeled:
        names = listed([files[image].name for image in unlabeled], 3)
        raise RequestError(f"{names} in {top / IMAGES} have no row in {GROUND_TRUTH}. Remove the files or pass --ignore-unlabeled.")
    sources = _mask_sources(top, masks, mask_sources)
    found: dict[str, Path] = {}
    for kind in reversed(sources):
        folder = {path.stem.removesuffix(_SEGMENTATION): path for path in _unpacked(top / MASK_FOLDERS[kind])}
        if not folder:
            raise RequestError(
                f"{top / MASK_FOLDERS[kind]} holds no mask. Unpack the archive of that name there, "
                "or name the other source with --mask-sources."
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
        say(f"none of the {len(records):,} images has a mask in {' or '.join(MASK_FOLDERS[kind] for kind in sources)}.")
    source = f"isic 2019, masks {masks} from {'+'.join(sources) or 'nowhere'}"
    return Manifest.from_records(records, CLASSES, source=source, split_rule="paper", name=name)


def _images(top: Path) -> dict[str, Path]:
    folder = require_folder(top / IMAGES, f"The official layout has it beside {GROUND_TRUTH}.")
    files = {path.stem: path for path in _unpacked(folder)}
    if not files:
        raise RequestError(f"{folder} holds no image. Unpack ISIC_2019_Training_Input.zip there.")
    return files


def _unpacked(folder: Path) -> list[Path]:
    """The images of a folder; an official archive, unpacked in a folder of its own name, leaves that folder inside itself."""
    inner = folder / folder.name
    return image_files(inner if inner.is_dir() else folder)


def _mask_sources(top: Path, how: str, asked: Sequence[str] | None) -> list[str]:
    if how == "none":
        return []
    if asked is None:
        wanted = ["isic2018"] if how == "exact" else [name for name, folder in MASK_FOLDERS.items() if (top / folder).is_dir()]
        if not wanted:
            raise RequestError(
                f"{top} holds neither {' nor '.join(MASK_FOLDERS.values())}. Fetch one of them, or pass --masks none."
            )
    else:
        wanted = list(asked)
    for name in wanted:
        if name not in MASK_FOLDERS:
            raise UnknownNameError.of("mask source", name, MASK_FOLDERS)
        require_folder(top / MASK_FOLDERS[name], f"It is the mask source {name}: fetch it, or leave it out of --mask-sources.")
    return wanted


def _require(table: pd.DataFrame, columns: Sequence[str], path: Path) -> None:
    missing = [name for name in columns if name not in table.columns]
    if missing:
        raise RequestError(f"{path} lacks the columns {', '.join(missing)}. Fetch the official file.")


def _refuse_twice(images: pd.Series, path: Path) -> None:
    twice = sorted(set(images[images.duplicated()]))
    if twice:
        raise RequestError(f"{path} has more than one row for {listed(twice)}. Fetch the official file.")
