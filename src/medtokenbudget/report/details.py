"""Figures that explain the curves: training, scores, lesion size, class, the retention model, the center, calibration.

Its own file because each looks inside one method or one stratum; the curves over the budget are in `curves.py`. Each function
gives a figure, or None when the run has nothing to show in it.
"""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.pyplot import subplots
from matplotlib.ticker import MaxNLocator

from medtokenbudget.experiments.results import probability_matrix
from medtokenbudget.metrics import ECE_BINS
from medtokenbudget.report.evidence import Evidence
from medtokenbudget.report.intervals import Intervals
from medtokenbudget.report.style import (
    BACKGROUND,
    INK,
    KEPT,
    LOST,
    MUTED,
    WIDTH,
    legend_below,
    look,
    new_figure,
    ordered,
    percent_axis,
)

_LOSSES = {
    "classification": ("classification", "#0072b2", "o"),
    "lesion": ("lesion", "#d55e00", "s"),
    "distillation": ("distillation", "#009e73", "v"),
    "diversity": ("diversity", "#a8577e", "D"),
}


def curriculum(evidence: Evidence, intervals: Intervals) -> Figure | None:
    """The budget over the epochs above, the losses below, of the first LATS training."""
    rows = lats_training(evidence.training)
    if rows.empty:
        return None
    figure, (top, bottom) = subplots(2, 1, figsize=(WIDTH, 5.0), sharex=True, height_ratios=[1, 1.7])
    top.plot(rows["epoch"], rows["budget"], color=KEPT, linewidth=2.2)
    top.set(ylabel="budget", ylim=(0, max(0.55, 1.08 * float(rows["budget"].max()))))
    for index in (0, -1):
        point = rows.iloc[index]
        side = "left" if index == 0 else "right"
        top.annotate(f"{point.budget:.2f}", (point.epoch, point.budget), (0, -14), textcoords="offset points", ha=side, color=KEPT)
    for column, (name, color, marker) in _LOSSES.items():
        if column in rows and rows[column].notna().any() and float(rows[column].abs().max()) > 0:
            every = max(1, len(rows) // 8)
            bottom.plot(rows["epoch"], rows[column], color=color, marker=marker, markevery=every, label=name)
    bottom.set(xlabel="epoch", ylabel="loss (unweighted)", ylim=(0, None))
    legend_below(figure, bottom)
    return figure


def lats_training(training: pd.DataFrame) -> pd.DataFrame:
    """Epochs of the first unit that trained plain LATS; empty when there is none."""
    if training.empty or "budget" not in training or "unit" not in training:
        return pd.DataFrame()
    units = [str(unit) for unit in dict.fromkeys(training["unit"]) if str(unit).split("/")[-1].startswith("lats-")]
    if not units:
        return pd.DataFrame()
    rows = training[(training["unit"] == units[0]) & training["budget"].notna()]
    return rows.drop_duplicates("epoch", keep="last").sort_values("epoch")


def score_histogram(evidence: Evidence, intervals: Intervals) -> Figure | None:
    """Scores of LATS on lesion and on background patches."""
    routing = evidence.routing
    if routing is None or not routing.scores or not routing.has_mask.any():
        return None
    seed = min(routing.scores)
    scores, lesion = routing.scores[seed][routing.has_mask], routing.lesion[routing.has_mask]
    figure, axes = new_figure(3.6)
    bins = np.linspace(0, 1, 41) if scores.min() >= 0 and scores.max() <= 1 else np.linspace(scores.min(), scores.max(), 41)
    for values, color, name in ((scores[~lesion], BACKGROUND, "background"), (scores[lesion], KEPT, "lesion")):
        if not values.size:
            continue
        share = np.histogram(values, bins)[0] / values.size
        axes.stairs(share, bins, fill=True, color=color, alpha=0.55, label=f"{name} patches (n = {values.size:,})")
        axes.stairs(share, bins, color=color, linewidth=1.4)
    axes.set(xlabel="score of the patch", ylim=(0, None), xlim=(bins[0], bins[-1]))
    axes.yaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10]))
    percent_axis(axes, label="share of its patches (%)")
    legend_below(figure, axes, 1)
    return figure


def size_strata(evidence: Evidence, intervals: Intervals) -> Figure | None:
    """Share of the ceiling by quartile of lesion size, at the headline budget."""
    return _strata_dots(evidence, intervals.by_size)


def class_strata(evidence: Evidence, intervals: Intervals) -> Figure | None:
    """Share of the ceiling by class, at the headline budget."""
    return _strata_dots(evidence, intervals.by_class)


def _strata_dots(evidence: Evidence, strata: pd.DataFrame) -> Figure | None:
    """A row a stratum, a dot a method; only LATS and the controls, so that rows stay readable."""
    if strata.empty:
        return None
    names = list(dict.fromkeys(strata["stratum"]))
    shown = [m for m in ("random", "darkness", "center", "lats", "lats:lesion-first") if m in set(strata["method"])]
    figure, axes = new_figure(1.6 + 0.62 * len(names))
    axes.grid(True, axis="x")
    axes.grid(False, axis="y")
    counts = strata.drop_duplicates("stratum").set_index("stratum")["n"]
    for offset, method in enumerate(shown):
        rows = strata[strata["method"] == method].set_index("stratum").reindex(names)
        at = np.arange(len(names)) + 0.13 * (offset - (len(shown) - 1) / 2)
        style = look(method)
        axes.hlines(at, rows["low"], rows["high"], color=style.color, alpha=0.4, linewidth=1.6)
        axes.plot(rows["value"], at, linestyle="", marker=style.marker, color=style.color, markersize=6.5, label=style.name)
    axes.set_yticks(range(len(names)), [f"{str(name).replace(', ', chr(10))}\nn = {int(counts[name])}" for name in names])
    axes.set(ylim=(len(names) - 0.5, -0.5))
    percent_axis(axes, "x", "share of the possible retention (%)")
    legend_below(figure, axes, 2)
    return figure


def retention_model(evidence: Evidence, intervals: Intervals) -> Figure | None:
    """The supplement's Gaussian model, fitted, beside what was measured."""
    model = intervals.model
    if model is None:
        return None
    figure, axes = new_figure(4.2)
    axes.plot([0, 1], [0, 1], color=MUTED, linewidth=0.9, linestyle=":", label="No separation (chance)")
    label = f"Gaussian model, Δ/σ = {model.separation:.2f}"
    axes.plot(model.fine, model.predicted, color=INK, linewidth=1.6, linestyle=(0, (4, 2)), label=label)
    axes.plot(
        model.fine,
        model.approximate,
        color=LOST,
        linewidth=1.2,
        linestyle=(0, (1, 1)),
        label="The same, supplement's approximation",
    )
    axes.plot(model.budgets, model.measured, color=KEPT, marker="o", linestyle="", markersize=6.5, label="LATS, measured")
    axes.set(xlim=(0.06, 1.02), ylim=(0, 1.03), xlabel="token budget (share of patches kept)")
    percent_axis(axes, label="lesion patches kept (%)")
    legend_below(figure, axes, 1)
    return figure


def center_bias(evidence: Evidence, intervals: Intervals) -> Figure | None:
    """Share of the ceiling on the images as they are and on off-center views, a line a method."""
    pair = evidence.off_center
    if pair is None:
        return None
    straight, moved = (evidence.cells(pair.study, name) for name in (pair.straight, pair.moved))
    budget = min(set(straight["budget"]) & set(moved["budget"]), key=lambda b: abs(b - evidence.headline), default=None)
    if budget is None:
        return None
    values = [t[np.isclose(t["budget"], budget)].groupby("method")["retention_of_ceiling"].mean() for t in (straight, moved)]
    # A matched baseline differs in its head alone: it keeps the same patches.
    kept = [m for m in ordered(values[0].index) if m != "no-pruning" and not m.endswith("matched")]
    methods = [m for m in kept if m in values[1].index and not np.isnan(values[0][m])]
    if not methods:
        return None
    figure, axes = new_figure(4.3)
    for method in methods:
        style = look(method)
        line = [values[0][method], values[1][method]]
        axes.plot(
            [0, 1], line, color=style.color, marker=style.marker, linestyle=style.line, linewidth=2.6 if method == "lats" else 1.6
        )
    end_labels(axes, {m: float(values[1][m]) for m in methods}, 1.04)
    axes.set_xticks([0, 1], ["images as they are", "off-center views"])
    axes.set_xlim(-0.12, 1.62)
    axes.spines["bottom"].set_bounds(-0.12, 1.12)
    percent_axis(axes, label=f"share of the possible retention at {budget:g} (%)")
    return figure


def end_labels(axes: Axes, ends: dict[str, float], x: float) -> None:
    """Names at the right end of lines, pushed apart so that none covers another."""
    bottom, top = axes.get_ylim()
    step = 0.062 * (top - bottom)
    placed: list[tuple[str, float]] = []
    for method, y in sorted(ends.items(), key=lambda item: item[1]):
        placed.append((method, max(y, placed[-1][1] + step) if placed else y))
    # Upwards first; then the ones that ended above the axes come down, with those that they would cover.
    for i in range(len(placed) - 1, -1, -1):
        limit = top if i == len(placed) - 1 else placed[i + 1][1] - step
        placed[i] = (placed[i][0], min(placed[i][1], limit))
    for method, y in placed:
        style = look(method)
        text = f"{style.name} {100 * ends[method]:.1f}"
        axes.text(x, y, text, color=style.color, va="center", fontsize=10.5, fontweight="bold" if style.strong else "normal")


def reliability(evidence: Evidence, intervals: Intervals) -> Figure | None:
    """Confidence against accuracy of LATS at the headline budget, all seeds together; the mean gap is that of results.csv."""
    rows = evidence.main_predictions
    rows = rows[(rows["method"] == "lats") & np.isclose(rows["budget"], evidence.headline) & (rows["label"] >= 0)]
    cell = evidence.cell("lats")
    if rows.empty or cell is None:
        return None
    confidence = probability_matrix(rows).max(1)
    correct = (rows["label"] == rows["predicted"]).to_numpy(float)
    place = np.clip(np.ceil(confidence * ECE_BINS).astype(int) - 1, 0, ECE_BINS - 1)
    counts = np.bincount(place, minlength=ECE_BINS)
    used = counts > 0
    said, right = (np.bincount(place, values, ECE_BINS)[used] / counts[used] for values in (confidence, correct))
    figure, (axes, below) = subplots(2, 1, figsize=(WIDTH, 4.9), sharex=True, height_ratios=[3, 1])
    axes.plot([0, 1], [0, 1], color=MUTED, linewidth=0.9, linestyle=":", label="perfectly calibrated")
    axes.vlines(said, np.minimum(said, right), np.maximum(said, right), color=BACKGROUND)
    axes.plot(said, right, color=KEPT, marker="o", linewidth=2.0, label=f"LATS, gap on average {100 * cell['ece']:.1f} points")
    axes.set(xlim=(0, 1), ylim=(0, 1.02))
    percent_axis(axes, label="accuracy (%)")
    below.bar((np.arange(ECE_BINS) + 0.5) / ECE_BINS, counts, width=0.92 / ECE_BINS, color=BACKGROUND)
    below.set_ylabel("images")
    percent_axis(below, "x", "confidence of the prediction (%)")
    legend_below(figure, axes, 1)
    return figure
