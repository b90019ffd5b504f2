"""Tables of the headline study: every method at the main budgets, one measure over all budgets, and further measures."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from medtokenbudget.reporting.cells import BOLD_NOTE, INTERVAL_NOTE, METRIC_NAMES, best, counts, seeds_note
from medtokenbudget.reporting.evidence import Evidence
from medtokenbudget.reporting.intervals import Intervals
from medtokenbudget.reporting.looks import look
from medtokenbudget.reporting.numbers import NOT_MEASURED, budget_text, number, percent, with_interval
from medtokenbudget.reporting.table import Table
from medtokenbudget.runs.paper import MAIN_BUDGETS

FURTHER = (
    "balanced_accuracy",
    "macro_auroc",
    "ece",
    "retention_mean",
    "precision",
    "enrichment",
    "purity",
    "lesion_dominated",
    "lesion_mass",
)


def main(evidence: Evidence, intervals: Intervals) -> Table:
    """Accuracy at the main budgets; macro F1, retention and its share of the ceiling at the headline budget."""
    budgets = [b for b in MAIN_BUDGETS if b in evidence.budgets] or evidence.budgets[:5]
    methods = evidence.with_controls(evidence.methods)
    at = f"at {budget_text(evidence.headline)}"
    columns = ["Method", *[f"Acc. at {budget_text(b)}" for b in budgets], f"F1 {at}", f"Ret. {at}", f"Of ceiling {at}", "n (masks)"]
    wanted = [("accuracy", b) for b in budgets]
    wanted += [(m, evidence.headline) for m in ("macro_f1", "retention", "retention_of_ceiling")]
    tables = {key: intervals.at(*key) for key in wanted}
    rows, raw = [], []
    for method in methods:
        cells = [value_and_interval(tables[key], method) for key in wanted]
        rows.append([look(method).name, *[with_interval(*cell) for cell in cells], counts(evidence.main, method)])
        for (metric, budget), (value, low, high) in zip(wanted, cells):
            raw.append({"method": method, "budget": budget, "metric": metric, "value": value, "low": low, "high": high})
    values = {(m, c): value_and_interval(tables[key], m)[0] for m in methods for c, key in enumerate(wanted, 1)}
    return Table(
        "main",
        "Accuracy and lesion retention (%) by method and token budget",
        columns,
        rows,
        pd.DataFrame(raw),
        f"{INTERVAL_NOTE} {seeds_note(evidence.main)} Ret.: share of lesion patches kept, pooled over images. Of ceiling: the same "
        f"as a share of what any selector could keep. {BOLD_NOTE} {NOT_MEASURED}: not measured.",
        bold=best(methods, values, range(1, len(wanted) + 1)),
    )


def sweep(evidence: Evidence, metric: str, name: str, title: str) -> Table | None:
    """One measure over all budgets of the headline study."""
    return over_budgets(evidence, evidence.main, metric, name, title)


def over_budgets(evidence: Evidence, results: pd.DataFrame, metric: str, name: str, title: str) -> Table | None:
    """One measure of `results` with one row per method and one column per budget."""
    if results.empty or results[metric].isna().all():
        return None
    budgets = sorted(results["budget"].unique())
    methods = evidence.with_controls(results["method"])
    means = results.groupby(["method", "budget"])[metric].mean()
    values = {(m, c): float(means.get((m, b), np.nan)) for m in methods for c, b in enumerate(budgets, 1)}
    rows = [[look(m).name, *[percent(values[m, c]) for c in range(1, len(budgets) + 1)], counts(results, m)] for m in methods]
    raw = [{"method": m, "budget": b, metric: values[m, c]} for m in methods for c, b in enumerate(budgets, 1)]
    if metric == "retention":
        ceiling = results[results["method"] != "no-pruning"].groupby("budget")["ceiling"].mean()
        rows.append(["Ceiling", *[percent(ceiling.get(b)) for b in budgets], ""])
        raw += [{"method": "ceiling", "budget": b, metric: float(ceiling.get(b, np.nan))} for b in budgets]
    return Table(
        name,
        title,
        ["Method", *[f"{budget_text(b)}" for b in budgets], "n (masks)"],
        rows,
        pd.DataFrame(raw),
        f"Columns: token budgets. {seeds_note(results)} {BOLD_NOTE}",
        bold=best(methods, values, range(1, len(budgets) + 1)),
        breaks=frozenset({len(methods)} if metric == "retention" else ()),
    )


def further_measures(evidence: Evidence) -> Table:
    """The remaining columns of results.csv at the headline budget."""
    rows = evidence.main[np.isclose(evidence.main["budget"], evidence.headline)]
    means = rows.groupby("method")[list(FURTHER)].mean()
    methods = evidence.with_controls(means.index)
    texts = [
        [look(m).name, *[_text(c, means.loc[m, c]) if m in means.index else NOT_MEASURED for c in FURTHER], counts(rows, m)]
        for m in methods
    ]
    return Table(
        "further-measures",
        f"Further measures at budget {budget_text(evidence.headline)}",
        ["Method", *[METRIC_NAMES[c] for c in FURTHER], "n (masks)"],
        texts,
        means.reindex(methods).rename_axis("method").reset_index(),
        f"{seeds_note(rows)} AUROC: one class against the rest, averaged over classes. ECE: lower is better. Per image: retention "
        "averaged over images. Purity, dominated and mass apply to methods that merge patches; precision and enrichment to methods "
        "that keep them.",
    )


def _text(metric: str, value: Any) -> str:
    return number(value) if metric == "enrichment" else percent(value)


def value_and_interval(table: pd.DataFrame, method: str) -> tuple[float, float, float]:
    """Value, low and high of one method in a table of `Intervals.at`; NaN where it was not measured."""
    if method not in table.index:
        return (np.nan, np.nan, np.nan)
    row: Any = table.loc[method]
    return float(row["value"]), float(row["low"]), float(row["high"])
