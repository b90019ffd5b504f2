"""Artifacts on the skin or in the lens: hair, ruler, ink, gel bubbles, the dark edge of the field of view.

Each function takes the picture `[3, H, W]` in [0, 1] and returns a new one.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from medtokenbudget.data.dermoscopy_canvas import Canvas, Map, smoothstep

Picture = npt.NDArray[np.float32]

HAIR_COLORS = {"dark": (0.17, 0.12, 0.11), "light": (0.78, 0.66, 0.48), "stubble": (0.20, 0.16, 0.15)}


def _lay(picture: Picture, cover: Map, color: tuple[float, float, float]) -> Picture:
    return picture * (1 - cover) + cover * np.asarray(color, np.float32)[:, None, None]


def hair(picture: Picture, canvas: Canvas, rng: np.random.Generator, kind: str, count: int) -> Picture:
    """Curved hairs across the whole field and over the lesion; `stubble` is short and mostly in one direction."""
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
    """A ruler near one side of the picture: a line with ticks, every fifth one longer."""
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
    """Marks of a violet surgical pen around the middle, worn off in places."""
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
    """Air bubbles in the gel: a thin dark ring, a bright ring inside it, and a highlight."""
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
    """Light that passes the lens, `[H, W]` in [0, 1]: 'circle' has a round black frame, 'corners' dark corners, 'full' neither."""
    cx, cy = 0.5 + rng.normal(0, 0.012, 2)
    distance = np.hypot(canvas.x - np.float32(cx), canvas.y - np.float32(cy))
    falloff = 1 - np.float32(rng.uniform(0.0, 0.28)) * (distance / np.float32(0.7)) ** 2
    radius = {"circle": rng.uniform(0.46, 0.53), "corners": rng.uniform(0.56, 0.66), "full": 2.0}[kind]
    soft = rng.uniform(0.008, 0.05)
    return falloff * smoothstep(radius + soft, radius - soft, distance)
