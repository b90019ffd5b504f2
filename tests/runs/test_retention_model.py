"""The Gaussian retention model: its limits, a simulation of what it models, and fits that find what went in."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import norm

from medtokenbudget.config import BUDGETS
from medtokenbudget.errors import RequestError
from medtokenbudget.runs.retention_model import (
    fit_separation,
    mean_predicted_retention,
    predicted_retention,
)

unit = st.floats(0.001, 0.999)


@settings(max_examples=80, deadline=None)
@given(unit, unit, st.booleans())
def test_without_separation_retention_is_the_budget(beta: float, prevalence: float, exact: bool) -> None:
    assert predicted_retention(beta, 0.0, prevalence, exact) == pytest.approx(beta, abs=1e-9)


@settings(max_examples=80, deadline=None)
@given(unit, st.floats(0, 8), unit)
def test_the_formula_of_the_supplement(beta: float, separation: float, prevalence: float) -> None:
    expected = 1 - norm.cdf(norm.ppf(1 - beta) - (1 - prevalence) * separation)
    assert predicted_retention(beta, separation, prevalence) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("exact", [False, True])
def test_everything_is_kept_at_budget_one_and_nothing_at_zero(exact: bool) -> None:
    np.testing.assert_allclose(predicted_retention([1.0, 0.0], 2.0, 0.3, exact), [1.0, 0.0])


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


def test_the_approximation_passes_the_ceiling_where_the_exact_model_does_not() -> None:
    assert predicted_retention(0.1, 4.0, 0.3) > 0.1 / 0.3
    assert predicted_retention(0.1, 4.0, 0.3, exact=True) <= 0.1 / 0.3


def test_the_exact_model_is_what_top_k_of_normal_scores_retains() -> None:
    rng = np.random.default_rng(0)
    n, prevalence, separation, beta = 200_000, 0.3, 1.5, 0.3
    lesion = np.arange(n) < prevalence * n
    scores = rng.normal(size=n) + separation * lesion
    kept = scores >= np.sort(scores)[-int(beta * n)]
    assert predicted_retention(beta, separation, prevalence, exact=True) == pytest.approx(kept[lesion].mean(), abs=0.005)


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("separation", [-0.5, 0.0, 0.7, 2.5, 5.0])
def test_a_fit_finds_the_separation_that_made_the_curve(separation: float, exact: bool) -> None:
    prevalences = np.array([0.05, 0.2, 0.3, 0.6])
    curve = mean_predicted_retention(BUDGETS, separation, prevalences, exact)
    assert fit_separation(BUDGETS, curve, prevalences, exact) == pytest.approx(separation, abs=1e-3)
    single = predicted_retention(BUDGETS, separation, 0.3, exact)
    assert fit_separation(BUDGETS, single, 0.3, exact) == pytest.approx(separation, abs=1e-3)


def test_the_mean_over_images_weighs_each_by_its_lesion() -> None:
    each = predicted_retention(0.3, 1.0, np.array([0.1, 0.4]))
    assert mean_predicted_retention(0.3, 1.0, [0.1, 0.4]) == pytest.approx((0.1 * each[0] + 0.4 * each[1]) / 0.5)


def test_wrong_requests_say_what_is_expected() -> None:
    with pytest.raises(RequestError, match=r"\[0, 1\]"):
        predicted_retention(1.2, 1.0, 0.3)
    with pytest.raises(RequestError, match="below 1"):
        fit_separation([1.0], [1.0], 0.3)
