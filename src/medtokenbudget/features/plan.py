"""The plan of a store, made before anything is computed: its rows, their shards, and all settings.

It is written once, as `store.json` and `plan.json`. Every worker compares its own plan with it, and then needs only the number of a
shard to know what to do.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from medtokenbudget.config import ExtractConfig
from medtokenbudget.data import Manifest
from medtokenbudget.errors import MismatchError, RequestError
from medtokenbudget.features import views
from medtokenbudget.files import dotted, read_json, sha256_json, write_json, write_text

FORMAT = 2


@dataclass(frozen=True)
class Item:
    """A planned row: a view of an image, its mask and its class index (-1 if unknown)."""

    image_id: str
    view: str
    image: str
    mask: str | None
    label: int


@dataclass(frozen=True)
class Plan:
    """`config` is the content of `store.json`, `shards[i]` are the rows of shard i."""

    config: dict[str, Any]
    shards: tuple[tuple[Item, ...], ...]


def make_plan(
    manifest: Manifest,
    fingerprint: dict[str, Any],
    config: ExtractConfig,
    route_fingerprint: dict[str, Any] | None = None,
    weights: Path | None = None,
) -> Plan:
    """Plan the rows in the order of the manifest, with the views of an image next to each other, and cut them into shards."""
    check_request(manifest, config)
    items = _items(manifest, config.views, config.crops)
    size = config.shard_size
    shards = tuple(tuple(items[start : start + size]) for start in range(0, len(items), size))
    settings = {
        "format": FORMAT,
        "backbone": fingerprint,
        "weights": None if weights is None else str(weights.resolve()),
        "data": manifest.data_hash,
        "classes": list(manifest.classes),
        "keep": "patches" if route_fingerprint is None else "routed",
        "route": route_fingerprint,
        "dtype": config.dtype,
        "views": config.views,
        "crops": config.crops,
        "view_seed": config.view_seed,
        "shard_size": config.shard_size,
        "batch_size": config.batch_size,
        "rows": len(items),
        "shards": len(shards),
        "plan": sha256_json(_rows(shards)),
    }
    return Plan(plain(settings), shards)


def check_request(manifest: Manifest, config: ExtractConfig) -> None:
    """Raise a RequestError for settings that no extraction of this manifest can follow; called before the backbone is loaded."""
    if not len(manifest):
        raise RequestError(f"The manifest '{manifest.name}' contains no images, so there is nothing to extract.")
    for name in ("shard_size", "batch_size", "crops"):
        if getattr(config, name) < 1:
            raise RequestError(f"--{name.replace('_', '-')} must be 1 or more, got {getattr(config, name)}.")
    if config.workers < 0:
        raise RequestError(f"--workers must be 0 (one thread per core) or more, got {config.workers}.")
    if config.views != "off-center" and config.crops != 1:
        raise RequestError(
            f"--crops {config.crops} needs --views off-center, but the views are '{config.views}'. Add --views off-center, "
            "or drop --crops."
        )
    if config.views == "off-center" and not manifest.rows["mask"].notna().any():
        raise RequestError(
            f"--views off-center crops around the lesion mask, but no image of '{manifest.name}' has a mask. Add masks to the "
            "manifest, or drop --views off-center."
        )


def _items(manifest: Manifest, name: str, crops: int) -> list[Item]:
    labels = manifest.label_index
    splits = manifest.rows["split"].tolist()
    items = []
    for i, image_id in enumerate(manifest.ids):
        mask = manifest.mask_path(i)
        for view in views.views_of(name, splits[i], mask is not None, crops):
            items.append(Item(image_id, view, str(manifest.image_path(i)), None if mask is None else str(mask), int(labels[i])))
    return items


def publish(plan: Plan, store: Path) -> None:
    """Start a store, or check that the existing one has the same plan."""
    if not (store / "store.json").exists():
        if store.exists() and not store.is_dir():
            raise RequestError(f"{store} is a file, but a store is a folder. Choose another --store.")
        write_text(store / "plan.json", json.dumps(_rows(plan.shards), ensure_ascii=False, separators=(",", ":")) + "\n")
        write_json(store / "store.json", plan.config)
    check(
        f"the store {store}",
        # The file of the weights may be elsewhere by now; the backbone's fingerprint has its hash.
        expected={key: value for key, value in plan.config.items() if key != "weights"},
        found=read_config(store),
        advice="Use the settings of this store, or choose another --store.",
    )


def read_config(store: Path) -> dict[str, Any]:
    """Read `store.json`; a RequestError says if this is not a store or has another format version."""
    if not (store / "store.json").is_file():
        raise RequestError(
            f"{store} is not a token store: it has no store.json. Create one with `mtb extract MANIFEST --store {store}`."
        )
    config = read_json(store / "store.json")
    if not isinstance(config, dict) or config.get("format") != FORMAT:
        found = config.get("format") if isinstance(config, dict) else None
        raise RequestError(f"{store} has store format {found!r}, but this version reads format {FORMAT}. Run `mtb extract` again.")
    return config


def check(what: str, expected: dict[str, Any], found: dict[str, Any], advice: str) -> None:
    """Raise a MismatchError that shows where `found` differs from `expected`; keys that `expected` lacks are ignored."""
    wanted = dotted(plain(expected))
    has = dotted(found)
    if any(has.get(key) != value for key, value in wanted.items()):
        raise MismatchError.between(what, wanted, {key: has.get(key) for key in wanted}, advice)


def plain(value: Any) -> Any:
    """The value after a round trip through JSON."""
    return json.loads(json.dumps(value, default=str))


def _rows(shards: Sequence[Sequence[Item]]) -> list[list[list[str]]]:
    return [[[item.image_id, item.view] for item in shard] for shard in shards]
