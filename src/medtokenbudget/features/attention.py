"""The attention of one block, reduced to two numbers per patch: its entropy (Eq. 1) and the attention of the class token.

The trap: query and key are projections of `norm1(x)`, and a block may then normalize, rotate or bias them. So they are captured
where the running block passes them to its softmax, instead of being computed a second time. The `[B, H, T, T]` weights exist for
one image at a time and never leave this file.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from medtokenbudget.errors import RequestError

CHUNK = 1
"""Images whose attention weights exist at the same time; one fits into the CPU cache and is twice as fast as four."""


class Reduced(NamedTuple):
    """Reduced attention of B images: entropy [B, N], and class attention [B, N] or None without a class token."""

    entropy: Tensor
    cls_attention: Tensor | None


class QueryKey(NamedTuple):
    """Inputs of one attention: query (scaled) and key [B, H, T, d], and a bias [H, T, T] shared by all images, or None."""

    query: Tensor
    key: Tensor
    bias: Tensor | None


class _Watch(TorchFunctionMode):
    """Records the arguments of every fused attention that is computed inside it, without changing anything."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[QueryKey] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            self.seen.append(_query_key(*args, **kwargs))
        return func(*args, **kwargs)


def _query_key(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    **_: Any,
) -> QueryKey:
    bias = None if attn_mask is None else attn_mask.squeeze(0)
    if is_causal or (bias is not None and (bias.dtype == torch.bool or bias.ndim > 3)):
        raise RequestError(
            "The attention of this backbone is masked, so its patches do not all see each other. Choose another backbone."
        )
    return QueryKey(query * (query.shape[-1] ** -0.5 if scale is None else scale), key, bias)


class QueryKeyTap:
    """Captures query, key and bias of the attention of one block during a forward pass, after all norms and positions.

    Every thread has its own value.
    """

    def __init__(self, block: nn.Module, model_name: str) -> None:
        self.model_name = model_name
        self._kind = type(getattr(block, "attn", block)).__name__
        self._local = threading.local()
        modules: Iterable[Any] = block.modules()
        for module in modules:
            if hasattr(module, "fused_attn"):
                module.fused_attn = True  # an environment variable can switch it off, and then there is no call to record
        block.register_forward_pre_hook(self._enter)
        block.register_forward_hook(self._leave, always_call=True)

    def _enter(self, *_: Any) -> None:
        self._local.watch = _Watch()
        self._local.watch.__enter__()

    def _leave(self, _module: nn.Module, _inputs: Any, output: Any) -> None:
        self._local.watch.__exit__(None, None, None)
        if output is None:  # the pass failed, perhaps out of memory: keep nothing of it
            self._local.watch.seen.clear()

    def query_key(self) -> QueryKey:
        """The inputs of the attention in the last forward pass of this thread."""
        seen, self._local.watch = self._local.watch.seen, None
        if len(seen) != 1:
            raise RequestError(
                f"A block of {self.model_name} must compute one attention of query and key, but {self._kind} computes {len(seen)}. "
                "Use --attention pseudo (cosine similarity of patches), or choose another vision transformer."
            )
        return seen[0]


def reduce_attention(of: QueryKey, prefix: int, has_cls: bool) -> Reduced:
    """Softmax over all T = prefix + N tokens, mean over heads, then entropy and class attention of the N patches.

    The patch weights of a row do not sum to one, because the softmax includes the prefix tokens.

    Args:
        of: The inputs of the attention.
        prefix: Number of tokens before the patches.
        has_cls: Whether the first of them is a class token.
    """
    if torch.compiler.is_compiling():
        # A traced graph (ONNX) has no fixed number of images, so it reduces them all at once.
        return _reduce(of, prefix, has_cls)
    chunks = zip(of.query.split(CHUNK), of.key.split(CHUNK))
    parts = [_reduce(QueryKey(query, key, of.bias), prefix, has_cls) for query, key in chunks]
    entropy = torch.cat([part.entropy for part in parts])
    if not has_cls:
        return Reduced(entropy, None)
    return Reduced(entropy, torch.cat([part.cls_attention for part in parts if part.cls_attention is not None]))


def _reduce(of: QueryKey, prefix: int, has_cls: bool) -> Reduced:
    compared = of.query @ of.key.transpose(-2, -1)
    if of.bias is not None:
        compared = compared + of.bias
    weights = compared.softmax(-1).mean(1)
    cls_attention = weights[:, 0, prefix:].clone() if has_cls else None
    return Reduced(normalized_entropy(weights[:, prefix:, prefix:]), cls_attention)


def pseudo_attention(patches: Tensor, cls: Tensor | None) -> Reduced:
    """The same two numbers from the softmax of cosine similarities, for models whose query and key cannot be captured.

    Rows sum to one here, because there are no prefix tokens among the keys.

    Args:
        patches: Patch tokens [B, N, D].
        cls: Class tokens [B, D], or None.
    """
    unit = F.normalize(patches.float(), dim=-1)
    parts = [unit[i : i + CHUNK] for i in range(0, len(unit), CHUNK)]
    entropy = torch.cat([normalized_entropy((part @ part.transpose(1, 2)).softmax(-1)) for part in parts])
    if cls is None:
        return Reduced(entropy, None)
    similarity = torch.einsum("bnd,bd->bn", unit, F.normalize(cls.float(), dim=-1))
    return Reduced(entropy, similarity.softmax(-1))


def normalized_entropy(weights: Tensor) -> Tensor:
    """Eq. 1: `1 - H_i / log N` with `H_i = -sum_j w_ij log w_ij`, from weights [B, N, N] to [B, N]."""
    n = weights.shape[-1]
    if n < 2:
        raise RequestError("Attention entropy needs at least two patches. Use a larger image or smaller patches.")
    return 1.0 + torch.special.xlogy(weights, weights).sum(-1) / math.log(n)
