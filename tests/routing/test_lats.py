"""The scorer against the paper's text written down plainly, and its switches."""

from __future__ import annotations

import pytest
import torch

from benchmarks.routing import PlainLATS
from medtokenbudget.config import SIGNALS, LATSConfig, TrainConfig, preset
from medtokenbudget.errors import MissingSignalError, RequestError, ShapeError, UnknownNameError
from medtokenbudget.routing import LATS, LATSSelector, TokenBatch
from tests.routing.batches import tokens_of


def count(module: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def fused(scorer: LATS, tokens: TokenBatch, *more: object, **options: object) -> torch.Tensor:
    """Scores by the fused form, which training and inference use."""
    return torch.sigmoid(scorer.logits(tokens, *more, **options))


def test_the_scorer_has_the_papers_number_of_parameters():
    assert count(LATS(768)) == 512_049
    assert count(PlainLATS(768)) == 512_049


@pytest.mark.parametrize("signals", [(), ("attention",), ("norm", "contrast"), SIGNALS])
@pytest.mark.parametrize("neighborhood", ["raster", "grid4", "grid8"])
def test_the_fused_form_equals_the_papers_forward_for_every_set_of_signals(signals, neighborhood):
    tokens = tokens_of(2, (6, 5), 64)
    scorer = LATS(64, LATSConfig(hidden=48, signals=signals, neighborhood=neighborhood)).eval()
    torch.testing.assert_close(fused(scorer, tokens), scorer(tokens), atol=1e-6, rtol=0)


def test_scores_and_gradients_equal_another_implementation_of_the_paper():
    torch.manual_seed(0)
    tokens = tokens_of(2, (4, 4), 32)
    scorer = LATS(32, LATSConfig(hidden=24)).eval()
    plain = PlainLATS(32, hidden=24).load_from(scorer.state_dict()).eval()
    torch.testing.assert_close(scorer(tokens), plain(tokens), atol=1e-6, rtol=0)
    fused(scorer, tokens).square().sum().backward()
    plain(tokens).square().sum().backward()
    named = dict(plain.named_parameters())
    pairs = [(scorer.contrast, "contrast"), (scorer.input, "mlp.0"), (scorer.hidden[0], "mlp.1"), (scorer.output, "mlp.17")]
    for module, name in pairs:
        torch.testing.assert_close(module.weight.grad, named[f"{name}.weight"].grad, atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(module.bias.grad, named[f"{name}.bias"].grad, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("left_out", SIGNALS)
def test_a_signal_switched_off_at_construction_has_no_parameters_and_no_influence(left_out):
    signals = [name for name in SIGNALS if name != left_out]
    scorer = LATS(32, LATSConfig(hidden=16, signals=signals)).eval()
    missing = {"attention": 16, "norm": 16, "contrast": 2 * 16 + 32 * 2 + 2}[left_out]
    assert count(scorer) == count(LATS(32, LATSConfig(hidden=16))) - missing
    tokens = tokens_of()
    if left_out == "attention":
        without = tokens_of(attention_entropy=None)
        assert torch.equal(fused(scorer, tokens), fused(scorer, without))
        assert LATSSelector(32, signals=signals).requires == ()


@pytest.mark.parametrize("left_on", [(), ("norm",), ("attention", "contrast"), SIGNALS])
def test_a_signal_switched_off_at_call_time_enters_as_zeros(left_on):
    tokens = tokens_of()
    scorer = LATS(32, LATSConfig(hidden=16)).eval()
    zeroed = LATS(32, LATSConfig(hidden=16)).eval()
    zeroed.load_state_dict(scorer.state_dict())
    with torch.no_grad():
        if "attention" not in left_on:
            zeroed.input.weight[:, 32] = 0
        if "norm" not in left_on:
            zeroed.input.weight[:, 33] = 0
        if "contrast" not in left_on:
            zeroed.input.weight[:, 34:] = 0
        torch.testing.assert_close(fused(scorer, tokens, signals=left_on), zeroed(tokens), atol=1e-6, rtol=0)


@pytest.mark.parametrize("neighborhood", ["raster", "grid8"])
def test_scores_of_some_patches_are_those_of_the_whole_image(neighborhood):
    tokens = tokens_of()
    scorer = LATS(32, LATSConfig(hidden=16, neighborhood=neighborhood)).eval()
    at = torch.stack([torch.randperm(tokens.n)[:5] for _ in range(len(tokens))])
    torch.testing.assert_close(scorer.logits(tokens, at=at), scorer.logits(tokens).take_along_dim(at, 1), atol=1e-5, rtol=0)


def test_dropout_follows_the_generator_in_both_forms_and_is_off_in_evaluation():
    tokens = tokens_of()
    scorer = LATS(32)
    draws = [fused(scorer, tokens, torch.Generator().manual_seed(seed)) for seed in (0, 0, 1)]
    assert torch.equal(draws[0], draws[1])
    torch.testing.assert_close(scorer(tokens, torch.Generator().manual_seed(0)), draws[0], atol=1e-6, rtol=0)
    assert not torch.equal(draws[0], draws[2])
    scorer.eval()
    assert torch.equal(fused(scorer, tokens), fused(scorer, tokens))


def test_bf16_autocast_stays_near_fp32():
    tokens = tokens_of(2, (4, 4), 64)
    scorer = LATS(64).eval()
    with torch.autocast("cpu", torch.bfloat16):
        rough = fused(scorer, tokens)
    assert rough.dtype == torch.float32
    torch.testing.assert_close(rough, fused(scorer, tokens), atol=0.05, rtol=0)


def test_bad_scorers_and_batches_are_refused():
    with pytest.raises(ShapeError, match="dimension 32"):
        LATS(32)(tokens_of(dim=16))
    with pytest.raises(MissingSignalError, match="attention_entropy"):
        LATS(32)(tokens_of(attention_entropy=None))
    with pytest.raises(UnknownNameError, match="Did you mean 'contrast'"):
        LATS(32, LATSConfig(signals=("contrasts",)))
    with pytest.raises(UnknownNameError):
        fused(LATS(32, LATSConfig(signals=("norm",))), tokens_of(), signals=("attention",))
    with pytest.raises(RequestError, match="several values"):
        LATS(32, LATSConfig(signals="norm"))
    with pytest.raises(RequestError, match="dropout"):
        LATS(32, LATSConfig(dropout=1.0))
    with pytest.raises(RequestError, match="at least 1"):
        LATS(32, LATSConfig(layers=0))


def test_the_selector_ranks_without_dropout_by_scores_that_are_smoothed_with_zeros_beyond_the_border():
    tokens = tokens_of()
    beyond = torch.nn.ZeroPad2d(1)
    for selector in (LATSSelector(32), LATSSelector.from_config(32, TrainConfig()), LATSSelector.from_config(32, preset("paper"))):
        padded = beyond(selector.scorer.eval()(tokens).reshape(3, 5, 7))
        expected = sum(padded[:, down : down + 5, right : right + 7] for down in range(3) for right in range(3)) / 9
        torch.testing.assert_close(selector.train().score(tokens), expected.flatten(1))


def test_the_selector_toggles_signals_and_back():
    tokens = tokens_of()
    selector = LATSSelector(32)
    before = selector.score(tokens)
    assert not torch.equal(selector.toggle(("norm",)).score(tokens), before)
    assert torch.equal(selector.toggle(None).score(tokens), before)
    assert torch.equal(selector.ablate("no-signals").score(tokens), selector.toggle(()).score(tokens))
    for signal in ("attention", "norm", "contrast"):
        assert torch.equal(selector.ablate(f"{signal}-only").score(tokens), selector.toggle((signal,)).score(tokens))
    assert torch.equal(selector.ablate(None).score(tokens), before)
