"""What mkdocs runs while it builds the site: the parts of its pages that the package itself knows."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from medtokenbudget.config import NOTICE, USE_NOTICE
from medtokenbudget.measures import METRICS

sys.path.insert(0, str(Path(__file__).parent))
import cli_reference


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Write the disclaimer into the footer of every page."""
    config.copyright = f"Apache-2.0. {NOTICE} {USE_NOTICE}"
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add `reference/cli.md`."""
    files.append(File.generated(config, "reference/cli.md", content=cli_reference.page()))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Fill in the rows of the metrics of `results.csv`."""
    rows = [f"| `{metric.name}` | {metric.definition} |" for metric in METRICS.values()]
    return markdown.replace("<!-- metrics -->", "\n".join(rows))
