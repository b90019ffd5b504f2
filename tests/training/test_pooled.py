"""Pooled tokens and what a selector keeps."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from medtokenbudget.routing import create_selector
from medtokenbudget.training.pooled import pool, pool_and_judge
from tests.drawn import Drawn


@pytest.mark.parametrize("name", ["center", "darkness", "local-contrast", "tome", "no-pruning"])
def test_pooling_once_equals_selecting_at_each_budget(drawn: Drawn, tmp_path: Path, name: str) -> None:
    store, budgets, rows, selector = drawn.store, (0.2, 0.5, 1.0), np.arange(10), create_selector(name)
    pooled = pool(store, rows, selector, budgets, tmp_path / "pooled.npy")
    again, evidence = pool_and_judge(store, rows, selector, budgets, seed=0)
    batch = store.read(rows)
    for index, budget in enumerate(budgets):
        selection = selector.select_budget(batch, budget)
        assert np.allclose(pooled[:, index], selection.pooled().numpy(), atol=1e-5)
        assert np.allclose(again[:, index], selection.pooled().numpy(), atol=1e-5)
        assert evidence.k[index] == selection.k
        if selection.kept is not None:
            assert evidence.kept_lesion[:, index].tolist() == (selection.kept & batch.lesion).sum(1).tolist()
