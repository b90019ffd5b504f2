"""Pictures of real routings: the image, the scores of LATS, and what each method kept and lost of the lesion.

Its own file because only this part of the report opens images. Which images are shown follows from a rule, never from taste, and
the worst-kept ones are among them.
"""

from __future__ import annotations

import io
from dataclasses import dataclass

import numpy as np
import pandas as pd
from matplotlib import colormaps
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from PIL import Image, ImageFilter

from medtokenbudget.data.decode import decode_image, decode_mask
from medtokenbudget.errors import RequestError
from medtokenbudget.report.evidence import Evidence, Routing
from medtokenbudget.report.style import LOST, look

SIDE = 208
KEPT_TINT = "#3d9be9"
"""Lighter than the blue of the curves: it must show on dark lesions."""
_QUANTILES = ((0.9, "90th percentile"), (0.5, "median"), (0.25, "25th percentile"))
_WORST = 4
_METHODS = ("lats", "lats:lesion-first", "center", "darkness", "random", "attention-entropy")


@dataclass(frozen=True)
class Tile:
    """One small picture and the words under it."""

    title: str
    caption: str
    picture: Image.Image

    def jpeg(self) -> bytes:
        buffer = io.BytesIO()
        self.picture.save(buffer, "JPEG", quality=84, subsampling=0)
        return buffer.getvalue()


@dataclass(frozen=True)
class Example:
    """One image: what it is, why it was chosen, and its tiles."""

    image_id: str
    reason: str
    text: str
    tiles: list[Tile]


@dataclass(frozen=True)
class Gallery:
    typical: list[Example]
    worst: list[Example]
    budget: float
    k: int


def gallery(evidence: Evidence) -> Gallery | None:
    """Examples by rule, or None with a note in `evidence.missing`: no masks, no orders, or no image within reach."""
    routing, manifest = evidence.routing, evidence.manifest
    if routing is None or manifest is None:
        return None
    seed = routing.seed_of("lats")
    k = headline_k(evidence)
    if seed is None or k is None:
        evidence.missing.append("Pictures of kept patches: the run has no patch order of LATS.")
        return None
    share = kept_share(routing, "lats", seed, k)
    measured = np.flatnonzero(~np.isnan(share))
    if not measured.size:
        evidence.missing.append("Pictures of kept and lost lesion patches: no image has a lesion mask.")
        return None
    ranked = measured[np.argsort(share[measured], kind="stable")]
    worst = [(int(row), "kept least") for row in ranked[:_WORST]]
    chosen = [(int(ranked[round(q * (len(ranked) - 1))]), why) for q, why in _QUANTILES]
    chosen = [(row, why) for i, (row, why) in enumerate(chosen) if row not in [r for r, _ in [*worst, *chosen[:i]]]]
    shown = {row: _example(evidence, routing, row, why, k) for row, why in [*chosen, *worst]}
    absent = sum(example is None for example in shown.values())
    if absent:
        evidence.missing.append(f"{absent} of {len(shown)} example pictures: the image files named in the manifest cannot be read.")
    typical, failed = ([e for row, _ in rows if (e := shown[row]) is not None] for rows in (chosen, worst))
    return Gallery(typical, failed, evidence.headline, k) if typical or failed else None


def headline_k(evidence: Evidence) -> int | None:
    rows = evidence.main
    rows = rows[(rows["method"] == "lats") & np.isclose(rows["budget"], evidence.headline)]
    return None if rows.empty else int(rows["k"].iloc[0])


def kept_share(routing: Routing, method: str, seed: int, k: int) -> np.ndarray:
    """[n] kept lesion patches as a share of what `k` could keep; NaN without a lesion patch."""
    lesion = routing.lesion & routing.has_mask[:, None]
    total = lesion.sum(1).astype(float)
    kept = (routing.kept(method, seed, k) & lesion).sum(1)
    return np.divide(kept, np.minimum(total, k), out=np.full(len(total), np.nan), where=total > 0)


def _example(evidence: Evidence, routing: Routing, row: int, reason: str, k: int) -> Example | None:
    name = routing.image_ids[row]
    picture, mask = _pictures(evidence, name)
    if picture is None:
        return None
    lesion = routing.lesion[row].reshape(routing.grid)
    outline = _outline(mask if mask is not None else _enlarge(lesion))
    tiles = [Tile("Image", "mask outlined", _drawn(picture, outline))]
    first = routing.seed_of("lats")
    if first is not None and first in routing.scores:
        tiles.append(Tile("LATS scores", "yellow is high", _score_tile(routing.scores[first][row].reshape(routing.grid), outline)))
    for method in _METHODS:
        seed = routing.seed_of(method)
        if seed is None:
            continue
        kept = routing.kept(method, seed, k)[row].reshape(routing.grid)
        share = f"{100 * (kept & lesion).sum() / lesion.sum():.0f} % of lesion"
        tiles.append(Tile(look(method).name, share, _kept_tile(picture, kept, lesion, outline)))
    size = int(lesion.sum())
    possible = min(1.0, k / size)
    text = f"{_label(evidence, name)}lesion on {size} of {lesion.size} patches, at most {100 * possible:.0f} % can be kept"
    return Example(name, reason, text, tiles)


def _label(evidence: Evidence, name: str) -> str:
    rows = evidence.main_predictions
    rows = rows[(rows["image_id"] == name) & (rows["method"] == "lats") & np.isclose(rows["budget"], evidence.headline)]
    if rows.empty or rows["label"].iloc[0] < 0:
        return ""
    true, said = evidence.classes[int(rows["label"].iloc[0])], evidence.classes[int(rows["predicted"].iloc[0])]
    return f"{true}, classified as {said}; " if true != said else f"{true}, classified correctly; "


def _pictures(evidence: Evidence, name: str) -> tuple[Image.Image | None, np.ndarray | None]:
    """The image as a square of `SIDE` pixels and its mask `[SIDE, SIDE]` bool; None for what cannot be read."""
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
    """A grid `[h, w]` as pixels `[SIDE, SIDE]`."""
    rows, columns = (np.arange(SIDE) * count // SIDE for count in patches.shape)
    return patches[np.ix_(rows, columns)]


def _outline(mask: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Pixels of a white line with a dark line around it, readable on any skin."""
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
    """Kept patches clear, dropped ones faded; lesion patches blue when kept, orange when lost."""
    pixels = np.asarray(picture, np.float64)
    grey = pixels.mean(2, keepdims=True)
    shown = np.where(_enlarge(kept)[..., None], pixels, 0.28 * grey + 0.72 * 238)
    for where, color, strength in ((kept & lesion, KEPT_TINT, 0.55), (~kept & lesion, LOST, 0.72)):
        tint = 255 * np.array(to_rgb(color))
        shown = np.where(_enlarge(where)[..., None], (1 - strength) * shown + strength * tint, shown)
    return _with_outline(shown, outline)


def figure(examples: list[Example]) -> Figure | None:
    """The same tiles as one figure, a row an image."""
    if not examples:
        return None
    columns = max(len(example.tiles) for example in examples)
    width, height, side, gap = 1.45 * columns, 1.95 * len(examples), 1.36, 0.045
    # Placed by hand: a layout engine takes seconds for this many axes. Named first, so that saving does not bring it back.
    fig = Figure(figsize=(width, height), layout="constrained")
    fig.set_layout_engine("none")
    for r, example in enumerate(examples):
        for c, tile in enumerate(example.tiles):
            axes = fig.add_axes(((1.45 * c + gap) / width, 1 - (1.95 * r + 0.5 + side) / height, side / width, side / height))
            axes.set_axis_off()
            axes.imshow(np.asarray(tile.picture), interpolation="nearest")
            axes.set_title(f"{tile.title}\n{tile.caption}", fontsize=8, fontweight="normal", pad=3)
    return fig


def worst_retained(evidence: Evidence, count: int = 10) -> pd.DataFrame:
    """The images of which LATS kept least at the headline budget: `image_id, label, lesion, kept_lesion, share, of_possible`."""
    rows = evidence.main_predictions
    rows = rows[(rows["method"] == "lats") & np.isclose(rows["budget"], evidence.headline)]
    rows = rows[rows["kept_lesion"].notna() & (rows["lesion"].fillna(0) > 0).to_numpy(bool)]
    if rows.empty:
        return pd.DataFrame()
    first = rows[rows["seed"] == rows["seed"].min()].copy()
    first["share"] = first["kept_lesion"].astype(float) / first["lesion"].astype(float)
    first["of_possible"] = first["kept_lesion"].astype(float) / np.minimum(first["k"], first["lesion"].astype(int))
    return first.sort_values(["of_possible", "image_id"], kind="stable").head(count)
