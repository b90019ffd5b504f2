"""The head, and the two ways tokens reach it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from medtokenbudget.config import TrainConfig
from medtokenbudget.errors import RequestError, ShapeError, UnknownNameError
from medtokenbudget.routing import LATS, create_selector, hard_topk, list_selectors, masked_mean
from medtokenbudget.training import MLPHead, RoutedClassifier, create_head, list_heads
from tests.routing.batches import selector_of, tokens_of


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


def test_head_dropout_follows_the_generator():
    head, x = MLPHead(32, 5), torch.randn(4, 32)
    draws = [head(x, torch.Generator().manual_seed(seed)) for seed in (0, 0, 1)]
    assert torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[0], draws[2])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("k", [1, 9, 35])
def test_the_masked_mean_of_training_equals_the_gathered_mean_of_inference(dtype, k):
    tokens = tokens_of()
    patches, scores = tokens.patches.to(dtype), torch.rand(3, 35, generator=torch.Generator().manual_seed(0))
    mask = hard_topk(scores, k)
    gathered = torch.stack([patches[i][mask[i]].float().mean(0) for i in range(3)])
    torch.testing.assert_close(masked_mean(patches, mask.float()), gathered, atol=1e-6, rtol=1e-6)


def test_without_noise_training_and_inference_give_the_same_logits():
    tokens = tokens_of()
    model = RoutedClassifier(create_selector("lats", dim=32), MLPHead(32, 8)).eval()
    trained, step = model.training_pass(tokens, 0.6, TrainConfig())
    logits, selection = model.route(tokens, 0.6)
    assert torch.equal(step.mask.bool(), selection.kept)
    assert selection.k == 21
    torch.testing.assert_close(trained, logits, atol=1e-6, rtol=1e-5)
    assert torch.equal(model(tokens, 0.6), logits)


def test_the_training_pass_gives_raw_scores_and_gradient_to_every_parameter():
    tokens = tokens_of(4)
    model = RoutedClassifier(create_selector("lats", dim=32), MLPHead(32, 8))
    logits, step = model.training_pass(tokens, 0.5, TrainConfig(), torch.Generator().manual_seed(0))
    assert list(step.terms) == ["budget", "diversity", "lesion", "distillation"]
    logits.square().sum().backward()
    missing = [name for name, p in model.named_parameters() if p.grad is None or not bool(torch.isfinite(p.grad).all())]
    assert missing == []
    assert model.selector.scorer.input.weight.grad.abs().sum() > 0


def test_the_training_pass_is_repeatable_from_its_generator():
    tokens = tokens_of()
    model = RoutedClassifier(create_selector("lats", dim=32), MLPHead(32, 8))
    noise = [torch.Generator().manual_seed(seed) for seed in (3, 3, 4)]
    outputs = [model.training_pass(tokens, 0.5, TrainConfig(), generator)[0] for generator in noise]
    assert torch.equal(outputs[0], outputs[1])
    assert not torch.equal(outputs[0], outputs[2])


@pytest.mark.parametrize("name", list_selectors())
def test_every_selector_classifies(name):
    model = RoutedClassifier(selector_of(name), MLPHead(32, 8)).eval()
    assert model(tokens_of(), 0.5, torch.Generator().manual_seed(0)).shape == (3, 8)


def test_a_selector_that_does_not_learn_has_no_training_pass():
    with pytest.raises(RequestError, match="does not learn"):
        RoutedClassifier(create_selector("norm"), MLPHead(32, 8)).training_pass(tokens_of(), 0.5, TrainConfig())


def test_a_head_refuses_tokens_of_another_dimension():
    with pytest.raises(ShapeError, match="dimension 32"):
        MLPHead(32, 8)(torch.rand(2, 16))


@pytest.mark.parametrize("name", list_heads())
def test_every_head_gives_logits_for_any_shape_and_is_built_again_from_its_options(name):
    head = create_head(name, dim=32, classes=5).eval()
    again = create_head(head.name, dim=32, classes=5, **head.options()).eval()
    again.load_state_dict(head.state_dict())
    if head.reads == "tokens":
        tokens = tokens_of(4)
        selection = create_selector("norm").select(tokens, 20)
        assert head.read(selection, tokens.grid).shape == (4, 5)
        assert torch.equal(head.read(selection, tokens.grid), again.read(selection, tokens.grid))
        return
    x = torch.randn(4, 3, 32)
    assert head(x).shape == (4, 3, 5)
    assert torch.equal(head(x), again(x))


def test_a_head_that_does_not_exist_is_an_error_with_the_closest_name():
    with pytest.raises(UnknownNameError, match="Did you mean 'linear'"):
        create_head("linea", dim=4, classes=2)
    with pytest.raises(RequestError, match="Head 'mlp' cannot be created"):
        create_head("mlp", dim=4, classes=2, color="red")
