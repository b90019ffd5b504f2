"""One run as the report reads it: which methods a figure shows, and differences that follow from the predictions."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from sklearn.metrics import f1_score

from medtokenbudget.data import Manifest
from medtokenbudget.reporting.intervals import MOST_DRAWN, ReportRun
from medtokenbudget.reporting.tables import new_lesions


def test_a_figure_of_many_methods_shows_the_telling_ones(read_run: ReportRun) -> None:
    few = read_run
    assert few.drawn(few.methods) == few.methods
    rows = few.main[few.main["method"] == "norm"]
    further = [
        rows.assign(method=name, retention_of_ceiling=kept, macro_f1=score)
        for name, kept, score in [
            *((f"low-{i}", 0.01, 0.01) for i in range(20)),
            ("keeps", 1.0, 0.0),
            ("classifies", 0.0, 1.0),
            ("norm+abmil", 1.0, 1.0),
            ("norm:keys", 1.0, 1.0),
        ]
    ]
    many = replace(few, results=pd.concat([few.results, *further], ignore_index=True))
    shown = many.drawn(many.methods)
    assert len(shown) == MOST_DRAWN
    assert {*many.emphasized, "oracle", "no-pruning", "keeps", "classifies"} <= set(shown)
    assert not {"norm+abmil", "norm:keys"} & set(shown)
    assert shown == [m for m in many.methods if m in shown], "in the order of the tables"


def test_a_difference_is_computed_from_the_predictions_whatever_results_csv_says(read_run: ReportRun) -> None:
    other = replace(read_run, results=read_run.results.assign(retention=0.123))
    rows = read_run.predictions
    rows = rows[(rows["study"] == "main") & (rows["view"] == "as-is") & np.isclose(rows["budget"], 0.3)]
    kept = {
        m: rows[rows["method"] == m]["kept_lesion"].sum() / rows[rows["method"] == m]["lesion"].sum() for m in ("lats", "center")
    }
    for run in (read_run, other):
        gap = run.difference("lats", "center", "retention")
        assert gap.value == pytest.approx(kept["lats"] - kept["center"], abs=1e-12)
        assert gap.low <= gap.value <= gap.high


def test_a_method_that_was_not_run_has_no_difference(read_run: ReportRun) -> None:
    assert read_run.difference("lats", "nowhere", "retention") is None


def test_classification_is_also_shown_without_the_lesions_that_were_trained_on(read_run: ReportRun) -> None:
    ids = sorted(set(read_run.main_predictions["image_id"]))
    trained = {f"t{number}": f"lesion {number}" for number in range(10)}
    shown_too = dict(zip(ids[::3], trained.values()))  # every third validation image, for as many lesions as there are
    rows = [{"image_id": name, "image": "i.png", "split": "train", "group": group} for name, group in trained.items()]
    rows += [{"image_id": name, "image": "i.png", "split": "val", "group": shown_too.get(name)} for name in ids]
    table = new_lesions(replace(read_run, manifest=Manifest.from_records(rows, [])))
    values = table.data.set_index(["method", "metric", "images"])
    images = read_run.main_predictions
    images = images[(images["method"] == "lats") & np.isclose(images["budget"], 0.3)]
    for part, chosen in (("all", images), ("new", images[~images["image_id"].isin(shown_too)])):
        scores = [f1_score(of["label"], of["predicted"], average="macro") for _, of in chosen.groupby("seed")]
        assert values.loc[("lats", "macro_f1", part), "value"] == pytest.approx(np.mean(scores))
        assert values.loc[("lats", "accuracy", part), "n"] == chosen["image_id"].nunique()
    assert new_lesions(replace(read_run, manifest=None)) is None
