"""The list of figures of a report: which function draws each, its heading, and the caption under it.

Its own file because captions are read together; the drawing is in `curves.py` and `details.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from matplotlib.figure import Figure

from medtokenbudget.report import curves, details
from medtokenbudget.report import examples as pictures
from medtokenbudget.report.evidence import Evidence
from medtokenbudget.report.intervals import Intervals
from medtokenbudget.report.page import Plate
from medtokenbudget.report.style import house_style, look, save

_BANDS = "Bands are 95 % intervals (bootstrap over groups of images); numbers in the legend are at budget {budget}."


@dataclass(frozen=True)
class Plan:
    """A figure to draw: file name, heading, caption (with {budget}, {masks}, {n}), function, and the metric its text lists."""

    name: str
    title: str
    caption: str
    draw: Callable[[Evidence, Intervals], Figure | None]
    metric: str | None = None


PLANS: tuple[Plan, ...] = (
    Plan(
        "retention",
        "Lesion patches kept, over the budget",
        "The dashed line is the ceiling: more cannot be kept. " + _BANDS + " n = {masks} images with a mask.",
        curves.retention,
        "retention",
    ),
    Plan(
        "share-of-ceiling",
        "The same, as a share of what is possible",
        "100 % means that no patch was spent on skin while lesion was left. " + _BANDS + " n = {masks} images with a mask.",
        curves.share_of_ceiling,
        "retention_of_ceiling",
    ),
    Plan("accuracy", "Accuracy over the budget", _BANDS + " n = {n} images.", curves.accuracy, "accuracy"),
    Plan(
        "macro-f1",
        "Macro F1 over the budget",
        "Rare classes count as much as common ones. " + _BANDS + " n = {n}.",
        curves.macro_f1,
        "macro_f1",
    ),
    Plan(
        "accuracy-against-retention",
        "Accuracy does not show what was kept",
        "One point a method, lines are 95 % intervals. Points at one height classify equally well; how far right they "
        "are is how much of the lesion they saw. n = {n} images for accuracy, {masks} for retention.",
        curves.accuracy_against_retention,
        "retention",
    ),
    Plan(
        "reliability",
        "Does confidence mean anything?",
        "LATS at budget {budget}: accuracy of the predictions made with a given confidence. Below the dotted line it "
        "is too sure of itself. n = {n} images for each seed.",
        details.reliability,
    ),
    Plan(
        "center-bias",
        "When the lesion is not in the center",
        "Share of the possible retention on the images as they are and on views with the lesion off the center. A method that only "
        "guesses the middle falls. Mean over seeds.",
        details.center_bias,
    ),
    Plan(
        "size-strata",
        "By lesion size",
        "Images in quarters by the size of the lesion. Lines are 95 % intervals.",
        details.size_strata,
    ),
    Plan(
        "class-strata",
        "By class",
        "Classes that have masks. Lines are 95 % intervals; few images, wide lines.",
        details.class_strata,
    ),
    Plan(
        "curriculum",
        "The training of LATS",
        "Above the share of patches that the router may keep in each epoch, below the losses before weighting.",
        details.curriculum,
    ),
    Plan(
        "scores",
        "Scores of lesion and of skin",
        "How LATS scores patches of validation images with a mask (first seed). The less the two overlap, the more "
        "lesion survives a small budget.",
        details.score_histogram,
    ),
    Plan(
        "retention-model",
        "Is it explained by the scores?",
        "The supplement's model: lesion and skin scores are two normal distributions, Δ/σ apart (fitted to the "
        "measured points). Its closed approximation is drawn with the same Δ/σ.",
        details.retention_model,
    ),
)


def draw_figures(evidence: Evidence, intervals: Intervals, gallery: pictures.Gallery | None, folder: Path) -> list[Plate]:
    """Write every figure that the run has something for, as SVG and PNG; gives those of the page."""
    plates = []
    words = {
        "budget": f"{evidence.headline:g}",
        "n": f"{int(evidence.main['n'].max()):,}",
        "masks": f"{int(evidence.main['n_masked'].max()):,}",
    }
    with house_style():
        for plan in PLANS:
            figure = plan.draw(evidence, intervals)
            if figure is None:
                continue
            svg = save(figure, folder, plan.name)[0]
            caption = plan.caption.format(**words)
            plates.append(Plate(plan.name, plan.title, caption, _alt(plan, evidence, intervals), svg.read_text(encoding="utf-8")))
        for name, examples in (("examples", gallery.typical), ("worst", gallery.worst)) if gallery else ():
            figure = pictures.figure(examples)
            if figure is not None:
                save(figure, folder, name)
    return plates


def _alt(plan: Plan, evidence: Evidence, intervals: Intervals) -> str:
    """What the figure shows, for those who cannot see it: its heading and the values at the headline budget."""
    if plan.metric is None:
        return f"Chart: {plan.title}. The numbers are in the tables of this page."
    values = intervals.at(plan.metric, evidence.headline)["value"].dropna().sort_values(ascending=False)
    listed = ", ".join(f"{look(str(m)).name} {100 * v:.1f} %" for m, v in values.items())
    return f"Chart: {plan.title}. At budget {evidence.headline:g}: {listed}."
