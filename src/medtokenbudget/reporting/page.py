"""`report`: from the files of one or more runs to tables, figures and `templates/page.html`, and its numbers as JSON."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from markupsafe import Markup

from medtokenbudget import __version__
from medtokenbudget.data.strata import METHODS, STRATA
from medtokenbudget.errors import RequestError
from medtokenbudget.files import read_json, sha256_file, write_text
from medtokenbudget.locks import exclusive
from medtokenbudget.measures import GLOSSARY, shown_in
from medtokenbudget.reporting import text
from medtokenbudget.reporting.comparison import PAIR_COLUMNS, Comparison
from medtokenbudget.reporting.examples import KEPT_TINT, Example, examples, figure, jpeg
from medtokenbudget.reporting.figures import Plate, draw_figures
from medtokenbudget.reporting.intervals import ReportRun
from medtokenbudget.reporting.looks import LOST, look
from medtokenbudget.reporting.style import house_style, save
from medtokenbudget.reporting.table import Table
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
    """Writes the report like `report`, and also returns the numbers that `mtb report --json` prints."""
    if len(runs) > 1 and out is None:
        raise RequestError("A comparison of several runs needs a directory to write to. Add --out DIR.")
    comparison = Comparison.read([Path(run) for run in runs])
    folder = Path(runs[0] if out is None else out)
    with exclusive(folder):
        tables = make_tables(comparison, named=pictures)
        for table in tables:
            table.write(folder / "tables")
        plates = draw_figures(comparison, folder / "figures")
        chosen = _examples(comparison, folder / "figures", pictures)
        write_text(folder / PAGE, _page(comparison, tables, plates, chosen))
    return Built(folder / PAGE, _numbers(comparison))


def _examples(comparison: Comparison, folder: Path, pictures: bool) -> dict[str, list[Example]]:
    """Chooses the example images of a report of one run and writes them as figures."""
    if comparison.several:
        return {"typical": [], "worst": []}
    if not pictures:
        comparison.first.missing.append(
            "Pictures and names of images: left out on request, so that the page can be shared without the data."
        )
        return {"typical": [], "worst": []}
    chosen = examples(comparison.first)
    with house_style():
        for name, images in (("examples", chosen["typical"]), ("worst", chosen["worst"])):
            if images:
                save(figure(images), folder, name)
    return chosen


def _page(comparison: Comparison, tables: Sequence[Table], plates: Sequence[Plate], chosen: dict[str, list[Example]]) -> str:
    several, first = comparison.several, comparison.first
    names = [run.name for run in comparison.runs]
    methods = first.with_controls(comparison.methods if several else first.results["method"])
    variables: dict[str, Any] = {
        "run": None,
        "title": f"Comparison of {text.plural(len(names), 'run')}",
        "lead": f"{text.plural(len(names), 'run')} side by side: {', '.join(names)}. Differences are relative to {names[0]}.",
        "facts": [],
        "findings": text.comparison_findings(comparison) if several else text.findings(first),
        "provenance": _sources(comparison),
    }
    if not several:
        attributes = first.attributes if first.attributes is not None else ()
        variables |= {
            "run": first,
            "title": f"Token selection on {first.dataset}",
            "lead": text.lead(first),
            "facts": text.facts(first),
            "failures": text.failures(first),
            "properties": [f"{name.capitalize()}: {METHODS[name]}" for name in STRATA if name in attributes],
            "budget": text.budget_text(first.headline),
            "paper_dataset": paper.DATASETS.get(first.source),
            "provenance": _provenance(first),
            "configuration": json.dumps(read_json(first.path / "run.json"), indent=1, sort_keys=True, ensure_ascii=False),
        }
    return text.template("page.html").render(
        variables,
        tables={table.name: table for table in tables},
        figures={plate.name: plate for plate in plates},
        examples=chosen,
        jpeg=jpeg,
        picture_key=_PICTURE_KEY,
        methods=[(method, look(method)) for method in methods],
        glossary=GLOSSARY,
        version=__version__,
    )


def _provenance(run: ReportRun) -> list[tuple[str, str]]:
    """Lists what one run was made from."""
    info = run.info
    rows = {"Data set": f"{run.dataset} ({info.source})" if info.source else run.dataset}
    rows["Seeds"] = ", ".join(map(str, info.seeds or run.seeds))
    if info.backbone:
        rows["Backbone"] = ", ".join(f"{k} {v}" for k, v in info.backbone.items() if isinstance(v, (str, int, float)))
    if info.command:
        rows["Command"] = info.command
    rows["This page"] = f"mtb report {run.path.name}"
    rows |= {f"SHA-256 of {name}": sha256_file(run.path / name) for name in ("results.csv", "predictions.parquet")}
    rows |= {f"Hash of the {name}": str(value) for name, value in info.hashes.items()}
    rows["Versions"] = ", ".join(f"{name} {value}" for name, value in info.versions.items())
    return list(rows.items())


def _sources(comparison: Comparison) -> list[tuple[str, Markup]]:
    """Lists the command and the hashes of each run."""
    rows = []
    for run in comparison.runs:
        hashes = ", ".join(f"{name} {str(value)[:12]}" for name, value in run.info.hashes.items())
        lines = [run.info.command or "", f"hashes: {hashes}" if hashes else ""]
        rows.append((run.name, Markup("<br>").join(line for line in lines if line)))
    return rows


def _numbers(comparison: Comparison) -> dict[str, Any]:
    """Returns `runs` with the headline of each run, `comparisons`, and `notes` on what cannot be compared.

    Several runs are compared with the first one; the leading methods of a single run with its other methods.
    """
    pairs = comparison.pairs
    if not comparison.several:
        name = comparison.first.name
        pairs = comparison.first.tests.rename(columns={"method_a": "method", "method_b": "minus_method"})
        pairs = pairs.assign(run=name, minus_run=name)
    return {
        "runs": [_headline(run, comparison.budget_of(run)) for run in comparison.runs],
        "comparisons": [{name: _plain(name, row[name]) for name in PAIR_COLUMNS} for row in pairs.to_dict("records")],
        "notes": list(comparison.notes),
    }


def _headline(run: ReportRun, budget: float) -> dict[str, Any]:
    methods: dict[str, Any] = {}
    for metric in shown_in("interval"):
        for method, row in run.with_intervals(metric, budget).iterrows():
            methods.setdefault(str(method), {})[metric] = {c: _plain(c, row[c]) for c in ("value", "low", "high", "n")}
    return {
        "name": run.name,
        "path": str(run.path),
        "dataset": run.dataset,
        "main": run.info.main,
        "study": run.study,
        "budget": budget,
        "seeds": run.seeds,
        "n": run.n,
        "n_masked": run.n_masked,
        "methods": {method: methods[method] for method in run.ordered(methods)},
    }


def _plain(name: str, value: Any) -> Any:
    """Returns a JSON value: None for what was not measured, counts as integers."""
    if isinstance(value, str):
        return value
    if text.is_missing(value):
        return None
    return int(value) if name in ("n", "groups", "seeds") else float(value)
