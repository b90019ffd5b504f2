"""`report`: from one finished run to its tables, figures and page, or from several runs to a comparison."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from medtokenbudget.errors import RequestError
from medtokenbudget.files import write_text
from medtokenbudget.locks import exclusive
from medtokenbudget.reporting import comparison_page, comparison_tables, summary_json
from medtokenbudget.reporting.comparison import Comparison
from medtokenbudget.reporting.evidence import Evidence
from medtokenbudget.reporting.examples import gallery
from medtokenbudget.reporting.figures import draw_figures
from medtokenbudget.reporting.intervals import Intervals
from medtokenbudget.reporting.page import page
from medtokenbudget.reporting.tables import make_tables

PAGE = "report.html"


@dataclass(frozen=True)
class Built:
    """What a report wrote: the path of its page, and its headline and comparisons as plain numbers."""

    page: Path
    numbers: dict[str, Any]


def report(
    run: str | os.PathLike[str],
    *others: str | os.PathLike[str],
    out: str | os.PathLike[str] | None = None,
    pictures: bool = True,
) -> Path:
    """Writes `tables/`, `figures/` and `report.html` for a run, or compares several runs.

    Only the files of the runs are read; nothing is trained or evaluated again.

    Args:
        run: A run directory.
        *others: Further run directories to compare with it.
        out: Where to write. Defaults to the run directory; required for a comparison.
        pictures: Whether the page shows and names images of the data set. Without them it can be shared where the images cannot.

    Returns:
        The path of the page.

    Raises:
        RequestError: If a run cannot be read, or several are given without `out`.

    Example:
        >>> report("runs/demo")  # doctest: +SKIP
        PosixPath('runs/demo/report.html')
    """
    return build([run, *others], out, pictures).page


def build(runs: Sequence[str | os.PathLike[str]], out: str | os.PathLike[str] | None = None, pictures: bool = True) -> Built:
    """Like `report`, and also returns the numbers that `mtb report --json` prints."""
    paths = [Path(run) for run in runs]
    if len(paths) == 1:
        return _one(paths[0], Path(out) if out is not None else paths[0], pictures)
    if out is None:
        raise RequestError("A comparison of several runs needs a directory to write to. Add --out DIR.")
    return _several(paths, Path(out))


def _one(run: Path, folder: Path, pictures: bool) -> Built:
    evidence = Evidence.read(run)
    with exclusive(folder):
        return _write(evidence, folder, pictures)


def _write(evidence: Evidence, folder: Path, pictures: bool) -> Built:
    intervals = Intervals(evidence)
    tables = make_tables(evidence, intervals, named=pictures)
    for table in tables:
        table.write(folder / "tables")
    shown = gallery(evidence) if pictures else None
    if not pictures:
        evidence.missing.append(
            "Pictures and names of images: left out on request, so that the page can be shared without the data."
        )
    plates = draw_figures(evidence, intervals, shown, folder / "figures")
    write_text(folder / PAGE, page(evidence, intervals, tables, plates, shown))
    return Built(folder / PAGE, summary_json.of_run(evidence, intervals))


def _several(runs: Sequence[Path], folder: Path) -> Built:
    comparison = Comparison.read(runs)
    with exclusive(folder):
        return _write_comparison(comparison, folder)


def _write_comparison(comparison: Comparison, folder: Path) -> Built:
    tables = comparison_tables.make_tables(comparison)
    for table in tables:
        table.write(folder / "tables")
    plates = comparison_page.draw_figures(comparison, folder / "figures")
    write_text(folder / PAGE, comparison_page.page(comparison, tables, plates))
    return Built(folder / PAGE, summary_json.of_comparison(comparison))
