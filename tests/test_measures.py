"""The list of metrics: every column of `results.csv` has its entry, and what a report shows can be computed."""

from __future__ import annotations

import numpy as np

from medtokenbudget.measures import (
    GLOSSARY,
    METRICS,
    budget_text,
    percent,
    points,
    probability,
    shown_in,
    with_interval,
    with_spread,
)
from medtokenbudget.runs.run import RESULT_COLUMNS
from medtokenbudget.runs.statistics import STATISTICS


def test_every_column_of_the_results_has_one_entry_with_a_unique_name() -> None:
    assert RESULT_COLUMNS[-len(METRICS) :] == tuple(METRICS)
    for names in ([m.title for m in METRICS.values()], [m.term for m in METRICS.values()]):
        assert len(set(names)) == len(names)


def test_every_metric_is_explained_in_the_glossary() -> None:
    for metric in METRICS.values():
        assert GLOSSARY[metric.term] == metric.definition
        assert metric.definition.endswith(".")


def test_what_is_shown_with_intervals_or_tests_has_them() -> None:
    assert set(shown_in("interval")) | set(shown_in("test")) <= set(STATISTICS)
    assert all(METRICS[name].axis for name in shown_in("sweep")), "its curve needs a label"


def test_a_heading_has_its_unit() -> None:
    assert METRICS["accuracy"].heading == "Accuracy (%)"
    assert METRICS["enrichment"].heading == "Enrichment (×)"


def test_not_measured_is_a_dash_and_zero_is_zero() -> None:
    assert percent(np.nan) == percent(None) == "—"
    assert percent(0.0) == "0.0"
    assert points(-0.0123) == "−1.2"
    assert points(0.0) == points(-0.0001) == "0.0"
    assert with_interval(0.674, 0.65, 0.698) == "67.4 [65.0, 69.8]"
    assert with_spread("80.38", percent(np.nan)) == "80.38"
    assert METRICS["enrichment"].text(1.571, 0.98) == "1.57 ± 0.98"
    assert probability(0.0001) == "< 0.001"
    assert [budget_text(value) for value in (0.3, 1.0, 0.25)] == ["0.3", "1.0", "0.25"]
