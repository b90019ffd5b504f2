"""`extract`: run the frozen backbone over what a store does not have of a manifest; called again, it resumes where it stopped.

The plan says which rows belong to which shard, so every worker needs only the number of a shard to know what to do, and a changed
manifest adds shards for what is not planned yet. Threads decode ahead, the backbone runs, another thread writes finished shards.
The batches of a shard depend only on the shard, so its bytes do not depend on the number of threads, on interruptions, or on
whether this process or a Ray cluster made it.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from medtokenbudget.backbone import views
from medtokenbudget.backbone.annotations import hashes_of, reason
from medtokenbudget.backbone.backbone import Backbone
from medtokenbudget.backbone.partial import Early
from medtokenbudget.backbone.preprocess import luminance
from medtokenbudget.backbone.shards import (
    FORMAT,
    NOT_IDENTITY,
    PLAN,
    STORE,
    FailedRow,
    Key,
    Row,
    Shards,
    Sidecar,
    check_same,
    finished_shards,
    map_shard,
    read_plan,
    read_settings,
    read_sidecar,
    read_signal,
    routed_early,
    settings_hash,
    shard_path,
    signal_names,
    write_plan,
    write_shard,
    write_signal,
)
from medtokenbudget.backbone.store import FeatureStore, ordered_map
from medtokenbudget.backbone.stored_signals import DEFAULT, REGISTRY
from medtokenbudget.config import BackboneConfig, ExtractConfig
from medtokenbudget.data import Manifest, decode_image, mask_of
from medtokenbudget.devices import resolve_device
from medtokenbudget.errors import MedTokenBudgetError, RequestError, UnknownNameError, WorkError, first_line
from medtokenbudget.files import remove_leftovers, sha256_file, write_lines, write_sealed
from medtokenbudget.jobs import node, not_shared, ray_cluster, stopped
from medtokenbudget.locks import exclusive
from medtokenbudget.progress import progress, say

ROUTER = "router"
"""Folder in a store that was routed early: the saved router, which models that are trained on the store carry along."""
RETRIES = 10
"""Of a Ray task; an image that kills every worker must not keep a cluster busy forever."""
Advance = Callable[[int], Any]
"""Is called with the number of rows that are done."""
_DTYPES = {"fp16": torch.float16, "fp32": torch.float32}
_PRECISIONS = {"bf16": torch.bfloat16, "fp16": torch.float16}
"""Number formats of a forward pass under autocast; fp32 runs without it."""
_OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "not enough memory")
_ALIKE = 0.99
"""Smallest cosine similarity of stored tokens and those of the pass that adds signals; another machine only rounds differently."""


def extract(
    manifest: Manifest,
    store: Path | str,
    backbone: BackboneConfig,
    config: ExtractConfig | None = None,
    engine: str = "local",
    shards: tuple[int, int] | None = None,
    address: str | None = None,
    early: Early | None = None,
) -> FeatureStore:
    """Add what `store` does not have of the images of `manifest`, and open it with the manifest.

    Images are known by the content of their files: labels, masks, splits and names may change without extracting anything again.
    Images that could not be read before are tried again.

    Args:
        manifest: The images.
        store: Folder of the store; it is made if it does not exist.
        backbone: The frozen backbone.
        config: Views, number format and how to work.
        engine: 'local', or 'ray' for a cluster.
        shards: (i, n) makes only the shards whose number leaves the rest i when divided by n, for job arrays; the returned store
            may then be incomplete (`missing`).
        address: Address of a running Ray cluster.
        early: Routes before or inside the backbone; what it needs is saved in the folder `router` of the store.

    Returns:
        The store, opened with `manifest`.

    Raises:
        RequestError: The request cannot be carried out.
        MismatchError: The store was made with other settings.
    """
    config = config or ExtractConfig()
    _check_request(manifest, config, engine, shards, early)
    path = Path(store)
    loaded = Backbone.load(backbone, resolve_device(config.device))
    if early is not None:
        loaded = early.wrap(loaded)
    loaded.check_signals(config.signals)
    settings = settings_of(loaded.fingerprint, config, backbone.weights)
    i, n = shards or (0, 1)
    # The jobs of an array share the lock: each fills shards of its own.
    with exclusive(path, shared=shards is not None):
        _begin(path, settings)
        if early is not None and not (path / ROUTER).exists():
            early.save(path / ROUTER)
        items = _items(manifest, config, *hashes_of(path, manifest))
        before = read_plan(path)
        finished = finished_shards(path, before)
        planned = _extend(path, list(items), config.shard_size, _readable_now(before, finished, items, loaded, config))
        # Once more for shards that are planned only now: the plan may have been lost, and its finished shards stay.
        finished |= finished_shards(path, {index: keys for index, keys in planned.items() if index not in finished})
        signals = _signals(path, finished, loaded, config)
        todo = [
            (index, tuple(items.get(key) or Item(key[0], key[1], "", "") for key in keys))
            for index, keys in sorted(planned.items())
            if index % n == i and index not in finished and any(key in items for key in keys)
        ]
        files = {item.image: item.image_file for item in items.values()}
        mine = {index: sidecar for index, sidecar in sorted(finished.items()) if index % n == i}
        added = _additions(path, mine, signals, files) if early is None else []
        left = sum(len(rows) for _, rows in todo) + sum(addition.rows for addition in added)
        if todo or added:
            work = Work(path.resolve(), backbone, loaded.fingerprint, config, settings_hash(settings), signals)
            with progress(total=max(len(items), left), initial=max(0, len(items) - left), what="Extracting", unit="image") as bar:
                if engine == "ray":
                    _run_on_ray(work, todo, added, address, bar.update)
                else:
                    fill(work, todo, loaded, bar.update)
                    for addition in added:
                        _add_signals(work, addition, loaded, bar.update)
        opened = FeatureStore.open(path, manifest, partial=True)
        if not opened.missing:
            write_lines(path / "errors.jsonl", (error.to_json() for error in opened.errors))
            remove_leftovers(path)
        return opened


def _check_request(
    manifest: Manifest, config: ExtractConfig, engine: str, shards: tuple[int, int] | None, early: Early | None
) -> None:
    """Raise a RequestError for what no extraction of this manifest can follow, before the backbone is loaded."""
    if early is not None and engine != "local":
        raise RequestError(f"--route runs on this machine, not with --engine {engine}. Drop one of them.")
    if early is not None and config.signals:
        raise RequestError("--signals are stored with all patches, but routed stores have only some. Drop --signals.")
    if engine not in ("local", "ray"):
        raise UnknownNameError.of("engine", engine, ("local", "ray"))
    if not len(manifest):
        raise RequestError(f"The manifest '{manifest.name}' contains no images, so there is nothing to extract.")
    if config.views != "off-center" and config.crops != 1:
        raise RequestError(
            f"crops = {config.crops} needs views = 'off-center', but the views are '{config.views}'. Change the views, "
            "or leave out crops."
        )
    if config.views != "off-center" and config.view_seed:
        raise RequestError(f"view_seed = {config.view_seed} needs views = 'off-center'. Change the views, or leave out view_seed.")
    if config.views == "off-center" and not manifest.rows["mask"].notna().any():
        raise RequestError(
            f"The views 'off-center' are cropped around the lesion mask, but no image of '{manifest.name}' has a mask. "
            "Add masks to the manifest, or choose other views."
        )
    if shards is not None and (shards[1] < 1 or not 0 <= shards[0] < shards[1]):
        raise RequestError(f"--shards {shards[0]}/{shards[1]} does not exist. Use I/N with I from 0 to N - 1.")


def settings_of(fingerprint: dict[str, Any], config: ExtractConfig, weights: Path | None = None) -> dict[str, Any]:
    """The content of `store.json`: everything that the numbers in the store depend on, except the images."""
    settings = {
        "format": FORMAT,
        "backbone": fingerprint,
        "weights": None if weights is None else weights.name,
        "keep": "routed" if routed_early(fingerprint) else "patches",
        "dtype": config.dtype,
        "precision": config.precision,
        "view_seed": config.view_seed,
        "shard_size": config.shard_size,
        "batch_size": config.batch_size,
    }
    # As it is read back: JSON turns tuples into lists.
    plain: dict[str, Any] = json.loads(json.dumps(settings, default=str))
    return plain


def _begin(store: Path, settings: dict[str, Any]) -> None:
    """Begin a store, or make sure that the one that is there was begun with the same settings."""
    if not (store / STORE).exists():
        write_sealed(store / STORE, settings)
    check_same(
        f"The store {store}",
        expected={key: value for key, value in settings.items() if key not in NOT_IDENTITY},
        found=read_settings(store),
        advice="Use the settings of this store, or choose another --store.",
    )


@dataclass(frozen=True)
class Item:
    """One row to be made: which view of which image file, with the mask for off-center crops.

    `image` and `mask` are the SHA-256 of the files, `image_id` seeds the crop. An empty `image_file` means that the image left the
    manifest before it was extracted.
    """

    image: str
    view: str
    image_id: str
    image_file: str
    mask_file: str | None = None
    mask: str | None = None

    @property
    def key(self) -> Key:
        return self.image, self.view


def _items(manifest: Manifest, config: ExtractConfig, images: Sequence[str | None], masks: Sequence[str | None]) -> dict[Key, Item]:
    """The rows of every image in the manifest's order, the views of an image beside each other, each content once.

    `images` and `masks` are the SHA-256 of the files, None for one that cannot be read or does not exist.
    """
    splits = manifest.rows["split"].tolist()
    items: dict[Key, Item] = {}
    for i, image_id in enumerate(manifest.ids):
        image, path = images[i], manifest.mask_path(i)
        if image is None:
            continue
        for view in views.views_of(config.views, splits[i], path is not None, config.crops):
            mask_file = None if path is None else str(path)
            item = Item(image, view, image_id, str(manifest.image_path(i)), mask_file, masks[i])
            items.setdefault(item.key, item)
    return items


def _readable_now(
    planned: Shards, finished: Mapping[int, Sidecar], items: Mapping[Key, Item], backbone: Backbone, config: ExtractConfig
) -> set[Key]:
    """Rows that failed before and can be made now: the image can be read again, or the mask is another one."""
    failures = {failure.key: failure for sidecar in finished.values() for failure in sidecar.failures}
    made = {row.key for sidecar in finished.values() for row in sidecar.rows}
    made |= {key for index, keys in planned.items() if index not in finished for key in keys}  # these are made as planned
    candidates = [
        items[key]
        for key, failure in failures.items()
        if key in items
        and key not in made
        and (failure.kind == "image" or (failure.kind == "view" and failure.mask != items[key].mask))
    ]
    return {item.key for item in candidates if isinstance(_decode((item,), backbone, config.view_seed)[0], Decoded)}


def _extend(store: Path, keys: Sequence[Key], size: int, again: set[Key]) -> Shards:
    """Add shards of `size` rows for keys that are not planned yet or are to be made `again`, and return the whole plan."""
    with _alone(store):
        shards = read_plan(store)
        planned = {key for rows in shards.values() for key in rows} - again
        missing = [key for key in keys if key not in planned]
        first = max(shards, default=-1) + 1
        for number, start in enumerate(range(0, len(missing), size)):
            shards[first + number] = tuple(missing[start : start + size])
        if missing or not (store / PLAN).exists():
            write_plan(store, shards)
    return shards


@contextmanager
def _alone(store: Path) -> Iterator[None]:
    """Let one process at a time change the plan; others wait. The system releases the lock of a killed process."""
    try:
        (store / "cache").mkdir(exist_ok=True)
        lock = open(store / "cache" / "lock", "a")  # noqa: SIM115 (closed below, whatever happens)
    except OSError as error:
        raise WorkError(f"Cannot write {store}: {error.strerror}.") from None
    with lock:
        try:
            import fcntl
        except ImportError:  # not on Windows
            yield
            return
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _signals(path: Path, finished: Mapping[int, Sidecar], backbone: Backbone, config: ExtractConfig) -> tuple[str, ...]:
    """The signals of new shards: the requested ones and those that the store has; without either the default ones."""
    present = {name for names in signal_names(path).values() for name in names}
    if with_rows := [index for index, sidecar in finished.items() if sidecar.rows]:
        present |= set(map_shard(shard_path(path, with_rows[0])))  # the shards of a store hold the same fields
    names = dict.fromkeys([*(name for name in REGISTRY if name in present), *config.signals])
    signals = tuple(names or backbone.default_signals)
    backbone.check_signals(signals)
    return signals


@dataclass(frozen=True)
class Addition:
    """Signals to add to a finished shard, the image files that its rows were made from, by SHA-256, and how many rows it has."""

    index: int
    names: tuple[str, ...]
    files: Mapping[str, str]
    rows: int


def _additions(store: Path, finished: Mapping[int, Sidecar], names: Sequence[str], files: Mapping[str, str]) -> list[Addition]:
    """What has to be added to these shards, so that every row of an image of `files` has the signals `names`."""
    found = []
    for index, sidecar in finished.items():
        wanted = {number for number, row in enumerate(sidecar.rows) if row.image in files}
        if not wanted:
            continue
        in_shard = map_shard(shard_path(store, index))
        lacking = []
        for name in names:
            if name not in in_shard:
                file = read_signal(store, index, name, sidecar)
                if file is None or wanted & file.missing:
                    lacking.append(name)
        if lacking:
            images = {sidecar.rows[number].image for number in wanted}
            found.append(Addition(index, tuple(lacking), {image: files[image] for image in images}, len(sidecar.rows)))
    return found


@dataclass(frozen=True)
class Work:
    """Everything that a worker needs to know beside the shard.

    Attributes:
        store: Folder of the store.
        backbone: The frozen backbone.
        fingerprint: What its fingerprint must be.
        config: Number formats and how to work.
        settings: Hash of the store's settings, recorded with every shard.
        signals: Signals of new shards; None means the default ones of the backbone.
    """

    store: Path
    backbone: BackboneConfig
    fingerprint: dict[str, Any]
    config: ExtractConfig
    settings: str
    signals: tuple[str, ...] | None = None


Shard = tuple[int, tuple[Item, ...]]


def _nothing(rows: int) -> None:
    pass


def _run_on_ray(work: Work, shards: Sequence[Shard], additions: Sequence[Addition], address: str | None, advance: Advance) -> None:
    """Run one idempotent Ray task per shard, retried if its node dies; each uses a GPU if the cluster has any.

    The store must be on a file system that all nodes share, and images and weights on paths that all nodes can read.
    """
    with ray_cluster(address) as ray:
        task = ray.remote(
            num_gpus=1 if ray.cluster_resources().get("GPU") and work.config.device != "cpu" else 0,
            num_cpus=max(1, work.config.threads),
            # A task that dies with its node or worker is retried; an error that it raises is not.
            max_retries=RETRIES,
            retry_exceptions=False,
        )(make_shard)
        # A node runs one task per core or GPU, so each task decodes with few threads.
        config = replace(work.config, workers=work.config.workers or max(2, work.config.threads))
        shared = ray.put(replace(work, config=config))
        rows = {task.remote(shard, shared): len(shard[1]) for shard in shards}
        rows |= {task.remote(addition, shared): addition.rows for addition in additions}
        waiting = list(rows)
        while waiting:
            done, waiting = ray.wait(waiting, num_returns=1)
            try:
                failure = ray.get(done[0])
            except ray.exceptions.RayError as error:
                raise WorkError(f"Ray gave up on a shard: {first_line(error)}. Run the same command again to resume.") from None
            if failure is not None:
                for other in waiting:
                    ray.cancel(other, force=True)
                raise stopped(failure)
            advance(rows[done[0]])


def make_shard(shard: Shard | Addition, work: Work) -> str | None:
    """Compute one shard unless it exists, or add signals to one, as a Ray task. Returns None, or an error message."""
    try:
        if not isinstance(shard, Addition) and read_sidecar(work.store, shard[0], [item.key for item in shard[1]]) is not None:
            return None
        if not (work.store / STORE).exists():
            return not_shared(work.store)
        with cpu_threads(work.config.threads):
            backbone = _backbone(work.backbone, resolve_device(work.config.device))
            advice = "Use the same weights on all nodes."
            check_same(f"The backbone on node {node()}", work.fingerprint, backbone.fingerprint, advice)
            if isinstance(shard, Addition):
                _add_signals(work, shard, backbone)
            else:
                fill(work, [shard], backbone)
    except MedTokenBudgetError as error:
        return str(error)
    return None


@lru_cache(maxsize=1)
def _backbone(config: BackboneConfig, device: torch.device) -> Backbone:
    """Load the backbone once per worker process, which computes many shards."""
    return Backbone.load(config, device)


@dataclass(frozen=True)
class Decoded:
    """A row that is ready for the forward pass: pixels uint8 [S, S, 3]."""

    row: Row
    pixels: np.ndarray


@dataclass
class ShardInProgress:
    """The rows of a shard that are computed so far; `parts` are the tensors of its batches by field."""

    index: int
    batch_size: int
    rows: list[Row] = field(default_factory=list)
    parts: dict[str, list[np.ndarray]] = field(default_factory=dict)
    failures: list[FailedRow] = field(default_factory=list)

    def take_tensors(self) -> dict[str, np.ndarray]:
        """Join the parts, which are given up one by one, so that a shard is in memory once."""
        return {name: np.concatenate(self.parts.pop(name)) for name in list(self.parts)}


def fill(work: Work, shards: Sequence[Shard], backbone: Backbone, advance: Advance = _nothing) -> None:
    """Make these shards, in order."""

    def decode(job: tuple[int, tuple[Item, ...]]) -> tuple[int, list[Decoded | FailedRow]]:
        return job[0], _decode(job[1], backbone, work.config.view_seed)

    def computed() -> Iterator[ShardInProgress]:
        jobs = [(index, tuple(same)) for index, items in shards for _, same in itertools.groupby(items, lambda item: item.image)]
        # Decoded ahead across the borders of shards.
        decoded = ordered_map(decode, jobs, *_ahead(work.config, max((len(items) for _, items in jobs), default=1)))
        for index, images in itertools.groupby(decoded, key=lambda pair: pair[0]):
            yield _compute(index, (row for _, rows in images for row in rows), backbone, work.config, work.signals, advance)

    def write(shard: ShardInProgress) -> None:
        tensors = shard.take_tensors()
        # A shard without the signals that have files of their own is complete but for them, so they come last.
        extra = {name: tensors.pop(name) for name in list(tensors) if name in REGISTRY and name not in DEFAULT}
        sidecar = write_shard(work.store, shard.index, shard.rows, tensors, shard.failures, shard.batch_size, work.settings)
        for name, values in extra.items():
            write_signal(work.store, shard.index, name, values, sidecar)

    with cpu_threads(work.config.threads):
        # One shard is written while the next is computed, and no more, so that memory stays bounded.
        for _ in ordered_map(write, computed(), ahead=1, threads=1):
            pass


def _ahead(config: ExtractConfig, views_per_image: int) -> tuple[int, int]:
    """Images to decode ahead, so that two batches of rows are in memory, and threads that decode."""
    return max(1, 2 * config.batch_size // views_per_image), config.workers or min(16, os.cpu_count() or 1)


def _decode(items: tuple[Item, ...], backbone: Backbone, view_seed: int) -> list[Decoded | FailedRow]:
    """Decode an image once and make its views, or say why a view cannot be had."""
    first = items[0]
    try:
        if not first.image_file:
            raise RequestError("The image left the manifest before it was extracted.")
        image = _read_image(first.image_file, first.image)
    except RequestError as error:
        return [FailedRow(item.image, item.view, "image", reason(error, first.image_file)) for item in items]
    rows: list[Decoded | FailedRow] = []
    mask: Image.Image | None = None
    for item in items:
        try:
            if mask is None and item.mask_file is not None and views.is_off_center(item.view):
                mask = mask_of(image.size, item.mask_file)
            geometry = views.geometry_of(item.view, mask, views.image_seed(view_seed, item.image_id))
            row = Row(item.image, item.view, image.size, geometry)
            rows.append(Decoded(row, backbone.prepare(geometry.of(image))))
        except RequestError as error:
            rows.append(FailedRow(item.image, item.view, "view", reason(error, item.mask_file or ""), item.mask))
    return rows


def _read_image(file: str, sha256: str) -> Image.Image:
    image = decode_image(file)
    if sha256_file(file) != sha256:
        raise RequestError(f"{Path(file).name} changed while it was extracted. Run `mtb extract` again.")
    return image


def _compute(
    index: int,
    rows: Iterable[Decoded | FailedRow],
    backbone: Backbone,
    config: ExtractConfig,
    signals: Sequence[str] | None,
    advance: Advance,
) -> ShardInProgress:
    """Run the backbone over the rows of a shard in batches."""
    shard = ShardInProgress(index, config.batch_size)
    batch: list[Decoded] = []

    def run_batch() -> None:
        _forward(shard, batch, backbone, config, signals)
        advance(len(batch))
        batch.clear()

    for row in rows:
        if isinstance(row, FailedRow):
            shard.failures.append(row)
            advance(1)
            continue
        batch.append(row)
        if len(batch) == config.batch_size:
            run_batch()
    if batch:
        run_batch()
    return shard


def _forward(
    shard: ShardInProgress, batch: list[Decoded], backbone: Backbone, config: ExtractConfig, signals: Sequence[str] | None
) -> None:
    """Add one batch to the shard; if memory runs out, halve the batch size for the rest of this shard."""
    start = 0
    while start < len(batch):
        part = batch[start : start + shard.batch_size]
        try:
            fields = _fields(part, backbone, config, signals)
        except (MemoryError, RuntimeError) as error:
            if not _is_out_of_memory(error):
                raise
            fields = None
        if fields is None:
            # Outside the handler, because the traceback keeps the tensors that filled the memory.
            _halve(shard, len(part), backbone)
        else:
            _add(shard, part, fields)
            start += len(part)


def _is_out_of_memory(error: Exception) -> bool:
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or any(text in str(error).lower() for text in _OUT_OF_MEMORY)


def _halve(shard: ShardInProgress, size: int, backbone: Backbone) -> None:
    if size == 1:
        raise WorkError(
            f"Not enough memory on {backbone.device} for a batch of one image. Close other programs, or use a smaller backbone."
        )
    if backbone.device.type == "cuda":
        torch.cuda.empty_cache()
    shard.batch_size = max(1, size // 2)
    say(f"Out of memory with a batch of {size} images. Continuing shard {shard.index} with batches of {shard.batch_size}.")


@torch.inference_mode()
def _fields(
    batch: list[Decoded], backbone: Backbone, config: ExtractConfig, signals: Sequence[str] | None
) -> dict[str, np.ndarray]:
    """The fields of these rows as they are stored: the patches, all of them or those that an early route keeps, and the signals."""
    names = backbone.default_signals if signals is None else tuple(signals)
    dtype, precision = _DTYPES[config.dtype], _PRECISIONS.get(config.precision)
    pixels = to_device(torch.from_numpy(np.stack([row.pixels for row in batch])), backbone.device)
    images = backbone.normalize(pixels)
    with torch.autocast(backbone.device.type, precision, enabled=precision is not None):
        tokens = backbone(images, names).float()
    if tokens.places is not None:
        fields = {"tokens": tokens.patches.to(dtype), "indices": tokens.places.to(torch.int32)}
    else:
        fields = {"patches": tokens.patches.to(dtype)}
    if tokens.cls is not None:
        fields["cls"] = tokens.cls.to(dtype)
    fields["luminance"] = luminance(pixels, backbone.grid).float()
    for name in names:
        fields[name] = getattr(tokens, name).to(dtype if REGISTRY[name].wide else torch.float32)
    # Converted by torch, which is ten times as fast as numpy at half precision.
    return {name: value.cpu().numpy() for name, value in fields.items()}


def to_device(pixels: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Move pixels to the device; to a GPU from pinned memory, so that the copy runs beside the forward pass before it."""
    if device.type != "cuda":
        return pixels.to(device)
    return pixels.pin_memory().to(device, non_blocking=True)


def _add(shard: ShardInProgress, batch: list[Decoded], fields: dict[str, np.ndarray]) -> None:
    """Add the rows whose tokens are finite in the stored format to the shard, the others to its failures."""
    tokens = fields["patches" if "patches" in fields else "tokens"]
    finite = torch.from_numpy(tokens).abs().amax((1, 2)).isfinite().numpy()
    for one, good in zip(batch, finite):
        if good:
            shard.rows.append(one.row)
        else:
            why = f"The tokens of the backbone are not finite in {tokens.dtype}."
            shard.failures.append(FailedRow(one.row.image, one.row.view, "tokens", why))
    for name, value in fields.items():
        shard.parts.setdefault(name, []).append(value if finite.all() else value[finite])


def _add_signals(work: Work, addition: Addition, backbone: Backbone, advance: Advance = _nothing) -> None:
    """Run the backbone again over the images of a finished shard and write the signals; the tokens stay as they are.

    Every signal is a file of its own and appears whole, so that an interrupted run resumes where it stopped.

    Raises:
        WorkError: The backbone gives other tokens than the shard has.
    """
    store, index = work.store, addition.index
    sidecar = read_sidecar(store, index)
    if sidecar is None:
        return

    def decode(rows: list[Row]) -> list[Decoded | FailedRow]:
        """The views as they were recorded; none if the image cannot be read any more or is another one by now."""
        try:
            image = _read_image(addition.files[rows[0].image], rows[0].image)
        except RequestError:
            return []
        return [Decoded(row, backbone.prepare(row.geometry.of(image))) for row in rows]

    jobs = [list(rows) for image, rows in itertools.groupby(sidecar.rows, lambda row: row.image) if image in addition.files]
    with cpu_threads(work.config.threads):
        decoded = ordered_map(decode, jobs, *_ahead(work.config, max(map(len, jobs), default=1)))
        rows = (row for views_of_image in decoded for row in views_of_image)
        again = _compute(index, rows, backbone, work.config, addition.names, advance)
    if again.rows or again.failures:
        tensors = again.take_tensors()
        place_of = {row.key: place for place, row in enumerate(sidecar.rows)}
        places = [place_of[row.key] for row in again.rows]
        _check_tokens(store, index, places, tensors["patches"], again)
        for name in addition.names:
            # NaN where there are no values, now or from before.
            values = np.full((len(sidecar.rows), *tensors[name].shape[1:]), np.nan, tensors[name].dtype)
            missing = set(range(len(values))) - set(places)
            if (before := read_signal(store, index, name, sidecar)) is not None:
                values[:] = before.map()
                missing &= before.missing
            values[places] = tensors[name]
            write_signal(store, index, name, values, sidecar, sorted(missing))
    advance(len(sidecar.rows) - len(again.rows))


def _check_tokens(store: Path, index: int, places: Sequence[int], tokens: np.ndarray, again: ShardInProgress) -> None:
    """Make sure that signals are added to the tokens that they belong to."""
    stored = map_shard(shard_path(store, index))["patches"]
    same = not again.failures
    for place, now in zip(places, tokens):
        one, two = stored[place].astype(np.float32).ravel(), now.astype(np.float32).ravel()
        same = same and float(one @ two) >= _ALIKE * float(np.linalg.norm(one) * np.linalg.norm(two))
    if not same:
        raise WorkError(
            f"The tokens of {shard_path(store, index).name} are not those that the backbone gives now, so its signals would not "
            "belong to them. Extract into a new store."
        )


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
