"""What changes over the epochs: learning rate, budget, early stopping."""

from __future__ import annotations

from itertools import pairwise

import pytest

from medtokenbudget.config import CurriculumConfig
from medtokenbudget.errors import BudgetError, RequestError, UnknownNameError
from medtokenbudget.training.schedule import EarlyStopping, cosine_lr, curriculum_budget, epochs_for


def test_the_learning_rate_falls_as_a_cosine_to_zero() -> None:
    assert cosine_lr(1e-3, 0, 50) == pytest.approx(1e-3)
    assert cosine_lr(1e-3, 25, 50) == pytest.approx(5e-4)
    assert cosine_lr(1e-3, 50, 50) == pytest.approx(0.0, abs=1e-12)


@pytest.mark.parametrize(("images", "expected"), [(10_000, 8), (640, 40), (64, 40), (10, 40)])
def test_small_data_sets_get_more_epochs_up_to_five_times_as_many(images: int, expected: int) -> None:
    # 640 images are 10 steps of 64: 500 steps would be 50 epochs, five times 8 is 40.
    assert epochs_for(images, 64, 8, 500) == expected
    assert epochs_for(3200, 64, 8, 500) == 10
    assert epochs_for(images, 64, 50, 0) == 50


def test_early_stopping_counts_epochs_and_ignores_small_gains() -> None:
    rule = EarlyStopping(patience=4, min_improvement=0.002)
    assert rule.improved(0.5, 1)
    assert not rule.improved(0.5015, 3)
    assert not rule.stop(3)
    assert rule.stop(5)
    assert rule.improved(0.51, 5)
    assert (rule.best, rule.best_epoch) == (0.51, 5)


def test_the_paper_anneals_from_a_half_to_a_quarter_over_20_epochs_and_stays() -> None:
    budgets = [curriculum_budget(CurriculumConfig(), epoch) for epoch in range(50)]
    assert budgets[0] == 0.5
    assert budgets[5] == pytest.approx(0.25 + 0.125 * (1 + 2**-0.5))
    assert budgets[10] == 0.375
    assert budgets[20:] == [0.25] * 30
    assert all(a > b for a, b in pairwise(budgets[:21]))


def test_a_fixed_budget_stays() -> None:
    assert {curriculum_budget(CurriculumConfig(kind="fixed", start=0.3), epoch) for epoch in range(50)} == {0.3}


def test_settings_change_the_curriculum_and_bad_ones_are_refused() -> None:
    assert [curriculum_budget(CurriculumConfig(start=1.0, end=0.1, epochs=2), epoch) for epoch in range(3)] == [1.0, 0.55, 0.1]
    with pytest.raises(BudgetError):
        CurriculumConfig(start=1.5)
    with pytest.raises(UnknownNameError):
        CurriculumConfig(kind="linear")  # type: ignore[arg-type]
    with pytest.raises(RequestError):
        CurriculumConfig(epochs=0)
    with pytest.raises(RequestError):
        curriculum_budget(CurriculumConfig(), -1)
