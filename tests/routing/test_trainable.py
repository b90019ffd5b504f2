"""What learned selectors share: slots, the lesion loss of mixtures, and options that have an effect."""

from __future__ import annotations

import math

import pytest
import torch

from medtokenbudget.errors import CountError, UnknownNameError
from medtokenbudget.routing import create_selector
from medtokenbudget.routing.losses import lesion_mass_loss
from medtokenbudget.runs.method import Method
from tests.routing.batches import tokens_of

N, K = 35, 9


def test_a_soft_merger_has_no_more_tokens_than_slots():
    with pytest.raises(CountError, match=r"'query-pool' has 8 slots, so it cannot give 9 tokens"):
        create_selector("query-pool", dim=32, slots=8).select(tokens_of(), 9)


def test_the_lesion_loss_of_a_soft_merger_is_the_attention_that_misses_the_lesion():
    attention = torch.tensor([[0.5, 0.25, 0.25], [0.1, 0.1, 0.8], [1.0, 0.0, 0.0]])
    lesion = torch.tensor([[True, True, False], [False, False, True], [False, False, False]])
    expected = -(math.log(0.75) + math.log(0.8)) / 2
    assert float(lesion_mass_loss(attention, lesion, torch.tensor([True, True, True]))) == pytest.approx(expected)
    assert float(lesion_mass_loss(attention, lesion, torch.tensor([False, False, True]))) == 0


def test_variants_that_change_a_part_of_lats_belong_to_lats():
    assert str(Method.parse("dynamicvit:mask-free")) == "dynamicvit:mask-free"
    Method.parse("lats:lesion-first-raster")
    with pytest.raises(UnknownNameError, match="variant of dynamicvit"):
        Method.parse("dynamicvit:lesion-first-raster")
