"""How far probabilities can be believed: confidence bins, expected calibration error, reliability."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from medtokenbudget.metrics.classification import correct
from medtokenbudget.metrics.ratios import Floats, ratio

ECE_BINS = 15


def confidence_bins(probabilities: ArrayLike, bins: int = ECE_BINS) -> tuple[Floats, NDArray[np.int64]]:
    """`[n]` confidence (the largest probability) and `[n]` its equal-width bin; bins are (0, 1/15], (1/15, 2/15], ..."""
    probabilities = np.asarray(probabilities, float)
    confidence = probabilities.max(1) if len(probabilities) else np.zeros(0)
    return confidence, np.clip(np.ceil(confidence * bins).astype(int) - 1, 0, bins - 1)


def calibration_bins(label: ArrayLike, predicted: ArrayLike, probabilities: ArrayLike, bins: int = ECE_BINS) -> Floats:
    """`[n, bins]`: each image's (correct - confidence) in the bin of its confidence, 0 elsewhere; ECE sums these."""
    confidence, index = confidence_bins(probabilities, bins)
    gap = correct(label, predicted) - confidence
    return np.where(index[:, None] == np.arange(bins), gap[:, None], 0.0)


def expected_calibration_error(label: ArrayLike, predicted: ArrayLike, probabilities: ArrayLike, bins: int = ECE_BINS) -> float:
    """Mean over images of |accuracy - mean confidence| of their bin; equal-width bins of the largest probability."""
    gaps = calibration_bins(label, predicted, probabilities, bins)
    return float(np.abs(gaps.sum(0)).sum() / len(gaps)) if len(gaps) else float("nan")


def reliability(
    label: ArrayLike, predicted: ArrayLike, probabilities: ArrayLike, bins: int = ECE_BINS
) -> tuple[Floats, Floats, NDArray[np.int64]]:
    """`[bins]` mean confidence, accuracy and number of images of each bin; NaN in the first two for empty bins."""
    confidence, index = confidence_bins(probabilities, bins)
    counts = np.bincount(index, minlength=bins)
    said, right = (np.bincount(index, values, bins) for values in (confidence, correct(label, predicted).astype(float)))
    return ratio(said, counts), ratio(right, counts), counts
