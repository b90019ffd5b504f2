"""Results as a few lines of plain text, for the end of a command."""

from __future__ import annotations

from typing import Any

import pandas as pd

from medtokenbudget.experiments import paper
from medtokenbudget.experiments.results import AS_IS


def headline(results: pd.DataFrame, budget: float = 0.3) -> str:
    """Every method at one budget on the images as they are: accuracy, macro F1, and what it kept of the lesion."""
    rows = results[(results["budget"] == budget) & (results["view"] == AS_IS)]
    columns = ["accuracy", "macro_f1", "retention", "retention_of_ceiling"]
    table = rows.groupby("method", sort=False)[columns].mean()
    lines = [f"{'at budget ' + format(budget, 'g'):<22}{'accuracy':>10}{'macro F1':>10}{'retention':>11}{'of ceiling':>12}"]
    for method, row in table.iterrows():
        cells = ["—" if pd.isna(value) else f"{value:.1%}" for value in row]
        lines.append(f"{method!s:<22}{cells[0]:>10}{cells[1]:>10}{cells[2]:>11}{cells[3]:>12}")
    return "\n".join(lines)


def comparison(results: pd.DataFrame) -> str:
    """The paper's number, ours and the difference, for every study that the paper has a table of."""
    parts = []
    for study in dict.fromkeys(results["study"]):
        if study not in paper.STUDIES:
            continue
        table = paper.beside_paper(results, study)
        for dataset, rows in table.groupby("dataset", sort=False):
            parts.append(f"{study} on {dataset} (the paper: ISIC 2019 with DINOv2 ViT-B/14; percent)\n{_aligned(rows)}")
    return "\n\n".join(parts)


def _aligned(rows: pd.DataFrame) -> str:
    lines = [f"{'method':<28}{'budget':>7}  {'metric':<20}{'paper':>14}{'ours':>14}{'difference':>12}"]
    cells: list[dict[str, Any]] = rows.to_dict("records")  # type: ignore[assignment]
    for row in cells:
        difference = "—" if pd.isna(row["difference"]) else f"{row['difference']:+.1f}"
        ours, theirs = _spread(row["ours"], row["ours_sd"]), _spread(row["paper"], row["paper_sd"])
        lines.append(f"{row['method']:<28}{row['budget']:>7g}  {row['metric']:<20}{theirs:>14}{ours:>14}{difference:>12}")
    return "\n".join(lines)


def _spread(value: Any, deviation: Any) -> str:
    if pd.isna(value):
        return "—"
    return f"{value:.1f}" if pd.isna(deviation) else f"{value:.1f} ± {deviation:.1f}"
