"""Example images: which lesion patches each method kept and lost, and the scores behind that.

The only part of the report that opens images. The best, the median and the worst image are shown, never a choice by hand.
"""

from __future__ import annotations

import base64
import io
from dataclasses import dataclass

import numpy as np
from matplotlib import colormaps
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from PIL import Image, ImageFilter

from medtokenbudget.data.images import decode_image, decode_mask
from medtokenbudget.errors import RequestError
from medtokenbudget.metrics import lesion_retention, ratio, reachable
from medtokenbudget.model.looks import look
from medtokenbudget.reporting.intervals import PatchOrders, ReportRun
from medtokenbudget.reporting.style import LOST

SIDE = 208
KEPT_TINT = "#3d9be9"
"""Lighter than the blue of the curves, so that it shows on dark lesions."""
_ALSO = "attention-entropy"
"""Shown next to the leading methods and the controls."""


@dataclass(frozen=True)
class Example:
    """One image: its id, why it was chosen, a description, and its tiles as (title, caption, picture)."""

    image_id: str
    reason: str
    text: str
    tiles: list[tuple[str, str, Image.Image]]


def examples(run: ReportRun) -> list[Example]:
    """Show the images of which the method keeps most, a median amount, and least, relative to what is possible.

    Without masks, patch orders or readable images there are none, with a note in `run.missing`.
    """
    orders, method, k = run.orders, run.focus, run.k
    if orders is None or run.manifest is None:
        return []
    seed = orders.seed_of(method)
    if seed is None:
        run.missing.append(f"Pictures of kept patches: the run has no patch order of {look(method).title}.")
        return []
    share, size = orders.share_of_possible(method, seed, k), orders.lesion.sum(1)
    measured = np.flatnonzero(~np.isnan(share))
    if not measured.size:
        run.missing.append("Pictures of kept and lost lesion patches: no image has a lesion mask.")
        return []
    # Of several images with all that is possible, the largest lesion that fits the budget shows most.
    ranked = measured[np.lexsort((size[measured], size[measured] <= k, share[measured]))]
    # Of those that tie with the median too: of a lesion that does not fit, most is lost by any method.
    middle = int(ranked[len(ranked) // 2])
    tied = [int(row) for row in ranked[:-1] if share[row] == share[middle] and size[row] <= k]
    rows = {int(ranked[-1]): "best", tied[len(tied) // 2] if tied else middle: "median", int(ranked[0]): "worst"}
    made = [_example(run, orders, row, reason) for row, reason in rows.items()]
    if absent := made.count(None):
        run.missing.append(f"{absent} of {len(made)} example pictures: the image files named in the manifest cannot be read.")
    return [example for example in made if example is not None]


def _example(run: ReportRun, orders: PatchOrders, row: int, reason: str) -> Example | None:
    name, k = orders.image_ids[row], run.k
    picture, mask = _pictures(run, name)
    if picture is None:
        return None
    lesion = orders.lesion[row].reshape(orders.grid)
    outline = _outline(mask if mask is not None else _enlarge(lesion))
    size = int(lesion.sum())
    possible = float(ratio(reachable(size, k), size))
    tiles, text = [("Image", "mask outlined", _with_outline(np.asarray(picture, np.float64), outline))], _label(run, name)
    for method in (*run.emphasized, _ALSO):
        seed = orders.seed_of(method)
        if seed is None:
            continue
        kept = np.zeros(lesion.size, bool)
        kept[orders.order[method, seed][row, :k]] = True
        kept = kept.reshape(orders.grid)
        share = f"{100 * lesion_retention(kept.reshape(1, -1), lesion.reshape(1, -1)).pooled:.0f}% of lesion"
        tiles.append((look(method).title, share, _kept_tile(picture, kept, lesion, outline)))
        if method == run.focus:
            text = f"{share} kept, of {100 * possible:.0f}% reachable. {text}"
            if (method, seed) in orders.scores:
                tiles.append(
                    ("Scores", "yellow is high", _score_tile(orders.scores[method, seed][row].reshape(orders.grid), outline))
                )
    return Example(name, reason, text.strip(), tiles)


def _label(run: ReportRun, name: str) -> str:
    rows = run.focus_rows[run.focus_rows["image_id"] == name]
    if rows.empty or rows["label"].iloc[0] < 0:
        return ""
    true, predicted = (str(rows[column].iloc[0]) for column in ("label_name", "predicted_name"))
    return f"{true}, classified as {predicted}. " if true != predicted else f"{true}, classified correctly. "


def _pictures(run: ReportRun, name: str) -> tuple[Image.Image | None, np.ndarray | None]:
    """The image as a square of `SIDE` pixels and its mask `[SIDE, SIDE]` bool; None where a file cannot be read."""
    manifest = run.manifest
    if manifest is None or name not in manifest.ids:
        return None, None
    index = manifest.ids.index(name)
    try:
        picture = decode_image(manifest.image_path(index)).resize((SIDE, SIDE), Image.Resampling.BICUBIC)
    except (RequestError, OSError):
        return None, None
    path = manifest.mask_path(index)
    try:
        mask = None if path is None else decode_mask(path).resize((SIDE, SIDE), Image.Resampling.BILINEAR)
    except (RequestError, OSError):
        mask = None
    return picture, None if mask is None else np.asarray(mask) > 127


def _enlarge(patches: np.ndarray) -> np.ndarray:
    rows, columns = (np.arange(SIDE) * count // SIDE for count in patches.shape)
    return patches[np.ix_(rows, columns)]


def _outline(mask: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Pixels of a white line with a dark edge, visible on any skin."""
    picture = Image.fromarray(mask.astype(np.uint8) * 255)
    wide, narrow = (np.asarray(picture.filter(ImageFilter.MaxFilter(size))) > 0 for size in (5, 3))
    inner = np.asarray(picture.filter(ImageFilter.MinFilter(3))) > 0
    return narrow & ~mask, (wide & ~narrow) | (mask & ~inner)


def _with_outline(pixels: np.ndarray, outline: tuple[np.ndarray, np.ndarray]) -> Image.Image:
    light, dark = outline
    pixels = pixels.copy()
    pixels[dark] = 0.35 * pixels[dark]
    pixels[light] = 255
    return Image.fromarray(np.clip(pixels, 0, 255).round().astype(np.uint8))


def _score_tile(scores: np.ndarray, outline: tuple[np.ndarray, np.ndarray]) -> Image.Image:
    low, high = float(scores.min()), float(scores.max())
    scaled = (scores - low) / (high - low) if high > low else np.zeros_like(scores)
    return _with_outline(255 * colormaps["cividis"](_enlarge(scaled))[..., :3], outline)


def _kept_tile(picture: Image.Image, kept: np.ndarray, lesion: np.ndarray, outline: tuple[np.ndarray, np.ndarray]) -> Image.Image:
    """Kept patches stay clear, dropped ones are faded; lesion patches are blue when kept and orange when lost."""
    pixels = np.asarray(picture, np.float64)
    gray = pixels.mean(2, keepdims=True)
    tinted = np.where(_enlarge(kept)[..., None], pixels, 0.28 * gray + 0.72 * 238)
    for where, color, strength in ((kept & lesion, KEPT_TINT, 0.55), (~kept & lesion, LOST, 0.72)):
        tint = 255 * np.array(to_rgb(color))
        tinted = np.where(_enlarge(where)[..., None], (1 - strength) * tinted + strength * tint, tinted)
    return _with_outline(tinted, outline)


def jpeg(picture: Image.Image) -> str:
    """Encode a picture for the page, as base64."""
    buffer = io.BytesIO()
    picture.save(buffer, "JPEG", quality=84, subsampling=0)
    return base64.b64encode(buffer.getvalue()).decode()


def figure(rows: list[Example]) -> Figure:
    """Draw the same tiles as one figure, one row per image."""
    columns = max(len(example.tiles) for example in rows)
    width, height, side, gap = 1.45 * columns, 1.95 * len(rows), 1.36, 0.045
    # Placed by hand, because a layout engine takes seconds for this many axes. Set once, so that saving does not bring it back.
    fig = Figure(figsize=(width, height), layout="constrained")
    fig.set_layout_engine("none")
    for r, example in enumerate(rows):
        for c, (title, caption, picture) in enumerate(example.tiles):
            axes = fig.add_axes(((1.45 * c + gap) / width, 1 - (1.95 * r + 0.5 + side) / height, side / width, side / height))
            axes.set_axis_off()
            axes.imshow(np.asarray(picture), interpolation="nearest")
            axes.set_title(f"{title}\n{caption}", fontsize=8, fontweight="normal", pad=3)
    return fig
