"""From images to answers: find the images, decode them ahead, run backbone, selector and head, and yield one answer per image.

Everything is lazy: only the names of one folder and the pixels of the next few batches are in memory.
"""

from __future__ import annotations

import base64
import glob
import html
import io
import math
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property, partial
from itertools import repeat
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from medtokenbudget.data import Manifest, decode_image, decode_mask, patch_labels, readers
from medtokenbudget.data.images import require_lesion_values
from medtokenbudget.data.masks import mask_of
from medtokenbudget.errors import MedTokenBudgetError, NonFiniteError, RequestError, ShapeError
from medtokenbudget.routing import Ranker, Selector, gather, rank
from medtokenbudget.routing.conformal import Guarantee
from medtokenbudget.routing.trainable import ScoredRanker, evaluating
from medtokenbudget.runtime import ordered_map
from medtokenbudget.tokens import Selection, TokenBatch

if TYPE_CHECKING:
    from medtokenbudget.backbone.store import FeatureStore
    from medtokenbudget.model.model import MedTokenBudget

SEED = 0
"""Seed of stochastic selectors. Each image starts from it, so that a prediction does not depend on the rest of its batch."""
HALF_A_LEVEL = 0.5 / 255
"""How far outside 0 to 1 floats may lie: normalizing and undoing it rounds."""
Statistics = tuple[Sequence[float], Sequence[float]]
"""Mean and standard deviation of the three channels."""
_FORMS = "`images` must be paths, folders, pictures, arrays, tensors, bytes, open files or a data loader"


@dataclass(frozen=True)
class ImageSource:
    """One image to answer for: its path, id or 'image 3' as `name`, and what to open as `value`.

    A value is a path, Pillow picture, uint8 array [H, W, 3] or the bytes of a file. `reason` and `mask_reason` say why the image
    or its mask could not be used. `size` is (width, height) in pixels, once it was read.
    """

    name: str
    value: Any
    mask: Path | None = None
    reason: str = ""
    mask_reason: str = ""
    size: tuple[int, int] | None = None
    image_id: str = ""

    def open(self) -> Image.Image:
        return open_picture(self.value, self.name)


def open_picture(value: Any, name: str = "image") -> Image.Image:
    if isinstance(value, ImageSource):
        return value.open()
    if isinstance(value, (np.ndarray, Tensor)):
        pixels = as_pixels(value, name)
        if len(pixels) != 1:
            raise ShapeError(f"{name}: expected one image, got a batch {list(value.shape)}.")
        return Image.fromarray(np.ascontiguousarray(pixels[0].numpy(force=True)))
    file = value if isinstance(value, Image.Image) else _file(value)
    if file is None:
        raise RequestError(f"{name}: {_FORMS}, got {type(value).__name__}.")
    return decode_image(file, name=name)


def open_mask(value: Any) -> Image.Image:
    """Open a lesion mask in gray (0 to 255): a path, bytes, a Pillow picture, or a bool or uint8 array [H, W]."""
    file = _file(value)
    if file is not None:
        return decode_mask(file)
    if not isinstance(value, Image.Image):
        array = np.asarray(value)
        value = open_picture(array.astype(np.uint8) * 255 if array.dtype == bool else array, "mask").convert("L")
    require_lesion_values("The mask", value)
    return value


def _file(value: Any) -> Path | bytes | None:
    """Return the path or the bytes of a file; an open file is read here, because it can be read only once."""
    if isinstance(value, (str, os.PathLike)):
        return Path(value)
    data = value.read() if hasattr(value, "read") else value
    if isinstance(data, str):
        raise RequestError(f"{getattr(value, 'name', 'The file')} was opened as text. Open it with mode 'rb'.")
    return bytes(data) if isinstance(data, (bytes, bytearray)) else None


def as_pixels(images: Tensor | np.ndarray, name: str = "`images`", statistics: Statistics | None = None) -> Tensor:
    """Turn one image or a batch into the pixels of files, uint8 [B, H, W, 3] on the same device.

    Images are uint8 from 0 to 255 or floats from 0 to 1, channels (3, or 1 for gray) first or last: [B, 3, H, W], [B, H, W, 3],
    [3, H, W], [H, W, 3] or [H, W]. `statistics` are mean and standard deviation with which floats were normalized. Floats are
    rounded to the 256 levels of a file, so that a picture gives the same answer in every form.
    """
    kind, shape = str(images.dtype).removeprefix("torch."), list(images.shape)
    if kind not in ("uint8", "float16", "bfloat16", "float32", "float64"):
        raise RequestError(f"{name}: pixels must be uint8 from 0 to 255 or floats from 0 to 1, got {kind} {shape}.")
    if 0 in shape:
        raise ShapeError(f"{name}: there are no pixels, got {kind} {shape}.")
    if statistics is not None and kind == "uint8":
        raise RequestError(f"{name}: `normalized` belongs to floats, got {kind}. Leave it out.")
    last, first = len(shape) in (3, 4) and shape[-1] in (1, 3), len(shape) in (3, 4) and shape[-3] in (1, 3)
    # Both or neither: [B, 3, H, 3] has channels in two places, [5, 7, 9] in none.
    if last == first and len(shape) != 2:
        advice = " Leave out the fourth channel, alpha." if 4 in (*shape[-1:], *shape[-3:-2]) else ""
        raise ShapeError(
            f"{name}: pixels must be [B, 3, H, W], [B, H, W, 3], [3, H, W], [H, W, 3] or gray with 1 instead of 3, "
            f"got {kind} {shape}.{advice}"
        )
    # Torch warns about arrays that cannot be written and fails on negative strides, such as those of a flipped picture.
    pixels = images.detach() if isinstance(images, Tensor) else torch.from_numpy(np.require(images, requirements=["C", "W"]))
    pixels = pixels.unsqueeze(-1) if len(shape) == 2 else pixels.movedim(-3, -1) if first else pixels
    pixels = pixels.reshape(-1, *pixels.shape[-3:]).expand(-1, -1, -1, 3)
    if kind == "uint8":
        return pixels
    pixels = pixels.float()
    if statistics is not None:
        mean, std = (torch.tensor(values, device=pixels.device) for values in statistics)
        pixels = pixels * std + mean
    low, high = (float(value) for value in pixels.aminmax())
    if not math.isfinite(low) or not math.isfinite(high):
        raise NonFiniteError(f"{name}: the pixels contain NaN or infinite values.")
    if low < -HALF_A_LEVEL or high > 1 + HALF_A_LEVEL:
        if statistics is not None:
            advice = "with `normalized` undone. Check its mean and standard deviation, and clamp to [0, 1] before normalizing"
        elif low >= 0 and high > 3:
            advice = "so they seem to be from 0 to 255. Divide them by 255, or pass uint8"
        else:
            advice = "so they seem to be normalized. Pass `normalized=True`, or `(mean, std)` if they differ from the model's"
        raise RequestError(f"{name}: floats must be from 0 to 1, got {low:.3g} to {high:.3g}, {advice}.")
    # Clamped, because half a level above white rounds to 256, which is 0 in eight bits: black.
    return pixels.mul(255).round().clamp(0, 255).to(torch.uint8)


def expand(images: Any, statistics: Statistics | None = None) -> Iterator[ImageSource]:
    """Find the images in one item or an iterable of items.

    An item is a path, folder, glob, manifest, Pillow picture, the bytes of a file, an open file, or an array or tensor as
    `as_pixels` takes it. A tuple or list that starts with a picture or tensor is what data sets and data loaders give: its first
    entry is the images.
    """
    number = 0
    for item in _items(images):
        if isinstance(item, (np.ndarray, Tensor)):
            end = number + (len(item) if item.ndim == 4 else 1) - 1
            pixels = as_pixels(item, f"image {number}" if item.ndim != 4 else f"images {number} to {end}", statistics)
            for picture in pixels.numpy(force=True):
                yield ImageSource(f"image {number}", picture, image_id=f"image {number}")
                number += 1
            continue
        if statistics is not None:
            raise RequestError(f"`normalized` belongs to tensors and arrays of floats, got {type(item).__name__}. Leave it out.")
        if isinstance(item, ImageSource):
            yield item
        elif isinstance(item, (str, os.PathLike)):
            yield from _of_path(os.fspath(item))
        elif isinstance(item, Manifest):
            for row, image_id in enumerate(item.ids):
                yield ImageSource(image_id, item.image_path(row), item.mask_path(row), image_id=image_id)
        else:
            value = item if isinstance(item, Image.Image) else _file(item)
            yield ImageSource(f"image {number}", value, image_id=f"image {number}")
        number += 1


def _items(images: Any) -> Iterator[Any]:
    """Yield each item; an open file and an array can be iterated too, but are one."""
    if isinstance(images, _ITEMS) or hasattr(images, "read"):
        yield images
        return
    if isinstance(images, Mapping) or not (hasattr(images, "__iter__") or hasattr(images, "__getitem__")):
        raise RequestError(f"{_FORMS}, or an iterable of these, got {type(images).__name__}.")
    for item in images:
        inner = item[0] if isinstance(item, (tuple, list)) and item else item
        if not (isinstance(inner, _ITEMS) or hasattr(inner, "read")) or (
            inner is not item and isinstance(inner, (str, os.PathLike))
        ):
            raise RequestError(f"{_FORMS}; an iterable gave {type(item).__name__}.")
        yield inner


_ITEMS = (str, os.PathLike, Image.Image, bytes, bytearray, Manifest, ImageSource, np.ndarray, Tensor)


def _of_path(text: str) -> Iterator[ImageSource]:
    path = Path(text)
    if path.is_dir():
        # The images that `mtb data folder` would find; other files are counted and reported in one line.
        any_image, skipped = False, Counter[str]()
        for file in readers.files_below(path):
            if readers.is_image(file):
                any_image = True
                yield ImageSource(str(file), file, image_id=file.relative_to(path).with_suffix("").as_posix())
            else:
                skipped[readers.kind_of(file)] += 1
        readers.report_skipped(path, skipped)
        if not any_image:
            raise readers.no_images(path)
    elif path.suffix.lower() == ".parquet" and path.exists():
        yield from expand(Manifest.read(path))
    # Only where no file has this name: brackets and question marks are allowed in names.
    elif not path.exists() and glob.has_magic(text):
        matches = sorted(glob.iglob(text, recursive=True))
        if not matches:
            raise RequestError(f"No file matches '{text}'.")
        for match in matches:
            yield from _of_path(match)
    else:
        # A missing file is reported with the failures, like a damaged one.
        yield ImageSource(text, path, image_id=path.stem)


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class Routing:
    """The patches that a router keeps of one image at one budget. A notebook displays the image with its kept patches.

    Attributes:
        scores: float32 [N], what the patches were ranked by (for LATS after smoothing), in raster order. None for mergers.
        kept: int64 [K], the kept patches, best first. None for mergers, which combine patches instead of keeping them.
        assignment: int64 [N], the output token that each patch went to; -1 for dropped patches.
        budget: Requested share of patches, in (0, 1]; with a guarantee, the share that this image keeps.
        unfamiliarity: Distance to the training images of the model in units of its limit: above 1 the image is unlike them, and
            its kept patches mean little. None if the model cannot tell.
        lesion: bool [N], lesion patches of the mask, where one was asked for and there is one.
        source: Where the picture comes from. A file is opened again only when it is shown.
    """

    image: str
    scores: np.ndarray | None
    kept: np.ndarray | None
    assignment: np.ndarray
    budget: float
    k: int
    grid: tuple[int, int]
    selector: str
    unfamiliarity: float | None = None
    lesion: np.ndarray | None = None
    guarantee: Guarantee | None = None
    source: ImageSource | None = None
    model: MedTokenBudget | None = None

    @cached_property
    def tokens(self) -> np.ndarray:
        """The tokens in the order of `kept`, float32 [K, D]; of a model with `tokens_from` they are computed when first read."""
        if self.model is None or self.source is None or self.kept is None:
            raise RequestError(f"The routing of {self.image} does not know its model and its picture. Route the image again.")
        return self.model.tokens(self.source).patches[0, torch.from_numpy(self.kept)].float().cpu().numpy()

    @property
    def unfamiliar(self) -> bool:
        """Whether the image is unlike the training images of the model."""
        return self.unfamiliarity is not None and self.unfamiliarity > 1

    @property
    def kept_lesion(self) -> int | None:
        """Number of lesion patches that are kept; None without a mask and for mergers."""
        return None if self.lesion is None or self.kept is None else int(self.lesion[self.kept].sum())

    @property
    def n_patches(self) -> int:
        return self.grid[0] * self.grid[1]

    @property
    def kept_mask(self) -> np.ndarray | None:
        """bool [h, w], True for kept patches; None for mergers."""
        if self.kept is None:
            return None
        mask = np.zeros(self.n_patches, dtype=bool)
        mask[self.kept] = True
        return mask.reshape(self.grid)

    def to_dict(self) -> dict[str, Any]:
        """Return everything except the tokens as JSON values."""
        plain = {name: getattr(self, name) for name in ("image", "budget", "k", "selector", "unfamiliarity")}
        kept, scores = (None if values is None else values.tolist() for values in (self.kept, self.scores))
        return {**plain, "grid": list(self.grid), "kept": kept, "scores": scores}

    def overlay(self, mask: Any = None, side: int = 640) -> Image.Image:
        """Draw the image with kept patches clear and dropped ones dimmed, as `mtb.overlay` does.

        The mask to outline is by default that of the manifest row; `side` is the longer side in pixels.

        """
        if self.source is None:
            raise RequestError(f"The routing of {self.image} does not know its picture. Use mtb.overlay(image, routing).")
        # Here, because the drawing opens pictures with this module.
        from medtokenbudget.model.overlays import overlay

        return overlay(self.source, self, mask if mask is not None else self.source.mask, side)

    @cached_property
    def lesion_map(self) -> np.ndarray:
        """Lesion probability, float32 [h, w] on the finest grid that the method has; computed when it is first read."""
        if self.model is None or self.source is None:
            raise RequestError(f"The routing of {self.image} does not know its model and its picture. Route the image again.")
        if self.scores is not None and not self.model.require_lesion_map(self.selector).finer:
            return self.scores.reshape(self.grid)
        return self.model.lesion_map(self.source, self.selector)

    def mask(self, threshold: float = 0.5) -> np.ndarray:
        """Return the lesion as bool [height, width] in pixels of the image: where its probability is above `threshold`."""
        from medtokenbudget.model.overlays import lesion_mask

        probability = self.lesion_map
        assert self.source is not None
        return lesion_mask(probability, self.source.size or self.source.open().size, threshold)

    @cached_property
    def boxes(self) -> list[tuple[int, int, int, int]]:
        """Left, top, right and bottom of each lesion in pixels of the image, the largest lesion first."""
        from medtokenbudget.model.overlays import lesion_boxes

        return lesion_boxes(self.mask())

    @property
    def box(self) -> tuple[int, int, int, int] | None:
        return self.boxes[0] if self.boxes else None

    def crop(self, margin: float = 0.1) -> Image.Image | None:
        """Cut the largest lesion out of the image, with `margin` of the box's longer side around it; None without a lesion."""
        if self.box is None:
            return None
        assert self.source is not None
        picture, (left, top, right, bottom) = self.source.open(), self.box
        room = round(margin * max(right - left, bottom - top))
        return picture.crop(
            (max(0, left - room), max(0, top - room), min(picture.width, right + room), min(picture.height, bottom + room))
        )

    @property
    def headline(self) -> str:
        return ""

    def __repr__(self) -> str:
        share = f"{self.k} tokens from {self.n_patches} patches" if self.kept is None else f"{self.k} of {self.n_patches} patches"
        warning = "unlike the training images" if self.unfamiliar else ""
        parts = (repr(self.image), self.headline, share, self.selector, warning)
        return f"{type(self).__name__}({', '.join(filter(None, parts))})"

    def _repr_png_(self) -> bytes | None:
        """Draw the overlay for notebooks; None, so that the text is displayed, if the picture cannot be read."""
        stream = io.BytesIO()
        try:
            self.overlay().save(stream, format="PNG")
        except MedTokenBudgetError:
            return None
        return stream.getvalue()

    def _repr_html_(self) -> str | None:
        png = self._repr_png_()
        data = "" if png is None else base64.b64encode(png).decode("ascii")
        return f'<img alt="{html.escape(repr(self))}" src="data:image/png;base64,{data}">' if data else None


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class Prediction(Routing):
    """The prediction for one image at one budget: a routing, class `probabilities` by name, and the `label` with the highest."""

    probabilities: dict[str, float]
    label: str

    @property
    def probability(self) -> float:
        return self.probabilities[self.label]

    @property
    def headline(self) -> str:
        return f"{self.label} {self.probability:.1%}"

    def to_dict(self) -> dict[str, Any]:
        return {"image": self.image, "label": self.label, "probabilities": self.probabilities} | super().to_dict()


Answer = TypeVar("Answer", bound=Routing)
Decoded = tuple[ImageSource, np.ndarray | None, np.ndarray | None]
"""A source, the pixels for the backbone (None if it cannot be read), and the lesion patches [N] of its mask, if asked for."""


def answers(
    model: MedTokenBudget,
    sources: Iterable[ImageSource],
    amount: float | Guarantee,
    method: str,
    kind: type[Answer],
    batch_size: int,
    workers: int,
    masks: bool,
    maps: bool,
    store: FeatureStore | None = None,
) -> Iterator[tuple[ImageSource, Answer | None]]:
    """Yield each source with its answer, in order and in constant memory; `MedTokenBudget.answers` checks the arguments.

    The answer is None for an image that could not be read; `source.reason` says why.
    """
    classifier = model.classifier(method)
    ranker: ScoredRanker | None = None
    if maps and model.scout is None:  # the router of a backbone that is routed early answers for the lesion when it is asked
        ranker = model.require_lesion_map(method)
    elif isinstance(classifier.selector, ScoredRanker) and classifier.selector.finer:
        ranker = classifier.selector
    selector, guarantee = classifier.selector, amount if isinstance(amount, Guarantee) else None
    ranking = selector if isinstance(selector, Ranker) and not selector.stochastic and model.early is None else None
    decode: Callable[[ImageSource], Decoded]
    if store is None:
        decode = partial(_decode, prepare=model.backbone.prepare, grid=model.grid if masks else None)
    else:
        decode = partial(_find, store=store, masks=masks)
    decoded = ordered_map(decode, sources, ahead=2 * batch_size, threads=max(1, workers))
    for batch in _batches(decoded, batch_size):
        columns: dict[str, Iterable[Any]] = {}
        readable = [pixels for _, pixels, _ in batch if pixels is not None]
        if readable:
            with torch.inference_mode(), evaluating(classifier):
                pixels_or_rows = np.stack(readable)
                if store is None:
                    tokens = model.encode(pixels_or_rows)
                else:
                    tokens = store.read(pixels_or_rows, signals=selector.requires).to(model.device)
                sight = None if ranker is None else ranker.see(ranker.check(tokens))
                scores = None if sight is None else sight.scores
                if scores is None and ranking is not None:
                    scores = ranking.score(ranking.check(tokens))
                if isinstance(amount, Guarantee):
                    selections = select_above(selector, tokens, amount, scores)
                else:
                    selections = [select(selector, tokens, model.k(amount, method), scores)]
                    scores = selections[0].scores
                unfamiliarity = model.unfamiliarity(tokens, sight if method == model.main else None)
                if issubclass(kind, Prediction):
                    logits = [classifier.required_head.read(one, tokens.grid) for one in selections]
                    probabilities = torch.cat(logits).softmax(-1).cpu().numpy()
                    columns["probabilities"] = [dict(zip(model.classes, row.tolist())) for row in probabilities]
                    columns["label"] = [model.classes[best] for best in probabilities.argmax(-1)]
            kept = [row for one in selections for row in one.tokens.float().cpu().numpy()]
            indices = [row for one in selections if one.indices is not None for row in one.indices.cpu().numpy()]
            columns |= {
                "tokens": kept if model.tokens_from is None else repeat(None),
                "k": map(len, kept),
                "budget": (len(row) / tokens.n for row in kept) if guarantee else repeat(amount),
                "kept": indices or repeat(None),  # mergers keep no patch
                "assignment": [row for one in selections for row in one.assignment.cpu().numpy()],
                "scores": repeat(None) if scores is None else scores.float().cpu().numpy(),
                "unfamiliarity": repeat(None) if unfamiliarity is None else unfamiliarity.cpu().tolist(),
                "lesion_map": sight.lesion.float().cpu().numpy() if maps and sight is not None else repeat(None),
            }
        rows = zip(*columns.values())
        for source, pixels, lesion in batch:
            if pixels is None:
                yield source, None
                continue
            values: dict[str, Any] = dict(zip(columns, next(rows)), grid=tokens.grid, selector=method, guarantee=guarantee)
            # What this pass knows is not computed when it is read.
            known = {name: value for name in ("tokens", "lesion_map") if (value := values.pop(name)) is not None}
            answer = kind(image=source.name, source=source, model=model, lesion=lesion, **values)
            vars(answer).update(known)
            yield source, answer


def _batches(items: Iterable[Decoded], size: int) -> Iterator[list[Decoded]]:
    batch: list[Decoded] = []
    readable = 0
    for item in items:
        batch.append(item)
        readable += item[1] is not None
        # In a folder of damaged files a batch would never fill, and the list of failures would grow without end.
        if readable == size or len(batch) >= 4 * size:
            yield batch
            batch, readable = [], 0
    if batch:
        yield batch


def _decode(source: ImageSource, prepare: Callable[[Image.Image], np.ndarray], grid: tuple[int, int] | None) -> Decoded:
    try:
        # Names of files are bytes, which need not be text; tables hold text.
        if (printable := source.name.encode("utf-8", "backslashreplace").decode()) != source.name:
            raise RequestError(f"The file name {printable} is not valid UTF-8, so no table can name it. Rename the file.")
        picture = source.open()
        pixels, source = prepare(picture), replace(source, size=picture.size)
    except RequestError as error:
        return replace(source, reason=str(error)), None, None
    if grid is None or source.mask is None:
        return source, pixels, None
    try:
        return source, pixels, patch_labels(mask_of(picture.size, source.mask), grid)
    except RequestError as error:
        return replace(source, mask_reason=str(error)), pixels, None


def _find(source: ImageSource, store: FeatureStore, masks: bool) -> Decoded:
    """Return the number of an image's row in a store, in place of its pixels, and the lesion patches that the store knows."""
    rows = store.rows([source.image_id], strict=False)
    if not len(rows):
        return replace(source, reason=f"{source.name} has no tokens in the store {store.path}."), None, None
    known = masks and bool(store.has_mask[rows[0]])
    return source, rows[0], store.lesion[rows[0]].numpy().astype(bool) if known else None


def select(selector: Selector, tokens: TokenBatch, k: int, scores: Tensor | None = None) -> Selection:
    """Select k tokens of each image, whatever the other images of the batch are; by `scores` [B, N] where they are known."""
    if scores is not None:
        return replace(gather(tokens.patches, rank(scores)[:, :k]), scores=scores)
    if selector.stochastic and len(tokens) > 1:
        # One image at a time: in a batch the draws of an image would depend on the images before it.
        each = [select(selector, tokens.take([row]), k) for row in range(len(tokens))]
        values = {field.name: [getattr(one, field.name) for one in each] for field in fields(Selection)}
        joined: dict[str, Any] = {name: None if parts[0] is None else torch.cat(parts) for name, parts in values.items()}
        return Selection(**joined)
    return selector.select(tokens, k, torch.Generator().manual_seed(SEED) if selector.stochastic else None)


def select_above(selector: Selector, tokens: TokenBatch, guarantee: Guarantee, scores: Tensor | None) -> list[Selection]:
    """Select the patches whose scores [B, N] are above the threshold of a guarantee: one selection per image, because K differs."""
    if scores is None:
        raise RequestError(
            f"Selector '{selector.name}' does not rank patches by a score, so it cannot keep the patches above a threshold."
        )
    # One order for all: K differs between the images, so they cannot be gathered as one batch.
    order = rank(scores)
    # In double precision, as in the calibration: a score that equals the threshold is kept.
    counts = guarantee.counts(scores.double().cpu().numpy()).tolist()
    return [gather(tokens.patches[row : row + 1], order[row : row + 1, :k]) for row, k in enumerate(counts)]
