"""The style of all figures, and saving them so that equal figures are equal bytes. Methods have the colors of `look`."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import FuncFormatter

from medtokenbudget.files import write_encoded

INK = "#1c2733"
LOST = "#d55e00"
MUTED = "#5b6773"
GRID = "#dfe4e8"
PAPER = "#ffffff"
KEPT = "#0072b2"
BACKGROUND = "#8d99a6"
WIDTH = 4.9
"""Width in inches. Figures are drawn for one column on a phone (about 350 pixels), so that their text stays readable there."""

_COLORS: dict[Any, Any] = {
    **dict.fromkeys(("axes.labelcolor", "text.color", "xtick.labelcolor", "ytick.labelcolor"), INK),
    **dict.fromkeys(("axes.edgecolor", "xtick.color", "ytick.color"), MUTED),
    **dict.fromkeys(("figure.facecolor", "axes.facecolor"), PAPER),
    "grid.color": GRID,
}


@contextmanager
def house_style() -> Iterator[None]:
    """Apply the house style to Matplotlib and restore the previous settings afterwards."""
    with matplotlib.rc_context(_COLORS, Path(__file__).with_name("report.mplstyle")):
        yield


def new_figure(height: float) -> tuple[Figure, Axes]:
    """Create a figure with a single pair of axes."""
    return plt.subplots(figsize=(WIDTH, height))


def percent_axis(axes: Axes, which: str = "y", label: str = "") -> None:
    """Format the ticks of an axis that shows fractions as percent."""
    axis = axes.yaxis if which == "y" else axes.xaxis
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{round(100 * value, 2):g}"))
    if label:
        axis.set_label_text(label)


def budget_axis(axes: Axes, budgets: Sequence[float]) -> None:
    """Label the x axis as the token budget, with ticks at measured budgets."""
    axes.set_xlabel("token budget (share of patches kept)")
    axes.set_xticks([b for b in (0.1, 0.3, 0.5, 0.7, 0.9) if min(budgets) <= b <= max(budgets)] or list(budgets))
    axes.tick_params(axis="x", length=3)


def legend_below(figure: Figure, axes: Axes, columns: int = 2) -> None:
    """Place the legend below the axes, so that the data use the full width."""
    handles, labels = axes.get_legend_handles_labels()
    if handles:
        figure.legend(
            handles, labels, loc="outside lower left", ncols=columns, handlelength=2.2, columnspacing=1.2, borderaxespad=0.2
        )


def save(figure: Figure, folder: Path, name: str) -> list[Path]:
    """Write `name.svg` and `name.png` (equal figures give equal bytes), close the figure and return both paths."""
    paths = []
    if isinstance(figure.get_layout_engine(), ConstrainedLayoutEngine):
        figure.draw_without_rendering()
        figure.set_layout_engine("none")  # lay out once, not once per format
    for suffix, metadata in ((".svg", {"Date": None, "Creator": None}), (".png", {"Software": None})):
        path = folder / f"{name}{suffix}"
        write_encoded(path, partial(figure.savefig, format=suffix[1:], metadata=metadata))
        paths.append(path)
    plt.close(figure)
    return paths


def svg_for_page(svg: str, name: str) -> str:
    """Turn an SVG file into an element of the page: unique ids, and colors that follow light and dark mode."""
    body = svg[svg.index("<svg") :]
    body = re.sub(r"<metadata>.*?</metadata>", "", body, flags=re.S)
    # Unique in its file, but a page has many figures.
    body = re.sub(r'\bid="', f'id="{name}-', body)
    body = re.sub(r'href="#', f'href="#{name}-', body)
    body = re.sub(r"url\(#", f"url(#{name}-", body)
    for color, variable in ((INK, "ink"), (MUTED, "muted"), (GRID, "grid"), (PAPER, "paper"), ("#3d4a57", "soft-ink")):
        body = body.replace(color, f"var(--{variable})")
    return re.sub(r'<svg [^>]*?viewBox="([^"]+)"[^>]*>', r'<svg viewBox="\1" aria-hidden="true">', body, count=1)
