"""The statistics that tables, figures and sentences share: bootstrap intervals, tests, strata and the retention model.

The bootstrap is the only slow part of a report, so each result is computed once and looked up afterwards. Values come from
results.csv; only intervals, p-values and strata are computed here, from the predictions.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import pandas as pd

from medtokenbudget.config import HEADLINE_BUDGETS
from medtokenbudget.data.strata import STRATA
from medtokenbudget.reporting.evidence import AS_IS, OFF_CENTER, Evidence
from medtokenbudget.runs import statistics

CURVE_METRICS = ("accuracy", "macro_f1", "balanced_accuracy", "retention", "retention_of_ceiling")
TESTED_METRICS = ("accuracy", "macro_f1", "balanced_accuracy", "retention")
_STRATA_DRAWS = 2_000
COLUMNS = ["method", "budget", "value", "low", "high", "n", "seeds"]


@dataclass(frozen=True)
class Difference:
    """One method minus another on the same images, as fractions."""

    value: float
    low: float
    high: float
    p: float
    n: int

    @property
    def verdict(self) -> int:
        """1 or -1 when the interval is on one side of zero and p < 0.05, else 0."""
        if self.p >= 0.05:
            return 0
        return 1 if self.low > 0 else -1 if self.high < 0 else 0


class Intervals:
    """Intervals, tests and strata of one run."""

    def __init__(self, evidence: Evidence) -> None:
        self.evidence = evidence

    @cached_property
    def curves(self) -> pd.DataFrame:
        """`metric, method, budget, value, low, high, n, seeds` of the headline study."""
        # One method at a time: the draws of macro F1 over all methods at once would fill the memory.
        parts = [
            statistics.intervals(rows, CURVE_METRICS, by=("method", "budget"))
            for _, rows in self.evidence.main_predictions.groupby("method", sort=False)
        ]
        found = pd.concat(parts, ignore_index=True).drop(columns="value").astype({"budget": float})
        values = pd.concat([self.evidence.values(metric).assign(metric=metric) for metric in CURVE_METRICS], ignore_index=True)
        return values.dropna(subset="value").merge(found, on=["metric", "method", "budget"], how="left")[["metric", *COLUMNS]]

    def table(self, metric: str) -> pd.DataFrame:
        """`method, budget, value, low, high, n, seeds` of one metric."""
        return self.curves.loc[self.curves["metric"] == metric, COLUMNS]

    def at(self, metric: str, budget: float) -> pd.DataFrame:
        """`value, low, high, n, seeds` of one metric at one budget, by method."""
        rows = self.table(metric)
        return rows[np.isclose(rows["budget"], budget)].set_index("method")[["value", "low", "high", "n", "seeds"]]

    def difference(self, method: str, other: str, metric: str) -> Difference | None:
        """`method` minus `other` at the headline budget of the headline study; None unless both were measured."""
        evidence = self.evidence
        rows = evidence.main_predictions
        rows = rows[rows["method"].isin([method, other]) & np.isclose(rows["budget"], evidence.headline)]
        if {method, other} - set(rows["method"]):
            return None
        found = with_values(statistics.compare(rows, method, (metric,)), evidence.main)
        if found.empty or np.isnan(found["difference"].iloc[0]):
            return None
        row = found.iloc[0]
        return Difference(float(row["difference"]), float(row["low"]), float(row["high"]), float(row["p"]), int(row["n"]))

    @lru_cache  # noqa: B019  one object per report
    def tests(self, reference: str, view: str) -> pd.DataFrame:
        """`reference` against every other method: difference, interval, p and Holm-corrected p; empty when it was not run.

        Images as they are are tested in the study `robustness` when the run has it (it has more seeds), else in the headline study.
        """
        evidence = self.evidence
        study = {AS_IS: _tested_study(evidence, reference), OFF_CENTER: evidence.off_center_study}[view]
        rows = evidence.images(study, view) if study else evidence.predictions.iloc[:0]
        if study is None or reference not in set(rows["method"]):
            return pd.DataFrame(columns=["view", *statistics.COMPARISON_COLUMNS])
        budgets = [b for b in HEADLINE_BUDGETS if b in set(rows["budget"])] or [evidence.headline]
        found = statistics.compare(rows, reference, TESTED_METRICS, budgets)
        return with_values(found.assign(view=view), evidence.cells(study, view))

    @cached_property
    def by_size(self) -> pd.DataFrame:
        """`stratum, method, value, low, high, n, ...`: share of the ceiling by quartile of lesion size, at the headline budget."""
        return _strata(statistics.by_lesion_size(self._at_headline), sizes=True)

    @cached_property
    def by_class(self) -> pd.DataFrame:
        """The same by class."""
        return _strata(statistics.by_class(self._at_headline, self.evidence.classes), sizes=False)

    @cached_property
    def by_attribute(self) -> pd.DataFrame:
        """The same by every property of `attributes.parquet`, with the column `property`; empty without that file."""
        found, attributes = [], self.evidence.attributes
        if attributes is None:
            return pd.DataFrame()
        for name in [name for name in ("class", *STRATA) if name in attributes]:
            values = attributes.set_index("image_id")[name].dropna()
            order = STRATA.get(name) or sorted(values.unique())
            rows = statistics.by_attribute(self._at_headline, values, order, draws=_STRATA_DRAWS)
            found.append(_strata(rows, sizes=False).assign(property=name))
        return pd.concat([part for part in found if len(part)], ignore_index=True) if any(map(len, found)) else pd.DataFrame()

    @property
    def _at_headline(self) -> pd.DataFrame:
        rows = self.evidence.main_predictions
        return rows[np.isclose(rows["budget"], self.evidence.headline) & (rows["method"] != "no-pruning")]

    @cached_property
    def model(self) -> Model | None:
        """The supplement's retention model fitted to the run's main method; None without retention at several budgets."""
        method = self.evidence.focus
        rows = self.table("retention")
        rows = rows[(rows["method"] == method) & rows["value"].notna()].sort_values("budget")
        images = self.evidence.main_predictions
        images = statistics.lesion_rows(images[images["method"] == method]).drop_duplicates("image_id")
        if len(rows) < 3 or images.empty or not (rows["budget"] < 1).any():
            return None
        prevalence = images["lesion"].to_numpy(float) / images["n_patches"].to_numpy(float)
        budgets, measured = rows["budget"].to_numpy(float), rows["value"].to_numpy(float)
        fitted = statistics.fit_separation(budgets, measured, prevalence, exact=True)
        fine = np.linspace(0.05, 1, 96)
        predicted = statistics.mean_predicted_retention(fine, fitted, prevalence, exact=True)
        approximate = statistics.mean_predicted_retention(fine, fitted, prevalence)
        return Model(fitted, budgets, measured, fine, predicted, approximate)


@dataclass(frozen=True)
class Model:
    """The Gaussian retention model: fitted separation, measured points, and its two predictions over a fine grid of budgets."""

    separation: float
    budgets: np.ndarray
    measured: np.ndarray
    fine: np.ndarray
    predicted: np.ndarray
    approximate: np.ndarray


def with_values(tests: pd.DataFrame, results: pd.DataFrame) -> pd.DataFrame:
    """Takes the differences of `tests` from results.csv where both methods were measured on the same images and seeds.

    A test between methods with different images (Oracle needs masks) covers the images that both have; results.csv has no number
    for that, so the difference of the test stays.
    """
    cells: dict[tuple[str, float], list[dict[Any, Any]]] = {}
    for row in results.to_dict("records"):
        cells.setdefault((row["method"], round(row["budget"], 6)), []).append(row)
    return tests.assign(difference=[_difference(test, cells) for test in tests.to_dict("records")])


def _difference(test: dict[Any, Any], cells: dict[tuple[str, float], list[dict[Any, Any]]]) -> float:
    metric, budget = test["metric"], round(test["budget"], 6)
    count = "n_masked" if metric == "retention" else "n"
    first, second = (cells[test[side], budget] for side in ("method_a", "method_b"))
    same_seeds = {row["seed"] for row in first} == {row["seed"] for row in second}
    if not same_seeds or {row[count] for row in (*first, *second)} != {test["n"]}:
        return float(test["difference"])
    ours, theirs = (np.mean([row[metric] for row in rows]) for rows in (first, second))
    return float(ours - theirs)


def _tested_study(evidence: Evidence, reference: str) -> str:
    """`robustness` when it has this method, else the headline study."""
    measured = set(evidence.cells("robustness", AS_IS)["method"])
    return "robustness" if reference in measured else evidence.study


def _strata(found: pd.DataFrame, sizes: bool) -> pd.DataFrame:
    """Strata with the share of the ceiling as `value, low, high`; quartiles are named with their range of lesion sizes."""
    table = found.rename(columns={"low": "pooled_low", "high": "pooled_high"})
    table = table.rename(columns={"retention_of_ceiling": "value", "share_low": "low", "share_high": "high"})
    if sizes and len(table):
        spans = table.groupby("stratum")[["smallest", "largest"]].agg({"smallest": "min", "largest": "max"})
        names = {s: f"{s}, {int(r.smallest)} to {int(r.largest)} patches" for s, r in spans.iterrows()}
        table["stratum"] = table["stratum"].map(names)
    return table
