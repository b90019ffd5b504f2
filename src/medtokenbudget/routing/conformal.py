"""A guarantee instead of a budget: each image keeps the patches above a threshold that was picked on calibration images.

Conformal risk control (Angelopoulos et al. 2022) picks the highest threshold whose risk on n calibration groups, corrected for
their finite number, is at most the promised one: `n / (n + 1) * risk + 1 / (n + 1) <= alpha`. The risk of a new group of the same
kind is then at most alpha on average, whatever the scores are worth; poor scores only cost tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from medtokenbudget.errors import CountError, NonFiniteError, RequestError, ShapeError

Floats = NDArray[np.float64]
Counts = NDArray[np.int64]
_SLACK = 1e-12
"""Equal risks must count as equal after rounding."""


@dataclass(frozen=True)
class Promise:
    """What is promised about the lesion, for the images of a new group on average.

    Attributes:
        retention: Share of the lesion patches that is kept, in (0, 1).
        coverage: None promises that `retention` is reached on average. A share in (0, 1) promises that this share of the images
            keeps at least `retention` of their lesion each, which is stricter.

    Example:
        >>> Promise(0.95).alpha, str(Promise(0.95, coverage=0.9))
        (0.05, 'at least 95% of the lesion in 90% of the images')
    """

    retention: float
    coverage: float | None = None

    def __post_init__(self) -> None:
        for name, value in (("retention", self.retention), ("coverage", self.coverage)):
            if value is not None and not 0 < value < 1:
                raise RequestError(f"The promised {name} must be between 0 and 1, such as 0.95, got {value!r}.")

    @property
    def alpha(self) -> float:
        """The largest risk that the promise allows."""
        level = self.retention if self.coverage is None else self.coverage
        return float(1 - Fraction(str(level)))

    def allowed_losses(self, lesion: ArrayLike) -> Counts:
        """Return how many of `lesion` [n] lesion patches each image may lose and still keep `retention` of them, `[n]`."""
        loss = 1 - Fraction(str(self.retention))
        return np.array([int(loss * int(size)) for size in np.asarray(lesion).reshape(-1)], np.int64)

    def __str__(self) -> str:
        share = f"{100 * self.retention:g}% of the lesion"
        return f"{share} on average" if self.coverage is None else f"at least {share} in {100 * self.coverage:g}% of the images"


@dataclass(frozen=True)
class Threshold:
    """The result of a calibration: patches with the score `value` or a higher one are kept."""

    value: float
    risk: float
    """Mean loss of the calibration groups at this threshold."""
    bound: float
    """The risk with the finite-sample correction; at most the promise's `alpha`."""
    groups: int
    images: int
    """Images with a lesion patch in these groups."""


def kept_counts(scores: ArrayLike, threshold: float, minimum: int = 1, most: int | None = None) -> Counts:
    """Count the patches that each image keeps, scores `[n, N]` to `[n]`: the first of the ranking of its scores.

    They are those with `threshold` or a higher score, at least `minimum` and at most `most` (None means N) of the best.

    Example:
        >>> kept_counts([[0.9, 0.8, 0.1], [0.3, 0.2, 0.1]], threshold=0.5).tolist()
        [2, 1]
    """
    values = _scores(scores)
    lowest, highest = _limits(values.shape[1], minimum, most)
    return np.asarray((values >= threshold).sum(1).clip(lowest, highest), np.int64)


def relative_scores(scores: ArrayLike) -> Floats:
    """Return for each patch the share of its image's squared scores that is in it and in all patches ranked after it, `[n, N]`.

    The order stays. A threshold on lesion probabilities keeps little of an image in which all of them are low; a threshold on these
    shares does not.

    Example:
        >>> relative_scores([[0.2, 0.4, 0.2], [0.1, 0.2, 0.1]]).round(3).tolist()
        [[0.333, 1.0, 0.167], [0.333, 1.0, 0.167]]
    """
    values = _scores(scores)
    order = np.argsort(-values, axis=1, kind="stable")
    mass = np.take_along_axis(values, order, axis=1) ** 2
    left = np.cumsum(mass[:, ::-1], axis=1)[:, ::-1]
    shares = np.empty_like(values)
    np.put_along_axis(shares, order, left / np.maximum(left[:, :1], np.finfo(float).tiny), axis=1)
    return shares


def lesion_kept(scores: ArrayLike, lesion: ArrayLike, counts: ArrayLike) -> Floats:
    """Measure the share of each image's lesion among its `counts` [n] best patches, `[n]`; NaN without a lesion patch."""
    values, inside = _scores(scores), np.asarray(lesion, bool)
    kept = (_ranks(values) < np.asarray(counts).reshape(-1, 1)) & inside
    sizes = inside.sum(1)
    return np.divide(kept.sum(1), sizes, out=np.full(len(values), np.nan), where=sizes > 0)


def group_mean(values: ArrayLike, groups: Sequence[str]) -> float:
    """Average over groups the mean over the images of each group; NaN values are left out.

    Example:
        >>> group_mean([1.0, 0.0, 0.5], ["a", "b", "b"])
        0.625
    """
    numbers, named = np.asarray(values, float), np.asarray(groups, str)
    measured = ~np.isnan(numbers)
    _, member, sizes = np.unique(named[measured], return_inverse=True, return_counts=True)
    return float(np.average(numbers[measured], weights=1 / sizes[member])) if len(sizes) else float("nan")


def pick_threshold(
    promise: Promise,
    scores: ArrayLike,
    lesion: ArrayLike,
    groups: Sequence[str] | None = None,
    minimum: int = 1,
    most: int | None = None,
) -> Threshold:
    """Pick the highest threshold that keeps a promise on calibration images, by conformal risk control.

    The exchangeable units are groups (lesions, patients): the loss of a group is the mean over its images. Images without a lesion
    patch cannot lose any and are left out.

    Args:
        promise: What is to be promised.
        scores: `[n, N]` what patches are ranked by; the selector must not have been trained on these images.
        lesion: `[n, N]` lesion patches.
        groups: Group of each image; None means that every image is one.
        minimum: Fewest patches of an image.
        most: Most patches of an image (a cap); it is part of the rule, so the promise holds with it or is refused.

    Raises:
        RequestError: There are too few groups for this promise, or the cap does not allow it.

    Example:
        >>> scores, lesion = [[0.9, 0.6, 0.2]] * 9, [[1, 1, 0]] * 9
        >>> pick_threshold(Promise(0.5), scores, lesion).value  # losing 0.6 everywhere would be a corrected risk of 0.55
        0.6
    """
    values, inside = _scores(scores), np.asarray(lesion, bool)
    if inside.shape != values.shape:
        raise ShapeError(f"`scores` and `lesion` must be [n, N], got {list(values.shape)} and {list(inside.shape)}.")
    lowest, highest = _limits(values.shape[1], minimum, most)
    named = np.arange(len(values)).astype(str) if groups is None else np.asarray(groups, str)
    if named.shape != (len(values),):
        raise ShapeError(f"`groups` must name {len(values)} images, got {len(named)}.")
    measured = inside.any(1)
    if not measured.any():
        raise RequestError("No calibration image has a lesion patch, so nothing can be promised about the lesion.")
    at, weight, units = _losses(promise, values[measured], inside[measured], named[measured], (lowest, highest))
    order = np.argsort(at, kind="stable")
    at, weight, images = at[order], weight[order], int(measured.sum())
    # The risk at a threshold is the weight of the losses below it; it grows with the threshold.
    finite = np.isfinite(at)
    unavoidable = float(weight[at == -np.inf].sum())
    if (lowest_bound := corrected_risk(unavoidable, units)) > promise.alpha + _SLACK:
        if units < (needed := groups_needed(promise)):
            raise RequestError(
                f"{units} calibration groups cannot promise {promise}: at least {needed} are needed. Add images with masks, or "
                f"promise less than {100 * units / (units + 1):.4g}%."
            )
        raise RequestError(
            f"The cap does not allow {promise}: keeping as much as it permits can promise at most {100 * (1 - lowest_bound):.4g}%. "
            "Raise the cap, or promise less."
        )
    if not finite.any():  # whatever the threshold is, each image keeps its fewest or its most patches
        return Threshold(float(values.max()), unavoidable, lowest_bound, units, images)
    candidates, first = np.unique(at[finite], return_index=True)
    total = unavoidable + np.concatenate([[0.0], np.cumsum(weight[finite])])
    candidates, below = np.append(candidates, np.nextafter(candidates[-1], np.inf)), total[np.append(first, -1)]
    bounds = corrected_risk(below, units)
    best = int(np.flatnonzero(bounds <= promise.alpha + _SLACK)[-1])
    return Threshold(float(candidates[best]), float(below[best]), float(bounds[best]), units, images)


def _losses(
    promise: Promise, values: Floats, inside: NDArray[np.bool_], groups: NDArray[np.str_], limits: tuple[int, int]
) -> tuple[Floats, Floats, int]:
    """Find the scores above which a threshold loses something, what each of them adds to the risk, and the number of groups.

    For the mean, every lesion patch is a loss; for the coverage, the one patch of each image whose loss is one too many.
    """
    lowest, highest = limits
    ranks = _ranks(values)
    # What the minimum keeps is never lost, what the cap drops always is.
    values = np.where(ranks < lowest, np.inf, np.where(ranks >= highest, -np.inf, values))
    _, member, sizes = np.unique(groups, return_inverse=True, return_counts=True)
    share = 1 / (len(sizes) * sizes[member])
    if promise.coverage is None:
        rows, columns = np.nonzero(inside)
        return values[rows, columns], (share / inside.sum(1))[rows], len(sizes)
    ascending = np.sort(np.where(inside, values, np.inf), axis=1)
    return ascending[np.arange(len(values)), promise.allowed_losses(inside.sum(1))], share, len(sizes)


def corrected_risk(risk: ArrayLike, groups: int) -> Any:
    """Compute `n / (n + 1) * risk + 1 / (n + 1)`: the risk as if one more group had lost everything."""
    return (groups * np.asarray(risk, float) + 1) / (groups + 1)


def groups_needed(promise: Promise) -> int:
    """Return the fewest calibration groups with which a promise can be kept at all: `1 / (n + 1) <= alpha`."""
    # In fractions, because 1 - 0.9 is less than a tenth in floats, which would ask for one group too many.
    return -(-1 // (1 - Fraction(str(promise.retention if promise.coverage is None else promise.coverage)))) - 1


def _limits(n: int, minimum: int, most: int | None) -> tuple[int, int]:
    highest = n if most is None else most
    lowest = min(minimum, highest)
    if lowest < 0 or not 1 <= highest <= n:
        raise CountError(f"An image of {n} patches cannot keep at least {minimum} and at most {highest} of them.")
    return lowest, highest


def _ranks(scores: Floats) -> Counts:
    """Number each patch by its place in the ranking of its image, best first, ties by index: as `topk.rank`."""
    order = np.argsort(-scores, axis=1, kind="stable")
    ranks = np.empty_like(order)
    np.put_along_axis(ranks, order, np.broadcast_to(np.arange(scores.shape[1]), order.shape), axis=1)
    return ranks


def _scores(scores: ArrayLike) -> Floats:
    values = np.asarray(scores, float)
    if values.ndim != 2:
        raise ShapeError(f"Scores must be [n, N], got {list(values.shape)}.")
    if not np.isfinite(values).all():
        raise NonFiniteError("Scores contain NaN or infinite values, so no threshold can be picked on them.")
    return values
