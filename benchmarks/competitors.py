"""What people would use instead of early routing: ToMe in every block of a plain timm ViT, as published.

The selector of the same name is its form after the backbone.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from medtokenbudget.backbone.encoders import partial_encoder
from medtokenbudget.routing.selectors.tome import ToMe

Model = Any
"""A plain timm vision transformer, as `backbone.encoders.TimmViT` runs it."""


def tome_every_block(model: Model, images: Tensor, k: int, layer: int) -> Tensor:
    """ToMe (Bolya et al., ICLR 2023): equally many patches merge in every block, by the similarity of their keys.

    Merged tokens count in the attention with the logarithm of their size (proportional attention); prefix tokens never merge.

    Args:
        model: The vision transformer.
        images: Normalized images [B, 3, S, S].
        k: Patch tokens left after block `layer`.
        layer: The block that tokens are taken from.

    Returns:
        The normed patch tokens [B, k, D].
    """
    encoder = partial_encoder(model, "ViT")
    x, prefix = encoder.embed(images)[0], encoder.prefix
    n = x.shape[1] - prefix
    size = torch.ones(x.shape[0], n, dtype=x.dtype, device=x.device)
    for number, block in enumerate(model.blocks[: layer + 1]):
        left = n - round((n - k) * (number + 1) / (layer + 1))
        bias = torch.cat([torch.zeros_like(size[:, :1]).expand(-1, prefix), size.log()], 1)[:, None, None]
        attended, key = _attention(block.attn, block.norm1(x), bias)
        x = x + block.ls1(attended)
        while x.shape[1] - prefix > left:
            now = x.shape[1] - prefix
            patches, metric = x[:, prefix:], key[:, prefix:]
            patches, metric, size = _merged(patches, metric, size, min(now - left, now // 2))
            x, key = torch.cat([x[:, :prefix], patches], 1), torch.cat([key[:, :prefix], metric], 1)
        x = x + block.ls2(block.mlp(block.norm2(x)))
    tokens: Tensor = model.norm(x)[:, prefix:]
    return tokens


def _merged(patches: Tensor, metric: Tensor, size: Tensor, r: int) -> tuple[Tensor, Tensor, Tensor]:
    """One round of ToMe: pairs are found by `metric`, patches and metric merge to means weighted by size."""
    _, after, moved = ToMe().merge_round(metric, size, r)
    member = torch.nn.functional.one_hot(moved, after.shape[1]).to(patches.dtype).transpose(1, 2)  # [B, n - r, n]
    shares = member * size.unsqueeze(1) / after.unsqueeze(-1)
    return shares @ patches, shares @ metric, after


def _attention(attn: Any, x: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """The block's attention: its output, and the mean key of each token [B, T, d]."""
    b, t, _ = x.shape
    q, k, v = attn.qkv(x).reshape(b, t, 3, attn.num_heads, attn.head_dim).permute(2, 0, 3, 1, 4).unbind(0)
    q, k = attn.q_norm(q), attn.k_norm(k)
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=bias)
    return attn.proj(attn.norm(out.transpose(1, 2).reshape(b, t, -1))), k.mean(1)
