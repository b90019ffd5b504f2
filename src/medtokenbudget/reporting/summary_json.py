"""The headline and the comparisons of a report as plain numbers, for scripts (`mtb report --json`)."""

from __future__ import annotations

from typing import Any

import pandas as pd

from medtokenbudget.reporting.analysis_tables import all_tests
from medtokenbudget.reporting.comparison import PAIR_COLUMNS, Comparison, NamedRun
from medtokenbudget.reporting.evidence import Evidence
from medtokenbudget.reporting.intervals import CURVE_METRICS, Intervals
from medtokenbudget.reporting.numbers import is_missing


def of_run(evidence: Evidence, intervals: Intervals) -> dict[str, Any]:
    """`runs` with the headline of one run, and `comparisons` of its leading methods with the others."""
    run = NamedRun(evidence.run.resolve().name, evidence, intervals)
    tests = all_tests(evidence, intervals).rename(columns={"method_a": "method", "method_b": "minus_method"})
    return {
        "runs": [_headline(run, evidence.headline)],
        "comparisons": _rows(tests.assign(run=run.name, minus_run=run.name)),
        "notes": [],
    }


def of_comparison(comparison: Comparison) -> dict[str, Any]:
    """`runs` with the headline of each run, `comparisons` with the first one, and `notes` on what cannot be compared."""
    pairs = _rows(comparison.pairs)
    return {
        "runs": [_headline(run, comparison.budget_of(run)) for run in comparison.runs],
        "comparisons": pairs,
        "notes": list(comparison.notes),
    }


def _headline(run: NamedRun, budget: float) -> dict[str, Any]:
    evidence = run.evidence
    methods: dict[str, Any] = {}
    for metric in CURVE_METRICS:
        for method, row in run.intervals.at(metric, budget).iterrows():
            found = {name: _plain(name, row[name]) for name in ("value", "low", "high", "n")}
            methods.setdefault(str(method), {})[metric] = found
    return {
        "name": run.name,
        "path": str(evidence.run),
        "dataset": evidence.dataset,
        "main": evidence.info.main,
        "study": evidence.study,
        "budget": budget,
        "seeds": evidence.seeds,
        "n": evidence.n,
        "n_masked": evidence.n_masked,
        "methods": {method: methods[method] for method in evidence.ordered(methods)},
    }


def _rows(tests: pd.DataFrame) -> list[dict[str, Any]]:
    return [{name: _plain(name, row[name]) for name in PAIR_COLUMNS} for row in tests.to_dict("records")]


def _plain(name: str, value: Any) -> Any:
    """A JSON value: None for what was not measured, counts as integers."""
    if isinstance(value, str):
        return value
    if is_missing(value):
        return None
    return int(value) if name in ("n", "groups", "seeds") else float(value)
