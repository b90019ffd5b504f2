"""The paper's tables, and our results next to them.

`paper.csv` has every number of the paper once, in percent as printed there (enrichment is a ratio, lesion sizes are patches), with
our names of the methods. Deviations are over seeds, with ddof = 1.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pandas as pd

from medtokenbudget.errors import RequestError, UnknownNameError
from medtokenbudget.measures import NOT_MEASURED, number, with_spread
from medtokenbudget.runs.run import AS_IS

MAIN_BUDGETS: tuple[float, ...] = (0.1, 0.2, 0.3, 0.5, 1.0)
STUDIES: tuple[str, ...] = ("main", "robustness", "mask-free", "signals", "curriculum", "kvasir")
"""The studies that the paper has numbers for."""
DATASETS: dict[str, str] = {"isic": "ISIC 2019", "kvasir": "Kvasir v2"}
"""The data sets of the paper, by the source of a manifest."""
_KEYS = ["method", "budget", "metric"]


@cache
def _numbers() -> pd.DataFrame:
    return pd.read_csv(Path(__file__).with_name("paper.csv"))


def studies_of(source: str) -> tuple[str, ...]:
    """Return the studies that the paper has numbers for on images of this source; none for a data set that it does not use."""
    return tuple(study for study in STUDIES if source in DATASETS and (study == "kvasir") == (source == "kvasir"))


def table(study: str) -> pd.DataFrame:
    """Return the paper's numbers of one study: `method, budget, metric, paper, paper_sd` (NaN without deviation)."""
    if study not in STUDIES:
        raise UnknownNameError.of("study with numbers in the paper", study, STUDIES)
    rows = _numbers().query("table == @study").drop(columns="table").reset_index(drop=True)
    return rows.rename(columns={"name": "method", "value": "paper", "deviation": "paper_sd"})


def prevalence_table() -> pd.DataFrame:
    """Return the paper's lesion sizes on its 155 masks: `statistic, patches, prevalence` (percent of the 256 patches)."""
    rows = _numbers().query("table == 'prevalence'").pivot_table("value", "name", "metric", sort=False)
    return rows[["patches", "prevalence"]].rename_axis(index="statistic", columns=None).reset_index()


def subsets() -> dict[str, dict[str, int]]:
    """Return the paper's images per class, in the whole validation part and among images with a mask."""
    rows = _numbers().query("table == 'subset'").astype({"value": int})
    return {str(part): dict(zip(group["metric"], group["value"])) for part, group in rows.groupby("name", sort=False)}


def beside_paper(results: pd.DataFrame, study: str) -> pd.DataFrame:
    """Join our results of `study` with the paper's, in its units.

    Columns `dataset, method, budget, metric, paper, paper_sd, ours, ours_sd, seeds, difference`; `ours` is the mean over seeds,
    `ours_sd` the deviation over them (ddof = 1), NaN where we or the paper have no number. Methods that the paper lacks (oracle,
    center, ...) have rows too, at the budgets and metrics of the paper's table.
    """
    theirs = table(study)
    ours = results[(results["study"] == study) & (results["view"] == AS_IS)]
    if ours.empty:
        raise RequestError(f"The results have no rows of study '{study}'. Run it first with `mtb reproduce` and `study`.")
    parts = [_joined(part, theirs).assign(dataset=name) for name, part in ours.groupby("dataset", sort=False)]
    return pd.concat(parts, ignore_index=True)[["dataset", *_KEYS, "paper", "paper_sd", "ours", "ours_sd", "seeds", "difference"]]


def _joined(results: pd.DataFrame, theirs: pd.DataFrame) -> pd.DataFrame:
    metrics = list(dict.fromkeys(theirs["metric"]))
    long = results.melt(id_vars=["method", "seed", "budget"], value_vars=metrics, var_name="metric").dropna(subset="value")
    # 0.1 + 0.2 is not 0.3: unrounded, budgets that were computed would not meet the paper's.
    long["budget"] = long["budget"].round(6)
    long["value"] *= long["metric"].map(lambda metric: 1.0 if metric == "enrichment" else 100.0)  # the paper's unit
    ours = long.groupby(_KEYS, sort=False)["value"].agg(ours="mean", ours_sd="std", seeds="count").reset_index()
    joined = theirs.merge(ours, on=_KEYS, how="outer", sort=False)
    wanted = set(zip(theirs["budget"], theirs["metric"]))
    joined = joined[[pair in wanted for pair in zip(joined["budget"], joined["metric"])]]
    # An outer merge sorts its keys; put the paper's methods first, in its order, then ours.
    order = {name: i for i, name in enumerate(dict.fromkeys([*theirs["method"], *results["method"]]))}
    rank = {name: i for i, name in enumerate(metrics)}
    joined = joined.assign(_m=joined["method"].map(order), _r=joined["metric"].map(rank)).sort_values(["_r", "_m", "budget"])
    joined["seeds"] = joined["seeds"].fillna(0).astype(int)
    return joined.drop(columns=["_m", "_r"]).assign(difference=joined["ours"] - joined["paper"])


def comparison(results: pd.DataFrame, source: str) -> str:
    """Write the paper's number, this run's and the difference as plain text, for every study that the paper has a table of.

    Empty for images of another source than the paper's: on drawn ones its accuracy says nothing.
    """
    original = results[results["view"] == AS_IS]
    parts = []
    for study in (name for name in dict.fromkeys(original["study"]) if name in studies_of(source)):
        for dataset, rows in beside_paper(original, study).groupby("dataset", sort=False):
            theirs = DATASETS["kvasir" if study == "kvasir" else "isic"]
            parts.append(f"Study {study} on {dataset}, in percent (paper: {theirs} with DINOv2 ViT-B/14)\n{_aligned(rows)}")
    return "\n\n".join(parts)


def _aligned(rows: pd.DataFrame) -> str:
    lines = [f"{'method':<28}{'budget':>7}  {'metric':<20}{'paper':>14}{'this run':>14}{'difference':>12}"]
    row: Any
    for row in rows.itertuples():
        difference = NOT_MEASURED if pd.isna(row.difference) else f"{row.difference:+.1f}"
        pairs = ((row.ours, row.ours_sd), (row.paper, row.paper_sd))
        ours, theirs = (with_spread(number(value, 1), number(deviation, 1)) for value, deviation in pairs)
        lines.append(f"{row.method:<28}{row.budget:>7g}  {row.metric:<20}{theirs:>14}{ours:>14}{difference:>12}")
    return "\n".join(lines)
