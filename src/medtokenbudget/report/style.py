"""How every figure looks, and the fixed name, colour and marker of every method.

Its own file so that a method never changes its colour between two figures. Colours are told apart with any common kind of
colour vision (after Okabe and Ito), and markers tell them apart without colour. Same figure, same bytes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

from medtokenbudget.files import atomic_write

INK = "#1c2733"
MUTED = "#5b6773"
GRID = "#dfe4e8"
PAPER = "#ffffff"
KEPT = "#0072b2"
LOST = "#d55e00"
BACKGROUND = "#8d99a6"
WIDTH = 4.9
"""Inches; figures are drawn for a phone (one column of about 350 pixels), so that their text stays readable there."""

_RC: dict[Any, Any] = {
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 11,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlepad": 10,
    "axes.labelsize": 11,
    "axes.labelcolor": INK,
    "axes.edgecolor": MUTED,
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "text.color": INK,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "xtick.labelsize": 10.5,
    "ytick.labelsize": 10.5,
    "ytick.major.size": 0,
    "lines.linewidth": 1.6,
    "lines.markersize": 5,
    "legend.frameon": False,
    "legend.fontsize": 10.5,
    "figure.facecolor": PAPER,
    "axes.facecolor": PAPER,
    "figure.constrained_layout.use": True,
    "svg.fonttype": "none",
    "svg.hashsalt": "medtokenbudget",
    "savefig.dpi": 160,
    "path.simplify": True,
}


@dataclass(frozen=True)
class Look:
    """Name, colour, marker, line and weight of one method in figures, and what it does in one sentence."""

    name: str
    color: str
    marker: str
    line: str | tuple[int, tuple[int, int]]
    about: str
    strong: bool = False


LOOKS: dict[str, Look] = {
    "lats": Look("LATS", "#0072b2", "o", "-", "A small network, trained on lesion masks, scores every patch; the best stay.", True),
    "oracle": Look("Oracle", INK, "_", (0, (4, 2)), "Keeps the true lesion patches first: the ceiling. Needs the mask."),
    "center": Look("Center", "#d55e00", "s", "-", "Keeps the patches nearest the image center. No model, looks at nothing.", True),
    "darkness": Look("Darkness", "#a8577e", "D", "-", "Keeps the darkest patches. No model.", True),
    "random": Look("Random", "#7a828a", "x", "--", "Keeps patches drawn at random.", True),
    "no-pruning": Look("NoPruning", "#3d4a57", "", "-.", "Keeps all patches: the reference without a budget."),
    "tome": Look("ToMe", "#3a9bd0", "P", "-", "Merges similar patches instead of dropping any; no patch survives as it was."),
    "norm": Look("NormBased", "#c98a00", "^", "-", "Keeps the patches with the largest feature norm."),
    "attention-entropy": Look("AttnEntropy", "#009e73", "v", "-", "Keeps the patches whose attention is most focused."),
    "local-contrast": Look("LocalContrast", "#8c8000", "<", "-", "Keeps the patches that differ most from their neighbors."),
}  # fmt: skip
_VARIANTS: dict[str, Look] = {
    "mask-free": Look("LATS mask-free", "#6a51a3", "h", "--", "LATS trained without any lesion mask."),
    "fixed-0.5": Look("LATS fixed 0.5", "#6a51a3", "p", "--", "LATS trained at the constant budget 0.5 instead of the curriculum."),
    "no-attention": Look("LATS − attention", "#009e73", "v", ":", "LATS with its attention signal switched off at inference."),
    "no-norm": Look("LATS − norm", "#c98a00", "^", ":", "LATS with its norm signal switched off at inference."),
    "no-contrast": Look("LATS − contrast", "#8c8000", "<", ":", "LATS with its contrast signal switched off at inference."),
    "no-signals": Look("LATS − all signals", "#a8577e", "X", ":", "LATS with all three signals switched off at inference."),
    "with-views": Look("LATS + views", "#17558c", "*", "--", "LATS trained with further views of the images (off-center crops)."),
    "paper": Look("LATS (paper)", "#3a9bd0", "8", "--", "LATS trained by the paper's own recipe."),
    "lesion-first": Look(
        "LATS lesion-first", "#17558c", "H", "--", "LATS whose scorer learns the lesion first, then the head.", True
    ),
}
_ADDED = {
    "epoch-matched": ("epoch-matched", "its head trained for as many epochs as LATS"),
    "matched": ("matched", "its head trained exactly as that of LATS lesion-first"),
}
_TAKEN_BACK = {
    "without-views": ("without views", "trained on the images as they are alone"),
    "one-view": ("with one crop", "trained with one off-center crop of each image instead of all"),
    "raster": ("with 1D contrast", "with the paper's local contrast along the raster"),
    "zero-padding": ("with zero padding", "with the paper's zero-padded smoothing"),
    "all-patches": ("with all patches", "each step learns from all patches of an image instead of a sample"),
    "balanced": ("with class weights", "its head trained with a loss that weights rare classes more"),
    "joint": ("trained jointly", "scorer and head trained together, with the classification gradient in the scorer"),
}
"""What the recipe study changes of the lesion-first preset, one part at a time."""
_SPARE = ("#6a51a3", "#b5495b", "#2a7f7f", "#94651f", "#4f6d2f", "#5a5a9c")


def look(method: str) -> Look:
    """The look of a method; one that is not known gets a colour of its own from its name, always the same."""
    if method in LOOKS:
        return LOOKS[method]
    base, _, variant = method.partition(":")
    if base == "lats" and variant in _VARIANTS:
        return _VARIANTS[variant]
    part = variant.partition("lesion-first-")[2]
    if base == "lats" and part in _TAKEN_BACK:
        of, (name, about) = _VARIANTS["lesion-first"], _TAKEN_BACK[part]
        return Look(f"lesion-first {name}", of.color, of.marker, ":", f"{of.name}, {about}.")
    if base in LOOKS and variant in _ADDED:
        of, (name, about) = LOOKS[base], _ADDED[variant]
        return Look(f"{of.name} {name}", of.color, of.marker, ":", f"{of.name}, {about}.")
    spare = _SPARE[sum(method.encode()) % len(_SPARE)]
    return Look(method, spare, "d", "--", "A method of this run without a description here.")


def ordered(methods: Iterable[str]) -> list[str]:
    """Methods in the order of every table: LATS and its variants, the paper's baselines, then the controls."""
    first = ["lats", "no-pruning", "random", "norm", "tome", "attention-entropy", "local-contrast", "center", "darkness", "oracle"]
    known = list(dict.fromkeys(methods))
    variants = sorted(m for m in known if m.startswith("lats:"))
    others = sorted(m for m in known if m not in first and m not in variants)
    ranked = [*first[:1], *variants, *first[1:7], *others, *first[7:]]
    return [m for m in ranked if m in known]


@contextmanager
def house_style() -> Iterator[None]:
    """Matplotlib with the settings of this file, and as it was before afterwards."""
    with matplotlib.rc_context({**matplotlib.rcParamsDefault, "backend": "Agg", **_RC}):
        yield


def new_figure(height: float = 3.9, width: float = WIDTH, **kwargs: object) -> tuple[Figure, Axes]:
    """One figure with one pair of axes."""
    figure, axes = plt.subplots(figsize=(width, height), **kwargs)  # type: ignore[call-overload]
    return figure, axes


def percent_axis(axes: Axes, which: str = "y", label: str = "") -> None:
    """Label fractions as percent; the unit stands in the axis label once."""
    from matplotlib.ticker import FuncFormatter

    axis = axes.yaxis if which == "y" else axes.xaxis
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:.0f}"))
    if label:
        axis.set_label_text(label)


def budget_axis(axes: Axes) -> None:
    """The token budget on x."""
    axes.set_xlabel("token budget (share of patches kept)")
    axes.set_xticks([0.1, 0.3, 0.5, 0.7, 0.9])
    axes.tick_params(axis="x", length=3)


def legend_below(figure: Figure, axes: Axes, columns: int = 2) -> None:
    """The legend under the axes, so that the data keep the whole width."""
    handles, labels = axes.get_legend_handles_labels()
    if handles:
        figure.legend(
            handles, labels, loc="outside lower left", ncols=columns, handlelength=2.2, columnspacing=1.2, borderaxespad=0.2
        )


def save(figure: Figure, folder: Path, name: str) -> list[Path]:
    """Write `name.svg` and `name.png`, the same bytes for the same figure, and close it."""
    paths = []
    if isinstance(figure.get_layout_engine(), ConstrainedLayoutEngine):
        figure.draw_without_rendering()
        figure.set_layout_engine("none")  # laid out once, not once a format
    for suffix, metadata in ((".svg", {"Date": None, "Creator": None}), (".png", {"Software": None})):
        path = folder / f"{name}{suffix}"
        with atomic_write(path) as temporary:
            figure.savefig(temporary, format=suffix[1:], metadata=metadata)
        paths.append(path)
    plt.close(figure)
    return paths


def svg_for_page(svg: str, name: str, alt: str) -> str:
    """An SVG file as an element of the page: ids that are unique there, colours that follow the scheme, a text for readers."""
    from html import escape

    body = svg[svg.index("<svg") :]
    body = re.sub(r"<metadata>.*?</metadata>", "", body, flags=re.S)
    body = re.sub(r'\bid="', f'id="{name}-', body)
    body = re.sub(r'href="#', f'href="#{name}-', body)
    body = re.sub(r"url\(#", f"url(#{name}-", body)
    for color, variable in ((INK, "ink"), (MUTED, "muted"), (GRID, "grid"), (PAPER, "paper"), ("#3d4a57", "soft-ink")):
        body = body.replace(color, f"var(--{variable})")
    head = re.compile(r'<svg [^>]*?viewBox="([^"]+)"[^>]*>')
    return head.sub(lambda m: f'<svg viewBox="{m.group(1)}" role="img" aria-label="{escape(alt, quote=True)}">', body, count=1)
