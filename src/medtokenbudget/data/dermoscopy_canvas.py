"""Drawing primitives of the synthetic dermoscopy: smooth noise, soft blobs, anti-aliased strokes, the lesion's outline.

They know nothing about skin or disease. All lengths are in image widths, so that a seed gives the same picture at every size.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw

Map = npt.NDArray[np.float32]
"""One float per pixel, `[H, W]`."""

_SUPERSAMPLING = 3


def smoothstep(low: float, high: float, value: Map) -> Map:
    """0 below `low`, 1 above `high` (the reverse if `low > high`), and smooth in between."""
    ramp = np.clip((value - np.float32(low)) * np.float32(1 / (high - low)), 0, 1)
    return ramp * ramp * (3 - 2 * ramp)


class Canvas:
    """A square of `size` pixels with coordinates `x [1, size]`, `y [size, 1]` in (0, 1)."""

    def __init__(self, size: int) -> None:
        self.size = size
        axis = ((np.arange(size) + 0.5) / size).astype(np.float32)
        self.x, self.y = axis[None, :], axis[:, None]

    def zeros(self) -> Map:
        return np.zeros((self.size, self.size), np.float32)

    def noise(self, rng: np.random.Generator, cells: float, stretch: float = 1.0) -> Map:
        """Smooth noise of mean 0 and deviation 1 with about `cells` cells across and `cells / stretch` down, `[H, W]`."""
        shape = (max(4, round(cells / stretch) + 2), max(4, round(cells) + 2))
        grid = rng.standard_normal(shape, dtype=np.float32)
        # Interpolation between independent values reduces their deviation by a fifth; the factor restores it.
        grid = (grid - grid.mean()) * np.float32(1.25 / grid.std())
        return np.asarray(Image.fromarray(grid).resize((self.size, self.size), Image.Resampling.BICUBIC))

    def blobs(self, spots: Iterable[Sequence[float]], edge: float = 0.5) -> Map:
        """Soft ellipses, each `(x, y, radius, aspect, angle, strength)`. Overlaps take the maximum; `edge` in (0, 1] blurs."""
        out = self.zeros()
        for cx, cy, radius, aspect, angle, strength in spots:
            reach = radius * max(aspect, 1.0) * (1 + edge)
            left, right = (int(np.clip((cx + side * reach) * self.size + side, 0, self.size)) for side in (-1, 1))
            top, bottom = (int(np.clip((cy + side * reach) * self.size + side, 0, self.size)) for side in (-1, 1))
            if left >= right or top >= bottom:
                continue
            dx, dy = self.x[:, left:right] - np.float32(cx), self.y[top:bottom] - np.float32(cy)
            cos, sin = np.float32(np.cos(angle)), np.float32(np.sin(angle))
            along, across = (dx * cos + dy * sin) / np.float32(aspect), dy * cos - dx * sin
            level = np.sqrt(along * along + across * across) / np.float32(radius)
            window = out[top:bottom, left:right]
            np.maximum(window, smoothstep(1 + edge, 1 - edge, level) * np.float32(strength), out=window)
        return out

    def strokes(self, lines: Iterable[tuple[npt.NDArray[np.float64], float, float]]) -> Map:
        """Anti-aliased polylines, each `(points [P, 2], width, strength in (0, 1])`, drawn as coverage in [0, 1]."""
        fine = self.size * _SUPERSAMPLING
        image = Image.new("L", (fine, fine))
        pen = ImageDraw.Draw(image)
        for points, width, strength in lines:
            path = [(float(px) * fine, float(py) * fine) for px, py in points]
            pen.line(path, fill=round(255 * strength), width=max(1, round(width * fine)), joint="curve")
        return np.asarray(image.reduce(_SUPERSAMPLING), np.float32) / np.float32(255)

    def honeycomb(self, rng: np.random.Generator, period: float, wobble: float) -> tuple[Map, Map]:
        """A bent hexagonal lattice: its lines and its holes, both in [0, 1]."""
        bend = np.float32(wobble * period)
        x = self.x + bend * 1.6 * self.noise(rng, 0.22 / period)
        y = self.y + bend * 1.6 * self.noise(rng, 0.22 / period)
        angle, k = rng.uniform(0, np.pi), np.float32(2 * np.pi / (period * np.sqrt(3) / 2 * 1.15))
        waves = [np.cos(k * (np.float32(np.cos(a)) * x + np.float32(np.sin(a)) * y)) for a in angle + np.arange(3) * np.pi * 2 / 3]
        lattice = waves[0] + waves[1] + waves[2] + np.float32(0.6) * self.noise(rng, 1.1 / period)
        return smoothstep(0.8, -1.5, lattice), smoothstep(0.3, 2.6, lattice)


@dataclass(frozen=True)
class Outline:
    """A star-shaped outline around a center, bent by slow waves; `distance` is in image widths before the bumps."""

    center: tuple[float, float]
    aspect: float
    angle: float
    bumps: npt.NDArray[np.complex64]
    waves: npt.NDArray[np.float64]

    @classmethod
    def random(cls, rng: np.random.Generator, center: tuple[float, float], irregularity: float) -> Outline:
        """A random outline: irregularity 0 is an ellipse, 1 the most irregular melanoma."""
        orders = np.arange(2, 8)
        size = irregularity * 0.28 * rng.standard_normal(orders.size) / orders
        waves = np.column_stack(
            [
                rng.uniform(-1, 1, (4, 2)) * 2 * np.pi * 2.2,
                rng.uniform(0, 2 * np.pi, (4, 1)),
                rng.standard_normal((4, 2)) * 0.026 * irregularity,
            ]
        )
        bumps = (size * np.exp(1j * rng.uniform(0, 2 * np.pi, orders.size))).astype(np.complex64)
        aspect = float(np.clip(1 + abs(rng.normal(0, 0.22)), 1, 1.7))
        return cls(center, aspect, float(rng.uniform(0, np.pi)), bumps, waves)

    def distance(self, x: Map, y: Map) -> Map:
        """`[H, W]` for `x [1, W]` and `y [H, 1]`, also outside the image; the border of the shape is a level line."""
        dx, dy = x - np.float32(self.center[0]), y - np.float32(self.center[1])
        px, py = np.broadcast_to(dx, (y.size, x.size)).copy(), np.broadcast_to(dy, (y.size, x.size)).copy()
        for kx, ky, phase, ax, ay in self.waves.astype(np.float32):
            # sin(a + b) from one-dimensional sines, which needs a hundred times fewer of them.
            wave = np.sin(kx * dx + phase) * np.cos(ky * dy) + np.cos(kx * dx + phase) * np.sin(ky * dy)
            px += ax * wave
            py += ay * wave
        cos, sin = np.float32(np.cos(self.angle)), np.float32(np.sin(self.angle))
        stretch = np.float32(np.sqrt(self.aspect))
        position = (px * cos + py * sin) / stretch + 1j * ((py * cos - px * sin) * stretch)
        radius = np.abs(position) + np.float32(1e-6)
        unit = position / radius
        power, border = unit.copy(), np.ones_like(radius)
        for bump in self.bumps:
            power *= unit
            border += (power * bump).real
        return (radius / np.maximum(border, np.float32(0.35))).astype(np.float32)
