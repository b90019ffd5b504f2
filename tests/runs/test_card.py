"""The model card: every section is there, and its numbers are those of the run's own tables."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from medtokenbudget.config import NOTICE, LossWeights, preset
from medtokenbudget.data.readers import ISIC_CLASSES as CLASSES
from medtokenbudget.runs.card import card_text
from medtokenbudget.runs.run import Run
from tests.reporting.fake_run import fake_run

BACKBONE = {
    "name": "embedded",
    "weights": "a" * 64,
    "layer": 5,
    "attention": "true",
    "grid": [16, 16],
    "dim": 192,
    "image_size": 224,
}
PART = {"classes": {"NV": 80, "MEL": 16}, "masked_classes": {}, "lesion_patches": None}
COUNTS = {
    "crossing": {"images": 3, "groups": 2},
    "train": {"images": 96, "masks": 40, **PART},
    "val": {"images": 24, "masks": 24, **PART},
}


def model(**changes: Any) -> Any:
    """What a card asks a model."""
    facts = {
        "main": "lats:lesion-first",
        "selectors": ["lats:lesion-first", "center", "lats"],
        "classes": CLASSES,
        "backbone_fingerprint": BACKBONE,
        "fingerprint": "f" * 64,
        "train_config": preset("lesion-first"),
    }
    return SimpleNamespace(**{**facts, **changes})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fake_run(tmp_path_factory.mktemp("card"), studies=("main", "center-bias"), images=False)


@pytest.fixture
def run(folder: Path) -> Run:
    opened = Run(folder)
    opened.counts = COUNTS
    return opened


@pytest.fixture
def card(run: Run) -> str:
    return card_text(run, model())


def test_odd_class_names_leave_the_tables_of_a_card_whole(run: Run) -> None:
    odd = ["a|b", "c\nd", "<b>e</b>", "f\r|\n|g", *CLASSES[4:]]
    run.counts = {"val": {**COUNTS["val"], "classes": dict.fromkeys(odd, 3)}}
    card = card_text(run, model(classes=odd))
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
    assert NOTICE in card.splitlines()[8]
    for fact in ("a" * 64, "f" * 64, "2" * 64, "40 from the training part were used", "torch 2.0"):
        assert fact in card, fact


def test_the_numbers_are_those_of_the_results(card: str, run: Run) -> None:
    results = run.results
    rows = results[(results["study"] == "main") & (results["method"] == "lats:lesion-first") & (results["seed"] == 42)].set_index(
        "budget"
    )
    for budget in (0.1, 0.3, 0.5):
        cells = [cell.strip() for cell in _line(card, f"| {budget:g} | 24 |").split("|")]
        assert cells[3].startswith(f"{100 * rows.loc[budget, 'accuracy']:.1f} [")
        assert cells[7].startswith(f"{100 * rows.loc[budget, 'retention']:.1f} [")
        for cell in (cell for cell in cells if "[" in cell):
            value, low, high = map(float, re.findall(r"[\d.]+", cell))
            assert low <= value <= high
    beside = _line(card, "| `center` | 24 (24) |")
    assert _line(card, "| `lats` | 24 (24) |")
    center = results[(results["method"] == "center") & (results["seed"] == 42) & (results["budget"] == 0.3)].iloc[0]
    assert f"{100 * center['retention']:.1f}%" in beside


def test_recall_is_counted_from_the_predictions(card: str, run: Run) -> None:
    frame = run.predictions
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


def test_point_values_come_from_results_csv(run: Run) -> None:
    results = run.results
    cell = (results["method"] == "lats:lesion-first") & (results["budget"] == 0.3) & (results["seed"] == 42)
    results.loc[cell, "accuracy"] = 0.12345
    card = card_text(run, model())
    assert "| 12.3 [" in _line(card, "| 0.3 | 24 |")
    assert "| 12.3% |" in _line(card, "| `lats:lesion-first` |")


def test_what_was_not_measured_is_said_to_be_so(run: Run) -> None:
    run.counts, run.results, run.predictions = {}, run.results.iloc[:0], run.predictions.iloc[:0]
    card = card_text(run, model(train_config=preset("paper", losses=LossWeights(lesion=0.0))))
    assert card.count("Not measured.") == 4
    assert "none were used in training" in card
    assert "unknown, because the manifest is no longer where the run found it" in card


def _line(card: str, start: str) -> str:
    return next(line for line in card.splitlines() if line.startswith(start))
