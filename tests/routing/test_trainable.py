"""What learned selectors share."""

from __future__ import annotations

import pytest
import torch

from medtokenbudget.errors import CountError
from medtokenbudget.routing import create_selector
from medtokenbudget.routing.trainable import dropout
from tests.routing.batches import tokens_of


def test_a_soft_merger_has_no_more_tokens_than_slots():
    with pytest.raises(CountError, match=r"'query-pool' has 8 slots, so it cannot give 9 tokens"):
        create_selector("query-pool", dim=32, slots=8).select(tokens_of(), 9)


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_every_place_of_a_word_is_dropped_with_probability_p(p):
    kept = dropout(torch.ones(400_000), p, torch.Generator().manual_seed(0)).view(-1, 4).bool().float().mean(0)
    torch.testing.assert_close(kept, torch.full((4,), 1 - p), atol=0.006, rtol=0)


def test_the_mean_is_kept_and_survivors_are_scaled():
    out = dropout(torch.ones(1_000_003), 0.1, torch.Generator().manual_seed(1))
    assert out.mean().item() == pytest.approx(1, abs=2e-3)
    assert out.max().item() == pytest.approx(1 / 0.9, rel=1e-4)


def test_the_same_generator_state_gives_the_same_mask_and_gradient():
    x = torch.ones(7, 5, requires_grad=True)
    first = dropout(x, 0.5, torch.Generator().manual_seed(2))
    assert torch.equal(first, dropout(x, 0.5, torch.Generator().manual_seed(2)))
    first.sum().backward()
    torch.testing.assert_close(x.grad, first.detach())


def test_probability_zero_draws_nothing():
    generator = torch.Generator().manual_seed(0)
    before = generator.get_state()
    x = torch.ones(3)
    assert dropout(x, 0.0, generator) is x
    assert torch.equal(generator.get_state(), before)
