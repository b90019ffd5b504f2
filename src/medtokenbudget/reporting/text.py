"""The sentences of the page that are claims: each function looks at the numbers first and says the opposite when they do."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup, escape

from medtokenbudget.backbone.views import OFF_CENTER
from medtokenbudget.config import CONTROLS
from medtokenbudget.escaping import template
from medtokenbudget.measures import METRICS, budget_text, is_missing, percentage, plural, points, probability
from medtokenbudget.model.looks import is_reference, look
from medtokenbudget.reporting.comparison import Comparison
from medtokenbudget.reporting.intervals import Difference, ReportRun
from medtokenbudget.runs.run import AS_IS

_SMALL = 100
"""Below this number of images the page warns that differences may be noise."""
_CLEAR = 0.02
"""How much more of the ceiling a method must keep off-center to be called better than the center."""


def page_template(name: str = "page.html") -> jinja2.Template:
    """Load the template of the page, or a part of it."""
    file = Path(__file__).parent / "templates" / name
    return template(file, sentence=_sentence, budget_text=budget_text, plural=plural, method_name=lambda name: look(name).title)


def _sentence(sentence: str) -> Markup:
    """Turn a sentence into HTML, with `code` between backticks and counts that stay on one line."""
    parts = str(escape(sentence)).replace("n = ", "n&nbsp;=&nbsp;").split("`")
    return Markup("".join(f"<code>{part}</code>" if i % 2 else part for i, part in enumerate(parts)))


def headline(run: ReportRun) -> str:
    """Say in one sentence how much of the lesion is kept, of how much, and whether that is more than a control keeps."""
    method, metric = run.focus, "retention" if run.focus in run.at("retention") else "accuracy"
    values, ceiling = run.at(metric), run.at("ceiling").get(method)
    if method not in values:
        return ""
    patches = int(run.main_predictions["n_patches"].iloc[0])
    kept = (
        f"keeps {_of_reachable(values[method], ceiling)}"
        if metric == "retention"
        else f"classifies {percentage(values[method])} of the images correctly"
    )
    text = f"With {run.k} of {patches} patches (budget {budget_text(run.headline)}), {look(method).title} {kept}"
    control = _strongest_control(run, values)
    if control is None:
        return f"{text}."
    gap = run.difference(method, control, metric)
    verdict = {None: " next to", 1: ": more than", 0: ": not clearly more than", -1: ": less than"}[gap and gap.verdict]
    return f"{text}{verdict} {look(control).title}, the strongest control, with {percentage(values[control])}."


def _of_reachable(retention: float, ceiling: float | None) -> str:
    """Write a retention, never without the most that any method can keep."""
    return f"{percentage(retention)} of the lesion" + ("" if ceiling is None else f", of {percentage(ceiling)} reachable")


def _strongest_control(run: ReportRun, values: dict[str, float]) -> str | None:
    controls = [m for m in CONTROLS if m in values and m != run.focus and not is_reference(m)]
    return max(controls, key=lambda m: values[m], default=None)


def facts(run: ReportRun) -> list[dict[str, str]]:
    """Return three headline numbers as `label, value, others`: each with its interval and the strongest control."""
    entries, method, name = [], run.focus, look(run.focus).title
    # Masks first: what was kept is what the page is about.
    for metric in sorted((m for m in METRICS.values() if m.fact), key=lambda m: m.scope != "masks"):
        # The share of the ceiling is most telling where the lesion is not in the center.
        away = metric.name == "retention_of_ceiling" and run.off_center_study is not None
        where: dict[str, Any] = {"study": run.off_center_study, "view": OFF_CENTER} if away else {}
        table = run.by_method(metric.name, **where)
        if method not in table.index:
            continue
        values, ceiling = dict(table["value"]), run.at("ceiling").get(method)
        control = _strongest_control(run, values)
        others = [
            f"Of {percentage(ceiling)} reachable" if metric.name == "retention" and ceiling is not None else "",
            f"Strongest control: {look(control).title} {percentage(values[control])}" if control else "",
            f"n = {_n_off_center(run):,}" if away else _interval(table.loc[method]),
        ]
        label = f"{metric.fact.format(name=name)} at budget {budget_text(run.headline)}{', lesion off-center' if away else ''}"
        entries.append({"label": label, "value": percentage(values[method]), "others": ". ".join(filter(None, others))})
    return entries[:3]


def _values(run: ReportRun, values: dict[str, float], methods: Iterable[str | None]) -> str:
    """Write `Center 61.0%, Random 30.2%`: what other methods reach, as far as it was measured."""
    return ", ".join(f"{look(m).title} {percentage(values[m])}" for m in methods if m and m in values and m != run.focus)


def _interval(row: Any) -> str:
    if is_missing(row["low"]):
        return f"n = {int(row['n']):,}" if not is_missing(row["n"]) else "Interval not available"
    return f"95% interval {percentage(row['low'])} to {percentage(row['high'])}, n = {int(row['n']):,}"


def _gap(gap: Difference, signed: bool = True) -> str:
    value, p = points(gap.value), probability(gap.p)
    value, p = value if signed else value.lstrip("+"), p if p.startswith("<") else f"= {p}"
    return f"{value} points (95% interval {points(gap.low)} to {points(gap.high)}, p {p}, n = {gap.n:,})"


def findings(run: ReportRun) -> list[str]:
    sentences = [_reachable(run), *[_against_center(run, method) for method in run.leading]]
    sentences += [_against_paper(run), _off_center(run), _accuracy_hides(run)]
    n = run.n_masked or run.n
    if n < _SMALL:
        sentences.append(f"This is a small sample ({plural(n, 'image')}): intervals are wide, and small differences may be noise.")
    return [text for text in sentences if text]


def _reachable(run: ReportRun) -> str:
    ceiling = run.at("ceiling").get(run.focus)
    sizes = run.main_predictions.drop_duplicates("image_id")["lesion"].dropna()
    large = int((sizes > run.k).sum())
    if ceiling is None or not large:
        return ""
    large_lesions = f"{large:,} of {int((sizes > 0).sum()):,} lesions cover more patches than the budget allows"
    return f"No method can keep more than {percentage(ceiling)} of the lesion, because {large_lesions}."


def _against_center(run: ReportRun, method: str) -> str:
    if not run.n_masked or method == "center" or method not in run.at("retention"):
        return ""
    name, gap = look(method).title, run.difference(method, "center", "retention")
    if gap is None:
        return f"This run did not measure whether {name} is better than simply keeping the image center."
    return {
        1: f"{name} is better than simply keeping the image center: it keeps {_gap(gap, signed=False)} more of the lesion.",
        0: f"{name} is not clearly better than simply keeping the image center, which needs no model: difference {_gap(gap)}.",
        -1: f"{name} is worse than simply keeping the image center, which needs no model: difference {_gap(gap)}.",
    }[gap.verdict]


def _against_paper(run: ReportRun) -> str:
    values = run.at("retention_of_ceiling")
    if run.paper_method is None or not {run.focus, run.paper_method} <= set(values):
        return ""
    reached, published = (percentage(values[m]) for m in (run.focus, run.paper_method))
    return f"Measured against the ceiling, {look(run.focus).title} reaches {reached} and the paper's recipe {published}."


def _off_center(run: ReportRun) -> str:
    study, method = run.off_center_study, run.focus
    values = {} if study is None else run.at("retention_of_ceiling", study=study, view=OFF_CENTER)
    if not {method, "center"} <= set(values) or method == "center":
        return ""
    others = _values(run, values, (run.paper_method, "center", "darkness", "random"))
    better = values[method] > values["center"] + _CLEAR
    claim = "it still finds it" if better else "it is no better than keeping the center"
    kept = f"{look(method).title} keeps {percentage(values[method])} of what is possible ({others}; n = {_n_off_center(run):,})"
    return f"When the lesion is off-center, {claim}: {kept}."


def _n_off_center(run: ReportRun) -> int:
    rows = run.cells(run.off_center_study, OFF_CENTER)
    return int(rows.loc[rows["method"] == run.focus, "n_masked"].max())


def _accuracy_hides(run: ReportRun) -> str:
    """Check the paper's point: similar accuracy, very different retention."""
    retentions, accuracies, method = run.at("retention"), run.at("accuracy"), run.focus
    if method == "random" or not {method, "random"} <= set(retentions) & set(accuracies):
        return ""
    retention, accuracy = (values[method] - values["random"] for values in (retentions, accuracies))
    hides = abs(accuracy) < abs(retention) / 2
    claim = "Accuracy does not show what happened to the lesion" if hides else "In this run accuracy follows retention"
    gaps = f"{points(accuracy)} points in accuracy and by {points(retention)} in retention"
    return f"{claim}: {look(method).title} differs from Random by {gaps}."


def failures(run: ReportRun) -> list[str]:
    """Say where the main method fails, from the numbers."""
    sentences, method = [], run.focus
    name = look(method).title
    for strata, what in ((run.by_size, "lesion size"), (run.by_class, "class")):
        rows = strata[strata["method"] == method].dropna(subset=["value"]) if not strata.empty else strata
        if len(rows) > 1:
            ranked = rows.sort_values("value", kind="stable").iloc[[0, -1]].to_dict("records")
            low, high = (f"“{r['stratum']}” {percentage(r['value'])} (n = {int(r['n']):,})" for r in ranked)
            sentences.append(
                f"By {what}, {name} keeps the smallest share of what is possible for {low} and the largest for {high}."
            )
    for metric in ("accuracy", "macro_f1"):
        values = {m: v for m, v in run.at(metric).items() if m in (method, "no-pruning") or not is_reference(m)}
        better = sorted((m for m in values if method in values and values[m] > values[method]), key=lambda m: -values[m])
        if better:
            names = _values(run, values, better[:3]) + (", …" if len(better) > 3 else "")
            sentences.append(
                f"{METRICS[metric].term} at budget {budget_text(run.headline)} is higher for {plural(len(better), 'method')} than "
                f"for {name} ({percentage(values[method])}, n = {run.n:,}): {names}."
            )
    full = run.at("accuracy", 1.0)
    if {method, "no-pruning"} <= set(full) and full[method] < full["no-pruning"]:
        sentences.append(
            f"With all patches (budget 1.0), {name} classifies {percentage(full[method])} correctly; a classifier trained on all "
            f"patches, NoPruning, {percentage(full['no-pruning'])} (n = {run.n:,})."
        )
    return sentences or ["This run cannot show failures: it has neither masks nor labels to check against."]


def comparison_findings(comparison: Comparison) -> list[str]:
    """Say how each run's main method does, how it differs from that of the first run, and what cannot be compared."""
    first, sentences = comparison.first.name, [_main_method(comparison, run) for run in comparison.runs]
    for metric, view in (("retention", AS_IS), ("retention", OFF_CENTER), ("accuracy", AS_IS), ("macro_f1", AS_IS)):
        what = metric.replace("_f", " F") + (" on off-center views" if view == OFF_CENTER else "")
        for name, gap in comparison.main_differences(metric, view).items():
            if gap.verdict == 0:
                sentences.append(f"The main methods of `{name}` and `{first}` do not differ clearly in {what}: {_gap(gap)}.")
            else:
                better = "better" if gap.verdict > 0 else "worse"
                sentences.append(f"The main method of `{name}` is {better} than that of `{first}` in {what}: {_gap(gap)}.")
    return [*sentences, *comparison.notes]


def _main_method(comparison: Comparison, run: ReportRun) -> str:
    budget = comparison.budget_of(run)
    retention, ceiling, accuracy = (run.at(m, budget).get(run.focus) for m in ("retention", "ceiling", "accuracy"))
    does, n = [], []
    if retention is not None:
        does.append(f"keeps {_of_reachable(retention, ceiling)}")
    if accuracy is not None:
        does.append(f"classifies {percentage(accuracy)} of the images correctly")
        n.append(f"{run.n:,}")
    if run.n_masked:
        n.append(f"{run.n_masked:,} with a mask")
    did = f"{', and '.join(does) or 'was not measured'} (n = {', '.join(n) or 0})"
    return f"`{run.name}` (“{run.info.dataset}”): at budget {budget_text(budget)}, {look(run.focus).title} {did}."
