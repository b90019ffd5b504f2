"""Studies: the sweep, the paper's tables, metrics and statistics."""

from medtokenbudget.runs.execution import Execution
from medtokenbudget.runs.methods import Method
from medtokenbudget.runs.run import RunInfo
from medtokenbudget.runs.studies import STUDIES, reproduce
from medtokenbudget.runs.sweep import Study, sweep

__all__ = ["STUDIES", "Execution", "Method", "RunInfo", "Study", "reproduce", "sweep"]
