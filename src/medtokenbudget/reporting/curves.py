"""Figures over the token budget: retention, share of the ceiling, accuracy, macro F1, and accuracy against retention.

Each function returns a figure, or None when the run has nothing to show in it. Figures that explain these curves are in
`details.py`.
"""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from medtokenbudget.reporting.evidence import Evidence
from medtokenbudget.reporting.intervals import Intervals
from medtokenbudget.reporting.labels import point_labels
from medtokenbudget.reporting.looks import INK, is_reference, look
from medtokenbudget.reporting.style import MUTED, budget_axis, legend_below, new_figure, percent_axis

CEILING = "Ceiling (Oracle)"


def retention(evidence: Evidence, intervals: Intervals) -> Figure | None:
    """Lesion retention over the budget, with the ceiling and the expected value of random selection."""
    if not evidence.n_masked:
        return None
    figure, axes = new_figure(4.9)
    ceiling = ceiling_of(evidence.main)
    if ceiling is not None:
        axes.plot(ceiling.index, ceiling, color=INK, linestyle=(0, (4, 2)), linewidth=1.4, label=CEILING)
        axes.fill_between(ceiling.index, ceiling, 1.03, color=MUTED, alpha=0.08, linewidth=0)
    axes.plot([0, 1], [0, 1], color=MUTED, linewidth=0.9, linestyle=":", label="Expected by chance")
    _curves(axes, evidence, intervals.table("retention"), _competitors(evidence))
    axes.set(ylim=(0, 1.03))
    _limits(axes, evidence)
    percent_axis(axes, label="lesion patches kept (%)")
    legend_below(figure, axes)
    return figure


def share_of_ceiling(evidence: Evidence, intervals: Intervals) -> Figure | None:
    """Retention as a share of what any selector could have kept."""
    if not evidence.n_masked:
        return None
    figure, axes = new_figure(4.7)
    axes.axhline(1, color=INK, linestyle=(0, (4, 2)), linewidth=1.4, label=CEILING)
    _curves(axes, evidence, intervals.table("retention_of_ceiling"), _competitors(evidence))
    axes.set(ylim=(None, 1.02))
    _limits(axes, evidence)
    percent_axis(axes, label="share of the ceiling (%)")
    legend_below(figure, axes)
    return figure


def accuracy(evidence: Evidence, intervals: Intervals) -> Figure | None:
    """Accuracy over the budget."""
    return _classification(evidence, intervals, "accuracy", "accuracy (%)")


def macro_f1(evidence: Evidence, intervals: Intervals) -> Figure | None:
    """Macro F1 over the budget."""
    return _classification(evidence, intervals, "macro_f1", "macro F1 (%)")


def _classification(evidence: Evidence, intervals: Intervals, metric: str, label: str) -> Figure | None:
    table = intervals.table(metric)
    if table["value"].isna().all():
        return None
    figure, axes = new_figure(4.9)
    _curves(axes, evidence, table, evidence.drawn(evidence.methods))
    _limits(axes, evidence)
    percent_axis(axes, label=label)
    legend_below(figure, axes)
    return figure


def _competitors(evidence: Evidence) -> list[str]:
    return [m for m in evidence.drawn(evidence.methods) if not is_reference(m)]


def _limits(axes: Axes, evidence: Evidence) -> None:
    """The measured budgets with some room; the whole range when there are several."""
    low, high = min(evidence.budgets), max(evidence.budgets)
    axes.set_xlim(low - 0.04, high + 0.02) if high > low else axes.set_xlim(low - 0.1, low + 0.1)
    budget_axis(axes, evidence.budgets)


def accuracy_against_retention(evidence: Evidence, intervals: Intervals) -> Figure | None:
    """One point per method at the headline budget: accuracy does not show how much of the lesion was kept."""
    kept, right = (intervals.at(metric, evidence.headline) for metric in ("retention", "accuracy"))
    both = kept.join(right, lsuffix="_x", rsuffix="_y", how="inner").dropna(subset=["value_x", "value_y"])
    both = both.drop(index="no-pruning", errors="ignore")
    both = both.loc[evidence.drawn(both.index)]
    if len(both) < 2:
        return None
    figure, axes = new_figure(4.3)
    axes.grid(True, axis="x")
    for method, row in both.iterrows():
        style = look(str(method))
        axes.plot([row.low_x, row.high_x], [row.value_y] * 2, color=style.color, alpha=0.35, linewidth=1.2)
        axes.plot([row.value_x] * 2, [row.low_y, row.high_y], color=style.color, alpha=0.35, linewidth=1.2)
        axes.plot(row.value_x, row.value_y, marker=style.marker, color=style.color, markersize=8, linestyle="", markeredgewidth=1.8)
    axes.margins(0.12)
    low, high = axes.get_xlim()
    axes.set_xlim(low, high + 0.3 * (high - low))  # room for names on the right
    order = [*evidence.emphasized, *both.index]
    point_labels(axes, {m: (both.loc[m, "value_x"], both.loc[m, "value_y"]) for m in dict.fromkeys(order) if m in both.index})
    percent_axis(axes, "x", f"lesion patches kept at budget {evidence.headline:g} (%)")
    percent_axis(axes, "y", "accuracy (%)")
    return figure


def ceiling_of(results: pd.DataFrame) -> pd.Series | None:
    """The ceiling over the budget; NoPruning ignores the budget, so its ceiling is left out."""
    rows = results[(results["method"] != "no-pruning") & results["ceiling"].notna()]
    return None if rows.empty else rows.groupby("budget")["ceiling"].mean()


def other_n(counts: pd.Series, method: str) -> str:
    """` (n = 155)` for a method that was measured on fewer images than the others, else nothing."""
    n = counts.get(method, np.nan)
    return "" if np.isnan(n) or n == counts.max() else f" (n = {int(n):,})"


def _curves(axes: Axes, evidence: Evidence, table: pd.DataFrame, methods: list[str]) -> None:
    """A line per method and a band for the emphasized ones; the legend is sorted by the values at the headline budget."""
    headline = table[np.isclose(table["budget"], evidence.headline)].set_index("method")
    at = headline["value"]
    drawn = [m for m in methods if table.loc[table["method"] == m, "value"].notna().any()]
    for method in sorted(drawn, key=lambda m: -np.nan_to_num(at.get(m, np.nan), nan=-1)):
        rows = table[table["method"] == method].sort_values("budget")
        style, value = look(method), at.get(method, np.nan)
        first, strong = method == evidence.focus, method in evidence.emphasized
        axes.plot(
            rows["budget"],
            rows["value"],
            color=style.color,
            marker=style.marker or None,
            linestyle=style.line,
            linewidth=2.6 if first else 1.8 if strong else 1.2,
            markersize=6 if first else 4.5,
            label=style.name if np.isnan(value) else f"{style.name} {100 * value:.1f}{other_n(headline['n'], method)}",
            zorder=4 if first else 3 if strong else 2,
        )
        if strong and rows["low"].notna().any():
            axes.fill_between(rows["budget"], rows["low"], rows["high"], color=style.color, alpha=0.13, linewidth=0, zorder=1)
