"""What the results pages share: templates of `pages/`, cells of a CSV in docs/results/ as Markdown, where a page comes from.

A page is a template with the words; every number is computed from a CSV that the page links to, so that none is typed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import jinja2
import pandas as pd
from matplotlib.figure import Figure

from medtokenbudget.model.looks import look
from medtokenbudget.reporting.style import house_style, save

RESULTS = Path(__file__).resolve().parents[1] / "results"
BUDGETS = (0.1, 0.3, 0.5)
COMMIT = "f45e29c"
HEADLINE = ("lats:lesion-first", "lats", "center", "darkness", "random", "tome", "no-pruning", "oracle")
METRICS = {
    "accuracy": "accuracy",
    "macro_f1": "macro F1",
    "balanced_accuracy": "balanced accuracy",
    "retention": "retention",
    "retention_of_ceiling": "share of the ceiling",
}
NOTE = "All numbers in percent. What the columns of the CSV mean: [file formats](../reference/formats.md#resultscsv)."


def render(name: str, number_of: Callable[..., str] | None = None, **values: Any) -> str:
    """Fill in a template of `pages/`; `number_of` also answers numbers that it writes as `[table|row|column]`."""
    folder = Path(__file__).parent / "pages"
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(folder), undefined=jinja2.StrictUndefined, trim_blocks=True, keep_trailing_newline=True
    )
    shared = {"read": read, "table": table, "number": number, "mean": mean, "about": about, "facts": facts, "BUDGETS": BUDGETS}
    tables = {"over_budgets": over_budgets, "at_budget": at_budget, "both_views": both_views, "NOTE": NOTE}
    text = environment.get_template(f"{name}.md.j2").render(**shared, **tables, **values)
    if number_of is None:
        return text
    return re.sub(r"\[([\w-]+(?:\|[^\[\]|]+)+)\]", lambda match: number_of(*match[1].split("|")), text)


def write_page(name: str, text: str) -> None:
    """Write a page of docs/results/."""
    (RESULTS / f"{name}.md").write_text(text, encoding="utf-8")
    print(f"docs/results/{name}.md")


def write_figure(name: str, draw: Callable[[], Figure]) -> None:
    """Draw a figure of docs/results/ as SVG."""
    with house_style():
        save(draw(), RESULTS / "figures", name)
    (RESULTS / "figures" / f"{name}.png").unlink()


def read(name: str) -> pd.DataFrame:
    """The CSV of a page."""
    return pd.read_csv(RESULTS / f"{name}.csv")


def table(rows: Sequence[Sequence[str]], head: Sequence[str], text: bool = False) -> str:
    """A Markdown table: text in the first column, numbers in the others, or text in all of them."""
    lines = [head, ["---"] + ["---" if text else "---:"] * (len(head) - 1), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def number(value: float, sign: bool = False) -> str:
    """A share in percent with one digit; a dash where nothing was measured."""
    if pd.isna(value):
        return "–"
    return f"{100 * value:+.1f}".replace("-", "−") if sign else f"{100 * value:.1f}"


def mean(frame: pd.DataFrame, method: str, budget: float, metric: str, view: str = "as-is") -> float:
    """The mean over seeds of one cell of the results, NaN if it is not there."""
    found = frame[(frame["method"] == method) & (frame["budget"].round(6) == budget) & (frame["view"] == view)]
    return float(found[metric].mean())


def smaller_image(ways: Iterable[str]) -> str:
    """The way of the bench that is a dense image of fewer pixels; the bench chooses how many."""
    return next(way for way in ways if way.startswith("dense-") and way.endswith("px"))


def over_budgets(frame: pd.DataFrame, metric: str, budgets: Sequence[float]) -> str:
    """A row per method, a column per budget."""
    methods = list(dict.fromkeys(frame["method"]))
    if metric != "accuracy":  # what keeps everything, or merges, has nothing to show here
        methods = [m for m in methods if m not in ("no-pruning", "tome") and not m.endswith(":matched")]
    rows = [[look(m).title, *(number(mean(frame, m, b, metric)) for b in budgets)] for m in methods]
    return table(rows, ["method", *(f"{b:g}" for b in budgets)])


def at_budget(frame: pd.DataFrame, budget: float, metrics: Sequence[str] = tuple(METRICS)) -> str:
    """A row per method, a column per metric, at one budget."""
    rows = [[look(m).title, *(number(mean(frame, m, budget, x)) for x in metrics)] for m in dict.fromkeys(frame["method"])]
    return table(rows, ["method", *(METRICS[x] for x in metrics)])


def both_views(frame: pd.DataFrame, methods: Sequence[str], budget: float = 0.3) -> str:
    """A row per method; share of the ceiling, macro F1 and balanced accuracy as they are and off-center."""
    metrics, views = ("retention_of_ceiling", "macro_f1", "balanced_accuracy"), ("as-is", "off-center")
    keeps = [m for m in methods if m not in ("no-pruning", "tome") and not m.endswith(":matched")]
    rows = []
    for method in methods:
        cells = [number(mean(frame, method, budget, x, v) if x != metrics[0] or method in keeps else float("nan"))
                 for x in metrics for v in views]  # fmt: skip
        rows.append([look(method).title, *cells])
    return table(rows, ["method", *(f"{METRICS[x]}, {v}" for x in metrics for v in views)])


def about(name: str, frame: pd.DataFrame, study: str) -> str:
    """Data, n, seeds, backbone, command and commit of a page."""
    seeds = " ".join(str(seed) for seed in sorted(set(frame["seed"]))) if "seed" in frame else "42 43 44"
    n = {view: int(part["n"].max()) for view, part in frame.groupby("view")} if "view" in frame else {"as-is": 405}
    images = f"{n['as-is']} validation images with a mask" + (f", {n['off-center']} off-center crops" if "off-center" in n else "")
    return facts(
        data="ISIC 2019, the paper's split restricted to the files at hand; masks by id (ISIC 2018, HAM10000)",
        n=f"1,663 training images; {images}",
        seeds=seeds,
        backbone="a ViT-S/14 that descends from DINOv2 and was fine-tuned for saliency; not the official checkpoint",
        command=f"`mtb reproduce isic.parquet --store tokens --out runs/isic --study {study}` ([all of it](../reproduce.md))",
        commit=f"`{COMMIT}`",
        download=f"[{name}.csv]({name}.csv)",
    )


def facts(**of: str) -> str:
    """Where a page comes from: data, n, seeds, backbone, command, commit, download."""
    return "\n".join(["| | |", "|---|---|", *(f"| {key} | {text} |" for key, text in of.items())])
