"""Figures over the token budget: retention, share of the ceiling, accuracy, macro F1, and accuracy against retention.

Its own file because these are the paper's questions; what explains the answers is drawn in `details.py`. Each function gives a
figure, or None when the run has nothing to show in it.
"""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from medtokenbudget.report.evidence import Evidence
from medtokenbudget.report.intervals import Intervals
from medtokenbudget.report.style import INK, MUTED, budget_axis, legend_below, look, new_figure, percent_axis


def retention(evidence: Evidence, intervals: Intervals) -> Figure | None:
    """Lesion retention over the budget, with the ceiling and the line of a random choice."""
    if not evidence.has_masks:
        return None
    figure, axes = new_figure(4.9)
    ceiling = ceiling_of(evidence.main)
    if ceiling is not None:
        axes.plot(ceiling.index, ceiling, color=INK, linestyle=(0, (4, 2)), linewidth=1.4, label="Ceiling (oracle)")
        axes.fill_between(ceiling.index, ceiling, 1.03, color=MUTED, alpha=0.08, linewidth=0)
    axes.plot([0, 1], [0, 1], color=MUTED, linewidth=0.9, linestyle=":", label="Expected by chance")
    shown = [m for m in evidence.methods if m not in ("oracle", "no-pruning")]
    _curves(axes, intervals.table("retention"), shown, evidence.headline)
    axes.set(xlim=(0.06, 1.02), ylim=(0, 1.03))
    budget_axis(axes)
    percent_axis(axes, label="lesion patches kept (%)")
    legend_below(figure, axes)
    return figure


def share_of_ceiling(evidence: Evidence, intervals: Intervals) -> Figure | None:
    """The same as a share of what any selector could have kept."""
    if not evidence.has_masks:
        return None
    figure, axes = new_figure(4.7)
    axes.axhline(1, color=INK, linestyle=(0, (4, 2)), linewidth=1.4, label="Ceiling (oracle)")
    shown = [m for m in evidence.methods if m not in ("oracle", "no-pruning")]
    _curves(axes, intervals.table("retention_of_ceiling"), shown, evidence.headline)
    axes.set(xlim=(0.06, 1.02), ylim=(None, 1.02))
    budget_axis(axes)
    percent_axis(axes, label="share of the possible retention (%)")
    legend_below(figure, axes)
    return figure


def accuracy(evidence: Evidence, intervals: Intervals) -> Figure | None:
    return _classification(evidence, intervals, "accuracy", "accuracy (%)")


def macro_f1(evidence: Evidence, intervals: Intervals) -> Figure | None:
    return _classification(evidence, intervals, "macro_f1", "macro F1 (%)")


def _classification(evidence: Evidence, intervals: Intervals, metric: str, label: str) -> Figure | None:
    table = intervals.table(metric)
    if table["value"].isna().all():
        return None
    figure, axes = new_figure(4.9)
    _curves(axes, table, evidence.methods, evidence.headline)
    axes.set_xlim(0.06, 1.02)
    budget_axis(axes)
    percent_axis(axes, label=label)
    legend_below(figure, axes)
    return figure


def accuracy_against_retention(evidence: Evidence, intervals: Intervals) -> Figure | None:
    """One point a method at the headline budget: accuracy does not tell who kept the lesion."""
    kept, right = (intervals.at(metric, evidence.headline) for metric in ("retention", "accuracy"))
    both = kept.join(right, lsuffix="_x", rsuffix="_y", how="inner").dropna(subset=["value_x", "value_y"])
    both = both[[m != "no-pruning" for m in both.index]]
    if len(both) < 2:
        return None
    figure, axes = new_figure(4.3)
    axes.grid(True, axis="x")
    for method, row in both.iterrows():
        style = look(str(method))
        axes.plot([row.low_x, row.high_x], [row.value_y] * 2, color=style.color, alpha=0.35, linewidth=1.2)
        axes.plot([row.value_x] * 2, [row.low_y, row.high_y], color=style.color, alpha=0.35, linewidth=1.2)
        axes.plot(row.value_x, row.value_y, marker=style.marker, color=style.color, markersize=8, linestyle="", markeredgewidth=1.8)
    low, high = both["value_x"].min(), both["value_x"].max()
    span = max(high - low, 0.05)
    axes.set_xlim(low - 0.2 * span, high + 0.42 * span)
    _point_labels(axes, both, span)
    percent_axis(axes, "x", f"lesion patches kept at budget {evidence.headline:g} (%)")
    percent_axis(axes, "y", "accuracy (%)")
    return figure


def _point_labels(axes: Axes, points: pd.DataFrame, span: float) -> None:
    """A name beside each point, moved up where two would cover each other."""
    bottom, top = axes.get_ylim()
    step = (top - bottom) * 0.055
    placed: list[tuple[float, float]] = []
    for method, row in points.sort_values("value_y").iterrows():
        x, y = row.value_x + 0.03 * span, row.value_y
        while any(abs(x - px) < 0.36 * span and abs(y - py) < step for px, py in placed):
            y += step / 3
        placed.append((x, y))
        axes.text(x, y, look(str(method)).name, color=look(str(method)).color, va="center", fontsize=10.5, fontweight="bold")


def ceiling_of(results: pd.DataFrame) -> pd.Series | None:
    """The ceiling over the budget; a method that ignores the budget (NoPruning) has another one and is left out."""
    rows = results[(results["method"] != "no-pruning") & results["ceiling"].notna()]
    return None if rows.empty else rows.groupby("budget")["ceiling"].mean()


def _curves(axes: Axes, table: pd.DataFrame, methods: list[str], headline: float) -> None:
    """A line and a band a method; the legend is in the order of the values at the headline budget and shows them."""
    at = table[np.isclose(table["budget"], headline)].set_index("method")["value"]
    measured = [m for m in methods if table.loc[table["method"] == m, "value"].notna().any()]
    for method in sorted(measured, key=lambda m: -np.nan_to_num(at.get(m, np.nan), nan=-1)):
        rows = table[table["method"] == method].sort_values("budget")
        style = look(method)
        value = at.get(method, np.nan)
        label = style.name if np.isnan(value) else f"{style.name} {100 * value:.1f}"
        layer = 4 if method == "lats" else 3 if style.strong else 2
        axes.plot(
            rows["budget"],
            rows["value"],
            color=style.color,
            marker=style.marker or None,
            linestyle=style.line,
            linewidth=2.6 if method == "lats" else 1.8 if style.strong else 1.2,
            markersize=6 if method == "lats" else 4.5,
            label=label,
            zorder=layer,
        )
        if style.strong and rows["low"].notna().any():
            axes.fill_between(rows["budget"], rows["low"], rows["high"], color=style.color, alpha=0.13, linewidth=0, zorder=1)
