"""Dermoscopy drawn from a seed: one image with its true lesion mask (`draw`), and a data set of files with its manifest.

The statistics follow ISIC 2019 (classes) and the paper (lesion sizes); what is drawn on the skin is in `drawing.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from medtokenbudget.config import Count, DrawnSide, Natural, Seed, Settings, check_values
from medtokenbudget.data import drawing
from medtokenbudget.data.drawing import LOOKS, Canvas, Lesion, Map, Outline, Pigments, smoothstep
from medtokenbudget.data.manifest import Manifest, SplitRule, check_name
from medtokenbudget.data.readers import ISIC_CLASSES
from medtokenbudget.data.splits import apply_split, check_request
from medtokenbudget.errors import UnknownNameError
from medtokenbudget.files import claim, exclusive, write_encoded
from medtokenbudget.jobs import process_pool
from medtokenbudget.runtime import progress

NAME = "drawn dermoscopy"
RENDERER = "05358133b0eda83a"
"""Version of the drawn pixels. Change it whenever a pixel changes, so that drawings of two versions never mix in one folder."""
_TO_SPLIT = 5
"""Images; a smaller set is not split, all of it is training."""

_ISIC_2019 = {"MEL": 4522, "NV": 12875, "BCC": 3323, "AK": 867, "BKL": 2624, "DF": 239, "VASC": 253, "SCC": 628}
"""Images of each class among the 25,331 of ISIC 2019."""

# The paper's prevalence table. The point at 90 % is added so that mean and standard deviation match the table too.
_PREVALENCE = ((0.0, 0.25, 0.50, 0.75, 0.90, 1.0), (0.023, 0.137, 0.277, 0.406, 0.640, 0.969))

_ABSORPTION = {
    "melanin": np.array([0.45, 0.85, 1.22], np.float32),
    "blood": np.array([0.12, 0.72, 0.52], np.float32),
    "blue": np.array([1.02, 0.82, 0.56], np.float32),
}
_WHITE = np.array([0.95, 0.91, 0.90], np.float32)
_KERATIN = np.array([0.93, 0.86, 0.68], np.float32)

# sRGB of skin from Fitzpatrick type I to VI, as a dermatoscope with its own light shows it.
_SKIN_TONES = np.array(
    [[0.91, 0.85, 0.83], [0.87, 0.78, 0.76], [0.81, 0.70, 0.66], [0.72, 0.59, 0.53], [0.60, 0.48, 0.41], [0.48, 0.37, 0.32]]
)
_CASTS = {
    "neutral": (1.0, 1.0, 1.0),
    "lilac": (0.96, 0.92, 1.07),
    "pink": (1.02, 0.93, 0.95),
    "cream": (1.02, 1.01, 0.90),
    "gray": (0.88, 0.94, 0.95),
    "orange": (1.03, 0.94, 0.86),
}


@dataclass(frozen=True)
class Drawing:
    """A drawn image.

    `traits` say where the lesion is and what is around it; `prevalence` is the share of the mask in the image.
    """

    image: npt.NDArray[np.uint8]  # [H, W, 3]
    mask: npt.NDArray[np.bool_]  # [H, W], the lesion pixels
    label: str
    traits: dict[str, Any]


@dataclass(frozen=True)
class _Surroundings:
    """How the skin around a class tends to look. The classes overlap, but their patients, body sites and clinics differ."""

    tone: float
    redness: float
    sun_damage: float
    telangiectasia: float
    hair: float
    ruler: float
    ink: float
    fields: tuple[float, float, float]
    casts: tuple[float, float, float, float, float, float]


# `fields` are the probabilities of full, corners and circle; `casts` those of `_CASTS` in order.
_AROUND = {
    "MEL": _Surroundings(1.0, 0.07, 0.35, 0.08, 0.45, 0.40, 0.08, (0.35, 0.45, 0.20), (0.20, 0.04, 0.04, 0.30, 0.38, 0.04)),
    "NV": _Surroundings(1.4, 0.10, 0.06, 0.02, 0.40, 0.08, 0.14, (0.68, 0.20, 0.12), (0.30, 0.14, 0.22, 0.14, 0.04, 0.16)),
    "BCC": _Surroundings(0.6, 0.22, 0.50, 0.65, 0.22, 0.04, 0.04, (0.60, 0.18, 0.22), (0.10, 0.56, 0.20, 0.04, 0.06, 0.04)),
    "AK": _Surroundings(0.6, 0.34, 0.90, 0.45, 0.22, 0.03, 0.02, (0.84, 0.10, 0.06), (0.08, 0.32, 0.46, 0.04, 0.06, 0.04)),
    "BKL": _Surroundings(2.2, 0.12, 0.62, 0.08, 0.62, 0.15, 0.05, (0.50, 0.30, 0.20), (0.20, 0.06, 0.06, 0.20, 0.14, 0.34)),
    "DF": _Surroundings(1.7, 0.18, 0.05, 0.02, 0.80, 0.03, 0.05, (0.60, 0.25, 0.15), (0.14, 0.30, 0.34, 0.04, 0.04, 0.14)),
    "VASC": _Surroundings(1.1, 0.21, 0.10, 0.08, 0.20, 0.03, 0.04, (0.60, 0.25, 0.15), (0.16, 0.22, 0.36, 0.08, 0.04, 0.14)),
    "SCC": _Surroundings(0.6, 0.31, 0.85, 0.35, 0.35, 0.03, 0.02, (0.70, 0.15, 0.15), (0.10, 0.40, 0.28, 0.04, 0.14, 0.04)),
}


def draw(label: str, seed: int, size: int = 256, off_center: bool = False) -> Drawing:
    """Draw one image. The same arguments give the same bytes; the lesion's share of the image follows the paper's prevalence table.

    `off_center` puts the lesion 0.25 to 0.33 image widths away from the center, with at least 60 % of its area inside. Large
    lesions are made smaller until this holds and their visible part is off-center too.
    """
    if label not in ISIC_CLASSES:
        raise UnknownNameError.of("class", label, ISIC_CLASSES)
    check_values({"seed": (seed, Natural), "size": (size, DrawnSide)})
    # A stream for each purpose, so that a change of the hair leaves the lesion as it was.
    streams = [np.random.default_rng([seed, ISIC_CLASSES.index(label), purpose]) for purpose in range(5)]
    shape_rng, lesion_rng, skin_rng, things_rng, camera_rng = streams
    canvas, around = Canvas(size), _AROUND[label]
    distance, radius, traits = _place(canvas, shape_rng, label, seed, off_center)
    cover = smoothstep(1, -1, (distance - np.float32(radius)) / np.float32(shape_rng.uniform(*LOOKS[label].edge) / 2))
    mask = distance < radius

    base, background = _skin(canvas, skin_rng, around, traits)
    pigments = Pigments.none(canvas)
    detail = float(lesion_rng.uniform(0.75, 1.15) * (0.8 + 0.7 * radius))
    LOOKS[label].paint(Lesion(canvas, lesion_rng, distance / np.float32(radius), radius, detail), pigments)
    picture = _shine_through(base, background, pigments, cover)
    picture, mask = _photograph(picture, mask, canvas, things_rng, around, traits)
    image = _expose(picture, camera_rng)
    return Drawing(image, mask, label, traits | {"prevalence": float(mask.mean())})


def sample_labels(n: int, seed: int) -> list[str]:
    """Draw `n` class names at the frequencies of ISIC 2019; with 8 or more, every class occurs at least once."""
    check_values({"n": (n, Natural), "seed": (seed, Natural)})
    rng = np.random.default_rng([seed, n])
    # Quotas instead of random draws, so that rare classes keep their share in small sets; the largest remainders are rounded up.
    shares = np.array([_ISIC_2019[name] / 25331 for name in ISIC_CLASSES])
    free = n - len(ISIC_CLASSES) if n >= len(ISIC_CLASSES) else n
    quotas = np.maximum(shares * n - (n >= len(ISIC_CLASSES)), 0)
    quotas *= free / max(quotas.sum(), 1e-12)
    counts = np.floor(quotas).astype(int)
    counts[np.argsort(counts - quotas, kind="stable")[: free - counts.sum()]] += 1
    labels = np.repeat(np.arange(len(ISIC_CLASSES)), counts + (n >= len(ISIC_CLASSES)))
    return [ISIC_CLASSES[index] for index in rng.permutation(labels)]


def _place(canvas: Canvas, rng: np.random.Generator, label: str, seed: int, off_center: bool) -> tuple[Map, float, dict[str, Any]]:
    # Steps of the golden ratio, so that consecutive seeds fill the prevalence table evenly.
    share = float(np.interp((int(seed) * 0x9E3779B97F4A7C15 % 2**64) / 2**64, *_PREVALENCE))
    away, heading = rng.normal(0, 0.06, 2), rng.uniform(0, 2 * np.pi)
    if off_center:
        away = rng.uniform(0.25, 0.33) * np.array([np.cos(heading), np.sin(heading)])
    look = LOOKS[label]
    center = (float(0.5 + away[0]), float(0.5 + away[1]))
    outline = Outline.random(rng, center, rng.uniform(*look.irregularity))
    smooth = outline.distance(canvas.x, canvas.y)
    rough = 1 + np.float32(rng.uniform(*look.roughness)) * (canvas.noise(rng, 14) + 0.4 * canvas.noise(rng, 36))
    distance = smooth * np.maximum(rough, 0.5)
    radius = float(np.quantile(distance, share))
    # The outline on a coarse grid three images wide, the image in the middle, `[96, 96]`.
    axis = ((np.arange(-32, 64) + 0.5) / 32).astype(np.float32)
    whole = outline.distance(axis[None, :], axis[:, None])
    if off_center:
        while radius > 0.06 and (_share_inside(whole, radius) < 0.66 or _visible_offset(whole, radius) < 0.2):
            radius *= 0.94
    return distance, radius, {"center": center, "off_center": off_center, "inside": round(_share_inside(whole, radius), 3)}


def _share_inside(whole: Map, radius: float) -> float:
    lesion = whole < radius
    return float(lesion[32:64, 32:64].sum() / max(lesion.sum(), 1))


def _visible_offset(whole: Map, radius: float) -> float:
    rows, columns = np.nonzero(whole[32:64, 32:64] < radius)
    return float(np.hypot(columns.mean() - 15.5, rows.mean() - 15.5) / 32) if rows.size else 1.0


def _skin(canvas: Canvas, rng: np.random.Generator, around: _Surroundings, traits: dict[str, Any]) -> tuple[np.ndarray, Pigments]:
    """Draw the skin: its color `[3]`, and what is everywhere in the skin: redness, freckles, fine vessels, furrows, pores."""
    tone = float(np.clip(around.tone + rng.normal(0, 0.65) + (rng.exponential(1.6) if rng.random() < 0.16 else 0), 0, 5))
    base = np.array([np.interp(tone, np.arange(6), _SKIN_TONES[:, c]) for c in range(3)])
    skin = Pigments.none(canvas)
    redness = max(0.0, around.redness + rng.normal(0, 0.07))
    damage = float(np.clip(around.sun_damage + rng.normal(0, 0.22), 0, 1.2))
    fine = canvas.noise(rng, 44)
    flush = canvas.noise(rng, 3) + damage * (canvas.noise(rng, rng.uniform(7, 14)) + 0.5 * fine)
    meshes = smoothstep(0.9, 0.0, np.abs(canvas.noise(rng, rng.uniform(14, 24))))
    skin.blood += redness * np.maximum(0.75 + 0.22 * flush + 0.35 * damage * meshes, 0)
    skin.melanin += 0.06 * np.maximum(1 + canvas.noise(rng, 3) + 0.35 * fine, 0)
    if damage > 0.3:
        freckles = smoothstep(1.0, 3.0, canvas.noise(rng, rng.uniform(5, 13)) + 0.45 * canvas.noise(rng, 32))
        skin.melanin += 0.5 * damage * freckles
    furrows = np.abs(canvas.noise(rng, rng.uniform(26, 44), rng.uniform(0.7, 1.8)))
    skin.melanin += np.float32(rng.uniform(0.03, 0.10)) * smoothstep(0.35, 0.0, furrows)
    pores = smoothstep(1.9, 3.2, fine)
    skin.white += np.float32(rng.uniform(0.0, 0.25)) * pores
    veins = rng.random() < around.telangiectasia
    if veins:
        skin.blood += np.float32(rng.uniform(0.25, 0.6)) * canvas.strokes(_threads(rng, int(rng.integers(6, 22))))
    traits |= {"fitzpatrick": round(tone) + 1, "telangiectasia": bool(veins)}
    return base.astype(np.float32), skin


def _threads(rng: np.random.Generator, n: int) -> list[tuple[npt.NDArray[np.float64], float, float]]:
    lines = []
    for _ in range(n):
        heading = rng.uniform(0, 2 * np.pi) + rng.normal(0, 0.4, 10).cumsum()
        steps = np.column_stack([np.cos(heading), np.sin(heading)]) * rng.uniform(0.01, 0.035)
        lines.append((rng.uniform(0, 1, 2) + steps.cumsum(0), rng.uniform(0.003, 0.007), rng.uniform(0.4, 1.0)))
    return lines


def _shine_through(base: np.ndarray, skin: Pigments, lesion: Pigments, cover: Map) -> np.ndarray:
    """Let light through skin and lesion: absorbers multiply (Beer and Lambert), white and keratin cover. `[3, H, W]`."""
    fade = 1 - np.float32(0.35) * cover
    # What is in the skin shows less under a lesion.
    amounts = [getattr(skin, name) * fade + np.maximum(getattr(lesion, name), 0) * cover for name in _ABSORPTION]
    white = np.clip(skin.white + lesion.white * cover, 0, 0.9)
    keratin = np.clip(lesion.keratin * cover, 0, 0.9)
    # Scale and scars get the same light as the skin around them, so on dark skin they are not pure white.
    lit = 0.55 + 0.45 * base.mean()
    picture = np.empty((3, *cover.shape), np.float32)
    for channel in range(3):
        through = picture[channel]
        through[:] = 0
        for amount, absorption in zip(amounts, _ABSORPTION.values()):
            through -= amount * absorption[channel]
        np.exp(through, out=through)
        through *= base[channel]
        through += white * (_WHITE[channel] * lit - through)
        through += keratin * (_KERATIN[channel] * lit - through)
    return picture


def _photograph(
    picture: np.ndarray, mask: np.ndarray, canvas: Canvas, rng: np.random.Generator, around: _Surroundings, traits: dict[str, Any]
) -> tuple[np.ndarray, np.ndarray]:
    """Add hair, ink, ruler, bubbles and the field of view; what the frame hides is removed from the mask."""
    cast = str(rng.choice(list(_CASTS), p=around.casts))
    picture = picture * (np.array(_CASTS[cast]) * rng.normal(1, 0.025, 3)).astype(np.float32)[:, None, None]
    kind = str(rng.choice(["dark", "light", "stubble"], p=[0.5, 0.2, 0.3])) if rng.random() < around.hair else "none"
    drawn = {"ink": rng.random() < around.ink, "ruler": rng.random() < around.ruler, "bubbles": rng.random() < 0.14}
    if drawn["ink"]:
        picture = drawing.ink(picture, canvas, rng)
    if kind != "none":
        picture = drawing.hair(picture, canvas, rng, kind, int(2 + rng.exponential(7 if kind == "dark" else 12)))
    if drawn["bubbles"]:
        picture = drawing.bubbles(picture, canvas, rng, int(rng.integers(1, 7)))
    if drawn["ruler"]:
        picture = drawing.ruler(picture, canvas, rng)
    frame = str(rng.choice(["full", "corners", "circle"], p=around.fields))
    light = drawing.field_of_view(canvas, rng, frame)
    if (mask & (light < 0.4)).mean() > 0.01:
        # A frame that hides part of the lesion would change its prevalence, so such images get none.
        frame, light = "full", drawing.field_of_view(canvas, rng, "full")
    slope = rng.normal(0, 0.07, 2)
    # Light that falls off to one side.
    light = light * (1 + np.float32(slope[0]) * (canvas.x - np.float32(0.5)) + np.float32(slope[1]) * (canvas.y - np.float32(0.5)))
    traits |= {"hair": kind, "field": frame} | {name: bool(value) for name, value in drawn.items()}
    return picture * light + np.float32(0.02), mask & (light >= 0.4)


def _expose(picture: np.ndarray, rng: np.random.Generator) -> npt.NDArray[np.uint8]:
    soft = np.float32(rng.uniform(0.25, 1.0) / 4)
    picture = picture * np.float32(255 * rng.normal(1.0, 0.06))
    for channel in picture:
        channel[1:-1] += soft * (channel[:-2] + channel[2:] - 2 * channel[1:-1])
        channel[:, 1:-1] += soft * (channel[:, :-2] + channel[:, 2:] - 2 * channel[:, 1:-1])
    picture += rng.standard_normal(picture.shape[1:], dtype=np.float32) * np.float32(rng.uniform(1.0, 3.0))
    return np.ascontiguousarray(np.clip(picture + np.float32(0.5), 0, 255).astype(np.uint8).transpose(1, 2, 0))


@dataclass(frozen=True)
class Drawings(Settings):
    """A request for `n` square drawings of `size` pixels; `off_center` moves the lesions away from the center."""

    n: Count
    seed: Seed = 0
    size: DrawnSide = 256
    off_center: bool = False


def synthetic_manifest(
    out: Path | str,
    request: Drawings,
    *,
    split: str = "grouped",
    folds: int = 5,
    fold: int = 0,
    select: float = 0.0,
    split_seed: int = 42,
    workers: int = 1,
    name: str = NAME,
    overwrite: bool = True,
) -> Path:
    """Draw the images that do not exist yet, and write their manifest.

    `out` is a folder for the images, masks and `manifest.parquet`; or the path of the manifest, `NAME.parquet`, whose files then
    go to the folder `NAME`. Split and folds are those of `apply_split`. A folder with drawings of another request is a
    MismatchError.
    """
    check_request(split, folds, fold, select, split_seed, workers)
    check_name(name)
    target = Path(out) if Path(out).suffix == ".parquet" else Path(out) / "manifest.parquet"
    folder = target.with_suffix("") if target == Path(out) else target.parent
    labels = sample_labels(request.n, request.seed)
    with exclusive(folder):
        # Files of two requests must not mix.
        drawn = {**asdict(request), "renderer": RENDERER}
        what, advice = f"The request of the drawings in {folder}", "Choose another folder, or delete this one."
        claim(folder / "drawings.json", drawn, what, advice)
        _draw_missing(folder, request, labels, workers)
    records = []
    for index, label in enumerate(labels):
        image, mask = _paths(folder, index)
        records.append({"image_id": image.stem, "image": image, "mask": mask, "label": label, "group": image.stem})
    view = " off-center" if request.off_center else ""
    source = f"synthetic n={request.n} seed={request.seed} size={request.size}{view}"
    manifest = Manifest.from_records(records, ISIC_CLASSES, source=source, split_rule=SplitRule("none"), name=name)
    if request.n >= _TO_SPLIT:
        # No drawing is a copy of another, so there are no duplicates to look for.
        manifest = apply_split(manifest, split, folds=folds, fold=fold, select=select, seed=split_seed, merge_duplicates=False)
    return manifest.write(target, overwrite)


def _paths(folder: Path, index: int) -> tuple[Path, Path]:
    return folder / "images" / f"SYN_{index:06d}.jpg", folder / "masks" / f"SYN_{index:06d}.png"


def _draw_missing(folder: Path, request: Drawings, labels: Sequence[str], workers: int) -> None:
    missing = [index for index in range(request.n) if not all(path.exists() for path in _paths(folder, index))]
    work = (partial(_draw_files, folder, request), missing, [labels[index] for index in missing])
    with nullcontext() if workers <= 1 or len(missing) < 2 * workers else process_pool(workers) as pool:
        drawn = map(*work) if pool is None else pool.map(*work, chunksize=8)
        list(progress(drawn, total=request.n, initial=request.n - len(missing), what="Drawing", unit="image"))


def _draw_files(folder: Path, request: Drawings, index: int, label: str) -> None:
    # Consecutive seeds, over which the lesion sizes fill the prevalence table evenly.
    drawn = draw(label, request.seed * 10_000_000 + index, size=request.size, off_center=request.off_center)
    image_path, mask_path = _paths(folder, index)
    mask = Image.fromarray(np.where(drawn.mask, 255, 0).astype(np.uint8))
    write_encoded(mask_path, lambda stream: mask.save(stream, format="PNG", optimize=True))
    # The image is written last: if it exists, so does its mask.
    image = Image.fromarray(drawn.image)
    write_encoded(image_path, lambda stream: image.save(stream, format="JPEG", quality=95, subsampling=0))
