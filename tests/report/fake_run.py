"""A run directory without a training: drawn images, real masks and luminance, simulated selectors and classifiers.

The report reads nothing but files, so its tests need a run whose every number is known to follow from `predictions.parquet`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pandas as pd
from PIL import Image
from safetensors.numpy import save_file

from medtokenbudget.config import BUDGETS, HEADLINE_BUDGETS
from medtokenbudget.data.dermoscopy import CLASSES, draw, sample_labels
from medtokenbudget.experiments.results import summarise, write_predictions, write_results

GRID = (16, 16)
N = 256
RANKERS = ("random", "norm", "attention-entropy", "local-contrast", "lats", "center", "darkness", "oracle")
EVERYTHING = ("no-pruning", "tome", *RANKERS)
# How much of a class each method's head learns from a pure lesion: only used to make accuracies that differ a little.
SKILL = {"no-pruning": 2.2, "tome": 2.1, "random": 2.1, "norm": 1.7, "attention-entropy": 1.8, "local-contrast": 1.9, "oracle": 2.4}


@dataclass
class Pictures:
    """Drawn images of one data set: ids, labels `[n]`, lesion patches `[n, N]`, luminance `[n, N]`."""

    name: str
    ids: list[str]
    label: np.ndarray
    lesion: np.ndarray
    luminance: np.ndarray
    has_mask: np.ndarray
    files: list[tuple[str, str | None]] = field(default_factory=list)


def draw_pictures(run: Path, name: str, n: int, size: int, off_center: bool, masked: bool, store_files: bool) -> Pictures:
    """Draw `n` images; with `store_files` they and their masks lie under `run/data`."""
    labels = sample_labels(n, 7)
    lesion, luminance, ids, files = [], [], [], []
    folder = run / "data"
    folder.mkdir(parents=True, exist_ok=True)
    for i, label in enumerate(labels):
        drawing = draw(label, i, size, off_center)
        grey = drawing.image.mean(2).reshape(16, size // 16, 16, size // 16).mean((1, 3)) / 255
        small = Image.fromarray(drawing.mask.astype(np.uint8) * 255).resize((16, 16), Image.Resampling.BILINEAR)
        lesion.append(np.asarray(small).reshape(-1) > 127.5)
        luminance.append(grey.reshape(-1))
        ids.append(f"img_{i:04d}")
        if store_files:
            Image.fromarray(drawing.image).save(folder / f"{ids[-1]}.png")
            Image.fromarray(drawing.mask.astype(np.uint8) * 255).save(folder / f"{ids[-1]}_mask.png")
        files.append((f"data/{ids[-1]}.png", f"data/{ids[-1]}_mask.png" if masked else None))
    index = np.array([CLASSES.index(label) for label in labels])
    lesions = np.array(lesion)
    return Pictures(name, ids, index, lesions, np.array(luminance), lesions.any(1) & masked, files)


def scores(method: str, pictures: Pictures, seed: int) -> np.ndarray:
    """Patch scores `[n, N]` of a simulated ranker; `lats` sees the lesion through noise, the controls are what they are."""
    rng = np.random.default_rng([seed, len(method), sum(map(ord, method))])
    shape = pictures.lesion.shape
    y, x = np.divmod(np.arange(N), 16)
    middle = -np.hypot(y - 7.5, x - 7.5)[None, :]
    noise = rng.normal(size=shape)
    if method == "center":
        return np.broadcast_to(middle, shape)
    if method == "darkness":
        return -pictures.luminance
    if method == "oracle":
        return pictures.lesion + 0.0
    if method.startswith("lats"):
        worse = {"lats": 0.45, "lats:mask-free": 1.6, "lats:fixed-0.5": 0.5, "lats:lesion-first": 0.3}.get(method, 0.8)
        hard = np.linspace(0.5, 1.8, shape[0])[:, None]
        return 1 / (1 + np.exp(-(2.5 * pictures.lesion - 1.2 + 0.15 * middle + worse * hard * noise * 1.5)))
    if method == "random":
        return noise
    return 0.3 * {"attention-entropy": 1.0, "norm": -0.6, "local-contrast": -0.8}[method] * pictures.lesion + noise


def probabilities(method: str, pictures: Pictures, kept: np.ndarray, seed: int) -> np.ndarray:
    """Class probabilities `[n, C]`: better the more of the kept patches are lesion."""
    rng = np.random.default_rng([seed, sum(map(ord, method))])
    purity = (kept & pictures.lesion).sum(1) / np.maximum(kept.sum(1), 1)
    logits = rng.normal(size=(len(pictures.ids), len(CLASSES)))
    skill = SKILL.get(method.split(":")[0], 2.2)
    logits[np.arange(len(pictures.ids)), pictures.label] += skill * (0.5 + purity)
    exponent = np.exp(1.4 * logits)
    return exponent / exponent.sum(1, keepdims=True)


def order_of(method: str, pictures: Pictures, seed: int) -> np.ndarray:
    return np.argsort(-scores(method, pictures, seed), axis=1, kind="stable")


def unit(study: str, method: str, seed: int, pictures: Pictures, budgets: tuple[float, ...]) -> pd.DataFrame:
    """The prediction rows of one method and seed over the budgets."""
    merger, everything = method == "tome", method == "no-pruning"
    order = None if merger or everything else order_of(method, pictures, seed)
    frames = []
    for budget in budgets:
        k = N if everything else max(16, int(budget * N + 1e-9))
        kept = np.zeros_like(pictures.lesion)
        if order is None:
            kept[:] = True
        else:
            np.put_along_axis(kept, order[:, :k], True, axis=1)
        chances = probabilities(method, pictures, kept, seed)
        masked = pictures.has_mask
        lesion = np.where(masked, pictures.lesion.sum(1), -1)
        kept_lesion = np.where(masked & (not merger), (kept & pictures.lesion).sum(1), -1)
        frames.append(
            pd.DataFrame(
                {
                    "study": study,
                    "dataset": pictures.name,
                    "method": method,
                    "seed": seed,
                    "budget": budget,
                    "k": k,
                    "n_patches": N,
                    "image_id": pictures.ids,
                    "group": [f"lesion_{i // 2}" for i in range(len(pictures.ids))],
                    "label": pictures.label,
                    "predicted": chances.argmax(1),
                    "probabilities": list(chances.astype(np.float32)),
                    "lesion": pd.array(lesion, dtype="Int64"),
                    "kept_lesion": pd.array(kept_lesion, dtype="Int64"),
                    "purity": np.where(masked & merger, 0.9 - 0.2 * (1 - budget), np.nan),
                }
            )
        )
    rows = pd.concat(frames, ignore_index=True)
    rows["lesion"] = rows["lesion"].mask(rows["lesion"] < 0)
    rows["kept_lesion"] = rows["kept_lesion"].mask(rows["kept_lesion"] < 0)
    return rows


def plan(studies: tuple[str, ...], seeds: tuple[int, ...]) -> list[tuple[str, str, int, bool, tuple[float, ...]]]:
    """(study, method, seed, off-center, budgets) of every unit."""
    units: list[tuple[str, str, int, bool, tuple[float, ...]]] = []

    def add(study: str, methods: tuple[str, ...], over: tuple[int, ...], budgets: tuple[float, ...], off: bool = False) -> None:
        if study in studies:
            units.extend((study, method, seed, off, budgets) for method in methods for seed in over)

    controls = ("center", "darkness", "oracle")
    add("main", EVERYTHING, seeds[:1], BUDGETS)
    add("robustness", ("lats", "random", "tome", *controls), seeds, HEADLINE_BUDGETS)
    add("mask-free", ("lats:mask-free", "lats", "random", *controls), seeds, HEADLINE_BUDGETS)
    add("signals", ("lats", "attention-entropy", "norm", "local-contrast", "random", *controls), seeds[:1], (0.3,))
    add("curriculum", ("lats", "lats:fixed-0.5", "random", *controls), seeds[:1], (0.1, 0.2, 0.3, 0.5, 1.0))
    toggles = ("lats", "lats:no-attention", "lats:no-norm", "lats:no-contrast", "random", *controls)
    add("toggles", toggles, seeds[:1], HEADLINE_BUDGETS)
    for off in (False, True):
        add("center-bias", ("lats", "lats:lesion-first", "random", *controls), seeds, HEADLINE_BUDGETS, off)
        recipe = ("lats", "lats:lesion-first", "lats:lesion-first-raster", "random", *controls)
        add("recipe", recipe, seeds[:1], HEADLINE_BUDGETS, off)
    return units


ALL_STUDIES = ("main", "robustness", "mask-free", "signals", "curriculum", "toggles", "center-bias", "recipe")


def write_training(path: Path, units: list[str]) -> None:
    """The metrics of trainings whose budget follows the paper's curriculum."""
    lines = []
    for number, name in enumerate(units):
        for epoch in range(30):
            share = min(epoch / 20, 1)
            budget = 0.5 if "fixed" in name else 0.25 + 0.125 * (1 + np.cos(np.pi * share))
            fade = float(np.exp(-epoch / 8)) + 0.03 * ((epoch * 7 + number) % 5)
            row = {"unit": name, "epoch": epoch, "budget": budget, "lr": 1e-3 * (1 - epoch / 30), "loss": 1.1 + fade}
            row |= {
                "classification": 0.9 + fade,
                "budget_deviation": 0.003,
                "diversity": 0.5 + 0.2 * fade,
                "lesion": 0.2 + 0.4 * fade,
            }
            row |= {"distillation": 0.05 + 0.1 * fade, "score_mean": 0.3, "score_std": 0.2 + 0.005 * epoch, "seconds": 1.5}
            if epoch % 2 == 0:
                row["selection"] = 0.8 - 0.3 * fade
            lines.append(json.dumps(row, sort_keys=True))
    path.write_text("\n".join(lines) + "\n")


def write_routing(path: Path, sets: list[Pictures], seeds: tuple[int, ...]) -> None:
    tensors: dict[str, np.ndarray] = {}
    for pictures in sets:
        prefix = "" if pictures is sets[0] else f"{pictures.name}/"
        tensors[f"{prefix}lesion"] = (pictures.lesion & pictures.has_mask[:, None]).astype(np.uint8)
        tensors[f"{prefix}has_mask"] = pictures.has_mask.astype(np.uint8)
        for seed in seeds:
            for method in RANKERS:
                tensors[f"{prefix}order/{method}/{seed}"] = np.ascontiguousarray(order_of(method, pictures, seed).astype(np.int16))
            tensors[f"{prefix}scores/lats/{seed}"] = scores("lats", pictures, seed).astype(np.float16)
    about = {"image_ids": {pictures.name: pictures.ids for pictures in sets}, "grid": GRID, "dataset": sets[0].name}
    save_file(tensors, path, metadata={"routing": json.dumps(about)})


def write_manifest(run: Path, pictures: Pictures) -> None:
    rows = pd.DataFrame(
        {
            "image_id": pictures.ids,
            "image": [image for image, _ in pictures.files],
            "label": [CLASSES[i] for i in pictures.label],
            "mask": [mask for _, mask in pictures.files],
            "group": None,
            "split": "val",
        }
    )
    from medtokenbudget.data import Manifest

    Manifest(rows, CLASSES, run, "synthetic").write(run / "manifest.parquet")


def fake_run(
    run: Path,
    n: int = 24,
    size: int = 64,
    seeds: tuple[int, ...] = (42, 43),
    studies: tuple[str, ...] = ALL_STUDIES,
    masked: bool = True,
    images: bool = True,
) -> Path:
    """Write a complete run directory to `run` and give it back."""
    run.mkdir(parents=True, exist_ok=True)
    straight = draw_pictures(run, "synthetic", n, size, False, masked, images)
    sets = [straight]
    if "center-bias" in studies:
        sets.append(draw_pictures(run, "synthetic@off-center", n, size, True, masked, False))
    rows = pd.concat(
        [
            unit(study, method, seed, sets[1] if off else straight, budgets)
            for study, method, seed, off, budgets in plan(studies, seeds)
        ],
        ignore_index=True,
    )
    write_predictions(run / "predictions.parquet", rows, CLASSES)
    write_results(run / "results.csv", summarise(rows, CLASSES))
    write_training(run / "metrics.jsonl", [f"lats-{seed}" for seed in seeds] + ["lats:fixed-0.5-42"])
    write_routing(run / "routing.safetensors", sets, seeds)
    if images:
        write_manifest(run, straight)
    description = {
        "classes": list(CLASSES),
        "dataset": "synthetic",
        "manifest": "manifest.parquet",
        "seeds": list(seeds),
        "versions": {"medtokenbudget": "0.1.0", "python": "3.11", "torch": "2.0"},
        "hashes": {"data": "0" * 64, "weights": "1" * 64, "split": "2" * 64},
        "configuration": {"backbone": {"name": "embedded"}, "train": {"recipe": "joint", "epochs": 30}},
        "command": "mtb demo",
        "counts": {"train": 96, "select": 0, "val": n},
    }
    (run / "run.json").write_text(json.dumps(description, indent=2))
    return run
