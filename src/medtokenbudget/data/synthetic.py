"""A data set of drawn dermoscopy: image and mask files with a manifest, the same bytes for the same request.

The drawing itself is in `dermoscopy.py`; this file writes files, resumes, and keeps two requests from mixing in one folder.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from medtokenbudget.config import Count, DrawnSide, Seed, Settings
from medtokenbudget.data import dermoscopy
from medtokenbudget.data.manifest import Manifest, check_name
from medtokenbudget.data.splits import apply_split, check_request
from medtokenbudget.errors import MismatchError
from medtokenbudget.files import read_sealed, sha256_file, sha256_json, write_encoded, write_sealed
from medtokenbudget.jobs import process_pool
from medtokenbudget.locks import exclusive
from medtokenbudget.progress import progress

NAME = "drawn dermoscopy"
_TO_SPLIT = 5
"""Images; a smaller set is not split, all of it is training."""


@dataclass(frozen=True)
class Drawings(Settings):
    """A request for drawn images.

    Attributes:
        n: Number of images.
        seed: Seed of the drawings.
        size: Side of the square images, in pixels.
        off_center: Move the lesions away from the center.
    """

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

    Args:
        out: A folder for the images, masks and `manifest.parquet`; or the path of the manifest, `NAME.parquet`, whose files then go
            to the folder `NAME`.
        request: How many images of which size, and their seed.
        split: Rule of the split; see `apply_split` for this and the next four.
        folds: Number of folds for 'kfold'.
        fold: The fold that becomes the validation part.
        select: Share of the training part to set aside as 'select'.
        split_seed: Seed of the split.
        workers: Processes that draw.
        name: Name of the data set.

    Returns:
        The path of the manifest.

    Raises:
        MismatchError: The folder contains drawings of another request.
    """
    check_request(split, folds, fold, select, split_seed, workers)
    check_name(name)
    named = Path(out).suffix == ".parquet"
    folder = Path(out).with_suffix("") if named else Path(out)
    target = Path(out) if named else folder / "manifest.parquet"
    with exclusive(folder):
        _draw_all(folder, request, workers)
    labels, ids = _labels(request), _ids(request)
    records = [
        {"image_id": one, "image": str(_image(folder, one)), "mask": str(_mask(folder, one)), "label": label, "group": one}
        for one, label in zip(ids, labels)
    ]
    view = " off-center" if request.off_center else ""
    source = f"synthetic n={request.n} seed={request.seed} size={request.size}{view}"
    manifest = Manifest.from_records(records, dermoscopy.CLASSES, source=source, name=name)
    if request.n < _TO_SPLIT:
        return replace(manifest, split_rule="none").write(target, overwrite)
    # No drawing is a copy of another, so there are no duplicates to look for.
    manifest = apply_split(manifest, split, folds=folds, fold=fold, select=select, seed=split_seed, merge_duplicates=False)
    return manifest.write(target, overwrite)


def _draw_all(folder: Path, request: Drawings, workers: int) -> None:
    """Draw the images and masks that do not exist yet."""
    _claim(folder, request)
    jobs = [
        (folder, one, label, _seed(request.seed, index), request.size, request.off_center)
        for index, (one, label) in enumerate(zip(_ids(request), _labels(request)))
        if not (_image(folder, one).exists() and _mask(folder, one).exists())
    ]
    bar = progress(_run(jobs, workers), total=request.n, initial=request.n - len(jobs), what="Drawing", unit="image")
    for _ in bar:
        pass


def _labels(request: Drawings) -> list[str]:
    return [str(label) for label in dermoscopy.sample_labels(request.n, request.seed)]


def _ids(request: Drawings) -> list[str]:
    return [f"SYN_{index:06d}" for index in range(request.n)]


def _image(folder: Path, name: str) -> Path:
    return folder / "images" / f"{name}.jpg"


def _mask(folder: Path, name: str) -> Path:
    return folder / "masks" / f"{name}.png"


def _seed(seed: int, index: int) -> int:
    """Consecutive seeds, over which the lesion sizes fill the prevalence table evenly."""
    return seed * 10_000_000 + index


def _claim(folder: Path, request: Drawings) -> None:
    """Write down what is drawn into a folder; files of two requests must not mix."""
    code = sorted(Path(dermoscopy.__file__).parent.glob("dermoscopy*.py"))
    wanted = {**asdict(request), "renderer": sha256_json([sha256_file(path) for path in code])[:16]}
    note, advice = folder / "drawings.json", "Choose another folder, or delete this one."
    if not note.exists():
        write_sealed(note, wanted)
    elif (found := read_sealed(note, advice)) != wanted:
        raise MismatchError.between(f"The request of the drawings in {folder}", wanted, found, advice)


def _run(jobs: list[tuple[Any, ...]], workers: int) -> Iterator[None]:
    if workers <= 1 or len(jobs) < 2 * workers:
        yield from map(_draw, jobs)
        return
    with process_pool(workers) as pool:
        yield from pool.map(_draw, jobs, chunksize=8)


def _draw(job: tuple[Path, str, str, int, int, bool]) -> None:
    folder, name, label, seed, size, off_center = job
    drawing = dermoscopy.draw(label, seed, size=size, off_center=off_center)
    mask = Image.fromarray(np.where(drawing.mask, 255, 0).astype(np.uint8))
    write_encoded(_mask(folder, name), lambda stream: mask.save(stream, format="PNG", optimize=True))
    # The image is written last: if it exists, so does its mask.
    image = Image.fromarray(drawing.image)
    write_encoded(_image(folder, name), lambda stream: image.save(stream, format="JPEG", quality=95, subsampling=0))
