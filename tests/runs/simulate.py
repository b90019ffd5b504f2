"""Made-up predictions for the tests of the statistics: small, seeded, of the shape that a sweep writes."""

from __future__ import annotations

import numpy as np
import pandas as pd

CLASSES = ("A", "B", "C", "D")


def cell(
    rng: np.random.Generator,
    *,
    n: int = 60,
    method: str = "lats",
    seed: int = 42,
    budget: float = 0.3,
    study: str = "main",
    dataset: str = "made-up",
    k: int = 76,
    skill: float = 0.6,
    keep: float = 0.5,
    label: np.ndarray | None = None,
    lesion: np.ndarray | None = None,
    groups: list[str] | None = None,
    merger: bool = False,
) -> pd.DataFrame:
    """One cell: images with probability `skill` of being right and about `keep` of their lesion kept; every fifth has no mask."""
    label = rng.integers(0, len(CLASSES), n) if label is None else label
    predicted = np.where(rng.random(n) < skill, label, rng.integers(0, len(CLASSES), n))
    logits = rng.normal(size=(n, len(CLASSES))) + 2 * np.eye(len(CLASSES))[predicted]
    probabilities = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    lesion = rng.integers(1, 200, n) if lesion is None else lesion
    kept = np.minimum(rng.binomial(lesion, keep), k)
    masked = np.arange(n) % 5 != 4
    return pd.DataFrame(
        {
            "study": study,
            "dataset": dataset,
            "view": "as-is",
            "method": method,
            "seed": seed,
            "budget": budget,
            "k": k,
            "n_patches": 256,
            "image_id": [f"image-{i:04d}" for i in range(n)],
            "group": groups if groups is not None else [f"group-{i:04d}" for i in range(n)],
            "label": label,
            "predicted": probabilities.argmax(1),
            "probabilities": list(probabilities.astype(np.float32)),
            "lesion": pd.array(np.where(masked, lesion, 0), dtype="Int32").copy(),
            "kept_lesion": pd.array(np.where(masked, kept, 0), dtype="Int32").copy(),
            "purity": np.where(masked, 0.9, np.nan) if merger else np.full(n, np.nan),
            "lesion_dominated": np.where(masked, 0.8, np.nan) if merger else np.full(n, np.nan),
            "lesion_mass": np.nan,
        }
    ).pipe(_hide, ~masked, merger)


def _hide(frame: pd.DataFrame, unmasked: np.ndarray, merger: bool) -> pd.DataFrame:
    frame.loc[unmasked, "lesion"] = pd.NA
    frame.loc[unmasked | merger, "kept_lesion"] = pd.NA
    return frame


def sweep(methods: dict[str, dict[str, float]], seeds: tuple[int, ...], budgets: tuple[float, ...], n: int = 60) -> pd.DataFrame:
    """Cells of several methods on the same images."""
    base = np.random.default_rng(0)
    label, lesion = base.integers(0, len(CLASSES), n), base.integers(1, 200, n)
    rng = np.random.default_rng(1)
    cells = [
        cell(rng, n=n, method=m, seed=s, budget=b, k=max(16, int(b * 256)), label=label, lesion=lesion, **options)
        for m, options in methods.items()
        for s in seeds
        for b in budgets
    ]
    return pd.concat(cells, ignore_index=True)
