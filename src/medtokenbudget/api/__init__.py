"""The verbs of the Python package, which combine several rooms: extract, train, sweep, reproduce, report, route, predict, demo."""

from __future__ import annotations

from medtokenbudget.api.calibrate import calibrate
from medtokenbudget.api.evaluate import evaluate
from medtokenbudget.api.route import route
from medtokenbudget.api.run import Run
from medtokenbudget.api.tour import demo
from medtokenbudget.api.verbs import extract, report, reproduce, sweep, train

__all__ = ["Run", "calibrate", "demo", "evaluate", "extract", "report", "reproduce", "route", "sweep", "train"]
