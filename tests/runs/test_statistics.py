"""Intervals and tests on cases with known answers: binomial data, a shifted normal, identical methods, duplicated groups."""

from __future__ import annotations

from functools import partial

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from scipy.stats import norm

from medtokenbudget.config import BUDGETS
from medtokenbudget.errors import RequestError, UnknownNameError
from medtokenbudget.runs import statistics
from medtokenbudget.runs.run import summarize
from medtokenbudget.runs.statistics import fit_separation, mean_predicted_retention, predicted_retention
from tests.runs import simulate


def binary(correct: np.ndarray, **columns: object) -> pd.DataFrame:
    """A cell of two classes whose images are right or wrong as told."""
    frame = simulate.cell(np.random.default_rng(0), n=len(correct), label=np.zeros(len(correct), int))
    return frame.assign(predicted=np.where(correct, 0, 1), **columns)


def interval(cell: pd.DataFrame, metric: str, draws: int, seed: int = 0) -> tuple[float, float]:
    row = statistics.intervals(cell, (metric,), ("dataset",), draws, seed).iloc[0]
    return row["low"], row["high"]


def test_every_statistic_equals_the_metric_of_the_results() -> None:
    frame = simulate.sweep({"lats": {"keep": 0.8}}, (42,), (0.3,))
    row = summarize(frame, simulate.CLASSES).iloc[0]
    table = statistics.intervals(frame, tuple(statistics.STATISTICS), draws=50)
    assert tuple(table["metric"]) == tuple(statistics.STATISTICS)
    for metric, value, low, high in table[["metric", "value", "low", "high"]].itertuples(index=False):
        assert value == pytest.approx(row[metric]), metric
        assert low < high


def test_the_interval_of_an_accuracy_is_the_binomial_one() -> None:
    correct = np.arange(400) < 300
    low, high = interval(binary(correct), "accuracy", draws=10_000, seed=3)
    width = stats.norm.ppf(0.975) * np.sqrt(0.75 * 0.25 / 400)
    assert low == pytest.approx(0.75 - width, abs=0.004)
    assert high == pytest.approx(0.75 + width, abs=0.004)


def test_the_vectorised_bootstrap_equals_a_plain_loop_over_the_same_draws() -> None:
    frame = simulate.sweep({"lats": {}}, (42,), (0.3,), n=30).assign(group=[f"g{i // 2:02d}" for i in range(30)])
    weights = np.concatenate(list(statistics.resample(15, 60, 7)))
    np.testing.assert_array_equal(weights.sum(1), 15)
    values = []
    for row in weights.astype(int):
        drawn = pd.concat([frame.iloc[[2 * g, 2 * g + 1]] for g, times in enumerate(row) for _ in range(times)])
        values.append(summarize(drawn, simulate.CLASSES).iloc[0][["accuracy", "macro_f1", "retention"]])
    loop = pd.DataFrame(values).astype(float)
    for metric in loop:
        expected = np.quantile(loop[metric], [0.025, 0.975])
        found = interval(frame, str(metric), draws=60, seed=7)
        np.testing.assert_allclose(found, expected, rtol=1e-9)


def test_groups_of_duplicates_make_the_interval_wider() -> None:
    correct = np.repeat(np.random.default_rng(1).random(100) < 0.7, 4)
    alone = interval(binary(correct), "accuracy", draws=4000)
    groups = [f"lesion-{i // 4}" for i in range(400)]
    together = interval(binary(correct, group=groups), "accuracy", draws=4000)
    assert (together[1] - together[0]) / (alone[1] - alone[0]) == pytest.approx(2.0, abs=0.15)
    assert interval(binary(correct, group=None), "accuracy", draws=4000) == alone, "an image without a group is one of its own"


def test_one_cell_and_many_cells_at_once_have_the_same_interval() -> None:
    frame = simulate.sweep({"lats": {}, "random": {}}, (42, 43), (0.1, 0.3))
    table = statistics.intervals(frame, ("macro_f1", "retention"), draws=300, seed=5)
    assert len(table) == 8
    assert set(table["seeds"]) == {2}
    part = frame.query("method == 'random' and budget == 0.3")
    row = table.query("method == 'random' and budget == 0.3 and metric == 'retention'").iloc[0]
    assert interval(part, "retention", draws=300, seed=5) == (row["low"], row["high"])


def test_the_same_seed_gives_the_same_table() -> None:
    frame = simulate.sweep({"lats": {}, "random": {}}, (42,), (0.3,))
    for run in (statistics.intervals, partial(statistics.compare, reference="lats")):
        pd.testing.assert_frame_equal(run(frame, draws=200, seed=1), run(frame, draws=200, seed=1))


def test_what_is_not_measured_has_no_interval() -> None:
    frame = simulate.sweep({"tome": {"merger": True}}, (42,), (0.3,))
    assert statistics.intervals(frame, ("retention",), draws=50).empty


@pytest.mark.slow
@pytest.mark.parametrize("metric", ["retention", "macro_f1"])
def test_two_methods_of_one_kind_have_uniform_p(metric: str) -> None:
    """Both methods are drawn from one distribution, with two seeds and groups of two images."""
    p = []
    for run in range(100):
        rng = np.random.default_rng(1000 + run)
        label, lesion = rng.integers(0, 4, 80), rng.integers(1, 200, 80)
        groups = [f"g{i // 2}" for i in range(80)]
        cells = [
            simulate.cell(rng, n=80, method=m, seed=s, label=label, lesion=lesion, groups=groups) for m in "ab" for s in (42, 43)
        ]
        p.append(statistics.compare(pd.concat(cells), "a", (metric,), draws=200, seed=run)["p"].iloc[0])
    assert stats.kstest(p, "uniform").pvalue > 0.02


def test_a_better_method_is_found_better_and_an_equal_one_is_not() -> None:
    frame = simulate.sweep(
        {"lats": {"skill": 0.9, "keep": 0.8}, "random": {"skill": 0.4, "keep": 0.3}}, (42, 43), (0.1, 0.3), n=150
    )
    twin = frame[frame["method"] == "lats"].assign(method="twin")
    table = statistics.compare(pd.concat([frame, twin]), "lats", draws=999)
    assert tuple(table.columns) == statistics.COMPARISON_COLUMNS
    worse, same = table[table["method_b"] == "random"], table[table["method_b"] == "twin"]
    assert (worse.query("metric != 'retention' or budget > 0.1")["p_holm"] < 0.05).all()
    assert (worse.query("metric == 'accuracy'")["low"] > 0).all()
    assert (same["p"] == 1).all()
    assert (same[["difference", "low", "high"]] == 0).all(axis=None)
    assert set(table["n"]) == {150, 120}


def test_the_difference_is_that_of_the_seed_means() -> None:
    frame = simulate.sweep({"lats": {}, "random": {}}, (42, 43, 44), (0.1, 0.3))
    means = summarize(frame, simulate.CLASSES).groupby(["method", "budget"])[["accuracy", "macro_f1", "retention"]].mean()
    for row in statistics.compare(frame, "lats", metrics=("accuracy", "macro_f1", "retention"), draws=50).itertuples():
        expected = means.loc[("lats", row.budget), row.metric] - means.loc[("random", row.budget), row.metric]
        assert row.difference == pytest.approx(expected)
        assert row.low <= row.difference <= row.high


def test_the_observed_labeling_counts_as_one_of_the_permutations() -> None:
    assert statistics.permutation_p(5.0, np.zeros(99)) == pytest.approx(1 / 100)
    assert statistics.permutation_p(-5.0, np.array([5.0, 0.0, -5.0])) == pytest.approx(3 / 4)


def test_for_accuracy_exchanging_methods_is_flipping_signs() -> None:
    frame = simulate.sweep({"lats": {"skill": 0.7}, "random": {}}, (42, 43), (0.3,))
    right = frame.assign(right=frame["label"] == frame["predicted"]).pivot_table(index="image_id", columns="method", values="right")
    row = statistics.compare(frame, "lats", metrics=("accuracy",), draws=5000, seed=2).iloc[0]
    differences = (right["lats"] - right["random"]).to_numpy()
    flipped = stats.permutation_test((differences,), np.sum, permutation_type="samples", n_resamples=5000, rng=9)
    assert row["p"] == pytest.approx(flipped.pvalue, abs=0.02)


def test_only_images_and_seeds_that_both_have_are_compared() -> None:
    frame = simulate.sweep({"lats": {}, "oracle": {}}, (42, 43), (0.3,))
    masked = frame[(frame["method"] == "lats") | (frame["lesion"].notna() & (frame["seed"] == 42))]
    row = statistics.compare(masked, "lats", metrics=("accuracy",), draws=50).iloc[0]
    assert (row["n"], row["seeds"]) == (48, 1)


def test_holm_by_hand() -> None:
    # Sorted 0.005 0.01 0.03 0.04 times 4 3 2 1: 0.02 0.03 0.06 0.04, made monotone: 0.02 0.03 0.06 0.06.
    np.testing.assert_allclose(statistics.holm([0.01, 0.04, 0.03, 0.005]), [0.03, 0.06, 0.06, 0.02])
    np.testing.assert_allclose(statistics.holm([0.6, 0.7]), [1.0, 1.0])
    np.testing.assert_allclose(statistics.holm([0.02, np.nan, 0.03]), [0.04, np.nan, 0.04])


def test_the_holm_family_is_one_metric_over_methods_and_budgets() -> None:
    frame = simulate.sweep({"lats": {}, "random": {}, "norm": {}}, (42,), (0.1, 0.3))
    table = statistics.compare(frame, "lats", metrics=("accuracy", "retention"), draws=300)
    for _, part in table.groupby("metric"):
        np.testing.assert_allclose(part["p_holm"], statistics.holm(part["p"].to_numpy()))
    assert len(statistics.compare(frame, "lats", metrics=("accuracy",), budgets=(0.3,), draws=50)) == 2


def test_paired_seed_differences_are_taken_seed_by_seed() -> None:
    base = pd.DataFrame({"study": "s", "dataset": "d", "view": "as-is", "budget": 0.1, "seed": [1, 2, 3], "n": 20, "n_masked": 5})
    a, b = base.assign(method="lats", accuracy=[0.5, 0.6, 0.7]), base.assign(method="random", accuracy=[0.4, 0.5, 0.6])
    row = statistics.paired_seed_table(pd.concat([a, b]), "lats", ("accuracy",)).iloc[0]
    assert (row["method_a"], row["method_b"], row["seeds"]) == ("lats", "random", 3)
    assert (row["mean"], row["std"]) == (pytest.approx(0.1), pytest.approx(0.0, abs=1e-12))
    assert statistics.paired_seed_table(pd.concat([a, b.assign(n=5)]), "lats", ("accuracy",)).empty  # on other images


def test_wrong_requests_say_what_is_possible() -> None:
    frame = simulate.sweep({"lats": {}}, (42,), (0.3,), n=10)
    with pytest.raises(UnknownNameError, match="retention"):
        statistics.intervals(frame, ("retentoin",))
    with pytest.raises(UnknownNameError, match="'lats'"):
        statistics.compare(frame, reference="lat")
    with pytest.raises(RequestError, match=r"\[0, 1\]"):
        predicted_retention(1.2, 1.0, 0.3)
    with pytest.raises(RequestError, match="below 1"):
        fit_separation([1.0], [1.0], 0.3)


STRATA_DRAWS = 300


@pytest.fixture(scope="module")
def predictions() -> pd.DataFrame:
    return simulate.sweep({"lats": {"keep": 0.7}, "random": {"keep": 0.3}, "tome": {"merger": True}}, (42, 43), (0.1, 0.3), n=100)


def test_the_numbers_of_a_stratum_are_its_sums(predictions: pd.DataFrame) -> None:
    table = statistics.by_lesion_size(predictions, draws=STRATA_DRAWS)
    assert tuple(table.columns) == statistics.STRATUM_COLUMNS
    row = table.query("method == 'lats' and budget == 0.1 and stratum == 'small'").iloc[0]
    rows = predictions.query("method == 'lats' and budget == 0.1").dropna(subset="lesion")
    images = rows.drop_duplicates("image_id")["lesion"].astype(float)
    low, high = images.quantile(0.25), images.quantile(0.5)
    part = rows[(rows["lesion"] > low) & (rows["lesion"] <= high)]
    assert row["n"] == part["image_id"].nunique()
    assert row["retention"] == pytest.approx(part["kept_lesion"].sum() / part["lesion"].sum())
    best = np.minimum(part["lesion"].astype(int), 25).sum()
    assert row["ceiling"] == pytest.approx(best / part["lesion"].sum())
    assert row["retention_of_ceiling"] == pytest.approx(part["kept_lesion"].sum() / best)
    assert row["low"] <= row["retention"] <= row["high"]
    assert row["share_low"] <= row["retention_of_ceiling"] <= row["share_high"]
    assert row["seeds"] == 2


def test_quartiles_and_classes_share_out_the_images_that_retention_is_measured_on(predictions: pd.DataFrame) -> None:
    sizes = statistics.by_lesion_size(predictions, draws=STRATA_DRAWS)
    assert "tome" not in set(sizes["method"]), "mergers have no strata"
    table = sizes.query("method == 'lats' and budget == 0.3")
    assert tuple(table["stratum"]) == statistics.QUARTILES
    assert table["n"].sum() == 80
    assert table["n"].between(17, 23).all()
    assert (table["largest"].to_numpy()[:-1] < table["smallest"].to_numpy()[1:]).all()
    assert (np.diff(sizes.query("method == 'random' and budget == 0.1")["ceiling"]) <= 0).all(), "it falls with lesion size"
    classes = statistics.by_class(predictions, simulate.CLASSES, draws=STRATA_DRAWS).query("method == 'random' and budget == 0.3")
    assert tuple(classes["stratum"]) == simulate.CLASSES
    assert classes["n"].sum() == 80
    changed = predictions.copy()
    changed.loc[changed["image_id"] == "image-0000", ["lesion", "kept_lesion"]] = 0
    emptied = statistics.by_lesion_size(changed, draws=STRATA_DRAWS).query("method == 'lats' and budget == 0.3")
    assert emptied["n"].sum() == 79, "an empty mask is in no stratum"


def test_without_retention_there_are_no_strata(predictions: pd.DataFrame) -> None:
    only = predictions[predictions["method"] == "tome"]
    assert statistics.by_lesion_size(only, draws=STRATA_DRAWS).empty
    assert statistics.by_class(only, simulate.CLASSES, draws=STRATA_DRAWS).empty


unit = st.floats(0.001, 0.999)


@settings(max_examples=80, deadline=None)
@given(unit, unit, st.booleans())
def test_without_separation_retention_is_the_budget(beta: float, prevalence: float, exact: bool) -> None:
    np.testing.assert_allclose(predicted_retention([1.0, 0.0], 2.0, prevalence, exact), [1.0, 0.0])
    assert predicted_retention(beta, 0.0, prevalence, exact) == pytest.approx(beta, abs=1e-9)


@settings(max_examples=80, deadline=None)
@given(unit, st.floats(0, 8), unit)
def test_the_formula_of_the_supplement(beta: float, separation: float, prevalence: float) -> None:
    expected = 1 - norm.cdf(norm.ppf(1 - beta) - (1 - prevalence) * separation)
    assert predicted_retention(beta, separation, prevalence) == pytest.approx(expected, abs=1e-12)


@settings(max_examples=80, deadline=None)
@given(unit, st.floats(0, 10), unit)
def test_the_exact_threshold_keeps_the_budget_and_never_passes_the_ceiling(
    beta: float, separation: float, prevalence: float
) -> None:
    retained = float(predicted_retention(beta, separation, prevalence, exact=True))
    if retained < 0.999:  # nearer to 1 the threshold cannot be had back from what was retained
        kept = prevalence * retained + (1 - prevalence) * norm.sf(separation - norm.ppf(retained))
        assert kept == pytest.approx(beta, abs=1e-6)
    assert retained <= min(1.0, beta / prevalence) + 1e-9
    assert retained >= beta - 1e-9


def test_the_exact_model_is_what_top_k_of_normal_scores_retains() -> None:
    rng = np.random.default_rng(0)
    n, prevalence, separation, beta = 200_000, 0.3, 1.5, 0.3
    lesion = np.arange(n) < prevalence * n
    scores = rng.normal(size=n) + separation * lesion
    kept = scores >= np.sort(scores)[-int(beta * n)]
    assert predicted_retention(beta, separation, prevalence, exact=True) == pytest.approx(kept[lesion].mean(), abs=0.005)
    # The supplement's approximation passes the ceiling where the exact model does not.
    assert predicted_retention(0.1, 4.0, 0.3, exact=True) <= 0.1 / 0.3 < predicted_retention(0.1, 4.0, 0.3)


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("separation", [-0.5, 0.0, 0.7, 2.5, 5.0])
def test_a_fit_finds_the_separation_that_made_the_curve(separation: float, exact: bool) -> None:
    prevalences = np.array([0.05, 0.2, 0.3, 0.6])
    each = predicted_retention(0.3, separation, prevalences, exact)
    pooled = (prevalences * each).sum() / prevalences.sum()
    assert mean_predicted_retention(0.3, separation, prevalences, exact) == pytest.approx(pooled), "each weighs by its lesion"
    curve = mean_predicted_retention(BUDGETS, separation, prevalences, exact)
    assert fit_separation(BUDGETS, curve, prevalences, exact) == pytest.approx(separation, abs=1e-3)
    single = predicted_retention(BUDGETS, separation, 0.3, exact)
    assert fit_separation(BUDGETS, single, 0.3, exact) == pytest.approx(separation, abs=1e-3)


def test_ranks_are_intervals_and_equal_methods_are_tied() -> None:
    """Two methods that keep the same, one that keeps less of every lesion, and one that differs from the best in one image."""
    rng = np.random.default_rng(0)
    lesion = rng.integers(20, 60, 80)
    base = simulate.cell(rng, n=80).assign(
        lesion=lesion, k=76, view="as-is", dataset="d", study="s", budget=0.3, seed=0, group=None
    )
    base["image_id"] = [f"i{number}" for number in range(80)]
    nearly = np.where(np.arange(80) == 0, lesion - 3, lesion - 2)
    frames = [("a", lesion - 2), ("b", lesion - 2), ("c", lesion - 12), ("d", nearly)]
    rows = pd.concat([base.assign(method=name, kept_lesion=kept) for name, kept in frames], ignore_index=True)
    table = statistics.ranking(rows, "retention_of_ceiling", draws=2_000).set_index("method")
    assert list(table.index) == ["a", "b", "d", "c"]
    assert table.loc["a", "value"] == pytest.approx((lesion - 2).sum() / lesion.sum())
    assert table.loc[["a", "b", "d"], ["first", "last", "tie"]].to_numpy().tolist() == [[1, 3, 1]] * 3
    assert table.loc["c", ["first", "last", "tie"]].tolist() == [4, 4, 2]
    # A merger keeps no patches: it has a row without numbers. Only images that the others share count.
    merger = base.assign(method="m", kept_lesion=pd.NA)
    fewer = pd.concat([rows[(rows["method"] != "b") | (rows["image_id"] != "i5")], merger], ignore_index=True)
    table = statistics.ranking(fewer, "retention_of_ceiling", draws=500).set_index("method")
    assert (table["n"].dropna() == 79).all()
    assert np.isnan(table.loc["m", "value"])
