"""Simulated runs that several tests of the report share."""

from __future__ import annotations

from pathlib import Path

import pytest

from medtokenbudget.reporting.build import report
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
def intervals(tmp_path_factory: pytest.TempPathFactory) -> Intervals:
    """The statistics of a run with the headline study and off-center views, without its report."""
    folder = fake_run(tmp_path_factory.mktemp("statistics") / "run", studies=("main", "center-bias"), images=False)
    return Intervals(Evidence.read(folder))
