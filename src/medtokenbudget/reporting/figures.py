"""The list of figures of a report: which function draws each one, its heading and its caption."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from matplotlib.figure import Figure

from medtokenbudget.reporting import curves, details
from medtokenbudget.reporting import examples as pictures
from medtokenbudget.reporting.document import Plate
from medtokenbudget.reporting.evidence import MOST_DRAWN, Evidence
from medtokenbudget.reporting.intervals import Intervals
from medtokenbudget.reporting.looks import look
from medtokenbudget.reporting.numbers import budget_text
from medtokenbudget.reporting.style import house_style, save

_BANDS = "Bands: 95% bootstrap intervals over groups of images. Numbers in the legend: budget {budget}."


@dataclass(frozen=True)
class Plan:
    """A figure to draw.

    Attributes:
        name: File name.
        title: Heading; it and the caption may use {name} (of the main method), {budget}, {n} and {masks}.
        caption: Text under the figure.
        draw: Draws the figure, or returns None when there is nothing to show.
        metric: The measure whose values the alternative text lists.
        compares: Whether it has a mark for each method, so that a run with many methods shows only some of them.
    """

    name: str
    title: str
    caption: str
    draw: Callable[[Evidence, Intervals], Figure | None]
    metric: str | None = None
    compares: bool = False


PLANS: tuple[Plan, ...] = (
    Plan(
        "retention",
        "Lesion patches kept at each budget",
        "The dashed line is the ceiling: no method can keep more. " + _BANDS + " n = {masks} images with a mask.",
        curves.retention,
        "retention",
        compares=True,
    ),
    Plan(
        "share-of-ceiling",
        "Share of the ceiling",
        "Retention divided by the ceiling. At 100%, no patch was spent on skin while lesion patches were dropped. "
        + _BANDS
        + " n = {masks} images with a mask.",
        curves.share_of_ceiling,
        "retention_of_ceiling",
        compares=True,
    ),
    Plan("accuracy", "Accuracy at each budget", _BANDS + " n = {n} images.", curves.accuracy, "accuracy", True),
    Plan(
        "macro-f1",
        "Macro F1 at each budget",
        "Rare classes count as much as common ones. " + _BANDS + " n = {n} images.",
        curves.macro_f1,
        "macro_f1",
        compares=True,
    ),
    Plan(
        "accuracy-against-retention",
        "Accuracy against retention",
        "One point per method at budget {budget}; lines are 95% intervals. Methods at the same height classify equally well; the "
        "further right, the more of the lesion they kept. n = {n} images for accuracy, {masks} for retention.",
        curves.accuracy_against_retention,
        "retention",
        compares=True,
    ),
    Plan(
        "reliability",
        "Calibration",
        "Accuracy of {name} at budget {budget} by its confidence. Below the dotted line it is overconfident. Lower panel: number "
        "of predictions. n = {n} images per seed.",
        details.reliability,
    ),
    Plan(
        "center-bias",
        "Original images and off-center views",
        "Share of the ceiling when the lesion is where the photographer put it and when it is away from the center. A method that "
        "only keeps the middle of the image drops. Mean over seeds.",
        details.center_bias,
        compares=True,
    ),
    Plan(
        "size-strata",
        "By lesion size",
        "Images in quartiles of lesion size, budget {budget}. Lines: 95% intervals.",
        details.size_strata,
    ),
    Plan(
        "class-strata",
        "By class",
        f"Classes with masks (at most {details.MOST_STRATA}, those with the most images), budget {{budget}}. Lines: 95% intervals, "
        "wide where there are few images.",
        details.class_strata,
    ),
    Plan(
        "curriculum",
        "Training",
        "Training of {trained}. {panels}",
        details.curriculum,
    ),
    Plan(
        "scores",
        "Scores of lesion and skin patches",
        "Scores that {name} gives to patches of validation images with a mask (first seed). The less the two overlap, the more of "
        "the lesion survives a small budget.",
        details.score_histogram,
    ),
    Plan(
        "retention-model",
        "Does the separation of the scores explain retention?",
        "The model of the paper's supplement: scores of lesion and skin patches are two normal distributions, Δ/σ apart, fitted to "
        "the measured points. The closed-form approximation uses the same Δ/σ.",
        details.retention_model,
    ),
)


def draw_figures(evidence: Evidence, intervals: Intervals, gallery: pictures.Gallery | None, folder: Path) -> list[Plate]:
    """Writes every figure that the run has data for as SVG and PNG, and returns those of the page."""
    plates = []
    training = details.training_of(evidence)
    words = {
        "name": look(evidence.focus).name,
        "panels": (
            "Above: the token budget in each epoch. Below: the losses before weighting."
            if details.follows_budget(evidence)
            else "The losses that the scorer is trained with, before weighting."
        ),
        "trained": look(str(training["method"].iloc[0])).name if len(training) else "",
        "budget": f"{budget_text(evidence.headline)}",
        "n": f"{evidence.n:,}{_fewer(evidence)}",
        "masks": f"{evidence.n_masked:,}",
    }
    with house_style():
        for plan in PLANS:
            figure = plan.draw(evidence, intervals)
            if figure is None:
                continue
            svg = save(figure, folder, plan.name)[0].read_text(encoding="utf-8")
            caption = plan.caption.format(**words) + (_some_of(evidence) if plan.compares else "")
            plates.append(Plate(plan.name, plan.title, caption, _alt(plan, evidence, intervals), svg))
        for name, examples in (("examples", gallery.typical), ("worst", gallery.worst)) if gallery else ():
            figure = pictures.figure(examples)
            if figure is not None:
                save(figure, folder, name)
    return plates


def _some_of(evidence: Evidence) -> str:
    """Says which methods a figure shows where it cannot show all."""
    if len(evidence.methods) <= MOST_DRAWN:
        return ""
    return (
        f" Of {len(evidence.methods)} methods at most {MOST_DRAWN} are shown: the main ones, the controls, and those with the "
        "highest share of the ceiling or macro F1. The tables have all."
    )


def _fewer(evidence: Evidence) -> str:
    """` (Oracle: 155)`: the methods that classified fewer images than the others, which need a mask."""
    counts = evidence.main.groupby("method")["n"].max()
    named = [f"{look(m).name}: {counts[m]:,}" for m in evidence.ordered(counts.index) if 0 < counts[m] < evidence.n]
    return f" ({', '.join(named)})" if named else ""


def _alt(plan: Plan, evidence: Evidence, intervals: Intervals) -> str:
    """The alternative text: the heading and the values at the headline budget."""
    if plan.metric is None:
        return f"Chart: {plan.title}. The numbers are in the tables of this page."
    found = evidence.at(plan.metric)
    values = sorted(((m, found[m]) for m in evidence.drawn(evidence.methods) if m in found), key=lambda item: -item[1])
    counts = intervals.at(plan.metric, evidence.headline)["n"]
    listed = ", ".join(f"{look(m).name} {100 * v:.1f}%{curves.other_n(counts, m)}" for m, v in values)
    return f"Chart: {plan.title}. At budget {budget_text(evidence.headline)}: {listed}."
