"""Views of an image with its mask transformed alike: flips, the dihedral group, and crops that move the lesion off the center.

The first off-center crop of an image, `off-center`, is as upright as the image; the further ones, `off-center-2` and on, are of
training images alone and are also flipped or turned, as the lesion on skin knows no up and down.

Pure functions of image, mask and seed, so that the same row of a store is the same picture on any machine.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
from PIL import Image

from medtokenbudget.errors import RequestError, UnknownNameError

IDENTITY = "identity"
OFF_CENTER = "off-center"
TRIES = 60
LESION_INSIDE = 0.6
SIDES = (0.5, 0.75)
_SEARCH_SIZE = 256
_TRANSPOSE = {
    "hflip": Image.Transpose.FLIP_LEFT_RIGHT,
    "vflip": Image.Transpose.FLIP_TOP_BOTTOM,
    "rot180": Image.Transpose.ROTATE_180,
    "rot90": Image.Transpose.ROTATE_90,
    "rot270": Image.Transpose.ROTATE_270,
    "transpose": Image.Transpose.TRANSPOSE,
    "transverse": Image.Transpose.TRANSVERSE,
}
SETS: dict[str, tuple[str, ...]] = {
    "none": (IDENTITY,),
    "flips": (IDENTITY, "hflip", "vflip", "rot180"),
    "dihedral": (IDENTITY, *_TRANSPOSE),
    "off-center": (IDENTITY, OFF_CENTER),
}


class ViewError(RequestError):
    """This view of this image does not exist."""


def views_of(name: str, split: str | None, has_mask: bool, crops: int = 1) -> Sequence[str]:
    """The views that the set `name` gives an image.

    Flips and dihedral views are for training images alone; an off-center crop is for every image that has a mask, since the
    center-bias study looks at those of validation images, and all `crops` of them are for training images.
    """
    if name not in SETS:
        raise UnknownNameError.of("set of views", name, SETS)
    if name == "off-center":
        further = range(2, crops + 1) if split == "train" else ()
        return (*SETS[name], *(f"{OFF_CENTER}-{number}" for number in further)) if has_mask else SETS["none"]
    return SETS[name] if split == "train" else SETS["none"]


def image_seed(seed: int, image_id: str) -> int:
    """The seed of one image's crops: the same whatever else is in the data set, and in which order."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{image_id}".encode()).digest()[:8], "little")


def apply(image: Image.Image, mask: Image.Image | None, view: str, seed: int) -> tuple[Image.Image, Image.Image | None]:
    """The view of `image` and of its `mask`, which may be of another size but shows the same frame."""
    if view == IDENTITY:
        return image, mask
    if is_off_center(view):
        if mask is None:
            raise ViewError("an off-center view needs a mask.")
        if view != OFF_CENTER:
            seed = image_seed(seed, view)
        box = off_center_box(mask, seed)
        image, mask = _crop(image, box), _crop(mask, box)
        view = IDENTITY if view == OFF_CENTER else SETS["dihedral"][seed % len(SETS["dihedral"])]
        return apply(image, mask, view, seed)
    if view not in _TRANSPOSE:
        raise UnknownNameError.of("view", view, [IDENTITY, OFF_CENTER, *_TRANSPOSE])
    method = _TRANSPOSE[view]
    return image.transpose(method), None if mask is None else mask.transpose(method)


def is_off_center(view: str) -> bool:
    """Whether a view is one of the off-center crops."""
    return view == OFF_CENTER or (view.startswith(f"{OFF_CENTER}-") and view[len(OFF_CENTER) + 1 :].isdecimal())


def off_center_box(mask: Image.Image, seed: int) -> tuple[float, float, float, float]:
    """Left, top, right, bottom in [0, 1] of the crop, of 60 drawn, that holds 60 % of the lesion and shows it farthest off.

    Each side of a crop is half to three quarters of the image's. The distance is that of the center of the lesion inside the
    crop from the crop's center, in sides of the crop. Masks above 256 pixels are searched on a reduction to 256.
    """
    lesion = _reduced(mask)
    height, width = lesion.shape
    total = int(lesion.sum())
    if total == 0:
        raise ViewError("an off-center view needs a lesion, and the mask is empty.")
    best, farthest = None, -1.0
    for draw in np.random.default_rng(seed).random((TRIES, 4)):
        (w, h), (x, y) = SIDES[0] + draw[:2] * (SIDES[1] - SIDES[0]), draw[2:]
        box = ((1 - w) * x, (1 - h) * y, (1 - w) * x + w, (1 - h) * y + h)
        left, top, right, bottom = _pixels(box, width, height)
        inside = lesion[top:bottom, left:right]
        columns, rows = inside.sum(0), inside.sum(1)
        count = int(columns.sum())
        if count < LESION_INSIDE * total:
            continue
        dx = (columns @ (np.arange(right - left) + 0.5)) / count / (right - left) - 0.5
        dy = (rows @ (np.arange(bottom - top) + 0.5)) / count / (bottom - top) - 0.5
        if (distance := float(np.hypot(dx, dy))) > farthest:
            best, farthest = box, distance
    if best is None:
        raise ViewError(f"none of {TRIES} crops holds {LESION_INSIDE:.0%} of the lesion: it fills too much of the image.")
    return best


def _reduced(mask: Image.Image) -> np.ndarray:
    """Lesion pixels, bool, at most 256 on a side."""
    scale = _SEARCH_SIZE / max(mask.size)
    gray = mask.convert("L")
    if scale < 1:
        gray = gray.resize((max(1, round(gray.width * scale)), max(1, round(gray.height * scale))), Image.Resampling.BILINEAR)
    return np.asarray(gray) > 127


def _pixels(box: tuple[float, float, float, float], width: int, height: int) -> tuple[int, int, int, int]:
    left, top, right, bottom = box
    return round(left * width), round(top * height), round(right * width), round(bottom * height)


def _crop(image: Image.Image, box: tuple[float, float, float, float]) -> Image.Image:
    left, top, right, bottom = _pixels(box, *image.size)
    return image.crop((left, top, max(right, left + 1), max(bottom, top + 1)))
