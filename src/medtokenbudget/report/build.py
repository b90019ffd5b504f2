"""`report`: from a finished run to its tables, figures and page. From the files of the run alone; nothing is computed anew."""

from __future__ import annotations

from pathlib import Path

from medtokenbudget.files import write_text
from medtokenbudget.report.evidence import Evidence
from medtokenbudget.report.examples import gallery
from medtokenbudget.report.figures import draw_figures
from medtokenbudget.report.intervals import Intervals
from medtokenbudget.report.page import page
from medtokenbudget.report.tables import make_tables


def report(run: Path | str, pictures: bool = True) -> Path:
    """Write `tables/`, `figures/` and `report.html` into the run directory; gives the path of the page.

    pictures  show images of the data set; without them the page may go where the images may not
    """
    folder = Path(run)
    evidence = Evidence.read(folder)
    intervals = Intervals(evidence)
    tables = make_tables(evidence, intervals)
    for table in tables:
        table.write(folder / "tables")
    shown = gallery(evidence) if pictures else None
    if not pictures:
        evidence.missing.append("Pictures of images: left out on request, so that the page can be shared without the data.")
    plates = draw_figures(evidence, intervals, shown, folder / "figures")
    target = folder / "report.html"
    write_text(target, page(evidence, intervals, tables, plates, shown))
    return target
