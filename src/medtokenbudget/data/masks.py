"""From lesion masks to patch labels, as in the paper's supplement, and the statistics that it reports."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np
from PIL import Image
from scipy import ndimage

from medtokenbudget.data.images import DecodeError, decode_mask, require_lesion_values
from medtokenbudget.errors import GridError, RequestError

ASPECT_TOLERANCE = 0.02
"""Allowed relative difference of width / height; resized copies are rounded to whole pixels."""
Annotators = Literal["union", "majority", "each"]
"""What several masks of one image are: several lesions ('union'), or one lesion by several annotators, of which half decide
('majority'), and which are kept for evaluation too ('each')."""


def same_aspect(mask: tuple[int, int], image: tuple[int, int]) -> bool:
    """Tell whether a mask and an image, given as (width, height), have the same aspect ratio. Their sizes may differ."""
    return abs(mask[0] * image[1] / (mask[1] * image[0]) - 1) <= ASPECT_TOLERANCE


def mask_of(image: tuple[int, int], path: Path | str) -> Image.Image:
    """Decode the mask of an image of this (width, height)."""
    mask = decode_mask(path)
    if not same_aspect(mask.size, image):
        sizes = f"{mask.width} x {mask.height} pixels, the image {image[0]} x {image[1]}"
        raise DecodeError(f"The mask {Path(path).name} has {sizes}. The aspect ratios must be the same.", "mask-aspect")
    return mask


def joined_mask(paths: Sequence[Path], annotators: Annotators = "union") -> Image.Image:
    """Join the masks of one image, which must be of one size.

    The union is as bright as the brightest mask at each pixel. Otherwise lesion is what at least half of the annotators marked,
    with more than half of the range.
    """
    masks = [decode_mask(path) for path in paths]
    first = masks[0]
    for path, mask in zip(paths, masks):
        if mask.size != first.size:
            sizes = f"{mask.width} x {mask.height} pixels, {paths[0].name} {first.width} x {first.height}"
            raise RequestError(f"Masks of one image must be of one size, but {path.name} has {sizes}.")
    values = np.stack([np.asarray(mask) for mask in masks])
    if annotators == "union":
        return Image.fromarray(values.max(0))
    return Image.fromarray(np.where(2 * (values > 127).sum(0) >= len(masks), 255, 0).astype(np.uint8))


def patch_labels(mask: Image.Image, grid: tuple[int, int], *, whole: bool = True) -> np.ndarray:
    """Find the lesion patches, `[h * w]` bool in raster order: the gray mask, resized bilinearly to the grid, above half its range.

    A `whole` mask must be empty or have lesion pixels; one that is too dark for any is a DecodeError. Part of one, such as a crop,
    may hold nothing but the faint border of a lesion.
    """
    height, width = grid
    if height < 1 or width < 1:
        raise GridError(f"A token grid needs at least one row and one column, got {height} x {width}.")
    if whole:
        require_lesion_values("The mask", mask)
    # Pillow widens the filter when it reduces: every pixel counts, not the four nearest to the center of a patch.
    small = mask.convert("L").resize((width, height), Image.Resampling.BILINEAR)
    return (np.asarray(small, dtype=np.float32) / 255.0 > 0.5).reshape(-1)


def covered_shares(mask: Image.Image, grid: tuple[int, int]) -> np.ndarray:
    """Measure how much of each patch the mask covers: the mean over the patch, `[h * w]` uint8 in raster order, 255 for all of it.

    `patch_labels` follows the paper, whose bilinear filter also reaches into the neighbors; this says which of its lesion patches
    are all lesion and which are borders.
    """
    height, width = grid
    return np.asarray(mask.convert("L").resize((width, height), Image.Resampling.BOX), dtype=np.uint8).reshape(-1)


def patch_order(lesion: np.ndarray, covered: np.ndarray, grid: tuple[int, int]) -> np.ndarray:
    """Order the patches as somebody would who knows one mask, `[h * w]`: those that it covers most first.

    Of patches that are covered alike, those deepest inside its lesion patches come first; outside, those nearest to them.
    """
    # A frame of background, so that the border of the image counts as the border of a lesion that touches it.
    padded = np.pad(lesion.reshape(grid), 1)
    depth = ndimage.distance_transform_edt(padded)[1:-1, 1:-1] - ndimage.distance_transform_edt(~lesion.reshape(grid))
    # The last key decides first.
    return np.lexsort((-depth.reshape(-1), -covered.astype(float)))


def prevalence_table(counts: Sequence[int] | np.ndarray, patches: int) -> dict[str, dict[str, float]]:
    """Compute the supplement's table of lesion patches per image, and their share of all `patches` of an image.

    Images without lesion patches are left out. The standard deviation is that of the population, as in the paper.
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
