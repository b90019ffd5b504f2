"""Routing in shards: a table of many files that a stopped command goes on with, made in this process or on a Ray cluster.

A shard is a run of the images in their order. It has a Parquet file and, beside it, a record of what it was made from, which is
written last: a shard with a fitting record is not computed again. Every engine makes a shard with `make_shard`, so the rows are the
same everywhere.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from medtokenbudget.api.route_table import Measured, columns
from medtokenbudget.api.writing import Outputs, Summary, none_readable, write_rows
from medtokenbudget.errors import MismatchError, RequestError, UnknownNameError
from medtokenbudget.files import read_sealed, remove, sha256_file, sha256_json, write_lines, write_sealed
from medtokenbudget.locks import exclusive
from medtokenbudget.model import Guarantee, MedTokenBudget, Source
from medtokenbudget.model.table import TokenFormat
from medtokenbudget.progress import progress

TABLE, ERRORS, TOKENS, OVERLAYS = "routes", "errors.jsonl", "tokens", "overlays"
PART = "part-{:06d}"
REQUEST = "_request.json"
"""Names with an underscore in front are no part of the data set for those who read it (pandas, Arrow, Spark, Ray)."""


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
    sources: tuple[Source, ...]
    key: str


@dataclass(frozen=True)
class ShardWork:
    """What is asked for of every shard.

    Attributes:
        folder: Folder of the results, which all nodes share.
        budget: Budget or guarantee.
        method: Selector.
        metadata: Metadata of every file.
        batch_size: Images per forward pass.
        workers: Threads that decode images.
        tokens: Number format of the kept tokens; None leaves them out.
        overlay: Whether to draw the kept patches.
        device: Device of the workers of a cluster.
    """

    folder: Path
    budget: float | Guarantee
    method: str
    metadata: dict[str, str]
    batch_size: int = 16
    workers: int = 2
    tokens: TokenFormat | None = None
    overlay: bool = False
    device: str = "auto"

    @property
    def table(self) -> Path:
        """Folder of the table."""
        return self.folder / TABLE

    @property
    def model(self) -> Path:
        """Folder of the model, for the workers of a cluster."""
        return self.table / "_model"

    def request(self) -> dict[str, Any]:
        """What the results depend on beside the images."""
        return {**self.metadata, "batch_size": self.batch_size, "tokens": self.tokens, "overlay": self.overlay}

    def part(self, index: int) -> Path:
        """The file of a shard."""
        return self.table / f"{PART.format(index)}.parquet"

    def record(self, index: int) -> Path:
        """What a shard was made from; there is one only if the shard is complete."""
        return self.table / f"_{PART.format(index)}.json"

    def finished(self, shard: Shard) -> bool:
        """Whether the shard is complete, as it was written, and was made from the same files."""
        part = self.part(shard.index)
        try:
            record = read_sealed(self.record(shard.index), "")
        except RequestError:
            return False
        return record["key"] == shard.key and part.exists() and sha256_file(part) == record["sha256"]


Engine = Callable[[MedTokenBudget, Sequence[Shard], ShardWork, Callable[[int], Any], str | None], None]
"""Makes the shards, and calls the function with the number of images that are done; the text is the address of a cluster."""


def route_in_shards(
    model: MedTokenBudget,
    sources: Iterable[Source],
    work: ShardWork,
    size: int,
    measured: Measured,
    engine: str = "local",
    address: str | None = None,
) -> Summary:
    """Make the shards that are missing, then list the errors of all of them.

    Args:
        model: The router.
        sources: Image files.
        work: What is asked for.
        size: Images per shard.
        measured: Counts how much of the lesion was kept.
        engine: 'local' or 'ray'.
        address: Address of a running Ray cluster.

    Raises:
        MismatchError: The folder holds shards of another request.
        WorkError: No image could be read.
    """
    if size < 1:
        raise RequestError(f"A shard has at least 1 image, got {size}.")
    run = find_engine(engine)
    with exclusive(work.folder, name=".routes.lock"):
        _same_request(work)
        shards = list(plan(sources, work, size))
        missing = [shard for shard in shards if not work.finished(shard)]
        total = sum(len(shard.sources) for shard in shards)
        done = total - sum(len(shard.sources) for shard in missing)
        with progress(total=total, what="Routing", unit="image", initial=done) as bar:
            if missing:
                run(model, missing, work, bar.update, address)
        _remove_others(work, len(shards))
        return _sum_up(work, shards, measured)


def plan(sources: Iterable[Source], work: ShardWork, size: int) -> Iterator[Shard]:
    """The shards of these images, in order."""
    request, rest, index = sha256_json(work.request()), iter(sources), 0
    while here := tuple(_absolute(source) for source in islice(rest, size)):
        files = [[source.name, _state(source.value), None if source.mask is None else _state(source.mask)] for source in here]
        yield Shard(index, index * size, here, sha256_json([request, files]))
        index += 1


def make_shard(model: MedTokenBudget, shard: Shard, work: ShardWork, advance: Callable[[], Any] = lambda: None) -> None:
    """Route the images of a shard and publish it: tokens and overlays first, then the table, its record last."""
    name = PART.format(shard.index)
    errors: list[dict[str, str]] = []
    remove(work.record(shard.index))
    outputs = Outputs(
        table=work.part(shard.index),
        errors=work.folder / ERRORS,
        tokens=None if work.tokens is None else work.folder / TOKENS / f"{name}.safetensors",
        tokens_dtype=work.tokens or "fp16",
        overlays=work.folder / OVERLAYS if work.overlay else None,
    )
    answers = model.route_sources(shard.sources, work.budget, work.method, work.batch_size, work.workers, masks=True)
    counts = write_rows(
        answers,
        outputs,
        columns(),
        work.metadata,
        note=lambda image, reason: errors.append({"image": image, "reason": reason}),
        advance=advance,
        first=shard.first,
        empty=True,
    )
    record = {"key": shard.key, "sha256": sha256_file(work.part(shard.index)), **vars(counts), "errors": errors}
    write_sealed(work.record(shard.index), record)


def _local(
    model: MedTokenBudget, shards: Sequence[Shard], work: ShardWork, advance: Callable[[int], Any], address: str | None
) -> None:
    for shard in shards:
        make_shard(model, shard, work, lambda: advance(1))


def _ray(
    model: MedTokenBudget, shards: Sequence[Shard], work: ShardWork, advance: Callable[[int], Any], address: str | None
) -> None:
    from medtokenbudget.api.route_ray import run

    run(model, shards, work, advance, address)


ENGINES: dict[str, Engine] = {"local": _local, "ray": _ray}


def find_engine(name: str) -> Engine:
    """The engine with this name, 'local' or 'ray'."""
    if name not in ENGINES:
        raise UnknownNameError.of("engine", name, ENGINES)
    return ENGINES[name]


def _same_request(work: ShardWork) -> None:
    """Reject a folder with shards of another model or budget: they are not thrown away without being asked."""
    path = work.table / REQUEST
    if path.exists():
        wanted = work.request()
        found = read_sealed(path, "Delete it and run the same command again: shards of this request stay.")
        if wanted != found:
            advice = "It was made by another request. Use another --out, or delete the folder."
            raise MismatchError.between(f"The table in {work.table}", wanted, found, advice)
    else:
        write_sealed(path, work.request())


def _absolute(source: Source) -> Source:
    if not isinstance(source.value, (str, os.PathLike)):
        raise RequestError(
            f"{source.name} is not a file. A table in shards is made from image files, folders, globs or a manifest."
        )
    mask = None if source.mask is None else Path(os.path.abspath(source.mask))
    return Source(source.name, Path(os.path.abspath(source.value)), mask)


def _state(path: Path) -> list[Any]:
    """Path, size and time of change of a file; a file that is not there has neither."""
    try:
        found = path.stat()
    except OSError:
        return [str(path), None, None]
    return [str(path), found.st_size, found.st_mtime_ns]


def _remove_others(work: ShardWork, count: int) -> None:
    """Remove shards of an earlier request for more images."""
    index = count
    while work.part(index).exists() or work.record(index).exists():
        remove(work.record(index))
        remove(work.part(index))
        remove(work.folder / TOKENS / f"{PART.format(index)}.safetensors")
        index += 1


def _sum_up(work: ShardWork, shards: Sequence[Shard], measured: Measured) -> Summary:
    import pyarrow.parquet as pq

    records = [read_sealed(work.record(shard.index), "Run the same command again.") for shard in shards]
    errors, path = [row for record in records for row in record["errors"]], work.folder / ERRORS
    remove(path)
    if errors:
        write_lines(path, errors)
    done, failed = (sum(record[name] for record in records) for name in ("done", "failed"))
    if not done:
        raise none_readable(failed, errors[0]["reason"] if errors else "There are no images.", path)
    for shard in shards:
        rows = pq.read_table(work.part(shard.index), columns=["lesion", "kept_lesion", "center_lesion", "k"])
        for counts in zip(*(column.to_pylist() for column in rows.columns)):
            measured.add_counts(*counts)
    unfamiliar = [record["unfamiliar"] for record in records if record["unfamiliar"] is not None]
    # Records of earlier versions do not count masks.
    reasons = [record["mask_reason"] for record in records if record.get("mask_reason")]
    return Summary(
        done,
        failed,
        path if errors else None,
        sum(unfamiliar) if unfamiliar else None,
        sum(record.get("masks_failed", 0) for record in records),
        reasons[0] if reasons else "",
    )
