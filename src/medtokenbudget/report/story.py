"""The sentences of the page, computed from the results: what was measured, what came out, and where it fails.

Its own file because a sentence is a claim: each function here looks at the numbers first and says the opposite when they do.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from medtokenbudget.report.evidence import Evidence
from medtokenbudget.report.examples import headline_k
from medtokenbudget.report.intervals import Difference, Intervals
from medtokenbudget.report.style import look
from medtokenbudget.report.table import percent, probability

_SMALL = 100


@dataclass(frozen=True)
class Fact:
    """A number large on the page: what it is, its value, what to compare it with."""

    label: str
    value: str
    beside: str


def measured(evidence: Evidence) -> str:
    """What was measured, on how many images."""
    rows = evidence.main
    n, masks = int(rows["n"].max()), int(rows["n_masked"].max())
    named = ", ".join(map(str, evidence.seeds))
    seeds = (
        f"{len(evidence.seeds)} trainings of each (seeds {named})"
        if len(evidence.seeds) > 1
        else f"one training of each (seed {named})"
    )
    budgets = f"{len(evidence.budgets)} token budgets from {min(evidence.budgets):g} to {max(evidence.budgets):g}"
    masked = (
        f"{masks:,} of them with a lesion mask" if masks else "none of them with a lesion mask, so lesion retention is not measured"
    )
    return (
        f"{len(evidence.methods)} ways to choose image patches were compared on {n:,} validation images of the data set "
        f"“{evidence.dataset}” ({masked}), at {budgets}, with {seeds}."
    )


def question() -> str:
    return (
        "A vision transformer cuts an image into patches. If only a part of them may be kept (the token budget), does the lesion "
        "survive? Accuracy alone does not tell, so this report counts the lesion patches that are left: the lesion retention."
    )


def facts(evidence: Evidence, intervals: Intervals) -> list[Fact]:
    """The headline numbers with their intervals."""
    budget = evidence.headline
    found: list[Fact] = []
    for metric, label in (("retention", "of the lesion kept by LATS"), ("retention_of_ceiling", "of what is possible, by LATS")):
        table = intervals.at(metric, budget)
        if "lats" in table.index:
            others = [
                f"{look(m).name} {percent(table.loc[m, 'value'])}"
                for m in ("lats:lesion-first", "center", "random")
                if m in table.index
            ]
            found.append(
                Fact(f"{label}, budget {budget:g}", f"{percent(table.loc['lats', 'value'])} %", _beside(table.loc["lats"], others))
            )
    for metric, label in (("accuracy", "accuracy of LATS"), ("macro_f1", "macro F1 of LATS")):
        table = intervals.at(metric, budget)
        if "lats" in table.index:
            others = [
                f"{look(m).name} {percent(table.loc[m, 'value'])}"
                for m in ("lats:lesion-first", "center", "random", "no-pruning")
                if m in table.index
            ]
            found.append(
                Fact(f"{label}, budget {budget:g}", f"{percent(table.loc['lats', 'value'])} %", _beside(table.loc["lats"], others))
            )
    return found


def _beside(row: Any, others: list[str]) -> str:
    interval = f"95 % interval {percent(row['low'])} to {percent(row['high'])}, n = {int(row['n']):,}"
    return f"{interval}. {', '.join(others)}" if others else interval


def headline(evidence: Evidence, intervals: Intervals) -> list[str]:
    """The answer in a few sentences."""
    said = [
        _kept(evidence, intervals),
        _against_center(evidence, intervals, "lats"),
        _own_recipe(evidence, intervals),
        _against_center(evidence, intervals, "lats:lesion-first"),
        _off_center(evidence),
        _accuracy_hides(evidence, intervals),
    ]
    n = int(evidence.main["n_masked"].max() or evidence.main["n"].max())
    if n < _SMALL:
        said.append(f"These are few images ({n}): the intervals are wide, and small differences mean nothing.")
    return [text for text in said if text]


def _kept(evidence: Evidence, intervals: Intervals) -> str:
    """How much of the lesion LATS keeps, beside chance and beside what is possible."""
    table, k = intervals.at("retention", evidence.headline), headline_k(evidence)
    if "lats" not in table.index or k is None:
        return ""
    images = evidence.main_predictions.drop_duplicates("image_id")
    patches, sizes = int(images["n_patches"].iloc[0]), images["lesion"].dropna()
    text = f"With {k} of {patches} patches (budget {evidence.headline:g}) LATS keeps {_of(table, 'lats')} of the lesion patches."
    if "random" in table.index:
        text += f" A random choice keeps {percent(table.loc['random', 'value'])} %."
    ceiling, large = evidence.cell("lats"), int((sizes > k).sum())
    if ceiling is not None and large:
        shown = f"{large} of {int((sizes > 0).sum())} lesions cover more patches than the budget allows"
        text += f" No method can keep more than {percent(ceiling['ceiling'])} %: {shown}."
    return text


def _of(table: pd.DataFrame, method: str) -> str:
    row: Any = table.loc[method]
    return f"{percent(row['value'])} % (95 % interval {percent(row['low'])} to {percent(row['high'])})"


def _against_center(evidence: Evidence, intervals: Intervals, method: str) -> str:
    """Is the router better than keeping the middle of the image?"""
    if not evidence.has_masks or (method != "lats" and method not in evidence.methods):
        return ""
    name, gap = look(method).name, intervals.difference(method, "center", "retention")
    if gap is None:
        return f"Whether {name} is better than simply keeping the center was not measured in this run."
    return {
        1: f"{name} is better than keeping the center of the image: it keeps {_gap(gap)} more of the lesion.",
        0: f"{name} is not clearly better than keeping the center of the image, which needs no model: {_gap(gap)}.",
        -1: f"{name} is worse than keeping the center of the image, which needs no model: {_gap(gap)}.",
    }[gap.verdict]


def _gap(gap: Difference) -> str:
    low, high = (f"{100 * value:+.1f}".replace("-", "−") for value in (gap.low, gap.high))
    value = f"{100 * gap.value:+.1f}".replace("-", "−") if gap.verdict < 1 else f"{100 * gap.value:.1f}"
    return f"{value} points (95 % interval {low} to {high}, p {_p(gap.p)})"


def _p(value: float) -> str:
    text = probability(value)
    return text if text.startswith("<") else f"= {text}"


def _off_center(evidence: Evidence) -> str:
    """What tells a router from a center prior: lesions that are not in the center."""
    pair = evidence.off_center
    if pair is None:
        return ""
    names = ("lats", "lats:lesion-first", "center", "darkness")
    cells = {m: evidence.cell(m, study=pair.study, dataset=pair.moved) for m in names}
    values = {
        m: float(c["retention_of_ceiling"]) for m, c in cells.items() if c is not None and not np.isnan(c["retention_of_ceiling"])
    }
    if "lats" not in values or "center" not in values:
        return ""
    others = ", ".join(f"{look(m).name} {percent(values[m])} %" for m in names[1:] if m in values)
    shown = f"LATS keeps {percent(values['lats'])} % of what is possible, {others}"
    if values["lats"] > values["center"] + 0.02:
        return f"Where the lesion is off the center, the difference shows: {shown}."
    return f"Even where the lesion is off the center, LATS does not stand out: {shown}."


def _own_recipe(evidence: Evidence, intervals: Intervals) -> str:
    """Our own training recipe beside the paper's, where the run has both."""
    name = next((m for m in ("lats:lesion-first", "lats:paper") if m in evidence.methods), None)
    table = intervals.at("retention_of_ceiling", evidence.headline)
    if name is None or not {name, "lats"} <= set(table.index):
        return ""
    ours, theirs = (name, "lats") if name == "lats:lesion-first" else ("lats", name)
    return (
        f"Trained lesion first (our recipe), the scorer keeps {percent(table.loc[ours, 'value'])} % of what is possible; "
        f"by the paper's recipe {percent(table.loc[theirs, 'value'])} %."
    )


def _accuracy_hides(evidence: Evidence, intervals: Intervals) -> str:
    """The paper's point, checked: close accuracies, far-apart retention."""
    kept, right = (intervals.at(metric, evidence.headline)["value"].to_dict() for metric in ("retention", "accuracy"))
    if not {"lats", "random"} <= set(kept) & set(right):
        return ""
    accuracy, retention = (100 * float(found["lats"] - found["random"]) for found in (right, kept))
    shown = f"against Random, LATS has {accuracy:+.1f} points of accuracy and {retention:+.1f} points of retention".replace(
        "-", "−"
    )
    if abs(accuracy) < abs(retention) / 2:
        return f"Accuracy does not show what happened to the lesion: {shown}."
    return f"Here accuracy follows retention: {shown}."


def failures(evidence: Evidence, intervals: Intervals) -> list[str]:
    """Where it fails, from the numbers."""
    said = []
    for strata, what in ((intervals.by_size, "size"), (intervals.by_class, "class")):
        rows = strata[strata["method"] == "lats"].dropna(subset=["value"]) if not strata.empty else strata
        if len(rows) > 1:
            ranked = rows.sort_values("value", kind="stable")
            worst, best = ranked.iloc[0], ranked.iloc[-1]
            group = "lesions of the quarter" if what == "size" else "lesions of the class"
            said.append(
                f"By {what}: of {group} “{worst['stratum']}” LATS keeps {percent(worst['value'])} % of what is possible "
                f"(n = {int(worst['n'])}), of “{best['stratum']}” {percent(best['value'])} % (n = {int(best['n'])})."
            )
    said += _weak_spots(evidence, intervals)
    return said or ["Nothing in this run can show a failure: it has neither masks nor labels to check against."]


def _weak_spots(evidence: Evidence, intervals: Intervals) -> list[str]:
    said = []
    budget = evidence.headline
    for metric, name in (("accuracy", "accuracy"), ("macro_f1", "macro F1")):
        table = intervals.at(metric, budget).drop(index=["oracle"], errors="ignore")
        if "lats" in table.index and len(table) > 1:
            better = table[table["value"] > table.loc["lats", "value"]].sort_values("value", ascending=False)
            if len(better):
                names = ", ".join(f"{look(str(m)).name} {percent(v)}" for m, v in better["value"].head(3).items())
                said.append(f"In {name} at {budget:g}, LATS ({percent(table.loc['lats', 'value'])}) is below: {names} (%).")
    full, all_patches = evidence.cell("lats", 1.0), evidence.cell("no-pruning", 1.0)
    if full is not None and all_patches is not None and full["accuracy"] < all_patches["accuracy"]:
        said.append(
            f"LATS is no classifier for all patches: at budget 1.0 its accuracy is {percent(full['accuracy'])} %, "
            f"NoPruning has {percent(all_patches['accuracy'])} %."
        )
    return said
