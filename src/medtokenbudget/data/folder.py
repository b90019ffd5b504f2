"""Anybody's images: a folder for each class, or one flat folder without labels, and masks beside them.

ROOT/MEL/a.jpg  ROOT/NV/p1/b.jpg         labels are the folder names, whatever lies between them and the image
ROOT/train/MEL/a.jpg  ROOT/val/NV/b.jpg  the split is given too
ROOT/a.jpg                               no labels
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from medtokenbudget.data.decode import SUFFIXES
from medtokenbudget.data.manifest import SPLITS, Manifest, listed
from medtokenbudget.errors import RequestError
from medtokenbudget.progress import say

MASK_ENDINGS = ("", "_segmentation", "_mask")


_PARTS = {"train", "training", "val", "valid", "validation", "test", "testing", "select"}
"""Folder names that say a part of the split and not a class."""
_MASK_FOLDERS = {"mask", "masks", "segmentation", "segmentations"}


def image_files(folder: Path) -> list[Path]:
    """The image files right in a folder, sorted by name; hidden files and other kinds are left out."""
    return sorted(path for path in folder.iterdir() if _is_image(path))


def _is_image(path: Path) -> bool:
    return path.suffix.lower() in SUFFIXES and not path.name.startswith(".")


def require_folder(folder: Path, advice: str) -> Path:
    if not folder.is_dir():
        what = "is a file, not a folder" if folder.exists() else "does not exist"
        raise RequestError(f"{folder} {what}. {advice}")
    return folder


def folder_manifest(root: Path | str, masks: Path | str | None = None, *, name: str | None = None) -> Manifest:
    """The images below `root`; masks are found by name (`a.png`, `a_segmentation.png` or `a_mask.png` for `a.jpg`).

    The split is that of the folders train, val and select where `root` has them (`split_rule` 'given'), else all rows are
    training (`split_rule` 'none'). The data set is called `name`, or like the folder.
    """
    top = require_folder(Path(root), "Pass the folder that holds the images or a folder for each class.")
    apart = None if masks is None else Path(masks).resolve()
    given = _given_parts(top, apart)
    images = {part or "train": _labelled(top / part if part else top, apart) for part in (given or [""])}
    if masks is None:
        _refuse_masks(images)
    else:
        images = {part: [(path, label) for path, label in found if not _beside(path)] for part, found in images.items()}
    _say_left_out(top, apart)
    if not any(images.values()):
        raise RequestError(f"{top} holds no image, and none of its folders does. Images end in {', '.join(sorted(SUFFIXES))}.")
    classes = sorted({label for found in images.values() for _, label in found if label is not None})
    found_masks = _Masks(Path(masks)) if masks is not None else None
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
        raise RequestError(f"no mask in {masks} has the name of an image: for a.jpg it is a.png, a_segmentation.png or a_mask.png.")
    called = Path(os.path.abspath(top)).name or "folder"
    return Manifest.from_records(
        records, classes, source=f"folder {called}", split_rule="given" if given else "none", name=called if name is None else name
    )


def _subfolders(folder: Path, apart: Path | None = None) -> list[Path]:
    """The folders in a folder, sorted; without hidden ones and the one that holds the masks."""
    inside = (path for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))
    return sorted(path for path in inside if apart is None or path.resolve() != apart)


def _given_parts(top: Path, apart: Path | None) -> list[str]:
    """The parts of a split that comes as folders; half of one is refused, since a part is not a class."""
    names = {folder.name for folder in _subfolders(top, apart)}
    if not {name.lower() for name in names} & _PARTS:
        return []
    if names <= set(SPLITS):
        return [name for name in SPLITS if name in names]
    raise RequestError(
        f"{top} has the folders {listed(sorted(names), 6)}: some of them name a part of a split. Either all are among "
        f"{', '.join(SPLITS)}, with a folder for each class in them, or each is a class. Rename them, or use `mtb data csv`."
    )


def _beside(path: Path) -> bool:
    """Whether a file has the name of a mask of an image that lies beside it: `a_mask.png` and `a.jpg`."""
    stems = [path.stem.removesuffix(ending) for ending in MASK_ENDINGS if ending and path.stem.endswith(ending)]
    return any(path.with_name(stem + suffix).exists() for stem in stems for suffix in SUFFIXES)


def _refuse_masks(images: dict[str, list[tuple[Path, str | None]]]) -> None:
    """Masks that would be taken for images, or their folder for a class."""
    found = [(path, label) for some in images.values() for path, label in some]
    folders = sorted({label for _, label in found if label is not None and label.lower() in _MASK_FOLDERS})
    if folders:
        raise RequestError(f"the folder {folders[0]} would become a class. Name it with --masks, or move it away.")
    if masks := [path for path, _ in found if _beside(path)]:
        raise RequestError(
            f"{listed([path.name for path in masks], 3)} beside an image of that name: masks. "
            "Name their folder with --masks (it may be the folder of the images)."
        )


def _say_left_out(top: Path, apart: Path | None) -> None:
    files = (path for path in _below(top, apart) if path.is_file() and path.suffix.lower() not in SUFFIXES)
    kinds = Counter(path.suffix or path.name for path in files)
    if kinds:
        counted = ", ".join(f"{number} {kind}" for kind, number in sorted(kinds.items()))
        say(f"left out, since they are no images that are read here: {counted}.")


def _labelled(folder: Path, apart: Path | None) -> list[tuple[Path, str | None]]:
    loose = image_files(folder)
    inside: list[tuple[Path, str | None]] = [
        (path, sub.name) for sub in _subfolders(folder, apart) for path in _below(sub, apart) if _is_image(path)
    ]
    if loose and inside:
        raise RequestError(
            f"{folder} holds both loose images ({listed([path.name for path in loose], 3)}) and class folders. "
            "Move the loose ones into the folder of their class, or away."
        )
    return inside or [(path, None) for path in loose]


class _Masks:
    """Mask files by the stem of the image that they belong to."""

    def __init__(self, folder: Path) -> None:
        require_folder(folder, "Pass the folder that holds the masks.")
        self.folder = folder
        self.by_stem: dict[str, list[Path]] = {}
        for path in (path for path in _below(folder) if _is_image(path)):
            for ending in MASK_ENDINGS:
                if path.stem.endswith(ending):
                    self.by_stem.setdefault(path.stem.removesuffix(ending), []).append(path)

    def of(self, image: Path) -> str | None:
        found = self.by_stem.get(image.stem, [])
        found = [path for path in found if path != image]
        same_class = [path for path in found if path.parent.name == image.parent.name] or found
        if len(same_class) > 1:
            names = listed([path.relative_to(self.folder).as_posix() for path in same_class], 3)
            raise RequestError(f"{image.name} has several masks in {self.folder}: {names}. Leave one.")
        return str(same_class[0]) if same_class else None


def _below(folder: Path, apart: Path | None = None) -> Iterator[Path]:
    """The files in a folder and in all that lie in it, in order; hidden ones are left out."""
    yield from sorted(path for path in folder.iterdir() if not path.is_dir() and not path.name.startswith("."))
    for sub in _subfolders(folder, apart):
        if not sub.is_symlink():  # it may lead back here
            yield from _below(sub, apart)
