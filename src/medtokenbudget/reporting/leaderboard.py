"""One table of the methods of several people's runs on the same images: Markdown, CSV and a page.

Runs that are not about the same images, split and classes, or that pick the epoch on the validation images while others do not, are
rejected with the reason: a rank among them would mean nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from medtokenbudget.errors import MismatchError, RequestError, UnknownNameError
from medtokenbudget.experiments.results import AS_IS, METRICS
from medtokenbudget.experiments.run import RunInfo
from medtokenbudget.files import write_text
from medtokenbudget.reporting.cells import METRIC_NAMES, mean_text
from medtokenbudget.reporting.comparison import unique_names
from medtokenbudget.reporting.document import Section, document
from medtokenbudget.reporting.looks import is_reference, look
from medtokenbudget.reporting.table import Table

SHOWN = ("retention_of_ceiling", "accuracy", "macro_f1", "balanced_accuracy")


@dataclass(frozen=True)
class Leaderboard:
    """The methods of comparable runs, best first.

    Attributes:
        data: One row per run and method with the mean over seeds of every metric and its deviation (`..._std`).
        metric: What the rows are ordered by.
        dataset: Name of the data set.
    """

    data: pd.DataFrame
    metric: str
    dataset: str

    @property
    def table(self) -> Table:
        """The table of the page; references (NoPruning, Oracle, Box prior) have no rank."""
        first = self.data.iloc[0]
        rows = []
        for _, row in self.data.iterrows():
            shown = [mean_text(name, row[name], row[f"{name}_std"]) for name in SHOWN]
            rank = "–" if pd.isna(row["rank"]) else str(int(row["rank"]))
            rows.append(
                [rank, look(str(row["method"])).name, str(row["run"]), str(row["backbone"]), *shown, str(int(row["seeds"]))]
            )
        note = (
            f"{self.dataset}, view {first['view']}, budget {first['budget']:g}. "
            "Mean ± deviation over the seeds of a run. NoPruning has no budget, Oracle and Box prior see the mask: no rank."
        )
        columns = ["Rank", "Method", "Run", "Backbone", *(METRIC_NAMES[name] for name in SHOWN), "Seeds"]
        title = f"Ordered by {METRIC_NAMES[self.metric]}"
        return Table("leaderboard", title, columns, rows, self.data, note, labels=4)

    def write(self, folder: Path) -> Path:
        """Write `leaderboard.csv`, `.md`, `.tex` and `.html` into `folder` and return the page."""
        self.table.write(folder)
        section = Section("leaderboard", "Methods", "", [self.table.html()])
        page = folder / "leaderboard.html"
        write_text(page, document("Leaderboard", f"Methods of {self.data['run'].nunique()} runs on {self.dataset}.", [section]))
        return page


def leaderboard(
    runs: Sequence[Path | str], metric: str = "balanced_accuracy", budget: float = 0.3, view: str = AS_IS
) -> Leaderboard:
    """Rank the methods of several runs on the same images.

    Args:
        runs: Run directories.
        metric: Column of `results.csv` to order by.
        budget: Token budget of the numbers.
        view: 'as-is' or 'off-center'.

    Raises:
        MismatchError: The runs are not comparable; the message says why.
        RequestError: No run has results at this budget and view.
    """
    if metric not in METRIC_NAMES:
        raise UnknownNameError.of("metric", metric, METRIC_NAMES)
    paths = [Path(run) for run in runs]
    names = unique_names(paths)
    infos = [RunInfo.read(path) for path in paths]
    check_comparable(names, infos)
    parts = []
    for name, info in zip(names, infos):
        results = info.results()
        cells = results[(results["view"] == view) & ((results["budget"] - budget).abs() < 1e-9)]
        # A training that several studies share is one result.
        cells = cells.drop_duplicates(["method", "seed"])
        if len(cells):
            grouped = cells.groupby("method", sort=False)[list(METRICS)]
            frame = grouped.mean().join(grouped.std(), rsuffix="_std").reset_index()
            frame["seeds"] = frame["method"].map(cells.groupby("method")["seed"].nunique())
            parts.append(frame.assign(run=name, backbone=str(info.backbone.get("name", "?")), view=view, budget=budget))
    if not parts:
        raise RequestError(f"No run has results at budget {budget:g} for the view {view}. Choose another --budget or --view.")
    data = pd.concat(parts, ignore_index=True).sort_values(metric, ascending=metric == "ece", kind="stable", na_position="last")
    competes = ~data["method"].map(is_reference) & data[metric].notna()
    data.insert(0, "rank", competes.cumsum().where(competes))
    first = ["rank", "run", "backbone", "method", "view", "budget", "seeds"]
    return Leaderboard(
        data[[*first, *(c for c in data.columns if c not in first)]].reset_index(drop=True), metric, infos[0].dataset
    )


def check_comparable(names: Sequence[str], infos: Sequence[RunInfo]) -> None:
    """Reject runs of which a rank would mean nothing, with every reason at once."""
    first, reasons = infos[0], []
    for name, info in zip(names[1:], infos[1:]):
        if info.classes != first.classes:
            found, wanted = (", ".join(run.classes) or "none" for run in (info, first))
            reasons.append(f"{name} has the classes {found}, {names[0]} has {wanted}")
        if info.hashes.get("split") != first.hashes.get("split"):
            reasons.append(f"{name} has another split than {names[0]}")
        elif info.hashes.get("manifest") != first.hashes.get("manifest"):
            reasons.append(f"{name} has another manifest (images, labels or masks) than {names[0]}")
        protocols = [run.config.get("protocol", "strict") for run in (first, info)]
        if protocols[0] != protocols[1]:
            reasons.append(
                f"{name} has the protocol {protocols[1]}, {names[0]} has {protocols[0]}: one picks epochs on validation images"
            )
    if reasons:
        raise MismatchError(f"These runs are not comparable: {'; '.join(reasons)}. Run the methods again on one manifest.")
