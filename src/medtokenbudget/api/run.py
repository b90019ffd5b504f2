"""`Run`: a run directory as an object, with its results, its predictions, its model and its report."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path

import pandas as pd

from medtokenbudget.model import MedTokenBudget, load
from medtokenbudget.reporting.build import report
from medtokenbudget.runs.run import RunInfo, headline


class Run:
    """What `mtb.train`, `mtb.sweep` and `mtb.reproduce` leave behind.

    Args:
        path: The run directory.

    Raises:
        RequestError: The directory is not a run, or another version wrote it.

    Example:
        >>> run = mtb.Run("runs/first")
        >>> run.info.main
        'lats:lesion-first'
        >>> sorted(set(run.results["method"]))
        ['center', 'lats:lesion-first', 'random']
        >>> run.model.main
        'lats:lesion-first'
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self.info = RunInfo.read(self.path)

    def __repr__(self) -> str:
        methods = ", ".join(self.info.methods)
        return f"Run({str(self.path)!r}: {methods} on {self.info.dataset}, seeds {', '.join(map(str, self.info.seeds))})"

    def __str__(self) -> str:
        return f"{self!r}\n{headline(self.results)}"

    def _repr_html_(self) -> str:
        columns = ["method", "view", "budget", "accuracy", "macro_f1", "retention", "retention_of_ceiling", "n", "n_masked"]
        html: str = self.results[columns].to_html(index=False, float_format=lambda value: f"{value:.3f}", na_rep="")
        return html

    @cached_property
    def results(self) -> pd.DataFrame:
        """`results.csv`: one row per study, view, method, seed and budget."""
        return self.info.results()

    @cached_property
    def predictions(self) -> pd.DataFrame:
        """`predictions.parquet`: one row per image in each of these cells."""
        return self.info.predictions()[0]

    @cached_property
    def model(self) -> MedTokenBudget:
        """The model of the main method, with the classifiers of the other methods beside it."""
        return load(self.path)

    def report(self, out: Path | str | None = None, pictures: bool = True) -> Path:
        """Write the tables, the figures and `report.html`; see `mtb.report`."""
        return report(self.path, out=out, pictures=pictures)
