"""Every table of a report in its order: all methods of one run or of several side by side, studies and tests; see `image_tables`.

Each function returns a table, or None when the runs have nothing to show in it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd

from medtokenbudget.backbone.views import OFF_CENTER
from medtokenbudget.config import HEADLINE_BUDGETS
from medtokenbudget.measures import METRICS, shown_in
from medtokenbudget.reporting import image_tables as images
from medtokenbudget.reporting.comparison import Comparison
from medtokenbudget.reporting.intervals import HEADLINE, ReportRun
from medtokenbudget.reporting.looks import PAPER_RECIPE, look
from medtokenbudget.reporting.table import BOLD_NOTE, INTERVAL_NOTE, Table, best, changes, counts, seeds_note, value_and_interval
from medtokenbudget.reporting.text import (
    NOT_MEASURED,
    budget_text,
    number,
    percent,
    plural,
    points,
    probability,
    with_interval,
    with_spread,
)
from medtokenbudget.runs import paper
from medtokenbudget.runs.run import AS_IS
from medtokenbudget.runs.statistics import paired_seed_table

VIEW_NAMES = {AS_IS: "as is", OFF_CENTER: "off-center"}
_SEEDS_NOTE = "Mean over the seeds of each run."
_MASK_FREE_METRICS = (*shown_in("interval"), "precision", "enrichment")
_RECIPE = (("retention_of_ceiling", ()), ("macro_f1", (0.3,)), ("balanced_accuracy", (0.3,)))
"""Measures of the recipe table with their budgets; () means all that were run."""
_STUDY_TITLES = {
    "robustness": "Robustness over seeds",
    "mask-free": "Training without lesion masks",
    "signals": "Single signals as selectors",
    "toggles": "Signals switched off at inference",
    "epochs": "Baselines trained for as many epochs as LATS",
}
_OWN_TABLE = {"main", "curriculum", "kvasir", "subset", "center-bias", "recipe"}
"""Studies that have a table of another form than `by_budget`."""
_COMPARED = ("center", "random", "no-pruning")
"""What the page compares the run's main method with, beside the paper's recipe."""


def make_tables(comparison: Comparison, named: bool = True) -> list[Table]:
    """Makes every table that the runs have numbers for; unless `named`, images have numbers in place of their names."""
    tables = [
        *([runs(comparison)] if comparison.several else []),
        main(comparison),
        *[sweep(comparison, metric) for metric in ("retention", *[m for m in shown_in("sweep") if m != "retention"])],
        further_measures(comparison),
        center_bias(comparison),
        *([differences(comparison)] if comparison.several else _of_one_run(comparison, named)),
    ]
    return [table for table in tables if table is not None]


def _of_one_run(comparison: Comparison, named: bool) -> list[Table | None]:
    run = comparison.first
    return [
        *[by_budget(run, study) for study in run.studies if study not in {*_OWN_TABLE, run.study}],
        *paired_seeds(run),
        sweep(comparison, "accuracy", "curriculum", "Curriculum against a fixed training budget: accuracy (%)"),
        sweep(comparison, "accuracy", "kvasir", "Kvasir v2: accuracy (%) over all budgets"),
        recipe(comparison),
        images.strata(run, run.by_size, "size-strata", "Retention by lesion size", "Lesion size"),
        images.strata(run, run.by_class, "class-strata", "Retention by class", "Class"),
        images.own_validation(run),
        images.promises(run),
        images.attribute_strata(run),
        images.worst(run, named),
        significance(run),
        beside_paper(run),
        images.subset(run),
        images.prevalence(run),
    ]


# All methods, of one run or of several.


def _rows(comparison: Comparison, methods: dict[str, Collection[str]]) -> list[tuple[str, ReportRun]]:
    """Returns (method, run) of every row, from the `methods` of each run: the runs of one method below each other.

    A report of one run has a row for every control, measured or not.
    """
    if not comparison.several:
        run = comparison.first
        return [(method, run) for method in run.with_controls(methods[run.name])]
    return [(method, run) for method in comparison.methods for run in comparison.runs if method in methods[run.name]]


def _names(comparison: Comparison, method: str, run: ReportRun) -> dict[str, Any]:
    """Returns the columns of a CSV that name a row."""
    return {"run": run.name, "method": method} if comparison.several else {"method": method}


def _pivot(
    comparison: Comparison,
    name: str,
    title: str,
    rows: Sequence[tuple[str, ReportRun]],
    columns: Sequence[str],
    texts: Sequence[Sequence[str]],
    data: pd.DataFrame,
    note: str,
    values: Sequence[Sequence[float]] | None = None,
    more: str = "",
) -> Table:
    """Makes a table with one row per method, or per method and run; the best of `values` are bold where one run is shown."""
    several, methods = comparison.several, [method for method, _ in rows]
    return Table(
        name,
        title,
        ["Method", *(["Run"] if several else []), *columns],
        [[look(method).name, *([run.name] if several else []), *line] for (method, run), line in zip(rows, texts)],
        data,
        note,
        labels=2 if several else 1,
        bold=best(methods, values) if values and not several else frozenset(),
        breaks=changes(methods) if several else frozenset(),
        more=more,
    )


def main(comparison: Comparison) -> Table:
    """Shows every method at the main budgets (one run) or at the headline budget (several), with intervals."""
    first, several = comparison.first, comparison.several
    if several:
        wanted = {run.name: [(m, comparison.budget_of(run)) for m in shown_in("interval")] for run in comparison.runs}
        columns = ["Budget", *[METRICS[m].heading for m in shown_in("interval")], "n (masks)"]
        title, note = "All methods of all runs", f"{INTERVAL_NOTE} {_SEEDS_NOTE}"
    else:
        budgets = [b for b in paper.MAIN_BUDGETS if b in first.budgets] or first.budgets[:5]
        at = f"at {budget_text(first.headline)}"
        wanted = {first.name: [("accuracy", b) for b in budgets]}
        wanted[first.name] += [(m, first.headline) for m in ("macro_f1", "retention", "retention_of_ceiling")]
        columns = [*[f"Acc. at {budget_text(b)}" for b in budgets], f"F1 {at}", f"Ret. {at}", f"Of ceiling {at}", "n (masks)"]
        title = "Accuracy and lesion retention (%) by method and token budget"
        note = (
            f"{INTERVAL_NOTE} {seeds_note(first.main)} Ret.: share of lesion patches kept, pooled over images. Of ceiling: the "
            f"same as a share of what any selector could keep. {BOLD_NOTE} {NOT_MEASURED}: not measured."
        )
    tables = {run.name: {key: run.with_intervals(*key) for key in wanted[run.name]} for run in comparison.runs}
    rows = _rows(comparison, {run.name: run.methods for run in comparison.runs})
    texts, values, data = [], [], []
    for method, run in rows:
        cells = [value_and_interval(table, method) for table in tables[run.name].values()]
        budget = [budget_text(comparison.budget_of(run))] if several else []
        texts.append([*budget, *[with_interval(*cell) for cell in cells], counts(run.main, method)])
        values.append([value for value, _, _ in cells])
        data += [
            {**_names(comparison, method, run), "budget": budget, "metric": metric, "value": value, "low": low, "high": high}
            for (metric, budget), (value, low, high) in zip(wanted[run.name], cells)
        ]
    return _pivot(comparison, "main", title, rows, columns, texts, pd.DataFrame(data), note, values)


def sweep(comparison: Comparison, metric: str, study: str | None = None, title: str = "") -> Table | None:
    """Shows one measure over all budgets of the headline study, or of another `study`."""
    cells = {run.name: run.cells(study or run.study, AS_IS) for run in comparison.runs}
    if all(table[metric].isna().all() for table in cells.values()):
        return None
    budgets = sorted({budget for table in cells.values() for budget in table["budget"]})
    means = {name: table.groupby(["method", "budget"])[metric].mean() for name, table in cells.items()}
    rows = _rows(comparison, {name: set(table["method"]) for name, table in cells.items()})
    values = [[float(means[run.name].get((method, b), np.nan)) for b in budgets] for method, run in rows]
    texts = [[*map(percent, line), counts(cells[run.name], method)] for (method, run), line in zip(rows, values)]
    data = [
        {**_names(comparison, method, run), "budget": b, metric: value}
        for (method, run), line in zip(rows, values)
        for b, value in zip(budgets, line)
    ]
    results = cells[comparison.first.name]
    note = f"Columns: token budgets. {_SEEDS_NOTE if comparison.several else f'{seeds_note(results)} {BOLD_NOTE}'}"
    name = study or f"{metric.replace('_', '-')}-sweep"
    title = title or f"{METRICS[metric].term} ({METRICS[metric].unit}) at all budgets"
    columns = [*map(budget_text, budgets), "n (masks)"]
    if metric != "retention" or comparison.several:
        return _pivot(comparison, name, title, rows, columns, texts, pd.DataFrame(data), note, values)
    # NoPruning ignores the budget, so it has another ceiling than the rest.
    ceiling = results[results["method"] != "no-pruning"].groupby("budget")["ceiling"].mean().reindex(budgets)
    data += [{"method": "ceiling", "budget": b, metric: float(value)} for b, value in ceiling.items()]
    table = _pivot(comparison, name, title, rows, columns, texts, pd.DataFrame(data), note, values)
    return replace(table, rows=[*table.rows, ["Ceiling", *map(percent, ceiling), ""]], breaks=frozenset({len(rows)}))


def further_measures(comparison: Comparison) -> Table:
    """Shows the remaining columns of results.csv at the headline budget."""
    metrics, first = shown_in("further"), comparison.first
    at = {run.name: run.main[np.isclose(run.main["budget"], comparison.budget_of(run))] for run in comparison.runs}
    means = {name: cells.groupby("method")[list(metrics)].mean() for name, cells in at.items()}
    rows = _rows(
        comparison, {run.name: run.methods if comparison.several else set(means[run.name].index) for run in comparison.runs}
    )
    values = [means[run.name].reindex([method]).iloc[0] for method, run in rows]
    texts = [[*[_text(m, line[m]) for m in metrics], counts(at[run.name], method)] for (method, run), line in zip(rows, values)]
    data = [
        {
            **_names(comparison, method, run),
            **({"budget": comparison.budget_of(run)} if comparison.several else {}),
            **line.to_dict(),
        }
        for (method, run), line in zip(rows, values)
    ]
    title, note = "Further measures at the headline budget", _SEEDS_NOTE
    if not comparison.several:
        title = f"Further measures at budget {budget_text(first.headline)}"
        note = (
            f"{seeds_note(at[first.name])} AUROC: one class against the rest, averaged over classes. ECE: lower is better. Per "
            "image: retention averaged over images. Purity, dominated and mass apply to methods that merge patches; precision and "
            "enrichment to methods that keep them."
        )
    columns = [*[METRICS[m].heading for m in metrics], "n (masks)"]
    return _pivot(comparison, "further-measures", title, rows, columns, texts, pd.DataFrame(data), note)


def _text(metric: str, value: Any) -> str:
    return percent(value) if METRICS[metric].unit == "%" else number(value)


def center_bias(comparison: Comparison) -> Table | None:
    """Shows the share of the ceiling on the original images and on off-center views."""
    metric, first = "retention_of_ceiling", comparison.first
    if not comparison.several:
        study = first.off_center_study
        if study is None:
            return None
        results = first.cells(study)
        wanted = [(metric, view, b) for view in VIEW_NAMES for b in _headline_budgets(results)]
        title = "Share of the ceiling (%), original images and off-center views"
        note = "As is: original images. Off: views with the lesion away from the center. The number is the token budget."
        return _by_view(comparison, results, wanted, "center-bias", title, note)
    values = {
        run.name: {view: run.at(metric, comparison.budget_of(run), run.off_center_study, view) for view in VIEW_NAMES}
        for run in comparison.runs
        if run.off_center_study is not None
    }
    if not values:
        return None
    rows = _rows(comparison, {run.name: values.get(run.name, {}).get(OFF_CENTER, {}) for run in comparison.runs})
    texts, data = [], []
    for method, run in rows:
        shares = [values[run.name][view].get(method, np.nan) for view in VIEW_NAMES]
        texts.append([*map(percent, shares), counts(run.cells(str(run.off_center_study), OFF_CENTER), method)])
        data.append({"run": run.name, "method": method, "as_is": shares[0], "off_center": shares[1]})
    title = "Share of the ceiling, original images and off-center views"
    columns = ["As is (%)", "Off-center (%)", "n (masks), off-center"]
    return _pivot(comparison, "center-bias", title, rows, columns, texts, pd.DataFrame(data), _SEEDS_NOTE)


def recipe(comparison: Comparison) -> Table | None:
    """Shows one row per change to the lesion-first recipe."""
    results = comparison.first.cells("recipe")
    if results.empty:
        return None
    budgets = _headline_budgets(results)
    views = [view for view in VIEW_NAMES if view in set(results["view"])]
    wanted = [(m, view, b) for m, only in _RECIPE for view in views for b in (only or budgets) if b in budgets]
    note = (
        "Ceil.: share of the ceiling (%). F1: macro F1 (%). Bal.: balanced accuracy (%). As is: original images. Off: off-center "
        "views. The number is the token budget."
    )
    return _by_view(comparison, results, wanted, "recipe", "The lesion-first recipe with one part changed at a time", note)


def _by_view(
    comparison: Comparison, results: pd.DataFrame, wanted: list[tuple[str, str, float]], name: str, title: str, note: str
) -> Table:
    """Makes one row per method, one column per (metric, view, budget) of `wanted`; the CSV has every measure of these cells."""
    keys, metrics = ["view", "budget", "method", "metric"], list(shown_in("interval"))
    rows = _rows(comparison, {comparison.first.name: set(results["method"])})
    means = results.groupby(["method", "view", "budget"])[metrics].mean()
    values = [[float(means[m].get((method, view, b), np.nan)) for m, view, b in wanted] for method, _ in rows]
    several = len({metric for metric, _, _ in wanted}) > 1
    heads = [
        f"{METRICS[metric].short + ' ' if several else ''}{'off' if view == OFF_CENTER else 'as is'} {budget_text(budget)}"
        for metric, view, budget in wanted
    ]
    views = list(dict.fromkeys(view for _, view, _ in wanted))
    texts = [
        [*map(percent, line), *[counts(results[results["view"] == view], method) for view in views]]
        for (method, _), line in zip(rows, values)
    ]
    long = results.melt(id_vars=keys[:3], value_vars=metrics, var_name="metric")
    return _pivot(
        comparison,
        name,
        title,
        rows,
        [*heads, *[f"n (masks) {VIEW_NAMES[view]}" for view in views]],
        texts,
        long.groupby(keys, sort=False)["value"].agg(value="mean", sd="std", seeds="count").reset_index(),
        f"{note} {seeds_note(results)} {BOLD_NOTE}",
        values,
        more="accuracy, macro F1 and retention of both views too",
    )


def _headline_budgets(results: pd.DataFrame) -> list[float]:
    measured = set(results["budget"])
    return [b for b in HEADLINE_BUDGETS if b in measured] or sorted(measured)[:3]


# Several runs: what they are, and how they differ.


def runs(comparison: Comparison) -> Table:
    """Shows what each run is made of."""
    data = [
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
        }
        for run in comparison.runs
    ]
    rows = [
        [
            *(str(entry[name]) for name in ("run", "dataset", "backbone")),
            look(run.focus).name,
            *(str(entry[name]) for name in ("methods", "classes")),
            f"{run.n:,} ({run.n_masked:,})",
            ", ".join(map(str, run.seeds)),
        ]
        for run, entry in zip(comparison.runs, data)
    ]
    columns = ["Run", "Data set", "Backbone", "Main method", "Methods", "Classes", "n (masks)", "Seeds"]
    note = "Main method: the one that is saved as the model. n (masks): validation images, and those with a lesion mask."
    return Table("runs", "The runs", columns, rows, pd.DataFrame(data), note, labels=4)


_TEST_COLUMNS = ["Difference (points)", "95% interval", "p", "p (Holm)", "n", "Seeds"]


def _test_cells(test: dict[Any, Any]) -> list[str]:
    interval = f"{points(test['low'])} to {points(test['high'])}"
    numbers = [points(test["difference"]), interval, probability(test["p"]), probability(test["p_holm"])]
    return [*numbers, f"{test['n']:,}", str(test["seeds"])]


def differences(comparison: Comparison) -> Table | None:
    """Shows each run minus the first at the headline budget; the CSV has every budget and test."""
    pairs = comparison.pairs
    if pairs.empty:
        return None
    shown = comparison.at_headline(pairs)
    shown = shown[(shown["view"] == AS_IS) | (shown["metric"] == "retention")]
    shown = shown[shown["metric"].isin(("retention", "accuracy", "macro_f1"))]
    shown = shown[shown["minus_method"].isin([m for m in comparison.first.emphasized if m != "darkness"])]
    tests = shown.to_dict("records")
    keys = [(test["run"], test["method"], test["minus_method"]) for test in tests]
    order = sorted(range(len(tests)), key=lambda i: keys.index(keys[i]))  # the tests of one pair of methods below each other
    first, many = comparison.first.name, len(comparison.runs) > 2
    rows = []
    for test in (tests[i] for i in order):
        method, other = look(test["method"]).name, look(test["minus_method"]).name
        names = [method if test["method"] == test["minus_method"] else f"{method} − {other}"]
        names += [METRICS[test["metric"]].title, VIEW_NAMES[test["view"]]]
        rows.append([*([test["run"]] if many else []), *names, *_test_cells(test)])
    columns = [*(["Run"] if many else []), "Method", "Measure", "Images", *_TEST_COLUMNS]
    return Table(
        "differences",
        f"{'Each run' if many else comparison.runs[1].name} minus {first}, on the same images",
        columns,
        rows,
        pairs,
        f"Positive: higher than {first}. Paired permutation tests on the images that both runs have; Holm's correction covers all "
        "tests of a measure in the CSV.",
        labels=4 if many else 3,
        breaks=changes([keys[i] for i in order]),
        more="all methods, budgets and measures",
    )


# One run: its studies.


def by_budget(run: ReportRun, study: str) -> Table | None:
    """Shows mean and deviation over seeds with one row per budget and method, like the paper's robustness table."""
    results = run.cells(study, AS_IS)
    if results.empty:
        return None
    metrics = _MASK_FREE_METRICS if study == "mask-free" else shown_in("interval")
    methods = run.with_controls(results["method"])
    rows: list[list[str]] = []
    data: list[dict[str, object]] = []
    bold: set[tuple[int, int]] = set()
    breaks: set[int] = set()
    for budget in sorted(results["budget"].unique()):
        cells = results[np.isclose(results["budget"], budget)]
        grouped = cells.groupby("method")[list(metrics)]
        means, deviations = (table.reindex(methods) for table in (grouped.mean(), grouped.std()))
        seeds = cells["method"].value_counts().reindex(methods, fill_value=0)
        for m in methods:
            numbers = {name: v for c in metrics for name, v in ((c, means.loc[m, c]), (f"{c}_sd", deviations.loc[m, c]))}
            data.append({"budget": budget, "method": m, "seeds": int(seeds[m]), **numbers})
        if budget not in _headline_budgets(results):
            continue
        breaks.add(len(rows))
        bold |= {(len(rows) + r, c) for r, c in best(methods, means.to_numpy().tolist(), labels=2)}
        for m in methods:
            texts = [_mean_text(c, means.loc[m, c], deviations.loc[m, c]) for c in metrics]
            ends = [counts(cells, m), str(seeds[m]) if seeds[m] else NOT_MEASURED]
            rows.append([budget_text(budget), look(m).name, *texts, *ends])
    return Table(
        study,
        _STUDY_TITLES.get(study, f"Study “{study}”"),
        ["Budget", "Method", *[METRICS[m].heading for m in metrics], "n (masks)", "Seeds"],
        rows,
        pd.DataFrame(data),
        "Mean ± standard deviation over seeds, which is the spread between training runs and not between images; a single seed has "
        f"no deviation. {BOLD_NOTE} {NOT_MEASURED}: not measured.",
        labels=2,
        bold=frozenset(bold),
        breaks=frozenset(breaks - {0}),
        more="all budgets",
    )


def _mean_text(metric: str, mean: Any, deviation: Any) -> str:
    if METRICS[metric].unit == "%":
        return with_spread(percent(mean), percent(deviation))
    return with_spread(number(mean), number(deviation))


def paired_seeds(run: ReportRun) -> list[Table | None]:
    """Shows the study's main method, and the paper's recipe beside it, minus each other method seed by seed."""
    results = run.cells("robustness", AS_IS)
    if results.empty:
        return []
    methods = run.ordered(results["method"])
    main_method = run.focus_of(methods)
    tables = [_paired_seeds(run, results, main_method, "paired-seeds")]
    if PAPER_RECIPE in methods and main_method != PAPER_RECIPE:
        tables.append(_paired_seeds(run, results, PAPER_RECIPE, "paired-seeds-paper"))
    return tables


def _paired_seeds(run: ReportRun, results: pd.DataFrame, reference: str, file: str) -> Table | None:
    metrics = ("accuracy", "macro_f1", "retention")
    gaps = paired_seed_table(results, reference, metrics)
    if gaps.empty:
        return None
    cells = gaps.set_index(["budget", "method_b", "metric"])
    others = [m for m in run.with_controls(results["method"]) if m != reference]
    rows = []
    for budget in sorted(gaps["budget"].unique()):
        for method in others:
            keys = [(budget, method, m) for m in metrics]
            gaps_of: dict[Any, Any] = {k: cells.loc[[k]].iloc[0] for k in keys if k in cells.index}
            texts = [
                with_spread(points(gaps_of[k]["mean"], 2), percent(gaps_of[k]["std"], 2)) if k in gaps_of else NOT_MEASURED
                for k in keys
            ]
            seeds = next((str(gap["seeds"]) for gap in gaps_of.values()), NOT_MEASURED)
            rows.append([budget_text(budget), look(method).name, *texts, seeds])
    name = look(reference).name
    return Table(
        file,
        f"{name} minus each other method, seed by seed (percentage points)",
        ["Budget", f"{name} minus", "Δ accuracy", "Δ macro F1", "Δ retention", "Seeds"],
        rows,
        gaps,
        "Mean of the differences between runs with the same seed, ± their standard deviation; n (masks) = "
        f"{counts(results, reference)}. {NOT_MEASURED}: not measured on the same images. ToMe merges patches and has no retention.",
        labels=2,
        breaks=frozenset(range(len(others), len(rows), len(others))),
    )


def beside_paper(run: ReportRun) -> Table | None:
    """Shows the paper's number, this run's number and the difference, for every study that both have on the same data set."""
    original = run.results[run.results["view"] == AS_IS]
    parts = [paper.beside_paper(original, s).assign(study=s) for s in paper.studies_of(run.source) if s in run.studies]
    if not parts:
        return None
    data = pd.concat(parts, ignore_index=True)
    data = data[data["ours"].notna()]
    shown = data[np.isclose(data["budget"], HEADLINE) & data["paper"].notna()]
    # Studies share trainings: a row that says the same again is left out, one with other seeds is another number.
    shown = shown.drop_duplicates(["method", "metric", "paper", "ours", "seeds"])
    if shown.empty:
        return None
    rows = []
    for r in shown.to_dict("records"):
        digits = 1 if METRICS[r["metric"]].unit == "%" else 2
        theirs, ours = (with_spread(number(r[c], digits), number(r[f"{c}_sd"], digits)) for c in ("paper", "ours"))
        difference = f"{r['difference']:+.{digits}f}".replace("-", "−")
        rows.append([r["study"], METRICS[r["metric"]].heading, look(r["method"]).name, theirs, ours, difference, str(r["seeds"])])
    return Table(
        "beside-paper",
        f"The paper's numbers and those of this run at budget {budget_text(HEADLINE)}",
        ["Study", "Measure", "Method", "Paper", "This run", "Difference", "Seeds"],
        rows,
        data[["study", "method", "budget", "metric", "paper", "paper_sd", "ours", "ours_sd", "seeds", "difference"]],
        "± standard deviation over seeds, where there are several. "
        f"This run: {plural(run.n, 'image')} ({run.n_masked:,} with a mask)"
        + ("; the paper: 5,067 (155)." if run.source == "isic" else "."),
        labels=3,
        breaks=changes(list(zip(shown["study"], shown["metric"]))),
        more=f"all {len(data):,} values, with every budget and the controls",
    )


# One run: tests.


def significance(run: ReportRun) -> Table | None:
    """Shows tests of the run's main method against the paper's recipe and the controls; the CSV has every test of the run."""
    tests = run.tests
    shown = tests[(tests["method_a"] == run.focus) & np.isclose(tests["budget"], run.headline)]
    rows, keys = [], []
    for view, metrics in ((AS_IS, ("retention", "accuracy", "macro_f1")), (OFF_CENTER, ("retention",))):
        for metric in metrics:
            of_metric = shown[(shown["view"] == view) & (shown["metric"] == metric)]
            by_method = {test["method_b"]: test for test in of_metric.to_dict("records")}
            for other in (run.paper_method, *_COMPARED):
                # Keeping everything is no opponent in a contest about what to keep.
                if other in by_method and (metric, other) != ("retention", "no-pruning"):
                    keys.append((view, metric))
                    names = [METRICS[metric].title, VIEW_NAMES[view], look(str(other)).name]
                    rows.append([*names, *_test_cells(by_method[other])])
    if not rows:
        return None
    name = look(run.focus).name
    return Table(
        "significance",
        f"{name} against the main alternatives at budget {budget_text(run.headline)}",
        ["Measure", "Images", f"{name} minus", *_TEST_COLUMNS],
        rows,
        tests,
        f"Positive: {name} is higher. Paired permutation tests on the images that both methods have; groups of images are "
        "exchanged as a whole, all seeds together. Holm's correction covers all comparisons of a measure in the CSV, not only "
        "those shown.",
        labels=3,
        breaks=changes(keys),
        more=f"all {plural(len(tests), 'test')}",
    )
