"""`route` and `route_files`: which patches of images a router keeps, as objects or as files.

Its own file because it needs no classes. With masks the same pass measures how much of the lesion was kept, beside the controls
that a good result has to beat.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from medtokenbudget.api.route_shards import ERRORS, OVERLAYS, TABLE, ShardWork, route_in_shards
from medtokenbudget.api.writing import NOTICE, Outputs, Summary, metadata_of, write_answers
from medtokenbudget.data.folder import MaskFolder
from medtokenbudget.errors import RequestError
from medtokenbudget.files import remove, write_json
from medtokenbudget.metrics import Retention, retention_of_counts
from medtokenbudget.model import Guarantee, MedTokenBudget, Routing, Source, expand, load
from medtokenbudget.model.table import Column, TokenFormat, routing_columns
from medtokenbudget.routing import create_selector
from medtokenbudget.tokens import TokenBatch

ROUTER = "dermoscopy"
"""The router that comes with the package."""
SUMMARY, PACKED_TOKENS = "summary.json", "tokens.safetensors"
SHARD_SIZE = 1000
"""Images per shard on a cluster, unless told otherwise."""
TableFormat = Literal["parquet", "csv"]


@dataclass(frozen=True)
class RouteConfig:
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
    batch_size: int = 16
    """Images per forward pass."""
    workers: int = 2
    """Threads that decode images."""
    shard_size: int = 0
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
        WorkError: If no image could be read.
    """
    config, folder, router = config or RouteConfig(), Path(out), _loaded(model)
    method = router.main if config.selector is None else config.selector
    if folder.exists() and not folder.is_dir():
        raise RequestError(f"{folder} is a file. Pass a folder to write to with --out.")
    sources, budget = masked(expand(images), masks), router.amount(config.budget)
    measured = Measured()
    if engine == "local" and not config.shard_size:
        table, written = _one_table(router, sources, folder, (method, budget), config, measured)
    else:
        table, written = _shards(router, sources, folder, (method, budget), config, measured, engine, address)
    found = measured.retention(router.grid)
    write_json(folder / SUMMARY, summary_of(router, method, budget, written, found))
    return Routed(table, written, found)


def _one_table(
    router: MedTokenBudget,
    sources: Iterable[Source],
    folder: Path,
    asked: tuple[str, float | Guarantee],
    config: RouteConfig,
    measured: Measured,
) -> tuple[Path, Summary]:
    """One table, in constant memory; it appears when everything is done."""
    if (folder / TABLE).is_dir():
        raise RequestError(
            f"{folder} has a table in shards ({TABLE}/). Go on with --shard-size or --engine ray, or use another --out."
        )
    method, budget = asked
    outputs = Outputs(
        table=folder / f"{TABLE}.{config.table}",
        errors=folder / ERRORS,
        tokens=folder / PACKED_TOKENS if config.tokens else None,
        tokens_dtype=config.tokens_dtype,
        overlays=folder / OVERLAYS if config.overlay else None,
    )
    answers = router.route_sources(sources, budget, method, config.batch_size, config.workers, masks=True)
    written = write_answers(answers, outputs, columns(), metadata_of(router, method, budget), "Routing", measured.add)
    for stale in [folder / f"{TABLE}.{other}" for other in ("parquet", "csv") if other != config.table]:
        remove(stale)
    if not config.tokens:
        remove(folder / PACKED_TOKENS)
    return outputs.table, written


def _shards(
    router: MedTokenBudget,
    sources: Iterable[Source],
    folder: Path,
    asked: tuple[str, float | Guarantee],
    config: RouteConfig,
    measured: Measured,
    engine: str,
    address: str | None,
) -> tuple[Path, Summary]:
    """A table in shards."""
    if config.table != "parquet":
        raise RequestError("A table in shards is a Parquet data set: leave out --table csv.")
    if found := [path.name for path in (folder / f"{TABLE}.parquet", folder / f"{TABLE}.csv") if path.exists()]:
        raise RequestError(f"{folder} has a table in one file ({found[0]}). Delete it, or use another --out.")
    method, budget = asked
    work = ShardWork(
        folder.resolve(),
        budget,
        method,
        columns,
        metadata_of(router, method, budget),
        config.batch_size,
        config.workers,
        config.tokens_dtype if config.tokens else None,
        config.overlay,
        router.device.type,
    )
    router.route_sources([], budget, method, config.batch_size)  # a wrong request is refused before anything is written
    written = route_in_shards(router, sources, work, config.shard_size or SHARD_SIZE, measured, engine, address)
    return folder / TABLE, written


def summary_of(
    model: MedTokenBudget, method: str, budget: float | Guarantee, written: Summary, retention: dict[str, Retention]
) -> dict[str, Any]:
    """The content of `summary.json`; what was not measured is null."""
    return {
        "model": model.fingerprint,
        "selector": method,
        "budget": None if isinstance(budget, Guarantee) else budget,
        "guarantee": budget.to_json() if isinstance(budget, Guarantee) else None,
        "images": written.done,
        "failed": written.failed,
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
    folder, found, first = MaskFolder(Path(masks)), 0, None
    for source in sources:
        mask = folder.of(Path(source.name))
        first, found = first or source.name, found + (mask is not None)
        yield replace(source, mask=None if mask is None else Path(mask))
    if not found:
        raise RequestError(
            f"No mask in {masks} belongs to an image such as {first}. The mask of a.jpg must be called a.png, a_segmentation.png "
            "or a_mask.png."
        )


def columns() -> list[Column]:
    """Columns of the table of routings: those of a routing, and the lesion patches that the control `center` keeps."""
    center = Column("center_lesion", "count", center_lesion)
    *first, kept, scores = routing_columns()
    return [*first, center, kept, scores]


def center_lesion(answer: Routing) -> int | None:
    """Lesion patches that keeping the middle of the image would keep; None without a mask."""
    return None if answer.lesion is None else int(answer.lesion[_center(answer.grid)[: answer.k]].sum())


@lru_cache
def _center(grid: tuple[int, int]) -> np.ndarray:
    tokens = TokenBatch(torch.zeros(1, grid[0] * grid[1], 1), grid)
    indices = create_selector("center").select(tokens, tokens.n).indices
    assert indices is not None
    return indices[0].numpy()


class Measured:
    """Counts of the images with a mask: a few bytes per image, whatever the number of patches."""

    def __init__(self) -> None:
        self.lesion, self.kept, self.center, self.k = array("i"), array("i"), array("i"), array("i")

    def add(self, answer: Routing) -> None:
        """Count an image, if it has a mask and its method keeps patches."""
        self.add_counts(
            None if answer.lesion is None else int(answer.lesion.sum()), answer.kept_lesion, center_lesion(answer), answer.k
        )

    def add_counts(self, lesion: int | None, kept: int | None, center: int | None, k: int) -> None:
        """Count an image by the cells of its row."""
        if lesion is not None and kept is not None and center is not None:
            for values, value in ((self.lesion, lesion), (self.kept, kept), (self.center, center), (self.k, k)):
                values.append(value)

    def retention(self, grid: tuple[int, int]) -> dict[str, Retention]:
        """Retention of the router and of the controls on the same images; empty if none has a mask."""
        if not self.lesion:
            return {}
        lesion, k = np.asarray(self.lesion), np.asarray(self.k)
        n = np.full(len(lesion), grid[0] * grid[1])
        kept = {"router": np.asarray(self.kept), "center": np.asarray(self.center), "random": lesion * k / n}
        return {name: retention_of_counts(values, lesion, k, n) for name, values in kept.items()}
