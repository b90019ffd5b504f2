"""One table per study: robustness over seeds, off-center views and the ablations, all with the controls beside them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from medtokenbudget.config import HEADLINE_BUDGETS
from medtokenbudget.reporting.cells import BOLD_NOTE, METRIC_NAMES, best, counts, mean_text, seeds_note
from medtokenbudget.reporting.evidence import AS_IS, OFF_CENTER, VIEW_NAMES, Evidence
from medtokenbudget.reporting.looks import PAPER_RECIPE, look
from medtokenbudget.reporting.numbers import NOT_MEASURED, budget_text, is_missing, percent, points
from medtokenbudget.reporting.sweep_tables import over_budgets
from medtokenbudget.reporting.table import Table
from medtokenbudget.runs.statistics import paired_seed_table

SHOWN = ("accuracy", "macro_f1", "balanced_accuracy", "retention", "retention_of_ceiling")
_RECIPE = (("retention_of_ceiling", ()), ("macro_f1", (0.3,)), ("balanced_accuracy", (0.3,)))
"""Measures of the recipe table with their budgets; () means all that were run."""
_SHORT = {"retention_of_ceiling": "Ceil.", "macro_f1": "F1", "balanced_accuracy": "Bal."}
_TITLES = {
    "robustness": "Robustness over seeds",
    "mask-free": "Training without lesion masks",
    "signals": "Single signals as selectors",
    "toggles": "Signals switched off at inference",
    "epochs": "Baselines trained for as many epochs as LATS",
}


def by_budget(evidence: Evidence, study: str, metrics: Sequence[str] = SHOWN) -> Table | None:
    """Mean and deviation over seeds with one row per budget and method, like the paper's robustness table."""
    results = evidence.cells(study, AS_IS)
    if results.empty:
        return None
    methods = evidence.with_controls(results["method"])
    rows: list[list[str]] = []
    raw: list[dict[str, object]] = []
    bold: set[tuple[int, int]] = set()
    breaks: set[int] = set()
    for budget in sorted(results["budget"].unique()):
        shown = budget in _headline_budgets(results)
        cells = results[np.isclose(results["budget"], budget)]
        stats = cells.groupby("method")[list(metrics)].agg(["mean", "std"])
        values: dict[tuple[str, int], float] = {}
        start = len(rows)
        breaks |= {start} if shown else set()
        for method in methods:
            pairs = [(_get(stats, method, (m, "mean")), _get(stats, method, (m, "std"))) for m in metrics]
            seeds = int((cells["method"] == method).sum())
            entry: dict[str, object] = {"budget": budget, "method": method, "seeds": seeds}
            for metric, (mean, deviation) in zip(metrics, pairs):
                entry |= {metric: mean, f"{metric}_sd": deviation}
            raw.append(entry)
            if not shown:
                continue
            texts = [mean_text(m, *pair) for m, pair in zip(metrics, pairs)]
            rows.append(
                [f"{budget_text(budget)}", look(method).name, *texts, counts(cells, method), str(seeds) if seeds else NOT_MEASURED]
            )
            values |= {(method, c): pair[0] for c, pair in enumerate(pairs, 2)}
        if shown:
            bold |= {(start + r, c) for r, c in best(methods, values, range(2, 2 + len(metrics)))}
    return Table(
        study,
        _TITLES.get(study, f"Study “{study}”"),
        ["Budget", "Method", *[METRIC_NAMES[m] for m in metrics], "n (masks)", "Seeds"],
        rows,
        pd.DataFrame(raw),
        "Mean ± standard deviation over seeds, which is the spread between training runs and not between images; a single seed has "
        f"no deviation. {BOLD_NOTE} {NOT_MEASURED}: not measured.",
        labels=2,
        bold=frozenset(bold),
        breaks=frozenset(breaks - {0}),
        more="all budgets",
    )


def center_bias(evidence: Evidence) -> Table | None:
    """Share of the ceiling on the images as they are and on off-center views, one row per method."""
    study = evidence.off_center_study
    if study is None:
        return None
    results = evidence.cells(study)
    wanted = [("retention_of_ceiling", view, b) for view in (AS_IS, OFF_CENTER) for b in _headline_budgets(results)]
    return _by_view(
        evidence,
        results,
        wanted,
        "center-bias",
        "Share of the ceiling (%), original images and off-center views",
        "As is: original images. Off: views with the lesion away from the center. The number is the token budget.",
    )


def recipe(evidence: Evidence) -> Table | None:
    """One row per change to the lesion-first recipe."""
    results = evidence.cells("recipe")
    if results.empty:
        return None
    budgets = _headline_budgets(results)
    views = [view for view in (AS_IS, OFF_CENTER) if view in set(results["view"])]
    wanted = [(m, view, b) for m, only in _RECIPE for view in views for b in (only or budgets) if b in budgets]
    return _by_view(
        evidence,
        results,
        wanted,
        "recipe",
        "The lesion-first recipe with one part changed at a time",
        "Ceil.: share of the ceiling (%). F1: macro F1 (%). Bal.: balanced accuracy (%). As is: original images. Off: off-center "
        "views. The number is the token budget.",
    )


def _by_view(
    evidence: Evidence, results: pd.DataFrame, wanted: list[tuple[str, str, float]], name: str, title: str, note: str
) -> Table:
    """One row per method, one column per (metric, view, budget) of `wanted`; the CSV has every measure of these cells."""
    methods = evidence.with_controls(results["method"])
    means = results.groupby(["method", "view", "budget"])[list(SHOWN)].mean()
    values = {
        (method, c): float(means[metric].get((method, view, budget), np.nan))
        for method in methods
        for c, (metric, view, budget) in enumerate(wanted, 1)
    }
    several = len({metric for metric, _, _ in wanted}) > 1
    heads = [
        f"{_SHORT[metric] + ' ' if several else ''}{'off' if view == OFF_CENTER else 'as is'} {budget_text(budget)}"
        for metric, view, budget in wanted
    ]
    columns = range(1, len(wanted) + 1)
    keys = ["view", "budget", "method", "metric"]
    long = results.melt(id_vars=keys[:3], value_vars=list(SHOWN), var_name="metric")
    views = list(dict.fromkeys(view for _, view, _ in wanted))
    return Table(
        name,
        title,
        ["Method", *heads, *[f"n (masks) {VIEW_NAMES[view]}" for view in views]],
        [
            [
                look(m).name,
                *[percent(values[m, c]) for c in columns],
                *[counts(results[results["view"] == view], m) for view in views],
            ]
            for m in methods
        ],
        long.groupby(keys, sort=False)["value"].agg(value="mean", sd="std", seeds="count").reset_index(),
        f"{note} {seeds_note(results)} {BOLD_NOTE}",
        bold=best(methods, values, columns),
        more="accuracy, macro F1 and retention of both views too",
    )


def _headline_budgets(results: pd.DataFrame) -> list[float]:
    measured = set(results["budget"])
    return [b for b in HEADLINE_BUDGETS if b in measured] or sorted(measured)[:3]


def curriculum(evidence: Evidence) -> Table | None:
    """Accuracy over budgets of LATS trained with the curriculum and at a fixed budget."""
    title = "Curriculum against a fixed training budget: accuracy (%)"
    return over_budgets(evidence, evidence.cells("curriculum", AS_IS), "accuracy", "curriculum", title)


def kvasir(evidence: Evidence) -> Table | None:
    """The auxiliary sweep on endoscopic images, which have no masks."""
    return over_budgets(evidence, evidence.cells("kvasir", AS_IS), "accuracy", "kvasir", "Kvasir v2: accuracy (%) over all budgets")


def paired_seeds(evidence: Evidence) -> list[Table | None]:
    """The study's main method, and the paper's recipe beside it, minus each other method seed by seed, in percentage points."""
    results = evidence.cells("robustness", AS_IS)
    if results.empty:
        return []
    methods = evidence.ordered(results["method"])
    main = evidence.focus_of(methods)
    made = [_paired_seeds(evidence, results, main, "paired-seeds")]
    if PAPER_RECIPE in methods and main != PAPER_RECIPE:
        made.append(_paired_seeds(evidence, results, PAPER_RECIPE, "paired-seeds-paper"))
    return made


def _paired_seeds(evidence: Evidence, results: pd.DataFrame, reference: str, file: str) -> Table | None:
    metrics = ("accuracy", "macro_f1", "retention")
    found = paired_seed_table(results, reference, metrics)
    if found.empty:
        return None
    cells = found.set_index(["budget", "method_b", "metric"])
    others = [m for m in evidence.with_controls(results["method"]) if m != reference]
    rows = []
    for budget in sorted(found["budget"].unique()):
        for method in others:
            keys = [(budget, method, m) for m in metrics]
            texts = [_gap_text(cells.loc[k, "mean"], cells.loc[k, "std"]) if k in cells.index else NOT_MEASURED for k in keys]
            seeds = next((str(cells.loc[k, "seeds"]) for k in keys if k in cells.index), NOT_MEASURED)
            rows.append([f"{budget_text(budget)}", look(method).name, *texts, seeds])
    name = look(reference).name
    return Table(
        file,
        f"{name} minus each other method, seed by seed (percentage points)",
        ["Budget", f"{name} minus", "Δ accuracy", "Δ macro F1", "Δ retention", "Seeds"],
        rows,
        found,
        "Mean of the differences between runs with the same seed, ± their standard deviation; n (masks) = "
        f"{counts(results, reference)}. {NOT_MEASURED}: not measured on the same images. ToMe merges patches and has no retention.",
        labels=2,
        breaks=frozenset(range(len(others), len(rows), len(others))),
    )


def _get(table: pd.DataFrame, method: str, column: tuple[str, str]) -> float:
    value: Any = table.loc[method, column] if method in table.index else np.nan
    return float(value)


def _gap_text(mean: Any, deviation: Any) -> str:
    text = points(mean, 2)
    return text if text == NOT_MEASURED or is_missing(deviation) else f"{text} ± {percent(deviation, 2)}"
