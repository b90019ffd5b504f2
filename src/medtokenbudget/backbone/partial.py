"""Run a vision transformer on K of its N patches: the routed pass, and `EarlyBackbone`, a backbone that is routed so.

The router comes in as a function. Two ways: only the chosen patches are embedded ('scout', which has seen the image), or all run up
to a block, where the router sees its tokens and the rest collapses into one background token ('inside'). K is fixed, so all shapes
are static, and nothing waits for a value on the host: the pass compiles and exports as one graph. The tokens are those of the kept
patches alone, so heads are trained on them, never reused from the dense pass; the fingerprint says how they were made.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from medtokenbudget.backbone.attention import REGISTRY, AttentionTap, reduce_attention
from medtokenbudget.backbone.backbone import Backbone
from medtokenbudget.backbone.encoders import Places, PlainViT, partial_encoder
from medtokenbudget.tokens import TokenBatch

Way = Literal["scout", "inside"]
Chosen = tuple[Tensor, Tensor | None]
"""The kept patches [B, K], and False [B, K] for those that only fill an image up to the K of its batch; None if none do."""


def routed_pass(
    encoder: PlainViT, images: Tensor, choose: Callable[[Tensor | None], Chosen], block: int, end: int
) -> tuple[Tensor, Places]:
    """Run the blocks before `block` on all patches, and the blocks `block` to `end` - 1 on the chosen ones, in any order.

    With block 0 only the chosen patches are embedded, and `choose` gets None. Otherwise it gets the tokens that the block before
    `block` gave, [B, P + N, D], and the patches that are not chosen become one background token.

    Returns:
        The tokens [B, P + K, D] of the last block, not yet normed and without the background token, and the kept patches.
    """
    if block == 0:
        places = Places(*choose(None))
        x, positions = encoder.embed(images, places.indices)
    else:
        x, positions = encoder.embed(images)
        x = encoder.run(x, 0, block, positions)
        x, places = prune(x, *choose(x), encoder.prefix)
    x = encoder.run(x, block, end, positions, places, places.bias(x, encoder.prefix))
    return x[:, : encoder.prefix + places.indices.shape[1]], places


def prune(x: Tensor, indices: Tensor, real: Tensor | None, prefix: int) -> tuple[Tensor, Places]:
    """Keep the prefix tokens and the patches `indices` [B, K] of the tokens [B, P + N, D], and replace the others by their mean.

    If no patch is dropped, there is no background token.
    """
    patches = x[:, prefix:]
    b, n, k = patches.shape[0], patches.shape[1], indices.shape[1]
    places = Places(indices, real)
    if k < n or real is not None:
        kept = torch.ones_like(indices, dtype=x.dtype) if real is None else real.to(x.dtype)
        dropped = 1 - torch.zeros(b, n, dtype=x.dtype, device=x.device).scatter(1, indices, kept)
        places = Places(indices, real, dropped.unsqueeze(1))
    return torch.cat([x[:, :prefix], places.take(patches)], 1), places


@dataclass(frozen=True)
class EarlyRoute:
    """How a backbone is routed early."""

    block: int
    """First block that runs on the kept patches: 0 for 'scout'."""
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


class Early(Protocol):
    """Makes an early backbone of a loaded one, and saves what that needs."""

    def wrap(self, backbone: Backbone) -> EarlyBackbone: ...

    def save(self, folder: Path) -> Any: ...


class EarlyBackbone(Backbone):
    """A backbone with an early route. It takes over the network of `dense`, which is not to be used any more.

    Raises:
        RequestError: The backbone cannot run on a part of its patches.
    """

    encoder: PlainViT

    def __init__(self, dense: Backbone, route: EarlyRoute) -> None:
        self.__dict__.update(vars(dense))
        self.encoder, self.route = partial_encoder(dense.model, dense.config.name), route
        self.fingerprint = {**dense.fingerprint, "route": route.settings}
        # Nothing reads the attention of the last block, and its hooks do not know the bias of a background token.
        for block in self.encoder.blocks:
            block._forward_pre_hooks.clear()
            block._forward_hooks.clear()
        if route.block and route.requires:
            self._tap = AttentionTap(self.encoder.blocks[route.block - 1], self.config.name)

    @property
    def default_signals(self) -> tuple[str, ...]:
        """None: the attention to kept patches is not looked at."""
        return ()

    def tokens(self, images: Tensor, *arguments: Any, **options: Any) -> TokenBatch:
        """Compute the tokens of the kept patches of normalized images [B, 3, S, S], with their places on the grid; no checks."""

        def choose(x: Tensor | None) -> Chosen:
            if x is None:
                scores = self.route.score(self.preprocessing.denormalize(resize(images, (self.route.size, self.route.size))))
                scores = resize_scores(scores, self.route.grid, self.grid)
            else:
                scores = self.route.score(block_tokens(self.encoder, x, self.grid, self._tap, self.route.requires))
            return scores.topk(self.route.k, dim=1).indices, None

        x, places = routed_pass(self.encoder, images, choose, self.route.block, self.layer + 1)
        x = self.encoder.norm(x)
        cls = x[:, 0] if self.has_cls else None
        return TokenBatch(x[:, self.prefix :], self.grid, cls=cls, places=places.indices)


def block_tokens(
    encoder: PlainViT, x: Tensor, grid: tuple[int, int], tap: AttentionTap | None, requires: tuple[str, ...]
) -> TokenBatch:
    """Return the normed tokens [B, P + N, D] of a block, with the attention of the `tap` if `requires` names any of it."""
    normed = encoder.norm(x)
    tokens = TokenBatch(normed[:, encoder.prefix :], grid, cls=normed[:, 0] if encoder.has_cls else None)
    if not requires:
        return tokens
    assert tap is not None
    signals = [name for name in requires if name in REGISTRY]
    values: dict[str, Any] = dict(reduce_attention(tap.inputs(), encoder.prefix, signals))
    return replace(tokens, **values)


def resize(images: Tensor, size: tuple[int, int]) -> Tensor:
    """Resize images [B, C, H, W]: by means of rectangles where the size divides theirs, otherwise bilinearly without aliasing."""
    (height, width), (h, w) = images.shape[-2:], size
    if (height, width) == size:
        return images
    if height % h == 0 and width % w == 0:
        return F.avg_pool2d(images, (height // h, width // w))
    smaller = height > h or width > w
    if not (smaller and torch.compiler.is_compiling()):
        return F.interpolate(images, size=size, mode="bilinear", align_corners=False, antialias=smaller)
    return _triangles(height, h, images.device) @ images @ _triangles(width, w, images.device).T


def _triangles(side: int, size: int, device: torch.device) -> Tensor:
    # The triangle filter that Pillow resizes with, as a product: exported graphs have no filter that avoids aliasing.
    scale = side / size
    centers = (torch.arange(size, device=device) + 0.5) * scale
    places = torch.arange(side, device=device) + 0.5
    weights = (1 - (places - centers.unsqueeze(1)).abs() / max(scale, 1.0)).clamp(min=0)
    return weights / weights.sum(1, keepdim=True)


def resize_scores(scores: Tensor, grid: tuple[int, int], to: tuple[int, int]) -> Tensor:
    """Bring scores [B, n] of a grid to another one, [B, N], between the centers of patches."""
    return scores if grid == to else resize(scores.reshape(-1, 1, *grid), to).flatten(1)
