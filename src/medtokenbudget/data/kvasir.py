"""Kvasir v2: a folder for each of its eight classes, no masks; the paper's auxiliary data set, for accuracy only."""

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
"""What the official archive unpacks to."""


def kvasir_manifest(root: Path | str, *, name: str = NAME) -> Manifest:
    """The images in sorted order (class, then file name) with the paper's 80/20 over that order; no groups are known."""
    top = require_folder(Path(root), "Pass the folder that holds the eight class folders of Kvasir v2.")
    if (top / FOLDER).is_dir():
        top = top / FOLDER
    missing = [label for label in CLASSES if not (top / label).is_dir()]
    if missing:
        raise RequestError(f"{top} lacks the class folders {', '.join(missing)}. For other classes, use `mtb data folder`.")
    files = [(path, label) for label in CLASSES for path in image_files(top / label)]
    if not files:
        raise RequestError(f"the class folders of {top} hold no image.")
    records = [
        {"image_id": f"{label}/{path.stem}", "image": str(path), "label": label, "split": split}
        for (path, label), split in zip(files, paper_split(len(files)))
    ]
    return Manifest.from_records(records, CLASSES, source="kvasir v2", split_rule="paper", name=name)
