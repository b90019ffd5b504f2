"""What makes an image hard, measured on its pixels with simple rules: skin tone, hair, dark corners, position.

The strata of an external validation. Every function is pure: an RGB array [H, W, 3] in [0, 1] and a mask [H, W] in, a number out.
The rules are coarse by intent, so that anyone can check them; `METHODS` states each in a sentence.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from scipy import ndimage

Picture = NDArray[np.floating]
Mask = NDArray[np.bool_]
SIDE = 256
"""Longer side in pixels at which an image is measured."""
_MARGIN = 0.04
"""The lesion is grown by this share of the longer side before skin is measured around it."""
_REC709 = np.array([0.2126, 0.7152, 0.0722], np.float32)

SKIN_TONES = ("very light", "light", "intermediate", "tan", "brown", "dark")
_ITA_EDGES = (55.0, 41.0, 28.0, 10.0, -30.0)
HAIR = ("none", "some", "dense")
_HAIR_EDGES = (0.005, 0.03)
POSITIONS = ("centered", "off-center", "far off-center")
_POSITION_EDGES = (0.08, 0.16)
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

    Attributes:
        position: Distance of the lesion's centroid from the center, in image diagonals.
        ita: Individual typology angle of the surrounding skin, in degrees.
        hair: Share of hair-like pixels outside the lesion.
        dark_corners: Number of dark corners, 0 to 4.
    """

    position: float
    ita: float
    hair: float
    dark_corners: int

    def strata(self) -> dict[str, str | None]:
        """The stratum of each property by name; None where it was not measured."""
        return {
            "position": _stratum(self.position, _POSITION_EDGES, POSITIONS),
            "skin tone": _stratum(-self.ita, tuple(-edge for edge in _ITA_EDGES), SKIN_TONES),
            "hair": _stratum(self.hair, _HAIR_EDGES, HAIR),
            "dark corners": "dark corners" if self.dark_corners >= 2 else "no dark corners",
        }


STRATA = {
    "position": POSITIONS,
    "skin tone": SKIN_TONES,
    "hair": HAIR,
    "dark corners": ("no dark corners", "dark corners"),
}
"""The strata of each property, in the order of tables."""


def measure(image: Image.Image, mask: Image.Image | None) -> Appearance:
    """Measure an image, reduced to `SIDE` pixels, with its lesion mask if there is one."""
    pixels, lesion = _reduced(image, mask)
    found = lesion is not None and bool(lesion.any())
    outside = ~dark_frame(pixels) if lesion is None or not found else around(lesion) & ~dark_frame(pixels)
    return Appearance(
        position(lesion) if lesion is not None and found else np.nan,
        skin_tone(pixels, outside) if found else np.nan,
        hair(pixels, outside),
        dark_corners(pixels),
    )


def _reduced(image: Image.Image, mask: Image.Image | None) -> tuple[Picture, Mask | None]:
    """Both with a longer side of `SIDE` pixels."""
    scale = SIDE / max(image.size)
    size = (max(1, round(image.width * scale)), max(1, round(image.height * scale)))
    pixels = np.asarray(image.convert("RGB").resize(size, Image.Resampling.BILINEAR), np.float32) / 255
    lesion = None if mask is None else np.asarray(mask.convert("L").resize(size, Image.Resampling.BILINEAR)) > 127
    return pixels, lesion


def around(lesion: Mask) -> Mask:
    """The pixels outside the lesion and a margin around it."""
    return ~ndimage.binary_dilation(lesion, iterations=max(1, round(_MARGIN * max(lesion.shape))))


def dark_frame(picture: Picture) -> Mask:
    """The black frame of the lens: dark regions that touch the border, with a margin."""
    dark, _ = ndimage.label(_gray(picture) < 0.15)
    edges = np.unique(np.concatenate([dark[0], dark[-1], dark[:, 0], dark[:, -1]]))
    return np.asarray(ndimage.binary_dilation(np.isin(dark, edges[edges > 0]), iterations=6))


def position(lesion: Mask) -> float:
    """Distance of the lesion's centroid from the image center, in image diagonals."""
    rows, columns = np.nonzero(lesion)
    h, w = lesion.shape
    return float(np.hypot(rows.mean() - (h - 1) / 2, columns.mean() - (w - 1) / 2) / np.hypot(h, w))


def skin_tone(picture: Picture, skin: Mask) -> float:
    """Individual typology angle in degrees: the median over the pixels of `skin` that are no hair; NaN without any."""
    clear = skin & ~_thin(picture)
    if not clear.any():
        return float("nan")
    lightness, yellow = _lab(picture[clear])
    # atan2 and not a quotient: b* may be 0 or negative in bluish light.
    return float(np.median(np.degrees(np.arctan2(lightness - 50, np.maximum(yellow, 1e-6)))))


def hair(picture: Picture, outside: Mask) -> float:
    """Share of the pixels of `outside` that are in dark, thin and long structures; NaN without any."""
    return float(_thin(picture)[outside].mean()) if outside.any() else float("nan")


def dark_corners(picture: Picture) -> int:
    """Corners that are much darker than the middle of the image."""
    gray = _gray(picture)
    h, w = gray.shape
    side = max(1, round(0.08 * min(h, w)))
    middle = np.median(gray[h // 4 : h - h // 4, w // 4 : w - w // 4])
    corners = (gray[:side, :side], gray[:side, -side:], gray[-side:, :side], gray[-side:, -side:])
    return sum(bool(corner.mean() < 0.35 * middle) for corner in corners)


def _thin(picture: Picture, length: int = 11, depth: float = 0.12, long: int = 16) -> Mask:
    """Dark thin structures: a closing along one of four lines fills them, and their components are long."""
    gray = _gray(picture)
    lines = [np.ones((1, length), bool), np.ones((length, 1), bool), np.eye(length, dtype=bool), np.eye(length, dtype=bool)[::-1]]
    filled = np.max([ndimage.grey_closing(gray, footprint=line) for line in lines], 0) - gray
    labels, count = ndimage.label(filled > depth, structure=np.ones((3, 3)))
    if not count:
        return np.zeros(gray.shape, bool)
    areas = np.bincount(labels.ravel(), minlength=count + 1)
    boxes = ndimage.find_objects(labels)
    reach = np.array([0.0, *(np.hypot(*(part.stop - part.start for part in box)) for box in boxes)])
    keep = (reach >= long) & (areas <= 0.35 * reach**2)
    keep[0] = False
    return np.asarray(keep[labels])


def _gray(picture: Picture) -> NDArray[np.float32]:
    return np.asarray(picture @ _REC709, np.float32)


def _lab(pixels: Picture) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """L* and b* (CIELAB, D65) of sRGB pixels [n, 3]."""
    linear = np.where(pixels <= 0.04045, pixels / 12.92, ((pixels + 0.055) / 1.055) ** 2.4).astype(float)
    y = linear @ np.array([0.2126729, 0.7151522, 0.0721750])
    z = linear @ np.array([0.0193339, 0.1191920, 0.9503041]) / 1.08883

    def f(t: NDArray[np.float64]) -> NDArray[np.float64]:
        return np.where(t > (6 / 29) ** 3, np.cbrt(t), t / (3 * (6 / 29) ** 2) + 4 / 29)

    return 116 * f(y) - 16, 200 * (f(y) - f(z))


def _stratum(value: float, edges: tuple[float, ...], names: tuple[str, ...]) -> str | None:
    """The name of the interval that holds a value; an edge belongs to the lower one. None for NaN."""
    return None if np.isnan(value) else names[int(np.searchsorted(edges, value, side="left"))]
