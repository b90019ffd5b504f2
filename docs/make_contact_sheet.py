"""Draws `docs/images/synthetic-contact-sheet.jpg`: each class of the synthetic dermoscopy, off-center lesions, mask outlines.

Run `python docs/make_contact_sheet.py [OUT]` after a change to the drawing and look at the result.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw
from scipy import ndimage

from medtokenbudget.data.readers import ISIC_CLASSES as CLASSES
from medtokenbudget.data.synthetic import Drawing, draw

COLUMNS, TILE, MARGIN, GAP = 8, 156, 84, 3


def outlined(drawing: Drawing) -> np.ndarray:
    """The picture `[H, W, 3]` with the border of its mask in green."""
    border = ndimage.binary_dilation(drawing.mask, iterations=2) & ~drawing.mask
    picture = drawing.image.copy()
    picture[border] = (40, 255, 90)
    return picture


def rows() -> list[tuple[str, list[np.ndarray]]]:
    sheet = [(name, [draw(name, 41 + 97 * i + j).image for j in range(COLUMNS)]) for i, name in enumerate(CLASSES)]
    sheet.append(("off-center", [draw(name, 700 + i, off_center=True).image for i, name in enumerate(CLASSES)]))
    sheet.append(("mask", [outlined(draw(name, 800 + i, off_center=i % 2 == 1)) for i, name in enumerate(CLASSES)]))
    return sheet


def main(out: Path) -> None:
    lines = rows()
    step = TILE + GAP
    page = Image.new("RGB", (MARGIN + COLUMNS * step, len(lines) * step + GAP), "white")
    pen = ImageDraw.Draw(page)
    for row, (title, pictures) in enumerate(lines):
        pen.text((8, GAP + row * step + TILE // 2), title, fill="black", font_size=15, anchor="lm")
        for column, picture in enumerate(pictures):
            tile = Image.fromarray(picture).resize((TILE, TILE), Image.Resampling.LANCZOS)
            page.paste(tile, (MARGIN + column * step, GAP + row * step))
    out.parent.mkdir(parents=True, exist_ok=True)
    page.save(out, quality=86, optimize=True)
    print(f"{out}: {out.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent / "images" / "synthetic-contact-sheet.jpg")
