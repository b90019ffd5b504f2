"""Compare the numbers of two versions of the package.

    python tools/same_numbers.py run OUT.json              # once in each version
    python tools/same_numbers.py compare A.json B.json     # exits with 1 if a value differs

A run trains with every recipe, sweeps every selector, routes, calibrates, evaluates and exports with fixed seeds, on drawn images
and, where `../shared/data` is present, on real ones. It calls the command line and reads the files that it documents.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

SHARED = Path(__file__).resolve().parents[2] / "shared" / "data"
SMALL = ["--epochs", "2", "--head-epochs", "2", "--device", "cpu"]
SIGNALS = ["attention_entropy", "cls_attention", "received_attention", "value_norm", "mean_key", "rollout"]
KEYS = ["study", "view", "method", "seed", "budget", "k", "n", "n_masked"]
MEASURES = ["accuracy", "macro_f1", "balanced_accuracy", "retention", "retention_mean", "retention_of_ceiling", "precision"]


def mtb(*words: object) -> None:
    from medtokenbudget.cli import main

    if main([str(word) for word in words]):
        raise SystemExit(f"mtb {' '.join(map(str, words))} failed")


def results(run: Path) -> dict[str, list[Any]]:
    """Rows of `results.csv` by their keys."""
    import pandas as pd

    frame = pd.read_csv(run / "results.csv")
    keys = [key for key in KEYS if key in frame]
    rows = frame[[*keys, *MEASURES]].astype(object).where(frame[[*keys, *MEASURES]].notna(), None)
    return {"/".join(map(str, row[: len(keys)])): list(row[len(keys) :]) for row in rows.values.tolist()}


def routed(model: object, images: list[Path], budget: float = 0.3, retention: float | None = None) -> dict[str, Any]:
    """Kept patches and scores of images."""
    import medtokenbudget as medtokens

    loaded = medtokens.load(str(model), device="cpu")
    answers = loaded.route(images, budget if retention is None else loaded.guarantee(retention))
    return {path.name: [answer.kept.tolist(), answer.scores.flatten().tolist()] for path, answer in zip(images, answers)}


def exported(model: object, images: list[Path], out: Path) -> dict[str, Any]:
    """Outputs of the ONNX graph from image to answer."""
    import numpy as np
    import onnxruntime
    from PIL import Image

    mtb("export", model, "--out", out, "--budget", 0.3)
    (graph,) = out.glob("*.onnx")
    session = onnxruntime.InferenceSession(str(graph), providers=["CPUExecutionProvider"])
    found: dict[str, Any] = {}
    for path in images[:4]:
        size = [side for side in session.get_inputs()[0].shape if isinstance(side, int) and side > 3]
        pixels = np.asarray(Image.open(path).convert("RGB").resize((size[-1], size[-1])), np.float32) / 255
        values = session.run(None, {session.get_inputs()[0].name: pixels.transpose(2, 0, 1)[None]})
        found[path.name] = [np.asarray(value, np.float64).flatten().tolist() for value in values]
    return found


def flow(name: str, manifest: Path, images: list[Path], work: Path, methods: list[str]) -> dict[str, Any]:
    """Every number of one data set."""
    store = work / f"{name}-tokens"
    mtb(
        "extract",
        manifest,
        "--store",
        store,
        "--backbone",
        "embedded",
        "--views",
        "off-center",
        "--signals",
        *SIGNALS,
        "--threads",
        1,
    )
    numbers: dict[str, Any] = {}
    for recipe in ("paper", "lesion-first"):
        run = work / f"{name}-{recipe}"
        mtb("train", manifest, "--store", store, "--out", run, "--preset", recipe, *SMALL)
        numbers[f"train {recipe}"] = results(run)
        numbers[f"route {recipe}"] = routed(run, images, budget=0.3)
    scout = work / f"{name}-scout"
    mtb("train", manifest, "--out", scout, "--preset", "scout", "--epochs", 2, "--device", "cpu")
    numbers["train scout"], numbers["route scout"] = results(scout), routed(scout, images)
    mtb("sweep", manifest, "--store", store, "--out", work / f"{name}-sweep", "--jobs", 1, *SMALL, "--methods", *methods)
    numbers["sweep"] = results(work / f"{name}-sweep")
    model = work / f"{name}-calibrated"
    mtb("calibrate", manifest, "--model", work / f"{name}-lesion-first", "--store", store, "--retention", 0.6, "--out", model)
    numbers["guarantee"] = routed(model, images, retention=0.6)
    mtb(
        "evaluate",
        manifest,
        "--model",
        work / f"{name}-lesion-first",
        "--store",
        store,
        "--part",
        "val",
        "--out",
        work / f"{name}-evaluated",
    )
    numbers["evaluate"] = results(work / f"{name}-evaluated")
    numbers["onnx"] = exported(work / f"{name}-lesion-first", images, work / f"{name}-onnx")
    return numbers


def real_images(folder: Path) -> None:
    """Copy 96 labelled images and their masks into class folders."""
    import csv

    root = SHARED / "isic"
    with (root / "ISIC_2019_Training_GroundTruth.csv").open(encoding="utf-8") as stream:
        labels = {row.pop("image"): max(row, key=lambda name: float(row[name] or 0)) for row in csv.DictReader(stream)}
    masks = {
        path.name.split("_segmentation")[0]: path for kind in ("ISIC2018*", "HAM10000*") for path in root.glob(f"{kind}/*.png")
    }
    images = sorted((root / "ISIC_2019_Training_Input").glob("*.jpg"))
    for path in images[:: len(images) // 96][:96]:
        mask = masks[path.stem.removesuffix("_downsampled")]
        for source, place in ((path, folder / "photos" / labels[path.stem]), (mask, folder / "masks")):
            place.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, place / (path.name if source == path else f"{path.stem}.png"))


def measure(out: Path) -> None:
    import torch

    import medtokenbudget as medtokens
    from medtokenbudget.routing import selector_class

    torch.set_num_threads(1)
    learned = (
        "lats:mask-free",
        "lats:fixed-0.5",
        "lats:no-norm",
        "lats:lesion-first-raster",
        "context:lesion-first",
        "random:matched",
    )
    # The scout reads pixels and `segmenter` the scores of a trained one, which this store does not have.
    stored = [name for name in medtokens.list_selectors() if not selector_class(name).reads_pixels and name != "segmenter"]
    every = [*stored, *learned, "lats:lesion-first", *(f"center+{head}" for head in medtokens.list_heads())]
    numbers: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        mtb("data", "synthetic", "--out", work / "drawn", "--n", 64, "--size", 96)
        drawn = sorted((work / "drawn").rglob("*.jpg")) or sorted(
            path for path in (work / "drawn").rglob("*.png") if "mask" not in str(path)
        )
        numbers["drawn"] = flow("drawn", work / "drawn" / "manifest.parquet", drawn[:8], work, every)
        numbers["packaged router"] = routed("dermoscopy", drawn[:8], budget=0.3)
        if SHARED.is_dir():
            real_images(work / "real")
            mtb("data", "folder", work / "real" / "photos", "--masks", work / "real" / "masks", "--out", work / "real.parquet")
            photos = sorted((work / "real" / "photos").rglob("*.jpg"))
            numbers["real"] = flow(
                "real", work / "real.parquet", photos[:12], work, ["lats", "lats:lesion-first", "center", "tome", "oracle"]
            )
            numbers["packaged router, real"] = routed("dermoscopy", photos[:24], budget=0.3)
            numbers["packaged promise, real"] = routed("dermoscopy", photos[:24], retention=0.95)
    out.write_text(json.dumps(numbers), encoding="utf-8")


def flat(value: Any, name: str = "") -> dict[str, Any]:
    """Leaves by their path."""
    if isinstance(value, dict):
        return {key: leaf for part, item in value.items() for key, leaf in flat(item, f"{name} > {part}" if name else part).items()}
    if isinstance(value, list):
        return {key: leaf for index, item in enumerate(value) for key, leaf in flat(item, f"{name}[{index}]").items()}
    return {name: value}


def compare(first: Path, second: Path) -> int:
    """Print every value that differs; 0 if none does."""
    a, b = (flat(json.loads(path.read_text(encoding="utf-8"))) for path in (first, second))
    gone, new = [key for key in a if key not in b], [key for key in b if key not in a]
    other = [key for key in a if key in b and a[key] != b[key]]
    for what, keys in (("only in the first", gone), ("only in the second", new), ("different", other)):
        for key in keys[:20]:
            print(f"{what}: {key}: {a.get(key)} {b.get(key)}")
    print(f"{len(a)} values: {len(other)} different, {len(gone)} only in the first, {len(new)} only in the second")
    return 1 if gone or other else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("run").add_argument("out", type=Path)
    comparing = commands.add_parser("compare")
    comparing.add_argument("first", type=Path)
    comparing.add_argument("second", type=Path)
    options = parser.parse_args()
    if options.command == "compare":
        return compare(options.first, options.second)
    measure(options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
