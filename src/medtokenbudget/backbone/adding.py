"""Adding signals to finished shards: the backbone runs again over their images, the tokens stay as they are.

Every signal of a shard is a file of its own and appears whole, so that an interrupted run goes on where it stopped.
"""

from __future__ import annotations

import itertools
import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from medtokenbudget.backbone.backbone import Backbone
from medtokenbudget.backbone.pipeline import Filling, Prepared, cpu_threads, forward
from medtokenbudget.backbone.shards import Row, Sidecar, map_shard, read_sidecar, shard_path
from medtokenbudget.backbone.signal_files import found_signals, read_signal, write_signal
from medtokenbudget.backbone.signals import REGISTRY
from medtokenbudget.config import ExtractConfig
from medtokenbudget.data import decode_image
from medtokenbudget.errors import RequestError, WorkError
from medtokenbudget.files import sha256_file

_ALIKE = 0.99
"""Smallest cosine similarity of stored tokens and those of the pass that adds signals; another machine only rounds differently."""


@dataclass(frozen=True)
class Addition:
    """Signals to add to a finished shard, the image files that its rows were made from, by SHA-256, and how many rows it has."""

    index: int
    names: tuple[str, ...]
    files: Mapping[str, str]
    rows: int


def present_signals(store: Path, indices: Sequence[int]) -> tuple[str, ...]:
    """Signals that any finished shard of the store has, in the order of the registry."""
    found = {name for names in found_signals(store).values() for name in names}
    for index in indices:
        sidecar = read_sidecar(store, index)
        if sidecar is not None and sidecar.rows:
            found |= set(map_shard(shard_path(store, index)))
            break  # the shards of a store hold the same fields
    return tuple(name for name in REGISTRY if name in found)


def additions(store: Path, indices: Sequence[int], names: Sequence[str], files: Mapping[str, str]) -> list[Addition]:
    """What has to be added to the finished shards `indices`, so that every row of an image of `files` has the signals `names`."""
    found = []
    for index in indices:
        sidecar = read_sidecar(store, index)
        if sidecar is None:
            continue
        lacking = tuple(name for name in names if _lacks(store, index, sidecar, name, files))
        if lacking:
            images = {row.image for row in sidecar.rows}
            own = {image: file for image, file in files.items() if image in images}
            found.append(Addition(index, lacking, own, len(sidecar.rows)))
    return found


def _lacks(store: Path, index: int, sidecar: Sidecar, name: str, files: Mapping[str, str]) -> bool:
    wanted = [number for number, row in enumerate(sidecar.rows) if row.image in files]
    if not wanted or name in map_shard(shard_path(store, index)):
        return False
    file = read_signal(store, index, name, sidecar)
    return file is None or any(number in file.missing for number in wanted)


def add_signals(
    store: Path,
    addition: Addition,
    backbone: Backbone,
    config: ExtractConfig,
    advance: Callable[[int], Any] = lambda rows: None,
) -> None:
    """Compute the signals of an addition and write their files; `advance` is told how many rows are done.

    Raises:
        WorkError: The backbone gives other tokens than the shard has.
    """
    index, sidecar = addition.index, read_sidecar(store, addition.index)
    if sidecar is None:
        return
    filling = Filling(index, config.batch_size)
    places: list[int] = []
    waiting: list[Prepared] = []
    with cpu_threads(config.threads):
        for place, prepared in _prepared(sidecar.rows, addition.files, backbone, config):
            places.append(place)
            waiting.append(prepared)
            if len(waiting) == config.batch_size:
                forward(filling, waiting, backbone, config, signals=addition.names)
                advance(len(waiting))
                waiting = []
        if waiting:
            forward(filling, waiting, backbone, config, signals=addition.names)
            advance(len(waiting))
    if places:
        tensors = filling.tensors()
        _check_same(store, index, places, filling, tensors)
        for name in addition.names:
            values, missing = _joined(store, index, name, sidecar, places, tensors[name])
            write_signal(store, index, name, values, sidecar, missing)
    advance(len(sidecar.rows) - len(places))


def _joined(
    store: Path, index: int, name: str, sidecar: Sidecar, places: Sequence[int], found: np.ndarray
) -> tuple[np.ndarray, list[int]]:
    """The values of all rows of the shard, NaN where there are none, and the numbers of those rows."""
    values = np.full((len(sidecar.rows), *found.shape[1:]), np.nan, found.dtype)
    have = set(places)
    before = read_signal(store, index, name, sidecar)
    if before is not None:
        values[:] = before.map(name).array
        have |= set(range(len(values))) - before.missing
    values[list(places)] = found
    return values, [number for number in range(len(values)) if number not in have]


def _check_same(store: Path, index: int, places: Sequence[int], filling: Filling, tensors: dict[str, np.ndarray]) -> None:
    stored = map_shard(shard_path(store, index))["patches"]
    fits = len(filling.rows) == len(places)
    for place, now in zip(places, tensors["patches"]) if fits else ():
        one, two = stored[place].astype(np.float32).ravel(), now.astype(np.float32).ravel()
        fits = fits and float(one @ two) >= _ALIKE * float(np.linalg.norm(one) * np.linalg.norm(two))
    if not fits:
        raise WorkError(
            f"The tokens of {shard_path(store, index).name} are not those that the backbone gives now, so its signals would not "
            "belong to them. Extract into a new store."
        )


def _prepared(
    rows: Sequence[Row], files: Mapping[str, str], backbone: Backbone, config: ExtractConfig
) -> Iterator[tuple[int, Prepared]]:
    """The rows whose image can be read, with their numbers, decoded ahead; the geometry of a view is the recorded one."""
    groups = [list(group) for _, group in itertools.groupby(enumerate(rows), key=lambda pair: pair[1].image)]
    with ThreadPoolExecutor(config.workers or min(16, os.cpu_count() or 1), "mtb-decode") as pool:
        queue: deque[Future[list[tuple[int, Prepared]]]] = deque()
        try:
            for group in groups:
                if (file := files.get(group[0][1].image)) is not None:
                    queue.append(pool.submit(_views_again, file, group, backbone))
                while len(queue) > 2 * config.batch_size:
                    yield from queue.popleft().result()
            while queue:
                yield from queue.popleft().result()
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def _views_again(file: str, group: Sequence[tuple[int, Row]], backbone: Backbone) -> list[tuple[int, Prepared]]:
    """The recorded views of one image; none if it cannot be read any more or is another one by now."""
    try:
        image = decode_image(file)
        if sha256_file(file) != group[0][1].image:
            return []
    except RequestError:
        return []
    return [(place, Prepared(row, backbone.preprocessing.prepare(row.geometry.of(image)))) for place, row in group]
