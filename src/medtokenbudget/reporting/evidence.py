"""Everything a report is made of, read once from the run directory.

Tables, figures and sentences all use this object and open no file themselves, so that they show the same numbers. Every point value
comes from `results.csv` (`Evidence.values`), as the mean over seeds.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np
import pandas as pd

from medtokenbudget.backbone.views import OFF_CENTER
from medtokenbudget.data import Manifest
from medtokenbudget.errors import RequestError
from medtokenbudget.files import read_lines
from medtokenbudget.reporting.looks import CONTROLS, PAPER_RECIPE, is_reference, ordered, selector_of
from medtokenbudget.reporting.patch_orders import PatchOrders
from medtokenbudget.runs.run import AS_IS, ATTRIBUTES, METRICS, RESULTS, ROUTING, RunInfo

__all__ = ["AS_IS", "OFF_CENTER", "VIEW_NAMES", "Evidence"]

VIEW_NAMES = {AS_IS: "as is", OFF_CENTER: "off-center"}
HEADLINE = 0.3
MOST_DRAWN = 14
"""Methods that one figure can show; the tables have all."""


@dataclass(frozen=True)
class Evidence:
    """One run, read from its directory.

    Attributes:
        run: The run directory.
        info: `run.json`.
        results: `results.csv`.
        predictions: `predictions.parquet`.
        classes: Class names; labels and predictions are indices into them.
        training: `metrics.jsonl`, empty when there is none.
        orders: `routing.safetensors`, or None.
        manifest: The manifest of the images, or None when it is out of reach.
        attributes: `attributes.parquet`: the stratum of each image by property, or None.
        missing: What the report cannot show and why, one sentence each.
    """

    run: Path
    info: RunInfo
    results: pd.DataFrame
    predictions: pd.DataFrame
    classes: tuple[str, ...]
    training: pd.DataFrame
    orders: PatchOrders | None
    manifest: Manifest | None
    attributes: pd.DataFrame | None = None
    missing: list[str] = field(default_factory=list)

    @classmethod
    def read(cls, run: Path) -> Evidence:
        """Reads a run directory.

        Raises:
            RequestError: If `run` is not a run directory of this version, or has no results yet.
        """
        if not run.is_dir():
            raise RequestError(f"{run} is not a directory. Pass a run directory written by `mtb sweep`, `mtb train` or `mtb demo`.")
        info = RunInfo.read(run)
        results = info.results()
        if results.empty:
            raise RequestError(f"{run / RESULTS} has no rows yet. Run the same command again to finish the run.")
        predictions, classes = info.predictions()
        for frame in (results, predictions):
            frame["budget"] = frame["budget"].round(6)
        missing: list[str] = []
        training = pd.DataFrame(read_lines(info.file(METRICS))) if (run / METRICS).is_file() else pd.DataFrame()
        if training.empty and info.evaluation is None:
            missing.append("Training curves: the run has no metrics.jsonl.")
        orders = PatchOrders.read(info.file(ROUTING)) if (run / ROUTING).is_file() else None
        if orders is None:
            missing.append("Score histograms and pictures of kept patches: the run has no routing.safetensors.")
        attributes = _attributes(info) if info.evaluation is not None else None
        if info.evaluation is not None and not info.evaluation["own"]:
            missing.append("Comparison with the model's own validation: the model was not loaded from its run directory.")
        manifest = _manifest(run, info, missing)
        return cls(run, info, results, predictions, classes, training, orders, manifest, attributes, missing)

    @property
    def dataset(self) -> str:
        """The user's own name of the data set."""
        return self.info.dataset

    @property
    def source(self) -> str:
        """The kind of source that the images came from, for example `isic`."""
        return (self.info.source.split() or [""])[0]

    @cached_property
    def studies(self) -> list[str]:
        return list(dict.fromkeys(self.results["study"]))

    @cached_property
    def study(self) -> str:
        """The study the headline is about: `main`, or else the one with the most rows."""
        return "main" if "main" in self.studies else str(self.results["study"].value_counts(sort=True).idxmax())

    @cached_property
    def main(self) -> pd.DataFrame:
        """Rows of results.csv of the headline study, images as they are."""
        return self.cells(self.study, AS_IS)

    @cached_property
    def main_predictions(self) -> pd.DataFrame:
        return self.images(self.study, AS_IS)

    @cached_property
    def methods(self) -> list[str]:
        """Methods of the headline study, in the order of every table."""
        return self.ordered(self.main["method"])

    @cached_property
    def focus(self) -> str:
        """The method the report is about: the one `mtb predict` uses; without a trained one, the first method with a budget."""
        return self.focus_of(self.methods)

    def focus_of(self, methods: Iterable[str]) -> str:
        """The method among `methods` that the report is about."""
        names = list(methods)
        wanted = [self.info.main, PAPER_RECIPE, *self._learned]
        found = next((m for m in wanted if m in names), None)
        rules = [m for m in names if not is_reference(m)]
        return found or next((m for m in rules if m not in CONTROLS), (rules or names)[0])

    @cached_property
    def is_trained(self) -> bool:
        """Whether the method the report is about was trained."""
        return self.focus in self._learned

    @cached_property
    def paper_method(self) -> str | None:
        """The paper's recipe where the run has it beside the method the report is about."""
        return PAPER_RECIPE if PAPER_RECIPE in self.methods and self.focus != PAPER_RECIPE else None

    @property
    def leading(self) -> list[str]:
        """The method the report is about, then the paper's recipe."""
        return [self.focus, *([self.paper_method] if self.paper_method else [])]

    @property
    def emphasized(self) -> list[str]:
        """Methods that every figure shows and emphasizes: the leading ones and the controls that need no mask."""
        return [*self.leading, *[m for m in ("center", "darkness", "random") if m in self.methods and m not in self.leading]]

    def drawn(self, methods: Iterable[str]) -> list[str]:
        """Those of `methods` that a figure shows, in the same order: all, or if they are too many the most telling ones.

        These are the emphasized methods and the references, then in turn the highest in share of the ceiling and in macro F1 of
        those without a variant or a head of their own.
        """
        names = list(dict.fromkeys(methods))
        if len(names) <= MOST_DRAWN:
            return names
        chosen = [m for m in names if m in (*self.emphasized, "oracle", "no-pruning")]
        plain = [m for m in names if m == selector_of(m) and m not in chosen]
        ranks = [sorted(plain, key=lambda m: -values.get(m, -1.0)) for values in map(self.at, ("retention_of_ceiling", "macro_f1"))]
        for method in dict.fromkeys(m for pair in zip(*ranks) for m in pair):
            if len(chosen) < MOST_DRAWN:
                chosen.append(method)
        return [m for m in names if m in chosen]

    @cached_property
    def _learned(self) -> list[str]:
        """Trained methods: the main one, the paper's recipe, then the others by name."""
        learned = [name for name, about in self.info.methods.items() if about.learned]
        first = [m for m in (self.info.main, PAPER_RECIPE) if m in learned]
        return [*first, *sorted(m for m in learned if m not in first)]

    def ordered(self, methods: Iterable[str]) -> list[str]:
        """Sorts methods for tables: trained ones first, controls last."""
        return ordered(methods, self._learned)

    def with_controls(self, methods: Iterable[str]) -> list[str]:
        """The methods and the controls, sorted; a control that was not run becomes a row of dashes."""
        return self.ordered([*methods, *CONTROLS])

    @cached_property
    def budgets(self) -> list[float]:
        return sorted(self.main["budget"].unique())

    @cached_property
    def headline(self) -> float:
        """Budget 0.3, or the measured budget nearest to it."""
        return float(min(self.budgets, key=lambda budget: (abs(budget - HEADLINE), budget)))

    @cached_property
    def k(self) -> int:
        """Number of patches kept at the headline budget."""
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
        """Validation images that retention is measured on."""
        return int(self.main["n_masked"].max())

    @cached_property
    def off_center_study(self) -> str | None:
        """The study with both the images as they are and off-center views: `center-bias`, or else the headline study."""
        both = {AS_IS, OFF_CENTER}
        return next((s for s in ("center-bias", self.study) if both <= set(self.cells(s)["view"])), None)

    def cells(self, study: str, view: str | None = None) -> pd.DataFrame:
        """Rows of results.csv of one study (and view)."""
        rows = self.results[self.results["study"] == study]
        return rows if view is None else rows[rows["view"] == view]

    def images(self, study: str, view: str) -> pd.DataFrame:
        """Rows of predictions.parquet of one study and view."""
        rows = self.predictions
        return rows[(rows["study"] == study) & (rows["view"] == view)]

    def values(self, metric: str, study: str | None = None, view: str = AS_IS) -> pd.DataFrame:
        """`method, budget, value`: a column of results.csv as the mean over seeds."""
        rows = self.cells(study or self.study, view)
        means = rows.groupby(["method", "budget"], sort=False)[metric].mean()
        return means.rename("value").reset_index()

    def at(self, metric: str, budget: float | None = None, study: str | None = None, view: str = AS_IS) -> dict[str, float]:
        """Method -> value at one budget (the headline budget by default); only what was measured."""
        rows = self.values(metric, study, view).dropna(subset="value")
        rows = rows[np.isclose(rows["budget"], self.headline if budget is None else budget)]
        return dict(zip(rows["method"], rows["value"].astype(float)))


def _attributes(info: RunInfo) -> pd.DataFrame | None:
    return pd.read_parquet(info.file(ATTRIBUTES)) if (info.path / ATTRIBUTES).is_file() else None


def _manifest(run: Path, info: RunInfo, missing: list[str]) -> Manifest | None:
    """The manifest that run.json names, or None with a note in `missing`."""
    if not info.manifest:
        missing.append("Pictures of images: run.json does not name a manifest.")
        return None
    try:
        return Manifest.read(run / info.manifest)
    except RequestError:
        missing.append(f"Pictures of images: the manifest {Path(info.manifest).name} cannot be read.")
        return None
