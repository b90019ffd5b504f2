"""Pictures that are no dermoscopy: street scenes and noise, drawn, for the tests of the warning about unfamiliar images."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFilter

Draw = Callable[[int], Image.Image]
SIZE = 256


def street(seed: int) -> Image.Image:
    """Sky, houses with windows, a road with its middle line, and cars."""
    random = np.random.default_rng(seed)
    horizon = int(SIZE * random.uniform(0.45, 0.65))
    sky, road = random.integers((90, 140, 180), (170, 210, 255)), np.full(3, random.integers(60, 120))
    picture = Image.new("RGB", (SIZE, SIZE), _color(sky))
    pen = ImageDraw.Draw(picture)
    left = 0
    while left < SIZE:
        width, top = int(random.integers(30, 80)), int(random.integers(10, horizon - 30))
        pen.rectangle([left, top, left + width, horizon], fill=_color(random.integers(60, 230, 3)))
        glass = _color(random.integers(20, 255, 3))
        for y in range(top + 8, horizon - 10, 18):
            for x in range(left + 6, left + width - 10, 14):
                pen.rectangle([x, y, x + 7, y + 10], fill=glass)
        left += width
    pen.polygon([(0, SIZE), (SIZE * 0.45, horizon), (SIZE * 0.55, horizon), (SIZE, SIZE)], fill=_color(road))
    for step in range(6):
        y = horizon + (SIZE - horizon) * step / 6
        pen.rectangle([SIZE / 2 - 2, y, SIZE / 2 + 2, y + 8], fill=(240, 240, 240))
    for _ in range(int(random.integers(1, 4))):
        x, y = random.uniform(20, SIZE - 90), random.uniform(horizon + 5, SIZE - 40)
        pen.rectangle([x, y, x + 60, y + 24], fill=_color(random.integers(0, 255, 3)))
        for wheel in (10, 42):
            pen.ellipse([x + wheel, y + 18, x + wheel + 12, y + 30], fill=(15, 15, 15))
    return _noisy(picture, random, 4)


def noise(seed: int) -> Image.Image:
    """Random pixels."""
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (SIZE, SIZE, 3), dtype=np.uint8))


def write(folder: Path, draw: Draw, count: int) -> list[Path]:
    """Pictures of one kind as JPEG files."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{draw.__name__}-{number:03d}.jpg" for number in range(count)]
    for number, path in enumerate(paths):
        draw(number).save(path, quality=90)
    return paths


def _color(values: np.ndarray) -> tuple[int, int, int]:
    r, g, b = (int(value) for value in values)
    return r, g, b


def _noisy(picture: Image.Image, random: np.random.Generator, deviation: float) -> Image.Image:
    pixels = np.asarray(picture) + random.normal(0, deviation, (SIZE, SIZE, 3))
    return Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).filter(ImageFilter.GaussianBlur(0.6))
