"""A picture of what the model looked at: kept patches clear, dropped ones dimmed, the lesion's outline where there is a mask.

Its own file because it draws with Pillow alone: no plotting library is loaded to look at one image.
"""

from __future__ import annotations

from itertools import product

import numpy as np
from PIL import Image, ImageDraw, ImageFilter, ImageFont

from medtokenbudget.model.prediction import Prediction

KEPT_EDGE = (255, 255, 255)
LESION_EDGE = (255, 176, 0)
"""Amber: apart from skin, from the lesion and from the white patch edges also for color-blind eyes."""
DIM = 0.6
CAPTION = 30


def overlay(picture: Image.Image, prediction: Prediction, mask: Image.Image | None = None, side: int = 640) -> Image.Image:
    """The picture with the long side `side`, dropped patches dimmed, and one line that says class, probability and K of N.

    A merger drops nothing: there the lines show which patches were merged into one token.
    """
    shown = _fit(picture.convert("RGB"), side)
    rows, columns = _edges(shown.height, prediction.grid[0]), _edges(shown.width, prediction.grid[1])
    kept = prediction.kept_mask
    if kept is not None:
        shown = _dim(shown, kept, rows, columns)
    groups = prediction.assignment.reshape(prediction.grid) if kept is None else kept.astype(np.int64)
    _draw_borders(ImageDraw.Draw(shown), groups, rows, columns)
    if mask is not None:
        shown = _draw_outline(shown, mask)
    return _with_caption(shown, prediction)


def _fit(picture: Image.Image, side: int) -> Image.Image:
    scale = side / max(picture.size)
    size = (max(1, round(picture.width * scale)), max(1, round(picture.height * scale)))
    return picture.resize(size, Image.Resampling.LANCZOS)


def _edges(length: int, parts: int) -> list[int]:
    """Pixel borders of `parts` equal strips, the outer ones included."""
    return [round(i * length / parts) for i in range(parts + 1)]


def _dim(picture: Image.Image, kept: np.ndarray, rows: list[int], columns: list[int]) -> Image.Image:
    grey = np.asarray(picture.convert("L"), dtype=np.float32)[:, :, None]
    pixels = np.asarray(picture, dtype=np.float32)
    clear = np.repeat(np.repeat(kept, np.diff(rows), axis=0), np.diff(columns), axis=1)[:, :, None]
    dimmed = (1 - DIM) * (0.35 * pixels + 0.65 * grey)
    return Image.fromarray(np.where(clear, pixels, dimmed).round().astype(np.uint8))


def _draw_borders(draw: ImageDraw.ImageDraw, groups: np.ndarray, rows: list[int], columns: list[int]) -> None:
    """A line between neighboring patches of different groups."""
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


def _with_caption(picture: Image.Image, prediction: Prediction) -> Image.Image:
    n = prediction.grid[0] * prediction.grid[1]
    share = f"{prediction.k} of {n} patches" if prediction.kept is not None else f"{n} patches in {prediction.k} tokens"
    text = (
        f"{prediction.label} {prediction.probability:.0%}   {prediction.selector}, budget {prediction.budget:g}: {share}   "
        "research, not a medical device"
    )
    sheet = Image.new("RGB", (picture.width, picture.height + CAPTION), (20, 20, 24))
    sheet.paste(picture, (0, 0))
    size = 15
    draw = ImageDraw.Draw(sheet)
    while size > 7 and draw.textlength(text, font=ImageFont.load_default(size)) > picture.width - 16:
        size -= 1
    draw.text((8, picture.height + CAPTION // 2), text, fill=(235, 235, 235), font=ImageFont.load_default(size), anchor="lm")
    return sheet
