"""Answers for many images as files: what `mtb predict` and `mtb route` write, in one table or in shards.

A shard is a run of the images in their order. It has a Parquet file and a record of what it was made from, which is written last:
a shard with a matching record is not computed again. Every process makes a shard with `make_shards`, so the rows are the same
everywhere. On a cluster the folder of the results must be on a file system that all nodes share, and images and weights on paths
that all nodes can read.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from medtokenbudget.config import NOTICE, Count, Natural, Parallel, Settings
from medtokenbudget.data import decode_mask
from medtokenbudget.data.readers import MASK_NAMES, MaskFolder
from medtokenbudget.devices import worker_devices
from medtokenbudget.errors import MedTokenBudgetError, RequestError, WorkError
from medtokenbudget.files import (
    append_line,
    claim,
    read_sealed,
    remove,
    sha256_file,
    sha256_json,
    write_encoded,
    write_json,
    write_lines,
    write_sealed,
)
from medtokenbudget.jobs import Advance, Execution, require_shared, run_units
from medtokenbudget.locks import exclusive
from medtokenbudget.metrics import Retention, retention_of_counts
from medtokenbudget.model.guarantee import Guarantee
from medtokenbudget.model.inference import ImageSource, Prediction, Routing, expand
from medtokenbudget.model.model import DEFAULT_MODEL, MedTokenBudget, load, loaded
from medtokenbudget.model.overlays import overlay
from medtokenbudget.model.writers import (
    Column,
    TokenFormat,
    center_lesion,
    check_table_path,
    lesion_patches,
    prediction_columns,
    routing_columns,
    table_writer,
    token_writer,
)
from medtokenbudget.progress import progress, say

TABLE, ERRORS, TOKENS, OVERLAYS, SUMMARY = "routes", "errors.jsonl", "tokens", "overlays", "summary.json"
PACKED_TOKENS = "tokens.safetensors"
REQUEST = "_request.json"
"""Names with an underscore in front are no part of the data set for those who read it (pandas, Arrow, Spark, Ray)."""
SHARD_SIZE = 1000
"""Images per shard in several processes or on a cluster, unless told otherwise."""
Answers = Iterable[tuple[ImageSource, Routing | None]]
"""What `MedTokenBudget.answers` yields."""


@dataclass
class Routed:
    """What was written, and how much of the lesion was kept where there is a mask.

    Attributes:
        table: The table with one row per image, or the folder of its shards.
        grid: Rows and columns of the patches.
        done: Number of images in the table.
        failed: Number of images that could not be read.
        errors: File with the reasons; None if there were none.
        unfamiliar: Number of images that are unlike the training images of the model; None if it cannot tell.
        masks_failed: Number of masks that could not be used; their images are in the table all the same.
        mask_reason: Why the first of them could not; empty if all could.
        reason: Why the first image could not be read; empty if all could.
        masks: Number of masks that could be used, also by methods that merge patches, which measure nothing.
        measured: Lesion patches, those kept, those that `center` keeps, and K, of each measured image: 16 bytes per image.
    """

    table: Path
    grid: tuple[int, int]
    done: int = 0
    failed: int = 0
    errors: Path | None = None
    unfamiliar: int | None = None
    masks_failed: int = 0
    mask_reason: str = ""
    reason: str = ""
    masks: int = 0
    measured: array[int] = field(default_factory=lambda: array("i"))

    def add(self, source: ImageSource, answer: Routing | None) -> None:
        if answer is None:
            self.failed += 1
            self.reason = self.reason or source.reason
            return
        self.done += 1
        if answer.unfamiliarity is not None:
            self.unfamiliar = (self.unfamiliar or 0) + answer.unfamiliar
        if source.mask_reason:
            self.masks_failed += 1
            self.mask_reason = self.mask_reason or source.mask_reason
        self.measure(lesion_patches(answer), answer.kept_lesion, center_lesion(answer), answer.k)

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
        counts = {"router": kept, "center": center, "random": lesion * k / n}
        return {name: retention_of_counts(values, lesion, k, n) for name, values in counts.items()}

    def require_images(self, errors: Path) -> None:
        """Raise a WorkError if not a single image could be read."""
        if not self.done:
            reason = self.reason or "There are no images."
            raise WorkError(f"No image could be read ({self.failed} failed). First error: {reason} All errors are in {errors}.")


@dataclass(frozen=True)
class Outputs:
    """The files of one table; tokens and overlays only if they are asked for."""

    table: Path
    columns: Sequence[Column]
    metadata: dict[str, str]
    """What the table and the tokens say about where they come from."""
    tokens: Path | None = None
    tokens_dtype: TokenFormat = "fp16"
    overlays: Path | None = None


def predict_files(
    model: MedTokenBudget | Path | str,
    images: Any,
    out: Path | str,
    budget: float | Guarantee | None = None,
    selector: str | None = None,
    tokens: Path | str | None = None,
    tokens_dtype: TokenFormat = "fp16",
    overlays: Path | str | None = None,
    batch_size: int = 16,
    workers: int = 2,
) -> Routed:
    """Predict images and write the results to files, in constant memory.

    Args:
        model: A model, or what `mtb.load` takes.
        images: What `MedTokenBudget.predict` takes.
        out: Table to write, `.csv` or `.parquet`.
        budget: Share of the patches that is kept, in (0, 1], or a guarantee of the model; None means 0.3, or the only budget of a
            model that is routed early.
        selector: Method to use; None means the model's main one.
        tokens: Safetensors file for the kept tokens, optional.
        tokens_dtype: Number format of these tokens.
        overlays: Folder for one overlay picture per image, optional.
        batch_size: Images per forward pass.
        workers: Threads that decode images.

    Returns:
        How many images were predicted. Images that could not be read are listed in `x.errors.jsonl` next to `x.csv`.

    Raises:
        NoHeadError: If the model is a router without a head.
        WorkError: If no image could be read; no table is written then.
    """
    table = Path(out)
    check_table_path(table)
    model = loaded(model)
    method, amount = model.main if selector is None else selector, model.amount(budget)
    answers = model.answers(expand(images), amount, method, batch_size, workers, kind=Prediction)
    outputs = Outputs(
        table=table,
        columns=prediction_columns(model.classes),
        metadata=_metadata(model, method, amount),
        tokens=None if tokens is None else Path(tokens),
        tokens_dtype=tokens_dtype,
        overlays=None if overlays is None else Path(overlays),
    )
    return _write_table(answers, outputs, model.grid, table.with_name(f"{table.stem}.errors.jsonl"), "Predicting")


def _metadata(model: MedTokenBudget, method: str, budget: float | Guarantee) -> dict[str, str]:
    """Say in a table and a token file where they come from."""
    return {
        "classes": json.dumps(list(model.classes)),
        "selector": method,
        **({"guarantee": json.dumps(budget.to_json())} if isinstance(budget, Guarantee) else {"budget": str(budget)}),
        "grid": json.dumps(list(model.grid)),
        "model": model.fingerprint,
        "notice": NOTICE,
    }


@dataclass(frozen=True)
class RouteConfig(Settings):
    """How images are routed to files."""

    budget: float | Guarantee | None = None
    """Share of the patches to keep, or a guarantee of the model. Default: 0.3, or the only budget of a model routed early."""
    selector: str | None = None
    """Method to route with. Default: the model's main one."""
    table: Literal["parquet", "csv"] = "parquet"
    """Format of the table."""
    tokens: bool = False
    """Whether to write the kept tokens too."""
    tokens_dtype: TokenFormat = "fp16"
    """Number format of these tokens."""
    overlay: bool = False
    """Whether to draw the kept patches of each image too."""
    batch_size: Count = 16
    """Images per forward pass."""
    workers: Parallel = 2
    """Threads that decode images."""
    shard_size: Natural = 0
    """Images per file of a table in shards, which a stopped command resumes; 0 writes one table."""
    jobs: Parallel = 1
    """Processes that share the work, in shards; they divide the GPUs of the machine. 0 means one per GPU, or one per core."""


def route_files(
    images: Any,
    out: Path | str,
    model: MedTokenBudget | Path | str = DEFAULT_MODEL,
    masks: Path | str | None = None,
    config: RouteConfig | None = None,
    engine: str = "local",
    address: str | None = None,
) -> Routed:
    """Route images and write the results to a folder. A second call replaces the results of the first.

    With shards, which several processes and a cluster always make, a second call resumes what the first left, and computes again
    only what has changed.

    Args:
        images: What `mtb.route` takes, or a manifest.
        out: Folder to write: `routes.parquet` or `.csv` or, in shards, `routes/`; `summary.json`, `errors.jsonl`, `overlays/`,
            `tokens.safetensors` or `tokens/`.
        model: A model, or what `mtb.load` takes.
        masks: Folder with lesion masks, named as for `mtb data folder`; the masks of a manifest are found without it.
        config: Budget, formats and sizes.
        engine: 'local', or 'ray' for a cluster.
        address: Address of a running Ray cluster ('auto', 'host:port'); None starts Ray on this machine.

    Raises:
        WorkError: If no image could be read, or none of the masks could be used; in the latter case the images are routed.
    """
    config, router, folder = config or RouteConfig(), loaded(model), Path(out)
    execution = Execution(engine, config.jobs, address)  # type: ignore[arg-type]
    budget = router.amount(config.budget)
    config = replace(config, selector=router.main if config.selector is None else config.selector, budget=budget)
    if folder.exists() and not folder.is_dir():
        raise RequestError(f"{out} is a file. Choose a folder to write to as `out`.")
    request = Request(folder, config, _metadata(router, str(config.selector), budget))
    request.answers(router, [])  # a wrong request is refused before a file is made
    sources = with_masks(expand(images), masks)
    if engine == "local" and config.jobs == 1 and not config.shard_size:
        routed = _one_table(request, router, sources)
    else:
        routed = _table_in_shards(request, router, sources, execution)
    summary = {
        "model": router.fingerprint,
        "selector": config.selector,
        "budget": None if isinstance(budget, Guarantee) else budget,
        "guarantee": budget.to_json() if isinstance(budget, Guarantee) else None,
        "images": routed.done,
        "failed": routed.failed,
        "masks_failed": routed.masks_failed,
        "unfamiliar": routed.unfamiliar,
        "retention": {name: _nan_to_none(asdict(values)) for name, values in routed.retention.items()} or None,
        "notice": NOTICE,
    }
    write_json(folder / SUMMARY, summary)
    if routed.masks_failed or routed.masks:
        # A manifest may be of images without a lesion: its empty masks are no fault.
        _report_masks(routed, asked=masks is not None or routed.masks_failed > 0)
    return routed


def _nan_to_none(values: dict[str, Any]) -> dict[str, Any]:
    return {name: None if isinstance(value, float) and math.isnan(value) else value for name, value in values.items()}


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


# One table -----------------------------------------------------------------------------------------------------------


def _one_table(request: Request, model: MedTokenBudget, sources: Iterable[ImageSource]) -> Routed:
    """Write one table, in constant memory; it appears when everything is done."""
    folder, config = request.folder, request.config
    if request.table.is_dir():
        raise RequestError(
            f'{folder} has a table in shards ({TABLE}/). Resume it with `shard_size` or `engine="ray"`, or use another `out`.'
        )
    outputs = request.outputs(folder / f"{TABLE}.{config.table}", folder / PACKED_TOKENS)
    routed = _write_table(request.answers(model, sources), outputs, model.grid, folder / ERRORS, "Routing")
    # What an earlier call with other formats left would not belong to this table.
    remove(folder / f"{TABLE}.{'csv' if config.table == 'parquet' else 'parquet'}")
    if outputs.tokens is None:
        remove(folder / PACKED_TOKENS)
    return routed


def _write_table(answers: Answers, outputs: Outputs, grid: tuple[int, int], errors: Path, what: str) -> Routed:
    """Write one table with a progress bar named `what`, and list in `errors` what could not be read.

    Raises:
        WorkError: If no image could be read; no table is written then.
    """
    routed = Routed(outputs.table, grid)

    def note(image: str, reason: str) -> None:
        append_line(errors, {"image": image, "reason": reason})
        routed.errors = errors

    with exclusive(outputs.table.parent, name=f".{outputs.table.stem}.lock"), progress(what=what, unit="image") as bar:
        remove(errors)
        _write_rows(answers, outputs, routed, note, bar.update, must_have_rows=errors)
    return routed


def _write_rows(
    answers: Answers,
    outputs: Outputs,
    routed: Routed,
    note: Callable[[str, str], None],
    advance: Advance,
    first: int = 0,
    must_have_rows: Path | None = None,
) -> None:
    """Write every answer as it comes, and count it. The table appears last, so whoever sees it finds the rest too.

    `note` is called with the name and the reason for each image that could not be read, or whose mask could not; `first` is the
    number of the first overlay. If no image could be read, that is an error that names `must_have_rows`, or a table without rows.
    """
    with ExitStack() as stack:
        writers = [stack.enter_context(table_writer(outputs.table, outputs.columns, outputs.metadata))]
        if outputs.tokens is not None:
            # With a guarantee K differs from image to image.
            packed = "guarantee" in outputs.metadata
            writers.append(stack.enter_context(token_writer(outputs.tokens, outputs.metadata, outputs.tokens_dtype, packed)))
        for source, answer in answers:
            advance(1)
            if answer is None:
                note(source.name, source.reason)
            else:
                if outputs.overlays is not None:
                    path = outputs.overlays / f"{first + routed.done:06d}-{Path(answer.image).stem}.png"
                    _save_overlay(path, source, answer, note)
                for add in writers:
                    add(answer)
            if source.mask_reason:
                note(source.name, f"Routed, but its mask cannot be used: {source.mask_reason}")
            routed.add(source, answer)
        if must_have_rows is not None:
            routed.require_images(must_have_rows)


def _save_overlay(path: Path, source: ImageSource, answer: Routing, note: Callable[[str, str], None]) -> None:
    """Draw the kept patches; a mask that cannot be read is reported, and the overlay is drawn without it."""
    mask = None
    try:
        mask = None if source.mask is None else decode_mask(source.mask)
    except MedTokenBudgetError as error:
        note(source.name, f"Drawn, but its mask could not be read: {error}")
    picture = overlay(source, answer, mask)
    write_encoded(path, lambda stream: picture.save(stream, format="PNG"))


# A table in shards ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Request:
    """What is asked for of a router, without the router itself, so that other processes can be told; and the files of it."""

    folder: Path
    config: RouteConfig
    metadata: dict[str, str]

    @property
    def table(self) -> Path:
        return self.folder / TABLE

    @property
    def model(self) -> Path:
        """Folder of the model, for other processes."""
        return self.table / "_model"

    @property
    def identity(self) -> dict[str, Any]:
        """What the results depend on apart from the images."""
        tokens = self.config.tokens_dtype if self.config.tokens else None
        return {**self.metadata, "batch_size": self.config.batch_size, "tokens": tokens, "overlay": self.config.overlay}

    def outputs(self, table: Path, tokens: Path) -> Outputs:
        overlays = self.folder / OVERLAYS if self.config.overlay else None
        kept = tokens if self.config.tokens else None
        return Outputs(table, routing_columns(), self.metadata, kept, self.config.tokens_dtype, overlays)

    def answers(self, model: MedTokenBudget, sources: Iterable[ImageSource]) -> Answers:
        config = self.config
        return model.answers(sources, config.budget, config.selector, config.batch_size, config.workers, masks=True)

    def part(self, index: int) -> Path:
        return self.table / f"part-{index:06d}.parquet"

    def part_tokens(self, index: int) -> Path:
        return self.folder / TOKENS / f"part-{index:06d}.safetensors"

    def record(self, index: int) -> Path:
        """Return the file that says what a shard was made from; there is one only if the shard is complete."""
        return self.table / f"_part-{index:06d}.json"


@dataclass(frozen=True)
class Shard:
    """Images, which are files, that become one file.

    `first` is the number of the first image. A finished shard is kept if its `key` is the same: the hash of the files (path, size
    and time of change) and of the request.
    """

    index: int
    first: int
    sources: tuple[ImageSource, ...]
    key: str

    def __len__(self) -> int:
        return len(self.sources)

    def is_finished(self, request: Request) -> bool:
        """Tell whether the shard is complete, as it was written, and was made from the same files."""
        part = request.part(self.index)
        try:
            record = read_sealed(request.record(self.index), "")
        except RequestError:
            return False
        return record["key"] == self.key and part.exists() and sha256_file(part) == record["sha256"]


def _table_in_shards(request: Request, model: MedTokenBudget, sources: Iterable[ImageSource], execution: Execution) -> Routed:
    """Make the shards that are missing, then list the errors of all of them."""
    folder = request.folder
    if request.config.table != "parquet":
        raise RequestError('A table in shards is a Parquet data set: leave out `table="csv"`.')
    if whole := [path.name for path in (folder / f"{TABLE}.parquet", folder / f"{TABLE}.csv") if path.exists()]:
        raise RequestError(f"{folder} has a table in one file ({whole[0]}). Delete it, or use another `out`.")
    device = model.device.type
    processes = 1 if execution.jobs == 1 else len(worker_devices(device, execution.jobs))
    with exclusive(folder, name=".routes.lock"):
        # Shards of another model or budget are not thrown away without being asked.
        advice = "It was made by another request, or is damaged. Use another `out`, or delete the folder."
        claim(request.table / REQUEST, request.identity, f"The table in {request.table}", advice)
        shards = list(_plan(sources, request))
        missing = [shard for shard in shards if not shard.is_finished(request)]
        total, left = sum(map(len, shards)), sum(map(len, missing))
        elsewhere = bool(missing) and (execution.engine == "ray" or processes > 1)
        try:
            if elsewhere:
                model.save_pretrained(request.model)  # each worker loads it, and compares the backbone
            # The workers of a cluster have other working directories.
            absolute = replace(request, folder=folder.resolve())
            with progress(total=total, what="Routing", unit="image", initial=total - left) as bar:
                for _ in run_units(
                    missing,
                    partial(make_shards, absolute),
                    execution,
                    processes=processes if elsewhere else 1,
                    device=device,
                    state=model,
                    open_worker=partial(_open_model, absolute.model),
                    advance=bar.update,
                ):
                    pass
        finally:
            if elsewhere:
                shutil.rmtree(request.model, ignore_errors=True)
        _remove_shards_from(len(shards), request)
        return _sum_up(request, shards, model.grid)


def _open_model(folder: Path, device: str) -> MedTokenBudget:
    require_shared(folder)
    torch.set_num_threads(1)  # there is a process per core or GPU
    return load(folder, device=device)


def _plan(sources: Iterable[ImageSource], request: Request) -> Iterator[Shard]:
    """Divide these images into shards, in order."""
    identity, rest, index, size = sha256_json(request.identity), iter(sources), 0, request.config.shard_size or SHARD_SIZE
    while here := tuple(_absolute(source) for source in islice(rest, size)):
        files = [[source.name, _state(source.value), None if source.mask is None else _state(source.mask)] for source in here]
        yield Shard(index, index * size, here, sha256_json([identity, files]))
        index += 1


def _absolute(source: ImageSource) -> ImageSource:
    if not isinstance(source.value, (str, os.PathLike)):
        raise RequestError(
            f"{source.name} is not a file. A table in shards is made from image files, folders, globs or a manifest."
        )
    mask = None if source.mask is None else Path(os.path.abspath(source.mask))
    return ImageSource(source.name, Path(os.path.abspath(source.value)), mask)


def _state(path: Path) -> list[Any]:
    """Return path, size and time of change of a file; a file that does not exist has neither."""
    try:
        state = path.stat()
    except OSError:
        return [str(path), None, None]
    return [str(path), state.st_size, state.st_mtime_ns]


def make_shards(request: Request, model: MedTokenBudget, shards: Sequence[Shard], advance: Advance) -> Iterator[None]:
    """Route the images of shards and publish each: tokens and overlays first, then the table, its record last."""
    for shard in shards:
        part, record = request.part(shard.index), request.record(shard.index)
        errors: list[dict[str, str]] = []

        def note(image: str, reason: str, errors: list[dict[str, str]] = errors) -> None:
            errors.append({"image": image, "reason": reason})

        remove(record)
        routed, outputs = Routed(part, model.grid), request.outputs(part, request.part_tokens(shard.index))
        _write_rows(request.answers(model, shard.sources), outputs, routed, note, advance, shard.first)
        counts = {name: getattr(routed, name) for name in ("done", "failed", "unfamiliar", "masks_failed", "mask_reason")}
        write_sealed(record, {"key": shard.key, "sha256": sha256_file(part), **counts, "errors": errors})
        yield


def _remove_shards_from(index: int, request: Request) -> None:
    """Remove shards of an earlier request for more images."""
    while request.part(index).exists() or request.record(index).exists():
        # The record first: without one a shard that a crash left half removed is not believed.
        for path in (request.record(index), request.part(index), request.part_tokens(index)):
            remove(path)
        index += 1


def _sum_up(request: Request, shards: Sequence[Shard], grid: tuple[int, int]) -> Routed:
    """Add up the records and the rows of all shards, and write the list of errors."""
    import pyarrow.parquet as pq

    records = [read_sealed(request.record(shard.index), "Run the same command again.") for shard in shards]
    errors, path = [row for record in records for row in record["errors"]], request.folder / ERRORS
    remove(path)
    if errors:
        write_lines(path, errors)
    unfamiliar = [record["unfamiliar"] for record in records if record["unfamiliar"] is not None]
    routed = Routed(
        table=request.table,
        grid=grid,
        done=sum(record["done"] for record in records),
        failed=sum(record["failed"] for record in records),
        errors=path if errors else None,
        unfamiliar=sum(unfamiliar) if unfamiliar else None,
        masks_failed=sum(record["masks_failed"] for record in records),
        mask_reason=next((record["mask_reason"] for record in records if record["mask_reason"]), ""),
        reason=errors[0]["reason"] if errors else "",
    )
    routed.require_images(path)
    for shard in shards:
        rows = pq.read_table(request.part(shard.index), columns=["lesion", "kept_lesion", "center_lesion", "k"])
        for cells in zip(*(column.to_pylist() for column in rows.columns)):
            routed.measure(*cells)
    return routed
