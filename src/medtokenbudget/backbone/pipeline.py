"""From the plan of a shard to its tensors: threads decode ahead, the backbone runs, and another thread writes finished shards.

Every engine uses this. The batches of a shard depend only on the shard, so its bytes do not depend on the machine's number of
threads or on interruptions.
"""

from __future__ import annotations

import itertools
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from medtokenbudget.backbone import views
from medtokenbudget.backbone.backbone import Backbone
from medtokenbudget.backbone.plan import Item
from medtokenbudget.backbone.preprocess import luminance
from medtokenbudget.backbone.shards import Failure, Row, reason, write_shard
from medtokenbudget.backbone.signal_files import write_signal
from medtokenbudget.backbone.signals import DEFAULT, REGISTRY
from medtokenbudget.config import ExtractConfig
from medtokenbudget.data import decode_image, mask_of
from medtokenbudget.errors import RequestError, WorkError
from medtokenbudget.files import sha256_file
from medtokenbudget.progress import say

Shard = tuple[int, tuple[Item, ...]]
_DTYPES = {"fp16": np.float16, "fp32": np.float32}
_PRECISIONS = {"bf16": torch.bfloat16, "fp16": torch.float16}
"""Number formats of a forward pass under autocast; fp32 runs without it."""
_OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "not enough memory")


@dataclass(frozen=True)
class Prepared:
    """A row that is ready for the forward pass: pixels uint8 [S, S, 3]."""

    row: Row
    pixels: np.ndarray


@dataclass
class Filling:
    """A shard in progress."""

    index: int
    batch_size: int
    rows: list[Row] = field(default_factory=list)
    parts: dict[str, list[np.ndarray]] = field(default_factory=dict)
    failures: list[Failure] = field(default_factory=list)

    def tensors(self) -> dict[str, np.ndarray]:
        return {name: np.concatenate(parts) for name, parts in self.parts.items()}


def prepare(items: tuple[Item, ...], backbone: Backbone, view_seed: int) -> list[Prepared | Failure]:
    """The views of one image, which is decoded once, or the reason why a view cannot be had."""
    first = items[0]
    try:
        if not first.image_file:
            raise RequestError("The image left the manifest before it was extracted.")
        image = decode_image(first.image_file)
        if sha256_file(first.image_file) != first.image:
            raise RequestError(f"{Path(first.image_file).name} changed while it was extracted. Run `mtb extract` again.")
    except RequestError as error:
        return [Failure(item.image, item.view, "image", reason(error, first.image_file)) for item in items]
    done: list[Prepared | Failure] = []
    mask: Image.Image | None = None
    for item in items:
        try:
            if mask is None and item.mask_file is not None and views.is_off_center(item.view):
                mask = mask_of(image.size, item.mask_file)
            geometry = views.geometry_of(item.view, mask, views.image_seed(view_seed, item.image_id))
            row = Row(item.image, item.view, image.size, geometry)
            done.append(Prepared(row, backbone.preprocessing.prepare(geometry.of(image))))
        except RequestError as error:
            done.append(Failure(item.image, item.view, "view", reason(error, item.mask_file or ""), item.mask))
    return done


def fill(
    store: Path,
    shards: Iterable[Shard],
    backbone: Backbone,
    config: ExtractConfig,
    settings: str,
    advance: Callable[[int], Any] = lambda rows: None,
    signals: Sequence[str] | None = None,
) -> None:
    """Make these shards of the store, in order.

    `settings` is recorded with each, `advance` is told how many rows are done, `signals` are computed and stored (None: the default
    ones of the backbone).
    """
    with cpu_threads(config.threads), ThreadPoolExecutor(1, "mtb-write") as writer:
        written: deque[Future[Any]] = deque()
        for filling in _filled(shards, backbone, config, advance, signals):
            # At most one shard is being written while the next is computed, so that memory stays bounded.
            while len(written) > 0:
                written.popleft().result()
            tensors = filling.tensors()
            filling.parts.clear()
            written.append(writer.submit(_write, store, filling, tensors, settings))
            del tensors
        while written:
            written.popleft().result()


def _write(store: Path, filling: Filling, tensors: dict[str, np.ndarray], settings: str) -> None:
    """Publish the shard, then the signals that have files of their own; without them it is complete but for the signals."""
    own = {name: tensors.pop(name) for name in list(tensors) if name in REGISTRY and name not in DEFAULT}
    sidecar = write_shard(store, filling.index, filling.rows, tensors, filling.failures, filling.batch_size, settings)
    for name, values in own.items():
        write_signal(store, filling.index, name, values, sidecar)


def _filled(
    shards: Iterable[Shard],
    backbone: Backbone,
    config: ExtractConfig,
    advance: Callable[[int], Any],
    signals: Sequence[str] | None,
) -> Iterator[Filling]:
    filling: Filling | None = None
    waiting: list[Prepared] = []
    for index, row in _decoded(shards, backbone, config):
        if filling is None or index != filling.index:
            filling, waiting = Filling(index, config.batch_size), []
        if isinstance(row, Failure):
            filling.failures.append(row)
            advance(1)
        elif row is not None:
            waiting.append(row)
        if waiting and (row is None or len(waiting) == config.batch_size):
            forward(filling, waiting, backbone, config, signals)
            advance(len(waiting))
            waiting = []
        if row is None:
            yield filling


def _decoded(shards: Iterable[Shard], backbone: Backbone, config: ExtractConfig) -> Iterator[tuple[int, Prepared | Failure | None]]:
    """Rows in order, decoded ahead across the borders of shards; None after the last row of a shard."""
    with ThreadPoolExecutor(config.workers or min(16, os.cpu_count() or 1), "mtb-decode") as pool:
        queue: deque[tuple[int, Future[list[Prepared | Failure]] | None]] = deque()
        ahead = 0
        try:
            for index, items in shards:
                for _, group in itertools.groupby(items, key=lambda item: item.image):
                    views_of_image = tuple(group)
                    queue.append((index, pool.submit(prepare, views_of_image, backbone, config.view_seed)))
                    ahead += len(views_of_image)
                    while ahead > 2 * config.batch_size and queue:
                        rows = list(_taken(queue))
                        ahead -= sum(row is not None for _, row in rows)
                        yield from rows
                queue.append((index, None))
            while queue:
                yield from _taken(queue)
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def _taken(queue: deque[tuple[int, Future[list[Prepared | Failure]] | None]]) -> Iterator[tuple[int, Prepared | Failure | None]]:
    index, future = queue.popleft()
    if future is None:
        yield index, None
    else:
        yield from ((index, row) for row in future.result())


def forward(
    filling: Filling,
    batch: list[Prepared],
    backbone: Backbone,
    config: ExtractConfig,
    signals: Sequence[str] | None = None,
) -> None:
    """Add one batch to the shard; if memory runs out, halve the batch size for the rest of this shard."""
    for start in range(0, len(batch), filling.batch_size):
        part = batch[start : start + filling.batch_size]
        try:
            fields = compute(part, backbone, _DTYPES[config.dtype], config.precision, signals)
        except (MemoryError, RuntimeError) as error:
            if not _is_out_of_memory(error):
                raise
            fields = None
        if fields is None:
            # Outside the handler, because the traceback keeps the tensors that filled the memory.
            _halve(filling, len(part), backbone)
            forward(filling, batch[start:], backbone, config, signals)
            return
        _add(filling, part, fields)


def _halve(filling: Filling, size: int, backbone: Backbone) -> None:
    if size == 1:
        raise WorkError(
            f"Not enough memory on {backbone.device} for a batch of one image. Close other programs, or use a smaller backbone."
        )
    if backbone.device.type == "cuda":
        torch.cuda.empty_cache()
    filling.batch_size = max(1, size // 2)
    say(f"Out of memory with a batch of {size} images. Continuing shard {filling.index} with batches of {filling.batch_size}.")


def _is_out_of_memory(error: Exception) -> bool:
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or any(text in str(error).lower() for text in _OUT_OF_MEMORY)


@torch.inference_mode()
def compute(
    batch: list[Prepared],
    backbone: Backbone,
    dtype: Any = np.float16,
    precision: str = "fp32",
    signals: Sequence[str] | None = None,
) -> dict[str, np.ndarray]:
    """The fields of these rows as they are stored: the patches, all of them or those that an early route keeps, and the signals."""
    stored = backbone.default_signals if signals is None else tuple(signals)
    pixels = to_device(torch.from_numpy(np.stack([row.pixels for row in batch])), backbone.device)
    images = backbone.normalize(pixels)
    with torch.autocast(backbone.device.type, _PRECISIONS.get(precision), enabled=precision in _PRECISIONS):
        seen = backbone(images, stored)
    tokens = replace(seen.float(), luminance=luminance(pixels, backbone.grid))
    fields: dict[str, np.ndarray] = {}
    if tokens.places is not None:
        fields |= {"tokens": _array(tokens.patches, dtype), "indices": _array(tokens.places, np.int32)}
    else:
        fields["patches"] = _array(tokens.patches, dtype)
    if tokens.cls is not None:
        fields["cls"] = _array(tokens.cls, dtype)
    assert tokens.luminance is not None
    fields["luminance"] = _array(tokens.luminance, np.float32)
    for name in stored:
        fields[name] = _array(getattr(tokens, name), dtype if REGISTRY[name].wide else np.float32)
    return fields


def to_device(pixels: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The pixels on the device; to a GPU from pinned memory, so that the copy runs beside the forward pass before it."""
    if device.type != "cuda":
        return pixels.to(device)
    return pixels.pin_memory().to(device, non_blocking=True)


def _array(value: torch.Tensor, dtype: Any) -> np.ndarray:
    """Convert to the stored format with torch, which is ten times as fast as numpy at half precision."""
    return value.to(torch.from_numpy(np.empty(0, dtype)).dtype).cpu().numpy()


def _add(filling: Filling, batch: list[Prepared], fields: dict[str, np.ndarray]) -> None:
    """Add the rows whose tokens are finite in the stored format to the shard, the others to its errors."""
    tokens = fields["patches" if "patches" in fields else "tokens"]
    finite = torch.from_numpy(tokens).abs().amax((1, 2)).isfinite().numpy()
    for row, good in zip(batch, finite):
        if good:
            filling.rows.append(row.row)
        else:
            why = f"The tokens of the backbone are not finite in {tokens.dtype}."
            filling.failures.append(Failure(row.row.image, row.row.view, "tokens", why))
    for name, value in fields.items():
        filling.parts.setdefault(name, []).append(value if finite.all() else value[finite])


@contextmanager
def cpu_threads(number: int) -> Iterator[None]:
    """Run a block with this number of torch threads; 0 changes nothing."""
    before = torch.get_num_threads()
    if number > 0:
        torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)
