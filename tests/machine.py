"""What a machine may lack: tests that need it are skipped there, and fail in CI, where it must be."""

from __future__ import annotations

import os
from typing import NoReturn

import pytest


def absent(what: str) -> NoReturn:
    """Skip on a machine that lacks something; in CI that is a failure."""
    if os.environ.get("CI") == "true":
        pytest.fail(f"{what}, but in CI this test must run")
    pytest.skip(what)
