"""Who makes the shards: this process, or a Ray cluster. Both make the same bytes, since a shard depends on its plan alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from medtokenbudget.config import BackboneConfig, ExtractConfig
from medtokenbudget.errors import UnknownNameError
from medtokenbudget.features.backbone import Backbone
from medtokenbudget.features.pipeline import Route, Shard, fill


@dataclass(frozen=True)
class Work:
    """Shards to be made, and everything that is needed to make them."""

    store: Path
    shards: tuple[Shard, ...]
    backbone: BackboneConfig
    fingerprint: dict[str, Any]
    config: ExtractConfig
    route: Route | None = None
    address: str | None = None


Engine = Callable[[Work, Backbone, Callable[[int], Any]], None]
"""Makes the shards of `Work`; the backbone is the caller's own, and the function is told how many rows were dealt with."""


def _local(work: Work, backbone: Backbone, advance: Callable[[int], Any]) -> None:
    fill(work.store, work.shards, backbone, work.config, work.route, advance)


def _ray(work: Work, backbone: Backbone, advance: Callable[[int], Any]) -> None:
    from medtokenbudget.features.ray_engine import run

    run(work, advance)


ENGINES: dict[str, Engine] = {"local": _local, "ray": _ray}


def find_engine(name: str) -> Engine:
    """The engine called `name`."""
    if name not in ENGINES:
        raise UnknownNameError.of("engine", name, ENGINES)
    return ENGINES[name]
