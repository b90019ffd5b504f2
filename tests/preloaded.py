"""Everything that commands import, for the fork server of `tests.processes`."""

from __future__ import annotations

import importlib
from collections.abc import Iterable

MODULES = ("api", "runs.paper", "model.onnx", "reporting", "data")


def preload(names: Iterable[str] = MODULES) -> None:
    """Import modules of the package."""
    for name in names:
        try:
            importlib.import_module(f"medtokenbudget.{name}")
        except ImportError as error:
            # The fork server ignores an ImportError, and then every command imports everything anew.
            raise RuntimeError(f"tests/preloaded.py cannot import medtokenbudget.{name}: {error}") from error


preload()
