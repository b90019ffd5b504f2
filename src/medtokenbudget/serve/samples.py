"""Sample images for the explorer: synthetic dermoscopy with exact masks, drawn on first use. No image files are shipped."""

from __future__ import annotations

import io
from collections.abc import Collection
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from PIL import Image

from medtokenbudget.data.synthetic import draw

SIZE = 448
# Far from the seeds of synthetic data sets, so no sample is an image that a demo model was trained on.
FIRST_SEED = 900_000_000


@dataclass(frozen=True)
class Sample:
    """One synthetic image: the class that it is drawn as, its seed after `FIRST_SEED`, and whether the lesion is off the center."""

    drawn_as: str
    seed: int
    off_center: bool = False


SAMPLES = {
    "mel": Sample("MEL", 1),
    "nv-off-center": Sample("NV", 6, off_center=True),
    "bcc": Sample("BCC", 2),
    "mel-off-center": Sample("MEL", 4, off_center=True),
    "bkl": Sample("BKL", 2),
    "vasc-off-center": Sample("VASC", 7, off_center=True),
    "df": Sample("DF", 1),
    "scc": Sample("SCC", 1),
}
"""By their names in URLs."""


def offers(classes: Collection[str]) -> list[dict[str, Any]]:
    """Describe the samples for a model with these classes, as JSON values.

    Samples of a class that the model has come first and keep their class. The others are offered without one ("Lesion 1", ...):
    which patches a method keeps is worth seeing for them too, but the model cannot get their class right.

    Example:
        >>> [offer["title"] for offer in offers(["NV"])][:3]
        ['NV, off-center', 'Lesion 1', 'Lesion 2']
    """
    rows: list[dict[str, Any]] = []
    unnamed = 0
    for name, sample in sorted(SAMPLES.items(), key=lambda item: item[1].drawn_as not in classes):
        label = sample.drawn_as if sample.drawn_as in classes else None
        unnamed += label is None
        title = (label or f"Lesion {unnamed}") + (", off-center" if sample.off_center else "")
        rows.append({"id": name, "title": title, "label": label, "off_center": sample.off_center})
    return rows


@lru_cache(maxsize=len(SAMPLES))
def sample_files(name: str) -> tuple[bytes, bytes]:
    sample, image, mask = SAMPLES[name], io.BytesIO(), io.BytesIO()
    drawing = draw(sample.drawn_as, FIRST_SEED + sample.seed, SIZE, sample.off_center)
    Image.fromarray(drawing.image).save(image, format="JPEG", quality=90)
    Image.fromarray(drawing.mask.astype(np.uint8) * 255).save(mask, format="PNG", optimize=True)
    return image.getvalue(), mask.getvalue()
