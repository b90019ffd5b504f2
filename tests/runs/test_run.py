"""The two result files: written, read back and summarized; damaged files are rejected."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from sklearn import metrics as sklearn

from medtokenbudget import measures
from medtokenbudget.errors import RequestError
from medtokenbudget.files import write_json
from medtokenbudget.measures import METRICS
from medtokenbudget.runs import run
from tests.bad_input.damage import edit_json
from tests.reporting.fake_run import fake_run
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
    assert header.split(",") == [*["study", "dataset", "view", "method", "seed", "budget", "k", "n", "n_masked"], *METRICS]
    assert ",,," in line
    pd.testing.assert_frame_equal(run.read_results(tmp_path / "results.csv"), table, check_dtype=False, rtol=1e-8)


def test_a_cell_of_mixed_k_is_refused() -> None:
    frame = simulate.cell(np.random.default_rng(0), n=4)
    frame.loc[0, "k"] = 5
    with pytest.raises(RequestError, match="different numbers of patches"):
        run.summarize(frame, simulate.CLASSES)


def test_tables_of_other_versions_open_with_missing_columns_empty_and_unknown_ones_kept(tmp_path: Path) -> None:
    frame = simulate.sweep({"lats": {}}, (42,), (0.3,), n=12)
    run.write_predictions(tmp_path / "p.parquet", frame, simulate.CLASSES)
    table = pq.read_table(tmp_path / "p.parquet").drop_columns(["lesion_mass", "group", "kept_lesion"])
    pq.write_table(table.append_column("certainty", pa.array([0.5] * len(table))), tmp_path / "p.parquet")
    predictions, classes = run.read_predictions(tmp_path / "p.parquet")
    assert list(predictions.columns) == [*run.PREDICTION_COLUMNS, "certainty"]
    assert predictions[["lesion_mass", "group", "kept_lesion"]].isna().all(axis=None)
    results = run.summarize(predictions, classes)
    assert results["retention"].isna().all()
    run.write_results(tmp_path / "r.csv", results.drop(columns=["ece", "purity"]).assign(speed=2.0))
    again = run.read_results(tmp_path / "r.csv")
    assert list(again.columns) == [*run.RESULT_COLUMNS, "speed"]
    assert again["ece"].isna().all()
    assert again["accuracy"].to_numpy() == pytest.approx(results["accuracy"].to_numpy())


def test_a_later_fact_is_left_out_and_another_format_rejected_with_the_command_to_run_again(tmp_path: Path) -> None:
    folder = fake_run(tmp_path / "run", studies=("main",), images=False)
    edit_json(folder / "run.json", lambda facts: facts.update(surprise=1))
    assert run.Run(folder).main == "lats:lesion-first", "a fact that a later version added is left out"
    write_json(folder / "run.json", {"dataset": "old", "command": "mtb train m.parquet --store s --out r"})
    with pytest.raises(RequestError, match=r"run format version 1; this version reads 3. Run `mtb train m.parquet .*` again with"):
        run.Run(folder)


def test_a_recorded_command_names_only_the_last_part_of_paths_elsewhere(tmp_path: Path) -> None:
    folder = fake_run(tmp_path / "run", studies=("main",), images=False)
    run.Run(folder).record_command("sweep", ["/home/me/photos.parquet", "--store=../tokens", "--lr", "0.1"])
    assert run.Run(folder).command == "mtb sweep photos.parquet --store=tokens --lr 0.1"
