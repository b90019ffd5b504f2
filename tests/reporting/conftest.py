"""Simulated runs that several tests of the report share."""

from __future__ import annotations

from pathlib import Path

import pytest

from medtokenbudget.api import report
from medtokenbudget.reporting.intervals import ReportRun
from tests.reporting.fake_run import fake_run


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run directory with every study, and its report."""
    folder = fake_run(tmp_path_factory.mktemp("runs") / "everything")
    report(folder)
    return folder


@pytest.fixture(scope="session")
def read_run(tmp_path_factory: pytest.TempPathFactory) -> ReportRun:
    """A run with the headline study and off-center views, read but without its report."""
    folder = fake_run(tmp_path_factory.mktemp("statistics") / "run", studies=("main", "center-bias"), images=False)
    return ReportRun.read(folder)
