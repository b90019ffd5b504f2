"""Example images: the image, the scores, and which lesion patches each method kept and lost.

The only part of the report that opens images. Which images are shown follows a fixed rule and includes those with the lowest
retention.
"""

from __future__ import annotations

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
from medtokenbudget.reporting.evidence import Evidence
from medtokenbudget.reporting.looks import look
from medtokenbudget.reporting.patch_orders import PatchOrders
from medtokenbudget.reporting.style import LOST

SIDE = 208
KEPT_TINT = "#3d9be9"
"""Lighter than the blue of the curves, so that it shows on dark lesions."""
_QUANTILES = ((0.9, "90th percentile"), (0.5, "median"), (0.25, "25th percentile"))
_WORST = 4
_ALSO = "attention-entropy"
"""Shown beside the leading methods and the controls."""


@dataclass(frozen=True)
class Tile:
    """One small picture and its caption."""

    title: str
    caption: str
    picture: Image.Image

    def jpeg(self) -> bytes:
        buffer = io.BytesIO()
        self.picture.save(buffer, "JPEG", quality=84, subsampling=0)
        return buffer.getvalue()


@dataclass(frozen=True)
class Example:
    """One image: its id, why it was chosen, a description, and its tiles."""

    image_id: str
    reason: str
    text: str
    tiles: list[Tile]


@dataclass(frozen=True)
class Gallery:
    """The example images of a report: typical ones and those with the lowest retention."""

    typical: list[Example]
    worst: list[Example]
    budget: float
    k: int


def gallery(evidence: Evidence) -> Gallery | None:
    """Chooses the examples; None with a note in `evidence.missing` without masks, patch orders or readable images."""
    orders, method, k = evidence.orders, evidence.focus, evidence.k
    if orders is None or evidence.manifest is None:
        return None
    seed = orders.seed_of(method)
    if seed is None:
        evidence.missing.append(f"Pictures of kept patches: the run has no patch order of {look(method).name}.")
        return None
    share = orders.share_of_possible(method, seed, k)
    measured = np.flatnonzero(~np.isnan(share))
    if not measured.size:
        evidence.missing.append("Pictures of kept and lost lesion patches: no image has a lesion mask.")
        return None
    ranked = measured[np.argsort(share[measured], kind="stable")]
    worst = [(int(row), "lowest retention") for row in ranked[:_WORST]]
    chosen = [(int(ranked[round(q * (len(ranked) - 1))]), why) for q, why in _QUANTILES]
    chosen = [(row, why) for i, (row, why) in enumerate(chosen) if row not in [r for r, _ in [*worst, *chosen[:i]]]]
    shown = {row: _example(evidence, orders, row, why) for row, why in [*chosen, *worst]}
    absent = sum(example is None for example in shown.values())
    if absent:
        evidence.missing.append(f"{absent} of {len(shown)} example pictures: the image files named in the manifest cannot be read.")
    typical, failed = ([e for row, _ in rows if (e := shown[row]) is not None] for rows in (chosen, worst))
    return Gallery(typical, failed, evidence.headline, k) if typical or failed else None


def _example(evidence: Evidence, orders: PatchOrders, row: int, reason: str) -> Example | None:
    name, k = orders.image_ids[row], evidence.k
    picture, mask = _pictures(evidence, name)
    if picture is None:
        return None
    lesion = orders.lesion[row].reshape(orders.grid)
    outline = _outline(mask if mask is not None else _enlarge(lesion))
    tiles = [Tile("Image", "mask outlined", _drawn(picture, outline))]
    first = orders.seed_of(evidence.focus)
    if first is not None and (evidence.focus, first) in orders.scores:
        scores = orders.scores[evidence.focus, first][row].reshape(orders.grid)
        tiles.append(Tile("Scores", "yellow is high", _score_tile(scores, outline)))
    for method in (*evidence.emphasized, _ALSO):
        seed = orders.seed_of(method)
        if seed is None:
            continue
        kept = orders.kept(method, seed, k)[row].reshape(orders.grid)
        share = f"{100 * lesion_retention(kept.reshape(1, -1), lesion.reshape(1, -1)).pooled:.0f}% of lesion"
        tiles.append(Tile(look(method).name, share, _kept_tile(picture, kept, lesion, outline)))
    size = int(lesion.sum())
    possible = float(ratio(reachable(size, k), size))
    text = f"{_label(evidence, name)}The lesion covers {size} of {lesion.size} patches; at most {100 * possible:.0f}% can be kept."
    return Example(name, reason, text, tiles)


def _label(evidence: Evidence, name: str) -> str:
    rows = evidence.main_predictions
    rows = rows[(rows["image_id"] == name) & (rows["method"] == evidence.focus) & np.isclose(rows["budget"], evidence.headline)]
    if rows.empty or rows["label"].iloc[0] < 0:
        return ""
    true, said = (str(rows[column].iloc[0]) for column in ("label_name", "predicted_name"))
    return f"{true}, classified as {said}. " if true != said else f"{true}, classified correctly. "


def _pictures(evidence: Evidence, name: str) -> tuple[Image.Image | None, np.ndarray | None]:
    """The image as a square of `SIDE` pixels and its mask `[SIDE, SIDE]` bool; None where a file cannot be read."""
    manifest = evidence.manifest
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
    """Enlarges a grid `[h, w]` to pixels `[SIDE, SIDE]`."""
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


def _drawn(picture: Image.Image, outline: tuple[np.ndarray, np.ndarray]) -> Image.Image:
    return _with_outline(np.asarray(picture, np.float64), outline)


def _score_tile(scores: np.ndarray, outline: tuple[np.ndarray, np.ndarray]) -> Image.Image:
    low, high = float(scores.min()), float(scores.max())
    scaled = (scores - low) / (high - low) if high > low else np.zeros_like(scores)
    return _with_outline(255 * colormaps["cividis"](_enlarge(scaled))[..., :3], outline)


def _kept_tile(picture: Image.Image, kept: np.ndarray, lesion: np.ndarray, outline: tuple[np.ndarray, np.ndarray]) -> Image.Image:
    """Kept patches stay clear, dropped ones are faded; lesion patches are blue when kept and orange when lost."""
    pixels = np.asarray(picture, np.float64)
    gray = pixels.mean(2, keepdims=True)
    shown = np.where(_enlarge(kept)[..., None], pixels, 0.28 * gray + 0.72 * 238)
    for where, color, strength in ((kept & lesion, KEPT_TINT, 0.55), (~kept & lesion, LOST, 0.72)):
        tint = 255 * np.array(to_rgb(color))
        shown = np.where(_enlarge(where)[..., None], (1 - strength) * shown + strength * tint, shown)
    return _with_outline(shown, outline)


def figure(examples: list[Example]) -> Figure | None:
    """The same tiles as one figure, one row per image."""
    if not examples:
        return None
    columns = max(len(example.tiles) for example in examples)
    width, height, side, gap = 1.45 * columns, 1.95 * len(examples), 1.36, 0.045
    # Placed by hand, because a layout engine takes seconds for this many axes. Set once, so that saving does not bring it back.
    fig = Figure(figsize=(width, height), layout="constrained")
    fig.set_layout_engine("none")
    for r, example in enumerate(examples):
        for c, tile in enumerate(example.tiles):
            axes = fig.add_axes(((1.45 * c + gap) / width, 1 - (1.95 * r + 0.5 + side) / height, side / width, side / height))
            axes.set_axis_off()
            axes.imshow(np.asarray(tile.picture), interpolation="nearest")
            axes.set_title(f"{tile.title}\n{tile.caption}", fontsize=8, fontweight="normal", pad=3)
    return fig
