"""The paper's tables as data, and our results beside them.

The only file with numbers of the paper, so that each is written down once. All in percent as printed there (enrichment is a
ratio, lesion sizes are patches); the names of the methods are ours.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pandas as pd

from medtokenbudget.config import BUDGETS
from medtokenbudget.errors import RequestError, UnknownNameError
from medtokenbudget.runs.run import AS_IS, NOT_MEASURED

METHOD_NAMES: dict[str, str] = {
    "NoPruning": "no-pruning",
    "Random": "random",
    "NormBased": "norm",
    "ToMe": "tome",
    "AttnEnt": "attention-entropy",
    "LocalCtr": "local-contrast",
    "LATS": "lats",
    "LATS_mf": "lats:mask-free",
    "Fixed": "lats:fixed-0.5",
}
"""The paper's name of a method -> ours. AttentionEntropy and LocalContrast are AttnEnt and LocalCtr in most tables."""

MAIN_BUDGETS: tuple[float, ...] = (0.1, 0.2, 0.3, 0.5, 1.0)

# Table "main": accuracy at MAIN_BUDGETS, then retention at 0.3.
MAIN: dict[str, tuple[float | None, ...]] = {
    "NoPruning": (77.5, 77.5, 77.5, 77.5, 77.5, 100.0),
    "Random": (76.2, 77.0, 76.8, 77.1, 77.0, 29.5),
    "NormBased": (69.7, 71.8, 73.1, 74.5, 75.7, 21.1),
    "ToMe": (75.2, 76.5, 76.9, 77.0, 77.0, None),
    "AttnEnt": (70.9, 72.9, 73.9, 75.2, 76.8, 34.0),
    "LocalCtr": (73.9, 74.8, 75.7, 75.8, 76.5, 19.3),
    "LATS": (77.5, 80.1, 80.2, 79.3, 75.1, 67.4),
}
# Complete sweeps: accuracy at the ten budgets.
ISIC_SWEEP: dict[str, tuple[float, ...]] = {
    "NoPruning": (77.5, 77.5, 77.5, 77.5, 77.5, 77.5, 77.5, 77.5, 77.5, 77.5),
    "Random": (76.2, 77.0, 76.8, 77.0, 77.1, 76.9, 76.9, 77.1, 77.1, 77.0),
    "NormBased": (69.7, 71.8, 73.1, 74.0, 74.5, 74.9, 75.4, 75.3, 75.5, 75.7),
    "ToMe": (75.2, 76.5, 76.9, 77.0, 77.0, 76.8, 77.0, 76.9, 77.0, 77.0),
    "AttnEnt": (70.9, 72.9, 73.9, 74.5, 75.2, 76.1, 76.5, 76.7, 76.6, 76.8),
    "LocalCtr": (73.9, 74.8, 75.7, 75.9, 75.8, 76.1, 76.2, 76.4, 76.4, 76.5),
    "LATS": (77.5, 80.1, 80.2, 79.9, 79.3, 78.6, 77.9, 77.1, 76.1, 75.1),
}
KVASIR_SWEEP: dict[str, tuple[float, ...]] = {
    "NoPruning": (91.6, 91.6, 91.6, 91.6, 91.6, 91.6, 91.6, 91.6, 91.6, 91.6),
    "Random": (90.2, 91.6, 90.9, 90.8, 91.4, 91.2, 91.4, 91.5, 91.4, 91.4),
    "NormBased": (84.1, 86.2, 87.9, 89.8, 90.4, 90.4, 90.3, 90.4, 90.4, 90.4),
    "ToMe": (89.2, 92.0, 91.8, 91.9, 91.6, 91.6, 91.5, 91.2, 91.2, 91.4),
    "AttnEnt": (83.2, 85.6, 88.1, 90.0, 89.8, 90.5, 90.9, 91.3, 91.2, 91.6),
    "LocalCtr": (87.3, 89.4, 89.9, 90.4, 90.6, 90.4, 91.1, 90.8, 91.0, 90.8),
    "LATS": (86.7, 89.8, 90.4, 91.4, 91.9, 91.1, 91.1, 90.7, 90.1, 88.9),
}
# Curriculum against the budget fixed at 0.5: accuracy at MAIN_BUDGETS.
CURRICULUM: dict[str, tuple[float, ...]] = {
    "LATS": (77.5, 80.1, 80.2, 79.3, 75.1),
    "Fixed": (72.4, 77.4, 79.0, 80.0, 76.4),
}
# Single-signal selectors at 0.3: accuracy, macro F1, retention.
SIGNALS: dict[str, tuple[float, float, float]] = {
    "LATS": (80.2, 68.0, 67.4),
    "AttnEnt": (73.9, 57.3, 34.0),
    "NormBased": (73.1, 54.3, 21.1),
    "LocalCtr": (75.7, 57.1, 19.3),
}

Spread = tuple[float, float]
"""A mean over seeds and its deviation."""
ROBUSTNESS_METRICS: tuple[str, ...] = ("accuracy", "macro_f1", "balanced_accuracy", "retention")
ROBUSTNESS: dict[tuple[float, str], tuple[Spread | None, ...]] = {
    (0.1, "LATS"): ((77.77, 0.27), (67.08, 0.25), (65.89, 0.49), (28.9, 0.1)),
    (0.1, "Random"): ((75.75, 0.44), (59.50, 1.34), (55.39, 1.31), (9.9, 0.1)),
    (0.1, "ToMe"): ((75.94, 0.61), (60.96, 1.56), (56.90, 1.57), None),
    (0.3, "LATS"): ((80.38, 0.18), (69.17, 1.28), (66.40, 0.91), (67.4, 0.2)),
    (0.3, "Random"): ((76.57, 0.30), (60.95, 1.06), (56.72, 1.81), (29.7, 0.3)),
    (0.3, "ToMe"): ((76.93, 0.03), (61.92, 0.23), (57.81, 0.48), None),
    (0.5, "LATS"): ((79.78, 0.51), (67.61, 1.83), (64.14, 1.67), (85.8, 0.2)),
    (0.5, "Random"): ((76.74, 0.35), (61.68, 0.72), (57.15, 1.20), (49.9, 0.2)),
    (0.5, "ToMe"): ((77.13, 0.37), (62.82, 0.77), (58.73, 0.95), None),
}
# The main text's mask-free rows have balanced accuracy, the supplement's have precision and enrichment; the rest agrees.
MASK_FREE_METRICS: tuple[str, ...] = (*ROBUSTNESS_METRICS, "precision", "enrichment")
MASK_FREE_CONTROL: dict[float, tuple[Spread, ...]] = {
    0.1: ((66.5, 3.0), (51.2, 3.1), (51.6, 4.2), (19.5, 14.2), (63.1, 46.1), (2.00, 1.46)),
    0.3: ((73.2, 1.9), (55.9, 2.7), (54.3, 2.3), (46.6, 29.1), (49.7, 31.0), (1.57, 0.98)),
    0.5: ((74.8, 0.8), (56.7, 2.7), (53.9, 2.3), (62.7, 29.4), (39.6, 18.6), (1.25, 0.59)),
}
MASK_FREE_RETENTION_RANGE: dict[float, Spread] = {0.1: (3.1, 28.5), 0.3: (13.1, 66.0), 0.5: (29.3, 85.0)}
"""Smallest and largest retention over the three mask-free seeds."""
PAIRED_METRICS: tuple[str, ...] = ("accuracy", "macro_f1", "retention")
PAIRED: dict[tuple[float, str], tuple[Spread | None, ...]] = {
    (0.1, "Random"): ((2.02, 0.60), (7.58, 1.46), (19.03, 0.19)),
    (0.3, "Random"): ((3.80, 0.35), (8.22, 1.46), (37.63, 0.24)),
    (0.5, "Random"): ((3.05, 0.84), (5.93, 2.29), (35.82, 0.23)),
    (0.1, "ToMe"): ((1.84, 0.38), (6.12, 1.44), None),
    (0.3, "ToMe"): ((3.45, 0.16), (7.25, 1.25), None),
    (0.5, "ToMe"): ((2.66, 0.37), (4.79, 1.39), None),
}
"""LATS minus the named method, seed by seed."""

CLASSES: tuple[str, ...] = ("MEL", "NV", "BCC", "AK", "BKL", "DF", "VASC", "SCC")
SUBSETS: dict[str, tuple[int, ...]] = {
    "Full validation": (910, 2568, 673, 167, 516, 45, 60, 128),
    "Mask-overlap validation": (35, 120, 0, 0, 0, 0, 0, 0),
    "Mask-overlap training": (129, 488, 0, 0, 0, 0, 0, 0),
}
SUBSET_SIZES: dict[str, int] = {"Full validation": 5067, "Mask-overlap validation": 155, "Mask-overlap training": 617}
GRID_PATCHES = 256
# Lesion patches of the 155 validation masks, and the same in percent of the grid.
PREVALENCE: dict[str, tuple[float, float]] = {
    "Minimum": (6, 2.3),
    "25th percentile": (35, 13.7),
    "Median": (71, 27.7),
    "75th percentile": (104, 40.6),
    "Maximum": (248, 96.9),
    "Mean": (81.1, 31.6),
    "Standard deviation": (58.3, 22.8),
}
# Not in the paper; measured on its 155 masks: the ceiling, and the controls that need no model.
CEILING: dict[float, float] = {0.1: 29.3, 0.2: 52.3, 0.3: 69.0, 0.5: 87.1}
CONTROL_RETENTION: dict[str, dict[float, float]] = {
    "center": {0.1: 28.0, 0.3: 65.2, 0.5: 84.1},
    "darkness": {0.1: 24.3, 0.3: 59.5, 0.5: 79.4},
}


Row = tuple[str, float, str, float, float | None]
"""The paper's name of a method, budget, metric, value in percent, deviation over seeds where the paper has one."""


def _over_budgets(table: dict[str, tuple[float, ...]], budgets: tuple[float, ...]) -> Iterator[Row]:
    for method, values in table.items():
        yield from ((method, budget, "accuracy", value, None) for budget, value in zip(budgets, values))


def _over_seeds(method: str, budget: float, metrics: tuple[str, ...], cells: tuple[Spread | None, ...]) -> Iterator[Row]:
    yield from ((method, budget, metric, *cell) for metric, cell in zip(metrics, cells) if cell is not None)


_ROWS: dict[str, list[Row]] = {
    "main": [
        *_over_budgets(ISIC_SWEEP, BUDGETS),
        *((method, 0.3, "retention", row[-1], None) for method, row in MAIN.items() if row[-1] is not None),
    ],
    "robustness": [
        row for (budget, name), cells in ROBUSTNESS.items() for row in _over_seeds(name, budget, ROBUSTNESS_METRICS, cells)
    ],
    "mask-free": [
        row for budget, cells in MASK_FREE_CONTROL.items() for row in _over_seeds("LATS_mf", budget, MASK_FREE_METRICS, cells)
    ],
    "signals": [(name, 0.3, metric, value, None) for name, row in SIGNALS.items() for metric, value in zip(PAIRED_METRICS, row)],
    "curriculum": list(_over_budgets(CURRICULUM, MAIN_BUDGETS)),
    "kvasir": list(_over_budgets(KVASIR_SWEEP, BUDGETS)),
}
STUDIES: tuple[str, ...] = tuple(_ROWS)
"""The studies that the paper has numbers for."""
DATASETS: dict[str, str] = {"isic": "ISIC 2019", "kvasir": "Kvasir v2"}
"""The data sets of the paper, by the source of a manifest."""
_KEYS = ["method", "budget", "metric"]


def studies_of(source: str) -> tuple[str, ...]:
    """Return the studies that the paper has numbers for on images of this source; none for a data set that it does not use."""
    return tuple(study for study in STUDIES if source in DATASETS and (study == "kvasir") == (source == "kvasir"))


def table(study: str) -> pd.DataFrame:
    """Return the paper's numbers of one study: `method, budget, metric, paper, paper_sd` (NaN without deviation)."""
    if study not in STUDIES:
        raise UnknownNameError.of("study with numbers in the paper", study, STUDIES)
    numbers = pd.DataFrame(_ROWS[study], columns=[*_KEYS, "paper", "paper_sd"])
    return numbers.assign(method=numbers["method"].map(METHOD_NAMES)).astype({"paper": float, "paper_sd": float})


def prevalence_table() -> pd.DataFrame:
    """Return the paper's lesion sizes on its 155 masks: `statistic, patches, prevalence` (percent)."""
    return pd.DataFrame([{"statistic": s, "patches": p, "prevalence": v} for s, (p, v) in PREVALENCE.items()])


def beside_paper(results: pd.DataFrame, study: str, controls: bool = True) -> pd.DataFrame:
    """Put our results of `study` beside the paper's, in its units.

    Columns `dataset, method, budget, metric, paper, paper_sd, ours, ours_sd, seeds, difference`; `ours` is the mean over seeds,
    `ours_sd` the deviation over them (ddof = 1), NaN where we or the paper have no number. With `controls`, methods that the
    paper lacks (oracle, center, ...) stand there too, at the budgets and metrics of the paper's table.
    """
    theirs = table(study)
    ours = results[(results["study"] == study) & (results["view"] == AS_IS)]
    if ours.empty:
        raise RequestError(f"The results have no rows of study '{study}'. Run `mtb reproduce --study {study}` first.")
    parts = [_beside(part, theirs, controls).assign(dataset=name) for name, part in ours.groupby("dataset", sort=False)]
    columns = ["dataset", *_KEYS, "paper", "paper_sd", "ours", "ours_sd", "seeds", "difference"]
    return pd.concat(parts, ignore_index=True)[columns]


def _beside(results: pd.DataFrame, theirs: pd.DataFrame, controls: bool) -> pd.DataFrame:
    metrics = list(dict.fromkeys(theirs["metric"]))
    long = results.melt(id_vars=["method", "seed", "budget"], value_vars=metrics, var_name="metric").dropna(subset="value")
    long["budget"] = long["budget"].round(6)
    long["value"] *= long["metric"].map(lambda metric: 1.0 if metric == "enrichment" else 100.0)  # the paper's unit
    ours = long.groupby(_KEYS, sort=False)["value"].agg(ours="mean", ours_sd="std", seeds="count").reset_index()
    joined = theirs.merge(ours, on=_KEYS, how="outer" if controls else "left", sort=False)
    wanted = set(zip(theirs["budget"], theirs["metric"]))
    joined = joined[[pair in wanted for pair in zip(joined["budget"], joined["metric"])]]
    # An outer merge sorts its keys; put the paper's methods first, in its order, then ours.
    order = {name: i for i, name in enumerate(dict.fromkeys([*theirs["method"], *results["method"]]))}
    rank = {name: i for i, name in enumerate(metrics)}
    joined = joined.assign(_m=joined["method"].map(order), _r=joined["metric"].map(rank)).sort_values(["_r", "_m", "budget"])
    joined["seeds"] = joined["seeds"].fillna(0).astype(int)
    return joined.drop(columns=["_m", "_r"]).assign(difference=joined["ours"] - joined["paper"])


def comparison(results: pd.DataFrame) -> str:
    """Write the paper's number, this run's and the difference as plain text, for every study that the paper has a table of."""
    original = results[results["view"] == AS_IS]
    parts = []
    for study in (name for name in dict.fromkeys(original["study"]) if name in STUDIES):
        for dataset, rows in beside_paper(original, study).groupby("dataset", sort=False):
            source = "Kvasir v2" if study == "kvasir" else "ISIC 2019"
            parts.append(f"Study {study} on {dataset}, in percent (paper: {source} with DINOv2 ViT-B/14)\n{_aligned(rows)}")
    return "\n\n".join(parts)


def _aligned(rows: pd.DataFrame) -> str:
    lines = [f"{'method':<28}{'budget':>7}  {'metric':<20}{'paper':>14}{'this run':>14}{'difference':>12}"]
    cells: list[dict[str, Any]] = rows.to_dict("records")  # type: ignore[assignment]
    for row in cells:
        difference = NOT_MEASURED if pd.isna(row["difference"]) else f"{row['difference']:+.1f}"
        ours, theirs = _spread(row["ours"], row["ours_sd"]), _spread(row["paper"], row["paper_sd"])
        lines.append(f"{row['method']:<28}{row['budget']:>7g}  {row['metric']:<20}{theirs:>14}{ours:>14}{difference:>12}")
    return "\n".join(lines)


def _spread(value: Any, deviation: Any) -> str:
    if pd.isna(value):
        return NOT_MEASURED
    return f"{value:.1f}" if pd.isna(deviation) else f"{value:.1f} ± {deviation:.1f}"
