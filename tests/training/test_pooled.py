"""Pooled tokens, and heads behind a fixed selector."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from medtokenbudget.errors import RequestError
from medtokenbudget.routing import create_selector
from medtokenbudget.training.pooled import batches_of_pooled, cosine_lr, fit_head, new_head, pool_and_judge, pool_to_file
from tests.drawn import Drawn, quick


@pytest.mark.parametrize("name", ["center", "darkness", "local-contrast", "tome", "no-pruning"])
def test_pooling_once_equals_selecting_at_each_budget(drawn: Drawn, tmp_path: Path, name: str) -> None:
    store, budgets, rows, selector = drawn.store, (0.2, 0.5, 1.0), np.arange(10), create_selector(name)
    pooled = pool_to_file(tmp_path / "pooled.npy", store, rows, selector, budgets)
    again, evidence = pool_and_judge(store, rows, selector, budgets, seed=0)
    batch = store.read(rows)
    for index, budget in enumerate(budgets):
        selection = selector.select_budget(batch, budget)
        assert np.allclose(pooled[:, index], selection.pooled().numpy(), atol=1e-5)
        assert np.allclose(again[:, index], selection.pooled().numpy(), atol=1e-5)
        assert evidence.k[index] == selection.k
        if selection.kept is not None:
            assert evidence.kept_lesion[:, index].tolist() == (selection.kept & batch.lesion).sum(1).tolist()


def test_a_head_learns_what_the_pooled_tokens_show() -> None:
    noise, config = np.random.default_rng(0), quick("paper", head_epochs=15)
    label = noise.integers(0, 3, 300)
    pooled = (np.eye(3)[label][:, None] * 3 + noise.normal(size=(300, 2, 3)) * 0.3).astype(np.float32)
    head = new_head("mlp", 3, 3, config)
    history = fit_head(head, batches_of_pooled(pooled, label, config, 3), label, config)
    assert history[-1]["classification"] < history[0]["classification"]
    assert (head(torch.from_numpy(pooled[:, 1])).argmax(-1).numpy() == label).mean() > 0.95
    with pytest.raises(RequestError, match="2 training images have no label"):
        fit_head(head, batches_of_pooled(pooled, label, config, 3), np.array([0, -1, 1, -1]), config)


def test_the_learning_rate_falls_as_a_cosine_to_zero() -> None:
    assert [cosine_lr(1e-3, epoch, 50) for epoch in (0, 25, 50)] == pytest.approx([1e-3, 5e-4, 0.0], abs=1e-12)
