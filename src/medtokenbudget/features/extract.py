"""`extract`: run the frozen backbone once over a manifest and fill a store. The same call resumes an incomplete store."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from medtokenbudget.config import BackboneConfig, ExtractConfig
from medtokenbudget.data import Manifest
from medtokenbudget.devices import resolve_device
from medtokenbudget.errors import RequestError, WorkError
from medtokenbudget.features.backbone import Backbone
from medtokenbudget.features.engines import Engine, Work, find_engine
from medtokenbudget.features.pipeline import Route
from medtokenbudget.features.plan import Plan, check, check_request, make_plan, publish
from medtokenbudget.features.shards import read_sidecar, remove_leftovers
from medtokenbudget.features.store import FeatureStore
from medtokenbudget.files import read_lines, write_lines
from medtokenbudget.locks import exclusive
from medtokenbudget.progress import progress


def extract(
    manifest: Manifest,
    store: Path | str,
    backbone: BackboneConfig,
    config: ExtractConfig | None = None,
    engine: str = "local",
    shards: tuple[int, int] | None = None,
    address: str | None = None,
    route: Route | None = None,
    route_fingerprint: dict[str, Any] | None = None,
) -> FeatureStore:
    """Run the backbone over the images of a manifest and store their tokens.

    The same call resumes an incomplete store, and returns at once if the store is complete.

    Args:
        manifest: The images.
        store: Folder of the store.
        backbone: The backbone.
        config: Batch size, views, number format and device.
        engine: 'local' for this process, or 'ray'.
        shards: `(i, n)` computes only every n-th shard starting at i, for job arrays. The store may then be incomplete
            (`FeatureStore.missing`).
        address: Address of a running Ray cluster, for the engine 'ray'.
        route: Keep only the tokens that this function selects.
        route_fingerprint: JSON values that identify `route`; under 'backbone' the fields that the backbone must have.

    Returns:
        The open store.

    Raises:
        RequestError: The settings are wrong or do not fit the manifest.
        MismatchError: The store was made with other settings.
        WorkError: The extraction failed; what is finished is kept.

    Example:
        >>> store = extract(manifest, "stores/photos", BackboneConfig(name="embedded"))  # doctest: +SKIP
    """
    config = config or ExtractConfig()
    if (route is None) != (route_fingerprint is None):
        raise RequestError("route and route_fingerprint must be used together, so that the store records what selected its tokens.")
    run = find_engine(engine)
    check_request(manifest, config)
    path = Path(store)
    loaded = Backbone.load(backbone, resolve_device(config.device))
    if route_fingerprint is not None:
        advice = "A router knows only the tokens that it was trained on: use the backbone of the model."
        check("the backbone", route_fingerprint.get("backbone", {}), loaded.fingerprint, advice)
    plan = make_plan(manifest, loaded.fingerprint, config, route_fingerprint, backbone.weights)
    mine = _mine(plan, shards)
    # The jobs of an array share the lock: each fills shards of its own.
    with exclusive(path, shared=shards is not None):
        return _fill(path, plan, mine, run, Work(path.resolve(), (), backbone, loaded.fingerprint, config, route, address), loaded)


def _fill(path: Path, plan: Plan, mine: range, run: Engine, work: Work, loaded: Backbone) -> FeatureStore:
    publish(plan, path)
    todo = tuple((index, plan.shards[index]) for index in mine if read_sidecar(path, index) is None)
    total = sum(len(plan.shards[index]) for index in mine)
    left = sum(len(items) for _, items in todo)
    if todo:
        work = replace(work, shards=todo)
        with progress(total=total, initial=total - left, what="Extracting", unit="image") as bar:
            run(work, loaded, bar.update)
    return _finished(path)


def _mine(plan: Plan, shards: tuple[int, int] | None) -> range:
    if shards is None:
        return range(len(plan.shards))
    i, n = shards
    if n < 1 or not 0 <= i < n:
        raise RequestError(f"--shards {i}/{n} does not exist. Use I/N with I from 0 to N - 1.")
    return range(i, len(plan.shards), n)


def _finished(path: Path) -> FeatureStore:
    """Open the store; if it is complete, write `errors.jsonl` and delete the temporary files of interrupted runs."""
    store = FeatureStore.open(path, partial=True)
    if not store.missing:
        _write_errors(path / "errors.jsonl", store)
        remove_leftovers(path)
    return store


def _write_errors(path: Path, store: FeatureStore) -> None:
    rows = [error.to_json() for error in store.errors]
    try:
        write_lines(path, rows)
    except WorkError:
        # Another job may have finished at the same time, written the same file and deleted the temporary files.
        if not path.is_file() or read_lines(path) != rows:
            raise
