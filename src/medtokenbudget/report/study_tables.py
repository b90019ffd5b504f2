"""One table a study: the main sweep, the full sweeps, robustness over seeds, and the ablations, with the controls in each.

Its own file because these tables are results.csv reshaped; tables that need statistics or the paper's numbers are in
`analysis_tables.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pandas as pd

from medtokenbudget.config import HEADLINE_BUDGETS
from medtokenbudget.experiments.statistics import paired_seed_table
from medtokenbudget.report.evidence import CONTROLS, OFF_CENTER, Evidence
from medtokenbudget.report.intervals import Intervals
from medtokenbudget.report.style import look, ordered
from medtokenbudget.report.table import NOT_MEASURED, Table, number, percent, points, with_deviation, with_interval

METRIC_NAMES = {
    "accuracy": "Acc. (%)",
    "macro_f1": "Macro F1 (%)",
    "balanced_accuracy": "Bal. acc. (%)",
    "retention": "Ret. (%)",
    "retention_mean": "Ret. per image (%)",
    "retention_of_ceiling": "Of ceiling (%)",
    "precision": "Prec. (%)",
    "enrichment": "Enrich. (×)",
    "macro_auroc": "AUROC (%)",
    "ece": "ECE (%)",
    "purity": "Purity (%)",
}
SHOWN = ("accuracy", "macro_f1", "balanced_accuracy", "retention", "retention_of_ceiling")
MAIN_BUDGETS = (0.1, 0.2, 0.3, 0.5, 1.0)
_MOST_BOLD = 2
"""A value that more methods than these share is no best value."""
_NO_CONTEST = ("no-pruning", "oracle")
"""References, not competitors: one has no budget, the other sees the mask."""
_RECIPE_COLUMNS: tuple[tuple[str, tuple[float, ...]], ...] = (
    ("retention_of_ceiling", ()),
    ("macro_f1", (0.3,)),
    ("balanced_accuracy", (0.3,)),
)
"""Metrics of the recipe table and their budgets; () is all that were run."""
_RECIPE_NAMES = {"retention_of_ceiling": "Ceil.", "macro_f1": "F1", "balanced_accuracy": "Bal."}
_TITLES = {
    "robustness": "Robustness over seeds at the headline budgets",
    "mask-free": "LATS trained without lesion masks",
    "signals": "Single signals as selectors",
    "toggles": "Signals switched off at inference",
    "epochs": "Baselines trained for as many epochs as LATS",
    "center-bias": "Images as they are and off-center views",
}


def main(evidence: Evidence, intervals: Intervals) -> Table:
    """Accuracy over the paper's budgets, retention and its share of the ceiling at the headline budget."""
    budgets = [b for b in MAIN_BUDGETS if b in evidence.budgets] or evidence.budgets
    methods = with_controls(evidence.methods)
    at = f"@{evidence.headline:g}"
    columns = ["Method", *[f"Acc. β={b:g}" for b in budgets], f"F1{at}", f"Ret.{at}", f"Of ceiling{at}", "n (masks)"]
    wanted = [("accuracy", b) for b in budgets] + [
        (m, evidence.headline) for m in ("macro_f1", "retention", "retention_of_ceiling")
    ]
    tables = {key: intervals.at(*key) for key in wanted}
    rows, raw = [], []
    for method in methods:
        cells = [_row(tables[key], method) for key in wanted]
        rows.append([look(method).name, *[with_interval(*cell) for cell in cells], _counts(evidence.main, method)])
        for (metric, budget), (value, low, high) in zip(wanted, cells):
            raw.append({"method": method, "budget": budget, "metric": metric, "value": value, "low": low, "high": high})
    values = {(m, c): _row(tables[key], m)[0] for m in methods for c, key in enumerate(wanted, 1)}
    return Table(
        "main",
        "Accuracy and lesion retention (%) by method and budget",
        columns,
        rows,
        pd.DataFrame(raw),
        f"In brackets the 95 % bootstrap interval over groups of images. {seeds_note(evidence.main)} Ret.: lesion patches kept, "
        "pooled over images; of ceiling: as a share of what any selector could keep. Bold: best, without NoPruning and Oracle. "
        f"{NOT_MEASURED} not measured.",
        bold=_best(methods, values, range(1, len(wanted) + 1)),
    )


def sweep(evidence: Evidence, metric: str, name: str, title: str) -> Table | None:
    """One metric over all budgets of the headline study."""
    return _wide(evidence.main, metric, name, title)


def _wide(results: pd.DataFrame, metric: str, name: str, title: str) -> Table | None:
    if results.empty or results[metric].isna().all():
        return None
    budgets = sorted(results["budget"].unique())
    methods = with_controls(ordered(results["method"]))
    means = results.groupby(["method", "budget"])[metric].mean()
    values = {(m, c): float(means.get((m, b), np.nan)) for m in methods for c, b in enumerate(budgets, 1)}
    rows = [[look(m).name, *[percent(values[m, c]) for c in range(1, len(budgets) + 1)], _counts(results, m)] for m in methods]
    raw = [{"method": m, "budget": b, metric: values[m, c]} for m in methods for c, b in enumerate(budgets, 1)]
    if metric == "retention":
        ceiling = results[results["method"] != "no-pruning"].groupby("budget")["ceiling"].mean()
        rows.append(["Ceiling", *[percent(ceiling.get(b)) for b in budgets], ""])
        raw += [{"method": "ceiling", "budget": b, metric: float(ceiling.get(b, np.nan))} for b in budgets]
    return Table(
        name,
        title,
        ["Method", *[f"{b:g}" for b in budgets], "n (masks)"],
        rows,
        pd.DataFrame(raw),
        f"Columns are token budgets. {seeds_note(results)} Bold: best, without NoPruning and Oracle.",
        bold=_best(methods, values, range(1, len(budgets) + 1)),
        breaks=frozenset({len(methods)} if metric == "retention" else ()),
    )


def center_bias(evidence: Evidence) -> Table | None:
    """The images as they are and off-center, at the headline budgets, from the study that has both."""
    pair = evidence.off_center
    return None if pair is None else by_budget(evidence, pair.study, name="center-bias", budgets=HEADLINE_BUDGETS)


def by_budget(
    evidence: Evidence,
    study: str,
    metrics: Sequence[str] = SHOWN,
    name: str | None = None,
    budgets: Sequence[float] | None = None,
) -> Table | None:
    """Mean and deviation over seeds, a row for each (data set, budget, method): the shape of the paper's robustness table."""
    results = evidence.cells(study)
    if budgets is not None:
        results = results[results["budget"].isin(list(budgets))]
    if results.empty:
        return None
    datasets = evidence.datasets(study)
    several = len(datasets) > 1
    columns = [*(["Images"] if several else []), "β", "Method", *[METRIC_NAMES[m] for m in metrics], "n (masks)", "Seeds"]
    rows: list[list[str]] = []
    raw: list[dict[str, object]] = []
    bold: set[tuple[int, int]] = set()
    breaks: set[int] = set()
    for dataset in datasets:
        part = results[results["dataset"] == dataset]
        methods = with_controls(ordered(part["method"]))
        for budget in sorted(part["budget"].unique()):
            cells = part[np.isclose(part["budget"], budget)]
            stats = cells.groupby("method")[list(metrics)].agg(["mean", "std"])
            breaks.add(len(rows))
            values: dict[tuple[str, int], float] = {}
            for method in methods:
                pairs = [(_get(stats, method, (m, "mean")), _get(stats, method, (m, "std"))) for m in metrics]
                label = [*([view_name(dataset)] if several else []), f"{budget:g}", look(method).name]
                texts = [_mean_text(m, *pair) for m, pair in zip(metrics, pairs)]
                seeds = int((cells["method"] == method).sum())
                rows.append([*label, *texts, _counts(cells, method), str(seeds) if seeds else NOT_MEASURED])
                values |= {(method, c): pair[0] for c, pair in enumerate(pairs, len(label))}
                entry: dict[str, object] = {"dataset": dataset, "budget": budget, "method": method, "seeds": seeds}
                for metric, (mean, deviation) in zip(metrics, pairs):
                    entry |= {metric: mean, f"{metric}_sd": deviation}
                raw.append(entry)
            start = len(rows) - len(methods)
            first = 3 if several else 2
            bold |= {(start + r, c) for r, c in _best(methods, values, range(first, first + len(metrics)))}
    return Table(
        name or study,
        _TITLES.get(name or study, f"Study {study}"),
        columns,
        rows,
        pd.DataFrame(raw),
        "Mean over seeds, ± their standard deviation (no deviation for a single seed). This is the spread of the training, not of "
        f"the images. Bold: best at that budget, without NoPruning and Oracle. {NOT_MEASURED} not measured.",
        labels=3 if several else 2,
        bold=frozenset(bold),
        breaks=frozenset(breaks - {0}),
    )


def curriculum(evidence: Evidence) -> Table | None:
    """Accuracy over budgets of LATS trained with the curriculum and at a fixed budget."""
    return _wide(evidence.cells("curriculum"), "accuracy", "curriculum", "Curriculum against a fixed training budget: accuracy (%)")


def kvasir(evidence: Evidence) -> Table | None:
    """The auxiliary sweep on endoscopic images, which have no masks."""
    return _wide(evidence.cells("kvasir"), "accuracy", "kvasir", "Kvasir v2: accuracy (%) over all budgets")


def recipe(evidence: Evidence) -> Table | None:
    """A row for each variant of the preset: share of the ceiling at the headline budgets, macro F1 and balanced accuracy."""
    results = evidence.cells("recipe")
    if results.empty:
        return None
    datasets, methods = evidence.datasets("recipe"), with_controls(ordered(results["method"]))
    budgets = [b for b in HEADLINE_BUDGETS if b in set(results["budget"])] or sorted(results["budget"].unique())
    wanted = [(d, m, b) for m, bs in _RECIPE_COLUMNS for d in datasets for b in (bs or budgets) if b in budgets]
    means = results.groupby(["method", "dataset", "budget"])[[m for m, _ in _RECIPE_COLUMNS]].mean()
    values = {
        (method, c): float(means[metric].get((method, dataset, budget), np.nan))
        for method in methods
        for c, (dataset, metric, budget) in enumerate(wanted, 1)
    }
    columns = range(1, len(wanted) + 1)
    names = [f"{_RECIPE_NAMES[metric]} {_side(dataset)} {budget:g}" for dataset, metric, budget in wanted]
    raw = [
        {"method": method, "dataset": dataset, "metric": metric, "budget": budget, "value": values[method, c]}
        for method in methods
        for c, (dataset, metric, budget) in enumerate(wanted, 1)
    ]
    return Table(
        "recipe",
        "The lesion-first preset, one part taken back at a time",
        ["Method", *names, "n (masks)"],
        [[look(m).name, *[percent(values[m, c]) for c in columns], _counts(results, m)] for m in methods],
        pd.DataFrame(raw),
        f"{seeds_note(results)} Ceil.: share of the possible retention (%), F1: macro F1 (%), Bal.: balanced accuracy (%); "
        "as is: images as they are, off: off-center views; the number is the budget. Bold: best, without Oracle.",
        bold=_best(methods, values, columns),
    )


def paired_seeds(evidence: Evidence) -> Table | None:
    """LATS minus another method, seed by seed, in percentage points: mean and deviation."""
    metrics = ("accuracy", "macro_f1", "retention")
    found = paired_seed_table(evidence.cells("robustness"), "lats", metrics)
    if found.empty:
        return None
    cells = found.set_index(["budget", "method_b", "metric"])
    rows = []
    for budget in sorted(found["budget"].unique()):
        for method in (m for m in with_controls(found["method_b"]) if m != "lats"):
            keys = [(budget, method, m) for m in metrics]
            texts = [_gap_text(cells.loc[k, "mean"], cells.loc[k, "std"]) if k in cells.index else NOT_MEASURED for k in keys]
            seeds = str(cells.loc[keys[0], "seeds"]) if keys[0] in cells.index else NOT_MEASURED
            rows.append([f"{budget:g}", f"LATS − {look(method).name}", *texts, seeds])
    per_budget = len(rows) // found["budget"].nunique()
    return Table(
        "paired-seeds",
        "LATS against the others, seed by seed (percentage points)",
        ["β", "Comparison", "Δ Acc.", "Δ F1", "Δ Ret.", "Seeds"],
        rows,
        found,
        "Mean of the differences of the same seed, ± their standard deviation. ToMe merges patches and has no retention.",
        labels=2,
        breaks=frozenset(range(per_budget, len(rows), per_budget)),
    )


def _side(dataset: str) -> str:
    return "off" if dataset.endswith(OFF_CENTER) else "as is"


def view_name(dataset: str) -> str:
    return "off-center" if dataset.endswith(OFF_CENTER) else "as they are"


def with_controls(methods: Iterable[str]) -> list[str]:
    """The methods and the controls, in the order of every table: a control that was not run has a row of dashes."""
    return ordered([*methods, *CONTROLS])


def seeds_note(results: pd.DataFrame) -> str:
    seeds = sorted(int(seed) for seed in results["seed"].unique())
    text = ", ".join(map(str, seeds))
    return f"One run (seed {text})." if len(seeds) == 1 else f"Mean over the seeds {text}."


def _counts(results: pd.DataFrame, method: str) -> str:
    """`400 (155)`: images with a label, and images that retention was measured on."""
    rows = results[results["method"] == method]
    if rows.empty:
        return NOT_MEASURED
    return f"{int(rows['n'].max()):,} ({int(rows['n_masked'].max()):,})"


def _row(table: pd.DataFrame, method: str) -> tuple[float, float, float]:
    if method not in table.index:
        return (np.nan, np.nan, np.nan)
    row: Any = table.loc[method]
    return float(row["value"]), float(row["low"]), float(row["high"])


def _get(table: pd.DataFrame, method: str, column: tuple[str, str]) -> float:
    value: Any = table.loc[method, column] if method in table.index else np.nan
    return float(value)


def _mean_text(metric: str, mean: float, deviation: float) -> str:
    if metric == "enrichment":
        text = number(mean)
        return text if text == NOT_MEASURED or np.isnan(deviation) else f"{text} ± {number(deviation)}"
    return with_deviation(mean, deviation, 1)


def _gap_text(mean: float, deviation: float) -> str:
    text = points(mean, 2)
    return text if text == NOT_MEASURED or np.isnan(deviation) else f"{text} ± {percent(deviation, 2)}"


def _best(methods: Sequence[str], values: dict[tuple[str, int], float], columns: Iterable[int]) -> frozenset[tuple[int, int]]:
    """(row, column) of the largest value of each column as printed, so that ties are all bold; references do not compete."""
    best = set()
    for column in columns:
        candidates = {
            r: round(values[m, column], 3)
            for r, m in enumerate(methods)
            if m.split(":")[0] not in _NO_CONTEST and values[m, column] == values[m, column]
        }
        if len(candidates) > 1 and len(set(candidates.values())) > 1:
            top = max(candidates.values())
            winners = {(r, column) for r, value in candidates.items() if value == top}
            best |= winners if len(winners) <= _MOST_BOLD else set()
    return frozenset(best)
