"""Kvasir v2: one folder for each of its eight classes, no masks. The paper measures only accuracy on it."""

from __future__ import annotations

from pathlib import Path

from medtokenbudget.data.manifest import Manifest
from medtokenbudget.data.splits import paper_split
from medtokenbudget.data.walk import image_files, require_folder
from medtokenbudget.errors import RequestError

NAME = "Kvasir v2"
CLASSES = (
    "dyed-lifted-polyps",
    "dyed-resection-margins",
    "esophagitis",
    "normal-cecum",
    "normal-pylorus",
    "normal-z-line",
    "polyps",
    "ulcerative-colitis",
)


FOLDER = "kvasir-dataset-v2"
"""The folder in the official archive."""


def kvasir_manifest(root: Path | str, *, name: str = NAME) -> Manifest:
    """Make a manifest of Kvasir v2, sorted by class and file name, with the paper's 80/20 split of that order.

    Args:
        root: Folder with the eight class folders, or the folder in which the official archive was unpacked.
        name: Name of the data set.

    Returns:
        The manifest, without masks and groups.

    Raises:
        RequestError: A class folder is missing, or there are no images.
    """
    top = require_folder(Path(root), "Pass the folder that contains the eight class folders of Kvasir v2.")
    if (top / FOLDER).is_dir():
        top = top / FOLDER
    missing = [label for label in CLASSES if not (top / label).is_dir()]
    if missing:
        raise RequestError(f"{top} lacks the class folders {', '.join(missing)}. For other classes, use `mtb data folder`.")
    files = [(path, label) for label in CLASSES for path in image_files(top / label)]
    if not files:
        raise RequestError(f"The class folders in {top} contain no images.")
    records = [
        {"image_id": f"{label}/{path.stem}", "image": str(path), "label": label, "split": split}
        for (path, label), split in zip(files, paper_split(len(files)))
    ]
    return Manifest.from_records(records, CLASSES, source="kvasir v2", split_rule="paper", name=name)
