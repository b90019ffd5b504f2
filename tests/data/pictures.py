"""Small pictures and files that several tests share."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
from PIL import Image


def lesion_picture(seed: int, width: int = 96, height: int = 72) -> Image.Image:
    """Skin with some texture and three blobs, another picture for each seed; the size changes nothing but the size."""
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[0:height, 0:width]
    x, y = x * 96 / width, y * 72 / height
    picture = np.full((height, width, 3), (220.0, 180.0, 160.0))
    picture += (rng.normal(0, 14, (9, 12))[(y // 8).astype(int), (x // 8).astype(int)])[..., None]
    for _ in range(3):
        cx, cy = rng.uniform(20, 76), rng.uniform(14, 58)
        blob = ((x - cx) / rng.uniform(8, 25)) ** 2 + ((y - cy) / rng.uniform(8, 20)) ** 2 < 1
        picture[blob] = rng.uniform(30, 140, 3)
    return Image.fromarray(np.clip(picture, 0, 255).astype(np.uint8))


def disc_mask(width: int = 96, height: int = 72, radius: float = 20) -> Image.Image:
    y, x = np.mgrid[0:height, 0:width]
    inside = (x - width / 2) ** 2 + (y - height / 2) ** 2 < radius**2
    return Image.fromarray(np.where(inside, 255, 0).astype(np.uint8))


def save(image: Image.Image, path: Path, **options: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    image.save(path, **options)
    return path


def class_folders(root: Path, per_class: int = 5, classes: tuple[str, ...] = ("MEL", "NV")) -> Path:
    """`root/MEL/MEL_0.png` and so on, every picture another."""
    for c, label in enumerate(classes):
        for k in range(per_class):
            save(lesion_picture(100 * c + k), root / label / f"{label}_{k}.png")
    return root


def many_scans(size: int, scans: int) -> bytes:
    """A progressive JPEG whose last scan is repeated."""
    stream = io.BytesIO()
    Image.effect_noise((size, size), 50).save(stream, format="JPEG", progressive=True, quality=5)
    data = stream.getvalue()
    last = data.rindex(b"\xff\xda")
    return data[:last] + data[last:-2] * scans + data[-2:]
