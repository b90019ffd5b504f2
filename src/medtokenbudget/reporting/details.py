"""Figures that explain the curves: training, scores, lesion size, class, the retention model, off-center views, calibration.

Each function returns a figure, or None when the run has nothing to show in it. The curves over the budget are in `curves.py`.
"""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.pyplot import subplots
from matplotlib.ticker import MaxNLocator

from medtokenbudget import metrics
from medtokenbudget.metrics import ECE_BINS
from medtokenbudget.reporting.evidence import AS_IS, OFF_CENTER, Evidence
from medtokenbudget.reporting.intervals import Intervals
from medtokenbudget.reporting.labels import end_labels
from medtokenbudget.reporting.looks import INK, look
from medtokenbudget.reporting.style import (
    BACKGROUND,
    KEPT,
    LOST,
    MUTED,
    WIDTH,
    legend_below,
    new_figure,
    percent_axis,
)
from medtokenbudget.runs.run import probability_matrix

MOST_STRATA = 12
"""Classes with the most images that the figure shows; the table has all."""
_LOSSES = {
    "classification": ("classification", "#0072b2", "o"),
    "lesion": ("lesion", "#d55e00", "s"),
    "distillation": ("distillation", "#009e73", "v"),
    "diversity": ("diversity", "#a8577e", "D"),
}


def curriculum(evidence: Evidence, intervals: Intervals) -> Figure | None:
    """The losses over the epochs in the first training run of the main method, below the budget where training follows one."""
    rows = training_of(evidence)
    if rows.empty:
        return None
    if follows_budget(evidence):
        figure, (top, bottom) = subplots(2, 1, figsize=(WIDTH, 5.0), sharex=True, height_ratios=[1, 1.7])
        _budget_panel(top, rows)
    else:
        figure, bottom = new_figure(3.6)
    for column in active_losses(evidence):
        name, color, marker = _LOSSES[column]
        if column in rows and rows[column].notna().any():
            bottom.plot(rows["epoch"], rows[column], color=color, marker=marker, markevery=max(1, len(rows) // 8), label=name)
    bottom.set(xlabel="epoch", ylabel="loss (unweighted)", ylim=(0, None))
    bottom.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    legend_below(figure, bottom)
    return figure


def _budget_panel(axes: Axes, rows: pd.DataFrame) -> None:
    axes.plot(rows["epoch"], rows["budget"], color=KEPT, linewidth=2.2)
    axes.set(ylabel="budget", ylim=(0, max(0.55, 1.08 * float(rows["budget"].max()))))
    for index, side in ((0, "left"), (-1, "right")):
        point = rows.iloc[index]
        text = f"{point.budget:.2f}"
        axes.annotate(text, (point.epoch, point.budget), (0, -14), textcoords="offset points", ha=side, color=KEPT)


def active_losses(evidence: Evidence) -> list[str]:
    """The losses with a weight above 0 in the training that `training_of` shows."""
    rows = training_of(evidence)
    config = evidence.info.methods[str(rows["method"].iloc[0])].config if len(rows) else {}
    weights = config.get("losses", {})
    return [name for name in _LOSSES if weights.get(name, 1) > 0]


def follows_budget(evidence: Evidence) -> bool:
    """Whether that training depends on the token budget: only if it classifies what it keeps."""
    return "classification" in active_losses(evidence)


def training_of(evidence: Evidence) -> pd.DataFrame:
    """Epochs of the first training run of the main method that has a budget; empty when there is none."""
    training = evidence.training
    if not {"budget", "method", "seed"} <= set(training):
        return pd.DataFrame()
    rows = training[training["method"].isin(evidence.leading) & training["budget"].notna()]
    for method in evidence.leading:
        own = rows[rows["method"] == method]
        if len(own):
            return own[own["seed"] == own["seed"].min()].drop_duplicates("epoch", keep="last").sort_values("epoch")
    return pd.DataFrame()


def score_histogram(evidence: Evidence, intervals: Intervals) -> Figure | None:
    """Scores of the main method on lesion and background patches."""
    orders = evidence.orders
    seeds = [] if orders is None else [seed for method, seed in orders.scores if method == evidence.focus]
    if orders is None or not seeds or not orders.has_mask.any():
        return None
    scores, lesion = orders.scores[evidence.focus, min(seeds)][orders.has_mask], orders.lesion[orders.has_mask]
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


def size_strata(evidence: Evidence, intervals: Intervals) -> Figure | None:
    """Share of the ceiling by quartile of lesion size, at the headline budget."""
    return _strata_dots(evidence, intervals.by_size)


def class_strata(evidence: Evidence, intervals: Intervals) -> Figure | None:
    """Share of the ceiling by class, at the headline budget."""
    return _strata_dots(evidence, intervals.by_class)


def _strata_dots(evidence: Evidence, strata: pd.DataFrame) -> Figure | None:
    """One row per stratum and one dot per method; only the leading methods and the controls, so that rows stay readable."""
    if strata.empty:
        return None
    counts = strata.drop_duplicates("stratum").set_index("stratum")["n"]
    largest = set(counts.sort_values(ascending=False, kind="stable").index[:MOST_STRATA])
    names = [name for name in dict.fromkeys(strata["stratum"]) if name in largest]
    shown = [m for m in reversed(evidence.emphasized) if m in set(strata["method"])]
    figure, axes = new_figure(1.6 + 0.62 * len(names))
    axes.grid(True, axis="x")
    axes.grid(False, axis="y")
    for offset, method in enumerate(shown):
        rows = strata[strata["method"] == method].set_index("stratum").reindex(names)
        at = np.arange(len(names)) + 0.13 * (offset - (len(shown) - 1) / 2)
        style = look(method)
        axes.hlines(at, rows["low"], rows["high"], color=style.color, alpha=0.4, linewidth=1.6)
        axes.plot(rows["value"], at, linestyle="", marker=style.marker, color=style.color, markersize=6.5, label=style.name)
    axes.set_yticks(range(len(names)), [f"{str(name).replace(', ', chr(10))}\nn = {int(counts[name])}" for name in names])
    axes.set(ylim=(len(names) - 0.5, -0.5))
    percent_axis(axes, "x", "share of the ceiling (%)")
    legend_below(figure, axes, 2)
    return figure


def retention_model(evidence: Evidence, intervals: Intervals) -> Figure | None:
    """The supplement's Gaussian model, fitted, beside the measured values."""
    model = intervals.model
    if model is None:
        return None
    figure, axes = new_figure(4.2)
    axes.plot([0, 1], [0, 1], color=MUTED, linewidth=0.9, linestyle=":", label="Chance (no separation)")
    label = f"Gaussian model, Δ/σ = {model.separation:.2f}"
    axes.plot(model.fine, model.predicted, color=INK, linewidth=1.6, linestyle=(0, (4, 2)), label=label)
    axes.plot(
        model.fine,
        model.approximate,
        color=LOST,
        linewidth=1.2,
        linestyle=(0, (1, 1)),
        label="Its closed-form approximation",
    )
    axes.plot(
        model.budgets,
        model.measured,
        color=KEPT,
        marker="o",
        linestyle="",
        markersize=6.5,
        label=f"{look(evidence.focus).name}, measured",
    )
    axes.set(xlim=(0.06, 1.02), ylim=(0, 1.03), xlabel="token budget (share of patches kept)")
    percent_axis(axes, label="lesion patches kept (%)")
    legend_below(figure, axes, 1)
    return figure


def center_bias(evidence: Evidence, intervals: Intervals) -> Figure | None:
    """Share of the ceiling on the original images and on off-center views, one line per method."""
    study = evidence.off_center_study
    if study is None:
        return None
    shared = set(evidence.cells(study, AS_IS)["budget"]) & set(evidence.cells(study, OFF_CENTER)["budget"])
    if not shared:
        return None
    budget = min(shared, key=lambda b: abs(b - evidence.headline))
    values = [evidence.at("retention_of_ceiling", budget, study, view) for view in (AS_IS, OFF_CENTER)]
    # A matched baseline has another classifier but keeps the same patches.
    methods = [m for m in evidence.ordered(values[0]) if m in values[1] and m != "no-pruning" and not m.endswith("matched")]
    if not methods:
        return None
    methods = evidence.drawn(methods)
    figure, axes = new_figure(max(4.3, 0.3 * len(methods)))
    for method in methods:
        style = look(method)
        line = [values[0][method], values[1][method]]
        width = 2.6 if method == evidence.focus else 1.6
        axes.plot([0, 1], line, color=style.color, marker=style.marker, linestyle=style.line, linewidth=width)
    end_labels(axes, {m: values[1][m] for m in methods}, 1.04, evidence.emphasized)
    axes.set_xticks([0, 1], ["original images", "off-center views"])
    axes.set_xlim(-0.12, 1.62)
    axes.spines["bottom"].set_bounds(-0.12, 1.12)
    percent_axis(axes, label=f"share of the ceiling at budget {budget:g} (%)")
    return figure


def reliability(evidence: Evidence, intervals: Intervals) -> Figure | None:
    """Confidence against accuracy of the main method at the headline budget, all seeds together; the ECE is that of results.csv."""
    rows, method = evidence.main_predictions, evidence.focus
    rows = rows[(rows["method"] == method) & np.isclose(rows["budget"], evidence.headline) & (rows["label"] >= 0)]
    error = evidence.at("ece").get(method)
    if rows.empty or error is None:
        return None
    said, right, counts = metrics.reliability(rows["label"], rows["predicted"], probability_matrix(rows))
    said, right = said[counts > 0], right[counts > 0]
    figure, (axes, below) = subplots(2, 1, figsize=(WIDTH, 4.9), sharex=True, height_ratios=[3, 1])
    axes.plot([0, 1], [0, 1], color=MUTED, linewidth=0.9, linestyle=":", label="perfectly calibrated")
    axes.vlines(said, np.minimum(said, right), np.maximum(said, right), color=BACKGROUND)
    axes.plot(said, right, color=KEPT, marker="o", linewidth=2.0, label=f"{look(method).name}, ECE {100 * error:.1f}%")
    axes.set(xlim=(0, 1), ylim=(0, 1.02))
    percent_axis(axes, label="accuracy (%)")
    below.bar((np.arange(ECE_BINS) + 0.5) / ECE_BINS, counts, width=0.92 / ECE_BINS, color=BACKGROUND)
    below.set_ylabel("images")
    percent_axis(below, "x", "confidence (%)")
    legend_below(figure, axes, 1)
    return figure
