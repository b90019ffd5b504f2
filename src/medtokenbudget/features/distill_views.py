"""The views of the training images, and the tokens of the teacher for them, stored on disk.

A teacher is slow, so it sees every view once and its tokens are kept. Flips and rotations are part of a view: rotated tokens are
not the tokens of the rotated image (for a quarter turn their cosine is only 0.33).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageEnhance, ImageOps
from torch import Tensor

from medtokenbudget.config import Count, check_values
from medtokenbudget.data import Manifest, decode_image
from medtokenbudget.errors import MismatchError, RequestError, WorkError
from medtokenbudget.features.backbone import Backbone
from medtokenbudget.files import read_json, sha256_json, write_json, write_text
from medtokenbudget.progress import progress, say
from medtokenbudget.tensor_files import load_tensors, save_tensors

SHARD = 128
"""Views per file."""
_AREA = (0.35, 1.0)
_ASPECT = (0.8, 1.25)
_COLOR = 0.2


def draw_view(image: Image.Image, image_id: str, view: int, seed: int) -> Image.Image:
    """View 0 is the whole image. The others are crops of 35 to 100 % of its area with random flips, rotations and colors.

    The random numbers depend on seed, view and image id only, so a view does not depend on the other images.
    """
    if view == 0:
        return image
    rng = np.random.default_rng([seed, view, int.from_bytes(hashlib.sha256(image_id.encode()).digest()[:8], "big")])
    width, height = image.size
    area, aspect = rng.uniform(*_AREA), np.exp(rng.uniform(*np.log(_ASPECT)))
    w, h = min(1.0, np.sqrt(area * aspect)) * width, min(1.0, np.sqrt(area / aspect)) * height
    left, top = rng.uniform(0, width - w), rng.uniform(0, height - h)
    image = image.crop((round(left), round(top), round(left + w), round(top + h))).rotate(90 * int(rng.integers(4)), expand=True)
    image = ImageOps.mirror(image) if rng.integers(2) else image
    for change in (ImageEnhance.Brightness, ImageEnhance.Contrast, ImageEnhance.Color):
        image = change(image).enhance(rng.uniform(1 - _COLOR, 1 + _COLOR))
    gains = rng.uniform(1 - _COLOR / 4, 1 + _COLOR / 4, size=3)
    return Image.fromarray(np.clip(np.asarray(image) * gains, 0, 255).astype(np.uint8))


def readable(manifest: Manifest, errors: Path) -> Manifest:
    """The images that can be read; the others are listed with the reason in the file `errors`."""
    good, bad = [], []
    for index in progress(range(len(manifest)), what="Reading", unit="image"):
        try:
            decode_image(manifest.image_path(index))
            good.append(index)
        except RequestError as error:
            bad.append(json.dumps({"image_id": manifest.ids[index], "reason": str(error)}, ensure_ascii=False))
    if bad:
        write_text(errors, "\n".join(bad) + "\n")
        say(f"Skipped {len(bad)} of {len(manifest)} images that cannot be read; {errors} lists the reasons.")
    if not good:
        raise RequestError(f"None of the {len(manifest)} images can be read; {errors} lists the reasons.")
    return manifest.take(good)


class TeacherCache:
    """The tokens of the teacher for every view, in shards on disk.

    A shard contains `pixels` uint8 [n, S, S, 3], and in fp16 `patches` [n, N, D], `cls` [n, D] and `cls_attention` [n, N]. Row r is
    view `r % views` of image `r // views`. Shards are written atomically, so an interrupted run resumes with the next one.
    """

    def __init__(self, folder: Path, manifest: Manifest, teacher: Backbone, views: int, seed: int) -> None:
        check_values({"views": (views, Count)})
        self.folder, self.manifest, self.teacher, self.views, self.seed = folder, manifest, teacher, views, seed
        self.rows = len(manifest) * views
        self.grid, self.dim, self.has_cls = teacher.grid, teacher.dim, teacher.has_cls
        self._open: dict[int, dict[str, Tensor]] = {}
        identity = {"manifest": manifest.data_hash, "teacher": sha256_json(teacher.fingerprint), "views": views, "seed": seed}
        if (folder / "cache.json").exists():
            found = read_json(folder / "cache.json")
            if found != identity:
                raise MismatchError.between(f"The teacher cache {folder}", identity, found, "Choose another --out.")
        else:
            write_json(folder / "cache.json", identity)

    @property
    def shards(self) -> int:
        return -(-self.rows // SHARD)

    def _path(self, shard: int) -> Path:
        return self.folder / f"views-{shard:05d}.safetensors"

    def fill(self, batch_size: int = 16) -> None:
        """Run the teacher on all views that are not stored yet."""
        missing = [shard for shard in range(self.shards) if not self._path(shard).exists()]
        done = self.rows - sum(len(self._members(shard)) for shard in missing)
        with progress(total=self.rows, initial=done, what="Running the teacher", unit="view") as bar, ThreadPoolExecutor(2) as pool:
            for shard in missing:
                rows = self._members(shard)
                pixels = torch.from_numpy(np.stack(list(pool.map(self._pixels, rows))))
                tensors = {"pixels": pixels, **self._teach(pixels, batch_size)}
                save_tensors(self._path(shard), tensors, {"rows": len(rows)})
                bar.update(len(rows))

    def _members(self, shard: int) -> range:
        return range(shard * SHARD, min((shard + 1) * SHARD, self.rows))

    def _pixels(self, row: int) -> np.ndarray:
        index, view = divmod(row, self.views)
        image = decode_image(self.manifest.image_path(index))
        return self.teacher.prepare(draw_view(image, self.manifest.ids[index], view, self.seed))

    def _teach(self, pixels: Tensor, batch_size: int) -> dict[str, Tensor]:
        found = [self.teacher(self.teacher.normalize(part)).to("cpu") for part in pixels.split(batch_size)]
        tensors = {"patches": torch.cat([tokens.patches for tokens in found])}
        if self.has_cls:
            tensors["cls"] = torch.cat([tokens.cls for tokens in found if tokens.cls is not None])
            tensors["cls_attention"] = torch.cat([t.cls_attention for t in found if t.cls_attention is not None])
        half = {name: value.half().contiguous() for name, value in tensors.items()}
        if not all(bool(torch.isfinite(value).all()) for value in half.values()):
            raise WorkError("The tokens of the teacher are not finite in fp16. Check its weights.")
        return half

    def read(self, rows: Tensor) -> dict[str, Tensor]:
        """The stored tensors at `rows`, stacked."""
        found = [self._row(int(row)) for row in rows]
        return {name: torch.stack([row[name] for row in found]) for name in found[0]}

    def _row(self, row: int) -> dict[str, Tensor]:
        shard, place = divmod(row, SHARD)
        if shard not in self._open:
            self._open[shard] = load_tensors(self._path(shard))[0]
        return {name: value[place] for name, value in self._open[shard].items()}

    def sample(self, most: int) -> Tensor:
        """Up to `most` random rows, the same for the same seed."""
        return torch.randperm(self.rows, generator=torch.Generator().manual_seed(self.seed))[:most]

    def batches(self, epoch: int, batch_size: int) -> Iterator[dict[str, Tensor]]:
        """One pass over the images in random order, with one stored view of each."""
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
        order = torch.randperm(len(self.manifest), generator=generator)
        views = torch.randint(self.views, (len(order),), generator=generator)
        for part in (order * self.views + views).split(batch_size):
            yield self.read(part)
