"""From files on disk to a manifest: ISIC 2019, Kvasir v2, class folders, and a CSV or Parquet table.

Manifests and predictions must find the same files in the same order, so the walk over a folder is here too, and only here.
"""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from medtokenbudget.data.images import SUFFIXES
from medtokenbudget.data.manifest import ANNOTATORS, BETWEEN, COLUMNS, METADATA_KEY, SPLITS, Manifest, SplitRule, listed
from medtokenbudget.data.masks import Annotators, joined_mask
from medtokenbudget.data.splits import paper_split
from medtokenbudget.errors import RequestError, UnknownNameError, first_line
from medtokenbudget.files import write_encoded
from medtokenbudget.runtime import say

ISIC_CLASSES = ("MEL", "NV", "BCC", "AK", "BKL", "DF", "VASC", "SCC")
IMAGES = "ISIC_2019_Training_Input"
GROUND_TRUTH = "ISIC_2019_Training_GroundTruth.csv"
METADATA = "ISIC_2019_Training_Metadata.csv"
MASK_FOLDERS = {"isic2018": "ISIC2018_Task1_Training_GroundTruth", "ham10000": "HAM10000_segmentations_lesion_tschandl"}
CENTERS = {"MSK": range(16_073), "HAM10000": range(24_306, 34_321), "BCN20000": range(53_454, 73_255)}
"""Source of the images of ISIC 2019, by the number in their names. The prefix of the lesion_id says the same (MSK4_, HAM_, BCN_) of
all images but 2,084, which have none: they came to the archive before HAM10000 and BCN20000, whose images all have one."""
Matching = Literal["exact", "by-id", "none"]
DOWNSAMPLED = "_downsampled"
"""Suffix of images that ISIC 2019 has made smaller; the mask has the name of the original."""

KVASIR_CLASSES = (
    *("dyed-lifted-polyps", "dyed-resection-margins", "esophagitis", "normal-cecum", "normal-pylorus", "normal-z-line"),
    *("polyps", "ulcerative-colitis"),
)
_KVASIR_FOLDER = "kvasir-dataset-v2"  # in the official archive

MASK_NAMES = (
    "The mask of a.jpg is called a.png, or a_mask.png with mask, masks, seg, segmentation, gt, groundtruth, label or lesion. For "
    "other names, pass `mask_pattern` to `mtb data folder`."
)
# With a number where an image has several masks.
_MASK_ENDING = re.compile(r"([_-](?:masks?|seg|segmentation|gt|ground_?truth|label|lesion))(_[0-9]+)?$", re.IGNORECASE)
_MASK_FOLDER_NAMES = {"mask", "masks", "segmentation", "segmentations"}
# Folder names that mean a part of the split and not a class.
_PART_NAMES = {"train", "training", "val", "valid", "validation", "test", "testing", "select"}

# What programs write into the cell of a missing value; no class, group or file is called so.
_NOT_A_NUMBER = {"nan", "<na>"}
# Either the name of a class (no abnormality, North America) or a missing value: taken as a name, with a message.
_LIKE_NOTHING = {"na", "n/a", "none", "null"}
_TABLE_COLUMNS = "image (required), image_id, label, mask, group and split"


def open_data(target: Path | str) -> Manifest:
    """Open a manifest file, or a folder in the layout of ISIC 2019 or Kvasir v2 (with the paper's split) or of class folders."""
    path = Path(target)
    if not path.is_dir():
        return Manifest.read(path)
    if (path / GROUND_TRUTH).exists():
        has_masks = any((path / folder).is_dir() for folder in MASK_FOLDERS.values())
        return isic_manifest(path, "by-id" if has_masks else "none")
    if all((path / name).is_dir() for name in KVASIR_CLASSES):
        return kvasir_manifest(path)
    return folder_manifest(path)


def isic_manifest(
    root: Path | str,
    masks: str = "by-id",
    mask_sources: Sequence[str] | None = None,
    *,
    ignore_unlabeled: bool = False,
    name: str = "ISIC 2019",
) -> Manifest:
    """Make a manifest of the downloaded images, in the order of the CSV, with the paper's split.

    The files are as in the official download, complete or in part:

        ROOT/ISIC_2019_Training_Input/*.jpg             ROOT/ISIC2018_Task1_Training_GroundTruth/*_segmentation.png
        ROOT/ISIC_2019_Training_GroundTruth.csv         ROOT/HAM10000_segmentations_lesion_tschandl/*_segmentation.png
        ROOT/ISIC_2019_Training_Metadata.csv

    A group is a lesion; an image without a lesion_id is a group by itself. The further column `center` is the source of the image.
    `masks` is as in `match_masks`; the first of `mask_sources` that has a mask of an image is used. By default 'exact' uses ISIC
    2018 alone, like the paper, and 'by-id' every mask folder in `root`.
    """
    top = require_folder(Path(root), "Pass the folder that contains the official ISIC 2019 files.")
    truth = read_ground_truth(top / GROUND_TRUTH)
    lesions = read_lesions(top / METADATA)
    folder = require_folder(top / IMAGES, f"In the official layout it is next to {GROUND_TRUTH}.")
    files = {path.stem: path for path in _unpacked(folder)}
    if not files:
        raise RequestError(f"{folder} contains no images. Unpack ISIC_2019_Training_Input.zip there.")
    unlabeled = sorted(set(files) - set(truth["image"]))
    if unlabeled and not ignore_unlabeled:
        names = listed([files[image].name for image in unlabeled], 3)
        raise RequestError(
            f"These images in {folder} have no row in {GROUND_TRUTH}: {names}. Remove them, or pass `ignore_unlabeled`."
        )
    sources = _mask_sources(top, masks, mask_sources)
    mask_files: dict[str, Path] = {}
    # From the last source to the first, so that the first one that has a mask wins.
    for kind in reversed(sources):
        by_id = {path.stem.removesuffix("_segmentation"): path for path in _unpacked(top / MASK_FOLDERS[kind])}
        if not by_id:
            advice = "Unpack the archive of that name there, or choose other `mask_sources`."
            raise RequestError(f"{top / MASK_FOLDERS[kind]} contains no masks. {advice}")
        mask_files |= {image: by_id[mask] for image, mask in match_masks(truth["image"], by_id, masks).items()}
    # The split is drawn over all rows of the CSV: an image is in the same part however many images were downloaded.
    records = [
        {
            "image_id": image,
            "image": files[image],
            "label": label,
            "mask": mask_files.get(image),
            "group": lesions.get(image, image),
            "split": split,
            "center": next((name for name, numbers in CENTERS.items() if int(re.sub(r"\D", "", image) or -1) in numbers), None),
        }
        for image, label, split in zip(truth["image"], truth["label"], paper_split(len(truth)))
        if image in files
    ]
    if sources and not any(record["mask"] for record in records):
        say(f"None of the {len(records):,} images has a mask in {' or '.join(MASK_FOLDERS[kind] for kind in sources)}.")
    source = f"isic 2019, masks {masks} from {'+'.join(sources) or 'nowhere'}"
    return Manifest.from_records(records, ISIC_CLASSES, source=source, split_rule=SplitRule("paper"), name=name)


def _mask_sources(top: Path, how: str, asked: Sequence[str] | None) -> list[str]:
    if how == "none":
        return []
    present = [name for name, folder in MASK_FOLDERS.items() if (top / folder).is_dir()]
    sources = list(asked or (["isic2018"] if how == "exact" else present))
    if not sources:
        folders = " or ".join(MASK_FOLDERS.values())
        raise RequestError(f'{top} contains no mask folder ({folders}). Download one, or pass `masks="none"`.')
    for name in sources:
        if name not in MASK_FOLDERS:
            raise UnknownNameError.of("mask source", name, MASK_FOLDERS)
        require_folder(top / MASK_FOLDERS[name], f"Download it, or leave '{name}' out of `mask_sources`.")
    return sources


def match_masks(image_ids: Iterable[str], mask_ids: Iterable[str], how: str) -> dict[str, str]:
    """Find the mask id (the file name without `_segmentation.png`) of each image that has a mask, by name.

    'exact' compares the full names, like the paper, so images called `..._downsampled` have no mask. 'by-id' ignores this suffix.
    'none' matches nothing.
    """
    if how not in get_args(Matching):
        raise UnknownNameError.of("mask matching", how, get_args(Matching))
    known = set(mask_ids) if how != "none" else set()
    keys = ((image_id, image_id if how == "exact" else image_id.removesuffix(DOWNSAMPLED)) for image_id in image_ids)
    return {image_id: key for image_id, key in keys if key in known}


def read_ground_truth(path: Path) -> pd.DataFrame:
    table = _read_official(path, ("image", *ISIC_CLASSES), f"Pass the folder that contains {path.name} and {IMAGES}.")
    names = [name for name in (*ISIC_CLASSES, "UNK") if name in table.columns]
    values = table[names].apply(pd.to_numeric, errors="coerce").to_numpy(dtype=np.float64)
    # An image must have exactly one class: a row of zeros would silently be class 0.
    one_class = np.isin(values, (0.0, 1.0)).all(1) & (values.sum(1) == 1)
    if not one_class.all():
        rows = table["image"][~one_class].tolist()
        advice = "Download the official file again."
        raise RequestError(f"{path}: {len(rows)} rows do not have exactly one 1 among {', '.join(names)}: {listed(rows)}. {advice}")
    labels = np.array(names, dtype=object)[values.argmax(1)]
    if rows := table["image"][labels == "UNK"].tolist():
        raise RequestError(
            f"{path}: {len(rows)} rows have the class UNK, which is not one of the eight classes: {listed(rows)}. Remove them."
        )
    return pd.DataFrame({"image": table["image"], "label": labels})


def read_lesions(path: Path) -> dict[str, str]:
    advice = f"Download it to the folder of {GROUND_TRUTH}: it says which images show the same lesion."
    table = _read_official(path, ("image", "lesion_id"), advice)
    return {image: lesion for image, lesion in zip(table["image"], table["lesion_id"]) if lesion}


def _read_official(path: Path, columns: Sequence[str], advice: str) -> pd.DataFrame:
    table, _ = _read_table(path, advice)
    if missing := [name for name in columns if name not in table.columns]:
        raise RequestError(f"{path} lacks the columns {', '.join(missing)}. Download the official file again.")
    if twice := sorted(set(table["image"][table["image"].duplicated()])):
        raise RequestError(f"{path} has more than one row for {listed(twice)}. Download the official file again.")
    return table


def _unpacked(folder: Path) -> list[Path]:
    """List the images of a folder, or of the folder of the same name inside it, which unpacking an official archive may create."""
    inner = folder / folder.name
    return image_files(inner if inner.is_dir() else folder)


def kvasir_manifest(root: Path | str, *, name: str = "Kvasir v2") -> Manifest:
    """Make a manifest of Kvasir v2, sorted by class and file name, with the paper's 80/20 split of that order.

    It has no masks and no groups: the paper measures only accuracy on it. `root` has the eight class folders, or is the folder in
    which the official archive was unpacked.
    """
    top = require_folder(Path(root), "Pass the folder that contains the eight class folders of Kvasir v2.")
    if (top / _KVASIR_FOLDER).is_dir():
        top = top / _KVASIR_FOLDER
    if missing := [label for label in KVASIR_CLASSES if not (top / label).is_dir()]:
        raise RequestError(f"{top} lacks the class folders {', '.join(missing)}. For other classes, use `mtb data folder`.")
    # This order is part of the paper's split, which permutes it.
    files = [(path, label) for label in KVASIR_CLASSES for path in image_files(top / label)]
    if not files:
        raise no_images(top)
    records = [
        {"image_id": f"{label}/{path.stem}", "image": path, "label": label, "split": split}
        for (path, label), split in zip(files, paper_split(len(files)))
    ]
    return Manifest.from_records(records, KVASIR_CLASSES, source="kvasir v2", split_rule=SplitRule("paper"), name=name)


def folder_manifest(
    root: Path | str,
    masks: Path | str | None = None,
    *,
    name: str | None = None,
    merged: Path | str | None = None,
    pattern: str | None = None,
    annotators: Annotators = "union",
) -> Manifest:
    """Make a manifest of the images in a folder.

        ROOT/MEL/a.jpg  ROOT/NV/p1/b.jpg            the folder directly in ROOT is the label, at any depth
        ROOT/train/MEL/a.jpg  ROOT/val/NV/b.jpg     the split is given too (train, val, select)
        ROOT/a.jpg                                  no labels

    Args:
        masks: Folder with the masks, found by name, in any case: `a.png`, `a_mask.png`, `a_segmentation.png` and the like for
            `a.jpg`. It may be `root`.
        merged: Folder to write one mask to for each image that has several (`a_mask.png`, `a_mask_1.png`).
        pattern: Path of a mask in `masks` for other names, such as '{stem}/{stem}_roi*.png'; {stem} is the image's name without
            its ending.
        annotators: 'union' takes several masks as several lesions, 'majority' as one lesion by several annotators. 'each' is
            'majority', and keeps the mask of each annotator for evaluation. Masks by annotators may be called `a_ANYTHING.png`, or
            `a.png` in a subfolder for each annotator.
    """
    top = require_folder(Path(root), "Pass the folder that contains the images or the class folders.")
    if masks is not None:
        require_folder(Path(masks), "Pass the folder that contains the masks.")
    files = list(files_below(top, None if masks is None else Path(masks)))
    # Said, not refused: downloads bring readme files and thumbnails along.
    report_skipped(top, Counter(kind_of(path) for path in files if not is_image(path) and path.is_file()))
    images, given = _by_layout(top, files)
    mask_files = None
    if masks is None:
        _reject_masks(images)
    else:
        images = [image for image in images if not _is_mask(image[0])]
        folder = None if merged is None else Path(merged)
        mask_files = MaskFolder(Path(masks), folder, top, pattern, annotators, {image[0].stem for image in images})
        images = [image for image in images if os.path.abspath(image[0]) not in mask_files.named]
    if not images:
        raise no_images(top)
    records = [
        {
            # With its folders: two of them may have files of one name.
            "image_id": path.relative_to(top).with_suffix("").as_posix(),
            "image": path,
            "label": label,
            "mask": mask_files.of(path) if mask_files else None,
            "split": part,
        }
        for path, label, part in images
    ]
    if mask_files:
        mask_files.report(len(records))
        if annotators == "each":
            for record, (path, _, _) in zip(records, images):
                record[ANNOTATORS] = mask_files.by_annotators(path)
    folder_name = Path(os.path.abspath(top)).name or "folder"
    return Manifest.from_records(
        records,
        sorted({label for _, label, _ in images if label is not None}),
        source=f"folder {folder_name}",
        split_rule=SplitRule("given" if given else "none"),
        name=folder_name if name is None else name,
    )


def _by_layout(top: Path, files: Sequence[Path]) -> tuple[list[tuple[Path, str | None, str]], bool]:
    """Return each image with its label (None for loose images) and its part, and whether folders give the parts."""
    names = {path.relative_to(top).parts[0] for path in files if path.parent != top}
    given = bool({name.lower() for name in names} & _PART_NAMES)
    if given and not names <= set(SPLITS):
        raise RequestError(
            f"Cannot tell parts of a split from classes: {top} contains the folders {listed(sorted(names), 6)}. Use only the "
            f"folders {', '.join(SPLITS)} with class folders inside, or only class folders. Rename the others, or use "
            "`mtb data csv`."
        )
    labeled: list[tuple[Path, str | None, str]] = []
    for part in [name for name in SPLITS if name in names] if given else ["train"]:
        folder = top / part if given else top
        images = [path for path in files if is_image(path) and path.is_relative_to(folder)]
        loose = [path.name for path in images if path.parent == folder]
        if loose and len(loose) < len(images):
            advice = "Move these images into the folder of their class, or away."
            raise RequestError(f"{folder} contains both class folders and images outside of them ({listed(loose, 3)}). {advice}")
        labeled += [(path, None if loose else path.relative_to(folder).parts[0], part) for path in images]
    return labeled, given


def _is_mask(path: Path) -> bool:
    """Tell whether a file is named like the mask of an image next to it: `a_mask.png` or `a_mask_1.png`, and `a.jpg`."""
    stem = _MASK_ENDING.sub("", path.stem)
    return stem != path.stem and any(path.with_name(stem + suffix).exists() for suffix in SUFFIXES)


def _reject_masks(images: Sequence[tuple[Path, str | None, str]]) -> None:
    folders = sorted({label for _, label, _ in images if label is not None and label.lower() in _MASK_FOLDER_NAMES})
    if folders:
        raise RequestError(f"The folder '{folders[0]}' would become a class. Pass it as `masks`, or move it away.")
    if masks := [path.name for path, _, _ in images if _is_mask(path)]:
        advice = "Pass their folder as `masks` (it may be the folder of the images)."
        raise RequestError(f"These files look like masks of the images next to them: {listed(masks, 3)}. {advice}")


def _mask_path(pattern: str) -> re.Pattern[str]:
    """Return what finds the path of a mask in its folder, and the stem of its image."""
    first, *others = re.escape(pattern).replace(r"\*", "[^/]*").split(r"\{stem\}")
    if not others:
        raise RequestError(f"`mask_pattern` must contain {{stem}}, the image's name without its ending, got '{pattern}'.")
    return re.compile(rf"(?:^|/){first}(?P<stem>[^/]+){'(?P=stem)'.join(others)}$", re.IGNORECASE)


class MaskFolder:
    """Mask files by the stem of the image that they belong to.

    `merged` is the folder to write one mask to for each image that has several. It must not be in `images`, the folder of the
    images, because it would become a class there. `stems` are those of all images: masks of several annotators are looked up by
    them, unless there is a `pattern`.
    """

    def __init__(
        self,
        folder: Path,
        merged: Path | None = None,
        images: Path | None = None,
        pattern: str | None = None,
        annotators: Annotators = "union",
        stems: Collection[str] = (),
    ) -> None:
        self.folder = require_folder(folder, "Pass the folder that contains the masks.")
        self.merged, self.images, self.pattern, self.annotators = merged, images, pattern, annotators
        self.paths = [path for path in files_below(folder) if is_image(path)]
        self.used: set[str] = set()  # absolute paths of masks that belong to an image, and of the images
        self.matched = 0  # images that have a mask
        self.several: dict[Path, list[Path]] = {}  # by image
        self.names: Counter[str] = Counter()  # how the masks are called: '{stem}_mask.png'
        self.named: set[str] = set()  # absolute paths of files that the pattern describes
        self._by_stem: dict[str, list[tuple[str, Path]]] = {}
        finder = None if pattern is None else _mask_path(pattern)
        known = {stem.lower() for image in stems for stem in (image, image.removesuffix(DOWNSAMPLED))}
        for path in self.paths:
            of = {path.stem, _MASK_ENDING.sub("", path.stem)}
            if finder is not None:
                match = finder.search(path.relative_to(folder).as_posix())
                of = {match["stem"]} if match else set()
                self.named.update([os.path.abspath(path)] if match else [])
            elif annotators != "union":  # the longest name of an image that the mask begins with
                begins = [path.stem[: end.start()] for end in re.finditer(r"\W|_|$", path.stem)]
                of = {max((begin for begin in begins if begin.lower() in known), key=len, default=path.stem)}
            for stem in of:
                self._by_stem.setdefault(stem.lower(), []).append((stem, path))

    def of(self, image: Path) -> Path | None:
        """Find the mask of an image; None if it has no mask."""
        itself = os.path.abspath(image)
        candidates: list[Path] = []
        for stem in dict.fromkeys((image.stem, image.stem.removesuffix(DOWNSAMPLED))):
            # Where masks are next to the images, an image has its own stem but is not its own mask.
            found = [entry for entry in self._by_stem.get(stem.lower(), []) if os.path.abspath(entry[1]) != itself]
            if found and not candidates:
                # The exact case first: on most file systems a.png and A.png are two files.
                candidates = [path for name, path in found if name == stem] or [path for _, path in found]
                self.names[self.pattern or f"{{stem}}{candidates[0].name[len(stem) :]}"] += 1
        # Masks in class folders like those of the images: the one of the image's own class.
        masks = sorted([path for path in candidates if path.parent.name == image.parent.name] or candidates)
        self.used.update([itself, *map(os.path.abspath, masks)])
        self.matched += bool(masks)
        if len(masks) > 1:
            return self._joined(image, masks)
        return masks[0] if masks else None

    def by_annotators(self, image: Path) -> str | None:
        """List the masks of an image that has several, for the manifest."""
        masks = [str(path) for path in self.several.get(image, ())]
        if wrong := [path for path in masks if BETWEEN in path]:
            raise RequestError(f"The path of a mask by one of several annotators must not contain {BETWEEN}: {wrong[0]}.")
        return BETWEEN.join(masks) or None

    def _joined(self, image: Path, masks: list[Path]) -> Path:
        """Write one mask for an image that has several."""
        names = listed([path.relative_to(self.folder).as_posix() for path in masks], 3)
        endings = [_MASK_ENDING.search(path.stem) for path in masks]
        kinds = {(path.parent, ending and ending[1]) for path, ending in zip(masks, endings)}
        numbers = {ending and ending[2] for ending in endings}
        if self.pattern is None and self.annotators == "union" and (len(kinds) > 1 or len(numbers) < len(masks)):
            raise RequestError(
                f"{image.name} has more than one mask in {self.folder}: {names}. Keep one of them, or pass "
                '`annotators="majority"` if they are by several annotators.'
            )
        if self.merged is None:
            advice = "Make a manifest with `mtb data folder`, which writes one mask for each image, and use that."
            raise RequestError(f"{image.name} has several masks in {self.folder}: {names}. {advice}")
        if self.images is not None and Path(os.path.abspath(self.merged)).is_relative_to(os.path.abspath(self.images)):
            raise RequestError(
                f"{image.name} has several masks, and the folder of the joined ones, {self.merged}, would become a class of "
                f"{self.images}. Write the manifest to another folder."
            )
        joined = joined_mask(masks, self.annotators)
        self.several[image] = masks
        target = self.merged / image.parent.name / f"{image.stem}.png"
        target.parent.mkdir(parents=True, exist_ok=True)
        write_encoded(target, lambda stream: joined.save(stream, format="PNG"))
        return target

    def report(self, images: int) -> None:
        """Say which masks were not used and which were merged; no mask at all is an error."""
        if not self.matched:
            raise RequestError(f"No mask in {self.folder} belongs to an image. {MASK_NAMES}")
        say(f"Masks found as {', '.join(f'{name} ({count:,})' for name, count in self.names.most_common(5))} in {self.folder}.")
        if unused := [path.name for path in self.paths if os.path.abspath(path) not in self.used]:
            say(
                f"{len(unused):,} of {len(self.paths):,} files in {self.folder} are the mask of no image: "
                f"{listed(unused, 3)}. {MASK_NAMES}"
            )
        if self.several:
            taken = {
                "union": "Each gets their union: they are taken as several lesions. If they are by several annotators, "
                'pass `annotators="majority"` or "each".',
                "majority": "Each gets what at least half of its annotators marked.",
                "each": "Training reads what at least half of the annotators marked; `mtb evaluate` measures against each of them.",
            }
            first = next(iter(self.several)).name
            say(f"{len(self.several):,} of {images:,} images have several masks, such as {first}. {taken[self.annotators]}")
        elif self.annotators != "union":
            raise RequestError(
                f"No image has several masks in {self.folder}, so there are no annotators to compare. Leave out `annotators`. "
                "Masks by several annotators are called a_1.png and a_2.png for a.jpg, or a.png in a subfolder for each."
            )


def csv_manifest(
    path: Path | str, classes: Sequence[str] | None = None, *, allow_unlabeled: bool = False, name: str | None = None
) -> Manifest:
    """Make a manifest of the images listed in a CSV or Parquet file, such as a manifest that was edited.

    The file has a column `image` and any of `image_id, label, mask, group, split`; relative paths in it start from its folder. The
    classes are by default those that an edited manifest still has, otherwise the sorted labels. Without a column `split` all rows
    are 'train' and the `split_rule` is 'none'.
    """
    source = Path(path)
    table, stored = _read_table(source)
    # The row numbers that pandas writes unless it is told not to.
    table = table.drop(columns=[column for column in table.columns if column in ("", "Unnamed: 0", "__index_level_0__")])
    if "image" not in table.columns:
        only = listed(list(table.columns), 8)
        raise RequestError(f"{source} has no column 'image', only {only}. Columns are separated by commas: {_TABLE_COLUMNS}.")
    if table.empty:
        raise RequestError(f"{source} has no rows.")
    if classes is None and isinstance(stored.get("classes"), list):
        known = list(map(str, stored["classes"]))
        # A label that was typed in by hand is a new class after the old ones.
        classes = [*known, *sorted({label for label in table.get("label", []) if label} - set(known))]
    if name is None:
        name = stored["name"] if isinstance(stored.get("name"), str) else source.stem
    _clear_nan(table, classes or ())
    folder = source.resolve().parent
    further = [name for name in stored.get("further", ()) if name in table.columns]  # of a manifest that was edited
    if faults := _table_faults(table.drop(columns=further), folder, classes or (), allow_unlabeled):
        raise RequestError(f"{source} has these problems:\n" + "\n".join(f"  {fault}" for fault in faults))
    rows = table.reindex(columns=list(COLUMNS), fill_value="")
    records = [
        {
            "image_id": image_id or Path(image).stem,
            "image": folder / image,
            "label": label or None,
            "mask": folder / mask if mask else None,
            "group": group or None,
            "split": split or "train",
        }
        for image_id, image, label, mask, group, split in rows.to_numpy().tolist()
    ]
    manifest = Manifest.from_records(
        records,
        list(classes or sorted({label for label in rows["label"] if label})),
        source=f"csv {source.name}",
        split_rule=SplitRule("given" if "split" in table.columns else "none"),
        name=name,
    )
    if ANNOTATORS in further:
        several = table[ANNOTATORS].map(lambda value: [str(folder / path) for path in value.split(BETWEEN) if path])
        table[ANNOTATORS] = several.map(BETWEEN.join)
    return replace(manifest, rows=pd.concat([manifest.rows, table[further].replace("", None)], axis=1))


def join_columns(manifest: Manifest, path: Path | str) -> Manifest:
    """Add the columns of a CSV or Parquet file to a manifest, joined by its column `image_id` (or `image`, without an ending).

    An image that ISIC 2019 made smaller is also found by the name of its original. An image without a row has no value.
    """
    source = Path(path)
    table, _ = _read_table(source)
    key = next((name for name in ("image_id", "image") if name in table.columns), None)
    if key is None:
        raise RequestError(f"{source} has no column 'image_id', only {listed(list(table.columns), 8)}.")
    ids = table.pop(key).map(lambda value: value if key == "image_id" else Path(value).stem)
    taken = (*COLUMNS, ANNOTATORS, *manifest.further)
    if wrong := [name for name in table.columns if not name or name in taken or not name.isprintable() or "|" in name]:
        advice = "Rename them."
        raise RequestError(f"{source} has columns that the manifest has already or that cannot be names: {listed(wrong)}. {advice}")
    if twice := sorted(set(ids[ids.duplicated()])):
        raise RequestError(f"{source} has more than one row for {listed(twice)}. Keep one of them.")
    known = set(ids)
    keys = [name if name in known else name.removesuffix(DOWNSAMPLED) for name in manifest.ids]
    without = [name for name in keys if name not in known]
    if len(without) == len(manifest):
        raise RequestError(
            f"{source} has no image_id of the manifest: it has {listed(ids.tolist(), 3)}; the manifest has {manifest.ids[0]}."
        )
    if without:
        say(f"{len(without):,} of {len(manifest):,} images have no row in {source}: they have no value there.")
    joined = table.replace("", None).set_index(ids).reindex(keys).reset_index(drop=True)
    return replace(manifest, rows=pd.concat([manifest.rows, joined], axis=1))


def only_images(manifest: Manifest, path: Path | str) -> Manifest:
    """Keep the images that the column `image_id` of a CSV or Parquet file lists, in the order of the manifest."""
    source = Path(path)
    table, _ = _read_table(source)
    if "image_id" not in table.columns:
        raise RequestError(f"{source} has no column 'image_id', only {listed(list(table.columns), 8)}.")
    wanted = set(table["image_id"])
    if missing := sorted(wanted - set(manifest.ids)):
        raise RequestError(f"{len(missing):,} of the {len(wanted):,} images in {source} are not here: {listed(missing)}.")
    return manifest.take([row for row, name in enumerate(manifest.ids) if name in wanted])


def _read_table(path: Path, advice: str = "") -> tuple[pd.DataFrame, dict[str, Any]]:
    """Read all cells as stripped text ('' if empty), and what a manifest's file stores about its rows.

    As text, a class 'NA' stays a class and ids keep their zeros.
    """
    stored: Any = {}
    try:
        if path.suffix == ".parquet":
            arrow = pq.read_table(path)
            stored = json.loads((arrow.schema.metadata or {}).get(METADATA_KEY, b"{}"))
            cells = {
                name: ["" if value is None else str(value) for value in arrow.column(name).to_pylist()]
                for name in arrow.column_names
            }
            table = pd.DataFrame(cells, dtype=object)
        else:
            # Spreadsheets begin UTF-8 with a byte-order mark, which would be part of the first heading.
            table = pd.read_csv(path, dtype=str, keep_default_na=False, encoding="utf-8-sig")
    except FileNotFoundError:
        raise RequestError(f"{path} does not exist. {advice}".rstrip()) from None
    except (pa.ArrowException, OSError, ValueError) as error:
        kind = "Parquet file" if path.suffix == ".parquet" else "CSV file in UTF-8"
        raise RequestError(f"{path} is not a readable {kind} ({first_line(error)}).") from None
    table.columns = [str(name).strip() for name in table.columns]
    return table.apply(lambda column: column.str.strip()), stored if isinstance(stored, dict) else {}


def _clear_nan(table: pd.DataFrame, classes: Sequence[str]) -> None:
    """Empty the cells that say NaN, with a message; a class that is named in `classes` is a class, whatever its name."""
    for column in [name for name in ("label", "mask", "group") if name in table.columns]:
        missing = table[column].str.lower().isin(_NOT_A_NUMBER) & ~table[column].isin([*classes])
        table[column] = table[column].mask(missing, "")
        if count := int(missing.sum()):
            say(f"{count:,} of {len(table):,} rows have NaN as their {column}: taken as no {column}.")
    if like := [label for label in table.get("label", []) if label.lower() in _LIKE_NOTHING and label not in classes]:
        names = listed(sorted(set(like)))
        say(f"{len(like):,} rows have the label {names}: taken as the name of a class. Leave the cell empty for no label.")


def _table_faults(table: pd.DataFrame, folder: Path, classes: Sequence[str], allow_unlabeled: bool) -> list[str]:
    """Say each kind of problem in a line, with row numbers as in a spreadsheet: the first row after the heading is row 2."""

    def lacks_file(value: str) -> bool:
        return bool(value) and not (folder / value).is_file()

    checks = [
        ("image", "image is empty", lambda image: not image),
        ("image", "images that do not exist", lacks_file),
        ("mask", "masks that do not exist", lacks_file),
        ("label", "label is empty or NaN (fill it in, or pass `allow_unlabeled`)", lambda label: not label and not allow_unlabeled),
        ("label", f"labels other than {', '.join(classes)}", lambda label: bool(label and classes) and label not in classes),
        ("split", f"values of split other than {', '.join(SPLITS)}", lambda split: split not in SPLITS),
    ]
    unknown = sorted(set(table.columns) - set(COLUMNS))
    advice = f"allowed are {_TABLE_COLUMNS}; pass a file with others as `columns`"
    faults = [f"unknown columns: {listed(unknown)}; {advice}"] if unknown else []
    for column, problem, is_wrong in checks:
        values: list[str] = table[column].tolist() if column in table.columns else []
        if wrong := [f"row {row}" + (f" ({value})" if value else "") for row, value in enumerate(values, 2) if is_wrong(value)]:
            faults.append(f"{problem}: {listed(wrong)}")
    given = table.get("image_id", [""] * len(table))
    ids = pd.Series([image_id or Path(image).stem for image_id, image in zip(given, table["image"])])
    if twice := sorted(set(ids[ids.duplicated()])):
        advice = "" if "image_id" in table.columns else " (add a column image_id; without it the file name is the id)"
        faults.append(f"image_id used more than once: {listed(twice)}{advice}")
    return faults


def is_image(path: Path) -> bool:
    return path.suffix.lower() in SUFFIXES


def image_files(folder: Path) -> list[Path]:
    return [path for path in _entries(folder)[0] if is_image(path)]


def files_below(folder: Path, ignore: Path | None = None, _open: tuple[Path, ...] = ()) -> Iterator[Path]:
    """Iterate over all files in a folder and its subfolders but `ignore`, sorted, the files of a folder before its subfolders.

    Links are followed, except those that lead back to a folder that is being read. Hidden files and folders are ignored.
    """
    reading = (*_open, folder.resolve())
    files, folders = _entries(folder)
    yield from files
    for sub in folders:
        target = sub.resolve()
        # A link to a folder that is being read, or to one around it, would be read without end.
        leads_back = any(opened.is_relative_to(target) for opened in reading)
        if not leads_back and (ignore is None or target != ignore.resolve()):
            yield from files_below(sub, ignore, reading)


def _entries(folder: Path) -> tuple[list[Path], list[Path]]:
    """List the files and the folders in a folder, sorted, without hidden ones and links in a circle."""
    files: list[Path] = []
    folders: list[Path] = []
    try:
        with os.scandir(folder) as entries:
            visible = sorted((entry for entry in entries if not entry.name.startswith(".")), key=lambda entry: entry.name)
    except OSError as error:
        raise RequestError(f"Cannot read the folder {folder}: {error.strerror or error}.") from None
    for entry in visible:
        try:
            (folders if entry.is_dir() else files).append(folder / entry.name)
        except OSError as error:
            say(f"Skipped {entry.path}: {error.strerror or error}.")
    return files, folders


def kind_of(path: Path) -> str:
    """Return the ending of a file, or its name if it has none; skipped files are counted by it."""
    return path.suffix.lower() or path.name


def report_skipped(folder: Path, kinds: Counter[str]) -> None:
    """Say in one line how many files of a folder are not images, by their kind."""
    if kinds:
        files = "1 file" if kinds.total() == 1 else f"{kinds.total():,} files"
        counted = ", ".join(f"{number:,} {kind}" for kind, number in sorted(kinds.items()))
        say(f"Skipped {files} in {folder} that cannot be read as images: {counted}.")


def no_images(folder: Path) -> RequestError:
    return RequestError(f"{folder} and its subfolders contain no images. Supported: {', '.join(sorted(SUFFIXES))}.")


def require_folder(folder: Path, advice: str) -> Path:
    """Return `folder`, or raise a RequestError that ends with `advice` if there is no such folder."""
    if not folder.is_dir():
        what = "is a file, not a folder" if folder.exists() else "does not exist"
        raise RequestError(f"{folder} {what}. {advice}")
    return folder
