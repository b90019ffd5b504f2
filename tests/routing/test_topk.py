"""Budgets, smoothing and top-K."""

from __future__ import annotations

import math
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from medtokenbudget.errors import BudgetError, CountError, GridError, NonFiniteError, RequestError, ShapeError, UnknownNameError
from medtokenbudget.routing import budget_to_k, gumbel_noise, hard_topk, masked_mean, rank, smooth_scores, straight_through_topk


def test_the_paper_keeps_these_many_of_256():
    ks = [25, 51, 76, 102, 128, 153, 179, 204, 230, 256]
    assert [budget_to_k(float(f"0.{i}") if i < 10 else 1.0, 256) for i in range(1, 11)] == ks
    assert [budget_to_k(b, 256) for b in np.round(np.arange(1, 11) / 10, 1)] == ks
    assert [budget_to_k(b, 256) for b in (np.arange(1, 11) / 10).astype(np.float32)] == ks
    # In floats the product falls short of 29.
    assert math.floor(0.29 * 100) == 28
    assert budget_to_k(0.29, 100) == 29
    assert (budget_to_k(0.01, 256), budget_to_k(0.01, 9)) == (16, 9)


@settings(max_examples=60, deadline=None)
@given(hundredths=st.integers(1, 100), n=st.integers(1, 2000), minimum=st.integers(1, 50))
def test_k_is_exact_for_every_budget_of_two_decimals(hundredths, n, minimum):
    expected = min(n, max(minimum, hundredths * n // 100))
    for budget in (hundredths / 100, Decimal(hundredths) / 100, Fraction(hundredths, 100), np.float64(hundredths / 100)):
        assert budget_to_k(budget, n, minimum) == expected


@pytest.mark.parametrize("budget", [0, 0.0, -0.1, 1.2, float("nan"), float("inf"), "much", None, True])
def test_a_budget_outside_0_to_1_is_refused(budget):
    with pytest.raises(BudgetError):
        budget_to_k(budget, 256)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.sampled_from([0.0, -0.0, 0.1, 0.5, 1.0]), min_size=1, max_size=12), st.data())
def test_topk_keeps_exactly_k_and_breaks_ties_by_index(values, data):
    k = data.draw(st.integers(1, len(values)))
    expected = sorted(range(len(values)), key=lambda i: (-values[i], i))
    scores = torch.tensor([values])
    assert rank(scores)[0].tolist() == expected
    mask = hard_topk(scores, k)
    assert mask.dtype == torch.bool
    assert mask[0].nonzero().flatten().tolist() == sorted(expected[:k])


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 999), n=st.integers(1, 20), data=st.data())
def test_straight_through_keeps_exactly_k_in_the_forward_pass(seed, n, data):
    k = data.draw(st.integers(1, n))
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(2, n, generator=generator)
    mask = straight_through_topk(scores, k, 0.5, generator)
    assert set(mask.unique().tolist()) <= {0.0, 1.0}
    assert mask.sum(1).tolist() == [k, k]


def test_straight_through_has_the_gradient_of_the_clipped_softmax():
    scores = torch.tensor([[0.9, 0.6, 0.5, 0.2, 0.1]], dtype=torch.float32, requires_grad=True)
    upstream = torch.tensor([[0.3, -1.0, 2.0, 0.5, 0.1]])
    straight_through_topk(scores, 2, 0.5, torch.Generator().manual_seed(3)).mul(upstream).sum().backward()

    noise = gumbel_noise((1, 5), torch.Generator().manual_seed(3)).double()

    def soft(values: torch.Tensor) -> float:
        exponents = [math.exp((math.log(s / (1 - s)) + g) / 0.5) for s, g in zip(values[0].tolist(), noise[0].tolist())]
        return sum(u * min(max(2 * e / sum(exponents), 0), 1) for u, e in zip(upstream[0].tolist(), exponents))

    step = 1e-6
    for i in range(5):
        up, down = scores.detach().double().clone(), scores.detach().double().clone()
        up[0, i] += step
        down[0, i] -= step
        assert scores.grad[0, i].item() == pytest.approx((soft(up) - soft(down)) / (2 * step), abs=1e-3)


def test_the_mean_under_a_mask_has_a_gradient_through_sum_and_mass():
    # d/dm_i of sum_j m_j z_j / sum_j m_j is (z_i - mean) / mass; the mean here is (0.5 * 1 + 1 * 4 + 0.5 * 6) / 2 = 3.75.
    mask = torch.tensor([[0.5, 1.0, 0.5, 0.0]], requires_grad=True)
    patches = torch.tensor([[[1.0], [4.0], [6.0], [9.0]]])
    mean = masked_mean(patches, mask)
    mean.sum().backward()
    assert mean.item() == pytest.approx(3.75)
    torch.testing.assert_close(mask.grad, torch.tensor([[-1.375, 0.125, 1.125, 2.625]]))


def test_noise_comes_from_the_generator_alone_and_scores_of_0_and_1_stay_finite():
    scores = torch.full((4, 30), 0.5)
    draws = [straight_through_topk(scores, 10, 0.5, torch.Generator().manual_seed(seed)) for seed in (1, 1, 2)]
    assert torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[0], draws[2])
    assert torch.equal(straight_through_topk(scores, 10).bool(), hard_topk(scores, 10))
    scores = torch.tensor([[0.0, 1.0, 0.5]], requires_grad=True)
    mask = straight_through_topk(scores, 1, 0.5, torch.Generator().manual_seed(0))
    mask.sum().backward()
    assert torch.isfinite(mask).all()
    assert torch.isfinite(scores.grad).all()


def test_gumbel_noise_has_the_mean_and_deviation_of_its_distribution():
    noise = gumbel_noise((200_000,), torch.Generator().manual_seed(0))
    assert noise.mean().item() == pytest.approx(0.5772, abs=0.01)
    assert noise.std().item() == pytest.approx(math.pi / math.sqrt(6), abs=0.01)


@pytest.mark.parametrize("k", [0, -1, 6, 2.5, True])
def test_a_k_outside_1_to_n_is_refused(k):
    for function in (hard_topk, straight_through_topk):
        with pytest.raises(CountError, match="from 1 to 5"):
            function(torch.rand(2, 5), k)


def test_bad_scores_and_temperatures_are_refused():
    with pytest.raises(NonFiniteError):
        hard_topk(torch.tensor([[0.1, float("nan")]]), 1)
    with pytest.raises(ShapeError):
        hard_topk(torch.rand(5), 1)
    with pytest.raises(RequestError, match="temperature"):
        straight_through_topk(torch.rand(1, 5), 1, temperature=0.0)


def smooth_by_hand(values: list[float], grid: tuple[int, int], kernel: int, padding: str) -> list[float]:
    h, w = grid
    reach, result = kernel // 2, []
    for row in range(h):
        for column in range(w):
            near = [
                values[r * w + c]
                for r in range(row - reach, row + reach + 1)
                for c in range(column - reach, column + reach + 1)
                if 0 <= r < h and 0 <= c < w
            ]
            result.append(sum(near) / (kernel**2 if padding == "zero" else len(near)))
    return result


@pytest.mark.parametrize("padding", ["exclude", "zero"])
@pytest.mark.parametrize(("grid", "kernel"), [((3, 4), 3), ((2, 5), 5), ((1, 6), 3), ((4, 4), 1)])
def test_smoothing_equals_a_loop_over_the_window(padding, grid, kernel):
    scores = torch.rand(2, grid[0] * grid[1], generator=torch.Generator().manual_seed(0))
    expected = torch.tensor([smooth_by_hand(row, grid, kernel, padding) for row in scores.tolist()])
    torch.testing.assert_close(smooth_scores(scores, grid, kernel, padding), expected)


def test_bad_smoothing_is_refused():
    with pytest.raises(GridError):
        smooth_scores(torch.rand(1, 5), (2, 3))
    with pytest.raises(RequestError, match="odd"):
        smooth_scores(torch.rand(1, 6), (2, 3), kernel=2)
    with pytest.raises(UnknownNameError):
        smooth_scores(torch.rand(1, 6), (2, 3), padding="reflect")
