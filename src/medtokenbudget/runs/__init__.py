"""Runs: methods trained and evaluated in a sweep, the paper's studies, statistics, and the evaluation of saved models."""

from medtokenbudget.jobs import Execution
from medtokenbudget.runs.method import Method
from medtokenbudget.runs.run import RunInfo
from medtokenbudget.runs.studies import STUDIES, reproduce
from medtokenbudget.runs.sweep import Study, sweep

__all__ = ["STUDIES", "Execution", "Method", "RunInfo", "Study", "reproduce", "sweep"]
