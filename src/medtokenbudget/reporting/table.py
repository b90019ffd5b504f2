"""One table in four formats, so that they never disagree: CSV with the raw numbers, Markdown, LaTeX (booktabs) and, by the
template of the page, HTML."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from medtokenbudget.escaping import csv_frame, markdown_text
from medtokenbudget.files import write_text
from medtokenbudget.measures import is_missing
from medtokenbudget.model.looks import is_reference

_MOST_BOLD = 2
"""A value that more methods than this share is not marked as the best."""
_COMMANDS = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
_COMMANDS |= {"<": r"\textless{}", ">": r"\textgreater{}", "|": r"\textbar{}"}
_SYMBOLS = {"−": "-", "±": r"\pm", "×": r"\times", "≤": r"\leq", "≥": r"\geq", "Δ": r"\Delta", "β": r"\beta", "σ": r"\sigma"}
_LATEX: dict[str, str | int | None] = {
    **{character: f"\\{character}" for character in "&%$#_{}"},
    **_COMMANDS,
    **{character: f"${command}$" for character, command in _SYMBOLS.items()},
    **{"·": r"$\cdot$", "—": "---", "–": "--", "“": "``", "”": "''"},
}


@dataclass(frozen=True)
class Table:
    """Rows of text under columns, together with the raw numbers behind them.

    The first `labels` columns name the row, the others hold numbers. `data` is written to CSV and may include what the page leaves
    out, which `more` says. `bold` has (row, column) of the best values, `breaks` the rows with a rule above them, `section` is the
    id of the section of the page that shows the table.
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
    section: str = ""

    def write(self, folder: Path) -> None:
        csv = csv_frame(self.data).to_csv(index=False, float_format="%.6g", lineterminator="\n")
        write_text(folder / f"{self.name}.csv", csv)
        write_text(folder / f"{self.name}.md", self.markdown())
        write_text(folder / f"{self.name}.tex", self.latex())

    def markdown(self) -> str:
        rule = ["---" if c < self.labels else "---:" for c in range(len(self.columns))]
        lines = [self.columns, rule]
        lines += [[f"**{cell}**" if (r, c) in self.bold else cell for c, cell in enumerate(row)] for r, row in enumerate(self.rows)]
        body = [f"| {' | '.join(map(markdown_text, line))} |" for line in lines]
        return "\n".join(
            [f"**{markdown_text(self.title)}**", "", *body, *(["", markdown_text(self.note)] if self.note else []), ""]
        )

    def latex(self) -> str:
        body: list[str | list[str]] = []
        for r, row in enumerate(self.rows):
            body += [r"\midrule"] if r in self.breaks else []
            body.append(
                [rf"\textbf{{{latex_text(cell)}}}" if (r, c) in self.bold else latex_text(cell) for c, cell in enumerate(row)]
            )
        lines = [[latex_text(column) for column in self.columns], r"\midrule", *body]
        title = self.title if self.title.endswith((".", "?", "!")) else f"{self.title}."
        layout = "l" * self.labels + "r" * (len(self.columns) - self.labels)
        return "\n".join(
            [
                "% needs \\usepackage{booktabs}",
                r"\begin{table}[tbp]",
                r"\centering",
                rf"\begin{{tabular}}{{{layout}}}",
                r"\toprule",
                *(line if isinstance(line, str) else rf"{' & '.join(line)} \\" for line in lines),
                r"\bottomrule",
                r"\end{tabular}",
                rf"\caption{{{latex_text(f'{title} {self.note}'.strip())}}}",
                rf"\label{{tab:{self.name}}}",
                r"\end{table}",
                "",
            ]
        )


def latex_text(text: str) -> str:
    """Escape everything that LaTeX would read as a command."""
    return text.translate(str.maketrans(_LATEX))


def best(methods: Sequence[str], values: Sequence[Sequence[float]], labels: int = 1) -> frozenset[tuple[int, int]]:
    """Find (row, column) of the largest value in each column as printed, ties included; references do not compete.

    The numbers of a row begin behind its `labels`.
    """
    cells: set[tuple[int, int]] = set()
    for column, numbers in enumerate(zip(*values), labels):
        candidates = {
            # As printed, with one digit of a percentage: what reads equal is equally good.
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
    """Find the rows whose key differs from that of the row above: a rule goes above them."""
    return frozenset(i for i in range(1, len(keys)) if keys[i] != keys[i - 1])
