"""The manifest and the store behind a run, opened once per process, however many units ask for them."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from medtokenbudget.data import Manifest
from medtokenbudget.backbone import FeatureStore


@dataclass(frozen=True)
class Sources:
    """A manifest and the token store of its images, with the paths that worker processes open them from."""

    manifest: Manifest
    store: FeatureStore
    manifest_path: Path
    store_path: Path
    in_memory: bool = False

    @classmethod
    def of(cls, manifest: Manifest | Path | str, store: FeatureStore | Path | str, out: Path | str) -> Sources:
        """What paths or objects stand for; a manifest that is only in memory belongs into the run directory `out`."""
        store_path = (store.path if isinstance(store, FeatureStore) else Path(store)).resolve()
        if isinstance(manifest, Manifest):
            opened = store.annotated(manifest) if isinstance(store, FeatureStore) else FeatureStore.open(store_path, manifest)
            return cls(manifest, opened, Path(out).resolve() / "manifest.parquet", store_path, in_memory=True)
        if isinstance(store, FeatureStore):
            path = Path(manifest).resolve()
            read = Manifest.read(path)
            return remember(cls(read, store.annotated(read), path, store_path))
        return open_sources(manifest, store_path)

    def ensure_written(self) -> None:
        """Write a manifest that is only in memory to its path, where worker processes read it."""
        if self.in_memory:
            self.manifest.write(self.manifest_path)
            remember(self)


_open: dict[tuple[object, ...], Sources] = {}


def open_sources(manifest: Path | str, store: Path | str) -> Sources:
    """Open both, or return what this process has open already; a file that changed on disk is read again."""
    paths = Path(manifest).resolve(), Path(store).resolve()
    key = _key(*paths)
    if key is None or key not in _open:
        read = Manifest.read(paths[0])
        return remember(Sources(read, FeatureStore.open(paths[1], read), *paths))
    return _open[key]


def remember(sources: Sources) -> Sources:
    """Let later calls of `open_sources` in this process return `sources`."""
    _open.clear()
    key = _key(sources.manifest_path, sources.store_path)
    if key is not None:
        _open[key] = sources
    return sources


def _key(manifest: Path, store: Path) -> tuple[object, ...] | None:
    try:
        stats = [
            (os.fspath(path), path.stat().st_mtime_ns, path.stat().st_size)
            for path in (manifest, store / "store.json", store / "plan.json")
        ]
    except OSError:
        return None
    return tuple(stats)
