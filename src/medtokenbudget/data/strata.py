"""What makes an image hard, measured on its pixels with simple rules: skin tone, hair, dark corners, position.

The strata of an external validation. Every function is pure: an RGB array [H, W, 3] in [0, 1] and a mask [H, W] in, a number out.
The rules are coarse by intent, so that anyone can check them; `METHODS` states each in a sentence.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from PIL import Image
from scipy import ndimage

from medtokenbudget.data.manifest import Manifest
from medtokenbudget.errors import RequestError, UnknownNameError

Picture = NDArray[np.floating]
Mask = NDArray[np.bool_]
SIDE = 256
"""Longer side in pixels at which an image is measured."""
_MARGIN = 0.04
"""The lesion is grown by this share of the longer side before skin is measured around it."""
_LINE, _LONG, _DARKER = 11, 16, 0.12
"""Hair, at this size: narrower than a line of 11 pixels, at least 16 pixels long, and darker than its surroundings by 0.12."""
_REC709 = np.array([0.2126, 0.7152, 0.0722], np.float32)

STRATA = {
    "position": ("centered", "off-center", "far off-center"),
    "skin tone": ("very light", "light", "intermediate", "tan", "brown", "dark"),
    "hair": ("none", "some", "dense"),
    "dark corners": ("no dark corners", "dark corners"),
}
"""The strata of each property, in the order of tables."""
# Upper edges of all strata but the last; an edge belongs to the lower one. Darker skin has a smaller angle: its negative is used.
_EDGES = {"position": (0.08, 0.16), "skin tone": (-55, -41, -28, -10, 30), "hair": (0.005, 0.03), "dark corners": (1,)}
METHODS = {
    "position": "Distance of the lesion's centroid from the image center, in image diagonals: up to 0.08, up to 0.16, more.",
    "skin tone": "Individual typology angle, arctan((L* - 50) / b*) in degrees, the median over the skin around the lesion without "
    "hair and dark frame; above 55 very light, 41 light, 28 intermediate, 10 tan, -30 brown, else dark. Lighting and the camera "
    "shift it, so it orders the images of one source better than it names a skin type. Needs a mask.",
    "hair": "Share of the pixels outside the lesion in dark, thin, elongated structures (black-hat filter of 11 pixels at 256, "
    "components at least 16 pixels long): up to 0.5%, up to 3%, more. Rulers and pigment networks outside the mask count too.",
    "dark corners": "At least two corners (squares of 8% of the side) darker than 35% of the image's middle.",
}
"""How each stratum is measured; lesion size and class come from masks and labels."""


@dataclass(frozen=True)
class Appearance:
    """What was measured on one image; NaN where a mask is needed and there is none.

    `position` is the distance of the lesion's centroid from the center in image diagonals, `ita` the individual typology angle of
    the surrounding skin in degrees, `hair` the share of hair-like pixels outside the lesion.
    """

    position: float
    ita: float
    hair: float
    dark_corners: int

    def strata(self) -> dict[str, str | None]:
        values = {"position": self.position, "skin tone": -self.ita, "hair": self.hair, "dark corners": self.dark_corners}
        return {
            name: None if np.isnan(value) else STRATA[name][int(np.searchsorted(_EDGES[name], value, side="left"))]
            for name, value in values.items()
        }


MOST_VALUES = 12
"""Different values of a column that are strata of their own; a column with more numbers is cut into quarters."""


def column_strata(manifest: Manifest, names: Sequence[str]) -> dict[str, list[str | None]]:
    """Name the stratum of each image by columns of a manifest: 'NAME (column)' -> one stratum or None per row.

    The values of a column are its strata; of a column with many different numbers, its quarters are.
    """
    strata: dict[str, list[str | None]] = {}
    for name in names:
        if name not in manifest.further:
            raise UnknownNameError.of("column", name, manifest.further, "of the manifest (add it with `columns`)")
        values = manifest.rows[name]
        known = values.dropna()
        if known.nunique() > MOST_VALUES:
            numbers = pd.to_numeric(known, errors="coerce")
            if numbers.isna().any():
                raise RequestError(
                    f"Column `{name}` has {known.nunique():,} different values, but at most {MOST_VALUES} can be strata unless "
                    "all are numbers. Join a column with fewer values."
                )
            quarter = np.searchsorted(np.quantile(numbers, (0.25, 0.5, 0.75)), numbers, side="left")
            spans = numbers.groupby(quarter).agg(["min", "max"])
            names_of = {q: f"quarter {q + 1}, {low:g} to {high:g}" for q, low, high in spans.itertuples()}
            values = pd.Series([names_of[q] for q in quarter], index=known.index).reindex(values.index)
        strata[f"{name} (column)"] = [None if pd.isna(value) else str(value) for value in values]
    return strata


def stratum_order(name: str, values: Iterable[str]) -> list[str]:
    """Order the strata of a property: as in `STRATA`, else numbers by size before words by name."""

    def key(value: str) -> tuple[bool, float, str]:
        try:
            return False, float(value), value
        except ValueError:
            return True, 0.0, value

    return list(STRATA.get(name) or sorted(set(values), key=key))


def measure(image: Image.Image, mask: Image.Image | None) -> Appearance:
    """Measure an image, reduced to `SIDE` pixels, with its lesion mask if there is one."""
    scale = SIDE / max(image.size)
    size = (max(1, round(image.width * scale)), max(1, round(image.height * scale)))
    pixels = np.asarray(image.convert("RGB").resize(size, Image.Resampling.BILINEAR), np.float32) / 255
    outside, thin = ~dark_frame(pixels), thin_structures(pixels)
    center_distance = tone = hair = float("nan")
    if mask is not None:
        lesion = np.asarray(mask.convert("L").resize(size, Image.Resampling.BILINEAR)) > 127
        if lesion.any():
            outside &= around(lesion)
            center_distance, tone = position(lesion), skin_tone(pixels, outside & ~thin)
    if outside.any():
        hair = float(thin[outside].mean())
    return Appearance(center_distance, tone, hair, dark_corners(pixels))


def around(lesion: Mask) -> Mask:
    return ~ndimage.binary_dilation(lesion, iterations=max(1, round(_MARGIN * max(lesion.shape))))


def dark_frame(picture: Picture) -> Mask:
    """Mark the black frame of the lens: dark regions that touch the border, with a margin."""
    dark, _ = ndimage.label(_gray(picture) < 0.15)
    edges = np.unique(np.concatenate([dark[0], dark[-1], dark[:, 0], dark[:, -1]]))
    return np.asarray(ndimage.binary_dilation(np.isin(dark, edges[edges > 0]), iterations=6))


def position(lesion: Mask) -> float:
    """Measure the distance of the lesion's centroid from the image center, in image diagonals."""
    rows, columns = np.nonzero(lesion)
    h, w = lesion.shape
    return float(np.hypot(rows.mean() - (h - 1) / 2, columns.mean() - (w - 1) / 2) / np.hypot(h, w))


def skin_tone(picture: Picture, skin: Mask) -> float:
    """Measure the individual typology angle in degrees: the median over the pixels of `skin`; NaN without any."""
    if not skin.any():
        return float("nan")
    lightness, yellow = _lab(picture[skin])
    # atan2 and not a quotient: b* may be 0 or negative in bluish light.
    return float(np.median(np.degrees(np.arctan2(lightness - 50, np.maximum(yellow, 1e-6)))))


def dark_corners(picture: Picture) -> int:
    gray = _gray(picture)
    h, w = gray.shape
    side = max(1, round(0.08 * min(h, w)))
    middle = np.median(gray[h // 4 : h - h // 4, w // 4 : w - w // 4])
    corners = (gray[:side, :side], gray[:side, -side:], gray[-side:, :side], gray[-side:, -side:])
    return sum(bool(corner.mean() < 0.35 * middle) for corner in corners)


def thin_structures(picture: Picture) -> Mask:
    """Mark what is dark, thin and long, such as hair: a closing along one of four lines fills it, and its components are long."""
    gray = _gray(picture)
    diagonal = np.eye(_LINE, dtype=bool)
    lines = [np.ones((1, _LINE), bool), np.ones((_LINE, 1), bool), diagonal, diagonal[::-1]]
    # A closing fills a dark line unless the line runs along the footprint, so the largest of four directions counts.
    filled = np.max([ndimage.grey_closing(gray, footprint=line) for line in lines], 0) - gray
    labels, count = ndimage.label(filled > _DARKER, structure=np.ones((3, 3)))
    if not count:
        return np.zeros(gray.shape, bool)
    areas = np.bincount(labels.ravel(), minlength=count + 1)
    boxes = ndimage.find_objects(labels)
    reach = np.array([0.0, *(np.hypot(*(part.stop - part.start for part in box)) for box in boxes)])
    # A filled disc has pi / 8 = 0.39 of the squared diagonal of its box, a hair far less.
    keep = (reach >= _LONG) & (areas <= 0.35 * reach**2)
    # Label 0 is everything else.
    keep[0] = False
    return np.asarray(keep[labels])


def _gray(picture: Picture) -> NDArray[np.float32]:
    return np.asarray(picture @ _REC709, np.float32)


def _lab(pixels: Picture) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    # sRGB to linear light, then to Y and Z of CIE (D65); X is only needed for a*.
    linear = np.where(pixels <= 0.04045, pixels / 12.92, ((pixels + 0.055) / 1.055) ** 2.4).astype(float)
    y = linear @ np.array([0.2126729, 0.7151522, 0.0721750])
    z = linear @ np.array([0.0193339, 0.1191920, 0.9503041]) / 1.08883

    def f(t: NDArray[np.float64]) -> NDArray[np.float64]:
        # The cube root of CIELAB, which is linear near black.
        return np.where(t > (6 / 29) ** 3, np.cbrt(t), t / (3 * (6 / 29) ** 2) + 4 / 29)

    return 116 * f(y) - 16, 200 * (f(y) - f(z))
