"""The model card: every section is there, and its numbers are those of the run's own tables."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from medtokenbudget.data.readers import ISIC_CLASSES as CLASSES
from medtokenbudget.reporting.card import ModelFacts, model_card
from medtokenbudget.runs.run import RunInfo, read_predictions, read_results
from tests.reporting.fake_run import fake_run

FACTS = ModelFacts(
    main="lats:lesion-first",
    selectors=["lats:lesion-first", "center", "lats"],
    classes=CLASSES,
    backbone={
        "name": "embedded",
        "weights": "a" * 64,
        "layer": 5,
        "attention": "true",
        "grid": [16, 16],
        "dim": 192,
        "image_size": 224,
    },
    fingerprint="f" * 64,
    recipe="lesion-first",
    lesion_loss=1.0,
    split="paper; groups are not known",
)
PART = {"classes": {"NV": 80, "MEL": 16}, "masked_classes": {}, "lesion_patches": None}
COUNTS = {"train": {"images": 96, "masks": 40, **PART}, "val": {"images": 24, "masks": 24, **PART}}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fake_run(tmp_path_factory.mktemp("card"), studies=("main", "center-bias"), images=False)


@pytest.fixture(scope="module")
def card(run: Path) -> str:
    info = replace(RunInfo.read(run), counts=COUNTS)
    return model_card(FACTS, info, read_results(run / "results.csv"), read_predictions(run / "predictions.parquet")[0])


def test_odd_class_names_leave_the_tables_of_a_card_whole(run: Path) -> None:
    odd = ["a|b", "c\nd", "<b>e</b>", "f\r|\n|g", *CLASSES[4:]]
    results, predictions = read_results(run / "results.csv"), read_predictions(run / "predictions.parquet")[0]
    counts = {"val": {"images": 24, "masks": 24, "classes": dict.fromkeys(odd, 3), "masked_classes": {}, "lesion_patches": None}}
    card = model_card(replace(FACTS, classes=odd), replace(RunInfo.read(run), counts=counts), results, predictions)
    widths: list[int] = []
    for line in card.splitlines():
        cells = len(re.findall(r"(?<!\\)\|", line))  # unescaped bars
        if cells:
            assert (line[:2], line[-2:]) == ("| ", " |"), line
            assert not widths or cells == widths[-1], line
        widths = [*widths, cells] if cells else []
    assert "<b>" not in card
    assert r"a\|b" in card


def test_every_section_of_a_card_is_there_in_order(card: str) -> None:
    titles = [line.lstrip("# ") for line in card.splitlines() if line.startswith("#")]
    assert titles == [
        "MedTokenBudget on My clinic",
        "Intended use",
        "Model",
        "Data",
        "Results on the validation part",
        "Compared with the paper's recipe and the controls",
        "By class and lesion size, budget 0.3",
        "Calibration",
        "Known failures",
        "Versions and hashes",
    ]
    assert "not a medical device" in card.splitlines()[8]
    for fact in ("a" * 64, "f" * 64, "2" * 64, "40 from the training part were used", "paper; groups are not known", "torch 2.0"):
        assert fact in card, fact


def test_the_numbers_are_those_of_the_results(card: str, run: Path) -> None:
    results = read_results(run / "results.csv")
    rows = results[(results["study"] == "main") & (results["method"] == "lats:lesion-first") & (results["seed"] == 42)].set_index(
        "budget"
    )
    for budget in (0.1, 0.3, 0.5):
        cells = [cell.strip() for cell in _line(card, f"| {budget:g} | 24 |").split("|")]
        assert cells[3].startswith(f"{100 * rows.loc[budget, 'accuracy']:.1f} (")
        assert cells[7].startswith(f"{100 * rows.loc[budget, 'retention']:.1f} (")
    beside = _line(card, "| Center `center` | 24 (24) |")
    assert _line(card, "| LATS (paper) `lats` | 24 (24) |")
    center = results[(results["method"] == "center") & (results["seed"] == 42) & (results["budget"] == 0.3)].iloc[0]
    assert f"{100 * center['retention']:.1f}%" in beside


def test_each_interval_holds_its_value(card: str) -> None:
    line = _line(card, "| 0.3 | 24 |")
    for cell in line.split("|"):
        if "(" in cell:
            value, low, high = (float(part) for part in cell.replace("(", "").replace(")", "").replace("to", "").split())
            assert low <= value <= high


def test_recall_is_counted_from_the_predictions(card: str, run: Path) -> None:
    frame = read_predictions(run / "predictions.parquet")[0]
    cell = frame[
        (frame.study == "main")
        & (frame.method == "lats:lesion-first")
        & (frame["view"] == "as-is")
        & (frame.seed == 42)
        & (frame.budget == 0.3)
    ]
    for index, name in enumerate(CLASSES):
        rows = cell[cell.label == index]
        if len(rows):
            recall = sum(p == index for p in rows.predicted) / len(rows)
            assert f"| {name} | {len(rows)} | {100 * recall:.1f}% |" in card


def test_point_values_come_from_results_csv(run: Path) -> None:
    results = read_results(run / "results.csv")
    cell = (results["method"] == "lats:lesion-first") & (results["budget"] == 0.3) & (results["seed"] == 42)
    results.loc[cell, "accuracy"] = 0.12345
    card = model_card(FACTS, RunInfo.read(run), results, read_predictions(run / "predictions.parquet")[0])
    assert "| 12.3 (" in _line(card, "| 0.3 | 24 |")
    assert "| 12.3% |" in _line(card, "| LATS lesion-first `lats:lesion-first` |")


def test_what_was_not_measured_is_said_to_be_so(run: Path) -> None:
    info = replace(RunInfo.read(run), counts={})
    results, predictions = read_results(run / "results.csv").iloc[:0], read_predictions(run / "predictions.parquet")[0].iloc[:0]
    card = model_card(replace(FACTS, lesion_loss=0.0), info, results, predictions)
    assert card.count("Not measured.") == 4
    assert "none were used in training" in card


def _line(card: str, start: str) -> str:
    return next(line for line in card.splitlines() if line.startswith(start))
