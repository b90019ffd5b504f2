"""Sample images for the explorer: synthetic dermoscopy with exact masks, drawn on first use. No image files are shipped."""

from __future__ import annotations

import io
from collections.abc import Collection
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from PIL import Image

from medtokenbudget.data.synthetic import Drawing, draw
from medtokenbudget.errors import UnknownNameError

SIZE = 448
# Far from the seeds of synthetic data sets, so no sample is an image that a demo model was trained on.
FIRST_SEED = 900_000_000


@dataclass(frozen=True)
class Sample:
    """One synthetic image.

    Attributes:
        id: Name in URLs.
        drawn_as: Class that the lesion is drawn as.
        seed: Seed of the drawing, relative to `FIRST_SEED`.
        off_center: Whether the lesion is away from the image center.
    """

    id: str
    drawn_as: str
    seed: int
    off_center: bool = False


@dataclass(frozen=True)
class Offer:
    """A sample as shown for one model; `label` is None if the model does not have the class."""

    sample: Sample
    label: str | None
    title: str


SAMPLES: dict[str, Sample] = {
    sample.id: sample
    for sample in (
        Sample("mel", "MEL", 1),
        Sample("nv-off-center", "NV", 6, off_center=True),
        Sample("bcc", "BCC", 2),
        Sample("mel-off-center", "MEL", 4, off_center=True),
        Sample("bkl", "BKL", 2),
        Sample("vasc-off-center", "VASC", 7, off_center=True),
        Sample("df", "DF", 1),
        Sample("scc", "SCC", 1),
    )
}


def offers(classes: Collection[str]) -> list[Offer]:
    """Return the samples for a model with these classes.

    Samples of a class that the model has come first and keep their class. The others are shown without one ("Lesion 1", ...):
    which patches a method keeps is worth seeing for them too, but the model cannot get their class right.

    Example:
        >>> [offer.title for offer in offers(["NV"])][:3]
        ['NV, off-center', 'Lesion 1', 'Lesion 2']
    """
    known = [sample for sample in SAMPLES.values() if sample.drawn_as in classes]
    others = [sample for sample in SAMPLES.values() if sample.drawn_as not in classes]
    return [
        *(Offer(sample, sample.drawn_as, _title(sample.drawn_as, sample)) for sample in known),
        *(Offer(sample, None, _title(f"Lesion {number}", sample)) for number, sample in enumerate(others, start=1)),
    ]


def _title(name: str, sample: Sample) -> str:
    return f"{name}, off-center" if sample.off_center else name


def image_bytes(name: str) -> bytes:
    """Return the image of a sample as JPEG."""
    return _files(name)[0]


def mask_bytes(name: str) -> bytes:
    """Return the lesion mask of a sample as PNG with values 0 and 255."""
    return _files(name)[1]


@lru_cache(maxsize=len(SAMPLES))
def _files(name: str) -> tuple[bytes, bytes]:
    if name not in SAMPLES:
        raise UnknownNameError.of("sample", name, SAMPLES)
    sample = SAMPLES[name]
    drawing = draw(sample.drawn_as, FIRST_SEED + sample.seed, SIZE, sample.off_center)
    return _image_file(drawing), _mask_file(drawing)


def _image_file(drawing: Drawing) -> bytes:
    stream = io.BytesIO()
    Image.fromarray(drawing.image).save(stream, format="JPEG", quality=90)
    return stream.getvalue()


def _mask_file(drawing: Drawing) -> bytes:
    stream = io.BytesIO()
    Image.fromarray(drawing.mask.astype(np.uint8) * 255).save(stream, format="PNG", optimize=True)
    return stream.getvalue()
