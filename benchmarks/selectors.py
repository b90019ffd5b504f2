"""What selecting costs next to the backbone: every selector against the forward pass of a ViT-S/14, batch 16, one thread, CPU time.

Weights do not change the time, so backbone and learned selectors are as they were initialized. Masks are drawn. Signals of the
attention come with the backbone's pass; the segmenter's network is counted. Arguments: names of selectors, and a CSV file to
write.
"""

from __future__ import annotations

import csv
import sys
import time
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks.measuring import VIT_S, in_turns, random_vit
from medtokenbudget.backbone.backbone import Backbone
from medtokenbudget.backbone.extract import cpu_threads
from medtokenbudget.config import DEFAULT_BUDGET, BackboneConfig
from medtokenbudget.routing import create_selector, list_selectors, selector_class
from medtokenbudget.tokens import SIGNALS

BATCH, ROUNDS = 16, 3
MOST, MOST_LATS = 0.15, 0.03
"""Largest share of the backbone's time that a selector, and LATS, may take."""


@torch.inference_mode()
def milliseconds(names: list[str]) -> dict[str, float]:
    """Return the CPU milliseconds per image of the backbone and of each selector."""
    backbone = Backbone.from_model(random_vit(VIT_S), VIT_S)
    images = torch.randn(BATCH, 3, 224, 224)
    tokens = backbone(images, SIGNALS)
    drawn = torch.rand(BATCH, tokens.n, generator=torch.Generator().manual_seed(0))
    known = {"luminance": drawn, "segmentation": drawn, "lesion": drawn > 0.7, "has_mask": torch.ones(BATCH, dtype=torch.bool)}
    tokens = replace(tokens, **known)
    calls = {"backbone": lambda: backbone(images)}
    for name in names:
        chosen, read = name, tokens
        if name in ("segmenter", "scout"):  # a scout without the features of a backbone, on the pixels that it reads
            pixels = Backbone.load(BackboneConfig(name="pixels", image_size=128))
            chosen, read = "scout", pixels.tokens(torch.rand(BATCH, 3, 128, 128))
        options = {"dim": read.dim} if selector_class(chosen).learns else {}
        selector = create_selector(chosen, **options, **({"side": 8} if chosen == "scout" else {}))
        if isinstance(selector, torch.nn.Module):
            selector.eval()
        calls[name] = lambda one=selector, batch=read: one.select(batch, one.count(DEFAULT_BUDGET, batch.n))
    with cpu_threads(1):
        return {name: 1000 * min(taken) / BATCH for name, taken in in_turns(calls, ROUNDS, time.process_time).items()}


def main(arguments: list[str] | None = None) -> None:
    names = [name for name in arguments or () if not name.endswith(".csv")]
    taken = milliseconds(names or list_selectors())
    whole = taken["backbone"]
    print(f"ViT-S/14, batch {BATCH}, one thread: backbone {whole:.0f} ms per image; budget {DEFAULT_BUDGET}")
    for path in (Path(name) for name in arguments or () if name.endswith(".csv")):
        with path.open("w", newline="") as file:
            csv.writer(file).writerows([("selector", "milliseconds"), *((name, f"{one:.3f}") for name, one in taken.items())])
    for name, share in sorted(((name, one / whole) for name, one in taken.items() if name != "backbone"), key=lambda item: item[1]):
        most = MOST_LATS if name == "lats" else MOST
        print(f"{name:20} {share:7.2%} (at most {most:.0%}) {'ok' if share <= most else 'TOO SLOW'}")


if __name__ == "__main__":
    main(sys.argv[1:])
