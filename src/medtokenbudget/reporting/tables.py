"""Every table of a report of one or more runs, in its order.

Tables of values (all methods, sweeps, studies) are one `_pivot`: a row per method, run and budget, a column per measure, view and
budget. Each function returns a table, or None when the runs have nothing to show in it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd

from medtokenbudget.backbone.views import OFF_CENTER
from medtokenbudget.config import HEADLINE_BUDGET, HEADLINE_BUDGETS, PAPER_RECIPE
from medtokenbudget.data.masks import prevalence_table
from medtokenbudget.measures import (
    METRICS,
    NOT_MEASURED,
    budget_text,
    is_missing,
    number,
    percent,
    plural,
    points,
    probability,
    shown_in,
    with_interval,
    with_spread,
)
from medtokenbudget.metrics import ratio, reachable
from medtokenbudget.model.looks import look
from medtokenbudget.reporting.comparison import Comparison
from medtokenbudget.reporting.intervals import ReportRun
from medtokenbudget.reporting.table import Table, best, changes
from medtokenbudget.runs import paper
from medtokenbudget.runs.run import AS_IS
from medtokenbudget.runs.statistics import lesion_rows, paired_seed_table
from medtokenbudget.runs.studies import STUDIES
from medtokenbudget.runs.sweep import Study

VIEW_NAMES = {AS_IS: "original", OFF_CENTER: "off-center"}
_VIEW_HEADS = {AS_IS: "orig.", OFF_CENTER: "off"}
_BOLD = "Bold: best value, not counting NoPruning and Oracle."
_BRACKETS = "Brackets: 95% bootstrap interval over groups of images."
_DASH = f"{NOT_MEASURED}: not measured."
_TESTED = ("retention", "accuracy", "macro_f1")
"""Measures of the tests on the page; the CSV has all."""
_TEST_COLUMNS = ("Measure", "Images", "Difference (points)", "95% interval", "p", "p (Holm)", "n", "Seeds")
_MOST_WORST = 10

Column = tuple[str, str, str, float | None]
"""Heading, metric, view and budget of a column; the budget is None where each row has its own."""


def make_tables(comparison: Comparison, named: bool = True) -> list[Table]:
    """Make every table that the runs have numbers for; unless `named`, images have numbers in place of their names."""
    run, sweeps = comparison.first, shown_in("sweep")
    tables = [
        runs(comparison) if comparison.several else None,
        main(comparison),
        *[sweep(comparison, metric) for metric in sorted(sweeps, key=lambda metric: metric != "retention")],
        further_measures(comparison),
        center_bias(comparison),
        significance(comparison),
        *study_tables(comparison),
        recipe(comparison),
    ]
    if not comparison.several:
        tables += [
            strata(run, run.by_size, "size-strata", "Retention by lesion size", "Lesion size"),
            strata(run, run.by_class, "class-strata", "Retention by class", "Class"),
            strata(run, run.by_attribute, "attribute-strata", "Share of the ceiling (%) by what the images show", "Stratum"),
            own_validation(run),
            promises(run),
            worst(run, named),
            beside_paper(run),
            subset(run),
            prevalence(run),
        ]
    return [table for table in tables if table is not None]


# Tables of values.


def _pivot(
    comparison: Comparison,
    name: str,
    title: str,
    columns: Sequence[Column],
    note: str,
    study: str | dict[str, str] | None = None,
    budgets: Sequence[float] = (),
    intervals: bool = False,
    also: Sequence[str] = (),
    more: str = "",
    section: str = "",
) -> Table | None:
    """Make a table of values; None where no run has any.

    Args:
        columns: What to show; values of `METRICS`, mean over seeds.
        study: Name of the study, or run -> study; by default the headline study of each run.
        budgets: Repeat the rows for each of these budgets, with the deviation over seeds.
        intervals: Show bootstrap intervals, which only the headline study has.
        also: Further measures of the CSV.
    """
    if study is None:
        study = {run.name: run.study for run in comparison.runs}
    studies = {run.name: study if isinstance(study, str) else study.get(run.name, "") for run in comparison.runs}
    views, metrics = list(dict.fromkeys(column[2] for column in columns)), list(dict.fromkeys(column[1] for column in columns))
    data = [_measured(run, studies[run.name], views, {*metrics, *also}, intervals) for run in comparison.runs]
    if not any(frame["metric"].isin(metrics).any() for frame in data):
        return None
    results = {run.name: run.cells(studies[run.name]) for run in comparison.runs}
    pairs = _rows(comparison, {name: frame["method"] for name, frame in results.items()})
    rows, values = [], []
    for budget in budgets or (None,):
        for method, run in pairs:
            texts, numbers, seeds = [], [], 0
            for _, metric, view, at in columns:
                chosen = at if at is not None else budget if budget is not None else comparison.budget_of(run)
                value, deviation, count = run.value(studies[run.name], view, method, chosen, metric)
                numbers.append(value)
                seeds = max(seeds, count)
                if intervals and not is_missing(value):
                    row: Any = run.with_intervals(metric, chosen).loc[method]
                    texts.append(with_interval(value, row["low"], row["high"]))
                else:
                    texts.append(METRICS[metric].text(value, deviation if budgets else None))
            cells = results[run.name] if budget is None else results[run.name][np.isclose(results[run.name]["budget"], budget)]
            texts += [_counts(cells[cells["view"] == view], method) for view in views]
            texts += [str(seeds or NOT_MEASURED)] if budgets else []
            block = [budget_text(budget)] if budget is not None else []
            rows.append([*block, look(method).title, *([run.name] if comparison.several else []), *texts])
            values.append(numbers)
    labels = 1 + bool(budgets) + comparison.several
    bold: set[tuple[int, int]] = set()
    for start in range(0, len(rows), len(pairs)) if not comparison.several else ():
        winners = best([method for method, _ in pairs], values[start : start + len(pairs)], labels)
        bold |= {(start + r, c) for r, c in winners}
    counted = [f"n (masks) {VIEW_NAMES[view]}" if len(views) > 1 else "n (masks)" for view in views]
    heads = [*(["Budget"] if budgets else []), "Method", *(["Run"] if comparison.several else [])]
    first = results[comparison.first.name]
    return Table(
        name,
        title,
        [*heads, *[column[0] for column in columns], *counted, *(["Seeds"] if budgets else [])],
        rows,
        pd.concat(data, ignore_index=True).drop(columns=[] if comparison.several else "run"),
        f"{note} {'Mean over the seeds of each run.' if comparison.several else f'{_seeds(first)} {_BOLD}'} {_DASH}",
        labels=labels,
        bold=frozenset(bold),
        breaks=changes([row[0] for row in rows] if budgets else [method for method, _ in pairs] if comparison.several else []),
        more=more,
        section=section,
    )


def _measured(run: ReportRun, study: str, views: Sequence[str], metrics: set[str], intervals: bool) -> pd.DataFrame:
    """Return every value of these measures in a study, one per row: the CSV of a table."""
    rows = run.values.reset_index()
    rows = rows[(rows["study"] == study) & rows["view"].isin(views) & rows["metric"].isin(metrics)].drop(columns="study")
    if intervals:
        rows = rows.merge(run.curves.drop(columns=["value", "seeds"]), on=["method", "budget", "metric"], how="left")
    return rows.assign(run=run.name)[["run", *rows.columns]]


def _rows(comparison: Comparison, methods: dict[str, Any]) -> list[tuple[str, ReportRun]]:
    """Return (method, run) of every row, from the `methods` of each run: the runs of one method below each other.

    A report of one run has a row for every control, measured or not: a comparison without them proves little.
    """
    if not comparison.several:
        return [(method, comparison.first) for method in comparison.first.with_controls(methods[comparison.first.name])]
    every = comparison.first.ordered(method for names in methods.values() for method in names)
    return [(method, run) for method in every for run in comparison.runs if method in set(methods[run.name])]


def _counts(results: pd.DataFrame, method: str) -> str:
    """Write `400 (155)`: labeled images, and images that retention was measured on."""
    rows = results[results["method"] == method]
    return f"{int(rows['n'].max()):,} ({int(rows['n_masked'].max()):,})" if len(rows) else NOT_MEASURED


def _seeds(results: pd.DataFrame) -> str:
    """Name the seeds behind a table."""
    seeds = sorted(int(seed) for seed in results["seed"].unique())
    text = ", ".join(map(str, seeds))
    return f"One training run per method (seed {text})." if len(seeds) == 1 else f"Mean over seeds {text}."


def _headline_budgets(results: pd.DataFrame) -> list[float]:
    measured = set(results["budget"])
    return [b for b in HEADLINE_BUDGETS if b in measured] or sorted(measured)[:3]


def _at_headline(comparison: Comparison) -> str:
    return "headline" if comparison.headline is None else budget_text(comparison.headline)


def main(comparison: Comparison) -> Table | None:
    """Show every method at the main budgets, with intervals."""
    budgets = [b for b in paper.MAIN_BUDGETS if b in comparison.budgets] or comparison.budgets[:5]
    columns: list[Column] = [(f"Acc. at {budget_text(b)}", "accuracy", AS_IS, b) for b in budgets]
    for heading, metric in (("F1", "macro_f1"), ("Ret.", "retention"), ("Of ceiling", "retention_of_ceiling")):
        columns.append((f"{heading} at {_at_headline(comparison)}", metric, AS_IS, comparison.headline))
    note = (
        f"{_BRACKETS} Ret.: share of lesion patches kept, pooled over images. Of ceiling: the same as a share of what any selector "
        "could keep."
    )
    title = "Accuracy and lesion retention (%) by method and token budget"
    also = shown_in("interval")
    return _pivot(comparison, "main", title, columns, note, intervals=True, also=also, more="all budgets and measures")


def sweep(comparison: Comparison, metric: str, study: Study | None = None) -> Table | None:
    """Show one measure over all budgets of the headline study, or of another `study`."""
    cells = [run.cells(study.name if study else run.study, AS_IS) for run in comparison.runs]
    budgets = sorted({budget for table in cells for budget in table["budget"]})
    name = study.name if study else f"{metric.replace('_', '-')}-sweep"
    title = study.title if study else f"{METRICS[metric].term} ({METRICS[metric].unit}) at all budgets"
    columns: list[Column] = [(budget_text(b), metric, AS_IS, b) for b in budgets]
    of_study, section = (study.name, study.section) if study else (None, "")
    table = _pivot(comparison, name, title, columns, "Columns: token budgets.", of_study, section=section)
    if table is None or metric != "retention" or comparison.several:
        return table
    # NoPruning ignores the budget, so it has another ceiling than the rest.
    ceiling = cells[0][cells[0]["method"] != "no-pruning"].groupby("budget")["ceiling"].mean().reindex(budgets)
    entry = {"method": "ceiling", "view": AS_IS, "metric": metric}
    data = pd.DataFrame([{**entry, "budget": budget, "value": float(value)} for budget, value in ceiling.items()])
    return replace(
        table,
        rows=[*table.rows, ["Ceiling", *map(percent, ceiling), ""]],
        data=pd.concat([table.data, data], ignore_index=True),
        breaks=frozenset({len(table.rows)}),
    )


def further_measures(comparison: Comparison) -> Table | None:
    """Show the remaining columns of results.csv at the headline budget."""
    columns: list[Column] = [(METRICS[m].heading, m, AS_IS, comparison.headline) for m in shown_in("further")]
    note = (
        "AUROC: one class against the rest, averaged over classes. ECE: lower is better. Per image: retention averaged over "
        "images. Purity, dominated and mass apply to methods that merge patches; precision and enrichment to those that keep them."
    )
    title = f"Further measures at budget {_at_headline(comparison)}"
    table = _pivot(comparison, "further-measures", title, columns, note, more="all budgets")
    # Not every one of these measures is better the higher it is.
    return None if table is None else replace(table, bold=frozenset(), note=table.note.replace(f" {_BOLD}", ""))


def center_bias(comparison: Comparison) -> Table | None:
    """Show the share of the ceiling on the original images and on off-center views."""
    studies = {run.name: run.off_center_study for run in comparison.runs if run.off_center_study is not None}
    results = [run.cells(studies[run.name]) for run in comparison.runs if run.name in studies]
    if not results:
        return None
    title = "Share of the ceiling (%), original images and off-center views"
    columns = _by_view(["retention_of_ceiling"], _headline_budgets(pd.concat(results)), list(VIEW_NAMES))
    note = "Orig.: original images. Off: views with the lesion away from the center. The number is the token budget."
    also, more = shown_in("interval"), "accuracy, macro F1 and retention of both views too"
    return _pivot(comparison, "center-bias", title, columns, note, studies, also=also, more=more)


def recipe(comparison: Comparison) -> Table | None:
    """Show one row per change to the lesion-first recipe."""
    results = pd.concat([run.cells("recipe") for run in comparison.runs])
    views = [view for view in VIEW_NAMES if view in set(results["view"])]
    if results.empty:
        return None
    columns = _by_view(["retention_of_ceiling"], _headline_budgets(results), views, short=True)
    columns += _by_view(["macro_f1", "balanced_accuracy"], [HEADLINE_BUDGET], views, short=True)
    note = (
        "Ceil.: share of the ceiling (%). F1: macro F1 (%). Bal.: balanced accuracy (%). Orig.: original images. Off: off-center "
        "views. The number is the token budget."
    )
    title, also = "The lesion-first recipe with one part changed at a time", shown_in("interval")
    more = "accuracy, macro F1 and retention of both views too"
    return _pivot(comparison, "recipe", title, columns, note, "recipe", also=also, more=more)


def _by_view(metrics: Sequence[str], budgets: Sequence[float], views: Sequence[str], short: bool = False) -> list[Column]:
    return [
        (f"{METRICS[metric].short + ' ' if short else ''}{_VIEW_HEADS[view]} {budget_text(budget)}", metric, view, budget)
        for metric in metrics
        for view in views
        for budget in budgets
    ]


def study_tables(comparison: Comparison) -> list[Table | None]:
    """Make the tables of every study, each in the form that it asks for; those of the headline study are above."""
    names = dict.fromkeys(name for run in comparison.runs for name in run.studies)
    known = [*(name for name in STUDIES if name in names), *(name for name in names if name not in STUDIES)]
    tables: list[Table | None] = []
    for study in (STUDIES.get(name) or Study(name, ()) for name in known):
        if study.form == "sweep":
            tables.append(sweep(comparison, "accuracy", study))
        elif study.form == "budgets" and study.name != comparison.first.study:
            tables.append(by_budget(comparison, study))
        if "paired-seeds" in study.tables and not comparison.several:
            tables += paired_seeds(comparison.first, study)
    return tables


def by_budget(comparison: Comparison, study: Study) -> Table | None:
    """Show mean and deviation over seeds with one row per budget and method, like the paper's robustness table."""
    results = pd.concat([run.cells(study.name, AS_IS) for run in comparison.runs])
    columns: list[Column] = [(METRICS[m].heading, m, AS_IS, None) for m in (*shown_in("interval"), *study.metrics)]
    note = (
        "Mean ± standard deviation over seeds, which is the spread between training runs and not between images; a single seed has "
        "no deviation."
    )
    title, budgets = study.title or f"Study “{study.name}”", _headline_budgets(results)
    return _pivot(comparison, study.name, title, columns, note, study.name, budgets, more="all budgets", section=study.section)


def paired_seeds(run: ReportRun, study: Study) -> list[Table | None]:
    """Show the study's main method, and the paper's recipe next to it, minus each other method seed by seed."""
    results = run.cells(study.name, AS_IS)
    methods = run.ordered(results["method"])
    references = {"paired-seeds": run.focus_of(methods)}
    if PAPER_RECIPE in methods and references["paired-seeds"] != PAPER_RECIPE:
        references["paired-seeds-paper"] = PAPER_RECIPE
    return [_paired_seeds(run, results, method, name, study.section) for name, method in references.items()]


def _paired_seeds(run: ReportRun, results: pd.DataFrame, reference: str, name: str, section: str) -> Table | None:
    metrics = ("accuracy", "macro_f1", "retention")
    gaps = paired_seed_table(results, reference, metrics)
    if gaps.empty:
        return None
    cells: dict[Any, Any] = {(r["budget"], r["method_b"], r["metric"]): r for r in gaps.to_dict("records")}
    others = [m for m in run.with_controls(results["method"]) if m != reference]
    rows = []
    for budget in sorted(gaps["budget"].unique()):
        for method in others:
            gap_of = [cells.get((budget, method, metric)) for metric in metrics]
            texts = [NOT_MEASURED if g is None else with_spread(points(g["mean"], 2), percent(g["std"], 2)) for g in gap_of]
            seeds = next((str(gap["seeds"]) for gap in gap_of if gap is not None), NOT_MEASURED)
            rows.append([budget_text(budget), look(method).title, *texts, seeds])
    title = look(reference).title
    return Table(
        name,
        f"{title} minus each other method, seed by seed (percentage points)",
        ["Budget", f"{title} minus", *[f"Δ {METRICS[metric].term.lower().replace('f1', 'F1')}" for metric in metrics], "Seeds"],
        rows,
        gaps,
        "Mean of the differences between runs with the same seed, ± their standard deviation; n (masks) = "
        f"{_counts(results, reference)}. {NOT_MEASURED}: not measured on the same images. ToMe has no retention.",
        labels=2,
        breaks=changes([row[0] for row in rows]),
        section=section,
    )


# Tables that list a frame: several runs, tests, the paper, and the images of one run.


def _listing(name: str, title: str, data: pd.DataFrame, columns: dict[str, Callable[[Any], str]], note: str, labels: int) -> Table:
    """Make a table with one row per row of `data`; `columns` are headings -> how a row is written below them."""
    rows = [[write(row) for write in columns.values()] for row in data.to_dict("records")]
    return Table(name, title, list(columns), rows, data, note, labels)


def runs(comparison: Comparison) -> Table:
    """Show what each run is made of."""
    data = pd.DataFrame(
        {
            "run": run.name,
            "dataset": run.dataset,
            "backbone": str(run.info.backbone.get("name", NOT_MEASURED)),
            "main": run.focus,
            "methods": len(run.methods),
            "classes": len(run.classes),
            "n": run.n,
            "n_masked": run.n_masked,
            "seeds": " ".join(map(str, run.seeds)),
            "headline": comparison.budget_of(run),
        }
        for run in comparison.runs
    )
    columns: dict[str, Callable[[Any], str]] = {
        "Run": lambda row: row["run"],
        "Data set": lambda row: row["dataset"],
        "Backbone": lambda row: row["backbone"],
        "Main method": lambda row: look(row["main"]).title,
        "Methods": lambda row: str(row["methods"]),
        "Classes": lambda row: str(row["classes"]),
        "n (masks)": lambda row: f"{row['n']:,} ({row['n_masked']:,})",
        "Seeds": lambda row: row["seeds"],
    }
    note = "Main method: the one that is saved as the model. n (masks): validation images, and those with a lesion mask."
    if comparison.headline is None:
        note += " The runs have no budget in common: headline numbers are those of the budget nearest to 0.3 of each run."
    return _listing("runs", "The runs", data, columns, note, labels=4)


def significance(comparison: Comparison) -> Table | None:
    """Show tests at the headline budget: each run minus the first, or the main method minus the main alternatives.

    The CSV has every budget and test.
    """
    run, several, many = comparison.first, comparison.several, len(comparison.runs) > 2
    tests = comparison.headline_tests
    tests = tests[tests["metric"].isin(_TESTED) & ((tests["view"] == AS_IS) | (tests["metric"] == "retention"))]
    opponents = [m for m in run.emphasized if m != "darkness"]
    if not several:
        opponents = [m for m in (run.paper_method, "center", "random", "no-pruning") if m]
        # Keeping everything is no opponent in a contest about what to keep.
        tests = tests[(tests["method"] == run.focus) & ((tests["metric"] != "retention") | (tests["minus_method"] != "no-pruning"))]
    tests = tests[tests["minus_method"].isin(opponents)]
    if tests.empty:
        return None
    # Rules separate pairs of methods in a comparison of runs, and measures in a report of one run.
    blocks = ["run", "method", "minus_method"] if several else ["view", "metric"]
    ranks = {"metric": list(_TESTED), "minus_method": opponents, "view": list(VIEW_NAMES)}
    ranks |= {column: list(dict.fromkeys(tests[column])) for column in ("run", "method")}
    records: list[dict[Any, Any]] = sorted(
        tests.to_dict("records"),
        key=lambda test: [ranks[column].index(test[column]) for column in (*blocks, "view", "metric", "minus_method")],
    )
    rows = []
    for test in records:
        title, other = look(test["method"]).title, look(test["minus_method"]).title
        pair = other if not several else title if test["method"] == test["minus_method"] else f"{title} − {other}"
        interval = f"{points(test['low'])} to {points(test['high'])}"
        numbers = [points(test["difference"]), interval, probability(test["p"]), probability(test["p_holm"])]
        names = [*([test["run"]] if many else []), pair, METRICS[test["metric"]].title, VIEW_NAMES[test["view"]]]
        rows.append([*names, *numbers, f"{test['n']:,}", str(test["seeds"])])
    name = look(run.focus).title
    title = f"{name} against the main alternatives at budget {budget_text(run.headline)}"
    if several:
        title = f"{'Each run' if many else comparison.runs[1].name} minus {run.name}, on the same images"
    higher = f"higher than {run.name}" if several else f"{name} is higher"
    return Table(
        "differences" if several else "significance",
        title,
        [*(["Run"] if many else []), "Method" if several else f"{name} minus", *_TEST_COLUMNS],
        rows,
        comparison.tests,
        f"Positive: {higher}. Paired permutation tests on the images that both have; groups of images are exchanged as a whole, "
        "all seeds together. Holm's correction covers all tests of a measure in the CSV, not only those shown.",
        labels=4 if many else 3,
        breaks=changes([[test[column] for column in blocks] for test in records]),
        more=f"all {plural(len(comparison.tests), 'test')}",
    )


def beside_paper(run: ReportRun) -> Table | None:
    """Show the paper's number, this run's number and the difference, for every study that both have on the same data set."""
    original = run.results[run.results["view"] == AS_IS]
    parts = [paper.beside_paper(original, s).assign(study=s) for s in paper.studies_of(run.source) if s in run.studies]
    if not parts:
        return None
    data = pd.concat(parts, ignore_index=True)
    data = data[data["ours"].notna()]
    shown = data[np.isclose(data["budget"], HEADLINE_BUDGET) & data["paper"].notna()]
    # Studies share trainings: a row that says the same again is left out, one with other seeds is another number.
    shown = shown.drop_duplicates(["method", "metric", "paper", "ours", "seeds"])
    if shown.empty:
        return None
    rows = []
    for r in shown.to_dict("records"):
        digits = 1 if METRICS[r["metric"]].unit == "%" else 2
        theirs, ours = (with_spread(number(r[c], digits), number(r[f"{c}_sd"], digits)) for c in ("paper", "ours"))
        difference = f"{r['difference']:+.{digits}f}".replace("-", "−")
        rows.append([r["study"], METRICS[r["metric"]].heading, look(r["method"]).title, theirs, ours, difference, str(r["seeds"])])
    return Table(
        "beside-paper",
        f"The paper's numbers and those of this run at budget {budget_text(HEADLINE_BUDGET)}",
        ["Study", "Measure", "Method", "Paper", "This run", "Difference", "Seeds"],
        rows,
        data[["study", "method", "budget", "metric", "paper", "paper_sd", "ours", "ours_sd", "seeds", "difference"]],
        "± standard deviation over seeds, where there are several. "
        f"This run: {plural(run.n, 'image')} ({run.n_masked:,} with a mask)"
        + (f"; the paper: {sum(paper.subsets()['Full validation'].values()):,} (155)." if run.source == "isic" else "."),
        labels=3,
        breaks=changes(list(zip(shown["study"], shown["metric"]))),
        more=f"all {len(data):,} values, with every budget and the controls",
    )


# The images of one run.


def strata(run: ReportRun, data: pd.DataFrame, name: str, title: str, first: str) -> Table | None:
    """Show retention as a share of the ceiling with one row per stratum; the CSV has every method."""
    if data.empty:
        return None
    methods = [m for m in run.emphasized if m in set(data["method"])]
    kinds = ["property"] if "property" in data else []
    rows, keys = [], []
    for key, cells in data.groupby([*kinds, "stratum"], sort=False):
        by_method, names = cells.set_index("method"), [str(part) for part in key]
        if kinds and names[0] in keys:
            names[0] = ""
        keys.append(str(key[0]) if kinds else "")
        values = [with_interval(*row) for row in by_method.reindex(methods)[["value", "low", "high"]].to_numpy(float)]
        rows.append([*names, str(int(cells["n"].max())), percent(cells["ceiling"].iloc[0]), *values])
    return Table(
        name,
        title,
        [*[kind.capitalize() for kind in kinds], first, "n", "Ceiling (%)", *[look(m).title for m in methods]],
        rows,
        data.drop(columns=["study", "dataset", "view"], errors="ignore"),
        f"Share of the ceiling (%) at budget {budget_text(run.headline)}. {_BRACKETS} {_seeds(run.main)} A stratum with few images "
        "has a wide interval.",
        labels=1 + len(kinds),
        breaks=changes(keys),
        more="all methods",
    )


def worst(run: ReportRun, named: bool = True) -> Table | None:
    """Show the images with the lowest retention of the run's main method, by name or by their place in the table."""
    rows = run.main_predictions
    rows = lesion_rows(rows[(rows["method"] == run.focus) & np.isclose(rows["budget"], run.headline)])
    if rows.empty:
        return None
    data = rows[rows["seed"] == rows["seed"].min()].copy()
    kept, lesion = (data[name].to_numpy(float) for name in ("kept_lesion", "lesion"))
    data["share"], data["of_possible"] = ratio(kept, lesion), ratio(kept, reachable(lesion, data["k"]))
    data = data.sort_values(["of_possible", "image_id"], kind="stable").head(_MOST_WORST)
    data = data[["image_id", "label_name", "predicted_name", "lesion", "kept_lesion", "k", "share", "of_possible"]]
    if not named:
        data["image_id"] = range(1, len(data) + 1)
    data = data.rename(columns={"label_name": "label", "predicted_name": "predicted"})
    columns: dict[str, Callable[[Any], str]] = {
        "Image": lambda row: str(row["image_id"]),
        "Class": lambda row: row["label"] if isinstance(row["label"], str) else NOT_MEASURED,
        "Predicted": lambda row: str(row["predicted"]),
        "Lesion patches kept": lambda row: f"{int(row['kept_lesion'])} of {int(row['lesion'])}",
        "Retention (%)": lambda row: percent(row["share"]),
        "Of ceiling (%)": lambda row: percent(row["of_possible"]),
    }
    title = f"Images with the lowest retention of {look(run.focus).title} at budget {budget_text(run.headline)}"
    return _listing("worst", title, data, columns, f"Seed {rows['seed'].min()}; one image per row, lowest first.", labels=1)


def own_validation(run: ReportRun) -> Table | None:
    """Show every measure on these images next to the model's own validation, and the difference; None if that is not known."""
    own = (run.info.evaluation or {}).get("own") or []
    data = []
    for metric in shown_in("interval"):
        for before in own:
            table, budget = run.with_intervals(metric, before["budget"]), before["budget"]
            if before.get(metric) is not None and run.focus in table.index:
                value, low, high = (float(table[name][run.focus]) for name in ("value", "low", "high"))
                values = {"own": before[metric], "here": value, "low": low, "high": high, "lost": before[metric] - value}
                data.append({"metric": metric, "budget": budget, **values})
    if not data:
        return None
    columns: dict[str, Callable[[Any], str]] = {
        "Measure": lambda row: METRICS[row["metric"]].heading,
        "Budget": lambda row: budget_text(row["budget"]),
        "Own validation": lambda row: percent(row["own"]),
        "These images": lambda row: with_interval(row["here"], row["low"], row["high"]),
        "Lost (points)": lambda row: points(row["lost"]),
    }
    note = (
        f"{look(run.focus).title}. Own validation: {own[0]['n']:,} images ({own[0]['n_masked']:,} with a mask). Positive: worse "
        f"here. Retention also depends on the size of the lesions, its share of the ceiling does not. {_BRACKETS}"
    )
    title = "How much was lost against the model's own validation"
    return _listing("own-validation", title, pd.DataFrame(data), columns, note, labels=2)


def promises(run: ReportRun) -> Table | None:
    """Show what the guarantees of the model keep on these images."""
    guarantees = (run.info.evaluation or {}).get("guarantees") or []
    if not guarantees:
        return None
    columns: dict[str, Callable[[Any], str]] = {
        "Promised (%)": lambda row: percent(row["retention"], 0),
        "How": lambda row: "on average" if is_missing(row["coverage"]) else f"in {percent(row['coverage'], 0)}% of the images",
        "Cap (%)": lambda row: percent(row["cap"], 0),
        "Kept (%)": lambda row: percent(row["kept"]),
        "Images that reach it (%)": lambda row: percent(row["reached"]),
        "Patches": lambda row: number(row["tokens"], 1),
        "Patches in calibration": lambda row: number(row["own_tokens"], 1),
    }
    note = (
        f"Means over {guarantees[0]['groups']:,} groups of {guarantees[0]['n']:,} images with a lesion. A guarantee holds for "
        "images like those of its calibration; here it is checked, not promised."
    )
    return _listing("promises", "Guarantees of the model on these images", pd.DataFrame(guarantees), columns, note, labels=2)


def subset(run: ReportRun) -> Table | None:
    """Show images per class: validation and training, all and with a mask, with the paper's counts for its own data set."""
    images = _images(run)
    images = images[images["label"] >= 0]
    if images.empty:
        return None
    parts: dict[tuple[str, str], dict[str, int]] = {
        ("validation", "Validation"): _by_class(images, run),
        ("validation_masks", "with mask"): _by_class(images[(images["lesion"].fillna(0) > 0).to_numpy(bool)], run),
    }
    training = run.info.counts.get("train") or {}
    for column, heading, key in (("training", "Training", "classes"), ("training_masks", "with mask", "masked_classes")):
        if isinstance(training.get(key), dict):
            parts[column, heading] = training[key]
    classes = list(run.classes)
    if run.source == "isic" and set(classes) == set(paper.CLASSES):
        columns = (
            ("paper_validation", "Paper: validation"),
            ("paper_validation_masks", "Paper: val. masks"),
            ("paper_training_masks", "Paper: train masks"),
        )
        parts |= dict(zip(columns, paper.subsets().values()))
    rows = [[name, *[f"{part.get(name, 0):,}" for part in parts.values()]] for name in classes]
    rows.append(["All classes", *[f"{sum(part.values()):,}" for part in parts.values()]])
    data = pd.DataFrame([{"class": name} | {column: part.get(name, 0) for (column, _), part in parts.items()} for name in classes])
    heads = ["Class", *[heading for _, heading in parts]]
    return Table("subset", "Images per class", heads, rows, data, breaks=frozenset({len(classes)}))


def _images(run: ReportRun) -> pd.DataFrame:
    return run.main_predictions.sort_values("lesion", na_position="last").drop_duplicates("image_id")


def _by_class(images: pd.DataFrame, run: ReportRun) -> dict[str, int]:
    numbers = np.bincount(images["label"].to_numpy(int), minlength=len(run.classes))
    return dict(zip(run.classes, numbers.tolist()))


def prevalence(run: ReportRun) -> Table | None:
    """Show lesion sizes on the patch grid, next to the paper's for its own data set."""
    images = _images(run)
    images = images[(images["lesion"].fillna(0) > 0).to_numpy(bool)]
    if images.empty:
        return None
    sizes, patches = images["lesion"].to_numpy(int), int(images["n_patches"].iloc[0])
    data = pd.DataFrame(
        [
            {"statistic": name.capitalize(), "patches": row["patches"], "prevalence": row["prevalence"]}
            for name, row in prevalence_table(sizes, patches).items()
        ]
    )
    columns: dict[str, Callable[[Any], str]] = {
        "Statistic": lambda row: row["statistic"],
        "Patches": lambda row: number(row["patches"], 1),
        "Of the image (%)": lambda row: percent(row["prevalence"]),
    }
    note = f"{plural(len(sizes), 'validation image')} with a mask on a grid of {patches} patches"
    if run.source == "isic":
        theirs = paper.prevalence_table().set_index("statistic")
        data = data.join((theirs / [1, 100]).add_prefix("paper_"), on="statistic")
        columns["Paper: patches"] = lambda row: number(row["paper_patches"], 1)
        columns["Paper: of the image (%)"] = lambda row: percent(row["paper_prevalence"])
        note += "; the paper: 155 images, 256 patches"
    return _listing("prevalence", "Lesion size on the patch grid", data, columns, f"{note}.", labels=1)
