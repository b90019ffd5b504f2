"""Metrics of classification and calibration against scikit-learn and values worked by hand."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn import metrics as sklearn

from medtokenbudget import metrics
from medtokenbudget.errors import ShapeError

SEEDS = st.integers(0, 2**31)

examples = settings(max_examples=60, deadline=None)


@examples
@given(st.integers(0, 2**31), st.integers(1, 80), st.integers(2, 8))
def test_classification_metrics_equal_those_of_scikit_learn(seed: int, n: int, classes: int) -> None:
    rng = np.random.default_rng(seed)
    label, predicted = rng.integers(0, classes, n), rng.integers(0, classes, n)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert metrics.accuracy(label, predicted) == pytest.approx(sklearn.accuracy_score(label, predicted))
        assert metrics.macro_f1(label, predicted, classes) == pytest.approx(sklearn.f1_score(label, predicted, average="macro"))
        expected = sklearn.balanced_accuracy_score(label, predicted)
        assert metrics.balanced_accuracy(label, predicted, classes) == pytest.approx(expected)


def test_macro_auroc_equals_scikit_learn_one_against_rest_with_ties() -> None:
    rng = np.random.default_rng(0)
    label = rng.integers(0, 4, 200)
    probabilities = rng.integers(1, 5, (200, 4)).astype(float)
    probabilities /= probabilities.sum(1, keepdims=True)
    expected = sklearn.roc_auc_score(label, probabilities, multi_class="ovr", average="macro")
    assert metrics.macro_auroc(label, probabilities) == pytest.approx(expected)


def test_macro_auroc_leaves_out_classes_that_do_not_occur() -> None:
    label = np.array([0, 0, 1, 1])
    probabilities = np.array([[0.8, 0.1, 0.1], [0.3, 0.4, 0.3], [0.2, 0.7, 0.1], [0.4, 0.5, 0.1]])
    expected = np.mean([sklearn.roc_auc_score(label == c, probabilities[:, c]) for c in (0, 1)])
    assert metrics.macro_auroc(label, probabilities) == pytest.approx(expected)
    assert np.isnan(metrics.macro_auroc(np.zeros(4, int), probabilities[:, :1]))


def test_calibration_error_by_hand() -> None:
    # Confidences 0.9 (right), 0.9 (wrong), 0.6 (right): bins hold {0.9, 0.9} and {0.6}.
    probabilities = np.array([[0.9, 0.1], [0.9, 0.1], [0.4, 0.6]])
    error = metrics.expected_calibration_error([0, 1, 1], [0, 0, 1], probabilities)
    assert error == pytest.approx(2 / 3 * abs(0.5 - 0.9) + 1 / 3 * abs(1 - 0.6))


def test_a_confidence_on_the_border_of_two_bins_is_in_the_lower_one() -> None:
    # Four bins: (0, 0.25], (0.25, 0.5], (0.5, 0.75], (0.75, 1].
    probabilities = np.array([[0.5, 0.5], [0.25, 0.75], [0.2, 0.8], [1.0, 0.0]])
    confidence, index = metrics.confidence_bins(probabilities, bins=4)
    assert confidence.tolist() == [0.5, 0.75, 0.8, 1.0]
    assert index.tolist() == [1, 2, 3, 3]


def test_a_calibrated_classifier_has_a_small_calibration_error_and_a_boastful_one_a_large() -> None:
    rng = np.random.default_rng(1)
    confidence = rng.uniform(0.5, 1, 20_000)
    probabilities = np.stack([confidence, 1 - confidence], 1)
    label = (rng.random(20_000) > confidence).astype(int)
    assert metrics.expected_calibration_error(label, np.zeros(20_000), probabilities) < 0.02
    sure = np.tile([0.999, 0.001], (20_000, 1))
    assert metrics.expected_calibration_error(label, np.zeros(20_000), sure) == pytest.approx(0.249, abs=0.01)


@examples
@given(SEEDS, st.integers(1, 40), st.integers(2, 6))
def test_recall_equals_scikit_learn_and_is_not_measured_for_absent_classes(seed: int, n: int, classes: int) -> None:
    rng = np.random.default_rng(seed)
    label, predicted = rng.integers(0, classes, n), rng.integers(0, classes, n)
    expected = sklearn.recall_score(label, predicted, labels=range(classes), average=None, zero_division=np.nan)
    np.testing.assert_allclose(metrics.recall(label, predicted, classes), expected)


def test_labels_and_predictions_of_different_length_are_rejected() -> None:
    with pytest.raises(ShapeError, match=r"got \[2\] and \[3\]"):
        metrics.accuracy([0, 1], [0, 1, 1])


def test_reliability_curve_by_hand_and_its_weighted_gap_is_the_calibration_error() -> None:
    probabilities = np.array([[0.9, 0.1], [0.9, 0.1], [0.4, 0.6]])
    label, predicted = [0, 1, 1], [0, 0, 1]
    said, right, counts = metrics.reliability(label, predicted, probabilities)
    used = counts > 0
    assert said[used].tolist() == pytest.approx([0.6, 0.9])
    assert right[used].tolist() == pytest.approx([1.0, 0.5])
    assert np.isnan(said[~used]).all()
    gap = np.abs(said - right)[used] @ counts[used] / counts.sum()
    assert gap == pytest.approx(metrics.expected_calibration_error(label, predicted, probabilities))
