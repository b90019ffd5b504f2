"""Retention by lesion size and by class, against sums worked out with plain pandas."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from medtokenbudget.errors import RequestError
from medtokenbudget.runs import strata
from tests.runs import simulate

DRAWS = 300


@pytest.fixture(scope="module")
def predictions() -> pd.DataFrame:
    return simulate.sweep({"lats": {"keep": 0.7}, "random": {"keep": 0.3}, "tome": {"merger": True}}, (42, 43), (0.1, 0.3), n=100)


def test_quartiles_hold_about_a_quarter_of_the_images_each_and_do_not_overlap(predictions: pd.DataFrame) -> None:
    table = strata.by_lesion_size(predictions, draws=DRAWS).query("method == 'lats' and budget == 0.3")
    assert tuple(table["stratum"]) == strata.QUARTILES
    assert table["n"].sum() == 80
    assert table["n"].between(17, 23).all()
    assert (table["largest"].to_numpy()[:-1] < table["smallest"].to_numpy()[1:]).all()


def test_the_numbers_of_a_stratum_are_its_sums(predictions: pd.DataFrame) -> None:
    table = strata.by_lesion_size(predictions, draws=DRAWS)
    assert tuple(table.columns) == strata.COLUMNS
    row = table.query("method == 'lats' and budget == 0.1 and stratum == 'small'").iloc[0]
    rows = predictions.query("method == 'lats' and budget == 0.1").dropna(subset="lesion")
    images = rows.drop_duplicates("image_id")["lesion"].astype(float)
    low, high = images.quantile(0.25), images.quantile(0.5)
    part = rows[(rows["lesion"] > low) & (rows["lesion"] <= high)]
    assert row["n"] == part["image_id"].nunique()
    assert row["retention"] == pytest.approx(part["kept_lesion"].sum() / part["lesion"].sum())
    best = np.minimum(part["lesion"].astype(int), 25).sum()
    assert row["ceiling"] == pytest.approx(best / part["lesion"].sum())
    assert row["retention_of_ceiling"] == pytest.approx(part["kept_lesion"].sum() / best)
    assert row["low"] <= row["retention"] <= row["high"]
    assert row["share_low"] <= row["retention_of_ceiling"] <= row["share_high"]
    assert row["seeds"] == 2


def test_the_ceiling_falls_with_lesion_size(predictions: pd.DataFrame) -> None:
    table = strata.by_lesion_size(predictions, draws=DRAWS).query("method == 'random' and budget == 0.1")
    assert (np.diff(table["ceiling"]) <= 0).all()


def test_mergers_have_no_strata(predictions: pd.DataFrame) -> None:
    assert "tome" not in set(strata.by_lesion_size(predictions, draws=DRAWS)["method"])
    only = predictions[predictions["method"] == "tome"]
    assert strata.by_lesion_size(only, draws=DRAWS).empty
    assert strata.by_class(only, simulate.CLASSES, draws=DRAWS).empty
    with pytest.raises(RequestError, match="nothing to stratify"):
        strata.quartile_edges(only)


def test_classes_are_named_and_add_up(predictions: pd.DataFrame) -> None:
    table = strata.by_class(predictions, simulate.CLASSES, draws=DRAWS).query("method == 'random' and budget == 0.3")
    assert tuple(table["stratum"]) == simulate.CLASSES
    assert table["n"].sum() == 80


def test_an_empty_mask_is_in_no_stratum(predictions: pd.DataFrame) -> None:
    changed = predictions.copy()
    changed.loc[changed["image_id"] == "image-0000", ["lesion", "kept_lesion"]] = 0
    table = strata.by_lesion_size(changed, draws=DRAWS).query("method == 'lats' and budget == 0.3")
    assert table["n"].sum() == 79
