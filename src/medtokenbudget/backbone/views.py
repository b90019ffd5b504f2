"""Views of an image and its mask: flips, the dihedral group, and crops that move the lesion off the center.

The first off-center crop of an image, `off-center`, is upright. The next ones, `off-center-2` and so on, exist only for training
images and are also flipped or rotated, since lesions have no up and down.

Pure functions of image, mask and seed, so that a row of a store is the same picture on every machine.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image

from medtokenbudget.errors import RequestError, UnknownNameError

Box = tuple[float, float, float, float]
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
    """An image does not have the requested view."""


def views_of(name: str, split: str | None, has_mask: bool, crops: int = 1) -> Sequence[str]:
    """List the views of an image that the set `name` has.

    Flips and dihedral views are for training images only. Every image with a mask gets an off-center crop, because the center-bias
    study evaluates those of validation images; training images get `crops` of them.
    """
    if name not in SETS:
        raise UnknownNameError.of("set of views", name, SETS)
    if name == "off-center":
        further = range(2, crops + 1) if split == "train" else ()
        return (*SETS[name], *(f"{OFF_CENTER}-{number}" for number in further)) if has_mask else SETS["none"]
    return SETS[name] if split == "train" else SETS["none"]


def image_seed(seed: int, image_id: str) -> int:
    """Return the seed of the crops of an image; it does not depend on the other images and their order."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{image_id}".encode()).digest()[:8], "little")


@dataclass(frozen=True)
class Geometry:
    """What a view shows of an image: a box of it (left, top, right, bottom in [0, 1]; None: all of it), then flipped or turned."""

    box: Box | None = None
    turn: str = IDENTITY

    def of(self, picture: Image.Image) -> Image.Image:
        if self.box is not None:
            left, top, right, bottom = _pixels(self.box, *picture.size)
            picture = picture.crop((left, top, max(right, left + 1), max(bottom, top + 1)))
        return picture if self.turn == IDENTITY else picture.transpose(_TRANSPOSE[self.turn])

    def to_json(self) -> list[Any]:
        return [None if self.box is None else list(self.box), self.turn]

    @staticmethod
    def from_json(value: Sequence[Any]) -> Geometry:
        box, turn = value
        return Geometry(None if box is None else (box[0], box[1], box[2], box[3]), turn)


def geometry_of(view: str, mask: Image.Image | None, seed: int) -> Geometry:
    """Return the geometry of a view; only an off-center crop depends on the mask and on the image's seed."""
    if not is_off_center(view):
        if view != IDENTITY and view not in _TRANSPOSE:
            raise UnknownNameError.of("view", view, [IDENTITY, OFF_CENTER, *_TRANSPOSE])
        return Geometry(None, view)
    if mask is None:
        raise ViewError("An off-center view needs a mask.")
    if view == OFF_CENTER:
        return Geometry(off_center_box(mask, seed))
    seed = image_seed(seed, view)
    return Geometry(off_center_box(mask, seed), SETS["dihedral"][seed % len(SETS["dihedral"])])


def view_order(view: str) -> int:
    """Sort the views of an image: the original, flips and turns, then off-center crops by number."""
    if is_off_center(view):
        return len(_TRANSPOSE) + int(view[len(OFF_CENTER) + 1 :] or 1)
    return 0 if view == IDENTITY else 1 + list(_TRANSPOSE).index(view)


def is_off_center(view: str) -> bool:
    return view == OFF_CENTER or (view.startswith(f"{OFF_CENTER}-") and view[len(OFF_CENTER) + 1 :].isdecimal())


def off_center_box(mask: Image.Image, seed: int) -> Box:
    """Find the crop, of 60 drawn, that holds 60 % of the lesion and shows it farthest off the center.

    Each side of a crop is half to three quarters of that of the image. The distance is measured from the center of the crop to the
    centroid of the lesion inside it, in sides of the crop. Masks larger than 256 pixels are reduced to 256 first.
    """
    lesion = _reduced(mask)
    height, width = lesion.shape
    total = int(lesion.sum())
    if total == 0:
        raise ViewError("An off-center view needs a lesion, but the mask is empty.")
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
        raise ViewError(
            f"None of {TRIES} crops contains {LESION_INSIDE:.0%} of the lesion, because it fills too much of the image."
        )
    return best


def _reduced(mask: Image.Image) -> np.ndarray:
    scale = _SEARCH_SIZE / max(mask.size)
    gray = mask.convert("L")
    if scale < 1:
        gray = gray.resize((max(1, round(gray.width * scale)), max(1, round(gray.height * scale))), Image.Resampling.BILINEAR)
    return np.asarray(gray) > 127


def _pixels(box: Box, width: int, height: int) -> tuple[int, int, int, int]:
    left, top, right, bottom = box
    return round(left * width), round(top * height), round(right * width), round(bottom * height)
