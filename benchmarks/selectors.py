"""What selecting costs beside the backbone: every selector against the forward pass of a ViT-S/14, batch 16, one thread.

Weights do not change the time, so backbone and learned selectors are as they were initialized. Masks are drawn.
"""

from __future__ import annotations

import sys
from dataclasses import replace

import timm
import torch

from benchmarks.overhead import BATCH, BUDGET, fastest
from medtokenbudget.backbone.backbone import Backbone
from medtokenbudget.routing import Selector, TokenBatch, create_selector, list_selectors, selector_class
from medtokenbudget.tokens import SIGNALS

NAME = "vit_small_patch14_dinov2.lvd142m"
MOST, MOST_LATS = 0.15, 0.03
"""Largest share of the backbone's time that a selector, and LATS, may take."""


def tokens_of(backbone: Backbone, images: torch.Tensor) -> TokenBatch:
    """Tokens of the images with every field that a selector reads."""
    tokens = backbone(images, SIGNALS)
    noise = torch.Generator().manual_seed(0)
    drawn = torch.rand(BATCH, tokens.n, generator=noise)
    return replace(tokens, luminance=drawn, lesion=drawn > 0.7, has_mask=torch.ones(BATCH, dtype=torch.bool))


def built(name: str, dim: int) -> Selector:
    return create_selector(name, dim=dim) if selector_class(name).learns else create_selector(name)


@torch.inference_mode()
def shares(names: list[str]) -> dict[str, float]:
    """Time of each selector as a share of the backbone's."""
    torch.manual_seed(0)
    backbone = Backbone.from_model(timm.create_model(NAME, pretrained=False, num_classes=0, img_size=224), NAME)
    images = torch.randn(BATCH, 3, 224, 224)
    tokens = tokens_of(backbone, images)
    calls = []
    for name in names:
        selector = built(name, tokens.dim)
        if selector.learns:
            selector.eval()  # type: ignore[attr-defined]
        calls.append(lambda chosen=selector: chosen.select(tokens, chosen.count(BUDGET, tokens.n)))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        whole, *times = fastest([lambda: backbone(images), *calls])
    finally:
        torch.set_num_threads(threads)
    print(f"ViT-S/14, batch {BATCH}, one thread: backbone {1000 * whole / BATCH:.0f} ms per image; budget {BUDGET}")
    return {name: taken / whole for name, taken in zip(names, times)}


def main(arguments: list[str] | None = None) -> None:
    for name, share in sorted(shares(arguments or list_selectors()).items(), key=lambda item: item[1]):
        most = MOST_LATS if name == "lats" else MOST
        print(f"{name:20} {share:7.2%} (at most {most:.0%}) {'ok' if share <= most else 'TOO SLOW'}")


if __name__ == "__main__":
    main(sys.argv[1:])
