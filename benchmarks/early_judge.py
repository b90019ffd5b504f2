"""The judge of the study `early_study`: heads on pooled means, across folds of the training side and once on validation images."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from sklearn.model_selection import StratifiedGroupKFold

from medtokenbudget.config import preset
from medtokenbudget.data import Manifest
from medtokenbudget.metrics import accuracy, balanced_accuracy, macro_f1, retention_of_counts
from medtokenbudget.training.trainer import batches_of_pooled, fit_head, new_head

FOLDS = 3
DRAWS = 500
BASES = ("dense", "after", "after-center", "embedded", "tome", "dense-140px", "dense-154px")
"""What the others are compared with: dense, routed after the backbone, and what would embarrass each way."""


def folds_of(training: pd.DataFrame) -> list[np.ndarray]:
    """Positions of the rows that each fold holds out; images of one lesion are in one fold."""
    label = training["label"].to_numpy()
    groups = training["group"].fillna(training["image_id"]).to_numpy()
    return [held for _, held in StratifiedGroupKFold(FOLDS, shuffle=True, random_state=0).split(label, label, groups)]


def pooled_of(folder: Path, part: str) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Rows of the manifest, and arrays by name, of the images that every stored group has."""
    groups: dict[str, dict[str, list[np.ndarray]]] = {}
    for path in sorted(folder.glob(f"*-{part}-[0-9][0-9][0-9][0-9][0-9].npz")):
        found = groups.setdefault(path.name.split(f"-{part}-")[0], {})
        with np.load(path) as stored:
            for name in stored.files:
                found.setdefault(name, []).append(stored[name])
    joined = {group: {name: np.concatenate(parts) for name, parts in found.items()} for group, found in groups.items()}
    rows = np.array(sorted(set.intersection(*(set(found["row"].tolist()) for found in joined.values()))))
    arrays: dict[str, np.ndarray] = {}
    for group in joined.values():
        at = np.searchsorted(group["row"], rows)
        arrays |= {name: values[at] for name, values in group.items() if name != "row"}
    return rows, arrays


class Task:
    """Images with their classes, and which of them are for training."""

    def __init__(self, manifest: Manifest, rows: np.ndarray) -> None:
        self.rows, self.table = rows, manifest.rows.iloc[rows].reset_index(drop=True)
        self.label, self.classes = manifest.label_index[rows], len(manifest.classes)
        self.train = (self.table["split"] == "train").to_numpy()

    def answers(self, means: np.ndarray, learn: np.ndarray, test: np.ndarray, seed: int) -> np.ndarray:
        """Classes that a head which learned on the means of `learn` gives the means `test`."""
        config, label = preset("lesion-first", seed=seed, device="cpu"), self.label[learn]
        head = new_head("mlp", means.shape[1], self.classes, config)
        fit_head(head, batches_of_pooled(means[learn][:, None].astype(np.float32), label, config, self.classes), label, config)
        with torch.no_grad():
            answers: np.ndarray = head(torch.from_numpy(test.astype(np.float32))).argmax(-1).numpy()
        return answers


def scores_of(label: np.ndarray, answers: np.ndarray, classes: int) -> np.ndarray:
    """Accuracy, macro F1 and balanced accuracy of answers [seeds, n], in percent: [seeds, 3]."""
    one = [(accuracy(label, row), macro_f1(label, row, classes), balanced_accuracy(label, row, classes)) for row in answers]
    return 100 * np.array(one)


def line_of(name: str, scores: np.ndarray, n: int) -> dict[str, Any]:
    way, _, block = name.partition("@")
    values = dict(zip(("accuracy", "macro_f1", "balanced_accuracy"), scores.mean(0).tolist()))
    return {"way": way, "block": int(block), "n": n, "seeds": len(scores), **values, "sd_f1": float(scores[:, 1].std())}


def inner(arguments: argparse.Namespace) -> None:
    """Out-of-fold scores on the training side. Lines that are there already are not made again."""
    torch.set_num_threads(1)
    manifest = Manifest.read(arguments.manifest)
    rows, arrays = pooled_of(arguments.out, "as-is")
    task, path = Task(manifest, rows), arguments.out / "inner.csv"
    held = [np.flatnonzero(task.train)[one] for one in folds_of(task.table[task.train].reset_index(drop=True))]
    known = pd.read_csv(path) if path.exists() else pd.DataFrame()
    done = {f"{line.way}@{line.block}" for line in known.itertuples()}
    lines: list[Any] = known.to_dict("records")
    n = int(task.train.sum())
    for name, means in arrays.items():
        if "@" not in name or name in done or not re.fullmatch(arguments.ways, name):
            continue
        answers = np.zeros((len(arguments.seeds), len(rows)), np.int64)
        for number, seed in enumerate(arguments.seeds):
            for test in held:
                learn = np.setdiff1d(np.flatnonzero(task.train), test)
                answers[number, test] = task.answers(means, learn, means[test], seed)
        lines.append(line_of(name, scores_of(task.label[task.train], answers[:, task.train], task.classes), n))
        print(f"{name:<26} macro F1 {lines[-1]['macro_f1']:.1f}  balanced {lines[-1]['balanced_accuracy']:.1f}", flush=True)
        pd.DataFrame(lines).round(3).to_csv(path, index=False)


def chosen(folder: Path, there: Iterable[str]) -> list[str]:
    """Every way of `there` at the block that the inner folds prefer; what they did not judge, at the block of its relatives."""
    lines = pd.read_csv(folder / "inner.csv")
    best = {way: int(group["block"].iloc[-1]) for way, group in lines.sort_values("macro_f1").groupby("way")}
    blocks: dict[str, list[int]] = {}
    for name in there:
        way, at, block = name.partition("@")
        if at:
            blocks.setdefault(way, []).append(int(block))
    relatives = {"dense-": best.get("dense"), "after-": best.get("after"), "inside-": best.get("inside-4-token")}
    found = {}
    for way, own in blocks.items():
        near = next((block for start, block in relatives.items() if way.startswith(start) and block in own), None)
        found[way] = best.get(way, max(own) if near is None else near)
    return [f"{way}@{block}" for way, block in found.items()]


def validation(arguments: argparse.Namespace) -> None:
    """Heads of the whole training side on validation images as they are and off-center, with intervals of differences."""
    torch.set_num_threads(1)
    manifest = Manifest.read(arguments.manifest)
    rows, arrays = pooled_of(arguments.out, "as-is")
    task = Task(manifest, rows)
    learn = np.flatnonzero(task.train)
    if not arguments.ways:
        arguments.ways = chosen(arguments.out, arrays)
        after = next(name for name in arguments.ways if name.startswith("after@"))
        arguments.ways = sorted({*arguments.ways, after.replace("after", "dense")})
    against = arguments.against or [name for name in arguments.ways if name.partition("@")[0] in BASES]
    parts = {"as-is": (task.label[~task.train], {name: arrays[name][~task.train] for name in arguments.ways})}
    if list(arguments.out.glob("*-off-center-[0-9]*.npz")):
        others, off = pooled_of(arguments.out, "off-center")
        parts["off-center"] = (manifest.label_index[others], {name: off[name] for name in arguments.ways if name in off})
    answers: dict[str, dict[str, list[np.ndarray]]] = {part: {name: [] for name in found} for part, (_, found) in parts.items()}
    for name in arguments.ways:
        tests = [part for part, (_, found) in parts.items() if name in found]
        joined = np.concatenate([parts[part][1][name] for part in tests])
        cuts = np.cumsum([len(parts[part][0]) for part in tests])[:-1]
        for seed in arguments.seeds:
            for part, found in zip(tests, np.split(task.answers(arrays[name], learn, joined, seed), cuts)):
                answers[part][name].append(found)
    lines = [
        {"view": part, **line}
        for part, (label, _) in parts.items()
        for line in compared(label, {name: np.stack(own) for name, own in answers[part].items()}, task.classes, against)
    ]
    pd.DataFrame(lines).round(3).to_csv(arguments.out / "validation.csv", index=False)
    pd.DataFrame(retentions(arguments.out, manifest)).round(4).to_csv(arguments.out / "retention.csv", index=False)


def compared(label: np.ndarray, answers: dict[str, np.ndarray], classes: int, against: list[str]) -> Iterator[dict[str, Any]]:
    """Scores with their intervals, and differences to the ways `against` with theirs: the same images drawn again for both."""
    draws = np.random.default_rng(0).integers(0, len(label), (DRAWS, len(label)))
    drawn = {
        name: np.stack([scores_of(label[draw], own[:, draw], classes).mean(0) for draw in draws]) for name, own in answers.items()
    }
    for name, own in answers.items():
        scores = scores_of(label, own, classes)
        line = line_of(name, scores, len(label))
        for column, metric in enumerate(("accuracy", "macro_f1", "balanced_accuracy")):
            line[f"low_{metric}"], line[f"high_{metric}"] = np.percentile(drawn[name][:, column], [2.5, 97.5])
        for base in (one for one in against if one in answers):
            over = scores.mean(0) - scores_of(label, answers[base], classes).mean(0)
            low, high = np.percentile(drawn[name] - drawn[base], [2.5, 97.5], axis=0)
            line |= {f"over_{base}": over[1], f"low_{base}": low[1], f"high_{base}": high[1]}
        print({key: round(value, 1) if isinstance(value, float) else value for key, value in line.items()}, flush=True)
        yield line


def retentions(folder: Path, manifest: Manifest) -> Iterator[dict[str, Any]]:
    """How much of the lesion each choice of 76 patches keeps of the validation images."""
    for part in ("as-is", "off-center"):
        if not list(folder.glob(f"*-{part}-[0-9]*.npz")):
            continue
        rows, arrays = pooled_of(folder, part)
        with np.load(folder / f"scores-{part}.npz") as stored:
            at = np.searchsorted(stored["row"], rows)
            lesion, scores = stored["lesion"][at].astype(np.int64), stored["scores"][at]
        kept = {name.removeprefix("kept:"): values for name, values in arrays.items() if name.startswith("kept:")}
        kept["scout"] = np.argsort(-scores, axis=1, kind="stable")[:, :76]
        val = (manifest.rows["split"].to_numpy()[rows] == "val") & (lesion.sum(1) > 0)
        for name, chosen in kept.items():
            hit, total = np.take_along_axis(lesion, chosen.astype(np.int64), 1).sum(1)[val], lesion.sum(1)[val]
            found = retention_of_counts(hit, total, np.full(len(total), chosen.shape[1]), np.full(len(total), lesion.shape[1]))
            yield {"view": part, "way": name, "n": found.n, "retention": found.pooled, "of_ceiling": found.of_ceiling}
