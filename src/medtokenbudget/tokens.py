"""The types that everything speaks: `TokenBatch` (what a frozen backbone saw), `Selection` (what a selector kept) and `TokenSet`
(what a head reads of it).

All check their shapes when they are created, so that a mismatch shows where it happens and nothing is ever padded or cut.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from medtokenbudget.errors import GridError, NonFiniteError, ShapeError

SIGNALS = ("attention_entropy", "cls_attention", "received_attention", "value_norm", "mean_key", "rollout")
"""Fields of `TokenBatch` that `mtb extract` computes from the attention of the backbone."""
SEGMENTATION = "segmentation"
"""The field of `TokenBatch` that `mtb extract` computes with a trained segmenter."""
NOT_FROM_BACKBONE = ("has_mask", "lesion", SEGMENTATION)
"""Fields that the backbone does not give: a selector that reads one is a control on a store, not a method for new images."""


@dataclass(frozen=True)
class TokenBatch:
    """Frozen tokens of B images on a grid of h x w = N patches, in raster order. What is not known is None.

    Attributes:
        patches: [B, N, D] normed patch tokens of the chosen block.
        grid: (h, w).
        cls: [B, D] class token.
        attention_entropy: [B, N] `1 - H / log N` of the block's head-averaged patch-to-patch attention (Eq. 1).
        cls_attention: [B, N] head-averaged attention of the class token to each patch.
        received_attention: [B, N] head-averaged attention that each patch receives, the mean over the patches that attend.
        value_norm: [B, N] L2 norm of each patch's value vector, all heads together.
        mean_key: [B, N, d] key of each patch, the mean over the heads.
        rollout: [B, N] attention of the class token to each patch, rolled out over all blocks up to the chosen one.
        segmentation: [B, N] score that a trained segmenter gives each patch, the highest for lesion.
        luminance: [B, N] mean gray value of each patch, in [0, 1].
        pixels: [B, N, P] RGB in [0, 1] of each patch, for selectors that read the image, where `patches` are of another backbone.
        label: [B] class index, int64; -1 if unlabeled.
        lesion: [B, N] bool, lesion patches; all False where `has_mask` is False.
        has_mask: [B] bool. "No mask" and "an empty mask" are different things.
        image_id: B names.
        places: [B, K] int64, where on the grid the patches are, for tokens that were routed before or inside the backbone:
            `patches` is then [B, K, D], while `luminance` and `lesion` are of all N patches. None means all patches, in order.

    Example:
        >>> tokens = TokenBatch(patches=torch.zeros(2, 6, 8), grid=(2, 3))
        >>> len(tokens), tokens.n, tokens.dim
        (2, 6, 8)
    """

    patches: Tensor
    grid: tuple[int, int]
    cls: Tensor | None = None
    attention_entropy: Tensor | None = None
    cls_attention: Tensor | None = None
    received_attention: Tensor | None = None
    value_norm: Tensor | None = None
    mean_key: Tensor | None = None
    rollout: Tensor | None = None
    segmentation: Tensor | None = None
    luminance: Tensor | None = None
    pixels: Tensor | None = None
    label: Tensor | None = None
    lesion: Tensor | None = None
    has_mask: Tensor | None = None
    image_id: tuple[str, ...] | None = None
    places: Tensor | None = None

    def __post_init__(self) -> None:
        b, n, d = check_axes("patches", "[B, N, D]", self.patches)
        if self.places is not None:
            if tuple(self.places.shape) != (b, n):
                raise ShapeError(f"`places` must be {[b, n]} for patches {[b, n, d]}, got {list(self.places.shape)}.")
            # From here on N is the whole grid: luminance and lesion are known of all patches.
            n = self.grid[0] * self.grid[1]
        check_grid(self.grid, n)
        expected: dict[str, tuple[int, ...]] = dict.fromkeys((*SIGNALS, SEGMENTATION, "luminance", "lesion"), (b, n))
        expected |= {"cls": (b, d), "label": (b,), "has_mask": (b,)}
        for name in ("mean_key", "pixels"):
            if (value := getattr(self, name)) is not None:
                expected[name] = (b, n, value.shape[-1])
        for name, shape in expected.items():
            value = getattr(self, name)
            if value is not None and tuple(value.shape) != shape:
                raise ShapeError(f"`{name}` must be {list(shape)} for patches {[b, n, d]}, got {list(value.shape)}.")
        if self.image_id is not None and len(self.image_id) != b:
            raise ShapeError(f"`image_id` must name {b} images, got {len(self.image_id)}.")

    def __len__(self) -> int:
        return self.patches.shape[0]

    @property
    def n(self) -> int:
        """Number of patches N; of routed tokens, their number K."""
        return self.patches.shape[1]

    @property
    def dim(self) -> int:
        return self.patches.shape[2]

    def to(self, device: torch.device | str, non_blocking: bool = False) -> TokenBatch:
        return replace(self, **_tensors(self, lambda t: t.to(device, non_blocking=non_blocking)))

    def float(self) -> TokenBatch:
        return replace(self, **_tensors(self, lambda t: t.float() if t.is_floating_point() else t))

    def take(self, rows: Sequence[int]) -> TokenBatch:
        ids = None if self.image_id is None else tuple(self.image_id[row] for row in rows)
        return replace(self, image_id=ids, **_tensors(self, lambda t: t[list(rows)]))

    def require_finite(self, fields: Sequence[str] = ()) -> TokenBatch:
        """Return self, or raise an error that names the first image whose patches, or whose `fields`, are not finite."""
        for field in ("patches", *fields):
            values = getattr(self, field)
            if not isinstance(values, Tensor) or not values.is_floating_point():
                continue
            finite = torch.isfinite(values).flatten(1).all(1)
            if not bool(finite.all()):
                row = int((~finite).nonzero()[0])
                name = self.image_id[row] if self.image_id else f"row {row}"
                raise NonFiniteError(f"The {field} of {name} contain NaN or infinite values. Extract this image again.")
        return self


@dataclass(frozen=True)
class Selection:
    """What a selector gives to the head: K tokens per image, gathered, never zeros in a full tensor.

    Attributes:
        tokens: [B, K, D] the kept or merged tokens.
        weights: [B, K] number of patches that each token stands for (ones for rankers, group sizes for mergers).
        assignment: [B, N] int64, the output token that each patch went to; -1 for dropped.
        kept: [B, N] bool, or None for mergers, which keep no patch as it was.
        indices: [B, K] int64, the kept patches in the order of `tokens`, or None for mergers.
        attention: [B, K, N] share of each patch in each token, for mergers whose tokens are soft mixtures of all patches; else
            None. `assignment` is then the token that has the largest share of a patch.
        scores: [B, N] what the patches were ranked by, without a gradient; None where they were not ranked.

    Example:
        >>> tokens = TokenBatch(patches=torch.rand(2, 36, 8), grid=(6, 6))
        >>> selection = create_selector("center").select(tokens, k=4)
        >>> selection.k, selection.kept.sum(1).tolist()
        (4, [4, 4])
    """

    tokens: Tensor
    weights: Tensor
    assignment: Tensor
    kept: Tensor | None = None
    indices: Tensor | None = None
    attention: Tensor | None = None
    scores: Tensor | None = None

    def __post_init__(self) -> None:
        b, k, _ = check_axes("tokens", "[B, K, D]", self.tokens)
        if tuple(self.weights.shape) != (b, k):
            raise ShapeError(f"`weights` must be {[b, k]}, got {list(self.weights.shape)}.")
        if self.kept is not None and self.kept.shape != self.assignment.shape:
            raise ShapeError(f"`kept` {list(self.kept.shape)} and `assignment` {list(self.assignment.shape)} must agree.")

    def __len__(self) -> int:
        return self.tokens.shape[0]

    @property
    def k(self) -> int:
        return self.tokens.shape[1]

    def to(self, device: torch.device | str) -> Selection:
        return replace(self, **_tensors(self, lambda t: t.to(device)))

    def pooled(self) -> Tensor:
        """Average the K tokens, [B, D], in fp32. Weighted by size, merged ones would give the same mean at every budget."""
        return self.tokens.float().mean(1)


@dataclass(frozen=True)
class TokenSet:
    """The tokens of B images as a head reads them.

    Attributes:
        tokens: [B, K, D] in fp32.
        weights: [B, K] how much each token counts: 1, or the differentiable mask of all patches while a selector learns.
        positions: [B, K, 2] row and column of each token on the grid; the mean position of its patches for a merged token.
        grid: (h, w).
    """

    tokens: Tensor
    weights: Tensor
    positions: Tensor
    grid: tuple[int, int]

    def __post_init__(self) -> None:
        b, k, _ = check_axes("tokens", "[B, K, D]", self.tokens)
        if tuple(self.weights.shape) != (b, k) or tuple(self.positions.shape) != (b, k, 2):
            raise ShapeError(
                f"`weights` must be {[b, k]} and `positions` {[b, k, 2]}, "
                f"got {list(self.weights.shape)} and {list(self.positions.shape)}."
            )

    def __len__(self) -> int:
        return self.tokens.shape[0]

    @property
    def k(self) -> int:
        return self.tokens.shape[1]

    @property
    def padding(self) -> Tensor:
        """[B, K] True for tokens that do not count."""
        return self.weights == 0

    @classmethod
    def of(cls, selection: Selection, grid: tuple[int, int]) -> TokenSet:
        """Take the tokens of a selection; each counts once, merged or not."""
        places = _places(grid, selection.tokens.device)
        if selection.indices is not None:
            positions = places[selection.indices]
        elif selection.attention is not None:
            positions = selection.attention.float() @ places
        else:
            member = torch.nn.functional.one_hot(selection.assignment + 1, selection.k + 1)[..., 1:].float().transpose(1, 2)
            # Of a token that no patch went to the position is 0, not NaN.
            positions = member @ places / member.sum(2, keepdim=True).clamp_min(1)
        return cls(selection.tokens.float(), torch.ones_like(selection.weights, dtype=torch.float32), positions, grid)

    @classmethod
    def under(cls, mask: Tensor, patches: Tensor, grid: tuple[int, int]) -> TokenSet:
        """Take all patches [B, N, D], weighted with a differentiable mask [B, N]."""
        positions = _places(grid, patches.device).expand(len(patches), -1, -1)
        return cls(patches.float(), mask.float(), positions, grid)


def _tensors(record: TokenBatch | Selection, change: Callable[[Tensor], Tensor]) -> dict[str, Any]:
    return {field.name: change(v) for field in fields(record) if isinstance(v := getattr(record, field.name), Tensor)}


def check_axes(name: str, axes: str, values: Tensor) -> torch.Size:
    """Return the shape of a tensor, or raise a ShapeError unless it has these axes, such as '[B, N, D]'."""
    if values.ndim != axes.count(",") + 1:
        raise ShapeError(f"`{name}` must be {axes}, got {list(values.shape)}.")
    return values.shape


def _places(grid: tuple[int, int], device: torch.device) -> Tensor:
    rows, columns = torch.arange(grid[0], device=device), torch.arange(grid[1], device=device)
    return torch.cartesian_prod(rows, columns).float().view(-1, 2)


def check_grid(grid: tuple[int, int], n: int) -> None:
    """Raise a GridError unless a grid multiplies to the number of patches."""
    if len(grid) != 2 or grid[0] < 1 or grid[1] < 1 or grid[0] * grid[1] != n:
        raise GridError(f"A grid of {' x '.join(map(str, grid))} does not have {n} patches.")
