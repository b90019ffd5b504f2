"""`extract`: run the frozen backbone over what a store does not have of a manifest; called again, it resumes where it stopped.

The plan says which rows belong to which shard, so every worker needs only a shard to know what to do, and a changed manifest adds
shards for what is not planned yet. Threads decode ahead, the backbone runs, another thread writes finished shards. The batches of a
shard depend only on the shard, so its bytes do not depend on the number of threads, on interruptions, or on which process made it.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from medtokenbudget.backbone import store as stores
from medtokenbudget.backbone import views
from medtokenbudget.backbone.annotations import hashes_of, reason
from medtokenbudget.backbone.attention import REGISTRY
from medtokenbudget.backbone.backbone import Backbone, luminance
from medtokenbudget.backbone.partial import Early
from medtokenbudget.backbone.store import FailedRow, FeatureStore, Key, MappedField, Planned, Record, Row, Shards
from medtokenbudget.config import BackboneConfig, ExtractConfig
from medtokenbudget.data import Manifest, decode_image, mask_of
from medtokenbudget.errors import RequestError, WorkError
from medtokenbudget.files import check_same, claim, exclusive, remove, remove_leftovers, sha256_file, write_lines
from medtokenbudget.jobs import Advance, Execution, require_shared, run_units
from medtokenbudget.runtime import cpu_threads, idle_threads, ordered_map, progress, resolve_device, say, worker_devices
from medtokenbudget.tokens import SEGMENTATION

SEGMENTER = "segmenter.json"
"""File in a store that says which segmenter scored its rows."""
ROUTER = "router"
"""Folder in a store that was routed early: the saved router, which models that are trained on the store carry along."""
_DTYPES = {"fp16": torch.float16, "fp32": torch.float32}
_PRECISIONS = {"bf16": torch.bfloat16, "fp16": torch.float16}
"""Number formats of a forward pass under autocast; fp32 runs without it."""
_OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "not enough memory")
_Decoded = tuple[Row, np.ndarray]
"""A row that is ready for the forward pass, with its pixels, uint8 [S, S, 3]."""
_ALIKE = 0.99
"""Smallest cosine similarity of stored tokens and those of the pass that adds signals; another machine only rounds differently."""


def extract(
    manifest: Manifest,
    store: Path | str,
    backbone: BackboneConfig | Backbone,
    config: ExtractConfig | None = None,
    engine: str = "local",
    shards: tuple[int, int] | None = None,
    address: str | None = None,
    early: Early | None = None,
) -> FeatureStore:
    """Add what `store` does not have of the images of `manifest`, and open it with the manifest.

    Images are known by the content of their files: labels, masks, splits and names may change without extracting anything again.
    Images that could not be read before are tried again. For the engine 'ray', store, images and weights must be on paths that all
    nodes share. `shards` (i, n) makes only the shards whose number leaves the rest i when divided by n, for job arrays; the
    returned store may then be incomplete (`missing`). `early` routes before or inside the backbone; what it needs is saved in the
    folder `router`.

    Raises:
        MismatchError: The store was made with other settings.
    """
    config, path = config or ExtractConfig(), Path(store)
    execution = Execution(engine, config.jobs, address)  # type: ignore[arg-type]
    _check_request(manifest, path, config, execution, shards, early)
    processes = 1 if config.jobs == 1 else len(worker_devices(config.device, config.jobs))
    elsewhere = engine == "ray" or processes > 1
    if isinstance(backbone, Backbone):
        if elsewhere:
            raise RequestError("A backbone in memory is not sent to other processes. Leave out `jobs` and `engine`, or name it.")
        loaded, backbone = backbone.to(resolve_device(config.device)), backbone.config
    else:
        loaded = Backbone.load(backbone, "cpu" if elsewhere else resolve_device(config.device))
    if early is not None:
        loaded = early.wrap(loaded)
    loaded.check_signals(config.signals)
    settings = settings_of(loaded.fingerprint, config, backbone.weights)
    # The jobs of an array share the lock: each fills shards of its own.
    with exclusive(path, shared=shards is not None):
        file = path / stores.STORE
        if file.exists():
            stores.read_settings(path)  # says more about a store of another version than `claim`
        claim(file, settings, f"The store {path}", "Use the settings of this store, or another `store`.", stores.NOT_IDENTITY)
        if early is not None and not (path / ROUTER).exists():
            early.save(path / ROUTER)
        units, rows = _plan_units(path, manifest, loaded, config, shards or (0, 1))
        left = sum(map(len, units))
        if elsewhere:  # a node runs one task per core or GPU, and processes share the cores of this machine
            threads = config.threads or (0 if engine == "ray" else max(1, (os.cpu_count() or 1) // processes))
            config = replace(config, threads=threads, workers=config.workers or max(2, threads))
        absolute = path.resolve()  # the workers of a cluster have other working directories
        with progress(total=max(rows, left), initial=max(0, rows - left), what="Extracting", unit="image") as bar:
            where: dict[str, Any] = {"processes": processes, "device": config.device, "cores": max(1, config.threads)}
            worker = partial(open_backbone, absolute, backbone, loaded.fingerprint)
            make = partial(make_shards, absolute, config, stores.settings_hash(settings))
            for _ in run_units(units, make, execution, state=loaded, open_worker=worker, advance=bar.update, **where):
                pass
        opened = FeatureStore.open(path, manifest, partial=True)
        if not opened.missing:
            write_lines(path / "errors.jsonl", map(vars, opened.errors))
            remove_leftovers(path)
        return opened


def _check_request(
    manifest: Manifest, path: Path, config: ExtractConfig, execution: Execution, shards: tuple[int, int] | None, early: Any
) -> None:
    """Raise a RequestError for what no extraction of this manifest can follow, before the backbone is loaded."""
    if early is not None and (execution.engine != "local" or config.jobs != 1):
        raise RequestError("Early routing (`route`) runs in one process of this machine. Leave out `engine` and `jobs`.")
    if early is not None and config.signals:
        raise RequestError("`signals` are stored with all patches, but routed stores have only some. Leave out `signals`.")
    if not len(manifest):
        raise RequestError(f"The manifest '{manifest.name}' contains no images, so there is nothing to extract.")
    if config.views == "off-center" and not manifest.rows["mask"].notna().any():
        raise RequestError(
            f"The views 'off-center' are cropped around the lesion mask, but no image of '{manifest.name}' has a mask. "
            "Add masks to the manifest, or choose other views."
        )
    for name, default in (("crops", 1), ("view_seed", 0)):
        if config.views not in ("off-center", "augmented") and getattr(config, name) != default:
            raise RequestError(f'`{name}` needs `views="off-center"` or "augmented". Change the views, or leave out `{name}`.')
    absolute = Path(os.path.abspath(path))
    inside = next((folder for folder in _image_folders(manifest) if absolute.is_relative_to(folder)), None)
    if inside is not None:
        raise RequestError(f"The store {path} would be inside the folder of the images, {inside}. Choose a `store` next to it.")
    if shards is not None and (shards[1] < 1 or not 0 <= shards[0] < shards[1]):
        raise RequestError(f"`shards` {shards[0]}/{shards[1]} does not exist. Use I/N with I from 0 to N - 1.")


def _image_folders(manifest: Manifest) -> set[Path]:
    """Return the folders that the images were read from, above class folders, which are in the image ids; none of a list."""
    folders: set[Path] = set()
    if manifest.source.split()[0] in ("csv", "unknown"):
        return folders
    for row, name in enumerate(manifest.ids):
        path = Path(os.path.abspath(manifest.image_path(row)))
        folders.add(path.parents[name.count("/") if path.with_suffix("").as_posix().endswith(f"/{name}") else 0])
    return folders


def settings_of(fingerprint: dict[str, Any], config: ExtractConfig, weights: Path | None = None) -> dict[str, Any]:
    keep = "patches" if fingerprint.get("route") is None else "routed"
    settings = {"format": stores.FORMAT, "backbone": fingerprint, "weights": weights and weights.name, "keep": keep}
    settings |= {name: getattr(config, name) for name in ("dtype", "precision", "view_seed", "shard_size", "batch_size")}
    # As it is read back: JSON turns tuples into lists.
    plain: dict[str, Any] = json.loads(json.dumps(settings, default=str))
    return plain


@dataclass(frozen=True)
class Item(Planned):
    """One row to be made: which view of which image file, with the mask for off-center crops.

    `mask` is the SHA-256 of its file, `image_id` seeds the crop. An empty `image_file` means that the image left the
    manifest before it was extracted. A row that was made before has its `geometry`, whatever became of its mask.
    """

    image_id: str
    image_file: str
    mask_file: str | None = None
    mask: str | None = None
    geometry: views.Geometry | None = None


@dataclass(frozen=True)
class ShardUnit:
    """A shard to make or, with the record of a finished one, signals to add to some of its rows."""

    index: int
    items: tuple[Item, ...]
    signals: tuple[str, ...]
    record: Record | None = None

    def __len__(self) -> int:
        return len(self.items)


def _plan_units(
    store: Path, manifest: Manifest, backbone: Backbone, config: ExtractConfig, shards: tuple[int, int]
) -> tuple[list[ShardUnit], int]:
    items = _items(manifest, config, *hashes_of(store, manifest))
    before = stores.read_plan(store)
    finished = stores.finished_shards(store, before)
    planned = _extend_plan(store, list(items), config.shard_size, _readable_now(before, finished, items, backbone, config))
    # Once more for shards that are planned only now: the plan may have been lost, and its finished shards stay.
    finished |= stores.finished_shards(store, {index: keys for index, keys in planned.items() if index not in finished})
    # The requested signals and those that the store has; without either the default ones.
    present = {name for record in finished.values() for name in record.fields}
    signals = tuple(dict.fromkeys([*(name for name in REGISTRY if name in present), *config.signals])) or backbone.default_signals
    backbone.check_signals(signals)
    files = {item.image: item.image_file for item in items.values()}
    units: list[ShardUnit] = []
    rows = 0
    for index, keys in sorted(planned.items()):
        # By number, not in blocks: the jobs of an array get equal work while the plan grows.
        if index % shards[1] != shards[0]:
            continue
        if index in finished:
            rows += sum(image in files for image, _ in keys)
            units += _additions(index, finished[index], signals, files)
        elif any(key in items for key in keys):
            rows += len(keys)
            units.append(ShardUnit(index, tuple(items.get(key) or Item(*key, "", "") for key in keys), signals))
    return units, rows


def _additions(index: int, record: Record, signals: Sequence[str], files: Mapping[str, str]) -> list[ShardUnit]:
    """List what a finished shard needs, so that every row of an image in `files` has these signals: one unit or none."""
    rows = {place: row for place, row in enumerate(record.rows) if row.image in files}
    sums = {name: record.fields[name].checksums if name in record.fields else [None] * len(record.rows) for name in signals}
    lacking = tuple(name for name in signals if any(sums[name][place] is None for place in rows))
    items = tuple(Item(row.image, row.view, "", files[row.image], geometry=row.geometry) for row in rows.values())
    return [ShardUnit(index, items, lacking, record)] if lacking else []


def _items(manifest: Manifest, config: ExtractConfig, images: Sequence[str | None], masks: Sequence[str | None]) -> dict[Key, Item]:
    """List the rows of every image in the manifest's order, the views of an image next to each other, each content once.

    `images` and `masks` are the SHA-256 of the files, None for one that cannot be read or does not exist.
    """
    items: dict[Key, Item] = {}
    for i, (image_id, split, image) in enumerate(zip(manifest.ids, manifest.rows["split"].tolist(), images)):
        if image is None:
            continue
        image_file, mask_file = str(manifest.image_path(i)), manifest.mask_path(i)
        for view in views.views_of(config.views, split, mask_file is not None, config.crops):
            item = Item(image, view, image_id, image_file, None if mask_file is None else str(mask_file), masks[i])
            items.setdefault(item.key, item)
    return items


def _readable_now(
    planned: Shards, finished: Mapping[int, Record], items: Mapping[Key, Item], backbone: Backbone, config: ExtractConfig
) -> set[Key]:
    """Find rows that failed before and can be made now: the image can be read again, or the mask is another one."""
    made = {row.key for record in finished.values() for row in record.rows}
    made |= {key for index, keys in planned.items() if index not in finished for key in keys}  # these are made as planned
    last = {failure.key: failure for record in finished.values() for failure in record.failures if failure.key not in made}
    candidates = [
        items[key]
        for key, failure in last.items()
        if key in items and (failure.kind == "image" or (failure.kind == "view" and failure.mask != items[key].mask))
    ]
    return {item.key for item in candidates if not isinstance(_decode((item,), backbone, config.view_seed)[0], FailedRow)}


def _extend_plan(store: Path, keys: Sequence[Key], size: int, again: set[Key]) -> Shards:
    """Add shards of `size` rows for keys that are not planned yet or are to be made `again`, and return the whole plan."""
    # The jobs of an array extend the plan one after another.
    with exclusive(store, name=".plan.lock", wait=True):
        shards = stores.read_plan(store)
        planned = {key for rows in shards.values() for key in rows} - again
        missing = [key for key in keys if key not in planned]
        # A number is never given out twice, so that a finished shard keeps its rows.
        first = max(shards, default=-1) + 1
        for number, start in enumerate(range(0, len(missing), size)):
            shards[first + number] = tuple(missing[start : start + size])
        if missing or not (store / stores.PLAN).exists():
            stores.write_plan(store, shards)
    return shards


@dataclass(frozen=True)
class PatchScorer:
    """A trained network that scores patches of an image.

    Attributes:
        backbone: Prepares the pixels.
        score: Pixels, uint8 [B, S, S, 3], to scores [B, N], the highest for lesion.
        fingerprint: Of the model.
    """

    backbone: Backbone
    score: Callable[[Tensor], Tensor]
    fingerprint: str

    @property
    def device(self) -> torch.device:
        return self.backbone.device

    def prepare(self, image: Image.Image) -> np.ndarray:
        return self.backbone.prepare(image)


def add_segmentation(store: FeatureStore, manifest: Manifest, segmenter: PatchScorer, config: ExtractConfig) -> None:
    """Add the signal `segmentation` to the rows of `manifest` that have none: the scores of a segmenter, for every view.

    Raises:
        MismatchError: The store has scores of another segmenter, or the grids differ.
    """
    advice = "Train the segmenter with 16 pixels of `scout.image_size` per patch of a side."
    check_same("The segmenter", {"grid": list(store.grid)}, {"grid": list(segmenter.backbone.grid)}, advice)
    with exclusive(store.path):
        advice = "Use the same segmenter, or another `store`."
        claim(store.path / SEGMENTER, {"segmenter": segmenter.fingerprint}, f"The store {store.path}", advice)
        images = zip(hashes_of(store.path, manifest)[0], range(len(manifest)))
        files = {image: str(manifest.image_path(row)) for image, row in images if image is not None}
        units = [unit for index, one in sorted(store.records.items()) for unit in _additions(index, one, (SEGMENTATION,), files)]
        with progress(total=sum(map(len, units)), what="Segmenting", unit="image") as bar:
            for _ in make_shards(store.path, config, stores.settings_hash(store.config), segmenter, units, bar.update):
                pass


@dataclass
class _Computed:
    """The rows of a shard that are computed so far; `parts` are the arrays of its batches by field."""

    batch_size: int
    rows: list[Row] = field(default_factory=list)
    parts: dict[str, list[np.ndarray]] = field(default_factory=dict)
    failures: list[FailedRow] = field(default_factory=list)

    def add(self, batch: list[_Decoded], fields: dict[str, np.ndarray]) -> None:
        """Add the rows whose tokens are finite in the stored format, and the others to the failures."""
        tokens = fields.get("patches", fields.get(SEGMENTATION))
        assert tokens is not None
        finite = torch.from_numpy(tokens).flatten(1).isfinite().all(1).numpy()
        why = f"The tokens of the backbone are not finite in {tokens.dtype}."
        self.rows += [row for (row, _), good in zip(batch, finite) if good]
        self.failures += [FailedRow(row.image, row.view, "tokens", why) for (row, _), good in zip(batch, finite) if not good]
        for name, value in fields.items():
            self.parts.setdefault(name, []).append(value if finite.all() else value[finite])


def open_backbone(store: Path, config: BackboneConfig, fingerprint: dict[str, Any], device: str) -> Backbone:
    require_shared(store / stores.STORE)
    backbone = Backbone.load(config, resolve_device(device))
    check_same("The backbone of a worker", fingerprint, backbone.fingerprint, "Use the same weights on all nodes.")
    return backbone


def make_shards(
    store: Path,
    config: ExtractConfig,
    settings: str,
    backbone: Backbone | PatchScorer,
    units: Sequence[ShardUnit],
    advance: Advance,
) -> Iterator[None]:
    """Make shards, in order; each records the hash `settings`. Images are decoded ahead across the borders of shards."""
    parts = [(i, tuple(same)) for i, unit in enumerate(units) for _, same in itertools.groupby(unit.items, lambda item: item.image)]
    # Two batches of rows are decoded ahead; an image may have several views.
    ahead = max(1, 2 * config.batch_size // max((len(items) for _, items in parts), default=1))
    threads = config.workers or min(16, os.cpu_count() or 1)

    def decode(part: tuple[int, tuple[Item, ...]]) -> tuple[int, list[_Decoded | FailedRow]]:
        return part[0], _decode(part[1], backbone, config.view_seed)

    def computed() -> Iterator[tuple[ShardUnit, _Computed]]:
        for i, images in itertools.groupby(ordered_map(decode, parts, ahead, threads), key=lambda pair: pair[0]):
            yield units[i], _compute(units[i], (row for _, rows in images for row in rows), backbone, config, advance)

    with cpu_threads(config.threads or idle_threads()):
        # One shard is written while the next is computed, and no more, so that memory stays bounded.
        yield from ordered_map(lambda made: _publish(store, settings, *made), computed(), ahead=1, threads=1)


def _decode(items: tuple[Item, ...], backbone: Backbone | PatchScorer, view_seed: int) -> list[_Decoded | FailedRow]:
    first = items[0]
    try:
        if not first.image_file:
            raise RequestError("The image left the manifest before it was extracted.")
        image = decode_image(first.image_file)
        # After decoding: a file that is replaced between hashing and decoding would pass otherwise.
        if sha256_file(first.image_file) != first.image:
            raise RequestError(f"{Path(first.image_file).name} changed while it was extracted. Run `mtb extract` again.")
    except RequestError as error:
        return [FailedRow(item.image, item.view, "image", reason(error, first.image_file)) for item in items]
    rows: list[_Decoded | FailedRow] = []
    mask: Image.Image | None = None
    for item in items:
        try:
            if mask is None and item.mask_file is not None and views.is_off_center(item.view):
                mask = mask_of(image.size, item.mask_file)
            geometry = item.geometry or views.geometry_of(item.view, mask, views.image_seed(view_seed, item.image_id))
            rows.append((Row(item.image, item.view, image.size, geometry), backbone.prepare(geometry.of(image))))
        except RequestError as error:
            rows.append(FailedRow(item.image, item.view, "view", reason(error, item.mask_file or ""), item.mask))
    return rows


def _compute(
    unit: ShardUnit, rows: Iterable[_Decoded | FailedRow], backbone: Backbone | PatchScorer, config: ExtractConfig, advance: Advance
) -> _Computed:
    """Run the backbone over the rows of a shard in batches; if memory runs out, halve the batch size for the rest of it."""
    made = _Computed(config.batch_size)

    def readable() -> Iterator[_Decoded]:
        for row in rows:
            if isinstance(row, FailedRow):
                made.failures.append(row)
                advance(1)
            else:
                yield row

    stream = readable()
    while batch := list(itertools.islice(stream, config.batch_size)):
        while batch:
            part = batch[: made.batch_size]
            fields = _fields_if_they_fit(part, backbone, config, unit.signals)
            if fields is not None:
                made.add(part, fields)
                advance(len(part))
                batch = batch[len(part) :]
            elif len(part) == 1:
                advice = "Close other programs, or use a smaller backbone."
                raise WorkError(f"Not enough memory on {backbone.device} for a batch of one image. {advice}")
            else:
                # Of the batch that failed, not of the request: the last batch of a shard may be smaller.
                made.batch_size = len(part) // 2
                batches = f"Continuing shard {unit.index} with batches of {made.batch_size}."
                say(f"Out of memory with a batch of {len(part)} images. {batches}")
    return made


def _fields_if_they_fit(
    batch: list[_Decoded], backbone: Backbone | PatchScorer, config: ExtractConfig, signals: Sequence[str]
) -> dict[str, np.ndarray] | None:
    """Compute the fields, or return None if memory ran out: not an error, whose traceback keeps what filled the memory."""
    try:
        return _fields(batch, backbone, config, signals)
    except (MemoryError, RuntimeError) as error:
        full = isinstance(error, (MemoryError, torch.OutOfMemoryError))
        if not full and not any(text in str(error).lower() for text in _OUT_OF_MEMORY):
            raise
    if backbone.device.type == "cuda":
        torch.cuda.empty_cache()
    return None


@torch.inference_mode()
def _fields(
    batch: list[_Decoded], backbone: Backbone | PatchScorer, config: ExtractConfig, signals: Sequence[str]
) -> dict[str, np.ndarray]:
    """Compute the fields of these rows: the patches, all of them or those that an early route keeps, and the signals."""
    dtype, precision = _DTYPES[config.dtype], _PRECISIONS.get(config.precision)
    pixels = torch.from_numpy(np.stack([pixels for _, pixels in batch]))
    if backbone.device.type == "cuda":  # from pinned memory the copy runs during the forward pass before it
        pixels = pixels.pin_memory().to(backbone.device, non_blocking=True)
    else:
        pixels = pixels.to(backbone.device)
    if isinstance(backbone, PatchScorer):
        return {SEGMENTATION: backbone.score(pixels).float().cpu().numpy()}
    with torch.autocast(backbone.device.type, precision, enabled=precision is not None):
        tokens = backbone(backbone.normalize(pixels), signals).float()
    fields = {"patches": tokens.patches.to(dtype), "luminance": luminance(pixels, backbone.grid).float()}
    if tokens.places is not None:
        fields["places"] = tokens.places.to(torch.int32)
    if tokens.cls is not None:
        fields["cls"] = tokens.cls.to(dtype)
    for name in signals:
        fields[name] = getattr(tokens, name).to(dtype if REGISTRY[name].wide else torch.float32)
    # Converted by torch, which is ten times as fast as numpy at half precision.
    return {name: value.cpu().numpy() for name, value in fields.items()}


def _publish(store: Path, settings: str, unit: ShardUnit, made: _Computed) -> None:
    if unit.record is None:
        remove(stores.record_path(store, unit.index))  # while its files change, the shard does not exist
        names = sorted(made.parts) if made.rows else []
        # One array after the other, so that a shard is in memory once.
        fields = {name: stores.write_field(store, unit.index, name, np.concatenate(made.parts.pop(name))) for name in names}
        record = Record(tuple(made.rows), tuple(made.failures), made.batch_size, settings, fields)
    else:
        record = replace(unit.record, fields={**unit.record.fields, **_add_signals(store, unit, unit.record, made)})
    record.write(store, unit.index)


def _add_signals(store: Path, unit: ShardUnit, record: Record, made: _Computed) -> dict[str, stores.Field]:
    """Write the signals that a finished shard gains; images that cannot be read any more gain none, and the tokens stay."""
    if not made.rows and not any(failure.kind == "tokens" for failure in made.failures):
        return {}
    place_of = {row.key: place for place, row in enumerate(record.rows)}
    places = [place_of[row.key] for row in made.rows]
    stored = MappedField(store, unit.index, "patches", record.fields["patches"])
    # Tokens of other weights or another library would give signals of another network.
    similar = not any(failure.kind == "tokens" for failure in made.failures)
    for place, now in zip(places, np.concatenate(made.parts.get("patches", [np.empty(0)]))):
        one, two = stored.array[place].astype(np.float32).ravel(), now.astype(np.float32).ravel()
        similar = similar and float(one @ two) >= _ALIKE * float(np.linalg.norm(one) * np.linalg.norm(two))
    if not similar:
        raise WorkError(
            f"The tokens of {stored.path.name} are not those that the backbone gives now, so its signals would not belong to them. "
            "Extract into a new store."
        )
    fields = {}
    for name in unit.signals:
        new = np.concatenate(made.parts[name])
        # NaN where there are no values, now or from before.
        values = np.full((len(record.rows), *new.shape[1:]), np.nan, new.dtype)
        missing = set(range(len(values))) - set(places)
        if name in record.fields:
            values[:] = MappedField(store, unit.index, name, record.fields[name]).array
            missing = {place for place in missing if record.fields[name].checksums[place] is None}
        values[places] = new
        fields[name] = stores.write_field(store, unit.index, name, values, sorted(missing))
    return fields
