"""The clock of the study `early_study`: CPU milliseconds per image of each way at the block that is read, in turns."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from benchmarks.competitors import evit_blocks, tome_every_block
from benchmarks.early_passes import FINE, GRID, MORE, K, N, Passes, attention_of, dropped, from_center
from benchmarks.early_speed import scout_score
from benchmarks.measuring import in_turns
from medtokenbudget.backbone import partial
from medtokenbudget.backbone.partial import upsample_scores
from medtokenbudget.model import load
from medtokenbudget.routing import LATSSelector
from medtokenbudget.tokens import TokenBatch

NOT_TIMED = ("after-center", "after-masks")
"""Controls that are not ways to save time."""


@torch.inference_mode()
def run(arguments: argparse.Namespace) -> None:
    """Measure the ways, all of them once a round, and write their medians to time.csv. Reading files is not part of it."""
    torch.set_num_threads(1)
    passes = Passes(arguments.weights, [11])
    score = scout_score(load(arguments.scout, device="cpu"))
    if not arguments.ways:
        lines = pd.read_csv(arguments.out / "validation.csv").query("view == 'as-is'")
        arguments.ways = [f"{line.way}@{line.block}" for line in lines.itertuples() if line.way not in NOT_TIMED]
    ways = {name: way(name, passes, score, arguments.batch) for name in arguments.ways}
    spent = in_turns(ways, arguments.rounds, time.process_time)
    measured = []
    for name, seconds in spent.items():
        kind, _, block = name.partition("@")
        milliseconds = 1000 * median(seconds) / arguments.batch
        measured.append({"way": kind, "block": int(block), "batch": arguments.batch, "milliseconds": milliseconds})
        print(f"{name:<26}{milliseconds:8.1f} ms", flush=True)
    pd.DataFrame(measured).round(2).to_csv(arguments.out / "time.csv", index=False)


def way(name: str, passes: Passes, score: Callable[[Tensor], Tensor], batch: int) -> Callable[[], Any]:
    """The whole computation of 'way@block' on a batch of pixels, from the scout to the mean token."""
    kind, _, text = name.partition("@")
    layer = int(text)
    pixels = torch.rand(batch, 3, 224, 224, generator=torch.Generator().manual_seed(0))
    if kind.startswith("embedded"):
        return _embedded(pixels, layer, score, routed=kind != "embedded")
    model = passes.backbone().model

    def whole(of: Any, images: Tensor) -> Tensor:
        return of.norm(partial.run_blocks(of, partial.embed(of, images), 0, layer + 1))[:, 1:]

    def best(k: int) -> Tensor:
        return score(pixels).topk(k, dim=1).indices

    if kind.startswith("dense-"):
        side = int(kind.removeprefix("dense-").removesuffix("px"))
        images, other = torch.rand(batch, 3, side, side), passes.backbone(side).model
        return lambda: whole(other, images).mean(1)
    if kind == "dense":
        return lambda: whole(model, pixels).mean(1)
    if kind in ("after", "after-0.5"):
        return lambda: partial.take(whole(model, pixels), best(K if kind == "after" else MORE)).mean(1)
    if kind in ("tome", "evit"):
        return lambda: (tome_every_block if kind == "tome" else evit_blocks)(model, pixels, K, layer)[0].mean(0)
    if kind.startswith("inside"):
        return _inside(kind, model, pixels, layer, best)
    if kind.startswith(f"scout-{FINE}px-"):
        return _fine(passes.backbone(FINE).model, pixels, layer, score, int(kind.rpartition("-")[2]))
    if kind == "scout-center":
        middle = from_center().topk(K, dim=1).indices.expand(batch, -1)
        return lambda: partial.before_blocks(model, pixels, middle, layer).patches.mean(1)
    assert kind.startswith("scout"), kind
    return lambda: partial.before_blocks(model, pixels, best(MORE if kind == "scout-0.5" else K), layer).patches.mean(1)


def _fine(model: Any, pixels: Tensor, layer: int, score: Callable[[Tensor], Tensor], k: int) -> Callable[[], Any]:
    """The scout on pixels, then k patches of images with twice as many pixels a side."""
    images, grid = torch.rand(len(pixels), 3, FINE, FINE), (2 * GRID[0], 2 * GRID[1])

    def run_it() -> Tensor:
        kept = upsample_scores(score(pixels), GRID, grid).topk(k, dim=1).indices
        return partial.before_blocks(model, images, kept, layer).patches.mean(1)

    return run_it


def _inside(kind: str, model: Any, pixels: Tensor, layer: int, best: Callable[[int], Tensor]) -> Callable[[], Any]:
    """Inside by the scout, by a scorer of its own ('own') or by the attention of the block before."""
    _, place, *rest = kind.split("-")
    scorer = LATSSelector(int(model.num_features), signals=("norm", "contrast"), neighborhood="grid8").eval()

    def choose(before: Tensor, x: Tensor) -> Tensor:
        if rest[0] == "own":
            return scorer.score(TokenBatch(model.norm(x)[:, 1:], (16, 16))).topk(K, dim=1).indices
        if rest[0] in ("evit", "frequency"):
            found = attention_of(model, before, int(place) - 1)
            return found["cls_attention" if rest[0] == "evit" else "received_attention"].topk(K, dim=1).indices
        return from_center().expand(len(x), -1).topk(K, dim=1).indices if rest[0] == "center" else best(K)

    def without_background() -> Tensor:
        before = partial.run_blocks(model, partial.embed(model, pixels), 0, int(place) - 1)
        x = partial.run_blocks(model, before, int(place) - 1, int(place))
        x = partial.run_blocks(model, dropped(x, choose(before, x)), int(place), layer + 1)
        return model.norm(x)[:, 1:].mean(1)

    if rest[-1] != "token":
        return without_background
    return lambda: partial.inside_blocks(model, pixels, choose, int(place), layer).patches.mean(1)


def _embedded(pixels: Tensor, layer: int, score: Callable[[Tensor], Tensor], routed: bool) -> Callable[[], Any]:
    from medtokenbudget.backbone.backbone import Backbone
    from medtokenbudget.config import BackboneConfig

    model = Backbone.load(BackboneConfig(name="embedded", attention="pseudo")).model

    def run_it() -> Tensor:
        if routed:  # the router's own pass gives the tokens too
            return partial.take(known, score(pixels).topk(K, dim=1).indices).mean(1)
        return tokens().mean(1)

    def tokens() -> Tensor:
        found: Tensor = model.norm(partial.run_blocks(model, partial.embed(model, pixels), 0, layer + 1))[:, -N:]
        return found

    known = tokens()
    return run_it
