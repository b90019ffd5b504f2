"""The runs of a report, one or several: unique names, which images they share, and the paired tests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np
import pandas as pd

from medtokenbudget.backbone.views import OFF_CENTER
from medtokenbudget.config import CONTROLS, HEADLINE_BUDGETS
from medtokenbudget.errors import RequestError
from medtokenbudget.measures import plural, shown_in
from medtokenbudget.reporting.intervals import Difference, ReportRun, nearest_headline
from medtokenbudget.runs import statistics
from medtokenbudget.runs.run import AS_IS

TEST_COLUMNS = [
    *("run", "method", "minus_run", "minus_method", "view", "budget", "metric"),
    *("difference", "low", "high", "p", "p_holm", "n", "groups", "seeds"),
]


@dataclass(frozen=True)
class Comparison:
    """The runs of a report, one or more; of several, the first is the reference of every paired difference.

    Runs are paired where they evaluated the same images; where they did not, one of the `notes` says why there is no difference.
    The notes are complete after `tests` was computed.
    """

    runs: tuple[ReportRun, ...]
    notes: list[str] = field(default_factory=list)

    @classmethod
    def read(cls, paths: Sequence[Path], by: Sequence[str] = ()) -> Comparison:
        return cls(tuple(ReportRun.read(path, name, by) for path, name in zip(paths, unique_names(paths))))

    @property
    def first(self) -> ReportRun:
        return self.runs[0]

    @property
    def several(self) -> bool:
        return len(self.runs) > 1

    @cached_property
    def budgets(self) -> list[float]:
        return sorted({b for run in self.runs for b in run.budgets})

    @cached_property
    def headline(self) -> float | None:
        """The common budget of all runs that is nearest to `HEADLINE_BUDGET`; None when they have none in common."""
        common = set.intersection(*(set(run.budgets) for run in self.runs))
        return nearest_headline(common) if common else None

    def budget_of(self, run: ReportRun) -> float:
        return run.headline if self.headline is None else self.headline

    @cached_property
    def tests(self) -> pd.DataFrame:
        """Every other run minus the first, for methods that both have and for their main methods; columns `TEST_COLUMNS`.

        Of a single run, its leading methods minus each other method.
        """
        pairs = [self._pair(run) for run in self.runs[1:]] if self.several else [_leading_tests(self.first)]
        parts = [part for tests in pairs for part in tests if len(part)]
        table = pd.concat(parts, ignore_index=True) if parts else pd.DataFrame(columns=TEST_COLUMNS)
        if self.several and len(table):
            table["p_holm"] = table.groupby(["view", "metric"], sort=False)["p"].transform(lambda p: statistics.holm(p.to_numpy()))
        return table[TEST_COLUMNS]

    @cached_property
    def headline_tests(self) -> pd.DataFrame:
        budgets = {run.name: self.budget_of(run) for run in self.runs}
        return self.tests[np.isclose(self.tests["budget"].astype(float), self.tests["run"].map(budgets).astype(float))]

    def main_differences(self, metric: str, view: str = AS_IS) -> dict[str, Difference]:
        """Return run -> its main method minus that of the first run, at the headline budget; only what was paired."""
        tests, mains = self.headline_tests, {run.name: run.focus for run in self.runs}
        rows = tests[(tests["metric"] == metric) & (tests["view"] == view) & (tests["minus_method"] == self.first.focus)]
        rows = rows[rows["method"] == rows["run"].map(mains)]
        return {r["run"]: Difference(r["difference"], r["low"], r["high"], r["p"], r["n"]) for r in rows.to_dict("records")}

    @cached_property
    def comparable(self) -> dict[str, tuple[str, ...]]:
        """Run -> the measures in which it can be paired with the first, none without shared images; says in `notes` what cannot."""
        return {run.name: self._comparable(run) for run in self.runs[1:]}

    @cached_property
    def leaderboard(self) -> dict[tuple[str, str], pd.DataFrame]:
        """(metric, view) -> the ranking of the main methods of all comparable runs and of the first run's controls.

        Of a single run, of all its methods. They are called `METHOD of RUN`; at the common headline budget, on the images that all
        of them have.
        """
        boards: dict[tuple[str, str], pd.DataFrame] = {}
        first = self.first
        for metric, view in ((metric, view) for metric in ("retention_of_ceiling", "macro_f1") for view in (AS_IS, OFF_CENTER)):
            left, parts = self._board_rows(first, view), []
            measures_of = {first.name: shown_in("test"), **self.comparable}
            for run in self.runs:
                rows = self._board_rows(run, view)
                # The share of the ceiling needs what retention needs, and is not tested itself.
                needed = "retention" if metric == "retention_of_ceiling" else metric
                if needed not in measures_of[run.name] or (view == OFF_CENTER and not _same_crops(left, rows)):
                    continue
                rows = _aligned(rows, left, run.info.classes, first.info.classes)
                wanted = [run.focus, *(m for m in CONTROLS if run is first and m != run.focus)] if self.several else run.methods
                parts += [rows[rows["method"] == m].assign(method=f"{m} of {run.name}") for m in wanted]
            rows = pd.concat(parts, ignore_index=True) if parts else pd.DataFrame()
            if len(rows):
                # Seeds of two runs are different numbers: the first is paired with the first.
                seeds = rows.groupby("method")["seed"].rank(method="dense").astype(int)
                rows = rows.assign(study="comparison", dataset="comparison", seed=seeds)
                board = statistics.ranking(rows, metric)
                if board["value"].notna().any():
                    boards[metric, view] = board
        return boards

    def _board_rows(self, run: ReportRun, view: str) -> pd.DataFrame:
        rows = run.images(run.study if view == AS_IS else run.off_center_study, view)
        return rows if self.headline is None else rows[np.isclose(rows["budget"], self.headline)]

    def _pair(self, other: ReportRun) -> list[pd.DataFrame]:
        first, metrics, parts = self.first, self.comparable[other.name], []
        methods = dict.fromkeys([(first.focus, other.focus), *[(m, m) for m in first.methods if m in other.methods]])
        for view in (AS_IS, OFF_CENTER) if metrics else ():
            left, right = (run.images(run.study if view == AS_IS else run.off_center_study, view) for run in (first, other))
            if view == OFF_CENTER and not _same_crops(left, right):
                continue
            right = _aligned(right, left, other.info.classes, first.info.classes)
            for method, other_method in methods:
                tests = _paired(left[left["method"] == method], right[right["method"] == other_method], metrics)
                names = {"run": other.name, "method": other_method, "minus_run": first.name, "minus_method": method, "view": view}
                parts.append(tests.assign(**names))
        return parts

    def _comparable(self, other: ReportRun) -> tuple[str, ...]:
        first = self.first

        def note(sentence: str) -> None:
            self.notes.append(f"`{first.name}` and `{other.name}` {sentence}")

        left, right = (run.main_predictions.drop_duplicates("image_id").set_index("image_id") for run in (first, other))
        shared = left.index.intersection(right.index)
        if first.info.hashes.get("split") != other.info.hashes.get("split"):
            note("use different splits of the data, so they trained on different images.")
        if not len(shared):
            note("share no validation images: their numbers stand side by side, without paired differences.")
            return ()
        # As objects, because a missing string differs from itself.
        labels = [
            frame["label_name"].astype(object).where(frame["label"] >= 0, None).to_numpy()
            for frame in (left.loc[shared], right.loc[shared])
        ]
        changed = int((labels[0] != labels[1]).sum())
        same_classes = set(first.info.classes) == set(other.info.classes)
        if same_classes and changed:
            note(
                f"have {plural(len(shared), 'image id')} in common, but {changed:,} with different labels: they are treated "
                "as different images, without paired differences."
            )
            return ()
        if len(shared) < max(len(left), len(right)):
            both = f"{len(left):,} and {len(right):,} validation images"
            note(f"share {len(shared):,} of {both}; paired differences cover the shared ones.")
        if not same_classes:
            note("have different classes: only retention is paired.")
        common = sorted(set(first.seeds) & set(other.seeds))
        if not common:
            note("have no seed in common: their seeds are paired in order.")
        elif first.seeds != other.seeds:
            note(f"have different seeds: paired differences use the common ones ({', '.join(map(str, common))}).")
        return shown_in("test") if same_classes else ("retention",)


def _leading_tests(run: ReportRun) -> list[pd.DataFrame]:
    """Test every leading method of a run against every other one, original images and off-center views, with Holm-corrected p."""
    parts = []
    for view in (AS_IS, OFF_CENTER):
        for method in run.leading:
            # The study `robustness` has more seeds than the headline study.
            repeated = method in set(run.cells("robustness", AS_IS)["method"])
            rows = run.images(run.off_center_study if view == OFF_CENTER else "robustness" if repeated else run.study, view)
            if method in set(rows["method"]):
                budgets = [b for b in HEADLINE_BUDGETS if b in set(rows["budget"])] or [run.headline]
                tests = statistics.compare(rows, method, shown_in("test"), budgets)
                tests = tests.rename(columns={"method_a": "method", "method_b": "minus_method"})
                parts.append(tests.assign(run=run.name, minus_run=run.name))
    return parts


def unique_names(paths: Sequence[Path]) -> list[str]:
    """Name the directories by their last part, with as many parents as it takes to tell them apart.

    Example:
        >>> unique_names([Path("/a/isic"), Path("/b/isic"), Path("/b/demo")])
        ['a/isic', 'b/isic', 'demo']
    """
    resolved = [path.resolve() for path in paths]
    twice = sorted({str(path) for path in resolved if resolved.count(path) > 1})
    if twice:
        raise RequestError(f"{', '.join(twice)} is given more than once. Name each run once.")
    length = [1] * len(resolved)
    while True:
        names = ["/".join(path.parts[-n:]).lstrip("/") for path, n in zip(resolved, length)]
        clashing = [i for i, name in enumerate(names) if names.count(name) > 1]
        if not clashing:
            return names
        for i in clashing:
            length[i] += 1


def _same_crops(left: pd.DataFrame, right: pd.DataFrame) -> bool:
    """Check whether two sets of off-center views show the lesions alike: the same lesion patches on the same grid."""
    columns = ["lesion", "n_patches"]
    a, b = (f.drop_duplicates("image_id").set_index("image_id")[columns] for f in (left, right))
    shared = a.index.intersection(b.index)
    # As objects, and -1 for what is missing, which would differ from itself.
    return bool(len(shared)) and a.loc[shared].astype(object).fillna(-1).equals(b.loc[shared].astype(object).fillna(-1))


def _aligned(frame: pd.DataFrame, to: pd.DataFrame, classes: Sequence[str], to_classes: Sequence[str]) -> pd.DataFrame:
    """Give `frame` the images and groups of `to` and number its classes like `to_classes`."""
    # Both methods of a pair are exchanged in whole groups, so their runs must agree on the groups.
    groups = to.drop_duplicates("image_id").set_index("image_id")["group"]
    frame = frame[frame["image_id"].isin(groups.index)]
    frame = frame.assign(group=frame["image_id"].map(groups))
    if set(classes) != set(to_classes) or list(classes) == list(to_classes):
        return frame
    number = np.array([list(to_classes).index(name) for name in classes])
    label = frame["label"].to_numpy(int)
    return frame.assign(label=np.where(label >= 0, number[label], label), predicted=number[frame["predicted"].to_numpy(int)])


def _paired(first: pd.DataFrame, other: pd.DataFrame, metrics: tuple[str, ...]) -> pd.DataFrame:
    common = set(first["budget"]) & set(other["budget"])
    budgets = [budget for budget in HEADLINE_BUDGETS if budget in common] or sorted(common)
    if not budgets:
        return pd.DataFrame()
    if not set(first["seed"]) & set(other["seed"]):
        # Without a common seed the first seed is paired with the first, the second with the second.
        first, other = (frame.assign(seed=frame["seed"].rank(method="dense").astype(int)) for frame in (first, other))
    same = {"study": "comparison", "dataset": "comparison", "view": AS_IS}
    rows = pd.concat([first.assign(method="first", **same), other.assign(method="other", **same)], ignore_index=True)
    return statistics.compare(rows, "other", metrics, budgets)
