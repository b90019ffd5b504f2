"""Tables made from the predictions: retention by lesion size and class, tests between methods, images with the lowest retention."""

from __future__ import annotations

import numpy as np
import pandas as pd

from medtokenbudget.metrics import ratio, reachable
from medtokenbudget.reporting.cells import INTERVAL_NOTE, plain_name, seeds_note
from medtokenbudget.reporting.evidence import AS_IS, OFF_CENTER, VIEW_NAMES, Evidence
from medtokenbudget.reporting.intervals import Intervals
from medtokenbudget.reporting.looks import look
from medtokenbudget.reporting.numbers import NOT_MEASURED, budget_text, percent, plural, points, probability, with_interval
from medtokenbudget.reporting.table import Table, records
from medtokenbudget.runs.statistics import lesion_rows

_COMPARED = ("center", "random", "no-pruning")
"""What the page compares the run's main method with, beside the paper's recipe."""
_HEADLINE_METRICS = {AS_IS: ("retention", "accuracy", "macro_f1"), OFF_CENTER: ("retention",)}


def strata(evidence: Evidence, found: pd.DataFrame, name: str, title: str, first: str) -> Table | None:
    """Retention as a share of the ceiling with one row per stratum; the CSV has every method."""
    if found.empty:
        return None
    methods = [m for m in evidence.emphasized if m in set(found["method"])]
    cells = found.set_index(["stratum", "method"])
    rows = []
    for stratum in dict.fromkeys(found["stratum"]):
        own = cells.loc[stratum]
        texts = [with_interval(*own.loc[m, ["value", "low", "high"]]) if m in own.index else NOT_MEASURED for m in methods]
        rows.append([str(stratum), str(int(own["n"].max())), percent(own["ceiling"].iloc[0]), *texts])
    return Table(
        name,
        title,
        [first, "n", "Ceiling (%)", *[look(m).name for m in methods]],
        rows,
        found.drop(columns=["study", "dataset", "view"], errors="ignore"),
        f"Share of the ceiling (%) at budget {budget_text(evidence.headline)}. {INTERVAL_NOTE} {seeds_note(evidence.main)}",
        more="all methods",
    )


def significance(evidence: Evidence, intervals: Intervals) -> Table | None:
    """Tests of the run's main method against the paper's recipe and the controls; the CSV has every test of the run."""
    tests = all_tests(evidence, intervals)
    shown = tests[(tests["method_a"] == evidence.focus) & np.isclose(tests["budget"], evidence.headline)]
    wanted = [m for m in (evidence.paper_method, *_COMPARED) if m]
    rows, views = [], []
    for view, metrics in _HEADLINE_METRICS.items():
        for metric in metrics:
            own = shown[(shown["view"] == view) & (shown["metric"] == metric)].set_index("method_b")
            for test in records(own.loc[[m for m in wanted if m in own.index]].reset_index()):
                # Keeping everything is no opponent in a contest about what to keep.
                if metric == "retention" and test.method_b == "no-pruning":
                    continue
                views.append((view, metric))
                rows.append(
                    [
                        plain_name(metric),
                        VIEW_NAMES[view],
                        look(test.method_b).name,
                        points(test.difference),
                        f"{points(test.low)} to {points(test.high)}",
                        probability(test.p),
                        probability(test.p_holm),
                        f"{test.n:,}",
                        str(test.seeds),
                    ]
                )
    if not rows:
        return None
    name = look(evidence.focus).name
    return Table(
        "significance",
        f"{name} against the main alternatives at budget {budget_text(evidence.headline)}",
        ["Measure", "Images", f"{name} minus", "Difference (points)", "95% interval", "p", "p (Holm)", "n", "Seeds"],
        rows,
        tests,
        f"Positive: {name} is higher. Paired permutation tests on the images that both methods have; groups of images are "
        "exchanged as a whole, all seeds together. Holm's correction covers all comparisons of a measure in the CSV, not only "
        "those shown.",
        labels=3,
        breaks=frozenset(i for i in range(1, len(views)) if views[i] != views[i - 1]),
        more=f"all {plural(len(tests), 'test')}",
    )


def all_tests(evidence: Evidence, intervals: Intervals) -> pd.DataFrame:
    """Every leading method against every other one, original images and off-center views."""
    parts = [intervals.tests(method, view) for view in (AS_IS, OFF_CENTER) for method in evidence.leading]
    return pd.concat([part for part in parts if len(part)] or parts[:1], ignore_index=True)


def worst(evidence: Evidence, named: bool = True) -> Table | None:
    """The ten images with the lowest retention of the run's main method, by name or by their place in the table."""
    found = worst_retained(evidence)
    if found.empty:
        return None
    if not named:
        found["image_id"] = range(1, len(found) + 1)
    labels = [str(name) if isinstance(name, str) else NOT_MEASURED for name in found["label_name"]]
    rows = [
        [
            str(r.image_id),
            label,
            str(r.predicted_name),
            f"{int(r.kept_lesion)} of {int(r.lesion)}",
            percent(r.share),
            percent(r.of_possible),
        ]
        for r, label in zip(records(found), labels)
    ]
    data = found[["image_id", "label_name", "predicted_name", "lesion", "kept_lesion", "k", "share", "of_possible"]]
    return Table(
        "worst",
        f"Images with the lowest retention of {look(evidence.focus).name} at budget {budget_text(evidence.headline)}",
        ["Image", "Class", "Predicted", "Lesion patches kept", "Retention (%)", "Of ceiling (%)"],
        rows,
        data.rename(columns={"label_name": "label", "predicted_name": "predicted"}),
        f"Seed {int(found['seed'].iloc[0])}; one image per row, lowest first.",
    )


def worst_retained(evidence: Evidence, count: int = 10) -> pd.DataFrame:
    """The `count` images of which the main method kept least at the headline budget, with `share` and `of_possible`."""
    rows = evidence.main_predictions
    rows = lesion_rows(rows[(rows["method"] == evidence.focus) & np.isclose(rows["budget"], evidence.headline)])
    if rows.empty:
        return pd.DataFrame()
    first = rows[rows["seed"] == rows["seed"].min()].copy()
    kept, lesion = (first[name].to_numpy(float) for name in ("kept_lesion", "lesion"))
    first["share"], first["of_possible"] = ratio(kept, lesion), ratio(kept, reachable(lesion, first["k"]))
    return first.sort_values(["of_possible", "image_id"], kind="stable").head(count)
