"""The list of metrics: every column of `results.csv` has its entry, and what a report shows can be computed."""

from __future__ import annotations

from medtokenbudget.measures import GLOSSARY, METRICS, shown_in
from medtokenbudget.runs.run import RESULT_COLUMNS, summarize
from medtokenbudget.runs.statistics import STATISTICS
from tests.runs import simulate


def test_every_column_of_the_results_has_one_entry_with_a_unique_name() -> None:
    assert RESULT_COLUMNS[9:] == tuple(METRICS)
    measured = summarize(simulate.sweep({"lats": {}, "tome": {"merger": True}}, (42,), (0.3,), n=20), simulate.CLASSES)
    assert measured[list(METRICS)].notna().any().drop("lesion_mass").all(), "computed, too"
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
