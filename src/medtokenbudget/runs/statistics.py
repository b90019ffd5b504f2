"""How sure the numbers are: bootstrap over groups, paired permutation tests with Holm's correction, deviation over seeds.

Then retention by stratum, and the supplement's model of it.

Every metric here is a function of sums over images, so a draw is a row of group weights times a table of group sums, and ten
thousand draws are one matrix product. Sampling error (which images) and seed deviation (which training) are never mixed: a
bootstrap or permutation draw keeps all seeds and averages the metric over them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike, NDArray
from scipy.optimize import minimize_scalar
from scipy.special import ndtr, ndtri

from medtokenbudget.errors import RequestError, UnknownNameError
from medtokenbudget.measures import METRICS, Statistic
from medtokenbudget.metrics import Floats, ratio, reachable

DRAWS = 10_000
LEVEL = 0.95
METHOD_KEYS: tuple[str, ...] = ("study", "dataset", "view", "method", "budget")
_GROUP = "group number"  # a column of this module alone
_BLOCK_BYTES = 2_000_000


STATISTICS: dict[str, Statistic] = {name: metric.sums for name, metric in METRICS.items() if metric.sums is not None}
"""The metrics that have intervals and tests."""


def statistic(metric: str) -> Statistic:
    if metric not in STATISTICS:
        raise UnknownNameError.of("metric with intervals", metric, STATISTICS)
    return STATISTICS[metric]


def lesion_rows(predictions: pd.DataFrame) -> pd.DataFrame:
    """Return the rows that retention is measured on: kept patches known, at least one lesion patch; lesion counts as integers."""
    rows = predictions[predictions["kept_lesion"].notna().to_numpy() & (predictions["lesion"].fillna(0) > 0).to_numpy(bool)]
    return rows.assign(lesion=rows["lesion"].astype(int))


def _with_groups(predictions: pd.DataFrame) -> pd.DataFrame:
    """Number the group of each row, in the order of names; an image without a group is a group of its own."""
    alone, named = "image:" + predictions["image_id"].astype(str), "group:" + predictions["group"].astype(str)
    names = np.where(predictions["group"].isna(), alone, named).astype(np.str_)
    return predictions.assign(**{_GROUP: np.unique(names, return_inverse=True)[1]})


def _groups(frame: pd.DataFrame) -> NDArray[np.int64]:
    return frame[_GROUP].to_numpy(np.int64)


def _group_sums(frame: pd.DataFrame, terms: Floats, groups: NDArray[np.int64]) -> Floats:
    sums = np.zeros((len(groups), terms.shape[1]))
    np.add.at(sums, np.searchsorted(groups, _groups(frame)), terms)
    return sums


def _blocks(groups: int, draws: int) -> Iterator[int]:
    block = max(1, _BLOCK_BYTES // (8 * max(groups, 1)))
    yield from (min(block, draws - start) for start in range(0, draws, block))


def resample(groups: int, draws: int, seed: int) -> Iterator[Floats]:
    """Yield blocks of bootstrap weights, together [draws, groups]: how often each group was drawn; every row sums to `groups`."""
    rng = np.random.default_rng(seed)
    for rows in _blocks(groups, draws):
        picks = rng.integers(0, groups, (rows, groups))
        # Each row counts in a range of its own, so that one bincount serves the whole block.
        picks += groups * np.arange(rows)[:, None]
        yield np.bincount(picks.ravel(), minlength=rows * groups).reshape(rows, groups).astype(float)


def _bootstrap(tables: Sequence[Floats], draws: int, seed: int) -> list[Floats]:
    """Return the sums of each table of group sums [G, S] in every draw [draws, S]; all tables see the same draws."""
    widths = np.cumsum([table.shape[1] for table in tables])[:-1]
    stacked = np.concatenate(tables, 1)
    # Whole numbers below 2**24 are exact in single precision, at twice the speed.
    whole = bool((stacked % 1 == 0).all()) and len(stacked) * np.abs(stacked).max(initial=0) < 2**24
    factor: NDArray[Any] = stacked.astype(np.float32 if whole else np.float64)
    blocks: list[NDArray[Any]] = [weights.astype(factor.dtype) @ factor for weights in resample(len(stacked), draws, seed)]
    sums = np.concatenate(blocks).astype(float)
    return np.split(sums, widths, axis=1)


def _interval(values: Floats) -> tuple[float, float]:
    """Return the percentile interval; a draw in which nothing could be measured is left out."""
    # Such draws come up where few images have a lesion: a group sample without any of them has no retention.
    values = values[~np.isnan(values)]
    if not len(values):
        return float("nan"), float("nan")
    low, high = np.quantile(values, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)


def _families(predictions: pd.DataFrame, metrics: Sequence[str]) -> Iterator[tuple[list[str], pd.DataFrame, int]]:
    """Group the metrics by the terms that they share, so that each table is drawn once; with the rows they are measured on.

    The last number is that of the classes.
    """
    classes = int(predictions[["label", "predicted"]].to_numpy(int).max(initial=-1)) + 1
    grouped = _with_groups(predictions)
    families: dict[Any, list[str]] = {}
    for name in metrics:
        families.setdefault(statistic(name).terms, []).append(name)
    for family in families.values():
        labeled = METRICS[family[0]].scope == "labels"
        yield family, grouped[grouped["label"] >= 0] if labeled else lesion_rows(grouped), classes


def intervals(
    predictions: pd.DataFrame,
    metrics: Sequence[str] = ("accuracy", "macro_f1", "balanced_accuracy", "retention"),
    by: Sequence[str] = METHOD_KEYS,
    draws: int = DRAWS,
    seed: int = 0,
) -> pd.DataFrame:
    """Compute bootstrap intervals of every cell and metric: `*by, metric, value, low, high, n, groups, seeds`.

    Images of one group are drawn together. A cell with several seeds has the mean of the metric over them. All cells of one
    dataset and view share their draws. What a cell does not measure (retention of a merger) has no row.
    """
    rows: list[dict[str, Any]] = []
    for family, measured, classes in _families(predictions, metrics):
        for _, dataset in measured.groupby(["dataset", "view"], sort=False):
            rows += _cell_intervals(dataset, family, by, classes, draws, seed)
    columns = [*by, "metric", "value", "low", "high", "n", "groups", "seeds"]
    return pd.DataFrame(rows, columns=columns).sort_values(
        "metric", key=lambda c: c.map(list(metrics).index), kind="stable", ignore_index=True
    )


def _cell_intervals(
    dataset: pd.DataFrame, family: Sequence[str], by: Sequence[str], classes: int, draws: int, seed: int
) -> list[dict[str, Any]]:
    groups = np.unique(_groups(dataset))
    terms = statistic(family[0]).terms
    cells: dict[Any, list[int]] = {}
    parts: list[pd.DataFrame] = []
    for key, part in dataset.groupby([*by, "seed"], sort=False):
        cells.setdefault(key[:-1], []).append(len(parts))
        parts.append(part)
    tables = [_group_sums(part, terms(part, classes), groups) for part in parts]
    drawn = _bootstrap(tables, draws, seed)
    rows = []
    for metric in family:
        value_of = statistic(metric).value
        for key, seeds in cells.items():
            low, high = _interval(np.mean([value_of(drawn[i]) for i in seeds], axis=0))
            value = float(np.mean([value_of(tables[i].sum(0)) for i in seeds]))
            first = parts[seeds[0]]
            count = {"n": len(first), "groups": len(np.unique(_groups(first))), "seeds": len(seeds)}
            rows.append(dict(zip(by, key)) | {"metric": metric, "value": value, "low": low, "high": high} | count)
    return rows


def permutation_p(observed: float, permuted: Floats) -> float:
    """Return the two-sided p: the share of draws at least as far from 0 as what was observed, which counts as a draw itself."""
    slack = 1e-12 * max(1.0, abs(observed))  # equal draws must count as equal after rounding
    return float((1 + (np.abs(permuted) >= abs(observed) - slack).sum()) / (1 + len(permuted)))


def holm(p: Sequence[float] | Floats) -> Floats:
    """Adjust p by Holm's step-down correction, which controls the family-wise error. NaN stays and is not counted."""
    values = np.asarray(p, float)
    adjusted = np.full(values.shape, np.nan)
    # NaN sorts last, so the first ones are the numbers.
    order = np.argsort(values, kind="stable")[: int((~np.isnan(values)).sum())]
    steps = values[order] * (len(order) - np.arange(len(order)))
    adjusted[order] = np.minimum(1.0, np.maximum.accumulate(steps))
    return adjusted


COMPARISON_COLUMNS: tuple[str, ...] = (
    *("study", "dataset", "view", "method_a", "method_b", "budget", "metric"),
    *("difference", "low", "high", "p", "p_holm", "n", "groups", "seeds"),
)


def compare(
    predictions: pd.DataFrame,
    reference: str,
    metrics: Sequence[str] = ("accuracy", "macro_f1", "balanced_accuracy", "retention"),
    budgets: Sequence[float] | None = None,
    draws: int = DRAWS,
    seed: int = 0,
) -> pd.DataFrame:
    """Compare `reference` with every other method, paired by image and seed: difference, interval, permutation p and Holm's p.

    A permutation draw exchanges the two methods within whole groups, in all seeds at once, so that for accuracy and retention
    it flips the signs of the per-image differences averaged over seeds. The interval is the bootstrap's. Only images and seeds
    that both methods have count. Holm's family is all comparisons of one (study, dataset, view, metric).
    """
    if reference not in set(predictions["method"]):
        raise UnknownNameError.of("method in these predictions", reference, set(predictions["method"]))
    if budgets is not None:
        predictions = predictions[np.isclose(predictions["budget"].to_numpy()[:, None], np.asarray(budgets)).any(1)]
    rows: list[dict[str, Any]] = []
    for family, measured, classes in _families(predictions, metrics):
        for key, cell in measured.groupby(["study", "dataset", "view", "budget"], sort=False):
            where = dict(zip(("study", "dataset", "view", "budget"), key)) | {"method_a": reference}
            rows += [where | row for row in _compare_cell(cell, reference, family, classes, draws, seed)]
    table = pd.DataFrame(rows, columns=list(COMPARISON_COLUMNS))
    families = table.groupby(["study", "dataset", "view", "metric"], sort=False)["p"]
    table["p_holm"] = families.transform(lambda p: holm(p.to_numpy())) if len(table) else table["p_holm"]
    order = {name: i for i, name in enumerate(metrics)}
    return table.sort_values("metric", key=lambda c: c.map(order), kind="stable", ignore_index=True)


def ranking(predictions: pd.DataFrame, metric: str, draws: int = DRAWS) -> pd.DataFrame:
    """Rank the methods of one cell on the images that all of them have: `method, value, low, high, first, last, tie, n, groups`.

    Every pair is tested, with Holm's correction over all pairs. The rank of a method is an interval: `first` is the best place that
    the tests leave open, `last` the worst. `tie` numbers groups from the best: a method opens a new one when it is lower than the
    best of the group with p < 0.05, so that the order inside a group means nothing.
    """
    methods = list(dict.fromkeys(predictions["method"]))
    rows = predictions if METRICS[metric].scope == "labels" else lesion_rows(predictions)
    shared = set.intersection(*(set(of["image_id"]) for _, of in rows.groupby("method"))) if len(rows) else set()
    rows = rows[rows["image_id"].isin(shared)]
    table = intervals(rows, (metric,), ("method",), draws).sort_values("value", ascending=False, kind="stable", ignore_index=True)
    order = list(table["method"])
    pairs = [compare(rows[rows["method"].isin(order[i:])], name, (metric,), draws=draws) for i, name in enumerate(order[:-1])]
    tests = pd.concat(pairs, ignore_index=True) if pairs else pd.DataFrame(columns=list(COMPARISON_COLUMNS))
    tests = tests.assign(p_holm=holm(tests["p"].to_numpy(float)))
    clear = tests[(tests["p_holm"] < 1 - LEVEL) & (tests["difference"] > 0)]
    beats = set(zip(clear["method_a"], clear["method_b"]))
    table["first"] = [1 + sum((other, name) in beats for other in order) for name in order]
    table["last"] = [len(order) - sum((name, other) in beats for other in order) for name in order]
    leader = ""
    ties: list[int] = []
    for name in order:
        if not ties or (leader, name) in beats:
            ties.append(ties[-1] + 1 if ties else 1)
            leader = name
        else:
            ties.append(ties[-1])
    missing = [name for name in methods if name not in order]
    return pd.concat([table.assign(tie=ties), pd.DataFrame({"method": missing})], ignore_index=True)


def _compare_cell(
    cell: pd.DataFrame, reference: str, family: Sequence[str], classes: int, draws: int, seed: int
) -> Iterator[dict[str, Any]]:
    """Yield all comparisons at one budget; methods that share the same images and seeds with the reference share their draws."""
    methods = dict(list(cell.groupby("method", sort=False)))
    if reference not in methods:
        return
    shared: dict[tuple[frozenset[str], tuple[int, ...]], list[str]] = {}
    # Oracle classifies only images with a mask: a difference over other images would say nothing.
    for name, frame in methods.items():
        images = frozenset(frame["image_id"]) & frozenset(methods[reference]["image_id"])
        both = sorted(set(frame["seed"]) & set(methods[reference]["seed"]))
        if name != reference and images and both:
            shared.setdefault((images, tuple(both)), []).append(str(name))
    terms = statistic(family[0]).terms
    for (images, seeds), opponents in shared.items():
        frames = {name: methods[name][methods[name]["image_id"].isin(images)] for name in [reference, *opponents]}
        groups = np.unique(_groups(frames[reference]))
        tables = []
        for frame in frames.values():
            parts = [frame[frame["seed"] == number] for number in seeds]
            tables.append(np.stack([_group_sums(part, terms(part, classes), groups) for part in parts], 1))  # [G, seeds, S]
        drawn = [d.reshape(draws, len(seeds), -1) for d in _bootstrap([t.reshape(len(groups), -1) for t in tables], draws, seed)]
        of_reference = {metric: statistic(metric).value(drawn[0]) for metric in family}
        count = {"n": len(images), "groups": len(groups), "seeds": len(seeds)}
        for index, name in enumerate(opponents, start=1):
            # Another stream of random numbers than the bootstrap's.
            permuted = _exchange(tables[0], tables[index], draws, seed + 1)
            for metric in family:
                value = statistic(metric).value
                difference = float((value(tables[0].sum(0)) - value(tables[index].sum(0))).mean())
                low, high = _interval((of_reference[metric] - value(drawn[index])).mean(1))
                p = permutation_p(difference, (value(permuted[0]) - value(permuted[1])).mean(1))
                numbers = {"difference": difference, "low": low, "high": high, "p": p}
                yield {"method_b": name, "metric": metric} | numbers | count


def _exchange(a: Floats, b: Floats, draws: int, seed: int) -> tuple[Floats, Floats]:
    """Return the sums [draws, seeds, S] of two tables [G, seeds, S] after exchanging them in a random half of the groups."""
    delta = (b - a).reshape(len(a), -1)
    delta = delta[(delta != 0).any(1)]  # where the methods agree an exchange changes nothing
    rng = np.random.default_rng(seed)
    flips = (rng.integers(0, 2, (rows, len(delta)), dtype=np.int8).astype(float) for rows in _blocks(len(delta), draws))
    moved = np.concatenate([swap @ delta for swap in flips]).reshape(draws, *a.shape[1:])
    return a.sum(0) + moved, b.sum(0) - moved


def paired_seed_table(results: pd.DataFrame, reference: str, metrics: Sequence[str]) -> pd.DataFrame:
    """Compute differences of `reference` to each method seed by seed, then mean and deviation (ddof = 1) over the seeds of both.

    Columns `study, dataset, view, method_a, method_b, budget, metric, mean, std, seeds`: the paper's table of paired differences.
    Numbers over different images (Oracle classifies only those with a mask) have no difference.
    """
    kept = [*METHOD_KEYS, "seed", "n", "n_masked"]
    long = results.melt(id_vars=kept, value_vars=list(metrics), var_name="metric").dropna(subset="value")
    # The number of images behind a value is part of its key: only equal ones are subtracted.
    long["n"] = long["n_masked"].where(long["metric"].str.startswith("retention"), long["n"])
    keys = ["study", "dataset", "view", "budget", "seed", "metric", "n"]
    first = long[long["method"] == reference].rename(columns={"method": "method_a"})
    second = long[long["method"] != reference].rename(columns={"method": "method_b"})
    pairs = first.merge(second, on=keys, suffixes=("_a", "_b"))
    pairs["value"] = pairs["value_a"] - pairs["value_b"]
    grouped = pairs.groupby(["study", "dataset", "view", "method_a", "method_b", "budget", "metric"], sort=False)["value"]
    return grouped.agg(mean="mean", std="std", seeds="count").reset_index()


# A pooled mean hides the small lesions, which weigh little in it. Strata are cut from `predictions.parquet` afterwards.

QUARTILES: tuple[str, ...] = ("smallest", "small", "large", "largest")
STRATUM_COLUMNS: tuple[str, ...] = (
    *("study", "dataset", "view", "method", "budget", "stratum", "smallest", "largest", "n", "seeds"),
    *("ceiling", "retention", "low", "high", "retention_of_ceiling", "share_low", "share_high"),
)


def by_lesion_size(predictions: pd.DataFrame, draws: int = DRAWS) -> pd.DataFrame:
    """Compute retention in the four quartiles of lesion size, with the edges of each dataset's images.

    A quartile holds the sizes above its lower edge up to its upper edge; the first holds the minimum too. Lesions of one size
    stay together, so the quartiles need not be equally full. Columns: `STRATUM_COLUMNS`.
    """
    parts = []
    for _, dataset in lesion_rows(predictions).groupby(["dataset", "view"], sort=False):
        edges = np.quantile(dataset.drop_duplicates("image_id")["lesion"].to_numpy(float), [0.25, 0.5, 0.75])
        index = np.searchsorted(edges, dataset["lesion"].to_numpy(float), side="left")
        parts.append(dataset.assign(stratum=np.asarray(QUARTILES)[index]))
    return _by_stratum(parts, QUARTILES, draws)


def by_class(predictions: pd.DataFrame, classes: Sequence[str], draws: int = DRAWS) -> pd.DataFrame:
    rows = lesion_rows(predictions)
    rows = rows[rows["label"] >= 0]
    named = rows.assign(stratum=np.asarray(classes, dtype=object)[rows["label"].to_numpy(int)])
    return _by_stratum([named], classes, draws)


def by_attribute(predictions: pd.DataFrame, attribute: pd.Series[Any], order: Sequence[str], draws: int = DRAWS) -> pd.DataFrame:
    """Compute retention by a property of the images: `attribute` maps `image_id` to a stratum, None to leave the image out."""
    rows = lesion_rows(predictions)
    named = rows.assign(stratum=rows["image_id"].map(attribute))
    return _by_stratum([named[named["stratum"].notna()]], order, draws)


def _by_stratum(parts: list[pd.DataFrame], order: Sequence[str], draws: int) -> pd.DataFrame:
    if not parts or not any(len(part) for part in parts):
        return pd.DataFrame(columns=list(STRATUM_COLUMNS))
    rows = pd.concat(parts, ignore_index=True)
    keys = [*METHOD_KEYS, "stratum"]
    rows["_best"] = reachable(rows["lesion"].to_numpy(int), rows["k"].to_numpy(int))
    rows["_cell"] = rows.groupby(list(METHOD_KEYS), sort=False).ngroup()
    sums = {"_best": ("_best", "sum"), "_lesion": ("lesion", "sum"), "_cell": ("_cell", "first")}
    facts = rows.groupby(keys, sort=False).agg(smallest=("lesion", "min"), largest=("lesion", "max"), **sums)
    facts["ceiling"] = ratio(facts["_best"], facts["_lesion"])
    # Each stratum is resampled on its own: its size is a fact of the cut, not of the draw.
    pieces = [
        intervals(stratum, ("retention", "retention_of_ceiling"), keys, draws) for _, stratum in rows.groupby("stratum", sort=False)
    ]
    computed = pd.concat(pieces, ignore_index=True)
    pooled, share = (computed[computed["metric"] == name].set_index(keys) for name in ("retention", "retention_of_ceiling"))
    share = share[["value", "low", "high"]].set_axis(["retention_of_ceiling", "share_low", "share_high"], axis=1)
    table = pooled.rename(columns={"value": "retention"}).join([share, facts]).reset_index()
    # The cells in their first order, and in each of them the strata in theirs.
    table["_rank"] = table["stratum"].map({name: i for i, name in enumerate(order)})
    return table.sort_values(["_cell", "_rank"], ignore_index=True)[list(STRATUM_COLUMNS)]


# Lesion scores are N(s+, sigma^2), background scores N(s-, sigma^2), delta = s+ - s-, a share rho of the patches is lesion. Kept is
# what lies above the (1 - beta)-quantile of the mixture. The supplement takes that quantile as if the mixture were one normal
# with deviation sigma; `exact=True` solves for it. The two agree for delta = 0 and part as delta grows: the mixture is wider than
# sigma, so the approximation sets the threshold too low for small beta and lets retention pass the ceiling beta / rho.

_LARGEST_SEPARATION = 20.0


def predicted_retention(beta: ArrayLike, separation: ArrayLike, prevalence: ArrayLike, exact: bool = False) -> Floats:
    """Predict the share of the lesion patches kept at budget beta; the arguments broadcast.

    beta in [0, 1], separation = delta / sigma, prevalence = rho in [0, 1].
    Approximate: `1 - Phi(Phi^-1(1 - beta) - (1 - rho) delta / sigma)`. Exact: `1 - Phi(t - delta / sigma)` where t solves
    `rho (1 - Phi(t - delta / sigma)) + (1 - rho) (1 - Phi(t)) = beta`.
    """
    beta, separation, prevalence = np.broadcast_arrays(*(np.asarray(v, float) for v in (beta, separation, prevalence)))
    if (beta < 0).any() or (beta > 1).any() or (prevalence < 0).any() or (prevalence > 1).any():
        raise RequestError("Budget and prevalence must be in [0, 1].")
    if exact:
        return ndtr(separation - _mixture_quantile(beta, separation, prevalence))
    return ndtr((1 - prevalence) * separation - ndtri(1 - beta))


def _mixture_quantile(beta: Floats, separation: Floats, prevalence: Floats) -> Floats:
    """Return the threshold above which a share beta of the mixture lies, in units of sigma above the background's mean."""
    # It lies between the quantiles of the two parts; bisection halves that interval to the last bit.
    single = ndtri(1 - beta)
    low, high = np.minimum(single, single + separation), np.maximum(single, single + separation)
    for _ in range(60):
        # At budgets 0 and 1 the quantile is infinite, and inf - inf is no middle.
        with np.errstate(invalid="ignore"):
            middle = np.where(np.isinf(single), single, (low + high) / 2)
        above = prevalence * ndtr(separation - middle) + (1 - prevalence) * ndtr(-middle)
        low, high = np.where(above > beta, middle, low), np.where(above > beta, high, middle)
    return middle


def mean_predicted_retention(beta: ArrayLike, separation: float, prevalences: ArrayLike, exact: bool = False) -> Floats:
    """Predict pooled retention over images of different prevalence: each image's prediction weighted by its lesion patches.

    beta [...], prevalences [n]; returns [...]. Weighting by prevalence is pooling, as long as the images have one grid.
    """
    prevalences = np.asarray(prevalences, float)
    if prevalences.ndim != 1 or prevalences.sum() <= 0:
        raise RequestError("Prevalences must be one number per image, with at least one above 0.")
    values, images = np.unique(prevalences, return_counts=True)  # whole patches of one grid: few different values
    each = predicted_retention(np.asarray(beta, float)[..., None], separation, values, exact)
    return (each * values * images).sum(-1) / prevalences.sum()


def fit_separation(budgets: ArrayLike, measured: ArrayLike, prevalence: ArrayLike, exact: bool = False) -> float:
    """Find the delta / sigma whose predicted retention is nearest to the measured one in squares over the budgets.

    prevalence is one number, or one an image [n] for the pooled mean over images. Budgets at which everything is kept say
    nothing; at least one below 1 is needed.
    """
    budgets, measured = np.asarray(budgets, float), np.asarray(measured, float)
    prevalences = np.atleast_1d(np.asarray(prevalence, float))
    if budgets.shape != measured.shape or not (budgets < 1).any():
        raise RequestError("A fit needs one measured retention for each budget, and a budget below 1.")

    def loss(separation: float) -> float:
        return float(((mean_predicted_retention(budgets, separation, prevalences, exact) - measured) ** 2).sum())

    # The loss can be flat far out: start the bounded search around the best of a grid.
    grid = np.linspace(-_LARGEST_SEPARATION, _LARGEST_SEPARATION, 81)
    best = grid[int(np.argmin([loss(value) for value in grid]))]
    step = grid[1] - grid[0]
    return float(minimize_scalar(loss, bounds=(best - step, best + step), method="bounded", options={"xatol": 1e-8}).x)
