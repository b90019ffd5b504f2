"""Every metric of `results.csv` once: its formula, titles, unit and definition, where it is shown; and how numbers are written.

A new metric is one entry of `METRICS`; columns, headings, glossary, tables and figures are made from this list.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import pandas as pd

from medtokenbudget import metrics
from medtokenbudget.metrics import Floats, ratio, reachable

Place = Literal["interval", "test", "sweep", "further"]
"""Where a report shows a metric.

interval: with bootstrap intervals at every budget; test: in paired tests; sweep: a table over all budgets; further: the table of
further measures.
"""


class Cell:
    """The predictions of one method, seed and budget, rows of `predictions.parquet`, from which every metric is computed.

    Labels, predictions and probabilities are of the labeled images; `patches` are kept lesion patches (NaN for mergers), lesion
    patches and kept patches of the images with a mask, each `[n]`.
    """

    def __init__(self, rows: pd.DataFrame, classes: int) -> None:
        labeled, masked = rows[rows["label"] >= 0], rows[rows["lesion"].notna()]
        self.rows, self.classes = rows, classes
        self.label, self.predicted = labeled["label"].to_numpy(), labeled["predicted"].to_numpy()
        self.probabilities = probability_matrix(labeled)
        keeps_patches = bool(masked["kept_lesion"].notna().any())  # a merger has no retention
        kept = masked["kept_lesion"].to_numpy(dtype=float, na_value=np.nan)
        self.patches = (kept, masked["lesion"].to_numpy(dtype=float), masked["k"].to_numpy())
        of_kept = kept if keeps_patches else None
        self.retention = metrics.retention_of_counts(of_kept, *self.patches[1:], masked["n_patches"].to_numpy())


def probability_matrix(frame: pd.DataFrame) -> np.ndarray:
    """Return the probabilities of all rows as one [n, C] array."""
    return np.stack([np.asarray(row, float) for row in frame["probabilities"]]) if len(frame) else np.zeros((0, 0))


@dataclass(frozen=True)
class Statistic:
    """A metric as a function of sums: `terms` gives [n, S] numbers an image, `value` maps their sums [..., S] to the metric."""

    terms: Callable[[pd.DataFrame, int], Floats]
    value: Callable[[Floats], Floats]


def _class_terms(frame: pd.DataFrame, classes: int) -> Floats:
    eye = np.eye(classes)
    true, predicted = eye[frame["label"].to_numpy(int)], eye[frame["predicted"].to_numpy(int)]
    return np.concatenate([true * predicted, true, predicted], 1)


def _of_classes(value: Callable[[Floats], Floats]) -> Callable[[Floats], Floats]:
    return lambda sums: value(sums.reshape(*sums.shape[:-1], 3, -1))


def _accuracy_terms(frame: pd.DataFrame, classes: int) -> Floats:
    correct = metrics.correct(frame["label"].to_numpy(int), frame["predicted"].to_numpy(int))
    return np.stack([correct, np.ones(len(frame))], 1).astype(float)


def _retention_terms(frame: pd.DataFrame, classes: int) -> Floats:
    return frame[["kept_lesion", "lesion"]].to_numpy(float)


def _ceiling_terms(frame: pd.DataFrame, classes: int) -> Floats:
    return np.stack([frame["kept_lesion"].to_numpy(float), reachable(frame["lesion"].to_numpy(float), frame["k"])], 1)


def _quotient(sums: Floats) -> Floats:
    return ratio(sums[..., 0], sums[..., 1])


@dataclass(frozen=True)
class Metric:
    """One column of `results.csv`.

    Attributes:
        title: Heading in tables, without the unit. `term` is the full name in the glossary, `short` the heading in narrow tables.
        definition: One or two sentences for readers who do not know the paper.
        unit: `%` for fractions, which are shown in percent; `×` for ratios.
        axis: Label of the axis in figures; only metrics that have a curve over the budget need one.
        fact: Label of the large number in the summary, with {name} for the method; empty for metrics that are not shown there.
        sums: The same as a function of sums over images; only metrics that are shown with intervals or in tests need one.
    """

    name: str
    title: str
    definition: str
    formula: Callable[[Cell], float]
    scope: Literal["labels", "masks"]
    places: tuple[Place, ...] = ()
    term: str = ""
    unit: Literal["%", "×"] = "%"
    short: str = ""
    axis: str = ""
    fact: str = ""
    sums: Statistic | None = None

    def __post_init__(self) -> None:
        if self.sums is None and {"interval", "test"}.intersection(self.places):
            raise ValueError(f"The metric {self.name} needs `sums` to be shown with intervals or in tests.")
        object.__setattr__(self, "term", self.term or self.title)

    @property
    def heading(self) -> str:
        return f"{self.title} ({self.unit})"

    def text(self, value: Any, deviation: Any = None) -> str:
        write = percent if self.unit == "%" else number
        return with_spread(write(value), write(deviation))


METRICS: dict[str, Metric] = {
    metric.name: metric
    for metric in (
        Metric(
            "accuracy",
            "Accuracy",
            "The share of images that were classified correctly.",
            lambda cell: metrics.accuracy(cell.label, cell.predicted),
            "labels",
            ("interval", "test", "sweep"),
            short="Acc.",
            axis="accuracy (%)",
            fact="accuracy of {name}",
            sums=Statistic(_accuracy_terms, _quotient),
        ),
        Metric(
            "macro_f1",
            "Macro F1",
            "The F1 score of each class, averaged with equal weight for rare and common classes.",
            lambda cell: metrics.macro_f1(cell.label, cell.predicted, cell.classes),
            "labels",
            ("interval", "test", "sweep"),
            short="F1",
            axis="macro F1 (%)",
            fact="macro F1 of {name}",
            sums=Statistic(_class_terms, _of_classes(metrics.macro_f1_of_counts)),
        ),
        Metric(
            "balanced_accuracy",
            "Bal. acc.",
            "The recall of each class, averaged with equal weight for rare and common classes.",
            lambda cell: metrics.balanced_accuracy(cell.label, cell.predicted, cell.classes),
            "labels",
            ("interval", "test", "further"),
            term="Balanced accuracy",
            short="Bal.",
            sums=Statistic(_class_terms, _of_classes(metrics.balanced_accuracy_of_counts)),
        ),
        Metric(
            "retention",
            "Retention",
            "The share of lesion patches (according to the mask) that were kept, pooled over images as in the paper. At 100% no "
            "lesion patch was lost.",
            lambda cell: cell.retention.pooled,
            "masks",
            ("interval", "test", "sweep"),
            term="Lesion retention",
            short="Ret.",
            axis="lesion patches kept (%)",
            fact="of the lesion kept by {name}",
            sums=Statistic(_retention_terms, _quotient),
        ),
        Metric(
            "retention_mean",
            "Per image",
            "Retention computed for each image and then averaged, so that small lesions count as much as large ones.",
            lambda cell: cell.retention.mean,
            "masks",
            ("further",),
            term="Retention per image",
        ),
        Metric(
            "retention_of_ceiling",
            "Of ceiling",
            "Retention divided by the ceiling. At 100% no patch was spent on skin while lesion patches were dropped.",
            lambda cell: cell.retention.of_ceiling,
            "masks",
            ("interval",),
            term="Share of the ceiling",
            short="Ceil.",
            axis="share of the ceiling (%)",
            fact="of what is possible, by {name}",
            sums=Statistic(_ceiling_terms, _quotient),
        ),
        Metric(
            "smallest_quarter",
            "Smallest quarter",
            "The share of the ceiling in the quarter of the images with the smallest lesions, which hardly count when pooled.",
            lambda cell: metrics.smallest_quarter(*cell.patches),
            "masks",
            ("further",),
            term="Share of the ceiling, smallest quarter",
        ),
        Metric(
            "below_90",
            "Below 90%",
            "The share of the images that keep less than 90% of what is possible for them. Lower is better.",
            lambda cell: metrics.share_below(*cell.patches),
            "masks",
            ("further",),
            term="Images below 90%",
        ),
        Metric(
            "precision",
            "Precision",
            "The share of kept patches that are lesion.",
            lambda cell: cell.retention.precision,
            "masks",
            ("further",),
        ),
        Metric(
            "enrichment",
            "Enrichment",
            "Precision divided by the share of lesion patches in the image. Random selection has an enrichment of 1.",
            lambda cell: cell.retention.enrichment,
            "masks",
            ("further",),
            unit="×",
        ),
        Metric(
            "ceiling",
            "Ceiling",
            "The highest retention any selector can reach. A lesion that covers 100 patches cannot be kept whole when K is 76.",
            lambda cell: cell.retention.ceiling,
            "masks",
        ),
        Metric(
            "macro_auroc",
            "AUROC",
            "Area under the ROC curve, one class against the rest, averaged over classes.",
            lambda cell: metrics.macro_auroc(cell.label, cell.probabilities),
            "labels",
            ("further",),
        ),
        Metric(
            "ece",
            "ECE",
            "Expected calibration error: the average gap between the model's confidence and its accuracy. Lower is better.",
            lambda cell: metrics.expected_calibration_error(cell.label, cell.predicted, cell.probabilities),
            "labels",
            ("further",),
        ),
        Metric(
            "purity",
            "Purity",
            "For methods that merge patches (ToMe), which have no retention: how little the merged tokens mix lesion and skin.",
            lambda cell: float(cell.rows["purity"].mean()),
            "masks",
            ("further",),
        ),
        Metric(
            "lesion_dominated",
            "Domin.",
            "For methods that merge patches: the share of lesion patches in tokens of which more than half is lesion.",
            lambda cell: float(cell.rows["lesion_dominated"].mean()),
            "masks",
            ("further",),
            term="Dominated",
        ),
        Metric(
            "lesion_mass",
            "Mass",
            "For methods whose tokens mix all patches: the share of the tokens that comes from lesion patches.",
            lambda cell: float(cell.rows["lesion_mass"].mean()),
            "masks",
            ("further",),
        ),
    )
}


def shown_in(place: Place) -> tuple[str, ...]:
    """Return the metrics that a report shows in one place, in the order of the list."""
    return tuple(name for name, metric in METRICS.items() if place in metric.places)


GLOSSARY: dict[str, str] = {
    "Patch, token": "A square piece of the image, and the vector that the vision transformer computes for it.",
    "Token budget": "The share of patches that may be kept, written β in the paper. Of N patches, K = max(16, ⌊β N⌋) are kept.",
    **{metric.term: metric.definition for scope in ("masks", "labels") for metric in METRICS.values() if metric.scope == scope},
    "95% interval": "A bootstrap interval over groups of images (images of the same lesion are drawn together). It shows how much "
    "a number depends on which images happen to be in the validation set.",
    "± over seeds": "The standard deviation over repeated training runs. It shows how much a number depends on chance in training.",
    "p, p (Holm)": "The p-value of a paired permutation test between two methods on the same images, and the same after Holm's "
    "correction for multiple comparisons.",
    "Off-center view": "A crop with the lesion away from the image center. It separates methods that find the lesion from methods "
    "that keep the middle of the image.",
    "Lesion-first": "Our training recipe: the scorer learns where the lesion is before the classifier is trained, so that "
    "classification cannot pull it away from the lesion.",
    "—": "Not measured, which is different from zero.",
}
"""The terms of a report, explained for readers who do not know the paper."""


# How numbers are written. A value that was not measured is a dash, never a zero.

NOT_MEASURED = "—"


def is_missing(value: Any) -> bool:
    return value is None or pd.isna(value) or not math.isfinite(float(value))


def number(value: Any, digits: int = 2) -> str:
    """Write a plain number, for example `1.85`."""
    return NOT_MEASURED if is_missing(value) else f"{float(value):.{digits}f}"


def percent(value: Any, digits: int = 1) -> str:
    """Write a fraction in percent without the sign, for example `67.4`; the unit belongs in the heading."""
    return NOT_MEASURED if is_missing(value) else f"{100 * float(value):.{digits}f}"


def percentage(value: Any, digits: int = 1) -> str:
    """Write a fraction in percent with the sign, for example `67.4%`; for sentences."""
    return NOT_MEASURED if is_missing(value) else f"{percent(value, digits)}%"


def points(value: Any, digits: int = 1) -> str:
    """Write a difference of fractions in percentage points with its sign, for example `−1.2`."""
    if is_missing(value):
        return NOT_MEASURED
    text = f"{100 * float(value):+.{digits}f}"
    # Neither +0.0 nor -0.0: what rounds to zero has no sign.
    return text[1:] if float(text) == 0 else text.replace("-", "−")


def with_interval(value: Any, low: Any, high: Any) -> str:
    """Write a percentage with its 95% interval, for example `67.4 [65.0, 69.8]`."""
    text = percent(value)
    return text if is_missing(value) or is_missing(low) or is_missing(high) else f"{text} [{percent(low)}, {percent(high)}]"


def with_spread(text: str, deviation: str) -> str:
    """Join a mean over seeds and its standard deviation, for example `67.40 ± 0.20`; a single seed has no deviation."""
    return text if NOT_MEASURED in (text, deviation) else f"{text} ± {deviation}"


def probability(value: Any) -> str:
    """Write a p-value; very small ones as `< 0.001`."""
    return "< 0.001" if not is_missing(value) and float(value) < 0.001 else number(value, 3)


def plural(count: int, word: str) -> str:
    """Write a count with its noun, for example `1 image` or `1,200 images`."""
    return f"{count:,} {word}" if count == 1 else f"{count:,} {word}s"


def budget_text(value: float) -> str:
    """Write a token budget, for example `0.3`, `1.0` or `0.25`."""
    # 0.1 + 0.2 is 0.30000000000000004, and is written 0.3.
    return f"{value:.1f}" if abs(10 * value - round(10 * value)) < 1e-9 else f"{value:g}"
