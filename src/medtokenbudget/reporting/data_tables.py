"""Tables about the images (classes, lesion sizes) and about the paper's numbers beside those of the run."""

from __future__ import annotations

import numpy as np
import pandas as pd

from medtokenbudget.data.masks import prevalence_table
from medtokenbudget.reporting.cells import METRIC_NAMES
from medtokenbudget.reporting.evidence import AS_IS, HEADLINE, Evidence
from medtokenbudget.reporting.looks import look
from medtokenbudget.reporting.numbers import NOT_MEASURED, budget_text, number, percent, plural
from medtokenbudget.reporting.table import Table, records
from medtokenbudget.runs import paper


def subset(evidence: Evidence) -> Table | None:
    """Images per class: validation and training, all and with a mask, with the paper's counts for its own data set."""
    images = _images(evidence)
    images = images[images["label"] >= 0]
    if images.empty:
        return None
    masked = images[(images["lesion"].fillna(0) > 0).to_numpy(bool)]
    parts: dict[str, dict[str, int]] = {"Validation": _by_class(images, evidence), "with mask": _by_class(masked, evidence)}
    training = dict(evidence.info.counts).get("train")
    if isinstance(training, dict) and isinstance(training.get("classes"), dict):
        parts["Training"] = {k: int(v) for k, v in training["classes"].items()}
        if isinstance(training.get("masked_classes"), dict):
            parts["with mask "] = {k: int(v) for k, v in training["masked_classes"].items()}
    classes = list(evidence.classes)
    theirs = evidence.source == "isic" and set(classes) == set(paper.CLASSES)
    if theirs:
        heads = ("Paper: validation", "Paper: val. masks", "Paper: train masks")
        parts |= {name: dict(zip(paper.CLASSES, row)) for name, row in zip(heads, paper.SUBSETS.values())}
    rows = [[c, *[f"{part.get(c, 0):,}" for part in parts.values()]] for c in classes]
    rows.append(["All classes", *[f"{sum(part.values()):,}" for part in parts.values()]])
    names = ["validation", "validation_masks", "training", "training_masks"][: len(parts) - (3 if theirs else 0)]
    names += ["paper_validation", "paper_validation_masks", "paper_training_masks"] if theirs else []
    data = pd.DataFrame([{"class": c} | {n: p.get(c, 0) for n, p in zip(names, parts.values())} for c in classes])
    return Table("subset", "Images per class", ["Class", *[p.strip() for p in parts]], rows, data, breaks=frozenset({len(classes)}))


def _images(evidence: Evidence) -> pd.DataFrame:
    return evidence.main_predictions.sort_values("lesion", na_position="last").drop_duplicates("image_id")


def _by_class(images: pd.DataFrame, evidence: Evidence) -> dict[str, int]:
    counts = np.bincount(images["label"].to_numpy(int), minlength=len(evidence.classes))
    return dict(zip(evidence.classes, counts.tolist()))


def prevalence(evidence: Evidence) -> Table | None:
    """Lesion sizes on the patch grid, with the paper's beside them for its own data set."""
    images = _images(evidence)
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
    if evidence.source == "isic":
        theirs = paper.prevalence_table().set_index("statistic")
        data = data.join((theirs / [1, 100]).add_prefix("paper_"), on="statistic")
        columns += ["Paper: patches", "Paper: of the image (%)"]
        note += "; the paper: 155 images, 256 patches"
    rows = [[r[0], *[text for p, v in zip(r[1::2], r[2::2]) for text in (number(p, 1), percent(v))]] for r in records(data)]
    return Table("prevalence", "Lesion size on the patch grid", columns, rows, data, f"{note}.")


def beside_paper(evidence: Evidence) -> Table | None:
    """The paper's number, this run's number and the difference, for every study that both have on the same data set."""
    original = evidence.results[evidence.results["view"] == AS_IS]
    parts = [paper.beside_paper(original, s).assign(study=s) for s in paper.studies_of(evidence.source) if s in evidence.studies]
    if not parts:
        return None
    found = pd.concat(parts, ignore_index=True)
    found = found[found["ours"].notna()]
    shown = found[np.isclose(found["budget"], HEADLINE) & found["paper"].notna()]
    # Studies share trainings: a row that says the same again is left out, one with other seeds is another number.
    shown = shown.drop_duplicates(["method", "metric", "paper", "ours", "seeds"])
    rows = []
    for r in records(shown):
        digits = 2 if r.metric == "enrichment" else 1
        theirs, ours = (_spread(v, sd, digits) for v, sd in ((r.paper, r.paper_sd), (r.ours, r.ours_sd)))
        difference = NOT_MEASURED if np.isnan(r.difference) else f"{r.difference:+.{digits}f}".replace("-", "−")
        rows.append([r.study, METRIC_NAMES[r.metric], look(r.method).name, theirs, ours, difference, str(r.seeds)])
    keys = list(zip(shown["study"], shown["metric"]))
    columns = ["study", "method", "budget", "metric", "paper", "paper_sd", "ours", "ours_sd", "seeds", "difference"]
    if not rows:
        return None
    return Table(
        "beside-paper",
        f"The paper's numbers and those of this run at budget {budget_text(HEADLINE)}",
        ["Study", "Measure", "Method", "Paper", "This run", "Difference", "Seeds"],
        rows,
        found[columns],
        "± standard deviation over seeds, where there are several. "
        f"This run: {plural(evidence.n, 'image')} ({evidence.n_masked:,} with a mask)"
        + ("; the paper: 5,067 (155)." if evidence.source == "isic" else "."),
        labels=3,
        breaks=frozenset(i for i in range(1, len(keys)) if keys[i] != keys[i - 1]),
        more=f"all {len(found):,} values, with every budget and the controls",
    )


def _spread(value: float, deviation: float, digits: int) -> str:
    text = number(value, digits)
    return text if text == NOT_MEASURED or np.isnan(deviation) else f"{text} ± {number(deviation, digits)}"
