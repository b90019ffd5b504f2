"""Whether a promise is kept, and what it saves: many random splits of held-out images into calibration and test groups.

`python -m benchmarks.guarantee MODEL MANIFEST --store S --out FILE.csv`. Each split picks a threshold on the calibration groups
and measures the others. The controls `center` and `darkness` go through the same rule.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from medtokenbudget.data import Manifest
from medtokenbudget.model import load
from medtokenbudget.model.saved import resolve
from medtokenbudget.routing import create_selector
from medtokenbudget.routing.conformal import Promise, group_mean, kept_counts, lesion_kept, pick_threshold, relative_scores
from medtokenbudget.runs.evaluate import held_out, patch_scores, run_of

PROMISES = (Promise(0.9), Promise(0.95), Promise(0.98), Promise(0.9, 0.9), Promise(0.95, 0.9))
CONTROLS = ("center", "darkness")


@dataclass(frozen=True)
class Images:
    """Held-out images with a lesion patch."""

    lesion: np.ndarray
    groups: np.ndarray
    minimum: int


def splits(images: Images, scores: np.ndarray, promise: Promise, calibration: int, count: int, seed: int = 0) -> pd.DataFrame:
    """One row per split: what the test groups keep, and the patches that it takes.

    Args:
        images: The images.
        scores: [n, N].
        promise: What is promised.
        calibration: Groups to calibrate on.
        count: Number of random splits.
        seed: Seed of the splits.
    """
    names, member = np.unique(images.groups, return_inverse=True)
    rng, rows = np.random.default_rng(seed), []
    for _ in range(count):
        chosen = np.zeros(len(names), bool)
        chosen[rng.permutation(len(names))[:calibration]] = True
        inside = chosen[member]
        new = ~inside
        found = pick_threshold(promise, scores[inside], images.lesion[inside], images.groups[inside].tolist(), images.minimum)
        counts = kept_counts(scores[new], found.value, images.minimum)
        kept, groups = lesion_kept(scores[new], images.lesion[new], counts), images.groups[new].tolist()
        reached = kept if promise.coverage is None else kept >= promise.retention - 1e-9
        rows.append(
            {"reached": group_mean(reached, groups), "kept": group_mean(kept, groups), "tokens": group_mean(counts, groups)}
        )
    return pd.DataFrame(rows)


def fixed_k(images: Images, scores: np.ndarray, retention: float) -> int:
    """The smallest number of patches, the same for every image, that keeps this share of the lesion on average."""
    n = scores.shape[1]
    for k in range(1, n + 1):
        if group_mean(lesion_kept(scores, images.lesion, np.full(len(scores), k)), images.groups.tolist()) >= retention:
            return k
    return n


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("manifest", type=Path)
    parser.add_argument("--store", type=Path, required=True)
    parser.add_argument("--calibration", type=int, default=500)
    parser.add_argument("--splits", type=int, default=1000)
    parser.add_argument("--out", type=Path, default=Path("guarantee.csv"))
    options = parser.parse_args(arguments)
    model, folder = load(options.model, device="cpu"), resolve(options.model)
    found = held_out(model, Manifest.read(options.manifest), options.store, Path("unused"), run=run_of(folder))
    lesion = found.store.lesion.numpy()[found.rows]
    measured = lesion.any(1)
    selector = model.classifier().selector
    images = Images(lesion[measured], np.array(found.groups_of(found.rows))[measured], selector.minimum)
    rows = []
    rankers = {"router": selector, **{name: create_selector(name) for name in CONTROLS}}
    ranked = {name: patch_scores(found.store, found.rows[measured], ranker) for name, ranker in rankers.items()}
    ranked["router, plain scores"], ranked["router"] = ranked["router"], relative_scores(ranked["router"])
    for name, scores in ranked.items():
        for promise in PROMISES:
            table = splits(images, scores, promise, options.calibration, options.splits)
            kept, tokens = table["kept"].mean(), table["tokens"].mean()
            fixed = fixed_k(images, scores, kept)
            rows.append(
                {
                    "scores": name,
                    "retention": promise.retention,
                    "coverage": promise.coverage,
                    "reached": table["reached"].mean(),
                    "error": table["reached"].std() / np.sqrt(len(table)),
                    "kept": kept,
                    "tokens": tokens,
                    "fixed": fixed,
                    "saving": 1 - tokens / fixed,
                    "images": len(images.lesion),
                    "groups": len(set(images.groups)),
                    "calibration": options.calibration,
                    "splits": options.splits,
                }
            )
            print(pd.DataFrame(rows[-1:]).to_string(index=False, header=len(rows) == 1), flush=True)
    pd.DataFrame(rows).to_csv(options.out, index=False, float_format="%.6g", lineterminator="\n")


if __name__ == "__main__":
    main()
