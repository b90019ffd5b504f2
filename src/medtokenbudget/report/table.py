"""One table in all its forms: raw numbers as CSV, and the same table as Markdown, LaTeX (booktabs) and HTML.

Its own file because the forms must never differ in what they say: they are all written from the same `Table`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any

import pandas as pd

from medtokenbudget.files import write_text

NOT_MEASURED = "—"
_TALL = 26
"""More rows than these scroll within their box on the page."""
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
    """Rows of text under columns, with the raw numbers behind them.

    name     file name and anchor
    title    what the table is, in a few words
    note     how to read it, and its n
    columns  headings; the first `labels` of them name the row, the others hold numbers
    rows     one text a column; `NOT_MEASURED` where there is no number
    data     the raw numbers, a row each, as they are written to CSV
    bold     (row, column) of the best value in each column
    breaks   rows above which a rule is drawn
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

    def write(self, folder: Path) -> None:
        """`name.csv`, `name.md` and `name.tex` in `folder`."""
        csv = self.data.to_csv(index=False, float_format="%.6g", lineterminator="\n")
        write_text(folder / f"{self.name}.csv", csv)
        write_text(folder / f"{self.name}.md", self.markdown())
        write_text(folder / f"{self.name}.tex", self.latex())

    def markdown(self) -> str:
        def line(cells: list[str]) -> str:
            return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"

        rule = ["---" if c < self.labels else "---:" for c in range(len(self.columns))]
        body = [
            line([f"**{cell}**" if (r, c) in self.bold else cell for c, cell in enumerate(row)]) for r, row in enumerate(self.rows)
        ]
        parts = [f"**{self.title}**", "", line(self.columns), line(rule), *body]
        return "\n".join([*parts, *(["", self.note] if self.note else [])]) + "\n"

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
        more = f'<p class="more" aria-hidden="true">{len(self.rows)} rows: scroll in this box for the rest</p>' if tall else ""
        note = f'<p class="note">{escape(self.note)}</p>' if self.note else ""
        return (
            f'<figure class="table" id="table-{self.name}">'
            f'<p class="title" aria-hidden="true">{escape(self.title)}</p><div class="scroll{tall}" tabindex="0" role="region" '
            f'aria-label="Table: {escape(self.title, quote=True)}"><table><caption>{escape(self.title)}</caption>'
            f"<thead><tr>{head}</tr></thead><tbody>{''.join(body)}</tbody></table>{more}</div>{note}</figure>"
        )


def latex_text(text: str) -> str:
    """Text with everything that LaTeX would read as a command escaped."""
    return "".join(_LATEX.get(character, character) for character in text)


def _sentence(text: str) -> str:
    return text if text.endswith((".", "?", "!")) else text + "."


def _side(label: bool) -> str:
    return ' class="label"' if label else ""


def percent(value: Any, digits: int = 1) -> str:
    """A fraction as percent without the sign; a dash where it was not measured."""
    return NOT_MEASURED if _missing(value) else f"{100 * float(value):.{digits}f}"


def points(value: Any, digits: int = 1) -> str:
    """A difference of fractions in percentage points, with its sign."""
    return NOT_MEASURED if _missing(value) else _signed(100 * float(value), digits)


def _signed(value: float, digits: int) -> str:
    text = f"{value:+.{digits}f}"
    if float(text) == 0:
        return text[1:]
    return text.replace("-", "−")


def with_interval(value: Any, low: Any, high: Any, digits: int = 1) -> str:
    """`67.4 [65.0, 69.8]`: a percentage with its 95 % interval."""
    text = percent(value, digits)
    if text == NOT_MEASURED or _missing(low) or _missing(high):
        return text
    return f"{text} [{percent(low, digits)}, {percent(high, digits)}]"


def with_deviation(value: Any, deviation: Any, digits: int = 2) -> str:
    """`67.40 ± 0.20`: a mean over seeds with its standard deviation; no deviation is shown for a single seed."""
    text = percent(value, digits)
    return text if text == NOT_MEASURED or _missing(deviation) else f"{text} ± {percent(deviation, digits)}"


def number(value: Any, digits: int = 2) -> str:
    return NOT_MEASURED if _missing(value) else f"{float(value):.{digits}f}"


def probability(value: Any) -> str:
    """A p-value; very small ones as a bound."""
    if _missing(value):
        return NOT_MEASURED
    return "< 0.001" if float(value) < 0.001 else f"{float(value):.3f}"


def _missing(value: Any) -> bool:
    return value is None or pd.isna(value) or not math.isfinite(float(value))


def records(frame: pd.DataFrame) -> list[Any]:
    """The rows of a frame as objects with a field a column."""
    return list(frame.itertuples(index=False))
