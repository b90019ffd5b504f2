"""The HTML shell that the report of one run and the comparison of several share: header, contents, sections, figures.

One self-contained file that works on a phone, on a desktop and on paper, in light and dark mode, without internet access.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from html import escape
from importlib.resources import files

from medtokenbudget import __version__
from medtokenbudget.reporting.style import svg_for_page
from medtokenbudget.reporting.table import Table

NOTICE = "Research software, not a medical device"
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"
"""The page has no script and loads nothing: whatever a name from a data set smuggles in does not run either."""


@dataclass(frozen=True)
class Plate:
    """One figure on the page: file name, heading, caption, alternative text and the SVG."""

    name: str
    title: str
    caption: str
    alt: str
    svg: str

    def html(self) -> str:
        drawing = svg_for_page(self.svg, self.name, self.alt)
        return (
            f'<figure class="plate" id="figure-{self.name}"><h3>{escape(self.title)}</h3>{drawing}'
            f"<figcaption>{text(self.caption)}</figcaption></figure>"
        )


@dataclass
class Section:
    """A section of the page; one without parts is left out, also from the contents."""

    anchor: str
    title: str
    intro: str = ""
    parts: list[str] = field(default_factory=list)

    def html(self) -> str:
        intro = f"<p>{text(self.intro)}</p>" if self.intro else ""
        return f'<section id="{self.anchor}"><h2>{escape(self.title)}</h2>{intro}{"".join(self.parts)}</section>'


class Parts:
    """Tables and figures by name, as HTML; a name without one gives nothing."""

    def __init__(self, tables: Iterable[Table], plates: Iterable[Plate] = ()) -> None:
        self._tables = {table.name: table for table in tables}
        self._plates = {plate.name: plate for plate in plates}

    def tables(self, *names: str) -> list[str]:
        return [self._tables[name].html() for name in names if name in self._tables]

    def plates(self, *names: str) -> list[str]:
        drawn = [self._plates[name].html() for name in names if name in self._plates]
        return [f'<div class="plates">{"".join(drawn)}</div>'] if drawn else []


def document(title: str, lead: str, sections: Sequence[Section]) -> str:
    """The whole HTML file."""
    shown = [section for section in sections if any(section.parts)]
    style = files("medtokenbudget.reporting").joinpath("page.css").read_text(encoding="utf-8")
    links = "".join(f'<li><a href="#{s.anchor}">{escape(s.title)}</a></li>' for s in shown)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)} · MedTokenBudget</title>\n<style>\n{style}</style>\n</head>\n<body>\n"
        f'<header><h1>{escape(title)}</h1><p class="lead">{escape(lead)}</p>'
        f'<p class="notice">{NOTICE}</p><nav aria-label="Contents"><ul>{links}</ul></nav></header>\n<main>\n'
        + "\n".join(section.html() for section in shown)
        + f"\n</main>\n<footer><p>MedTokenBudget {__version__}. {NOTICE}: do not use these results to diagnose or treat "
        "anyone.</p></footer>\n</body>\n</html>\n"
    )


def text(sentence: str) -> str:
    """A sentence as HTML, with `code` between backticks."""
    parts = escape(sentence).replace("n = ", "n&nbsp;=&nbsp;").split("`")
    return "".join(f"<code>{part}</code>" if i % 2 else part for i, part in enumerate(parts))


def bullets(sentences: Iterable[str]) -> str:
    """Sentences as a list; nothing without any."""
    items = "".join(f"<li>{text(sentence)}</li>" for sentence in sentences)
    return f"<ul>{items}</ul>" if items else ""


def terms(entries: Iterable[tuple[str, str]]) -> str:
    """A definition list of HTML fragments."""
    return "<dl>" + "".join(f"<dt>{name}</dt><dd>{what}</dd>" for name, what in entries) + "</dl>"
