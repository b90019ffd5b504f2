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
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from medtokenbudget.config import BackboneConfig
from medtokenbudget.data import Manifest, decode_image, mask_of, patch_labels
from medtokenbudget.errors import RequestError
from medtokenbudget.experiments.competitors import evit_blocks, tome_every_block
from medtokenbudget.features import routed_pass, views
from medtokenbudget.features.backbone import Backbone
from medtokenbudget.model import MedTokenBudget, load

BACKBONE = "vit_small_patch14_dinov2.lvd142m"
BUDGET, K = 0.3, 76
BATCH = 16
MARGINS = (1.2, 1.6)

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
        for size in (154, 126):
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
        for margin in MARGINS:
            boxes = [zoom_box(row, 16, margin) for row in kept]
            named = {f"zoom-{margin}": boxes}
            if margin == MARGINS[0]:
                named |= {f"zoom-center-{margin}": [centered(box) for box in boxes]}
            for way, chosen in named.items():
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
    arguments = parser.parse_args(words)
    arguments.out.mkdir(parents=True, exist_ok=True)
    arguments.run(arguments)


if __name__ == "__main__":
    main()
