"""Lesion masks to patch labels, as the paper's supplement says, and the statistics of them that the paper reports."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from medtokenbudget.data.decode import DecodeError, decode_mask
from medtokenbudget.errors import GridError

ASPECT_TOLERANCE = 0.02
"""Of width over height; reduced copies are rounded to whole pixels."""


def same_aspect(mask: tuple[int, int], image: tuple[int, int]) -> bool:
    """Whether a mask of this (width, height) can lie on an image of that one; it may be larger or smaller."""
    return abs(mask[0] * image[1] / (mask[1] * image[0]) - 1) <= ASPECT_TOLERANCE


def mask_of(image: Image.Image, path: Path | str) -> Image.Image:
    """The mask in a file, decoded; one that cannot lie on the image is refused."""
    mask = decode_mask(path)
    if not same_aspect(mask.size, image.size):
        sizes = f"{mask.width} x {mask.height} pixels for an image of {image.width} x {image.height}"
        raise DecodeError(f"{Path(path).name} has {sizes}: another aspect, so it would not lie on the lesion.", "mask-aspect")
    return mask


def patch_labels(mask: Image.Image, grid: tuple[int, int]) -> np.ndarray:
    """Lesion patches `[h * w]` bool in raster order: gray, bilinear resize to the token grid, to [0, 1], above 0.5."""
    height, width = grid
    if height < 1 or width < 1:
        raise GridError(f"a token grid has at least one row and one column, got {height} x {width}.")
    small = mask.convert("L").resize((width, height), Image.Resampling.BILINEAR)
    return (np.asarray(small, dtype=np.float32) / 255.0 > 0.5).reshape(-1)


def prevalence_table(counts: Sequence[int] | np.ndarray, patches: int) -> dict[str, dict[str, float]]:
    """The supplement's table: lesion patches an image and their share of all patches, over the images that have any.

    The standard deviation is that of the population, as the paper's figures are.
    """
    values = np.asarray([count for count in counts if count > 0], dtype=np.float64)
    if len(values) == 0:
        return {}
    rows = {
        "minimum": values.min(),
        "25th percentile": np.percentile(values, 25),
        "median": np.median(values),
        "75th percentile": np.percentile(values, 75),
        "maximum": values.max(),
        "mean": values.mean(),
        "standard deviation": values.std(),
    }
    return {name: {"patches": float(value), "prevalence": float(value / patches)} for name, value in rows.items()}
