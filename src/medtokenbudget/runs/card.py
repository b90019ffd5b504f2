"""The model card: what a saved model is for, what it was made from, how well it works and where it fails.

It is stored with the model, not with the report. Point values come from `results.csv`, intervals and strata from
`predictions.parquet`, everything else from `run.json`; the card says so where something was not measured.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from markupsafe import Markup

from medtokenbudget import metrics
from medtokenbudget.backbone.views import OFF_CENTER
from medtokenbudget.config import HEADLINE_BUDGET as BUDGET
from medtokenbudget.config import HEADLINE_BUDGETS, NOTICE, PAPER_RECIPE, USE_NOTICE
from medtokenbudget.data.manifest import SPLITS
from medtokenbudget.errors import RequestError
from medtokenbudget.escaping import markdown_text, template
from medtokenbudget.measures import NOT_MEASURED, percentage, with_interval
from medtokenbudget.model.model import MedTokenBudget
from medtokenbudget.runs.run import AS_IS, Run
from medtokenbudget.runs.statistics import by_class, by_lesion_size, intervals, lesion_rows

DRAWS = 2000
CLASSIFICATION = {"accuracy": "accuracy", "balanced_accuracy": "balanced accuracy", "macro_f1": "macro F1"}
RETENTION = {"retention": "retention", "retention_of_ceiling": "share of ceiling"}
COMPARED = (PAPER_RECIPE, "center", "darkness", "random", "no-pruning")
"""What the model is compared with, where the run has it: the paper's recipe and the controls."""


def _markdown(value: str) -> Markup:
    """Escape a name for Markdown, where the entities of HTML would be too many."""
    return Markup(markdown_text(value))


def _code(value: str) -> Markup:
    """Prepare a text for a code span of Markdown, which shows entities unchanged and ends at a backtick or a blank line."""
    return Markup(value.replace("`", "'").replace("\r", " ").replace("\n", " "))


def card_text(run: Run, model: MedTokenBudget) -> str:
    # Escaped here once, because class names are in many cells.
    classes = [_markdown(name) for name in model.classes]
    images = _cells(run, run.predictions, model.main)
    cell = images[images["budget"] == BUDGET]
    labeled = cell[cell["label"] >= 0]
    recalls = pd.Series(metrics.recall(labeled["label"], labeled["predicted"], len(classes)), index=classes, dtype=float)
    counts = [int((labeled["label"] == index).sum()) for index in range(len(classes))]
    rows = [[name, count, percentage(recall)] for name, count, recall in zip(classes, counts, recalls) if count]
    return template(Path(__file__).with_name("card.md"), md=_markdown, code=_code).render(
        run=run,
        model=model,
        classes=classes,
        others=[name for name in model.selectors if name != model.main],
        notice=NOTICE,
        use_notice=USE_NOTICE,
        paper_recipe=PAPER_RECIPE,
        budget=f"{BUDGET:g}",
        draws=f"{DRAWS:,}",
        split=_split(run),
        data=_data(run, model),
        results=_results(run, model, images[images["budget"].isin(HEADLINE_BUDGETS)]),
        compared=_compared(run, model),
        recall={"head": ["class", "n", "recall"], "rows": rows},
        strata=_strata(cell, classes),
        calibration=_calibration(run, model),
        failures=_failures(run, model, cell, recalls if len(labeled) else recalls.iloc[:0]),
    )


def _cells(run: Run, table: pd.DataFrame, method: str, view: str = AS_IS) -> pd.DataFrame:
    # The saved model is of the first seed, so its numbers are.
    seed = run.seeds[0] if run.seeds else None
    rows = table[(table["method"] == method) & (table["seed"] == seed) & (table["view"] == view)]
    return rows[rows["study"] == rows["study"].iloc[0]] if len(rows) else rows


def _value(run: Run, method: str, budget: float, metric: str, view: str = AS_IS) -> float:
    rows = _cells(run, run.results, method, view)
    rows = rows[np.isclose(rows["budget"].astype(float), budget)]
    return float(rows[metric].iloc[0]) if len(rows) else math.nan


def _split(run: Run) -> str:
    try:
        manifest = run.manifest
    except RequestError:
        return "unknown, because the manifest is no longer where the run found it"
    rule = str(manifest.split_rule)
    known = manifest.rows[manifest.rows["group"].notna()]
    if not len(known):
        return f"{rule}; groups of images of the same lesion or patient are not known"
    crossing = int((known.groupby("group")["split"].nunique() > 1).sum())
    return f"{rule}; {known['group'].nunique():,} groups of images, {crossing:,} of them in more than one part"


def _data(run: Run, model: MedTokenBudget) -> dict[str, Any]:
    head = ["part", "images", "masks", *(["classes"] if model.classes else [])]
    rows = []
    for part, values in run.counts.items():
        if part in SPLITS and values["images"]:
            classes = ", ".join(f"{markdown_text(name)} {count:,}" for name, count in values["classes"].items() if count)
            rows.append([part, f"{values['images']:,}", f"{values['masks']:,}", Markup(classes)][: len(head)])
    masks, weight = "none were used in training", model.train_config.losses.lesion
    if weight:
        training = sum(run.counts[part]["masks"] for part in ("train", "select") if part in run.counts)
        masks = f"{training:,} from the training part were used (lesion loss weight {weight:g})"
    return {"head": head, "rows": rows, "masks": masks}


def _results(run: Run, model: MedTokenBudget, images: pd.DataFrame) -> dict[str, Any]:
    classified = CLASSIFICATION if model.classes else {}
    measured = (*classified, *RETENTION)
    table = intervals(images, measured, ("budget",), draws=DRAWS).set_index(["budget", "metric"])
    rows = []
    for budget in sorted(images["budget"].unique()):
        cells, n = dict.fromkeys(measured, NOT_MEASURED), {"accuracy": 0, "retention": 0}
        for metric in measured:
            value = _value(run, model.main, budget, metric)
            if (budget, metric) in table.index:
                row: Any = table.loc[[(budget, metric)]].iloc[0]
                n[metric] = int(row["n"])
                cells[metric] = with_interval(value, row["low"], row["high"])
        labels = [n["accuracy"], *(cells[metric] for metric in classified)] if classified else []
        rows.append([f"{budget:g}", *labels, n["retention"], *(cells[metric] for metric in RETENTION)])
    head = ["budget", *(["n", *classified.values()] if classified else []), "n with lesion", *RETENTION.values()]
    return {"head": head, "rows": rows}


def _compared(run: Run, model: MedTokenBudget) -> dict[str, Any]:
    columns = {"accuracy": "accuracy", "macro_f1": "macro F1"} if model.classes else {}
    columns |= {"retention": "retention", "ceiling": "ceiling"}
    rows = []
    for method in dict.fromkeys((model.main, *COMPARED)):
        cells = _cells(run, run.results, method)
        cells = cells[cells["budget"] == BUDGET]
        if len(cells):
            labeled, masked = (f"{int(cells[name].iloc[0]):,}" for name in ("n", "n_masked"))
            n = f"{labeled} ({masked})" if model.classes else masked
            rows.append([f"`{method}`", n, *(percentage(_value(run, method, BUDGET, metric)) for metric in columns)])
    counted = "n (masks)" if model.classes else "n with lesion"
    return {"head": [f"method, budget {BUDGET:g}", counted, *columns.values()], "rows": rows}


def _strata(cell: pd.DataFrame, classes: Sequence[str]) -> list[dict[str, Any]]:
    if not cell["kept_lesion"].notna().any():
        return []
    tables = {"lesion size": by_lesion_size(cell, draws=DRAWS)}
    if classes:
        tables["class"] = by_class(cell, classes, draws=DRAWS)

    def cells(row: Any) -> list[Any]:
        kept = with_interval(row["retention"], row["low"], row["high"])
        return [Markup(row["stratum"]), f"{row['smallest']} to {row['largest']}", row["n"], kept, percentage(row["ceiling"])]

    head = ["lesion patches", "n", "retention", "ceiling"]
    return [{"head": [name, *head], "rows": [cells(row) for _, row in table.iterrows()]} for name, table in tables.items()]


def _calibration(run: Run, model: MedTokenBudget) -> dict[str, Any]:
    cells = _cells(run, run.results, model.main)
    rows = [
        [f"{budget:g}", f"{int(n):,}", percentage(ece)]
        for budget, n, ece in zip(cells["budget"], cells["n"], cells["ece"])
        if budget in HEADLINE_BUDGETS and math.isfinite(ece)
    ]
    return {"head": ["budget", "n", "expected calibration error"], "rows": rows}


def _failures(run: Run, model: MedTokenBudget, cell: pd.DataFrame, recalls: pd.Series[float]) -> list[str]:
    at = f"at budget {BUDGET:g}"
    lines: list[str] = []
    if len(recalls):
        worst = [f"{name} ({percentage(value)})" for name, value in recalls.dropna().sort_values().head(3).items()]
        lines.append(Markup(f"lowest recall {at}: {', '.join(worst)}"))
        absent = recalls.index[recalls.isna()].tolist()
        if absent:
            lines.append(Markup(f"classes without validation images: {', '.join(absent)}"))
    masked = lesion_rows(cell)
    if len(masked):
        lost = int((masked["kept_lesion"].astype(int) < 0.5 * metrics.reachable(masked["lesion"], masked["k"])).sum())
        lines.append(f"less than half of the reachable lesion patches kept {at}: {lost:,} of {len(masked):,} images with a lesion")
    share = _value(run, model.main, BUDGET, "retention_of_ceiling", OFF_CENTER)
    if math.isfinite(share):
        n = int(_value(run, model.main, BUDGET, "n_masked", OFF_CENTER))
        lines.append(f"lesion off-center, {at}: {percentage(share)} of the ceiling (n = {n:,})")
    return lines
