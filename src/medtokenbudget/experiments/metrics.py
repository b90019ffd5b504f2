"""What is measured on predictions and on kept patches, as plain functions over arrays.

Its own file because the sweep, the statistics and the report must mean the same thing by the same name. Every function
returns a fraction (enrichment a ratio), and NaN where there is nothing to measure: not measured is not zero.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.stats import rankdata

ECE_BINS = 15
Floats = NDArray[np.float64]


def ratio(numerator: ArrayLike, denominator: ArrayLike) -> Floats:
    """Elementwise quotient; NaN where the denominator is 0."""
    numerator, denominator = np.broadcast_arrays(np.asarray(numerator, float), np.asarray(denominator, float))
    return np.divide(numerator, denominator, out=np.full(numerator.shape, np.nan), where=denominator != 0)


def accuracy(label: ArrayLike, predicted: ArrayLike) -> float:
    """Share of images whose predicted class is the label."""
    correct = np.asarray(label) == np.asarray(predicted)
    return float(correct.mean()) if correct.size else float("nan")


def class_counts(label: ArrayLike, predicted: ArrayLike, classes: int) -> Floats:
    """[3, C]: for each class the true positives, the images of the class, the images predicted as the class."""
    label, predicted = np.asarray(label, int), np.asarray(predicted, int)
    hits = np.bincount(label[label == predicted], minlength=classes)
    return np.stack([hits, np.bincount(label, minlength=classes), np.bincount(predicted, minlength=classes)]).astype(float)


def macro_f1_of_counts(counts: Floats) -> Floats:
    """Macro F1 of `class_counts` [..., 3, C]: mean over the classes that occur as label or as prediction."""
    hits, true, predicted = counts[..., 0, :], counts[..., 1, :], counts[..., 2, :]
    return _mean_where(ratio(2 * hits, true + predicted), true + predicted > 0)


def balanced_accuracy_of_counts(counts: Floats) -> Floats:
    """Mean recall over the classes that occur as label, of `class_counts` [..., 3, C]."""
    hits, true = counts[..., 0, :], counts[..., 1, :]
    return _mean_where(ratio(hits, true), true > 0)


def _mean_where(values: Floats, valid: NDArray[np.bool_]) -> Floats:
    return ratio(np.where(valid, values, 0.0).sum(-1), valid.sum(-1))


def macro_f1(label: ArrayLike, predicted: ArrayLike, classes: int) -> float:
    """Unweighted mean of the F1 of each class that occurs as label or as prediction (scikit-learn's default)."""
    return float(macro_f1_of_counts(class_counts(label, predicted, classes)))


def balanced_accuracy(label: ArrayLike, predicted: ArrayLike, classes: int) -> float:
    """Mean recall over the classes that occur as label."""
    return float(balanced_accuracy_of_counts(class_counts(label, predicted, classes)))


def macro_auroc(label: ArrayLike, probabilities: ArrayLike) -> float:
    """Mean one-vs-rest area under the ROC curve over the classes with both positives and negatives; probabilities [n, C]."""
    label, probabilities = np.asarray(label, int), np.asarray(probabilities, float)
    areas = []
    for index in range(probabilities.shape[1] if probabilities.ndim == 2 else 0):
        positive = label == index
        n_positive, n_negative = int(positive.sum()), int((~positive).sum())
        if n_positive and n_negative:
            ranks = rankdata(probabilities[:, index])  # ties share their mean rank: half a win each
            areas.append((ranks[positive].sum() - n_positive * (n_positive + 1) / 2) / (n_positive * n_negative))
    return float(np.mean(areas)) if areas else float("nan")


def calibration_bins(label: ArrayLike, predicted: ArrayLike, probabilities: ArrayLike, bins: int = ECE_BINS) -> Floats:
    """[n, bins]: each image's (correct - confidence) in the bin of its confidence, 0 elsewhere; what ECE sums up."""
    probabilities = np.asarray(probabilities, float)
    confidence = probabilities.max(1) if len(probabilities) else np.zeros(0)
    gap = (np.asarray(label) == np.asarray(predicted)) - confidence
    # Bins are (0, 1/15], (1/15, 2/15], ...
    index = np.clip(np.ceil(confidence * bins).astype(int) - 1, 0, bins - 1)
    return np.where(index[:, None] == np.arange(bins), gap[:, None], 0.0)


def expected_calibration_error(label: ArrayLike, predicted: ArrayLike, probabilities: ArrayLike, bins: int = ECE_BINS) -> float:
    """Mean over images of |accuracy - mean confidence| of their bin; equal-width bins of the largest probability."""
    gaps = calibration_bins(label, predicted, probabilities, bins)
    return float(np.abs(gaps.sum(0)).sum() / len(gaps)) if len(gaps) else float("nan")


@dataclass(frozen=True)
class Retention:
    """How much lesion the kept patches hold, over the images that have a lesion patch at all.

    pooled         kept lesion patches / lesion patches, summed over images (the paper's)
    mean           the mean over images of each image's share
    of_ceiling     pooled / ceiling
    ceiling        sum of min(k, lesion) / sum of lesion: what no selector can exceed
    precision      kept lesion patches / kept patches
    enrichment     precision / prevalence, where prevalence is lesion patches / patches
    n, empty       images measured, and images left out because their mask has no lesion patch on the grid
    """

    pooled: float
    mean: float
    of_ceiling: float
    ceiling: float
    precision: float
    enrichment: float
    n: int
    empty: int


def lesion_retention(kept_lesion: ArrayLike | None, lesion: ArrayLike, k: ArrayLike, n_patches: ArrayLike) -> Retention:
    """Retention of images with a mask; all arrays [n] of counts. Without `kept_lesion` (mergers) only the ceiling is known."""
    lesion = np.asarray(lesion, float)
    k, n_patches = (np.broadcast_to(np.asarray(value, float), lesion.shape) for value in (k, n_patches))
    measured = lesion > 0
    total, best = lesion[measured].sum(), np.minimum(k, lesion)[measured].sum()
    kept = np.full(lesion.shape, np.nan) if kept_lesion is None else np.asarray(kept_lesion, float)
    kept = kept[measured]
    precision = ratio(kept.sum(), k[measured].sum())
    return Retention(
        pooled=float(ratio(kept.sum(), total)),
        mean=float((kept / lesion[measured]).mean()) if measured.any() else float("nan"),
        of_ceiling=float(ratio(kept.sum(), best)),
        ceiling=float(ratio(best, total)),
        precision=float(precision),
        enrichment=float(ratio(precision, ratio(total, n_patches[measured].sum()))),
        n=int(measured.sum()),
        empty=int((~measured).sum()),
    )
