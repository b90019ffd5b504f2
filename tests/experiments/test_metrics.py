"""Metrics against scikit-learn and against values worked by hand; the two result files written and read back."""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn import metrics as sklearn

from medtokenbudget.errors import RequestError
from medtokenbudget.experiments import metrics, results
from tests.experiments import simulate


@settings(max_examples=60, deadline=None)
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


def test_a_calibrated_classifier_has_a_small_calibration_error_and_a_boastful_one_a_large() -> None:
    rng = np.random.default_rng(1)
    confidence = rng.uniform(0.5, 1, 20_000)
    probabilities = np.stack([confidence, 1 - confidence], 1)
    label = (rng.random(20_000) > confidence).astype(int)
    assert metrics.expected_calibration_error(label, np.zeros(20_000), probabilities) < 0.02
    sure = np.tile([0.999, 0.001], (20_000, 1))
    assert metrics.expected_calibration_error(label, np.zeros(20_000), sure) == pytest.approx(0.249, abs=0.01)


def test_retention_three_ways_by_hand() -> None:
    # Lesions of 10, 100 and 0 patches, 50 kept of 256; 8, 40 and 0 lesion patches kept. The third is left out and counted.
    found = metrics.lesion_retention([8, 40, 0], [10, 100, 0], 50, 256)
    assert found.pooled == pytest.approx(48 / 110)
    assert found.mean == pytest.approx((0.8 + 0.4) / 2)
    assert found.ceiling == pytest.approx(60 / 110)
    assert found.of_ceiling == pytest.approx(48 / 60)
    assert found.precision == pytest.approx(48 / 100)
    assert found.enrichment == pytest.approx((48 / 100) / (110 / 512))
    assert (found.n, found.empty) == (2, 1)


def test_without_kept_patches_only_the_ceiling_is_measured() -> None:
    found = metrics.lesion_retention(None, [10, 100], 50, 256)
    assert found.ceiling == pytest.approx(60 / 110)
    assert np.isnan([found.pooled, found.mean, found.of_ceiling, found.precision, found.enrichment]).all()


def test_nothing_measured_is_not_zero() -> None:
    found = metrics.lesion_retention([], [], 50, 256)
    assert np.isnan([found.pooled, found.mean, found.ceiling, found.precision]).all()
    assert np.isnan(metrics.accuracy([], []))
    assert np.isnan(metrics.macro_f1([], [], 3))


def test_predictions_come_back_as_written_and_twice_the_same_bytes(tmp_path: Path) -> None:
    frame = simulate.sweep({"lats": {}, "tome": {"merger": True}}, (42, 43), (0.1, 0.3), n=12)
    frame.loc[3, "group"] = None
    for name in ("one", "two"):
        results.write_predictions(tmp_path / name, frame, simulate.CLASSES)
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()
    back, classes = results.read_predictions(tmp_path / "one")
    assert classes == simulate.CLASSES
    assert tuple(back.columns) == results.PREDICTION_COLUMNS
    assert back["lesion"].isna().sum() == frame["lesion"].isna().sum() > 0
    assert back["kept_lesion"].sum() == frame["kept_lesion"].sum()
    assert back["group"].isna().tolist() == frame["group"].isna().tolist()
    np.testing.assert_array_equal(results.probability_matrix(back), results.probability_matrix(frame))
    pd.testing.assert_frame_equal(results.summarise(back, classes), results.summarise(frame, classes), check_dtype=False)


def test_summary_has_a_row_for_each_cell_and_equals_scikit_learn() -> None:
    frame = simulate.sweep({"lats": {"skill": 0.9}, "tome": {"merger": True}}, (42, 43), (0.1, 0.3))
    table = results.summarise(frame, simulate.CLASSES)
    assert tuple(table.columns) == results.RESULT_COLUMNS
    assert len(table) == 8
    row = table.query("method == 'lats' and seed == 43 and budget == 0.3").iloc[0]
    part = frame.query("method == 'lats' and seed == 43 and budget == 0.3")
    assert row["macro_f1"] == pytest.approx(sklearn.f1_score(part["label"], part["predicted"], average="macro"))
    assert (row["n"], row["n_masked"], row["k"]) == (60, 48, 76)
    masked = part.dropna(subset="lesion")
    assert row["retention"] == pytest.approx(masked["kept_lesion"].sum() / masked["lesion"].sum())
    merged = table[table["method"] == "tome"]
    assert merged["retention"].isna().all()
    np.testing.assert_allclose(merged["purity"], 0.9)
    assert table[table["method"] == "lats"]["purity"].isna().all()


def test_unlabelled_images_and_empty_masks_are_left_out_and_counted() -> None:
    frame = simulate.cell(np.random.default_rng(0), n=20)
    frame.loc[0, "label"] = -1
    frame.loc[1, ["lesion", "kept_lesion"]] = 0
    row = results.summarise(frame, simulate.CLASSES).iloc[0]
    assert (row["n"], row["n_masked"]) == (19, 15)
    assert results.empty_masks(frame).iloc[0].tolist() == ["main", "made-up", 16, 1]


def test_results_are_read_back_with_empty_fields_for_what_was_not_measured(tmp_path: Path) -> None:
    table = results.summarise(simulate.sweep({"tome": {"merger": True}}, (42,), (0.1,)), simulate.CLASSES)
    results.write_results(tmp_path / "results.csv", table)
    header, line = (tmp_path / "results.csv").read_text().splitlines()
    assert header == (
        "study,dataset,method,seed,budget,k,n,n_masked,accuracy,macro_f1,balanced_accuracy,retention,retention_mean,"
        "retention_of_ceiling,precision,enrichment,ceiling,macro_auroc,ece,purity"
    )
    assert ",,,,," in line
    pd.testing.assert_frame_equal(results.read_results(tmp_path / "results.csv"), table, check_dtype=False, rtol=1e-8)


def test_damaged_and_foreign_files_are_refused_with_advice(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="does not exist"):
        results.read_predictions(tmp_path / "none.parquet")
    (tmp_path / "bad.parquet").write_bytes(b"not parquet")
    with pytest.raises(RequestError, match="not a readable Parquet"):
        results.read_predictions(tmp_path / "bad.parquet")
    pd.DataFrame({"a": [1]}).to_parquet(tmp_path / "other.parquet")
    with pytest.raises(RequestError, match="not a predictions file"):
        results.read_predictions(tmp_path / "other.parquet")
    (tmp_path / "bad.csv").write_text("a,b\n1,2\n")
    with pytest.raises(RequestError, match="not a results file"):
        results.read_results(tmp_path / "bad.csv")
    with pytest.raises(RequestError, match="lack the columns"):
        results.write_predictions(tmp_path / "x.parquet", pd.DataFrame({"study": []}), ("A",))


def test_a_cell_of_mixed_k_is_refused() -> None:
    frame = simulate.cell(np.random.default_rng(0), n=4)
    frame.loc[0, "k"] = 5
    with pytest.raises(RequestError, match="several k"):
        results.summarise(frame, simulate.CLASSES)
