"""The passes of the study `early_study`: every way of spending computation, from pictures and a scout's scores to mean tokens.

A pass gives the mean of the tokens that a head would read, for several blocks at once, named 'way@block'; and, where a way
chooses patches by something else than the scout's scores, which ones it kept ('kept:way').
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

from benchmarks.competitors import evit_blocks, tome_every_block
from medtokenbudget.backbone import partial
from medtokenbudget.backbone.attention import Inputs, reduce_attention
from medtokenbudget.backbone.backbone import Backbone
from medtokenbudget.backbone.partial import EarlyBackbone, upsample_scores
from medtokenbudget.config import BackboneConfig
from medtokenbudget.model import EarlyRouting, load
from medtokenbudget.routing import rank

BACKBONE = "vit_small_patch14_dinov2.lvd142m"
GRID, N = (16, 16), 256
K, MORE = 76, 128
"""Patches kept at budgets 0.3 and 0.5."""
CORE = 51
"""Of the K patches of the ring, those that the scout chose; the others are the ones around them."""
PLACES = (2, 4, 6)
"""Before which blocks to prune inside."""
EARLY_BLOCKS = 7
"""Early ways and other image sizes are read up to this block; the dense pass up to any."""
FINE, FINE_K = 448, (102, 256)
"""Pixels of a finer image, and how many of its 1,024 patches are kept: budgets 0.1 and 0.25."""
Found = Iterator[tuple[str, Tensor]]


class Seen(NamedTuple):
    """A batch: the pictures, the scout's scores [B, 256], the lesion patches [B, 256] and the folds of the images [B]."""

    pictures: list[Image.Image]
    scores: Tensor
    lesion: Tensor
    fold: Tensor


def from_center(grid: tuple[int, int] = GRID) -> Tensor:
    """Scores [1, N] that rank the patches by their distance from the center of the image."""
    row, column = torch.meshgrid(torch.arange(grid[0]), torch.arange(grid[1]), indexing="ij")
    away = (row - (grid[0] - 1) / 2) ** 2 + (column - (grid[1] - 1) / 2) ** 2
    return -away.flatten().float().unsqueeze(0)


def ringed(scores: Tensor, k: int, core: int) -> Tensor:
    """The `core` best patches, and of the others the nearest to them up to k, the better of those equally near: [B, k]."""
    inside = torch.zeros_like(scores).scatter(1, rank(scores)[:, :core], 1.0)
    steps = torch.zeros_like(scores)
    field = inside
    for _ in range(max(GRID)):
        steps = steps + 1 - field
        field = F.max_pool2d(field.view(-1, 1, *GRID), 3, 1, 1).flatten(1)
    order = rank(scores).argsort(1).float() / N
    return rank(-steps - order)[:, :k]


def dropped(x: Tensor, kept: Tensor) -> Tensor:
    """The class token and the kept patches of [B, 1 + N, D], without a background token: so the study judged foreign routers."""
    return torch.cat([x[:, :1], partial.take(x[:, 1:], kept)], 1)


def read(model: Any, x: Tensor, first: int, blocks: Sequence[int], way: str, k: int, bias: Tensor | None = None) -> Found:
    """Run the blocks from `first` on and yield the mean of the k patch tokens after each of `blocks`."""
    prefix = int(model.num_prefix_tokens)
    for number in range(first, max(blocks) + 1):
        x = partial.run_blocks(model, x, number, number + 1, bias)
        if number in blocks:
            yield f"{way}@{number}", model.norm(x)[:, prefix : prefix + k].mean(1)


def attention_of(model: Any, before: Tensor, number: int) -> dict[str, Tensor]:
    """Class attention and received attention [B, N] of a block, from the tokens that it reads."""
    attn, x = model.blocks[number].attn, model.blocks[number].norm1(before)
    b, t, _ = x.shape
    query, key, value = attn.qkv(x).reshape(b, t, 3, attn.num_heads, attn.head_dim).permute(2, 0, 3, 1, 4).unbind(0)
    inputs = Inputs((attn.q_norm(query) * attn.scale).float(), attn.k_norm(key).float(), value, None)
    return reduce_attention(inputs, int(model.num_prefix_tokens), ("cls_attention", "received_attention"))


class Passes:
    """The groups of ways; each is a method from a batch to named means.

    Args:
        weights: Weights of the ViT-S/14.
        blocks: Blocks to read.
        inside: Runs of routers that were trained on the tokens of block 3, for the group `own`: one for the images of each fold.
        precision: Of the large backbone: 'fp32', or 'bf16' for a study in half the time.
    """

    GROUPS = (
        "dense",
        "scout",
        "middle",
        "small",
        "medium",
        "large",
        "fine",
        "tome",
        "evit",
        "embedded",
        "own",
    )

    def __init__(self, weights: Path, blocks: Sequence[int], inside: Sequence[Path] = (), precision: str = "fp32") -> None:
        self.weights, self.blocks, self.inside = weights, sorted(blocks), inside
        self.early_blocks = [block for block in self.blocks if block <= EARLY_BLOCKS]
        self.dtype = torch.bfloat16 if precision == "bf16" else torch.float32
        self._backbones: dict[int | str, Backbone] = {}

    def backbone(self, size: int = 224) -> Backbone:
        if size not in self._backbones:
            config = BackboneConfig(name=BACKBONE, weights=self.weights, image_size=size, attention="pseudo")
            self._backbones[size] = Backbone.load(config)
            self._backbones[size].model.to(self.dtype)
        return self._backbones[size]

    def images(self, pictures: list[Image.Image], size: int = 224) -> Tensor:
        return prepared(self.backbone(size), pictures).to(self.dtype)

    def dense(self, seen: Seen) -> Found:
        """All patches; the paper's way (patches chosen after the backbone) with controls; and patches chosen inside."""
        model, scores, lesion = self.backbone().model, seen.scores, seen.lesion
        x, order = partial.embed(model, self.images(seen.pictures)), rank(scores)
        kept = {
            "after": order[:, :K],
            "after-0.5": order[:, :MORE],
            "after-center": rank(from_center())[:, :K].expand(len(x), -1),
            "after-masks": rank(lesion + 0.5 * scores.softmax(1))[:, :K],
        }
        for number in range(max(self.blocks) + 1):
            if number in PLACES:
                yield from self.pruned(x, order[:, :K], number, f"inside-{number}-token")
            before, x = x, partial.run_blocks(model, x, number, number + 1)
            if number == 3:
                yield from self.free(before, x)
            if number in self.blocks:
                normed = model.norm(x)[:, 1:]
                yield f"dense@{number}", normed.mean(1)
                yield from ((f"{way}@{number}", partial.take(normed, one).mean(1)) for way, one in kept.items())

    def pruned(self, x: Tensor, kept: Tensor, place: int, way: str) -> Found:
        short, bias = partial.prune(x, kept, 1)
        yield from read(self.backbone().model, short, place, self.early_blocks, way, kept.shape[1], bias)

    def free(self, before: Tensor, x: Tensor) -> Found:
        """Routers that learned nothing, before block 4: class attention, received attention, the center."""
        found = attention_of(self.backbone().model, before, 3)
        ranked = {
            "evit": found["cls_attention"],
            "frequency": found["received_attention"],
            "center": from_center().expand(len(x), -1),
        }
        for name, scores in ranked.items():
            kept = rank(scores)[:, :K]
            yield f"kept:inside-4-{name}", kept.to(torch.uint8)
            yield from read(self.backbone().model, dropped(x, kept), 4, self.early_blocks, f"inside-4-{name}", K)

    def own(self, seen: Seen) -> Found:
        """Inside before block 4, by routers that were trained with masks on the tokens of block 3, one for each fold."""
        model = self.backbone().model
        before = partial.run_blocks(model, partial.embed(model, self.images(seen.pictures)), 0, 3)
        x = partial.run_blocks(model, before, 3, 4)
        kept = torch.zeros(len(x), K, dtype=torch.long)
        for fold in seen.fold.unique().tolist():
            at = seen.fold == fold
            kept[at] = self.router(fold)._chosen(before[at].float(), x[at].float())
        yield "kept:inside-4-own", kept.to(torch.uint8)
        yield from self.pruned(x, kept, 4, "inside-4-own-token")

    def router(self, fold: int) -> EarlyBackbone:
        """The backbone that is routed inside by the router of a fold."""
        name = f"own{fold}"
        if name not in self._backbones:
            config = BackboneConfig(name=BACKBONE, weights=self.weights, image_size=224, attention="pseudo")
            self._backbones[name] = EarlyRouting(load(self.inside[fold], device="cpu"), "inside").wrap(Backbone.load(config))
        found = self._backbones[name]
        assert isinstance(found, EarlyBackbone)
        return found

    def scout(self, seen: Seen) -> Found:
        """The scout's patches alone from block 0 on, at two budgets, and fewer of them with a ring of others around."""
        model, images, order = self.backbone().model, self.images(seen.pictures), rank(seen.scores)
        ring = ringed(seen.scores, K, CORE)
        yield "kept:scout-ring", ring.to(torch.uint8)
        for way, kept in (("scout-0.3", order[:, :K]), ("scout-0.5", order[:, :MORE]), ("scout-ring", ring)):
            yield from read(model, partial.embed(model, images, kept), 0, self.early_blocks, way, kept.shape[1])

    def middle(self, seen: Seen) -> Found:
        """The patches in the middle of the image from block 0 on: what the scout has to beat."""
        model, kept = self.backbone().model, rank(from_center())[:, :K].expand(len(seen.scores), -1)
        x = partial.embed(model, self.images(seen.pictures), kept)
        yield from read(model, x, 0, self.early_blocks, "scout-center", K)

    def small(self, seen: Seen) -> Found:
        """A dense image of fewer pixels, faster than the scout."""
        yield from self.sized(seen, 140)

    def medium(self, seen: Seen) -> Found:
        """A dense image of fewer pixels, about as fast as the scout."""
        yield from self.sized(seen, 154)

    def large(self, seen: Seen) -> Found:
        """A dense image of more pixels."""
        yield from self.sized(seen, 308)

    def fine(self, seen: Seen) -> Found:
        """The scout's patches of an image with twice as many pixels a side, so four for each of the scout's."""
        model, images = self.backbone(FINE).model, self.images(seen.pictures, FINE)
        order = rank(upsample_scores(seen.scores, GRID, (2 * GRID[0], 2 * GRID[1])))
        for k in FINE_K:
            x = partial.embed(model, images, order[:, :k])
            yield from read(model, x, 0, self.early_blocks, f"scout-{FINE}px-{k}", k)

    def sized(self, seen: Seen, size: int) -> Found:
        model, count = self.backbone(size).model, (size // 14) ** 2
        x = partial.embed(model, self.images(seen.pictures, size))
        yield from read(model, x, 0, self.early_blocks, f"dense-{size}px", count)

    def tome(self, seen: Seen) -> Found:
        """ToMe in every block, down to K at the very block that is read."""
        model, images = self.backbone().model, self.images(seen.pictures)
        yield f"tome@{EARLY_BLOCKS}", tome_every_block(model, images, K, EARLY_BLOCKS).mean(1)

    def evit(self, seen: Seen) -> Found:
        """EViT at blocks 3 and 6, down to K."""
        tokens, kept = evit_blocks(self.backbone().model, self.images(seen.pictures), K, EARLY_BLOCKS)
        yield f"evit@{EARLY_BLOCKS}", tokens.mean(1)
        yield "kept:evit", kept.to(torch.uint8)

    def embedded(self, seen: Seen) -> Found:
        """The small backbone alone: all patches, and its own router's."""
        if "embedded" not in self._backbones:
            self._backbones["embedded"] = Backbone.load(BackboneConfig(name="embedded", attention="pseudo"))
        small = self._backbones["embedded"]
        x, kept = partial.embed(small.model, prepared(small, seen.pictures)), rank(seen.scores)[:, :K]
        for number in range(len(small.model.blocks)):
            x = partial.run_blocks(small.model, x, number, number + 1)
            normed = small.model.norm(x)[:, small.prefix :]
            yield f"embedded@{number}", normed.mean(1)
            yield f"embedded-after@{number}", partial.take(normed, kept).mean(1)


def prepared(backbone: Backbone, pictures: list[Image.Image]) -> Tensor:
    """Pictures as the backbone reads them."""
    return backbone.normalize(torch.from_numpy(np.stack([backbone.prepare(picture) for picture in pictures])))
