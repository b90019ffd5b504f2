"""Draws `docs/images/method.svg`: the overview of the method, from an image to its kept tokens and their class.

Run `python docs/make_diagram.py` after a change and look at the result. The lesion, the scores and the kept patches are computed,
so that the figure keeps exactly K of its 64 patches and its retention is right.
"""

from __future__ import annotations

import math
from pathlib import Path

SIDE, CELL = 8, 15
GRID = SIDE * CELL
BUDGET = 0.3
INK, FAINT, TEAL, ORANGE, BLUE = "#1c2733", "#8a949e", "#00796b", "#d55e00", "#0072b2"
CENTER = (0.58, 0.46)


def lesion(row: int, column: int) -> bool:
    """Whether the patch is lesion: an ellipse right of the middle."""
    return _distance(row, column) < 1.0


def _distance(row: int, column: int) -> float:
    x, y = (column + 0.5) / SIDE, (row + 0.5) / SIDE
    return math.hypot((x - CENTER[0]) / 0.345, (y - CENTER[1]) / 0.32)


def score(row: int, column: int) -> float:
    """A score map as a trained scorer gives it: high on the lesion, with a little ripple."""
    ripple = 0.13 * math.sin(3.1 * row + 1.7 * column)
    return min(1.0, max(0.0, 1.12 - 0.55 * _distance(row, column) ** 1.6 + ripple))


PATCHES = [(row, column) for row in range(SIDE) for column in range(SIDE)]
K = math.floor(BUDGET * len(PATCHES))
KEPT = set(sorted(PATCHES, key=lambda patch: -score(*patch))[:K])


def cells(x: float, y: float, fill: object) -> str:
    """A grid of patches; `fill(row, column)` gives the color."""
    assert callable(fill)
    size = f'width="{CELL - 1.4:g}" height="{CELL - 1.4:g}" rx="2"'
    return "".join(f'<rect x="{x + c * CELL + 0.7:g}" y="{y + r * CELL + 0.7:g}" {size} {fill(r, c)}/>' for r, c in PATCHES)


def text(x: float, y: float, words: str, size: float = 13, color: str = INK, weight: str = "normal", anchor: str = "middle") -> str:
    return f'<text x="{x}" y="{y}" font-size="{size}" fill="{color}" font-weight="{weight}" text-anchor="{anchor}">{words}</text>'


def arrow(points: str, color: str = INK, dashed: bool = False) -> str:
    dash = ' stroke-dasharray="5 4"' if dashed else ""
    marker = {INK: "ink", ORANGE: "orange", BLUE: "blue"}[color]
    return f'<path d="{points}" fill="none" stroke="{color}" stroke-width="1.8"{dash} marker-end="url(#{marker})"/>'


def box(x: float, y: float, width: float, height: float, fill: str, stroke: str) -> str:
    return f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="9" fill="{fill}" stroke="{stroke}" stroke-width="1.6"/>'


def photo(x: float, y: float) -> str:
    """The image: skin, a lesion, the lines between patches."""
    cx, cy = x + CENTER[0] * GRID, y + CENTER[1] * GRID
    lines = "".join(
        f'<path d="M{x + i * CELL} {y}v{GRID}M{x} {y + i * CELL}h{GRID}" stroke="#fff" stroke-opacity=".55" stroke-width=".8"/>'
        for i in range(1, SIDE)
    )
    return (
        f'<rect x="{x}" y="{y}" width="{GRID}" height="{GRID}" rx="6" fill="#e9c3a6"/>'
        f'<ellipse cx="{cx}" cy="{cy}" rx="{0.345 * GRID:g}" ry="{0.32 * GRID:g}" fill="#8d5a3b"/>'
        f'<ellipse cx="{cx + 5}" cy="{cy - 3}" rx="{0.22 * GRID:g}" ry="{0.18 * GRID:g}" fill="#5b3423"/>'
        f'<ellipse cx="{cx - 9}" cy="{cy + 8}" rx="7" ry="5" fill="#3b2218"/>{lines}'
    )


def heat(row: int, column: int) -> str:
    value = score(row, column)
    low, high = (233, 240, 244), (179, 74, 0)
    mixed = ",".join(str(round(a + (b - a) * value)) for a, b in zip(low, high))
    return f'fill="rgb({mixed})"'


def kept(row: int, column: int) -> str:
    if (row, column) not in KEPT:
        color = 'fill="#f2f4f6" stroke="#d5dbe0" stroke-width=".8"'
        return color if not lesion(row, column) else f'fill="#fff" stroke="{ORANGE}" stroke-width="1.4" stroke-dasharray="3 2"'
    return f'fill="{BLUE}"' if lesion(row, column) else 'fill="#9db4c6"'


def mask(row: int, column: int) -> str:
    return 'fill="#1c2733"' if lesion(row, column) else 'fill="#eef1f3" stroke="#d5dbe0" stroke-width=".8"'


def diagram() -> str:
    top, mid = 62, 62 + GRID / 2
    found = sum(lesion(*patch) for patch in KEPT)
    total = sum(lesion(*patch) for patch in PATCHES)
    markers = "".join(
        f'<marker id="{name}" viewBox="0 0 10 10" refX="8" refY="5" markerWidth="6.5" markerHeight="6.5" orient="auto">'
        f'<path d="M0 0L10 5L0 10z" fill="{color}"/></marker>'
        for name, color in (("ink", INK), ("orange", ORANGE), ("blue", BLUE))
    )
    bars = "".join(
        f'<rect x="{936}" y="{top + 22 + 22 * i}" width="{w}" height="13" rx="2" fill="{TEAL if i == 0 else "#b9c4cc"}"/>'
        for i, w in enumerate((64, 26, 14, 8))
    )
    signals = "".join(text(455, top + 62 + 17 * i, word, 12, FAINT) for i, word in enumerate(("attention", "norm", "contrast")))
    parts = [
        photo(16, top), text(16 + GRID / 2, 46, "image", weight="bold"),
        arrow(f"M142 {mid}H166"),
        box(170, top + 12, 78, GRID - 24, "#e6f2f0", TEAL),
        text(209, mid - 8, "ViT", 15, TEAL, "bold"), text(209, mid + 11, "frozen", 12, TEAL),
        text(209, mid + 27, "run once", 12, TEAL),
        arrow(f"M252 {mid}H272"),
        cells(276, top, lambda r, c: 'fill="#80bfb5"'), text(276 + GRID / 2, 46, "N patch tokens", weight="bold"),
        box(416, top, 78, GRID, "#fdf1e7", ORANGE), text(455, top + 26, "LATS", 15, ORANGE, "bold"),
        text(455, top + 42, "scorer", 12, ORANGE), signals,
        arrow(f"M398 {mid}H412"), arrow(f"M496 {mid}H509"),
        cells(512, top, heat), text(512 + GRID / 2, 46, "score of each patch", weight="bold"),
        arrow(f"M636 {mid}H722"), text(678, mid - 26, "router", 13, INK, "bold"), text(678, mid - 9, "top K", 12, FAINT),
        text(678, mid + 20, f"budget β = {BUDGET:g}", 12, FAINT),
        cells(726, top, kept), text(726 + GRID / 2, 46, f"K = {K} of {len(PATCHES)} kept", weight="bold"),
        arrow(f"M850 {mid}H864"),
        box(868, top + 30, 50, GRID - 60, "#eef1f3", INK), text(893, mid - 3, "mean,", 12), text(893, mid + 13, "head", 12),
        text(968, 46, "class", weight="bold"), bars,
        cells(512, 232, mask), text(512 + GRID / 2, 372, "lesion mask, where there is one", weight="bold"),
        arrow(f"M504 {292}H455V{top + GRID + 6}", ORANGE, dashed=True),
        text(448, 262, "in training:", 12.5, ORANGE, "bold", "end"), text(448, 280, "the lesion loss", 12.5, ORANGE, anchor="end"),
        text(448, 297, "teaches the scorer", 12.5, ORANGE, anchor="end"),
        arrow(f"M640 {292}H786V{top + GRID + 6}", BLUE, dashed=True),
        text(796, 262, "in evaluation:", 12.5, BLUE, "bold", "start"),
        text(796, 280, f"lesion retention = {found} of {total} lesion patches kept", 12.5, BLUE, anchor="start"),
        text(796, 297, f"ceiling: min(K, lesion) = {min(K, total)} of {total}", 12.5, BLUE, anchor="start"),
    ]  # fmt: skip
    label = "Image, frozen ViT, patch tokens, LATS scorer, top-K router, kept patches, head; the mask trains and measures"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 22 1100 364" role="img" aria-label="{label}" '
        f'font-family="system-ui, -apple-system, Segoe UI, Helvetica, Arial, DejaVu Sans, sans-serif">'
        f'<defs>{markers}</defs><rect y="22" width="1100" height="364" rx="12" fill="#fff"/>{"".join(parts)}</svg>\n'
    )


if __name__ == "__main__":
    out = Path(__file__).parent / "images" / "method.svg"
    out.write_text(diagram(), encoding="utf-8")
    print(f"{out}: {out.stat().st_size / 1000:.0f} kB")
