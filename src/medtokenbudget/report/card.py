"""The model card: what a saved model is for, what it was made from, how well it does and where it fails.

Its own file because it goes with the model, not with the report. Every number comes from `run.json`, `results.csv` or
`predictions.parquet`; what was not measured is said to be so.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from medtokenbudget import metrics
from medtokenbudget.config import HEADLINE_BUDGETS
from medtokenbudget.data import Manifest, ManifestError
from medtokenbudget.experiments.results import read_predictions, read_results
from medtokenbudget.experiments.statistics import intervals
from medtokenbudget.experiments.strata import by_class, by_lesion_size
from medtokenbudget.files import read_json
from medtokenbudget.model import MedTokenBudget

DRAWS = 2000
METRICS = ("accuracy", "balanced_accuracy", "macro_f1", "retention", "retention_of_ceiling")
BESIDE = ("center", "random", "no-pruning")

HEADER = """---
library_name: medtokenbudget
pipeline_tag: image-classification
tags: [dermoscopy, token-routing, vision-transformer, research]
---

# {title}

**Research software, not a medical device.** It must not be used to diagnose, to triage or to treat. Nobody has tested it on
patients, and a number below holds for the data named below and no other.

## Intended use

Research on token budgets: which patches of an image a frozen vision transformer needs, how much of a lesion they hold, and what
a classifier makes of them. Compact tokens as input of other research models. Not intended: any decision about a person, images of
another kind than those it was trained on, claims about skin types or devices that the data do not show.

```python
import medtokenbudget as mtb

model = mtb.load("this folder")
model.predict("image.jpg", budget=0.3)
```
"""


def run_card(run: Path | str, model: MedTokenBudget) -> str:
    """The card of a model that was saved from the run directory `run`."""
    folder = Path(run)
    info = read_json(folder / "run.json")
    predictions, _ = read_predictions(folder / "predictions.parquet")
    about = {
        "backbone": model.backbone_fingerprint,
        "classes": list(model.classes),
        "selectors": model.selectors,
        "method": model.main,
        "fingerprint": model.fingerprint,
        "lesion_loss": model.train_config.losses.lesion,
        "recipe": model.train_config.recipe,
    }
    about["split"] = _split(folder, info)
    return model_card(about, info, read_results(folder / "results.csv"), predictions)


def _split(folder: Path, info: dict[str, Any]) -> str:
    try:
        manifest = Manifest.read(folder / info["manifest"])
    except (ManifestError, KeyError):
        return "not known: the manifest no longer lies where the run found it."
    known = manifest.rows[manifest.rows["group"].notna()]
    crossing = int((known.groupby("group")["split"].nunique() > 1).sum())
    unit = (
        f"{known['group'].nunique():,} groups are known and {crossing} of them lie in more than one part"
        if len(known)
        else "no groups are known"
    )
    return f"{manifest.split_rule or 'as the manifest says'}; {unit}."


def model_card(about: dict[str, Any], run: dict[str, Any], results: pd.DataFrame, predictions: pd.DataFrame) -> str:
    """Markdown. `about` is what the model says of itself, `run` is `run.json`; results and predictions are the run's tables."""
    method, seed = about["method"], (run.get("seeds") or [None])[0]
    dataset = run.get("dataset", "")
    own = _cells(predictions, method, seed, dataset)
    sections = [
        HEADER.format(title=f"MedTokenBudget on {dataset or 'unnamed data'}"),
        _model(about),
        _data(run, about),
        _metrics(own, method),
        _beside(results, method, seed, dataset),
        _strata(own, about["classes"]),
        _calibration(results, method, seed, dataset),
        _failures(own, results, method, seed, dataset, about["classes"]),
        _provenance(run, about),
    ]
    return "\n".join(section.strip() + "\n" for section in sections)


def _cells(frame: pd.DataFrame, method: str, seed: Any, dataset: str) -> pd.DataFrame:
    """The rows of one method and seed on the run's own data, of the first study that has them."""
    rows = frame[(frame["method"] == method) & (frame["seed"] == seed) & (frame["dataset"] == dataset)]
    return rows[rows["study"] == rows["study"].iloc[0]] if len(rows) else rows


def _model(about: dict[str, Any]) -> str:
    backbone = about["backbone"]
    size, (h, w) = backbone["image_size"], backbone["grid"]
    return f"""## Model

- backbone (frozen, not in this folder): `{backbone["name"]}`, block {backbone["layer"]}, {backbone["attention"]} attention
- weights sha256: `{backbone["weights"]}`
- input: the whole picture at {size} x {size} pixels, {h} x {w} patches of {backbone["dim"]} numbers
- classes: {", ".join(about["classes"])}
- training: `{about["method"]}`, recipe {about.get("recipe", "not recorded")}
- selectors with a head of their own: {", ".join(about["selectors"])}"""


def _data(run: dict[str, Any], about: dict[str, Any]) -> str:
    counts = run.get("counts") or {}
    rows = [
        [
            part,
            values["images"],
            values["masks"],
            ", ".join(f"{name} {count}" for name, count in values["classes"].items() if count),
        ]
        for part, values in counts.items()
        if values["images"]
    ]
    weight = about.get("lesion_loss")
    training = sum(counts[part]["masks"] for part in ("train", "select") if part in counts)
    used = (
        "no mask was used in training"
        if weight == 0
        else f"{training:,} masks of the training part (lesion loss at weight {weight:g})"
    )
    return f"""## Data

{_table(["part", "images", "masks", "classes"], rows) if rows else "The run does not say how many images it saw."}

- split: {about.get("split", "not recorded")}
- masks: {used}; masks of validation images are used for evaluation only"""


def _metrics(own: pd.DataFrame, method: str) -> str:
    title = "## Results on the validation part\n\n"
    shown = own[own["budget"].isin(HEADLINE_BUDGETS)]
    if not len(shown):
        return title + "Not measured."
    found = intervals(shown, METRICS, ("budget",), draws=DRAWS)
    rows = []
    for budget, cell in found.groupby("budget"):
        values = {row.metric: row for row in cell.itertuples()}
        n = {scope: values[name].n if name in values else 0 for scope, name in (("labelled", "accuracy"), ("masked", "retention"))}
        rows.append([f"{budget:g}", n["labelled"], *(_with_interval(values.get(m)) for m in METRICS[:3]), n["masked"]])
        rows[-1] += [_with_interval(values.get(m)) for m in METRICS[3:]]
    head = ["budget", "n", "accuracy", "balanced accuracy", "macro F1", "n with lesion", "retention", "of the ceiling"]
    note = f"\n\n`{method}`, this folder's seed. Percent, with 95 % bootstrap intervals over groups ({DRAWS:,} draws)."
    return title + _table(head, rows) + note


def _beside(results: pd.DataFrame, method: str, seed: Any, dataset: str) -> str:
    rows = [(name, _cells(results, name, seed, dataset)) for name in (method, *BESIDE)]
    lines = []
    for name, cells in rows:
        for cell in cells[cells["budget"] == 0.3].itertuples():
            lines.append(
                [name, cell.n, _percent(cell.accuracy), _percent(cell.macro_f1), _percent(cell.retention), _percent(cell.ceiling)]
            )
    if len(lines) < 2:
        return "### Beside the controls\n\nNot measured."
    head = ["at budget 0.3", "n", "accuracy", "macro F1", "retention", "ceiling"]
    return (
        "### Beside the controls\n\n" + _table(head, lines) + "\n\n`center` keeps the middle of the picture and looks at nothing."
    )


def _strata(own: pd.DataFrame, classes: Sequence[str]) -> str:
    cell = own[own["budget"] == 0.3]
    labelled = cell[cell["label"] >= 0]
    recalls = metrics.recall(labelled["label"], labelled["predicted"], len(classes))
    lines = [
        [name, count, _percent(recalls[index])]
        for index, name in enumerate(classes)
        if (count := int((labelled["label"] == index).sum()))
    ]
    text = "## Strata, at budget 0.3\n\n" + (_table(["class", "n", "recall"], lines) if lines else "Not measured.")
    if not cell["kept_lesion"].notna().any():
        return text + "\n\nRetention was not measured: no validation image has a mask."
    for title, strata in (("lesion size", by_lesion_size(cell, draws=DRAWS)), ("class", by_class(cell, classes, draws=DRAWS))):
        sized = [
            [
                row.stratum,
                f"{row.smallest} to {row.largest}",
                row.n,
                _range(row.retention, row.low, row.high),
                _percent(row.ceiling),
            ]
            for row in strata.itertuples()
        ]
        text += "\n\n" + _table([title, "lesion patches", "n", "retention", "ceiling"], sized)
    return text


def _calibration(results: pd.DataFrame, method: str, seed: Any, dataset: str) -> str:
    cells = _cells(results, method, seed, dataset)
    rows = [
        [f"{float(str(c.budget)):g}", c.n, _percent(c.ece)]
        for c in cells.itertuples()
        if c.budget in HEADLINE_BUDGETS and not _missing(c.ece)
    ]
    if not rows:
        return "## Calibration\n\nNot measured."
    note = "Probabilities are the softmax of the head; they were not calibrated afterwards."
    return f"## Calibration\n\n{_table(['budget', 'n', 'expected calibration error'], rows)}\n\n{note}"


def _failures(own: pd.DataFrame, results: pd.DataFrame, method: str, seed: Any, dataset: str, classes: Sequence[str]) -> str:
    cell = own[own["budget"] == 0.3]
    labelled = cell[cell["label"] >= 0]
    lines = []
    if len(labelled):
        recalls = pd.Series(metrics.recall(labelled["label"], labelled["predicted"], len(classes)), index=list(classes))
        worst = ", ".join(f"{name} ({_percent(value)})" for name, value in recalls.dropna().sort_values().head(3).items())
        absent = recalls.index[recalls.isna()].tolist()
        lines.append(
            f"- lowest recall at budget 0.3: {worst}" + (f"; not in the validation part: {', '.join(absent)}" if absent else "")
        )
    masked = cell[cell["kept_lesion"].notna() & (cell["lesion"].fillna(0) > 0)]
    if len(masked):
        best = metrics.reachable(masked["lesion"].astype(int), masked["k"])
        lost = int((masked["kept_lesion"].astype(int) < 0.5 * best).sum())
        lines.append(f"- in {lost} of {len(masked)} images with a lesion less than half of what could be kept was kept")
    for cells in (_cells(results, method, seed, f"{dataset}@off-center"),):
        for row in cells[cells["budget"] == 0.3].itertuples():
            lines.append(f"- lesion off the center: {_percent(row.retention_of_ceiling)} of the ceiling (n = {row.n_masked})")
    lines.append(
        "- not measured: skin types, devices, hair, ink, rulers, gel bubbles, dark corners, several lesions in one picture"
    )
    return "## Known failures\n\n" + "\n".join(lines)


def _provenance(run: dict[str, Any], about: dict[str, Any]) -> str:
    hashes = run.get("hashes") or {}
    lines = [f"- model fingerprint: `{about['fingerprint']}`"]
    lines += [f"- {name} hash: `{value}`" for name, value in hashes.items() if isinstance(value, str)]
    lines.append(f"- seeds of the run: {', '.join(map(str, run.get('seeds', []))) or 'not recorded'}; this folder holds the first")
    lines.append("- versions: " + ", ".join(f"{name} {value}" for name, value in (run.get("versions") or {}).items()))
    return "## Versions and hashes\n\n" + "\n".join(lines)


def _table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


def _missing(value: Any) -> bool:
    return value is None or value is pd.NA or (isinstance(value, float) and math.isnan(value))


def _percent(value: Any) -> str:
    return "–" if _missing(value) else f"{100 * float(value):.1f} %"


def _range(value: Any, low: Any, high: Any) -> str:
    return "–" if _missing(value) else f"{100 * value:.1f} ({100 * low:.1f} to {100 * high:.1f})"


def _with_interval(row: Any) -> str:
    return "–" if row is None else _range(row.value, row.low, row.high)
