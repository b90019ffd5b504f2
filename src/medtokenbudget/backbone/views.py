"""Views of an image and its mask: flips, the dihedral group, drawn flips and turns in other colors, and off-center crops.

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
from PIL import Image, ImageEnhance

from medtokenbudget.errors import RequestError, UnknownNameError

Box = tuple[float, float, float, float]
IDENTITY = "identity"
OFF_CENTER = "off-center"
AUGMENTED = "augmented"
COLOR = 0.2
"""Largest change of brightness, contrast and saturation of an augmented view, relative to the image."""
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
    "augmented": (IDENTITY, AUGMENTED),
}


class ViewError(RequestError):
    """An image does not have the requested view."""


def views_of(name: str, split: str | None, has_mask: bool, crops: int = 1) -> Sequence[str]:
    """List the views of an image that the set `name` has.

    All but one off-center crop are for training images only: those of validation images are evaluated. `crops` is the number of
    off-center or augmented views of a training image.
    """
    further = tuple(f"{name}-{number}" for number in range(2, crops + 1)) if split == "train" else ()
    if name == "off-center":
        return (*SETS[name], *further) if has_mask else SETS["none"]
    if name == "augmented" and split == "train":
        return (*SETS[name], *further)
    return SETS[name] if split == "train" else SETS["none"]


def image_seed(seed: int, image_id: str) -> int:
    """Return the seed of the crops of an image; it does not depend on the other images and their order."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{image_id}".encode()).digest()[:8], "little")


@dataclass(frozen=True)
class Geometry:
    """What a view shows of an image: a box of it (left, top, right, bottom in [0, 1]; None: all of it), then flipped or turned.

    `color` has the factors of brightness, contrast and saturation; a mask has none.
    """

    box: Box | None = None
    turn: str = IDENTITY
    color: tuple[float, float, float] | None = None

    def of(self, picture: Image.Image) -> Image.Image:
        if self.box is not None:
            left, top, right, bottom = _pixels(self.box, *picture.size)
            # Of a tiny picture a box may round to nothing: it has at least one pixel.
            picture = picture.crop((left, top, max(right, left + 1), max(bottom, top + 1)))
        if self.color is not None and picture.mode == "RGB":
            # The order is part of the view: each factor is relative to the picture that the one before it gave.
            for change, factor in zip((ImageEnhance.Brightness, ImageEnhance.Contrast, ImageEnhance.Color), self.color):
                picture = change(picture).enhance(factor)
        return picture if self.turn == IDENTITY else picture.transpose(_TRANSPOSE[self.turn])

    def to_json(self) -> list[Any]:
        color = [] if self.color is None else [list(self.color)]
        return [None if self.box is None else list(self.box), self.turn, *color]

    @staticmethod
    def from_json(value: Sequence[Any]) -> Geometry:
        box, turn, *color = value
        factors = (color[0][0], color[0][1], color[0][2]) if color else None
        return Geometry(None if box is None else (box[0], box[1], box[2], box[3]), turn, factors)


def geometry_of(view: str, mask: Image.Image | None, seed: int) -> Geometry:
    """Return the geometry of a view; drawn views depend on the image's seed, off-center crops also on the mask."""
    if _number(view, AUGMENTED):
        # The name of the view is part of the seed: `augmented-2` is another draw than `augmented`.
        draw = np.random.default_rng(image_seed(seed, view))
        brightness, contrast, saturation = (1 - COLOR + 2 * COLOR * draw.random(3)).tolist()
        return Geometry(None, SETS["dihedral"][int(draw.integers(8))], (brightness, contrast, saturation))
    if not is_off_center(view):
        if view != IDENTITY and view not in _TRANSPOSE:
            raise UnknownNameError.of("view", view, [IDENTITY, OFF_CENTER, AUGMENTED, *_TRANSPOSE])
        return Geometry(None, view)
    if mask is None:
        raise ViewError("An off-center view needs a mask.")
    if view == OFF_CENTER:
        return Geometry(off_center_box(mask, seed))
    seed = image_seed(seed, view)
    return Geometry(off_center_box(mask, seed), SETS["dihedral"][seed % len(SETS["dihedral"])])


def view_order(view: str) -> int:
    """Sort the views of an image: the original, flips and turns, then drawn views by number."""
    if number := _number(view, OFF_CENTER) or _number(view, AUGMENTED):
        return len(_TRANSPOSE) + number
    return 0 if view == IDENTITY else 1 + list(_TRANSPOSE).index(view)


def is_off_center(view: str) -> bool:
    return _number(view, OFF_CENTER) > 0


def _number(view: str, name: str) -> int:
    """Return the number of a drawn view, 1 for `name` and n for `name-n`; 0 for any other view."""
    number = view.removeprefix(name).removeprefix("-")
    return 1 if view == name else int(number) if view == f"{name}-{number}" and number.isdecimal() else 0


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
        # Between centers of pixels (+ 0.5): a lesion in the middle of the crop is at distance 0.
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
    # Shares of the sides, so that a mask of another size than its image is cut at the same place.
    return round(left * width), round(top * height), round(right * width), round(bottom * height)
