"""Every figure of a report: the functions that draw them, and the list with their headings and captions.

A function that draws returns a figure, or None when the run has nothing to show in it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from medtokenbudget import metrics
from medtokenbudget.backbone.views import OFF_CENTER
from medtokenbudget.measures import METRICS
from medtokenbudget.reporting.comparison import Comparison
from medtokenbudget.reporting.intervals import MOST_DRAWN, ReportRun
from medtokenbudget.reporting.looks import INK, LOST, is_reference, look
from medtokenbudget.reporting.style import (
    BACKGROUND,
    KEPT,
    MUTED,
    WIDTH,
    budget_axis,
    house_style,
    legend_below,
    new_figure,
    percent_axis,
    save,
    svg_for_page,
)
from medtokenbudget.reporting.text import budget_text
from medtokenbudget.runs import statistics
from medtokenbudget.runs.run import AS_IS, probability_matrix
from medtokenbudget.runs.statistics import lesion_rows

MOST_STRATA = 12
"""Classes with the most images that the figure shows; the table has all."""
_CEILING = "Ceiling (Oracle)"
_CEILING_LINE: dict[str, Any] = {"color": INK, "linestyle": (0, (4, 2)), "linewidth": 1.4, "label": _CEILING}
_LOSSES = {
    "classification": ("#0072b2", "o"),
    "lesion": ("#d55e00", "s"),
    "distillation": ("#009e73", "v"),
    "diversity": ("#a8577e", "D"),
}
_RUN_COLORS = ("#0072b2", "#d55e00", "#009e73", "#a8577e", "#c98a00", "#6a51a3", "#7a828a", "#3a9bd0")
_RUN_MARKERS = "osv^DPXH"


# Curves over the token budget.


def _over_budgets(run: ReportRun, metric: str) -> Figure | None:
    """Draws one measure over the budget, a line per method; retention with its ceiling and what chance would keep."""
    table, needs_masks = run.curve(metric), METRICS[metric].scope == "masks"
    if table["value"].isna().all() or (needs_masks and not run.n_masked):
        return None
    figure, axes = new_figure(4.7 if metric == "retention_of_ceiling" else 4.9)
    if metric == "retention":
        # NoPruning ignores the budget, so it has another ceiling than the rest.
        rows = run.main[(run.main["method"] != "no-pruning") & run.main["ceiling"].notna()]
        ceiling = rows.groupby("budget")["ceiling"].mean()
        axes.plot(ceiling.index, ceiling, **_CEILING_LINE)
        axes.fill_between(ceiling.index, ceiling, 1.03, color=MUTED, alpha=0.08, linewidth=0)
        axes.plot([0, 1], [0, 1], color=MUTED, linewidth=0.9, linestyle=":", label="Expected by chance")
        axes.set_ylim(0, 1.03)
    elif metric == "retention_of_ceiling":
        axes.axhline(1, **_CEILING_LINE)
    _method_lines(axes, run, table, [m for m in run.drawn(run.methods) if not (needs_masks and is_reference(m))])
    if metric == "retention_of_ceiling":
        axes.set_ylim(None, 1.02)
    low, high = min(run.budgets), max(run.budgets)
    axes.set_xlim(low - 0.04, high + 0.02) if high > low else axes.set_xlim(low - 0.1, low + 0.1)
    budget_axis(axes, run.budgets)
    percent_axis(axes, label=METRICS[metric].axis)
    legend_below(figure, axes)
    return figure


def _method_lines(axes: Axes, run: ReportRun, table: pd.DataFrame, methods: Sequence[str]) -> None:
    """Draws a line per method and a band for the emphasized ones; the legend is sorted by the values at the headline budget."""
    headline = table[np.isclose(table["budget"], run.headline)].set_index("method")
    measured = [m for m in methods if table.loc[table["method"] == m, "value"].notna().any()]
    for method in sorted(measured, key=lambda m: -np.nan_to_num(headline["value"].get(m, np.nan), nan=-1)):
        rows = table[table["method"] == method].sort_values("budget")
        style, value = look(method), headline["value"].get(method, np.nan)
        is_focus, strong = method == run.focus, method in run.emphasized
        axes.plot(
            rows["budget"],
            rows["value"],
            color=style.color,
            marker=style.marker or None,
            linestyle=style.line,
            linewidth=2.6 if is_focus else 1.8 if strong else 1.2,
            markersize=6 if is_focus else 4.5,
            label=style.name if np.isnan(value) else f"{style.name} {100 * value:.1f}{_other_n(headline['n'], method)}",
            zorder=4 if is_focus else 3 if strong else 2,
        )
        if strong and rows["low"].notna().any():
            axes.fill_between(rows["budget"], rows["low"], rows["high"], color=style.color, alpha=0.13, linewidth=0, zorder=1)


def _other_n(counts: pd.Series, method: str) -> str:
    """Writes ` (n = 155)` for a method that was measured on fewer images than the others, else nothing."""
    n = counts.get(method, np.nan)
    return "" if np.isnan(n) or n == counts.max() else f" (n = {int(n):,})"


def _main_methods(comparison: Comparison, metric: str) -> Figure | None:
    """Draws one measure over the budget, a line for the main method of each run."""
    tables = [run.curve(metric) for run in comparison.runs]
    tables = [table[table["method"] == run.focus].sort_values("budget") for run, table in zip(comparison.runs, tables)]
    if all(table["value"].isna().all() for table in tables):
        return None
    figure, axes = new_figure(4.2)
    if metric == "retention_of_ceiling":
        axes.axhline(1, **_CEILING_LINE)
    for i, (run, rows) in enumerate(zip(comparison.runs, tables)):
        color, marker = _RUN_COLORS[i % len(_RUN_COLORS)], _RUN_MARKERS[i % len(_RUN_MARKERS)]
        label = f"{run.name}: {look(run.focus).name}"
        axes.plot(rows["budget"], rows["value"], color=color, marker=marker, linewidth=2, label=label)
        axes.fill_between(rows["budget"], rows["low"], rows["high"], color=color, alpha=0.13, linewidth=0)
    budget_axis(axes, comparison.budgets)
    percent_axis(axes, label=METRICS[metric].axis)
    legend_below(figure, axes, 1)
    return figure


# Figures that explain the curves.


def _accuracy_against_retention(run: ReportRun) -> Figure | None:
    """Draws one point per method at the headline budget: accuracy does not show how much of the lesion was kept."""
    retention, accuracy = (run.with_intervals(metric, run.headline) for metric in ("retention", "accuracy"))
    both = retention.join(accuracy, lsuffix="_x", rsuffix="_y", how="inner").dropna(subset=["value_x", "value_y"])
    both = both.drop(index="no-pruning", errors="ignore")
    both = both.loc[run.drawn(both.index)]
    if len(both) < 2:
        return None
    figure, axes = new_figure(4.9)
    axes.grid(True, axis="x")
    for method, row in both.iterrows():
        style = look(str(method))
        axes.plot([row.low_x, row.high_x], [row.value_y] * 2, color=style.color, alpha=0.35, linewidth=1.2)
        axes.plot([row.value_x] * 2, [row.low_y, row.high_y], color=style.color, alpha=0.35, linewidth=1.2)
        mark: dict[str, Any] = {
            "marker": style.marker,
            "color": style.color,
            "markersize": 8,
            "linestyle": "",
            "markeredgewidth": 1.8,
        }
        axes.plot(row.value_x, row.value_y, label=style.name, **mark)
    axes.margins(0.08)
    percent_axis(axes, "x", f"lesion patches kept at budget {run.headline:g} (%)")
    percent_axis(axes, "y", METRICS["accuracy"].axis)
    legend_below(figure, axes)
    return figure


def _curriculum(run: ReportRun) -> Figure | None:
    """Draws the losses over the epochs in the first training of the main method, below the budget where training follows one."""
    rows = _training_of(run)
    if rows.empty:
        return None
    if _follows_budget(run):
        figure, (top, axes) = plt.subplots(2, 1, figsize=(WIDTH, 5.0), sharex=True, height_ratios=[1, 1.7])
        top.plot(rows["epoch"], rows["budget"], color=KEPT, linewidth=2.2)
        top.set(ylabel="budget", ylim=(0, max(0.55, 1.08 * float(rows["budget"].max()))))
        for point, side in ((rows.iloc[0], "left"), (rows.iloc[-1], "right")):
            at = (point.epoch, point.budget)
            top.annotate(f"{point.budget:.2f}", at, (0, -14), textcoords="offset points", ha=side, color=KEPT)
    else:
        figure, axes = new_figure(3.6)
    for name in _active_losses(run):
        color, marker = _LOSSES[name]
        if name in rows and rows[name].notna().any():
            axes.plot(rows["epoch"], rows[name], color=color, marker=marker, markevery=max(1, len(rows) // 8), label=name)
    axes.set(xlabel="epoch", ylabel="loss (unweighted)", ylim=(0, None))
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    legend_below(figure, axes)
    return figure


def _training_of(run: ReportRun) -> pd.DataFrame:
    """Returns the epochs of the first training of the main method that has a budget; empty when there is none."""
    training = run.training
    if {"budget", "method", "seed"} <= set(training):
        for method in run.leading:
            rows = training[(training["method"] == method) & training["budget"].notna()]
            if len(rows):
                return rows[rows["seed"] == rows["seed"].min()].drop_duplicates("epoch", keep="last").sort_values("epoch")
    return pd.DataFrame()


def _active_losses(run: ReportRun) -> list[str]:
    """Returns the losses with a weight above 0 in the training that `_training_of` shows."""
    rows = _training_of(run)
    weights = run.info.methods[str(rows["method"].iloc[0])]["config"].get("losses", {}) if len(rows) else {}
    return [name for name in _LOSSES if weights.get(name, 1) > 0]


def _follows_budget(run: ReportRun) -> bool:
    """Checks whether that training depends on the token budget: only if it classifies what it keeps."""
    return "classification" in _active_losses(run)


def _score_histogram(run: ReportRun) -> Figure | None:
    """Draws the scores of the main method on lesion and background patches."""
    orders = run.orders
    seeds = [] if orders is None else [seed for method, seed in orders.scores if method == run.focus]
    if orders is None or not seeds or not orders.has_mask.any():
        return None
    scores, lesion = orders.scores[run.focus, min(seeds)][orders.has_mask], orders.lesion[orders.has_mask]
    figure, axes = new_figure(3.6)
    bins = np.linspace(0, 1, 41) if scores.min() >= 0 and scores.max() <= 1 else np.linspace(scores.min(), scores.max(), 41)
    for values, color, name in ((scores[~lesion], BACKGROUND, "background"), (scores[lesion], KEPT, "lesion")):
        if not values.size:
            continue
        share = np.histogram(values, bins)[0] / values.size
        axes.stairs(share, bins, fill=True, color=color, alpha=0.55, label=f"{name} patches (n = {values.size:,})")
        axes.stairs(share, bins, color=color, linewidth=1.4)
    axes.set(xlabel="patch score", ylim=(0, None), xlim=(bins[0], bins[-1]))
    axes.yaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10]))
    percent_axis(axes, label="share of patches (%)")
    legend_below(figure, axes, 1)
    return figure


def _strata(run: ReportRun, strata: pd.DataFrame) -> Figure | None:
    """Draws one row per stratum and one dot per method; only the leading methods and the controls, so that rows stay readable."""
    if strata.empty:
        return None
    counts = strata.drop_duplicates("stratum").set_index("stratum")["n"]
    largest = set(counts.sort_values(ascending=False, kind="stable").index[:MOST_STRATA])
    names = [name for name in dict.fromkeys(strata["stratum"]) if name in largest]
    methods = [m for m in reversed(run.emphasized) if m in set(strata["method"])]
    figure, axes = new_figure(1.6 + 0.62 * len(names))
    axes.grid(True, axis="x")
    axes.grid(False, axis="y")
    for offset, method in enumerate(methods):
        rows = strata[strata["method"] == method].set_index("stratum").reindex(names)
        at = np.arange(len(names)) + 0.13 * (offset - (len(methods) - 1) / 2)
        style = look(method)
        axes.hlines(at, rows["low"], rows["high"], color=style.color, alpha=0.4, linewidth=1.6)
        axes.plot(rows["value"], at, linestyle="", marker=style.marker, color=style.color, markersize=6.5, label=style.name)
    axes.set_yticks(range(len(names)), [f"{str(name).replace(', ', chr(10))}\nn = {int(counts[name])}" for name in names])
    axes.set(ylim=(len(names) - 0.5, -0.5))
    percent_axis(axes, "x", "share of the ceiling (%)")
    legend_below(figure, axes, 2)
    return figure


def _retention_model(run: ReportRun) -> Figure | None:
    """Draws the supplement's Gaussian model, fitted to the main method, beside the measured values at several budgets."""
    table, images = run.curve("retention"), run.main_predictions
    rows = table[(table["method"] == run.focus) & table["value"].notna()].sort_values("budget")
    images = lesion_rows(images[images["method"] == run.focus]).drop_duplicates("image_id")
    if len(rows) < 3 or images.empty or not (rows["budget"] < 1).any():
        return None
    prevalence = images["lesion"].to_numpy(float) / images["n_patches"].to_numpy(float)
    budgets, measured = rows["budget"].to_numpy(float), rows["value"].to_numpy(float)
    separation = statistics.fit_separation(budgets, measured, prevalence, exact=True)
    fine = np.linspace(0.05, 1, 96)
    figure, axes = new_figure(4.2)
    axes.plot([0, 1], [0, 1], color=MUTED, linewidth=0.9, linestyle=":", label="Chance (no separation)")
    for exact, color, width, dash, label in (
        (True, INK, 1.6, (0, (4, 2)), f"Gaussian model, Δ/σ = {separation:.2f}"),
        (False, LOST, 1.2, (0, (1, 1)), "Its closed-form approximation"),
    ):
        predicted = statistics.mean_predicted_retention(fine, separation, prevalence, exact=exact)
        axes.plot(fine, predicted, color=color, linewidth=width, linestyle=dash, label=label)
    axes.plot(budgets, measured, color=KEPT, marker="o", linestyle="", markersize=6.5, label=f"{look(run.focus).name}, measured")
    axes.set(xlim=(0.06, 1.02), ylim=(0, 1.03), xlabel="token budget (share of patches kept)")
    percent_axis(axes, label=METRICS["retention"].axis)
    legend_below(figure, axes, 1)
    return figure


def _center_bias(run: ReportRun) -> Figure | None:
    """Draws the share of the ceiling on the original images and on off-center views, one line per method."""
    study = run.off_center_study
    if study is None:
        return None
    shared = set(run.cells(study, AS_IS)["budget"]) & set(run.cells(study, OFF_CENTER)["budget"])
    if not shared:
        return None
    budget = min(shared, key=lambda b: abs(b - run.headline))
    values = [run.at("retention_of_ceiling", budget, study, view) for view in (AS_IS, OFF_CENTER)]
    # A matched baseline has another classifier but keeps the same patches.
    methods = [m for m in run.ordered(values[0]) if m in values[1] and m != "no-pruning" and not m.endswith("matched")]
    if not methods:
        return None
    methods = run.drawn(methods)
    figure, axes = new_figure(4.9)
    for method in sorted(methods, key=lambda m: -values[1][m]):
        style = look(method)
        axes.plot(
            [0, 1],
            [values[0][method], values[1][method]],
            color=style.color,
            marker=style.marker,
            linestyle=style.line,
            linewidth=2.6 if method == run.focus else 1.6,
            label=f"{style.name} {100 * values[1][method]:.1f}",
        )
    axes.set_xticks([0, 1], ["original images", "off-center views"])
    axes.set_xlim(-0.12, 1.12)
    percent_axis(axes, label=f"share of the ceiling at budget {budget:g} (%)")
    legend_below(figure, axes)
    return figure


def _reliability(run: ReportRun) -> Figure | None:
    """Draws confidence against accuracy of the main method at the headline budget, all seeds together."""
    rows, method = run.main_predictions, run.focus
    rows = rows[(rows["method"] == method) & np.isclose(rows["budget"], run.headline) & (rows["label"] >= 0)]
    error = run.at("ece").get(method)
    if rows.empty or error is None:
        return None
    confidence, accuracy, counts = metrics.reliability(rows["label"], rows["predicted"], probability_matrix(rows))
    confidence, accuracy = confidence[counts > 0], accuracy[counts > 0]
    figure, (axes, below) = plt.subplots(2, 1, figsize=(WIDTH, 4.9), sharex=True, height_ratios=[3, 1])
    axes.plot([0, 1], [0, 1], color=MUTED, linewidth=0.9, linestyle=":", label="perfectly calibrated")
    axes.vlines(confidence, np.minimum(confidence, accuracy), np.maximum(confidence, accuracy), color=BACKGROUND)
    label = f"{look(method).name}, ECE {100 * error:.1f}%"
    axes.plot(confidence, accuracy, color=KEPT, marker="o", linewidth=2.0, label=label)
    axes.set(xlim=(0, 1), ylim=(0, 1.02))
    percent_axis(axes, label="accuracy (%)")
    below.bar((np.arange(metrics.ECE_BINS) + 0.5) / metrics.ECE_BINS, counts, width=0.92 / metrics.ECE_BINS, color=BACKGROUND)
    below.set_ylabel("images")
    percent_axis(below, "x", "confidence (%)")
    legend_below(figure, axes, 1)
    return figure


# The list of figures.


@dataclass(frozen=True)
class Plate:
    """One figure on the page: file name, heading, caption, alternative text and the SVG element."""

    name: str
    title: str
    caption: str
    alt: str
    svg: str


@dataclass(frozen=True)
class FigurePlan:
    """A figure to draw.

    Attributes:
        name: File name.
        title: Heading.
        caption: Text under the figure; it may use {name} (of the main method), {budget}, {n}, {masks}, {trained} and {panels}.
        draw: Draws the figure, or returns None when there is nothing to show.
        metric: The measure whose values the alternative text lists.
        compares: Whether it has a mark for each method, so that a run with many methods shows only some of them.
    """

    name: str
    title: str
    caption: str
    draw: Callable[[ReportRun], Figure | None]
    metric: str | None = None
    compares: bool = False


_BANDS = "Bands: 95% bootstrap intervals over groups of images. Numbers in the legend: budget {budget}."

PLANS: tuple[FigurePlan, ...] = (
    FigurePlan(
        "retention",
        "Lesion patches kept at each budget",
        "The dashed line is the ceiling: no method can keep more. " + _BANDS + " n = {masks} images with a mask.",
        partial(_over_budgets, metric="retention"),
        "retention",
        compares=True,
    ),
    FigurePlan(
        "share-of-ceiling",
        "Share of the ceiling",
        "Retention divided by the ceiling. At 100%, no patch was spent on skin while lesion patches were dropped. "
        + _BANDS
        + " n = {masks} images with a mask.",
        partial(_over_budgets, metric="retention_of_ceiling"),
        "retention_of_ceiling",
        compares=True,
    ),
    FigurePlan(
        "accuracy",
        "Accuracy at each budget",
        _BANDS + " n = {n} images.",
        partial(_over_budgets, metric="accuracy"),
        "accuracy",
        True,
    ),
    FigurePlan(
        "macro-f1",
        "Macro F1 at each budget",
        "Rare classes count as much as common ones. " + _BANDS + " n = {n} images.",
        partial(_over_budgets, metric="macro_f1"),
        "macro_f1",
        compares=True,
    ),
    FigurePlan(
        "accuracy-against-retention",
        "Accuracy against retention",
        "One point per method at budget {budget}; lines are 95% intervals. Methods at the same height classify equally well; the "
        "further right, the more of the lesion they kept. n = {n} images for accuracy, {masks} for retention.",
        _accuracy_against_retention,
        "retention",
        compares=True,
    ),
    FigurePlan(
        "reliability",
        "Calibration",
        "Accuracy of {name} at budget {budget} by its confidence. Below the dotted line it is overconfident. Lower panel: number "
        "of predictions. n = {n} images per seed.",
        _reliability,
    ),
    FigurePlan(
        "center-bias",
        "Original images and off-center views",
        "Share of the ceiling when the lesion is where the photographer put it and when it is away from the center. A method that "
        "only keeps the middle of the image drops. Numbers in the legend: off-center views. Mean over seeds.",
        _center_bias,
        compares=True,
    ),
    FigurePlan(
        "size-strata",
        "By lesion size",
        "Images in quartiles of lesion size, budget {budget}. Lines: 95% intervals.",
        lambda run: _strata(run, run.by_size),
    ),
    FigurePlan(
        "class-strata",
        "By class",
        f"Classes with masks (at most {MOST_STRATA}, those with the most images), budget {{budget}}. Lines: 95% intervals, "
        "wide where there are few images.",
        lambda run: _strata(run, run.by_class),
    ),
    FigurePlan(
        "curriculum",
        "Training",
        "Training of {trained}. {panels}",
        _curriculum,
    ),
    FigurePlan(
        "scores",
        "Scores of lesion and skin patches",
        "Scores that {name} gives to patches of validation images with a mask (first seed). The less the two overlap, the more of "
        "the lesion survives a small budget.",
        _score_histogram,
    ),
    FigurePlan(
        "retention-model",
        "Does the separation of the scores explain retention?",
        "The model of the paper's supplement: scores of lesion and skin patches are two normal distributions, Δ/σ apart, fitted to "
        "the measured points. The closed-form approximation uses the same Δ/σ.",
        _retention_model,
    ),
)


def draw_figures(comparison: Comparison, folder: Path) -> list[Plate]:
    """Writes every figure that the runs have data for as SVG and PNG, and returns those of the page."""
    with house_style():
        return _figures_of_runs(comparison, folder) if comparison.several else _figures_of_run(comparison.first, folder)


def _plate(figure: Figure, folder: Path, name: str, title: str, caption: str, alt: str) -> Plate:
    svg = save(figure, folder, name)[0].read_text(encoding="utf-8")
    return Plate(name, title, caption, alt, svg_for_page(svg, name, alt))


def _figures_of_runs(comparison: Comparison, folder: Path) -> list[Plate]:
    plates = []
    for metric in ("retention_of_ceiling", "accuracy", "macro_f1"):
        figure = _main_methods(comparison, metric)
        if figure is not None:
            title = f"{METRICS[metric].term} at each budget"
            caption = "The main method of each run. Bands: 95% bootstrap intervals over groups of images."
            alt = f"Chart: {title}. The numbers are in the tables of this page."
            plates.append(_plate(figure, folder, metric.replace("_", "-"), title, caption, alt))
    return plates


def _figures_of_run(run: ReportRun, folder: Path) -> list[Plate]:
    training = _training_of(run)
    words = {
        "name": look(run.focus).name,
        "panels": (
            "Above: the token budget in each epoch. Below: the losses before weighting."
            if _follows_budget(run)
            else "The losses that the scorer is trained with, before weighting."
        ),
        "trained": look(str(training["method"].iloc[0])).name if len(training) else "",
        "budget": budget_text(run.headline),
        "n": f"{run.n:,}{_fewer(run)}",
        "masks": f"{run.n_masked:,}",
    }
    some = ""
    if len(run.methods) > MOST_DRAWN:
        some = (
            f" Of {len(run.methods)} methods at most {MOST_DRAWN} are shown: the main ones, the controls, and those with the "
            "highest share of the ceiling or macro F1. The tables have all."
        )
    plates = []
    for plan in PLANS:
        figure = plan.draw(run)
        if figure is not None:
            caption = plan.caption.format(**words) + (some if plan.compares else "")
            plates.append(_plate(figure, folder, plan.name, plan.title, caption, _alt(plan, run)))
    return plates


def _fewer(run: ReportRun) -> str:
    """Writes ` (Oracle: 155)`: the methods that classified fewer images than the others, because they need a mask."""
    counts = run.main.groupby("method")["n"].max()
    methods = [f"{look(m).name}: {counts[m]:,}" for m in run.ordered(counts.index) if 0 < counts[m] < run.n]
    return f" ({', '.join(methods)})" if methods else ""


def _alt(plan: FigurePlan, run: ReportRun) -> str:
    """Writes the alternative text: the heading and the values at the headline budget."""
    if plan.metric is None:
        return f"Chart: {plan.title}. The numbers are in the tables of this page."
    values = run.at(plan.metric)
    ranked = sorted(((m, values[m]) for m in run.drawn(run.methods) if m in values), key=lambda item: -item[1])
    counts = run.with_intervals(plan.metric, run.headline)["n"]
    listed = ", ".join(f"{look(m).name} {100 * v:.1f}%{_other_n(counts, m)}" for m, v in ranked)
    return f"Chart: {plan.title}. At budget {budget_text(run.headline)}: {listed}."
