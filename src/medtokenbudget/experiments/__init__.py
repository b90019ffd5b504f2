"""Studies: the sweep, the paper's tables, metrics and statistics."""

from medtokenbudget.experiments.execution import Execution
from medtokenbudget.experiments.methods import Method
from medtokenbudget.experiments.run import RunInfo
from medtokenbudget.experiments.studies import STUDIES, reproduce
from medtokenbudget.experiments.sweep import Study, sweep

__all__ = ["STUDIES", "Execution", "Method", "RunInfo", "Study", "reproduce", "sweep"]
