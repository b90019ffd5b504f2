"""Draws `docs/images/routing.jpg`: which patches the packaged router and the controls keep of drawn lesions at budget 0.3.

Run `python docs/make_routing.py [OUT]` after a change of the router and look at the result.
"""

from __future__ import annotations

import io
import sys
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageDraw

import medtokenbudget as mtb
from medtokenbudget.serve.samples import sample_files

LESIONS = ("mel", "nv-off-center")
"""Samples of the explorer."""
METHODS = (("packaged router", None), ("center", "center"), ("darkness", "darkness"), ("random", "random"))
BUDGET, TILE, GAP, HEAD, FOOT = 0.3, 224, 12, 30, 24
BLUE, ORANGE = (0, 114, 178), (213, 94, 0)


def tile(image: Image.Image, kept: np.ndarray, lesion: np.ndarray, grid: tuple[int, int]) -> Image.Image:
    """The image; dropped skin is pale, kept lesion tinted blue, lost lesion orange, kept skin as it is."""
    pixels = np.asarray(image, np.float32)
    cell = TILE // grid[0]
    large = [np.kron(mask.reshape(grid), np.ones((cell, cell), bool))[..., None] for mask in (kept, lesion)]
    keep, sick = large
    tinted = np.where(keep & sick, 0.45 * pixels + 0.55 * np.array(BLUE), pixels)
    tinted = np.where(~keep & sick, 0.3 * pixels + 0.7 * np.array(ORANGE), tinted)
    tinted = np.where(~keep & ~sick, 0.15 * pixels.mean(-1, keepdims=True) + 0.85 * 255, tinted)
    return Image.fromarray(tinted.round().astype(np.uint8))


def main(out: Path) -> None:
    router = mtb.load("dermoscopy", device="cpu")
    drawn = [[Image.open(io.BytesIO(data)) for data in sample_files(name)] for name in LESIONS]
    pictures, masks = (list(column) for column in zip(*drawn))
    images = [picture.resize((TILE, TILE), Image.Resampling.LANCZOS) for picture in pictures]
    tokens = router.encode(np.stack([router.backbone.prepare(picture) for picture in pictures]), masks)
    assert tokens.lesion is not None
    step = TILE + GAP
    page = Image.new("RGB", (GAP + (1 + len(METHODS)) * step, len(images) * (step + FOOT) + HEAD), "white")
    pen = ImageDraw.Draw(page)
    for column, title in enumerate(["image", *(name for name, _ in METHODS)]):
        pen.text((GAP + column * step + TILE / 2, HEAD - 9), title, fill="#1c2733", font_size=20, anchor="ms")
    for row, image in enumerate(images):
        page.paste(image, (GAP, HEAD + row * (step + FOOT)))
    for column, (_, name) in enumerate(METHODS, start=1):
        if name is None:
            selection = router.router(BUDGET)(tokens)
        else:
            selector = mtb.create_selector(name)
            selection = selector.select(tokens, selector.count(BUDGET, tokens.n), torch.Generator().manual_seed(0))
        assert selection.kept is not None
        for row, image in enumerate(images):
            kept, lesion = selection.kept[row].numpy(), tokens.lesion[row].numpy()
            share = mtb.lesion_retention(kept[None], lesion[None]).of_ceiling
            corner = (GAP + column * step, HEAD + row * (step + FOOT))
            page.paste(tile(image, kept, lesion, tokens.grid), corner)
            pen.text(
                (corner[0] + TILE / 2, corner[1] + TILE + 3), f"{share:.0%} of what fits", fill="#55606b", font_size=17, anchor="mt"
            )
    page.save(out, quality=88, optimize=True)
    print(f"{out}: {out.stat().st_size / 1000:.0f} kB, {page.size}")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent / "images" / "routing.jpg")
