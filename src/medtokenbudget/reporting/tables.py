"""Every table of a report of one or more runs, in its order; their words are in `templates/tables.yaml`.

Tables of values (all methods, sweeps, studies) are one `_pivot`: a row per method, run and budget, a column per measure, view and
budget. The others list a frame. Each function returns a table, or None when the runs have nothing to show in it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import yaml

from medtokenbudget import measures
from medtokenbudget.backbone.views import OFF_CENTER
from medtokenbudget.config import HEADLINE_BUDGET, HEADLINE_BUDGETS, PAPER_RECIPE
from medtokenbudget.data.masks import prevalence_table
from medtokenbudget.data.readers import ISIC_CLASSES
from medtokenbudget.measures import METRICS, NOT_MEASURED, budget_text, number, percent, plural, points, shown_in
from medtokenbudget.metrics import ratio, reachable
from medtokenbudget.model.looks import look
from medtokenbudget.reporting.comparison import Comparison
from medtokenbudget.reporting.intervals import ReportRun
from medtokenbudget.reporting.table import Table, best, changes
from medtokenbudget.runs import paper
from medtokenbudget.runs.run import AS_IS, summarize
from medtokenbudget.runs.statistics import lesion_rows, paired_seed_table
from medtokenbudget.runs.studies import STUDIES
from medtokenbudget.runs.sweep import Study

VIEW_NAMES = {AS_IS: "original", OFF_CENTER: "off-center"}
_VIEW_HEADS = {AS_IS: "orig.", OFF_CENTER: "off"}
_BOLD = "Bold: best value, not counting NoPruning and Oracle."
_BRACKETS = "Brackets: 95% bootstrap interval over groups of images."
_TESTED = ("retention", "accuracy", "macro_f1")
"""Measures of the tests on the page; the CSV has all."""
_MOST_WORST = 10

Column = tuple[str, str, str, float | None]
"""Heading, metric, view and budget of a column; the budget is None where each row has its own."""


def make_tables(comparison: Comparison, named: bool = True) -> list[Table]:
    """Make every table that the runs have numbers for; unless `named`, images have numbers in place of their names."""
    run, sweeps = comparison.first, sorted(shown_in("sweep"), key=lambda metric: metric != "retention")
    tables = [
        *([runs(comparison)] if comparison.several else []),
        leaderboard(comparison),
        main(comparison),
        *[sweep(comparison, metric) for metric in sweeps],
        further_measures(comparison),
        both_views(comparison, "center-bias", lambda run: run.off_center_study),
        significance(comparison),
        *study_tables(comparison),
        both_views(comparison, "recipe", lambda run: "recipe", ("macro_f1", "balanced_accuracy")),
    ]
    if not comparison.several:
        tables += [
            strata(run, run.by_size, "size-strata", "Lesion size"),
            strata(run, run.by_class, "class-strata", "Class"),
            strata(run, run.by_attribute, "attribute-strata", "Stratum"),
            new_lesions(run),
            own_validation(run),
            promises(run),
            annotators(run),
            worst(run, named),
            beside_paper(run),
            subset(run),
            prevalence(run),
        ]
    return [table for table in tables if table is not None]


@cache
def _templates() -> dict[str, dict[str, str]]:
    text = (Path(__file__).parent / "templates" / "tables.yaml").read_text(encoding="utf-8")
    return {str(name): dict(words) for name, words in yaml.safe_load(text).items()}


def _words(name: str, **values: Any) -> dict[str, Any]:
    return {key: text.format(brackets=_BRACKETS, **values) for key, text in _templates()[name].items()}


# Tables of values.


def _pivot(
    comparison: Comparison,
    name: str,
    columns: Sequence[Column],
    words: dict[str, Any],
    study: Callable[[ReportRun], str | None] = lambda run: run.study,
    budgets: Sequence[float] = (),
    intervals: bool = False,
    also: Collection[str] = (),
) -> Table | None:
    """Make a table of the mean over seeds, with the headline `study` of each run unless told otherwise; None where no run has a
    value.

    With `budgets` the rows repeat for each of them, with the deviation over seeds. Only the headline study has `intervals`. `also`
    are further measures of the CSV.
    """
    several, views = comparison.several, list(dict.fromkeys(view for _, _, view, _ in columns))
    metrics = {metric for _, metric, _, _ in columns}
    data = pd.concat([run.values[run.values["study"] == study(run)].assign(run=run.name) for run in comparison.runs])
    data = data[data["view"].isin(views) & data["metric"].isin({*metrics, *also})]
    if not data["metric"].isin(metrics).any():
        return None
    values: dict[Any, Any] = {(v.run, v.method, v.view, v.budget, v.metric): v for v in data.itertuples()}
    results = {run.name: run.cells(study(run)) for run in comparison.runs}
    pairs = _rows(comparison, results)
    labels, rows, bold = 1 + bool(budgets) + several, [], set()
    for budget in budgets or (None,):
        numbers = []
        for method, run in pairs:
            default = comparison.budget_of(run) if budget is None else budget
            cells = [values.get((run.name, method, view, default if b is None else b, m)) for _, m, view, b in columns]
            numbers.append([np.nan if cell is None else cell.value for cell in cells])
            counted = results[run.name]
            counted = counted if budget is None else counted[np.isclose(counted["budget"], budget)]
            row = [look(method).title, *([run.name] if several else []), *(_text(cell, intervals, bool(budgets)) for cell in cells)]
            row += [_counts(counted[counted["view"] == view], method) for view in views]
            seeds = max((cell.seeds for cell in cells if cell is not None), default=NOT_MEASURED)
            rows.append(row if budget is None else [budget_text(budget), *row, str(seeds)])
        # In a comparison of runs the best row of a column would be one of another data set.
        winners = best([method for method, _ in pairs], numbers, labels) if not several else ()
        bold |= {(len(rows) - len(pairs) + r, c) for r, c in winners}
    heads = ["Method", *(["Run"] if several else []), *[heading for heading, *_ in columns]]
    heads += [f"n (masks) {VIEW_NAMES[view]}" if len(views) > 1 else "n (masks)" for view in views]
    csv = ["run"] * several + ["view", "method", "budget", "metric", "value", "sd", "seeds"] + ["low", "high", "n"] * intervals
    over = "Mean over the seeds of each run." if several else f"{_seeds(results[comparison.first.name])} {_BOLD}"
    return Table(
        name,
        columns=["Budget", *heads, "Seeds"] if budgets else heads,
        rows=rows,
        data=data[csv],
        labels=labels,
        bold=frozenset(bold),
        breaks=changes([row[0] for row in rows] if budgets else [method for method, _ in pairs] if several else []),
        **{**words, "note": f"{words['note']} {over} {NOT_MEASURED}: not measured."},
    )


def _text(cell: Any, interval: bool, deviation: bool) -> str:
    if cell is None:
        return NOT_MEASURED
    if interval:
        return measures.with_interval(cell.value, cell.low, cell.high)
    return METRICS[cell.metric].text(cell.value, cell.sd if deviation else None)


def _rows(comparison: Comparison, results: dict[str, pd.DataFrame]) -> list[tuple[str, ReportRun]]:
    first, methods = comparison.first, {name: set(frame["method"]) for name, frame in results.items()}
    every = [method for frame in results.values() for method in frame["method"]]
    if not comparison.several:
        # Every control has a row, measured or not: a comparison without them proves little.
        return [(method, first) for method in first.with_controls(every)]
    return [(method, run) for method in first.ordered(every) for run in comparison.runs if method in methods[run.name]]


def _counts(results: pd.DataFrame, method: str) -> str:
    """Write `400 (155)`: labeled images, and images that retention was measured on."""
    rows = results[results["method"] == method]
    return f"{int(rows['n'].max()):,} ({int(rows['n_masked'].max()):,})" if len(rows) else NOT_MEASURED


def _seeds(results: pd.DataFrame) -> str:
    seeds = ", ".join(map(str, sorted(results["seed"].unique())))
    return f"Mean over seeds {seeds}." if "," in seeds else f"One training run per method (seed {seeds})."


def _headline_budgets(results: Sequence[pd.DataFrame]) -> list[float]:
    measured = {budget for table in results for budget in table["budget"]}
    return [b for b in HEADLINE_BUDGETS if b in measured] or sorted(measured)[:3]


def _at_headline(comparison: Comparison) -> str:
    return "headline" if comparison.headline is None else budget_text(comparison.headline)


def main(comparison: Comparison) -> Table | None:
    """Show every method at the headline budget, with intervals; the CSV has all budgets."""
    metrics = ("retention", "retention_of_ceiling", "accuracy", "macro_f1")
    columns: list[Column] = [(METRICS[m].heading, m, AS_IS, comparison.headline) for m in metrics]
    words = _words("main", budget=_at_headline(comparison))
    return _pivot(comparison, "main", columns, words, intervals=True, also=shown_in("interval"))


def sweep(comparison: Comparison, metric: str, study: Study | None = None) -> Table | None:
    """Show one measure over all budgets of the headline study, or of another `study`."""
    cells = [run.cells(study.name if study else run.study, AS_IS) for run in comparison.runs]
    budgets = sorted({budget for table in cells for budget in table["budget"]})
    columns: list[Column] = [(budget_text(b), metric, AS_IS, b) for b in budgets]
    if study is not None:
        words = _words("sweep", title=study.title) | {"section": "studies"}
        return _pivot(comparison, study.name, columns, words, lambda run: study.name)
    words = _words("sweep", title=f"{METRICS[metric].term} ({METRICS[metric].unit}) at all budgets")
    table = _pivot(comparison, f"{metric.replace('_', '-')}-sweep", columns, words)
    if table is None or metric != "retention" or comparison.several:
        return table
    # NoPruning ignores the budget, so it has another ceiling than the rest.
    ceiling = cells[0][cells[0]["method"] != "no-pruning"].groupby("budget")["ceiling"].mean().reindex(budgets)
    data = ceiling.rename("value").reset_index().assign(method="ceiling", view=AS_IS, metric=metric)
    return replace(
        table,
        rows=[*table.rows, ["Ceiling", *map(percent, ceiling), ""]],
        data=pd.concat([table.data, data], ignore_index=True),
        breaks=frozenset({len(table.rows)}),
    )


def further_measures(comparison: Comparison) -> Table | None:
    columns: list[Column] = [(METRICS[m].heading, m, AS_IS, comparison.headline) for m in shown_in("further")]
    words = _words("further-measures", budget=_at_headline(comparison))
    table = _pivot(comparison, "further-measures", columns, words)
    # Not every one of these measures is better the higher it is.
    return None if table is None else replace(table, bold=frozenset(), note=table.note.replace(f" {_BOLD}", ""))


def both_views(
    comparison: Comparison, name: str, study: Callable[[ReportRun], str | None], at_headline: Sequence[str] = ()
) -> Table | None:
    """Show the share of the ceiling, and other metrics at the headline budget, on original images and off-center views."""
    results = [run.cells(study(run)) for run in comparison.runs]
    views = [view for view in VIEW_NAMES if any(view in set(table["view"]) for table in results)]
    wanted = [("retention_of_ceiling", view, budget) for view in views for budget in _headline_budgets(results)]
    wanted += [(metric, view, HEADLINE_BUDGET) for metric in at_headline for view in views]
    columns: list[Column] = []
    for metric, view, budget in wanted:
        short = f"{METRICS[metric].short} " if at_headline else ""
        columns.append((f"{short}{_VIEW_HEADS[view]} {budget_text(budget)}", metric, view, budget))
    return _pivot(comparison, name, columns, _words(name), study, also=(*shown_in("interval"), *shown_in("further")))


def study_tables(comparison: Comparison) -> list[Table | None]:
    """Make the tables of every study, each in the form that it asks for; the headline study has its tables above."""
    names = dict.fromkeys(name for run in comparison.runs for name in run.studies)
    known = [*(name for name in STUDIES if name in names), *(name for name in names if name not in STUDIES)]
    tables: list[Table | None] = []
    for study in (STUDIES.get(name) or Study(name, ()) for name in known):
        if study.form == "sweep":
            tables.append(sweep(comparison, "accuracy", study))
        elif study.form == "budgets" and study.name != comparison.first.study:
            tables.append(by_budget(comparison, study))
        if study.paired and not comparison.several:
            tables += paired_seeds(comparison.first, study)
    return tables


def by_budget(comparison: Comparison, study: Study) -> Table | None:
    """Show mean and deviation over seeds with one row per budget and method, like the paper's robustness table."""
    columns: list[Column] = [(METRICS[m].heading, m, AS_IS, None) for m in (*shown_in("interval"), *study.metrics)]
    budgets = _headline_budgets([run.cells(study.name, AS_IS) for run in comparison.runs])
    words = _words("study", title=study.title or f"Study “{study.name}”") | {"section": "studies"}
    return _pivot(comparison, study.name, columns, words, lambda run: study.name, budgets)


# Tables that list a frame: seeds, several runs, tests, the paper, and the images of one run.


def _listing(name: str, rows: pd.DataFrame, columns: Mapping[str, Any], **table: Any) -> Table:
    """Make a table with one row per row of a frame: under each heading a column, or what a function writes of the row."""
    texts = [
        [str(row[write]) if isinstance(write, str) else write(row) for write in columns.values()] for row in rows.to_dict("records")
    ]
    return Table(name, columns=list(columns), rows=texts, **{"data": rows, **table})


def paired_seeds(run: ReportRun, study: Study) -> list[Table]:
    """Show the study's main method, and the paper's recipe next to it, minus each other method seed by seed."""
    results, metrics = run.cells(study.name, AS_IS), ("accuracy", "macro_f1", "retention")
    main_method = run.focus_of(run.ordered(results["method"]))
    names = {main_method: "paired-seeds"}
    if PAPER_RECIPE in set(results["method"]):
        names.setdefault(PAPER_RECIPE, "paired-seeds-paper")
    tables = []
    for reference, name in names.items():
        gaps, title = paired_seed_table(results, reference, metrics), look(reference).title
        if gaps.empty:
            continue
        by_cell: dict[Any, Any] = {(gap.budget, gap.method_b, gap.metric): gap for gap in gaps.itertuples()}
        others, rows = [m for m in run.with_controls(results["method"]) if m != reference], []
        for budget, method in ((b, m) for b in sorted(gaps["budget"].unique()) for m in others):
            cells = [by_cell.get((budget, method, metric)) for metric in metrics]
            texts = [NOT_MEASURED if g is None else measures.with_spread(points(g.mean, 2), percent(g.std, 2)) for g in cells]
            seeds = next((str(gap.seeds) for gap in cells if gap is not None), NOT_MEASURED)
            rows.append([budget_text(budget), look(method).title, *texts, seeds])
        deltas = [f"Δ {METRICS[metric].term.lower().replace('f1', 'F1')}" for metric in metrics]
        heads, breaks = ["Budget", f"{title} minus", *deltas, "Seeds"], changes([row[0] for row in rows])
        words = _words("paired-seeds", method=title, n=_counts(results, reference))
        tables.append(Table(name, columns=heads, rows=rows, data=gaps, labels=2, breaks=breaks, section="studies", **words))
    return tables


def runs(comparison: Comparison) -> Table:
    data = pd.DataFrame(
        {
            "run": run.name,
            "dataset": run.info.dataset,
            "backbone": str(run.info.backbone.get("name", NOT_MEASURED)),
            "main": run.focus,
            "methods": len(run.methods),
            "classes": len(run.info.classes),
            "n": run.n,
            "n_masked": run.n_masked,
            "seeds": " ".join(map(str, run.seeds)),
            "headline": comparison.budget_of(run),
        }
        for run in comparison.runs
    )
    columns = {
        "Run": "run",
        "Data set": "dataset",
        "Backbone": "backbone",
        "Main method": lambda row: look(row["main"]).title,
        "Methods": "methods",
        "Classes": "classes",
        "n (masks)": lambda row: f"{row['n']:,} ({row['n_masked']:,})",
        "Seeds": "seeds",
    }
    nearest = f"headline numbers belong to the budget nearest to {budget_text(HEADLINE_BUDGET)} of each run."
    apart = f" The runs have no budget in common: {nearest}" if comparison.headline is None else ""
    return _listing("runs", data, columns, labels=4, **_words("runs", apart=apart))


def leaderboard(comparison: Comparison) -> Table | None:
    """Rank the methods of a run, or the main methods of several and the controls, ties together; the CSV has all."""
    boards = comparison.leaderboard if comparison.headline is not None else {}
    main_board = next((boards[m, AS_IS] for m in ("retention_of_ceiling", "macro_f1") if (m, AS_IS) in boards), None)
    if main_board is None or len(main_board) < 2:
        return None
    parts = [board.assign(metric=metric, view=view) for (metric, view), board in boards.items()]
    data = pd.concat(parts, ignore_index=True)
    data[["method", "run"]] = data["method"].str.split(" of ", n=1, expand=True)
    cells: dict[Any, Any] = {(r.method, r.run, r.metric, r.view): r for r in data.itertuples()}
    named = [tuple(name.split(" of ", 1)) for name in main_board["method"]]
    rows = []
    for method, run in named:
        row = [look(method).title, *([run] if comparison.several else [])]
        for metric, view in boards:
            cell = cells.get((method, run, metric, view))
            if cell is None or pd.isna(cell.value):
                row += [NOT_MEASURED, NOT_MEASURED]
            else:
                ranks = dict.fromkeys((f"{cell.first:.0f}", f"{cell.last:.0f}"))
                row += [measures.with_interval(cell.value, cell.low, cell.high), " to ".join(ranks)]
        rows.append(row)
    heads = [f"{METRICS[metric].title}{', off-center' if view == OFF_CENTER else ''}" for metric, view in boards]
    ties = [str(tie) for tie in main_board["tie"].fillna(0)]
    what = "The main methods and the controls" if comparison.several else "The methods"
    return Table(
        "leaderboard",
        columns=["Method", *(["Run"] if comparison.several else []), *(text for head in heads for text in (f"{head} (%)", "Rank"))],
        rows=rows,
        data=data,
        labels=1 + comparison.several,
        breaks=changes(ties),
        **_words("leaderboard", what=what, budget=_at_headline(comparison), n=int(main_board["n"].max())),
    )


def significance(comparison: Comparison) -> Table | None:
    """Show tests at the headline budget: each run minus the first, or the main method minus the main alternatives."""
    run, several, many, tests = comparison.first, comparison.several, len(comparison.runs) > 2, comparison.headline_tests
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
    ranks: dict[Any, list[str]] = {"metric": list(_TESTED), "minus_method": opponents, "view": list(VIEW_NAMES)}
    ranks |= {column: list(tests[column].unique()) for column in ("run", "method")}
    order = list(dict.fromkeys([*blocks, "view", "metric", "minus_method"]))
    tests = tests.sort_values(order, key=lambda column: column.map(ranks[column.name].index))
    method = look(run.focus).title

    def pair(test: Any) -> str:
        title, other = look(test["method"]).title, look(test["minus_method"]).title
        return other if not several else title if title == other else f"{title} − {other}"

    columns = {
        **({"Run": "run"} if many else {}),
        "Method" if several else f"{method} minus": pair,
        "Measure": lambda test: METRICS[test["metric"]].title,
        "Images": lambda test: VIEW_NAMES[test["view"]],
        "Difference (points)": lambda test: points(test["difference"]),
        "95% interval": lambda test: f"{points(test['low'])} to {points(test['high'])}",
        "p": lambda test: measures.probability(test["p"]),
        "p (Holm)": lambda test: measures.probability(test["p_holm"]),
        "n": lambda test: f"{test['n']:,}",
        "Seeds": "seeds",
    }
    values = {"method": method, "budget": budget_text(run.headline), "tests": plural(len(comparison.tests), "test")}
    values |= {"minuend": "Each run" if many else comparison.runs[-1].name, "first": run.name}
    name, breaks = "differences" if several else "significance", changes(list(zip(*(tests[column] for column in blocks))))
    return _listing(name, tests, columns, data=comparison.tests, labels=4 if many else 3, breaks=breaks, **_words(name, **values))


def beside_paper(run: ReportRun) -> Table | None:
    """Show the paper's number, this run's number and the difference, for every study that both have on the same data set."""
    original = run.results[run.results["view"] == AS_IS]
    parts = [paper.beside_paper(original, s).assign(study=s) for s in paper.studies_of(run.source) if s in run.studies]
    if not parts:
        return None
    data = pd.concat(parts, ignore_index=True)
    data = data[data["ours"].notna()]
    # Studies share trainings: a row that says the same again is left out, one with other seeds is another number.
    rows = data[np.isclose(data["budget"], HEADLINE_BUDGET) & data["paper"].notna()]
    rows = rows.drop_duplicates(["method", "metric", "paper", "ours", "seeds"])
    if rows.empty:
        return None

    def digits(row: Any) -> int:
        return 1 if METRICS[row["metric"]].unit == "%" else 2

    def spread(row: Any, whose: str) -> str:
        return measures.with_spread(number(row[whose], digits(row)), number(row[f"{whose}_sd"], digits(row)))

    columns = {
        "Study": "study",
        "Measure": lambda row: METRICS[row["metric"]].heading,
        "Method": lambda row: look(row["method"]).title,
        "Paper": lambda row: spread(row, "paper"),
        "This run": lambda row: spread(row, "ours"),
        "Difference": lambda row: f"{row['difference']:+.{digits(row)}f}".replace("-", "−"),
        "Seeds": "seeds",
    }
    theirs = f"; the paper: {sum(paper.subsets()['Full validation'].values()):,} (155)" if run.source == "isic" else ""
    values = {"images": plural(run.n, "image"), "n_masked": run.n_masked, "theirs": theirs, "values": len(data)}
    words = _words("beside-paper", budget=budget_text(HEADLINE_BUDGET), **values)
    data = data[["study", "method", "budget", "metric", "paper", "paper_sd", "ours", "ours_sd", "seeds", "difference"]]
    breaks = changes(list(zip(rows["study"], rows["metric"])))
    return _listing("beside-paper", rows, columns, data=data, labels=3, breaks=breaks, **words)


def strata(run: ReportRun, data: pd.DataFrame, name: str, first: str) -> Table | None:
    """Show retention as a share of the ceiling with one row per stratum; the CSV has every method."""
    if data.empty:
        return None
    methods = [m for m in run.emphasized if m in set(data["method"])]
    kinds = ["property"] if "property" in data else []
    rows, keys = [], []
    for key, cells in data.groupby([*kinds, "stratum"], sort=False):
        names = [str(part) for part in key]
        keys.append(names[0] if kinds else "")
        if kinds and names[0] in keys[:-1]:
            names[0] = ""
        values = cells.set_index("method").reindex(methods)[["value", "low", "high"]].to_numpy(float)
        texts = [measures.with_interval(*value) for value in values]
        rows.append([*names, str(int(cells["n"].max())), percent(cells["ceiling"].iloc[0]), *texts])
    heads = [*[kind.capitalize() for kind in kinds], first, "n", "Ceiling (%)", *[look(m).title for m in methods]]
    words = _words(name, budget=budget_text(run.headline), seeds=_seeds(run.main))
    data = data.drop(columns=["study", "dataset", "view"], errors="ignore")
    return Table(name, columns=heads, rows=rows, data=data, labels=1 + len(kinds), breaks=changes(keys), **words)


def worst(run: ReportRun, named: bool = True) -> Table | None:
    """Show the images with the lowest retention of the run's main method, by name or by their place in the table."""
    data = lesion_rows(run.focus_rows)
    if data.empty:
        return None
    seed = data["seed"].min()
    data = data[data["seed"] == seed]
    kept, lesion = (data[name].to_numpy(float) for name in ("kept_lesion", "lesion"))
    data = data.assign(share=ratio(kept, lesion), of_possible=ratio(kept, reachable(lesion, data["k"])))
    data = data.sort_values(["of_possible", "image_id"], kind="stable").head(_MOST_WORST)
    data = data[["image_id", "label_name", "predicted_name", "lesion", "kept_lesion", "k", "share", "of_possible"]]
    data = data.rename(columns={"label_name": "label", "predicted_name": "predicted"})
    if not named:
        data["image_id"] = range(1, len(data) + 1)
    columns = {
        "Image": "image_id",
        "Class": lambda row: row["label"] if isinstance(row["label"], str) else NOT_MEASURED,
        "Predicted": "predicted",
        "Lesion patches kept": lambda row: f"{int(row['kept_lesion'])} of {int(row['lesion'])}",
        "Retention (%)": lambda row: percent(row["share"]),
        "Of ceiling (%)": lambda row: percent(row["of_possible"]),
    }
    words = _words("worst", method=look(run.focus).title, budget=budget_text(run.headline), seed=seed)
    return _listing("worst", data, columns, **words)


def new_lesions(run: ReportRun) -> Table | None:
    """Show classification on all validation images, and on images of lesions (or patients) that no training image shows."""
    seen = [] if run.manifest is None else [name for name, cross in zip(run.manifest.ids, run.manifest.crossing) if cross]
    images = run.headline_rows
    new = images[~images["image_id"].isin(seen)]
    if not 0 < len(new) < len(images) or not run.info.classes:
        return None
    metrics, parts = ("accuracy", "macro_f1", "balanced_accuracy"), []
    for part, of_part in (("all", images), ("new", new)):
        values = summarize(of_part, run.info.classes).melt(["method", "seed", "n"], metrics, "metric").dropna()
        parts.append(values.groupby(["method", "metric"], sort=False, as_index=False)[["value", "n"]].mean().assign(images=part))
    data = pd.concat(parts, ignore_index=True)
    if data.empty:
        return None
    cells = data.set_index(["method", "metric", "images"])["value"]
    counts = data.groupby("images")["n"].max().astype(int)
    pairs = [(metric, part) for metric in metrics for part in ("all", "new")]
    rows = [
        [look(method).title, *(percent(cells.get((method, *pair), np.nan)) for pair in pairs)]
        for method in run.ordered(data["method"])
    ]
    heads = ["Method", *(f"{METRICS[metric].title}{' (%)' if part == 'all' else ', new'}" for metric, part in pairs)]
    words = _words("new-lesions", budget=budget_text(run.headline), n=counts["all"], n_new=counts["new"], seeds=_seeds(run.main))
    return Table("new-lesions", columns=heads, rows=rows, data=data, labels=1, **words)


def own_validation(run: ReportRun) -> Table | None:
    """Show every measure on these images next to the model's own validation, and the difference; None if that is not known."""
    own = (run.info.evaluation or {}).get("own") or []
    data = []
    for metric in shown_in("interval"):
        for before in own:
            rows = run.by_method(metric, before["budget"])
            if before.get(metric) is not None and run.focus in rows.index:
                here: Any = rows.loc[run.focus]
                values = {"own": before[metric], "here": here["value"], "low": here["low"], "high": here["high"]}
                data.append({"metric": metric, "budget": before["budget"], **values, "lost": before[metric] - here["value"]})
    if not data:
        return None
    columns = {
        "Measure": lambda row: METRICS[row["metric"]].heading,
        "Budget": lambda row: budget_text(row["budget"]),
        "Own validation": lambda row: percent(row["own"]),
        "These images": lambda row: measures.with_interval(row["here"], row["low"], row["high"]),
        "Lost (points)": lambda row: points(row["lost"]),
    }
    words = _words("own-validation", method=look(run.focus).title, n=own[0]["n"], n_masked=own[0]["n_masked"])
    return _listing("own-validation", pd.DataFrame(data), columns, labels=2, **words)


def promises(run: ReportRun) -> Table | None:
    guarantees = (run.info.evaluation or {}).get("guarantees") or []
    if not guarantees:
        return None
    columns = {
        "Promised (%)": lambda row: percent(row["retention"], 0),
        "How": lambda row: (
            "on average" if measures.is_missing(row["coverage"]) else f"in {percent(row['coverage'], 0)}% of the images"
        ),
        "Cap (%)": lambda row: percent(row["cap"], 0),
        "Kept (%)": lambda row: percent(row["kept"]),
        "Images that reach it (%)": lambda row: percent(row["reached"]),
        "Patches": lambda row: number(row["tokens"], 1),
        "Patches in calibration": lambda row: number(row["own_tokens"], 1),
    }
    words = _words("promises", groups=guarantees[0]["groups"], n=guarantees[0]["n"])
    return _listing("promises", pd.DataFrame(guarantees), columns, labels=2, **words)


def annotators(run: ReportRun) -> Table | None:
    """Show what each method keeps of the lesion by each annotator, below what one annotator keeps of another's."""
    data = pd.DataFrame((run.info.evaluation or {}).get("annotators") or [])
    if data.empty:
        return None
    cells = data.set_index(["method", "view", "budget"])["share"]
    columns = list(dict.fromkeys(zip(data["view"], data["budget"])))
    rows = [
        [look(method).title, *(percent(cells.get((method, *one), np.nan)) for one in columns)]
        for method in dict.fromkeys(data["method"])
    ]
    heads = ["Method", *(f"{budget_text(budget)}{', off-center' if view != AS_IS else ''}" for view, budget in columns)]
    return Table("annotators", columns=heads, rows=rows, data=data, labels=1, **_words("annotators", n=int(data["n"].max())))


def subset(run: ReportRun) -> Table | None:
    """Show images per class: validation and training, all and with a mask, with the paper's counts for its own data set."""
    images, classes, training = _images(run), list(run.info.classes), run.info.counts.get("train") or {}
    images = images[images["label"] >= 0]
    if images.empty:
        return None
    names = images["label"].map(dict(enumerate(classes)))
    masked = names[(images["lesion"].fillna(0) > 0).to_numpy(bool)]
    parts: dict[tuple[str, str], Any] = {
        ("validation", "Validation"): dict(names.value_counts()),
        ("validation_masks", "with mask"): dict(masked.value_counts()),
        ("training", "Training"): training.get("classes"),
        ("training_masks", "with mask"): training.get("masked_classes"),
    }
    if run.source == "isic" and set(classes) == set(ISIC_CLASSES):
        columns = (
            ("paper_validation", "Paper: validation"),
            ("paper_validation_masks", "Paper: val. masks"),
            ("paper_training_masks", "Paper: train masks"),
        )
        parts |= dict(zip(columns, paper.subsets().values()))
    parts = {key: part for key, part in parts.items() if isinstance(part, dict)}
    counts = pd.DataFrame({column: part for (column, _), part in parts.items()}, classes).fillna(0).astype(int)
    rows = [[str(name), *[f"{n:,}" for n in row]] for name, row in counts.iterrows()]
    rows.append(["All classes", *[f"{n:,}" for n in counts.sum()]])
    data, heads = counts.rename_axis("class").reset_index(), ["Class", *[heading for _, heading in parts]]
    return Table("subset", columns=heads, rows=rows, data=data, breaks=frozenset({len(classes)}), **_words("subset"))


def _images(run: ReportRun) -> pd.DataFrame:
    return run.main_predictions.sort_values("lesion", na_position="last").drop_duplicates("image_id")


def prevalence(run: ReportRun) -> Table | None:
    """Show lesion sizes on the patch grid, next to the paper's for its own data set."""
    images = _images(run)
    images = images[(images["lesion"].fillna(0) > 0).to_numpy(bool)]
    if images.empty:
        return None
    sizes, patches = images["lesion"].to_numpy(int), int(images["n_patches"].iloc[0])
    sizes_of = prevalence_table(sizes, patches).items()
    data = pd.DataFrame([{"statistic": name.capitalize(), **row} for name, row in sizes_of])[["statistic", "patches", "prevalence"]]
    columns: dict[str, Any] = {
        "Statistic": "statistic",
        "Patches": lambda row: number(row["patches"], 1),
        "Of the image (%)": lambda row: percent(row["prevalence"]),
    }
    theirs = ""
    if run.source == "isic":
        data = data.join((paper.prevalence_table().set_index("statistic") / [1, 100]).add_prefix("paper_"), on="statistic")
        columns["Paper: patches"] = lambda row: number(row["paper_patches"], 1)
        columns["Paper: of the image (%)"] = lambda row: percent(row["paper_prevalence"])
        theirs = "; the paper: 155 images, 256 patches"
    words = _words("prevalence", images=plural(len(sizes), "validation image"), patches=patches, theirs=theirs)
    return _listing("prevalence", data, columns, **words)
