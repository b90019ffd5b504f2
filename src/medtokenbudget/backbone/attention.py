"""What a running block passes to its softmax, and its attention of one image at a time, for the signals of `signals.py`.

The trap: query and key are projections of `norm1(x)`, and a block may then normalize, rotate or bias them. So they are captured
where the running block uses them, instead of being computed a second time. The `[B, H, T, T]` weights exist for one image at a time
and never leave this file.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from medtokenbudget.errors import RequestError

CHUNK = 1
"""Images whose attention weights exist at the same time; one fits into the CPU cache and is twice as fast as four."""


class Inputs(NamedTuple):
    """Inputs of one attention: query (scaled), key and value [B, H, T, d], and a bias [H, T, T] of all images, or None."""

    query: Tensor
    key: Tensor
    value: Tensor
    bias: Tensor | None

    def weights(self) -> Tensor:
        """Attention [B, T, T], the mean over heads: softmax over all T tokens, so that rows sum to one."""
        compared = self.query @ self.key.transpose(-2, -1)
        if self.bias is not None:
            compared = compared + self.bias
        return compared.softmax(-1).mean(1)

    def parts(self) -> list[Inputs]:
        """The inputs of a few images at a time; of all at once in a traced graph (ONNX), whose number of images is not fixed."""
        if torch.compiler.is_compiling():
            return [self]
        chunks = zip(self.query.split(CHUNK), self.key.split(CHUNK), self.value.split(CHUNK))
        return [Inputs(query, key, value, self.bias) for query, key, value in chunks]


class _Watch(TorchFunctionMode):
    """Records the arguments of every fused attention that is computed inside it, without changing anything."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Inputs] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            self.seen.append(_inputs(*args, **kwargs))
        return func(*args, **kwargs)


def _inputs(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    **_: Any,
) -> Inputs:
    bias = None if attn_mask is None else attn_mask.squeeze(0)
    if is_causal or (bias is not None and (bias.dtype == torch.bool or bias.ndim > 3)):
        raise RequestError(
            "The attention of this backbone is masked, so its patches do not all see each other. Choose another backbone."
        )
    return Inputs(query * (query.shape[-1] ** -0.5 if scale is None else scale), key, value, bias)


class AttentionTap:
    """Captures the inputs of the attention of one block during a forward pass, after all norms and positions.

    Every thread has its own value.

    Args:
        block: The block.
        model_name: For messages.
        when: Whether the running pass is to be captured; None captures every one.
        done: Called with the inputs after the block ran, which are then not kept.
    """

    def __init__(
        self,
        block: nn.Module,
        model_name: str,
        when: Callable[[], bool] | None = None,
        done: Callable[[Inputs], None] | None = None,
    ) -> None:
        self.model_name, self.when, self.done = model_name, when, done
        self._kind = type(getattr(block, "attn", block)).__name__
        self._local = threading.local()
        modules: Iterable[Any] = block.modules()
        for module in modules:
            if hasattr(module, "fused_attn"):
                module.fused_attn = True  # an environment variable can switch it off, and then there is no call to record
        block.register_forward_pre_hook(self._enter)
        block.register_forward_hook(self._leave, always_call=True)

    def _enter(self, *_: Any) -> None:
        self._local.watch = _Watch() if self.when is None or self.when() else None
        if self._local.watch is not None:
            self._local.watch.__enter__()

    def _leave(self, _module: nn.Module, _inputs: Any, output: Any) -> None:
        if self._local.watch is None:
            return
        self._local.watch.__exit__(None, None, None)
        if output is None:  # the pass failed, perhaps out of memory: keep nothing of it
            self._local.watch.seen.clear()
        elif self.done is not None:
            self.done(self.inputs())

    def inputs(self) -> Inputs:
        """The inputs of the attention in the last forward pass of this thread."""
        seen, self._local.watch = self._local.watch.seen, None
        if len(seen) != 1:
            raise RequestError(
                f"A block of {self.model_name} must compute one attention of query and key, but {self._kind} computes {len(seen)}. "
                "Use --attention pseudo (cosine similarity of patches), or choose another vision transformer."
            )
        return seen[0]


class AttentionRollout:
    """Attention rollout (Abnar and Zuidema, 2020) of the blocks before the chosen one: the product of their `(A + I) / 2`.

    It only runs while `collecting`; every thread has its own product.

    Args:
        blocks: The blocks before the chosen one, in order.
        model_name: For messages.
    """

    def __init__(self, blocks: Iterable[nn.Module], model_name: str) -> None:
        self._local = threading.local()
        self._taps = [AttentionTap(block, model_name, self._is_on, self._multiply) for block in blocks]

    def _is_on(self) -> bool:
        return getattr(self._local, "on", False)

    def _multiply(self, inputs: Inputs) -> None:
        before = self._local.product
        parts = [mixed(part.weights()) for part in inputs.parts()]
        if before is not None:
            parts = [part @ earlier for part, earlier in zip(parts, before.split(CHUNK))]
        self._local.product = torch.cat(parts)

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """Around a forward pass whose `product` is wanted."""
        self._local.on, self._local.product = True, None
        try:
            yield
        finally:
            self._local.on = False

    def product(self) -> Tensor | None:
        """[B, T, T] of the last pass of this thread; None if there is no block before the chosen one."""
        found, self._local.product = self._local.product, None
        return found


def mixed(weights: Tensor) -> Tensor:
    """`(A + I) / 2`: half of a token stays with it through the residual connection."""
    return 0.5 * (weights + torch.eye(weights.shape[-1], dtype=weights.dtype, device=weights.device))


def normalized_entropy(weights: Tensor) -> Tensor:
    """Eq. 1: `1 - H_i / log N` with `H_i = -sum_j w_ij log w_ij`, from weights [B, N, N] to [B, N]."""
    n = weights.shape[-1]
    if n < 2:
        raise RequestError("Attention entropy needs at least two patches. Use a larger image or smaller patches.")
    return 1.0 + torch.special.xlogy(weights, weights).sum(-1) / math.log(n)
