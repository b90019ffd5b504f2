"""The tables of a comparison: those of a report with one row per method and run, and the paired differences."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pandas as pd

from medtokenbudget.reporting.analysis_tables import VIEW_NAMES
from medtokenbudget.reporting.cells import INTERVAL_NOTE, METRIC_NAMES, counts, plain_name
from medtokenbudget.reporting.comparison import Comparison, NamedRun, at_headline
from medtokenbudget.reporting.evidence import AS_IS, OFF_CENTER
from medtokenbudget.reporting.looks import look
from medtokenbudget.reporting.numbers import NOT_MEASURED, budget_text, number, percent, points, probability, with_interval
from medtokenbudget.reporting.sweep_tables import FURTHER, value_and_interval
from medtokenbudget.reporting.table import Table, records

_MAIN = ("accuracy", "macro_f1", "balanced_accuracy", "retention", "retention_of_ceiling")
_NOTE = "Mean over the seeds of each run."


def make_tables(comparison: Comparison) -> list[Table]:
    """Every table that the runs have numbers for."""
    made = [
        runs(comparison),
        main(comparison),
        sweep(comparison, "retention", "retention-sweep", "Lesion retention (%) at all budgets"),
        sweep(comparison, "accuracy", "accuracy-sweep", "Accuracy (%) at all budgets"),
        sweep(comparison, "macro_f1", "macro-f1-sweep", "Macro F1 (%) at all budgets"),
        further_measures(comparison),
        center_bias(comparison),
        differences(comparison),
    ]
    return [table for table in made if table is not None]


def runs(comparison: Comparison) -> Table:
    """What each run is made of."""
    rows, raw = [], []
    for run in comparison.runs:
        evidence = run.evidence
        entry = {
            "run": run.name,
            "dataset": evidence.dataset,
            "backbone": str(evidence.info.backbone.get("name", NOT_MEASURED)),
            "main": run.main,
            "methods": len(evidence.methods),
            "classes": len(evidence.classes),
            "n": evidence.n,
            "n_masked": evidence.n_masked,
            "seeds": " ".join(map(str, evidence.seeds)),
        }
        raw.append(entry)
        shown = [entry["run"], entry["dataset"], entry["backbone"], look(run.main).name, entry["methods"], entry["classes"]]
        rows.append([*map(str, shown), f"{evidence.n:,} ({evidence.n_masked:,})", ", ".join(map(str, evidence.seeds))])
    columns = ["Run", "Data set", "Backbone", "Main method", "Methods", "Classes", "n (masks)", "Seeds"]
    note = "Main method: the one that is saved as the model. n (masks): validation images, and those with a lesion mask."
    return Table("runs", "The runs", columns, rows, pd.DataFrame(raw), note, labels=4)


def main(comparison: Comparison) -> Table:
    """Every method of every run at the headline budget, with intervals."""
    rows, raw = [], []
    breaks: set[int] = set()
    for method, run in _rows(comparison, breaks):
        budget = comparison.budget_of(run)
        found = [value_and_interval(run.intervals.at(metric, budget), method) for metric in _MAIN]
        rows.append(
            [
                look(method).name,
                run.name,
                f"{budget_text(budget)}",
                *[with_interval(*c) for c in found],
                counts(run.evidence.main, method),
            ]
        )
        raw += [
            {"run": run.name, "method": method, "budget": budget, "metric": m, "value": v, "low": low, "high": high}
            for m, (v, low, high) in zip(_MAIN, found)
        ]
    columns = ["Method", "Run", "Budget", *[METRIC_NAMES[m] for m in _MAIN], "n (masks)"]
    note = f"{INTERVAL_NOTE} {_NOTE}"
    return Table("main", "All methods of all runs", columns, rows, pd.DataFrame(raw), note, labels=2, breaks=frozenset(breaks))


def sweep(comparison: Comparison, metric: str, name: str, title: str) -> Table | None:
    """One measure over all budgets, one row per method and run."""
    budgets = comparison.budgets
    values = {run.name: run.evidence.values(metric).set_index(["method", "budget"])["value"] for run in comparison.runs}
    if all(column.isna().all() for column in values.values()):
        return None
    rows, raw = [], []
    breaks: set[int] = set()
    for method, run in _rows(comparison, breaks):
        own = [float(values[run.name].get((method, b), np.nan)) for b in budgets]
        rows.append([look(method).name, run.name, *map(percent, own), counts(run.evidence.main, method)])
        raw += [{"run": run.name, "method": method, "budget": b, metric: v} for b, v in zip(budgets, own)]
    columns = ["Method", "Run", *[f"{budget_text(b)}" for b in budgets], "n (masks)"]
    note = f"Columns: token budgets. {_NOTE}"
    return Table(name, title, columns, rows, pd.DataFrame(raw), note, labels=2, breaks=frozenset(breaks))


def further_measures(comparison: Comparison) -> Table:
    """The remaining columns of results.csv at the headline budget."""
    rows, raw = [], []
    breaks: set[int] = set()
    for method, run in _rows(comparison, breaks):
        budget = comparison.budget_of(run)
        own = {m: run.evidence.at(m, budget).get(method, np.nan) for m in FURTHER}
        texts = [number(v) if m == "enrichment" else percent(v) for m, v in own.items()]
        rows.append([look(method).name, run.name, *texts, counts(run.evidence.main, method)])
        raw.append({"run": run.name, "method": method, "budget": budget} | own)
    columns = ["Method", "Run", *[METRIC_NAMES[m] for m in FURTHER], "n (masks)"]
    title = "Further measures at the headline budget"
    return Table("further-measures", title, columns, rows, pd.DataFrame(raw), _NOTE, labels=2, breaks=frozenset(breaks))


def center_bias(comparison: Comparison) -> Table | None:
    """Share of the ceiling on original images and off-center views at the headline budget."""
    having = [run for run in comparison.runs if run.evidence.off_center_study is not None]
    if not having:
        return None
    rows, raw = [], []
    breaks: set[int] = set()
    for method, run in _rows(comparison, breaks, lambda run, method: method in _off_center(comparison, run)[OFF_CENTER]):
        own = [_off_center(comparison, run)[view].get(method, np.nan) for view in (AS_IS, OFF_CENTER)]
        cells = run.evidence.cells(str(run.evidence.off_center_study), OFF_CENTER)
        rows.append([look(method).name, run.name, *map(percent, own), counts(cells, method)])
        raw.append({"run": run.name, "method": method, "as_is": own[0], "off_center": own[1]})
    columns = ["Method", "Run", "As is (%)", "Off-center (%)", "n (masks), off-center"]
    title = "Share of the ceiling, original images and off-center views"
    return Table("center-bias", title, columns, rows, pd.DataFrame(raw), _NOTE, labels=2, breaks=frozenset(breaks))


def _off_center(comparison: Comparison, run: NamedRun) -> dict[str, dict[str, float]]:
    study = run.evidence.off_center_study
    if study is None:
        return {AS_IS: {}, OFF_CENTER: {}}
    budget = comparison.budget_of(run)
    return {view: run.evidence.at("retention_of_ceiling", budget, study, view) for view in (AS_IS, OFF_CENTER)}


def differences(comparison: Comparison) -> Table | None:
    """Each run minus the first at the headline budget; the CSV has every budget and test."""
    pairs = comparison.pairs
    if pairs.empty:
        return None
    shown = at_headline(comparison, pairs)
    shown = shown[(shown["view"] == AS_IS) | (shown["metric"] == "retention")]
    shown = shown[shown["metric"].isin(("retention", "accuracy", "macro_f1"))]
    wanted = [m for m in comparison.runs[0].evidence.emphasized if m != "darkness"]
    shown = shown[shown["minus_method"].isin(wanted)]
    first, several = comparison.runs[0].name, len(comparison.runs) > 2
    rows, keys = [], []
    for t in records(shown):
        same = t.method == t.minus_method
        method = look(t.method).name if same else f"{look(t.method).name} − {look(t.minus_method).name}"
        keys.append((t.run, t.method, t.minus_method))
        row = [method, plain_name(t.metric), VIEW_NAMES[t.view], points(t.difference), f"{points(t.low)} to {points(t.high)}"]
        row += [probability(t.p), probability(t.p_holm), f"{t.n:,}", str(t.seeds)]
        rows.append([t.run, *row] if several else row)
    order = sorted(range(len(rows)), key=lambda i: (list(dict.fromkeys(keys)).index(keys[i]),))
    keys, rows = [keys[i] for i in order], [rows[i] for i in order]
    columns = ["Method", "Measure", "Images", "Difference (points)", "95% interval", "p", "p (Holm)", "n", "Seeds"]
    what = "Each run" if several else comparison.runs[1].name
    return Table(
        "differences",
        f"{what} minus {first}, on the same images",
        ["Run", *columns] if several else columns,
        rows,
        pairs,
        f"Positive: higher than {first}. Paired permutation tests on the images that both runs have; Holm's correction covers all "
        "tests of a measure in the CSV.",
        labels=4 if several else 3,
        breaks=frozenset(i for i in range(1, len(keys)) if keys[i] != keys[i - 1]),
        more="all methods, budgets and measures",
    )


def _rows(
    comparison: Comparison,
    breaks: set[int],
    wanted: Callable[[NamedRun, str], bool] = lambda run, method: method in run.evidence.methods,
) -> list[tuple[str, NamedRun]]:
    """(method, run) of every row: the runs of one method below each other; adds a rule between methods to `breaks`."""
    rows: list[tuple[str, NamedRun]] = []
    for method in comparison.methods:
        own = [(method, run) for run in comparison.runs if wanted(run, method)]
        if rows and own:
            breaks.add(len(rows))
        rows += own
    return rows
