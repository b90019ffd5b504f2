"""A run directory without any training: drawn images with real masks and luminance, simulated selectors and classifiers.

The report only reads files, so its tests need a run directory whose numbers all follow from `predictions.parquet`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from PIL import Image
from safetensors.numpy import save_file

from medtokenbudget.config import BUDGETS, HEADLINE_BUDGETS
from medtokenbudget.data import Manifest
from medtokenbudget.data.readers import ISIC_CLASSES as CLASSES
from medtokenbudget.data.synthetic import draw, sample_labels
from medtokenbudget.files import write_sealed
from medtokenbudget.metrics import kept_lesion_counts
from medtokenbudget.runs.run import hashes, summarize, write_predictions, write_results
from tests.bad_input.damage import edit_json

N, SIZE = 256, 64
OURS = "lats:lesion-first"
LESION_ONLY = {"classification": 0.0, "diversity": 0.0, "lesion": 1.0, "distillation": 0.0}
RANKERS = ("random", "norm", "attention-entropy", "local-contrast", "lats", OURS, "center", "darkness", "oracle")
# How much of a class each method's head learns from a pure lesion: only used to make accuracies that differ a little.
SKILL = {"tome": 2.1, "random": 2.1, "norm": 1.7, "attention-entropy": 1.8, "local-contrast": 1.9, "oracle": 2.4}
NOISE = {"lats": 0.45, "lats:mask-free": 1.6, "lats:fixed-0.5": 0.5, OURS: 0.3}
STRENGTH = {"attention-entropy": 1.0, "norm": -0.6, "local-contrast": -0.8, "lookout": 6.0}

C = ("center", "darkness", "oracle")
STUDIES: dict[str, tuple[tuple[str, ...], tuple[float, ...]]] = {
    "robustness": (("lats", OURS, "random", "tome", *C), HEADLINE_BUDGETS),
    "kvasir": (("lats", "random", "tome"), BUDGETS),
    "mask-free": (("lats:mask-free", "lats", "random", *C), HEADLINE_BUDGETS),
    "signals": (("lats", "attention-entropy", "norm", "local-contrast", "random", *C), (0.3,)),
    "curriculum": (("lats", "lats:fixed-0.5", "random", *C), (0.1, 0.2, 0.3, 0.5, 1.0)),
    "toggles": (("lats", "lats:no-attention", "lats:no-norm", "lats:no-contrast", "random", *C), HEADLINE_BUDGETS),
    "center-bias": (("lats", OURS, "random", *C), HEADLINE_BUDGETS),
    "recipe": (("lats", OURS, "lats:lesion-first-raster", "random", *C), HEADLINE_BUDGETS),
}
"""Methods and budgets of every study but `main`."""
EVERY_SEED = ("robustness", "mask-free", "center-bias")
BOTH_VIEWS = ("center-bias", "recipe")


@dataclass
class Pictures:
    """Drawn images of one view: ids, labels `[n]`, lesion patches `[n, N]`, luminance `[n, N]`."""

    view: str
    ids: list[str]
    label: np.ndarray
    lesion: np.ndarray
    luminance: np.ndarray
    has_mask: np.ndarray

    @classmethod
    def draw(cls, view: str, n: int, masks: int, folder: Path | None = None) -> Pictures:
        """Draw `n` images, the first `masks` with a mask, and write them and their masks into `folder`."""
        labels, ids, lesion, luminance = sample_labels(n, 7), [f"img_{i:04d}" for i in range(n)], [], []
        for i, label in enumerate(labels):
            drawing = draw(label, i, SIZE, view == "off-center")
            image, mask = Image.fromarray(drawing.image), Image.fromarray(drawing.mask.astype(np.uint8) * 255)
            lesion.append(np.asarray(mask.resize((16, 16), Image.Resampling.BILINEAR)).reshape(-1) > 127.5)
            luminance.append((drawing.image.mean(2).reshape(16, SIZE // 16, 16, SIZE // 16).mean((1, 3)) / 255).reshape(-1))
            if folder is not None:
                folder.mkdir(parents=True, exist_ok=True)
                image.save(folder / f"{ids[i]}.png")
                mask.save(folder / f"{ids[i]}_mask.png")
        index = np.array([CLASSES.index(label) for label in labels])
        return cls(view, ids, index, np.array(lesion), np.array(luminance), np.array(lesion).any(1) & (np.arange(n) < masks))

    def scores(self, method: str, seed: int) -> np.ndarray:
        """Patch scores `[n, N]` of a simulated ranker; `lats` sees the lesion through noise, the controls are what they are."""
        noise = np.random.default_rng([seed, len(method), sum(map(ord, method))]).normal(size=self.lesion.shape)
        y, x = np.divmod(np.arange(N), 16)
        middle = np.broadcast_to(-np.hypot(y - 7.5, x - 7.5), self.lesion.shape)
        if method.startswith("lats"):
            hard = np.linspace(0.5, 1.8, len(self.ids))[:, None]
            return 1 / (1 + np.exp(-(2.5 * self.lesion - 1.2 + 0.15 * middle + NOISE.get(method, 0.8) * hard * noise * 1.5)))
        if method in STRENGTH:
            return 0.3 * STRENGTH[method] * self.lesion + noise
        return {"center": middle, "darkness": -self.luminance, "oracle": self.lesion + 0.0, "random": noise}[method]

    def order(self, method: str, seed: int) -> np.ndarray:
        return np.argsort(-self.scores(method, seed), axis=1, kind="stable")

    def probabilities(self, method: str, kept_lesion: np.ndarray, k: int, seed: int) -> np.ndarray:
        """Class probabilities `[n, C]`: better the more of the kept patches are lesion."""
        rng = np.random.default_rng([seed, sum(map(ord, method))])
        logits = rng.normal(size=(len(self.ids), len(CLASSES)))
        logits[np.arange(len(self.ids)), self.label] += SKILL.get(method.split(":")[0], 2.2) * (0.5 + kept_lesion / k)
        exponent = np.exp(1.4 * logits)
        return exponent / exponent.sum(1, keepdims=True)

    def predictions(self, study: str, method: str, seed: int, budget: float, dataset: str) -> pd.DataFrame:
        """The prediction rows of one method, seed and budget."""
        merger, everything = method == "tome", method in ("tome", "no-pruning")
        k = N if method == "no-pruning" else max(16, int(budget * N + 1e-9))
        lesion = self.lesion.sum(1)
        kept = lesion if everything else kept_lesion_counts(self.order(method, seed), self.lesion, [k])[:, 0]
        chances = self.probabilities(method, kept, N if everything else k, seed)
        names, merged = np.array(CLASSES), self.has_mask & merger
        rows = {
            **{"study": study, "dataset": dataset, "view": self.view, "method": method, "seed": seed, "budget": budget},
            **{"k": k, "n_patches": N, "image_id": self.ids, "group": [f"lesion_{i // 2}" for i in range(len(self.ids))]},
            **{"label": self.label, "predicted": chances.argmax(1)},
            **{"label_name": names[self.label], "predicted_name": names[chances.argmax(1)]},
            "probabilities": list(chances.astype(np.float32)),
            "lesion": pd.array(lesion, dtype="Int64"),
            "kept_lesion": pd.array(kept, dtype="Int64"),
            "purity": np.where(merged, 0.9 - 0.2 * (1 - budget), np.nan),
            "lesion_dominated": np.where(merged, 0.8 - 0.2 * (1 - budget), np.nan),
            "lesion_mass": np.nan,
        }
        frame = pd.DataFrame(rows)
        frame["lesion"] = frame["lesion"].where(self.has_mask)
        frame["kept_lesion"] = frame["kept_lesion"].where(self.has_mask & (not merger))
        return frame[self.has_mask] if method == "oracle" and self.has_mask.any() else frame


def training_rows(methods: list[str], seeds: tuple[int, ...]) -> list[dict[str, Any]]:
    """The metrics of training runs whose budget follows the paper's curriculum."""
    rows = []
    for (number, (method, seed)), epoch in product(enumerate(product(methods, seeds)), range(30)):
        budget = 0.5 if "fixed" in method else 0.25 + 0.125 * (1 + np.cos(np.pi * min(epoch / 20, 1)))
        fade = float(np.exp(-epoch / 8)) + 0.03 * ((epoch * 7 + number) % 5)
        terms = {"classification": 0.9 + fade, "diversity": 0.5 + 0.2 * fade, "lesion": 0.2 + 0.4 * fade}
        unit = {"unit": f"{method}-{seed}", "method": method, "seed": seed, "epoch": epoch, "budget": budget}
        rows.append({**unit, **terms, "distillation": 0.05 + 0.1 * fade, "loss": 1.1 + fade})
    return rows


def write_routing(path: Path, sets: list[Pictures], seeds: tuple[int, ...], methods: list[str], learned: list[str]) -> None:
    tensors: dict[str, np.ndarray] = {}
    for pictures in sets:
        prefix = "" if pictures is sets[0] else f"{pictures.view}/"
        tensors[f"{prefix}lesion"] = (pictures.lesion & pictures.has_mask[:, None]).astype(np.uint8)
        tensors[f"{prefix}covered"] = 255 * tensors[f"{prefix}lesion"]
        tensors[f"{prefix}has_mask"] = pictures.has_mask.astype(np.uint8)
        for method, seed in product(methods, seeds):
            tensors[f"{prefix}order/{method}/{seed}"] = np.ascontiguousarray(pictures.order(method, seed).astype(np.int16))
            if method in learned:
                tensors[f"{prefix}scores/{method}/{seed}"] = pictures.scores(method, seed).astype(np.float16)
    about = {"image_ids": {pictures.view: pictures.ids for pictures in sets}, "grid": (16, 16)}
    save_file(tensors, path, metadata={"routing": json.dumps(about)})


def write_manifest(run: Path, pictures: Pictures, masked: bool) -> None:
    rows = pd.DataFrame({"image_id": pictures.ids, "label": np.array(CLASSES)[pictures.label], "group": None, "split": "val"})
    rows["image"] = [f"data/{name}.png" for name in pictures.ids]
    rows["mask"] = [f"data/{name}_mask.png" if masked else None for name in pictures.ids]
    Manifest(rows, CLASSES, run, "synthetic").write(run / "manifest.parquet")


def fake_run(
    run: Path,
    n: int = 24,
    seeds: tuple[int, ...] = (42, 43),
    studies: tuple[str, ...] = ("main", *(study for study in STUDIES if study != "kvasir")),
    masked: bool = True,
    images: bool = True,
    methods: tuple[str, ...] = ("no-pruning", "tome", *RANKERS),
    learned: tuple[str, ...] = (OURS, "lats", "lats:mask-free", "lats:fixed-0.5"),
    dataset: str = "My clinic",
    source: str = "isic",
    unmasked: int = 0,
) -> Path:
    """Write a complete run directory and return it.

    `methods` are those of the main study; `learned` ones count as trained, the first of them is the main method.
    """
    run.mkdir(parents=True, exist_ok=True)
    masks = n - unmasked if masked else 0
    sets = [Pictures.draw("as-is", n, masks, run / "data" if images else None)]
    if set(BOTH_VIEWS) & set(studies):
        sets.append(Pictures.draw("off-center", n, masks))
    frames = []
    for study, (names, budgets) in {"main": (methods, BUDGETS), **STUDIES}.items():
        if study in studies:
            over = seeds if study in EVERY_SEED else seeds[:1]
            for pictures, method, seed, budget in product(sets if study in BOTH_VIEWS else sets[:1], names, over, budgets):
                frames.append(pictures.predictions(study, method, seed, budget, dataset))
    rows = pd.concat(frames, ignore_index=True)
    write_predictions(run / "predictions.parquet", rows, CLASSES)
    write_results(run / "results.csv", summarize(rows, CLASSES))
    used = list(dict.fromkeys(rows["method"]))
    trained = [m for m in learned if m in used]
    (run / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in training_rows(trained, seeds)))
    write_routing(run / "routing.safetensors", sets, seeds, [m for m in methods if m not in ("tome", "no-pruning")], trained)
    if images:
        write_manifest(run, sets[0], masked)
    write_sealed(run / "run.json", {**describe(used, trained, seeds, n, dataset, source), "files": hashes(run)})
    return run


def edit_run(run: Path, **changes: object) -> Path:
    """Put other entries into `run.json`, with the hashes of the files that are there now."""
    edit_json(run / "run.json", lambda info: info.update(changes, files=hashes(run)))
    return run


def describe(methods: list[str], trained: list[str], seeds: tuple[int, ...], n: int, dataset: str, source: str) -> dict[str, Any]:
    """The `run.json` of a simulated run."""
    counts = {"images": n, "masks": n, "classes": {"NV": n}, "masked_classes": {"NV": n}, "lesion_patches": None}
    about = {}
    for method in methods:
        selector, _, variant = method.partition(":")
        config = {"losses": LESION_ONLY} if method == OURS else {}
        about[method] = {"config": config, "selector": selector, "head": "mlp", "variant": variant, "learned": method in trained}
    return {
        "format_version": 3,
        "command": "mtb sweep data.parquet --store tokens --out runs/fake",
        **{"dataset": dataset, "source": source, "classes": list(CLASSES), "manifest": "manifest.parquet", "store": "tokens"},
        **{"config": {"recipe": "lesion-first", "epochs": 30}, "methods": about, "main": trained[0] if trained else None},
        **{"studies": [], "units": [], "seeds": list(seeds)},
        "versions": {"medtokenbudget": "0.1.0", "python": "3.11", "torch": "2.0"},
        "hashes": {"manifest": "0" * 64, "store": "1" * 64, "split": "2" * 64},
        "backbone": {"name": "embedded", "image_size": 224},
        "counts": {"train": counts | {"images": 96}, "val": counts},
    }
