"""Run a frozen vision transformer on K of its N patches: the routed pass, and `EarlyBackbone`, a backbone that is routed so.

The router comes in as a function. Two ways: only the chosen patches are embedded ('scout', which has seen the image), or all run up
to a block, where the router sees its tokens and the rest collapses into one background token ('inside'). K is fixed, so all shapes
are static, and nothing waits for a value on the host: the pass compiles and exports as one graph. The tokens are those of the kept
patches alone, so heads are trained on them, never reused from the dense pass; the fingerprint says how they were made.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

import torch
from timm.layers import PatchEmbed
from timm.models.vision_transformer import Attention, VisionTransformer
from torch import Tensor
from torch.nn import functional as F

from medtokenbudget.backbone.attention import REGISTRY, AttentionTap, reduce_attention
from medtokenbudget.backbone.backbone import Backbone, Model
from medtokenbudget.errors import RequestError
from medtokenbudget.tokens import TokenBatch

Way = Literal["scout", "inside"]


class RoutedTokens(NamedTuple):
    """Normed tokens of the kept patches [B, K, D], the prefix tokens [B, P, D], and the patches' numbers on the grid [B, K]."""

    patches: Tensor
    prefix: Tensor
    indices: Tensor


def check_routable(model: Model, name: str) -> None:
    """Reject a model whose blocks do not give the same result when the patches that they see are a part of the grid."""
    reasons = []
    if not isinstance(model, VisionTransformer):
        reasons.append("it is not a plain timm VisionTransformer")
    elif not all(isinstance(getattr(block, "attn", None), Attention) for block in model.blocks):
        reasons.append("its attention has relative or rotary positions, or a form of its own")
    if getattr(model, "rope", None) is not None or getattr(model, "shared_rel_pos", None) is not None:
        reasons.append("its positions are relative or rotary")
    embed = getattr(model, "patch_embed", None)
    if type(embed) is not PatchEmbed or embed.proj.kernel_size != embed.proj.stride:
        reasons.append("its patch embedding is not one linear map per patch")
    if reasons:
        raise RequestError(
            f"'{name}' cannot run on a part of its patches: {'; '.join(reasons)}. Route after the backbone (leave out `route`), "
            "or choose a plain `vit_...` model of timm with absolute positions."
        )


def before_blocks(model: Model, images: Tensor, indices: Tensor, layer: int) -> RoutedTokens:
    """Embed the patches `indices` [B, K] alone, in any order, and run the blocks 0 to `layer` on them and the prefix tokens."""
    x = embed(model, images, indices)
    return _finish(model, run_blocks(model, x, 0, layer + 1), indices)


def inside_blocks(model: Model, images: Tensor, choose: Callable[[Tensor], Tensor], block: int, layer: int) -> RoutedTokens:
    """Run all patches through the blocks before `block` >= 1, and the chosen ones with a background token up to block `layer`.

    `choose` makes the kept patches [B, K] of the tokens that the block before `block` gave, [B, P + N, D].
    """
    x = run_blocks(model, embed(model, images), 0, block)
    indices = choose(x)
    x, bias = prune(x, indices, int(model.num_prefix_tokens))
    return _finish(model, run_blocks(model, x, block, layer + 1, bias), indices)


def embed(model: Model, images: Tensor, indices: Tensor | None = None) -> Tensor:
    """Return prefix tokens and embedded patches with their positions, [B, P + K, D]; only `indices` [B, K] are computed."""
    if indices is None:
        x = model._pos_embed(model.patch_embed(images))
    else:
        # What the convolution gives at these patches, as a product with its weights.
        (height, width), (h, w), proj = model.patch_embed.patch_size, model.patch_embed.grid_size, model.patch_embed.proj
        b, c = images.shape[:2]
        cut = images.reshape(b, c, h, height, w, width).permute(0, 2, 4, 1, 3, 5).reshape(b, h * w, c * height * width)
        patches = model.patch_embed.norm(F.linear(take(cut, indices), proj.weight.flatten(1), proj.bias))
        # Which prefix tokens there are, in which order and with which positions differs between families: the model itself says it.
        d, prefix = patches.shape[-1], int(model.num_prefix_tokens)
        nothing = patches.new_zeros((1, h, w, d) if model.dynamic_img_size else (1, h * w, d))
        tokens = model._pos_embed(nothing).expand(b, -1, -1)
        x = torch.cat([tokens[:, :prefix], patches + take(tokens[:, prefix:], indices)], 1)
    normed: Tensor = model.norm_pre(x)
    return normed


def prune(x: Tensor, indices: Tensor, prefix: int) -> tuple[Tensor, Tensor | None]:
    """Keep the prefix tokens and the patches `indices` [B, K] of the tokens [B, P + N, D], and replace the others by their mean.

    Returns:
        The tokens [B, P + K + 1, D], the last of them the background token, and what is added to the attention logits of every
        query, [B, 1, 1, P + K + 1]: the logarithm of the number of dropped patches at the background token, as if they were all
        still there and equal, and 0 elsewhere. If no patch is dropped, there is no background token and the bias is None.
    """
    patches = x[:, prefix:]
    kept = torch.cat([x[:, :prefix], take(patches, indices)], 1)
    b, n, k = patches.shape[0], patches.shape[1], indices.shape[1]
    if k == n:
        return kept, None
    dropped = torch.ones(b, 1, n, dtype=x.dtype, device=x.device).scatter(2, indices.unsqueeze(1), 0.0)
    size = dropped.sum(-1)
    rest = dropped @ patches / size.unsqueeze(-1)
    bias = torch.cat([torch.zeros_like(kept[..., 0]), size.log()], 1)
    return torch.cat([kept, rest], 1), bias[:, None, None]


def run_blocks(model: Model, x: Tensor, first: int, end: int, bias: Tensor | None = None) -> Tensor:
    """Run the model's own blocks `first` to `end` - 1; `bias` is added to the attention logits of each."""
    for block in model.blocks[first:end]:
        x = block(x) if bias is None else block(x, attn_mask=bias)
    return x


def take(tokens: Tensor, indices: Tensor) -> Tensor:
    """Gather the tokens [B, N, D] at `indices` [B, K], in that order: [B, K, D]."""
    return tokens.gather(1, indices.unsqueeze(-1).expand(-1, -1, tokens.shape[-1]))


def _finish(model: Model, x: Tensor, indices: Tensor) -> RoutedTokens:
    """Return normed tokens without the background token."""
    x, prefix = model.norm(x), int(model.num_prefix_tokens)
    return RoutedTokens(x[:, prefix : prefix + indices.shape[1]], x[:, :prefix], indices)


@dataclass(frozen=True)
class EarlyRoute:
    """How a backbone is routed early."""

    way: Way
    """'scout' chooses patches before block 0, 'inside' before `block`."""
    k: int
    """Number of patches that are kept: those with the highest scores."""
    score: Callable[[Any], Tensor]
    """For 'scout' from images [B, 3, s, s], RGB in [0, 1], to scores [B, n] on `grid`; for 'inside' from the normed tokens of the
    block before `block` to scores [B, N]."""
    grid: tuple[int, int]
    size: int
    """Side s of the images that `score` reads ('scout')."""
    settings: dict[str, Any]
    """All of this as JSON values, with the hash of the router; part of the backbone's fingerprint."""
    requires: tuple[str, ...] = ()
    """Fields of the `TokenBatch` that `score` reads in addition to the patches ('inside')."""
    block: int = 4
    """First block that runs on the kept patches ('inside')."""


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
        _check_route(dense, route)
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
        """Compute the tokens of the kept patches of normalized images [B, 3, S, S], with their places on the grid; no checks."""
        if self.route.way == "scout":
            scores = self.route.score(downscale(self.preprocessing.denormalize(images), self.route.size))
            kept = upsample_scores(scores, self.route.grid, self.grid).topk(self.route.k, dim=1).indices
            routed = before_blocks(self.model, images, kept, self.layer)
        else:
            routed = inside_blocks(self.model, images, self._choose, self.route.block, self.layer)
        cls = routed.prefix[:, 0] if self.has_cls else None
        return TokenBatch(routed.patches, self.grid, cls=cls, places=routed.indices)

    def _choose(self, x: Tensor) -> Tensor:
        """Choose the patches to keep from the tokens of the block in front of the pruned one."""
        normed = self.model.norm(x)
        cls = normed[:, 0] if self.has_cls else None
        tokens = TokenBatch(normed[:, self.prefix :], self.grid, cls=cls)
        if self.route.requires:
            assert self._tap is not None
            signals = [name for name in self.route.requires if name in REGISTRY]
            values: dict[str, Any] = dict(reduce_attention(self._tap.inputs(), self.prefix, signals))
            tokens = replace(tokens, **values)
        return self.route.score(tokens).topk(self.route.k, dim=1).indices


def _check_route(dense: Backbone, route: EarlyRoute) -> None:
    (h, w), (sh, sw), size = dense.grid, route.grid, dense.preprocessing.image_size
    check_routable(dense.model, dense.config.name)
    if route.way == "scout" and (h % sh or w % sw or h // sh != w // sw or size < route.size):
        raise RequestError(
            f"The scout looks at {sh} x {sw} patches of {route.size} pixels, but the backbone has {h} x {w} patches of {size} "
            f"pixels. Each patch of the scout must cover a whole number of the backbone's: choose a backbone, an `image_size` or a "
            "`router` whose grid fits."
        )
    if route.way == "inside" and not 1 <= route.block <= dense.layer:
        raise RequestError(
            f"`route` block:{route.block} does not exist: tokens come from block {dense.layer}, so it can be block:1 to "
            f"block:{dense.layer}."
        )
    if route.way == "inside" and "rollout" in route.requires:
        raise RequestError("A router inside the backbone cannot read rollout, which needs all blocks. Use another `router`.")
    if route.way == "inside" and route.grid != dense.grid:
        raise RequestError(
            f"The router scores {sh} x {sw} patches, but the backbone has {h} x {w}. Use the router of this backbone."
        )


def downscale(images: Tensor, size: int) -> Tensor:
    """Reduce images [B, 3, S, S] to `size` pixels: by means of squares, or bilinearly where S is not a multiple of `size`."""
    side = images.shape[-1]
    if side == size:
        return images
    if side % size == 0:
        return F.avg_pool2d(images, side // size)
    # The triangle filter that Pillow resizes with, as two products: exported graphs have no filter that avoids aliasing.
    scale = side / size
    centers = (torch.arange(size, device=images.device) + 0.5) * scale
    places = torch.arange(side, device=images.device) + 0.5
    weights = (1 - (places - centers.unsqueeze(1)).abs() / scale).clamp(min=0)
    weights = weights / weights.sum(1, keepdim=True)
    return weights @ images @ weights.T


def upsample_scores(scores: Tensor, grid: tuple[int, int], to: tuple[int, int]) -> Tensor:
    """Interpolate scores [B, n] of a grid to one whose patches divide its own, [B, N], between the centers of patches."""
    if grid == to:
        return scores
    field = scores.reshape(-1, 1, *grid)
    return F.interpolate(field, size=to, mode="bilinear", align_corners=False).flatten(1)
