"""Pictures to try the explorer with: drawn dermoscopy with its true mask, made when first asked for. No image file is shipped."""

from __future__ import annotations

import io
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from PIL import Image

from medtokenbudget.data.dermoscopy import Drawing, draw
from medtokenbudget.errors import UnknownNameError

SIZE = 448
# Far from the seeds of drawn data sets, so that no sample is an image that a demo model was trained on.
FIRST_SEED = 900_000_000


@dataclass(frozen=True)
class Sample:
    """One drawing: its name in addresses, its class, its seed (counted from FIRST_SEED), whether the lesion is off the center."""

    id: str
    label: str
    seed: int
    off_center: bool = False

    @property
    def title(self) -> str:
        return f"{self.label}, off-center" if self.off_center else self.label


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


def image_bytes(name: str) -> bytes:
    """The picture of a sample as JPEG."""
    return _files(name)[0]


def mask_bytes(name: str) -> bytes:
    """The lesion of a sample as PNG, 0 and 255."""
    return _files(name)[1]


@lru_cache(maxsize=len(SAMPLES))
def _files(name: str) -> tuple[bytes, bytes]:
    if name not in SAMPLES:
        raise UnknownNameError.of("sample", name, SAMPLES)
    sample = SAMPLES[name]
    drawing = draw(sample.label, FIRST_SEED + sample.seed, SIZE, sample.off_center)
    return _picture(drawing), _mask(drawing)


def _picture(drawing: Drawing) -> bytes:
    stream = io.BytesIO()
    Image.fromarray(drawing.image).save(stream, format="JPEG", quality=90)
    return stream.getvalue()


def _mask(drawing: Drawing) -> bytes:
    stream = io.BytesIO()
    Image.fromarray(drawing.mask.astype(np.uint8) * 255).save(stream, format="PNG", optimize=True)
    return stream.getvalue()
