"""Answers for many images as files: what `mtb predict` and `mtb route` write, in one table or in shards, here or on a Ray cluster.

A shard is a run of the images in their order. It has a Parquet file and, beside it, a record of what it was made from, which is
written last: a shard with a matching record is not computed again. Every engine makes a shard with `make_shard`, so the rows are
the same everywhere. On a cluster the folder of the results must be on a file system that all nodes share, and images and weights on
paths that all nodes can read.
"""

from __future__ import annotations

import json
import logging
import math
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from medtokenbudget.config import NOTICE, Count, Natural, Parallel, Settings
from medtokenbudget.data.readers import MASK_NAMES, MaskFolder
from medtokenbudget.errors import MedTokenBudgetError, MismatchError, RequestError, UnknownNameError, WorkError, first_line
from medtokenbudget.files import read_sealed, remove, sha256_file, sha256_json, write_json, write_lines, write_sealed
from medtokenbudget.jobs import not_shared, ray_cluster, stopped
from medtokenbudget.locks import exclusive
from medtokenbudget.metrics import Retention
from medtokenbudget.model.guarantee import Guarantee
from medtokenbudget.model.inference import ImageSource, Routing, expand
from medtokenbudget.model.model import DEFAULT_MODEL, MedTokenBudget, load, loaded
from medtokenbudget.model.writers import (
    Outputs,
    Summary,
    TokenFormat,
    check_table_path,
    prediction_columns,
    routing_columns,
    write_rows,
    write_table,
)
from medtokenbudget.progress import progress, say

TABLE, ERRORS, TOKENS, OVERLAYS, SUMMARY = "routes", "errors.jsonl", "tokens", "overlays", "summary.json"
PACKED_TOKENS = "tokens.safetensors"
PART = "part-{:06d}"
REQUEST = "_request.json"
"""Names with an underscore in front are no part of the data set for those who read it (pandas, Arrow, Spark, Ray)."""
ENGINES = ("local", "ray")
SHARD_SIZE = 1000
"""Images per shard on a cluster, unless told otherwise."""
RETRIES = 10
"""How often workers may die before the command gives up; an image that kills every worker must not keep a cluster busy forever."""


def metadata_of(model: MedTokenBudget, method: str, budget: float | Guarantee) -> dict[str, str]:
    """Say in a table and a token file where they come from."""
    return {
        "classes": json.dumps(list(model.classes)),
        "selector": method,
        **({"guarantee": json.dumps(budget.to_json())} if isinstance(budget, Guarantee) else {"budget": str(budget)}),
        "grid": json.dumps(list(model.grid)),
        "model": model.fingerprint,
        "notice": NOTICE,
    }


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
) -> Summary:
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
    answers = model.predict_sources(expand(images), amount, method, batch_size, workers)
    outputs = Outputs(
        table=table,
        columns=prediction_columns(model.classes),
        metadata=metadata_of(model, method, amount),
        errors=table.with_name(f"{table.stem}.errors.jsonl"),
        tokens=None if tokens is None else Path(tokens),
        tokens_dtype=tokens_dtype,
        overlays=None if overlays is None else Path(overlays),
    )
    return write_table(answers, outputs, "Predicting")


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


@dataclass(frozen=True)
class Routed:
    """Result of `route_files`.

    Attributes:
        table: The table with one row per image, or the folder of its shards.
        written: How many images were routed, could not be read, and are unlike the training images.
        retention: How much of the lesion was kept, by the router, `center` and (as expected) `random`; empty without masks.
    """

    table: Path
    written: Summary
    retention: dict[str, Retention]


@dataclass(frozen=True)
class Job:
    """What is asked for of a router, without the router itself, so that the workers of a cluster can be told.

    Attributes:
        folder: Folder of the results.
        config: Formats and sizes; its budget and selector are replaced by the two below.
        method: Selector.
        budget: Budget or guarantee.
        metadata: Metadata of every file.
        device: Device of the workers of a cluster.
    """

    folder: Path
    config: RouteConfig
    method: str
    budget: float | Guarantee
    metadata: dict[str, str]
    device: str

    @property
    def table(self) -> Path:
        """Folder of a table in shards."""
        return self.folder / TABLE

    @property
    def model(self) -> Path:
        """Folder of the model, for the workers of a cluster."""
        return self.table / "_model"

    def request(self) -> dict[str, Any]:
        """List what the results depend on beside the images."""
        tokens = self.config.tokens_dtype if self.config.tokens else None
        return {**self.metadata, "batch_size": self.config.batch_size, "tokens": tokens, "overlay": self.config.overlay}

    def outputs(self, table: Path, tokens: Path) -> Outputs:
        """Name the files of a table and its tokens."""
        return Outputs(
            table=table,
            columns=routing_columns(),
            metadata=self.metadata,
            errors=self.folder / ERRORS,
            tokens=tokens if self.config.tokens else None,
            tokens_dtype=self.config.tokens_dtype,
            overlays=self.folder / OVERLAYS if self.config.overlay else None,
        )

    def answers(self, model: MedTokenBudget, sources: Iterable[ImageSource]) -> Iterator[tuple[ImageSource, Routing | None]]:
        """Route images as asked."""
        return model.route_sources(sources, self.budget, self.method, self.config.batch_size, self.config.workers, masks=True)

    def part(self, index: int) -> Path:
        """Return the file of a shard."""
        return self.table / f"{PART.format(index)}.parquet"

    def part_tokens(self, index: int) -> Path:
        """Return the file of a shard's tokens."""
        return self.folder / TOKENS / f"{PART.format(index)}.safetensors"

    def record(self, index: int) -> Path:
        """Return the file that says what a shard was made from; there is one only if the shard is complete."""
        return self.table / f"_{PART.format(index)}.json"

    def finished(self, shard: Shard) -> bool:
        """Tell whether the shard is complete, as it was written, and was made from the same files."""
        part = self.part(shard.index)
        try:
            record = read_sealed(self.record(shard.index), "")
        except RequestError:
            return False
        return record["key"] == shard.key and part.exists() and sha256_file(part) == record["sha256"]


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

    With shards, which a cluster always makes, a second call resumes what the first left, and computes again only what has changed.

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
    method = router.main if config.selector is None else config.selector
    budget = router.amount(config.budget)
    if folder.exists() and not folder.is_dir():
        raise RequestError(f"{out} is a file. Pass a folder to write to with --out.")
    job = Job(folder, config, method, budget, metadata_of(router, method, budget), router.device.type)
    job.answers(router, [])  # a wrong request is refused before a file is made
    sources = with_masks(expand(images), masks)
    if engine == "local" and not config.shard_size:
        table, written = _one_table(job, router, sources)
    else:
        table, written = folder / TABLE, _shards(job, router, sources, engine, address)
    retention = written.retention(router.grid)
    summary = {
        "model": router.fingerprint,
        "selector": method,
        "budget": None if isinstance(budget, Guarantee) else budget,
        "guarantee": budget.to_json() if isinstance(budget, Guarantee) else None,
        "images": written.done,
        "failed": written.failed,
        "masks_failed": written.masks_failed,
        "unfamiliar": written.unfamiliar,
        "retention": {name: _nan_to_none(asdict(values)) for name, values in retention.items()} or None,
        "notice": NOTICE,
    }
    write_json(folder / SUMMARY, summary)
    if written.masks_failed or written.masks:
        # A manifest may be of images without a lesion: its empty masks are no fault.
        asked = masks is not None or written.masks_failed > 0
        _report_masks(table, written, retention, asked)
    return Routed(table, written, retention)


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


def _report_masks(table: Path, written: Summary, retention: dict[str, Retention], asked: bool) -> None:
    """Say which masks could not be used, and fail if that is all of them and a measurement was asked for."""
    failed, empty = written.masks_failed, retention["router"].empty if retention else 0
    first = f" The first: {written.mask_reason}" if failed else ""
    if written.masks > empty:
        if failed:
            say(f"{failed:,} of {written.masks + failed:,} masks cannot be used; {written.errors} lists them.{first}")
        if empty:
            say(f"{empty:,} of {written.masks + failed:,} masks have no lesion patch on the grid and are not counted.")
        return
    why = [f"{failed:,} cannot be used"] * bool(failed) + [f"{empty:,} have no lesion patch on the grid"] * bool(empty)
    message = f"Retention cannot be measured with these masks: {', '.join(why)}.{first} The images were routed to {table}."
    if asked:
        raise WorkError(message)
    say(message)


def _one_table(job: Job, model: MedTokenBudget, sources: Iterable[ImageSource]) -> tuple[Path, Summary]:
    """Write one table, in constant memory; it appears when everything is done."""
    if job.table.is_dir():
        raise RequestError(
            f"{job.folder} has a table in shards ({TABLE}/). Go on with --shard-size or --engine ray, or use another --out."
        )
    outputs = job.outputs(job.folder / f"{TABLE}.{job.config.table}", job.folder / PACKED_TOKENS)
    written = write_table(job.answers(model, sources), outputs, "Routing")
    # What an earlier call with other formats left would not belong to this table.
    remove(job.folder / f"{TABLE}.{'csv' if job.config.table == 'parquet' else 'parquet'}")
    if outputs.tokens is None:
        remove(job.folder / PACKED_TOKENS)
    return outputs.table, written


@dataclass(frozen=True)
class Shard:
    """Images that become one file.

    Attributes:
        index: Number of the shard.
        first: Number of its first image.
        sources: The images, which are files.
        key: Hash of the files (path, size and time of change) and of the request; a finished shard with the same key is kept.
    """

    index: int
    first: int
    sources: tuple[ImageSource, ...]
    key: str


def _shards(job: Job, model: MedTokenBudget, sources: Iterable[ImageSource], engine: str, address: str | None) -> Summary:
    """Make the shards that are missing, then list the errors of all of them."""
    if job.config.table != "parquet":
        raise RequestError("A table in shards is a Parquet data set: leave out --table csv.")
    if whole := [path.name for path in (job.folder / f"{TABLE}.parquet", job.folder / f"{TABLE}.csv") if path.exists()]:
        raise RequestError(f"{job.folder} has a table in one file ({whole[0]}). Delete it, or use another --out.")
    if engine not in ENGINES:
        raise UnknownNameError.of("engine", engine, ENGINES)
    job = replace(job, folder=job.folder.resolve())  # the workers of a cluster have other working directories
    with exclusive(job.folder, name=".routes.lock"):
        _claim(job)
        shards = list(plan(sources, job, job.config.shard_size or SHARD_SIZE))
        missing = [shard for shard in shards if not job.finished(shard)]
        total = sum(len(shard.sources) for shard in shards)
        done = total - sum(len(shard.sources) for shard in missing)
        with progress(total=total, what="Routing", unit="image", initial=done) as bar:
            if missing and engine == "ray":
                _make_on_ray(model, missing, job, bar.update, address)
            else:
                for shard in missing:
                    make_shard(model, shard, job, bar.update)
        _remove_shards_from(len(shards), job)
        return _sum_up(job, shards)


def _claim(job: Job) -> None:
    """Reject a folder with shards of another model or budget: they are not thrown away without being asked."""
    path = job.table / REQUEST
    if not path.exists():
        write_sealed(path, job.request())
        return
    recorded = read_sealed(path, "Delete it and run the same command again: shards of this request stay.")
    if recorded != job.request():
        advice = "It was made by another request. Use another --out, or delete the folder."
        raise MismatchError.between(f"The table in {job.table}", job.request(), recorded, advice)


def plan(sources: Iterable[ImageSource], job: Job, size: int) -> Iterator[Shard]:
    """Divide these images into shards, in order."""
    request, rest, index = sha256_json(job.request()), iter(sources), 0
    while here := tuple(_absolute(source) for source in islice(rest, size)):
        files = [[source.name, _state(source.value), None if source.mask is None else _state(source.mask)] for source in here]
        yield Shard(index, index * size, here, sha256_json([request, files]))
        index += 1


def _absolute(source: ImageSource) -> ImageSource:
    if not isinstance(source.value, (str, os.PathLike)):
        raise RequestError(
            f"{source.name} is not a file. A table in shards is made from image files, folders, globs or a manifest."
        )
    mask = None if source.mask is None else Path(os.path.abspath(source.mask))
    return ImageSource(source.name, Path(os.path.abspath(source.value)), mask)


def _state(path: Path) -> list[Any]:
    """Return path, size and time of change of a file; a file that is not there has neither."""
    try:
        state = path.stat()
    except OSError:
        return [str(path), None, None]
    return [str(path), state.st_size, state.st_mtime_ns]


def make_shard(model: MedTokenBudget, shard: Shard, job: Job, advance: Callable[[], Any] = lambda: None) -> None:
    """Route the images of a shard and publish it: tokens and overlays first, then the table, its record last."""
    errors: list[dict[str, str]] = []
    remove(job.record(shard.index))
    written = write_rows(
        job.answers(model, shard.sources),
        job.outputs(job.part(shard.index), job.part_tokens(shard.index)),
        lambda image, reason: errors.append({"image": image, "reason": reason}),
        advance,
        first=shard.first,
        empty=True,
    )
    counts = {name: getattr(written, name) for name in ("done", "failed", "unfamiliar", "masks_failed", "mask_reason")}
    record = {"key": shard.key, "sha256": sha256_file(job.part(shard.index)), **counts, "errors": errors}
    write_sealed(job.record(shard.index), record)


def _remove_shards_from(index: int, job: Job) -> None:
    """Remove shards of an earlier request for more images."""
    while job.part(index).exists() or job.record(index).exists():
        # The record first: without one a shard that a crash left half removed is not believed.
        for path in (job.record(index), job.part(index), job.part_tokens(index)):
            remove(path)
        index += 1


def _sum_up(job: Job, shards: Sequence[Shard]) -> Summary:
    """Add up the records and the rows of all shards, and write the list of errors."""
    import pyarrow.parquet as pq

    records = [read_sealed(job.record(shard.index), "Run the same command again.") for shard in shards]
    errors, path = [row for record in records for row in record["errors"]], job.folder / ERRORS
    remove(path)
    if errors:
        write_lines(path, errors)
    unfamiliar = [record["unfamiliar"] for record in records if record["unfamiliar"] is not None]
    written = Summary(
        done=sum(record["done"] for record in records),
        failed=sum(record["failed"] for record in records),
        errors=path if errors else None,
        unfamiliar=sum(unfamiliar) if unfamiliar else None,
        # Records of earlier versions do not count masks.
        masks_failed=sum(record.get("masks_failed", 0) for record in records),
        mask_reason=next((record["mask_reason"] for record in records if record.get("mask_reason")), ""),
        reason=errors[0]["reason"] if errors else "",
    )
    written.require_images(path)
    for shard in shards:
        rows = pq.read_table(job.part(shard.index), columns=["lesion", "kept_lesion", "center_lesion", "k"])
        for cells in zip(*(column.to_pylist() for column in rows.columns)):
            written.measure(*cells)
    return written


class Worker:
    """Holds a model and makes shards on a cluster. One for each GPU, or for each core of a cluster without GPUs.

    Args:
        job: What is asked for, and the folder of the model.
    """

    def __init__(self, job: Job) -> None:
        torch.set_num_threads(1)
        self.job = job
        self.model = load(job.model, device=job.device) if job.model.is_dir() else None

    def __call__(self, batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Make the shards of a batch; `failure` is empty, or says why a shard could not be made."""
        failures = [self.make(_unpacked(text)) for text in batch["shard"]]
        return {"index": batch["index"], "failure": np.array(failures, dtype=object)}

    def make(self, shard: Shard) -> str:
        """Make a shard unless it exists. Returns an error message, or nothing."""
        try:
            if self.model is None:
                return not_shared(self.job.folder)
            if not self.job.finished(shard):
                make_shard(self.model, shard, self.job)
        except MedTokenBudgetError as error:
            return str(error)
        return ""


def _make_on_ray(
    model: MedTokenBudget, shards: Sequence[Shard], job: Job, advance: Callable[[int], Any], address: str | None
) -> None:
    """Make the shards on a cluster, or on this machine if there is no address.

    A node that is lost takes the shards it was working on with it; these are given out again, the finished ones are not.
    """
    model.save_pretrained(job.model)  # a file, not an object: the backbone is loaded by each worker and compared
    missing, last = {shard.index: shard for shard in shards}, ""
    try:
        with ray_cluster(address) as ray:
            for _ in range(RETRIES + 1):
                if not missing:
                    return
                try:
                    for index in _ray_pass(ray, list(missing.values()), job):
                        advance(len(missing.pop(index).sources))
                except ray.exceptions.RayError as error:
                    last = first_line(error)
                for index in [index for index, shard in missing.items() if job.finished(shard)]:
                    advance(len(missing.pop(index).sources))
    finally:
        shutil.rmtree(job.model, ignore_errors=True)
    if missing:
        raise WorkError(f"Ray gave up on shard {min(missing)}: {last}. Run the same command again to resume.")


def _ray_pass(ray: Any, shards: Sequence[Shard], job: Job) -> Iterator[int]:
    """Give every shard to a worker once, and yield the finished ones. A worker that dies ends the pass with an error of Ray."""
    import ray.data

    ray.data.DataContext.get_current().enable_progress_bars = False
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    resources = ray.cluster_resources()
    gpus = int(resources.get("GPU", 0)) if job.device != "cpu" else 0
    most = max(1, min(len(shards), gpus or int(resources.get("CPU", 1))))
    rows = [{"index": shard.index, "shard": _packed(shard)} for shard in shards]
    answers = ray.data.from_items(rows, override_num_blocks=len(rows)).map_batches(
        Worker,
        batch_size=1,
        compute=ray.data.ActorPoolStrategy(min_size=1, max_size=most),
        fn_constructor_args=(job,),
        num_gpus=1 if gpus else 0,
        num_cpus=1,
        # Not restarted by Ray: an actor of a lost node would wait for a place that the others hold until they are finished.
        max_restarts=0,
        max_task_retries=0,
    )
    for answer in answers.iter_rows():
        if answer["failure"]:
            raise stopped(answer["failure"])
        yield int(answer["index"])


def _packed(shard: Shard) -> str:
    files = [[source.name, str(source.value), None if source.mask is None else str(source.mask)] for source in shard.sources]
    return json.dumps([shard.index, shard.first, files, shard.key])


def _unpacked(text: str) -> Shard:
    index, first, files, key = json.loads(text)
    sources = tuple(ImageSource(name, Path(path), None if mask is None else Path(mask)) for name, path, mask in files)
    return Shard(index, first, sources, key)
