"""The statistics that tables, figures and sentences share, computed once from the predictions.

Its own file because the bootstrap is the only slow part of a report; everything here is looked up afterwards.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pandas as pd

from medtokenbudget.config import HEADLINE_BUDGETS
from medtokenbudget.experiments import retention_model, statistics, strata
from medtokenbudget.report.evidence import Evidence

CURVE_METRICS = ("accuracy", "macro_f1", "balanced_accuracy", "retention", "retention_of_ceiling")
TESTED_METRICS = ("accuracy", "macro_f1", "balanced_accuracy", "retention")
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
        """1 or -1 when the interval lies on one side of zero, else 0."""
        return 1 if self.low > 0 else -1 if self.high < 0 else 0


class Intervals:
    """Values with 95 % bootstrap intervals of the headline study, and what else is tested or fitted."""

    def __init__(self, evidence: Evidence) -> None:
        self.evidence = evidence

    @cached_property
    def curves(self) -> pd.DataFrame:
        """`metric, method, budget, value, low, high, n, seeds` of the headline study."""
        # One method at a time: the draws of macro F1 over all methods at once would fill the memory.
        parts = [
            statistics.intervals(rows, CURVE_METRICS, by=("dataset", "method", "budget"))
            for _, rows in self.evidence.main_predictions.groupby("method", sort=False)
        ]
        return pd.concat(parts, ignore_index=True)[["metric", *COLUMNS]]

    def table(self, metric: str) -> pd.DataFrame:
        """`method, budget, value, low, high, n, seeds` of one metric."""
        return self.curves.loc[self.curves["metric"] == metric, COLUMNS]

    def at(self, metric: str, budget: float) -> pd.DataFrame:
        """`value, low, high, n, seeds` of one metric at one budget, by method."""
        rows = self.table(metric)
        return rows[np.isclose(rows["budget"], budget)].set_index("method")[["value", "low", "high", "n", "seeds"]]

    def difference(self, method: str, other: str, metric: str) -> Difference | None:
        """`method` minus `other` at the headline budget of the headline study; None when not both were measured."""
        rows = self.evidence.main_predictions
        rows = rows[rows["method"].isin([method, other]) & np.isclose(rows["budget"], self.evidence.headline)]
        if method not in set(rows["method"]):
            return None
        found = statistics.compare(rows, method, (metric,))
        if found.empty or np.isnan(found["difference"].iloc[0]):
            return None
        row = found.iloc[0]
        return Difference(float(row["difference"]), float(row["low"]), float(row["high"]), float(row["p"]), int(row["n"]))

    def tests(self, reference: str, off_center: bool) -> pd.DataFrame:
        """`reference` against every other method: difference, interval, p, Holm's p; empty when it was not run.

        On the images as they are in the study `robustness` when it is there (more seeds), else the headline's; or on off-center
        views.
        """
        evidence = self.evidence
        where = _tested_off_center(evidence) if off_center else _tested_straight(evidence)
        rows = evidence.images(*where) if where else evidence.predictions.iloc[:0]
        budgets = [b for b in HEADLINE_BUDGETS if b in set(rows["budget"])] or [evidence.headline]
        if reference not in set(rows["method"]):
            return pd.DataFrame(columns=list(statistics.COMPARISON_COLUMNS))
        return statistics.compare(rows, reference, TESTED_METRICS, budgets)

    @cached_property
    def by_size(self) -> pd.DataFrame:
        """`stratum, method, value, low, high, n, ...`: share of the ceiling by quartile of lesion size, at the headline budget."""
        return _strata(strata.by_lesion_size(self._at_headline), sizes=True)

    @cached_property
    def by_class(self) -> pd.DataFrame:
        """The same by class."""
        return _strata(strata.by_class(self._at_headline, self.evidence.classes), sizes=False)

    @property
    def _at_headline(self) -> pd.DataFrame:
        rows = self.evidence.main_predictions
        return rows[np.isclose(rows["budget"], self.evidence.headline) & (rows["method"] != "no-pruning")]

    @cached_property
    def model(self) -> Model | None:
        """The supplement's model fitted to LATS, or None without retention over several budgets."""
        rows = self.table("retention")
        rows = rows[(rows["method"] == "lats") & rows["value"].notna()].sort_values("budget")
        images = self.evidence.main_predictions
        images = strata.lesion_rows(images[images["method"] == "lats"]).drop_duplicates("image_id")
        if len(rows) < 3 or images.empty or not (rows["budget"] < 1).any():
            return None
        prevalence = images["lesion"].to_numpy(float) / images["n_patches"].to_numpy(float)
        budgets, measured = rows["budget"].to_numpy(float), rows["value"].to_numpy(float)
        fitted = retention_model.fit_separation(budgets, measured, prevalence, exact=True)
        fine = np.linspace(0.05, 1, 96)
        predicted = retention_model.mean_predicted_retention(fine, fitted, prevalence, exact=True)
        approximate = retention_model.mean_predicted_retention(fine, fitted, prevalence)
        return Model(fitted, budgets, measured, fine, predicted, approximate)


@dataclass(frozen=True)
class Model:
    """The Gaussian retention model: fitted separation, what was measured, and the two predictions over a fine grid of budgets."""

    separation: float
    budgets: np.ndarray
    measured: np.ndarray
    fine: np.ndarray
    predicted: np.ndarray
    approximate: np.ndarray


def _tested_straight(evidence: Evidence) -> tuple[str, str] | None:
    study = "robustness" if "robustness" in evidence.studies else evidence.study
    names = [name for name in evidence.datasets(study) if "@" not in name]
    return (study, names[0]) if names else None


def _tested_off_center(evidence: Evidence) -> tuple[str, str] | None:
    pair = evidence.off_center
    return None if pair is None else (pair.study, pair.moved)


def _strata(found: pd.DataFrame, sizes: bool) -> pd.DataFrame:
    """Strata with the share of the ceiling as `value, low, high`, and the range of lesion sizes in the name of a quartile."""
    table = found.rename(columns={"low": "pooled_low", "high": "pooled_high"})
    table = table.rename(columns={"retention_of_ceiling": "value", "share_low": "low", "share_high": "high"})
    if sizes and len(table):
        spans = table.groupby("stratum")[["smallest", "largest"]].agg({"smallest": "min", "largest": "max"})
        names = {s: f"{s}, {int(r.smallest)} to {int(r.largest)} patches" for s, r in spans.iterrows()}
        table["stratum"] = table["stratum"].map(names)
    return table
