"""Retention by lesion size and by class: a pooled mean hides the small lesions, which weigh little in it.

Kept apart from the sweep because strata are cut from `predictions.parquet` afterwards, never measured on their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from medtokenbudget.errors import RequestError
from medtokenbudget.runs.statistics import DRAWS, LEVEL, intervals, lesion_rows
from medtokenbudget.metrics import ratio, reachable

QUARTILES: tuple[str, ...] = ("smallest", "small", "large", "largest")
COLUMNS: tuple[str, ...] = (
    *("study", "dataset", "view", "method", "budget", "stratum", "smallest", "largest", "n", "seeds"),
    *("ceiling", "retention", "low", "high", "retention_of_ceiling", "share_low", "share_high"),
)
_CELL = ["study", "dataset", "view", "method", "budget"]


def quartile_edges(predictions: pd.DataFrame) -> np.ndarray:
    """[5] minimum, quartiles and maximum of the lesion patches over the images (each once) of one dataset."""
    sizes = lesion_rows(predictions).drop_duplicates("image_id")["lesion"].to_numpy(float)
    if not len(sizes):
        raise RequestError("No image in these predictions has a lesion mask and kept patches, so there is nothing to stratify.")
    return np.quantile(sizes, [0, 0.25, 0.5, 0.75, 1])


def by_lesion_size(predictions: pd.DataFrame, draws: int = DRAWS, seed: int = 0, level: float = LEVEL) -> pd.DataFrame:
    """Retention in the four quartiles of lesion size, with the edges of each dataset's images.

    A quartile holds the sizes above its lower edge up to its upper edge; the first holds the minimum too. Lesions of one size
    stay together, so the quartiles need not be equally full. Columns: `COLUMNS`.
    """
    parts = []
    for _, dataset in lesion_rows(predictions).groupby(["dataset", "view"], sort=False):
        edges = quartile_edges(dataset)
        index = np.searchsorted(edges[1:-1], dataset["lesion"].to_numpy(float), side="left")
        parts.append(dataset.assign(stratum=np.asarray(QUARTILES)[index]))
    return _by_stratum(parts, QUARTILES, draws, seed, level)


def by_class(
    predictions: pd.DataFrame, classes: Sequence[str], draws: int = DRAWS, seed: int = 0, level: float = LEVEL
) -> pd.DataFrame:
    """Retention in each class that has masks. Columns: `COLUMNS`."""
    rows = lesion_rows(predictions)
    rows = rows[rows["label"] >= 0]
    named = rows.assign(stratum=np.asarray(classes, dtype=object)[rows["label"].to_numpy(int)])
    return _by_stratum([named], classes, draws, seed, level)


def by_attribute(
    predictions: pd.DataFrame,
    attribute: pd.Series[Any],
    order: Sequence[str],
    draws: int = DRAWS,
    seed: int = 0,
    level: float = LEVEL,
) -> pd.DataFrame:
    """Retention by a property of the images: `attribute` maps `image_id` to a stratum, None to leave the image out."""
    rows = lesion_rows(predictions)
    named = rows.assign(stratum=rows["image_id"].map(attribute))
    return _by_stratum([named[named["stratum"].notna()]], order, draws, seed, level)


def _by_stratum(parts: list[pd.DataFrame], order: Sequence[str], draws: int, seed: int, level: float) -> pd.DataFrame:
    if not parts or not any(len(part) for part in parts):
        return pd.DataFrame(columns=list(COLUMNS))
    rows = pd.concat(parts, ignore_index=True)
    keys = [*_CELL, "stratum"]
    rows["_best"] = reachable(rows["lesion"].to_numpy(int), rows["k"].to_numpy(int))
    facts = rows.groupby(keys, sort=False).agg(
        smallest=("lesion", "min"), largest=("lesion", "max"), _best=("_best", "sum"), _lesion=("lesion", "sum")
    )
    facts["ceiling"] = ratio(facts["_best"], facts["_lesion"])
    pieces = []
    # Each stratum is resampled on its own: its size is a fact of the cut, not of the draw.
    for _, stratum in rows.groupby("stratum", sort=False):
        pieces.append(intervals(stratum, ("retention", "retention_of_ceiling"), keys, draws, seed, level))
    found = pd.concat(pieces, ignore_index=True)
    pooled = found[found["metric"] == "retention"].rename(columns={"value": "retention"})
    share = found[found["metric"] == "retention_of_ceiling"]
    share = share.rename(columns={"value": "retention_of_ceiling", "low": "share_low", "high": "share_high"})
    table = pooled.merge(share[[*keys, "retention_of_ceiling", "share_low", "share_high"]], on=keys)
    table = table.merge(facts.reset_index(), on=keys)
    first = {key: i for i, key in enumerate(rows[_CELL].drop_duplicates().itertuples(index=False, name=None))}
    rank = {name: i for i, name in enumerate(order)}
    table["_cell"] = [first[key] for key in table[_CELL].itertuples(index=False, name=None)]
    table["_rank"] = table["stratum"].map(rank)
    return table.sort_values(["_cell", "_rank"], ignore_index=True)[list(COLUMNS)]
