"""One run as the report reads it: its files, the order of its methods, and its intervals, tests and strata.

Tables, figures and sentences all ask `ReportRun` and open no file themselves, so that they show the same numbers. Point values come
from `results.csv`, as the mean over seeds; intervals, tests and strata are computed here from `predictions.parquet`. The bootstrap
is the only slow part of a report, so each result is computed once.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd
from safetensors import SafetensorError, safe_open

from medtokenbudget.backbone.views import OFF_CENTER
from medtokenbudget.config import CONTROLS, HEADLINE_BUDGET, PAPER_METHODS, PAPER_RECIPE
from medtokenbudget.data import Manifest
from medtokenbudget.data.strata import STRATA, column_strata, stratum_order
from medtokenbudget.errors import RequestError
from medtokenbudget.files import read_lines
from medtokenbudget.measures import METRICS, shown_in
from medtokenbudget.metrics import kept_lesion_counts, ratio, reachable
from medtokenbudget.model.looks import is_reference
from medtokenbudget.runs import run as run_files
from medtokenbudget.runs import statistics
from medtokenbudget.runs.run import AS_IS, Run

MOST_DRAWN = 14
"""Methods that one figure can show; the tables have all."""
_STRATA_DRAWS = 2_000


@dataclass(frozen=True)
class PatchOrders:
    """`routing.safetensors`: the order in which each method keeps the N patches of n original images, and the scores behind it.

    `order` and `scores` map (method, seed) to `[n, N]` patch numbers, best first, and to scores, for methods that learn to score.
    `lesion` is `[n, N]` bool, `has_mask` `[n]`.
    """

    image_ids: list[str]
    grid: tuple[int, int]
    order: dict[tuple[str, int], np.ndarray]
    scores: dict[tuple[str, int], np.ndarray]
    lesion: np.ndarray
    has_mask: np.ndarray

    @classmethod
    def read(cls, path: Path) -> PatchOrders:
        try:
            with safe_open(str(path), framework="numpy") as file:
                about = json.loads((file.metadata() or {})["routing"])
                arrays: dict[str, dict[tuple[str, int], np.ndarray]] = {"order": {}, "scores": {}}
                for key in sorted(file.keys()):
                    if key.startswith(("order/", "scores/")):
                        kind, *method, seed = key.split("/")
                        dtype = np.int64 if kind == "order" else np.float64
                        arrays[kind]["/".join(method), int(seed)] = file.get_tensor(key).astype(dtype)
                lesion, has_mask = (file.get_tensor(name).astype(bool) for name in ("lesion", "has_mask"))
            rows, columns = about["grid"]
            return cls(about["image_ids"][AS_IS], (int(rows), int(columns)), **arrays, lesion=lesion, has_mask=has_mask)
        except (KeyError, ValueError, TypeError, OSError, RecursionError, SafetensorError) as error:
            raise RequestError(f"Cannot read {path} ({error}). Create it again with `mtb sweep`.") from None

    def share_of_possible(self, method: str, seed: int, k: int) -> np.ndarray:
        """Return `[n]` kept lesion patches as a share of what `k` patches could cover; NaN for images without a lesion patch."""
        lesion = self.lesion & self.has_mask[:, None]
        kept = kept_lesion_counts(self.order[method, seed], lesion, [k])[:, 0]
        return ratio(kept, reachable(lesion.sum(1), k))

    def seed_of(self, method: str) -> int | None:
        return min((seed for name, seed in self.order if name == method), default=None)


class Difference(NamedTuple):
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


@dataclass(frozen=True, eq=False)
class ReportRun:
    """One run, read from its directory, with its intervals, tests and strata.

    `training` is `metrics.jsonl` and `attributes` is `attributes.parquet`, the stratum of each image by property; empty when there
    is none. `manifest` is None when it is out of reach. `missing` says in sentences what the report cannot show and why.
    """

    name: str
    info: Run
    results: pd.DataFrame
    predictions: pd.DataFrame
    training: pd.DataFrame
    orders: PatchOrders | None
    manifest: Manifest | None
    attributes: pd.DataFrame
    missing: list[str] = field(default_factory=list)

    @classmethod
    def read(cls, path: Path, name: str = "", by: Sequence[str] = ()) -> ReportRun:
        """Read a run directory; `by` are columns of its manifest that become strata."""
        if not path.is_dir():
            advice = "Pass a run directory written by `mtb sweep`, `mtb train` or `mtb demo`."
            raise RequestError(f"{path} is not a directory. {advice}")
        info = Run(path)
        results, predictions = info.results, info.predictions
        if results.empty:
            raise RequestError(f"{path / run_files.RESULTS} has no rows yet. Run the same command again to finish the run.")
        # The CSV file has ten digits of a budget, the Parquet file all: unrounded the two would not meet.
        for frame in (results, predictions):
            frame["budget"] = frame["budget"].round(6)
        missing: list[str] = []
        log, routing, strata = (
            info.file(file) if (path / file).is_file() else None
            for file in (run_files.METRICS, run_files.ROUTING, run_files.ATTRIBUTES)
        )
        training = pd.DataFrame(read_lines(log) if log else [])
        if training.empty and info.evaluation is None:
            missing.append("Training curves: the run has no metrics.jsonl.")
        if routing is None:
            missing.append("Score histograms and pictures of kept patches: the run has no routing.safetensors.")
        if info.evaluation is not None and not info.evaluation["own"]:
            missing.append("Comparison with the model's own validation: the model was not loaded from its run directory.")
        manifest = None
        try:
            manifest = info.manifest
        except RequestError:
            missing.append(f"Pictures of images: the manifest {info.manifest_path.name} cannot be read.")
        orders = PatchOrders.read(routing) if routing else None
        attributes = pd.read_parquet(strata) if strata else pd.DataFrame()
        if by:
            columns = pd.DataFrame({"image_id": info.manifest.ids, **column_strata(info.manifest, by)})
            # A column that is asked for again replaces the one that the evaluation stored.
            earlier = attributes.drop(columns=[name for name in columns if name != "image_id"], errors="ignore")
            attributes = columns if earlier.empty else earlier.merge(columns, on="image_id", how="left")
        return cls(name, info, results, predictions, training, orders, manifest, attributes, missing)

    @property
    def source(self) -> str:
        return (self.info.source.split() or [""])[0]

    # Which study, methods and budgets the report is about.

    @cached_property
    def studies(self) -> list[str]:
        return list(dict.fromkeys(self.results["study"]))

    @cached_property
    def study(self) -> str:
        """The study the headline is about: `main`, or else the one with the most rows."""
        return "main" if "main" in self.studies else str(self.results["study"].value_counts(sort=True).idxmax())

    @cached_property
    def off_center_study(self) -> str | None:
        """The first study with both the original images and off-center views, the headline study before others."""
        both = {AS_IS, OFF_CENTER}
        return next((s for s in (self.study, *self.studies) if both <= set(self.cells(s)["view"])), None)

    @cached_property
    def main(self) -> pd.DataFrame:
        return self.cells(self.study, AS_IS)

    @cached_property
    def main_predictions(self) -> pd.DataFrame:
        return self.images(self.study, AS_IS)

    @cached_property
    def headline_rows(self) -> pd.DataFrame:
        """Predictions at the headline budget."""
        return self.main_predictions[np.isclose(self.main_predictions["budget"], self.headline)]

    @property
    def focus_rows(self) -> pd.DataFrame:
        """The same of the method the report is about."""
        return self.headline_rows[self.headline_rows["method"] == self.focus]

    @cached_property
    def budgets(self) -> list[float]:
        return sorted(self.main["budget"].unique())

    @cached_property
    def headline(self) -> float:
        return nearest_headline(self.budgets)

    @cached_property
    def k(self) -> int:
        rows = self.main[(self.main["method"] == self.focus) & np.isclose(self.main["budget"], self.headline)]
        return int((rows if len(rows) else self.main)["k"].iloc[0])

    @cached_property
    def seeds(self) -> list[int]:
        return sorted(int(seed) for seed in self.main["seed"].unique())

    @cached_property
    def n(self) -> int:
        """Labeled validation images of the headline study."""
        return int(self.main["n"].max())

    @cached_property
    def n_images(self) -> int:
        """Validation images of the headline study, with or without a label or mask."""
        return int(self.predictions[self.predictions["study"] == self.study]["image_id"].nunique())

    @cached_property
    def n_masked(self) -> int:
        return int(self.main["n_masked"].max())

    @cached_property
    def methods(self) -> list[str]:
        return self.ordered(self.main["method"])

    @cached_property
    def _learned(self) -> list[str]:
        """Trained methods: the main one, the paper's recipe, then the others by name."""
        learned = [name for name, about in self.info.methods.items() if about["learned"]]
        first = [m for m in (self.info.main, PAPER_RECIPE) if m in learned]
        return [*first, *sorted(m for m in learned if m not in first)]

    def ordered(self, methods: Iterable[str]) -> list[str]:
        """Sort methods for tables: trained ones, the paper's baselines, other methods, then the controls."""
        known = list(dict.fromkeys(methods))
        baselines = [m for m in PAPER_METHODS if m not in self._learned]
        controls = [m for m in CONTROLS if m not in (*self._learned, *baselines)]
        others = sorted(m for m in known if m not in {*self._learned, *baselines, *controls})
        return [m for m in [*self._learned, *baselines, *others, *controls] if m in known]

    def with_controls(self, methods: Iterable[str]) -> list[str]:
        """Add the controls and sort; a control that was not run becomes a row of dashes."""
        return self.ordered([*methods, *CONTROLS])

    @cached_property
    def focus(self) -> str:
        """The method the report is about: the one `mtb predict` uses; without a trained one, the first method with a budget."""
        return self.focus_of(self.methods)

    def focus_of(self, methods: Iterable[str]) -> str:
        names = list(methods)
        preferred = next((m for m in (self.info.main, PAPER_RECIPE, *self._learned) if m in names), None)
        rules = [m for m in names if not is_reference(m)]
        return preferred or next((m for m in rules if m not in CONTROLS), (rules or names)[0])

    @cached_property
    def is_trained(self) -> bool:
        return self.focus in self._learned

    @cached_property
    def paper_method(self) -> str | None:
        """The paper's recipe where the run has it next to the method the report is about."""
        return PAPER_RECIPE if PAPER_RECIPE in self.methods and self.focus != PAPER_RECIPE else None

    @property
    def leading(self) -> list[str]:
        return [self.focus, *([self.paper_method] if self.paper_method else [])]

    @property
    def emphasized(self) -> list[str]:
        """Methods that every figure shows and emphasizes: the leading ones and the controls that need no mask."""
        controls = [m for m in CONTROLS if m in self.methods and not is_reference(m)]
        return list(dict.fromkeys([*self.leading, *controls]))

    def drawn(self, methods: Iterable[str]) -> list[str]:
        """Return the `methods` that a figure shows, in the same order: all, or if they are too many the most telling ones.

        These are the emphasized methods and the references, then in turn the highest in share of the ceiling and in macro F1 of
        those without a variant or another head.
        """
        names = list(dict.fromkeys(methods))
        if len(names) <= MOST_DRAWN:
            return names
        chosen = [m for m in names if m in (*self.emphasized, "oracle", "no-pruning")]
        plain = [m for m in names if not {":", "+"} & set(m) and m not in chosen]
        ranks = [sorted(plain, key=lambda m: -values.get(m, -1.0)) for values in map(self.at, ("retention_of_ceiling", "macro_f1"))]
        ranked = dict.fromkeys(m for pair in zip(*ranks) for m in pair)
        chosen += list(ranked)[: MOST_DRAWN - len(chosen)]
        return [m for m in names if m in chosen]

    # Values, intervals and tests.

    def cells(self, study: str | None, view: str | None = None) -> pd.DataFrame:
        rows = self.results[self.results["study"] == study]
        return rows if view is None else rows[rows["view"] == view]

    def images(self, study: str | None, view: str) -> pd.DataFrame:
        rows = self.predictions
        return rows[(rows["study"] == study) & (rows["view"] == view)]

    @cached_property
    def values(self) -> pd.DataFrame:
        """Every value that was measured, one per row: `study, view, method, budget, metric, value, sd, seeds, low, high, n`.

        Mean and deviation over the seeds; the headline study also has intervals, with the number of images behind them.
        """
        keys = ["study", "view", "method", "budget", "metric"]
        long = self.results.melt(id_vars=keys[:-1], value_vars=list(METRICS), var_name="metric").dropna(subset="value")
        means = long.groupby(keys, sort=False).agg(value=("value", "mean"), sd=("value", "std"), seeds=("value", "count"))
        # One method at a time: the draws of macro F1 over all methods at once would fill the memory.
        parts = [
            statistics.intervals(rows, shown_in("interval"), by=keys[:-1])
            for _, rows in self.main_predictions.groupby("method", sort=False)
        ]
        intervals = pd.concat(parts, ignore_index=True).astype({"budget": float})
        return means.reset_index().merge(intervals[[*keys, "low", "high", "n"]], on=keys, how="left")

    def curve(self, metric: str, study: str | None = None, view: str = AS_IS) -> pd.DataFrame:
        """Return the rows of `values` of one metric, by default of the headline study."""
        rows = self.values
        return rows[(rows["study"] == (study or self.study)) & (rows["view"] == view) & (rows["metric"] == metric)]

    def by_method(self, metric: str, budget: float | None = None, study: str | None = None, view: str = AS_IS) -> pd.DataFrame:
        """Return the rows of `values` of one metric at one budget, by default the headline budget, with the method as index."""
        rows = self.curve(metric, study, view)
        return rows[np.isclose(rows["budget"], self.headline if budget is None else budget)].set_index("method")

    def at(self, metric: str, budget: float | None = None, study: str | None = None, view: str = AS_IS) -> dict[str, float]:
        """Return method -> value, of the rows of `by_method`."""
        return dict(self.by_method(metric, budget, study, view)["value"])

    def difference(self, method: str, other: str, metric: str) -> Difference | None:
        """Return `method` minus `other` at the headline budget of the headline study; None unless both were measured."""
        rows = self.headline_rows[self.headline_rows["method"].isin([method, other])]
        if {method, other} - set(rows["method"]):
            return None
        tests = statistics.compare(rows, method, (metric,))
        if tests.empty or np.isnan(tests["difference"].iloc[0]):
            return None
        return Difference(*(tests[name].iloc[0].item() for name in ("difference", "low", "high", "p", "n")))

    # Strata: `stratum, method, value, low, high, n, ...`, the share of the ceiling at the headline budget.

    @property
    def _at_headline(self) -> pd.DataFrame:
        return self.headline_rows[self.headline_rows["method"] != "no-pruning"]  # keeps everything of every stratum

    @cached_property
    def by_size(self) -> pd.DataFrame:
        table = _share_of_ceiling(statistics.by_lesion_size(self._at_headline))
        if len(table):
            spans = table.groupby("stratum")[["smallest", "largest"]].agg({"smallest": "min", "largest": "max"})
            names = {s: f"{s}, {int(r.smallest)} to {int(r.largest)} patches" for s, r in spans.iterrows()}
            table["stratum"] = table["stratum"].map(names)
        return table

    @cached_property
    def by_class(self) -> pd.DataFrame:
        return _share_of_ceiling(statistics.by_class(self._at_headline, self.info.classes))

    @cached_property
    def by_attribute(self) -> pd.DataFrame:
        """The same by every property of `attributes`, with the column `property`."""
        parts = []
        # With an underscore: the numbers behind the strata.
        known = [name for name in map(str, self.attributes) if name != "image_id" and not name.startswith("_")]
        first = [name for name in ("class", *STRATA) if name in known]
        for name in dict.fromkeys([*first, *known]):
            values = self.attributes.set_index("image_id")[name].dropna()
            order = stratum_order(name, values)
            rows = statistics.by_attribute(self._at_headline, values, order, draws=_STRATA_DRAWS)
            parts += [_share_of_ceiling(rows).assign(property=name)] if len(rows) else []
        return pd.concat(parts, ignore_index=True) if parts else pd.DataFrame()


def nearest_headline(budgets: Iterable[float]) -> float:
    return float(min(budgets, key=lambda budget: (abs(budget - HEADLINE_BUDGET), budget)))


def _share_of_ceiling(table: pd.DataFrame) -> pd.DataFrame:
    """Rename the columns of a table of strata so that `value, low, high` are the share of the ceiling."""
    table = table.rename(columns={"low": "pooled_low", "high": "pooled_high"})
    return table.rename(columns={"retention_of_ceiling": "value", "share_low": "low", "share_high": "high"})
