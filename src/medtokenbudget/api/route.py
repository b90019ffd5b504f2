"""`route` and `route_files`: which patches of images a router keeps, as objects or as files.

Its own file because it needs no classes. With masks the same pass measures how much of the lesion was kept, beside the controls
that a good result has to beat.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from medtokenbudget.api.route_shards import ERRORS, OVERLAYS, TABLE, ShardWork, route_in_shards
from medtokenbudget.api.route_table import Measured, columns
from medtokenbudget.api.writing import NOTICE, Outputs, Summary, metadata_of, write_answers
from medtokenbudget.config import Count, Natural, Parallel, Settings
from medtokenbudget.data.readers import MASK_NAMES, MaskFolder
from medtokenbudget.errors import RequestError, WorkError
from medtokenbudget.files import remove, write_json
from medtokenbudget.metrics import Retention
from medtokenbudget.model import Guarantee, MedTokenBudget, Routing, Source, expand, load
from medtokenbudget.model.table import TokenFormat
from medtokenbudget.progress import say

ROUTER = "dermoscopy"
"""The router that comes with the package."""
SUMMARY, PACKED_TOKENS = "summary.json", "tokens.safetensors"
SHARD_SIZE = 1000
"""Images per shard on a cluster, unless told otherwise."""
TableFormat = Literal["parquet", "csv"]


@dataclass(frozen=True)
class RouteConfig(Settings):
    """How images are routed to files."""

    budget: float | Guarantee | None = None
    """Share of the patches to keep, or a guarantee of the model. Default: 0.3, or the only budget of a model routed early."""
    selector: str | None = None
    """Method to route with. Default: the model's main one."""
    table: TableFormat = "parquet"
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
    """Images per file of a table in shards, which a stopped command goes on with; 0 writes one table."""


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


def route(
    images: Any,
    budget: float | Guarantee | None = None,
    model: MedTokenBudget | Path | str = ROUTER,
    selector: str | None = None,
    batch_size: int = 16,
) -> list[Routing]:
    """The patches that a router keeps of images; no training, no labels, no masks.

    Args:
        images: What `MedTokenBudget.predict` takes: paths, folders, globs, pictures, uint8 arrays, bytes.
        budget: Share of the patches that is kept, in (0, 1], or a guarantee of the model; None means 0.3, or the only budget of a
            model that is routed early.
        model: A model, or what `mtb.load` takes. Default: the router that comes with the package, for dermoscopic images.
        selector: Method to use; None means the model's main one.
        batch_size: Images per forward pass.

    Returns:
        One `Routing` per image: `kept`, `scores`, `tokens`, `unfamiliar`. In a notebook it shows the image with its kept patches.

    Raises:
        RequestError: If an image cannot be read.

    Example:
        >>> routing = mtb.route("photo.jpg", budget=0.3)[0]
        >>> routing.k, routing.tokens.shape, routing.unfamiliar
        (76, (76, 192), False)
    """
    return _loaded(model).route(images, budget, selector, batch_size)


def route_files(
    images: Any,
    out: Path | str,
    model: MedTokenBudget | Path | str = ROUTER,
    masks: Path | str | None = None,
    config: RouteConfig | None = None,
    engine: str = "local",
    address: str | None = None,
) -> Routed:
    """Route images and write the results to a folder. A second call replaces the results of the first.

    With shards, which a cluster always makes, a second call goes on with what the first left, and computes again only what has
    changed.

    Args:
        images: What `route` takes, or a manifest.
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
    config, router = config or RouteConfig(), _loaded(model)
    method = router.main if config.selector is None else config.selector
    request = Request(router, Path(out), config, method, router.amount(config.budget))
    if request.folder.exists() and not request.folder.is_dir():
        raise RequestError(f"{out} is a file. Pass a folder to write to with --out.")
    sources, measured = masked(expand(images), masks), Measured()
    if engine == "local" and not config.shard_size:
        table, written = _one_table(request, sources, measured)
    else:
        table, written = _shards(request, sources, measured, engine, address)
    found = measured.retention(router.grid)
    write_json(request.folder / SUMMARY, summary_of(request, written, found))
    if written.masks_failed or measured.masks:
        # A manifest may be of images without a lesion: its empty masks are no fault.
        asked = masks is not None or (written.masks_failed > 0)
        _report_masks(table, written, measured, found, asked)
    return Routed(table, written, found)


def _report_masks(table: Path, written: Summary, measured: Measured, retention: dict[str, Retention], asked: bool) -> None:
    """Say which masks could not be used, and fail if that is all of them and a measurement was asked for."""
    failed, empty = written.masks_failed, retention["router"].empty if retention else 0
    first = f" The first: {written.mask_reason}" if failed else ""
    if measured.masks > empty:
        if failed:
            say(f"{failed:,} of {measured.masks + failed:,} masks cannot be used; {written.errors} lists them.{first}")
        if empty:
            say(f"{empty:,} of {measured.masks + failed:,} masks have no lesion patch on the grid and are not counted.")
        return
    why = [f"{failed:,} cannot be used"] * bool(failed) + [f"{empty:,} have no lesion patch on the grid"] * bool(empty)
    message = f"Retention cannot be measured with these masks: {', '.join(why)}.{first} The images were routed to {table}."
    if asked:
        raise WorkError(message)
    say(message)


@dataclass(frozen=True)
class Request:
    """What is asked for of a router: the folder to write, and the method and the amount that follow from the settings."""

    router: MedTokenBudget
    folder: Path
    config: RouteConfig
    method: str
    budget: float | Guarantee


def _one_table(request: Request, sources: Iterable[Source], measured: Measured) -> tuple[Path, Summary]:
    """One table, in constant memory; it appears when everything is done."""
    folder, config, router = request.folder, request.config, request.router
    if (folder / TABLE).is_dir():
        raise RequestError(
            f"{folder} has a table in shards ({TABLE}/). Go on with --shard-size or --engine ray, or use another --out."
        )
    outputs = Outputs(
        table=folder / f"{TABLE}.{config.table}",
        errors=folder / ERRORS,
        tokens=folder / PACKED_TOKENS if config.tokens else None,
        tokens_dtype=config.tokens_dtype,
        overlays=folder / OVERLAYS if config.overlay else None,
    )
    answers = router.route_sources(sources, request.budget, request.method, config.batch_size, config.workers, masks=True)
    metadata = metadata_of(router, request.method, request.budget)
    written = write_answers(answers, outputs, columns(), metadata, "Routing", measured.add)
    for stale in [folder / f"{TABLE}.{other}" for other in ("parquet", "csv") if other != config.table]:
        remove(stale)
    if not config.tokens:
        remove(folder / PACKED_TOKENS)
    return outputs.table, written


def _shards(
    request: Request, sources: Iterable[Source], measured: Measured, engine: str, address: str | None
) -> tuple[Path, Summary]:
    """A table in shards."""
    folder, config, router = request.folder, request.config, request.router
    if config.table != "parquet":
        raise RequestError("A table in shards is a Parquet data set: leave out --table csv.")
    if found := [path.name for path in (folder / f"{TABLE}.parquet", folder / f"{TABLE}.csv") if path.exists()]:
        raise RequestError(f"{folder} has a table in one file ({found[0]}). Delete it, or use another --out.")
    work = ShardWork(
        folder=folder.resolve(),
        budget=request.budget,
        method=request.method,
        metadata=metadata_of(router, request.method, request.budget),
        batch_size=config.batch_size,
        workers=config.workers,
        tokens=config.tokens_dtype if config.tokens else None,
        overlay=config.overlay,
        device=router.device.type,
    )
    router.route_sources([], request.budget, request.method, config.batch_size)  # a wrong request is refused before a file is made
    written = route_in_shards(router, sources, work, config.shard_size or SHARD_SIZE, measured, engine, address)
    return folder / TABLE, written


def summary_of(request: Request, written: Summary, retention: dict[str, Retention]) -> dict[str, Any]:
    """The content of `summary.json`; what was not measured is null."""
    budget = request.budget
    return {
        "model": request.router.fingerprint,
        "selector": request.method,
        "budget": None if isinstance(budget, Guarantee) else budget,
        "guarantee": budget.to_json() if isinstance(budget, Guarantee) else None,
        "images": written.done,
        "failed": written.failed,
        "masks_failed": written.masks_failed,
        "unfamiliar": written.unfamiliar,
        "retention": {name: _plain(asdict(found)) for name, found in retention.items()} or None,
        "notice": NOTICE,
    }


def _plain(values: dict[str, Any]) -> dict[str, Any]:
    return {name: None if isinstance(value, float) and math.isnan(value) else value for name, value in values.items()}


def _loaded(model: MedTokenBudget | Path | str) -> MedTokenBudget:
    return model if isinstance(model, MedTokenBudget) else load(model)


def masked(sources: Iterable[Source], masks: Path | str | None) -> Iterator[Source]:
    """The sources with their masks of a folder; without a folder those that a manifest gave."""
    if masks is None:
        yield from sources
        return
    folder, images, found, first = MaskFolder(Path(masks)), 0, 0, ""
    for source in sources:
        mask = folder.of(Path(source.name))
        images, found = images + 1, found + (mask is not None)
        if mask is None:
            first = first or source.name
        yield replace(source, mask=None if mask is None else Path(mask))
    if not found:
        raise RequestError(f"No mask in {masks} belongs to an image such as {first}. {MASK_NAMES}")
    if found < images:
        say(f"{images - found:,} of {images:,} images have no mask in {masks}, such as {first}. {MASK_NAMES}")
