"""The attention of a running block, and the signals of patches that are computed from it.

The trap: query and key are projections of `norm1(x)`, and a block may then normalize, rotate or bias them. So they are captured
where the running block uses them, instead of being computed a second time. The `[B, H, T, T]` weights exist for one image at a time
and never leave this file.

The signals are one table for extraction, stores and live models. A selector names what it reads in `requires`; nothing else is
computed.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import repeat
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from medtokenbudget.errors import RequestError

DEFAULT = ("attention_entropy", "cls_attention")
"""What is computed unless something else is requested: the signals of LATS and of its distillation."""
CHUNK = 1
"""Images whose attention weights exist at the same time; one fits into the CPU cache and is twice as fast as four."""
PSEUDO_TEMPERATURE = 0.1
"""Scale of pseudo-attention. The paper does not give it; its authors divide the cosines by this."""


class Inputs(NamedTuple):
    """Inputs of one attention: query (scaled), key and value [B, H, T, d], and a bias [H, T, T] of all images, or None."""

    query: Tensor
    key: Tensor
    value: Tensor
    bias: Tensor | None

    def weights(self) -> Tensor:
        """Compute the attention [B, T, T], the mean over heads: softmax over all T tokens, so that rows sum to one."""
        compared = self.query @ self.key.transpose(-2, -1)
        if self.bias is not None:
            compared = compared + self.bias
        return compared.softmax(-1).mean(1)

    def parts(self) -> list[Inputs]:
        """Split off a few images at a time; a traced graph (ONNX), whose number of images is not fixed, gets all at once."""
        if torch.compiler.is_compiling():
            return [self]
        chunks = zip(self.query.split(CHUNK), self.key.split(CHUNK), self.value.split(CHUNK))
        return [Inputs(query, key, value, self.bias) for query, key, value in chunks]


class _Watch(TorchFunctionMode):
    """Records the arguments of every fused attention that is computed inside it, without changing anything."""

    def __init__(self) -> None:
        super().__init__()
        self.recorded: list[Inputs] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            self.recorded.append(_inputs(*args, **kwargs))
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
    # A mask of bools forbids pairs, and one with a batch axis differs between images; neither is a bias of all images.
    if is_causal or (bias is not None and (bias.dtype == torch.bool or bias.ndim > 3)):
        raise RequestError("The attention of this backbone is masked, so its patches do not all see each other. Choose another.")
    return Inputs(query * (query.shape[-1] ** -0.5 if scale is None else scale), key, value, bias)


class AttentionTap:
    """Captures the inputs of the attention of one block during a forward pass, after all norms and positions, for every thread.

    A pass is captured if `when` is None or says so. `done` is called with the inputs after the block ran, which are then not kept.
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
        # Also called when the pass fails: else the watch would stay entered and record every later attention.
        self._hooks = (block.register_forward_pre_hook(self._enter), block.register_forward_hook(self._leave, always_call=True))

    def remove(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def _enter(self, *_: Any) -> None:
        watch = self._local.watch = _Watch() if self.when is None or self.when() else None
        if watch is not None:
            watch.__enter__()

    def _leave(self, _module: nn.Module, _inputs: Any, output: Any) -> None:
        if self._local.watch is None:
            return
        self._local.watch.__exit__(None, None, None)
        if output is None:  # the pass failed, perhaps out of memory: keep nothing of it
            self._local.watch.recorded.clear()
        elif self.done is not None:
            self.done(self.inputs())

    def inputs(self) -> Inputs:
        """Return the inputs of the attention in the last forward pass of this thread."""
        recorded, self._local.watch = self._local.watch.recorded, None
        if len(recorded) != 1:
            raise RequestError(
                f"A block of {self.model_name} must compute one attention of query and key, but {self._kind} computes "
                f'{len(recorded)}. Use `attention="pseudo"` (cosine similarity of patches), or choose another vision transformer.'
            )
        return recorded[0]


class AttentionRollout:
    """Attention rollout (Abnar and Zuidema, 2020) of the blocks before the chosen one: the product of their `(A + I) / 2`.

    It only runs while `collecting`; every thread has its own product.
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
        """Surround a forward pass whose `product` is wanted."""
        self._local.on, self._local.product = True, None
        try:
            yield
        finally:
            self._local.on = False

    def product(self) -> Tensor | None:
        """Return [B, T, T] of the last pass of this thread; None if there is no block before the chosen one."""
        product, self._local.product = self._local.product, None
        return product


def mixed(weights: Tensor) -> Tensor:
    """Return `(A + I) / 2`: half of a token stays with it through the residual connection."""
    return 0.5 * (weights + torch.eye(weights.shape[-1], dtype=weights.dtype, device=weights.device))


def normalized_entropy(weights: Tensor) -> Tensor:
    """Compute Eq. 1, `1 - H_i / log N` with `H_i = -sum_j w_ij log w_ij`, from weights [B, N, N] to [B, N]."""
    n = weights.shape[-1]
    if n < 2:
        raise RequestError("Attention entropy needs at least two patches. Use a larger image or smaller patches.")
    # xlogy is 0 for a weight of 0, where w log w is NaN.
    return 1.0 + torch.special.xlogy(weights, weights).sum(-1) / math.log(n)


class _Block(NamedTuple):
    """What the signals of a few images are computed from; T = prefix + N tokens."""

    inputs: Inputs
    weights: Tensor
    """[b, T, T], the mean over heads; empty if no requested signal reads it."""
    prefix: int
    earlier: Tensor | None
    """[b, T, T] rollout of the blocks before; None if there are none or nobody asked."""


@dataclass(frozen=True)
class Signal:
    """How one signal is computed, and what it needs."""

    compute: Callable[[_Block], Tensor]
    """The values of the patches, [b, N] or [b, N, d]."""
    reads_weights: bool = True
    needs_cls: bool = False
    wide: bool = False
    """Whether it is [N, d]; such a signal is stored in the number format of the tokens, the others in fp32."""
    pseudo: bool = False
    """Whether it also exists for pseudo-attention."""


def _rollout(block: _Block) -> Tensor:
    row = mixed(block.weights)[:, :1]
    return (row if block.earlier is None else row @ block.earlier)[:, 0, block.prefix :].clone()


REGISTRY = {
    # The patch weights of a row do not sum to one, because the softmax includes the prefix tokens. Eq. 1 takes them all the same.
    "attention_entropy": Signal(lambda b: normalized_entropy(b.weights[:, b.prefix :, b.prefix :]), pseudo=True),
    # A copy, since a view of one row would keep the whole [b, T, T] in memory.
    "cls_attention": Signal(lambda b: b.weights[:, 0, b.prefix :].clone(), needs_cls=True, pseudo=True),
    "received_attention": Signal(lambda b: b.weights[:, b.prefix :, b.prefix :].mean(1), pseudo=True),
    "value_norm": Signal(
        lambda b: torch.linalg.vector_norm(b.inputs.value[:, :, b.prefix :].transpose(1, 2).flatten(2), dim=-1), reads_weights=False
    ),
    "mean_key": Signal(lambda b: b.inputs.key[:, :, b.prefix :].mean(1), reads_weights=False, wide=True),
    "rollout": Signal(_rollout, needs_cls=True),
}
"""Signals by name, those of `SIGNALS` in the same order."""


def reduce_attention(inputs: Inputs, prefix: int, names: Sequence[str], earlier: Tensor | None = None) -> dict[str, Tensor]:
    """Compute signals of the N patches, [B, N] or [B, N, d], from the inputs of the attention of T = prefix + N tokens.

    `earlier` is the [B, T, T] rollout of the blocks before, for the signal `rollout`.
    """
    if not names:
        return {}
    weighs = any(REGISTRY[name].reads_weights for name in names)
    values: dict[str, list[Tensor]] = {name: [] for name in names}
    # Not the length of the query: a traced graph has no fixed number of images.
    before: Iterable[Tensor | None] = repeat(None) if earlier is None else earlier.split(CHUNK)
    for part, rolled in zip(inputs.parts(), before):
        block = _Block(part, part.weights() if weighs else part.query.new_empty(0), prefix, rolled)
        for name in names:
            values[name].append(REGISTRY[name].compute(block))
    return {name: torch.cat(parts) if len(parts) > 1 else parts[0] for name, parts in values.items()}


def cosine_attention(queries: Tensor, keys: Tensor) -> Tensor:
    """Compute pseudo-attention [B, M, N] in fp32: the softmax over the keys [B, N, D] of the cosines of each query."""
    query, key = (F.normalize(tokens.float(), dim=-1) for tokens in (queries, keys))
    return torch.softmax(query @ key.transpose(1, 2) / PSEUDO_TEMPERATURE, dim=-1)


def pseudo_signals(patches: Tensor, cls: Tensor | None, names: Sequence[str]) -> dict[str, Tensor]:
    """Compute signals from `cosine_attention` of patches [B, N, D] and class tokens [B, D], if query and key cannot be captured.

    Rows sum to one here, because there are no prefix tokens among the keys.
    """
    weights = [cosine_attention(part, part) for part in patches.split(CHUNK)]
    values = {}
    if "attention_entropy" in names:
        values["attention_entropy"] = torch.cat([normalized_entropy(part) for part in weights])
    if "received_attention" in names:
        values["received_attention"] = torch.cat([part.mean(1) for part in weights])
    if "cls_attention" in names and cls is not None:
        values["cls_attention"] = cosine_attention(cls.unsqueeze(1), patches).squeeze(1)
    return values
