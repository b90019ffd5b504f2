"""One table in four formats: raw numbers as CSV, and the same cells as Markdown, LaTeX (booktabs) and HTML.

All formats are written from the same `Table`, so that they never disagree.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any

import pandas as pd

from medtokenbudget.escaping import csv_frame, markdown_text
from medtokenbudget.files import write_text

_TALL = 26
"""Tables with more rows than this scroll inside their box on the page."""
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

    def html(self) -> str:
        head = "".join(f'<th scope="col"{_side(c < self.labels)}>{escape(text)}</th>' for c, text in enumerate(self.columns))
        body = []
        for r, row in enumerate(self.rows):
            cells = []
            for c, text in enumerate(row):
                value, bracket, interval = text.partition(" [")
                shown = f"<b>{escape(value)}</b>" if (r, c) in self.bold else escape(value)
                shown += f" <small>[{escape(interval)}</small>" if bracket else ""
                cells.append(f'<th scope="row">{shown}</th>' if c < self.labels else f"<td>{shown}</td>")
            rule = ' class="rule"' if r in self.breaks else ""
            body.append(f"<tr{rule}>{''.join(cells)}</tr>")
        tall = " tall" if len(self.rows) > _TALL else ""
        scroll = f'<p class="more" aria-hidden="true">{len(self.rows)} rows; scroll inside this box</p>' if tall else ""
        note = f'<p class="note">{escape(self.note)} {self._links()}</p>'
        return (
            f'<figure class="table" id="table-{self.name}">'
            f'<p class="title" aria-hidden="true">{escape(self.title)}</p><div class="scroll{tall}" tabindex="0" role="region" '
            f'aria-label="Table: {escape(self.title, quote=True)}"><table><caption>{escape(self.title)}</caption>'
            f"<thead><tr>{head}</tr></thead><tbody>{''.join(body)}</tbody></table>{scroll}</div>{note}</figure>"
        )

    def _links(self) -> str:
        """Links to the files that `write` makes, relative to the page."""
        files = ", ".join(
            f'<a href="tables/{self.name}.{ending}">{name}</a>'
            for ending, name in (("csv", "CSV"), ("md", "Markdown"), ("tex", "LaTeX"))
        )
        what = f"Download {escape(self.more)}" if self.more else "Download"
        return f'<span class="files">{what}: {files}.</span>'


def latex_text(text: str) -> str:
    """Escapes everything that LaTeX would read as a command."""
    return "".join(_LATEX.get(character, character) for character in text)


def _sentence(text: str) -> str:
    return text if text.endswith((".", "?", "!")) else text + "."


def _side(label: bool) -> str:
    return ' class="label"' if label else ""


def records(frame: pd.DataFrame) -> list[Any]:
    """The rows of a frame as objects with one field per column."""
    return list(frame.itertuples(index=False))
