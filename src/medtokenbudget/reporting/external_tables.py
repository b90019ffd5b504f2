"""Tables of an external validation: what was lost against the model's own validation, which promises held, and where it fails."""

from __future__ import annotations

import pandas as pd

from medtokenbudget.data.strata import METHODS, STRATA
from medtokenbudget.reporting.cells import INTERVAL_NOTE, METRIC_NAMES
from medtokenbudget.reporting.evidence import Evidence
from medtokenbudget.reporting.intervals import CURVE_METRICS, Intervals
from medtokenbudget.reporting.looks import look
from medtokenbudget.reporting.numbers import NOT_MEASURED, budget_text, number, percent, points, with_interval
from medtokenbudget.reporting.sweep_tables import value_and_interval
from medtokenbudget.reporting.table import Table


def own_validation(evidence: Evidence, intervals: Intervals) -> Table | None:
    """Every measure on these images beside the model's own validation, and the difference; None if that is not known."""
    own = (evidence.info.evaluation or {}).get("own") or []
    rows, raw = [], []
    for metric in CURVE_METRICS:
        for before in own:
            now = value_and_interval(intervals.at(metric, before["budget"]), evidence.focus)
            if before.get(metric) is None or pd.isna(now[0]):
                continue
            lost = before[metric] - now[0]
            raw.append({"metric": metric, "budget": before["budget"], "own": before[metric], "here": now[0], "low": now[1]})
            raw[-1] |= {"high": now[2], "lost": lost}
            rows.append(
                [METRIC_NAMES[metric], budget_text(before["budget"]), percent(before[metric]), with_interval(*now), points(lost)]
            )
    if not rows:
        return None
    name, first = look(evidence.focus).name, own[0]
    return Table(
        "own-validation",
        "How much was lost against the model's own validation",
        ["Measure", "Budget", "Own validation", "These images", "Lost (points)"],
        rows,
        pd.DataFrame(raw),
        f"{name}. Own validation: {first['n']:,} images ({first['n_masked']:,} with a mask). Positive: worse here. Retention also "
        f"depends on the size of the lesions, its share of the ceiling does not. {INTERVAL_NOTE}",
        labels=2,
    )


def promises(evidence: Evidence) -> Table | None:
    """What the guarantees of the model keep on these images."""
    found = (evidence.info.evaluation or {}).get("guarantees") or []
    if not found:
        return None
    rows = [
        [
            percent(row["retention"], 0),
            "on average" if row["coverage"] is None else f"in {percent(row['coverage'], 0)}% of the images",
            NOT_MEASURED if row["cap"] is None else percent(row["cap"], 0),
            percent(row["kept"]),
            percent(row["reached"]),
            number(row["tokens"], 1),
            number(row["own_tokens"], 1),
        ]
        for row in found
    ]
    return Table(
        "promises",
        "Guarantees of the model on these images",
        ["Promised (%)", "How", "Cap (%)", "Kept (%)", "Images that reach it (%)", "Patches", "Patches in calibration"],
        rows,
        pd.DataFrame(found),
        f"Means over {found[0]['groups']:,} groups of {found[0]['n']:,} images with a lesion. A guarantee holds for images like "
        "those of its calibration; here it is checked, not promised.",
        labels=2,
    )


def strata(evidence: Evidence, intervals: Intervals) -> Table | None:
    """Share of the ceiling by every property of the images that was measured, one row per stratum."""
    found = intervals.by_attribute
    if found.empty:
        return None
    methods = [m for m in evidence.emphasized if m in set(found["method"])]
    rows, breaks, last = [], set(), None
    for property_, stratum in dict.fromkeys(zip(found["property"], found["stratum"])):
        own = found[(found["property"] == property_) & (found["stratum"] == stratum)].set_index("method")
        texts = [with_interval(*own.loc[m, ["value", "low", "high"]]) if m in own.index else NOT_MEASURED for m in methods]
        if last not in (None, property_):
            breaks.add(len(rows))
        rows.append(["" if property_ == last else str(property_), str(stratum), str(int(own["n"].max())), *texts])
        last = property_
    return Table(
        "attribute-strata",
        "Share of the ceiling (%) by what the images show",
        ["Property", "Stratum", "n", *[look(m).name for m in methods]],
        rows,
        found.drop(columns=["study", "dataset", "view"], errors="ignore"),
        f"Budget {budget_text(evidence.headline)}. {INTERVAL_NOTE} A stratum with few images has a wide interval.",
        labels=2,
        breaks=frozenset(breaks),
        more="all methods",
    )


def how_measured(evidence: Evidence) -> list[str]:
    """How each property was measured, one sentence each."""
    if evidence.attributes is None:
        return []
    return [f"{name.capitalize()}: {METHODS[name]}" for name in STRATA if name in evidence.attributes]
