"""The whole study as the paper runs it, with the backbone in every epoch of every method, against ours, which runs it once.

Both flows are timed on the same real images in one run, with the same scorer, heads and batch size; what is measured is seconds an
image for each part, what is extrapolated is the number of times that the study repeats it. The paper's flow gets its images decoded
for nothing; ours decodes them from files.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

from benchmarks.measuring import IMAGES, VIT_B, VIT_S, VIT_S_WEIGHTS, in_turns, random_vit
from medtokenbudget.backbone import Backbone, FeatureStore, extract
from medtokenbudget.backbone.backbone import luminance
from medtokenbudget.config import BUDGETS, BackboneConfig, ExtractConfig, preset
from medtokenbudget.data import Manifest
from medtokenbudget.data.images import decode_image
from medtokenbudget.routing import LATSSelector, create_selector
from medtokenbudget.tokens import TokenBatch
from medtokenbudget.training import MLPHead, RoutedClassifier, classification_loss, total_loss
from medtokenbudget.training.pooled import pool, pool_and_judge
from medtokenbudget.training.rows import generator
from medtokenbudget.training.trainer import batches_of_pooled, batches_of_store, fit_head, new_head

CLASSES = 8
BASELINES = ("no-pruning", "random", "norm", "tome", "attention-entropy", "local-contrast")
LATS_EPOCHS, HEAD_EPOCHS, LOOKS = 50, 30, 25
VALIDATION = 0.25
"""Validation images for each training image: 5,067 to 20,264."""
BATCH = 64


def lats_model(dim: int) -> tuple[RoutedClassifier, torch.optim.Optimizer]:
    config = preset("paper")
    torch.manual_seed(0)
    model = RoutedClassifier(LATSSelector.from_config(dim, config), MLPHead(dim, CLASSES))
    return model, torch.optim.AdamW(model.parameters(), lr=config.lr, weight_decay=config.weight_decay, fused=True)


def lats_epoch(model: RoutedClassifier, optimizer: torch.optim.Optimizer, batches: Iterator[TokenBatch], epoch: int) -> None:
    """One epoch of the joint recipe, the same code for both flows."""
    noise, config = generator(0, "noise", epoch), preset("paper")
    model.train()
    for batch in batches:
        logits, step = model.training_pass(batch, 0.5, config, noise)
        assert batch.label is not None
        terms = {"classification": classification_loss(logits, batch.label), **step.terms}
        loss = total_loss(terms, vars(config.losses))
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


class Loop:
    """The paper's flow: tokens made anew from decoded images for every batch."""

    def __init__(self, backbone: Backbone, pixels: torch.Tensor, like: FeatureStore) -> None:
        self.backbone, self.pixels, self.like = backbone, pixels, like

    def batches(self) -> Iterator[TokenBatch]:
        for start in range(0, len(self.pixels), BATCH):
            part = slice(start, start + BATCH)
            tokens = self.backbone(self.backbone.normalize(self.pixels[part])).take(
                range(len(self.pixels[part]))
            )  # copied: autograd may keep them
            yield replace(
                tokens,
                label=self.like.label[part],
                lesion=self.like.lesion[part],
                has_mask=self.like.has_mask[part],
                luminance=luminance(self.pixels[part], tokens.grid),
            )

    def head_epoch(self, name: str, head: MLPHead) -> None:
        selector, noise = create_selector(name), generator(0, "random")
        optimizer = torch.optim.AdamW(head.parameters(), lr=1e-3)
        for batch in self.batches():
            pooled = selector.select_budget(batch, 0.5, noise if selector.stochastic else None).pooled()
            loss = classification_loss(head(pooled), batch.label)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    @torch.no_grad()
    def evaluate(self, name: str, head: MLPHead) -> None:
        selector = create_selector(name)
        for batch in self.batches():
            head(selector.select_budget(batch, 0.3).pooled())


def seconds(work: Callable[[], object], images: int, rounds: int) -> float:
    """Return the least seconds per image over some rounds."""
    return min(in_turns({"": work}, rounds, warm_up=False)[""]) / images


def same_results(loop: Loop, store: FeatureStore, rows: np.ndarray) -> float:
    """Largest difference of a score after two epochs of training in the two flows (fp32 store)."""
    found = []
    for batches in (loop.batches, lambda: store.batches(rows, BATCH)):
        model, optimizer = lats_model(store.dim)
        for epoch in range(2):
            lats_epoch(model, optimizer, batches(), epoch)
        model.eval()
        with torch.no_grad():
            found.append(model.selector.score(store.read(rows[:BATCH])))
    return float((found[0] - found[1]).abs().max())


def study(parts: dict[str, float]) -> dict[str, float]:
    """Seconds of the whole study for each training image (and its quarter of a validation image)."""
    evaluations = 7 * len(BUDGETS)
    theirs = LATS_EPOCHS * parts["loop lats"] + LOOKS * VALIDATION * parts["loop evaluation"]
    theirs += sum(HEAD_EPOCHS * parts[f"loop {name}"] for name in BASELINES) + evaluations * VALIDATION * parts["loop evaluation"]
    ours = (1 + VALIDATION) * parts["extraction"] + LATS_EPOCHS * parts["lats epoch"]
    ours += LOOKS * VALIDATION * parts["lats evaluation"] / len(BUDGETS) + VALIDATION * parts["lats evaluation"]
    ours += sum((1 + VALIDATION) * parts[f"pool {name}"] for name in BASELINES if name != "random")
    ours += HEAD_EPOCHS * (5 * parts["head epoch"] + parts["random epoch"]) + VALIDATION * parts["random epoch"]
    return {"paper's flow": theirs, "ours": ours, "ratio": theirs / ours}


def measure(name: str, weights: Path | None, images: list[Path], folder: Path, rounds: int) -> dict[str, float]:
    if weights is None:  # timing needs no trained weights
        weights = folder / f"{name}.safetensors"
        save_file(random_vit(name).state_dict(), weights)
    config = BackboneConfig(name=name, weights=weights)
    backbone = Backbone.load(config)
    records = [{"image_id": path.stem, "image": str(path), "label": str(i % CLASSES)} for i, path in enumerate(images)]
    manifest = Manifest.from_records(records, [str(i) for i in range(CLASSES)])
    n, parts = len(images), {}

    def fill(kind: str, dtype: str) -> FeatureStore:
        options = ExtractConfig(dtype=dtype, shard_size=n)  # type: ignore[arg-type]
        return extract(manifest, folder / kind, config, options)

    exact = fill(f"{name}-exact", "fp32")
    parts["extraction"] = seconds(lambda: fill(f"{name}-{time.time_ns()}", "fp16"), n, rounds)
    store = fill(f"{name}-half", "fp16")
    pixels = torch.from_numpy(np.stack([backbone.prepare(decode_image(path)) for path in images]))
    loop, rows = Loop(backbone, pixels, store), np.arange(n)
    print(f"  largest difference of a score after two epochs, live against stored fp32: {same_results(loop, exact, rows):.1e}")
    model, optimizer = lats_model(store.dim)
    parts["lats epoch"] = seconds(lambda: lats_epoch(model, optimizer, store.batches(rows, BATCH), 0), n, rounds + 1)
    parts["loop lats"] = seconds(lambda: lats_epoch(model, optimizer, loop.batches(), 0), n, rounds)
    model.eval()
    with torch.no_grad():
        parts["lats evaluation"] = seconds(lambda: pool_and_judge(store, rows, model.selector, BUDGETS, 0), n, rounds)
    head = MLPHead(store.dim, CLASSES)
    parts["loop evaluation"] = seconds(lambda: loop.evaluate("norm", head), n, rounds)
    for method in BASELINES:
        parts[f"loop {method}"] = seconds(lambda method=method: loop.head_epoch(method, head), n, 1)
        if method != "random":
            path = folder / f"{name}-{method}.npy"
            parts[f"pool {method}"] = seconds(lambda m=method, p=path: pool(store, rows, create_selector(m), BUDGETS, p), n, 1)
    one = preset("paper", head_epochs=1)
    pooled, label = np.load(folder / f"{name}-norm.npy"), store.label.numpy()
    trained = new_head("mlp", store.dim, CLASSES, one)
    from_pooled = batches_of_pooled(pooled, label, one, CLASSES)
    from_store = batches_of_store(store, rows, label, create_selector("random"), trained, one)
    parts["head epoch"] = seconds(lambda: fit_head(trained, from_pooled, label, one), n, rounds + 1)
    parts["random epoch"] = seconds(lambda: fit_head(trained, from_store, label, one), n, rounds)
    return parts


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--images", type=Path, default=IMAGES)
    parser.add_argument("--weights", type=Path, default=VIT_S_WEIGHTS)
    parser.add_argument("--n", type=int, default=128, help="images")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--only", choices=("vit_small", "vit_base"), help="one of the two backbones")
    options = parser.parse_args(arguments)
    images = sorted(options.images.glob("*.jpg"))[: options.n]
    if not images:
        print(f"no images in {options.images}: pass --images")
        return 1
    with tempfile.TemporaryDirectory() as folder:
        for name, weights in (
            (VIT_S, options.weights if options.weights.exists() else None),
            (VIT_B, None),
        ):
            if options.only and not name.startswith(options.only):
                continue
            print(f"{name}, {len(images)} real images, {torch.get_num_threads()} threads, batch {BATCH}")
            parts = measure(name, weights, images, Path(folder), options.rounds)
            for part, value in parts.items():
                print(f"  measured     {part:<24}{1000 * value:>10.3f} ms an image")
            whole = study(parts)
            for flow in ("paper's flow", "ours"):
                print(f"  extrapolated {flow:<24}{whole[flow]:>10.3f} s for each training image of the study")
            print(f"  ratio        {whole['ratio']:.0f}x")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
