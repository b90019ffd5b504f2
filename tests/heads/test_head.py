"""What all heads promise: names, options, weights, padding, and errors that say what to do."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from medtokenbudget.errors import CountError, NonFiniteError, RequestError, ShapeError, UnknownNameError
from medtokenbudget.heads.head import weighted_softmax
from medtokenbudget.routing import create_selector
from medtokenbudget.runs.method import with_heads
from medtokenbudget.tokens import TokenSet
from medtokenbudget.training import create_head, list_heads
from tests.heads.kept import head_of, kept_of
from tests.routing.batches import seeded, softmax, tokens_of

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
