"""Several runs side by side: unique names, which images they share, and paired differences to the first run.

Runs are paired where they evaluated the same images; where they did not, a note says why a difference cannot be computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np
import pandas as pd

from medtokenbudget.config import HEADLINE_BUDGETS
from medtokenbudget.errors import RequestError
from medtokenbudget.reporting.evidence import AS_IS, HEADLINE, OFF_CENTER, Evidence
from medtokenbudget.reporting.intervals import Intervals, with_values
from medtokenbudget.reporting.looks import look
from medtokenbudget.reporting.numbers import plural
from medtokenbudget.runs import statistics

CLASSIFICATION = ("accuracy", "macro_f1", "balanced_accuracy")
TESTED = (*CLASSIFICATION, "retention")
PAIR_COLUMNS: tuple[str, ...] = ("run", "method", "minus_run", "minus_method", "view", "budget", "metric")
PAIR_COLUMNS += ("difference", "low", "high", "p", "p_holm", "n", "groups", "seeds")


@dataclass(frozen=True)
class NamedRun:
    """A run with its name in the comparison."""

    name: str
    evidence: Evidence
    intervals: Intervals

    @property
    def main(self) -> str:
        """The method the run's own report is about."""
        return self.evidence.focus


def unique_names(paths: Sequence[Path]) -> list[str]:
    """Names the directories by their last part, with as many parents as it takes to tell them apart.

    Raises:
        RequestError: If a directory is given twice.

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


@dataclass(frozen=True)
class Comparison:
    """Two or more runs; the first is the reference of every paired difference.

    Attributes:
        runs: The runs in the order given.
        notes: What cannot be compared and why, one sentence each; complete after `pairs` was computed.
    """

    runs: tuple[NamedRun, ...]
    notes: list[str] = field(default_factory=list)

    @classmethod
    def read(cls, paths: Sequence[Path]) -> Comparison:
        """Reads the run directories.

        Raises:
            RequestError: If a directory is given twice or is not a run directory.
        """
        names = unique_names(paths)
        evidence = [Evidence.read(path) for path in paths]
        return cls(tuple(NamedRun(n, e, Intervals(e)) for n, e in zip(names, evidence)))

    @cached_property
    def methods(self) -> list[str]:
        """Methods of all runs, those of the first run first."""
        return self.runs[0].evidence.ordered(m for run in self.runs for m in run.evidence.methods)

    @cached_property
    def budgets(self) -> list[float]:
        return sorted({b for run in self.runs for b in run.evidence.budgets})

    def budget_of(self, run: NamedRun) -> float:
        """The budget of the headline numbers: the common budget nearest 0.3, or the run's own when there is none."""
        common = set.intersection(*(set(r.evidence.budgets) for r in self.runs))
        return min(common, key=lambda b: (abs(b - HEADLINE), b)) if common else run.evidence.headline

    @cached_property
    def pairs(self) -> pd.DataFrame:
        """Every other run minus the first, for methods that both have and for their main methods; columns `PAIR_COLUMNS`."""
        found = [row for run in self.runs[1:] for row in self._pair(self.runs[0], run)]
        table = pd.concat(found, ignore_index=True) if found else pd.DataFrame(columns=list(PAIR_COLUMNS))
        if len(table):
            table["p_holm"] = table.groupby(["view", "metric"], sort=False)["p"].transform(lambda p: statistics.holm(p.to_numpy()))
        return table[list(PAIR_COLUMNS)]

    def _pair(self, first: NamedRun, other: NamedRun) -> list[pd.DataFrame]:
        metrics = self._comparable(first, other)
        if not metrics:
            return []
        shared = [m for m in first.evidence.methods if m in other.evidence.methods]
        methods = dict.fromkeys([(first.main, other.main), *[(m, m) for m in shared]])
        parts = []
        for view in (AS_IS, OFF_CENTER):
            a, b = _view(first, view), _view(other, view)
            if a is None or b is None or (view == OFF_CENTER and not _same_crops(a[0], b[0])):
                continue
            for method_a, method_b in methods:
                tests = _paired(a, b, (first.evidence, method_a), (other.evidence, method_b), metrics)
                names = {"run": other.name, "method": method_b, "minus_run": first.name, "minus_method": method_a, "view": view}
                parts.append(tests.assign(**names))
        return [part for part in parts if len(part)]

    def _comparable(self, first: NamedRun, other: NamedRun) -> tuple[str, ...]:
        """The measures that can be paired; says in `notes` what cannot and why."""
        a, b = first.evidence, other.evidence
        pair = f"`{first.name}` and `{other.name}`"
        left, right = (e.main_predictions.drop_duplicates("image_id").set_index("image_id") for e in (a, b))
        shared = left.index.intersection(right.index)
        if a.info.hashes.get("split") != b.info.hashes.get("split"):
            self.notes.append(f"{pair} use different splits of the data, so they trained on different images.")
        if not len(shared):
            self.notes.append(f"{pair} share no validation images: their numbers stand side by side, without paired differences.")
            return ()
        names = [
            frame.loc[shared, "label_name"].astype(object).where(frame.loc[shared, "label"] >= 0, None) for frame in (left, right)
        ]
        changed = int((names[0].to_numpy() != names[1].to_numpy()).sum())
        same_classes = set(a.classes) == set(b.classes)
        if same_classes and changed:
            self.notes.append(
                f"{pair} have {plural(len(shared), 'image id')} in common, but {changed:,} with different labels: they are treated "
                "as different images, without paired differences."
            )
            return ()
        if len(shared) < max(len(left), len(right)):
            self.notes.append(
                f"{pair} share {len(shared):,} of {len(left):,} and {len(right):,} validation images; paired differences cover the "
                "shared ones."
            )
        if not same_classes:
            self.notes.append(f"{pair} have different classes: only retention is paired.")
        common = sorted(set(a.seeds) & set(b.seeds))
        if not common:
            self.notes.append(f"{pair} have no seed in common: their seeds are paired in order.")
        elif a.seeds != b.seeds:
            named = ", ".join(map(str, common))
            self.notes.append(f"{pair} have different seeds: paired differences use the common ones ({named}).")
        return TESTED if same_classes else ("retention",)


def _view(run: NamedRun, view: str) -> tuple[pd.DataFrame, pd.DataFrame] | None:
    """Predictions and results of one view in the study that has it."""
    study = run.evidence.study if view == AS_IS else run.evidence.off_center_study
    if study is None:
        return None
    return run.evidence.images(study, view), run.evidence.cells(study, view)


def _same_crops(a: pd.DataFrame, b: pd.DataFrame) -> bool:
    """Whether two sets of off-center views show the lesions alike: the same lesion patches on the same grid."""
    columns = ["lesion", "n_patches"]
    left, right = (f.drop_duplicates("image_id").set_index("image_id")[columns] for f in (a, b))
    shared = left.index.intersection(right.index)
    return bool(len(shared)) and left.loc[shared].astype(object).fillna(-1).equals(right.loc[shared].astype(object).fillna(-1))


def _paired(
    a: tuple[pd.DataFrame, pd.DataFrame],
    b: tuple[pd.DataFrame, pd.DataFrame],
    first: tuple[Evidence, str],
    other: tuple[Evidence, str],
    metrics: tuple[str, ...],
) -> pd.DataFrame:
    """`other` minus `first`, as a table of tests; empty when they share no budget or image."""
    (left, left_results), (right, right_results) = (
        tuple(frame[frame["method"] == method] for frame in frames) for frames, (_, method) in ((a, first), (b, other))
    )
    budgets = set(left["budget"]) & set(right["budget"])
    shown = [budget for budget in HEADLINE_BUDGETS if budget in budgets] or sorted(budgets)
    if not shown:
        return pd.DataFrame()
    if not set(left["seed"]) & set(right["seed"]):
        left, left_results, right, right_results = (_rank_seeds(frame) for frame in (left, left_results, right, right_results))
    right = _aligned(right, left, other[0].classes, first[0].classes)
    same = {"study": "comparison", "dataset": "comparison", "view": AS_IS}
    predictions = pd.concat([left.assign(method="first", **same), right.assign(method="other", **same)], ignore_index=True)
    results = pd.concat([left_results.assign(method="first"), right_results.assign(method="other")], ignore_index=True)
    tests = statistics.compare(predictions, "other", metrics, shown)
    return with_values(tests, results).drop(columns=["study", "dataset", "method_a", "method_b"])


def _rank_seeds(frame: pd.DataFrame) -> pd.DataFrame:
    ranks = {seed: i for i, seed in enumerate(sorted(frame["seed"].unique()))}
    return frame.assign(seed=frame["seed"].map(ranks))


def _aligned(frame: pd.DataFrame, to: pd.DataFrame, own: Sequence[str], classes: Sequence[str]) -> pd.DataFrame:
    """Gives `frame` the groups of `to` and class numbers of `classes`, so that both frames speak of the same things."""
    groups = to.drop_duplicates("image_id").set_index("image_id")["group"]
    frame = frame[frame["image_id"].isin(groups.index)]
    frame = frame.assign(group=frame["image_id"].map(groups))
    if set(own) != set(classes) or list(own) == list(classes):
        return frame
    number = np.array([list(classes).index(name) for name in own])
    label = frame["label"].to_numpy(int)
    return frame.assign(label=np.where(label >= 0, number[label], label), predicted=number[frame["predicted"].to_numpy(int)])


def main_differences(comparison: Comparison, metric: str, view: str = AS_IS) -> pd.DataFrame:
    """The rows of `pairs` that compare the main methods at the headline budget."""
    pairs, first = comparison.pairs, comparison.runs[0]
    mains = {run.name: run.main for run in comparison.runs}
    rows = pairs[(pairs["metric"] == metric) & (pairs["view"] == view) & (pairs["minus_method"] == first.main)]
    return at_headline(comparison, rows[rows["method"] == rows["run"].map(mains)])


def at_headline(comparison: Comparison, rows: pd.DataFrame) -> pd.DataFrame:
    """The rows of `pairs` at the budget of the headline numbers."""
    budgets = {run.name: comparison.budget_of(run) for run in comparison.runs}
    return rows[np.isclose(rows["budget"].astype(float), rows["run"].map(budgets).astype(float))]


def main_name(run: NamedRun) -> str:
    """The name of a run's main method."""
    return look(run.main).name
