"""`build`: from the files of one or more runs to tables, figures and `templates/page.html`, and its numbers as JSON."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from medtokenbudget import __version__
from medtokenbudget.config import NOTICE, USE_NOTICE
from medtokenbudget.data.strata import METHODS
from medtokenbudget.errors import RequestError
from medtokenbudget.files import exclusive, read_json, sha256_file, write_text
from medtokenbudget.measures import GLOSSARY, METRICS, is_missing, shown_in
from medtokenbudget.model.looks import look
from medtokenbudget.reporting import text
from medtokenbudget.reporting.comparison import TEST_COLUMNS, Comparison
from medtokenbudget.reporting.examples import KEPT_TINT, Example, examples, figure, jpeg
from medtokenbudget.reporting.figures import MOST_STRATA, draw_figures, fewer_images, follows_budget, training_of
from medtokenbudget.reporting.intervals import MOST_DRAWN, ReportRun
from medtokenbudget.reporting.style import LOST, house_style, save
from medtokenbudget.reporting.tables import make_tables
from medtokenbudget.runs import paper

PAGE = "report.html"
_PICTURE_KEY = (
    (KEPT_TINT, "lesion, kept"),
    (LOST, "lesion, lost"),
    ("#d9a58f", "skin, kept"),
    ("#e6e6e6", "skin, dropped (faded)"),
)


class Built(NamedTuple):
    """What a report wrote: the path of its page, and its headline and comparisons as plain numbers."""

    page: Path
    numbers: dict[str, Any]


def build(
    runs: Sequence[str | os.PathLike[str]],
    out: str | os.PathLike[str] | None = None,
    pictures: bool = True,
    by: Sequence[str] = (),
) -> Built:
    """Write `tables/`, `figures/` and `report.html` for a run, or compare several runs.

    Only the files of the runs are read; nothing is trained or evaluated again. Without `pictures` the page neither shows nor names
    images of the data set, so it can be shared where the images cannot. `by` are columns of the manifest that the report of one run
    is also shown by.
    """
    if len(runs) > 1 and by:
        raise RequestError("`by` shows one run by columns of its manifest. Report the runs one by one.")
    if len(runs) > 1 and out is None:
        raise RequestError("A comparison of several runs needs a directory to write to: choose `out`.")
    comparison = Comparison.read([Path(run) for run in runs], by)
    folder = Path(runs[0] if out is None else out)
    with exclusive(folder):
        tables = make_tables(comparison, named=pictures)
        for table in tables:
            table.write(folder / "tables")
        figures = draw_figures(comparison, folder / "figures")
        shown = [method for run in comparison.runs for method in run.results["method"]]
        further = {metric.term for metric in METRICS.values() if metric.places == ("further",)}
        page = text.page_template().render(
            comparison=comparison,
            run=None if comparison.several else comparison.first,
            tables={table.name: table for table in tables},
            figures=figures,
            examples=_examples(comparison, folder / "figures", pictures),
            notice=NOTICE,
            use_notice=USE_NOTICE,
            jpeg=jpeg,
            picture_key=_PICTURE_KEY,
            # The glossary explains every method that a table shows.
            methods=[(method, look(method)) for method in comparison.first.with_controls(shown)],
            # The page links the table of further measures, and does not show it.
            glossary={term: words for term, words in GLOSSARY.items() if term not in further},
            version=__version__,
            most_drawn=MOST_DRAWN,
            most_strata=MOST_STRATA,
            findings=text.comparison_findings(comparison) if comparison.several else text.findings(comparison.first),
            **({} if comparison.several else _of_one_run(comparison.first)),
        )
        write_text(folder / PAGE, page)
    return Built(folder / PAGE, _numbers(comparison))


def _of_one_run(run: ReportRun) -> dict[str, Any]:
    training = training_of(run)
    # The way from the run to manifest, store and model names folders, perhaps a person; the page is made to be shared.
    configuration = read_json(run.info.path / "run.json")
    configuration |= {"manifest": run.info.manifest_path.name, "store": run.info.store_path.name}
    if run.info.evaluation is not None:
        configuration["evaluation"] = run.info.evaluation | {"model": Path(run.info.evaluation["model"]).name}
    return {
        "headline": text.headline(run),
        "facts": text.facts(run),
        "failures": text.failures(run),
        "properties": [f"{name.capitalize()}: {how}" for name, how in METHODS.items() if name in run.attributes],
        "paper_dataset": paper.DATASETS.get(run.source),
        "trained": look(str(training["method"].iloc[0])).title if len(training) else "",
        "follows_budget": follows_budget(run),
        "n": f"{run.n:,}{fewer_images(run)}",
        "file_hashes": {name: sha256_file(run.info.path / name) for name in ("results.csv", "predictions.parquet")},
        "configuration": json.dumps(configuration, indent=1, sort_keys=True, ensure_ascii=False),
    }


def _examples(comparison: Comparison, folder: Path, pictures: bool) -> list[Example]:
    """Choose the example images of a report of one run and write them as a figure."""
    if comparison.several:
        return []
    if not pictures:
        comparison.first.missing.append(
            "Pictures and names of images: left out on request, so that the page can be shared without the data."
        )
        return []
    chosen = examples(comparison.first)
    if chosen:
        with house_style():
            save(figure(chosen), folder, "examples")
    return chosen


def _numbers(comparison: Comparison) -> dict[str, Any]:
    """Return `runs` with the headline of each run, `comparisons` with every test, and `notes` on what cannot be compared."""
    return {
        "runs": [_headline(run, comparison.budget_of(run)) for run in comparison.runs],
        "comparisons": [{name: _plain(name, row[name]) for name in TEST_COLUMNS} for row in comparison.tests.to_dict("records")],
        "notes": list(comparison.notes),
    }


def _headline(run: ReportRun, budget: float) -> dict[str, Any]:
    methods: dict[str, Any] = {}
    for metric in shown_in("interval"):
        for method, row in run.by_method(metric, budget).iterrows():
            methods.setdefault(str(method), {})[metric] = {c: _plain(c, row[c]) for c in ("value", "low", "high", "n")}
    about = {"path": str(run.info.path), "dataset": run.info.dataset, "main": run.info.main, "budget": budget}
    about |= {name: getattr(run, name) for name in ("name", "study", "seeds", "n", "n_masked")}
    return {**about, "methods": {method: methods[method] for method in run.ordered(methods)}}


def _plain(name: str, value: Any) -> Any:
    """Return a JSON value: None for what was not measured, counts as integers."""
    if isinstance(value, str):
        return value
    if is_missing(value):
        return None
    return int(value) if name in ("n", "groups", "seeds") else float(value)
