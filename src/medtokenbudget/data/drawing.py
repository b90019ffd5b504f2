"""Everything that is drawn on a picture of skin: noise, blobs and strokes, the lesions of the eight classes, and artifacts.

`synthetic.py` puts it together to a photograph. All lengths are in image widths, so that a seed gives the same picture at every
size. The order of the random draws is part of the result: the same seed must give the same bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw

Map = npt.NDArray[np.float32]
"""One float per pixel, `[H, W]`."""
Picture = npt.NDArray[np.float32]
"""`[3, H, W]` in [0, 1]; artifacts take one and return a new one."""

_SUPERSAMPLING = 3


def smoothstep(low: float, high: float, value: Map) -> Map:
    """Rise from 0 below `low` to 1 above `high` (the reverse if `low > high`), smoothly in between."""
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
        """Draw smooth noise of mean 0 and deviation 1 with about `cells` cells across and `cells / stretch` down, `[H, W]`."""
        shape = (max(4, round(cells / stretch) + 2), max(4, round(cells) + 2))
        grid = rng.standard_normal(shape, dtype=np.float32)
        # Interpolation between independent values reduces their deviation by a fifth; the factor restores it.
        grid = (grid - grid.mean()) * np.float32(1.25 / grid.std())
        return np.asarray(Image.fromarray(grid).resize((self.size, self.size), Image.Resampling.BICUBIC))

    def blobs(self, spots: Iterable[Sequence[float]], edge: float = 0.5) -> Map:
        """Draw soft ellipses, each `(x, y, radius, aspect, angle, strength)`. Overlaps take the maximum; `edge` in (0, 1] blurs."""
        out = self.zeros()
        for cx, cy, radius, aspect, angle, strength in spots:
            reach = radius * max(aspect, 1.0) * (1 + edge)
            left, right = (int(np.clip((cx + side * reach) * self.size + side, 0, self.size)) for side in (-1, 1))
            top, bottom = (int(np.clip((cy + side * reach) * self.size + side, 0, self.size)) for side in (-1, 1))
            if left >= right or top >= bottom:
                continue
            dx, dy = self.x[:, left:right] - np.float32(cx), self.y[top:bottom] - np.float32(cy)
            cos, sin = np.float32(np.cos(angle)), np.float32(np.sin(angle))
            # In the axes of the ellipse.
            along, across = (dx * cos + dy * sin) / np.float32(aspect), dy * cos - dx * sin
            level = np.sqrt(along * along + across * across) / np.float32(radius)
            window = out[top:bottom, left:right]
            np.maximum(window, smoothstep(1 + edge, 1 - edge, level) * np.float32(strength), out=window)
        return out

    def strokes(self, lines: Iterable[tuple[npt.NDArray[np.float64], float, float]]) -> Map:
        """Draw anti-aliased polylines, each `(points [P, 2], width, strength in (0, 1])`, as coverage in [0, 1]."""
        fine = self.size * _SUPERSAMPLING
        image = Image.new("L", (fine, fine))
        pen = ImageDraw.Draw(image)
        for points, width, strength in lines:
            path = [(float(px) * fine, float(py) * fine) for px, py in points]
            # Three times as large and then reduced: Pillow draws lines without anti-aliasing.
            pen.line(path, fill=round(255 * strength), width=max(1, round(width * fine)), joint="curve")
        return np.asarray(image.reduce(_SUPERSAMPLING), np.float32) / np.float32(255)

    def honeycomb(self, rng: np.random.Generator, period: float, wobble: float) -> tuple[Map, Map]:
        bend = np.float32(wobble * period)
        x = self.x + bend * 1.6 * self.noise(rng, 0.22 / period)
        y = self.y + bend * 1.6 * self.noise(rng, 0.22 / period)
        angle, k = rng.uniform(0, np.pi), np.float32(2 * np.pi / (period * np.sqrt(3) / 2 * 1.15))
        # Three plane waves, 120 degrees apart, add up to a honeycomb.
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
        """Draw a random outline: irregularity 0 is an ellipse, 1 the most irregular melanoma."""
        orders = np.arange(2, 8)
        size = irregularity * 0.28 * rng.standard_normal(orders.size) / orders
        rate, phase = rng.uniform(-1, 1, (4, 2)) * 2 * np.pi * 2.2, rng.uniform(0, 2 * np.pi, (4, 1))
        waves = np.column_stack([rate, phase, rng.standard_normal((4, 2)) * 0.026 * irregularity])
        bumps = (size * np.exp(1j * rng.uniform(0, 2 * np.pi, orders.size))).astype(np.complex64)
        aspect = float(np.clip(1 + abs(rng.normal(0, 0.22)), 1, 1.7))
        return cls(center, aspect, float(rng.uniform(0, np.pi)), bumps, waves)

    def distance(self, x: Map, y: Map) -> Map:
        """Compute `[H, W]` for `x [1, W]` and `y [H, 1]`, also outside the image; the border of the shape is a level line."""
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
        # Bumps that cancel the radius would let the outline pass through its center.
        return (radius / np.maximum(border, np.float32(0.35))).astype(np.float32)


@dataclass
class Pigments:
    """What is in the skin, each `[H, W]` and >= 0: absorbers (`melanin, blood, blue`) and what covers them (`white, keratin`)."""

    melanin: Map
    blood: Map
    blue: Map
    white: Map
    keratin: Map

    @classmethod
    def none(cls, canvas: Canvas) -> Pigments:
        return cls(*(canvas.zeros() for _ in range(5)))


@dataclass(frozen=True)
class Lesion:
    """Where to draw: `reach [H, W]` is 0 at the center and 1 at the border; `radius` is that of a circle of equal area."""

    canvas: Canvas
    rng: np.random.Generator
    reach: Map
    radius: float
    detail: float

    def noise(self, cells: float, stretch: float = 1.0) -> Map:
        return self.canvas.noise(self.rng, cells, stretch)

    def chance(self, probability: float) -> bool:
        return bool(self.rng.random() < probability)

    def points(self, n: int, low: float = 0.0, high: float = 0.95) -> np.ndarray:
        """Draw `n` random places `[n, 2]` with a reach between `low` and `high`; empty if the lesion has no such place."""
        places = np.flatnonzero((self.reach >= low) & (self.reach < high))
        if places.size == 0:
            return np.empty((0, 2))
        chosen = places[self.rng.integers(places.size, size=n)]
        size = self.canvas.size
        return np.column_stack([chosen % size, chosen // size]) / size + self.rng.uniform(0, 1 / size, (n, 2))

    def spots(
        self, n: int, radius: tuple[float, float], low: float = 0.0, high: float = 0.95, aspect: float = 1.3, edge: float = 0.5
    ) -> Map:
        """Draw `n` soft round or oval spots inside the lesion; radii are in image widths."""
        places = self.points(n, low, high)
        m, scale = len(places), self.detail
        # Radius, aspect, angle and strength of each.
        ranges: tuple[tuple[float, float], ...] = ((radius[0] * scale, radius[1] * scale), (1, aspect), (0, np.pi), (0.55, 1))
        rows = np.column_stack([places, *(self.rng.uniform(least, most, m) for least, most in ranges)])
        return self.canvas.blobs(rows.tolist(), edge)

    def side(self) -> Map:
        """Draw a gradient across the lesion, about -1 to 1, which makes its halves different."""
        angle = self.rng.uniform(0, 2 * np.pi)
        x, y = self.canvas.x - np.float32(0.5), self.canvas.y - np.float32(0.5)
        slope = (x * np.float32(np.cos(angle)) + y * np.float32(np.sin(angle))) / np.float32(max(self.radius, 0.1))
        return slope.astype(np.float32, copy=False)

    def network(self, period: tuple[float, float] = (0.022, 0.036), wobble: float = 0.18) -> tuple[Map, Map]:
        return self.canvas.honeycomb(self.rng, self.rng.uniform(*period) * self.detail, wobble)

    def region(self, low: float, high: float, cells: float) -> Map:
        """Draw a smooth part of the lesion: noise between the levels `low` and `high`, in [0, 1]."""
        scale = cells / max(self.radius * 2, 0.2)
        return smoothstep(low, high, self.noise(scale) * 0.85 + self.noise(scale * 4) * 0.35)


def vessels(lesion: Lesion, trees: int, length: float, width: float, low: float, high: float) -> Map:
    """Draw arborizing vessels: stems that fork into finer and finer branches, as coverage in [0, 1]."""
    rng, lines = lesion.rng, []
    todo = [(p, rng.uniform(0, 2 * np.pi), length * rng.uniform(0.6, 1.3), width, 0) for p in lesion.points(trees, low, high)]
    while todo:
        start, heading, reach, thickness, depth = todo.pop()
        bend = rng.normal(0, 0.28, 6).cumsum() + heading
        steps = np.column_stack([np.cos(bend), np.sin(bend)]) * reach / 6
        path = np.vstack([start, start + steps.cumsum(0)])
        lines.append((path, thickness, 0.95 - 0.13 * depth))
        if depth < 3:
            for at in rng.choice([2, 3, 4, 5, 6], size=2 if depth < 2 else 1, replace=False):
                turn = rng.uniform(0.35, 1.0) * rng.choice([-1, 1])
                todo.append((path[at], bend[at - 1] + turn, reach * rng.uniform(0.5, 0.8), thickness * 0.66, depth + 1))
    return lesion.canvas.strokes(lines)


def melanoma(lesion: Lesion, skin: Pigments) -> None:
    """Asymmetric, several colors: browns, black, blue-gray veil, white regression, streaks, irregular dots; some amelanotic."""
    rng, reach = lesion.rng, lesion.reach
    amelanotic, early = lesion.chance(0.12), lesion.chance(0.30)
    lean = rng.uniform(0.1, 0.3) if early else rng.uniform(0.3, 0.8)
    uneven = 1 + lean * np.tanh(lesion.side() * 1.2) + (0.15 if early else 0.34) * lesion.noise(3.2 / max(2 * lesion.radius, 0.3))
    strength = rng.uniform(0.15, 0.35) if amelanotic else rng.uniform(0.6, 1.35)
    lines, _ = lesion.network(wobble=0.34)
    where = lesion.region(-0.6, 0.7, 4)
    skin.melanin += strength * np.maximum(uneven, 0.12) * (0.74 + 0.3 * lines * where + 0.12 * lesion.noise(26))
    skin.blood += (
        rng.uniform(0.3, 0.65) * (1 + 0.25 * lesion.noise(6)) if amelanotic else rng.uniform(0.05, 0.4) * lesion.region(-1, 1.5, 3)
    )
    if not amelanotic and lesion.chance(0.45 if early else 0.8):
        blotch = lesion.region(0.3, 1.3, 4) * smoothstep(1.0, 0.8, reach)
        skin.melanin += rng.uniform(0.7, 1.5) * blotch
        skin.blue += rng.uniform(0.2, 0.6) * blotch
    if lesion.chance(0.15 if early or amelanotic else 0.6):
        veil = lesion.region(-0.2, 1.5, 2.5) * smoothstep(1.0, 0.7, reach)
        skin.blue += (0.3 if amelanotic else rng.uniform(0.35, 0.85)) * veil
        skin.melanin *= 1 - 0.5 * veil
        skin.white += 0.10 * veil
    if lesion.chance(0.1 if early else 0.4):
        scar = lesion.region(0.3, 1.7, 3) * smoothstep(1.0, 0.75, reach)
        skin.melanin *= 1 - 0.8 * scar
        skin.white += 0.28 * scar
        skin.blue += 0.35 * scar * lesion.spots(70, (0.003, 0.006))
    if not amelanotic and lesion.chance(0.2 if early else 0.5):
        skin.melanin += rng.uniform(0.5, 1.0) * _rim_streaks(lesion)
    dots = lesion.spots(int(rng.integers(6, 45)), (0.004, 0.013), high=1.0, aspect=1.6)
    skin.melanin += (0.3 if amelanotic else rng.uniform(0.5, 1.3)) * dots * (0.3 + 0.7 * where)


def _rim_streaks(lesion: Lesion) -> Map:
    rng = lesion.rng
    places, middle = lesion.points(46, 0.84, 0.98), lesion.points(200, 0.0, 0.3)
    if not len(places) or not len(middle):
        return lesion.canvas.zeros()
    core = middle.mean(0)
    sector = rng.uniform(0, 2 * np.pi)
    lines = []
    for place in places:
        out = place - core
        if np.cos(np.arctan2(out[1], out[0]) - sector) < -0.1:
            continue
        out = out / (np.hypot(*out) + 1e-6) * rng.uniform(0.025, 0.06) * lesion.detail
        lines.append((np.array([place - out * 0.5, place + out * 0.5]), rng.uniform(0.005, 0.011), rng.uniform(0.5, 1)))
    return lesion.canvas.strokes(lines)


def nevus(lesion: Lesion, skin: Pigments) -> None:
    """Symmetric, one or two browns, with a regular network, even globules or no structure; some atypical, some pink."""
    rng, reach = lesion.rng, lesion.reach
    kind = str(rng.choice(["reticular", "globular", "homogeneous"], p=[0.48, 0.2, 0.32]))
    atypical, pink = lesion.chance(0.2), lesion.chance(0.16)
    strength = rng.uniform(0.18, 0.4) if pink else rng.uniform(0.4, 1.35)
    core = smoothstep(rng.uniform(0.7, 1.1), rng.uniform(0.0, 0.4), reach)
    profile = 0.7 + rng.choice([-0.25, 0.0, 0.35, 0.5]) * core
    profile = profile * (1 + (0.28 if atypical else 0.12) * lesion.noise(4 / max(2 * lesion.radius, 0.3)))
    if atypical:
        profile = profile * (1 + rng.uniform(0.1, 0.4) * np.tanh(lesion.side()))
    texture = 1 + 0.1 * lesion.noise(30) + 0.08 * lesion.noise(12)
    if kind == "reticular":
        lines, holes = lesion.network(wobble=0.24)
        lines = lines * lesion.region(-1.6, 0.4, 3)
        texture = texture * (0.78 + rng.uniform(0.12, 0.42) * lines - 0.06 * holes)
    elif kind == "globular":
        _, holes = lesion.network((0.03, 0.05), wobble=0.25)
        texture = texture * (0.8 + rng.uniform(0.3, 0.65) * holes)
    skin.melanin += strength * profile * texture
    skin.blood += rng.uniform(0.35, 0.7) if pink else rng.uniform(0.0, 0.22)
    if lesion.chance(0.06):
        skin.blue += rng.uniform(0.4, 0.8) * core


def basal_cell_carcinoma(lesion: Lesion, skin: Pigments) -> None:
    """Pink and translucent, arborizing vessels, blue-gray ovoid nests, shiny white strands, sometimes an ulcer."""
    rng = lesion.rng
    skin.blood += rng.uniform(0.25, 0.75) * np.maximum(1 + 0.3 * lesion.noise(5) + 0.12 * lesion.noise(20), 0.1)
    skin.melanin += rng.uniform(0.0, 0.18)
    skin.white += rng.uniform(0.05, 0.34) * lesion.region(-0.8, 1.2, 3) * smoothstep(1.0, 0.6, lesion.reach)
    pigmented = lesion.chance(0.5)
    trees = int(rng.integers(2, 6)) if lesion.chance(0.8) else 0
    if trees:
        length = float(np.clip(lesion.radius * rng.uniform(0.5, 0.9), 0.06, 0.3))
        branches = vessels(lesion, trees, length, rng.uniform(0.008, 0.014), 0.2, 1.0)
        skin.blood += rng.uniform(0.7, 1.3) * branches
        skin.melanin += 0.12 * branches
    if pigmented:
        nests = lesion.spots(int(rng.integers(5, 22)), (0.008, 0.032), high=0.8, aspect=2.2, edge=0.8)
        nests *= smoothstep(-1.4, 0.6, lesion.noise(16) + 0.5 * lesion.noise(40))
        skin.blue += rng.uniform(0.5, 1.2) * nests
        skin.melanin += rng.uniform(0.1, 0.6) * nests
        skin.melanin += rng.uniform(0.0, 0.35) * lesion.region(0.2, 1.2, 3)
    if lesion.chance(0.5):
        strands = smoothstep(1.1, 1.9, np.abs(lesion.noise(10, 3.0))) * lesion.region(0.0, 1.0, 3)
        skin.white += 0.35 * strands
    if lesion.chance(0.3):
        sore = lesion.spots(int(rng.integers(1, 4)), (0.015, 0.045), high=0.6, aspect=1.8, edge=0.35)
        skin.blood += 1.1 * sore
        skin.melanin += rng.uniform(0.3, 1.0) * sore


def actinic_keratosis(lesion: Lesion, skin: Pigments) -> None:
    """Strawberry pattern: a red net between pale follicles, with scale and a fuzzy border; some pigmented."""
    rng, pigmented = lesion.rng, lesion.chance(0.35)
    lines, follicles = lesion.network((0.036, 0.06), wobble=0.26)
    even = 1 + 0.35 * lesion.noise(6)
    patchy = lesion.region(-1.1, 0.5, 5)
    skin.blood += rng.uniform(0.4, 0.95) * np.maximum(even, 0.1) * (0.7 + 0.35 * lines - 0.35 * follicles * patchy)
    skin.keratin += rng.uniform(0.05, 0.26) * follicles * patchy
    if pigmented:
        skin.melanin += rng.uniform(0.25, 0.65) * lesion.region(-0.4, 1.0, 5) * (0.7 + 0.35 * lines)
    if lesion.chance(0.65):
        _scale(lesion, skin, rng.uniform(0.35, 0.8), rng.uniform(0.7, 1.3))


def _scale(lesion: Lesion, skin: Pigments, strength: float, threshold: float) -> None:
    flakes = smoothstep(threshold, threshold + 0.5, lesion.noise(34) * 0.6 + lesion.noise(9) * 0.8)
    skin.white += strength * flakes * (0.8 + 0.25 * lesion.noise(60))


def benign_keratosis(lesion: Lesion, skin: Pigments) -> None:
    """Stuck-on and waxy: ridges, milia-like cysts, comedo openings; or a flat lentigo, or a grayish regressing one."""
    rng = lesion.rng
    kind = str(rng.choice(["seborrheic", "lentigo", "regressing"], p=[0.55, 0.28, 0.17]))
    wax = 1 + 0.2 * lesion.noise(5) + 0.1 * lesion.noise(28)
    ridges = smoothstep(0.9, 0.0, np.abs(lesion.noise(rng.uniform(11, 20) / lesion.detail, rng.uniform(1, 1.6))))
    if kind == "regressing":
        gray = lesion.region(-0.5, 1.0, 5)
        skin.melanin += rng.uniform(0.15, 0.5) * wax
        skin.blue += rng.uniform(0.2, 0.6) * gray * (0.4 + 0.9 * lesion.spots(120, (0.004, 0.008)))
        skin.blood += rng.uniform(0.1, 0.4)
        return
    strength = rng.uniform(0.3, 1.1) if kind == "seborrheic" else rng.uniform(0.25, 0.65)
    skin.melanin += strength * wax * (0.7 + rng.uniform(0.1, 0.55) * (1 - ridges))
    skin.blood += rng.uniform(0.0, 0.2)
    if kind == "lentigo":
        return
    skin.keratin += rng.uniform(0.0, 0.3) * lesion.region(-0.8, 1.2, 3)
    cysts, comedones = int(rng.integers(3, 22)), int(rng.integers(0, 18))
    milia = lesion.spots(cysts, (0.005, 0.012), edge=0.6)
    skin.melanin *= 1 - 0.6 * milia
    skin.white += rng.uniform(0.35, 0.75) * milia
    skin.melanin += rng.uniform(0.8, 1.6) * lesion.spots(comedones, (0.006, 0.014), aspect=1.7, edge=0.4)
    if lesion.chance(0.25):
        _scale(lesion, skin, 0.4, 1.2)


def dermatofibroma(lesion: Lesion, skin: Pigments) -> None:
    """A white scar-like center, surrounded by a delicate network that fades into the skin; often pink."""
    rng, reach = lesion.rng, lesion.reach
    lines, _ = lesion.network((0.024, 0.034), wobble=0.2)
    start, fade = rng.uniform(0.15, 0.5), 1 + 0.2 * lesion.noise(5)
    ring = smoothstep(start - 0.1, start + 0.4, reach * fade) * smoothstep(1.1, 0.6, reach)
    skin.melanin += rng.uniform(0.25, 0.75) * (0.3 + 0.7 * ring) * (0.75 + 0.3 * lines + 0.1 * lesion.noise(12))
    skin.blood += rng.uniform(0.1, 0.55) * (0.6 + 0.5 * smoothstep(0.9, 0.3, reach))
    scar = smoothstep(start + 0.25, start - 0.2, reach * fade + 0.05 * lesion.noise(14))
    skin.melanin *= 1 - rng.uniform(0.35, 0.75) * scar
    skin.white += rng.uniform(0.15, 0.6) * scar * (0.85 + 0.2 * lesion.noise(24, 2.0))


def vascular_lesion(lesion: Lesion, skin: Pigments) -> None:
    """Red, purple or blue-black lacunae, round and crowded, with pale septa and a sharp border."""
    rng, reach = lesion.rng, lesion.reach
    hue = str(rng.choice(["red", "purple", "thrombosed"], p=[0.5, 0.33, 0.17]))
    blue = {"red": rng.uniform(0, 0.1), "purple": rng.uniform(0.35, 0.9), "thrombosed": rng.uniform(0.9, 1.6)}[hue]
    lacunae = lesion.spots(
        int(rng.integers(20, 55)), (0.12 * lesion.radius, 0.26 * lesion.radius), high=0.95, aspect=1.6, edge=0.45
    )
    lacunae *= 1 + 0.16 * lesion.noise(14) + 0.08 * lesion.noise(34)
    skin.blood += rng.uniform(0.5, 0.9) + rng.uniform(0.4, 1.1) * lacunae
    skin.blue += blue * (0.25 + 0.75 * lacunae)
    skin.melanin += 1.2 * lacunae if hue == "thrombosed" else 0.08 * lacunae
    skin.white += rng.uniform(0.0, 0.3) * (1 - lacunae) * smoothstep(1.0, 0.8, reach)
    if lesion.chance(0.3):
        skin.white += 0.35 * lesion.region(0.8, 1.4, 3)


def squamous_cell_carcinoma(lesion: Lesion, skin: Pigments) -> None:
    """Pink to red, a white-yellow keratin center with crust, white circles, looped and dotted vessels at the rim."""
    rng, reach = lesion.rng, lesion.reach
    skin.blood += rng.uniform(0.5, 1.05) * np.maximum(1 + 0.35 * lesion.noise(5) + 0.12 * lesion.noise(20), 0.1)
    core = smoothstep(rng.uniform(0.55, 0.85), rng.uniform(0.1, 0.4), reach + 0.16 * lesion.noise(8))
    skin.keratin += rng.uniform(0.1, 0.8) * core * (0.85 + 0.25 * lesion.noise(18))
    skin.melanin += rng.uniform(0.0, 0.5) * lesion.region(0.3, 1.2, 4)
    if lesion.chance(0.45):
        crust = lesion.region(0.7, 1.2, 6) * smoothstep(0.9, 0.4, reach)
        skin.melanin += 0.9 * crust
        skin.blood += 0.9 * crust
    if lesion.chance(0.5):
        _, follicles = lesion.network((0.036, 0.055), wobble=0.25)
        skin.white += rng.uniform(0.1, 0.28) * follicles
    dots = lesion.spots(int(rng.integers(25, 80)), (0.003, 0.006), low=0.55, high=1.0, edge=0.6)
    skin.blood += rng.uniform(0.6, 1.2) * dots
    loops = int(rng.integers(0, 16))
    skin.blood += rng.uniform(0.6, 1.1) * _loops(lesion, loops)
    if lesion.chance(0.5):
        _scale(lesion, skin, rng.uniform(0.3, 0.7), rng.uniform(0.8, 1.3))


def _loops(lesion: Lesion, n: int) -> Map:
    rng, lines = lesion.rng, []
    turn = np.linspace(-0.3, np.pi + 0.3, 9)
    for place in lesion.points(n, 0.5, 0.98):
        angle, width, height = rng.uniform(0, 2 * np.pi), rng.uniform(0.006, 0.01), rng.uniform(0.015, 0.03)
        arc = np.column_stack([np.cos(turn) * width, np.sin(turn) * height])
        spin = np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])
        lines.append((place + arc @ spin.T, 0.005, 0.9))
    return lesion.canvas.strokes(lines)


@dataclass(frozen=True)
class LesionLook:
    """How a class is drawn: irregularity of the outline, roughness and width of its border, and the pigment."""

    irregularity: tuple[float, float]
    roughness: tuple[float, float]
    edge: tuple[float, float]
    paint: Callable[[Lesion, Pigments], None]


LOOKS: dict[str, LesionLook] = {
    "MEL": LesionLook((0.35, 1.0), (0.01, 0.05), (0.03, 0.10), melanoma),
    "NV": LesionLook((0.1, 0.5), (0.005, 0.03), (0.03, 0.13), nevus),
    "BCC": LesionLook((0.25, 0.8), (0.01, 0.05), (0.05, 0.14), basal_cell_carcinoma),
    "AK": LesionLook((0.4, 1.0), (0.03, 0.08), (0.10, 0.20), actinic_keratosis),
    "BKL": LesionLook((0.3, 0.9), (0.02, 0.06), (0.012, 0.05), benign_keratosis),
    "DF": LesionLook((0.1, 0.4), (0.01, 0.04), (0.08, 0.16), dermatofibroma),
    "VASC": LesionLook((0.1, 0.6), (0.005, 0.03), (0.012, 0.04), vascular_lesion),
    "SCC": LesionLook((0.35, 0.9), (0.02, 0.07), (0.06, 0.15), squamous_cell_carcinoma),
}


HAIR_COLORS = {"dark": (0.17, 0.12, 0.11), "light": (0.78, 0.66, 0.48), "stubble": (0.20, 0.16, 0.15)}


def _lay(picture: Picture, cover: Map, color: tuple[float, float, float]) -> Picture:
    return picture * (1 - cover) + cover * np.asarray(color, np.float32)[:, None, None]


def hair(picture: Picture, canvas: Canvas, rng: np.random.Generator, kind: str, count: int) -> Picture:
    lines, main = [], rng.uniform(0, 2 * np.pi)
    t = np.linspace(0, 1, 14)[:, None]
    for _ in range(count):
        heading = main + rng.normal(0, 0.35 if kind != "dark" else 0.6)
        length = rng.uniform(0.03, 0.10) if kind == "stubble" else rng.uniform(0.25, 1.1)
        start = rng.uniform(-0.1, 1.1, 2)
        stop = start + length * np.array([np.cos(heading), np.sin(heading)])
        knee = (start + stop) / 2 + rng.normal(0, 0.16 * length, 2)
        path = (1 - t) ** 2 * start + 2 * t * (1 - t) * knee + t**2 * stop
        lines.append((path, rng.uniform(0.0035, 0.0075), rng.uniform(0.6, 0.95)))
    cover = canvas.strokes(lines)
    return _lay(picture, cover * np.float32(0.6 if kind == "light" else 0.92), HAIR_COLORS[kind])


def ruler(picture: Picture, canvas: Canvas, rng: np.random.Generator) -> Picture:
    angle = rng.choice([0, np.pi / 2]) + rng.normal(0, 0.2)
    along, across = np.array([np.cos(angle), np.sin(angle)]), np.array([-np.sin(angle), np.cos(angle)])
    middle = 0.5 + across * rng.choice([-1, 1]) * rng.uniform(0.36, 0.44) + along * rng.normal(0, 0.08)
    n, gap = int(rng.integers(12, 31)), rng.uniform(0.012, 0.028)
    start = middle - along * n * gap / 2
    lines = [(np.array([start, start + along * n * gap]), 0.0035, 0.85)]
    for i in range(n + 1):
        foot = start + along * i * gap
        lines.append((np.array([foot, foot + across * (0.03 if i % 5 == 0 else 0.016)]), 0.0035, 0.85))
    return _lay(picture, canvas.strokes(lines), (0.16, 0.15, 0.17))


def ink(picture: Picture, canvas: Canvas, rng: np.random.Generator) -> Picture:
    """Draw marks of a violet surgical pen around the middle, worn off in places."""
    t = np.linspace(0, 1, 16)[:, None]
    lines = []
    for _ in range(int(rng.integers(1, 4))):
        angle, radius = rng.uniform(0, 2 * np.pi), rng.uniform(0.36, 0.5)
        sweep = angle + t * rng.uniform(0.3, 1.1)
        path = 0.5 + radius * np.column_stack([np.cos(sweep), np.sin(sweep)])
        lines.append((path, rng.uniform(0.02, 0.045), 1.0))
    worn = smoothstep(-1.8, 0.8, canvas.noise(rng, 60) + 0.7 * canvas.noise(rng, 14))
    cover = canvas.strokes(lines) * worn * np.float32(rng.uniform(0.5, 0.95))
    return picture * (1 - cover * (1 - np.array([0.46, 0.38, 0.74], np.float32))[:, None, None])


def bubbles(picture: Picture, canvas: Canvas, rng: np.random.Generator, count: int) -> Picture:
    """Draw air bubbles in the gel: a thin dark ring, a bright ring inside it, and a highlight."""
    light = canvas.zeros()
    for _ in range(count):
        cx, cy, radius = rng.uniform(0, 1), rng.uniform(0, 1), rng.uniform(0.008, 0.05)
        distance = np.hypot(canvas.x - np.float32(cx), canvas.y - np.float32(cy)) / np.float32(radius)
        light -= 0.07 * np.exp(-(((distance - 1.0) / 0.10) ** 2))
        light += 0.07 * np.exp(-(((distance - 0.82) / 0.10) ** 2))
        glint = np.hypot(canvas.x - np.float32(cx - radius * 0.4), canvas.y - np.float32(cy - radius * 0.4)) / np.float32(radius)
        light += 0.22 * np.exp(-((glint / 0.2) ** 2))
    return picture + light


def field_of_view(canvas: Canvas, rng: np.random.Generator, kind: str) -> Map:
    """Draw the light through the lens, `[H, W]` in [0, 1]: 'circle' has a round black frame, 'corners' dark corners."""
    cx, cy = 0.5 + rng.normal(0, 0.012, 2)
    distance = np.hypot(canvas.x - np.float32(cx), canvas.y - np.float32(cy))
    falloff = 1 - np.float32(rng.uniform(0.0, 0.28)) * (distance / np.float32(0.7)) ** 2
    radius = {"circle": rng.uniform(0.46, 0.53), "corners": rng.uniform(0.56, 0.66), "full": 2.0}[kind]
    soft = rng.uniform(0.008, 0.05)
    return falloff * smoothstep(radius + soft, radius - soft, distance)
