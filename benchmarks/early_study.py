"""The study `early`, behind docs/results/early-routing.md: what each way of routing early costs in time and brings in macro F1.

It needs images, not only a store, so it is a script of the checkout. Its steps, all in one folder, each resumable:

    python -m benchmarks.early_study folds --manifest M --out DIR
    python -m benchmarks.early_study scores --manifest M --store S --scout RUN --out DIR
    python -m benchmarks.early_study pool --manifest M --weights W --out DIR --group dense
    python -m benchmarks.early_study inner --manifest M --out DIR
    python -m benchmarks.early_study validation --manifest M --out DIR
    python -m benchmarks.early_study time --weights W --scout RUN --out DIR

`folds` cuts the training side into three grouped folds and writes a manifest for each, to train a scout that has not seen the
masks of that fold (`mtb train DIR/fold0.parquet --store S --out DIR/scout0 --head none`). `scores` ranks the patches: those of a
training image by the scout of its fold, those of a validation image by the scout of all training images; the routers of the group
`own`, which read the tokens of block 3, are divided in the same way (DIR/own0 to DIR/own2, and `--inside`). `pool` stores the
mean of the tokens that a head would read, for several blocks of one pass. `inner` trains heads across the same folds, where
everything is chosen; `validation` confirms what was chosen, once. `time` measures milliseconds per image at the block that is
read, in turns.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from benchmarks import early_judge, early_time
from benchmarks.early_passes import Passes, Seen
from medtokenbudget.backbone import FeatureStore, views
from medtokenbudget.data import Manifest, decode_image, mask_of
from medtokenbudget.model import load

BATCH, PIECE = 16, 256
PARTS = {"as-is": views.IDENTITY, "off-center": views.OFF_CENTER}


def folds(arguments: argparse.Namespace) -> None:
    """Write the manifest of each fold: its images are the validation side, the other training images the training side."""
    manifest = Manifest.read(arguments.manifest)
    training = manifest.rows[manifest.rows["split"] == "train"].reset_index(drop=True)
    for number, held in enumerate(early_judge.folds_of(training)):
        split = np.full(len(training), "train", dtype=object)
        split[held] = "val"
        path = replace(manifest, rows=training.assign(split=split)).write(arguments.out / f"fold{number}.parquet")
        print(f"{path}: {len(held)} images held out.")


def fold_of(manifest: Manifest, folder: Path) -> np.ndarray:
    """The fold of each image; validation images have the number after the last."""
    held = {
        name: number
        for number in range(early_judge.FOLDS)
        for name in Manifest.read(folder / f"fold{number}.parquet").rows.query("split == 'val'")["image_id"]
    }
    return np.array([held.get(name, early_judge.FOLDS) for name in manifest.ids])


@torch.inference_mode()
def scores(arguments: argparse.Namespace) -> None:
    """Scores and lesion patches of every image as it is, and of the off-center crops of validation images."""
    manifest = Manifest.read(arguments.manifest)
    store, fold = FeatureStore.open(arguments.store, manifest), fold_of(manifest, arguments.out)
    models = [load(arguments.out / f"scout{number}", device="cpu") for number in range(early_judge.FOLDS)]
    models.append(load(arguments.scout, device="cpu"))
    selectors: list[Any] = [model.classifier().selector for model in models]
    for part, view in PARTS.items():
        found: dict[str, list[np.ndarray]] = {"row": [], "scores": [], "lesion": []}
        for number, selector in enumerate(selectors):
            wanted = np.flatnonzero(fold == number)
            if part != "as-is" and number < early_judge.FOLDS:
                continue
            kept = [i for i in wanted if len(store.rows([manifest.ids[i]], view, strict=False))]
            rows = store.rows([manifest.ids[i] for i in kept], view)
            found["row"].append(np.array(kept))
            found["lesion"].append(store.lesion[rows].numpy())
            parts = [selector.score(batch).numpy() for batch in store.batches(rows, 64, signals=selector.requires)]
            found["scores"].append(np.concatenate(parts))
        joined = {name: np.concatenate(values) for name, values in found.items()}
        order = joined["row"].argsort()
        save(arguments.out / f"scores-{part}.npz", {name: values[order] for name, values in joined.items()})
        print(f"scores-{part}.npz: {len(order)} images", flush=True)


def picture_of(manifest: Manifest, i: int, view: str) -> Image.Image:
    image = decode_image(manifest.image_path(i))
    mask_file = manifest.mask_path(i)
    mask = None if mask_file is None else mask_of(image.size, mask_file)
    return views.geometry_of(view, mask, views.image_seed(0, manifest.ids[i])).of(image)


@torch.inference_mode()
def pool(arguments: argparse.Namespace) -> None:
    """Store the means of one group of ways, piece by piece."""
    torch.set_num_threads(1)
    manifest = Manifest.read(arguments.manifest)
    with np.load(arguments.out / f"scores-{arguments.part}.npz") as stored:
        known = {name: stored[name] for name in stored.files}
    inside = [arguments.out / f"own{number}" for number in range(early_judge.FOLDS)]
    passes = Passes(arguments.weights, arguments.blocks, [*inside, arguments.inside], arguments.precision)
    fold = fold_of(manifest, arguments.out)
    group = getattr(passes, arguments.group)
    for start in range(0, len(known["row"]), PIECE):
        path = arguments.out / f"{arguments.group}-{arguments.part}-{start:05d}.npz"
        if path.exists():
            continue
        end = min(start + PIECE, len(known["row"]))
        found: dict[str, list[np.ndarray]] = {}
        for first in range(start, end, BATCH):
            at = slice(first, min(first + BATCH, end))
            rows = known["row"][at]
            pictures = [picture_of(manifest, int(row), PARTS[arguments.part]) for row in rows]
            scored, lesion = (torch.from_numpy(known[name][at]).float() for name in ("scores", "lesion"))
            seen = Seen(pictures, scored, lesion, torch.from_numpy(fold[rows]))
            for name, value in group(seen):
                found.setdefault(name, []).append((value.float() if value.is_floating_point() else value).numpy())
        save(path, {"row": known["row"][start:end], **{name: np.concatenate(parts) for name, parts in found.items()}})
        print(path.name, flush=True)


def save(path: Path, arrays: dict[str, np.ndarray]) -> None:
    temporary = path.with_suffix(".part.npz")
    np.savez(temporary, **arrays)  # type: ignore[arg-type]
    temporary.rename(path)


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    steps = parser.add_subparsers(dest="step", required=True)

    def step(name: str, run: Any, *needs: str) -> argparse.ArgumentParser:
        made = steps.add_parser(name)
        for need in ("out", *needs):
            made.add_argument(f"--{need}", type=str if need == "scout" else Path, required=True)
        made.set_defaults(run=run)
        return made

    step("folds", folds, "manifest")
    step("scores", scores, "manifest", "store", "scout")
    made = step("pool", pool, "manifest", "weights")
    made.add_argument("--group", choices=Passes.GROUPS, required=True)
    made.add_argument("--part", choices=PARTS, default="as-is")
    made.add_argument("--blocks", type=int, nargs="+", default=[5, 6, 7, 8, 9, 11])
    made.add_argument("--precision", choices=["fp32", "bf16"], default="bf16", help="Of the large backbone.")
    made.add_argument("--inside", type=Path, help="Router of the group 'own' for validation images, of the tokens of block 3.")
    chosen = step("inner", early_judge.inner, "manifest")
    chosen.add_argument("--ways", default=".*", help="Regular expression of 'way@block'.")
    chosen.add_argument("--seeds", type=int, nargs="+", default=[42, 43, 44])
    confirmed = step("validation", early_judge.validation, "manifest")
    confirmed.add_argument("--ways", nargs="*", default=[], help="'way@block'; by default each at the block that `inner` chose.")
    confirmed.add_argument("--against", nargs="*", default=[], help="Ways to compare the others with.")
    confirmed.add_argument("--seeds", type=int, nargs="+", default=[42, 43, 44, 45, 46])
    timed = step("time", early_time.run, "weights", "scout")
    timed.add_argument("--ways", nargs="*", default=[], help="'way@block'; by default those of `validation`.")
    timed.add_argument("--rounds", type=int, default=5)
    timed.add_argument("--batch", type=int, default=BATCH)
    arguments = parser.parse_args(words)
    arguments.out.mkdir(parents=True, exist_ok=True)
    arguments.run(arguments)


if __name__ == "__main__":
    main()
