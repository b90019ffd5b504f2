"""What selecting costs next to the backbone: every selector against the forward pass of a ViT-S/14, batch 16, one thread, CPU time.

Weights do not change the time, so backbone and learned selectors are as they were initialized. Masks are drawn.
"""

from __future__ import annotations

import sys
import time
from dataclasses import replace

import torch

from benchmarks.measuring import VIT_S, in_turns, random_vit
from medtokenbudget.backbone.backbone import Backbone
from medtokenbudget.backbone.extract import cpu_threads
from medtokenbudget.config import DEFAULT_BUDGET
from medtokenbudget.routing import create_selector, list_selectors, selector_class
from medtokenbudget.tokens import SIGNALS

BATCH, ROUNDS = 16, 3
MOST, MOST_LATS = 0.15, 0.03
"""Largest share of the backbone's time that a selector, and LATS, may take."""


@torch.inference_mode()
def shares(names: list[str]) -> dict[str, float]:
    """Return the time of each selector as a share of the backbone's."""
    backbone = Backbone.from_model(random_vit(VIT_S), VIT_S)
    images = torch.randn(BATCH, 3, 224, 224)
    tokens = backbone(images, SIGNALS)
    drawn = torch.rand(BATCH, tokens.n, generator=torch.Generator().manual_seed(0))
    tokens = replace(tokens, luminance=drawn, lesion=drawn > 0.7, has_mask=torch.ones(BATCH, dtype=torch.bool))
    calls = {"backbone": lambda: backbone(images)}
    for name in names:
        selector = create_selector(name, dim=tokens.dim).eval() if selector_class(name).learns else create_selector(name)
        calls[name] = lambda chosen=selector: chosen.select(tokens, chosen.count(DEFAULT_BUDGET, tokens.n))
    with cpu_threads(1):
        least = {name: min(taken) for name, taken in in_turns(calls, ROUNDS, time.process_time).items()}
    whole = least.pop("backbone")
    print(f"ViT-S/14, batch {BATCH}, one thread: backbone {1000 * whole / BATCH:.0f} ms per image; budget {DEFAULT_BUDGET}")
    return {name: taken / whole for name, taken in least.items()}


def main(arguments: list[str] | None = None) -> None:
    for name, share in sorted(shares(arguments or list_selectors()).items(), key=lambda item: item[1]):
        most = MOST_LATS if name == "lats" else MOST
        print(f"{name:20} {share:7.2%} (at most {most:.0%}) {'ok' if share <= most else 'TOO SLOW'}")


if __name__ == "__main__":
    main(sys.argv[1:])
