"""What a store holds and will hold: its settings (`store.json`) and which rows belong to which shard (`plan.json`).

A row is a view of an image's content. Every worker, today's or tomorrow's, needs only the number of a shard to know what to do,
and a changed manifest adds shards for what is not planned yet.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from medtokenbudget.backbone import views
from medtokenbudget.backbone.shards import Key
from medtokenbudget.config import ExtractConfig
from medtokenbudget.data import Manifest
from medtokenbudget.errors import MismatchError, RequestError, WorkError
from medtokenbudget.files import dotted, read_json, read_sealed, sha256_json, unsealed, write_sealed

FORMAT = 4
STORE, PLAN = "store.json", "plan.json"
Shards = dict[int, tuple[Key, ...]]
_NOT_IDENTITY = ("weights",)
"""Settings that may differ: the file of the weights may be elsewhere by now, and the backbone's fingerprint has its hash."""


@dataclass(frozen=True)
class Item:
    """One row to be made: which view of which image file, with the mask for off-center crops.

    `image` and `mask` are the SHA-256 of the files, `image_id` seeds the crop. An empty `image_file` means that the image left the
    manifest before it was extracted.
    """

    image: str
    view: str
    image_id: str
    image_file: str
    mask_file: str | None = None
    mask: str | None = None

    @property
    def key(self) -> Key:
        return self.image, self.view


def settings_of(
    fingerprint: dict[str, Any],
    config: ExtractConfig,
    weights: Path | None = None,
) -> dict[str, Any]:
    """The content of `store.json`: everything that the numbers in the store depend on, except the images."""
    return plain(
        {
            "format": FORMAT,
            "backbone": fingerprint,
            "weights": None if weights is None else weights.name,
            "keep": "routed" if routed_early(fingerprint) else "patches",
            "dtype": config.dtype,
            "precision": config.precision,
            "view_seed": config.view_seed,
            "shard_size": config.shard_size,
            "batch_size": config.batch_size,
        }
    )


def routed_early(fingerprint: dict[str, Any]) -> bool:
    """Whether a backbone with this fingerprint gives the tokens of kept patches alone."""
    return fingerprint.get("route") is not None


def identity_of(settings: dict[str, Any]) -> str:
    """Hash of the settings that the numbers depend on; every shard records it."""
    return sha256_json({key: value for key, value in settings.items() if key not in _NOT_IDENTITY})


def check_request(manifest: Manifest, config: ExtractConfig) -> None:
    """Raise a RequestError for settings that no extraction of this manifest can follow; called before the backbone is loaded."""
    if not len(manifest):
        raise RequestError(f"The manifest '{manifest.name}' contains no images, so there is nothing to extract.")
    if config.views != "off-center" and config.crops != 1:
        raise RequestError(
            f"crops = {config.crops} needs views = 'off-center', but the views are '{config.views}'. Change the views, "
            "or leave out crops."
        )
    if config.views != "off-center" and config.view_seed:
        raise RequestError(f"view_seed = {config.view_seed} needs views = 'off-center'. Change the views, or leave out view_seed.")
    if config.views == "off-center" and not manifest.rows["mask"].notna().any():
        raise RequestError(
            f"The views 'off-center' are cropped around the lesion mask, but no image of '{manifest.name}' has a mask. "
            "Add masks to the manifest, or choose other views."
        )


def items_of(
    manifest: Manifest, config: ExtractConfig, images: Sequence[str | None], masks: Sequence[str | None]
) -> dict[Key, Item]:
    """The rows of every image in the manifest's order, the views of an image beside each other, each content once.

    Args:
        manifest: The images.
        config: Which views to make.
        images: SHA-256 of each image file, None for one that cannot be read: it has no rows.
        masks: SHA-256 of each mask file, None without one.
    """
    splits = manifest.rows["split"].tolist()
    items: dict[Key, Item] = {}
    for i, image_id in enumerate(manifest.ids):
        image, path = images[i], manifest.mask_path(i)
        if image is None:
            continue
        for view in views.views_of(config.views, splits[i], path is not None, config.crops):
            mask_file = None if path is None else str(path)
            item = Item(image, view, image_id, str(manifest.image_path(i)), mask_file, masks[i])
            items.setdefault(item.key, item)
    return items


def begin(store: Path, settings: dict[str, Any]) -> None:
    """Begin a store, or make sure that the one that is there was begun with the same settings."""
    if not (store / STORE).exists():
        if store.exists() and not store.is_dir():
            raise RequestError(f"{store} is a file, but a store is a folder. Choose another --store.")
        write_sealed(store / STORE, settings)
    check(
        f"The store {store}",
        expected={key: value for key, value in settings.items() if key not in _NOT_IDENTITY},
        found=read_settings(store),
        advice="Use the settings of this store, or choose another --store.",
    )


def extend(store: Path, keys: Sequence[Key], size: int, again: frozenset[Key] = frozenset()) -> Shards:
    """Add shards of `size` rows for keys that are not planned yet or are to be made `again`, and return the whole plan."""
    with _alone(store):
        shards = read_plan(store)
        planned = {key for rows in shards.values() for key in rows} - again
        missing = [key for key in keys if key not in planned]
        first = max(shards, default=-1) + 1
        for number, start in enumerate(range(0, len(missing), size)):
            shards[first + number] = tuple(missing[start : start + size])
        if missing or not (store / PLAN).exists():
            write_plan(store, shards)
    return shards


@contextmanager
def _alone(store: Path) -> Iterator[None]:
    """Around a change of the plan: one process at a time. The system releases the lock of a killed process."""
    try:
        (store / "cache").mkdir(exist_ok=True)
        lock = open(store / "cache" / "lock", "a")  # noqa: SIM115 (closed below, whatever happens)
    except OSError as error:
        raise WorkError(f"Cannot write {store}: {error.strerror}.") from None
    with lock:
        try:
            import fcntl
        except ImportError:  # not on Windows
            yield
            return
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def write_plan(store: Path, shards: Shards) -> None:
    write_sealed(store / PLAN, {str(number): rows for number, rows in sorted(shards.items())}, compact=True)


def read_plan(store: Path) -> Shards:
    """The rows of each shard by number; empty for a store that was only just begun."""
    if not (store / PLAN).is_file():
        return {}
    # The shards of the same request are planned in the same order again, so those that are finished stay.
    values = read_sealed(store / PLAN, "Delete it and run the same `mtb extract` command again.")
    try:
        shards = {int(number): tuple((str(image), str(view)) for image, view in rows) for number, rows in values.items()}
        # So that the file, which was just read, bounds the number of shards to look for.
        if not all(shards.values()) or min(shards, default=0) < 0:
            raise ValueError("a shard without rows")
        return shards
    except (AttributeError, TypeError, ValueError):
        raise RequestError(f"{store / PLAN} is damaged. Extract into another folder, or restore the file.") from None


def read_settings(store: Path) -> dict[str, Any]:
    """`store.json`, with a message if this is no store, one of another version, or a damaged one."""
    if not (store / STORE).is_file():
        raise RequestError(
            f"{store} is not a token store: it has no store.json. Create one with `mtb extract MANIFEST --store {store}`."
        )
    settings = read_json(store / STORE)
    if not isinstance(settings, dict) or settings.get("format") != FORMAT:
        found = settings.get("format") if isinstance(settings, dict) else None
        raise RequestError(
            f"{store} has store format {found!r}, but this version reads format {FORMAT}. "
            f"Run `mtb extract MANIFEST --store NEW` to extract it again into a new folder."
        )
    settings = unsealed(store / STORE, settings, "Restore the file, or extract into another folder.")
    faults = _faults(settings)
    if faults:
        raise RequestError(f"{store / STORE} is damaged: {'; '.join(faults)}. Restore the file, or extract into another folder.")
    return settings


_KINDS: dict[str, tuple[type, ...]] = {
    "backbone": (dict,),
    "weights": (str, type(None)),
    "keep": (str,),
    "dtype": (str,),
    "precision": (str,),
    "view_seed": (int,),
    "shard_size": (int,),
    "batch_size": (int,),
    "backbone.name": (str,),
    "backbone.weights": (str,),
    "backbone.layer": (int,),
    "backbone.attention": (str,),
    "backbone.grid": (list,),
    "backbone.dim": (int,),
    "backbone.image_size": (int,),
}
_SIDE = 4096
"""No token grid has more rows or columns."""


def _faults(settings: dict[str, Any]) -> list[str]:
    """What is wrong with the values of `store.json`."""
    backbone = settings.get("backbone")
    inner = backbone if isinstance(backbone, dict) else {}
    found = {**settings, **{f"backbone.{key}": value for key, value in inner.items()}}
    faults = [
        f"{name} must be {' or '.join('null' if kind is type(None) else kind.__name__ for kind in kinds)}"
        for name, kinds in _KINDS.items()
        if not isinstance(found.get(name, ...), kinds) or isinstance(found.get(name), bool)
    ]
    grid = found.get("backbone.grid")
    if isinstance(grid, list) and not (len(grid) == 2 and all(type(side) is int and 0 < side <= _SIDE for side in grid)):
        faults.append("backbone.grid must be two positive numbers")
    if found.get("keep") not in ("patches", "routed"):
        faults.append("keep must be 'patches' or 'routed'")
    return faults


def check(what: str, expected: dict[str, Any], found: dict[str, Any], advice: str) -> None:
    """Reject `found` where it differs from `expected`, showing each difference; keys that `expected` lacks are not looked at."""
    wanted = dotted(plain(expected))
    has = dotted(found)
    if any(has.get(key) != value for key, value in wanted.items()):
        raise MismatchError.between(what, wanted, {key: has.get(key) for key in wanted}, advice)


def plain(value: Any) -> Any:
    """The value after a round trip through JSON."""
    return json.loads(json.dumps(value, default=str))
