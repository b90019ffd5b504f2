"""Runs: methods trained and evaluated in a sweep, the paper's studies, statistics, and the evaluation of saved models."""

from medtokenbudget.jobs import Execution
from medtokenbudget.runs.method import Method
from medtokenbudget.runs.run import Run
from medtokenbudget.runs.studies import STUDIES, Study

__all__ = ["STUDIES", "Execution", "Method", "Run", "Study"]
