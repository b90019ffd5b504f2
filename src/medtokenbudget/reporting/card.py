"""The model card: what a saved model is for, what it was made from, how well it works and where it fails.

It is stored with the model, not with the report. Point values come from `results.csv`, intervals and strata from
`predictions.parquet`, everything else from `run.json`; the card says so where something was not measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from markupsafe import Markup

from medtokenbudget import metrics
from medtokenbudget.backbone.views import OFF_CENTER
from medtokenbudget.config import HEADLINE_BUDGET as HEADLINE
from medtokenbudget.config import HEADLINE_BUDGETS, NOTICE, PAPER_RECIPE, USE_NOTICE
from medtokenbudget.data import Manifest, ManifestError
from medtokenbudget.escaping import markdown_text
from medtokenbudget.measures import budget_text, is_missing, percent, percentage
from medtokenbudget.model import MedTokenBudget
from medtokenbudget.model.looks import look
from medtokenbudget.reporting.text import markdown, template
from medtokenbudget.runs.run import AS_IS, RunInfo
from medtokenbudget.runs.statistics import by_class, by_lesion_size, intervals

DRAWS = 2000
CLASSIFICATION = ("accuracy", "balanced_accuracy", "macro_f1")
RETENTION = ("retention", "retention_of_ceiling")
BESIDE = (PAPER_RECIPE, "center", "darkness", "random", "no-pruning")
"""What the model is compared with, where the run has it: the paper's recipe and the controls."""


@dataclass(frozen=True)
class ModelFacts:
    """What a model knows about itself.

    Attributes:
        main: The method it uses by default, written `selector+head:variant`.
        selectors: All methods it has a classifier for.
        classes: Class names.
        backbone: Name, weights hash, grid and image size of the backbone.
        fingerprint: Hash of the model.
        recipe: Training recipe of the main method.
        lesion_loss: Weight of the lesion loss; 0 when no mask was used.
        split: How the data were split, as a sentence.
    """

    main: str
    selectors: Sequence[str]
    classes: Sequence[str]
    backbone: dict[str, Any]
    fingerprint: str
    recipe: str
    lesion_loss: float
    split: str


@dataclass(frozen=True)
class _Tables:
    """The rows of a run that belong to the saved model: its first seed."""

    results: pd.DataFrame
    predictions: pd.DataFrame
    seed: int | None

    def cells(self, frame: pd.DataFrame, method: str, view: str = AS_IS) -> pd.DataFrame:
        """Returns the rows of one method and view, of the first study that has them."""
        rows = frame[(frame["method"] == method) & (frame["seed"] == self.seed) & (frame["view"] == view)]
        return rows[rows["study"] == rows["study"].iloc[0]] if len(rows) else rows

    def value(self, method: str, budget: float, metric: str, view: str = AS_IS) -> float:
        """Returns one number of results.csv; NaN where it was not measured."""
        rows = self.cells(self.results, method, view)
        rows = rows[np.isclose(rows["budget"].astype(float), budget)]
        return float(rows[metric].iloc[0]) if len(rows) else float("nan")


def run_card(run: Path | str, model: MedTokenBudget) -> str:
    """Writes the card of a model that was saved from a run directory, as Markdown."""
    folder = Path(run)
    info = RunInfo.read(folder)
    predictions, _ = info.predictions()
    facts = ModelFacts(
        main=model.main,
        selectors=model.selectors,
        classes=model.classes,
        backbone=model.backbone_fingerprint,
        fingerprint=model.fingerprint,
        recipe=model.train_config.recipe,
        lesion_loss=model.train_config.losses.lesion,
        split=_split(folder, info),
    )
    return model_card(facts, info, info.results(), predictions)


def _split(folder: Path, info: RunInfo) -> str:
    try:
        manifest = Manifest.read(folder / info.manifest)
    except ManifestError:
        return "unknown, because the manifest is no longer where the run found it"
    rule = manifest.split_rule or "as in the manifest"
    known = manifest.rows[manifest.rows["group"].notna()]
    if not len(known):
        return f"{rule}; groups of images of the same lesion or patient are not known"
    crossing = int((known.groupby("group")["split"].nunique() > 1).sum())
    return f"{rule}; {known['group'].nunique():,} groups of images, {crossing:,} of them in more than one part"


def model_card(facts: ModelFacts, info: RunInfo, results: pd.DataFrame, predictions: pd.DataFrame) -> str:
    """Writes the card as Markdown.

    Args:
        facts: What the model knows about itself.
        info: `run.json` of the run it comes from.
        results: `results.csv` of that run.
        predictions: `predictions.parquet` of that run.
    """
    tables = _Tables(results, predictions, info.seeds[0] if info.seeds else None)
    # Escaped here once, because class names are in many cells.
    classes = [markdown(name) for name in facts.classes]
    cell = tables.cells(predictions, facts.main)
    cell = cell[cell["budget"] == HEADLINE]
    labeled = cell[cell["label"] >= 0]
    recalls = pd.Series(metrics.recall(labeled["label"], labeled["predicted"], len(classes)), index=classes, dtype=float)
    return template("card.md").render(
        facts=facts,
        notice=NOTICE,
        use_notice=USE_NOTICE,
        info=info,
        classes=classes,
        others=[name for name in facts.selectors if name != facts.main],
        paper_recipe=PAPER_RECIPE,
        budget=budget_text(HEADLINE),
        draws=f"{DRAWS:,}",
        data=_data(info, facts),
        results=_results(tables, facts),
        beside=_beside(tables, facts),
        recall={
            "head": ["class", "n", "recall"],
            "rows": [
                [name, count, _percentage(recalls.iloc[index])]
                for index, name in enumerate(classes)
                if (count := int((labeled["label"] == index).sum()))
            ],
        },
        strata=_strata(cell, classes),
        calibration=_calibration(tables, facts),
        failures=_failures(tables, facts, cell, recalls if len(labeled) else recalls.iloc[:0]),
    )


def _data(info: RunInfo, facts: ModelFacts) -> dict[str, Any]:
    head = ["part", "images", "masks", *(["classes"] if facts.classes else [])]
    rows = []
    for part, values in info.counts.items():
        if values["images"]:
            classes = ", ".join(f"{markdown_text(name)} {count:,}" for name, count in values["classes"].items() if count)
            rows.append([part, f"{values['images']:,}", f"{values['masks']:,}", Markup(classes)][: len(head)])
    masks = "none were used in training"
    if facts.lesion_loss:
        training = sum(info.counts[part]["masks"] for part in ("train", "select") if part in info.counts)
        masks = f"{training:,} from the training part were used (lesion loss weight {facts.lesion_loss:g})"
    return {"head": head, "rows": rows, "masks": masks}


def _results(tables: _Tables, facts: ModelFacts) -> dict[str, Any]:
    images = tables.cells(tables.predictions, facts.main)
    images = images[images["budget"].isin(HEADLINE_BUDGETS)]
    measured = (*CLASSIFICATION, *RETENTION) if facts.classes else RETENTION
    table = intervals(images, measured, ("budget",), draws=DRAWS).set_index(["budget", "metric"])
    rows = []
    for budget in sorted(images["budget"].unique()):
        cells: dict[str, str] = {}
        n = dict.fromkeys(("accuracy", "retention"), 0)
        for metric in measured:
            value = tables.value(facts.main, budget, metric)
            cells[metric] = "–"
            if (budget, metric) in table.index:
                row: Any = table.loc[[(budget, metric)]].iloc[0]
                n[metric] = int(row["n"])
                if not is_missing(value):
                    cells[metric] = f"{percent(value)} ({percent(row['low'])} to {percent(row['high'])})"
        classified = [n["accuracy"], *(cells[m] for m in CLASSIFICATION)] if facts.classes else []
        rows.append([budget_text(budget), *classified, n["retention"], *(cells[m] for m in RETENTION)])
    classified = ["n", "accuracy", "balanced accuracy", "macro F1"] if facts.classes else []
    return {"head": ["budget", *classified, "n with lesion", "retention", "share of ceiling"], "rows": rows}


def _beside(tables: _Tables, facts: ModelFacts) -> dict[str, Any]:
    measured = ("accuracy", "macro_f1", "retention", "ceiling") if facts.classes else ("retention", "ceiling")
    rows = []
    for method in dict.fromkeys((facts.main, *BESIDE)):
        cells = tables.cells(tables.results, method)
        cells = cells[cells["budget"] == HEADLINE]
        if len(cells):
            labeled, masked = (f"{int(cells[name].iloc[0]):,}" for name in ("n", "n_masked"))
            n = f"{labeled} ({masked})" if facts.classes else masked
            values = [_percentage(tables.value(method, HEADLINE, m)) for m in measured]
            rows.append([f"{look(method).title} `{method}`", n, *values])
    counted = "n (masks)" if facts.classes else "n with lesion"
    names = [name.replace("_", " ").replace("f1", "F1") for name in measured]
    return {"head": [f"method, budget {budget_text(HEADLINE)}", counted, *names], "rows": rows}


def _strata(cell: pd.DataFrame, classes: Sequence[str]) -> list[dict[str, Any]]:
    """Returns retention by lesion size and by class; nothing where no image has a mask."""
    if not cell["kept_lesion"].notna().any():
        return []
    tables = {"lesion size": by_lesion_size(cell, draws=DRAWS)}
    if classes:
        tables["class"] = by_class(cell, classes, draws=DRAWS)
    return [
        {
            "head": [name, "lesion patches", "n", "retention", "ceiling"],
            "rows": [
                [
                    Markup(row.stratum),
                    f"{row.smallest} to {row.largest}",
                    row.n,
                    f"{percent(row.retention)} ({percent(row.low)} to {percent(row.high)})",
                    _percentage(row.ceiling),
                ]
                for row in table.itertuples()
            ],
        }
        for name, table in tables.items()
    ]


def _calibration(tables: _Tables, facts: ModelFacts) -> dict[str, Any]:
    cells = tables.cells(tables.results, facts.main)
    rows = [
        [budget_text(float(budget)), f"{int(n):,}", _percentage(ece)]
        for budget, n, ece in zip(cells["budget"], cells["n"], cells["ece"])
        if budget in HEADLINE_BUDGETS and not is_missing(ece)
    ]
    return {"head": ["budget", "n", "expected calibration error"], "rows": rows}


def _failures(tables: _Tables, facts: ModelFacts, cell: pd.DataFrame, recalls: pd.Series) -> list[str]:
    at = f"at budget {budget_text(HEADLINE)}"
    lines: list[str] = []
    if len(recalls):
        worst = [f"{name} ({percentage(value)})" for name, value in recalls.dropna().sort_values().head(3).items()]
        lines.append(Markup(f"lowest recall {at}: {', '.join(worst)}"))
        absent = recalls.index[recalls.isna()].tolist()
        if absent:
            lines.append(Markup(f"classes without validation images: {', '.join(absent)}"))
    masked = cell[cell["kept_lesion"].notna() & (cell["lesion"].fillna(0) > 0)]
    if len(masked):
        reachable = metrics.reachable(masked["lesion"].astype(int), masked["k"])
        lost = int((masked["kept_lesion"].astype(int) < 0.5 * reachable).sum())
        lines.append(f"less than half of the reachable lesion patches kept {at}: {lost:,} of {len(masked):,} images with a lesion")
    share = tables.value(facts.main, HEADLINE, "retention_of_ceiling", OFF_CENTER)
    if not is_missing(share):
        n = int(tables.value(facts.main, HEADLINE, "n_masked", OFF_CENTER))
        lines.append(f"lesion off-center, {at}: {percentage(share)} of the ceiling (n = {n:,})")
    return lines


def _percentage(value: Any) -> str:
    return "–" if is_missing(value) else percentage(value)
