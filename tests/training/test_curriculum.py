"""The budget over the epochs."""

from __future__ import annotations

from itertools import pairwise

import pytest

from medtokenbudget.config import CurriculumConfig
from medtokenbudget.errors import BudgetError, RequestError, UnknownNameError
from medtokenbudget.training import BudgetCurriculum


def test_the_paper_anneals_from_a_half_to_a_quarter_over_20_epochs_and_stays():
    curriculum = BudgetCurriculum()
    budgets = [curriculum.budget(epoch) for epoch in range(50)]
    assert budgets[0] == 0.5
    assert budgets[5] == pytest.approx(0.25 + 0.125 * (1 + 2**-0.5))
    assert budgets[10] == 0.375
    assert budgets[20:] == [0.25] * 30
    assert all(a > b for a, b in pairwise(budgets[:21]))


def test_a_fixed_budget_stays():
    assert {BudgetCurriculum.fixed(0.5).budget(epoch) for epoch in range(50)} == {0.5}
    assert BudgetCurriculum(CurriculumConfig(kind="fixed", start=0.3)).budget(40) == 0.3


def test_options_change_the_schedule():
    curriculum = BudgetCurriculum(start=1.0, end=0.1, epochs=2)
    assert [curriculum.budget(epoch) for epoch in range(3)] == [1.0, 0.55, 0.1]


def test_bad_schedules_are_refused():
    with pytest.raises(BudgetError):
        BudgetCurriculum(start=1.5)
    with pytest.raises(UnknownNameError):
        BudgetCurriculum(kind="linear")
    with pytest.raises(RequestError):
        BudgetCurriculum(epochs=0)
    with pytest.raises(RequestError):
        BudgetCurriculum(speed=3)
    with pytest.raises(RequestError):
        BudgetCurriculum().budget(-1)
