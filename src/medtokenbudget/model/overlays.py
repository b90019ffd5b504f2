"""Pictures of an answer: kept patches clear and dropped ones dimmed, and the lesion as a mask, as boxes and as a crop.

Drawn with Pillow alone: no plotting library is loaded to look at one image.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
from PIL import Image, ImageDraw, ImageFilter, ImageFont
from scipy import ndimage

from medtokenbudget.config import NOTICE
from medtokenbudget.model.inference import Routing, open_mask, open_picture
from medtokenbudget.model.looks import look

KEPT_EDGE, INK, PAPER = (255, 255, 255), (20, 20, 24), (235, 235, 235)
LESION_EDGE = (255, 176, 0)
"""Amber: stands out from skin, lesion and the white patch edges, also for color-blind people."""
DIM = 0.6
CAPTION = 30
SPECK = 0.02
WARNING = "Unlike the training images: do not rely on what was kept"


def overlay(image: Any, prediction: Routing, mask: Any = None, side: int = 640) -> Image.Image:
    """Draw an image with the patches that a prediction or routing kept, as an RGB picture with a caption line.

    Dropped patches are dimmed. A selector that merges patches drops none; there the lines separate patches of different tokens.

    Args:
        image: The image of the prediction, as a path, Pillow picture, uint8 array [H, W, 3] or the bytes of a file.
        mask: Lesion mask to outline, in the same forms.
        side: Length of the longer side in pixels.

    Example:
        >>> prediction = model.predict("photo.jpg", budget=0.3)[0]
        >>> mtb.overlay("photo.jpg", prediction).size
        (640, 670)
    """
    picture, outline = open_picture(image), None if mask is None else open_mask(mask)
    scale = side / max(picture.size)
    size = (max(1, round(picture.width * scale)), max(1, round(picture.height * scale)))
    picture = picture.resize(size, Image.Resampling.LANCZOS)
    # Pixel borders of the patches: the grid need not divide the picture.
    rows, columns = (
        [round(i / parts * length) for i in range(parts + 1)]
        for parts, length in zip(prediction.grid, (picture.height, picture.width))
    )
    kept = prediction.kept_mask
    groups = prediction.assignment.reshape(prediction.grid)
    if kept is not None:
        picture, groups = _dim(picture, kept, rows, columns), kept
    _draw_borders(ImageDraw.Draw(picture), groups, rows, columns)
    if outline is not None:
        picture = _draw_outline(picture, outline)
    n, k = prediction.n_patches, prediction.k
    share = f"{k} of {n} patches" if kept is not None else f"{n} patches merged into {k} tokens"
    amount = f"budget {prediction.budget:g}" if prediction.guarantee is None else str(prediction.guarantee)
    caption = f"{look(prediction.selector).title}, {amount}: {share}   {NOTICE}"
    picture = _with_line(picture, f"{prediction.headline}   {caption}".strip(), picture.height, PAPER, INK)
    return _with_line(picture, WARNING, 0, INK, LESION_EDGE) if prediction.unfamiliar else picture


Box = tuple[int, int, int, int]
"""Left, top, right and bottom in pixels; right and bottom are the first column and row outside."""


def lesion_mask(probability: np.ndarray, size: tuple[int, int], threshold: float = 0.5) -> np.ndarray:
    """Enlarge lesion probabilities [h, w] to a picture of (width, height) pixels and cut them: bool [height, width]."""
    field = Image.fromarray(np.asarray(probability, dtype=np.float32))
    return np.asarray(field.resize(size, Image.Resampling.BILINEAR)) > threshold


def lesion_boxes(mask: np.ndarray) -> list[Box]:
    """Return the bounding box of each connected part of a mask [height, width], the part with the largest area first.

    Specks, parts with less than `SPECK` of the area of the largest, are left out.
    """
    labels, _ = ndimage.label(mask)
    areas, places = np.bincount(labels.ravel())[1:], ndimage.find_objects(labels)
    order = [part for part in np.argsort(-areas, kind="stable") if areas[part] >= SPECK * areas.max()]
    return [(columns.start, rows.start, columns.stop, rows.stop) for rows, columns in (places[part] for part in order)]


def _dim(picture: Image.Image, kept: np.ndarray, rows: list[int], columns: list[int]) -> Image.Image:
    gray = np.asarray(picture.convert("L"), dtype=np.float32)[:, :, None]
    pixels = np.asarray(picture, dtype=np.float32)
    clear = np.repeat(np.repeat(kept, np.diff(rows), axis=0), np.diff(columns), axis=1)[:, :, None]
    dimmed = (1 - DIM) * (0.35 * pixels + 0.65 * gray)
    return Image.fromarray(np.where(clear, pixels, dimmed).round().astype(np.uint8))


def _draw_borders(draw: ImageDraw.ImageDraw, groups: np.ndarray, rows: list[int], columns: list[int]) -> None:
    h, w = groups.shape
    for y, x in product(range(h), range(w)):
        if x + 1 < w and groups[y, x] != groups[y, x + 1]:
            draw.line([(columns[x + 1], rows[y]), (columns[x + 1], rows[y + 1])], fill=KEPT_EDGE, width=1)
        if y + 1 < h and groups[y, x] != groups[y + 1, x]:
            draw.line([(columns[x], rows[y + 1]), (columns[x + 1], rows[y + 1])], fill=KEPT_EDGE, width=1)


def _draw_outline(picture: Image.Image, mask: Image.Image) -> Image.Image:
    inside = mask.convert("L").resize(picture.size, Image.Resampling.BILINEAR).point(lambda value: 255 if value > 127 else 0)
    rim = np.asarray(inside.filter(ImageFilter.MaxFilter(5)), dtype=np.int16) - np.asarray(inside, dtype=np.int16)
    pixels = np.array(picture)
    pixels[rim > 0] = LESION_EDGE
    return Image.fromarray(pixels)


def _with_line(
    picture: Image.Image, text: str, top: int, color: tuple[int, int, int], background: tuple[int, int, int]
) -> Image.Image:
    """Add a line of text above (`top` 0) or below the picture, in the largest font that fits."""
    sheet = Image.new("RGB", (picture.width, picture.height + CAPTION), background)
    sheet.paste(picture, (0, 0 if top else CAPTION))
    size, draw = 15, ImageDraw.Draw(sheet)
    while size > 7 and draw.textlength(text, font=ImageFont.load_default(size)) > sheet.width - 16:
        size -= 1
    draw.text((8, top + CAPTION // 2), text, fill=color, font=ImageFont.load_default(size), anchor="lm")
    return sheet
