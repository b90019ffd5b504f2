"""Tables that need more than results.csv reshaped: strata, tests, calibration, the worst images, the data, the paper's numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from medtokenbudget.data.masks import prevalence_table
from medtokenbudget.experiments import paper
from medtokenbudget.report.evidence import Evidence
from medtokenbudget.report.examples import worst_retained
from medtokenbudget.report.intervals import Intervals
from medtokenbudget.report.study_tables import METRIC_NAMES, seeds_note, with_controls
from medtokenbudget.report.style import look, ordered
from medtokenbudget.report.table import NOT_MEASURED, Table, number, percent, points, probability, records, with_interval

_INTERVAL = "In brackets the 95 % bootstrap interval over groups of images."


def strata(evidence: Evidence, found: pd.DataFrame, name: str, title: str, first: str) -> Table | None:
    """Retention as a share of the ceiling, a row a stratum, a column a method."""
    if found.empty:
        return None
    methods = [m for m in with_controls(ordered(found["method"])) if m != "tome"]
    cells = found.set_index(["stratum", "method"])
    rows = []
    for stratum in dict.fromkeys(found["stratum"]):
        own = cells.loc[stratum]
        texts = [with_interval(*own.loc[m, ["value", "low", "high"]]) if m in own.index else NOT_MEASURED for m in methods]
        rows.append([str(stratum), str(int(own["n"].max())), percent(own["ceiling"].iloc[0]), *texts])
    return Table(
        name,
        title,
        [first, "n", "Ceiling (%)", *[look(m).name for m in methods]],
        rows,
        found.drop(columns=["study", "dataset"]),
        f"Share of the possible retention (%) at budget {evidence.headline:g}. {_INTERVAL} {seeds_note(evidence.main)}",
    )


def significance(intervals: Intervals, reference: str, off_center: bool) -> Table | None:
    """`reference` against every other method: difference, interval, p and p after Holm."""
    tests = intervals.tests(reference, off_center)
    if tests.empty:
        return None
    name, where = look(reference).name, "off-center views" if off_center else "images as they are"
    rows = [
        [
            METRIC_NAMES[t.metric].removesuffix(" (%)"),
            f"{t.budget:g}",
            f"{name} − {look(t.method_b).name}",
            points(t.difference),
            f"{points(t.low)} to {points(t.high)}",
            probability(t.p),
            probability(t.p_holm),
            str(t.n),
            str(t.seeds),
        ]
        for t in records(tests)
    ]
    breaks = [i for i in range(1, len(tests)) if tests["metric"].iloc[i] != tests["metric"].iloc[i - 1]]
    return Table(
        f"significance-{reference.replace(':', '-')}{'-off-center' if off_center else ''}",
        f"{name} against the others on {where}: paired permutation tests",
        ["Measure", "β", "Comparison", "Difference (points)", "95 % interval", "p", "p (Holm)", "n", "Seeds"],
        rows,
        tests,
        f"Study “{tests['study'].iloc[0]}”. Positive: {name} is higher. Exchanged are whole groups of images, all seeds together; "
        "Holm's correction covers all comparisons of one measure. Only images that both methods have count.",
        labels=3,
        breaks=frozenset(breaks),
    )


def further_measures(evidence: Evidence) -> Table:
    """Every other column of results.csv at the headline budget."""
    rows = evidence.main[np.isclose(evidence.main["budget"], evidence.headline)]
    metrics = ["balanced_accuracy", "macro_auroc", "ece", "retention_mean", "precision", "enrichment", "purity"]
    means = rows.groupby("method")[metrics].mean()
    methods = with_controls(ordered(means.index))
    texts = [
        [look(m).name, *[_text(c, means.loc[m, c]) if m in means.index else NOT_MEASURED for c in metrics], _n(rows, m)]
        for m in methods
    ]
    return Table(
        "further-measures",
        f"Further measures at budget {evidence.headline:g}",
        ["Method", *[METRIC_NAMES[c] for c in metrics], "n (masks)"],
        texts,
        means.reindex(methods).rename_axis("method").reset_index(),
        f"{seeds_note(rows)} AUROC: one class against the rest, averaged. ECE: lower is better. Purity is for "
        "mergers, the three before it for methods that keep patches as they are.",
    )


def _text(metric: str, value: Any) -> str:
    return number(value) if metric == "enrichment" else percent(value)


def _n(results: pd.DataFrame, method: str) -> str:
    own = results[results["method"] == method]
    return f"{int(own['n'].max()):,} ({int(own['n_masked'].max()):,})" if len(own) else NOT_MEASURED


def worst(evidence: Evidence) -> Table | None:
    """The ten images of which LATS kept least."""
    found = worst_retained(evidence)
    if found.empty:
        return None
    names = [evidence.classes[int(i)] if i >= 0 else NOT_MEASURED for i in found["label"]]
    said = [evidence.classes[int(i)] for i in found["predicted"]]
    rows = [
        [str(r.image_id), true, guess, f"{int(r.kept_lesion)} of {int(r.lesion)}", percent(r.share), percent(r.of_possible)]
        for r, true, guess in zip(records(found), names, said)
    ]
    data = found[["image_id", "label", "predicted", "lesion", "kept_lesion", "k", "share", "of_possible"]].assign(
        label=names, predicted=said
    )
    return Table(
        "worst",
        f"The images of which LATS kept least at budget {evidence.headline:g}",
        ["Image", "Class", "Classified as", "Lesion patches kept", "Retention (%)", "Of the possible (%)"],
        rows,
        data,
        f"Seed {int(found['seed'].iloc[0])}, n = 1 image a row, worst first.",
    )


def subset(evidence: Evidence) -> Table | None:
    """Class distribution of the validation images and of those with a mask, the paper's beside ours."""
    images = evidence.main_predictions.sort_values("lesion", na_position="last").drop_duplicates("image_id")
    images = images[images["label"] >= 0]
    if images.empty:
        return None
    masked = images[(images["lesion"].fillna(0) > 0).to_numpy(bool)]
    parts: list[tuple[str, dict[str, int]]] = [
        ("Validation", _by_class(images, evidence)),
        ("… with mask", _by_class(masked, evidence)),
    ]
    training = dict(evidence.info.get("counts", {})).get("train")
    if isinstance(training, dict) and isinstance(training.get("classes"), dict):
        parts.append(("Training", {k: int(v) for k, v in training["classes"].items()}))
        if isinstance(training.get("masked_classes"), dict):
            parts.append(("… with mask", {k: int(v) for k, v in training["masked_classes"].items()}))
    classes = list(evidence.classes)
    if set(classes) == set(paper.CLASSES):
        parts += [(f"Paper: {n.lower()}", dict(zip(paper.CLASSES, counts))) for n, counts in paper.SUBSETS.items()]
    rows = [[n, f"{sum(c.values()):,}", *[f"{c.get(k, 0):,}" for k in classes]] for n, c in parts]
    data = pd.DataFrame([{"part": n, "images": sum(c.values()), **{k: c.get(k, 0) for k in classes}} for n, c in parts])
    return Table("subset", "Images by class", ["Part", "Images", *classes], rows, data)


def _by_class(images: pd.DataFrame, evidence: Evidence) -> dict[str, int]:
    counts = np.bincount(images["label"].to_numpy(int), minlength=len(evidence.classes))
    return dict(zip(evidence.classes, counts.tolist()))


def prevalence(evidence: Evidence) -> Table | None:
    """How large the lesions are on the grid, the paper's beside ours."""
    images = evidence.main_predictions.sort_values("lesion", na_position="last").drop_duplicates("image_id")
    images = images[(images["lesion"].fillna(0) > 0).to_numpy(bool)]
    if images.empty:
        return None
    sizes, patches = images["lesion"].to_numpy(int), int(images["n_patches"].iloc[0])
    theirs = paper.prevalence_table().set_index("statistic")
    data = pd.DataFrame(
        [
            {"statistic": name.capitalize(), "patches": row["patches"], "prevalence": row["prevalence"]}
            for name, row in prevalence_table(sizes, patches).items()
        ]
    ).join((theirs / [1, 100]).add_prefix("paper_"), on="statistic")
    rows = [
        [r.statistic, number(r.patches, 1), percent(r.prevalence), number(r.paper_patches, 1), percent(r.paper_prevalence)]
        for r in records(data)
    ]
    return Table(
        "prevalence",
        "Lesion size on the patch grid",
        ["Statistic", "Patches", "Of the image (%)", "Paper: patches", "Paper: of the image (%)"],
        rows,
        data,
        f"n = {len(sizes):,} validation images with a mask on {patches} patches; the paper has 155 on 256.",
    )


def beside_paper(evidence: Evidence) -> Table | None:
    """The paper's number, ours and the difference, for every study that both have."""
    parts = []
    for study in (s for s in paper.STUDIES if s in evidence.studies):
        found = paper.beside_paper(evidence.results, study)
        parts.append(found[~found["dataset"].str.contains("@")].assign(study=study))
    if not parts:
        return None
    found = pd.concat(parts, ignore_index=True)
    found = found[found["ours"].notna()]
    rows = []
    for r in records(found):
        digits = 2 if r.metric == "enrichment" else 1
        theirs, ours = (_spread(v, sd, digits) for v, sd in ((r.paper, r.paper_sd), (r.ours, r.ours_sd)))
        difference = NOT_MEASURED if np.isnan(r.difference) else f"{r.difference:+.{digits}f}".replace("-", "−")
        rows.append([r.study, METRIC_NAMES[r.metric], look(r.method).name, f"{r.budget:g}", theirs, ours, difference, str(r.seeds)])
    keys = list(zip(found["study"], found["metric"]))
    columns = ["study", "dataset", "method", "budget", "metric", "paper", "paper_sd", "ours", "ours_sd", "seeds", "difference"]
    return Table(
        "beside-paper",
        "The paper's numbers and ours",
        ["Study", "Measure", "Method", "β", "Paper", "Ours", "Difference", "Seeds"],
        rows,
        found[columns],
        "± over seeds where there are several. Rows without a number of the paper are controls that it does not have. "
        "n as in the tables above; the paper's accuracy is on 5,067 images, its retention on 155.",
        labels=3,
        breaks=frozenset(i for i in range(1, len(keys)) if keys[i] != keys[i - 1]),
    )


def _spread(value: float, deviation: float, digits: int) -> str:
    text = number(value, digits)
    return text if text == NOT_MEASURED or np.isnan(deviation) else f"{text} ± {number(deviation, digits)}"
