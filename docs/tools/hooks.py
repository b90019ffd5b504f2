"""What mkdocs runs while it builds the site: the page of the commands is made from their parsers."""

from __future__ import annotations

import sys
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

sys.path.insert(0, str(Path(__file__).parent))
import cli_reference


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add `reference/cli.md`."""
    files.append(File.generated(config, "reference/cli.md", content=cli_reference.page()))
    return files
