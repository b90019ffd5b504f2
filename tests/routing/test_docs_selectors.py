"""The selector that docs/selectors.md shows, run from that very text."""

from __future__ import annotations

import re

import pytest
import torch

from medtokenbudget.config import BUDGETS
from medtokenbudget.routing import budget_to_k, create_selector, list_selectors
from medtokenbudget.routing.base import SELECTORS
from tests.routing.batches import tokens_of


@pytest.fixture
def blocks(repository, monkeypatch):
    monkeypatch.setattr(SELECTORS, "_classes", dict(SELECTORS._classes))
    text = (repository / "docs" / "selectors.md").read_text(encoding="utf-8")
    return re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)


def test_the_example_of_use_runs(blocks):
    tokens = tokens_of(2, (16, 16))
    names = {"tokens": tokens}
    exec(blocks[0], names)
    assert names["selection"].tokens.shape == (2, 77, tokens.dim)


def test_the_new_selector_of_20_lines_is_registered_and_selects(blocks):
    source = blocks[1]
    assert len(source.splitlines()) <= 20
    exec(source, {"__name__": "their_module"})
    assert "outlier" in list_selectors()
    tokens = tokens_of(2, (16, 16))
    selector = create_selector("outlier", minimum=4)
    for budget in BUDGETS:
        assert selector.select_budget(tokens, budget).k == budget_to_k(budget, 256, 4)
    mean = tokens.patches.mean(1, keepdim=True)
    similarity = torch.cosine_similarity(tokens.patches, mean, dim=-1)
    assert torch.equal(selector.order(tokens)[:, 0], similarity.argmin(1))


def test_every_built_in_selector_has_its_row(repository):
    text = (repository / "docs" / "selectors.md").read_text(encoding="utf-8")
    built_in = [name for name, cls in SELECTORS._classes.items() if cls.__module__.startswith("medtokenbudget.")]
    assert [name for name in built_in if f"| `{name}` |" not in text] == []
