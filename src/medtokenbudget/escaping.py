"""Names from data sets (classes, files, data sets) made harmless where they are shown: spreadsheet cells, Markdown, templates."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

if TYPE_CHECKING:
    import jinja2

_FORMULA = ("=", "+", "-", "@", "\t", "\r")


def csv_cell(value: Any) -> Any:
    """Return a text that a spreadsheet would run as a formula with an apostrophe before it, and everything else unchanged.

    Example:
        >>> csv_cell("=1+1"), csv_cell("NV"), csv_cell(-1.5)
        ("'=1+1", 'NV', -1.5)
    """
    return f"'{value}" if isinstance(value, str) and value.startswith(_FORMULA) else value


def from_csv_cell(value: Any) -> Any:
    """Return what `csv_cell` was given."""
    return value[1:] if isinstance(value, str) and value.startswith(tuple(f"'{start}" for start in _FORMULA)) else value


def csv_frame(frame: pd.DataFrame) -> pd.DataFrame:
    """Return a table whose texts and headings are harmless in a spreadsheet."""
    safe = frame.rename(columns=csv_cell)
    for position, kind in enumerate(frame.dtypes):
        if not pd.api.types.is_numeric_dtype(kind):
            safe.isetitem(position, frame.iloc[:, position].map(csv_cell).to_list())
    return safe


def markdown_text(text: str) -> str:
    """Return a text without HTML, links, line breaks and table cells in Markdown.

    Example:
        >>> markdown_text("<b>x</b> [y](z)")
        '&lt;b>x&lt;/b> [y]\\\\(z)'
    """
    # `&` first: it is part of what the others become.
    for special, harmless in (("&", "&amp;"), ("<", "&lt;"), ("](", "]\\("), ("|", "\\|"), ("\r", " "), ("\n", " ")):
        text = text.replace(special, harmless)
    return text


def template(file: Path, **filters: Any) -> jinja2.Template:
    """Load a template: every variable is escaped where it is printed, and a missing one is an error."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(file.parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters.update(filters)
    return environment.get_template(file.name)
