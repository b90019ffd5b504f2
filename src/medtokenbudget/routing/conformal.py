"""A guarantee instead of a budget: each image keeps the patches above a threshold that was picked on calibration images.

Conformal risk control (Angelopoulos et al. 2022) picks the highest threshold whose risk on n calibration groups, corrected for
their finite number, is at most the promised one: `n / (n + 1) * risk + 1 / (n + 1) <= alpha`. The risk of a new group of the same
kind is then at most alpha on average, whatever the scores are worth; poor scores only cost tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
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
    """What is promised about the lesion, for the images of a new group on average: the share `retention` of its patches is kept.

    With a `coverage`, this share of the images keeps at least `retention` of their lesion each, which is stricter.

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
        level = self.retention if self.coverage is None else self.coverage
        # 1 - 0.95 is 0.050000000000000044 in floats.
        return float(1 - Fraction(str(level)))

    def allowed_losses(self, lesion: ArrayLike) -> Counts:
        """Return how many of `lesion` [n] lesion patches each image may lose and still keep `retention` of them, `[n]`."""
        # (1 - 0.9) * 10 is 0.9999999999999998 in floats: one patch too few.
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
    # From the worst patch to the best, so that small shares are added to small sums.
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

    The exchangeable units are groups (lesions, patients; by default each image is one): the loss of a group is the mean over its
    images. Scores and lesion patches are `[n, N]`; the selector must not have been trained on these images. Images without a
    lesion patch cannot lose any and are left out. `most` patches of an image (a cap) is part of the rule, so the promise holds
    with it or is refused.

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
            advice = f"Add images with masks, or promise less than {100 * units / (units + 1):.4g}%."
            raise RequestError(f"{units} calibration groups cannot promise {promise}: at least {needed} are needed. {advice}")
        raise RequestError(
            f"The cap does not allow {promise}: keeping as much as it permits can promise at most {100 * (1 - lowest_bound):.4g}%. "
            "Raise the cap, or promise less."
        )
    if not finite.any():  # whatever the threshold is, each image keeps its fewest or its most patches
        return Threshold(float(values.max()), unavoidable, lowest_bound, units, images)
    # Sorted before, so `first` counts the losses below each candidate.
    candidates, first = np.unique(at[finite], return_index=True)
    total = unavoidable + np.concatenate([[0.0], np.cumsum(weight[finite])])
    # The last candidate is above all of them: whatever can be lost is.
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


@dataclass(frozen=True, kw_only=True)
class Guarantee(Promise):
    """A promise (`retention`, `coverage`), and the threshold on a method's scores that keeps it on images like the calibrated ones.

    Pass it wherever a model takes a budget. An image keeps the patches with the score `threshold` or a higher one, at least
    `minimum` and at most `most` (a `cap` given as a share), and the promise holds with these limits. `relative` means a threshold
    on `relative_scores`, as for lesion probabilities. `kept` and `tokens` are the means over the `groups` of the calibration
    images, `bound` is their risk with the finite-sample correction, `data` and `model` are hashes. With `by` (such as 'class'),
    `parts` has a row for each value: `value`, `images`, `groups`, `kept`, `tokens`, and whether the promise covers it
    (`promised`).
    """

    cap: float | None
    threshold: float
    minimum: int
    most: int
    selector: str
    bound: float
    kept: float
    tokens: float
    images: int
    groups: int
    dataset: str
    data: str
    model: str
    relative: bool = False
    by: str | None = None
    parts: tuple[dict[str, Any], ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.minimum <= self.most or not math.isfinite(self.threshold):
            raise RequestError(f"No rule keeps {self.minimum} to {self.most} patches above a score of {self.threshold}.")

    def counts(self, scores: ArrayLike) -> np.ndarray:
        """Count the patches `[n]` to keep of images with scores `[n, N]`."""
        return kept_counts(relative_scores(scores) if self.relative else scores, self.threshold, self.minimum, self.most)

    def keeps(self, promise: Promise, selector: str) -> bool:
        return (self.retention, self.coverage, self.selector) == (promise.retention, promise.coverage, selector)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Guarantee:
        """Read the checked values of a `config.json`; what a later version added is ignored."""
        known = {entry.name: values[entry.name] for entry in fields(cls) if entry.name in values}
        return cls(**{**known, "parts": tuple(values.get("parts", ()))})

    def __str__(self) -> str:
        each = "" if self.by is None else f", for each {self.by}"
        return super().__str__() + each + ("" if self.cap is None else f", at most {100 * self.cap:g}% of the patches")

    def table(self) -> list[list[str]]:
        needed = groups_needed(self)
        rows = [[str(self.by), "groups", "images", "kept", "patches", "promised"]]
        for row in self.parts:
            counts, promised = (f"{row['groups']:,}", f"{row['images']:,}"), row["promised"]
            measured = (f"{row['kept']:.1%}", f"{row['tokens']:.0f}")
            rows.append([str(row["value"]), *counts, *measured, "yes" if promised else f"no, {needed} groups are needed"])
        return rows

    def on_card(self, card: str) -> str:
        """Return a model card with the table of this guarantee in place of an earlier one of the same promise."""
        from medtokenbudget.escaping import markdown_text  # loads pandas, which routing does not need

        title = f"## Promise of {self.selector}: {self}"
        before, _, after = card.partition(f"{title}\n")
        rest = after[after.find("\n## ") + 1 :] if "\n## " in after else ""
        head, *rows = [f"| {' | '.join(map(markdown_text, row))} |" for row in self.table()]
        lines = [title, "", f"Calibrated on {self.dataset}.", "", head, "|" + " --- |" * len(self.table()[0]), *rows, ""]
        return "\n".join([before.rstrip("\n"), "", *lines]) + (f"\n{rest}" if rest else "")
