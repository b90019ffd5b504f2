"""The page that compares runs: what differs between them, how their main methods do, and every method side by side."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from medtokenbudget.reporting import story
from medtokenbudget.reporting.comparison import Comparison, NamedRun, main_differences
from medtokenbudget.reporting.document import Parts, Plate, Section, bullets, document, terms
from medtokenbudget.reporting.evidence import AS_IS, OFF_CENTER
from medtokenbudget.reporting.glossary import TERMS
from medtokenbudget.reporting.intervals import Difference
from medtokenbudget.reporting.looks import CONTROLS, INK, look
from medtokenbudget.reporting.numbers import budget_text, p_text, percentage, plural, points
from medtokenbudget.reporting.style import MUTED, budget_axis, house_style, legend_below, new_figure, percent_axis, save
from medtokenbudget.reporting.table import Table, records

_COLORS = ("#0072b2", "#d55e00", "#009e73", "#a8577e", "#c98a00", "#6a51a3", "#7a828a", "#3a9bd0")
_MARKERS = "osv^DPXH"
_CURVES = {"retention_of_ceiling": "share of the ceiling (%)", "accuracy": "accuracy (%)", "macro_f1": "macro F1 (%)"}


def page(comparison: Comparison, tables: Sequence[Table], plates: Sequence[Plate]) -> str:
    """The whole HTML file of a comparison."""
    made = Parts(tables, plates)
    names = [run.name for run in comparison.runs]
    lead = f"{plural(len(names), 'run')} side by side: {', '.join(names)}. Differences are relative to {names[0]}."
    sections = [
        Section("summary", "Summary", story.question(), [bullets(sentences(comparison)), *made.tables("runs")]),
        Section(
            "main-methods",
            "The main methods",
            "The main method of each run: the one that `mtb predict` uses.",
            made.plates("retention_of_ceiling", "accuracy", "macro_f1"),
        ),
        Section(
            "differences",
            "Are the differences reliable?",
            "Paired tests for runs that evaluated the same images.",
            made.tables("differences"),
        ),
        Section("methods", "All methods", "", made.tables("main", "retention-sweep")),
        Section(
            "center",
            "Off-center views",
            "Views with the lesion away from the center separate a selector that finds the lesion from one that keeps the middle.",
            made.tables("center-bias"),
        ),
        Section("classification", "Classification", "", made.tables("accuracy-sweep", "macro-f1-sweep", "further-measures")),
        Section("glossary", "Glossary", "", [_glossary(comparison)]),
        Section("provenance", "Reproducibility", "", [_provenance(comparison)]),
    ]
    return document(f"Comparison of {plural(len(names), 'run')}", lead, sections)


def sentences(comparison: Comparison) -> list[str]:
    """The findings: each run's main method, paired differences to the first run, and what cannot be compared."""
    said = [_about(comparison, run) for run in comparison.runs]
    for metric, view, what in (
        ("retention", AS_IS, "retention"),
        ("retention", OFF_CENTER, "retention on off-center views"),
        ("accuracy", AS_IS, "accuracy"),
        ("macro_f1", AS_IS, "macro F1"),
    ):
        said += [_difference(test, what) for test in records(main_differences(comparison, metric, view))]
    return [*said, *comparison.notes]


def _difference(test: Any, what: str) -> str:
    gap = Difference(test.difference, test.low, test.high, test.p, test.n)
    interval = f"95% interval {points(gap.low)} to {points(gap.high)}, {p_text(gap.p)}, n = {gap.n:,}"
    shown = f"{points(gap.value)} points ({interval})"
    if gap.verdict == 0:
        return f"The main methods of `{test.run}` and `{test.minus_run}` do not differ clearly in {what}: {shown}."
    better = "better" if gap.verdict > 0 else "worse"
    return f"The main method of `{test.run}` is {better} than that of `{test.minus_run}` in {what}: {shown}."


def _about(comparison: Comparison, run: NamedRun) -> str:
    budget, evidence = comparison.budget_of(run), run.evidence
    values = {m: evidence.at(m, budget).get(run.main) for m in ("retention", "retention_of_ceiling", "accuracy")}
    kept, share, right = (percentage(values[m]) for m in values)
    n = f"n = {evidence.n:,}" + (f", {evidence.n_masked:,} with a mask" if evidence.n_masked else "")
    retained = f"keeps {kept} of the lesion ({share} of what is possible) and " if values["retention"] is not None else ""
    return (
        f"`{run.name}` (“{evidence.dataset}”): at budget {budget_text(budget)}, {look(run.main).name} {retained}classifies {right} "
        f"of the images correctly ({n})."
    )


def draw_figures(comparison: Comparison, folder: Path) -> list[Plate]:
    """Writes one figure per measure with a line for the main method of each run, and returns those of the page."""
    plates = []
    with house_style():
        for metric, label in _CURVES.items():
            figure = _curves(comparison, metric, label)
            if figure is None:
                continue
            svg = save(figure, folder, metric.replace("_", "-"))[0].read_text(encoding="utf-8")
            title = label.removesuffix(" (%)")
            title = title[0].upper() + title[1:] + " at each budget"
            caption = "The main method of each run. Bands: 95% bootstrap intervals over groups of images."
            plates.append(Plate(metric, title, caption, f"Chart: {title}. The numbers are in the tables of this page.", svg))
    return plates


def _curves(comparison: Comparison, metric: str, label: str) -> Figure | None:
    tables = {run.name: run.intervals.table(metric) for run in comparison.runs}
    rows = {run.name: tables[run.name][tables[run.name]["method"] == run.main].sort_values("budget") for run in comparison.runs}
    if all(table["value"].isna().all() for table in rows.values()):
        return None
    figure, axes = new_figure(4.2)
    if metric == "retention_of_ceiling":
        axes.axhline(1, color=INK, linestyle=(0, (4, 2)), linewidth=1.2, label="Ceiling (Oracle)")
    for i, run in enumerate(comparison.runs):
        own, color, marker = rows[run.name], _COLORS[i % len(_COLORS)], _MARKERS[i % len(_MARKERS)]
        axes.plot(own["budget"], own["value"], color=color, marker=marker, linewidth=2, label=f"{run.name}: {look(run.main).name}")
        axes.fill_between(own["budget"], own["low"], own["high"], color=color, alpha=0.13, linewidth=0)
    axes.tick_params(axis="y", color=MUTED)
    budget_axis(axes, comparison.budgets)
    percent_axis(axes, label=label)
    legend_below(figure, axes, 1)
    return figure


def _glossary(comparison: Comparison) -> str:
    methods = comparison.runs[0].evidence.ordered([*comparison.methods, *CONTROLS])
    named = terms((f"{escape(look(m).name)} <code>{escape(m)}</code>", escape(look(m).about)) for m in methods)
    return f"<h3>Methods</h3>{named}<h3>Measures and terms</h3>{terms((escape(t), escape(what)) for t, what in TERMS.items())}"


def _provenance(comparison: Comparison) -> str:
    rows = []
    for run in comparison.runs:
        info = run.evidence.info
        hashes = ", ".join(f"{name} {str(value)[:12]}" for name, value in info.hashes.items())
        parts = [info.command or "", f"hashes: {hashes}" if hashes else ""]
        rows.append((escape(run.name), "<br>".join(escape(part) for part in parts if part)))
    intro = (
        "<p>Every number comes from <code>results.csv</code> of its run; intervals and tests are computed from "
        "<code>predictions.parquet</code>. The folder of this page has all tables as CSV, Markdown and LaTeX and all figures as "
        "SVG and PNG.</p>"
    )
    return intro + terms(rows)
