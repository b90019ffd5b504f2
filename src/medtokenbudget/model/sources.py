"""From whatever a user passes (paths, folders, globs, manifests, pictures, arrays) to pictures, one after the other.

Everything is lazy: only the names of one folder and the pictures of the next few batches are in memory.
"""

from __future__ import annotations

import glob
import os
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from medtokenbudget.data import Manifest, decode_image, decode_mask, patch_labels
from medtokenbudget.data.images import require_lesion_values
from medtokenbudget.data.masks import mask_of
from medtokenbudget.data.readers import files_below, is_image, kind_of, no_images, report_skipped
from medtokenbudget.errors import MedTokenBudgetError, RequestError

MANIFEST_SUFFIX = ".parquet"
_PLAIN_MODES = ("RGB", "L", "1", "CMYK", "YCbCr")


@dataclass(frozen=True)
class Source:
    """One image to predict: its name, what to open, and the path of its mask if it has one."""

    name: str
    value: Any
    mask: Path | None = None

    def open(self) -> Image.Image:
        """Open the picture in RGB; the error for a file that cannot be read names it."""
        return open_picture(self.value, self.name)


@dataclass(frozen=True)
class Failure:
    """An image that could not be read, and the reason.

    `routed` is True if only its mask could not be used: the image itself has an answer, which comes before this.
    """

    name: str
    reason: str
    routed: bool = False


def open_picture(value: Any, name: str = "image") -> Image.Image:
    """A path, the bytes of a file, a Pillow picture or a uint8 array [H, W] or [H, W, 3] as an RGB picture."""
    if isinstance(value, Source):
        return value.open()
    if isinstance(value, Image.Image):
        return _plain(value, name)
    if isinstance(value, (str, os.PathLike)):
        return decode_image(Path(value))
    if isinstance(value, (bytes, bytearray)):
        return decode_image(bytes(value))
    return picture_of_array(np.asarray(value), name)


def open_mask(value: Any) -> Image.Image | None:
    """A lesion mask in gray (0 to 255) from a path, bytes, a Pillow picture, or a bool or uint8 array [H, W]; None stays None."""
    if value is None:
        return None
    if isinstance(value, Image.Image):
        require_lesion_values("The mask", value)
        return value
    if isinstance(value, (str, os.PathLike)):
        return decode_mask(Path(value))
    if isinstance(value, (bytes, bytearray)):
        return decode_mask(bytes(value))
    array = np.asarray(value)
    if array.dtype == bool:
        array = array.astype(np.uint8) * 255
    picture = picture_of_array(array, "mask").convert("L")
    require_lesion_values("The mask", picture)
    return picture


def _plain(picture: Image.Image, name: str) -> Image.Image:
    if picture.mode not in _PLAIN_MODES:
        raise RequestError(f"{name}: a picture of mode {picture.mode} cannot be converted to RGB unambiguously. Convert it first.")
    return picture if picture.mode == "RGB" else picture.convert("RGB")


def picture_of_array(array: np.ndarray, name: str = "array") -> Image.Image:
    """A uint8 array [H, W], [H, W, 1] or [H, W, 3] as an RGB picture. Floats are rejected because their range is unknown."""
    if array.ndim == 3 and array.shape[2] == 1:
        array = array[:, :, 0]
    if array.dtype != np.uint8 or array.ndim not in (2, 3) or (array.ndim == 3 and array.shape[2] != 3):
        raise RequestError(
            f"{name}: an array must be uint8 [H, W] or [H, W, 3] with values 0 to 255, got {array.dtype} {list(array.shape)}."
        )
    return Image.fromarray(np.ascontiguousarray(array)).convert("RGB")


def expand(images: Any) -> Iterator[Source]:
    """Sources of one item or of an iterable of items: a path, folder, glob, manifest, picture, uint8 array or bytes."""
    for number, item in enumerate(_items(images)):
        if isinstance(item, Source):
            yield item
        elif isinstance(item, (str, os.PathLike)):
            yield from _of_path(os.fspath(item))
        elif isinstance(item, Manifest):
            yield from _of_manifest(item)
        else:
            yield Source(f"image {number}", item)


def _items(images: Any) -> Iterable[Any]:
    if isinstance(images, (str, os.PathLike, Image.Image, bytes, bytearray, Manifest, Source)):
        return (images,)
    if isinstance(images, torch.Tensor):
        images = images.numpy(force=True)
    if isinstance(images, np.ndarray):
        # [B, H, W, 3] is a list of pictures, [H, W, 3] is one.
        return images if images.ndim == 4 else (images,)
    return images


def _of_path(text: str) -> Iterator[Source]:
    path = Path(text)
    if path.is_dir():
        yield from _of_folder(path)
    elif path.suffix.lower() == MANIFEST_SUFFIX and path.exists():
        yield from _of_manifest(Manifest.read(path))
    elif not path.exists() and glob.has_magic(text):
        matches = sorted(glob.iglob(text, recursive=True))
        if not matches:
            raise RequestError(f"No file matches '{text}'.")
        for match in matches:
            yield from _of_path(match)
    else:
        # A missing file is reported with the failures, like a damaged one.
        yield Source(text, path)


def _of_folder(folder: Path) -> Iterator[Source]:
    """The images that `mtb data folder` would find; other files are counted and reported in one line."""
    found = False
    skipped: Counter[str] = Counter()
    for path in files_below(folder):
        if is_image(path):
            found = True
            yield Source(str(path), path)
        else:
            skipped[kind_of(path)] += 1
    report_skipped(folder, skipped)
    if not found:
        raise no_images(folder)


def _of_manifest(manifest: Manifest) -> Iterator[Source]:
    for row, image_id in enumerate(manifest.ids):
        yield Source(image_id, manifest.image_path(row), manifest.mask_path(row))


@dataclass(frozen=True)
class Prepared:
    """An image that is ready for the backbone.

    Attributes:
        pixels: What the backbone reads.
        lesion: bool [N], the lesion patches of its mask, if they were asked for and the mask could be read.
        fault: Why the mask could not be used.
    """

    pixels: np.ndarray
    lesion: np.ndarray | None = None
    fault: str | None = None


def prepared(
    sources: Iterable[Source],
    prepare: Callable[[Image.Image], np.ndarray],
    workers: int = 2,
    ahead: int = 32,
    grid: tuple[int, int] | None = None,
) -> Iterator[tuple[Source, Prepared | MedTokenBudgetError]]:
    """Apply `prepare` (of a backbone) to each picture, in order, in threads that work at most `ahead` images in advance.

    Only the small prepared arrays are kept, never the decoded pictures. An error takes the place of its image. With a `grid` of
    patches the masks are read too.
    """

    def work(source: Source) -> tuple[Source, Prepared | MedTokenBudgetError]:
        try:
            _require_utf8(source.name)
            picture = source.open()
            pixels = prepare(picture)
        except RequestError as error:
            return source, error
        if grid is None or source.mask is None:
            return source, Prepared(pixels)
        try:
            return source, Prepared(pixels, patch_labels(mask_of(picture.size, source.mask), grid))
        except RequestError as error:
            return source, Prepared(pixels, fault=str(error))

    yield from _in_order(sources, work, workers, ahead)


def _require_utf8(name: str) -> None:
    try:
        name.encode()
    except UnicodeEncodeError:
        shown = name.encode("utf-8", "backslashreplace").decode()
        raise RequestError(f"The file name {shown} is not valid UTF-8, so no table can name it. Rename the file.") from None


def _in_order(items: Iterable[Any], function: Callable[[Any], Any], workers: int, ahead: int) -> Iterator[Any]:
    waiting: deque[Future[Any]] = deque()
    with ThreadPoolExecutor(max_workers=max(1, workers)) as pool:
        try:
            for item in items:
                waiting.append(pool.submit(function, item))
                if len(waiting) >= ahead:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()
