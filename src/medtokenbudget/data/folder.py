"""Your own images: one folder per class, or a single folder without labels, with masks next to them or in another folder.

ROOT/MEL/a.jpg  ROOT/NV/p1/b.jpg         the folder directly in ROOT is the label, at any depth
ROOT/train/MEL/a.jpg  ROOT/val/NV/b.jpg  the split is given too
ROOT/a.jpg                               no labels

Several lesions of one image may have a mask each: `a_mask.png`, `a_mask_1.png`. Their union is written as one mask.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from PIL import Image, ImageChops

from medtokenbudget.data.decode import SUFFIXES, decode_mask
from medtokenbudget.data.isic import DOWNSAMPLED
from medtokenbudget.data.manifest import SPLITS, Manifest, listed
from medtokenbudget.data.walk import (
    files_below,
    image_files,
    is_image,
    kind_of,
    no_images,
    report_skipped,
    require_folder,
    subfolders,
)
from medtokenbudget.errors import RequestError
from medtokenbudget.files import write_encoded
from medtokenbudget.progress import say

_ENDING = re.compile(r"(_mask|_segmentation)(_[0-9]+)?$")
"""How the name of a mask ends where it is not that of its image, with a number where the image has several."""
_PARTS = {"train", "training", "val", "valid", "validation", "test", "testing", "select"}
"""Folder names that mean a part of the split and not a class."""
MASK_NAMES = "The mask of a.jpg must be called a.png, a_segmentation.png or a_mask.png."
_PASS_MASKS = "Pass the folder that contains the masks."
_MASK_FOLDERS = {"mask", "masks", "segmentation", "segmentations"}


def folder_manifest(
    root: Path | str, masks: Path | str | None = None, *, name: str | None = None, merged: Path | str | None = None
) -> Manifest:
    """Make a manifest of the images in a folder.

    Args:
        root: Folder with one folder per class, with the folders train, val and select that contain class folders, or with images
            only (then without labels).
        masks: Folder with the masks, found by name: `a.png`, `a_segmentation.png` or `a_mask.png` for `a.jpg`. It may be `root`.
        name: Name of the data set; the name of the folder by default.
        merged: Folder to write the union of the masks of an image to, where it has several (`a_mask.png`, `a_mask_1.png`). It is
            made if there are such images.

    Returns:
        The manifest. Its `split_rule` is 'given' if the folders give the split; otherwise it is 'none' and all rows are 'train'.

    Raises:
        RequestError: There are no images, masks would become images or classes, an image has several masks and there is no folder
            for their union, or the layout is ambiguous.

    Example:
        >>> manifest = folder_manifest("photos", masks="photo-masks", name="Clinic A")  # doctest: +SKIP
    """
    top = require_folder(Path(root), "Pass the folder that contains the images or the class folders.")
    mask_folder = None if masks is None else require_folder(Path(masks), _PASS_MASKS)
    given = _given_parts(top, mask_folder)
    images = {part or "train": _labeled(top / part if part else top, mask_folder) for part in (given or [""])}
    if mask_folder is None:
        _reject_masks(images)
    else:
        images = {part: [(path, label) for path, label in found if not _is_mask(path)] for part, found in images.items()}
    others = (path for path in files_below(top, mask_folder) if path.is_file() and not is_image(path))
    report_skipped(top, Counter(kind_of(path) for path in others))
    if not any(images.values()):
        raise no_images(top)
    classes = sorted({label for found in images.values() for _, label in found if label is not None})
    union = None if merged is None else Path(merged)
    found_masks = MaskFolder(mask_folder, union, top) if mask_folder is not None else None
    records = [
        {
            "image_id": path.relative_to(top).with_suffix("").as_posix(),
            "image": str(path),
            "label": label,
            "mask": found_masks.of(path) if found_masks else None,
            "split": part,
        }
        for part, found in images.items()
        for path, label in found
    ]
    if found_masks and not any(record["mask"] for record in records):
        raise RequestError(f"No mask in {masks} belongs to an image. {MASK_NAMES}")
    if found_masks and (left := found_masks.unused()):
        say(
            f"{len(left):,} of {len(found_masks.paths):,} files in {masks} are the mask of no image: "
            f"{listed([path.name for path in left], 3)}. {MASK_NAMES}"
        )
    if found_masks and (several := found_masks.unions):
        say(
            f"{len(several):,} of {len(records):,} images have several masks, such as {several[0].name}. Each gets their union: "
            "they are taken as several lesions. If they are by several annotators, pass the folder of one of them as --masks."
        )
    called = Path(os.path.abspath(top)).name or "folder"
    return Manifest.from_records(
        records, classes, source=f"folder {called}", split_rule="given" if given else "none", name=called if name is None else name
    )


def _given_parts(top: Path, mask_folder: Path | None) -> list[str]:
    """The parts of a split that is given as folders; a mixture of parts and classes is an error."""
    names = {folder.name for folder in subfolders(top, mask_folder)}
    if not {name.lower() for name in names} & _PARTS:
        return []
    if names <= set(SPLITS):
        return [name for name in SPLITS if name in names]
    raise RequestError(
        f"Cannot tell parts of a split from classes: {top} contains the folders {listed(sorted(names), 6)}. Use only the folders "
        f"{', '.join(SPLITS)} with class folders inside, or only class folders. Rename the others, or use `mtb data csv`."
    )


def _is_mask(path: Path) -> bool:
    """Whether a file is named like the mask of an image next to it: `a_mask.png` or `a_mask_1.png`, and `a.jpg`."""
    stem = _ENDING.sub("", path.stem)
    return stem != path.stem and any(path.with_name(stem + suffix).exists() for suffix in SUFFIXES)


def _reject_masks(images: dict[str, list[tuple[Path, str | None]]]) -> None:
    """Masks must not be read as images, nor their folder as a class."""
    found = [(path, label) for some in images.values() for path, label in some]
    folders = sorted({label for _, label in found if label is not None and label.lower() in _MASK_FOLDERS})
    if folders:
        raise RequestError(f"The folder '{folders[0]}' would become a class. Pass it as --masks, or move it away.")
    if masks := [path for path, _ in found if _is_mask(path)]:
        raise RequestError(
            f"These files look like masks of the images next to them: {listed([path.name for path in masks], 3)}. "
            "Pass their folder as --masks (it may be the folder of the images)."
        )


def _labeled(folder: Path, mask_folder: Path | None) -> list[tuple[Path, str | None]]:
    loose = image_files(folder)
    inside: list[tuple[Path, str | None]] = [
        (path, sub.name) for sub in subfolders(folder, mask_folder) for path in files_below(sub, mask_folder) if is_image(path)
    ]
    if loose and inside:
        raise RequestError(
            f"{folder} contains both class folders and images outside of them ({listed([path.name for path in loose], 3)}). "
            "Move these images into the folder of their class, or away."
        )
    return inside or [(path, None) for path in loose]


class MaskFolder:
    """Mask files by the stem of the image that they belong to.

    Args:
        folder: Folder with the masks, at any depth.
        merged: Folder to write the union of several masks of one image to.
        images: Folder of the images, in which `merged` must not be, because it would become a class there.
    """

    def __init__(self, folder: Path, merged: Path | None = None, images: Path | None = None) -> None:
        require_folder(folder, _PASS_MASKS)
        self.folder, self.merged, self.images = folder, merged, images
        self.by_stem: dict[str, list[Path]] = {}
        self.paths = [path for path in files_below(folder) if is_image(path)]
        self.used: set[str] = set()
        self.unions: list[Path] = []
        for path in self.paths:
            for stem in {path.stem, _ENDING.sub("", path.stem)}:
                self.by_stem.setdefault(stem, []).append(path)

    def of(self, image: Path) -> str | None:
        """The mask of an image, or None."""
        own = os.path.abspath(image)
        named = self.by_stem.get(image.stem, []), self.by_stem.get(image.stem.removesuffix(DOWNSAMPLED), [])
        found, original = ([path for path in paths if os.path.abspath(path) != own] for paths in named)
        found = found or original
        same_class = [path for path in found if path.parent.name == image.parent.name] or found
        self.used.update([own, *map(os.path.abspath, same_class)])
        if len(same_class) > 1:
            return self._union(image, sorted(same_class))
        return str(same_class[0]) if same_class else None

    def unused(self) -> list[Path]:
        """The files that were neither the mask of an image nor an image themselves."""
        return [path for path in self.paths if os.path.abspath(path) not in self.used]

    def _union(self, image: Path, parts: Sequence[Path]) -> str:
        names = listed([path.relative_to(self.folder).as_posix() for path in parts], 3)
        endings = [_ENDING.search(path.stem) for path in parts]
        kinds = {(path.parent, ending and ending[1]) for path, ending in zip(parts, endings)}
        numbers = {ending and ending[2] for ending in endings}
        if len(kinds) > 1 or len(numbers) < len(parts):
            raise RequestError(f"{image.name} has more than one mask in {self.folder}: {names}. Keep one of them.")
        if self.merged is None:
            raise RequestError(
                f"{image.name} has several masks in {self.folder}: {names}. Make a manifest with `mtb data folder`, which writes "
                "their union, and use that."
            )
        if self.images is not None and Path(os.path.abspath(self.merged)).is_relative_to(os.path.abspath(self.images)):
            raise RequestError(
                f"{image.name} has several masks, and the folder of their union, {self.merged}, would become a class of "
                f"{self.images}. Write the manifest to another folder."
            )
        self.unions.append(image)
        path = self.merged / image.parent.name / f"{image.stem}.png"
        union = _merged(parts)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_encoded(path, lambda stream: union.save(stream, format="PNG"))
        return str(path)


def _merged(parts: Sequence[Path]) -> Image.Image:
    """Every pixel as bright as in the brightest of the masks."""
    first, *others = (decode_mask(path).convert("L") for path in parts)
    for path, other in zip(parts[1:], others):
        if other.size != first.size:
            sizes = f"{other.width} x {other.height} pixels, {parts[0].name} {first.width} x {first.height}"
            raise RequestError(f"Masks of one image must be of one size, but {path.name} has {sizes}.")
        first = ImageChops.lighter(first, other)
    return first
