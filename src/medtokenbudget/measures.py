"""Every metric of `results.csv` once: its titles, unit and definition, and where a report shows it.

A new metric is one entry of `METRICS`; headings, glossary, tables and figures of the report are made from this list.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Place = Literal["interval", "test", "sweep", "further"]
"""Where a report shows a metric.

interval: with bootstrap intervals at every budget; test: in paired tests; sweep: a table over all budgets; further: the table of
further measures.
"""


@dataclass(frozen=True)
class Metric:
    """One column of `results.csv`.

    Attributes:
        name: The column.
        title: Heading in tables, without the unit.
        term: Full name, as in the glossary.
        definition: One or two sentences for readers who do not know the paper.
        scope: Whether it needs class labels or lesion masks.
        places: Where a report shows it.
        unit: `%` for fractions, which are shown in percent; `×` for ratios.
        short: Heading where several measures share a narrow table.
        axis: Label of the axis in figures; only metrics that have a curve over the budget need one.
        fact: Label of the large number in the summary, with {name} for the method; empty for metrics that are not shown there.
    """

    name: str
    title: str
    term: str
    definition: str
    scope: Literal["labels", "masks"]
    places: tuple[Place, ...] = ()
    unit: Literal["%", "×"] = "%"
    short: str = ""
    axis: str = ""
    fact: str = ""

    @property
    def heading(self) -> str:
        """The title with the unit, for example `Accuracy (%)`."""
        return f"{self.title} ({self.unit})"


METRICS: dict[str, Metric] = {
    metric.name: metric
    for metric in (
        Metric(
            "accuracy",
            "Accuracy",
            "Accuracy",
            "The share of images that were classified correctly.",
            "labels",
            ("interval", "test", "sweep"),
            short="Acc.",
            axis="accuracy (%)",
            fact="accuracy of {name}",
        ),
        Metric(
            "macro_f1",
            "Macro F1",
            "Macro F1",
            "The F1 score of each class, averaged with equal weight for rare and common classes.",
            "labels",
            ("interval", "test", "sweep"),
            short="F1",
            axis="macro F1 (%)",
            fact="macro F1 of {name}",
        ),
        Metric(
            "balanced_accuracy",
            "Bal. acc.",
            "Balanced accuracy",
            "The recall of each class, averaged with equal weight for rare and common classes.",
            "labels",
            ("interval", "test", "further"),
            short="Bal.",
        ),
        Metric(
            "macro_auroc",
            "AUROC",
            "AUROC",
            "Area under the ROC curve, one class against the rest, averaged over classes.",
            "labels",
            ("further",),
        ),
        Metric(
            "ece",
            "ECE",
            "ECE",
            "Expected calibration error: the average gap between the model's confidence and its accuracy. Lower is better.",
            "labels",
            ("further",),
        ),
        Metric(
            "retention",
            "Retention",
            "Lesion retention",
            "The share of lesion patches (according to the mask) that were kept, pooled over images as in the paper. At 100% no "
            "lesion patch was lost.",
            "masks",
            ("interval", "test", "sweep"),
            short="Ret.",
            axis="lesion patches kept (%)",
            fact="of the lesion kept by {name}",
        ),
        Metric(
            "retention_mean",
            "Per image",
            "Retention per image",
            "Retention computed for each image and then averaged, so that small lesions count as much as large ones.",
            "masks",
            ("further",),
        ),
        Metric(
            "ceiling",
            "Ceiling",
            "Ceiling",
            "The highest retention any selector can reach. A lesion that covers 100 patches cannot be kept whole when K is 76.",
            "masks",
        ),
        Metric(
            "retention_of_ceiling",
            "Of ceiling",
            "Share of the ceiling",
            "Retention divided by the ceiling. At 100% no patch was spent on skin while lesion patches were dropped.",
            "masks",
            ("interval",),
            short="Ceil.",
            axis="share of the ceiling (%)",
            fact="of what is possible, by {name}",
        ),
        Metric("precision", "Precision", "Precision", "The share of kept patches that are lesion.", "masks", ("further",)),
        Metric(
            "enrichment",
            "Enrichment",
            "Enrichment",
            "Precision divided by the share of lesion patches in the image. Random selection has an enrichment of 1.",
            "masks",
            ("further",),
            unit="×",
        ),
        Metric(
            "purity",
            "Purity",
            "Purity",
            "For methods that merge patches (ToMe): how little the merged tokens mix lesion and skin. Such methods have no "
            "retention.",
            "masks",
            ("further",),
        ),
        Metric(
            "lesion_dominated",
            "Domin.",
            "Dominated",
            "For methods that merge patches: the share of lesion patches in tokens of which more than half is lesion.",
            "masks",
            ("further",),
        ),
        Metric(
            "lesion_mass",
            "Mass",
            "Mass",
            "For methods whose tokens mix all patches: the share of the tokens that comes from lesion patches.",
            "masks",
            ("further",),
        ),
    )
}


def shown_in(place: Place) -> tuple[str, ...]:
    """Returns the metrics that a report shows in one place, in the order of the list."""
    return tuple(name for name, metric in METRICS.items() if place in metric.places)


def _entries(scope: str) -> dict[str, str]:
    return {metric.term: metric.definition for metric in METRICS.values() if metric.scope == scope}


GLOSSARY: dict[str, str] = {
    "Patch, token": "A square piece of the image, and the vector that the vision transformer computes for it.",
    "Token budget": "The share of patches that may be kept, written β in the paper. Of N patches, K = max(16, ⌊β N⌋) are kept.",
    **_entries("masks"),
    **_entries("labels"),
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
