"""The two result files: written, read back and summarized; damaged files are rejected."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from sklearn import metrics as sklearn

from medtokenbudget import measures
from medtokenbudget.errors import RequestError
from medtokenbudget.runs import run
from tests.runs import simulate


def test_predictions_come_back_as_written_and_twice_the_same_bytes(tmp_path: Path) -> None:
    frame = simulate.sweep({"lats": {}, "tome": {"merger": True}}, (42, 43), (0.1, 0.3), n=12)
    frame.loc[3, "group"] = None
    for name in ("one", "two"):
        run.write_predictions(tmp_path / name, frame, simulate.CLASSES)
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()
    back, classes = run.read_predictions(tmp_path / "one")
    assert classes == simulate.CLASSES
    assert tuple(back.columns) == run.PREDICTION_COLUMNS
    assert back["lesion"].isna().sum() == frame["lesion"].isna().sum() > 0
    assert back["kept_lesion"].sum() == frame["kept_lesion"].sum()
    assert back["group"].isna().tolist() == frame["group"].isna().tolist()
    np.testing.assert_array_equal(measures.probability_matrix(back), measures.probability_matrix(frame))
    pd.testing.assert_frame_equal(run.summarize(back, classes), run.summarize(frame, classes), check_dtype=False)


def test_summary_has_a_row_for_each_cell_and_equals_scikit_learn() -> None:
    frame = simulate.sweep({"lats": {"skill": 0.9}, "tome": {"merger": True}}, (42, 43), (0.1, 0.3))
    table = run.summarize(frame, simulate.CLASSES)
    assert tuple(table.columns) == run.RESULT_COLUMNS
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
    row = run.summarize(frame, simulate.CLASSES).iloc[0]
    assert (row["n"], row["n_masked"]) == (19, 15)


def test_results_are_read_back_with_empty_fields_for_what_was_not_measured(tmp_path: Path) -> None:
    table = run.summarize(simulate.sweep({"tome": {"merger": True}}, (42,), (0.1,)), simulate.CLASSES)
    run.write_results(tmp_path / "results.csv", table)
    header, line = (tmp_path / "results.csv").read_text().splitlines()
    assert header == (
        "study,dataset,view,method,seed,budget,k,n,n_masked,accuracy,macro_f1,balanced_accuracy,retention,retention_mean,"
        "retention_of_ceiling,precision,enrichment,ceiling,macro_auroc,ece,purity,lesion_dominated,lesion_mass"
    )
    assert ",,,,," in line
    pd.testing.assert_frame_equal(run.read_results(tmp_path / "results.csv"), table, check_dtype=False, rtol=1e-8)


def test_damaged_and_foreign_files_are_refused_with_advice(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="does not exist"):
        run.read_predictions(tmp_path / "none.parquet")
    (tmp_path / "bad.parquet").write_bytes(b"not parquet")
    with pytest.raises(RequestError, match="not a readable Parquet"):
        run.read_predictions(tmp_path / "bad.parquet")
    pd.DataFrame({"a": [1]}).to_parquet(tmp_path / "other.parquet")
    with pytest.raises(RequestError, match="another version wrote it"):
        run.read_predictions(tmp_path / "other.parquet")
    (tmp_path / "bad.csv").write_text("a,b\n1,2\n")
    with pytest.raises(RequestError, match="another version wrote it"):
        run.read_results(tmp_path / "bad.csv")
    with pytest.raises(RequestError, match="lack the columns"):
        run.write_predictions(tmp_path / "x.parquet", pd.DataFrame({"study": []}), ("A",))


def test_a_cell_of_mixed_k_is_refused() -> None:
    frame = simulate.cell(np.random.default_rng(0), n=4)
    frame.loc[0, "k"] = 5
    with pytest.raises(RequestError, match="different numbers of patches"):
        run.summarize(frame, simulate.CLASSES)
