"""Lesion retention: how much of the lesion the kept patches contain, from masks, from counts, and over many batches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from medtokenbudget.errors import CountError, RequestError, ShapeError
from medtokenbudget.metrics.ratios import Floats, ratio

_GRID_SIDES = range(7, 49)
"""Sides of a square of patches that is one image: the smallest usual grid is 7 x 7, so images of 7 to 48 patches are not usual."""
_SHAPES = "Pass one image as [N] or [1, h, w], and a batch as [B, N] or [B, h, w]."


@dataclass(frozen=True)
class Retention:
    """How much of the lesion the kept patches contain, measured on the images that have at least one lesion patch.

    Attributes:
        pooled: Kept lesion patches / lesion patches, both summed over images. This is the paper's lesion retention rate.
        mean: Mean over images of each image's own share.
        ceiling: Sum of min(K, lesion) / sum of lesion: the largest `pooled` that any selector can reach with these K.
        of_ceiling: `pooled / ceiling`, between 0 and 1.
        precision: Kept lesion patches / kept patches.
        enrichment: `precision / prevalence`, where the prevalence is lesion patches / patches. Random selection has 1.
        n: Images measured.
        empty: Images left out because their mask has no lesion patch on the grid.
    """

    pooled: float
    mean: float
    ceiling: float
    of_ceiling: float
    precision: float
    enrichment: float
    n: int
    empty: int


def lesion_retention(kept: Tensor | ArrayLike, lesion: Tensor | ArrayLike, has_mask: Tensor | ArrayLike | None = None) -> Retention:
    """Measures how much of the lesion a selection kept.

    K may differ between images: it is counted from each row of `kept`. Images without a lesion patch are left out and counted in
    `Retention.empty`; images without a mask are left out and not counted.

    Args:
        kept: Kept patches of a batch, `[B, N]` or on their grid `[B, h, w]`, or of one image, `[N]`: boolean or 0/1 integers, a
            torch tensor or anything that numpy turns into an array.
        lesion: Lesion patches in the shape of `kept`.
        has_mask: `[B]`, False for images whose lesion is unknown. None means that every image has a mask.

    Returns:
        The retention of this batch.

    Raises:
        ShapeError: The shapes are others, or those of the grid of one image, `[h, w]`, which could also be h images.
        RequestError: The values are not boolean, for example scores that were not thresholded.

    Example:
        >>> kept = [[1, 1, 0, 0], [0, 1, 1, 0]]
        >>> lesion = [[1, 0, 0, 0], [0, 1, 1, 1]]
        >>> found = lesion_retention(kept, lesion)
        >>> found.pooled, found.ceiling, found.of_ceiling  # 3 of 4 lesion patches, and no two patches could contain more
        (0.75, 0.75, 1.0)
    """
    return _Sums.of_masks(kept, lesion, has_mask).retention()


def retention_of_counts(kept_lesion: ArrayLike | None, lesion: ArrayLike, k: ArrayLike, n_patches: ArrayLike) -> Retention:
    """Measures retention from the counts of each image, for tables that have no masks.

    Args:
        kept_lesion: `[n]` kept lesion patches. None where they are not known (mergers): then only the ceiling is measured.
        lesion: `[n]` lesion patches; NaN for images without a mask, which are left out.
        k: `[n]` kept patches, or one number for all images.
        n_patches: `[n]` patches, or one number for all images.

    Returns:
        The retention over all images.

    Raises:
        ShapeError: The arrays are not `[n]`.
        RequestError: An image kept more lesion patches than min(k, lesion).

    Example:
        >>> found = retention_of_counts(kept_lesion=[8, 40, 0], lesion=[10, 100, 0], k=50, n_patches=256)
        >>> round(found.pooled, 3), round(found.of_ceiling, 3), found.n, found.empty
        (0.436, 0.8, 2, 1)
    """
    return _Sums.of_counts(kept_lesion, lesion, k, n_patches).retention()


def reachable(lesion: ArrayLike, k: ArrayLike) -> NDArray[Any]:
    """The most lesion patches that `k` kept patches can contain, elementwise: min(k, lesion)."""
    return np.minimum(np.asarray(lesion), np.asarray(k))


def share_of_ceiling(kept_lesion: ArrayLike, lesion: ArrayLike, k: ArrayLike) -> Floats:
    """Pooled retention as a share of the ceiling, for several budgets at once.

    Args:
        kept_lesion: `[n, T]` lesion patches kept of n images at T budgets, or `[n]` at one.
        lesion: `[n]` lesion patches; NaN for images without a mask, which are left out.
        k: `[T]` kept patches at each budget, or one number.

    Returns:
        `[T]` shares, or a scalar array for `[n]` counts; NaN where no image has a lesion patch.

    Example:
        >>> share_of_ceiling([[4, 5], [5, 10]], lesion=[5, 20], k=[5, 10]).tolist()
        [0.9, 1.0]
    """
    kept, sizes = np.asarray(kept_lesion, float), np.asarray(lesion, float)
    if kept.ndim not in (1, 2) or sizes.shape != kept.shape[:1]:
        raise ShapeError(f"`kept_lesion` must be [n, T] and `lesion` [n], got {list(kept.shape)} and {list(sizes.shape)}.")
    known = ~np.isnan(sizes)
    kept, sizes = kept[known], sizes[known]
    best = reachable(sizes[:, None] if kept.ndim == 2 else sizes, k)
    return ratio(kept.sum(0), np.broadcast_to(best, kept.shape).sum(0))


def kept_lesion_counts(order: Tensor | ArrayLike, lesion: Tensor | ArrayLike, k: ArrayLike) -> NDArray[np.int64]:
    """Counts the lesion patches among the first K of a ranking, for several K in one pass.

    Args:
        order: `[B, N]` patch indices, best first.
        lesion: `[B, N]` lesion patches, boolean or 0/1 integers.
        k: `[T]` numbers of kept patches, each in 1..N.

    Returns:
        `[B, T]` kept lesion patches.

    Example:
        >>> kept_lesion_counts(order=[[2, 0, 1, 3]], lesion=[[0, 1, 1, 0]], k=[1, 2, 4]).tolist()
        [[1, 1, 2]]
    """
    mask = _mask("lesion", lesion)
    ranking = order.long() if isinstance(order, Tensor) else torch.from_numpy(np.array(order, np.int64)).to(mask.device)
    if mask.ndim != 2 or ranking.shape != mask.shape:
        raise ShapeError(f"`order` and `lesion` must be [B, N], got {list(ranking.shape)} and {list(mask.shape)}.")
    counts, n = np.asarray(k, int), mask.shape[1]
    if ranking.numel() and not (ranking.min() >= 0 and ranking.max() < n):
        raise ShapeError(f"`order` must contain the patches 0 to {n - 1} of [B, N] images. Flatten grids to N patches.")
    if counts.size and not (counts.min() >= 1 and counts.max() <= n):
        raise CountError(f"`k` must be between 1 and {n} patches, got {counts.tolist()}.")
    cumulative = mask.take_along_dim(ranking, 1).long().cumsum(1)
    return np.asarray(cumulative[:, (counts - 1).tolist()].cpu().numpy())


class LesionRetention:
    """Lesion retention over many batches, with the interface of a torchmetrics metric.

    It keeps sums, not masks, so its memory does not grow. Integer sums make the result independent of how the images are split into
    batches (the per-image mean up to rounding).

    Example:
        >>> import torch
        >>> metric = LesionRetention()
        >>> for _ in range(3):  # the batches of an evaluation loop
        ...     kept = torch.tensor([[True, True, False, False]])
        ...     lesion = torch.tensor([[True, False, False, True]])
        ...     metric.update(kept, lesion)
        >>> metric.compute().pooled
        0.5
        >>> metric
        LesionRetention(pooled=0.5000, of_ceiling=0.5000, n=3, empty=0)
        >>> metric.reset()
        >>> metric.compute().n
        0
    """

    def __init__(self) -> None:
        self._sums = _Sums()

    def update(self, kept: Tensor | ArrayLike, lesion: Tensor | ArrayLike, has_mask: Tensor | ArrayLike | None = None) -> None:
        """Adds a batch; the arguments are those of `lesion_retention`."""
        self._sums += _Sums.of_masks(kept, lesion, has_mask)

    def forward(
        self, kept: Tensor | ArrayLike, lesion: Tensor | ArrayLike, has_mask: Tensor | ArrayLike | None = None
    ) -> Retention:
        """Adds a batch and returns the retention of this batch alone; calling the object does the same."""
        batch = _Sums.of_masks(kept, lesion, has_mask)
        self._sums += batch
        return batch.retention()

    __call__ = forward

    def compute(self) -> Retention:
        """Returns the retention over everything since the last `reset`; NaN with `n=0` when nothing was measured."""
        return self._sums.retention()

    def reset(self) -> None:
        """Forgets everything."""
        self._sums = _Sums()

    @property
    def metric_state(self) -> dict[str, float]:
        """The sums by name: small, additive and JSON-ready, to be gathered from other processes or stored."""
        return asdict(self._sums)

    def merge_state(self, incoming_state: LesionRetention | Mapping[str, float]) -> None:
        """Adds what another object measured, or its `metric_state`.

        Raises:
            RequestError: `incoming_state` is neither.
        """
        state = incoming_state.metric_state if isinstance(incoming_state, LesionRetention) else incoming_state
        names = [field.name for field in fields(_Sums)]
        if not isinstance(state, Mapping) or set(state) != set(names):
            raise RequestError(f"`merge_state` needs a LesionRetention or its metric_state with the keys {', '.join(names)}.")
        self._sums += _Sums(**{name: float(state[name]) for name in names})

    def __repr__(self) -> str:
        found = self.compute()
        return f"LesionRetention(pooled={found.pooled:.4f}, of_ceiling={found.of_ceiling:.4f}, n={found.n}, empty={found.empty})"


@dataclass(frozen=True)
class _Sums:
    """What retention is a function of, summed over images; the only place where it is computed."""

    kept_lesion: float = 0.0
    lesion: float = 0.0
    reachable: float = 0.0
    kept: float = 0.0
    patches: float = 0.0
    shares: float = 0.0
    n: float = 0.0
    empty: float = 0.0

    @classmethod
    def of_masks(cls, kept: Any, lesion: Any, has_mask: Any) -> _Sums:
        if kept is None:
            raise RequestError("`kept` is None: mergers such as tome keep no single patches. Measure them with `group_purity`.")
        kept, lesion = _mask("kept", kept), _mask("lesion", lesion)
        if kept.ndim not in (1, 2, 3) or kept.shape != lesion.shape:
            raise ShapeError(
                f"`kept` and `lesion` must have the same shape [B, N], got {list(kept.shape)} and {list(lesion.shape)}. {_SHAPES}"
            )
        if kept.ndim == 2 and kept.shape[0] == kept.shape[1] and kept.shape[0] in _GRID_SIDES:
            raise ShapeError(f"{list(kept.shape)} looks like the grid of one image, not like a batch [B, N]. {_SHAPES}")
        kept, lesion = (mask.reshape(1 if mask.ndim == 1 else len(mask), -1) for mask in (kept, lesion.to(kept.device)))
        counts = torch.stack([(kept & lesion).sum(1), lesion.sum(1), kept.sum(1)]).cpu().numpy()
        if has_mask is not None:
            known = _mask("has_mask", has_mask).cpu().numpy()
            if known.shape != (len(kept),):
                raise ShapeError(f"`has_mask` must be [B] = [{len(kept)}], got {list(known.shape)}.")
            counts = counts[:, known]
        return cls.of_counts(counts[0], counts[1], counts[2], kept.shape[1])

    @classmethod
    def of_counts(cls, kept_lesion: ArrayLike | None, lesion: ArrayLike, k: ArrayLike, n_patches: ArrayLike) -> _Sums:
        sizes = np.asarray(lesion, float)
        kept = np.full(sizes.shape, np.nan) if kept_lesion is None else np.asarray(kept_lesion, float)
        counts, patches = np.asarray(k, float), np.asarray(n_patches, float)
        if sizes.ndim != 1 or kept.shape != sizes.shape or any(v.shape not in ((), sizes.shape) for v in (counts, patches)):
            shapes = ", ".join(str(list(v.shape)) for v in (kept, sizes, counts, patches))
            raise ShapeError(f"`kept_lesion` and `lesion` must be [n], `k` and `n_patches` [n] or numbers, got {shapes}.")
        counts, patches = np.broadcast_to(counts, sizes.shape), np.broadcast_to(patches, sizes.shape)
        best = reachable(sizes, counts)
        if (wrong := np.flatnonzero(kept > best)).size:
            row = wrong[0]
            raise RequestError(
                f"Image {row} kept {kept[row]:g} lesion patches, but at most min(k, lesion) = {best[row]:g} are possible. "
                "Check that all arrays are in the same order."
            )
        measured = sizes > 0  # False for NaN: no mask
        kept, sizes = kept[measured], sizes[measured]
        return cls(
            kept_lesion=float(kept.sum()),
            lesion=float(sizes.sum()),
            reachable=float(best[measured].sum()),
            kept=float(counts[measured].sum()),
            patches=float(patches[measured].sum()),
            shares=float((kept / sizes).sum()),
            n=float(len(sizes)),
            empty=float((np.asarray(lesion, float) == 0).sum()),
        )

    def __add__(self, other: _Sums) -> _Sums:
        return _Sums(*(getattr(self, field.name) + getattr(other, field.name) for field in fields(self)))

    def retention(self) -> Retention:
        precision = ratio(self.kept_lesion, self.kept)
        return Retention(
            pooled=float(ratio(self.kept_lesion, self.lesion)),
            mean=float(ratio(self.shares, self.n)),
            ceiling=float(ratio(self.reachable, self.lesion)),
            of_ceiling=float(ratio(self.kept_lesion, self.reachable)),
            precision=float(precision),
            enrichment=float(ratio(precision, ratio(self.lesion, self.patches))),
            n=int(self.n),
            empty=int(self.empty),
        )


def _mask(name: str, value: Any) -> Tensor:
    """A boolean tensor of boolean or 0/1 integer input."""
    if not isinstance(value, Tensor):
        try:
            array = np.asarray(value)
        except ValueError:
            raise ShapeError(f"`{name}` is ragged: every image must have the same number of patches.") from None
        if array.dtype.kind not in "biu":
            raise _not_boolean(name, str(array.dtype))
        # A copy, because torch warns about read-only arrays.
        value = torch.from_numpy(array.astype(bool if array.dtype == bool else np.int64))
    if value.dtype == torch.bool:
        return value
    if value.is_floating_point() or value.is_complex():
        raise _not_boolean(name, str(value.dtype))
    if bool(((value != 0) & (value != 1)).any()):
        raise _not_boolean(name, f"integers other than 0 and 1 (largest {int(value.max())})")
    return value.bool()


def _not_boolean(name: str, found: str) -> RequestError:
    return RequestError(f"`{name}` must be boolean or 0/1 integers, got {found}. Apply a threshold first, for example `x > 0.5`.")
