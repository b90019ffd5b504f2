"""Results as a few lines of plain text, for the end of a command."""

from __future__ import annotations

from typing import Any

import pandas as pd

from medtokenbudget.runs import paper
from medtokenbudget.runs.results import AS_IS

NOT_MEASURED = "—"
_COLUMNS = {"accuracy": "accuracy", "macro_f1": "macro F1", "retention": "retention", "retention_of_ceiling": "of ceiling"}


def headline(results: pd.DataFrame, budget: float = 0.3) -> str:
    """Every method on the original images at one budget, as the mean over seeds.

    Args:
        results: `results.csv` as a table.
        budget: Token budget; if it was not measured, the nearest one is shown.
    """
    rows = results[results["view"] == AS_IS]
    if rows.empty:
        return "No results."
    nearest = min(rows["budget"].unique(), key=lambda measured: (abs(measured - budget), measured))
    rows = rows[rows["budget"] == nearest]
    table = rows.groupby("method", sort=False)[list(_COLUMNS)].mean()
    width = max(22, 2 + max(len(str(method)) for method in table.index))
    head = f"{'budget ' + format(nearest, 'g'):<{width}}" + "".join(f"{name:>12}" for name in _COLUMNS.values())
    lines = [head]
    for method, row in table.iterrows():
        cells = [NOT_MEASURED if pd.isna(value) else f"{value:.1%}" for value in row]
        lines.append(f"{method!s:<{width}}" + "".join(f"{cell:>12}" for cell in cells))
    counts = rows.groupby("method", sort=False)["n"].max()
    fewer = "".join(f"; {method} classified {n:,}" for method, n in counts.items() if n < counts.max())
    lines.append(f"n = {int(counts.max()):,} images, {int(rows['n_masked'].max()):,} with a lesion mask{fewer}")
    return "\n".join(lines)


def comparison(results: pd.DataFrame) -> str:
    """The paper's number, this run's and the difference, for every study that the paper has a table of."""
    original = results[results["view"] == AS_IS]
    parts = []
    for study in dict.fromkeys(original["study"]):
        if study not in paper.STUDIES:
            continue
        table = paper.beside_paper(original, study)
        for dataset, rows in table.groupby("dataset", sort=False):
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
