"""What mkdocs runs while it builds the site: the parts of its pages that the package itself knows."""

from __future__ import annotations

import re
from typing import Any

from mkdocs.config.defaults import MkDocsConfig

import medtokenbudget
from medtokenbudget.config import NOTICE, USE_NOTICE


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Write the disclaimer into the footer of every page."""
    config.copyright = f"Apache-2.0. {NOTICE} {USE_NOTICE}"
    return config


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Show the docstring of every public name where a page asks for them, in the order of the page."""
    names = [name for name in re.findall(r"`(\w+)`", markdown) if name in medtokenbudget.__all__]
    return markdown.replace("<!-- docstrings -->", "\n\n".join(f"::: medtokenbudget.{name}" for name in names))


def on_page_content(html: str, **_: Any) -> str:
    """Keep options and names in the text on one line: browsers break after every hyphen, also between `--` and the name."""

    def unbroken(code: re.Match[str]) -> str:
        return re.sub(r"(?<!\S)(?=\S*-)\S{2,30}(?!\S)", r'<span class="unbroken">\g<0></span>', code[0])

    return re.sub(r"(?<=<code>)[^<]+(?=</code>)", unbroken, html)
