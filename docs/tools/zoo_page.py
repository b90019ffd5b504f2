"""The page of every selector and head: `python docs/tools/zoo_page.py [NAME=RUN ...]`, a name for each backbone.

With run directories it first collects `docs/results/zoo.csv` from their predictions, and `zoo-heads.csv` from those that are named
`heads`; a file that no run is given for stays as it is. Without, it only writes `zoo.md` and its figure again from the CSV; a test
does the same and compares.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from results_tables import RESULTS, number, read, render, table, write_figure, write_page
from zoo_rows import BUDGET, collected

from medtokenbudget.model.looks import is_reference, look
from medtokenbudget.reporting.style import legend_below, percent_axis
from medtokenbudget.routing import selector_class
from medtokenbudget.runs.method import Method
from medtokenbudget.runs.studies import zoo

GROUPS = {
    "Controls": "#7a828a",
    "Kept, untrained": "#2a7f7f",
    "Merged, untrained": "#2a7f7f",
    "Learned, masks": "#0072b2",
    "Learned, no masks": "#d55e00",
}
"""Groups of the table and their colors in the figure."""
CONTROLS = ("oracle", "box-prior", "center", "darkness", "random", "no-pruning")
NAMED = ("lats:lesion-first", "center", "oracle", "darkness", "random", "class-attention", "lats")
"""Methods that the figure shows with their own color and marker; the others have those of their group."""
BACKBONES = {"embedded": "the embedded backbone", "vit-small": "the ViT-S/14"}
COLUMNS = ("method", "kept", "kept, off", "accuracy", "F1", "balanced", "balanced, off", "size", "ms")


def group_of(method: Method) -> str:
    if method.selector in CONTROLS:
        return "Controls"
    kind = selector_class(method.selector)
    if kind.learns:
        return "Learned, no masks" if method.variant == "mask-free" else "Learned, masks"
    return "Merged, untrained" if kind.kind == "merger" else "Kept, untrained"


def with_interval(row: Any, metric: str) -> str:
    """The value and half the width of its interval."""
    half = (row[f"{metric}_high"] - row[f"{metric}_low"]) / 2
    return f"{number(row[metric])}±{number(half)}"


def kept(row: Any) -> str:
    """Share of the ceiling; for mergers, in italics, the lesion in tokens of its own, for mixtures the attention on the lesion."""
    if row is None or pd.notna(row["retention_of_ceiling"]):
        return off_center(row, "retention_of_ceiling")
    return f"*{number(row['lesion_dominated'] if pd.notna(row['lesion_dominated']) else row['lesion_mass'])}*"


def off_center(row: Any, metric: str) -> str:
    """A number of a row that may be missing."""
    return "–" if row is None else number(row[metric])


def views(at: pd.DataFrame, method: str) -> tuple[Any, Any]:
    """The rows of a method for the images as they are and off-center, None where there is none."""
    rows = {row["view"]: row for _, row in at[at["method"] == method].iterrows()}
    return rows.get("as-is"), rows.get("off-center")


def methods_table(frame: pd.DataFrame) -> str:
    """One backbone at budget 0.3, by group; what keeps the most comes first."""
    at = frame[frame["budget"].round(6) == BUDGET]
    grouped: dict[str, list[str]] = {name: [] for name in GROUPS}
    for text in dict.fromkeys(at["method"]):
        grouped[group_of(Method.parse(text))].append(text)
    lines: list[list[str]] = []
    for name, methods in grouped.items():
        if methods:
            lines.append([f"**{name.replace(' ', '&nbsp;')}**", *[""] * (len(COLUMNS) - 1)])
        found = {text: views(at, text) for text in methods}
        for text in sorted(methods, key=lambda text: -float(kept(found[text][0]).strip("*–") or 0)):
            here, off = found[text]
            spread = f" ({number(here['macro_f1_spread'])})" if here["seeds"] > 1 else ""
            line = [look(text).title, kept(here), kept(off), with_interval(here, "accuracy")]
            line += [number(here["macro_f1"]) + spread, with_interval(here, "balanced_accuracy")]
            line += [off_center(off, "balanced_accuracy"), f"{here['parameters'] / 1000:.0f}k", f"{here['ms']:.2f}"]
            lines.append(line)
    return table(lines, COLUMNS)


def heads_table(frame: pd.DataFrame) -> str:
    """Balanced accuracy of every selector behind every head, images as they are / off-center."""
    at = frame[frame["budget"].round(6) == BUDGET]
    methods = [Method.parse(text) for text in dict.fromkeys(at["method"])]
    heads = list(dict.fromkeys(method.head for method in methods))
    rows: dict[str, dict[str, str]] = {}
    for method in methods:
        here, off = views(at, str(method))
        name = look(str(Method(method.selector, variant=method.variant))).title
        both = f"{number(here['balanced_accuracy'])} / {off_center(off, 'balanced_accuracy')}"
        rows.setdefault(name, {})[method.head] = both
    return table([[name, *[cells.get(head, "–") for head in heads]] for name, cells in rows.items()], ["selector", *heads])


def draw(frame: pd.DataFrame) -> Figure:
    """Macro F1 over the share of the ceiling, as they are and off-center, a color for each group."""
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(2, 1, figsize=(4.9, 7.6), sharex=True, sharey=True)
    at = frame[frame["budget"].round(6) == BUDGET]
    for axes, view, title in zip(panels, ("as-is", "off-center"), ("images as they are", "off-center crops"), strict=True):
        rows = at[(at["view"] == view) & at["retention_of_ceiling"].notna() & (at["method"] != "no-pruning")]
        _scatter(axes, rows)
        axes.set_title(title)
        axes.grid(True, axis="x")
        percent_axis(axes, "y", "macro F1 (%)")
    percent_axis(panels[1], "x", "share of the ceiling (%)")
    legend_below(figure, panels[0])
    return figure


def _scatter(axes: Axes, rows: pd.DataFrame) -> None:
    for name, color in GROUPS.items():
        own = rows[[group_of(Method.parse(text)) == name and text not in NAMED for text in rows["method"]]]
        if len(own):
            axes.plot(own["retention_of_ceiling"], own["macro_f1"], ".", color=color, markersize=9, alpha=0.75, label=name)
    for method in NAMED:
        row, style = rows[rows["method"] == method], look(method)
        points = {"marker": style.marker, "color": style.color, "markersize": 9, "markeredgewidth": 2}
        axes.plot(row["retention_of_ceiling"], row["macro_f1"], linestyle="", label=style.title, **points)
    axes.margins(0.08)


def page() -> str:
    """Return `zoo.md`, from the CSV files next to it."""
    frame, heads = read("zoo"), read("zoo-heads")
    tables = {name: frame[frame["backbone"] == name] for name in dict.fromkeys(frame["backbone"])}
    shown = {name.replace("-", "_"): methods_table(rows) for name, rows in tables.items()}
    values = {"heads": heads_table(heads), "seeds": seeds(frame), "trainings": len(zoo().units())}
    return render("zoo", partial(value, {**tables, "heads": heads}), **shown, **values)


def value(tables: dict[str, pd.DataFrame], name: str, method: str, view: str, metric: str) -> str:
    """A number of the text, `[backbone|method|view|metric]` at budget 0.3; the metric `kept` is that of the table."""
    at = tables[name][(tables[name]["budget"].round(6) == BUDGET) & (tables[name]["view"] == view)]
    if method == "rankers":
        return ranked(at, metric)
    if method in ("learned", "untrained"):
        return widest(at, method == "learned", metric)
    row = at[at["method"] == method].iloc[0]
    if metric == "epochs":
        return in_words(row["epochs"].split())
    return kept(row).strip("*") if metric == "kept" else number(row[metric])


def ranked(at: pd.DataFrame, metric: str) -> str:
    """Methods that keep patches, without references: their number, or the rank correlation of a metric with what is kept."""
    rows = at[at["retention_of_ceiling"].notna() & ~at["method"].map(is_reference)]
    if metric == "count":
        return str(len(rows))
    return f"{rows['retention_of_ceiling'].rank().corr(rows[metric].rank()):.2f}".replace("-", "−")


def widest(at: pd.DataFrame, learned: bool, metric: str) -> str:
    """The largest deviation between seeds among methods that learn, or that do not, and whose it is."""
    rows = at[[Method.parse(text).learned == learned for text in at["method"]]]
    row = rows.loc[rows[metric].idxmax()]
    return f"{number(row[metric])} points ({look(row['method']).title})"


def seeds(frame: pd.DataFrame) -> str:
    """How many seeds the rows of each backbone have, with the exceptions by name."""
    parts = []
    for backbone, rows in frame.groupby("backbone", sort=False):
        counts = rows.groupby("method", sort=False)["seeds"].first()
        usual = int(counts.mode().iloc[0])
        others = [f"{look(method).title} ({count})" for method, count in counts.items() if count != usual]
        but = f" but {in_words(others)}" if others else ""
        parts.append(f"{usual} for each row of {BACKBONES[backbone]}{but}")
    return "; ".join(parts)


def in_words(words: list[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def main(runs: list[str]) -> None:
    named: dict[str, list[Path]] = {}
    for run in runs:
        name, _, path = run.partition("=")
        named.setdefault(name, []).append(Path(path))
    first = ["backbone", "method", "view", "budget", "seeds"]
    for file, names in (
        ("zoo", [name for name in named if name != "heads"]),
        ("zoo-heads", [name for name in named if name == "heads"]),
    ):
        if names:
            frame = pd.concat([collected(named[name], "embedded" if name == "heads" else name) for name in names])
            columns = [*first, *(name for name in frame.columns if name not in first)]
            frame[columns].to_csv(RESULTS / f"{file}.csv", index=False, float_format="%.5g")
    write_page("zoo", page())
    write_figure("zoo", lambda: draw(read("zoo").query("backbone == 'embedded'")))


if __name__ == "__main__":
    main(sys.argv[1:])
