"""One table in four formats, and what the tables share: counts, seeds, the best value of a column.

Raw numbers go into the CSV, the same cells into Markdown, LaTeX (booktabs) and, by the template of the page, HTML. All formats are
written from the same `Table`, so that they never disagree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from medtokenbudget.escaping import csv_frame, markdown_text
from medtokenbudget.files import write_text
from medtokenbudget.reporting.looks import is_reference
from medtokenbudget.reporting.text import NOT_MEASURED, is_missing

BOLD_NOTE = "Bold: best value, not counting NoPruning and Oracle."
INTERVAL_NOTE = "Brackets: 95% bootstrap interval over groups of images."
_MOST_BOLD = 2
"""A value that more methods than this share is not marked as the best."""
_LATEX = {
    "\\": r"\textbackslash{}",
    "&": r"\&",
    "%": r"\%",
    "$": r"\$",
    "#": r"\#",
    "_": r"\_",
    "{": r"\{",
    "}": r"\}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    "—": "---",
    "–": "--",
    "−": r"$-$",
    "±": r"$\pm$",
    "×": r"$\times$",
    "≤": r"$\leq$",
    "≥": r"$\geq$",
    "Δ": r"$\Delta$",
    "β": r"$\beta$",
    "σ": r"$\sigma$",
    "·": r"$\cdot$",
    "“": "``",
    "”": "''",
}


@dataclass(frozen=True)
class Table:
    """Rows of text under columns, together with the raw numbers behind them.

    Attributes:
        name: File name and anchor.
        title: What the table shows, in a few words.
        columns: Headings; the first `labels` of them name the row, the others hold numbers.
        rows: One text per column; a dash where nothing was measured.
        data: The raw numbers as written to CSV. They may include rows or columns that the page leaves out.
        note: How to read the table, with its n.
        labels: Number of leading columns that name the row.
        bold: (row, column) of the best value in each column.
        breaks: Rows with a rule above them.
        more: What the CSV contains beyond the table, for example `all 117 tests`; shown with the link to it.
    """

    name: str
    title: str
    columns: list[str]
    rows: list[list[str]]
    data: pd.DataFrame
    note: str = ""
    labels: int = 1
    bold: frozenset[tuple[int, int]] = field(default_factory=frozenset)
    breaks: frozenset[int] = field(default_factory=frozenset)
    more: str = ""

    def write(self, folder: Path) -> None:
        """Writes `name.csv`, `name.md` and `name.tex` into `folder`."""
        csv = csv_frame(self.data).to_csv(index=False, float_format="%.6g", lineterminator="\n")
        write_text(folder / f"{self.name}.csv", csv)
        write_text(folder / f"{self.name}.md", self.markdown())
        write_text(folder / f"{self.name}.tex", self.latex())

    def markdown(self) -> str:
        def line(cells: list[str]) -> str:
            return "| " + " | ".join(markdown_text(cell) for cell in cells) + " |"

        rule = ["---" if c < self.labels else "---:" for c in range(len(self.columns))]
        body = [
            line([f"**{cell}**" if (r, c) in self.bold else cell for c, cell in enumerate(row)]) for r, row in enumerate(self.rows)
        ]
        parts = [f"**{markdown_text(self.title)}**", "", line(self.columns), line(rule), *body]
        return "\n".join([*parts, *(["", markdown_text(self.note)] if self.note else [])]) + "\n"

    def latex(self) -> str:
        def line(cells: list[str]) -> str:
            return " & ".join(cells) + r" \\"

        body = []
        for r, row in enumerate(self.rows):
            if r in self.breaks:
                body.append(r"\midrule")
            texts = [latex_text(cell) for cell in row]
            body.append(line([rf"\textbf{{{cell}}}" if (r, c) in self.bold else cell for c, cell in enumerate(texts)]))
        caption = latex_text(" ".join(filter(None, [_sentence(self.title), self.note])))
        layout = "l" * self.labels + "r" * (len(self.columns) - self.labels)
        return "\n".join(
            [
                "% needs \\usepackage{booktabs}",
                r"\begin{table}[tbp]",
                r"\centering",
                rf"\begin{{tabular}}{{{layout}}}",
                r"\toprule",
                line([latex_text(column) for column in self.columns]),
                r"\midrule",
                *body,
                r"\bottomrule",
                r"\end{tabular}",
                rf"\caption{{{caption}}}",
                rf"\label{{tab:{self.name}}}",
                r"\end{table}",
                "",
            ]
        )


def latex_text(text: str) -> str:
    """Escapes everything that LaTeX would read as a command."""
    return "".join(_LATEX.get(character, character) for character in text)


def _sentence(text: str) -> str:
    return text if text.endswith((".", "?", "!")) else text + "."


def seeds_note(results: pd.DataFrame) -> str:
    """Names the seeds behind a table."""
    seeds = sorted(int(seed) for seed in results["seed"].unique())
    text = ", ".join(map(str, seeds))
    return f"One training run per method (seed {text})." if len(seeds) == 1 else f"Mean over seeds {text}."


def counts(results: pd.DataFrame, method: str) -> str:
    """Writes `400 (155)`: labeled images, and images that retention was measured on."""
    rows = results[results["method"] == method]
    return f"{int(rows['n'].max()):,} ({int(rows['n_masked'].max()):,})" if len(rows) else NOT_MEASURED


def best(methods: Sequence[str], values: Sequence[Sequence[float]], labels: int = 1) -> frozenset[tuple[int, int]]:
    """Finds (row, column) of the largest value in each column as printed, ties included; references do not compete.

    Args:
        methods: The method of each row.
        values: The numbers of each row.
        labels: Number of columns before the numbers.
    """
    cells: set[tuple[int, int]] = set()
    for column, numbers in enumerate(zip(*values), labels):
        candidates = {
            r: round(value, 3)
            for r, (method, value) in enumerate(zip(methods, numbers))
            if not is_reference(method) and not is_missing(value)
        }
        if len(set(candidates.values())) > 1:
            top = max(candidates.values())
            winners = {(r, column) for r, value in candidates.items() if value == top}
            cells |= winners if len(winners) <= _MOST_BOLD else set()
    return frozenset(cells)


def changes(keys: Sequence[Any]) -> frozenset[int]:
    """Finds the rows whose key differs from that of the row above: those with a rule above them."""
    return frozenset(i for i in range(1, len(keys)) if keys[i] != keys[i - 1])


def value_and_interval(table: pd.DataFrame, method: str) -> tuple[float, float, float]:
    """Returns value, low and high of one method in a table of `ReportRun.with_intervals`; NaN where it was not measured."""
    if method not in table.index:
        return (np.nan, np.nan, np.nan)
    row: Any = table.loc[method]
    return float(row["value"]), float(row["low"]), float(row["high"])
