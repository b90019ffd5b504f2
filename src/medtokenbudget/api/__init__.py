"""The verbs of the Python package, which combine several rooms: extract, train, sweep, reproduce, report, predict files, demo."""

from __future__ import annotations

from medtokenbudget.api.run import Run
from medtokenbudget.api.tour import demo
from medtokenbudget.api.verbs import extract, report, reproduce, sweep, train

__all__ = ["Run", "demo", "extract", "report", "reproduce", "sweep", "train"]
