"""Metrics of selectors that merge patches, against plain loops and values worked by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from medtokenbudget import metrics
from medtokenbudget.errors import ShapeError

SEEDS = st.integers(0, 2**31)

examples = settings(max_examples=60, deadline=None)


def test_group_purity_worked_by_hand() -> None:
    # Three groups of sizes 3, 2, 1: lesion patches 2 of 3, 0 of 2, 1 of 1 -> (2 + 2 + 1) / 6; a dropped patch does not count.
    assignment = torch.tensor([[0, 0, 0, 1, 1, 2, -1]])
    lesion = torch.tensor([[True, True, False, False, False, True, True]])
    assert metrics.group_purity(assignment, lesion).tolist() == pytest.approx([5 / 6])


@examples
@given(SEEDS)
def test_group_purity_equals_a_plain_loop(seed: int) -> None:
    rng = np.random.default_rng(seed)
    assignment, lesion = rng.integers(-1, 5, (4, 12)), rng.random((4, 12)) < 0.5
    expected = []
    for groups, mask in zip(assignment, lesion):
        right = sum(max(mask[groups == g].sum(), (~mask[groups == g]).sum()) for g in range(5))
        expected.append(right / (groups >= 0).sum() if (groups >= 0).any() else math.nan)
    found = metrics.group_purity(torch.from_numpy(assignment), torch.from_numpy(lesion))
    assert found.tolist() == pytest.approx(expected, nan_ok=True)


def test_group_purity_of_nothing_kept_is_not_measured() -> None:
    assert math.isnan(metrics.group_purity(torch.full((1, 4), -1), torch.ones(1, 4, dtype=torch.bool)).item())
    with pytest.raises(ShapeError):
        metrics.group_purity(torch.zeros(1, 4).long(), torch.ones(1, 3, dtype=torch.bool))


@pytest.mark.parametrize("seed", range(4))
def test_lesion_dominated_equals_a_plain_loop_and_is_the_retention_of_kept_patches(seed: int) -> None:
    draw = np.random.default_rng(seed)
    assignment, lesion = draw.integers(-1, 5, (3, 24)), draw.random((3, 24)) > 0.5
    found = metrics.lesion_dominated(torch.from_numpy(assignment), torch.from_numpy(lesion))
    for row in range(3):
        safe = 0
        for group in range(5):
            inside = assignment[row] == group
            if 2 * lesion[row, inside].sum() > inside.sum():
                safe += int(lesion[row, inside].sum())
        assert found[row].item() == pytest.approx(safe / lesion[row].sum())
    kept = draw.random((3, 24)) > 0.4
    alone = np.where(kept, kept.cumsum(1) - 1, -1)
    retained = metrics.lesion_dominated(torch.from_numpy(alone), torch.from_numpy(lesion)).numpy()
    np.testing.assert_allclose(retained, (kept & lesion).sum(1) / lesion.sum(1), rtol=1e-6)


def test_lesion_mass_is_the_mean_attention_on_the_lesion_and_the_precision_of_kept_patches() -> None:
    draw = torch.Generator().manual_seed(0)
    attention = torch.rand(2, 3, 8, generator=draw).softmax(-1)
    lesion = torch.rand(2, 8, generator=draw) > 0.5
    found = metrics.lesion_mass(attention, lesion)
    for row in range(2):
        total = sum(float(attention[row, k, n]) for k in range(3) for n in range(8) if lesion[row, n])
        assert found[row].item() == pytest.approx(total / 3)
    one_hot = torch.eye(8)[:4].unsqueeze(0)
    assert metrics.lesion_mass(one_hot, lesion[:1]).item() == pytest.approx(lesion[0, :4].float().mean().item())


def test_what_mergers_lose_is_not_measured_without_a_lesion() -> None:
    nothing = torch.zeros(1, 4, dtype=torch.bool)
    assert math.isnan(metrics.lesion_dominated(torch.zeros(1, 4).long(), nothing).item())
    assert math.isnan(metrics.lesion_mass(torch.full((1, 2, 4), 0.25), nothing).item())
    with pytest.raises(ShapeError, match="must be"):
        metrics.lesion_mass(torch.ones(1, 4), nothing)
    with pytest.raises(ShapeError, match="must be"):
        metrics.lesion_dominated(torch.zeros(1, 3).long(), nothing)
