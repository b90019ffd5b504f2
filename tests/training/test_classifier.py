"""A selector and its head as one module: the two ways tokens reach the head."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from medtokenbudget.config import TrainConfig
from medtokenbudget.errors import RequestError
from medtokenbudget.routing import create_selector, hard_topk, list_selectors, masked_mean
from medtokenbudget.tokens import TokenSet
from medtokenbudget.training import MLPHead, RoutedClassifier, create_head
from tests.routing.batches import selector_of, tokens_of


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def head_of(name: str, classes: int = 3, **options: Any) -> Any:
    torch.manual_seed(0)
    return create_head(name, dim=32, classes=classes, **options).eval()


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


def test_the_training_pass_follows_from_its_generator_and_gives_gradient_to_every_parameter():
    tokens = tokens_of(4)
    model = RoutedClassifier(create_selector("lats", dim=32), MLPHead(32, 8))
    logits, step = model.training_pass(tokens, 0.5, TrainConfig(), seeded())
    assert torch.equal(logits, model.training_pass(tokens, 0.5, TrainConfig(), seeded())[0])
    assert not torch.equal(logits, model.training_pass(tokens, 0.5, TrainConfig(), seeded(1))[0])
    assert list(step.terms) == ["budget", "diversity", "lesion", "distillation"]
    logits.square().sum().backward()
    missing = [name for name, p in model.named_parameters() if p.grad is None or not bool(torch.isfinite(p.grad).all())]
    assert missing == []
    assert model.selector.scorer.input.weight.grad.abs().sum() > 0


def test_a_selector_that_does_not_learn_has_no_training_pass():
    with pytest.raises(RequestError, match="does not learn"):
        RoutedClassifier(create_selector("norm"), MLPHead(32, 8)).training_pass(tokens_of(), 0.5, TrainConfig())


@pytest.mark.parametrize("name", list_selectors())
def test_every_selector_gives_tokens_with_positions_on_the_grid_and_classifies(name):
    tokens = tokens_of()
    kept = TokenSet.of(selector_of(name).select(tokens, 17, seeded()), tokens.grid)
    assert kept.tokens.shape[:2] == kept.weights.shape == kept.positions.shape[:2]
    assert bool((kept.positions >= 0).all())
    assert bool((kept.positions <= torch.tensor([4.0, 6.0])).all())
    for head in ("mlp", "transmil"):
        assert RoutedClassifier(selector_of(name), head_of(head)).eval()(tokens, 0.5, seeded()).shape == (3, 3)


@pytest.mark.parametrize("selector", [name for name in list_selectors() if selector_of(name).learns])
def test_a_learned_selector_trains_with_a_head_that_reads_tokens(selector):
    tokens = replace(tokens_of(), label=torch.tensor([0, 1, 1]))
    model = RoutedClassifier(selector_of(selector), head_of("clam-sb", 2)).train()
    if selector == "dynamicvit-package":
        with pytest.raises(RequestError, match="gives no tokens in its training pass"):
            model.training_pass(tokens, 0.5, TrainConfig(), seeded())
        return
    logits, step = model.training_pass(tokens, 0.5, TrainConfig(), seeded())
    assert "head" in step.terms
    (logits.square().sum() + step.terms["head"]).backward()
    learned = [parameter.grad for parameter in model.selector.parameters() if parameter.grad is not None]
    # These learn from a classifier of their own alone.
    assert bool(learned) == (selector not in ("abmil-attention", "cropr", "grad-token", "gradcam-norm1", "relevance"))
