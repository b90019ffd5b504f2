"""A run directory without any training: drawn images with real masks and luminance, simulated selectors and classifiers.

The report only reads files, so its tests need a run directory whose numbers all follow from `predictions.parquet`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from PIL import Image
from safetensors.numpy import save_file

from medtokenbudget.config import BUDGETS, HEADLINE_BUDGETS
from medtokenbudget.data.readers import ISIC_CLASSES as CLASSES
from medtokenbudget.data.synthetic import draw, sample_labels
from medtokenbudget.files import write_sealed
from medtokenbudget.runs.run import hashes, summarize, write_predictions, write_results
from tests.bad_input.damage import edit_json

GRID = (16, 16)
N = 256
OURS = "lats:lesion-first"
LESION_ONLY = {"classification": 0.0, "diversity": 0.0, "lesion": 1.0, "distillation": 0.0}
RANKERS = ("random", "norm", "attention-entropy", "local-contrast", "lats", OURS, "center", "darkness", "oracle")
EVERYTHING = ("no-pruning", "tome", *RANKERS)
# How much of a class each method's head learns from a pure lesion: only used to make accuracies that differ a little.
SKILL = {"no-pruning": 2.2, "tome": 2.1, "random": 2.1, "norm": 1.7, "attention-entropy": 1.8, "local-contrast": 1.9, "oracle": 2.4}


@dataclass
class Pictures:
    """Drawn images of one view: ids, labels `[n]`, lesion patches `[n, N]`, luminance `[n, N]`."""

    view: str
    ids: list[str]
    label: np.ndarray
    lesion: np.ndarray
    luminance: np.ndarray
    has_mask: np.ndarray
    files: list[tuple[str, str | None]] = field(default_factory=list)


def draw_pictures(run: Path, view: str, n: int, size: int, masked: bool, store_files: bool, unmasked: int = 0) -> Pictures:
    """Draws `n` images, the last `unmasked` without a mask; with `store_files` they and their masks are written to `run/data`."""
    labels = sample_labels(n, 7)
    lesion, luminance, ids, files = [], [], [], []
    folder = run / "data"
    folder.mkdir(parents=True, exist_ok=True)
    for i, label in enumerate(labels):
        drawing = draw(label, i, size, view == "off-center")
        gray = drawing.image.mean(2).reshape(16, size // 16, 16, size // 16).mean((1, 3)) / 255
        small = Image.fromarray(drawing.mask.astype(np.uint8) * 255).resize((16, 16), Image.Resampling.BILINEAR)
        lesion.append(np.asarray(small).reshape(-1) > 127.5)
        luminance.append(gray.reshape(-1))
        ids.append(f"img_{i:04d}")
        if store_files:
            Image.fromarray(drawing.image).save(folder / f"{ids[-1]}.png")
            Image.fromarray(drawing.mask.astype(np.uint8) * 255).save(folder / f"{ids[-1]}_mask.png")
        files.append((f"data/{ids[-1]}.png", f"data/{ids[-1]}_mask.png" if masked else None))
    index = np.array([CLASSES.index(label) for label in labels])
    lesions = np.array(lesion)
    return Pictures(view, ids, index, lesions, np.array(luminance), lesions.any(1) & masked & (np.arange(n) < n - unmasked), files)


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
    strength = {"attention-entropy": 1.0, "norm": -0.6, "local-contrast": -0.8, "scout": 6.0}[method]
    return 0.3 * strength * pictures.lesion + noise


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


def unit(study: str, method: str, seed: int, pictures: Pictures, budgets: tuple[float, ...], dataset: str) -> pd.DataFrame:
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
                    "dataset": dataset,
                    "view": pictures.view,
                    "method": method,
                    "seed": seed,
                    "budget": budget,
                    "k": k,
                    "n_patches": N,
                    "image_id": pictures.ids,
                    "group": [f"lesion_{i // 2}" for i in range(len(pictures.ids))],
                    "label": pictures.label,
                    "predicted": chances.argmax(1),
                    "label_name": [CLASSES[i] for i in pictures.label],
                    "predicted_name": [CLASSES[i] for i in chances.argmax(1)],
                    "probabilities": list(chances.astype(np.float32)),
                    "lesion": pd.array(lesion, dtype="Int64"),
                    "kept_lesion": pd.array(kept_lesion, dtype="Int64"),
                    "purity": np.where(masked & merger, 0.9 - 0.2 * (1 - budget), np.nan),
                    "lesion_dominated": np.where(masked & merger, 0.8 - 0.2 * (1 - budget), np.nan),
                    "lesion_mass": np.nan,
                }
            )
        )
    rows = pd.concat(frames, ignore_index=True)
    rows["lesion"] = rows["lesion"].mask(rows["lesion"] < 0)
    rows["kept_lesion"] = rows["kept_lesion"].mask(rows["kept_lesion"] < 0)
    return rows[rows["lesion"].notna()] if method == "oracle" and pictures.has_mask.any() else rows


Plan = list[tuple[str, str, int, bool, tuple[float, ...]]]
"""(study, method, seed, off-center, budgets) of every unit."""
ALL_STUDIES = ("main", "robustness", "mask-free", "signals", "curriculum", "toggles", "center-bias", "recipe")


def plan(studies: tuple[str, ...], seeds: tuple[int, ...], methods: tuple[str, ...]) -> Plan:
    """The units of the studies; `methods` are those of the main study."""
    units: Plan = []

    def add(study: str, names: tuple[str, ...], over: tuple[int, ...], budgets: tuple[float, ...], off: bool = False) -> None:
        if study in studies:
            units.extend((study, method, seed, off, budgets) for method in names for seed in over)

    controls = ("center", "darkness", "oracle")
    add("main", methods, seeds[:1], BUDGETS)
    add("robustness", ("lats", OURS, "random", "tome", *controls), seeds, HEADLINE_BUDGETS)
    add("kvasir", ("lats", "random", "tome"), seeds[:1], BUDGETS)
    add("mask-free", ("lats:mask-free", "lats", "random", *controls), seeds, HEADLINE_BUDGETS)
    add("signals", ("lats", "attention-entropy", "norm", "local-contrast", "random", *controls), seeds[:1], (0.3,))
    add("curriculum", ("lats", "lats:fixed-0.5", "random", *controls), seeds[:1], (0.1, 0.2, 0.3, 0.5, 1.0))
    toggles = ("lats", "lats:no-attention", "lats:no-norm", "lats:no-contrast", "random", *controls)
    add("toggles", toggles, seeds[:1], HEADLINE_BUDGETS)
    for off in (False, True):
        add("center-bias", ("lats", OURS, "random", *controls), seeds, HEADLINE_BUDGETS, off)
        add("recipe", ("lats", OURS, "lats:lesion-first-raster", "random", *controls), seeds[:1], HEADLINE_BUDGETS, off)
    return units


def write_training(path: Path, units: list[tuple[str, int]]) -> None:
    """The metrics of training runs whose budget follows the paper's curriculum."""
    lines = []
    for number, (name, seed) in enumerate(units):
        for epoch in range(30):
            share = min(epoch / 20, 1)
            budget = 0.5 if "fixed" in name else 0.25 + 0.125 * (1 + np.cos(np.pi * share))
            fade = float(np.exp(-epoch / 8)) + 0.03 * ((epoch * 7 + number) % 5)
            row = {
                "unit": f"{name}-{seed}",
                "method": name,
                "seed": seed,
                "epoch": epoch,
                "budget": budget,
                "lr": 1e-3 * (1 - epoch / 30),
                "loss": 1.1 + fade,
            }
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


def write_routing(path: Path, sets: list[Pictures], seeds: tuple[int, ...], methods: list[str], learned: list[str]) -> None:
    tensors: dict[str, np.ndarray] = {}
    for pictures in sets:
        prefix = "" if pictures is sets[0] else f"{pictures.view}/"
        tensors[f"{prefix}lesion"] = (pictures.lesion & pictures.has_mask[:, None]).astype(np.uint8)
        tensors[f"{prefix}covered"] = 255 * tensors[f"{prefix}lesion"]
        tensors[f"{prefix}has_mask"] = pictures.has_mask.astype(np.uint8)
        for seed in seeds:
            for method in methods:
                tensors[f"{prefix}order/{method}/{seed}"] = np.ascontiguousarray(order_of(method, pictures, seed).astype(np.int16))
            for method in learned:
                tensors[f"{prefix}scores/{method}/{seed}"] = scores(method, pictures, seed).astype(np.float16)
    about = {"image_ids": {pictures.view: pictures.ids for pictures in sets}, "grid": GRID}
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
    methods: tuple[str, ...] = EVERYTHING,
    learned: tuple[str, ...] = (OURS, "lats", "lats:mask-free", "lats:fixed-0.5"),
    dataset: str = "My clinic",
    source: str = "isic",
    unmasked: int = 0,
) -> Path:
    """Writes a complete run directory and returns it; `learned` methods count as trained, the first one is the main one."""
    run.mkdir(parents=True, exist_ok=True)
    sets = [draw_pictures(run, "as-is", n, size, masked, images, unmasked)]
    if "center-bias" in studies:
        sets.append(draw_pictures(run, "off-center", n, size, masked, False))
    units = plan(studies, seeds, methods)
    rows = pd.concat(
        [unit(study, method, seed, sets[int(off)], budgets, dataset) for study, method, seed, off, budgets in units],
        ignore_index=True,
    )
    write_predictions(run / "predictions.parquet", rows, CLASSES)
    write_results(run / "results.csv", summarize(rows, CLASSES))
    used = list(dict.fromkeys(rows["method"]))
    trained = [m for m in learned if m in used]
    write_training(run / "metrics.jsonl", [(m, s) for m in trained for s in seeds])
    orders = [m for m in methods if m not in ("tome", "no-pruning")]
    write_routing(run / "routing.safetensors", sets, seeds, orders, [m for m in trained if m in orders])
    if images:
        write_manifest(run, sets[0])
    write_sealed(run / "run.json", {**describe(used, trained, seeds, n, dataset, source), "files": hashes(run)})
    return run


def edit_run(run: Path, **changes: object) -> Path:
    """Put other entries into `run.json`, with the hashes of the files that are there now."""
    edit_json(run / "run.json", lambda info: info.update(changes, files=hashes(run)))
    return run


def describe(methods: list[str], trained: list[str], seeds: tuple[int, ...], n: int, dataset: str, source: str) -> dict[str, Any]:
    """The `run.json` of a simulated run."""
    counts = {"images": n, "masks": n, "classes": {"NV": n}, "masked_classes": {"NV": n}, "lesion_patches": None}
    return {
        "format_version": 3,
        "command": "mtb sweep data.parquet --store tokens --out runs/fake",
        "dataset": dataset,
        "source": source,
        "classes": list(CLASSES),
        "manifest": "manifest.parquet",
        "store": "tokens",
        "config": {"recipe": "lesion-first", "epochs": 30},
        "methods": {
            m: {
                "config": {"losses": LESION_ONLY} if m == OURS else {},
                "selector": m.partition(":")[0],
                "head": "mlp",
                "variant": m.partition(":")[2],
                "learned": m in trained,
            }
            for m in methods
        },
        "main": trained[0] if trained else None,
        "studies": [],
        "units": [],
        "seeds": list(seeds),
        "versions": {"medtokenbudget": "0.1.0", "python": "3.11", "torch": "2.0"},
        "hashes": {"manifest": "0" * 64, "store": "1" * 64, "split": "2" * 64},
        "backbone": {"name": "embedded", "image_size": 224},
        "counts": {"train": counts | {"images": 96}, "val": counts},
    }
