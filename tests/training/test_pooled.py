"""Pooled tokens, and heads behind a fixed selector."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from medtokenbudget.errors import RequestError
from medtokenbudget.routing import create_selector
from medtokenbudget.training.pooled import PooledHead, pool_and_judge, pool_to_file, probabilities
from tests.drawn import Drawn, quick


@pytest.mark.parametrize("name", ["center", "darkness", "local-contrast", "tome", "no-pruning"])
def test_pooling_once_equals_selecting_at_each_budget(drawn: Drawn, tmp_path: Path, name: str) -> None:
    store, budgets = drawn.store, (0.2, 0.5, 1.0)
    rows = np.arange(10)
    selector = create_selector(name)
    pooled = pool_to_file(tmp_path / "pooled.npy", store, rows, selector, budgets)
    again, evidence = pool_and_judge(store, rows, selector, budgets, seed=0)
    batch = store.read(rows)
    for index, budget in enumerate(budgets):
        selection = selector.select_budget(batch, budget)
        assert np.allclose(pooled[:, index], selection.pooled().numpy(), atol=1e-5)
        assert np.allclose(again[:, index], selection.pooled().numpy(), atol=1e-5)
        assert evidence.k[index] == selection.k
        if selection.kept is not None:
            kept = (selection.kept & batch.lesion).sum(1).numpy()
            assert evidence.kept_lesion[:, index].tolist() == kept.tolist()


def test_a_head_learns_what_the_pooled_tokens_show(tmp_path: Path) -> None:
    noise = np.random.default_rng(0)
    label = noise.integers(0, 3, 300)
    pooled = (np.eye(3)[label][:, None] * 3 + noise.normal(size=(300, 2, 3)) * 0.3).astype(np.float32)
    head = PooledHead("mlp", 3, 3, quick("paper", head_epochs=15))
    history = head.train_on_file(pooled, label)
    assert history[-1]["classification"] < history[0]["classification"]
    assert (probabilities(head.head, pooled)[:, 1].argmax(-1) == label).mean() > 0.95


def test_unlabelled_training_images_are_refused_with_their_number() -> None:
    with pytest.raises(RequestError, match="2 training images have no label"):
        PooledHead("mlp", 3, 3, quick("paper")).train_on_file(np.zeros((4, 1, 3), np.float32), np.array([0, -1, 1, -1]))
