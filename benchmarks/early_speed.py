"""How much faster early routing is on this machine, as ratios to the dense pass: `python -m benchmarks.early_speed`.

Time does not depend on the weights, so the large backbones have random ones and nothing is downloaded; the scout is the
packaged router.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from statistics import median
from typing import Any

import torch
from torch import Tensor

from benchmarks.competitors import tome_every_block
from benchmarks.measuring import in_turns, random_vit, ratio
from medtokenbudget.backbone import partial
from medtokenbudget.backbone.backbone import Backbone, Preprocessing
from medtokenbudget.backbone.encoders import partial_encoder
from medtokenbudget.config import DEFAULT_BUDGET
from medtokenbudget.model import EarlyRouting, MedTokenBudget, load
from medtokenbudget.routing import LATSSelector, budget_to_k
from medtokenbudget.runtime import cpu_threads
from medtokenbudget.tokens import TokenBatch

SHAPES = {"ViT-S/14": "vit_small_patch14_dinov2", "ViT-B/14": "vit_base_patch14_dinov2"}
BATCHES = (1, 16)
BLOCK = 4
SMALLER = (112, 126, 140, 154, 168)
"""Sides of smaller dense images, of which the one whose time is nearest to that of the scout is shown."""


def early_speed(rounds: int, budget: float = DEFAULT_BUDGET) -> Iterator[str]:
    """Measure every way on ViT-S/14 and ViT-B/14 shapes at 224 pixels; a line for each, the dense pass first."""
    scout = load("dermoscopy", device="cpu")
    for shape, name in SHAPES.items():
        models = {side: random_vit(name, side) for side in (224, *SMALLER)}
        for batch in BATCHES:
            with torch.inference_mode():
                seconds = in_turns(passes(models, scout, budget, batch), rounds)
            ratios = {way: ratio(seconds, "dense", way) for way in seconds}
            smaller = [way for way in ratios if way.endswith("px")]
            nearest = min(smaller, key=lambda way: abs(ratios[way] - ratios["scout"]))
            for way in (way for way in ratios if way not in smaller or way == nearest):
                milliseconds = 1000 * median(seconds[way]) / batch
                yield f"{way:<14}{shape:<10}batch {batch:<4}{ratios[way]:5.2f}x{milliseconds:10.1f} ms per image"


def passes(models: dict[int, Any], scout: MedTokenBudget, budget: float, batch: int) -> dict[str, Callable[[], Any]]:
    """The passes to time, by name; each includes its router."""
    model, encoder = models[224], partial_encoder(models[224], "ViT")
    layer, k = len(model.blocks) - 1, budget_to_k(budget, 256)
    images = torch.rand(batch, 3, 224, 224, generator=torch.Generator().manual_seed(0))
    score = scout_score(scout)
    preprocessing = Preprocessing(224, (0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
    scorer = LATSSelector(int(model.num_features), signals=("norm", "contrast"), neighborhood="grid8").eval()

    def dense(of: Any, pixels: Tensor) -> Tensor:
        found: Tensor = of.forward_features(pixels)
        return found

    def scouted() -> Tensor:
        kept = score(preprocessing.denormalize(images)).topk(k, dim=1).indices
        return encoder.norm(partial.routed_pass(encoder, images, lambda _: (kept, None), 0, layer + 1)[0])

    def inside() -> Tensor:
        def choose(x: Tensor | None) -> partial.Chosen:
            assert x is not None
            patches = encoder.norm(x)[:, encoder.prefix :]
            return scorer.score(TokenBatch(patches, (16, 16))).topk(k, dim=1).indices, None

        return encoder.norm(partial.routed_pass(encoder, images, choose, BLOCK, layer + 1)[0])

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
        threads = torch.get_num_threads()
        print(f"Early routing at budget {DEFAULT_BUDGET}, 224 pixels, {threads} CPU threads; x: speed over the dense pass.")
        for line in early_speed(options.rounds):
            print(line, flush=True)


if __name__ == "__main__":
    main()
