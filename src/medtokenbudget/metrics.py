"""The definition of every quantity that the package measures: lesion retention, group purity, classification, calibration.

Everything that reports a number calls this module, so that one name means one thing in training, results, report and explorer. All
functions return fractions (enrichment is a ratio of two), and NaN where there is nothing to measure: not measured is not zero.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from scipy.stats import rankdata
from torch import Tensor

from medtokenbudget.errors import CountError, RequestError, ShapeError

Floats = NDArray[np.float64]
ECE_BINS = 15
"""Bins of the expected calibration error."""
_SIDES, _SQUARE_SIDES = range(7, 49), range(7, 129)
"""Sides of grids [h, w] that could be batches [B, N]: usual images have at least 7 x 7 patches, so longer sides matter only where
they are equal."""
_SHARES = 5
"""Place of the sum of shares among the sums of `_retention`, the only one that is no count."""


def ratio(numerator: ArrayLike, denominator: ArrayLike) -> Floats:
    """Divide elementwise; NaN where the denominator is 0: not measured is not zero."""
    numerator, denominator = np.broadcast_arrays(np.asarray(numerator, float), np.asarray(denominator, float))
    return np.divide(numerator, denominator, out=np.full(numerator.shape, np.nan), where=denominator != 0)


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


def lesion_retention(
    kept: Tensor | ArrayLike,
    lesion: Tensor | ArrayLike,
    has_mask: Tensor | ArrayLike | None = None,
    grid: tuple[int, int] | None = None,
) -> Retention:
    """Measure how much of the lesion a selection kept.

    K may differ between images: it is counted from each row of `kept`. Images without a lesion patch are left out and counted in
    `Retention.empty`; images without a mask are left out and not counted.

    Args:
        kept: Kept patches of a batch, `[B, N]` or on their grid `[B, h, w]`, or of one image, `[N]` or `[h, w]`: boolean or 0/1
            integers, a torch tensor or anything that numpy turns into an array.
        lesion: Lesion patches in the shape of `kept`.
        has_mask: `[B]`, False for images whose lesion is unknown. None means that every image has a mask.
        grid: (h, w) of the patches. Needed for `[h, w]`, and for a batch `[B, N]` whose shape could be a grid.

    Raises:
        ShapeError: The shapes differ, or could be both one image `[h, w]` and a batch `[B, N]`.
        RequestError: The values are not boolean, for example scores that were not thresholded.

    Example:
        >>> kept = [[1, 1, 0, 0], [0, 1, 1, 0]]
        >>> lesion = [[1, 0, 0, 0], [0, 1, 1, 1]]
        >>> retention = lesion_retention(kept, lesion)
        >>> retention.pooled, retention.ceiling, retention.of_ceiling  # 3 of 4 lesion patches; no other choice has more
        (0.75, 0.75, 1.0)
    """
    return _retention(_sums_of_masks(kept, lesion, has_mask, grid))


def retention_of_counts(kept_lesion: ArrayLike | None, lesion: ArrayLike, k: ArrayLike, n_patches: ArrayLike) -> Retention:
    """Measure retention from the counts of each image, for tables that have no masks.

    `kept_lesion` [n] is None where it is not known (mergers): then only the ceiling is measured. `lesion` [n] is NaN for images
    without a mask, which are left out. `k` and `n_patches` are [n], or one number for all images.

    Example:
        >>> retention = retention_of_counts(kept_lesion=[8, 40, 0], lesion=[10, 100, 0], k=50, n_patches=256)
        >>> round(retention.pooled, 3), round(retention.of_ceiling, 3), retention.n, retention.empty
        (0.436, 0.8, 2, 1)
    """
    return _retention(_sums_of_counts(kept_lesion, lesion, k, n_patches))


def reachable(lesion: ArrayLike, k: ArrayLike) -> NDArray[Any]:
    """Return the most lesion patches that `k` kept patches can contain, elementwise: min(k, lesion)."""
    return np.minimum(np.asarray(lesion), np.asarray(k))


def share_of_ceiling(kept_lesion: ArrayLike, lesion: ArrayLike, k: ArrayLike) -> Floats:
    """Measure pooled retention as a share of the ceiling `[T]`, of `[n, T]` lesion patches kept at T budgets of `k` `[T]` patches.

    Also of counts `[n]` at one budget. Images whose `[n]` lesion patches are NaN have no mask and are left out.

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


def smallest_quarter(kept_lesion: ArrayLike, lesion: ArrayLike, k: ArrayLike) -> float:
    """Measure the share of the ceiling in the quarter of the images with the smallest lesions, of counts `[n]`.

    The quarter holds the sizes up to the lower quartile; images without a lesion patch are left out.

    Example:
        >>> smallest_quarter(kept_lesion=[2, 40, 45, 50], lesion=[4, 50, 60, 70], k=50)
        0.5
    """
    kept, sizes, best = _of_lesions(kept_lesion, lesion, k)
    small = sizes <= np.quantile(sizes, 0.25) if len(sizes) else np.zeros(0, bool)
    return float(ratio(kept[small].sum(), best[small].sum()))


def share_below(kept_lesion: ArrayLike, lesion: ArrayLike, k: ArrayLike, level: float = 0.9) -> float:
    """Measure the share of the images that keep less than `level` of what is possible for them, of counts `[n]`.

    Example:
        >>> share_below(kept_lesion=[8, 9, 10, 50], lesion=[10, 10, 10, 100], k=50)
        0.25
    """
    kept, _, best = _of_lesions(kept_lesion, lesion, k)
    # Nine tenths are not exact in binary: 9 of 10 patches must not count as below.
    return float(ratio((kept < level * best - 1e-9).sum(), len(kept))) if not np.isnan(kept).any() else float("nan")


def _of_lesions(kept_lesion: ArrayLike, lesion: ArrayLike, k: ArrayLike) -> tuple[Floats, Floats, Floats]:
    """Return kept and present lesion patches and the most that k can keep, of the images with a lesion patch."""
    kept, sizes, counts = np.broadcast_arrays(np.asarray(kept_lesion, float), np.asarray(lesion, float), np.asarray(k, float))
    some = sizes > 0  # False for NaN: no mask
    return kept[some], sizes[some], reachable(sizes, counts)[some]


def kept_lesion_counts(order: Tensor | ArrayLike, lesion: Tensor | ArrayLike, k: ArrayLike) -> NDArray[np.int64]:
    """Count the lesion patches `[B, T]` among the first `k` `[T]` of a ranking `[B, N]`, best first, in one pass.

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


def agreement(
    orders: Sequence[ArrayLike], lesions: Sequence[ArrayLike], k: ArrayLike, between: bool = False
) -> tuple[Floats, Floats]:
    """Measure retention and its share of the ceiling, `[T]` at K `[T]`, where several annotators marked the lesion of an image.

    Lesion patches `[A, N]`, kept ones and the most that k can keep are counted against each annotator and averaged over the
    annotators of an image; retention is then pooled over the images. An image has one ranking `[1, N]` or, to measure each
    annotator against the others (`between`), one of each annotator, `[A, N]`.

    Example:
        >>> retention, share = agreement([[[2, 0, 1, 3]]], [[[0, 1, 1, 0], [1, 1, 1, 0]]], k=[2])
        >>> retention.tolist(), share.tolist()  # 1 of 2 and 2 of 3 lesion patches, of which both 2 can be kept
        ([0.6], [0.75])
    """
    counts = np.asarray(k, int)
    sums = np.zeros((3, len(counts)))
    for order, lesion in zip(orders, lesions):
        ranking, mask = np.asarray(order, int), np.asarray(lesion, bool)
        # Rankings [R], annotators [A]
        # [R, A, K]: how much of each annotator's lesion each ranking has kept at each K.
        kept = mask.T[ranking].cumsum(1)[:, counts - 1].transpose(0, 2, 1)
        pairs = ~np.eye(len(mask), dtype=bool) if between else np.ones(kept.shape[:2], bool)
        sizes = np.broadcast_to(mask.sum(1)[:, None], kept.shape)
        sums += [values[pairs].mean(0) for values in (kept, sizes, reachable(sizes, counts))]
    return ratio(sums[0], sums[1]), ratio(sums[0], sums[2])


def __getattr__(name: str) -> Any:
    # The class is made when it is asked for, because torchmetrics is no dependency and takes a second to import.
    if name != "LesionRetention":
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    try:
        from torchmetrics import Metric
    except ImportError:
        advice = "Run `pip install torchmetrics`, or use `lesion_retention`."
        raise RequestError(f"LesionRetention needs torchmetrics. {advice}") from None

    class LesionRetention(Metric):
        """`lesion_retention` over all batches and processes, as a torchmetrics metric: a dictionary with the fields of `Retention`.

        `update(kept, lesion, has_mask)` takes what the function takes; `grid` says for all batches what `[h, w]` means. It keeps
        sums, not masks, so its memory does not grow.
        """

        is_differentiable, higher_is_better, full_state_update = False, True, False
        counts: Tensor
        shares: Tensor

        def __init__(self, grid: tuple[int, int] | None = None, **options: Any) -> None:
            super().__init__(**options)
            self.grid = grid
            # Counts are whole numbers, exact in any order of the batches; Apple GPUs have no float64.
            self.add_state("counts", torch.zeros(7, dtype=torch.int64), dist_reduce_fx="sum")
            self.add_state("shares", torch.zeros(()), dist_reduce_fx="sum")

        def update(self, kept: Any, lesion: Any, has_mask: Any = None) -> None:
            sums = _sums_of_masks(kept, lesion, has_mask, self.grid)
            self.counts += torch.from_numpy(np.delete(sums, _SHARES).astype(np.int64)).to(self.device)
            self.shares += float(sums[_SHARES])

        def compute(self) -> dict[str, Tensor]:
            total = _retention(np.insert(self.counts.cpu().numpy().astype(float), _SHARES, float(self.shares)))
            return {name: torch.tensor(float(value), device=self.device) for name, value in vars(total).items()}

    # As if it were defined at the top of the file, so that it is one class, and is found again by pickle.
    LesionRetention.__qualname__ = name
    globals()[name] = LesionRetention
    return LesionRetention


def _sums_of_masks(kept: Any, lesion: Any, has_mask: Any, grid: tuple[int, int] | None = None) -> Floats:
    if kept is None:
        raise RequestError("`kept` is None: mergers such as tome keep no single patches. Measure them with `group_purity`.")
    kept, lesion = _mask("kept", kept), _mask("lesion", lesion)
    shape = tuple(kept.shape)
    if len(shape) not in (1, 2, 3) or kept.shape != lesion.shape:
        raise ShapeError(
            f"`kept` and `lesion` must have the same shape [N], [B, N], [h, w] or [B, h, w], "
            f"got {list(shape)} and {list(lesion.shape)}."
        )
    one = len(shape) == 1
    if grid is not None:
        flat, square = (math.prod(grid),), tuple(grid)
        if shape not in (flat, square) and shape[1:] not in (flat, square):
            raise ShapeError(f"`kept` must be [N], [B, N], [h, w] or [B, h, w] of the `grid` {list(grid)}, got {list(shape)}.")
        one = shape in (flat, square)
    elif len(shape) == 2 and all(side in (_SQUARE_SIDES if shape[0] == shape[1] else _SIDES) for side in shape):
        advice = f"Say which with `grid=(h, w)`, for one image `grid={shape}`."
        raise ShapeError(f"{list(shape)} could be the grid [h, w] of one image or a batch [B, N]. {advice}")
    images = 1 if one else shape[0]
    kept, lesion = (mask.reshape(images, -1) for mask in (kept, lesion.to(kept.device)))
    counts = torch.stack([(kept & lesion).sum(1), lesion.sum(1), kept.sum(1)]).cpu().numpy()
    if has_mask is not None:
        known = _mask("has_mask", has_mask).cpu().numpy()
        if known.shape != (len(kept),):
            raise ShapeError(f"`has_mask` must be [B] = [{len(kept)}], got {list(known.shape)}.")
        counts = counts[:, known]
    return _sums_of_counts(counts[0], counts[1], counts[2], kept.shape[1])


def _sums_of_counts(kept_lesion: ArrayLike | None, lesion: ArrayLike, k: ArrayLike, n_patches: ArrayLike) -> Floats:
    """Sum what retention is a function of over the images: the order is that of `_retention`."""
    sizes = np.asarray(lesion, float)
    kept = np.full(sizes.shape, np.nan) if kept_lesion is None else np.asarray(kept_lesion, float)
    counts, patches = np.asarray(k, float), np.asarray(n_patches, float)
    if sizes.ndim != 1 or kept.shape != sizes.shape or any(v.shape not in ((), sizes.shape) for v in (counts, patches)):
        shapes = ", ".join(str(list(v.shape)) for v in (kept, sizes, counts, patches))
        raise ShapeError(f"`kept_lesion` and `lesion` must be [n], `k` and `n_patches` [n] or numbers, got {shapes}.")
    counts, patches = np.broadcast_to(counts, sizes.shape), np.broadcast_to(patches, sizes.shape)
    best = reachable(sizes, counts)
    # The only trace of arrays in different orders, which would give plausible numbers otherwise.
    if (wrong := np.flatnonzero(kept > best)).size:
        row = wrong[0]
        raise RequestError(
            f"Image {row} kept {kept[row]:g} lesion patches, but at most min(k, lesion) = {best[row]:g} are possible. "
            "Check that all arrays are in the same order."
        )
    measured = sizes > 0  # False for NaN: no mask
    summed = (values[measured].sum() for values in (kept, sizes, best, counts, patches, ratio(kept, sizes)))
    return np.array([*summed, measured.sum(), (sizes == 0).sum()], float)


def _retention(sums: Floats) -> Retention:
    """Compute every measure from sums over images; the only place where they are defined."""
    kept_lesion, lesion, best, kept, patches, shares, n, empty = sums
    precision = ratio(kept_lesion, kept)
    return Retention(
        pooled=float(ratio(kept_lesion, lesion)),
        mean=float(ratio(shares, n)),
        ceiling=float(ratio(best, lesion)),
        of_ceiling=float(ratio(kept_lesion, best)),
        precision=float(precision),
        enrichment=float(ratio(precision, ratio(lesion, patches))),
        n=int(n),
        empty=int(empty),
    )


def _mask(name: str, value: Any) -> Tensor:
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


def _not_boolean(name: str, given: str) -> RequestError:
    return RequestError(f"`{name}` must be boolean or 0/1 integers, got {given}. Apply a threshold first, for example `x > 0.5`.")


def group_purity(assignment: Tensor, lesion: Tensor) -> Tensor:
    """Measure how little a merger's groups mix lesion and background `[B]`; the counterpart of retention for merged tokens.

    It is the share of the patches that are in the majority of their group (lesion or background): 1 when no group mixes them, NaN
    for an image whose patches were all dropped. `assignment` `[B, N]` is the group of each patch, -1 for dropped ones.

    Example:
        >>> import torch
        >>> group_purity(torch.tensor([[0, 0, 1, 1]]), torch.tensor([[True, True, True, False]])).tolist()
        [0.75]
    """
    size, lesions = _group_sizes(assignment, lesion)
    return torch.maximum(lesions, size - lesions).sum(1) / size.sum(1)


def lesion_dominated(assignment: Tensor, lesion: Tensor) -> Tensor:
    """Measure the share of the lesion patches `[B]` in tokens of which more than half is lesion: the retention of mergers.

    Where every kept patch is a token of its own, this is the retention. NaN for an image without lesion patches.

    Example:
        >>> import torch
        >>> lesion = torch.tensor([[True, True, True, False, False, True]])
        >>> lesion_dominated(torch.tensor([[0, 0, 1, 1, 1, -1]]), lesion).tolist()  # two of four; one is outvoted, one dropped
        [0.5]
    """
    size, lesions = _group_sizes(assignment, lesion)
    dominated = torch.where(2 * lesions > size, lesions, torch.zeros_like(lesions)).sum(1)
    total = lesion.float().sum(1)
    return torch.where(total > 0, dominated / total.clamp_min(1), torch.nan)


def lesion_mass(attention: Tensor, lesion: Tensor) -> Tensor:
    """Measure how much of a soft merger's tokens comes from the lesion `[B]`: attention `[B, K, N]` on it, averaged over tokens.

    For a selector that keeps single patches this is the precision. NaN for an image without lesion patches.

    Example:
        >>> import torch
        >>> attention = torch.tensor([[[0.5, 0.5, 0.0], [0.0, 0.0, 1.0]]])
        >>> lesion_mass(attention, torch.tensor([[True, False, True]])).tolist()
        [0.75]
    """
    if attention.ndim != 3 or lesion.shape != (attention.shape[0], attention.shape[2]):
        raise ShapeError(
            f"`attention` must be [B, K, N] and `lesion` [B, N], got {list(attention.shape)} and {list(lesion.shape)}."
        )
    mass = (attention.mean(1) * lesion.to(attention.dtype)).sum(1)
    return torch.where(lesion.bool().any(1), mass, torch.nan)


def _group_sizes(assignment: Tensor, lesion: Tensor) -> tuple[Tensor, Tensor]:
    if assignment.ndim != 2 or assignment.shape != lesion.shape:
        raise ShapeError(f"`assignment` and `lesion` must be [B, N], got {list(assignment.shape)} and {list(lesion.shape)}.")
    n, last = assignment.shape[1], int(assignment.max()) if assignment.numel() else -1
    if last >= n:
        raise ShapeError(f"`assignment` names group {last}, but there are only {n} patches in an image [B, N]. Flatten grids.")
    ones = (assignment >= 0).float()
    target = assignment.clamp_min(0)
    groups = int(target.max()) + 1 if target.numel() else 1
    size = torch.zeros(len(assignment), groups, device=assignment.device).scatter_add_(1, target, ones)
    return size, torch.zeros_like(size).scatter_add_(1, target, ones * lesion.float())


def correct(label: ArrayLike, predicted: ArrayLike) -> NDArray[np.bool_]:
    """Return `[n]` True where the predicted class is the label."""
    label, predicted = np.asarray(label), np.asarray(predicted)
    if label.shape != predicted.shape:
        raise ShapeError(f"`label` and `predicted` must have the same shape, got {list(label.shape)} and {list(predicted.shape)}.")
    return np.asarray(label == predicted)


def accuracy(label: ArrayLike, predicted: ArrayLike) -> float:
    hits = correct(label, predicted)
    return float(hits.mean()) if hits.size else float("nan")


def class_counts(label: ArrayLike, predicted: ArrayLike, classes: int) -> Floats:
    """Count `[3, C]`: for each class its true positives, the images of the class, and the images predicted as the class."""
    label, predicted = np.asarray(label, int), np.asarray(predicted, int)
    hits = np.bincount(label[correct(label, predicted)], minlength=classes)
    return np.stack([hits, np.bincount(label, minlength=classes), np.bincount(predicted, minlength=classes)]).astype(float)


def recall(label: ArrayLike, predicted: ArrayLike, classes: int) -> Floats:
    """Compute `[C]` the share of each class's images that were predicted as the class; NaN for classes without an image."""
    hits, true, _ = class_counts(label, predicted, classes)
    return ratio(hits, true)


def macro_f1(label: ArrayLike, predicted: ArrayLike, classes: int) -> float:
    """Average the F1 of each class that occurs as label or as prediction (scikit-learn's default)."""
    return float(macro_f1_of_counts(class_counts(label, predicted, classes)))


def macro_f1_of_counts(counts: Floats) -> Floats:
    """Compute macro F1 from `class_counts` of shape `[..., 3, C]`."""
    hits, true, predicted = counts[..., 0, :], counts[..., 1, :], counts[..., 2, :]
    return _mean_where(ratio(2 * hits, true + predicted), true + predicted > 0)


def balanced_accuracy(label: ArrayLike, predicted: ArrayLike, classes: int) -> float:
    """Average the recall over the classes that occur as label."""
    return float(balanced_accuracy_of_counts(class_counts(label, predicted, classes)))


def balanced_accuracy_of_counts(counts: Floats) -> Floats:
    """Compute balanced accuracy from `class_counts` of shape `[..., 3, C]`."""
    hits, true = counts[..., 0, :], counts[..., 1, :]
    return _mean_where(ratio(hits, true), true > 0)


def _mean_where(values: Floats, valid: NDArray[np.bool_]) -> Floats:
    return ratio(np.where(valid, values, 0.0).sum(-1), valid.sum(-1))


def macro_auroc(label: ArrayLike, probabilities: ArrayLike) -> float:
    """Average the one-vs-rest area under the ROC curve over the classes that have positives and negatives; NaN without any."""
    label, probabilities = np.asarray(label, int), np.asarray(probabilities, float)
    if label.size and (probabilities.ndim != 2 or label.shape != probabilities.shape[:1]):
        raise ShapeError(
            f"`label` must be [n] and `probabilities` [n, C], got {list(label.shape)} and {list(probabilities.shape)}."
        )
    areas = []
    for index in range(probabilities.shape[1] if probabilities.ndim == 2 else 0):
        positive = label == index
        n_positive, n_negative = int(positive.sum()), int((~positive).sum())
        if n_positive and n_negative:
            ranks = rankdata(probabilities[:, index])  # ties share their mean rank: half a win each
            areas.append((ranks[positive].sum() - n_positive * (n_positive + 1) / 2) / (n_positive * n_negative))
    return float(np.mean(areas)) if areas else float("nan")


def confidence_bins(probabilities: ArrayLike, bins: int = ECE_BINS) -> tuple[Floats, NDArray[np.int64]]:
    """Return `[n]` confidence (the largest probability) and `[n]` its equal-width bin; bins are (0, 1/15], (1/15, 2/15], ..."""
    probabilities = np.asarray(probabilities, float)
    confidence = probabilities.max(1) if len(probabilities) else np.zeros(0)
    return confidence, np.clip(np.ceil(confidence * bins).astype(int) - 1, 0, bins - 1)


def expected_calibration_error(label: ArrayLike, predicted: ArrayLike, probabilities: ArrayLike) -> float:
    """Average over images |accuracy - mean confidence| of their bin; equal-width bins of the largest probability."""
    confidence, index = confidence_bins(probabilities)
    gaps = np.bincount(index, correct(label, predicted) - confidence, ECE_BINS)
    return float(np.abs(gaps).sum() / len(index)) if len(index) else float("nan")


def reliability(label: ArrayLike, predicted: ArrayLike, probabilities: ArrayLike) -> tuple[Floats, Floats, NDArray[np.int64]]:
    """Return `[bins]` mean confidence, accuracy and number of images of each bin; NaN in the first two for empty bins."""
    confidence, index = confidence_bins(probabilities)
    counts = np.bincount(index, minlength=ECE_BINS)
    hits = correct(label, predicted).astype(float)
    return ratio(np.bincount(index, confidence, ECE_BINS), counts), ratio(np.bincount(index, hits, ECE_BINS), counts), counts
