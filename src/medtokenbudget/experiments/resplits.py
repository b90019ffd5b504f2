"""Study `resplits`: the headline methods on grouped folds x seeds, and how much of the spread comes from folds and from seeds.

The paper leaves stratified re-splits to future work. Every fold is a run of its own (`fold-0`, ...), with its own manifest;
images of one lesion, and duplicates, are never in two folds, and every fold has about the same share of each class.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from medtokenbudget.config import HEADLINE_BUDGETS, HEADLINE_SELECTORS, TrainConfig, preset
from medtokenbudget.data import Manifest, apply_split
from medtokenbudget.data.splits import stratified_group_parts
from medtokenbudget.experiments.execution import Execution
from medtokenbudget.experiments.preflight import that_fit
from medtokenbudget.experiments.results import METRICS
from medtokenbudget.experiments.sources import Sources
from medtokenbudget.experiments.sweep import Study, run_studies
from medtokenbudget.features import FeatureStore
from medtokenbudget.files import write_text
from medtokenbudget.progress import say

FOLDS = 5
SPLIT_SEED = 42
COLUMNS: tuple[str, ...] = ("method", "budget", "metric", "mean", "between_folds", "between_seeds", "fold_share", "folds", "seeds")


@dataclass(frozen=True)
class Components:
    """Variance of y [folds, seeds] split in two, by the one-way analysis of variance with random folds.

    Attributes:
        mean: Mean over all.
        between_folds: Standard deviation of the folds, without what the seeds add to it.
        between_seeds: Standard deviation of the seeds inside a fold; NaN for one seed.
    """

    mean: float
    between_folds: float
    between_seeds: float

    @property
    def fold_share(self) -> float:
        """Share of the variance that is between folds."""
        total = self.between_folds**2 + self.between_seeds**2
        return self.between_folds**2 / total if total > 0 else float("nan")


def components(values: np.ndarray) -> Components:
    """Split the variance of `[folds, seeds]` values; with one seed all of it counts as between folds.

    Example:
        >>> components(np.array([[1.0, 3.0], [5.0, 7.0]]))  # 2 between seeds; 8 - 2 / 2 between folds
        Components(mean=4.0, between_folds=2.6457513110645907, between_seeds=1.4142135623730951)
    """
    folds, seeds = values.shape
    between = float(values.mean(1).var(ddof=1)) if folds > 1 else float("nan")
    if seeds == 1:
        return Components(float(values.mean()), between**0.5, float("nan"))
    within = float(values.var(axis=1, ddof=1).mean())
    return Components(float(values.mean()), max(0.0, between - within / seeds) ** 0.5, within**0.5)


def resplits(
    manifest: Manifest | Path | str,
    store: FeatureStore | Path | str,
    out: Path | str,
    methods: Sequence[str] = HEADLINE_SELECTORS,
    folds: int = FOLDS,
    seeds: Sequence[int] = (42, 43, 44),
    budgets: Sequence[float] = HEADLINE_BUDGETS,
    config: TrainConfig | None = None,
    execution: Execution | None = None,
) -> pd.DataFrame:
    """Train and evaluate methods on every fold with every seed.

    Args:
        manifest: All images; its split is replaced.
        store: Their tokens.
        out: Directory of the study; each fold is a run directory in it. A study that was stopped there resumes.
        methods: Texts such as 'lats' or 'center'; those that need masks are left out where no image has one.
        folds: Number of folds; each is the validation part once.
        seeds: Seeds of the trainings on each fold.
        budgets: Token budgets.
        config: Common training settings. Default: the paper's.
        execution: Where the trainings run.

    Returns:
        The variance table, also written to `out/variance.csv`; the results of all folds are in `out/results.csv`.
    """
    out = Path(out)
    config = config or preset("paper")
    whole = manifest if isinstance(manifest, Manifest) else Manifest.read(manifest)
    parts = []
    for fold, split in enumerate(stratified_folds(whole, folds)):
        folder = out / f"fold-{fold}"
        path = split.write(folder / "manifest.parquet")
        sources = Sources.of(path, store, folder)
        chosen = that_fit(sources, tuple(methods), config)
        say(f"Fold {fold + 1} of {folds}: {folder}")
        study = Study("resplits", chosen, tuple(seeds), tuple(budgets), off_center=False)
        parts.append(run_studies([study], sources, folder, config, execution, own=("protocol",)).assign(fold=fold))
    results = pd.concat(parts, ignore_index=True)
    table = variance_table(results)
    write_text(out / "results.csv", results.to_csv(index=False, float_format="%.10g", lineterminator="\n"))
    write_text(out / "variance.csv", table.to_csv(index=False, float_format="%.6g", lineterminator="\n"))
    return table


def stratified_folds(manifest: Manifest, folds: int) -> list[Manifest]:
    """The images split `folds` times: every fold is the validation part once and has about the same share of each class.

    Images of one group, and duplicates, stay together. Unlike the folds of `mtb data split`, these change when images are added.
    """
    whole = apply_split(manifest, "kfold", folds=folds)  # rejects too few groups, and puts duplicates into one
    fold_of = stratified_group_parts(whole.label_index, whole.groups, [1 / folds] * folds, SPLIT_SEED)
    return [
        whole.with_columns(split=np.where(fold_of == fold, "val", "train").tolist(), split_rule=f"stratified {fold}/{folds}")
        for fold in range(folds)
    ]


def variance_table(results: pd.DataFrame, metrics: Sequence[str] = METRICS) -> pd.DataFrame:
    """Mean and variance components of every metric for each method and budget; columns `COLUMNS`.

    Args:
        results: Tidy results with a column `fold`. Only seeds that every fold has count.
        metrics: Columns of the results to split.
    """
    rows = []
    for (method, budget), cell in results.groupby(["method", "budget"], sort=False):
        for metric in metrics:
            values = cell.pivot_table(index="fold", columns="seed", values=metric, dropna=False).dropna(axis=1)
            if values.size:
                found = components(values.to_numpy())
                rows.append(
                    (method, budget, metric, found.mean, found.between_folds, found.between_seeds, found.fold_share, *values.shape)
                )
    return pd.DataFrame(rows, columns=list(COLUMNS))
