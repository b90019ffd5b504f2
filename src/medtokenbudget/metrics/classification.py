"""How well classes are told apart: accuracy, recall, macro F1, balanced accuracy, area under the ROC curve."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.stats import rankdata

from medtokenbudget.errors import ShapeError
from medtokenbudget.metrics.ratios import Floats, ratio


def correct(label: ArrayLike, predicted: ArrayLike) -> NDArray[np.bool_]:
    """`[n]` True where the predicted class is the label."""
    label, predicted = np.asarray(label), np.asarray(predicted)
    if label.shape != predicted.shape:
        raise ShapeError(f"`label` and `predicted` must have the same shape, got {list(label.shape)} and {list(predicted.shape)}.")
    return np.asarray(label == predicted)


def accuracy(label: ArrayLike, predicted: ArrayLike) -> float:
    """Share of the images whose predicted class is the label.

    Example:
        >>> accuracy([0, 1, 2, 2], [0, 1, 2, 0])
        0.75
    """
    right = correct(label, predicted)
    return float(right.mean()) if right.size else float("nan")


def class_counts(label: ArrayLike, predicted: ArrayLike, classes: int) -> Floats:
    """`[3, C]`: for each class its true positives, the images of the class, and the images predicted as the class."""
    label, predicted = np.asarray(label, int), np.asarray(predicted, int)
    hits = np.bincount(label[correct(label, predicted)], minlength=classes)
    return np.stack([hits, np.bincount(label, minlength=classes), np.bincount(predicted, minlength=classes)]).astype(float)


def recall(label: ArrayLike, predicted: ArrayLike, classes: int) -> Floats:
    """`[C]` share of each class's images that were predicted as the class; NaN for classes without an image.

    Example:
        >>> recall([0, 0, 1], [0, 1, 1], classes=3).tolist()
        [0.5, 1.0, nan]
    """
    hits, true, _ = class_counts(label, predicted, classes)
    return ratio(hits, true)


def macro_f1(label: ArrayLike, predicted: ArrayLike, classes: int) -> float:
    """Unweighted mean of the F1 of each class that occurs as label or as prediction (scikit-learn's default).

    Example:
        >>> round(macro_f1([0, 0, 1], [0, 1, 1], classes=2), 4)  # both classes have an F1 of 2/3
        0.6667
    """
    return float(macro_f1_of_counts(class_counts(label, predicted, classes)))


def macro_f1_of_counts(counts: Floats) -> Floats:
    """Macro F1 from `class_counts` of shape `[..., 3, C]`."""
    hits, true, predicted = counts[..., 0, :], counts[..., 1, :], counts[..., 2, :]
    return _mean_where(ratio(2 * hits, true + predicted), true + predicted > 0)


def balanced_accuracy(label: ArrayLike, predicted: ArrayLike, classes: int) -> float:
    """Mean recall over the classes that occur as label.

    Example:
        >>> balanced_accuracy([0, 0, 1], [0, 1, 1], classes=2)
        0.75
    """
    return float(balanced_accuracy_of_counts(class_counts(label, predicted, classes)))


def balanced_accuracy_of_counts(counts: Floats) -> Floats:
    """Balanced accuracy from `class_counts` of shape `[..., 3, C]`."""
    hits, true = counts[..., 0, :], counts[..., 1, :]
    return _mean_where(ratio(hits, true), true > 0)


def _mean_where(values: Floats, valid: NDArray[np.bool_]) -> Floats:
    return ratio(np.where(valid, values, 0.0).sum(-1), valid.sum(-1))


def macro_auroc(label: ArrayLike, probabilities: ArrayLike) -> float:
    """Mean one-vs-rest area under the ROC curve over the classes that have both positives and negatives.

    Args:
        label: `[n]` class indices.
        probabilities: `[n, C]`.

    Returns:
        The mean area; NaN when no class has both.
    """
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
