"""A ruler in the picture: thin dark ticks side by side, equally far apart, along a line or an arc.

Apart from the other rules of `appearance`, because it looks for a pattern and needs more pixels. Hairs are dark and thin too, but
hardly ever five of them lie parallel, at equal distances and across the line that joins them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import ndimage
from scipy.spatial import cKDTree

SIDE = 384
"""Longer side in pixels at which rulers are looked for."""
TICKS = 5
"""A row of so many ticks is a ruler."""
_DIRECTIONS = 18
_WIDTH, _DEPTH = 5, 0.06
"""A tick is narrower than this many pixels, and darker than its sides by this share of white."""
_SHORTEST, _LONGEST = 3.5, 36.0
_NEAREST, _FARTHEST = 3.5, 34.0
_APART = 0.15
"""How far a tick may be from its place, in distances between ticks; one pixel is always allowed."""
_TURN = 0.35
"""Largest sine of the angle between ticks that are side by side."""


@dataclass(frozen=True)
class _Ticks:
    """Center (x, y) [n, 2], direction in radians [n] and length in pixels [n] of dark strokes."""

    center: NDArray[np.float64]
    axis: NDArray[np.float64]
    length: NDArray[np.float64]


def longest_row(gray: NDArray[np.float32], outside: NDArray[np.bool_]) -> int:
    """The most ticks in a row.

    Args:
        gray: Picture [H, W] in [0, 1], its longer side `SIDE` pixels.
        outside: Where to look [H, W]: not in the lesion, whose dots and streaks may be regular.
    """
    return max(_longest(_ticks(gray, outside, np.pi * k / _DIRECTIONS)) for k in range(_DIRECTIONS))


def _ticks(gray: NDArray[np.float32], outside: NDArray[np.bool_], angle: float) -> _Ticks:
    """Short dark strokes across the direction `angle`. A closing along it fills them, and not the line that joins them."""
    filled = ndimage.grey_closing(gray, footprint=_line(angle)) - gray
    labels, count = ndimage.label((filled > _DEPTH) & outside, structure=np.ones((3, 3)))
    places = np.flatnonzero(labels)
    which = labels.ravel()[places] - 1
    y, x = (values.astype(float) for values in np.divmod(places, gray.shape[1]))
    area = np.bincount(which, minlength=count).astype(float)

    def mean(values: NDArray[np.float64]) -> NDArray[np.float64]:
        return np.asarray(np.bincount(which, values, minlength=count) / area)

    cx, cy = mean(x), mean(y)
    # The box with these second moments; a pixel has a width, too.
    xx, yy, xy = mean(x * x) - cx**2 + 1 / 12, mean(y * y) - cy**2 + 1 / 12, mean(x * y) - cx * cy
    root = np.sqrt(((xx - yy) / 2) ** 2 + xy**2)
    length = np.sqrt(12 * ((xx + yy) / 2 + root))
    width = np.sqrt(12 * np.maximum((xx + yy) / 2 - root, 1 / 12))
    axis = np.arctan2(2 * xy, xx - yy) / 2
    across = np.abs(np.sin(axis - angle)) > np.cos(np.pi / 6)
    use = across & (length >= _SHORTEST) & (length <= _LONGEST) & (length >= 1.8 * width)
    return _Ticks(np.stack([cx, cy], 1)[use], axis[use], length[use])


def _longest(ticks: _Ticks) -> int:
    """The longest row that begins with any two neighbors and goes on in their direction, bending with the ticks."""
    if len(ticks.axis) < TICKS:
        return 0
    tree = cKDTree(ticks.center)
    best = 0
    for pair in tree.query_pairs(_FARTHEST):
        for first, second in (pair, pair[::-1]):
            best = max(best, _row(ticks, tree, first, second))
    return best


def _row(ticks: _Ticks, tree: cKDTree, first: int, second: int) -> int:
    step = ticks.center[second] - ticks.center[first]
    distance = float(np.hypot(*step))
    along = abs(np.cos(ticks.axis[first] - np.arctan2(step[1], step[0])))
    if distance < _NEAREST or along > 0.5 or not _alike(ticks, first, second):
        return 0
    row = [first, second]
    while True:
        away, following = tree.query(ticks.center[row[-1]] + step)
        if away > max(1.0, _APART * distance) or following in row or not _alike(ticks, row[-1], following):
            return len(row)
        step = (step + ticks.center[following] - ticks.center[row[-1]]) / 2
        row.append(following)


def _alike(ticks: _Ticks, one: int, other: int) -> bool:
    """Whether two ticks are parallel and of like length; every fifth may be longer."""
    longer = ticks.length[one] / ticks.length[other]
    return bool(abs(np.sin(ticks.axis[one] - ticks.axis[other])) <= _TURN and 1 / 3 < longer < 3)


def _line(angle: float) -> NDArray[np.bool_]:
    """A line of `_WIDTH` pixels through the middle of a square."""
    half = _WIDTH // 2
    t = np.linspace(-half, half, 4 * _WIDTH + 1)
    line = np.zeros((2 * half + 1, 2 * half + 1), bool)
    line[np.rint(half + t * np.sin(angle)).astype(int), np.rint(half + t * np.cos(angle)).astype(int)] = True
    return line
