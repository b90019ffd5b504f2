"""What all heads promise, the two that read a mean, and a selector with its head as one module."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from medtokenbudget.config import TrainConfig
from medtokenbudget.errors import CountError, NonFiniteError, RequestError, ShapeError, UnknownNameError
from medtokenbudget.heads.head import weighted_softmax
from medtokenbudget.routing import LATS, create_selector, hard_topk, list_selectors, masked_mean
from medtokenbudget.runs.method import with_heads
from medtokenbudget.tokens import TokenSet
from medtokenbudget.training import MLPHead, RoutedClassifier, create_head, list_heads
from tests.heads.kept import head_of, kept_of
from tests.routing.batches import seeded, selector_of, softmax, tokens_of

READ_TOKENS = ["abmil", "attentive-probe", "clam-mb", "clam-sb", "transmil"]


@pytest.mark.parametrize("name", list_heads())
def test_every_head_gives_logits_for_any_shape_and_is_built_again_from_its_options(name):
    head = create_head(name, dim=32, classes=5).eval()
    assert head.description.endswith(".")
    assert "\n" not in head.description
    assert (head.reads == "tokens") == (name in READ_TOKENS)
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


@torch.no_grad()
@pytest.mark.parametrize("name", READ_TOKENS)
def test_all_patches_under_a_mask_are_the_kept_tokens_alone(name):
    head, tokens = head_of(name), tokens_of()
    selection = create_selector("norm").select(tokens, 20)
    masked = TokenSet.under(selection.kept.float(), tokens.patches, tokens.grid)
    assert masked.padding.sum(1).tolist() == [15, 15, 15]
    torch.testing.assert_close(head(masked), head.read(selection, tokens.grid), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", READ_TOKENS)
def test_the_order_of_the_tokens_does_not_matter_and_a_gradient_reaches_dropped_patches(name):
    head, kept = head_of(name), kept_of()
    order = torch.randperm(20, generator=seeded())
    turned = replace(kept, tokens=kept.tokens[:, order], positions=kept.positions[:, order])
    torch.testing.assert_close(head(turned), head(kept), atol=1e-5, rtol=1e-4)
    tokens = tokens_of()
    mask = create_selector("norm").select(tokens, 20).kept.float().requires_grad_()
    head(TokenSet.under(mask, tokens.patches, tokens.grid)).square().sum().backward()
    assert bool(torch.isfinite(mask.grad).all())
    assert bool((mask.grad[mask == 0].abs() > 0).any())


def test_the_weighted_softmax_is_finite_whatever_the_dropped_logits_are():
    logits = torch.tensor([[1.0, 2.0, 900.0]], requires_grad=True)
    shares = weighted_softmax(logits, torch.tensor([[1.0, 1.0, 0.0]]))
    assert shares.tolist()[0] == pytest.approx([*softmax([1.0, 2.0]), 0.0])
    shares[0, 0].backward()
    assert bool(torch.isfinite(logits.grad).all())


def test_what_a_head_cannot_read_has_a_message_each():
    head, kept = head_of("clam-sb"), kept_of()
    with pytest.raises(CountError, match=r"'clam-sb' needs at least 16 tokens, got 9. Use a larger budget"):
        head(kept_of(9))
    with pytest.raises(NonFiniteError, match="NaN or infinite"):
        head(replace(kept, tokens=kept.tokens * float("nan")))
    with pytest.raises(ShapeError, match="dimension 32, got 16"):
        head(replace(kept, tokens=kept.tokens[..., :16]))
    with pytest.raises(ShapeError, match="reads tokens, not their mean"):
        head(kept.tokens.mean(1))
    with pytest.raises(ShapeError, match="positions"):
        replace(kept, positions=kept.positions[..., :1])
    with pytest.raises(RequestError, match="multiple of heads"):
        head_of("transmil", heads=5)


def test_methods_are_combined_with_heads():
    assert with_heads(["lats:lesion-first", "center+linear"], ["mlp", "abmil"]) == (
        "lats:lesion-first",
        "lats+abmil:lesion-first",
        "center+linear",
    )
    assert with_heads(["center"], None) == ("center",)
    with pytest.raises(UnknownNameError, match="Did you mean 'abmil'"):
        with_heads(["center"], ["abmill"])


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
    assert not torch.equal(logits, model.training_pass(tokens, 0.5, TrainConfig(), seeded(2))[0])
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
