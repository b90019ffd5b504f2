"""`extract`: run the frozen backbone over what a store does not have of a manifest; called again, it continues where it stopped."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from medtokenbudget.backbone import plan
from medtokenbudget.backbone.adding import Addition, additions, present_signals
from medtokenbudget.backbone.annotations import hashes_of
from medtokenbudget.backbone.backbone import Backbone
from medtokenbudget.backbone.early import Early
from medtokenbudget.backbone.engines import Work, find_engine
from medtokenbudget.backbone.pipeline import Prepared, Shard, prepare
from medtokenbudget.backbone.plan import Item, Shards
from medtokenbudget.backbone.shards import Failure, Key, read_sidecar
from medtokenbudget.backbone.store import FeatureStore
from medtokenbudget.config import BackboneConfig, ExtractConfig
from medtokenbudget.data import Manifest
from medtokenbudget.devices import resolve_device
from medtokenbudget.errors import RequestError
from medtokenbudget.files import remove_leftovers, write_lines
from medtokenbudget.locks import exclusive
from medtokenbudget.progress import progress

ROUTER = "router"
"""Folder in a store that was routed early: the saved router, which models that are trained on the store carry along."""


def extract(
    manifest: Manifest,
    store: Path | str,
    backbone: BackboneConfig,
    config: ExtractConfig | None = None,
    engine: str = "local",
    shards: tuple[int, int] | None = None,
    address: str | None = None,
    early: Early | None = None,
) -> FeatureStore:
    """Add what `store` does not have of the images of `manifest`, and open it with the manifest.

    Images are known by the content of their files: labels, masks, splits and names may change without extracting anything again.
    Images that could not be read before are tried again.

    Args:
        manifest: The images.
        store: Folder of the store; it is made if it does not exist.
        backbone: The frozen backbone.
        config: Views, number format and how to work.
        engine: 'local', or 'ray' for a cluster.
        shards: (i, n) makes only the shards whose number leaves the rest i when divided by n, for job arrays; the returned store
            may then be incomplete (`missing`).
        address: Address of a running Ray cluster.
        early: Routes before or inside the backbone; what it needs is saved in the folder `router` of the store.

    Returns:
        The store, opened with `manifest`.

    Raises:
        RequestError: The request cannot be carried out.
        MismatchError: The store was made with other settings.
    """
    config = config or ExtractConfig()
    if early is not None and engine != "local":
        raise RequestError(f"--route runs on this machine, not with --engine {engine}. Drop one of them.")
    if early is not None and config.signals:
        raise RequestError("--signals are stored with all patches, but routed stores have only some. Drop --signals.")
    run = find_engine(engine)
    plan.check_request(manifest, config)
    _check_share(shards)
    path = Path(store)
    loaded = Backbone.load(backbone, resolve_device(config.device))
    if early is not None:
        loaded = early.wrap(loaded)
    loaded.check_signals(config.signals)
    settings = plan.settings_of(loaded.fingerprint, config, backbone.weights)
    # The jobs of an array share the lock: each fills shards of its own.
    with exclusive(path, shared=shards is not None):
        plan.begin(path, settings)
        if early is not None and not (path / ROUTER).exists():
            early.save(path / ROUTER)
        items = plan.items_of(manifest, config, *hashes_of(path, manifest))
        planned = plan.extend(path, list(items), config.shard_size, _readable_now(path, items, loaded, config))
        todo = _unfinished(path, planned, items, shards)
        signals = _signals(path, planned, loaded, config)
        added = _additions(path, planned, items, shards, signals) if early is None else ()
        left = sum(len(rows) for _, rows in todo) + sum(addition.rows for addition in added)
        if todo or added:
            identity = plan.identity_of(settings)
            work = Work(path.resolve(), todo, backbone, loaded.fingerprint, config, identity, address, signals, added)
            with progress(total=max(len(items), left), initial=max(0, len(items) - left), what="Extracting", unit="image") as bar:
                run(work, loaded, bar.update)
        return _finished(path, manifest)


def _signals(path: Path, planned: Shards, backbone: Backbone, config: ExtractConfig) -> tuple[str, ...]:
    """The signals of new shards: the requested ones and those that the store has; without either the default ones."""
    present = present_signals(path, list(planned))
    names = dict.fromkeys([*present, *config.signals]) or dict.fromkeys(backbone.default_signals)
    backbone.check_signals(tuple(names))
    return tuple(names)


def _additions(
    path: Path, planned: Shards, items: Mapping[Key, Item], shards: tuple[int, int] | None, signals: tuple[str, ...]
) -> tuple[Addition, ...]:
    """Signals that finished shards of this call do not have yet."""
    i, n = shards or (0, 1)
    files = {item.image: item.image_file for item in items.values()}
    return tuple(additions(path, [index for index in sorted(planned) if index % n == i], signals, files))


def _check_share(shards: tuple[int, int] | None) -> None:
    if shards is not None and (shards[1] < 1 or not 0 <= shards[0] < shards[1]):
        raise RequestError(f"--shards {shards[0]}/{shards[1]} does not exist. Use I/N with I from 0 to N - 1.")


def _readable_now(path: Path, items: Mapping[Key, Item], backbone: Backbone, config: ExtractConfig) -> frozenset[Key]:
    """Rows that failed before and can be made now: the image can be read again, or the mask is another one."""
    failures: dict[Key, Failure] = {}
    made: set[Key] = set()
    for index, keys in plan.read_plan(path).items():
        sidecar = read_sidecar(path, index, keys)
        if sidecar is None:
            made |= set(keys)  # not finished: it is made as planned
            continue
        made |= {row.key for row in sidecar.rows}
        failures |= {failure.key: failure for failure in sidecar.failures}
    candidates = [
        items[key]
        for key, failure in failures.items()
        if key in items
        and key not in made
        and (failure.kind == "image" or (failure.kind == "view" and failure.mask != items[key].mask))
    ]
    return frozenset(item.key for item in candidates if isinstance(prepare((item,), backbone, config.view_seed)[0], Prepared))


def _unfinished(path: Path, planned: Shards, items: Mapping[Key, Item], shards: tuple[int, int] | None) -> tuple[Shard, ...]:
    """Shards that this call makes: planned, not there, and with rows of this manifest."""
    i, n = shards or (0, 1)
    todo = []
    for index, keys in sorted(planned.items()):
        if index % n == i and any(key in items for key in keys) and read_sidecar(path, index, keys) is None:
            todo.append((index, tuple(items.get(key) or Item(key[0], key[1], "", "") for key in keys)))
    return tuple(todo)


def _finished(path: Path, manifest: Manifest) -> FeatureStore:
    """Open the store; if it is complete, write `errors.jsonl` and delete the temporary files of interrupted runs."""
    store = FeatureStore.open(path, manifest, partial=True)
    if not store.missing:
        write_lines(path / "errors.jsonl", (error.to_json() for error in store.errors))
        remove_leftovers(path)
    return store
