"""Everything a report is made of, read once from the run directory: results, predictions, training metrics, patch orders.

Its own file so that tables, figures and sentences look at the same numbers; no other module of the report opens these files.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from safetensors import safe_open

from medtokenbudget.data import Manifest
from medtokenbudget.errors import RequestError
from medtokenbudget.experiments.results import read_predictions, read_results
from medtokenbudget.experiments.run import RunInfo
from medtokenbudget.files import read_lines
from medtokenbudget.report.style import ordered

OFF_CENTER = "@off-center"
HEADLINE = 0.3
CONTROLS = ("center", "darkness", "random", "oracle")


@dataclass(frozen=True)
class Routing:
    """Patch orders and scores of the main data set.

    order    (method, seed) -> [n, N] patch numbers, best first
    scores   seed -> [n, N] scores of LATS
    lesion   [n, N] bool; has_mask [n] bool
    """

    image_ids: list[str]
    grid: tuple[int, int]
    order: dict[tuple[str, int], np.ndarray]
    scores: dict[int, np.ndarray]
    lesion: np.ndarray
    has_mask: np.ndarray

    @classmethod
    def read(cls, path: Path) -> Routing:
        try:
            with safe_open(str(path), framework="numpy") as file:
                about = json.loads((file.metadata() or {})["routing"])
                names = set(file.keys())
                order = {_unit(k, 1): file.get_tensor(k).astype(np.int64) for k in sorted(names) if k.startswith("order/")}
                scores = {
                    _unit(k, 1)[1]: file.get_tensor(k).astype(np.float64) for k in sorted(names) if k.startswith("scores/lats/")
                }
                lesion = file.get_tensor("lesion").astype(bool)
                has_mask = file.get_tensor("has_mask").astype(bool)
            ids, (rows, columns) = about["image_ids"]["as-is"], about["grid"]
            return cls(ids, (int(rows), int(columns)), order, scores, lesion, has_mask)
        except (KeyError, ValueError, OSError) as error:
            raise RequestError(f"{path} is not a routing file of this version ({error}). Make it anew with `mtb sweep`.") from None

    def kept(self, method: str, seed: int, k: int) -> np.ndarray:
        """[n, N] bool: the `k` best patches of each image."""
        order = self.order[method, seed]
        kept = np.zeros(order.shape, bool)
        np.put_along_axis(kept, order[:, :k], True, axis=1)
        return kept

    def seed_of(self, method: str) -> int | None:
        """The first seed that has this method's order."""
        return min((seed for name, seed in self.order if name == method), default=None)


def _unit(key: str, start: int) -> tuple[str, int]:
    *method, seed = key.split("/")[start:]
    return "/".join(method), int(seed)


@dataclass(frozen=True)
class OffCenter:
    """A study with a data set as it is (`straight`) and its off-center views (`moved`)."""

    study: str
    straight: str
    moved: str


@dataclass(frozen=True)
class Evidence:
    """One run, read. `missing` says in plain words what could not be shown, and why."""

    run: Path
    info: dict[str, Any]
    results: pd.DataFrame
    predictions: pd.DataFrame
    classes: tuple[str, ...]
    training: pd.DataFrame
    routing: Routing | None
    manifest: Manifest | None
    missing: list[str] = field(default_factory=list)

    @classmethod
    def read(cls, run: Path) -> Evidence:
        if not run.is_dir():
            raise RequestError(
                f"{run} is not a folder. Give the run directory that `mtb sweep`, `mtb reproduce` or `mtb demo` wrote."
            )
        info = asdict(RunInfo.read(run))
        results = read_results(run / "results.csv")
        if results.empty:
            raise RequestError(f"{run / 'results.csv'} has no rows yet. Finish the run first: the same command goes on.")
        predictions, classes = read_predictions(run / "predictions.parquet")
        for frame in (results, predictions):
            frame["budget"] = frame["budget"].round(6)
            frame["dataset"] += frame["view"].map({"as-is": "", "off-center": OFF_CENTER})
        missing: list[str] = []
        metrics = run / "metrics.jsonl"
        training = pd.DataFrame(read_lines(metrics)) if metrics.is_file() else pd.DataFrame()
        if training.empty:
            missing.append("Training curves: the run has no metrics.jsonl.")
        routing = Routing.read(run / "routing.safetensors") if (run / "routing.safetensors").is_file() else None
        if routing is None:
            missing.append("Score histograms and pictures of kept patches: the run has no routing.safetensors.")
        return cls(run, info, results, predictions, classes, training, routing, _manifest(run, info, missing), missing)

    @cached_property
    def studies(self) -> list[str]:
        return list(dict.fromkeys(self.results["study"]))

    @cached_property
    def study(self) -> str:
        """The study that the headline is about: `main`, or else the one with the most cells."""
        return "main" if "main" in self.studies else str(self.results["study"].value_counts(sort=True).idxmax())

    @cached_property
    def dataset(self) -> str:
        """The data set of the headline: the images as they are."""
        names = self.results.loc[self.results["study"] == self.study, "dataset"]
        plain = [name for name in dict.fromkeys(names) if OFF_CENTER not in name]
        named = self.info.get("dataset")
        return str(named) if named in plain else str((plain or list(names))[0])

    @cached_property
    def main(self) -> pd.DataFrame:
        """Results of the headline study on the images as they are."""
        return self.cells(self.study, self.dataset)

    @cached_property
    def main_predictions(self) -> pd.DataFrame:
        rows = self.predictions
        return rows[(rows["study"] == self.study) & (rows["dataset"] == self.dataset)]

    @cached_property
    def methods(self) -> list[str]:
        return ordered(self.main["method"])

    @cached_property
    def budgets(self) -> list[float]:
        return sorted(self.main["budget"].unique())

    @cached_property
    def headline(self) -> float:
        """0.3, or the measured budget nearest to it."""
        return float(min(self.budgets, key=lambda budget: (abs(budget - HEADLINE), budget)))

    @cached_property
    def seeds(self) -> list[int]:
        return sorted(int(seed) for seed in self.main["seed"].unique())

    @cached_property
    def has_masks(self) -> bool:
        return bool((self.main["n_masked"] > 0).any())

    @cached_property
    def off_center(self) -> OffCenter | None:
        """Where a data set and its off-center views were both measured: the study `center-bias`, or else the headline's."""
        for study in ("center-bias", self.study):
            names = self.datasets(study)
            for moved in (name for name in names if name.endswith(OFF_CENTER)):
                if moved.removesuffix(OFF_CENTER) in names:
                    return OffCenter(study, moved.removesuffix(OFF_CENTER), moved)
        return None

    def cells(self, study: str, dataset: str | None = None) -> pd.DataFrame:
        """Rows of results.csv of one study (and data set)."""
        rows = self.results[self.results["study"] == study]
        return rows if dataset is None else rows[rows["dataset"] == dataset]

    def datasets(self, study: str) -> list[str]:
        return list(dict.fromkeys(self.cells(study)["dataset"]))

    def cell(
        self, method: str, budget: float | None = None, study: str | None = None, dataset: str | None = None
    ) -> pd.Series | None:
        """Mean over seeds of the measured columns of one method at one budget, or None when it was not run."""
        rows = self.cells(study or self.study, dataset or self.dataset)
        rows = rows[(rows["method"] == method) & np.isclose(rows["budget"], self.headline if budget is None else budget)]
        return None if rows.empty else rows.drop(columns=["study", "dataset", "method"]).mean()

    def images(self, study: str, dataset: str, methods: Sequence[str] | None = None) -> pd.DataFrame:
        """Prediction rows of one study and data set."""
        rows = self.predictions
        rows = rows[(rows["study"] == study) & (rows["dataset"] == dataset)]
        return rows if methods is None else rows[rows["method"].isin(methods)]


def _manifest(run: Path, info: dict[str, Any], missing: list[str]) -> Manifest | None:
    """The manifest that run.json names, or a note that the pictures are left out."""
    named = info.get("manifest")
    if not named:
        missing.append("Pictures of images: run.json names no manifest.")
        return None
    try:
        return Manifest.read(run / str(named))
    except RequestError as error:
        missing.append(f"Pictures of images: the manifest cannot be read ({error})")
        return None
