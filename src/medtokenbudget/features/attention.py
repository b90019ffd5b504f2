"""The attention of one block, reduced at once to two numbers a patch: entropy (Eq. 1) and the class token's attention.

Its own file because of its trap: query and key come from the block's own projection of `norm1(x)`, with the block's own query and
key norms, so the projection is tapped inside the running block instead of being computed beside it. The `[B, H, T, T]` weights
exist for one image at a time and never leave this file.
"""

from __future__ import annotations

import math
import threading
from typing import NamedTuple

import torch
from timm.models.vision_transformer import Attention
from torch import Tensor, nn
from torch.nn import functional as F

from medtokenbudget.errors import RequestError

CHUNK = 1
"""Images whose attention weights exist at the same time; one stays in the cache and is twice as fast as four."""


class Reduced(NamedTuple):
    """Attention of B images, reduced: entropy [B, N], and class attention [B, N] or None without a class token."""

    entropy: Tensor
    cls_attention: Tensor | None


class QueryKeyTap:
    """Keeps what the query-key-value projection of one block puts out during a forward pass; one value a thread."""

    def __init__(self, block: nn.Module, model_name: str) -> None:
        attention = getattr(block, "attn", None)
        if not isinstance(attention, Attention) or getattr(attention, "qkv", None) is None:
            kind = type(attention if attention is not None else block).__name__
            raise RequestError(
                f"{model_name} has no query and key of its own to read ({kind}). "
                "Ask for attention='pseudo' (cosine similarity of patches) by name, or take a plain vision transformer."
            )
        self.attention = attention
        self._local = threading.local()
        attention.qkv.register_forward_hook(self._keep)

    def _keep(self, _module: nn.Module, _inputs: tuple[Tensor, ...], output: Tensor) -> None:
        self._local.qkv = output

    def query_key(self) -> tuple[Tensor, Tensor]:
        """Query (scaled) and key of the last forward pass of this thread, each [B, H, T, d]."""
        qkv: Tensor = self._local.qkv
        self._local.qkv = None
        module = self.attention
        b, t, _ = qkv.shape
        q, k, _ = qkv.reshape(b, t, 3, module.num_heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        return module.q_norm(q) * module.scale, module.k_norm(k)


def reduce_attention(q: Tensor, k: Tensor, prefix: int, has_cls: bool) -> Reduced:
    """Softmax over all T = prefix + N tokens, mean over heads, then entropy and class attention of the N patches.

    q, k  [B, H, T, d], q scaled. A row's patch weights do not sum to one, because the softmax also covers the prefix tokens.
    """
    if torch.compiler.is_compiling():
        # A traced graph (ONNX) has no number of images yet: it reduces them all at once.
        return _reduce(q, k, prefix, has_cls)
    parts = [_reduce(q[i : i + CHUNK], k[i : i + CHUNK], prefix, has_cls) for i in range(0, q.shape[0], CHUNK)]
    entropy = torch.cat([part.entropy for part in parts])
    if not has_cls:
        return Reduced(entropy, None)
    return Reduced(entropy, torch.cat([part.cls_attention for part in parts if part.cls_attention is not None]))


def _reduce(q: Tensor, k: Tensor, prefix: int, has_cls: bool) -> Reduced:
    weights = (q @ k.transpose(-2, -1)).softmax(-1).mean(1)
    cls_attention = weights[:, 0, prefix:].clone() if has_cls else None
    return Reduced(normalised_entropy(weights[:, prefix:, prefix:]), cls_attention)


def pseudo_attention(patches: Tensor, cls: Tensor | None) -> Reduced:
    """The same two numbers from the softmax of cosine similarities, for models without query and key.

    patches  [B, N, D], cls  [B, D] or None. Rows sum to one here: there are no prefix tokens among the keys.
    """
    unit = F.normalize(patches.float(), dim=-1)
    parts = [unit[i : i + CHUNK] for i in range(0, len(unit), CHUNK)]
    entropy = torch.cat([normalised_entropy((part @ part.transpose(1, 2)).softmax(-1)) for part in parts])
    if cls is None:
        return Reduced(entropy, None)
    similarity = torch.einsum("bnd,bd->bn", unit, F.normalize(cls.float(), dim=-1))
    return Reduced(entropy, similarity.softmax(-1))


def normalised_entropy(weights: Tensor) -> Tensor:
    """`1 - H_i / log N` with `H_i = -sum_j w_ij log w_ij` (Eq. 1); weights [B, N, N] to [B, N]."""
    n = weights.shape[-1]
    if n < 2:
        raise RequestError("attention entropy needs at least two patches.")
    return 1.0 + torch.special.xlogy(weights, weights).sum(-1) / math.log(n)
