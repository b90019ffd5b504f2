"""Where shards are computed: in this process or on a Ray cluster. A shard depends only on its plan, so the bytes are the same."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from medtokenbudget.backbone.adding import Addition, add_signals
from medtokenbudget.backbone.backbone import Backbone
from medtokenbudget.backbone.pipeline import Shard, fill
from medtokenbudget.config import BackboneConfig, ExtractConfig
from medtokenbudget.errors import UnknownNameError


@dataclass(frozen=True)
class Work:
    """Shards to compute, and everything that is needed for it."""

    store: Path
    shards: tuple[Shard, ...]
    backbone: BackboneConfig
    fingerprint: dict[str, Any]
    config: ExtractConfig
    settings: str
    """Hash of the store's settings, recorded with every shard."""
    address: str | None = None
    signals: tuple[str, ...] | None = None
    """Signals of new shards; None means the default ones of the backbone."""
    additions: tuple[Addition, ...] = ()
    """Signals that finished shards gain."""


Engine = Callable[[Work, Backbone, Callable[[int], Any]], None]
"""Does the `Work` with the loaded backbone, and calls the function with the number of rows that are done."""


def _local(work: Work, backbone: Backbone, advance: Callable[[int], Any]) -> None:
    fill(work.store, work.shards, backbone, work.config, work.settings, advance, work.signals)
    for addition in work.additions:
        add_signals(work.store, addition, backbone, work.config, advance)


def _ray(work: Work, backbone: Backbone, advance: Callable[[int], Any]) -> None:
    from medtokenbudget.backbone.ray_engine import run

    run(work, advance)


ENGINES: dict[str, Engine] = {"local": _local, "ray": _ray}


def find_engine(name: str) -> Engine:
    """The engine with this name, 'local' or 'ray'."""
    if name not in ENGINES:
        raise UnknownNameError.of("engine", name, ENGINES)
    return ENGINES[name]
