"""How much faster early routing is on this machine, as ratios to the dense pass: `python -m benchmarks.early_speed`.

Time does not depend on the weights, so the large backbones have random ones and nothing is downloaded; the scout is the
packaged router.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import timm
import torch
from torch import Tensor

from benchmarks.competitors import tome_every_block
from medtokenbudget.backbone import partial
from medtokenbudget.backbone.backbone import Backbone
from medtokenbudget.backbone.preprocess import Preprocessing
from medtokenbudget.devices import cpu_threads
from medtokenbudget.model import EarlyRouting, MedTokenBudget, load
from medtokenbudget.routing import LATSSelector, budget_to_k
from medtokenbudget.tokens import TokenBatch

SHAPES = {"ViT-S/14": "vit_small_patch14_dinov2", "ViT-B/14": "vit_base_patch14_dinov2"}
BATCHES = (1, 16)
BLOCK = 4
SMALLER = (112, 126, 140, 154, 168)
"""Sides of smaller dense images, of which the one whose time is nearest to that of the scout is shown."""


@dataclass(frozen=True)
class Speed:
    """One way on one shape at one batch size.

    Attributes:
        way: Name of the way.
        shape: Name of the backbone's shape.
        batch: Images per pass.
        milliseconds: Per image, the median over the rounds.
        ratio: Speed over that of the dense pass, the median of the ratios within each round.
    """

    way: str
    shape: str
    batch: int
    milliseconds: float
    ratio: float

    def __str__(self) -> str:
        return f"{self.way:<14}{self.shape:<10}batch {self.batch:<4}{self.ratio:5.2f}x{self.milliseconds:10.1f} ms per image"


def early_speed(budget: float = 0.3, rounds: int = 5, batches: Sequence[int] = BATCHES) -> Iterator[Speed]:
    """Measure every way on ViT-S/14 and ViT-B/14 shapes at 224 pixels, the dense pass first of each.

    Args:
        budget: Share of the patches that is kept.
        rounds: Rounds that are measured after one to warm up; all ways take turns in each.
        batches: Images per pass.
    """
    scout = load("dermoscopy", device="cpu")
    for shape, name in SHAPES.items():
        models = {
            side: timm.create_model(name, pretrained=False, num_classes=0, img_size=side).eval().requires_grad_(False)
            for side in (224, *SMALLER)
        }
        for batch in batches:
            yield from measure(models, shape, scout, budget, batch, rounds)


@torch.inference_mode()
def measure(models: dict[int, Any], shape: str, scout: MedTokenBudget, budget: float, batch: int, rounds: int) -> Iterator[Speed]:
    """Measure every way on the models of one shape; `models` has one for 224 pixels and others for smaller images."""
    ways = passes(models, scout, budget, batch)
    times: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds + 1):
        for name, run in ways.items():
            start = time.perf_counter()
            run()
            if number:
                times[name].append(time.perf_counter() - start)
    speeds = [
        Speed(
            name,
            shape,
            batch,
            1000 * statistics.median(own) / batch,
            statistics.median(dense / mine for dense, mine in zip(times["dense"], own)),
        )
        for name, own in times.items()
    ]
    target = next(speed.ratio for speed in speeds if speed.way == "scout")
    smaller = [speed for speed in speeds if speed.way.endswith("px")]
    nearest = min(smaller, key=lambda speed: abs(speed.ratio - target), default=None)
    yield from (speed for speed in speeds if speed not in smaller or speed is nearest)


def passes(models: dict[int, Any], scout: MedTokenBudget, budget: float, batch: int) -> dict[str, Callable[[], Any]]:
    """The passes to time, by name; each includes its router."""
    model = models[224]
    layer, k = len(model.blocks) - 1, budget_to_k(budget, 256)
    images = torch.rand(batch, 3, 224, 224, generator=torch.Generator().manual_seed(0))
    score = scout_score(scout)
    preprocessing = Preprocessing(224, (0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
    scorer = LATSSelector(int(model.num_features), signals=("norm", "contrast"), neighborhood="grid8").eval()

    def dense(of: Any, pixels: Tensor) -> Tensor:
        found: Tensor = of.norm(partial.run_blocks(of, partial.embed(of, pixels), 0, layer + 1))
        return found

    def scouted() -> Tensor:
        kept = score(preprocessing.denormalize(images)).topk(k, dim=1).indices
        return partial.before_blocks(model, images, kept, layer).patches

    def inside() -> Tensor:
        def choose(x: Tensor) -> Tensor:
            patches = model.norm(x)[:, int(model.num_prefix_tokens) :]
            return scorer.score(TokenBatch(patches, (16, 16))).topk(k, dim=1).indices

        return partial.inside_blocks(model, images, choose, BLOCK, layer).patches

    small = {side: torch.nn.functional.interpolate(images, size=side) for side in models if side != 224}
    return {
        "dense": lambda: dense(model, images),
        "scout": scouted,
        "inside": inside,
        "tome": lambda: tome_every_block(model, images, k, layer),
        **{f"dense-{side}px": lambda side=side, pixels=pixels: dense(models[side], pixels) for side, pixels in small.items()},  # type: ignore[misc]
    }


def scout_score(scout: MedTokenBudget) -> Callable[[Tensor], Tensor]:
    """The function of a router that scores the patches of images [B, 3, 224, 224], RGB in [0, 1]."""
    return EarlyRouting(scout, "scout").wrap(Backbone.load(scout.backbone_config)).route.score


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=0, help="CPU threads; 0 uses the default of PyTorch.")
    parser.add_argument("--rounds", type=int, default=5, help="Measured rounds.")
    options = parser.parse_args(arguments)
    with cpu_threads(options.threads):
        print(f"Early routing at budget 0.3, 224 pixels, {torch.get_num_threads()} CPU threads; x: speed over the dense pass.")
        for speed in early_speed(rounds=options.rounds):
            print(speed, flush=True)


if __name__ == "__main__":
    main()
