"""What a machine may lack: tests that need it are skipped there, and fail in CI, where it must be; and scripts as modules."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import NoReturn

import pytest


def absent(what: str) -> NoReturn:
    """Skip on a machine that lacks something; in CI that is a failure."""
    if os.environ.get("CI") == "true":
        pytest.fail(f"{what}, but in CI this test must run")
    pytest.skip(what)


def script(path: Path) -> ModuleType:
    """Import a script that is in no package."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module
