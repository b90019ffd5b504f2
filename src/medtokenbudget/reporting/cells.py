"""What the tables share: names of measures, counts and seeds as text, and which value of a column is the best."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import pandas as pd

from medtokenbudget.reporting.looks import is_reference
from medtokenbudget.reporting.numbers import NOT_MEASURED, is_missing, number, with_deviation

METRIC_NAMES = {
    "accuracy": "Accuracy (%)",
    "macro_f1": "Macro F1 (%)",
    "balanced_accuracy": "Bal. acc. (%)",
    "retention": "Retention (%)",
    "retention_mean": "Per image (%)",
    "retention_of_ceiling": "Of ceiling (%)",
    "precision": "Precision (%)",
    "enrichment": "Enrichment (×)",
    "macro_auroc": "AUROC (%)",
    "ece": "ECE (%)",
    "purity": "Purity (%)",
    "lesion_dominated": "Domin. (%)",
    "lesion_mass": "Mass (%)",
}
BOLD_NOTE = "Bold: best value, not counting NoPruning and Oracle."
INTERVAL_NOTE = "Brackets: 95% bootstrap interval over groups of images."
_MOST_BOLD = 2
"""A value that more methods than this share is not marked as the best."""


def plain_name(metric: str) -> str:
    """The name of a measure without its unit."""
    return METRIC_NAMES[metric].rpartition(" (")[0]


def seeds_note(results: pd.DataFrame) -> str:
    """The seeds behind a table, as a sentence."""
    seeds = sorted(int(seed) for seed in results["seed"].unique())
    text = ", ".join(map(str, seeds))
    return f"One training run per method (seed {text})." if len(seeds) == 1 else f"Mean over seeds {text}."


def counts(results: pd.DataFrame, method: str) -> str:
    """`400 (155)`: labeled images, and images that retention was measured on."""
    rows = results[results["method"] == method]
    return f"{int(rows['n'].max()):,} ({int(rows['n_masked'].max()):,})" if len(rows) else NOT_MEASURED


def mean_text(metric: str, mean: float, deviation: float) -> str:
    """A mean over seeds with its deviation, in the unit of the metric."""
    if metric == "enrichment":
        text = number(mean)
        return text if text == NOT_MEASURED or is_missing(deviation) else f"{text} ± {number(deviation)}"
    return with_deviation(mean, deviation, 1)


def best(methods: Sequence[str], values: dict[tuple[str, int], float], columns: Iterable[int]) -> frozenset[tuple[int, int]]:
    """(row, column) of the largest value in each column as printed, ties included; references do not compete.

    Args:
        methods: The method of each row.
        values: (method, column) -> value.
        columns: Columns to look at.
    """
    found = set()
    for column in columns:
        candidates = {
            r: round(values[m, column], 3)
            for r, m in enumerate(methods)
            if not is_reference(m) and not is_missing(values[m, column])
        }
        if len(candidates) > 1 and len(set(candidates.values())) > 1:
            top = max(candidates.values())
            winners = {(r, column) for r, value in candidates.items() if value == top}
            found |= winners if len(winners) <= _MOST_BOLD else set()
    return frozenset(found)
