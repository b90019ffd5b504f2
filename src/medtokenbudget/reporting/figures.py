"""Every figure of a report. A function that draws returns a figure, or None when the runs have nothing to show in it; headings and
captions are in the template of the page.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from medtokenbudget import metrics
from medtokenbudget.backbone.views import OFF_CENTER
from medtokenbudget.config import LossWeights
from medtokenbudget.measures import METRICS, budget_text, probability_matrix
from medtokenbudget.model.looks import Look, is_reference, look
from medtokenbudget.reporting.comparison import Comparison
from medtokenbudget.reporting.intervals import ReportRun
from medtokenbudget.reporting.style import (
    BACKGROUND,
    INK,
    KEPT,
    LOST,
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
from medtokenbudget.runs import statistics
from medtokenbudget.runs.run import AS_IS
from medtokenbudget.runs.statistics import lesion_rows

MOST_STRATA = 12
"""Classes with the most images that the figure shows; the table has all."""
_CEILING_LINE: dict[str, Any] = {"color": INK, "linestyle": (0, (4, 2)), "linewidth": 1.4, "label": "Ceiling (Oracle)"}
_LOSSES = [term.name for term in fields(LossWeights) if term.name != "budget"]
"""What the figure of the training draws; the deviation from the budget is a diagnostic without gradient."""
_LOSS_STYLES = (("#0072b2", "o"), ("#a8577e", "D"), ("#d55e00", "s"), ("#009e73", "v"), ("#c98a00", "^"), ("#6a51a3", "P"))
_RUN_COLORS = ("#0072b2", "#d55e00", "#009e73", "#a8577e", "#c98a00", "#6a51a3", "#7a828a", "#3a9bd0")
_RUN_MARKERS = "osv^DPXH"


def draw_figures(comparison: Comparison, folder: Path) -> dict[str, dict[str, str]]:
    """Write every figure that the runs have data for as SVG and PNG; return `svg` and `alt`, the values in words, by name."""
    run, figures = comparison.first, {}
    curves: dict[str, Callable[[], Figure | None]] = {
        name: partial(_over_budgets, comparison, metric) for name, metric in CURVES.items()
    }
    of_one_run: dict[str, Callable[[], Figure | None]] = {name: partial(draw, run) for name, draw in DRAWN.items()}
    with house_style():
        for name, draw in (curves | ({} if comparison.several else of_one_run)).items():
            figure = draw()
            if figure is not None:
                svg = save(figure, folder, name)[0].read_text(encoding="utf-8")
                figures[name] = {"svg": svg_for_page(svg, name), "alt": "" if comparison.several else _in_words(name, run)}
    return figures


def _in_words(name: str, run: ReportRun) -> str:
    """Write the values at the headline budget for readers who do not see the figure; empty for figures without a measure."""
    metric = {**CURVES, "accuracy-against-retention": "retention"}.get(name)
    if metric is None:
        return ""
    values = run.at(metric)
    ranked = sorted(((m, values[m]) for m in run.drawn(run.methods) if m in values), key=lambda item: -item[1])
    counts = run.by_method(metric)["n"]
    listed = ", ".join(f"{look(m).title} {100 * v:.1f}%{_other_n(counts, m)}" for m, v in ranked)
    return f"At budget {budget_text(run.headline)}: {listed}."


# Curves over the token budget.


def _over_budgets(comparison: Comparison, metric: str) -> Figure | None:
    """Draw one measure over the budget: of one run a line per method, of several the main method of each."""
    lines = _run_lines(comparison, metric) if comparison.several else _method_lines(comparison.first, metric)
    needs_masks = METRICS[metric].scope == "masks"
    if not lines or (needs_masks and not any(run.n_masked for run in comparison.runs)):
        return None
    figure, axes = new_figure(4.9)
    if metric == "retention" and not comparison.several:
        # NoPruning ignores the budget, so it has another ceiling than the rest.
        cells = comparison.first.main
        ceiling = cells[(cells["method"] != "no-pruning") & cells["ceiling"].notna()].groupby("budget")["ceiling"].mean()
        axes.plot(ceiling.index, ceiling, **_CEILING_LINE)
        axes.fill_between(ceiling.index, ceiling, 1.03, color=MUTED, alpha=0.08, linewidth=0)
        axes.plot([0, 1], [0, 1], color=MUTED, linewidth=0.9, linestyle=":", label="Expected by chance")
        axes.set_ylim(0, 1.03)
    elif metric == "retention_of_ceiling":
        axes.axhline(1, **_CEILING_LINE)
    for rows, style, width, band in lines:
        line: dict[str, Any] = {"color": style.color, "linestyle": style.line, "linewidth": width, "zorder": 1 + width}
        line |= {"marker": style.marker or None, "markersize": 6 if width > 2 else 4.5}
        axes.plot(rows["budget"], rows["value"], label=style.title, **line)
        if band and rows["low"].notna().any():
            axes.fill_between(rows["budget"], rows["low"], rows["high"], color=style.color, alpha=0.13, linewidth=0, zorder=1)
    if metric == "retention_of_ceiling":
        axes.set_ylim(None, 1.02)
    low, high = min(comparison.budgets), max(comparison.budgets)
    # A single budget has no range of its own.
    axes.set_xlim(low - 0.04, high + 0.02) if high > low else axes.set_xlim(low - 0.1, low + 0.1)
    budget_axis(axes, comparison.budgets)
    percent_axis(axes, label=METRICS[metric].axis)
    legend_below(figure, axes, 1 if comparison.several else 2)
    return figure


Line = tuple[pd.DataFrame, Look, float, bool]
"""Rows of a curve, its look, the width of the line, and whether its interval is drawn."""


def _method_lines(run: ReportRun, metric: str) -> list[Line]:
    """Return a line per method with its value at the headline budget in the legend, highest first."""
    table = run.curve(metric)
    headline = table[np.isclose(table["budget"], run.headline)].set_index("method")
    methods = [m for m in run.drawn(run.methods) if not (METRICS[metric].scope == "masks" and is_reference(m))]
    measured = [m for m in methods if table.loc[table["method"] == m, "value"].notna().any()]
    lines = []
    for method in sorted(measured, key=lambda m: -np.nan_to_num(headline["value"].get(m, np.nan), nan=-1)):
        style, value = look(method), headline["value"].get(method, np.nan)
        title = style.title if np.isnan(value) else f"{style.title} {100 * value:.1f}{_other_n(headline['n'], method)}"
        strong = method in run.emphasized
        width = 2.6 if method == run.focus else 1.8 if strong else 1.2
        rows = table[table["method"] == method].sort_values("budget")
        lines.append((rows, replace(style, title=title), width, strong))
    return lines


def _run_lines(comparison: Comparison, metric: str) -> list[Line]:
    lines = []
    for i, run in enumerate(comparison.runs):
        table = run.curve(metric)
        rows = table[table["method"] == run.focus].sort_values("budget")
        color, marker = _RUN_COLORS[i % len(_RUN_COLORS)], _RUN_MARKERS[i % len(_RUN_MARKERS)]
        if rows["value"].notna().any():
            lines.append((rows, Look(f"{run.name}: {look(run.focus).title}", "", color, marker), 2.0, True))
    return lines


def _other_n(counts: pd.Series, method: str) -> str:
    """Write ` (n = 155)` for a method that was measured on fewer images than the others, else nothing."""
    n = counts.get(method, np.nan)
    return "" if np.isnan(n) or n == counts.max() else f" (n = {int(n):,})"


# Figures that explain the curves.


def _accuracy_against_retention(run: ReportRun) -> Figure | None:
    """Draw one point per method at the headline budget: accuracy does not show how much of the lesion was kept."""
    retention, accuracy = (run.by_method(metric) for metric in ("retention", "accuracy"))
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
        mark: dict[str, Any] = {"marker": style.marker, "markersize": 8, "markeredgewidth": 1.8, "linestyle": ""}
        axes.plot(row.value_x, row.value_y, label=style.title, color=style.color, **mark)
    axes.margins(0.08)
    percent_axis(axes, "x", f"lesion patches kept at budget {run.headline:g} (%)")
    percent_axis(axes, "y", METRICS["accuracy"].axis)
    legend_below(figure, axes)
    return figure


def _curriculum(run: ReportRun) -> Figure | None:
    """Draw the losses over the epochs in the first training of the main method, below the budget where training follows one."""
    rows = training_of(run)
    if rows.empty:
        return None
    if follows_budget(run):
        figure, (top, axes) = plt.subplots(2, 1, figsize=(WIDTH, 5.0), sharex=True, height_ratios=[1, 1.7])
        top.plot(rows["epoch"], rows["budget"], color=KEPT, linewidth=2.2)
        top.set(ylabel="budget", ylim=(0, max(0.55, 1.08 * float(rows["budget"].max()))))
        for point, side in ((rows.iloc[0], "left"), (rows.iloc[-1], "right")):
            at = (point.epoch, point.budget)
            top.annotate(f"{point.budget:.2f}", at, (0, -14), textcoords="offset points", ha=side, color=KEPT)
    else:
        figure, axes = new_figure(3.6)
    for name in _active_losses(run):
        color, marker = _LOSS_STYLES[_LOSSES.index(name) % len(_LOSS_STYLES)]
        if name in rows and rows[name].notna().any():
            axes.plot(rows["epoch"], rows[name], color=color, marker=marker, markevery=max(1, len(rows) // 8), label=name)
    axes.set(xlabel="epoch", ylabel="loss (unweighted)", ylim=(0, None))
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    legend_below(figure, axes)
    return figure


def training_of(run: ReportRun) -> pd.DataFrame:
    """Return the epochs of the first training of the main method that has a budget; empty when there is none."""
    training = run.training
    if {"budget", "method", "seed"} <= set(training):
        for method in run.leading:
            rows = training[(training["method"] == method) & training["budget"].notna()]
            if len(rows):
                return rows[rows["seed"] == rows["seed"].min()].drop_duplicates("epoch", keep="last").sort_values("epoch")
    return pd.DataFrame()


def _active_losses(run: ReportRun) -> list[str]:
    rows = training_of(run)
    weights = run.info.methods[str(rows["method"].iloc[0])]["config"].get("losses", {}) if len(rows) else {}
    return [name for name in _LOSSES if weights.get(name, 1) > 0]


def follows_budget(run: ReportRun) -> bool:
    """Check whether that training depends on the token budget: only if it classifies what it keeps."""
    return "classification" in _active_losses(run)


def _score_histogram(run: ReportRun) -> Figure | None:
    orders = run.orders
    seeds = [] if orders is None else [seed for method, seed in orders.scores if method == run.focus]
    if orders is None or not seeds or not orders.has_mask.any():
        return None
    scores, lesion = orders.scores[run.focus, min(seeds)][orders.has_mask], orders.lesion[orders.has_mask]
    figure, axes = new_figure(3.6)
    # Probabilities have the same axis in every report; other scores have no fixed range.
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
    """Draw one row per stratum and one dot per method; only the leading methods and the controls, so that rows stay readable."""
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
        axes.plot(rows["value"], at, linestyle="", marker=style.marker, color=style.color, markersize=6.5, label=style.title)
    axes.set_yticks(range(len(names)), [f"{str(name).replace(', ', chr(10))}\nn = {int(counts[name])}" for name in names])
    axes.set(ylim=(len(names) - 0.5, -0.5))
    percent_axis(axes, "x", "share of the ceiling (%)")
    legend_below(figure, axes, 2)
    return figure


def _retention_model(run: ReportRun) -> Figure | None:
    """Draw the supplement's Gaussian model, fitted to the main method, with the measured values at several budgets."""
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
    axes.plot(budgets, measured, color=KEPT, marker="o", linestyle="", markersize=6.5, label=f"{look(run.focus).title}, measured")
    axes.set(xlim=(0.06, 1.02), ylim=(0, 1.03), xlabel="token budget (share of patches kept)")
    percent_axis(axes, label=METRICS["retention"].axis)
    legend_below(figure, axes, 1)
    return figure


def _center_bias(run: ReportRun) -> Figure | None:
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
        line: dict[str, Any] = {"color": style.color, "marker": style.marker, "linestyle": style.line}
        width, label = 2.6 if method == run.focus else 1.6, f"{style.title} {100 * values[1][method]:.1f}"
        axes.plot([0, 1], [of_view[method] for of_view in values], linewidth=width, label=label, **line)
    axes.set_xticks([0, 1], ["original images", "off-center views"])
    axes.set_xlim(-0.12, 1.12)
    percent_axis(axes, label=f"share of the ceiling at budget {budget:g} (%)")
    legend_below(figure, axes)
    return figure


def _reliability(run: ReportRun) -> Figure | None:
    """Draw confidence against accuracy of the main method at the headline budget, all seeds together."""
    rows, error = run.focus_rows[run.focus_rows["label"] >= 0], run.at("ece").get(run.focus)
    if rows.empty or error is None:
        return None
    confidence, accuracy, counts = metrics.reliability(rows["label"], rows["predicted"], probability_matrix(rows))
    # An empty bin has neither confidence nor accuracy.
    confidence, accuracy = confidence[counts > 0], accuracy[counts > 0]
    figure, (axes, below) = plt.subplots(2, 1, figsize=(WIDTH, 4.9), sharex=True, height_ratios=[3, 1])
    axes.plot([0, 1], [0, 1], color=MUTED, linewidth=0.9, linestyle=":", label="perfectly calibrated")
    axes.vlines(confidence, np.minimum(confidence, accuracy), np.maximum(confidence, accuracy), color=BACKGROUND)
    label = f"{look(run.focus).title}, ECE {100 * error:.1f}%"
    axes.plot(confidence, accuracy, color=KEPT, marker="o", linewidth=2.0, label=label)
    axes.set(xlim=(0, 1), ylim=(0, 1.02))
    percent_axis(axes, label="accuracy (%)")
    below.bar((np.arange(metrics.ECE_BINS) + 0.5) / metrics.ECE_BINS, counts, width=0.92 / metrics.ECE_BINS, color=BACKGROUND)
    below.set_ylabel("images")
    percent_axis(below, "x", "confidence (%)")
    legend_below(figure, axes, 1)
    return figure


def fewer_images(run: ReportRun) -> str:
    """Write ` (Oracle: 155)`: the methods that classified fewer images than the others, because they need a mask."""
    counts = run.main.groupby("method")["n"].max()
    methods = [f"{look(m).title}: {counts[m]:,}" for m in run.ordered(counts.index) if 0 < counts[m] < run.n]
    return f" ({', '.join(methods)})" if methods else ""


CURVES = {"retention": "retention", "share-of-ceiling": "retention_of_ceiling", "accuracy": "accuracy", "macro-f1": "macro_f1"}
"""Figures over the budget -> their measure."""
DRAWN: dict[str, Callable[[ReportRun], Figure | None]] = {
    "accuracy-against-retention": _accuracy_against_retention,
    "reliability": _reliability,
    "center-bias": _center_bias,
    "size-strata": lambda run: _strata(run, run.by_size),
    "class-strata": lambda run: _strata(run, run.by_class),
    "curriculum": _curriculum,
    "scores": _score_histogram,
    "retention-model": _retention_model,
}
"""Figures of a report of one run."""
