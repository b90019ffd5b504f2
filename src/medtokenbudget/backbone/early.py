"""`EarlyBackbone`: a frozen backbone that runs where the lesion is, chosen before its first block or inside it.

The router comes in as a function from another room (`EarlyRoute.score`). The tokens are those of the kept patches alone, so heads
are trained on them, never reused from the dense pass; the fingerprint says how they were made.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from medtokenbudget.backbone import routed_pass
from medtokenbudget.backbone.attention import AttentionTap
from medtokenbudget.backbone.backbone import Backbone
from medtokenbudget.backbone.preprocess import Preprocessing
from medtokenbudget.backbone.signals import REGISTRY, reduce_attention
from medtokenbudget.errors import RequestError
from medtokenbudget.tokens import TokenBatch

Way = Literal["scout", "inside"]


@dataclass(frozen=True)
class EarlyRoute:
    """How a backbone is routed early.

    Attributes:
        way: 'scout' chooses patches before block 0, 'inside' before `block`.
        k: Number of patches that are kept.
        score: For 'scout' from images [B, 3, s, s], RGB in [0, 1], to scores [B, n] on `grid`; for 'inside' from the normed tokens
            of the block before `block` to scores [B, N]. The highest are kept.
        size: Side s of the images that `score` reads ('scout').
        grid: Rows and columns of the scores.
        requires: Fields of the `TokenBatch` that `score` reads beside the patches ('inside').
        block: First block that runs on the kept patches ('inside').
        settings: All of this as JSON values, with the hash of the router; part of the backbone's fingerprint.
    """

    way: Way
    k: int
    score: Callable[[Any], Tensor]
    grid: tuple[int, int]
    size: int
    settings: dict[str, Any]
    requires: tuple[str, ...] = ()
    block: int = 4


class Early(Protocol):
    """Makes an early backbone of a loaded one, and saves what that needs."""

    def wrap(self, backbone: Backbone) -> EarlyBackbone: ...

    def save(self, folder: Path) -> Any: ...


class EarlyBackbone(Backbone):
    """A backbone with an early route. It takes over the network of `dense`, which is not to be used any more.

    Raises:
        RequestError: The backbone cannot run on a part of its patches, or the route does not fit it.
    """

    def __init__(self, dense: Backbone, route: EarlyRoute) -> None:
        self.__dict__.update(vars(dense))
        _check(dense, route)
        self.route = route
        self.fingerprint = {**dense.fingerprint, "route": route.settings}
        # Nothing reads the attention of the last block, and its hooks do not know the bias of a background token.
        for block in self.model.blocks:
            block._forward_pre_hooks.clear()
            block._forward_hooks.clear()
        if route.way == "inside" and route.requires:
            self._tap = AttentionTap(self.model.blocks[route.block - 1], self.config.name)

    @property
    def default_signals(self) -> tuple[str, ...]:
        """None: the attention to kept patches is not looked at."""
        return ()

    def tokens(self, images: Tensor, *arguments: Any, **options: Any) -> TokenBatch:
        """Tokens of normalized images [B, 3, S, S], without checks: those of the kept patches with their places on the grid."""
        if self.route.way == "scout":
            kept = self._seen_by_scout(images).topk(self.route.k, dim=1).indices
            routed = routed_pass.before_blocks(self.model, images, kept, self.layer)
        else:
            routed = routed_pass.inside_blocks(self.model, images, self._chosen, self.route.block, self.layer)
        cls = routed.prefix[:, 0] if self.has_cls else None
        return TokenBatch(routed.patches, self.grid, cls=cls, places=routed.indices)

    def _seen_by_scout(self, images: Tensor) -> Tensor:
        """Scores [B, N] on this backbone's grid from images that are normalized for it."""
        scores = self.route.score(reduced(shown(images, self.preprocessing), self.route.size))
        return finer(scores, self.route.grid, self.grid)

    def _chosen(self, x: Tensor) -> Tensor:
        """Patches to keep, from the tokens of the block in front of the pruned one."""
        normed = self.model.norm(x)
        cls = normed[:, 0] if self.has_cls else None
        tokens = TokenBatch(normed[:, self.prefix :], self.grid, cls=cls)
        if self.route.requires:
            assert self._tap is not None
            signals = [name for name in self.route.requires if name in REGISTRY]
            found: dict[str, Any] = dict(reduce_attention(self._tap.inputs(), self.prefix, signals))
            tokens = replace(tokens, **found)
        return self.route.score(tokens).topk(self.route.k, dim=1).indices


def _check(dense: Backbone, route: EarlyRoute) -> None:
    (h, w), (sh, sw), size = dense.grid, route.grid, dense.preprocessing.image_size
    routed_pass.check_routable(dense.model, dense.config.name)
    if route.way == "scout" and (h % sh or w % sw or h // sh != w // sw or size % route.size):
        raise RequestError(
            f"The scout looks at {sh} x {sw} patches of {route.size} pixels, but the backbone has {h} x {w} patches of {size} "
            f"pixels. Each patch of the scout must cover a whole number of the backbone's: choose a backbone, an --image-size or a "
            f"--router whose grid fits."
        )
    if route.way == "inside" and not 1 <= route.block <= dense.layer:
        raise RequestError(
            f"--route block:{route.block} does not exist: tokens come from block {dense.layer}, so it can be block:1 to "
            f"block:{dense.layer}."
        )
    if route.way == "inside" and "rollout" in route.requires:
        raise RequestError("A router inside the backbone cannot read rollout, which needs all blocks. Use another --router.")
    if route.way == "inside" and route.grid != dense.grid:
        raise RequestError(
            f"The router scores {sh} x {sw} patches, but the backbone has {h} x {w}. Use the router of this backbone."
        )


def shown(images: Tensor, preprocessing: Preprocessing) -> Tensor:
    """Images [B, 3, S, S] as RGB in [0, 1] again, from normalized ones."""
    mean = torch.tensor(preprocessing.mean, device=images.device).view(1, 3, 1, 1)
    std = torch.tensor(preprocessing.std, device=images.device).view(1, 3, 1, 1)
    return images * std + mean


def reduced(images: Tensor, size: int) -> Tensor:
    """Images [B, 3, S, S] at `size` pixels, of which S is a multiple: means of squares."""
    times = images.shape[-1] // size
    return images if times == 1 else F.avg_pool2d(images, times)


def finer(scores: Tensor, grid: tuple[int, int], to: tuple[int, int]) -> Tensor:
    """Scores [B, n] of a grid on one whose patches divide its own: [B, N], between the centers of patches."""
    if grid == to:
        return scores
    field = scores.reshape(-1, 1, *grid)
    return F.interpolate(field, size=to, mode="bilinear", align_corners=False).flatten(1)
