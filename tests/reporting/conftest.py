"""One simulated run and its report, made once for all tests of the report."""

from __future__ import annotations

from pathlib import Path

import pytest

from medtokenbudget.reporting import report
from medtokenbudget.reporting.evidence import Evidence
from medtokenbudget.reporting.intervals import Intervals
from tests.reporting.fake_run import fake_run


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run directory with every study, and its report."""
    folder = fake_run(tmp_path_factory.mktemp("runs") / "everything")
    report(folder)
    return folder


@pytest.fixture(scope="session")
def intervals(run: Path) -> Intervals:
    """The statistics of that run."""
    return Intervals(Evidence.read(run))
