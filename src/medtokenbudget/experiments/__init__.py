"""Studies: the sweep, the paper's tables, metrics and statistics."""

from medtokenbudget.experiments.studies import STUDIES, reproduce
from medtokenbudget.experiments.sweep import Study, sweep

__all__ = ["STUDIES", "Study", "reproduce", "sweep"]
