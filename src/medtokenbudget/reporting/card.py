"""The model card: what a saved model is for, what it was made from, how well it works and where it fails.

It is stored with the model, not with the report. Point values come from `results.csv`, intervals and strata from
`predictions.parquet`, everything else from `run.json`; the card says so where something was not measured.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from medtokenbudget import metrics
from medtokenbudget.backbone.views import OFF_CENTER
from medtokenbudget.config import HEADLINE_BUDGETS
from medtokenbudget.data import Manifest, ManifestError
from medtokenbudget.escaping import markdown_text
from medtokenbudget.model import MedTokenBudget
from medtokenbudget.reporting.looks import PAPER_RECIPE, look
from medtokenbudget.reporting.numbers import budget_text, is_missing, percent, percentage
from medtokenbudget.runs.run import AS_IS, RunInfo
from medtokenbudget.runs.statistics import by_class, by_lesion_size, intervals

DRAWS = 2000
CLASSIFICATION = ("accuracy", "balanced_accuracy", "macro_f1")
RETENTION = ("retention", "retention_of_ceiling")
BESIDE = (PAPER_RECIPE, "center", "darkness", "random", "no-pruning")
"""What the model is compared with, where the run has it: the paper's recipe and the controls."""
HEADLINE = 0.3

HEADER = """---
library_name: medtokenbudget
pipeline_tag: {task}
tags: [dermoscopy, token-routing, vision-transformer, research]
---

# {title}

**Research software, not a medical device.** Do not use it to diagnose, triage or treat anyone. It has not been tested on
patients, and the numbers below apply only to the data named below.

## Intended use

Research on token budgets: which patches of an image a frozen vision transformer needs, how much of a lesion they contain, and
how well a classifier works on them; compact tokens as input for other research models. Not intended for decisions about a person,
for other kinds of images than those it was trained on, or for claims about skin types or devices that the data do not cover.

```python
import medtokenbudget as mtb

model = mtb.load("path/to/this/folder")
model.{verb}("image.jpg", budget=0.3)
```
"""


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
        """The rows of one method and view, of the first study that has them."""
        rows = frame[(frame["method"] == method) & (frame["seed"] == self.seed) & (frame["view"] == view)]
        return rows[rows["study"] == rows["study"].iloc[0]] if len(rows) else rows

    def value(self, method: str, budget: float, metric: str, view: str = AS_IS) -> float:
        """One number of results.csv; NaN where it was not measured."""
        rows = self.cells(self.results, method, view)
        rows = rows[np.isclose(rows["budget"].astype(float), budget)]
        return float(rows[metric].iloc[0]) if len(rows) else float("nan")


def run_card(run: Path | str, model: MedTokenBudget) -> str:
    """The card of a model that was saved from a run directory, as Markdown."""
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
    """The card as Markdown.

    Args:
        facts: What the model knows about itself.
        info: `run.json` of the run it comes from.
        results: `results.csv` of that run.
        predictions: `predictions.parquet` of that run.
    """
    tables = _Tables(results, predictions, info.seeds[0] if info.seeds else None)
    facts = replace(facts, classes=[markdown_text(name) for name in facts.classes])
    sections = [
        HEADER.format(
            title=f"MedTokenBudget on {markdown_text(info.dataset) or 'unnamed data'}",
            task="image-classification" if facts.classes else "image-feature-extraction",
            verb="predict" if facts.classes else "route",
        ),
        _model(facts),
        _data(info, facts),
        _results(tables, facts),
        _beside(tables, facts),
        _strata(tables, facts),
        _calibration(tables, facts) if facts.classes else "",
        _failures(tables, facts),
        _provenance(info, facts),
    ]
    return "\n".join(section.strip() + "\n" for section in sections if section)


def _model(facts: ModelFacts) -> str:
    backbone = facts.backbone
    size, (h, w) = backbone["image_size"], backbone["grid"]
    others = ", ".join(f"`{name}`" for name in facts.selectors if name != facts.main) or "none"
    return f"""## Model

- main method: `{facts.main}` ({look(facts.main).name}); training recipe `{facts.recipe}`
- other methods {"with a classifier" if facts.classes else "beside it"}: {others}
- classes: {", ".join(facts.classes) or "none: a router without a head, trained from lesion masks alone"}
- backbone (frozen, not in this folder): `{backbone["name"]}`, block {backbone["layer"]}, {backbone["attention"]} attention
- backbone weights, SHA-256: `{backbone["weights"]}`
- input: the whole image at {size} x {size} pixels, {h} x {w} patches with {backbone["dim"]} features each"""


def _data(info: RunInfo, facts: ModelFacts) -> str:
    counts = info.counts
    head = ["part", "images", "masks", *(["classes"] if facts.classes else [])]
    rows = [
        [part, f"{values['images']:,}", f"{values['masks']:,}", _classes(values["classes"])][: len(head)]
        for part, values in counts.items()
        if values["images"]
    ]
    training = sum(counts[part]["masks"] for part in ("train", "select") if part in counts)
    used = "none were used in training"
    if facts.lesion_loss:
        used = f"{training:,} from the training part were used (lesion loss weight {facts.lesion_loss:g})"
    return f"""## Data

{_table(head, rows) if rows else "The run does not record how many images it used."}

- data set: {markdown_text(info.dataset) or "not recorded"}
- split: {facts.split}
- masks: {used}; masks of validation images are used for evaluation only"""


def _classes(counts: dict[str, int]) -> str:
    return ", ".join(f"{markdown_text(name)} {count:,}" for name, count in counts.items() if count)


def _results(tables: _Tables, facts: ModelFacts) -> str:
    title = "## Results on the validation part\n\n"
    own = tables.cells(tables.predictions, facts.main)
    own = own[own["budget"].isin(HEADLINE_BUDGETS)]
    if not len(own):
        return title + "Not measured."
    measured = (*CLASSIFICATION, *RETENTION) if facts.classes else RETENTION
    found = intervals(own, measured, ("budget",), draws=DRAWS).set_index(["budget", "metric"])
    rows = []
    for budget in sorted(own["budget"].unique()):
        n = [int(found.loc[(budget, m), "n"]) if (budget, m) in found.index else 0 for m in ("accuracy", "retention")]
        cells = {m: _cell(tables.value(facts.main, budget, m), found, (budget, m)) for m in measured}
        classes = [n[0], *(cells[m] for m in CLASSIFICATION)] if facts.classes else []
        rows.append([budget_text(budget), *classes, n[1], *(cells[m] for m in RETENTION)])
    classified = ["n", "accuracy", "balanced accuracy", "macro F1"] if facts.classes else []
    head = ["budget", *classified, "n with lesion", "retention", "share of ceiling"]
    note = (
        f"`{facts.main}`, the seed of this model. Percent, with 95% bootstrap intervals over groups of images ({DRAWS:,} draws). "
        "Retention: share of lesion patches kept. Share of ceiling: the same relative to what any selector could keep."
    )
    return title + _table(head, rows) + f"\n\n{note}"


def _cell(value: float, found: pd.DataFrame, key: tuple[float, str]) -> str:
    if is_missing(value) or key not in found.index:
        return "–"
    row: Any = found.loc[[key]].iloc[0]
    return f"{percent(value)} ({percent(row['low'])} to {percent(row['high'])})"


def _beside(tables: _Tables, facts: ModelFacts) -> str:
    recipe = "the paper's recipe and " if facts.classes else ""
    title = f"### Compared with {recipe}the controls\n\n"
    measured = ("accuracy", "macro_f1", "retention", "ceiling") if facts.classes else ("retention", "ceiling")
    rows = []
    for method in dict.fromkeys((facts.main, *BESIDE)):
        cells = tables.cells(tables.results, method)
        cells = cells[cells["budget"] == HEADLINE]
        if len(cells):
            values = [tables.value(method, HEADLINE, m) for m in measured]
            labeled, masked = (f"{int(cells[name].iloc[0]):,}" for name in ("n", "n_masked"))
            n = f"{labeled} ({masked})" if facts.classes else masked
            rows.append([f"{look(method).name} `{method}`", n, *map(_percentage, values)])
    if len(rows) < 2:
        return title + "Not measured."
    counted = "n (masks)" if facts.classes else "n with lesion"
    head = [f"method, budget {budget_text(HEADLINE)}", counted, *(name.replace("_", " ").replace("f1", "F1") for name in measured)]
    about = "`center` keeps the middle of the image without looking at it."
    if facts.classes:
        about += f" `{PAPER_RECIPE}` is the paper's own training recipe."
    return title + _table(head, rows) + f"\n\n{about}"


def _strata(tables: _Tables, facts: ModelFacts) -> str:
    cell, labeled = _at_headline(tables, facts)
    if not facts.classes:
        text = f"## By lesion size, budget {budget_text(HEADLINE)}"
        return text + _retention_strata(cell, facts)
    recalls = metrics.recall(labeled["label"], labeled["predicted"], len(facts.classes))
    rows = [
        [name, count, _percentage(recalls[index])]
        for index, name in enumerate(facts.classes)
        if (count := int((labeled["label"] == index).sum()))
    ]
    text = f"## By class and lesion size, budget {budget_text(HEADLINE)}\n\n"
    text += _table(["class", "n", "recall"], rows) if rows else "Not measured."
    return text + _retention_strata(cell, facts)


def _retention_strata(cell: pd.DataFrame, facts: ModelFacts) -> str:
    if not cell["kept_lesion"].notna().any():
        return "\n\nRetention was not measured, because no validation image has a mask."
    text = ""
    found = {"lesion size": by_lesion_size(cell, draws=DRAWS)}
    if facts.classes:
        found["class"] = by_class(cell, facts.classes, draws=DRAWS)
    for name, strata in found.items():
        rows = [
            [
                row.stratum,
                f"{row.smallest} to {row.largest}",
                row.n,
                f"{percent(row.retention)} ({percent(row.low)} to {percent(row.high)})",
                _percentage(row.ceiling),
            ]
            for row in strata.itertuples()
        ]
        text += "\n\n" + _table([name, "lesion patches", "n", "retention", "ceiling"], rows)
    return text


def _at_headline(tables: _Tables, facts: ModelFacts) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Predictions of the main method at the headline budget: all, and those with a label."""
    own = tables.cells(tables.predictions, facts.main)
    cell = own[own["budget"] == HEADLINE]
    return cell, cell[cell["label"] >= 0]


def _calibration(tables: _Tables, facts: ModelFacts) -> str:
    cells = tables.cells(tables.results, facts.main)
    rows = [
        [budget_text(float(budget)), f"{int(n):,}", _percentage(ece)]
        for budget, n, ece in zip(cells["budget"], cells["n"], cells["ece"])
        if budget in HEADLINE_BUDGETS and not is_missing(ece)
    ]
    if not rows:
        return "## Calibration\n\nNot measured."
    note = "Probabilities are the softmax of the head, without recalibration."
    return f"## Calibration\n\n{_table(['budget', 'n', 'expected calibration error'], rows)}\n\n{note}"


def _failures(tables: _Tables, facts: ModelFacts) -> str:
    cell, labeled = _at_headline(tables, facts)
    at = f"at budget {budget_text(HEADLINE)}"
    lines = []
    if len(labeled):
        recalls = pd.Series(metrics.recall(labeled["label"], labeled["predicted"], len(facts.classes)), index=list(facts.classes))
        worst = ", ".join(f"{name} ({percentage(value)})" for name, value in recalls.dropna().sort_values().head(3).items())
        lines.append(f"- lowest recall {at}: {worst}")
        absent = recalls.index[recalls.isna()].tolist()
        if absent:
            lines.append(f"- classes without validation images: {', '.join(absent)}")
    masked = cell[cell["kept_lesion"].notna() & (cell["lesion"].fillna(0) > 0)]
    if len(masked):
        reachable = metrics.reachable(masked["lesion"].astype(int), masked["k"])
        lost = int((masked["kept_lesion"].astype(int) < 0.5 * reachable).sum())
        lines.append(
            f"- less than half of the reachable lesion patches kept {at}: {lost:,} of {len(masked):,} images with a lesion"
        )
    share = tables.value(facts.main, HEADLINE, "retention_of_ceiling", OFF_CENTER)
    if not is_missing(share):
        n = int(tables.value(facts.main, HEADLINE, "n_masked", OFF_CENTER))
        lines.append(f"- lesion off-center, {at}: {percentage(share)} of the ceiling (n = {n:,})")
    lines.append("- not measured: skin types, devices, hair, ink, rulers, gel bubbles, dark corners, several lesions in one image")
    return "## Known failures\n\n" + "\n".join(lines)


def _provenance(info: RunInfo, facts: ModelFacts) -> str:
    lines = [f"- model fingerprint: `{facts.fingerprint}`"]
    lines += [f"- hash of the {name}: `{value}`" for name, value in info.hashes.items()]
    lines.append(f"- seeds of the run: {', '.join(map(str, info.seeds)) or 'not recorded'}; this model is from the first")
    if info.command:
        lines.append(f"- command: `{info.command}`")
    lines.append("- versions: " + ", ".join(f"{name} {value}" for name, value in info.versions.items()))
    return "## Versions and hashes\n\n" + "\n".join(lines)


def _table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


def _percentage(value: Any) -> str:
    return "–" if is_missing(value) else percentage(value)
