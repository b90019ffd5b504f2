"""The image files of a folder. Its own file because manifests and predictions must find the same files in the same order.

Links are followed, except those that lead back to a folder that is being read or to themselves. Hidden files
and folders are ignored.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

from medtokenbudget.data.decode import SUFFIXES
from medtokenbudget.errors import RequestError
from medtokenbudget.progress import say


def is_image(path: Path) -> bool:
    """Whether a file name has the ending of an image."""
    return path.suffix.lower() in SUFFIXES


def image_files(folder: Path) -> list[Path]:
    """The image files directly in a folder, sorted by name."""
    return [path for path in _entries(folder)[0] if is_image(path)]


def subfolders(folder: Path, ignore: Path | None = None) -> list[Path]:
    """The folders directly in a folder, sorted by name, without the folder `ignore`."""
    return _followed(_entries(folder)[1], ignore, (folder.resolve(),))


def files_below(folder: Path, ignore: Path | None = None) -> Iterator[Path]:
    """All files in a folder and its subfolders, in sorted order, the files of a folder before its subfolders.

    Args:
        folder: Where to start.
        ignore: A folder to leave out, for example the one with the masks.
    """
    yield from _walk(folder, ignore, (folder.resolve(),))


def kind_of(path: Path) -> str:
    """The ending of a file, or its name if it has none; what skipped files are counted by."""
    return path.suffix.lower() or path.name


def report_skipped(folder: Path, kinds: Counter[str]) -> None:
    """Say in one line how many files of a folder are not images, by their kind."""
    if kinds:
        files = "1 file" if kinds.total() == 1 else f"{kinds.total():,} files"
        counted = ", ".join(f"{number:,} {kind}" for kind, number in sorted(kinds.items()))
        say(f"Skipped {files} in {folder} that cannot be read as images: {counted}.")


def no_images(folder: Path) -> RequestError:
    """The error for a folder without images."""
    return RequestError(f"{folder} and its subfolders contain no images. Supported: {', '.join(sorted(SUFFIXES))}.")


def require_folder(folder: Path, advice: str) -> Path:
    """Return `folder`, or raise a RequestError that ends with `advice` if there is no such folder."""
    if not folder.is_dir():
        what = "is a file, not a folder" if folder.exists() else "does not exist"
        raise RequestError(f"{folder} {what}. {advice}")
    return folder


def _entries(folder: Path) -> tuple[list[Path], list[Path]]:
    """The files and the folders in a folder, sorted, without hidden ones."""
    try:
        with os.scandir(folder) as found:
            shown = sorted((entry.name, _is_dir(entry)) for entry in found if not entry.name.startswith("."))
    except OSError as error:
        raise RequestError(f"Cannot read the folder {folder}: {error.strerror or error}.") from None
    return [folder / name for name, is_dir in shown if is_dir is False], [folder / name for name, is_dir in shown if is_dir]


def _is_dir(entry: os.DirEntry[str]) -> bool | None:
    """Whether an entry is a folder; None, with a message, for one that cannot be looked at, such as a link in a circle."""
    try:
        return entry.is_dir()
    except OSError as error:
        _say_skipped(entry.path, error.strerror or str(error))
        return None


@lru_cache
def _say_skipped(path: str, reason: str) -> None:
    """Once: a folder is looked at several times."""
    say(f"Skipped {path}: {reason}.")


def _followed(folders: list[Path], ignore: Path | None, open_folders: tuple[Path, ...]) -> list[Path]:
    """The folders to read: not `ignore`, and no link back to one of the folders that are being read or to one around them."""
    left_out = None if ignore is None else ignore.resolve()
    targets = [(folder, folder.resolve()) for folder in folders]
    return [
        folder
        for folder, target in targets
        if target != left_out and not any(opened.is_relative_to(target) for opened in open_folders)
    ]


def _walk(folder: Path, ignore: Path | None, open_folders: tuple[Path, ...]) -> Iterator[Path]:
    files, folders = _entries(folder)
    yield from files
    for sub in _followed(folders, ignore, open_folders):
        yield from _walk(sub, ignore, (*open_folders, sub.resolve()))
