"""What the embedded backbone is worth: lesion separability, LATS on top of it, speed, side by side with its teacher.

python -m benchmarks.embedded manifest --shared ../shared --out M.parquet   the images that it is distilled on
python -m benchmarks.embedded blocks   --shared ../shared                   which block of the teacher to imitate
python -m benchmarks.embedded figures  --shared ../shared --work W          separability and routing, real images
python -m benchmarks.embedded speed    --shared ../shared                   images per CPU second, as ratios of one run
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from sklearn.metrics import roc_auc_score
from torch import Tensor

from benchmarks.measuring import VIT_B, VIT_S, in_turns, random_vit
from medtokenbudget import metrics
from medtokenbudget.backbone import Backbone, FeatureStore, extract
from medtokenbudget.config import HEADLINE_BUDGETS, BackboneConfig, ExtractConfig, preset
from medtokenbudget.data import (
    Drawings,
    Manifest,
    SplitRule,
    decode_image,
    decode_mask,
    paper_split,
    patch_labels,
    synthetic_manifest,
)
from medtokenbudget.data.readers import GROUND_TRUTH, isic_manifest, read_ground_truth
from medtokenbudget.routing import LATSSelector, budget_to_k
from medtokenbudget.routing.losses import lesion_loss
from medtokenbudget.tokens import TokenBatch

TEACHER_FILE = "weights/vit_small_patch14_dinov2_saliency.safetensors"
TEACHER_BLOCK = 5


@dataclass(frozen=True)
class Tokens:
    """Features of images with lesion patches: patches [n, N, D], attention_entropy [n, N], lesion [n, N] bool."""

    patches: Tensor
    attention_entropy: Tensor
    lesion: Tensor
    grid: tuple[int, int]

    def __len__(self) -> int:
        return len(self.patches)

    def batch(self, rows: Tensor) -> TokenBatch:
        return TokenBatch(
            self.patches[rows].float(),
            self.grid,
            attention_entropy=self.attention_entropy[rows],
            lesion=self.lesion[rows],
            has_mask=torch.ones(len(rows), dtype=torch.bool),
        )


def linear_probe(train: Tokens, val: Tokens, ridge: float = 1e-2) -> float:
    """Patch-level AUROC for lesion patches of `val`, of a ridge regression on the standardized patches of `train`."""
    total, square, cross, count, positive = 0.0, 0.0, 0.0, 0, 0.0
    for part, lesion in zip(train.patches.split(64), train.lesion.split(64)):
        x, y = part.flatten(0, 1).double(), lesion.flatten().double()
        total, square, cross = total + x.sum(0), square + x.T @ x, cross + x.T @ y
        count, positive = count + len(x), positive + float(y.sum())
    mean = torch.as_tensor(total) / count
    covariance = torch.as_tensor(square) / count - mean.outer(mean)
    deviation = covariance.diagonal().clamp_min(1e-12).sqrt()
    relation = (torch.as_tensor(cross) / count - mean * positive / count) / deviation
    gram = covariance / deviation.outer(deviation) + ridge * torch.eye(len(mean), dtype=torch.float64)
    weight = torch.linalg.solve(gram, relation) / deviation
    score = torch.cat([part.double() @ weight for part in val.patches.split(64)])
    return float(roc_auc_score(val.lesion.flatten().numpy(), score.flatten().numpy()))


def train_router(train: Tokens, epochs: int, seed: int = 0) -> LATSSelector:
    """LATS on the lesion loss alone, as the lesion-first recipe does; no epoch is picked, the last one counts."""
    config = preset("lesion-first")
    torch.manual_seed(seed)
    selector = LATSSelector.from_config(train.patches.shape[-1], config)
    optimizer = torch.optim.AdamW(selector.parameters(), lr=config.lr, weight_decay=config.weight_decay)
    generator = torch.Generator().manual_seed(seed)
    selector.train()
    for epoch in range(epochs):
        optimizer.param_groups[0]["lr"] = config.lr * 0.5 * (1 + math.cos(math.pi * epoch / epochs))
        for rows in torch.randperm(len(train), generator=generator).split(config.batch_size):
            batch = train.batch(rows)
            assert batch.lesion is not None
            assert batch.has_mask is not None
            loss = lesion_loss(selector.logits(batch, generator), batch.lesion, batch.has_mask)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(selector.parameters(), config.clip)
            optimizer.step()
    return selector.eval()


@torch.no_grad()
def share_of_ceiling(selector: LATSSelector, val: Tokens, budgets: Sequence[float] = HEADLINE_BUDGETS) -> list[float]:
    """Kept lesion patches over the most that K patches can hold, pooled over images, at each budget."""
    orders = torch.cat([selector.order(val.batch(rows)) for rows in torch.arange(len(val)).split(64)])
    counts = [budget_to_k(budget, val.lesion.shape[1]) for budget in budgets]
    return metrics.share_of_ceiling(metrics.kept_lesion_counts(orders, val.lesion, counts), val.lesion.sum(1), counts).tolist()


def from_store(store: FeatureStore, ids: Sequence[str]) -> Tokens:
    """The masked images of `ids` that have at least one lesion patch."""
    rows = store.rows(ids)
    rows = rows[store.has_mask.numpy()[rows] & store.lesion.numpy()[rows].any(1)]
    tokens = store.read(rows, dtype=torch.float16)
    assert tokens.attention_entropy is not None
    assert tokens.lesion is not None
    return Tokens(tokens.patches, tokens.attention_entropy.float(), tokens.lesion, tokens.grid)


def raw_pixels(manifest: Manifest, grid: tuple[int, int] = (16, 16), size: int = 224) -> Tokens:
    """The control without a network: mean and standard deviation of the three colors in each patch, [n, N, 6]."""
    features, lesions = [], []
    for index in range(len(manifest)):
        mask = manifest.mask_path(index)
        if mask is None:
            continue
        lesion = patch_labels(decode_mask(mask), grid)
        if lesion.any():
            pixels = np.asarray(decode_image(manifest.image_path(index)).resize((size, size)), np.float32) / 255
            cells = pixels.reshape(grid[0], size // grid[0], grid[1], size // grid[1], 3)
            features.append(np.concatenate([cells.mean((1, 3)), cells.std((1, 3))], -1).reshape(-1, 6))
            lesions.append(lesion)
    patches = torch.from_numpy(np.stack(features))
    return Tokens(patches, torch.zeros(patches.shape[:2]), torch.from_numpy(np.stack(lesions)), grid)


def training_manifest(shared: Path, out: Path, drawings: int) -> Manifest:
    """The images of the embedded weights: ISIC 2017 and 2018 on the training side of the paper's split, and drawn ones."""
    data = shared / "data"
    isic = isic_manifest(data / "isic", "by-id", ["isic2018"]).part("train")
    truth = read_ground_truth(data / "isic" / GROUND_TRUTH)
    sides = zip(truth["image"], paper_split(len(truth)))
    held_out = {str(name).removesuffix("_downsampled") for name, side in sides if side != "train"}
    images = {path.stem: path for path in sorted((data / "unlabelled").glob("*.jpg"))}
    images |= {isic.ids[i]: isic.image_path(i) for i in range(len(isic)) if isic.mask_path(i) is not None}
    drawn = Manifest.read(synthetic_manifest(out.with_name("drawings.parquet"), Drawings(n=drawings, seed=4)))
    images |= {drawn.ids[i]: drawn.image_path(i) for i in range(len(drawn))}
    images = {name: path for name, path in images.items() if name.removesuffix("_downsampled") not in held_out}
    records = [{"image_id": name, "image": str(path)} for name, path in images.items()]
    source = "ISIC 2017/2018 images of the training side of the paper split, and drawings"
    manifest = Manifest.from_records(records, (), source=source, split_rule=SplitRule("none"))
    manifest.write(out)
    return manifest


def teacher_config(shared: Path, layer: int = TEACHER_BLOCK) -> BackboneConfig:
    return BackboneConfig(VIT_S, shared / TEACHER_FILE, layer=layer)


def prepared(backbone: Backbone, manifest: Manifest, batch: int = 8) -> Iterator[tuple[Tensor, range]]:
    for start in range(0, len(manifest), batch):
        rows = range(start, min(start + batch, len(manifest)))
        pixels = np.stack([backbone.prepare(decode_image(manifest.image_path(i))) for i in rows])
        yield torch.from_numpy(pixels), rows


def blocks(shared: Path, n_train: int, n_val: int) -> dict[int, float]:
    """AUROC of the linear probe for each of the teacher's later blocks."""
    backbone = Backbone.load(teacher_config(shared, -1))
    layers = list(range(3, backbone.depth))
    parts = {}
    for name, part in zip(("train", "val"), sides(shared, n_train, n_val)):
        found = []
        for pixels, _ in prepared(backbone, part):
            with torch.inference_mode():
                found.append(
                    torch.stack(
                        backbone.model.forward_intermediates(
                            backbone.normalize(pixels), indices=layers, norm=True, output_fmt="NLC", intermediates_only=True
                        )
                    ).half()
                )
        masks = [part.mask_path(i) for i in range(len(part))]
        lesion = torch.from_numpy(np.stack([patch_labels(decode_mask(m), backbone.grid) for m in masks if m is not None]))
        tokens = torch.cat(found, 1)
        parts[name] = [Tokens(tokens[i], torch.zeros(lesion.shape), lesion, backbone.grid) for i in range(len(layers))]
    return {layer: linear_probe(parts["train"][i], parts["val"][i]) for i, layer in enumerate(layers)}


def sides(shared: Path, n_train: int | None, n_val: int | None) -> tuple[Manifest, Manifest]:
    """Real images with masks of the paper's two sides, all or evenly spaced."""
    whole = isic_manifest(shared / "data" / "isic")
    return evenly(whole.part("train"), n_train), evenly(whole.part("val"), n_val)


def evenly(manifest: Manifest, n: int | None) -> Manifest:
    if n is None or n >= len(manifest):
        return manifest
    return manifest.take([i * len(manifest) // n for i in range(n)])


def turning(shared: Path, n: int = 12) -> dict[str, float]:
    """Mean cosine between turned tokens and tokens of the turned image (both centered): why views are turned before the teacher."""
    backbone = Backbone.load(teacher_config(shared))
    pixels, _ = next(prepared(backbone, sides(shared, n, None)[0], n))
    images = backbone.normalize(pixels)
    tokens = backbone(images).patches.unflatten(1, backbone.grid)
    center = tokens.mean((0, 1, 2))
    moves: dict[str, Callable[[Tensor, int], Tensor]] = {
        "left-right flip": lambda x, axis: x.flip(axis + 1),
        "top-bottom flip": lambda x, axis: x.flip(axis),
        "quarter turn": lambda x, axis: x.rot90(1, (axis, axis + 1)),
    }
    result = {}
    for name, move in moves.items():
        found = backbone(move(images, 2)).patches.unflatten(1, backbone.grid)
        result[name] = float(torch.cosine_similarity(move(tokens, 1) - center, found - center, dim=-1).mean())
    return result


def figures(shared: Path, work: Path, epochs: int, n_train: int | None, n_val: int | None) -> dict[str, dict[str, object]]:
    """Separability and routing of teacher, embedded backbone and raw pixels, on the same images."""
    train, val = sides(shared, n_train, n_val)
    sources: dict[str, Callable[[Manifest], Tokens]] = {"pixels": raw_pixels}
    both = replace(train, rows=pd.concat([train.rows, val.rows]))
    for name, backbone in (("embedded", BackboneConfig("embedded")), ("teacher", teacher_config(shared))):
        store = extract(both, work / name, backbone, ExtractConfig())
        sources[name] = lambda part, store=store: from_store(store, part.ids)  # type: ignore[misc]
    rows: dict[str, dict[str, object]] = {}
    for name, source in sources.items():
        learn, judge = source(train), source(val)
        shares = share_of_ceiling(train_router(learn, epochs), judge)
        rows[name] = {"train": len(learn), "val": len(judge), "auroc": linear_probe(learn, judge), "share_of_ceiling": shares}
        print(f"{name:<10}{json.dumps(rows[name])}", flush=True)
    return rows


def speed(shared: Path, batch: int = 16, rounds: int = 5) -> dict[str, float]:
    """Images per second of CPU time of the whole backbone call, interleaved, the best of some rounds.

    CPU time and the best round, because other work on the machine should not count. The reference has random weights.
    """
    manifest = isic_manifest(shared / "data" / "isic").part("val").take(range(batch))
    backbones = {
        "embedded": Backbone.load(BackboneConfig("embedded")),
        "teacher": Backbone.load(teacher_config(shared, -1)),
        f"teacher to block {TEACHER_BLOCK}": Backbone.load(teacher_config(shared)),
        VIT_B: Backbone.from_model(random_vit(VIT_B), VIT_B),
    }
    pixels = next(prepared(backbones["embedded"], manifest, batch))[0]
    images = {name: backbone.normalize(pixels) for name, backbone in backbones.items()}
    calls = {name: partial(backbone, images[name]) for name, backbone in backbones.items()}
    return {name: batch / min(taken) for name, taken in in_turns(calls, rounds, time.process_time).items()}


def overhead(shared: Path, batch: int = 16, rounds: int = 10) -> float:
    """Speed of the backbone call (tokens and reduced attention) as a share of timm's bare forward pass, ViT-S/14."""
    backbone = Backbone.load(teacher_config(shared, -1))
    manifest = isic_manifest(shared / "data" / "isic").part("val").take(range(batch))
    images = backbone.normalize(next(prepared(backbone, manifest, batch))[0])
    calls = {"bare": backbone.model.forward_features, "whole": backbone}
    with torch.inference_mode():
        seconds = in_turns({name: partial(call, images) for name, call in calls.items()}, rounds, time.process_time)
    return min(seconds["bare"]) / min(seconds["whole"])


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["manifest", "blocks", "figures", "speed"])
    parser.add_argument("--shared", type=Path, default=Path("../shared"))
    parser.add_argument("--out", type=Path, default=Path("embedded.parquet"))
    parser.add_argument("--work", type=Path, default=Path("runs/embedded"))
    parser.add_argument("--drawings", type=int, default=640)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--train", type=int, default=None, help="training images, evenly spaced; all without it")
    parser.add_argument("--val", type=int, default=None, help="validation images, evenly spaced; all without it")
    options = parser.parse_args(arguments)
    if options.what == "manifest":
        print(f"{len(training_manifest(options.shared, options.out, options.drawings))} images in {options.out}")
    elif options.what == "blocks":
        for layer, auroc in blocks(options.shared, 200, 100).items():
            print(f"block {layer:>2}  AUROC {auroc:.4f}")
        for name, cosine in turning(options.shared).items():
            print(f"{name:<16} cosine {cosine:.2f}")
    elif options.what == "figures":
        figures(options.shared, options.work, options.epochs, options.train, options.val)
    else:
        rates = speed(options.shared)
        for name, rate in rates.items():
            print(f"{name:<36}{rate:8.2f} images per CPU second   embedded is {rates['embedded'] / rate:5.1f}x")
        print(f"backbone call at {100 * overhead(options.shared):.1f} % of timm's bare forward pass (ViT-S/14)")


if __name__ == "__main__":
    main()
