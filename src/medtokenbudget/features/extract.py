"""`extract`: run the frozen backbone once over a manifest and fill a store; called again, it goes on where it stopped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from medtokenbudget.config import BackboneConfig, ExtractConfig
from medtokenbudget.data import Manifest
from medtokenbudget.devices import resolve_device
from medtokenbudget.errors import RequestError, WorkError
from medtokenbudget.features.backbone import Backbone
from medtokenbudget.features.engines import Work, find_engine
from medtokenbudget.features.pipeline import Route
from medtokenbudget.features.plan import Plan, check, check_request, make_plan, publish
from medtokenbudget.features.shards import read_sidecar, remove_leftovers
from medtokenbudget.features.store import FeatureStore
from medtokenbudget.files import read_lines, write_lines
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
    """Fill `store` with the tokens of `manifest` and open it.

    shards             (i, n): only the shards whose number leaves the rest i when divided by n, for job arrays; the store that
                       comes back may then be incomplete (`missing`)
    address            of a running Ray cluster, for the engine 'ray'
    route              keeps only what this function selects; `route_fingerprint` says what it is, and under 'backbone'
                       which fields of a backbone's fingerprint it needs
    """
    config = config or ExtractConfig()
    if (route is None) != (route_fingerprint is None):
        raise RequestError("route and route_fingerprint go together: a store of routed tokens must say what routed them.")
    run = find_engine(engine)
    check_request(manifest, config)
    path = Path(store)
    loaded = Backbone.load(backbone, resolve_device(config.device))
    if route_fingerprint is not None:
        advice = "A router knows only the tokens that it was trained on: use the backbone of the model."
        check("the backbone", route_fingerprint.get("backbone", {}), loaded.fingerprint, advice)
    plan = make_plan(manifest, loaded.fingerprint, config, route_fingerprint)
    mine = _mine(plan, shards)
    publish(plan, path)
    todo = tuple((index, plan.shards[index]) for index in mine if read_sidecar(path, index) is None)
    total = sum(len(plan.shards[index]) for index in mine)
    left = sum(len(items) for _, items in todo)
    if todo:
        work = Work(path.resolve(), todo, backbone, loaded.fingerprint, config, route, address)
        with progress(total=total, initial=total - left, what="extract", unit="image") as bar:
            run(work, loaded, bar.update)
    return _finished(path)


def _mine(plan: Plan, shards: tuple[int, int] | None) -> range:
    if shards is None:
        return range(len(plan.shards))
    i, n = shards
    if n < 1 or not 0 <= i < n:
        raise RequestError(f"shards {i}/{n} does not exist: give I/N with I from 0 to N - 1.")
    return range(i, len(plan.shards), n)


def _finished(path: Path) -> FeatureStore:
    """The store as it is; when it is complete, with `errors.jsonl` and without what killed runs left behind."""
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
        # Another job may have ended at the same moment, written the same and swept the temporary files.
        if not path.is_file() or read_lines(path) != rows:
            raise
