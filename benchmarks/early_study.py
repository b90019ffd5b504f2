"""The study behind docs/results/early-routing.md: what each way of routing early costs in macro F1, on real images.

It needs images, not only a store, so it is a script of the checkout. Three steps, each resumable piece by piece:

    python -m benchmarks.early_study pool --manifest M --weights W --scout RUN --out DIR --group dense
    python -m benchmarks.early_study judge --manifest M --out DIR
    python -m benchmarks.early_study time --weights W --scout RUN --out DIR

`pool` runs a group of ways over the images and stores the mean of the tokens that a head would read, for several blocks of one
pass. `judge` trains heads on exactly these means: first across folds of the training side (grouped), where everything is chosen,
then once on the whole training side for the validation images. `time` measures milliseconds per image, interleaved.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from PIL import Image
from torch import Tensor

from medtokenbudget.config import BackboneConfig, preset
from medtokenbudget.data import Manifest, decode_image, mask_of, patch_labels
from medtokenbudget.errors import RequestError
from medtokenbudget.experiments.competitors import evit_blocks, tome_every_block
from medtokenbudget.features import routed_pass, views
from medtokenbudget.features.backbone import Backbone
from medtokenbudget.metrics import accuracy, balanced_accuracy, macro_f1, retention_of_counts
from medtokenbudget.model import MedTokenBudget, load
from medtokenbudget.training.pooled import PooledHead, probabilities

BACKBONE = "vit_small_patch14_dinov2.lvd142m"
BUDGET, K = 0.3, 76
BATCH = 16
MARGIN = 1.2

Means = dict[str, np.ndarray]
"""Mean tokens [B, D] by 'way@block'."""


class Scout:
    """The small model that looks first: scores of 16 x 16 patches, and the box of the kept ones."""

    def __init__(self, path: str) -> None:
        self.model: MedTokenBudget = load(path, device="cpu")
        self.selector: Any = self.model.classifier().selector
        self.backbone = self.model.backbone

    @torch.inference_mode()
    def scores(self, pictures: list[Image.Image]) -> Tensor:
        return self.of_pixels(np.stack([self.backbone.prepare(picture) for picture in pictures]))

    @torch.inference_mode()
    def of_pixels(self, pixels: np.ndarray) -> Tensor:
        tokens = self.backbone.tokens(self.backbone.normalize(torch.from_numpy(pixels)))
        scores: Tensor = self.selector.score(tokens)
        return scores


def top(scores: Tensor, k: int) -> Tensor:
    return scores.argsort(dim=1, descending=True, stable=True)[:, :k]


def zoom_box(kept: np.ndarray, side: int, margin: float) -> views.Box:
    """The square around the kept patches, enlarged by the margin and moved into the image."""
    rows, columns = kept // side, kept % side
    top_, bottom, left, right = rows.min() / side, (rows.max() + 1) / side, columns.min() / side, (columns.max() + 1) / side
    size = min(1.0, margin * max(bottom - top_, right - left))
    x = float(np.clip((left + right) / 2 - size / 2, 0, 1 - size))
    y = float(np.clip((top_ + bottom) / 2 - size / 2, 0, 1 - size))
    return (x, y, x + size, y + size)


def centered(box: views.Box) -> views.Box:
    size = box[2] - box[0]
    return (0.5 - size / 2, 0.5 - size / 2, 0.5 + size / 2, 0.5 + size / 2)


# Means of one pass at several blocks ----------------------------------------------------------------------------------


def means(model: Any, x: Tensor, first: int, blocks: list[int], way: str, k: int, bias: Tensor | None = None) -> Iterator[Any]:
    """Run the blocks after `first` and yield ('way@block', mean of the k patch tokens) for the wanted blocks."""
    prefix = int(model.num_prefix_tokens)
    for number in range(first, max(blocks) + 1):
        x = routed_pass.run_blocks(model, x, number, number + 1, bias)
        if number in blocks:
            yield f"{way}@{number}", model.norm(x)[:, prefix : prefix + k].mean(1)


class Passes:
    """The groups of ways, each from pictures and scout scores to means."""

    def __init__(self, weights: Path, blocks: list[int], inside: Callable[[Any], Tensor] | None = None) -> None:
        self.weights, self.blocks, self.inside = weights, blocks, inside
        self.backbones: dict[int, Backbone] = {}

    def backbone(self, size: int = 224) -> Backbone:
        if size not in self.backbones:
            config = BackboneConfig(name=BACKBONE, weights=self.weights, image_size=size, attention="pseudo")
            self.backbones[size] = Backbone.load(config)
        return self.backbones[size]

    def images(self, pictures: list[Image.Image], size: int = 224) -> Tensor:
        backbone = self.backbone(size)
        return backbone.normalize(torch.from_numpy(np.stack([backbone.prepare(picture) for picture in pictures])))

    def dense(self, pictures: list[Image.Image], scores: Tensor) -> Iterator[Any]:
        """All patches, and the paper's way: the scout's patches chosen after the backbone."""
        model, prefix, kept = self.backbone().model, 1, top(scores, K)
        x = routed_pass.embed(model, self.images(pictures))
        for number in range(max(self.blocks) + 1):
            x = routed_pass.run_blocks(model, x, number, number + 1)
            if number in self.blocks:
                normed = model.norm(x)[:, prefix:]
                yield f"dense@{number}", normed.mean(1)
                yield f"after@{number}", routed_pass.take(normed, kept).mean(1)

    def early(self, pictures: list[Image.Image], scores: Tensor) -> Iterator[Any]:
        """The scout's patches from block 0, and inside before several blocks, dropped or with a background token."""
        model, images, kept = self.backbone().model, self.images(pictures), top(scores, K)
        yield from means(model, routed_pass.embed(model, images, kept), 0, self.blocks, "scout-0.3", K)
        half = top(scores, 128)
        yield from means(model, routed_pass.embed(model, images, half), 0, self.blocks, "scout-0.5", 128)
        x, done = routed_pass.embed(model, images), 0
        for place in (2, 4, 6):
            x, done = routed_pass.run_blocks(model, x, done, place), place
            for background in ("drop", "token"):
                pruned, bias = routed_pass.prune(x, kept, 1, background)  # type: ignore[arg-type]
                yield from means(model, pruned, place, self.blocks, f"inside-{place}-{background}", K, bias)

    def others(self, pictures: list[Image.Image], scores: Tensor) -> Iterator[Any]:
        """ToMe in every block and EViT at blocks 3, 6 and 9, down to the same K; a smaller dense image; a larger routed one."""
        model, images, last = self.backbone().model, self.images(pictures), max(self.blocks)
        yield f"tome@{last}", tome_every_block(model, images, K, last).mean(1)
        yield f"evit@{last}", evit_blocks(model, images, K, last)[0].mean(1)
        for size in (154,):
            small = self.backbone(size).model
            count = (size // 14) ** 2
            yield from means(small, routed_pass.embed(small, self.images(pictures, size)), 0, self.blocks, f"dense-{size}px", count)
        large = self.backbone(448).model
        finer = torch.nn.functional.interpolate(scores.view(-1, 1, 16, 16), scale_factor=2, mode="bilinear").flatten(1)
        kept = top(finer, 102)
        x = routed_pass.embed(large, self.images(pictures, 448), kept)
        yield from means(large, x, 0, self.blocks, "scout-448px-102", 102)

    def zoom(self, pictures: list[Image.Image], scores: Tensor) -> Iterator[Any]:
        """The whole grid on the box of the scout's patches, and on a box of the same size around the image center."""
        kept, model = top(scores, K).numpy(), self.backbone().model
        boxes = [zoom_box(row, 16, MARGIN) for row in kept]
        for way, chosen in (("zoom", boxes), ("zoom-center", [centered(box) for box in boxes])):
            crops = [views.Geometry(box).of(picture) for box, picture in zip(chosen, pictures)]
            yield from means(model, routed_pass.embed(model, self.images(crops)), 0, self.blocks, way, 256)


# Step 1: pool ---------------------------------------------------------------------------------------------------------


def rows_of(manifest: Manifest, part: str) -> list[tuple[int, str]]:
    """Rows of the study: every image as it is, and the off-center crop of each validation ('val') or training ('train') image."""
    split = manifest.rows["split"].tolist()
    if part == "as-is":
        return [(i, views.IDENTITY) for i in range(len(manifest))]
    return [(i, views.OFF_CENTER) for i in range(len(manifest)) if split[i] == part.removeprefix("off-center-")]


def picture_of(manifest: Manifest, i: int, view: str) -> tuple[Image.Image, np.ndarray] | None:
    """The view and its lesion patches [256]; None where the lesion is too large for an off-center crop."""
    image = decode_image(manifest.image_path(i))
    mask_file = manifest.mask_path(i)
    assert mask_file is not None
    mask = mask_of(image.size, mask_file)
    try:
        geometry = views.geometry_of(view, mask, views.image_seed(0, manifest.ids[i]))
    except RequestError:
        return None
    return geometry.of(image), patch_labels(geometry.of(mask), (16, 16))


@torch.inference_mode()
def pool(arguments: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    manifest = Manifest.read(arguments.manifest)
    rows = rows_of(manifest, arguments.part)
    scout, passes = Scout(arguments.scout), Passes(arguments.weights, sorted(arguments.blocks))
    group = getattr(passes, arguments.group)
    piece = 256
    for start in range(0, len(rows), piece):
        path = arguments.out / f"{arguments.group}-{arguments.part}-{start:05d}.npz"
        if path.exists():
            continue
        found: dict[str, list[np.ndarray]] = {}
        for first in range(start, min(start + piece, len(rows)), BATCH):
            batch = [(row, picture_of(manifest, *row)) for row in rows[first : min(first + BATCH, start + piece)]]
            good = [(row, *made) for row, made in batch if made is not None]
            scores = scout.scores([picture for _, picture, _ in good])
            found.setdefault("row", []).append(np.array([row[0] for row, *_ in good]))
            found.setdefault("lesion", []).append(np.stack([lesion for *_, lesion in good]))
            found.setdefault("scores", []).append(scores.numpy())
            for name, value in group([picture for _, picture, _ in good], scores):
                found.setdefault(name, []).append(value.numpy())
        temporary = path.with_suffix(".part.npz")
        np.savez(temporary, **{name: np.concatenate(parts) for name, parts in found.items()})
        temporary.rename(path)
        print(path.name, flush=True)


# Step 2: judge --------------------------------------------------------------------------------------------------------


def pooled_of(folder: Path, part: str) -> tuple[np.ndarray, dict[str, np.ndarray], np.ndarray, np.ndarray]:
    """Rows of the manifest, means by 'way@block', scores and lesion patches; of the images that every group has."""
    groups: dict[str, dict[str, np.ndarray]] = {}
    for path in sorted(folder.glob(f"*-{part}-[0-9]*.npz")):
        if ".part." in path.name:
            continue
        found = groups.setdefault(path.name.split("-")[0], {})
        with np.load(path) as stored:
            for name in stored.files:
                found[name] = np.concatenate([found[name], stored[name]]) if name in found else stored[name]
    common = np.array(sorted(set.intersection(*(set(found["row"].tolist()) for found in groups.values()))))
    means_: dict[str, np.ndarray] = {}
    for found in groups.values():
        place = {row: i for i, row in enumerate(found["row"].tolist())}
        at = [place[row] for row in common.tolist()]
        means_ |= {name: value[at] for name, value in found.items() if "@" in name}
        scores, lesion = found["scores"][at], found["lesion"][at]
    return common, means_, scores, lesion


def fitted(means_: np.ndarray, label: np.ndarray, classes: int, seed: int) -> Any:
    """The head of our preset, trained on these means alone."""
    head = PooledHead("mlp", means_.shape[1], classes, preset("lesion-first", seed=seed, device="cpu"))
    head.train_on_file(means_[:, None].astype(np.float32), label)
    return head.head


def predicted(head: Any, means_: np.ndarray) -> np.ndarray:
    found: np.ndarray = probabilities(head, means_[:, None].astype(np.float32))[:, 0].argmax(-1)
    return found


def scores_of(label: np.ndarray, answers: np.ndarray, classes: int) -> np.ndarray:
    """Accuracy, macro F1 and balanced accuracy, each the mean over the seeds, of answers [seeds, n], in percent."""
    found = [(accuracy(label, one), macro_f1(label, one, classes), balanced_accuracy(label, one, classes)) for one in answers]
    return 100 * np.mean(found, axis=0)


def inner(means_: dict[str, np.ndarray], label: np.ndarray, groups: np.ndarray, classes: int, seeds: list[int]) -> Iterator[Any]:
    """Out-of-fold scores on the training side, three grouped folds: what everything is chosen by."""
    from sklearn.model_selection import StratifiedGroupKFold

    folds = list(StratifiedGroupKFold(3, shuffle=True, random_state=0).split(label, label, groups))
    for name, values in means_.items():
        answers = np.zeros((len(seeds), len(label)), np.int64)
        for number, seed in enumerate(seeds):
            for learn, held in folds:
                answers[number, held] = predicted(fitted(values[learn], label[learn], classes, seed), values[held])
        yield name, scores_of(label, answers, classes)


def say_retention(scores: np.ndarray, lesion: np.ndarray, val: np.ndarray) -> None:
    """How much of the lesion the scout's patches keep of the validation images: the same before, inside and after the backbone."""
    order = np.argsort(-scores[val], axis=1, kind="stable")[:, :K]
    kept, total = np.take_along_axis(lesion[val], order, 1).sum(1), lesion[val].sum(1)
    found = retention_of_counts(kept, total, np.full(len(total), K), np.full(len(total), 256))
    print(f"The scout keeps {found.pooled:.1%} of the lesion, {found.of_ceiling:.1%} of the ceiling (n = {found.n}).")


def judge(arguments: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    manifest = Manifest.read(arguments.manifest)
    rows, means_, scores, lesion = pooled_of(arguments.out, "as-is")
    say_retention(scores, lesion, manifest.rows["split"].to_numpy()[rows] == "val")
    split = manifest.rows["split"].to_numpy()[rows]
    label, classes = manifest.label_index[rows], len(manifest.classes)
    groups = manifest.rows["group"].fillna(manifest.rows["image_id"]).to_numpy()[rows]
    train, val = split == "train", split == "val"
    chosen = {name: value for name, value in means_.items() if re.fullmatch(arguments.ways, name)}
    lines: list[dict[str, Any]] = []
    if arguments.what == "inner":
        made = {name: value[train] for name, value in chosen.items()}
        for name, (acc, f1, balanced) in inner(made, label[train], groups[train], classes, arguments.seeds):
            lines.append({"way": name, "n": int(train.sum()), "accuracy": acc, "macro_f1": f1, "balanced_accuracy": balanced})
            print(f"{name:<24} accuracy {acc:5.1f}  macro F1 {f1:5.1f}  balanced {balanced:5.1f}", flush=True)
    else:
        lines = validation(chosen, label, train, val, classes, arguments)
    pd.DataFrame(lines).round(3).to_csv(arguments.out / f"{arguments.what}-{arguments.name}.csv", index=False)


def validation(
    chosen: dict[str, np.ndarray], label: np.ndarray, train: np.ndarray, val: np.ndarray, classes: int, arguments: Any
) -> list[dict[str, Any]]:
    """Scores on the validation images, with intervals of the difference in macro F1 to the first way, images drawn again."""
    answers = {
        name: np.stack([predicted(fitted(value[train], label[train], classes, seed), value[val]) for seed in arguments.seeds])
        for name, value in chosen.items()
    }
    truth, draws = label[val], np.random.default_rng(0).integers(0, int(val.sum()), (400, int(val.sum())))
    lines = []
    for name, own in answers.items():
        acc, f1, balanced = scores_of(truth, own, classes)
        line = {"way": name, "n": len(truth), "accuracy": acc, "macro_f1": f1, "balanced_accuracy": balanced}
        line["sd_f1"] = float(np.std([100 * macro_f1(truth, one, classes) for one in own]))
        for against in arguments.against:
            base = answers[against]
            spread = [
                scores_of(truth[draw], own[:, draw], classes)[1] - scores_of(truth[draw], base[:, draw], classes)[1]
                for draw in draws
            ]
            low, high = np.percentile(spread, [2.5, 97.5])
            line |= {f"over_{against}": f1 - scores_of(truth, base, classes)[1], f"low_{against}": low, f"high_{against}": high}
        lines.append(line)
        print({key: round(value, 1) if isinstance(value, float) else value for key, value in line.items()}, flush=True)
    return lines


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    steps = parser.add_subparsers(dest="step", required=True)
    made = steps.add_parser("pool")
    made.add_argument("--manifest", type=Path, required=True)
    made.add_argument("--weights", type=Path, required=True)
    made.add_argument("--scout", required=True)
    made.add_argument("--out", type=Path, required=True)
    made.add_argument("--group", choices=["dense", "early", "others", "zoom"], required=True)
    made.add_argument("--part", choices=["as-is", "off-center-val", "off-center-train"], default="as-is")
    made.add_argument("--blocks", type=int, nargs="+", default=list(range(3, 12)))
    made.set_defaults(run=pool)
    judged = steps.add_parser("judge")
    judged.add_argument("--manifest", type=Path, required=True)
    judged.add_argument("--out", type=Path, required=True)
    judged.add_argument("--what", choices=["inner", "validation"], required=True)
    judged.add_argument("--name", default="all")
    judged.add_argument("--ways", default=".*", help="Regular expression of 'way@block'.")
    judged.add_argument("--against", nargs="*", default=[])
    judged.add_argument("--seeds", type=int, nargs="+", default=[42, 43, 44])
    judged.set_defaults(run=judge)
    arguments = parser.parse_args(words)
    arguments.out.mkdir(parents=True, exist_ok=True)
    arguments.run(arguments)


if __name__ == "__main__":
    main()
