"""The sentences of the page: what was measured, what was found, and where it fails.

A sentence is a claim, so each function looks at the numbers first and says the opposite when they do.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pandas as pd

from medtokenbudget.reporting.evidence import OFF_CENTER, Evidence
from medtokenbudget.reporting.intervals import Difference, Intervals
from medtokenbudget.reporting.looks import is_reference, look
from medtokenbudget.reporting.numbers import budget_text, is_missing, p_text, percentage, plural, points

_SMALL = 100
"""Below this number of images the page warns that differences may be noise."""
_CLEAR = 0.02
"""How much more of the ceiling a method must keep off-center to be called better than the center."""


@dataclass(frozen=True)
class Fact:
    """A number shown large on the page: its label, its value, and what to compare it with."""

    label: str
    value: str
    beside: str


def measured(evidence: Evidence) -> str:
    """What was measured, on how many images."""
    budgets = evidence.budgets
    at = (
        f"at {len(budgets)} token budgets from {budget_text(budgets[0])} to {budget_text(budgets[-1])}"
        if len(budgets) > 1
        else f"at token budget {budget_text(budgets[0])}"
    )
    masks = (
        f"{evidence.n_masked:,} with a lesion mask"
        if evidence.n_masked
        else "none with a lesion mask, so retention is not measured"
    )
    about = evidence.info.evaluation
    if about is not None:
        gone = f"; {about['unreadable']:,} could not be read" if about["unreadable"] else ""
        return (
            f"External validation of {look(evidence.focus).name} on {plural(evidence.n_images, 'image')} of “{evidence.dataset}” "
            f"({masks}{gone}), {at}, beside controls that need no training."
        )
    named = ", ".join(map(str, evidence.seeds))
    seeds = (
        f"{len(evidence.seeds)} training runs each (seeds {named})"
        if len(evidence.seeds) > 1
        else f"one training run each (seed {named})"
    )
    return (
        f"{plural(len(evidence.methods), 'way')} of selecting image patches, compared on "
        f"{plural(evidence.n_images, 'validation image')} of “{evidence.dataset}” ({masks}), {at}, with {seeds}."
    )


def question() -> str:
    """What the report is about, for readers who do not know the paper."""
    return (
        "A vision transformer divides an image into patches. When only some of them may be kept (the token budget), is the lesion "
        "still among them? Accuracy alone cannot tell, so this report counts the lesion patches that remain: the lesion retention."
    )


def subject(evidence: Evidence) -> str:
    """Which method the page is about, and why."""
    name = look(evidence.focus).name
    if not evidence.is_trained:
        return f"No selector was trained in this run, so the text follows {name}, the first method with a budget."
    text = f"The text follows {name} (`{evidence.focus}`), "
    used_by = f"the model that `mtb {'predict' if evidence.classes else 'route'}` uses"
    text += used_by if evidence.focus == evidence.info.main else "the trained method of the headline study"
    if evidence.paper_method:
        return f"{text}; {look(evidence.paper_method).name} is the paper's own training recipe, for comparison."
    return f"{text}."


def facts(evidence: Evidence, intervals: Intervals) -> list[Fact]:
    """The headline numbers with their intervals and what to compare them with."""
    name, budget = look(evidence.focus).name, evidence.headline
    wanted = {
        "retention": f"of the lesion kept by {name}",
        "retention_of_ceiling": f"of what is possible, by {name}",
        "accuracy": f"accuracy of {name}",
        "macro_f1": f"macro F1 of {name}",
    }
    found: list[Fact] = []
    for metric, label in wanted.items():
        table = intervals.at(metric, budget)
        if evidence.focus not in table.index:
            continue
        names = [*evidence.leading[1:], "center", "random", *(["no-pruning"] if metric in ("accuracy", "macro_f1") else [])]
        others = [f"{look(m).name} {percentage(table.loc[m, 'value'])}" for m in names if m in table.index and m != evidence.focus]
        row: Any = table.loc[evidence.focus]
        found.append(
            Fact(
                f"{label} at budget {budget_text(budget)}", percentage(row["value"]), ". ".join([_interval(row), *_joined(others)])
            )
        )
    return found


def _joined(names: list[str]) -> list[str]:
    return [", ".join(names)] if names else []


def _interval(row: Any) -> str:
    if is_missing(row["low"]):
        return f"n = {int(row['n']):,}" if not is_missing(row["n"]) else "Interval not available"
    return f"95% interval {percentage(row['low'])} to {percentage(row['high'])}, n = {int(row['n']):,}"


def headline(evidence: Evidence, intervals: Intervals) -> list[str]:
    """The findings, one sentence or two each."""
    said = [subject(evidence), _kept(evidence, intervals)]
    said += [_against_center(evidence, intervals, method) for method in evidence.leading]
    said += [_recipes(evidence, intervals), _off_center(evidence), _accuracy_hides(evidence)]
    n = evidence.n_masked or evidence.n
    if n < _SMALL:
        said.append(f"This is a small sample ({plural(n, 'image')}): intervals are wide, and small differences may be noise.")
    return [text for text in said if text]


def _kept(evidence: Evidence, intervals: Intervals) -> str:
    """How much of the lesion the main method keeps, beside chance and the ceiling."""
    table, method = intervals.at("retention", evidence.headline), evidence.focus
    if method not in table.index:
        return ""
    images = evidence.main_predictions.drop_duplicates("image_id")
    patches, sizes = int(images["n_patches"].iloc[0]), images["lesion"].dropna()
    text = (
        f"With {evidence.k} of {patches} patches (budget {budget_text(evidence.headline)}), {look(method).name} keeps "
        f"{_of(table, method)} of the lesion patches."
    )
    if "random" in table.index and method != "random":
        text += f" Random selection keeps {percentage(table.loc['random', 'value'])}."
    ceiling, large = evidence.at("ceiling").get(method), int((sizes > evidence.k).sum())
    if ceiling is not None and large:
        shown = f"{large:,} of {int((sizes > 0).sum()):,} lesions cover more patches than the budget allows"
        text += f" No method can keep more than {percentage(ceiling)}, because {shown}."
    return text


def _of(table: pd.DataFrame, method: str) -> str:
    row: Any = table.loc[method]
    return f"{percentage(row['value'])} ({_interval(row)})"


def _against_center(evidence: Evidence, intervals: Intervals, method: str) -> str:
    """Is the method better than keeping the middle of the image?"""
    if not evidence.n_masked or method == "center" or method not in evidence.at("retention"):
        return ""
    name, gap = look(method).name, intervals.difference(method, "center", "retention")
    if gap is None:
        return f"This run did not measure whether {name} is better than simply keeping the image center."
    return {
        1: f"{name} is better than simply keeping the image center: it keeps {_gap(gap)} more of the lesion.",
        0: f"{name} is not clearly better than simply keeping the image center, which needs no model: difference {_gap(gap)}.",
        -1: f"{name} is worse than simply keeping the image center, which needs no model: difference {_gap(gap)}.",
    }[gap.verdict]


def _gap(gap: Difference) -> str:
    value = points(gap.value).lstrip("+") if gap.verdict > 0 else points(gap.value)
    return f"{value} points (95% interval {points(gap.low)} to {points(gap.high)}, {p_text(gap.p)}, n = {gap.n:,})"


def _recipes(evidence: Evidence, intervals: Intervals) -> str:
    """The run's own model beside the paper's recipe."""
    theirs = evidence.paper_method
    table = intervals.at("retention_of_ceiling", evidence.headline)
    if theirs is None or not {evidence.focus, theirs} <= set(table.index):
        return ""
    ours, paper = (percentage(table.loc[m, "value"]) for m in (evidence.focus, theirs))
    return f"Measured against the ceiling, {look(evidence.focus).name} reaches {ours} and the paper's recipe {paper}."


def _off_center(evidence: Evidence) -> str:
    """Off-center lesions tell a selector that finds the lesion from one that keeps the middle."""
    study, method = evidence.off_center_study, evidence.focus
    if study is None:
        return ""
    values = evidence.at("retention_of_ceiling", study=study, view=OFF_CENTER)
    if method not in values or "center" not in values or method == "center":
        return ""
    rows = evidence.cells(study, OFF_CENTER)
    n = int(rows.loc[rows["method"] == method, "n_masked"].max())
    others = ", ".join(
        f"{look(m).name} {percentage(values[m])}"
        for m in (evidence.paper_method, "center", "darkness", "random")
        if m in values and m != method
    )
    shown = f"{look(method).name} keeps {percentage(values[method])} of what is possible ({others}; n = {n:,})"
    if values[method] > values["center"] + _CLEAR:
        return f"When the lesion is off-center, it still finds it: {shown}."
    return f"When the lesion is off-center, it is no better than keeping the center: {shown}."


def _accuracy_hides(evidence: Evidence) -> str:
    """The paper's point, checked: similar accuracy, very different retention."""
    kept, right = evidence.at("retention"), evidence.at("accuracy")
    method = evidence.focus
    if method == "random" or not {method, "random"} <= set(kept) & set(right):
        return ""
    accuracy, retention = (found[method] - found["random"] for found in (right, kept))
    shown = (
        f"{look(method).name} differs from Random by {points(accuracy)} points in accuracy and by {points(retention)} in retention"
    )
    if abs(accuracy) < abs(retention) / 2:
        return f"Accuracy does not show what happened to the lesion: {shown}."
    return f"In this run accuracy follows retention: {shown}."


def failures(evidence: Evidence, intervals: Intervals) -> list[str]:
    """Where the main method fails, from the numbers."""
    said = []
    name = look(evidence.focus).name
    for strata, what in ((intervals.by_size, "lesion size"), (intervals.by_class, "class")):
        rows = strata[strata["method"] == evidence.focus].dropna(subset=["value"]) if not strata.empty else strata
        if len(rows) > 1:
            ranked = rows.sort_values("value", kind="stable")
            low, high = (
                f"“{r['stratum']}” {percentage(r['value'])} (n = {int(r['n']):,})" for r in (ranked.iloc[0], ranked.iloc[-1])
            )
            said.append(f"By {what}, {name} keeps the smallest share of what is possible for {low} and the largest for {high}.")
    said += _weak_spots(evidence)
    return said or ["This run cannot show failures: it has neither masks nor labels to check against."]


def _weak_spots(evidence: Evidence) -> list[str]:
    said, method = [], evidence.focus
    name = look(method).name
    for metric, label in (("accuracy", "Accuracy"), ("macro_f1", "Macro F1")):
        values = {m: v for m, v in evidence.at(metric).items() if m == method or m == "no-pruning" or not is_reference(m)}
        if method in values:
            better = sorted((m for m in values if values[m] > values[method]), key=lambda m: -values[m])
            if better:
                names = ", ".join(f"{look(m).name} {percentage(values[m])}" for m in better[:3])
                said.append(
                    f"{label} at budget {budget_text(evidence.headline)} is higher for {plural(len(better), 'method')} than for "
                    f"{name} ({percentage(values[method])}, n = {evidence.n:,}): {names}{', …' if len(better) > 3 else ''}."
                )
    full = evidence.at("accuracy", 1.0)
    if {method, "no-pruning"} <= set(full) and full[method] < full["no-pruning"]:
        said.append(
            f"With all patches (budget 1.0), {name} classifies {percentage(full[method])} correctly; a classifier trained on all "
            f"patches, NoPruning, {percentage(full['no-pruning'])} (n = {evidence.n:,})."
        )
    return said
