"""The routed pass: a vision transformer runs its own timm blocks on K of its N patches. The router comes in as a function.

Two ways: only the chosen patches are embedded (`choose` has seen the image), or all of them run up to a block, where `choose` sees
its tokens and the rest collapses into one background token. K is fixed, so that all shapes are static, and nothing
waits for a value on the host: the pass compiles and exports as one graph.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from timm.layers import PatchEmbed
from timm.models.vision_transformer import Attention, VisionTransformer
from torch import Tensor
from torch.nn import functional as F

from medtokenbudget.errors import RequestError

Model = Any
"""A timm vision transformer; its attributes have no static types."""


class Routed(NamedTuple):
    """Normed tokens of the kept patches [B, K, D], the prefix tokens [B, P, D], and the patches' numbers on the grid [B, K]."""

    patches: Tensor
    prefix: Tensor
    indices: Tensor


def check_routable(model: Model, name: str) -> None:
    """Reject a model whose blocks do not give the same result when the patches that they see are a part of the grid.

    Raises:
        RequestError: It has relative or rotary positions, another attention, or an embedding that mixes patches.
    """
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
            f"'{name}' cannot run on a part of its patches: {'; '.join(reasons)}. Route after the backbone (drop --route), "
            "or choose a plain `vit_...` model of timm with absolute positions."
        )


def before_blocks(model: Model, images: Tensor, indices: Tensor, layer: int) -> Routed:
    """Embed the patches `indices` alone and run the blocks 0 to `layer` on them and the prefix tokens.

    Args:
        model: The vision transformer.
        images: Normalized images [B, 3, S, S].
        indices: Numbers of the kept patches [B, K] in raster order of the grid; in any order, which changes nothing.
        layer: The block that tokens are taken from.
    """
    x = embed(model, images, indices)
    return _finish(model, run_blocks(model, x, 0, layer + 1), indices)


def inside_blocks(
    model: Model,
    images: Tensor,
    choose: Callable[[Tensor], Tensor],
    block: int,
    layer: int,
) -> Routed:
    """Run all patches through the blocks before `block`, and the chosen ones with a background token through the others.

    Args:
        model: The vision transformer.
        images: Normalized images [B, 3, S, S].
        choose: From the tokens that the block before `block` gave, [B, P + N, D], to the kept patches [B, K].
        block: The first block that runs on a part of the patches, 1 or more.
        layer: The block that tokens are taken from.
    """
    x = run_blocks(model, embed(model, images), 0, block)
    indices = choose(x)
    x, bias = prune(x, indices, int(model.num_prefix_tokens))
    return _finish(model, run_blocks(model, x, block, layer + 1, bias), indices)


def embed(model: Model, images: Tensor, indices: Tensor | None = None) -> Tensor:
    """Prefix tokens and embedded patches with their positions, [B, P + K, D]; only the patches `indices` [B, K] are computed."""
    if indices is None:
        x = model._pos_embed(model.patch_embed(images))
    else:
        patches = _embedded(model.patch_embed, images, indices)
        x = _positioned(model, patches, indices)
    tokens: Tensor = model.norm_pre(x)
    return tokens


def _embedded(patch_embed: Any, images: Tensor, indices: Tensor) -> Tensor:
    """What the convolution gives at the patches `indices`, as a product with its weights."""
    (height, width), (h, w) = patch_embed.patch_size, patch_embed.grid_size
    b, c = images.shape[:2]
    cut = images.reshape(b, c, h, height, w, width).permute(0, 2, 4, 1, 3, 5).reshape(b, h * w, c * height * width)
    weight, bias = patch_embed.proj.weight, patch_embed.proj.bias
    tokens: Tensor = patch_embed.norm(F.linear(take(cut, indices), weight.flatten(1), bias))
    return tokens


def _positioned(model: Model, patches: Tensor, indices: Tensor) -> Tensor:
    """Prefix tokens, then the patches, each with the position embedding that it has in the dense pass."""
    (h, w), (b, _, d), prefix = model.patch_embed.grid_size, patches.shape, int(model.num_prefix_tokens)
    # Which prefix tokens there are, in which order and with which positions differs between families, so the model itself says it.
    nothing = patches.new_zeros((1, h, w, d) if model.dynamic_img_size else (1, h * w, d))
    tokens = model._pos_embed(nothing).expand(b, -1, -1)
    return torch.cat([tokens[:, :prefix], patches + take(tokens[:, prefix:], indices)], 1)


def prune(x: Tensor, indices: Tensor, prefix: int) -> tuple[Tensor, Tensor | None]:
    """Keep the prefix tokens and the patches `indices` of the tokens [B, P + N, D], and replace the others by their mean.

    Args:
        x: Prefix tokens, then patches.
        indices: Numbers of the kept patches [B, K].
        prefix: Number of prefix tokens.

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
    """The model's own blocks `first` to `end` - 1; `bias` is added to the attention logits of each."""
    for block in model.blocks[first:end]:
        x = block(x) if bias is None else block(x, attn_mask=bias)
    return x


def take(tokens: Tensor, indices: Tensor) -> Tensor:
    """The tokens [B, N, D] at `indices` [B, K], in that order: [B, K, D]."""
    return tokens.gather(1, indices.unsqueeze(-1).expand(-1, -1, tokens.shape[-1]))


def _finish(model: Model, x: Tensor, indices: Tensor) -> Routed:
    """Normed tokens without the background token."""
    x, prefix = model.norm(x), int(model.num_prefix_tokens)
    return Routed(x[:, prefix : prefix + indices.shape[1]], x[:, :prefix], indices)
