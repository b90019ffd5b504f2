"""Heads that read the mean of the kept tokens."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from medtokenbudget.errors import ShapeError
from medtokenbudget.routing import LATS, create_selector
from medtokenbudget.training import MLPHead, RoutedClassifier, create_head


def count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def test_the_head_and_the_whole_have_the_papers_number_of_parameters():
    assert count(MLPHead(768, 8)) == 231_560
    assert count(RoutedClassifier(create_selector("lats", dim=768), MLPHead(768, 8))) == 743_609 == count(LATS(768)) + 231_560


def test_the_head_is_the_papers_stack():
    head = MLPHead(32, 5, hidden=(16, 8)).eval()
    plain = nn.Sequential(
        head.first, head.first_norm, nn.GELU(), nn.Dropout(0.1), head.second, head.second_norm, nn.GELU(), head.output
    ).eval()
    x = torch.randn(4, 32)
    torch.testing.assert_close(head(x), plain(x))
    assert head(torch.randn(4, 3, 32)).shape == (4, 3, 5)


def test_the_linear_head_is_one_weighted_sum_of_the_mean_for_each_class():
    head, pooled = create_head("linear", 4, 3), torch.randn(2, 4)
    weight, bias = head.output.weight.tolist(), head.output.bias.tolist()
    expected = [[sum(w * x for w, x in zip(weight[c], row)) + bias[c] for c in range(3)] for row in pooled.tolist()]
    torch.testing.assert_close(head(pooled), torch.tensor(expected))


def test_head_dropout_follows_the_generator_and_another_dimension_is_refused():
    head, x = MLPHead(32, 5), torch.randn(4, 32)
    draws = [head(x, torch.Generator().manual_seed(seed)) for seed in (0, 0, 1)]
    assert torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[0], draws[2])
    with pytest.raises(ShapeError, match="dimension 32"):
        MLPHead(32, 8)(torch.rand(2, 16))
