"""Tables about the images of one run: strata, the images with the lowest retention, external validation, classes and sizes.

Each function returns a table, or None when the run has nothing to show in it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd

from medtokenbudget.data.masks import prevalence_table
from medtokenbudget.measures import METRICS, shown_in
from medtokenbudget.metrics import ratio, reachable
from medtokenbudget.reporting.intervals import ReportRun
from medtokenbudget.reporting.looks import look
from medtokenbudget.reporting.table import INTERVAL_NOTE, Table, changes, seeds_note, value_and_interval
from medtokenbudget.reporting.text import NOT_MEASURED, budget_text, is_missing, number, percent, plural, points, with_interval
from medtokenbudget.runs import paper
from medtokenbudget.runs.statistics import lesion_rows


def strata(run: ReportRun, data: pd.DataFrame, name: str, title: str, first: str) -> Table | None:
    """Shows retention as a share of the ceiling with one row per stratum; the CSV has every method."""
    if data.empty:
        return None
    methods = [m for m in run.emphasized if m in set(data["method"])]
    rows = []
    for stratum, cells in data.groupby("stratum", sort=False):
        ceiling = percent(cells["ceiling"].iloc[0])
        rows.append([str(stratum), str(int(cells["n"].max())), ceiling, *_stratum_texts(cells, methods)])
    return Table(
        name,
        title,
        [first, "n", "Ceiling (%)", *[look(m).name for m in methods]],
        rows,
        data.drop(columns=["study", "dataset", "view"], errors="ignore"),
        f"Share of the ceiling (%) at budget {budget_text(run.headline)}. {INTERVAL_NOTE} {seeds_note(run.main)}",
        more="all methods",
    )


def attribute_strata(run: ReportRun) -> Table | None:
    """Shows the share of the ceiling by every property of the images that was measured, one row per stratum."""
    data = run.by_attribute
    if data.empty:
        return None
    methods = [m for m in run.emphasized if m in set(data["method"])]
    rows, properties = [], []
    for (name, stratum), cells in data.groupby(["property", "stratum"], sort=False):
        first = str(name) if name not in properties else ""
        properties.append(name)
        rows.append([first, str(stratum), str(int(cells["n"].max())), *_stratum_texts(cells, methods)])
    return Table(
        "attribute-strata",
        "Share of the ceiling (%) by what the images show",
        ["Property", "Stratum", "n", *[look(m).name for m in methods]],
        rows,
        data.drop(columns=["study", "dataset", "view"], errors="ignore"),
        f"Budget {budget_text(run.headline)}. {INTERVAL_NOTE} A stratum with few images has a wide interval.",
        labels=2,
        breaks=changes(properties),
        more="all methods",
    )


def _stratum_texts(cells: pd.DataFrame, methods: Sequence[str]) -> list[str]:
    by_method = cells.set_index("method")
    return [with_interval(*value_and_interval(by_method, method)) for method in methods]


def worst(run: ReportRun, named: bool = True, count: int = 10) -> Table | None:
    """Shows the images with the lowest retention of the run's main method, by name or by their place in the table."""
    rows = run.main_predictions
    rows = lesion_rows(rows[(rows["method"] == run.focus) & np.isclose(rows["budget"], run.headline)])
    if rows.empty:
        return None
    data = rows[rows["seed"] == rows["seed"].min()].copy()
    kept, lesion = (data[name].to_numpy(float) for name in ("kept_lesion", "lesion"))
    data["share"], data["of_possible"] = ratio(kept, lesion), ratio(kept, reachable(lesion, data["k"]))
    data = data.sort_values(["of_possible", "image_id"], kind="stable").head(count)
    if not named:
        data["image_id"] = range(1, len(data) + 1)
    texts = [
        [
            str(r["image_id"]),
            r["label_name"] if isinstance(r["label_name"], str) else NOT_MEASURED,
            str(r["predicted_name"]),
            f"{int(r['kept_lesion'])} of {int(r['lesion'])}",
            percent(r["share"]),
            percent(r["of_possible"]),
        ]
        for r in data.to_dict("records")
    ]
    columns = ["image_id", "label_name", "predicted_name", "lesion", "kept_lesion", "k", "share", "of_possible"]
    return Table(
        "worst",
        f"Images with the lowest retention of {look(run.focus).name} at budget {budget_text(run.headline)}",
        ["Image", "Class", "Predicted", "Lesion patches kept", "Retention (%)", "Of ceiling (%)"],
        texts,
        data[columns].rename(columns={"label_name": "label", "predicted_name": "predicted"}),
        f"Seed {int(data['seed'].iloc[0])}; one image per row, lowest first.",
    )


def own_validation(run: ReportRun) -> Table | None:
    """Shows every measure on these images beside the model's own validation, and the difference; None if that is not known."""
    own = (run.info.evaluation or {}).get("own") or []
    rows, data = [], []
    for metric in shown_in("interval"):
        for before in own:
            value, low, high = value_and_interval(run.with_intervals(metric, before["budget"]), run.focus)
            if before.get(metric) is None or is_missing(value):
                continue
            lost, budget = before[metric] - value, before["budget"]
            entry = {"metric": metric, "budget": budget, "own": before[metric], "here": value, "low": low, "high": high}
            data.append({**entry, "lost": lost})
            texts = [percent(before[metric]), with_interval(value, low, high), points(lost)]
            rows.append([METRICS[metric].heading, budget_text(budget), *texts])
    if not rows:
        return None
    return Table(
        "own-validation",
        "How much was lost against the model's own validation",
        ["Measure", "Budget", "Own validation", "These images", "Lost (points)"],
        rows,
        pd.DataFrame(data),
        f"{look(run.focus).name}. Own validation: {own[0]['n']:,} images ({own[0]['n_masked']:,} with a mask). Positive: worse "
        f"here. Retention also depends on the size of the lesions, its share of the ceiling does not. {INTERVAL_NOTE}",
        labels=2,
    )


def promises(run: ReportRun) -> Table | None:
    """Shows what the guarantees of the model keep on these images."""
    guarantees = (run.info.evaluation or {}).get("guarantees") or []
    if not guarantees:
        return None
    rows = [
        [
            percent(row["retention"], 0),
            "on average" if row["coverage"] is None else f"in {percent(row['coverage'], 0)}% of the images",
            percent(row["cap"], 0),
            percent(row["kept"]),
            percent(row["reached"]),
            number(row["tokens"], 1),
            number(row["own_tokens"], 1),
        ]
        for row in guarantees
    ]
    return Table(
        "promises",
        "Guarantees of the model on these images",
        ["Promised (%)", "How", "Cap (%)", "Kept (%)", "Images that reach it (%)", "Patches", "Patches in calibration"],
        rows,
        pd.DataFrame(guarantees),
        f"Means over {guarantees[0]['groups']:,} groups of {guarantees[0]['n']:,} images with a lesion. A guarantee holds for "
        "images like those of its calibration; here it is checked, not promised.",
        labels=2,
    )


def subset(run: ReportRun) -> Table | None:
    """Shows images per class: validation and training, all and with a mask, with the paper's counts for its own data set."""
    images = _images(run)
    images = images[images["label"] >= 0]
    if images.empty:
        return None
    masked = images[(images["lesion"].fillna(0) > 0).to_numpy(bool)]
    parts = {
        ("validation", "Validation"): _by_class(images, run),
        ("validation_masks", "with mask"): _by_class(masked, run),
    }
    training = dict(run.info.counts).get("train")
    if isinstance(training, dict):
        for column, key in ((("training", "Training"), "classes"), (("training_masks", "with mask"), "masked_classes")):
            if isinstance(training.get("classes"), dict) and isinstance(training.get(key), dict):
                parts[column] = {name: int(count) for name, count in training[key].items()}
    classes = list(run.classes)
    if run.source == "isic" and set(classes) == set(paper.CLASSES):
        columns = (
            ("paper_validation", "Paper: validation"),
            ("paper_validation_masks", "Paper: val. masks"),
            ("paper_training_masks", "Paper: train masks"),
        )
        parts |= dict(zip(columns, paper.subsets().values()))
    rows = [[name, *[f"{part.get(name, 0):,}" for part in parts.values()]] for name in classes]
    rows.append(["All classes", *[f"{sum(part.values()):,}" for part in parts.values()]])
    data = pd.DataFrame([{"class": name} | {column: part.get(name, 0) for (column, _), part in parts.items()} for name in classes])
    heads = ["Class", *[title for _, title in parts]]
    return Table("subset", "Images per class", heads, rows, data, breaks=frozenset({len(classes)}))


def _images(run: ReportRun) -> pd.DataFrame:
    return run.main_predictions.sort_values("lesion", na_position="last").drop_duplicates("image_id")


def _by_class(images: pd.DataFrame, run: ReportRun) -> dict[str, int]:
    numbers = np.bincount(images["label"].to_numpy(int), minlength=len(run.classes))
    return dict(zip(run.classes, numbers.tolist()))


def prevalence(run: ReportRun) -> Table | None:
    """Shows lesion sizes on the patch grid, with the paper's beside them for its own data set."""
    images = _images(run)
    images = images[(images["lesion"].fillna(0) > 0).to_numpy(bool)]
    if images.empty:
        return None
    sizes, patches = images["lesion"].to_numpy(int), int(images["n_patches"].iloc[0])
    data = pd.DataFrame(
        [
            {"statistic": name.capitalize(), "patches": row["patches"], "prevalence": row["prevalence"]}
            for name, row in prevalence_table(sizes, patches).items()
        ]
    )
    columns = ["Statistic", "Patches", "Of the image (%)"]
    note = f"{plural(len(sizes), 'validation image')} with a mask on a grid of {patches} patches"
    if run.source == "isic":
        theirs = paper.prevalence_table().set_index("statistic")
        data = data.join((theirs / [1, 100]).add_prefix("paper_"), on="statistic")
        columns += ["Paper: patches", "Paper: of the image (%)"]
        note += "; the paper: 155 images, 256 patches"
    rows = [
        [str(r[0]), *[percent(v) if i % 2 else number(v, 1) for i, v in enumerate(r[1:])]]
        for r in data.itertuples(index=False, name=None)
    ]
    return Table("prevalence", "Lesion size on the patch grid", columns, rows, data, f"{note}.")
