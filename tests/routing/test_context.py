"""The context scorer against its formula as plain loops, and what its training and its options promise."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from medtokenbudget.config import ContextConfig, RouterConfig, TrainConfig, preset
from medtokenbudget.errors import RequestError, ShapeError, UnknownNameError
from medtokenbudget.routing import ContextScorer, create_selector, smooth_scores
from medtokenbudget.routing.selectors import ContextSelector
from medtokenbudget.routing.selectors.context import ContextBlock, turned, turned_back
from medtokenbudget.runs.method import Method
from tests.routing.batches import seeded, selector_of, tokens_of


def mixed(module: nn.Module) -> nn.Module:
    """The module with parameters that are all different from zero and one."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=seeded()) * 0.4)
    return module


@torch.no_grad()
def test_a_block_is_its_formula():
    h, w, c, side = 3, 4, 2, 3
    block = mixed(ContextBlock(c, side, 2))
    x = torch.randn(1, h, w, c, generator=seeded(1))
    padded = torch.nn.functional.pad(x, (0, 0, 1, 1, 1, 1))  # zeros beyond the border
    windows = [(down, right, padded[:, down : down + h, right : right + w]) for down in range(side) for right in range(side)]
    context = block.look.bias + sum(block.look.weight[:, 0, down, right] * window for down, right, window in windows)
    centered = context - context.mean(-1, keepdim=True)
    normed = centered / (centered.square().mean(-1, keepdim=True) + block.norm.eps).sqrt() * block.norm.weight + block.norm.bias
    hidden = normed @ block.up.weight.T + block.up.bias
    hidden = 0.5 * hidden * (1 + torch.erf(hidden / math.sqrt(2)))
    expected = x + block.scale * (hidden @ block.down.weight.T + block.down.bias)
    torch.testing.assert_close(block(x), expected, atol=1e-5, rtol=1e-4)


def test_the_scorer_has_the_size_that_is_stated():
    def count(dim: int) -> int:
        return sum(parameter.numel() for parameter in ContextScorer(dim).parameters())

    # The linear layer, three blocks of convolution, LayerNorm, MLP and scale, and the output.
    block = (25 * 128 + 128) + 2 * 128 + (128 * 256 + 256) + (256 * 128 + 128) + 128
    assert count(192) == (192 * 128 + 128) + 3 * block + 129 == 233_729
    assert count(384) == 258_305


@torch.no_grad()
def test_a_patch_is_scored_by_the_patches_around_it_and_by_no_other():
    scorer = mixed(ContextScorer(8, ContextConfig(channels=4, blocks=2, kernel=3)))
    tokens = tokens_of(1, (9, 9), dim=8)
    before = scorer.logits(tokens).view(9, 9)
    patches = tokens.patches.clone()
    patches[0, 4 * 9 + 4] += 5  # the patch in the middle
    moved = scorer.logits(replace(tokens, patches=patches)).view(9, 9) != before
    reach = torch.zeros(9, 9, dtype=torch.bool)
    reach[2:7, 2:7] = True  # two blocks of 3 x 3 reach two patches far
    assert torch.equal(moved, reach)


@pytest.mark.parametrize("turn", range(8))
def test_a_turned_grid_gives_the_scores_of_the_turned_image(turn):
    scorer = mixed(ContextScorer(8, ContextConfig(channels=4, blocks=1, kernel=3)))
    tokens = tokens_of(2, (5, 7), dim=8)
    field = tokens.patches.unflatten(1, (5, 7))
    again = turned(field, turn)
    assert torch.equal(turned_back(again, turn), field)
    grid = (again.shape[1], again.shape[2])
    assert grid == ((7, 5) if turn & 4 else (5, 7))
    inside = scorer.logits(tokens, turn=turn).detach()
    outside = scorer.logits(tokens_of(2, grid, dim=8, patches=again.flatten(1, 2))).detach()
    torch.testing.assert_close(turned_back(outside.view(2, *grid, 1), turn).flatten(1), inside)
    field = torch.arange(9.0).view(1, 3, 3, 1)
    assert len({tuple(turned(field, turn).flatten().tolist()) for turn in range(8)}) == 8


def test_training_turns_the_grid_and_evaluation_does_not():
    selector, tokens = selector_of("context"), tokens_of()
    selector.train()
    drawn = {tuple(selector.logits(tokens, seeded(seed))[0].tolist()) for seed in range(12)}
    assert len(drawn) > 3
    assert torch.equal(selector.logits(tokens, seeded(1)), selector.logits(tokens, seeded(1)))
    assert torch.equal(selector.score(tokens), selector.eval().score(tokens))
    still = ContextSelector(32, turns=False).train()
    assert torch.equal(still.logits(tokens, seeded(1)), still.logits(tokens, seeded(2)))


def test_a_step_learns_from_all_patches_whatever_the_sample():
    selector, tokens = selector_of("context").eval(), tokens_of()
    step = selector.training_pass(tokens, 0.3, preset("lesion-first", patches=5), seeded(), route=False)
    assert step.pooled is None
    assert step.scores.shape == tokens.lesion.shape
    expected = torch.nn.functional.binary_cross_entropy(step.scores, tokens.lesion.float())
    torch.testing.assert_close(step.terms["lesion"], expected)


@torch.no_grad()
def test_scores_are_smoothed_only_on_request():
    tokens = tokens_of()
    torch.manual_seed(0)
    plain = ContextSelector(32)
    smoothed = ContextSelector(32, smooth=3)
    smoothed.load_state_dict(plain.state_dict())
    torch.testing.assert_close(plain.score(tokens), torch.sigmoid(plain.eval().logits(tokens)))
    torch.testing.assert_close(smoothed.score(tokens), smooth_scores(plain.score(tokens), tokens.grid, 3, "exclude"))


def test_the_smoothing_is_that_of_the_scorer_and_the_rest_that_of_the_router():
    config = TrainConfig(context=ContextConfig(smooth=3), router=RouterConfig(minimum=4, temperature=0.7, smooth=5))
    router = ContextSelector.from_config(32, config).router
    assert (router.smooth, router.minimum, router.temperature) == (3, 4, 0.7)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kernel": 4}, "`context.kernel` must be odd and at least 1, got 4"),
        ({"blocks": 0}, "`context.blocks` must be at least 1, got 0"),
        ({"dropout": 1.0}, "`context.dropout` must be at least 0 and below 1, got 1.0"),
        ({"color": "red"}, "Selector 'context' cannot be created with color: its options are blocks, channels, "),
        ({"min_steps": 9}, "Selector 'context' cannot be created with min_steps: its options are blocks, channels, "),
    ],
)
def test_impossible_sizes_and_options_without_effect_are_rejected(options, message):
    with pytest.raises(RequestError, match=message):
        create_selector("context", dim=32, **options)
    with pytest.raises(ShapeError, match="dimension 16, but the batch has 32"):
        ContextScorer(16).logits(tokens_of())


def test_variants_of_the_context_scorer_change_one_part():
    base = preset("lesion-first")
    assert Method.parse("context:lesion-first").config(base) == base
    assert not Method.parse("context:lesion-first-fixed-grid").config(base).context.turns
    assert Method.parse("context:lesion-first-smoothed").config(base).context.smooth == 3
    for text in ("lats:lesion-first-smoothed", "context:lesion-first-raster"):
        with pytest.raises(UnknownNameError, match="variant of"):
            Method.parse(text)
