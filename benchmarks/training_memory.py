"""Private memory of one training epoch, joint and lesion-first, at one and at eight times the images: it must not grow with them.

python -m benchmarks.training_memory [--rows 128]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import numpy as np

from benchmarks.reading import drawn_store, private_kib
from medtokenbudget.backbone import FeatureStore
from medtokenbudget.backbone.annotations import Annotation
from medtokenbudget.config import LATSConfig, preset
from medtokenbudget.data import Manifest
from medtokenbudget.training.rows import TrainingRows
from medtokenbudget.training.trainer import train


def _annotated(store: FeatureStore) -> FeatureStore:
    """The store with drawn labels and lesion patches, as a manifest would give them."""
    random = np.random.default_rng(0)
    n = len(store)
    annotation = Annotation(
        classes=tuple("abcdefgh"),
        ids=store.ids,
        tokens=np.arange(n),
        label=random.integers(0, 8, n),
        lesion=random.random((n, store.n)) > 0.7,
        covered=np.zeros((n, store.n), np.uint8),
        has_mask=np.ones(n, bool),
        errors=[],
        images={name: name for name in store.ids},
    )
    return FeatureStore(store.path, store.config, store.shards, store.records, annotation)


def training_memory(path: Path, name: str) -> dict[str, int]:
    """Largest private memory, over the start, while LATS trains for one epoch on the store and its head for another."""
    store = _annotated(FeatureStore.open(path))
    records = [
        {"image_id": image, "image": image, "mask": image, "label": store.classes[int(store.label[i])]}
        | {"split": "train" if i % 8 else "val"}
        for i, image in enumerate(store.ids)
    ]
    manifest = Manifest.from_records(records, store.classes)
    config = preset(name, epochs=1, head_epochs=1, lats=LATSConfig(hidden=64, layers=1))
    with tempfile.TemporaryDirectory() as out:
        rows = TrainingRows.of(manifest, store, config)
        work = threading.Thread(target=train, args=(store, rows, config), kwargs={"folder": Path(out)})
        before, peak = private_kib(), 0
        work.start()
        while work.is_alive():
            peak = max(peak, private_kib())
            work.join(0.01)
    return {"rows": len(store), "growth_kib": peak - before}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=128)
    parser.add_argument("--memory-of", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.memory_of is not None:
        print(json.dumps(training_memory(Path(given.memory_of[0]), given.memory_of[1])))
        return 0
    with tempfile.TemporaryDirectory() as folder:
        paths = {times: Path(folder) / str(times) for times in (1, 8)}
        for times, path in paths.items():
            drawn_store(path, given.rows * times)
        for name in ("paper", "lesion-first"):
            growth = {}
            for times, path in paths.items():
                command = [sys.executable, "-m", "benchmarks.training_memory", "--memory-of", str(path), name]
                growth[times] = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
                print(f"{name:<13}{growth[times]['rows']:6d} images {growth[times]['growth_kib'] / 1024:7.1f} MiB over the start")
            print(f"{name:<13}ratio {growth[8]['growth_kib'] / growth[1]['growth_kib']:.2f}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
