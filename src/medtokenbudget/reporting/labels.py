"""Names beside the points and at the ends of the lines of a figure, placed so that they do not overlap."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from medtokenbudget.reporting.looks import look

_SIZE = 10.5
_CHARACTER = 0.63
"""Average width of a bold character as a share of the font size."""


def end_labels(axes: Axes, ends: dict[str, float], x: float, bold: Sequence[str] = ()) -> None:
    """Writes names at the right end of lines and moves them apart so that none overlaps another."""
    bottom, top = axes.get_ylim()
    step = 0.062 * (top - bottom)
    placed: list[tuple[str, float]] = []
    for method, y in sorted(ends.items(), key=lambda item: item[1]):
        placed.append((method, max(y, placed[-1][1] + step) if placed else y))
    # First upward; then labels above the axes move down, together with those they would overlap.
    for i in range(len(placed) - 1, -1, -1):
        limit = top if i == len(placed) - 1 else placed[i + 1][1] - step
        placed[i] = (placed[i][0], min(placed[i][1], limit))
    for method, y in placed:
        style = look(method)
        text = f"{style.name} {100 * ends[method]:.1f}"
        axes.text(x, y, text, color=style.color, va="center", fontsize=10.5, fontweight="bold" if method in bold else "normal")


def point_labels(axes: Axes, points: dict[str, tuple[float, float]]) -> None:
    """Writes the name of each method beside its point, on the first free side: right, left, above, below, then further away.

    Args:
        axes: Axes with final limits.
        points: Method -> (x, y) in data coordinates; the first ones get the best places.
    """
    (left, right), (bottom, top) = axes.get_xlim(), axes.get_ylim()
    size = axes.figure.bbox_inches.size if isinstance(axes.figure, Figure) else (1.0, 1.0)
    width, height = (72 * side * share for side, share in zip(size, axes.get_position().size))
    spots = {m: (width * (x - left) / (right - left), height * (y - bottom) / (top - bottom)) for m, (x, y) in points.items()}
    taken = [(x - 6, y - 6, x + 6, y + 6) for x, y in spots.values()]
    for method, (x, y) in spots.items():
        name = look(method).name
        w, h = _CHARACTER * _SIZE * len(name), 1.25 * _SIZE
        free = [b for b in _around(x, y, w, h) if b[0] >= 0 and b[2] <= width and b[1] >= 0 and b[3] <= height]
        box_of = next((b for b in free if not any(_overlap(b, other) for other in taken)), (free or _around(x, y, w, h))[0])
        taken.append(box_of)
        at = (left + (right - left) * box_of[0] / width, bottom + (top - bottom) * (box_of[1] + box_of[3]) / 2 / height)
        axes.text(*at, name, color=look(method).color, va="center", fontsize=_SIZE, fontweight="bold")


_Box = tuple[float, float, float, float]


def _around(x: float, y: float, w: float, h: float) -> list[_Box]:
    """Boxes (left, bottom, right, top) for a text of w x h points near (x, y), the nearest first."""
    boxes = []
    for step in range(5):
        up, down = y + 7 + step * h, y - 7 - (step + 1) * h
        if step == 0:
            boxes += [(x + 8, y - h / 2, x + 8 + w, y + h / 2), (x - 8 - w, y - h / 2, x - 8, y + h / 2)]
        boxes += [
            (x + 4, up, x + 4 + w, up + h),
            (x - 4 - w, up, x - 4, up + h),
            (x + 4, down, x + 4 + w, down + h),
            (x - 4 - w, down, x - 4, down + h),
        ]
    return boxes


def _overlap(a: _Box, b: _Box) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]
