"""Answers for many images as files: what `mtb predict` and `mtb route` write, in one table or in shards.

A shard is a run of the images in their order. It has a Parquet file and a record of what it was made from, which is written last:
a shard with a matching record is not computed again. On a cluster the folder of the results must be on a file system that all nodes
share, and images and weights on paths that all nodes can read.
"""

from __future__ import annotations

import csv
import json
import math
import os
import shutil
import struct
import tempfile
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache, partial
from itertools import count, islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from medtokenbudget import files
from medtokenbudget.backbone.store import FeatureStore
from medtokenbudget.config import LESIONS, NOTICE, RouteConfig, TokenFormat
from medtokenbudget.data import Manifest, decode_mask
from medtokenbudget.data.readers import MASK_NAMES, MaskFolder
from medtokenbudget.errors import MedTokenBudgetError, RequestError, WorkError
from medtokenbudget.escaping import csv_cell
from medtokenbudget.files import atomic_write, exclusive
from medtokenbudget.jobs import Advance, Execution, require_shared, run_units
from medtokenbudget.metrics import Retention, retention_of_counts
from medtokenbudget.model.inference import ImageSource, Prediction, Routing, expand
from medtokenbudget.model.model import DEFAULT_MODEL, MedTokenBudget, load, loaded
from medtokenbudget.model.overlays import overlay
from medtokenbudget.routing import create_selector
from medtokenbudget.routing.conformal import Guarantee
from medtokenbudget.runtime import progress, say, worker_devices
from medtokenbudget.tokens import TokenBatch

TABLE, ERRORS, TOKENS, OVERLAYS, SUMMARY = "routes", "errors.jsonl", "tokens", "overlays", "summary.json"
REQUEST, MODEL = "_request.json", "_model"
"""Names with an underscore in front are no part of the data set for those who read it (pandas, Arrow, Spark, Ray)."""
_SUMS = ("done", "failed", "masks_failed")
SHARD_SIZE = 1000
"""Images per shard in several processes or on a cluster, unless told otherwise."""


@dataclass
class Routed:
    """What was written, and how much of the lesion was kept where there is a mask."""

    table: Path
    """The table with one row per image, or the folder of its shards."""
    grid: tuple[int, int]
    done: int = 0
    failed: int = 0
    reason: str = ""
    """Why the first of the failed images could not be read; `errors` is the file with all reasons."""
    errors: Path | None = None
    unfamiliar: int | None = None
    """Number of images that are unlike the training images of the model; None if it cannot tell."""
    masks: int = 0
    """Number of masks that could be used, also by methods that merge patches, which measure nothing."""
    masks_failed: int = 0
    mask_reason: str = ""
    measured: array[int] = field(default_factory=lambda: array("i"))
    """Lesion patches, kept ones, those that `center` keeps, and K, of each measured image: 16 bytes per image."""

    def measure(self, lesion: int | None, kept: int | None, center: int | None, k: int) -> None:
        """Count the cells of a row, if its image has a mask and its method keeps patches."""
        self.masks += lesion is not None
        if lesion is not None and kept is not None and center is not None:
            self.measured.extend((lesion, kept, center, k))

    @property
    def retention(self) -> dict[str, Retention]:
        """How much of the lesion was kept, by the router, `center` and (as expected) `random`; empty without masks."""
        if not self.measured:
            return {}
        lesion, kept, center, k = np.asarray(self.measured).reshape(-1, 4).T
        n = np.full(len(lesion), self.grid[0] * self.grid[1])
        # By chance each patch is kept with probability k / n.
        counts = {"router": kept, "center": center, "random": lesion * k / n}
        return {name: retention_of_counts(values, lesion, k, n) for name, values in counts.items()}

    def require_images(self) -> None:
        if not self.done:
            reason = self.reason or "There are no images."
            raise WorkError(f"No image could be read ({self.failed} failed). The first: {reason} All are in {self.errors}.")


@dataclass(frozen=True)
class Shard:
    """Images that become one table, with its other files where they are wanted: all images of a command, or a run of them.

    `first` is the number of the first image. A finished shard is kept if its `key` is the same: the hash of the files (path, size
    and time of change) and of the request.
    """

    sources: Iterable[ImageSource]
    table: Path
    tokens: Path | None = None
    overlays: Path | None = None
    lesions: Path | None = None
    first: int = 0
    key: str = ""

    def __len__(self) -> int:
        return len(tuple(self.sources))

    @property
    def record(self) -> Path:
        """The file that says what a shard was made from; there is one only if the shard is complete."""
        return self.table.with_name(f"_{self.table.stem}.json")

    @property
    def is_finished(self) -> bool:
        """Whether the shard is complete, as it was written, and was made from the same files."""
        try:
            record = files.read_sealed(self.record, "")
        except RequestError:
            return False
        return record["key"] == self.key and self.table.exists() and files.sha256_file(self.table) == record["sha256"]


def predict_files(images: Any, out: Path | str, model: MedTokenBudget | Path | str, config: RouteConfig | None = None) -> Routed:
    """Predict images and write the results to files, in constant memory.

    `out` is a table, `.csv` or `.parquet`. Next to it come `overlays/`, `tokens.safetensors`, and `x.errors.jsonl` for `x.csv`,
    which lists the images that could not be read; if none could be read, that is a WorkError.
    """
    config, predictor, table = config or RouteConfig(), loaded(model), Path(out)
    if table.suffix.lower() not in (".csv", ".parquet"):
        raise RequestError(f"The table {table} must end in .csv or .parquet.")
    amount = amount_of(predictor, config)
    predictor.answers((), amount, config.selector, kind=Prediction)  # a wrong request is refused before a file is made
    tokens, overlays = table.with_name(f"{TOKENS}.safetensors"), table.with_name(OVERLAYS)
    shard = Shard(expand(images), table, tokens if config.tokens else None, overlays if config.overlay else None)
    errors = table.with_name(f"{table.stem}.errors.jsonl")
    with exclusive(table.parent, name=f".{table.stem}.lock"), progress(what="Predicting", unit="image") as bar:
        return write_table(predictor, shard, config, bar.update, errors, Prediction)


def route_files(
    images: Any,
    out: Path | str,
    model: MedTokenBudget | Path | str = DEFAULT_MODEL,
    masks: Path | str | None = None,
    config: RouteConfig | None = None,
    engine: str = "local",
    address: str | None = None,
    store: FeatureStore | Path | str | None = None,
) -> Routed:
    """Route images and write the results to a folder. A second call replaces the results of the first.

    With shards, which several processes and a cluster always make, a second call resumes what the first left, and computes again
    only what has changed. `masks` is a folder with lesion masks, named as for `mtb data folder`; those of a manifest are found
    without it. With `store`, the tokens of a manifest's images are read from it. If no image could be read, or none of the masks
    could be used, that is a WorkError; in the latter case the images are routed.
    """
    config, router, folder = config or RouteConfig(), loaded(model), Path(out)
    if folder.exists() and not folder.is_dir():
        raise RequestError(f"{out} is a file. Choose a folder to write to as `out`.")
    amount = amount_of(router, config)
    router.answers((), amount, config.selector)  # a wrong request is refused before a file is made
    if config.lesions:
        router.require_lesion_map(config.selector)
    # Several processes cannot append to one file, so they always write shards.
    in_one = engine == "local" and address is None and config.jobs == 1 and not config.shard_size
    if store is not None:
        if masks is not None or not in_one:
            what = "masks come from the manifest, and one process writes one table"
            raise RequestError(f"With `store`, {what}. Leave out the others.")
        store, images = _stored(store, images, router)
    sources = with_masks(expand(images), masks)
    if in_one:
        if (folder / TABLE).is_dir():
            advice = 'Resume it with `shard_size` or `engine="ray"`, or use another `out`.'
            raise RequestError(f"{folder} has a table in shards ({TABLE}/). {advice}")
        tokens, overlays = folder / f"{TOKENS}.safetensors", folder / OVERLAYS if config.overlay else None
        shard = Shard(sources, folder / f"{TABLE}.{config.table}", tokens if config.tokens else None, overlays, folder)
        with exclusive(folder, name=f".{TABLE}.lock"), progress(what="Routing", unit="image") as bar:
            routed = write_table(router, shard, config, bar.update, folder / ERRORS, store=store)
            # What an earlier call with other formats left would not belong to this table.
            files.remove(folder / f"{TABLE}.{'csv' if config.table == 'parquet' else 'parquet'}")
            if not config.tokens:
                files.remove(tokens)
    else:
        execution = Execution(engine, config.jobs, address)  # type: ignore[arg-type]
        routed = _table_in_shards(folder, router, sources, config, execution)
    retention = {
        name: {measure: None if math.isnan(value) else value for measure, value in asdict(values).items()}
        for name, values in routed.retention.items()
    }
    budget, guarantee = (None, amount.to_json()) if isinstance(amount, Guarantee) else (amount, None)
    summary = {name: getattr(routed, name) for name in ("failed", "masks_failed", "unfamiliar")}
    summary |= {"model": router.fingerprint, "selector": config.selector or router.main, "budget": budget, "guarantee": guarantee}
    # JSON has no NaN, so what was not measured is null.
    summary |= {"images": routed.done, "retention": retention or None, "notice": NOTICE}
    files.write_json(folder / SUMMARY, summary)
    if routed.masks_failed or routed.masks:
        # A manifest may be of images without a lesion: its empty masks are no fault.
        _report_masks(routed, asked=masks is not None or routed.masks_failed > 0)
    return routed


def amount_of(model: MedTokenBudget, config: RouteConfig) -> float | Guarantee:
    return model.amount(config.budget, config.retention, config.coverage, config.selector)


def _stored(store: FeatureStore | Path | str, images: Any, model: MedTokenBudget) -> tuple[FeatureStore, Manifest]:
    (one,) = images if isinstance(images, (list, tuple)) and len(images) == 1 else (images,)
    if not isinstance(one, Manifest):
        if not isinstance(one, (str, os.PathLike)) or Path(one).suffix != ".parquet":
            raise RequestError("With `store`, pass one manifest (.parquet) as the images.")
        one = Manifest.read(Path(one))
    opened = store if isinstance(store, FeatureStore) else FeatureStore.open(store)
    model.require_store(opened)
    return opened.annotated(one), one


def with_masks(sources: Iterable[ImageSource], masks: Path | str | None) -> Iterator[ImageSource]:
    """Give the sources their masks of a folder; without a folder they keep those that a manifest gave."""
    if masks is None:
        yield from sources
        return
    folder, images, missing, first = MaskFolder(Path(masks)), 0, 0, ""
    for source in sources:
        mask = folder.of(Path(source.name))
        images += 1
        if mask is None:
            missing += 1
            first = first or source.name
        yield replace(source, mask=None if mask is None else Path(mask))
    if missing == images:
        raise RequestError(f"No mask in {masks} belongs to an image such as {first}. {MASK_NAMES}")
    if missing:
        say(f"{missing:,} of {images:,} images have no mask in {masks}, such as {first}. {MASK_NAMES}")


def _report_masks(routed: Routed, asked: bool) -> None:
    """Say which masks could not be used, and fail if that is all of them and a measurement was asked for."""
    failed, empty = routed.masks_failed, routed.retention["router"].empty if routed.retention else 0
    first = f" The first: {routed.mask_reason}" if failed else ""
    if routed.masks > empty:
        if failed:
            say(f"{failed:,} of {routed.masks + failed:,} masks cannot be used; {routed.errors} lists them.{first}")
        if empty:
            say(f"{empty:,} of {routed.masks + failed:,} masks have no lesion patch on the grid and are not counted.")
        return
    why = [f"{failed:,} cannot be used"] * bool(failed) + [f"{empty:,} have no lesion patch on the grid"] * bool(empty)
    message = f"Retention cannot be measured with these masks: {', '.join(why)}.{first} The images were routed to {routed.table}."
    if asked:
        raise WorkError(message)
    say(message)


def _metadata(model: MedTokenBudget, config: RouteConfig) -> dict[str, str]:
    amount = amount_of(model, config)
    return {
        "classes": json.dumps(list(model.classes)),
        "selector": config.selector or model.main,
        **({"guarantee": json.dumps(amount.to_json())} if isinstance(amount, Guarantee) else {"budget": str(amount)}),
        "grid": json.dumps(list(model.grid)),
        "model": model.fingerprint,
        "notice": NOTICE,
    }


def write_table(
    model: MedTokenBudget,
    shard: Shard,
    config: RouteConfig,
    advance: Advance,
    errors: Path | list[dict[str, str]],
    kind: type[Routing] = Routing,
    store: FeatureStore | None = None,
) -> Routed:
    """Write every answer as it comes, and count it. The table appears last, so whoever sees it finds the rest too.

    What could not be read is added to `errors`: a file, which an earlier call may have left, or the list of a shard. Without a
    single readable image the former is an error, and no table appears; a shard may be empty.
    """
    routed = Routed(shard.table, model.grid)
    metadata, masks = _metadata(model, config), kind is Routing
    sizes, maps = (config.batch_size, config.workers), bool(config.lesions)
    answers = model.answers(shard.sources, amount_of(model, config), config.selector, *sizes, masks, kind, maps, store)
    # Lines are appended as images fail, so an earlier list must go first.
    if isinstance(errors, Path):
        files.remove(errors)

    def note(source: ImageSource, reason: str) -> None:
        row = {"image": source.name, "reason": reason}
        if isinstance(errors, Path):
            files.append_line(errors, row)
            routed.errors = errors
        else:
            errors.append(row)

    with ExitStack() as stack:
        schema = table_schema(model.classes if kind is Prediction else None, metadata, config.lesions)
        add_row = stack.enter_context(table_writer(shard.table, schema))
        add_tokens: Callable[[Routing], None] | None = None
        if shard.tokens is not None:
            add_tokens = stack.enter_context(token_writer(shard.tokens, metadata, config.tokens_dtype))
        for source, answer in answers:
            advance(1)
            if answer is None:
                note(source, source.reason)
                routed.failed += 1
                routed.reason = routed.reason or source.reason
                continue
            # Numbered over all images: photos of one name must not overwrite each other, and a shard made again has the same names.
            name, row = f"{shard.first + routed.done + routed.failed:06d}-{Path(answer.image).stem}.png", row_of(answer)
            if shard.overlays is not None:
                _save_overlay(shard.overlays / name, answer, partial(note, source))
            if shard.lesions is not None:
                row |= _write_lesion(shard.lesions, name, answer, config)
            add_row(row)
            if add_tokens is not None:
                add_tokens(answer)
            routed.done += 1
            if answer.unfamiliarity is not None:
                routed.unfamiliar = (routed.unfamiliar or 0) + answer.unfamiliar
            if source.mask_reason:
                note(source, f"Routed, but its mask cannot be used: {source.mask_reason}")
                routed.masks_failed += 1
                routed.mask_reason = routed.mask_reason or source.mask_reason
            routed.measure(row.get("lesion"), row.get("kept_lesion"), row.get("center_lesion"), answer.k)
        if isinstance(errors, Path):
            routed.require_images()
    return routed


def _save_overlay(path: Path, answer: Routing, note: Callable[[str], None]) -> None:
    source, mask = answer.source, None
    assert source is not None
    try:
        mask = None if source.mask is None else decode_mask(source.mask)
    except MedTokenBudgetError as error:
        note(f"Drawn, but its mask could not be read: {error}")
    picture = overlay(source, answer, mask)
    files.write_encoded(path, lambda stream: picture.save(stream, format="PNG"))


def _write_lesion(folder: Path, name: str, answer: Routing, config: RouteConfig) -> dict[str, Any]:
    cells: dict[str, Any] = {}
    pictures: dict[str, Image.Image | None] = {}
    if config.mask:
        pictures["mask"] = Image.fromarray(answer.mask().astype(np.uint8) * 255)
    if config.crop:
        pictures["crop"] = answer.crop()
    if config.box:
        cells["box"] = [side for box in answer.boxes for side in box]
    for column, picture in pictures.items():
        cells[column] = None
        if picture is not None:
            cells[column] = f"{LESIONS[column]}/{name}"
            files.write_encoded(folder / LESIONS[column] / name, partial(picture.save, format="PNG"))
    return cells


def _table_in_shards(
    folder: Path, model: MedTokenBudget, sources: Iterable[ImageSource], config: RouteConfig, execution: Execution
) -> Routed:
    """Make the shards that are missing, then list the errors of all of them."""
    if config.table != "parquet":
        raise RequestError('A table in shards is a Parquet data set: leave out `table="csv"`.')
    if whole := [path.name for path in (folder / f"{TABLE}.parquet", folder / f"{TABLE}.csv") if path.exists()]:
        raise RequestError(f"{folder} has a table in one file ({whole[0]}). Delete it, or use another `out`.")
    device = model.device.type
    processes = 1 if execution.jobs == 1 else len(worker_devices(device, execution.jobs))
    tokens = config.tokens_dtype if config.tokens else None
    request = {**_metadata(model, config), "batch_size": config.batch_size, "tokens": tokens, "overlay": config.overlay}
    request |= dict.fromkeys(config.lesions, True)
    with exclusive(folder, name=f".{TABLE}.lock"):
        # Shards of another model or budget are not thrown away without being asked.
        advice = "It was made by another request, or is damaged. Use another `out`, or delete the folder."
        files.claim(folder / TABLE / REQUEST, request, f"The table in {folder / TABLE}", advice)
        # The workers of a cluster have other working directories.
        shards = list(_plan(folder.resolve(), sources, config, files.sha256_json(request)))
        # By the hash of each table: one that was damaged after it was written is made again.
        missing = [shard for shard in shards if not shard.is_finished]
        total, left = sum(map(len, shards)), sum(map(len, missing))
        elsewhere = bool(missing) and (execution.engine == "ray" or processes > 1)
        copy = folder.resolve() / TABLE / MODEL
        try:
            if elsewhere:
                model.save_pretrained(copy)  # each worker loads it, and compares the backbone
            with progress(total=total, what="Routing", unit="image", initial=total - left) as bar:
                where: dict[str, Any] = {"processes": processes if elsewhere else 1, "device": device, "state": model}
                make, worker = partial(_make_shards, config), partial(_open_model, copy)
                for _ in run_units(missing, make, execution, open_worker=worker, advance=bar.update, **where):
                    pass
        finally:
            if elsewhere:
                shutil.rmtree(copy, ignore_errors=True)
        # Shards of an earlier request for more images. The record first: without one a half-removed shard is not believed.
        names, table = {shard.table.stem for shard in shards}, folder / TABLE
        for path in (*table.glob("_part-*"), *table.glob("part-*"), *(folder / TOKENS).glob("part-*")):
            if path.stem.lstrip("_") not in names:
                files.remove(path)
        return _sum_up(folder, shards, model.grid)


def _open_model(folder: Path, device: str) -> MedTokenBudget:
    require_shared(folder)
    torch.set_num_threads(1)  # there is a process per core or GPU
    return load(folder, device=device)


def _plan(folder: Path, sources: Iterable[ImageSource], config: RouteConfig, request: str) -> Iterator[Shard]:
    """Divide images, which must be files, into shards, in order; `request` is the hash of what is asked for."""
    rest, size = iter(sources), config.shard_size or SHARD_SIZE
    for index in count():
        shard, states = [], []
        for source in islice(rest, size):
            if not isinstance(source.value, (str, os.PathLike)):
                advice = "A table in shards is made from image files, folders, globs or a manifest."
                raise RequestError(f"{source.name} is not a file. {advice}")
            value, mask = _absolute(source.value), None if source.mask is None else _absolute(source.mask)
            shard.append(ImageSource(source.name, value, mask, image_id=source.image_id))
            states.append([source.name, source.image_id, _state(value), None if mask is None else _state(mask)])
        if not shard:
            return
        yield Shard(
            tuple(shard),
            folder / TABLE / f"part-{index:06d}.parquet",
            folder / TOKENS / f"part-{index:06d}.safetensors" if config.tokens else None,
            folder / OVERLAYS if config.overlay else None,
            folder,
            index * size,
            files.sha256_json([request, states]),
        )


def _absolute(path: str | os.PathLike[str]) -> Path:
    return Path(os.path.abspath(path))


def _state(path: Path) -> list[Any]:
    """Return path, size and time of change of a file; a file that does not exist has neither."""
    try:
        state = path.stat()
    except OSError:
        return [str(path), None, None]
    return [str(path), state.st_size, state.st_mtime_ns]


def _make_shards(config: RouteConfig, model: MedTokenBudget, shards: Sequence[Shard], advance: Advance) -> Iterator[None]:
    """Route the images of shards and publish each: tokens and overlays first, then the table, its record last."""
    for shard in shards:
        errors: list[dict[str, str]] = []
        # First: a shard that is cut short must not have the record of an earlier one.
        files.remove(shard.record)
        routed = write_table(model, shard, config, advance, errors)
        counts = {name: getattr(routed, name) for name in (*_SUMS, "unfamiliar", "mask_reason")}
        record = {"key": shard.key, "sha256": files.sha256_file(shard.table), **counts, "errors": errors}
        files.write_sealed(shard.record, record)
        yield


def _sum_up(folder: Path, shards: Sequence[Shard], grid: tuple[int, int]) -> Routed:
    import pyarrow.parquet as pq

    records = [files.read_sealed(shard.record, "Run the same command again.") for shard in shards]
    errors, path = [row for record in records for row in record["errors"]], folder / ERRORS
    files.remove(path)
    if errors:
        files.write_lines(path, errors)
    unfamiliar = [record["unfamiliar"] for record in records if record["unfamiliar"] is not None]
    routed = Routed(folder / TABLE, grid, **{name: sum(record[name] for record in records) for name in _SUMS})
    routed.reason, routed.errors = (errors[0]["reason"], path) if errors else ("", None)
    routed.unfamiliar = sum(unfamiliar) if unfamiliar else None
    routed.mask_reason = next((record["mask_reason"] for record in records if record["mask_reason"]), "")
    routed.require_images()
    for shard in shards:
        rows = pq.read_table(shard.table, columns=["lesion", "kept_lesion", "center_lesion", "k"])
        for cells in zip(*(column.to_pylist() for column in rows.columns)):
            routed.measure(*cells)
    return routed


ROW_GROUP = 64
"""Rows per Parquet row group: with all patches kept a row is a list of 256 numbers, so buffered rows use most of the memory."""
_HEADER_ROOM = 16 * 1024
_DTYPES: dict[str, tuple[str, np.dtype[Any]]] = {"fp16": ("F16", np.dtype("<f2")), "fp32": ("F32", np.dtype("<f4"))}
"""Number format -> its name in safetensors files and in NumPy."""


def table_schema(classes: Sequence[str] | None, metadata: dict[str, str], lesion_files: Sequence[str] = ()) -> Any:
    """Return the Arrow schema of a table: of predictions with these classes (`p_<class>`), or of routings for None."""
    import pyarrow as pa

    route = [("selector", pa.string()), ("budget", pa.float64()), ("k", pa.int32()), ("n_patches", pa.int32())]
    route += [("unfamiliarity", pa.float32()), ("unfamiliar", pa.bool_())]
    image, kept = [("image", pa.string()), ("image_id", pa.string())], ("kept", pa.list_(pa.int32()))
    if classes is not None:
        predicted = [("label", pa.string()), ("probability", pa.float32()), *((f"p_{name}", pa.float32()) for name in classes)]
        return pa.schema([*image, *predicted, *route, kept], metadata)
    lesion = [(name, pa.int32()) for name in ("lesion", "kept_lesion", "center_lesion")]
    found = [(name, pa.list_(pa.int32()) if name == "box" else pa.string()) for name in lesion_files]
    return pa.schema([*image, *route, *lesion, *found, kept, ("scores", pa.list_(pa.float32()))], metadata)


def row_of(answer: Routing) -> dict[str, Any]:
    """Return the cells of an answer by column; None is an empty cell, such as the lesion patches of an image without a mask."""
    row = {name: getattr(answer, name) for name in ("image", "selector", "budget", "k", "n_patches", "unfamiliarity")}
    row |= {
        "image_id": answer.image if answer.source is None else answer.source.image_id,
        "unfamiliar": None if answer.unfamiliarity is None else answer.unfamiliar,
        "kept": None if answer.kept is None else answer.kept.tolist(),
    }
    if isinstance(answer, Prediction):
        probabilities = {f"p_{name}": value for name, value in answer.probabilities.items()}
        return row | {"label": answer.label, "probability": answer.probability, **probabilities}
    lesion = answer.lesion
    return row | {
        "lesion": None if lesion is None else int(lesion.sum()),
        "kept_lesion": answer.kept_lesion,
        "center_lesion": None if lesion is None else int(lesion[_center(answer.grid)[: answer.k]].sum()),
        "scores": None if answer.scores is None else answer.scores.tolist(),
    }


@lru_cache
def _center(grid: tuple[int, int]) -> np.ndarray:
    """Rank all patches of a grid as the control `center` does."""
    tokens = TokenBatch(torch.zeros(1, grid[0] * grid[1], 1), grid)
    indices = create_selector("center").select(tokens, tokens.n).indices
    assert indices is not None
    return indices[0].numpy()


@contextmanager
def table_writer(path: Path, schema: Any) -> Iterator[Callable[[dict[str, Any]], None]]:
    """Open the table at `path`, and give the function that adds a row; the file appears when the block ends without an error."""
    with atomic_write(path) as temporary:
        if path.suffix.lower() == ".csv":
            with open(temporary, "w", newline="", encoding="utf-8") as stream:
                # The default of `csv` is \r\n on every system.
                lines = csv.DictWriter(stream, schema.names, lineterminator="\n")
                lines.writeheader()
                yield lambda row: lines.writerow({name: _csv_text(value) for name, value in row.items()})
            return
        import pyarrow as pa
        import pyarrow.parquet as pq

        rows: list[dict[str, Any]] = []
        with pq.ParquetWriter(temporary, schema) as groups:

            def flush() -> None:
                groups.write_batch(pa.RecordBatch.from_pylist(rows, schema))
                rows.clear()

            def add(row: dict[str, Any]) -> None:
                rows.append(row)
                if len(rows) == ROW_GROUP:
                    flush()

            yield add
            if rows:
                flush()


def _csv_text(value: Any) -> Any:
    """Return the text of a cell: nine digits restore a float32 exactly; a list is separated by spaces."""
    if value is None:
        return ""
    if isinstance(value, list):
        return " ".join(str(_csv_text(item)) for item in value)
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:.9g}" if isinstance(value, float) else csv_cell(value)


@contextmanager
def token_writer(path: Path, metadata: dict[str, str], dtype: TokenFormat) -> Iterator[Callable[[Routing], None]]:
    """Open a file of kept tokens, and give the function that adds an image; row i is row i of the table.

    It has `tokens` [n, K, D] and, for rankers, `indices` [n, K]. With a guarantee K differs between images, which then follow each
    other without gaps: `tokens` [sum of K, D], `indices` [sum of K] and `counts` [n], the K of each image.
    """
    packed, (name, kind) = "guarantee" in metadata, _DTYPES[dtype]
    counts: list[int] = []
    dim, ranked = 0, True
    # A safetensors file begins with a header that contains the shapes, and n is known only at the end. So space is reserved for the
    # header, tokens are written after it as they come, indices go to a temporary file, and the header is filled in last.
    with atomic_write(path) as temporary, open(temporary, "wb") as stream, tempfile.TemporaryFile(dir=path.parent) as indices:
        stream.write(b" " * (8 + _HEADER_ROOM))

        def add(answer: Routing) -> None:
            nonlocal dim, ranked
            k, dim = answer.tokens.shape
            counts.append(k)
            stream.write(np.ascontiguousarray(answer.tokens, dtype=kind).tobytes())
            ranked = answer.kept is not None
            if answer.kept is not None:
                # 16 bits hold the patch numbers of grids up to 181 x 181.
                indices.write(answer.kept.astype("<i2").tobytes())

        yield add
        rows = [sum(counts)] if packed else [len(counts), counts[0] if counts else 0]
        end = sum(counts) * dim * kind.itemsize
        tensors: dict[str, Any] = {"tokens": {"dtype": name, "shape": [*rows, dim], "data_offsets": [0, end]}}
        if ranked:
            start, end = end, end + sum(counts) * 2
            tensors["indices"] = {"dtype": "I16", "shape": rows, "data_offsets": [start, end]}
            indices.seek(0)
            shutil.copyfileobj(indices, stream, 1 << 20)
        # After the indices, in the order of the offsets: safetensors allows no gaps.
        if packed:
            tensors["counts"] = {"dtype": "I32", "shape": [len(counts)], "data_offsets": [end, end + len(counts) * 4]}
            stream.write(np.asarray(counts, "<i4").tobytes())
        header = json.dumps({"__metadata__": metadata, **tensors}).encode()
        if len(header) > _HEADER_ROOM:
            raise WorkError(f"The header of the token file needs {len(header)} bytes, but only {_HEADER_ROOM} are available.")
        stream.seek(0)
        stream.write(struct.pack("<Q", _HEADER_ROOM) + header.ljust(_HEADER_ROOM))
